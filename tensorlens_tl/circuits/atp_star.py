"""AtP* (Kramár, Lieberum, Shah and Nanda 2024): attribution patching without two of its blind spots.

A gradient misses a query or key whose softmax is saturated. So the head's own softmax is run with the corrupted query
or key, and only what comes after it is linearised:

    score(q) = (z_clean − z(q corrupted)) · ∂target/∂z

A single run of the live model gives this z for every head at once, because each head's output is reset to its clean z
before later layers read it. Where a group of heads shares a key, each head's copy of it is a node of its own. Values
enter linearly and are treated alike.

A gradient also misses a node whose direct and indirect effects cancel. GradDrop computes the score once for each of the
L layers, with no gradient passing through that layer's output, and averages the absolute scores over the layers other
than the node's own:

    size(n) = Σ_ℓ abs(Δa · ∂target/∂a without ℓ) / (L − 1)

The authors rank nodes by this size. Here it also gets a sign: that of the score with the whole gradient. In place of
their subset diagnostics, method ``"measured"`` states its own error (`tensorlens_tl.circuits.measured`).
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.circuits.live import NodeChange, NodeGradients, NodeValues, sublayer_nodes
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, hook_points, in_this_thread, run_until
from tensorlens_tl.passes import FrozenPass

QUESTION = "patch_scores(method='atp*')"


def dropped_scores(
    nodes: NodeGradients, replaced: Sequence[NodeValues], start: NodeValues
) -> Float[Tensor, "replaced batch node pos_and_all"]:
    """Score nodes whose values are replaced: at each position and, in the last column, at all positions together.

    `replaced` has the values of each variant, and `start` is the input of the first block.
    """
    points = defaultdict[int, list[str]](list)
    for part in sublayer_nodes(nodes.live.readout, QUESTION, "component", "Use another method."):
        points[part.layer] += part.points
    changes = {point: nodes.values[point] - torch.stack([of[point] for of in replaced]) for point in nodes.points}

    def scores(gradients: NodeValues) -> Float[Tensor, "replaced batch node pos_and_all"]:
        by_position = nodes.products(changes, gradients)
        return torch.cat([by_position, by_position.sum(-1, keepdim=True)], dim=-1)

    whole, *dropped = map(scores, nodes.without(start, [(), *points.values()]))
    sizes, layers = torch.zeros_like(whole), whole.new_zeros(len(nodes.nodes), 1)
    for score, written in zip(dropped, points.values(), strict=True):
        other = [set(written).isdisjoint(node.points) for node in nodes.nodes]
        counts = torch.tensor(other, dtype=whole.dtype, device=whole.device)[:, None]
        sizes, layers = sizes + counts * score.abs(), layers + counts
    return whole.sign() * torch.where(layers > 0, sizes / layers.clamp_min(1), whole.abs())


def attended(nodes: NodeGradients, other: NodeValues, corrupted: FrozenPass) -> dict[str, NodeValues]:
    """Return head outputs with the query, key or value of the corrupted prompt, by name suffix (``".q"``).

    Raises:
        UnsupportedModelError: no hook points expose queries, keys and values, or they do not reproduce the heads'
            outputs.
    """
    frozen, live, clean = nodes.frozen, nodes.live, nodes.values
    heads = list(dict.fromkeys(point for node in head_nodes(nodes) for point in node.points))
    read = {letter: [f"{point.removesuffix('z')}{letter}" for point in heads] for letter in "qkv"}
    every = [point for points in read.values() for point in points]
    refusal = UnsupportedModelError(
        f"by='qkv': no hook points show all that heads of this {frozen.view.description} read. Use by='head'."
    )
    if not set(every).issubset(hook_points(frozen.model)):
        raise refusal
    seen = live.run_of(corrupted, every)

    def with_corrupted(points: Sequence[str]) -> dict[str, Tensor]:
        given: dict[str, Tensor] = {}

        def put(shown: Tensor, *, hook: Any, name: str) -> Tensor:
            return seen[name].reshape(shown.shape)

        def clean_again(shown: Tensor, *, hook: Any, name: str) -> Tensor:
            given[name] = shown.reshape(clean[name].shape)
            return clean[name].reshape(shown.shape)

        hooks: list[FwdHook] = [(name, in_this_thread(partial(put, name=name))) for name in points]
        hooks += [(name, in_this_thread(partial(clean_again, name=name))) for name in heads]
        with torch.no_grad():
            run_until(frozen.model, frozen.inputs, hooks, live.readout.points[-1])
        return given

    if any(relative_error(z, other[name]) > frozen.tolerance for name, z in with_corrupted(every).items()):
        raise refusal
    return {f".{letter}": {**other, **with_corrupted(points)} for letter, points in read.items()}


def head_nodes(nodes: NodeGradients) -> list[NodeChange]:
    """Return the nodes that are heads."""
    attentions = (heads for block in nodes.frozen.points.blocks for heads in (block.heads, block.cross) if heads)
    points = {heads.z for heads in attentions}
    return [node for node in nodes.nodes if points.intersection(node.points)]
