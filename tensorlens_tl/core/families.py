"""Which factors of a mixer are held in one run: data, where the kinds of operations do not say it.

A state-space layer multiplies values by values of the same projection, and the sum comes out right whichever of them is
held. What is held here is what the operator holds (`tensorlens_tl.models.mixers`): Δ, B and C of a scan, decays,
strengths, keys and queries of the delta rule, both gates of a short convolution, keys of time mixing. The values pass.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from tensorlens_tl.models.parameters import innermost


class Held(NamedTuple):
    """What is held of one kind of mixer, by names of its parts.

    Attributes:
        parts: parts that such a mixer has, whatever its class.
        outputs: parts whose outputs are held.
        pieces: parts whose output, or what became of it, the mixer splits, and which of the pieces are held.
        without: parts that it does not have.
    """

    parts: str
    outputs: str = ""
    pieces: Mapping[str, tuple[int, ...]] = {}
    without: str = ""


MIXERS = (
    # Mamba, FalconMamba, Jamba: Δ, B and C
    Held("A_log x_proj dt_proj", outputs="x_proj"),
    # Mamba 2 and its like: Δ of gate | convolved | Δ, then B and C of x | B | C
    Held("A_log dt_bias n_groups in_proj conv1d", pieces={"in_proj": (-1,), "conv1d": (1, 2)}),
    # the gated delta rule, with strengths and decays under one of three sets of names: queries and keys of q | k | v
    Held(
        "A_log dt_bias head_k_dim conv1d",
        outputs="in_proj_ba in_proj_b in_proj_a b_proj a_proj",
        pieces={"conv1d": (0, 1)},
    ),
    # gated short convolutions: B and C of B | C | x
    Held("in_proj conv out_proj", pieces={"in_proj": (0, 1)}, without="A_log"),
    # time mixing of RWKV-4: the keys, whose weighted mean is a pattern
    Held("time_decay time_first time_mix_key receptance", outputs="key"),
)


def held_of(module: nn.Module) -> Held | None:
    """The line of a mixer; None for any other module."""

    tables = (vars(module), module._parameters, module._modules, vars(type(module)))  # hasattr is slow where it fails

    def has(name: str) -> bool:
        return any(name in table for table in tables)

    for line in MIXERS:
        if all(map(has, line.parts.split())) and not any(map(has, line.without.split())):
            return line
    return None


def held_pieces(module: nn.Module, held: Held) -> dict[int, tuple[int, ...]]:
    """Which pieces are held of what is split, by its width."""
    return {_width(innermost(getattr(module, name))): which for name, which in held.pieces.items()}


def _width(part: Any) -> int:
    """How many numbers a projection, or a convolution of channels, gives each token."""
    return part.out_features if hasattr(part, "out_features") else part.out_channels
