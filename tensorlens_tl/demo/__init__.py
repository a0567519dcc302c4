"""The embedded language model: GPT-2 architecture, 4 layers, width 128, trained by `tensorlens_tl.demo.train`.

It reads Python documentation and has induction heads. Everything is on disk; nothing is downloaded.
"""

import json
from pathlib import Path
from typing import Any

import torch

from tensorlens_tl.errors import InvalidInputError

MODEL_FOLDER = Path(__file__).parent / "model"
PROMPT = "If the module is not found, a ModuleNotFoundError is raised. If the file is not found, a FileNotFoundError is"
"""The sentence of the demo."""


def held_out_text() -> list[str]:
    """The documents the model was not trained on (the standard library differs between Python versions)."""
    return json.loads((MODEL_FOLDER / "held_out.json").read_text(encoding="utf-8"))


def load_demo_model(
    kind: str | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    folder: Path | str = MODEL_FOLDER,
) -> Any:
    """The embedded model, with its raw (unfolded, uncentred) weights, in eval mode.

    Args:
        kind: ``"hooked"`` for a HookedTransformer (TransformerLens 3.9), ``"bridge"`` for a TransformerBridge (3.9 and
            4.x); None takes the first that is there.
        dtype: of the weights.
        folder: where the model lies, in Hugging Face format.

    Raises:
        InvalidInputError: no such kind, or HookedTransformer asked for on TransformerLens 4.
    """
    from transformers import AutoTokenizer

    try:
        from transformer_lens import HookedTransformer
    except ImportError:
        HookedTransformer = None
    if kind not in (None, "hooked", "bridge"):
        raise InvalidInputError(f"load_demo_model: kind={kind!r}; use 'hooked' or 'bridge'.")
    if kind == "hooked" and HookedTransformer is None:
        raise InvalidInputError(
            "load_demo_model: TransformerLens 4 has no HookedTransformer; use kind='bridge', or transformer-lens 3.9."
        )
    weights = _gpt2(Path(folder), dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if kind == "bridge" or HookedTransformer is None:
        from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

        model = build_bridge_from_module(
            weights, "GPT2LMHeadModel", hf_config=weights.config, tokenizer=tokenizer, model_name="tensorlens-demo"
        )
        return model.eval()
    return _hooked(HookedTransformer, weights, tokenizer, dtype)


def _gpt2(folder: Path, dtype: torch.dtype) -> Any:
    """The Hugging Face module; read by hand because `from_pretrained` prints a progress bar."""
    from safetensors.torch import load_file
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config.from_pretrained(folder, attn_implementation="eager")
    module = GPT2LMHeadModel(config)
    module.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # lm_head is tied to the embedding
    module.tie_weights()
    return torch.nn.Module.to(module, dtype=dtype).eval()


def _hooked(HookedTransformer: Any, weights: Any, tokenizer: Any, dtype: torch.dtype) -> Any:
    from transformer_lens import HookedTransformerConfig
    from transformer_lens.pretrained.weight_conversions.gpt2 import convert_gpt2_weights

    facts = weights.config
    config = HookedTransformerConfig(
        n_layers=facts.n_layer,
        d_model=facts.n_embd,
        n_ctx=facts.n_positions,
        n_heads=facts.n_head,
        d_head=facts.n_embd // facts.n_head,
        d_mlp=4 * facts.n_embd,
        d_vocab=facts.vocab_size,
        act_fn=facts.activation_function,
        eps=facts.layer_norm_epsilon,
        normalization_type="LN",
        model_name="tensorlens-demo",
        original_architecture="GPT2LMHeadModel",
        dtype=dtype,
        device="cpu",
        init_weights=False,
    )
    model = HookedTransformer(config, tokenizer=tokenizer, move_to_device=False)
    state = convert_gpt2_weights(weights, config)
    state.setdefault("unembed.b_U", torch.zeros(facts.vocab_size, dtype=dtype))
    model.load_and_process_state_dict(state, fold_ln=False, center_writing_weights=False, center_unembed=False)
    return model.eval()
