"""How is a norm of any library read: by its class where that is known, and by what it does to random vectors?"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from tensorlens_tl.algebra.numerics import centred, plus, times, upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.parameters.modules import detached, innermost, is_bridge_component, widened
from tensorlens_tl.models.parameters.offload import forward_of


@dataclass(frozen=True)
class NormWeights:
    """Gain and shift of a norm (None where it has none); `centre` is True for LayerNorm, False for RMSNorm.

    `epsilon` is set where TransformerLens has no `hook_scale` for it that can be read and replaced: the scale then
    follows from what the norm reads, and the norm is held as a whole.
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
        """Whether its gain and shift change nothing: folded into what reads the norm, or never trained."""
        has_gain = self.gain is not None and not bool((self.gain == 1).all())
        has_shift = self.shift is not None and bool(self.shift.any())
        return not has_gain and not has_shift

    @property
    def only_scales(self) -> bool:
        """Whether it neither subtracts a mean nor adds anything."""
        return not self.centre and self.shift is None


def is_norm(norm: Any) -> bool:
    """Whether there is a norm that does anything; a Bridge may wrap an Identity."""
    return norm is not None and not isinstance(innermost(norm), nn.Identity)


def norm_weights(norm: Any, cfg: Any) -> NormWeights:
    """Read a norm of either class; gains stored as an offset from 1 (Gemma) come back whole.

    Raises:
        UnsupportedModelError: a part of a Bridge that is neither a LayerNorm nor an RMSNorm.
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
    """Whether a norm of TransformerLens is a LayerNorm, which gives the same of a vector plus a constant.

    Its hook points stand aside, so that nobody's hooks are called.
    """
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
    """Whether a norm with float64 weights gives the very same of a vector and of that vector rounded to float32.

    Hugging Face's RMSNorms do.
    """
    inner = innermost(norm)
    weight = getattr(inner, "weight", None)
    if weight is None or weight.dtype != torch.float64:
        return False
    x = torch.randn(1, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(weight.device)
    with torch.no_grad():
        return torch.equal(forward_of(inner)(x), forward_of(inner)(x.float().double()))


def tried_norm(inner: nn.Module, cfg: Any, *, width: int) -> NormWeights:
    """Read a norm of another library by what it does to random vectors; its epsilon is set.

    Args:
        inner: the module.
        cfg: the model's config, which may know an epsilon that the module does not show.
        width: of what it reads, where it has no gain.

    Raises:
        UnsupportedModelError: it is neither a LayerNorm nor an RMSNorm.
    """
    return _measured_norm(inner, cfg, width).weights


class _Measured(NamedTuple):
    """A norm as its output shows it, and whether it adds 1 to the gain that it stores."""

    weights: NormWeights
    adds_one: bool


def _measured_norm(inner: nn.Module, cfg: Any, width: int) -> _Measured:
    """The reading whose output is nearest to the module's, channel by channel, in float32 at least.

    In half precision, a gain of 100 and one of 101 are the same within rounding; and where one channel has a gain of a
    million, they are the same beside it.
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
