"""How a layer makes its attention scores, read from its weights and proved against the pattern that it gave.

The known ways are candidates (`tensorlens_tl.passes.attention_scores.reading`); a reading is right when the softmax of
its scores is the pattern of the model itself. What is added to a whole row of scores does not show there; single scores
are compared with those that the model shows, where it does.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, RowPositions, Segment
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.scores.place import ScorePlace
from tensorlens_tl.circuits.stream import Stream
from tensorlens_tl.errors import InvalidInputError, PromptNumber, UnsupportedModelError
from tensorlens_tl.hooks import capture
from tensorlens_tl.passes import FrozenPass, PassLike, PassOrDifference, attention_scores, check_pass
from tensorlens_tl.passes.attention_scores import CrossStreams, ScoreReading

__all__ = ["HeadRead", "ScoreReading", "head_reads", "relative_of", "score_of", "score_reading", "stream_to"]


def score_reading(frozen: PassLike, layer: int, *, cross: bool = False) -> ScoreReading:
    """The reading of one layer's scores that reproduces its pattern; with `cross`, of its cross-attention's.

    Of an encoder–decoder its maps are of the positions of one side.

    Raises:
        UnsupportedModelError: no known reading does; says how near the best came.
    """
    check_pass(frozen)
    if not cross:
        return attention_scores.score_reading(frozen.maps, layer)
    x = read_stream(frozen, layer, cross=True)
    start, stop = frozen.capture.side(layer)
    streams = CrossStreams(x[:, start:stop], x[:, :start])
    place = frozen.layouts[layer].cross
    assert place is not None
    queries, keys = attention_scores.score_projections(frozen.maps, layer, place.before, crossing=True)
    vectors = queries.held(streams.queries)(streams.queries), keys.held(streams.keys)(streams.keys)
    return attention_scores.score_reading(frozen.maps, layer, vectors, streams)


def stream_to(frozen: PassOrDifference, layers: range, *, cross: bool, activation: str = "ratio") -> tuple[Stream, int]:
    """Some layers as steps, and the number of the step at which the heads of the last of them read the stream."""
    stream = Stream.of(frozen, activation, layers=layers, final_norm=False, to_tokens=False)
    number, _ = stream.at(layers[-1], cross=cross)
    return stream, number


def read_stream(frozen: FrozenPass, layer: int, *, cross: bool) -> Float[Tensor, "batch pos d_model"]:
    """The stream that the heads of a layer read, with `cross` those of cross-attention."""
    if not cross:
        return frozen.capture.resid_read(layer)
    stream, number = stream_to(frozen, range(layer, layer + 1), cross=True)
    return stream.x[number]


@dataclass(frozen=True, eq=False)
class HeadRead:
    """How one head reads its query, or its key, at one position of each prompt.

    Attributes:
        map: from the stream to the queries, or keys, of all heads side by side, at all positions.
        number, heads: which of so many heads.
        at: the positions.
        rotation: of each of them; the identity without rotary positions.
    """

    map: AffineMap
    number: int
    heads: int
    at: Int[Tensor, "batch"]
    rotation: Float[Tensor, "batch d_head d_head"]

    @property
    def channels(self) -> slice:
        """Those of the head."""
        d_head = self.rotation.shape[-1]
        return slice(self.number * d_head, (self.number + 1) * d_head)

    @property
    def width(self) -> int:
        """How many channels all heads have."""
        return self.heads * self.rotation.shape[-1]

    def push(self, x: Float[Tensor, "source batch pos d_model"]) -> Float[Tensor, "source batch d_head"]:
        """What parts of the stream give the rotated vector."""
        return self._of_head(self._here.push(self._picked(x)))

    def __call__(self, x: Float[Tensor, "source batch pos d_model"]) -> Float[Tensor, "source batch d_head"]:
        """The rotated vector, biases included."""
        return self._of_head(self._here(self._picked(x)))

    @property
    def _here(self) -> AffineMap:
        return self.map.at(RowPositions(self.at[None]))

    def _picked(self, x: Float[Tensor, "source batch pos d_model"]) -> Float[Tensor, "source batch 1 d_model"]:
        return torch.take_along_dim(x, self.at[None, :, None, None], dim=2)

    def _of_head(self, vectors: Float[Tensor, "source batch 1 width"]) -> Float[Tensor, "source batch d_head"]:
        return torch.einsum("sbd,bde->sbe", vectors[:, :, 0, self.channels], self.rotation)


def head_reads(frozen: FrozenPass, reading: ScoreReading, place: ScorePlace) -> tuple[HeadRead, HeadRead]:
    """How the head reads its query and its key."""
    kv_head = place.head // (reading.heads // reading.kv_heads)
    query = _head_read(frozen, reading, 0, place.head, place.query, place.queries)
    return query, _head_read(frozen, reading, 1, kv_head, place.key, place.keys)


def _head_read(
    frozen: FrozenPass,
    reading: ScoreReading,
    number: int,
    head: int,
    at: Int[Tensor, "batch"],
    side: tuple[int, int],
) -> HeadRead:
    """How it reads the query (0) or the key (1), which of an encoder–decoder is on one side."""
    projection = reading.projections[number]
    read: AffineMap = (reading.query, reading.key)[number]
    length = frozen.mask.shape[1]
    if side != (0, length):
        read = Segment(read, *side, length, only=True)
    d_head = projection.linear.weight.shape[1] // projection.heads
    rotation = torch.eye(d_head).to(frozen.resid_pre(0)).expand(len(at), -1, -1)
    if reading.rotation is not None:
        rotation = reading.rotation[at - side[0]]
    return HeadRead(read, head, projection.heads, at, rotation)


def relative_of(reading: ScoreReading, place: ScorePlace) -> Float[Tensor, "batch"] | None:
    """What T5's relative positions add to the score; None of any other model."""
    if reading.relative is None:
        return None
    return reading.relative[place.head][place.inside]


def score_of(frozen: FrozenPass, reading: ScoreReading, place: ScorePlace) -> Float[Tensor, "batch"]:
    """One score of each prompt, before a soft cap and ALiBi, from the captured stream, compared with the model's own.

    T5's relative positions are part of it.

    Raises:
        InvalidInputError: the model shows that a mask closes the key to the query.
        UnsupportedModelError: the model shows another score.
    """
    x = read_stream(frozen, place.layer, cross=place.cross)[None]
    query, key = (read(x)[0] for read in head_reads(frozen, reading, place))
    score = reading.scale * (query * key).sum(-1)
    _check(frozen, reading, place, score)
    relative = relative_of(reading, place)
    return score if relative is None else score + relative.to(score)


def _check(frozen: FrozenPass, reading: ScoreReading, place: ScorePlace, score: Float[Tensor, "batch"]) -> None:
    """Compare scores, before what is added for positions, with the model's own, where TransformerLens shows them.

    A pattern proves a reading up to what is added to a whole row of scores, which softmax does not see.

    Raises:
        InvalidInputError: a mask closes the key to the query.
        UnsupportedModelError: they differ.
    """
    name = _pattern_point(frozen, place).replace("hook_pattern", "hook_attn_scores")
    if name not in frozen.model.hook_dict:
        return
    shown, _ = capture(frozen.model, frozen.inputs, [name], last=name, optional=[name])
    if name not in shown:
        return
    if reading.soft_cap is not None:
        score = reading.soft_cap * torch.tanh(score / reading.soft_cap)
    if reading.alibi is not None:
        score = score + _alibi_of_a_run(frozen, place).to(score)
    relative = relative_of(reading, place)
    if relative is not None:
        score = score + relative.to(score)
    query, key = place.inside
    prompts = torch.arange(len(score), device=shown[name].device)
    row = upcast(shown[name][prompts, place.head, query.to(prompts.device)]).to(score)
    probabilities = upcast(place.pattern_row(frozen)).to(row)
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if not float((row.softmax(-1)[:, : probabilities.shape[-1]] - probabilities).abs().max()) <= frozen.tolerance:
        return  # some Bridges show other numbers there than those they attend by
    allowed = row > torch.finfo(row.dtype).min / 2  # a mask leaves -inf or the dtype's lowest number
    size = row.abs().masked_fill(~allowed, 0).amax(-1).clamp_min(torch.finfo(row.dtype).tiny)
    errors = (score[:, None] - row).abs().masked_fill(~allowed, 0) / size[:, None]
    key = key.to(row.device)[:, None]
    masked = ~allowed.gather(1, key)
    if bool(masked.any()):
        number = int(masked.nonzero()[0, 0])
        raise InvalidInputError(
            f"{place.words(frozen.str_tokens)[number]}, ",
            PromptNumber(number),
            f": a mask of this {frozen.view.description} closes the key to the query, such as that of a local window, "
            "so that it has no score. Pass a key that this layer attends to.",
        )
    error = float(errors.gather(1, key).max())
    if not error <= frozen.tolerance:
        raise UnsupportedModelError(
            f"{name} of this {frozen.view.description}: queries and keys as read from the weights give another score "
            f"than the model's own (relative error {error:.1e}, allowed {frozen.tolerance:.0e}), though the same "
            "pattern: something is added to a whole row of scores. A hook on queries or keys would explain it."
        )


def _pattern_point(frozen: FrozenPass, place: ScorePlace) -> str:
    points = frozen.points.blocks[place.layer]
    name = points.pattern
    if place.cross and points.cross is not None:
        name = points.cross.pattern
    assert name is not None  # it has heads
    return name


def _alibi_of_a_run(frozen: FrozenPass, place: ScorePlace) -> Float[Tensor, "batch"]:
    """What ALiBi adds to a score when the model runs: it keeps the table of its longest prompt and takes the last rows.

    A row of a later query adds the same to each of its keys besides, which softmax does not see.
    """
    table: Tensor = frozen.view.blocks[place.layer].module.attn.alibi
    length = frozen.tokens.shape[1]
    return table[place.head, -length:, :length][place.query, place.key]
