"""`load`, which reads any file or folder that this library wrote."""

import os
from pathlib import Path
from typing import Any

from tensorlens_tl import results
from tensorlens_tl.compress import Plan
from tensorlens_tl.datasets import load_results
from tensorlens_tl.errors import FileFormatError, InvalidInputError
from tensorlens_tl.models import ModelLike
from tensorlens_tl.results.storage import GZIP_FILE, JSON_FILE, other_kind, written_kind

KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        results.Attribution,
        results.ChangeRoutes,
        results.ContributionGraph,
        results.EdgeScores,
        results.Evaluation,
        results.FeatureEdges,
        results.FeatureExamples,
        results.HeadScores,
        results.MeasuredEdges,
        results.MeasuredTerms,
        results.ModelChange,
        results.Paths,
        results.ScoreAttribution,
        results.ScoreChange,
        results.Terms,
    )
}
"""Result classes by the name stored in their files."""


def load(path: str | os.PathLike[str], model: ModelLike | None = None) -> Any:
    """Read any file that `save` wrote, or the folder of a data-set run.

    Args:
        path: a saved result, circuit (JSON) or plan, or the folder that `attribute_dataset` wrote.
        model: for a plan, the model it was made for; leave it out for anything else.

    Returns:
        The saved result, a `Circuit`, a `compress.Plan`, or the run's `DatasetResults`.

    Raises:
        FileFormatError: the file is of another kind, damaged, or from a newer version of the library.
        InvalidInputError: a plan without its model, or a model for something that is not a plan.
        OSError: the file does not exist.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "why.safetensors"
    >>> tlens.load(tlens.attribute(frozen, " value").save(path)).method
    'tensorlens'
    """
    path = Path(path)
    kind = "a run's folder"
    if not path.is_dir():
        content = path.read_bytes()
        kind = written_kind(content) or other_kind(content, path)
        if not kind and content.startswith(b"{"):  # written_kind would read it as a safetensors header's length
            kind = JSON_FILE
    if kind == "Plan":
        if model is None:
            raise InvalidInputError(f"load: {path} holds a plan; pass the model it was made for, as model=.")
        return Plan.load(path, model)
    if model is not None:
        raise InvalidInputError(f"load: {path} holds no plan; leave out model=.")
    if path.is_dir():
        return load_results(path)
    if kind in KINDS:
        return KINDS[kind].load(path)
    if kind in (JSON_FILE, GZIP_FILE):
        return results.Circuit.load(path)
    if kind:
        raise FileFormatError(
            f"{path}: {kind}. `load` reads files that `save` wrote whose name ends in .safetensors or has no ending, "
            "and circuits saved as .json or .json.gz."
        )
    raise FileFormatError(f"{path}: holds nothing that this library saved.")
