"""A method, or a function of `circuits`, over a data set."""

import os
from collections.abc import Mapping
from typing import Any

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.datasets.attributions import Attributions
from tensorlens_tl.datasets.circuit_terms import CIRCUITS, CircuitTerms
from tensorlens_tl.datasets.options import UNKNOWN_ID, Engine, LoadModel, Reading, RunOptions
from tensorlens_tl.datasets.results import DatasetResults
from tensorlens_tl.datasets.rows import RowSource, check_columns
from tensorlens_tl.datasets.running import read_prompts, run_work
from tensorlens_tl.datasets.work import Work
from tensorlens_tl.errors import RegistryError
from tensorlens_tl.models import ModelLike
from tensorlens_tl.registry import list_methods, unknown_method


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
    """Attribute every row of a data set, and write the results as Parquet shards.

    Rows are run in batches of similar length. An interrupted run resumes where it stopped when it is called again
    with the same arguments; several processes may work on one folder. A row that fails is written
    with its error.

    Args:
        model: a TransformerLens model that reads text.
        rows: a ``.jsonl``, ``.csv`` or ``.parquet`` file, a Hugging Face data set, a data frame, or any iterable of
            tables, texts, or lists of token ids. It is read once, before work starts.
        out: the folder of the run; a missing one is created.
        method: one of `list_methods()`; or ``"logit_attribution"`` or ``"total_effects"``, the functions of
            `tensorlens_tl.circuits` of these names: each row then is a `Terms`, and `DatasetResults.summary` says how
            every component's effect is distributed over the rows.
        text: the column that holds the texts (or token ids).
        id: the column that names rows, texts or integers that differ; rows without a column ``"id"`` are named by their
            number.
        columns: options that every row has a value of, and the column that it is in: ``{"target": "answer"}``; they
            may be `target`, `minus` and `direction`.
        tokens_per_batch: how many tokens, padding included, are run together at most; `memory` may cut them further.
        keep: ``"scores"``, ``"top:32"`` (the largest scores of each query, and the sum of the others), or ``"all"``
            (whole results besides, as safetensors, with the maps of layers and standard errors).
        truncate: whether a text longer than the context loses its end (recorded); otherwise it is a row with an error.
        resume: whether a run in this folder is resumed; False refuses it.
        progress: whether to show a bar.
        prepend_bos: as in TransformerLens.
        memory: see `attribute`.
        engine: None runs here; ``"ray"`` on the actors of a Ray cluster, to which `out` must be the same folder.
        load_model: of Ray: a function of no arguments that loads this model, called once by each actor; None sends them
            the model itself.
        num_actors, num_gpus: of Ray: how many actors, and how many GPUs each of them has.
        options: the options of the method or function, and those of `freeze`.

    Returns:
        The results, read from the folder when they are needed: by id, as tables, or one shard after another.

    Raises:
        InvalidInputError: an unknown column or option, ids that are not different, no row, rows that all fail; a folder
            that cannot be written, holds something else, or a run of another model, data or options.
        FileFormatError: the folder's manifest or one of its shards is damaged.
        RegistryError: unknown method.
        OSError: a shard cannot be written; those before it are whole.

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
    """What `attribute_dataset` computes of each row.

    Raises:
        RegistryError: unknown method.
        InvalidInputError: an unknown option, column or `keep`.
    """
    check_columns(columns, options)
    if method not in CIRCUITS and method not in list_methods():
        raise RegistryError(unknown_method(method, [*list_methods(), *CIRCUITS]))
    kind = CircuitTerms if method in CIRCUITS else Attributions
    return kind(method, keep, options, tuple(columns or {}))
