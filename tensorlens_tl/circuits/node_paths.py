"""Paths through the frozen model: the sum over all of them is the model, exactly.

Multiplied out, the steps of the stream are a sum over *paths*: choose in order any nodes (heads, MLPs), go through each
of them, and along the residual stream between them. A path of order 0 is the direct one, order 1 are the full OV
circuits of Elhage et al. (2021) and single MLPs, order 2 holds the virtual heads. Every path starts from what reaches
its first node directly: the embeddings, and the biases written before it (the node's b_V inside). With the
biases so placed the scores of all paths and b_U sum to the logit.

In a difference of two runs the sum over all paths is the change of the logit. A head is three nodes then, as a path may
enter it by its values, its queries or its keys: ``"L0H3.v → L1H5.k"`` is what the change of L0H3's values does to where
L1H5 attends, by its keys. Paths start from what differs between the two embeddings.

A path is followed backwards, from the target to its first node; ``pulled`` is the target's vector at that node's input.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.algebra.memory import WORKING_BYTES
from tensorlens_tl.algebra.numerics import size_of_sum, upcast
from tensorlens_tl.circuits.arguments import Direction, RuleLike, Whole
from tensorlens_tl.circuits.ruled import target_under
from tensorlens_tl.circuits.stream import Stream, StreamTarget, stream_target
from tensorlens_tl.core import recordable
from tensorlens_tl.errors import InvalidInputError, SizeError
from tensorlens_tl.models import LayerRange, Query, TokenLike
from tensorlens_tl.passes import PassOrDifference, one_question
from tensorlens_tl.results import Paths

MOST_PATHS = 100_000
"""How many paths `paths` lists before it refuses."""

MOST_ROWS = 64
"""Partial paths that are pulled back at once, if memory allows."""


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


@recordable()
@checked_names
def paths(
    frozen: PassOrDifference,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    max_order: Whole = 1,
    query: Query = -1,
    direction: Direction = None,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    activation: str = "ratio",
    rule: RuleLike = None,
) -> Paths:
    """Every path through at most `max_order` heads and MLPs, and the sum of the longer ones.

    Args:
        frozen: the pass, or the difference of two: then heads are nodes by values, queries and keys (``"L0H3.k"``), and
            the paths sum to the change of the target.
        target, minus, direction, layers, final_norm: as in `logit_attribution`.
        max_order: the most nodes a listed path has; the longer ones are the remainder, summed by one more pull.
        query: one position; see `tensorlens_tl.passes.inputs.query_positions`.
        activation: the rule for MLPs.
        rule: what stands in place of the frozen model, as in `contribution_graph`.

    Returns:
        Terms named ``"direct"``, ``"L0H3"``, ``"L0H3 → L1H5"`` and so on, in order of length.

    Raises:
        InvalidInputError: a negative order, several queries, and what `logit_attribution` refuses.
        SizeError: more than `MOST_PATHS` paths.

    >>> paths = tlens.circuits.paths(frozen, " value", max_order=1)
    >>> bool((paths.gap < 1e-4).all())
    True
    """
    max_order = whole_number("max_order", max_order, 0, why="0 is the direct path")
    readout = stream_target(frozen, target, minus, direction, query, activation, layers, final_norm)
    readout = target_under(readout, rule, "paths", activation)
    stream = readout.stream
    max_order = min(max_order, len(readout.stream.steps))
    ways = [1] + [0] * max_order  # how many there are of each order: symmetric polynomials of the steps' node counts
    for step in stream.steps:
        nodes = len(step.part_names)
        ways = [ways[0], *(ways[order] + nodes * ways[order - 1] for order in range(1, max_order + 1))]
    count = sum(ways)
    if count > MOST_PATHS:
        raise SizeError(
            f"paths: there are {count:,} paths of at most {max_order} nodes, more than {MOST_PATHS:,}. Lower "
            "max_order, use top_paths(), or raise tensorlens_tl.circuits.node_paths.MOST_PATHS."
        )
    orders = _by_order(stream, readout.seed, max_order)
    names: list[list[tuple[str, ...]]] = [[()], *([] for _ in range(max_order))]
    scores = [[_direct_path(readout)], *([] for _ in range(max_order))]

    def visit(partial: _Partial, order: int) -> None:
        """Depth first, a few partial paths at a time, so that their vectors never pile up."""
        candidates, _, alone = _candidates(stream, partial)
        if not len(candidates):
            return
        names[order] += _named(stream, partial, candidates)
        scores[order].append(alone)
        if order < max_order:
            for some in candidates.split(_rows_at_once(stream)):
                visit(_extend(stream, partial, some), order + 1)

    if max_order:
        visit(_Partial(readout.seed, torch.tensor([len(stream.steps)]), [()]), 1)
    listed = [path for paths_of_order in names for path in paths_of_order]
    labels = [_label(path) for path in listed]
    if bool(readout.constant.any()):
        labels.append(readout.constant_name)
        scores.append([readout.constant.T])
    paths = Paths(
        names=labels,
        scores=torch.cat([part for parts in scores for part in parts]).T[:, None],
        remainder=orders[:, -1:],
        nodes=tuple(listed),
        orders=orders,
        **readout.fields(),
    )
    return stream.frozen.checked(paths, readout.noise / size_of_sum(paths.scores, orders[:, -1:]))


@recordable()
@checked_names
@one_question
def top_paths(
    frozen: PassOrDifference,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    k: Whole = 10,
    width: Whole = 64,
    query: Query = -1,
    direction: Direction = None,
    layers: LayerRange = None,
    final_norm: bool | None = None,
    activation: str = "ratio",
    rule: RuleLike = None,
) -> Paths:
    """The k largest paths that a beam search finds, of any length, for one prompt.

    Backwards from the target: a partial path is worth the absolute value of everything that flows through it, and the
    `width` best of each length are followed on. The remainder is everything else: the sum of all paths, by one
    more pull, less the k; so here `gap` measures that pull, and not the scores of the k.

    Args:
        frozen: a pass of one prompt, or the difference of two.
        target, minus, query, direction, layers, activation, rule: as in `paths`.
        k: how many paths.
        width: partial paths that are followed at each length.

    Raises:
        InvalidInputError: k or width below 1, several prompts, and what `paths` refuses.

    >>> paths = tlens.circuits.top_paths(frozen, " value", k=3)
    >>> len(paths.names), bool((paths.gap < 1e-4).all())
    (3, True)
    """
    k = whole_number("k", k, 1)
    width = whole_number("width", width, 1)
    readout = stream_target(frozen, target, minus, direction, query, activation, layers, final_norm)
    readout = target_under(readout, rule, "top_paths", activation)
    if len(frozen.tokens) != 1:
        raise InvalidInputError(
            f"top_paths: the pass has {len(frozen.tokens)} prompts, each with its own paths; freeze one."
        )
    stream = readout.stream
    names: list[tuple[str, ...]] = [()]
    scores = [_direct_path(readout)[:, 0]]
    # of each length the k largest: a deep model has a hundred times as many candidates, and a name each takes longer
    partial = _Partial(readout.seed, torch.tensor([len(stream.steps)]), [()])
    while partial.names:
        candidates, through, alone = _candidates(stream, partial)
        largest = alone[:, 0].abs().topk(min(k, len(candidates))).indices
        names += _named(stream, partial, candidates[largest.cpu()])
        scores.append(alone[largest, 0])
        best = through[:, 0].abs().topk(min(width, len(candidates))).indices.cpu()
        partial = _extend(stream, partial, candidates[best.sort().values])
    everything = torch.cat(scores)
    order = everything.abs().topk(min(k, len(everything))).indices
    top_scores = everything[order]
    top_names = [names[i] for i in order.tolist()]
    everything_else = _by_order(stream, readout.seed, 0).sum(-1, keepdim=True) + readout.constant - top_scores.sum()
    return Paths(
        names=[*map(_label, top_names)],
        scores=top_scores[None, None],
        remainder=everything_else,
        nodes=tuple(top_names),
        **readout.fields(),
    )


def _direct_path(readout: StreamTarget) -> Float[Tensor, "1 batch"]:
    """The direct path's score."""
    return (upcast(readout.seed) * readout.stream.direct[-1]).sum((-2, -1))


def _label(path: tuple[str, ...]) -> str:
    return " → ".join(path) or "direct"


def _named(stream: Stream, partial: "_Partial", candidates: Int[Tensor, "path 3"]) -> list[tuple[str, ...]]:
    """The nodes of paths that are one longer, first to last."""
    return [(stream.steps[step].part_names[node], *partial.names[row]) for row, step, node in candidates.tolist()]


def _rows_at_once(stream: Stream) -> int:
    """How many partial paths the working memory holds, with the widest hidden layer beside each."""
    x = stream.x[0]
    per_row = x[..., 0].numel() * (4 * x.shape[-1] + 2 * stream.widest) * x.element_size()
    return max(1, min(MOST_ROWS, WORKING_BYTES // per_row))


def _by_order(stream: Stream, seed: Tensor, max_order: int) -> Float[Tensor, "batch order"]:
    """The sum of all paths of each order, and of all longer ones, by one pull with orders as rows."""
    rows = torch.cat([seed, seed.new_zeros(max_order + 1, *seed.shape[1:])])
    sums = upcast(rows[..., 0, 0]) * 0

    def shifted(values: Tensor) -> Tensor:
        """One node more: row n moves to n + 1, and what is longer stays longer."""
        moved = torch.cat([torch.zeros_like(values[:1]), values[:-1]])
        moved[-1] += values[-1]
        return moved

    for step in reversed(stream.steps):
        sums += (upcast(rows) * step.outer.bias).sum((-2, -1))
        rows = step.outer.pull(rows)
        through = torch.zeros_like(rows)
        for sublayer in step.sublayers:
            sums += (upcast(rows) * sublayer.write.bias).sum((-2, -1))
            pulled, bias = sublayer.read.pull_with_bias(sublayer.write.pull(rows))
            through += shifted(pulled)
            sums += shifted(bias)
        rows = rows + through
    return (sums + (upcast(rows) * stream.x[0]).sum((-2, -1))).T


def _candidates(stream: Stream, partial: _Partial) -> tuple[Tensor, Tensor, Tensor]:
    """Every path that is one node longer: ``(row, step, node)``, all that flows through it, and it by itself.

    Shapes `[path, 3]`, `[path, batch]`, `[path, batch]`.
    """
    candidates = []
    through = []
    alone = []
    for number, rows, cotangent in _sweep(stream, partial):
        step = stream.steps[number]
        nodes = 0
        for sublayer, values in zip(step.sublayers, stream.shown[number], strict=True):
            reached = cotangent if len(sublayer.nodes) == 1 else sublayer.write.pull(cotangent)
            shares = torch.einsum(
                "rbpnc,vbpnc->vrnb", upcast(sublayer.split(reached)), upcast(sublayer.split(values))
            ).flatten(1, 2)
            through.append(shares[0])
            alone.append(shares[1])
            node = torch.arange(nodes, nodes + len(sublayer.nodes))
            nodes += len(sublayer.nodes)
            candidates.append(torch.cartesian_prod(rows, torch.tensor([number]), node))
    if not candidates:
        empty = partial.pulled.new_zeros(0, partial.pulled.shape[1])
        return torch.zeros(0, 3, dtype=torch.long), empty, empty
    return torch.cat(candidates), torch.cat(through), torch.cat(alone)


def _extend(stream: Stream, partial: _Partial, chosen: Int[Tensor, "path 3"]) -> _Partial:
    """The chosen longer paths, pulled back to the input of their new first node."""
    pulled = []
    steps = []
    names = []
    for number, rows, cotangent in _sweep(stream, partial):
        step = stream.steps[number]
        nodes = 0
        for sublayer in step.sublayers:
            for node, name in enumerate(sublayer.part_names):
                parents = chosen[(chosen[:, 1] == number) & (chosen[:, 2] == nodes + node), 0]
                parents = parents[torch.isin(parents, rows)]
                if not len(parents):
                    continue
                hidden = sublayer.split(sublayer.write.pull(cotangent[parents - rows[0]]))[..., node, :]
                pulled.append(sublayer.read_of(node).pull(hidden))
                steps += [number] * len(parents)
                names += [(name, *partial.names[row]) for row in parents.tolist()]
            nodes += len(sublayer.nodes)
    if not pulled:
        return _Partial(partial.pulled[:0], torch.zeros(0, dtype=torch.long), [])
    order = torch.tensor(steps).argsort(descending=True, stable=True)
    return _Partial(torch.cat(pulled)[order], torch.tensor(steps)[order], [names[i] for i in order.tolist()])


def _sweep(stream: Stream, partial: _Partial) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Move partial paths down the stream, some at a time: at each step, the rows that reach it and their vectors there.

    Yields ``(step, rows, cotangent)``; the last is `[row, batch, pos, d_model]` at the sum that sublayers write to.
    """
    at_once = _rows_at_once(stream)
    for start in range(0, len(partial.names), at_once):
        rows = torch.arange(start, min(start + at_once, len(partial.names)))
        steps = partial.step[rows]
        pulled = partial.pulled[rows].clone()
        for number in range(len(stream.steps) - 1, -1, -1):
            live = int((steps > number).sum())  # sorted: they come first
            if not live:
                continue
            pulled[:live] = stream.steps[number].outer.pull(pulled[:live])
            if stream.steps[number].sublayers:
                yield number, rows[:live], pulled[:live]
