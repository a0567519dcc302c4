"""Tiny configurations of Hugging Face families some of whose parts are held as a whole.

Mixtures of experts, latent and gated attention, norms and gates inside MLPs. Each has something that no other has.
"""

from typing import Any

Options = dict[str, Any]
"""A config's options."""

Family = tuple[str, str, Options]
"""The names of a config class and of an architecture, and the config's options."""


def whole_families(grouped: Options, local: Options) -> dict[str, Family]:
    """The families by name.

    Args:
        grouped: options of a tiny model with grouped attention.
        local: options that make its first layer attend locally.
    """
    narrow = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
    routed = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return {
        "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**grouped, **routed}),
        "qwen2-moe": (  # one layer dense, the other with a shared expert that has a gate
            "Qwen2MoeConfig",
            "Qwen2MoeForCausalLM",
            {**grouped, **narrow, "num_experts": 4, "shared_expert_intermediate_size": 12, "mlp_only_layers": [0]},
        ),
        "gpt-oss": (  # biases in experts, activations that are clamped on both sides, attention sinks
            "GptOssConfig",
            "GptOssForCausalLM",
            {**grouped, **routed, **local, "swiglu_limit": 0.4},
        ),
        "llama4": (  # the routing scales what an expert reads
            "Llama4TextConfig",
            "Llama4ForCausalLM",
            {
                **grouped,
                **routed,
                "intermediate_size_mlp": 24,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 8,
            },
        ),
        "deepseek-v3": (  # latent attention; the first layer dense
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            {
                **grouped,
                **narrow,
                "num_key_value_heads": 4,
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "kv_lora_rank": 6,
                "q_lora_rank": 8,
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 4,
                "v_head_dim": 6,
            },
        ),
        "granite-moe": (  # branches and logits multiplied by constants
            "GraniteMoeConfig",
            "GraniteMoeForCausalLM",
            {
                **grouped,
                **routed,
                "residual_multiplier": 0.3,
                "attention_multiplier": 0.2,
                "embedding_multiplier": 3.0,
                "logits_scaling": 4.0,
            },
        ),
        "afmoe": (  # a gate of what heads give, and norms on both sides of sublayers
            "AfmoeConfig",
            "AfmoeForCausalLM",
            {
                **grouped,
                **narrow,
                **local,
                "sliding_window": 8,
                "num_experts": 4,
                "num_dense_layers": 1,
                "num_shared_experts": 1,
            },
        ),
        "jetmoe": (  # attention heads that are chosen as experts are
            "JetMoeConfig",
            "JetMoeForCausalLM",
            {**grouped, **routed, "num_local_experts": 3, "kv_channels": 4},
        ),
        "bitnet": ("BitNetConfig", "BitNetForCausalLM", grouped),  # norms inside attention and MLP
        "modernbert-decoder": (  # gate and input in one matrix, a first norm that does nothing
            "ModernBertDecoderConfig",
            "ModernBertDecoderForCausalLM",
            {**grouped, "num_key_value_heads": 4, "cls_token_id": 1, "sep_token_id": 2},
        ),
        "gpt1": (  # norms after sublayers, none at the end
            "OpenAIGPTConfig",
            "OpenAIGPTLMHeadModel",
            {
                "vocab_size": grouped["vocab_size"],
                "n_positions": grouped["max_position_embeddings"],
                "n_embd": grouped["hidden_size"],
                "n_layer": grouped["num_hidden_layers"],
                "n_head": grouped["num_attention_heads"],
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            },
        ),
    }
