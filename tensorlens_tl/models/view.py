"""A uniform view of any model: HookedTransformer, HookedEncoder and TransformerBridge look alike through it.

`ModelView` describes a model's parts and provides the weights of each block in one layout, along with the embedding and
everything between the last block and the logits. It is structural: nothing here imports a model class, because
HookedTransformer does not exist in TransformerLens 4. The block proof (`tensorlens_tl.passes.proof`) decides whether
the reading is right.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import fold, unfold

from tensorlens_tl.algebra import on_device
from tensorlens_tl.algebra.numerics import plus, refuse_autocast, times
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.blocks import BlockView, Owner, with_weights
from tensorlens_tl.models.checkpoint import Classes, Untrained, class_scores, classes_of
from tensorlens_tl.models.loops import is_looped, read_loop
from tensorlens_tl.models.names import ENCODER_NORM, LOOPS, NORMS, STABLE, UNSCALED
from tensorlens_tl.models.offload import (
    Residence,
    execution_device,
    loaded,
    lock_of,
    offloaded,
    weights_read,
)
from tensorlens_tl.models.parameters import (
    MLMHead,
    NormWeights,
    Refuse,
    adapter_names,
    computes_in_float32,
    detached,
    find_activation,
    floating,
    innermost,
    is_adapter,
    is_bridge_component,
    is_norm,
    is_plain,
    norm_weights,
    read_embedding,
    read_linear,
    tried_norm,
)

# ------------------------------------------------------------------ the order of blocks

STACKS = ("encoder_blocks", "decoder_blocks")
HOOKED_STACKS = ("encoder", "decoder")
"""Names of an encoder–decoder's stacks: in a Bridge, and in a HookedEncoderDecoder."""


def stacks_of(model: Any) -> tuple[str, ...]:
    """Return the names of a model's lists of blocks; raise `UnsupportedModelError` for other libraries' models."""
    stacks: tuple[str, ...] = ("blocks",)
    if is_looped(model):
        stacks = LOOPS
    elif _has_hooked_stacks(model):
        stacks = HOOKED_STACKS
    elif all(hasattr(model, stack) for stack in STACKS):
        stacks = STACKS
    for needed in ("cfg", *stacks, "hook_dict", "run_with_hooks"):
        # check the class first: a Bridge rebuilds its hook_dict whenever it is read
        if not hasattr(type(model), needed) and not hasattr(model, needed):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no `{needed}`: pass a HookedTransformer, a HookedEncoder, a "
                "HookedEncoderDecoder or a TransformerBridge." + _hint(model)
            )
    return stacks


def _has_hooked_stacks(model: Any) -> bool:
    """Whether it is TransformerLens' own encoder–decoder, which is not a Bridge (up to 3.9)."""
    stacks = (getattr(model, "_modules", {}).get(stack) for stack in HOOKED_STACKS)
    return not hasattr(model, "original_model") and all(isinstance(stack, nn.ModuleList) for stack in stacks)


def _hint(model: Any) -> str:
    """Suggest what to do with an object that is not a TransformerLens model."""
    if isinstance(model, str):
        return " The model comes first, then the input; load one by its name first."
    inside = {"FrozenPass": "frozen.model", "FrozenOperator": "operator.frozen"}.get(type(model).__name__)
    if inside is not None:
        return f" A {type(model).__name__} belongs to a model: pass {inside}, or call what takes a frozen pass."
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


# ------------------------------------------------------------------ images and sound


@dataclass(frozen=True)
class PatchWeights:
    """A patch embedding: ``patch · weightᵀ + bias`` for every patch, plus a constant.

    Attributes:
        weight: a row of pixels (channel, row, column) for each number of the residual stream.
        bias: the bias of the convolution.
        constant: position embeddings, and the special tokens in front.
        kernel, stride: size and spacing of patches, in pixels; patches overlap if they differ.
        transposed: whether the input is a spectrogram `[batch, time, mel]`, whose image has a row per mel bin.
    """

    weight: Float[Tensor, "d_model pixel"]
    bias: Float[Tensor, "d_model"] | None
    constant: Float[Tensor, "pos d_model"]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    transposed: bool

    def image(self, x: Tensor) -> Float[Tensor, "*rows channel height width"]:
        """Return the model's input as an image."""
        if self.transposed:
            return x[..., None, :, :].mT
        return x

    def grid(self, x: Tensor) -> tuple[int, int]:
        """Return the numbers of rows and columns of patches."""
        height, width = self.image(x).shape[-2:]
        sizes = zip((height, width), self.kernel, self.stride, strict=True)
        rows, columns = ((size - kernel) // stride + 1 for size, kernel, stride in sizes)
        return rows, columns

    def columns(self, x: Tensor) -> Float[Tensor, "batch patch pixel"]:
        """Return the pixels of every patch, row by row of patches."""
        return unfold(self.image(x), self.kernel, stride=self.stride).mT

    def onto_input(self, columns: Float[Tensor, "*rows batch patch pixel"], like: Tensor) -> Tensor:
        """Apply the adjoint of `columns`: sum values of patches' pixels where patches overlap, `[*rows, *input]`."""
        image = self.image(like)
        flat = columns.reshape(-1, *columns.shape[-2:]).mT
        folded = fold(flat, image.shape[-2:], self.kernel, stride=self.stride)
        shaped = folded.reshape(*columns.shape[:-3], *image.shape)
        if self.transposed:
            return shaped.mT[..., 0, :, :]
        return shaped


@dataclass(frozen=True)
class ClassHead:
    """The input of an image classifier's unembedding: the mean of the first `tokens` positions, normed once more."""

    tokens: int
    norm: NormWeights | None


def read_patches(embed: Any, transposed: bool) -> PatchWeights | None:
    """Return the patch embedding of a vision or audio spectrogram transformer; None for anything else."""
    inner = innermost(embed)
    convolution = getattr(getattr(inner, "patch_embeddings", None), "projection", None)
    positions = getattr(inner, "position_embeddings", None)
    if not isinstance(convolution, torch.nn.Conv2d) or not isinstance(positions, Tensor):
        return None
    padded = convolution.padding not in ((0, 0), "valid")
    if convolution.dilation != (1, 1) or convolution.groups != 1 or padded:
        return None
    special = [getattr(inner, name, None) for name in ("cls_token", "distillation_token")]
    constant = positions.detach()[0].clone()
    for position, token in enumerate(token for token in special if token is not None):
        constant[position] += token.detach()[0, 0]
    height, width = convolution.kernel_size
    down, across = convolution.stride
    return PatchWeights(
        weight=convolution.weight.detach().flatten(1),
        bias=detached(convolution.bias),
        constant=constant,
        kernel=(height, width),
        stride=(down, across),
        transposed=transposed,
    )


# ------------------------------------------------------------------ the ends of a model

Unembedding = tuple[Float[Tensor, "d_model d_vocab"], Float[Tensor, "d_vocab"] | None]
"""W_U and b_U; the latter is None if there is no bias."""


def projection(model: Any, name: str) -> nn.Module | None:
    """Return ``project_in`` (after the embedding) or ``project_out`` (before the unembedding) of OPT-350m, or None."""
    module = innermost(getattr(model, "_modules", {}).get(name))
    return module if isinstance(module, nn.Module) else None


def _stored_embedding(model: Any, refuse: Refuse) -> Float[Tensor, "d_vocab width"]:
    embed = getattr(model, "embed", None)
    if is_adapter(innermost(embed)):
        return read_embedding(innermost(embed), "embed", refuse)
    for owner in (embed, getattr(embed, "embed", None)):  # nested one deeper in a HookedEncoder
        W_E = getattr(owner, "W_E", None)
        if isinstance(W_E, Tensor):
            return W_E.detach()
    raise refuse("no readable embedding W_E.")


def unembedding_weights(model: Any, refuse: Refuse) -> Unembedding | None:
    """Return W_U and b_U, including projections and biases around them; None if the model predicts no tokens."""
    unembed = getattr(model, "unembed", None)
    if unembed is None:
        return None
    W_U, b_U = _stored_unembedding(unembed, refuse)
    narrowing = projection(model, "project_out")
    if narrowing is not None:
        weight, bias = read_linear(narrowing, "project_out", refuse)
        if bias is not None:
            b_U = plus(bias @ W_U, b_U)
        W_U = weight @ W_U
    added = detached(getattr(getattr(model, "original_model", None), "final_logits_bias", None))
    if added is None:
        return W_U, b_U
    return W_U, plus(added[0], b_U)  # BART adds a second bias


def _stored_unembedding(unembed: Any, refuse: Refuse) -> Unembedding:
    module = innermost(unembed)
    changed = is_bridge_component(unembed) and isinstance(module, nn.Module) and not is_plain(module)
    if changed or (getattr(unembed, "W_U", None) is None and hasattr(unembed, "weight")):  # or an image classifier's
        return read_linear(module, "unembed", refuse)
    return floating(unembed.W_U, "unembed.W_U", refuse), detached(getattr(unembed, "b_U", None))


def end_norm(model: Any, name: str) -> NormWeights | None:
    """Return a norm after the last block of a stack, by the prefix of its hook points, or None."""
    norm = getattr(model, name.partition("@")[0], None)
    return norm_weights(norm, model.cfg) if is_norm(norm) else None


def read_mlm_head(model: Any, refuse: Refuse) -> MLMHead | None:
    """Return a masked language model's transform before the unembedding, or a classifier's pooler, or None."""
    pooler = class_scores(model)
    if pooler is not None and pooler.act is not None:
        weight, bias = read_linear(pooler.dense, "the pooler's dense layer", refuse)
        return MLMHead(weight, bias, pooler.act, None, None)
    head = getattr(model, "mlm_head", None)
    if head is None:
        return _prediction_head(model, refuse)
    phi = find_activation(head, model.cfg)
    if phi is None:
        raise refuse(f"mlm_head has the unknown activation {model.cfg.act_fn!r}.")
    if is_bridge_component(head):
        norm = model.ln_final
        scale = "ln_final.hook_scale"
        weight, bias = read_linear(head, "mlm_head", refuse)
    else:
        weight = head.W
        bias = head.b
        norm = head.ln
        scale = "mlm_head.ln.hook_scale"
    return MLMHead(weight.detach(), detached(bias), phi, norm_weights(norm, model.cfg), scale)


def _prediction_head(model: Any, refuse: Refuse) -> MLMHead | None:
    """Return that transform if it follows a separate final norm (ModernBERT), or None."""
    head: Any = innermost(getattr(model, "prediction_head", None))
    if head is None:
        return None
    parts = [getattr(head, name, None) for name in ("dense", "act", "norm")]
    if not all(callable(part) for part in parts):
        raise refuse("prediction_head has no dense, act and norm that are read.")
    dense, phi, norm = (part for part in parts if part is not None)
    weight, bias = read_linear(dense, "prediction_head.dense", refuse)
    return MLMHead(weight, bias, phi, tried_norm(norm, model.cfg, width=weight.shape[1]), None)


# ------------------------------------------------------------------ the model

READ_FROM = {
    "patches": ("embed",),
    "class_head": ("classifier_ln",),
    "final_norm": ("ln_final", "decoder_ln_final", "decoder_final_ln", "embed_ln"),
    "encoder_norm": ("encoder_ln_final", "encoder_final_ln"),
    "mlm_head": ("mlm_head", "ln_final", "prediction_head"),
    "unembedding": ("unembed", "project_out"),
    "embedding": ("embed", "project_in"),
}
"""The parts of a model that a property of `ModelView` reads."""


class ModelView:
    """The parts of a TransformerLens model, in a form that does not depend on its class.

    Attributes:
        device: the device of its first weight and of all results, whatever devices its blocks run on.

    >>> from tensorlens_tl.models import ModelView
    >>> view = ModelView(model)
    >>> view, view.reads, tuple(view.embedding.shape)
    (ModelView(TransformerBridge (tensorlens-demo), layers=4), 'tokens', (2048, 128))
    """

    def __init__(self, model: Any):
        """Read a model.

        Raises:
            UnsupportedModelError: not a TransformerLens model, or a configuration that cannot be frozen.
            InvalidInputError: inside ``torch.autocast``.
        """
        self._stacks = stacks_of(model)
        self.is_hooked_encoder_decoder = self._stacks == HOOKED_STACKS
        self.is_encoder_decoder = self._stacks in (STACKS, HOOKED_STACKS)
        with lock_of(model):  # another thread may have replaced its weights temporarily
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
        """Return a view with other weights in some blocks, by TransformerLens' names; the model is unchanged."""
        other = self._unread()
        other.blocks = list(self.blocks)
        for layer, changed in weights.items():
            other.blocks[layer] = with_weights(self.blocks[layer], changed)
        return other

    @property
    def any_offloaded(self) -> bool:
        """Whether any of its weights are loaded only when needed."""
        return self.offloaded or any(block.offloaded for block in self.blocks)

    @property
    def any_moved(self) -> bool:
        """Whether any block runs on a device other than that of its first weight."""
        return any(block.moved for block in self.blocks)

    def placed(self, name: str, value: Any) -> Any:
        """Return a property's value on the device of the results; the unembedding stays where it is."""
        return value if name == "unembedding" else on_device(value, self.device)

    def unmoved(self, device: torch.device) -> "ModelView":
        """Return a view in which the blocks of one device are read there."""
        other = self._unread()
        other.blocks = [block.unmoved() if block.device == device else block for block in self.blocks]
        return other

    def _unread(self) -> "ModelView":
        """Return a copy without what is currently loaded."""
        other = copy(self)
        other._residences = {name: each.renewed(vars(other)) for name, each in self._residences.items()}
        return other

    def loaded(self, name: str) -> AbstractContextManager[None]:
        """Keep what a property reads loaded inside the context; if offloaded, the outermost context drops it."""
        return self._residences[name].opened(vars(self), name) if self.offloaded else nullcontext()

    @cached_property
    def rotary_modules(self) -> list[Any]:
        """Modules that compute the angles of rotary positions in a Bridge's wrapped model, found in one walk."""
        inner = getattr(self.model, "original_model", nn.Identity())
        rotary = [module for name, module in inner.named_modules() if name.endswith("rotary_emb")]
        return [getattr(module, "original_component", module) for module in rotary]

    def refuse_split_inputs(self) -> None:
        """Raise `UnsupportedModelError` for a model that runs with a copy of its residual stream for each head."""
        if getattr(self.cfg, "use_split_qkv_input", False) or getattr(self.cfg, "use_attn_in", False):
            raise UnsupportedModelError(
                "cfg.use_split_qkv_input and cfg.use_attn_in add a head axis to the residual stream; "
                "switch them off (model.set_use_split_qkv_input(False)) before freezing."
            )

    def require_chain(self, what: str) -> None:
        """Raise `UnsupportedModelError` unless every block is a map of the previous block's output.

        This rules out encoder–decoders, loops, and keys and values shared between blocks.
        """
        self.refuse_encoder_decoder(what)
        self.refuse_shared_values(what)

    def require_single_streams(self, what: str) -> None:
        """Raise `UnsupportedModelError` for blocks that read a second stream of their stack: loops, shared values."""
        self.refuse_loop(what)
        self.refuse_shared_values(what)

    def refuse_encoder_decoder(self, what: str) -> None:
        """Raise `UnsupportedModelError` for an encoder–decoder or a loop, if blocks are read as a single stack."""
        self.refuse_loop(what)
        if self.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{what}: not supported for encoder–decoders, whose blocks form two stacks ({self.description}). The "
                "operator, every method of attribution, the circuits logit_attribution, total_effects, head_map, "
                "paths, contribution_graph, patch_scores, edge_scores, qk_attribution and routes, and ov, qk, "
                "virtual_head and composition_scores take it."
            )

    def crossing_layers(self) -> str:
        """Say which layers have cross-attention."""
        crossing = [layer for layer, block in enumerate(self.blocks) if block.cross_attention is not None]
        if not crossing:
            return "no layer has"
        if len(crossing) == 1:
            return f"only layer {crossing[0]} has"
        return f"layers {crossing[0]} to {crossing[-1]} have"

    def refuse_loop(self, what: str) -> None:
        """Raise for blocks that run in a loop, if they are read as a chain."""
        if self.loop is not None:
            raise UnsupportedModelError(
                f"{what}: not supported for a model whose blocks run in a loop ({self.description}): "
                f"{' and '.join(LOOPS)} each have a state, and a block reads the sum of both. The operator and "
                "method='tensorlens' take it."
            )

    def refuse_shared_values(self, what: str) -> None:
        """Raise for a block whose attention takes keys and values of an earlier one, naming both."""
        for block in self.blocks:
            if block.values_layer is not None:
                raise UnsupportedModelError(
                    f"{what}: {block.name} of this {self.description} takes keys and values of block "
                    f"{block.values_layer} (shared keys and values), so its output also depends on the stream "
                    "there, and no map of its own stream describes it fully. The operator, method='tensorlens' and "
                    "gradients take both streams and are exact."
                )

    def refuse_gradients(self, what: str) -> None:
        """Raise for a loop in which the live model runs some calls without recording gradients."""
        if self.loop is None or not self.loop.without_gradients:
            return
        slow, fast = (sum(call.stack == stack for call in self.loop.calls) for stack in LOOPS)
        raise UnsupportedModelError(
            f"{what}: {self.description} runs {self.loop.without_gradients} of its {len(self.loop.calls)} calls of "
            "a stack without recording gradients (config.L_bp_cycles), so gradients of the live model miss "
            f"everything that passes through them. method='tensorlens' includes it; or load the model with L_bp_cycles="
            f"{[fast // slow] * slow}."
        )

    @property
    def is_whitened(self) -> bool:
        """Whether the stream is whitened before any block."""
        return any(block.whitening is not None for block in self.blocks)

    @property
    def sliding_window(self) -> int | None:
        """The window size of a Bridge's sliding-window layers; None for other models.

        In such layers, a padded query whose keys are all padding is NaN, and so is everything computed from it.
        """
        window = getattr(self.text_config, "sliding_window", None)
        return window if isinstance(window, int) and window > 0 else None

    @cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None if it has none that can read text.

        For a folder without a tokenizer, transformers builds a placeholder that has only special tokens.
        """
        tokenizer = getattr(self.model, "tokenizer", None)
        if tokenizer is None or len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            return None
        return tokenizer

    @property
    def begins_with_encoder(self) -> bool:
        """Whether a Bridge's text is read by an encoder: a masked language model's, or an encoder–decoder's."""
        return self.is_bridge and (self.is_encoder_decoder or hasattr(self.model, "mlm_head"))

    @cached_property
    def wrapped_twice(self) -> bool:
        """Whether a Bridge wraps parts that another Bridge already wraps."""
        wrapped = (getattr(module, "original_component", None) for module in self.model.modules())
        return self.is_bridge and any(map(is_bridge_component, wrapped))

    @property
    def description(self) -> str:
        """Class and name, for messages; the architecture if the name is not informative."""
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
        """The maximal length of a prompt (for images and sound the config is not reliable)."""
        return self.cfg.n_ctx

    @property
    def d_vocab(self) -> int:
        """The size of the vocabulary; for a model of images or sound, the number of its classes."""
        if self.reads == "tokens":
            return self.cfg.d_vocab
        if self.unembedding is None:
            return 0
        return self.unembedding[0].shape[1]

    @property
    def decoder_vocab(self) -> int:
        """The vocabulary size of an encoder–decoder's decoder (it may differ in Marian)."""
        return getattr(self.config, "decoder_vocab_size", None) or self.d_vocab

    @property
    def decoder_argument(self) -> str:
        """The name of the forward argument for the decoder's input."""
        return "decoder_input" if self.is_hooked_encoder_decoder else "decoder_input_ids"

    @property
    def reads(self) -> str:
        """The kind of input: ``"tokens"``, ``"images"`` or ``"sound"``."""
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
        """The Hugging Face config of the part that reads text, if the model also reads images."""
        config = self.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    @weights_read
    def patches(self) -> PatchWeights | None:
        """The embedding of an image's (or spectrogram's) patches, or None."""
        if self.reads == "tokens":
            return None
        return read_patches(getattr(self.model, "embed", None), transposed=self.reads == "sound")

    @weights_read
    def class_head(self) -> ClassHead | None:
        """Where the classes of an image or a spectrogram are read; None if the logits belong to positions."""
        if self.reads == "tokens" or getattr(self.model, "unembed", None) is None:
            return None
        norm: Any = getattr(self.model, "classifier_ln", None)
        if is_norm(norm):  # an audio spectrogram transformer averages CLS and distillation token
            return ClassHead(2, norm_weights(norm, self.cfg))
        if self.reads == "images":
            return ClassHead(1, None)
        return None

    @property
    def classes(self) -> Classes | None:
        """The classes of a text classifier (`load_classifier`); None for other models."""
        return classes_of(self.model)

    @property
    def has_probabilities(self) -> bool:
        """Whether the outputs are mutually exclusive, so that their softmax gives probabilities."""
        return self.classes is None or self.classes.exclude

    def require_probabilities(self, what: str) -> None:
        """Raise `UnsupportedModelError` for a classifier whose classes are not mutually exclusive."""
        if not self.has_probabilities:
            raise self._refuse(
                f"{what}: the outputs of this classifier do not exclude each other, so they have no probabilities that "
                "sum to 1. Explain the logit of one of them, target=label."
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
        """Whether norms of a float64 model compute in float32, judging by its first block."""
        norms = [getattr(self.blocks[0].module, name, None) for name in ("norm", *NORMS)]
        with loaded(*norms):
            return any(computes_in_float32(norm) for norm in norms if is_norm(norm))

    @weights_read
    def final_norm(self) -> NormWeights | None:
        """The norm after the last block, or None (a masked language model's `ln_final` belongs to its head)."""
        if hasattr(self.model, "mlm_head"):
            return None
        norm = end_norm(self.model, self.final_norm_name)
        if norm is None or not self.is_hooked_encoder_decoder or not self.cfg.tie_word_embeddings:
            return norm
        # the logits are computed from the norm's output times √(1/d_model), with no hook point in between
        gain = next(self.model.parameters()).new_full((self.cfg.d_model,), self.cfg.d_model**-0.5)
        return replace(norm, gain=times(gain, norm.gain))

    @property
    def final_norm_name(self) -> str:
        """The prefix of the hook points of the norm after the last block."""
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

        A HookedEncoderDecoder shows its output before the gain, which is assigned to its readers
        (`Owner.encoder_gain`).
        """
        norm = end_norm(self.model, self.encoder_norm_name)
        if norm is None or not self.is_hooked_encoder_decoder:
            return norm
        return replace(norm, gain=None)

    @property
    def encoder_norm_name(self) -> str:
        """The prefix of the hook points of the norm after the last encoder block."""
        return "encoder_final_ln" if self.is_hooked_encoder_decoder else ENCODER_NORM

    @weights_read
    def mlm_head(self) -> MLMHead | None:
        """A masked language model's transform before the unembedding, or None."""
        return read_mlm_head(self.model, self._refuse)

    def _refuse(self, what: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.description}: {what}")

    @weights_read
    def unembedding(self) -> Unembedding | None:
        """W_U and b_U; None for a model that predicts no tokens."""
        return unembedding_weights(self.model, self._refuse)

    @property
    def projection(self) -> nn.Module | None:
        """The projection that narrows the stream before the unembedding (OPT-350m), counted as part of the latter."""
        return projection(self.model, "project_out")

    def logits(self, x: Float[Tensor, "*any d_model"]) -> Float[Tensor, "*any d_vocab"]:
        """Return ``cap((x·W_U + b_U) · factor)`` for the input of the unembedding (a masked model's head output).

        Raises `UnsupportedModelError` if the model predicts no tokens.
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
        """The factor on the logits before any soft cap (Granite, Cohere, Falcon-H1, …); usually 1."""
        config = self.text_config
        factor = getattr(config, "logit_scale", None) or getattr(config, "output_multiplier", None) or 1.0
        factor = float(factor) * float(getattr(config, "lm_head_multiplier", None) or 1.0)
        if self.scales_decoder_output:
            factor = factor * float(config.d_model) ** -0.5
        return factor / float(getattr(config, "logits_scaling", None) or 1.0)

    @property
    def scales_decoder_output(self) -> bool:
        """Whether the unembedding reads the final norm's output times √(1/d_model) (T5 with tied embeddings)."""
        config = self.config
        if not self.is_encoder_decoder or not hasattr(config, "relative_attention_num_buckets"):
            return False
        tied = getattr(config, "tie_word_embeddings", False) and config.model_type not in UNSCALED
        return bool(getattr(config, "scale_decoder_outputs", tied))

    @weights_read
    def embedding(self) -> Float[Tensor, "d_vocab d_model"]:
        """W_E as stored (Gemma scales it afterwards), including a projection that widens it (OPT-350m)."""
        embedding = _stored_embedding(self.model, self._refuse)
        widening = projection(self.model, "project_in")
        if widening is None:
            return embedding
        return embedding @ read_linear(widening, "project_in", self._refuse).weight

    @property
    def end_adapters(self) -> tuple[str, ...]:
        """The names of active adapters in the embedding and the unembedding."""
        parts = [getattr(self.model, name, None) for name in ("embed", "unembed")]
        return tuple(sorted({name for part in parts if part is not None for name in adapter_names(part)}))

    @property
    def soft_cap(self) -> float | None:
        """The cap c of the final logits, c·tanh(x/c), or None."""
        cap = float(getattr(self.cfg, "output_logits_soft_cap", None) or 0)
        return cap if cap > 0 else None

    @cached_property
    def untrained(self) -> Untrained:
        """The weights that the model's checkpoint lacks."""
        return Untrained(self.model)

    def provenance(self) -> dict[str, str]:
        """Return what results depend on besides the prompt: names, versions, dtype, and the state of the weights."""
        optional = {
            "newly_initialised": ", ".join(self.untrained.names or ()),
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
        """The processing of the weights; logits and residual basis depend on it, logit differences do not.

        It is inferred from the weights: norms without gain and shift (folded, or never trained), and output weights of
        zero mean.
        """
        norms = (norm for block in self.blocks for norm in block.norms.values())  # the first one usually decides
        first = self.blocks[0]
        processed = {
            "plain norms": all(norm.is_plain for norm in norms) and any(block.norms for block in self.blocks),
            "centred writing": first.mixer is None and _zero_mean(first.attention.W_O[:8]),
            "centred unembedding": self.unembedding is not None and _zero_mean(self.unembedding[0][:8]),
        }
        return ", ".join(name for name, present in processed.items() if present) or "raw"


def _zero_mean(rows: Tensor) -> bool:
    return all(bool(row.mean().abs() <= 1e-4 * row.std(correction=0)) for row in rows)  # the first usually decides


@cache
def _version_of_transformer_lens() -> str:
    """Return the installed version, cached since the lookup reads files."""
    return version("transformer-lens")
