"""The effect of a compression on one prediction, and how far the heads of a layer share a subspace.

With its pattern held, a layer's attention is linear in its OV circuits, so **compressed + removed = attention**
exactly: the removed part is ``W_V·W_O − W_V'·W_O'`` under the same pattern. The change of a logit is then a telescoping
sum:

1. each removed part, layer by layer: its output given the *original* model's stream, with the old patterns, ratios and
   scales, passed through the *compressed* later layers with the same quantities held;
2. then what the model recomputes: first its patterns, then its activation ratios, then its norm scales.

The order is a choice. Another one (such as compressed earlier layers and original later ones) shifts the joint effect
of two layers from one to the other; the sum is always the model's own change. Changes in queries and keys appear in the
patterns, and those in a gated MLP's W_gate in the ratios.

TensorLLM conjectures that the heads of a layer share a subspace. To test this, each head's circuits ``W_Q W_Kᵀ`` and
``W_V W_O`` are scaled to norm 1, so that all heads count equally. On each of the four sides (the inputs of queries,
keys and values, and the outputs) the energy of all heads' circuits is spread over d_model directions; the share of it
in the best few directions measures how far the heads share them. Because it is measured on circuits, the basis inside a
head does not matter.

As a reference, ``baseline="random"`` keeps every head's singular values but draws random directions, which shows what
heads would share by chance.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import Seed, checked_names, whole_count
from tensorlens_tl.algebra import AffineMap, Attention, Chain, Linear
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.stream import Stream, StreamTarget, Sublayer, stream_target, token_pairs
from tensorlens_tl.circuits.weights import as_view
from tensorlens_tl.compress.heads import Count, HeadWeights, circuits, head_weights
from tensorlens_tl.compress.plan import Plan
from tensorlens_tl.errors import FrozenModelError, InvalidInputError
from tensorlens_tl.hooks import capture, other_hooks, unheld_run
from tensorlens_tl.models import (
    BlockView,
    Coefficients,
    FrozenRule,
    ModelLike,
    Query,
    TokenLike,
    require_attention_alone,
)
from tensorlens_tl.models.lifecycle import refuse_dropout
from tensorlens_tl.passes import Capture, FrozenPass, PassLike, check_pass, mlp_chain
from tensorlens_tl.results import Terms

SETTLED = ("patterns", "ratios", "scales")
"""What a model recomputes with other weights, in the order of the sum."""


class Split(NamedTuple):
    """A sublayer with compressed weights, and what the compression removed; the two maps sum to the sublayer."""

    compressed: AffineMap
    removed: AffineMap


@dataclass(frozen=True, eq=False)
class CompressionEffect:
    """A frozen pass, split by a compression.

    Attributes:
        frozen: the pass of the original model.
        plan: the compression.
        compressed: the maps of the same pass (patterns, ratios, scales, activations) with compressed weights.
        after: the compressed model's activations on this prompt, by hook-point name.
    """

    frozen: FrozenPass
    plan: Plan
    compressed: FrozenPass
    after: Mapping[str, Tensor]

    def __repr__(self) -> str:
        return f"CompressionEffect({self.plan!r}, batch={len(self.frozen.tokens)}, pos={self.frozen.tokens.shape[1]})"

    def attention(self, layer: int) -> Split:
        """Return one layer's attention, pattern frozen, as two maps that sum to it: the compressed and removed parts.

        The removed part is one chain, with both versions of each head side by side.

        Raises:
            InvalidInputError: no such layer.
            FrozenModelError: the weights have changed since the pass.
        """
        self.frozen.check_fresh()
        pattern = self.frozen.pattern(layer)
        before, after = (block.attention for block in self._blocks(layer))
        values = _beside(_by_head(before.W_V, before.kv_heads), _by_head(after.W_V, after.kv_heads))
        offset = None
        if before.b_V is not None and after.b_V is not None:
            offset = _beside(_by_head(before.b_V, before.kv_heads), _by_head(after.b_V, after.kv_heads))
        W_O, negative = (_by_head(w.T, before.heads) for w in (before.W_O, -after.W_O))
        mix = Attention(pattern.to(before.W_O.dtype), before.kv_heads)
        removed = Chain((Linear(values, offset), mix, Linear(_beside(W_O, negative).T)))
        return Split(self.compressed.maps.attention(layer), removed)

    def mlp(self, layer: int, rule: FrozenRule = "frozen") -> Split | None:
        """Return the same for the layer's MLP, activation ratios frozen; None if it has none.

        Raises:
            InvalidInputError: no such layer or rule.
            FrozenModelError: the weights have changed since the pass.
        """
        self.frozen.check_fresh()
        compressed = self.compressed.maps.mlp(layer, rule)
        held = self.frozen.maps.mlp_coefficients(layer, rule)
        before, after = (block.dense_mlp for block in self._blocks(layer))
        if before is None or after is None or held is None or compressed is None:
            return None
        if held.gate is not None:
            self.frozen.maps.check_gate(layer)
        weights = {
            name: _both(getattr(before, name), getattr(after, name))
            for name in ("W_in", "b_in", "W_gate", "b_gate", "b_post")
        }
        W_out = torch.cat([before.W_out, -after.W_out])
        through = torch.cat([held.through, held.through], dim=-1)
        doubled = replace(before, **weights, W_out=W_out, b_out=None)
        coefficients = Coefficients(through, _both(held.gate, held.gate), _both(held.rest, held.rest))
        return Split(compressed, mlp_chain(doubled, coefficients))

    def _blocks(self, layer: int) -> tuple[BlockView, BlockView]:
        self.frozen.pattern(layer)  # validates the layer
        return self.frozen.view.blocks[layer], self.compressed.view.blocks[layer]

    def target(
        self,
        target: TokenLike = None,
        minus: TokenLike = None,
        *,
        query: Query = -1,
        direction: Float[Tensor, "..."] | None = None,
        rule: FrozenRule = "frozen",
    ) -> Terms:
        """Split the change of a logit into contributions of removed heads and MLPs, then patterns, ratios and scales.

        Args:
            target, minus, direction: as in `FrozenOperator.target`.
            query: positions, by default the last; see `tensorlens_tl.passes.inputs.query_positions`.
            rule: the rule for the MLPs that the parts pass through.

        Returns:
            Terms ``"L0H3"``, ``"MLP0"`` for what was compressed, ``"patterns"``, ``"ratios"`` (including experts'
            routing) and ``"scales"``. Their total is the model's own change, compressed − original, before any final
            soft cap. `Terms.keys` has each head's share by the token it reads, each MLP's by its position, and NaN for
            the last three.

        Raises:
            InvalidInputError, UnsupportedModelError: as `tensorlens_tl.circuits.logit_attribution`.
            FrozenModelError: the weights have changed since the pass.
        """
        readout = stream_target(self.frozen, target, minus, direction, query, rule, one=False)
        names, keys = self._parts(readout, rule)
        settled, end = self._settled(readout, rule)
        scores = torch.cat([keys.sum(-1), settled], dim=-1)
        nowhere = keys.new_full((*settled.shape, keys.shape[-1]), torch.nan)  # not attributable to a source token
        by_key = torch.cat([keys, nowhere], dim=2)
        about = readout.fields()
        about |= {"total": end - readout.total, "target": f"change of {readout.label}"}
        return Terms(
            names=[*names, *SETTLED],
            scores=scores.transpose(0, 1),
            keys=by_key.transpose(0, 1),
            remainder=torch.zeros_like(readout.total),
            **about,
        )

    def _parts(
        self, readout: StreamTarget, rule: FrozenRule
    ) -> tuple[list[str], Float[Tensor, "query batch term key"]]:
        """Return the contributions of the removed parts, through the compressed later layers."""
        compressed_stream = Stream.of(self.compressed, rule, to_tokens=readout.read_at == self.frozen.points.unembed_in)
        pulled = compressed_stream.pull(readout.seed)
        names: list[str] = []
        keys = [readout.seed.new_zeros(*readout.seed.shape[:2], 0, readout.seed.shape[2])]
        for number, (step, compressed_step) in enumerate(
            zip(readout.stream.steps, compressed_stream.steps, strict=True)
        ):
            for before, after in zip(step.sublayers, compressed_step.sublayers, strict=True):
                if self._is_changed(before):
                    x = readout.stream.x[number]
                    g = pulled.sums[number]
                    names += before.nodes
                    keys.append(_by_key(after, x, g) - _by_key(before, x, g))
        return names, torch.cat(keys, dim=2)

    def _is_changed(self, sublayer: Sublayer) -> bool:
        before, after = self._blocks(sublayer.layer)
        if sublayer.is_attention:
            return before.attention is not after.attention
        return before.mlp is not after.mlp

    def _settled(self, readout: StreamTarget, rule: FrozenRule) -> tuple[Tensor, Float[Tensor, "batch query"]]:
        """Return the successive effects of patterns, ratios and scales, `[query, batch, 3]`, and the model's new logit.

        Routing, gates and parts that are frozen as a whole count with the ratios.
        """
        points = self.frozen.points
        activations = dict(self.compressed.capture.activations)
        values = []
        patterns = [block.pattern for block in points.blocks if block.pattern is not None]
        inside = [(b.pre, b.pre_linear, b.index, b.weight, b.per_layer_input) for b in points.blocks]
        whole = [ends.into for b in points.blocks for ends in (b.attention, b.mlp, b.shared, b.per_layer) if ends]
        ratios = [*(name for names in inside for name in names if name is not None), *whole]
        steps = ([], patterns, [*ratios, points.last_output], list(points.captured))
        for names in steps:  # a masked model's prediction head computes its ratios from the final output
            activations |= {name: self.after[name] for name in names}
            end = Stream.of(self._at(activations), rule, to_tokens=readout.read_at == points.unembed_in).x[-1]
            values.append((upcast(readout.seed) * end).sum((-2, -1)))
        settled = torch.stack([now - then for then, now in pairwise(values)], dim=-1)
        states = self._at(self.after).activation(readout.read_at)
        states = upcast(torch.take_along_dim(states, readout.positions[..., None], dim=1))
        return settled, (states * readout.vectors).sum(-1) + readout.constant

    def _at(self, activations: Mapping[str, Tensor]) -> FrozenPass:
        """Return a pass of the compressed weights at other activations."""
        return _with_capture(self.compressed, replace(self.compressed.capture, activations=dict(activations)))


@checked_names
def compression_effect(frozen: PassLike, plan: Plan | Any) -> CompressionEffect:
    """Split a frozen pass into what a compression removes and what it keeps.

    Runs the compressed model once on the pass's prompt.

    >>> from tensorlens_tl import compress
    >>> parts = compress.compression_effect(frozen, compress.plan(model, 1, ratio=2, method="circuit-svd"))
    >>> compressed, gone = parts.attention(1)
    >>> x = torch.randn(1, *frozen.resid_pre(1).shape[1:])
    >>> torch.allclose(compressed.push(x) + gone.push(x), frozen.maps.attention(1).push(x), atol=1e-4)
    True

    Args:
        frozen: a pass of the model that was compressed.
        plan: from `tensorlens_tl.compress.plan`.

    Raises:
        InvalidInputError: not a pass or plan, or a plan for another model.
        UnsupportedModelError: a layer of the model has no attention.
        FrozenModelError: the weights or hooks have changed since the pass, or frozen hooks are attached.
    """
    check_pass(frozen)
    if not isinstance(plan, Plan):
        raise InvalidInputError(f"plan: pass a plan from compress.plan, not a {type(plan).__name__}.")
    if plan.model is not frozen.model:
        raise InvalidInputError(f"plan: it was made for {plan.description}, but this pass is of another model.")
    for block in frozen.view.blocks:
        require_attention_alone(block)  # checked first, since patterns of every layer are needed
    frozen.check_fresh()
    refuse_dropout(frozen.view.model)
    if other_hooks(frozen.model) != frozen.other_hooks:
        raise FrozenModelError(
            "compression_effect: hooks were put on the model or taken off since this pass was frozen, so the "
            "compressed run would not be comparable. Freeze again."
        )
    with unheld_run(frozen.model), torch.no_grad(), plan.applied():
        after, _ = capture(frozen.model, frozen.inputs, frozen.points.captured, calls=frozen.points.calls)
    view = frozen.view.with_weights(plan.weights())
    return CompressionEffect(frozen, plan, _with_capture(frozen, replace(frozen.capture, view=view)), after)


def _with_capture(frozen: FrozenPass, capture: Capture) -> FrozenPass:
    """Return a pass with other activations or weights; its gates are compared within the pass itself."""
    other = frozen.with_capture(capture)
    other.maps.cache.gates.update(range(frozen.n_layers))
    return other


def _both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Concatenate two versions side by side; None if there is none."""
    if first is None or second is None:
        return None
    return torch.cat([first, second], dim=-1)


def _by_head(weight: Float[Tensor, "*rows width"], heads: int) -> Float[Tensor, "*rows head d_head"]:
    return rearrange(weight, "... (head d) -> ... head d", head=heads)


def _beside(first: Tensor, second: Tensor) -> Float[Tensor, "*rows width"]:
    """Put two versions of each head side by side, with heads in a row."""
    return torch.cat([first, second], dim=-1).flatten(-2)


def _by_key(
    sublayer: Sublayer, x: Float[Tensor, "batch pos d_model"], g: Float[Tensor, "query batch pos d_model"]
) -> Float[Tensor, "query batch node key"]:
    """Return each node's contribution along `g` by the token it reads: a head's source token, an MLP's own position."""
    cotangent = sublayer.write.pull(g)
    if sublayer.is_attention:
        return token_pairs(sublayer, x, cotangent).sum(-2)
    return (upcast(cotangent) * sublayer.read(x)).sum(-1)[:, :, None]


if TYPE_CHECKING:
    import pandas as pd

    Baseline = Literal["random"] | None
else:
    Baseline = str | None  # `sharing` says which there is

SIDES = ("query", "key", "value", "output")
CIRCUITS = ("QK", "OV")


@dataclass(frozen=True, eq=False)
class Sharing:
    """How far the heads of each layer share directions of the residual stream.

    Attributes:
        energy: the share of the energy of all heads' circuits, each of norm 1, in the best R directions, `[layer, side,
            R − 1]`, with sides as in `SIDES`.
        chance: the mean of the same for random directions; None without a baseline.
        similarity: cosine similarity between heads' circuits, `[layer, circuit, head, head]`, circuits as in
            `CIRCUITS`.
        core_similarity: the same within the best `rank` directions on both sides, that is, between the heads' cores.
        rank: d_head, the number of directions that one head can use.
    """

    energy: Float[Tensor, "layer side rank"]
    chance: Float[Tensor, "layer side rank"] | None
    similarity: Float[Tensor, "layer circuit head head"]
    core_similarity: Float[Tensor, "layer circuit head head"]
    rank: int

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per layer and side: the share of energy in the best d_head directions, and by chance."""
        import pandas as pd

        index = pd.MultiIndex.from_product([range(len(self.energy)), SIDES], names=["layer", "side"])
        table = pd.DataFrame({"energy": self.energy[..., self.rank - 1].flatten().tolist()}, index=index)
        if self.chance is not None:
            table["chance"] = self.chance[..., self.rank - 1].flatten().tolist()
        return table.reset_index()

    def __repr__(self) -> str:
        layers, _, width = self.energy.shape
        return f"Sharing(layers={layers}, d_model={width}, heads={self.similarity.shape[-1]}, rank={self.rank})"


@checked_names
def sharing(model: ModelLike, *, baseline: Baseline = "random", draws: Count = 4, seed: Seed = 0) -> Sharing:
    """Measure how far the heads of each layer share directions, and what they would share by chance.

    >>> from tensorlens_tl import compress
    >>> shared = compress.sharing(model, draws=1)
    >>> shared
    Sharing(layers=4, d_model=128, heads=4, rank=32)
    >>> bool(shared.energy[1, 0, 31] > shared.chance[1, 0, 31])  # the query inputs of layer 1
    True

    Every head's circuits are first scaled to norm 1. Rotary positions and norms of queries and keys are not part of the
    QK circuit.

    Args:
        model: a model or a `FrozenPass`.
        baseline: ``"random"``, or None for no baseline.
        draws, seed: number and seed of the random directions.

    Raises:
        InvalidInputError: unknown baseline, or no draws.
        UnsupportedModelError: attention that cannot be read.
    """
    if baseline not in (None, "random"):
        raise InvalidInputError(f"baseline={baseline!r}; use 'random' or None.")
    draws = whole_count("draws", draws)
    view = as_view(model)
    generator = torch.Generator().manual_seed(seed)
    energies = []
    random = []
    similar = []
    cores = []
    rank = 0
    for layer in range(view.n_layers):
        heads = head_weights(view, layer)
        rank = min(heads.matrices["V"].shape[1:])
        factors = _unit_circuits(heads)
        energy = (torch.einsum("hdk,hkl,hel->de", a, b.mT @ b, a) for a, b in factors)  # Σ over heads of C·Cᵀ, C = a·bᵀ
        spectra, bases = zip(*map(_subspace, energy), strict=True)
        energies.append(torch.stack(spectra))
        pairs = [(factors[0], bases[0], bases[1]), (factors[2], bases[2], bases[3])]
        similar.append(torch.stack([_cosines(*factor) for factor, _, _ in pairs]))
        cut = [(left[:, :rank].T @ a, right[:, :rank].T @ b) for (a, b), left, right in pairs]
        cores.append(torch.stack([_cosines(*factor) for factor in cut]))
        if baseline is not None:
            random.append(sum(_by_chance(factors, heads.group, generator) for _ in range(draws)) / draws)
    chance = torch.stack(random) if random else None
    return Sharing(torch.stack(energies), chance, torch.stack(similar), torch.stack(cores), rank)


def _unit_circuits(heads: HeadWeights) -> list[tuple[Tensor, Tensor]]:
    """Return for each side its own factor and the other one, `[head, d_model, d_head]`, with circuits of norm 1."""
    sides = []
    for name in CIRCUITS:
        a, b = (factor.double() for factor in circuits(heads)[name])
        size = ((a.mT @ a) * (b.mT @ b)).sum((1, 2)).clamp_min(0).sqrt()
        a = a / size.clamp_min(torch.finfo(a.dtype).tiny)[:, None, None]
        sides += [(a, b), (b, a)]
    return sides


def _subspace(energy: Float[Tensor, "d d"]) -> tuple[Float[Tensor, "d"], Float[Tensor, "d d"]]:
    values, directions = torch.linalg.eigh(energy)
    values = values.flip(0).clamp_min(0)
    total = values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    return values.cumsum(0) / total, directions.flip(1)


def _cosines(a: Float[Tensor, "h n k"], b: Float[Tensor, "h m k"]) -> Float[Tensor, "head head"]:
    """Return ⟨C_g, C_h⟩ / ‖C_g‖‖C_h‖ for circuits C = a·bᵀ, computed from their factors."""
    inner = torch.einsum("gnk,hnl,gmk,hml->gh", a, a, b, b)
    norms = inner.diagonal().clamp_min(torch.finfo(inner.dtype).tiny).sqrt()
    return inner / norms[:, None] / norms


def _by_chance(
    factors: list[tuple[Tensor, Tensor]], group: int, generator: torch.Generator
) -> Float[Tensor, "side rank"]:
    """Return the share of energy with each head's singular values in random directions.

    Heads that share keys and values share those directions here too.
    """
    spectra = []
    for together, (a, b) in zip((1, group, group, 1), factors, strict=True):  # sides as `SIDES`
        _, narrow = torch.linalg.qr(a)
        inside = narrow @ (b.mT @ b) @ narrow.mT
        gaussian = torch.randn(len(a) // together, *a.shape[1:], generator=generator, dtype=torch.float64).to(a)
        random = torch.linalg.qr(gaussian)[0].repeat_interleave(together, dim=0)
        spectra.append(_subspace(torch.einsum("hdk,hkl,hel->de", random, inside, random))[0])
    return torch.stack(spectra)
