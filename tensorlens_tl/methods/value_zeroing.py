"""Value zeroing: Mohebbi et al. 2023.

    x̃_i^{¬j}   output of a layer at token i, with the values of token j zero in all its heads
    C_ij = 1 − cos(x̃_i^{¬j}, x̃_i), rows divided by their sum;   aggregated by the product of C

The layer's input is that of the pass, so its patterns are unchanged; its norms and its MLP (with any routing of
experts) are the live model's and respond. "Output" is that of the whole layer, MLP included, as in the original. The
residual connection is inside the layer, and none is added between layers.

One run of the live model serves all layers: every layer's input is reset to its own. Attention is changed where its
heads' mixed values leave it (`attn.hook_z`, minus the pattern times the value of the zeroed token), or at its output if
it is frozen as a whole. A gate or a norm inside attention would respond to what is zeroed; such attention raises an
error.

With its input and its attention given, a layer treats every position separately, so a row of a run can hold any
positions, each with another token zeroed. In a causal model nothing changes before the zeroed token: rows of the
prompts' length are filled with the positions from it on, half as many as there are tokens. The last row of a run has
the prompts' own positions in reversed order and nothing zeroed, and must reproduce the pass; if it does not (a position
acts on others by other means than attention), or the model reads more than tokens, a row is a whole prompt with one
token zeroed. The cosine is ``½·‖x̃/‖x̃‖ − ỹ/‖ỹ‖‖²``, the same number without the cancellation of 1 − cos near zero.

In a decoder block of an encoder–decoder the value of an encoder's token is the one in cross-attention, so a row covers
both sides (one row for both is ours). Cross-attention's pattern is the live model's: its queries respond.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra import Chain
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import AttentionPoints, FwdHook, capture, in_this_thread
from tensorlens_tl.layerwise import Maps, normalize_rows, of_layers, only_acting, product
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.live import Copies, LiveModel, one_copy_attends, prove_obedience, repeated
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.results import Attribution


@register_layer_map("value-zeroing", holds_residual=True, needs=("head_vectors",), both_stacks=True)
def value_zeroing_map(frozen: FrozenPass, memory: Memory = None) -> Maps:
    """Return C_ij of every layer, rows divided by their sum."""
    in_bytes(memory)
    live = frozen.live("value-zeroing")
    heads = _Heads(frozen, live)
    prove_obedience(frozen.maps)
    batch, pos = frozen.tokens.shape
    tokens_alone = frozen.view.reads == "tokens" and not frozen.prompt.extra
    one_causal_stack = frozen.causal and frozen.sides is None
    layout = _proven_layout(heads, may_pack=one_causal_stack and tokens_alone and not live.alone)
    x = frozen.resid_pre(0)
    count = max(frozen.view.blocks[layer].attention.heads for layer in range(frozen.n_layers))
    per_row = 2 * frozen.row_bytes + 4 * batch * count * pos * pos * x.element_size()

    def run(copies: Copies) -> Float[Tensor, "copy layer batch pos"]:
        if heads.attends_once and len(copies) > 2 and copies[0] is None:
            changes = shared(copies)
            if changes is not None:
                return changes
            heads.attends_once = False
        return _Run(heads, layout.of(copies)).changes.transpose(0, 1)

    def shared(copies: Copies) -> Float[Tensor, "copy layer batch pos"] | None:
        """Run with one copy's attention for all; None if unchanged copies do not reproduce the pass."""
        try:
            with one_copy_attends(frozen.capture, len(copies)):
                changes = _Run(heads, layout.of(copies)).changes.transpose(0, 1)
        except Exception:  # a model may raise anything if its attention is called this way: run it normally instead
            return None
        return changes if max(turned(changes[0]), turned(changes[-1])) <= frozen.tolerance else None

    def turned(changes: Float[Tensor, "layer batch pos"]) -> float:
        return float((2 * changes[:, frozen.mask[:, layout.control]]).sqrt().max())

    changes = torch.zeros(frozen.n_layers, batch, pos, pos, dtype=upcast(x).dtype, device=x.device)
    for rows, values in live.changed(len(layout), run, turned, per_row, memory, "value zeroing"):
        chosen = layout.of(rows)
        changes[:, :, chosen.query, chosen.zeroed] = values.permute(1, 2, 0, 3)
    pairs = frozen.mask[:, :, None] & frozen.mask[:, None]
    if frozen.causal:  # changes ahead of a query are rounding
        pairs = pairs.tril()
    maps = normalize_rows(changes * pairs)
    if frozen.sides is not None:  # a block leaves the other side's tokens unchanged
        identity = torch.diag_embed(frozen.mask.to(maps)).expand_as(maps)
        maps = maps + identity - only_acting(frozen, identity)
    return maps.to(x)


def _runs(frozen: FrozenPass, options: Mapping[str, Any]) -> int:
    """Count at most one run for each token, which serves all layers; half as many where rows are filled."""
    return frozen.tokens.shape[1]


@register_method("value-zeroing", needs=("head_vectors", "unwhitened"), perturbs=True, runs=_runs)
@checked_arguments
def value_zeroing(frozen: FrozenPass, *, query: Query = "all", memory: Memory = None) -> Attribution:
    """Score how far a layer's outputs turn when a token's value is zeroed, rolled out over layers (Mohebbi 2023).

    Rows are distributions: they sum to 1. The live model is run again, with zeroed values.

    Raises:
        UnsupportedModelError: a layer without softmax attention or with a gate or a norm inside it, a whitened model,
            or one that ignores hooks.

    >>> tlens.methods.value_zeroing(frozen, query=-1).scores.sum(-1).round(decimals=4)
    tensor([[1.]])
    """
    maps = value_zeroing_map(frozen, memory)
    return of_layers(frozen, product(maps), maps, method="value-zeroing", query=query)


class _Rows(NamedTuple):
    """The rows of a run: the position at each place, and the token whose value is zeroed there, or -1."""

    query: Int[Tensor, "row pos"]
    zeroed: Int[Tensor, "row pos"]

    def of_side(self, start: int, stop: int) -> "_Rows":
        """Return the places of one side of an encoder–decoder, with queries counted from its first position."""
        return _Rows(self.query[:, start:stop] - start, self.zeroed[:, start:stop])


class _Layout:
    """How positions and their zeroed tokens are spread over rows; nothing is zeroed at the `control` positions."""

    def __init__(self, pos: int, packed: bool, device: torch.device) -> None:
        number = torch.arange(pos, device=device)
        self.control = number.flip(0) if packed else number
        query = number.expand(pos, -1)
        zeroed = number[:, None].expand(-1, pos)
        if packed:
            follows = query >= zeroed
            query = query[follows]
            zeroed = zeroed[follows]
            missing = -len(query) % pos  # the last row is filled with the last pair
            query = torch.cat([query, query[-1:].expand(missing)]).unflatten(0, (-1, pos))
            zeroed = torch.cat([zeroed, zeroed[-1:].expand(missing)]).unflatten(0, (-1, pos))
        self.all = _Rows(query, zeroed)

    def __len__(self) -> int:
        return len(self.all.query)

    def of(self, copies: Copies) -> _Rows:
        """Return some of the rows, and a control for each None."""
        query = [self.control if number is None else self.all.query[number] for number in copies]
        nothing = torch.full_like(self.control, -1)
        zeroed = [nothing if number is None else self.all.zeroed[number] for number in copies]
        return _Rows(torch.stack(query), torch.stack(zeroed))


class _Heads:
    """The heads' values and mixed values in a run that reproduces the pass's streams.

    `attends_once`: one copy's attention may be computed for all, as hooks supply the mixed values.
    """

    def __init__(self, frozen: FrozenPass, live: LiveModel) -> None:
        self.frozen = frozen
        self.attends_once = frozen.sides is None  # cross-attention's pattern responds
        streams = dict.fromkeys(frozen.capture.output_name(layer) for layer in range(frozen.n_layers))
        points = [block.heads for block in frozen.points.blocks if block.attention is None]
        points += [block.cross for block in frozen.points.blocks]
        inside = dict.fromkeys(name for heads in points if heads for name in (heads.value, heads.z))
        last = frozen.points.last_output
        self._seen, _ = capture(frozen.model, frozen.inputs, [*inside, *streams], last=last)
        live.check({name: self._seen.pop(name) for name in streams})

    def mixed(self, layer: int, rows: _Rows, *, across: bool) -> Float[Tensor, "row batch query head d_head"]:
        """Return each head's mixed value in self- or cross-attention at each place, without the token zeroed there."""
        points = self.frozen.points.blocks[layer]
        start, stop = self.frozen.capture.side(layer)
        rows = rows.of_side(start, stop)
        if across:
            assert points.cross is not None
            return self._without(points.cross, self.frozen.cross_pattern(layer), rows, range(start))
        assert points.heads is not None
        return self._without(points.heads, self.frozen.pattern(layer), rows, range(start, stop))

    def _without(
        self, heads: AttentionPoints, pattern: Float[Tensor, "batch head query key"], rows: _Rows, keys: range
    ) -> Float[Tensor, "row batch query head d_head"]:
        """Compute `mixed` for given heads; `keys` are the positions of their source tokens."""
        v = self._seen[heads.value]
        pattern = pattern.to(v)
        batch, count = pattern.shape[:2]
        z = self._seen[heads.z].reshape(batch, pattern.shape[2], count, -1)
        is_key = (rows.zeroed >= keys.start) & (rows.zeroed < keys.stop)
        key = torch.where(is_key, rows.zeroed - keys.start, 0)
        weight = pattern[:, :, rows.query, key] * is_key
        groups = count // v.shape[2]
        taken = v.repeat_interleave(groups, dim=2)[:, key]
        return (z[:, rows.query] - weight.movedim(1, -1)[..., None] * taken).transpose(0, 1)


class _Run:
    """One run of the live model in which every layer reads its own input; `first` replaces that of the first layer."""

    def __init__(self, heads: _Heads, rows: _Rows, first: Tensor | None = None) -> None:
        frozen = heads.frozen
        self.heads = heads
        self.frozen = frozen
        self.rows = rows
        x = frozen.resid_pre(0)
        self.copies = len(rows.query), *frozen.tokens.shape
        self.changes = torch.zeros(frozen.n_layers, *self.copies, dtype=upcast(x).dtype, device=x.device)
        self._measured_layers = set[int]()
        entries = frozen.capture.stream_names(0)
        sides = [range(x.shape[1])]
        if frozen.sides is not None:
            sides = [range(frozen.sides[0]), range(frozen.sides[0], sum(frozen.sides))]
        hooks = [self._put(name, x, side) for name, side in zip(entries, sides, strict=True)]
        if first is not None:
            hooks[0] = self._put(entries[0], first, sides[0])
        for layer in range(frozen.n_layers):
            hooks += self._attention(layer)
            hooks.append(self._measured(layer))
        inputs = repeated(frozen.inputs, len(rows.query))
        index = rows.query.repeat_interleave(self.copies[1], dim=0)
        for name, value in inputs.items():  # per-position inputs follow the places
            if isinstance(value, Tensor) and value.shape[:2] == index.shape:
                inputs[name] = value.gather(1, index.to(value.device))
        last = frozen.points.last_output
        capture(frozen.model, inputs, [], hooks=[(name, in_this_thread(hook)) for name, hook in hooks], last=last)

    def _at_places(self, x: Float[Tensor, "batch pos d"], side: range) -> Float[Tensor, "copy batch query d"]:
        return x[:, self.rows.query[:, side.start : side.stop]].transpose(0, 1)

    def _put(self, name: str, x: Float[Tensor, "batch pos d"], side: range) -> FwdHook:
        def hook(live: Tensor, *, hook: Any) -> Tensor:
            return self._at_places(x, side).to(live).reshape(live.shape)

        return name, hook

    def _measured(self, layer: int) -> FwdHook:
        """Measure a layer's output, and replace it by the pass's own for the next layer."""
        side = range(*self.frozen.capture.side(layer))
        expected = self.frozen.resid_pre(layer + 1)
        name = self.frozen.capture.output_name(layer)
        put = self._put(name, expected, side)[1]

        def hook(live: Tensor, *, hook: Any) -> Tensor:
            # a Bridge in compatibility mode calls it once for each of its point's names
            if layer not in self._measured_layers:
                self._measured_layers.add(layer)
                output = live.to(expected.device).unflatten(0, self.copies[:2])
                turns = _directions(output) - self._at_places(_directions(expected), side)
                self.changes[layer][..., side.start : side.stop] = turns.square().sum(-1) / 2
            return put(live, hook=hook)

        return name, hook

    def _attention(self, layer: int) -> list[FwdHook]:
        """Return hooks that remove the zeroed tokens' values from one layer's attention."""
        points = self.frozen.points.blocks[layer]
        hooks: list[FwdHook] = []
        if points.attention is not None:
            hooks.append((points.attention.out, partial(self._whole, layer)))
        elif points.heads is not None:
            hooks.append((points.heads.z, partial(self._mixed, layer)))
        if points.cross is not None:
            hooks.append((points.cross.z, partial(self._mixed_across, layer)))
        return hooks

    def _mixed(self, layer: int, z: Tensor, *, hook: Any) -> Tensor:
        return self.heads.mixed(layer, self.rows, across=False).to(z).reshape(-1, *z.shape[1:])

    def _mixed_across(self, layer: int, z: Tensor, *, hook: Any) -> Tensor:
        """Change cross-attention; its pattern is the pass's only in rows in which no decoder token is zeroed."""
        mixed = self.heads.mixed(layer, self.rows, across=True).to(z).reshape(-1, *z.shape[1:])
        decoder = self.frozen.capture.side(layer)[0]
        as_in_pass = (self.rows.zeroed < decoder).all(-1).repeat_interleave(self.copies[1]).to(z.device)
        return torch.where(as_in_pass.view(-1, *(1 for _ in z.shape[1:])), mixed, z)

    def _whole(self, layer: int, live: Tensor, *, hook: Any) -> Tensor:
        """Return the output of attention that is frozen as a whole, without the zeroed tokens."""
        frozen = self.frozen
        points = frozen.points.blocks[layer]
        assert points.attention is not None
        attention = frozen.maps.attention(layer)
        v = attention.stages[0](frozen.activation(points.attention.into))
        rest = Chain(attention.stages[1:])
        start, stop = frozen.capture.side(layer)
        rows = self.rows.of_side(start, stop)
        tokens, which = (rows.zeroed - start).unique(return_inverse=True)
        remains = tokens[:, None] != torch.arange(v.shape[1], device=tokens.device)
        without = rest.push(v * remains[:, None, :, None]) + rest.bias
        output = without[which, :, rows.query].movedim(2, 1) / frozen.view.blocks[layer].branch_factor
        return output.reshape(live.shape).to(live)


def _directions(x: Float[Tensor, "*any d"]) -> Float[Tensor, "*any d"]:
    """Normalise vectors to length 1; a vector of zeros is unchanged."""
    return torch.nn.functional.normalize(upcast(x), dim=-1, eps=torch.finfo(upcast(x).dtype).tiny)


def _proven_layout(heads: _Heads, may_pack: bool) -> _Layout:
    """Return how rows may be filled, in any order or as whole prompts, after testing it on the model.

    Another first input must affect no later layer, and positions in another order must change nothing.
    """
    frozen = heads.frozen
    x = frozen.resid_pre(0)
    layers = range(1, frozen.n_layers)
    changes: dict[int, float] = {}
    ignoring: list[int] = []
    for packed in (True, False)[not may_pack :]:
        layout = _Layout(x.shape[1], packed, x.device)
        run = _Run(heads, layout.of([None]), first=x.flip(-1) + x.roll(1, -1))
        real = frozen.mask[:, layout.control]
        changes = {layer: float((2 * run.changes[layer, 0][real]).sqrt().max()) for layer in layers}
        ignoring = [layer for layer, change in changes.items() if not change <= frozen.tolerance]
        if not ignoring:
            return layout
    raise UnsupportedModelError(
        f"value-zeroing: blocks.{ignoring[0]} of this {frozen.view.description} does not read what a hook puts at its "
        f"input (its output changes by {changes[ignoring[0]]:.1e}): the hook point only observes."
    )
