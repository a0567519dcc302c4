"""Which factors of a mixer are held fixed in one run: a table for cases that kinds of operations do not decide.

A state-space layer multiplies outputs of one projection with each other, and scores sum to the logit whichever factor
is held. The factors held here are those that the operator holds (`tensorlens_tl.models.mixers`): Δ, B and C of a scan;
decays, strengths, keys and queries of the delta rule; both gates of a short convolution; keys of time mixing. Gradients
pass through the values.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from tensorlens_tl.models.parameters import innermost


class Held(NamedTuple):
    """The parts that are held in one kind of mixer, by attribute name.

    Attributes:
        parts: attributes that identify such a mixer, whatever its class.
        outputs: parts whose outputs are held.
        pieces: parts whose output, possibly transformed, the mixer splits, with the numbers of the pieces that are
            held.
        without: attributes that such a mixer does not have.
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
    """Return the entry of a mixer in `MIXERS`; None for any other module."""

    tables = (vars(module), module._parameters, module._modules, vars(type(module)))  # a failing hasattr is slow

    def has(name: str) -> bool:
        return any(name in table for table in tables)

    for line in MIXERS:
        if all(map(has, line.parts.split())) and not any(map(has, line.without.split())):
            return line
    return None


def held_pieces(module: nn.Module, held: Held) -> dict[int, tuple[int, ...]]:
    """Return the numbers of the held pieces, by the width of the tensor that is split."""
    return {_width(innermost(getattr(module, name))): which for name, which in held.pieces.items()}


def _width(part: Any) -> int:
    """Return the output width of a projection, or of a convolution over channels."""
    return part.out_features if hasattr(part, "out_features") else part.out_channels
