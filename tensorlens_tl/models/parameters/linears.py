"""What does a linear layer do? Its weight, where its class says so; else what is compared with its own output.

A plain module (torch's `Linear`, Hugging Face's `Conv1D`, nothing put on it) is its weight by definition. Anything else
is run on a few random vectors, once for the weights and adapters that it has, and refused by name where ``r·W + b`` is
not what it gives. An adapter's layer is read as the weight that it would have with its adapters merged; a layer of an
unknown class with a `base_layer`, as what it does to basis vectors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.parameters.adapters import adapter_state, copied, in_effect, is_adapter, merge, stored_linear
from tensorlens_tl.models.parameters.modules import detached, innermost, is_bridge_component, widened
from tensorlens_tl.models.parameters.offload import forward_of, version_of

Refuse = Callable[[str], UnsupportedModelError]
"""Makes an error that names the block."""

DIFFERS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far a module may be from its weight in any channel, as a share of what it gives there: a few roundings of the
dtype that it was run in, which is narrow only where it cannot be run in float32."""

VECTORS = 4
"""How many random vectors a module is compared on."""


class LinearWeights(NamedTuple):
    """``x·weight + bias``, as it computes whatever its class; no bias for None."""

    weight: Float[Tensor, "d_in d_out"]
    bias: Float[Tensor, "d_out"] | None


def is_plain(module: Any) -> bool:
    """Whether a module is ``x·W + b`` by definition: of a known class, and with nothing put on it."""
    from transformers.pytorch_utils import Conv1D  # transformers is slow to import

    kind = type(module)
    if kind not in (nn.Linear, Conv1D):
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    replaced = vars(module).get("forward")
    if replaced is None:
        return True
    old = vars(module).get("_old_forward")  # accelerate's, which brings the weights in
    return "_hf_hook" in vars(module) and getattr(old, "__func__", None) is kind.forward


def floating(weight: Tensor, name: str, refuse: Refuse) -> Tensor:
    """A weight without its graph.

    Raises:
        UnsupportedModelError: it is quantised.
    """
    if not weight.is_floating_point() or weight.dtype.itemsize == 1:
        raise refuse(f"{name} is stored as {weight.dtype} (quantised); {UNPACKED}")
    return weight.detach()


UNPACKED = (
    "what such a layer computes is no product with these numbers, and often rounds what it reads as well. Load the "
    "model in floating point (FineGrainedFP8Config(dequantize=True) for FP8)."
)


def read_linear(module: Any, name: str, refuse: Refuse) -> LinearWeights:
    """What a linear layer does, as a weight and a bias.

    The weight of a plain module is a view of its own. An adapter's layer is read with its adapters merged, in float32
    at least; that is a copy.

    Args:
        module: the layer, or what a Bridge wraps it in.
        name: of the layer, for messages.
        refuse: makes the error.

    Raises:
        UnsupportedModelError: it is quantised, or is not what it computes; says by how much.
    """
    module = innermost(module)
    if is_plain(module):
        return _stored(module, name, refuse)
    if "base_layer" in module._modules:
        return _adapted(module, name, refuse)
    read = _stored(module, name, refuse)
    state = _state(module)
    if _compared.get(module) != state:
        wide = widened(module)
        wide_read = _stored(wide, name, refuse)
        output = _run(module, forward_of(wide), wide_read, name, refuse)
        _refuse_unlike(module, wide_read, output, name, refuse)
        _compared[module] = state
    return read


def _stored(module: Any, name: str, refuse: Refuse) -> LinearWeights:
    """The weight and bias that a module holds."""
    stored = getattr(module, "weight", None)
    if not isinstance(stored, Tensor) or stored.ndim != 2:
        raise refuse(f"{name} ({_kind(module)}) has no weight [d_out, d_in] that is read.")
    return LinearWeights(floating(stored_linear(module), name, refuse), detached(getattr(module, "bias", None)))


def _adapted(module: Any, name: str, refuse: Refuse) -> LinearWeights:
    """The weight that an adapter's layer would have with its adapters merged."""
    if not is_adapter(module):
        return _by_behaviour(module, name, refuse)
    base = module.base_layer
    if not is_plain(base):
        raise refuse(
            f"{name} ({_kind(module)}) has adapters on a {_kind(base)}, which is no plain linear layer: load the "
            "model in floating point, and merge adapters on adapters (merge_and_unload())."
        )
    state = _state(module)
    wide = copied(module)
    output: Any = None
    if _compared.get(module) != state:
        output = _run(module, wide, _stored(wide.base_layer, name, refuse), name, refuse)
    try:
        with torch.no_grad():
            read = _stored(merge(wide), name, refuse)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise refuse(
            f"{name} ({_kind(module)}) has adapters ({', '.join(in_effect(module))}) that cannot be merged, and so are "
            f"not read: {type(error).__name__}: {error}"
        ) from error
    if output is not None:
        _refuse_unlike(module, read, output, name, refuse)
        _compared[module] = state
    return read


def _by_behaviour(module: Any, name: str, refuse: Refuse) -> LinearWeights:
    """What a layer of an unknown class that wraps a linear layer does: to basis vectors, and compared on others."""
    base = module
    while "base_layer" in base._modules:
        base = base.base_layer
    if not is_plain(base):
        raise refuse(f"{name} ({_kind(module)}) wraps a {_kind(base)}, which is no plain linear layer.")
    wide = copied(module)
    basis = torch.eye(len(stored_linear(base))).to(next(wide.parameters()))
    try:
        with torch.no_grad():
            bias = wide(torch.zeros_like(basis[None, :1]))[0, 0]
            read = LinearWeights(floating(wide(basis[None])[0] - bias, name, refuse), bias)
    except Exception as error:  # a layer of which nothing is known
        raise refuse(
            f"{name} ({_kind(module)}) wraps a linear layer and is not read: run on basis vectors it raised "
            f"{type(error).__name__}: {error}. Merge what it adds into the weight of its base_layer."
        ) from error
    _refuse_unlike(module, read, _run(module, wide, read, name, refuse), name, refuse)
    return read


def read_embedding(module: Any, name: str, refuse: Refuse) -> Float[Tensor, "token d_model"]:
    """The vectors of an embedding with adapters, which are merged in a copy; as they are stored, without any factor.

    Raises:
        UnsupportedModelError: what its adapters do is no change of its vectors.
    """
    if "base_layer" not in module._modules:
        return floating(module.weight, name, refuse)
    wide = copied(module)
    count = min(VECTORS, len(module.weight))
    tokens = torch.arange(count, device=module.weight.device)[None]
    try:
        with torch.no_grad():
            output = wide(tokens)
            base = merge(wide)
            expected = base(tokens)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
        raise refuse(f"{name} has adapters that are not read: {type(error).__name__}: {error}") from error
    difference = float((output - expected).abs().max() / expected.abs().max())
    if not difference <= DIFFERS[expected.dtype]:
        raise refuse(
            f"{name} has adapters ({', '.join(in_effect(module))}) that differ from its vectors by {difference:.1e} "
            "when they are merged. Merge them (merge_and_unload()) and wrap what that returns."
        )
    return floating(base.weight, name, refuse)


_compared: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()  # by module, the state in which it was compared


def _state(module: Any) -> tuple[Any, ...]:
    """What a module's output depends on: its weights, its hooks, and the adapters in it."""
    parts = list(module.modules())
    weights = [(*version_of(weight), weight.dtype) for weight in module.parameters()]
    hooks = [(*part._forward_hooks, *part._forward_pre_hooks, id(vars(part).get("forward"))) for part in parts]
    adapters = [adapter_state(part) for part in parts if is_adapter(part)]
    return (*weights, *hooks, *adapters, any(part.training for part in parts))


def _vectors(read: LinearWeights) -> Float[Tensor, "1 vector d_in"]:
    """The random vectors that a layer is compared on."""
    drawn = torch.randn(1, VECTORS, len(read.weight), generator=torch.Generator().manual_seed(0))
    return drawn.to(read.weight)


def _run(module: nn.Module, runs: Callable[[Tensor], Any], read: LinearWeights, name: str, refuse: Refuse) -> Any:
    """What a module, or a copy of it that runs in its place, gives for the random vectors."""
    try:
        with torch.no_grad():
            return runs(_vectors(read))
    except Exception as error:  # a hook, or a layer, of which nothing is known
        raise refuse(
            f"{name} ({_kind(module)}) is no plain linear layer, and cannot be compared with its weight: run on "
            f"{VECTORS} random vectors it raised {type(error).__name__}: {error}. Take hooks off the module, or merge "
            "adapters into its weight."
        ) from error


def _refuse_unlike(module: nn.Module, read: LinearWeights, output: Any, name: str, refuse: Refuse) -> None:
    """Refuse a module that gives something else than what was read of it."""
    difference = float("inf")
    allowed = DIFFERS[read.weight.dtype]
    x, weight = upcast(_vectors(read)), upcast(read.weight)
    expected = x @ weight
    if read.bias is not None:
        expected += read.bias.to(x)
    if isinstance(output, Tensor) and output.shape == expected.shape:
        allowed = DIFFERS[output.dtype]
        sizes = expected.norm(dim=1)
        smallest = 1e-3 * sizes.max().clamp_min(torch.finfo(sizes.dtype).tiny)
        difference = float(((output - expected).norm(dim=1) / sizes.clamp_min(smallest)).max())
    if difference <= allowed:
        return
    because = "something was put on it"
    if is_adapter(module) and (adapters := in_effect(module)):
        because = f"what its adapters ({', '.join(adapters)}) do is no change of its weight"
    raise refuse(
        f"{name} ({_kind(module)}) is not its weight: on random vectors it differs from r·W + b by {difference:.1e} of "
        f"a channel (allowed: {allowed:.0e}), so {because}. Merge adapters into the weights "
        "(merge_and_unload()), take hooks off, and call model.eval()."
    )


def _kind(module: Any) -> str:
    return f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__}"


def path_of(name: str) -> str:
    """A module's path as its own library writes it, without what a Bridge puts between."""
    return ".".join(part for part in name.split(".") if part != "_original_component")


# ------------------------------------------------------------------ parts that a Bridge shows


def shown(module: Any, name: str) -> Any:
    """A property of a part, or None where there is none: a Bridge says so in errors of several kinds."""
    try:
        return getattr(module, name, None)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def unlike_shown(owner: Any, part: str) -> Any:
    """The module of one projection where what a Bridge shows of it need not be what it does; None where it is."""
    if not is_bridge_component(owner):
        return None
    module = innermost(owner._modules.get(part))
    if not isinstance(module, nn.Module) or is_plain(module):
        return None
    return module


def refuse_bypassed(owner: Any, parts: tuple[str, ...], name: str, refuse: Refuse) -> None:
    """Refuse adapters on a joint projection that a Bridge split when it wrapped the model: it runs without them.

    Args:
        owner: attention or an MLP.
        parts: what it runs.
        name: of it, for messages.
        refuse: makes the error.

    Raises:
        UnsupportedModelError: an adapter in effect lies inside the model's own module, and in none of the parts.
    """
    if not is_bridge_component(owner):
        return
    runs = [innermost(owner._modules.get(part)) for part in parts]
    inside = set(innermost(owner).modules())
    if all(part in inside for part in runs if isinstance(part, nn.Module)):
        return
    ran = {module for part in runs if isinstance(part, nn.Module) for module in part.modules()}
    for path, module in innermost(owner).named_modules():
        if is_adapter(module) and module not in ran and in_effect(module):
            raise refuse(
                f"{name}.{path_of(path)} has adapters ({', '.join(in_effect(module))}) that "
                "TransformerLens runs without: it split this joint projection when it wrapped the model. Merge them "
                "first (peft's merge_and_unload()), and wrap what that returns."
            )
