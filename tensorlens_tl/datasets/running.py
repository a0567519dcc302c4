"""Any work over a data set: batch after batch, each shard written when it is made."""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.datasets.folder import Folder, Manifest, planned
from tensorlens_tl.datasets.job import Job, run_here
from tensorlens_tl.datasets.ray_actors import run_on_ray
from tensorlens_tl.datasets.results import DatasetResults
from tensorlens_tl.datasets.rows import UNKNOWN_ID, Rows, read_rows
from tensorlens_tl.datasets.work import Work
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models.protocol import ModelLike
from tensorlens_tl.models.view import ModelView


def run_work(
    model: ModelLike,
    rows: Any,
    out: str | os.PathLike[str],
    work_of: Callable[[Rows], Work],
    *,
    text: str = "text",
    id: str = UNKNOWN_ID,
    columns: Mapping[str, str] | None = None,
    tokens_per_batch: int = 8192,
    truncate: bool = False,
    resume: bool = True,
    progress: bool = True,
    prepend_bos: bool | None = None,
    engine: str | None = None,
    load_model: Callable[[], ModelLike] | None = None,
    num_actors: int = 1,
    num_gpus: float | int = 0,
) -> DatasetResults:
    """Do some work with every row of a data set, and write what comes of it as Parquet shards.

    Args:
        model, rows, out: see `attribute_dataset`, as all that is not named here.
        work_of: what is to be done, from the rows that were read.
    """
    view = ModelView(model)
    columns = dict(columns or {})
    tokens_per_batch = whole_number("tokens_per_batch", tokens_per_batch, 1)
    if engine not in (None, "ray"):
        raise InvalidInputError(f"engine={engine!r}; use None for this process, or 'ray'.")
    view.refuse_encoder_decoder("a run over a data set")
    if view.reads != "tokens":
        raise InvalidInputError(f"a run over a data set: {view.description} reads {view.reads}, not text.")
    if Path(out).is_file():
        raise InvalidInputError(f"out={out}: that is a file; name a folder.")
    read = read_rows(view, rows, text=text, id=id, columns=columns, prepend_bos=prepend_bos, truncate=truncate)
    work = work_of(read)
    job = Job(view.model, read, work, Folder(Path(out).absolute()))
    if not job.folder.begun():
        job.try_some()
    batches, shards = planned([len(ids) for ids in read.tokens], sorted(read.errors), tokens_per_batch)
    double = next(view.model.parameters()).dtype == torch.float64
    manifest = job.folder.begin(Manifest(job.identity(), batches, bool(read.errors), shards, double), resume)
    for number in range(len(manifest.shards)):
        if job.folder.shard(number).exists():
            job.folder.read_shard(manifest, number, ["row"])
    run = run_here(job, manifest) if engine is None else run_on_ray(job, manifest, load_model, num_actors, num_gpus)
    try:
        with tqdm(total=manifest.rows, desc=work.name, unit="row", disable=not progress) as bar:
            for number in run:
                bar.update(len(manifest.rows_of(number)))
    except KeyboardInterrupt:
        done = f"{job.folder.done(manifest)} of {manifest.rows} rows are done, in {out}."
        # without the frames of whatever was computed when it came
        raise KeyboardInterrupt(f"{done}\nRun it again with the same arguments to go on from there.") from None
    results = DatasetResults(job.folder.path)
    if count := len(results.errors()):
        warnings.warn(
            f"{count} of {manifest.rows} rows failed; load_results({str(out)!r}).errors() says why.", stacklevel=3
        )
    return results
