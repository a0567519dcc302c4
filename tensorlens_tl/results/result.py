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
from dataclasses import dataclass, fields
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import numpy as np
from torch import Tensor

from tensorlens_tl.drawing import figure, graphs, page, terminal
from tensorlens_tl.drawing.marks import number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.entry import Entry, panel
from tensorlens_tl.results.storage import LOADABLE, Stored, replacing

if TYPE_CHECKING:
    import pandas as pd


class Result(Stored, ABC):
    """A result, with the same six members in every class: `show`, `plot`, `to_html`, `to_dataframe`, `save`, `load`."""

    LOADABLE: ClassVar = LOADABLE
    """What the name of a file ends in that `load` reads back."""

    @abstractmethod
    def to_html(self, *, style: bool = True) -> str:
        """A picture as an HTML fragment.

        Args:
            style: with the style and the script that a page needs once.
        """

    @abstractmethod
    def to_dataframe(self) -> "pd.DataFrame":
        """A long table, one line per score."""

    @abstractmethod
    def plot(self, *, ax: Any = None) -> Any:
        """A matplotlib figure for print (extra ``plot``); returns the axes, of several panels a list.

        Args:
            ax: draw here; None makes a figure of fitting size.

        Raises:
            ImportError: matplotlib is not installed.
        """

    @abstractmethod
    def show(self) -> None:
        """Display the picture in a notebook; elsewhere print the largest parts as a table."""

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str | None:
        """The table of `to_dataframe` as CSV, as pandas writes it, without row numbers.

        Args:
            path: of the file, whatever its name ends in; None returns the text.

        Raises:
            OSError: it cannot be written.

        >>> tlens.attribute(frozen, " value").to_csv().splitlines()[0]
        'batch,query,key,query_token,key_token,kind,generated,method,target,score'
        """
        return self.to_dataframe().to_csv(path, index=False)

    @property
    def heading(self) -> str:
        """The title of its page."""
        return repr(self)

    def _repr_html_(self) -> str:
        return self.to_html()

    def _less(self, other: Any, names: Sequence[str]) -> dict[str, Tensor | None]:
        """Tensors of these names less another result's; None where one of the two lacks it."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in names}
        return {name: None if a is None or b is None else a - b for name, (a, b) in pairs.items()}

    def save(self, path: str | os.PathLike[str], *, batch: int | None = None) -> Path:
        """Write one file; what its name ends in says which kind. An older file is replaced in one step.

        Args:
            path: without a suffix, or ending in ``.safetensors``: what `load` reads back (facts as JSON, never pickle).
                ``.html`` is a page, ``.csv``, ``.parquet`` and ``.json`` are tables, ``.pdf``, ``.svg`` and ``.png``
                figures.
            batch: of a figure: the prompt that it shows, as in `plot`.

        Returns:
            The path.

        Raises:
            InvalidInputError: no such folder, or a name with another ending; no such prompt, or one chosen for a file
                that is no figure, or of a result whose `plot` has no `batch`.
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
            _check_choice(self, path)
            content = _drawn(suffix, self, batch=batch)
        elif suffix in self.LOADABLE:
            return self._keep(path)
        else:
            content = self._writers()[suffix](self)
        with replacing(path) as temporary:
            temporary.write_bytes(content)
        return path

    def _keep(self, path: Path) -> Path:
        """Write the file that `load` reads back."""
        return super().save(path)

    @classmethod
    def _writers(cls) -> Mapping[str, Callable[[Any], bytes]]:
        """What each suffix writes, besides the file that `load` reads back."""
        return WRITERS


@dataclass(frozen=True)
class Bars:
    """Named numbers and what they sum to: bars around zero in a notebook and in print, a table in a terminal.

    Attributes:
        title: above a table and a figure.
        lines: names and numbers, the largest first.
        sums: what stands below a rule, such as a total.
        heading, notes: above and below the bars in a notebook; the title by default.
        columns: what a table calls names and numbers.
        left: whether a table aligns names to the left.
        intervals: of every line and sum, in a figure.
    """

    title: str
    lines: Sequence[tuple[str, float]]
    sums: Sequence[tuple[str, float]] = ()
    heading: str = ""
    notes: Sequence[str] = ()
    columns: tuple[str, str] = ("part", "score")
    left: bool = True
    intervals: Sequence[tuple[float, float]] = ()

    def html(self, *, title: str = "", style: bool) -> str:
        """For a notebook or a page."""
        picture = graphs.bars(self.lines, self.sums)
        return panel(title or self.heading or self.title, picture, notes=self.notes, style=style)

    def draw(self, ax: Any) -> Any:
        """For print, on matplotlib's axes, which are returned."""
        return figure.signed_bars(self.lines, self.title, ax, sums=self.sums, intervals=self.intervals)

    def print(self) -> None:
        """For a terminal."""
        rows, below = ([(name, number(score)) for name, score in part] for part in (self.lines, self.sums))
        terminal.show_table(self.title, self.columns, rows, below, left=self.columns[: int(self.left)])


class PromptScores(Result):
    """Scores of named parts for each prompt, drawn as bars, the largest first."""

    @abstractmethod
    def top(self, k: int = 10, batch: int | None = None) -> list[Entry]:
        """The k parts of largest absolute score.

        Args:
            k: how many.
            batch: one prompt; None for the only one, or for the mean over several (of an attention score, whose parts
                are those of one prompt, the first).

        Raises:
            InvalidInputError: k below 1, or no such prompt.
        """

    @abstractmethod
    def _bars(self, k: int, batch: int | None) -> Bars:
        """What is drawn of the k largest parts."""

    def to_html(self, k: int = 15, batch: int | None = None, *, style: bool = True) -> str:
        """The k parts of largest absolute score as bars around zero; all others, and the total, below where they sum.

        Args:
            k, batch: as in `top`.
            style: with the style and the script that a page needs once.
        """
        return self._bars(k, batch).html(style=style)

    def plot(self, k: int = 15, batch: int | None = None, *, ax: Any = None) -> Any:
        """The same bars as a matplotlib figure (extra ``plot``); returns the axes.

        Args:
            k, batch: as in `top`; the mean over prompts has 95 % bootstrap intervals.
            ax: draw here; None makes a figure of fitting size.

        Raises:
            InvalidInputError: k below 1, or no such prompt.
            ImportError: matplotlib is not installed.
        """
        return self._bars(k, batch).draw(ax)

    def show(self, k: int = 10, batch: int | None = None) -> None:
        """Display the picture in a notebook; elsewhere print the k parts of largest absolute score.

        Args:
            k, batch: as in `top`.
        """
        if not page.display_in_notebook(lambda: self.to_html(k, batch)):
            self._bars(k, batch).print()


COLUMNS: Mapping[str, str] = {
    "id": "of a data set: the name of the row",
    "row": "of a data set: its number",
    "batch": "the prompt, counted from 0",
    "query": "the position that is explained, padding counted",
    "query_token": "its token; of generated text, the token or the stretch that is explained",
    "query_side": "of an encoder–decoder: the side of the query",
    "key": "the position of the source token, padding counted; empty where a row is about no token",
    "key_token": "its token",
    "key_side": "of an encoder–decoder: its side",
    "head": "the number of a head, where an attribution has an axis of heads",
    "kind": "`token`, `bias`, `total`, `left out` (tokens that `without` leaves out, together), or `rest`: all tokens "
    'that a data set did not store (`keep="top:N"`)',
    "generated": "whether the model wrote the source token",
    "target": "what is explained, in words; for head scores, what is attended to",
    "term": "the name of a part: a head, an MLP, a path, a feature",
    "feature": "a feature of a dictionary",
    "label": "of a feature: what it is called",
    "rank": "of an example: its place among the feature's largest, counted from 0",
    "position": "of an active feature: the position of the token in its prompt or row, padding counted",
    "token": "that token",
    "activation": "how active the feature is there",
    "is_peak": "whether the example was chosen for this token",
    "layer": "a layer",
    "route": "by which route a change passes the layer",
    "source": "where an edge begins, or the part that is read",
    "destination": "where an edge ends",
    "side": "`query` or `key`, whose part it is",
    "query_source": "of an attention score: the part of the query",
    "key_source": "the part of the key",
    "n": "of a mean: over how many prompts it is",
    "low": "of a mean: the lower end of its interval",
    "high": "the upper end",
    "score": "the number",
    "weight": "the weight of an edge of a graph",
    "source_pos": "of a graph: the position of the node where an edge begins",
    "source_token": "its token",
    "destination_pos": "the position of the node where the edge ends",
    "destination_token": "its token",
    "reads": "what the edge is read by",
    "metric": "of an evaluation: what is measured",
    "method": "the method that the numbers are of; of an evaluation, the one that is measured",
    "unit": "the prompt that it is measured on",
    "value": "the measured number",
}
"""The columns of every result's `to_dataframe`; an evaluation's axis and a program's own numbers come besides."""


def long_table(
    result: Any, values: Tensor, axes: Mapping[str, Sequence[str] | None], *, real: Any = True, **columns: Any
) -> "pd.DataFrame":
    """One line per score: its place on every axis, further columns, and the score.

    Positions, their tokens and a line for real tokens only come from the result, where it has them.

    Args:
        result: with `queries`, `mask` and `tokens`, where there is an axis ``"query"`` or ``"key"``.
        values: the scores.
        axes: what the places on each axis of `values` are called; None where their number says it.
        real: which scores have a line.
        columns: a text, or values for the first axes of `values`.
    """
    import pandas as pd

    places = dict(zip(axes, np.indices(tuple(values.shape)).reshape(values.ndim, -1), strict=True))
    lines = np.broadcast_to(real, tuple(values.shape)).ravel()
    table: dict[str, Any] = {}
    for axis, names in axes.items():
        if axis == "query":
            places[axis] = result.queries.cpu().numpy()[places["batch"], places[axis]]
        table[axis] = places[axis] if names is None else [names[place] for place in places[axis]]
        if axis in ("query", "key"):
            at = places["batch"], places[axis]
            table[f"{axis}_token"] = [result.tokens[batch][position] for batch, position in zip(*at, strict=True)]
            lines = lines & result.mask.cpu().numpy()[at]
    for name, column in columns.items():
        if not isinstance(column, str):
            column = np.array(column)
            column = column.reshape(*column.shape, *(1,) * (values.ndim - column.ndim))
            column = np.broadcast_to(column, tuple(values.shape)).ravel()
        table[name] = column
    table["score"] = values.detach().double().cpu().reshape(-1).numpy()
    return pd.DataFrame(table).loc[lines].reset_index(drop=True)


def ending(path: Path) -> str:
    """What the name of a file ends in, in small letters; with what comes before ``.gz``, as in ``.json.gz``."""
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return Path(path.stem).suffix.lower() + suffix
    return suffix


def check_file(path: str | os.PathLike[str], kind: type[Result] = Result, name: str = "save") -> None:
    """Refuse, before any work, a path that a result cannot be saved to.

    Args:
        path: of the file.
        kind: the class of the result.
        name: of the argument or the function, for the message.

    Raises:
        InvalidInputError: it is a folder, lies in none, or its name has an unknown ending.
    """
    path = Path(path)
    if path.is_dir():
        raise InvalidInputError(f"{name}: cannot write {path}, that is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise InvalidInputError(f"{name}: cannot write {path}, there is no folder {path.parent}.")
    known = dict.fromkeys([*kind.LOADABLE, *kind._writers()])
    if ending(path) not in known:
        endings = ", ".join(filter(None, known))
        if "" in known:
            endings += ", or no ending"
        raise InvalidInputError(
            f"{name}: {path.name!r} ends in {ending(path)!r}, which is no kind of file that a result is saved as. "
            f"Use one of {endings}."
        )


def _check_choice(result: Result, path: Path) -> None:
    """Raise `InvalidInputError` unless the file is a figure, and one that shows a chosen prompt."""
    if path.suffix.lower() not in FIGURES:
        endings = ", ".join(FIGURES)
        raise InvalidInputError(
            f"save: batch= chooses the prompt of a figure, and {path.name!r} is none. Leave it out, or use one of "
            f"{endings}."
        )
    if "batch" not in signature(result.plot).parameters:
        raise InvalidInputError(
            f"save: the figure of {type(result).__name__} has no prompt to choose; leave out batch=."
        )


SAME_BYTES: Any = {"svg.hashsalt": "tensorlens", "pdf.fonttype": 42}
"""Settings of matplotlib: the same figure gives the same file, and text of a PDF stays text."""
DOTS = 200
"""Of a PNG, to the inch."""
NO_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def _page(result: Result) -> bytes:
    return page.page(result.heading, result.to_html(style=False)).encode()


def _csv(result: Result) -> bytes:
    return str(result.to_csv()).encode()


def _json(result: Result) -> bytes:
    return str(result.to_dataframe().to_json(orient="records", double_precision=15, force_ascii=False)).encode()


def _parquet(result: Result) -> bytes:
    return result.to_dataframe().to_parquet(index=False)


def _drawn(suffix: str, result: Result, **chosen: Any) -> bytes:
    """The figure of a result, of what was chosen as `plot` takes it."""
    from matplotlib import pyplot, rc_context

    axes = result.plot(**chosen)
    first = axes[0] if isinstance(axes, list) else axes
    file = io.BytesIO()
    figure.use_fonts_with_letters(first.figure)
    with rc_context(SAME_BYTES), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # said above, by script
        options = {"bbox_inches": "tight", "metadata": NO_DATE.get(suffix), "dpi": DOTS}
        first.figure.savefig(file, format=suffix.removeprefix("."), **options)
    pyplot.close(first.figure)
    return file.getvalue()


FIGURES = (".pdf", ".svg", ".png")
WRITERS: Mapping[str, Callable[[Any], bytes]] = {
    ".html": _page,
    ".csv": _csv,
    ".parquet": _parquet,
    ".json": _json,
    **{suffix: partial(_drawn, suffix) for suffix in FIGURES},
}
RESULT_ENDINGS = (*Result.LOADABLE, *WRITERS)
"""What the name of any result's file may end in."""


def array(tensor: Tensor) -> np.ndarray:
    """A tensor as drawing takes it."""
    return tensor.detach().double().cpu().numpy()


def axes_of(result: Any, name: str) -> tuple[str, ...]:
    """The names of the axes of one of a result's tensors, as its annotation has them."""
    (annotation,) = (field.type for field in fields(result) if field.name == name)
    kinds: list[Any] = [annotation, *get_args(annotation)]
    (shaped,) = (kind for kind in kinds if hasattr(kind, "dim_str"))
    return tuple(shaped.dim_str.split())
