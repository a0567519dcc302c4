"""The number that is asked about, in runs of the live model with something changed in copies of the prompts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.circuits.stream import StreamTarget, Sublayer
from tensorlens_tl.hooks import BlockPoints, FwdHook, capture
from tensorlens_tl.passes.live import Copies, prove_obedience, repeated


class LiveTarget:
    """What is asked about, of the live model.

    Raises:
        UnsupportedModelError: the model ignores hooks.
        FrozenModelError: it is no longer that of the pass, gives another number now, or a frozen pass is attached to
            it.
    """

    def __init__(self, asked: StreamTarget, what: str) -> None:
        self.asked = asked
        self.frozen = asked.stream.frozen
        self._model = self.frozen.live(what)
        activations = torch.take_along_dim(self.frozen.activation(asked.read_at), asked.positions[..., None], dim=1)
        sizes = activations.norm(dim=-1).to(asked.vectors) * asked.vectors.norm(dim=-1)
        # a difference of two logits may be small beside the rounding of what it is made from
        rounding = 32 * torch.finfo(activations.dtype).eps / activations.shape[-1] ** 0.5
        self._scale = max(float(asked.total.abs().max()), rounding / self._model.tolerance * float(sizes.max()))
        off = self._error(self.numbers(1, [])[0])
        self._model.refuse(off, f"they differ by {off:.1e}")
        prove_obedience(self.frozen.maps)  # after the number: a hook put on since would look like disobedience

    def numbers(
        self, copies: int, hooks: Sequence[FwdHook], inside: AbstractContextManager[None] | None = None
    ) -> Float[Tensor, "copy batch query"]:
        """The number in one run of copies of the prompts, as hooks make it.

        Args:
            copies: how many there are.
            hooks: what changes them.
            inside: what the run takes place in, for changes where there is no hook point.
        """
        readout = self.asked
        frozen = self.frozen
        inputs = repeated(frozen.inputs, copies)
        with inside or nullcontext():
            activations, _ = capture(frozen.model, inputs, [readout.read_at], hooks=hooks, last=readout.read_at)
        vectors = activations[readout.read_at].unflatten(0, (copies, len(frozen.tokens)))
        if vectors.ndim == 3:  # a classifier's head is given one vector per prompt
            vectors = vectors[:, :, None]
        return readout.number(vectors)

    def changed(
        self,
        changes: int,
        run: Callable[[Copies], Float[Tensor, "copy batch query"]],
        memory: Memory,
        title: str,
    ) -> Iterator[tuple[range, Float[Tensor, "change batch query"]]]:
        """The number under each of some changes; see `LiveModel.changed`."""
        return self._model.changed(changes, run, self._error, self._bytes_per_copy, memory, title)

    def check_other(self, other: Float[Tensor, "batch query"], held: Float[Tensor, "batch query"]) -> None:
        """Refuse a run of other prompts that gives another number than their pass holds."""
        off = float((other - held).abs().max()) / max(self._scale, float(held.abs().max()))
        self._model.refuse(off, f"of the corrupted prompts they differ by {off:.1e}")

    def _error(self, numbers: Float[Tensor, "batch query"]) -> float:
        tiny = torch.finfo(self.asked.total.dtype).tiny
        return float((numbers - self.asked.total).abs().max()) / max(self._scale, tiny)

    @property
    def _bytes_per_copy(self) -> int:
        """About what one copy of the prompts allocates in a run."""
        stream = self.asked.stream
        x = stream.x[0]
        heads = max((len(step.nodes) for step in stream.steps), default=1)
        widest = max((hidden.shape[-1] for held in stream.hidden for hidden in held), default=0)
        return 4 * x.shape[0] * x.shape[1] * (2 * x.shape[2] + widest + heads * x.shape[1]) * x.element_size()


def hidden_point(sublayer: Sublayer, points: BlockPoints) -> str | None:
    """The hook point of a sublayer's hidden vector; None where no hook reaches it."""
    inside = {"head": points.z, "mlp": points.post}
    if points.attention is not None:  # held as a whole
        del inside["head"]
    return inside.get(sublayer.kind)
