"""One reading of a model: HookedTransformer, HookedEncoder and TransformerBridge look alike from here.

`ModelView` says what the model is made of and hands out the weights of each block in one layout. It is
structural: nothing here imports a model class, because HookedTransformer does not exist in
TransformerLens 4. Whether the reading is right is decided by the block proof (`tensorlens_tl.passes.proof.blocks`).
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra import on_device
from tensorlens_tl.algebra.numerics import maybe, plus, refuse_autocast, times
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.block import BlockView
from tensorlens_tl.models.lifecycle import newly_initialised
from tensorlens_tl.models.loops import is_looped, read_loop
from tensorlens_tl.models.names import LOOPS, NORMS, STABLE, UNSCALED
from tensorlens_tl.models.other_weights import with_weights
from tensorlens_tl.models.owner import Owner
from tensorlens_tl.models.parameters import (
    MLMHead,
    NormWeights,
    Residence,
    adapter_names,
    computes_in_float32,
    detached,
    execution_device,
    find_activation,
    floating,
    innermost,
    is_adapter,
    is_bridge_component,
    is_norm,
    is_plain,
    loaded,
    lock_of,
    norm_weights,
    offloaded,
    read_embedding,
    read_linear,
    tried_norm,
    weights_read,
)
from tensorlens_tl.models.patches import ClassHead, PatchWeights, read_patches

READ_FROM = {
    "patches": ("embed",),
    "class_head": ("classifier_ln",),
    "final_norm": ("ln_final", "decoder_ln_final", "decoder_final_ln", "embed_ln"),
    "encoder_norm": ("encoder_ln_final", "encoder_final_ln"),
    "mlm_head": ("mlm_head", "ln_final", "prediction_head"),
    "unembedding": ("unembed", "project_out"),
    "embedding": ("embed", "project_in"),
}
"""Which parts of a model a property of `ModelView` reads."""

STACKS = ("encoder_blocks", "decoder_blocks")
HOOKED_STACKS = ("encoder", "decoder")
"""What an encoder–decoder calls its blocks: a Bridge, and a HookedEncoderDecoder."""

HEAD_PARTS = ("mlm_head", "prediction_head", "classifier_ln", "unembed")
"""Which parts stand between the hidden state and the logits."""


class ModelView:
    """What a TransformerLens model is made of, whichever its class.

    Attributes:
        device: where its first weight is: results are there, whichever devices its blocks run on.

    >>> from tensorlens_tl.models import ModelView
    >>> view = ModelView(model)
    >>> view, view.reads, tuple(view.embedding.shape)
    (ModelView(TransformerBridge (tensorlens-demo), layers=4), 'tokens', (2048, 128))
    """

    def __init__(self, model: Any):
        """Read a model.

        Args:
            model: any TransformerLens model.

        Raises:
            UnsupportedModelError: none of TransformerLens' classes, or a configuration that cannot be frozen.
            InvalidInputError: inside ``torch.autocast``.
        """
        self.is_hooked_encoder_decoder = _is_hooked_encoder_decoder(model)
        self.is_encoder_decoder = self.is_hooked_encoder_decoder or all(hasattr(model, stack) for stack in STACKS)
        self._stacks: Sequence[str] = ("blocks",)
        if self.is_encoder_decoder:
            self._stacks = HOOKED_STACKS if self.is_hooked_encoder_decoder else STACKS
        if is_looped(model):
            self._stacks = LOOPS
        for needed in ("cfg", *self._stacks, "hook_dict", "run_with_hooks"):
            # the class comes first: a Bridge puts its hook_dict together anew whenever it is read
            if not hasattr(type(model), needed) and not hasattr(model, needed):
                raise UnsupportedModelError(
                    f"{type(model).__name__} has no `{needed}`: pass a HookedTransformer, a HookedEncoder, a "
                    "HookedEncoderDecoder or a TransformerBridge." + _hint(model)
                )
        with lock_of(model):  # another thread may have given it other weights for a while
            self.model = model
        self.cfg: Any = model.cfg
        self.class_name = type(model).__name__
        self.is_bridge = hasattr(model, "original_model")
        self.is_hooked_encoder = not self.is_bridge and hasattr(model, "encoder_output")
        if self.reads == "tokens" and self.d_vocab < 1:
            raise UnsupportedModelError(
                f"{self.description} reads neither tokens nor, as far as its config says, images or sound."
            )
        self.loop = read_loop(model)
        blocks: list[Any] = [(stack, number) for stack in self._stacks for number in range(len(getattr(model, stack)))]
        if self.loop is not None:
            blocks = [(call.stack, number, call) for call, number in self.loop.blocks]
        self.device = execution_device(model)
        owner = Owner(model, self.cfg, self.description, self.is_hooked_encoder_decoder, self.device)
        self.blocks = [BlockView(owner, layer, *block) for layer, block in enumerate(blocks)]
        parts = {name: [getattr(model, part, None) for part in parts] for name, parts in READ_FROM.items()}
        self._residences = {name: Residence(model, *read) for name, read in parts.items()}
        self.offloaded = offloaded(*(part for read in parts.values() for part in read))
        self.encoder_layers = len(getattr(model, self._stacks[0])) if self.is_encoder_decoder else 0
        refuse_autocast(self.device)
        self.refuse_split_inputs()

    def __repr__(self) -> str:
        return f"ModelView({self.description}, layers={self.n_layers})"

    def with_weights(self, weights: Mapping[int, Mapping[str, Tensor]]) -> "ModelView":
        """This reading with other weights in some blocks, by TransformerLens' names; the model stays as it is."""
        other = self._unread()
        other.blocks = list(self.blocks)
        for layer, changed in weights.items():
            other.blocks[layer] = with_weights(self.blocks[layer], changed)
        return other

    @property
    def any_offloaded(self) -> bool:
        """Whether any of its weights are read when they are needed."""
        return self.offloaded or any(block.offloaded for block in self.blocks)

    @property
    def any_moved(self) -> bool:
        """Whether any of its blocks runs on another device than that of its first weight."""
        return any(block.moved for block in self.blocks)

    def placed(self, name: str, value: Any) -> Any:
        """What a property has read, on the device of the results; the unembedding stays where it is."""
        return value if name == "unembedding" else on_device(value, self.device)

    def unmoved(self, device: torch.device) -> "ModelView":
        """This reading with the blocks of one device read there."""
        other = self._unread()
        other.blocks = [block.unmoved() if block.device == device else block for block in self.blocks]
        return other

    def _unread(self) -> "ModelView":
        """A copy; what is loaded just now is left out."""
        other = copy(self)
        other._residences = {name: each.renewed(vars(other)) for name, each in self._residences.items()}
        return other

    def loaded(self, name: str) -> AbstractContextManager[None]:
        """Inside, what a property reads stays loaded; it is dropped at the end of the outermost one, if offloaded."""
        return self._residences[name].opened(vars(self), name) if self.offloaded else nullcontext()

    def refuse_split_inputs(self) -> None:
        """Refuse a model that runs with a copy of its residual stream for each head.

        Raises:
            UnsupportedModelError: it is configured so.
        """
        if getattr(self.cfg, "use_split_qkv_input", False) or getattr(self.cfg, "use_attn_in", False):
            raise UnsupportedModelError(
                "cfg.use_split_qkv_input and cfg.use_attn_in add a head axis to the residual stream; "
                "switch them off (model.set_use_split_qkv_input(False)) before freezing."
            )

    def require_chain(self, what: str) -> None:
        """Refuse a model whose blocks are no chain, each a map of what the one before it gives.

        Raises:
            UnsupportedModelError: an encoder–decoder, a loop, or keys and values of an earlier block.
        """
        self.refuse_encoder_decoder(what)
        self.refuse_shared_values(what)

    def require_single_streams(self, what: str) -> None:
        """Refuse a model with a block that reads another stream of its own stack besides the one it adds to.

        Raises:
            UnsupportedModelError: a loop, or keys and values of an earlier block.
        """
        self.refuse_loop(what)
        self.refuse_shared_values(what)

    def refuse_encoder_decoder(self, what: str) -> None:
        """Refuse an encoder–decoder where something reads blocks as those of one stack.

        Raises:
            UnsupportedModelError: the model is one.
        """
        self.refuse_loop(what)
        if self.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{what}: not read of an encoder–decoder yet, whose blocks are of two stacks ({self.description}). The "
                "operator, every method of attribution, the circuits logit_attribution, total_effects, head_map, paths "
                "and contribution_graph, and ov, qk, virtual_head and composition_scores take it."
            )

    def refuse_loop(self, what: str) -> None:
        """Refuse a model whose blocks run in a loop where something reads them as a chain.

        Raises:
            UnsupportedModelError: the model is one.
        """
        if self.loop is not None:
            raise UnsupportedModelError(
                f"{what}: not read of a model whose blocks run in a loop ({self.description}): {' and '.join(LOOPS)} "
                "each have a state, and a block reads the sum of both. The operator and method='tensorlens' take it."
            )

    def refuse_gradients(self, what: str) -> None:
        """Refuse a model that records no gradients in a part of its forward pass.

        Raises:
            UnsupportedModelError: the model is one.
        """
        if self.loop is not None and self.loop.without_gradients:
            raise UnsupportedModelError(
                f"{what}: {self.description} runs {self.loop.without_gradients} of its {len(self.loop.calls)} calls of "
                "a stack without recording gradients (config.L_bp_cycles), so that those of the live model lack what "
                "passes through them. method='tensorlens' has all of it; or load the model with L_bp_cycles="
                f"{[self.config.L_cycles] * self.config.H_cycles}."
            )

    def refuse_shared_values(self, what: str) -> None:
        """Refuse a model with a block whose attention takes keys and values of an earlier one.

        Raises:
            UnsupportedModelError: naming both.
        """
        for block in self.blocks:
            if block.values_layer is not None:
                raise UnsupportedModelError(
                    f"{what}: {block.name} of this {self.description} takes keys and values of block "
                    f"{block.values_layer} (shared keys and values), so that what it writes depends on the stream "
                    "there as well: no map of one block's stream is all of it. The operator, method='tensorlens' and "
                    "gradients take both streams and are exact."
                )

    @property
    def is_whitened(self) -> bool:
        """Whether the stream of any block is whitened first."""
        return any(block.whitening is not None for block in self.blocks)

    @property
    def sliding_window(self) -> int | None:
        """How many keys a Bridge's layers of sliding-window attention see; None of any other model.

        A query of padding all of whose keys are padding as well is NaN there, and so is what later layers make of it.
        """
        config: Any = getattr(getattr(self.model, "original_model", None), "config", None)
        if hasattr(config, "get_text_config"):  # of a model that reads images as well
            config = config.get_text_config()
        window = getattr(config, "sliding_window", None)
        return window if isinstance(window, int) and window > 0 else None

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
        wrapped = (getattr(module, "original_component", None) for module in self.model.modules())
        return self.is_bridge and any(map(is_bridge_component, wrapped))

    @property
    def description(self) -> str:
        """Class and name, for messages; the architecture where the name says nothing."""
        name = getattr(self.cfg, "model_name", "custom")
        if name in ("custom", "external"):
            name = getattr(self.cfg, "architecture", None) or name
        return f"{self.class_name} ({name})"

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
        if self.reads == "tokens":
            return self.cfg.d_vocab
        if self.unembedding is None:
            return 0
        return self.unembedding[0].shape[1]

    @property
    def decoder_vocab(self) -> int:
        """The size of the vocabulary that an encoder–decoder's decoder reads (Marian may have two)."""
        return getattr(self.config, "decoder_vocab_size", None) or self.d_vocab

    @property
    def mask_argument(self) -> str:
        """What the model's forward calls the mask of its input."""
        one_zero = self.is_hooked_encoder or self.is_hooked_encoder_decoder
        return "one_zero_attention_mask" if one_zero else "attention_mask"

    @property
    def decoder_argument(self) -> str:
        """What an encoder–decoder's forward calls what its decoder reads."""
        return "decoder_input" if self.is_hooked_encoder_decoder else "decoder_input_ids"

    @property
    def reads(self) -> str:
        """What the model reads: ``"tokens"``, ``"images"`` or ``"sound"``."""
        if getattr(self.cfg, "is_visual_model", False):
            return "images"
        if getattr(self.cfg, "is_audio_model", False):
            return "sound"
        return "tokens"

    @property
    def config(self) -> Any:
        """The Hugging Face config of a Bridge, or None."""
        return getattr(getattr(self.model, "original_model", None), "config", None)

    @weights_read
    def patches(self) -> PatchWeights | None:
        """How an image's patches (or a spectrogram's) are embedded, or None."""
        if self.reads == "tokens":
            return None
        return read_patches(getattr(self.model, "embed", None), transposed=self.reads == "sound")

    @weights_read
    def class_head(self) -> ClassHead | None:
        """Where the classes of an image or a spectrogram are read from; None where logits are those of positions."""
        if self.reads == "tokens" or getattr(self.model, "unembed", None) is None:
            return None
        norm: Any = getattr(self.model, "classifier_ln", None)
        if is_norm(norm):  # an audio spectrogram transformer's mean of CLS and distillation token
            return ClassHead(2, norm_weights(norm, self.cfg))
        if self.reads == "images":
            return ClassHead(1, None)
        return None

    @cached_property
    def labels(self) -> dict[int, str]:
        """The names of a classifier's classes; empty for other models."""
        if self.class_head is None:
            return {}
        return {int(number): str(label) for number, label in (getattr(self.config, "id2label", None) or {}).items()}

    @cached_property
    def norms_in_float32(self) -> bool:
        """Whether norms of a float64 model compute in float32, as its first block's do."""
        norms = [getattr(self.blocks[0].module, name, None) for name in ("norm", *NORMS)]
        with loaded(*norms):
            return any(computes_in_float32(norm) for norm in norms if is_norm(norm))

    @weights_read
    def final_norm(self) -> NormWeights | None:
        """The norm after the last block, or None (in a masked language model `ln_final` belongs to the head)."""
        if hasattr(self.model, "mlm_head"):
            return None
        norm = self._end_norm(self.final_norm_name)
        if norm is None or not self.is_hooked_encoder_decoder or not self.cfg.tie_word_embeddings:
            return norm
        # its logits are of √(1/d_model) times what the norm gives, and no hook point stands between
        gain = next(self.model.parameters()).new_full((self.cfg.d_model,), self.cfg.d_model**-0.5)
        return replace(norm, gain=times(gain, norm.gain))

    @property
    def final_norm_name(self) -> str:
        """Where the hook points of the norm after the last block are."""
        if self.loop is not None:
            return self.loop.calls[-1].norm
        if self.is_hooked_encoder_decoder:
            return "decoder_final_ln"
        if getattr(self.config, STABLE, False):
            return "embed_ln"
        return "decoder_ln_final" if self.is_encoder_decoder else "ln_final"

    @weights_read
    def encoder_norm(self) -> NormWeights | None:
        """The norm after an encoder–decoder's last encoder block, or None.

        A HookedEncoderDecoder shows what it gives before its gain, which belongs to what reads it; see
        `Owner.encoder_gain`.
        """
        if self.is_hooked_encoder_decoder:
            return replace(norm_weights(self.model.encoder_final_ln, self.cfg), gain=None)
        return self._end_norm("encoder_ln_final")

    def _end_norm(self, name: str) -> NormWeights | None:
        norm = getattr(self.model, name.partition("@")[0], None)
        if not is_norm(norm):
            return None
        return norm_weights(norm, self.cfg)

    @weights_read
    def mlm_head(self) -> MLMHead | None:
        """A masked language model's transform before the unembedding, or None."""
        head = getattr(self.model, "mlm_head", None)
        if head is None:
            return self._prediction_head()
        phi = find_activation(head, self.cfg)
        if phi is None:
            raise UnsupportedModelError(f"mlm_head of {self.description}: unknown activation {self.cfg.act_fn!r}.")
        if is_bridge_component(head):
            norm = self.model.ln_final
            scale = "ln_final.hook_scale"
            weight, bias = read_linear(head, "mlm_head", self._refuse)
        else:
            weight = head.W
            bias = head.b
            norm = head.ln
            scale = "mlm_head.ln.hook_scale"
        return MLMHead(weight.detach(), detached(bias), phi, norm_weights(norm, self.cfg), scale)

    def _prediction_head(self) -> MLMHead | None:
        """The same after a separate final norm (ModernBERT), or None."""
        head: Any = innermost(getattr(self.model, "prediction_head", None))
        if head is None:
            return None
        parts = [getattr(head, name, None) for name in ("dense", "act", "norm")]
        if not all(callable(part) for part in parts):
            raise UnsupportedModelError(f"prediction_head of {self.description}: no dense, act and norm that are read.")
        dense, phi, norm = (part for part in parts if part is not None)
        weight, bias = read_linear(dense, "prediction_head.dense", self._refuse)
        return MLMHead(weight, bias, phi, tried_norm(norm, self.cfg, width=weight.shape[1]), None)

    def _refuse(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.description}: {what}")

    @weights_read
    def unembedding(self) -> tuple[Float[Tensor, "d_model d_vocab"], Float[Tensor, "d_vocab"] | None] | None:
        """W_U and b_U, or None for a model that predicts no tokens."""
        unembed = getattr(self.model, "unembed", None)
        if unembed is None:
            return None
        W_U, b_U = self._unembedding_weights(unembed)
        if self.projection is not None:
            weight, bias = read_linear(self.projection, "project_out", self._refuse)
            if bias is not None:
                b_U = plus(bias @ W_U, b_U)
            W_U = weight @ W_U
        added = detached(getattr(getattr(self.model, "original_model", None), "final_logits_bias", None))
        if added is None:
            return W_U, b_U
        return W_U, plus(added[0], b_U)  # BART adds one besides

    @property
    def projection(self) -> nn.Module | None:
        """What narrows the stream before it is unembedded (OPT-350m): part of the unembedding here."""
        return self._projection("project_out")

    def _projection(self, name: str) -> nn.Module | None:
        module = innermost(getattr(self.model, "_modules", {}).get(name))
        return module if isinstance(module, nn.Module) else None

    def _unembedding_weights(self, unembed: Any) -> tuple[Tensor, Tensor | None]:
        module = innermost(unembed)
        changed = is_bridge_component(unembed) and isinstance(module, nn.Module) and not is_plain(module)
        if changed or (getattr(unembed, "W_U", None) is None and hasattr(unembed, "weight")):  # an image classifier's
            return read_linear(module, "unembed", self._refuse)
        return floating(unembed.W_U, "unembed.W_U", self._refuse), detached(getattr(unembed, "b_U", None))

    def logits(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_vocab"]:
        """``cap((x·W_U + b_U) · factor)`` of what is unembedded (in a masked model, what its prediction head gives).

        Raises:
            UnsupportedModelError: the model predicts no tokens.
        """
        if self.unembedding is None:
            raise UnsupportedModelError(f"{self.description} predicts no tokens.")
        refuse_autocast(x.device)
        W_U, b_U = self.unembedding
        logits = (plus(x.to(W_U) @ W_U, b_U) * self.logit_factor).to(x.device)
        if self.soft_cap is None:
            return logits
        return self.soft_cap * torch.tanh(logits / self.soft_cap)

    @cached_property
    def logit_factor(self) -> float:
        """What the model multiplies its logits by before any soft cap (Granite, Cohere, Falcon-H1, …); most often 1."""
        config = self.config
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        factor = getattr(config, "logit_scale", None) or getattr(config, "output_multiplier", None) or 1.0
        factor = float(factor) * float(getattr(config, "lm_head_multiplier", None) or 1.0)
        if self.scales_decoder_output:
            factor = float(factor) * float(config.d_model) ** -0.5
        return float(factor) / float(getattr(config, "logits_scaling", None) or 1.0)

    @property
    def scales_decoder_output(self) -> bool:
        """Whether what is unembedded is the final norm's output times √(1/d_model) (T5 with tied embeddings)."""
        if not self.is_encoder_decoder or not hasattr(self.config, "relative_attention_num_buckets"):
            return False
        tied = getattr(self.config, "tie_word_embeddings", False) and self.config.model_type not in UNSCALED
        return bool(getattr(self.config, "scale_decoder_outputs", tied))

    @weights_read
    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """W_E, as stored: some models (Gemma) multiply it by a constant on its way into the residual stream.

        Where a matrix widens it on that way (OPT-350m), it is part of it.
        """
        embedding = self._stored_embedding()
        widening = self._projection("project_in")
        if widening is None:
            return embedding
        return embedding @ read_linear(widening, "project_in", self._refuse).weight

    def _stored_embedding(self) -> Float[Tensor, "d_vocab width"]:
        embed = getattr(self.model, "embed", None)
        if is_adapter(innermost(embed)):
            return read_embedding(innermost(embed), "embed", self._refuse)
        for owner in (embed, getattr(embed, "embed", None)):  # a HookedEncoder's is one module further in
            W_E = getattr(owner, "W_E", None)
            if isinstance(W_E, Tensor):
                return W_E.detach()
        raise UnsupportedModelError(f"{self.description} has no readable embedding W_E.")

    @property
    def end_adapters(self) -> tuple[str, ...]:
        """The names of the adapters in effect in the embedding and the unembedding."""
        parts = [getattr(self.model, name, None) for name in ("embed", "unembed")]
        return tuple(sorted({name for part in parts if part is not None for name in adapter_names(part)}))

    @property
    def soft_cap(self) -> float | None:
        """The final logits' soft cap c·tanh(x/c), or None."""
        cap = float(getattr(self.cfg, "output_logits_soft_cap", None) or 0)
        return cap if cap > 0 else None

    @cached_property
    def _newly_initialised(self) -> dict[str, nn.Parameter] | None:
        return newly_initialised(self.model)

    @property
    def newly_initialised(self) -> tuple[str, ...] | None:
        """The weights that the model's checkpoint lacks, by Hugging Face's names; None where it does not show it.

        They hold random numbers (or zeros and ones): what they compute is noise
        (`tensorlens_tl.models.lifecycle.checkpoint`).
        """
        return maybe(tuple, self._newly_initialised)

    @property
    def untrained_head(self) -> tuple[str, ...]:
        """Those of them that stand between the hidden state and the logits."""
        parts: list[str] = [*HEAD_PARTS]
        if hasattr(self.model, "mlm_head"):
            parts.append("ln_final")
        return self._untrained_in(parts)

    @property
    def untrained_stack(self) -> tuple[str, ...]:
        """Those of them that the hidden state itself depends on: of embeddings, blocks and the final norm."""
        parts = [name for name, _ in self.model.named_children() if name != "original_model"]
        head = self.untrained_head
        return tuple(name for name in self._untrained_in(parts) if name not in head)

    def _untrained_in(self, parts: Sequence[str]) -> tuple[str, ...]:
        modules = [getattr(self.model, part, None) for part in parts]
        inside = {id(weight) for module in modules if module is not None for weight in module.parameters()}
        return tuple(name for name, weight in (self._newly_initialised or {}).items() if id(weight) in inside)

    def provenance(self) -> dict[str, str]:
        """What a result depends on besides the prompt: names, versions, weight processing, dtype, and where there are
        any, the weights that no checkpoint had."""
        optional = {
            "newly_initialised": ", ".join(self.newly_initialised or ()),
            "adapters": ", ".join(adapter_names(self.model)),
        }
        known = {
            "model": str(getattr(self.cfg, "model_name", "custom")),
            "class": self.class_name,
            "transformer_lens": _version_of_transformer_lens(),
            "weight_processing": self.weight_processing,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
        }
        return known | {name: names for name, names in optional.items() if names}

    @cached_property
    def weight_processing(self) -> str:
        """How the weights were rewritten: logits and residual basis depend on it, logit differences do not.

        Read off the weights themselves: norms without gain and shift (folded into what reads them, or never trained),
        and zero means of what is written or unembedded.
        """
        norms = (norm for block in self.blocks for norm in block.norms.values())  # the first one tells most often
        first = self.blocks[0]
        processed = {
            "plain norms": all(norm.is_plain for norm in norms) and any(block.norms for block in self.blocks),
            "centred writing": first.mixer is None and _zero_mean(first.attention.W_O[:8]),
            "centred unembedding": self.unembedding is not None and _zero_mean(self.unembedding[0][:8]),
        }
        return ", ".join(name for name, present in processed.items() if present) or "raw"


def _is_hooked_encoder_decoder(model: Any) -> bool:
    """Whether it is one of TransformerLens' own, which are no Bridge (up to 3.9)."""
    stacks = (getattr(model, "_modules", {}).get(stack) for stack in HOOKED_STACKS)
    return not hasattr(model, "original_model") and all(isinstance(stack, nn.ModuleList) for stack in stacks)


def _hint(model: Any) -> str:
    """What to do instead, of an object that is no model of TransformerLens."""
    if isinstance(model, str):
        return " The model comes first, then the input; load one by its name first."
    inside = {"FrozenPass": "frozen.model", "FrozenOperator": "operator.frozen"}.get(type(model).__name__)
    if inside is not None:
        return f" A {type(model).__name__} is of a model: pass {inside}, or call what takes a frozen pass."
    if hasattr(model, "get_base_model"):
        return (
            " Of a model with adapters, wrap what lies inside: "
            "TransformerBridge.boot_transformers(name, hf_model=model.get_base_model())."
        )
    if hasattr(model, "from_pretrained"):
        return (
            " Wrap a Hugging Face model with TransformerBridge.boot_transformers(name, hf_model=model), "
            "name being its name on the hub or a folder with its config (model.save_pretrained(folder))."
        )
    return ""


def _zero_mean(rows: Tensor) -> bool:
    return bool((rows.mean(-1).abs() <= 1e-4 * rows.std(-1)).all())


@cache
def _version_of_transformer_lens() -> str:
    """The installed version, looked up once: the look-up reads files."""
    return version("transformer-lens")
