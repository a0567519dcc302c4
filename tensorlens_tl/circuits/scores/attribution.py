"""Which sources make an attention score.

The score of a head is bilinear in the stream at the query and at the key. That stream is a sum of sources and a bias,
so the score is a sum over pairs of sources, plus what one side's bias makes with the other side's sources, plus the
product of the two biases. Sources are the prompt's tokens, each with all it does through the layers before; or the
components that wrote the stream: embeddings, heads or whole attention layers, MLPs and their biases.
"""

from typing import NamedTuple, overload

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice
from tensorlens_tl.algebra import Chain, RowPositions
from tensorlens_tl.algebra.memory import chunks
from tensorlens_tl.algebra.positions import BiasTerms, in_total
from tensorlens_tl.circuits.arguments import Whole
from tensorlens_tl.circuits.scores.change import OF, score_change
from tensorlens_tl.circuits.scores.reading import ScoreReading, rotation_at, score_of, score_reading
from tensorlens_tl.circuits.scores.sources import components_before, places_of
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import Query
from tensorlens_tl.passes import Difference, FrozenPass, PassLike, PassOrDifference, check_explained
from tensorlens_tl.passes.inputs import one_query
from tensorlens_tl.passes.operator import chosen_head
from tensorlens_tl.results import ScoreAttribution, ScoreChange

BY = ("token", "component", "head")


@overload
def qk_attribution(
    frozen: Difference, layer: Whole, head: Whole, query: Query = -1, key: Query = 0, *, by: str = ..., of: str = ...
) -> ScoreChange: ...


@overload
def qk_attribution(
    frozen: PassLike, layer: Whole, head: Whole, query: Query = -1, key: Query = 0, *, by: str = ...,
    activation: str = ...,
) -> ScoreAttribution: ...  # fmt: skip


def qk_attribution(
    frozen: PassOrDifference,
    layer: Whole,
    head: Whole,
    query: Query = -1,
    key: Query = 0,
    *,
    by: str = "token",
    of: str = "score",
    activation: str = "ratio",
) -> ScoreAttribution | ScoreChange:
    """Which sources make one attention score, or its change between two runs, everything before the layer included.

    Of a pass, pairs of sources: patterns, activation ratios and norm scales before the layer are frozen, and so are the
    scales of the layer's norms, of queries and keys too.

    Of a difference, single sources, by the query and by keys, and nothing is held: scores change by
    ``Δs_ik = scale·(Δq_i·k̄_k + q̄_i·Δk_k)`` and an entry of the pattern by ``ΔP_ik = L_k·(Δs_k − Σ_j w_j·Δs_j)``, to
    which all keys of the row give something (`tensorlens_tl.algebra.secants`).

    Args:
        frozen: the pass, or the difference of two.
        layer, head: which head (with grouped-query attention a query head).
        query, key: one position each; see `tensorlens_tl.passes.inputs.query_positions`.
        by: ``"token"`` (source tokens, through everything before), ``"component"`` (embeddings, each earlier layer's
            attention and MLP, and their biases) or ``"head"`` (attention by head).
        of: of a difference what changes: ``"score"``, before a soft cap and ALiBi, or ``"pattern"``, the share of
            attention that the key gets.
        activation: the rule for the MLPs before, of a pass.

    Returns:
        A `ScoreAttribution`; of a difference a `ScoreChange`, whose parts sum to the change of the models' own number.

    Raises:
        InvalidInputError: no such layer, head, position, `by` or `of`, or a key that the query cannot attend to.
        UnsupportedModelError: the layer's scores cannot be read.

    Source: ours; of a pass, the bilinear form of Elhage et al. (2021).

    >>> pairs = tlens.circuits.qk_attribution(frozen, 1, 0, key=2)
    >>> bool((pairs.gap < 1e-4).all())
    True
    >>> other = tlens.freeze(model, text.replace("red", "blue"))
    >>> moved = tlens.circuits.qk_attribution(tlens.difference(frozen, other), 1, 0, key=2, of="pattern")
    >>> bool((moved.gap < 1e-3).all())
    True
    """
    check_explained(frozen)
    check_choice("by", by, BY)
    check_choice("of", of, OF)
    layer, head = chosen_head(frozen.view, layer, head)
    positions = {name: one_query(frozen.prompt, at, name)[:, 0] for name, at in (("query", query), ("key", key))}
    if frozen.causal and bool((positions["key"] > positions["query"]).any()):
        raise InvalidInputError(
            f"query={query!r}, key={key!r}: the key comes after the query, and this model attends to no later token."
        )
    frozen.check_fresh()
    if isinstance(frozen, Difference):
        return score_change(frozen, layer, head, positions["query"], positions["key"], by, of)
    frozen.view.require_chain("attention scores")
    if of != "score":
        raise InvalidInputError(
            f"of={of!r}: a softmax of one run is no sum of its sources. Ask for of='score', or pass the difference of "
            "two runs, tlens.difference(a, b)."
        )
    reading = score_reading(frozen, layer)
    kv_head = head // (reading.heads // reading.kv_heads)
    sides = (
        (reading.query, head, reading.heads, positions["query"]),
        (reading.key, kv_head, reading.kv_heads, positions["key"]),
    )
    if by == "token":
        names = [list(row) for row in frozen.str_tokens]
        q, k = (_by_token(frozen, layer, reading, *side, activation) for side in sides)
    else:
        sources = components_before(frozen, layer, by, activation)
        names = [list(sources)] * len(frozen.tokens)
        q, k = (_by_component(reading, *side, torch.stack(list(sources.values()))) for side in sides)
    scale = reading.scale
    total = score_of(frozen, reading, layer, head, positions["query"], positions["key"])
    alibi = None
    if reading.alibi is not None:
        alibi = reading.alibi[head][positions["query"], positions["key"]]
    attribution = ScoreAttribution(
        names=names,
        pairs=scale * torch.einsum("cbi,cbj->bij", q.shares, k.shares),
        query_sources=scale * torch.einsum("cbi,cb->bi", q.shares, k.bias),
        key_sources=scale * torch.einsum("cb,cbj->bj", q.bias, k.shares),
        bias=scale * (q.bias * k.bias).sum(0),
        total=total,
        by=by,
        alibi=alibi,
        soft_cap=reading.soft_cap,
        rotary=reading.rotation is not None,
        reading_error=reading.error,
        places=places_of(frozen.str_tokens, layer, head, positions["query"], positions["key"]),
        provenance=frozen.provenance(),
    )
    return frozen.checked(attribution)


class _Side(NamedTuple):
    """A head's query, or key, at one position per prompt.

    Attributes:
        shares: by channel and source, `[channel, batch, source]`.
        bias: what no source gives, `[channel, batch]`.
    """

    shares: Float[Tensor, "channel batch source"]
    bias: Float[Tensor, "channel batch"]


def _by_token(
    frozen: FrozenPass,
    layer: int,
    reading: ScoreReading,
    read: Chain,
    head: int,
    heads: int,
    at: Tensor,
    activation: str,
) -> _Side:
    """Each channel pulled back through everything before."""
    x0 = frozen.resid_pre(0)
    x = frozen.capture.resid_read(layer)
    d_head = read(x).shape[-1] // heads
    channels = slice(head * d_head, (head + 1) * d_head)
    earlier = (frozen.maps.block_map(number, activation=activation) for number in range(layer))
    whitening = frozen.maps.whitening(layer) or Chain(())
    whole = Chain((*earlier, *whitening.stages, *read.stages))
    R = rotation_at(reading, at, x, d_head)
    shares = []
    constants = []
    for rows in chunks(d_head, frozen.row_bytes, None, "score"):
        basis = x.new_zeros(len(rows), len(at), heads * d_head)
        # row c, pulled back, gives channel c of the rotated vector
        basis[:, :, channels] = R[..., rows.start : rows.stop].permute(2, 0, 1)
        biases = BiasTerms()
        where = RowPositions(at[None])
        reached = whole.pull_between(basis, where, None, x.shape[1], causal=frozen.causal, biases=biases)
        share = x0.new_zeros(len(rows), *x0.shape[:2])
        share[:, :, : reached.shape[2]] = (reached * x0[:, : reached.shape[2]]).sum(-1)
        shares.append(share)
        constants.append(in_total(biases, x0.new_zeros(len(rows), len(at))))
    return _Side(torch.cat(shares), torch.cat(constants))


def _by_component(
    reading: ScoreReading,
    read: Chain,
    head: int,
    heads: int,
    at: Tensor,
    sources: Float[Tensor, "source batch pos d_model"],
) -> _Side:
    """Each source's part of the stream at the position, read by the head."""
    vectors = torch.take_along_dim(sources, at[None, :, None, None], dim=2)
    cut = read.at(RowPositions(at[None]))
    projections = cut.push(vectors)[:, :, 0]
    d_head = projections.shape[-1] // heads
    channels = slice(head * d_head, (head + 1) * d_head)
    R = rotation_at(reading, at, projections, d_head)
    bias = cut(torch.zeros_like(vectors[:1]))[0, :, 0, channels]
    return _Side(
        torch.einsum("sbd,bde->ebs", projections[..., channels], R),
        torch.einsum("bd,bde->eb", bias, R),
    )
