"""Which hooks are on a model, and whose they are.

Somebody else's code can act on a run in three ways: a TransformerLens hook at a hook point, one of torch's own hooks on
any module, or a `forward` that was put in the place of a module's own. All three are found and named here. What the
libraries that a model is made of do themselves is not somebody else's.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.nn.modules.module as torch_modules
from torch import nn

from tensorlens_tl.errors import FrozenModelError
from tensorlens_tl.hooks.placing import take_off_leftovers
from tensorlens_tl.hooks.running import hook_points, lock_of, modules
from tensorlens_tl.models.parameters import innermost

LIBRARIES = ("transformer_lens.", "transformers.", "accelerate.", "torch.", "tensorlens_tl.whitening.")
"""Whose functions on a module are part of the model: they prepare its weights, or observe."""

OURS = "tensorlens_tl."
"""Whose functions are on a module only while the library runs the model."""

TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps the hooks that torch's `register_…` methods put on it."""

EVERY_MODULE = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
"""Where torch keeps hooks that act on every module there is."""


class PlacedHook(NamedTuple):
    """One hook on a model.

    Attributes:
        point: a hook point's name; of what is not at one, the module's name and what is there.
        function: what is called.
        permanent: whether it belongs to the model.
        number: torch's own number of the hook, which no other hook of this process has.
    """

    point: str
    function: Any
    permanent: bool
    number: int

    @property
    def holds_fixed(self) -> bool:
        """Whether it belongs to a frozen pass."""
        return getattr(self.function, "holds_fixed", False)


def hooks_on(model: Any) -> list[PlacedHook]:
    """Every hook on a model, at one name of its hook point or module; a Bridge of 4.x has a few permanent ones of its
    own."""
    return [*_at_points(model), *_on_modules(model)]


def is_attached(model: Any) -> bool:
    """Whether hooks of a frozen pass are on the model.

    >>> from tensorlens_tl.hooks import is_attached
    >>> with frozen.attached():
    ...     print(is_attached(model))
    True
    >>> is_attached(model)
    False
    """
    return any(hook.holds_fixed for hook in _at_points(model))


def refuse_attached(model: Any) -> None:
    """Raise `FrozenModelError` if hooks of a frozen pass are on the model: a run would not be its own.

    Another thread's run, or its attached pass, is waited for.
    """
    with lock_of(model):
        take_off_leftovers(model)
        attached = is_attached(model)
    if attached:
        raise FrozenModelError("a frozen pass is attached to this model; leave its `with frozen.attached():` first.")


def foreign_hooks(model: Any) -> list[PlacedHook]:
    """Somebody else's hooks: neither a frozen pass's nor those of the libraries that the model is made of.

    Another thread's run is waited for, as its hooks would be taken for somebody else's.
    """
    with lock_of(model):
        take_off_leftovers(model)
        placed = [
            hook
            for hook in _at_points(model)
            if not hook.holds_fixed and not _module_of(hook.function).startswith("transformer_lens.")
        ]
        return [*placed, *_on_modules(model, foreign=True)]


def unembeds_by_libraries(model: Any) -> bool:
    """Whether the classes that turn a stream into logits are those of the libraries, whose logits of one position
    depend on no other: the model's own, that of the model it wraps, and all of its unembedding's.

    >>> from tensorlens_tl.hooks import unembeds_by_libraries
    >>> unembeds_by_libraries(model)
    True
    """
    unembed = getattr(model, "unembed", nn.Identity())
    parts = [model, getattr(model, "original_model", model), *unembed.modules(), *innermost(unembed).modules()]
    return all(type(part).__module__.startswith((*LIBRARIES, OURS)) for part in parts)


def other_hooks(model: Any) -> list[str]:
    """The names of the points and modules where `foreign_hooks` are, each once.

    >>> from tensorlens_tl.hooks import other_hooks
    >>> with model.hooks([("embed.hook_out", lambda activation, hook: activation)]):
    ...     print(other_hooks(model))
    ['embed.hook_out']
    """
    return list(dict.fromkeys(hook.point for hook in foreign_hooks(model)))


def with_other_names(model: Any, names: Sequence[str]) -> list[str]:
    """Names of hook points and modules, a hook point's other names beside the first: a Bridge's have several.

    >>> from tensorlens_tl.hooks import with_other_names
    >>> bridge = tlens.testing.tiny_model("bridge/gpt2")
    >>> with_other_names(bridge, ["blocks.0.ln2.hook_in", "blocks.0.mlp (torch hook)"])
    ['blocks.0.ln2.hook_in (blocks.0.hook_resid_mid)', 'blocks.0.mlp (torch hook)']
    """
    points = hook_points(model)
    shown: list[str] = []
    for name in names:
        others = [other for other, point in points.items() if other != name and point is points.get(name)]
        shown.append(f"{name} ({', '.join(others)})" if others else name)
    return shown


def hook_numbers(model: Any) -> frozenset[int]:
    """What tells the `foreign_hooks` of now from those of another time."""
    return frozenset(hook.number for hook in foreign_hooks(model))


def _at_points(model: Any) -> Iterator[PlacedHook]:
    """What TransformerLens put at hook points.

    Most models have nothing there, which their modules tell: a Bridge of 3.9 takes much longer to list hook points.
    """
    if not any(vars(module).get("fwd_hooks") or vars(module).get("bwd_hooks") for module in modules(model)):
        return
    points = {id(point): (name, point) for name, point in reversed(hook_points(model).items())}
    for name, point in points.values():
        for handle in (*point.fwd_hooks, *point.bwd_hooks):
            permanent = bool(getattr(handle, "is_permanent", False))
            yield PlacedHook(name, getattr(handle, "user_hook", None), permanent, handle.hook.id)


def _on_modules(model: Any, *, foreign: bool = False) -> Iterator[PlacedHook]:
    """Torch's own hooks, and functions in the place of a module's `forward`; those alone that neither the libraries nor
    we put there, if `foreign`: a loaded Bridge has a dozen of the libraries' per block."""
    names: dict[int, str] = {}
    for module, function, number, what in _registered(model):
        permanent = _is_of_libraries(function)
        if foreign and (permanent or _module_of(function).startswith(OURS)):
            continue
        names = names or _names(model)
        yield PlacedHook(f"{names.get(id(module), 'the model')} ({what})", function, permanent, number)
    for table in EVERY_MODULE:
        for number, function in (getattr(torch_modules, table, None) or {}).items():
            permanent = _is_of_libraries(function)
            if not (foreign and (permanent or _module_of(function).startswith(OURS))):
                yield PlacedHook("every module (torch hook)", function, permanent, number)


def _registered(model: Any) -> Iterator[tuple[nn.Module, Any, int, str]]:
    """Each module with a function on it, torch's number of it, and what it is."""
    for module in modules(model):
        attributes = vars(module)
        for table in TABLES:
            for number, function in attributes[table].items():
                if not _module_of(function).startswith("transformer_lens."):  # what is at a hook point is listed there
                    yield module, function, number, "torch hook"
        if "forward" in attributes:
            yield module, attributes["forward"], id(attributes["forward"]), "forward replaced"


def _names(model: Any) -> dict[int, str]:
    """Every module's name in a model, by the shortest way to it."""
    names: dict[int, str] = {}
    inner = getattr(model, "original_model", None)  # a Bridge's own tree leaves some of its modules out
    ways = {"": model} if inner is None else {"": model, "original_model.": inner}
    for prefix, tree in ways.items():
        shortest: dict[int, str] = {}
        for name, module in tree.named_modules(remove_duplicate=False):
            name = (prefix + name).removesuffix(".") or "the model"
            shortest[id(module)] = min(shortest.get(id(module), name), name, key=len)
        names = shortest | names
    return names


def _is_of_libraries(function: Any) -> bool:
    return _module_of(function).startswith(LIBRARIES)


def _module_of(function: Any) -> str:
    """The name of the module that a function was written in."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__module__", None) or ""
