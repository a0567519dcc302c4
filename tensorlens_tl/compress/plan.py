"""Plans: compressed weights for some layers of a model, which can be applied temporarily, copied, saved and combined.

A plan holds the compressed factors of each layer. ``with plan.applied():`` gives the model the corresponding weights.
These are dense while the model runs, and so is ``plan.copied()``; only the plan and its file are small.
"""

import inspect
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm.auto import tqdm

from tensorlens_tl._arguments import checked_names, plain, whole_number
from tensorlens_tl.circuits.weights import as_pass, as_view
from tensorlens_tl.compress.heads import HeadWeights, Layers, MLPShare, head_weights, mlp_matrices, read
from tensorlens_tl.compress.methods import (
    KINDS,
    Dense,
    Method,
    Replacement,
    SharedTucker,
    find_method,
    laser_mlp,
    tucker,
    unpacked,
)
from tensorlens_tl.errors import FileFormatError, InvalidInputError, TensorLensError, UnsupportedModelError
from tensorlens_tl.hooks import lock_of, refuse_attached, unheld_run
from tensorlens_tl.models import HookedModel, ModelLike, ModelView
from tensorlens_tl.models.lifecycle import copied, fingerprint
from tensorlens_tl.models.writing import checked, refuse_shared, writable, write, written
from tensorlens_tl.results.storage import read as read_file, write as write_file


@checked_names
def shared_tucker(model: ModelLike, layer: int, **options: Any) -> SharedTucker:
    """Compress one layer of a model or `FrozenPass` by TensorLLM; options as for `tensorlens_tl.compress.tucker`.

    Raises:
        InvalidInputError: no such layer, or whatever `tensorlens_tl.compress.tucker` raises.
        UnsupportedModelError: attention that cannot be read, or a gauge where the basis is not free.
    """
    return tucker(head_weights(model, layer), **options)


@checked_names
def plan(
    model: ModelLike,
    layers: Layers = None,
    *,
    method: Method | str | None = "tucker",
    mlp: MLPShare = None,
    **options: Any,
) -> "Plan":
    """Compress the attention of some layers and, with `mlp`, their MLPs by LASER (TensorLLM's hybrid).

    >>> from tensorlens_tl import compress
    >>> plan = compress.plan(model, [1, 2], method="circuit-svd", ratio=2)
    >>> plan
    Plan('circuit-svd' of layers [1, 2], ratio=2, TransformerBridge (tensorlens-demo))
    >>> before = model(text)
    >>> with plan.applied() as compressed:
    ...     torch.equal(compressed(text), before)
    False
    >>> torch.equal(model(text), before)  # the old weights are back
    True

    The model is not changed until `Plan.applied`. A method's ``ratio=`` counts the attention matrices that it
    compresses; `Plan.ratio` counts everything that the plan replaces, MLPs included.

    Args:
        model: a model, or a `FrozenPass`.
        layers: a layer, several, a slice, or None for all.
        method: one of `METHODS`; a function of one layer's `HeadWeights` and the options that returns a `Replacement`
            or changed `HeadWeights`; or None to compress only MLPs.
        mlp: LASER's ρ for the MLP matrices (the share of each one's rank to keep), or ρ by name (``{"W_in": 0.1}``).
        options: the method's options, such as ``ratio=4``.

    Raises:
        InvalidInputError: no such layer, method or option, or a ratio that cannot be reached.
        NumericalError: NaN or Inf in a weight.
        UnsupportedModelError: attention that cannot be read or written, quantised weights, weights shared between
            blocks, or a gauge where the basis is not free.
    """
    view = as_view(model)
    chosen = _chosen(view, layers)
    if method is None and (mlp is None or options):
        raise InvalidInputError("plan: method=None compresses MLPs only; pass mlp=, and no other options.")
    if method is not None and mlp is not None and not options and isinstance(method, str):
        raise InvalidInputError(f"plan: how far should {method} compress? Pass ratio=, or method=None for MLPs only.")
    compression = None
    method_name = "mlp only"
    if method is not None:
        compression = find_method(method)
        method_name = method if isinstance(method, str) else getattr(method, "__name__", "custom")
        signature = inspect.signature(compression)
        try:
            signature.bind(None, **options)
        except TypeError as error:
            known = ", ".join(list(signature.parameters)[1:])
            raise InvalidInputError(f"method={method!r}: {error}; its options are {known or 'none'}.") from error
    refuse_shared(view, chosen)
    short_pass = cache(partial(as_pass, view))
    parts_by_layer: dict[int, list[Replacement]] = {}
    for layer in tqdm(chosen, desc="compressing", leave=False, delay=2.0):
        parts_by_layer[layer] = []
        if compression is not None:
            parts_by_layer[layer].append(_compressed(compression, read(view, layer, short_pass), options))
        if mlp is not None:
            parts_by_layer[layer].append(laser_mlp(mlp_matrices(view, layer), mlp))
        _check_parts(view, layer, parts_by_layer[layer])
    settings = {name: plain(value) for name, value in options.items()}
    if mlp is not None:
        settings["mlp"] = plain(mlp)
    prints = {layer: _fingerprint(view, layer, parts) for layer, parts in parts_by_layer.items()}
    replacements = {layer: tuple(parts) for layer, parts in parts_by_layer.items()}
    return Plan(view.model, replacements, prints, method_name, settings, view.description)


def _compressed(method: Method, weights: HeadWeights, options: Mapping[str, object]) -> Replacement:
    replacement: object = method(weights, **options)
    if isinstance(replacement, HeadWeights):
        replacement = Dense.of(weights, replacement)
    if not isinstance(replacement, Replacement):
        raise InvalidInputError(
            f"method: {method!r} returns a {type(replacement).__name__}; return changed HeadWeights, "
            "compress.Dense.of(weights, {'O': …}, count=…), or your own Replacement."
        )
    return replacement


def _check_parts(view: ModelView, layer: int, parts: Sequence[Replacement]) -> None:
    """Raise for weights from a custom method that do not fit the model, before they are applied."""
    parameters = writable(view.blocks[layer])
    for part in parts:
        if KINDS.get(type(part).__name__) is not type(part) or isinstance(part, Dense):
            for name, weight in part.dense().items():
                checked(f"blocks.{layer}", name, weight, parameters)


@dataclass(frozen=True, eq=False)
class Plan:
    """Compressed weights for some layers of one model.

    Attributes:
        model: the model they are for.
        layers: the replacements for the weights of each layer.
        fingerprints: fingerprints of the replaced weights, by layer.
        method, options: how they were computed.
        description: the model's description.
    """

    model: HookedModel
    layers: Mapping[int, tuple[Replacement, ...]]
    fingerprints: Mapping[int, str]
    method: str
    options: Mapping[str, Any]
    description: str

    def __repr__(self) -> str:
        return f"Plan({self.label!r} of layers {list(self.layers)}, ratio={self.ratio:.4g}, {self.description})"

    @property
    def label(self) -> str:
        """Method and options, except the ratio."""
        settings = [f"{name}={value!r}" for name, value in self.options.items() if name != "ratio"]
        return " ".join([self.method, *(text.removesuffix("=True") for text in settings)])

    @property
    def before(self) -> int:
        """The number of parameters of the matrices that it replaces."""
        return sum(part.before for parts in self.layers.values() for part in parts)

    @property
    def parameters(self) -> int:
        """The number of parameters of the replacements."""
        return sum(part.parameters for parts in self.layers.values() for part in parts)

    @property
    def ratio(self) -> float:
        """Parameters before ÷ after, over all matrices that it replaces."""
        return self.before / self.parameters

    def weights(self) -> dict[int, dict[str, Tensor]]:
        """Return the dense weights by layer and TransformerLens name."""
        return {
            layer: {name: weight for part in parts for name, weight in part.dense().items()}
            for layer, parts in self.layers.items()
        }

    def __add__(self, other: "Plan") -> "Plan":
        """Combine plans for different layers, or for different weights of the same layers.

        Raises:
            InvalidInputError: plans for different models, or for the same weights.
        """
        if not isinstance(other, Plan) or other.model is not self.model:
            raise InvalidInputError("plan: only plans of the same model can be added.")
        view = self.check_fits()
        other.check_fits()
        layers = {n: (*self.layers.get(n, ()), *other.layers.get(n, ())) for n in sorted({*self.layers, *other.layers})}
        for layer, parts in layers.items():
            names = [name for part in parts for name in part.names]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise InvalidInputError(f"plan: both replace blocks.{layer}.{twice[0]}.")
        prints = {layer: _fingerprint(view, layer, parts) for layer, parts in layers.items()}
        return Plan(self.model, layers, prints, f"{self.label} + {other.label}", {}, self.description)

    # ------------------------------------------------------------------ applying

    def check_fits(self, model: ModelLike | None = None) -> ModelView:
        """Return a view of its model or another; raise `InvalidInputError` unless the weights are those compressed.

        Numbers from every row and column of every head are compared; a single changed number may go unnoticed. Casting
        to a wider float type does not change the weights.
        """
        if model is None:
            model = self.model
        view = as_view(model)
        for layer, parts in self.layers.items():
            fits = layer < view.n_layers and _fingerprint(view, layer, parts) == self.fingerprints[layer]
            if not fits:
                raise InvalidInputError(
                    f"plan: it was made for {self.description}, and blocks.{layer} of this {view.description} has "
                    "other weights (another model, weights processed or cast since, or a plan that is applied "
                    "already). Make a plan for this model."
                )
        return view

    @contextmanager
    def applied(self) -> Generator[HookedModel, None, None]:
        """Give the model the compressed weights inside the context; old ones return bit for bit, also on an exception.

        Passes that were frozen before are invalid inside, and valid again afterwards. The model's lock is held: leave
        the context in the thread that entered it. If the model is cast or moved inside, its restored weights are cast
        or moved likewise.

        Raises:
            InvalidInputError: the model's weights are not those that were compressed.
            FrozenModelError: a frozen pass is attached; or on exit, if weights were changed inside (a state dict
                loaded, weights processed), which then stay.
            UnsupportedModelError: weights that cannot be written.
        """
        with lock_of(self.model):
            view = self.check_fits()
            refuse_attached(self.model)
            with written(view, self.weights()):
                yield self.model

    def copied(self) -> HookedModel:
        """Return a copy of the model with the compressed weights in dense form, as large and as fast as the model.

        Raises:
            InvalidInputError: the model's weights are not those that were compressed.
            UnsupportedModelError: the model cannot be copied, or its copy does not run on its own weights.
        """
        with lock_of(self.model), unheld_run(self.model):
            view = self.check_fits()
            try:
                other = copied(view.model)
            except (TypeError, RuntimeError, AttributeError) as error:
                raise UnsupportedModelError(
                    f"{view.description} cannot be copied ({type(error).__name__}: {error}). Use plan.applied()."
                ) from error
        addresses = {parameter.untyped_storage().data_ptr() for parameter in view.model.parameters()}
        other_view = ModelView(other)
        if any(parameter.untyped_storage().data_ptr() in addresses for parameter in other.parameters()):
            raise UnsupportedModelError(f"a copy of {view.description} shares its weights. Use plan.applied().")
        write(other_view, self.weights())
        try:
            as_pass(other_view)  # proves every block against the copy's own output
        except TensorLensError as error:
            raise UnsupportedModelError(
                f"a copy of {view.description} does not run on its own weights. Use plan.applied()."
            ) from error
        return other

    # ------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the compressed factors to one safetensors file.

        Raises:
            InvalidInputError: no such folder, or a replacement of a custom class.
        """
        tensors: dict[str, Tensor] = {}
        facts: list[Any] = []
        for layer, parts in self.layers.items():
            for number, part in enumerate(parts):
                if KINDS.get(type(part).__name__) is not type(part):
                    raise InvalidInputError(
                        f"save: a plan's file holds {', '.join(KINDS)}, not a {type(part).__name__}; let the method "
                        "return compress.Dense.of(weights, …) instead."
                    )
                held, part_facts = part.packed()
                tensors |= {f"{layer}/{number}/{name}": tensor for name, tensor in held.items()}
                facts.append([layer, part_facts])
        about = {
            "parts": facts,
            "fingerprints": [[layer, print] for layer, print in self.fingerprints.items()],
            "method": self.method,
            "options": dict(self.options),
            "description": self.description,
        }
        return write_file(path, "Plan", tensors, about)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: ModelLike) -> "Plan":
        """Read a file that `save` wrote, for its model.

        Raises:
            FileFormatError: not such a file, or one that is damaged, was changed, or comes from a newer version.
            InvalidInputError: a model with other weights.
            OSError: the file does not exist.
        """
        tensors, about = read_file(path, "Plan", None)
        view = as_view(model)
        try:
            layers: dict[int, list[Replacement]] = {}
            for layer, part_facts in about["parts"]:
                parts = layers.setdefault(int(layer), [])
                start = f"{layer}/{len(parts)}/"
                device = next(view.model.parameters()).device
                held = {n.removeprefix(start): t.to(device) for n, t in tensors.items() if n.startswith(start)}
                parts.append(unpacked(held, part_facts))
            prints = {int(layer): str(print) for layer, print in about["fingerprints"]}
            result = cls(
                view.model,
                {layer: tuple(parts) for layer, parts in layers.items()},
                prints,
                str(about["method"]),
                dict(about["options"]),
                str(about["description"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(f"{path}: not a readable Plan ({type(error).__name__}: {error}).") from error
        result.check_fits()
        return result


def _chosen(view: ModelView, layers: Layers) -> list[int]:
    """Return the numbers of the layers, in order; they need not be consecutive."""
    layers = plain(layers)
    count = view.n_layers
    if layers is None:
        layers = slice(None)
    if isinstance(layers, slice):
        numbers = list(range(count))[layers]
    elif isinstance(layers, list | tuple | range | set):
        numbers = sorted({whole_number("layers", layer, -count, count - 1) % count for layer in layers})
    else:
        numbers = [whole_number("layers", layers, -count, count - 1) % count]
    if not numbers:
        raise InvalidInputError(f"layers={layers!r}: none of this model's {view.n_layers} layers.")
    return numbers


def _fingerprint(view: ModelView, layer: int, parts: Sequence[Replacement]) -> str:
    """Return a fingerprint of the replaced weights, independent of the float dtype they were cast to."""
    parameters = writable(view.blocks[layer])
    names = sorted({name for part in parts for name in part.names})
    return fingerprint([parameters[name] for name in names if name in parameters])
