"""One reading of a model: HookedTransformer, HookedEncoder and TransformerBridge look alike from here.

`ModelView` says what the model is made of and hands out the weights of each block in one layout. It is
structural: nothing here imports a model class, because HookedTransformer does not exist in
TransformerLens 4. Whether the reading is right is decided by the block proof (`tensorlens_tl.passes.proof.blocks`).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra import on_device
from tensorlens_tl.algebra.numerics import plus, refuse_autocast, times
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.blocks import BlockView, Owner, with_weights
from tensorlens_tl.models.classes import Classes, classes_of
from tensorlens_tl.models.ends import (
    Unembedding,
    embedding_weights,
    end_norm,
    factor_of_logits,
    projection,
    read_mlm_head,
    scales_output,
    unembedding_weights,
)
from tensorlens_tl.models.lifecycle import Untrained
from tensorlens_tl.models.loops import read_loop
from tensorlens_tl.models.names import ENCODER_NORM, NORMS, STABLE
from tensorlens_tl.models.parameters import (
    MLMHead,
    NormWeights,
    Residence,
    adapter_names,
    computes_in_float32,
    execution_device,
    is_bridge_component,
    is_norm,
    loaded,
    lock_of,
    norm_weights,
    offloaded,
    weights_read,
)
from tensorlens_tl.models.patches import ClassHead, PatchWeights, read_patches
from tensorlens_tl.models.provenance import provenance_of, weight_processing
from tensorlens_tl.models.structure import HOOKED_STACKS, STACKS, Structure, stacks_of

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
        self._stacks = stacks_of(model)
        self.is_hooked_encoder_decoder = self._stacks == HOOKED_STACKS
        self.is_encoder_decoder = self._stacks in (STACKS, HOOKED_STACKS)
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

    @cached_property
    def rotary_modules(self) -> list[Any]:
        """What gives the angles of rotary positions in the model that a Bridge wraps: one walk for all layers."""
        inner = getattr(self.model, "original_model", nn.Identity())
        rotary = [module for name, module in inner.named_modules() if name.endswith("rotary_emb")]
        return [getattr(module, "original_component", module) for module in rotary]

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

    @property
    def structure(self) -> Structure:
        """How its blocks follow each other."""
        return Structure(self.description, self.is_encoder_decoder, self.loop, self.blocks)

    def require_chain(self, what: str) -> None:
        """Refuse a model whose blocks are no chain, each a map of what the one before it gives.

        Raises:
            UnsupportedModelError: an encoder–decoder, a loop, or keys and values of an earlier block.
        """
        self.structure.refuse_encoder_decoder(what)
        self.structure.refuse_shared_values(what)

    def require_single_streams(self, what: str) -> None:
        """Refuse a model with a block that reads another stream of its own stack besides the one it adds to.

        Raises:
            UnsupportedModelError: a loop, or keys and values of an earlier block.
        """
        self.structure.refuse_loop(what)
        self.structure.refuse_shared_values(what)

    def refuse_encoder_decoder(self, what: str) -> None:
        """Refuse an encoder–decoder where something reads blocks as those of one stack.

        Raises:
            UnsupportedModelError: the model is one, or its blocks run in a loop.
        """
        self.structure.refuse_encoder_decoder(what)

    @property
    def is_whitened(self) -> bool:
        """Whether the stream of any block is whitened first."""
        return any(block.whitening is not None for block in self.blocks)

    @property
    def sliding_window(self) -> int | None:
        """How many keys a Bridge's layers of sliding-window attention see; None of any other model.

        A query of padding all of whose keys are padding as well is NaN there, and so is what later layers make of it.
        """
        window = getattr(self.text_config, "sliding_window", None)
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

    @property
    def begins_with_encoder(self) -> bool:
        """Whether a Bridge's text is read by an encoder: one that fills gaps, or that of an encoder–decoder."""
        return self.is_bridge and (self.is_encoder_decoder or hasattr(self.model, "mlm_head"))

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

    @property
    def text_config(self) -> Any:
        """The same, of the part that reads text where a model reads images as well."""
        config = self.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

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

    @property
    def classes(self) -> Classes | None:
        """The classes of a classifier of text (`load_classifier`); None of any other model."""
        return classes_of(self.model)

    @property
    def has_probabilities(self) -> bool:
        """Whether one of what its logits are of excludes the others, so that their softmax says how likely each is."""
        return self.classes is None or self.classes.exclude

    def require_probabilities(self, what: str) -> None:
        """Refuse a classifier whose outputs do not exclude each other.

        Raises:
            UnsupportedModelError: the model is one.
        """
        if not self.has_probabilities:
            raise self._refuse(
                f"{what}: the outputs of this classifier do not exclude each other, so they have no probabilities that "
                "sum to 1. Ask about the logit of one of them, target=label."
            )

    @cached_property
    def labels(self) -> dict[int, str]:
        """The names of a classifier's classes; empty for other models."""
        if self.classes is not None:
            return dict(self.classes.labels)
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
        norm = end_norm(self.model, self.final_norm_name)
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
        norm = end_norm(self.model, self.encoder_norm_name)
        if norm is None or not self.is_hooked_encoder_decoder:
            return norm
        return replace(norm, gain=None)

    @property
    def encoder_norm_name(self) -> str:
        """Where the hook points of the norm after the last encoder block are."""
        return "encoder_final_ln" if self.is_hooked_encoder_decoder else ENCODER_NORM

    @weights_read
    def mlm_head(self) -> MLMHead | None:
        """A masked language model's transform before the unembedding, or None."""
        return read_mlm_head(self.model, self._refuse)

    def _refuse(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.description}: {what}")

    @weights_read
    def unembedding(self) -> Unembedding | None:
        """W_U and b_U, or None for a model that predicts no tokens."""
        return unembedding_weights(self.model, self._refuse)

    @property
    def projection(self) -> nn.Module | None:
        """What narrows the stream before it is unembedded (OPT-350m): part of the unembedding here."""
        return projection(self.model, "project_out")

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
        return factor_of_logits(self.text_config, self.scales_decoder_output)

    @property
    def scales_decoder_output(self) -> bool:
        """Whether what is unembedded is the final norm's output times √(1/d_model) (T5 with tied embeddings)."""
        return self.is_encoder_decoder and scales_output(self.config)

    @weights_read
    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """W_E, as stored: some models (Gemma) multiply it by a constant on its way into the residual stream.

        Where a matrix widens it on that way (OPT-350m), it is part of it.
        """
        return embedding_weights(self.model, self._refuse)

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
    def untrained(self) -> Untrained:
        """The weights that the model's checkpoint lacks."""
        return Untrained(self.model)

    def provenance(self) -> dict[str, str]:
        """What a result depends on besides the prompt: names, versions, weight processing, dtype, and where there are
        any, the weights that no checkpoint had."""
        return provenance_of(self.model, self.weight_processing, self.untrained.names or ())

    @cached_property
    def weight_processing(self) -> str:
        """How the weights were rewritten: logits and residual basis depend on it, logit differences do not."""
        return weight_processing(self.blocks, self.unembedding)
