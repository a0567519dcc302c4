"""How results show themselves: pictures for notebooks and pages, and one report about a prediction.

Results know nothing of this room: their ``_repr_html_`` and ``plot`` only call it when somebody looks.

* `compare`: several methods side by side for one prompt;
* `explain`: everything about one prediction as one page;
* `Picture`: what both return; a notebook shows it, ``.save("page.html")`` keeps it.
"""

from tensorlens_tl.report.document import explain
from tensorlens_tl.report.page import Picture
from tensorlens_tl.report.results import compare

__all__ = ["Picture", "compare", "explain"]
