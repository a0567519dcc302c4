"""The live model run from its weights, with every edge under control.

Nothing is frozen here: norms, patterns and activations follow from what they read. The run is batched over circuits,
and what a head's queries, keys and values read are apart, for every head. No hook points are
needed, so both of TransformerLens' classes run alike. The run is proved: it must give every block's own output for both
prompts.

Blocks must add what attention and the MLP write to the stream as it is: pre-LN, sequential or parallel. With a norm
between (post-LN, sandwich, OLMo 2) what a head writes by itself is not defined in the live model, and such blocks are
refused by name; so is attention whose scores are not read (see `tensorlens_tl.circuits.scores`), and anything in a
block besides.

Of an encoder–decoder the stream has the positions of both stacks, and parts read and write at those of their own. Keys
and values of cross-attention read the encoder's stream through the norm at its end, which belongs to what they read.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra import Linear, Norm
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.algebra.positions import widened
from tensorlens_tl.circuits.scores import score_reading
from tensorlens_tl.circuits.stream import StreamTarget
from tensorlens_tl.core import activation
from tensorlens_tl.errors import FrozenModelError, UnsupportedModelError
from tensorlens_tl.hooks import capture, hook_numbers, other_hooks, refuse_attached
from tensorlens_tl.models import ModelView
from tensorlens_tl.models.parameters import (
    AttentionWeights,
    MLPWeights,
    NormWeights,
    QueryKeyWeights,
    norm_epsilon,
)
from tensorlens_tl.passes import PassLike
from tensorlens_tl.passes.attention_scores import ScoreReading

# ------------------------------------------------------------------ the parts of a block


@dataclass(frozen=True, eq=False)
class _Projection:
    """From what each head reads to its queries, keys or values.

    Attributes:
        W, b: of every head.
        norm: the norm after them, or None.
    """

    W: Float[Tensor, "head d_model d_head"]
    b: Float[Tensor, "head 1 d_head"] | None
    norm: NormWeights | None = None

    @classmethod
    def of(cls, W: Tensor, b: Tensor | None, groups: int, heads: int, norm: NormWeights | None = None) -> "_Projection":
        """A projection whose weights have groups of heads side by side, all heads of a group alike."""
        each = heads // groups
        W = rearrange(W, "d (group e) -> group d e", group=groups).repeat_interleave(each, dim=0)
        if b is not None:
            b = rearrange(b, "(group e) -> group 1 e", group=groups).repeat_interleave(each, dim=0)
        return cls(W, b, norm)

    def __call__(self, x: Float[Tensor, "head row pos d_model"]) -> Float[Tensor, "row head pos d_head"]:
        return normed(self.norm, _plus(_by_head("hrpd,hde->rhpe", x, self.W), self.b))


@dataclass(frozen=True, eq=False)
class Span:
    """The positions of one stack among all.

    Attributes:
        start, stop: the first, and the one after the last.
        length: of all positions.
    """

    start: int
    stop: int
    length: int

    def select(self, x: Float[Tensor, "*rows pos d"]) -> Float[Tensor, "*rows some d"]:
        """Vectors at these positions."""
        return x[..., self.start : self.stop, :]

    def among_all(self, x: Float[Tensor, "*rows some d"]) -> Float[Tensor, "*rows pos d"]:
        """Vectors of these positions among all, zero elsewhere."""
        if self.stop - self.start == self.length:
            return x
        return widened(x, self.start, self.length)

    def plus(self, x: Float[Tensor, "*rows pos d"], bias: Float[Tensor, "d"] | None) -> Float[Tensor, "*rows pos d"]:
        """Vectors with a bias at these positions, where there is one."""
        if bias is None:
            return x
        return x + self.among_all(bias.to(x).expand(self.stop - self.start, -1))


@dataclass(frozen=True, eq=False)
class Heads:
    """The heads of one attention.

    Attributes:
        count: how many there are.
        query_norm: the norm that queries are read after, or None.
        norm: the norm that keys and values are read after; it is the same but in cross-attention.
        query, key, value: from what each head reads.
        reading: how scores are computed.
        allowed: the keys that queries may attend to.
        W_O: what each head writes by.
        bias: b_O.
        at: the positions of queries, where heads write.
        attended: the positions of keys and values.
    """

    count: int
    query_norm: NormWeights | None
    norm: NormWeights | None
    query: _Projection
    key: _Projection
    value: _Projection
    reading: ScoreReading
    allowed: Bool[Tensor, "query key"]
    W_O: Float[Tensor, "head d_head d_model"]
    bias: Tensor | None
    at: Span
    attended: Span

    @property
    def destinations(self) -> int:
        """How many there are: queries, keys and values of each head."""
        return 3 * self.count

    def outputs(
        self, reads: Float[Tensor, "destination row batch pos d_model"]
    ) -> Float[Tensor, "head row batch pos d_model"]:
        """What each head writes, b_O apart."""
        rows = reads.shape[1]
        q_in, k_in, v_in = reads.chunk(3)
        q = self.query(normed(self.query_norm, self.at.select(q_in).flatten(1, 2)))
        k = self.key(normed(self.norm, self.attended.select(k_in).flatten(1, 2)))
        v = self.value(normed(self.norm, self.attended.select(v_in).flatten(1, 2)))
        rotation = self.reading.rotation
        if rotation is not None:
            q, k = (torch.einsum("rhpe,pef->rhpf", vectors, rotation) for vectors in (q, k))
        scores = self.reading.finished(self.reading.scale * (q @ k.mT))
        probabilities = torch.softmax(upcast(scores.masked_fill(~self.allowed, -torch.inf)), dim=-1)
        written = _by_head("rhpe,hed->hrpd", probabilities.to(v) @ v, self.W_O)
        return self.at.among_all(written).unflatten(1, (rows, -1))


@dataclass(frozen=True, eq=False)
class Neurons:
    """The MLP of a block.

    Attributes:
        norm: the norm before it, or None.
        weights: what it computes.
        at: the positions that it acts on.
    """

    norm: NormWeights | None
    weights: MLPWeights
    at: Span
    destinations: ClassVar = 1

    @property
    def bias(self) -> Tensor | None:
        """b_out."""
        return self.weights.b_out

    def outputs(
        self, reads: Float[Tensor, "destination row batch pos d_model"]
    ) -> Float[Tensor, "source row batch pos d_model"]:
        """What it writes, b_out apart."""
        weights = self.weights
        x = normed(self.norm, self.at.select(reads))
        linear = Linear(weights.W_in, weights.b_in)(x)
        if weights.W_gate is None:
            hidden = activation(linear, weights.activation)
        else:
            if weights.linear_activation is not None:
                linear = activation(linear, weights.linear_activation)
            hidden = activation(Linear(weights.W_gate, weights.b_gate)(x), weights.activation) * linear
        hidden = _plus(hidden, weights.b_post)
        if weights.post_factor is not None:
            hidden = hidden * weights.post_factor(hidden)
        return self.at.among_all(Linear(weights.W_out)(hidden))


Part = Heads | Neurons


def _by_head(equation: str, x: Tensor, W: Float[Tensor, "head d e"]) -> Tensor:
    """Every head's vectors times its weights, in the wider dtype of the two, as x."""
    wide = torch.promote_types(x.dtype, W.dtype)
    return torch.einsum(equation, x.to(wide), W.to(wide)).to(x)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    """A vector with a bias, where there is one."""
    if bias is None:
        return x
    return x + bias.to(x)


def normed(norm: NormWeights | None, x: Float[Tensor, "*any d"]) -> Float[Tensor, "*any d"]:
    """A norm as the live model computes it."""
    if norm is None:
        return x
    return Norm(norm.scale_of(x), norm.gain, norm.shift, norm.centre)(x)


# ------------------------------------------------------------------ reading blocks


def live_norm(view: ModelView, norm: NormWeights | None, name: str) -> NormWeights | None:
    """A norm after the last block of a stack, as the live model computes it."""
    if norm is None:
        return None
    return replace(norm, epsilon=norm_epsilon(view.model.get_submodule(name), view.cfg))


def live_parts(clean: PassLike, corrupted: PassLike, layer: int) -> Iterator[Part]:
    """Attention, cross-attention and the MLP of a block, those of them that it has, in the order in which they write.

    They are read from its weights; a block that is more than these is refused.
    """
    _check_parts(clean, layer)
    view = clean.view
    block = view.blocks[layer]
    layout = clean.layouts[layer]
    points = clean.points.blocks[layer]
    passes = (clean, corrupted)
    length = clean.tokens.shape[1]
    at = Span(*clean.capture.side(layer), length)

    def norm(name: str | None) -> NormWeights | None:
        """One of the block's norms, by name."""
        if name is None:
            return None
        return replace(block.norms[name], epsilon=norm_epsilon(getattr(block.module, name), view.cfg))

    def heads(
        attention: AttentionWeights,
        weights: QueryKeyWeights,
        reading: ScoreReading,
        allowed: Bool[Tensor, "query key"],
        norms: tuple[NormWeights | None, NormWeights | None],
        attended: Span,
    ) -> Heads:
        """The heads of one attention; norms are those before queries, and before keys and values."""
        count, groups = attention.heads, attention.kv_heads
        for each in (weights.q_norm, weights.k_norm):
            if each is not None and each.gain is not None and each.gain.numel() != weights.W_Q.shape[1] // count:
                raise refusal(view, f"{block.name}: its queries are normed over all heads together")
        q_norm, k_norm = (each and replace(each, epsilon=weights.epsilon) for each in (weights.q_norm, weights.k_norm))
        return Heads(
            count=count,
            query_norm=norms[0],
            norm=norms[1],
            query=_Projection.of(weights.W_Q, weights.b_Q, count, count, q_norm),
            key=_Projection.of(weights.W_K, weights.b_K, groups, count, k_norm),
            value=_Projection.of(attention.W_V, attention.b_V, groups, count),
            reading=reading,
            allowed=allowed,
            W_O=rearrange(attention.W_O, "(h e) d -> h e d", h=count),
            bias=attention.b_O,
            at=at,
            attended=attended,
        )

    assert points.pattern is not None  # it has heads
    before = norm(layout.attn.before)
    reading = score_reading(clean, layer)
    patterns = [frozen.pattern(layer) for frozen in passes]
    allowed = _allowed(clean, block.name, points.pattern, patterns, clean.capture.is_causal_at(layer))
    yield heads(block.attention, block.query_key, reading, allowed, (before, before), at)
    if layout.cross is not None and points.cross is not None:
        norms = (norm(layout.cross.before), live_norm(view, view.encoder_norm, view.encoder_norm_name))
        reading = score_reading(clean, layer, cross=True)
        patterns = [frozen.cross_pattern(layer) for frozen in passes]
        allowed = _allowed(clean, block.name, points.cross.pattern, patterns, False)
        attended = Span(0, at.start, length)
        yield heads(block.require_cross_attention(), block.cross_query_key, reading, allowed, norms, attended)
    dense = block.dense_mlp if block.has_mlp else None
    if dense is not None:
        yield Neurons(norm(layout.mlp.before), dense, at)


def _check_parts(frozen: PassLike, layer: int) -> None:
    """Refuse a block that does more than attention and an MLP that add what they write to the stream, saying what."""
    block = frozen.view.blocks[layer]
    layout = frozen.layouts[layer]
    hooked = block.attention.hooked
    _ = block.dense_mlp  # both refuse what is neither
    sublayers = [layout.attn]
    if block.has_mlp:
        sublayers.append(layout.mlp)
    if layout.cross is not None:
        sublayers.append(layout.cross)
    shortformer = getattr(frozen.view.cfg, "positional_embedding_type", None) == "shortformer"
    reasons = {
        f"its {layout.name} layout has norms between what a part writes and the stream": any(
            part.after or part.outer for part in sublayers
        ),
        "its attention has a gate, a norm or a latent inside": not hooked,
        "its self- and cross-attention share one softmax": block.parts.is_merged,
        "a mixer stands beside its attention": block.has_beside,
        "whitening stands before it": block.whitening is not None,
        "an input of each token or a factor is added to it": block.per_layer is not None or block.scalar is not None,
        "its position embeddings are added to queries and keys only": shortformer,
    }
    for reason, holds in reasons.items():
        if holds:
            raise refusal(frozen.view, f"{block.name}: {reason}")


def _allowed(
    frozen: PassLike,
    name: str,
    point: str,
    of_prompts: Sequence[Float[Tensor, "batch head query key"]],
    is_causal: bool,
) -> Bool[Tensor, "query key"]:
    """The keys that a query may attend to, the same for every head and, without padding, for every prompt.

    A probability of zero does not prove a mask: it may have underflowed, and a circuit may attend there again. So the
    mask is the full structure (causal, or all pairs) if some head has a probability above zero in each of its cells.
    Otherwise (a local window, or underflow in every head) the model's scores decide: a mask leaves -inf or the dtype's
    lowest number there.

    Args:
        frozen: the pass of the clean prompts.
        name: of the block.
        point: the hook point of the pattern.
        of_prompts: the patterns of the clean and of the corrupted prompts.
        is_causal: whether queries attend to no later token.
    """
    patterns = torch.stack([*of_prompts])
    if float((patterns.sum(-1) - 1).abs().max()) > frozen.tolerance:
        raise refusal(frozen.view, f"{name}: its attention has sinks, which take a share of every row")
    weighted = (patterns > 0).flatten(0, 2).any(0)
    structure = torch.ones_like(weighted)
    if is_causal:
        structure = structure.tril()
    if bool((weighted & ~structure).any()):
        raise refusal(frozen.view, f"{name}: it attends to later tokens for the corrupted prompt only")
    if torch.equal(weighted, structure):
        return structure
    shown_at = point.replace("hook_pattern", "hook_attn_scores")
    activations, _ = capture(frozen.model, frozen.inputs, [shown_at], last=shown_at, optional=[shown_at])
    scores = activations.get(shown_at)
    if scores is not None and scores.shape == patterns.shape[1:]:
        allowed = (scores > torch.finfo(scores.dtype).min / 2).flatten(0, 1).any(0).to(weighted.device)
        if not bool((allowed & ~structure | weighted & ~allowed).any()):
            return allowed
    pairs = int((structure & ~weighted).sum())
    raise refusal(
        frozen.view,
        f"{name}: no head has a probability above zero at {pairs} pairs of a query and a key that it might "
        f"attend to, and {shown_at} does not show whether a mask closes them or they underflowed (a wider dtype may "
        "help)",
    )


def refusal(view: ModelView, why: str) -> UnsupportedModelError:
    """What is raised where a live run from the weights is not defined, or not read."""
    return UnsupportedModelError(
        f"live edges of this {view.description}: {why}. They need pre-LN blocks, sequential or parallel, with readable "
        "attention scores; edge_scores with method='frozen' or 'difference' (where a model has one), and patch_scores "
        "work without."
    )


# ------------------------------------------------------------------ what destinations read


class _WholeStream:
    """Every destination reads all that was written before it, as in the model; it is recorded.

    Attributes:
        streams: what each range of destinations read, by the first of them, `[destination, row, batch, pos, d]`.
        written: the outputs of all sources before the last range.
    """

    def __init__(self) -> None:
        self.streams: dict[int, Tensor] = {}
        self.written = torch.empty(0)

    def read(
        self, destinations: slice, written: Float[Tensor, "source row batch pos d"], biases: Tensor
    ) -> Float[Tensor, "destination row batch pos d"]:
        """What a range of destinations reads of the outputs of all sources before them, and the sum of biases there."""
        stream = written.sum(0) + biases
        self.written = written
        self.streams[destinations.start] = stream.expand(destinations.stop - destinations.start, *stream.shape)
        return self.streams[destinations.start]


@dataclass(frozen=True, eq=False)
class _MixedStream:
    """Destinations read the corrupted stream plus the differences along the clean edges.

    Attributes:
        clean_edges: 1 for a clean edge, 0 for a corrupted one.
        corrupted: the run of the corrupted prompt.
    """

    clean_edges: Float[Tensor, "row #batch source destination"]
    corrupted: _WholeStream

    def read(self, destinations: slice, written: Tensor, biases: Tensor) -> Tensor:
        """See `_WholeStream.read`."""
        difference = written - self.corrupted.written[: len(written)]
        edges = self.clean_edges[:, :, : len(written), destinations]
        return self.corrupted.streams[destinations.start] + torch.einsum("rbst,srbpd->trbpd", edges, difference)


# ------------------------------------------------------------------ runs


class Replay:
    """The live model with every edge apart, beside what it does for the corrupted prompt.

    Refused where a block cannot be run from its weights, the run does not reproduce the model, or hooks on the model
    make it differ from the model of the passes. `exists` says which pairs are edges.
    """

    def __init__(
        self,
        readout: StreamTarget,
        clean: PassLike,
        corrupted: PassLike,
        exists: Bool[Tensor, "source destination"],
    ) -> None:
        refuse_hooks(clean, corrupted)
        self.readout = readout
        self.frozen = clean
        self.corrupted = corrupted
        self.exists = exists
        view = clean.view
        if view.mlm_head is not None or view.class_head is not None or readout.stream.steps[-1].outer.mixes:
            raise refusal(view, "a prediction head or a classifier's stands after its final norm")
        self.blocks = [tuple(live_parts(clean, corrupted, layer)) for layer in range(view.n_layers)]
        self.final = live_norm(view, view.final_norm, view.final_norm_name)
        self.encoder_final = live_norm(view, view.encoder_norm, view.encoder_norm_name)
        with torch.no_grad():
            self.clean_run = self._proved_run(clean)
            self.corrupted_run = self._proved_run(corrupted)

    # ------------------------------------------------------------------ questions

    @torch.no_grad()
    def numbers(
        self, clean_edges: Bool[Tensor, "circuit source destination"], memory: Memory
    ) -> Float[Tensor, "circuit batch"]:
        """The target's number with only these edges clean."""
        return self._numbers(len(clean_edges), lambda rows: clean_edges[rows.start : rows.stop, None], memory)

    def _numbers(
        self,
        circuits: int,
        clean_edges: Callable[[range], Bool[Tensor, "row #batch source destination"]],
        memory: Memory,
    ) -> Float[Tensor, "circuit batch"]:
        """The same for edges, of all prompts or of each, that are computed for a range of circuits when those run."""
        x = self.frozen.resid_pre(0)
        widest = max(part.destinations for parts in self.blocks for part in parts) + 4 * len(self.exists)
        per_row = 2 * widest * x.numel() * x.element_size() + (1 + x.element_size()) * self.exists.numel()
        numbers = [
            self._run(x.expand(len(rows), *x.shape), _MixedStream(clean_edges(rows).to(x), self.corrupted_run))
            for rows in chunks(circuits, per_row, memory, "circuits")
        ]
        return torch.cat(numbers)

    def patched(self, memory: Memory) -> Float[Tensor, "batch source destination"]:
        """What the target loses with each edge corrupted by itself."""
        edges = self.exists.nonzero()

        def all_but_one(rows: range) -> Bool[Tensor, "row 1 source destination"]:
            source, destination = edges[rows.start : rows.stop].T
            clean_edges = self.exists.repeat(len(rows), 1, 1, 1)
            clean_edges[torch.arange(len(rows), device=clean_edges.device), 0, source, destination] = False
            return clean_edges

        losses = self.readout.total[:, 0] - self._numbers(len(edges), all_but_one, memory)
        scores = losses.new_zeros(losses.shape[1], *self.exists.shape)
        scores[:, self.exists] = losses.T
        return scores

    @torch.no_grad()
    def losses(
        self, corrupted: Bool[Tensor, "run batch source destination"], memory: Memory
    ) -> Float[Tensor, "run batch"]:
        """What the target loses in each run with some edges of each prompt corrupted together."""

        def others(rows: range) -> Bool[Tensor, "row batch source destination"]:
            return self.exists & ~corrupted[rows.start : rows.stop]

        return self.readout.total[:, 0] - self._numbers(len(corrupted), others, memory)

    def _run(
        self, x: Float[Tensor, "row batch pos d"], inputs: _WholeStream | _MixedStream
    ) -> Float[Tensor, "row batch"]:
        """The target's number of one run from the first block's input."""
        written = x[None]
        biases = torch.zeros_like(x)
        first = 0
        for parts, layout in zip(self.blocks, self.frozen.layouts, strict=True):
            before = (written, biases)
            for part in parts:
                if not layout.parallel:  # each reads what the ones before it wrote
                    before = (written, biases)
                places = slice(first, first + part.destinations)
                first = places.stop
                written = torch.cat([written, part.outputs(inputs.read(places, *before))])
                biases = part.at.plus(biases, part.bias)
        final = inputs.read(slice(first, first + 1), written, biases)[0]
        return self.readout.number(self._after_encoder(final, self.final))[..., 0]

    def _after_encoder(self, x: Float[Tensor, "*rows pos d"], last: NormWeights | None) -> Float[Tensor, "*rows pos d"]:
        """A stream with the output of its encoder, if it has one, and the rest after a norm, if one is given."""
        length = self.frozen.prompt.encoder_length
        rest = normed(last, x[..., length:, :])
        if not length:
            return rest
        return torch.cat([normed(self.encoder_final, x[..., :length, :]), rest], dim=-2)

    def _proved_run(self, frozen: PassLike) -> _WholeStream:
        """The run of a prompt, which gives the outputs of the model's own blocks."""
        recorded = _WholeStream()
        numbers = self._run(frozen.resid_pre(0)[None], recorded)[0]
        first = 0
        for layer in range(len(self.blocks) + 1):
            stream = recorded.streams[first][0, 0]
            if layer >= frozen.view.encoder_layers:
                stream = self._after_encoder(stream, None)
            error = relative_error(stream, frozen.resid_pre(layer))
            if not error <= frozen.tolerance:
                name = frozen.view.blocks[layer - 1].name
                raise refusal(frozen.view, f"{name}, run from its weights, differs from the model's own by {error:.1e}")
            if layer < len(self.blocks):
                first += sum(part.destinations for part in self.blocks[layer])
        expected = self.readout.number_of(frozen.activation)[:, 0]
        size = float(expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny))
        if not float((numbers - expected).abs().max()) <= frozen.tolerance * max(size, 1.0):
            raise refusal(frozen.view, "ln_final, run from its weights, differs from the model's own")
        return recorded


def refuse_hooks(clean: PassLike, corrupted: PassLike) -> None:
    """Refuse what runs the live model from its weights, past any hook, where hooks make it another model.

    Raises:
        FrozenModelError: a frozen pass is attached, or hooks were put on the model or taken off since a pass.
    """
    refuse_attached(clean.model)
    now = other_hooks(clean.model)
    numbers = hook_numbers(clean.model)
    for name, frozen in (("clean", clean), ("corrupted", corrupted)):
        if frozen.capture.hook_numbers != numbers:
            raise FrozenModelError(
                f"hooks were put on the model or taken off since the {name} prompts were frozen (at "
                f"{', '.join(sorted({*now} ^ {*frozen.other_hooks})) or 'the same points'}), so that the live model "
                "is another one than theirs. Take them off, or freeze both again."
            )


def edge_products(
    written: Float[Tensor, "source batch pos d"], cotangents: Float[Tensor, "destination batch pos d"], positions: bool
) -> Float[Tensor, "batch source destination *pos"]:
    """What every source wrote, dotted with a vector at every destination, by position or summed over positions."""
    if positions:
        return torch.einsum("sbpd,tbpd->bstp", upcast(written), upcast(cotangents))
    sources, destinations = (upcast(vectors).transpose(0, 1).flatten(2) for vectors in (written, cotangents))
    return sources @ destinations.mT  # as matrices, which einsum would copy first
