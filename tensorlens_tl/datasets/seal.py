"""What a shard says of itself, so that it is not taken for another: its run, its number, and digests of all it holds.

A seal stands in the shard's metadata, beside the facts that its rows have in common. It finds damage, edits and
files of other runs; it is no signature.
"""

import hashlib
import importlib
import json
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tensorlens_tl.datasets.packing import FACTS

if TYPE_CHECKING:
    import pyarrow as pa

SEAL = "tensorlens_tl.seal"
"""Where a shard's metadata hold its seal."""


def sealed(table: "pa.Table", run: str, shard: int) -> "pa.Table":
    """A shard's table with its seal.

    Args:
        table: rows, and the facts that they have in common.
        run: the digest of the run's manifest.
        shard: its number there.
    """
    metadata = dict(table.schema.metadata or {})
    columns = {name: content_digest(table[name]) for name in table.column_names}
    seal = {"run": run, "shard": shard, "columns": columns}
    seal["digest"] = _digest(seal, metadata[FACTS.encode()])
    return table.replace_schema_metadata(metadata | {SEAL.encode(): json.dumps(seal).encode()})


def broken(table: "pa.Table", names: list[str], run: str, shard: int) -> str | None:
    """What is wrong with a shard that was read, in words; None where it is what was written.

    Args:
        table: the columns that were read, all or some.
        names: those that the file has.
        run, shard: see `sealed`.
    """
    metadata: Mapping[bytes, bytes] = table.schema.metadata or {}
    if FACTS.encode() not in metadata or SEAL.encode() not in metadata:
        return "it lacks the facts that a shard of this library holds; another program rewrote it"
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
            return f"it is shard {seal['shard']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its facts cannot be read"
    for name in table.column_names:
        if content_digest(table[name]) != columns[name]:
            return f"its column {name!r} was changed after it was written"
    return None


def content_digest(column: "pa.ChunkedArray") -> str:
    """SHA-256 of what a column holds: values, lengths, and what is missing, however a file lays them out."""
    streams = defaultdict[tuple[int, str], Any](hashlib.sha256)
    for chunk in column.chunks:
        _feed(chunk, streams, 0)
    parts = [[*key, stream.hexdigest()] for key, stream in sorted(streams.items())]
    return hashlib.sha256(json.dumps([_kind(column.type), len(column), parts]).encode()).hexdigest()


def _kind(of: "pa.DataType") -> str:
    """A type by name, without what a file calls the entries of its lists."""
    import pyarrow as pa

    if pa.types.is_list(of):
        return f"lists of {_kind(of.value_type)}"
    return str(of)


def _feed(array: "pa.Array", streams: Mapping[tuple[int, str], Any], depth: int) -> None:
    """Add an array to the digests of its level, and what its lists hold to those of the next."""
    import pyarrow as pa

    compute: Any = importlib.import_module("pyarrow.compute")  # its functions come to be when it is imported
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


def _digest(seal: Mapping[str, Any], facts: bytes) -> str:
    return hashlib.sha256(json.dumps(seal, sort_keys=True).encode() + facts).hexdigest()
