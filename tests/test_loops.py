"""Stacks that run several times each (HRM-Text), beside a literal recursion over the modules of Hugging Face."""

import importlib

import pytest
import torch
from conftest import bridge_of

import tensorlens_tl as tlens
from tensorlens_tl.testing.models import HookedTransformer, randomise
from tensorlens_tl.testing.requirements import difference

if HookedTransformer is not None:
    pytest.skip("HRM-Text is read of TransformerLens 4", allow_module_level=True)

TOKENS = torch.tensor([[7, 11, 23, 31, 19, 41]])
TARGET = 5
FLOAT32 = 1e-6
"""The model's own norms and softmax are computed in float32."""


def hugging_face(**changes):
    """A tiny random model in float64: two slow cycles of three fast ones, two blocks in each stack."""
    transformers = importlib.import_module("transformers")
    if not hasattr(transformers, "HrmTextConfig"):
        pytest.skip("this transformers has no HRM-Text")
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
    config = transformers.HrmTextConfig(**sizes, num_hidden_layers=2, max_position_embeddings=64, **changes)
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    module = transformers.HrmTextForCausalLM(config).double().eval()
    randomise(module)
    module.model.z_L_init.data.normal_()
    return module


@pytest.fixture(scope="module")
def module():
    return hugging_face(L_bp_cycles=[3, 3])


@pytest.fixture(scope="module")
def model(module):
    return bridge_of(module)


@pytest.fixture(scope="module")
def frozen(model):
    return tlens.freeze(model, TOKENS)


# --------------------------------------------------------------------------- the witness


class Literal:
    """The forward pass of HRM-Text written out, with patterns, gates and scales as they were in the module's run."""

    def __init__(self, module, tokens):
        self.inner = module.model
        self.config = module.config
        self.seen = {}
        handles = []
        for name, part in self.inner.named_modules():
            if name.endswith(("norm", "layernorm", "gate_proj", "self_attn")):
                handles.append(part.register_forward_hook(self._note(name)))
        with torch.no_grad():
            self.logits = module(tokens).logits
        for handle in handles:
            handle.remove()

    def _note(self, name):
        self.seen[name] = []

        def note(part, given, output):
            if name.endswith("norm"):
                mean_square = given[0].float().square().mean(-1, keepdim=True)
                self.seen[name].append((mean_square + part.eps).sqrt().double())
            else:
                self.seen[name].append(output[1] if name.endswith("attn") else output)

        return note

    def __call__(self, embedding):
        """The output of the last norm, of what the embedding looks up."""
        held = {name: iter(values) for name, values in self.seen.items()}
        slow = embedding * self.config.embedding_scale
        fast = self.inner.z_L_init.detach().expand_as(slow)
        for _ in range(self.config.H_cycles):
            for _ in range(self.config.L_cycles):
                fast = self._stack("L_module", slow + fast, held)
            slow = self._stack("H_module", slow + fast, held)
        return slow

    def _stack(self, name, x, held):
        stack = getattr(self.inner, name)
        for number, layer in enumerate(stack.layers):
            at = f"{name}.layers.{number}"
            x = x + self._attention(at, layer.self_attn, x / next(held[f"{at}.input_layernorm"]), held)
            read = x / next(held[f"{at}.post_attention_layernorm"])
            gate = torch.nn.functional.silu(next(held[f"{at}.mlp.gate_proj"]))
            x = x + layer.mlp.down_proj(gate * layer.mlp.up_proj(read))
        return x / next(held[f"{name}.final_norm"])

    def _attention(self, at, attention, x, held):
        pattern = next(held[f"{at}.self_attn"])
        values = attention.v_proj(x).unflatten(-1, (pattern.shape[1], -1))
        mixed = torch.einsum("bhqk,bkhd->bqhd", pattern, values).flatten(2)
        return attention.o_proj(torch.sigmoid(next(held[f"{at}.self_attn.gate_proj"])) * mixed)


@pytest.fixture(scope="module")
def literal(module):
    return Literal(module, TOKENS)


def test_the_operator_is_the_literal_recursion(frozen, literal, module):
    """At the pass's own input, at another one, and by gradients."""
    op = frozen.operator()
    embedding = module.model.embed_tokens(TOKENS).detach()
    assert difference(op.x, embedding) < 1e-12
    other = embedding + embedding.roll(1, 1)
    for x in (embedding, other):
        assert difference(op(x), literal(x).detach()) < FLOAT32
    leaf = other.requires_grad_(True)
    cotangent = torch.randn(op.output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(literal(leaf), leaf, cotangent)
    assert difference(op.pull(cotangent), gradient) < FLOAT32


def test_contributions_and_scores_add_up(frozen, literal):
    op = frozen.operator()
    assert difference(op.contributions().sum(2) + op.bias, op.output) < FLOAT32
    scores = tlens.attribute(frozen, TARGET, query="all")
    logits = literal.logits[..., TARGET]
    assert difference(scores.total, logits) < FLOAT32
    assert difference(scores.scores.sum(-1) + scores.bias, logits) < FLOAT32


def test_every_call_of_a_block_is_a_block(frozen, model):
    """Two slow cycles, three fast ones in each, two blocks in each stack."""
    names = [block.name for block in frozen.view.blocks]
    assert len(names) == frozen.n_layers == model.cfg.n_layers == 16
    assert names[:4] == ["L_blocks.0@0", "L_blocks.1@0", "L_blocks.0@1", "L_blocks.1@1"]
    assert names[6:8] == ["H_blocks.0@0", "H_blocks.1@0"]
    assert names[-1] == "H_blocks.1@1"
    shown = []
    hook = ("L_blocks.0.attn.hook_pattern", lambda pattern, hook: shown.append(pattern))
    model.run_with_hooks(TOKENS, fwd_hooks=[hook])
    layers = [layer for layer, name in enumerate(names) if name.startswith("L_blocks.0@")]
    assert len(shown) == len(layers) == 6
    for layer, pattern in zip(layers, shown, strict=True):
        assert difference(frozen.pattern(layer), pattern) == 0


# --------------------------------------------------------------------------- the live model, held


def held_at(frozen, x):
    """What the held model unembeds, given another embedding, by hooks in a user's own run."""
    seen = []
    hooks = [("embed.hook_out", lambda live, hook: x), ("unembed.hook_in", lambda live, hook: seen.append(live))]
    frozen.model.run_with_hooks(TOKENS, fwd_hooks=[*frozen.fwd_hooks(), *hooks])
    return seen[-1].detach()


def test_the_held_model_is_the_operator(frozen):
    op = frozen.operator()
    other = op.x + op.x.roll(1, 1)
    assert difference(held_at(frozen, other), op(other)) < FLOAT32
    assert difference(held_at(frozen, other), op(other)) < FLOAT32  # counted from the start again


def test_counting_starts_again_after_a_run_that_failed(frozen, model):
    def fail(activation, hook):
        raise ZeroDivisionError

    with torch.no_grad(), frozen.attached():
        with pytest.raises(ZeroDivisionError):
            model.run_with_hooks(TOKENS, fwd_hooks=[("H_blocks.0.hook_in", fail)])
        held = model(TOKENS)
    with torch.no_grad():
        assert difference(held, model(TOKENS)) < FLOAT32


def test_recomputed_patterns_and_padding(frozen, model):
    contributions = frozen.operator().contributions()
    recomputed = tlens.freeze(model, TOKENS, patterns="recompute")
    assert difference(recomputed.operator().contributions(), contributions) < FLOAT32
    tokens = torch.cat([TOKENS, torch.tensor([[5, 6, 9, 0, 0, 0]])])
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    padded = tlens.freeze(model, tokens, attention_mask=mask).operator().target(TARGET)
    for row, prompt in enumerate((TOKENS, torch.tensor([[5, 6, 9]]))):
        alone = tlens.freeze(model, prompt).operator().target(TARGET)
        assert difference(padded.scores[row, :, : prompt.shape[1]], alone.scores[0]) < FLOAT32


# --------------------------------------------------------------------------- what is refused


def test_a_hook_inside_the_loop_is_refused_and_one_before_it_is_not(model):
    steer = torch.ones(32, dtype=torch.float64)
    inside = model.hooks([("L_blocks.1.hook_resid_pre", lambda stream, hook: stream + steer)])
    with inside, pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.0 .*cannot be frozen"):
        tlens.freeze(model, TOKENS)
    with model.hooks([("embed.hook_out", lambda stream, hook: stream + steer)]), torch.no_grad():
        collapse = tlens.freeze(model, TOKENS).operator().target(TARGET)
        assert difference(collapse.total[:, 0], model(TOKENS)[:, -1, TARGET]) < FLOAT32


def test_calls_in_another_order_are_refused(model, monkeypatch):
    """The sum of both states is what each call is seen to read."""
    inner = model.original_model.model
    monkeypatch.setattr(inner, "embedding_scale", inner.embedding_scale * 1.01)
    view = tlens.models.ModelView(model)
    monkeypatch.undo()
    frozen = tlens.freeze(model, TOKENS)
    assert frozen.errors["loop"] < FLOAT32
    capture = importlib.import_module("dataclasses").replace(frozen.capture, view=view)
    check_loop = importlib.import_module("tensorlens_tl.passes.block_maps").check_loop
    with pytest.raises(tlens.UnsupportedModelError, match="not called as its config says"):
        check_loop(capture, frozen.tolerance)


@pytest.mark.parametrize("method", ["decompx", "rollout", "alti", "difference"])
def test_methods_that_read_blocks_as_a_chain_are_refused(frozen, method):
    with pytest.raises(tlens.UnsupportedModelError, match="blocks run in a loop"):
        tlens.attribute(frozen, method=method)


def test_circuits_and_some_layers_are_refused(frozen):
    for question in (
        lambda: tlens.circuits.logit_attribution(frozen, TARGET),
        lambda: tlens.circuits.total_effects(frozen, TARGET),
        lambda: frozen.operator(layers=slice(0, 4)),
    ):
        with pytest.raises(tlens.UnsupportedModelError, match="blocks run in a loop"):
            question()


def test_gradients_that_transformers_does_not_record_are_refused(frozen, literal, module):
    """By default Hugging Face runs the first fast cycles under ``torch.no_grad``."""
    usual = tlens.freeze(bridge_of(hugging_face()), TOKENS)
    with pytest.raises(tlens.UnsupportedModelError, match=r"3 of its 8 calls .*L_bp_cycles=\[3, 3\]"):
        tlens.attribute(usual, TARGET, method="input-x-gradient")
    assert difference(usual.operator().contributions(), frozen.operator().contributions()) == 0
    scores = tlens.attribute(frozen, TARGET, method="input-x-gradient").scores
    embedding = module.model.embed_tokens(TOKENS).detach().requires_grad_(True)
    logit = module(inputs_embeds=embedding).logits[0, -1, TARGET]
    (gradient,) = torch.autograd.grad(logit, embedding)
    assert difference(scores[:, -1], (embedding * gradient).sum(-1).detach()) < FLOAT32
