"""Paths through the frozen model: the sum over all of them is the model, exactly.

Multiplied out, the steps of `trunk` are a sum over *paths*: choose in order any nodes (heads, MLPs), go through each
of them, and along the residual stream between them. A path of order 0 is the direct one, order 1 are the full OV
circuits of Elhage et al. (2021) and single MLPs, order 2 holds the virtual heads. Every path starts from what the road
carries to its first node: the embeddings, and the biases written before it (the node's own b_V inside). With the
biases so placed the scores of all paths and b_U sum to the logit.

A path is followed backwards, from the target to its first node; ``pulled`` is the target's vector at that node's input.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.circuits.terms import Terms
from tensorlens_tl.circuits.trunk import Trunk
from tensorlens_tl.errors import InvalidInputError, SizeError
from tensorlens_tl.inputs import query_positions
from tensorlens_tl.targets import question

if TYPE_CHECKING:
    from tensorlens_tl.frozen import FrozenPass

MOST_PATHS = 100_000
"""How many paths `paths` lists before it refuses."""

ROWS = 64
"""Partial paths that are pulled back at once."""


@dataclass(frozen=True, eq=False)
class Paths(Terms):
    """Path scores, order by order.

    Attributes:
        nodes: each path's nodes, first to last; empty for the direct path.
        orders: the sum of all paths of each order, listed or not, `[batch, order]`; the last is every longer one.
    """

    nodes: tuple[tuple[str, ...], ...] = ()
    orders: Float[Tensor, "batch order"] | None = None


@dataclass(frozen=True, eq=False)
class _Partial:
    """Paths that still have their beginning before them: the target's vector at the input of their first node.

    Attributes:
        pulled: `[path, batch, pos, d_model]`, sorted by `step`, latest first.
        step: the step of each one's first node; its beginning lies in earlier steps.
        names: each one's nodes, first to last.
    """

    pulled: Float[Tensor, "path batch pos d_model"]
    step: Int[Tensor, "path"]
    names: list[tuple[str, ...]]


def paths(
    frozen: "FrozenPass",
    target: Any = None,
    minus: Any = None,
    *,
    max_order: Any = 1,
    query: Any = -1,
    direction: Any = None,
    activation: str = "ratio",
) -> Paths:
    """Every path through at most `max_order` heads and MLPs, and the sum of the longer ones.

    Args:
        frozen: the pass.
        target, minus, direction, query: as in `logit_attribution`.
        max_order: the most nodes a listed path has; the longer ones are the remainder, summed by a pull of their own.
        activation: the rule for MLPs.

    Returns:
        Terms named ``"direct"``, ``"L0H3"``, ``"L0H3 → L1H5"`` and so on, in order of length.

    Raises:
        InvalidInputError: a negative order, and what `logit_attribution` refuses.
        SizeError: more than `MOST_PATHS` paths.
    """
    if isinstance(max_order, bool) or not isinstance(max_order, int) or max_order < 0:
        raise InvalidInputError(f"max_order={max_order!r}: pass 0 (the direct path), 1, 2, …")
    trunk, seed, constant, total, label = _start(frozen, target, minus, direction, query, activation)
    count = _count(trunk, max_order)
    if count > MOST_PATHS:
        raise SizeError(
            f"paths: there are {count:,} paths of at most {max_order} nodes, more than {MOST_PATHS:,}. Lower "
            "max_order, use top_paths(), or raise tensorlens_tl.circuits.expansion.MOST_PATHS."
        )
    orders = _by_order(trunk, seed, max_order)
    names: list[tuple[str, ...]] = [()]
    scores = [(seed * trunk.road_end).sum((-2, -1))]
    partial = _Partial(seed, torch.tensor([len(trunk.steps)]), [()])
    for order in range(1, max_order + 1):
        if not partial.names:
            break
        found, _, values = _candidates(trunk, partial)
        names += [trunk.steps[step].names[node] + partial.names[row] for row, step, node in found.tolist()]
        scores.append(values)
        if order < max_order:
            partial = _extend(trunk, partial, found)
    return Paths(
        names=["direct", *(" → ".join(path) for path in names[1:]), *(["b_U"] if bool(constant.any()) else [])],
        scores=torch.cat([*scores, *([constant[None]] if bool(constant.any()) else [])]).T,
        total=total,
        remainder=orders[:, -1],
        tokens=frozen.str_tokens,
        question=label,
        nodes=tuple(names),
        orders=orders,
    )


def top_paths(
    frozen: "FrozenPass",
    k: Any = 10,
    target: Any = None,
    minus: Any = None,
    *,
    width: Any = 64,
    query: Any = -1,
    direction: Any = None,
    activation: str = "ratio",
) -> Paths:
    """The k largest paths that a beam search finds, of any length, for one prompt.

    Backwards from the target: a partial path is worth the absolute value of everything that flows through it, and the
    `width` best of each length are followed on. What is not among the k is in the remainder.

    Raises:
        InvalidInputError: k or width below 1, several prompts, and what `paths` refuses.
    """
    for name, number in (("k", k), ("width", width)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InvalidInputError(f"{name}={number!r}: pass a positive integer.")
    if len(frozen.tokens) != 1:
        raise InvalidInputError(
            f"top_paths: the pass has {len(frozen.tokens)} prompts, each with its own paths; freeze one."
        )
    trunk, seed, constant, total, label = _start(frozen, target, minus, direction, query, activation)
    names: list[tuple[str, ...]] = [()]
    scores = [(seed * trunk.road_end).sum((-2, -1))[:, 0]]
    partial = _Partial(seed, torch.tensor([len(trunk.steps)]), [()])
    while partial.names:
        found, through, values = _candidates(trunk, partial)
        names += [trunk.steps[step].names[node] + partial.names[row] for row, step, node in found.tolist()]
        scores.append(values[:, 0])
        best = through[:, 0].abs().topk(min(width, len(found))).indices.cpu()
        partial = _extend(trunk, partial, found[best.sort().values])
    everything = torch.cat(scores)
    order = everything.abs().topk(min(k, len(everything))).indices
    kept = everything[order]
    return Paths(
        names=["direct" if not names[i] else " → ".join(names[i]) for i in order.tolist()],
        scores=kept[None],
        total=total,
        remainder=_by_order(trunk, seed, 0).sum(-1) + constant - kept.sum(),
        tokens=frozen.str_tokens,
        question=label,
        nodes=tuple(names[i] for i in order.tolist()),
    )


def _start(
    frozen: "FrozenPass", target: Any, minus: Any, direction: Any, query: Any, activation: str
) -> tuple[Trunk, Tensor, Tensor, Tensor, str]:
    asked = question(frozen, target, minus, direction)
    if query_positions(frozen.mask, query).shape[1] != 1:
        raise InvalidInputError("query=None: paths lead to one query; pass an integer.")
    trunk = Trunk.of(frozen, activation, to_tokens=asked.of_tokens)
    return trunk, trunk.seed(asked, query), asked.constant, trunk.total(asked, query), asked.label


def _count(trunk: Trunk, max_order: int) -> int:
    """The number of paths of at most so many nodes: elementary symmetric polynomials of the steps' node counts."""
    ways = [1] + [0] * max_order
    for step in trunk.steps:
        nodes = len(step.names)
        ways = [ways[0], *(ways[order] + nodes * ways[order - 1] for order in range(1, max_order + 1))]
    return sum(ways)


def _by_order(trunk: Trunk, seed: Tensor, max_order: int) -> Float[Tensor, "batch order"]:
    """The sum of all paths of each order, and of all longer ones, by one pull with orders as rows."""
    rows = torch.cat([seed, seed.new_zeros(max_order + 1, *seed.shape[1:])])
    sums = rows.new_zeros(rows.shape[:2])

    def shifted(values: Tensor) -> Tensor:
        """One node more: row n moves to n + 1, and what is longer stays longer."""
        moved = torch.cat([torch.zeros_like(values[:1]), values[:-1]])
        moved[-1] += values[-1]
        return moved

    for step in reversed(trunk.steps):
        sums += (rows * step.outer.bias).sum((-2, -1))
        rows = step.outer.pull(rows)
        through = torch.zeros_like(rows)
        for branch in step.branches:
            sums += (rows * branch.write.bias).sum((-2, -1))
            pulled, bias = branch.read.pull_with_bias(branch.write.pull(rows))
            through += shifted(pulled)
            sums += shifted(bias)
        rows = rows + through
    return (sums + (rows * trunk.x[0]).sum((-2, -1))).T


def _candidates(trunk: Trunk, partial: _Partial) -> tuple[Tensor, Tensor, Tensor]:
    """Every path that is one node longer: ``(row, step, node)``, all that flows through it, and it by itself.

    Shapes `[path, 3]`, `[path, batch]`, `[path, batch]`.
    """
    found, through, alone = [], [], []
    for number, rows, met in _sweep(trunk, partial):
        step, nodes = trunk.steps[number], 0
        for branch, hidden, constant in zip(
            step.branches, trunk.hidden[number], trunk.constant_hidden[number], strict=True
        ):
            pulled = branch.write.pull(met)
            for values, kept in ((hidden, through), (constant, alone)):
                shares = torch.einsum("rbpnc,bpnc->rnb", branch.split(pulled), branch.split(values))
                kept.append(shares.flatten(0, 1))
            node = torch.arange(nodes, nodes + len(branch.nodes))
            nodes += len(branch.nodes)
            found.append(torch.cartesian_prod(rows, torch.tensor([number]), node))
    if not found:
        empty = partial.pulled.new_zeros(0, partial.pulled.shape[1])
        return torch.zeros(0, 3, dtype=torch.long), empty, empty
    return torch.cat(found), torch.cat(through), torch.cat(alone)


def _extend(trunk: Trunk, partial: _Partial, chosen: Int[Tensor, "path 3"]) -> _Partial:
    """The chosen longer paths, pulled back to the input of their new first node."""
    pulled, steps, names = [], [], []
    for number, rows, met in _sweep(trunk, partial):
        step, nodes = trunk.steps[number], 0
        for branch in step.branches:
            for node, name in enumerate(branch.nodes):
                own = chosen[(chosen[:, 1] == number) & (chosen[:, 2] == nodes + node), 0]
                own = own[torch.isin(own, rows)]
                if not len(own):
                    continue
                hidden = branch.split(branch.write.pull(met[own - rows[0]]))[..., node, :]
                pulled.append(branch.read_of(node).pull(hidden))
                steps += [number] * len(own)
                names += [(name, *partial.names[row]) for row in own.tolist()]
            nodes += len(branch.nodes)
    if not pulled:
        return _Partial(partial.pulled[:0], torch.zeros(0, dtype=torch.long), [])
    order = torch.tensor(steps).argsort(descending=True, stable=True)
    return _Partial(torch.cat(pulled)[order], torch.tensor(steps)[order], [names[i] for i in order.tolist()])


def _sweep(trunk: Trunk, partial: _Partial) -> Any:
    """Move partial paths down the road, some at a time: at each step, the rows that reach it and their vectors there.

    Yields ``(step, rows, met)``, `met` `[row, batch, pos, d_model]` at the step's sum, where its branches write.
    """
    for start in range(0, len(partial.names), ROWS):
        rows = torch.arange(start, min(start + ROWS, len(partial.names)))
        steps, pulled = partial.step[rows], partial.pulled[rows].clone()
        for number in range(len(trunk.steps) - 1, -1, -1):
            live = int((steps > number).sum())  # sorted: they come first
            if not live:
                continue
            pulled[:live] = trunk.steps[number].outer.pull(pulled[:live])
            if trunk.steps[number].branches:
                yield number, rows[:live], pulled[:live]
