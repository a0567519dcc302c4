"""Freezing: one forward pass, checked before it runs and proved afterwards.

Arguments are checked first, then the model's structure, then the pass is run (or taken from a cache), then its
numbers; at the end come the proofs (`tensorlens_tl.passes.proof.blocks`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra import HeldScores
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.errors import InvalidInputError, TensorLensError, UnsupportedModelError
from tensorlens_tl.hooks import (
    FwdHook,
    ModelPoints,
    Passed,
    SomeLogits,
    StreamPoint,
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
from tensorlens_tl.models.lifecycle import WeightState, configuration, refuse_devices, refuse_dropout
from tensorlens_tl.passes.additions import with_additions
from tensorlens_tl.passes.attention_scores import PatternReader, refuse_unreadable
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.capture import Capture, HeldConfiguration
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
    readable_tokens,
    token_inputs,
)
from tensorlens_tl.passes.preflight import (
    check_dtype,
    check_growth,
    check_padding,
    check_repeats,
    check_shown_patterns,
    check_width,
    warn_of_ties,
)
from tensorlens_tl.passes.proof import SeenWrites, compared_positions, prove, sampled_positions
from tensorlens_tl.passes.readings import points_of, shared_view

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far a block's map may be from the block: the largest relative error of a token. A wrong reading of the
weights misses by far more. A float64 model whose norms compute in float32 (`ModelView.norms_in_float32`) is held to
what float32 allows: it loses some 1e-7 there, and a sublayer whose terms cancel a hundred times that."""


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

    User-installed hooks on the model run as well, and what they change is part of the pass: where the algebra cannot
    follow, the proof fails and says so. They are left on, and named in the pass's `other_hooks` and in every result's
    provenance. Vectors that they add to the residual stream (steering) are constants of the pass, named by hook point.
    Hooks put on or taken off later do not change a pass; ``attached()`` runs with those that are there.

    Args:
        model: a HookedTransformer, HookedEncoder or HookedEncoderDecoder (TransformerLens 3.9), or a TransformerBridge
            (3.9 and 4.x).
        input: a string or several (a list, an array, a column of a data frame); or token ids, as a tensor
            `[batch, pos]` or `[pos]`, or as lists, which may differ in length; or the messages of a chat,
            ``[{"role": "user", "content": "Hello"}]``, or a list of chats, as the tokenizer's chat template renders
            them up to the beginning of the answer; or what a tokenizer or processor returns, a mapping with
            `input_ids`. Of a model that reads images or sound, the values that it reads: pixels
            `[batch, channel, height, width]`, a spectrogram `[batch, time, mel]` or samples `[batch, sample]`.
        attention_mask: 1 at real tokens, `[batch, pos]`; with token ids of equal length only.
        token_type_ids: segment ids for BERT-like models.
        decoder_input_ids: what the decoder of an encoder–decoder reads, as text or token ids; its positions follow
            those of the input in every result. Start it with the token that the model's decoder starts with.
        decoder_attention_mask: 1 at its real tokens.
        prepend_bos: as in TransformerLens; a string that begins with the BOS token gets no second one. Left out, an
            encoder's text has all special tokens that its checkpoint's own tokenizer puts around it.
        padding_side: ``"left"`` or ``"right"`` (the default, whatever the tokenizer says), where prompts differ in
            length. Padded on the left, a model that counts positions from the first column (BART, Marian, Pegasus, a
            HookedEncoder) computes something else than for each prompt by itself, and that is what is explained.
        model_inputs: what a multimodal model takes besides its tokens, by the names of its forward:
            ``{"pixel_values": ...}``.
        cache: the ActivationCache of an earlier ``run_with_cache`` on the same input; a copy is stored instead of this
            run's activations, and each of them is compared with this run's.
        store: ``"cpu"`` keeps the captured activations off the model's device.
        patterns: ``"recompute"`` keeps queries and keys instead of attention patterns, so that memory grows with the
            prompt's length and not with its square: a layer's pattern is recomputed, a few queries at a time, when it
            is used. Every one is compared with the model's own while the pass runs.
        verify: True proves every block against the model's own output at every token; products of plain blocks whose
            result the model shows are compared on random vectors (`tensorlens_tl.passes.proof.projected`), which
            overlooks an error with a probability of 1e-7. ``"sample"`` proves every block at up to 8 tokens of each
            prompt, among them its last one (``proof.positions`` of the pass): this detects a part that is read wrongly,
            and no activation that was changed at another token. Blocks with whitening or a mixer in place of
            attention, and those of encoder–decoders, are proved at every token all the same. False proves only the
            first block of each kind, at the same tokens.
        tolerance: largest relative error that a block may show in its output, and every head, neuron and sublayer in
            what it gives; None takes `TOLERANCE` for the model's dtype.
        strict: whether a sum that is further from the model's number than its proof allows (`allowed_gap` of the
            pass) raises `NumericalError` instead of a `GapWarning`.
        query: positions whose logits will be asked for, as in `FrozenOperator.target`. Before a logit is explained it
            is compared with the model's own at that position: of this run at each prompt's last token, at these
            positions, and of a masked language model at the first token and at every mask; at any other, by one more
            run when it is first asked for.

    Raises:
        InvalidInputError: an input that is empty, longer than the context or outside the vocabulary, or shapes that
            differ; a model in train mode whose dropout is active; a cache of another prompt, other weights or other
            hooks.
        FrozenModelError: inside ``with frozen.attached()``, where the run would not be the model's own.
        UnsupportedModelError: the model has a part that no known map reproduces, a block's proof fails, or its blocks
            run in a loop.
        NumericalError: NaN or Inf in an activation.

    Warns (`UntrainedWarning`) where the model's checkpoint lacks weights of its embeddings or blocks.

    >>> frozen = tlens.freeze(model, ["Return the value.", "Return the"])
    >>> frozen.tokens.shape, frozen.mask.sum(1)
    (torch.Size([2, 5]), tensor([5, 3]))
    >>> max(frozen.errors.values()) < frozen.tolerance
    True
    """
    options = FreezeOptions(store, patterns, verify, tolerance, bool(strict), query)
    if patterns == "recompute" and cache is not None:
        raise InvalidInputError("cache: patterns='recompute' sees patterns while the model runs; leave one out.")
    # activations must be usable with gradients later, also when the caller is in inference mode
    with torch.inference_mode(False), torch.no_grad():
        view = ModelView(model)
        weights: WeightState | None = None
        with unheld_run(view.model):
            refuse_dropout(view.model)
            refuse_devices(view.model)
            refuse_attached(view.model)
            if verify:  # without proof nothing would notice a weight that changed unseen since the model was read
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
    """What `freeze` takes besides the model and its input; see there.

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
        tolerance = self.tolerance
        if tolerance is not None and (not isinstance(tolerance, int | float) or not tolerance > 0):
            raise InvalidInputError(f"tolerance={tolerance!r}; pass a positive number, or None for the dtype's own.")
        if not isinstance(self.verify, bool) and self.verify != "sample":
            raise InvalidInputError(
                f"verify={self.verify!r}; use True (every block at every token), 'sample' (every block at a few "
                "tokens) or False (the first block of each kind)."
            )

    def tolerance_of(self, view: ModelView, dtype: torch.dtype) -> float:
        """The given tolerance, or the default of the narrowest dtype that a model with this stream computes in."""
        if self.tolerance is not None:
            return self.tolerance
        return TOLERANCE.get(torch.float32 if view.norms_in_float32 else dtype, 1e-4)


def freeze_changed(frozen: FrozenPass, inputs: Mapping[str, Any], hooks: Sequence[FwdHook] = ()) -> FrozenPass:
    """A pass of the same model and positions with other inputs, or with hooks that change them.

    Args:
        frozen: the pass whose prompts, padding and tolerance it takes.
        inputs: the model's keyword arguments.
        hooks: stand on the model while it runs, and are no part of it afterwards.

    Raises:
        FrozenModelError: the model is no longer that of the pass, be it by hooks that were put on it or taken off
            since; or a frozen pass is attached.
        InvalidInputError: the model is in train mode since, and its dropout is active.
        UnsupportedModelError: the model gives each head a copy of the stream since.
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
        return _freeze(frozen.view, prompt, options, None, hooked=bool(hooks))


def _freeze(
    view: ModelView,
    prompt: Prompt,
    options: FreezeOptions,
    cache: CacheLike,
    *,
    hooked: bool = False,
    weights: WeightState | None = None,
) -> FrozenPass:
    """Capture, check and prove one pass, in this order; its logits are compared at some positions.

    Args:
        view, prompt, options, cache: as of `freeze`.
        hooked: whether hooks change what enters.
        weights: what the model's weights were as it was read, just now; None where that is not known.
    """
    allowed = partial(options.tolerance_of, view)
    points = points_of(view)
    compared = compared_positions(view, prompt, options.query)
    stream_hooks = hooked_stream_points(view, points)
    hooked = hooked or bool(stream_hooks)
    if hooked and prompt.class_at is None:  # who runs the model again runs it without these hooks
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
    check_finite({name: run.activations[name] for name in points.captured if name in run.activations})
    capture = with_additions(capture, run.passed)
    maps = BlockMaps(capture, tolerance)
    proof = prove(maps, bool(options.verify), run.writes, run.sampled)
    warn_of_ties(capture, {name: run.activations.pop(name) for name in points.routers if name in run.activations})
    frozen = FrozenPass(replace(maps, layouts=proof.layouts), proof, options.strict)
    if points.unembed_in is not None:
        frozen.logits_check.postpone(run.compared.of(logits), compared)
        if hooked or options.query is not None:  # so many logits are not stored
            frozen.logits_check.catch_up(capture, frozen.unembedded())
    if cache is None:
        check_repeats(capture, tolerance)
    return frozen


class _Run:
    """The model's run on a prompt, and what is read while it runs.

    Attributes:
        activations: by hook-point name.
        sampled: the positions that blocks are proved at; None for every one.
        writes: what the proof compares.
        reader: reads patterns where they are recomputed.
        compared: the logits that are compared with those of the weights.
        hooked: the points of the residual stream that user-installed hooks are on.
        passed: what went through them.
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
        """What each pattern is recomputed from."""
        return {} if self.reader is None else self.reader.scores

    def observe(self) -> Any:
        """Run the model once, read what the pass keeps and what the proof compares, and return its logits.

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
        """Hold an activation, or what a pattern is recomputed from."""
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
        """Why the model cannot run, where that is known."""
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
        """Refuse a cache with an activation that the model itself does not have on this prompt; returns its logits."""
        errors: dict[str, float] = {}
        calls = {**self.points.calls, **self.points.routers}

        def see(name: str, activation: Tensor) -> None:
            if name in calls:  # no cache has them
                self.activations[name] = activation
                return
            cached = capture.activation(name)
            expected = activation.to(cached).reshape(cached.shape)
            if cached.ndim == 4:  # a pattern: each of its queries is compared
                cached = cached.transpose(1, 2)
                expected = expected.transpose(1, 2)
            if not cached.is_floating_point():  # which experts tokens are sent to
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
    """How many positions the input of the first block has; of an encoder–decoder, of the first block on either side."""
    encoder = prompt.encoder_length
    length = prompt.tokens.shape[1]
    if not encoder:
        return {points.blocks[0].resid_pre: length}
    return {points.blocks[0].resid_pre: encoder, points.blocks[view.encoder_layers].resid_pre: length - encoder}
