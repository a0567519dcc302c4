"""Pages about one prompt: several methods side by side, or everything about a prediction.

* `compare`: several methods side by side for one prompt;
* `explain`: everything about one prediction as one page;
* `explain_generation`: everything about a text that a model wrote;
* `Picture`: what both return; a notebook shows it, ``.save("page.html")`` keeps it.
"""

from tensorlens_tl.drawing.page import Picture
from tensorlens_tl.report.compare import compare
from tensorlens_tl.report.document import explain
from tensorlens_tl.report.generated import explain_generation
from tensorlens_tl.report.prediction import Prediction as Prediction, predict as predict

__all__ = ["Picture", "compare", "explain", "explain_generation"]
