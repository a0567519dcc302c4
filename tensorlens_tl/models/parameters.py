"""Reading weights from modules (linear layers, adapters, norms) in the same form for every class.

A plain module (torch's `Linear`, Hugging Face's `Conv1D`, with nothing added to it) computes its weight by definition.
Any other module is run on a few random vectors, once for each state of its weights and adapters, and rejected by name
if its output is not ``r·W + b``. An adapter layer is read as its weight with the adapters merged; a layer of an unknown
class with a `base_layer` is read from its output on basis vectors. Nothing here imports peft: its layers are recognised
by their attributes, a `base_layer` (LoRA and the like) or an `original_module` (a part that was trained as a whole),
and by the names of the active adapters.

A norm is read by its class if that is known, and otherwise by its output on random vectors.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from tensorlens_tl.algebra import Chain, Diagonal, Linear, Norm
from tensorlens_tl.algebra.numerics import centred, maybe, plus, times, upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.activations import Activation
from tensorlens_tl.models.offload import forward_of, version_of, whole

# ------------------------------------------------------------------ basic access to modules


def first_output(output: Any) -> Any:
    """Return a module's output, or the first of several."""
    return output[0] if isinstance(output, tuple) else output


def innermost(module: Any) -> Any:
    """Return what a Bridge's component wraps, however deep; any other module unchanged."""
    while hasattr(module, "original_component"):
        module = module.original_component
    return module


def widened(module: nn.Module) -> nn.Module:
    """Return the module with weights in float32 or wider, so that its output has no half-precision rounding.

    It is a copy with the same hooks. A module whose `forward` was replaced is returned unchanged, since the replacement
    refers to the original weights.
    """
    accelerated = "_hf_hook" in vars(module)  # its weights are loaded now; its `forward` is accelerate's wrapper
    narrow = any(upcast(tensor) is not tensor for tensor in (*module.parameters(), *module.buffers()))
    if not narrow or ("forward" in vars(module) and not accelerated):
        return module
    aside = object.__new__(type(module))
    attributes = dict(vars(module))
    if accelerated:
        for name in ("_hf_hook", "_old_forward", "forward"):
            attributes.pop(name, None)
    for table in ("_parameters", "_buffers"):
        attributes[table] = {name: maybe(_wide, tensor) for name, tensor in attributes[table].items()}
    attributes["_modules"] = {name: maybe(widened, child) for name, child in module._modules.items()}
    vars(aside).update(attributes)
    return aside


def _wide(tensor: Tensor) -> Tensor:
    return upcast(tensor.detach())


def find_activation(component: Any, cfg: Any) -> Activation | None:
    """Return the activation function of an MLP or head: its own module, or else the one named in the config."""
    owners = [owner for owner in (component, getattr(component, "original_component", None)) if owner is not None]
    for owner in owners:
        for name in ("act_fn", "act", "activation_fn", "gelu_impl", "activation"):
            phi: Any = getattr(owner, name, None)
            if callable(phi):
                unhooked: Any = getattr(phi, "original_component", None) or phi  # a Bridge wraps it to add hooks
                return unhooked
    from transformers.activations import ACT2FN

    name = getattr(cfg, "act_fn", None)
    if isinstance(name, str) and name in ACT2FN:
        return ACT2FN[name]
    return None


def is_bridge_component(module: Any) -> bool:
    """Whether it wraps a part of another library's model."""
    return hasattr(module, "original_component")


def flattened(bias: Tensor) -> Float[Tensor, "width"]:
    """Flatten a bias by head, with heads side by side."""
    return bias.detach().reshape(-1)


def detached(tensor: Any) -> Tensor | None:
    """Return a tensor without its autograd graph; None for anything else."""
    return tensor.detach() if isinstance(tensor, Tensor) else None


# ------------------------------------------------------------------ adapters

WRAPPED = {"base_layer", "original_module"}
"""Attributes in which adapters keep the layer that they wrap."""

State = tuple[tuple[str, ...], tuple[str, ...], bool, tuple[tuple[str, float], ...]]


def is_adapter(module: Any) -> bool:
    """Whether a module wraps another one with switchable adapters."""
    inside = getattr(module, "_modules", None)
    return bool(inside) and not inside.keys().isdisjoint(WRAPPED) and hasattr(module, "active_adapters")


def in_effect(module: Any) -> tuple[str, ...]:
    """Return the names of adapters that affect a module's output or are merged into its weights."""
    active, merged, disabled, _ = adapter_state(module)
    if disabled:
        return ()
    attributes = (*getattr(module, "adapter_layer_names", ()), "modules_to_save", "token_adapter")
    holders = [getattr(module, name, ()) for name in attributes]  # its parameters by adapter
    return merged or tuple(name for name in active if any(name in holder for holder in holders))


def adapter_state(module: Any) -> State:
    """Return an adapter layer's state apart from parameters: which adapters are active or merged, off, scales."""
    scaling = getattr(module, "scaling", None)
    scales: dict[str, Any] = {}
    if isinstance(scaling, dict):
        scales = scaling
    return (
        tuple(module.active_adapters),
        tuple(getattr(module, "merged_adapters", ())),
        bool(getattr(module, "disable_adapters", False)),
        tuple(sorted((name, float(scale)) for name, scale in scales.items())),
    )


def adapter_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model's adapter layers."""
    return (module for module in whole(model) if is_adapter(module))


def adapter_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of all active adapters in a model or part, in alphabetical order."""
    return tuple(sorted({name for module in adapter_layers(model) for name in in_effect(module)}))


def wide_copy(layer: nn.Module) -> nn.Module:
    """Return a copy of an adapter layer in float32 or wider; half precision would lose a small adapter in the sum.

    accelerate's hooks, which refer to a whole model's weights, are not copied, since the weights are loaded now.
    """
    dtype = torch.float32
    shared = dict[int, Any]()
    for module in layer.modules():
        hook = vars(module).get("_hf_hook")
        if hook is not None:
            shared[id(hook)] = None
    for parameter in layer.parameters():
        dtype = torch.promote_types(dtype, parameter.dtype)
    wide = copy.deepcopy(layer, shared)
    for module in wide.modules():
        if "_hf_hook" in vars(module):
            for name in ("_hf_hook", "_old_forward", "forward"):
                vars(module).pop(name, None)
    return wide.to(dtype).requires_grad_(False)


def merge(layer: Any) -> Any:
    """Merge a copied layer's active adapters with its own methods, and return its base layer."""
    base = layer.base_layer
    if layer.disable_adapters or layer.merged_adapters:
        return base
    if getattr(base, "bias", None) is None and any(getattr(layer, "lora_bias", {}).values()):
        width = stored_linear(base).shape[1]
        base.bias = nn.Parameter(base.weight.new_zeros(width), requires_grad=False)
    layer.merge()
    return base


def stored_linear(module: Any) -> Shaped[Tensor, "d_in d_out"]:
    """Return a linear layer's weight from input to output, as `Conv1D` stores it; others store the transpose."""
    from transformers.pytorch_utils import Conv1D  # transformers is slow to import

    return module.weight if isinstance(module, Conv1D) else module.weight.T


# ------------------------------------------------------------------ linear layers

Refuse = Callable[[str], UnsupportedModelError]
"""Creates an error that names the block."""

DIFFERS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""The allowed difference between a module and its weight in any channel, relative to the channel's output: a few
roundings of the dtype it was run in, which is a narrow one only if it cannot be run in float32."""

VECTORS = 4
"""How many random vectors a module is compared on."""


class LinearWeights(NamedTuple):
    """``x·weight + bias``, a layer's effective computation whatever its class; no bias if None."""

    weight: Float[Tensor, "d_in d_out"]
    bias: Float[Tensor, "d_out"] | None


def is_plain(module: Any) -> bool:
    """Whether a module is ``x·W + b`` by definition: of a known class, with nothing added to it."""
    from transformers.pytorch_utils import Conv1D  # transformers is slow to import

    kind = type(module)
    if kind not in (nn.Linear, Conv1D):
        return False
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    replaced = vars(module).get("forward")
    if replaced is None:
        return True
    old = vars(module).get("_old_forward")  # set by accelerate, whose wrapper loads the weights
    return "_hf_hook" in vars(module) and getattr(old, "__func__", None) is kind.forward


def floating(weight: Tensor, name: str, refuse: Refuse) -> Tensor:
    """Return a weight without its autograd graph; raise if it is quantised."""
    if not weight.is_floating_point() or weight.dtype.itemsize == 1:
        raise refuse(f"{name} is stored as {weight.dtype} (quantised); {UNPACKED}")
    return weight.detach()


UNPACKED = (
    "the output of such a layer is no product with these numbers, and its input is often rounded as well. Load the "
    "model in floating point (FineGrainedFP8Config(dequantize=True) for FP8)."
)


def read_linear(module: Any, name: str, refuse: Refuse) -> LinearWeights:
    """Return weight and bias of a linear layer, unwrapped from a Bridge.

    A plain module's weight is a view; an adapter layer's is a copy in float32 or wider, with adapters merged. Raises an
    error with its `name` if it is quantised or computes something else.
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
    """Return the weight and bias that a module stores."""
    stored = getattr(module, "weight", None)
    if not isinstance(stored, Tensor) or stored.ndim != 2:
        raise refuse(f"{name} ({_kind(module)}) has no weight [d_out, d_in] that is read.")
    return LinearWeights(floating(stored_linear(module), name, refuse), detached(getattr(module, "bias", None)))


def _adapted(module: Any, name: str, refuse: Refuse) -> LinearWeights:
    """Return the weight that an adapter layer would have with its adapters merged."""
    if not is_adapter(module):
        return _by_behaviour(module, name, refuse)
    base = module.base_layer
    if not is_plain(base):
        raise refuse(
            f"{name} ({_kind(module)}) has adapters on a {_kind(base)}, which is not a plain linear layer: load the "
            "model in floating point, and merge adapters on adapters (merge_and_unload())."
        )
    state = _state(module)
    wide = wide_copy(module)
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
    """Read an unknown layer around a linear layer from its output on basis vectors, checked on others."""
    base = module
    while "base_layer" in base._modules:
        base = base.base_layer
    if not is_plain(base):
        raise refuse(f"{name} ({_kind(module)}) wraps a {_kind(base)}, which is not a plain linear layer.")
    wide = wide_copy(module)
    basis = torch.eye(len(stored_linear(base))).to(next(wide.parameters()))
    try:
        with torch.no_grad():
            bias = wide(torch.zeros_like(basis[None, :1]))[0, 0]
            read = LinearWeights(floating(wide(basis[None])[0] - bias, name, refuse), bias)
    except Exception as error:  # the layer is unknown, so anything may be raised
        raise refuse(
            f"{name} ({_kind(module)}) wraps a linear layer and cannot be read: run on basis vectors, it raised "
            f"{type(error).__name__}: {error}. Merge its changes into the weight of its base_layer."
        ) from error
    _refuse_unlike(module, read, _run(module, wide, read, name, refuse), name, refuse)
    return read


def read_embedding(module: Any, name: str, refuse: Refuse) -> Float[Tensor, "token d_model"]:
    """Return an embedding's vectors with adapters merged in a copy; as stored, without any scaling factor."""
    if "base_layer" not in module._modules:
        return floating(module.weight, name, refuse)
    wide = wide_copy(module)
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


_compared: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()  # by module, its state when it was compared


def _state(module: Any) -> tuple[Any, ...]:
    """Return everything a module's output depends on: its weights, hooks, and adapters."""
    parts = list(module.modules())
    weights = [(*version_of(weight), weight.dtype) for weight in module.parameters()]
    hooks = [(*part._forward_hooks, *part._forward_pre_hooks, id(vars(part).get("forward"))) for part in parts]
    adapters = [adapter_state(part) for part in parts if is_adapter(part)]
    return (*weights, *hooks, *adapters, any(part.training for part in parts))


def _vectors(read: LinearWeights) -> Float[Tensor, "1 vector d_in"]:
    """Return the random vectors that a layer is compared on."""
    drawn = torch.randn(1, VECTORS, len(read.weight), generator=torch.Generator().manual_seed(0))
    return drawn.to(read.weight)


def _run(module: nn.Module, runs: Callable[[Tensor], Any], read: LinearWeights, name: str, refuse: Refuse) -> Any:
    """Run a module, or a copy that stands in for it, on the random vectors."""
    try:
        with torch.no_grad():
            return runs(_vectors(read))
    except Exception as error:  # an unknown hook or layer may raise anything
        raise refuse(
            f"{name} ({_kind(module)}) is not a plain linear layer, and cannot be compared with its weight: run on "
            f"{VECTORS} random vectors, it raised {type(error).__name__}: {error}. Take hooks off the module, or merge "
            "adapters into its weight."
        ) from error


def _refuse_unlike(module: nn.Module, read: LinearWeights, output: Any, name: str, refuse: Refuse) -> None:
    """Raise if a module's output differs from that of the weights read from it."""
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
    because = "something was added to it"
    if is_adapter(module) and (adapters := in_effect(module)):
        because = f"its adapters ({', '.join(adapters)}) do more than change its weight"
    raise refuse(
        f"{name} ({_kind(module)}) is not its weight: on random vectors it differs from r·W + b by {difference:.1e} of "
        f"a channel (allowed: {allowed:.0e}), so {because}. Merge adapters into the weights "
        "(merge_and_unload()), take hooks off, and call model.eval()."
    )


def _kind(module: Any) -> str:
    return f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__}"


def path_of(name: str) -> str:
    """Return a module's path as its own library writes it, without a Bridge's insertions."""
    return ".".join(part for part in name.split(".") if part != "_original_component")


# ------------------------------------------------------------------ parts shown by a Bridge


def shown(module: Any, name: str) -> Any:
    """Return a property of a part, or None if there is none, which a Bridge reports by errors of several kinds."""
    try:
        return getattr(module, name, None)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None


def unlike_shown(owner: Any, part: str) -> Any:
    """Return the module of a projection if a Bridge's view of it may differ from its computation; otherwise None."""
    if not is_bridge_component(owner):
        return None
    module = innermost(owner._modules.get(part))
    if not isinstance(module, nn.Module) or is_plain(module):
        return None
    return module


def refuse_bypassed(owner: Any, parts: tuple[str, ...], name: str, refuse: Refuse) -> None:
    """Raise for adapters on a joint projection that a Bridge split when it wrapped the model: they never run."""
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


# ------------------------------------------------------------------ norms


@dataclass(frozen=True)
class NormWeights:
    """Gain and shift of a norm (None for none); `centre` is True for LayerNorm, False for RMSNorm.

    `epsilon` is set if TransformerLens has no `hook_scale` to replace: the norm is then frozen as a whole, with its
    scale computed from its input.
    """

    gain: Float[Tensor, "d"] | None
    shift: Float[Tensor, "d"] | None
    centre: bool
    epsilon: float | None = None

    def scale_of(self, x: Float[Tensor, "*any d"]) -> Float[Tensor, "*any 1"]:
        """Return √(var + ε) or √(mean square + ε) of the norm's input, in float32 or wider."""
        assert self.epsilon is not None
        return (centred(upcast(x), self.centre).square().mean(-1, keepdim=True) + self.epsilon).sqrt()

    def held(self, x: Float[Tensor, "*any d"]) -> Norm:
        """Return the norm with the scale of this input."""
        return Norm(self.scale_of(x), self.gain, self.shift, self.centre)

    def scales(self, x: Float[Tensor, "*any width"], groups: int) -> Float[Tensor, "*any group"]:
        """Return the scale of each of several equal groups of channels."""
        return self.scale_of(x.unflatten(-1, (groups, -1)))[..., 0]

    def gains(self, x: Float[Tensor, "*any width"], groups: int) -> Float[Tensor, "width"]:
        """Return the gain of every channel for several groups; 1 if there is none."""
        ones = torch.ones_like(x[..., :1, :].flatten(0, -2)[0]).unflatten(-1, (groups, -1))
        return times(ones, self.gain).to(x).flatten()

    @property
    def is_plain(self) -> bool:
        """Whether gain and shift change nothing: folded into the next weights, or never trained."""
        has_gain = self.gain is not None and not bool((self.gain == 1).all())
        has_shift = self.shift is not None and bool(self.shift.any())
        return not has_gain and not has_shift

    @property
    def only_scales(self) -> bool:
        """Whether it neither subtracts a mean nor adds a shift."""
        return not self.centre and self.shift is None


def is_norm(norm: Any) -> bool:
    """Whether there is a norm that does anything; a Bridge may wrap an Identity."""
    return norm is not None and not isinstance(innermost(norm), nn.Identity)


def norm_weights(norm: Any, cfg: Any) -> NormWeights:
    """Read a norm of either class; gains stored as an offset from 1 (Gemma) are returned in full.

    Raises `UnsupportedModelError` for a Bridge's norm that is neither a LayerNorm nor an RMSNorm.
    """
    if not is_bridge_component(norm):
        gain = detached(getattr(norm, "w", None))
        shift = detached(getattr(norm, "b", None))
        return NormWeights(gain, shift, centre=_subtracts_mean(norm, gain, cfg))
    measured = _measured_norm(innermost(norm), cfg, cfg.d_model)
    is_rms = getattr(norm, "uses_rms_norm", None)
    adds_one = bool(getattr(norm, "uses_weight_offset", is_rms and getattr(cfg, "rmsnorm_uses_offset", False)))
    # TransformerLens 3.9 does not know that Qwen3-Next adds 1 to the gain, so the result of replacing its hook would be
    # wrong; and a Bridge cannot apply a hook's scale if there is no weight
    reads_alike = is_rms is not None and bool(is_rms) != measured.weights.centre and adds_one == measured.adds_one
    if reads_alike and measured.weights.gain is not None:
        return replace(measured.weights, epsilon=None)
    return measured.weights


def _subtracts_mean(norm: nn.Module, gain: Tensor | None, cfg: Any) -> bool:
    """Whether a TransformerLens norm, run without hooks, ignores a constant added to its input, as a LayerNorm does."""
    aside = object.__new__(type(norm))  # a module with a parametrization cannot be copied
    vars(aside).update(vars(norm))
    modules: dict[str, nn.Module | None] = {name: nn.Identity() for name in norm._modules}
    if is_parametrized(norm):
        modules["parametrizations"] = norm._modules["parametrizations"]
    vars(aside)["_modules"] = modules
    width = cfg.d_model if gain is None else len(gain)
    x = torch.randn(1, 2, width, generator=torch.Generator().manual_seed(0))
    if gain is not None:
        x = x.to(gain)
    with torch.no_grad():
        outputs = type(norm).forward(aside, x)
        moved = type(norm).forward(aside, x + 3)
    return bool((moved - outputs).norm() < 0.1 * (outputs - outputs.flip(1)).norm())


def computes_in_float32(norm: Any) -> bool:
    """Whether a float64 norm ignores rounding its input to float32, as Hugging Face's RMSNorms do."""
    inner = innermost(norm)
    weight = getattr(inner, "weight", None)
    if weight is None or weight.dtype != torch.float64:
        return False
    x = torch.randn(1, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(weight.device)
    with torch.no_grad():
        return torch.equal(forward_of(inner)(x), forward_of(inner)(x.float().double()))


def tried_norm(inner: nn.Module, cfg: Any, *, width: int) -> NormWeights:
    """Read another library's norm from its output on random vectors, setting `epsilon`; without a gain, pass `width`.

    The config may have an epsilon that the module does not show. Raises for anything but LayerNorm and RMSNorm.
    """
    return _measured_norm(inner, cfg, width).weights


class _Measured(NamedTuple):
    """A norm as measured, and whether it adds 1 to its stored gain."""

    weights: NormWeights
    adds_one: bool


def _measured_norm(inner: nn.Module, cfg: Any, width: int) -> _Measured:
    """Return the reading whose output is nearest to the module's, channel by channel, in float32 or wider.

    In half precision, gains of 100 and 101 are equal up to rounding, and next to a gain of a million they would vanish.
    """
    stored = detached(getattr(inner, "weight", None))
    shift = detached(getattr(inner, "bias", None))
    epsilon = norm_epsilon(inner, cfg)
    gains: list[tuple[Tensor | None, bool]] = [(None, False)]
    wide = widened(inner)
    weight = detached(getattr(wide, "weight", None))
    x = _off_centre(width).clone()
    if stored is not None and weight is not None:
        gains = [(stored, False), (1 + upcast(stored), True)]  # 1 + w as in Gemma, which half precision would round
        x = _off_centre(*stored.shape).to(weight, copy=True)
    with torch.no_grad():
        output = forward_of(wide)(x)
    rounding = torch.finfo(output.dtype).eps
    x, output = upcast(x), upcast(output)
    sizes = output.norm(dim=0)
    sizes += rounding**0.5 * sizes.max().clamp_min(torch.finfo(sizes.dtype).tiny)  # in case 1 + w cancels
    options: list[tuple[float, _Measured]] = []
    likelier = shift is not None  # most LayerNorms have a shift, RMSNorms have none
    for centre in (likelier, not likelier):
        for gain, adds_one in gains:
            read = NormWeights(gain, shift, centre, epsilon)
            expected = plus(times(centred(x, centre) / read.scale_of(x), gain), shift)
            error = float(((expected - output).norm(dim=0) / sizes).max())
            options.append((error, _Measured(read, adds_one)))
    error, best = min(options, key=lambda option: option[0])
    # other libraries' norms round in up to four places
    if not error <= 1e-2 + 4 * rounding:
        raise UnsupportedModelError(f"{type(inner).__name__} is not read as a LayerNorm or an RMSNorm.")
    return best


@lru_cache(maxsize=64)
def _off_centre(*shape: int) -> Tensor:
    """Return random vectors with a mean, which only a LayerNorm subtracts; cached, so the same for every norm."""
    return torch.randn(8, *shape, generator=torch.Generator().manual_seed(0)) + 1


def norm_epsilon(norm: Any, cfg: Any) -> float:
    """Return the ε of a norm of either class."""
    inner = innermost(norm)
    for owner, name in ((inner, "variance_epsilon"), (inner, "eps"), (inner, "epsilon"), (cfg, "eps")):
        value = getattr(owner, name, None)
        if isinstance(value, int | float | Tensor):
            return float(value)
    return 1e-5


# ------------------------------------------------------------------ the weights of a model's parts


@dataclass(frozen=True)
class Gate:
    """A gate ``squash(x·W + b)`` computed from a sublayer's input; each channel multiplies `each` entries."""

    linear: Linear
    squash: Activation
    each: int = 1

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos width"]:
        """Return the factor of every channel."""
        return self.squash(self.linear(x)).repeat_interleave(self.each, dim=-1)


@dataclass(frozen=True)
class InverseScale:
    """1 / the scale of a norm inside a sublayer, computed from its input; its gain belongs to the next matrix."""

    norm: NormWeights

    def __call__(self, z: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos 1"]:
        """Return the factor of every position."""
        return (1 / self.norm.scale_of(z)).to(z)


@dataclass(frozen=True)
class InnerValues:
    """Values that pass through a norm: of each head (Gemma 4), or of a latent vector before them (DeepSeek).

    Attributes:
        entry: from attention's input to the norm's.
        norm: one scale for each of `groups` groups of channels; if there are several, without shift or mean.
        out: from the norm to the values; None if its output is the values.
    """

    entry: Linear
    norm: NormWeights
    groups: int
    out: Linear | None = None

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Chain:
        """Return the map to the values, with the norm's scales held at x."""
        read = self.entry(x)
        if self.out is not None:
            return Chain((self.entry, self.held(read), self.out))
        by_group = read.unflatten(-1, (self.groups, -1))
        factor = times((1 / self.norm.scale_of(by_group)).to(read).expand_as(by_group), self.norm.gain)
        return Chain((self.entry, Diagonal(factor.flatten(-2))))

    def held(self, read: Float[Tensor, "batch pos width"]) -> Norm:
        """Return a latent vector's norm, with its scale held."""
        return self.norm.held(read)


@dataclass(frozen=True)
class HeadRouting:
    """Which experts compute a token's queries, in a mixture of attention heads (JetMoe).

    Attributes:
        linear: from attention's input to one number per expert.
        count: the number of experts.
        choices: experts per token: those with the largest numbers, weighted by their softmax.
    """

    linear: Linear
    count: int
    choices: int

    def patterns(
        self, pattern: Float[Tensor, "batch choice_kv query key"], x: Float[Tensor, "batch query d_model"]
    ) -> Float[Tensor, "batch head query key"]:
        """Return every expert's patterns times its weight for the query; zero for experts that are not chosen.

        `pattern` holds the patterns of the choices, the first choice's heads first; `x` is attention's input.
        """
        numbers, index = self.linear(x).topk(self.choices, dim=-1)
        weight = numbers.float().softmax(-1).to(pattern)  # the router computes in float32 whatever the dtype
        sent = torch.nn.functional.one_hot(index, self.count).to(pattern) * weight[..., None]
        by_choice = pattern.unflatten(1, (self.choices, -1))
        return torch.einsum("bckqj,bqce->bkeqj", by_choice, sent).flatten(1, 2)


@dataclass(frozen=True)
class AttentionWeights:
    """Value and output weights with heads side by side; grouped attention has one value per key-value head.

    With the pattern frozen, attention is ``(output_factor ⊙ (pattern · values(x)))·W_O + b_O``, where values are
    usually x·W_V + b_V.

    Attributes:
        value_matrix, b_V: W_V and its bias; no matrix if values pass through a norm (latent attention).
        inner_values: the values, if they are more than x·W_V + b_V.
        output_factor: multiplies the heads' outputs: a gate, or the inverse scale of a norm before W_O. None for 1.
        routing: which experts' heads a token uses; None if every token uses all heads.
        shared: whether the values are those of an earlier block, read from the stream there.
        shown: whether values and heads' outputs have hook points.
    """

    value_matrix: Float[Tensor, "d_model kv_width"] | None
    b_V: Float[Tensor, "kv_width"] | None
    W_O: Float[Tensor, "width d_model"]
    b_O: Float[Tensor, "d_model"] | None
    heads: int
    kv_heads: int
    inner_values: InnerValues | None = None
    output_factor: Gate | InverseScale | None = None
    routing: HeadRouting | None = None
    shared: bool = False
    shown: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it is no more than pattern, W_V and W_O."""
        return self.inner_values is None and self.output_factor is None and self.routing is None and not self.shared

    @property
    def hooked(self) -> bool:
        """Whether holding the pattern is enough; otherwise it is frozen as a whole, from its input."""
        return self.is_plain and self.shown

    def scaled(self, factor: float, reads: float = 1.0) -> "AttentionWeights":
        """Return the weights with the output multiplied by one factor, and the input by another."""
        scaled = self
        if factor != 1:
            scaled = replace(self, W_O=self.W_O * factor, b_O=maybe(partial(torch.mul, other=factor), self.b_O))
        if reads == 1:
            return scaled
        return replace(scaled, value_matrix=maybe(partial(torch.mul, other=reads), self.value_matrix))

    @property
    def W_V(self) -> Float[Tensor, "d_model kv_width"]:
        """The value weights; raises `UnsupportedModelError` if values or heads' outputs depend on more than them."""
        if self.value_matrix is None or not self.is_plain:
            raise UnsupportedModelError(
                "attention with a gate, a norm or a latent inside: what a head reads and writes is no product of its "
                "weights alone. The operator and everything based on it (tensorlens, decompx, stream terms) work."
            )
        return self.value_matrix


@dataclass(frozen=True)
class Latent:
    """The input of queries or keys in place of the stream (DeepSeek): x·`entry` + b, with `norm` on the first `rank`
    channels."""

    entry: Linear
    norm: NormWeights
    rank: int

    def scale(self, read: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos 1"]:
        """Return the norm's scale, from the output of `entry`."""
        return self.norm.scale_of(read[..., : self.rank])

    @property
    def gain(self) -> Float[Tensor, "width"]:
        """Return the factor of every channel, apart from the scale."""
        gain = torch.ones_like(self.entry.weight[0])
        return torch.cat([times(gain[: self.rank], self.norm.gain).to(gain), gain[self.rank :]])


@dataclass(frozen=True)
class QueryKeyWeights:
    """Query and key weights with heads side by side, and the norms of queries and keys.

    They read a latent vector if there is one. `epsilon` belongs to the norms. Grouped attention has one key per
    key-value head.
    """

    W_Q: Float[Tensor, "d_read width"]
    b_Q: Float[Tensor, "width"] | None
    W_K: Float[Tensor, "d_latent kv_width"]
    b_K: Float[Tensor, "kv_width"] | None
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    epsilon: float
    query_latent: Latent | None = None
    key_latent: Latent | None = None


@dataclass(frozen=True)
class WhiteningWeights:
    """The recursion applied to the stream before a block: ``w_i = x_i @ entry + w_{i−1} @ step``."""

    entry: Float[Tensor, "d_model d_model"]
    step: Float[Tensor, "d_model d_model"]


@dataclass(frozen=True)
class MLPWeights:
    """``out(φ(in))`` or gated ``out(φ(gate)·in + b_post)``; `W_gate` is None for a plain MLP.

    Attributes:
        linear_activation: ψ in a gated MLP φ(gate)·ψ(in) (the clamp of gpt-oss); None for the identity.
        post_factor: multiplies the hidden vector after the activation: the inverse scale of an inner norm (BitNet);
            None for 1.
        hooked: whether pre-activations have hook points; if not, they are computed and the MLP is frozen as a whole.
    """

    W_in: Float[Tensor, "d_model d_mlp"]
    b_in: Float[Tensor, "d_mlp"] | None
    W_gate: Float[Tensor, "d_model d_mlp"] | None
    b_gate: Float[Tensor, "d_mlp"] | None
    b_post: Float[Tensor, "d_mlp"] | None
    W_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, "d_model"] | None
    activation: Activation
    linear_activation: Activation | None = None
    post_factor: InverseScale | None = None
    hooked: bool = True

    @property
    def hidden(self) -> int:
        """The number of entries of a vector inside."""
        matrices = [W for W in (self.W_in, self.W_gate, self.W_out) if W is not None]
        return self.W_in.shape[1] * len(matrices)

    def scaled(self, factor: float) -> "MLPWeights":
        """Return the weights with the output multiplied by a factor."""
        if factor == 1:
            return self
        return replace(self, W_out=self.W_out * factor, b_out=maybe(partial(torch.mul, other=factor), self.b_out))


@dataclass(frozen=True)
class MLMHead:
    """The transform between a masked language model's encoder and its unembedding: norm(φ(x·W + b)).

    `norm` is None in a classifier's pooler. `scale_name` is the hook point of the norm's scale; None if it is computed.
    """

    W: Float[Tensor, "d_model d_model"]
    b: Float[Tensor, "d_model"] | None
    activation: Activation
    norm: NormWeights | None
    scale_name: str | None
