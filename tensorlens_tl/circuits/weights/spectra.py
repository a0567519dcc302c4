"""Heads' circuits read as tokens: eigenvalues (Elhage et al. 2021), copying scores and singular directions."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.arguments import Offset, WeightsLike, Whole
from tensorlens_tl.circuits.weights.layer_weights import (
    LayerWeights,
    as_view,
    circuit_adapters,
    factored,
    pass_if_folding,
    refuse_whitened,
    stream_unembedding,
)
from tensorlens_tl.circuits.weights.ov_qk import ov, qk
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.operator import token_label

if TYPE_CHECKING:
    import pandas as pd


@checked_names
def ov_eigenvalues(
    model: WeightsLike, layer: Whole, head: Whole, *, fold_norms: bool = False
) -> Complex[Tensor, "d_head"]:
    """The non-zero eigenvalues of `full_ov`, largest first: positive ones copy tokens, negative ones suppress them.

    >>> tlens.circuits.ov_eigenvalues(model, 0, 0).shape  # d_head of them are not zero
    torch.Size([32])
    """
    unembedding, embedding = _square_vocabulary(as_view(model, "ov_eigenvalues"), fold_norms)
    circuit = ov(model, layer, head, fold_norms=fold_norms)
    values = torch.linalg.eigvals(upcast(circuit.B) @ unembedding @ embedding @ upcast(circuit.A))
    return values[values.abs().argsort(descending=True)]


@checked_names
def copying_scores(model: WeightsLike, *, fold_norms: bool = False) -> Float[Tensor, "layer head"]:
    """Σλ / Σ|λ| over the eigenvalues of every head's `full_ov`: 1 copies, −1 suppresses (Elhage et al. 2021).

    >>> bool((tlens.circuits.copying_scores(model).abs() <= 1).all())
    True
    """
    view = as_view(model, "copying_scores")
    unembedding, embedding = _square_vocabulary(view, fold_norms)
    through = unembedding @ embedding  # [d_model, d_model]: the vocabulary once, for all heads
    source = pass_if_folding(model, fold_norms)
    scores = []
    for layer in range(view.n_layers):
        weights = LayerWeights.of(source, layer, fold_norms)
        values = torch.linalg.eigvals(upcast(weights.O) @ through @ upcast(weights.V))
        scores.append(values.sum(-1).real / values.abs().sum(-1).clamp_min(torch.finfo(through.dtype).tiny))
    return torch.stack(scores)


@checked_names
def svd_tokens(
    model: WeightsLike,
    layer: Whole,
    head: Whole,
    *,
    circuit: str = "ov",
    k: Whole = 5,
    top: Whole = 8,
    offset: Offset = None,
    fold_norms: bool = True,
    gap: Any = 1e-3,
) -> "pd.DataFrame":
    """The leading singular directions of a head's OV or QK circuit, read as tokens.

    A singular vector is only determined where its singular value stands apart. Directions whose neighbours differ by
    less than `gap` (relative to the largest) are therefore read together: their tokens are those with the longest
    projection on the whole subspace, which no rotation inside it changes.

    Args:
        model: a model or a `FrozenPass`.
        layer, head: which one.
        circuit: ``"ov"`` (reads through W_E, writes through W_U) or ``"qk"`` (query and key through W_E).
        k: how many directions, at least; a group is never cut.
        top: tokens per list.
        offset: for ``"qk"`` of rotary models.
        fold_norms: as in `tensorlens_tl.circuits.weights.ov_qk`.
        gap: the smallest relative distance at which neighbours count as separate.

    Returns:
        One row per direction or group: `singular_values`, `dimensions`, and token lists `reads`, `writes` (for QK
        `query`, `key`) and their opposites, `…_negative` (None for a group, which has no sign).

    Raises:
        InvalidInputError: no such circuit, layer or head; k or top below 1.

    >>> tlens.circuits.svd_tokens(model, 0, 0, k=2, top=3).shape
    (2, 6)
    """
    import pandas as pd

    if circuit not in ("ov", "qk"):
        raise InvalidInputError(f"circuit={circuit!r}; use 'ov' or 'qk'.")
    k = whole_number("k", k, 1)
    top = whole_number("top", top, 1)
    view = as_view(model, "svd_tokens")
    refuse_whitened(view, "svd_tokens")
    if circuit == "ov":
        matrix = ov(model, layer, head, fold_norms=fold_norms)
        tables = {"reads": view.embedding, "writes": stream_unembedding(view, fold_norms).T}
    else:
        matrix = qk(model, layer, head, offset=offset, fold_norms=fold_norms)
        tables = {"query": view.embedding, "key": view.embedding}
    adapters = circuit_adapters(matrix)
    matrix = factored(upcast(matrix.A), upcast(matrix.B))
    rank = min(matrix.A.shape[-1], matrix.S.shape[-1])
    groups = _direction_groups(matrix.S[:rank], k, gap)
    projections = {
        name: upcast(table) @ vectors[:, : groups[-1].stop]
        for (name, table), vectors in zip(tables.items(), (matrix.U, matrix.V), strict=True)
    }
    rows = []
    for group in groups:
        members = slice(group.start, group.stop)
        row: dict[str, Any] = {"singular_values": tuple(matrix.S[members].tolist()), "dimensions": len(group)}
        rows.append(row | _token_lists(view, {name: on[:, members] for name, on in projections.items()}, top))
    frame = pd.DataFrame(rows)
    frame.attrs["adapters"] = sorted({*adapters, *view.end_adapters})
    return frame


def _direction_groups(values: Float[Tensor, "rank"], k: int, gap: float) -> list[range]:
    """The first k directions, those together whose singular values stand closer than the gap."""
    groups = []
    start = 0
    while start < min(k, len(values)):
        stop = start + 1
        while stop < len(values) and float(values[stop - 1] - values[stop]) < gap * float(values[0]):
            stop += 1
        groups.append(range(start, stop))
        start = stop
    return groups


def _token_lists(
    view: ModelView, projections: dict[str, Float[Tensor, "d_vocab direction"]], top: int
) -> dict[str, list[str] | None]:
    """The tokens with the longest projection on one direction, by sign, or on a subspace, which has none."""
    lists: dict[str, list[str] | None] = {}
    *_, writes = projections.values()
    alone = writes.shape[1] == 1
    # a direction's own sign is free: the strongest token that it writes is to be a positive one
    sign = -1.0 if alone and -float(writes.min()) > float(writes.max()) else 1.0
    for name, tokens in projections.items():
        strengths = sign * tokens[:, 0] if alone else tokens.norm(dim=-1)
        lists[name] = _tokens(view, strengths, top)
        lists[f"{name}_negative"] = _tokens(view, -strengths, top) if alone else None
    return lists


def _square_vocabulary(view: ModelView, fold_norms: bool) -> tuple[Tensor, Tensor]:
    """Unembedding and embedding of the same tokens, wide enough for eigenvalues."""
    refuse_whitened(view, "copying")
    W_U = stream_unembedding(view, fold_norms)
    W_E = view.embedding
    if W_U.shape[1] != W_E.shape[0]:
        raise UnsupportedModelError(
            f"{view.description} reads {W_E.shape[0]} tokens and predicts {W_U.shape[1]}: copying is not defined "
            "between two vocabularies. Use full_ov()."
        )
    return upcast(W_U), upcast(W_E)


def _tokens(view: ModelView, strengths: Float[Tensor, "d_vocab"], top: int) -> list[str]:
    return [token_label(view, token) for token in strengths.topk(min(top, len(strengths))).indices.tolist()]
