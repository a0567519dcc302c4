"""The difference of two runs of models with experts, gates and norms inside their sublayers: complete, in float64.

Two independent computations must agree: the map of secants, and the models' own numbers or autograd through them.
"""

import copy
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch
import transformers
from conftest import rest_whole, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl.algebra.secants import offset_terms
from tensorlens_tl.testing import model_names, tiny_input, tiny_model
from tensorlens_tl.testing.models import bridge_of, build_bridge

pytestmark = pytest.mark.numeric

EXPERTS = [
    f"bridge/{name}" for name in ("mixtral", "qwen2-moe", "gpt-oss", "llama4", "deepseek-v3", "granite-moe", "afmoe")
]
INSIDE = ["bridge/deepseek-v3", "bridge/afmoe", "bridge/bitnet", "attention of qwen3-next", "experts of gemma4"]
EXPERTS += [name for name in ("hooked/experts", "hooked/gpt-oss") if name in model_names()]
FAMILIES = [*EXPERTS, "bridge/bitnet", "attention of qwen3-next", "inputs of gemma4"]
QUICK = ("bridge/mixtral", "bridge/bitnet")

CHANGED_WEIGHTS = {
    "bridge/qwen2-moe": {"L1.routing", "L1.shared.W_factor", "L1.shared.W_in", "L1E0.W_gate", "L0.W_in"},
    "bridge/gpt-oss": {"L0.routing", "L0.sinks", "L0E1.b_out", "L1E3.W_in"},
    "bridge/llama4": {"L1.routing", "L1E0.W_in", "L1.shared.W_out"},
    "bridge/deepseek-v3": {"L1.routing", "L0.W_down_K", "L0.latent_norm_Q.w", "L0.v_norm.w", "L0.W_down_V", "L0.W_V"},
    "bridge/afmoe": {"L0.attn.W_gate", "L0.q_norm.w", "L1.routing"},
    "bridge/bitnet": {"L0.W_O", "L1.W_out"},
}
"""Some of what two models differ by, by the names of their constants."""

TOLERANCE = 1e-6
"""All these models' norms compute in float32."""

SEEDS = {"a": 0, "b": 1}


GEMMA4 = {
    "vocab_size": 48, "vocab_size_per_layer_input": 48, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4,
    "global_head_dim": 4, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_kv_shared_layers": 0, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 32, "hidden_size_per_layer_input": 0, "final_logit_softcapping": None,
}  # fmt: skip
MIXTURE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 12}


def built(name, seed=0):
    """A tiny model; of Qwen3-Next one whose layers all attend."""
    torch.manual_seed(seed)
    if name == "attention of qwen3-next":
        return build_bridge("qwen3-next", layer_types=["full_attention", "full_attention"])
    if name == "experts of gemma4":  # beside an MLP, with norms around both; a norm of values
        return gemma4(**MIXTURE)
    if name == "inputs of gemma4":  # of each token at each layer
        return gemma4(hidden_size_per_layer_input=6)
    return tiny_model(name, seed=seed)


def gemma4(**changes):
    config = transformers.Gemma4TextConfig(**{**GEMMA4, **changes})
    config._experts_implementation = "eager"
    return bridge_of(transformers.Gemma4ForCausalLM._from_config(config, attn_implementation="eager"))


_differences = {}


@pytest.fixture
def change(name):
    """Two runs of one model with other tokens; nothing here changes them."""
    if name not in _differences:
        model = built(name)
        a, b = (tlens.freeze(model, tiny_input(model, seed=seed)[0]) for seed in SEEDS.values())
        _differences[name] = tlens.difference(a, b)
    return _differences[name]


def logits_of(run):
    with torch.no_grad():
        return run.model(**run.inputs)


def constants(change, g):
    """What each constant gives to a vector at the end, by name."""
    totals = {}
    for name, terms in offset_terms(change.operator().map, g):
        totals[name] = totals.get(name, 0) + terms.sum(-1)
    return totals


@pytest.mark.parametrize("name", rest_whole(FAMILIES, *QUICK))
def test_every_block_gives_the_difference_of_its_outputs(change):
    assert set(change.errors) == {"blocks.0", "blocks.1", "head"}
    assert max(change.errors.values()) < TOLERANCE


@pytest.mark.parametrize("name", rest_whole(FAMILIES, *QUICK))
def test_scores_and_constants_sum_to_the_difference_of_the_logits(change):
    result = tlens.attribute(change, 7, query="all")
    expected = (logits_of(change.a) - logits_of(change.b))[..., 7]
    size = expected.abs().max()
    assert (result.scores.sum(-1) + result.bias - result.total).abs().max() < TOLERANCE * size
    assert (result.total - expected).abs().max() < TOLERANCE * size
    assert size > 0.1


@pytest.mark.parametrize("name", rest_whole(FAMILIES, *QUICK))
def test_the_other_order_changes_the_sign(change):
    there = tlens.attribute(change, 7)
    back = tlens.attribute(tlens.difference(change.b, change.a), 7)
    assert torch.allclose(back.scores, -there.scores, rtol=1e-9, atol=1e-9)
    assert torch.allclose(back.bias, -there.bias, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", rest_whole(FAMILIES, *QUICK))
def test_equal_runs_differ_by_nothing(change):
    same = tlens.attribute(tlens.difference(change.a, change.a), 7)
    for number in (same.scores, same.bias, same.total):
        assert not bool(number.any())


@pytest.mark.parametrize("name", rest_whole(EXPERTS, *QUICK))
def test_a_changed_routing_is_a_constant_with_a_name(change):
    g = torch.randn(change.output.shape, dtype=torch.float64)
    terms = constants(change, g)
    mixtures = [f"L{layer}.routing" for layer, points in enumerate(change.points.blocks) if points.weight is not None]
    assert list(terms) == mixtures[::-1]
    assert all(bool((term.abs() > 1e-3).all()) for term in terms.values())
    assert torch.allclose(sum(terms.values()), (g * change.operator().bias).sum((-2, -1)))


@pytest.mark.parametrize("name", ["inputs of gemma4"])
def test_an_input_of_each_token_is_a_constant_with_a_name(change):
    g = torch.randn(change.output.shape, dtype=torch.float64)
    terms = constants(change, g)
    assert list(terms) == ["L1.per_layer", "L0.per_layer"]
    assert torch.allclose(sum(terms.values()), (g * change.operator().bias).sum((-2, -1)))


@pytest.mark.parametrize("name", ["bridge/bitnet"])
def test_gates_and_norms_add_no_constant(change):
    assert not bool(torch.as_tensor(change.operator().bias).any())


@contextmanager
def routing_held(model):
    """The router's numbers are constants to autograd; gates of shared experts are not."""

    def detach(module, args, output):
        return tuple(part.detach() for part in output) if isinstance(output, tuple) else output.detach()

    with ExitStack() as stack:
        for module in model.modules():
            for child in ("gate", "router", "W_gate"):
                router = module._modules.get(child)
                if isinstance(getattr(module, "experts", None), torch.nn.Module) and router is not None:
                    stack.callback(router.register_forward_hook(detach).remove)
        yield


@pytest.mark.parametrize("name", rest_whole(FAMILIES, *QUICK))
def test_where_both_runs_are_the_same_it_is_the_jacobian_with_the_routing_held(change):
    run = change.a
    x = run.resid_pre(0).clone().requires_grad_(True)
    seen = {}

    def put(live, *, hook):
        return x

    def see(live, *, hook):
        seen["output"] = live

    hooks = [(run.points.blocks[0].resid_pre, put), (run.points.output, see)]
    with routing_held(run.model):
        run.model.run_with_hooks(**run.inputs, fwd_hooks=hooks)
    g = torch.randn_like(seen["output"])
    (expected,) = torch.autograd.grad(seen["output"], x, g)
    pulled = tlens.difference(run, run).operator().pull(g)
    assert (pulled - expected).norm() < 10 * TOLERANCE * expected.norm()


@pytest.mark.parametrize("name", rest_whole(INSIDE, *QUICK))
def test_heads_add_up(change):
    """Each alone, with its gate, and the scale of a norm over all of them responding."""
    for layer in range(change.n_layers):
        x = torch.randn_like(change.resid_pre(layer))
        whole = change.maps.mixer(layer).push(x)
        alone = [change.maps.mixer(layer, [head]).push(x) for head in range(change.view.blocks[layer].attention.heads)]
        assert torch.allclose(sum(alone), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name",
    ["bridge/qwen2-moe", "bridge/gpt-oss", "bridge/llama4", "bridge/deepseek-v3", "bridge/afmoe", "bridge/bitnet"],
)
def test_two_models_differ_by_their_tokens_their_routing_and_their_weights(name):
    first = built(name)
    second = built(name, seed=1)
    tokens, _ = tiny_input(first)
    change = tlens.difference(tlens.freeze(first, tokens), tlens.freeze(second, tokens))
    result = tlens.attribute(change, 7, minus=3)
    logits = logits_of(change.a) - logits_of(change.b)
    expected = logits[:, -1:, 7] - logits[:, -1:, 3]
    assert torch.allclose(result.scores.sum(-1) + result.bias, expected, rtol=1e-5, atol=1e-5)
    names = set(constants(change, torch.randn_like(change.output)))
    assert CHANGED_WEIGHTS[name] <= names


@pytest.mark.parametrize("by", ["component", "head", "head_matrix", "rank"])
def test_what_all_heads_share_of_latent_attention_is_no_heads(by):
    """The matrices down to the latents act for every head: by head they are the layer's."""
    first = tiny_model("bridge/deepseek-v3")
    second = copy.deepcopy(first)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        for name, weight in second.named_parameters():
            if "kv_a_proj" in name:
                weight += 0.1 * draw(len(weight), 1) * draw(weight.shape[1])
    change = tlens.compare_models(first, second, some_tokens(), 5, by=by)
    assert bool(change.scores.any())
    assert torch.allclose(change.scores.sum(-1) + change.remainder, change.total, rtol=1e-5, atol=1e-6)
    expected = {"L0.attn", "L1.attn"}
    if by == "rank":
        expected = {f"L{layer}.{name} rank 1" for layer in (0, 1) for name in ("W_down_K", "W_down_V")}
    scores = dict(zip(change.names, change.scores.abs().amax((0, 1)).tolist(), strict=True))
    assert {name for name, score in scores.items() if score} - {"L1.routing"} == expected
