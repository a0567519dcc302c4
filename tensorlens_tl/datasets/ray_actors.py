"""The shards of a run on the actors of a Ray cluster.

Ray deals shards out; each actor loads the model once. What is done and what is not stands in the run's folder alone, so
that an actor that dies costs the shard it was at, and a run begun here can be resumed anywhere.
"""

from collections.abc import Iterator
from typing import Any, cast

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.datasets.folder import Manifest
from tensorlens_tl.datasets.identity import differing, model_identity
from tensorlens_tl.datasets.job import Job, write_once
from tensorlens_tl.datasets.options import RunOptions
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.storage import tagged


def run_on_ray(job: Job, manifest: Manifest, options: RunOptions) -> Iterator[int]:
    """Write the missing shards; gives the number of each once it is written.

    Raises:
        InvalidInputError: Ray is not installed, or `load_model` loads another model.
    """
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
        job = job.with_model(None)
    reference = ray.put((job, manifest, options.load_model))
    shards = ray.data.from_items(left, override_num_blocks=len(left))
    batches = shards.map_batches(
        ShardWriter,
        fn_constructor_args=([reference],),  # in a list: Ray would open it before it calls
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
    """An actor: it has the model, and writes the shards that it is sent."""

    def __init__(self, sent: list[Any]) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        self.job: Job
        self.job, self.manifest, load_model = ray.get(sent[0])
        if load_model is not None:
            self.job = self.job.with_model(load_model())
        loaded = tagged(model_identity(self.job.model))
        passed = self.manifest.identity["model"]
        if loaded != passed:
            raise InvalidInputError(
                f"load_model: it loads another model than the one that was passed ({differing(passed, loaded)})."
            )

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Write these shards; hands their numbers back."""
        for number in batch["shard"]:
            write_once(self.job, self.manifest, int(number), wait=True)
        return batch
