"""How attention scores tell positions apart: rotary tables, ALiBi, relative biases, as each model class stores them."""

from collections.abc import Iterator
from contextlib import suppress

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.models.parameters import innermost
from tensorlens_tl.passes.block_maps import BlockMaps


def alibis(maps: BlockMaps, attn: nn.Module, heads: int, x: Tensor, pos: int) -> list[Tensor | None]:
    """ALiBi as HookedTransformer computes it, where the configuration says that the model has it."""
    create = getattr(attn, "create_alibi_bias", None)
    if create is None or getattr(maps.view.cfg, "positional_embedding_type", None) != "alibi":
        return [None]
    return [create(heads, pos, x.device).to(x)[:, :pos, :pos]]


def relative_bias(maps: BlockMaps, layer: int, pos: int) -> Float[Tensor, "head query key"] | None:
    """What T5 adds to each head's scores for the distance of query and key; None of any other model.

    The first block of a side has the table, which all its blocks share.
    """
    first = 0 if layer < maps.view.encoder_layers else maps.view.encoder_layers
    block = maps.view.blocks[first]
    with block.loaded():
        owner = innermost(block.module._modules.get(block.parts.mixer_name))
        table = innermost(getattr(owner, "relative_attention_bias", None))
        if table is None:  # a HookedEncoderDecoder's
            table = getattr(owner, "rel_pos_bias", None)
        bucket = getattr(owner, "_relative_position_bucket", None)
        if not isinstance(table, nn.Embedding) or bucket is None:
            return None
        positions = torch.arange(pos, device=table.weight.device)
        buckets = bucket(
            positions - positions[:, None],
            bidirectional=not owner.is_decoder,
            num_buckets=owner.relative_attention_num_buckets,
            max_distance=owner.relative_attention_max_distance,
        )
        return table.weight.detach()[buckets].permute(2, 0, 1)


def rotations(maps: BlockMaps, attn: nn.Module, inner: nn.Module, x: Tensor, d_head: int) -> Iterator[Tensor | None]:
    """Rotation matrices for each position, in every way that the model's tables of angles can be meant."""
    stated = getattr(maps.view.cfg, "positional_embedding_type", None) == "rotary"
    if not stated:
        yield None
    pos = x.shape[1]
    for cos, sin in _angle_tables(maps, attn, inner, x):
        for adjacent in (False, True):
            if cos.shape[0] >= pos and 2 * cos.shape[1] <= d_head:
                yield rotation_matrices(cos[:pos].to(x), sin[:pos].to(x), d_head, adjacent)
    if stated:  # some rotate in some of their layers only
        yield None


def _angle_tables(maps: BlockMaps, attn: nn.Module, inner: nn.Module, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """cos and sin by position and plane `[pos, planes]`, from every attribute in which a class stores them."""
    cos = getattr(attn, "rotary_cos", None)
    sin = getattr(attn, "rotary_sin", None)
    if isinstance(cos, Tensor) and isinstance(sin, Tensor):  # HookedTransformer repeats each plane
        half = cos.shape[-1] // 2
        yield cos[:, :half], sin[:, :half]  # planes (c, c + half)
        yield cos[:, ::2], sin[:, ::2]  # planes (2c, 2c + 1)
    table = getattr(inner, "embed_positions", None)
    if isinstance(table, Tensor):  # GPT-J: sin beside cos
        sin, cos = table.chunk(2, dim=-1)
        yield cos, sin
    positions = torch.arange(x.shape[1], device=x.device)[None]
    kind = _layer_kind(inner)
    arguments = [()] if kind is None else [(kind,), ()]
    for module in maps.view.rotary_modules:
        for extra in arguments:
            with suppress(TypeError), torch.no_grad():  # only some classes take the layer's kind
                tables = module(x, positions, *extra)
                if isinstance(tables, Tensor) and tables.is_complex():  # cos + i·sin, each plane once (Llama 4)
                    yield tables[0].real, tables[0].imag
                if isinstance(tables, tuple) and len(tables) == 2 and tables[0].ndim == 3:
                    cos, sin = tables
                    half = cos.shape[-1] // 2
                    yield cos[0, :, :half], sin[0, :, :half]
                    yield cos[0], sin[0]  # each plane once (gpt-oss)
                break


def _layer_kind(inner: nn.Module) -> str | None:
    """The kind of attention that a layer has, where its module or the model's configuration states one."""
    kind = getattr(inner, "layer_type", None)
    if kind is not None:
        return kind
    kinds = getattr(getattr(inner, "config", None), "layer_types", None)
    number = getattr(inner, "layer_idx", None)
    if kinds is None or not isinstance(number, int):
        return None
    return kinds[number]


def rotation_matrices(
    cos: Float[Tensor, "pos planes"], sin: Float[Tensor, "pos planes"], d_head: int, adjacent: bool
) -> Float[Tensor, "pos d_head d_head"]:
    """``q @ R[pos]`` rotates q in each plane: channels (c, c + planes), or (2c, 2c + 1) where `adjacent`."""
    planes = torch.arange(cos.shape[1], device=cos.device)
    first = planes
    second = planes + len(planes)
    if adjacent:
        first = 2 * planes
        second = first + 1
    matrices = torch.eye(d_head, dtype=cos.dtype, device=cos.device).repeat(len(cos), 1, 1)
    matrices[:, first, first] = cos
    matrices[:, second, second] = cos
    matrices[:, first, second] = sin
    matrices[:, second, first] = -sin
    return matrices
