"""How a layer makes its attention scores, read from its weights and proved against the pattern that it gave.

The known ways are candidates (`tensorlens_tl.passes.attention_scores.reading`); a reading is right when the softmax of
its scores is the pattern of the model itself. What is added to a whole row of scores does not show there; single scores
are compared with those that the model shows, where it does.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.stream import Stream
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import capture
from tensorlens_tl.passes import FrozenPass, PassLike, attention_scores, check_pass
from tensorlens_tl.passes.attention_scores import CrossStreams, ScoreReading

__all__ = ["ScoreReading", "rotation_at", "score_of", "score_reading"]


def score_reading(frozen: PassLike, layer: int, *, cross: bool = False) -> ScoreReading:
    """The reading of one layer's scores that reproduces its pattern; with `cross`, of its cross-attention's.

    Of an encoder–decoder its maps are of the positions of one side.

    Raises:
        UnsupportedModelError: no known reading does; says how near the best came.
    """
    check_pass(frozen)
    if not cross:
        return attention_scores.score_reading(frozen.maps, layer)
    stream = Stream.of(frozen, layers=[layer], final_norm=False, to_tokens=False)
    number, _ = stream.at(layer, cross=True)
    start, stop = frozen.capture.side(layer)
    streams = CrossStreams(stream.x[number][:, start:stop], stream.x[number][:, :start])
    place = frozen.layouts[layer].cross
    assert place is not None
    queries, keys = attention_scores.score_projections(frozen.maps, layer, place.before, crossing=True)
    vectors = queries.held(streams.queries)(streams.queries), keys.held(streams.keys)(streams.keys)
    return attention_scores.score_reading(frozen.maps, layer, vectors, streams)


def score_of(
    frozen: FrozenPass,
    reading: ScoreReading,
    layer: int,
    head: int,
    query: Int[Tensor, "batch"],
    key: Int[Tensor, "batch"],
) -> Float[Tensor, "batch"]:
    """One score of each prompt, before a soft cap and ALiBi, from the captured stream, compared with the model's own.

    Raises:
        UnsupportedModelError: the model shows another.
    """
    x = frozen.capture.resid_read(layer)
    kv_head = head // (reading.heads // reading.kv_heads)
    sides = ((reading.query, head, reading.heads, query), (reading.key, kv_head, reading.kv_heads, key))
    vectors: list[Tensor] = []
    for read, number, heads, at in sides:
        vector = torch.take_along_dim(read(x), at[:, None, None], dim=1)[:, 0].unflatten(-1, (heads, -1))[:, number]
        vectors.append(torch.einsum("bd,bde->be", vector, rotation_at(reading, at, x, vector.shape[-1])))
    score = reading.scale * (vectors[0] * vectors[1]).sum(-1)
    _check(frozen, reading, layer, head, {"query": query, "key": key}, score)
    return score


def rotation_at(
    reading: ScoreReading, at: Int[Tensor, "batch"], like: Tensor, d_head: int
) -> Float[Tensor, "batch d_head d_head"]:
    """The rotation of one position of each prompt; the identity without rotary positions."""
    if reading.rotation is None:
        return torch.eye(d_head).to(like).expand(len(at), -1, -1)
    return reading.rotation[at]


def _check(
    frozen: FrozenPass,
    reading: ScoreReading,
    layer: int,
    head: int,
    positions: dict[str, Tensor],
    score: Float[Tensor, "batch"],
) -> None:
    """Compare scores with the model's own, where TransformerLens shows them.

    A pattern proves a reading up to what is added to a whole row of scores, which softmax does not see.

    Raises:
        UnsupportedModelError: they differ.
    """
    pattern = frozen.points.blocks[layer].pattern
    assert pattern is not None  # it has heads
    name = pattern.replace("hook_pattern", "hook_attn_scores")
    if name not in frozen.model.hook_dict:
        return
    shown, _ = capture(frozen.model, frozen.inputs, [name], last=name, optional=[name])
    if name not in shown:
        return
    if reading.soft_cap is not None:
        score = reading.soft_cap * torch.tanh(score / reading.soft_cap)
    if reading.alibi is not None:
        score = score + _alibi_of_a_run(frozen, layer, head, positions).to(score)
    prompts = torch.arange(len(score), device=shown[name].device)
    row = upcast(shown[name][prompts, head, positions["query"].to(prompts.device)]).to(score)
    probabilities = upcast(frozen.pattern(layer)[prompts, head, positions["query"]]).to(row)
    probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    if not float((row.softmax(-1)[:, : probabilities.shape[-1]] - probabilities).abs().max()) <= frozen.tolerance:
        return  # some Bridges show other numbers there than those they attend by
    allowed = row > torch.finfo(row.dtype).min / 2  # a mask leaves -inf or the dtype's lowest number
    size = row.abs().masked_fill(~allowed, 0).amax(-1).clamp_min(torch.finfo(row.dtype).tiny)
    errors = (score[:, None] - row).abs().masked_fill(~allowed, 0) / size[:, None]
    # a masked key has no score in the model
    error = float(errors.gather(1, positions["key"].to(row.device)[:, None]).max())
    if not error <= frozen.tolerance:
        raise UnsupportedModelError(
            f"{name} of this {frozen.view.description}: queries and keys as read from the weights give another score "
            f"than the model's own (relative error {error:.1e}, allowed {frozen.tolerance:.0e}), though the same "
            "pattern: something is added to a whole row of scores. A hook on queries or keys would explain it."
        )


def _alibi_of_a_run(frozen: FrozenPass, layer: int, head: int, positions: dict[str, Tensor]) -> Float[Tensor, "batch"]:
    """What ALiBi adds to a score when the model runs: it keeps the table of its longest prompt and takes the last rows.

    A row of a later query adds the same to each of its keys besides, which softmax does not see.
    """
    table: Tensor = frozen.view.blocks[layer].module.attn.alibi
    length = frozen.tokens.shape[1]
    return table[head, -length:, :length][positions["query"], positions["key"]]
