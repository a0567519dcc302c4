"""Edges between the parts of a model with a score each, and circuits made of some of them.

An edge leads from what one node writes to what a later one reads. Nodes that write are *sources*: the first block's
input (``"embed"``), heads, MLPs. What reads are *destinations*: a head's queries, keys and values (``"L1H0.q"``,
``"L1H0.k"``, ``"L1H0.v"``), MLPs, and the target. An edge is called ``"L0H3 → L1H0.k"``.
"""

import heapq
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.drawing import terminal
from tensorlens_tl.drawing.marks import number
from tensorlens_tl.errors import FileFormatError, InvalidInputError
from tensorlens_tl.results.entry import Entry, check_batch
from tensorlens_tl.results.storage import Stored

if TYPE_CHECKING:
    import pandas as pd

ARROW = " → "
TARGET = "target"
BENCHMARK_NAMES = {"embed": "input", TARGET: "logits"}
CHOICES = ("top", "greedy")


@dataclass(frozen=True, eq=False, repr=False)
class EdgeScores(Stored):
    """A score for every edge and prompt: what the target loses when the edge carries its corrupted value.

    Attributes:
        sources, destinations: what the two axes are, in the order of the forward pass.
        scores: `[batch, source, destination]`, zero where there is no edge.
        exists: which pairs are edges, `[source, destination]`.
        clean, corrupted: the target's number for the two prompts, before any final soft cap, `[batch]`.
        target: what the scores explain, in words.
        method: how they were made.
        config: `n_layers`, `n_heads`, `d_model` and `parallel_attn_mlp`, for files.
        by_position: each edge at each position where its destination reads, `[batch, source, destination, pos]`; None
            where not asked for.
    """

    TENSORS: ClassVar = ("scores", "exists", "clean", "corrupted", "by_position")
    FACTS: ClassVar = ("sources", "destinations", "target", "method", "config")

    sources: list[str]
    destinations: list[str]
    scores: Float[Tensor, "batch source destination"]
    exists: Bool[Tensor, "source destination"]
    clean: Float[Tensor, "batch"]
    corrupted: Float[Tensor, "batch"]
    target: str
    method: str
    config: dict[str, Any] = field(default_factory=dict)
    by_position: Float[Tensor, "batch source destination pos"] | None = None

    def __post_init__(self) -> None:
        _check_shape(self.sources, self.destinations, self.exists, next(iter(self.scores), self.scores))

    def __len__(self) -> int:
        return int(self.exists.sum())

    def __repr__(self) -> str:
        return f"EdgeScores({len(self)} edges, {len(self.scores)} prompts, {self.target!r}, method={self.method!r})"

    def __getitem__(self, edge: Any) -> Float[Tensor, "batch"]:
        """One edge's score for every prompt.

        Raises:
            InvalidInputError: no such edge.
        """
        if not isinstance(edge, str):
            some = ARROW.join((self.sources[0], self.destinations[0]))
            raise InvalidInputError(f"no edge {edge!r}; edges are called by name, as {some!r}.")
        source, _, destination = edge.partition(ARROW)
        if source not in self.sources or destination not in self.destinations:
            some = ARROW.join((self.sources[0], self.destinations[0]))
            raise InvalidInputError(f"no edge {edge!r}; edges are called as {some!r}.")
        pair = self.sources.index(source), self.destinations.index(destination)
        if not self.exists[pair]:
            raise InvalidInputError(f"no edge {edge!r}: {source} does not come before {destination}.")
        return self.scores[(slice(None), *pair)]

    def top(self, k: int = 10, batch: int | None = None) -> list[Entry]:
        """The k edges of largest absolute score, of one prompt, or (None) of the mean over prompts.

        >>> corrupted = tlens.freeze(model, "Return the name. Return the")
        >>> edges = tlens.circuits.edge_scores(frozen, corrupted, " value", " name")
        >>> len(edges.top(3))
        3
        """
        scores = self._row(batch)
        order = edge_order(scores, self.exists, self.sources, self.destinations)[: whole_number("k", k, least=1)]
        return [Entry(self._name(edge), float(scores.flatten()[edge])) for edge in order.tolist()]

    def circuit(self, edges: Any, batch: int | None = None, *, absolute: bool = True, choice: str = "top") -> "Circuit":
        """The circuit of so many edges, without those that no path from the input to the target goes through.

        Args:
            edges: how many are chosen, before pruning.
            batch: by one prompt's scores, or (None) by the mean over prompts.
            absolute: choose by size; else by score, the most positive first.
            choice: ``"top"`` takes the best edges wherever they are, ``"greedy"`` the best of those that lead into
                what is already reached, from the target backwards.

        Raises:
            InvalidInputError: more edges than there are, or no such choice or prompt.

        >>> corrupted = tlens.freeze(model, "Return the name. Return the")
        >>> edges = tlens.circuits.edge_scores(frozen, corrupted, " value", " name")
        >>> edges.circuit(5)
        Circuit(5 of 479 edges, 4 nodes)
        """
        edges = whole_number("edges", edges, 0, len(self), why=f"this model has {len(self)} edges")
        scores = self._row(batch)
        order = edge_order(scores, self.exists, self.sources, self.destinations, absolute=absolute, choice=choice)
        selection = torch.zeros_like(self.exists)
        selection.view(-1)[order[:edges]] = True
        selection = pruned(selection, self.sources, self.destinations)
        return Circuit(self.sources, self.destinations, scores, self.exists, selection, self.config)

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per prompt and edge: batch, source, destination, score."""
        import pandas as pd

        source, destination = (numbers.tolist() for numbers in self.exists.nonzero(as_tuple=True))
        rows = self.scores[:, source, destination].double().cpu()
        return pd.DataFrame(
            {
                "batch": [batch for batch in range(len(rows)) for _ in source],
                "source": [self.sources[number] for number in source] * len(rows),
                "destination": [self.destinations[number] for number in destination] * len(rows),
                "score": rows.flatten().tolist(),
            }
        )

    def show(self, k: int = 10, batch: int | None = None) -> None:
        """Print the k edges of largest absolute score."""
        rows = [(entry.name, number(entry.score)) for entry in self.top(k, batch)]
        of = f"prompt {batch}"
        if batch is None:
            of = f"mean of {len(self.scores)} prompts"
        title = f"{self.target} · {self.method} · {of}"
        terminal.show_table(title, ("edge", "score"), rows, [], left=("edge",))

    def _row(self, batch: int | None) -> Float[Tensor, "source destination"]:
        if batch is None:
            return self.scores.mean(0)
        check_batch(batch, list(self.scores))
        return self.scores[batch]

    def _name(self, edge: int) -> str:
        source, destination = divmod(edge, len(self.destinations))
        return self.sources[source] + ARROW + self.destinations[destination]


@dataclass(frozen=True, eq=False, repr=False)
class Circuit:
    """Some edges of a model. Everything else is to carry what it carries for the corrupted prompt.

    Attributes:
        sources, destinations, exists: as of `EdgeScores`.
        scores: by which it was chosen, `[source, destination]`.
        selection: which edges are in it, `[source, destination]`.
        config: `n_layers`, `n_heads`, `d_model` and `parallel_attn_mlp`.
    """

    sources: list[str]
    destinations: list[str]
    scores: Float[Tensor, "source destination"]
    exists: Bool[Tensor, "source destination"]
    selection: Bool[Tensor, "source destination"]
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_shape(self.sources, self.destinations, self.exists, self.scores, self.selection)
        if bool((self.selection & ~self.exists).any()):
            raise InvalidInputError("Circuit: its selection has a pair that is no edge.")

    def __len__(self) -> int:
        return int(self.selection.sum())

    def __repr__(self) -> str:
        return f"Circuit({len(self)} of {int(self.exists.sum())} edges, {len(self.nodes)} nodes)"

    @property
    def edges(self) -> list[str]:
        """The names of its edges."""
        pairs = self.selection.nonzero().tolist()
        return [self.sources[source] + ARROW + self.destinations[destination] for source, destination in pairs]

    @property
    def nodes(self) -> list[str]:
        """The sources that an edge of it leads from."""
        return [name for name, used in zip(self.sources, self.selection.any(1).tolist(), strict=True) if used]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the JSON of the Mechanistic Interpretability Benchmark (Mueller et al. 2025).

        An object with `cfg`, `nodes` (name → ``{"in_graph": …}``) and `edges` (name →
        ``{"score": …, "in_graph": …}``); nodes are called ``input``, ``a0.h1``, ``m0``, ``logits``, edges
        ``a0.h1->m0`` or, into a head, ``input->a0.h1<q>``.

        Raises:
            InvalidInputError: no such folder, an infinite score, or a node that the benchmark has no name for. A score
                that is NaN is written as null.
        """
        path = Path(path)
        if not path.parent.is_dir():
            raise InvalidInputError(f"save: there is no folder {path.parent}.")
        sources = [_benchmark_name(name) for name in self.sources]
        destinations = [_benchmark_name(name) for name in self.destinations]
        used = set(self.nodes)
        nodes = {
            benchmark_name: {"in_graph": name in used}
            for benchmark_name, name in zip(sources, self.sources, strict=True)
        }
        if bool(self.scores[self.exists].isinf().any()):
            raise InvalidInputError("save: some scores are infinite, which JSON has no number for.")
        scores = self.scores.tolist()
        selection = self.selection.tolist()
        edges = {
            f"{sources[s]}->{destinations[d]}": {
                "score": scores[s][d],
                "in_graph": selection[s][d],
            }
            for s, d in self.exists.nonzero().tolist()
        }
        for edge in edges.values():
            if isnan(edge["score"]):
                edge["score"] = None
        content = {"cfg": self.config, "nodes": nodes | {"logits": {"in_graph": True}}, "edges": edges}
        path.write_text(json.dumps(content, allow_nan=False), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Circuit":
        """Read such a file, ours or the benchmark's. Scores and edges of neurons are not read; null is NaN.

        Raises:
            FileFormatError: no such JSON, or one without all edges of its nodes, those outside the circuit as well.
            OSError: there is no such file.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            content = json.loads(text)
            config = dict(content["cfg"])
            edges = dict(content["edges"])
            sources = ["embed", *(_library_name(n) for n in content["nodes"] if n not in ("input", "logits"))]
            pairs = [tuple(map(_library_name, name.split("->"))) for name in edges]
            destinations = sorted({end for _, end in pairs}, key=_place)
            sources.sort(key=_place)
            exists = torch.zeros(len(sources), len(destinations), dtype=torch.bool)
            selection = exists.clone()
            scores = torch.zeros(exists.shape, dtype=torch.float64)
            for (source, destination), edge in zip(pairs, edges.values(), strict=True):
                pair = sources.index(source), destinations.index(destination)
                exists[pair] = True
                selection[pair] = _truth(edge["in_graph"], "in_graph")
                scores[pair] = _score(edge["score"])
            parallel = "parallel_attn_mlp" in config and _truth(config["parallel_attn_mlp"], "parallel_attn_mlp")
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FileFormatError(
                f"{path}: not a circuit in the benchmark's JSON ({type(error).__name__}: {error})."
            ) from error
        _check_all_edges(path, sources, pairs, parallel)
        return cls(sources, destinations, scores, exists, selection, config)


def _truth(value: Any, name: str) -> bool:
    """JSON's true or false.

    Raises:
        TypeError: anything else; the text "false" would count as true.
    """
    if not isinstance(value, bool):
        raise TypeError(f'"{name}" is {value!r}, not true or false')
    return value


def _score(value: Any) -> float:
    """A finite number, or NaN for null.

    Raises:
        TypeError: no number.
        ValueError: one that is not finite, such as 1e999.
    """
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f'"score" is {value!r}, not a number or null')
    if not isfinite(value):
        raise ValueError(f'"score" is {value!r}, which no JSON holds')
    return float(value)


# ------------------------------------------------------------------ choosing


def edge_order(
    scores: Float[Tensor, "source destination"],
    exists: Bool[Tensor, "source destination"],
    sources: Sequence[str],
    destinations: Sequence[str],
    *,
    absolute: bool = True,
    choice: str = "top",
) -> Int[Tensor, "edge"]:
    """All edges in the order in which circuits take them in, by their number in the flattened matrix; see `EdgeScores`.

    Raises:
        InvalidInputError: no such choice, or scores that are not finite.
    """
    if choice not in CHOICES:
        raise InvalidInputError(f"choice={choice!r}; use one of {', '.join(map(repr, CHOICES))}.")
    if not bool(torch.isfinite(scores[exists]).all()):
        raise InvalidInputError("edges: some of their scores are not finite, so that they have no order.")
    size = scores
    if absolute:
        size = scores.abs()
    edges = exists.flatten().nonzero()[:, 0]
    by_size = edges[size.flatten()[edges].argsort(descending=True, stable=True)]
    if choice == "top":
        return by_size
    width = len(destinations)
    node_of = [node_read_at(name) for name in destinations]
    into: dict[str, list[int]] = {}
    for edge in by_size.tolist():
        into.setdefault(node_of[edge % width], []).append(edge)
    flat = size.flatten().tolist()
    waiting = [(-flat[edge], edge) for edge in into[TARGET]]
    heapq.heapify(waiting)
    reached = {TARGET}
    order = list[int]()
    while waiting:
        _, edge = heapq.heappop(waiting)
        order.append(edge)
        source = sources[edge // width]
        if source not in reached:
            reached.add(source)
            for other in into.get(source, ()):
                heapq.heappush(waiting, (-flat[other], other))
    return torch.tensor(order, device=scores.device)


def pruned(
    selection: Bool[Tensor, "*row source destination"], sources: Sequence[str], destinations: Sequence[str]
) -> Bool[Tensor, "*row source destination"]:
    """A selection of edges without those that no path from the input to the target uses; for many circuits at once."""
    node_of = [node_read_at(name) for name in destinations]
    entries = torch.tensor(
        [[node == name for node in node_of] for name in sources], device=selection.device
    )  # [source, destination]: what the node reads at
    fed = torch.zeros(selection.shape[:-1], dtype=torch.bool, device=selection.device)
    fed[..., 0] = True
    for source in range(1, len(sources)):  # in the order of the forward pass: what feeds a node is known before it
        fed[..., source] = (selection[..., entries[source]] & fed[..., None]).flatten(-2).any(-1)
    used = torch.zeros_like(fed)
    to_target = torch.tensor([name == TARGET for name in node_of], device=selection.device)
    for source in reversed(range(len(sources))):
        is_used = (used[..., None, :] & entries.T).any(-1) | to_target  # destinations whose node is used
        used[..., source] = (selection[..., source, :] & is_used).any(-1)
    ends = (used[..., None, :] & fed[..., None, :] & entries.T).any(-1) | to_target
    return selection & (fed & used)[..., None] & ends[..., None, :]


# ------------------------------------------------------------------ names


def node_read_at(destination: str) -> str:
    """The node that a destination belongs to: ``"L0H3"`` of ``"L0H3.q"``."""
    return re.sub(r"(H\d+)\.[qkv]$", r"\1", destination)


def _check_shape(sources: Sequence[str], destinations: Sequence[str], *matrices: Tensor) -> None:
    shape = (len(sources), len(destinations))
    for matrix in matrices:
        if tuple(matrix.shape) != shape:
            raise InvalidInputError(f"edges: a matrix is {tuple(matrix.shape)}, not {shape} of sources, destinations.")


def _check_all_edges(
    path: str | os.PathLike[str], sources: Sequence[str], pairs: Sequence[tuple[str, ...]], parallel: bool
) -> None:
    """Refuse a file whose edges are not those of its nodes: every node to whatever comes later.

    Raises:
        FileFormatError: some are missing, or some lead backwards.
    """
    ends = [TARGET]
    for name in sources[1:]:
        if name.startswith("MLP"):
            ends.append(name)
        else:
            ends += [f"{name}.{letter}" for letter in "qkv"]

    def step(name: str) -> tuple[int, int]:
        layer, mlp, *_ = _place(name)
        if parallel:
            return layer, 0
        return layer, mlp

    expected = {(source, end) for end in ends for source in sources if step(source) < step(end)}
    if missing := expected - set(pairs):
        some = ARROW.join(min(missing))
        raise FileFormatError(
            f"{path}: {len(missing)} of the {len(expected)} edges between its nodes are missing, such as {some!r}. A "
            'circuit\'s file lists every edge of the model, those outside the circuit with "in_graph": false.'
        )
    if wrong := set(pairs) - expected:
        raise FileFormatError(
            f"{path}: {ARROW.join(min(wrong))!r} is no edge: what it leads from does not come before what it leads to."
        )


def _benchmark_name(name: str) -> str:
    """``"L0H3.q"`` as ``"a0.h3<q>"``, ``"MLP1"`` as ``"m1"``, the first block's input as ``"input"``."""
    if name in BENCHMARK_NAMES:
        return BENCHMARK_NAMES[name]
    head = re.fullmatch(r"L(\d+)H(\d+)(?:\.([qkv]))?", name)
    mlp = re.fullmatch(r"MLP(\d+)", name)
    if mlp is not None:
        return f"m{mlp[1]}"
    if head is None:
        raise InvalidInputError(f"save: the benchmark's files have heads and MLPs only, and no name for {name!r}.")
    node = f"a{head[1]}.h{head[2]}"
    if head[3]:
        return f"{node}<{head[3]}>"
    return node


def _library_name(name: str) -> str:
    """The library's name of one of the benchmark's nodes: the inverse of `_benchmark_name`.

    Raises:
        ValueError: no such name.
    """
    for library_name, benchmark_name in BENCHMARK_NAMES.items():
        if name == benchmark_name:
            return library_name
    match = re.fullmatch(r"a(\d+)\.h(\d+)(?:<([qkv])>)?|m(\d+)", name)
    if match is None:
        raise ValueError(f"no node {name!r}")
    layer, head, letter, mlp = match.groups()
    if mlp is not None:
        return f"MLP{mlp}"
    return ".".join(filter(None, [f"L{layer}H{head}", letter]))


def _place(name: str) -> tuple[int, int, str, int]:
    """Where a name comes in the order of the forward pass: queries of a layer, keys, values, its MLP."""
    if name == "embed":
        return -1, 0, "", 0
    if name == TARGET:
        return sys.maxsize, 0, "", 0
    match = re.fullmatch(r"L(\d+)H(\d+)(?:\.([qkv]))?|MLP(\d+)", name)
    assert match is not None
    layer, head, letter, mlp = match.groups()
    if mlp is not None:
        return int(mlp), 1, "", 0
    order = {None: "", "q": "0", "k": "1", "v": "2"}
    return int(layer), 0, order[letter], int(head)
