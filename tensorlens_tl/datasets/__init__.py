"""Running a method over a data set: in batches, written as shards, resumable, and read back lazily."""

from tensorlens_tl.datasets.folder import DatasetResults, load_results
from tensorlens_tl.datasets.rows import RowSource as RowSource, check_columns as check_columns
from tensorlens_tl.datasets.running import (
    BatchAttributor,
    Engine as Engine,
    LoadModel as LoadModel,
    RunOptions as RunOptions,
    attribute_dataset,
    read_prompts as read_prompts,
    run_work as run_work,
)
from tensorlens_tl.datasets.work import CIRCUITS as CIRCUITS

__all__ = ["BatchAttributor", "DatasetResults", "attribute_dataset", "load_results"]
