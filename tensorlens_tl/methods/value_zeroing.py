"""Value zeroing: Mohebbi et al. 2023.

    x̃_i^{¬j}   output of a layer at token i, with the values of token j zero in all its heads
    C_ij = 1 − cos(x̃_i^{¬j}, x̃_i), rows divided by their sum;   aggregated by the product of C

The layer reads what it read in the pass, so its patterns stay as they were; its norms and its MLP (with the choice of
experts, where it has some) are the live model's and respond. "Output" is that of the whole layer, MLP included, as in
the original. The residual connection is inside the layer, and none is added between layers.

One run of the live model serves all layers: every layer's input is put back to its own. A run is of as many copies of
the prompts as fit, one for each token that is zeroed. Attention is changed where its heads' mixed values leave it
(`attn.hook_z`), or at its output where it is held as a whole; a gate or a norm inside attention responds to what is
zeroed, and such attention is refused. The cosine is ``½·‖x̃/‖x̃‖ − ỹ/‖ỹ‖‖²``, which is the same number without the
cancellation of 1 − cos near zero.

In a decoder block of an encoder–decoder (ours) the value of an encoder's token is that in cross-attention, so that a
row is over both sides. Cross-attention's pattern is the live model's: its queries respond to self-attention.
"""

from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra import Chain
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import AttentionPoints, FwdHook, capture, in_this_thread
from tensorlens_tl.layerwise import Maps, normalize_rows, only_acting, product, select_query
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.live import Copies, prove_obedience, repeated
from tensorlens_tl.registry import register_layer_map, register_method
from tensorlens_tl.results import Attribution


@register_layer_map("value-zeroing", holds_residual=True, needs=("head_vectors",), both_stacks=True)
def value_zeroing_map(frozen: FrozenPass, memory: Memory = None) -> Maps:
    """C_ij of every layer, rows divided by their sum."""
    in_bytes(memory)
    live = frozen.live("value-zeroing")
    live.check(_streams(frozen))
    prove_obedience(frozen.maps)
    _prove_inputs_held(frozen)
    batch, pos = frozen.tokens.shape
    x = frozen.resid_pre(0)
    heads = max(frozen.view.blocks[layer].attention.heads for layer in range(frozen.n_layers))
    per_token = 2 * frozen.row_bytes + 4 * batch * heads * pos * pos * x.element_size()

    def run(tokens: Copies) -> Float[Tensor, "copy layer batch pos"]:
        value_mask = torch.ones(len(tokens), pos, dtype=torch.bool, device=x.device)
        for copy, token in enumerate(tokens):
            if token is not None:
                value_mask[copy, token] = False
        return _Run(frozen, value_mask).changes.transpose(0, 1)

    def turned(changes: Float[Tensor, "layer batch pos"]) -> float:
        return float((2 * changes[:, frozen.mask]).sqrt().max())

    changes = torch.zeros(frozen.n_layers, batch, pos, pos, dtype=upcast(x).dtype, device=x.device)
    for tokens, values in live.changed(pos, run, turned, per_token, memory, "value zeroing"):
        changes[..., tokens.start : tokens.stop] = values.permute(1, 2, 3, 0)
    pairs = frozen.mask[:, :, None] & frozen.mask[:, None]
    if frozen.causal:  # what rounding leaves ahead of a query is no change
        pairs = pairs.tril()
    maps = normalize_rows(changes * pairs)
    if frozen.sides is not None:  # a block leaves the tokens of the other side as they are
        identity = torch.diag_embed(frozen.mask.to(maps)).expand_as(maps)
        maps = maps + identity - only_acting(frozen, identity)
    return maps.to(x)


def _runs(frozen: FrozenPass, options: Mapping[str, Any]) -> int:
    """One run for each token, which serves all layers."""
    return frozen.tokens.shape[1]


@register_method("value-zeroing", needs=("head_vectors", "unwhitened"), perturbs=True, runs=_runs)
@checked_arguments
def value_zeroing(frozen: FrozenPass, *, query: Query = "all", memory: Memory = None) -> Attribution:
    """How far a layer's outputs turn when the value of a token is zeroed, rolled out over layers (Mohebbi 2023).

    Rows are distributions: they sum to 1.

    Args:
        frozen: the pass.
        query: positions, every one by default; see `tensorlens_tl.passes.inputs.query_positions`.
        memory: what the runs with zeroed values may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Scores `[batch, query, key]`, and each layer's map in `layers`.

    Raises:
        InvalidInputError: a query out of range.
        UnsupportedModelError: a layer without softmax attention or with a gate or a norm inside it, a whitened model,
            or one that ignores hooks.
        FrozenModelError: the model is no longer that of the pass, or a frozen pass is attached to it.

    >>> tlens.methods.value_zeroing(frozen, query=-1).scores.sum(-1).round(decimals=4)
    tensor([[1.]])
    """
    maps = value_zeroing_map(frozen, memory)
    return Attribution.of(
        frozen,
        select_query(frozen, product(maps), query),
        method="value-zeroing",
        query=query,
        layers=maps,
        options={"query": query},
    )


def _streams(frozen: FrozenPass) -> dict[str, Tensor]:
    """What the live model now gives at every layer's output."""
    names = dict.fromkeys(frozen.capture.output_name(layer) for layer in range(frozen.n_layers))
    return capture(frozen.model, frozen.inputs, list(names), last=frozen.points.last_output)[0]


class _Run:
    """One run of the live model on copies of the prompts, every layer reading its own input.

    Args:
        frozen: the pass.
        value_mask: which source tokens keep their values, for each copy.
        first: what the first layer reads, if it is to be another input than its own; of an encoder–decoder, the
            encoder's first.
    """

    def __init__(self, frozen: FrozenPass, value_mask: Bool[Tensor, "copy pos"], first: Tensor | None = None) -> None:
        self.frozen = frozen
        self.value_mask = value_mask
        x = frozen.resid_pre(0)
        self.copies = len(value_mask), *frozen.tokens.shape
        self.changes = torch.zeros(frozen.n_layers, *self.copies, dtype=upcast(x).dtype, device=x.device)
        self._measured_layers = set[int]()
        entries = frozen.capture.stream_names(0)
        sides = x.shape[1:2] if frozen.sides is None else frozen.sides
        hooks = [self._put(name, part) for name, part in zip(entries, x.split(sides, dim=1), strict=True)]
        if first is not None:
            hooks[0] = self._put(entries[0], first[:, : sides[0]])
        for layer in range(frozen.n_layers):
            hooks += self._attention(layer)
            hooks.append(self._measured(layer))
        inputs = repeated(frozen.inputs, len(value_mask))
        last = frozen.points.last_output
        capture(frozen.model, inputs, [], hooks=[(name, in_this_thread(hook)) for name, hook in hooks], last=last)

    def _put(self, name: str, x: Float[Tensor, "batch pos d"]) -> FwdHook:
        def hook(live: Tensor, *, hook: Any) -> Tensor:
            return x.repeat(len(self.value_mask), 1, 1).to(live).reshape(live.shape)

        return name, hook

    def _measured(self, layer: int) -> FwdHook:
        """Looks at a layer's output, and puts the pass's own in its place for the next layer."""
        side = slice(*self.frozen.capture.side(layer))
        expected = self.frozen.resid_pre(layer + 1)[:, side]
        name = self.frozen.capture.output_name(layer)
        put = self._put(name, expected)[1]

        def hook(live: Tensor, *, hook: Any) -> Tensor:
            # a Bridge in compatibility mode calls it once for each of its point's names
            if layer not in self._measured_layers:
                self._measured_layers.add(layer)
                output = live.to(expected.device).unflatten(0, self.copies[:2])
                turned = (_directions(output) - _directions(expected)).square().sum(-1) / 2
                self.changes[layer][..., side] = turned
            return put(live, hook=hook)

        return name, hook

    def _attention(self, layer: int) -> list[FwdHook]:
        """What takes the zeroed tokens' values out of one layer's attention."""
        points = self.frozen.points.blocks[layer]
        start, stop = self.frozen.capture.side(layer)
        value_mask = self.value_mask[:, start:stop]
        if points.attention is not None:
            attention = self.frozen.maps.attention(layer)
            values = attention.stages[0]
            rest = Chain(attention.stages[1:])
            v = values(self.frozen.activation(points.attention.into))
            factor = self.frozen.view.blocks[layer].branch_factor

            def put(live: Tensor, *, hook: Any) -> Tensor:
                output = (rest.push(v * value_mask[:, None, :, None]) + rest.bias) / factor
                return output.reshape(live.shape).to(live)

            return [(points.attention.out, put)]
        assert points.heads is not None
        hooks = self._mixed(points.heads, self.frozen.pattern(layer), value_mask)
        if points.cross is not None:  # its pattern responds to what self-attention reads without a value
            held = value_mask.all(-1)
            hooks += self._mixed(points.cross, self.frozen.cross_pattern(layer), self.value_mask[:, :start], held)
        return hooks

    def _mixed(
        self,
        heads: AttentionPoints,
        pattern: Float[Tensor, "batch head query key"],
        value_mask: Bool[Tensor, "copy key"],
        held: Bool[Tensor, "copy"] | None = None,
    ) -> list[FwdHook]:
        """Hooks by which heads mix the values of the tokens that keep them, in the copies whose pattern is held."""
        recorded = list[Tensor]()

        def record(v: Tensor, *, hook: Any) -> None:
            recorded[:] = [v]

        def mix(z: Tensor, *, hook: Any) -> Tensor | None:
            if not recorded:
                return None
            v = recorded.pop().unflatten(0, self.copies[:2]) * value_mask[:, None, :, None, None]
            grouped = rearrange(pattern.to(v), "b (kv group) q k -> b kv group q k", kv=v.shape[3])
            mixed = torch.einsum("bcgqk,rbkcd->rbqcgd", grouped, v).reshape(z.shape)
            if held is None:
                return mixed
            rows = held.repeat_interleave(self.copies[1]).view(-1, *(1 for _ in z.shape[1:]))
            return torch.where(rows, mixed, z)

        return [(heads.value, record), (heads.z, mix)]


def _directions(x: Float[Tensor, "*any d"]) -> Float[Tensor, "*any d"]:
    """Vectors of length 1; a vector of zeros stays one."""
    return torch.nn.functional.normalize(upcast(x), dim=-1, eps=torch.finfo(upcast(x).dtype).tiny)


def _prove_inputs_held(frozen: FrozenPass) -> None:
    """Refuse a model whose layers do not read what hooks put at their inputs: another first input must reach no other.

    Raises:
        UnsupportedModelError: naming the layer that ignores it.
    """
    x = frozen.resid_pre(0)
    value_mask = torch.ones(1, x.shape[1], dtype=torch.bool, device=x.device)
    run = _Run(frozen, value_mask, first=x.flip(-1) + x.roll(1, -1))
    for layer in range(1, frozen.n_layers):
        change = float((2 * run.changes[layer, 0][frozen.mask]).sqrt().max())
        if not change <= frozen.tolerance:
            raise UnsupportedModelError(
                f"value-zeroing: blocks.{layer} of this {frozen.view.description} does not read what a hook puts at "
                f"its input (its output changes by {change:.1e}): the hook point only observes."
            )
