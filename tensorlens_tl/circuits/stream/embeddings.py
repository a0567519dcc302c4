"""What the residual stream starts from: token and position embeddings, where they can be told apart.

Which hook points hold the parts differs by class, and which of them are added differs by family (a shortformer's
positions never enter the stream). The known ways are data; the one whose sum is nearest to the stream is taken.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import Norm
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.hooks import capture
from tensorlens_tl.models.names import ENTRY_NORM
from tensorlens_tl.models.offload import loaded
from tensorlens_tl.models.parameters import norm_weights
from tensorlens_tl.passes import Difference, PassOrDifference

WHOLE = {"embed": "hook_embed"}
"""The sum of all parts on a BERT Bridge, norm and all."""

PARTS: tuple[tuple[dict[str, str], str | None], ...] = (
    ({"embed": "hook_embed", "pos_embed": "hook_pos_embed"}, None),
    (
        {
            "embed": "embed.hook_out",
            "pos_embed": "pos_embed.hook_out",
            "token_type_embed": "token_type_embed.hook_out",
        },
        "embed_ln",
    ),
    (
        {
            "embed": "embed.hook_embed",
            "pos_embed": "embed.hook_pos_embed",
            "token_type_embed": "embed.hook_token_type_embed",
        },
        "embed.ln",
    ),
    ({"embed": "embed.hook_out"}, f"blocks.0.{ENTRY_NORM}"),
    (WHOLE, None),
)
"""Hook points that add up to the first block's input, and the norm that they go through where there is one."""


def embedding_parts(frozen: PassOrDifference) -> dict[str, Float[Tensor, "batch pos d_model"]]:
    """The summands of ``blocks.0`` input by name; one entry ``"embed"`` where no known way adds up to it.

    Those of an encoder–decoder are one: each side has its own.

    An embedding norm is frozen as any other: its linear part is applied to each summand and its shift is one more. Of a
    difference of two runs they are the differences of the two runs' summands.
    """
    if isinstance(frozen, Difference):
        first, second = (embedding_parts(run) for run in (frozen.a, frozen.b))
        if first.keys() != second.keys():
            return {"embed": frozen.resid_pre(0)}
        return {name: first[name] - second[name] for name in first}
    points = frozen.points.blocks[0]
    x = frozen.resid_pre(0)
    if frozen.sides is not None:
        return {"embed": x}
    known = frozen.model.hook_dict
    scales = {norm: f"{norm}.hook_scale" for _, norm in PARTS if norm is not None}
    candidates = {name for names, _ in PARTS for name in names.values()} | set(scales.values())
    hook_names = sorted(candidates & set(known))
    activations, _ = capture(frozen.model, frozen.inputs, hook_names, last=points.resid_pre, optional=hook_names)
    best = float("inf")
    nearest = {"embed": x}
    for names, norm in PARTS:
        if names == WHOLE and best < float("inf"):
            break  # its parts are known
        if not all(name in activations for name in names.values()) or (
            norm is not None and scales[norm] not in activations
        ):
            continue
        parts = {part: _as_stream(activations[name], x) for part, name in names.items()}
        if any(part is None for part in parts.values()):
            continue
        summands = {part: tensor for part, tensor in parts.items() if tensor is not None}
        if norm is not None:
            module = frozen.view.model.get_submodule(norm)
            with loaded(module):
                weights = norm_weights(module, frozen.view.cfg)
            held = Norm(activations[scales[norm]], weights.gain, weights.shift, weights.centre)
            summands = {part: held.push(tensor) for part, tensor in summands.items()}
            if weights.shift is not None:
                summands[f"{norm}.b"] = weights.shift.expand_as(x)
        total = sum(summands.values(), start=torch.zeros_like(x))
        error = relative_error(total, x, frozen.mask)
        if error <= frozen.tolerance and error < best:
            best, nearest = error, summands
    return nearest


def _as_stream(tensor: Tensor, x: Tensor) -> Tensor | None:
    """An embedding as vectors of every prompt: position embeddings may come without a batch axis or with one row."""
    tensor = tensor.to(x)
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim != 3 or tensor.shape[1:] != x.shape[1:] or tensor.shape[0] not in (1, x.shape[0]):
        return None
    return tensor.expand_as(x)
