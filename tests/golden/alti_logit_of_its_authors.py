"""Writes `alti_logit_gpt2.npz` and `alti_logit_opt.npz`: what the authors' own code gives for two tiny random models.

Run it in a clone of https://github.com/mt-upc/logit-explanations, with torch, transformers and pyaml_env; the tests
only read the files. The models have random biases and gains, and their weights are kept beside the numbers. The 1e-6
that torch adds to every component of a distance is left out.

    python <here>/tests/golden/alti_logit_of_its_authors.py
"""

import functools
import sys
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path.cwd()))
from src import contributions  # type: ignore[import-not-found]

TOKENS = [5, 9]
SIZES = {
    "gpt2": {"n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 4},
    "opt": {
        "max_position_embeddings": 32, "hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 3,
        "num_attention_heads": 4, "ffn_dim": 24,
    },
}  # fmt: skip
MODELS = {"gpt2": ("GPT2Config", "GPT2LMHeadModel"), "opt": ("OPTConfig", "OPTForCausalLM")}


def random_model(name):
    """Weights large enough for every part to matter, kept as float32 and run as float64."""
    torch.manual_seed(0)
    config, model = (getattr(transformers, part) for part in MODELS[name])
    model = model(config(vocab_size=48, attn_implementation="eager", use_cache=False, **SIZES[name]))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1 and bool((parameter == 1).all())))
    return model.double().eval()


def updates(model, tokens):
    """Each layer's part of the difference of two logits, by input token, and what is no attention's."""
    wrapped = contributions.ModelWrapper(model)
    _, hidden, attention = wrapped({"input_ids": tokens})
    logits, modules, alti = wrapped.get_logit_contributions(hidden, attention, TOKENS)
    mixing = alti["layerwise_contributions"] + alti["attn_res_outputs"].norm(p=1, dim=-1)[..., None]
    mixing = mixing.clamp_min(0) / mixing.clamp_min(0).sum(-1, keepdim=True)
    rolled, made = torch.eye(tokens.shape[1]).to(mixing), []
    for layer, given in zip(mixing, logits["aff_x_j"], strict=True):
        made.append((given[-1, 0] - given[-1, 1]) @ rolled)
        rolled = layer @ rolled
    rest = [modules["init_logit"], modules["lnf_bias"], *modules["mlp_logit_layers"], *modules["b_o_logits_layers"]]
    rest = sum(part[0] - part[1] for part in rest)
    return {"layers": torch.stack(made).detach().numpy(), "rest": rest.detach().numpy()}


def main():
    contributions.F.pairwise_distance = functools.partial(torch.nn.functional.pairwise_distance, eps=0.0)
    for name in MODELS:
        model = random_model(name)
        tokens = torch.randint(3, 48, (1, 9), generator=torch.Generator().manual_seed(1))
        kept = {f"weights.{key}": value.to(torch.float32).numpy() for key, value in model.state_dict().items()}
        path = Path(__file__).parent / f"alti_logit_{name}.npz"
        np.savez_compressed(path, tokens=tokens.numpy(), **updates(model, tokens), **kept)


if __name__ == "__main__":
    main()
