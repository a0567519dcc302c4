"""The explorer: a local page where one types a prompt, clicks, and sees exact sums.

`Session` answers the page's questions by the library's public functions and knows nothing of the web; a server shows
it to the browser of this machine alone; `explore` opens the page from Python. Needs the extra ``[explore]``.
"""

from tensorlens_tl.explorer.opening import Explorer, check_installed, explore
from tensorlens_tl.explorer.session import Session

__all__ = ["Explorer", "Session", "check_installed", "explore"]
