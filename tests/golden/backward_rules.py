"""Makes backward_rules.npz and backward_rules.safetensors: what lxt 2.1 and gim-explain 0.1.4 give on tiny models.

Run in two environments of their own, in this order:

    python backward_rules.py weights   # torch 2.13, transformers 4.57.6, lxt 2.1
    python backward_rules.py lxt       # the same
    python backward_rules.py gim       # torch 2.13, transformer-lens 3.9, gim-explain 0.1.4

lxt rewrites classes of transformers for good, so each model and rule runs in a process of its own. It has CP-LRP for
all of these but BERT. gim-explain 0.1.4 applies all its rules to a HookedTransformer only, so the weights are converted
to one (in a Hugging Face model either the shares of Q, K and V or the softmax's temperature have no effect, depending
on the attention implementation). The numbers are x · ∂logit/∂x at the first block's input, summed over its width,
float64, at the last query for token 5.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).parent
WEIGHTS, RESULTS = HERE / "backward_rules.safetensors", HERE / "backward_rules.npz"
TARGET = 5

COMMON = {"vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = COMMON | {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 24,
}  # fmt: skip
GROUPED = SMALL | {"num_key_value_heads": 2, "head_dim": 4}
GPT2 = COMMON | {
    "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 24, "n_positions": 24,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, "transformer.h.0"),
    "bert": ("BertConfig", "BertForMaskedLM", SMALL | NO_DROPOUT, "bert.encoder.layer.0"),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED, "model.layers.0"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED, "model.layers.0"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED, "model.layers.0"),
    "gemma3": (
        "Gemma3TextConfig", "Gemma3ForCausalLM",
        GROUPED | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, "model.layers.0",
    ),
}  # fmt: skip
LXT = [(family, rule) for rule in ("attnLRP", "cp_LRP") for family in MODELS if (family, rule) != ("bert", "cp_LRP")]
GIM = ("gpt2", "llama")


def tokens():
    """One prompt."""
    return torch.randint(3, 48, (1, 9), generator=torch.Generator().manual_seed(0))


def module(family, attention="eager"):
    """A Hugging Face model without its weights, in float64."""
    config_name, architecture, options, _ = MODELS[family]
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, config_name)(**options)
    config._attn_implementation = attention
    return getattr(modeling, architecture)(config).double().eval()


def with_weights(family, attention="eager"):
    """The model with the stored weights."""
    model = module(family, attention)
    stored = {
        k.removeprefix(family + "."): w.double() for k, w in load_file(WEIGHTS).items() if k.startswith(family + ".")
    }
    missing, _ = model.load_state_dict(stored, strict=False)
    assert set(missing) <= {"lm_head.weight", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}, missing
    model.tie_weights()
    return model


@torch.no_grad()
def make_weights():
    """Every parameter drawn afresh, gains around 1 and biases too, in numbers that float32 holds."""
    stored = {}
    for number, family in enumerate(MODELS):
        generator = torch.Generator().manual_seed(number)
        for name, parameter in module(family).named_parameters():
            spread = 0.3 if parameter.ndim < 2 else 1.2 / max(parameter.shape) ** 0.5
            spread = 1.0 if "emb" in name or ".wte" in name or ".wpe" in name else spread
            drawn = torch.randn(parameter.shape, generator=generator) * spread
            gain = parameter.ndim < 2 and name.endswith("weight") and family != "gemma3"  # Gemma stores gain − 1
            stored[f"{family}.{name}"] = drawn + 1 if gain else drawn
    save_file(stored, WEIGHTS)


def run_lxt(family, rule):
    """One model under one rule of lxt, in this process."""
    patching = importlib.import_module("lxt.efficient")
    rules = importlib.import_module(f"lxt.efficient.models.{family}")
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    patching.monkey_patch(modeling, getattr(rules, rule))
    model, seen = with_weights(family), []
    first = model.get_submodule(MODELS[family][3])

    def enter(block, args, kwargs):
        x = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_(True)
        seen.append(x)
        return ((x, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x})

    first.register_forward_pre_hook(enter, with_kwargs=True)
    logits = model(tokens(), use_cache=False).logits if family != "bert" else model(tokens()).logits
    logits[0, -1, TARGET].backward()
    return (seen[0] * seen[0].grad).sum(-1)[0].detach().numpy()


def run_gim(family):
    """One model under gim-explain's context, as a HookedTransformer."""
    lens = importlib.import_module("transformer_lens")
    convert = importlib.import_module("transformer_lens.pretrained.weight_conversions")
    gim = importlib.import_module("gim.context")
    of_llama = {
        "normalization_type": "RMS", "positional_embedding_type": "rotary", "rotary_dim": 4, "gated_mlp": True,
        "act_fn": "silu", "final_rms": True, "n_key_value_heads": 2, "rotary_adjacent_pairs": False, "eps": 1e-6,
    }  # fmt: skip
    config = lens.HookedTransformerConfig(
        n_layers=2, d_model=16, n_heads=4, d_head=4, d_mlp=24, n_ctx=24, d_vocab=48, dtype=torch.float64,
        **(of_llama if family == "llama" else {"normalization_type": "LN", "act_fn": "gelu_new"}),
    )  # fmt: skip
    model, source = lens.HookedTransformer(config), with_weights(family)
    model.load_state_dict(getattr(convert, f"convert_{family}_weights")(source, config), strict=False)
    model = model.double()
    own, other = (x.log_softmax(-1) for x in (source(tokens()).logits, model(tokens())))
    assert torch.allclose(own, other, atol=1e-5)
    seen = []

    def enter(x, hook):
        seen.append(x.detach().requires_grad_(True))
        return seen[0]

    with gim.GIM(model):
        model.run_with_hooks(tokens(), fwd_hooks=[("blocks.0.hook_resid_pre", enter)])[0, -1, TARGET].backward()
    return (seen[0] * seen[0].grad).sum(-1)[0].detach().numpy()


def main(what, *which):
    """Writes weights, or adds results to the file."""
    if what == "weights":
        return make_weights()
    if which:
        return np.save(which[-1], run_lxt(*which[:-1]) if what == "lxt" else run_gim(*which[:-1]))
    results = dict(np.load(RESULTS)) if RESULTS.exists() else {}
    for case in LXT if what == "lxt" else [(family,) for family in GIM]:
        made = HERE / "made.npy"
        subprocess.run([sys.executable, __file__, what, *case, str(made)], check=True)
        results[".".join((what, *case))] = np.load(made)
        made.unlink()
    return np.savez(RESULTS, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
