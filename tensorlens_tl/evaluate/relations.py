"""Relation decoding: does one linear map, fitted to a few examples, give the objects of other subjects?

* `RelationDecoder` (TensorLens 2026, section 4.2, Eq. 26): the frozen operators of m few-shot prompts of one length, at
  their last position, averaged: ``o(X) = (1/m) Σ_k (T_k X + B_k)``. Applied to another prompt's embeddings X it
  predicts the final state, which is unembedded.
* `LinearRelation` (LRE, Hernandez et al. 2024): ``o(s) = β·W·s + b`` from the subject's last token at one layer, W the
  mean Jacobian of the final state and b the mean of ``o − W·s`` over the prompts. The live model, differentiated.

What counts for both is whether their highest-ranked token is the one that the model itself predicts.

A relation has a subject, an object, and templates that ask for it; in the published JSON format.

``{"name": ..., "prompt_templates": ["The capital of {} is"], "samples": [{"subject": ..., "object": ...}]}``, the
format of Hernandez et al. 2024; of its other fields ``properties.relation_type`` is read, as the category.

    >>> relation = shipped_relations()["country capital"]
    >>> few_shot_text(relation.prompt_templates[0], relation.samples[:1], relation.samples[1].subject)
    'The capital of France is Paris\\nThe capital of Italy is'
"""

import json
import os
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from tensorlens_tl._arguments import (
    Seed,
    Whole,
    check_choice,
    checked_names,
    formerly,
    plain,
    whole_count,
    whole_number,
)
from tensorlens_tl.algebra.memory import chunks
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.errors import FileFormatError, InvalidInputError, UnsupportedModelError
from tensorlens_tl.evaluate.scorers import RANDOM, PromptLength, predictions
from tensorlens_tl.hooks import in_this_thread, run
from tensorlens_tl.models import ONCE_ACTIVATION, FrozenRule, ModelLike, ModelView
from tensorlens_tl.models.offload import saved_by_name
from tensorlens_tl.passes import FrozenPass, freeze
from tensorlens_tl.passes.inputs import InputLike, tokenized
from tensorlens_tl.passes.operator import FrozenOperator
from tensorlens_tl.results import Evaluation

if TYPE_CHECKING:
    import pandas as pd

SHIPPED = Path(__file__).parent / "data" / "relations"

BETA = 2.25
"""The scale that Hernandez et al. use for GPT-J; 1 is the first-order approximation itself."""

PROTOCOLS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"m": 3, "shots": None, "splits": 6, "top_k": 20, "layers": (0,), "betas": (2.5,)},
}
"""Settings by name: those of TensorLens (Section 4.2 and Appendix D), LRE from the input embeddings."""


@dataclass(frozen=True)
class Sample:
    """One pair of a relation."""

    subject: str
    object: str


@dataclass(frozen=True)
class Relation:
    """A named relation: templates with ``{}`` for the subject, its pairs, and its category where the file has one."""

    name: str
    prompt_templates: tuple[str, ...]
    samples: tuple[Sample, ...]
    category: str = ""

    def __repr__(self) -> str:
        return f"Relation({self.name!r}, {len(self.samples)} samples, {self.prompt_templates[0]!r})"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Relation":
        """Read one JSON file; raise `FileFormatError` where it is no JSON, or lacks fields of the format."""
        try:
            facts: Any = json.loads(Path(path).read_text(encoding="utf-8"))
            samples = tuple(Sample(str(s["subject"]), str(s["object"])) for s in facts["samples"])
            category = str(facts.get("properties", {}).get("relation_type", ""))
            relation = cls(str(facts["name"]), tuple(map(str, facts["prompt_templates"])), samples, category)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FileFormatError(
                f"{path}: not a relation ({type(error).__name__}: {error}). It is JSON with name, prompt_templates and "
                "samples of subject and object."
            ) from error
        if not relation.prompt_templates or any(t.count("{}") != 1 for t in relation.prompt_templates):
            raise FileFormatError(f"{path}: every prompt template needs one {{}} for the subject.")
        if not relation.samples:
            raise FileFormatError(f"{path}: no samples.")
        return relation


@lru_cache
def shipped_relations() -> dict[str, Relation]:
    """The relations that come with the library, by name; the bundled relations model was trained on them.

    >>> from tensorlens_tl import evaluate
    >>> sorted(evaluate.shipped_relations())[:2]
    ['adjective opposite', 'animal young']
    """
    relations = [Relation.load(path) for path in sorted(SHIPPED.glob("*.json"))]
    return {relation.name: relation for relation in relations}


def few_shot_text(template: str, examples: Sequence[Sample], subject: str, separator: str = "\n") -> str:
    """A prompt: examples filled in with their objects, then the template with the subject alone."""
    if template.count("{}") != 1:
        raise InvalidInputError(f"template={template!r}: it needs one {{}} for the subject.")
    statements = [f"{template.replace('{}', example.subject)} {example.object}" for example in examples]
    return separator.join([*statements, template.replace("{}", subject)])


# ------------------------------------------------------------------ few-shot prompts


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
    """Build prompts for the objects of some subjects, after examples.

    Args:
        model: a TransformerLens model with a tokenizer.
        template: with ``{}`` for the subject.
        subjects: whose objects the prompts ask for.
        examples: shown before each subject, the same for all, or a list of them for each.
        length: ``"most common"`` selects the prompts of the most common token length (Appendix D), an integer those of
            that length; None requires one length.
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
    view = ModelView(model)
    rows = tokenized(view, texts)
    selected = of_one_length(rows, [sample.subject for sample in subjects], length)
    rest = template.split("{}")[1]
    ends = list[int]()
    for number in selected:  # what comes after the subject is as long as the template's rest is by itself
        (before,) = tokenized(view, texts[number].removesuffix(rest))
        same = list(takewhile(lambda pair: pair[0] == pair[1], zip(before, rows[number], strict=False)))
        if not same:
            subject = subjects[number].subject
            raise InvalidInputError(f"cannot find the subject {subject!r} among the tokens of its prompt.")
        ends.append(len(same) - 1)
    return Prompts(
        torch.tensor([rows[at] for at in selected]), torch.tensor(ends), tuple(subjects[at] for at in selected)
    )


def of_one_length(rows: Sequence[Sequence[int]], names: Sequence[str], length: PromptLength) -> list[int]:
    """Which rows are of one token length: all of them, the most common, or a number."""
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


def of_common_length(model: ModelLike, template: str, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples whose prompts, alone and with objects, have the most common token lengths (Appendix D).

    Few-shot prompts of any of them then have the same length.
    """
    token_lengths = [tuple(map(len, _question_and_answer(model, template, sample))) for sample in samples]
    common = Counter(token_lengths).most_common(1)[0][0]
    return [sample for sample, length in zip(samples, token_lengths, strict=True) if length == common]


def _question_and_answer(model: ModelLike, template: str, sample: Sample) -> list[list[int]]:
    """Token ids of a prompt without examples, and of the same with its object."""
    question = few_shot_text(template, [], sample.subject)
    return tokenized(ModelView(model), [question, f"{question} {sample.object}"])


def require_enough(have: int, m: int) -> None:
    """Raise `InvalidInputError` for fewer than m examples."""
    if have < m:
        raise InvalidInputError(f"RelationDecoder.fit: {have} examples, m={m} are needed.")


def leave_one_out(
    model: ModelLike,
    template: str,
    samples: Sequence[Sample],
    m: int,
    shots: Whole | None = None,
    length: PromptLength = None,
) -> Prompts:
    """m prompts, each asking for one sample after showing `shots` of the others."""
    shots = m - 1 if shots is None else whole_number("shots", shots, 0, len(samples) - 1)
    shown = [[s for s in samples if s is not sample][:shots] for sample in samples]
    prompts = few_shot_prompts(model, template, samples, shown, length=length)
    require_enough(len(prompts.tokens), m)
    return Prompts(prompts.tokens[:m], prompts.subject_ends[:m], prompts.samples[:m])


# ------------------------------------------------------------------ decoders


if TYPE_CHECKING:
    Examples = Relation | Sequence[Sample] | Sequence[tuple[str, str]] | Sequence[str] | Prompts | Tensor
    """A relation, pairs of subject and object, texts, or token ids `[prompt, pos]`."""

    DecoderPrompts = Prompts | InputLike | FrozenPass
    """Texts or token ids of the examples' length, or a pass of them."""
else:
    Examples = DecoderPrompts = Any  # our own errors say what is wrong


@dataclass(frozen=True, eq=False, repr=False)
class RelationDecoder:
    """The mean of the frozen operators of a few prompts, at their last position (TensorLens Eq. 26); see `fit`."""

    frozen: FrozenPass
    operator: FrozenOperator

    def __repr__(self) -> str:
        prompts, pos = self.frozen.tokens.shape
        return f"RelationDecoder(m={prompts}, pos={pos}, {self.frozen.view.description})"

    @classmethod
    @formerly(ONCE_ACTIVATION)
    def fit(
        cls,
        model: ModelLike,
        examples: Examples,
        m: Whole = 3,
        *,
        template: str | None = None,
        shots: Whole | None = None,
        length: PromptLength = None,
        rule: FrozenRule = "frozen",
    ) -> "RelationDecoder":
        """Freeze m prompts, and average their operators.

        Args:
            model: a TransformerLens model that predicts tokens.
            examples: a `Relation`, a list of `Sample` or ``(subject, object)`` pairs with `template`, or prompts of one
                length: texts, or token ids `[prompt, pos]`.
            m: how many of them, from the first on.
            template: where `examples` are pairs, or instead of a relation's first.
            shots: how many of the others each prompt shows before its subject; None is all m − 1.
            length: as in `few_shot_prompts`, ``"most common"`` for Appendix D.
            rule: see `FrozenPass.operator`.

        Raises:
            InvalidInputError: fewer than m examples, or of unequal length (says which).
        """
        m = whole_number("m", m, least=1)
        ModelView(model).refuse_encoder_decoder("relation decoding")
        tokens = _example_tokens(model, examples, m, template, shots, length)
        frozen = freeze(model, tokens)
        return cls(frozen, frozen.operator(rule=rule))

    def states(self, prompts: DecoderPrompts) -> Float[Tensor, "prompt d_model"]:
        """Apply the mean operator to other prompts' embeddings: the predicted final state at their last token.

        `prompts` are texts or token ids, or a `FrozenPass`, of the examples' length; others raise `InvalidInputError`.
        """
        x = self._embeddings(prompts)
        states = torch.empty(len(x), x.shape[-1], dtype=x.dtype, device=x.device)
        for part in chunks(len(x), self.frozen.row_bytes, None, "relation decoding"):
            rows = x[part.start : part.stop, None].expand(-1, *self.operator.x.shape)
            states[part.start : part.stop] = self.operator(rows)[:, :, -1].mean(1)
        return states

    def logits(self, prompts: DecoderPrompts) -> Float[Tensor, "prompt d_vocab"]:
        """The predicted states, unembedded (before any soft cap, which changes no rank).

        Raises:
            InvalidInputError: prompts of another length.
            UnsupportedModelError: the model predicts no tokens, or has a prediction head besides its unembedding.
        """
        return unembed(self.frozen, self.states(prompts))

    def decode(self, prompts: DecoderPrompts) -> Int[Tensor, "prompt"]:
        """The highest-ranked token for each prompt."""
        return self.logits(prompts).argmax(-1)

    def _embeddings(self, prompts: DecoderPrompts) -> Tensor:
        if isinstance(prompts, Prompts):
            prompts = prompts.tokens
        frozen = prompts if isinstance(prompts, FrozenPass) else freeze(self.frozen.model, prompts, verify=False)
        length = self.frozen.tokens.shape[1]
        other_length = frozen.tokens.shape[1]
        if length != other_length or not bool(frozen.mask.all()):
            raise InvalidInputError(
                f"the decoder was made from prompts of {length} tokens, these have {other_length}: an operator fits "
                "one length. Choose prompts with few_shot_prompts(..., length=...)."
            )
        return frozen.resid_pre(0)


def _example_tokens(
    model: ModelLike,
    examples: Any,
    m: int,
    template: str | None,
    shots: Whole | None,
    length: PromptLength,
) -> Int[Tensor, "m pos"]:
    """The first m prompts of one length, from examples of any kind that `RelationDecoder.fit` takes."""
    if isinstance(examples, Relation):
        if template is None:
            template = examples.prompt_templates[0]
        examples = examples.samples
    if isinstance(examples, Prompts):
        examples = examples.tokens
    if not isinstance(examples, Tensor):
        examples = plain(examples)  # a column of a data frame, an array
        if not examples:
            raise InvalidInputError("RelationDecoder.fit: no examples.")
        if template is not None:
            samples = [each if isinstance(each, Sample) else Sample(*map(str, each)) for each in examples]
            require_enough(len(samples), m)
            if length is None:
                samples = samples[:m]
            return leave_one_out(model, template, samples, m, shots, length).tokens
        if not isinstance(examples[0], str):
            raise InvalidInputError(
                "RelationDecoder.fit: pass a Relation, texts, or token ids [prompt, pos]; pairs of subject and object "
                "need template= with one {}."
            )
        rows = tokenized(ModelView(model), examples)
        examples = torch.tensor([rows[number] for number in of_one_length(rows, examples, length)])
    require_enough(len(examples), m)
    return examples[:m]


@dataclass(frozen=True, eq=False, repr=False)
class LinearRelation:
    """LRE (Hernandez et al. 2024): ``o = β·W·s + b`` from the subject's state at one layer to the final state."""

    frozen: FrozenPass
    layer: int
    W: Float[Tensor, "d d"]
    b: Float[Tensor, "d"]
    beta: float = 1.0

    def __repr__(self) -> str:
        prompts = len(self.frozen.tokens)
        return f"LinearRelation(m={prompts}, layer={self.layer}, beta={self.beta:g}, {self.frozen.view.description})"

    @classmethod
    def fit(
        cls, model: ModelLike, prompts: Prompts, *, layer: Whole | None = None, beta: float = 1.0
    ) -> "LinearRelation":
        """Average Jacobian and bias over some prompts, on the live model.

        Args:
            model: a TransformerLens model that predicts tokens.
            prompts: of one length.
            layer: the subject's state is taken where it enters this block; None is the middle one.
            beta: scale of the linear part.

        Raises:
            InvalidInputError: a layer out of range.
        """
        ModelView(model).refuse_encoder_decoder("relation decoding")
        frozen = freeze(model, prompts.tokens, verify=False)
        layer = frozen.n_layers // 2 if layer is None else whole_number("layer", layer, 0, frozen.n_layers - 1)
        jacobians = [_jacobian(frozen, row, layer, int(end)) for row, end in enumerate(prompts.subject_ends)]
        W = torch.stack([J for J, _, _ in jacobians]).mean(0)
        b = torch.stack([o - J @ s for J, s, o in jacobians]).mean(0)
        return cls(frozen, layer, W, b, beta)

    def states(self, prompts: Prompts) -> Float[Tensor, "prompt d_model"]:
        """The predicted final states."""
        frozen = freeze(self.frozen.model, prompts.tokens, verify=False)
        at = prompts.subject_ends.to(frozen.tokens.device)[:, None, None]
        subjects = torch.take_along_dim(frozen.resid_pre(self.layer), at, dim=1)[:, 0]
        return self.beta * subjects @ self.W.T + self.b

    def logits(self, prompts: Prompts) -> Float[Tensor, "prompt d_vocab"]:
        """The predicted states, unembedded."""
        return unembed(self.frozen, self.states(prompts))

    def decode(self, prompts: Prompts) -> Int[Tensor, "prompt"]:
        """The highest-ranked token for each prompt."""
        return self.logits(prompts).argmax(-1)


def _jacobian(frozen: FrozenPass, row: int, layer: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ∂(final state at the last token) / ∂(state at `end` entering `layer`) of one prompt, with both states.

    One run of the prompt, and one backward pass for all coordinates of the output.
    """
    x = frozen.resid_pre(layer)[row]
    at = frozen.points.unembed_in or frozen.points.output
    output: list[Tensor] = []
    with saved_by_name(frozen.model), torch.enable_grad():
        leaf = x[None].clone().requires_grad_(True)

        def put(live: Tensor, *, hook: HookPoint) -> Tensor:
            return leaf

        def read(live: Tensor, *, hook: HookPoint) -> None:
            output.append(live[0, -1])

        hooks = [(frozen.points.blocks[layer].resid_pre, in_this_thread(put)), (at, in_this_thread(read))]
        run(frozen.model, {"input": frozen.tokens[row : row + 1]}, hooks)
        identity = torch.eye(len(output[0]), dtype=output[0].dtype, device=output[0].device)
        (gradient,) = torch.autograd.grad(output[0], leaf, identity, is_grads_batched=True)
    error = relative_error(output[0].detach(), frozen.activation(at)[row, -1])
    frozen.live("relation decoding").refuse(error, f"prompt {row} differs by {error:.1e} at {at}")
    return gradient[:, 0, end], x[end], output[0].detach()


def unembed(frozen: FrozenPass, states: Float[Tensor, "prompt d_model"]) -> Float[Tensor, "prompt d_vocab"]:
    """Logits of final states."""
    if frozen.view.unembedding is None or frozen.prediction_head() is not None:
        raise UnsupportedModelError(
            f"relation decoding reads tokens off the final state; {frozen.view.description} has no plain unembedding."
        )
    return frozen.view.logits(states)


# ------------------------------------------------------------------ the evaluation


@formerly(ONCE_ACTIVATION)
@checked_names
def relation_decoding(
    model: ModelLike,
    relations: Iterable[Relation] | None = None,
    *,
    m: Whole = 3,
    shots: Whole | None = None,
    splits: Whole = 6,
    top_k: Whole | None = 1,
    layers: Sequence[int] | None = None,
    betas: Sequence[float] = (1.0, BETA),
    rule: FrozenRule = "frozen",
    protocol: str | None = None,
    seed: Seed = 0,
) -> Evaluation:
    """Measure how often the mean operator, LRE and a random object give the model's answer for held-out subjects.

    Per relation and split, m samples are drawn to fit on, and all others of the same token length (Appendix D) are
    decoded, after the same examples.

    Args:
        model: a TransformerLens model that predicts tokens and has a tokenizer.
        relations: `Relation` objects, or None for those that are shipped (the bundled relations model knows them).
        m: prompts the operators are averaged over.
        shots: examples that each prompt shows before its subject; None is m − 1.
        splits: how many draws per relation.
        top_k: only subjects whose object is among the model's k highest tokens count; with None all do.
        layers: of LRE's subject state; None is every one.
        betas: of LRE.
        rule: of the frozen operators, see `FrozenPass.operator`.
        protocol: ``"paper"`` for TensorLens' settings of the six options before (`PROTOCOLS`), which are then left out.
        seed: of the draws.

    Returns:
        An Evaluation, a unit for each relation, means over its splits (those are in `curves`; they share samples, so
        only relations count as independent): `faithful` (the model's highest token is reproduced) and `correct`
        (the true object is). Relations of which too few samples are left are in `skipped`.

    Raises:
        InvalidInputError: no relation has enough samples, or there is no such protocol.
    """
    if protocol is not None:
        check_choice("protocol", protocol, PROTOCOLS)
        return relation_decoding(model, relations, rule=rule, seed=seed, **PROTOCOLS[protocol])
    m = whole_number("m", m, least=1)
    splits = whole_count("splits", splits)
    if top_k is not None:
        top_k = whole_number("top_k", top_k, least=1)
    shots = m - 1 if shots is None else whole_number("shots", shots, 0, m - 1)
    view = ModelView(model)
    view.refuse_encoder_decoder("relation decoding")
    if relations is None:
        relations = shipped_relations().values()
    if layers is None:
        layers = range(view.n_layers)
    lres = {f"LRE layer {layer}, β={beta:g}": (layer, beta) for layer in layers for beta in betas}
    fitting = _Fitting(m, shots, top_k, list(lres.values()), rule)
    labels = ["tensorlens mean operator", *lres, RANDOM]
    rng = random.Random(seed)
    values = []
    units = []
    skipped = {}
    for relation in relations:
        template = relation.prompt_templates[0]
        samples = of_common_length(model, template, relation.samples)
        if len(samples) <= m:
            skipped[relation.name] = f"fewer than {m} samples to fit on and one to ask about ({len(samples)})"
            continue
        shares = [_one_split(model, template, samples, fitting, rng) for _ in range(splits)]
        if all(bool(split.isnan().all()) for split in shares):
            skipped[relation.name] = f"no held-out subject whose object is among the model's {top_k} highest tokens"
            continue
        values.append(torch.stack(shares, dim=-1))
        units.append(relation.name)
    if not values:
        raise InvalidInputError(f"relation_decoding: nothing to evaluate: {skipped}.")
    curves = torch.stack(values, dim=2)
    return Evaluation(
        kind="relation decoding",
        values=curves.nanmean(-1),
        metrics={"faithful": True, "correct": True},
        methods=labels,
        units=units,
        curves=curves,
        axis=torch.arange(splits, dtype=torch.float64),
        axis_name="split",
        settings={
            **view.provenance(), "m": m, "shots": shots, "splits": splits, "top_k": top_k, "seed": seed,
        },
        skipped=skipped,
    )  # fmt: skip


@checked_names
def by_relation(result: Evaluation, metric: str = "faithful") -> "pd.DataFrame":
    """Return mean and standard deviation over splits, a row per relation, columns ``(method, "mean" | "std")``.

    Raises:
        InvalidInputError: no result of `relation_decoding`, or no such metric.
    """
    import pandas as pd

    if result.curves is None:
        raise InvalidInputError("by_relation: this is no result of relation_decoding.")
    check_choice("by_relation: metric", metric, result.metrics)
    splits = result.curves[list(result.metrics).index(metric)]  # [method, relation, split]
    index = pd.MultiIndex.from_product([result.units, range(splits.shape[-1])], names=["relation", "split"])
    frame = pd.DataFrame(splits.flatten(1).T.tolist(), columns=result.methods, index=index)
    return frame.groupby(level=0).agg(["mean", "std"])


class _Fitting(NamedTuple):
    """How decoders are fitted, and which subjects they are asked about; see `relation_decoding`."""

    m: int
    shots: int
    top_k: int | None
    lres: list[tuple[int, float]]
    rule: FrozenRule


def _one_split(
    model: ModelLike, template: str, samples: Sequence[Sample], fitting: _Fitting, rng: random.Random
) -> Float[Tensor, "2 method"]:
    """Shares of held-out subjects answered as the model does, and truly, by each method; NaN where it knows none."""
    m, shots, top_k, lres, rule = fitting
    shuffled = rng.sample(list(samples), len(samples))
    fitted = shuffled[:m]
    rest = shuffled[m:]
    questions = few_shot_prompts(model, template, rest, fitted[:shots])
    model_answers, logits = predictions(freeze(model, questions.tokens, verify=False))
    true = dict[Sample, int]()  # the first token of each object after its prompt
    for sample in shuffled:
        question, answered = _question_and_answer(model, template, sample)
        true[sample] = answered[len(question)]
    objects = torch.tensor([true[sample] for sample in questions.samples])
    if top_k is not None:
        known = (logits.topk(min(top_k, logits.shape[-1])).indices.cpu() == objects[:, None]).any(1)
        if not bool(known.any()):
            return torch.full((2, len(lres) + 2), torch.nan, dtype=torch.float64)
        questions = Prompts(
            questions.tokens[known],
            questions.subject_ends[known],
            tuple(s for s, is_known in zip(questions.samples, known.tolist(), strict=True) if is_known),
        )
        model_answers = model_answers.cpu()[known]
        objects = objects[known]
    prompts = leave_one_out(model, template, fitted, m, shots)
    answers = [RelationDecoder.fit(model, prompts, m, rule=rule).decode(questions)]
    fits = {layer: LinearRelation.fit(model, prompts, layer=layer) for layer in {layer for layer, _ in lres}}
    answers += [replace(fits[layer], beta=beta).decode(questions) for layer, beta in lres]
    answers.append(torch.tensor([rng.choice(list(true.values())) for _ in questions.samples]))
    shares = [
        torch.stack([(answer.cpu() == expected.cpu()).double().mean() for answer in answers])
        for expected in (model_answers, objects)
    ]
    return torch.stack(shares)
