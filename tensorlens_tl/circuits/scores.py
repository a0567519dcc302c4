"""Attribute an attention score, or its change between two runs, to sources.

A head's score is bilinear in the stream at the query and at the key. That stream is a sum of sources and a bias, so the
score is a sum over pairs of sources, plus the products of one side's bias with the other side's sources, plus the
product of the two biases. Sources are the prompt's tokens, each with its effects through the earlier layers; or the
components that wrote the stream: embeddings, heads or whole attention layers, MLPs and their biases.

Between two runs, the change of a score and that of an entry of the pattern are linear in the difference of the stream
that the layer reads, once through the query and once through the keys (for an entry of the pattern, all keys of its
row): the output of heads whose values are one-hot. That difference is itself a sum: over components' outputs, or,
through the secants of the earlier layers, over tokens.

How a layer computes its scores is read from its weights and verified against its pattern. The known ways are candidates
(`tensorlens_tl.passes.attention_scores`); a reading is right if the softmax of its scores is the model's own pattern.
An addition to a whole row of scores does not show there; single scores are compared with the model's own where it
exposes them.

In cross-attention the query's sources are those of the decoder's stream, the key's those of the encoder's output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names, formerly
from tensorlens_tl.algebra import AffineMap, Chain, RowPositions, Segment, stages_of
from tensorlens_tl.algebra.memory import chunks
from tensorlens_tl.algebra.numerics import size_of_sum, upcast
from tensorlens_tl.algebra.positions import BiasTerms, in_total
from tensorlens_tl.algebra.secants import Offset, pull_noting
from tensorlens_tl.circuits.arguments import Whole
from tensorlens_tl.circuits.stream import Stream, dot
from tensorlens_tl.errors import InvalidInputError, PromptNumber, UnsupportedModelError
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import ONCE_ACTIVATION, FrozenRule, Query, known_rule
from tensorlens_tl.passes import (
    Difference,
    FrozenPass,
    PassLike,
    PassOrDifference,
    attention_scores,
    check_explained,
    check_pass,
    one_check,
)
from tensorlens_tl.passes.attention_scores import CrossStreams, ScoreReading
from tensorlens_tl.passes.inputs import occurrence_counts, one_query
from tensorlens_tl.passes.target import chosen_head
from tensorlens_tl.results import ScoreAttribution, ScoreChange

# ------------------------------------------------------------------ which score


@dataclass(frozen=True, eq=False)
class ScorePlace:
    """One head, with one query and one key of each prompt.

    Attributes:
        layer, head: which head.
        cross: whether it belongs to cross-attention.
        query, key: positions, those of a decoder after the encoder's.
        queries, keys: the ranges of the layer's queries and keys: first position, and one past the last.
        occurrences: how often a query and a key given as text occur in each prompt; 1 for a position.
    """

    layer: int
    head: int
    cross: bool
    query: Int[Tensor, "batch"]
    key: Int[Tensor, "batch"]
    queries: tuple[int, int]
    keys: tuple[int, int]
    occurrences: tuple[list[int], list[int]]

    @classmethod
    def of(
        cls, frozen: PassOrDifference, layer: Whole, head: Whole, query: Query, key: Query, *, cross: bool
    ) -> "ScorePlace":
        """Build the place from the arguments of `qk_attribution`.

        Raises:
            InvalidInputError: no such layer, head or position, or a key that the query cannot attend to.
        """
        layer, head = chosen_head(frozen.view, layer, head, cross=cross)
        capture = frozen.maps.capture
        queries = capture.side(layer)
        keys = (0, queries[0]) if cross else queries
        at_query = one_query(frozen.prompt, query, "query")[:, 0]
        at_key = one_query(frozen.prompt, key, "key")[:, 0]
        occurrences = occurrence_counts(frozen.prompt, query), occurrence_counts(frozen.prompt, key)
        place = cls(layer, head, cross, at_query, at_key, queries, keys, occurrences)
        place._check_side("query", query, at_query, queries)
        place._check_side("key", key, at_key, keys)
        if not cross and capture.is_causal_at(layer) and bool((at_key > at_query).any()):
            raise InvalidInputError(
                f"query={query!r}, key={key!r}: the key comes after the query, and this model attends to no later "
                "token."
            )
        return place

    def _check_side(self, name: str, at: Query, positions: Int[Tensor, "batch"], side: tuple[int, int]) -> None:
        start, stop = side
        outside = positions[(positions < start) | (positions >= stop)].tolist()
        if not outside:
            return
        attention = "cross-attention" if self.cross else "self-attention"
        whose = "encoder" if start == 0 else "decoder"
        raise InvalidInputError(
            f"{name}={at!r}: {attention} of layer {self.layer} has its {name} among the {whose}'s tokens, positions "
            f"{start} to {stop - 1}, and this is position {outside[0]}. Pass one of those."
        )

    @property
    def inside(self) -> tuple[Int[Tensor, "batch"], Int[Tensor, "batch"]]:
        """Query and key as positions within their own sides."""
        return self.query - self.queries[0], self.key - self.keys[0]

    def pattern_row(self, frozen: FrozenPass) -> Float[Tensor, "batch key"]:
        """Return the probabilities of the query's keys."""
        pattern = frozen.cross_pattern(self.layer) if self.cross else frozen.pattern(self.layer)
        query, _ = self.inside
        return pattern[torch.arange(len(query), device=query.device), self.head, query]

    def words(self, tokens: Sequence[Sequence[str]]) -> list[str]:
        """Describe head, query and key of each prompt: ``"L1H0, 5 ' the' → 2 ' value'"``.

        Where a text occurs several times, the description says that the last occurrence is meant.
        """
        head = f"L{self.layer}.cross.H{self.head}" if self.cross else f"L{self.layer}H{self.head}"
        pairs = zip(tokens, self.query.tolist(), self.key.tolist(), strict=True)
        texts = [(f"{q} {row[q]!r}", f"{k} {row[k]!r}") for row, q, k in pairs]
        counted = zip(texts, *self.occurrences, strict=True)
        return [f"{head}, {q}{_of_several(many)} → {k}{_of_several(more)}" for (q, k), many, more in counted]


def _of_several(count: int) -> str:
    return f" (the last of {count})" if count > 1 else ""


# ------------------------------------------------------------------ how a head makes a score


def score_reading(frozen: PassLike, layer: int, *, cross: bool = False) -> ScoreReading:
    """Return the reading of one layer's scores that reproduces its pattern, or its cross-attention's.

    In an encoder–decoder its maps cover the positions of one side.

    Raises:
        UnsupportedModelError: no known reading does; the error says how near the best came.
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


def stream_to(
    frozen: PassOrDifference, layers: range, *, cross: bool, rule: FrozenRule = "frozen"
) -> tuple[Stream, int]:
    """Return layers as a stream, and the step at which the heads of the last layer read it."""
    stream = Stream.of(frozen, rule, layers=layers, final_norm=False, to_tokens=False)
    number, _ = stream.at(layers[-1], cross=cross)
    return stream, number


def read_stream(frozen: FrozenPass, layer: int, *, cross: bool) -> Float[Tensor, "batch pos d_model"]:
    """Return the stream that a layer's heads read, with `cross` those of cross-attention."""
    if not cross:
        return frozen.capture.resid_read(layer)
    stream, number = stream_to(frozen, range(layer, layer + 1), cross=True)
    return stream.x[number]


@dataclass(frozen=True, eq=False)
class HeadRead:
    """How one head reads its query, or its key, at one position of each prompt.

    Attributes:
        map: the map from the stream to all heads' queries, or keys, side by side, at all positions.
        number, heads: the head, and the number of heads.
        at: the positions.
        rotation: the rotation at each of them; the identity without rotary positions.
    """

    map: AffineMap
    number: int
    heads: int
    at: Int[Tensor, "batch"]
    rotation: Float[Tensor, "batch d_head d_head"]

    @property
    def channels(self) -> slice:
        """The head's channels."""
        d_head = self.rotation.shape[-1]
        return slice(self.number * d_head, (self.number + 1) * d_head)

    def push(self, x: Float[Tensor, "source batch pos d_model"]) -> Float[Tensor, "source batch d_head"]:
        """Return what parts of the stream contribute to the rotated vector."""
        return self._rotated(self.map.at(RowPositions(self.at[None])).push, x)

    def __call__(self, x: Float[Tensor, "source batch pos d_model"]) -> Float[Tensor, "source batch d_head"]:
        """Return the rotated vector, with biases."""
        return self._rotated(self.map.at(RowPositions(self.at[None])), x)

    def _rotated(self, read: Callable[[Tensor], Tensor], x: Tensor) -> Float[Tensor, "source batch d_head"]:
        vectors = read(torch.take_along_dim(x, self.at[None, :, None, None], dim=2))
        return torch.einsum("sbd,bde->sbe", vectors[:, :, 0, self.channels], self.rotation)


@dataclass(frozen=True, eq=False)
class HeadScore:
    """One score of each prompt of a pass.

    Attributes:
        frozen: the pass.
        place: its head, query and key.
        reading: how the layer makes its scores.
    """

    frozen: FrozenPass
    place: ScorePlace
    reading: ScoreReading

    @classmethod
    def of(cls, frozen: FrozenPass, place: ScorePlace) -> "HeadScore":
        """Build it with the reading that reproduces the layer's pattern; see `score_reading`."""
        return cls(frozen, place, score_reading(frozen, place.layer, cross=place.cross))

    @property
    def reads(self) -> tuple[HeadRead, HeadRead]:
        """How the head reads its query and its key."""
        place, reading = self.place, self.reading
        kv_head = place.head // (reading.heads // reading.kv_heads)
        return self._read(0, place.head, place.query, place.queries), self._read(1, kv_head, place.key, place.keys)

    def _read(self, number: int, head: int, at: Int[Tensor, "batch"], side: tuple[int, int]) -> HeadRead:
        """Return how it reads the query (0) or the key (1), which in an encoder–decoder is on one side."""
        projection = self.reading.projections[number]
        read: AffineMap = (self.reading.query, self.reading.key)[number]
        length = self.frozen.mask.shape[1]
        if side != (0, length):
            read = Segment(read, *side, length, only=True)
        d_head = projection.linear.weight.shape[1] // projection.heads
        rotation = torch.eye(d_head).to(self.frozen.resid_pre(0)).expand(len(at), -1, -1)
        if self.reading.rotation is not None:
            rotation = self.reading.rotation[at - side[0]]
        return HeadRead(read, head, projection.heads, at, rotation)

    @property
    def relative(self) -> Float[Tensor, "batch"] | None:
        """What T5's relative positions add to the score; None for any other model."""
        if self.reading.relative is None:
            return None
        return self.reading.relative[self.place.head][self.place.inside]

    def value(self) -> Float[Tensor, "batch"]:
        """Compute the score before a soft cap and ALiBi from the captured stream, and check it against the model's.

        T5's relative positions are part of it.

        Raises:
            InvalidInputError: a mask hides the key from the query.
            UnsupportedModelError: the model's own score is different.
        """
        x = read_stream(self.frozen, self.place.layer, cross=self.place.cross)[None]
        query, key = (read(x)[0] for read in self.reads)
        score = self.reading.scale * (query * key).sum(-1)
        self._compare(score)
        return score if self.relative is None else score + self.relative.to(score)

    def _compare(self, score: Float[Tensor, "batch"]) -> None:
        """Compare scores, before position terms, with the model's own, where TransformerLens exposes them.

        A pattern verifies a reading only up to additions to a whole row of scores, which cancel in the softmax.
        """
        frozen, place = self.frozen, self.place
        points = frozen.points.blocks[place.layer]
        pattern = points.pattern
        if place.cross and points.cross is not None:
            pattern = points.cross.pattern
        assert pattern is not None  # it has heads
        name = pattern.replace("hook_pattern", "hook_attn_scores")
        if name not in frozen.model.hook_dict:
            return
        shown, _ = capture(frozen.model, frozen.inputs, [name], last=name, optional=[name])
        if name not in shown:
            return
        score = self.reading.capped(score)
        if self.reading.alibi is not None:
            # a run takes the last rows of the table of its longest prompt; a row of a later query adds a constant to
            # all of its keys, which cancels in the softmax
            table: Tensor = frozen.view.blocks[place.layer].module.attn.alibi
            length = frozen.tokens.shape[1]
            score = score + table[place.head, -length:, :length][place.query, place.key].to(score)
        if self.relative is not None:
            score = score + self.relative.to(score)
        query, key = place.inside
        prompts = torch.arange(len(score), device=shown[name].device)
        row = upcast(shown[name][prompts, place.head, query.to(prompts.device)]).to(score)
        probabilities = upcast(place.pattern_row(frozen)).to(row)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        if not float((row.softmax(-1)[:, : probabilities.shape[-1]] - probabilities).abs().max()) <= frozen.tolerance:
            return  # some Bridges expose other numbers there than those they attend by
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
                f": a mask of this {frozen.view.description}, such as that of a local window, hides the key from the "
                "query, so it has no score. Pass a key that this layer attends to.",
            )
        error = float(errors.gather(1, key).max())
        if not error <= frozen.tolerance:
            raise UnsupportedModelError(
                f"{name} of this {frozen.view.description}: queries and keys as read from the weights give another "
                f"score than the model's own (relative error {error:.1e}, allowed {frozen.tolerance:.0e}), though the "
                "same pattern: something is added to a whole row of scores. A hook on queries or keys would explain it."
            )


# ------------------------------------------------------------------ what comes before the layer


def maps_before(frozen: PassOrDifference, place: ScorePlace, rule: FrozenRule = "frozen") -> Chain:
    """Map the first block's input to the stream that a layer's heads read."""
    earlier = [frozen.maps.block_map(number, rule=rule) for number in range(place.layer)]
    stream, until = stream_to(frozen, range(place.layer, place.layer + 1), cross=place.cross, rule=rule)
    return Chain((*earlier, *(step.map for step in stream.steps[:until])))


def components_before(
    frozen: PassOrDifference, place: ScorePlace, by: str, rule: FrozenRule = "frozen"
) -> dict[str, Tensor]:
    """Return each component's part of the stream that a layer's heads read, `[batch, pos, d_model]`.

    In a difference, the change of that part. By ``"head"``, otherwise with attention layers whole.
    """
    stream, until = stream_to(frozen, range(place.layer + 1), cross=place.cross, rule=rule)
    parts = stream.sources()
    for step, hiddens in zip(stream.steps[:until], stream.hidden[:until], strict=True):
        written: list[tuple[str, Tensor]] = []
        for sublayer, hidden in zip(step.sublayers, hiddens, strict=True):
            if by == "head":
                written += zip(sublayer.nodes, sublayer.outputs(hidden), strict=True)
            else:
                written.append((sublayer.name, sublayer.write.push(hidden)))
        written += [(name, bias.expand_as(stream.x[0])) for name, bias, inside in step.biases if inside]
        _add(parts, written)
        parts = {name: step.outer.push(output) for name, output in parts.items()}
        _add(parts, [(name, bias.expand_as(stream.x[0])) for name, bias, inside in step.biases if not inside])
    return parts


def _add(parts: dict[str, Tensor], more: list[tuple[str, Tensor]]) -> None:
    """Sum by name: in a difference, a head writes by its values, its queries and its keys."""
    for name, part in more:
        parts[name] = parts[name] + part if name in parts else part


# ------------------------------------------------------------------ the change between two runs


def score_change(difference: Difference, place: ScorePlace, by: str, of: str) -> ScoreChange:
    """Explain the change of one score or one entry of the pattern in each prompt; `qk_attribution` checks arguments."""
    batch, pos = difference.mask.shape
    start, stop = place.keys
    seed = difference.output.new_zeros(batch, pos, stop - start)
    seed[torch.arange(batch), place.query, place.key - start] = 1
    routes = [Chain((r,)) for r in difference.maps.score_routes(place.layer, place.head, of, cross=place.cross)]
    names = [list(row) for row in difference.str_tokens]
    if by == "token":
        before = maps_before(difference, place)
        routes = [Chain((*before.stages, route)) for route in routes]
    constants: dict[str, Tensor] = {}

    def note(offset: Offset, pulled: Float[Tensor, "batch pos d"]) -> None:
        constants[offset.name] = constants.get(offset.name, 0) + dot(pulled, offset.vectors)

    pulled = [pull_noting(route, seed, note) for route in routes]
    if by == "token":
        sides = [(upcast(g) * difference.resid_pre(0)).sum(-1) for g in pulled]
    else:
        sources = components_before(difference, place, by)
        names = [list(sources)] * batch
        sides = [torch.stack([dot(g, part) for part in sources.values()], dim=-1) for g in pulled]
    constants = {name: value for name, value in constants.items() if bool(value.any())}
    numbers = _numbers(difference, place, of)
    result = ScoreChange(
        names=names,
        query_sources=sides[0],
        key_sources=sides[1],
        constant_names=list(constants),
        constants=torch.stack([*constants.values()], dim=-1) if constants else sides[0][:, :0],
        total=numbers[0] - numbers[1],
        by=by,
        of=of,
        reading_error=difference.maps.pattern_error(place.layer),
        places=place.words(difference.str_tokens),
        provenance=difference.provenance(),
    )
    size = size_of_sum(torch.cat([*sides, result.constants], dim=-1), torch.zeros_like(result.total))
    noise = difference.rounding * (numbers[0].abs() + numbers[1].abs())
    return difference.checked(result, noise / size)


def _numbers(difference: Difference, place: ScorePlace, of: str) -> list[Float[Tensor, "batch"]]:
    """Return the score, or entry of the pattern, in either run, as the model computes it."""
    if of == "pattern":
        _, key = place.inside
        return [upcast(place.pattern_row(run)).gather(1, key[:, None])[:, 0] for run in difference.runs]
    return [upcast(score.value()) for score in [HeadScore.of(run, place) for run in difference.runs]]


# ------------------------------------------------------------------ the public function

if TYPE_CHECKING:
    Senders = Literal["token", "component", "head"]
    Of = Literal["score", "pattern"]
else:
    Senders = Of = Any  # `check_choice` says what is wrong with it

OF: tuple[Of, ...] = ("score", "pattern")

BY: tuple[Senders, ...] = ("token", "component", "head")


@overload
def qk_attribution(
    frozen: Difference, layer: Whole, head: Whole, query: Query = -1, key: Query = 0, *, by: Senders = ...,
    of: Of = ..., cross: bool = ...,
) -> ScoreChange: ...  # fmt: skip


@overload
def qk_attribution(
    frozen: PassLike, layer: Whole, head: Whole, query: Query = -1, key: Query = 0, *, by: Senders = ...,
    rule: FrozenRule = ..., cross: bool = ...,
) -> ScoreAttribution: ...  # fmt: skip


@formerly(ONCE_ACTIVATION)
@checked_names
def qk_attribution(
    frozen: PassOrDifference,
    layer: Whole,
    head: Whole,
    query: Query = -1,
    key: Query = 0,
    *,
    by: Senders = "token",
    of: Of = "score",
    rule: FrozenRule = "frozen",
    cross: bool = False,
) -> ScoreAttribution | ScoreChange:
    """Attribute one attention score, or its change between two runs, to sources through all earlier layers.

    For a pass, the terms are pairs of sources: patterns, activation ratios and norm scales of earlier layers are
    frozen, and so are the scales of the layer's own norms, including those of queries and keys.

    For a difference, the terms are single sources, through the query and through the keys, and nothing is frozen:
    scores change by ``Δs_ik = scale·(Δq_i·k̄_k + q̄_i·Δk_k)`` and an entry of the pattern by
    ``ΔP_ik = L_k·(Δs_k − Σ_j w_j·Δs_j)``, to which all keys of the row contribute (`tensorlens_tl.algebra.secants`).

    Args:
        frozen: the pass, or the difference of two.
        layer, head: which head (with grouped-query attention a query head).
        query, key: one position each; see `tensorlens_tl.passes.inputs.query_positions`. A text stands for its last
            occurrence; the title of the result notes if there are several. Positions of a decoder follow those of the
            encoder.
        by: ``"token"`` (source tokens, through everything before), ``"component"`` (embeddings, each earlier layer's
            attention and MLP, and their biases) or ``"head"`` (attention by head).
        of: for a difference, what changes: ``"score"``, before a soft cap and ALiBi, or ``"pattern"``, the share of
            attention that the key gets.
        rule: for a pass, the rule for the earlier MLPs.
        cross: use a head of an encoder–decoder's cross-attention, ``"L2.cross.H0"``, instead of self-attention: the
            query's sources are those of the decoder's stream, the key's those of the encoder's output, after the
            encoder's final norm if there is one.

    Returns:
        A `ScoreAttribution`; for a difference a `ScoreChange`, whose parts sum to the change of the models' own value.

    Raises:
        InvalidInputError: no such layer, head, position, `by` or `of`; a key after the query; in an encoder–decoder, a
            position on the other side; or, where the model exposes its scores, a key that a mask (such as a local
            window's) hides from the query.
        UnsupportedModelError: the layer's scores cannot be read.

    Source: ours; of a pass, the bilinear form of Elhage et al. (2021).

    >>> pairs = tlens.circuits.qk_attribution(frozen, 1, 0, key=2)
    >>> bool((pairs.gap < 1e-4).all())
    True
    >>> other = tlens.freeze(model, text.replace("red", "blue"))
    >>> moved = tlens.circuits.qk_attribution(tlens.difference(frozen, other), 1, 0, key=2, of="pattern")
    >>> bool((moved.gap < 1e-3).all())
    True
    """
    check_explained(frozen)
    check_choice("by", by, BY)
    check_choice("of", of, OF)
    known_rule(rule)
    place = ScorePlace.of(frozen, layer, head, query, key, cross=cross)
    if isinstance(frozen, Difference):
        with one_check(frozen.view.model):
            frozen.check_fresh()
            return score_change(frozen, place, by, of)
    frozen.view.require_single_streams("attention scores")
    if of != "score":
        raise InvalidInputError(
            f"of={of!r}: the softmax of a single run is not a sum over its sources. Use of='score', or pass the "
            "difference of two runs, tlens.difference(a, b)."
        )
    with one_check(frozen.view.model):
        frozen.check_fresh()
        return _pairs(frozen, place, by, rule)


def _pairs(frozen: FrozenPass, place: ScorePlace, by: str, rule: FrozenRule) -> ScoreAttribution:
    """Attribute a score of one pass to pairs of sources."""
    score = HeadScore.of(frozen, place)
    reading = score.reading
    if by == "token":
        names = [list(row) for row in frozen.str_tokens]
        before = maps_before(frozen, place, rule)
        (q, q_bias), (k, k_bias) = (_by_token(frozen, before, read) for read in score.reads)
    else:
        sources = components_before(frozen, place, by, rule)
        names = [list(sources)] * len(frozen.tokens)
        stacked = torch.stack(list(sources.values()))
        q, k = (read.push(stacked).permute(2, 1, 0) for read in score.reads)
        q_bias, k_bias = (read(torch.zeros_like(stacked[:1]))[0].T for read in score.reads)
    scale = reading.scale
    alibi = None
    if reading.alibi is not None:
        alibi = reading.alibi[place.head][place.query, place.key]
    attribution = ScoreAttribution(
        names=names,
        pairs=scale * torch.einsum("cbi,cbj->bij", q, k),
        query_sources=scale * torch.einsum("cbi,cb->bi", q, k_bias),
        key_sources=scale * torch.einsum("cb,cbj->bj", q_bias, k),
        bias=scale * (q_bias * k_bias).sum(0),
        total=score.value(),
        by=by,
        alibi=alibi,
        relative=score.relative,
        soft_cap=reading.soft_cap,
        rotary=reading.rotation is not None,
        reading_error=reading.error,
        places=place.words(frozen.str_tokens),
        provenance=frozen.provenance(),
    )
    return frozen.checked(attribution)


def _by_token(
    frozen: FrozenPass, before: Chain, read: HeadRead
) -> tuple[Float[Tensor, "channel batch source"], Float[Tensor, "channel batch"]]:
    """Return a head's query, or key, by channel: each token's contribution through everything before, and the bias."""
    x0 = frozen.resid_pre(0)
    whole = Chain((*before.stages, *stages_of(read.map)))
    shares: list[Tensor] = []
    constants: list[Tensor] = []
    for rows in chunks(read.rotation.shape[-1], frozen.row_bytes, None, "score"):
        basis = x0.new_zeros(len(rows), len(read.at), read.heads * read.rotation.shape[-1])
        # row c, pulled back, yields channel c of the rotated vector
        basis[:, :, read.channels] = read.rotation[..., rows.start : rows.stop].permute(2, 0, 1)
        biases = BiasTerms()
        where = RowPositions(read.at[None])
        reached = whole.pull_between(basis, where, None, x0.shape[1], causal=frozen.causal, biases=biases)
        share = x0.new_zeros(len(rows), *x0.shape[:2])
        share[:, :, : reached.shape[2]] = (reached * x0[:, : reached.shape[2]]).sum(-1)
        shares.append(share)
        constants.append(in_total(biases, x0.new_zeros(len(rows), len(read.at))))
    return torch.cat(shares), torch.cat(constants)
