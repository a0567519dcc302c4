"""How white and how stationary is what a model has at its hook points?"""

import difflib
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.hooks import capture, model_points, own_run
from tensorlens_tl.models.protocol import ModelLike
from tensorlens_tl.models.state import refuse_dropout
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.prompts import prepare
from tensorlens_tl.whitening.estimation import WhiteningFilter, estimate
from tensorlens_tl.whitening.measures import stationarity, whiteness

if TYPE_CHECKING:
    import pandas as pd

AT_ONCE = 32
"""Prompts of a run."""
SETTLING = 4
"""Positions that a filter needs to settle; the recursion's start leaves them unwhitened."""


def measure(
    model: ModelLike, prompts: Any, points: Any = None, *, filters: Any = None, memory: Memory = None
) -> "pd.DataFrame":
    """Whiteness and stationarity at hook points, over a batch of prompts.

    Args:
        model: a TransformerLens model.
        prompts: text or token ids, four prompts or more of the same number of tokens. Their number B sets the noise
            floor of whiteness, √(2/(π(B−1))).
        points: names of hook points with one vector per position; None takes the residual stream before every block
            and after the last.
        filters: a filter for each hook point (`stream_filters`): what is measured has gone through it, and the first
            `SETTLING` positions, where a filter has not settled yet, are left out.
        memory: what covariances may take at once, as ``"512MB"`` or bytes.

    Returns:
        A row for each point: ``whiteness``, ``of correlations``, their ``floor``; ``rho``, ``relative``, and both
        ``without noise`` (see `tensorlens_tl.whitening.measures`). Lower is whiter, and more stationary.

    Raises:
        InvalidInputError: prompts of different length, too few of them, no such hook point, one that has no vector
            for each position, or a point without a filter.
    """
    import pandas as pd

    if filters is not None and points is None:
        points = list(filters)
    rows = {}
    for name, x in activations(model, prompts, points).items():
        if filters is not None:
            if name not in filters:
                raise InvalidInputError(f"filters: none for {name}; there are {', '.join(filters)}.")
            if x.shape[1] < SETTLING + 3:
                raise InvalidInputError(f"measure: with filters, prompts need {SETTLING + 3} tokens, got {x.shape[1]}.")
            x = filters[name](x)[:, SETTLING:]
        white, steady = whiteness(x, memory=memory), stationarity(x)
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


def stream_filters(
    model: ModelLike, prompts: Any, points: Any = None, *, reach: Any = "auto", ridge: Any = 1e-6
) -> dict[str, WhiteningFilter]:
    """The first-order filter that each hook point's own covariances ask for, by name.

    Args:
        model, prompts, points: as for `measure`.
        reach, ridge: as for `estimate`. Neighbours of real streams have more in common than a first-order process may,
            so by default as much of it is kept as leaves a filter.

    Raises:
        InvalidInputError: what `measure` and `estimate` refuse.
    """
    found = activations(model, prompts, points)
    return {name: estimate(x, reach=reach, ridge=ridge) for name, x in found.items()}


def activations(model: ModelLike, prompts: Any, points: Any = None) -> dict[str, Float[Tensor, "batch pos d"]]:
    """What a model has at hook points, for prompts of equal length; see `measure`."""
    view = ModelView(model)
    refuse_dropout(view.model)
    prompt = prepare(view, prompts)
    if not bool(prompt.mask.all()):
        lengths = sorted({int(n) for n in prompt.mask.sum(1)})
        raise InvalidInputError(f"measure: prompts of {lengths[0]} to {lengths[-1]} tokens; all must be of one length.")
    if isinstance(points, str):
        points = [points]
    if points is None:
        known = model_points(view)
        points = [*(block.resid_pre for block in known.blocks), known.last_output]
    unknown = [name for name in points if name not in view.model.hook_dict]
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(view.model.hook_dict), n=1)
        raise InvalidInputError(f"points: no hook point {unknown[0]!r} here{(near and f'; {near[0]!r}?') or '.'}")
    parts: dict[str, list[Tensor]] = {name: [] for name in points}
    with own_run(view.model), torch.no_grad():
        for start in range(0, len(prompt.tokens), AT_ONCE):
            part = prepare(view, prompt.tokens[start : start + AT_ONCE])
            kept, _ = capture(view.model, part.kwargs, list(points))
            for name, activation in kept.items():
                parts[name].append(activation.detach())
    found = {name: torch.cat(parts[name]) for name in points}
    for name, x in found.items():
        if x.ndim != 3 or x.shape[:2] != prompt.tokens.shape:
            raise InvalidInputError(f"points: {name} is {tuple(x.shape)}, not one vector for each position.")
    return found
