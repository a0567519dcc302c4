"""Configurations of the tiny models: HookedTransformer's options, and Hugging Face's by family.

Families some of whose parts are held as a whole are in `tensorlens_tl.testing.families`, models of images and sound in
`tensorlens_tl.testing.signals`.
"""

from tensorlens_tl.testing.families import Family, Options, whole_families

VOCABULARY = 48
CONTEXT = 24
WIDTH = 16
HEADS = 4
LAYERS = 2

# --------------------------------------------------------------------------- HookedTransformer, 3.9

HOOKED: dict[str, Options] = {
    "ln": {"normalization_type": "LN", "act_fn": "gelu"},
    "lnpre": {"normalization_type": "LNPre", "act_fn": "gelu_new"},
    "rms": {"normalization_type": "RMS", "act_fn": "relu"},
    "rmspre": {"normalization_type": "RMSPre", "act_fn": "silu"},
    "no-norm": {"normalization_type": None, "act_fn": "gelu"},
    "attn-only": {"normalization_type": "LN", "attn_only": True},
    "attn-only-no-norm": {"normalization_type": None, "attn_only": True},
    "parallel": {"normalization_type": "LN", "parallel_attn_mlp": True, "act_fn": "gelu_new"},
    "gated": {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu"},
    "gqa": {"normalization_type": "RMS", "n_key_value_heads": 2, "gated_mlp": True, "act_fn": "gelu"},
    "gqa-ungrouped": {
        "normalization_type": "LN",
        "n_key_value_heads": 2,
        "ungroup_grouped_query_attention": True,
        "act_fn": "gelu",
    },
    "rotary": {"normalization_type": "LN", "positional_embedding_type": "rotary", "rotary_dim": 4, "act_fn": "gelu"},
    "alibi": {"normalization_type": "LN", "positional_embedding_type": "alibi", "act_fn": "gelu"},
    "shortformer": {"normalization_type": "LN", "positional_embedding_type": "shortformer", "act_fn": "gelu"},
    "sandwich": {"normalization_type": "RMS", "use_normalization_before_and_after": True, "act_fn": "gelu_new"},
    "post-only": {"normalization_type": "RMS", "original_architecture": "Olmo2ForCausalLM", "act_fn": "silu"},
    "soft-caps": {
        "normalization_type": "RMS",
        "attn_scores_soft_cap": 2.0,
        "output_logits_soft_cap": 3.0,
        "act_fn": "gelu",
    },
    "qk-norm": {"normalization_type": "RMS", "n_key_value_heads": 2, "use_qk_norm": True, "act_fn": "silu"},
    "sinks": {"normalization_type": "RMS", "use_attention_sinks": True, "act_fn": "silu"},
    "local": {
        "normalization_type": "LN",
        "use_local_attn": True,
        "attn_types": ["global", "local"],
        "window_size": 2,
        "act_fn": "gelu",
    },
    "bidirectional": {"normalization_type": "LN", "attention_dir": "bidirectional", "act_fn": "gelu"},
    "experts": {
        "normalization_type": "RMS",
        "num_experts": 4,
        "experts_per_token": 2,
        "norm_topk_prob": True,
        "gated_mlp": True,
        "act_fn": "silu",
    },
    "gpt-oss": {  # biases in experts, both halves clamped, the softmax over the choices alone
        "normalization_type": "RMS",
        "num_experts": 4,
        "experts_per_token": 2,
        "gated_mlp": True,
        "use_attention_sinks": True,
        "original_architecture": "GptOssForCausalLM",
        "act_fn": "silu",
    },
}

HOOKED_T5: Options = {
    "act_fn": "relu",
    "positional_embedding_type": "relative_positional_bias",
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "attention_dir": "bidirectional",
    "use_attn_scale": False,
    "tie_word_embeddings": False,
    "decoder_start_token_id": 1,
}
"""A HookedEncoderDecoder's, 3.9."""

# --------------------------------------------------------------------------- TransformerBridge, 3.9 and 4.x

_SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
    "max_position_embeddings": CONTEXT,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_SMALL, **_TOKENS, "num_key_value_heads": 2, "head_dim": 4}
_LOCAL = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}

_WIDTHS = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, **_TOKENS}
_SCANNED = {**_WIDTHS, "state_size": 6}
_DELTA = {
    **_GROUPED,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mlp_only_layers": [0, 1],
}
_MIXERS: dict[str, Family] = {
    "mamba": ("MambaConfig", "MambaForCausalLM", {**_SCANNED, "time_step_rank": 3}),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", {**_SCANNED, "num_heads": 4, "head_dim": 8, "n_groups": 2}),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {**_GROUPED, "mamba_d_state": 6, "mamba_dt_rank": 3, "num_experts": 1, "attn_layer_offset": 1},
    ),
    "falcon-h1": (  # a mixer beside attention, and constants beside matrices
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **_GROUPED,
            "mamba_d_ssm": 16,
            "mamba_n_heads": 4,
            "mamba_d_head": 4,
            "mamba_d_state": 6,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "attention_in_multiplier": 0.8,
            "attention_out_multiplier": 1.3,
            "key_multiplier": 0.6,
            "ssm_out_multiplier": 0.7,
            "mlp_multipliers": [0.9, 1.4],
            "lm_head_multiplier": 0.5,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**_GROUPED, "layer_types": ["conv", "full_attention"], "conv_bias": True},
    ),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _DELTA),
    "rwkv": ("RwkvConfig", "RwkvForCausalLM", {**_WIDTHS, "intermediate_size": 24, "rescale_every": 1}),
}
"""State-space layers, short convolutions and the gated delta rule in place of attention, in one layer or in both."""

_OPT: Options = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "ffn_dim": 24,
    "max_position_embeddings": CONTEXT,
    "word_embed_proj_dim": WIDTH,
    "dropout": 0.0,
    **_TOKENS,
}

BRIDGE: dict[str, Family] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCABULARY,
            "n_positions": CONTEXT,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_inner": 24,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_SMALL, **_TOKENS}),
    "neox-sequential": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {**_SMALL, **_TOKENS, "use_parallel_residual": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_GROUPED, "sliding_window": 3}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_GROUPED}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _GROUPED),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", _GROUPED),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_GROUPED, **_LOCAL, "query_pre_attn_scalar": 4}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_GROUPED, **_LOCAL, "query_pre_attn_scalar": 4}),
    "phi": ("PhiConfig", "PhiForCausalLM", {**_SMALL, **_TOKENS, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {**_SMALL, **_TOKENS, "num_key_value_heads": 2}),
    "gptj": (
        "GPTJConfig",
        "GPTJForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "n_positions": CONTEXT,
            "n_embd": WIDTH,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_inner": 24,
            "rotary_dim": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", _OPT),
    "opt-350m": (  # norms after the sums, and a narrower embedding
        "OPTConfig",
        "OPTForCausalLM",
        {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 12},
    ),
    **_MIXERS,
    "bert": ("BertConfig", "BertForMaskedLM", {**_SMALL, **_NO_DROPOUT}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**_SMALL, **_NO_DROPOUT, "pad_token_id": 0}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**_SMALL, **_TOKENS, "num_key_value_heads": 2}),
    **whole_families(_GROUPED, _LOCAL),
}

_START = {**_TOKENS, "decoder_start_token_id": 1}
_BART: Options = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "max_position_embeddings": CONTEXT,
    "dropout": 0.0,
    **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")},
    **_START,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": WIDTH // HEADS,
    "d_ff": 24,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "relative_attention_num_buckets": 8,
    "dropout_rate": 0.0,
    **_START,
}
_T5_GEMMA = {**_GROUPED, **_LOCAL, "query_pre_attn_scalar": 4, "dropout_rate": 0.0}

ENCODER_DECODER: dict[str, Family] = {
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART),
    "marian": ("MarianConfig", "MarianMTModel", {**_BART, "decoder_vocab_size": VOCABULARY}),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", _BART),
    "t5gemma": (
        "T5GemmaConfig",
        "T5GemmaForConditionalGeneration",
        {"encoder": _T5_GEMMA, "decoder": _T5_GEMMA, "vocab_size": VOCABULARY, "dropout_rate": 0.0, **_START},
    ),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "t5-gated": (
        "T5Config",
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
BRIDGE |= ENCODER_DECODER
