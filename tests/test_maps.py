"""One battery for every map: adjoint, linearity, bias, rows, dtype."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st

from tensorlens_tl.algebra import (
    ZERO,
    Attention,
    Beside,
    Branch,
    CausalConvolution,
    Chain,
    ChainWithReads,
    ChannelGroup,
    Diagonal,
    DiagonalRecursion,
    EarlierRead,
    GroupSum,
    Identity,
    LazyMap,
    Linear,
    Norm,
    Recursion,
    Routed,
    SelectiveScan,
    Streams,
    Tap,
    Transpose,
)
from tensorlens_tl.algebra.positions import RowPositions
from tensorlens_tl.algebra.secants import (
    CrossKeyResponse,
    KeyResponse,
    Offset,
    QueryResponse,
    RankOne,
    Rotation,
    ScoreSecant,
    logarithmic_mean,
)
from tensorlens_tl.algebra.segments import CrossAttention, Picked, Segment
from tensorlens_tl.testing import check_map

pytestmark = pytest.mark.numeric

BATCH, POS, WIDTH = 2, 3, 8


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def pattern(heads=4, queries=POS, keys=POS):
    """Rows that do not sum to 1, as with attention sinks and fully masked rows."""
    rows = torch.rand(BATCH, heads, queries, keys, dtype=torch.float64)
    rows[0, :, 0] = 0
    return rows


def selective(rates, groups=2, head_dim=2):
    """A scan of as many channels as the other maps have."""
    shape = (BATCH, POS, groups, 3)
    delta = torch.rand(BATCH, POS, WIDTH // head_dim, dtype=torch.float64)
    return SelectiveScan(delta, -rates.exp(), normal(*shape), normal(*shape), head_dim)


def part():
    """A map of two positions that treats each of them otherwise."""
    return Norm(normal(BATCH, 2, 1).exp(), normal(WIDTH), normal(WIDTH)) + Identity()


def mixing_part(shape="both"):
    mixed = getattr(pattern(queries=2, keys=2), {"both": "clone", "causal": "tril"}[shape])()
    return Chain(
        (Linear(normal(WIDTH, 4), normal(4)), Attention(mixed, 2), Linear(normal(WIDTH, WIDTH), normal(WIDTH)))
    )


def branch(number, places, width=WIDTH):
    """An expert: its own tokens, packed, through a hidden layer."""
    gate = Diagonal(normal(1, len(places), 5), normal(1, len(places), 5))
    inside = Chain((Linear(normal(WIDTH, 5), normal(5)), gate, Linear(normal(5, width), normal(width))))
    return Branch(inside, torch.tensor(places, dtype=torch.long), normal(len(places)), number)


def lazy(m, row_bytes=1 << 30):
    """Made when it is used, and one row at a time."""
    return LazyMap(partial(nullcontext, m), POS, row_bytes)


def routed(*places, width=WIDTH):
    return Routed(tuple(branch(number, kept, width) for number, kept in enumerate(places)), (BATCH, POS), width)


def score_secant(kv_heads=4, heads=4):
    """The secant of two random causal patterns, queries and keys of two channels."""
    logs = tuple(
        normal(BATCH, heads, POS, POS).masked_fill(torch.ones(POS, POS).triu(1).bool(), -torch.inf).log_softmax(-1)
        for _ in "ab"
    )
    queries, keys, values = normal(3, BATCH, heads, POS, WIDTH // heads)
    return ScoreSecant.of(logarithmic_mean(*logs), torch.rand(BATCH, heads, POS), 0.5, queries, keys, values, kv_heads)


def cross_secant(queries, keys, kv_heads=4, heads=4):
    """The same of queries that attend to other positions than their own."""
    logs = tuple(normal(BATCH, heads, queries, keys).log_softmax(-1) for _ in "ab")
    of_queries, of_keys, values = (normal(BATCH, heads, pos, WIDTH // heads) for pos in (queries, keys, keys))
    return ScoreSecant.of(
        logarithmic_mean(*logs), torch.zeros(BATCH, heads, queries), 0.5, of_queries, of_keys, values, kv_heads
    )


def cross_responses():
    """Queries of the last two positions and keys of the first, each after a map of its positions alone."""
    secant = cross_secant(queries=2, keys=1)
    by_query = Segment(Chain((part(), QueryResponse.of(secant))), 1, 3, POS, only=True)
    encoder = Segment(Norm(normal(BATCH, 1, 1).exp(), normal(WIDTH), normal(WIDTH)), 0, 1, POS, only=True)
    return by_query + Chain((encoder, CrossKeyResponse(secant, (1, 3), (0, 1), POS)))


def chain_with_reads():
    """Four stages, the last two of which read what entered the second: one by attention, one position by position."""
    attending, linear = MAPS["attention block"], MAPS["linear"]
    stages = (linear(), attending() + Identity(), MAPS["sum"](), attending() + Identity())
    return ChainWithReads(stages, {2: EarlierRead(1, attending()), 3: EarlierRead(1, linear())})


MAPS = {
    "offset": lambda: Offset(normal(BATCH, POS, WIDTH), "L0.W_V"),
    "rank one": lambda: RankOne(normal(BATCH, POS, WIDTH), normal(BATCH, POS, WIDTH)),
    "rank one by head": lambda: RankOne(normal(BATCH, POS, WIDTH), normal(BATCH, POS, WIDTH), groups=4),
    "channel group": lambda: ChannelGroup(1, 4),
    "rotation": lambda: Rotation.of(normal(POS, 2, 2)),
    "query response": lambda: QueryResponse.of(score_secant()),
    "key response": lambda: KeyResponse(score_secant()),
    "grouped key response": lambda: KeyResponse(score_secant(kv_heads=2)),
    "responses": lambda: Chain(
        (
            MAPS["layer norm"](),
            QueryResponse.of(score_secant()) @ MAPS["offset"]() + KeyResponse(score_secant()) @ MAPS["rotation"](),
            MAPS["linear"](),
        )
    ),
    "cross key response": lambda: CrossKeyResponse(cross_secant(queries=1, keys=2), (2, 3), (0, 2), POS),
    "grouped cross key response": lambda: CrossKeyResponse(
        cross_secant(queries=2, keys=1, kv_heads=2), (1, 3), (0, 1), POS
    ),
    "cross key response backwards": lambda: CrossKeyResponse(cross_secant(queries=1, keys=2), (0, 1), (1, 3), POS),
    "cross responses": cross_responses,
    "identity": lambda: Identity(),
    "tap": lambda: Tap({}, "x"),
    "linear": lambda: Linear(normal(WIDTH, WIDTH), normal(WIDTH)),
    "linear without bias": lambda: Linear(normal(WIDTH, WIDTH)),
    "rectangular": lambda: Linear(normal(WIDTH, 5), normal(5)),
    "diagonal": lambda: Diagonal(normal(BATCH, POS, WIDTH), normal(BATCH, POS, WIDTH)),
    "layer norm": lambda: Norm(normal(BATCH, POS, 1).exp(), normal(WIDTH), normal(WIDTH)),
    "rms norm": lambda: Norm(normal(BATCH, POS, 1).exp(), normal(WIDTH), centre=False),
    "plain norm": lambda: Norm(normal(BATCH, POS, 1).exp()),
    "attention": lambda: Attention(pattern(), kv_heads=4),
    "grouped attention": lambda: Attention(pattern(), kv_heads=2),
    "sum": lambda: Linear(normal(WIDTH, WIDTH), normal(WIDTH)) + Identity() + Norm(normal(BATCH, POS, 1).exp()),
    "chain": lambda: MAPS["rectangular"]() @ MAPS["attention block"]() @ MAPS["sum"](),
    "attention block": lambda: Chain(
        (Linear(normal(WIDTH, 4), normal(4)), Attention(pattern(), 2), Linear(normal(WIDTH, WIDTH), normal(WIDTH)))
    ),
    "streams": lambda: Streams(normal(2, 2)),
    "streams, more than it reads": lambda: Streams(normal(3, 2)) @ MAPS["linear"](),
    "transpose": lambda: MAPS["rectangular"]().T,
    "recursion": lambda: Recursion(0.3 * normal(WIDTH, WIDTH)),
    "padded recursion": lambda: Recursion(0.3 * normal(WIDTH, WIDTH), torch.arange(BATCH * POS).view(BATCH, POS) > 1),
    "diagonal recursion": lambda: DiagonalRecursion(normal(BATCH, POS, 1, WIDTH)),
    "diagonal recursion of a bias": lambda: MAPS["diagonal recursion"]() @ MAPS["linear"](),
    "convolution": lambda: CausalConvolution(normal(WIDTH, 4), normal(WIDTH)),
    "convolution without bias": lambda: CausalConvolution(normal(WIDTH, 2)),
    "selective scan": lambda: selective(normal(WIDTH, 3), head_dim=1),
    "scan of heads": lambda: selective(normal(WIDTH // 2)),
    "scan of a bias": lambda: selective(normal(WIDTH // 2), groups=1) @ MAPS["linear"](),
    "state-space layer": lambda: Chain(
        (MAPS["diagonal"](), MAPS["convolution"](), MAPS["scan of heads"]() + MAPS["diagonal"](), MAPS["linear"]())
    ),
    **{f"segment from {start}": lambda start=start: Segment(part(), start, start + 2, POS) for start in (0, 1)},
    "segment of all": lambda: Segment(MAPS["layer norm"](), 0, POS, POS),
    "segment alone": lambda: Segment(part(), 1, 3, POS, only=True),
    "rectangular segment": lambda: Segment(Linear(normal(WIDTH, 5), normal(5)), 0, 2, POS, only=True),
    "mixing segment": lambda: Segment(mixing_part(), 1, 3, POS),
    "causal segment": lambda: Segment(mixing_part("causal"), 1, 3, POS),
    "mixing segment alone": lambda: Segment(mixing_part(), 0, 2, POS, only=True),
    "cross-attention": lambda: CrossAttention(pattern(queries=1, keys=2), 4, (2, 3), (0, 2), POS),
    "grouped cross-attention": lambda: CrossAttention(pattern(queries=2, keys=1), 2, (1, 3), (0, 1), POS),
    "cross-attention backwards": lambda: CrossAttention(pattern(queries=1, keys=2), 4, (0, 1), (1, 3), POS),
    "encoder and decoder": lambda: Chain(
        (
            Segment(MAPS["linear"]() + Identity(), 0, 2, POS),
            Identity() + Chain((MAPS["cross-attention"](), Segment(MAPS["linear"](), 2, 3, POS, only=True))),
            Segment(Norm(normal(BATCH, 1, 1).exp(), normal(WIDTH), normal(WIDTH)), 2, 3, POS),
        )
    ),
    "routed": lambda: routed([0, 1, 4], [5, 1], [2]),
    "routed, some tokens nowhere": lambda: routed([3], [3, 0]),
    "routed, one branch without tokens": lambda: routed([], [4, 2]),
    "routed, narrower": lambda: routed([0, 2, 3], [1, 0], width=3),
    "beside": lambda: Beside((MAPS["rectangular"](), routed([0, 4], [2], width=5))),
    "group sum": lambda: GroupSum(2),
    "experts by name": lambda: GroupSum(2) @ Beside((MAPS["linear"](), MAPS["routed"]())),
    "routed in a chain": lambda: MAPS["attention"]() @ MAPS["routed"]() @ MAPS["attention"]() @ MAPS["sum"](),
    "made when used": lambda: lazy(MAPS["attention block"]() @ MAPS["linear"]()),
    "routed, made when used": lambda: lazy(MAPS["routed in a chain"]()),
    "made when used, in a chain": lambda: (
        MAPS["layer norm"]() @ lazy(MAPS["attention block"]() + Identity()) @ lazy(MAPS["recursion"]()) @ MAPS["sum"]()
    ),
    "chain with reads": lambda: chain_with_reads(),
    "chain with reads of a bias": lambda: MAPS["linear"]() @ chain_with_reads() @ MAPS["linear"](),
    "recursion in a chain": lambda: MAPS["linear"]() @ MAPS["padded recursion"]() @ MAPS["sum"]() @ MAPS["recursion"](),
}


def widths(m, name):
    narrow = ("grouped attention", "grouped cross-attention", "grouped key response", "grouped cross key response")
    d_in = {"transpose": 5, **dict.fromkeys(narrow, 4)}.get(name, WIDTH)
    return d_in, m.push(normal(BATCH, POS, d_in)).shape[-1]


@pytest.fixture(params=MAPS)
def case(request):
    m = MAPS[request.param]()
    return m, *widths(m, request.param)


def test_battery(case):
    m, d_in, _ = case
    check_map(m, normal(BATCH, POS, d_in))


@pytest.mark.parametrize("rows", [(), (1,), (3, 2)])
def test_dot_test(case, rows):
    m, d_in, d_out = case
    x, g = normal(*rows, BATCH, POS, d_in), normal(*rows, BATCH, POS, d_out)
    assert m.push(x).shape == (*rows, BATCH, POS, d_out)
    assert torch.allclose((m.push(x) * g).sum((-3, -2, -1)), (x * m.pull(g)).sum((-3, -2, -1)), rtol=1e-11)


def test_linear_and_affine(case):
    m, d_in, _ = case
    x, y = normal(BATCH, POS, d_in), normal(BATCH, POS, d_in)
    assert torch.allclose(m.push(2 * x - 3 * y), 2 * m.push(x) - 3 * m.push(y), rtol=1e-11)
    assert torch.allclose(m(x), m.push(x) + m.bias, rtol=1e-11)
    assert torch.allclose(m(torch.zeros_like(x)), m.bias.to(x).expand_as(m(x)), rtol=1e-11, atol=1e-13)


def test_bias_by_the_adjoint(case):
    m, _, d_out = case
    g = normal(4, BATCH, POS, d_out)
    pulled, share = m.pull_with_bias(g)
    assert torch.equal(pulled, m.pull(g))
    assert torch.allclose(share, (g * m.bias).sum((-2, -1)), rtol=1e-10, atol=1e-12)


def test_transpose_has_no_bias(case):
    m, d_in, d_out = case
    assert m.T.bias is ZERO
    g, x = normal(BATCH, POS, d_out), normal(BATCH, POS, d_in)
    assert torch.equal(m.T.push(g), m.pull(g))
    assert torch.equal(m.T.pull(x), m.push(x))


def test_rows_are_independent(case):
    m, d_in, _ = case
    x = normal(3, BATCH, POS, d_in)
    assert torch.allclose(m.push(x), torch.stack([m.push(row) for row in x]), rtol=1e-12)


def test_composition_is_associative_and_flat():
    a, b, c = MAPS["linear"](), MAPS["layer norm"](), MAPS["attention"]()
    left, right = (a @ b) @ c, a @ (b @ c)
    assert left.stages == right.stages == (c, b, a)
    assert (a + b + c).terms == (a, b, c)
    x = normal(BATCH, POS, WIDTH)
    assert torch.allclose(left(x), a(b(c(x))), rtol=1e-12)
    assert torch.allclose((a + b)(x), a(x) + b(x), rtol=1e-12)
    assert isinstance(a.T, Transpose)


def test_grouped_attention_repeats_the_right_heads():
    """Query head h reads key-value head h // group, as repeat_interleave does."""
    probabilities, values = pattern(4), normal(BATCH, POS, 2, 3)
    mixed = Attention(probabilities, 2).push(values.reshape(BATCH, POS, 6)).view(BATCH, POS, 4, 3)
    expanded = values.repeat_interleave(2, dim=2)
    assert torch.allclose(mixed, torch.einsum("bhqk,bkhd->bqhd", probabilities, expanded), rtol=1e-12)


def test_norm_is_the_norm():
    x, layer = normal(BATCH, POS, WIDTH), torch.nn.LayerNorm(WIDTH, dtype=torch.float64)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    scale = (x.var(-1, keepdim=True, unbiased=False) + layer.eps).sqrt()
    assert torch.allclose(Norm(scale, layer.weight, layer.bias)(x), layer(x), rtol=1e-12)


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_a_pattern_in_half_precision_takes_vectors_in_float32(narrow):
    """As the biases of norms in float32 are, in a half-precision model."""
    pattern, x = torch.rand(1, 2, 3, 3).to(narrow), torch.randn(1, 3, 4)
    mix = Attention(pattern, kv_heads=2)
    expected = Attention(pattern.float(), kv_heads=2)
    assert torch.equal(mix.push(x), expected.push(x))
    assert torch.equal(mix.pull(x), expected.pull(x))
    assert mix.push(x.to(narrow)).dtype == narrow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_float32_scale_does_not_change_the_dtype(dtype):
    norm = Norm(torch.ones(1, 2, 1), torch.ones(4, dtype=dtype), torch.ones(4, dtype=dtype))
    x = torch.randn(1, 2, 4, dtype=dtype)
    assert norm(x).dtype == norm.pull(x).dtype == dtype


@given(st.integers(1, 3), st.integers(1, 5), st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]), st.integers(1, 4))
def test_attention_of_any_shape(batch, pos, heads, d_head):
    n_heads, kv = heads
    m = Attention(torch.rand(batch, n_heads, pos, pos, dtype=torch.float64), kv)
    x, g = normal(2, batch, pos, kv * d_head), normal(2, batch, pos, n_heads * d_head)
    assert torch.allclose((m.push(x) * g).sum(), (x * m.pull(g)).sum(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("only", [False, True])
@pytest.mark.parametrize("mixing", [False, True])
def test_a_segment_is_its_map_between_others(only, mixing):
    inner = mixing_part() if mixing else part()
    m, x = Segment(inner, 1, 3, POS, only), normal(BATCH, POS, WIDTH)
    assert torch.equal(m(x)[:, 1:], inner(x[:, 1:]))
    assert torch.equal(m(x)[:, 0], torch.zeros_like(x[:, 0]) if only else x[:, 0])


@pytest.mark.parametrize("only", [False, True])
def test_a_segment_by_groups_of_channels(only):
    m, x = Segment(Linear(normal(WIDTH, WIDTH), normal(WIDTH)), 1, 3, POS, only), normal(BATCH, POS, WIDTH)
    assert torch.allclose(m.of_group(1, 2)(x), m(x)[..., WIDTH // 2 :])
    alone = torch.stack([x * (torch.arange(WIDTH) // (WIDTH // 2) == group) for group in range(2)])
    assert torch.allclose(m.push_groups(x, 2), m.push(alone))
    assert m.components == 1


def test_a_segment_by_heads():
    m, x = Segment(Attention(pattern(queries=2, keys=2), 2), 1, 3, POS, only=True), normal(BATCH, POS, 4)
    assert m.components == 4
    heads = []
    for head in range(4):
        group, groups = m.group_read_by(head)
        heads.append(m.component(head)(x.unflatten(-1, (groups, -1))[..., group, :]))
    assert torch.allclose(torch.cat(heads, dim=-1), m(x))


@pytest.mark.parametrize("only", [False, True])
def test_a_segment_cut_to_any_positions(only):
    """Slices that begin or end outside it, lists in any part of it, one position for each row."""
    inner, x = part(), normal(BATCH, POS, WIDTH)
    m = Segment(inner, 1, 3, POS, only)
    for where in (slice(0, 1), slice(0, 2), slice(1, 2), slice(2, None), slice(None), [0], [2], [0, 2], [0, 1, 2]):
        assert torch.equal(m.at(where)(x[:, where]), m(x)[:, where])
    places = torch.tensor([[0, 1], [2, 0], [1, 2]])  # a row's position in each prompt
    picked, rows = m.at(RowPositions(places)), normal(3, BATCH, 1, WIDTH)
    assert isinstance(picked, Picked)
    whole = torch.zeros(3, BATCH, POS, WIDTH, dtype=torch.float64)
    whole.scatter_(2, places[..., None, None].expand(-1, -1, 1, WIDTH), rows)
    at = places[..., None, None].expand(-1, -1, 1, WIDTH)
    for made, expected in ((picked(rows), m(whole)), (picked.pull(rows), m.pull(whole))):
        assert torch.allclose(made, expected.gather(2, at), rtol=1e-12, atol=1e-14)
    assert picked.norm_bound() >= inner.norm_bound()


def test_cross_attention_is_attention_between_two_segments():
    probabilities, x = pattern(4, queries=1, keys=2), normal(BATCH, POS, 6)
    m = CrossAttention(probabilities, 2, (2, 3), (0, 2), POS)
    values = x[:, :2].view(BATCH, 2, 2, 3).repeat_interleave(2, dim=2)
    mixed = torch.einsum("bhqk,bkhd->bqhd", probabilities, values).flatten(2)
    assert torch.allclose(m(x)[:, 2:], mixed, rtol=1e-12)
    assert not m(x)[:, :2].any()
    with pytest.raises(TypeError, match="slice"):
        m.at([0, 2])


def test_a_bias_that_is_one_for_all_positions_goes_through_experts():
    """As that of a norm before them, beside other experts or not."""
    experts = routed([0, 3], [1])
    for after in (experts, Beside((experts, routed([2])))):
        whole = Chain((Norm(normal(BATCH, POS, 1).exp(), normal(WIDTH), normal(WIDTH)), after))
        torch.testing.assert_close(whole.bias.expand(BATCH, POS, -1), whole(torch.zeros(BATCH, POS, WIDTH).double()))


def test_routed_tokens_go_where_they_are_sent():
    """Σ over a token's experts of weight · expert(x), token by token; gradients go through it both ways."""
    m, x = routed([0, 1, 4], [5, 1]), normal(BATCH, POS, WIDTH)
    expected = torch.zeros_like(x).flatten(0, 1)
    for part in m.branches:
        first, gate, last = part.map.stages
        for number, (place, weight) in enumerate(zip(part.places, part.weight, strict=True)):
            hidden = x.flatten(0, 1)[place] @ first.weight + first.offset
            hidden = hidden * gate.factor[0, number] + gate.offset[0, number]
            expected[place] += weight * (hidden @ last.weight + last.offset)
    assert torch.allclose(m(x), expected.view_as(x), rtol=1e-12)
    assert torch.autograd.gradcheck(m, x.requires_grad_(True))
    assert torch.autograd.gradcheck(m.pull, normal(2, BATCH, POS, WIDTH).requires_grad_(True))
