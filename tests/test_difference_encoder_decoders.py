"""The difference of two runs of encoder–decoders: complete over both sides, with the encoder's output responding.

The independent computations are the live models' logits, what their heads of cross-attention give, and autograd.
"""

import copy
import dataclasses

import pytest
import torch
import transformers
from conftest import close, hooks_left, rest_whole, tolerance

import tensorlens_tl as tlens
from tensorlens_tl import circuits, demo
from tensorlens_tl.algebra import Diagonal, Identity
from tensorlens_tl.algebra.secants import offset_terms
from tensorlens_tl.results import HEAD_ROUTES
from tensorlens_tl.testing import encoder_decoder_names, tiny_input, tiny_model
from tensorlens_tl.testing.models import BRIDGE, bridge_of, build_bridge

pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("error::tensorlens_tl.GapWarning")]

BART = "bridge/bart"
PEGASUS = "bridge/pegasus"
T5 = "bridge/t5"
HERE = encoder_decoder_names()
OTHERS = {
    "mbart": ("MBartConfig", "MBartForConditionalGeneration"),
    "m2m100": ("M2M100Config", "M2M100ForConditionalGeneration"),
    "blenderbot": ("BlenderbotConfig", "BlenderbotForConditionalGeneration"),
}
"""Families without a tiny model in `testing`, of BART's configuration."""

NAMES = [*HERE, *OTHERS]
QUICK = (BART, T5)
FAMILIES = pytest.mark.parametrize("name", rest_whole(NAMES, *QUICK))
TESTED = pytest.mark.parametrize("name", rest_whole(HERE, *QUICK))
RELATIVE = ("bridge/t5", "bridge/t5-gated", "encoder-decoder/tied", "encoder-decoder/gated")
"""Those with relative positions, and no hook point at token embeddings: they are what enters the first block."""

NO_POSITIONS = ("bridge/t5", "bridge/t5-gated", "bridge/t5gemma")
"""Those whose stream is embeddings and nothing besides, and is normed by its root mean square: they have no biases."""

_models = {}
_differences = {}


def built(name, seed=0):
    if (name, seed) not in _models:
        if name in OTHERS:
            config, architecture = OTHERS[name]
            torch.manual_seed(seed)
            _, options = BRIDGE["bart"]
            module = getattr(transformers, architecture)._from_config(
                getattr(transformers, config)(**options), attn_implementation="eager"
            )
            _models[name, seed] = bridge_of(module)
        else:
            _models[name, seed] = tiny_model(name, seed=seed)
    return _models[name, seed]


def run_of(model, seed=0):
    tokens, options = tiny_input(model, seed=seed)
    return tlens.freeze(model, tokens, **options)


@pytest.fixture
def change(name):
    """Two runs of one model with other tokens on both sides; nothing here changes them."""
    if name not in _differences:
        model = built(name)
        _differences[name] = tlens.difference(run_of(model, 0), run_of(model, 1))
    yield _differences[name]
    assert hooks_left(built(name)) == 0


def uncapped(frozen, logits):
    cap = frozen.view.soft_cap
    return logits if cap is None else cap * torch.atanh(logits / cap)


def logits(frozen):
    """The live model's own logits of a run, before any soft cap."""
    with torch.no_grad():
        return uncapped(frozen, frozen.model(**frozen.inputs))


def summed(result):
    return result.scores.sum(-1) + result.bias


def near(ours, expected, name, size=1.0):
    """Equal to a share of a number's size."""
    return close(ours / size, expected / size, tolerance(name))


# ------------------------------------------------------------------ completeness


@FAMILIES
def test_every_block_gives_the_difference_of_its_outputs(name, change):
    assert list(change.errors)[: change.n_layers] == [f"blocks.{layer}" for layer in range(change.n_layers)]
    assert max(change.errors.values()) < tolerance(name)
    for layer in range(change.n_layers):
        ours = change.maps.stage(layer)(change.resid_pre(layer))
        assert near(ours, change.resid_pre(layer + 1), name, change.a.resid_pre(layer + 1).norm(dim=-1).max())


@FAMILIES
def test_scores_of_both_sides_sum_to_the_difference_of_the_live_logits(name, change):
    encoder, decoder = change.sides
    live = logits(change.a) - logits(change.b)
    size = logits(change.a).abs().max()
    result = tlens.attribute(change, 7, minus=11, query=slice(encoder, None))
    assert result.scores.shape == (2, decoder, encoder + decoder)
    assert near(summed(result), live[..., 7] - live[..., 11], name, size)
    assert near(result.total, live[..., 7] - live[..., 11], name, size)
    differing = change.a.tokens != change.b.tokens
    assert torch.equal(result.scores[:, -1] != 0, differing)
    assert int(differing.sum()) > 16
    assert result.sides == change.a.prompt.sides
    last = tlens.attribute(change, 7)
    assert near(summed(last)[:, 0], live[:, -1, 7], name, size)
    # a token of the decoder is scored by no earlier query of it
    assert not result.scores[..., encoder:].triu(1).any()


@FAMILIES
def test_without_a_target_the_sum_is_the_length_of_the_change_of_the_output(name, change):
    result = tlens.attribute(change, query="all")
    lengths = (change.a.output - change.b.output).norm(dim=-1)
    assert near(summed(result), lengths, name, lengths.max())


@FAMILIES
def test_heads_of_cross_attention_give_what_the_live_ones_do(name, change):
    """Through values, keys and queries: what their hook point shows in either run, and nothing at the encoder."""
    model = built(name)
    start = change.sides[0]
    for layer in range(change.view.encoder_layers, change.n_layers):
        point = change.points.blocks[layer].cross.z
        shown = [model.run_with_cache(**frozen.inputs)[1][point].flatten(2) for frozen in (change.a, change.b)]
        entry = change.maps.composed(layer, change.layouts[layer], before_crossing(change, layer))
        ours = change.maps.within(layer).read.push(entry(change.resid_pre(layer)))
        assert near(ours[:, start:], shown[0] - shown[1], name, shown[0].norm(dim=-1).max())
        assert not ours[:, :start].any()


def before_crossing(change, layer):
    """A decoder block up to its self-attention: what comes after it gives nothing, and its norms do nothing."""
    parts = change.maps.parts(layer)
    place = change.layouts[layer]
    after = {norm: Identity() for norm in (place.cross.outer, place.cross.after, place.mlp.outer) if norm is not None}
    nothing = Diagonal(torch.zeros(1, 1, 1, dtype=torch.float64))
    within = dataclasses.replace(parts.within, read=nothing, out=nothing)
    return parts._replace(mlp=None, norms={**parts.norms, **after}, within=within)


@FAMILIES
def test_where_the_source_alone_differs_the_decoders_own_tokens_give_nothing(name, change):
    """And where one token differs, it has all of it: the encoder's output responds, and what reads it."""
    model = built(name)
    tokens, options = tiny_input(model)
    other = tokens.clone()
    other[:, 2] = torch.where(tokens[:, 2] == 9, 10, 9)
    a = tlens.freeze(model, tokens, **options)
    result = tlens.attribute(tlens.difference(a, tlens.freeze(model, other, **options)), 7)
    live = (logits(a) - logits(tlens.freeze(model, other, **options)))[:, -1, 7]
    assert (result.scores[:, 0].abs() > 0).tolist() == [[place == 2 for place in range(10)]] * 2
    assert near(result.scores[:, 0, 2], live, name, logits(a).abs().max())


def test_heads_add_up():
    """Those of self-attention on either side; the rest of the block stays."""
    change = tlens.difference(run_of(built(BART), 0), run_of(built(BART), 1))
    for layer in (0, change.n_layers - 1):
        start, stop = change.a.capture.side(layer)
        x = torch.randn_like(change.resid_pre(layer)[:, start:stop])
        alone = [change.maps.mixer(layer, [head]).push(x) for head in range(4)]
        assert close(sum(alone), change.maps.mixer(layer).push(x))
    without = change.operator(heads={2: [1, 2]})
    assert not close(without(without.x), change.output, 1e-3)


@pytest.mark.parametrize("options", [{"store": "cpu"}, {"verify": False}], ids=str)
def test_passes_of_every_kind(options):
    model = built(BART)
    expected = tlens.attribute(tlens.difference(run_of(model, 0), run_of(model, 1)), 7).scores
    runs = []
    for seed in (0, 1):
        tokens, more = tiny_input(model, seed=seed)
        runs.append(tlens.freeze(model, tokens, **more, **options))
    assert close(tlens.attribute(tlens.difference(*runs), 7).scores, expected)


# ------------------------------------------------------------------ signs, nothing, and the derivative


@FAMILIES
def test_swapped_runs_have_opposite_scores_and_equal_runs_none(name, change):
    there = tlens.attribute(change, 7)
    back = tlens.attribute(tlens.difference(change.b, change.a), 7)
    assert close(back.scores, -there.scores, 1e-12)
    assert close(back.total, -there.total, 1e-12)
    for target in (7, None):
        same = tlens.attribute(tlens.difference(change.a, run_of(built(name))), target)
        for number in (same.scores, same.bias, same.total):
            assert not bool(number.any())


@FAMILIES
def test_of_one_run_it_is_the_live_models_gradient(name, change):
    """Of what enters both sides: autograd differentiates the model between its hooks, cross-attention included."""
    frozen = change.a
    leaf = frozen.resid_pre(0).clone().requires_grad_(True)
    parts = leaf.split(list(frozen.sides), dim=1)
    put = [
        (at, lambda live, hook, part=part: part) for at, part in zip(frozen.capture.stream_names(0), parts, strict=True)
    ]
    live = uncapped(frozen, frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=put))
    (expected,) = torch.autograd.grad(live[:, -1, 7].sum(), leaf)
    pulled = tlens.difference(frozen, frozen).operator().gradient(7)[:, 0]
    assert bool((expected[:, : frozen.sides[0]].abs().amax((1, 2)) > 0).all())
    assert near(pulled, expected, name, expected.abs().max())


@pytest.mark.parametrize("size", [1e-12, 1e-8, 1e-4, 1e-2])
def test_close_runs_are_complete_and_converge_to_the_gradient(size):
    frozen = run_of(built(PEGASUS))
    generator = torch.Generator().manual_seed(3)
    moves = {at: size * torch.randn(2, 1, 16, generator=generator, dtype=torch.float64) for at in embeddings(frozen)}
    hooks = [(at, lambda live, hook, move=move: live + move) for at, move in moves.items()]
    moved = tlens.passes.freeze_changed(frozen, frozen.inputs, hooks)
    result = tlens.attribute(tlens.difference(frozen, moved), 7)
    assert float((summed(result) - result.total).abs().max()) < 1e-9 * float(result.total.abs().max()) + 1e-14
    near_run = tlens.difference(frozen, moved).operator().gradient(7)
    gradient = tlens.difference(frozen, frozen).operator().gradient(7)
    assert float((near_run - gradient).norm() / gradient.norm()) < 20 * size + 1e-9


def embeddings(frozen):
    return [
        at
        for at in ("embed.hook_out", "encoder_embed.hook_out", "decoder_embed.hook_out")
        if at in frozen.model.hook_dict
    ]


# ------------------------------------------------------------------ padding


@TESTED
def test_padded_batches_are_their_prompts(name):
    """Both sides padded on the right."""
    model = built(name)
    lengths = ((6, 2), (4, 4))
    batches = []
    for seed in (0, 1):
        tokens, options = tiny_input(model, seed=seed)
        rows = zip(tokens.tolist(), options["decoder_input_ids"].tolist(), lengths, strict=True)
        batches.append([(source[:first], written[:second]) for source, written, (first, second) in rows])

    def difference_of(numbers):
        runs = []
        for rows in batches:
            sources, written = zip(*(rows[number] for number in numbers), strict=True)
            runs.append(tlens.freeze(model, list(sources), decoder_input_ids=list(written)))
        return tlens.difference(*runs)

    together = difference_of([0, 1])
    result = tlens.attribute(together, 7)
    assert not bool(together.mask.all())
    for number in (0, 1):
        alone = tlens.attribute(difference_of([number]), 7)
        real = together.mask[number]
        assert int(real.sum()) == sum(lengths[number])
        assert near(result.scores[number, 0, real], alone.scores[0, 0], name, alone.scores.abs().max())
        assert near(result.total[number], alone.total[0], name, alone.scores.abs().max())
        assert not result.scores[number, 0, ~real].any()


def test_one_token_on_either_side():
    model = built(BART)
    runs = [tlens.freeze(model, [[token]], decoder_input_ids=[[token + 1]]) for token in (5, 9)]
    result = tlens.attribute(tlens.difference(*runs), 7)
    assert close(summed(result)[:, 0], (logits(runs[0]) - logits(runs[1]))[:, -1, 7])


# ------------------------------------------------------------------ two models


@TESTED
def test_two_models_differ_by_their_tokens_and_their_weights(name):
    runs = [run_of(built(name, seed)) for seed in (0, 1)]
    change = tlens.difference(*runs)
    result = tlens.attribute(change, 7, minus=11)
    live = logits(runs[0]) - logits(runs[1])
    assert near(summed(result)[:, 0], live[:, -1, 7] - live[:, -1, 11], name, logits(runs[0]).abs().max())
    g = torch.randn_like(change.output)
    terms = offset_terms(change.operator().map, g)
    names = {term for term, _ in terms}
    assert names >= {f"L2.cross.W_{letter}" for letter in "QKVO"} | {f"L0.W_{letter}" for letter in "QKVO"}
    of_positions = {term for term in names if term.endswith("relative_bias")}
    assert of_positions == ({f"L{layer}.relative_bias" for layer in range(4)} if name in RELATIVE else set())
    total = sum(value.sum(-1) for _, value in terms)
    assert torch.allclose(total, (g * change.operator().bias).sum((-2, -1)), rtol=1e-9, atol=1e-9)


BY = ("matrix", "layer", "component", "head", "head_matrix", "rank")


@TESTED
def test_ways_to_group_the_terms_of_two_models_agree(name):
    base, tuned = built(name), built(name, 1)
    tokens, options = tiny_input(base)
    ways = {by: tlens.compare_models(base, tuned, tokens, 7, 11, by=by, **options) for by in BY}
    live = [logits(tlens.freeze(model, tokens, **options))[:, -1] for model in (tuned, base)]
    expected = (live[0] - live[1])[:, 7] - (live[0] - live[1])[:, 11]
    for way in ways.values():
        assert near(way.scores.sum(-1)[:, 0] + way.remainder[:, 0], expected, name, live[0].abs().max())
    matrix, component, head, by_head = (ways[by] for by in ("matrix", "component", "head", "head_matrix"))
    of_crossing = [term for term in matrix.names if term.startswith("L2.cross.")]
    assert close(sum(matrix[term] for term in of_crossing), component["L2.cross"])
    by_heads = [term for term in head.names if term.startswith("L2.cross.")]
    assert {f"L2.cross.H{number}" for number in range(4)} <= set(by_heads)
    assert close(sum(head[term] for term in by_heads), component["L2.cross"])
    for weight in ("cross.W_Q", "cross.W_K", "cross.W_V", "cross.W_O"):
        own = [term for term in by_head.names if term.startswith("L2.cross.H") and term.endswith(weight[6:])]
        assert close(sum(by_head[term] for term in own), matrix[f"L2.{weight}"])
    for layer in (0, 2):
        own = [term for term in head.names if term.startswith(f"L{layer}H") or term == f"L{layer}.b_O"]
        assert close(sum(head[term] for term in own), component[f"L{layer}.attn"])
    back = tlens.compare_models(tuned, base, tokens, 7, 11, **options)
    assert close(back.scores, -matrix.scores, tolerance(name))


@pytest.mark.parametrize("part", ["k", "v"])
def test_a_weight_of_cross_attention_that_is_changed_alone(part):
    """It is the only term, at the encoder's positions, and all of the change of the live models' logits."""
    base = built(BART)
    tuned = copy.deepcopy(base)
    attention = tuned.original_model.model.decoder.layers[1].encoder_attn
    module = getattr(attention, f"{part}_proj")
    module = getattr(module, "original_component", module)
    with torch.no_grad():
        module.weight += 0.3 * torch.randn_like(module.weight)
    tokens, options = tiny_input(base)
    terms = tlens.compare_models(base, tuned, tokens, 7, positions=True, **options)
    changed = [term for term in terms.names if bool(terms[term].any())]
    assert changed == [f"L3.cross.W_{part.upper()}"]
    live = [logits(tlens.freeze(model, tokens, **options))[:, -1, 7] for model in (tuned, base)]
    assert close(terms[changed[0]][:, 0], live[0] - live[1])
    at = terms.keys[:, 0, terms.names.index(changed[0])]
    assert bool((at[:, :6] != 0).all())
    assert not at[:, 6:].any()


# ------------------------------------------------------------------ baselines


def baselines(frozen):
    """Every kind, and what stands in the place of each token's embedding on both sides: ids, or vectors."""
    source = torch.arange(20, 26)
    both = torch.arange(20, 30)
    each = torch.arange(20, 40).view(2, 10)
    vectors = torch.randn(10, 16, dtype=torch.float64)
    written = frozen.tokens[:, 6:]
    return {
        "token id": (5, torch.full((2, 10), 5)),
        "source": (source, torch.cat([source.expand(2, -1), written], dim=1)),
        "list of the source": (source.tolist(), torch.cat([source.expand(2, -1), written], dim=1)),
        "sources": (each[:, :6], torch.cat([each[:, :6], written], dim=1)),
        "both sides": (both, both.expand(2, -1)),
        "both sides of each prompt": (each, each),
        "embedding": (vectors[0], vectors[0].expand(2, 10, 16)),
        "embeddings": (vectors, vectors.expand(2, 10, 16)),
    }


KINDS = (
    "token id", "source", "list of the source", "sources", "both sides", "both sides of each prompt", "embedding",
    "embeddings",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@TESTED
@pytest.mark.few(3)
def test_a_baseline_is_what_the_live_model_runs_on(name, kind):
    frozen = run_of(built(name))
    baseline, stands = baselines(frozen)[kind]
    result = tlens.attribute(frozen, 7, method="difference", baseline=baseline, query=[-1, -3])
    inputs = dict(frozen.inputs)
    hooks = []
    if stands.is_floating_point():
        points = embeddings(frozen)
        if name in RELATIVE:
            points = frozen.capture.stream_names(0)
        parts = stands.split(list(frozen.sides), dim=1)
        hooks = [(at, lambda x, hook, part=part: part.to(x)) for at, part in zip(points, parts, strict=True)]
    else:
        inputs |= {"input": stands[:, :6], frozen.view.decoder_argument: stands[:, 6:]}
    with torch.no_grad():
        live = uncapped(frozen, frozen.model.run_with_hooks(**inputs, fwd_hooks=hooks))
    expected = (logits(frozen) - live)[..., 7][:, [-1, -3]]
    assert near(summed(result), expected, name, logits(frozen).abs().max())
    assert result.additive
    unchanged = frozen.tokens == stands if not stands.is_floating_point() else torch.zeros(2, 10, dtype=torch.bool)
    assert not result.scores[:, 0][unchanged].any()
    assert hooks_left(frozen.model) == 0


@TESTED
def test_the_mean_embedding_is_the_default_without_a_mask_token(name):
    """On either side the mean of its vocabulary, as it reads it."""
    frozen = run_of(built(name))
    default = tlens.attribute(frozen, 7, method="difference")
    ids = torch.arange(48).view(4, 12)
    points = embeddings(frozen)
    if name in RELATIVE:
        points = frozen.capture.stream_names(0)
    _, cache = frozen.model.run_with_cache(ids, **{frozen.view.decoder_argument: ids})
    means = [cache[at].flatten(0, 1).mean(0) for at in points]
    vectors = torch.cat([means[0].expand(6, -1), means[1].expand(4, -1)])
    given = tlens.attribute(frozen, 7, method="difference", baseline=vectors)
    assert near(default.scores, given.scores, name, given.scores.abs().max())


@pytest.mark.parametrize("baseline", ["mean", 5, [20, 21, 22, 23, 24, 25]], ids=str)
@TESTED
def test_a_padded_batch_against_a_baseline_is_its_prompts(name, baseline):
    model = built(name)
    rows = [([3, 9, 14, 15, 9, 26], [1, 7]), ([4, 8, 30, 31], [1, 12, 13])]
    together = tlens.freeze(model, [row[0] for row in rows], decoder_input_ids=[row[1] for row in rows])
    scores = tlens.attribute(together, 7, method="difference", baseline=baseline).scores
    for number, (source, written) in enumerate(rows):
        one = baseline[: len(source)] if isinstance(baseline, list) else baseline
        alone = tlens.freeze(model, [source], decoder_input_ids=[written])
        expected = tlens.attribute(alone, 7, method="difference", baseline=one).scores[0, 0]
        assert near(scores[number, 0, together.mask[number]], expected, name, expected.abs().max())


def test_a_zero_embedding_leaves_positions():
    for name in (BART, PEGASUS):
        frozen = run_of(built(name))
        by_name = tlens.attribute(frozen, 7, method="difference", baseline="zero")
        by_vector = tlens.attribute(frozen, 7, method="difference", baseline=torch.zeros(16))
        assert torch.equal(by_name.scores, by_vector.scores)
        assert float(by_name.gap.max()) < 1e-9


@pytest.mark.parametrize("name", [name for name in HERE if name in NO_POSITIONS])
def test_where_nothing_is_left_of_a_stream_zero_is_refused_by_name(name):
    with pytest.raises(tlens.UnsupportedModelError, match=r"stream of a token is zero.*another baseline"):
        tlens.attribute(run_of(built(name)), 7, method="difference", baseline="zero")


@pytest.mark.parametrize(
    ("baseline", "says"),
    [
        (torch.arange(3, 8), r"1 × 5 tokens.*one prompt of 6 \(the source\) or 10 \(both sides\)"),
        (torch.arange(3, 21).view(3, 6), "3 × 6 tokens"),
        (torch.zeros(6, 16), r"embeddings \(6, 16\)"),
        (torch.zeros(3), r"embeddings \(3,\)"),
        (480, "outside the vocabulary"),
        (torch.tensor([3, 4, 5, 6, 7, 480]), "outside the vocabulary"),
        ("a text", "no tokenizer"),
        ("mask", "no mask token"),
        (torch.zeros(2, 0, dtype=torch.long), "not empty"),
    ],
    ids=str,
)
def test_what_is_no_baseline_is_refused(baseline, says):
    with pytest.raises(tlens.InvalidInputError, match=says):
        tlens.attribute(run_of(built(BART)), 7, method="difference", baseline=baseline)
    assert hooks_left(built(BART)) == 0


def test_a_token_of_one_vocabulary_alone_is_no_baseline():
    sizes = {"decoder_vocab_size": 60, "share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}
    model = build_bridge("marian", **sizes)
    frozen = tlens.freeze(model, [[3, 4, 5]], decoder_input_ids=[[1, 55]])
    with pytest.raises(tlens.InvalidInputError, match="token id 55 must be in the vocabularies of both sides"):
        tlens.attribute(frozen, 57, method="difference", baseline=55)
    for baseline in ("mean", 7, [3, 9, 8], [3, 4, 5, 1, 58]):
        assert float(tlens.attribute(frozen, 57, method="difference", baseline=baseline).gap.max()) < 1e-9


# ------------------------------------------------------------------ what is refused


def test_sides_that_do_not_match_are_refused():
    model = built(BART)
    a = tlens.freeze(model, [[3, 4, 5]], decoder_input_ids=[[6, 7]])
    b = tlens.freeze(model, [[3, 4]], decoder_input_ids=[[5, 6, 7]])
    with pytest.raises(tlens.InvalidInputError, match="do not match position by position"):
        tlens.difference(a, b)


def test_a_pattern_of_cross_attention_that_its_scores_do_not_give_is_refused():
    """In either run."""
    plain = run_of(built(BART))
    point = plain.points.blocks[2].cross.pattern
    held = plain.capture.activations
    flipped = dataclasses.replace(plain.capture, activations={**held, point: held[point].flip(-1)})
    other = plain.with_capture(flipped)
    with pytest.raises(tlens.UnsupportedModelError, match=r"decoder_blocks\.0\.cross_attn.*cannot be read"):
        tlens.difference(other, plain)
    with pytest.raises(tlens.UnsupportedModelError, match=r"decoder_blocks\.0.*another in the second"):
        tlens.difference(plain, other)


def test_a_soft_cap_inside_attention_is_read():
    """T5Gemma's, so low that the scores saturate."""
    _, options = BRIDGE["t5gemma"]
    stacks = {side: {**options[side], "attn_logit_softcapping": 0.5} for side in ("encoder", "decoder")}
    model = build_bridge("t5gemma", **stacks)
    runs = [run_of(model, seed) for seed in (0, 1)]
    result = tlens.attribute(tlens.difference(*runs), 7)
    size = logits(runs[0]).abs().max()
    assert close(summed(result)[:, 0] / size, (logits(runs[0]) - logits(runs[1]))[:, -1, 7] / size, 1e-6)


# ------------------------------------------------------------------ routes


@pytest.mark.parametrize("name", [name for name in HERE if name == PEGASUS or name in RELATIVE])
def test_routes_of_cross_attention_are_what_its_values_and_patterns_change(name, change):
    """Of the last layer: Δz = P̄·Δv + ΔP·v̄ from the live models, along what reaches its end from a direction."""
    last, start = change.n_layers - 1, change.sides[0]
    direction = torch.randn(16, dtype=torch.float64)
    seed = torch.zeros_like(change.resid_pre(0)[:, start:])
    seed[:, -1] = direction
    g = change.maps.final_norm().pull(seed)[:, -1]
    patterns, values = [], []
    for run in (change.a, change.b):
        cache = run.model.run_with_cache(**run.inputs)[1]
        weights = run.view.blocks[last].require_cross_attention()
        encoded = cache[run.points.encoder_output]
        read = encoded @ weights.W_V + (0.0 if weights.b_V is None else weights.b_V)
        patterns.append(cache[run.points.blocks[last].cross.pattern][:, :, -1])
        values.append(read.unflatten(-1, (weights.heads, -1)))
    out = torch.einsum("hdm,bm->bhd", weights.W_O.unflatten(0, (weights.heads, -1)), g)
    by_values = torch.einsum("bhk,bkhd,bhd->bh", (patterns[0] + patterns[1]) / 2, values[0] - values[1], out)
    by_patterns = torch.einsum("bhk,bkhd,bhd->bh", patterns[0] - patterns[1], (values[0] + values[1]) / 2, out)
    by = circuits.routes(change, direction=direction)
    heads = {route: by.heads[:, 0, last, :, column] for column, route in enumerate(HEAD_ROUTES)}
    assert near(heads["cross values"], by_values, name, by_values.abs().max())
    moved = heads["cross queries"] + heads["cross queries, scale"] + heads["cross keys"]
    assert near(moved, by_patterns, name, by_patterns.abs().max())
    assert not by.heads[:, :, : change.view.encoder_layers, :, HEAD_ROUTES.index("cross values")].any()
    assert "L3.cross.H1 keys" in by.at(last).names
    assert float(by.at(last).gap.max()) < tolerance(name)


@TESTED
def test_routes_of_what_does_not_change_are_zero(name, change):
    """Where the source alone differs: nothing by the decoder's own stream before its first cross-attention."""
    model = built(name)
    tokens, options = tiny_input(model)
    runs = [tlens.freeze(model, ids, **options) for ids in (tokens, tokens.flip(0))]
    by = circuits.routes(tlens.difference(*runs), 7, minus=11)
    first = by.layers.index("L2")
    for route in ("values", "queries", "keys", "cross queries", "cross queries, scale"):
        assert not by[route][..., first].any()
    assert by["cross values"][..., first].any()
    assert by["cross keys"][..., first].any()
    assert float(by.gap.max()) < tolerance(name)
    encoder = circuits.routes(tlens.difference(*runs), direction=torch.ones(16, dtype=torch.float64), query=1)
    assert not encoder.scores[:, :, first:-1, 1:].any()  # an encoder's token goes past the decoder
    assert float(encoder.gap.max()) < tolerance(name)


# ------------------------------------------------------------------ a known answer


def test_a_letter_that_is_replaced_has_all_of_the_change():
    """The shipped model writes a word backwards: another letter at place i changes what it writes at 5 − i, by that."""
    model = tlens.load_demo_model("reversal", dtype=torch.float64)
    words = demo.reversal_words()[::101]
    others = words.clone()
    letters = words.unique()
    others[:, 2] = letters[(torch.searchsorted(letters, words[:, 2].contiguous()) + 1) % len(letters)]
    start = torch.ones_like(words[:, :1])
    written = torch.cat([start, words.flip(1)[:, :3]], dim=1)
    runs = [
        tlens.freeze(model, torch.cat([start, letters], dim=1), decoder_input_ids=written)
        for letters in (words, others)
    ]
    answers = [letters[:, 2].tolist() for letters in (words, others)]
    result = tlens.attribute(tlens.difference(*runs), answers[0], minus=answers[1])
    live = logits(runs[0])[:, -1] - logits(runs[1])[:, -1]
    rows = torch.arange(len(words))
    assert close(result.scores[:, 0, 3], live[rows, words[:, 2]] - live[rows, others[:, 2]])
    assert not result.scores[:, 0].index_fill(1, torch.tensor(3), 0.0).any()
    assert bool((result.scores[:, 0, 3] > 0).all())
    against = tlens.attribute(runs[0], answers[0], method="difference", baseline="mean")
    assert float((against.scores[:, 0].argmax(-1) == 3).double().mean()) > 0.9  # whatever stands for the others
