"""Which scores name what is known: tokens that determine an answer, components that make it, reasons for attention.

Prompts and truths are those of `tensorlens_tl.evaluate.tasks`.

**Tokens** (`known_answer`). For each prompt of a task, source tokens are ranked by score:

| metric | of one prompt |
| --- | --- |
| `mrr` | 1 / rank of the best-placed true source; a random score has H_n / n for one source among n tokens |
| `precision` | share of true sources among the k best-placed tokens, k the number of true sources unless `k=` says |
| `mass` | share of the absolute scores that lies on true sources |

**Attention** (`known_attention`). For heads whose choice is known, `circuits.qk_attribution` takes the score at the
true query and key apart. A source's part in it is what its pairs sum to, the other side's bias included. Sources are
ranked by it, the most positive first:

| metric | of one head in one prompt: 1 / rank of the best-placed true … |
| --- | --- |
| `query token`, `key token` | … source token of the query, of the key |
| `token pair` | … pair of a true source token of the query and one of the key |
| `query part`, `key part` | … component that the query, or the key, is read from (embeddings, heads, MLPs) |
| `part pair` | … pair of such components |

**Components** (`known_components`). Each method scores the nodes, and where it can the edges, of prompts whose truth is
known. What is explained is the logit of the answer minus that of the corrupted prompt's.

* `logit_attribution`: direct effects of embeddings, heads, MLPs and biases, compared with the last node of each path.
* `contribution_graph`: weights of nodes at positions and of edges between them, compared with the paths' nodes and
  steps.
* `frozen`, `frozen+qk`, `gradient`, `integrated-gradients`, `atp*`, `difference`, `measured`, `patching`:
  `circuits.patch_scores` by head, held to `nodes`, and except for `atp*` `circuits.edge_scores`, held to `edges`;
  `integrated-gradients, left` is `integrated-gradients` with ``points="left"``.

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

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from tensorlens_tl._arguments import Seed, Whole, checked_names, real_number, whole_count, whole_number
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.circuits.effects import logit_attribution
from tensorlens_tl.circuits.graph import contribution_graph
from tensorlens_tl.circuits.scores import qk_attribution
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.evaluate.patching import EDGE_ROWS, ROWS, FrozenPairs, PairWork, checked_methods
from tensorlens_tl.evaluate.perturbation import rank
from tensorlens_tl.evaluate.scorers import (
    PROMPTS_AT_ONCE,
    RANDOM,
    Explained,
    Methods,
    Names,
    predictions,
    scorers_of,
    usable,
)
from tensorlens_tl.evaluate.tasks import (
    AnswerTask,
    AttentionTask,
    ComponentTask,
    KnownAnswers,
    KnownAttention,
    KnownChoice,
    KnownComponents,
    Place,
)
from tensorlens_tl.models import ModelLike, ModelView, TokenLike
from tensorlens_tl.passes import FrozenPass, freeze
from tensorlens_tl.passes.target import token_ids
from tensorlens_tl.results import ARROW, TARGET, ContributionGraph, Evaluation, ScoreAttribution
from tensorlens_tl.results.statistics import auroc

ANSWER_METRICS = ("mrr", "precision", "mass")


ATTENTION_METHODS = ("qk_attribution", RANDOM)
ATTENTION_METRICS = ("query token", "key token", "token pair", "query part", "key part", "part pair")

COMPONENT_METHODS = ("logit_attribution", "contribution_graph", *ROWS)
COMPONENT_METRICS = tuple(
    f"{what} {metric}" for what in ("node", "edge") for metric in ("auroc", "precision", "recall")
)

Paths = tuple[tuple[Place, ...], ...]
Scored = dict[Any, float]
"""Scores by name, or by place."""


# ------------------------------------------------------------------ tokens


@checked_names
def known_answer(
    model: ModelLike,
    task: AnswerTask,
    methods: Methods = None,
    *,
    k: Whole | None = None,
    minus: TokenLike = None,
    only_correct: bool = True,
    absolute: bool = False,
    seed: Seed = 0,
    progress: bool = True,
) -> Evaluation:
    """Rank the tokens that determine the answer by each method's scores for the last token.

    Args:
        model: a TransformerLens model that can do the task.
        task: prompts, answers and true sources. Prompts of several lengths are run by length, without padding.
        methods: see `tensorlens_tl.evaluate.scorers`; None is every standard method that fits the model, and random.
        k: of `precision`; None is each prompt's number of true sources.
        minus: explain the predicted token's logit less this one's: a token, one for each prompt, or ``"runner-up"``,
            which also replaces a token that is itself predicted. None explains the logit.
        only_correct: leave out prompts that the model answers wrongly, where it need not have used the true sources.
        absolute: rank by absolute score.
        seed: of the random baseline and of the order of equal scores.
        progress: show a bar.

    Returns:
        An Evaluation with `mrr`, `precision` and `mass` per prompt; ``settings["accuracy"]`` is the model's, and
        ``settings["dropped"]`` counts the prompts that are left out for its wrong answers.

    Raises:
        InvalidInputError: no task, or no prompt that the model answers.

    >>> from tensorlens_tl import evaluate
    >>> result = evaluate.known_answer(tlens.load_demo_model("recall"), evaluate.recall(8), ["relp", "random"])
    >>> result.mean("mrr", "relp") > result.mean("mrr", "random")
    True
    """
    if not isinstance(task, KnownAnswers):
        raise InvalidInputError(
            f"task={type(task).__name__}: pass prompts with known answers, such as evaluate.recall()."
        )
    if k is not None:
        k = whole_number("k", k, 1, task.tokens.shape[1])
    scorers = scorers_of(methods, seed=seed)
    ModelView(model).refuse_encoder_decoder("known_answer")
    parts = task.parts(PROMPTS_AT_ONCE)
    numbers, length = parts[0]
    first = freeze(model, task.tokens[numbers, :length])
    others: Tensor | None = None
    if minus is not None and minus != "runner-up":
        others = token_ids(first.view, minus, len(task), "minus")[:, 0]
    skipped: dict[str, str] = {}
    if methods is None or len(parts) > 1:  # otherwise each method is tried by what it is for
        scorers, skipped = usable(scorers, freeze(model, task.tokens[numbers[:1], :length]), -1, skip=methods is None)
    bar = tqdm(total=len(parts) * len(scorers), desc="known answers", leave=False, delay=2.0, disable=not progress)
    generator = torch.Generator().manual_seed(seed)
    rankings = []
    is_answered = []
    for turn, (part, length) in enumerate(parts):
        frozen = first
        if turn:
            frozen = freeze(model, task.tokens[part, :length], verify=False)
        sources = task.sources[part, :length]
        ties = torch.rand(sources.shape, generator=generator, dtype=torch.float64)
        predicted, logits = predictions(frozen)
        is_answered.append(predicted.cpu() == task.answers[part])
        explained: Explained | None = None
        if minus is not None:
            less = logits.topk(2).indices[:, 1]
            if others is not None:
                given = others[part].to(less)
                less = torch.where(given == predicted, less, given)
            explained = Explained(predicted.tolist(), less.tolist())
        by_method: list[Tensor] = []
        for scorer in scorers:
            by_method.append(scorer(frozen, -1, explained).cpu())
            bar.update()
        scores = torch.stack(by_method)
        if absolute:
            scores = scores.abs()
        rankings.append(torch.stack([ranking(row, sources, ties, k) for row in scores], dim=1))
    bar.close()
    order = torch.cat([part for part, _ in parts]).argsort()  # of the task again
    values = torch.cat(rankings, dim=2)[:, :, order]
    correct = torch.cat(is_answered)[order]
    accuracy = float(correct.double().mean())
    if only_correct and not bool(correct.any()):
        raise InvalidInputError(
            f"known_answer: the model answers none of these {len(task)} {task.name} prompts, so the true sources say "
            "nothing about it. Use a model trained on the task, or only_correct=False."
        )
    counted = correct if only_correct else torch.ones_like(correct)
    numbers = counted.nonzero()[:, 0]
    return Evaluation(
        kind=f"known answers: {task.name}",
        values=values[:, :, numbers],
        metrics=dict.fromkeys(ANSWER_METRICS, True),
        methods=[scorer.label for scorer in scorers],
        units=[f"prompt {int(number)}" for number in numbers],
        settings={
            **first.view.provenance(),
            "task": task.name,
            "prompts": len(task),
            "dropped": len(task) - len(numbers),
            "tokens": task.tokens.shape[1],  # of the longest
            "accuracy": accuracy,
            "random_mrr": _random_mrr(task.only(counted)),
            "minus": None if minus is None else str(minus),
            "absolute": absolute,
            "seed": seed,
        },
        skipped=skipped,
    )


def ranking(
    scores: Float[Tensor, "batch pos"],
    sources: Bool[Tensor, "batch pos"],
    ties: Float[Tensor, "batch pos"],
    k: int | None = None,
) -> Float[Tensor, "3 batch"]:
    """`ANSWER_METRICS` of each prompt's scores."""
    ranks = rank(scores, torch.ones_like(sources), "descending", ties)
    best = ranks.masked_fill(~sources, scores.shape[1]).amin(1)
    top = sources.sum(1)
    if k is not None:
        top = torch.full_like(top, k)
    hits = (sources & (ranks < top[:, None])).sum(1)
    size = scores.abs()
    mass = (size * sources).sum(1) / size.sum(1).clamp_min(torch.finfo(size.dtype).tiny)
    return torch.stack([1 / (best + 1).double(), hits / top.double(), mass.double()])


def _random_mrr(task: AnswerTask) -> float:
    """What a random order gets on average over these prompts, each with its number of tokens and of true sources."""
    parts = task.parts(len(task))
    counts = Counter((length, count) for part, length in parts for count in task.sources[part].sum(1).tolist())
    return sum(prompts / len(task) * expected_mrr(length, count) for (length, count), prompts in counts.items())


@checked_names
def expected_mrr(tokens: Whole, sources: Whole = 1) -> float:
    """What a random order gets: H_n / n for one source among n tokens, Σ_r P(best rank = r) / r for several.

    Raises:
        InvalidInputError: more sources than tokens.

    >>> from tensorlens_tl import evaluate
    >>> evaluate.expected_mrr(4) == (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4
    True
    """
    tokens = whole_count("tokens", tokens)
    miss = 1.0  # the probability that no source has come yet
    total = 0.0
    sources = whole_number("sources", sources, 1, tokens)
    for best in range(1, tokens - sources + 2):
        hit = sources / (tokens - best + 1)  # the probability of a source here, given that none came before
        total += miss * hit / best
        miss *= 1 - hit
    return total


# ------------------------------------------------------------------ attention


@checked_names
def known_attention(model: ModelLike, task: AttentionTask, methods: Names = None, *, seed: Seed = 0) -> Evaluation:
    """Rank the true sources of each head's query and key: 1 / rank of the best-placed true one.

    Args:
        model: the model whose attention is known.
        task: what is known, such as ``demo.program("induction").attention()``.
        methods: ``"qk_attribution"`` and ``"random"``; None is both.
        seed: of the random baseline and of the order of equal scores.

    Returns:
        An Evaluation with these metrics per head and prompt; ``settings["gap"]`` is the parts' largest gap to the
        scores, and ``settings["attention"]`` the mean attention to the true keys.

    Raises:
        InvalidInputError: no task, no such method, or a head, position or component that the model does not have.
        UnsupportedModelError: the scores of a layer cannot be read.

    >>> from tensorlens_tl import evaluate
    >>> program = tlens.demo.program("induction")
    >>> list(evaluate.known_attention(program.model(), program.attention(4)).metrics)[:2]
    ['query token', 'key token']
    """
    if not isinstance(task, KnownAttention):
        raise InvalidInputError(
            f"task={type(task).__name__}: pass KnownAttention, such as demo.program('induction').attention()."
        )
    chosen = checked_methods(methods, ATTENTION_METHODS)
    ModelView(model).refuse_encoder_decoder("known_attention")
    frozen = freeze(model, task.tokens)
    generator = torch.Generator().manual_seed(seed)
    values = list[Tensor]()
    units = list[str]()
    gaps = list[float]()
    attention = list[float]()
    for choice in task.choices:
        columns = list[Tensor]()
        for by in ("token", "head"):
            attribution = qk_attribution(
                frozen, choice.layer, choice.head, choice.query[:, None], choice.key[:, None], by=by
            )
            gaps.append(float(attribution.gap.max()))
            for scores, true in _questions(attribution, choice):
                ties = torch.rand(scores.shape, generator=generator, dtype=torch.float64)
                # random scores are all equal, and ordered by ties alone
                by_method = [torch.zeros_like(scores) if method == RANDOM else scores for method in chosen]
                columns.append(torch.stack([ranking(each, true, ties)[0] for each in by_method]))
        values.append(torch.stack(columns))
        units += [f"prompt {number}, L{choice.layer}H{choice.head}" for number in range(len(task))]
        prompt_numbers = torch.arange(len(task))
        pattern = frozen.pattern(choice.layer).cpu()
        attention += pattern[prompt_numbers, choice.head, choice.query, choice.key].double().tolist()
    return Evaluation(
        kind=f"known attention: {task.name}",
        values=torch.cat(values, dim=-1),
        metrics=dict.fromkeys(ATTENTION_METRICS, True),
        methods=chosen,
        units=units,
        settings={
            **frozen.view.provenance(),
            "task": task.name,
            "prompts": len(task),
            "gap": max(gaps),
            "attention": sum(attention) / len(attention),
            "seed": seed,
        },
    )


def _questions(
    attribution: ScoreAttribution, choice: KnownChoice
) -> Iterator[tuple[Float[Tensor, "batch source"], Bool[Tensor, "batch source"]]]:
    """Scores and truth of the sources of the query, of the key, and of pairs of them."""
    pairs = attribution.pairs.detach().double().cpu()
    sides = (
        attribution.query_sources.double().cpu() + pairs.sum(2),
        attribution.key_sources.double().cpu() + pairs.sum(1),
    )
    if attribution.by == "token":
        true = [_marked(tokens, pairs.shape[1]) for tokens in (choice.query_tokens, choice.key_tokens)]
    else:
        parts = (choice.query_parts, choice.key_parts)
        true = [_named(each, attribution.names[0], choice).expand(len(pairs), -1) for each in parts]
    yield from zip(sides, true, strict=True)
    yield pairs.flatten(1), (true[0][:, :, None] & true[1][:, None]).flatten(1)


def _marked(positions: tuple[frozenset[int], ...], pos: int) -> Bool[Tensor, "batch pos"]:
    """True at the positions of each prompt."""
    return torch.tensor([[position in marked for position in range(pos)] for marked in positions])


def _named(parts: frozenset[str], names: list[str], choice: KnownChoice) -> Bool[Tensor, "part"]:
    """True at the components of these names."""
    missing = sorted(parts - set(names))
    if missing:
        raise InvalidInputError(
            f"known_attention: L{choice.layer}H{choice.head} reads no component {missing[0]!r}; before it are "
            f"{', '.join(names)}."
        )
    return torch.tensor([name in parts for name in names])


# ------------------------------------------------------------------ components


@checked_names
def known_components(
    model: ModelLike,
    task: ComponentTask,
    methods: Names = None,
    *,
    threshold: float = 0.05,
    only_correct: bool = True,
    steps: Whole = 5,
    memory: Memory = None,
) -> Evaluation:
    """Measure AUROC, precision and recall of each method's scores of nodes and edges that are known to matter.

    Args:
        model: the model whose components are known.
        task: what is known, such as ``demo.program("induction").components()``.
        methods: ``"logit_attribution"``, ``"contribution_graph"``, and those of `circuits.patch_scores`; None is all
            that the model allows.
        threshold: the share of the largest score from which a node or edge counts as predicted.
        only_correct: leave out pairs of which the model answers one prompt wrongly.
        steps: gradients of ``"integrated-gradients"`` and ``"frozen+qk"``.
        memory: what the runs of ``"patching"`` may allocate at once.

    Returns:
        An Evaluation with these metrics of nodes and edges per prompt; NaN where a method scores no edges.

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
    words = "a share of the largest score, above 0 and at most 1"
    threshold = real_number("threshold", threshold, lambda x: 0 < x <= 1, words)
    steps = whole_count("steps", steps)
    chosen = checked_methods(methods, COMPONENT_METHODS)
    work = PairWork(model, task.pairs, only_correct)
    numbers = [int(unit.removeprefix("prompt ")) for unit in work.units]
    skipped = dict[str, str]()
    values = torch.full((len(COMPONENT_METRICS), len(chosen), len(numbers)), torch.nan, dtype=torch.float64)
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
        metrics=dict.fromkeys(COMPONENT_METRICS, True),
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
        rows = zip(pairs.clean, pairs.target.tolist(), pairs.minus.tolist(), paths, strict=True)
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
    known = ((task.nodes, "node"), (task.edges, "edge"))
    return [
        [(scores, _known(true, scores, what)) for scores, (true, what) in zip(part, known, strict=False)]
        for part in parts
    ]


def _of_pairs(part: FrozenPairs, method: str, steps: int, memory: Memory) -> list[tuple[Scored, ...]]:
    """Scores of each prompt's nodes, and where the method has any of its edges."""
    if method == "logit_attribution":
        terms = logit_attribution(part.clean, part.target, part.minus, by="head")
        return [(dict(zip(terms.names, row, strict=True)),) for row in terms.scores[:, 0].tolist()]
    nodes = part.nodes(method, steps=steps, memory=memory)
    rows = nodes.scores[:, 0].tolist()
    if method not in EDGE_ROWS:
        return [(dict(zip(nodes.names, row, strict=True)),) for row in rows]
    edges = part.edges(method, steps=steps, memory=memory)
    pairs = edges.exists.nonzero().tolist()
    names = [ARROW.join((edges.sources[source], edges.destinations[end])) for source, end in pairs]
    of_both = zip(rows, edges.scores[:, edges.exists].tolist(), strict=True)
    return [(dict(zip(nodes.names, a, strict=True)), dict(zip(names, b, strict=True))) for a, b in of_both]


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
    """The truth, where the model has all of it."""
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
