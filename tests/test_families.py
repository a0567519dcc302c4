"""The table of the library: every claim on every model class and family, in float64.

Two independent computations must agree: the algebra that reads weights, and the live model held fixed by hooks
and differentiated by autograd.
"""

from contextlib import ExitStack, contextmanager

import pytest
import torch
from conftest import hooks_left, some_tokens, tolerance

import tensorlens_tl as tlens

pytestmark = pytest.mark.numeric


def relative(made, own):
    return float((made - own).norm() / own.norm())


_passes = {}


@pytest.fixture
def frozen(model, name):
    """Made once for each family: nothing here changes a pass or its model."""
    if name not in _passes:
        _passes[name] = tlens.freeze(model, some_tokens())
    return _passes[name]


def frozen_model_output(frozen, x, **options):
    """The live model, held fixed by hooks, with the first block's input replaced by x."""
    seen = {}

    def put(live, *, hook):
        return x

    def see(live, *, hook):
        seen["output"] = live

    hooks = [(frozen.points.blocks[0].resid_pre, put), *frozen.fwd_hooks(**options), (frozen.points.output, see)]
    frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
    return seen["output"]


def perturbed(x, seed=0):
    """Far from x and not uniform: a uniform factor is invisible behind a norm."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    return x + noise * x.std()


def test_every_block_is_proved(frozen, name):
    assert set(frozen.errors) >= {f"blocks.{layer}" for layer in range(frozen.n_layers)}
    assert max(frozen.errors.values()) < tolerance(name)
    assert hooks_left(frozen.model) == 0


def test_contributions_sum_to_the_models_own_output(frozen, name):
    op = frozen.operator()
    assert relative(op.contributions().sum(2) + op.bias, frozen.output) < tolerance(name)
    assert relative(op(op.x), frozen.output) < tolerance(name)


@pytest.mark.parametrize("activation", tlens.FROZEN_RULES)
def test_push_and_pull_are_adjoint(frozen, activation):
    op = frozen.operator(rule=activation)
    x, g = torch.randn(3, *op.x.shape, dtype=op.x.dtype), torch.randn(3, *op.x.shape, dtype=op.x.dtype)
    forward, backward = (op.push(x) * g).sum((-3, -2, -1)), (x * op.pull(g)).sum((-3, -2, -1))
    assert torch.allclose(forward, backward, rtol=1e-9, atol=1e-9 * float(forward.abs().max()))
    assert torch.allclose(op.T.push(g), op.pull(g))


@pytest.mark.parametrize("activation", tlens.FROZEN_RULES)
@pytest.mark.few(44)
def test_the_hook_frozen_model_is_the_same_affine_map(frozen, name, activation):
    op = frozen.operator(rule=activation)
    for seed in range(2):
        x = perturbed(op.x, seed)
        with torch.no_grad():
            live = frozen_model_output(frozen, x, rule=activation)
        assert relative(op(x), live) < tolerance(name)
    assert hooks_left(frozen.model) == 0


def test_the_algebra_equals_autograd_through_the_hook_frozen_model(frozen, name):
    """All of the dense tensor, by both computations."""
    op = frozen.operator()
    x = op.x.clone().requires_grad_(True)
    output = frozen_model_output(frozen, x)
    batch, pos, width = output.shape
    # prompts of a batch do not mix, so one backward pass serves them all
    seeds = torch.eye(pos * width, dtype=output.dtype).view(-1, 1, pos, width).expand(-1, batch, -1, -1)
    (jacobian,) = torch.autograd.grad(output, x, seeds, is_grads_batched=True)
    jacobian = jacobian.view(pos, width, batch, pos, width).permute(2, 0, 1, 3, 4)
    assert relative(op.dense(), jacobian) < tolerance(name)


@contextmanager
def routing_kept(frozen):
    """Routers and gates of the live model give numbers that autograd does not look behind."""

    def detached(part):
        return part.detach() if isinstance(part, torch.Tensor) else part

    def detach(module, args, output):
        return tuple(map(detached, output)) if isinstance(output, tuple) else output.detach()

    with ExitStack() as stack:
        for module in frozen.model.modules():
            for child in ("gate", "router", "W_gate", "shared_expert_gate"):
                is_mixture = isinstance(getattr(module, "experts", None), torch.nn.Module) or "JetMoeMoE" in str(
                    type(module)
                )
                if is_mixture and hasattr(module, child):
                    stack.callback(getattr(module, child).register_forward_hook(detach).remove)
        yield


def test_tangent_is_the_models_own_jacobian_of_the_mlp(frozen, name):
    """With activations left live, autograd differentiates them: that is the tangent rule."""
    if "bitnet" in name:
        pytest.skip("a norm inside the MLP would be left live as well")
    op = frozen.operator(rule="frozen-tangent")
    x = op.x.clone().requires_grad_(True)
    with routing_kept(frozen):
        output = frozen_model_output(frozen, x, activations=False)
    g = torch.randn_like(output)
    (pulled,) = torch.autograd.grad(output, x, g)
    assert relative(op.pull(g), pulled) < tolerance(name)


@pytest.mark.parametrize("activation", tlens.FROZEN_RULES)
@pytest.mark.few(44)
def test_collapses_are_complete(frozen, name, activation):
    op = frozen.operator(rule=activation)
    output = frozen.output
    in_out = op.in_out(query="all")
    assert float(in_out.gap.max()) < tolerance(name)
    assert torch.allclose(in_out.total, output.square().sum(-1))
    dots = (op.contributions() * output[:, :, None]).sum(-1)
    assert relative(in_out.scores, dots) < tolerance(name)
    target = op.target(7, query="all", minus=11)
    assert float(target.gap.max()) < tolerance(name) * 10


def test_target_total_is_the_models_own_logit(frozen, model, name):
    logits = model(**frozen.inputs)
    target, minus = 7, 11
    total = frozen.operator().target(target, query="all").total
    cap = frozen.view.soft_cap
    own = logits[..., target] if cap is None else cap * torch.atanh(logits[..., target] / cap)
    assert relative(total, own) < max(tolerance(name), 1e-7 if cap else 0)
    difference = frozen.operator().target(target, query="all", minus=minus).total
    assert torch.allclose(difference, total - frozen.operator().target(minus, query="all").total)


def test_norm_is_the_frobenius_norm_of_the_slice(frozen):
    op = frozen.operator()
    dense = op.dense()
    assert torch.allclose(op.slice(query=-1), dense[:, -1])
    exact = op.norm(query="all").scores
    assert torch.allclose(exact, dense.permute(0, 1, 3, 2, 4).flatten(3).norm(dim=-1))


def test_causal_models_are_exactly_zero_ahead(frozen, name):
    assert frozen.causal != any(part in name for part in ("bidirectional", "bert") if "decoder" not in name)
    if not frozen.causal:
        pytest.skip("attends both ways")
    dense = frozen.operator().dense()
    ahead = torch.ones(dense.shape[1], dense.shape[3]).triu(1).bool()
    assert not dense.permute(0, 1, 3, 2, 4)[:, ahead].any()
    assert not frozen.operator().contributions()[:, ahead].any()


LLAMAS = (
    "llama", "llama-compatibility", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "mixtral", "qwen2-moe",
    "deepseek-v3", "granite-moe", "afmoe", "bitnet", "jetmoe", "modernbert-decoder",
)  # fmt: skip
PADDING_THE_MODEL_GETS_WRONG = {
    *((name, side) for name in ("hooked/bidirectional", "bridge/gpt1") for side in ("left", "right")),
    *((f"bridge/{family}", "left") for family in (*LLAMAS, "phi", "phi3", "opt", "opt-350m", "olmo2")),
    *((f"bridge/{family}", "left") for family in ("jamba", "falcon-h1", "lfm2", "qwen3-next", "rwkv")),
}
"""Where the model's own output is NaN, mixes padding in, or looks ahead; there we refuse."""

POSITIONS_SHIFT = {("encoder/bert", "left"), ("bridge/bert", "left")}
"""Encoders that count positions from the first column: left padding is another input, and as exact as any."""


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.few(22)
def test_padding_changes_nothing(model, name, side):
    long, short = some_tokens(1, 6, 1)[0], some_tokens(1, 4, 2)[0]
    real = slice(0, 4) if side == "right" else slice(2, 6)
    tokens, mask = torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long)
    tokens[0], mask[0] = long, 1
    tokens[1, real], mask[1, real] = short, 1
    alone = tlens.freeze(model, short[None])
    own = model_output(model, tokens, mask)
    # NaN on several bridges (of a last layer only at padding), ignored mask on another
    if own.isnan().any() or not relative(own[1, real], model(short[None])[0]) < 1e-5:
        if (name, side) in POSITIONS_SHIFT:
            shifted = tlens.freeze(model, tokens, attention_mask=mask).operator().in_out(query="all")
            assert float(shifted.gap.max()) < tolerance(name)
            return
        with pytest.raises((tlens.NumericalError, tlens.UnsupportedModelError), match="padd"):
            tlens.freeze(model, tokens, attention_mask=mask)
        assert (name, side) in PADDING_THE_MODEL_GETS_WRONG
        return
    padded = tlens.freeze(model, tokens, attention_mask=mask)
    for query in (-1, 0):
        a, b = padded.operator().in_out(query), alone.operator().in_out(query)
        assert relative(a.scores[1:, :, real], b.scores) < 10 * tolerance(name)
        assert relative(a.total[1:], b.total) < 10 * tolerance(name)
    outside = torch.ones(6, dtype=torch.bool)
    outside[real] = False
    everything = padded.operator().contributions()[1]
    assert not everything[outside].any()
    assert not everything[:, outside].any()
    assert relative(everything[real, real], alone.operator().contributions()[0]) < 10 * tolerance(name)


def model_output(model, tokens, mask):
    key = "one_zero_attention_mask" if type(model).__name__ == "HookedEncoder" else "attention_mask"
    with torch.no_grad():
        return model(tokens, **{key: mask})


def test_a_batch_equals_one_by_one(frozen, model, name):
    together = frozen.operator().in_out(query="all").scores
    for row in range(2):
        alone = tlens.freeze(model, frozen.tokens[row : row + 1]).operator().in_out(query="all").scores
        assert relative(together[row : row + 1], alone) < tolerance(name)


def test_an_existing_cache_serves_as_well(frozen, model):
    # not every name: TransformerLens flattens what a post-norm OPT's second norm gives, and its next block then fails
    _, cache = model.run_with_cache(frozen.tokens, names_filter=set(frozen.points.captured).__contains__)
    again = tlens.freeze(model, frozen.tokens, cache=cache)
    assert torch.equal(again.operator().in_out().scores, frozen.operator().in_out().scores)


def test_an_embedding_narrower_than_the_stream_is_read_with_its_projections(model_named):
    """OPT-350m, by Hugging Face's own modules."""
    frozen = tlens.freeze(model_named("bridge/opt-350m"), some_tokens())
    hf = frozen.model.original_model
    decoder = hf.model.decoder
    project_in, project_out, unembed = (
        getattr(module, "original_component", module).weight.detach()
        for module in (decoder.project_in, decoder.project_out, hf.lm_head)
    )
    with torch.no_grad():
        stream = decoder(frozen.tokens).last_hidden_state  # after project_out, of 12 channels
        logits = hf(frozen.tokens).logits
    assert stream.shape[-1] == 12 != frozen.output.shape[-1]
    assert relative(frozen.output @ project_out.T, stream) < 1e-9
    W_U, _ = frozen.view.unembedding
    assert relative(W_U, (unembed @ project_out).T) < 1e-9
    tokens = getattr(decoder.embed_tokens, "original_component", decoder.embed_tokens).weight.detach()
    assert relative(frozen.view.embedding, tokens @ project_in.T) < 1e-9
    result = tlens.attribute(frozen, 7, minus=11)
    assert relative(result.scores.sum(-1)[:, 0] + result.bias[:, 0], logits[:, -1, 7] - logits[:, -1, 11]) < 1e-9
