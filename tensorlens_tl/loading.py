"""One function that reads whatever this library wrote."""

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
"""The classes of results by the name that stands in their files."""


def load(path: str | os.PathLike[str], model: ModelLike | None = None) -> Any:
    """Read what `save` wrote, of whichever kind, or the folder of a data set's run.

    Args:
        path: a file of a result, of a circuit (JSON) or of a plan, or the folder that `attribute_dataset` wrote.
        model: of a plan's file alone: the model that it is for.

    Returns:
        The result, of the class that was saved; a `Circuit`, a `compress.Plan`, or a run's `DatasetResults`.

    Raises:
        FileFormatError: another kind of file, or one that is damaged or newer than the library.
        InvalidInputError: a plan without its model, or a model for something else.
        OSError: there is no such file.

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
        if not kind and content.startswith(b"{"):  # one that looks like the length of a header
            kind = JSON_FILE
    if kind == "Plan":
        if model is None:
            raise InvalidInputError(f"load: {path} holds a plan; pass the model that it is for, as model=.")
        return Plan.load(path, model)
    if model is not None:
        raise InvalidInputError(f"load: {path} holds no plan, and needs no model.")
    if path.is_dir():
        return load_results(path)
    if kind in KINDS:
        return KINDS[kind].load(path)
    if kind in (JSON_FILE, GZIP_FILE):
        return results.Circuit.load(path)
    if kind:
        raise FileFormatError(
            f"{path}: {kind}. `load` reads what `save` wrote with a name that ends in .safetensors or in nothing, and "
            "circuits as .json or .json.gz."
        )
    raise FileFormatError(f"{path}: holds nothing that this library saved.")
