"""Running a method, or a function of `circuits`, over a data set."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from tqdm.auto import tqdm

from tensorlens_tl import __version__
from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl._method_names import unknown_method
from tensorlens_tl._row_files import UNKNOWN_ID, Reading
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.datasets.folder import DatasetResults, Folder, Manifest, differing, disk_of, model_identity, planned
from tensorlens_tl.datasets.rows import Rows, RowSource, check_columns, read_rows
from tensorlens_tl.datasets.work import CIRCUITS, Attributions, CircuitTerms, Record, Work, run_rows
from tensorlens_tl.errors import InvalidInputError, RegistryError, warn_caller
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes import one_reading
from tensorlens_tl.registry import list_methods
from tensorlens_tl.results.storage import tagged

if TYPE_CHECKING:
    import pyarrow as pa

    Engine = Literal["ray"] | None
    """Where to compute: None for this process, or ``"ray"`` for the actors of a Ray cluster."""

    LoadModel = Callable[[], ModelLike]
    """A function without arguments that loads the model."""
else:
    Engine = LoadModel = Any  # checked at run time, with better messages


PROBED = 4
"""How many rows, from shortest to longest, are tried before a run begins; if all fail, the options are at fault."""


@checked_names
def attribute_dataset(
    model: ModelLike,
    rows: RowSource,
    out: str | os.PathLike[str],
    *,
    method: str = "tensorlens",
    text: str = "text",
    id: str = UNKNOWN_ID,
    columns: Mapping[str, str] | None = None,
    tokens_per_batch: int = 8192,
    keep: str = "scores",
    truncate: bool = False,
    resume: bool = True,
    progress: bool = True,
    prepend_bos: bool | None = None,
    memory: Memory = None,
    engine: Engine = None,
    load_model: LoadModel | None = None,
    num_actors: int = 1,
    num_gpus: float | int = 0,
    **options: Any,
) -> DatasetResults:
    """Attribute every row of a data set and write the results as Parquet shards.

    Rows run in batches of similar length. An interrupted run resumes when it is called again with the same arguments;
    several processes may share one folder. A row that fails is written with its error.

    Args:
        model: a TransformerLens model that reads text.
        rows: a ``.jsonl``, ``.csv`` or ``.parquet`` file, a Hugging Face data set, a data frame, or any iterable of
            mappings, texts, or lists of token ids. It is read once, before work starts.
        out: the folder of the run; created if missing.
        method: one of `list_methods()`; or ``"logit_attribution"`` or ``"total_effects"`` of `tensorlens_tl.circuits`:
            each row's result is then a `Terms`, and `DatasetResults.summary` gives the distribution of each
            component's effect.
        text: the column of texts (or token ids); without a column ``"text"``, ``"prompt"`` is read.
        id: the column of names, which must be distinct texts or integers; without a column ``"id"``, row numbers.
        columns: options (`target`, `minus`, `direction`) that differ between rows, each with its column:
            ``{"target": "answer"}``.
        tokens_per_batch: the most tokens per batch, padding included; `memory` may split batches further.
        keep: ``"scores"``, ``"top:32"`` (each query's largest scores, and the sum of the others), or ``"all"``
            (additionally whole results as safetensors, with layer maps and standard errors).
        truncate: cut off the end of texts longer than the context (recorded); otherwise such rows get an error.
        resume: False raises an error if the folder contains a run.
        progress: show a progress bar.
        prepend_bos: as in TransformerLens.
        memory: see `attribute`.
        engine: None runs here; ``"ray"`` runs on the actors of a Ray cluster, where `out` must be a shared folder.
        load_model: for Ray: a function that loads this model, called once by each actor; None sends the model itself.
        num_actors, num_gpus: for Ray: the number of actors, and of GPUs for each.
        options: options of the method or function, and of `freeze`.

    Returns:
        The results, read from the folder on demand: by id, as tables, or shard by shard.

    Raises:
        InvalidInputError: an unknown column or option, ids that are not distinct, no rows, rows that all fail; or a
            folder that cannot be written, contains other files, or holds a run of another model, data or options.
        FileFormatError: the folder's manifest or one of its shards is damaged.
        RegistryError: unknown method.
        OSError: a shard cannot be written; those before it are complete.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     results = tlens.attribute_dataset(model, [text, "for x in"], folder, target=" the", progress=False)
    ...     results["1"].tokens, len(results.errors())
    ([['<|bos|>', 'for', ' x', ' in']], 0)
    """
    in_bytes(memory)
    if memory is not None:
        options["memory"] = memory
    work = work_of(method, keep, options, columns)
    reading = Reading(text, id, columns, truncate, prepend_bos)
    run = RunOptions(out, reading, tokens_per_batch, resume, progress, engine, load_model, num_actors, num_gpus)
    view, prompts = read_prompts(model, rows, run.reading)
    return run_work(view, prompts, work, run)


def work_of(method: str, keep: str, options: Mapping[str, Any], columns: Mapping[str, str] | None) -> Work:
    """Return the work that `attribute_dataset` does for each row."""
    check_columns(columns, options)
    if method not in [*list_methods(), *CIRCUITS]:
        raise RegistryError(unknown_method(method, [*list_methods(), *CIRCUITS]))
    kind = CircuitTerms if method in CIRCUITS else Attributions
    return kind(method, keep, options, tuple(columns or {}))


class BatchAttributor:
    """A picklable function from columns of rows to columns of results, which loads its model on first use.

        rows.map_batches(BatchAttributor, fn_constructor_args=(load_model,), concurrency=4, num_gpus=1)   # Ray Data
        rows.map(BatchAttributor(load_model, target=" the"), batched=True)                                # Hugging Face

    Results have the columns of `attribute_dataset`'s shards. The calling tool handles batching, folders and resuming.

    Args:
        load_model: a function without arguments that returns the model (defined in a module, if it is to be pickled).
        method, text, columns, keep, truncate, prepend_bos, options: see `attribute_dataset`.
        id: the column that names rows; required.

    Raises:
        InvalidInputError: `load_model` is not a function, or an option is unknown.
        RegistryError: unknown method.
    """

    def __init__(
        self,
        load_model: LoadModel,
        *,
        method: str = "tensorlens",
        text: str = "text",
        id: str = "id",
        columns: Mapping[str, str] | None = None,
        keep: str = "scores",
        truncate: bool = False,
        prepend_bos: bool | None = None,
        **options: Any,
    ) -> None:
        if not callable(load_model) or isinstance(load_model, torch.nn.Module):
            raise InvalidInputError("load_model: pass a function that loads the model, such as lambda: model.")
        self.load_model = load_model
        self.work = work_of(method, keep, options, columns)
        self.reading = Reading(text, id, columns, truncate, prepend_bos)
        self._model: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_model": None}

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> "pa.Table":
        """Return results for rows given as columns; raise `InvalidInputError` for a missing column or repeated ids."""
        if self._model is None:
            self._model = ModelView(self.load_model()).model
        names = list(batch)
        if self.reading.id not in names:
            raise InvalidInputError(f"rows: there is no column {self.reading.id!r} to name them; pass id=.")
        tables = [dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        rows = read_rows(ModelView(self._model), tables, self.reading)
        by_row: dict[int, Record] = {row: {"error": error} for row, error in rows.errors.items()}
        facts = dict[str, Any]()
        good = [row for row in range(len(rows)) if row not in rows.errors]
        if good:
            records, results = run_rows(self.work, self._model, rows, good)
            by_row |= dict(zip(good, records, strict=True))
            if results:
                facts = self.work.facts(results[-1][1])
        double = next(self._model.parameters()).dtype == torch.float64
        return self.work.table([rows.record(row) | by_row[row] for row in range(len(rows))], facts, double)


# ------------------------------------------------------------------ any work over a data set


@dataclass(frozen=True)
class RunOptions:
    """How a run reads, batches and writes its rows; see `attribute_dataset`.

    Only options that affect the resulting prompts belong to a run's identity: it can be resumed with other batch sizes,
    here or on Ray.

    Raises:
        InvalidInputError: fewer than 1 token per batch, an unknown engine, or a file in place of the folder.
    """

    out: str | os.PathLike[str]
    reading: Reading
    tokens_per_batch: int = 8192
    resume: bool = True
    progress: bool = True
    engine: Engine = None
    load_model: LoadModel | None = None
    num_actors: int = 1
    num_gpus: float | int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_per_batch", whole_number("tokens_per_batch", self.tokens_per_batch, 1))
        if self.engine not in (None, "ray"):
            raise InvalidInputError(f"engine={self.engine!r}; use None for this process, or 'ray'.")
        if Path(self.out).is_file():
            raise InvalidInputError(f"out={self.out}: that is a file; name a folder.")


def read_prompts(model: ModelLike, source: RowSource, reading: Reading) -> tuple[ModelView, Rows]:
    """Return a view of the model, and the rows of a data set as its prompts; see `attribute_dataset`."""
    view = ModelView(model)
    view.refuse_encoder_decoder("a run over a data set")
    if view.reads != "tokens":
        raise InvalidInputError(f"a run over a data set: {view.description} reads {view.reads}, not text.")
    return view, read_rows(view, source, reading)


@dataclass(frozen=True, eq=False)
class Job:
    """The `work` to do for some `rows`, and the `folder` for the results; `model` is None if each actor loads it."""

    model: Any
    rows: Rows
    work: Work
    folder: Folder

    def identity(self) -> dict[str, Any]:
        """Return what must be the same to resume the run, as JSON-compatible values."""
        return tagged({"model": model_identity(self.model), "data": self.rows.identity(), **self.work.identity()})

    def try_some(self) -> None:
        """Raise for options that work with no row, before anything is written."""
        good = sorted(self.rows.prompts(), key=lambda row: len(self.rows.tokens[row]))
        error = None
        tried = dict.fromkeys(good[share * (len(good) - 1) // (PROBED - 1)] for share in range(PROBED))
        for row in tried:
            error = self._records([row])[0][0].get("error")
            if not error:
                return
        raise InvalidInputError(f"{self.work.name}: none of the {len(tried)} rows that were tried works. {error}")

    def write(self, manifest: Manifest, shard: int) -> None:
        """Compute and write one shard."""
        records: list[Record] = []
        facts: dict[str, Any] = {}
        with one_reading():
            for at in range(*manifest.shards[shard]):
                batch = manifest.batches[at]
                batch_records, results = self._records(batch)
                for row, result in results:
                    facts = self.work.facts(result)
                    if self.work.save_whole:
                        path = self.folder.results(at, row)
                        with disk_of(path):
                            result.save(path)
                records += [self.rows.record(row) | record for row, record in zip(batch, batch_records, strict=True)]
        facts["version"] = __version__
        self.folder.write_shard(manifest, shard, self.work.table(records, facts, manifest.double))

    def _records(self, batch: list[int]) -> tuple[list[Record], list[tuple[int | None, Any]]]:
        """Return a batch's records and results, as `run_rows` does."""
        if batch[0] in self.rows.errors:  # rows that are not prompts form a batch of their own
            return [{"error": self.rows.errors[row]} for row in batch], []
        return run_rows(self.work, self.model, self.rows, batch)


def run_work(view: ModelView, rows: Rows, work: Work, options: RunOptions) -> DatasetResults:
    """Do some work for every row of a data set (see `read_prompts`), and write the results as Parquet shards."""
    job = Job(view.model, rows, work, Folder(Path(options.out).absolute()))
    if not job.folder.begun():
        job.try_some()
    batches, shards = planned([len(ids) for ids in rows.tokens], sorted(rows.errors), options.tokens_per_batch)
    double = next(view.model.parameters()).dtype == torch.float64
    manifest = Manifest(job.identity(), batches, bool(rows.errors), shards, double)
    resumed = job.folder.begun()
    manifest = job.folder.begin(manifest, options.resume)
    for number in job.folder.shards(manifest):
        job.folder.read_shard(manifest, number, ["row"])
    if resumed and options.progress:
        done = job.folder.done(manifest)
        said = f"{done} of {manifest.rows} rows were written before; continuing with the other {manifest.rows - done}."
        if done == manifest.rows:
            said = f"All {done} rows were written before; there is nothing left to run."
        tqdm.write(said, file=sys.stderr)
    _write(job, manifest, options)
    results = DatasetResults(job.folder.path)
    count = len(results.errors())
    if count:
        advice = f"load_results({str(options.out)!r}).errors() says why"
        warn_caller(f"{count} of {manifest.rows} rows failed; {advice}.")
    return results


def _write(job: Job, manifest: Manifest, options: RunOptions) -> None:
    """Write the missing shards, here or on Ray, with a progress bar."""
    run = run_on_ray(job, manifest, options) if options.engine == "ray" else run_here(job, manifest)
    try:
        with tqdm(total=manifest.rows, desc=job.work.name, unit="row", disable=not options.progress) as bar:
            for number in run:
                bar.update(len(manifest.rows_of(number)))
    except KeyboardInterrupt:
        done = f"{job.folder.done(manifest)} of {manifest.rows} rows are written"
        # without the traceback of the interrupted computation
        raise KeyboardInterrupt(f"{done}; run the same command again to continue.") from None


def run_here(job: Job, manifest: Manifest) -> Iterator[int]:
    """Write the missing shards in this process, yielding the number of each one.

    Shards that other processes are writing come last, and are written here only if those processes fail to.
    """
    left = list(range(len(manifest.shards)))
    for wait in (False, True):
        for number in list(left):
            if write_once(job, manifest, number, wait):
                left.remove(number)
                yield number


def write_once(job: Job, manifest: Manifest, shard: int, wait: bool) -> bool:
    """Write a shard unless it exists or another process is writing it; return whether it now exists."""
    if job.folder.shard(shard).exists():
        return True
    with job.folder.claimed(shard, wait) as ours:
        if ours:
            job.write(manifest, shard)
    return job.folder.shard(shard).exists()


# ------------------------------------------------------------------ on the actors of a Ray cluster

# Ray distributes the shards; each actor loads the model once. Progress is recorded only in the run's folder, so a dying
# actor costs one shard, and a run can be resumed with or without Ray.


def run_on_ray(job: Job, manifest: Manifest, options: RunOptions) -> Iterator[int]:
    """Write the missing shards on Ray actors, yielding the number of each one."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.data  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InvalidInputError("engine='ray' needs Ray: in a clone, pip install -e '.[ray]'.") from error
    num_actors = whole_number("num_actors", options.num_actors, 1)
    left = []
    for number in range(len(manifest.shards)):
        if job.folder.shard(number).exists():
            yield number
        else:
            left.append({"shard": number})
    if not left:
        return
    if options.load_model is not None:
        job = replace(job, model=None)
    reference = ray.put((job, manifest, options.load_model))
    shards = ray.data.from_items(left, override_num_blocks=len(left))
    batches = shards.map_batches(
        ShardWriter,
        fn_constructor_args=([reference],),  # in a list, or Ray would resolve it before the call
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=num_actors),
        num_gpus=options.num_gpus or None,
    )
    for batch in batches.iter_batches(batch_size=1, prefetch_batches=0):
        number = int(cast(Any, batch)["shard"][0])
        if not job.folder.shard(number).exists():
            raise InvalidInputError(f"out={job.folder.path}: an actor wrote to another folder of that name; share one.")
        yield number


class ShardWriter:
    """A Ray actor that holds the model and writes the shards sent to it."""

    def __init__(self, sent: list[Any]) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        self.job: Job
        self.job, self.manifest, load_model = ray.get(sent[0])
        if load_model is not None:
            self.job = replace(self.job, model=load_model())
        loaded = tagged(model_identity(self.job.model))
        passed = self.manifest.identity["model"]
        if loaded != passed:
            raise InvalidInputError(
                f"load_model: it loads a different model from the one that was passed ({differing(passed, loaded)})."
            )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Write these shards and return their numbers."""
        for number in batch["shard"]:
            write_once(self.job, self.manifest, int(number), wait=True)
        return batch
