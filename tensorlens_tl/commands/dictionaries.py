"""Sparse dictionaries that a command line names, and the labels of their features."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tensorlens_tl.errors import InvalidInputError

CONFIGURATION = "cfg.json"
WEIGHTS = "sae_weights.safetensors"
"""The two files of a folder that SAELens' ``save_model`` writes."""
NO_LABELS = "-"
"""What stands for no labels of a dictionary, beside others that have some."""


def named_dictionary(name: str, model: Any) -> Any:
    """A dictionary by name, in the model's dtype and on its device.

    Args:
        name: ``"demo"``, ``"demo:blocks.0.hook_resid_post"``, or a folder as SAELens' ``save_model`` writes it, or the
            file of weights in it.
        model: the model that it is of.

    Raises:
        InvalidInputError: no such dictionary or folder, a file that cannot be read, or a dictionary of another kind
            than those that `circuits.features` reads.
    """
    from tensorlens_tl.demo import load_demo_dictionary

    source, _, hook = name.partition(":")
    if source == "demo" and hook:
        return load_demo_dictionary(hook, model.cfg.dtype)
    if source == "demo":
        return load_demo_dictionary(dtype=model.cfg.dtype)
    return _of_folder(Path(name), next(model.parameters()))


def _of_folder(path: Path, like: Any) -> Any:
    """The dictionary of a folder, its weights in the dtype and on the device of a tensor."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from tensorlens_tl.models import read_dictionary

    folder = path
    file = path / WEIGHTS
    if path.is_file():
        folder = path.parent
        file = path
    for needed in (file, folder / CONFIGURATION):
        if not needed.is_file():
            raise InvalidInputError(
                f"--features {path}: there is no file {needed}. Name a folder with {CONFIGURATION} and {WEIGHTS}, as "
                "SAELens' save_model writes it, or demo for those of the bundled model."
            )
    try:
        configuration = json.loads((folder / CONFIGURATION).read_text(encoding="utf-8"))
        weights = load_file(file)
    except (ValueError, OSError, SafetensorError) as error:
        raise InvalidInputError(f"--features {path}: it cannot be read ({type(error).__name__}: {error}).") from error
    if not isinstance(configuration, dict):
        raise InvalidInputError(f"--features {path}: {CONFIGURATION} is no JSON object.")
    dictionary = SimpleNamespace(**{name: weight.to(like) for name, weight in weights.items()}, cfg=configuration)
    try:
        read = read_dictionary(dictionary)
    except InvalidInputError as error:
        raise InvalidInputError(f"--features {path}: {error}") from error
    dictionary.hook_name = read.hook
    return dictionary


def named_labels(files: Sequence[str], count: int) -> list[dict[int, str]] | None:
    """The labels of so many dictionaries, from one file for each.

    Args:
        files: as `circuits.feature_labels` takes them, or `NO_LABELS`; none at all for no labels.
        count: how many dictionaries there are.

    Raises:
        InvalidInputError: not as many files as dictionaries, or a file that is missing.
        FileFormatError: a file that holds no labels.
    """
    from tensorlens_tl.circuits import feature_labels

    if not files:
        return None
    if len(files) != count:
        raise InvalidInputError(
            f"--labels: {len(files)} for {count} --features; give one for each in the same order, {NO_LABELS} for none."
        )
    for file in files:
        if file != NO_LABELS and not Path(file).is_file():
            raise InvalidInputError(f"--labels {file}: there is no such file.")
    return [{} if file == NO_LABELS else feature_labels(file) for file in files]
