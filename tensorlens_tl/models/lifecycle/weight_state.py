"""Is a model in a state to be frozen, and still in the one its pass was taken in?"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models.names import PACKED
from tensorlens_tl.models.parameters import (
    adapter_layers,
    adapter_state,
    modules_of,
    offload_hooks,
    sources,
    version_of,
    whole,
)


@dataclass(frozen=True, eq=False)
class WeightState:
    """What tells the weights of now from those of another time, without a copy of them.

    `versions` (storage and torch's own count of writes) change when a weight is replaced, moved, cast, or written to in
    place. Writes through ``.data`` are not counted by torch, so some numbers are stored as well (`sample`: of every
    row and every column of each matrix of each attention head) and the sum of the bits of each weight (`sums`).
    A head, neuron, channel, token embedding or any single number that was changed is seen; two numbers whose bits
    change by opposite amounts, or a buffer, may not be. Where a write was counted, `hashes` tell whether the numbers
    are those of before again: a weight that was ablated and restored in place is the same weight. Of weights that are
    offloaded to disk the time and size of their files are stored, and no numbers. `adapters` is what adapters are
    switched to, which changes no weight. A copy, or what a pickle gives back, knows no versions: it takes those of its
    model when `holds` is first called, if the numbers agree.
    """

    versions: list[tuple[Any, ...]] | None
    sample: Float[Tensor, "n"]
    adapters: tuple[Any, ...] = ()
    sums: tuple[int, ...] = ()
    hashes: tuple[int, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"versions": None}  # a copy's weights lie elsewhere

    @classmethod
    def of(cls, model: nn.Module) -> "WeightState":
        """The state of a model's weights now."""
        parameters, files = sources(model)
        sums = _sums(parameters)
        hashes = tuple(_remembered_hash(*each) for each in zip(parameters, sums, strict=True))
        return cls([*map(version_of, parameters), *files], _sample(parameters), _adapters(model), sums, hashes)

    @cached_property
    def digest(self) -> str:
        """Twelve letters that tell the weights from others: of the stored numbers; empty where there are none."""
        if not self.sample.numel():
            return ""
        return hashlib.sha256(self.sample.double().cpu().numpy().tobytes()).hexdigest()[:12]

    def equals(self, other: "WeightState") -> bool:
        """Whether two states were taken of the very same weights of one model: nothing is read but what they store."""
        if self.versions is None or self.versions != other.versions or self.adapters != other.adapters:
            return False
        return self.sums == other.sums and _equal(self.sample, other.sample)

    def seems_held(self, model: nn.Module) -> bool:
        """`holds`, but while torch counted no write nothing is read: for the end of a question that began with it."""
        parameters, files = sources(model)
        if self.versions == [*map(version_of, parameters), *files] and _adapters(model) == self.adapters:
            return True
        return self.holds(model)

    def holds(self, model: nn.Module) -> bool:
        """Whether the model's weights are still these."""
        parameters, files = sources(model)
        versions: list[tuple[Any, ...]] = [*map(version_of, parameters), *files]
        before = versions if self.versions is None else self.versions  # None: a copied pass, with its own model
        if _places(versions) != _places(before) or _adapters(model) != self.adapters:
            return False
        if not _equal(_sample(parameters), self.sample) or _sums(parameters) != self.sums:
            return False
        if versions[len(parameters) :] != before[len(parameters) :]:
            return False
        if versions != before and tuple(map(_hash, parameters)) != self.hashes:  # written to in place, and not back
            return False
        object.__setattr__(self, "versions", versions)
        return True


def _equal(a: Float[Tensor, "n"], b: Float[Tensor, "m"]) -> bool:
    """Bit for bit the same numbers, where NaN is as good as another."""
    return torch.equal(a, b) or (a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def fingerprint(weights: Sequence[Tensor]) -> str:
    """A digest of some weights' numbers, of the same sample as `WeightState`: widening them does not change it."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(str(tuple(weight.shape)).encode())
        digest.update(sampled(weight.detach()).double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _adapters(model: nn.Module) -> tuple[Any, ...]:
    return tuple(adapter_state(layer) for layer in adapter_layers(model))


def _places(versions: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Where weights lie: of each version all but torch's count of writes."""
    return [version[0] for version in versions]


@torch.no_grad()
def _sums(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """Of each weight the sum of its bits in words of eight bytes: reading them costs less than a model's own run."""
    sums: list[Tensor] = []
    for parameter in parameters:
        bits = _bits(parameter)
        words = len(bits) // 8 * 8
        sums.append(bits[:words].view(torch.int64).sum() + bits[words:].sum())
    if not sums:
        return ()
    return tuple(torch.stack([total.to(sums[0].device) for total in sums]).tolist())


def _bits(weight: Tensor) -> UInt8[Tensor, "n"]:
    bits = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    return bits.clone() if bits.storage_offset() % 8 else bits


CHUNK = 1 << 18
"""How many words are multiplied at a time."""

_hashes: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Of each weight its version, its sum, and its hash, which is computed once for all passes of a model."""


def _remembered_hash(weight: Tensor, total: int) -> int:
    state = (*version_of(weight), total)
    stored = _hashes.get(weight)
    if stored is None or stored[0] != state:
        stored = _hashes[weight] = (state, _hash(weight))
    return stored[1]


@torch.no_grad()
def _hash(weight: Tensor) -> int:
    """A weight's bits, each place with a factor of its own.

    Words have half the length of the sum and factors are odd, so that no single change vanishes in its overflow.
    """
    bits = _bits(weight)
    words = bits[: len(bits) // 4 * 4].view(torch.int32)
    rest = int.from_bytes(bits[len(words) * 4 :].tolist(), "little")
    within = _factors(0, weight.device)
    sums = [(chunk * within[: len(chunk)]).sum() for chunk in words.split(CHUNK)]
    return rest + int((torch.stack(sums) * _factors(1, weight.device)[: len(sums)]).sum())


@lru_cache(maxsize=8)
def _factors(seed: int, device: torch.device) -> Int[Tensor, "n"]:
    drawn = torch.randint(-(2**62), 2**62, (CHUNK,), generator=torch.Generator().manual_seed(seed))
    return (2 * drawn + 1).to(device)


@torch.no_grad()
def _sample(parameters: Sequence[Tensor]) -> Tensor:
    samples = [_promotable(sampled(parameter)) for parameter in parameters if parameter.numel()]
    if not samples:
        return torch.zeros(0)
    dtype = reduce(torch.promote_types, [numbers.dtype for numbers in samples], torch.float16)
    return torch.cat([numbers.to(samples[0].device, dtype) for numbers in samples])


def _promotable(numbers: Tensor) -> Tensor:
    """Float8, which torch does not promote, as float16."""
    return numbers.to(torch.float16) if numbers.dtype.itemsize == 1 else numbers


def sampled(weight: Tensor) -> Tensor:
    """A weight's numbers down the diagonal, starting again at the other edge: every row and column of each head."""
    if weight.ndim < 2:
        return weight.reshape(-1)
    steps = _steps(weight.shape, weight.device)
    if weight.dtype.itemsize == 1:  # torch takes nothing of float8
        return torch.take(weight.view(torch.uint8), steps).view(weight.dtype)
    return torch.take(weight, steps)


@lru_cache(maxsize=512)
def _steps(shape: torch.Size, device: torch.device) -> Int[Tensor, "n"]:
    """Where that diagonal goes, in each matrix; computed once for each shape, as every check needs it."""
    rows, columns = shape[-2:]
    steps = torch.arange(max(rows, columns), device=device)
    matrices = torch.arange(shape[:-2].numel(), device=device)[:, None]
    return (matrices * rows * columns + steps % rows * columns + steps % columns).flatten()


def refuse_devices(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a block on several devices, and weights packed, spread or without numbers.

    Offloaded weights count for the device that they are brought to.
    """
    brought: set[nn.Module] = set()
    empty: list[tuple[str, nn.Module]] = []  # weights without numbers, and whose they are
    resident: set[torch.device] = set()
    for module in whole(model):
        for name, weight in module._parameters.items():
            if weight is not None:
                refuse_packed(name, weight, module)
                resident.add(weight.device)
                if weight.is_meta:
                    empty.append((name, module))
        for hook in offload_hooks(module):
            brought.add(module)
            if hook.place_submodules:
                brought.update(module.modules())
    if len(resident) == 1 and not empty and not brought:
        return  # what most models are
    sources(model)  # refuses files that are gone
    if brought and getattr(model, "compatibility_mode", False):
        raise UnsupportedModelError(
            "the model's weights are offloaded after enable_compatibility_mode changed them: TransformerLens runs some "
            "such models with other weights than those it shows. Offload it without compatibility mode."
        )
    blocks = [getattr(model, stack, None) for stack in ("blocks", "encoder_blocks", "decoder_blocks")]
    inside = set(modules_of(*blocks))
    for name, module in empty:
        if module in inside and module not in brought:
            raise UnsupportedModelError(
                f"{name} of a {type(module).__name__} lies on the meta device, and no hook of accelerate brings it in. "
                "A Bridge that splits joint weights (GPT-2, GPT-NeoX) makes such copies of a model that was offloaded "
                "before; load that model into memory."
            )
    stacks = [stack for stack in blocks if isinstance(stack, nn.Module)]
    for block in chain.from_iterable(stack.children() for stack in stacks):
        devices = _devices(block)
        if len(devices) > 1:
            raise UnsupportedModelError(
                f"the weights of one {type(block).__name__} run on {', '.join(sorted(devices))}; those of a block must "
                "be on one device, different blocks may be on several. Load the model with a device_map that names "
                "whole blocks (no_split_module_classes does)."
            )


def _devices(block: nn.Module) -> set[str]:
    """Where the weights of a block are when it runs."""
    devices: set[str] = set()
    for module in modules_of(block):
        devices.update(str(weight.device) for weight in module.parameters(recurse=False) if not weight.is_meta)
        for hook in offload_hooks(module):
            if hook.execution_device is not None:
                devices.add(str(torch.device(hook.execution_device)))
    return devices


def refuse_packed(name: str, weight: Tensor, module: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a weight that is quantised, or spread over processes."""
    kind = type(weight)
    if kind is nn.Parameter:
        return
    if is_traceable_wrapper_subclass(weight) or any(hasattr(weight, attribute) for attribute in PACKED):
        raise UnsupportedModelError(
            f"{name} of a {type(module).__name__} is a {kind.__module__}.{kind.__name__}: weights that are packed "
            "(quantised), or spread over processes (tensor parallelism), are not read. Load the model in floating "
            "point, in one process."
        )


def refuse_dropout(model: nn.Module) -> None:
    """Raise `InvalidInputError` for a model in train mode, if that changes what it computes."""
    inner = getattr(model, "original_model", None)  # a Bridge's own tree leaves some of its modules out
    seen = set[nn.Module]()
    trees = [tree for tree in (model, inner) if tree is not None]
    for name, module in chain.from_iterable(tree.named_modules(memo=seen) for tree in trees):
        if not module.training:
            continue
        rates = [value for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]
        if isinstance(module, nn.Dropout):
            rates.append(module.p)
        if any(rate > 0 for rate in rates):
            raise InvalidInputError(
                f"the model is in train mode and {name or type(module).__name__} drops activations with probability "
                f"{max(rates)}; two passes would differ. Call model.eval() first."
            )
        noise = [value for key, value in vars(module).items() if "jitter" in key and isinstance(value, float)]
        if any(size > 0 for size in noise):
            raise InvalidInputError(
                f"the model is in train mode and {name or type(module).__name__} multiplies what it reads by random "
                f"numbers (jitter noise of {max(noise)}); two passes would differ. Call model.eval() first."
            )
