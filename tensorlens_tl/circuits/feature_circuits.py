"""Circuits of sparse features on a frozen pass: the causes of a feature, its effects, and edges between features.

    pre-activation = Σ source tokens + bias                                 (`feature_attribution`)
    logit          = Σ active features + reconstruction error + b_dec + bias     (`feature_effects`)
    pre-activation = Σ earlier features + error + b_dec + bias                (`feature_edges`)

All three sums are exact. As a target, a feature is a direction of the stream, its row of the encoder. As a source, it
is a vector in the stream, its value times its row of the decoder, and its score is the inner product of that vector
with the target pulled back to it: what the frozen model's target loses when the feature is removed from the stream. One
pull serves all features of a target. An inactive feature has a pre-activation like any other, and no effect.

For a graph whose nodes are features, heads and MLPs, use `contribution_graph` with ``dictionaries=``.

A transcoder replaces its MLP: the error is the part of the MLP's output that the transcoder does not reproduce, and
everything that reaches the target beside that MLP is one term.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from tensorlens_tl._arguments import check_choice, checked_names, formerly, plain
from tensorlens_tl.algebra import AffineMap, Chain, RowPositions
from tensorlens_tl.algebra.memory import Memory, slices
from tensorlens_tl.algebra.numerics import upcast, widest
from tensorlens_tl.algebra.positions import BiasTerms, in_total
from tensorlens_tl.circuits.arguments import Direction, FeatureChoice, FeatureLike
from tensorlens_tl.circuits.dictionary_features import (
    Features,
    FeaturesLike,
    chained,
    names_with_labels,
    stream_to,
)
from tensorlens_tl.circuits.effects import BY as DIRECT, Parts, direct_effects
from tensorlens_tl.circuits.stream import StreamTarget, dot, stream_target
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import ONCE_ACTIVATION, FrozenRule, Query, TokenLike, known_rule
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.results import Attribution, FeatureEdges, Terms

if TYPE_CHECKING:
    FeatureRows = Literal["feature_token", "feature"]
else:
    FeatureRows = Any  # `check_choice` says what is wrong with it

BY: tuple[FeatureRows, ...] = ("feature_token", "feature")


@formerly(ONCE_ACTIVATION)
@checked_names
def feature_attribution(
    features: FeaturesLike,
    feature: FeatureLike,
    *,
    query: Query = -1,
    by: Literal["token"] | Parts = "token",
    rule: FrozenRule = "frozen",
    memory: Memory = None,
) -> Attribution | Terms:
    """Compute the terms that sum to a feature's pre-activation.

    Args:
        features: the features of a pass, from `circuits.features`.
        feature: its number or name (``"F12"``); it need not be active.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        by: ``"token"``, source tokens through everything before the dictionary; or direct effects by ``"component"``,
            ``"head"``, ``"head_token"`` or ``"neuron"``, as in `logit_attribution`.
        rule: the rule for MLPs on the way.
        memory: how much may be allocated at once, as ``"512MB"`` or bytes.

    Returns:
        An `Attribution` by token, otherwise `Terms`. The total is the dictionary's own pre-activation. `b_enc` (with
        what the encoder's subtraction of b_dec contributes) is part of the bias, or a term.

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
    rule = known_rule(rule)
    positions = query_positions(frozen.prompt, query)
    frozen.check_fresh()
    numbers = torch.full((positions.shape[1],), number, device=positions.device)
    name = " · ".join(filter(None, [f"F{number}", features.labels.get(number, "")]))
    label = f"pre-activation of {name} at {features.hook}"
    readout = _pre_activations(features, numbers, positions, label, rule)
    if by != "token":
        return direct_effects(readout, by, memory)
    through = chained(step.map for step in readout.stream.steps)
    x = frozen.resid_pre(0)
    parts = [
        ((upcast(g) * x).sum(-1), constant)
        for g, constant in _pulled(readout, through, frozen.row_bytes, memory, "queries")
    ]
    scores, bias = (torch.cat(column).transpose(0, 1) for column in zip(*parts, strict=True))
    options = {"feature": number, "hook": features.hook, "query": query, "rule": rule}
    return Attribution.of(
        frozen, scores * frozen.mask[:, None], method="tensorlens", query=query, bias=bias, total=readout.total,
        additive=True, target=label, options=options,
    )  # fmt: skip


@formerly(ONCE_ACTIVATION)
@checked_names
def feature_effects(
    features: FeaturesLike,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    query: Query = -1,
    direction: Direction = None,
    by: FeatureRows = "feature_token",
    rule: FrozenRule = "frozen",
    memory: Memory = None,
) -> Terms:
    """Compute what every active feature adds to a logit; with the error, b_dec and the biases, the terms sum to it.

    A score is what the frozen model's logit loses when the feature is removed where it writes.

    Args:
        features: the features of a pass, from `circuits.features`.
        target, minus, direction: as in `FrozenOperator.target`.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        by: ``"feature_token"`` (``"F12@7"`` is feature 12 at position 7, ``"error@7"`` the error there), or
            ``"feature"`` (summed over positions).
        rule: the rule for MLPs on the way.
        memory: how much may be allocated at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: no such `by`, a query out of range, no target, and what `target` rejects.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
        FrozenModelError: the weights were changed since the pass.

    >>> sae = tlens.circuits.features(frozen, tlens.load_demo_dictionary())
    >>> effects = tlens.circuits.feature_effects(sae, " value")
    >>> bool((effects.gap < 1e-4).all())
    True
    """
    frozen = _checked(features).frozen
    readout = stream_target(frozen, target, minus, direction, query, rule, one=False)
    names, scores = _effects(features, readout, by, memory)
    terms = Terms(
        names=names,
        scores=scores.transpose(0, 1),
        remainder=torch.zeros_like(readout.total),
        labels=names_with_labels(names, features.labels),
        **replace(readout, label=readout.name).fields(),
    )
    return frozen.checked(terms)


@formerly(ONCE_ACTIVATION)
@checked_names
def feature_edges(
    early: FeaturesLike,
    late: FeaturesLike,
    features: FeatureChoice = None,
    *,
    query: Query = -1,
    by: FeatureRows = "feature_token",
    rule: FrozenRule = "frozen",
    memory: Memory = None,
) -> FeatureEdges:
    """Compute what each active feature of an early dictionary adds to the pre-activations of a late one's features.

    Args:
        early, late: features of the same pass; the early ones are written no later than the late ones are read.
        features: which late features; None for those active at a query in any prompt.
        query: the positions of the late features, the last real token by default.
        by, rule, memory: as in `feature_effects`.

    Returns:
        A row for each query and late feature. All rows are pulled back together, one vector each.

    Raises:
        InvalidInputError: no such feature, query or `by`; features of two passes, or in the wrong order.
        FrozenModelError: the weights were changed since the pass.

    >>> early, late = (tlens.load_demo_dictionary(f"blocks.{layer}.hook_resid_post") for layer in (0, 2))
    >>> edges = tlens.circuits.feature_edges(*(tlens.circuits.features(frozen, sae) for sae in (early, late)))
    >>> bool((edges.gap < 1e-4).all())
    True
    """
    frozen = _checked(early).frozen
    rule = known_rule(rule)
    if _checked(late).frozen is not frozen:
        raise InvalidInputError("feature_edges: early and late are of two passes; compute both from the same one.")
    if late.reads.place < early.writes.place:
        raise InvalidInputError(
            f"feature_edges: late reads {late.hook}, which comes before {early.hook_out}, where early writes. Swap "
            "them."
        )
    positions = query_positions(frozen.prompt, query)
    frozen.check_fresh()
    columns, numbers = _late_features(late, features, positions)
    readout = _pre_activations(late, numbers, positions[:, columns], f"pre-activations at {late.hook}", rule)
    names, scores = _effects(early, readout, by, memory)
    return FeatureEdges(
        names=names,
        scores=scores.transpose(0, 1),
        remainder=torch.zeros_like(readout.total),
        features=numbers.tolist(),
        labels=names_with_labels(names, early.labels),
        **readout.fields(),
    )


def _checked(features: Any) -> Features:
    if not isinstance(features, Features):
        raise InvalidInputError(
            f"features are needed, got {type(features).__name__}: make them with circuits.features(frozen, dictionary)."
        )
    return features


def _pre_activations(
    features: Features, numbers: Int[Tensor, "row"], positions: Int[Tensor, "batch row"], label: str, rule: FrozenRule
) -> StreamTarget:
    """Return pre-activations as a target of the stream, one in each row; `rule` applies to MLPs on the way."""
    frozen = features.frozen
    vectors = features.dictionary.W_enc.T[numbers][:, None].expand(-1, len(frozen.tokens), -1)
    reader = features.reader.at(RowPositions(positions.T))
    pulled, bias = reader.pull_with_bias(vectors[:, :, None])
    constant = bias + features.dictionary.b_enc[numbers, None]
    real = torch.take_along_dim(frozen.mask, positions, dim=1)
    return StreamTarget(
        stream_to(frozen, features.reads.place, rule),
        features.hook,
        pulled[:, :, 0].transpose(0, 1) * real[..., None],
        upcast(constant).T * real,
        features.pre_activation(numbers, positions.T).T * real,
        positions,
        label,
        "b_enc",
    )


def _late_features(late: Features, features: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the query and the feature of each row."""
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
            raise InvalidInputError("features: none is active there; name some, or choose another query.")
    columns, numbers = torch.tensor(pairs, device=positions.device).T
    return columns, numbers


def _pulled(
    readout: StreamTarget, through: AffineMap, row_bytes: int, memory: Memory, title: str
) -> Iterator[tuple[Float[Tensor, "row batch pos d_model"], Float[Tensor, "row batch"]]]:
    """Pull a target's vectors through a map to all positions of an earlier stream; yield rows with their constants."""
    frozen = readout.stream.run
    length = frozen.tokens.shape[1]
    for part in slices(readout.positions.shape[1], row_bytes, memory, title):
        vectors, constant = readout.vectors[:, part].transpose(0, 1), readout.constant[:, part].T
        terms = BiasTerms()
        where = RowPositions(readout.positions[:, part].T)
        vectors = vectors.to(frozen.resid_pre(0).dtype)
        g = through.pull_between(vectors, where, None, length, causal=frozen.causal, biases=terms)
        yield pad(g, (0, 0, 0, length - g.shape[2])), in_total(terms, constant) + constant


def _effects(
    features: Features, readout: StreamTarget, by: str, memory: Memory
) -> tuple[list[str], Float[Tensor, "row batch term"]]:
    """Return everything that adds to a target from where the features are written onwards."""
    check_choice("by", by, BY)
    writes = features.writes
    steps = readout.stream.steps[readout.stream.step_at(writes.place.layer, writes.place.step) :]
    through = Chain((writes.outer, *(step.map for step in steps)))
    column, n_features, names, at_token = _columns(features, by)
    per_row = features.frozen.row_bytes + features.values.element_size() * (
        len(names) * len(features.frozen.tokens) + len(features.values)
    )
    scores: list[Tensor] = []
    for pulled, constant in _pulled(readout, through, per_row, memory, "rows"):
        g = writes.after.pull(pulled)
        of_features = widest(g[:0]).new_zeros(len(g), g.shape[1] * n_features)
        of_features.index_add_(1, column, features.gains(g) * features.values)
        errors = (widest(g) * features.error).sum(-1)
        errors = errors.sum(-1, keepdim=True) if at_token is None else errors[..., at_token]
        parts = [of_features.unflatten(1, (g.shape[1], n_features)), errors]  # n_features may be 0
        parts += [dot(widest(g), part)[..., None] for part in features.others.values()]
        columns = [torch.cat(parts, dim=-1).to(constant)]
        if writes.beside is not None:
            columns.append(dot(pulled, writes.beside)[..., None])
        scores.append(torch.cat([*columns, constant[..., None]], dim=-1))
    if writes.beside is not None:
        names.append(writes.beside_name)
    return [*names, "bias"], torch.cat(scores)


def _columns(features: Features, by: str) -> tuple[Int[Tensor, "active"], int, list[str], Int[Tensor, "token"] | None]:
    """Assign each active feature to a term.

    Returns:
        The term's number, offset by prompt; the number of feature terms per prompt; the names of all of a dictionary's
        terms; and the positions whose errors are separate terms, None for a single term.
    """
    prompt, position, feature = features.index.T
    count = features.dictionary.features
    at_token = None
    if by == "feature":
        numbers, column = feature.unique(return_inverse=True)
        names = [f"F{number}" for number in numbers.tolist()]
        errors = ["error"]
    else:
        numbers, column = (position * count + feature).unique(return_inverse=True)
        names = [f"F{number % count}@{number // count}" for number in numbers.tolist()]
        at_token = features.frozen.mask.any(0).nonzero()[:, 0]
        errors = [f"error@{at}" for at in at_token.tolist()]
    return prompt * len(names) + column, len(names), [*names, *errors, *features.others], at_token
