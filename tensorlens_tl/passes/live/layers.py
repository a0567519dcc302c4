"""The layers before a change, which need not be computed again: their blocks hand on the stream that the pass holds.

Nothing is trusted: whoever skips blocks compares the number of an unchanged copy, and runs the whole model where it
differs (a layer may read what an earlier one computed beside the stream).
"""

import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens_tl.hooks import lock_of
from tensorlens_tl.passes.capture import Capture


class Form(NamedTuple):
    """How a block gives the stream: alone, or first in a tuple of nothing else."""

    device: torch.device
    length: int | None

    @classmethod
    def of(cls, output: Any, shape: torch.Size) -> "Form | None":
        """The form of an output; None where it is more than the stream."""
        if isinstance(output, Tensor):
            return cls(output.device, None) if output.shape == shape else None
        if not isinstance(output, tuple) or any(part is not None for part in output[1:]):
            return None
        alone = cls.of(output[0], shape)
        return alone and alone._replace(length=len(output))

    def output(self, stream: Tensor) -> Any:
        """The stream in this form."""
        stream = stream.to(self.device)
        return stream if self.length is None else (stream, *[None] * (self.length - 1))


class EarlierLayers:
    """The blocks of a pass's model, to be skipped up to the first that is changed.

    Attributes:
        capture: the pass.
        forms: of the blocks' outputs, which `seen` notes; fewer than there are blocks where one gives more than the
            stream, and then none is skipped.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.forms: list[Form] = []
        self._blocks: list[nn.Module] = [block.module for block in capture.view.blocks]

    @contextmanager
    def seen(self) -> Generator[None, None, None]:
        """A run of the pass's prompts inside shows in what form blocks give the stream."""
        home = threading.get_ident()
        forms: dict[int, Form] = {}

        def note(number: int, module: nn.Module, args: Any, output: Any) -> None:
            form = Form.of(output, self.capture.resid_pre(number + 1).shape)
            if form is not None and threading.get_ident() == home:
                forms[number] = form

        with lock_of(self.capture.model), ExitStack() as stack:
            for number, block in enumerate(self._blocks):
                stack.callback(block.register_forward_hook(partial(note, number)).remove)
            yield
        self.forms = list(forms.values())

    @property
    def may_be_skipped(self) -> bool:
        """Whether every block gives the stream and nothing else."""
        return len(self.forms) == len(self._blocks)

    @contextmanager
    def skipped(self, first: int, copies: int) -> Generator[None, None, None]:
        """Inside, blocks before `first` compute nothing in this thread, and give the pass's own stream.

        Args:
            first: the first block that is computed.
            copies: how many copies of the prompts are run.
        """
        stream = torch.cat([self.capture.resid_pre(first)] * copies)
        with lock_of(self.capture.model), ExitStack() as stack:
            for block, form in zip(self._blocks[:first], self.forms, strict=False):
                _replace_forward(stack, block, form.output(stream))
            yield


def _replace_forward(stack: ExitStack, block: nn.Module, output: Any) -> None:
    """Let a block give this until the stack ends; other threads call it as it is."""
    home = threading.get_ident()
    computed = block.forward
    replaced = vars(block).get("forward")

    def forward(*args: Any, **kwargs: Any) -> Any:
        return output if threading.get_ident() == home else computed(*args, **kwargs)

    def restore() -> None:
        if replaced is None:
            del vars(block)["forward"]
        else:
            vars(block)["forward"] = replaced

    vars(block)["forward"] = forward
    stack.callback(restore)
