"""Explain why two runs differ, and how the difference acts, by exact sums over the difference of two passes.

`compare_models`: which changed weights of a fine-tuned model change its prediction? `routes`: does a change pass a
layer by values, by where heads attend, by the MLP or by norm scales?

The difference of two models' runs on one prompt is a linear map of the difference of their embeddings plus a constant
for everything else that differs (`tensorlens_tl.passes.difference`). With the target's vector g pulled to where a
matrix W writes, the matrix adds

    Σ_i ⟨g_i, x̄_i·ΔW⟩,    x̄ the mean of its inputs in the two models, ΔW the change

and norm gains, biases, the embedding and the unembedding likewise. The terms sum to the change of the model's own
number. Everything downstream of a change responds to it; the interaction of two changes is shared between them, as in
the secant of a product (half of it each). By head, the channels of a matrix are separated; by rank, the singular
directions of ΔW = Σ_r s_r u_r v_rᵀ, each of which adds s_r ⟨x̄, u_r⟩⟨g, v_r⟩.

For `routes`, let g be the target's vector pulled back to a block's output, and Δx the change of the stream there.
⟨g, Δx⟩, plus what the weights of two models add later, is the whole change. The block's output is a sum of routes: the
stream that bypasses it, each head by its values, its queries, its keys and its gate where it has one, or a mixer of
positions in place of attention, the heads of an encoder–decoder's cross-attention, and the MLP by the slopes of its
activation. The norm before such a sublayer divides by a scale that responds (the rank-one map of its secant): every
route is split into what passes with the scale fixed, and what the response of the scale adds. Norms around the stream
or after a sublayer respond likewise, and are a route of their own.

Each layer is a cut through the same change: its scores sum to all of it. **Scores of different layers must not be
added**: what passes layer 0 by a head's keys may pass layer 1 directly, and counts in both.
"""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tensorlens_tl._arguments import check_choice, checked_names, nearest
from tensorlens_tl.algebra import AffineMap, Chain, Linear, Segment, Sum
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import size_of_sum, upcast
from tensorlens_tl.algebra.secants import MatrixChange, Offset, RankOne, pull_noting
from tensorlens_tl.circuits.arguments import Direction, RuleLike
from tensorlens_tl.circuits.ruled import target_under
from tensorlens_tl.circuits.stream import StreamTarget, Sublayer, dot, stream_target
from tensorlens_tl.core import recordable
from tensorlens_tl.errors import InvalidInputError, PromptNumber
from tensorlens_tl.models import ModelLike, ModelView, Query, TokenLike
from tensorlens_tl.passes import (
    Difference,
    FrozenPass,
    PassOrDifference,
    check_one_architecture,
    difference as difference_of,
    freeze,
)
from tensorlens_tl.passes.inputs import (
    InputLike,
    check_slice,
    one_per_prompt,
    prompt_batches,
    taken,
    tokenized,
)
from tensorlens_tl.passes.target import resolve_target, target_ids
from tensorlens_tl.registry import frozen_rule
from tensorlens_tl.results import HEAD_ROUTES, ROUTES, ChangeRoutes, ModelChange, joined


def change_target(
    difference: Difference, target: TokenLike, minus: TokenLike, direction: Direction, query: Query
) -> StreamTarget:
    """Return the change of a number between two runs as a target named after the number; see `stream_target`."""
    readout = stream_target(difference, target, minus, direction, query, "frozen", one=False)
    soft_cap = difference.view.soft_cap if readout.of_tokens else None
    return replace(readout, label=f"change of the {readout.name}", soft_cap=soft_cap)


if TYPE_CHECKING:
    ChangeRows = Literal["matrix", "layer", "component", "head", "head_matrix", "rank"]
else:
    ChangeRows = Any  # `check_choice` says what is wrong with it

BY: tuple[ChangeRows, ...] = ("matrix", "layer", "component", "head", "head_matrix", "rank")
BY_HEAD = ("head", "head_matrix")

MOST_DIRECTIONS = 64
"""The most singular directions that a change may have, by rank."""

SPARE = 8
"""Random vectors beyond these, for finding the directions."""

QUERIES = ("W_Q", "b_Q", "q_norm.w", "relative_bias")
ATTENTION = (*QUERIES, "W_K", "b_K", "k_norm.w", "W_V", "b_V", "W_O", "b_O")
LATENT = ("W_down_Q", "b_down_Q", "W_down_K", "b_down_K", "W_down_V", "b_down_V")
"""Matrices of attention that all heads share."""

MLP = ("W_in", "b_in", "W_gate", "b_gate", "W_out", "b_out")
UNEMBEDDING = ("W_U", "b_U")
CROSS = "cross."
"""The prefix of the names of cross-attention's weights."""

Directions = tuple[Float[Tensor, "_rank _d_in"], Float[Tensor, "_rank _d_out"]]
"""The directions of a change: s_r·u_r and v_r, the largest first."""


def term_name(weight: str, by: str) -> str:
    """Return the term that a weight belongs to; by head, for weights that belong to no head."""
    place, _, part = weight.partition(".")
    if by in ("matrix", "rank"):
        return weight
    if weight in UNEMBEDDING:
        return "unembed"
    if by == "layer" or not part or not place[1:].isdigit():
        return place
    if part.removeprefix(CROSS) in ATTENTION and by in BY_HEAD:
        return weight
    if part.startswith(CROSS):
        return f"{place}.cross"
    if part in (*ATTENTION, *LATENT):
        return f"{place}.attn"
    if part == "routing":
        return weight
    if part in MLP or part.startswith("channel_mix."):
        return f"MLP{place[1:]}"
    if part.startswith("mixer."):
        return f"{place}.mixer"
    if part.startswith("whitening."):
        return f"{place}.whitening"
    if part.startswith("attn.") or part == "sinks":
        return f"{place}.attn"
    return f"{place}.norms"


def _matrix(weight: str) -> str:
    """Return a weight's name in its attention, self or cross: ``"W_V"`` of ``"L0.W_V"`` and of ``"L2.cross.W_V"``."""
    return weight.partition(".")[2].removeprefix(CROSS)


@dataclass
class WeightTerms:
    """Terms of some queries, by name, from the end of the model to its beginning.

    Attributes:
        by: what a term is, one of `BY`.
        directions: the singular directions of every changed matrix, computed when first needed.
        values: each term at each position, `[query, batch, pos]`.
        remainder: the contribution of the directions that are left out as rounding.
    """

    by: str
    directions: dict[str, Directions]
    values: dict[str, Float[Tensor, "query batch pos"]] = field(default_factory=dict[str, Tensor])
    remainder: Tensor | None = None

    def add(self, names: Sequence[str], values: Float[Tensor, "query batch pos term"]) -> None:
        """Add terms, given in the order of the model, to those of the same name."""
        for name, value in reversed(list(zip(names, values.unbind(-1), strict=True))):
            self.values[name] = self.values.get(name, 0) + value

    def remainder_like(self, seed: Float[Tensor, "query batch pos d"]) -> Float[Tensor, "query batch"]:
        """Return the remainder, zero where nothing is left out."""
        if self.remainder is None:
            return upcast(seed[..., 0, 0]).new_zeros(seed.shape[:2])
        return self.remainder.sum(-1)

    def pull(self, m: AffineMap, g: Float[Tensor, "query batch pos d"]) -> Float[Tensor, "query batch pos d_in"]:
        """Pull a vector through a map, collecting what its changed weights add; by head, without attention's."""
        return pull_noting(m, g, self._note)

    def _note(self, offset: Offset, g: Float[Tensor, "query batch pos d"]) -> None:
        if self.by in BY_HEAD and _matrix(offset.name) in ATTENTION:
            return
        whole = (upcast(g) * offset.vectors).sum(-1)
        if self.by == "rank" and offset.change is not None:
            self._note_directions(offset.name, offset.change, g, whole)
        else:
            self.add([term_name(offset.name, self.by)], whole[..., None])

    # ------------------------------------------------------------------ by rank

    def _note_directions(self, name: str, change: MatrixChange, g: Tensor, whole: Tensor) -> None:
        if name not in self.directions:
            self.directions[name] = directions_of(change, name)
        read, write = self.directions[name]
        shares = (upcast(change.read).to(read) @ read.mT) * (upcast(g).to(write) @ write.mT)
        self.add([f"{name} rank {number + 1}" for number in range(len(read))], shares.to(whole))
        left = whole - shares.sum(-1).to(whole)
        self.remainder = left if self.remainder is None else self.remainder + left

    # ------------------------------------------------------------------ by head

    def pull_heads(self, sublayer: Sublayer, g: Float[Tensor, "query batch pos d_model"], kv_heads: int) -> None:
        """Collect what the changed weights of attention add by one of its routes, head by head.

        Where heads share keys and values (fewer `kv_heads` than heads), they are pulled in several rows, each with
        heads that share none. `g` is the vector at the sum that the heads write to.
        """
        heads = len(sublayer.nodes)
        repeats = heads // kv_heads

        def note_output(offset: Offset, g: Tensor) -> None:
            if _matrix(offset.name) not in ATTENTION:
                return  # a norm's: `pull` has noted it, as it belongs to no head
            if offset.change is None:
                self.add([offset.name], (upcast(g) * offset.vectors).sum(-1)[..., None])
                return
            shares = upcast(Linear(offset.change.matrix).pull(g)) * offset.change.read
            self._add_heads(sublayer.nodes, offset.name, shares.unflatten(-1, (heads, -1)).sum(-1))

        def note_input(offset: Offset, g: Tensor) -> None:
            if _matrix(offset.name) not in ATTENTION:
                return  # a gate's, a sink's, a latent's or a norm's
            products = upcast(g) * offset.vectors
            if _matrix(offset.name) in QUERIES:
                shares = products.sum(0).unflatten(-1, (heads, -1)).sum(-1)
            else:  # each row has one of the heads that share keys and values
                shares = products.unflatten(-1, (kv_heads, -1)).sum(-1).movedim(0, -1).flatten(-2)
            self._add_heads(sublayer.nodes, offset.name, shares)

        g = pull_noting(sublayer.write, g, note_output)
        number = torch.arange(heads, device=g.device) % repeats
        chosen = (number == torch.arange(repeats, device=g.device)[:, None]).to(g.dtype)
        by_channel = chosen.repeat_interleave(g.shape[-1] // heads, dim=-1)
        pull_noting(sublayer.read, g[None] * by_channel[:, None, None, None], note_input)

    def _add_heads(self, heads: Sequence[str], weight: str, shares: Float[Tensor, "query batch pos head"]) -> None:
        names = list(heads)
        if self.by == "head_matrix":
            names = [f"{head}.{_matrix(weight)}" for head in heads]
        self.add(names, shares)


def directions_of(change: MatrixChange, name: str) -> Directions:
    """Return the singular directions of a change that exceed the rounding of its matrices.

    They are found in the span of the change's products with random vectors, which is all of its range if the rank is
    lower than their number.

    Raises:
        InvalidInputError: there are more than `MOST_DIRECTIONS`.
    """
    matrix = upcast(change.matrix)
    rows, columns = matrix.shape
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(columns, min(MOST_DIRECTIONS + SPARE, rows, columns), generator=generator).to(matrix)
    span = torch.linalg.qr(matrix @ probes).Q
    u, s, v = torch.linalg.svd(span.mT @ matrix, full_matrices=False)
    count = int((s > _rounding(change, float(s.max()))).sum())
    if count > MOST_DIRECTIONS:
        raise InvalidInputError(
            f"by='rank': {name} changed in more than {MOST_DIRECTIONS} singular directions, as in a fine-tuning of all "
            "weights. Use by='matrix', 'component' or 'head'."
        )
    return (span @ u[:, :count] * s[:count]).mT, v[:count]


def _rounding(change: MatrixChange, largest: float) -> float:
    """Bound what rounding alone adds to a singular value of a change: in its matrices, and in the computation."""
    rows, columns = change.a.shape
    epsilon = torch.finfo(torch.promote_types(change.a.dtype, change.b.dtype)).eps
    size = float(upcast(change.a).norm()) / sqrt(rows * columns)
    computed = torch.finfo(upcast(change.a).dtype).eps * largest
    return epsilon * size * (sqrt(rows) + sqrt(columns)) + 8 * sqrt(max(rows, columns)) * computed


@checked_names
def compare_models(
    base: ModelLike,
    tuned: ModelLike,
    prompts: InputLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    by: ChangeRows = "matrix",
    query: Query = -1,
    direction: Direction = None,
    positions: bool = False,
    memory: Memory = None,
    **freezing: Any,
) -> ModelChange:
    """Explain where fine-tuning acted on a logit: signed terms that sum to its change, tuned − base.

    Both models run on the same prompts, in batches of similar length within the bound of `memory`. `by` says what a
    term is:

    * ``"matrix"``: each changed matrix, bias or norm vector (``"L0.W_V"``, ``"L1.ln1.w"``, ``"W_U"``), and the
      embedding with its positions (``"embed"``; in a shortformer positions are separate, ``"W_pos"``);
    * ``"layer"``: a whole layer, ``"L0"``; here and below the embedding is ``"embed"``, the final norm
      ``"ln_final"`` and the unembedding ``"unembed"``;
    * ``"component"``: each layer's attention, or mixer in its place, MLP, norms and whitening, and a decoder's
      cross-attention, ``"L2.cross"``;
    * ``"head"``: the same, with attention by head, ``"L0H3"``: W_Q, W_K and W_V by the channels of the head (where
      heads share keys and values, by each head's use of these), W_O by the head's input to it. Heads of
      cross-attention are ``"L2.cross.H3"``;
    * ``"head_matrix"``: the same for each matrix separately, ``"L0H3.W_V"``;
    * ``"rank"``: each changed matrix by the singular directions of its change, ``"L0.W_V rank 1"`` the largest. For
      changes of at most 64 directions, such as LoRA's. What rounding adds to the change beyond those is the
      `remainder`.

    Args:
        base: the model before.
        tuned: the model after, of the same architecture and vocabulary. Adapters of peft are read as merged.
        prompts: as in `freeze`, one or several.
        target, minus, direction: the number whose change is explained, as in `FrozenOperator.target`; a first choice
            and a runner-up are the tuned model's, for both.
        by: what a term is.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        positions: also return where each term acts, in `Terms.keys`, `[batch, query, term, pos]`: the token for the
            embedding, and the position that reads it for a weight.
        memory: how much may be allocated at once besides the result, as ``"512MB"`` or bytes; None is 256 MiB. It
            bounds the batches, and how many queries are pulled together.
        freezing: further options of `freeze`, for both runs; an encoder–decoder needs ``decoder_input_ids=``.

    Returns:
        Terms for each prompt; weights that did not change have none (two equal models have ``"embed"`` alone, zero).
        ``.mean()`` is their mean over prompts, ``.summary()`` a table of it with bootstrap intervals, and two such
        results can be subtracted.

    Raises:
        InvalidInputError: no such `by`, different architectures or vocabularies, prompts that the two tokenize
            differently, a change of more than 64 directions under ``by="rank"``, and what `freeze` and the target
            reject.
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
"""How many runs of a batch are in memory at once."""

TOKENIZED_APART = "compare_models: the two models tokenize the prompts differently; pass token ids."


@dataclass
class _Comparison:
    """The arguments of `compare_models` that apply to every batch of prompts.

    Attributes:
        base, tuned, by, query, positions, memory, freezing: as in `compare_models`.
        directions: the singular directions of every changed matrix, computed when first needed.
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
        """Return the terms of some prompts, from one pass by each model."""
        runs = [freeze(model, prompts, **self.freezing) for model in (self.tuned, self.base)]
        if runs[0].tokens.shape == runs[1].tokens.shape and not torch.equal(runs[0].tokens, runs[1].tokens):
            raise InvalidInputError(TOKENIZED_APART)
        difference = difference_of(*runs)
        readout = change_target(difference, target, minus, direction, self.query)
        if target is not None:  # the same tokens in both runs, including the first run's own choices
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
    """Return the provenance that both models share, and differing facts as ``"base …"`` and ``"tuned …"``."""
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
    """Pull the target's vectors through both models, collecting what each changed weight adds."""
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
            for sublayer in of_heads[-1:] + of_heads[:-1]:  # by values first, which has the heads' output weights
                weights = block.require_cross_attention() if sublayer.is_cross else block.attention
                terms.pull_heads(sublayer, step.outer.pull(at_end), weights.kv_heads)
            at_end = step.map.pull(at_end)
    terms.add(["embed"], (upcast(g) * difference.resid_pre(0)).sum(-1)[..., None])
    return terms


@dataclass(frozen=True, eq=False)
class _Number:
    """The target of one run at some queries: ``⟨vectors, state⟩ + constant``, zero at padding."""

    state: Float[Tensor, "batch query d"]
    vectors: Float[Tensor, "batch query d"]
    constant: Float[Tensor, "batch query"]

    @classmethod
    def of(
        cls, readout: StreamTarget, frozen: FrozenPass, target: TokenLike, minus: TokenLike, direction: Direction
    ) -> "_Number":
        """Resolve the target in one run."""
        resolved = resolve_target(frozen, target, minus, direction, readout.positions)
        real = torch.take_along_dim(frozen.mask, readout.positions, dim=1)
        read = torch.take_along_dim(readout.read_of(frozen.activation), readout.positions[..., None], dim=1)
        return cls(upcast(read), resolved.vectors * real[..., None], resolved.constant * real)

    @property
    def value(self) -> Float[Tensor, "batch query"]:
        """The target's value."""
        return (self.state * self.vectors).sum(-1) + self.constant


def _with_unembedding(
    values: dict[str, Tensor], readout: StreamTarget, numbers: list[_Number], by: str, positions: bool
) -> dict[str, Tensor]:
    """Add the terms of a changed unembedding, at the query's position."""
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
        values[name] = values.get(name, 0) + value
    return values


SCALE = ", scale"
"""The suffix of a route through the response of a norm's scale."""


@recordable()
@checked_names
def routes(
    difference: PassOrDifference,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    query: Query = -1,
    direction: Direction = None,
    rule: RuleLike = None,
    memory: Memory = None,
) -> ChangeRoutes:
    """Split the change of a logit, or a logit, into the routes by which it passes each layer.

    At layer l, with the target's vector pulled back to the block's output, every route's score is its output there
    dotted with that vector: bypassing the layer (``"direct"``), through each head's values, through its queries and
    through its keys, through its gate if it has one (``"gates"``), through a mixer of positions in place of attention
    (``"mixer"``), and through the MLP by the slopes of its activations. The response of a norm's scale before the
    sublayer is a separate route (``"values, scale"``). ``"norms"`` are the responses of norms around the
    stream or after a sublayer (post-LN, sandwich blocks), and of the one after an encoder. ``"constants"`` is what the
    changed weights of two models add in this layer, ``"later constants"`` after it. A last row, ``"end"``, is what
    follows the last block: the final norm and a masked model's transform, whose own routes are ``"direct"`` and
    ``"norms"``.

    A head of an encoder–decoder's cross-attention responds through its values, read from the encoder's output, through
    the decoder's queries and through the encoder's keys: ``"cross values"``, ``"cross queries"``, ``"cross keys"``. The
    decoder's stream bypasses an encoder's layer, and the encoder's output bypasses a decoder's.

    The scores of each layer sum to the whole change. Do not add layers: every layer splits the same change, at its own
    depth.

    For one pass, the routes are those of the frozen model, or of its run under a rule. Scales are then not separate
    routes, and ``"constants"`` are all biases of a layer.

    Args:
        difference: the difference of two passes, of one model or of two; or one pass.
        target, minus, direction: the number whose change is explained, as in `FrozenOperator.target`.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        rule: for one pass, what replaces the nonlinear operations, as in `contribution_graph`.
        memory: how much several queries may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Scores by layer and route, and each head's share of them.

    Raises:
        InvalidInputError: neither a pass nor a difference, a rule for a difference, a query out of range, and what
            `FrozenOperator.target` rejects.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
        FrozenModelError: a model changed after its run.

    Source: ours; the rules are those of `tensorlens_tl.algebra.secants`.

    >>> other = tlens.freeze(model, text.replace("red", "blue"))
    >>> by = tlens.circuits.routes(tlens.difference(frozen, other), " value")
    >>> torch.allclose(by.scores.sum(-1), by.total[..., None], atol=1e-4)
    True
    >>> by.layers[0], by.layers[-1]
    ('L0', 'end')
    """
    if isinstance(difference, Difference) and rule is None:
        readout = change_target(difference, target, minus, direction, query)
    else:
        readout = stream_target(difference, target, minus, direction, query, frozen_rule(rule), one=False)
        readout = target_under(readout, rule, "routes")
    readout = replace(readout, stream=readout.stream.anchored())
    frozen = readout.stream.frozen
    layers = [*readout.stream.layers]  # for one run, what follows the last block is a row only if it exists
    if isinstance(frozen, Difference) or any(step.layer < 0 for step in readout.stream.steps):
        layers.append(-1)
    scores: list[Tensor] = []
    heads: list[Tensor] = []
    for rows in readout.some_queries(frozen.row_bytes, memory):
        cuts = list(_cuts(readout, layers, rows))[::-1]
        scores.append(torch.stack([cut.scores() for cut in cuts], dim=2))
        heads.append(_stacked(cuts))
    names = ["end" if layer < 0 else f"L{layer}" for layer in layers]
    whole = torch.cat(scores).transpose(0, 1)
    routes = ChangeRoutes(names, whole, torch.cat(heads).transpose(0, 1), **readout.fields())
    return frozen.checked(routes, readout.noise[..., None] / size_of_sum(whole, torch.zeros_like(whole[..., 0])))


@dataclass
class _Cut:
    """What passes one depth by every route, `[query, batch]`, and by each head, `[query, batch, head]`.

    Attributes:
        by_route, by_head: the sums so far.
    """

    by_route: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    by_head: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add(self, route: str, value: Float[Tensor, "query batch"]) -> None:
        """Add to a route."""
        self.by_route[route] = self.by_route.get(route, 0) + value

    def held(self, m: AffineMap, x: Tensor, g: Float[Tensor, "query batch pos d"]) -> AffineMap:
        """Return a map with the scale of its norm fixed; the scale's response is counted under ``"norms"``.

        `x` is the map's input, and `g` the vector at its end.
        """
        stages = m.stages if isinstance(m, Chain) else (m,)
        for number, stage in enumerate(stages):
            held, response = _by_scale(stage)
            if response is not None:
                before, after = stages[:number], stages[number + 1 :]
                self.add("norms", dot(Chain(after).pull(g), response.push(Chain(before)(x))))
                return Chain((*before, held, *after))
        return m

    def add_sublayer(
        self, sublayer: Sublayer, x: Float[Tensor, "batch pos d_model"], hidden: Tensor, g: Tensor
    ) -> None:
        """Count a sublayer's route and the response of the norm before it, along a vector where the sublayer writes."""
        write = self.held(sublayer.write, hidden, g)
        self.add("constants", dot(g, write.bias))
        g = write.pull(g)
        self.add("constants", dot(g, sublayer.read.bias))
        changes = {"": hidden - sublayer.read.bias}
        _, response = _by_scale(sublayer.read)
        if response is not None:
            changes[SCALE] = response.push(x)
            changes[""] = changes[""] - changes[SCALE]
        for how, change in changes.items():
            route = f"{_route(sublayer)}{how}"
            shares = sublayer.shares(g, change)
            self.add(route, shares.sum(-1))
            if route in HEAD_ROUTES:
                self.by_head[route] = shares

    def scores(self) -> Float[Tensor, "query batch route"]:
        """Return the scores of all routes, zero for absent ones."""
        zero = torch.zeros_like(self.by_route["direct"])
        return torch.stack([self.by_route.get(route, zero) for route in ROUTES], dim=-1)


def _cuts(readout: StreamTarget, layers: Sequence[int], queries: slice) -> Iterator[_Cut]:
    """Yield the cuts from the end to the first layer.

    A sublayer's output bypasses the others of its layer: their own routes include what it gives them.
    """
    stream = readout.stream
    pulled = stream.pull(readout.seed_of(queries))
    later = readout.constant[:, queries].T  # constants that are added after a layer
    before = len(stream.steps)
    for layer in reversed(layers):
        numbers = [number for number, step in enumerate(stream.steps) if step.layer == layer]
        cut = _Cut()
        cut.add("later constants", later)
        g = pulled.stream[before]
        for number in reversed(numbers):
            before = number
            g = _add_step(cut, readout, number, g)
            step, at_sum = stream.steps[number], pulled.sums[number]
            later = later + dot(pulled.stream[number + 1], step.outer.bias)
            for sublayer in step.sublayers:
                later = later + dot(at_sum, sublayer.write.bias)
                later = later + dot(sublayer.write.pull(at_sum), sublayer.read.bias)
        cut.add("direct", dot(g, stream.x[before]))
        yield cut


def _add_step(cut: _Cut, readout: StreamTarget, number: int, g: Float[Tensor, "query batch pos d"]) -> Tensor:
    """Count what passes a step by its sublayers and norms; return the vector pulled past them."""
    stream = readout.stream
    step, x = stream.steps[number], stream.x[number]
    if isinstance(stream.frozen, Difference) and any(part.kind == "per_layer" for part in step.sublayers):
        cut.add("constants", dot(g, step.map.bias))
        return step.map.pull(g)  # between two runs a layer's own input for each token counts as part of the bypass
    written = sum((part.write(h) for part, h in zip(step.sublayers, stream.hidden[number], strict=True)), start=x)
    outer = cut.held(step.outer, written, g)
    cut.add("constants", dot(g, outer.bias))
    g = outer.pull(g)
    for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
        cut.add_sublayer(sublayer, x, hidden, g)
    return g


def _by_scale(m: AffineMap) -> tuple[AffineMap, AffineMap | None]:
    """Split a map that may begin with a norm of two runs: with the scale fixed, and the scale's response."""
    match m:
        case Sum(terms=(held, RankOne() as response)):
            return held, response
        case Chain(stages=(first, *rest)):
            held, response = _by_scale(first)
            return Chain((held, *rest)), response and Chain((response, *rest))
        case Segment():
            held, response = _by_scale(m.inner)
            return replace(m, inner=held), response and replace(m, inner=response, only=True)
        case _:
            return m, None


def _route(sublayer: Sublayer) -> str:
    """Return the name of a sublayer's route."""
    of_heads = {"head": "values", "query": "queries", "key": "keys", "gate": "gates"}
    if sublayer.kind in of_heads:
        return f"{'cross ' * sublayer.is_cross}{of_heads[sublayer.kind]}"
    return "mixer" if sublayer.kind == "mixer" else "MLP"


def _stacked(cuts: Sequence[_Cut]) -> Float[Tensor, "query batch layer head route"]:
    """Stack each head's share of its routes, zero where a layer has fewer heads or, at the end, none."""
    most = max((share.shape[-1] for cut in cuts for share in cut.by_head.values()), default=0)
    none = torch.zeros_like(cuts[0].by_route["direct"])[..., None].expand(-1, -1, most)
    layers: list[Tensor] = []
    for cut in cuts:
        shares = [cut.by_head.get(route, none) for route in HEAD_ROUTES]
        layers.append(torch.stack([pad(share, (0, most - share.shape[-1])) for share in shares], dim=-1))
    return torch.stack(layers, dim=2)
