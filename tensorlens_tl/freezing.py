"""Freezing: one forward pass, checked before and proved after.

Arguments are checked first, then the model's structure, then the pass is run (or taken from a cache), then its
numbers. Every block is composed from its weights in each way its norms allow; the one that reproduces the block's own
output on its own input is its layout. A block that none reproduces is refused, with the first component that differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.frozen import FrozenPass, output_name, plus
from tensorlens_tl.hooks import (
    ModelPoints,
    capture,
    check_finite,
    from_cache,
    model_points,
    refuse_attached,
    run_until,
)
from tensorlens_tl.inputs import Prompt, prepare
from tensorlens_tl.layouts import Layout, candidates, compose
from tensorlens_tl.model_state import WeightState, other_hooks, refuse_devices, refuse_dropout
from tensorlens_tl.view import ModelView

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far a block's map may be from the block: the largest relative error of a token. A wrong reading of the
weights misses by far more; float64 models often compute their norms in float32 inside, which costs 1e-7."""


def freeze(
    model: Any,
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

    Hooks of other people on the model take part in the run, and so does what they change: where the algebra cannot
    follow, the proof fails and says so. They are left on, and named in the pass's `other_hooks` and in every result's
    provenance. Hooks put on or taken off later do not change a pass; ``attached()`` runs with those that are there.

    Args:
        model: a HookedTransformer, HookedEncoder (TransformerLens 3.9) or TransformerBridge (3.9 and 4.x).
        input: a string, a list of strings, or token ids.
        attention_mask: 1 at real tokens, `[batch, pos]`; with token ids only.
        token_type_ids: segment ids for BERT-like models.
        prepend_bos: as in TransformerLens.
        padding_side: where several strings differ in length.
        cache: the ActivationCache of an earlier ``run_with_cache`` on the same input, instead of a forward pass.
        store: ``"cpu"`` keeps the captured activations off the model's device.
        verify: prove every block against the model's own output; False proves only the first.
        tolerance: largest relative error a block may show; None takes `TOLERANCE` for the model's dtype.

    Raises:
        InvalidInputError: see `tensorlens_tl.inputs.prepare`; also a model in train mode whose dropout is active, and a
            cache of another prompt.
        FrozenModelError: inside ``with frozen.attached()``, where the run would not be the model's own.
        UnsupportedModelError: the model has a part that no known map reproduces, or a block's proof fails.
        NumericalError: NaN or Inf in an activation.
    """
    if store not in ("model", "cpu"):
        raise InvalidInputError(f"store={store!r}; use 'model' or 'cpu'.")
    view = ModelView(model)
    refuse_dropout(model)
    refuse_devices(model)
    refuse_attached(model)
    prompt = prepare(
        view,
        input,
        attention_mask=attention_mask,
        token_type_ids=token_type_ids,
        prepend_bos=prepend_bos,
        padding_side=padding_side,
    )
    points = model_points(view)
    # captured activations must be usable with gradients later, also when the caller is in inference mode
    with torch.inference_mode(False), torch.no_grad():
        if cache is None:
            # logits are not needed, and can cost as much as several blocks
            kept, _ = capture(model, prompt.kwargs, points.captured, store=store, last=points.unembed_in)
        else:
            kept = from_cache(cache, points.captured, *prompt.tokens.shape)
        frozen = FrozenPass(model, view, points, prompt, kept, WeightState.of(model), other_hooks(model))
        frozen.tolerance = TOLERANCE.get(frozen.resid_pre(0).dtype, 1e-4) if tolerance is None else tolerance
        if cache is not None:
            _check_same_prompt(frozen)
        _check_padding(prompt, points, kept)
        check_finite({name: kept[name] for name in points.captured})
        _prove(frozen, verify)
    return frozen


def _check_same_prompt(frozen: FrozenPass) -> None:
    """Refuse a cache whose stream enters the first block otherwise than this prompt's does."""
    own = run_until(frozen.model, frozen.inputs, frozen.points.blocks[0].resid_pre)
    error = frozen._relative_error(frozen.resid_pre(0), own.to(frozen.tokens.device))
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


def _prove(frozen: FrozenPass, verify: bool) -> None:
    """Find every block's layout, measure its error, and refuse a block that no layout reproduces."""
    tolerance = frozen.tolerance
    for layer in range(frozen.n_layers):
        block = frozen.view.blocks[layer]
        options = candidates(set(block.norms), block.has_mlp)
        known = frozen.layouts[-1] if frozen.layouts and frozen.layouts[-1] in options else None
        if known is not None and not verify:
            frozen.layouts.append(known)
            continue
        # the first block tells the candidates apart; for its like, one proof is enough
        layout = known or _choose(frozen, layer, options, tolerance)
        error = float("nan") if layout is None else frozen.prove_block(layer, layout)
        if layout is known and not error <= tolerance:
            layout = _choose(frozen, layer, options, tolerance)
            error = float("nan") if layout is None else frozen.prove_block(layer, layout)
        if layout is None or not error <= tolerance:
            errors = {option: frozen.prove_block(layer, option) for option in options}
            raise UnsupportedModelError(_refusal(frozen, layer, errors, tolerance))
        frozen.layouts.append(layout)
        frozen.errors[f"blocks.{layer}"] = error
    if not verify:
        return
    head = frozen.prove_head()
    if head is not None:
        frozen.errors["head"] = head
        if not head <= tolerance:
            raise UnsupportedModelError(
                f"what stands between the last block and the unembedding of this {frozen.view.description} is not a "
                f"norm or prediction head as we read it: relative error {head:.1e}, allowed {tolerance:.0e}."
            )


def _choose(frozen: FrozenPass, layer: int, options: Sequence[Layout], tolerance: float) -> Layout | None:
    """The one layout that reproduces a block (on its first tokens, where the block is causal), or None.

    Raises:
        UnsupportedModelError: two of them do.
    """
    short = _first_tokens(frozen, layer)
    parts = short._parts(layer)
    errors = {option: short._prove(layer, compose(option, *parts)) for option in options}
    passing = sorted((option for option in options if errors[option] <= tolerance), key=lambda option: errors[option])
    if len(passing) > 1:
        # Folded norms commute with sublayers that have no bias, at a single token with attention too. A rule with a
        # constant of its own still tells on which side the norm is, and it is what would go wrong with the other one.
        tangent = short._parts(layer, "tangent")
        passing = [o for o in passing if short._prove(layer, compose(o, *tangent)) <= tolerance] or passing
    rounding = torch.finfo(frozen.resid_pre(layer).dtype).eps
    if len(passing) > 1 and errors[passing[1]] < 10 * max(errors[passing[0]], rounding):
        if _same_map(short, layer, passing):
            return min(passing[:2], key=options.index)
        raise UnsupportedModelError(
            f"blocks.{layer} of this {frozen.view.description}: two layouts reproduce it equally well "
            f"({errors[passing[0]]:.1e} and {errors[passing[1]]:.1e}), so this input cannot tell its structure; "
            "freeze a longer prompt, or in float64."
        )
    return passing[0] if passing else None


def _same_map(frozen: FrozenPass, layer: int, options: Sequence[Layout]) -> bool:
    """Whether layouts agree on random vectors too (a sublayer that writes nothing): then any of them is right."""
    x = frozen.resid_pre(layer)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
    made = [frozen.block(layer, layout=option)(noise) for option in options[:2]]
    return frozen._relative_error(made[0], made[1]) <= frozen.tolerance


def _first_tokens(frozen: FrozenPass, layer: int, length: int = 8) -> FrozenPass:
    """One block of a pass, cut to its first tokens where these do not look ahead; else the whole pass."""
    mask = frozen.mask[:, :length]
    if bool(frozen.pattern(layer)[:, :, :length, length:].any()) or not bool(mask.any(1).all()):
        return frozen
    names = {*frozen.points.blocks[layer].captured, output_name(frozen.points, layer)}
    cache = {name: frozen._kept(name)[:, :length] for name in names}
    cache[frozen.points.blocks[layer].pattern] = frozen.pattern(layer)[:, :, :length, :length]
    prompt = Prompt(frozen.tokens[:, :length], mask, {}, [])
    return replace(frozen, prompt=prompt, cache=cache, layouts=[], errors={}, _ratios={})


def _refusal(frozen: FrozenPass, layer: int, errors: Mapping[Layout, float], tolerance: float) -> str:
    start = f"blocks.{layer} of this {frozen.view.description} cannot be frozen: "
    if not errors:
        norms = ", ".join(frozen.view.blocks[layer].norms) or "none"
        return start + f"no known layout has the norms it has ({norms})."
    best = min(errors, key=lambda layout: errors[layout])
    tried = ", ".join(f"{layout.name} {error:.1e}" for layout, error in errors.items())
    component = _culprit(frozen, layer, best, tolerance)
    return (
        start
        + f"composed from its weights it misses its own output (relative error: {tried}; allowed {tolerance:.0e}). "
        f"{component} Other hooks on the model, or a part that is not attention, norm or MLP, would explain it."
    )


def _culprit(frozen: FrozenPass, layer: int, layout: Layout, tolerance: float) -> str:
    """Which sublayer of a refused block disagrees, by comparing it alone; runs the model once more."""
    at = f"blocks.{layer}."
    names = [
        at + name
        for name in ("attn.hook_z", "mlp.hook_post", "hook_attn_out")
        if at + name in frozen.view.model.hook_dict
    ]
    seen, _ = capture(frozen.model, frozen.inputs, names)
    x = frozen.resid_pre(layer)
    x = frozen.norm(layer, layout.attn.before)(x) if layout.attn.before else x
    values, mixing, out = frozen.attention(layer).stages
    made = {"attn.hook_z": mixing(values(x))}
    if layout.attn.after is None:
        made["hook_attn_out"] = out(made["attn.hook_z"])
    weights, held = frozen.view.blocks[layer].mlp, frozen.mlp_coefficients(layer)
    if weights is not None and held is not None:
        points = frozen.points.blocks[layer]
        through = frozen._kept(points.pre_linear or points.pre or "")
        made["mlp.hook_post"] = through * held.through + plus(held.rest, weights.b_post, held.through, zero=True)
    for name, mine in made.items():
        if at + name in seen and seen[at + name].numel() == mine.numel():
            own = seen[at + name].reshape(mine.shape)
            error = float((mine - own).norm() / own.norm().clamp_min(1e-30))
            if not error <= tolerance:
                return f"The first part that differs is {at}{name} ({error:.1e})."
    return f"Attention values and activations agree; the difference is in the norms or in {at}mlp."
