"""Which sources make an attention score.

The score of a head is bilinear in the stream at the query and at the key. That stream is a sum of sources and a bias,
so the score is a sum over pairs of sources, plus what one side's bias makes with the other side's sources, plus the
product of the two biases. Sources are the prompt's tokens, each with all it does through the layers before; or the
components that wrote the stream: embeddings, heads or whole attention layers, MLPs and their biases.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import Chain, RowPositions
from tensorlens_tl.algebra.memory import chunks
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.algebra.positions import BiasTerms, in_total
from tensorlens_tl.circuits.arguments import Whole
from tensorlens_tl.circuits.scores.reading import ScoreReading, score_reading
from tensorlens_tl.circuits.stream import Stream
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import Query
from tensorlens_tl.passes import FrozenPass, PassLike, check_pass
from tensorlens_tl.passes.inputs import one_query
from tensorlens_tl.passes.operator import chosen_head
from tensorlens_tl.results import ScoreAttribution

BY = ("token", "component", "head")


def qk_attribution(
    frozen: PassLike,
    layer: Whole,
    head: Whole,
    query: Query = -1,
    key: Query = 0,
    *,
    by: str = "token",
    activation: str = "ratio",
) -> ScoreAttribution:
    """Which pairs of sources make one attention score, everything before the layer included.

    Patterns, activation ratios and norm scales before the layer are frozen, and so are the scales of the layer's
    norms, of queries and keys too.

    Args:
        frozen: the pass.
        layer, head: which head (with grouped-query attention a query head).
        query, key: one position each; see `tensorlens_tl.passes.inputs.query_positions`.
        by: ``"token"`` (source tokens, through everything before), ``"component"`` (embeddings, each earlier layer's
            attention and MLP, and their biases) or ``"head"`` (attention by head).
        activation: the rule for the MLPs before.

    Raises:
        InvalidInputError: no such layer, head, position or `by`, or a key that the query cannot attend to.
        UnsupportedModelError: the layer's scores cannot be read.

    >>> pairs = tlens.circuits.qk_attribution(frozen, 1, 0, key=2)
    >>> bool((pairs.gap < 1e-4).all())
    True
    """
    check_pass(frozen)
    if by not in BY:
        raise InvalidInputError(f"by={by!r}; use one of {', '.join(map(repr, BY))}.")
    layer, head = chosen_head(frozen.view, layer, head)
    positions = {name: one_query(frozen.prompt, at, name)[:, 0] for name, at in (("query", query), ("key", key))}
    if frozen.causal and bool((positions["key"] > positions["query"]).any()):
        raise InvalidInputError(
            f"query={query!r}, key={key!r}: the key comes after the query, and this model attends to no later token."
        )
    frozen.check_fresh()
    reading = score_reading(frozen, layer)
    kv_head = head // (reading.heads // reading.kv_heads)
    sides = (
        (reading.query, head, reading.heads, positions["query"]),
        (reading.key, kv_head, reading.kv_heads, positions["key"]),
    )
    if by == "token":
        names = [list(row) for row in frozen.str_tokens]
        q, k = (_by_token(frozen, layer, reading, *side, activation) for side in sides)
    else:
        sources = _components(frozen, layer, by, activation)
        names = [list(sources)] * len(frozen.tokens)
        q, k = (_by_component(frozen, layer, reading, *side, torch.stack(list(sources.values()))) for side in sides)
    scale = reading.scale
    alibi = None
    if reading.alibi is not None:
        alibi = reading.alibi[head][positions["query"], positions["key"]]
    attribution = ScoreAttribution(
        names=names,
        pairs=scale * torch.einsum("cbi,cbj->bij", q.shares, k.shares),
        query_sources=scale * torch.einsum("cbi,cb->bi", q.shares, k.bias),
        key_sources=scale * torch.einsum("cb,cbj->bj", q.bias, k.shares),
        bias=scale * (q.bias * k.bias).sum(0),
        total=scale * (q.vector * k.vector).sum(-1),
        by=by,
        alibi=alibi,
        soft_cap=reading.soft_cap,
        rotary=reading.rotation is not None,
        reading_error=reading.error,
    )
    _check_score(frozen, layer, head, positions, attribution)
    return frozen.checked(attribution)


def _check_score(
    frozen: FrozenPass, layer: int, head: int, positions: dict[str, Tensor], attribution: ScoreAttribution
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
    score = attribution.total
    if attribution.soft_cap is not None:
        score = attribution.soft_cap * torch.tanh(score / attribution.soft_cap)
    if attribution.alibi is not None:
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


class _Side(NamedTuple):
    """A head's query, or key, at one position per prompt.

    Attributes:
        shares: by channel and source, `[channel, batch, source]`.
        bias: what no source gives, `[channel, batch]`.
        vector: the vector itself, `[batch, channel]`.
    """

    shares: Float[Tensor, "channel batch source"]
    bias: Float[Tensor, "channel batch"]
    vector: Float[Tensor, "batch channel"]


def _rotation(reading: ScoreReading, at: Tensor, like: Tensor, d_head: int) -> Float[Tensor, "batch d_head d_head"]:
    if reading.rotation is None:
        return torch.eye(d_head).to(like).expand(len(at), -1, -1)
    return reading.rotation[at]


def _rotated_vector(
    frozen: FrozenPass, layer: int, read: Chain, channels: slice, at: Tensor, R: Tensor
) -> Float[Tensor, "batch d"]:
    """The head's rotated vector, from the captured stream."""
    vector = torch.take_along_dim(read(frozen.capture.resid_read(layer)), at[:, None, None], dim=1)[:, 0, channels]
    return torch.einsum("bd,bde->be", vector, R)


def _by_token(
    frozen: FrozenPass,
    layer: int,
    reading: ScoreReading,
    read: Chain,
    head: int,
    heads: int,
    at: Tensor,
    activation: str,
) -> _Side:
    """Each channel pulled back through everything before."""
    x0 = frozen.resid_pre(0)
    x = frozen.capture.resid_read(layer)
    d_head = read(x).shape[-1] // heads
    channels = slice(head * d_head, (head + 1) * d_head)
    earlier = (frozen.maps.block_map(number, activation=activation) for number in range(layer))
    whitening = frozen.maps.whitening(layer) or Chain(())
    whole = Chain((*earlier, *whitening.stages, *read.stages))
    R = _rotation(reading, at, x, d_head)
    shares = []
    constants = []
    for rows in chunks(d_head, frozen.row_bytes, None, "score"):
        basis = x.new_zeros(len(rows), len(at), heads * d_head)
        # row c, pulled back, gives channel c of the rotated vector
        basis[:, :, channels] = R[..., rows.start : rows.stop].permute(2, 0, 1)
        biases = BiasTerms()
        where = RowPositions(at[None])
        reached = whole.pull_between(basis, where, None, x.shape[1], causal=frozen.causal, biases=biases)
        share = x0.new_zeros(len(rows), *x0.shape[:2])
        share[:, :, : reached.shape[2]] = (reached * x0[:, : reached.shape[2]]).sum(-1)
        shares.append(share)
        constants.append(in_total(biases, x0.new_zeros(len(rows), len(at))))
    return _Side(torch.cat(shares), torch.cat(constants), _rotated_vector(frozen, layer, read, channels, at, R))


def _components(frozen: FrozenPass, layer: int, by: str, activation: str) -> dict[str, Tensor]:
    """What each component before a layer put into the stream that its attention reads, `[batch, pos, d_model]`."""
    stream = Stream.of(frozen, activation, layers=range(layer) if layer else [0])
    whitening = frozen.maps.whitening(layer)
    parts = stream.sources()
    if layer == 0:
        return parts if whitening is None else {name: whitening.push(part) for name, part in parts.items()}
    for number, step in enumerate(stream.steps):
        written: dict[str, Tensor] = {}
        for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
            if by == "head":
                written |= dict(zip(sublayer.nodes, sublayer.outputs(hidden), strict=True))
            else:
                written[sublayer.name] = sublayer.write.push(hidden)
        written |= {name: bias.expand_as(stream.x[0]) for name, bias, inside in step.biases if inside}
        parts |= written
        parts = {name: step.outer.push(output) for name, output in parts.items()}
        parts |= {name: bias.expand_as(stream.x[0]) for name, bias, inside in step.biases if not inside}
    return parts if whitening is None else {name: whitening.push(part) for name, part in parts.items()}


def _by_component(
    frozen: FrozenPass,
    layer: int,
    reading: ScoreReading,
    read: Chain,
    head: int,
    heads: int,
    at: Tensor,
    sources: Float[Tensor, "source batch pos d_model"],
) -> _Side:
    """Each source's part of the stream at the position, read by the head."""
    vectors = torch.take_along_dim(sources, at[None, :, None, None], dim=2)
    cut = read.at(RowPositions(at[None]))
    projections = cut.push(vectors)[:, :, 0]
    d_head = projections.shape[-1] // heads
    channels = slice(head * d_head, (head + 1) * d_head)
    R = _rotation(reading, at, projections, d_head)
    bias = cut(torch.zeros_like(vectors[:1]))[0, :, 0, channels]
    return _Side(
        torch.einsum("sbd,bde->ebs", projections[..., channels], R),
        torch.einsum("bd,bde->eb", bias, R),
        _rotated_vector(frozen, layer, read, channels, at, R),
    )
