"""The live model run from its weights, with every edge under control.

Nothing is frozen here: norms, patterns and activations follow from what they read. The run is batched over circuits
and differentiable, and what a head's queries, keys and values read are apart, for every head. No hook points are
needed, so both of TransformerLens' classes run alike.

Which blocks can be run so, `tensorlens_tl.circuits.compare.live_blocks` says. The run is proved: it must give every
block's own output for both prompts. Of an encoder–decoder the stream has the positions of both stacks, the encoder's
without the norm at its end, which belongs to what reads it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.circuits.compare.live_blocks import encoder_norm, final_norm, live_block, normed, refusal
from tensorlens_tl.circuits.compare.pairs import refuse_hooks
from tensorlens_tl.circuits.live import refuse_other_values
from tensorlens_tl.circuits.stream import StreamTarget
from tensorlens_tl.core import Rule, ruled
from tensorlens_tl.models.parameters import NormWeights, saved_by_name
from tensorlens_tl.passes import PassLike

# ------------------------------------------------------------------ what destinations read


@runtime_checkable
class _Inputs(Protocol):
    """What destinations read."""

    def read(
        self, destinations: slice, written: Float[Tensor, "source row batch pos d"], biases: Tensor
    ) -> Float[Tensor, "destination row batch pos d"]:
        """What a range of destinations reads.

        Args:
            destinations: the range.
            written: the outputs of all sources before them.
            biases: the sum of the biases before them.
        """
        ...


class _WholeStream:
    """Every destination reads all that was written before it, as in the model; it is recorded.

    Attributes:
        streams: what each range of destinations read, by the first of them, `[destination, row, batch, pos, d]`.
        written: the outputs of all sources before the last range.
    """

    def __init__(self) -> None:
        self.streams: dict[int, Tensor] = {}
        self.written = torch.empty(0)

    def read(self, destinations: slice, written: Tensor, biases: Tensor) -> Tensor:
        stream = written.sum(0) + biases
        self.written = written
        self.streams[destinations.start] = stream.expand(destinations.stop - destinations.start, *stream.shape)
        return self.streams[destinations.start]


@dataclass(frozen=True, eq=False)
class _MixedStream:
    """Destinations read the corrupted stream plus the differences along the clean edges.

    Attributes:
        clean_edges: 1 for a clean edge, 0 for a corrupted one.
        corrupted: the run of the corrupted prompt.
    """

    clean_edges: Float[Tensor, "row source destination"]
    corrupted: _WholeStream

    def read(self, destinations: slice, written: Tensor, biases: Tensor) -> Tensor:
        difference = written - self.corrupted.written[: len(written)]
        edges = self.clean_edges[:, : len(written), destinations]
        return self.corrupted.streams[destinations.start] + torch.einsum("rst,srbpd->trbpd", edges, difference)


# ------------------------------------------------------------------ runs


class Replay:
    """The live model with every edge apart, beside what it does for the corrupted prompt.

    Args:
        readout: the target of the clean prompt.
        clean, corrupted: the two passes.
        exists: which pairs are edges.

    Raises:
        UnsupportedModelError: a block cannot be run from its weights, or the run does not reproduce the model.
        FrozenModelError: hooks on the model make it differ from the model of the passes.
    """

    def __init__(
        self,
        readout: StreamTarget,
        clean: PassLike,
        corrupted: PassLike,
        exists: Bool[Tensor, "source destination"],
    ) -> None:
        refuse_hooks(clean, corrupted)
        self.readout = readout
        self.frozen = clean
        self.corrupted = corrupted
        self.exists = exists
        view = clean.view
        if view.mlm_head is not None or view.class_head is not None or readout.stream.steps[-1].outer.mixes:
            raise refusal(view, "a prediction head or a classifier's stands after its final norm")
        self.blocks = [live_block(clean, corrupted, layer) for layer in range(view.n_layers)]
        self.final = final_norm(view)
        self.encoder_final = encoder_norm(view)
        with torch.no_grad():
            self.clean_run = self._proved_run(clean)
            self.corrupted_run = self._proved_run(corrupted)

    # ------------------------------------------------------------------ questions

    @torch.no_grad()
    def numbers(
        self, clean_edges: Bool[Tensor, "circuit source destination"], memory: Memory
    ) -> Float[Tensor, "circuit batch"]:
        """The target's number with only these edges clean."""
        return self._numbers(len(clean_edges), lambda rows: clean_edges[rows.start : rows.stop], memory)

    def _numbers(
        self, circuits: int, clean_edges: Callable[[range], Bool[Tensor, "row source destination"]], memory: Memory
    ) -> Float[Tensor, "circuit batch"]:
        """The same for edges that are computed for a range of circuits only when those run."""
        x = self.frozen.resid_pre(0)
        widest = max(part.destinations for block in self.blocks for part in block.parts) + 4 * len(self.exists)
        per_row = 2 * widest * x.numel() * x.element_size() + (1 + x.element_size()) * self.exists.numel()
        numbers = [
            self._run(x.expand(len(rows), *x.shape), _MixedStream(clean_edges(rows).to(x), self.corrupted_run))
            for rows in chunks(circuits, per_row, memory, "circuits")
        ]
        return torch.cat(numbers)

    def patched(self, memory: Memory) -> Float[Tensor, "batch source destination"]:
        """What the target loses with each edge corrupted by itself."""
        edges = self.exists.nonzero()

        def all_but_one(rows: range) -> Bool[Tensor, "row source destination"]:
            source, destination = edges[rows.start : rows.stop].T
            clean_edges = self.exists.repeat(len(rows), 1, 1)
            clean_edges[torch.arange(len(rows), device=clean_edges.device), source, destination] = False
            return clean_edges

        losses = self.readout.total[:, 0] - self._numbers(len(edges), all_but_one, memory)
        scores = losses.new_zeros(losses.shape[1], *self.exists.shape)
        scores[:, self.exists] = losses.T
        return scores

    def products(
        self, cotangents: Float[Tensor, "destination batch pos d"], positions: bool
    ) -> Float[Tensor, "batch source destination *pos"]:
        """The difference of each source's output, dotted with a vector at each destination that reads it.

        The products are summed over positions unless `positions` is set.
        """
        difference = self.clean_run.written - self.corrupted_run.written
        scores = edge_products(difference[:, 0], cotangents, positions)
        exists = self.exists
        if positions:
            exists = exists[..., None]
        return scores * exists

    def gradients(self, shares: Sequence[float], rule: Rule | None = None) -> Float[Tensor, "destination batch pos d"]:
        """Gradients of the target by what every destination reads, averaged over these shares of the way.

        Args:
            shares: of the way from the corrupted to the clean embeddings.
            rule: what gradients follow; None for the model's own.
        """
        mean = self._gradients(shares[0], rule) / len(shares)
        for share in shares[1:]:
            mean += self._gradients(share, rule) / len(shares)
        return mean

    def _gradients(self, share: float, rule: Rule | None) -> Float[Tensor, "destination batch pos d"]:
        recorded = _WholeStream()
        with saved_by_name(self.frozen.model), torch.enable_grad():
            x = torch.lerp(self.corrupted.resid_pre(0), self.frozen.resid_pre(0), share).clone().requires_grad_(True)
            with ruled(self.frozen.model, rule):
                number = self._run(x[None], recorded)
            if rule is not None:
                with torch.no_grad():
                    refuse_other_values(self.frozen, number, self._run(x[None], _WholeStream()))
            gradients = torch.autograd.grad(number.sum(), list(recorded.streams.values()), materialize_grads=True)
        return torch.cat([gradient[:, 0] for gradient in gradients])

    def _run(self, x: Float[Tensor, "row batch pos d"], inputs: _Inputs) -> Float[Tensor, "row batch"]:
        """The target's number of one run from the first block's input."""
        written = x[None]
        biases = torch.zeros_like(x)
        first = 0
        for block in self.blocks:
            before = (written, biases)
            for part in block.parts:
                if not block.parallel:
                    before = (written, biases)
                places = slice(first, first + part.destinations)
                first = places.stop
                written = torch.cat([written, part.outputs(inputs.read(places, *before))])
                biases = part.plus_bias(biases)
        final = inputs.read(slice(first, first + 1), written, biases)[0]
        return self.readout.number(self._after_encoder(final, self.final))[..., 0]

    def _after_encoder(self, x: Float[Tensor, "*rows pos d"], last: NormWeights | None) -> Float[Tensor, "*rows pos d"]:
        """A stream with the output of its encoder, if it has one, and the rest after a norm, if one is given."""
        length = self.frozen.prompt.encoder_length
        rest = normed(last, x[..., length:, :])
        if not length:
            return rest
        return torch.cat([normed(self.encoder_final, x[..., :length, :]), rest], dim=-2)

    def _proved_run(self, frozen: PassLike) -> _WholeStream:
        """The run of a prompt, which gives the outputs of the model's own blocks."""
        recorded = _WholeStream()
        numbers = self._run(frozen.resid_pre(0)[None], recorded)[0]
        first = 0
        for layer in range(len(self.blocks) + 1):
            stream = recorded.streams[first][0, 0]
            if layer >= frozen.view.encoder_layers:
                stream = self._after_encoder(stream, None)
            error = relative_error(stream, frozen.resid_pre(layer))
            if not error <= frozen.tolerance:
                name = self.blocks[layer - 1].name
                raise refusal(frozen.view, f"{name}, run from its weights, differs from the model's own by {error:.1e}")
            if layer < len(self.blocks):
                first += self.blocks[layer].destinations
        expected = self.readout.number_of(frozen.activation)[:, 0]
        size = float(expected.abs().max().clamp_min(torch.finfo(expected.dtype).tiny))
        if not float((numbers - expected).abs().max()) <= frozen.tolerance * max(size, 1.0):
            raise refusal(frozen.view, "ln_final, run from its weights, differs from the model's own")
        return recorded


def edge_products(
    written: Float[Tensor, "source batch pos d"], cotangents: Float[Tensor, "destination batch pos d"], positions: bool
) -> Float[Tensor, "batch source destination *pos"]:
    """What every source wrote, dotted with a vector at every destination, by position or summed over positions."""
    if positions:
        return torch.einsum("sbpd,tbpd->bstp", upcast(written), upcast(cotangents))
    sources, destinations = (upcast(vectors).transpose(0, 1).flatten(2) for vectors in (written, cotangents))
    return sources @ destinations.mT  # as matrices, which einsum would copy first
