"""Whole models with state-space layers, short convolutions and the delta rule in place of attention."""

import pytest
import torch
import transformers
from conftest import close, hooks_left, rest_whole, some_tokens
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import tensorlens_tl as tlens
from tensorlens_tl import circuits, compress, evaluate
from tensorlens_tl.algebra import Attention, CausalConvolution, Chain, Sum
from tensorlens_tl.models import scan_of
from tensorlens_tl.testing import tiny_model

pytestmark = pytest.mark.numeric

MAMBA, DELTA, LFM2, RWKV = "bridge/mamba", "bridge/qwen3-next", "bridge/lfm2", "bridge/rwkv"
FEW = [MAMBA, DELTA, RWKV]
"""One whose channels are heads of their own and all of whose layers are mixers; one of heads, beside attention; one
whose MLP mixes positions as well."""
NO_ATTENTION = r"blocks\.\d of this .* is no softmax attention"


@pytest.fixture
def frozen(request, model_named):
    return tlens.freeze(model_named(request.param), some_tokens(2, 7))


few = pytest.mark.parametrize("frozen", FEW, indirect=True)


def one_hot(positions, width):
    """Every position and channel, a row each."""
    return torch.eye(positions * width, dtype=torch.float64).view(-1, 1, positions, width)


# ------------------------------------------------------------------------------------------ implicit attention


@pytest.mark.parametrize("frozen", [MAMBA], indirect=True)
def test_a_mixer_is_its_explicit_matrix(frozen):
    """α of every channel between the projections, the taps, the ratio, D and the gate: entry by entry."""
    mixer = frozen.maps.mixer(0)
    entry, convolution, ratio, _, gate, output = mixer.stages
    alpha = tlens.implicit_attention(frozen, 0, channels=True)
    D = frozen.model.blocks[0].mixer.original_component.D
    weight, pos = convolution.weight, alpha.shape[-1]
    taps = torch.zeros(pos, pos, len(weight), dtype=torch.float64)
    for back in range(min(weight.shape[1], pos)):
        for i in range(back, pos):
            taps[i, i - back] = weight[:, -1 - back]
    scanned = alpha + torch.diag_embed(D[:, None].expand(-1, pos))
    matrix = torch.einsum(
        "bic,bcij,bjc,jkc,dc,ce->bkdie", gate.factor, scanned, ratio.factor, taps, entry.weight, output.weight
    )
    for prompt in range(2):
        pushed = mixer.push(one_hot(pos, 16).expand(-1, 2, -1, -1))[:, prompt].view(pos, 16, pos, 16)
        assert close(pushed, matrix[prompt])


@pytest.mark.parametrize("frozen", [MAMBA], indirect=True)
def test_a_logit_of_a_state_space_model_is_attributed_completely(frozen):
    logits = frozen.model(**frozen.inputs)[:, -1, 7]
    found = frozen.operator().target(7)
    assert close((found.scores.sum(-1) + found.bias)[:, 0], logits, atol=1e-6)


def what_mixes(mixer):
    """The part of a mixer's map that implicit attention is of."""
    for number, stage in enumerate(mixer.stages):
        if isinstance(stage, Attention) or (isinstance(stage, Sum) and isinstance(stage.terms[0], Chain)):
            return stage
        if isinstance(stage, CausalConvolution) and number == 2:  # between two gates
            return Chain(mixer.stages[1:4])
    return scan_of(mixer)


@pytest.mark.parametrize("frozen", [MAMBA, "bridge/mamba2", DELTA, LFM2, RWKV], indirect=True)
def test_what_is_shown_is_what_the_maps_hold(frozen):
    """A one at each key, in every channel, through the part of the map that mixes positions."""
    shown, mixer = tlens.implicit_attention(frozen, 0), frozen.maps.mixer(0)
    (batch, pos), width = frozen.tokens.shape, len(mixer.stages[-1].weight)
    keys = torch.eye(pos, dtype=torch.float64)[:, None, :, None].expand(-1, batch, -1, width)
    by_channel = what_mixes(mixer).push(keys).permute(1, 3, 2, 0)
    if shown.shape[1] == 1:
        assert close(shown, by_channel.abs().mean(1, keepdim=True))
        assert close(tlens.implicit_attention(frozen, 0, channels=True), by_channel)
        return
    assert close(shown.repeat_interleave(width // shown.shape[1], 1), by_channel)
    with pytest.raises(tlens.InvalidInputError, match="channels of a head take from the same positions"):
        tlens.implicit_attention(frozen, 0, channels=True)


@pytest.mark.parametrize("frozen", [DELTA], indirect=True)
def test_attention_is_shown_as_it_is_and_padding_as_nothing(frozen):
    assert torch.equal(tlens.implicit_attention(frozen, 1), frozen.pattern(1))
    with pytest.raises(tlens.InvalidInputError, match="layer=2"):
        tlens.implicit_attention(frozen, 2)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 4:] = 0
    padded = tlens.freeze(frozen.model, frozen.tokens, attention_mask=mask)
    for layer in range(2):
        shown = tlens.implicit_attention(padded, layer)
        assert not shown[0, :, 4:].any()
        assert not shown[0, :, :, 4:].any()
        assert close(shown[0, :, :4, :4], tlens.implicit_attention(frozen, layer)[0, :, :4, :4], atol=1e-6)


# ------------------------------------------------------------------------------------------ circuits


@pytest.mark.parametrize("by", circuits.effects.BY)
@few
def test_terms_are_complete_and_name_the_mixer(frozen, by):
    if by == "neuron" and frozen.view.blocks[0].parts.mlp_name == "channel_mix":
        pytest.skip("its neurons are not read, see test_rwkv")
    terms = circuits.logit_attribution(frozen, 7, by=by, query=[3, -1])
    assert "L0.mixer" in terms.names
    assert float(terms.gap.max()) < 1e-6
    if by == "head_token":
        assert close(terms.keys.sum(-1), terms.scores)
        moved = terms.keys[..., terms.names.index("L0.mixer"), :]
        assert not moved[:, 0, 4:].any()  # what comes after the query
        assert moved[:, 0, :4].all()


def held_logit(frozen, hooks=()):
    """Logit 7 at the last position in the live model, held by hooks."""
    seen = {}
    end = (frozen.points.unembed_in, lambda live, *, hook: seen.update(x=live))
    frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[*frozen.fwd_hooks(), *hooks, end])
    return seen["x"][:, -1] @ frozen.view.unembedding[0][:, 7]


@few
def test_total_effects_are_what_the_held_model_loses_without_the_mixer(frozen):
    effects = circuits.total_effects(frozen, 7)
    out = frozen.points.blocks[0].attention.out
    silent = [(out, lambda live, *, hook: torch.zeros_like(live))]  # none of these has a bias in its last projection
    assert close(effects["L0.mixer"][:, 0], held_logit(frozen) - held_logit(frozen, silent), atol=1e-6)
    with pytest.raises(tlens.UnsupportedModelError, match=r"live=True\): nothing inside L0\.mixer"):
        circuits.total_effects(frozen, 7, live=True)
    assert hooks_left(frozen.model) == 0


@few
def test_a_graph_has_edges_between_positions_through_a_mixer(frozen):
    frozen = tlens.freeze(frozen.model, frozen.tokens[:1])
    graph = circuits.contribution_graph(frozen, 7, threshold=0)
    nodes, edges = graph.nodes, graph.edges
    incoming = torch.zeros(len(nodes), dtype=torch.float64)
    incoming.index_add_(0, torch.tensor(edges.target.to_numpy()), torch.tensor(edges.weight.to_numpy()))
    ends = torch.tensor(nodes.kind.isin(["head", "mixer", "mlp", "target"]).to_numpy())
    made = incoming + torch.tensor(nodes.bias.to_numpy())
    assert close(made[ends], torch.tensor(nodes.weight.to_numpy())[ends], atol=1e-6)
    assert graph.gap < 1e-6
    mixers = nodes.index[nodes.kind == "mixer"]
    into = edges[edges.target.isin(mixers)]
    steps = nodes.pos[into.target].to_numpy() - nodes.pos[into.source].to_numpy()
    assert steps.min() == 0 < steps.max()
    assert {entry.name for entry in graph.top(4, kind="mixer")} <= {"L0.mixer", "L1.mixer"}
    assert "<svg" in graph._repr_html_()


@few
def test_paths_through_mixers_sum_to_the_logit(frozen):
    found = circuits.paths(frozen, 7, max_order=2)
    assert "L0.mixer" in found.names
    assert float(found.gap.max()) < 1e-6
    largest = circuits.top_paths(tlens.freeze(frozen.model, frozen.tokens[:1]), 7, k=3)
    assert float(largest.gap.max()) < 1e-6


REFUSED = {
    "pattern": lambda frozen: frozen.pattern(0),
    "heads": lambda frozen: frozen.operator(heads={0: [0]}),
    "head_map": lambda frozen: circuits.head_map(frozen, 0, 0),
    "ov": lambda frozen: circuits.ov(frozen, 0, 0),
    "qk": lambda frozen: circuits.qk(frozen, 0, 0),
    "full_ov": lambda frozen: circuits.full_ov(frozen, 0, 0),
    "copying_scores": circuits.copying_scores,
    "composition_scores": lambda frozen: circuits.composition_scores(frozen, "K"),
    "qk_attribution": lambda frozen: circuits.qk_attribution(frozen, 0, 0),
    "spectral_norm_bound": circuits.spectral_norm_bound,
    "compress": lambda frozen: compress.plan(frozen.model),
}


@few
def test_what_needs_patterns_or_heads_is_refused_by_the_name_of_the_block(frozen):
    frozen = tlens.freeze(frozen.model, frozen.tokens[:1])
    for ask in REFUSED.values():
        with pytest.raises(tlens.UnsupportedModelError, match=NO_ATTENTION):
            ask(frozen)


# ------------------------------------------------------------------------------------------ evaluations


@few
def test_perturbation_and_relation_decoding_run(frozen):
    model, tokens = frozen.model, frozen.tokens
    result = evaluate.perturbation(model, tokens, ["tensorlens in_out", "random"], fractions=(0, 0.5))
    assert torch.isfinite(torch.as_tensor(result.values)).all()
    decoder = evaluate.RelationDecoder.fit(model, tokens, m=1)
    assert close(decoder.states(decoder.frozen.tokens), decoder.frozen.output[:, -1], atol=1e-6)


# ------------------------------------------------------------------------------------------ what is refused


def test_padding_that_lets_a_bias_through_is_refused(model_named):
    model = tiny_model(MAMBA)
    inner = model.blocks[0].mixer.original_component
    inner.in_proj.bias = torch.nn.Parameter(torch.ones(len(inner.in_proj.weight), dtype=torch.float64))
    tokens, mask = some_tokens(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*the first projection of MambaMixer has a bias"):
        tlens.freeze(model, tokens, attention_mask=mask)
    assert max(tlens.freeze(model, tokens, attention_mask=mask.flip(1)).errors.values()) < 1e-6


SMALL = {"vocab_size": 48, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
NOT_READ = {
    "RecurrentGemma": (SMALL | HEADS | {"lru_width": 16}, r"blocks\.0 .*DecoderLayer. shows nothing inside"),
}


@pytest.mark.parametrize("family", NOT_READ)
def test_mixers_that_are_not_read_are_named(family):
    options, message = NOT_READ[family]
    kind, config = f"{family}ForCausalLM", getattr(transformers, f"{family}Config")(**options)
    model = build_bridge_from_module(getattr(transformers, kind)(config).double().eval(), kind, hf_config=config)
    with pytest.raises(tlens.UnsupportedModelError, match=message):
        tlens.freeze(model, some_tokens())


def test_a_prompt_of_one_token(model_named):
    """A bias in front of a convolution is then a bias of that token, not of an unknown number of them."""
    frozen = tlens.freeze(model_named(LFM2), [[5]])
    op = frozen.operator()
    assert close(op.push(op.x) + op.map.bias, op(op.x))
    assert tlens.attribute(frozen, method="decompx").scores.shape == (1, 1, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_wide_stream_beside_narrow_weights_is_refused(dtype):
    with pytest.raises(tlens.UnsupportedModelError, match="residual_in_fp32"):
        tlens.freeze(tiny_model(MAMBA).to(dtype), some_tokens())


# ------------------------------------------------------------------------------------------ two runs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", rest_whole([LFM2, "bridge/jamba", DELTA], LFM2))
def test_differences_in_narrow_dtypes(name, dtype):
    """Beside mixers these models have attention with norms that compute in float32, also in bfloat16."""

    def result(model):
        a, b = (tlens.freeze(model, tokens) for tokens in (some_tokens(), some_tokens().flip(0)))
        return tlens.attribute(tlens.difference(a, b), 5)

    exact = result(tiny_model(name)).scores
    narrow = result(tiny_model(name).to(dtype))
    allowed = {torch.float32: 1e-5, torch.bfloat16: 0.2}[dtype]
    assert (narrow.scores - exact).norm() <= allowed * exact.norm()
    assert float(narrow.gap.max()) <= allowed
