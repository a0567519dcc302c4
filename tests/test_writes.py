"""What is small beside the stream is proved by itself: heads, neurons and writes, in half precision too."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.testing import model_names, tiny_model

pytestmark = pytest.mark.numeric

HALVES = [torch.bfloat16, torch.float16]
TEXT = "If the file is not found, a FileNotFoundError is"


@pytest.fixture(scope="module")
def halves():
    return {dtype: tlens.load_demo_model(dtype=dtype) for dtype in HALVES}


@contextmanager
def refused(model, point, hook, match):
    """Freezing under a hook is refused, in words that match."""
    with model.hooks([(point, hook)]), pytest.raises(tlens.UnsupportedModelError, match=match):
        yield


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_head_that_a_hook_zeroes(halves, dtype):
    """Beside the stream of a trained model a head is lost in half precision."""
    model = halves[dtype]

    def zeroed(z, *, hook):
        z = z.clone()
        z[:, :, head] = 0
        return z

    for layer in (0, model.cfg.n_layers - 1):
        for head in range(model.cfg.n_heads):
            with refused(model, f"blocks.{layer}.attn.hook_z", zeroed, rf"{layer}\.attn\.hook_z .*head {head}"):
                tlens.freeze(model, TEXT)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("point", ["hook_pre", "hook_post"])
def test_four_neurons_that_a_hook_zeroes(halves, dtype, point):
    model = halves[dtype]
    drawn = torch.Generator().manual_seed(0)
    for layer in range(model.cfg.n_layers):
        chosen = torch.randperm(model.cfg.d_mlp, generator=drawn)[:4]

        def zeroed(hidden, *, hook, chosen=chosen):
            return hidden.index_fill(-1, chosen, 0)

        with refused(model, f"blocks.{layer}.mlp.{point}", zeroed, rf"{layer}\.mlp\.hook_p.*neuron \d+"):
            tlens.freeze(model, TEXT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("point", ["attn.hook_z", "hook_attn_out", "mlp.hook_post", "hook_mlp_out"])
@pytest.mark.few(6)
def test_beside_one_large_channel(dtype, point):
    """A channel ten thousand times larger than the others leaves every write provable."""
    model = tiny_model("bridge/gpt2").to(dtype)
    with torch.no_grad():
        model.original_model.transformer.wpe.weight[:, 3] += 3e4
    tlens.freeze(model, some_tokens())
    with refused(model, f"blocks.1.{point}", lambda t, *, hook: 1.3 * t, r"blocks\.1.*hook_"):
        tlens.freeze(model, some_tokens())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_write_that_no_hook_point_shows(dtype):
    """A forward put around an MLP's module changes what the stream gets, and leaves `hook_mlp_out` as it was."""
    model = tiny_model("bridge/llama")
    with torch.no_grad():
        model.original_model.model.embed_tokens.weight.mul_(32)  # beside its stream a write is small
    model = model.to(dtype)
    tlens.freeze(model, some_tokens())
    mlp = model.blocks[1].mlp
    forward = mlp.forward
    # a Bridge's component hands what is set on it to what it wraps
    object.__setattr__(mlp, "forward", lambda *args, **kwargs: 0.75 * forward(*args, **kwargs))
    with pytest.raises(tlens.UnsupportedModelError, match=r"what blocks\.1 adds to the stream"):
        tlens.freeze(model, some_tokens())


@pytest.mark.parametrize(
    ("name", "allowed"), [("bridge/llama", 1e-4), ("bridge/gemma2", 1e-4), ("bridge/gpt2", 1e-6)], ids=str
)
def test_norms_that_compute_in_float32_allow_what_float32_does(name, allowed):
    """Hugging Face's RMSNorms do, in a float64 model too; where terms cancel, that is more than 1e-6 of a write."""
    assert tlens.freeze(tiny_model(name), some_tokens()).tolerance == allowed


def scaled_by(factor):
    """A hook that scales what one head writes at the last token."""

    def hook_result(result, *, hook):
        result = result.clone()
        result[:, -1, 2] *= factor
        return result

    return hook_result


@pytest.mark.parametrize("model_name", [name for name in model_names() if name.startswith("hooked/ln")][:1])
def test_head_by_head_where_the_model_shows_it(model_name):
    """`hook_result` fires only where the model was told to compute it."""
    model = tiny_model(model_name)
    model.set_use_attn_result(True)
    assert "blocks.0.writes" in tlens.freeze(model, some_tokens()).errors
    with refused(model, "blocks.1.attn.hook_result", scaled_by(1 + 1e-4), r"hook_result.*head 2"):
        tlens.freeze(model, some_tokens())


@pytest.mark.parametrize("family", ["granite-moe", "falcon-h1"])
def test_what_heads_write_beside_a_constant(family):
    """The block multiplies what attention writes; some versions show heads before that, some after it."""
    model = tiny_model(f"bridge/{family}")
    model.set_use_attn_result(True)
    frozen = tlens.freeze(model, some_tokens())
    assert frozen.errors["blocks.0.writes"] < 1e-4
    with refused(model, "blocks.1.attn.hook_result", scaled_by(1 + 1e-3), r"hook_result.*head 2"):
        tlens.freeze(model, some_tokens())


@pytest.mark.parametrize("family", ["lfm2", "qwen3-next"])
def test_what_heads_write_where_some_layers_have_none(family):
    """A layer with a mixer in place of attention has no such hook point."""
    model = tiny_model(f"bridge/{family}")
    model.set_use_attn_result(True)
    frozen = tlens.freeze(model, some_tokens())
    assert frozen.points.blocks[0].head_writes is None
    assert frozen.points.blocks[1].head_writes == "blocks.1.attn.hook_result"


@pytest.mark.parametrize("options", [{}, {"verify": "sample"}, {"patterns": "recompute"}, {"store": "cpu"}], ids=str)
def test_nothing_of_it_is_kept(options):
    frozen = tlens.freeze(tiny_model("bridge/gpt2"), some_tokens(), **options)
    assert frozen.errors["blocks.1.writes"] < 1e-9
    assert not set(frozen.capture.activations) & set(frozen.points.proved)


def test_a_sampled_proof_sees_the_last_token(halves):
    model = halves[torch.bfloat16]

    def at_the_end(z, *, hook):
        z = z.clone()
        z[:, -1, 1] = 0
        return z

    with refused(model, "blocks.1.attn.hook_z", at_the_end, r"blocks\.1\.attn\.hook_z .*head 1"):
        tlens.freeze(model, TEXT, verify="sample")


def test_a_cache_is_proved_as_a_run_is(halves):
    model = halves[torch.bfloat16]
    _, cache = model.run_with_cache(TEXT)
    assert "blocks.0.writes" in tlens.freeze(model, TEXT, cache=cache).errors


def test_a_relu_keeps_its_smallest_values_in_float16():
    """Its ratio is 1 down to the smallest numbers that float16 has."""
    z = torch.tensor([[[7e-3, 1e-4, 6e-8, 0.0, -1e-4, 3.0]]], dtype=torch.float16)
    through = tlens.models.activations.coefficients(torch.relu, z).through
    assert torch.equal(through * z, torch.relu(z))


SUMS = {
    "target": lambda frozen: tlens.attribute(frozen, target=5),
    "in_out": lambda frozen: tlens.attribute(frozen, collapse="in_out"),
    "direction": lambda frozen: frozen.operator().target(direction=torch.ones(16)),
    "decompx": lambda frozen: tlens.attribute(frozen, method="decompx", aggregate="target", target=5),
    "components": lambda frozen: circuits.logit_attribution(frozen, 5),
    "paths": lambda frozen: circuits.paths(frozen, 5),
    "graph": lambda frozen: circuits.contribution_graph(frozen, 5),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_that_its_proof_does_not_allow(name):
    """A pass whose second block was never proved, and is not what its weights say."""
    model = tiny_model("bridge/gpt2")
    tokens = some_tokens(batch=1)
    with model.hooks([("blocks.1.hook_mlp_out", lambda out, *, hook: 3 * out)]):
        with pytest.warns(tlens.GapWarning, match=r"miss the model's own number .* allows 1\.0e-06"):
            SUMS[name](tlens.freeze(model, tokens, verify=False))
        with pytest.raises(tlens.NumericalError, match="wider dtype"):
            SUMS[name](tlens.freeze(model, tokens, verify=False, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error", tlens.GapWarning)
        SUMS[name](tlens.freeze(model, tokens, strict=True))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_an_untouched_model_in_half_precision_warns_of_nothing(halves, dtype):
    frozen = tlens.freeze(halves[dtype], TEXT, strict=True)
    for target in (" raised", " not"):
        tlens.attribute(frozen, target=target, query="all")
        circuits.logit_attribution(frozen, target)


@pytest.mark.parametrize("model_name", ["bridge/gpt2", "hooked/ln"])
def test_a_score_that_its_pattern_does_not_show(model_name):
    """What is added to every key leaves each pattern as it is, and changes each score."""
    if model_name not in model_names():
        pytest.skip("TransformerLens 4")
    model, tokens = tiny_model(model_name), some_tokens(batch=1)
    circuits.qk_attribution(tlens.freeze(model, tokens), 1, 2, key=3)
    with model.hooks([("blocks.1.attn.hook_k", lambda k, *, hook: k + 1)]):
        frozen = tlens.freeze(model, tokens)
        assert float(tlens.attribute(frozen, target=5).gap.max()) < 1e-9
        with pytest.raises(tlens.UnsupportedModelError, match="whole row of scores"):
            circuits.qk_attribution(frozen, 1, 2, key=3)


@pytest.mark.skipif("hooked/alibi" not in model_names(), reason="TransformerLens 4")
def test_a_score_with_alibi_after_a_longer_prompt():
    """TransformerLens then takes rows of later queries from its table, which add the same to every key."""
    model = tiny_model("hooked/alibi")
    frozen = tlens.freeze(model, some_tokens(batch=1))
    before = circuits.qk_attribution(frozen, 1, 2, key=3)
    model(torch.arange(3, 20)[None])
    after = circuits.qk_attribution(frozen, 1, 2, key=3)
    assert torch.equal(before.alibi, after.alibi)
    assert torch.equal(before.total, after.total)


def test_an_activation_rounds_relative_to_its_argument():
    """GELU by tanh of a far negative number is rounding alone; neurons that are small beside it do not change that."""
    model = tiny_model("bridge/gpt2").float()
    inward = model.original_model.transformer.h[1].mlp.c_fc
    with torch.no_grad():
        inward.weight *= 0.1
        inward.bias *= 0.1
        inward.weight[:, 3] = 0
        inward.bias[3] = -5.1
    tokens = some_tokens(1, 6)
    frozen = tlens.freeze(model, tokens)
    assert frozen.errors["blocks.1"] < frozen.tolerance
    assert float(model.run_with_cache(tokens)[1]["blocks.1.mlp.hook_post"][..., 3].abs().max()) < 1e-6

    def moved(post, *, hook):
        return post.index_add(-1, torch.tensor([3]), torch.full((*post.shape[:-1], 1), 1e-3))

    with refused(model, "blocks.1.mlp.hook_post", moved, r"1\.mlp\.hook_p.*neuron 3"):
        tlens.freeze(model, tokens)
