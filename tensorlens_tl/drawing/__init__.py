"""Pictures of arrays and text: HTML that needs no network, matplotlib figures, terminal tables. Knows no result."""

from tensorlens_tl.drawing.figure import Axes as Axes
from tensorlens_tl.drawing.page import Picture

__all__ = ["Picture"]
