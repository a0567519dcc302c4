"""Is a wrapped model the model of its checkpoint? Its logits are compared with those of Hugging Face's own model.

Every other check here is about the wrapped model, which may compute something else than what its checkpoint was trained
as: TransformerLens 3.9 gives other logits for Cohere, Cohere 2 and HunYuan.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.classifiers import classifier_logits, loader_of, random_tokens, rows_of
from tensorlens_tl.errors import ConformanceError
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes import TOLERANCE

TOKENS = 8
"""How many random tokens the two models are compared on."""


def check_checkpoint(model: ModelLike, *, seed: int = 0) -> float | None:
    """Compare a model's logits with those of the model that Hugging Face loads from its folder, or the hub's cache.

    The checkpoint is loaded once more, so both models are in memory for as long as this takes.

    Args:
        model: a TransformerBridge of a checkpoint; it is expected to be as it was loaded.
        seed: of the random tokens.

    Returns:
        The largest difference, as a share of the largest logit. None where nothing can be compared: models that are no
        Bridge or read no tokens, whose checkpoint is not at hand (or is not
        read by Hugging Face alone), or lacks the head that they have.

    Raises:
        ConformanceError: they differ by more than rounding; has the logit that differs most, of both.
    """
    view = ModelView(model)
    inner: Any = getattr(model, "original_model", None)
    if inner is None or view.reads != "tokens" or view.unembedding is None or not view.untrained.has_checkpoint:
        return None
    if view.untrained.names or view.untrained.classifier:
        return None
    loader: Any = type(inner) if view.classes is None else loader_of(view.classes.classifier)
    try:
        loaded = _loaded_again(inner, loader)
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError):
        return None  # TransformerLens helps some families to load
    if view.classes is not None:
        tokens = random_tokens(inner.config, seed).to(view.device)
        theirs = classifier_logits(loaded, tokens)
        return _compared(view.classes.classifier, rows_of(model, tokens, theirs), theirs)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, view.d_vocab, (1, min(TOKENS, view.n_ctx)), generator=generator).to(view.device)
    decoder = {}
    if view.is_encoder_decoder:
        decoder = {"decoder_input": tokens}
    with torch.no_grad():
        ours = view.model(tokens, **decoder)
        theirs = loaded(input_ids=tokens, **{f"{name}_ids": ids for name, ids in decoder.items()}).logits.to(ours)
    return _compared(type(inner).__name__, ours[0], theirs[0])


def _loaded_again(inner: Any, loader: Any) -> Any:
    """What Hugging Face loads from the checkpoint of a model that a Bridge holds, by a class."""
    config = inner.config
    weight = next(weight for weight in inner.parameters() if weight.is_floating_point())
    loaded = loader.from_pretrained(
        config._name_or_path,
        revision=getattr(config, "_commit_hash", None) or "main",
        attn_implementation=config._attn_implementation,
        dtype=weight.dtype,
        local_files_only=True,
    )
    return loaded.to(weight.device).eval()


def _compared(name: str, ours: Float[Tensor, "pos d_vocab"], theirs: Float[Tensor, "pos d_vocab"]) -> float:
    differences = (ours - theirs).abs()
    error = float(differences.max() / theirs.abs().max())
    if error <= TOLERANCE[ours.dtype]:
        return error
    position, token = divmod(int(differences.argmax()), ours.shape[1])
    raise ConformanceError(
        f"this model is not the one of its checkpoint: the logit of token {token} at position {position} is "
        f"{float(ours[position, token]):.5g} here and {float(theirs[position, token]):.5g} in the {name} that Hugging "
        f"Face loads from there (largest difference {error:.1e} of the largest logit, on {len(ours)} random tokens). "
        "What is proved of this model holds of it alone. Another version of TransformerLens may have it right."
    )
