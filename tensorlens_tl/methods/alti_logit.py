"""ALTI-Logit: Ferrando, Gállego, Tsiamas & Costa-jussà 2023.

With g the target's direction, pulled back along the residual stream to where layer l's attention writes (through the
final norm; in a post-LN model also through the norms on the way), the contribution of source token k in layer l to the
logit at position i is passed on to the input tokens j by ALTI's rollout of the earlier layers:

    Δ^l_ik = Σ_h A^h_ik ⟨u_k^h, g_i⟩,   r_j = Σ_l Σ_k Δ^l_ik · R^{l−1}_kj,   R^l = C^l R^{l−1},   R^0 = 1

Rows of R sum to 1, so the scores of each layer sum to what its attention adds to the logit. As in the original, the
contributions of embeddings, MLPs and biases (``logit_attribution`` has them by component) belong to no token. With
``updates="all"`` (ours) the embedding's contribution belongs to the query's token, and an MLP's continues from where
the MLP reads: by R^l after attention, in a parallel block by R^{l−1}. A position that no vector brings nearer, with an
empty row in ALTI, is passed on to itself (ours).

In an encoder–decoder, cross-attention's contribution continues through the encoder by ALTI+'s rollout (ours): k is a
token of the encoder, and R is taken before cross-attention, where the encoder's rows are complete. Attention of the
encoder adds nothing to the logit directly.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.stream import Stream, token_pairs
from tensorlens_tl.layerwise import Maps, normalize_rows
from tensorlens_tl.methods.alti import Distance, alti_by_attention
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.target import explained_tokens, logit_label, unembedding_rows
from tensorlens_tl.registry import register_method
from tensorlens_tl.results import Attribution


@register_method("alti-logit", needs=("predictions", "head_vectors", "unwhitened"))
@checked_arguments
def alti_logit(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    updates: Literal["attention", "all"] = "attention",
    distance: Distance = "l1",
    query: Query = -1,
) -> Attribution:
    """Score what each layer's attention adds to a logit, by source token, through ALTI's rollout (Ferrando 2023).

    Scores and bias sum to the logit. `layers` holds each layer's part of the scores.

    Args:
        updates: ``"attention"`` attributes what attention adds to tokens, as in the paper; the rest is bias. ``"all"``
            also attributes what the embeddings and MLPs add; then only what biases add is bias.
        distance: ALTI's distance, ``"l1"`` or ``"l2"``.

    Raises:
        UnsupportedModelError: the model predicts no tokens, is whitened, or `alti` is not defined for it.

    >>> result = tlens.methods.alti_logit(frozen, target=" value")
    >>> torch.allclose(result.scores.sum(-1) + result.bias, result.total, rtol=1e-3)
    True
    """
    positions = query_positions(frozen.prompt, query)
    target, minus = explained_tokens(frozen, target, minus, positions)
    vectors, constant = unembedding_rows(frozen, positions, target, minus)
    real = torch.take_along_dim(frozen.mask, positions, dim=1)
    vectors = upcast(vectors) * real[..., None]
    constant = upcast(constant) * real
    rollouts = _rollouts(frozen, torch.cat(alti_by_attention(frozen, distance)))
    stream_updates = _Updates(Stream.of(frozen), vectors, positions)
    layers, rest = stream_updates.parts(rollouts, everything=updates == "all")
    scores = sum(layers, start=torch.zeros_like(layers[0]))
    if updates == "all":
        scores = scores + stream_updates.at_queries(stream_updates.embedding[..., None] * rollouts[0])
    else:
        rest = rest + stream_updates.embedding
    states = upcast(torch.take_along_dim(frozen.unembedded(), positions[..., None], dim=1))
    return Attribution.of(
        frozen,
        scores,
        method="alti-logit",
        query=query,
        layers=torch.stack(layers),
        bias=stream_updates.at_queries(rest[..., None])[..., 0] + constant,
        total=(states * vectors).sum(-1) + constant,
        additive=True,
        target=logit_label(frozen.view, target, minus),
        options={"target": target, "minus": minus, "updates": updates, "distance": distance, "query": query},
    )


def _rollouts(frozen: FrozenPass, maps: Maps) -> Float[Tensor, "depth batch pos key"]:
    """Return R before the first attention, and after each; a decoder block has two."""
    maps = normalize_rows(upcast(maps))  # again: in half precision they do not sum to 1 exactly
    identity = torch.diag_embed(frozen.mask.to(maps.dtype))
    rollouts = [identity]
    for rows in torch.where((maps.sum(-1) == 0)[..., None], identity, maps):
        rollouts.append(rows @ rollouts[-1])
    return torch.stack(rollouts)


class _Updates:
    """What every part of the stream adds to the logits of some queries, at the positions where it is added.

    One row has the vectors of several queries at different positions, as nothing on the direct path mixes positions;
    with a head that reads several positions, a row has a single query.
    """

    def __init__(
        self, stream: Stream, vectors: Float[Tensor, "batch query d"], positions: Int[Tensor, "batch query"]
    ) -> None:
        self.stream = stream
        self.positions = positions
        self.mixes = any(step.outer.mixes for step in stream.steps)
        same = positions[:, :, None] == positions[:, None]
        queries = torch.arange(positions.shape[1], device=positions.device)
        self.row = queries.expand(positions.shape) if self.mixes else same.tril(-1).sum(-1)
        self.prompt = torch.arange(len(positions), device=positions.device)[:, None].expand(positions.shape)
        end = stream.x[-1]
        seed = end.new_zeros(int(self.row.max()) + 1, *end.shape[:2], vectors.shape[-1])
        seed[self.row, self.prompt, positions] = vectors.to(seed)
        self.pulled = stream.pull(seed, sublayers=False)

    @property
    def embedding(self) -> Float[Tensor, "row batch pos"]:
        """The contribution of the stream's beginning."""
        return _dot(self.pulled.stream[0], self.stream.x[0])

    def parts(
        self, rollouts: Float[Tensor, "depth batch pos key"], *, everything: bool
    ) -> tuple[list[Float[Tensor, "batch query key"]], Float[Tensor, "row batch pos"]]:
        """Return each layer's part of the scores, and what biases (and MLPs that are not among the scores) add.

        `rollouts` are ALTI's before the first attention and after each; `everything` counts MLPs among the scores.
        """
        stream = self.stream
        pulled = self.pulled
        biases = [_dot(g, bias) for _, _, bias, g in pulled.of_biases(stream.steps)]
        rest = sum(biases, start=torch.zeros_like(self.embedding))
        zero = rollouts.new_zeros(*self.positions.shape, rollouts.shape[-1])
        scores = [zero for _ in stream.layers]
        depth = 0
        for number, step in enumerate(stream.steps):
            reach = rollouts[depth]  # for the stream that the step reads
            for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
                cotangent = sublayer.write.pull(pulled.sums[number])
                if sublayer.is_attention:
                    pairs = upcast(token_pairs(sublayer, stream.x[number], cotangent).sum(-3))
                    scores[sublayer.layer] = scores[sublayer.layer] + self.at_queries(pairs @ reach)
                elif everything:
                    part = self.at_queries(_dot(cotangent, hidden)[..., None] * reach)
                    scores[sublayer.layer] = scores[sublayer.layer] + part
                else:
                    rest = rest + _dot(cotangent, hidden)
            depth += any(sublayer.is_attention for sublayer in step.sublayers)
        return scores, rest

    def at_queries(self, values: Float[Tensor, "row batch pos last"]) -> Float[Tensor, "batch query last"]:
        """Select each query's values from values by row and position."""
        if self.mixes:
            return values.sum(2).transpose(0, 1)
        return values[self.row, self.prompt, self.positions]


def _dot(g: Float[Tensor, "row batch pos d"], x: Tensor) -> Float[Tensor, "row batch pos"]:
    return (upcast(g) * x).sum(-1)
