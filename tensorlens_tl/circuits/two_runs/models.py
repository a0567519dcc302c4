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
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names, nearest
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.arguments import Direction
from tensorlens_tl.circuits.stream import StreamTarget
from tensorlens_tl.circuits.two_runs.target import change_target
from tensorlens_tl.circuits.two_runs.weights import BY, BY_HEAD, Directions, WeightTerms, term_name
from tensorlens_tl.errors import InvalidInputError, PromptNumber
from tensorlens_tl.models import ModelLike, ModelView, Query, TokenLike
from tensorlens_tl.passes import (
    Difference,
    FrozenPass,
    check_one_architecture,
    difference as difference_of,
    freeze,
)
from tensorlens_tl.passes.inputs import InputLike, check_slice, one_per_prompt, prompt_batches, taken, tokenized
from tensorlens_tl.passes.operator import resolve_target, target_ids
from tensorlens_tl.results import ModelChange, joined


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
        readout = change_target(difference, target, minus, direction, self.query)
        if target is not None:  # the same tokens in both runs, where they are the first run's own
            target, minus = target_ids(difference, readout.positions, target, minus)
        numbers = [_Number.of(readout, frozen, target, minus, direction) for frozen in runs]
        parts: list[dict[str, Tensor]] = []
        remainders: list[Tensor] = []
        for rows in readout.some_queries(difference.row_bytes, self.memory):
            seed = readout.seed_of(rows)
            terms = _pulled(readout, seed, WeightTerms(self.by, self.directions))
            shown = {name: value if self.positions else value.sum(-1) for name, value in terms.values.items()}
            parts.append(shown)
            remainders.append(terms.remainder_like(seed))
        values = {name: torch.cat([part[name] for part in parts]).transpose(0, 1) for name in reversed(parts[0])}
        values = _with_unembedding(values, readout, numbers, self.by, self.positions)
        if len(values) > 1 and not bool(difference.resid_pre(0).any()):
            del values["embed"]
        scores = torch.stack(list(values.values()), dim=2)
        keys = None
        if self.positions:
            keys = scores
            scores = keys.sum(-1)
        fields = readout.fields()
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


def _pulled(readout: StreamTarget, g: Float[Tensor, "query batch pos d"], terms: WeightTerms) -> WeightTerms:
    """Pull the target's vectors through both models, and collect what each changed weight adds."""
    difference, steps = readout.stream.frozen, readout.stream.steps
    for step in reversed([step for step in steps if step.layer < 0]):
        g = terms.pull(step.outer, g)
    for layer in reversed(range(difference.n_layers)):
        at_end = g
        g = terms.pull(difference.maps.block_map(layer), g)
        if terms.by not in BY_HEAD:
            continue
        block = difference.view.blocks[layer]
        for step in reversed([step for step in steps if step.layer == layer]):
            of_heads = [sublayer for sublayer in step.sublayers if sublayer.letter]
            for sublayer in of_heads[-1:] + of_heads[:-1]:  # by values first, with what writes what heads give
                weights = block.require_cross_attention() if sublayer.is_cross else block.attention
                terms.pull_heads(sublayer, step.outer.pull(at_end), weights.kv_heads)
            at_end = step.map.pull(at_end)
    terms.add(["embed"], (upcast(g) * difference.resid_pre(0)).sum(-1)[..., None])
    return terms


@dataclass(frozen=True, eq=False)
class _Number:
    """The number of one run at some queries: ``⟨vectors, state⟩ + constant``, zero at padding."""

    state: Float[Tensor, "batch query d"]
    vectors: Float[Tensor, "batch query d"]
    constant: Float[Tensor, "batch query"]

    @classmethod
    def of(
        cls, readout: StreamTarget, frozen: FrozenPass, target: TokenLike, minus: TokenLike, direction: Direction
    ) -> "_Number":
        """One run's own."""
        resolved = resolve_target(frozen, target, minus, direction, readout.positions)
        real = torch.take_along_dim(frozen.mask, readout.positions, dim=1)
        read = torch.take_along_dim(readout.read_of(frozen.activation), readout.positions[..., None], dim=1)
        return cls(upcast(read), resolved.vectors * real[..., None], resolved.constant * real)

    @property
    def value(self) -> Float[Tensor, "batch query"]:
        """The number."""
        return (self.state * self.vectors).sum(-1) + self.constant


def _with_unembedding(
    values: dict[str, Tensor], readout: StreamTarget, numbers: list[_Number], by: str, positions: bool
) -> dict[str, Tensor]:
    """With what the unembedding adds, where it changed, at the query's position."""
    tuned, base = numbers
    state = (tuned.state + base.state) / 2
    pos = torch.arange(readout.stream.frozen.mask.shape[1], device=state.device)
    added = {"W_U": (state * (tuned.vectors - base.vectors)).sum(-1), "b_U": tuned.constant - base.constant}
    for weight, value in added.items():
        if not bool(value.any()):
            continue
        if positions:
            value = value[..., None] * (readout.positions[..., None] == pos)
        name = term_name(weight, by)
        if name in values:
            value = values[name] + value
        values[name] = value
    return values
