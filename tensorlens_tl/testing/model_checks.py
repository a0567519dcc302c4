"""The conformance battery of models: is a frozen pass of this model what it says? (``tensorlens-tl verify``)

Freezing alone proves every block on its own input. This goes on where the proof ends: away from the input, through the
live model held by hooks, backwards by autograd, and in padded batches.

>>> from tensorlens_tl.testing import check_model, tiny_model
>>> report = check_model(tiny_model("bridge/gpt2"))
>>> max(report.errors.values()) < 1e-9
True
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.activation import RULES
from tensorlens_tl.errors import NumericalError, UnsupportedModelError
from tensorlens_tl.freezing import freeze
from tensorlens_tl.frozen import FrozenPass
from tensorlens_tl.testing.requirements import Untouched, difference, precision, same


@dataclass(frozen=True)
class ModelReport:
    """What was measured on a model that holds everything.

    Attributes:
        description: class and name.
        layouts: how each block is put together.
        errors: relative error by what was claimed: the proof of every part, then the claims about the whole.
        refused: what the model itself does not handle (padding on one side), in the library's own words.
        tolerance: what the errors of the whole had to stay within.
    """

    description: str
    layouts: list[str]
    errors: dict[str, float]
    refused: dict[str, str]
    tolerance: float


def check_model(
    model: Any, input: Any = None, *, tolerance: float | None = None, seed: int = 0, **options: Any
) -> ModelReport:
    """Put a model through everything that a frozen pass of it promises.

    Every block composed from its weights is the model's own; contributions and bias sum to the output; pull is the
    adjoint of push; the live model held by hooks is the same affine map far from the input, under every activation
    rule; autograd through it is `pull`; a batch equals its prompts, padded or not; and the model is left as it was.

    Args:
        model: any TransformerLens model, best in float64.
        input: one prompt or several; None takes two of random tokens.
        tolerance: largest relative error; None takes 1e-9, or a hundred times what the proof of its blocks measures
            where that is more (norms that compute in float32, models in half precision).
        seed: of random tokens and vectors.
        options: of `freeze`.

    Raises:
        UnsupportedModelError: the proof of a block fails; see `freeze` for this and its other errors.
        ConformanceError: the blocks are proved, but something about the whole does not hold; names it.
    """
    generator = torch.Generator().manual_seed(seed)
    if input is None:
        length = min(8, model.cfg.n_ctx)
        input = torch.randint(3, model.cfg.d_vocab, (2, length), generator=generator)
    with Untouched(model, type(model).__name__):
        frozen = freeze(model, input, **options)
        tolerance = precision(frozen) if tolerance is None else tolerance
        _ = frozen.unembedding_error  # measured only where somebody asks
        checks = _ModelChecks(frozen, tolerance, generator)
        checks.run()
    errors = {**frozen.errors, **checks.errors}
    return ModelReport(
        frozen.view.description, [layout.name for layout in frozen.layouts], errors, checks.refused, tolerance
    )


class _ModelChecks:
    def __init__(self, frozen: FrozenPass, tolerance: float, generator: torch.Generator) -> None:
        self.frozen, self.tolerance, self.generator = frozen, tolerance, generator
        self.who = frozen.view.description
        self.errors: dict[str, float] = {}
        self.refused: dict[str, str] = {}

    def run(self) -> None:
        self.whole()
        for rule in RULES:
            self.held(rule)
        self.backwards()
        self.one_by_one()
        for side in ("right", "left"):
            self.padding(side)

    def same(self, claim: str, mine: Tensor, theirs: Tensor) -> None:
        self.errors[claim] = same(mine.detach(), theirs.detach(), self.tolerance, f"{self.who}: {claim}")

    def draw(self, like: Tensor) -> Tensor:
        """As large as `like`, but not uniform: a uniform factor is invisible behind a norm."""
        noise = torch.randn(like.shape, generator=self.generator, dtype=torch.float64)
        size = float(like.detach().double().square().mean().sqrt())
        return noise.to(like) * (size or 1.0)

    def whole(self) -> None:
        op, real = self.frozen.operator(), self.frozen.mask
        made = op.contributions().sum(2) + op.bias
        self.same("contributions and bias are the model's output", made[real], op.output[real])
        x, g = self.draw(op.x), self.draw(op.x)
        forward, backward = (op.push(x) * g).sum((-2, -1)), (x * op.pull(g)).sum((-2, -1))
        size = (op.push(x) * g).abs().sum()
        self.same("pull is the adjoint of push", forward / size, backward / size)

    def held(self, rule: str) -> None:
        """The model, live and held by hooks, away from the input: it must be the operator."""
        op = self.frozen.operator(activation=rule)
        x, real = op.x + self.draw(op.x), self.frozen.mask
        with torch.no_grad():
            live = held_output(self.frozen, x, activation=rule)
        self.same(f"the model held by hooks is the operator ({rule})", live[real], op(x)[real])

    def backwards(self) -> None:
        op = self.frozen.operator()
        with torch.enable_grad():
            x = op.x.clone().requires_grad_(True)
            output = held_output(self.frozen, x)
            g = self.draw(op.x) * self.frozen.mask[..., None]
            (pulled,) = torch.autograd.grad(output, x, g)
        real = self.frozen.mask
        self.same("autograd through the held model is pull", pulled[real], op.pull(g)[real])

    def one_by_one(self) -> None:
        frozen = self.frozen
        if len(frozen.tokens) < 2 or not bool(frozen.mask.all()) or set(frozen.inputs) - {"input", "attention_mask"}:
            return
        alone = freeze(frozen.model, frozen.tokens[:1], tolerance=frozen.tolerance)
        mine, theirs = (f.operator().contributions() for f in (frozen, alone))
        self.same("a batch is its prompts one by one", mine[:1], theirs)

    def padding(self, side: str) -> None:
        """The first prompt beside a part of itself: refused, or what it is alone."""
        frozen, claim = self.frozen, f"padding on the {side} changes nothing"
        whole = frozen.tokens[0][frozen.mask[0]]
        kept = len(whole) // 2
        if not kept or set(frozen.inputs) - {"input", "attention_mask", "one_zero_attention_mask"}:
            return
        real = slice(0, kept) if side == "right" else slice(len(whole) - kept, len(whole))
        tokens = torch.stack([whole, torch.zeros_like(whole)])
        mask = torch.stack([torch.ones_like(whole), torch.zeros_like(whole)])
        tokens[1, real], mask[1, real] = whole[:kept], 1
        try:
            padded = freeze(frozen.model, tokens, attention_mask=mask, tolerance=frozen.tolerance)
        except (UnsupportedModelError, NumericalError) as refusal:
            self.refused[f"padding on the {side}"] = str(refusal)
            return
        alone = freeze(frozen.model, whole[None, :kept], tolerance=frozen.tolerance)
        if difference(padded.resid_pre(0)[1, real], alone.resid_pre(0)[0]) > 1e-3:
            self.refused[f"padding on the {side}"] = "positions are counted from the first column: another input"
            return
        mine, theirs = padded.operator().contributions()[1, real, real], alone.operator().contributions()[0]
        self.same(claim, mine, theirs)


def held_output(frozen: FrozenPass, x: Tensor, **options: Any) -> Tensor:
    """The output of the live model, held by a pass's hooks, with `x` put in place of the first block's input.

    Args:
        frozen: the pass.
        x: `[batch, pos, d_model]`.
        options: of `FrozenPass.fwd_hooks`.
    """
    seen: dict[str, Tensor] = {}
    points = frozen.points
    final = frozen.view.final_norm is not None and points.unembed_in is not None
    end = points.unembed_in if final and points.unembed_in is not None else points.last_output

    def put(live: Tensor, *, hook: Any) -> Tensor:
        return x

    def see(live: Tensor, *, hook: Any) -> None:
        seen["output"] = live

    hooks = [(points.blocks[0].resid_pre, put), *frozen.fwd_hooks(**options), (end, see)]
    frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
    return seen["output"]
