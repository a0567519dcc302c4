"""What does compression cost, and does it ever help? Loss and accuracy on held-out prompts, against the ratio.

Every prompt is run by the model as it is and by each compressed one, so that changes are differences of pairs and their
intervals are narrower than those of either. Where there are several candidates under one label (ranks, layers, ρ), the
best on *validation* prompts is the one that is reported, on the others: the best of many on the prompts that are
reported would look better than it is.

| metric | of one prompt |
| --- | --- |
| `added loss` | −log p of the answer, compressed less uncompressed |
| `accuracy change` | the share of answers that are the model's first choice, compressed less uncompressed |
| `loss`, `accuracy` | of the compressed model itself |
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tensorlens_tl._arguments import Number, Seed, check_choice, checked_names, real_number
from tensorlens_tl.algebra.memory import in_bytes
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.compress import Plan
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.evaluate.known import KnownAnswers
from tensorlens_tl.evaluate.scorers import PROMPTS_AT_ONCE
from tensorlens_tl.hooks import model_points, refuse_attached, states_and_logits, unheld_run
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.models.lifecycle import refuse_dropout
from tensorlens_tl.passes.inputs import InputLike, Prompt, prepare
from tensorlens_tl.results import Evaluation
from tensorlens_tl.results.statistics import bootstrap_interval

if TYPE_CHECKING:
    import pandas as pd

    CompressionTask = InputLike | KnownAnswers | tuple[Tensor, Tensor]
    """Prompts, prompts with known answers, or token ids and answers."""

    Candidate = Plan | Callable[[], Plan]
    """A plan, or a function that makes one."""

    Plans = Mapping[str, Candidate | Sequence[Candidate] | Mapping[float, Candidate | Sequence[Candidate]]]
    """Candidates by label, or by label and ratio."""

    ChooseBy = Literal["loss", "accuracy"]
else:
    CompressionTask = Candidate = Plans = ChooseBy = Any  # our own errors say what is wrong

METRICS: dict[str, bool | None] = {"added loss": False, "accuracy change": True, "loss": False, "accuracy": True}
CHOOSE_BY = ("loss", "accuracy")
UNCOMPRESSED = "uncompressed"
NO_ANSWER = -100
"""At a position without an answer, as in torch's cross-entropy."""


@checked_names
def compression(
    model: ModelLike,
    task: CompressionTask,
    plans: Plans,
    *,
    validation: Number = 1 / 3,
    choose_by: ChooseBy = "loss",
    seed: Seed = 0,
) -> Evaluation:
    """Measure loss and accuracy of a model under compressions.

    Args:
        model: a TransformerLens model that predicts tokens.
        task: prompts, as text or token ids, each token of which is predicted from those before; `KnownAnswers`, whose
            answers are; or token ids and answers ``(tokens, answers)``, both `[prompt, pos]`, -100 where there is none
            (for masked models).
        plans: label → a plan of `compress.plan`, a function that makes one, or several of either as candidates; or
            label → ratio → the same, the same ratios under every label (each plan has at least its ratio, with MLPs
            the attention's).
        validation: the share of prompts that candidates are chosen on, which are not reported.
        choose_by: ``"loss"`` or ``"accuracy"`` on them.
        seed: of the prompts that are for validation.

    Returns:
        An Evaluation of the metrics above; with ratios, their mean over ratios, and curves over them
        (`compression_table` is their table). ``settings["chosen"]`` says which candidates were.

    Raises:
        InvalidInputError: no plans, plans of another model, ratios that differ, a task of another kind, or too few
            prompts.
        UnsupportedModelError: the model predicts no tokens.
        FrozenModelError: a frozen pass is attached to the model.
    """
    check_choice("choose_by", choose_by, CHOOSE_BY)
    view = ModelView(model)
    view.refuse_encoder_decoder("compression")
    refuse_dropout(view.model)
    refuse_attached(view.model)
    candidates, ratios = _candidates(plans)
    questions = Questions.of(view, task)
    several = any(len(plans_at_ratio) > 1 for by_ratio in candidates.values() for plans_at_ratio in by_ratio)
    chosen_on, reported = _split(len(questions), validation, several, seed)
    base = _measure(view, questions, reported)
    names: dict[str, list[str]] = {}
    rows = {UNCOMPRESSED: [base] * max(1, len(ratios))}
    bar = tqdm(total=sum(map(len, candidates.values())), desc="compression", leave=False, delay=2.0)
    for label, by_ratio in candidates.items():
        rows[label] = []
        names[label] = []
        for plans_at_ratio in by_ratio:
            plan = _best(view, questions, plans_at_ratio, chosen_on, choose_by)
            if ratios and "mlp" not in plan.options:  # with MLPs beside the attention the ratio is the attention's
                ratio = ratios[len(rows[label])]
                if plan.ratio < 0.99 * ratio:
                    raise InvalidInputError(
                        f"plans: {label!r} at ratio {ratio:g} holds a plan of ratio {plan.ratio:.3g}."
                    )
            rows[label].append(_measure(view, questions, reported, plan))
            names[label].append(f"{plan.label}, layers {list(plan.layers)}, ratio {plan.ratio:.3g}")
            bar.update()
    bar.close()
    # [loss and accuracy, label, prompt, step]
    scores = torch.stack([torch.stack(row, dim=-1) for row in rows.values()], dim=1)
    curves = torch.cat([scores - base[:, None, :, None], scores])
    result = Evaluation(
        kind="compression",
        values=curves.mean(-1),
        metrics=dict(METRICS),
        methods=list(rows),
        units=[f"prompt {number}" for number in reported.tolist()],
        settings={
            **view.provenance(),
            "task": questions.name,
            "prompts": len(reported),
            "validation": len(chosen_on),
            "base_loss": float(base[0].mean()),
            "base_accuracy": float(base[1].mean()),
            "chosen": names,
            "seed": seed,
        },
    )
    if not ratios:
        return result
    axis = torch.tensor(ratios, dtype=torch.float64)
    return replace(result, curves=curves, axis=axis, axis_name="compression ratio")


@checked_names
def compression_table(result: Evaluation, metric: str = "added loss", *, level: float = 0.95) -> "pd.DataFrame":
    """One metric by method and ratio: ``(ratio, "mean" | "low" | "high")``, with bootstrap intervals over prompts.

    Raises:
        InvalidInputError: no result of `compression` with ratios, or no such metric.
    """
    import pandas as pd

    if result.kind != "compression" or result.curves is None or result.axis is None:
        raise InvalidInputError(f"compression_table: this is a result of {result.kind!r} without ratios.")
    check_choice("compression_table: metric", metric, result.metrics)
    values = result.curves[list(result.metrics).index(metric)].transpose(1, 2)
    low, high = bootstrap_interval(values, level)
    columns = {}
    for step, ratio in enumerate(result.axis.tolist()):
        for name, part in (("mean", values.mean(-1)), ("low", low), ("high", high)):
            columns[f"{ratio:g}", name] = part[:, step].tolist()
    return pd.DataFrame(columns, index=pd.Index(result.methods, name="method"))


# ------------------------------------------------------------------ questions


@dataclass(frozen=True, eq=False)
class Questions:
    """Prompts with the right tokens at some of their positions.

    Attributes:
        parts: the prompts, some at once.
        positions, answers: where logits are read, `[prompt, answer]`, and the right token there.
        counts: True at the answers that count.
    """

    name: str
    parts: list[Prompt]
    positions: Int[Tensor, "prompt answer"]
    answers: Int[Tensor, "prompt answer"]
    counts: Bool[Tensor, "prompt answer"]

    def __len__(self) -> int:
        return len(self.answers)

    @classmethod
    def of(cls, view: ModelView, task: Any) -> "Questions":
        """A task of any kind."""
        if view.unembedding is None:
            raise UnsupportedModelError(f"compression: {view.description} predicts no tokens.")
        if isinstance(task, KnownAnswers):
            task.refuse_several_lengths("compression")
            positions = torch.full((len(task), 1), task.tokens.shape[1] - 1)
            answers = _checked(view, task.answers[:, None])
            return cls(task.name, _in_parts(view, task.tokens), positions, answers, torch.ones_like(answers).bool())
        if isinstance(task, tuple) and len(task) == 2 and all(isinstance(part, Tensor) for part in task):
            tokens, answers = task
            if tokens.ndim != 2 or tokens.shape != answers.shape or not bool((answers != NO_ANSWER).any(-1).all()):
                raise InvalidInputError(
                    f"task: tokens {tuple(tokens.shape)} and answers {tuple(answers.shape)} must be [prompt, pos] "
                    f"both, with at least one answer in every prompt ({NO_ANSWER} where there is none)."
                )
            positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
            counts = answers != NO_ANSWER
            answers = _checked(view, answers)
            return cls("answers", _in_parts(view, tokens), positions, answers.clamp_min(0), counts)
        whole = prepare(view, task)
        if whole.tokens.shape[1] < 2 or not bool((whole.mask.sum(-1) > 1).all()):
            raise InvalidInputError("task: a prompt of one token has no next token to predict.")
        tokens = whole.tokens.cpu()
        mask = whole.mask.cpu()
        positions = torch.arange(tokens.shape[1] - 1).expand(len(tokens), -1)
        counts = mask[:, :-1] & mask[:, 1:]
        return cls("next tokens", _in_parts(view, tokens, mask), positions, tokens[:, 1:], counts)


def _checked(view: ModelView, answers: Tensor) -> Tensor:
    """Answers that the model can give."""
    assert view.unembedding is not None
    tokens = view.unembedding[0].shape[1]
    invalid = answers[(answers != NO_ANSWER) & ((answers < 0) | (answers >= tokens))]
    if len(invalid):
        raise InvalidInputError(f"task: the answer {int(invalid[0])} is outside the vocabulary of {tokens} tokens.")
    return answers


def _in_parts(view: ModelView, tokens: Tensor, mask: Tensor | None = None) -> list[Prompt]:
    """Prompts for the model, as many at once as their logits fit into the working memory."""
    per_prompt = 3 * tokens.shape[1] * view.d_vocab * 4
    step = max(1, min(PROMPTS_AT_ONCE, in_bytes(None) // per_prompt))
    if mask is None or bool(mask.all()):
        return [prepare(view, rows) for rows in tokens.split(step)]
    rows_and_masks = zip(tokens.split(step), mask.split(step), strict=True)
    return [prepare(view, rows, attention_mask=real) for rows, real in rows_and_masks]


# ------------------------------------------------------------------ what is measured


def _measure(
    view: ModelView, questions: Questions, prompts: Int[Tensor, "chosen"], plan: Plan | None = None
) -> Float[Tensor, "2 chosen"]:
    """Loss and accuracy of some prompts, by the model itself or compressed."""
    unembed_in = model_points(view).unembed_in
    assert unembed_in is not None  # it predicts tokens
    scores = []
    start = 0
    compressed = nullcontext() if plan is None else plan.applied()
    with unheld_run(view.model), torch.no_grad(), compressed:
        for part in questions.parts:
            rows = slice(start, start + len(part.tokens))
            start = rows.stop
            selection = prompts[(prompts >= rows.start) & (prompts < rows.stop)] - rows.start
            if len(selection):
                positions = questions.positions[rows].to(part.tokens.device)
                _, logits = states_and_logits(view.model, part.kwargs, unembed_in, positions)
                part_scores = _scores(logits, questions.answers[rows], questions.counts[rows])
                scores.append(part_scores[:, selection])
    return torch.cat(scores, dim=1)


def _scores(logits: Any, answers: Tensor, counts: Tensor) -> Float[Tensor, "2 prompt"]:
    """−log p of the answer and whether it is the first choice, averaged over each prompt's answers that count."""
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise UnsupportedModelError("compression: this model's output is no tensor of logits [batch, pos, d_vocab].")
    answers = answers.to(logits.device)
    counts = counts.to(logits.device)
    logits = upcast(logits)
    of_answer = torch.take_along_dim(logits, answers[..., None], dim=-1)[..., 0]
    loss = logits.logsumexp(-1) - of_answer
    correct = logits.argmax(-1) == answers
    both = torch.stack([loss.double(), correct.double()])
    return (torch.where(counts, both, 0).sum(-1) / counts.sum(-1)).cpu()


def _best(
    view: ModelView,
    questions: Questions,
    candidates: Sequence[Candidate],
    prompts: Int[Tensor, "chosen"],
    choose_by: str,
) -> Plan:
    """The candidate that does best on the validation prompts."""

    def cost(plan: Plan) -> float:
        loss, accuracy = _measure(view, questions, prompts, plan).mean(-1).tolist()
        return {"loss": loss, "accuracy": -accuracy}[choose_by]

    plans = (_plan(view, candidate) for candidate in candidates)  # one at a time: each may be a good part of the model
    return next(plans) if len(candidates) == 1 else min(plans, key=cost)


def _plan(view: ModelView, candidate: Candidate) -> Plan:
    plan = candidate
    if callable(candidate) and not isinstance(candidate, Plan):
        plan = candidate()
    if not isinstance(plan, Plan):
        raise InvalidInputError(f"plans: pass what compress.plan made, got {type(plan).__name__}.")
    if plan.model is not view.model:
        raise InvalidInputError(f"plans: {plan.label!r} was made for another model, {plan.description}.")
    return plan


def _candidates(plans: Plans) -> tuple[dict[str, list[Sequence[Candidate]]], list[float]]:
    """The candidates by label and ratio, and the ratios (none where a label has no ratios)."""
    if not isinstance(plans, Mapping) or not plans:
        raise InvalidInputError("plans: pass a table of them by label, such as {'laser': compress.plan(...)}.")
    if UNCOMPRESSED in plans:
        raise InvalidInputError(f"plans: {UNCOMPRESSED!r} is the model itself; use another label.")
    tables = {label: entry for label, entry in plans.items() if isinstance(entry, Mapping)}
    if not tables:
        return {str(label): [_as_list(entry)] for label, entry in plans.items()}, []
    ratios = sorted(next(iter(tables.values())))
    if len(tables) < len(plans) or not ratios or any(sorted(table) != ratios for table in tables.values()):
        raise InvalidInputError("plans: pass the same ratios under every label, or none.")
    by_ratio = {str(label): [_as_list(table[ratio]) for ratio in ratios] for label, table in tables.items()}
    return by_ratio, [float(ratio) for ratio in ratios]


def _as_list(entry: Any) -> Sequence[Candidate]:
    if not isinstance(entry, list | tuple):
        return [entry]
    if not entry:
        raise InvalidInputError("plans: a label without any.")
    return list(entry)


def _split(
    prompts: int, share: Number, several: bool, seed: int
) -> tuple[Int[Tensor, "chosen"], Int[Tensor, "reported"]]:
    """Which prompts candidates are chosen on, and which are reported."""
    share = real_number("validation", share, lambda x: 0 < x < 1, "pass a share of the prompts, above 0 and below 1")
    count = 0
    if several:
        count = max(1, round(share * prompts))
    if count >= prompts:
        raise InvalidInputError(f"task: {prompts} prompts are too few to choose on some and report on others.")
    order = torch.randperm(prompts, generator=torch.Generator().manual_seed(seed))
    return order[:count].sort().values, order[count:].sort().values
