"""DecompX: Modarressi et al. 2023.

Every source token's vector goes through the whole model, and every bias is given to the source tokens where it is added
(`tensorlens_tl.algebra.bias_spreading`). As in the original, b_V travels with the sources in the first layer, where
they are still apart, and is bias in later ones. Vectors sum to the model's own output, except with ``bias="none"``.

Outside post-LN (ours): biases inside a branch are spread there, attention's after the residual connection, whatever the
layout; the final norm's shift and, for a target, the prediction head's biases are spread too. A source token that
cannot reach a query (causal, padding) gets no share. On a whitened model the sources are not apart in the first layer
either: whitening has passed them on between positions, so b_V is bias there too; as it is, for simplicity, in every
layer of an encoder–decoder, whose sources are the tokens of both sides.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain, Identity, Sum
from tensorlens_tl.algebra.bias_spreading import CHUNK_BUDGET, Spread, check_bias_rule, source_vectors, walk
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import relative_residual, upcast
from tensorlens_tl.errors import InvalidInputError, SizeError
from tensorlens_tl.layerwise import LocalLayer
from tensorlens_tl.models.protocol import Query, TokenLike
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.operator import logit_label, unembedding_rows
from tensorlens_tl.registry import register_method
from tensorlens_tl.results.attribution import AXES, Attribution


def _aggregates_onto_token(options: Mapping[str, Any]) -> bool:
    return options.get("aggregate") in (None, "target")


@register_method("decompx", explains_prediction=_aggregates_onto_token)
def decompx(
    frozen: FrozenPass,
    *,
    bias: str = "absdot",
    activation: str = "ratio",
    aggregate: str | None = None,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = None,
    memory: Memory = None,
) -> Attribution:
    """Source vectors through the whole model, biases spread over them stage by stage (Modarressi 2023).

    Args:
        frozen: the pass.
        bias: `"absdot"`, `"norm"`, `"equal"`, `"abssim"`, `"dot"`, `"cls"`, `"token"` (an extra source, last on the key
            axis) or `"none"`.
        activation: `"ratio"` (zero origin) or `"tangent"` (linear approximation, its rest spread as a bias).
        aggregate: `"norm"` of the vectors, `"target"` (their share of a logit; additive), or `"vector"` (axes batch,
            query, key, d_model). None is `"target"` where one is given, else `"norm"`.
        target, minus: the token of ``aggregate="target"``, and one to subtract.
        query: positions, every one unless said; see `tensorlens_tl.passes.inputs.query_positions`.
        memory: what may be allocated at once, the vectors included, as ``"512MB"`` or bytes. There is a vector for
            every source token at every position (in causal models up to the last query), twice with parallel blocks.

    Raises:
        InvalidInputError: an unknown option, a target missing or not asked for, or a query out of range.
        SizeError: the vectors alone take more than `memory`; says how much.
    """
    rule = check_bias_rule(bias)
    if activation not in ("ratio", "tangent"):
        raise InvalidInputError(f"activation={activation!r}; DecompX has 'ratio' and 'tangent'.")
    if aggregate is None:
        aggregate = "norm" if target is None else "target"
    if aggregate not in ("norm", "target", "vector"):
        raise InvalidInputError(f"aggregate={aggregate!r}; use 'norm', 'target' or 'vector'.")
    if (aggregate == "target") != (target is not None):
        raise InvalidInputError(
            "target: aggregate='target' needs one (target=' Paris'), and no other aggregate takes one."
        )
    options = {"bias": bias, "activation": activation, "aggregate": aggregate, "query": query}
    fields: dict[str, Any] = {}
    positions = query_positions(frozen.prompt, query)
    unembedding = unembedding_rows(frozen, positions, target, minus) if aggregate == "target" else None
    vectors = _vectors_at(frozen, None if query is None else positions, rule, activation, aggregate, memory)
    if unembedding is not None:
        vectors = upcast(vectors)
        direction = upcast(unembedding[0])
        constant = upcast(unembedding[1])
        scores = torch.einsum("kbqd,bqd->bqk", vectors, direction)
        states = upcast(torch.take_along_dim(frozen.unembedded(), positions[..., None], dim=1))
        total = (states * direction).sum(-1) + constant
        real = torch.take_along_dim(frozen.mask, positions, dim=1)
        bias_u = constant * real
        total = total * real
        fields = {"bias": bias_u, "total": total, "residual": relative_residual(scores, bias_u, total)}
        fields |= {"additive": bias != "none", "target": logit_label(frozen.view, target, minus)}
        options |= {"target": target, "minus": minus}
    else:
        scores = vectors.norm(dim=-1).permute(1, 2, 0) if aggregate == "norm" else vectors.permute(1, 2, 0, 3)
    axes = AXES if aggregate != "vector" else (*AXES, "d_model")
    if rule == "token":
        starts = frozen.prompt.word_starts
        fields |= {
            "tokens": [[*row, "[bias]"] for row in frozen.str_tokens],
            "word_starts": None if starts is None else [[*row, True] for row in starts],
            "sides": None if frozen.prompt.sides is None else [[*row, ""] for row in frozen.prompt.sides],
            "mask": torch.cat([frozen.mask, torch.ones_like(frozen.mask[:, :1])], dim=1),
        }
    attribution = Attribution.of(frozen, scores, method="decompx", query=query, axes=axes, options=options, **fields)
    return frozen.checked(attribution) if attribution.additive else attribution


def _vectors_at(
    frozen: FrozenPass, positions: Tensor | None, rule: str, activation: str, aggregate: str, memory: Memory
) -> Tensor:
    """Source vectors at some positions, `[key, batch, query, d_model]`; nothing that cannot reach them is carried."""
    length = frozen.tokens.shape[1]
    end = length if positions is None or not frozen.causal else int(positions.max()) + 1
    prefix = frozen if end == length else frozen.cut(end)
    vectors = source_to_output(prefix, rule, activation, through_head=aggregate == "target", memory=memory)
    if positions is not None:
        vectors = torch.take_along_dim(vectors, positions[None, ..., None], dim=2)
    if end == length:
        return vectors
    keys = length + 1 if rule == "token" else length
    padded = vectors.new_zeros(keys, *vectors.shape[1:])
    padded[:end] = vectors[:end]
    if rule == "token":
        padded[-1] = vectors[-1]
    return padded


def source_to_output(
    frozen: FrozenPass,
    bias: str = "absdot",
    activation: str = "ratio",
    *,
    layers: int | None = None,
    through_head: bool = False,
    memory: Memory = None,
) -> Tensor:
    """Source vectors `[key, batch, query, d_model]` at the model's output, or after the first `layers` blocks.

    Args:
        frozen: the pass.
        bias, activation: as for `decompx`; ``bias="token"`` adds one key.
        layers: stop after this many blocks, without the final norm.
        through_head: go on through a masked language model's prediction head.
        memory: that of `decompx`.
    """
    rule = check_bias_rule(bias)
    width = 3 * frozen.resid_pre(0).shape[-1] + _widest(frozen)
    spread = Spread(rule, _reach(frozen), frozen.mask.long().argmax(1), _budget(frozen, rule, width, memory))
    stages = _stages(frozen.maps.block_map(0, activation=activation))
    attention = frozen.view.blocks[0].attention if frozen.view.blocks[0].mixer is None else None
    plain = attention is not None and attention.output_factor is None
    if frozen.maps.whitening(0) is None and frozen.sides is None and plain:
        vectors = _first_attention(frozen, spread, activation, width)
        stages = stages[1:]
    else:
        vectors = source_vectors(frozen.resid_pre(0), rule == "token")
    last = frozen.n_layers if layers is None else layers
    for layer in range(1, last):
        stages += _stages(frozen.maps.block_map(layer, activation=activation))
    if layers is None:
        ends = (frozen.final_map(), frozen.prediction_head() if through_head else None)
        stages += [end for end in ends if end is not None]
    vectors = walk(Chain(tuple(stages)), vectors, spread, causal=frozen.causal, width=width)
    pairs = frozen.mask[None, :, :] & _real_keys(frozen, len(vectors))
    return vectors if bool(pairs.all()) else vectors.mul_(pairs[..., None])


def _first_attention(frozen: FrozenPass, spread: Spread, activation: str, width: int) -> Tensor:
    """The first attention step, where sources are still apart: u_j by head, b_V included, not a push per source."""
    local = LocalLayer(frozen, 0)
    extra = spread.rule == "token"
    vectors = source_vectors(local.x, extra)
    first = _stages(frozen.maps.block_map(0, activation=activation))[0]
    parallel = [t for t in first.terms if not isinstance(t, Identity) and not t.mixes] if isinstance(first, Sum) else []
    beside = [walk(term, vectors.clone(), spread, causal=frozen.causal, width=width) for term in parallel]
    for keys, contribution in local.vectors(width=width, budget=spread.budget):
        vectors[keys] += contribution
    constant = frozen.view.blocks[0].attention.b_O
    after = local.norms(local.attn.after)
    constant = local.x.new_zeros(local.x.shape[-1]) if constant is None else constant
    constant = constant.expand(local.x.shape)
    for norm in after:
        constant = norm(constant)
    for contribution in beside:
        vectors += contribution
    return spread.add_everywhere(vectors, constant)


def _budget(frozen: FrozenPass, rule: str, width: int, memory: Memory) -> int:
    """What a chunk may take besides the vectors themselves."""
    if memory is None:
        return CHUNK_BUDGET
    x = frozen.resid_pre(0)
    keys = x.shape[1] + 1 if rule == "token" else x.shape[1]
    vectors = keys * x.numel() * x.element_size() * (2 if any(layout.parallel for layout in frozen.layouts) else 1)
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


def _widest(frozen: FrozenPass) -> int:
    blocks = frozen.view.blocks
    mlps = [block.mlp.hidden for block in blocks if block.mlp is not None]
    return max([*mlps, *(block.width for block in blocks)])


def _real_keys(frozen: FrozenPass, keys: int) -> Tensor:
    real = frozen.mask.T[:, :, None]
    return real if keys == len(real) else torch.cat([real, torch.ones_like(real[:1])])


def _reach(frozen: FrozenPass) -> Tensor:
    """`[key, batch, query]`: both real, and the key not ahead of the query where the model is causal.

    In an encoder–decoder nothing reaches the encoder from the decoder, whose own positions are causal where it is.
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
