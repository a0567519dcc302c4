"""The live model run from its weights, with every edge under control.

Nothing is frozen here: norms, patterns and activations follow from what they read. The run is batched over circuits
and differentiable, and what a head's queries, keys and values read are apart, for every head. No hook points are
needed, so both of TransformerLens' classes run alike.

Blocks must add what attention and the MLP write to the stream as it is: pre-LN, sequential or parallel. With a norm
between (post-LN, sandwich, OLMo 2) what a head writes by itself is not defined in the live model, and such blocks are
refused by name; so is attention whose scores are not read (see `tensorlens_tl.circuits.scores.reading`), and anything
in a block besides. The run is proved: it must give every block's own output for both prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra import Linear
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.circuits.compare.pairs import refuse_hooks
from tensorlens_tl.circuits.scores import ScoreReading, score_reading
from tensorlens_tl.circuits.stream import StreamTarget
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import capture
from tensorlens_tl.models.parameters import MLPWeights, NormWeights, QueryKeyWeights, norm_epsilon
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.frozen import PassLike

InputRule = Callable[
    [slice, Float[Tensor, "source row batch pos d"], Tensor], Float[Tensor, "destination row batch pos d"]
]
"""What a range of destinations reads, given the outputs of all sources so far and the sum of the biases so far."""


@dataclass(frozen=True, eq=False)
class _Block:
    """One block of the live model; its parts read and write vectors `[head, row, batch, pos, d_model]`."""

    heads: int
    parallel: bool
    norm: NormWeights | None
    weights: QueryKeyWeights
    reading: ScoreReading
    allowed: Bool[Tensor, "query key"]
    W_V: Float[Tensor, "head d_model d_head"]
    b_V: Float[Tensor, "head d_head"] | None
    W_O: Float[Tensor, "head d_head d_model"]
    b_O: Tensor | None
    mlp_norm: NormWeights | None
    mlp: MLPWeights | None

    @property
    def destinations(self) -> int:
        """How many destinations it has: queries, keys and values of each head, and the MLP."""
        return 3 * self.heads + (0 if self.mlp is None else 1)

    def head_outputs(self, q_in: Tensor, k_in: Tensor, v_in: Tensor) -> Tensor:
        """What each head writes, b_O apart."""
        reading = self.reading
        weights = self.weights
        q = self._queries_or_keys(q_in, weights.W_Q, weights.b_Q, reading.heads, weights.q_norm)
        k = self._queries_or_keys(k_in, weights.W_K, weights.b_K, reading.kv_heads, weights.k_norm)
        scores = reading.scale * (q @ k.mT)
        if reading.soft_cap is not None:
            scores = reading.soft_cap * torch.tanh(scores / reading.soft_cap)
        if reading.alibi is not None:
            scores = scores + reading.alibi[:, None, None]
        scores = scores.masked_fill(~self.allowed, -torch.inf)
        v = _by_head(_normed(self.norm, v_in), self.W_V)
        if self.b_V is not None:
            v = v + self.b_V[:, None, None, None].to(v)
        z = torch.softmax(upcast(scores), dim=-1).to(v) @ v
        return _by_head(z, self.W_O)

    def _queries_or_keys(
        self, x: Tensor, W: Tensor, b: Tensor | None, n_heads: int, norm: NormWeights | None
    ) -> Tensor:
        """Queries or keys of every head, after their own norm and rotation."""
        group = self.heads // n_heads
        W = rearrange(W, "d (h e) -> h d e", h=n_heads).repeat_interleave(group, dim=0)
        vectors = _by_head(_normed(self.norm, x), W)
        if b is not None:
            bias = rearrange(b, "(h e) -> h 1 1 1 e", h=n_heads).repeat_interleave(group, dim=0)
            vectors = vectors + bias.to(vectors)
        if norm is not None:
            vectors = _normed(replace(norm, epsilon=self.weights.epsilon), vectors)
        rotation = self.reading.rotation
        if rotation is None:
            return vectors
        return torch.einsum("hrbpe,pef->hrbpf", vectors, rotation)

    def mlp_output(self, x: Tensor) -> Tensor:
        """What the MLP writes, b_out apart."""
        mlp = self.mlp
        assert mlp is not None
        x = _normed(self.mlp_norm, x)
        linear = Linear(mlp.W_in, mlp.b_in)(x)
        if mlp.W_gate is None:
            hidden = mlp.activation(linear)
        else:
            gate = Linear(mlp.W_gate, mlp.b_gate)(x)
            hidden = mlp.activation(gate)
            if mlp.linear_activation is not None:
                linear = mlp.linear_activation(linear)
            hidden = hidden * linear
        if mlp.b_post is not None:
            hidden = hidden + mlp.b_post
        if mlp.post_factor is not None:
            hidden = hidden * mlp.post_factor(hidden)
        return Linear(mlp.W_out)(hidden)


def _by_head(x: Float[Tensor, "head row batch pos d"], W: Float[Tensor, "head d e"]) -> Tensor:
    """x·W of every head, in the wider dtype of the two, as x."""
    wide = torch.promote_types(x.dtype, W.dtype)
    return torch.einsum("hrbpd,hde->hrbpe", x.to(wide), W.to(wide)).to(x)


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
            self.clean_written, _ = self._source_outputs(clean)
            self.other_written, self.other_read = self._source_outputs(corrupted)

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
            self._run(x.expand(len(rows), *x.shape), self._mixed_inputs(clean_edges(rows).to(x)))
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

    def along_gradients(
        self, shares: Sequence[float], positions: bool
    ) -> Float[Tensor, "batch source destination *pos"]:
        """(a_clean − a_corrupted) · mean gradient, embeddings at these shares of the way from corrupted to clean."""
        return self.products(self.gradients(shares), positions)

    def products(
        self, cotangents: Float[Tensor, "destination batch pos d"], positions: bool
    ) -> Float[Tensor, "batch source destination *pos"]:
        """The difference of each source's output, dotted with a vector at each destination that reads it.

        The products are summed over positions unless `positions` is set.
        """
        scores = edge_products(self.clean_written - self.other_written, cotangents, positions)
        if positions:
            return scores * self.exists[..., None]
        return scores * self.exists

    def gradients(self, shares: Sequence[float]) -> Float[Tensor, "destination batch pos d"]:
        """Gradients of the target by what every destination reads, averaged over these shares of the way."""
        mean = self._gradients(shares[0]) / len(shares)
        for share in shares[1:]:
            mean += self._gradients(share) / len(shares)
        return mean

    def _gradients(self, share: float) -> Float[Tensor, "destination batch pos d"]:
        inputs: list[Tensor] = []

        def recorded_inputs(destinations: slice, written: Tensor, biases: Tensor) -> Tensor:
            stream = written.sum(0) + biases
            inputs.append(stream.expand(destinations.stop - destinations.start, *stream.shape))
            return inputs[-1]

        with torch.inference_mode(False), torch.enable_grad():
            x = torch.lerp(self.corrupted.resid_pre(0), self.frozen.resid_pre(0), share).clone().requires_grad_(True)
            gradients = torch.autograd.grad(self._run(x[None], recorded_inputs).sum(), inputs)
        return torch.cat([gradient[:, 0] for gradient in gradients])

    # ------------------------------------------------------------------ runs

    def _run(self, x: Float[Tensor, "row batch pos d"], inputs_of: InputRule) -> Float[Tensor, "row batch"]:
        """The target's number of one run from the first block's input; `inputs_of` gives what destinations read."""
        written = x[None]
        biases = torch.zeros_like(x)
        first = 0
        for block in self.blocks:
            heads = slice(first, first + 3 * block.heads)
            head_outputs = block.head_outputs(*inputs_of(heads, written, biases).chunk(3))
            first = heads.stop
            mlp = slice(first, first + 1)
            mlp_inputs = None
            if block.mlp is not None and block.parallel:
                mlp_inputs = inputs_of(mlp, written, biases)
            written = torch.cat([written, head_outputs])
            if block.b_O is not None:
                biases = biases + block.b_O
            if block.mlp is None:
                continue
            if mlp_inputs is None:
                mlp_inputs = inputs_of(mlp, written, biases)
            if block.mlp.b_out is not None:
                biases = biases + block.mlp.b_out
            written = torch.cat([written, block.mlp_output(mlp_inputs)])
            first = mlp.stop
        final = inputs_of(slice(first, first + 1), written, biases)[0]
        return self.readout.number(_normed(self.final, final))[..., 0]

    def _mixed_inputs(self, clean_edges: Float[Tensor, "row source destination"]) -> InputRule:
        """Inputs where only some edges are clean: the corrupted stream plus the differences along those edges."""

        def mixed_inputs(destinations: slice, written: Tensor, biases: Tensor) -> Tensor:
            difference = written - self.other_written[: len(written), None]
            edges = clean_edges[:, : len(written), destinations]
            return self.other_read[destinations.start] + torch.einsum("rst,srbpd->trbpd", edges, difference)

        return mixed_inputs

    def _source_outputs(self, frozen: PassLike) -> tuple[Float[Tensor, "source batch pos d"], dict[int, Tensor]]:
        """What every source writes for a prompt, and the stream where it is read; proved against the model's own."""
        streams: dict[int, Tensor] = {}
        last: list[Tensor] = []

        def recorded_streams(destinations: slice, written: Tensor, biases: Tensor) -> Tensor:
            last[:] = [written]
            stream = (written.sum(0) + biases)[0]
            streams[destinations.start] = stream
            return stream.expand(destinations.stop - destinations.start, 1, *stream.shape)

        numbers = self._run(frozen.resid_pre(0)[None], recorded_streams)[0]
        first = 0
        for layer in range(len(self.blocks) + 1):
            error = relative_error(streams[first], frozen.resid_pre(layer))
            if not error <= frozen.tolerance:
                where = f"blocks.{layer - 1}, run from its weights, differs from the model's own by {error:.1e}"
                raise _refusal(frozen.view, where)
            if layer < len(self.blocks):
                first += self.blocks[layer].destinations
        expected = self.readout.number(frozen.activation(self.readout.read_at))[:, 0]
        size = float(expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny))
        if not float((numbers - expected).abs().max()) <= frozen.tolerance * max(size, 1.0):
            raise _refusal(frozen.view, "ln_final, run from its weights, differs from the model's own")
        return last[0][:, 0], streams


def edge_products(
    written: Float[Tensor, "source batch pos d"], cotangents: Float[Tensor, "destination batch pos d"], positions: bool
) -> Float[Tensor, "batch source destination *pos"]:
    """What every source wrote, dotted with a vector at every destination, by position or summed over positions."""
    equation = "sbpd,tbpd->bstp" if positions else "sbpd,tbpd->bst"
    return torch.einsum(equation, upcast(written), upcast(cotangents))


def _normed(norm: NormWeights | None, x: Float[Tensor, "*any d"]) -> Float[Tensor, "*any d"]:
    """A norm as the live model computes it."""
    if norm is None:
        return x
    centred = x - x.mean(-1, keepdim=True) if norm.centre else x
    y = centred / norm.scale_of(x).to(x)
    if norm.gain is not None:
        y = y * norm.gain
    if norm.shift is not None:
        y = y + norm.shift
    return y.to(x)  # gains may be in float32 beside half precision


def _block(clean: PassLike, corrupted: PassLike, layer: int) -> _Block:
    block = clean.view.blocks[layer]
    layout = clean.layouts[layer]
    points = clean.points.blocks[layer]
    attention = block.attention
    mlp = block.dense_mlp  # both refuse what is neither
    sublayers = (layout.attn, layout.mlp) if block.has_mlp else (layout.attn,)
    odd = {
        f"its {layout.name} layout has norms between what a part writes and the stream": any(
            place.after or place.outer for place in sublayers
        ),
        "its attention has a gate, a norm or a latent inside": not attention.hooked,
        "whitening stands before it": block.whitening is not None,
        "an input of each token or a factor is added to it": block.per_layer is not None or block.scalar is not None,
        "its position embeddings are added to queries and keys only": getattr(
            clean.view.cfg, "positional_embedding_type", None
        )
        == "shortformer",
    }
    for why, is_so in odd.items():
        if is_so:
            raise _refusal(clean.view, f"blocks.{layer}: {why}")
    patterns = torch.stack([frozen.pattern(layer) for frozen in (clean, corrupted)])
    if float((patterns.sum(-1) - 1).abs().max()) > clean.tolerance:
        raise _refusal(clean.view, f"blocks.{layer}: its attention has sinks, which take a share of every row")
    heads = attention.heads
    kv = attention.kv_heads
    weights = block.query_key
    for norm in (weights.q_norm, weights.k_norm):
        if norm is not None and norm.gain is not None and norm.gain.numel() != weights.W_Q.shape[1] // heads:
            raise _refusal(clean.view, f"blocks.{layer}: its queries are normed over all heads together")

    def by_kv(tensor: Tensor, pattern: str) -> Tensor:
        return rearrange(tensor, pattern, kv=kv).repeat_interleave(heads // kv, dim=0)

    def norm_of(name: str | None) -> NormWeights | None:
        if name is None:
            return None
        return replace(block.norms[name], epsilon=norm_epsilon(getattr(block.module, name), clean.view.cfg))

    assert points.pattern is not None
    return _Block(
        heads=heads,
        parallel=layout.parallel,
        norm=norm_of(layout.attn.before),
        weights=weights,
        reading=score_reading(clean, layer),
        allowed=_allowed(clean, layer, patterns),
        W_V=by_kv(attention.W_V, "d (kv e) -> kv d e"),
        b_V=None if attention.b_V is None else by_kv(attention.b_V, "(kv e) -> kv e"),
        W_O=rearrange(attention.W_O, "(h e) d -> h e d", h=heads),
        b_O=attention.b_O,
        mlp_norm=norm_of(layout.mlp.before) if mlp is not None else None,
        mlp=mlp,
    )


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
    raise _refusal(
        frozen.view,
        f"blocks.{layer}: no head has a probability above zero in {int((structure & ~weighted).sum())} places that a "
        f"query might attend to, and {name} does not show whether a mask closes them or they underflowed (a wider "
        "dtype may help)",
    )


def _refusal(view: ModelView, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"live edges of this {view.description}: {why}. They need pre-LN blocks, sequential or parallel, with readable "
        "attention scores; edge_scores(method='frozen') and all of patch_scores work without."
    )
