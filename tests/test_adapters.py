"""Models that peft fine-tuned: adapters are read, and what is not is refused by name.

The truth is the same model with its adapters merged into its weights (`merge_and_unload`), wrapped on its own.
"""

import copy
import importlib

import peft
import pytest
import torch
import transformers
from conftest import close, some_tokens, tolerance
from torch import nn

import tensorlens_tl as tlens
from tensorlens_tl import circuits, compress
from tensorlens_tl.errors import FrozenModelError, InvalidInputError, UnsupportedModelError
from tensorlens_tl.models.parameters import is_plain, read_linear
from tensorlens_tl.testing import model_names, tiny_model
from tensorlens_tl.testing.models import BRIDGE, randomise

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
}
TARGETS = {
    "llama": LLAMA,
    "qwen2": ["q_proj", "v_proj", "o_proj"],
    "gpt2": ["c_proj", "c_fc"],
    "opt": ["v_proj", "out_proj", "fc1", "fc2"],
    "phi": ["v_proj", "dense", "fc1"],
    "bert": ["query", "value", "dense"],
    "modernbert-decoder": ["Wi", "Wo"],
    "qwen3-next": ["q_proj", "v_proj", "o_proj", "in_proj_qkvz", "out_proj"],
}


def refuse(message):
    return UnsupportedModelError(message)


def module_of(family):
    architecture, options = BRIDGE[family]
    config = getattr(transformers, architecture).config_class(**options)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    module = getattr(transformers, architecture)._from_config(config, attn_implementation="eager")
    module = module.to(torch.float64).eval()
    randomise(module)
    return module


def drawn(model):
    """Adapters that do something: peft's own start as no change."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0.1, 0.3)
    return model.eval()


def adapted(family, config):
    return drawn(peft.get_peft_model(module_of(family), config).to(torch.float64))


def lora(targets, **options):
    return peft.LoraConfig(target_modules=targets, r=2, lora_alpha=4, **options)


def bridge(module):
    builder = importlib.import_module("transformer_lens.model_bridge.sources._bridge_builder")
    return builder.build_bridge_from_module(module, type(module).__name__, hf_config=module.config).eval()


def beside_merged(model):
    """A Bridge of a peft model, and one of the same with its adapters merged."""
    merged = bridge(copy.deepcopy(model).merge_and_unload())
    return bridge(model.get_base_model()), merged


@pytest.fixture(scope="module", params=list(LORA))
def llamas(request):
    torch.manual_seed(0)
    return beside_merged(adapted("llama", lora(LLAMA, **LORA[request.param])))


# ------------------------------------------------------------------ adapters are read

WEIGHTS = {
    "ov": lambda model: circuits.ov(model, 0, 1).AB,
    "full_ov": lambda model: circuits.full_ov(model, 0, 1).AB,
    "folded": lambda model: circuits.ov(model, 1, 2, fold_norms=True).AB,
    "qk": lambda model: circuits.qk(model, 0, 1, offset=1).AB,
    "virtual_head": lambda model: circuits.virtual_head(model, [(0, 1), (1, 2)]).AB,
    "copying_scores": circuits.copying_scores,
    "composition_scores": lambda model: circuits.composition_scores(model, "V"),
}


@pytest.mark.parametrize("question", WEIGHTS)
def test_what_the_weights_say_includes_the_adapters(llamas, question):
    made, expected = (WEIGHTS[question](model) for model in llamas)
    assert close(made, expected)


@pytest.mark.parametrize("activation", tlens.FROZEN_RULES)
def test_every_rule_goes_through_the_adapters(llamas, activation):
    """LoRA on the gate of a gated MLP: the default rule holds the gate, the others go through its weights."""
    made, expected = (tlens.freeze(model, some_tokens()).operator(rule=activation).target(5).scores for model in llamas)
    assert close(made, expected, 1e-6)  # Llama's own norms compute in float32


@pytest.mark.parametrize("activation", tlens.FROZEN_RULES)
def test_an_adapter_on_the_gate_alone(activation):
    """The proof holds under the default rule, which never reads the gate's weights; the other rules were wrong."""
    made, expected = (
        tlens.freeze(model, some_tokens()).operator(rule=activation).target(5).scores
        for model in beside_merged(adapted("llama", lora(["gate_proj"])))
    )
    assert close(made, expected, 1e-6)


@pytest.mark.parametrize("method", ["tensorlens", "decompx", "relp", "ff-ig", "alti", "leave-one-out"])
def test_methods_work_on_adapted_models(llamas, method):
    options = {} if method in ("ff-ig", "alti") else {"target": 5}
    made, expected = (tlens.attribute(model, some_tokens(), method=method, **options).scores for model in llamas)
    assert close(made, expected, 1e-6)


@pytest.mark.parametrize("family", TARGETS)
def test_adapters_of_every_kind_of_layer_are_read(family):
    """Linear layers and Conv1D, biases, masked and hybrid models."""
    made, expected = beside_merged(adapted(family, lora(TARGETS[family])))
    tokens = some_tokens()
    for model in (made, expected):
        assert close(model(tokens), expected(tokens), 1e-6)
    pair = [tlens.freeze(model, tokens) for model in (made, expected)]
    scores = [tlens.attribute(frozen, target=5).scores for frozen in pair]
    assert close(*scores, atol=1e-6 if family == "qwen3-next" else tolerance(f"bridge/{family}"))
    assert pair[0].provenance()["adapters"] == "default"
    assert "adapters" not in pair[1].provenance()


def test_biases_of_adapters_are_read():
    made, expected = (
        circuits.ov(m, 0, 1).AB for m in beside_merged(adapted("qwen2", lora(["v_proj"], lora_bias=True)))
    )
    assert close(made, expected)
    model = bridge(
        adapted("llama", lora(["v_proj"], lora_bias=True)).get_base_model()
    )  # where the layer itself has none
    frozen = tlens.freeze(model, some_tokens())
    assert frozen.view.blocks[0].attention.b_V is not None
    assert float(tlens.attribute(frozen, target=5).gap.max()) < 1e-6


def test_embeddings_heads_and_whole_modules_are_read():
    model = adapted("llama", lora(["v_proj", "lm_head", "embed_tokens"]))
    made, expected = beside_merged(model)
    assert close(circuits.full_ov(made, 0, 1).AB, circuits.full_ov(expected, 0, 1).AB)
    assert circuits.full_ov(made, 0, 1).adapters == ("default",)
    made, expected = beside_merged(adapted("llama", lora(["v_proj"], modules_to_save=["lm_head", "input_layernorm"])))
    scores = [tlens.attribute(model, some_tokens(), target=5).scores for model in (made, expected)]
    assert close(*scores, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        peft.VeraConfig(target_modules=["q_proj", "v_proj"], r=2),
        peft.LoHaConfig(target_modules=["v_proj", "gate_proj"], r=2),
        peft.OFTConfig(target_modules=["v_proj"], r=0, oft_block_size=4),
    ],
    ids=lambda config: type(config).__name__,
)
def test_other_adapters_that_are_a_change_of_the_weight_are_read(config):
    made, expected = beside_merged(adapted("llama", config))
    assert close(circuits.ov(made, 0, 1).AB, circuits.ov(expected, 0, 1).AB)
    scores = [tlens.attribute(model, some_tokens(), target=5).scores for model in (made, expected)]
    assert close(*scores, atol=1e-6)


def test_the_circuits_name_the_adapters_in_them(llamas):
    made, expected = llamas
    assert circuits.ov(made, 0, 1).adapters == ("default",)
    assert circuits.qk(made, 0, 1, offset=1).adapters == ("default",)
    assert circuits.virtual_head(made, [(0, 1), (1, 2)]).adapters == ("default",)
    assert circuits.svd_tokens(made, 0, 1).attrs["adapters"] == ["default"]
    assert circuits.ov(expected, 0, 1).adapters == ()


def test_adapters_put_on_after_wrapping_are_read():
    model = bridge(module_of("llama"))
    before = model(some_tokens())
    config = peft.LoraConfig(target_modules=r".*[qvo]_proj\._original_component", r=2, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model.original_model)
    model.to(torch.float64)
    assert not close(model(some_tokens()), before, 1e-3)
    assert float(tlens.attribute(model, some_tokens(), target=5).gap.max()) < 1e-6


# ------------------------------------------------------------------ several adapters, switched


def two_adapters():
    model = adapted("llama", lora(LLAMA))
    model.add_adapter("other", lora(["v_proj", "o_proj"]))
    model.to(torch.float64)
    model.set_adapter("other")
    drawn(model)
    model.set_adapter("default")
    return model


def test_the_adapters_that_are_active_are_read():
    model = two_adapters()
    copies = {name: copy.deepcopy(model) for name in ("default", "other", "both")}
    whole = bridge(model.get_base_model())
    seen = {}
    for name, one in copies.items():
        names = ["default", "other"] if name == "both" else [name]
        one.base_model.set_adapter(names)
        model.base_model.set_adapter(names)
        seen[name] = circuits.ov(whole, 0, 1)
        assert seen[name].adapters == tuple(names)
        assert close(seen[name].AB, circuits.ov(bridge(one.merge_and_unload()), 0, 1).AB)
    assert not close(seen["default"].AB, seen["other"].AB, 1e-3)
    with model.disable_adapter():
        plain = circuits.ov(whole, 0, 1)
        assert plain.adapters == ()
        assert close(plain.B, circuits.ov(whole, 0, 1).B)
    assert not close(plain.AB, seen["both"].AB, 1e-3)


@pytest.mark.parametrize("change", ["switch", "scale", "merge", "disable"])
def test_a_pass_notices_that_adapters_were_switched(change):
    model = two_adapters()
    whole = bridge(model.get_base_model())
    frozen = tlens.freeze(whole, some_tokens())
    layers = [module for module in model.modules() if hasattr(module, "scale_layer")]
    if change == "switch":
        model.set_adapter("other")
    elif change == "scale":
        layers[0].scale_layer(0.5)
    elif change == "merge":
        model.merge_adapter()
    else:
        layers[0].enable_adapters(False)
    with pytest.raises(FrozenModelError, match="adapters"):
        frozen.operator().target(5)
    again = tlens.attribute(whole, some_tokens(), target=5)
    assert float(again.gap.max()) < 1e-6
    assert again.provenance["adapters"] == ("other" if change == "switch" else "default")


def test_merged_adapters_are_in_the_weights():
    model = adapted("llama", lora(LLAMA))
    whole = bridge(model.get_base_model())
    before = circuits.ov(whole, 0, 1).AB
    model.merge_adapter()
    assert close(circuits.ov(whole, 0, 1).AB, before)
    assert circuits.ov(whole, 0, 1).adapters == ("default",)


# ------------------------------------------------------------------ what is not read is refused


@pytest.mark.parametrize(
    ("family", "target"),
    [("gpt2", "c_attn"), ("neox", "query_key_value"), ("phi3", "qkv_proj"), ("phi3", "gate_up_proj")],
)
def test_adapters_that_a_bridge_runs_without_are_refused(family, target):
    """A Bridge splits joint projections when it wraps a model, and leaves their adapters behind."""
    model = bridge(adapted(family, lora([target])).get_base_model())
    with pytest.raises(UnsupportedModelError, match=rf"{target} has adapters \(default\)"):
        tlens.freeze(model, some_tokens())
    if target != "gate_up_proj":
        with pytest.raises(UnsupportedModelError, match="merge_and_unload"):
            circuits.ov(model, 0, 1)


def test_adapters_of_experts_are_refused():
    config = lora(["v_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    model = bridge(adapted("mixtral", config).get_base_model())
    with pytest.raises(UnsupportedModelError, match="experts have adapters"):
        tlens.freeze(model, some_tokens())


def test_active_dropout_is_refused():
    model = bridge(adapted("llama", lora(LLAMA, lora_dropout=0.5)).get_base_model()).train()
    with pytest.raises(InvalidInputError, match="eval"):
        tlens.freeze(model, some_tokens())
    with pytest.raises(UnsupportedModelError, match=r"attn\.o .*model\.eval"):
        circuits.ov(model, 0, 1)


def test_nothing_is_written_beside_adapters(llamas):
    for write in (compress.head_weights, lambda model, layer: compress.plan(model, ranks=2, layers=[layer])):
        with pytest.raises(UnsupportedModelError, match=r"self_attn\.q_proj has adapters \(default\)"):
            write(llamas[0], 0)


def test_a_peft_model_is_told_what_to_wrap():
    with pytest.raises(UnsupportedModelError, match="get_base_model"):
        tlens.freeze(adapted("llama", lora(["v_proj"])), some_tokens())


@pytest.mark.parametrize("factor", [1.5, 1.0])
def test_a_torch_hook_on_a_layer_is_compared(factor):
    """A hook that changes what the layer gives is refused by name; one that only looks is not."""
    module = module_of("llama")
    module.model.layers[0].self_attn.v_proj.register_forward_hook(lambda layer, given, made: made * factor)
    model = bridge(module)
    if factor == 1.0:
        assert circuits.ov(model, 0, 1).AB.shape == (16, 16)
        return
    for question in (lambda: circuits.ov(model, 0, 1), lambda: tlens.freeze(model, some_tokens())):
        with pytest.raises(UnsupportedModelError, match=r"attn\.v .*differs from r·W \+ b by 5\.0e-01"):
            question()


def test_a_layer_of_another_class_is_compared():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Same(nn.Linear):
        pass

    assert not is_plain(Same(4, 3))
    assert read_linear(Same(4, 3), "v", refuse).weight.shape == (4, 3)
    with pytest.raises(UnsupportedModelError, match="Doubled"):
        read_linear(Doubled(4, 3), "v", refuse)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    assert close(read_linear(normed, "v", refuse).weight, normed.weight.T.detach())
    patched = nn.Linear(4, 3)
    patched.forward = lambda x: torch.tanh(nn.functional.linear(x, patched.weight))
    with pytest.raises(UnsupportedModelError, match="not its weight"):
        read_linear(patched, "v", refuse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_half_precision_hides_is_compared_in_float32(dtype):
    """One channel of 32 is off by two hundredths, and it is the smallest."""

    class Off(nn.Linear):
        def forward(self, x):
            output = super().forward(x)
            return torch.cat([output[..., :-1], self.factor * output[..., -1:]], dim=-1)

    layer = Off(16, 32).to(dtype)
    layer.weight.data[-1] *= 0.1
    layer.bias.data[-1] *= 0.1
    layer.factor = 1.0
    assert read_linear(layer, "v", refuse).weight.dtype == dtype
    layer = Off(16, 32).to(dtype)
    layer.factor = 1.02
    with pytest.raises(UnsupportedModelError, match=r"differs from r·W \+ b by 2\.0e-02"):
        read_linear(layer, "v", refuse)


class Larger(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return 1.1 * weight + 0.01


@pytest.mark.parametrize("name", [name for name in ("hooked/rms", "hooked/ln", "bridge/gpt2") if name in model_names()])
def test_a_norm_with_a_parametrised_gain(name):
    """torch refuses to copy such a module."""
    model = tiny_model(name)
    for block in model.blocks:
        norm = block.ln1 if name.startswith("hooked/") else block.ln1.original_component
        gain = "w" if name.startswith("hooked/") else "weight"
        nn.utils.parametrize.register_parametrization(norm, gain, Larger(), unsafe=True)
    tokens = some_tokens()
    frozen = tlens.freeze(model, tokens)
    with torch.no_grad():
        live = model(tokens)[:, -1:, 5]
    assert close(tlens.attribute(frozen, 5).total, live)


def test_a_layer_is_compared_once_for_its_weights():
    calls = []
    layer = nn.Linear(4, 3)
    layer.register_forward_hook(lambda *given: calls.append(1))
    for _ in range(3):
        read_linear(layer, "v", refuse)
    assert len(calls) == 1
    with torch.no_grad():
        layer.weight.mul_(2)
    read_linear(layer, "v", refuse)
    assert len(calls) == 2


# ------------------------------------------------------------------ gates that a hook changes

GATED = [name for name in ("bridge/llama", "bridge/gemma2", "bridge/phi3", "bridge/jamba", "hooked/gated")
         if name in model_names()]  # fmt: skip


@pytest.mark.parametrize("name", GATED)
def test_rules_that_go_through_the_gate_compare_it(name):
    """A hook on the gate passes under the default rule, which holds it; the others would go through other weights."""
    model, tokens = tiny_model(name), some_tokens()
    frozen = tlens.freeze(model, tokens)
    for rule in tlens.FROZEN_RULES[1:]:
        assert float(frozen.operator(rule=rule).target(5).gap.max()) < 1e-6
    model.add_hook("blocks.0.mlp.hook_pre", lambda gate, hook: gate * 1.3)
    try:
        frozen = tlens.freeze(model, tokens)
        assert float(frozen.operator().target(5).gap.max()) < 1e-6
        for rule in tlens.FROZEN_RULES[1:]:
            with pytest.raises(UnsupportedModelError, match=r"blocks\.0\.mlp.*gate.*relative error \d\.\de-01"):
                frozen.operator(rule=rule).target(5)
        for method in ("ff-ig", "relp"):
            with pytest.raises(UnsupportedModelError, match=r"gate|no softmax attention"):
                tlens.attribute(frozen, method=method, **({"target": 5} if method == "relp" else {}))
    finally:
        model.reset_hooks()


# ------------------------------------------------------------------ half precision


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "opt", "bert"])
def test_adapters_beside_half_precision_weights(family, adapters):
    """Biases and attention too; a small adapter is not rounded away."""
    module = module_of(family).to(torch.bfloat16)
    model = drawn(peft.get_peft_model(module, lora(TARGETS[family])))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(adapters)
    whole = bridge(model.get_base_model())
    frozen = tlens.freeze(whole, some_tokens())
    for method in ("tensorlens", "relp", "decompx", "alti"):
        options = {} if method == "alti" else {"target": 5}
        assert bool(torch.isfinite(tlens.attribute(frozen, method=method, **options).scores).all())
    for layer in model.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(1e-2)
    small = circuits.ov(whole, 0, 1).AB
    with model.disable_adapter():
        none = circuits.ov(whole, 0, 1).AB
    assert small.dtype == torch.float32
    assert 1e-6 < float((small - none.float()).abs().max()) < 2e-2  # far above the rounding of float32


@pytest.mark.parametrize("family", ["gpt2", "opt", "bert", "gemma2", "phi"])
def test_norms_in_float32_beside_bfloat16_weights(family):
    module = module_of(family).to(torch.bfloat16)
    for name, parameter in module.named_parameters():
        if any(word in name.lower() for word in ("norm", "ln_")):
            parameter.data = parameter.data.float()
    model = bridge(module)
    frozen = tlens.freeze(model, some_tokens())
    for method in ("tensorlens", "decompx"):
        assert bool(torch.isfinite(tlens.attribute(frozen, method=method, target=5).scores).all())
    assert float(frozen.operator().target(5).gap.max()) < 0.03


@pytest.mark.parametrize("name", ["v_proj", "gate_proj"])
def test_packed_weights_are_refused_by_name(name):
    from transformers.integrations.finegrained_fp8 import FP8Linear

    module = module_of("llama").to(torch.bfloat16)
    owner = module.model.layers[0].self_attn if name == "v_proj" else module.model.layers[0].mlp
    old = getattr(owner, name)
    packed = FP8Linear(old.in_features, old.out_features, block_size=(8, 8))
    packed.weight.data = old.weight.data.to(torch.float8_e4m3fn)
    packed.weight_scale_inv.data.fill_(0.5)
    setattr(owner, name, packed)
    model = bridge(module)
    with pytest.raises(UnsupportedModelError, match=r"(attn\.v|mlp\.gate) .*float8.*dequantize"):
        tlens.freeze(model, some_tokens())
    if name == "v_proj":
        with pytest.raises(UnsupportedModelError, match=r"attn\.v .*float8"):
            circuits.ov(model, 0, 1)


def test_offloaded_weights_with_adapters(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    made, expected = beside_merged(adapted("llama", lora(LLAMA)))
    accelerate.disk_offload(made.original_model, tmp_path, execution_device="cpu")
    scores = [tlens.attribute(model, some_tokens(), target=5).scores for model in (made, expected)]
    assert close(*scores, atol=1e-6)
    assert close(circuits.ov(made, 0, 1).AB, circuits.ov(expected, 0, 1).AB)


# ------------------------------------------------------------------ layers of a class that nobody knows


class OwnLoRA(nn.Module):
    """An adapter as people write it themselves; `bend` makes it something that is no linear layer."""

    def __init__(self, base_layer, rank=2, bend=0.0):
        super().__init__()
        self.base_layer = base_layer
        d_out, d_in = (
            base_layer.weight.shape if isinstance(base_layer, nn.Linear) else base_layer.base_layer.weight.shape
        )
        self.A = nn.Parameter(torch.randn(d_in, rank, dtype=torch.float64) * 0.3)
        self.B = nn.Parameter(torch.randn(rank, d_out, dtype=torch.float64) * 0.3)
        self.dropout = nn.Dropout(0.5)
        self.scaling = 1.5
        self.bend = bend

    def forward(self, x):
        change = self.dropout(x) @ self.A @ self.B
        return self.base_layer(x) + self.scaling * (change + self.bend * change.tanh())

    def merged(self):
        base = self.base_layer.merged() if isinstance(self.base_layer, OwnLoRA) else self.base_layer
        base.weight.data += self.scaling * (self.A @ self.B).T
        return base


def with_own_adapters(nested=False, **options):
    torch.manual_seed(0)
    module = module_of("llama")
    for layer in module.model.layers:
        for owner, part in ((layer.self_attn, "v_proj"), (layer.self_attn, "o_proj"), (layer.mlp, "gate_proj")):
            wrapped = OwnLoRA(getattr(owner, part), **options)
            setattr(owner, part, OwnLoRA(wrapped) if nested else wrapped)
    merged = copy.deepcopy(module)
    for layer in merged.model.layers:
        for owner, part in ((layer.self_attn, "v_proj"), (layer.self_attn, "o_proj"), (layer.mlp, "gate_proj")):
            setattr(owner, part, getattr(owner, part).merged())
    return bridge(module.eval()), bridge(merged.eval())


@pytest.mark.parametrize("nested", [False, True])
def test_an_adapter_of_an_unknown_class_is_read_by_what_it_does(nested):
    made, expected = with_own_adapters(nested)
    assert close(circuits.ov(made, 0, 1).AB, circuits.ov(expected, 0, 1).AB)
    for activation in tlens.FROZEN_RULES:
        scores = [tlens.freeze(m, some_tokens()).operator(rule=activation).target(5).scores for m in (made, expected)]
        assert close(*scores, atol=1e-6)  # Llama's own norms compute in float32


def test_an_adapter_of_an_unknown_class_that_is_not_linear_is_refused_by_name():
    model, _ = with_own_adapters(bend=1.0)
    with pytest.raises(UnsupportedModelError, match=r"v_proj|o_proj|W_V|W_O|OwnLoRA"):
        circuits.ov(model, 0, 1)
