"""What mixes positions where a block has no attention, read as an exact affine map with its gates held at one input.

| kind | read by | seen in |
| --- | --- | --- |
| state-space layers, Mamba 1 and 2 | `scans` | Mamba, FalconMamba, Jamba; Mamba 2, Bamba, GraniteMoeHybrid, NemotronH |
| the gated delta rule | `delta` | Qwen3-Next, Qwen3.5, OLMo Hybrid |
| gated short convolutions | here | LFM2 |
| time mixing | `rwkv` | RWKV-4 |

The module itself, recorded under the rule that holds the same (`tensorlens_tl.core.FROZEN`), is the same map; the tests
compare the two. As it is read here it passes many vectors on several times as fast, since it is not the graph of a loop
over tokens, and pulls through no part that is held; its scan, or its pattern, can be shown.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Linear, on_device
from tensorlens_tl.algebra.numerics import maybe, times
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models.parameters import innermost
from tensorlens_tl.models.sublayers.delta import is_delta, read_delta
from tensorlens_tl.models.sublayers.experts import has_experts
from tensorlens_tl.models.sublayers.mixing import (
    Ends,
    Mask,
    MixerWeights,
    biased_entry,
    read_convolution,
    read_linear,
    real_tokens,
    require,
)
from tensorlens_tl.models.sublayers.mlps import has_projections
from tensorlens_tl.models.sublayers.rwkv import is_time_mix, read_time_mix
from tensorlens_tl.models.sublayers.scans import read_scan


@torch.no_grad()
def mixer_map(module: nn.Module, x: Float[Tensor, "batch pos d_model"], mask: Mask | None = None) -> Chain:
    """A mixer as an exact affine map of its input, with everything that depends on it frozen at `x`.

    Args:
        module: Hugging Face's module (see the table above).
        x: its input, after the block's norm.
        mask: True at real tokens, as the mixer takes it; None for all.

    Raises:
        UnsupportedModelError: a module of another kind; names the part that is missing or not as expected.
        InvalidInputError: vectors of another width, or a mask of another shape.
    """
    weights = _weights(module)
    width = len(weights.ends.W_in)
    if x.shape[-1] != width:
        raise InvalidInputError(f"mixer_map: {type(module).__name__} takes vectors of {width}, x has {x.shape[-1]}.")
    if mask is not None and mask.shape != x.shape[:2]:
        raise InvalidInputError(f"mixer_map: the mask is {list(mask.shape)}, x is {list(x.shape)}; pass [batch, pos].")
    return weights.hold(x.detach(), mask)


@dataclass(frozen=True, eq=False)
class Mixer:
    """A mixer in place of attention, read from its module each time that it is used.

    Its map raises an error for padding on the left that would reach real tokens (`leaking` says how): the mixer lets a
    bias through from there.
    """

    module: nn.Module
    refuse: Callable[[str], UnsupportedModelError]
    leaking: str

    def __call__(self, x: Tensor, mask: Mask | None) -> Chain:
        """Its map, from what it reads and which tokens are real, with all that depends on its input held."""
        if self.leaking and mask is not None and bool(((mask != 0).cumsum(1) == 0).any()):
            raise self.refuse(
                f"{self.leaking}, which padding on the left passes on to real tokens: padding changes what the model "
                "gives. Pad on the right, or freeze the prompts one by one."
            )
        device = next(self.module.parameters()).device
        return on_device(mixer_map(self.module, *on_device((x, mask), device)), x.device)

    @property
    def form(self) -> str:
        """Its kind and sizes, which two models of one architecture have in common."""
        return _weights(self.module).form

    def runs(self, mask: Mask | None) -> Callable[[Tensor], Tensor]:
        """The module as a function of what it reads, by operations of torch where it has kernels of its own, too."""
        forward = next(filter(None, (getattr(self.module, name, None) for name in PLAIN)))
        takes_mask = mask is not None and "attention_mask" in inspect.signature(forward).parameters
        options = {"attention_mask": mask.long()} if takes_mask and mask is not None else {}

        def run(x: Tensor) -> Tensor:
            out = forward(x, **options)
            return out[0] if isinstance(out, tuple) else out

        return run


PLAIN = ("torch_forward", "slow_forward", "forward")
"""Methods of a mixer that compute it without kernels of its own, the last of them where there are none."""


def read_mixer(module: nn.Module, refuse: Callable[[str], UnsupportedModelError] = UnsupportedModelError) -> Mixer:
    """Return a mixer of a known kind; raise `UnsupportedModelError` with the part that is not as expected."""
    return Mixer(module, refuse, _weights(module).leaking)


def read_only_mixer(mixers: Mapping[str, Any], refuse: Callable[[str], UnsupportedModelError]) -> Mixer | None:
    """Return the one mixer of a block, or None; raise `UnsupportedModelError` for two, or one that cannot be read."""
    names = list(mixers)
    if len(names) > 1:
        raise refuse(f"{' and '.join(names)} beside each other, which is not read.")
    if not names:
        return None
    try:
        return read_mixer(innermost(mixers[names[0]]), refuse)
    except UnsupportedModelError as error:
        raise refuse(f"{names[0]}: {error}") from None


def _weights(module: nn.Module) -> MixerWeights:
    """What a mixer is made of, whichever its kind."""
    if is_delta(module):
        return read_delta(module)
    if is_time_mix(module):
        return read_time_mix(module)
    parts = [innermost(getattr(module, name, None)) for name in ("in_proj", "conv", "out_proj")]
    if all(isinstance(part, nn.Module) for part in parts) and not hasattr(module, "A_log"):
        return _short_convolution(module)
    return read_scan(module)


def _short_convolution(module: nn.Module) -> MixerWeights:
    """A gated short convolution: out(C ⊙ conv(B ⊙ x)), with B, C and x three parts of one projection."""
    ends = Ends(
        *read_linear(module, "in_proj"),
        read_convolution(module, "conv"),
        nn.Identity(),
        *read_linear(module, "out_proj"),
    )
    channels = len(ends.W_out)
    fits = ends.W_in.shape[1] == 3 * channels == 3 * len(ends.convolution.weight)
    require(fits, module, "in_proj", "does not make B, C and x")
    last = slice(2 * channels, None)

    def hold(x: Float[Tensor, "batch pos d_model"], mask: Mask | None) -> Chain:
        keep = real_tokens(mask, x)
        before, after, _ = Linear(ends.W_in, ends.b_in)(times(x, keep)).chunk(3, dim=-1)
        offset = maybe(lambda b_in: before * b_in[last], ends.b_in)
        stages: list[AffineMap] = [] if keep is None else [Diagonal(keep)]
        convolution = replace(ends.convolution, length=x.shape[1])
        stages += [Linear(ends.W_in[:, last]), Diagonal(before, offset), convolution, Diagonal(after)]
        return Chain((*stages, Linear(ends.W_out, ends.b_out)))

    return MixerWeights("ShortConvolution", ends, hold, leaking=biased_entry(module, ends))


# ------------------------------------------------------------------ blocks of one sublayer each (NemotronH)


def is_attention(module: Any) -> bool:
    """True if what stands where other blocks have a mixer is softmax attention, by what it is made of."""
    inner = innermost(module)
    return _has(inner, "q_proj", "o_proj") and not hasattr(inner, "A_log")


def is_mlp(module: Any) -> bool:
    """True if it is an MLP or a mixture of experts, by what it is made of."""
    inner = innermost(module)
    return isinstance(inner, nn.Module) and not _has(inner, "o_proj") and (has_projections(inner) or has_experts(inner))


def _has(inner: Any, *names: str) -> bool:
    return all(isinstance(innermost(getattr(inner, name, None)), nn.Module) for name in names)


@dataclass(frozen=True)
class NoMixing:
    """What mixes positions in a block that is an MLP alone: a map that gives zero."""

    form = "nothing that mixes positions"

    def __call__(self, x: Tensor, mask: Mask | None) -> Chain:
        """Zero, as the map of an empty hidden vector."""
        nothing = x.new_zeros(x.shape[-1], 1)
        return Chain((Linear(nothing), Linear(nothing.mT)))
