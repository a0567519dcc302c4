"""Builders of the tiny models: one function for each class, and a table of them by name."""

import importlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from tensorlens_tl.testing.configurations import (
    BRIDGE,
    CONTEXT,
    ENCODER_DECODER,
    HEADS,
    HOOKED,
    HOOKED_T5,
    LAYERS,
    VOCABULARY,
    WIDTH,
)
from tensorlens_tl.testing.families import Options
from tensorlens_tl.testing.signals import SIGNALS, seeing_module, signal_module
from tensorlens_tl.whitening import whiten

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
    """A HookedTransformer with other options than `SIZES`, its weights processed or as they are."""
    config = {**SIZES, **ON_CPU, "default_prepend_bos": False, **options}
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

    builder = importlib.import_module("transformer_lens.model_bridge.sources._bridge_builder")
    config_name, architecture, options = BRIDGE[family]
    config = getattr(transformers, config_name)(**{**options, **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the others have no float64
    auto = AutoModelForCausalLM
    if "MaskedLM" in architecture:
        auto = AutoModelForMaskedLM
    if family in ENCODER_DECODER:
        auto = AutoModelForSeq2SeqLM
    module = auto.from_config(config, attn_implementation="eager").to(torch.float64).eval()
    randomise(module)
    model = builder.build_bridge_from_module(module, architecture, hf_config=config)
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
