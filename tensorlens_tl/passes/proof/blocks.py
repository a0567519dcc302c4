"""Proofs: do the weights, as they are read, reproduce what the model does?

Every block is composed from its weights in each way its norms allow; the one that reproduces the block's own output on
its own input is its layout. A block that none reproduces is refused, with the first component that differs. A proof may
be made at a few positions of each prompt instead of all (`tensorlens_tl.passes.proof.sampled`), and compares besides
what heads, neurons and sublayers hold and write (`tensorlens_tl.passes.proof.writes`). What follows the last block is
proved the same way, and the unembedding at every token whose logit is asked about.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, Chain
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import observe, own_logits
from tensorlens_tl.models.layouts import Layout, candidates
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.live import LiveModel
from tensorlens_tl.passes.proof.sampled import attention_at, can_be_sampled, cut_to
from tensorlens_tl.passes.proof.writes import SeenWrites, WriteError, tapped, write_errors
from tensorlens_tl.passes.record import Record


def prove(record: Record, every_block: bool = True, seen: SeenWrites | None = None) -> None:
    """Find every block's layout, measure its error, and refuse a block that no layout reproduces.

    This fills in the record's `layouts` and `errors`. Without `every_block` only the first block of each kind is
    proved, and what follows the last block is not. Where the record has `proved_positions`, blocks are proved there
    alone, if they can be evaluated at some positions (`passes.sampling`), and elsewhere as a whole.

    Args:
        record: the pass.
        every_block: whether each block is proved.
        seen: what the model showed of its sublayers, compared as well and dropped block by block (`passes.writes`).

    Raises:
        UnsupportedModelError: a part that no known map reproduces; names it, and what was measured.
    """
    kinds = set[tuple[object, ...]]()
    writes = {} if seen is None else seen.tensors
    for layer in range(record.n_layers):
        block = record.view.blocks[layer]
        with block.loaded():
            _prove_block(record, layer, kinds, every_block, writes)
            if block.offloaded:
                _ = block.widest  # read while the weights are loaded, and cached: it decides how rows are cut
        for name in record.points.blocks[layer].proved:
            writes.pop(name, None)
    if not every_block:
        return
    head = head_error(record)
    if head is not None:
        record.errors["head"] = head
        if not head <= record.tolerance:
            raise UnsupportedModelError(
                f"what stands between the last block and the unembedding of this {record.view.description} is not a "
                f"norm or prediction head as we read it: relative error {head:.1e}, allowed {record.tolerance:.0e}."
            )


class BlockErrors(NamedTuple):
    """How far a block's map is from the model: at the block's output, and at the hook points inside."""

    output: float
    writes: list[WriteError]

    def first_above(self, tolerance: float) -> WriteError | None:
        """The first hook point, in the order of the pass, that differs by more."""
        return next((write for write in self.writes if not write.error <= tolerance), None)


def _errors(record: Record, layer: int, layout: Layout, seen: Mapping[str, Tensor]) -> BlockErrors:
    """What a proof measures of a block, at every position or at the record's `proved_positions`."""
    activations: dict[str, Tensor] = {}
    at = record
    parts = None
    if record.proved_positions is not None and can_be_sampled(record.view, layer):
        at = cut_to(record, layer, record.proved_positions)
        activations["heads"], attention = attention_at(record, layer, layout, record.proved_positions)
        norms = {name: at.norm(layer, name) for name in record.view.blocks[layer].norms}
        parts = (attention, at.mlp(layer), norms)
    if parts is None:
        parts = at.parts(layer)
    block = at.composed(layer, layout, tapped(parts, activations))
    activations["output"] = block(at.resid_pre(layer))
    output = relative_error(activations["output"], at.resid_pre(layer + 1), at.mask)
    return BlockErrors(output, write_errors(at, layer, layout, seen, activations))


def _prove_block(
    record: Record, layer: int, kinds: set[tuple[object, ...]], every_block: bool, seen: Mapping[str, Tensor]
) -> None:
    """Prove one block; `kinds` are those proved before it."""
    tolerance = record.tolerance
    block = record.view.blocks[layer]
    options = candidates(set(block.norms), block.has_mlp, block.cross_attention is not None)
    expected = record.layouts[-1] if record.layouts and record.layouts[-1] in options else None
    hooked = block.mixer is None and block.attention.hooked
    kind = (frozenset(block.norms), type(block.mlp), block.mixer is None, hooked)
    if expected is not None and kind in kinds and not every_block:
        record.layouts.append(expected)
        return
    # blocks of a model mostly share one layout: the one before, or that of an earlier pass, is tried first
    expected = expected or _earlier_layout(record, layer, options)
    layout = expected or _best_layout(record, layer, options)
    errors = None if layout is None else _errors(record, layer, layout, seen)
    if layout is expected and (errors is None or not errors.output <= tolerance):
        layout = _best_layout(record, layer, options)
        errors = None if layout is None else _errors(record, layer, layout, seen)
    if layout is None or errors is None or not errors.output <= tolerance:
        raise UnsupportedModelError(_refusal(record, layer, options, seen))
    write = errors.first_above(tolerance)
    if write is not None:
        raise UnsupportedModelError(_refusal_of_write(record, write, errors.output))
    kinds.add(kind)
    record.layouts.append(layout)
    record.errors[f"blocks.{layer}"] = errors.output
    if errors.writes:
        record.errors[f"blocks.{layer}.writes"] = max(write.error for write in errors.writes)


def block_error(record: Record, layer: int, block: AffineMap) -> float:
    """The relative error of a block's output when a map stands for the block."""
    return relative_error(block(record.resid_pre(layer)), record.resid_pre(layer + 1), record.mask)


def head_error(record: Record) -> float | None:
    """The relative error of what follows the last block: the final norm, or a masked language model's transform."""
    after = [part for part in (record.final_map(), record.prediction_head()) if part is not None]
    predicts = record.points.unembed_in is not None
    if not after and not predicts:
        return None
    expected = record.unembedded() if predicts else record.output
    return relative_error(Chain(tuple(after))(record.resid_pre(record.n_layers)), expected, record.mask)


def unembedding_error(record: Record, positions: Int[Tensor, "batch query"] | None = None) -> float | None:
    """How far ``cap(W_U·x + b_U)`` is from the model's own logits, at some positions.

    Each prompt's last real token was compared when the pass was frozen. Others are compared, by one more run of the
    model, when they are first asked about.

    Args:
        record: the pass.
        positions: which; None for each prompt's last real token.

    Returns:
        The largest ``max abs(ours − logits) / max abs(logits)`` of all the tokens compared so far, padding left out;
        None for a model that predicts no tokens.
    """
    if record.view.unembedding is None or record.points.unembed_in is None:
        return None
    positions = query_positions(record.prompt, -1) if positions is None else positions
    compared = record.logits_compared
    if compared is None or not bool(torch.take_along_dim(compared, positions, dim=1).all()):
        live = LiveModel(record, "the logits at positions that were not compared before")
        places = record.prompt.in_logits(positions)
        states, logits = own_logits(record.model, record.inputs, record.points.unembed_in, places)
        live.check({record.points.unembed_in: states})
        compare_logits(record, record.beside_encoder(states), logits, positions)
    return record.errors["unembed"]


def compare_logits(record: Record, states: Tensor, logits: Any, positions: Int[Tensor, "batch query"]) -> None:
    """Note in the record how far the weights' logits of `states` are from the model's own, at some positions."""
    error = logits_error(record, states, logits, positions)
    compared = torch.zeros_like(record.mask) if record.logits_compared is None else record.logits_compared
    record.logits_compared = compared.scatter(1, positions, True)
    record.errors["unembed"] = max(error, record.errors.get("unembed", 0.0))


def logits_error(record: Record, states: Tensor, logits: Any, positions: Int[Tensor, "batch query"]) -> float:
    """The largest ``max abs(ours − logits) / max abs(logits)`` of real tokens, infinite where shapes differ."""
    ours = record.view.logits(torch.take_along_dim(states, positions[..., None], dim=1))
    if not isinstance(logits, Tensor) or logits.shape != ours.shape:
        return float("inf")
    expected = logits.to(ours)
    scale = expected.abs().amax(-1).clamp_min(torch.finfo(expected.dtype).tiny)
    real = torch.take_along_dim(record.mask, positions, dim=1)
    errors = ((ours - expected).abs().amax(-1) / scale)[real]
    return float(errors.max()) if errors.numel() else 0.0


_earlier: "WeakKeyDictionary[Any, tuple[Any, dict[int, Layout]]]" = WeakKeyDictionary()
# by model: the versions of its weights, and the layouts of blocks where an input excluded all other layouts


def _earlier_layout(record: Record, layer: int, options: Sequence[Layout]) -> Layout | None:
    """The only layout that fitted in an earlier pass of the same weights, or None; it is proved on this pass too."""
    versions, layouts = _earlier.get(record.model, (None, {}))
    layout = layouts.get(layer)
    if record.other_hooks or versions != record.weights.versions or layout not in options:
        return None
    return layout


def _remember(record: Record, layer: int, layout: Layout) -> None:
    if record.other_hooks or record.weights.versions is None:
        return
    versions, layouts = _earlier.get(record.model, (None, {}))
    if versions != record.weights.versions:
        layouts = {}
    _earlier[record.model] = (record.weights.versions, layouts | {layer: layout})


def _best_layout(record: Record, layer: int, options: Sequence[Layout]) -> Layout | None:
    """The one layout that reproduces a block (on its first tokens, where the block is causal), or None.

    Raises:
        UnsupportedModelError: two of them do.
    """
    tolerance = record.tolerance
    short = record.first_tokens(layer)
    parts = short.parts(layer)
    errors = {option: block_error(short, layer, short.composed(layer, option, parts)) for option in options}
    passing = sorted((option for option in options if errors[option] <= tolerance), key=lambda option: errors[option])
    if len(passing) == 1:
        _remember(record, layer, passing[0])
    if len(passing) > 1:
        # Folded norms commute with sublayers that have no bias, and at a single token with attention too. A rule with
        # a constant of its own still shows on which side the norm is; with the other layout it would be wrong.
        tangent = short.parts(layer, "tangent")
        passing = [
            option
            for option in passing
            if block_error(short, layer, short.composed(layer, option, tangent, "tangent")) <= tolerance
        ] or passing
    rounding = torch.finfo(record.resid_pre(layer).dtype).eps
    if len(passing) > 1 and errors[passing[1]] < 10 * max(errors[passing[0]], rounding):
        if _same_map(short, layer, passing):
            return min(passing[:2], key=options.index)
        raise UnsupportedModelError(
            f"blocks.{layer} of this {record.view.description}: two layouts reproduce it equally well "
            f"({errors[passing[0]]:.1e} and {errors[passing[1]]:.1e}), so this input cannot tell its structure; "
            "freeze a longer prompt, or in float64."
        )
    return passing[0] if passing else None


def _same_map(record: Record, layer: int, options: Sequence[Layout]) -> bool:
    """Whether layouts agree on random vectors too (a sublayer that writes nothing): then any of them is right."""
    x = record.resid_pre(layer)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
    first, second = (record.block_map(layer, layout=option)(noise) for option in options[:2])
    return relative_error(first, second, record.mask) <= record.tolerance


def _refusal(record: Record, layer: int, options: Sequence[Layout], seen: Mapping[str, Tensor]) -> str:
    start = f"blocks.{layer} of this {record.view.description} cannot be frozen: "
    if not options:
        norms = ", ".join(record.view.blocks[layer].norms) or "none"
        return start + f"no known layout has the norms it has ({norms})."
    if not seen:
        seen = _writes_again(record, layer)
    errors = {layout: _errors(record, layer, layout, seen) for layout in options}
    best = min(options, key=lambda layout: errors[layout].output)
    tried = ", ".join(f"{layout.name} {error.output:.1e}" for layout, error in errors.items())
    where = ""
    if record.proved_positions is not None and can_be_sampled(record.view, layer):
        where = f" at {record.proof_scope}"
    first = errors[best].first_above(record.tolerance)
    part = f"Attention and MLP agree where they can be seen; the difference is in the norms or in blocks.{layer}.mlp."
    if first is not None:
        part = f"The first part that differs is {_named(first)}."
    return (
        start + f"composed from its weights it misses its own output{where} (relative error: {tried}; allowed "
        f"{record.tolerance:.0e}). {part} {_explanation(record)}"
    )


def _refusal_of_write(record: Record, write: WriteError, output: float) -> str:
    layer = ".".join(write.point.split(".")[:2])
    return (
        f"{layer} of this {record.view.description} cannot be frozen: its output is reproduced to {output:.1e} of the "
        f"whole stream, but {_named(write)} is not what its weights give (allowed {record.tolerance:.0e} of its own "
        f"size). {_explanation(record)}"
    )


def _named(write: WriteError) -> str:
    """A hook point that differs, and by how much."""
    unit = "" if not write.unit else f"{write.unit}: "
    return f"{write.point} ({unit}{write.error:.1e})"


def _explanation(record: Record) -> str:
    if record.view.wrapped_twice:
        return "This Hugging Face model was wrapped by a Bridge before: load it anew, and wrap it once."
    return "Other hooks on the model, or a part that is not attention, norm or MLP, would explain it."


def _writes_again(record: Record, layer: int) -> dict[str, Tensor]:
    """What a block's sublayers write, by one more run of the model, where the pass did not look at it."""
    names = record.points.blocks[layer].proved
    seen = SeenWrites.of(record.view, record.points, len(record.tokens), record.proved_positions, "model")
    observe(record.model, record.inputs, names, seen.see, optional=names)
    return seen.tensors
