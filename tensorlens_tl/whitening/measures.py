"""Measuring how white and how stationary sequences of vectors are (Whitened Self-Attention, Eqs. 10–14).

The paper measures both over a batch of sequences `[batch, pos, d]`, with the sample covariances of all pos·d numbers.

| measure | definition |
| --- | --- |
| `whiteness` Ψ (Eq. 12) | mean absolute covariance off the diagonal ÷ mean variance |
| the same for correlations | every number scaled to variance 1, as unequal variances make Ψ smaller |
| `stationarity` ρ (Eq. 14) | Σ_t ‖Λ_{t,t+1} − mean‖: how neighbours' covariance changes along the sequence |

None of them is zero for a finite sample of a perfectly white or stationary process, so each comes with its value under
noise alone: for Ψ and B sequences, √(2/(π(B−1))). For ρ, the two halves of the batch are independent, so the inner
product of their deviations estimates the squared deviation without the noise's own square. The remaining noise cancels
over positions, because roots of negative estimates are taken with their sign.

Numbers that are the same in all sequences (such as a first token that all prompts share) carry no information and are
excluded from Ψ.

`estimate` derives the first-order filter of a process from its covariances (Eqs. 5–9). A stationary process with
covariance between neighbours only has the block-tridiagonal covariance (6), with Λ_0 on the diagonal and
C = E[x_i x_{i−1}ᵀ] next to it. The blocks of its Cholesky factor converge:

    L Lᵀ = Λ_0 − C (L Lᵀ)⁻¹ Cᵀ,    M = C L⁻ᵀ

and ``w_i = L⁻¹(x_i − M w_{i−1})`` (Eq. 9) is white, except for the first positions, before the factor has converged.
Real sequences have longer-range correlations: such a factor may then not exist, and the filter is that of the nearest
model.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names, real_number, whole_number
from tensorlens_tl.algebra import scan, spectral_radius
from tensorlens_tl.algebra.memory import Memory, slices
from tensorlens_tl.drawing.charts import curves
from tensorlens_tl.drawing.page import Picture, panel, table
from tensorlens_tl.errors import InvalidInputError, NumericalError
from tensorlens_tl.hooks import capture, model_points, unheld_run
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.models.lifecycle import refuse_dropout
from tensorlens_tl.passes.inputs import InputLike, prepare

if TYPE_CHECKING:
    import pandas as pd

if TYPE_CHECKING:
    Sequences = Float[Tensor, "batch pos d"]
    """Sequences of equal length."""
else:
    Sequences = Any  # checked by the functions that measure

LEAST = 4
"""The least number of sequences: each of two halves needs two."""
SAME = 1e-6
"""Numbers that vary by less than this relative to their size count as equal, up to rounding."""


class Whiteness(NamedTuple):
    """Ψ of covariances (the paper's) and of correlations, and the floor that independent samples would give."""

    covariance: float
    correlation: float
    floor: float


class Stationarity(NamedTuple):
    """ρ, its ratio to Σ_t ‖Λ_{t,t+1}‖, and both without the noise of a finite batch, estimated from two halves.

    The last is NaN if the covariances themselves are no more than noise.
    """

    rho: float
    relative: float
    rho_without_noise: float
    relative_without_noise: float


@checked_names
def whiteness(x: Sequences, *, memory: Memory = None) -> Whiteness:
    """Measure whiteness Ψ (Eq. 12): 0 for independent numbers of equal variance.

    >>> from tensorlens_tl.whitening import whiteness
    >>> same = torch.randn(100, 1, 4).expand(100, 8, 4)  # every position repeats the first
    >>> psi = whiteness(same + 0.1 * torch.randn(100, 8, 4))
    >>> psi.covariance > 2 * psi.floor  # far above what noise alone gives
    True

    Returns Ψ of covariances and of correlations, and the value that noise alone gives.

    Args:
        x: sequences of equal length, `[batch, pos, d]`.
        memory: what covariances may allocate at once, as ``"512MB"`` or bytes.

    Raises:
        InvalidInputError: fewer than four sequences, fewer than two numbers in each, or all sequences equal.
        NumericalError: values that are not finite.
    """
    centred = _centred(x, "whiteness").flatten(1)
    spread = centred.norm(dim=0)
    varies = spread > SAME * x.detach().double().flatten(1).norm(dim=0)
    centred = centred[:, varies]
    spread = spread[varies]
    floor = (2 / (torch.pi * (len(x) - 1))) ** 0.5
    return Whiteness(_off_diagonal(centred, memory), _off_diagonal(centred / spread, memory), floor)


@checked_names
def stationarity(x: Sequences) -> Stationarity:
    """Measure ρ (Eq. 14): how far covariances of neighbours are from their mean over positions; 0 if stationary.

    >>> from tensorlens_tl.whitening import stationarity
    >>> steps = torch.randn(200, 12, 2).cumsum(1)  # a random walk: its variance grows along the sequence
    >>> stationarity(steps).relative > 0.3
    True

    Raises:
        InvalidInputError: fewer than four sequences `[batch, pos, d]`, or fewer than three positions.
        NumericalError: values that are not finite.
    """
    if isinstance(x, Tensor) and x.ndim == 3 and x.shape[1] < 3:
        raise InvalidInputError(f"stationarity: {x.shape[1]} positions are too few; pass 3 or more.")
    whole = neighbours(_centred(x, "stationarity"))
    halves = [neighbours(_centred(half, "stationarity")) for half in (x[::2], x[1::2])]
    deviation = (whole - whole.mean(0)).flatten(1).norm(dim=1).sum()
    size = whole.flatten(1).norm(dim=1).sum().clamp_min(torch.finfo(whole.dtype).tiny)
    one, other = (half - half.mean(0) for half in halves)
    clean = _root((one * other).sum((1, 2)))
    clean_size = _root((halves[0] * halves[1]).sum((1, 2)))
    relative = torch.where(clean_size > 0.1 * size, clean / clean_size, torch.nan)
    return Stationarity(float(deviation), float(deviation / size), float(clean), float(relative))


def neighbours(centred: Float[Tensor, "batch pos d"]) -> Float[Tensor, "step d d"]:
    """Return Λ_{t,t+1} (Eq. 13), the covariance of every position with the next one."""
    return torch.einsum("bti,btj->tij", centred[:, :-1], centred[:, 1:]) / (len(centred) - 1)


def _root(squares: Float[Tensor, "step"]) -> Float[Tensor, ""]:
    """Return the sum of roots of estimated squares, at least zero; negative estimates count with their sign."""
    return (squares.abs().sqrt() * squares.sign()).sum().clamp_min(0)


def shape_or_type(x: object) -> str:
    """Describe what was passed in place of sequences."""
    if isinstance(x, Tensor):
        return str(tuple(x.shape))
    return type(x).__name__


def _centred(x: Sequences, name: str) -> Float[Tensor, "batch pos d"]:
    """Return the sequences minus their mean, in float64."""
    if not isinstance(x, Tensor) or x.ndim != 3 or len(x) < 2:
        raise InvalidInputError(
            f"{name}: pass a tensor [batch, pos, d] of {LEAST} sequences or more, got {shape_or_type(x)}."
        )
    if not bool(torch.isfinite(x).all()):
        raise NumericalError("the sequences have values that are not finite.")
    wide = x.detach().double()
    return wide - wide.mean(0)


def _off_diagonal(centred: Float[Tensor, "batch n"], memory: Memory) -> float:
    """Return the mean absolute covariance off the diagonal ÷ the mean variance."""
    batch, count = centred.shape
    if batch < LEAST or count < 2:
        raise InvalidInputError(
            f"whiteness: {batch} sequences with {count} numbers that vary between them; at least {LEAST} sequences, "
            "and 2 such numbers, are needed."
        )
    total = centred.new_zeros(())
    for rows in slices(count, count * centred.element_size(), memory, "covariances"):
        total += (centred[:, rows].T @ centred).abs().sum()
    variance = centred.square().sum()
    return float((total - variance) / variance / (count - 1))


STEPS = 10_000

if TYPE_CHECKING:
    Reach = float | Literal["auto"]
    """A factor on the covariance of neighbours, or ``"auto"`` to choose one."""
    Number = float
else:
    Reach = Number = Any  # `estimate` checks them


@dataclass(frozen=True, eq=False)
class WhiteningFilter:
    """``w_i = L⁻¹(x_i − M w_{i−1})`` (Eq. 9).

    Attributes:
        L_inv, M: the filter's matrices, acting on column vectors as in the paper.
        mean: subtracted from every vector first.
        reach: the factor on the neighbours' covariance for which it was estimated.
    """

    L_inv: Float[Tensor, "d d"]
    M: Float[Tensor, "d d"]
    mean: Float[Tensor, "d"]
    reach: float = 1.0

    def __repr__(self) -> str:
        return f"WhiteningFilter(d={len(self.mean)}, radius={self.radius:.3g}, reach={self.reach:g})"

    @property
    def radius(self) -> float:
        """The spectral radius of L⁻¹M: the share of a vector that remains one position later, in the long run."""
        return spectral_radius(self.L_inv @ self.M)

    def __call__(self, x: Float[Tensor, "*rows pos d"]) -> Float[Tensor, "*rows pos d"]:
        """Whiten sequences; raise `InvalidInputError` for vectors of another width."""
        if x.shape[-1] != len(self.mean):
            raise InvalidInputError(f"this filter is for vectors of {len(self.mean)} numbers, got {tuple(x.shape)}.")
        L_inv = self.L_inv.to(x)
        M = self.M.to(x)
        return scan((x - self.mean.to(x)) @ L_inv.T, -(L_inv @ M).T)


@checked_names
def estimate(x: Sequences, *, reach: Reach = 1.0, ridge: Number = 1e-6) -> WhiteningFilter:
    """Estimate the filter of a stationary process from sample sequences, in float64.

    >>> from tensorlens_tl.whitening import estimate
    >>> noise = torch.randn(2000, 9, 1, generator=torch.Generator().manual_seed(0))
    >>> filter = estimate(noise[:, 1:] + 0.5 * noise[:, :-1])  # x_i = e_i + e_{i−1}/2, so L = 1 and M = 1/2
    >>> round(filter.radius, 1)
    0.5

    Args:
        x: sequences of equal length, `[batch, pos, d]`; means and covariances are taken over all positions.
        reach: a factor on the neighbours' covariance C, at most 1; use less if no filter exists otherwise. ``"auto"``
            takes 1 if possible, or else 0.1 less than the largest of 0.95, 0.9, … for which a filter exists: at the
            limit it is nearly singular and makes things worse.
        ridge: added to every variance, as a share of the mean variance.

    Raises:
        InvalidInputError: fewer than two positions, numbers out of range, or no filter exists (says what to try).
        NumericalError: values that are not finite.
    """
    if not isinstance(x, Tensor) or x.ndim != 3 or x.shape[1] < 2:
        raise InvalidInputError(
            f"estimate: pass a tensor [batch, pos, d] of 2 positions or more, got {shape_or_type(x)}."
        )
    if not bool(torch.isfinite(x).all()):
        raise NumericalError("estimate: the sequences have values that are not finite.")
    if reach != "auto":
        reach = _checked_share("reach", reach, 1.0)
    ridge = _checked_share("ridge", ridge, float("inf"))
    wide = x.detach().double()
    mean = wide.mean((0, 1))
    centred = wide - mean
    batch, pos, _ = x.shape
    here = torch.einsum("bti,btj->ij", centred, centred) / (batch * pos)
    here += ridge * here.diagonal().mean() * torch.eye(len(here), dtype=here.dtype, device=here.device)
    before = torch.einsum("bti,btj->ij", centred[:, 1:], centred[:, :-1]) / (batch * (pos - 1))
    share = _safe_reach(here, before) if reach == "auto" else reach
    L = None if share is None else _steady_factor(here, share * before)
    if share is None or L is None:
        raise InvalidInputError(
            "estimate: a process with these covariances is correlated beyond one position, and has no first-order "
            "filter. Pass a smaller reach=, which shrinks the covariance of neighbours, or reach='auto'."
        )
    L_inv = torch.linalg.solve_triangular(L, torch.eye(len(L), dtype=L.dtype, device=L.device), upper=False)
    return WhiteningFilter(L_inv, share * before @ L_inv.T, mean, float(share))


def _checked_share(name: str, value: object, most: float) -> float:
    return real_number(name, value, lambda x: 0 <= x <= most, f"pass a number from 0 to {most:g}")


def _safe_reach(here: Float[Tensor, "d d"], before: Float[Tensor, "d d"]) -> float | None:
    """Return a factor on the neighbours' covariance for which a filter exists, with a margin."""
    exists = [step for step in range(20, 0, -1) if _steady_factor(here, step / 20 * before) is not None]
    if not exists:
        return None
    largest = exists[0]
    if largest == 20:
        return 1.0
    return max(largest - 2, 1) / 20


def _steady_factor(here: Float[Tensor, "d d"], before: Float[Tensor, "d d"]) -> Float[Tensor, "d d"] | None:
    """Return L at its steady state, or None if the covariances have none."""
    squared = here
    for _ in range(STEPS):
        factor, failed = torch.linalg.cholesky_ex(squared)
        if int(failed):
            return None
        following = here - before @ torch.cholesky_solve(before.T, factor)
        settled = float((following - squared).norm()) <= 1e-13 * float(squared.norm())
        squared = following
        if settled:
            break
    factor, failed = torch.linalg.cholesky_ex(squared)
    if int(failed):
        return None
    return factor


if TYPE_CHECKING:
    import pandas as pd

    HookNames = str | Sequence[str] | None
    """Names of hook points; None for the residual stream before every block and after the last."""

    Filters = Mapping[str, WhiteningFilter] | None
    """A filter for each hook point, by name."""
else:
    HookNames = Filters = Any  # `measure` checks them

AT_ONCE = 32
"""How many prompts run at once."""
SETTLING = 4
"""Positions before a filter has settled, which the start of the recursion leaves unwhitened."""


@checked_names
def measure(
    model: ModelLike,
    prompts: InputLike,
    hooks: HookNames = None,
    *,
    filters: Filters = None,
    skip: int | None = None,
    memory: Memory = None,
) -> "pd.DataFrame":
    """Measure whiteness and stationarity at hook points, over a batch of prompts.

    >>> from tensorlens_tl import whitening
    >>> prompts = tlens.demo.held_out_prompts(model, 32, length=8)
    >>> table = whitening.measure(model, prompts, ["blocks.0.hook_resid_pre", "blocks.3.hook_resid_post"])
    >>> (table["of correlations"] > table["floor"]).tolist()  # noise alone would give the floor
    [True, True]

    Args:
        model: a TransformerLens model.
        prompts: text or token ids: four prompts or more with the same number of tokens. Their number B sets the noise
            floor of whiteness, √(2/(π(B−1))).
        hooks: hook points with one vector per position; None takes the residual stream before every block and after
            the last.
        filters: a filter for each hook point (`stream_filters`), applied before measuring.
        skip: how many positions to omit at the beginning. None is 0, or with `filters` 4, because a filter has to
            settle first; only compare tables of the same positions. Positions that are equal in all prompts, such as
            ``<bos>``, are always excluded.
        memory: what covariances may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        A row for each hook point: ``whiteness``, ``of correlations``, their ``floor``; ``rho``, ``relative``, and both
        ``without noise`` (see `tensorlens_tl.whitening.measures`). Lower values are whiter, or more stationary.

    Raises:
        InvalidInputError: prompts of different lengths or too few of them, or a hook point that is unknown, has no
            filter, or does not have one vector per position.
    """
    import pandas as pd

    if filters is None:
        skip = whole_number("skip", skip or 0, 0)
        sequences = activations(model, prompts, hooks)
    else:
        skip = whole_number("skip", SETTLING if skip is None else skip, 0)
        if not isinstance(filters, Mapping):
            raise InvalidInputError(
                f"filters: pass filters from stream_filters, hook point → filter, not a {type(filters).__name__}."
            )
        sequences = activations(model, prompts, list(filters) if hooks is None else hooks)
        for name in sequences:
            if name not in filters:
                raise InvalidInputError(f"filters: none for {name}; there are {', '.join(filters)}.")
    rows = {}
    for name, x in sequences.items():
        varies = (x - x[:1]).abs().amax((0, 2)) > SAME * x.abs().amax((0, 2))
        if int(varies[skip:].sum()) < 3:
            raise InvalidInputError(
                f"measure: prompts of {x.shape[1]} tokens leave {int(varies[skip:].sum())} positions that differ "
                f"between prompts, after the first {skip}; 3 are needed."
            )
        if filters is not None:
            x = filters[name](x)
        x = x[:, skip:][:, varies[skip:]]
        white = whiteness(x, memory=memory)
        steady = stationarity(x)
        rows[name] = {
            "whiteness": white.covariance,
            "of correlations": white.correlation,
            "floor": white.floor,
            "rho": steady.rho,
            "relative": steady.relative,
            "rho without noise": steady.rho_without_noise,
            "relative without noise": steady.relative_without_noise,
        }
    return pd.DataFrame.from_dict(rows, orient="index")


@checked_names
def stream_filters(
    model: ModelLike, prompts: InputLike, hooks: HookNames = None, *, reach: Reach = "auto", ridge: Number = 1e-6
) -> dict[str, WhiteningFilter]:
    """Estimate the first-order filter of each hook point; returned by name, in the order of `hooks`.

    >>> from tensorlens_tl import whitening
    >>> prompts = tlens.demo.held_out_prompts(model, 64, length=12)
    >>> filters = whitening.stream_filters(model, prompts, "blocks.1.hook_resid_pre")
    >>> filters["blocks.1.hook_resid_pre"].L_inv.shape
    torch.Size([128, 128])

    Args:
        model, prompts, hooks: as for `measure`.
        reach, ridge: as for `estimate`. Neighbours in real streams are more correlated than a first-order process
            allows, so `reach` is by default as large as possible.

    Raises:
        InvalidInputError: whatever `measure` and `estimate` raise.
    """
    sequences = activations(model, prompts, hooks)
    return {name: estimate(x, reach=reach, ridge=ridge) for name, x in sequences.items()}


def activations(
    model: ModelLike, prompts: InputLike, hooks: HookNames = None
) -> dict[str, Float[Tensor, "batch pos d_model"]]:
    """Return a model's activations at hook points, for prompts of equal length; see `measure`."""
    view = ModelView(model)
    view.refuse_encoder_decoder("whiteness")
    refuse_dropout(view.model)
    prompt = prepare(view, prompts)
    if not bool(prompt.mask.all()):
        lengths = sorted({int(n) for n in prompt.mask.sum(1)})
        raise InvalidInputError(f"prompts have {lengths[0]} to {lengths[-1]} tokens; all must have the same length.")
    names = _hook_names(view, hooks)
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    with unheld_run(view.model), torch.no_grad():
        for start in range(0, len(prompt.tokens), AT_ONCE):
            part = prepare(view, **prompt.again(slice(start, start + AT_ONCE)))
            cache, _ = capture(view.model, part.kwargs, names)
            for name, activation in cache.items():
                parts[name].append(activation.detach())
    sequences = {name: torch.cat(parts[name]) for name in names}
    for name, x in sequences.items():
        if x.ndim != 3 or x.shape[:2] != prompt.tokens.shape:
            raise InvalidInputError(f"hooks: {name} is {tuple(x.shape)}, not one vector for each position.")
    return sequences


def _hook_names(view: ModelView, hooks: HookNames) -> list[str]:
    if hooks is None:
        known = model_points(view)
        hooks = [*(block.resid_pre for block in known.blocks), known.last_output]
    if isinstance(hooks, str):
        hooks = [hooks]
    names = list(hooks) if isinstance(hooks, Iterable) else []
    if not names:
        raise InvalidInputError("hooks: none; pass names of hook points, or None for the stream before every block.")
    for name in names:
        if name not in list(view.model.hook_dict):
            near = difflib.get_close_matches(str(name), list(view.model.hook_dict), n=1)
            suggestion = f"; {near[0]!r}?" if near else "."
            raise InvalidInputError(f"hooks: no hook point {name!r} here{suggestion}")
    return names


CURVES = {
    "Whiteness Ψ, lower is whiter": ("whiteness", "of correlations", "floor"),
    "Stationarity ρ relative to Σ‖Λ‖, lower is more stationary": ("relative", "relative without noise"),
}


@checked_names
def picture(
    measures: "pd.DataFrame", filtered: "pd.DataFrame | None" = None, title: str = "Whiteness and stationarity"
) -> Picture:
    """Draw curves over hook points, in the table's order, with the numbers, for a notebook or a page.

    Args:
        measures: a table from `measure`, with two hook points or more.
        filtered: a table from `measure` with ``filters=``, for the same hook points.
        title: the title of the page.

    Raises:
        InvalidInputError: another kind of table, a single hook point, or tables for different hook points.
    """
    tables = {"": measures}
    if filtered is not None:
        tables[", filtered"] = filtered
    start = "picture: pass tables of whitening.measure for the same hook points, 2 or more"
    for values in tables.values():
        missing = [column for columns in CURVES.values() for column in columns if column not in values]
        if missing:
            raise InvalidInputError(f"{start}; one has no column {missing[0]!r}.")
        if len(values) < 2 or list(values.index) != list(measures.index):
            raise InvalidInputError(f"{start}, not {len(values)}.")
    panels = []
    for heading, columns in CURVES.items():
        lines = {column + of: values_table[column] for of, values_table in tables.items() for column in columns}
        lines.pop("floor, filtered", None)
        values = np.stack([line.to_numpy() for line in lines.values()])
        depth = np.arange(len(measures), dtype=float)
        chart = curves(list(lines), depth, values, values, values, metric=heading, axis_name="hook point")
        panels.append(panel(heading, chart))
    rows = [
        (f"{number}: {name}{of}", *(f"{value:.4g}" for value in row))
        for of, values_table in tables.items()
        for number, (name, *row) in enumerate(values_table.itertuples())
    ]
    panels.append(panel("Values", table(["hook point", *measures.columns], rows)))
    return Picture(title, "".join(panels))
