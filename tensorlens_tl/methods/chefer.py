"""Chefer et al. 2021: relevance through attention patterns, weighted by their gradients.

    Ā = E_h[(∇A^h ⊙ A^h)⁺]   of each layer, ∇A the gradient of the target's logit by the live pattern
    R = (I + Ā_L) ⋯ (I + Ā_1);   a query's scores are its row of R

Every query has its own gradients; one run of the prompts serves all of them, as rows of a batched backward pass.
The gradient by a pattern is taken where the heads' mixed values z = A·v leave attention, as ``∂logit/∂z_i · v_j``: on
some models `attn.hook_pattern` only observes. Nothing is frozen: gradients are those of the live model.

Encoder–decoders (Chefer, Gur & Wolf 2021, "Generic attention-model explainability for interpreting bi-modal and
encoder-decoder transformers"), i the encoder's tokens and q the decoder's:

    self-attention    R^ii ← R^ii + Ā·R^ii,   R^qq ← R^qq + Ā·R^qq,   R^qi ← R^qi + Ā·R^qi
    cross-attention   R^qi ← R^qi + (R̄^qq)ᵀ·Ā·R̄^ii,   R̄ = I + rows of (R − I) divided by their sums

in the order of the blocks; a query's scores are its row of [R^qi, R^qq].
"""

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, in_this_thread
from tensorlens_tl.layerwise import LocalLayer, attentions_of, normalize_rows
from tensorlens_tl.methods.live_logits import LiveLogits
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.models.offload import saved_by_name
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.registry import register_method
from tensorlens_tl.results import Attribution


@register_method("chefer", needs=("predictions", "head_vectors", "unwhitened"))
@checked_arguments
def chefer(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    query: Query = -1,
    memory: Memory = None,
) -> Attribution:
    """Accumulate R ← R + E_h[(∇A ⊙ A)⁺]·R over self-attention layers, ∇A of the target's logit (Chefer 2021).

    Scores are never negative, and a query has at least 1 from itself. An encoder–decoder follows the rules of the
    second paper, with cross-attention. The live model is run again.

    Raises:
        UnsupportedModelError: the model predicts no tokens, has a layer without softmax attention or with a gate or a
            norm inside it, or is whitened.

    >>> bool((tlens.methods.chefer(frozen, target=" value").scores >= 0).all())
    True
    """
    sites = [_Site(layer) for block in attentions_of(frozen) for layer in block]
    live_logits = LiveLogits(frozen, target, minus, query, "chefer")
    in_bytes(memory)
    x = frozen.resid_pre(0)
    patterns = (len(sites) + 2 * (frozen.sides is not None)) * max(site.numbers for site in sites)
    # autograd keeps every layer's activations
    per_query = (16 * frozen.n_layers * x.numel() + 6 * patterns) * x.element_size()
    hooks = [hook for site in sites for hook in site.hooks()]
    # autograd cannot store tensors that were created in a caller's inference mode
    with saved_by_name(frozen.model), torch.inference_mode(False), torch.enable_grad():
        _, numbers = live_logits.graph(x, hooks)
        outputs = [site.output for site in sites if site.output is not None]  # each has been seen, as in the pass
        relevances = [
            _relevance(frozen, sites, gradients, live_logits.positions[:, rows])
            for rows, gradients in live_logits.gradients(numbers, outputs, per_query, memory)
        ]
    scores = torch.cat(relevances, dim=1) * (live_logits.real[:, :, None] & frozen.mask[:, None])
    return live_logits.attribution(scores.to(x))


def _relevance(
    frozen: FrozenPass,
    sites: list["_Site"],
    gradients: list[Float[Tensor, "query batch _side *width"] | None],
    positions: Int[Tensor, "batch query"],
) -> Float[Tensor, "batch query key"]:
    """Return the rows of R of some queries from their own gradients, with cross-attention in an encoder–decoder."""
    x = upcast(frozen.resid_pre(0))
    by_site = list(zip(sites, gradients, strict=True))
    if frozen.sides is None:
        relevance = torch.nn.functional.one_hot(positions, x.shape[1]).to(x)
        for site, gradient in reversed(by_site):
            relevance = relevance + torch.einsum("bcq,bcqk->bck", relevance, site.weighted(gradient))
        return relevance
    relevance = torch.eye(x.shape[1], dtype=x.dtype, device=x.device).repeat(*positions.shape, 1, 1)
    for site, gradient in by_site:
        queries = site.layer.queries
        keys = site.layer.keys
        given = site.weighted(gradient)
        if site.layer.is_cross:
            by_queries, by_keys = (_normalized(relevance[..., side, side]) for side in (queries, keys))
            relevance[..., queries, keys] += by_queries.mT @ given @ by_keys
        else:
            relevance[..., queries, :] += given @ relevance[..., queries, :]
    return torch.take_along_dim(relevance, positions[..., None, None], dim=2)[:, :, 0]


def _normalized(relevance: Float[Tensor, "batch query pos pos"]) -> Float[Tensor, "batch query pos pos"]:
    """Return R̄ of one side's own tokens; a row with nothing beyond its 1 is unchanged."""
    identity = torch.eye(relevance.shape[-1], dtype=relevance.dtype, device=relevance.device)
    return identity + normalize_rows(relevance - identity)


class _Site:
    """One attention, at whose output the logits are differentiated.

    `output` is the last run's: the heads' mixed values, or the output of attention that is frozen as a whole.
    """

    def __init__(self, layer: LocalLayer) -> None:
        frozen = layer.frozen
        block = frozen.view.blocks[layer.layer]
        points = frozen.points.blocks[layer.layer]
        heads = points.cross if layer.is_cross else points.heads
        assert heads is not None
        self.frozen = frozen
        self.layer = layer
        length = frozen.tokens.shape[1]
        self.numbers = len(frozen.tokens) * layer.weights.heads * length * length  # of its pattern
        self.values: Tensor | None = None
        self.output: Tensor | None = None
        self.name = heads.z
        self.values_at = heads.value
        self.out = None
        if points.attention is not None:
            values, _, out = frozen.maps.attention(layer.layer).stages
            self.name = points.attention.out
            self.values_at = None
            self.values = values(frozen.activation(points.attention.into))
            self.out = out
            self.factor = block.branch_factor

    def hooks(self) -> list[FwdHook]:
        """Return hooks that record the output, and the values of source tokens."""

        def see(output: Tensor, *, hook: Any) -> Tensor:
            self.output = output
            return output  # a Bridge shows a reshaped copy, which the model only uses if the hook returns it

        def record(values: Tensor, *, hook: Any) -> None:
            self.values = values.detach()

        hooks: list[FwdHook] = [(self.name, in_this_thread(see))]
        if self.values_at is not None:
            hooks.insert(0, (self.values_at, in_this_thread(record)))
        return hooks

    def weighted(
        self, by_output: Float[Tensor, "copy batch pos *width"] | None
    ) -> Float[Tensor, "batch copy query key"]:
        """Return E_h[(∇A ⊙ A)⁺] from the gradient by the output, at pairs of real tokens."""
        assert self.values is not None
        if by_output is None:
            raise UnsupportedModelError(
                f"chefer: the logits of this {self.frozen.view.description} have no gradient at {self.name}: its "
                "attention does not pass through that hook point."
            )
        gradient = by_output.transpose(0, 1).to(self.frozen.mask.device)
        if self.out is not None:  # the weights include the factor by which the block multiplies its branches
            gradient = self.out.pull(gradient.transpose(0, 1)).transpose(0, 1) / self.factor
        number = self.layer.layer
        if self.layer.is_cross:
            pattern = shown_pattern = self.frozen.cross_pattern(number)
        else:
            pattern = self.frozen.maps.pattern(number)
            shown_pattern = self.frozen.pattern(number)
        A = pattern.to(upcast(gradient))
        batch, heads = A.shape[:2]
        shown = shown_pattern.shape[1]  # fewer where heads belong to experts: only those of a token
        v = self.values.to(A).reshape(-1, A.shape[-1], self.values.shape[2:].numel())[:batch]
        by_z = rearrange(gradient.to(A).flatten(3), "b c q (h d) -> b c h q d", h=heads)
        kv_heads = v.shape[-1] // by_z.shape[-1]
        v = rearrange(v, "b k (kv d) -> b kv k d", kv=kv_heads).repeat_interleave(heads // kv_heads, dim=1)
        return (A[:, None] * (by_z @ v[:, None].mT)).clamp_min(0).sum(2) / shown * self.layer.pairs[:, None]
