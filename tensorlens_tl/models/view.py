"""One reading of a model: HookedTransformer, HookedEncoder and TransformerBridge look alike from here.

`ModelView` says what the model is made of and hands out the weights of each block in one layout. It is
structural: nothing here imports a model class, because HookedTransformer does not exist in
TransformerLens 4. Whether the reading is right is decided by the block proof (`tensorlens_tl.passes.proof`).
"""

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.attention import floating, read_attention, shown
from tensorlens_tl.models.experts import (
    ExpertsWeights,
    PerLayerWeights,
    has_experts,
    read_experts,
    read_per_layer,
)
from tensorlens_tl.models.mixers import Mixer, read_mixer
from tensorlens_tl.models.mlps import read_mlp, read_module
from tensorlens_tl.models.patches import ClassHead, PatchWeights, read_patches
from tensorlens_tl.models.weights import (
    AttentionWeights,
    MLMHead,
    MLPWeights,
    NormWeights,
    QueryKeyWeights,
    WhiteningWeights,
    detached,
    find_activation,
    innermost,
    is_bridge_component,
    is_norm,
    norm_weights,
    tried_norm,
)

NORMS = ("ln1", "ln1_post", "ln2", "ln2_post", "ln3", "ln3_post")
ATTENTION = ("attn", "self_attn")
EXPERTS_BESIDE = {
    "experts": ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
    "shared": ("ln2", "post_feedforward_layernorm_1"),
}
PER_LAYER_NORM = "post_per_layer_input_norm"
MLPS = ("mlp", "moe", "shared_mlp")
MIXERS = ("mixer", "mamba", "conv", "linear_attn")
STACKS = ("encoder_blocks", "decoder_blocks")


class BlockView:
    """The parts of one transformer block.

    Attributes:
        layer: which of all the model's blocks, those of an encoder before those of its decoder.
        name: where its hook points are: ``"blocks.0"``, ``"decoder_blocks.0"``.
    """

    def __init__(self, model: "ModelView", layer: int, stack: str = "blocks", number: int | None = None):
        self.model = model
        self.layer = layer
        number = layer if number is None else number
        self.name = f"{stack}.{number}"
        self.module: Any = getattr(model.model, stack)[number]

    @property
    def mixer_name(self) -> str:
        """What the block calls its self-attention, or what it has instead."""
        return next((name for name in (*ATTENTION, *MIXERS) if name in self.module._modules), "attn")

    @cached_property
    def mixer(self) -> Mixer | None:
        """What mixes positions in place of attention, from what it reads to its map; None where attention does.

        Refuses both beside each other, and a mixer that is not read.
        """
        parts = [name for name in (*ATTENTION, *MIXERS) if name in self.module._modules]
        if len(parts) > 1:
            raise self._refuse(f"{' and '.join(parts)} beside each other, which is not read.")
        if not parts or parts[0] in ATTENTION:
            return None
        inner = innermost(self.module._modules[parts[0]])
        if hasattr(inner, "q_proj") and hasattr(inner, "o_proj") and not hasattr(inner, "A_log"):
            raise self._refuse(
                f"{parts[0]} is attention here ({type(inner).__name__}), and TransformerLens shows no pattern of it."
            )
        try:
            return read_mixer(inner, self._refuse)
        except UnsupportedModelError as error:
            raise self._refuse(f"{parts[0]}: {error}") from None

    @property
    def width(self) -> int:
        """Numbers that a vector takes inside attention, or inside what the block has instead, at most."""
        if self.mixer is None:
            return 3 * self.attention.W_O.shape[0]
        parameters = innermost(self.module._modules[self.mixer_name]).parameters()
        return 3 * max(max(parameter.shape) for parameter in parameters)

    def _refuse(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.name} of this {self.model.description}: {what}")

    @cached_property
    def norms(self) -> dict[str, NormWeights]:
        """The block's norms by TransformerLens name, in block order; absent ones (Identity, None) are left out.

        So are an MLP's where there is none: folding gives attention-only blocks an `ln2` that never runs.
        """
        names = NORMS if self.has_mlp else ("norm", *NORMS[:2])
        return self._norms(name for name in names if name not in self.inner_norms)

    @cached_property
    def inner_norms(self) -> dict[str, NormWeights]:
        """Norms inside its sublayers: around experts that stand beside an MLP, and after an input of its own."""
        beside = [name for pair in EXPERTS_BESIDE.values() for name in pair] if self.has_experts_beside else []
        return self._norms([*beside, PER_LAYER_NORM] if PER_LAYER_NORM in self.module._modules else beside)

    def _norms(self, names: Iterable[str]) -> dict[str, NormWeights]:
        found = {name: getattr(self.module, name, None) for name in names}
        return {name: norm_weights(norm, self.model.cfg) for name, norm in found.items() if is_norm(norm)}

    @property
    def has_experts_beside(self) -> bool:
        """Whether experts stand beside its MLP, each with norms of its own (Gemma 4)."""
        return {"mlp", "experts"} <= set(self.module._modules)

    @cached_property
    def per_layer(self) -> PerLayerWeights | None:
        """What it adds for an input of each token at this layer, or None."""
        if "per_layer_input_gate" not in self.module._modules:
            return None
        return read_per_layer(innermost(self.module), self.model.cfg, self._refuse)

    @cached_property
    def whitening(self) -> WhiteningWeights | None:
        """What `tensorlens_tl.whiten` put in front of the block, or None; refuses what is not such a recursion."""
        module: Any = getattr(self.module, "whitening", None)
        if getattr(getattr(self.module, "attn", None), "whitening", None) is not None:
            raise self._refuse("attention reads a whitened copy of the stream; only whiten(reads='stream') is read.")
        if module is None:
            return None
        entry, step = getattr(module, "entry", None), getattr(module, "step", None)
        if not isinstance(entry, Tensor) or not isinstance(step, Tensor):
            raise self._refuse(f"its whitening ({type(module).__name__}) has no readable entry and step.")
        return WhiteningWeights(self._floating(entry, "whitening.L_inv"), self._floating(step, "whitening.M"))

    @cached_property
    def attention(self) -> AttentionWeights:
        """The attention weights; refuses what is not softmax attention with readable weights."""
        if self.mixer is not None:
            raise self._refuse(
                f"{self.mixer_name} is no softmax attention (a state-space layer, a delta rule, a convolution): it has "
                "no pattern and no heads that are read. The operator and what is made from it work (tensorlens, "
                "gradients, logit_attribution); tlens.implicit_attention shows which tokens it takes from."
            )
        found: Any = getattr(self.module, self.mixer_name, None)
        if found is None:
            raise self._refuse(self._what_it_has())
        read = read_attention(found, self.model.cfg, self._refuse)
        if self.branch_factor == 1:
            return read
        b_O = None if read.b_O is None else read.b_O * self.branch_factor
        return replace(read, W_O=read.W_O * self.branch_factor, b_O=b_O)

    def _what_it_has(self) -> str:
        """Why there is no attention and no mixer to be read."""
        kind = type(innermost(self.module)).__name__
        shown = [name for name, part in self.module._modules.items() if is_bridge_component(part)]
        if not shown:
            return (
                f"it ({kind}) shows nothing inside: TransformerLens has hook points at its two ends only, so that what "
                "its parts read, and any pattern, cannot be seen."
            )
        return (
            f"it ({kind}) has {', '.join(shown)}: no attention, and no mixer under a name that is read "
            f"({', '.join(MIXERS)})."
        )

    @cached_property
    def cross_attention(self) -> AttentionWeights | None:
        """The weights by which a decoder block reads the encoder's output, or None."""
        cross = self.module._modules.get("cross_attn")
        if getattr(getattr(self.module, self.mixer_name, None), "hook_cross_pattern", None) is not None:
            raise self._refuse("self- and cross-attention in one softmax (T5Gemma 2), which is not read.")
        if cross is None:
            return None
        read = read_attention(cross, self.model.cfg, self._refuse)
        if not read.hooked:
            raise self._refuse("cross-attention with a gate or a norm inside, which is not read.")
        return read

    @property
    def plain_attention(self) -> AttentionWeights:
        """The attention weights; refuses attention that is more than pattern, W_V and W_O."""
        if not self.attention.hooked:
            raise self._refuse(
                "a gate, a norm or a latent stands inside its attention: what a head reads and writes is no product of "
                "W_V and W_O alone. The operator and what is made from it work (tensorlens, decompx, terms, effects)."
            )
        return self.attention

    @property
    def branch_factor(self) -> float:
        """What the block multiplies both branches by before it adds them to the stream (Granite)."""
        return float(getattr(innermost(self.module), "residual_multiplier", 1.0))

    @cached_property
    def query_key(self) -> QueryKeyWeights:
        """The weights that make the attention scores; refuses what has none that can be read."""
        if self.mixer is not None:
            _ = self.attention  # refuses
        attn: Any = getattr(self.module, self.mixer_name, None)
        # as with W_V: HookedTransformer expands W_K to query heads and keeps _W_K
        kept = "_W_K" if hasattr(attn, "_W_K") else "W_K"
        W_Q, W_K = shown(attn, "W_Q"), shown(attn, kept)
        if not isinstance(W_Q, Tensor) or not isinstance(W_K, Tensor) or W_Q.ndim != 3 or W_K.ndim != 3:
            raise self._refuse("no readable W_Q and W_K [head, d_model, d_head]; its attention scores cannot be read.")
        b_Q, b_K = shown(attn, "b_Q"), shown(attn, kept.replace("W", "b"))
        norms = {name: getattr(attn, name, None) for name in ("q_norm", "k_norm")}
        inner = getattr(norms["q_norm"], "original_component", norms["q_norm"])
        epsilon = getattr(inner, "variance_epsilon", getattr(inner, "eps", getattr(self.model.cfg, "eps", 1e-5)))
        return QueryKeyWeights(
            W_Q=rearrange(self._floating(W_Q, "attn.W_Q"), "head d_model d_head -> d_model (head d_head)"),
            b_Q=None if b_Q is None else b_Q.detach().reshape(-1),
            W_K=rearrange(self._floating(W_K, "attn.W_K"), "kv d_model d_head -> d_model (kv d_head)"),
            b_K=None if b_K is None else b_K.detach().reshape(-1),
            q_norm=None if norms["q_norm"] is None else norm_weights(norms["q_norm"], self.model.cfg),
            k_norm=None if norms["k_norm"] is None else norm_weights(norms["k_norm"], self.model.cfg),
            epsilon=float(epsilon) if isinstance(epsilon, (int, float)) else 1e-5,
        )

    def with_weights(self, weights: Mapping[str, Tensor]) -> "BlockView":
        """This reading with other weights, by TransformerLens' names; what the block itself holds is not touched."""

        def flat(name: str) -> Tensor | None:
            if name not in weights:
                return None
            weight = weights[name].detach().to(self.attention.W_O)
            if name == "W_O":
                return rearrange(weight, "head d_head d_model -> (head d_head) d_model")
            return weight.reshape(-1) if name.startswith("b") else rearrange(weight, "h m d -> m (h d)")

        if self.branch_factor != 1:
            raise self._refuse("its branches are multiplied by a constant; other weights for it are not read.")
        fields = {"W_V": "value_matrix"}
        other = BlockView(self.model, self.layer)
        other.norms = self.norms
        for part, names in (("attention", ("W_V", "b_V", "W_O")), ("query_key", ("W_Q", "b_Q", "W_K", "b_K"))):
            changed = {fields.get(name, name): new for name in names if (new := flat(name)) is not None}
            setattr(other, part, replace(getattr(self, part), **changed) if changed else getattr(self, part))
        named = {name: weights[name] for name in ("W_in", "W_gate", "W_out") if name in weights}
        other.mlp = self.mlp
        if isinstance(self.mlp, MLPWeights) and named:
            mlp = self.mlp
            other.mlp = replace(mlp, **{name: weight.to(mlp.W_in) for name, weight in named.items()})
        return other

    @property
    def scalar(self) -> Tensor | None:
        """What the block multiplies its output by (Gemma 4), `[1]`; None for nothing."""
        return detached(getattr(innermost(self.module), "layer_scalar", None))

    @property
    def has_mlp(self) -> bool:
        """Whether the block has an MLP, readable or not."""
        return self._mlp_module is not None

    @property
    def mlp_name(self) -> str:
        """What the block calls its MLP or its experts."""
        return next((name for name in MLPS if self.module._modules.get(name) is not None), "mlp")

    @property
    def _mlp_module(self) -> Any:
        return getattr(self.module, self.mlp_name, None)

    @property
    def shared_name(self) -> str | None:
        """What it calls a shared expert that stands beside its experts instead of among them; None without."""
        beside = [name for name in MLPS if self.module._modules.get(name) is not None]
        return beside[1] if len(beside) > 1 else None

    @cached_property
    def mlp(self) -> MLPWeights | ExpertsWeights | None:
        """The weights of the MLP, or of its experts; None without; refuses what is neither plain nor gated."""
        mlp: Any = self._mlp_module
        if mlp is None:
            return None
        if self.has_experts_beside:
            read = read_experts(self.module, self.model.cfg, self._refuse)
            return replace(read, shared=read_mlp(mlp, self.model.cfg, self._refuse), around=EXPERTS_BESIDE)
        if has_experts(mlp):
            read = read_experts(mlp, self.model.cfg, self._refuse)
            if self.shared_name is not None:
                shared = innermost(self.module._modules[self.shared_name])
                read = replace(read, shared=read_module(shared, self.model.cfg, self._refuse))
            return read if self.branch_factor == 1 else replace(read, branch_factor=self.branch_factor)
        plain = read_mlp(mlp, self.model.cfg, self._refuse)
        if self.branch_factor == 1:
            return plain
        b_out = None if plain.b_out is None else plain.b_out * self.branch_factor
        return replace(plain, W_out=plain.W_out * self.branch_factor, b_out=b_out)

    @property
    def dense_mlp(self) -> MLPWeights | None:
        """The MLP's weights; refuses a mixture of experts, whose neurons are not the same for every token."""
        if isinstance(self.mlp, ExpertsWeights):
            raise self._refuse(
                "its MLP is a mixture of experts: which neurons a token meets depends on where it is sent. The "
                "operator and what is made from it work; this needs one MLP for all tokens."
            )
        return self.mlp

    def _floating(self, weight: Tensor, name: str) -> Tensor:
        return floating(weight, name, self._refuse)


class ModelView:
    """What a TransformerLens model is made of, whichever its class."""

    def __init__(self, model: Any):
        self.is_encoder_decoder = all(hasattr(model, stack) for stack in STACKS)
        for needed in ("cfg", "blocks", "hook_dict", "run_with_hooks"):
            if not hasattr(model, needed) and not (needed == "blocks" and self.is_encoder_decoder):
                hint = " The model comes first, then the input; load one by its name first." * isinstance(model, str)
                if hasattr(model, "from_pretrained"):
                    hint = (
                        " Wrap a Hugging Face model with TransformerBridge.boot_transformers(name, hf_model=model), "
                        "name being its name on the hub or a folder with its config (model.save_pretrained(folder))."
                    )
                raise UnsupportedModelError(
                    f"{type(model).__name__} has no `{needed}`: pass a HookedTransformer, a HookedEncoder or a "
                    "TransformerBridge (a HookedEncoderDecoder is not supported; boot it as a Bridge)." + hint
                )
        self.model = model
        self.cfg: Any = model.cfg
        self.class_name = type(model).__name__
        self.is_bridge = hasattr(model, "original_model")
        self.is_hooked_encoder = not self.is_bridge and hasattr(model, "encoder_output")
        if self.reads == "tokens" and self.d_vocab < 1:
            raise UnsupportedModelError(
                f"{self.description} reads neither tokens nor, as far as its config says, images or sound."
            )
        stacks = STACKS if self.is_encoder_decoder else ("blocks",)
        places = [(stack, number) for stack in stacks for number in range(len(getattr(model, stack)))]
        self.blocks = [BlockView(self, layer, *place) for layer, place in enumerate(places)]
        self.encoder_layers = len(model.encoder_blocks) if self.is_encoder_decoder else 0
        if getattr(self.cfg, "use_split_qkv_input", False) or getattr(self.cfg, "use_attn_in", False):
            raise UnsupportedModelError(
                "cfg.use_split_qkv_input and cfg.use_attn_in add a head axis to the residual stream; "
                "switch them off (model.set_use_split_qkv_input(False)) before freezing."
            )

    def __repr__(self) -> str:
        return f"ModelView({self.description}, layers={self.n_layers})"

    def with_weights(self, weights: Mapping[int, Mapping[str, Tensor]]) -> "ModelView":
        """This reading with other weights in some blocks, by TransformerLens' names; the model itself keeps its own."""
        other = copy(self)
        other.blocks = [
            block.with_weights(weights[block.layer]) if block.layer in weights else block for block in self.blocks
        ]
        return other

    def refuse_encoder_decoder(self, what: str) -> None:
        """Refuse an encoder–decoder where something reads blocks as those of one stack.

        Raises:
            UnsupportedModelError: the model is one.
        """
        if self.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{what}: not read of an encoder–decoder yet, whose blocks are of two stacks ({self.description}). The "
                "operator, method='tensorlens', method='decompx' and gradients are exact for it."
            )

    @property
    def is_whitened(self) -> bool:
        """Whether the stream of any block is whitened first."""
        return any(block.whitening is not None for block in self.blocks)

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None where it has none that can read a text.

        Of a folder without one transformers makes an empty placeholder, which knows nothing but special tokens.
        """
        tokenizer = getattr(self.model, "tokenizer", None)
        if tokenizer is None or len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            return None
        return tokenizer

    @cached_property
    def wrapped_twice(self) -> bool:
        """Whether a Bridge wraps parts that another Bridge has wrapped already."""
        modules = self.model.modules() if self.is_bridge else ()
        return any(is_bridge_component(getattr(m, "original_component", None)) for m in modules)

    @property
    def description(self) -> str:
        """Class and name, for messages; the architecture where the name says nothing."""
        name = getattr(self.cfg, "model_name", "custom")
        architecture = getattr(self.cfg, "architecture", None)
        return f"{self.class_name} ({architecture if architecture and name in ('custom', 'external') else name})"

    @property
    def n_layers(self) -> int:
        """The number of blocks."""
        return len(self.blocks)

    @property
    def n_ctx(self) -> int:
        """The longest prompt (of images and sound the config says nothing reliable)."""
        return self.cfg.n_ctx

    @property
    def d_vocab(self) -> int:
        """The size of the vocabulary; of a model of images or sound, how many classes it tells apart."""
        if self.reads != "tokens":
            return 0 if self.unembedding is None else self.unembedding[0].shape[1]
        return self.cfg.d_vocab

    @property
    def decoder_vocab(self) -> int:
        """The size of the vocabulary that an encoder–decoder's decoder reads (Marian may have two)."""
        return getattr(self.config, "decoder_vocab_size", None) or self.d_vocab

    @property
    def reads(self) -> str:
        """What the model reads: ``"tokens"``, ``"images"`` or ``"sound"``."""
        if getattr(self.cfg, "is_visual_model", False):
            return "images"
        return "sound" if getattr(self.cfg, "is_audio_model", False) else "tokens"

    @property
    def config(self) -> Any:
        """The Hugging Face config of a Bridge, or None."""
        return getattr(getattr(self.model, "original_model", None), "config", None)

    @cached_property
    def patches(self) -> PatchWeights | None:
        """How an image's patches (or a spectrogram's) are embedded, or None."""
        if self.reads == "tokens":
            return None
        return read_patches(getattr(self.model, "embed", None), transposed=self.reads == "sound")

    @cached_property
    def class_head(self) -> ClassHead | None:
        """Where the classes of an image or a spectrogram are read from; None where logits are those of positions."""
        if self.reads == "tokens" or getattr(self.model, "unembed", None) is None:
            return None
        norm: Any = getattr(self.model, "classifier_ln", None)
        if is_norm(norm):  # an audio spectrogram transformer's mean of CLS and distillation token
            return ClassHead(2, norm_weights(norm, self.cfg))
        return ClassHead(1, None) if self.reads == "images" else None

    @cached_property
    def labels(self) -> dict[int, str]:
        """The names of a classifier's classes; empty for other models."""
        if self.class_head is None:
            return {}
        return {int(number): str(label) for number, label in (getattr(self.config, "id2label", None) or {}).items()}

    @cached_property
    def final_norm(self) -> NormWeights | None:
        """The norm after the last block, or None (in a masked language model `ln_final` belongs to the head)."""
        return None if hasattr(self.model, "mlm_head") else self._end_norm(self.final_norm_name)

    @property
    def final_norm_name(self) -> str:
        """What the model calls the norm after its last block."""
        if getattr(self.config, "do_stable_layer_norm", False):  # Hubert and Wav2Vec2 with norms before sublayers
            return "embed_ln"
        return "decoder_ln_final" if self.is_encoder_decoder else "ln_final"

    @cached_property
    def encoder_norm(self) -> NormWeights | None:
        """The norm after an encoder–decoder's last encoder block, or None."""
        return self._end_norm("encoder_ln_final")

    def _end_norm(self, name: str) -> NormWeights | None:
        norm = getattr(self.model, name, None)
        return norm_weights(norm, self.cfg) if is_norm(norm) else None

    @cached_property
    def mlm_head(self) -> MLMHead | None:
        """A masked language model's transform before the unembedding, or None."""
        head = getattr(self.model, "mlm_head", None)
        if head is None:
            return self._prediction_head()
        phi = find_activation(head, self.cfg)
        if phi is None:
            raise UnsupportedModelError(f"mlm_head of {self.description}: unknown activation {self.cfg.act_fn!r}.")
        if is_bridge_component(head):
            linear, norm, scale = head.original_component, self.model.ln_final, "ln_final.hook_scale"
            weight, bias = linear.weight.T, linear.bias
        else:
            weight, bias, norm, scale = head.W, head.b, head.ln, "mlm_head.ln.hook_scale"
        return MLMHead(weight.detach(), detached(bias), phi, norm_weights(norm, self.cfg), scale)

    def _prediction_head(self) -> MLMHead | None:
        """The same after a final norm of its own (ModernBERT), or None."""
        head: Any = innermost(getattr(self.model, "prediction_head", None))
        if head is None:
            return None
        parts = [getattr(head, name, None) for name in ("dense", "act", "norm")]
        if not all(callable(part) for part in parts):
            raise UnsupportedModelError(f"prediction_head of {self.description}: no dense, act and norm that are read.")
        dense, phi, norm = (part for part in parts if part is not None)
        read = tried_norm(norm, self.cfg, width=dense.weight.shape[0])
        return MLMHead(dense.weight.detach().T, detached(dense.bias), phi, read, None)

    @cached_property
    def unembedding(self) -> tuple[Float[Tensor, "d_model d_vocab"], Float[Tensor, "d_vocab"] | None] | None:
        """W_U and b_U, or None for a model that predicts no tokens."""
        unembed = getattr(self.model, "unembed", None)
        if unembed is None:
            return None
        if getattr(unembed, "W_U", None) is None and isinstance(getattr(unembed, "weight", None), Tensor):
            return unembed.weight.detach().T, detached(getattr(unembed, "bias", None))  # an image classifier's
        b_U, model = detached(getattr(unembed, "b_U", None)), getattr(self.model, "original_model", None)
        added = detached(getattr(model, "final_logits_bias", None))  # BART adds one besides
        return unembed.W_U.detach(), b_U if added is None else added[0] if b_U is None else b_U + added[0]

    def logits(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_vocab"]:
        """``cap((x·W_U + b_U) · factor)`` of what is unembedded (in a masked model, what its prediction head gives).

        Raises:
            UnsupportedModelError: the model predicts no tokens.
        """
        if self.unembedding is None:
            raise UnsupportedModelError(f"{self.description} predicts no tokens.")
        W_U, b_U = self.unembedding
        made = x.to(W_U) @ W_U
        made = (made if b_U is None else made + b_U) * self.logit_factor
        return made if self.soft_cap is None else self.soft_cap * torch.tanh(made / self.soft_cap)

    @cached_property
    def logit_factor(self) -> float:
        """What the model multiplies its logits by before any soft cap (Granite, Cohere, MuseGlimmer); most often 1."""
        config: Any = getattr(getattr(self.model, "original_model", None), "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        factor = getattr(config, "logit_scale", None) or getattr(config, "output_multiplier", None) or 1.0
        if self.scales_decoder_output:
            factor = float(factor) * float(config.d_model) ** -0.5
        return float(factor) / float(getattr(config, "logits_scaling", None) or 1.0)

    @property
    def scales_decoder_output(self) -> bool:
        """Whether what is unembedded is the final norm's output times √(1/d_model) (T5 with tied embeddings)."""
        config: Any = getattr(getattr(self.model, "original_model", None), "config", None)
        tied = getattr(config, "tie_word_embeddings", False) and getattr(config, "model_type", "") != "mt5"
        tied = getattr(config, "scale_decoder_outputs", tied)
        return self.is_encoder_decoder and hasattr(config, "relative_attention_num_buckets") and bool(tied)

    @cached_property
    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """W_E, as stored: some models (Gemma) multiply it by a constant on its way into the residual stream."""
        embed = getattr(self.model, "embed", None)
        for owner in (embed, getattr(embed, "embed", None)):  # a HookedEncoder's is one module further in
            W_E = getattr(owner, "W_E", None)
            if isinstance(W_E, Tensor):
                return W_E.detach()
        raise UnsupportedModelError(f"{self.description} has no readable embedding W_E.")

    @property
    def soft_cap(self) -> float | None:
        """The final logits' soft cap c·tanh(x/c), or None."""
        cap = getattr(self.cfg, "output_logits_soft_cap", None)
        return float(cap) if cap is not None and cap > 0 else None

    def provenance(self) -> dict[str, str]:
        """What a result depends on besides the prompt: names, versions, weight processing, dtype."""
        from importlib.metadata import version

        return {
            "model": str(getattr(self.cfg, "model_name", "custom")),
            "class": self.class_name,
            "transformer_lens": version("transformer-lens"),
            "weight_processing": self.weight_processing,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
        }

    @cached_property
    def weight_processing(self) -> str:
        """How the weights were rewritten: logits and residual basis depend on it, logit differences do not.

        Read off the weights themselves: norms without gain and shift (folded into what reads them, or never trained),
        and zero means of what is written or unembedded.
        """
        norms = [norm for block in self.blocks for norm in block.norms.values()]
        plain = bool(norms) and all(
            (norm.gain is None or bool((norm.gain == 1).all())) and (norm.shift is None or not bool(norm.shift.any()))
            for norm in norms
        )
        found = {
            "plain norms": plain,
            "centred writing": any(_zero_mean(b.attention.W_O[:8]) for b in self.blocks[:1] if b.mixer is None),
            "centred unembedding": self.unembedding is not None and _zero_mean(self.unembedding[0][:8]),
        }
        return ", ".join(name for name, present in found.items() if present) or "raw"


def _zero_mean(rows: Tensor) -> bool:
    return bool((rows.mean(-1).abs() <= 1e-4 * rows.std(-1)).all())
