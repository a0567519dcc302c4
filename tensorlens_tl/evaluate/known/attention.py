"""Do the sources of an attention score name what chose the attention?

For heads whose choice is known (`tensorlens_tl.evaluate.known.truths`), `circuits.qk_attribution` takes the score at
the true query and key apart. A source's part in it is what its pairs sum to, the other side's bias included. Sources
are ranked by it, the most positive first:

| metric | of one head in one prompt: 1 / rank of the best-placed true … |
| --- | --- |
| `query token`, `key token` | … source token of the query, of the key |
| `token pair` | … pair of a true source token of the query and one of the key |
| `query part`, `key part` | … component that the query, or the key, is read from (embeddings, heads, MLPs) |
| `part pair` | … pair of such components |
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.circuits.scores import qk_attribution
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.arguments import Names
from tensorlens_tl.evaluate.known.patching import checked_methods
from tensorlens_tl.evaluate.known.truths import AttentionTask, KnownAttention, KnownChoice
from tensorlens_tl.evaluate.perturbing import rank
from tensorlens_tl.evaluate.scorers import RANDOM
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes import FrozenPass, freeze
from tensorlens_tl.results import Evaluation, ScoreAttribution

METHODS = ("qk_attribution", RANDOM)
METRICS = ("query token", "key token", "token pair", "query part", "key part", "part pair")


@checked_names
def known_attention(model: ModelLike, task: AttentionTask, methods: Names = None, *, seed: int = 0) -> Evaluation:
    """How high the true sources of each head's query and key are ranked: 1 / rank of the best-placed true one.

    Args:
        model: the model whose attention is known.
        task: what is known, such as ``demo.program("induction").attention()``.
        methods: ``"qk_attribution"`` and ``"random"``; None is both.
        seed: of the random baseline and of the order of equal scores.

    Returns:
        An Evaluation with `METRICS` per head and prompt; ``settings["gap"]`` is how far the parts are from summing
        to the scores at worst, and ``settings["attention"]`` the mean attention that the true keys get.

    Raises:
        InvalidInputError: no task, no such method, a head or position that the model does not have, or a true component
            that it does not have.
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
    chosen = checked_methods(methods, METHODS)
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
                columns.append(torch.stack([_reciprocal(_of(method, scores), true, ties) for method in chosen]))
        values.append(torch.stack(columns))
        units += [f"prompt {number}, L{choice.layer}H{choice.head}" for number in range(len(task))]
        attention += _attention(frozen, choice).tolist()
    return Evaluation(
        kind=f"known attention: {task.name}",
        values=torch.cat(values, dim=-1),
        metrics=dict.fromkeys(METRICS, True),
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
        true = [_named(parts, attribution.names[0], choice).expand(len(pairs), -1) for parts in _parts(choice)]
    yield from zip(sides, true, strict=True)
    yield pairs.flatten(1), (true[0][:, :, None] & true[1][:, None]).flatten(1)


def _parts(choice: KnownChoice) -> tuple[frozenset[str], frozenset[str]]:
    return choice.query_parts, choice.key_parts


def _marked(positions: tuple[frozenset[int], ...], pos: int) -> Bool[Tensor, "batch pos"]:
    """True at the positions of each prompt."""
    return torch.tensor([[position in marked for position in range(pos)] for marked in positions])


def _named(parts: frozenset[str], names: list[str], choice: KnownChoice) -> Bool[Tensor, "part"]:
    """True at the components of these names.

    Raises:
        InvalidInputError: there is none of a name.
    """
    missing = sorted(parts - set(names))
    if missing:
        raise InvalidInputError(
            f"known_attention: L{choice.layer}H{choice.head} reads no component {missing[0]!r}; before it are "
            f"{', '.join(names)}."
        )
    return torch.tensor([name in parts for name in names])


def _of(method: str, scores: Tensor) -> Tensor:
    """The method's scores; those of the random baseline are all equal, and ordered by ties alone."""
    if method == RANDOM:
        return torch.zeros_like(scores)
    return scores


def _reciprocal(scores: Tensor, true: Bool[Tensor, "batch source"], ties: Tensor) -> Float[Tensor, "batch"]:
    """1 / rank of the best-placed true source."""
    ranks = rank(scores, torch.ones_like(true), "descending", ties)
    return 1 / (ranks.masked_fill(~true, scores.shape[1]).amin(1) + 1).double()


def _attention(frozen: FrozenPass, choice: KnownChoice) -> Float[Tensor, "batch"]:
    """What the head gives to the true key."""
    rows = torch.arange(len(choice.query))
    return frozen.pattern(choice.layer).cpu()[rows, choice.head, choice.query, choice.key].double()
