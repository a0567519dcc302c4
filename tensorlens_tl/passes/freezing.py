"""Freezing: one forward pass, checked before and proved after.

Arguments are checked first, then the model's structure, then the pass is run (or taken from a cache), then its
numbers; at the end come the proofs (`tensorlens_tl.passes.proof`).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.hooks import (
    ModelPoints,
    capture,
    check_finite,
    from_cache,
    model_points,
    other_hooks,
    refuse_attached,
)
from tensorlens_tl.models.protocol import ModelLike
from tensorlens_tl.models.state import WeightState, refuse_devices, refuse_dropout
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.prompts import Prompt, prepare
from tensorlens_tl.passes.proof import prove

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far a block's map may be from the block: the largest relative error of a token. A wrong reading of the
weights misses by far more; float64 models often compute their norms in float32 inside, which costs 1e-7."""


def freeze(
    model: ModelLike,
    input: Any,
    *,
    attention_mask: Any = None,
    token_type_ids: Any = None,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    cache: Any = None,
    store: str = "model",
    verify: bool = True,
    tolerance: float | None = None,
) -> FrozenPass:
    """Run a model once and hold its patterns, activation ratios and norm scales fixed.

    Hooks of other people on the model run as well, and what they change is part of the pass: where the algebra cannot
    follow, the proof fails and says so. They are left on, and named in the pass's `other_hooks` and in every result's
    provenance. Hooks put on or taken off later do not change a pass; ``attached()`` runs with those that are there.

    Args:
        model: a HookedTransformer, HookedEncoder (TransformerLens 3.9) or TransformerBridge (3.9 and 4.x).
        input: a string or a list of strings; or token ids, as a tensor `[batch, pos]` or `[pos]`, or as lists, which
            may differ in length.
        attention_mask: 1 at real tokens, `[batch, pos]`; with token ids of equal length only.
        token_type_ids: segment ids for BERT-like models.
        prepend_bos: as in TransformerLens.
        padding_side: ``"left"`` or ``"right"`` (the default, whatever the tokenizer says), where prompts differ in
            length.
        cache: the ActivationCache of an earlier ``run_with_cache`` on the same input, instead of a forward pass.
        store: ``"cpu"`` keeps the captured activations off the model's device.
        verify: prove every block against the model's own output; False proves only the first.
        tolerance: largest relative error a block may show; None takes `TOLERANCE` for the model's dtype.

    Raises:
        InvalidInputError: an input that is empty, longer than the context or outside the vocabulary, or shapes that
            differ; a model in train mode whose dropout is active; a cache of another prompt.
        FrozenModelError: inside ``with frozen.attached()``, where the run would not be the model's own.
        UnsupportedModelError: the model has a part that no known map reproduces, or a block's proof fails.
        NumericalError: NaN or Inf in an activation.
    """
    if store not in ("model", "cpu"):
        raise InvalidInputError(f"store={store!r}; use 'model' or 'cpu'.")
    # what is kept must be usable with gradients later, also when the caller is in inference mode
    with torch.inference_mode(False), torch.no_grad():
        view = ModelView(model)
        refuse_dropout(view.model)
        refuse_devices(view.model)
        refuse_attached(view.model)
        prompt = prepare(
            view,
            input,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            prepend_bos=prepend_bos,
            padding_side=padding_side,
        )
        points = model_points(view)
        if cache is None:
            # logits are not needed, and can cost as much as several blocks
            kept, _ = capture(view.model, prompt.kwargs, points.captured, store=store, last=points.unembed_in)
        else:
            kept = from_cache(cache, points.captured, *prompt.tokens.shape)
        frozen = FrozenPass(view, points, prompt, kept, WeightState.of(view.model), other_hooks(view.model))
        frozen.tolerance = TOLERANCE.get(frozen.resid_pre(0).dtype, 1e-4) if tolerance is None else tolerance
        if cache is not None:
            _check_same_prompt(frozen)
        _check_padding(prompt, points, kept)
        check_finite({name: kept[name] for name in points.captured})
        prove(frozen, verify)
    return frozen


def _check_same_prompt(frozen: FrozenPass) -> None:
    """Refuse a cache whose stream enters the first block otherwise than this prompt's does."""
    name = frozen.points.blocks[0].resid_pre
    own = capture(frozen.model, frozen.inputs, [name], last=name)[0][name]
    error = relative_error(frozen.resid_pre(0), own.to(frozen.tokens.device), frozen.mask)
    if not error <= frozen.tolerance:
        raise InvalidInputError(
            f"cache: it was made from another input (the first block's input differs by {error:.1e}). Pass the same "
            "tokens, in the same order and padding, that made the cache."
        )


def _check_padding(prompt: Prompt, points: ModelPoints, kept: Mapping[str, Tensor]) -> None:
    """Refuse padding that the model does not handle: weight on padded tokens, or NaN that padding brought."""
    if bool(prompt.mask.all()):
        return
    padded = ~prompt.mask
    for block in points.blocks:
        pattern = kept[block.pattern].to(padded.device)
        if bool(torch.isnan(pattern).any()):
            raise NumericalError(
                f"NaN at {block.pattern}, in a padded batch: this model does not handle a query all of whose keys are "
                "padding or outside its window (left padding on several bridges, short prompts beside ones longer than "
                "a sliding window). Pad on the right, or freeze the prompts one by one."
            )
        if bool((pattern * (prompt.mask[:, None, :, None] & padded[:, None, None, :])).any()):
            raise UnsupportedModelError(
                f"{block.pattern} puts weight on padded tokens: this model ignores the attention mask (a bidirectional "
                "HookedTransformer does). Freeze the prompts one by one."
            )
