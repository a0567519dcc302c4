"""Storing results: tensors and JSON in one safetensors file with a digest, and never anything executable."""

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin

import torch
from torch import Tensor

from tensorlens_tl.errors import FileFormatError, InvalidInputError
from tensorlens_tl.models import Relative

FORMAT_VERSION = 1
LOADABLE = ("", ".safetensors")
"""Endings of files that hold tensors."""

Result = TypeVar("Result", bound="Stored")


class FieldNames:
    """A class attribute that lists the names of a dataclass' fields that satisfy a condition, such as its tensors."""

    def __init__(self, is_chosen: Callable[[Field[Any]], bool]) -> None:
        self.is_chosen = is_chosen

    def __get__(self, result: Any, kind: Any) -> tuple[str, ...]:
        return tuple(field.name for field in fields(kind) if self.is_chosen(field)) if is_dataclass(kind) else ()


def _shaped(field: Field[Any]) -> Any:
    """Return the annotation of a tensor field, including its axis names; None for other fields."""
    kinds = [field.type, *get_args(field.type)]
    return next((kind for kind in kinds if hasattr(kind, "dim_str")), None)


def _can_lack(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING


class Stored:
    """A result that `save` writes to one safetensors file and `load` reads.

    Files from earlier versions may lack fields that have defaults.
    """

    TENSORS: ClassVar[Any] = FieldNames(lambda field: _shaped(field) is not None)
    """Fields stored as tensors."""
    FACTS: ClassVar[Any] = FieldNames(lambda field: _shaped(field) is None and not _can_lack(field))
    """Fields stored as JSON."""
    LATER_FACTS: ClassVar[Any] = FieldNames(lambda field: _shaped(field) is None and _can_lack(field))
    """JSON fields that a file may lack."""
    NAMES: ClassVar[Mapping[str, str]] = {}
    """For each axis, the field that holds its labels."""

    def __post_init__(self) -> None:
        wrong = self._misfit()
        if wrong:
            raise InvalidInputError(f"{type(self).__name__}: {wrong}.")

    def _misfit(self) -> str:
        """Return what is inconsistent about this result, computed or read from a file; empty if nothing is."""
        wrong = self._wrong_facts(vars(self))
        if wrong:
            return wrong
        sizes = {axis: len(getattr(self, names)) for axis, names in self.NAMES.items()}
        dtypes = {name: shaped.dtypes for name, shaped in self._shapes().items()}
        for name, axes in self._axes().items():
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor):
                return f"{name} is a {type(tensor).__name__}, not a tensor"
            expected = [sizes.setdefault(axis, size) for axis, size in zip(axes, tensor.shape, strict=False)]
            if len(axes) != tensor.ndim or expected != list(tensor.shape):
                wanted = ", ".join(str(sizes.get(axis, axis)) for axis in axes)
                return f"{name} is {tuple(tensor.shape)}, not [{wanted}]"
            if str(tensor.dtype).removeprefix("torch.") not in dtypes[name]:
                return f"{name} is of {tensor.dtype}"
        return ""

    def _axes(self) -> dict[str, list[str]]:
        """Return the axis names of each tensor that is present, from its annotation; "pos" counts as "key"."""
        present = {name: shaped for name, shaped in self._shapes().items() if getattr(self, name) is not None}
        return {name: shaped.dim_str.replace("pos", "key").split() for name, shaped in present.items()}

    @classmethod
    def _shapes(cls) -> dict[str, Any]:
        """Return the annotations of the class's tensors, with their axis names."""
        every = {field.name: _shaped(field) for field in fields(cls)}  # pyright: ignore[reportArgumentType]
        return {name: shaped for name, shaped in every.items() if shaped is not None}

    def _write(self, path: Path) -> Path:
        """Write the file that `load` reads: safetensors with the facts as JSON metadata, never pickle."""
        wrong = self._wrong_facts(vars(self))
        if wrong:
            raise InvalidInputError(f"save: {wrong}.")
        return write(path, type(self).__name__, *self._packed())

    @classmethod
    def load(cls: type[Result], path: str | os.PathLike[str]) -> Result:
        """Read a file that `save` wrote.

        Raises:
            FileFormatError: not such a file, or one that is damaged, was changed, or comes from a newer version.
            OSError: the file does not exist.
        """
        tensors, facts = read(path, cls.__name__, cls.TENSORS)
        try:
            wrong = cls._wrong_facts(facts)  # before they are used: a forged range could have any length
            if wrong:
                raise ValueError(wrong)
            return cls._unpacked(tensors, facts)
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(
                f"{path}: not a readable {cls.__name__} ({type(error).__name__}: {error})."
            ) from error

    @classmethod
    def _wrong_facts(cls, facts: Mapping[str, Any]) -> str:
        """Return what is wrong with the first fact that violates its field's annotation, or an empty string."""
        for field in fields(cls):  # pyright: ignore[reportArgumentType]  # every subclass is a dataclass
            if field.name in facts and not _allowed(facts[field.name], field.type):
                kind = getattr(field.type, "__name__", field.type)
                return f"{cls.__name__}.{field.name} is a {type(facts[field.name]).__name__}, not {kind}"
        return ""

    def _packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {name: tensor for name in self.TENSORS if (tensor := getattr(self, name)) is not None}
        return tensors, {name: getattr(self, name) for name in (*self.FACTS, *self.LATER_FACTS)}

    @classmethod
    def _unpacked(cls: type[Result], tensors: dict[str, Tensor], facts: dict[str, Any]) -> Result:
        later = {name: facts[name] for name in cls.LATER_FACTS if name in facts}
        return cls(**tensors, **{name: facts[name] for name in cls.FACTS}, **later)


_SCALARS = (str, bool, int, NoneType)


def _allowed(value: Any, annotation: Any) -> bool:
    """Whether an annotation allows a JSON value; lists and tuples are interchangeable."""
    origin = get_origin(annotation) or annotation
    arguments = get_args(annotation)
    if origin in (Union, UnionType):
        return any(_allowed(value, member) for member in arguments)
    if origin in (list, tuple, Sequence):
        if arguments[0] in _SCALARS and isinstance(value, list | tuple):  # thousands of names, of one type
            value = list({type(item): item for item in value}.values())
        return isinstance(value, list | tuple) and all(_allowed(item, arguments[0]) for item in value)
    if origin in (dict, Mapping):
        of_items = (*arguments, Any, Any)[1]
        return isinstance(value, Mapping) and all(_allowed(item, of_items) for item in value.values())
    if origin is float:
        return isinstance(value, int | float)
    if origin in _SCALARS:
        return isinstance(value, origin)
    return True


def write(path: str | os.PathLike[str], kind: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Write a file of a `kind` such as ``"Attribution"`` under a temporary name, then rename it into place.

    Raises:
        InvalidInputError: the folder does not exist, or the ending belongs to another kind of file.
        OSError: the file cannot be written, for example because the disk is full.
    """
    from safetensors.torch import save

    path = Path(path)
    if path.suffix.lower() not in LOADABLE:
        raise InvalidInputError(f"save: {path.name!r} ends in {path.suffix!r}; end it in .safetensors, or in nothing.")
    check_folder(path, "save")
    # cloned, since safetensors rejects tensors that share memory
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    text = json.dumps(tagged(facts))
    metadata = {
        "format": f"tensorlens_tl.{kind}", "version": str(FORMAT_VERSION), "facts": text,
        "digest": _digest(copies, text),
    }  # fmt: skip
    content = save(copies, metadata)  # save_file would create a file readable only by its owner
    with replacing(path) as temporary:
        try:
            temporary.write_bytes(content)
        except OSError as error:  # such as a full disk; the error names no file
            raise OSError(error.errno, error.strerror, str(path)) from error
    return path


def check_folder(path: Path, name: str) -> None:
    """Raise `InvalidInputError` for a file that cannot be written: it is a folder, or its folder does not exist."""
    if path.is_dir():
        raise InvalidInputError(f"{name}: cannot write {path}, that is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise InvalidInputError(f"{name}: cannot write {path}, there is no folder {path.parent}.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path for new content, which replaces the file at the end; on failure the old file stays."""
    place = path.resolve()  # keeps a symbolic link and replaces its target
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")  # unique, also across threads
    try:
        yield temporary
        os.replace(temporary, place)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(
    path: str | os.PathLike[str], kind: str, names: Sequence[str] | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors and facts that `write` wrote; tensors outside `names` (unless None) are an error.

    Raises:
        FileFormatError: not such a file, or one that is damaged, was changed, or comes from a newer version.
        OSError: the file does not exist, or cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    content = Path(path).read_bytes()  # in one go: another process may replace the file at any time
    other = other_kind(content, path)
    if other:
        raise FileFormatError(
            f"{path}: {other}, not a readable {kind}. Load what save() wrote with a name that ends in .safetensors, "
            "or in nothing."
        )
    try:
        tensors = load(content)
        metadata = _metadata(content)
        if metadata.get("format") != f"tensorlens_tl.{kind}":
            raise FileFormatError(_other_result(path, kind, metadata.get("format", "")))
        version = metadata["version"]
        if not re.fullmatch("[1-9][0-9]*", version):
            raise FileFormatError(f"{path}: not a readable {kind}, its format is {version!r}, which there never was.")
        if version != str(FORMAT_VERSION):
            raise FileFormatError(f"{path}: format {version} is newer than this library's; update it.")
        if _digest(tensors, metadata["facts"]) != metadata["digest"]:
            raise FileFormatError(
                f"{path}: damaged, or changed after it was saved (its digest does not fit). Save it again."
            )
        facts = untagged(json.loads(metadata["facts"]))
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, FileFormatError):
            raise
        if isinstance(error, SafetensorError) and Path(path).suffix.lower() not in LOADABLE:
            raise FileFormatError(
                f"{path}: not a readable {kind}; its name ends in {Path(path).suffix!r}. `load` reads what `save` "
                "wrote without an ending or as .safetensors; tables (.csv, .parquet, .json) are read with pandas."
            ) from error
        raise FileFormatError(f"{path}: not a readable {kind} ({type(error).__name__}: {error}).") from error
    unknown = sorted(set(tensors) - set(names or tensors))
    if unknown:
        raise FileFormatError(f"{path}: contains a tensor {unknown[0]!r}, which no {kind} has.")
    return tensors, facts


def written_kind(content: bytes) -> str:
    """Return the class named in one of our files, such as ``"Attribution"``; empty for other files."""
    try:
        library, _, kind = _metadata(content).get("format", "").partition(".")
    except (ValueError, AttributeError, RecursionError):
        return ""
    return kind if library == "tensorlens_tl" else ""


def _metadata(content: bytes) -> dict[str, str]:
    """Return the metadata in the header of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]).get("__metadata__") or {}


JSON_FILE = "a JSON file"
GZIP_FILE = "a gzip file"

BEGINNINGS = {
    b"%PDF": "a PDF figure",
    b"\x89PNG": "a PNG figure",
    b"<?xml": "an SVG figure or another XML file",
    b"<svg": "an SVG figure",
    b"<!doctype": "an HTML page",
    b"PAR1": "a Parquet table, which pandas.read_parquet reads",
    b"\x1f\x8b": GZIP_FILE,
    b"PK\x03\x04": "a ZIP archive, perhaps one of torch.save",
    b"{": JSON_FILE,
    b"[": "a JSON file, which pandas.read_json reads if it is a table",
}
"""Kinds of files by their first bytes; a tensor file begins with a length in eight bytes."""

TABLES = {".csv": "a CSV table, which pandas.read_csv reads"}
"""Kinds of files by ending."""


def other_kind(content: bytes, path: str | os.PathLike[str]) -> str:
    """Return what kind of file this is if it is not a tensor file; otherwise empty."""
    beginning = content[:16]
    if not beginning:
        return "an empty file"
    if beginning[8:9] == b"{":  # a tensor file: facts follow their length
        return ""
    for first, what in BEGINNINGS.items():
        if beginning.lower().startswith(first.lower()):
            return what
    return TABLES.get(Path(path).suffix.lower(), "")


def _other_result(path: str | os.PathLike[str], kind: str, written: str) -> str:
    """Return the error message for a safetensors file that holds something else."""
    library, _, name = written.partition(".")
    if library == "tensorlens_tl" and name:
        return f"{path}: holds {name}, not {kind}; tlens.load({str(path)!r}) reads either."
    return (
        f"{path}: a safetensors file, but not one that this library saved; read its tensors with "
        f"safetensors.torch.load_file. {kind}.load reads what {kind}.save wrote."
    )


def _digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    """Return the SHA-256 of a file's whole content; it detects damage, but is not a signature."""
    digest = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def tagged(value: Any) -> Any:
    """Encode options for JSON; a type that JSON lacks becomes a table with one key that names it."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            value = value.detach().double()
        return {"$tensor": value.tolist()}
    if isinstance(value, Relative):
        return {"$target": value.value}
    if isinstance(value, slice):
        return {"$slice": [value.start, value.stop, value.step]}
    if isinstance(value, range):
        return {"$range": [value.start, value.stop, value.step]}
    if isinstance(value, tuple):
        return {"$tuple": [tagged(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"$set": [tagged(item) for item in value]}
    if isinstance(value, list):
        return [tagged(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: tagged(item) for key, item in value.items()}
        return {"$pairs": [[tagged(key), tagged(item)] for key, item in value.items()]}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if hasattr(value, "tolist"):  # from numpy
        return tagged(value.tolist())
    return repr(value)


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "$tensor": torch.tensor,
    "$target": Relative,
    "$slice": lambda bounds: slice(*bounds),
    "$range": lambda bounds: range(*bounds),
    "$tuple": tuple,
    "$set": set,
    "$pairs": dict,
}


def untagged(value: Any) -> Any:
    """Decode what `tagged` encoded."""
    if isinstance(value, list):
        return [untagged(item) for item in value]
    if not isinstance(value, dict):
        return value
    inner = {key: untagged(item) for key, item in value.items()}
    kind = next(iter(inner), "")
    if len(inner) == 1 and kind in _KINDS:
        spread = {"$tuple": [inner[kind]], "$set": [inner[kind]], "$pairs": inner[kind]}.get(kind, [])
        if not all(isinstance(items, list) for items in spread):  # a forged range could have any length
            raise ValueError(f"{kind} of {inner[kind]!r}")
        if kind == "$tensor":
            return torch.tensor(value[kind])  # must be numbers, whatever its length
        return _KINDS[kind](inner[kind])
    return inner
