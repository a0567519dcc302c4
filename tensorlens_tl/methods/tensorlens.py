"""TensorLens (2026): the whole model as one affine map, collapsed to one score per source token."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, SupportsFloat, SupportsIndex

from tensorlens_tl._arguments import Seed, checked_arguments, formerly, whole_seed
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import (
    ONCE_ACTIVATION,
    Direction,
    FrozenRule,
    HeadChoice,
    LayerRange,
    MlpChoice,
    Query,
    TokenLike,
)
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.operator import FrozenOperator
from tensorlens_tl.passes.target import explained_tokens, logit_label, predicts_at
from tensorlens_tl.registry import register_method
from tensorlens_tl.results import Attribution

CollapseName = Literal["in_out", "norm", "target"]
Bias = Annotated[Literal["apart", "position"], "'apart' (not part of the scores) or 'position'"]
Tolerance = Annotated[SupportsFloat | None, "the relative standard error to reach, such as 0.05"]


def _collapses_onto_token(options: Mapping[str, Any]) -> bool:
    return options.get("collapse") in (None, "target") and options.get("direction") is None


def _runs(frozen: FrozenPass, options: Mapping[str, Any]) -> int:
    """Count the rows to pull: one per dimension for an exact norm, or one per probe; a pull costs as much as a run."""
    if options["collapse"] != "norm":
        return 1
    return int(options["probes"] or frozen.resid_pre(0).shape[-1])


@register_method("tensorlens", needs=(), explains_prediction=_collapses_onto_token, runs=_runs)
@formerly(ONCE_ACTIVATION)
@checked_arguments
def tensorlens(
    frozen: FrozenPass,
    *,
    collapse: CollapseName | None = None,
    query: Query = -1,
    target: TokenLike = None,
    minus: TokenLike = None,
    direction: Direction = None,
    layers: LayerRange = None,
    heads: HeadChoice = None,
    mlp: MlpChoice = True,
    final_norm: bool | None = None,
    rule: FrozenRule = "frozen",
    bias: Bias = "apart",
    probes: SupportsIndex | None = None,
    tol: Tolerance = None,
    rows: Literal["gaussian", "orthonormal"] = "gaussian",
    seed: Seed = 0,
    memory: Memory = None,
) -> Attribution:
    """Score what each token gives to a logit, or to the output vector, through the frozen model (TensorLens).

    The tensor ``T[i,:,j,:]`` of the whole model is collapsed onto a target, between input and output, or by its norm.

    Args:
        collapse: `"in_out"` (Eq. 22) and `"target"` (Eq. 24) are additive, `"norm"` (Eq. 21) is not. The default is
            `"target"`, or `"in_out"` if the model, the chosen part of it or a query predicts no token.
        target, minus, direction: what `"target"` explains, by default the model's first choice against its runner-up;
            see `FrozenOperator.target`.
        layers, heads, mlp, final_norm, rule: which operator; see `FrozenPass.operator`.
        bias: for the additive collapses: ``"apart"`` from the scores, as in the paper, or by ``"position"``; see
            `FrozenOperator.in_out`.
        probes, tol, rows, seed: estimate the norm; see `FrozenOperator.norm`. Estimates have standard errors.
        memory: how much may be allocated besides the result, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: an unknown collapse, a target without ``collapse="target"`` or the reverse, and what
            `FrozenPass.operator` and the collapses raise.

    >>> result = tlens.methods.tensorlens(frozen, target=" value", query=-1)
    >>> torch.allclose(result.scores.sum(-1) + result.bias, result.total, rtol=1e-3)
    True
    """
    estimate: dict[str, Any] = {"probes": probes, "tol": tol}
    has_target = any(option is not None for option in (target, minus, direction))
    operator = frozen.operator(layers=layers, heads=heads, mlp=mlp, final_norm=final_norm, rule=rule)
    positions = query_positions(frozen.prompt, query)
    predicts = operator.reaches_end and not frozen.view.untrained.head and predicts_at(frozen, positions)
    chosen = _collapse(collapse, has_target, predicts, estimate, bias)
    if chosen == "target" and direction is None:
        target, minus = explained_tokens(frozen, target, minus, positions)
    explained: dict[str, Any] = {"target": target, "minus": minus, "direction": direction}
    match chosen:
        case "norm":
            result = operator.norm(query, **estimate, rows=rows, seed=seed, memory=memory)
            label = "norm of T"
        case "in_out":
            result = operator.in_out(query, bias=bias, memory=memory)
            label = "squared norm of the output"
        case "target":
            result = operator.target(**explained, query=query, bias=bias, memory=memory)
            label = "a direction" if direction is not None else logit_label(frozen.view, target, minus)
    options = {
        "collapse": chosen, "query": query, **explained, "layers": layers, "heads": heads, "mlp": mlp,
        "final_norm": final_norm, "rule": rule, "bias": bias, **estimate,
    }  # fmt: skip
    if probes or tol:
        options |= {"rows": rows, "seed": whole_seed(seed)}
    return Attribution.of(
        frozen,
        result.scores,
        method="tensorlens",
        query=query,
        bias=result.bias,
        total=result.total,
        gap=result.gap,
        stderr=result.stderr,
        additive=result.total is not None,
        target=label + _of_part(operator, always=direction is not None),
        options={name: value for name, value in options.items() if value is not None},
    )


def _collapse(
    collapse: CollapseName | None, has_target: bool, predicts: bool, estimate: Mapping[str, Any], bias: Bias
) -> CollapseName:
    """Return the given collapse, or the one that the other options imply, checked against these options."""
    estimates = any(option is not None for option in estimate.values())
    if collapse is None:
        collapse = "target" if has_target or predicts else "in_out"
    if collapse != "target" and has_target:
        raise InvalidInputError(f"target, minus and direction belong to collapse='target'; leave {collapse!r} out.")
    if collapse == "norm" and bias != "apart":
        raise InvalidInputError(f"bias={bias!r}: the norm of T has no biases; use collapse='in_out' or 'target'.")
    if collapse != "norm" and estimates:
        raise InvalidInputError(f"probes and tol belong to collapse='norm', not {collapse!r}.")
    return collapse


def _of_part(operator: FrozenOperator, always: bool) -> str:
    """Describe which part of the model an operator is; its end only if that is not the model's, or `always`."""
    parts = []
    if always or not operator.reaches_end:
        parts.append(f" at {operator.end}")
    if operator.first:
        parts.append(f", from blocks.{operator.first} input")
    if not operator.whole:
        parts.append(", heads or MLPs left out")
    return "".join(parts)
