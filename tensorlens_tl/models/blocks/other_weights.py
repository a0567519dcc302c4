"""The reading of a block with other weights, which the model itself does not get."""

from collections.abc import Mapping
from dataclasses import replace

from einops import rearrange
from torch import Tensor

from tensorlens_tl.models.blocks.block import BlockView
from tensorlens_tl.models.parameters import MLPWeights


def with_weights(block: BlockView, weights: Mapping[str, Tensor]) -> BlockView:
    """A block's reading with other weights; what the block itself holds is not touched.

    Args:
        block: the reading.
        weights: by TransformerLens' names, ``W_V``, ``b_V``, ``W_O``, ``W_Q``, ``b_Q``, ``W_K``, ``b_K``, ``W_in``,
            ``W_gate`` and ``W_out``, in TransformerLens' shapes.

    Raises:
        UnsupportedModelError: constants stand beside the block's weights, or more than weights and pattern inside
            attention, or a norm inside the MLP.
    """
    if block.parts.is_multiplied:
        raise block.refuse("its branches are multiplied by a constant; other weights for it are not read.")

    def side_by_side(name: str) -> Tensor:
        weight = weights[name].detach().to(block.attention.W_O)
        if name == "W_O":
            return rearrange(weight, "head d_head d_model -> (head d_head) d_model")
        if name.startswith("b"):
            return weight.reshape(-1)
        return rearrange(weight, "head d_model d_head -> d_model (head d_head)")

    other = block.unread()
    fields = {"value_matrix": "W_V", "b_V": "b_V", "W_O": "W_O"}
    values = {field: side_by_side(name) for field, name in fields.items() if name in weights}
    scores = {name: side_by_side(name) for name in ("W_Q", "b_Q", "W_K", "b_K") if name in weights}
    matrices = {name: weights[name] for name in ("W_in", "W_gate", "W_out") if name in weights}
    if values:
        other.attention = replace(block.require_plain_attention(), **values)
    if scores:
        other.query_key = replace(block.query_key, **scores)
    if matrices and isinstance(block.mlp, MLPWeights):
        mlp = block.mlp
        if mlp.post_factor is not None:
            raise block.refuse(f"a norm stands inside its MLP; other {', '.join(matrices)} are not read.")
        other.mlp = replace(mlp, **{name: weight.to(mlp.W_in) for name, weight in matrices.items()})
    return other
