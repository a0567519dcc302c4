"""Few-shot prompts: examples of a relation, then a subject; all of one token length, as an operator fits one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.arguments import PromptLength, WholeNumber
from tensorlens_tl.evaluate.paper.relations import Sample, few_shot_text
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes.inputs import prepare


@dataclass(frozen=True)
class Prompts:
    """Few-shot prompts about several subjects: token ids of one length, and the last token of each subject."""

    tokens: Int[Tensor, "prompt pos"]
    subject_ends: Int[Tensor, "prompt"]
    samples: tuple[Sample, ...]


@checked_names
def few_shot_prompts(
    model: ModelLike,
    template: str,
    subjects: Sequence[Sample],
    examples: Sequence[Sample] | Sequence[Sequence[Sample]] = (),
    *,
    length: PromptLength = None,
    separator: str = "\n",
) -> Prompts:
    """Prompts that ask for the objects of some subjects, after examples.

    Args:
        model: a TransformerLens model with a tokenizer.
        template: with ``{}`` for the subject.
        subjects: whose objects the prompts ask for.
        examples: shown before each subject, the same for all, or a list of them for each.
        length: ``"most common"`` selects the prompts of the most common token length (Appendix D), an integer those of
            that length; None insists that all have the same.
        separator: between examples.

    Raises:
        InvalidInputError: no subject, or prompts of unequal length (says which, and what the most common length is).

    >>> from tensorlens_tl import evaluate
    >>> pairs = evaluate.shipped_relations()["animal young"].samples[:1]
    >>> evaluate.few_shot_prompts(model, "{} is", pairs).samples == tuple(pairs)
    True
    """
    if not subjects:
        raise InvalidInputError("few_shot_prompts: no subject to ask for.")
    shown: Sequence[Any] = examples
    if not examples or isinstance(examples[0], Sample):
        shown = [examples] * len(subjects)  # the same before each subject
    texts = [
        few_shot_text(template, sample_examples, sample.subject, separator)
        for sample_examples, sample in zip(shown[: len(subjects)], subjects, strict=True)
    ]
    rows = token_rows(model, texts)
    selected = of_one_length(rows, [sample.subject for sample in subjects], length)
    view = ModelView(model)
    ends = [_subject_end(view, template, rows[number], subjects[number], texts[number]) for number in selected]
    return Prompts(
        torch.tensor([rows[number] for number in selected]),
        torch.tensor(ends),
        tuple(subjects[number] for number in selected),
    )


def token_rows(model: ModelLike, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text."""
    view = ModelView(model)
    return [prepare(view, text).tokens[0].tolist() for text in texts]


def of_one_length(rows: Sequence[Sequence[int]], names: Sequence[str], length: PromptLength) -> list[int]:
    """Which rows are of one token length: all of them, the most common, or a number.

    Raises:
        InvalidInputError: unequal lengths where all must agree, or no row of that length.
    """
    lengths = Counter(map(len, rows))
    common = lengths.most_common(1)[0][0]
    target_length = common
    if length not in (None, "most common"):
        target_length = whole_number("length", length, least=1)
    selected = [number for number, row in enumerate(rows) if len(row) == target_length]
    if length is None and len(selected) < len(rows):
        odd = [f"{name!r} ({len(row)})" for name, row in zip(names, rows, strict=True) if len(row) != common]
        raise InvalidInputError(
            f"examples of unequal length: {', '.join(odd[:5])} differ from the most common length, {common} tokens. "
            "Leave them out, or pass length='most common'."
        )
    if not selected:
        raise InvalidInputError(
            f"length={target_length}: no prompt has it; there are {dict(lengths)} (length: prompts)."
        )
    return selected


def _subject_end(view: ModelView, template: str, tokens: Sequence[int], sample: Sample, text: str) -> int:
    """The subject's last token: what comes after it is as long as the template's rest is by itself."""
    before = text.removesuffix(template.split("{}")[1])
    before_tokens = prepare(view, before).tokens[0].tolist()
    same = 0
    for token, other in zip(before_tokens, tokens, strict=False):
        if token != other:
            break
        same += 1
    if same == 0:
        raise InvalidInputError(f"cannot find the subject {sample.subject!r} among the tokens of its prompt.")
    return same - 1


def of_common_length(model: ModelLike, template: str, samples: Sequence[Sample]) -> list[Sample]:
    """The samples whose prompts, alone and with their objects, have the most common token lengths (Appendix D).

    Few-shot prompts of any of them then have the same length.
    """
    view = ModelView(model)

    def lengths(sample: Sample) -> tuple[int, int]:
        question = few_shot_text(template, [], sample.subject)
        whole = f"{question} {sample.object}"
        return prepare(view, question).tokens.shape[1], prepare(view, whole).tokens.shape[1]

    token_lengths = [lengths(sample) for sample in samples]
    common = Counter(token_lengths).most_common(1)[0][0]
    return [sample for sample, length in zip(samples, token_lengths, strict=True) if length == common]


def require_enough(have: int, m: int) -> None:
    """Raise `InvalidInputError` for fewer than m examples."""
    if have < m:
        raise InvalidInputError(f"RelationDecoder.fit: {have} examples, m={m} are needed.")


def leave_one_out(
    model: ModelLike,
    template: str,
    samples: Sequence[Sample],
    m: int,
    shots: WholeNumber | None = None,
    length: PromptLength = None,
) -> Prompts:
    """m prompts, each asking for one sample after showing `shots` of the others."""
    shots = m - 1 if shots is None else whole_number("shots", shots, 0, len(samples) - 1)
    shown = [[s for s in samples if s is not sample][:shots] for sample in samples]
    prompts = few_shot_prompts(model, template, samples, shown, length=length)
    require_enough(len(prompts.tokens), m)
    return Prompts(prompts.tokens[:m], prompts.subject_ends[:m], prompts.samples[:m])


def object_tokens(model: ModelLike, template: str, samples: Sequence[Sample]) -> dict[Sample, int]:
    """The first token of each object after its prompt."""
    view = ModelView(model)
    tokens = {}
    for sample in samples:
        question = few_shot_text(template, [], sample.subject)
        position = prepare(view, question).tokens.shape[1]
        tokens[sample] = int(prepare(view, f"{question} {sample.object}").tokens[0, position])
    return tokens
