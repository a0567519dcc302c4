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

from tensorlens_tl.arguments import whole_number
from tensorlens_tl.budget import WORKING_BYTES
from tensorlens_tl.circuits.terms import Terms
from tensorlens_tl.circuits.trunk import Asked, Trunk, ask
from tensorlens_tl.collapse import wide
from tensorlens_tl.errors import InvalidInputError, SizeError

if TYPE_CHECKING:
    from tensorlens_tl.frozen import FrozenPass

MOST_PATHS = 100_000
"""How many paths `paths` lists before it refuses."""

MOST_ROWS = 64
"""Partial paths that are pulled back at once, if memory allows."""


@dataclass(frozen=True, eq=False, repr=False)
class Paths(Terms):
    """Path scores, order by order.

    Attributes:
        nodes: each path's nodes, first to last; empty for the direct path.
        orders: the sum of all paths of each order, listed or not, `[batch, order]`; the last is every longer one. They
            come from a pull of their own, so `residual` measures the listed paths against them.
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
    max_order = whole_number("max_order", max_order, 0, why="0 is the direct path")
    asked = ask(frozen, target, minus, direction, query, activation)
    trunk, max_order = asked.trunk, min(max_order, len(asked.trunk.steps))
    count = _count(trunk, max_order)
    if count > MOST_PATHS:
        raise SizeError(
            f"paths: there are {count:,} paths of at most {max_order} nodes, more than {MOST_PATHS:,}. Lower "
            "max_order, use top_paths(), or raise tensorlens_tl.circuits.expansion.MOST_PATHS."
        )
    orders = _by_order(trunk, asked.seed, max_order)
    names: list[list[tuple[str, ...]]] = [[()], *([] for _ in range(max_order))]
    scores = [[_along_the_road(asked)], *([] for _ in range(max_order))]

    def visit(partial: _Partial, order: int) -> None:
        """Depth first, a few partial paths at a time, so that their vectors never pile up."""
        found, _, alone = _candidates(trunk, partial)
        if not len(found):
            return
        names[order] += _named(trunk, partial, found)
        scores[order].append(alone)
        if order < max_order:
            for some in found.split(_rows_at_once(trunk)):
                visit(_extend(trunk, partial, some), order + 1)

    if max_order:
        visit(_Partial(asked.seed, torch.tensor([len(trunk.steps)]), [()]), 1)
    if bool(asked.constant.any()):
        scores.append([asked.constant[None]])
    listed = [path for paths_of_order in names for path in paths_of_order]
    return Paths(
        names=[*map(_label, listed), *(["b_U"] if bool(asked.constant.any()) else [])],
        scores=torch.cat([part for parts in scores for part in parts]).T,
        total=asked.total,
        remainder=orders[:, -1],
        tokens=frozen.str_tokens,
        question=asked.label,
        soft_cap=asked.soft_cap,
        nodes=tuple(listed),
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
    `width` best of each length are followed on. The remainder is everything else: the sum of all paths, by a pull of
    its own, less the k; so here `residual` measures that pull, and not the scores of the k.

    Raises:
        InvalidInputError: k or width below 1, several prompts, and what `paths` refuses.
    """
    k, width = whole_number("k", k, 1), whole_number("width", width, 1)
    asked = ask(frozen, target, minus, direction, query, activation)
    if len(frozen.tokens) != 1:
        raise InvalidInputError(
            f"top_paths: the pass has {len(frozen.tokens)} prompts, each with its own paths; freeze one."
        )
    trunk = asked.trunk
    names: list[tuple[str, ...]] = [()]
    scores = [_along_the_road(asked)[:, 0]]
    partial = _Partial(asked.seed, torch.tensor([len(trunk.steps)]), [()])
    while partial.names:
        found, through, alone = _candidates(trunk, partial)
        names += _named(trunk, partial, found)
        scores.append(alone[:, 0])
        best = through[:, 0].abs().topk(min(width, len(found))).indices.cpu()
        partial = _extend(trunk, partial, found[best.sort().values])
    everything = torch.cat(scores)
    order = everything.abs().topk(min(k, len(everything))).indices
    kept = everything[order]
    found_names = [names[i] for i in order.tolist()]
    return Paths(
        names=[*map(_label, found_names)],
        scores=kept[None],
        total=asked.total,
        remainder=_by_order(trunk, asked.seed, 0).sum(-1) + asked.constant - kept.sum(),
        tokens=frozen.str_tokens,
        question=asked.label,
        soft_cap=asked.soft_cap,
        nodes=tuple(found_names),
    )


def _along_the_road(asked: Asked) -> Float[Tensor, "1 batch"]:
    """The direct path's score."""
    return (wide(asked.seed) * asked.trunk.road[-1]).sum((-2, -1))


def _label(path: tuple[str, ...]) -> str:
    return " → ".join(path) if path else "direct"


def _named(trunk: Trunk, partial: "_Partial", found: Int[Tensor, "path 3"]) -> list[tuple[str, ...]]:
    """The nodes of paths that are one longer, first to last."""
    return [(trunk.steps[step].nodes[node], *partial.names[row]) for row, step, node in found.tolist()]


def _rows_at_once(trunk: Trunk) -> int:
    """How many partial paths the working memory holds, with the widest hidden layer beside each."""
    x = trunk.x[0]
    widest = max((hidden.shape[-1] for held in trunk.hidden for hidden in held), default=0)
    per_row = x[..., 0].numel() * (4 * x.shape[-1] + 2 * widest) * x.element_size()
    return max(1, min(MOST_ROWS, WORKING_BYTES // per_row))


def _count(trunk: Trunk, max_order: int) -> int:
    """The number of paths of at most so many nodes: elementary symmetric polynomials of the steps' node counts."""
    ways = [1] + [0] * max_order
    for step in trunk.steps:
        nodes = len(step.nodes)
        ways = [ways[0], *(ways[order] + nodes * ways[order - 1] for order in range(1, max_order + 1))]
    return sum(ways)


def _by_order(trunk: Trunk, seed: Tensor, max_order: int) -> Float[Tensor, "batch order"]:
    """The sum of all paths of each order, and of all longer ones, by one pull with orders as rows."""
    rows = torch.cat([seed, seed.new_zeros(max_order + 1, *seed.shape[1:])])
    sums = wide(rows[..., 0, 0]) * 0

    def shifted(values: Tensor) -> Tensor:
        """One node more: row n moves to n + 1, and what is longer stays longer."""
        moved = torch.cat([torch.zeros_like(values[:1]), values[:-1]])
        moved[-1] += values[-1]
        return moved

    for step in reversed(trunk.steps):
        sums += (wide(rows) * step.outer.bias).sum((-2, -1))
        rows = step.outer.pull(rows)
        through = torch.zeros_like(rows)
        for branch in step.branches:
            sums += (wide(rows) * branch.write.bias).sum((-2, -1))
            pulled, bias = branch.read.pull_with_bias(branch.write.pull(rows))
            through += shifted(pulled)
            sums += shifted(bias)
        rows = rows + through
    return (sums + (wide(rows) * trunk.x[0]).sum((-2, -1))).T


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
                shares = torch.einsum("rbpnc,bpnc->rnb", wide(branch.split(pulled)), wide(branch.split(values)))
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
    at_once = _rows_at_once(trunk)
    for start in range(0, len(partial.names), at_once):
        rows = torch.arange(start, min(start + at_once, len(partial.names)))
        steps, pulled = partial.step[rows], partial.pulled[rows].clone()
        for number in range(len(trunk.steps) - 1, -1, -1):
            live = int((steps > number).sum())  # sorted: they come first
            if not live:
                continue
            pulled[:live] = trunk.steps[number].outer.pull(pulled[:live])
            if trunk.steps[number].branches:
                yield number, rows[:live], pulled[:live]
