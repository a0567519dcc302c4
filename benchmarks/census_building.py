"""From a name of TransformerLens to a tiny random model of it, wrapped as a TransformerBridge, and an input for it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any
from unittest.mock import patch

import torch
import transformers
from census_models import (
    ALIASES,
    ENCODER_DECODER,
    OVERRIDES,
    SOUND,
    VARIANTS,
    VISION,
    VOCABULARY,
    WIDTH,
    kind_of,
    small,
)
from torch import Tensor
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import tensorlens_tl as tlens

LEARNED_BUFFERS = {"e_score_correction_bias", "expert_bias", "final_logits_bias", "layer_scalar"}
"""What checkpoints fill although it is no parameter: 0 or 1 in a new model, where it would not be seen."""


@dataclass(frozen=True)
class Case:
    """A tiny model, what it is run on, and what the Hugging Face model made of that before it was wrapped."""

    bridge: Any
    input: Tensor
    options: dict[str, Any]
    reference: Tensor | None = None


class NotBuildableError(Exception):
    """There is no class to build the model from, or it does not run."""


class BridgeError(Exception):
    """TransformerLens does not wrap or run the model."""


def described(error: Exception) -> str:
    """Type, message and the library's own function that an exception left last."""
    ours = [at for at in extract_tb(error.__traceback__) if Path(tlens.__file__).parent in Path(at.filename).parents]
    where = f" (in {Path(ours[-1].filename).name}, {ours[-1].name})" if ours else ""
    return f"{type(error).__name__}: {str(error).strip()[:300]}{where}"


def build(name: str, variant: str = "") -> Case:
    """The tiny model of a name, wrapped, and an input for it.

    Raises:
        NotBuildableError, BridgeError: see there.
    """
    overrides = VARIANTS[name][variant] if variant else OVERRIDES.get(ALIASES.get(name, name), {})
    with _failing_as(BridgeError), patch.object(ArchitectureAdapter, "_check_required_libraries"):
        # TransformerLens asks for torchvision and timm, which a run on text does not need
        if name == "TransformerLensNative":
            return _native(**overrides) if isinstance(overrides, Mapping) else _native()
        with _failing_as(NotBuildableError):
            module = _module(name, overrides)
            input, options = _input(name)
            reference = _reference(module, input, options)
        bridge = build_bridge_from_module(module, name, hf_config=module.config).eval()
        for part in bridge.modules():
            scans = hasattr(getattr(part, "original_component", None), "A_log")
            if scans and hasattr(part, "eager_scan"):  # a scan's hook points fire only in its Python form
                part.eager_scan = True
        with torch.no_grad():
            bridge(input, **options)
        return Case(bridge, input, options, reference)


@contextmanager
def _failing_as(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (NotBuildableError, BridgeError):
        raise
    except Exception as error:
        raise kind(described(error)) from error


def _module(name: str, overrides: Any) -> Any:
    cls = getattr(transformers, ALIASES.get(name, name), None)
    if cls is None:
        raise NotBuildableError("transformers has no class of this name; its code comes with a checkpoint.")
    config = overrides() if callable(overrides) else small(cls.config_class, **deepcopy(dict(overrides)))
    torch.manual_seed(3)
    with _without_vision_tower(name):
        module = cls(config).eval()
    for choose in ("set_attn_implementation", "set_experts_implementation"):
        with suppress(AttributeError, ValueError):  # not every class has a choice
            getattr(module, choose)("eager")
    module = module.double()
    randomise(module)
    return module


@contextmanager
def _without_vision_tower(name: str) -> Iterator[None]:
    """Gemma 3n's needs timm, but a run on text does not use it."""
    if not name.startswith("Gemma3n"):
        yield
        return
    from transformers.models.gemma3n import modeling_gemma3n

    make = modeling_gemma3n.AutoModel.from_config

    def text_and_sound(config: Any, **options: Any) -> Any:
        return torch.nn.Identity() if "Vision" in type(config).__name__ else make(config=config, **options)

    with patch.object(modeling_gemma3n.AutoModel, "from_config", text_and_sound):
        yield


def _native(**options: Any) -> Case:
    sizes = {
        "d_model": WIDTH,
        "d_head": 8,
        "n_heads": 4,
        "n_layers": 2,
        "n_ctx": 32,
        "d_vocab": VOCABULARY,
        "d_mlp": 40,
    }
    config = TransformerBridgeConfig(**{**sizes, "act_fn": "gelu", "normalization_type": "LN", **options})
    bridge = TransformerBridge.boot_native(config).double().eval()
    randomise(bridge, 2.0)
    return Case(bridge, *_input("TransformerLensNative"))


def randomise(module: torch.nn.Module, scale: float = 4.0) -> None:
    """Biases and gains that are not 0 and 1, and weights large enough for nonlinearities to be seen."""
    torch.manual_seed(7)
    for name, parameter in module.named_parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif "A_log" not in name:  # a decay: larger is no longer a model
            parameter.data = parameter.data * scale + 0.005 * torch.randn_like(parameter)
    for name, buffer in module.named_buffers():
        if name.rpartition(".")[2] in LEARNED_BUFFERS:
            buffer += 0.1 * torch.randn_like(buffer)


def _input(name: str) -> tuple[Tensor, dict[str, Any]]:
    """What the model is run on: tokens, pictures or sound, and the keywords beside it."""
    torch.manual_seed(11)
    kind = kind_of(name)
    if kind == VISION:
        return torch.randn(1, 3, 8, 8, dtype=torch.float64), {}
    if kind == SOUND:  # a spectrogram or a wave
        return torch.randn((1, 16, 8) if name.startswith("AST") else (1, 400), dtype=torch.float64), {}
    tokens = torch.randint(3, 50, (1, 6))
    if kind == ENCODER_DECODER or name.startswith("Florence2"):
        return tokens, {"decoder_input_ids": torch.randint(3, 50, (1, 5))}
    return tokens, {}


def _reference(module: Any, input: Tensor, options: Mapping[str, Any]) -> Tensor | None:
    with torch.no_grad():
        made = module(**{module.main_input_name: input}, **options)
    return result_of(made)


def result_of(made: Any) -> Tensor | None:
    """Logits, or hidden states where there are none."""
    if isinstance(made, Tensor):
        return made
    found = getattr(made, "logits", None)
    return found if found is not None else getattr(made, "last_hidden_state", None)
