"""One head of a frozen pass, by itself: what it moves from token to token, and what becomes of that."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra import AffineMap, AnyAttention, Chain, Linear, Norm, Segment
from tensorlens_tl.algebra.memory import check_size
from tensorlens_tl.circuits.arguments import Direction, Whole
from tensorlens_tl.circuits.stream import Stream, stream_target, token_pairs
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import LayerRange, Query, TokenLike
from tensorlens_tl.passes import FrozenPass, PassLike, check_pass
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.operator import chosen_head


@dataclass(frozen=True, eq=False)
class HeadMap:
    """One head by itself, pattern frozen: what it moves from token to token, and what becomes of that.

    Attributes:
        layer, head: which one.
        cross: whether it is one of cross-attention.
        map: stream before the head -> what it writes (b_V inside, b_O not), an `AffineMap`.
        pattern: `[batch, query, key]`; of an encoder–decoder's between all positions, the encoder's first.
        vectors: what each source token offers, v_j W_O, through the linear part of a norm after the sublayer but its
            denominator, `[batch, key, d_model]`.
    """

    frozen: FrozenPass
    layer: int
    head: int
    map: Chain
    pattern: Float[Tensor, "batch query key"]
    vectors: Float[Tensor, "batch key d_model"]
    _scale: Float[Tensor, "batch query 1"]
    _stream: Stream
    _activation: str
    cross: bool = False

    def __repr__(self) -> str:
        batch, query, _ = self.pattern.shape
        _, sublayer = self._stream.at(self.layer, cross=self.cross)
        return f"HeadMap({sublayer.nodes[self.head]} of {self.frozen.view.description}, batch={batch}, pos={query})"

    def contributions(self, query: Query = "all") -> Float[Tensor, "batch query key d_model"]:
        """``A_ij v_j W_O``: what source token j puts into position i through this head.

        Raises:
            InvalidInputError: a query out of range.
            SizeError: the result would be larger than `tensorlens_tl.algebra.memory.MOST_BYTES`.

        >>> tlens.circuits.head_map(frozen, 0, 0).contributions().shape  # batch query key d_model
        torch.Size([1, 7, 7, 128])
        """
        positions = query_positions(self.frozen.prompt, query)
        batch, _, key = self.pattern.shape
        check_size("contributions", (batch, positions.shape[1], key, self.vectors.shape[-1]), self.vectors)
        weights = torch.take_along_dim(self._weights, positions[..., None], dim=1)
        return weights[..., None] * self.vectors[:, None]

    @property
    def _weights(self) -> Float[Tensor, "batch query key"]:
        """The pattern over the scale of a norm after the sublayer, between real tokens."""
        mask = self.frozen.mask
        return self.pattern / self._scale * (mask[:, :, None] & mask[:, None])

    @property
    def norms(self) -> Float[Tensor, "batch query key"]:
        """‖A_ij v_j W_O‖ (Kobayashi et al. 2020) for all pairs."""
        return self._weights.abs() * self.vectors.norm(dim=-1)[:, None]

    @property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """What the head writes to the residual stream, zero at padding."""
        number, _ = self._stream.at(self.layer, cross=self.cross)
        return self.map(self._stream.x[number]) * self.frozen.mask[..., None]

    @cached_property
    def effect(self) -> Float[Tensor, "batch pos d_out"]:
        """The head's total effect: its output pushed through everything later, to the stream that is unembedded.

        Of a range of layers, to where the range ends.
        """
        self.frozen.check_fresh()
        number, _ = self._stream.at(self.layer, cross=self.cross)
        x = self._stream.steps[number].outer.push(self.output)
        for step in self._stream.steps[number + 1 :]:
            x = step.map.push(x)
        return x

    def target(
        self,
        target: TokenLike = None,
        minus: TokenLike = None,
        *,
        query: Query = -1,
        direction: Direction = None,
        direct: bool = False,
    ) -> Float[Tensor, "batch query key"]:
        """What each token pair of this head adds to a logit through everything later, `[batch, query, key]`.

        Args:
            target, minus, direction: as in `FrozenOperator.target`; where the head was taken from a range of layers, a
                direction reads the stream where they end.
            query: the position whose prediction the target is part of.
            direct: only along the residual stream, past every later head and MLP.

        Returns:
            Scores whose sum is ⟨output, pulled-back target⟩, the head's total (or direct) effect on the logit.

        >>> tlens.circuits.head_map(frozen, 0, 0).target(" value").shape  # batch query key
        torch.Size([1, 7, 7])
        """
        layers = self._stream.layers
        norm = self._stream.final_norm
        readout = stream_target(self.frozen, target, minus, direction, query, self._activation, layers, norm)
        pulled = readout.stream.pull(readout.seed, sublayers=not direct)
        number, sublayer = readout.stream.at(self.layer, cross=self.cross)
        cotangent = sublayer.write.pull(pulled.sums[number][0])
        return token_pairs(sublayer, readout.stream.x[number], cotangent)[:, self.head]


@checked_names
def head_map(
    frozen: PassLike,
    layer: Whole,
    head: Whole,
    *,
    cross: bool = False,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    activation: str = "ratio",
) -> HeadMap:
    """One head of a frozen pass, by itself.

    Args:
        frozen: the pass.
        layer, head: which one; with grouped-query attention the head is a query head.
        cross: a head of an encoder–decoder's cross-attention, ``"L2.cross.H0"``, instead of self-attention.
        layers: consecutive layers that its effect goes through, the head's layer among them; None for all.
        final_norm: whether its effect goes through the norm after the last layer.
        activation: the rule for the MLPs that its effect goes through.

    Raises:
        InvalidInputError: no such layer or head.

    >>> tlens.circuits.head_map(frozen, 0, 0).pattern.shape
    torch.Size([1, 7, 7])
    """
    check_pass(frozen)
    layer, head = chosen_head(frozen.view, layer, head, cross=cross)
    to_tokens = final_norm is not False and frozen.view.unembedding is not None
    stream = Stream.of(frozen, activation, layers=layers, final_norm=final_norm, to_tokens=to_tokens)
    number, sublayer = stream.at(layer, cross=cross)
    read = sublayer.read_of(head)
    output, *after = sublayer.write.stages
    if isinstance(output, Segment):  # its weights are the same at every position
        output = output.inner
    if not isinstance(output, Linear):
        raise UnsupportedModelError(
            f"blocks.{layer} of this {frozen.view.description}: a gate or a norm scales what its heads give, by what "
            "the receiving token is; a head has no map of its own there. Its terms and effects work (by='head')."
        )
    width = output.weight.shape[0] // len(sublayer.nodes)
    linear: list[AffineMap] = [Linear(output.weight[head * width : (head + 1) * width])]
    scale = torch.ones_like(stream.x[0][..., :1])
    unscaled = list(linear)
    for norm in map(_at_all_positions, after):
        linear.append(Norm(norm.scale, norm.gain, None, norm.centre))
        unscaled.append(Norm(torch.ones_like(norm.scale[:1, :1]), norm.gain, None, norm.centre))
        scale = scale * norm.scale.to(scale)
    *before, mix = read.stages
    assert isinstance(mix, AnyAttention)
    vectors = Chain((*before, *unscaled))(stream.x[number])
    alone = Chain((*read.stages, *linear))
    return HeadMap(frozen, layer, head, alone, mix.pattern[:, 0], vectors, scale, stream, activation, cross)


def _at_all_positions(norm: AffineMap) -> Norm:
    """A norm after the sublayer; of one side of an encoder–decoder with scale 1 at the other's positions."""
    if not isinstance(norm, Segment):
        assert isinstance(norm, Norm)
        return norm
    assert isinstance(norm.inner, Norm)
    around = (0, 0, norm.start, norm.length - norm.stop)
    return replace(norm.inner, scale=torch.nn.functional.pad(norm.inner.scale, around, value=1.0))
