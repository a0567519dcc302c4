"""Which sources make an attention score.

The score of a head is bilinear in the stream at the query and at the key. That stream is a sum of sources and a bias,
so the score is a sum over pairs of sources, plus what one side's bias makes with the other side's sources, plus the
product of the two biases. Sources are the prompt's tokens, each with all it does through the layers before; or the
components that wrote the stream: embeddings, heads or whole attention layers, MLPs and their biases.

In cross-attention the query's sources are those of the decoder's stream, the key's those of the encoder's output.
"""

from dataclasses import dataclass
from typing import overload

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice
from tensorlens_tl.algebra import Chain, RowPositions, stages_of
from tensorlens_tl.algebra.memory import chunks
from tensorlens_tl.algebra.positions import BiasTerms, in_total
from tensorlens_tl.circuits.arguments import Whole
from tensorlens_tl.circuits.scores.change import OF, score_change
from tensorlens_tl.circuits.scores.place import ScorePlace
from tensorlens_tl.circuits.scores.reading import HeadRead, head_reads, relative_of, score_of, score_reading
from tensorlens_tl.circuits.scores.sources import components_before, maps_before
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import Query, check_rule
from tensorlens_tl.passes import Difference, FrozenPass, PassLike, PassOrDifference, check_explained, one_check
from tensorlens_tl.results import ScoreAttribution, ScoreChange

BY = ("token", "component", "head")


@overload
def qk_attribution(
    frozen: Difference, layer: Whole, head: Whole, query: Query = -1, key: Query = 0, *, by: str = ..., of: str = ...,
    cross: bool = ...,
) -> ScoreChange: ...  # fmt: skip


@overload
def qk_attribution(
    frozen: PassLike, layer: Whole, head: Whole, query: Query = -1, key: Query = 0, *, by: str = ...,
    activation: str = ..., cross: bool = ...,
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
    cross: bool = False,
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
        query, key: one position each; see `tensorlens_tl.passes.inputs.query_positions`. Positions of a decoder follow
            those of the encoder.
        by: ``"token"`` (source tokens, through everything before), ``"component"`` (embeddings, each earlier layer's
            attention and MLP, and their biases) or ``"head"`` (attention by head).
        of: of a difference what changes: ``"score"``, before a soft cap and ALiBi, or ``"pattern"``, the share of
            attention that the key gets.
        activation: the rule for the MLPs before, of a pass.
        cross: a head of an encoder–decoder's cross-attention, ``"L2.cross.H0"``, instead of self-attention: the query's
            sources are those of the decoder's stream, the key's those of the encoder's output, after the encoder's last
            norm where there is one.

    Returns:
        A `ScoreAttribution`; of a difference a `ScoreChange`, whose parts sum to the change of the models' own number.

    Raises:
        InvalidInputError: no such layer, head, position, `by` or `of`; a key that comes after the query, or, where the
            model shows its scores, one that a mask closes to it, such as a local window's; of an encoder–decoder, a
            position on the other side.
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
    check_rule(activation)
    place = ScorePlace.of(frozen, layer, head, query, key, cross=cross)
    if isinstance(frozen, Difference):
        with one_check(frozen.view.model):
            frozen.check_fresh()
            return score_change(frozen, place, by, of)
    frozen.view.require_single_streams("attention scores")
    if of != "score":
        raise InvalidInputError(
            f"of={of!r}: a softmax of one run is no sum of its sources. Ask for of='score', or pass the difference of "
            "two runs, tlens.difference(a, b)."
        )
    with one_check(frozen.view.model):
        frozen.check_fresh()
        return _pairs(frozen, place, by, activation)


def _pairs(frozen: FrozenPass, place: ScorePlace, by: str, activation: str) -> ScoreAttribution:
    """Pairs of sources of one pass."""
    reading = score_reading(frozen, place.layer, cross=place.cross)
    reads = head_reads(frozen, reading, place)
    if by == "token":
        names = [list(row) for row in frozen.str_tokens]
        before = maps_before(frozen, place, activation)
        q, k = (_by_token(frozen, before, read) for read in reads)
    else:
        sources = components_before(frozen, place, by, activation)
        names = [list(sources)] * len(frozen.tokens)
        q, k = (_by_component(read, torch.stack(list(sources.values()))) for read in reads)
    scale = reading.scale
    alibi = None
    if reading.alibi is not None:
        alibi = reading.alibi[place.head][place.query, place.key]
    attribution = ScoreAttribution(
        names=names,
        pairs=scale * torch.einsum("cbi,cbj->bij", q.shares, k.shares),
        query_sources=scale * torch.einsum("cbi,cb->bi", q.shares, k.bias),
        key_sources=scale * torch.einsum("cb,cbj->bj", q.bias, k.shares),
        bias=scale * (q.bias * k.bias).sum(0),
        total=score_of(frozen, reading, place),
        by=by,
        alibi=alibi,
        relative=relative_of(reading, place),
        soft_cap=reading.soft_cap,
        rotary=reading.rotation is not None,
        reading_error=reading.error,
        places=place.words(frozen.str_tokens),
        provenance=frozen.provenance(),
    )
    return frozen.checked(attribution)


@dataclass(frozen=True, eq=False)
class _Side:
    """A head's query, or key, at one position per prompt.

    Attributes:
        shares: by channel and source, `[channel, batch, source]`.
        bias: what no source gives, `[channel, batch]`.
    """

    shares: Float[Tensor, "channel batch source"]
    bias: Float[Tensor, "channel batch"]


def _by_token(frozen: FrozenPass, before: Chain, read: HeadRead) -> _Side:
    """Each channel pulled back through everything before."""
    x0 = frozen.resid_pre(0)
    whole = Chain((*before.stages, *stages_of(read.map)))
    shares: list[Tensor] = []
    constants: list[Tensor] = []
    for rows in chunks(read.rotation.shape[-1], frozen.row_bytes, None, "score"):
        basis = x0.new_zeros(len(rows), len(read.at), read.width)
        # row c, pulled back, gives channel c of the rotated vector
        basis[:, :, read.channels] = read.rotation[..., rows.start : rows.stop].permute(2, 0, 1)
        biases = BiasTerms()
        where = RowPositions(read.at[None])
        reached = whole.pull_between(basis, where, None, x0.shape[1], causal=frozen.causal, biases=biases)
        share = x0.new_zeros(len(rows), *x0.shape[:2])
        share[:, :, : reached.shape[2]] = (reached * x0[:, : reached.shape[2]]).sum(-1)
        shares.append(share)
        constants.append(in_total(biases, x0.new_zeros(len(rows), len(read.at))))
    return _Side(torch.cat(shares), torch.cat(constants))


def _by_component(read: HeadRead, sources: Float[Tensor, "source batch pos d_model"]) -> _Side:
    """Each source's part of the stream at the position, read by the head."""
    bias = read(torch.zeros_like(sources[:1]))[0]
    return _Side(read.push(sources).permute(2, 1, 0), bias.T)
