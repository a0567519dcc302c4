"""A score for every edge between the parts of a model, and which of them a circuit takes in."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import check_choice, nearest, whole_number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.circuit import Circuit
from tensorlens_tl.results.edge_names import ARROW, TARGET, node_read_at
from tensorlens_tl.results.entry import check_batch, mean_title, prompts_in_words, shown_target
from tensorlens_tl.results.scores import Bars, Parts, Scored, long_table
from tensorlens_tl.results.statistics import bootstrap_interval
from tensorlens_tl.results.targets import targets_of_queries

if TYPE_CHECKING:
    import pandas as pd

CHOICES = ("top", "greedy")


@dataclass(frozen=True, eq=False, repr=False)
class EdgeScores(Scored):
    """A score for every edge and prompt: what the target loses when the edge carries its corrupted value.

    `top`, `show` and `plot` take `batch`, and are of the mean over prompts without it.

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
        provenance: what they depend on besides the prompts, as of `Attribution`.
    """

    NAMES: ClassVar = {"source": "sources", "destination": "destinations"}
    HEADING: ClassVar = "Edges that act on {}"
    DRAWN: ClassVar = 20
    BY_PLACE: ClassVar = dict.fromkeys(("to_html", "plot", "show", "top"), ("k", "batch"))

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
    provenance: dict[str, str] = field(default_factory=dict[str, str])

    def __len__(self) -> int:
        return int(self.exists.sum())

    def __repr__(self) -> str:
        prompts = prompts_in_words(len(self.scores))
        return f"EdgeScores({len(self)} edges, {prompts}, {self.target!r}, method={self.method!r})"

    def __getitem__(self, edge: Any) -> Float[Tensor, "batch"]:
        """One edge's score for every prompt.

        Raises:
            InvalidInputError: no such edge.
        """
        source, _, destination = str(edge).partition(ARROW)
        if source not in self.sources or destination not in self.destinations:
            some = ARROW.join((self.sources[0], self.destinations[0]))
            names = [self._name(number) for number in self.exists.flatten().nonzero()[:, 0].tolist()]
            near = nearest(str(edge).replace(" ", "").replace("->", ARROW), names)
            raise InvalidInputError(f"no edge {edge!r}; edges are called by name, as {some!r}.{near}")
        pair = self.sources.index(source), self.destinations.index(destination)
        if not self.exists[pair]:
            raise InvalidInputError(f"no edge {edge!r}: {destination} does not read what {source} writes.")
        return self.scores[(slice(None), *pair)]

    def _parts(self, batch: int | None = None) -> Parts:
        """The edges of one prompt, or of the mean over prompts; those of largest score first."""
        scores = self._row(batch)
        order = edge_order(scores, self.exists, self.sources, self.destinations)
        return Parts(scores.flatten()[order], [self._name(edge) for edge in order.tolist()])

    def circuit(
        self,
        edges: Any,
        batch: int | None = None,
        *,
        absolute: bool = True,
        choice: str = "top",
        prune: bool = True,
    ) -> Circuit:
        """The circuit of so many edges, without those that no path from the input to the target goes through.

        Args:
            edges: how many are chosen. Those on no path from the input to the target are then taken out: of a small
                circuit of a deep model that may be half of them.
            batch: by one prompt's scores, or (None) by the mean over prompts.
            absolute: choose by size; else by score, the most positive first.
            choice: ``"top"`` takes the best edges wherever they are, ``"greedy"`` the best of those that lead into
                what is already reached, from the target backwards.
            prune: False keeps all that are chosen, those on no such path as well; they do not act.

        Raises:
            InvalidInputError: more edges than there are, or no such choice or prompt.

        >>> corrupted = tlens.freeze(model, "Return the name. Return the")
        >>> edges = tlens.circuits.edge_scores(frozen, corrupted, " value", " name")
        >>> edges.circuit(5)
        Circuit(5 of 479 edges, 4 nodes)
        >>> edges.circuit(20), edges.circuit(20, prune=False)
        (Circuit(17 of 479 edges, 10 nodes), Circuit(20 of 479 edges, 11 nodes))
        """
        edges = whole_number("edges", edges, 0, len(self), why=f"this model has {len(self)} edges")
        scores = self._row(batch)
        order = edge_order(scores, self.exists, self.sources, self.destinations, absolute=absolute, choice=choice)
        selection = torch.zeros_like(self.exists)
        selection.view(-1)[order[:edges]] = True
        if prune:
            selection = pruned(selection, self.sources, self.destinations)
        return Circuit(
            self.sources, self.destinations, scores, self.exists, selection, self.config, self.target, self.provenance,
            self.method,
        )  # fmt: skip

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per prompt and edge: batch, source, destination, method, target, score."""
        axes = {"batch": None, "source": self.sources, "destination": self.destinations}
        targets = targets_of_queries(self.target, torch.zeros(len(self.scores), 1, dtype=torch.long))
        columns = {"method": self.method, "target": np.array(targets, dtype=object)[:, 0]}
        return long_table(self, self.scores, axes, real=self.exists.cpu(), **columns)

    def _bars(self, k: int, batch: int | None = None) -> Bars:
        lines = [(entry.name, entry.score) for entry in self.top(k, batch=batch)]
        facts = [shown_target(self.target), self.method]
        several = batch is None and len(self.scores) > 1
        if batch is not None:
            facts.append(f"prompt {batch}")
        elif several:
            facts.append(f"mean of {len(self.scores)} prompts")
        bars = Bars(" · ".join(facts), lines, heading=self.heading, notes=facts, columns=("edge", "score"))
        if not several:
            return bars
        low, high = bootstrap_interval(torch.stack([self[name] for name, _ in lines]).double().cpu())
        title = f"{mean_title(self.target, len(self.scores))} · {self.method}"
        return replace(bars, figure_title=title, intervals=list(zip(low.tolist(), high.tolist(), strict=True)))

    def _row(self, batch: int | None) -> Float[Tensor, "source destination"]:
        if batch is None:
            return self.scores.mean(0)
        check_batch(batch, list(self.scores))
        return self.scores[batch]

    def _name(self, edge: int) -> str:
        source, destination = divmod(edge, len(self.destinations))
        return self.sources[source] + ARROW + self.destinations[destination]


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
    check_choice("choice", choice, CHOICES)
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
    """A selection of edges without those that no path from the input, or from what hooks add, to the target uses.

    Many circuits at once: any leading rows.
    """
    node_of = [node_read_at(name) for name in destinations]
    entries = torch.tensor(
        [[node == name for node in node_of] for name in sources], device=selection.device
    )  # [source, destination]: what the node reads at
    fed = torch.zeros(selection.shape[:-1], dtype=torch.bool, device=selection.device)
    fed[..., ~entries.any(1)] = True  # what reads nothing: the embedding, and what hooks add
    reading = entries.any(1).nonzero()[:, 0].tolist()
    for source in reading:  # in the order of the forward pass: what feeds a node is known before it
        fed[..., source] = (selection[..., entries[source]] & fed[..., None]).flatten(-2).any(-1)
    used = torch.zeros_like(fed)
    to_target = torch.tensor([name == TARGET for name in node_of], device=selection.device)
    for source in reversed(range(len(sources))):
        is_used = (used[..., None, :] & entries.T).any(-1) | to_target  # destinations whose node is used
        used[..., source] = (selection[..., source, :] & is_used).any(-1)
    ends = (used[..., None, :] & fed[..., None, :] & entries.T).any(-1) | to_target
    return selection & (fed & used)[..., None] & ends[..., None, :]
