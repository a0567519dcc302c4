"""Argument types of the circuits functions, for type checkers and readers; at run time our own errors apply."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence
    from typing import SupportsIndex

    import numpy as np
    from torch import Tensor

    from tensorlens_tl.algebra import AffineMap
    from tensorlens_tl.core import Rule
    from tensorlens_tl.models import ModelLike, ModelView
    from tensorlens_tl.passes import FrozenOperator, FrozenPass
    from tensorlens_tl.results import Circuit

    Direction = Tensor | np.ndarray | Sequence[float] | None
    """A vector in place of a token, as in `FrozenOperator.target`."""

    Whole = SupportsIndex
    """An integer: Python's, numpy's or torch's."""

    Offset = int | None
    """Query position minus key position; None where no position is rotated."""

    WeightsLike = ModelLike | ModelView | FrozenPass
    """Any object whose weights can be read."""

    FeatureLike = SupportsIndex | str
    """A feature's number, or its name ``"F12"``."""

    LabelsLike = Mapping[int, str] | Mapping[str, str] | str | os.PathLike[str] | None
    """Labels of features: a mapping from numbers or names, or the path of a CSV or JSON file."""

    RuleLike = Rule | str | None
    """A rule, or its name; None for none."""

    FeatureChoice = FeatureLike | Sequence[FeatureLike] | None
    """One or several features; None for no selection."""

    Window = tuple[SupportsIndex, SupportsIndex]
    """Numbers of tokens before and after a given one."""

    HeadList = Sequence[tuple[SupportsIndex, SupportsIndex] | str]
    """Heads as (layer, head) or as names, ``"L0H1"``."""

    RowsLike = Iterable[object]
    """Texts or rows of token ids, yielded one at a time."""

    Circuits = Circuit | Sequence[Circuit]
    """A circuit, or several."""

    OperatorLike = FrozenOperator
    """The result of `FrozenPass.operator`."""

    MapLike = AffineMap | FrozenOperator
    """A map, or an operator."""

    HookName = str | None
    """A hook point."""

    Share = float | None
    """A count (a whole number) or a share of the largest (below 1); None for no such selection."""
else:
    FeatureChoice = Window = HeadList = Circuits = OperatorLike = MapLike = RowsLike = Any
    Direction = Whole = Offset = WeightsLike = FeatureLike = LabelsLike = HookName = RuleLike = Share = Any
