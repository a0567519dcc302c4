"""Freezing: one forward pass, checked before it runs and verified afterwards.

First the arguments are checked, then the model's structure; then the pass runs (or is taken from a cache), and its
numbers are checked; finally its block maps are verified (`tensorlens_tl.passes.proof`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_names, real_number
from tensorlens_tl.algebra import HeldScores, spectral_radius
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.errors import InvalidInputError, NumericalError, TensorLensError, UnsupportedModelError, warn_caller
from tensorlens_tl.hooks import (
    FwdHook,
    ModelPoints,
    Passed,
    SomeLogits,
    StreamPoint,
    capture as run_and_capture,
    check_finite,
    foreign_hooks,
    from_cache,
    hooked,
    hooked_stream_points,
    keep_in,
    observe,
    passing,
    refuse_attached,
    unheld_run,
)
from tensorlens_tl.models import ModelLike, ModelView, Query
from tensorlens_tl.models.lifecycle import OncePerWeights, WeightState, configuration, refuse_devices, refuse_dropout
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes.attention_scores import PatternReader, refuse_unreadable
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.capture import Additions, Capture, HeldConfiguration, looks_ahead
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.inputs import (
    CacheLike,
    IdsLike,
    InputLike,
    ModelInputs,
    Patterns,
    Prompt,
    Side,
    Store,
    Tolerance,
    Verify,
    prepare,
    query_positions,
    token_inputs,
)
from tensorlens_tl.passes.linearisation import points_of, shared_view
from tensorlens_tl.passes.proof import (
    SeenWrites,
    check_pattern,
    compared_positions,
    prove,
    sampled_positions,
)
from tensorlens_tl.passes.texts import readable_tokens

ROUNDING = 4
"""Units of rounding by which a sum minus its first summand may differ from the second."""


# ------------------------------------------------------------------
# Additions to the residual stream by hooks, and patches: measured, and held if constant.
#
# A hook's addition is a constant of the pass if it does not depend on the hook's input. To test this, the model runs
# once more with zeros as the hooks' input, so that a constant comes out exactly, without the rounding of a sum. A patch
# replaces some entries by values that do not depend on what was there. This is tested by a third run, in which the
# hooks get a stream of other signs and sizes: every entry must be its input plus a constant in all runs, or the same
# value in all of them. The change in the pass, the new value minus the replaced one, is then held as a constant. That
# it depends on the replaced value is handled in `tensorlens_tl.passes.two_runs`; a single pass raises an error.


def with_additions(capture: Capture, seen: Mapping[StreamPoint, Passed]) -> Capture:
    """Return a capture with the vectors that hooks added during its run.

    Args:
        seen: the input and output of the stream's hook points that have hooks.
    """
    changed = {point: passed for point, passed in seen.items() if not torch.equal(passed.before, passed.after)}
    if not changed:
        return capture
    alone: dict[StreamPoint, Passed] = {}
    last = capture.points.last_output
    with passing(capture.view, list(changed), alone.__setitem__, instead=torch.zeros_like):
        run_and_capture(capture.model, capture.inputs, [last], last=last)
    sums = {point for point, passed in changed.items() if point in alone and _is_sum(passed, alone[point].after)}
    others = [point for point in changed if point not in sums]
    elsewhere: dict[StreamPoint, Passed] = {}
    if others:
        with passing(capture.view, others, elsewhere.__setitem__, instead=_other_stream):
            run_and_capture(capture.model, capture.inputs, [last], last=last)
    batch, pos = capture.tokens.shape
    constant: dict[StreamPoint, Float[Tensor, "batch pos d_model"]] = {}
    patched: list[StreamPoint] = []
    dependent: list[StreamPoint] = []
    for point, passed in changed.items():
        if point in sums:
            vectors = alone[point].after
        elif point in alone and point in elsewhere and _is_patch([passed, elsewhere[point]], alone[point].after):
            vectors = (upcast(passed.after) - upcast(passed.before)).to(passed.after)
            patched.append(point)
        else:
            dependent.append(point)
            continue
        constant[point] = vectors.reshape(batch, pos, -1).to(capture.tokens.device)
    return replace(capture, additions=Additions(constant, tuple(patched), tuple(dependent)))


def _other_stream(x: Tensor) -> Tensor:
    """Return vectors with other signs and sizes in every channel, so that hooks that select entries select others."""
    return -3 * x.flip(-1)


def _is_sum(passed: Passed, vectors: Tensor) -> bool:
    """Return whether hooks added exactly these vectors, up to rounding."""
    return passed.before.shape == passed.after.shape == vectors.shape and bool(_summed(passed, vectors).all())


def _is_patch(runs: Sequence[Passed], vectors: Tensor) -> bool:
    """Return whether every entry is its input plus a vector in all runs, or this vector itself in all of them."""
    if any(not passed.before.shape == passed.after.shape == vectors.shape for passed in runs):
        return False
    summed = torch.ones_like(vectors, dtype=torch.bool)
    put = torch.ones_like(summed)
    for passed in runs:
        summed &= _summed(passed, vectors)
        put &= passed.after == vectors
    return bool((summed | put).all())


def _summed(passed: Passed, vectors: Tensor) -> Bool[Tensor, "..."]:
    """Return where hooks added exactly these vectors, up to rounding."""
    before, after, added = (upcast(tensor) for tensor in (passed.before, passed.after, vectors))
    rounding = ROUNDING * torch.finfo(passed.after.dtype).eps * (before.abs() + after.abs() + added.abs())
    return (after - before - added).abs() <= rounding


# ------------------------------------------------------------------
# Checks of a capture before its verification: each raises or warns about a problem that verification cannot detect.


def check_growth(capture: Capture, tolerance: float) -> None:
    """Refuse whitening whose growth over a prompt hides everything but the recursion from a proof.

    Raises:
        NumericalError: the outputs of a block at later tokens are lost in the rounding of what they carry on.
    """
    for layer, block in enumerate(capture.view.blocks):
        if block.whitening is None:
            continue
        sizes = [
            torch.linalg.vector_norm(upcast(x[capture.mask]), dim=-1).max()
            for x in (capture.resid_pre(layer) @ block.whitening.entry, capture.resid_read(layer))
        ]
        growth = float(sizes[1] / sizes[0].clamp_min(torch.finfo(sizes[0].dtype).tiny))
        most = max(1 / tolerance, 1e3)
        if growth <= most**0.5 or not bool(torch.isfinite(sizes[0])):  # another check names what is not finite
            continue
        radius = spectral_radius(block.whitening.step)
        what = (
            f"blocks.{layer}.whitening of this {capture.view.description} (spectral radius {radius:.3g}) makes vectors "
            f"{growth:.1e} times larger over this prompt"
        )
        if not growth <= most:
            raise NumericalError(
                f"{what}; the blocks' outputs are lost in their rounding, and no proof could detect an error. Freeze a "
                "shorter prompt, or train L⁻¹M towards a radius below 1."
            )
        warn_caller(f"{what}; longer prompts will raise an error.")


def warn_of_ties(capture: Capture, logits: Mapping[str, Tensor]) -> None:
    """Warn if a token's choice of experts is arbitrary, because a chosen and an unchosen expert have equal logits."""
    for block, points in zip(capture.view.blocks, capture.points.blocks, strict=True):
        if block.name not in logits or points.index is None or not isinstance(block.mlp, ExpertsWeights):
            continue
        index = capture.activation(points.index).flatten(0, 1)
        count = block.mlp.count
        numbers = logits[block.name].to(index.device).flatten(0, -2)
        if numbers.shape != (len(index), count):
            continue
        chosen = torch.zeros(len(index), count + 1, dtype=torch.bool, device=index.device)
        chosen = chosen.scatter(1, index.clamp_max(count), True)[:, :count]  # some choices are not an expert
        least = torch.where(chosen, numbers, torch.inf).amin(1, keepdim=True)
        tied = ((numbers == least) & ~chosen).any(1).unflatten(0, capture.tokens.shape) & capture.mask
        if bool(tied.any()):
            row, pos = tied.nonzero()[0].tolist()
            warn_caller(
                f"{block.name}.mlp of this {capture.view.description}: {int(tied.sum())} tokens (first: prompt {row}, "
                f"position {pos}) are routed to an expert whose router logit equals that of an unchosen expert. "
                "The choice between the two is arbitrary, and may differ on another machine or in another batch.",
            )


_repeats: OncePerWeights[bool] = OncePerWeights()


def check_repeats(capture: Capture, tolerance: float) -> None:
    """Refuse a model whose output on the same prompt changes when it runs again; checked once per model."""
    if capture.other_hooks or _repeats.get(capture.model, capture.weights):
        return
    name = capture.points.last_output
    again, _ = run_and_capture(capture.model, capture.inputs, [name], last=name)
    output = capture.activation(name)
    repeated = again[name].to(output).reshape(output.shape)
    error = relative_error(repeated, output, capture.mask[:, -output.shape[1] :])
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"two runs of this {capture.view.description} on the same prompt differ by {error:.1e} in the last block's "
            "output: something in it is random (dropout that is on in eval mode?). Switch it off."
        )
    _repeats.set(capture.model, capture.weights, True)


def check_shown_patterns(capture: Capture) -> None:
    """Refuse an encoder–decoder whose pattern hook points show something else.

    For an attention module that it does not replace, TransformerLens shows the module's second output at
    `hook_pattern`, which in some models is the bias of relative positions.
    """
    if capture.sides is None:
        return
    for points in capture.points.blocks:
        pattern = points.pattern and capture.activations.get(points.pattern)
        if isinstance(pattern, Tensor) and bool((pattern < 0).any()):
            raise UnsupportedModelError(
                f"{points.pattern} of this {capture.view.description} has negative numbers, which are not attention "
                "probabilities: TransformerLens shows something else there, such as the bias of relative positions. "
                "Without its patterns, attention cannot be frozen."
            )


def check_dtype(capture: Capture) -> None:
    """Refuse a state-space model with a float32 stream and narrower weights."""
    for layer, block in enumerate(capture.view.blocks):
        stream = capture.resid_pre(layer).dtype
        weights = next(block.module.parameters()).dtype
        if stream == weights or weights not in (torch.float16, torch.bfloat16):
            continue  # do not load offloaded weights for this
        if block.mixer is not None or block.has_beside:
            raise UnsupportedModelError(
                f"{block.name} of this {capture.view.description} reads a residual stream in {stream} with weights in "
                f"{weights} (residual_in_fp32). Load the model in float32."
            )


def check_width(capture: Capture) -> None:
    """Refuse a model whose number of positions differs from the number of tokens."""
    stream = capture.resid_pre(0).shape[:2]
    tokens = capture.tokens.shape
    if stream != tokens:
        raise UnsupportedModelError(
            f"{capture.view.description} has {stream[1]} positions for {tokens[1]} tokens (virtual tokens of a prompt "
            "or prefix adapter, or a hook?); only models with one position for each token can be frozen."
        )


def _check_capacity(capture: Capture, layer: int) -> None:
    """Refuse padding that uses up an expert's capacity before a real token that was dropped."""
    weights = capture.view.blocks[layer].mlp
    point = capture.points.blocks[layer].weight
    if point is None or not isinstance(weights, ExpertsWeights) or not weights.routing.has_capacity:
        return
    real = capture.prompt.mask[:, slice(*capture.side(layer))]
    is_sent = (capture.activation(point) != 0).any(-1).to(real.device)
    after_padding = (is_sent & ~real).cumsum(1) > 0
    if bool((real & ~is_sent & after_padding).any()):
        raise UnsupportedModelError(
            f"blocks.{layer} of this {capture.view.description}: an expert's capacity for tokens of a prompt was used "
            "up, partly by padding, before a real token that was dropped: padding changes the model's output. Pad on "
            "the right, or freeze the prompts one by one."
        )


def check_padding(capture: Capture) -> None:
    """Refuse padding that the model does not handle: weight on padded tokens, or NaN due to padding."""
    prompt = capture.prompt
    points = capture.points
    if bool(prompt.mask.all()):
        return
    for layer, block in enumerate(points.blocks):
        start, stop = capture.side(layer)
        queries = slice(start, stop)
        spans: dict[str, slice] = {}
        if block.pattern is not None:
            spans[block.pattern] = queries
        if block.cross is not None:
            spans[block.cross.pattern] = slice(0, start)
        for name, keys in spans.items():
            if name in capture.activations:  # recomputed patterns were checked during the run
                check_pattern(name, capture.activation(name), prompt.mask[:, queries], prompt.mask[:, keys])
        _check_capacity(capture, layer)
    first = points.blocks[0].pattern
    if first is None or capture.sides is not None:
        return
    ahead = not capture.causal
    if ahead and first in capture.activations:
        ahead = looks_ahead(capture.activation(first), prompt.mask)  # of real queries
    if not ahead:
        return
    # GPT-1's Bridge is bidirectional if it gets a mask, and only then: run all prompts without one (at their width, so
    # that hooks that rely on the shape run as well)
    without = {name: value for name, value in prompt.kwargs.items() if "attention_mask" not in name}
    alone, _ = run_and_capture(capture.model, without, [first], last=first)
    if prompt.tokens.shape[1] > 1 and not bool(alone[first].triu(1).any()):
        raise UnsupportedModelError(
            f"{first} puts weight on later tokens if the model gets an attention mask, and on none without one: this "
            "model does not handle padding. Freeze the prompts one by one."
        )


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Default tolerance by dtype: the largest relative error of a block's map at any token. Misread weights cause far
larger errors. A float64 model with norms in float32 (`ModelView.norms_in_float32`) has the tolerance of float32: it
loses about 1e-7 in its norms, and a hundred times as much in a sublayer whose terms cancel."""


@checked_names
def freeze(
    model: ModelLike,
    input: InputLike,
    *,
    attention_mask: IdsLike = None,
    token_type_ids: IdsLike = None,
    decoder_input_ids: InputLike | None = None,
    decoder_attention_mask: IdsLike = None,
    prepend_bos: bool | None = None,
    padding_side: Side = None,
    model_inputs: ModelInputs = None,
    cache: CacheLike = None,
    store: Store = "model",
    patterns: Patterns = "keep",
    verify: Verify = True,
    tolerance: Tolerance = None,
    strict: bool = False,
    query: Query | None = None,
) -> FrozenPass:
    """Run a model once and hold its patterns, activation ratios and norm scales fixed.

    User-installed hooks run with the model, and their changes are part of the pass; if the algebra cannot follow a
    hook, the proof fails and says so. The hooks stay on the model; the pass's `other_hooks` and every result's
    provenance name them. Vectors that they add to the residual stream (steering) are constants of the pass, named by
    hook point. Hooks added or removed later do not change a pass; ``attached()`` runs with those on the model then.

    Args:
        model: a HookedTransformer, HookedEncoder or HookedEncoderDecoder (TransformerLens 3.9), or a TransformerBridge
            (3.9 and 4.x).
        input: a string or several (a list, an array, a column of a data frame); or token ids, as a tensor
            `[batch, pos]` or `[pos]`, or as lists, which may differ in length; or the messages of a chat,
            ``[{"role": "user", "content": "Hello"}]``, or a list of chats, rendered by the tokenizer's chat template
            up to the beginning of the answer; or what a tokenizer or processor returns, a mapping with
            `input_ids`. For a model of images or sound, its input values: pixels
            `[batch, channel, height, width]`, a spectrogram `[batch, time, mel]` or samples `[batch, sample]`.
        attention_mask: 1 at real tokens, `[batch, pos]`; only with token ids of equal length.
        token_type_ids: segment ids for BERT-like models.
        decoder_input_ids: the input of an encoder–decoder's decoder, as text or token ids; its positions follow
            those of the input in every result. It must begin with the model's decoder start token.
        decoder_attention_mask: 1 at the decoder's real tokens.
        prepend_bos: as in TransformerLens; a string that begins with the BOS token gets no second one. By default,
            an encoder's text gets all special tokens that its checkpoint's own tokenizer adds.
        padding_side: ``"left"`` or ``"right"`` (the default, whatever the tokenizer says), if prompts differ in length.
            With padding on the left, a model that counts positions from the first column (BART, Marian, Pegasus, a
            HookedEncoder) computes something different than for each prompt alone; results explain that run.
        model_inputs: further inputs of a multimodal model, under the names that its forward uses, such as
            ``{"pixel_values": ...}``.
        cache: the ActivationCache of an earlier ``run_with_cache`` on the same input; a copy of its activations is
            stored instead of this run's, and each is compared with this run's.
        store: ``"cpu"`` stores the captured activations in the CPU's memory.
        patterns: ``"recompute"`` stores queries and keys instead of attention patterns, so that memory grows with the
            prompt's length instead of its square: a layer's pattern is recomputed, a few queries at a time, when
            needed. Each pattern is compared with the model's own while the pass runs.
        verify: True compares every block with the model's own output at every token; products in plain blocks with
            hook points for their result are compared on random vectors (`tensorlens_tl.passes.proof`), which
            overlooks an error with a probability of 1e-7. ``"sample"`` compares every block at up to 8 tokens of each
            prompt, including the last (``proof.positions`` of the pass): this detects misread weights, but not an
            activation that was changed at another token. Blocks with whitening or a mixer in place of attention, and
            those of encoder–decoders, are still compared at every token. False compares only the first block of each
            kind, at the same tokens.
        tolerance: the largest relative error allowed in a block's output, and in the output of every head, neuron and
            sublayer; None takes `TOLERANCE` for the model's dtype.
        strict: raise `NumericalError` instead of a `GapWarning` if a sum differs from the model's number by more than
            the proof allows (`allowed_gap` of the pass).
        query: positions whose logits you will explain, as in `FrozenOperator.target`. Before a logit is explained, it
            is compared with the model's own at that position. This run provides the logits at each prompt's last
            token, at these positions, and in a masked language model at the first token and at every mask; any other
            position takes one more run, the first time it is explained.

    Raises:
        InvalidInputError: an input that is empty, longer than the context or outside the vocabulary; shapes that
            differ; a model in train mode whose dropout is active; a cache of another prompt, other weights or other
            hooks.
        FrozenModelError: inside ``with frozen.attached()``, when the run would not be the model's own.
        UnsupportedModelError: no known map reproduces some part of the model, a block's proof fails, or its blocks run
            in an unsupported loop.
        NumericalError: NaN or Inf in an activation.

    Warns (`UntrainedWarning`) if the model's checkpoint lacks weights of its embeddings or blocks.

    >>> frozen = tlens.freeze(model, ["Return the value.", "Return the"])
    >>> frozen.tokens.shape, frozen.mask.sum(1)
    (torch.Size([2, 5]), tensor([5, 3]))
    >>> max(frozen.errors.values()) < frozen.tolerance
    True
    """
    options = FreezeOptions(store, patterns, verify, tolerance, bool(strict), query)
    if patterns == "recompute" and cache is not None:
        raise InvalidInputError("cache: patterns='recompute' needs the patterns of a run; leave out one of the two.")
    # activations must be usable with gradients later, even if the caller is in inference mode
    with torch.inference_mode(False), torch.no_grad():
        view = ModelView(model)
        weights: WeightState | None = None
        with unheld_run(view.model):
            refuse_dropout(view.model)
            refuse_devices(view.model)
            refuse_attached(view.model)
            if verify:  # otherwise nothing would detect weights changed since the model was read
                view, weights = shared_view(view)
            view.untrained.warn(logits=False)
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
            return _freeze(view, prompt, options, cache, weights=weights)


@dataclass(frozen=True)
class FreezeOptions:
    """The options of `freeze` besides the model and its input; see there.

    Raises:
        InvalidInputError: an unknown value of an option.
    """

    store: Store = "model"
    patterns: Patterns = "keep"
    verify: Verify = True
    tolerance: Tolerance = None
    strict: bool = False
    query: Query | None = None

    def __post_init__(self) -> None:
        if self.store not in ("model", "cpu"):
            raise InvalidInputError(f"store={self.store!r}; use 'model' or 'cpu'.")
        if self.patterns not in ("keep", "recompute"):
            raise InvalidInputError(f"patterns={self.patterns!r}; use 'keep' or 'recompute'.")
        if self.tolerance is not None:
            words = "pass a positive number, or None for the dtype's own"
            real_number("tolerance", self.tolerance, lambda x: x > 0, words)
        if not isinstance(self.verify, bool) and self.verify != "sample":
            raise InvalidInputError(
                f"verify={self.verify!r}; use True (every block at every token), 'sample' (every block at a few "
                "tokens) or False (the first block of each kind)."
            )

    def tolerance_of(self, view: ModelView, dtype: torch.dtype) -> float:
        """Return the given tolerance, or the default for the narrowest dtype that a model with this stream uses."""
        if self.tolerance is not None:
            return float(self.tolerance)
        return TOLERANCE.get(torch.float32 if view.norms_in_float32 else dtype, 1e-4)


def freeze_changed(frozen: FrozenPass, inputs: Mapping[str, Any], hooks: Sequence[FwdHook] = ()) -> FrozenPass:
    """Return a pass of the same model and positions with other inputs, or with hooks that change them.

    Args:
        frozen: the pass whose prompts, padding and tolerance are used.
        inputs: the model's keyword arguments.
        hooks: installed while the model runs, and removed afterwards.

    Raises:
        FrozenModelError: the model has changed since the pass, possibly by hooks that were added or removed; or a
            frozen pass is attached.
        InvalidInputError: the model is now in train mode, and its dropout is active.
        UnsupportedModelError: the model now gives each head a copy of the stream.
    """
    model = frozen.view.model
    frozen.view.refuse_split_inputs()
    with torch.no_grad():
        frozen.live("a run with other inputs").check_hooks()
    tokens = frozen.tokens
    texts = frozen.str_tokens
    given = [inputs[name] for name in token_inputs(inputs) if isinstance(inputs[name], Tensor)]
    if frozen.view.reads == "tokens" and sum(ids.shape[1] for ids in given) == tokens.shape[1]:
        tokens = torch.cat(given, dim=1)
        texts, _ = readable_tokens(frozen.view, tokens)
    prompt = replace(frozen.prompt, tokens=tokens, kwargs=dict(inputs), str_tokens=texts)
    options = FreezeOptions(tolerance=frozen.tolerance, strict=frozen.strict)
    with torch.inference_mode(False), torch.no_grad(), unheld_run(model), hooked(model, hooks):
        return _freeze(frozen.view, prompt, options, None, entry_hooks=tuple(hooks))


def _freeze(
    view: ModelView,
    prompt: Prompt,
    options: FreezeOptions,
    cache: CacheLike,
    *,
    entry_hooks: tuple[FwdHook, ...] = (),
    weights: WeightState | None = None,
) -> FrozenPass:
    """Capture, check and verify one pass, in this order; its logits are compared at some positions.

    Args:
        view, prompt, options, cache: as in `freeze`.
        entry_hooks: our own hooks that change the embeddings.
        weights: the state of the model's weights when it was read, just now; None if unknown.
    """
    allowed = partial(options.tolerance_of, view)
    points = points_of(view)
    compared = compared_positions(view, prompt, options.query)
    stream_hooks = hooked_stream_points(view, points)
    hooked = bool(entry_hooks or stream_hooks)
    if hooked and prompt.class_at is None:  # later runs of the model do not have these hooks
        compared = query_positions(prompt, "all")[:, prompt.encoder_length :]
    run = _Run(view, prompt, points, options, compared, stream_hooks)
    logits: Any = None
    if cache is None:
        logits = run.observe()
    else:
        names = [name for name in points.captured if name not in points.calls]
        run.activations = from_cache(cache, names, len(prompt.tokens), _lengths(view, prompt, points))
    others = foreign_hooks(view.model)
    if weights is None or others or not weights.seems_held(view.model):  # a hook may have written to them
        weights = WeightState.of(view.model)
    capture = Capture(
        view,
        points,
        prompt,
        run.activations,
        weights,
        held_scores=run.held_scores,
        configuration=HeldConfiguration(configuration(view.model)),
        other_hooks=tuple(dict.fromkeys(hook.point for hook in others)),
        hook_numbers=frozenset(hook.number for hook in others),
        entry_hooks=entry_hooks,
    )
    capture.note_fresh()
    check_width(capture)
    check_shown_patterns(capture)
    check_dtype(capture)
    tolerance = allowed(capture.resid_pre(0).dtype)
    if cache is not None:
        logits = run.compare_with(capture, tolerance)
    check_padding(capture)
    check_growth(capture, tolerance)
    check_finite(
        {name: run.activations[name] for name in points.captured if name in run.activations}, points.writers(view)
    )
    capture = with_additions(capture, run.passed)
    maps = BlockMaps(capture, tolerance)
    proof = prove(maps, bool(options.verify), run.writes, run.sampled)
    warn_of_ties(capture, {name: run.activations.pop(name) for name in points.routers if name in run.activations})
    frozen = FrozenPass(replace(maps, layouts=proof.layouts), proof, options.strict)
    if points.unembed_in is not None:
        frozen.logits_check.postpone(run.compared.of(logits), compared)
        if hooked or options.query is not None:  # too many logits to store
            frozen.logits_check.catch_up(capture, frozen.unembedded())
    if cache is None:
        check_repeats(capture, tolerance)
    return frozen


class _Run:
    """The model's run on a prompt, and what is recorded meanwhile.

    Attributes:
        activations: by hook-point name.
        sampled: the positions at which blocks are verified; None for all.
        writes: activations for verification only.
        reader: reads patterns that will be recomputed.
        compared: the positions whose logits are compared with those from the weights.
        hooked: the points of the residual stream that have user-installed hooks.
        passed: the inputs and outputs of those points.
    """

    def __init__(
        self,
        view: ModelView,
        prompt: Prompt,
        points: ModelPoints,
        options: FreezeOptions,
        compared: Tensor,
        hooked: list[StreamPoint],
    ) -> None:
        self.view = view
        self.prompt = prompt
        self.points = points
        self.store = options.store
        self.activations: dict[str, Tensor] = {}
        self.sampled: Int[Tensor, "batch query"] | None = None
        self.writes: SeenWrites | None = None
        if options.verify is not True:
            self.sampled = sampled_positions(prompt.mask)
        if options.verify:
            self.writes = SeenWrites.of(view, points, len(prompt.tokens), self.sampled, options.store)
        self.reader: PatternReader | None = None
        self.hooked = hooked
        self.passed: dict[StreamPoint, Passed] = {}
        self.compared = SomeLogits(view.model, points.unembed_in, prompt.in_logits(compared))
        self.hooks = self.compared.hooks
        if options.patterns == "recompute":
            refuse_unreadable(view)
            self.reader = PatternReader(view, points, prompt, options.store, partial(options.tolerance_of, view))
            self.activations = self.reader.activations
            self.hooks = [*self.hooks, *self.reader.hooks()]

    @property
    def held_scores(self) -> Mapping[str, HeldScores]:
        """The tensors from which each pattern is recomputed."""
        return {} if self.reader is None else self.reader.scores

    def observe(self) -> Any:
        """Run the model once, record the activations to store and to verify, and return its logits.

        Raises:
            UnsupportedModelError: the model itself cannot run (T5 on TransformerLens 3.9 with some transformers; some
                models whose weights are offloaded, or whose blocks are on several devices).
        """
        try:
            return self._observe(self._store)
        except TensorLensError:
            raise
        except (KeyError, RuntimeError, ValueError) as error:
            refusal = self._refusal(error)
            if refusal is None:
                raise
            raise refusal from error

    def _store(self, name: str, activation: Tensor) -> None:
        """Store an activation, or the tensors from which a pattern is recomputed."""
        if self.reader is None:
            keep_in(self.activations, self.store, name, activation)
        else:
            self.reader.see(name, activation)

    def _observe(self, see: Callable[[str, Tensor], None]) -> Any:
        proved: list[str] = []
        if self.writes is not None:
            proved = self.points.proved
        names = [*self.points.captured, *self.points.routers, *proved]
        calls = {**self.points.calls, **self.points.routers}

        def see_all(name: str, activation: Tensor) -> None:
            if self.writes is not None and name in self.writes.names:
                self.writes.see(name, activation)
            else:
                see(name, activation)

        with passing(self.view, self.hooked, self.passed.__setitem__):
            return observe(
                self.view.model, self.prompt.kwargs, names, see_all, hooks=self.hooks, calls=calls, optional=proved
            )

    def _refusal(self, error: Exception) -> TensorLensError | None:
        """Return a known explanation of why the model cannot run, or None."""
        description = self.view.description
        if self.view.any_offloaded:
            return UnsupportedModelError(
                f"{description} cannot run with its weights offloaded: {type(error).__name__}: {error}. "
                "TransformerLens runs more of them from 4.3 on, and some where accelerate offloads the model after it "
                "was wrapped (accelerate.disk_offload(bridge.original_model, folder)); or load it into memory."
            )
        if self.view.any_moved:
            return UnsupportedModelError(
                f"{description} cannot run with its blocks on several devices: {type(error).__name__}: {error}. Put "
                "what follows the last block on that block's device, as device_map='auto' does, or load the model on "
                "one device."
            )
        if self.prompt.extra:
            return InvalidInputError(
                f"model_inputs: {description} does not run on {', '.join(self.prompt.extra)} with these tokens "
                f"({type(error).__name__}: {error}). Pass token ids and values from one call of the model's processor: "
                "each image or sound has its number of tokens."
            )
        if isinstance(error, ValueError) and self.view.is_encoder_decoder:
            return UnsupportedModelError(
                f"{description} cannot run on the TransformerLens and transformers that are installed: {error}. "
                "TransformerLens 4 may run it."
            )
        return None

    def compare_with(self, capture: Capture, tolerance: float) -> Any:
        """Refuse a cache with an activation that differs from the model's own on this prompt; return its logits."""
        errors: dict[str, float] = {}
        calls = {**self.points.calls, **self.points.routers}

        def see(name: str, activation: Tensor) -> None:
            if name in calls:  # no cache has them
                self.activations[name] = activation
                return
            cached = capture.activation(name)
            expected = activation.to(cached).reshape(cached.shape)
            if cached.ndim == 4:  # a pattern: compare each of its queries
                cached = cached.transpose(1, 2)
                expected = expected.transpose(1, 2)
            if not cached.is_floating_point():  # indices of experts
                cached = cached.double()
                expected = expected.double()
            errors[name] = relative_error(cached, expected, capture.mask[:, capture.span(name)])

        logits = self._observe(see)
        for name, error in errors.items():
            if not error <= tolerance:
                raise InvalidInputError(
                    f"cache: it was made from another input, under other hooks, or with other weights: {name} differs "
                    f"from the model's own run of this prompt by {error:.1e}. Pass the tokens of the cache's run, in "
                    "the same order and padding, or leave `cache` out."
                )
        return logits


def _lengths(view: ModelView, prompt: Prompt, points: ModelPoints) -> dict[str, int]:
    """Return the number of positions of the first block's input; for an encoder–decoder, on either side."""
    encoder = prompt.encoder_length
    length = prompt.tokens.shape[1]
    if not encoder:
        return {points.blocks[0].resid_pre: length}
    return {points.blocks[0].resid_pre: encoder, points.blocks[view.encoder_layers].resid_pre: length - encoder}
