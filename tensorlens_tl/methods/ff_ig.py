"""Feed-forward maps by integrated gradients: Kobayashi et al. 2024.

The attention block's vector atb_ij (attention, residual and, post-LN, the norm around them) passes through the
feed-forward layer by integrated gradients with a zero baseline, whose closed form is the ratio φ(z)/z:

    ff_ij = W_out·diag(φ(z_i)/z_i)·W_in·atb_ij

    post-LN   atb → atb_ff = ff → atb_ff_res = ff + atb → atb_ff_res_ln = LN2(ff + atb)
    pre-LN    atb → atb_ln = LN2(atb) → atb_ln_ff = ff(atb_ln) → atb_ln_ff_res = ff + atb
              → atb_ln_ff_res_nextln = the next block's norm before attention, or the final norm (ours: no biases)

Norms enter by their linear parts. For gated MLPs `ig` is ours, see `tensorlens_tl.models.activations`. In a decoder
block of an encoder–decoder (ours) atb_ij is a vector of either attention in the sum that the feed-forward layer reads.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra import Norm
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.layerwise import LocalLayer, Maps, mean_of_layers, of_layers, side_by_side, through
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.requirements import Requirement, sequential_mlp
from tensorlens_tl.results import Attribution

PostScope = Literal["atb", "atb_ff", "atb_ff_res", "atb_ff_res_ln"]
PreScope = Literal["atb", "atb_ln", "atb_ln_ff", "atb_ln_ff_res", "atb_ln_ff_res_nextln"]
if TYPE_CHECKING:
    Scope = PostScope | PreScope
else:
    Scope = Any  # `ff_scope` says which of them a model has
FF_SCOPES: dict[str, tuple[Scope, ...]] = {"post": get_args(PostScope), "pre": get_args(PreScope)}


@Requirement
def next_norm_reads_block(frozen: FrozenPass, method: str) -> None:
    """In a pre-LN model, each block's norm reads the previous block's output: no block after the first is whitened."""
    if _kind(frozen) == "post":
        return
    for number in range(1, frozen.n_layers):
        if frozen.maps.whitening(number) is not None:
            raise UnsupportedModelError(
                f"{method}: blocks.{number} of this {frozen.view.description} is whitened, so its norm reads other "
                "vectors than the block before it writes; use scope='atb_ln_ff_res', the last one before it."
            )


def _needs(options: Mapping[str, Any]) -> tuple[str | Requirement, ...]:
    needs = (sequential_mlp, "head_vectors")
    if options["scope"] in (None, "atb_ln_ff_res_nextln"):
        return (*needs, next_norm_reads_block)
    return needs


def _kind(frozen: FrozenPass) -> Literal["post", "pre"]:
    return "pre" if frozen.layouts[0].attn.outer is None else "post"


def ff_scope(frozen: FrozenPass, scope: str | None) -> Scope:
    """Return the scope, or the widest one for None, checked against the model's layout."""
    frozen.check_fresh()
    sequential_mlp.check(frozen, "ff-ig")
    kind = _kind(frozen)
    for known in FF_SCOPES[kind]:
        if scope == known:
            return known
    if scope is None:
        return FF_SCOPES[kind][-1]
    raise InvalidInputError(
        f"scope={scope!r}: this is a {kind}-LN model; use one of {', '.join(map(repr, FF_SCOPES[kind]))}."
    )


@register_layer_map("ff-ig", holds_residual=True, needs=_needs({"scope": None}), both_stacks=True)
def ff_map(
    frozen: FrozenPass, scope: Scope | None = None, *, without_low_gain: int | float = 0.0, as_printed: bool = False
) -> Maps:
    """Return the block's map up to `scope`, its feed-forward part by integrated gradients (Kobayashi et al. 2024).

    `without_low_gain` ignores that share of the channels, those with the smallest gain in the next norm.
    """
    checked_scope = ff_scope(frozen, scope)

    def part(layer: LocalLayer) -> Tensor:
        scores = layer.x.new_empty(*layer.pairs.shape)
        channels = _channels(layer, without_low_gain)
        for keys, vectors in ff_vectors(layer, checked_scope, as_printed):
            scores[..., keys] = vectors[..., channels].norm(dim=-1).permute(1, 2, 0)
        return scores * layer.pairs

    return side_by_side(frozen, part, with_biases=not as_printed)


def _channels(layer: LocalLayer, without_low_gain: int | float) -> Tensor | slice:
    """Return the channels without the share of smallest gain, at least one; all for a share of 0 or without gains."""
    if without_low_gain == 0:
        return slice(None)
    gain = gain_after(layer)
    if gain is None:
        return slice(None)
    return gain.argsort()[max(1, int(without_low_gain * len(gain))) :]


def ff_vectors(
    layer: LocalLayer, scope: Scope, as_printed: bool = False
) -> Iterator[tuple[slice, Float[Tensor, "rows batch query d_model"]]]:
    """Yield the vectors whose norms `ff_map` takes, a few source tokens at a time."""
    norms = layer.mlp
    mlp = layer.frozen.maps.mlp(layer.layer, "frozen-integrated-gradients")
    weights = layer.frozen.view.blocks[layer.layer].mlp
    assert mlp is not None  # of a model that meets `sequential_mlp`
    assert weights is not None
    width = weights.hidden if "ff" in scope else 0
    for keys, atb in layer.vectors(layer.outer, residual=not layer.is_cross, width=width):
        vectors = atb
        bypass = atb
        if as_printed:  # only what each source token gives to itself
            bypass = torch.zeros_like(atb)
            if not layer.is_cross:
                rows = torch.arange(len(atb), device=atb.device)
                bypass[rows, :, rows + keys.start] = atb[rows, :, rows + keys.start]
        if scope != "atb":
            vectors = through(layer.norms(norms.before), vectors)
        if "ff" in scope:
            vectors = through(layer.norms(norms.after), mlp.push(vectors))
        if "res" in scope:
            vectors = vectors + bypass
        if scope == "atb_ff_res_ln":
            vectors = through(layer.norms(norms.outer), vectors)
        if scope == "atb_ln_ff_res_nextln":
            vectors = through(_next_norm(layer.frozen, layer.layer), vectors)
        yield keys, vectors


def gain_after(layer: LocalLayer) -> Float[Tensor, "d_model"] | None:
    """Return the gain of the norm that reads the sum after the feed-forward layer, or None without one."""
    norms = layer.norms(layer.mlp.outer) or _next_norm(layer.frozen, layer.layer)
    return norms[0].gain if norms else None


def _next_norm(frozen: FrozenPass, number: int) -> tuple[Norm, ...]:
    """Return the norm that reads a block's output: the next block's, or the last one of the stack.

    A HookedEncoderDecoder's encoder ends in a norm without gain, as the gain is folded into cross-attention's weights.
    """
    if number + 1 == frozen.view.encoder_layers:
        norm = frozen.maps.encoder_norm()
        return () if norm is None else (norm,)
    if number + 1 < frozen.n_layers:
        next_norm_reads_block.check(frozen, "ff-ig")
        following = LocalLayer(frozen, number + 1)
        return following.norms(following.attn.before)
    final = frozen.maps.final_norm()
    return () if final is None else (final,)


@register_method("ff-ig", needs=_needs)
@checked_arguments
def ff_ig(
    frozen: FrozenPass, *, scope: Scope | None = None, as_printed: bool = False, query: Query = "all"
) -> Attribution:
    """Average the norms of token-to-token vectors through the feed-forward layer over layers (Kobayashi 2024).

    Args:
        scope: how far through the block; None means to its end. Post-LN blocks have `"atb"`, `"atb_ff"`,
            `"atb_ff_res"` and `"atb_ff_res_ln"`, others `"atb"`, `"atb_ln"`, `"atb_ln_ff"`, `"atb_ln_ff_res"` and
            `"atb_ln_ff_res_nextln"`.
        as_printed: follow the paper's formulas to the letter: b_V is bias, not part of a source token's vector (Eqs. 7,
            20, 21; so is what a norm before attention adds), and the residual connection after the feed-forward layer
            passes on a token's contribution to itself, but not those of other tokens (Eq. 53).

    Raises:
        InvalidInputError: also a scope that this kind of block does not have.
        UnsupportedModelError: parallel or attention-only blocks, where no MLP reads the attention output; a layer
            without softmax attention, or with a gate or a norm inside it; for the widest scope, a whitened pre-LN
            model.

    >>> tlens.methods.ff_ig(frozen).options["scope"]
    'atb_ln_ff_res_nextln'
    """
    scope = ff_scope(frozen, scope)
    layers = ff_map(frozen, scope, as_printed=as_printed)
    options = {"scope": scope, "as_printed": as_printed}
    return of_layers(frozen, mean_of_layers(frozen, layers), layers, method="ff-ig", query=query, **options)
