"""Which positions a layer takes from, whatever mixes them: for pictures, beside patterns of attention.

What stands where attention has its pattern, with all that depends on the input held:

| the layer | of a head | heads |
| --- | --- | --- |
| softmax attention | its pattern | its own |
| a state-space layer | α of `SelectiveScan` (Ali, Zimerman & Wolf 2024) | its own |
| the gated delta rule | M of `tensorlens_tl.models.sublayers.delta` | its own |
| a gated short convolution | ``C_i·w_{i−j}·B_j`` of a channel | every channel |
| time mixing (RWKV) | the weights of a channel's mean | every channel |

In Mamba 1 every channel is a head of its own, too. All but patterns and the weights of means have negative numbers, and
rows that do not sum to 1. None of them holds what lies before and after: value and output weights, and for mixers the
short convolution, the activation, the gates and D, through which tokens reach each other as well. All of it is in
`FrozenPass.mixer`.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.algebra import AnyAttention, CausalConvolution, Chain, Diagonal, SelectiveScan, Sum
from tensorlens_tl.algebra.memory import Memory, check_size, chunks
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.passes import PassLike, check_pass


@checked_names
def implicit_attention(
    frozen: PassLike, layer: Any, *, channels: bool = False, memory: Memory = None
) -> Float[Tensor, "batch head query key"]:
    """What each query takes from each key in one layer, by head; where every channel is a head, their mean size.

    Args:
        frozen: the pass.
        layer: which layer.
        channels: where every channel is a head of its own (Mamba 1, short convolutions), each of them with its sign,
            in place of the mean of their absolute values.
        memory: what the mean may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        One head or more; zero at padding.

    Raises:
        InvalidInputError: no such layer, or `channels` where heads have several channels.
        SizeError: larger than `tensorlens_tl.algebra.memory.MOST_BYTES`.

    >>> import tensorlens_tl as tlens
    >>> from tensorlens_tl.testing import tiny_model
    >>> frozen = tlens.freeze(tiny_model("bridge/mamba"), [[3, 4, 5]])
    >>> tlens.implicit_attention(frozen, 0).shape, tlens.implicit_attention(frozen, 0, channels=True).shape
    (torch.Size([1, 1, 3, 3]), torch.Size([1, 32, 3, 3]))
    """
    check_pass(frozen)
    layer = whole_number("layer", layer, 0, frozen.n_layers - 1, why="a layer of this model")
    if frozen.view.blocks[layer].parts.is_mlp_alone:
        raise InvalidInputError(f"implicit_attention: layer {layer} has an MLP alone, and mixes no positions.")
    if frozen.view.blocks[layer].has_beside:
        raise InvalidInputError(
            f"implicit_attention: layer {layer} has attention and a mixer beside it, and no one matrix of both. Take "
            "frozen.pattern(layer), and scan_of(frozen.maps.beside(layer)).implicit_attention()."
        )
    attention, by_channel = _of_heads(frozen.maps.mixer(layer), channels, memory)
    if channels and not by_channel:
        raise InvalidInputError(
            f"channels: in layer {layer} the channels of a head take from the same positions; leave it out."
        )
    real = frozen.mask[:, slice(*frozen.capture.side(layer))]
    return attention * (real[:, None, :, None] & real[:, None, None, :])


def _of_heads(mixer: Chain, channels: bool, memory: Memory) -> tuple[Tensor, bool]:
    """The same with padding, and whether every channel is a head of its own."""
    terms = [term for stage in mixer.stages for term in stage.summands]
    for term in terms:
        if isinstance(term, AnyAttention):
            return term.pattern, False
        if isinstance(term, SelectiveScan):
            if term.head_dim > 1 or channels:
                return term.implicit_attention(), term.head_dim == 1
            return term.mean_attention(memory)[:, None], True
    means = [stage for stage in mixer.stages if isinstance(stage, Sum) and stage.mixes]
    if means:
        like = means[0].terms[-1]
        assert isinstance(like, Diagonal)
        return _convolved(Chain((means[0],)), like.factor, channels, memory), True
    at = next(number for number, term in enumerate(terms) if isinstance(term, CausalConvolution))
    before, _, after = gated = tuple(terms[at - 1 : at + 2])
    assert isinstance(before, Diagonal)
    assert isinstance(after, Diagonal)
    return _convolved(Chain(gated), before.factor, channels, memory), True


def _convolved(gated: Chain, like: Tensor, channels: bool, memory: Memory) -> Float[Tensor, "batch head query key"]:
    """A gated convolution, some keys at a time."""
    batch, pos, width = like.shape
    heads = width if channels else 1
    check_size("implicit_attention", (batch, heads, pos, pos), like)
    attention = like.new_empty(pos, batch, pos, heads)
    for keys in chunks(pos, 4 * like.numel() * like.element_size(), memory, "implicit attention"):
        ones = like.new_zeros(len(keys), batch, pos, width)
        ones[torch.arange(len(keys)), :, torch.tensor(keys)] = 1
        pushed = gated.push(ones)
        if not channels:
            pushed = pushed.abs().mean(-1, keepdim=True)
        attention[keys.start : keys.stop] = pushed
    return attention.permute(1, 3, 2, 0)
