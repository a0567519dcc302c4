"""A method over a data set: run in batches, written in shards, resumed where it stopped, read back lazily."""

from tensorlens_tl.datasets.attributing import attribute_dataset
from tensorlens_tl.datasets.batch_attributor import BatchAttributor
from tensorlens_tl.datasets.results import DatasetResults, load_results

__all__ = ["BatchAttributor", "DatasetResults", "attribute_dataset", "load_results"]
