"""How are the ends of a model read: its embedding, what stands between the last block and the logits, and these?"""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra.numerics import plus
from tensorlens_tl.models.classes import class_scores
from tensorlens_tl.models.names import UNSCALED
from tensorlens_tl.models.parameters import (
    MLMHead,
    NormWeights,
    Refuse,
    detached,
    find_activation,
    floating,
    innermost,
    is_adapter,
    is_bridge_component,
    is_norm,
    is_plain,
    norm_weights,
    read_embedding,
    read_linear,
    tried_norm,
)

Unembedding = tuple[Float[Tensor, "d_model d_vocab"], Float[Tensor, "d_vocab"] | None]
"""W_U and b_U, which is None where there is no bias."""


def projection(model: Any, name: str) -> nn.Module | None:
    """What widens the stream after the embedding, ``project_in``, or narrows it before the unembedding (OPT-350m)."""
    module = innermost(getattr(model, "_modules", {}).get(name))
    return module if isinstance(module, nn.Module) else None


def embedding_weights(model: Any, refuse: Refuse) -> Float[Tensor, "d_vocab d_model"]:
    """W_E as stored, times the matrix that widens it where there is one.

    Raises:
        UnsupportedModelError: there is none that is read.
    """
    embedding = _stored_embedding(model, refuse)
    widening = projection(model, "project_in")
    if widening is None:
        return embedding
    return embedding @ read_linear(widening, "project_in", refuse).weight


def _stored_embedding(model: Any, refuse: Refuse) -> Float[Tensor, "d_vocab width"]:
    embed = getattr(model, "embed", None)
    if is_adapter(innermost(embed)):
        return read_embedding(innermost(embed), "embed", refuse)
    for owner in (embed, getattr(embed, "embed", None)):  # a HookedEncoder's is one module further in
        W_E = getattr(owner, "W_E", None)
        if isinstance(W_E, Tensor):
            return W_E.detach()
    raise refuse("no readable embedding W_E.")


def unembedding_weights(model: Any, refuse: Refuse) -> Unembedding | None:
    """W_U and b_U with what stands before and after them, or None for a model that predicts no tokens.

    Raises:
        UnsupportedModelError: weights that are not read.
    """
    unembed = getattr(model, "unembed", None)
    if unembed is None:
        return None
    W_U, b_U = _stored_unembedding(unembed, refuse)
    narrowing = projection(model, "project_out")
    if narrowing is not None:
        weight, bias = read_linear(narrowing, "project_out", refuse)
        if bias is not None:
            b_U = plus(bias @ W_U, b_U)
        W_U = weight @ W_U
    added = detached(getattr(getattr(model, "original_model", None), "final_logits_bias", None))
    if added is None:
        return W_U, b_U
    return W_U, plus(added[0], b_U)  # BART adds one besides


def _stored_unembedding(unembed: Any, refuse: Refuse) -> Unembedding:
    module = innermost(unembed)
    changed = is_bridge_component(unembed) and isinstance(module, nn.Module) and not is_plain(module)
    if changed or (getattr(unembed, "W_U", None) is None and hasattr(unembed, "weight")):  # an image classifier's
        return read_linear(module, "unembed", refuse)
    return floating(unembed.W_U, "unembed.W_U", refuse), detached(getattr(unembed, "b_U", None))


def end_norm(model: Any, name: str) -> NormWeights | None:
    """A norm after the last block of a stack, by where its hook points are; None where there is none."""
    norm = getattr(model, name.partition("@")[0], None)
    return norm_weights(norm, model.cfg) if is_norm(norm) else None


def read_mlm_head(model: Any, refuse: Refuse) -> MLMHead | None:
    """A masked language model's transform before the unembedding, or the pooler of a classifier, or None.

    Raises:
        UnsupportedModelError: an activation function or a part that is not read.
    """
    pooler = class_scores(model)
    if pooler is not None and pooler.act is not None:
        weight, bias = read_linear(pooler.dense, "the pooler's dense layer", refuse)
        return MLMHead(weight, bias, pooler.act, None, None)
    head = getattr(model, "mlm_head", None)
    if head is None:
        return _prediction_head(model, refuse)
    phi = find_activation(head, model.cfg)
    if phi is None:
        raise refuse(f"mlm_head has the unknown activation {model.cfg.act_fn!r}.")
    if is_bridge_component(head):
        norm = model.ln_final
        scale = "ln_final.hook_scale"
        weight, bias = read_linear(head, "mlm_head", refuse)
    else:
        weight = head.W
        bias = head.b
        norm = head.ln
        scale = "mlm_head.ln.hook_scale"
    return MLMHead(weight.detach(), detached(bias), phi, norm_weights(norm, model.cfg), scale)


def _prediction_head(model: Any, refuse: Refuse) -> MLMHead | None:
    """The same after a separate final norm (ModernBERT), or None."""
    head: Any = innermost(getattr(model, "prediction_head", None))
    if head is None:
        return None
    parts = [getattr(head, name, None) for name in ("dense", "act", "norm")]
    if not all(callable(part) for part in parts):
        raise refuse("prediction_head has no dense, act and norm that are read.")
    dense, phi, norm = (part for part in parts if part is not None)
    weight, bias = read_linear(dense, "prediction_head.dense", refuse)
    return MLMHead(weight, bias, phi, tried_norm(norm, model.cfg, width=weight.shape[1]), None)


def scales_output(config: Any) -> bool:
    """Whether an encoder–decoder unembeds its final norm's output times √(1/d_model) (T5 with tied embeddings).

    Args:
        config: of Hugging Face.
    """
    if not hasattr(config, "relative_attention_num_buckets"):
        return False
    tied = getattr(config, "tie_word_embeddings", False) and config.model_type not in UNSCALED
    return bool(getattr(config, "scale_decoder_outputs", tied))


def factor_of_logits(config: Any, scaled: bool) -> float:
    """What a model multiplies its logits by before any soft cap (Granite, Cohere, Falcon-H1, …).

    Args:
        config: of Hugging Face, or None.
        scaled: see `scales_output`.
    """
    factor = getattr(config, "logit_scale", None) or getattr(config, "output_multiplier", None) or 1.0
    factor = float(factor) * float(getattr(config, "lm_head_multiplier", None) or 1.0)
    if scaled:
        factor = factor * float(config.d_model) ** -0.5
    return factor / float(getattr(config, "logits_scaling", None) or 1.0)
