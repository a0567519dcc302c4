"""TensorLens (2026): the whole model as one affine map, collapsed to one score per source token."""

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

from torch import Tensor

from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models.protocol import LayerRange, Query, TokenLike
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.operator import logit_label
from tensorlens_tl.registry import register_method
from tensorlens_tl.results.attribution import Attribution

CollapseName = Literal["in_out", "norm", "target"]


def _collapses_onto_token(options: Mapping[str, Any]) -> bool:
    return options.get("collapse") in (None, "target") and options.get("direction") is None


@register_method("tensorlens", explains_prediction=_collapses_onto_token)
def tensorlens(
    frozen: FrozenPass,
    *,
    collapse: str | None = None,
    query: Query = -1,
    target: TokenLike = None,
    minus: TokenLike = None,
    direction: Tensor | None = None,
    layers: LayerRange = None,
    heads: Mapping[int, Collection[int]] | None = None,
    mlp: bool | Collection[int] = True,
    final_norm: bool = True,
    activation: str = "ratio",
    bias: str = "apart",
    probes: Any = None,
    tol: Any = None,
    rows: str = "gaussian",
    seed: int = 0,
    memory: Memory = None,
) -> Attribution:
    """The whole model's tensor ``T[i,:,j,:]``, collapsed by its norm, between input and output, or onto a target.

    Args:
        frozen: the pass.
        collapse: `"in_out"` (Eq. 22) and `"target"` (Eq. 24) are additive, `"norm"` (Eq. 21) is not. None is `"target"`
            where one is given, else `"in_out"`.
        query: positions, the last real token unless said; see `tensorlens_tl.passes.inputs.query_positions`.
        target, minus, direction: what `"target"` explains; see `FrozenOperator.target`.
        layers, heads, mlp, final_norm, activation: which operator; see `FrozenPass.operator`.
        bias: of the additive collapses: ``"apart"`` from the scores, as in the paper, or by ``"position"``; see
            `FrozenOperator.in_out`.
        probes, tol, rows, seed: estimate the norm; see `FrozenOperator.norm`.
        memory: what may be allocated beyond the result, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: an unknown collapse, a target without ``collapse="target"`` or the reverse, and what
            `FrozenPass.operator` and the collapses raise.
    """
    has_target = any(option is not None for option in (target, minus, direction))
    if collapse is None:
        collapse = "target" if has_target else "in_out"
    if collapse not in get_args(CollapseName):
        raise InvalidInputError(f"collapse={collapse!r}; use one of {', '.join(map(repr, get_args(CollapseName)))}.")
    if collapse != "target" and has_target:
        raise InvalidInputError(f"target, minus and direction belong to collapse='target'; leave {collapse!r} out.")
    if collapse == "norm" and bias != "apart":
        raise InvalidInputError(f"bias={bias!r}: the norm of T has no biases; use collapse='in_out' or 'target'.")
    if collapse != "norm" and (probes is not None or tol is not None):
        raise InvalidInputError(f"probes and tol belong to collapse='norm', not {collapse!r}.")
    operator = frozen.operator(layers=layers, heads=heads, mlp=mlp, final_norm=final_norm, activation=activation)
    if collapse == "norm":
        result = operator.norm(query, probes=probes, tol=tol, rows=rows, seed=seed, memory=memory)
        what = "norm of T"
    elif collapse == "in_out":
        result = operator.in_out(query, bias=bias, memory=memory)
        what = "squared norm of the output"
    else:
        result = operator.target(target, minus, query=query, direction=direction, bias=bias, memory=memory)
        what = "a direction" if direction is not None else logit_label(frozen.view, target, minus)
    if direction is not None or not operator.reaches_end:
        what += f" at {operator.end}"
    if operator.first:
        what += f", from blocks.{operator.first} input"
    if not operator.whole:
        what += ", heads or MLPs left out"
    options = {
        "collapse": collapse, "query": query, "target": target, "minus": minus, "direction": direction,
        "layers": layers, "heads": heads, "mlp": mlp, "final_norm": None if final_norm else False,
        "activation": activation, "bias": bias, "probes": probes, "tol": tol,
    }  # fmt: skip
    if probes or tol:
        options |= {"rows": rows, "seed": seed}
    return Attribution.of(
        frozen,
        result.scores,
        method="tensorlens",
        query=query,
        bias=result.bias,
        total=result.total,
        residual=result.residual,
        stderr=result.stderr,
        additive=result.total is not None,
        target=what,
        options={name: value for name, value in options.items() if value is not None},
    )
