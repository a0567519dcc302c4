"""A method over a data set: batch after batch, each shard written when it is made."""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.datasets.folder import Folder, Manifest, planned
from tensorlens_tl.datasets.job import Job, run_here
from tensorlens_tl.datasets.packing import kept_entries
from tensorlens_tl.datasets.ray_actors import run_on_ray
from tensorlens_tl.datasets.results import DatasetResults
from tensorlens_tl.datasets.rows import UNKNOWN_ID, check_columns, read_rows
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models.protocol import ModelLike
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.registry import get_method, split_options


def attribute_dataset(
    model: ModelLike,
    rows: Any,
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
    engine: str | None = None,
    load_model: Callable[[], ModelLike] | None = None,
    num_actors: int = 1,
    num_gpus: float | int = 0,
    **options: Any,
) -> DatasetResults:
    """Attribute every row of a data set, and write the results as Parquet shards.

    Rows are run in batches of like length. A run that was interrupted, in whatever way, goes on where it stopped when
    it is called again with the same arguments; several processes may work on one folder. A row that fails is written
    with its error.

    Args:
        model: a TransformerLens model that reads text.
        rows: a ``.jsonl``, ``.csv`` or ``.parquet`` file, a Hugging Face data set, a data frame, or any iterable of
            tables, texts, or lists of token ids. It is read once, before work starts; its token ids are kept.
        out: the folder of the run, made where there is none.
        method: one of `list_methods()`.
        text: the column that holds the texts (or token ids).
        id: the column that names rows, texts or integers that differ; rows without a column ``"id"`` are named by their
            number.
        columns: options that every row has a value of, and the column that it is in: ``{"target": "answer"}``; they
            may be `target`, `minus` and `direction`.
        tokens_per_batch: how many tokens, padding included, are run together at most; `memory` may cut them further.
        keep: ``"scores"``, ``"top:32"`` (the largest scores of each query, and the sum of the others), or ``"all"``
            (whole results besides, as safetensors, with the maps of layers and standard errors).
        truncate: whether a text longer than the context loses its end (recorded); otherwise it is a row with an error.
        resume: whether a run in this folder goes on; False refuses it.
        progress: whether to show a bar.
        prepend_bos: as in TransformerLens.
        memory: see `attribute`.
        engine: None runs here; ``"ray"`` on the actors of a Ray cluster, to which `out` must be the same folder.
        load_model: of Ray: a function of no arguments that loads this model, called once by each actor; None sends them
            the model itself.
        num_actors, num_gpus: of Ray: how many actors, and how many GPUs each of them has.
        options: the method's options and those of `freeze`.

    Raises:
        InvalidInputError: an unknown column or option, ids that are not different, no row, rows that all fail; a folder
            that cannot be written, holds something else, or a run of another model, data or options.
        FileFormatError: the folder's manifest or one of its shards is damaged.
        RegistryError: unknown method.
        OSError: a shard cannot be written; those before it are whole.
    """
    chosen, view = get_method(method), ModelView(model)
    columns = dict(columns or {})
    check_columns(columns, options)
    split_options(chosen, options | dict.fromkeys(columns))
    tokens_per_batch = whole_number("tokens_per_batch", tokens_per_batch, 1)
    if engine not in (None, "ray"):
        raise InvalidInputError(f"engine={engine!r}; use None for this process, or 'ray'.")
    kept_entries(keep)
    in_bytes(memory)
    view.refuse_encoder_decoder("attribute_dataset")
    if view.reads != "tokens":
        raise InvalidInputError(f"attribute_dataset: {view.description} reads {view.reads}, not text.")
    if Path(out).is_file():
        raise InvalidInputError(f"out={out}: that is a file; name a folder.")
    read = read_rows(view, rows, text=text, id=id, columns=columns, prepend_bos=prepend_bos, truncate=truncate)
    given = options if memory is None else options | {"memory": memory}
    job = Job(view.model, read, method, keep, given, Folder(Path(out).absolute()))
    if not job.folder.begun():
        job.try_some()
    batches, shards = planned([len(ids) for ids in read.tokens], sorted(read.errors), tokens_per_batch)
    double = next(view.model.parameters()).dtype == torch.float64
    manifest = job.folder.begin(Manifest(job.identity(), batches, bool(read.errors), shards, double), resume)
    for number in range(len(manifest.shards)):
        if job.folder.shard(number).exists():
            job.folder.read_shard(manifest, number, ["row"])
    run = run_here(job, manifest) if engine is None else run_on_ray(job, manifest, load_model, num_actors, num_gpus)
    with tqdm(total=manifest.rows, desc=method, unit="row", disable=not progress) as bar:
        for number in run:
            bar.update(len(manifest.rows_of(number)))
    results = DatasetResults(job.folder.path)
    if count := len(results.errors()):
        warnings.warn(
            f"{count} of {manifest.rows} rows failed; load_results({str(out)!r}).errors() says why.", stacklevel=2
        )
    return results
