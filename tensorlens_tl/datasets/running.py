"""Any work over a data set: batch after batch, each shard written when it is complete."""

import sys
from pathlib import Path

import torch
from tqdm.auto import tqdm

from tensorlens_tl.datasets.folder import Folder, Manifest, planned
from tensorlens_tl.datasets.job import Job, run_here
from tensorlens_tl.datasets.options import Reading, RunOptions
from tensorlens_tl.datasets.ray_actors import run_on_ray
from tensorlens_tl.datasets.results import DatasetResults
from tensorlens_tl.datasets.rows import Rows, RowSource, read_rows
from tensorlens_tl.datasets.work import Work
from tensorlens_tl.errors import InvalidInputError, warn_caller
from tensorlens_tl.models import ModelLike, ModelView


def read_prompts(model: ModelLike, source: RowSource, reading: Reading) -> tuple[ModelView, Rows]:
    """The model of a run, and the rows of a data set as its prompts; see `attribute_dataset`.

    Raises:
        InvalidInputError: a model that reads no text, and see `read_rows`.
    """
    view = ModelView(model)
    view.refuse_encoder_decoder("a run over a data set")
    if view.reads != "tokens":
        raise InvalidInputError(f"a run over a data set: {view.description} reads {view.reads}, not text.")
    return view, read_rows(view, source, reading)


def run_work(view: ModelView, rows: Rows, work: Work, options: RunOptions) -> DatasetResults:
    """Do some work with every row of a data set, and write the results as Parquet shards.

    Args:
        view, rows: see `read_prompts`.
        work: what is computed of each row.
        options: how the run is cut into batches and written.
    """
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
        tqdm.write(_said_before(job.folder.done(manifest), manifest.rows), file=sys.stderr)
    _write(job, manifest, options)
    results = DatasetResults(job.folder.path)
    count = len(results.errors())
    if count:
        advice = f"load_results({str(options.out)!r}).errors() says why"
        warn_caller(f"{count} of {manifest.rows} rows failed; {advice}.")
    return results


def _said_before(done: int, rows: int) -> str:
    """What an earlier run of the same command has done."""
    if done == rows:
        return f"All {rows} rows were written before; nothing is left to run."
    return f"{done} of {rows} rows were written before; going on with the other {rows - done}."


def _write(job: Job, manifest: Manifest, options: RunOptions) -> None:
    """Write the missing shards, here or on Ray, with a bar."""
    run = run_on_ray(job, manifest, options) if options.engine == "ray" else run_here(job, manifest)
    try:
        with tqdm(total=manifest.rows, desc=job.work.name, unit="row", disable=not options.progress) as bar:
            for number in run:
                bar.update(len(manifest.rows_of(number)))
    except KeyboardInterrupt:
        done = f"{job.folder.done(manifest)} of {manifest.rows} rows are written"
        # without the frames of the computation that was interrupted
        raise KeyboardInterrupt(f"{done}; run the same command again to continue.") from None
