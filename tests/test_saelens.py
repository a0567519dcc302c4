"""SAELens' own classes, with random weights: read as they are, and their `encode` and `decode` are what is explained.

Skipped where SAELens is not installed (``.ci/saelens`` makes an environment that has it).
"""

import pytest
import torch
from conftest import some_tokens
from test_circuits import token_logit
from test_features import own_stream, subtracting

import tensorlens_tl as tlens
from tensorlens_tl import circuits

sae_lens = pytest.importorskip("sae_lens")

WIDTH, FEATURES, HOOK = 16, 48, "blocks.1.hook_resid_pre"
KINDS = {
    "standard": {},
    "jumprelu": {},
    "topk": {"k": 6},
    "topk-rescaled": {"k": 6, "rescale_acts_by_decoder_norm": True},
    "abstopk": {"k": 6},
}
NORMALISED = ["none", "expected_average_only_in", "layer_norm", "constant_norm_rescale"]


def randomised(made):
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            drawn = 0.4 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_(drawn.abs() if name == "threshold" else drawn)
    return made


def built(kind, **changes):
    architecture = kind.partition("-")[0]
    metadata = sae_lens.saes.sae.SAEMetadata(**changes.pop("metadata", {"hook_name": HOOK}))
    cls, config = sae_lens.registry.get_sae_class(architecture)
    facts = {"d_in": WIDTH, "d_sae": FEATURES, "dtype": "float64", "device": "cpu", "metadata": metadata}
    return randomised(cls(config(**facts, **KINDS.get(kind, {}), **changes)))


def frozen_of(model_named, name):
    return tlens.freeze(model_named(name), some_tokens())


@pytest.mark.parametrize("name", ["hooked/ln", "bridge/gpt2", "bridge/llama", "bridge/phi"])
@pytest.mark.parametrize("normalise", NORMALISED)
@pytest.mark.parametrize("kind", KINDS)
def test_autoencoders(model_named, name, kind, normalise):
    frozen, dictionary = frozen_of(model_named, name), built(kind, normalize_activations=normalise)
    atol = 1e-6 if "llama" in name else 1e-9
    found = circuits.features(frozen, dictionary)
    x = own_stream(frozen, HOOK)
    active = dictionary.encode(x)
    assert torch.equal(found.index, active.nonzero())
    assert torch.allclose(found.reconstruction, dictionary.decode(active), atol=1e-9)
    terms = circuits.feature_effects(found, 5, 7)
    feature = int(active[0, 2].abs().argmax())
    assert float(terms.gap.max()) < atol
    assert float(circuits.feature_attribution(found, feature, query="all").gap.max()) < atol
    without = active.clone()
    without[0, 2, feature] = 0
    with torch.no_grad():  # a scale may pass from encode to decode: both see the same stream
        dictionary.encode(x)
        whole = dictionary.decode(active)
        dictionary.encode(x)
        vector = (whole - dictionary.decode(without))[0, 2]
    lost = token_logit(frozen) - token_logit(frozen, [subtracting(HOOK, vector, 0, 2)])
    assert abs(float(lost[0] - terms[f"F{feature}@2"][0, 0])) < atol


@pytest.mark.parametrize("kind", ["transcoder", "skip_transcoder", "jumprelu_transcoder"])
def test_transcoders(model_named, kind):
    frozen = frozen_of(model_named, "bridge/gpt2")
    said = {"hook_name": "blocks.0.mlp.hook_in", "hook_name_out": "blocks.0.hook_mlp_out"}
    dictionary = built(kind, d_out=WIDTH, apply_b_dec_to_input=False, metadata=said)
    found = circuits.features(frozen, dictionary)
    with torch.no_grad():
        assert torch.allclose(found.reconstruction, dictionary(own_stream(frozen, said["hook_name"])), atol=1e-9)
    assert float(circuits.feature_effects(found, 5, 7, query="all").gap.max()) < 1e-9
    assert float(circuits.feature_attribution(found, 3, query="all").gap.max()) < 1e-9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "Convert one of them"),
        ({"metadata": {"hook_name": "blocks.1.attn.hook_z"}}, "does not hold the residual stream"),
        ({"metadata": {}}, "does not say where it belongs"),
    ],
)
def test_what_does_not_fit(model_named, changes, message):
    changed = {"metadata": {"hook_name": HOOK}} | changes
    dictionary = built("standard", **{name: value for name, value in changed.items() if name != "dtype"})
    dictionary = dictionary.to(torch.float32) if "dtype" in changes else dictionary
    with pytest.raises(tlens.InvalidInputError, match=message):
        circuits.features(frozen_of(model_named, "bridge/gpt2"), dictionary)


def test_gated_autoencoders_are_refused(model_named):
    with pytest.raises(tlens.InvalidInputError, match="GatedSAE is gated"):
        circuits.features(frozen_of(model_named, "bridge/gpt2"), built("gated"))
