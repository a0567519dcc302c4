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
from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tensorlens_tl.drawing import fonts, page
from tensorlens_tl.errors import InvalidInputError
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
    fonts.use_fonts_with_letters(first.figure)
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
