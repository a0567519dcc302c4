"""The tiny models of the census: a small config for every architecture that TransformerLens maps, and its kind.

A config is of the architecture's own class, with every size that it knows made small (`SMALL`); what an architecture
needs beside that is in `OVERRIDES`, and other shapes of its blocks in `VARIANTS`. `census_building` builds the models.
"""

from collections.abc import Callable, Mapping
from typing import Any

import transformers

WIDTH, VOCABULARY = 32, 61

# --------------------------------------------------------------------------- which kind of model a name is of

DENSE = "Dense decoders"
ENCODER = "Encoders"
EXPERTS = "Mixtures of experts"
STATE = "State space models and hybrids"
ENCODER_DECODER = "Encoder–decoders"
VISION = "Vision"
SOUND = "Sound"
MULTIMODAL = "Multimodal, run on text"
DIFFUSION = "Diffusion language models"
OTHER = "Other"

_NAMES = {
    ENCODER: "BertForMaskedLM RobertaForMaskedLM",
    EXPERTS: """
        AfmoeForCausalLM DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM Ernie4_5_MoeForCausalLM
        FlexOlmoForCausalLM Gemma4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM
        GptOssForCausalLM GraniteMoeForCausalLM JetMoEForCausalLM JetMoeForCausalLM LagunaForCausalLM Llama4ForCausalLM
        MiniMaxM2ForCausalLM MixtralForCausalLM OlmoeForCausalLM PhiMoEForCausalLM Qwen2MoeForCausalLM
        Qwen3MoeForCausalLM""",
    STATE: """
        BambaForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GraniteMoeHybridForCausalLM HyenaDNAForCausalLM
        JambaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Mamba2ForCausalLM MambaForCausalLM NemotronHForCausalLM
        OlmoHybridForCausalLM Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM RWKV7ForCausalLM
        RecurrentGemmaForCausalLM RwkvForCausalLM Zamba2ForCausalLM""",
    ENCODER_DECODER: """
        BartForConditionalGeneration BlenderbotForConditionalGeneration LEDForConditionalGeneration
        LongT5ForConditionalGeneration M2M100ForConditionalGeneration MBartForConditionalGeneration
        MT5ForConditionalGeneration MarianMTModel PegasusForConditionalGeneration
        SwitchTransformersForConditionalGeneration T5ForConditionalGeneration T5Gemma2ForConditionalGeneration
        T5GemmaForConditionalGeneration T5WithLMHeadModel""",
    VISION: "DeiTForImageClassification DeiTModel ViTForImageClassification ViTModel",
    SOUND: """
        ASTForAudioClassification HubertForCTC HubertModel Wav2Vec2ForCTC Wav2Vec2ForPreTraining Wav2Vec2Model""",
    MULTIMODAL: """
        AudioFlamingo3ForConditionalGeneration Emu3ForConditionalGeneration Florence2ForConditionalGeneration
        Gemma3ForConditionalGeneration Gemma3nForConditionalGeneration Gemma4ForConditionalGeneration
        Gemma4UnifiedForConditionalGeneration Glm4vForConditionalGeneration GlmAsrForConditionalGeneration
        Idefics3ForConditionalGeneration Llama4ForConditionalGeneration LlavaForConditionalGeneration
        LlavaNextForConditionalGeneration LlavaOnevisionForConditionalGeneration Mistral3ForConditionalGeneration
        MuseGlimmerForConditionalGeneration MusicFlamingoForConditionalGeneration Qwen2AudioForConditionalGeneration
        Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration Qwen3VLMoeForConditionalGeneration
        Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration""",
    DIFFUSION: "BD3LM DreamModel GiddForDiffusionLM LLaDA2MoeModelLM LLaDAModelLM",
    OTHER: "HrmTextForCausalLM OuroForCausalLM RavenForCausalLM",
}
_KIND = {name: kind for kind, names in _NAMES.items() for name in names.split()}
KINDS = (DENSE, *_NAMES)
"""Every kind, in the order of the page."""


def kind_of(name: str) -> str:
    """The kind of a name; what is listed nowhere is a dense decoder."""
    return _KIND.get(name, DENSE)


ALIASES = {
    "Gemma1ForCausalLM": "GemmaForCausalLM",
    "JetMoEForCausalLM": "JetMoeForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "NeoForCausalLM": "GPTNeoForCausalLM",
    "NeoXForCausalLM": "GPTNeoXForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "T5WithLMHeadModel": "T5ForConditionalGeneration",
}
"""Names of TransformerLens, or of old checkpoints, whose class transformers has under another name."""

# --------------------------------------------------------------------------- small configs

Overrides = Mapping[str, Any] | Callable[[], Any]
"""Fields of a config beside the small ones, or a function that makes all of it."""

SMALL = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "word_embed_proj_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "global_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 40),
    **dict.fromkeys(("n_inner", "d_ff", "mlp_dim"), 40),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 64),
    "vocab_size": VOCABULARY,
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("shared_intermediate_size", "expert_intermediate_size"), 24),
    **dict.fromkeys(("n_shared_experts", "moe_num_shared_experts", "n_group", "topk_group"), 1),
    "first_k_dense_replace": 1,
    # multi-head latent attention
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    # state space models, linear attention, local attention
    **dict.fromkeys(("state_size", "mamba_d_state", "mamba_n_heads", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_d_conv", "mamba_dt_rank", "mamba_chunk_size", "chunk_size"), 4),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "linear_num_value_heads"), 4),
    **dict.fromkeys(("mamba_expand", "linear_num_key_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    "mamba_n_groups": 1,
    # special tokens; nothing random
    "pad_token_id": 0,
    "bos_token_id": 1,
    **dict.fromkeys(("eos_token_id", "decoder_start_token_id", "forced_eos_token_id"), 2),
    **dict.fromkeys(("attention_probs_dropout_prob", "hidden_dropout_prob"), 0.0),
}


def small(config: type | str, **overrides: Any) -> Any:
    """A config with every known field small, the configs inside it likewise, and the overrides on top."""
    cls: Any = getattr(transformers, config) if isinstance(config, str) else config
    fields = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    other_names = getattr(cls, "attribute_map", {})
    taken = {*SMALL, *overrides}
    values = {
        name: value
        for name, value in SMALL.items()
        if name in fields | set(other_names) and name not in overrides and other_names.get(name) not in taken
    }
    for name, part in getattr(cls, "sub_configs", {}).items():
        given = overrides.pop(name, {})
        values[name] = small(part, **given) if isinstance(given, Mapping) else given
    return cls(**values, **overrides)


_TOWER: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
_PICTURES = {**_TOWER, "hidden_size": WIDTH, "image_size": 8, "patch_size": 4}
_QWEN_PICTURES = {
    "depth": 2, "hidden_size": WIDTH, "intermediate_size": 40, "num_heads": 4, "out_hidden_size": WIDTH,
    "patch_size": 4,
}  # fmt: skip
_QWEN_TOKENS = {"image_token_id": 58, "video_token_id": 59, "vision_start_token_id": 57, "vision_end_token_id": 56}
_GEMMA_TOKENS = {
    "image_token_id": 58, "video_token_id": 57, "audio_token_id": 59, "boi_token_id": 56, "eoi_token_id": 55,
    "boa_token_id": 54,
}  # fmt: skip
_ROTARY_IN_THREE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_SPEECH = {
    "conv_dim": (WIDTH, WIDTH), "conv_stride": (4, 4), "conv_kernel": (4, 4), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_hidden_layers": 2, "codevector_dim": 8,
    "proj_codevector_dim": 8, "num_codevectors_per_group": 4, "pad_token_id": 0,
}  # fmt: skip
_MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 4.0,
}  # fmt: skip
_INDEXED = {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
_UNGROUPED = {"num_key_value_heads": 4}
_FOUR_LAYERS = {"num_hidden_layers": 4}
_FALCON = {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "alibi": False}
_LLAMA4 = {"intermediate_size_mlp": 40, "interleave_moe_layer_step": 2, "attention_chunk_size": 8, **_FOUR_LAYERS}
_PATCHES = {"image_size": 8, "patch_size": 4}
_QWEN3_VL = {
    "vision_config": {**_QWEN_PICTURES, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "text_config": {"rope_parameters": _ROTARY_IN_THREE},
    **_QWEN_TOKENS,
}
_QWEN3_5 = {
    "vision_config": {**_QWEN_PICTURES, "num_position_embeddings": 16},
    "text_config": _FOUR_LAYERS,
    **_QWEN_TOKENS,
}
_GEMMA4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY, "num_kv_shared_layers": 0}


def _clip() -> Any:
    return transformers.CLIPVisionConfig(**_PICTURES, projection_dim=WIDTH)


def _siglip() -> Any:
    return transformers.SiglipVisionConfig(**_PICTURES)


def _flamingo_sound() -> Any:
    cls = type(transformers.AudioFlamingo3Config().audio_config)
    return cls(**_TOWER, hidden_size=WIDTH, num_mel_bins=8, max_source_positions=16)


def _gemma3n(**text: Any) -> Any:
    sound = {
        "hidden_size": WIDTH, "vocab_size": 8, "conf_num_hidden_layers": 1, "conf_num_attention_heads": 4,
        "input_feat_size": 16, "sscp_conv_channel_size": [4, 4],
    }  # fmt: skip
    own: dict[str, Any] = {
        **_GEMMA4, **_FOUR_LAYERS, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": 40, **text,
    }  # fmt: skip
    return transformers.Gemma3nConfig(
        text_config=small("Gemma3nTextConfig", **own),
        vision_config={"hidden_size": WIDTH, "vocab_size": 8, "vocab_offset": VOCABULARY},
        audio_config=sound,
    )


OVERRIDES: dict[str, Overrides] = {
    # dense decoders
    "BertLMHeadModel": {"is_decoder": True},
    "CodeGenForCausalLM": {"rotary_dim": 4, "n_head": 4},
    "FalconForCausalLM": {**_FALCON, "ffn_hidden_size": 40},
    "GPT2LMHeadModel": {"n_inner": None},
    "GPTJForCausalLM": {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 4},
    "GraniteForCausalLM": _MULTIPLIERS,
    "MptForCausalLM": lambda: transformers.MptConfig(
        d_model=WIDTH, n_heads=4, n_layers=3, expansion_ratio=2, max_seq_len=64, vocab_size=VOCABULARY
    ),
    "RobertaForMaskedLM": {"pad_token_id": 1, "bos_token_id": 0},
    "YoutuForCausalLM": _UNGROUPED,
    # experts
    "DeepseekV2ForCausalLM": _UNGROUPED,
    "DeepseekV3ForCausalLM": _UNGROUPED,
    "DeepseekV4ForCausalLM": {
        **_FOUR_LAYERS, **_INDEXED, "num_key_value_heads": 1, "o_groups": 2, "o_lora_rank": 8,
    },
    "Ernie4_5_MoeForCausalLM": {"moe_layer_start_index": 1},
    "Gemma4ForCausalLM": {**_FOUR_LAYERS, **_GEMMA4, "enable_moe_block": True},
    "Glm4MoeLiteForCausalLM": _UNGROUPED,
    "GlmMoeDsaForCausalLM": {**_INDEXED, **_UNGROUPED},
    "GraniteMoeForCausalLM": _MULTIPLIERS,
    "Llama4ForCausalLM": _LLAMA4,
    "MixtralForCausalLM": {"sliding_window": None},
    # state space models and hybrids
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "FalconH1ForCausalLM": {
        "mamba_d_ssm": 64, "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "attention_in_multiplier": 0.8,
        "attention_out_multiplier": 1.3, "key_multiplier": 0.6, "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.7,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "mlp_multipliers": [0.9, 1.4],
    },
    "GraniteMoeHybridForCausalLM": {
        "layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "rope", "residual_multiplier": 0.3,
    },
    "JambaForCausalLM": {
        **_FOUR_LAYERS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "use_mamba_kernels": False,
    },
    "Lfm2ForCausalLM": {"full_attn_idxs": [1], "block_multiple_of": 8},
    "Lfm2MoeForCausalLM": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "expand": 2},
    "NemotronHForCausalLM": {
        "layers_block_type": ["mamba", "attention", "moe"], "mamba_num_heads": 8, "mamba_head_dim": 8,
        "ssm_state_size": 8, "n_groups": 1, "moe_shared_expert_intermediate_size": 24, "moe_latent_size": None,
    },
    "OlmoHybridForCausalLM": _FOUR_LAYERS,
    "Qwen3NextForCausalLM": _FOUR_LAYERS,
    "Qwen3_5ForCausalLM": _FOUR_LAYERS,
    "Qwen3_5MoeForCausalLM": _FOUR_LAYERS,
    "RecurrentGemmaForCausalLM": {"lru_width": WIDTH, "attention_window_size": 4},
    "RwkvForCausalLM": {"attention_hidden_size": WIDTH, "context_length": 64, "rescale_every": 2},
    "Zamba2ForCausalLM": {
        **_FOUR_LAYERS, **_UNGROUPED, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "n_mamba_heads": 8,
        "mamba_headdim": 8, "mamba_ngroups": 1, "num_mem_blocks": 1, "adapter_rank": 4, "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    # encoder–decoders
    "LEDForConditionalGeneration": {
        "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64,
    },
    "SwitchTransformersForConditionalGeneration": {"expert_capacity": 16},
    "T5Gemma2ForConditionalGeneration": lambda: transformers.T5Gemma2Config(
        encoder=transformers.T5Gemma2EncoderConfig(
            text_config=small("T5Gemma2TextConfig", num_hidden_layers=2), vision_config=_siglip(),
            mm_tokens_per_image=4, image_token_index=60, boi_token_index=58, eoi_token_index=59,
        ),
        decoder=small("T5Gemma2DecoderConfig", num_hidden_layers=2), image_token_index=60,
    ),
    "T5GemmaForConditionalGeneration": lambda: transformers.T5GemmaConfig(
        encoder=small("T5GemmaModuleConfig", num_hidden_layers=2),
        decoder=small("T5GemmaModuleConfig", num_hidden_layers=2, is_decoder=True), vocab_size=VOCABULARY,
    ),
    # pictures and sound
    "DeiTForImageClassification": {**_PATCHES, "num_labels": 5},
    "DeiTModel": _PATCHES,
    "ViTForImageClassification": {**_PATCHES, "num_labels": 5},
    "ViTModel": _PATCHES,
    "ASTForAudioClassification": {
        "patch_size": 4, "frequency_stride": 4, "time_stride": 4, "max_length": 16, "num_mel_bins": 8, "num_labels": 5,
    },
    "HubertForCTC": _SPEECH,
    "HubertModel": _SPEECH,
    "Wav2Vec2ForCTC": _SPEECH,
    "Wav2Vec2ForPreTraining": _SPEECH,
    "Wav2Vec2Model": _SPEECH,
    # others
    "HrmTextForCausalLM": {"L_bp_cycles": [3, 3]},  # by default some calls record no gradients
    # multimodal
    "AudioFlamingo3ForConditionalGeneration": lambda: transformers.AudioFlamingo3Config(
        audio_config=_flamingo_sound(), text_config=small("Qwen2Config", sliding_window=None), audio_token_id=60
    ),
    "Emu3ForConditionalGeneration": lambda: transformers.Emu3Config(
        vq_config={
            "codebook_size": 8, "embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1, 1],
            "num_res_blocks": 1, "attn_resolutions": [], "hidden_size": 32, "num_attention_heads": 1,
        },
        text_config=small("Emu3TextConfig"), vocabulary_map={"<image>": 60}, image_token_id=60,
    ),
    "Florence2ForConditionalGeneration": lambda: transformers.Florence2Config(
        vision_config={
            "embed_dim": [8, 8], "num_heads": [2, 2], "num_groups": [2, 2], "depths": [1, 1], "patch_size": [4, 2],
            "patch_stride": [2, 2], "patch_padding": [1, 1], "patch_prenorm": [False, True], "window_size": 2,
            "projection_dim": WIDTH,
        },
        text_config=small("BartConfig"), image_token_id=60,
    ),
    "Gemma3ForConditionalGeneration": lambda: transformers.Gemma3Config(
        vision_config=_siglip(), text_config=small("Gemma3TextConfig"), mm_tokens_per_image=4, image_token_index=60,
        boi_token_index=58, eoi_token_index=59,
    ),
    "Gemma3nForConditionalGeneration": _gemma3n,
    "Gemma4ForConditionalGeneration": lambda: transformers.Gemma4Config(
        text_config=small("Gemma4TextConfig", **_FOUR_LAYERS, **_GEMMA4),
        vision_config={**_TOWER, "hidden_size": WIDTH, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 4},
        audio_config=None, eoa_token_id=53, **_GEMMA_TOKENS,
    ),
    "Gemma4UnifiedForConditionalGeneration": {"text_config": _FOUR_LAYERS, "audio_config": None, **_GEMMA_TOKENS},
    "Glm4vForConditionalGeneration": {
        "vision_config": {**_QWEN_PICTURES, "image_size": 16},
        "text_config": {"rope_parameters": {**_ROTARY_IN_THREE, "partial_rotary_factor": 1.0}},
        "image_token_id": 58, "video_token_id": 59, "image_start_token_id": 57, "image_end_token_id": 56,
        "video_start_token_id": 55, "video_end_token_id": 54,
    },
    "GlmAsrForConditionalGeneration": lambda: transformers.GlmAsrConfig(
        audio_config={
            **_TOWER, "hidden_size": WIDTH, "num_key_value_heads": 4, "head_dim": 8, "num_mel_bins": 8,
            "max_position_embeddings": 16,
        },
        text_config=small("LlamaConfig"), audio_token_id=60,
    ),
    "Idefics3ForConditionalGeneration": lambda: transformers.Idefics3Config(
        vision_config=_PICTURES, text_config=small("LlamaConfig"), image_token_id=60, scale_factor=2, pad_token_id=0
    ),
    "Llama4ForConditionalGeneration": lambda: transformers.Llama4Config(
        vision_config={
            **_PICTURES, "intermediate_size": 64, "vision_output_dim": WIDTH, "projector_input_dim": WIDTH,
            "projector_output_dim": WIDTH,
        },
        text_config=small("Llama4TextConfig", **_LLAMA4), image_token_index=60, boi_token_index=59, eoi_token_index=58,
    ),
    "LlavaForConditionalGeneration": lambda: transformers.LlavaConfig(
        vision_config=_clip(), text_config=small("LlamaConfig"), image_token_index=60
    ),
    "LlavaNextForConditionalGeneration": lambda: transformers.LlavaNextConfig(
        vision_config=_clip(), text_config=small("LlamaConfig"), image_token_index=60, image_grid_pinpoints=[[8, 16]]
    ),
    "LlavaOnevisionForConditionalGeneration": lambda: transformers.LlavaOnevisionConfig(
        vision_config=_siglip(), text_config=small("Qwen2Config"), image_token_index=60, video_token_index=59,
        image_grid_pinpoints=[[8, 16]],
    ),
    "Mistral3ForConditionalGeneration": lambda: transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**_PICTURES, head_dim=8),
        text_config=small("MistralConfig", sliding_window=None), image_token_index=60,
    ),
    "MusicFlamingoForConditionalGeneration": lambda: transformers.MusicFlamingoConfig(
        audio_config=_flamingo_sound(), text_config=small("Qwen2Config", sliding_window=None), audio_token_id=60,
        audio_bos_token_id=59, audio_eos_token_id=58,
    ),
    "Qwen2AudioForConditionalGeneration": lambda: transformers.Qwen2AudioConfig(
        audio_config={
            "d_model": WIDTH, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 40,
            "num_mel_bins": 8, "max_source_positions": 16, "model_type": "qwen2_audio_encoder",
        },
        text_config=small("Qwen2Config", sliding_window=None), audio_token_index=60,
    ),
    "Qwen2_5_VLForConditionalGeneration": {
        "vision_config": {**_QWEN_PICTURES, "window_size": 16, "fullatt_block_indexes": [1]},
        "text_config": {"rope_parameters": _ROTARY_IN_THREE, "sliding_window": None}, **_QWEN_TOKENS,
    },
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
}  # fmt: skip
"""What a name's config needs beside small numbers; also what makes it show what its family has."""

VARIANTS: dict[str, dict[str, Overrides]] = {
    "CohereForCausalLM": {"query-key norms": {"use_qk_norm": True}},
    "FalconForCausalLM": {
        "40b": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 40},
        "rw": {**_FALCON, "multi_query": False, "parallel_attn": False, "alibi": True, "bias": True},
    },
    "GPTNeoXForCausalLM": {"sequential": {"use_parallel_residual": False}},
    "Gemma3nForConditionalGeneration": {
        "shared keys and values": lambda: _gemma3n(
            layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2
        )
    },
    "Gemma4ForCausalLM": {
        "dense": {**_FOUR_LAYERS, **_GEMMA4, "enable_moe_block": False},
        "dense, no per-layer input": {**_FOUR_LAYERS, **_GEMMA4, "hidden_size_per_layer_input": 0},
        "shared keys and values": {
            **_FOUR_LAYERS,
            **_GEMMA4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
        },
    },
    "GraniteForCausalLM": {"residual multiplier 1": {**_MULTIPLIERS, "residual_multiplier": 1.0}},
    "GraniteMoeHybridForCausalLM": {
        "attention only": {"layer_types": ["attention"] * 3, "position_embedding_type": "rope"}
    },
    "HubertForCTC": {"stable layer norm": {**_SPEECH, "do_stable_layer_norm": True}},
    "OPTForCausalLM": {"350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 16}},
    "Qwen2MoeForCausalLM": {"all layers dense": {"mlp_only_layers": [0, 1, 2]}},
    "StableLmForCausalLM": {"parallel": {"use_parallel_residual": True}},
    "T5ForConditionalGeneration": {"1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}},
    "TransformerLensNative": {
        "RMS": {"normalization_type": "RMS"},
        "no norm": {"normalization_type": None},
        "attention only": {"attn_only": True},
        "attention only, no norm": {"attn_only": True, "normalization_type": None},
        "gated": {"gated_mlp": True, "act_fn": "silu"},
        "grouped queries": {"n_key_value_heads": 2},
        "soft caps": {"attn_scores_soft_cap": 5.0, "output_logits_soft_cap": 5.0},
        "solu_ln": {"act_fn": "solu_ln"},
    },
}
"""Other shapes of one name's blocks, by what sets them apart."""
