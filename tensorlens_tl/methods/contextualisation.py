"""What feed-forward layers do to contextualisation: the analyses of Kobayashi et al. 2024, over the maps of `ff-ig`."""

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import Chain, stages_of
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.layerwise import locals_of
from tensorlens_tl.methods.ff_ig import ff_map, ff_scope, gain_after
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.results.entry import Entry, check_batch


def context_change(
    frozen: FrozenPass, before: str, after: str, *, without_low_gain: float = 0.0, as_printed: bool = False
) -> Float[Tensor, "layer batch"]:
    """1 − ρ (Spearman) between two scopes' maps over each prompt's pairs: how much the steps between reorder them.

    Args:
        frozen: the pass.
        before, after: scopes of the `ff-ig` method, such as ``"atb"`` and ``"atb_ff"``.
        without_low_gain: leave this share of the channels out of both, those with the smallest gain in the norm that
            reads the feed-forward layer's output (the paper leaves out 0.01).
        as_printed: see the `ff-ig` method.

    Raises:
        InvalidInputError: a scope this model does not have, or a share outside [0, 1).
        UnsupportedModelError: see the `ff-ig` method.
    """
    if not 0 <= without_low_gain < 1:
        raise InvalidInputError(
            f"without_low_gain={without_low_gain}; use a share of the channels, at least 0, below 1."
        )
    options = {"without_low_gain": without_low_gain, "as_printed": as_printed}
    first, second = (ff_map(frozen, ff_scope(frozen, scope), **options) for scope in (before, after))
    live = _live(frozen)
    changes = [
        [1 - _correlation(_ranks(a[row][live[row]]), _ranks(b[row][live[row]])) for row in range(len(live))]
        for a, b in zip(first, second, strict=True)
    ]
    return torch.stack([torch.stack(rows) for rows in changes])


def ff_amp(
    frozen: FrozenPass, before: str, after: str, *, as_printed: bool = False
) -> Float[Tensor, "layer batch query key"]:
    """Two scopes' maps, each divided by its column sums, subtracted: which pairs the steps between amplify.

    Args:
        frozen: the pass.
        before, after: scopes of the `ff-ig` method.
        as_printed: see the `ff-ig` method.
    """
    first, second = (ff_map(frozen, ff_scope(frozen, scope), as_printed=as_printed) for scope in (before, after))
    return _by_column(second) - _by_column(first)


def top_pairs(
    frozen: FrozenPass, amp: Float[Tensor, "layer batch query key"], k: int = 10, *, batch: int = 0
) -> list[Entry]:
    """The k most amplified pairs of one prompt, largest first: entries named by layer, query token and source token.

    Raises:
        InvalidInputError: k below 1, or no such prompt.
    """
    check_batch(batch, frozen.str_tokens)
    if k < 1:
        raise InvalidInputError(f"top_pairs: k={k}; ask for at least one pair.")
    tokens = frozen.str_tokens[batch]
    live = _live(frozen)[batch].expand(amp[:, batch].shape)
    places = live.nonzero().tolist()
    scores = amp[:, batch][live]
    order = scores.argsort(descending=True)[:k].tolist()
    return [
        Entry(f"layer {layer}: {tokens[query]!r} from {tokens[key]!r}", float(scores[i]), (query, key))
        for i, (layer, query, key) in ((i, places[i]) for i in order)
    ]


def ff_against_bypass(frozen: FrozenPass) -> Float[Tensor, "layer batch pos"]:
    """‖FF output‖ / ‖bypass‖: the feed-forward layer's own output beside the stream it is added to, biases included."""
    sizes = [(output.norm(dim=-1), bypass.norm(dim=-1)) for bypass, output in _ff_parts(frozen)]
    return torch.stack([output / bypass for output, bypass in sizes]) * frozen.mask


def gain_against_ff(frozen: FrozenPass) -> Float[Tensor, "layer"]:
    """Correlation over channels of the gain γ of the norm that follows with the mean |FF output|.

    Negative where the norm damps the channels in which the feed-forward layer writes outliers; NaN where no norm with a
    gain follows.
    """
    correlations = []
    for local, (_, output) in zip(locals_of(frozen), _ff_parts(frozen), strict=True):
        gain = gain_after(local)
        size = output[frozen.mask].abs().mean(0)
        correlations.append(size.new_tensor(float("nan")) if gain is None else _correlation(gain, size))
    return torch.stack(correlations)


def _ff_parts(frozen: FrozenPass) -> list[tuple[Tensor, Tensor]]:
    """Per layer: the stream that bypasses the feed-forward layer, and what that layer adds to it."""
    ff_scope(frozen, None)  # refuses blocks whose MLP does not read attention
    parts = []
    for local in locals_of(frozen):
        mlp = frozen.maps.mlp(local.layer)
        bypass = local.attended()
        stages = (*local.norms(local.mlp.before), *(stages_of(mlp) if mlp else ()), *local.norms(local.mlp.after))
        parts.append((bypass, Chain(stages)(bypass)))
    return parts


def _live(frozen: FrozenPass) -> Tensor:
    """`[batch, query, key]`: pairs of real tokens in which the source can reach the query."""
    pairs = frozen.mask[:, :, None] & frozen.mask[:, None, :]
    return pairs.tril() if frozen.causal else pairs


def _by_column(maps: Tensor) -> Tensor:
    total = maps.sum(-2, keepdim=True)
    return maps / torch.where(total == 0, 1, total)


def _ranks(values: Tensor) -> Tensor:
    import pandas as pd

    return torch.tensor(pd.Series(upcast(values).cpu().numpy()).rank().to_numpy())


def _correlation(a: Tensor, b: Tensor) -> Tensor:
    return torch.corrcoef(torch.stack([a.double(), b.double()]))[0, 1]
