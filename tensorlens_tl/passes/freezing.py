"""Freezing: one forward pass, checked before it runs and proved afterwards.

Arguments are checked first, then the model's structure, then the pass is run (or taken from a cache), then its
numbers; at the end come the proofs (`tensorlens_tl.passes.proof.blocks`).
"""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.algebra.recursion import spectral_radius
from tensorlens_tl.errors import InvalidInputError, NumericalError, TensorLensError, UnsupportedModelError
from tensorlens_tl.hooks import (
    FwdHook,
    ModelPoints,
    capture,
    check_finite,
    from_cache,
    hook_numbers,
    keep_in,
    logit_hooks,
    logits_at,
    model_points,
    observe,
    other_hooks,
    own_run,
    refuse_attached,
)
from tensorlens_tl.models.lifecycle import WeightState, configuration, refuse_devices, refuse_dropout
from tensorlens_tl.models.protocol import HookedModel, ModelLike
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.captured import HeldConfiguration
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.inputs import Prompt, prepare, query_positions
from tensorlens_tl.passes.proof import SeenWrites, check_pattern, compare_logits, looks_ahead, prove, sampled_positions
from tensorlens_tl.passes.recompute import PatternReader, refuse_unreadable

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far a block's map may be from the block: the largest relative error of a token. A wrong reading of the
weights misses by far more. A float64 model whose norms compute in float32 (`ModelView.norms_in_float32`) is held to
what float32 allows: it loses some 1e-7 there, and a sublayer whose terms cancel a hundred times that."""


def freeze(
    model: ModelLike,
    input: Any,
    *,
    attention_mask: Any = None,
    token_type_ids: Any = None,
    decoder_input_ids: Any = None,
    decoder_attention_mask: Any = None,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    model_inputs: Any = None,
    cache: Any = None,
    store: str = "model",
    patterns: str = "keep",
    verify: Any = True,
    tolerance: Any = None,
    strict: bool = False,
) -> FrozenPass:
    """Run a model once and hold its patterns, activation ratios and norm scales fixed.

    Hooks of other people on the model run as well, and what they change is part of the pass: where the algebra cannot
    follow, the proof fails and says so. They are left on, and named in the pass's `other_hooks` and in every result's
    provenance. Hooks put on or taken off later do not change a pass; ``attached()`` runs with those that are there.

    Args:
        model: a HookedTransformer, HookedEncoder (TransformerLens 3.9) or TransformerBridge (3.9 and 4.x).
        input: a string or a list of strings; or token ids, as a tensor `[batch, pos]` or `[pos]`, or as lists, which
            may differ in length; or what a tokenizer or processor returns, a mapping with `input_ids`. Of a model that
            reads images or sound, the values that it reads: pixels `[batch, channel, height, width]`, a spectrogram
            `[batch, time, mel]` or samples `[batch, sample]`.
        attention_mask: 1 at real tokens, `[batch, pos]`; with token ids of equal length only.
        token_type_ids: segment ids for BERT-like models.
        decoder_input_ids: what the decoder of an encoder–decoder reads, as text or token ids; its positions follow
            those of the input in every result. Start it with the token that the model's decoder starts with.
        decoder_attention_mask: 1 at its real tokens.
        prepend_bos: as in TransformerLens.
        padding_side: ``"left"`` or ``"right"`` (the default, whatever the tokenizer says), where prompts differ in
            length.
        model_inputs: what a multimodal model takes besides its tokens, by the names of its forward:
            ``{"pixel_values": ...}``.
        cache: the ActivationCache of an earlier ``run_with_cache`` on the same input; a copy is kept instead of this
            run's activations, and each of them is compared with this run's.
        store: ``"cpu"`` keeps the captured activations off the model's device.
        patterns: ``"recompute"`` keeps queries and keys instead of attention patterns, so that memory grows with the
            prompt's length and not with its square: a layer's pattern is made anew, a few queries at a time, when it is
            used. Every one is compared with the model's own while the pass runs.
        verify: True proves every block against the model's own output at every token. ``"sample"`` proves every block
            at up to 8 tokens of each prompt, its last one always among them (`proved_positions` of the pass): a part
            that is read wrongly is found, an activation that was changed at another token is not. Blocks with
            whitening or a mixer in place of attention, and those of encoder–decoders, are proved at every token all
            the same. False proves only the first block of each kind.
        tolerance: largest relative error that a block may show in its output, and every head, neuron and sublayer in
            what it gives; None takes `TOLERANCE` for the model's dtype.
        strict: whether a sum that is further from the model's number than its proof allows (`allowed_residual` of the
            pass) raises `NumericalError` instead of a `ResidualWarning`.

    Raises:
        InvalidInputError: an input that is empty, longer than the context or outside the vocabulary, or shapes that
            differ; a model in train mode whose dropout is active; a cache of another prompt, of other weights, or made
            under other hooks.
        FrozenModelError: inside ``with frozen.attached()``, where the run would not be the model's own.
        UnsupportedModelError: the model has a part that no known map reproduces, a block's proof fails, or its blocks
            run in a loop.
        NumericalError: NaN or Inf in an activation.
    """
    if store not in ("model", "cpu"):
        raise InvalidInputError(f"store={store!r}; use 'model' or 'cpu'.")
    if patterns not in ("keep", "recompute"):
        raise InvalidInputError(f"patterns={patterns!r}; use 'keep' or 'recompute'.")
    if patterns == "recompute" and cache is not None:
        raise InvalidInputError("cache: patterns='recompute' sees patterns while the model runs; leave one out.")
    if tolerance is not None and (not isinstance(tolerance, int | float) or not tolerance > 0):
        raise InvalidInputError(f"tolerance={tolerance!r}; pass a positive number, or None for the dtype's own.")
    if not (isinstance(verify, bool) or (isinstance(verify, str) and verify == "sample")):
        raise InvalidInputError(
            f"verify={verify!r}; use True (every block at every token), 'sample' (every block at a few tokens) or "
            "False (the first block of each kind)."
        )
    # what is kept must be usable with gradients later, also when the caller is in inference mode
    with torch.inference_mode(False), torch.no_grad():
        view = ModelView(model)
        with own_run(view.model):
            refuse_dropout(view.model)
            refuse_devices(view.model)
            refuse_attached(view.model)
            prompt = prepare(
                view,
                input,
                attention_mask=attention_mask,
                token_type_ids=token_type_ids,
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                prepend_bos=prepend_bos,
                padding_side=padding_side,
                model_inputs=model_inputs,
            )
            if patterns == "recompute":
                refuse_unreadable(view)
            allowed = partial(_tolerance, tolerance, view)
            points = model_points(view)
            last = query_positions(prompt, -1)
            hooks = logit_hooks(view.model, points.unembed_in, prompt.in_logits(last))
            reader: PatternReader | None = None
            writes: SeenWrites | None = None
            sampled = sampled_positions(prompt.mask) if verify == "sample" else None
            if verify:
                writes = SeenWrites.of(view, points, len(prompt.tokens), sampled, store)
            if patterns == "recompute":
                reader = PatternReader(view, points, prompt, store, allowed)
            logits: Any = None
            if cache is None:
                activations, logits = _activations(view, prompt, points, store, hooks, reader, writes)
            else:
                hooked = [name for name in points.captured if name not in points.calls]
                activations = from_cache(cache, hooked, len(prompt.tokens), _lengths(view, prompt, points))
            frozen = FrozenPass(view, points, prompt, activations, WeightState.of(view.model), other_hooks(view.model))
            frozen.hook_numbers = hook_numbers(view.model)
            frozen.configuration = HeldConfiguration(configuration(view.model))
            _check_width(frozen)
            _check_dtype(frozen)
            frozen.tolerance = allowed(frozen.resid_pre(0).dtype)
            frozen.held_scores = {} if reader is None else reader.scores
            frozen.strict = bool(strict)
            if cache is not None:
                logits = _compare_with_model_run(frozen, hooks, writes)
            _check_padding(view.model, prompt, points, frozen)
            _check_growth(frozen)
            check_finite({name: activations[name] for name in points.captured if name in activations})
            frozen.proved_positions = sampled
            prove(frozen, bool(verify), writes)
            _warn_of_ties(frozen, {name: activations.pop(name) for name in points.routers if name in activations})
            if points.unembed_in is not None:
                compare_logits(frozen, frozen.unembedded(), logits_at(logits, prompt.in_logits(last)), last)
            if cache is None:
                _check_repeats(frozen)
    return frozen


def _tolerance(given: float | None, view: ModelView, dtype: torch.dtype) -> float:
    """The given tolerance, or the default of the narrowest dtype that a model with this stream computes in."""
    if given is not None:
        return given
    return TOLERANCE.get(torch.float32 if view.norms_in_float32 else dtype, 1e-4)


def _activations(
    view: ModelView,
    prompt: Prompt,
    points: ModelPoints,
    store: str,
    hooks: list[FwdHook],
    reader: PatternReader | None,
    writes: SeenWrites | None,
) -> tuple[dict[str, Tensor], Any]:
    """The activations that the pass keeps, and the model's logits; `writes` receives what the proof compares.

    Raises:
        UnsupportedModelError: the model itself cannot run (T5 on TransformerLens 3.9 with some transformers; some
            models whose weights are offloaded).
    """
    try:
        proved = [] if writes is None else points.proved
        names = [*points.captured, *points.routers, *proved]
        calls = {**points.calls, **points.routers}
        if reader is None:
            activations: dict[str, Tensor] = {}
            keep = partial(keep_in, activations, store)
        else:
            activations = reader.kept
            keep = reader.see
            hooks = [*hooks, *reader.hooks()]

        def see(name: str, activation: Tensor) -> None:
            if writes is not None and name in writes.names:
                writes.see(name, activation)
            else:
                keep(name, activation)

        logits = observe(view.model, prompt.kwargs, names, see, hooks=hooks, calls=calls, optional=proved)
        return activations, logits
    except (KeyError, RuntimeError, ValueError) as error:
        if not isinstance(error, TensorLensError) and view.any_offloaded:
            raise UnsupportedModelError(
                f"{view.description} cannot run with its weights offloaded: {type(error).__name__}: {error}. "
                "TransformerLens runs more of them from 4.3 on, and some where accelerate offloads the model after it "
                "was wrapped (accelerate.disk_offload(bridge.original_model, folder)); or load it into memory."
            ) from error
        if prompt.extra and not isinstance(error, TensorLensError):
            raise InvalidInputError(
                f"model_inputs: {view.description} does not run on {', '.join(prompt.extra)} with these tokens "
                f"({type(error).__name__}: {error}). Pass token ids and values that one call of the model's processor "
                "made: each image or sound has its number of tokens."
            ) from error
        if not isinstance(error, ValueError) or isinstance(error, TensorLensError) or not view.is_encoder_decoder:
            raise
        raise UnsupportedModelError(
            f"{view.description} cannot run on the TransformerLens and transformers that are installed: {error}. "
            "TransformerLens 4 may run it."
        ) from error


def _lengths(view: ModelView, prompt: Prompt, points: ModelPoints) -> dict[str, int]:
    """How many positions the input of the first block has; of an encoder–decoder, of the first block on either side."""
    encoder = prompt.encoder_length
    length = prompt.tokens.shape[1]
    if not encoder:
        return {points.blocks[0].resid_pre: length}
    return {points.blocks[0].resid_pre: encoder, points.blocks[view.encoder_layers].resid_pre: length - encoder}


def _check_growth(frozen: FrozenPass) -> None:
    """Refuse whitening that grows so much over a prompt that a proof would see nothing but the recursion.

    Raises:
        NumericalError: what a block adds to its later tokens is lost beside what they have of the earlier ones.
    """
    for layer, block in enumerate(frozen.view.blocks):
        if block.whitening is None:
            continue
        sizes = [
            torch.linalg.vector_norm(upcast(x[frozen.mask]), dim=-1).max()
            for x in (frozen.resid_pre(layer) @ block.whitening.entry, frozen.resid_read(layer))
        ]
        growth = float(sizes[1] / sizes[0])
        most = max(1 / frozen.tolerance, 1e3)
        if growth <= most**0.5 or not bool(torch.isfinite(sizes[0])):  # what is not finite before it is named elsewhere
            continue
        radius = spectral_radius(block.whitening.step)
        what = (
            f"blocks.{layer}.whitening of this {frozen.view.description} (spectral radius {radius:.3g}) makes vectors "
            f"{growth:.1e} times larger over this prompt"
        )
        if not growth <= most:
            raise NumericalError(
                f"{what}; what blocks add to them is lost beside that, and no proof could see it. Freeze a shorter "
                "prompt, or train L⁻¹M towards a radius below 1."
            )
        warnings.warn(f"{what}; longer prompts will be refused.", stacklevel=3)


def _warn_of_ties(frozen: FrozenPass, logits: Mapping[str, Tensor]) -> None:
    """Say where a token's choice of experts is arbitrary: one that is chosen and one that is not count the same."""
    for block, points in zip(frozen.view.blocks, frozen.points.blocks, strict=True):
        if block.name not in logits or points.index is None or not isinstance(block.mlp, ExpertsWeights):
            continue
        index = frozen.captured(points.index).flatten(0, 1)
        count = block.mlp.count
        numbers = logits[block.name].to(index.device).flatten(0, -2)
        if numbers.shape != (len(index), count):
            continue
        chosen = torch.zeros(len(index), count + 1, dtype=torch.bool, device=index.device)
        chosen = chosen.scatter(1, index.clamp_max(count), True)[:, :count]  # some have a place that is no expert
        least = torch.where(chosen, numbers, torch.inf).amin(1, keepdim=True)
        tied = ((numbers == least) & ~chosen).any(1).unflatten(0, frozen.tokens.shape) & frozen.mask
        if bool(tied.any()):
            row, pos = tied.nonzero()[0].tolist()
            warnings.warn(
                f"{block.name}.mlp of this {frozen.view.description}: {int(tied.sum())} tokens (first: prompt {row}, "
                f"position {pos}) are sent to an expert whose router logit another expert equals that is left out. "
                "Which of the two it is is arbitrary, and may differ on another machine or in another batch.",
                stacklevel=3,
            )


def _compare_with_model_run(frozen: FrozenPass, hooks: list[FwdHook], writes: SeenWrites | None) -> Any:
    """Refuse a cache with an activation that the model itself does not have on this prompt; returns its logits."""
    errors: dict[str, float] = {}
    proved = [] if writes is None else frozen.points.proved

    def see(name: str, activation: Tensor) -> None:
        if writes is not None and name in writes.names:
            writes.see(name, activation)
            return
        if name in calls:  # no cache has them
            frozen.cache[name] = activation
            return
        cached = frozen.captured(name)
        expected = activation.to(cached).reshape(cached.shape)
        if cached.ndim == 4:  # a pattern: its queries are compared one by one
            cached = cached.transpose(1, 2)
            expected = expected.transpose(1, 2)
        errors[name] = relative_error(cached, expected, frozen.mask[:, frozen.span(name)])

    names = [*frozen.points.captured, *frozen.points.routers, *proved]
    calls = {**frozen.points.calls, **frozen.points.routers}
    logits = observe(frozen.model, frozen.inputs, names, see, hooks=hooks, calls=calls, optional=proved)
    for name, error in errors.items():
        if not error <= frozen.tolerance:
            raise InvalidInputError(
                f"cache: it was made from another input, under other hooks, or with other weights: {name} differs from "
                f"the model's own run of this prompt by {error:.1e}. Pass the same tokens, in the same order and "
                "padding, that made the cache, or leave `cache` out."
            )
    return logits


_repeats: "WeakKeyDictionary[Any, Any]" = WeakKeyDictionary()  # by model, the versions its weights had


def _check_repeats(frozen: FrozenPass) -> None:
    """Refuse a model that gives another output on the same prompt when it runs again; checked once per model."""
    versions = frozen.weights.versions
    if frozen.other_hooks or _repeats.get(frozen.model) == versions:
        return
    name = frozen.points.last_output
    again, _ = capture(frozen.model, frozen.inputs, [name], last=name)
    output = frozen.captured(name)
    repeated = again[name].to(output).reshape(output.shape)
    error = relative_error(repeated, output, frozen.mask[:, -output.shape[1] :])
    if not error <= frozen.tolerance:
        raise UnsupportedModelError(
            f"two runs of this {frozen.view.description} on the same prompt differ by {error:.1e} in the last block's "
            "output: something in it is random (dropout that is on in eval mode?). Switch it off."
        )
    _repeats[frozen.model] = versions


def _check_dtype(frozen: FrozenPass) -> None:
    """Refuse a state-space model that keeps its stream in float32 beside narrower weights."""
    for layer, block in enumerate(frozen.view.blocks):
        stream = frozen.resid_pre(layer).dtype
        weights = next(block.module.parameters()).dtype
        if stream != weights and weights in (torch.float16, torch.bfloat16) and block.mixer is not None:
            raise UnsupportedModelError(
                f"{block.name} of this {frozen.view.description} reads a residual stream in {stream} with weights in "
                f"{weights} (residual_in_fp32). Load the model in float32."
            )


def _check_width(frozen: FrozenPass) -> None:
    """Refuse a model whose number of positions differs from the number of tokens."""
    stream = frozen.resid_pre(0).shape[:2]
    tokens = frozen.tokens.shape
    if stream != tokens:
        raise UnsupportedModelError(
            f"{frozen.view.description} makes {stream[1]} positions of {tokens[1]} tokens (virtual tokens of a "
            "prompt or prefix adapter, or a hook?); only models with one position for each token can be frozen."
        )


def _check_padding(model: HookedModel, prompt: Prompt, points: ModelPoints, frozen: FrozenPass) -> None:
    """Refuse padding that the model does not handle: weight on padded tokens, or NaN that padding brought."""
    if bool(prompt.mask.all()):
        return
    encoder_layers = sum(block.cross is None for block in points.blocks) if prompt.encoder_length else 0
    for number, block in enumerate(points.blocks):
        start = prompt.encoder_length if number >= encoder_layers and encoder_layers else 0
        queries = slice(start, None) if start or not encoder_layers else slice(0, prompt.encoder_length)
        spans: dict[str, slice] = {}
        if block.pattern is not None:
            spans[block.pattern] = queries
        if block.cross is not None:
            spans[block.cross.pattern] = slice(0, start)
        for name, keys in spans.items():
            if name in frozen.cache:  # a pattern that is recomputed was checked while the model ran
                check_pattern(name, frozen.captured(name), prompt.mask[:, queries], prompt.mask[:, keys])
    first = points.blocks[0].pattern
    if first is None or encoder_layers:
        return
    ahead = looks_ahead(frozen.captured(first), prompt.mask) if first in frozen.cache else not frozen.causal
    if not ahead:
        return
    # GPT-1's Bridge is bidirectional when it is given a mask, and only then
    short = {name: value for name, value in prompt.kwargs.items() if "attention_mask" not in name}
    short = {name: value[:1, :2] if isinstance(value, Tensor) else value for name, value in short.items()}
    alone, _ = capture(model, short, [first], last=first)
    if prompt.tokens.shape[1] > 1 and not bool(alone[first].triu(1).any()):
        raise UnsupportedModelError(
            f"{first} puts weight on later tokens when the model is given an attention mask, and on none without one: "
            "this model does not handle padding. Freeze the prompts one by one."
        )
