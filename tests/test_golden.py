"""The peers' own outputs (float64, one tiny BERT), map by map, to 1e-8; and where we differ, by how much and why."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl.algebra import Chain, Diagonal
from tensorlens_tl.layerwise import LocalLayer, add_residual, normalize_rows, product
from tensorlens_tl.methods.decompx import source_to_output
from tensorlens_tl.methods.norm import head_norms, mixing_ratio
from tensorlens_tl.models.activations import Coefficients

pytestmark = pytest.mark.numeric

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def frozen():
    transformers = importlib.import_module("transformers")
    safetensors = importlib.import_module("safetensors.torch")
    builder = importlib.import_module("transformer_lens.model_bridge.sources._bridge_builder")
    config = transformers.BertConfig.from_json_file(GOLDEN / "config.json")
    config._attn_implementation = "eager"
    module = transformers.BertForMaskedLM(config).double().eval()
    weights = safetensors.load_file(GOLDEN / "model.safetensors")
    weights = {name.removeprefix("bert."): w.double() for name, w in weights.items() if name.startswith("bert.")}
    missing, _ = module.bert.load_state_dict(weights, strict=False)
    assert not missing
    model = builder.build_bridge_from_module(module, "BertForMaskedLM", hf_config=config)
    batch = json.loads((GOLDEN / "inputs.json").read_text())["batch"]
    return tlens.freeze(
        model, batch["input_ids"], attention_mask=batch["attention_mask"], token_type_ids=batch["token_type_ids"]
    )


def golden(file):
    return {name: torch.from_numpy(array) for name, array in np.load(GOLDEN / f"{file}.npz").items()}


def agree(mine, theirs, tolerance=1e-8):
    assert mine.shape == theirs.shape
    assert float((mine - theirs).abs().max()) < tolerance * max(1.0, float(theirs.abs().max()))


def rollouts(maps):
    """The product after each layer."""
    return torch.stack([product(maps[: layer + 1]) for layer in range(len(maps))])


def test_it_is_the_same_model(frozen):
    reference = golden("hf_reference")
    for layer in range(4):
        agree(frozen.resid_pre(layer), reference["hidden_states"][layer])
    for layer in range(3):
        agree(frozen.pattern(layer), reference["attentions"][layer])


def test_kobayashi_2020(frozen):
    theirs = golden("kobayashi2020")
    locals_ = [LocalLayer(frozen, layer) for layer in range(3)]
    agree(torch.stack([layer.outputs.norm(dim=-1).mT for layer in locals_]), theirs["norm_fx"])
    agree(head_norms(frozen), theirs["norm_alpha_fx"])
    agree(tlens.attribute(frozen, method="norm").layers, theirs["norm_sum_alpha_fx"])


def test_kobayashi_2021(frozen):
    theirs = golden("kobayashi2021")
    agree(head_norms(frozen), theirs["head_attn_n"])
    for scope, name in (("attn", "attn_n"), ("attn_res", "attnres_n"), ("attn_res_ln", "attnresln_n")):
        agree(tlens.attribute(frozen, method="norm", scope=scope).layers, theirs[name])
        agree(mixing_ratio(frozen, scope), theirs[f"{name}_ratio"])


def test_globenc(frozen):
    theirs = golden("globenc")
    result = tlens.attribute(frozen, method="globenc")
    agree(result.layers, theirs["n_enc"])
    agree(result.scores, theirs["globenc_inmodel"])
    agree(rollouts(result.layers), theirs["globenc_rollout"])
    agree(mixing_ratio(frozen, "globenc"), theirs["n_enc_ratio"])
    agree(head_norms(frozen), theirs["head_attn_n"])
    for scope, name in (("attn", "attn_n"), ("attn_res", "attnres_n"), ("attn_res_ln", "attnresln_n")):
        agree(tlens.attribute(frozen, method="norm", scope=scope).layers, theirs[name])
        agree(mixing_ratio(frozen, scope), theirs[f"{name}_ratio"])


@pytest.mark.parametrize(("layer_map", "name"), [("attention", "w_fixedres"), ("norm:attn", "n_fixedres")])
def test_rollout_as_globenc_computes_it(frozen, layer_map, name):
    theirs = golden("globenc")
    result = tlens.attribute(frozen, method="rollout", layer_map=layer_map)
    agree(result.layers, theirs[name])
    agree(rollouts(result.layers), theirs[f"{name}_rollout"])
    agree(result.scores, theirs[f"{name}_rollout"][-1])


def test_attention_with_a_residual_by_mixing_ratio(frozen):
    """GlobEnc's W-Res: attention to the others scaled to the mixing ratio, the rest to the token itself."""
    theirs = golden("globenc")
    attention = tlens.attribute(frozen, method="attention").layers
    others = normalize_rows(attention * (1 - torch.eye(9, dtype=attention.dtype)))
    ratio = mixing_ratio(frozen, "globenc")
    maps = ratio[..., None] * others + torch.diag_embed(1 - ratio)
    agree(maps, theirs["w_res"])
    agree(rollouts(maps), theirs["w_res_rollout"])


def alti_vectors(frozen):
    layers = [LocalLayer(frozen, layer) for layer in range(3)]
    rows = [torch.cat([v for _, v in layer.vectors(layer.norms("ln1"), residual=True)]) for layer in layers]
    return torch.stack(rows).permute(0, 2, 3, 1, 4), torch.stack([layer.attended() for layer in layers])


@pytest.mark.parametrize(("distance", "order", "prefix"), [("l1", 1, "alti"), ("l2", 2, "alti_l2")])
def test_alti(frozen, distance, order, prefix):
    theirs = golden("alti")
    vectors, resultants = alti_vectors(frozen)
    agree(vectors, theirs["transformed_vectors"])
    agree(vectors.norm(dim=-1), theirs["transformed_vectors_norm"])
    agree(resultants, theirs["resultants"])

    # the original adds 1e-6 to every component inside its distance; with that, its numbers are ours
    def closeness(epsilon):
        away = (vectors - resultants[..., None, :] + epsilon).norm(p=order, dim=-1)
        return normalize_rows((resultants.norm(p=order, dim=-1)[..., None] - away).clamp_min(0)), -away

    peers, distances = closeness(1e-6)
    agree(distances, theirs["contributions" if order == 1 else "contributions_l2"])
    agree(peers, theirs[f"{prefix}_normalized"])
    agree(rollouts(peers), theirs[f"{prefix}_rollout"])

    result = tlens.attribute(frozen, method="alti", distance=distance)
    agree(result.layers, closeness(0.0)[0])
    assert 1e-9 < float((result.scores - theirs[f"{prefix}_rollout"][-1]).abs().max()) < 2e-5
    assert torch.allclose(result.scores.sum(-1), torch.ones(2, 9, dtype=torch.float64))


def test_altis_other_maps(frozen):
    theirs = golden("alti")
    norms = normalize_rows(tlens.attribute(frozen, method="norm", scope="attn_res_ln").layers)
    agree(norms, theirs["norm_normalized"])
    agree(rollouts(norms), theirs["norm_rollout"])
    agree(tlens.attribute(frozen, method="globenc").layers, theirs["transformed_vectors_norm2"])
    attention = tlens.attribute(frozen, method="attention").layers
    mine = rollouts(add_residual(attention, 0.5, frozen.mask))
    agree(mine, theirs["attn_rollout"].double(), 1e-6)  # theirs is float32
    layers = [LocalLayer(frozen, layer) for layer in range(3)]
    both = [torch.cat([v for _, v in x.vectors(x.norms("ln1", "ln2"), residual=True)]) for x in layers]
    vectors = torch.stack(both).permute(0, 2, 3, 1, 4)
    outputs = torch.stack([frozen.resid_pre(layer + 1) for layer in range(3)])
    agree(outputs, theirs["resultants2"])
    away = (vectors - outputs[..., None, :] + 1e-6).norm(p=1, dim=-1)
    agree(-away, theirs["contributions2"])
    closeness = normalize_rows((outputs.norm(p=1, dim=-1)[..., None] - away).clamp_min(0))
    agree(closeness, theirs["alti2_normalized"])
    agree(rollouts(closeness), theirs["alti2_rollout"])


VARIANTS = {
    "default": {"bias": "absdot"},
    "nobias": {"bias": "none"},
    "norm": {"bias": "norm"},
    "equal": {"bias": "equal"},
    "abssim": {"bias": "abssim"},
    "cls": {"bias": "cls"},
    "dot": {"bias": "dot"},
    "biastoken": {"bias": "token"},
    "gelu_la": {"bias": "absdot", "rule": "frozen-tangent"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_decompx(frozen, variant):
    theirs = golden("decompx")
    last = theirs.get(f"{variant}.aggregated_last")
    last = theirs[f"{variant}.aggregated"][-1] if last is None else last
    mine = tlens.attribute(frozen, method="decompx", aggregate="vector", **VARIANTS[variant])
    agree(mine.scores, last)
    norms = tlens.attribute(frozen, method="decompx", **VARIANTS[variant])
    agree(norms.scores, last.norm(dim=-1))


@pytest.mark.parametrize("variant", ["default", "nobias", "biastoken"])
def test_decompx_layer_by_layer(frozen, variant):
    theirs = golden("decompx")[f"{variant}.aggregated"]
    for layer in range(3):
        vectors = source_to_output(frozen, VARIANTS[variant]["bias"], layers=layer + 1)
        agree(vectors.permute(1, 2, 0, 3), theirs[layer])


def test_decompx_sums_to_the_models_output(frozen):
    for bias in ("absdot", "norm", "equal", "abssim", "dot", "cls", "token"):
        vectors = source_to_output(frozen, bias)
        agree(vectors.sum(0), frozen.output, 1e-9)


def test_integrated_gradients_in_closed_form(frozen):
    """ff-ig against Gauss–Legendre quadrature of the activation's derivative along the path from zero."""
    nodes, weights = np.polynomial.legendre.leggauss(60)
    nodes, weights = (nodes + 1) / 2, weights / 2
    scopes = {
        scope: tlens.attribute(frozen, method="ff-ig", scope=scope).layers
        for scope in ("atb", "atb_ff", "atb_ff_res_ln")
    }
    for number in range(3):
        layer, mlp = LocalLayer(frozen, number), frozen.view.blocks[number].mlp
        atb = torch.cat([v for _, v in layer.vectors(layer.norms("ln1"), residual=True)])
        z = frozen.capture.activations[frozen.points.blocks[number].pre]
        slope = torch.zeros_like(z)
        for node, weight in zip(nodes, weights, strict=True):
            leaf = (node * z).requires_grad_(True)
            slope += weight * torch.autograd.grad(mlp.activation(leaf).sum(), leaf)[0]
        ff = (atb @ mlp.W_in) * slope @ mlp.W_out
        out = Chain((Diagonal(torch.ones_like(z[..., :32])), frozen.maps.norm(number, "ln2"))).push(ff + atb)
        for scope, vectors in (("atb", atb), ("atb_ff", ff), ("atb_ff_res_ln", out)):
            agree(scopes[scope][number], vectors.norm(dim=-1).permute(1, 2, 0), 1e-9)


def test_scopes_that_are_other_methods(frozen):
    agree(
        tlens.attribute(frozen, method="ff-ig", scope="atb").layers,
        tlens.attribute(frozen, method="norm", scope="attn_res_ln").layers,
        1e-12,
    )


def test_decompx_with_its_relu_approximation(frozen):
    """The peer's third activation keeps what a ReLU would: no decomposition of this model, but the walk is the same."""
    theirs = golden("decompx")["relu.aggregated_last"]
    kept = dict(frozen.maps.cache.ratios)
    try:
        for layer in range(3):
            z = frozen.capture.activations[frozen.points.blocks[layer].pre]
            frozen.maps.cache.ratios[layer] = Coefficients((z > 0).to(z.dtype))
        agree(source_to_output(frozen).permute(1, 2, 0, 3), theirs)
    finally:
        frozen.maps.cache.ratios.clear()
        frozen.maps.cache.ratios.update(kept)
