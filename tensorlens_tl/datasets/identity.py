"""What tells one run's model from another's, and what two runs differ in, in words."""

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from tensorlens_tl import __version__
from tensorlens_tl.hooks import other_hooks
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.models.lifecycle import changed, compact, configuration
from tensorlens_tl.models.parameters import stored

CONFIGURATION = "configuration"
LISTED = 6
"""So many differences of two configurations are listed."""


def model_identity(model: ModelLike) -> dict[str, Any]:
    """What tells one model from another: names, versions, dtype, a digest of all its numbers, configuration, hooks.

    Versions are those of the packages that decide what is computed: this library, TransformerLens and transformers.
    Another PyTorch rounds otherwise, and is no other model. Of hooks only the hook points count, not what they do.
    """
    view = ModelView(model)
    digest = hashlib.sha256()
    for name, numbers in (*sorted(view.model.state_dict().items()), *stored(view.model)):
        if isinstance(numbers, torch.Tensor) and not numbers.is_meta:
            digest.update(f"{name} {tuple(numbers.shape)} {numbers.dtype}".encode())
            digest.update(numbers.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    versions = {"transformers": version("transformers"), "tensorlens_tl": __version__}
    numbers = {"weights": digest.hexdigest(), CONFIGURATION: compact(configuration(view.model))}
    return view.provenance() | versions | numbers | {"hooks": other_hooks(view.model)}


def differing(before: Any, now: Any) -> str:
    """What differs, in few words: the entries of tables, else both values."""
    if not isinstance(before, Mapping) or not isinstance(now, Mapping):
        return f"{before!r}, now {now!r}"
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    differences = [_difference(name, before.get(name), now.get(name)) for name in names]
    same = [name for name in before if name not in names and _is_digest(before[name])]
    if same and any(_is_digest(now.get(name)) for name in names):
        differences.append(f"the same {' and '.join(same)}")
    return ", ".join(differences)


def _difference(name: str, before: Any, now: Any) -> str:
    if name == CONFIGURATION and before and now:
        changes = changed(before, now)
        listed = changes[:LISTED]
        if len(changes) > LISTED:
            listed.append(f"and {len(changes) - LISTED} more")
        return f"{name}: {'; '.join(listed)}"
    if _is_digest(before) and _is_digest(now):
        return f"{name}: not the same"
    if _is_digest(before):
        return f"{name}: there, now none"
    if _is_digest(now):
        return f"{name}: none, now there"
    return f"{name}: {before!r}, now {now!r}"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and all(letter in "0123456789abcdef" for letter in value)
