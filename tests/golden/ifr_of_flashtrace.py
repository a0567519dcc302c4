"""Writes `ifr_llama.npz` and `ifr_qwen2.npz`: the edges that FlashTrace finds in two tiny random models.

Run it where `flashtrace==0.1.1` is installed, with torch and transformers as it asks for them; the tests only read the
files. The models have random biases and gains, and their weights are kept beside the numbers. FlashTrace casts to
float32 before it takes distances, whatever the model's dtype is, and ends in float32; its own code runs here with these
casts made to float64, so that what is compared is the formula and not its rounding.

    python tests/golden/ifr_of_flashtrace.py
"""

from pathlib import Path

import numpy as np
import torch
from flashtrace.attribution import LLMIFRAttribution
from flashtrace.core import compute_ifr_for_all_positions
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
    "use_cache": False,
}
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}


def random_model(name):
    """Weights large enough for every part to matter, kept as float32 and run as float64."""
    torch.manual_seed(0)
    config_class, model_class = MODELS[name]
    model = model_class(config_class(**SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1 and bool((parameter == 1).all())))
    return model.double().eval()


def edges(model, tokens):
    """Per sink and layer: what tokens, heads, the residual, and the MLP give."""
    torch.Tensor.float = torch.Tensor.double
    peer = LLMIFRAttribution(model, None, show_progress=False)
    with torch.no_grad():
        cache, attentions, metadata, weights = peer._capture_model_state(tokens, torch.ones_like(tokens))
    found = compute_ifr_for_all_positions(
        cache=cache,
        attentions=attentions,
        weight_pack=weights,
        params=peer._build_ifr_params(metadata, tokens.shape[1]),
        return_layerwise=True,
        rotary_emb=metadata.rotary_emb,
    )
    made = {"total": found.token_importance_matrix.numpy()}
    for part in ("e_attn_tokens", "head_importance", "e_resid_attn", "e_ffn", "e_resid_ffn"):
        made[part] = np.array(
            [[np.asarray(getattr(layer, part)) for layer in sink] for sink in found.per_layer_results]
        )
    return made


def main():
    for name in MODELS:
        model = random_model(name)
        tokens = torch.randint(3, 48, (1, 9), generator=torch.Generator().manual_seed(1))
        kept = {f"weights.{key}": value.to(torch.float32).numpy() for key, value in model.state_dict().items()}
        path = Path(__file__).parent / f"ifr_{name}.npz"
        np.savez_compressed(path, tokens=tokens.numpy(), **edges(model, tokens), **kept)


if __name__ == "__main__":
    main()
