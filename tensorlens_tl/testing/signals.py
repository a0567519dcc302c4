"""Tiny models that read no tokens, or more than tokens, as Hugging Face modules; see `tensorlens_tl.testing.models`."""

import importlib
from typing import Any

from tensorlens_tl.testing.families import Family

VOCABULARY = 48
WIDTH = 16

_SMALL = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_IMAGE = {**_SMALL, "image_size": 8, "patch_size": 4, "num_labels": 5}
_SPECTROGRAM = {
    **_SMALL, "patch_size": 4, "frequency_stride": 3, "time_stride": 3, "max_length": 10, "num_mel_bins": 7,
    "num_labels": 5,
}  # fmt: skip
_WAVES = {
    **_SMALL, "vocab_size": VOCABULARY, "conv_dim": (WIDTH, WIDTH), "conv_stride": (4, 4), "conv_kernel": (4, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_EYES = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 8,
    "patch_size": 4, "projection_dim": WIDTH,
}  # fmt: skip
_TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": 24, "num_key_value_heads": 2, "head_dim": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

SIGNALS: dict[str, Family] = {
    "vit": ("ViTConfig", "ViTForImageClassification", _IMAGE),
    "vit-headless": ("ViTConfig", "ViTModel", _IMAGE),
    "deit": ("DeiTConfig", "DeiTForImageClassification", _IMAGE),
    "ast": ("ASTConfig", "ASTForAudioClassification", _SPECTROGRAM),
    "hubert": ("HubertConfig", "HubertForCTC", _WAVES),
    "hubert-stable": ("HubertConfig", "HubertForCTC", {**_WAVES, "do_stable_layer_norm": True}),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC", _WAVES),
}
"""Models of images and sound: config, architecture, and the config's fields."""


def signal_module(family: str) -> Any:
    """One of `SIGNALS` with its usual initial weights."""
    transformers: Any = importlib.import_module("transformers")
    config, architecture, options = SIGNALS[family]
    configuration = getattr(transformers, config)(**options)
    configuration._attn_implementation = "eager"
    return getattr(transformers, architecture)(configuration)


def seeing_module(family: str) -> Any:
    """A language model that sees: token 47 stands for a piece of an image, of which each image has four.

    Args:
        family: ``"llava"``, or ``"gemma3-sees"``, whose images attend both ways where token types say so.
    """
    transformers: Any = importlib.import_module("transformers")
    if family == "llava":
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**_EYES),
            text_config=transformers.LlamaConfig(**_TEXT),
            image_token_index=VOCABULARY - 1,
        )
        module = transformers.LlavaForConditionalGeneration(config)
    else:
        eyes = {name: value for name, value in _EYES.items() if name != "projection_dim"}
        config = transformers.Gemma3Config(
            vision_config=transformers.SiglipVisionConfig(**eyes),
            text_config=transformers.Gemma3TextConfig(**_TEXT),
            image_token_index=VOCABULARY - 1,
            boi_token_index=VOCABULARY - 2,
            eoi_token_index=VOCABULARY - 3,
            mm_tokens_per_image=4,
        )
        module = transformers.Gemma3ForConditionalGeneration(config)
    module.set_attn_implementation("eager")
    return module
