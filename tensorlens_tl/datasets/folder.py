"""The folder of a data-set run: manifest, shards, locking, and reading results back as objects or tables.

``manifest.json`` describes the run (model, data, method, options) and assigns rows to batches and shards. A shard is
written under a temporary name and renamed once it is complete. Its writer holds a lock, which the operating system
releases when the process ends.

A shard's seal records the run it belongs to, its number, and digests of its contents. It detects damage, edits and
files of other runs, but it is not a signature. It is stored in the shard's metadata, next to the facts that the shard's
rows have in common.
"""

import contextlib
import errno
import hashlib
import importlib
import json
import os
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tensorlens_tl import __version__
from tensorlens_tl._arguments import check_choice, checked_names, plain
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.datasets.work import FACTS, facts_in, schema, unpacked, unpacked_terms
from tensorlens_tl.errors import FileFormatError, InvalidInputError
from tensorlens_tl.hooks import other_hooks
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.models.lifecycle import changed, compact, configuration
from tensorlens_tl.models.offload import stored
from tensorlens_tl.passes.inputs import like_length
from tensorlens_tl.results import Attribution, Evaluation, Terms, area
from tensorlens_tl.results.storage import replacing

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    Quantiles = float | Sequence[float] | np.ndarray | torch.Tensor
    """One share of the values, or several."""
else:
    Quantiles = Any  # `summary` checks it

FORMAT = "tensorlens_tl.dataset"
VERSION = 2
MANIFEST = "manifest.json"
BATCHES_PER_SHARD = 8
"""The most batches per shard, which bounds what a crash may cost."""

ROWS_PER_SHARD = 512
"""A shard ends with the batch that reaches this many rows."""

SEAL = "tensorlens_tl.seal"
"""The metadata key of a shard's seal."""

CONFIGURATION = "configuration"
LISTED = 6
"""How many differences between two configurations a message lists."""


@dataclass(frozen=True)
class Manifest:
    """The description of a run.

    Attributes:
        identity: everything that must be the same to resume the run, as JSON: model, data, method, options, `keep`.
        batches: the rows of each batch; the last one holds the rows that are not prompts, if any (`rejected`).
        shards: for each shard, its first batch and the one after its last.
        double: whether scores are float64.
    """

    identity: dict[str, Any]
    batches: list[list[int]]
    rejected: bool
    shards: list[list[int]]
    double: bool

    def rows_of(self, shard: int) -> list[int]:
        """Return the row numbers of a shard."""
        return [row for batch in self.batches[slice(*self.shards[shard])] for row in batch]

    @cached_property
    def rows(self) -> int:
        """The number of rows in the data set."""
        return sum(map(len, self.batches))

    @cached_property
    def digest(self) -> str:
        """A digest that identifies the run."""
        return _digest(asdict(self))


def planned(
    lengths: Sequence[int], rejected: Sequence[int], tokens_per_batch: int
) -> tuple[list[list[int]], list[Any]]:
    """Plan batches of rows of similar length, longest first, and shards of batches.

    A batch of several rows has at most `tokens_per_batch` tokens. Rows that are not prompts form a batch of their own.
    """
    refused = set(rejected)
    prompts = [row for row in range(len(lengths)) if row not in refused]
    groups = like_length(
        [lengths[row] for row in prompts], lambda count, longest, _: count * longest <= tokens_per_batch
    )
    batches = [[prompts[number] for number in group] for group in groups]
    shards = []
    start = 0
    for stop in range(1, len(batches) + 1):
        enough = stop - start == BATCHES_PER_SHARD or sum(map(len, batches[start:stop])) >= ROWS_PER_SHARD
        if enough or stop == len(batches):
            shards.append([start, stop])
            start = stop
    if rejected:
        batches.append(list(rejected))
        shards.append([len(batches) - 1, len(batches)])
    return batches, shards


class Folder:
    """The folder that a run is written to."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    # ------------------------------------------------------------------ the manifest

    def begun(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / MANIFEST).is_file()

    def begin(self, manifest: Manifest, resume: bool) -> Manifest:
        """Write the manifest, or check that the run in the folder is the same, to resume it."""
        import filelock

        self._check_ours()  # before anything is written
        try:
            (self.path / "locks").mkdir(parents=True, exist_ok=True)
            acquired = filelock.FileLock(self.path / "locks" / "manifest").acquire()
        except OSError as error:
            raise InvalidInputError(f"out={self.path}: cannot write there ({error.strerror or error}).") from error
        with acquired:
            for half in self.path.glob(f".{MANIFEST}.*.tmp"):  # left behind by a process that was killed
                half.unlink()
            if not self.begun():
                self._check_ours()
                content = {"format": FORMAT, "version": VERSION, "digest": manifest.digest, "facts": asdict(manifest)}
                with self._whole(self.path / MANIFEST) as temporary:
                    temporary.write_text(json.dumps(content), encoding="utf-8")
                return manifest
            if not resume:
                raise InvalidInputError(f"out={self.path}: a run was begun there; name another folder, or resume it.")
            earlier = self.manifest()
            self._check_same(earlier, manifest)
            return earlier

    def _check_same(self, earlier: Manifest, manifest: Manifest) -> None:
        """Raise InvalidInputError if the run in this folder has another model, data or options."""
        for name, value in manifest.identity.items():
            before = earlier.identity.get(name)
            if json.dumps(before, sort_keys=True) != json.dumps(value, sort_keys=True):
                raise InvalidInputError(
                    f"out={self.path}: the run in this folder differs in its {name} ({differing(before, value)}). Pass "
                    "the same to resume it, or name another folder."
                )

    def _check_ours(self) -> None:
        """Raise InvalidInputError if the folder contains files but no run."""
        if not self.path.is_dir() or self.begun():
            return
        names = [path.name for path in self.path.iterdir()]
        foreign = sorted(name for name in names if name != "locks" and not name.startswith(f".{MANIFEST}."))
        if foreign:
            raise InvalidInputError(
                f"out={self.path}: the folder contains {foreign[0]!r} and no {MANIFEST}; name a new or an empty folder."
            )

    def manifest(self) -> Manifest:
        """Read the manifest of the run in this folder."""
        path = self.path / MANIFEST
        if self.path.is_file():
            raise FileFormatError(
                f"{self.path} is a file; pass the folder that attribute_dataset(model, rows, folder) wrote. A single "
                "result is read by its class, such as tlens.Attribution.load(path)."
            )
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise FileFormatError(f"{path}: no manifest of this library.")
            if content["version"] > VERSION:
                raise FileFormatError(f"{path}: format {content['version']} is newer than this library's; update it.")
            if content["version"] < VERSION:
                raise FileFormatError(
                    f"{path}: format {content['version']} is no longer supported; run it again, in a new folder."
                )
            facts = content["facts"]
            if content["digest"] != _digest(facts):
                raise FileFormatError(f"{path}: damaged, or changed after it was written (its digest does not fit).")
            return Manifest(**facts)
        except FileNotFoundError as error:
            raise FileFormatError(
                f"{self.path}: no run was begun here (there is no {MANIFEST}); "
                "pass the folder that attribute_dataset(model, rows, folder) wrote."
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, FileFormatError):
                raise
            raise FileFormatError(f"{path}: not a readable manifest ({type(error).__name__}: {error}).") from error

    # ------------------------------------------------------------------ shards

    def shard(self, number: int) -> Path:
        """Return the path of a shard."""
        return self.path / f"part-{number:05d}.parquet"

    def shards(self, manifest: Manifest) -> list[int]:
        """Return the numbers of the shards written so far."""
        return [number for number in range(len(manifest.shards)) if self.shard(number).exists()]

    def results(self, batch: int, row: int | None) -> Path:
        """Return the path of a whole result: of a batch or, if the batch failed as a whole, of one of its rows."""
        name = f"batch-{batch:06d}"
        if row is not None:
            name += f"-row-{row}"
        return self.path / f"{name}.safetensors"

    @contextlib.contextmanager
    def claimed(self, number: int, wait: bool) -> Generator[bool, None, None]:
        """Yield whether this shard is ours to write: it is missing, and no other process is writing it.

        With `wait`, wait for another process that is writing it.
        """
        import filelock

        try:
            acquired = filelock.FileLock(self.path / "locks" / f"part-{number:05d}").acquire(blocking=wait)
        except filelock.Timeout:
            yield False
            return
        with acquired:
            for half in self.path.glob(f".{self.shard(number).name}.*.tmp"):  # left behind by a process that was killed
                half.unlink()
            yield not self.shard(number).exists()

    def write_shard(self, manifest: Manifest, number: int, table: "pa.Table") -> None:
        """Write one shard in one step, with its seal."""
        import pyarrow.parquet as pq

        with self._whole(self.shard(number)) as temporary:
            whole = sealed(table, manifest.digest, number)
            # without statistics: our checks do not cover them, and other programs use them to skip rows
            pq.write_table(whole, temporary, write_page_checksum=True, write_statistics=False)

    def read_shard(self, manifest: Manifest, number: int, columns: Sequence[str] | None = None) -> "pa.Table":
        """Read one shard, or some of its columns (always including `row`)."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.shard(number)
        try:
            if columns is not None:
                columns = list(dict.fromkeys([*columns, "row"]))
            file = pq.ParquetFile(path, page_checksum_verification=True)
            table = file.read(columns=columns)
        except (pa.ArrowException, OSError, ValueError) as error:
            why = " ".join(str(error).split())
            raise FileFormatError(f"{path}: damaged ({why}). Delete it and run again to write it again.") from error
        problem = broken(table, file.schema_arrow.names, manifest.digest, number)
        if problem is None and table["row"].to_pylist() != manifest.rows_of(number):
            problem = "its rows are not those of the manifest"
        if problem is not None:
            raise FileFormatError(f"{path}: {problem}. Delete it and run again to write it again.")
        return table

    def done(self, manifest: Manifest) -> int:
        """Return how many rows are in the shards written so far."""
        return sum(len(manifest.rows_of(number)) for number in self.shards(manifest))

    @contextlib.contextmanager
    def _whole(self, path: Path) -> Generator[Path, None, None]:
        """Yield a temporary name for a file, which is renamed once it is fully on disk."""
        with disk_of(path), replacing(path) as temporary:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())


@contextlib.contextmanager
def disk_of(path: Path) -> Generator[None, None, None]:
    """Turn the error of a full disk into an `OSError` that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        what = "the disk is full. Everything written so far is complete; free some space and run again"
        raise OSError(error.errno, f"{path}: {what}") from error


def _digest(facts: Mapping[str, Any], more: bytes = b"") -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode() + more).hexdigest()


# ------------------------------------------------------------------ a shard's seal


def sealed(table: "pa.Table", run: str, shard: int) -> "pa.Table":
    """Add the seal to a shard's table; `run` is the digest of the manifest, `shard` the shard's number."""
    metadata = dict(table.schema.metadata or {})
    columns = {name: content_digest(table[name]) for name in table.column_names}
    seal = {"run": run, "shard": shard, "columns": columns}
    seal["digest"] = _digest(seal, metadata[FACTS.encode()])
    return table.replace_schema_metadata(metadata | {SEAL.encode(): json.dumps(seal).encode()})


def broken(table: "pa.Table", names: list[str], run: str, shard: int) -> str | None:
    """Return what is wrong with a shard, or None; `table` may hold only some of its columns, `names` lists all."""
    metadata: Mapping[bytes, bytes] = table.schema.metadata or {}
    if FACTS.encode() not in metadata or SEAL.encode() not in metadata:
        return "it lacks the facts that a shard of this library contains; another program rewrote it"
    try:
        seal = json.loads(metadata[SEAL.encode()])
        json.loads(metadata[FACTS.encode()])
        digest = seal.pop("digest")
        columns = seal["columns"]
        if digest != _digest(seal, metadata[FACTS.encode()]) or list(columns) != names:
            return "its facts were changed after it was written"
        if seal["run"] != run:
            return "it belongs to another run"
        if seal["shard"] != shard:
            return f"it is shard {seal['shard']}, under another number"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its facts cannot be read"
    for name in table.column_names:
        if content_digest(table[name]) != columns[name]:
            return f"its column {name!r} was changed after it was written"
    return None


def content_digest(column: "pa.ChunkedArray") -> str:
    """Return the SHA-256 of a column's content (values, lengths and nulls), however the file encodes it."""
    streams = defaultdict[tuple[int, str], Any](hashlib.sha256)
    for chunk in column.chunks:
        _feed(chunk, streams, 0)
    parts = [[*key, stream.hexdigest()] for key, stream in sorted(streams.items())]
    return hashlib.sha256(json.dumps([_kind(column.type), len(column), parts]).encode()).hexdigest()


def _kind(of: "pa.DataType") -> str:
    """Name a type, ignoring how a file names the entries of its lists."""
    import pyarrow as pa

    if pa.types.is_list(of):
        return f"lists of {_kind(of.value_type)}"
    return str(of)


def _feed(array: "pa.Array", streams: Mapping[tuple[int, str], Any], depth: int) -> None:
    """Add an array to the digests of its level, and its list items to those of the next."""
    import pyarrow as pa

    compute: Any = importlib.import_module("pyarrow.compute")  # its functions are only created on import
    streams[depth, "there"].update(array.is_valid().to_numpy(zero_copy_only=False).tobytes())
    present = array.drop_null()
    if pa.types.is_list(array.type):
        streams[depth, "lengths"].update(compute.list_value_length(present).to_numpy(zero_copy_only=False).tobytes())
        _feed(present.flatten(), streams, depth + 1)
    elif pa.types.is_string(array.type):
        streams[depth, "lengths"].update(compute.binary_length(present).to_numpy(zero_copy_only=False).tobytes())
        streams[depth, "values"].update("".join(present.to_pylist()).encode())
    else:
        streams[depth, "values"].update(present.to_numpy(zero_copy_only=False).tobytes())


# ------------------------------------------------------------------ the identity of a run


def model_identity(model: ModelLike) -> dict[str, Any]:
    """Return what identifies a model: names, versions, dtype, a digest of its numbers, configuration, hooks.

    Versions are those of this library, TransformerLens and transformers; PyTorch's only affects rounding. Of hooks,
    only the hook points count.
    """
    view = ModelView(model)
    digest = hashlib.sha256()
    for name, numbers in (*sorted(view.model.state_dict().items()), *stored(view.model)):
        if isinstance(numbers, torch.Tensor) and not numbers.is_meta:
            digest.update(f"{name} {tuple(numbers.shape)} {numbers.dtype}".encode())
            digest.update(numbers.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    versions = {"transformers": version("transformers"), "tensorlens_tl": __version__}
    numbers = {"weights": digest.hexdigest(), CONFIGURATION: compact(configuration(view.model))}
    return view.provenance() | versions | numbers | {"hooks": other_hooks(view.model)}


def differing(before: Any, now: Any) -> str:
    """Describe what differs, briefly: by entry for tables, otherwise both values."""
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return f"{before!r}, now {now!r}"
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    differences = [_difference(name, before.get(name), now.get(name)) for name in names]
    same = [name for name in before if name not in names and _is_digest(before[name])]
    if same and any(_is_digest(now.get(name)) for name in names):
        differences.append(f"the same {' and '.join(same)}")
    return ", ".join(differences)


def _difference(name: str, before: Any, now: Any) -> str:
    if name == CONFIGURATION and before and now:
        changes = changed(before, now)
        listed = changes[:LISTED]
        if len(changes) > LISTED:
            listed.append(f"and {len(changes) - LISTED} more")
        return f"{name}: {'; '.join(listed)}"
    if _is_digest(before) and _is_digest(now):
        return f"{name}: not the same"
    if _is_digest(before):
        return f"{name}: there, now none"
    if _is_digest(now):
        return f"{name}: none, now there"
    return f"{name}: {before!r}, now {now!r}"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and all(letter in "0123456789abcdef" for letter in value)


ENDS = 1.96
"""The half-width of a 95 % interval, in standard errors of the mean."""

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


class DatasetResults:
    """The results of a run, finished or not, read from its folder on demand.

    `path` is the folder and `manifest` describes the run. Shards are plain Parquet files that
    ``datasets.load_dataset("parquet", data_files="run/part-*.parquet")``, pandas, polars and DuckDB can read as well.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Folder(path)
        self.path = self._folder.path
        self.manifest = self._folder.manifest()

    def __repr__(self) -> str:
        rows = f"{len(self)} rows"
        if not self.complete:
            rows = f"{len(self)} of {self.manifest.rows} rows"
        return f"DatasetResults({str(self.path)!r}, {self.manifest.identity['method']!r}, {rows})"

    @property
    def shards(self) -> list[int]:
        """The numbers of the shards written so far."""
        return self._folder.shards(self.manifest)

    @property
    def complete(self) -> bool:
        """Whether every row has been processed."""
        return len(self.shards) == len(self.manifest.shards)

    def __len__(self) -> int:
        """Return the number of rows processed so far."""
        return self._folder.done(self.manifest)

    def tables(self, columns: Sequence[str] | None = None) -> Iterator["pa.Table"]:
        """Yield one shard after another as an Arrow table; raise `FileFormatError` for a damaged one."""
        for number in self.shards:
            yield self._folder.read_shard(self.manifest, number, columns)

    def __iter__(self) -> Iterator[tuple[str, Attribution | Terms | Evaluation]]:
        """Yield ids and results of the rows that did not fail, shard by shard."""
        for table in self.tables():
            for row in table.to_pylist():
                if row["error"] is None:
                    yield row["id"], self._result(row, table)

    # the folder, not the calling code, determines the class of the results
    def __getitem__(self, id: str | int) -> Any:
        """Return the result of one row: an Attribution, Terms of a circuit, or an Evaluation of one unit.

        Raises `InvalidInputError` if there is no such row (yet), or if it failed.
        """
        if str(id) not in self._rows:
            state = "" if self.complete else " among those that are done"
            raise InvalidInputError(f"{self.path}: no row has the id {id!r}{state}.")
        shard, index = self._rows[str(id)]
        table = self._folder.read_shard(self.manifest, shard)
        (row,) = table.slice(index, 1).to_pylist()
        if row["error"] is not None:
            raise InvalidInputError(f"{self.path}: row {id!r} failed: {row['error']}")
        return self._result(row, table)

    def _result(self, row: dict[str, Any], table: "pa.Table") -> Any:
        facts = facts_in(table)
        kind = facts.get("result")
        if kind == "Evaluation":
            curves = torch.tensor(row["scores"], dtype=torch.float64).reshape(row["shape"])
            return _evaluation(curves[:, :, None], [row["id"]], facts)
        if kind == "Terms":
            return unpacked_terms(row, facts)
        return unpacked(row, facts)

    @cached_property
    def _rows(self) -> dict[str, tuple[int, int]]:
        """Each row's shard and its index in it, by id."""
        return {
            name: (shard, index)
            for shard, table in zip(self.shards, self.tables(["id"]), strict=True)
            for index, name in enumerate(table["id"].to_pylist())
        }

    def frames(self) -> "Iterator[pd.DataFrame]":
        """Yield long tables of the rows that did not fail, shard by shard.

        Columns: `id` and `row` of the data set, then those of the result's own `to_dataframe` except `batch`. With
        ``keep="top:N"``, a row of kind ``"rest"`` is the sum of the scores that were not stored, so sums still hold.

        Raises:
            FileFormatError: a shard is damaged.
        """
        import pandas as pd

        for table in self.tables():
            frames = list[pd.DataFrame]()
            for row in table.to_pylist():
                if row["error"] is None:
                    result = self._result(row, table)
                    frame = result.to_dataframe()
                    if isinstance(result, Attribution) and row["keys"] is not None:
                        frame = _stored(frame, row, result)
                    frame = frame.drop(columns="batch", errors="ignore")
                    frame.insert(0, "id", row["id"])
                    frame.insert(1, "row", row["row"])
                    frames.append(frame)
            if frames:
                yield pd.concat(frames, ignore_index=True)

    def to_dataframe(self, columns: Sequence[str] | None = None, *, long: bool = False) -> "pd.DataFrame":
        """Return all rows in the order of the data set, one row each.

        Args:
            columns: the columns to return; None for all.
            long: instead, one row per data-set row, query and source, as in `frames`.

        Raises:
            InvalidInputError: no row has been processed yet, or no such column.
            FileFormatError: a shard is damaged.
        """
        import pandas as pd
        import pyarrow as pa

        if long:
            frames = [*self.frames()]
            if not frames:
                raise InvalidInputError(f"{self.path}: no row has been processed yet, or all failed.")
            frame = pd.concat(frames, ignore_index=True)
            _check_columns(columns, frame.columns)
        else:
            if self.shards:
                _check_columns(columns, schema(self.manifest.double).names)
            tables = list(self.tables(columns))
            if not tables:
                raise InvalidInputError(f"{self.path}: no row is done yet.")
            frame = pa.concat_tables([table.replace_schema_metadata() for table in tables]).to_pandas()
        frame = frame.sort_values("row", kind="stable", ignore_index=True)
        return frame if columns is None else frame.reindex(columns=list(columns))

    def summary(self, quantiles: Quantiles = QUANTILES, *, names: str = "*", memory: Memory = None) -> "pd.DataFrame":
        """Return the distribution of each component's effect over the processed rows (``method="logit_attribution"``).

        The numbers are exact. Memory holds some of the components over all rows, or one shard.

        Args:
            quantiles: the quantiles to compute, from 0 to 1, interpolated between values.
            names: only some components: ``"L*H*"`` selects heads, ``"L3H*"`` those of one layer.
            memory: what may be allocated at once, as ``"512MB"`` or bytes; with less, shards are read more often.

        Returns:
            One row per component: `count`, `mean`, `low`, `high`, `variance` (with count − 1), `std`, and the quantiles
            as ``"5%"``. Each query of each row is one value. `low` and `high` are the mean's 95 % interval, ±1.96
            standard errors, treating rows (not the queries within a row) as independent; it is too narrow below some 30
            rows, and NaN for one.

        Raises:
            InvalidInputError: the rows are not terms, no row is processed, or an unknown component or quantile.
            FileFormatError: a shard is damaged.
        """
        import pandas as pd

        self._check_kind("Terms", "summary", "of method='logit_attribution' or 'total_effects'")
        shares = _quantiles(quantiles)
        bound = in_bytes(memory)
        terms = list[str]()
        lengths = list[int]()  # queries per row
        for table in self.tables(["shape"]):
            terms += [name for name in facts_in(table).get("names", ()) if name not in terms]
            lengths += [shape[0] for shape in table["shape"].to_pylist() if shape is not None]
        chosen = [name for name in terms if fnmatchcase(name, names)]
        if not chosen:
            raise InvalidInputError(f"names={names!r}: there are {', '.join(terms[:8])}, …")
        # shards store a row's terms together, so as many terms as fit into memory are gathered from all shards at once
        count = sum(lengths)
        at_once = max(1, bound // (3 * 8 * max(1, count)))  # the values, and copies for the variance and the quantiles
        lines: list[list[float]] = []
        for start in range(0, len(chosen), at_once):
            values = self._gathered(chosen[start : start + at_once], count)
            lines += _statistics(values, lengths, shares).tolist()
        columns = ["mean", "low", "high", "variance", "std", *(f"{100 * share:g}%" for share in shares)]
        frame = pd.DataFrame(lines, columns=pd.Index(columns), index=pd.Index(chosen, name="term"))
        frame.insert(0, "count", count)
        return frame

    def _gathered(self, terms: Sequence[str], count: int) -> np.ndarray:
        """Return each term's value at every query of every row, `[term, value]`; zero where a batch lacks the term."""
        values = np.zeros((len(terms), count))
        start = 0
        for table in self.tables(["scores"]):
            columns = {name: column for column, name in enumerate(facts_in(table).get("names", ()))}
            if not columns:  # every row of the shard failed
                continue
            parts = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table["scores"].chunks]
            scores = np.concatenate(parts).reshape(-1, len(columns))
            for number, name in enumerate(terms):
                if name in columns:
                    values[number, start : start + len(scores)] = scores[:, columns[name]]
            start += len(scores)
        return values

    def evaluation(self) -> Evaluation:
        """Return the processed rows of `evaluate.perturbation_dataset` as one evaluation, in the data set's order.

        All curves are held in memory: eight bytes per row, metric, method and step.

        Raises:
            InvalidInputError: the rows are not evaluations, or no row is processed.
            FileFormatError: a shard is damaged.
        """
        self._check_kind("Evaluation", "evaluation", "of evaluate.perturbation_dataset")
        curves_of = dict[int, np.ndarray]()
        facts = dict[str, Any]()
        failed = 0
        units = dict[int, str]()
        for table in self.tables(["row", "id", "scores", "shape"]):
            shard_facts = facts_in(table)
            if "methods" in shard_facts:
                facts = shard_facts
            for row in table.to_pylist():
                if row["scores"] is None:
                    failed += 1
                    continue
                curves_of[row["row"]] = np.array(row["scores"]).reshape(row["shape"])
                units[row["row"]] = row["id"]
        if not curves_of:
            raise InvalidInputError("evaluation: no row of this run has been processed, or all failed.")
        order = sorted(curves_of)
        curves = torch.from_numpy(np.stack([curves_of[row] for row in order], axis=2))
        return _evaluation(curves, [units[row] for row in order], facts, failed)

    def _check_kind(self, kind: str, name: str, what: str) -> None:
        shards = map(facts_in, self.tables(["row"]))
        kinds = {facts.get("result", "Attribution") for facts in shards if "dtype" in facts}
        if not kinds:
            raise InvalidInputError(f"{name}: no row of {self.path} has been processed, or all failed.")
        if kinds != {kind}:
            method = self.manifest.identity["method"]
            raise InvalidInputError(f"{name}: these rows are results of {method!r}, not {what}.")

    def errors(self) -> "pd.DataFrame":
        """Return the rows that failed: `row`, `id` and `error`."""
        frame = self.to_dataframe(["row", "id", "error"])
        return frame.dropna(subset=["error"]).reset_index(drop=True)


def _check_columns(columns: Sequence[str] | None, known: Iterable[str]) -> None:
    for name in columns or ():
        check_choice("columns", name, known)


@checked_names
def load_results(path: str | os.PathLike[str]) -> DatasetResults:
    """Open the results of a run that `attribute_dataset` began.

    Raises:
        FileFormatError: the folder holds no run, or its manifest is damaged.
    """
    return DatasetResults(path)


def _statistics(values: np.ndarray, lengths: Sequence[int], shares: Sequence[float]) -> np.ndarray:
    """Return mean, interval, variance, standard deviation and quantiles of each line of `[term, value]`.

    Each row's values are adjacent, with counts in `lengths`. The argument is overwritten.
    """
    mean = values.mean(axis=1)
    error = np.full(len(values), np.nan)
    rows = len(lengths)
    if rows > 1:  # a row's deviations are summed first, so that it counts once, however many queries it has
        starts = np.cumsum([0, *lengths[:-1]])
        deviations = np.add.reduceat(values, starts, axis=1) - np.outer(mean, lengths)
        error = np.sqrt(rows / (rows - 1) * (deviations**2).sum(axis=1)) / values.shape[1]
    variance = np.full(len(values), np.nan)
    if values.shape[1] > 1:
        variance = values.var(axis=1, ddof=1)
    statistics = [mean, mean - ENDS * error, mean + ENDS * error, variance, np.sqrt(variance)]
    if shares:
        statistics += list(np.quantile(values, shares, axis=1, overwrite_input=True))
    return np.column_stack(statistics)


def _quantiles(quantiles: Quantiles) -> list[float]:
    value = plain(quantiles)
    if isinstance(value, int | float):
        value = [value]
    try:
        shares = [float(share) for share in value]
    except (TypeError, ValueError):
        shares = [-1.0]
    if not all(0 <= share <= 1 for share in shares):
        raise InvalidInputError(f"quantiles={quantiles!r}: pass shares of the rows, such as (0.05, 0.5, 0.95).")
    return shares


def _evaluation(curves: torch.Tensor, units: list[str], facts: Mapping[str, Any], failed: int = 0) -> Evaluation:
    """Turn curves `[metric, method, unit, step]` into an evaluation, using a shard's `facts`."""
    axis = torch.tensor(facts["axis"], dtype=torch.float64)
    settings = facts["settings"] | {"prompts": len(units)}
    if failed:
        settings["failed"] = failed
    return Evaluation(
        kind=facts["kind"],
        values=area(curves, axis),
        metrics=facts["metrics"],
        methods=facts["methods"],
        units=units,
        curves=curves,
        axis=axis,
        axis_name=facts["axis_name"],
        settings=settings,
        skipped=facts["skipped"],
    )


def _stored(frame: "pd.DataFrame", row: Mapping[str, Any], result: Attribution) -> "pd.DataFrame":
    """Replace rows for source tokens whose scores were not stored by their sum, one row per query."""
    import pandas as pd

    if result.scores.ndim != 3:
        raise InvalidInputError(f"long table: results are {result.axes}; keep='scores' stores all of them.")
    keys = np.array(row["keys"]).reshape(row["shape"])
    positions = result.queries[0].tolist()
    pairs = {(position, key) for position, of_query in zip(positions, keys.tolist(), strict=True) for key in of_query}
    lines = zip(frame["query"], frame["key"], frame["kind"], strict=True)
    chosen = frame.loc[[kind != "token" or (query, key) in pairs for query, key, kind in lines]]
    first = frame.drop_duplicates("query").set_index("query").loc[positions].reset_index()
    rest = first.assign(key=pd.NA, key_token="", kind="rest", generated=False, score=row["rest"])
    table = pd.concat([chosen, rest.astype(frame.dtypes)], ignore_index=True)
    order = {position: number for number, position in enumerate(positions)}
    return table.sort_values("query", kind="stable", key=lambda column: column.map(order), ignore_index=True)
