"""Contribution graphs: a logit as a weighted graph of heads, MLPs, neurons, embeddings and biases."""

import re
from ast import literal_eval
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tensorlens_tl._arguments import Number, check_choice, real_number
from tensorlens_tl.drawing import figure, graphs, terminal
from tensorlens_tl.drawing.marks import number, visible
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import exchange
from tensorlens_tl.results.circuit import HEAD, READS
from tensorlens_tl.results.entry import Entry, largest, number_of
from tensorlens_tl.results.exchange import SharedGraph
from tensorlens_tl.results.scores import Parts

if TYPE_CHECKING:
    import networkx
    import pandas as pd

SHOWN_EDGES = 60
"""How many edges a picture shows; more become unreadable."""

COVERED = 0.8
"""The share of the target that a picture's nodes should carry; a picture with less is marked as partial."""

MOST_SHOWN = 600
"""How many nodes a page can handle."""

NUMBERS = {
    "nodes": ("layer", "pos", "part", "weight", "bias", "entering", "attends", "attention"),
    "edges": ("source", "target", "weight"),
}
WORDS = ("name", "kind", "token")
BANDS = {
    "head": "heads",
    "mlp": "MLPs",
    "neuron": "MLPs",
    "mixer": "mixers",
    "feature": "features",
    "error": "features",
}
KINDS = ("embedding", "whitening", "head", "mixer", "mlp", "neuron", "feature", "error", "bias")


@dataclass(frozen=True, eq=False)
class ContributionGraph(SharedGraph):
    """A logit as a weighted graph, from `circuits.contribution_graph`.

    `plot` and `to_html` draw k edges. `top` and `show` list k nodes, of all kinds or of one `kind`.

    Attributes:
        nodes: one row per node, the target last: `name`, `kind` (embedding, whitening, head, mixer, mlp, neuron,
            feature, error, bias, target), `layer` (-1 for none), `pos`, `token`, `part` (index of a neuron or feature,
            or the position that a part of a head reads; -1 for none), `weight`, `bias` (its own bias in that weight),
            `entering` (Σ abs of all incoming edges, kept or not), and for heads `attends`, the position with the most
            attention (-1 for none), and `attention`, how much; in a difference, in the first run.
        edges: `source`, `target` (row numbers of `nodes`) and `weight`.
        target: what is explained.
        total: the model's own logit, before any final soft cap.
        constant: the contribution of b_U.
        gap: the larger of two gaps from the total: of the target's incoming edges plus `constant`, and of all sources.
        soft_cap: the cap that the model applies to the logit, or None.
        tokens, token_ids: those of the whole prompt; no ids if the input is not text.
        n_layers, d_vocab: sizes of the model; d_vocab is 0 if it predicts no tokens.
        token_id, probability: those of the target if it is a token's logit; otherwise None.
        provenance: model name, class, TransformerLens version, weight processing, dtype.
        labels: alternative names of nodes, such as a dictionary's descriptions of features.
        rest: the kept nodes' input from omitted ones: rows of kind, layer, the node's row in `nodes`, and amount.
    """

    TENSORS: ClassVar = tuple(f"{table}.{column}" for table, columns in NUMBERS.items() for column in columns)
    FACTS: ClassVar = ("target", "total", "constant", "gap")

    HEADING: ClassVar = "How the {} comes about"
    DRAWN: ClassVar = SHOWN_EDGES

    nodes: "pd.DataFrame"
    edges: "pd.DataFrame"
    target: str
    total: float
    constant: float
    gap: float
    soft_cap: float | None = None
    tokens: Sequence[str] = ()
    token_ids: Sequence[int] = ()
    n_layers: int = 0
    d_vocab: int = 0
    token_id: int | None = None
    probability: float | None = None
    provenance: Mapping[str, str] = field(default_factory=dict[str, str])
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    rest: Sequence[Sequence[Any]] = ()

    def __repr__(self) -> str:
        return (
            f"ContributionGraph({self.target!r}: {len(self.nodes)} nodes, {len(self.edges)} edges, "
            f"total={self.total:.4g}, completeness={self.completeness:.2f}, gap={self.gap:.1e})"
        )

    @property
    def completeness(self) -> float:
        """The share of the kept nodes' input that the kept edges carry, weighted by the nodes' abs(weight).

        It is 1 if every edge is kept (cf. the completeness of attribution graphs).
        """
        entering, weight = (self.nodes[column].to_numpy(float) for column in ("entering", "weight"))
        sizes = np.abs(self.edges["weight"].to_numpy(float))
        inflow = np.bincount(self.edges["target"].to_numpy(int), weights=sizes, minlength=len(entering))
        inner = entering > 0
        share = np.minimum(inflow[inner] / entering[inner], 1.0)
        weight = np.abs(weight[inner])
        if not weight.any():
            return 1.0
        return float((share * weight).sum() / weight.sum())

    @property
    def coverage(self) -> float:
        """The share of the target's input, Σ abs, that comes from kept nodes over kept edges."""
        entering = float(self.nodes["entering"].iloc[-1])
        if not entering:
            return 1.0
        into = self.edges["target"].to_numpy(int) == len(self.nodes) - 1
        return min(1.0, float(np.abs(self.edges["weight"].to_numpy(float)[into]).sum()) / entering)

    @property
    def others(self) -> np.ndarray:
        """Each node's input from omitted nodes and edges: its weight less its kept edges and its bias.

        Zero for embeddings, biases and others, which have no input.
        """
        weights, biases = (self.nodes[column].to_numpy(float) for column in ("weight", "bias"))
        ends = self.edges["target"].to_numpy(int)
        entered = np.bincount(ends, weights=self.edges["weight"].to_numpy(float), minlength=len(weights))
        sources = np.isin(self.nodes["kind"].tolist(), ["embedding", "bias", "others"])
        return np.where(sources, 0.0, weights - biases - entered)

    @property
    def reads(self) -> list[str]:
        """The input that every edge feeds: a head's values, queries, keys or gate; empty for other nodes."""
        names = zip(self.nodes["name"].tolist(), self.nodes["kind"].tolist(), strict=True)
        of_nodes = [_read_by(name) if kind == "head" else "" for name, kind in names]
        return [of_nodes[number] for number in self.edges["target"].tolist()]

    def prune(self, share: Number = 0.8) -> "ContributionGraph":
        """Keep the largest edges that together carry `share` of all edges' size, if they are on a path to the target.

        Raises:
            InvalidInputError: a share outside (0, 1].

        >>> graph = tlens.circuits.contribution_graph(frozen, " value", threshold=0.1)
        >>> len(graph.prune(0.5).edges) <= len(graph.edges)
        True
        """
        words = "the share of the edges' size to keep, above 0 and at most 1"
        share = real_number("share", share, lambda x: 0 < x <= 1, words)
        sizes = np.abs(self.edges["weight"].to_numpy(float))
        order = sizes.argsort()[::-1]
        large = np.zeros(len(sizes), dtype=bool)
        large[order] = sizes[order].cumsum() - sizes[order] < share * sizes.sum()
        source, target = (self.edges[column].to_numpy(int) for column in ("source", "target"))
        reached = np.zeros(len(self.nodes), dtype=bool)
        reached[-1] = True
        count = 0
        while count != reached.sum():  # walk backwards from the target until no new node is reached
            count = reached.sum()
            reached[source[large & reached[target]]] = True
        return self._with(reached, large & reached[target])

    def _with(self, nodes: np.ndarray, edges: np.ndarray) -> "ContributionGraph":
        """Keep some of the nodes and of the edges between them; contributions of omitted nodes are added to `rest`."""
        import pandas as pd

        new_number = nodes.cumsum() - 1
        chosen = self.edges.loc[edges].reset_index(drop=True)
        source, target = (self.edges[end].to_numpy(int) for end in ("source", "target"))
        left = ~nodes[source] & nodes[target]
        sources = self.nodes.iloc[source[left]]
        dropped = sources[["kind", "layer"]].assign(
            node=target[left], weight=self.edges["weight"].to_numpy(float)[left]
        )
        keys = ["kind", "layer", "node"]
        rest = pd.concat([pd.DataFrame(list(self.rest), columns=dropped.columns), dropped])
        sums = rest[nodes[rest["node"].to_numpy(int)]].groupby(keys, sort=False)["weight"].sum()
        rows = [(kind, int(layer), int(new_number[node]), of) for (kind, layer, node), of in sums.items()]
        ends = {end: new_number[chosen[end].to_numpy(int)] for end in ("source", "target")}
        return replace(self, nodes=self.nodes[nodes].reset_index(drop=True), edges=chosen.assign(**ends), rest=rows)

    def _parts(self, *, kind: str | None = None) -> Parts:
        """Return the nodes except the target, of all kinds or of one `kind`."""
        nodes = self.nodes.iloc[:-1]
        if kind is not None:
            check_choice("top: kind", kind, KINDS)
            nodes = nodes[nodes["kind"] == kind]
        weights = torch.tensor(nodes["weight"].to_numpy(float))
        return Parts(weights, nodes["name"].tolist(), nodes["pos"].tolist(), self.labels)

    def inputs(self, name: str, position: int | None = None, k: int = 10) -> list[Entry]:
        """Return the k largest edges into a node; all of them and its bias sum to its weight.

        Args:
            name: the node's name as in `top`, or ``"target"``.
            position: the node's position, needed if several positions share the name.
            k: how many edges.

        Raises:
            InvalidInputError: no such node, several of them, or k below 1.
        """
        return self._ends(name, position, k, "target", "source")

    def outputs(self, name: str, position: int | None = None, k: int = 10) -> list[Entry]:
        """Return the k largest edges out of a node, named by their destinations; see `inputs`."""
        return self._ends(name, position, k, "source", "target")

    def _ends(self, name: str, position: int | None, k: int, near_end: str, far_end: str) -> list[Entry]:
        names = self.nodes["name"].to_numpy()
        positions = self.nodes["pos"].to_numpy(int)
        matches = np.flatnonzero((names == name) & ((positions == position) | (position is None)))
        if len(matches) != 1:
            known = positions[names == name].tolist()
            node = f"node {name!r}"
            if position is not None:
                node += f" at {position}"
            if known:
                raise InvalidInputError(f"{node}: it occurs at positions {known}; pass one of them.")
            raise InvalidInputError(f"{node}: this graph has no such node; top() names the largest.")
        chosen = self.edges[near_end].to_numpy(int) == matches[0]
        ends = self.edges[far_end].to_numpy(int)[chosen]
        weights = torch.tensor(self.edges["weight"].to_numpy(float)[chosen])
        return largest(weights, names[ends].tolist(), k, positions[ends].tolist(), self.labels)

    def _print(self, k: int, *, kind: str | None = None) -> None:
        rows = [(entry.labelled, str(entry.position), number(entry.score)) for entry in self.top(k, kind=kind)]
        title = f"nodes of {self.target} = {number(self.total)}, {len(rows)} of {len(self.nodes) - 1} shown"
        terminal.show_table(title, ("node", "position", "weight"), rows, left=("node",))

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per edge, largest first: name, position and token of both ends, weight, `reads`, and `target`.

        Here `target` is the graph's target; in `edges` and in other tools' formats it is an edge's end, as in networkx.

        >>> graph = tlens.circuits.contribution_graph(frozen, " value", threshold=0.1)
        >>> len(graph.to_dataframe()) == len(graph.edges)
        True
        """
        import pandas as pd

        weight = self.edges["weight"].to_numpy(float)
        order = np.abs(weight).argsort()[::-1]
        columns: dict[str, Any] = {}
        for end, name in (("source", "source"), ("target", "destination")):
            rows = self.nodes.iloc[self.edges[end].to_numpy(int)[order]]
            columns |= {name: rows["name"].tolist(), f"{name}_pos": rows["pos"].tolist()}
            columns[f"{name}_token"] = rows["token"].tolist()
        columns |= {"weight": weight[order], "reads": np.array(self.reads, dtype=object)[order]}
        columns["target"] = self.target
        return pd.DataFrame(columns)

    def to_networkx(self) -> "networkx.DiGraph":
        """Return a networkx graph with all columns of `nodes` and `edges`, and `reads`, as attributes.

        The graph's own attributes are `target`, `total`, `constant`, `gap` and every entry of `provenance`. (networkx
        comes with torch.)
        """
        import networkx

        graph = networkx.DiGraph(target=self.target, total=self.total, constant=self.constant, gap=self.gap)
        graph.graph.update(self.provenance)
        graph.add_nodes_from((number, dict(row)) for number, row in self.nodes.iterrows())
        edges = self.edges[["source", "target", "weight"]].itertuples(index=False, name=None)
        for (source, target, weight), reads in zip(edges, self.reads, strict=True):
            graph.add_edge(source, target, weight=weight, reads=reads)
        return graph

    def _traced(self) -> exchange.Traced:
        # a graph from an older file has no tokens other than those of its nodes
        of_nodes = dict(zip(self.nodes["pos"].tolist(), self.nodes["token"].tolist(), strict=True))
        tokens = list(self.tokens) or [of_nodes.get(pos, "") for pos in range(max(of_nodes) + 1)]
        nodes = self._exchanged()
        edges = self.edges[["source", "target", "weight"]].itertuples(index=False, name=None)
        links = [
            {"source": nodes[source]["node_id"], "target": nodes[target]["node_id"], "weight": weight, "reads": reads}
            for (source, target, weight), reads in zip(edges, self.reads, strict=True)
        ]
        if self.constant:
            *_, logit = nodes
            position = logit["ctx_idx"]
            number = -2 - len(nodes)  # not used by any other node
            level = str(self.n_layers)
            constant = exchange.node_of("b_U", "bias", level, position, number, self.constant, tokens[position])
            nodes.insert(-1, constant)
            source, target = constant["node_id"], logit["node_id"]
            links.append({"source": source, "target": target, "weight": self.constant, "reads": ""})
        inner = nodes[:-1]
        sizes = np.abs(np.array([node["activation"] for node in inner], dtype=float))
        order = sizes.argsort(kind="stable")[::-1]
        shares = sizes[order].cumsum() / (sizes.sum() or 1.0)
        for number, share in zip(order.tolist(), shares.tolist(), strict=True):
            inner[number]["influence"] = min(share, 1.0)
        what = "the frozen model"
        if self.target.startswith("change of"):
            what = "the difference of two runs"
        description = f"{self.target} = {self.total:.6g}: exact contributions of {what}"
        facts = {name: getattr(self, name) for name in ("target", "total", "constant", "gap", "completeness")}
        return exchange.Traced(nodes, links, tokens, description, {**facts, **self.provenance})

    def _exchanged(self) -> list[dict[str, Any]]:
        """Return every node in circuit-tracer's fields, the target last."""
        nodes = list[dict[str, Any]]()
        node_ids = set[str]()
        first: dict[int, str] = {}  # per layer, the dictionary that keeps its feature numbers
        numbers: dict[tuple[str, str], int] = {}  # numbers for nodes that are not features, distinct from any feature's
        columns = ["name", "kind", "layer", "pos", "token", "part", "weight", "bias"]
        rows = self.nodes[columns].itertuples(index=False, name=None)
        for name, kind, layer, pos, token, part, weight, bias in rows:
            if kind == "target":
                nodes.append(self._exchanged_target(pos, bias))
                continue
            level = "E" if kind == "embedding" else str(layer if layer >= 0 else self.n_layers)
            number = numbers.setdefault((level, name), -2 - len(numbers))
            type_ = exchange.FEATURE_TYPES[kind]
            if kind == "embedding" and name != "embed" and not name.endswith(" input"):
                type_ = "other embedding"  # circuit-tracer's page labels every ``embedding`` by its token alone
            node = exchange.node_of(name, type_, level, pos, number, weight, token, bias)
            node["clerp"] = f"{self.labelled(name)} at {visible(token)}"
            if type_ == "embedding":
                vocabulary = self.token_ids[pos] if len(self.token_ids) else pos
                node |= {"node_id": f"E_{vocabulary}_{pos}", "jsNodeId": f"E_{vocabulary}-{pos}", "feature": pos}
            elif kind in ("feature", "error"):
                dictionary = name.rpartition(".")[0]
                in_first = first.setdefault(layer, dictionary) == dictionary
                # an error keeps its long name if its short one is that of a feature in layer 0
                if kind == "error" and in_first and f"0_{layer}_{pos}" not in node_ids:
                    node |= {"node_id": f"0_{layer}_{pos}", "jsNodeId": f"{layer}_{pos}-0", "feature": -1}
                elif kind == "feature" and in_first and part >= 0:  # numbered as in circuit-tracer: layer and feature
                    node |= {"node_id": f"{layer}_{part}_{pos}", "jsNodeId": f"{layer}_{part}-0"}
                    node["feature"] = (layer + part) * (layer + part + 1) // 2 + part
                elif kind == "feature":
                    node["feature_type"] = "other features"
            node_ids.add(node["node_id"])
            nodes.append(node)
        return nodes

    def _exchanged_target(self, pos: int, bias: float) -> dict[str, Any]:
        """Return the target node. If it is not a single token, its id is d_vocab and its probability is 0."""
        layer = str(self.n_layers + 1)
        chance = self.probability or 0.0
        number = self.d_vocab if self.token_id is None else self.token_id
        token = self.target.removeprefix(number_of(self.target))
        with suppress(ValueError, SyntaxError):  # a single token is written as a Python literal
            token = str(literal_eval(token))
        return exchange.node_of("target", "logit", layer, pos, number, self.total, "", bias) | {
            "node_id": f"{layer}_{number}_{pos}",
            "jsNodeId": f"L_{number}-{pos}",
            "token_prob": chance,
            "is_target_logit": True,
            # circuit-tracer's page parses the token between the quotes, and p, from this text
            "clerp": 'Output "{}" (p={:.3f})'.format(token.replace('"', "”"), chance),
        }

    def _html(self, k: int, *, title: str = "") -> str:
        """Draw positions in columns and layers upwards, pruned to k edges and `MOST_SHOWN` nodes; note what is omitted.

        Scripts let readers hide small edges, see a node's inputs and outputs, zoom, and pin, group and search nodes.
        """
        small = self._small(k)._connected()
        least = float(np.abs(small.edges["weight"].to_numpy(float)).min(initial=np.inf))
        caption = f"{len(small.edges)} of {len(self.edges)} edges between {len(small.nodes)} of {len(self.nodes)} nodes"
        caption += f", which carry {small.coverage:.0%} of what enters the answer; all others are summed by layers"
        if small.coverage < COVERED:
            caption = f"partial: {caption}"
        sums = f"the graph with every edge sums to the logit to {self.gap:.1e}"
        return self._panel(graphs.graph(small.with_others(least)._picture()), title=title, notes=[caption, sums])

    def with_others(self, least: float = 0.0) -> "ContributionGraph":
        """Return the same graph with everything it omits summed into nodes of kind ``"others"``, before the target.

        Omitted heads and MLPs form up to three nodes each, by thirds of the layers; "smaller edges" are those between
        kept nodes. The input of any node is then its edges and its bias. The weight of a node of kind ``"others"`` is
        its edge into the target.

        Args:
            least: omit edges of these nodes that are smaller than this, except those into the target.

        >>> graph = tlens.circuits.contribution_graph(frozen, " value", nodes=5).with_others()
        >>> bool(abs(graph.others).max() < 1e-4)
        True
        """
        import pandas as pd

        last = len(self.nodes) - 1
        sums: dict[tuple[str, int, int], dict[int, float]] = {}
        left = self.others
        for kind, layer, node, weight in self.rest:
            into = sums.setdefault(_band(kind, layer, self.n_layers), {})
            into[node] = into.get(node, 0.0) + weight
            left[node] -= weight
        scale = 1e-6 * np.abs(self.nodes["weight"].to_numpy(float)).max(initial=0.0)
        ends = np.flatnonzero(np.abs(left) > scale)
        if len(ends):
            sums["smaller edges", -1, -1] = dict(zip(ends.tolist(), left[ends].tolist(), strict=True))
        shown = {
            band: {node: of for node, of in into.items() if abs(of) >= least or node == last}
            for band, into in sums.items()
        }
        sums = {band: sums[band] for band, into in shown.items() if into}
        if not sums:
            return self
        target = self.nodes.iloc[last:]
        count = len(sums)
        bands = pd.DataFrame(
            {
                "name": [_band_name(*band) for band in sums],
                "kind": "others",
                "layer": [start for _, start, _ in sums],
                "weight": [into.get(last, 0.0) for into in sums.values()],
            }
        )
        fixed = target.drop(columns=bands.columns).assign(bias=0.0, entering=0.0)
        bands = bands.join(pd.concat([fixed] * count, ignore_index=True))[list(self.nodes.columns)]
        rows = [(last + row, node, weight) for row, band in enumerate(sums) for node, weight in shown[band].items()]
        entering = pd.DataFrame(rows, columns=["source", "target", "weight"])
        edges = pd.concat([self.edges, entering.assign(source=-1 - entering["source"])], ignore_index=True)
        for end in ("source", "target"):  # the target moves behind the new nodes
            numbers = edges[end].to_numpy(int)
            edges[end] = np.where(numbers == last, last + count, np.where(numbers < 0, -1 - numbers, numbers))
        nodes = pd.concat([self.nodes.iloc[:last], bands, target], ignore_index=True)
        return replace(self, nodes=nodes, edges=edges, rest=())

    def drawn(self, shown: int | None = None) -> str:
        """Return the graph's picture as HTML, without style and script.

        Args:
            shown: how many edges are drawn at first, with a slider for the others; None draws all.

        >>> tlens.circuits.contribution_graph(frozen, " value", nodes=5).drawn().startswith("<div")
        True
        """
        return graphs.graph(self._picture(), shown=shown)

    def _figure(self, k: int, *, ax: Any) -> Any:
        return figure.graph(self._small(k)._connected()._picture(), self.heading, ax)

    def _connected(self) -> "ContributionGraph":
        """Return the nodes that have edges, and the target."""
        used = np.zeros(len(self.nodes), dtype=bool)
        used[-1] = True
        for end in ("source", "target"):
            used[self.edges[end].to_numpy(int)] = True
        return self._with(used, np.ones(len(self.edges), dtype=bool))

    def labelled(self, name: str) -> str:
        """Return a node's name, followed by its label if there is one."""
        return " · ".join(filter(None, [name, self.labels.get(name, "")]))

    def _picture(self) -> graphs.GraphPicture:
        nodes = self.nodes
        edges = self.edges
        return graphs.GraphPicture(
            names=[self.labelled(name) for name in nodes["name"]],
            kinds=nodes["kind"].tolist(),
            tokens=nodes["token"].tolist(),
            layers=nodes["layer"].tolist(),
            positions=nodes["pos"].tolist(),
            weights=nodes["weight"].tolist(),
            biases=nodes["bias"].tolist(),
            sources=edges["source"].to_numpy(int).tolist(),
            targets=edges["target"].to_numpy(int).tolist(),
            strengths=edges["weight"].tolist(),
            reads=self.reads,
            attended=self._attended(),
        )

    def _attended(self) -> list[str]:
        """Say for each head which token it attends to most: ``" ← John 73 %"``."""
        tokens = dict(zip(self.nodes["pos"].tolist(), self.nodes["token"].tolist(), strict=True))
        tokens |= dict(enumerate(self.tokens))
        columns = zip(self.nodes["attends"].tolist(), self.nodes["attention"].tolist(), strict=True)
        return [
            f" ← {visible(tokens.get(at, '')).strip()} {100 * share:.0f} %" if at >= 0 else "" for at, share in columns
        ]

    def _small(self, most: int) -> "ContributionGraph":
        """Return the largest prunable share of the edges, in steps of 1/4000, that a picture can handle."""

        def fits(graph: "ContributionGraph") -> bool:
            return len(graph.edges) <= most and len(graph.nodes) < MOST_SHOWN  # one more node sums up all others

        if fits(self):
            return self
        low = 0.0
        high = 1.0
        small = self.prune(1e-9)  # only the largest edge
        for _ in range(12):
            keep = (low + high) / 2
            candidate = self.prune(keep)
            if fits(candidate):
                low = keep
                small = candidate
            else:
                high = keep
        return small

    def _packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tables = {"nodes": self.nodes, "edges": self.edges}
        tensors = {
            f"{table}.{column}": torch.from_numpy(tables[table][column].to_numpy().copy())
            for table, columns in NUMBERS.items()
            for column in columns
        }
        words = {column: self.nodes[column].tolist() for column in WORDS}
        facts = {name: getattr(self, name) for name in (*self.FACTS, *self.LATER_FACTS)}
        return tensors, facts | {"words": words}

    @classmethod
    def _unpacked(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> "ContributionGraph":
        import pandas as pd

        nodes = {column: facts["words"][column] for column in WORDS}
        count = len(nodes["name"])
        none = torch.full((count,), -1)
        later = {"nodes.part": none, "nodes.attends": none, "nodes.attention": torch.zeros(count)}
        tensors = later | tensors  # older files lack them
        nodes |= {column: tensors[f"nodes.{column}"].numpy() for column in NUMBERS["nodes"]}
        edges = {column: tensors[f"edges.{column}"].numpy() for column in NUMBERS["edges"]}
        order = ["name", "kind", "layer", "pos", "token", "part", "weight", "bias", "entering", "attends", "attention"]
        values = {name: facts[name] for name in cls.FACTS}
        values |= {name: facts[name] for name in cls.LATER_FACTS if name in facts}
        return cls(pd.DataFrame(nodes, columns=order), pd.DataFrame(edges), **values)


def _band(kind: str, layer: int, n_layers: int) -> tuple[str, int, int]:
    """Return the group in which an omitted node is summed: its kind, and the first and last layer of a third."""
    what = BANDS.get(kind, kind)
    if layer < 0 or kind in ("embedding", "bias"):
        return "embeddings and biases", -1, -1
    third = ceil(max(n_layers, layer + 1) / 3)
    start = layer - layer % third
    return what, start, min(start + third, max(n_layers, layer + 1)) - 1


def _band_name(what: str, start: int, stop: int) -> str:
    if start < 0:
        return f"other {what}" if what != "smaller edges" else what
    layers = f"L{start}" if start == stop else f"L{start}–{stop}"
    return f"other {what} {layers}"


def _read_by(head: str) -> str:
    """Return the input for which a head's node is named: ``"keys"`` for ``"L1H3.k"``; in a single run, the values."""
    match = re.match(HEAD + r"\.([vqkg])(?!\w)", head)
    return READS[match[1] if match else "v"]
