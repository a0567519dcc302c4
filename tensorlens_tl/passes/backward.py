"""Gradients of the live model under a rule: the model runs once, with each operation's gradient defined by the rule.

The run must reproduce the output of the pass, which is checked; one forward pass serves all queries, whose gradients
are rows of batched backward passes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra.memory import Memory, slices
from tensorlens_tl.algebra.numerics import refuse_nan, relative_error, relative_gap, upcast
from tensorlens_tl.core import SAME_VALUE, Rule, refuse_other_functions, ruled
from tensorlens_tl.errors import GapWarning, NumericalError, warn_caller
from tensorlens_tl.hooks import FwdHook, graph_of, in_this_thread
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.models.offload import saved_by_name
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.operator import Collapse
from tensorlens_tl.passes.target import resolve_target


def rule_scores(
    frozen: FrozenPass,
    rule: Rule,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    query: Query = -1,
    memory: Memory = None,
) -> Collapse:
    """Return x_j · ∂logit/∂x_j at the stream entering the first block, under a rule.

    The total is the logit before any soft cap. For an affine rule, the bias is what the model adds independently of any
    token, and scores and bias sum to the logit. Other rules have no bias: what no token receives (additive biases, and
    the part that a live softmax does not pass on) is the gap, abs(Σ scores − total) / Σ abs(scores).

    Args:
        rule: the rule for gradients.
        target, minus, query: see `FrozenOperator.target`.
        memory: the memory that backward passes of several queries may allocate at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: no target, several tokens, or a query out of range.
        UnsupportedModelError: the model predicts no tokens, or no rule covers one of its operations.
        FrozenModelError: the model has changed since the pass, or a frozen pass is attached.
        NumericalError: gradients are not finite; the run does not repeat the pass; the rule claims to be affine but its
            sum misses the logit; or, in a strict pass, gradients lose over a hundredth to half precision, which
            otherwise is a `GapWarning`.
    """
    positions = query_positions(frozen.prompt, query)
    readout = resolve_target(frozen, target, minus, positions=positions)
    frozen.live("a backward rule").check_hooks()
    x = frozen.resid_pre(0)
    real = torch.take_along_dim(frozen.mask, positions, dim=1)
    # leave any inference mode of the caller, as autograd does not accept its tensors
    with ExitStack() as stack, torch.inference_mode(False), torch.enable_grad():
        stack.enter_context(saved_by_name(frozen.model))
        leaf, one, outputs = run_under_rule(frozen, rule)
        refuse_other_functions(outputs)
        _check_run(frozen, outputs)
        constants = _of_constants(outputs, one) if one is not None and len(x) > 1 else None
        rows: list[Tensor] = []
        biases: list[Tensor] = []
        for cotangent in _at_output(frozen, rule, readout.vectors, positions, memory):
            row, *of_one = _pulled(outputs, [leaf] if one is None or len(x) > 1 else [leaf, one], cotangent)
            rows.append(row)
            biases += [given.expand(len(row))[:, None].to(row) for given in of_one]  # a zero where there is none
            if constants is not None:
                biases.append((upcast(cotangent) * upcast(constants)).sum((-1, -2)))

        def again(factor: float) -> list[Tensor | None]:
            of_target = _at_output(frozen, rule, factor * readout.vectors, positions, memory)
            return [_product(x, _pulled(outputs, [leaf], cotangent)[0]) for cotangent in of_target]

        note_rounding(frozen, [_product(x, row) for row in rows], again)
    gradient = torch.cat(rows).transpose(0, 1)
    refuse_nan(f"{frozen.view.description}: gradients", gradient)
    if not bool(torch.isfinite(gradient).all()):
        raise NumericalError(f"{frozen.view.description}: gradients are not finite; use float32 or float64.")
    scores = (upcast(x)[:, None] * gradient).sum(-1) * (real[:, :, None] & frozen.mask[:, None])
    explained = torch.take_along_dim(frozen.unembedded(), positions[..., None], dim=1)
    total = ((upcast(explained) * readout.vectors).sum(-1) + readout.constant) * real
    if not biases:
        gap = relative_gap(scores, torch.zeros_like(total), total)
        return Collapse(scores, total=total, gap=gap, soft_cap=frozen.view.soft_cap)
    of_head = (_given_by_head(frozen, rule, positions) * readout.vectors).sum(-1)
    bias = (torch.cat(biases).T + of_head + readout.constant) * real
    _refuse_broken_sum(frozen, scores, bias, total)
    return Collapse(scores, bias, total, relative_gap(scores, bias, total), soft_cap=frozen.view.soft_cap)


def run_under_rule(frozen: FrozenPass, rule: Rule | None) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Run the model again from the input of its first block, with gradients by a rule, or its own if `rule` is None.

    Returns:
        The input, and the 1 that all constants of an affine rule are multiplied by (the sources of the gradients); and
        the model's outputs, for an encoder–decoder those of both stacks.
    """
    leaf, entry = entering(frozen, frozen.resid_pre(0))
    with ruled(frozen.model, rule) as run:
        outputs = graph_of(frozen.model, frozen.inputs, _ends(frozen), entry)
    return leaf, None if run is None or run.ones is None else run.ones.leaf, outputs


def entering(frozen: FrozenPass, x: Float[Tensor, "row pos d_model"]) -> tuple[Tensor, list[FwdHook]]:
    """Return a source of gradients with these numbers, and hooks that make it the input of the first block(s)."""
    leaf = x.detach().clone().requires_grad_(True)  # weights may need no gradient
    parts = leaf.split(list(frozen.sides or (leaf.shape[1],)), dim=1)
    names = frozen.capture.stream_names(0)
    return leaf, [
        (name, in_this_thread(lambda stream, *, hook, part=part: part)) for name, part in zip(names, parts, strict=True)
    ]


def _product(x: Tensor, gradient: Float[Tensor, "row *any d"]) -> Float[Tensor, "row *any"]:
    return (upcast(x.detach()) * upcast(gradient)).sum(-1)


def _of_constants(outputs: Sequence[Tensor], one: Tensor) -> Float[Tensor, "batch pos d_model"]:
    """Return the effect of all constants of a run on its output: the derivative by the 1 that they are multiplied by.

    One backward pass over all prompts cannot separate the effects on each. This is a column of a Jacobian, while
    backward passes give rows: hence the derivative of a row by its cotangent.
    """
    weights = [torch.zeros_like(y, requires_grad=True) for y in outputs]
    (row,) = torch.autograd.grad(outputs, one, weights, create_graph=True, materialize_grads=True)
    if not row.requires_grad:
        return torch.cat([torch.zeros_like(y) for y in outputs], dim=1)
    return torch.cat(torch.autograd.grad(row, weights, retain_graph=True, materialize_grads=True), dim=1)


def _given_by_head(
    frozen: FrozenPass, rule: Rule, positions: Int[Tensor, "batch query"]
) -> Float[Tensor, "batch query d"] | float:
    """Return the contribution of a prediction head's biases at the queries."""
    head = frozen.prediction_head(rule.head)
    if head is None:
        return 0.0
    return torch.take_along_dim(upcast(head(torch.zeros_like(frozen.output))), positions[..., None], dim=1)


def _refuse_broken_sum(
    frozen: FrozenPass,
    scores: Float[Tensor, "batch query key"],
    bias: Float[Tensor, "batch query"],
    total: Float[Tensor, "batch query"],
) -> None:
    """Raise an error if the sum of an affine rule misses the logit; half precision only leads to a warning."""
    gap = relative_gap(scores, bias, total)
    if bool((gap <= frozen.allowed_gap).all()) or frozen.resid_pre(0).dtype.itemsize == 2:
        return
    worst = int(gap.nan_to_num(torch.inf).argmax())
    summed, number, missed = (float(of.flatten()[worst]) for of in (scores.sum(-1) + bias, total, gap))
    raise NumericalError(
        f"{frozen.view.description}: scores and bias of this rule sum to {summed:.6g}, but the model's number is "
        f"{number:.6g}: the gap is {missed:.1e} of their size, and the proof of this pass allows "
        f"{frozen.allowed_gap:.1e}. A rule with affine=True must pass on the whole value of every operation, as "
        "gradient times input plus `tensorlens_tl.core.constant`; otherwise leave out affine=True."
    )


FACTORS = (1.37, 1.61)
"""Factors of the target that reveal the rounding of its gradient; not powers of 2."""

NOTABLE = 1e-2
"""The largest relative rounding error of gradients without a warning."""


def note_rounding(
    frozen: FrozenPass, gradients: Sequence[Tensor | None], again: Callable[[float], Sequence[Tensor | None]]
) -> None:
    """Measure the rounding error of gradients in half precision, and warn if it exceeds a hundredth.

    A gradient is linear in its target: multiplying the target by a factor multiplies the gradient. Any difference is
    rounding in the backward pass; that of the forward pass comes on top of it and is not measured.

    Args:
        gradients: the gradients of the target, `[row, …]` each, or values linear in them.
        again: returns the same for the target times a factor.

    Raises:
        NumericalError: instead of the warning, if the pass was frozen with ``strict=True``.
    """
    dtype = frozen.resid_pre(0).dtype
    if dtype not in (torch.float16, torch.bfloat16):
        return
    lost = 0.0
    for factor in FACTORS:
        for first, second in zip(gradients, again(factor), strict=True):
            if first is not None and second is not None and first.numel():
                of_row = upcast(first).flatten(1)
                missed = (upcast(second).flatten(1) / factor - of_row).norm(dim=1)
                lost = max(lost, float((missed / of_row.norm(dim=1).clamp_min(torch.finfo(of_row.dtype).tiny)).max()))
    if lost <= NOTABLE:
        return
    message = (
        f"gradients of this {frozen.view.description} lose digits to {str(dtype).removeprefix('torch.')}: scaling the "
        f"target by {' or '.join(map(str, FACTORS))} changes the rescaled gradients by {lost:.1e} of their size, and "
        "the run itself was rounded, too. Load the model in float32."
    )
    if frozen.strict:
        raise NumericalError(message)
    warn_caller(message, GapWarning)


def _check_run(frozen: FrozenPass, outputs: list[Tensor]) -> None:
    """Refuse a run that does not repeat the pass: a rule may change gradients of operations, not their values."""
    expected = [frozen.activation(name) for name in _ends(frozen)]
    masks = frozen.mask.split([output.shape[1] for output in outputs], dim=1)
    error = max(relative_error(*ends) for ends in zip([y.detach() for y in outputs], expected, masks, strict=True))
    allowed = frozen.tolerance * frozen.n_layers  # errors of blocks add up
    if not error <= allowed:
        raise NumericalError(
            f"{frozen.view.description}: the run under a rule differs from the frozen pass by {error:.1e} (allowed "
            f"{allowed:.0e}). {SAME_VALUE} Otherwise, a hook changes activations, or the model is random."
        )


def _ends(frozen: FrozenPass) -> list[str]:
    """Return the points where the model ends, including the end of an encoder–decoder's encoder."""
    return [name for name in (frozen.points.encoder_output, frozen.points.output) if name is not None]


def _at_output(
    frozen: FrozenPass,
    rule: Rule,
    vectors: Float[Tensor, "batch query d"],
    positions: Int[Tensor, "batch query"],
    memory: Memory,
) -> Iterator[Float[Tensor, "row batch pos d_model"]]:
    """Yield the vectors of a target as gradients of the model's output, some queries at a time."""
    head = frozen.prediction_head(rule.head)
    x = frozen.resid_pre(0)
    heads = max(frozen.view.cfg.n_heads, 1) * x.shape[1] ** 2 * len(x) * x.element_size()
    queries = positions.shape[1]
    for chosen in slices(queries, 4 * (frozen.row_bytes + heads), memory if queries > 1 else None, "gradients"):
        sources = vectors[:, chosen].transpose(0, 1)[:, :, None]
        at = positions[:, chosen].T[:, :, None, None].expand_as(sources)
        cotangents = sources.new_zeros(len(sources), *x.shape[:2], sources.shape[-1]).scatter_(2, at, sources)
        yield cotangents if head is None else head.pull(cotangents)


def _pulled(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor], cotangent: Float[Tensor, "row batch pos d_model"]
) -> list[Tensor]:
    """Return the gradients of some leaves, a row for each cotangent, by one batched backward pass; keeps the graph."""
    parts = cotangent.split([y.shape[1] for y in outputs], dim=2)
    cotangents = [part.to(y) for part, y in zip(parts, outputs, strict=True)]
    given = torch.autograd.grad(
        outputs, leaves, cotangents, retain_graph=True, is_grads_batched=True, materialize_grads=True
    )
    return [*given]
