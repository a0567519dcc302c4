"""What every result can do: show itself, be drawn, become a table, and go into a file whose name says what it is.

| a name ends in | the file is |
| --- | --- |
| nothing, ``.safetensors`` | the result itself, which `load` reads back |
| ``.html`` | a page that opens without a network |
| ``.csv``, ``.parquet``, ``.json`` | the table of `to_dataframe` |
| ``.pdf``, ``.svg``, ``.png`` | the figure that `plot` draws |
"""

import io
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from inspect import Parameter, signature, unwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from tensorlens_tl._arguments import nearest, whole_number
from tensorlens_tl.drawing import Axes, figure, page
from tensorlens_tl.errors import InvalidInputError, WrongCallError
from tensorlens_tl.results.entry import shown_target
from tensorlens_tl.results.storage import LOADABLE, Stored, replacing

if TYPE_CHECKING:
    import pandas as pd


class Result(Stored, ABC):
    """A result: it shows itself, becomes a table and goes into a file, with the same arguments in every class.

    A class adds its fields and its table, and draws by `_html`, `_figure` and `_print`, whose arguments are its
    choices.
    """

    LOADABLE: ClassVar = LOADABLE
    """What the name of a file ends in that `load` reads back."""
    HEADING: ClassVar = ""
    """The title of a page, with a place for what is explained."""
    PRINTED: ClassVar = 10
    """How many parts `show` prints where it is not said."""
    DRAWN: ClassVar = 15
    """How many parts a picture has where it is not said."""
    DRAWN_ARE_LISTED: ClassVar = True
    """Whether `show` lists what a picture draws, so that its k is that of both: a graph draws edges and lists nodes."""

    def __init_subclass__(cls) -> None:
        """Give `show` and its like the signature of this class: what can be chosen of it, with types and defaults."""
        super().__init_subclass__()
        for name, hook, k in cls._showing():
            setattr(cls, name, _with_choices(unwrap(getattr(cls, name)), cls._choices(hook), k))

    @classmethod
    def _showing(cls) -> list[tuple[str, str, int]]:
        """What shows something, the function whose arguments say what can be chosen, and the default of k."""
        return [("to_html", "_html", cls.DRAWN), ("plot", "_figure", cls.DRAWN), ("show", "_print", cls.PRINTED)]

    @abstractmethod
    def to_dataframe(self) -> "pd.DataFrame":
        """A long table, one line per score."""

    @abstractmethod
    def _html(self, *args: Any, **choice: Any) -> str:
        """The picture of k parts, without the style that a page needs once."""

    @abstractmethod
    def _figure(self, *args: Any, **choice: Any) -> Any:
        """The figure of k parts for print, drawn on `ax`."""

    @abstractmethod
    def _print(self, *args: Any, **choice: Any) -> None:
        """Print the table of k parts."""

    def to_html(self, k: int | None = None, *, style: bool = True, **choice: Any) -> str:
        """Return the picture as an HTML fragment.

        Args:
            k: how many parts, the largest; a matrix has all.
            style: include the style and script that a page needs once.
            choice: what to show, as the class says. `query`: counted over the prompt's real ones, or a text. `batch`: a
                prompt; None for the mean, or the first few where each prompt has its own parts. `title`: of the
                picture.

        Raises:
            InvalidInputError: k below 1, or no such choice, query or prompt.
        """
        body = self._html(**{"k": self.DRAWN} | self._chosen("to_html", "_html", k, choice))
        return page.head(body) + body if style else body

    def plot(self, k: int | None = None, *, ax: Axes | None = None, **choice: Any) -> Axes | list[Axes]:
        """Draw the picture with matplotlib, for print (extra ``plot``); returns the axes, of several panels a list.

        Args:
            k, choice: as in `to_html`; bars of a mean over prompts have 95 % bootstrap intervals.
            ax: draw here; None makes a figure of fitting size.

        Raises:
            InvalidInputError: nothing to draw, or as in `to_html`.
            ImportError: matplotlib is not installed.

        >>> tlens.attribute(frozen, " value").plot()
        <Axes: ...>
        """
        chosen = self._chosen("plot", "_figure", k, choice)
        return self._figure(**{"k": self.DRAWN, "ax": ax} | chosen)

    def show(self, k: int | None = None, **choice: Any) -> None:
        """Display the picture in a notebook; elsewhere print the k largest parts, all others in one line where they
        sum.

        Arguments and errors are those of `to_html`.
        """
        chosen = self._chosen("show", "_print", k, choice)
        drawn = [name for name in self._choices("_html") if name != "k" or self.DRAWN_ARE_LISTED]
        of_picture = {name: value for name, value in chosen.items() if name in drawn}
        if not page.display_in_notebook(lambda: self.to_html(**of_picture)):
            self._print(**{"k": self.PRINTED} | chosen)

    def _chosen(self, name: str, hook: str, k: int | None, choice: Mapping[str, Any]) -> dict[str, Any]:
        """What a call of a function chooses; k only where it is said."""
        choices = self._choices(hook)
        known = ["k", *choices]
        wrong = next((one for one in choice if one not in known), None)
        if wrong is not None:
            raise WrongCallError(
                f"{name}: {wrong!r} is nothing that can be chosen of this {type(self).__name__}; pass "
                f"{', '.join(dict.fromkeys(known))}.{nearest(wrong, known)}"
            )
        needed = [one.name for one in choices.values() if one.default is Parameter.empty and one.name != "k"]
        lacking = next((one for one in needed if one not in choice), None)
        if lacking is not None:
            of = type(self).__name__
            raise WrongCallError(f"{name}: of a {of} it needs {lacking}=; pass one, as in {lacking}=0.")
        if k is None:
            return dict(choice)
        return {**choice, "k": whole_number("k", k, least=1, why="how many parts to show")}

    @classmethod
    def _choices(cls, hook: str) -> dict[str, Parameter]:
        """What can be chosen of what a function shows: its arguments."""
        parameters = signature(getattr(cls, hook)).parameters.values()
        several = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        return {one.name: one for one in parameters if one.name not in ("self", "ax") and one.kind not in several}

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the table of `to_dataframe` as CSV, without row numbers; without a path, return it as text.

        >>> tlens.attribute(frozen, " value").to_csv().splitlines()[0]
        'batch,query,key,query_token,key_token,kind,generated,method,target,score'
        """
        return self.to_dataframe().to_csv(path, index=False)

    @property
    def heading(self) -> str:
        """The title of its page."""
        if self.HEADING:
            return self.HEADING.format(shown_target(getattr(self, "target")))  # noqa: B009
        return repr(self)

    def _panel(self, *parts: str, title: str = "", notes: Sequence[str] = ()) -> str:
        """Pictures below a title, which is the heading by default; notes, and what it depends on, in one line."""
        provenance: Mapping[str, str] = getattr(self, "provenance", {})
        facts = [f"{name.replace('_', ' ')}: {fact}" for name, fact in provenance.items()]
        return page.panel(title or self.heading, *parts, notes=" · ".join(filter(None, [*notes, *facts])))

    def _repr_html_(self) -> str:
        return self.to_html()

    def save(self, path: str | os.PathLike[str], *, batch: int | None = None) -> Path:
        """Write one file, of the kind that its name ends in; an older file is replaced in one step. Returns the path.

        Args:
            path: without a suffix, or in ``.safetensors``: what `load` reads (JSON facts, never pickle). ``.html`` is a
                page, ``.csv``, ``.parquet`` and ``.json`` are tables, ``.pdf``, ``.svg`` and ``.png`` figures.
            batch: the prompt of a figure, as in `plot`.

        Raises:
            InvalidInputError: no such folder, ending or prompt; `batch` without a figure that takes it; a field whose
                kind is not its class's, which would not load.
            ImportError: a figure, and matplotlib is not installed.
            OSError: it cannot be written, as on a full disk.

        >>> import pathlib, tempfile
        >>> result = tlens.attribute(frozen, " value")
        >>> [result.save(pathlib.Path(tempfile.mkdtemp()) / name).name for name in ("a", "a.html", "a.csv")]
        ['a', 'a.html', 'a.csv']
        """
        path = Path(path)
        check_file(path, type(self))
        suffix = ending(path)
        if batch is not None:
            if suffix not in FIGURES:
                raise InvalidInputError(
                    f"save: batch= chooses the prompt of a figure, and {path.name!r} is none. Leave it out, or use one "
                    f"of {', '.join(FIGURES)}."
                )
            if "batch" not in self._choices("_figure"):
                raise InvalidInputError(
                    f"save: the figure of {type(self).__name__} has no prompt to choose; leave out batch=."
                )
            content = _drawn(suffix, self, batch=batch)
        elif suffix in self.LOADABLE:
            return self._keep(path)
        else:
            content = self._writers()[suffix](self)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        return path

    @classmethod
    def _writers(cls) -> Mapping[str, Callable[[Any], bytes]]:
        """What each suffix writes, besides the file that `load` reads back."""
        return WRITERS


def _with_choices(shared: Callable[..., Any], choices: Mapping[str, Parameter], k: int) -> Callable[..., Any]:
    """A function that all classes share, with a signature that names what one of them lets choose."""

    @wraps(shared)
    def shows(self: Result, *args: Any, **options: Any) -> Any:
        return shared(self, *args, **options)

    stated = signature(shared)
    first = [one for one in stated.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    first = [one.replace(default=k) if one.name == "k" else one for one in first]
    named = [one.replace(kind=Parameter.KEYWORD_ONLY) for name, one in choices.items() if name != "k"]
    setattr(shows, "__signature__", stated.replace(parameters=[*first, *named]))  # noqa: B010
    return shows


def ending(path: Path) -> str:
    """What the name of a file ends in, in small letters; with what comes before ``.gz``, as in ``.json.gz``."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return Path(path.stem).suffix.lower() + suffix
    return suffix


def check_file(path: str | os.PathLike[str], kind: type[Result] = Result, name: str = "save") -> None:
    """Raise `InvalidInputError` for a path that a result cannot be saved to: a folder, in no folder, an unknown ending.

    `name` is the argument or function in the message.
    """
    path = Path(path)
    check_folder(path, name)
    known = dict.fromkeys([*kind.LOADABLE, *kind._writers()])
    if ending(path) not in known:
        endings = ", ".join(filter(None, known))
        if "" in known:
            endings += ", or no ending"
        raise InvalidInputError(
            f"{name}: {path.name!r}: a result cannot be saved as {ending(path)!r}. Use one of {endings}."
        )


def check_folder(path: Path, name: str) -> None:
    """Raise `InvalidInputError` for a file that cannot be written: it is a folder, or lies in none."""
    if path.is_dir():
        raise InvalidInputError(f"{name}: cannot write {path}, that is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise InvalidInputError(f"{name}: cannot write {path}, there is no folder {path.parent}.")


SAME_BYTES: Any = {"svg.hashsalt": "tensorlens", "pdf.fonttype": 42}
"""Settings of matplotlib: the same figure gives the same file, and text of a PDF stays text."""
DOTS = 200
"""Of a PNG, to the inch."""
NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def _drawn(suffix: str, result: Result, **chosen: Any) -> bytes:
    """The figure of a result, of what was chosen as `plot` takes it."""
    from matplotlib import pyplot, rc_context

    axes = result.plot(**chosen)
    drawn: Any = (axes[0] if isinstance(axes, list) else axes).figure
    file = io.BytesIO()
    figure.use_fonts_with_letters(drawn)
    with rc_context(SAME_BYTES), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # said above, by script
        options = {"bbox_inches": "tight", "metadata": NO_DATE.get(suffix), "dpi": DOTS}
        drawn.savefig(file, format=suffix.removeprefix("."), **options)
    pyplot.close(drawn)
    return file.getvalue()


FIGURES = (".pdf", ".svg", ".png")
WRITERS: Mapping[str, Callable[[Any], bytes]] = {
    ".html": lambda result: page.page(result.heading, result.to_html(style=False)).encode(),
    ".csv": lambda result: result.to_csv().encode(),
    ".parquet": lambda result: result.to_dataframe().to_parquet(index=False),
    ".json": lambda result: (
        result.to_dataframe().to_json(orient="records", double_precision=15, force_ascii=False).encode()
    ),
    **{suffix: partial(_drawn, suffix) for suffix in FIGURES},
}
RESULT_ENDINGS = (*Result.LOADABLE, *WRITERS)
"""What the name of any result's file may end in."""


def array(tensor: Tensor) -> np.ndarray:
    """A tensor as drawing takes it."""
    return tensor.detach().double().cpu().numpy()
