"""Norms of the frozen operator, and bounds on its distance from the live model at another input.

`spectral_norm` and `singular_directions` measure the operator. `norm_bound` (ours) derives a bound from the algebra:
‖a·b‖ ≤ ‖a‖‖b‖, ‖a + b‖ ≤ ‖a‖ + ‖b‖, a norm contributes max abs(gain) / min σ, a frozen activation its largest ratio,
attention the spectral norm of its patterns. `spectral_norm_bound` is the paper's (TensorLens, Eqs. 31 to 35), which
bounds a pattern by √L and sums over heads.

`frozen_error_bound` is TensorLens' bound of the error (Proposition 1, Eq. 25), from ‖T‖₂ and the live model's change.
`error_bound` (ours) goes layer by layer: with x_l the live stream at block l and A_l the frozen block, live and frozen
model differ by exactly Σ_l T_{L…l+1}(x_{l+1} − A_l(x_l)), so by no more than Σ_l (Π_{m>l} ‖A_m‖) ‖x_{l+1} − A_l(x_l)‖.
Which of the two is tighter depends on the input: far from the pass's input, it is often Proposition 1.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import Number, Seed, checked_names, formerly, real_number, whole_number
from tensorlens_tl.algebra import AffineMap, Norm
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.arguments import MapLike, OperatorLike, Whole
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.hooks import capture, replace
from tensorlens_tl.models import ONCE_ACTIVATION, FrozenRule, Place, Query, require_attention_alone
from tensorlens_tl.passes import FrozenPass, PassLike, check_pass
from tensorlens_tl.passes.inputs import one_query
from tensorlens_tl.passes.operator import FrozenOperator

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

# ------------------------------------------------------------------ singular values


@checked_names
def as_scipy(op: OperatorLike) -> "LinearOperator":
    """Return the operator's linear part as a scipy `LinearOperator` on ``pos · d_model`` numbers.

    Any matrix-free method can use it. Needs scipy (extra ``spectral``).

    Raises:
        InvalidInputError: the pass has several prompts.

    >>> tlens.circuits.as_scipy(frozen.operator()).shape  # 7 tokens of 128 numbers
    (896, 896)
    """
    from scipy.sparse.linalg import LinearOperator

    one_prompt(op)
    size = op.x[0].numel()
    shape = op.x[0].shape
    real = op.frozen.mask[..., None]

    def through(move: Any) -> Any:
        def columns(x: Any) -> Any:
            rows = torch.as_tensor(x.reshape(size, -1).T.copy()).to(op.x).reshape(-1, 1, *shape)
            moved = upcast(move(rows * real) * real)  # padding neither contributes nor receives
            return moved.reshape(len(rows), size).T.cpu().numpy().reshape(x.shape)

        return columns

    push = through(op.push)
    pull = through(op.pull)
    dtype = upcast(op.x[:0]).cpu().numpy().dtype
    # one function serves a vector and a matrix of columns alike, for which scipy has separate names
    return LinearOperator((size, size), dtype=dtype, matvec=push, rmatvec=pull, matmat=push, rmatmat=pull)  # pyright: ignore[reportCallIssue]


@checked_names
def spectral_norm(op: OperatorLike, *, tol: Number = 1e-6, seed: Seed = 0) -> float:
    """Compute ‖T‖₂, the largest singular value, by Lanczos iteration on push and pull.

    The result is attained by a vector, so it is a lower estimate, whose convergence `tol` controls. Needs scipy.

    Args:
        op: the operator of one prompt.
        tol: the relative accuracy at which the Lanczos iteration stops.
        seed: the seed of its starting vector.

    Raises:
        InvalidInputError: several prompts, or a tolerance that is not positive.

    >>> tlens.circuits.spectral_norm(frozen.operator()) > tlens.circuits.spectral_norm(frozen.operator(layers=[3]))
    True
    """
    tol = real_number("tol", tol, lambda x: x > 0, "pass a positive number")
    import numpy as np
    from scipy.sparse import linalg

    matrix = as_scipy(op)
    start = np.random.default_rng(abs(seed)).standard_normal(matrix.shape[0]).astype(matrix.dtype)
    svds: Any = linalg.svds  # its type stubs lack the starting vector
    _, values, _ = svds(matrix, k=1, tol=tol, v0=start)
    return float(values[0])


@dataclass(frozen=True, eq=False)
class Directions:
    """The leading singular directions of ``T[query, :, key, :]``, largest first.

    Attributes:
        values: `[k]`.
        written: unit vectors at the query's output, `[k, d_out]`.
        read: unit vectors at the key's input, `[k, d_in]`: ``T[query, :, key, :] · read[n] = values[n] · written[n]``.
    """

    values: Float[Tensor, "k"]
    written: Float[Tensor, "k d_out"]
    read: Float[Tensor, "k d_in"]


@checked_names
def singular_directions(op: OperatorLike, query: Query = -1, key: Query = 0, *, k: Whole = 5) -> Directions:
    """Find the directions of one token on which another token's output depends most, exactly, with `d_model` pulls.

    Args:
        op: the operator of one prompt.
        query, key: one position each; see `tensorlens_tl.passes.inputs.query_positions`.
        k: the number of directions; d_model at most.

    Raises:
        InvalidInputError: several prompts, a position out of range, or k outside 1 … d_model.

    >>> tlens.circuits.singular_directions(frozen.operator(), key=2, k=3).values.shape
    torch.Size([3])
    """
    one_prompt(op)
    k = whole_number("k", k, 1, op.x.shape[-1])
    position = one_query(op.frozen.prompt, key, "key")
    block = op.slice(query, keys=position[0])[0, :, 0]
    left, values, right = torch.linalg.svd(upcast(block))
    return Directions(values[:k], left.T[:k], right[:k])


def one_prompt(op: Any) -> None:
    """Raise `InvalidInputError` unless the argument is an operator of one prompt."""
    if not isinstance(op, FrozenOperator):
        raise InvalidInputError(f"an operator is needed, got {type(op).__name__}: pass frozen.operator().")
    if len(op.x) != 1:
        raise InvalidInputError(f"the pass has {len(op.x)} prompts, each with an operator of its own; freeze one.")


# ------------------------------------------------------------------ bounds


@checked_names
def norm_bound(m: MapLike) -> float:
    """Return an upper bound of ‖linear part‖₂ of a map or an operator, from the bounds of its parts.

    Raises:
        InvalidInputError: neither a map nor an operator.

    >>> op = frozen.operator()
    >>> tlens.circuits.spectral_norm(op) <= tlens.circuits.norm_bound(op)
    True
    """
    if isinstance(m, FrozenOperator):
        m = m.map
    if not isinstance(m, AffineMap):
        raise InvalidInputError(f"norm_bound: {type(m).__name__} is neither a map nor an operator.")
    return m.norm_bound()


@dataclass(frozen=True)
class ErrorBound:
    """The frozen model's distance from the live one at another input, and a bound of it.

    Attributes:
        error: ‖live output − frozen output‖, measured.
        bound: Σ amplification · local, never below the error.
        local: the error that each stage adds on the live stream, ‖x_{l+1} − A_l(x_l)‖: the blocks, and the final norm.
        amplification: the most by which the later stages can amplify each of these.
    """

    error: float
    bound: float
    local: list[float]
    amplification: list[float]


@formerly(ONCE_ACTIVATION)
@checked_names
def error_bound(frozen: PassLike, x: Float[Tensor, "batch pos d_model"], *, rule: FrozenRule = "frozen") -> ErrorBound:
    """Measure and bound the distance between the frozen operator and the live model at `x`, layer by layer.

    Args:
        frozen: a pass of one prompt.
        x: another input of ``blocks.0``, `[1, pos, d_model]`.
        rule: the rule of the frozen MLPs.

    Raises:
        InvalidInputError: several prompts, or a shape that is not the pass's.

    >>> bound = tlens.circuits.error_bound(frozen, frozen.resid_pre(0) * 1.01)
    >>> bound.error <= bound.bound
    True
    """
    op, x = _other_input(frozen, x, rule)
    stages: list[AffineMap] = [frozen.maps.block_map(layer, rule=rule) for layer in range(frozen.n_layers)]
    names = [frozen.capture.output_name(layer) for layer in range(frozen.n_layers)]
    final = frozen.maps.final_norm()
    end = frozen.points.output
    if final is not None and end is not None:
        stages.append(final)
        names.append(end)
    activations = _live(frozen, x, names)
    live = [x, *(activations[name].to(x) for name in names)]
    real = frozen.mask[..., None]
    steps = zip(stages, pairwise(live), strict=True)
    local = [float(upcast((after - stage(before)) * real).norm()) for stage, (before, after) in steps]
    bounds = [norm_bound(stage) for stage in stages]
    amplification = [1.0]
    for bound in reversed(bounds[1:]):
        amplification.append(amplification[-1] * bound)
    amplification.reverse()
    # an error of exactly zero stays zero, whatever the amplification
    total = sum((factor * error for factor, error in zip(amplification, local, strict=True) if error), start=0.0)
    return ErrorBound(float(upcast((live[-1] - op(x)) * real).norm()), total, local, amplification)


@dataclass(frozen=True)
class FrozenErrorBound:
    """Proposition 1 of TensorLens at one other input X + ε.

    Attributes:
        error: ‖T_X(X + ε) − F(X + ε)‖, measured.
        bound: ``norm · step + change``, never below the error.
        norm: ‖T_X‖₂, or a bound of it.
        step: ‖ε‖.
        change: ‖F(X + ε) − F(X)‖ of the live model.
    """

    error: float
    bound: float
    norm: float
    step: float
    change: float


@checked_names
def frozen_error_bound(
    frozen: PassLike, x: Float[Tensor, "batch pos d_model"], *, norm: Number | None = None, rule: FrozenRule = "frozen"
) -> FrozenErrorBound:
    """Measure the distance between the frozen operator and the live model at `x`, bounded as in TensorLens (Eq. 25).

    Args:
        frozen: a pass of one prompt.
        x: another input of ``blocks.0``, `[1, pos, d_model]`.
        norm: ‖T_X‖₂ or a bound of it; None measures `spectral_norm` (needs scipy).
        rule: the rule of the frozen MLPs.

    Raises:
        InvalidInputError: several prompts, a shape that is not the pass's, or a norm that is not positive.

    >>> bound = tlens.circuits.frozen_error_bound(frozen, frozen.resid_pre(0) * 1.01)
    >>> bound.error <= bound.bound
    True
    """
    op, x = _other_input(frozen, x, rule)
    if norm is None:
        norm = spectral_norm(op)
    words = "pass the tensor's spectral norm or a bound of it, a positive number"
    norm = real_number("norm", norm, lambda x: x > 0, words)
    end = frozen.capture.output_name(frozen.n_layers - 1)
    if frozen.maps.final_norm() is not None:
        end = frozen.points.output
    live = _live(frozen, x, [end])[end].to(x)
    real = frozen.mask[..., None]
    error, change, step = (
        float(upcast(difference * real).norm()) for difference in (live - op(x), live - frozen.output, x - op.x)
    )
    return FrozenErrorBound(error, norm * step + change, float(norm), step, change)


@checked_names
def spectral_norm_bound(frozen: PassLike, *, as_printed: bool = False) -> float:
    """Bound ‖T_X‖₂ by the weights' norms and the smallest scales (TensorLens Eqs. 31 to 35).

    Each attention sublayer contributes √L Σ_h ‖W_V^h W_O^h‖₂, each MLP ‖W_in‖₂‖W_out‖₂ times its largest abs(φ(z)/z),
    each norm max abs(γ) / min σ, composed by the block's layout (the paper writes the post-LN one) and followed by the
    final norm.

    Args:
        frozen: a pass of one prompt.
        as_printed: use the constants as printed in the paper: 1/Var where the denominator is σ (Eq. 33), and 1 for a
            frozen activation. This is not a bound where a variance is above one or an MLP is gated (where abs(φ(g))
            counts).

    Raises:
        InvalidInputError: several prompts.

    >>> tlens.circuits.spectral_norm(frozen.operator()) < tlens.circuits.spectral_norm_bound(frozen)
    True
    """
    check_pass(frozen)
    frozen.view.require_chain("bounds")
    one_prompt(frozen.operator())

    def norm_factor(layer: int, name: str | None) -> float:
        return 1.0 if name is None else _of_norm(frozen.maps.norm(layer, name), frozen.mask, as_printed)

    bound = 1.0
    for layer, layout in enumerate(frozen.layouts):
        attention = _attention_norm(frozen, layer)
        mlp = _mlp_norm(frozen, layer, as_printed)
        around = [
            (part, *(norm_factor(layer, name) for name in (at.before, at.after, at.outer)))
            for part, at in ((attention, layout.attn), (mlp, layout.mlp if mlp is not None else Place()))
            if part is not None
        ]
        branches = [before * part * after for part, before, after, _ in around]
        whitening = frozen.maps.whitening(layer)
        if whitening is not None:
            bound *= whitening.norm_bound()
        if layout.parallel:
            bound *= 1 + sum(branches)
            continue
        for branch, (*_, outer) in zip(branches, around, strict=True):
            bound *= outer * (1 + branch)
    final = frozen.maps.final_norm()
    if final is None:
        return bound
    return bound * _of_norm(final, frozen.mask, as_printed)


def _attention_norm(frozen: FrozenPass, layer: int) -> float:
    require_attention_alone(frozen.view.blocks[layer])
    weights = frozen.view.blocks[layer].require_plain_attention()
    length = int(frozen.mask.sum())
    values = upcast(weights.W_V).unflatten(1, (weights.kv_heads, -1)).movedim(1, 0)
    values = values.repeat_interleave(weights.heads // weights.kv_heads, dim=0)
    heads = torch.linalg.matrix_norm(values @ upcast(weights.W_O).unflatten(0, (weights.heads, -1)), 2)
    return length**0.5 * float(heads.sum())


def _mlp_norm(frozen: FrozenPass, layer: int, as_printed: bool) -> float | None:
    weights = frozen.view.blocks[layer].dense_mlp
    held = frozen.maps.mlp_coefficients(layer)
    if weights is None or held is None:
        return None
    largest = 1.0
    if not as_printed:
        largest = float(held.through[frozen.mask].abs().max())
    into, out = (float(torch.linalg.matrix_norm(upcast(W), 2)) for W in (weights.W_in, weights.W_out))
    return largest * into * out


def _of_norm(norm: Norm, mask: Tensor, as_printed: bool) -> float:
    gain = 1.0
    if norm.gain is not None:
        gain = float(norm.gain.abs().max())
    smallest = float(norm.scale[mask].min())
    if as_printed:
        return gain / smallest**2
    return gain / smallest


def _other_input(frozen: Any, x: Any, rule: FrozenRule) -> tuple[FrozenOperator, Tensor]:
    """Return the operator of one prompt, and another input of it, checked."""
    check_pass(frozen)
    frozen.view.require_chain("bounds")
    op = frozen.operator(rule=rule)
    one_prompt(op)
    try:
        x = torch.as_tensor(x).to(op.x)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInputError(f"x={x!r}: pass a tensor like the pass's input, {tuple(op.x.shape)}.") from None
    if x.shape != op.x.shape:
        raise InvalidInputError(f"x is {tuple(x.shape)}, the pass's input {tuple(op.x.shape)}.")
    return op, x


def _live(frozen: FrozenPass, x: Tensor, names: list[str]) -> dict[str, Tensor]:
    """Run the live model on another input of ``blocks.0``, and return activations."""
    frozen.live("bounds").check_hooks()
    return capture(frozen.model, frozen.inputs, names, hooks=[replace(frozen.points.blocks[0].resid_pre, x)])[0]
