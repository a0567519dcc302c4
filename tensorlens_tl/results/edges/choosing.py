"""Which edges a circuit takes in, and which of them lead from the input to the target."""

import heapq
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import check_choice
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.edges.names import TARGET, node_read_at

CHOICES = ("top", "greedy")


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
