"""Tiny random models of every supported class and family, for tests of maps, hooks and methods.

Configurations come first (HookedTransformer's options, then Hugging Face's by family, then models of images and sound),
then a builder for each class. Every parameter is drawn afresh, biases and norm gains included: with the usual initial
values (zero biases, unit gains) half of the ways to be wrong cannot be seen. No network is needed.

    >>> from tensorlens_tl.testing import model_names, tiny_model
    >>> model = tiny_model("bridge/gpt2")
"""

import importlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import HookedModel, ModelLike, ModelView
from tensorlens_tl.whitening import whiten

Options = dict[str, Any]
"""A config's options."""

Family = tuple[str, Options]
"""The name of an architecture, and its config's options."""

VOCABULARY = 48
CONTEXT = 24
WIDTH = 16
HEADS = 4
LAYERS = 2

# --------------------------------------------------------------------------- HookedTransformer, 3.9

_USUAL: Options = {"normalization_type": "LN", "act_fn": "gelu"}

HOOKED: dict[str, Options] = {
    "ln": {},
    "lnpre": {"normalization_type": "LNPre", "act_fn": "gelu_new"},
    "rms": {"normalization_type": "RMS", "act_fn": "relu"},
    "rmspre": {"normalization_type": "RMSPre", "act_fn": "silu"},
    "no-norm": {"normalization_type": None},
    "attn-only": {"attn_only": True},
    "attn-only-no-norm": {"normalization_type": None, "attn_only": True},
    "parallel": {"parallel_attn_mlp": True, "act_fn": "gelu_new"},
    "gated": {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu"},
    "gqa": {"normalization_type": "RMS", "n_key_value_heads": 2, "gated_mlp": True},
    "gqa-ungrouped": {"n_key_value_heads": 2, "ungroup_grouped_query_attention": True},
    "rotary": {"positional_embedding_type": "rotary", "rotary_dim": 4},
    "alibi": {"positional_embedding_type": "alibi"},
    "shortformer": {"positional_embedding_type": "shortformer"},
    "sandwich": {"normalization_type": "RMS", "use_normalization_before_and_after": True, "act_fn": "gelu_new"},
    "post-only": {"normalization_type": "RMS", "original_architecture": "Olmo2ForCausalLM", "act_fn": "silu"},
    "soft-caps": {"normalization_type": "RMS", "attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 3.0},
    "qk-norm": {"normalization_type": "RMS", "n_key_value_heads": 2, "use_qk_norm": True, "act_fn": "silu"},
    "sinks": {"normalization_type": "RMS", "use_attention_sinks": True, "act_fn": "silu"},
    "local": {"use_local_attn": True, "attn_types": ["global", "local"], "window_size": 2},
    "bidirectional": {"attention_dir": "bidirectional"},
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

_STACK = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 24,
}
_SMALL = {"vocab_size": VOCABULARY, **_STACK, "max_position_embeddings": CONTEXT}
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
    "mamba": ("MambaForCausalLM", {**_SCANNED, "time_step_rank": 3}),
    "mamba2": ("Mamba2ForCausalLM", {**_SCANNED, "num_heads": 4, "head_dim": 8, "n_groups": 2}),
    "jamba": (
        "JambaForCausalLM",
        {**_GROUPED, "mamba_d_state": 6, "mamba_dt_rank": 3, "num_experts": 1, "attn_layer_offset": 1},
    ),
    "falcon-h1": (  # a mixer beside attention, and constants beside matrices
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
    "lfm2": ("Lfm2ForCausalLM", {**_GROUPED, "layer_types": ["conv", "full_attention"], "conv_bias": True}),
    "qwen3-next": ("Qwen3NextForCausalLM", _DELTA),
    "rwkv": ("RwkvForCausalLM", {**_WIDTHS, "intermediate_size": 24, "rescale_every": 1}),
}
"""State-space layers, short convolutions and the gated delta rule in place of attention, in one layer or in both."""

_GPT = {
    "vocab_size": VOCABULARY,
    "n_positions": CONTEXT,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
}
_NO_PDROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
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

_NARROW = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
_ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
WHOLE: dict[str, Family] = {
    "mixtral": ("MixtralForCausalLM", {**_GROUPED, **_ROUTED}),
    "qwen2-moe": (  # one layer dense, the other with a shared expert that has a gate
        "Qwen2MoeForCausalLM",
        {**_GROUPED, **_NARROW, "num_experts": 4, "shared_expert_intermediate_size": 12, "mlp_only_layers": [0]},
    ),
    "gpt-oss": (  # biases in experts, activations that are clamped on both sides, attention sinks
        "GptOssForCausalLM",
        {**_GROUPED, **_ROUTED, **_LOCAL, "swiglu_limit": 0.4},
    ),
    "llama4": (  # the routing scales what an expert reads
        "Llama4ForCausalLM",
        {
            **_GROUPED,
            **_ROUTED,
            "intermediate_size_mlp": 24,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
        },
    ),
    "deepseek-v3": (  # latent attention; the first layer dense
        "DeepseekV3ForCausalLM",
        {
            **_GROUPED,
            **_NARROW,
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
        "GraniteMoeForCausalLM",
        {
            **_GROUPED,
            **_ROUTED,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
        },
    ),
    "afmoe": (  # a gate of what heads give, and norms on both sides of sublayers
        "AfmoeForCausalLM",
        {
            **_GROUPED,
            **_NARROW,
            **_LOCAL,
            "sliding_window": 8,
            "num_experts": 4,
            "num_dense_layers": 1,
            "num_shared_experts": 1,
        },
    ),
    "jetmoe": (  # attention heads that are chosen as experts are
        "JetMoeForCausalLM",
        {**_GROUPED, **_ROUTED, "num_local_experts": 3, "kv_channels": 4},
    ),
    "bitnet": ("BitNetForCausalLM", _GROUPED),  # norms inside attention and MLP
    "modernbert-decoder": (  # gate and input in one matrix, a first norm that does nothing
        "ModernBertDecoderForCausalLM",
        {**_GROUPED, "num_key_value_heads": 4, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "gpt1": (  # norms after sublayers, none at the end
        "OpenAIGPTLMHeadModel",
        {**_GPT, **_NO_PDROP},
    ),
}
"""Families some of whose parts are held as a whole: mixtures of experts, latent and gated attention, norms and gates
inside MLPs. Each has something that no other has."""

BRIDGE: dict[str, Family] = {
    "gpt2": ("GPT2LMHeadModel", {**_GPT, **_NO_PDROP, "n_inner": 24, "bos_token_id": 1, "eos_token_id": 2}),
    "neox": ("GPTNeoXForCausalLM", {**_SMALL, **_TOKENS}),
    "neox-sequential": ("GPTNeoXForCausalLM", {**_SMALL, **_TOKENS, "use_parallel_residual": False}),
    "llama": ("LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralForCausalLM", {**_GROUPED, "sliding_window": 3}),
    "qwen2": ("Qwen2ForCausalLM", {**_GROUPED}),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED),
    "gemma": ("GemmaForCausalLM", _GROUPED),
    "gemma2": ("Gemma2ForCausalLM", {**_GROUPED, **_LOCAL, "query_pre_attn_scalar": 4}),
    "gemma3": ("Gemma3ForCausalLM", {**_GROUPED, **_LOCAL, "query_pre_attn_scalar": 4}),
    "phi": ("PhiForCausalLM", {**_SMALL, **_TOKENS, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3ForCausalLM", {**_SMALL, **_TOKENS, "num_key_value_heads": 2}),
    "gptj": ("GPTJForCausalLM", {**_GPT, "n_inner": 24, "rotary_dim": 4, "bos_token_id": 1, "eos_token_id": 2}),
    "opt": ("OPTForCausalLM", _OPT),
    "opt-350m": (  # norms after the sums, and a narrower embedding
        "OPTForCausalLM",
        {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 12},
    ),
    **_MIXERS,
    "bert": ("BertForMaskedLM", {**_SMALL, **_NO_DROPOUT}),
    "roberta": ("RobertaForMaskedLM", {**_SMALL, **_NO_DROPOUT, "pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", {**_SMALL, **_TOKENS, "num_key_value_heads": 2}),
    **WHOLE,
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
    "bart": ("BartForConditionalGeneration", _BART),
    "marian": ("MarianMTModel", {**_BART, "decoder_vocab_size": VOCABULARY}),
    "pegasus": ("PegasusForConditionalGeneration", _BART),
    "t5gemma": (
        "T5GemmaForConditionalGeneration",
        {"encoder": _T5_GEMMA, "decoder": _T5_GEMMA, "vocab_size": VOCABULARY, "dropout_rate": 0.0, **_START},
    ),
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5-gated": (
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
BRIDGE |= ENCODER_DECODER

# --------------------------------------------------------------------------- images, sound, and more than tokens

_SENSES = {**_STACK, **_NO_DROPOUT}
_IMAGE = {**_SENSES, "image_size": 8, "patch_size": 4, "num_labels": 5}
_SPECTROGRAM = {
    **_SENSES, "patch_size": 4, "frequency_stride": 3, "time_stride": 3, "max_length": 10, "num_mel_bins": 7,
    "num_labels": 5,
}  # fmt: skip
_WAVES = {
    **_SENSES, "vocab_size": VOCABULARY, "conv_dim": (WIDTH, WIDTH), "conv_stride": (4, 4), "conv_kernel": (4, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_EYES = {**_STACK, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}

SIGNALS: dict[str, Family] = {
    "vit": ("ViTForImageClassification", _IMAGE),
    "vit-headless": ("ViTModel", _IMAGE),
    "deit": ("DeiTForImageClassification", _IMAGE),
    "ast": ("ASTForAudioClassification", _SPECTROGRAM),
    "hubert": ("HubertForCTC", _WAVES),
    "hubert-stable": ("HubertForCTC", {**_WAVES, "do_stable_layer_norm": True}),
    "wav2vec2": ("Wav2Vec2ForCTC", _WAVES),
}
"""Models of images and sound."""


def signal_module(family: str) -> Any:
    """One of `SIGNALS` with its usual initial weights."""
    transformers: Any = importlib.import_module("transformers")
    architecture, options = SIGNALS[family]
    kind = getattr(transformers, architecture)
    return kind(kind.config_class(**options, attn_implementation="eager"))


def seeing_module(family: str) -> Any:
    """A language model that sees: token 47 stands for one of an image's four pieces.

    `family` is ``"llava"``, or ``"gemma3-sees"``, whose images attend both ways where token types say so.
    """
    transformers: Any = importlib.import_module("transformers")
    if family == "llava":
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**_EYES, projection_dim=WIDTH),
            text_config=transformers.LlamaConfig(**_GROUPED),
            image_token_index=VOCABULARY - 1,
        )
        module = transformers.LlavaForConditionalGeneration(config)
    else:
        config = transformers.Gemma3Config(
            vision_config=transformers.SiglipVisionConfig(**_EYES),
            text_config=transformers.Gemma3TextConfig(**_GROUPED),
            image_token_index=VOCABULARY - 1,
            boi_token_index=VOCABULARY - 2,
            eoi_token_index=VOCABULARY - 3,
            mm_tokens_per_image=4,
        )
        module = transformers.Gemma3ForConditionalGeneration(config)
    module.set_attn_implementation("eager")
    return module


# --------------------------------------------------------------------------- builders

Builder = Callable[[], Any]

SIZES: Options = {
    "n_layers": LAYERS, "d_model": WIDTH, "n_ctx": CONTEXT, "d_head": WIDTH // HEADS, "n_heads": HEADS, "d_mlp": 24,
    "d_vocab": VOCABULARY,
}  # fmt: skip
ON_CPU: Options = {"dtype": torch.float64, "device": "cpu"}

HookedEncoder: Any = None
HookedEncoderDecoder: Any = None
HookedTransformer: Any = None
HookedTransformerConfig: Any = None
with suppress(ImportError):  # they exist up to TransformerLens 3.9
    from transformer_lens import HookedEncoder, HookedEncoderDecoder, HookedTransformer, HookedTransformerConfig


@torch.no_grad()
def randomise(model: torch.nn.Module) -> None:
    """Draw every parameter afresh from torch's global generator: matrices by fan-in, vectors around 0 or (gains) 1."""
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if parameter.ndim < 2 or leaf.startswith(("b_", "_b_")):
            parameter.normal_(0.0, 0.3)
            if leaf in ("w", "weight"):
                parameter.add_(1.0)
        elif "embed" in name.lower() or ".wte" in name or ".wpe" in name:
            parameter.normal_(0.0, 1.0)
        else:
            parameter.normal_(0.0, 1.2 / max(parameter.shape[-1], parameter.shape[-2]) ** 0.5)


def build_hooked(processed: bool = False, **options: Any) -> Any:
    """A HookedTransformer with other options than usual, its weights processed or as they are."""
    config = {**SIZES, **ON_CPU, **_USUAL, "default_prepend_bos": False, **options}
    if config.get("attn_only"):
        config["d_mlp"] = None
    model = HookedTransformer(HookedTransformerConfig(**config))
    model.double()  # the weights of experts are not built in cfg.dtype
    randomise(model)
    if processed:
        model.process_weights_(fold_ln=True, center_writing_weights=True, center_unembed=True)
    return model


def build_hooked_encoder() -> Any:
    """A HookedEncoder."""
    config = HookedTransformerConfig(
        **SIZES, **ON_CPU, act_fn="gelu", attention_dir="bidirectional", normalization_type="LN"
    )
    model = HookedEncoder(config)
    randomise(model)
    return model.to(torch.float64)


def build_hooked_encoder_decoder(**options: Any) -> Any:
    """A HookedEncoderDecoder, which is a T5."""
    model = HookedEncoderDecoder(HookedTransformerConfig(**{**SIZES, **ON_CPU, **HOOKED_T5, **options}))
    randomise(model)
    return model.double()


def bridge_of(module: nn.Module) -> Any:
    """A Bridge of a Hugging Face module, its weights drawn afresh."""
    builder = importlib.import_module("transformer_lens.model_bridge.sources._bridge_builder")
    module = module.to(torch.float64).eval()
    randomise(module)
    return builder.build_bridge_from_module(module, type(module).__name__, hf_config=module.config).eval()


def build_bridge(family: str, compatibility: bool = False, **changes: Any) -> Any:
    """A Bridge of one of `BRIDGE`, with changes to its config."""
    import transformers

    architecture, options = BRIDGE[family]
    config = getattr(transformers, architecture).config_class(**{**options, **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the others have no float64
    auto = AutoModelForCausalLM
    if "MaskedLM" in architecture:
        auto = AutoModelForMaskedLM
    if family in ENCODER_DECODER:
        auto = AutoModelForSeq2SeqLM
    model = bridge_of(auto.from_config(config, attn_implementation="eager"))
    if compatibility:
        model.enable_compatibility_mode(disable_warnings=True)
    if hasattr(config, "rescale_every"):
        model(torch.tensor([[3]]))  # in its first run the module scales its weights (RWKV)
    return model.eval()


def whitened(model: Any) -> Any:
    """The same model with whitening before every block, its filters random and not growing."""
    d = model.cfg.d_model
    parameter = next(model.parameters())
    filters = [
        (torch.eye(d) + 0.3 * torch.randn(d, d) / d**0.5, 0.5 * torch.randn(d, d) / d**0.5) for _ in model.blocks
    ]
    return whiten(model, init=[(L_inv.to(parameter), M.to(parameter)) for L_inv, M in filters])


def build_native(**options: Any) -> Any:
    """A Bridge of TransformerLens' own modules."""
    transformer_bridge = importlib.import_module("transformer_lens.model_bridge").TransformerBridge
    config = importlib.import_module("transformer_lens.config").TransformerBridgeConfig(
        **SIZES, act_fn="gelu", **options
    )
    model = transformer_bridge.boot_native(config).to(torch.float64)
    randomise(model)
    return model.eval()


def _builders() -> Iterator[tuple[str, Builder]]:
    if HookedTransformer is not None:
        for name, options in HOOKED.items():
            yield f"hooked/{name}", partial(build_hooked, **options)
        for name in ("ln", "rms", "gqa", "parallel", "attn-only"):
            yield f"hooked/{name}-processed", partial(build_hooked, processed=True, **HOOKED[name])
        yield "encoder/bert", build_hooked_encoder
        yield "encoder-decoder/tied", partial(build_hooked_encoder_decoder, tie_word_embeddings=True)
        yield "encoder-decoder/gated", partial(build_hooked_encoder_decoder, gated_mlp=True, act_fn="gelu_new")
        yield "hooked/whitened", lambda: whitened(build_hooked(**HOOKED["rotary"]))
    for family in BRIDGE:
        # TransformerLens 3.9 has no adapter for RoBERTa, and cannot run T5 with the transformers of today
        if family in ("roberta", "t5", "t5-gated") and HookedTransformer is not None:
            continue
        yield f"bridge/{family}", partial(build_bridge, family)
    for family in ("gpt2", "llama", "neox"):
        yield f"bridge/{family}-compatibility", partial(build_bridge, family, compatibility=True)
    yield "bridge/whitened", lambda: whitened(build_bridge("gpt2"))
    yield "bridge/whitened-neox", lambda: whitened(build_bridge("neox"))
    yield "bridge/whitened-native", lambda: whitened(build_native(normalization_type="LN"))
    yield "bridge/native", partial(build_native, normalization_type="LN")
    yield "bridge/native-rms", partial(build_native, normalization_type="RMS", gated_mlp=True)


BUILDERS: dict[str, Builder] = dict(_builders())

SIGNAL_BUILDERS: dict[str, Builder] = {
    f"bridge/{family}": lambda family=family: bridge_of(signal_module(family))
    for family in SIGNALS
    if family != "wav2vec2" or HookedTransformer is None  # TransformerLens 3.9 has no adapter for it
}
MULTIMODAL_BUILDERS: dict[str, Builder] = {
    f"bridge/{family}": lambda family=family: bridge_of(seeing_module(family)) for family in ("llava", "gemma3-sees")
}


if TYPE_CHECKING:
    Reads = Literal["tokens", "signals", "both"]
else:
    Reads = str  # `model_names` says which there are


def model_names(reads: Reads = "tokens") -> list[str]:
    """The names `tiny_model` knows on the installed TransformerLens, as ``class/variant``.

    >>> from tensorlens_tl.testing import model_names
    >>> model_names("both")
    ['bridge/llava', 'bridge/gemma3-sees']

    `reads` is ``"tokens"``, or ``"signals"`` for models of images and sound, or ``"both"`` for those of images and
    tokens; anything else raises `InvalidInputError`.
    """
    known = {"tokens": BUILDERS, "signals": SIGNAL_BUILDERS, "both": MULTIMODAL_BUILDERS}
    if reads not in known:
        raise InvalidInputError(f"model_names: reads={reads!r}; use one of {', '.join(map(repr, known))}.")
    return list(known[reads])


def encoder_decoder_names() -> list[str]:
    """Those of them with an encoder and a decoder: `freeze` needs ``decoder_input_ids`` for them (see `tiny_input`)."""
    bridges = [name for name in BUILDERS if name.removeprefix("bridge/") in ENCODER_DECODER]
    return [name for name in BUILDERS if name in bridges or name.startswith("encoder-decoder/")]


def tiny_input(
    model: ModelLike, prompts: int = 2, length: int = 6, *, seed: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return random token ids `[prompt, pos]` for any model that reads tokens, and the options `freeze` needs with
    them.

    >>> from tensorlens_tl import freeze
    >>> model = tiny_model("bridge/bart")
    >>> input, options = tiny_input(model)
    >>> freeze(model, input, **options).sides
    (6, 4)

    The options are an encoder–decoder's ``{"decoder_input_ids": …}``, two thirds as many as `length`.
    """
    generator = torch.Generator().manual_seed(seed)
    view = ModelView(model)

    def draw(pos: int) -> Tensor:
        return torch.randint(3, view.d_vocab, (prompts, pos), generator=generator)

    tokens = draw(length)
    if not view.is_encoder_decoder:
        return tokens, {}
    return tokens, {"decoder_input_ids": draw(max(1, 2 * length // 3))}


def tiny_model(name: str, *, seed: int = 0) -> Any:
    """Build a two-layer, 16-wide float64 model of one class and family, with random weights, in eval mode.

    >>> from tensorlens_tl.testing import tiny_model
    >>> tiny_model("bridge/gpt2", seed=1).cfg.d_model
    16

    Args:
        name: one of `model_names()`, such as ``"hooked/gqa"``, ``"encoder/bert"`` or ``"bridge/llama"``.
        seed: seeds torch's global generator for the weights, and restores it afterwards.

    Raises:
        InvalidInputError: no such name on this TransformerLens.
    """
    builders = BUILDERS | SIGNAL_BUILDERS | MULTIMODAL_BUILDERS
    if name not in builders:
        raise InvalidInputError(f"tiny_model: no model called {name!r}; there are {', '.join(builders)}.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return builders[name]()


if TYPE_CHECKING:
    Models = ModelLike | str | Iterable[ModelLike | str] | None
    """A model, or several models or names of `model_names()`; None for a battery's own choice."""
else:
    Models = Any  # building or freezing says what is no model


def as_list(models: Models, default: Iterable[str]) -> list[ModelLike | str]:
    """Return the models of a battery, one or several or its default, as a list."""
    several: Any = default if models is None else models
    if isinstance(several, str | HookedModel) or not isinstance(several, Iterable):
        return [several]
    return list(several)


def labelled(model: ModelLike | str) -> tuple[str, Callable[[], Any]]:
    """What a test calls a model, and how to get it: a model, or one of `model_names()`, which is built when called."""
    if isinstance(model, str):
        return model, partial(tiny_model, model)
    return type(model).__name__, lambda: model


def random_input(model: ModelLike, length: int, generator: torch.Generator) -> Tensor:
    """Return two random prompts `[2, pos]`, images, spectrograms or waveforms, as a model reads them.

    `length` is that of prompts, as far as the context goes, and of a waveform in frames; images and spectrograms have
    the size of the model's config.
    """
    view = ModelView(model)
    if view.reads == "tokens":
        return torch.randint(3, view.d_vocab, (2, min(length, view.n_ctx)), generator=generator)
    config = view.config
    if view.reads == "images":
        shape = (config.num_channels, config.image_size, config.image_size)
    elif view.patches is not None:
        shape = (config.max_length, config.num_mel_bins)
    else:
        shape = ((length + 2) * math.prod(config.conv_stride),)
    return torch.randn(2, *shape, generator=generator)
