"""What the batteries have in common: raising, comparing, and looking at what was left on a model."""

from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.errors import ConformanceError
from tensorlens_tl.frozen import FrozenPass

EXACT = 1e-9
"""What float64 gives; models whose own norms compute in float32 give less, and their proof says how much."""


COARSEST = 0.05
"""The widest tolerance, of half precision: a factor of two must never pass."""


def require(holds: bool, message: str) -> None:
    """Raise `ConformanceError` unless it holds; unlike ``assert`` also under ``python -O``."""
    if not holds:
        raise ConformanceError(message)


def difference(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference relative to the largest value, infinite for other shapes or anything not finite."""
    if mine.shape != theirs.shape:
        return float("inf")
    if mine.numel() == 0:
        return 0.0
    off = (mine - theirs).abs().max() / theirs.abs().max().clamp_min(torch.finfo(theirs.dtype).tiny)
    return float(off) if bool(torch.isfinite(off)) else float("inf")


def same(mine: Tensor, theirs: Tensor, tolerance: float, what: str) -> float:
    """Require that two tensors agree; returns by how much they do not."""
    off = difference(mine, theirs)
    require(off <= tolerance, f"{what} (relative difference {off:.1e}, allowed {tolerance:.0e}).")
    return off


def precision(frozen: FrozenPass) -> float:
    """The tolerance that suits a pass: 1e-9 in float64, or a hundred times what its own proof measures."""
    digits = 1000 * torch.finfo(frozen.output.dtype).eps
    return min(max(EXACT, digits, 100 * max(frozen.errors.values())), 10 * frozen.tolerance, COARSEST)


def hooks_on(model: Any) -> int:
    """How many hooks are on a model, leaving out those that its class puts there for good."""
    points = {id(point): point for point in model.hook_dict.values()}.values()
    handles = [handle for point in points for handle in (*point.fwd_hooks, *point.bwd_hooks)]
    return sum(not getattr(handle, "is_permanent", False) for handle in handles)


class Untouched:
    """``with Untouched(model, who):`` requires that no hook, gradient, weight or mode is changed inside.

    Checked at the end also where an error leaves the block, which then stays the cause.
    """

    def __init__(self, model: Any, who: str) -> None:
        self.model, self.who = model, who

    def __enter__(self) -> None:
        self.before = self._state()

    def __exit__(self, *_: Any) -> None:
        for what, after in self._state().items():
            before = self.before[what]
            require(before == after, f"{self.who}: {what} of the model are not what they were ({before} → {after}).")

    def _state(self) -> dict[str, int]:
        parameters = list(self.model.parameters())
        return {
            "hooks": hooks_on(self.model),
            "gradients": sum(parameter.grad is not None for parameter in parameters),
            "weights": sum(parameter._version for parameter in parameters),
            "modes": sum(module.training for module in self.model.modules()),
        }
