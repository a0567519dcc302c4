"""Proofs: do the weights, as they are read, reproduce what the model does?

Every block is composed from its weights in each way that its norms allow; the one that reproduces the block's own
output on its own input is its layout. A block that no layout reproduces raises an error with the first component that
differs. A proof may look at a few positions of each prompt instead of all (`tensorlens_tl.passes.proof.sampled`), and
also compares what heads, neurons and sublayers compute and write (`tensorlens_tl.passes.proof.writes`). Products whose
result the model shows are compared without computing them (`tensorlens_tl.passes.proof.projected`). What follows the
last block is proved the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import Chain, on_device
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.algebra.progress import note_progress
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import observe
from tensorlens_tl.models import BlockView, Layout, candidates
from tensorlens_tl.models.lifecycle import OncePerWeights
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.blocks import BlockParts
from tensorlens_tl.passes.capture import Capture
from tensorlens_tl.passes.loops import check_loop
from tensorlens_tl.passes.proof.projected import projected_errors
from tensorlens_tl.passes.proof.sampled import attention_at, can_be_sampled
from tensorlens_tl.passes.proof.writes import BlockErrors, SeenWrites, WriteError, tapped, write_errors

ROUNDINGS = 4
"""How often a block in half precision is composed with other rounding, where that may explain what it misses."""


@dataclass(frozen=True, eq=False)
class Proof:
    """How each block is put together, and how far its map is from the model.

    Attributes:
        layouts: of each block.
        errors: largest relative error of any real token by ``"blocks.0"`` …, ``"blocks.0.writes"`` … (what heads,
            neurons and sublayers hold and write, each against its own size) and ``"head"``.
        positions: where blocks were proved, `[batch, query]`, if the proof was sampled; None for every position.
    """

    layouts: tuple[Layout, ...]
    errors: Mapping[str, float]
    positions: Int[Tensor, "batch query"] | None = None

    @property
    def scope(self) -> str:
        """The positions that blocks were proved at, in words."""
        return scope_of(self.positions)


def scope_of(positions: Int[Tensor, "batch query"] | None) -> str:
    """The positions that a proof looks at, in words."""
    return "every position" if positions is None else "sampled positions of each prompt"


_unambiguous: OncePerWeights[dict[int, Layout]] = OncePerWeights()
# the layouts of blocks where an input excluded all other layouts


def block_error(capture: Capture, layer: int, output: Float[Tensor, "batch pos d_model"]) -> float:
    """Return a map's relative error in place of a block.

    A stream that hooks set to zero is compared with what it was before.
    """
    return relative_error(output, capture.resid_post(layer), capture.mask, capture.additions.of(layer).values())


class LayoutSearch:
    """The search for one block's layout among `candidates`, those with the norms of the block."""

    def __init__(self, maps: BlockMaps, layer: int) -> None:
        block = maps.view.blocks[layer]
        self.maps = maps
        self.layer = layer
        self.candidates = candidates(set(block.norms), block.has_mlp, block.cross_attention is not None)

    def expected(self, previous: Layout | None) -> Layout | None:
        """The layout to try first: that of the block before, or the only one that fitted in an earlier pass."""
        if previous in self.candidates:
            return previous
        earlier = self._earlier().get(self.layer)
        return earlier if earlier in self.candidates else None

    def best(self) -> Layout | None:
        """Return the one layout that reproduces the block (a causal block's first tokens), or None; two raise an
        error."""
        start = self.maps.with_capture(self.maps.capture.block_at_start(self.layer))
        errors = self._errors(start, self.candidates, "ratio")
        passing = [option for option in sorted(errors, key=errors.__getitem__) if self._is_small(errors[option])]
        if not passing:
            return None
        if len(passing) == 1:
            self._remember(passing[0])
            return passing[0]
        # Folded norms commute with sublayers that have no bias, and at a single token with attention too. A rule with
        # a constant of its own still shows on which side the norm is; with the other layout it would be wrong.
        tangent = self._errors(start, passing, "tangent")
        passing = [option for option in passing if self._is_small(tangent[option])] or passing
        rounding = torch.finfo(self.maps.capture.resid_pre(self.layer).dtype).eps
        first, *others = passing
        if not others or errors[others[0]] >= 10 * max(errors[first], rounding):
            return first
        second = others[0]
        if self._same_map(start, first, second):
            return min(first, second, key=self.candidates.index)
        raise UnsupportedModelError(
            f"blocks.{self.layer} of this {self.maps.view.description}: two layouts reproduce it equally well "
            f"({errors[first]:.1e} and {errors[second]:.1e}), so this input cannot tell its structure; freeze a longer "
            "prompt, or in float64."
        )

    def reproducing(self) -> list[Layout]:
        """Every layout that reproduces the block at all tokens, however well another one does."""
        errors = self._errors(self.maps, self.candidates, "ratio")
        return [option for option in self.candidates if self._is_small(errors[option])]

    def _is_small(self, error: float) -> bool:
        return error <= self.maps.tolerance

    def _errors(self, maps: BlockMaps, options: Sequence[Layout], activation: str) -> dict[Layout, float]:
        parts = maps.parts(self.layer, activation)
        x = maps.capture.resid_pre(self.layer)
        return {
            option: block_error(maps.capture, self.layer, maps.composed(self.layer, option, parts, activation)(x))
            for option in options
        }

    def _same_map(self, maps: BlockMaps, first: Layout, second: Layout) -> bool:
        """True if two layouts agree on random vectors too (a sublayer that writes nothing): then either is right."""
        x = maps.capture.resid_pre(self.layer)
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
        output, other_output = (maps.block_map(self.layer, layout=option)(noise) for option in (first, second))
        return relative_error(output, other_output, maps.mask) <= maps.tolerance

    def _earlier(self) -> dict[int, Layout]:
        """The layouts of blocks in earlier passes of the same weights; each is proved on this pass too."""
        capture = self.maps.capture
        if capture.other_hooks:
            return {}
        return _unambiguous.get(capture.model, capture.weights) or {}

    def _remember(self, layout: Layout) -> None:
        capture = self.maps.capture
        if not capture.other_hooks:
            _unambiguous.set(capture.model, capture.weights, self._earlier() | {self.layer: layout})


def prove(
    maps: BlockMaps,
    every_block: bool = True,
    seen: SeenWrites | None = None,
    positions: Int[Tensor, "batch query"] | None = None,
) -> Proof:
    """Find every block's layout and measure its error; raise `UnsupportedModelError` where no layout reproduces it.

    Args:
        every_block: prove each block; else the first of each kind only, and not what follows the last.
        seen: what the model showed of its sublayers, compared as well and dropped block by block.
        positions: compare these only, in blocks that can be evaluated at some positions.
    """
    writes = {} if seen is None else seen.tensors
    layouts: list[Layout] = []
    errors: dict[str, float] = {}
    kinds = set[tuple[object, ...]]()
    for layer in range(len(maps.view.blocks)):
        note_progress("proof of the blocks", layer / len(maps.view.blocks))
        local = maps.at_weights(layer)
        block = local.view.blocks[layer]
        previous = layouts[-1] if layouts else None
        with block.loaded():
            kind = _kind(block)
            proof = _BlockProof(local, layer, on_device(positions, local.mask.device), writes)
            if previous is not None and not every_block and kind in kinds and previous in proof.search.candidates:
                layouts.append(previous)
                continue
            layout, measured = proof.find(previous)
            if block.brought:
                _ = block.widest  # read while the weights are loaded, and cached: it decides how rows are cut
        kinds.add(kind)
        layouts.append(layout)
        errors[f"blocks.{layer}"] = measured.output
        if measured.writes:
            errors[f"blocks.{layer}.writes"] = max(write.error for write in measured.writes)
        for name in maps.points.blocks[layer].proved:
            writes.pop(name, None)
    note_progress("proof of the blocks", 1.0)
    if every_block:
        errors |= _prove_head(maps)
    errors |= check_loop(maps.capture, maps.tolerance)
    return Proof(tuple(layouts), errors, positions)


def _kind(block: BlockView) -> tuple[object, ...]:
    """What blocks of one kind share."""
    hooked = block.mixer is None and block.attention.hooked
    return frozenset(block.norms), type(block.mlp), block.mixer is None, not block.has_beside, hooked


def _prove_head(maps: BlockMaps) -> dict[str, float]:
    """Return the error of what precedes the unembedding, if anything; raise if it is no norm or head as read from
    weights."""
    capture = maps.capture
    after = [part for part in (maps.final_map(), maps.prediction_head()) if part is not None]
    predicts = maps.points.unembed_in is not None
    if not after and not predicts:
        return {}
    expected = capture.unembedded() if predicts else capture.output
    error = relative_error(Chain(tuple(after))(capture.resid_pre(capture.n_layers)), expected, capture.mask)
    if not error <= maps.tolerance:
        raise UnsupportedModelError(
            f"what stands between the last block and the unembedding of this {maps.view.description} is not a "
            f"norm or prediction head as we read it: relative error {error:.1e}, allowed {maps.tolerance:.0e}."
        )
    return {"head": error}


class _BlockProof:
    """One block beside what the model did there."""

    def __init__(
        self,
        maps: BlockMaps,
        layer: int,
        positions: Int[Tensor, "batch query"] | None,
        seen: Mapping[str, Tensor],
    ) -> None:
        self.maps = maps
        self.layer = layer
        self.positions = positions if can_be_sampled(maps.view, layer) else None
        self.seen = seen
        self.search = LayoutSearch(maps, layer)

    def find(self, previous: Layout | None) -> tuple[Layout, BlockErrors]:
        """Return the block's layout and errors; raise where no layout reproduces it, or a part is not what its
        weights give."""
        # blocks of a model mostly share one layout
        for suggest in (partial(self.search.expected, previous), self.search.best):
            layout = suggest()
            if layout is None:
                continue
            errors = self.errors(layout)
            if not errors.output <= self.maps.tolerance:
                continue
            write = errors.first_above(self.maps.tolerance)
            if write is not None:
                raise UnsupportedModelError(self._refusal_of_write(write, errors.output))
            return layout, errors
        raise UnsupportedModelError(self._refusal())

    def errors(self, layout: Layout) -> BlockErrors:
        """What a proof measures of the block, at every position or at some."""
        maps = self.maps
        if self.positions is None:
            measured = projected_errors(maps, self.layer, layout, self.seen)
            if measured is not None:
                return measured
        measured = self._compared(layout, self._noted(maps, layout))
        narrow = upcast(maps.capture.resid_pre(self.layer)).dtype != maps.capture.resid_pre(self.layer).dtype
        if not narrow or max(measured.output, *(write.error for write in measured.writes), 0.0) <= maps.tolerance:
            return measured
        return self._errors_beyond_rounding(layout)

    def _errors_beyond_rounding(self, layout: Layout) -> BlockErrors:
        """Return the errors in half precision, where its rounding alone may exceed the tolerance.

        The block is composed in float32 from half-precision activations, so only the model's rounding is between the
        two. Its size is measured by composing again with inputs, heads, neurons and sublayers moved by half a unit of
        rounding.
        """
        eps = torch.finfo(self.maps.capture.resid_pre(self.layer).dtype).eps
        wide = self.maps.with_capture(self.maps.capture.in_float32(self.layer))
        exact = self._noted(wide, layout)
        generator = torch.Generator().manual_seed(0)

        def moved(x: Tensor) -> Tensor:
            signs = torch.randint(0, 2, x.shape, generator=generator).to(x) * 2 - 1
            return 1 + eps / 2 * signs

        reads = exact["output"]
        rounded = [
            self._noted(wide, layout, {"reads": moved(reads)} | {name: moved(x) for name, x in exact.items()})
            for _ in range(ROUNDINGS)
        ]
        return self._compared(layout, exact, rounded)

    def _noted(self, maps: BlockMaps, layout: Layout, factors: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return what the block's map computes on its way (`tapped`), its ``"output"`` included.

        `factors` multiply what the block reads (``"reads"``), and what it computes on its way.
        """
        factors = factors or {}
        noted: dict[str, Tensor] = {}
        if self.positions is None:
            parts = maps.parts(self.layer)
        else:
            noted["heads"], attention = attention_at(maps, self.layer, layout, self.positions)
            maps = maps.with_capture(maps.capture.block_at(self.layer, self.positions))
            norms = {name: maps.norm(self.layer, name) for name in maps.view.blocks[self.layer].norms}
            parts = BlockParts(attention, maps.mlp(self.layer), norms)
        block = maps.composed(self.layer, layout, tapped(parts, noted, factors))
        reads = maps.capture.resid_pre(self.layer)
        if "reads" in factors:
            reads = reads * factors["reads"]
        noted["output"] = block(reads)
        return noted

    def _compared(
        self, layout: Layout, noted: Mapping[str, Tensor], rounded: Sequence[Mapping[str, Tensor]] = ()
    ) -> BlockErrors:
        """What the block's map computes beside what the model did."""
        maps = self.maps
        if self.positions is not None:
            maps = maps.with_capture(maps.capture.block_at(self.layer, self.positions))
        error = block_error(maps.capture, self.layer, noted["output"])
        return BlockErrors(error, write_errors(maps, self.layer, layout, self.seen, noted, rounded))

    def _refusal(self) -> str:
        maps = self.maps
        block = maps.view.blocks[self.layer]
        start = f"blocks.{self.layer} of this {maps.view.description} cannot be frozen: "
        if not self.search.candidates:
            return start + f"no known layout has its norms ({', '.join(block.norms) or 'none'})."
        if not self.seen:
            self.seen = self._writes_again()
        errors = {layout: self.errors(layout) for layout in self.search.candidates}
        best = min(errors.values(), key=lambda error: error.output)
        tried = ", ".join(f"{layout.name} {error.output:.1e}" for layout, error in errors.items())
        where = "" if self.positions is None else f" at {scope_of(self.positions)}"
        first = best.first_above(maps.tolerance)
        part = (
            "Attention and MLP agree where they can be seen; the difference is in the norms or in "
            f"blocks.{self.layer}.mlp."
        )
        if first is not None:
            part = f"The first part that differs is {_named(first)}."
        return (
            start + f"composed from its weights it misses its own output{where} (relative error: {tried}; allowed "
            f"{maps.tolerance:.0e}). {part} {self._explanation()}"
        )

    def _refusal_of_write(self, write: WriteError, output: float) -> str:
        name = ".".join(write.point.split(".")[:2])
        return (
            f"{name} of this {self.maps.view.description} cannot be frozen: its output is reproduced to {output:.1e} "
            f"of the whole stream, but {_named(write)} is not what its weights give (allowed {self.maps.tolerance:.0e} "
            f"of its own size). {self._explanation()}"
        )

    def _explanation(self) -> str:
        additions = self.maps.capture.additions
        dependent = [point.name for point in additions.dependent if point.layer == self.layer]
        constant = [point.name for point in additions.of(self.layer)]
        if dependent:
            return (
                f"A hook at {' and '.join(dependent)} adds something that depends on what it reads, as a factor or a "
                "projection does; only what is the same whatever the model computes there can be held: vectors that "
                "are added (steering), or values that take its place (a patch). Take it off, or make the change in the "
                "weights."
            )
        patched = [point.name for point in additions.patched if point.layer == self.layer]
        if patched:
            return (
                f"A hook at {' and '.join(patched)} puts values in the place of what the model computes, and this "
                "block does not take them in where the point lies in others. Patch the stream itself, at "
                "hook_resid_pre or hook_resid_post."
            )
        if constant:
            return (
                f"A hook at {' and '.join(constant)} adds a vector, and this block does not take it in at the place "
                "that the point has in others. Add it to the stream itself, at hook_resid_pre or hook_resid_post."
            )
        if self.maps.view.wrapped_twice:
            return "This Hugging Face model was wrapped by a Bridge before: load it again, and wrap it once."
        inside = self.maps.capture.hooks_in(self.maps.view.blocks[self.layer].name)
        if inside:
            return (
                f"A hook at {' and '.join(inside)} may have changed what the block computes inside, which is not held: "
                "only what is added to the stream, or put in its place, is. Take it off, or make the change in the "
                "weights."
            )
        wrapped = getattr(self.maps.capture.model, "original_model", None)
        clip = getattr(getattr(wrapped, "config", None), "clip_qkv", None)
        if clip is not None:
            return (
                f"Its configuration clips queries, keys and values (clip_qkv={clip}), and a number that is clipped is "
                "not what the weights give. Prompts on which nothing is clipped can be frozen."
            )
        return (
            "Other hooks on the model (model.reset_hooks() takes them off), or a part that is not attention, norm or "
            "MLP, would explain it."
        )

    def _writes_again(self) -> dict[str, Tensor]:
        """What the block's sublayers write, by one more run of the model, where the pass did not look at it."""
        capture = self.maps.capture
        names = capture.points.blocks[self.layer].proved
        seen = SeenWrites.of(capture.view, capture.points, len(capture.tokens), self.positions, "model")
        observe(capture.model, capture.inputs, names, seen.see, optional=names)
        return seen.tensors


def _named(write: WriteError) -> str:
    """A hook point that differs, and by how much."""
    unit = f"{write.unit}: " if write.unit else ""
    return f"{write.point} ({unit}{write.error:.1e})"
