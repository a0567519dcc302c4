"""Switch Transformers: patterns that its attention modules give, and a router that leaves out what is over capacity.

Beside it stands a literal forward pass of both stacks. TransformerLens shows the bias of relative positions where the
pattern should be.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import transformers
from conftest import Choices, close, hooks_left
from transformers.models.switch_transformers import modeling_switch_transformers as switch

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.core import RELP, held
from tensorlens_tl.hooks import points
from tensorlens_tl.models import sublayers
from tensorlens_tl.passes.backward import rule_scores
from tensorlens_tl.testing import check_method
from tensorlens_tl.testing.models import bridge_of

pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("error::tensorlens_tl.GapWarning")]
CAPACITY = 2
SIZES = {
    "vocab_size": 48, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "num_experts": 3, "expert_capacity": CAPACITY, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    "relative_attention_num_buckets": 8, "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
SOURCES = [[3, 4, 5, 6, 7, 8], [9, 31, 7, 22, 5, 14]]
WRITTEN = [[0, 11, 12, 13], [0, 21, 22, 23]]
START = len(SOURCES[0])


def built():
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(**SIZES)
    module = transformers.SwitchTransformersForConditionalGeneration(config)
    for part in module.modules():
        if isinstance(part, switch.SwitchTransformersTop1Router):
            part.dtype = torch.float64  # where its config says float32
    return bridge_of(module)


def in_float64(norm, x):
    """Its norm without the cast to float32."""
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


@pytest.fixture(scope="module", autouse=True)
def no_casts():
    with patch.object(switch.SwitchTransformersLayerNorm, "forward", in_float64):
        yield


@pytest.fixture(scope="module")
def model():
    return built()


@pytest.fixture(scope="module")
def frozen(model):
    return tlens.freeze(model, SOURCES, decoder_input_ids=WRITTEN)


class Literal(Choices):
    """One prompt through both stacks; holds scales, patterns, ReLUs and routes."""

    def __init__(self, model, given=None):
        super().__init__(given)
        self.inside = model.original_model

    def norm(self, module, x):
        module = original(module)
        return x / self.hold((x.square().mean(-1, keepdim=True) + module.variance_epsilon).sqrt()) * module.weight

    def attention(self, module, x, y, bias, mask=0.0):
        """Heads whose queries are read from x, keys and values from y."""
        module = original(module)
        q, k, v = (
            original(part)(stream).unflatten(-1, (4, 4)).transpose(0, 1)
            for part, stream in ((module.q, x), (module.k, y), (module.v, y))
        )
        pattern = self.hold((q @ k.mT + bias + mask).softmax(-1))
        return original(module.o)((pattern @ v).transpose(0, 1).flatten(1))

    def dense(self, module, x):
        pre = original(module.wi)(x)
        return original(module.wo)(pre * self.hold((pre > 0).to(pre)))

    def routes(self, router, x):
        """The expert of each token and its probability, or no expert where that is full."""
        seen = [0] * 3
        routes = []
        for probabilities in original(router).classifier(x).softmax(-1):
            number = int(probabilities.argmax())
            seen[number] += 1
            routes.append((number, float(probabilities[number])) if seen[number] <= CAPACITY else None)
        return routes

    def mlp(self, module, x):
        module = original(module)
        if not hasattr(module, "router"):
            return self.dense(module, x)
        rows = []
        for vector, route in zip(x, self.hold(self.routes(module.router, x)), strict=True):
            if route is None:
                rows.append(torch.zeros_like(vector))
            else:
                rows.append(route[1] * self.dense(module.experts[f"expert_{route[0]}"], vector))
        return torch.stack(rows)

    def block(self, block, x, bias, mask, encoded=None):
        first, *crossing, last = original(block).layer
        read = self.norm(first.layer_norm, x)
        x = x + self.attention(first.SelfAttention, read, read, bias, mask)
        for part in crossing:
            x = x + self.attention(part.EncDecAttention, self.norm(part.layer_norm, x), encoded, 0.0)
        return x + self.mlp(last.mlp, self.norm(last.layer_norm, x))

    def stack(self, stack, x, mask=0.0, encoded=None):
        bias = original(original(stack.block[0]).layer[0].SelfAttention).compute_bias(len(x), len(x))[0]
        for block in stack.block:
            x = self.block(block, x, bias, mask, encoded)
        return self.norm(stack.final_layer_norm, x)

    def __call__(self, x, y):
        """What the decoder gives of stream y where the encoder's stream is x."""
        causal = torch.full((len(y), len(y)), -torch.inf, dtype=y.dtype).triu(1)
        return self.stack(self.inside.decoder, y, causal, self.stack(self.inside.encoder, x))


def original(module):
    """What a Bridge put its hook points around."""
    return getattr(module, "original_component", module)


# ------------------------------------------------------------------ the operator


@pytest.mark.parametrize("row", [0, 1])
def test_the_frozen_model_is_a_literal_forward_pass_with_its_choices_held(model, frozen, row):
    streams = frozen.resid_pre(0)[row].split(list(frozen.sides))
    operator = frozen.operator()
    plain = Literal(model)
    with torch.no_grad():
        output = plain(*streams)
    assert close(frozen.output[row, START:], output)
    assert max(frozen.errors.values()) < 1e-9
    other = torch.randn(10, 16, dtype=torch.float64, requires_grad=True)
    held = Literal(model, plain.noted)(*other.split(list(frozen.sides)))
    x = operator.x.clone()
    x[row] = other.detach()
    assert close(operator(x)[row, START:], held.detach())
    cotangent = torch.zeros_like(frozen.output)
    cotangent[row, START:] = torch.randn(4, 16, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(held, other, cotangent[row, START:])
    assert close(operator.pull(cotangent)[row], gradient)
    put = [
        (name, lambda live, hook, part=part: part)
        for name, part in zip(frozen.capture.stream_names(0), x.split(list(frozen.sides), 1), strict=True)
    ]
    seen = {}
    see = (frozen.points.output, lambda live, hook: seen.update(output=live))
    with torch.no_grad():
        model.run_with_hooks(**frozen.inputs, fwd_hooks=[*put, *frozen.fwd_hooks(), see])
    assert close(seen["output"][row], held.detach())
    assert hooks_left(model) == 0


def test_patterns_and_routes_are_those_of_the_literal_pass(model, frozen):
    for row in range(2):
        plain = Literal(model)
        with torch.no_grad():
            plain(*frozen.resid_pre(0)[row].split(list(frozen.sides)))
        patterns = [held for held in plain.noted if isinstance(held, torch.Tensor) and held.ndim == 3]
        ours = [frozen.pattern(0), frozen.pattern(1)]
        for layer in (2, 3):
            ours += [frozen.pattern(layer), frozen.cross_pattern(layer)]
        for pattern, literal in zip(ours, patterns, strict=True):
            assert close(pattern[row], literal)
        every = [held for held in plain.noted if isinstance(held, list)]
        for layer, literal in zip((1, 3), every, strict=True):
            routes = frozen.maps.routing(layer)
            weights = torch.tensor([0.0 if route is None else route[1] for route in literal], dtype=torch.float64)
            assert close(routes.weight[row, :, 0], weights)
            chosen = [route if route is None else route[0] for route in literal]
            assert all(route in (None, number) for route, number in zip(chosen, routes.index[row, :, 0], strict=True))
    assert (frozen.maps.routing(1).weight == 0).any(), "nothing is over capacity"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_counts_in_the_capacity_of_experts(model, side):
    """On the left it takes the places of real tokens; on the right it comes after them."""
    short = [SOURCES[0], SOURCES[1][:4]]
    padding = [0, 0]
    rows = [short[0], padding + short[1] if side == "left" else short[1] + padding]
    mask = [[1] * 6, [0, 0, 1, 1, 1, 1] if side == "left" else [1, 1, 1, 1, 0, 0]]
    options = {"attention_mask": mask, "decoder_input_ids": WRITTEN}
    if side == "left":
        with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1 .* partly by padding, before a real token"):
            tlens.freeze(model, rows, **options)
        return
    total = tlens.attribute(tlens.freeze(model, rows, **options), 7).total
    for row, (source, written) in enumerate(zip(short, WRITTEN, strict=True)):
        alone = tlens.freeze(model, [source], decoder_input_ids=[written])
        assert close(total[row], tlens.attribute(alone, 7).total[0])


def test_noise_of_the_router_in_train_mode(model):
    model.train()
    model.original_model.train()
    try:
        with pytest.raises(tlens.InvalidInputError, match=r"random numbers \(jitter noise of 0\.01\).*model\.eval"):
            tlens.freeze(model, SOURCES, decoder_input_ids=WRITTEN)
    finally:
        model.eval()
        model.original_model.eval()


def test_a_logit_is_the_sum_of_its_tokens_and_its_parts(model, frozen):
    own = model(**frozen.inputs).detach()[:, -1, 7]
    result = tlens.attribute(frozen, 7)
    assert close((result.scores.sum(-1) + result.bias)[:, 0], own)
    for by in ("component", "head", "head_token"):
        terms = circuits.logit_attribution(frozen, 7, by=by)
        assert close(terms.total[:, 0], own)
        assert float(terms.gap.max()) < 1e-9
    assert any(name.startswith("L3E") for name in terms.names)
    one = tlens.freeze(model, SOURCES[:1], decoder_input_ids=WRITTEN[:1])
    assert circuits.contribution_graph(one, 7).gap < 1e-9


def test_of_two_runs(model, frozen):
    """What differs between them, a changed routing included, sums to the change of the live logit."""
    other = tlens.freeze(model, SOURCES[::-1], decoder_input_ids=WRITTEN[::-1])
    change = tlens.difference(frozen, other)
    live = (model(**frozen.inputs) - model(**other.inputs)).detach()[:, -1, 7]
    result = tlens.attribute(change, 7)
    assert close((result.scores.sum(-1) + result.bias)[:, 0], live)


def test_prompts_of_different_length_and_a_cache(model, frozen):
    together = tlens.freeze(model, [SOURCES[0], SOURCES[1][:4]], decoder_input_ids=[WRITTEN[0], WRITTEN[1][:2]])
    alone = tlens.freeze(model, [SOURCES[1][:4]], decoder_input_ids=[WRITTEN[1][:2]])
    scores = together.operator().target(7).scores[1, 0]
    assert close(scores[together.mask[1]], alone.operator().target(7).scores[0, 0])
    _, cache = model.run_with_cache(**frozen.inputs)
    again = tlens.freeze(model, SOURCES, decoder_input_ids=WRITTEN, cache=cache, store="cpu")
    assert close(again.operator().in_out().scores, frozen.operator().in_out().scores)


METHODS = [
    ("tensorlens", {"target": 7}), ("decompx", {}), ("input-x-gradient", {"target": 7}), ("cp-lrp", {"target": 7}),
    ("rollout", {}), ("alti-logit", {"target": 7}), ("chefer", {"target": 7}), ("value-zeroing", {}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "options"), METHODS)
@pytest.mark.few(2)
def test_methods(method, options, model):
    assert not check_method(method, model, options=options)


# ------------------------------------------------------------------ what is refused


def test_rules_need_no_hook_points(frozen):
    """Patterns held, a rule is the frozen operator; with attention live it is not."""

    of_rule = rule_scores(frozen, replace(RELP, softmax=held), 7).scores
    assert torch.allclose(of_rule, frozen.operator(rule="frozen-split").target(7).scores, rtol=1e-6, atol=1e-9)
    live = tlens.attribute(frozen, 7, method="relp", attention="live").scores
    assert not torch.allclose(of_rule, live, rtol=1e-2)


def test_what_needs_hooks_inside_experts_is_refused(model, frozen):
    with pytest.raises(tlens.UnsupportedModelError, match="nothing inside MLP1"):
        circuits.total_effects(frozen, 7, live=True)
    with pytest.raises(tlens.UnsupportedModelError, match="mixture of experts"):
        circuits.logit_attribution(frozen, 7, by="neuron")
    with pytest.raises(tlens.UnsupportedModelError, match="encoder–decoder's patterns"):
        tlens.freeze(model, SOURCES, decoder_input_ids=WRITTEN, patterns="recompute")
    assert hooks_left(model) == 0


def freeze_again(model):
    return tlens.freeze(model, SOURCES, decoder_input_ids=WRITTEN)


def test_the_bias_that_is_shown_is_no_pattern(model, read_anew, monkeypatch):
    monkeypatch.setattr(points, "pattern_reader", lambda attention: None)
    with pytest.raises(tlens.UnsupportedModelError, match=r"attn\.hook_pattern .*negative numbers"):
        freeze_again(model)


WRONG_PATTERNS = {
    "the bias": lambda output: output[1].expand_as(output[2]),
    "its softmax": lambda output: output[1].expand_as(output[2]).softmax(-1),
    "heads in another order": lambda output: output[2].flip(1),
    "keys in another order": lambda output: output[2].roll(1, -1),
}


@pytest.mark.parametrize("which", WRONG_PATTERNS)
def test_another_pattern_is_refused_by_the_proof(model, read_anew, monkeypatch, which):
    monkeypatch.setattr(points, "pattern_reader", lambda attention: WRONG_PATTERNS[which])
    with pytest.raises(tlens.UnsupportedModelError, match=r"encoder_blocks\.0"):
        freeze_again(model)


def test_no_pattern_is_refused(model, read_anew, monkeypatch):
    monkeypatch.setattr(points, "pattern_reader", lambda attention: lambda output: None)
    with pytest.raises(tlens.UnsupportedModelError, match=r"encoder_blocks\.0\.attn\.pattern .*is no pattern over all"):
        freeze_again(model)


def without_capacity(output):
    """Every token is sent to the expert of its largest number, full or not."""
    _, weight, numbers = output
    return torch.nn.functional.one_hot(numbers.argmax(-1), 3) * weight


WRONG_ROUTES = {
    "without capacity": without_capacity,
    "without probabilities": lambda output: output[0].to(output[1]),
    "another expert": lambda output: (output[0] * output[1]).roll(1, -1),
}


@pytest.mark.parametrize("which", WRONG_ROUTES)
def test_other_routes_are_refused_by_the_proof(monkeypatch, which):
    monkeypatch.setattr(sublayers, "_within_capacity", WRONG_ROUTES[which])
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.\d.*mlp"):
        freeze_again(built())
