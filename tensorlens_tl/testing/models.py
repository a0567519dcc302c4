"""Tiny random models of every supported class and family, for tests of maps, hooks and methods.

Every parameter is drawn afresh, biases and norm gains included: with the usual initial values (zero
biases, unit gains) half of the ways to be wrong cannot be seen. No network is needed.

    >>> from tensorlens_tl.testing import model_names, tiny_model
    >>> model = tiny_model("bridge/gpt2")
"""

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.testing.families import whole_families
from tensorlens_tl.testing.signals import SIGNALS, seeing_module, signal_module
from tensorlens_tl.whitening.insertion import whiten

VOCABULARY = 48
CONTEXT = 24
WIDTH = 16
HEADS = 4
LAYERS = 2

HookedEncoder: Any = None
HookedTransformer: Any = None
HookedTransformerConfig: Any = None
with suppress(ImportError):  # they exist up to TransformerLens 3.9
    from transformer_lens import HookedEncoder, HookedTransformer, HookedTransformerConfig

# --------------------------------------------------------------------------- HookedTransformer, 3.9

_HOOKED: dict[str, dict[str, Any]] = {
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
}


def _hooked(processed: bool = False, **options: Any) -> Any:
    config = {
        "n_layers": LAYERS,
        "d_model": WIDTH,
        "n_ctx": CONTEXT,
        "d_head": WIDTH // HEADS,
        "n_heads": HEADS,
        "d_mlp": None if options.get("attn_only") else 24,
        "d_vocab": VOCABULARY,
        "dtype": torch.float64,
        "device": "cpu",
        "default_prepend_bos": False,
    }
    model = HookedTransformer(HookedTransformerConfig(**{**config, **options}))
    randomise(model)
    if processed:
        model.process_weights_(fold_ln=True, center_writing_weights=True, center_unembed=True)
    return model


def _hooked_encoder() -> Any:
    config = HookedTransformerConfig(
        n_layers=LAYERS,
        d_model=WIDTH,
        n_ctx=CONTEXT,
        d_head=WIDTH // HEADS,
        n_heads=HEADS,
        d_mlp=24,
        d_vocab=VOCABULARY,
        act_fn="gelu",
        attention_dir="bidirectional",
        normalization_type="LN",
        dtype=torch.float64,
        device="cpu",
    )
    model = HookedEncoder(config)
    randomise(model)
    return model.to(torch.float64)


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
_MIXERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", "MambaForCausalLM", {**_SCANNED, "time_step_rank": 3}),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", {**_SCANNED, "num_heads": 4, "head_dim": 8, "n_groups": 2}),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {**_GROUPED, "mamba_d_state": 6, "mamba_dt_rank": 3, "num_experts": 1, "attn_layer_offset": 1},
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**_GROUPED, "layer_types": ["conv", "full_attention"], "conv_bias": True},
    ),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _DELTA),
}
"""State-space layers, short convolutions and the gated delta rule in place of attention, in one layer or in both."""

_BRIDGE: dict[str, tuple[str, str, dict[str, Any]]] = {
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
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "ffn_dim": 24,
            "max_position_embeddings": CONTEXT,
            "word_embed_proj_dim": WIDTH,
            "dropout": 0.0,
            **_TOKENS,
        },
    ),
    **_MIXERS,
    "bert": ("BertConfig", "BertForMaskedLM", {**_SMALL, **_NO_DROPOUT}),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", {**_SMALL, **_NO_DROPOUT, "pad_token_id": 0}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**_SMALL, **_TOKENS, "num_key_value_heads": 2}),
    **whole_families(_GROUPED, _LOCAL),
}

_START = {**_TOKENS, "decoder_start_token_id": 1}
_BART: dict[str, Any] = {
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

_ENCODER_DECODER: dict[str, tuple[str, str, dict[str, Any]]] = {
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
_BRIDGE |= _ENCODER_DECODER


def _wrapped(module: Any) -> Any:
    builder = importlib.import_module("transformer_lens.model_bridge.sources._bridge_builder")
    module = module.to(torch.float64).eval()
    randomise(module)
    return builder.build_bridge_from_module(module, type(module).__name__, hf_config=module.config).eval()


def _bridge(family: str, compatibility: bool = False, **changes: Any) -> Any:
    import transformers

    builder = importlib.import_module("transformer_lens.model_bridge.sources._bridge_builder")
    config_name, architecture, options = _BRIDGE[family]
    config = getattr(transformers, config_name)(**{**options, **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the others have no float64
    auto = AutoModelForMaskedLM if "MaskedLM" in architecture else AutoModelForCausalLM
    auto = AutoModelForSeq2SeqLM if family in _ENCODER_DECODER else auto
    module = auto.from_config(config, attn_implementation="eager").to(torch.float64).eval()
    randomise(module)
    model = builder.build_bridge_from_module(module, architecture, hf_config=config)
    if compatibility:
        model.enable_compatibility_mode(disable_warnings=True)
    return model.eval()


def _whitened(model: Any) -> Any:
    """The same model with whitening before every block, its filters random and not growing."""
    d = model.cfg.d_model
    parameter = next(model.parameters())
    filters = [
        (torch.eye(d) + 0.3 * torch.randn(d, d) / d**0.5, 0.5 * torch.randn(d, d) / d**0.5) for _ in model.blocks
    ]
    return whiten(model, init=[(L_inv.to(parameter), M.to(parameter)) for L_inv, M in filters])


def _native(**options: Any) -> Any:
    bridge = importlib.import_module("transformer_lens.model_bridge").TransformerBridge
    config = importlib.import_module("transformer_lens.config").TransformerBridgeConfig(
        n_layers=LAYERS,
        d_model=WIDTH,
        n_ctx=CONTEXT,
        d_head=WIDTH // HEADS,
        n_heads=HEADS,
        d_mlp=24,
        d_vocab=VOCABULARY,
        act_fn="gelu",
        **options,
    )
    model = bridge.boot_native(config)
    model = model.to(torch.float64)
    randomise(model)
    return model.eval()


# --------------------------------------------------------------------------- the public face


def _builders() -> Iterator[tuple[str, Callable[[], Any]]]:
    if HookedTransformer is not None:
        for name, options in _HOOKED.items():
            yield f"hooked/{name}", lambda options=options: _hooked(**options)
        for name in ("ln", "rms", "gqa", "parallel", "attn-only"):
            yield f"hooked/{name}-processed", lambda name=name: _hooked(processed=True, **_HOOKED[name])
        yield "encoder/bert", _hooked_encoder
        yield "hooked/whitened", lambda: _whitened(_hooked(**_HOOKED["rotary"]))
    for family in _BRIDGE:
        # TransformerLens 3.9 has no adapter for RoBERTa, and cannot run T5 with the transformers of today
        if family in ("roberta", "t5", "t5-gated") and HookedTransformer is not None:
            continue
        yield f"bridge/{family}", lambda family=family: _bridge(family)
    for family in ("gpt2", "llama", "neox"):
        yield f"bridge/{family}-compatibility", lambda family=family: _bridge(family, compatibility=True)
    yield "bridge/whitened", lambda: _whitened(_bridge("gpt2"))
    yield "bridge/whitened-neox", lambda: _whitened(_bridge("neox"))
    yield "bridge/whitened-native", lambda: _whitened(_native(normalization_type="LN"))
    yield "bridge/native", lambda: _native(normalization_type="LN")
    yield "bridge/native-rms", lambda: _native(normalization_type="RMS", gated_mlp=True)


BUILDERS: dict[str, Callable[[], Any]] = dict(_builders())

SIGNAL_BUILDERS: dict[str, Callable[[], Any]] = {
    f"bridge/{family}": lambda family=family: _wrapped(signal_module(family))
    for family in SIGNALS
    if family != "wav2vec2" or HookedTransformer is None  # TransformerLens 3.9 has no adapter for it
}
MULTIMODAL_BUILDERS: dict[str, Callable[[], Any]] = {
    f"bridge/{family}": lambda family=family: _wrapped(seeing_module(family)) for family in ("llava", "gemma3-sees")
}


def model_names(reads: str = "tokens") -> list[str]:
    """The names `tiny_model` knows on the installed TransformerLens, as ``class/variant``.

    Args:
        reads: ``"tokens"``, or ``"signals"`` for models of images and sound; ``"both"`` for those of images and tokens.

    Raises:
        InvalidInputError: something else.
    """
    known = {"tokens": BUILDERS, "signals": SIGNAL_BUILDERS, "both": MULTIMODAL_BUILDERS}
    if reads not in known:
        raise InvalidInputError(f"model_names: reads={reads!r}; use one of {', '.join(map(repr, known))}.")
    return list(known[reads])


def encoder_decoder_names() -> list[str]:
    """Those of them with an encoder and a decoder: `freeze` needs ``decoder_input_ids`` for them (see `tiny_input`)."""
    return [name for name in BUILDERS if name.removeprefix("bridge/") in _ENCODER_DECODER]


def tiny_input(model: Any, prompts: int = 2, length: int = 6, *, seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    """Random tokens for any model that reads tokens, and the options `freeze` needs with them.

    >>> from tensorlens_tl import freeze
    >>> input, options = tiny_input(model := tiny_model("bridge/bart"))
    >>> freeze(model, input, **options).sides
    (6, 4)

    Args:
        model: a TransformerLens model.
        prompts: how many.
        length: in tokens; an encoder–decoder's decoder gets two thirds as many.
        seed: of the tokens.

    Returns:
        Token ids `[prompt, pos]`, and of an encoder–decoder ``{"decoder_input_ids": …}``.
    """
    generator = torch.Generator().manual_seed(seed)
    view = ModelView(model)

    def draw(pos: int) -> Tensor:
        return torch.randint(3, view.d_vocab, (prompts, pos), generator=generator)

    tokens = draw(length)
    return tokens, {"decoder_input_ids": draw(max(1, 2 * length // 3))} if view.is_encoder_decoder else {}


def tiny_model(name: str, *, seed: int = 0) -> Any:
    """A two-layer, 16-wide float64 model of one class and family, with random weights, biases and gains.

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


def random_input(model: Any, length: int, generator: torch.Generator) -> Any:
    """Two random prompts, images, spectrograms or waveforms, as a model reads them.

    Args:
        model: the model.
        length: of the prompts, as far as the context goes, and about as many frames of a waveform; images and
            spectrograms have the size that the model's config says.
        generator: of the numbers.
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
