"""How high does a method rank the tokens that truly determine the answer?

For each prompt of a task (`tensorlens_tl.evaluate.known.tasks`), source tokens are ranked by score:

| metric | of one prompt |
| --- | --- |
| `mrr` | 1 / rank of the best-placed true source; a random score has H_n / n for one source among n tokens |
| `precision` | share of true sources among the k best-placed tokens, k the number of true sources unless `k=` says |
| `mass` | share of the absolute scores that lies on true sources |
"""

from collections import Counter

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from tqdm.auto import tqdm

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.arguments import Methods, WholeNumber
from tensorlens_tl.evaluate.known.tasks import AnswerTask, KnownAnswers
from tensorlens_tl.evaluate.perturbing import PROMPTS_AT_ONCE, rank
from tensorlens_tl.evaluate.scorers import Explained, predictions, scorers_of, usable
from tensorlens_tl.models import ModelLike, ModelView, TokenLike
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.operator import token_ids
from tensorlens_tl.results import Evaluation

METRICS = ("mrr", "precision", "mass")


@checked_names
def known_answer(
    model: ModelLike,
    task: AnswerTask,
    methods: Methods = None,
    *,
    k: WholeNumber | None = None,
    minus: TokenLike = None,
    only_correct: bool = True,
    absolute: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> Evaluation:
    """Rank of the tokens that determine the answer, by each method's scores for the last token.

    Args:
        model: a TransformerLens model that can do the task.
        task: prompts, answers and true sources. Prompts of several lengths are run by length, without padding.
        methods: see `tensorlens_tl.evaluate.scorers`; None is every standard method that fits the model, and random.
        k: of `precision`; None is each prompt's number of true sources.
        minus: explain the predicted token's logit less this one's: a token, one for each prompt, or ``"runner-up"``,
            which also takes the place of a token that is itself predicted. None explains the logit alone.
        only_correct: leave out prompts that the model answers wrongly, where the true sources need not have been used.
        absolute: rank by absolute score.
        seed: of the random baseline and of the order of equal scores.
        progress: whether to show a bar.

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
        metrics=dict.fromkeys(METRICS, True),
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
    """`METRICS` of each prompt's scores."""
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
def expected_mrr(tokens: WholeNumber, sources: WholeNumber = 1) -> float:
    """What a random order gets: H_n / n for one source among n tokens, Σ_r P(best rank = r) / r for several.

    Raises:
        InvalidInputError: more sources than tokens.

    >>> from tensorlens_tl import evaluate
    >>> evaluate.expected_mrr(4) == (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4
    True
    """
    tokens = whole_number("tokens", tokens, least=1)
    miss = 1.0  # the probability that no source has come yet
    total = 0.0
    sources = whole_number("sources", sources, 1, tokens)
    for best in range(1, tokens - sources + 2):
        hit = sources / (tokens - best + 1)  # the probability of a source here, given that none came before
        total += miss * hit / best
        miss *= 1 - hit
    return total
