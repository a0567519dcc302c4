"""Per-layer maps of token pairs, by name, and the two ways to aggregate them: product and mean.

Every function here takes a frozen pass and returns `[layer, batch, query, key]`; padding is zero.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.frozen import FrozenPass
from tensorlens_tl.inputs import query_positions
from tensorlens_tl.local import LocalLayer, through
from tensorlens_tl.maps import Norm

Maps = Float[Tensor, "layer batch query key"]


def locals_of(frozen: FrozenPass) -> list[LocalLayer]:
    """Every layer of a pass, seen locally."""
    return [LocalLayer(frozen, layer) for layer in range(frozen.n_layers)]


def attention_map(frozen: FrozenPass) -> Maps:
    """The pattern, averaged over heads."""
    return torch.stack([layer.pattern.mean(1) * layer.pairs for layer in locals_of(frozen)])


def norm_map(frozen: FrozenPass, scope: str = "attn") -> Maps:
    """Kobayashi et al. 2020 (`attn`: ‖Σ_h α f(x)‖) and 2021 (`attn_res`, `attn_res_ln`); see `methods.norm`."""
    maps = []
    for layer in locals_of(frozen):
        outer = layer.norms(layer.attn.outer) if scope == "attn_res_ln" else ()
        maps.append(layer.pair_norms(outer, residual=scope != "attn"))
    return torch.stack(maps)


def globenc_norms(layer: LocalLayer, method: str = "globenc") -> tuple[Norm, ...]:
    """The norms GlobEnc pushes attention and residual through: both of a post-LN block, else the one before the MLP.

    Raises:
        UnsupportedModelError: parallel blocks, and blocks without a norm that reads the sum.
    """
    layout = layer.frozen.layouts[layer.layer]
    if layout.attn.outer is not None:
        return layer.norms(layout.attn.outer, layout.mlp.outer)
    if layout.name == "pre" and layout.mlp.before is None and layer.frozen.view.blocks[layer.layer].has_mlp:
        return ()  # a model without norms: the MLP reads the sum itself
    if layout.parallel or layout.mlp.before is None or not layer.frozen.view.blocks[layer.layer].has_mlp:
        why = "attention and MLP are parallel" if layout.parallel else "no norm reads attention plus residual"
        raise UnsupportedModelError(
            f"{method}: undefined at blocks.{layer.layer} of this {layer.frozen.view.description}, where {why}. "
            "Use norm with scope='attn_res_ln', which is defined for every block."
        )
    return layer.norms(layout.mlp.before)


def globenc_map(frozen: FrozenPass) -> Maps:
    """Modarressi et al. 2022; see `methods.globenc`."""
    layers = locals_of(frozen)
    outer = [globenc_norms(layer) for layer in layers]  # refuse before work
    return torch.stack([layer.pair_norms(norms, residual=True) for layer, norms in zip(layers, outer, strict=True)])


def alti_map(frozen: FrozenPass, distance: str = "l1") -> Maps:
    """Ferrando et al. 2022; see `methods.alti`."""
    order = {"l1": 1, "l2": 2}[distance]
    maps = []
    for layer in locals_of(frozen):
        outer = layer.norms(layer.attn.outer)
        y = layer.attended()
        scores = layer.x.new_empty(*layer.pairs.shape)
        for keys, vectors in layer.vectors(outer, residual=True):
            scores[..., keys] = (y - vectors).norm(p=order, dim=-1).permute(1, 2, 0)
        scores = (y.norm(p=order, dim=-1)[..., None] - scores).clamp_min(0) * layer.pairs
        maps.append(normalize_rows(scores))
    return torch.stack(maps)


FF_SCOPES = {
    "post": ("atb", "atb_ff", "atb_ff_res", "atb_ff_res_ln"),
    "pre": ("atb", "atb_ln", "atb_ln_ff", "atb_ln_ff_res", "atb_ln_ff_res_nextln"),
}


def ff_scope(frozen: FrozenPass, scope: str | None) -> str:
    """The scope itself, or the widest one for None, checked against the model's layout.

    Raises:
        UnsupportedModelError: parallel or attention-only blocks.
        InvalidInputError: not a scope of this layout.
    """
    for number, layout in enumerate(frozen.layouts):
        if layout.parallel or not frozen.view.blocks[number].has_mlp:
            raise UnsupportedModelError(
                f"ff-ig: undefined at blocks.{number} of this {frozen.view.description}: no MLP reads attention."
            )
    kind = "post" if frozen.layouts[0].attn.outer is not None else "pre"
    scope = scope or FF_SCOPES[kind][-1]
    if scope not in FF_SCOPES[kind]:
        raise InvalidInputError(
            f"scope={scope!r}: this is a {kind}-LN model; use one of {', '.join(map(repr, FF_SCOPES[kind]))}."
        )
    return scope


def ff_map(frozen: FrozenPass, scope: str | None = None, *, without_low_gain: float = 0.0) -> Maps:
    """Kobayashi et al. 2024: the block up to `scope`, its feed-forward part by integrated gradients.

    `without_low_gain` leaves that share of the channels, those of smallest |gain| in the norm that reads the
    feed-forward layer's output, out of the norms of the vectors.
    """
    scope = ff_scope(frozen, scope)
    maps = []
    for layer in locals_of(frozen):
        scores = layer.x.new_empty(*layer.pairs.shape)
        gain = gain_after(layer) if without_low_gain else None
        kept = slice(None) if gain is None else gain.abs().argsort()[max(1, int(without_low_gain * len(gain))) :]
        for keys, vectors in ff_vectors(layer, scope):
            scores[..., keys] = vectors[..., kept].norm(dim=-1).permute(1, 2, 0)
        maps.append(scores * layer.pairs)
    return torch.stack(maps)


def ff_vectors(layer: LocalLayer, scope: str) -> Iterator[tuple[slice, Float[Tensor, "rows batch query d_model"]]]:
    """The vectors whose norms `ff_map` takes, a few source tokens at a time."""
    place, mlp = layer.mlp, layer.frozen.mlp(layer.layer, "ig")
    weights = layer.frozen.view.blocks[layer.layer].mlp
    if mlp is None or weights is None:
        raise UnsupportedModelError(f"ff-ig: blocks.{layer.layer} has no MLP.")
    width = 2 * weights.W_in.shape[1] if "ff" in scope else 0
    for keys, atb in layer.vectors(layer.norms(layer.attn.outer), residual=True, width=width):
        made = atb if scope == "atb" else through(layer.norms(place.before), atb)
        if "ff" in scope:
            made = through(layer.norms(place.after), mlp.push(made))
        if "res" in scope:
            made = made + atb
        if scope == "atb_ff_res_ln":
            made = through(layer.norms(place.outer), made)
        if scope == "atb_ln_ff_res_nextln":
            made = through(_next_norm(layer.frozen, layer.layer), made)
        yield keys, made


def gain_after(layer: LocalLayer) -> Float[Tensor, "d_model"] | None:
    """The gain of the norm that reads the sum after the feed-forward layer, or None without one."""
    norms = layer.norms(layer.mlp.outer) or _next_norm(layer.frozen, layer.layer)
    return norms[0].gain if norms else None


def _next_norm(frozen: FrozenPass, number: int) -> tuple[Norm, ...]:
    if number + 1 < frozen.n_layers:
        following = LocalLayer(frozen, number + 1)
        return following.norms(following.attn.before)
    final = frozen.final_norm()
    return () if final is None else (final,)


LAYER_MAPS: dict[str, Callable[[FrozenPass], Tensor]] = {
    "attention": attention_map,
    "norm:attn": norm_map,
    "norm:attn_res": lambda frozen: norm_map(frozen, "attn_res"),
    "norm:attn_res_ln": lambda frozen: norm_map(frozen, "attn_res_ln"),
    "globenc": globenc_map,
    "alti": alti_map,
    "ff-ig": ff_map,
}

WITHOUT_RESIDUAL = ("attention", "norm:attn")
"""Maps that do not hold the residual connection yet: a rollout adds it."""


def layer_map(frozen: FrozenPass, name: str) -> Maps:
    """One of `LAYER_MAPS` by name.

    Raises:
        InvalidInputError: no such map.
        UnsupportedModelError: the map is undefined for this model.
    """
    if name not in LAYER_MAPS:
        raise InvalidInputError(f"layer_map={name!r}; use one of {', '.join(map(repr, LAYER_MAPS))}.")
    return LAYER_MAPS[name](frozen)


# ------------------------------------------------------------------------------------------ aggregation


def normalize_rows(maps: Float[Tensor, "*any query key"]) -> Float[Tensor, "*any query key"]:
    """Rows divided by their sum; an empty row (padding) stays zero."""
    total = maps.sum(-1, keepdim=True)
    return maps / torch.where(total == 0, torch.ones_like(total), total)


def add_residual(maps: Maps, share: float, mask: Tensor) -> Maps:
    """``(1 − share)·map + share·I`` on real tokens."""
    return (1 - share) * maps + share * torch.diag_embed(mask.to(maps.dtype))


def product(maps: Maps) -> Float[Tensor, "batch query key"]:
    """M_L ⋯ M_2 M_1: what reaches the last layer from the first."""
    result = maps[0]
    for later in maps[1:]:
        result = later @ result
    return result


def select_query(frozen: FrozenPass, scores: Tensor, query: int | None) -> Tensor:
    """The asked query of `[batch, ..., query, key]`, kept as an axis of length 1; None keeps all."""
    if query is None:
        return scores
    index = query_positions(frozen.mask, query)
    index = index.view(len(index), *(1 for _ in scores.shape[1:-2]), 1, 1)
    return torch.take_along_dim(scores, index, dim=-2)
