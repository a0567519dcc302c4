"""Circuits of encoder–decoders: heads of both stacks and of cross-attention as nodes.

The independent computation is the live model, held fixed by hooks: a head's output is taken away there, and what lies
beside the route in question is kept at the values of the pass.
"""

import pytest
import torch
from conftest import close, hooks_left, tolerance

import tensorlens_tl as tlens
from tensorlens_tl import circuits, report
from tensorlens_tl.circuits.stream import Stream
from tensorlens_tl.testing import encoder_decoder_names, tiny_input, tiny_model

BART = "bridge/bart"
RELATIVE = ("bridge/t5", "bridge/t5-gated", "encoder-decoder/tied", "encoder-decoder/gated")
TARGET = {"target": 7, "minus": 11}
HEADS = ((0, False), (1, False), (2, False), (2, True), (3, False), (3, True))
pytestmark = pytest.mark.numeric


@pytest.fixture(params=encoder_decoder_names())
def name(request):
    return request.param


def frozen_of(model, batch=2, seed=0):
    tokens, options = tiny_input(model, seed=seed)
    return tlens.freeze(model, tokens[:batch], **{key: ids[:batch] for key, ids in options.items()})


@pytest.fixture
def frozen(model):
    return frozen_of(model)


@pytest.fixture
def one(model):
    return frozen_of(model, batch=1)


@pytest.fixture
def change(model):
    return tlens.difference(frozen_of(model, 1, seed=0), frozen_of(model, 1, seed=1))


def held_number(frozen, hooks=(), *, live=False):
    """The difference of two logits at the last token, of the model that is held by hooks, or (`live`) is not."""
    seen = {}

    def see(states, *, hook):
        seen["states"] = states.detach()

    held = [] if live else frozen.fwd_hooks()
    with torch.no_grad():
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[*held, *hooks, (frozen.points.unembed_in, see)])
    W_U, b_U = frozen.view.unembedding
    logits = seen["states"][:, -1] @ W_U * frozen.view.logit_factor
    if b_U is not None:
        logits = logits + b_U * frozen.view.logit_factor
    return logits[:, 7] - logits[:, 11]


def values_of(frozen, points, hooks=()):
    """What the held model has at some hook points."""
    seen = {}
    see = [(point, lambda live, hook: seen.update({hook.name: live.detach().clone()})) for point in points]
    with torch.no_grad():
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[*frozen.fwd_hooks(), *hooks, *see])
    return dict(zip(points, seen.values(), strict=True))


def by_head(z):
    """Some classes show heads side by side."""
    return z if z.ndim == 4 else z.unflatten(-1, (4, -1))


def without(frozen, layer, head, *, cross=False, pos=slice(None)):
    """A hook that takes what one head gives at some positions of its side away."""
    points = frozen.points.blocks[layer]

    def ablate(z, *, hook):
        heads = by_head(z).clone()
        heads[:, pos, head] = 0
        return heads.reshape(z.shape)

    return (points.cross.z if cross else points.z), ablate


def node(layer, head, cross):
    return f"L{layer}.cross.H{head}" if cross else f"L{layer}H{head}"


def points_after(frozen, layer, *, cross, layers):
    """Where sublayers give something, of those after one, in some layers."""
    points = []
    for number in layers:
        block = frozen.points.blocks[number]
        if number > layer:
            points.append(block.z)
        if block.cross is not None and (number > layer or (number == layer and not cross)):
            points.append(block.cross.z)
        if number >= layer:
            points.append(block.post)
    return points


def kept(values):
    """Hooks that put values in the place of what a run computes."""
    return [(point, lambda live, hook, value=value: value.clone()) for point, value in values.items()]


# ------------------------------------------------------------------ components and heads


@pytest.mark.parametrize("by", ["component", "head", "head_token", "neuron"])
def test_terms_of_both_stacks_sum_to_the_models_own_logit(frozen, name, by):
    terms = circuits.logit_attribution(frozen, **TARGET, by=by)
    assert float(terms.gap.max()) < tolerance(name)
    assert close(terms.total[:, 0], held_number(frozen, live=True), atol=tolerance(name))
    cross = [term for term in terms.names if ".cross" in term and "b_O" not in term]
    assert cross == ["L2.cross", "L3.cross"] if by == "component" else cross[::4] == ["L2.cross.H0", "L3.cross.H0"]
    # the encoder's parts reach the logit through cross-attention alone
    encoder = [number for number, term in enumerate(terms.names) if term.startswith(("L0", "L1", "MLP0", "MLP1"))]
    assert not terms.scores[..., encoder].any()
    if by == "head_token":
        start = frozen.sides[0]
        assert close(terms.keys.sum(-1), terms.scores, atol=1e-9)
        numbers = [terms.names.index(term) for term in cross]
        assert not terms.keys[:, :, numbers, start:].any()
        assert terms.keys[:, :, numbers, :start].any(-1).all()


def test_several_queries_are_each_by_itself(frozen, name):
    start = frozen.sides[0]
    several = circuits.logit_attribution(frozen, **TARGET, by="head", query=slice(start, None))
    assert float(several.gap.max()) < tolerance(name)
    last = circuits.logit_attribution(frozen, **TARGET, by="head")
    assert close(several.scores[:, -1], last.scores[:, 0])
    with pytest.raises(tlens.InvalidInputError, match="positions 0 to 5 are the encoder's"):
        circuits.logit_attribution(frozen, **TARGET, query=0)
    direction = torch.randn(16, dtype=torch.float64)
    ends = circuits.logit_attribution(frozen, direction=direction, query=[1, start], by="head")
    assert float(ends.gap.max()) < tolerance(name)
    assert close(ends.total, torch.stack([frozen.output[:, 1], frozen.output[:, start]], 1) @ direction)


@pytest.mark.parametrize(("layer", "cross"), HEADS)
@pytest.mark.few(3)
def test_a_head_is_worth_what_the_held_model_loses_without_it(frozen, name, layer, cross):
    head = 1
    alone = circuits.head_map(frozen, layer, head, cross=cross)
    assert repr(alone).startswith(f"HeadMap({node(layer, head, cross)} of")
    removed = without(frozen, layer, head, cross=cross)
    lost = held_number(frozen) - held_number(frozen, [removed])
    total = circuits.total_effects(frozen, **TARGET)[node(layer, head, cross)][:, 0]
    assert close(total, lost, atol=tolerance(name))
    assert close(alone.target(**TARGET).sum((1, 2)), total)
    # directly: everything that comes after keeps what it gave
    after = points_after(frozen, layer, cross=cross, layers=range(layer, frozen.n_layers))
    beside = kept(values_of(frozen, after))
    lost = held_number(frozen) - held_number(frozen, [removed, *beside])
    direct = circuits.logit_attribution(frozen, **TARGET, by="head")[node(layer, head, cross)][:, 0]
    assert close(direct, lost, atol=tolerance(name))
    assert close(alone.target(**TARGET, direct=True).sum((1, 2)), direct)
    assert hooks_left(frozen.model) == 0


@pytest.mark.parametrize(("layer", "cross"), [(0, False), (2, False), (2, True)])
def test_what_one_head_moves(frozen, name, layer, cross):
    alone = circuits.head_map(frozen, layer, 3, cross=cross)
    start = frozen.sides[0]
    queries = slice(0, start) if layer == 0 else slice(start, None)
    keys = slice(0, start) if layer == 0 or cross else slice(start, None)
    pattern = frozen.cross_pattern(layer) if cross else frozen.pattern(layer)
    assert torch.equal(alone.pattern[:, queries, keys], pattern[:, 3])
    assert float(alone.pattern.sum()) == pytest.approx(float(pattern[:, 3].sum()))
    moved = alone.contributions()
    assert close(moved.sum(2), alone.output)
    assert close(moved.norm(dim=-1), alone.norms)
    assert close(alone.contributions(-1)[:, 0], moved[:, -1])
    assert not moved[:, :start].any() or layer == 0
    vectors = resolved(frozen)
    assert close((alone.effect[:, -1] * vectors).sum(-1), alone.target(**TARGET).sum((1, 2)), tolerance(name))


def resolved(frozen):
    W_U, _ = frozen.view.unembedding
    return (W_U[:, 7] - W_U[:, 11]) * frozen.view.logit_factor


def test_a_head_of_cross_attention_where_there_is_none(frozen, model_named):
    with pytest.raises(tlens.InvalidInputError, match="layers 2 to 3 have"):
        circuits.head_map(frozen, 1, 0, cross=True)
    with pytest.raises(tlens.InvalidInputError, match="cross-attention"):
        circuits.head_map(frozen, 2, 4, cross=True)
    plain = tlens.freeze(model_named("bridge/gpt2"), [[3, 4, 5]])
    with pytest.raises(tlens.InvalidInputError, match="no layer has"):
        circuits.head_map(plain, 0, 0, cross=True)


def test_live_effects_are_those_of_the_free_model(frozen, name):
    nodes = ["L1H2", "L2H0", "L2.cross.H3"]
    effects = circuits.total_effects(frozen, **TARGET, live=True, nodes=nodes)
    for effect, (layer, head, cross) in zip(nodes, ((1, 2, False), (2, 0, False), (2, 3, True)), strict=True):
        removed = without(frozen, layer, head, cross=cross)
        lost = held_number(frozen, live=True) - held_number(frozen, [removed], live=True)
        assert close(effects[effect][:, 0], lost, atol=tolerance(name))
    encoder = circuits.total_effects(
        frozen, direction=torch.randn(16, dtype=torch.float64), query=1, layers=range(2), live=True, nodes=["MLP0"]
    )
    assert encoder.scores.abs().max() > 1e-6


def test_prompts_of_different_length(model_named):
    frozen = frozen_of(model_named(BART))
    first, second = frozen.tokens.tolist()
    together = tlens.freeze(frozen.model, [first[:6], second[:4]], decoder_input_ids=[first[6:8], second[6:]])
    terms = circuits.logit_attribution(together, **TARGET, by="head")
    assert float(terms.gap.max()) < 1e-9
    for row, (encoder, decoder) in enumerate(((first[:6], first[6:8]), (second[:4], second[6:]))):
        alone = tlens.freeze(frozen.model, [encoder], decoder_input_ids=[decoder])
        assert close(circuits.logit_attribution(alone, **TARGET, by="head").scores[0], terms.scores[row])


def test_some_layers(frozen, name):
    """The decoder by itself begins with the encoder's output; the encoder ends before the decoder."""
    decoder = circuits.logit_attribution(frozen, **TARGET, by="head", layers=range(2, 4))
    assert decoder.names[0] == f"{frozen.view.blocks[2].name} input"
    assert float(decoder.gap.max()) < tolerance(name)
    direction = torch.randn(16, dtype=torch.float64)
    encoder = circuits.logit_attribution(frozen, direction=direction, query=[0, 5], by="head", layers=range(2))
    assert float(encoder.gap.max()) < tolerance(name)
    assert close(encoder.total, frozen.resid_pre(2)[:, [0, 5]] @ direction, atol=1e-9)


# ------------------------------------------------------------------ edges and paths


def test_nodes_and_edges_of_a_graph_sum(one, name):
    graph = circuits.contribution_graph(one, **TARGET, threshold=0)
    assert graph.gap < tolerance(name)
    assert graph.completeness == pytest.approx(1)
    start = one.sides[0]
    sides = graph.nodes.loc[graph.nodes["layer"] >= 0].groupby("layer")["pos"].agg(["min", "max"])
    assert sides.to_numpy().tolist() == [[0, start - 1]] * 2 + [[start, len(one.tokens[0]) - 1]] * 2
    inflow = torch.zeros(len(graph.nodes), dtype=torch.float64)
    inflow.index_add_(0, torch.tensor(graph.edges["target"].to_numpy()), torch.tensor(graph.edges["weight"].to_numpy()))
    expected = torch.tensor((graph.nodes["weight"] - graph.nodes["bias"]).to_numpy())
    inner = torch.tensor(~graph.nodes["kind"].isin(["embedding", "bias"]).to_numpy())
    assert close(inflow[inner], expected[inner], atol=tolerance(name))
    effects = circuits.total_effects(one, **TARGET)
    summed = graph.nodes.groupby("name")["weight"].sum()
    assert close(torch.tensor([summed[node] for node in effects.names]), effects.scores[0, 0], tolerance(name))


def edge_by_hooks(frozen, source, end, pos, query):
    """What an encoder's head at a position gives the logit through the values of one head of cross-attention at a
    query: the head is taken away while all between them keeps what it gave, and what changed there enters a second run.
    """
    layer, head = source
    cross_layer, cross_head = end
    removed = without(frozen, layer, head, pos=pos)
    between = points_after(frozen, layer, cross=False, layers=range(layer, frozen.view.encoder_layers))
    decoder = [frozen.points.blocks[number].cross.z for number in range(frozen.view.encoder_layers, cross_layer)]
    point = frozen.points.blocks[cross_layer].cross.z
    beside = kept(values_of(frozen, [*between, *decoder]))
    given = by_head(values_of(frozen, [point], [removed, *beside])[point])

    def enter(z, *, hook):
        heads = by_head(z).clone()
        heads[:, query, cross_head] = given[:, query, cross_head]
        return heads.reshape(z.shape)

    return held_number(frozen) - held_number(frozen, [(point, enter)])


@pytest.mark.parametrize(("source", "end"), [((0, 1), (2, 1)), ((1, 2), (3, 0))])
def test_an_edge_from_the_encoder_into_cross_attention(one, name, source, end):
    """Through the encoder's final norm, where it has one, and the values of the head."""
    graph = circuits.contribution_graph(one, **TARGET, threshold=0)
    nodes = graph.nodes
    start = one.sides[0]
    for pos, query in ((0, start), (3, start + 1), (5, start + 3)):
        (first,) = nodes.index[(nodes["name"] == node(*source, False)) & (nodes["pos"] == pos)]
        (last,) = nodes.index[(nodes["name"] == node(*end, True)) & (nodes["pos"] == query)]
        edges = graph.edges.loc[(graph.edges["source"] == first) & (graph.edges["target"] == last), "weight"]
        expected = edge_by_hooks(one, source, end, pos, query - start)
        assert close(torch.tensor([edges.sum()], dtype=torch.float64), expected, atol=tolerance(name))


def test_graphs_in_parts(one, name):
    whole = circuits.contribution_graph(one, **TARGET, threshold=0)
    split = circuits.contribution_graph(one, **TARGET, threshold=0, sources=2, neurons=3)
    assert split.gap < tolerance(name)
    cross = split.nodes.loc[split.nodes["name"].str.startswith("L2.cross.H0←")]
    assert len(cross) == 2 * one.sides[1]
    assert set(cross["part"]) <= set(range(one.sides[0]))
    parts = split.nodes.loc[split.nodes["name"].str.startswith("L2.cross.H0"), "weight"].sum()
    own = whole.nodes.loc[whole.nodes["name"] == "L2.cross.H0", "weight"].sum()
    assert parts == pytest.approx(own, rel=1e-6, abs=1e-9)
    few = circuits.contribution_graph(one, **TARGET, threshold=0, nodes=20)
    assert len(few.nodes) == 21
    assert few.gap < tolerance(name)


def test_paths_sum_to_the_logit(frozen, one, name):
    paths = circuits.paths(frozen, **TARGET, max_order=2)
    assert float(paths.gap.max()) < tolerance(name)
    crossing = [path for path in paths.nodes if len(path) == 2 and path[1].startswith("L2.cross")]
    assert ("L1H0", "L2.cross.H2") in crossing
    top = circuits.top_paths(one, **TARGET, k=2000, width=500)
    assert float(top.gap.max()) < tolerance(name)
    assert any(path[0].startswith("L0") and ".cross" in path[-1] for path in top.nodes if path)
    # no path leads from the encoder to the logit but by cross-attention
    encoder = ("L0", "L1", "MLP0", "MLP1")
    for path, score in zip(top.nodes, top.scores[0, 0].tolist(), strict=True):
        if any(part.startswith(encoder) for part in path) and not any(".cross" in part for part in path):
            assert score == 0


# ------------------------------------------------------------------ two runs


def test_parts_of_a_difference_sum_to_the_change_of_the_live_logit(change, name):
    live = held_number(change.a, live=True) - held_number(change.b, live=True)
    size = max(1.0, float(held_number(change.a, live=True).abs().max()))
    for by in ("component", "head", "head_token"):
        terms = circuits.logit_attribution(change, **TARGET, by=by)
        assert close(terms.scores.sum(-1)[:, 0] / size, live / size, atol=tolerance(name))
    paths = circuits.paths(change, **TARGET, max_order=2)
    assert float(paths.gap.max()) < tolerance(name)
    assert ("L1H0.v", "L2.cross.H2.k") in paths.nodes
    graph = circuits.contribution_graph(change, **TARGET, threshold=0)
    assert graph.gap < tolerance(name)
    assert graph.total == pytest.approx(float(live), rel=1e-6, abs=1e-7)
    assert {"queries", "keys", "values"} <= set(graph.reads)
    keys = graph.nodes["name"] == "L2.cross.H2.k"
    assert set(graph.nodes.loc[keys, "kind"]) == {"head"}


def test_queries_keys_and_values_are_what_changed_in_what_a_head_gives(change, name):
    stream = Stream.of(change)
    start = change.sides[0]
    for layer in (2, 3):
        point = change.a.points.blocks[layer].cross.z
        given = [by_head(values_of(run, [point])[point]) for run in (change.a, change.b)]
        parts = [
            (sublayer, hidden)
            for step, hiddens in zip(stream.steps, stream.hidden, strict=True)
            for sublayer, hidden in zip(step.sublayers, hiddens, strict=True)
            if sublayer.is_cross and sublayer.layer == layer
        ]
        assert [sublayer.letter for sublayer, _ in parts] == ["q", "k", "v"]
        summed = sum(hidden for _, hidden in parts)
        assert not summed[:, :start].any()
        assert close(summed[:, start:].unflatten(-1, (4, -1)), given[0] - given[1], atol=tolerance(name))
        x = next(x for x, step in zip(stream.x, stream.steps, strict=False) if parts[0][0] in step.sublayers)
        for sublayer, hidden in parts:  # one head at a time
            alone = [sublayer.read_of(head)(x) for head in range(4)]
            assert close(torch.cat(alone, dim=-1), hidden)


def test_two_models_that_differ_in_their_cross_attention():
    """What a changed weight adds is a term by itself."""
    tuned, base = tiny_model(BART, seed=0), tiny_model(BART, seed=0)
    projections = tuned.decoder_blocks[0].cross_attn
    with torch.no_grad():
        for letter in "qkvo":
            module = getattr(projections, letter).original_component
            module.weight += 0.1 * torch.randn_like(module.weight)
            module.bias += 0.1 * torch.randn_like(module.bias)
    change = tlens.difference(frozen_of(tuned, 1), frozen_of(base, 1))
    live = held_number(change.a, live=True) - held_number(change.b, live=True)
    terms = circuits.logit_attribution(change, **TARGET, by="head")
    assert close(terms.scores.sum(-1)[:, 0], live)
    assert "L2.cross.b_O" in terms.names
    assert not terms["embed"].any()
    assert circuits.contribution_graph(change, **TARGET).gap < 1e-9
    assert float(circuits.paths(change, **TARGET).gap.max()) < 1e-9


# ------------------------------------------------------------------ attention scores


def normed(vectors, weights, scale):
    """Vectors through a norm by hand, over the scale of the pass."""
    if weights.centre:
        vectors = vectors - vectors.mean(-1, keepdim=True)
    vectors = vectors / scale
    return vectors if weights.gain is None else vectors * weights.gain


def of_head(matrix, head, heads):
    return matrix.unflatten(-1, (heads, -1))[:, head]


def test_a_pair_of_heads_is_what_one_wrote_to_the_query_and_one_to_the_key(frozen, name):
    """By hand: the decoder's head past norms to W_Q, the encoder's past its final norm to W_K of cross-attention."""
    start = frozen.sides[0]
    query, key = 3, 2
    places = frozen.layouts[1], frozen.layouts[2]
    passed = {
        1: (places[0].attn.after, places[0].attn.outer, places[0].mlp.outer),
        2: (places[1].attn.after, places[1].attn.outer, places[1].cross.before),
    }
    written = []
    for layer, at in ((1, key), (2, query)):
        weights, point = frozen.view.blocks[layer].attention, frozen.points.blocks[layer].z
        vectors = by_head(values_of(frozen, [point])[point])[:, at, 1]
        vectors = vectors @ weights.W_O.unflatten(0, (weights.heads, -1))[1]
        for norm in filter(None, passed[layer]):
            scale = frozen.maps.norm(layer, norm).scale[:, at]
            vectors = normed(vectors, frozen.view.blocks[layer].norms[norm], scale)
        written.append(vectors)
    of_encoder, of_decoder = written
    if frozen.view.encoder_norm is not None:
        of_encoder = normed(of_encoder, frozen.view.encoder_norm, frozen.maps.encoder_norm().scale[:, key])
    weights, heads = frozen.view.blocks[2].cross_query_key, frozen.view.blocks[2].require_cross_attention()
    q = of_decoder @ of_head(weights.W_Q, 3, heads.heads)
    k = of_encoder @ of_head(weights.W_K, 3 * heads.kv_heads // heads.heads, heads.kv_heads)
    pairs = circuits.qk_attribution(frozen, 2, 3, query=start + query, key=key, by="head", cross=True)
    names = pairs.names[0]
    scale = 1.0 if name in RELATIVE else 0.5
    ours = pairs.pairs[:, names.index("L2H1"), names.index("L1H1")]
    assert close(ours, scale * (q * k).sum(-1), atol=tolerance(name))
    # what the decoder wrote is at no key, what the encoder wrote at no query
    assert not pairs.pairs[:, :, names.index("L2H1")].any()
    assert not pairs.pairs[:, names.index("L1H1")].any()
    assert pairs.places[0].startswith("L2.cross.H3, 9 ")


def test_scores_of_prompts_of_different_length(model_named):
    """Of the demo, a BART: padding gives nothing, and each prompt has its own score."""
    frozen = frozen_of(model_named(BART))
    first, second = frozen.tokens.tolist()
    inputs = [(first[:6], first[6:8]), (second[:4], second[6:])]
    together = tlens.freeze(frozen.model, [inputs[0][0], inputs[1][0]], decoder_input_ids=[inputs[0][1], inputs[1][1]])
    for where in ({"layer": 3, "cross": True, "key": 1}, {"layer": 3, "key": -2}):
        pairs = circuits.qk_attribution(together, head=2, query=-1, **where)
        for row, (encoder, decoder) in enumerate(inputs):
            alone = tlens.freeze(frozen.model, [encoder], decoder_input_ids=[decoder])
            expected = circuits.qk_attribution(alone, head=2, query=-1, **where)
            real = together.mask[row]
            assert close(pairs.total[row], expected.total[0])
            assert close(pairs.pairs[row][real][:, real], expected.pairs[0])
            assert not pairs.pairs[row][~real].any()
            assert not pairs.pairs[row][:, ~real].any()


def test_a_score_of_the_other_side_is_refused(frozen):
    for arguments, message in (
        ({"layer": 0}, r"query=-1: self-attention of layer 0 has its query among the encoder's tokens, positions 0 to"),
        ({"layer": 2}, r"key=0: self-attention of layer 2 has its key among the decoder's tokens, positions 6 to 9"),
        ({"layer": 2, "cross": True, "key": 6}, r"key=6: cross-attention of layer 2 has its key among the encoder's"),
        ({"layer": 2, "cross": True, "query": 5}, r"query=5: cross-attention of layer 2 .* this is position 5"),
        ({"layer": 2, "query": 7, "key": 8}, "the key comes after the query"),
        ({"layer": 1, "cross": True}, "layers 2 to 3 have"),
        ({"layer": 3, "cross": True, "activation": "none"}, "none"),
    ):
        with pytest.raises(tlens.InvalidInputError, match=message):
            circuits.qk_attribution(frozen, head=0, **arguments)
    assert circuits.qk_attribution(frozen, 0, 0, query=1, key=4).total.shape == (2,)  # an encoder looks ahead


def test_relative_positions_are_a_term(model_named, tmp_path, capsys):
    name = next(name for name in RELATIVE if name in encoder_decoder_names())
    frozen = frozen_of(model_named(name))
    by = {key: circuits.qk_attribution(frozen, 3, 1, query=8, key=key) for key in (6, 7, 8)}
    assert len({float(pairs.relative[0]) for pairs in by.values()}) == 3
    distant = circuits.qk_attribution(frozen, 2, 1, query=9, key=7)  # the first block's table serves all, by distance
    assert torch.equal(distant.relative, by[6].relative)
    again = circuits.ScoreAttribution.load(by[7].save(tmp_path / "score"))
    assert torch.equal(again.relative, by[7].relative)
    by[7].show(2)
    assert "relative positions" in capsys.readouterr().out
    assert circuits.qk_attribution(frozen, 3, 1, cross=True).relative is None


# ------------------------------------------------------------------ weights


def test_an_ov_circuit_of_cross_attention_is_what_the_head_writes(frozen, name):
    """Its pattern times the encoder's output times the circuit, and the biases, are the head's output."""
    start = frozen.sides[0]
    encoder = frozen.resid_pre(2)[:, :start]
    for layer, head in ((2, 1), (3, 0)):
        circuit = circuits.ov(frozen, layer, head, cross=True)
        alone = circuits.head_map(frozen, layer, head, cross=True)
        bias = frozen.view.blocks[layer].cross_attention.b_V
        offset = 0.0 if bias is None else bias.unflatten(-1, (4, -1))[head] @ circuit.B
        written = frozen.cross_pattern(layer)[:, head] @ (encoder @ circuit.A @ circuit.B + offset)
        place = frozen.layouts[layer].cross
        if place.after is not None:
            norm = frozen.maps.norm(layer, place.after)
            written = norm.push(written)
        assert close(written, alone.output[:, start:], atol=tolerance(name))
        assert torch.equal(circuits.ov(frozen.model, layer, head, cross=True).A, circuit.A)
    inner = circuits.ov(frozen, 0, 2)
    assert inner.shape == (16, 16)


def test_a_qk_circuit_of_cross_attention_gives_its_pattern(frozen, name):
    """The softmax of scores by weights, biases inside, from what the held model reads there."""
    for layer in (2, 3):
        stream = Stream.of(frozen)
        number, _ = stream.at(layer, cross=True)
        start = frozen.sides[0]
        queries, keys = stream.x[number][:, start:], frozen.resid_pre(2)[:, :start]
        place = frozen.layouts[layer].cross
        if place.before is not None:
            queries = frozen.maps.norm(layer, place.before)(queries)
        reading = circuits.scores.score_reading(frozen, layer, cross=True)
        weights = frozen.view.blocks[layer].cross_query_key
        for head in range(4):
            circuit = circuits.qk(frozen, layer, head, cross=True)
            none = torch.zeros(4 * circuit.A.shape[-1], dtype=torch.float64)
            biases = [none if bias is None else bias for bias in (weights.b_Q, weights.b_K)]
            b_Q, b_K = (bias.unflatten(0, (4, -1))[head] for bias in biases)
            scores = queries @ circuit.A @ circuit.B @ keys.mT + (queries @ circuit.A + b_Q) @ b_K[:, None]
            scores = scores + (b_Q @ circuit.B @ keys.mT)[:, None]
            pattern = reading.capped(reading.scale * scores).softmax(-1)
            assert close(pattern, frozen.cross_pattern(layer)[:, head].to(pattern), atol=tolerance(name))


def test_norms_are_folded_into_what_reads_after_them(model_named):
    """Pegasus has norms before its sublayers, and one after its encoder's last block, which cross-attention reads."""
    frozen = frozen_of(model_named("bridge/pegasus"))
    norm = frozen.view.encoder_norm
    plain, folded = (circuits.ov(frozen, 2, 1, cross=True, fold_norms=fold) for fold in (False, True))
    expected = norm.gain[:, None] * plain.A
    assert close(folded.A, expected - expected.mean(0))
    assert torch.equal(folded.B, plain.B)
    plain, folded = (circuits.qk(frozen.model, 2, 1, cross=True, fold_norms=fold) for fold in (False, True))
    gains = frozen.view.blocks[2].norms["ln2"].gain, norm.gain
    for ours, weights, gain in zip((folded.A, folded.B.T), (plain.A, plain.B.T), gains, strict=True):
        expected = gain[:, None] * weights
        assert close(ours, expected - expected.mean(0))


@pytest.mark.parametrize("name", ["bridge/bart", "bridge/pegasus"])
def test_composition_of_heads_across_the_stacks(name, model_named):
    model = model_named(name)
    into_values = circuits.composition_scores(model, "V", to_cross=True)
    into_keys = circuits.composition_scores(model, "K", to_cross=True)
    into_queries = circuits.composition_scores(model, "Q", to_cross=True)
    from_cross = circuits.composition_scores(model, "V", from_cross=True)
    both = circuits.composition_scores(model, "Q", from_cross=True, to_cross=True)
    inside = circuits.composition_scores(model, "V")

    def pairs(scores):
        assert scores.shape == (4, 4, 4, 4)
        return {(layer, later) for layer in range(4) for later in range(4) if scores[layer, :, later].any()}

    assert pairs(into_values) == pairs(into_keys) == {(0, 2), (0, 3), (1, 2), (1, 3)}
    assert pairs(into_queries) == {(2, 2), (2, 3), (3, 3)}
    assert pairs(from_cross) == pairs(both) == {(2, 3)}
    assert pairs(inside) == {(0, 1), (2, 3)}

    def ratio(A, B):
        return (A @ B).norm() / (A.norm() * B.norm())

    first, cross, decoder = (
        circuit.A @ circuit.B
        for circuit in (
            circuits.ov(model, 1, 3), circuits.ov(model, 2, 0, cross=True), circuits.ov(model, 2, 1)
        )
    )  # fmt: skip
    scores = circuits.qk(model, 3, 2, cross=True)
    scores = scores.A @ scores.B
    assert close(into_values[1, 3, 2, 0], ratio(first, cross))
    assert close(into_keys[1, 3, 3, 2], ratio(first, scores.T))
    assert close(into_queries[2, 1, 3, 2], ratio(decoder, scores))
    assert close(both[2, 0, 3, 2], ratio(cross, scores))
    last = circuits.ov(model, 3, 1)
    assert close(from_cross[2, 0, 3, 1], ratio(cross, last.A @ last.B))
    random = circuits.composition_scores(model, "V", to_cross=True, baseline="random")
    assert close(random[1, 3, 2, 0], ratio(first, cross) - 16**-0.5)
    with pytest.raises(tlens.InvalidInputError, match="kind='V': keys and values of cross-attention"):
        circuits.composition_scores(model, "V", from_cross=True, to_cross=True)
    with pytest.raises(tlens.InvalidInputError, match="no layer has"):
        circuits.composition_scores(model_named("bridge/gpt2"), "V", to_cross=True)


def test_virtual_heads_go_by_cross_attention(model_named):
    model = model_named(BART)
    through = circuits.virtual_head(model, ["L0H1", "L2.cross.H3", "L3H0"])
    parts = [circuits.ov(model, 0, 1), circuits.ov(model, 2, 3, cross=True), circuits.ov(model, 3, 0)]
    expected = torch.eye(16, dtype=torch.float64)
    for part in parts:
        expected = expected @ part.A @ part.B
    assert close(through.A @ through.B, expected)
    assert close(circuits.virtual_head(model, [(0, 1)]).A, parts[0].A)
    for heads, message in (
        (["L2H0", "L3.cross.H1"], "L3.cross.H1 reads the encoder's output"),
        (["L2.cross.H0", "L3.cross.H1"], "only a head of the encoder"),
        (["L1H0", "L2H1"], "only heads of cross-attention lead"),
        (["L1H0", "L0H1"], "later layer"),
        (["MLP0"], "or their names"),
        ("L0H1", "or their names"),
    ):
        with pytest.raises(tlens.InvalidInputError, match=message):
            circuits.virtual_head(model, heads)


# ------------------------------------------------------------------ shown


def test_pictures_and_reports_show_both_stacks(model_named):
    frozen = frozen_of(model_named(BART), 1)
    terms = circuits.logit_attribution(frozen, **TARGET, by="head")
    grid = terms.heads_to_html()
    assert ">cross.H0<" in grid
    assert grid.index(">H3<") < grid.index(">cross.H0<") < grid.index(">cross.H3<") < grid.index(">MLP<")
    assert "L2.cross.H1" in circuits.contribution_graph(frozen, **TARGET, threshold=0).to_html()
    page = report.explain(frozen).body
    assert "The circuit" in page
    assert "alti-logit: Σ scores + bias against its total" in page
    assert "not supported for encoder–decoders" not in page


def test_the_letter_that_is_copied_comes_by_cross_attention():
    """The shipped model writes letters in reverse: the next one is read by the heads of its one cross-attention."""
    model = tlens.load_demo_model("reversal", dtype=torch.float64)
    frozen = tlens.freeze(model, "a b c d e f", decoder_input_ids="f e d")
    terms = circuits.logit_attribution(frozen, "c", minus="h", by="head_token")
    assert float(terms.gap.max()) < 1e-9
    cross = [number for number, term in enumerate(terms.names) if term.startswith("L1.cross.H")]
    by_source = terms.keys[0, 0, cross].sum(0)
    assert frozen.str_tokens[0][int(by_source.argmax())] == "c"
    assert float(by_source[3]) > 0.5 * float(terms.total)
