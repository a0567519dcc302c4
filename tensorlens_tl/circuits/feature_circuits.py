"""Which terms sparse features sum up, what they do, and how they feed each other: exact sums on a frozen pass.

    pre-activation = Σ source tokens + bias                                 (`feature_attribution`)
    logit          = Σ active features + reconstruction error + b_dec + bias     (`feature_effects`)
    pre-activation = Σ earlier features + error + b_dec + bias                (`feature_edges`)

A feature as a target is a direction of the stream, its row of the encoder; as a source it is a vector in the stream,
its value times its row of the decoder, and its score is the inner product of that with the target pulled back to it.
So the score is what the frozen model's target loses when the feature is taken out of the stream. One pull is enough for
all features of a target. A feature that is not active has a pre-activation like any other, and no effect.

A graph with features among heads and MLPs as its nodes is `contribution_graph` with ``dictionaries=``.

A transcoder stands in its MLP's place: the error is what the MLP gives and the transcoder does not, and what reaches
the target beside that MLP is one term.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tensorlens_tl._arguments import check_choice, checked_names, plain
from tensorlens_tl.algebra import AffineMap, Chain, RowPositions
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import upcast, widest
from tensorlens_tl.algebra.positions import BiasTerms, in_total
from tensorlens_tl.circuits.arguments import Direction, FeatureLike
from tensorlens_tl.circuits.dictionary_features import (
    Features,
    FeaturesLike,
    Place,
    chained,
    maps_between,
    names_with_labels,
    stream_to,
)
from tensorlens_tl.circuits.effects import BY as DIRECT, direct_effects
from tensorlens_tl.circuits.stream import StreamTarget
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import Query, TokenLike, check_rule
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.operator import resolve_target
from tensorlens_tl.results import Attribution, FeatureEdges, Terms

BY = ("feature_token", "feature")


@checked_names
def feature_attribution(
    features: FeaturesLike,
    feature: FeatureLike,
    *,
    query: Query = -1,
    by: str = "token",
    activation: str = "ratio",
    memory: Memory = None,
) -> Attribution | Terms:
    """The terms that a feature's pre-activation is the sum of.

    Args:
        features: those of a pass, from `circuits.features`.
        feature: its number or name (``"F12"``); it need not be active.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        by: ``"token"``, source tokens through everything before the dictionary; or direct effects by ``"component"``,
            ``"head"``, ``"head_token"`` or ``"neuron"``, as in `logit_attribution`.
        activation: the rule for MLPs on the way.
        memory: what may be allocated at once, as ``"512MB"`` or bytes.

    Returns:
        An `Attribution` by token, otherwise `Terms`. The total is the pre-activation that the dictionary itself
        computes. `b_enc` (with what b_dec takes away) is part of the bias, or a term.

    Raises:
        InvalidInputError: no such feature, query or `by`.
        FrozenModelError: the weights were changed since the pass.

    >>> sae = tlens.circuits.features(frozen, tlens.load_demo_dictionary())
    >>> tokens = tlens.circuits.feature_attribution(sae, sae.top(1)[0][0])
    >>> bool((tokens.gap < 1e-4).all())
    True
    """
    frozen = _checked(features).frozen
    number = features.checked(feature)
    check_choice("by", by, ("token", *DIRECT))
    rule = check_rule(activation)
    positions = query_positions(frozen.prompt, query)
    frozen.check_fresh()
    numbers = torch.full((positions.shape[1],), number, device=positions.device)
    readouts = _pre_activations(features, numbers, positions.T)
    name = " · ".join(filter(None, [f"F{number}", features.labels.get(number, "")]))
    label = f"pre-activation of {name} at {features.hook}"
    if by != "token":
        stream = stream_to(frozen, features.reads.place, rule)
        return direct_effects(readouts.of_stream(stream, features.hook, label), by, memory)
    through = chained(maps_between(frozen, Place(0, 0), features.reads.place, rule))
    x = frozen.resid_pre(0)
    scores = x.new_zeros(*positions.shape, x.shape[1])
    bias = x.new_zeros(positions.shape)
    scores = upcast(scores)
    bias = upcast(bias)
    for rows in chunks(len(readouts.vectors), frozen.row_bytes, memory, "queries"):
        part = readouts.part(rows)
        terms = BiasTerms()
        pulled = _pulled(frozen, through, part, terms)
        scores[:, rows.start : rows.stop] = (upcast(pulled) * x).sum(-1).transpose(0, 1)
        bias[:, rows.start : rows.stop] = (in_total(terms, part.constant) + part.constant).T
    options = {"feature": number, "hook": features.hook, "query": query, "activation": activation}
    return Attribution.of(
        frozen, scores * frozen.mask[:, None], method="tensorlens", query=query, bias=bias, total=readouts.total.T,
        additive=True, target=label, options=options,
    )  # fmt: skip


@checked_names
def feature_effects(
    features: FeaturesLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    query: Query = -1,
    direction: Direction = None,
    by: str = "feature_token",
    activation: str = "ratio",
    memory: Memory = None,
) -> Terms:
    """What every active feature adds to a logit; with the error, b_dec and the biases they sum to it.

    A score is what the frozen model's logit loses when the feature is taken out of what it is written to.

    Args:
        features: those of a pass, from `circuits.features`.
        target, minus, direction: as in `FrozenOperator.target`.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        by: ``"feature_token"`` (``"F12@7"`` is feature 12 at position 7, ``"error@7"`` the error there), or
            ``"feature"`` (summed over positions).
        activation: the rule for MLPs on the way.
        memory: what may be allocated at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: no such `by`, a query out of range, no target, and what `target` refuses.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
        FrozenModelError: the weights were changed since the pass.

    >>> sae = tlens.circuits.features(frozen, tlens.load_demo_dictionary())
    >>> effects = tlens.circuits.feature_effects(sae, " value")
    >>> bool((effects.gap < 1e-4).all())
    True
    """
    frozen = _checked(features).frozen
    rule = check_rule(activation)
    positions = query_positions(frozen.prompt, query)
    resolved = resolve_target(frozen, target, minus, direction, positions)
    frozen.check_fresh()
    output = frozen.output
    soft_cap = None
    stages = maps_between(frozen, features.writes.place, Place(frozen.n_layers, 0), rule)
    ends = [frozen.final_map()]
    if resolved.of_tokens:
        output = frozen.unembedded()
        soft_cap = frozen.view.soft_cap
        ends.append(frozen.prediction_head(rule))
    stages += [end for end in ends if end is not None]
    output = upcast(torch.take_along_dim(output, positions[..., None], dim=1))
    total = (output * resolved.vectors).sum(-1) + resolved.constant
    readouts = _Readouts(resolved.vectors.transpose(0, 1), resolved.constant.T, total.T, positions.T).at_real(frozen)
    names, scores = _effects(features, chained(stages), readouts, by, memory)
    terms = Terms(
        names=names,
        scores=scores.transpose(0, 1),
        remainder=torch.zeros_like(readouts.total.T),
        soft_cap=soft_cap,
        labels=names_with_labels(names, features.labels),
        **readouts.fields(frozen, resolved.label),
    )
    return frozen.checked(terms)


@checked_names
def feature_edges(
    early: FeaturesLike,
    late: FeaturesLike,
    features: Any = None,
    *,
    query: Query = -1,
    by: str = "feature_token",
    activation: str = "ratio",
    memory: Memory = None,
) -> FeatureEdges:
    """What every active feature of an early dictionary adds to the pre-activations of a late one's features.

    Args:
        early, late: the features of one pass, the early ones written no later than the late ones are read.
        features: which of the late ones; None for those active at a query in any prompt.
        query: at which positions, the last real token by default.
        by: as in `feature_effects`.
        activation, memory: as in `feature_effects`.

    Returns:
        A row for each query and late feature. They are pulled back together, one vector each.

    Raises:
        InvalidInputError: no such feature, query or `by`; features of two passes, or in the wrong order.
        FrozenModelError: the weights were changed since the pass.

    >>> early, late = (tlens.load_demo_dictionary(f"blocks.{layer}.hook_resid_post") for layer in (0, 2))
    >>> edges = tlens.circuits.feature_edges(*(tlens.circuits.features(frozen, sae) for sae in (early, late)))
    >>> bool((edges.gap < 1e-4).all())
    True
    """
    frozen = _checked(early).frozen
    rule = check_rule(activation)
    if _checked(late).frozen is not frozen:
        raise InvalidInputError("feature_edges: early and late are of two passes; make both from the same frozen pass.")
    if late.reads.place < early.writes.place:
        raise InvalidInputError(
            f"feature_edges: late reads {late.hook}, which comes before {early.hook_out}, where early writes. Exchange "
            "them."
        )
    positions = query_positions(frozen.prompt, query)
    frozen.check_fresh()
    columns, numbers = _late_features(late, features, positions)
    readouts = _pre_activations(late, numbers, positions.T[columns])
    through = chained(maps_between(frozen, early.writes.place, late.reads.place, rule))
    names, scores = _effects(early, through, readouts, by, memory)
    return FeatureEdges(
        names=names,
        scores=scores.transpose(0, 1),
        remainder=torch.zeros_like(readouts.total.T),
        features=numbers.tolist(),
        labels=names_with_labels(names, early.labels),
        **readouts.fields(frozen, f"pre-activations at {late.hook}"),
    )


class _Readouts(NamedTuple):
    """Linear readouts of the stream, ``vector · stream + constant`` at a position of each prompt, one per row.

    Attributes:
        vectors: `[row, batch, d]`.
        constant, total: `[row, batch]`.
        positions: `[row, batch]`.
    """

    vectors: Float[Tensor, "row batch d"]
    constant: Float[Tensor, "row batch"]
    total: Float[Tensor, "row batch"]
    positions: Int[Tensor, "row batch"]

    def at_real(self, frozen: FrozenPass) -> "_Readouts":
        """The same, with zeros at padding."""
        real = torch.take_along_dim(frozen.mask, self.positions.T, dim=1).T
        return self._replace(
            vectors=self.vectors * real[..., None], constant=upcast(self.constant) * real, total=self.total * real
        )

    def part(self, rows: range) -> "_Readouts":
        return _Readouts(*(column[rows.start : rows.stop] for column in self))

    def fields(self, frozen: FrozenPass, label: str) -> dict[str, Any]:
        """What a result says about them."""
        return {
            "total": self.total.T,
            "queries": self.positions.T,
            "mask": frozen.mask,
            "tokens": frozen.str_tokens,
            "target": label,
            "provenance": frozen.provenance(),
        }

    def of_stream(self, stream: Any, hook: str, label: str) -> StreamTarget:
        """The same as a target of direct effects."""
        return StreamTarget(
            stream, hook, self.vectors.transpose(0, 1), self.constant.T, self.total.T, self.positions.T, label, "b_enc"
        )


def _checked(features: Any) -> Features:
    if not isinstance(features, Features):
        raise InvalidInputError(
            f"features are needed, got {type(features).__name__}: make them with circuits.features(frozen, dictionary)."
        )
    return features


def _pre_activations(features: Features, numbers: Int[Tensor, "row"], positions: Int[Tensor, "row batch"]) -> _Readouts:
    """Pre-activations as readouts of the stream that the dictionary reads."""
    rows = features.dictionary.W_enc.T[numbers]
    vectors = rows[:, None].expand(-1, len(features.frozen.tokens), -1)
    reader = features.reader.at(RowPositions(positions))
    pulled, bias = reader.pull_with_bias(vectors[:, :, None])
    constant = bias + features.dictionary.b_enc[numbers, None]
    return _Readouts(pulled[:, :, 0], constant, features.pre_activation(numbers, positions), positions).at_real(
        features.frozen
    )


def _late_features(late: Features, features: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Which query and which feature each row is about."""
    queries = range(positions.shape[1])
    if features is not None:
        values = plain(features)
        if isinstance(values, str) or not isinstance(values, Iterable):
            values = [values]
        numbers = [late.checked(feature) for feature in values]
        if not numbers:
            raise InvalidInputError("features=[]: name at least one, or leave it out for those that are active.")
        pairs = [(query, number) for query in queries for number in numbers]
    else:
        at = positions[late.index[:, 0]] == late.index[:, 1, None]
        pairs = [(query, int(number)) for query in queries for number in late.index[at[:, query], 2].unique()]
        if not pairs:
            raise InvalidInputError("features: none is active there; name some, or ask about another query.")
    columns, numbers = torch.tensor(pairs, device=positions.device).T
    return columns, numbers


def _pulled(
    frozen: FrozenPass, through: AffineMap, readouts: _Readouts, biases: BiasTerms
) -> Float[Tensor, "row batch pos d_model"]:
    """Vectors at their positions, pulled to every position of an earlier stream."""
    length = frozen.tokens.shape[1]
    where = RowPositions(readouts.positions)
    vectors = readouts.vectors.to(frozen.resid_pre(0).dtype)
    pulled = through.pull_between(vectors, where, None, length, causal=frozen.causal, biases=biases)
    return pad(pulled, (0, 0, 0, length - pulled.shape[2]))


def _effects(
    features: Features, through: AffineMap, readouts: _Readouts, by: str, memory: Memory
) -> tuple[list[str], Float[Tensor, "row batch term"]]:
    """Everything that adds to the readouts, which `through` reads from where the features are written."""
    check_choice("by", by, BY)
    frozen = features.frozen
    writes = features.writes
    through = Chain((writes.outer, through))
    parts = _Parts.of(features, by)
    per_row = frozen.row_bytes + features.values.element_size() * (
        len(parts.names) * len(frozen.tokens) + len(features.values)
    )
    scores = []
    for rows in chunks(len(readouts.vectors), per_row, memory, "rows"):
        part = readouts.part(rows)
        terms = BiasTerms()
        g = _pulled(frozen, through, part, terms)
        columns = [parts.scores(writes.after.pull(g))]
        if writes.beside is not None:
            columns.append((upcast(g) * writes.beside).sum((-2, -1))[..., None])
        columns.append((in_total(terms, part.constant) + part.constant)[..., None])
        scores.append(torch.cat(columns, dim=-1))
    names = [*parts.names, "bias"]
    if writes.beside is not None:
        names.insert(-1, writes.beside_name)
    return names, torch.cat(scores)


class _Parts(NamedTuple):
    """What a dictionary's output is the sum of, and the names of the parts.

    Attributes:
        column: which term each active feature counts for.
        others: vectors for the whole prompt by name, error first, `[batch, pos, d_out]` each.
    """

    features: Features
    names: list[str]
    column: Int[Tensor, "active"]
    n_terms: int
    by_token: list[int]
    others: dict[str, Tensor]

    @classmethod
    def of(cls, features: Features, by: str) -> "_Parts":
        _, position, feature = features.index.T
        count = features.dictionary.features
        if by == "feature":
            numbers, column = feature.unique(return_inverse=True)
            names = [f"F{number}" for number in numbers.tolist()]
            tokens: list[int] = []
            errors = ["error"]
        else:
            numbers, column = (position * count + feature).unique(return_inverse=True)
            names = [f"F{number % count}@{number // count}" for number in numbers.tolist()]
            tokens = features.frozen.mask.any(0).nonzero()[:, 0].tolist()
            errors = [f"error@{at}" for at in tokens]
        mask = features.frozen.mask[..., None]
        b_dec = features.dictionary.b_dec.expand_as(features.error)
        scaled = b_dec
        if features.writer is not None:
            scaled = features.writer(b_dec)
        beside = features.dictionary.beside(features.reads.x)
        others = {"error": features.error} | {name: x * mask for name, x in ({"b_dec": scaled} | beside).items()}
        return cls(features, [*names, *errors, *list(others)[1:]], column, len(names), tokens, others)

    def scores(self, g: Float[Tensor, "row batch pos d_out"]) -> Float[Tensor, "row batch term"]:
        """Each part's inner product with vectors pulled to the dictionary's output.

        Parts are often hundreds of times larger than what they sum to: the products are summed in float64.
        """
        at = {name: (widest(g) * x).sum(-1) for name, x in self.others.items()}
        error = at.pop("error")
        errors = error.sum(-1, keepdim=True)
        if self.by_token:
            errors = error[..., self.by_token]
        parts = torch.cat([self._of_features(g), errors, *(part.sum(-1)[..., None] for part in at.values())], dim=-1)
        return parts.to(upcast(g[:0]).dtype)

    def _of_features(self, g: Float[Tensor, "row batch pos d_out"]) -> Float[Tensor, "row batch term"]:
        features = self.features
        rows, batch = g.shape[:2]
        if features.writer is not None:
            g = features.writer.pull(g)
        scores = widest(g[:0]).new_zeros(rows, batch * self.n_terms)
        column = features.index[:, 0] * self.n_terms + self.column
        per_one = (rows + 2) * g.shape[-1] * scores.element_size()
        for some in chunks(len(features.values), per_one, None, "features"):
            part = slice(some.start, some.stop)
            prompt, position, feature = features.index[part].T
            gains = torch.einsum(
                "rad,ad->ra", widest(g[:, prompt, position]), widest(features.dictionary.W_dec[feature])
            )
            scores.index_add_(1, column[part], gains * features.values[part])
        return scores.reshape(rows, batch, self.n_terms)
