"""The live model run from its weights, with every edge under control.

Nothing is frozen here: norms, patterns and activations follow from what they read. The run is batched over circuits
and differentiable, and what a head's queries, keys and values read are apart, for every head. No hook points are
needed, so both of TransformerLens' classes run alike.

Blocks must add what attention and the MLP write to the stream as it is: pre-LN, sequential or parallel. With a norm
between (post-LN, sandwich, OLMo 2) what a head writes by itself is not defined in the live model, and such blocks are
refused by name; so is attention whose scores are not read (see `tensorlens_tl.circuits.scores.reading`), and anything
in a block besides. The run is proved: it must give every block's own output for both prompts.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra import Linear, Norm
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.circuits.compare.pairs import refuse_hooks
from tensorlens_tl.circuits.scores import ScoreReading, score_reading
from tensorlens_tl.circuits.stream import StreamTarget
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import ModelView
from tensorlens_tl.models.parameters import MLPWeights, NormWeights, norm_epsilon, saved_by_name
from tensorlens_tl.passes import PassLike

# ------------------------------------------------------------------ blocks


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
        return _normed(self.norm, _plus(_by_head("hrpd,hde->rhpe", x, self.W), self.b))


@dataclass(frozen=True, eq=False)
class _Block:
    """One block of the live model; its parts read and write vectors `[head, row, batch, pos, d_model]`."""

    heads: int
    parallel: bool
    norm: NormWeights | None
    query: _Projection
    key: _Projection
    value: _Projection
    reading: ScoreReading
    allowed: Bool[Tensor, "query key"]
    W_O: Float[Tensor, "head d_head d_model"]
    b_O: Tensor | None
    mlp_norm: NormWeights | None
    mlp: MLPWeights | None

    @property
    def destinations(self) -> int:
        """How many destinations it has: queries, keys and values of each head, and the MLP."""
        return 3 * self.heads + int(self.mlp is not None)

    def head_outputs(self, q_in: Tensor, k_in: Tensor, v_in: Tensor) -> Float[Tensor, "head row batch pos d_model"]:
        """What each head writes, b_O apart."""
        rows = q_in.shape[1]
        reads = [_normed(self.norm, x.flatten(1, 2)) for x in (q_in, k_in, v_in)]
        q, k, v = (project(x) for project, x in zip((self.query, self.key, self.value), reads, strict=True))
        rotation = self.reading.rotation
        if rotation is not None:
            q, k = (torch.einsum("rhpe,pef->rhpf", vectors, rotation) for vectors in (q, k))
        scores = self.reading.finished(self.reading.scale * (q @ k.mT))
        probabilities = torch.softmax(upcast(scores.masked_fill(~self.allowed, -torch.inf)), dim=-1)
        return _by_head("rhpe,hed->hrpd", probabilities.to(v) @ v, self.W_O).unflatten(1, (rows, -1))

    def mlp_output(self, x: Tensor) -> Tensor:
        """What the MLP writes, b_out apart."""
        mlp = self.mlp
        assert mlp is not None
        x = _normed(self.mlp_norm, x)
        linear = Linear(mlp.W_in, mlp.b_in)(x)
        if mlp.W_gate is None:
            hidden = mlp.activation(linear)
        else:
            if mlp.linear_activation is not None:
                linear = mlp.linear_activation(linear)
            hidden = mlp.activation(Linear(mlp.W_gate, mlp.b_gate)(x)) * linear
        hidden = _plus(hidden, mlp.b_post)
        if mlp.post_factor is not None:
            hidden = hidden * mlp.post_factor(hidden)
        return Linear(mlp.W_out)(hidden)


def _by_head(equation: str, x: Tensor, W: Float[Tensor, "head d e"]) -> Tensor:
    """Every head's vectors times its weights, in the wider dtype of the two, as x."""
    wide = torch.promote_types(x.dtype, W.dtype)
    return torch.einsum(equation, x.to(wide), W.to(wide)).to(x)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    """A vector with a bias, where there is one."""
    if bias is None:
        return x
    return x + bias.to(x)


def _normed(norm: NormWeights | None, x: Float[Tensor, "*any d"]) -> Float[Tensor, "*any d"]:
    """A norm as the live model computes it."""
    if norm is None:
        return x
    return Norm(norm.scale_of(x), norm.gain, norm.shift, norm.centre)(x)


# ------------------------------------------------------------------ what destinations read


@runtime_checkable
class _Inputs(Protocol):
    """What destinations read."""

    def read(
        self, destinations: slice, written: Float[Tensor, "source row batch pos d"], biases: Tensor
    ) -> Float[Tensor, "destination row batch pos d"]:
        """What a range of destinations reads.

        Args:
            destinations: the range.
            written: the outputs of all sources before them.
            biases: the sum of the biases before them.
        """
        ...


class _WholeStream:
    """Every destination reads all that was written before it, as in the model; it is recorded.

    Attributes:
        streams: what each range of destinations read, by the first of them, `[destination, row, batch, pos, d]`.
        written: the outputs of all sources before the last range.
    """

    def __init__(self) -> None:
        self.streams: dict[int, Tensor] = {}
        self.written = torch.empty(0)

    def read(self, destinations: slice, written: Tensor, biases: Tensor) -> Tensor:
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

    clean_edges: Float[Tensor, "row source destination"]
    corrupted: _WholeStream

    def read(self, destinations: slice, written: Tensor, biases: Tensor) -> Tensor:
        difference = written - self.corrupted.written[: len(written)]
        edges = self.clean_edges[:, : len(written), destinations]
        return self.corrupted.streams[destinations.start] + torch.einsum("rst,srbpd->trbpd", edges, difference)


# ------------------------------------------------------------------ runs


@contextmanager
def recordable() -> Generator[None, None, None]:
    """Inside, or in a function that it decorates, autograd can record what is computed, also in ``inference_mode``."""
    with_gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
        yield


class Replay:
    """The live model with every edge apart, beside what it does for the corrupted prompt.

    Args:
        readout: the target of the clean prompt.
        clean, corrupted: the two passes.
        exists: which pairs are edges.

    Raises:
        UnsupportedModelError: a block cannot be run from its weights, or the run does not reproduce the model.
        FrozenModelError: hooks on the model make it differ from the model of the passes.
    """

    def __init__(
        self,
        readout: StreamTarget,
        clean: PassLike,
        corrupted: PassLike,
        exists: Bool[Tensor, "source destination"],
    ) -> None:
        if clean.sides is not None:
            raise _refusal(clean.view, "its blocks are of two stacks")
        refuse_hooks(clean, corrupted)
        self.readout = readout
        self.frozen = clean
        self.corrupted = corrupted
        self.exists = exists
        view = clean.view
        if view.mlm_head is not None or view.class_head is not None or readout.stream.steps[-1].outer.mixes:
            raise _refusal(view, "a prediction head or a classifier's stands after its final norm")
        self.blocks = [_block(clean, corrupted, layer) for layer in range(view.n_layers)]
        self.final = None
        if view.final_norm is not None:
            module = view.model.get_submodule(view.final_norm_name)
            self.final = replace(view.final_norm, epsilon=norm_epsilon(module, view.cfg))
        with torch.no_grad():
            self.clean_run = self._proved_run(clean)
            self.corrupted_run = self._proved_run(corrupted)

    # ------------------------------------------------------------------ questions

    @torch.no_grad()
    def numbers(
        self, clean_edges: Bool[Tensor, "circuit source destination"], memory: Memory
    ) -> Float[Tensor, "circuit batch"]:
        """The target's number with only these edges clean."""
        return self._numbers(len(clean_edges), lambda rows: clean_edges[rows.start : rows.stop], memory)

    def _numbers(
        self, circuits: int, clean_edges: Callable[[range], Bool[Tensor, "row source destination"]], memory: Memory
    ) -> Float[Tensor, "circuit batch"]:
        """The same for edges that are computed for a range of circuits only when those run."""
        x = self.frozen.resid_pre(0)
        widest = max(3 * block.heads for block in self.blocks) + 4 * len(self.exists)
        per_row = 2 * widest * x.numel() * x.element_size() + (1 + x.element_size()) * self.exists.numel()
        numbers = [
            self._run(x.expand(len(rows), *x.shape), _MixedStream(clean_edges(rows).to(x), self.corrupted_run))
            for rows in chunks(circuits, per_row, memory, "circuits")
        ]
        return torch.cat(numbers)

    def patched(self, memory: Memory) -> Float[Tensor, "batch source destination"]:
        """What the target loses with each edge corrupted by itself."""
        edges = self.exists.nonzero()

        def all_but_one(rows: range) -> Bool[Tensor, "row source destination"]:
            source, destination = edges[rows.start : rows.stop].T
            clean_edges = self.exists.repeat(len(rows), 1, 1)
            clean_edges[torch.arange(len(rows), device=clean_edges.device), source, destination] = False
            return clean_edges

        losses = self.readout.total[:, 0] - self._numbers(len(edges), all_but_one, memory)
        scores = losses.new_zeros(losses.shape[1], *self.exists.shape)
        scores[:, self.exists] = losses.T
        return scores

    def products(
        self, cotangents: Float[Tensor, "destination batch pos d"], positions: bool
    ) -> Float[Tensor, "batch source destination *pos"]:
        """The difference of each source's output, dotted with a vector at each destination that reads it.

        The products are summed over positions unless `positions` is set.
        """
        difference = self.clean_run.written - self.corrupted_run.written
        scores = edge_products(difference[:, 0], cotangents, positions)
        exists = self.exists
        if positions:
            exists = exists[..., None]
        return scores * exists

    def gradients(self, shares: Sequence[float]) -> Float[Tensor, "destination batch pos d"]:
        """Gradients of the target by what every destination reads, averaged over these shares of the way."""
        mean = self._gradients(shares[0]) / len(shares)
        for share in shares[1:]:
            mean += self._gradients(share) / len(shares)
        return mean

    def _gradients(self, share: float) -> Float[Tensor, "destination batch pos d"]:
        recorded = _WholeStream()
        with saved_by_name(self.frozen.model), torch.enable_grad():
            x = torch.lerp(self.corrupted.resid_pre(0), self.frozen.resid_pre(0), share).clone().requires_grad_(True)
            number = self._run(x[None], recorded).sum()
            gradients = torch.autograd.grad(number, list(recorded.streams.values()))
        return torch.cat([gradient[:, 0] for gradient in gradients])

    def _run(self, x: Float[Tensor, "row batch pos d"], inputs: _Inputs) -> Float[Tensor, "row batch"]:
        """The target's number of one run from the first block's input."""
        written = x[None]
        biases = torch.zeros_like(x)
        first = 0
        for block in self.blocks:
            heads = slice(first, first + 3 * block.heads)
            first += block.destinations
            before = (written, biases)
            written = torch.cat([written, block.head_outputs(*inputs.read(heads, *before).chunk(3))])
            biases = _plus(biases, block.b_O)
            if block.mlp is None:
                continue
            if not block.parallel:
                before = (written, biases)
            mlp_inputs = inputs.read(slice(heads.stop, first), *before)
            written = torch.cat([written, block.mlp_output(mlp_inputs)])
            biases = _plus(biases, block.mlp.b_out)
        final = inputs.read(slice(first, first + 1), written, biases)[0]
        return self.readout.number(_normed(self.final, final))[..., 0]

    def _proved_run(self, frozen: PassLike) -> _WholeStream:
        """The run of a prompt, which gives the outputs of the model's own blocks."""
        recorded = _WholeStream()
        numbers = self._run(frozen.resid_pre(0)[None], recorded)[0]
        first = 0
        for layer in range(len(self.blocks) + 1):
            error = relative_error(recorded.streams[first][0, 0], frozen.resid_pre(layer))
            if not error <= frozen.tolerance:
                where = f"blocks.{layer - 1}, run from its weights, differs from the model's own by {error:.1e}"
                raise _refusal(frozen.view, where)
            if layer < len(self.blocks):
                first += self.blocks[layer].destinations
        expected = self.readout.number_of(frozen.activation)[:, 0]
        size = float(expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny))
        if not float((numbers - expected).abs().max()) <= frozen.tolerance * max(size, 1.0):
            raise _refusal(frozen.view, "ln_final, run from its weights, differs from the model's own")
        return recorded


def edge_products(
    written: Float[Tensor, "source batch pos d"], cotangents: Float[Tensor, "destination batch pos d"], positions: bool
) -> Float[Tensor, "batch source destination *pos"]:
    """What every source wrote, dotted with a vector at every destination, by position or summed over positions."""
    if positions:
        return torch.einsum("sbpd,tbpd->bstp", upcast(written), upcast(cotangents))
    sources, destinations = (upcast(vectors).transpose(0, 1).flatten(2) for vectors in (written, cotangents))
    return sources @ destinations.mT  # as matrices, which einsum would copy first


# ------------------------------------------------------------------ reading blocks


def _block(clean: PassLike, corrupted: PassLike, layer: int) -> _Block:
    _check_parts(clean, layer)
    block = clean.view.blocks[layer]
    layout = clean.layouts[layer]
    attention = block.attention
    heads = attention.heads
    groups = attention.kv_heads
    patterns = torch.stack([frozen.pattern(layer) for frozen in (clean, corrupted)])
    if float((patterns.sum(-1) - 1).abs().max()) > clean.tolerance:
        raise _refusal(clean.view, f"blocks.{layer}: its attention has sinks, which take a share of every row")
    weights = block.query_key
    d_head = weights.W_Q.shape[1] // heads
    for norm in (weights.q_norm, weights.k_norm):
        if norm is not None and norm.gain is not None and norm.gain.numel() != d_head:
            raise _refusal(clean.view, f"blocks.{layer}: its queries are normed over all heads together")

    def live_norm(name: str | None) -> NormWeights | None:
        """One of the block's norms, by name."""
        if name is None:
            return None
        return replace(block.norms[name], epsilon=norm_epsilon(getattr(block.module, name), clean.view.cfg))

    def head_norm(norm: NormWeights | None) -> NormWeights | None:
        """The norm of queries or of keys."""
        return norm and replace(norm, epsilon=weights.epsilon)

    return _Block(
        heads=heads,
        parallel=layout.parallel,
        norm=live_norm(layout.attn.before),
        query=_Projection.of(weights.W_Q, weights.b_Q, heads, heads, head_norm(weights.q_norm)),
        key=_Projection.of(weights.W_K, weights.b_K, groups, heads, head_norm(weights.k_norm)),
        value=_Projection.of(attention.W_V, attention.b_V, groups, heads),
        reading=score_reading(clean, layer),
        allowed=_allowed(clean, layer, patterns),
        W_O=rearrange(attention.W_O, "(h e) d -> h e d", h=heads),
        b_O=attention.b_O,
        mlp_norm=live_norm(layout.mlp.before) if block.has_mlp else None,
        mlp=block.dense_mlp,
    )


def _check_parts(frozen: PassLike, layer: int) -> None:
    """Refuse a block that does more than attention and an MLP that add what they write to the stream.

    Raises:
        UnsupportedModelError: saying what it does.
    """
    block = frozen.view.blocks[layer]
    layout = frozen.layouts[layer]
    hooked = block.attention.hooked
    _ = block.dense_mlp  # both refuse what is neither
    sublayers = [layout.attn]
    if block.has_mlp:
        sublayers.append(layout.mlp)
    shortformer = getattr(frozen.view.cfg, "positional_embedding_type", None) == "shortformer"
    reasons = {
        f"its {layout.name} layout has norms between what a part writes and the stream": any(
            part.after or part.outer for part in sublayers
        ),
        "its attention has a gate, a norm or a latent inside": not hooked,
        "a mixer stands beside its attention": block.has_beside,
        "whitening stands before it": block.whitening is not None,
        "an input of each token or a factor is added to it": block.per_layer is not None or block.scalar is not None,
        "its position embeddings are added to queries and keys only": shortformer,
    }
    for reason, holds in reasons.items():
        if holds:
            raise _refusal(frozen.view, f"blocks.{layer}: {reason}")


def _allowed(
    frozen: PassLike, layer: int, patterns: Float[Tensor, "prompts batch head query key"]
) -> Bool[Tensor, "query key"]:
    """The keys that a query may attend to, the same for every head and, without padding, for every prompt.

    A probability of zero does not prove a mask: it may have underflowed, and a circuit may attend there again. So the
    mask is the full structure (causal, or all pairs) if some head has a probability above zero in each of its cells.
    Otherwise (a local window, or underflow in every head) the model's scores decide: a mask leaves -inf or the dtype's
    lowest number there.

    Raises:
        UnsupportedModelError: probabilities outside the mask, or scores that do not show it.
    """
    weighted = (patterns > 0).flatten(0, 2).any(0)
    structure = torch.ones_like(weighted)
    if frozen.causal:
        structure = structure.tril()
    if bool((weighted & ~structure).any()):
        raise _refusal(frozen.view, f"blocks.{layer}: it attends to later tokens for the corrupted prompt only")
    if torch.equal(weighted, structure):
        return structure
    pattern = frozen.points.blocks[layer].pattern
    assert pattern is not None
    name = pattern.replace("hook_pattern", "hook_attn_scores")
    activations, _ = capture(frozen.model, frozen.inputs, [name], last=name, optional=[name])
    scores = activations.get(name)
    if scores is not None and scores.shape == patterns.shape[1:]:
        allowed = (scores > torch.finfo(scores.dtype).min / 2).flatten(0, 1).any(0).to(weighted.device)
        if not bool((allowed & ~structure | weighted & ~allowed).any()):
            return allowed
    pairs = int((structure & ~weighted).sum())
    raise _refusal(
        frozen.view,
        f"blocks.{layer}: no head has a probability above zero at {pairs} pairs of a query and a key that it might "
        f"attend to, and {name} does not show whether a mask closes them or they underflowed (a wider dtype may help)",
    )


def _refusal(view: ModelView, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"live edges of this {view.description}: {why}. They need pre-LN blocks, sequential or parallel, with readable "
        "attention scores; edge_scores(method='frozen') and all of patch_scores work without."
    )
