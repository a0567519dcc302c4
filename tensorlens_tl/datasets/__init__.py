"""A method over a data set: run in batches, written in shards, resumed where it stopped, read back lazily."""

from tensorlens_tl.datasets.attributing import attribute_dataset
from tensorlens_tl.datasets.batch_attributor import BatchAttributor
from tensorlens_tl.datasets.circuit_terms import CIRCUITS as CIRCUITS
from tensorlens_tl.datasets.options import (
    UNKNOWN_ID as UNKNOWN_ID,
    Engine as Engine,
    LoadModel as LoadModel,
    Reading as Reading,
    RunOptions as RunOptions,
)
from tensorlens_tl.datasets.results import DatasetResults, load_results
from tensorlens_tl.datasets.rows import (
    FILES as FILES,
    Rows as Rows,
    RowSource as RowSource,
    check_rows as check_rows,
    file_rows as file_rows,
)
from tensorlens_tl.datasets.running import read_prompts as read_prompts, run_work as run_work

__all__ = ["BatchAttributor", "DatasetResults", "attribute_dataset", "load_results"]
