"""The base class of all results. A result can be shown, drawn, tabulated and saved; the file's ending sets the format.

| a name ends in | the file is |
| --- | --- |
| nothing, ``.safetensors`` | the result itself, which `load` reads |
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
from tensorlens_tl.results.storage import LOADABLE, Stored, check_folder, replacing

if TYPE_CHECKING:
    import pandas as pd


class Result(Stored, ABC):
    """A result of any kind, with the same methods and arguments for showing, tabulating and saving in every class.

    A subclass adds fields and a table, and draws with `_html`, `_figure` and `_print`, whose arguments define what
    can be chosen.
    """

    LOADABLE: ClassVar = LOADABLE
    """Endings of files that `load` can read."""
    HEADING: ClassVar = ""
    """The title of a page, with a placeholder for the target."""
    PRINTED: ClassVar = 10
    """How many parts `show` prints by default."""
    DRAWN: ClassVar = 15
    """How many parts a picture shows by default."""
    DRAWN_ARE_LISTED: ClassVar = True
    """Whether `show` lists the parts that a picture draws, with the same k; a graph draws edges but lists nodes."""

    def __init_subclass__(cls) -> None:
        """Give `show` and related methods the signature of this class, with its own choices, types and defaults."""
        super().__init_subclass__()
        for name, hook, k in cls._showing():
            setattr(cls, name, _with_choices(unwrap(getattr(cls, name)), cls._choices(hook), k))

    @classmethod
    def _showing(cls) -> list[tuple[str, str, int]]:
        """List methods that show something: name, the method that defines their choices, and the default of k."""
        return [("to_html", "_html", cls.DRAWN), ("plot", "_figure", cls.DRAWN), ("show", "_print", cls.PRINTED)]

    @abstractmethod
    def to_dataframe(self) -> "pd.DataFrame":
        """Return a long table, one row per score."""

    @abstractmethod
    def _html(self, *args: Any, **choice: Any) -> str:
        """Return the picture of k parts, without the style that a page includes once."""

    @abstractmethod
    def _figure(self, *args: Any, **choice: Any) -> Any:
        """Draw the figure of k parts for print on `ax`."""

    @abstractmethod
    def _print(self, *args: Any, **choice: Any) -> None:
        """Print the table of k parts."""

    def to_html(self, k: int | None = None, *, style: bool = True, **choice: Any) -> str:
        """Return the picture as an HTML fragment.

        Args:
            k: how many parts to show, largest first; a matrix always has all.
            style: include the style and script that a page needs once.
            choice: what to show; each class has its own choices. `query`: an index over the prompt's real queries, or a
                text. `batch`: a prompt; None for the mean, or for the first few if each prompt has its own parts.
                `title`: the picture's title.

        Raises:
            InvalidInputError: k below 1, or an unknown choice, query or prompt.
        """
        body = self._html(**{"k": self.DRAWN} | self._chosen("to_html", "_html", k, choice))
        return page.head(body) + body if style else body

    def plot(self, k: int | None = None, *, ax: Axes | None = None, **choice: Any) -> Axes | list[Axes]:
        """Draw the picture with matplotlib, for print (extra ``plot``); return the axes, or a list for several panels.

        Args:
            k, choice: as in `to_html`; bars of a mean over prompts have 95 % bootstrap intervals.
            ax: the axes to draw on; None creates a figure of suitable size.

        Raises:
            InvalidInputError: nothing to draw, or as in `to_html`.
            ImportError: matplotlib is not installed.

        >>> tlens.attribute(frozen, " value").plot()
        <Axes: ...>
        """
        chosen = self._chosen("plot", "_figure", k, choice)
        return self._figure(**{"k": self.DRAWN, "ax": ax} | chosen)

    def show(self, k: int | None = None, **choice: Any) -> None:
        """Display the picture in a notebook; elsewhere print the k largest parts (and for a sum the rest, in one line).

        Arguments and errors are those of `to_html`.
        """
        chosen = self._chosen("show", "_print", k, choice)
        drawn = [name for name in self._choices("_html") if name != "k" or self.DRAWN_ARE_LISTED]
        of_picture = {name: value for name, value in chosen.items() if name in drawn}
        if not page.display_in_notebook(lambda: self.to_html(**of_picture)):
            self._print(**{"k": self.PRINTED} | chosen)

    def _chosen(self, name: str, hook: str, k: int | None, choice: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call's choices, checked; k only if it was passed."""
        choices = self._choices(hook)
        known = ["k", *choices]
        wrong = next((one for one in choice if one not in known), None)
        if wrong is not None:
            raise WrongCallError(
                f"{name}: {wrong!r} cannot be chosen for this {type(self).__name__}; pass "
                f"{', '.join(dict.fromkeys(known))}.{nearest(wrong, known)}"
            )
        if k is not None:
            choice = {**choice, "k": whole_number("k", k, least=1, why="how many parts to show")}
        for one in choices.values():
            if one.default is Parameter.empty and one.name not in {"k", *choice}:
                raise WrongCallError(f"{name}: a {type(self).__name__} needs {one.name}=, as in {one.name}=0.")
        return dict(choice)

    @classmethod
    def _choices(cls, hook: str) -> dict[str, Parameter]:
        """Return the parameters of a method that define its choices."""
        parameters = signature(getattr(cls, hook)).parameters.values()
        several = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        return {one.name: one for one in parameters if one.name not in ("self", "ax") and one.kind not in several}

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """Write the table of `to_dataframe` as CSV without row numbers; return it as text if no path is given.

        >>> tlens.attribute(frozen, " value").to_csv().splitlines()[0]
        'batch,query,key,query_token,key_token,kind,generated,method,target,score'
        """
        return self.to_dataframe().to_csv(path, index=False)

    @property
    def heading(self) -> str:
        """The title of the result's page."""
        if self.HEADING:
            return self.HEADING.format(shown_target(getattr(self, "target")))  # noqa: B009
        return repr(self)

    def _panel(self, *parts: str, title: str = "", notes: Sequence[str] = ()) -> str:
        """Combine pictures under a title (default: the heading), with notes and provenance in one line."""
        provenance: Mapping[str, str] = getattr(self, "provenance", {})
        facts = [f"{name.replace('_', ' ')}: {fact}" for name, fact in provenance.items()]
        return page.panel(title or self.heading, *parts, notes=" · ".join(filter(None, [*notes, *facts])))

    def _repr_html_(self) -> str:
        return self.to_html()

    def save(self, path: str | os.PathLike[str], *, batch: int | None = None) -> Path:
        """Write a file in the format of its ending, replacing an older file in one step; return the path.

        Args:
            path: without an ending, or with ``.safetensors``: the format that `load` reads (JSON facts, never pickle).
                ``.html`` is a page; ``.csv``, ``.parquet`` and ``.json`` are tables; ``.pdf``, ``.svg`` and ``.png``
                are figures.
            batch: the prompt to draw in a figure, as in `plot`.

        Raises:
            InvalidInputError: no such folder, ending or prompt; `batch` without a figure that takes it; or a field of
                the wrong type, which could not be loaded.
            ImportError: a figure is requested, and matplotlib is not installed.
            OSError: the file cannot be written, for example because the disk is full.

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
                    f"save: batch= chooses the prompt of a figure, but {path.name!r} is not one. Leave it out, or use "
                    f"one of {', '.join(FIGURES)}."
                )
            if "batch" not in self._choices("_figure"):
                raise InvalidInputError(
                    f"save: the figure of {type(self).__name__} does not show a single prompt; leave out batch=."
                )
            content = _drawn(suffix, self, batch=batch)
        elif suffix in self.LOADABLE:
            return self._write(path)
        else:
            content = self._writers()[suffix](self)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        return path

    @classmethod
    def _writers(cls) -> Mapping[str, Callable[[Any], bytes]]:
        """Return the writers of each suffix, other than the format that `load` reads."""
        return WRITERS


def _with_choices(shared: Callable[..., Any], choices: Mapping[str, Parameter], k: int) -> Callable[..., Any]:
    """Return a shared method with a signature that spells out one class's choices."""

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
    """Return a file name's ending in lower case, including what precedes ``.gz``, as in ``.json.gz``."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return Path(path.stem).suffix.lower() + suffix
    return suffix


def check_file(path: str | os.PathLike[str], kind: type[Result] = Result, name: str = "save") -> None:
    """Raise `InvalidInputError` for a path that results cannot be saved to: a folder, no such folder, a wrong ending.

    `name` is the argument or function named in the message.
    """
    path = Path(path)
    check_folder(path, name)
    known = dict.fromkeys([*kind.LOADABLE, *kind._writers()])
    if ending(path) not in known:
        endings = ", ".join(filter(None, known))
        if "" in known:
            endings += ", or no ending"
        raise InvalidInputError(
            f"{name}: {path.name!r} ends in {ending(path)!r}, which is not a supported ending. Use one of {endings}."
        )


SAME_BYTES: Any = {"svg.hashsalt": "tensorlens", "pdf.fonttype": 42}
"""Matplotlib settings that make files reproducible and keep the text of a PDF as text."""
DOTS = 200
"""Resolution of a PNG, in dots per inch."""
NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def _drawn(suffix: str, result: Result, **chosen: Any) -> bytes:
    """Draw a result's figure as `plot` does, and return the file's bytes."""
    from matplotlib import pyplot, rc_context

    axes = result.plot(**chosen)
    drawn: Any = (axes[0] if isinstance(axes, list) else axes).figure
    file = io.BytesIO()
    figure.use_fonts_with_letters(drawn)
    with rc_context(SAME_BYTES), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # a warning above names the script instead
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
"""All endings that a result can be saved with."""


def array(tensor: Tensor) -> np.ndarray:
    """Convert a tensor for drawing."""
    return tensor.detach().double().cpu().numpy()
