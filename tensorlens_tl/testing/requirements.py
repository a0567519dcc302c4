"""What the batteries have in common: raising, comparing, what was left on a model, checks as values, and memory."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tensorlens_tl.errors import ConformanceError
from tensorlens_tl.hooks import hooks_on
from tensorlens_tl.models import ModelLike
from tensorlens_tl.passes import FrozenPass, freeze

Case = TypeVar("Case")
Side = Literal["left", "right"]
"""Where padding is."""

EXACT = 1e-9
"""What float64 gives; models whose own norms compute in float32 give less, and their proof says how much."""

COARSEST = 0.05
"""The widest tolerance, of half precision: a factor of two must never pass."""

ROUNDING = 10
"""How much more than the model's own activations a result may change under the same change of its input."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold: call it. Its name is a test's id, `of` says of which model, where it is of one."""

    name: str
    run: Callable[[], Any]
    of: str = ""

    def __call__(self) -> Any:
        """Raises `ConformanceError` unless it holds."""
        return self.run()

    def __repr__(self) -> str:
        return self.name


def parametrize_with_checks(checks: Iterable[Check]) -> Any:
    """A pytest decorator that makes a test of every check, each under its own name.

    >>> from tensorlens_tl.testing import method_checks, parametrize_with_checks
    >>> @parametrize_with_checks(method_checks("rollout", ["bridge/gpt2"]))
    ... def test_rollout(check):
    ...     check()
    """
    import pytest

    checks = list(checks)
    return pytest.mark.parametrize("check", checks, ids=[check.name for check in checks])


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
    return float(off.nan_to_num(torch.inf, posinf=torch.inf))


def same(mine: Tensor, theirs: Tensor, tolerance: float, what: str) -> float:
    """Require that two tensors agree; returns by how much they do not."""
    off = difference(mine, theirs)
    require(off <= tolerance, f"{what} (relative difference {off:.1e}, allowed {tolerance:.0e}).")
    return off


def precision(frozen: FrozenPass) -> float:
    """The tolerance that suits a pass: 1e-9 in float64, or a hundred times what its own proof measures."""
    digits = 1000 * torch.finfo(frozen.output.dtype).eps
    return min(max(EXACT, digits, 100 * max(frozen.errors.values())), 10 * frozen.tolerance, COARSEST)


def frozen_rows(
    model: ModelLike, tokens: Tensor, encoder: int = 0, mask: Tensor | None = None, **options: Any
) -> FrozenPass:
    """A pass of token ids `[prompt, pos]`; of an encoder–decoder the first `encoder` positions are the encoder's."""
    both = {"": tokens}
    if mask is not None:
        both["attention_mask"] = mask
    if not encoder:
        return freeze(model, both.pop(""), **both, **options)
    encoder_inputs = {name: ids[:, :encoder] for name, ids in both.items()}
    options |= {f"decoder_{name or 'input_ids'}": ids[:, encoder:] for name, ids in both.items()}
    return freeze(model, encoder_inputs.pop(""), **encoder_inputs, **options)


def real_positions(sizes: Sequence[int], counts: Sequence[int], side: Side) -> Bool[Tensor, "pos"]:
    """True at so many positions of each part of a prompt, `[pos]`: where a short prompt lies, padded on one side."""
    parts = [torch.arange(size) < count for size, count in zip(sizes, counts, strict=True)]
    if side == "left":
        parts = [part.flip(0) for part in parts]
    return torch.cat(parts)


def activation_change(padded: FrozenPass, row: int, real: Tensor, alone: FrozenPass) -> float:
    """Return how much the model's own activations of one prompt change when it is padded, on this machine.

    A softmax in float32, say, rounds otherwise over a longer row; nothing computed from it can change less.
    """
    patterns = [block.pattern for block in alone.points.blocks if block.pattern is not None]
    keys = {name: padded.capture.span(name) for name in patterns}
    keys |= {
        block.cross.pattern: padded.capture.span("encoder") for block in alone.points.blocks if block.cross is not None
    }
    worst = 0.0
    expert_numbers = {block.index for block in alone.points.blocks}  # not vectors
    for name in alone.points.captured:
        if name in expert_numbers:
            continue
        mine = padded.activation(name)[row]
        queries = real[padded.capture.span(name)]
        mine = mine[:, queries][:, :, real[keys[name]]] if name in keys else mine[queries]
        worst = max(worst, difference(mine, alone.activation(name)[0]))
    return worst


class Untouched:
    """Inside ``with Untouched(model, who):`` no hook, gradient, weight or mode may change; an error inside stays the
    cause."""

    def __init__(self, model: ModelLike, who: str) -> None:
        self.model: Any = model
        self.who = who

    def __enter__(self) -> None:
        self.before = self._state()

    def __exit__(self, *_: object) -> None:
        for what, after in self._state().items():
            before = self.before[what]
            require(before == after, f"{self.who}: {what} of the model are not what they were ({before} → {after}).")

    def _state(self) -> dict[str, int]:
        parameters = list(self.model.parameters())
        return {
            "hooks": sum(not hook.permanent for hook in hooks_on(self.model)),
            "gradients": sum(parameter.grad is not None for parameter in parameters),
            "weights": sum(parameter._version for parameter in parameters),
            "modes": sum(module.training for module in self.model.modules()),
        }


def named(function: Callable[..., object]) -> str:
    """A check's name, as tests show it."""
    return function.__name__.removeprefix("check_").replace("_", " ")


def untouched(check: Callable[[Any], None], case: Any) -> None:
    """Run a check that must leave the model of its case as it was."""
    with Untouched(case.model, case.who):
        check(case)


def checks_of(
    functions: Sequence[Callable[[Case], None]],
    case: Callable[[], Case],
    label: str = "",
    run: Callable[[Callable[[Case], None], Case], None] = lambda check, case: check(case),
) -> list[Check]:
    """Functions of a case as checks, called by `run`; the case is built when the first of them runs."""
    built = cache(case)

    def check(function: Callable[[Case], None]) -> Check:
        name = ": ".join(filter(None, [label, named(function)]))
        return Check(name, lambda: run(function, built()), of=label)

    return [check(function) for function in functions]


class Allocations(TorchDispatchMode):
    """Counts bytes of storages that operations inside create, until they are freed; `peak` is the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            size = storage.nbytes()
            if key in inputs or key in self.live:
                continue
            self.live[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key)
        return result

    def _freed(self, key: int) -> None:
        self.now -= self.live.pop(key, 0)
