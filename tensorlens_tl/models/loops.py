"""The order of calls in a model with two stacks that each run several times, in a loop (HRM-Text).

A slow stack H and a fast stack L each have a state of the size of the residual stream. A call of either reads the sum
of both states; its output, after the norm that ends it, is its new state. Here every call of a block counts as a
separate block, with the same weights but its own activations. ``"L_blocks.0@3"`` is the fourth call of ``L_blocks.0``,
and ``"L_blocks.0@3.attn.hook_pattern"`` is the value at that hook point in the fourth call.
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.names import LOOPS
from tensorlens_tl.models.parameters import innermost

SLOW, FAST = LOOPS


@dataclass(frozen=True)
class StackCall:
    """One call of a stack: its `number`, from 0, its `length` in blocks, and whether it `ends` the model."""

    stack: str
    number: int
    length: int
    ends: bool

    @property
    def norm(self) -> str:
        """The norm at its end."""
        return f"{self.stack.removesuffix('_blocks')}_ln_final@{self.number}"


@dataclass(frozen=True, eq=False)
class Loop:
    """The calls of both stacks, in the order of the forward pass.

    Attributes:
        scale: the factor on the embedding, which gives the slow stack's first state.
        start: the fast stack's first state.
        without_gradients: how many calls the model runs without recording gradients.
    """

    calls: tuple[StackCall, ...]
    scale: float
    start: Float[Tensor, "d_model"]
    without_gradients: int

    @property
    def blocks(self) -> list[tuple[StackCall, int]]:
        """Every call of a block: the call of its stack, and its index in the stack."""
        return [(call, number) for call in self.calls for number in range(call.length)]


def is_looped(model: Any) -> bool:
    """Whether a model has both stacks in place of a single one."""
    parts = getattr(model, "_modules", {})
    if not all(stack in parts for stack in LOOPS):
        return False
    return hasattr(model.original_model.config, "L_cycles")


def call_counts(model: Any) -> dict[str, int]:
    """Return how often each stack is called in a forward pass, by the first letter of its name."""
    config = model.original_model.config
    return {SLOW[0]: config.H_cycles, FAST[0]: config.H_cycles * config.L_cycles}


def read_loop(model: Any) -> Loop | None:
    """Return a model's loop, or None; raise `UnsupportedModelError` for offloaded weights."""
    if not is_looped(model):
        return None
    config = model.original_model.config
    inner = innermost(model.original_model).model
    if inner.z_L_init.is_meta:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its blocks run in a loop, and its weights are offloaded; load it into memory."
        )
    calls: list[StackCall] = []
    without_gradients = 0
    for slow in range(config.H_cycles):
        for fast in range(config.L_cycles):
            calls.append(StackCall(FAST, slow * config.L_cycles + fast, len(getattr(model, FAST)), ends=False))
            without_gradients += fast < config.L_cycles - inner.L_bp_cycles_padded[slow]
        calls.append(StackCall(SLOW, slow, len(getattr(model, SLOW)), ends=slow + 1 == config.H_cycles))
    return Loop(tuple(calls), float(inner.embedding_scale), inner.z_L_init.detach(), without_gradients)
