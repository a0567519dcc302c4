"""Which hooks are on a model, and whose they are."""

from typing import Any, NamedTuple

from tensorlens_tl.errors import FrozenModelError
from tensorlens_tl.hooks.running import hook_points


class PlacedHook(NamedTuple):
    """One hook on a model."""

    point: str
    function: Any
    permanent: bool

    @property
    def holds_fixed(self) -> bool:
        """Whether it belongs to a frozen pass."""
        return getattr(self.function, "holds_fixed", False)


def hooks_on(model: Any) -> list[PlacedHook]:
    """Every hook on a model, at one name of its hook point; a Bridge of 4.x has a few permanent ones of its own."""
    points = {id(point): (name, point) for name, point in reversed(hook_points(model).items())}
    return [
        PlacedHook(name, getattr(handle, "user_hook", None), bool(getattr(handle, "is_permanent", False)))
        for name, point in points.values()
        for handle in (*point.fwd_hooks, *point.bwd_hooks)
    ]


def is_attached(model: Any) -> bool:
    """Whether hooks of a frozen pass are on the model."""
    return any(hook.holds_fixed for hook in hooks_on(model))


def refuse_attached(model: Any) -> None:
    """Raise `FrozenModelError` if hooks of a frozen pass are on the model: a run would not be its own."""
    if is_attached(model):
        raise FrozenModelError("a frozen pass is attached to this model; leave its `with frozen.attached():` first.")


def other_hooks(model: Any) -> list[str]:
    """The hook points where somebody else's hooks are: neither a frozen pass's nor TransformerLens' own."""
    others = (
        hook.point
        for hook in hooks_on(model)
        if not hook.holds_fixed
        and not (getattr(hook.function, "__module__", None) or "").startswith("transformer_lens.")
    )
    return list(dict.fromkeys(others))
