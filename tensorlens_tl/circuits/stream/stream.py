"""The frozen model as steps of its residual stream: the form in which direct effects, paths and graphs are counted.

The residual stream goes through *steps*. At each step *sublayers* (attention, the MLP) read the stream and write back
to it, and then the whole stream goes through the step's *outer* map, if it has one (a post-LN norm; at the end the
final norm or a prediction head):

    x[s+1] = outer( x[s] + Σ_sublayers write(read(x[s])) )

A sequential block is two steps, a parallel block one with two sublayers; whitening before a block is one more step,
without sublayers, whose outer map mixes positions. What is left without the sublayers is how a
vector written to the stream reaches the end *directly*: the identity in a pre-LN model, the norms in a post-LN model.

A sublayer's hidden vector, read(x), is a row of groups: one per head, or one for the whole MLP. A group is a *node*:
what it writes is linear in its part of the hidden vector, so its share of anything is an inner product with the
part of the pulled-back vector. What `write` and `outer` add besides are *biases*, which are sources too.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import place
from tensorlens_tl.circuits.arguments import Direction
from tensorlens_tl.circuits.stream.blocks import block_steps
from tensorlens_tl.circuits.stream.embeddings import embedding_parts
from tensorlens_tl.circuits.stream.sublayers import Step, Sublayer
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import LayerRange, Query, TokenLike, check_rule
from tensorlens_tl.passes import Difference, FrozenPass, PassOrDifference, check_explained
from tensorlens_tl.passes.inputs import one_query, query_positions
from tensorlens_tl.passes.operator import chosen_layers, end_of, resolve_target, through_final_norm


@dataclass(frozen=True, eq=False)
class Pulled:
    """A vector at the end, pulled back along the steps.

    Attributes:
        stream: at the stream before each step, and at the end, each `[*rows, batch, pos, d_model]`.
        sums: at each step's sum: after its sublayers have written and before its outer map.
    """

    stream: list[Tensor]
    sums: list[Tensor]

    def of_biases(self, steps: tuple[Step, ...]) -> Iterator[tuple[int, str, Tensor, Tensor]]:
        """Every bias on the way: step, name, the bias, and the vector that meets it."""
        for number, step in enumerate(steps):
            for name, bias, inside in step.biases:
                vectors = self.stream[number + 1]
                if inside:
                    vectors = self.sums[number]
                yield number, name, bias, vectors


@dataclass(frozen=True, eq=False)
class Stream:
    """A frozen pass, or some of its layers, as steps, with the values that the input of the pass gives them.

    Attributes:
        layers: which of them.
        final_norm: whether the norm after the last layer belongs to it, where the layers reach it.
        steps: what the stream goes through.
        values: `x` and `hidden` of a run that shows them itself; None where the steps give them.
    """

    frozen: PassOrDifference
    layers: range
    final_norm: bool
    steps: tuple[Step, ...]
    values: tuple[list[Tensor], list[tuple[Tensor, ...]]] | None = None

    @classmethod
    def of(
        cls,
        frozen: PassOrDifference,
        activation: str = "ratio",
        *,
        layers: LayerRange = None,
        final_norm: bool | None = None,
        to_tokens: bool = True,
    ) -> "Stream":
        """The stream up to what is unembedded, or (``to_tokens=False``) to the operator's output.

        Args:
            frozen: the pass.
            activation: the rule for MLPs.
            layers: consecutive layers; a range that ends before the last ends at the next block's input.
            final_norm: whether the norm after the last layer is part of it.
            to_tokens: whether a prediction head is part of it.

        Raises:
            InvalidInputError: no such activation rule or layers.
            FrozenModelError: the weights were changed since the pass.
            UnsupportedModelError: a block takes keys and values of an earlier one.
        """
        frozen.view.require_single_streams("the stream of a circuit")
        rule = check_rule(activation)
        chosen = chosen_layers(frozen.n_layers, layers)
        normed = through_final_norm(frozen, chosen.stop, final_norm)
        frozen.check_fresh()
        steps = [step for layer in chosen for step in block_steps(frozen, layer, rule)]
        if chosen.stop == frozen.n_layers:
            ends = dict[str, AffineMap | None]()
            if normed:
                ends["ln_final.b"] = frozen.maps.final_map()
            if to_tokens:
                ends["prediction head b"] = frozen.prediction_head(rule)
            last = frozen.maps.capture.side(frozen.n_layers - 1)
            steps += [Step(-1, (), end, name, last) for name, end in ends.items() if end is not None]
        return cls(frozen, chosen, normed, tuple(steps))

    @cached_property
    def _values(self) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        return self.values or self._walked(anchored=False)

    def anchored(self) -> "Stream":
        """The same with the run's own values where a block begins, so that rounding does not add up with depth."""
        return replace(self, values=self.values or self._walked(anchored=True))

    def _walked(self, *, anchored: bool) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        """`x` and `hidden`, step by step, from the input alone or from the input of every block."""
        x: list[Tensor] = []
        hidden: list[tuple[Tensor, ...]] = []
        after, layer = self.frozen.resid_pre(self.layers.start), self.layers.start
        for step in self.steps:
            reached = step.layer if step.layer >= 0 else self.layers.stop
            if anchored and reached != layer:
                after, layer = self.frozen.resid_pre(reached), reached
            x.append(after)
            hidden.append(tuple(sublayer.read(after) for sublayer in step.sublayers))
            written = sum((s.write(h) for s, h in zip(step.sublayers, hidden[-1], strict=True)), start=after)
            after = step.outer(written)
        return [*x, after], hidden

    @property
    def x(self) -> list[Float[Tensor, "batch pos d_model"]]:
        """The stream before each step, and after the last."""
        return self._values[0]

    @property
    def hidden(self) -> list[tuple[Float[Tensor, "batch pos _width"], ...]]:
        """Each sublayer's hidden vector, by step and sublayer."""
        return self._values[1]

    def step_at(self, layer: int, step: int = 0) -> int:
        """The number of a step of one layer; of the layer after the last one, of what follows the blocks."""
        return sum(0 <= earlier.layer < layer for earlier in self.steps) + step

    @property
    def run(self) -> FrozenPass:
        """The pass, of a stream that is no difference of two."""
        assert isinstance(self.frozen, FrozenPass)
        return self.frozen

    @property
    def widest(self) -> int:
        """The width of the widest hidden vector."""
        return max((hidden.shape[-1] for step in self.hidden for hidden in step), default=0)

    def sources(self) -> dict[str, Float[Tensor, "batch pos d_model"]]:
        """What the stream begins with: token and position embeddings, or the stream before the first layer."""
        if self.layers.start:
            return {f"{self.frozen.view.blocks[self.layers.start].name} input": self.x[0]}
        return embedding_parts(self.frozen)

    def at(self, layer: int, *, cross: bool = False) -> tuple[int, Sublayer]:
        """The step and the attention sublayer of one layer; with `cross` that of cross-attention.

        Raises:
            InvalidInputError: the layer is not among these.
        """
        for number, step in enumerate(self.steps):
            for sublayer in step.sublayers:
                if sublayer.layer == layer and sublayer.is_attention and sublayer.is_cross == cross:
                    return number, sublayer
        raise InvalidInputError(f"layers: layer {layer} is not among {list(self.layers)}.")

    def pull(
        self,
        g: Float[Tensor, "*rows batch pos d_model"],
        *,
        sublayers: bool = True,
        joining: Mapping[int, Tensor] | None = None,
    ) -> Pulled:
        """A vector at the end pulled through everything, or (``sublayers=False``) past all of them: directly.

        Args:
            g: the vector, `[*rows, batch, pos, d_model]`.
            sublayers: whether it goes through the sublayers.
            joining: vectors that join it on its way, at the stream before a step.
        """
        stream = [g]
        sums = []
        for number, step in reversed(list(enumerate(self.steps))):
            g = step.outer.pull(g)
            sums.append(g)
            if sublayers:
                g = sum((s.read.pull(s.write.pull(g)) for s in step.sublayers), start=g)
            if joining and number in joining:
                g = g + joining[number]
            stream.append(g)
        return Pulled(stream[::-1], sums[::-1])

    def terms(self, number: int, pulled: Pulled, by: str) -> Iterator[tuple[Sublayer, list[str], Tensor]]:
        """What a step's sublayers give to a pulled target: each with the names of its terms, and these by position.

        Args:
            number: the step's.
            pulled: the target, pulled back along the steps.
            by: as in `Sublayer.terms`.

        Raises:
            UnsupportedModelError: neurons of a mixture of experts.
        """
        for sublayer, hidden in zip(self.steps[number].sublayers, self.hidden[number], strict=True):
            if by == "neuron" and sublayer.has_neurons:
                self.frozen.view.blocks[sublayer.layer].require_dense_mlp()
            cotangent = sublayer.write.pull(pulled.sums[number])
            yield sublayer, *sublayer.terms(upcast(cotangent) * hidden, by)

    @cached_property
    def direct(self) -> list[Tensor]:
        """What passes every sublayer, the input and the biases on the way: before each step, and after the last."""
        carried = [self.x[0]]
        for step in self.steps:
            carried.append(step.directly(carried[-1]))
        return carried

    @cached_property
    def direct_hidden(self) -> list[tuple[Tensor, ...]]:
        """Each sublayer's hidden vector for what reaches it directly."""
        return [
            tuple(sublayer.read(x) for sublayer in step.sublayers)
            for step, x in zip(self.steps, self.direct, strict=False)
        ]

    @cached_property
    def shown(self) -> list[tuple[Float[Tensor, "2 batch pos _width"], ...]]:
        """Each sublayer's hidden vector, and that of `direct_hidden`; of a single node what it writes for the two.

        Many vectors then meet a node where it writes, and need not be pulled into a hidden layer that is wider.
        """
        return [
            tuple(
                sublayer.write.push(torch.stack(both)) if len(sublayer.nodes) == 1 else torch.stack(both)
                for sublayer, *both in zip(step.sublayers, hidden, direct, strict=True)
            )
            for step, hidden, direct in zip(self.steps, self.hidden, self.direct_hidden, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class StreamTarget:
    """A target at some queries of a frozen pass, and the stream that leads to it.

    Attributes:
        stream: up to where the target reads it.
        read_at: the hook point that holds what the target reads; of an encoder–decoder its decoder's part (`points`).
        vectors: the target's vector for each query, `[batch, query, d_model]`.
        constant: what the answer adds besides (b_U), `[batch, query]`.
        total: the model's own number, before any final soft cap, `[batch, query]`.
        positions: the queries, `[batch, query]`.
        label: the target for people, with where it is read.
        constant_name: what the constant is called among the terms.
        soft_cap: the cap that the model applies after it, or None.
        name: the target, wherever it is read, and of a difference the number whose change it is.
        of_tokens: whether it is a number of logits.
    """

    stream: Stream
    read_at: str
    vectors: Float[Tensor, "batch query d_model"]
    constant: Float[Tensor, "batch query"]
    total: Float[Tensor, "batch query"]
    positions: Int[Tensor, "batch query"]
    label: str
    constant_name: str = "b_U"
    soft_cap: float | None = None
    name: str = ""
    of_tokens: bool = False

    @cached_property
    def seed(self) -> Float[Tensor, "query batch pos d_model"]:
        """The vectors at their places, a row per query."""
        return self.seed_of(slice(None))

    def seed_of(self, queries: slice) -> Float[Tensor, "query batch pos d_model"]:
        """The same of some queries."""
        vectors, positions = self.vectors[:, queries].transpose(0, 1), self.positions[:, queries].T
        return place(vectors, positions, self.stream.frozen.resid_pre(0))

    def some_queries(self, row_bytes: int, memory: Memory) -> Iterator[slice]:
        """Slices of the queries, each as many as fit into memory together; a single query is not bounded."""
        count = self.positions.shape[1]
        for rows in chunks(count, row_bytes, memory if count > 1 else None, "queries"):
            yield slice(rows.start, rows.stop)

    @property
    def points(self) -> tuple[str, ...]:
        """The hook points that together hold what it reads: one, of an encoder–decoder one for each side."""
        frozen = self.stream.frozen
        if frozen.sides is None:
            return (self.read_at,)
        if self.read_at not in (frozen.points.unembed_in, frozen.points.output):
            return tuple(frozen.maps.capture.stream_names(self.stream.layers.stop))
        assert frozen.points.encoder_output is not None
        return frozen.points.encoder_output, self.read_at

    def read_of(
        self, activation: Callable[[str], Float[Tensor, "*rows batch some d_model"]]
    ) -> Float[Tensor, "*rows batch pos d_model"]:
        """What the target reads, of the activations at `points`."""
        return torch.cat([activation(name) for name in self.points], dim=-2)

    def number_of(
        self, activation: Callable[[str], Float[Tensor, "*rows batch some d_model"]]
    ) -> Float[Tensor, "*rows batch query"]:
        """The number that the target names, of the activations at `points` in another run; see `number`."""
        return self.number(self.read_of(activation))

    def number(self, read: Float[Tensor, "*rows batch pos d_model"]) -> Float[Tensor, "*rows batch query"]:
        """The number that the target names, of another stream at `read_at`, before any final soft cap."""
        positions = self.positions[..., None].expand(*read.shape[:-2], -1, 1)
        activations = torch.take_along_dim(upcast(read.to(self.vectors.device)), positions, dim=-2)
        return (activations * self.vectors).sum(-1) + self.constant

    @property
    def noise(self) -> Float[Tensor, "batch query"]:
        """What rounding of two runs may leave in the number, which may itself be no more; zero of one run."""
        frozen = self.stream.frozen
        if not isinstance(frozen, Difference):
            return torch.zeros_like(self.total)
        lengths = [upcast(self.read_of(run.activation)).norm(dim=-1) for run in frozen.runs]
        at_queries = torch.stack(lengths).sum(0).gather(1, self.positions)
        return frozen.rounding * at_queries * self.vectors.norm(dim=-1)

    def fields(self) -> dict[str, Any]:
        """What a result of these queries says about them."""
        frozen = self.stream.frozen
        return {
            "total": self.total,
            "queries": self.positions,
            "mask": frozen.mask,
            "tokens": frozen.str_tokens,
            "target": self.label,
            "soft_cap": self.soft_cap,
            "provenance": frozen.provenance(),
        }


def stream_target(
    frozen: PassOrDifference,
    target: TokenLike,
    minus: TokenLike,
    direction: Direction,
    query: Query,
    activation: str,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    *,
    one: bool = True,
) -> StreamTarget:
    """Check the arguments, and build the stream up to where the target reads it.

    Args:
        frozen: the pass, or the difference of two.
        target, minus, direction: as in `FrozenOperator.target`; a direction reads the stream where the layers end.
        query: the queries, or with `one` a single one.
        activation: the rule for MLPs.
        layers: consecutive layers, None for all.
        final_norm: whether the norm after the last layer is part of it.

    Raises:
        InvalidInputError: no frozen pass, a query out of range, several with `one`, a token target before the
            last layer, and what `resolve_target` refuses.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
    """
    check_explained(frozen)
    chosen = chosen_layers(frozen.n_layers, layers)
    normed = through_final_norm(frozen, chosen.stop, final_norm)
    if frozen.view.final_norm is None:  # what the last block gives is what is unembedded
        normed = chosen.stop == frozen.n_layers
    if direction is None and target is not None and not normed:
        raise InvalidInputError(
            f"target: what is asked about ends at {end_of(frozen, chosen.stop, normed)}, before the unembedding; use "
            "direction=, or all layers with their final norm. tlens.circuits.logit_lens unembeds the stream before "
            "every layer."
        )
    positions = {True: one_query, False: query_positions}[one](frozen.prompt, query)
    resolved = resolve_target(frozen, target, minus, direction, positions)
    stream = Stream.of(frozen, activation, layers=layers, final_norm=final_norm, to_tokens=resolved.of_tokens)
    if resolved.of_tokens:
        read_at = frozen.points.unembed_in
    elif not normed or frozen.view.final_norm is None:
        read_at = frozen.maps.capture.output_name(chosen.stop - 1)
    else:
        read_at = frozen.points.output
    assert read_at is not None  # a token needs an unembedding
    label = resolved.label
    soft_cap = frozen.soft_cap
    if not resolved.of_tokens:
        label = f"{label} at {end_of(frozen, chosen.stop, normed)}"
        soft_cap = None
    if isinstance(frozen, Difference):
        label = f"change of the {label}"
    real = torch.take_along_dim(frozen.mask, positions, dim=1)  # padding has no target
    vectors = resolved.vectors * real[..., None]
    constant = resolved.constant.to(upcast(frozen.resid_pre(0))) * real
    readout = StreamTarget(
        stream, read_at, vectors, constant, constant, positions, label,
        soft_cap=soft_cap, name=resolved.label, of_tokens=resolved.of_tokens,
    )  # fmt: skip
    return replace(readout, total=readout.number_of(frozen.activation))


def token_pairs(
    sublayer: Sublayer, x: Float[Tensor, "batch pos d_model"], cotangent: Float[Tensor, "*rows batch pos width"]
) -> Float[Tensor, "*rows batch head query key"]:
    """What each head moves from each source token to each query, along a vector at its hidden layer.

    ``A^h_ij ⟨g_i^h, v_j^h⟩`` with the cotangent g: summed over keys, its inner product with the hidden vector.
    """
    pairs = rearrange(sublayer.split(cotangent), "... q h d -> ... h q d") @ sublayer.values(x).mT
    return sublayer.mixing.pattern * pairs


def summed_by_name(
    names: list[str], values: Float[Tensor, "*any"], dim: int
) -> tuple[list[str], Float[Tensor, "*summed"]]:
    """Values along a dimension with those of equal names summed: a head's, by queries, keys and values.

    Args:
        names: one for each index along the dimension.
        values: anything.
        dim: the dimension.

    Returns:
        Every name once, in the order of its first value, and as many sums.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    if len(numbers) == len(names):
        return names, values
    index = torch.tensor([numbers[name] for name in names], device=values.device)
    shape = list(values.shape)
    shape[dim] = len(numbers)
    return list(numbers), values.new_zeros(shape).index_add_(dim, index, values)


def dot(g: Float[Tensor, "*rows batch pos d"], x: Tensor) -> Float[Tensor, "*rows batch 1"]:
    """⟨g, x⟩ of each row and prompt, as one column; `x` may be one vector for all positions."""
    return (upcast(g) * x).sum((-2, -1))[..., None]
