"""Do scores of components find those that make the answer?

Each method scores the nodes, and where it can the edges, of prompts whose truth is known
(`tensorlens_tl.evaluate.known.truths`). What is explained is the logit of the answer minus that of the corrupted
prompt's.

* `logit_attribution`: direct effects of embeddings, heads, MLPs and biases, compared with the last node of each path.
* `contribution_graph`: weights of nodes at positions and of edges between them, compared with the paths' nodes and
  steps.
* `frozen`, `frozen+qk`, `gradient`, `integrated`, `difference`, `patching`: `circuits.patch_scores` by head, held to
  `nodes`, and `circuits.edge_scores`, held to `edges`; `integrated, left` is `integrated` with ``points="left"``.

The first two explain the clean prompt by itself, along values: what chose the attention is outside their question. The
others explain what differs between two prompts. Where heads attend elsewhere in the corrupted one, the difference goes
through queries and keys: a frozen model holds these fixed, and a gradient is nearly zero where a softmax is saturated.

| metric | of one prompt, by absolute score |
| --- | --- |
| `auroc` | how often a true node (or edge) scores above one that is not, equal scores counting half |
| `precision`, `recall` | of what scores at least `threshold` of the largest |

Edges of the contribution graph are all pairs of a place and one that may read it, later in the model and not earlier in
the prompt; those that the graph leaves out have a weight of exactly zero.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.circuits.compare import edge_scores, patch_scores
from tensorlens_tl.circuits.effects import logit_attribution
from tensorlens_tl.circuits.graph import contribution_graph
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.evaluate.arguments import Names
from tensorlens_tl.evaluate.known.patching import ROWS, FrozenPairs, PairWork, checked_methods, method_options
from tensorlens_tl.evaluate.known.truths import ComponentTask, KnownComponents, Place
from tensorlens_tl.models import ModelLike
from tensorlens_tl.passes import FrozenPass, freeze
from tensorlens_tl.results import ARROW, TARGET, ContributionGraph, Evaluation
from tensorlens_tl.results.statistics import auroc

METHODS = ("logit_attribution", "contribution_graph", *ROWS)
METRICS = tuple(f"{what} {metric}" for what in ("node", "edge") for metric in ("auroc", "precision", "recall"))

Paths = tuple[tuple[Place, ...], ...]
Scored = dict[Any, float]
"""Scores by name, or by place."""


@checked_names
def known_components(
    model: ModelLike,
    task: ComponentTask,
    methods: Names = None,
    *,
    threshold: float = 0.05,
    only_correct: bool = True,
    steps: int = 5,
    memory: Memory = None,
) -> Evaluation:
    """AUROC, precision and recall of each method's scores of nodes and edges, against what is known to matter.

    Args:
        model: the model whose components are known.
        task: what is known, such as ``demo.program("induction").components()``.
        methods: ``"logit_attribution"``, ``"contribution_graph"``, and those of `circuits.patch_scores`; None is all
            that the model allows.
        threshold: the share of the largest score from which a node or edge counts as predicted.
        only_correct: leave out pairs of which the model answers one prompt wrongly.
        steps: gradients of ``"integrated"`` and ``"frozen+qk"``.
        memory: what the runs of ``"patching"`` may allocate at once.

    Returns:
        An Evaluation with `METRICS` per prompt; NaN where a method scores no edges.

    Raises:
        InvalidInputError: no task, no such method, a threshold outside (0, 1], no pair that the model answers, or a
            true node or edge that the model does not have.
        UnsupportedModelError: a method that is named, or every one, does not fit this model.

    >>> from tensorlens_tl import evaluate
    >>> program = tlens.demo.program("induction")
    >>> list(evaluate.known_components(program.model(), program.components(4), ["frozen"]).metrics)[:2]
    ['node auroc', 'node precision']
    """
    if not isinstance(task, KnownComponents):
        raise InvalidInputError(
            f"task={type(task).__name__}: pass KnownComponents, such as demo.program('induction').components()."
        )
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 < threshold <= 1:
        raise InvalidInputError(f"threshold={threshold!r}: a share of the largest score, above 0 and at most 1.")
    chosen = checked_methods(methods, METHODS)
    work = PairWork(model, task.pairs, only_correct)
    numbers = [int(unit.removeprefix("prompt ")) for unit in work.units]
    skipped = dict[str, str]()
    values = torch.full((len(METRICS), len(chosen), len(numbers)), torch.nan, dtype=torch.float64)
    for row, method in enumerate(chosen):
        try:
            scored = _scored(work, [task.paths[number] for number in numbers], task, method, steps, memory)
        except UnsupportedModelError as error:
            if methods is not None:
                raise UnsupportedModelError(f"{method}: {error}") from error
            skipped[method] = str(error)
            continue
        for column, parts in enumerate(scored):
            metrics = [number for scores, true in parts for number in _ranking_metrics(scores, true, threshold)]
            values[: len(metrics), row, column] = torch.tensor(metrics, dtype=torch.float64)
    used = [row for row, method in enumerate(chosen) if method not in skipped]
    if not used:
        raise UnsupportedModelError(f"no method fits this model: {skipped}")
    return Evaluation(
        kind=f"known components: {task.name}",
        values=values[:, used],
        metrics=dict.fromkeys(METRICS, True),
        methods=[chosen[row] for row in used],
        units=work.units,
        settings=work.settings | {"threshold": threshold, "steps": steps},
        skipped=skipped,
    )


def _scored(
    work: PairWork, paths: list[Paths], task: KnownComponents, method: str, steps: int, memory: Memory
) -> Iterable[list[tuple[Scored, frozenset[Any]]]]:
    """For each prompt, scores and truth of its nodes, and where there are any of its edges."""
    if method == "contribution_graph":
        pairs = work.pairs
        rows = zip(pairs.clean, pairs.answers.tolist(), pairs.others.tolist(), paths, strict=True)
        return [
            _of_graph(freeze(work.model, tokens[None], verify=False), answer, other, prompt_paths)
            for tokens, answer, other, prompt_paths in rows
        ]
    parts = [part for frozen in work.parts() for part in _of_pairs(frozen, method, steps, memory)]
    if method == "logit_attribution":
        return [
            [(scores, _known(frozenset(path[-1][0] for path in prompt_paths), scores, "node"))]
            for (scores,), prompt_paths in zip(parts, paths, strict=True)
        ]
    return [
        [(nodes, _known(task.nodes, nodes, "node")), (edges, _known(task.edges, edges, "edge"))]
        for nodes, edges in parts
    ]


def _of_pairs(part: FrozenPairs, method: str, steps: int, memory: Memory) -> list[tuple[Scored, ...]]:
    """Scores of each prompt's nodes, and except for direct effects of its edges."""
    if method == "logit_attribution":
        terms = logit_attribution(part.clean, part.answers, part.others, by="head")
        return [(dict(zip(terms.names, row, strict=True)),) for row in terms.scores[:, 0].tolist()]
    options: dict[str, Any] = {**method_options(method), "steps": steps, "memory": memory}
    nodes = patch_scores(part.clean, part.corrupted, part.answers, part.others, **options)
    edges = edge_scores(part.clean, part.corrupted, part.answers, part.others, **options)
    pairs = edges.exists.nonzero().tolist()
    names = [ARROW.join((edges.sources[source], edges.destinations[end])) for source, end in pairs]
    rows = zip(nodes.scores[:, 0].tolist(), edges.scores[:, edges.exists].tolist(), strict=True)
    return [(dict(zip(nodes.names, a, strict=True)), dict(zip(names, b, strict=True))) for a, b in rows]


def _of_graph(frozen: FrozenPass, answer: int, other: int, paths: Paths) -> list[tuple[Scored, frozenset[Any]]]:
    """Weights of the graph's nodes and edges, by place."""
    graph = contribution_graph(frozen, answer, other, threshold=0)
    places: list[Place] = list(zip(graph.nodes["name"].tolist(), graph.nodes["pos"].tolist(), strict=True))
    nodes = dict(zip(places[:-1], graph.nodes["weight"].tolist()[:-1], strict=True))
    true = frozenset(place for path in paths for place in path)
    ends = (TARGET, places[-1][1])
    steps = frozenset(step for path in paths for step in zip(path, (*path[1:], ends), strict=True))
    columns = (graph.edges[column].tolist() for column in ("source", "target", "weight"))
    edges = dict.fromkeys(_possible(graph), 0.0)
    edges |= {(places[source], places[end]): weight for source, end, weight in zip(*columns, strict=True)}
    return [(nodes, _known(true, nodes, "place")), (edges, _known(steps, edges, "edge"))]


def _possible(graph: ContributionGraph) -> Iterator[tuple[Place, Place]]:
    """Pairs of a place and one that may read it: later in the model, and not earlier in the prompt."""
    columns = ("name", "kind", "layer", "pos")
    rows = list(zip(*(graph.nodes[column].tolist() for column in columns), strict=True))
    for end, (name, kind, layer, pos) in enumerate(rows):
        if kind not in ("embedding", "bias"):
            for other, kind_of_other, layer_of_other, before in rows[:end]:
                if before <= pos and (kind, layer) != (kind_of_other, layer_of_other):
                    yield (other, before), (name, pos)


def _known(true: frozenset[Any], scores: Scored, what: str) -> frozenset[Any]:
    """The truth, where the model has all of it.

    Raises:
        InvalidInputError: it has not.
    """
    missing = sorted(map(str, true - scores.keys()))
    if missing:
        some = ", ".join(map(str, list(scores)[:8]))
        raise InvalidInputError(f"known_components: no {what} {missing[0]} in this model; there are {some}, …")
    return true


def _ranking_metrics(scores: Scored, true: frozenset[Any], threshold: float) -> tuple[float, float, float]:
    """AUROC, precision and recall."""
    size = torch.tensor(list(scores.values()), dtype=torch.float64).abs()
    is_true = torch.tensor([name in true for name in scores])
    predicted = (size >= threshold * size.max()) & (size > 0)
    hits = (predicted & is_true).sum().double()  # 0 / 0 is NaN: nothing scores above zero
    return auroc(size, is_true), float(hits / predicted.sum()), float(hits / len(true))
