"""Runs of the live model that give the number that is asked about, with something changed in copies of the prompts."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.circuits.stream import StreamTarget
from tensorlens_tl.errors import FrozenModelError
from tensorlens_tl.hooks import FwdHook, capture, refuse_attached
from tensorlens_tl.models.state import refuse_dropout
from tensorlens_tl.passes.copies import repeated
from tensorlens_tl.passes.holding import prove_obedience


def live_numbers(asked: StreamTarget, copies: int, hooks: Sequence[FwdHook]) -> Float[Tensor, "copy batch query"]:
    """The number asked about in a live run of copies of the prompts, as hooks make it."""
    frozen = asked.stream.frozen
    kept, _ = capture(frozen.model, repeated(frozen.inputs, copies), [asked.read_at], hooks=hooks, last=asked.read_at)
    own = kept[asked.read_at].unflatten(0, (copies, len(frozen.tokens)))
    return asked.number(own[:, :, None] if own.ndim == 3 else own)  # a classifier's head is given one vector each


def check_live(asked: StreamTarget, what: str) -> None:
    """Refuse a model that cannot be run live, or that no longer gives the number that the pass holds.

    Raises:
        UnsupportedModelError: it ignores hooks.
        FrozenModelError: a frozen pass is attached to it, or it gives another number now.
    """
    frozen = asked.stream.frozen
    refuse_attached(frozen.model)
    refuse_dropout(frozen.view.model)
    now, held = live_numbers(asked, 1, [])[0], asked.total
    off = float((now - held).abs().max() / held.abs().max().clamp_min(torch.finfo(held.dtype).tiny))
    if not off <= frozen.tolerance:
        raise FrozenModelError(
            f"{what}: the live model gives another number than this pass holds (they differ by {off:.1e}): "
            "hooks were put on it or taken off since. Freeze again."
        )
    prove_obedience(frozen)  # after the number: a hook put on since would look like disobedience


def bytes_per_copy(asked: StreamTarget) -> int:
    """About what one copy of the prompts allocates in a run."""
    x, heads = asked.stream.x[0], max((len(step.nodes) for step in asked.stream.steps), default=1)
    widest = max((hidden.shape[-1] for held in asked.stream.hidden for hidden in held), default=0)
    return 4 * x.shape[0] * x.shape[1] * (2 * x.shape[2] + widest + heads * x.shape[1]) * x.element_size()
