"""Pages about one prompt: several methods side by side, or everything about a prediction.

* `compare`: several methods side by side for one prompt;
* `explain`: everything about one prediction as one page;
* `Picture`: what both return; a notebook shows it, ``.save("page.html")`` keeps it.
"""

from tensorlens_tl.drawing.page import Picture
from tensorlens_tl.report.compare import compare
from tensorlens_tl.report.document import explain

__all__ = ["Picture", "compare", "explain"]
