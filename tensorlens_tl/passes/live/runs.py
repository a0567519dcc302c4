"""Runs of the live model on behalf of a pass, with something changed in copies of its prompts.

Every further run of the model for a pass goes through `LiveModel`, which refuses a model that is no longer that of the
pass: other weights, another configuration, dropout, a frozen pass attached, or activations that differ.

Several changes are run at once as copies of the prompts, one after the other in the rows of a batch. Code that
somebody put on the model may act on one row only (``t[0, 3] += v``, the usual idiom with one prompt), and would not
reach the copies in the other rows. So

* where such code is seen (`tensorlens_tl.hooks.foreign_hooks`), each copy is run by itself, in a batch of the pass's
  own shape;
* where none is, the first and the last copy of every batch are left as they are, and both must give the pass's number.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.memory import Memory, chunks, in_bytes
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.errors import FrozenModelError
from tensorlens_tl.hooks import capture, foreign_hooks, refuse_attached
from tensorlens_tl.models.lifecycle import refuse_dropout
from tensorlens_tl.passes.capture import Capture

Copies = Sequence[int | None]
"""What is changed in each copy of the prompts: the number of a change, or None for a copy that is left as it is."""

SAME_SHAPE = 1e-5
"""How far two runs of the same batch may be apart, relative to their vectors, in any precision: they do the same."""


class LiveModel:
    """The model of a pass, to be run again.

    Attributes:
        question: the subject of messages, such as ``"logits"``.
        alone: user hooks are on the model, so that every copy of the prompts runs by itself.
        tolerance: how far a run may be from the pass, relative to its vectors; where hooks changed since, a run of the
            same batch must repeat the pass but for rounding.

    Raises:
        InvalidInputError: the model is now in train mode, and drops activations.
        FrozenModelError: its weights or configuration changed since the pass, or a frozen pass is attached.
    """

    def __init__(self, capture: Capture, tolerance: float, question: str) -> None:
        capture.check_fresh()
        refuse_attached(capture.model)
        refuse_dropout(capture.view.model)
        self.capture = capture
        self.question = question
        others = foreign_hooks(capture.model)
        self.alone = bool(others)
        self.same_hooks = capture.hook_numbers == frozenset(hook.number for hook in others)
        self.copies_tolerance = tolerance
        self.tolerance = tolerance if self.same_hooks else min(tolerance, SAME_SHAPE)

    def check(self, seen: Mapping[str, Tensor]) -> None:
        """Raise `FrozenModelError` for the first activation (by hook point) of a run of these prompts that is not
        the pass's."""
        for name, tensor in seen.items():
            expected = self.capture.activation(name)
            mask = self.capture.mask[:, self.capture.span(name)]
            real = mask if mask.shape == expected.shape[:2] else None  # a classifier's head reads one vector
            live = tensor.detach().to(expected.device).reshape(expected.shape)
            error = relative_error(upcast(live), upcast(expected), real)
            self.refuse(error, f"{name} differs by {error:.1e}")

    def check_hooks(self) -> None:
        """Where hooks were put on or taken off since the pass, run its prompts once and `check` what they give."""
        if not self.same_hooks:
            name = self.capture.points.last_output
            self.check(capture(self.capture.model, self.capture.inputs, [name], last=name)[0])

    def refuse(self, error: float, where: str) -> None:
        """Raise `FrozenModelError` for a run that is further from the pass than allowed; NaN is."""
        if not error <= self.tolerance:
            raise self._other_model(where)

    def _other_model(self, where: str) -> FrozenModelError:
        changed = "" if self.same_hooks else " (hooks were put on it or taken off since)"
        return FrozenModelError(
            f"{self.question}: the live model gives another number than this pass holds{changed}: {where}. Freeze "
            "again."
        )

    def changed(
        self,
        changes: int,
        run: Callable[[Copies], Float[Tensor, "copy *rest"]],
        error: Callable[[Float[Tensor, "*rest"]], float],
        bytes_per_copy: int,
        memory: Memory,
        title: str,
        parts: int = 1,
    ) -> Iterator[tuple[range, Float[Tensor, "change *rest"]]]:
        """Run every change in a copy of the prompts, as many at once as fit `memory`; yields changes and what copies
        give.

        Args:
            changes: how many there are.
            run: runs copies of the prompts, and returns what each gives.
            error: of what an unchanged copy gives, relative to the pass.
            bytes_per_copy: what one copy allocates.
            title: of the progress bar.
            parts: the least number of runs.

        Raises:
            FrozenModelError: an unchanged copy gives another number than the pass.
            SizeError: one copy is larger than a bound that was given.
        """
        room = in_bytes(memory) - 2 * bytes_per_copy
        singly = self.alone or changes == 1 or room < bytes_per_copy
        self.check_hooks()
        if singly or not self.same_hooks:
            off = error(run([None])[0])
            self.refuse(off, f"they differ by {off:.1e}")
        if singly:
            for rows in chunks(changes, bytes_per_copy, memory, title, parts=max(changes, 1)):
                yield rows, run(list(rows))
            return
        for rows in chunks(changes, bytes_per_copy, room, title, parts=parts):
            outputs = run([None, *rows, None])
            self._check_controls(error(outputs[0]), error(outputs[-1]))
            yield rows, outputs[1:-1]

    def _check_controls(self, first: float, last: float) -> None:
        """Raise `FrozenModelError` where an unchanged copy gives another number than the pass: rows of a batch
        differ."""
        if not first <= self.copies_tolerance:
            raise self._other_model(f"they differ by {first:.1e}")
        if not last <= self.copies_tolerance:
            raise FrozenModelError(
                f"{self.question}: the prompts give another number in the last rows of a batch than in the first (they "
                f"differ by {last:.1e}): something acts on some rows only, and it is no hook that we can see. Let it "
                "act on every row; or put it on the model as a hook, and prompts are run one by one."
            )


def repeated(inputs: Mapping[str, Any], copies: int) -> dict[str, Any]:
    """A pass's inputs with every prompt as often as there are copies, copy after copy."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return dict(inputs) | {name: torch.cat([value] * copies) for name, value in tensors.items()}
