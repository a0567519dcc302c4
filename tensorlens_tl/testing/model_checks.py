"""The conformance battery of models: is a frozen pass of this model what it says? (``tensorlens-tl verify``)

Freezing alone proves every block on its own input. This goes on where the proof ends: away from the input, through the
live model held by hooks, backwards by autograd, and in padded batches.

>>> from tensorlens_tl.testing import check_model, tiny_model
>>> report = check_model(tiny_model("bridge/gpt2"))
>>> max(report.errors.values()) < 1e-9
True
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.classifiers import classifier_logits, loader_of, random_tokens, rows_of
from tensorlens_tl.errors import ConformanceError, NumericalError, UnsupportedModelError
from tensorlens_tl.hooks import run
from tensorlens_tl.models import FROZEN_RULES, FrozenRule, ModelLike, ModelView
from tensorlens_tl.passes import TOLERANCE, FrozenPass, freeze
from tensorlens_tl.passes.inputs import InputLike, token_rows
from tensorlens_tl.testing.models import labelled, random_input, tiny_input
from tensorlens_tl.testing.requirements import (
    ROUNDING,
    Check,
    Side,
    Untouched,
    activation_change,
    checks_of,
    difference,
    frozen_rows,
    precision,
    real_positions,
    require,
    same,
    untouched,
)


@dataclass(frozen=True)
class ModelReport:
    """What was measured on a model that passes every check.

    Attributes:
        description: class and name.
        layouts: how each block is put together.
        errors: relative errors: the proof of every part, then the claims about the whole.
        refused: what the model itself does not handle (padding on one side), with the library's message.
        tolerance: of the errors of the whole.
    """

    description: str
    layouts: list[str]
    errors: dict[str, float]
    refused: dict[str, str]
    tolerance: float


def check_model(
    model: ModelLike, input: InputLike | None = None, *, tolerance: float | None = None, seed: int = 0, **options: Any
) -> ModelReport:
    """Put a model through everything that a frozen pass of it promises: all of `MODEL_CHECKS`.

    Every block composed from its weights is the model's own; contributions and bias sum to the output; pull is the
    adjoint of push; the live model frozen by hooks is the same affine map far from the input, under every activation
    rule; autograd through it is `pull`; a batch equals its prompts, padded or not, as far as the model's own
    activations do; and the model is left as it was.

    Args:
        model: any TransformerLens model, best in float64.
        input: one prompt or several; None takes two of random tokens, or images or sounds where the model reads those.
        tolerance: largest relative error; None takes 1e-9, or a hundred times what the proof of its blocks measures
            where that is more (norms that compute in float32, models in half precision).
        seed: of random tokens and vectors.
        options: of `freeze`.

    Raises:
        UnsupportedModelError: the proof of a block fails; see `freeze` for this and its other errors.
        ConformanceError: the blocks are proved, but something about the whole does not hold; names it.
    """
    with Untouched(model, type(model).__name__):
        case = ModelCase(model, input, tolerance, seed, options)
        for check in MODEL_CHECKS:
            check(case)
    frozen = case.frozen
    layouts = [layout.name for layout in frozen.layouts]
    return ModelReport(frozen.view.description, layouts, {**frozen.errors, **case.errors}, case.refused, case.tolerance)


def model_checks(
    model: ModelLike | str,
    input: InputLike | None = None,
    *,
    tolerance: float | None = None,
    seed: int = 0,
    **options: Any,
) -> list[Check]:
    """The checks of `check_model`, one by one, for `parametrize_with_checks`; `model` may be one of `model_names()`.

    >>> from tensorlens_tl.testing import model_checks
    >>> [check.name for check in model_checks("bridge/gpt2")][:2]
    ['bridge/gpt2: proofs', 'bridge/gpt2: completeness']
    """
    label, build = labelled(model)

    def case() -> ModelCase:
        return ModelCase(build(), input, tolerance, seed, options)

    return checks_of(MODEL_CHECKS, case, label, untouched)


class ModelCase:
    """A model and a pass of it; what is measured is collected."""

    def __init__(
        self, model: ModelLike, input: InputLike | None, tolerance: float | None, seed: int, options: dict[str, Any]
    ) -> None:
        self.model = model
        self.who = type(model).__name__
        self._tolerance = tolerance
        self.options: dict[str, Any] = dict(options)
        self.generator = torch.Generator().manual_seed(seed)
        if input is None:
            input = random_input(model, 8, self.generator)
        view: ModelView = ModelView(model)
        if view.is_encoder_decoder and "decoder_input_ids" not in options:
            self.options |= tiny_input(model, len(token_rows(view, input)), seed=seed)[1]
        self.input = input
        self.errors: dict[str, float] = {}
        self.refused: dict[str, str] = {}

    @cached_property
    def frozen(self) -> FrozenPass:
        """The pass that is checked."""
        options: dict[str, Any] = self.options
        return freeze(self.model, self.input, **options)

    @cached_property
    def tolerance(self) -> float:
        """What errors must stay within."""
        if self._tolerance is None:
            return precision(self.frozen)
        return self._tolerance

    def same(self, claim: str, mine: Tensor, theirs: Tensor, at_least: float = 0.0) -> None:
        """Raise unless both agree; note by how much they do not."""
        allowed = max(self.tolerance, at_least)
        what = f"{self.frozen.view.description}: {claim}"
        self.errors[claim] = same(mine.detach(), theirs.detach(), allowed, what)

    def draw(self, like: Tensor) -> Tensor:
        """As large as `like`, but not uniform: a uniform factor is invisible behind a norm."""
        noise = torch.randn(like.shape, generator=self.generator, dtype=torch.float64)
        size = float(like.detach().double().square().mean().sqrt())
        return noise.to(like) * (size or 1.0)


def check_proofs(case: ModelCase) -> None:
    """Every block, what follows the last, and the unembedding are what the weights say."""
    _ = case.frozen.unembedding_error  # measured when it is first read


def check_completeness(case: ModelCase) -> None:
    """Contributions and bias are the model's output."""
    op = case.frozen.operator()
    real = case.frozen.mask
    output = op.contributions().sum(2) + op.bias
    case.same("contributions and bias sum to the model's output", output[real], op.output[real])


def check_adjoint(case: ModelCase) -> None:
    """Pull is the adjoint of push."""
    op = case.frozen.operator()
    x = case.draw(op.x)
    g = case.draw(op.x)
    pushed = op.push(x) * g
    forward = pushed.sum((-2, -1))
    backward = (x * op.pull(g)).sum((-2, -1))
    size = pushed.abs().sum()
    case.same("pull is the adjoint of push", forward / size, backward / size)


def _held_by(rule: FrozenRule) -> Callable[[ModelCase], None]:
    """The model, live and held by hooks, away from the input: it must be the operator."""

    def check(case: ModelCase) -> None:
        op = case.frozen.operator(rule=rule)
        x = op.x + case.draw(op.x)
        real = case.frozen.mask
        with torch.no_grad():
            live = held_output(case.frozen, x, rule=rule)
        case.same(f"the hook-frozen model equals the operator ({rule})", live[real], op(x)[real])

    check.__name__ = f"check_held_by_hooks_{rule}"
    return check


def check_autograd(case: ModelCase) -> None:
    """Autograd through the hook-frozen model equals pull."""
    op = case.frozen.operator()
    real = case.frozen.mask
    with torch.enable_grad():
        x = op.x.clone().requires_grad_(True)
        output = held_output(case.frozen, x)
        g = case.draw(op.x) * real[..., None]
        (pulled,) = torch.autograd.grad(output, x, g)
    case.same("autograd through the frozen model equals pull", pulled[real], op.pull(g)[real])


PLAIN = {"input", "attention_mask", "one_zero_attention_mask", "decoder_input_ids", "decoder_attention_mask"}
"""The inputs of a model that can be cut to fewer prompts and fewer tokens."""


def check_one_by_one(case: ModelCase) -> None:
    """A batch is its prompts one by one."""
    frozen = case.frozen
    if len(frozen.tokens) < 2 or not bool(frozen.mask.all()) or set(frozen.inputs) - PLAIN:
        return
    alone = freeze(frozen.model, **frozen.prompt.again(slice(0, 1)), tolerance=frozen.tolerance)
    mine, theirs = (f.operator().contributions() for f in (frozen, alone))
    case.same("a batch equals its prompts run one by one", mine[:1], theirs)


def check_padding_on_the_right(case: ModelCase) -> None:
    """The first prompt beside a part of itself, padded on the right: refused, or what it is alone."""
    _padding(case, "right")


def check_padding_on_the_left(case: ModelCase) -> None:
    """The same, padded on the left."""
    _padding(case, "left")


def _padding(case: ModelCase, side: Side) -> None:
    frozen = case.frozen
    claim = f"padding on the {side} changes nothing"
    real = frozen.mask[0].cpu()
    whole = frozen.tokens[0][real]
    encoder = int(real[: frozen.prompt.encoder_length].sum())
    sizes = [encoder, len(whole) - encoder] if encoder else [len(whole)]
    halves = [size // 2 for size in sizes]
    if not all(halves) or frozen.view.reads != "tokens" or set(frozen.inputs) - PLAIN:
        return
    short = whole[real_positions(sizes, halves, "right")]
    padded_at = real_positions(sizes, halves, side)
    tokens = torch.stack([whole, torch.zeros_like(whole)])
    tokens[1, padded_at] = short
    mask = torch.stack([torch.ones_like(whole), padded_at.to(whole)])
    try:
        padded = frozen_rows(frozen.model, tokens, encoder, mask, tolerance=frozen.tolerance)
    except (UnsupportedModelError, NumericalError) as refusal:
        case.refused[f"padding on the {side}"] = str(refusal)
        return
    alone = frozen_rows(frozen.model, short[None], encoder // 2, tolerance=frozen.tolerance)
    if difference(padded.resid_pre(0)[1, padded_at], alone.resid_pre(0)[0]) > 1e-3:
        case.refused[f"padding on the {side}"] = "positions are counted from the first column: another input"
        return
    change = activation_change(padded, 1, padded_at, alone)
    who = frozen.view.description
    require(change <= frozen.tolerance, f"{who}: {claim} (the model's own activations change by {change:.1e}).")
    mine = padded.operator().contributions()[1, padded_at][:, padded_at]
    theirs = alone.operator().contributions()[0]
    case.same(claim, mine, theirs, at_least=ROUNDING * change)


MODEL_CHECKS: Sequence[Callable[[ModelCase], None]] = (
    check_proofs,
    check_completeness,
    check_adjoint,
    *map(_held_by, FROZEN_RULES),
    check_autograd,
    check_one_by_one,
    check_padding_on_the_right,
    check_padding_on_the_left,
)
"""Everything a frozen pass of a model must hold."""


def held_output(frozen: FrozenPass, x: Tensor, **options: Any) -> Tensor:
    """Return the last block's output of the live model with a pass's hooks and `x` as the first block's input.

    Both are `[batch, pos, d_model]`, an encoder–decoder's sides one after the other. `options` are those of
    `FrozenPass.fwd_hooks`.
    """
    outputs: dict[str, Tensor] = {}
    points = frozen.points
    _, stop = frozen.capture.side(0)
    sides = [x]
    if frozen.sides is not None:
        sides = [x[:, :stop], x[:, stop:]]
    ends = [name for name in (points.encoder_output, points.output) if name is not None]

    def put(value: Tensor) -> Callable[..., Tensor]:
        return lambda live, *, hook: value

    def see(name: str) -> Callable[..., None]:
        return lambda live, *, hook: outputs.update({name: live})

    placed = [(name, put(value)) for name, value in zip(frozen.capture.stream_names(0), sides, strict=True)]
    run(frozen.model, frozen.inputs, [*placed, *frozen.fwd_hooks(**options), *((name, see(name)) for name in ends)])
    return torch.cat([outputs[name] for name in ends], dim=1)


TOKENS = 8
"""How many random tokens the two models are compared on."""


def check_checkpoint(model: ModelLike, *, seed: int = 0) -> float | None:
    """Compare a model's logits with those of the model that Hugging Face loads from its folder, or the hub's cache.

    Both models are in memory meanwhile.

    Args:
        model: a TransformerBridge of a checkpoint, unchanged since it was loaded.
        seed: of the random tokens.

    Returns:
        The largest difference, as a share of the largest logit. None where nothing can be compared: no Bridge, no
        tokens, no checkpoint (or one that Hugging Face alone cannot read), or a checkpoint without the model's head.

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
