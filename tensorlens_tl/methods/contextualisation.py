"""Analyses of how feed-forward layers change contextualisation (Kobayashi et al. 2024), over the maps of `ff-ig`."""

from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.layerwise import locals_of
from tensorlens_tl.methods.ff_ig import Scope, ff_map, ff_scope, gain_after
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.results import Entry, check_batch

SHARE = "a share of the channels, at least 0, below 1"


@checked_arguments
def context_change(
    frozen: FrozenPass,
    before: Scope,
    after: Scope,
    *,
    without_low_gain: Annotated[int | float, SHARE] = 0.0,
    as_printed: bool = False,
) -> Float[Tensor, "layer batch"]:
    """Compute 1 − ρ (Spearman) between two scopes' maps: how much the steps in between reorder each prompt's pairs.

    Args:
        before, after: scopes of the `ff-ig` method, such as ``"atb"`` and ``"atb_ff"``.
        without_low_gain: leave this share of the channels out of both, those with the smallest gain in the norm that
            reads the feed-forward layer's output (the paper leaves out 0.01).
        as_printed: see the `ff-ig` method.

    Returns:
        A number between 0 and 2 for each layer and prompt; 0 if the order of the pairs is the same.

    Raises:
        InvalidInputError: a scope this model does not have, or a share outside [0, 1).
        UnsupportedModelError: see the `ff-ig` method.

    >>> tlens.contextualisation.context_change(frozen, "atb", "atb_ln_ff").shape
    torch.Size([4, 1])
    """
    frozen.view.refuse_encoder_decoder("context_change, which ranks the pairs of one stack")
    if not 0 <= without_low_gain < 1:
        raise InvalidInputError(f"without_low_gain={without_low_gain}; use {SHARE}.")
    options = {"without_low_gain": without_low_gain, "as_printed": as_printed}
    first, second = (ff_map(frozen, ff_scope(frozen, scope), **options) for scope in (before, after))
    live = _live(frozen)
    changes = [
        [1 - _correlation(_ranks(a[row][live[row]]), _ranks(b[row][live[row]])) for row in range(len(live))]
        for a, b in zip(first, second, strict=True)
    ]
    return torch.stack([torch.stack(rows) for rows in changes])


def ff_amp(
    frozen: FrozenPass, before: Scope, after: Scope, *, as_printed: bool = False
) -> Float[Tensor, "layer batch query key"]:
    """Divide two scopes' maps by their column sums and subtract them: which pairs the steps in between amplify.

    Columns of the result sum to 0. Arguments and errors are those of `context_change`.

    >>> amplified = tlens.contextualisation.ff_amp(frozen, "atb", "atb_ln_ff")
    >>> bool(amplified.sum(-2).abs().max() < 1e-5)
    True
    """
    frozen.view.refuse_encoder_decoder("ff_amp, which divides by the columns of one stack")
    first, second = (ff_map(frozen, ff_scope(frozen, scope), as_printed=as_printed) for scope in (before, after))
    return _by_column(second) - _by_column(first)


def top_pairs(
    frozen: FrozenPass, amp: Float[Tensor, "layer batch query key"], k: int = 10, *, batch: int = 0
) -> list[Entry]:
    """Return the k most amplified pairs of one prompt, largest first, named by layer, query token and source token.

    `amp` is the result of `ff_amp`. An entry's position is the pair of query and key.

    Raises:
        InvalidInputError: k below 1, or no such prompt.

    >>> amplified = tlens.contextualisation.ff_amp(frozen, "atb", "atb_ln_ff")
    >>> first, second = tlens.contextualisation.top_pairs(frozen, amplified, 2)
    >>> first.score >= second.score
    True
    """
    check_batch(batch, frozen.str_tokens)
    if k < 1:
        raise InvalidInputError(f"top_pairs: k={k}; use at least one pair.")
    tokens = frozen.str_tokens[batch]
    live = _live(frozen)[batch].expand(amp[:, batch].shape)
    largest = amp[:, batch][live].sort(descending=True)
    pairs = live.nonzero()[largest.indices[:k]]
    return [
        Entry(f"layer {layer}: {tokens[query]!r} from {tokens[key]!r}", score, (query, key))
        for (layer, query, key), score in zip(pairs.tolist(), largest.values[:k].tolist(), strict=True)
    ]


def ff_against_bypass(frozen: FrozenPass) -> Float[Tensor, "layer batch pos"]:
    """Compute ‖FF output‖ / ‖bypass‖: the feed-forward layer's output relative to the stream, biases included.

    >>> tlens.contextualisation.ff_against_bypass(frozen).shape
    torch.Size([4, 1, 7])
    """
    ratios = [output.norm(dim=-1) / bypass.norm(dim=-1) for bypass, output in _ff_parts(frozen)]
    return torch.stack(ratios) * frozen.mask


def gain_against_ff(frozen: FrozenPass) -> Float[Tensor, "layer"]:
    """Correlate the next norm's gain γ with the mean |FF output| over channels.

    Negative where the norm damps the channels in which the feed-forward layer writes outliers; NaN without such a gain.

    >>> correlations = tlens.contextualisation.gain_against_ff(frozen)
    >>> correlations.shape, bool(correlations.abs().max() <= 1)
    (torch.Size([4]), True)
    """
    correlations = []
    for local, (_, output) in zip(locals_of(frozen), _ff_parts(frozen), strict=True):
        gain = gain_after(local)
        size = output[frozen.mask].abs().mean(0)
        if gain is None:
            correlations.append(torch.tensor(float("nan"), device=size.device))
        else:
            correlations.append(_correlation(gain, size))
    return torch.stack(correlations)


def _ff_parts(frozen: FrozenPass) -> list[tuple[Tensor, Tensor]]:
    """Return, per layer, the stream that bypasses the feed-forward layer, and what that layer adds to it."""
    ff_scope(frozen, None)  # rejects blocks whose MLP does not read attention
    parts = []
    for local in locals_of(frozen):
        mlp = local.mlp_write
        bypass = local.attended()
        assert mlp is not None  # of a model that meets `sequential_mlp`
        parts.append((bypass, mlp(bypass)))
    return parts


def _live(frozen: FrozenPass) -> Tensor:
    """Return pairs `[batch, query, key]` of real tokens in which the source can reach the query."""
    pairs = frozen.mask[:, :, None] & frozen.mask[:, None, :]
    if frozen.causal:
        return pairs.tril()
    return pairs


def _by_column(maps: Tensor) -> Tensor:
    total = maps.sum(-2, keepdim=True)
    return maps / torch.where(total == 0, 1, total)


def _ranks(values: Tensor) -> Tensor:
    import pandas as pd

    return torch.tensor(pd.Series(upcast(values).cpu().numpy()).rank().to_numpy())


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1]
