"""How weights are read from modules: linear layers, adapters and norms, in one form for every class.

A plain module (torch's `Linear`, Hugging Face's `Conv1D`, nothing put on it) is its weight by definition. Anything else
is run on a few random vectors, once for the weights and adapters that it has, and refused by name where ``r·W + b`` is
not what it gives. An adapter's layer is read as the weight that it would have with its adapters merged; a layer of an
unknown class with a `base_layer`, as what it does to basis vectors. Nothing here imports peft: its layers are known by
what they hold, a `base_layer` (LoRA and the like) or an `original_module` (a part that was trained whole), and by the
names of the adapters that are active.

A norm is read by its class where that is known, and by what it does to random vectors.
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

# ------------------------------------------------------------------ small readings of modules


def innermost(module: Any) -> Any:
    """What a component of a Bridge wraps, however deep; any other module itself."""
    while hasattr(module, "original_component"):
        module = module.original_component
    return module


def widened(module: nn.Module) -> nn.Module:
    """Return the module with weights in float32 at least, to see its output without half precision's rounding.

    It is a copy with the same hooks. A module whose `forward` was replaced runs with the weights that the replacement
    closes over, and is returned itself.
    """
    accelerated = "_hf_hook" in vars(module)  # its weights are loaded now, and its `forward` is accelerate's
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
    """The activation function of an MLP or head: its own module where it has one, else the one the config names."""
    owners = [owner for owner in (component, getattr(component, "original_component", None)) if owner is not None]
    for owner in owners:
        for name in ("act_fn", "act", "activation_fn", "gelu_impl", "activation"):
            phi: Any = getattr(owner, name, None)
            if callable(phi):
                unhooked: Any = getattr(phi, "original_component", None) or phi  # a Bridge wraps it with hooks
                return unhooked
    from transformers.activations import ACT2FN

    name = getattr(cfg, "act_fn", None)
    if isinstance(name, str) and name in ACT2FN:
        return ACT2FN[name]
    return None


def is_bridge_component(module: Any) -> bool:
    """True if it wraps a part of another library's model."""
    return hasattr(module, "original_component")


def flattened(bias: Tensor) -> Float[Tensor, "width"]:
    """A bias by head, heads side by side."""
    return bias.detach().reshape(-1)


def detached(tensor: Any) -> Tensor | None:
    """A tensor without its graph; None for what is none."""
    return tensor.detach() if isinstance(tensor, Tensor) else None


# ------------------------------------------------------------------ adapters

WRAPPED = {"base_layer", "original_module"}
"""What adapters call the layer that they wrap."""

State = tuple[tuple[str, ...], tuple[str, ...], bool, tuple[tuple[str, float], ...]]


def is_adapter(module: Any) -> bool:
    """True if a module wraps another one, with adapters that can be switched."""
    inside = getattr(module, "_modules", None)
    return bool(inside) and not inside.keys().isdisjoint(WRAPPED) and hasattr(module, "active_adapters")


def in_effect(module: Any) -> tuple[str, ...]:
    """The names of the adapters that change what a module gives, or are merged into its weights."""
    active, merged, disabled, _ = adapter_state(module)
    if disabled:
        return ()
    attributes = (*getattr(module, "adapter_layer_names", ()), "modules_to_save", "token_adapter")
    holders = [getattr(module, name, ()) for name in attributes]  # of its parameters, by adapter
    return merged or tuple(name for name in active if any(name in holder for holder in holders))


def adapter_state(module: Any) -> State:
    """What an adapter's layer can be switched to without any change of a parameter: active, merged, off, scales."""
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
    """The adapters' layers of a model."""
    return (module for module in whole(model) if is_adapter(module))


def adapter_names(model: nn.Module) -> tuple[str, ...]:
    """The names of all adapters in effect in a model or a part of it, in alphabetical order."""
    return tuple(sorted({name for module in adapter_layers(model) for name in in_effect(module)}))


def copied(layer: nn.Module) -> nn.Module:
    """Return an adapter's layer in float32 at least: a small adapter would be lost in a half-precision sum.

    Hooks of accelerate, which keep a whole model's weights, are not copied: their weights are loaded now.
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
    """Merge the adapters of a copied layer that are in effect, by its own means; returns its base layer."""
    base = layer.base_layer
    if layer.disable_adapters or layer.merged_adapters:
        return base
    if getattr(base, "bias", None) is None and any(getattr(layer, "lora_bias", {}).values()):
        width = stored_linear(base).shape[1]
        base.bias = nn.Parameter(base.weight.new_zeros(width), requires_grad=False)
    layer.merge()
    return base


def stored_linear(module: Any) -> Shaped[Tensor, "d_in d_out"]:
    """A linear layer's weight from input to output, as Hugging Face's `Conv1D` stores it; others do the transpose."""
    from transformers.pytorch_utils import Conv1D  # transformers is slow to import

    return module.weight if isinstance(module, Conv1D) else module.weight.T


# ------------------------------------------------------------------ linear layers

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
    """True if a module is ``x·W + b`` by definition: of a known class, and with nothing put on it."""
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
    """A weight without its graph; refused where it is quantised."""
    if not weight.is_floating_point() or weight.dtype.itemsize == 1:
        raise refuse(f"{name} is stored as {weight.dtype} (quantised); {UNPACKED}")
    return weight.detach()


UNPACKED = (
    "what such a layer computes is no product with these numbers, and often rounds what it reads as well. Load the "
    "model in floating point (FineGrainedFP8Config(dequantize=True) for FP8)."
)


def read_linear(module: Any, name: str, refuse: Refuse) -> LinearWeights:
    """Return weight and bias of a linear layer, or of what a Bridge wraps it in.

    A plain module's weight is a view; an adapter's layer is a copy with its adapters merged, in float32 at least.
    Raises an error with its `name` where it is quantised, or computes something else.
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
    """The vectors of an embedding with adapters, which are merged in a copy; as they are stored, without any factor."""
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
    """Raise an error for adapters on a joint projection that a Bridge split when it wrapped the model: they do not
    run."""
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

    `epsilon` is set where TransformerLens has no `hook_scale` to replace: the norm is then frozen as a whole, its scale
    computed from its input.
    """

    gain: Float[Tensor, "d"] | None
    shift: Float[Tensor, "d"] | None
    centre: bool
    epsilon: float | None = None

    def scale_of(self, x: Float[Tensor, "*any d"]) -> Float[Tensor, "*any 1"]:
        """√(var + ε) or √(mean square + ε) of what the norm reads, in float32 at least."""
        assert self.epsilon is not None
        return (centred(upcast(x), self.centre).square().mean(-1, keepdim=True) + self.epsilon).sqrt()

    def scales(self, x: Float[Tensor, "*any width"], groups: int) -> Float[Tensor, "*any group"]:
        """The scale of each of several equal groups of channels."""
        return self.scale_of(x.unflatten(-1, (groups, -1)))[..., 0]

    def gains(self, x: Float[Tensor, "*any width"], groups: int) -> Float[Tensor, "width"]:
        """The gain of every channel of several groups; 1 where there is none."""
        ones = torch.ones_like(x[..., :1, :].flatten(0, -2)[0]).unflatten(-1, (groups, -1))
        return times(ones, self.gain).to(x).flatten()

    @property
    def is_plain(self) -> bool:
        """True if its gain and shift change nothing: folded into what reads the norm, or never trained."""
        has_gain = self.gain is not None and not bool((self.gain == 1).all())
        has_shift = self.shift is not None and bool(self.shift.any())
        return not has_gain and not has_shift

    @property
    def only_scales(self) -> bool:
        """True if it neither subtracts a mean nor adds anything."""
        return not self.centre and self.shift is None


def is_norm(norm: Any) -> bool:
    """True if there is a norm that does anything; a Bridge may wrap an Identity."""
    return norm is not None and not isinstance(innermost(norm), nn.Identity)


def norm_weights(norm: Any, cfg: Any) -> NormWeights:
    """Read a norm of either class; gains stored as an offset from 1 (Gemma) come back whole.

    Raises `UnsupportedModelError` for a Bridge's part that is neither a LayerNorm nor an RMSNorm.
    """
    if not is_bridge_component(norm):
        gain = detached(getattr(norm, "w", None))
        shift = detached(getattr(norm, "b", None))
        return NormWeights(gain, shift, centre=_subtracts_mean(norm, gain, cfg))
    measured = _measured_norm(innermost(norm), cfg, cfg.d_model)
    is_rms = getattr(norm, "uses_rms_norm", None)
    adds_one = bool(getattr(norm, "uses_weight_offset", is_rms and getattr(cfg, "rmsnorm_uses_offset", False)))
    # TransformerLens 3.9 does not know that Qwen3-Next adds one: what its hooks replace would have another gain. And a
    # Bridge cannot apply a scale that a hook gave it where there is no weight
    reads_alike = is_rms is not None and bool(is_rms) != measured.weights.centre and adds_one == measured.adds_one
    if reads_alike and measured.weights.gain is not None:
        return replace(measured.weights, epsilon=None)
    return measured.weights


def _subtracts_mean(norm: nn.Module, gain: Tensor | None, cfg: Any) -> bool:
    """True if a norm of TransformerLens gives the same for a vector plus a constant, as a LayerNorm does; hooks do
    not run."""
    aside = object.__new__(type(norm))  # a module with a parametrization refuses to be copied
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
    """True if a float64 norm gives the same for a vector rounded to float32, as Hugging Face's RMSNorms do."""
    inner = innermost(norm)
    weight = getattr(inner, "weight", None)
    if weight is None or weight.dtype != torch.float64:
        return False
    x = torch.randn(1, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(weight.device)
    with torch.no_grad():
        return torch.equal(forward_of(inner)(x), forward_of(inner)(x.float().double()))


def tried_norm(inner: nn.Module, cfg: Any, *, width: int) -> NormWeights:
    """Read another library's norm from its outputs on random vectors; `epsilon` is set, `width` needed without a gain.

    The config may know an epsilon that the module does not show. Raises for what is neither LayerNorm nor RMSNorm.
    """
    return _measured_norm(inner, cfg, width).weights


class _Measured(NamedTuple):
    """A norm as its output shows it, and whether it adds 1 to the gain that it stores."""

    weights: NormWeights
    adds_one: bool


def _measured_norm(inner: nn.Module, cfg: Any, width: int) -> _Measured:
    """Return the reading whose output is nearest to the module's, channel by channel, in float32 at least.

    In half precision gains of 100 and 101 are equal within rounding, and next to a gain of a million they would vanish.
    """
    stored = detached(getattr(inner, "weight", None))
    shift = detached(getattr(inner, "bias", None))
    epsilon = norm_epsilon(inner, cfg)
    gains: list[tuple[Tensor | None, bool]] = [(None, False)]
    wide = widened(inner)
    weight = detached(getattr(wide, "weight", None))
    x = _off_centre(width).clone()
    if stored is not None and weight is not None:
        gains = [(stored, False), (1 + upcast(stored), True)]  # as Gemma adds it: in half precision it would be rounded
        x = _off_centre(*stored.shape).to(weight, copy=True)
    with torch.no_grad():
        output = forward_of(wide)(x)
    rounding = torch.finfo(output.dtype).eps
    x, output = upcast(x), upcast(output)
    sizes = output.norm(dim=0)
    sizes += rounding**0.5 * sizes.max().clamp_min(torch.finfo(sizes.dtype).tiny)  # 1 + w may cancel
    options: list[tuple[float, _Measured]] = []
    likelier = shift is not None  # most LayerNorms have a shift, no RMSNorm has
    for centre in (likelier, not likelier):
        for gain, adds_one in gains:
            read = NormWeights(gain, shift, centre, epsilon)
            expected = plus(times(centred(x, centre) / read.scale_of(x), gain), shift)
            error = float(((expected - output).norm(dim=0) / sizes).max())
            options.append((error, _Measured(read, adds_one)))
    error, best = min(options, key=lambda option: option[0])
    # norms of other libraries round in up to four places
    if not error <= 1e-2 + 4 * rounding:
        raise UnsupportedModelError(f"{type(inner).__name__} is not read as a LayerNorm or an RMSNorm.")
    return best


@lru_cache(maxsize=64)
def _off_centre(*shape: int) -> Tensor:
    """Random vectors with a mean that only a LayerNorm subtracts; the same ones for every norm, drawn once."""
    return torch.randn(8, *shape, generator=torch.Generator().manual_seed(0)) + 1


def norm_epsilon(norm: Any, cfg: Any) -> float:
    """ε of a norm of either class."""
    inner = innermost(norm)
    for owner, name in ((inner, "variance_epsilon"), (inner, "eps"), (inner, "epsilon"), (cfg, "eps")):
        value = getattr(owner, name, None)
        if isinstance(value, int | float | Tensor):
            return float(value)
    return 1e-5


# ------------------------------------------------------------------ the weights of a model's parts


@dataclass(frozen=True)
class Gate:
    """``squash(x·W + b)``, from what a sublayer reads: a factor, each channel for several of what it multiplies."""

    linear: Linear
    squash: Activation
    each: int = 1

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos width"]:
        """The factor of every channel."""
        return self.squash(self.linear(x)).repeat_interleave(self.each, dim=-1)


@dataclass(frozen=True)
class InverseScale:
    """1 / the scale of a norm inside a sublayer, from what the norm reads; its gain belongs to the next matrix."""

    norm: NormWeights

    def __call__(self, z: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos 1"]:
        """The factor of every position."""
        return (1 / self.norm.scale_of(z)).to(z)


@dataclass(frozen=True)
class InnerValues:
    """Values through a norm: each head's (Gemma 4), or a latent vector's before them (DeepSeek).

    Attributes:
        entry: from attention's input to the norm's.
        norm: one scale for each of `groups` of channels; without a shift or mean, if there are several.
        out: from the norm to the values; None where they are its output.
    """

    entry: Linear
    norm: NormWeights
    groups: int
    out: Linear | None = None

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Chain:
        """With the scales held that the norm has at x."""
        read = self.entry(x)
        if self.out is not None:
            return Chain((self.entry, self.held(read), self.out))
        by_group = read.unflatten(-1, (self.groups, -1))
        factor = times((1 / self.norm.scale_of(by_group)).to(read).expand_as(by_group), self.norm.gain)
        return Chain((self.entry, Diagonal(factor.flatten(-2))))

    def held(self, read: Float[Tensor, "batch pos width"]) -> Norm:
        """The norm of a latent vector, with the scale that it has there."""
        return Norm(self.norm.scale_of(read), self.norm.gain, self.norm.shift, self.norm.centre)


@dataclass(frozen=True)
class HeadRouting:
    """Which experts read a token's queries, in a mixture of attention heads (JetMoe).

    Attributes:
        linear: from attention's input to one number for every expert.
        count: of experts.
        choices: experts per token, those with the largest numbers, weighted by their softmax.
    """

    linear: Linear
    count: int
    choices: int

    def patterns(
        self, pattern: Float[Tensor, "batch choice_kv query key"], x: Float[Tensor, "batch query d_model"]
    ) -> Float[Tensor, "batch head query key"]:
        """Return every expert's patterns times its weight for the query; zero for an expert that is not chosen.

        `pattern` is that of the choices, the first choice's heads first; `x` is attention's input.
        """
        numbers, index = self.linear(x).topk(self.choices, dim=-1)
        weight = numbers.float().softmax(-1).to(pattern)  # the router computes in float32, whatever the dtype
        sent = torch.nn.functional.one_hot(index, self.count).to(pattern) * weight[..., None]
        by_choice = pattern.unflatten(1, (self.choices, -1))
        return torch.einsum("bckqj,bqce->bkeqj", by_choice, sent).flatten(1, 2)


@dataclass(frozen=True)
class AttentionWeights:
    """Value and output weights with heads side by side; grouped attention has one value per key-value head.

    With the pattern frozen, attention is ``(output_factor ⊙ (pattern · values(x)))·W_O + b_O``, values mostly x·W_V +
    b_V.

    Attributes:
        value_matrix, b_V: W_V and its bias; no matrix where values go through a norm inside (latent attention).
        inner_values: values that are more than x·W_V + b_V.
        output_factor: multiplies the heads' outputs: a gate, or the scale of a norm before W_O. None for 1.
        routing: which experts' heads a token has; None where every token has all heads.
        shared: whether values are those of an earlier block, read from the stream there.
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
        """True if it is no more than pattern, W_V and W_O."""
        return self.inner_values is None and self.output_factor is None and self.routing is None and not self.shared

    @property
    def hooked(self) -> bool:
        """True if holding the pattern holds it; else it is held as a whole, by what it reads."""
        return self.is_plain and self.shown

    def scaled(self, factor: float, reads: float = 1.0) -> "AttentionWeights":
        """The same, with what it writes multiplied by a factor, and what it reads by another."""
        scaled = self
        if factor != 1:
            scaled = replace(self, W_O=self.W_O * factor, b_O=maybe(partial(torch.mul, other=factor), self.b_O))
        if reads == 1:
            return scaled
        return replace(scaled, value_matrix=maybe(partial(torch.mul, other=reads), self.value_matrix))

    @property
    def W_V(self) -> Float[Tensor, "d_model kv_width"]:
        """The value weights; raises `UnsupportedModelError` where values or heads' outputs depend on more than them."""
        if self.value_matrix is None or not self.is_plain:
            raise UnsupportedModelError(
                "attention with a gate, a norm or a latent inside: what a head reads and writes is no product of its "
                "weights alone. The operator and what is made from it (tensorlens, decompx, stream terms) work."
            )
        return self.value_matrix


@dataclass(frozen=True)
class Latent:
    """What queries or keys read in place of the stream (DeepSeek): x·`entry` + b, its first `rank` channels through
    `norm`."""

    entry: Linear
    norm: NormWeights
    rank: int

    def scale(self, read: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos 1"]:
        """The norm's scale, from what the matrix gives."""
        return self.norm.scale_of(read[..., : self.rank])

    @property
    def gain(self) -> Float[Tensor, "width"]:
        """What every channel is multiplied by, the scale apart."""
        gain = torch.ones_like(self.entry.weight[0])
        return torch.cat([times(gain[: self.rank], self.norm.gain).to(gain), gain[self.rank :]])


@dataclass(frozen=True)
class QueryKeyWeights:
    """Query and key weights with heads side by side (from a latent vector where there is one), and norms of queries and
    keys.

    `epsilon` is that of these norms. Grouped attention has one key per key-value head.
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
    """What the stream goes through before a block: ``w_i = x_i @ entry + w_{i−1} @ step``."""

    entry: Float[Tensor, "d_model d_model"]
    step: Float[Tensor, "d_model d_model"]


@dataclass(frozen=True)
class MLPWeights:
    """``out(φ(in))`` or gated ``out(φ(gate)·in + b_post)``; `W_gate` is None for a plain MLP.

    Attributes:
        linear_activation: ψ of a gated MLP φ(gate)·ψ(in) (the clamp of gpt-oss); None for the identity.
        post_factor: multiplies the hidden vector after the activation: the scale of a norm inside (BitNet); None for 1.
        hooked: whether pre-activations have hook points; without, they are computed and the MLP is frozen as a whole.
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
        """Numbers that a vector takes inside at most."""
        matrices = [W for W in (self.W_in, self.W_gate, self.W_out) if W is not None]
        return self.W_in.shape[1] * len(matrices)

    def scaled(self, factor: float) -> "MLPWeights":
        """The same, with what it writes multiplied by a factor."""
        if factor == 1:
            return self
        return replace(self, W_out=self.W_out * factor, b_out=maybe(partial(torch.mul, other=factor), self.b_out))


@dataclass(frozen=True)
class MLMHead:
    """What stands between a masked language model's encoder and its unembedding: norm(φ(x·W + b)).

    `norm` is None in a classifier's pooler. `scale_name` is the hook point of its scale; None where it is computed.
    """

    W: Float[Tensor, "d_model d_model"]
    b: Float[Tensor, "d_model"] | None
    activation: Activation
    norm: NormWeights | None
    scale_name: str | None
