"""Which changed weights of a fine-tuned model change its prediction: an exact sum, by one pull.

The difference of two models' runs on one prompt is a linear map of the difference of their embeddings plus a constant
for everything else that differs (`tensorlens_tl.passes.difference`). With the target's vector g pulled to where a
matrix W writes, the matrix adds

    Σ_i ⟨g_i, x̄_i·ΔW⟩,    x̄ the mean of what it reads in the two models, ΔW the change

and norm gains, biases, the embedding and the unembedding likewise. The terms sum to the change of the model's own
number. Everything downstream of a change responds to it; what two changes do together is shared between them, as the
secant of a product does (half of it each).
"""

import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names, nearest
from tensorlens_tl.algebra import Chain, Tap
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import widened
from tensorlens_tl.circuits.arguments import Direction
from tensorlens_tl.circuits.two_runs.reading import Number, Reading
from tensorlens_tl.circuits.two_runs.weights import BY, BY_HEAD, CROSS, Directions, WeightTerms, term_name
from tensorlens_tl.errors import InvalidInputError, PromptNumber
from tensorlens_tl.models import BlockView, ModelLike, ModelView, Query, TokenLike, Within
from tensorlens_tl.passes import Difference, check_one_architecture, difference as difference_of, freeze
from tensorlens_tl.passes.inputs import InputLike, check_slice, one_per_prompt, prompt_batches, taken, tokenized
from tensorlens_tl.passes.operator import target_ids
from tensorlens_tl.results import ModelChange, joined

ATTENTION = "attention"
"""Where a vector is noted at what self-attention writes."""


@checked_names
def compare_models(
    base: ModelLike,
    tuned: ModelLike,
    prompts: InputLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    by: str = "matrix",
    query: Query = -1,
    direction: Direction = None,
    positions: bool = False,
    memory: Memory = None,
    **freezing: Any,
) -> ModelChange:
    """Where a fine-tuning acted on a logit: signed terms that sum to its change, tuned − base.

    Both models run on the same prompts, many of them in batches of similar length, as many at once as fit the bound of
    `memory`. `by` says what a term is:

    * ``"matrix"``: each changed matrix, bias or norm vector (``"L0.W_V"``, ``"L1.ln1.w"``, ``"W_U"``), and the
      embedding, positions included (``"embed"``), of a shortformer apart (``"W_pos"``);
    * ``"layer"``: all of a layer together, ``"L0"``; here and below the embedding is ``"embed"``, the final norm
      ``"ln_final"`` and the unembedding ``"unembed"``;
    * ``"component"``: each layer's attention, or mixer in its place, MLP, norms and whitening, and a decoder's
      cross-attention, ``"L2.cross"``;
    * ``"head"``: as that, with attention by head, ``"L0H3"``: W_Q, W_K and W_V by the channels of the head (where heads
      share keys and values, by what each of them makes of these), W_O by what the head gives it. Those of
      cross-attention are ``"L2.cross.H3"``;
    * ``"head_matrix"``: the same for each matrix apart, ``"L0H3.W_V"``;
    * ``"rank"``: each changed matrix by the singular directions of its change, ``"L0.W_V rank 1"`` the largest. For
      changes of at most 64 directions, such as LoRA's. What rounding adds to the change beyond those is the
      `remainder`.

    Args:
        base: the model before.
        tuned: the model after: of the same architecture and vocabulary. Adapters of peft are read as their merge.
        prompts: as in `freeze`, one or several.
        target, minus, direction: the number whose change is explained, as in `FrozenOperator.target`; a first choice
            and a runner-up are those of the tuned model, for both.
        by: what a term is.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        positions: also where each term acts: `Terms.keys`, `[batch, query, term, pos]`, the token for the embedding,
            and the position that reads it for a weight.
        memory: what may be allocated at once besides the result, as ``"512MB"`` or bytes; None is 256 MiB. It bounds
            the batches, and how many queries are pulled together.
        freezing: further options of `freeze`, for both runs; an encoder–decoder needs ``decoder_input_ids=``.

    Returns:
        Terms for each prompt; weights that did not change have none (two equal models have ``"embed"`` alone, zero).
        ``.mean()`` is their mean over prompts,
        ``.summary()`` a table of it with bootstrap intervals, and two such results can be subtracted.

    Raises:
        InvalidInputError: no such `by`, other architectures or vocabularies, prompts that the two tokenize in different
            ways, a change of more than 64 directions under ``by="rank"``, and what `freeze` and the target refuse.
        UnsupportedModelError: see `tensorlens_tl.passes.difference`.

    Source: ours; the rules are those of `tensorlens_tl.algebra.secants`.

    >>> change = tlens.compare_models(model, model, text, " value")
    >>> change.names, float(change.total)
    (['embed'], 0.0)
    """
    check_choice("by", by, BY)
    known = inspect.signature(freeze).parameters
    unknown = [name for name in freezing if name not in known]
    if unknown:
        near = nearest(unknown[0], [*inspect.signature(compare_models).parameters, *known])
        raise InvalidInputError(
            f"compare_models: there is no argument {unknown[0]!r}.{near} Freezing takes {', '.join([*known][2:])}."
        )
    view = ModelView(tuned)
    check_one_architecture(view, ModelView(base))
    comparison = _Comparison(base, tuned, by, query, positions, memory, freezing)
    explained = {"target": target, "minus": minus, "direction": direction}
    rows, batches = prompt_batches(view, prompts, freezing, max(1, in_bytes(memory) // RUNS))
    if len(batches) < 2:
        return comparison.of(prompts, **explained)
    if view.reads == "tokens" and rows != tokenized(ModelView(base), prompts, freezing.get("prepend_bos")):
        raise InvalidInputError(TOKENIZED_APART)
    comparison.freezing.pop("prepend_bos", None)  # the rows are token ids now
    split = {name: one_per_prompt(name, value, len(rows)) for name, value in explained.items()}
    check_slice(query, [len(row) for row in rows])
    parts: list[ModelChange] = []
    for batch in batches:
        of_batch = {name: taken(values, batch) for name, values in split.items() if values is not None}
        try:
            parts.append(comparison.of([rows[number] for number in batch], **explained | of_batch))
        except InvalidInputError as error:
            raise error.with_prompts(dict(enumerate(map(PromptNumber, batch)))) from error
    return joined(parts, batches)


RUNS = 2
"""How many runs of a batch are held at once."""

TOKENIZED_APART = "compare_models: the two models tokenize the prompts differently; pass token ids."


@dataclass
class _Comparison:
    """What is compared, whichever the prompts.

    Attributes:
        base, tuned, by, query, positions, memory, freezing: as in `compare_models`.
        directions: the singular directions of every changed matrix, once they were needed.
    """

    base: ModelLike
    tuned: ModelLike
    by: str
    query: Query
    positions: bool
    memory: Memory
    freezing: dict[str, Any]
    directions: dict[str, Directions] = field(default_factory=dict[str, Directions])

    def of(self, prompts: InputLike, target: TokenLike, minus: TokenLike, direction: Direction) -> ModelChange:
        """The terms of some prompts, in one pass by each model."""
        runs = [freeze(model, prompts, **self.freezing) for model in (self.tuned, self.base)]
        if runs[0].tokens.shape == runs[1].tokens.shape and not torch.equal(runs[0].tokens, runs[1].tokens):
            raise InvalidInputError(TOKENIZED_APART)
        difference = difference_of(*runs)
        reading = Reading.of(difference, target, minus, direction, self.query)
        if target is not None:  # the same tokens in both runs, where they are the first run's own
            target, minus = target_ids(difference, reading.positions, target, minus)
        numbers = [reading.number(frozen, target, minus, direction) for frozen in runs]
        parts: list[dict[str, Tensor]] = []
        remainders: list[Tensor] = []
        for seed in reading.seeds(self.memory):
            terms = _pulled(reading, seed, WeightTerms(self.by, self.directions))
            parts.append({name: _shown(value, self.positions) for name, value in terms.values.items()})
            remainders.append(terms.remainder_like(seed))
        values = {name: torch.cat([part[name] for part in parts]).transpose(0, 1) for name in reversed(parts[0])}
        values = _with_unembedding(values, reading, numbers, self.by, self.positions)
        if len(values) > 1 and not bool(difference.resid_pre(0).any()):
            del values["embed"]
        scores = torch.stack(list(values.values()), dim=2)
        keys = None
        if self.positions:
            keys = scores
            scores = keys.sum(-1)
        fields = reading.fields()
        fields["provenance"] = _provenance(difference)
        change = ModelChange(
            names=list(values),
            scores=scores,
            keys=keys,
            remainder=torch.cat(remainders).T,
            tuned=numbers[0].value,
            base=numbers[1].value,
            by=self.by,
            **fields,
        )
        return difference.checked(change)


def _provenance(difference: Difference) -> dict[str, str]:
    """What both models have in common, and the facts that tell them apart as ``"base …"`` and ``"tuned …"``."""
    tuned = difference.a.provenance()
    base = difference.b.provenance()
    common = {name: value for name, value in tuned.items() if base.get(name) == value}
    apart = {
        f"{which} {name}": value
        for which, facts in (("base", base), ("tuned", tuned))
        for name, value in facts.items()
        if name not in common
    }
    return common | apart


def _pulled(reading: Reading, g: Float[Tensor, "query batch pos d"], terms: WeightTerms) -> WeightTerms:
    """Pull the target's vectors through both models, and collect what each changed weight adds."""
    difference = reading.difference
    maps = difference.maps
    g = terms.pull(reading.ends(), g)
    for layer in reversed(range(difference.n_layers)):
        parts = maps.parts(layer)
        pulled: dict[str, Tensor] = {}
        tapped = parts._replace(attention=Chain((parts.attention, Tap({}, ATTENTION, pulled))))
        within = parts.within
        if within is not None and within.out is not None:
            tapped = tapped._replace(within=replace(within, out=Chain((within.out, Tap({}, CROSS, pulled)))))
        g = terms.pull(maps.composed(layer, difference.layouts[layer], tapped), g)
        block = difference.view.blocks[layer]
        if terms.by in BY_HEAD and block.mixer is None:
            assert isinstance(parts.attention, Chain)
            _pull_heads(terms, block, parts.attention, within, pulled)
    terms.add(["embed"], (upcast(g) * difference.resid_pre(0)).sum(-1)[..., None])
    return terms


def _pull_heads(
    terms: WeightTerms, block: BlockView, attention: Chain, within: Within | None, pulled: dict[str, Tensor]
) -> None:
    """Collect what the changed weights of a block's heads add, those of cross-attention as well.

    Args:
        terms: takes them.
        block: one layer.
        attention: the secant of its self-attention.
        within: where it acts, with its cross-attention.
        pulled: the vectors at what either attention writes.
    """
    name = f"L{block.layer}"
    terms.pull_heads(_of_all(attention, within), _at_all(pulled[ATTENTION], within), block.attention, name)
    if within is not None and within.read is not None and within.out is not None:
        crossing = Chain((within.read, within(within.out, only=True)))
        weights = block.require_cross_attention()
        terms.pull_heads(crossing, _at_all(pulled[CROSS], within), weights, f"{name}.{CROSS}")


def _of_all(attention: Chain, within: Within | None) -> Chain:
    """Attention as a map of all positions, where a block acts on one side of an encoder–decoder."""
    if within is None:
        return attention
    return Chain(tuple(within(stage, only=True) for stage in attention.stages))


def _at_all(g: Float[Tensor, "query batch pos d_model"], within: Within | None) -> Float[Tensor, "query batch all d"]:
    """Vectors at one side's positions, among all of them."""
    if within is None:
        return g
    return widened(g, within.start, within.length)


def _shown(value: Float[Tensor, "query batch pos"], positions: bool) -> Float[Tensor, "query batch *pos"]:
    """A term by position, or in all."""
    return value if positions else value.sum(-1)


def _with_unembedding(
    values: dict[str, Tensor], reading: Reading, numbers: list[Number], by: str, positions: bool
) -> dict[str, Tensor]:
    """With what the unembedding adds, where it changed, at the query's position."""
    tuned, base = numbers
    state = (tuned.state + base.state) / 2
    added = {"W_U": (state * (tuned.vectors - base.vectors)).sum(-1), "b_U": tuned.constant - base.constant}
    for weight, value in added.items():
        if not bool(value.any()):
            continue
        if positions:
            value = value[..., None] * reading.at_queries(value)
        name = term_name(weight, by)
        if name in values:
            value = values[name] + value
        values[name] = value
    return values
