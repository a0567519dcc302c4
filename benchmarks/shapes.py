"""The models that are measured: real shapes, random weights where real ones cannot be had."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import tensorlens_tl as tlens

sys.path.append(str(Path(__file__).parents[1]))
from scripts.train_whitened import small_gpt


@dataclass(frozen=True)
class Shape:
    """One model, its plain forward through the blocks, and the multiply-adds × 2 of a block per token."""

    name: str
    model: Any
    forward: Callable[[torch.Tensor], Any]
    d_model: int
    layers: int
    matrices: int
    frozen_matrices: int

    def flops(self, tokens: int) -> float:
        """A plain forward through the blocks."""
        return 2.0 * self.layers * tokens * (self.matrices + 2 * tokens * self.d_model)

    def frozen_flops(self, tokens: int) -> float:
        """One row pulled through every block, at every token."""
        return 2.0 * self.layers * tokens * (self.frozen_matrices + tokens * self.d_model)

    def tokens(self, length: int, batch: int = 1) -> torch.Tensor:
        """Random token ids."""
        return torch.randint(5, 1000, (batch, length), generator=torch.Generator().manual_seed(0))


def bridge(module: Any, architecture: str, config: Any) -> Any:
    """A TransformerBridge around a live module."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    return build_bridge_from_module(module.eval(), architecture, hf_config=config).eval()


def bundled() -> Shape:
    model = tlens.load_demo_model()

    def forward(ids: torch.Tensor) -> None:
        with torch.no_grad():
            model(ids, stop_at_layer=4)

    return Shape("bundled", model, forward, 128, 4, 12 * 128**2, 10 * 128**2)


def bundled_longer(context: int) -> Shape:
    """The bundled model's shape with a longer context, random weights."""
    from transformer_lens import HookedTransformer

    torch.manual_seed(0)
    config = replace(tlens.load_demo_model().cfg, n_ctx=context, tokenizer_name=None, init_weights=True)
    model = HookedTransformer(config).eval()

    def forward(ids: torch.Tensor) -> None:
        with torch.no_grad():
            model(ids, stop_at_layer=4)

    return Shape("bundled", model, forward, 128, 4, 12 * 128**2, 10 * 128**2)


def plain(body: Any) -> Callable[[torch.Tensor], Any]:
    """The Hugging Face body by itself, without hooks: the fastest forward there is."""

    def forward(ids: torch.Tensor) -> None:
        with torch.no_grad():
            body(ids)

    return forward


def gpt2_small(layers: int = 12, context: int = 1024) -> Shape:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=layers, n_positions=context, attn_implementation="eager", use_cache=False)
    body = GPT2LMHeadModel(config).eval().transformer
    model = bridge(GPT2LMHeadModel(config), "GPT2LMHeadModel", config)
    return Shape("GPT-2 small", model, plain(body), 768, layers, 12 * 768**2, 10 * 768**2)


def small_neox() -> Shape:
    """The architecture of the bundled whitened model."""
    torch.manual_seed(0)
    module = small_gpt(96, 32, 128)
    module.set_attn_implementation("eager")
    model = bridge(module, "GPTNeoXForCausalLM", module.config)
    return Shape("whitened demo", model, plain(module.gpt_neox), 32, 2, 12 * 32**2, 10 * 32**2)


def llama_160m() -> Shape:
    """RMSNorm, gated MLP, grouped-query attention, rotary positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        attn_implementation="eager",
        use_cache=False,
    )
    body = LlamaForCausalLM(config).eval().model
    model = bridge(LlamaForCausalLM(config), "LlamaForCausalLM", config)
    attention, mlp = 768 * 768, 768 * 3072
    return Shape(
        "Llama-like 160M",
        model,
        plain(body),
        768,
        12,
        matrices=2 * attention + 2 * attention // 3 + 3 * mlp,
        frozen_matrices=attention + attention // 3 + 2 * mlp,
    )


def mixture(experts: int = 8, layers: int = 4) -> Shape:
    """A mixture of experts, two for each token; its forward goes through those only."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=4000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_local_experts=experts,
        num_experts_per_tok=2,
        use_cache=False,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    body = MixtralForCausalLM(config).eval().model
    model = bridge(MixtralForCausalLM(config), "MixtralForCausalLM", config)
    attention, mlp = 512 * 512, 512 * 1024
    return Shape(
        f"Mixtral-like, {experts} experts",
        model,
        plain(body),
        512,
        layers,
        matrices=3 * attention + 6 * mlp,
        frozen_matrices=attention + attention // 2 + 4 * mlp,
    )


def bert_base() -> Shape:
    from transformers import BertConfig, BertForMaskedLM, BertModel

    torch.manual_seed(0)
    config = BertConfig(attn_implementation="eager")
    model = bridge(BertForMaskedLM(config), "BertForMaskedLM", config)
    return Shape("BERT base", model, plain(BertModel(config).eval()), 768, 12, 12 * 768**2, 10 * 768**2)
