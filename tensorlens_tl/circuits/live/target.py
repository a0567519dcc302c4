"""The target's number in runs of the live model, with something changed in copies of the prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.circuits.stream import StreamTarget
from tensorlens_tl.hooks import FwdHook, capture
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.live import Copies, EarlierLayers, prove_obedience, repeated


class LiveTarget:
    """A target of the live model.

    Attributes:
        readout: the target of the pass.
        frozen: the pass.
        question: the function that was called, for messages.
        earlier: the layers that a change need not compute again.
        seen: what the model gave at some hook points in the run that compares its number with the pass's.

    Args:
        readout, question: as above.
        points: those hook points besides those that the target reads.

    Raises:
        UnsupportedModelError: the model ignores hooks.
        FrozenModelError: it is no longer that of the pass, gives another number now, or a frozen pass is attached to
            it.
    """

    def __init__(self, readout: StreamTarget, question: str, points: Sequence[str] = ()) -> None:
        self.readout = readout
        self.frozen = readout.stream.run
        self.question = question
        self.earlier = EarlierLayers(self.frozen.capture)
        self._model = self.frozen.live(question)
        read = readout.read_of(self.frozen.activation)
        activations = torch.take_along_dim(read, readout.positions[..., None], dim=1)
        sizes = activations.norm(dim=-1).to(readout.vectors) * readout.vectors.norm(dim=-1)
        # a difference of two logits may be small beside the rounding of the logits themselves
        rounding = 32 * torch.finfo(activations.dtype).eps / activations.shape[-1] ** 0.5
        self._scale = max(float(readout.total.abs().max()), rounding / self._model.tolerance * float(sizes.max()))
        with self.earlier.seen():
            self.seen = self.run_of(self.frozen, points)
        error = self._error(self.number(self.seen)[0])
        self._model.refuse(error, f"they differ by {error:.1e}")
        prove_obedience(self.frozen.maps)  # after the number: a hook put on since would look like disobedience

    def numbers(self, copies: int, hooks: Sequence[FwdHook]) -> Float[Tensor, "copy batch query"]:
        """The number in one run of copies of the prompts, as hooks make it.

        Args:
            copies: how many there are.
            hooks: what changes them.
        """
        names = self.readout.points
        inputs = repeated(self.frozen.inputs, copies)
        activations, _ = capture(self.frozen.model, inputs, names, hooks=hooks, last=names[-1])
        return self.number(activations, copies)

    def run_of(self, frozen: FrozenPass, points: Sequence[str]) -> dict[str, Tensor]:
        """What the model gives for the prompts of a pass at hook points, and where the target reads it, the last."""
        names = list(dict.fromkeys([*points, *self.readout.points]))
        return capture(frozen.model, frozen.inputs, names, last=self.readout.points[-1])[0]

    def number(self, activations: Mapping[str, Tensor], copies: int = 1) -> Float[Tensor, "copy batch query"]:
        """The number of what copies of some prompts have at the hook points where the target reads it."""
        return self.readout.number_of(lambda name: self._by_copy(activations[name], copies))

    def _by_copy(self, activations: Float[Tensor, "..."], copies: int) -> Float[Tensor, "copy batch some d_model"]:
        """Activations of copies of the prompts; a classifier's head is given one vector for each prompt."""
        return activations.reshape(copies, len(self.frozen.tokens), -1, activations.shape[-1])

    def changed(
        self,
        changes: int,
        run: Callable[[Copies], Float[Tensor, "copy batch query"]],
        memory: Memory,
        title: str,
    ) -> Iterator[tuple[range, Float[Tensor, "change batch query"]]]:
        """The number under each of some changes; see `LiveModel.changed`."""
        return self._model.changed(changes, run, self._error, self._bytes_per_copy, memory, title)

    @property
    def shares_layers(self) -> bool:
        """Whether a run may begin at the first layer that a change reaches: nobody's hooks count on the others."""
        return self.earlier.may_be_skipped and not self._model.alone

    def only_what_is_read(self) -> AbstractContextManager[None]:
        """Inside, the last layer's MLP is computed at the queries alone, where that saves something."""
        positions = self.readout.positions
        if positions.shape[1] >= self.frozen.tokens.shape[1] or self.frozen.sides is not None:
            return nullcontext()
        return self.earlier.narrowed(self.readout.stream.layers.stop - 1, positions)

    def gives_its_number(self, numbers: Float[Tensor, "batch query"]) -> bool:
        """Whether a copy that is left as it is gives the pass's number."""
        return self._error(numbers) <= self._model.tolerance

    def check_other(self, other: Float[Tensor, "batch query"], held: Float[Tensor, "batch query"]) -> None:
        """Refuse a run of other prompts that gives another number than their pass holds."""
        error = float((other - held).abs().max()) / max(self._scale, float(held.abs().max()))
        self._model.refuse(error, f"of the corrupted prompts they differ by {error:.1e}")

    def _error(self, numbers: Float[Tensor, "batch query"]) -> float:
        tiny = torch.finfo(self.readout.total.dtype).tiny
        return float((numbers - self.readout.total).abs().max()) / max(self._scale, tiny)

    @property
    def _bytes_per_copy(self) -> int:
        """About what one copy of the prompts allocates in a run."""
        stream = self.readout.stream
        x = stream.x[0]
        heads = max((len(step.nodes) for step in stream.steps), default=1)
        per_position = 2 * x.shape[2] + stream.widest + heads * x.shape[1]
        return 4 * x.shape[0] * x.shape[1] * per_position * x.element_size()
