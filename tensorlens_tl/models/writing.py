"""Replacing a model's weights temporarily, through the tensors that its own properties show, and restoring them.

Every class shows an attention layer's projections by head, ``attn.W_Q`` and so on, as views of its parameters; writing
to a view changes what the model computes. Writes go through ``.data``, which torch does not count: once the old numbers
are restored bit for bit, a frozen pass taken before is valid again, and until then it is rejected because of the
numbers themselves (`tensorlens_tl.models.lifecycle.WeightState`).

A Bridge of a model with one joint projection (GPT-2, NeoX, Phi-3) may keep that next to the split ones. If the two
agree, both are written.
"""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens_tl.errors import FrozenModelError, InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.models.blocks import BlockView
from tensorlens_tl.models.lifecycle import sampled
from tensorlens_tl.models.offload import refuse_offloaded
from tensorlens_tl.models.parameters import is_adapter, path_of, shown
from tensorlens_tl.models.view import ModelView

ATTENTION = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V")
MLP = ("W_in", "W_gate", "W_out")


@dataclass(frozen=True, eq=False)
class JointCopy:
    """A joint `parameter` that duplicates several weights; `interleaved` if parts are grouped by key-value head."""

    parameter: Tensor
    parts: tuple[str, ...]
    interleaved: bool


def writable(block: BlockView) -> dict[str, Tensor]:
    """Return a block's weights by TransformerLens' names as writable views, omitting missing biases.

    Raises `UnsupportedModelError` for attention that cannot be read, quantised weights, and tensors that are copies.
    """
    where = f"blocks.{block.layer} of this {block.model.description}"
    refuse_offloaded(block.module, where)
    if block.moved:
        raise UnsupportedModelError(
            f"{where} runs on {block.device}, and the model's first weight is on {block.model.device}: weights can "
            "only be replaced where both are on one device. Load the model on one device."
        )
    _refuse_adapted(block, where)
    block.require_attention()
    block.require_query_key()
    attn = block.module.attn
    mlp = getattr(block.module, "mlp", None)
    weights = {name: _shown(attn, name) for name in ATTENTION} | {name: shown(mlp, name) for name in MLP}
    storages = {parameter.untyped_storage().data_ptr() for parameter in block.module.parameters()}
    views: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not isinstance(weight, Tensor):
            continue
        if weight.untyped_storage().data_ptr() in storages and weight.is_floating_point():
            views[name] = weight.data
        elif name in ATTENTION and (name.startswith("W") or bool(weight.any())):
            raise UnsupportedModelError(
                f"{where}: attn.{name} is not a view of the model's floating-point parameters (packed or quantised?), "
                "so writing to it would change nothing. Load the model in floating point."
            )
    return views


def _refuse_adapted(block: BlockView, where: str) -> None:
    """Raise `UnsupportedModelError` for layers with adapters, whose effect would be added to what is written."""
    for name, part in block.module.named_modules():
        if is_adapter(part):
            raise UnsupportedModelError(
                f"{where}: {path_of(name)} has adapters "
                f"({', '.join(part.active_adapters)}), which would be added to whatever is written. Merge them "
                "(peft's merge_and_unload()) and wrap what that returns."
            )


def _shown(attn: Any, name: str) -> Any:
    """Return a projection; HookedTransformer keeps unexpanded grouped keys and values with an underscore."""
    names = [name for name in (f"_{name}", name) if hasattr(attn, name)]
    return getattr(attn, names[0]) if names else None


def refuse_shared(view: ModelView, layers: Sequence[int]) -> None:
    """Raise `UnsupportedModelError` if a block shares weights with another block."""
    owners: dict[int, int] = {}
    for block in view.blocks:
        for place in {parameter.data_ptr() for parameter in block.module.parameters() if parameter.numel()}:
            other = owners.setdefault(place, block.layer)
            if other != block.layer and {other, block.layer} & set(layers):
                raise UnsupportedModelError(
                    f"blocks.{other} and blocks.{block.layer} of this {view.description} share weights: one cannot be "
                    "compressed without the other."
                )


def joint_copies(block: BlockView, weights: Mapping[str, Tensor]) -> list[JointCopy]:
    """Return joint projections that duplicate the split weights and agree with them."""
    storages = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    options = [(names, mixed) for names in (("W_Q", "W_K", "W_V"), ("b_Q", "b_K", "b_V")) for mixed in (False, True)]
    options += [(("W_gate", "W_in"), False), (("W_in", "W_gate"), False)]
    options = [(names, mixed) for names, mixed in options if all(name in weights for name in names)]
    copies: list[JointCopy] = []
    for module in (block.module.attn, getattr(block.module, "mlp", None)):
        if not isinstance(module, nn.Module):
            continue
        for parameter in module.parameters():
            if parameter.untyped_storage().data_ptr() in storages:
                continue
            for names, mixed in options:
                if parameter.numel() != sum(weights[name].numel() for name in names):
                    continue
                copy = JointCopy(parameter.data, names, mixed)
                joint = _oriented(_layout(copy, weights), parameter.data)
                if joint is not None and torch.equal(joint, parameter.data):
                    copies.append(copy)
                    break
    return copies


def _layout(copy: JointCopy, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the parts side by side, `[out, in]` (a bias: `[out]`)."""
    parts = [weights[name] for name in copy.parts]
    if copy.parts[0] in MLP:
        return torch.cat(parts, dim=1).mT
    if copy.parts[0].startswith("W"):
        parts = [part.mT for part in parts]
    if copy.interleaved:  # parts are [head, d_head, d_model] or [head, d_head]
        groups = len(parts[1])
        return torch.cat([part.reshape(groups, -1, *part.shape[2:]) for part in parts], dim=1).flatten(0, 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def _oriented(joint: Tensor, parameter: Tensor) -> Tensor | None:
    """Return a joint weight in the orientation of a parameter, or None if neither orientation fits."""
    if joint.shape == parameter.shape:
        return joint
    if joint.ndim == 2 and joint.mT.shape == parameter.shape:
        return joint.mT
    return None


@contextmanager
def written(view: ModelView, weights: Mapping[int, Mapping[str, Tensor]]) -> Generator[None, None, None]:
    """Give the model other weights in some blocks (by layer and name, see `writable`), restored bit for bit on exit.

    If the model is cast or moved inside the context, its restored weights are cast or moved likewise.

    Raises:
        UnsupportedModelError: weights that cannot be written, or are shared between blocks.
        InvalidInputError: a name or shape that the model does not have.
        NumericalError: weights that are not finite in the model's dtype. In these three cases nothing was written.
        FrozenModelError: on exit, if weights were changed inside; those changes stay.
    """
    writes = _writes(view, weights)
    copies = _copies(view, weights)
    changed: list[Changed] = []
    try:
        for place, weight, value in writes:
            changed.append(Changed(place, weight.clone(), sampled(value)))
            _overwrite(weight, value)
            if not torch.equal(weight, value):
                raise UnsupportedModelError(f"{place}: the weight that was written does not read back.")
        _follow(view, copies)
        del writes, weights  # a plan's dense weights are no longer needed while the model runs
        yield
    finally:
        _put_back(view, changed)


class BlockWeight(NamedTuple):
    """One weight of one block."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"blocks.{self.layer}.{self.name}"


class Changed(NamedTuple):
    """An overwritten weight: its place, its old value, and a sample of the new one."""

    place: BlockWeight
    before: Tensor
    sample: Tensor


def _put_back(view: ModelView, changed: Sequence[Changed]) -> None:
    """Restore old weights in the tensors that the model shows *now*, even if interrupted."""
    first: BaseException | None = None
    foreign: list[str] = []
    copies: dict[int, list[JointCopy]] = {}

    def twice(step: Callable[[], None]) -> None:
        """Retry once, since whatever interrupted the first attempt may be over."""
        nonlocal first
        for _ in range(2):
            try:
                step()
                break
            except BaseException as error:
                first = first or error

    def put_back(place: BlockWeight, before: Tensor, sample: Tensor) -> None:
        weight = writable(view.blocks[place.layer]).get(place.name)
        if weight is not None and _holds(weight, sample, before):
            _overwrite(weight, before.to(weight))
        else:
            foreign.append(str(place))

    twice(lambda: copies.update(_copies(view, {place.layer: () for place, _, _ in changed})))
    for place, before, sample in reversed(changed):
        twice(partial(put_back, place, before, sample))
    twice(lambda: _follow(view, copies))
    if first is not None:
        raise first
    if foreign:
        raise FrozenModelError(
            f"{', '.join(foreign)}: the weights were changed while others were applied, and are left as they are now. "
            "Load the model again; change weights outside of `with plan.applied():`."
        )


def _holds(weight: Tensor, sample: Tensor, before: Tensor) -> bool:
    """Whether a weight is as written or (if writing was interrupted) still as before."""
    now = sampled(weight)
    return any(past.shape == now.shape and torch.equal(now, past.to(now)) for past in (sample, sampled(before)))


def write(view: ModelView, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Replace weights as `written` does, but permanently.

    Raises:
        UnsupportedModelError, InvalidInputError, NumericalError: as `written`.
    """
    writes = _writes(view, weights)
    copies = _copies(view, weights)
    for _, weight, value in writes:
        _overwrite(weight, value)
    _follow(view, copies)


def _writes(view: ModelView, weights: Mapping[int, Mapping[str, Tensor]]) -> list[tuple[BlockWeight, Tensor, Tensor]]:
    """Return what to write: each place, its live tensor, and the new value, after all checks."""
    refuse_shared(view, list(weights))
    writes: list[tuple[BlockWeight, Tensor, Tensor]] = []
    for layer, changed in weights.items():
        views = writable(view.blocks[layer])
        for name, value in changed.items():
            writes.append((BlockWeight(layer, name), views[name], checked(f"blocks.{layer}", name, value, views)))
    return writes


def _copies(view: ModelView, layers: Iterable[int]) -> dict[int, list[JointCopy]]:
    """Return the joint projections that currently agree with the split ones, by layer."""
    return {layer: joint_copies(view.blocks[layer], writable(view.blocks[layer])) for layer in layers}


def _follow(view: ModelView, copies: Mapping[int, Sequence[JointCopy]]) -> None:
    """Update joint projections to agree with the split ones again."""
    for layer, of_layer in copies.items():
        for copy in of_layer:
            views = writable(view.blocks[layer])
            joint = _oriented(_layout(copy, views), copy.parameter)
            assert joint is not None  # it fitted when the copies were collected
            _overwrite(copy.parameter, joint)


def _overwrite(weight: Tensor, value: Tensor) -> None:
    with torch.inference_mode(torch.is_inference_mode_enabled() or weight.is_inference()):  # or torch refuses to write
        weight.copy_(value)


def checked(where: str, name: str, value: Tensor, views: Mapping[str, Tensor]) -> Tensor:
    """Return a new weight as the model stores it; raise for an unknown name, wrong shape, or non-finite values."""
    if name not in views:
        raise InvalidInputError(f"{where} has no {name}; it has {', '.join(views)}.")
    if value.shape != views[name].shape:
        raise InvalidInputError(f"{where}.{name} is {tuple(views[name].shape)}, not {tuple(value.shape)}.")
    cast = value.detach().to(views[name])
    if not bool(torch.isfinite(cast).all()):
        raise NumericalError(f"{where}.{name}: the new weights are not finite as {cast.dtype}.")
    return cast
