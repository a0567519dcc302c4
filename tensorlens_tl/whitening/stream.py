"""How white and how stationary is what a model has at its hook points?"""

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.hooks import capture, model_points, unheld_run
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.models.lifecycle import refuse_dropout
from tensorlens_tl.passes.inputs import InputLike, prepare
from tensorlens_tl.whitening.estimation import Number, Reach, WhiteningFilter, estimate
from tensorlens_tl.whitening.measures import SAME, stationarity, whiteness

if TYPE_CHECKING:
    import pandas as pd

    PointNames = str | Sequence[str] | None
    """Names of hook points; None for the residual stream before every block and after the last."""

    Filters = Mapping[str, WhiteningFilter] | None
    """A filter for each hook point, by name."""
else:
    PointNames = Filters = Any  # what is wrong with them is said by `measure`

AT_ONCE = 32
"""Prompts of a run."""
SETTLING = 4
"""Positions that a filter needs to settle; the recursion's start leaves them unwhitened."""


@checked_names
def measure(
    model: ModelLike,
    prompts: InputLike,
    points: PointNames = None,
    *,
    filters: Filters = None,
    skip: int | None = None,
    memory: Memory = None,
) -> "pd.DataFrame":
    """Whiteness and stationarity at hook points, over a batch of prompts.

    >>> from tensorlens_tl import whitening
    >>> prompts = tlens.demo.held_out_prompts(model, 32, length=8)
    >>> table = whitening.measure(model, prompts, ["blocks.0.hook_resid_pre", "blocks.3.hook_resid_post"])
    >>> (table["of correlations"] > table["floor"]).tolist()  # noise alone would give the floor
    [True, True]

    Args:
        model: a TransformerLens model.
        prompts: text or token ids, four prompts or more of the same number of tokens. Their number B sets the noise
            floor of whiteness, √(2/(π(B−1))).
        points: names of hook points with one vector per position; None takes the residual stream before every block
            and after the last.
        filters: a filter for each hook point (`stream_filters`): what is measured has gone through it.
        skip: how many positions at the start are left out. None leaves out none, or with `filters` the first 4, where a
            filter has not settled yet; compare tables of the same positions. Positions that are the same in all
            prompts, such as ``<bos>``, are always left out.
        memory: what covariances may take at once, as ``"512MB"`` or bytes.

    Returns:
        A row for each point: ``whiteness``, ``of correlations``, their ``floor``; ``rho``, ``relative``, and both
        ``without noise`` (see `tensorlens_tl.whitening.measures`). Lower is whiter, and more stationary.

    Raises:
        InvalidInputError: prompts of different length, too few of them, no such hook point, one that has no vector
            for each position, or a point without a filter.
    """
    import pandas as pd

    if filters is None:
        skip = whole_number("skip", skip or 0, 0)
        sequences = activations(model, prompts, points)
    else:
        skip = whole_number("skip", SETTLING if skip is None else skip, 0)
        sequences = _filtered_inputs(model, prompts, points, filters)
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
        rows[name] = _measured(x[:, skip:][:, varies[skip:]], memory)
    return pd.DataFrame.from_dict(rows, orient="index")


def _filtered_inputs(
    model: ModelLike, prompts: InputLike, points: PointNames, filters: object
) -> dict[str, Float[Tensor, "batch pos d_model"]]:
    """What filters are applied to, at hook points, those of the filters unless said.

    Raises:
        InvalidInputError: no table of filters, or a point without one.
    """
    if not isinstance(filters, Mapping):
        raise InvalidInputError(
            f"filters: pass what stream_filters gave, hook point → filter, not {type(filters).__name__}."
        )
    sequences = activations(model, prompts, list(filters) if points is None else points)
    for name in sequences:
        if name not in filters:
            raise InvalidInputError(f"filters: none for {name}; there are {', '.join(filters)}.")
    return sequences


def _measured(x: Float[Tensor, "batch pos d_model"], memory: Memory) -> dict[str, float]:
    """One row of the table."""
    white = whiteness(x, memory=memory)
    steady = stationarity(x)
    return {
        "whiteness": white.covariance,
        "of correlations": white.correlation,
        "floor": white.floor,
        "rho": steady.rho,
        "relative": steady.relative,
        "rho without noise": steady.rho_without_noise,
        "relative without noise": steady.relative_without_noise,
    }


@checked_names
def stream_filters(
    model: ModelLike, prompts: InputLike, points: PointNames = None, *, reach: Reach = "auto", ridge: Number = 1e-6
) -> dict[str, WhiteningFilter]:
    """The first-order filter of each hook point, from the covariances there, by name.

    >>> from tensorlens_tl import whitening
    >>> prompts = tlens.demo.held_out_prompts(model, 64, length=12)
    >>> filters = whitening.stream_filters(model, prompts, "blocks.1.hook_resid_pre")
    >>> filters["blocks.1.hook_resid_pre"].L_inv.shape
    torch.Size([128, 128])

    Args:
        model, prompts, points: as for `measure`.
        reach, ridge: as for `estimate`. Neighbours of real streams have more in common than a first-order process may,
            so by default as much of it stays as leaves a filter.

    Returns:
        Hook point → filter, in the order of `points`.

    Raises:
        InvalidInputError: what `measure` and `estimate` refuse.
    """
    sequences = activations(model, prompts, points)
    return {name: estimate(x, reach=reach, ridge=ridge) for name, x in sequences.items()}


def activations(
    model: ModelLike, prompts: InputLike, points: PointNames = None
) -> dict[str, Float[Tensor, "batch pos d_model"]]:
    """What a model has at hook points, for prompts of equal length; see `measure`."""
    view = ModelView(model)
    view.refuse_encoder_decoder("whiteness")
    refuse_dropout(view.model)
    prompt = prepare(view, prompts)
    if not bool(prompt.mask.all()):
        lengths = sorted({int(n) for n in prompt.mask.sum(1)})
        raise InvalidInputError(f"prompts have {lengths[0]} to {lengths[-1]} tokens; all must be of one length.")
    names = _point_names(view, points)
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    with unheld_run(view.model), torch.no_grad():
        for start in range(0, len(prompt.tokens), AT_ONCE):
            part = prepare(view, prompt.tokens[start : start + AT_ONCE])
            cache, _ = capture(view.model, part.kwargs, names)
            for name, activation in cache.items():
                parts[name].append(activation.detach())
    sequences = {name: torch.cat(parts[name]) for name in names}
    for name, x in sequences.items():
        if x.ndim != 3 or x.shape[:2] != prompt.tokens.shape:
            raise InvalidInputError(f"points: {name} is {tuple(x.shape)}, not one vector for each position.")
    return sequences


def _point_names(view: ModelView, points: PointNames) -> list[str]:
    """The hook points by name.

    Raises:
        InvalidInputError: none, or one that the model does not have.
    """
    if points is None:
        known = model_points(view)
        points = [*(block.resid_pre for block in known.blocks), known.last_output]
    if isinstance(points, str):
        points = [points]
    names = list(points)
    if not names:
        raise InvalidInputError("points: none; pass names of hook points, or None for the stream before every block.")
    for name in names:
        if name not in view.model.hook_dict:
            near = difflib.get_close_matches(str(name), list(view.model.hook_dict), n=1)
            suggestion = f"; {near[0]!r}?" if near else "."
            raise InvalidInputError(f"points: no hook point {name!r} here{suggestion}")
    return names
