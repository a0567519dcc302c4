"""Blocks of one sublayer each: attention, an MLP or experts, or a mixer, all under the same name (NemotronH).

Which of them it is follows from what its module is made of.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tensorlens_tl.algebra import Chain, Linear
from tensorlens_tl.models.parameters import innermost
from tensorlens_tl.models.sublayers.experts import has_experts
from tensorlens_tl.models.sublayers.mixing import Mask
from tensorlens_tl.models.sublayers.mlps import has_projections


def is_attention(module: Any) -> bool:
    """Whether what stands where other blocks have a mixer is softmax attention."""
    inner = innermost(module)
    return _has(inner, "q_proj", "o_proj") and not hasattr(inner, "A_log")


def is_mlp(module: Any) -> bool:
    """Whether it is an MLP or a mixture of experts."""
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
