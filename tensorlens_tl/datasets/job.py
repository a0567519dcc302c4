"""One run: what is computed of which rows, and how a shard of it is written."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tensorlens_tl import __version__
from tensorlens_tl.datasets.folder import Folder, Manifest, disk_of
from tensorlens_tl.datasets.identity import model_identity
from tensorlens_tl.datasets.rows import Rows
from tensorlens_tl.datasets.work import Record, Work, run_rows
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import ModelLike
from tensorlens_tl.passes import one_reading
from tensorlens_tl.results.storage import tagged

PROBED = 4
"""So many rows, from the shortest to the longest, are tried before a run begins, until one does not fail: where all of
them fail, the options are at fault."""


@dataclass(frozen=True, eq=False)
class Job:
    """What is computed of which rows, and where the results go.

    Attributes:
        model: a TransformerLens model; None where each actor loads it.
        rows: the data set.
        work: what is computed of each row.
        folder: where the results go.
    """

    model: Any
    rows: Rows
    work: Work
    folder: Folder

    def identity(self) -> dict[str, Any]:
        """What must be the same when the run is resumed, as JSON holds it."""
        return tagged({"model": model_identity(self.model), "data": self.rows.identity(), **self.work.identity()})

    def with_model(self, model: ModelLike | None) -> "Job":
        """The same run by another copy of its model."""
        return replace(self, model=model)

    def try_some(self) -> None:
        """Refuse options that no row works with, before anything is written.

        Raises:
            InvalidInputError: no row is a prompt, or the first that are tried all fail.
        """
        good = [row for row in range(len(self.rows)) if row not in self.rows.errors]
        if not good:
            first = min(self.rows.errors)
            raise InvalidInputError(f"rows: none is a prompt. Row {first}: {self.rows.errors[first]}.")
        good.sort(key=lambda row: len(self.rows.tokens[row]))
        error = None
        tried = dict.fromkeys(good[share * (len(good) - 1) // (PROBED - 1)] for share in range(PROBED))
        for row in tried:
            error = self._records([row])[0][0].get("error")
            if not error:
                return
        raise InvalidInputError(f"{self.work.name}: no row works of those that were tried ({len(tried)}). {error}")

    def write(self, manifest: Manifest, shard: int) -> None:
        """Compute and write one shard.

        Raises:
            OSError: it cannot be written.
        """
        records: list[Record] = []
        facts: dict[str, Any] = {}
        with one_reading():
            for at in range(*manifest.shards[shard]):
                batch = manifest.batches[at]
                batch_records, results = self._records(batch)
                for row, result in results:
                    facts = self.work.facts(result)
                    self._save(at, row, result)
                records += [self.rows.record(row) | record for row, record in zip(batch, batch_records, strict=True)]
        facts["version"] = __version__
        self.folder.write_shard(manifest, shard, self.work.table(records, facts, manifest.double))

    def _save(self, batch: int, row: int | None, result: Any) -> None:
        """Write a whole result beside the shards, where the run keeps those."""
        if not self.work.save_whole:
            return
        path = self.folder.results(batch, row)
        with disk_of(path):
            result.save(path)

    def _records(self, batch: list[int]) -> tuple[list[Record], list[tuple[int | None, Any]]]:
        """The records of a batch, and its results: one of all rows (None), or those of its parts, by the number
        of the first row."""
        if batch[0] in self.rows.errors:  # rows that are no prompt are a batch by themselves
            return [{"error": self.rows.errors[row]} for row in batch], []
        per_row = {name: [values[row] for row in batch] for name, values in self.rows.options.items()}
        records, results = run_rows(self.work, self.model, [self.rows.tokens[row] for row in batch], per_row)
        numbers: dict[int | None, int] = dict(enumerate(batch))
        return records, [(numbers.get(index), result) for index, result in results]


def run_here(job: Job, manifest: Manifest) -> Iterator[int]:
    """Write the missing shards in this process; gives the number of each once it is written.

    First those that no other process is writing; then the others, once that process has ended.
    """
    left = list(range(len(manifest.shards)))
    for wait in (False, True):
        for number in list(left):
            if write_once(job, manifest, number, wait):
                left.remove(number)
                yield number


def write_once(job: Job, manifest: Manifest, shard: int, wait: bool) -> bool:
    """Write a shard unless it is written or another process is writing it; whether it is written now."""
    if job.folder.shard(shard).exists():
        return True
    with job.folder.claimed(shard, wait) as ours:
        if ours:
            job.write(manifest, shard)
    return job.folder.shard(shard).exists()
