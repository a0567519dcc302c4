"""Finding weights that a model's checkpoint did not contain.

Hugging Face fills a head that a checkpoint lacks with random numbers, mentioning it only in its log. The model itself
still shows it afterwards, since transformers marks every parameter that it reads from a checkpoint (and every one tied
to such a parameter), and every module that it initialises. An unmarked parameter in a marked module that was written to
exactly once comes from initialisation. If the checkpoint is still available (its folder, or the hub's cache), a weight
whose numbers it contains does not count: resized embeddings would otherwise look the same.

Nothing is claimed where this cannot be known: HookedTransformers and HookedEncoders, whose weights are copies; models
made from a config alone, or copied (`copy.deepcopy`); weights that were replaced since (a Bridge in compatibility mode,
offloaded weights); and weights that were written to since. torch does not count writes through ``.data``.

Also: what a text classifier needs besides its weights when it is booted as a model whose logits are its classes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens_tl.algebra.numerics import maybe
from tensorlens_tl.errors import UntrainedWarning, warn_caller

ATTRIBUTE = "tensorlens_classes"
"""The attribute that holds `Classes` in the Hugging Face model that a Bridge wraps."""


@dataclass(frozen=True)
class Classes:
    """The classes that replace tokens in a classifier's logits.

    Attributes:
        classifier: the transformers class of the classifier.
        labels: the names of the classes.
        at_first: whether they are read at a prompt's first token ([CLS]); otherwise at its last, or at any.
        exclude: whether the classes are mutually exclusive, so that the first choice is compared with the runner-up.
        padding: the token a prompt must not end in, since the classifier reads the last token that differs from it.
        renamed: the checkpoint's name for each module of the head.
    """

    classifier: str
    labels: Mapping[int, str]
    at_first: bool
    exclude: bool
    padding: int | None = None
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])

    def name_of(self, weight: str) -> str:
        """Return the checkpoint's name for a weight of the wrapped model."""
        module, _, name = weight.rpartition(".")
        return f"{self.renamed[module]}.{name}" if module in self.renamed else weight


class ClassScores(nn.Module):
    """The head of an encoder's classifier, applied at every position: ``φ(x·W + b)`` if it has a pooler, then linear.

    The linear layer is called `seq_relationship` because TransformerLens looks for that name as the unembedding.
    """

    def __init__(self, dense: nn.Module | None, act: nn.Module | None, linear: nn.Module):
        super().__init__()
        self.dense = dense
        self.act = act
        self.seq_relationship = linear

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits of the classes, `[batch, pos, class]`."""
        if self.dense is not None and self.act is not None:
            hidden = self.act(self.dense(hidden))
        return self.seq_relationship(hidden)


def name_classes(language: Any, classes: Classes) -> None:
    """Record which classes a Hugging Face model's logits stand for, before a Bridge wraps it."""
    setattr(language, ATTRIBUTE, classes)


def classes_of(model: Any) -> Classes | None:
    """Return the classes of a model booted by `load_classifier`; None for other models."""
    return getattr(getattr(model, "original_model", None), ATTRIBUTE, None)


def class_scores(model: Any) -> ClassScores | None:
    """Return the classifier head that a Bridge wraps, if it has a pooler."""
    head = getattr(getattr(model, "original_model", None), "cls", None)
    return head if isinstance(head, ClassScores) and head.dense is not None else None


LOADED = "_is_hf_initialized"
"""transformers' mark: on a parameter, that it was read from a checkpoint; on a module, initialised or read."""

WRAPPER = "_original_component."
"""The part that a Bridge inserts into the names of wrapped parameters."""

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""The weight files of a checkpoint."""

HEAD_PARTS = ("mlm_head", "prediction_head", "classifier_ln", "unembed")
"""The parts between the hidden state and the logits."""


CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
"""Suffixes of transformers classes whose head is not an unembedding of tokens."""


@dataclass(frozen=True, eq=False)
class Untrained:
    """Weights that a model's checkpoint lacks, and what depends on them.

    They are random (or zeros and ones), so anything computed with them is noise.
    """

    model: Any

    @cached_property
    def _weights(self) -> dict[str, nn.Parameter] | None:
        """The newly initialised weights, by name; None if the model does not show them (see the module)."""
        inner = getattr(self.model, "original_model", None)
        if inner is None or not any(_is_loaded(weight) for weight in inner.parameters()):
            return None
        computed = [re.compile(pattern) for pattern in getattr(inner, "_keys_to_ignore_on_load_missing", None) or ()]
        fresh = dict(_initialised(inner))
        classes = classes_of(self.model)
        if classes is not None:
            fresh = {classes.name_of(name): weight for name, weight in fresh.items()}
        return {name: weight for name, weight in fresh.items() if not any(p.search(name) for p in computed)}

    @property
    def names(self) -> tuple[str, ...] | None:
        """The Hugging Face names of all of them; None if the model does not show them."""
        return maybe(tuple, self._weights)

    @cached_property
    def head(self) -> tuple[str, ...]:
        """Those between the hidden state and the logits."""
        parts: list[str] = [*HEAD_PARTS]
        if hasattr(self.model, "mlm_head"):
            parts.append("ln_final")
        return self._inside(parts)

    @cached_property
    def stack(self) -> tuple[str, ...]:
        """Those that the hidden state itself depends on: in embeddings, blocks and the final norm."""
        children = [name for name, _ in self.model.named_children() if name != "original_model"]
        parts = [name for name in children if not name.startswith("_")]  # TransformerLens 4 keeps unused modules there
        head = self.head
        return tuple(name for name in self._inside(parts) if name not in head)

    @property
    def has_checkpoint(self) -> bool:
        """Whether the checkpoint that the model was loaded from is available, in a folder or in the hub's cache."""
        config = getattr(getattr(self.model, "original_model", None), "config", None)
        return any(_files(config, name) for name in WEIGHTS)

    @property
    def classifier(self) -> str | None:
        """The class of the checkpoint, if that is a classifier and the model is not."""
        inner = getattr(self.model, "original_model", None)
        classes = getattr(getattr(inner, "config", None), "architectures", None) or ()
        named = (name for name in classes if name.endswith(CLASSIFIERS) and name != type(inner).__name__)
        return next(named, None)

    def noise(self, *, logits: bool) -> str | None:
        """Return why the logits (or the hidden state) are noise; None if there is no evidence that they are."""
        missing = self.stack
        if logits:
            missing += self.head
        if logits and self.classifier:
            lacking = "is not in this model"
            if missing:
                lacking += f", and {some_of(missing)} of this one are newly initialised: its logits are noise"
            return (
                f"this is the checkpoint of a {self.classifier}, whose head {lacking}. tlens.load_classifier(name) "
                "boots it with its head, where that is linear or a dense layer with tanh stands before it (page "
                "Explain a classifier)."
            )
        if not missing:
            return None
        what = "its logits are noise" if logits and not self.stack else "what the model computes with them is noise"
        return f"its checkpoint does not have {some_of(missing)}; these are newly initialised, and {what}."

    def warn(self, *, logits: bool) -> None:
        """Warn (`UntrainedWarning`) if numbers of this model are noise; see `noise`."""
        why = self.noise(logits=logits)
        if why is not None:
            warn_caller(f"{type(self.model).__name__}: {why}", UntrainedWarning)

    def _inside(self, parts: Sequence[str]) -> tuple[str, ...]:
        modules = [getattr(self.model, part, None) for part in parts]
        if "unembed" in parts:
            modules.append(class_scores(self.model))
        inside = {id(weight) for module in modules if module is not None for weight in module.parameters()}
        return tuple(name for name, weight in (self._weights or {}).items() if id(weight) in inside)


def some_of(names: Sequence[str], most: int = 4) -> str:
    """List the first names, and say how many more there are."""
    listed = ", ".join(names[:most])
    if len(names) > most:
        return f"{listed} and {len(names) - most} more"
    return listed


def _initialised(inner: Any) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in inner.named_modules():
        if not vars(module).get(LOADED, False):  # inserted by another library: a Bridge, an adapter
            continue
        weights = {name: weight for name, weight in module._parameters.items() if weight is not None}
        fresh = {name: weight for name, weight in weights.items() if _is_fresh(weight)}
        added = len(fresh) < len(weights) and set(fresh) == {"bias"}  # a Bridge gives an unembedding a zero bias
        if added or not all(map(_is_plain, fresh.values())):
            continue
        if any(_was_read(inner.config, weight) for weight in fresh.values()):
            continue
        for name, weight in fresh.items():
            yield f"{prefix}.{name}".removeprefix(".").replace(WRAPPER, ""), weight


def _is_loaded(weight: nn.Parameter) -> bool:
    return getattr(weight, LOADED, False)


def _is_fresh(weight: nn.Parameter) -> bool:
    """Whether it was initialised and, as far as torch counts writes, not written to since."""
    if _is_loaded(weight) or weight.is_meta or weight.is_inference():
        return False
    return weight._version == 1


def _is_plain(weight: nn.Parameter) -> bool:
    """Whether a bias or gain is constant, as after initialisation; always true for matrices."""
    return weight.ndim > 1 or bool((weight == weight[:1]).all())


def _was_read(config: Any, weight: nn.Parameter) -> bool:
    """Whether some matrix of the checkpoint has the same first row as this one.

    Numbers are compared because checkpoints and models name weights differently.
    """
    if weight.ndim < 2:
        return False
    first = weight[:1].detach()
    same_shape = (row for row in _first_rows(config) if row.shape == first.shape)
    return any(torch.allclose(row.to(first), first, rtol=1e-2, atol=1e-6) for row in same_shape)


def _first_rows(config: Any) -> Iterator[Tensor]:
    """Yield the first row of every weight in a config's checkpoint; nothing if it is not available."""
    from safetensors import safe_open

    for file in _files(config, WEIGHTS[0]):
        with safe_open(file, framework="pt") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118
                entry = checkpoint.get_slice(name)
                if entry.get_shape():
                    yield entry[:1]
    for file in _files(config, WEIGHTS[1]):
        weights = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        yield from (weight[:1] for weight in weights.values() if isinstance(weight, Tensor) and weight.ndim)


def _files(config: Any, name: str) -> list[Path]:
    """Return the files of a checkpoint, which may be in shards."""
    index = _file(config, f"{name}.index.json")
    names = [name]
    if index is not None:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    files = [_file(config, one) for one in names]
    return [file for file in files if file is not None]


def _file(config: Any, name: str) -> Path | None:
    """Return a file from the config's folder or the hub's cache; never downloads."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    where = getattr(config, "_name_or_path", None)
    if not where:
        return None
    file: object = str(Path(where) / name)
    if not Path(where).is_dir():
        try:
            file = try_to_load_from_cache(where, name, revision=getattr(config, "_commit_hash", None))
        except HFValidationError:
            return None
    if isinstance(file, str) and Path(file).is_file():
        return Path(file)
    return None  # the cache may also record that the file does not exist
