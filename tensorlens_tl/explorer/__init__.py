"""The explorer: a local page where one types a prompt, clicks, and sees exact sums.

`Session` answers the page's questions by the library's public functions and knows nothing of the web; a server shows
it to the browser of this machine alone; `explore` opens the page from Python. Needs the extra ``[explore]``.
"""

import webbrowser
from collections.abc import Callable
from html import escape
from importlib.util import find_spec
from typing import Any

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.explorer.session import Session

__all__ = ["Explorer", "Session", "check_installed", "explore"]


def check_installed() -> None:
    """Raise `InvalidInputError` where the extra ``[explore]`` is not installed."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise InvalidInputError(
            f"explore needs {' and '.join(missing)}, not installed here: in a clone, pip install -e '.[explore]'."
        )


class Explorer:
    """A page that is open; `explore` returns one.

    Attributes:
        url: its address, with the token that it needs.
    """

    def __init__(self, session: Session, port: int) -> None:
        check_installed()
        from tensorlens_tl.explorer.server import Server

        self._session = session
        self._server = Server(session, port)
        self.url = self._server.url

    def __repr__(self) -> str:
        return f"Explorer({self.url})"

    def _repr_html_(self) -> str:
        """The page inside a notebook that runs on this machine."""
        return (
            f'<iframe src="{escape(self.url)}" title="Explorer" style="width:100%;height:46rem;border:0"></iframe>'
            f'<p><a href="{escape(self.url)}" target="_blank">Open in a tab</a></p>'
        )

    @property
    def selection(self) -> dict[str, Any]:
        """What the page asked last: prompt, position, target, head; empty before the first question."""
        question = self._session.question
        return {} if question is None else dict(vars(question))

    @property
    def result(self) -> Any:
        """The library's result behind the last view, such as an `Attribution` or `Terms`; None before the first."""
        return self._session.last

    def start(self) -> "Explorer":
        """Serve in the background."""
        self._server.start()
        return self

    def run(self) -> None:
        """Serve until Ctrl-C."""
        self._server.run()

    def close(self) -> None:
        """Stop serving."""
        self._server.close()


@checked_names
def explore(
    model: Any,
    tuned: Any = None,
    *,
    name: str = "",
    dictionaries: Any = None,
    labels: Any = None,
    port: int = 0,
    tab: bool = False,
    images: Any = None,
    processor: Callable[..., Any] | None = None,
) -> Explorer:
    """Open the explorer: a local page for prompts, tokens, heads and two runs; the last line of a cell shows it inline.

    Args:
        model: a `HookedTransformer` or a `TransformerBridge`.
        tuned: a second model of the same architecture; comparisons of two prompts are then between the two models.
        name: what the page calls the model.
        dictionaries: sparse autoencoders of the model, one or several: the page shows their features.
        labels: what their features are called: for each dictionary what `circuits.feature_labels` takes.
        port: where it listens, on this machine only; 0 takes a free port.
        tab: open it in a tab of the browser.
        images: of a model of images: those that the page offers, `[image, channel, height, width]`, prepared as the
            model reads them. Files can be uploaded as well.
        processor: the model's image processor, which prepares uploaded files: called with a picture and
            ``return_tensors="pt"`` it returns ``{"pixel_values": …}``. None takes the model's, where it has one; else
            files are resized to the model's size, with values of 0 to 1.

    Returns:
        The open page, with `selection` and `result` for what it shows, and `close`.

    Raises:
        InvalidInputError: the extra ``[explore]`` is not installed, the port is taken, or `images` is no batch of
            images.

    >>> page = tlens.explore(model)  # doctest: +SKIP
    >>> page.result  # doctest: +SKIP
    Attribution('tensorlens', "logit of ' raised' − ' not'", batch=1, query=1, key=35, gap=3.1e-07)
    """
    inputs: dict[str, Any] = {"images": images, "processor": processor}
    session = Session(model, tuned, name=name, dictionaries=dictionaries, labels=labels, **inputs)
    page = Explorer(session, port).start()
    if tab:
        webbrowser.open(page.url)
    return page
