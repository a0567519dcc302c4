"""What a changed run need not compute again: the layers before its change, and what nobody reads in the last one.

Copies of the prompts are rows of one run. Each enters it at the first block that its change reaches, with the stream
that the pass holds there; the blocks compute the copies that have entered. The MLP of the last block that matters is
called with the positions that are read, as nothing after it reads another one.

Nothing is trusted: whoever skips work compares the number of unchanged copies, and runs the whole model where it
differs (a layer may read what an earlier one computed beside the stream).
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int, Shaped
from torch import Tensor, nn

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import Placing, lock_of
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

    def stream(self, output: Any) -> Tensor:
        """The stream of an output in this form."""
        return output if self.length is None else output[0]


class EarlierLayers:
    """The blocks of a pass's model; each copy of the prompts may enter a run at the first block that its change
    reaches.

    `forms` are those of the blocks' outputs, as noted by `seen`; if one gives more than the stream, no block is
    skipped.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.forms: list[Form] = []
        self._blocks: list[nn.Module] = [block.module for block in capture.view.blocks]
        self._entered: list[int] | None = None
        self._positions: Int[Tensor, "batch query"] | None = None

    @contextmanager
    def seen(self) -> Generator[None, None, None]:
        """A run of the pass's prompts inside shows in what form blocks give the stream."""
        home = threading.get_ident()
        forms: dict[int, Form] = {}

        def note(number: int, module: nn.Module, args: Any, output: Any) -> None:
            form = Form.of(output, self.capture.resid_pre(number + 1).shape)
            if form is not None and threading.get_ident() == home:
                forms[number] = form

        with lock_of(self.capture.model), Placing() as placing:
            for number, block in enumerate(self._blocks):
                placing.on_module(block, partial(note, number))
            yield
        self.forms = list(forms.values())

    @property
    def may_be_skipped(self) -> bool:
        """True if every block gives the stream and nothing else."""
        return len(self.forms) == len(self._blocks)

    @contextmanager
    def skipped(self, firsts: Sequence[int]) -> Generator[None, None, None]:
        """Inside, each copy of the prompts enters a run of this thread at its first block, `firsts`."""
        with lock_of(self.capture.model), Placing() as placing:
            for number, block in enumerate(self._blocks[: max(firsts)]):
                entered = [copy for copy, first in enumerate(firsts) if first <= number]
                replace_forward(placing, block, partial(self._some_copies, number, entered, len(firsts)))
            yield

    def _some_copies(
        self, number: int, entered: list[int], copies: int, computed: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A block's output for the copies that have entered; the others have the pass's own stream."""
        form = self.forms[number]
        stream = torch.cat([self.capture.resid_pre(number + 1)] * copies).to(form.device)
        if not entered:
            return form.output(stream)
        batch = len(stream) // copies
        rows = torch.arange(len(stream), device=form.device).unflatten(0, (copies, batch))[entered].flatten()
        self._entered = entered
        try:
            output = computed(*rows_of(args, rows, len(stream)), **rows_of(kwargs, rows, len(stream)))
        finally:
            self._entered = None
        return form.output(stream.index_copy(0, rows, form.stream(output)))

    @contextmanager
    def narrowed(self, last: int, positions: Int[Tensor, "batch query"]) -> Generator[None, None, None]:
        """Inside, the MLP of the last block that is read computes only the positions that are read, in this thread."""
        mlp = getattr(self._blocks[last], "mlp", None)
        points = self.capture.points.blocks[last]
        is_mixture = bool(points.index or points.weight or points.experts)
        with lock_of(self.capture.model), Placing() as placing:
            if isinstance(mlp, nn.Module) and not is_mixture:
                replace_forward(placing, mlp, partial(self._some_positions, positions))
            yield

    def _some_positions(
        self, positions: Int[Tensor, "batch query"], computed: Callable[..., Any], x: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Return an MLP's output at some positions, zero elsewhere; raise if it reads or gives anything but a
        stream."""
        if not isinstance(x, Tensor) or x.ndim != 3:
            raise UnsupportedModelError("the last MLP is not called with the stream alone.")
        at = positions.repeat(len(x) // len(positions), 1).to(x.device)[..., None]
        self._positions = positions
        try:
            output = computed(x.take_along_dim(at, 1), *args, **kwargs)
        finally:
            self._positions = None
        if not isinstance(output, Tensor) or output.shape[:2] != at.shape[:2]:
            raise UnsupportedModelError("the last MLP gives something else than the stream.")
        return output.new_zeros(*x.shape[:2], output.shape[-1]).scatter(1, at.expand_as(output), output)

    def entered(self, values: Shaped[Tensor, "copy batch pos *rest"]) -> Shaped[Tensor, "some batch some_pos *rest"]:
        """What a hook is given now of values for every copy and position: copies that have entered, positions read."""
        if self._entered is not None:
            values = values[self._entered]
        return self.at_positions(values)

    def at_positions(
        self, values: Shaped[Tensor, "copy batch pos *rest"]
    ) -> Shaped[Tensor, "copy batch some_pos *rest"]:
        """Values at the positions that a hook is given now."""
        if self._positions is None:
            return values
        index = self._positions.to(values.device)[None].expand(len(values), -1, -1)
        return values.take_along_dim(index.reshape(*index.shape, *[1] * (values.ndim - 3)), 2)


@contextmanager
def one_copy_attends(capture: Capture, copies: int) -> Generator[None, None, None]:
    """Inside, attention with hook points in its heads computes the second copy of the prompts only, in this thread.

    For runs in which hooks replace what heads mix in every copy. The unchanged first copy then shows where attention
    adds something of its input.
    """
    batch = len(capture.mask)
    rows = torch.arange(batch, 2 * batch, device=capture.mask.device)

    def attend(computed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return computed(*rows_of(args, rows, copies * batch), **rows_of(kwargs, rows, copies * batch))

    with lock_of(capture.model), Placing() as placing:
        for block, points in zip(capture.view.blocks, capture.points.blocks, strict=True):
            module = getattr(block.module, "attn", None)
            if isinstance(module, nn.Module) and points.heads is not None and points.attention is None:
                replace_forward(placing, module, attend)
        yield


def rows_of(value: Any, rows: Int[Tensor, " row"], count: int) -> Any:
    """Some rows of every tensor that has `count` of them, in tuples, lists and dictionaries too."""
    if isinstance(value, Tensor) and value.ndim and len(value) == count:
        return value.index_select(0, rows.to(value.device))
    if type(value) in (tuple, list):
        return type(value)(rows_of(part, rows, count) for part in value)
    if type(value) is dict:
        return {name: rows_of(part, rows, count) for name, part in value.items()}
    return value


def replace_forward(placing: Placing, module: nn.Module, function: Callable[..., Any]) -> None:
    """Let a function of a module's forward and arguments take its place in this thread, until the placing ends."""
    home = threading.get_ident()
    computed = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != home:
            return computed(*args, **kwargs)
        return function(computed, *args, **kwargs)

    placing.instead_of(module, "forward", forward)
