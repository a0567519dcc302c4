"""The contribution graph: how a logit came about, node by node and position by position.

Nodes are the token and position embeddings, every head, every MLP, every bias, and the target, each at each position.
A node's *weight* is its contribution to the target through everything later: its output dotted with the target pulled
back to it through the whole frozen model. The *edge* from a source to a node is the share of that contribution which
entered the node through the source: pull the target back to the node's output, through the node alone to the residual
stream, and dot with the source's output there. So

* a node's incoming edges and its own bias sum to its weight;
* embeddings and biases (the sources, and the nodes' own) sum to the logit.

Nothing is trained and nothing is approximated: attention patterns, activation ratios and norm scales are frozen. In a
post-LN model what a source wrote goes through the norms of the residual stream before it enters a node. Whitening
passes vectors on from position to position, so it is a node of its own, which takes in all that was written before it.
A mixer in place of attention (a state-space layer, a convolution) is one node with edges from every earlier position.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Attention, Chain
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import place
from tensorlens_tl.circuits.steps import Sublayer
from tensorlens_tl.circuits.stream import Pulled, StreamTarget, stream_target
from tensorlens_tl.errors import InvalidInputError, SizeError
from tensorlens_tl.models.protocol import LayerRange, Query, TokenLike
from tensorlens_tl.passes.frozen import PassLike
from tensorlens_tl.results.graph import ContributionGraph

MOST_EDGES = 2_000_000
"""Edges a graph may keep."""

EDGE_BYTES = 256 * 2**20
"""Bytes of edge weights that are looked at at once."""


def contribution_graph(
    frozen: PassLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    threshold: Any = 0.01,
    query: Query = -1,
    direction: Any = None,
    layers: LayerRange = None,
    final_norm: bool = True,
    activation: str = "ratio",
) -> ContributionGraph:
    """The contribution graph of one logit of one prompt.

    Args:
        frozen: a pass of one prompt.
        target, minus, direction, layers, final_norm: as in `logit_attribution`.
        threshold: edges smaller than this share of the largest edge are left out (0 keeps all but exact zeros); nodes
            keep their weights, and `ContributionGraph.completeness` says what the kept edges carry.
        query: one position; see `tensorlens_tl.passes.prompts.query_positions`.
        activation: the rule for MLPs.

    Raises:
        InvalidInputError: several prompts or queries, a threshold outside [0, 1], and what `logit_attribution` refuses.
        SizeError: more than `MOST_EDGES` edges would be kept.
    """
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise InvalidInputError(f"threshold={threshold!r}: a share of the largest edge, from 0 to 1.")
    asked = stream_target(frozen, target, minus, direction, query, activation, layers, final_norm)
    if len(frozen.tokens) != 1:
        raise InvalidInputError(f"contribution_graph: the pass has {len(frozen.tokens)} prompts; freeze one.")
    return _Builder(asked, asked.stream.pull(asked.seed), float(threshold)).graph()


@dataclass(eq=False)
class _Builder:
    """Walks the steps forwards with every source's output, and collects nodes and edges.

    `outputs` holds what each source wrote, carried directly to the stream before the current step.
    """

    asked: StreamTarget
    pulled: Pulled
    threshold: float
    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)  # [pos] each
    biases: list[Tensor] = field(default_factory=list)
    entering: dict[int, Tensor] = field(default_factory=dict)
    edges: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    largest: float = 0.0
    carried: list[int] = field(default_factory=list)  # the nodes whose outputs the stream still carries

    def graph(self) -> ContributionGraph:
        import pandas as pd

        stream, frozen = self.asked.stream, self.asked.stream.frozen
        query, total, constant = int(self.asked.positions), self.asked.total[0, 0], self.asked.constant[0, 0]
        parts = stream.sources()
        outputs = torch.stack([part[0] for part in parts.values()])
        for name in parts:
            self.carried.append(self._node(name, "embedding", -1))
        self.weights += list((outputs * self.pulled.stream[0][0, 0]).sum(-1))
        for number, step in enumerate(stream.steps):
            if step.outer.mixes:
                outputs = self._through(number, outputs)
                continue
            written, before = list[Tensor](), len(self.names)
            for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
                met = sublayer.write.pull(self.pulled.sums[number])
                self._enter(sublayer, met, outputs)
                written.append(self._leave(sublayer, hidden, met))
            for name, bias in [(name, bias) for name, bias, within in step.biases if within]:
                written.append(self._bias(name, step.layer, bias, self.pulled.sums[number]))
            outputs = torch.cat([outputs, *written])
            outputs = step.outer.push(outputs[:, None])[:, 0]
            for name, bias, within in step.biases:
                if not within:
                    met = self.pulled.stream[number + 1]
                    outputs = torch.cat([outputs, self._bias(name, step.layer, bias, met)])
            self.carried += range(before, len(self.names))
        final = (outputs * self.pulled.stream[-1][0, 0]).sum(-1)[:, query]
        pos = outputs.shape[1]
        target = len(self.names) * pos
        sources = torch.tensor(self.carried, device=final.device)
        self._keep(sources * pos + query, torch.full_like(sources, target), final)
        weights, biases = torch.stack(self.weights), torch.stack(self.biases)
        sources = torch.tensor([kind in ("embedding", "bias") for kind in self.kinds])
        reached = [float(final.sum() + constant), float(weights[sources].sum() + biases[~sources].sum() + constant)]
        size = float(final.abs().sum() + constant.abs())
        entering = torch.zeros(len(self.names), pos).to(weights)
        for node, amount in self.entering.items():
            entering[node] = amount
        tokens = frozen.str_tokens[0]
        count = len(self.names)
        nodes = pd.DataFrame(
            {
                "name": [*(name for name in self.names for _ in range(pos)), "target"],
                "kind": [*(kind for kind in self.kinds for _ in range(pos)), "target"],
                "layer": [*(layer for layer in self.layers for _ in range(pos)), -1],
                "pos": [*list(range(pos)) * count, query],
                "token": [*list(tokens) * count, tokens[query]],
                "weight": [*weights.flatten().tolist(), float(total)],
                "bias": [*biases.flatten().tolist(), float(constant)],
                "entering": [*entering.flatten().tolist(), float(final.abs().sum())],
            }
        )
        self.edges = self._large()
        self._check_count(MOST_EDGES)
        source, end, weight = (upcast(torch.cat(column)).cpu().numpy() for column in zip(*self.edges, strict=True))
        edges = pd.DataFrame({"source": source, "target": end, "weight": weight})
        residual = max(abs(value - float(total)) for value in reached) / max(size, torch.finfo(weights.dtype).tiny)
        return ContributionGraph(
            nodes, edges, self.asked.label, float(total), float(constant), residual, self.asked.soft_cap
        )

    # ------------------------------------------------------------------ nodes

    def _node(self, name: str, kind: str, layer: int) -> int:
        self.names.append(name)
        self.kinds.append(kind)
        self.layers.append(layer)
        if kind in ("embedding", "bias", "whitening"):
            self.biases.append(self.pulled.stream[0].new_zeros(self.pulled.stream[0].shape[2]))
        return len(self.names) - 1

    def _bias(self, name: str, layer: int, bias: Tensor, met: Tensor) -> Float[Tensor, "1 pos d_model"]:
        bias = bias.expand_as(met[0])
        self._node(name, "bias", layer)
        self.weights.append((bias * met[0])[0].sum(-1))
        return bias

    def _leave(self, sublayer: Sublayer, hidden: Tensor, met: Tensor) -> Float[Tensor, "node pos d_model"]:
        """The sublayer's nodes: their weights, their own biases, and what they wrote."""
        own = torch.zeros_like(hidden) if sublayer.read.bias.ndim == 0 else sublayer.read.bias.expand_as(hidden)
        for name, weight, bias in zip(
            sublayer.nodes,
            sublayer.split(met[0, 0] * hidden[0]).sum(-1).T,
            sublayer.split(met[0, 0] * own[0]).sum(-1).T,
            strict=True,
        ):
            kind = "head" if sublayer.is_attention else "mixer" if sublayer.is_mixer else "mlp"
            self._node(name, kind, sublayer.layer)
            self.weights.append(weight)
            self.biases.append(bias)
        return sublayer.outputs(hidden)[:, 0]

    # ------------------------------------------------------------------ edges

    def _enter(self, sublayer: Sublayer, met: Tensor, outputs: Float[Tensor, "source pos d_model"]) -> None:
        """Edges from every source so far into the sublayer's nodes."""
        first, pos, sources = len(self.names), outputs.shape[1], outputs.shape[0]
        at, carried = torch.arange(pos, device=outputs.device), torch.tensor(self.carried, device=outputs.device)
        if sublayer.is_mixer:
            self._enter_mixing(first, sublayer.read, met[0, 0], outputs)
            return
        if not sublayer.is_attention:
            parts = sublayer.split(met)
            for node in range(len(sublayer.nodes)):
                weights = (outputs * sublayer.read_of(node).pull(parts[..., node, :])[0, 0]).sum(-1)
                self.entering[first + node] = weights.abs().sum(0)
                self._keep(carried[:, None] * pos + at, (first + node) * pos + at, weights)
            return
        *before, mix = sublayer.read.stages
        assert isinstance(mix, Attention)
        values = rearrange(Chain(tuple(before)).push(outputs[:, None])[:, 0], "m k (kv d) -> kv m k d", kv=mix.kv_heads)
        asked = sublayer.split(met[0, 0])
        chunk = max(1, EDGE_BYTES // (pos * pos * outputs.element_size()))
        for head in range(len(sublayer.nodes)):
            self.entering[first + head] = torch.zeros(pos).to(outputs)
            own = values[head // (len(sublayer.nodes) // mix.kv_heads)]
            for start in range(0, sources, chunk):
                weights = mix.pattern[0, head] * (
                    asked[:, head] @ own[start : start + chunk].mT
                )  # [source, query, key]
                self.entering[first + head] += weights.abs().sum((0, 2))
                source = carried[start : start + len(weights)] * pos
                self._keep(source[:, None, None] + at, (first + head) * pos + at[:, None], weights)

    def _through(self, number: int, outputs: Float[Tensor, "source pos d_model"]) -> Float[Tensor, "1 pos d_model"]:
        """A step that mixes positions (whitening) as a node at every position: all that was written before ends there.

        Only so does an edge keep the position that it comes from.
        """
        step, met = self.asked.stream.steps[number], self.pulled.stream[number + 1][0, 0]
        made = self.asked.stream.x[number + 1][0]
        node = self._node(step.outer_name, "whitening", step.layer)
        self.weights.append((met * made).sum(-1))
        self._enter_mixing(node, step.outer, met, outputs)
        self.carried = [node]
        return made[None]

    def _enter_mixing(
        self,
        node: int,
        m: AffineMap,
        met: Float[Tensor, "pos width"],
        outputs: Float[Tensor, "source pos d_model"],
    ) -> None:
        """Edges from every position into a node that mixes positions without a pattern, a few queries at a time."""
        pos, width = met.shape
        self.entering[node] = torch.zeros(pos).to(outputs)
        at, carried = torch.arange(pos, device=met.device), torch.tensor(self.carried, device=met.device)
        chunk = max(1, EDGE_BYTES // ((len(outputs) + 3 * width) * pos * outputs.element_size()))
        for start in range(0, pos, chunk):
            queries = at[start : start + chunk]
            rows = place(met[queries][:, None], queries[:, None], met[None])
            weights = torch.einsum("qkd,mkd->mqk", m.pull(rows)[:, 0], outputs)
            self.entering[node][queries] = weights.abs().sum((0, 2))
            self._keep(carried[:, None, None] * pos + at, node * pos + queries[:, None], weights)

    def _keep(self, source: Tensor, target: Tensor, weights: Tensor) -> None:
        """Note the edges that are worth it; numbers of nodes broadcast to `weights`."""
        sizes = weights.abs()
        self.largest = max(self.largest, float(sizes.max()))
        kept = (sizes >= self.threshold * self.largest) & (sizes > 0)
        self.edges.append((source.expand_as(weights)[kept], target.expand_as(weights)[kept], weights[kept]))
        count = sum(len(edge[2]) for edge in self.edges)
        if count > 4 * MOST_EDGES:  # the largest edge may come late, and with it what the threshold means
            self.edges = self._large()
            self._check_count(4 * MOST_EDGES)

    def _check_count(self, most: int) -> None:
        if sum(len(edge[2]) for edge in self.edges) > most:
            raise SizeError(
                f"contribution_graph: more than {most:,} edges are at least {self.threshold:g} of the largest "
                f"so far. Raise threshold={self.threshold:g}, shorten the prompt, or raise "
                "tensorlens_tl.circuits.graph.MOST_EDGES."
            )

    def _large(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The edges that are still large beside the largest, which may have come late."""
        source, target, weights = (torch.cat(column) for column in zip(*self.edges, strict=True))
        large = weights.abs() >= self.threshold * self.largest
        return [(source[large], target[large], weights[large])]
