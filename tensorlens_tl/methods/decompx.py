"""DecompX: Modarressi et al. 2023.

Every source token's vector passes through the whole model, and every bias is distributed over the source tokens where
it is added (`tensorlens_tl.algebra.bias_spreading`). As in the original, b_V travels with the sources in the first
layer, where they are still separate, and is bias in later ones. Vectors sum to the model's own output, except with
``bias="none"``.

Outside post-LN (ours): biases inside a branch are spread there, attention's after the residual connection, whatever the
layout; the final norm's shift and, for a target, the prediction head's biases are spread too. A source token that
cannot reach a query (causal, padding) gets no share. In a whitened model, whitening mixes the sources before the first
layer, so b_V is bias there too; for simplicity it also is in every layer of an encoder–decoder, whose sources are the
tokens of both sides.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments, formerly
from tensorlens_tl.algebra import AffineMap, Chain, Identity, Sum
from tensorlens_tl.algebra.bias_spreading import CHUNK_BUDGET, BiasRule, Spread, check_bias_rule, source_vectors, walk
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import relative_gap, upcast
from tensorlens_tl.errors import InvalidInputError, SizeError
from tensorlens_tl.layerwise import LocalLayer
from tensorlens_tl.models import ONCE_ACTIVATION, Query, TokenLike
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.inputs import is_all, query_positions
from tensorlens_tl.passes.target import logit_label, unembedding_rows
from tensorlens_tl.registry import register_method
from tensorlens_tl.results import AXES, Attribution

DecompRule = Literal["frozen", "frozen-tangent"]
Aggregate = Literal["norm", "target", "vector"]


def _aggregates_onto_token(options: Mapping[str, Any]) -> bool:
    return options.get("aggregate") in (None, "target")


def _needs(options: Mapping[str, Any]) -> tuple[str, ...]:
    if options["target"] is None:
        return ()
    return ("predictions",)


@register_method("decompx", needs=_needs, explains_prediction=_aggregates_onto_token)
@formerly(ONCE_ACTIVATION)
@checked_arguments
def decompx(
    frozen: FrozenPass,
    *,
    bias: BiasRule = "absdot",
    rule: DecompRule = "frozen",
    aggregate: Aggregate | None = None,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = "all",
    memory: Memory = None,
) -> Attribution:
    """Push source vectors through the whole model, spreading biases over them stage by stage (Modarressi 2023).

    Args:
        bias: `"absdot"`, `"norm"`, `"equal"`, `"abssim"`, `"dot"`, `"cls"`, `"token"` (an extra source, last on the key
            axis) or `"none"`.
        rule: `"frozen"` (φ(z)/z, zero origin) or `"frozen-tangent"` (linear approximation, its remainder spread as a
            bias).
        aggregate: `"norm"` of the vectors, `"target"` (their share of a logit; additive), or `"vector"` (axes batch,
            query, key, d_model). None is `"target"` if a target is given, else `"norm"`.
        target, minus: for ``aggregate="target"``. Then pass ``query=-1`` for an encoder–decoder, whose encoder predicts
            nothing.
        memory: must hold a vector for every source token at every position (in causal models up to the last query),
            twice with parallel blocks.

    Raises:
        InvalidInputError: also a target that is missing, or given with another aggregate.
        UnsupportedModelError: a target where the model predicts no tokens; a block that uses keys and values of
            another.
        SizeError: the vectors need more than `memory`; the error says how much.

    >>> result = tlens.methods.decompx(frozen, target=" value", query=-1)
    >>> torch.allclose(result.scores.sum(-1) + result.bias, result.total, rtol=1e-3)
    True
    """
    frozen.view.require_single_streams("decompx")
    if aggregate is None:
        aggregate = "norm" if target is None else "target"
    if (aggregate == "target") != (target is not None):
        raise InvalidInputError(
            "target: aggregate='target' needs one (target=' Paris'), and no other aggregate takes one."
        )
    options = {"bias": bias, "rule": rule, "aggregate": aggregate, "query": query}
    fields: dict[str, Any] = {}
    positions = query_positions(frozen.prompt, query)
    carry = partial(_vectors_at, frozen, None if is_all(query) else positions, bias, rule, memory=memory)
    axes = AXES
    if aggregate == "target":
        direction, constant = map(upcast, unembedding_rows(frozen, positions, target, minus))
        scores = torch.einsum("kbqd,bqd->bqk", upcast(carry(through_head=True)), direction)
        states = upcast(torch.take_along_dim(frozen.unembedded(), positions[..., None], dim=1))
        total = (states * direction).sum(-1) + constant
        real = torch.take_along_dim(frozen.mask, positions, dim=1)
        constant = constant * real
        total = total * real
        fields = {"bias": constant, "total": total, "gap": relative_gap(scores, constant, total)}
        fields |= {"additive": bias != "none", "target": logit_label(frozen.view, target, minus)}
        options |= {"target": target, "minus": minus}
    elif aggregate == "norm":
        scores = carry().norm(dim=-1).permute(1, 2, 0)
    else:
        scores = carry().permute(1, 2, 0, 3)
        axes = (*AXES, "d_model")
    if bias == "token":
        fields |= _with_bias_token(frozen)
    attribution = Attribution.of(frozen, scores, method="decompx", query=query, axes=axes, options=options, **fields)
    return frozen.checked(attribution) if attribution.additive else attribution


def _with_bias_token(frozen: FrozenPass) -> dict[str, Any]:
    """Return the fields of a result whose last source is the biases."""
    prompt = frozen.prompt
    return {
        "tokens": [[*row, "[bias]"] for row in frozen.str_tokens],
        "word_starts": prompt.word_starts and [[*row, True] for row in prompt.word_starts],
        "sides": prompt.sides and [[*row, ""] for row in prompt.sides],
        "mask": torch.nn.functional.pad(frozen.mask, (0, 1), value=True),
    }


def _vectors_at(
    frozen: FrozenPass,
    positions: Tensor | None,
    bias: BiasRule,
    rule: DecompRule,
    *,
    through_head: bool = False,
    memory: Memory = None,
) -> Tensor:
    """Return source vectors `[key, batch, query, d_model]` at some positions, ignoring what cannot reach them."""
    length = frozen.tokens.shape[1]
    end = length
    if positions is not None and frozen.causal:
        end = int(positions.max()) + 1
    prefix = frozen if end == length else frozen.cut(end)
    vectors = source_to_output(prefix, bias, rule, through_head=through_head, memory=memory)
    if positions is not None:
        vectors = torch.take_along_dim(vectors, positions[None, ..., None], dim=2)
    if end == length:
        return vectors
    keys = _sources(length, bias)
    padded = vectors.new_zeros(keys, *vectors.shape[1:])
    padded[:end] = vectors[:end]
    if bias == "token":
        padded[-1] = vectors[-1]
    return padded


def _sources(length: int, bias: BiasRule) -> int:
    """Return the number of sources: one for each token, and for the rule ``"token"`` one for all biases."""
    return length + 1 if bias == "token" else length


@formerly(ONCE_ACTIVATION)
def source_to_output(
    frozen: FrozenPass,
    bias: str = "absdot",
    rule: DecompRule = "frozen",
    *,
    layers: int | None = None,
    through_head: bool = False,
    memory: Memory = None,
) -> Tensor:
    """Return source vectors `[key, batch, query, d_model]` at the model's output, or after the first `layers` blocks.

    `through_head` includes a masked language model's prediction head; ``bias="token"`` adds one key. For the other
    options see `decompx`.
    """
    spreading = check_bias_rule(bias)
    width = 3 * frozen.resid_pre(0).shape[-1] + max(block.widest for block in frozen.view.blocks)
    spread = Spread(spreading, _reach(frozen), frozen.mask.long().argmax(1), _budget(frozen, spreading, width, memory))
    stages = _stages(frozen.maps.block_map(0, rule=rule))
    first = frozen.view.blocks[0]
    attends = first.mixer is None and not first.has_beside
    has_head_vectors = attends and first.attention.output_factor is None
    if frozen.maps.whitening(0) is None and frozen.sides is None and has_head_vectors:
        vectors = _first_attention(frozen, spread, rule, width)
        stages = stages[1:]
    else:
        vectors = source_vectors(frozen.resid_pre(0), spreading == "token")
    if layers is None:
        ends = [frozen.final_map()]
        if through_head:
            ends.append(frozen.prediction_head())
        layers = frozen.n_layers
    else:
        ends = []
    for layer in range(1, layers):
        stages += _stages(frozen.maps.block_map(layer, rule=rule))
    stages += [end for end in ends if end is not None]
    vectors = walk(Chain(tuple(stages)), vectors, spread, causal=frozen.causal, width=width)
    # the source that stands for all biases, after those of the tokens, is real everywhere
    keys = torch.nn.functional.pad(frozen.mask.T, (0, 0, 0, len(vectors) - frozen.mask.shape[1]), value=True)
    pairs = frozen.mask[None, :, :] & keys[:, :, None]
    if bool(pairs.all()):
        return vectors
    return vectors.mul_(pairs[..., None])


def _first_attention(frozen: FrozenPass, spread: Spread, rule: DecompRule, width: int) -> Tensor:
    """Apply the first attention, where sources are still separate: u_j by head with b_V, not one push per source."""
    local = LocalLayer(frozen, 0)
    extra = spread.rule == "token"
    vectors = source_vectors(local.x, extra)
    first = _stages(frozen.maps.block_map(0, rule=rule))[0]
    terms = first.terms if isinstance(first, Sum) else ()
    parallel = [term for term in terms if not isinstance(term, Identity) and not term.mixes]
    beside = [walk(term, vectors.clone(), spread, causal=frozen.causal, width=width) for term in parallel]
    for keys, contribution in local.vectors(width=width, budget=spread.budget):
        vectors[keys] += contribution
    constant = frozen.view.blocks[0].attention.b_O
    after = local.norms(local.attn.after)
    if constant is None:
        constant = local.x.new_zeros(local.x.shape[-1])
    constant = constant.expand(local.x.shape)
    for norm in after:
        constant = norm(constant)
    for contribution in beside:
        vectors += contribution
    return spread.add_everywhere(vectors, constant)


def _budget(frozen: FrozenPass, bias: BiasRule, width: int, memory: Memory) -> int:
    """Return how much a chunk may allocate besides the vectors themselves."""
    if memory is None:
        return CHUNK_BUDGET
    x = frozen.resid_pre(0)
    keys = _sources(x.shape[1], bias)
    copies = 2 if any(layout.parallel for layout in frozen.layouts) else 1
    vectors = copies * keys * x.numel() * x.element_size()
    least = max(keys, x.shape[1]) * len(x) * width * x.element_size()
    left = in_bytes(memory) - vectors
    if left < least:
        raise SizeError(
            f"decompx: its vectors, one for every source token at every position, take {vectors / 1e6:.1f} MB here and "
            f"{least / 1e6:.1f} MB to work on them; memory={memory!r} is less. Raise it, or freeze fewer or shorter "
            "prompts at once."
        )
    return left


def _stages(block: AffineMap) -> list[AffineMap]:
    return list(block.stages) if isinstance(block, Chain) else [block]


def _reach(frozen: FrozenPass) -> Tensor:
    """Return `[key, batch, query]`: both real, and in a causal model the key not after the query.

    In an encoder–decoder, no decoder token reaches the encoder; the decoder's positions are causal if the model is.
    """
    mask = frozen.mask
    reach = mask.T[:, :, None] & mask[None]
    if frozen.sides is not None:
        pos = mask.shape[1]
        encoder = frozen.sides[0]
        allowed = torch.ones(pos, pos, dtype=torch.bool, device=mask.device)
        allowed[encoder:, :encoder] = False
        decoder = range(frozen.view.encoder_layers, frozen.n_layers)
        if not any(bool(frozen.pattern(layer).triu(1).any()) for layer in decoder):
            allowed[encoder:, encoder:] = allowed[encoder:, encoder:].triu()
        return reach & allowed[:, None]
    if frozen.causal:
        pos = mask.shape[1]
        reach = reach & torch.ones(pos, pos, dtype=torch.bool, device=mask.device).triu()[:, None]
    return reach
