"""Reading a transformer block of any class: its attention or mixer, its MLP or experts, and its norms.

A part is recognised by its name within the block (`tensorlens_tl.models.names`) or by its contents, never by the
model's name; `tensorlens_tl.models.sublayers` reads each kind. A part that cannot be read raises an error that names
the block and the part.
"""

import operator
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.algebra import on_device
from tensorlens_tl.algebra.numerics import maybe
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.loops import StackCall
from tensorlens_tl.models.mixers import (
    ChannelMixWeights,
    Mixer,
    NoMixing,
    channel_mix_weights,
    halves_after,
    halving_period,
    is_attention,
    is_channel_mix,
    is_mlp,
    read_only_mixer,
)
from tensorlens_tl.models.names import (
    ATTENTION,
    END_NORM,
    ENTRY_NORM,
    EXPERTS_BESIDE,
    MIXERS,
    MLPS,
    NORMS,
    PER_LAYER_NORM,
    STREAMS,
)
from tensorlens_tl.models.offload import Residence, execution_device, offloaded, weights_read
from tensorlens_tl.models.parameters import (
    AttentionWeights,
    MLPWeights,
    NormWeights,
    QueryKeyWeights,
    WhiteningWeights,
    adapter_names,
    detached,
    floating,
    innermost,
    is_bridge_component,
    is_norm,
    norm_weights,
)
from tensorlens_tl.models.sublayers import (
    ExpertsWeights,
    PerLayerWeights,
    has_experts,
    read_attention,
    read_experts,
    read_latent_scores,
    read_mlp,
    read_module,
    read_per_layer,
    read_query_key,
    read_shared_attention,
    shared_source,
)

# ------------------------------------------------------------------ what a block needs to know about its model


@dataclass(frozen=True, eq=False)
class Owner:
    """What a block needs from its model's view.

    A reference to the view itself would be circular, and would keep copied weights in memory until garbage collection.
    """

    model: Any
    cfg: Any
    description: str
    is_hooked_encoder_decoder: bool
    device: torch.device

    @property
    def encoder_gain(self) -> Float[Tensor, "d_model"] | None:
        """The gain by which cross-attention multiplies the encoder output shown at its hook point; None for none."""
        if not self.is_hooked_encoder_decoder:
            return None
        return norm_weights(self.model.encoder_final_ln, self.cfg).gain


# ------------------------------------------------------------------ the parts of a block and their names


@dataclass(frozen=True, eq=False)
class BlockParts:
    """The parts of one block, found in its `module`."""

    module: Any

    def _first_of(self, names: Iterable[str], default: str) -> str:
        """Return the first of these names under which the block has a part."""
        return next((name for name in names if self.module._modules.get(name) is not None), default)

    @property
    def mixer_name(self) -> str:
        """The name of its self-attention, or of the mixer in its place."""
        return next((name for name in (*ATTENTION, *MIXERS) if name in self.module._modules), "attn")

    @property
    def mixer(self) -> Any:
        """Its self-attention, or the mixer in its place; None if it has neither."""
        return getattr(self.module, self.mixer_name, None)

    @property
    def has_attention(self) -> bool:
        """Whether it has self-attention."""
        return any(name in self.module._modules for name in ATTENTION) or self._named_as_mixer(is_attention) is not None

    @property
    def mixers(self) -> dict[str, Any]:
        """Modules under a mixer's name that are neither attention nor an MLP."""
        parts = {name: part for name in MIXERS if (part := self.module._modules.get(name)) is not None}
        return {name: part for name, part in parts.items() if not is_attention(part) and not is_mlp(part)}

    def _named_as_mixer(self, kind: Callable[[Any], bool]) -> str | None:
        """Return the mixer name under which it has attention, or an MLP (NemotronH); None if there is none."""
        return next((name for name in MIXERS if kind(self.module._modules.get(name))), None)

    @property
    def is_merged(self) -> bool:
        """Whether its self-attention also attends to the encoder output, in the same softmax (T5Gemma 2)."""
        return getattr(self.mixer, "hook_cross_pattern", None) is not None

    @property
    def cross_name(self) -> str:
        """The name of a decoder block's cross-attention."""
        return self.mixer_name if self.is_merged else "cross_attn"

    @property
    def has_beside(self) -> bool:
        """Whether a mixer runs in parallel with attention."""
        return self.has_attention and bool(self.mixers)

    @property
    def beside_name(self) -> str:
        """The name of the mixer in parallel with attention."""
        return next(iter(self.mixers), MIXERS[0])

    @property
    def missing_mixer(self) -> str:
        """The reason why it has no readable attention or mixer."""
        kind = type(innermost(self.module)).__name__
        shown = [name for name, part in self.module._modules.items() if is_bridge_component(part)]
        if not shown:
            return (
                f"it ({kind}) shows nothing inside: TransformerLens has hook points only at its two ends, so the "
                "inputs of its parts and its patterns cannot be seen."
            )
        return (
            f"it ({kind}) has {', '.join(shown)}: no attention, and no mixer under a name that is read "
            f"({', '.join(MIXERS)})."
        )

    @property
    def entry_norm(self) -> str | None:
        """The name of a norm inside the first block that is applied to the embeddings; None if there is none."""
        return ENTRY_NORM if is_norm(self.module._modules.get(ENTRY_NORM)) else None

    @property
    def mlp_name(self) -> str:
        """The name of its MLP or experts."""
        return self._first_of(MLPS, self._named_as_mixer(is_mlp) or "mlp")

    @property
    def is_mlp_alone(self) -> bool:
        """Whether it has an MLP or experts under a mixer's name, and nothing that mixes positions (NemotronH)."""
        return self.mlp_name in MIXERS

    @property
    def mlp(self) -> Any:
        """Its MLP or its experts; None if it has neither."""
        return getattr(self.module, self.mlp_name, None)

    @property
    def has_experts_beside(self) -> bool:
        """Whether experts run in parallel with its MLP, each with norms of its own (Gemma 4)."""
        return {"mlp", "experts"} <= set(self.module._modules)

    @property
    def shared_name(self) -> str | None:
        """The name of an MLP for every token that is next to its experts rather than among them, or None."""
        if self.has_experts_beside:
            return "mlp"
        shared = self._first_of([name for name in MLPS if name != self.mlp_name], "")
        return shared or None

    def multiplier(self, name: str) -> float:
        """Return a constant that multiplies the block's matrices (Granite, Falcon-H1) by name, or 1."""
        return float(getattr(innermost(self.module), name, 1.0))

    @property
    def is_multiplied(self) -> bool:
        """Whether the block, its mixer or its MLP has any such constant."""
        modules = [vars(innermost(part)) for part in (self.module, self.mixer, self.mlp) if part is not None]
        return any(
            name.endswith("_multiplier") and value != 1 for attributes in modules for name, value in attributes.items()
        )


# ------------------------------------------------------------------ the weights of its parts


class BlockView:
    """The parts of one transformer block.

    Attributes:
        layer: its number among all blocks, an encoder's blocks coming before its decoder's.
        stack, number: the list of blocks it belongs to, and its index in that list.
        name: the prefix of its hook points: ``"blocks.0"``, ``"decoder_blocks.0"``, ``"L_blocks.0@3"``.
        call: the call of its stack if stacks run in a loop; otherwise None.
        offloaded: whether its weights are loaded when needed and dropped afterwards.
        device: the device on which the block runs.
        moved: whether its weights are copied temporarily to another device, that of the results.

    >>> block = frozen.view.blocks[0]
    >>> block.name, list(block.norms), block.attention.heads, tuple(block.mlp.W_in.shape)
    ('blocks.0', ['ln1', 'ln2'], 4, (128, 512))
    """

    def __init__(self, model: Owner, layer: int, stack: str, number: int, call: StackCall | None = None):
        self.model = model
        self.layer = layer
        self.stack = stack
        self.number = number
        self.call = call
        self.name = f"{stack}.{number}" if call is None else f"{stack}.{number}@{call.number}"
        blocks = getattr(model.model, stack)
        self.module: Any = blocks[number]
        self.parts = BlockParts(self.module)
        self.offloaded = offloaded(self.module)
        self.device = execution_device(self.module)
        self.moved = self.device != model.device
        near = [blocks[other] for other in (number - 1, number + 1) if 0 <= other < len(blocks)]
        self.residence = Residence(model.model, self.module, near=near)

    def loaded(self, *names: str) -> AbstractContextManager[None]:
        """Keep the weights loaded inside the context; at its end drop them, and the properties `names` if `brought`."""
        return self.residence.opened(vars(self), *names) if self.brought else nullcontext()

    @property
    def loads(self) -> int:
        """How often its weights have been read so far, if they are offloaded."""
        return self.residence.loads

    @property
    def brought(self) -> bool:
        """Whether its weights must be brought in to be read: from disk, CPU memory or another device."""
        return self.offloaded or self.moved

    def placed(self, name: str, value: Any) -> Any:
        """Return what a property has read, on the device of the results."""
        if not self.moved:
            return value
        if isinstance(value, ExpertsWeights):
            return value.on(self.model.device)
        return on_device(value, self.model.device)

    def unmoved(self) -> "BlockView":
        """Return the same block with weights read on the device where they are."""
        other = self.unread()
        other.moved = False
        return other

    def unread(self) -> "BlockView":
        """A copy; what has been read of weights that are brought in is left out."""
        other = copy(self)
        other.residence = self.residence.renewed(vars(other))
        return other

    @cached_property
    def widest(self) -> int:
        """The largest number of entries of a vector inside the block; cached."""
        with self.loaded():
            return max(self._mlp_hidden, self._width)

    @cached_property
    def captured(self) -> tuple[int, int]:
        """How many numbers a pass stores for the block, per token and per pair of tokens; cached."""
        with self.loaded():
            by_token = 3 * self.model.cfg.d_model + self._mlp_hidden
            if self.has_beside:
                by_token += self._width
            if self.mixer is None:
                return by_token, 2 * self.attention.heads
            return by_token + self._width, 0

    @property
    def _mlp_hidden(self) -> int:
        """The largest number of entries of a vector inside its MLP; 0 if it has none."""
        return self.mlp.hidden if self.mlp is not None else 0

    @property
    def _width(self) -> int:
        """The largest number of entries of a vector inside attention or a mixer."""
        heads = 0 if self.mixer is not None else 3 * self.attention.W_O.shape[0]
        if self.mixer is None and not self.has_beside:
            return heads
        name = self.parts.beside_name if self.has_beside else self.parts.mixer_name
        parameters = innermost(self.module._modules[name]).parameters()
        return max(heads, 3 * max(max(parameter.shape) for parameter in parameters))

    @weights_read
    def mixer(self) -> Mixer | NoMixing | None:
        """The mixer in place of attention (zero for a block that is only an MLP); None if the block has attention.

        Raises `UnsupportedModelError` for two mixers in one block, or one that cannot be read.
        """
        if self.parts.has_attention:
            return None
        return NoMixing() if self.parts.is_mlp_alone else read_only_mixer(self.parts.mixers, self.refuse)

    @weights_read
    def beside(self) -> Mixer | None:
        """The mixer in parallel with attention, reading the same norm (Falcon-H1); None if there is none."""
        return read_only_mixer(self.parts.mixers, self.refuse) if self.has_beside else None

    @property
    def has_beside(self) -> bool:
        """Whether a mixer runs in parallel with attention; reads no weights."""
        return self.parts.has_beside

    def refuse(self, what: str) -> UnsupportedModelError:
        """Return an error that names the block."""
        return UnsupportedModelError(f"{self.name} of this {self.model.description}: {what}")

    @weights_read
    def norms(self) -> dict[str, NormWeights]:
        """The block's norms by TransformerLens name, in block order; absent ones (Identity, None) are omitted.

        An MLP's norms are omitted if there is no MLP: folding gives attention-only blocks an `ln2` that never runs.
        """
        names = NORMS if self.has_mlp and not self.parts.is_mlp_alone else ("norm", *NORMS[:2])
        return self._norms(name for name in names if name not in self.inner_norms)

    @weights_read
    def inner_norms(self) -> dict[str, NormWeights]:
        """Norms outside any layout: around experts next to an MLP, after a per-layer input, at the end of a loop."""
        names: list[str] = []
        if self.parts.has_experts_beside:
            names = [name for pair in EXPERTS_BESIDE.values() for name in pair]
        if PER_LAYER_NORM in self.module._modules:
            names.append(PER_LAYER_NORM)
        norms = self._norms(names)
        if self.end_norm is not None:
            norms[END_NORM] = norm_weights(getattr(self.model.model, self.end_norm.partition("@")[0]), self.model.cfg)
        return norms

    @property
    def reads_embedding(self) -> bool:
        """Whether it is the first block of a loop, which reads the raw embedding."""
        return self.call is not None and self.layer == 0

    @property
    def end_norm(self) -> str | None:
        """The hook-point prefix of the norm that ends its stack's call, if another call follows; otherwise None."""
        call = self.call
        ends_call = call is not None and self.number + 1 == call.length and not call.ends
        return call.norm if call is not None and ends_call else None

    def _norms(self, names: Iterable[str]) -> dict[str, NormWeights]:
        modules = {name: getattr(self.module, name, None) for name in names}
        return {name: norm_weights(norm, self.model.cfg) for name, norm in modules.items() if is_norm(norm)}

    @weights_read
    def per_layer(self) -> PerLayerWeights | None:
        """The part that adds a per-layer input of each token, or None."""
        if "per_layer_input_gate" not in self.module._modules:
            return None
        return read_per_layer(innermost(self.module), self.model.cfg, self.refuse)

    @property
    def whitening(self) -> WhiteningWeights | None:
        """The whitening that `tensorlens_tl.whiten` put before the block, or None; raises for any other recursion."""
        if getattr(getattr(self.module, "attn", None), "whitening", None) is not None:
            raise self.refuse("attention reads a whitened copy of the stream; only whiten(reads='stream') is read.")
        return None if getattr(self.module, "whitening", None) is None else self._whitening

    @weights_read
    def _whitening(self) -> WhiteningWeights:
        module: Any = self.module.whitening
        entry = getattr(module, "entry", None)
        step = getattr(module, "step", None)
        if not isinstance(entry, Tensor) or not isinstance(step, Tensor):
            raise self.refuse(f"its whitening ({type(module).__name__}) has no readable entry and step.")
        L_inv, M = floating(entry, "whitening.L_inv", self.refuse), floating(step, "whitening.M", self.refuse)
        return WhiteningWeights(L_inv, M)

    @weights_read
    def attention(self) -> AttentionWeights:
        """The attention weights; raises unless it is softmax attention with readable weights."""
        if self.parts.is_mlp_alone:
            raise self.refuse(f"it has an MLP alone ({self.parts.mixer_name}): it has no attention, and no pattern.")
        if self.mixer is not None:
            raise self.refuse(
                f"{self.parts.mixer_name} is no softmax attention (a state-space layer, a delta rule, a convolution): "
                "it has no pattern and no heads. The operator and everything based on it work (tensorlens, "
                "gradients, logit_attribution); tlens.implicit_attention shows which tokens it reads."
            )
        attention: Any = self.parts.mixer
        if attention is None:
            raise self.refuse(self.parts.missing_mixer)
        if self.values_layer is None:
            read = read_attention(attention, self.model.cfg, self.refuse)
        else:
            read = self._shared_attention(attention, self.values_layer)
        read = replace(read, shown=self.parts.mixer_name not in MIXERS)
        return read.scaled(self.attention_factor, self.parts.multiplier("attention_in_multiplier"))

    @cached_property
    def values_layer(self) -> int | None:
        """The earlier block whose keys and values its attention reuses (Gemma 4); None if it has its own."""
        blocks = [getattr(self.model.model, self.stack)[earlier] for earlier in range(self.number + 1)]
        try:
            source = shared_source([getattr(block, self.parts.mixer_name, None) for block in blocks])
        except UnsupportedModelError as error:
            raise self.refuse(str(error)) from None
        return maybe(partial(operator.add, self.layer - self.number), source)

    @property
    def reads_at(self) -> str:
        """The hook point at which attention that is frozen as a whole reads the input of its values."""
        name = self.name if self.values_layer is None else f"{self.stack}.{self.values_layer}"
        return f"{name}.{self.parts.mixer_name}.hook_in"

    def _shared_attention(self, attention: Any, source: int) -> AttentionWeights:
        """Return the weights of attention that uses the values of an earlier block."""
        if self.offloaded:
            raise self.refuse(
                f"its attention takes keys and values of block {source}, but its weights are offloaded, so the "
                "two blocks are never loaded together. Load the model into memory."
            )
        values = self.model.model.get_submodule(self.reads_at.removesuffix(".hook_in"))
        return read_shared_attention(attention, values, self.model.cfg, self.refuse)

    def require_attention(self) -> AttentionWeights:
        """Return the attention weights, or raise if they cannot be read."""
        return self.attention

    def require_dense_mlp(self) -> MLPWeights | None:
        """Return the MLP shared by all tokens, or None; raise for experts."""
        return self.dense_mlp

    def require_query_key(self) -> QueryKeyWeights:
        """Return the weights behind the attention scores, or raise if they cannot be read."""
        return self.query_key

    def adapters(self, letters: str, *, cross: bool = False) -> tuple[str, ...]:
        """Return the names of active adapters in attention's projections, such as ``"VO"``, or cross-attention's."""
        attn = getattr(self.module, self.parts.cross_name, None) if cross else self.parts.mixer
        parts = [getattr(attn, "_modules", {}).get(letter.lower()) for letter in letters]
        return tuple(sorted({name for part in parts if part is not None for name in adapter_names(part)}))

    @weights_read
    def cross_attention(self) -> AttentionWeights | None:
        """The weights with which a decoder block reads the encoder output, or None.

        If self-attention reads it as well, they are the same weights, without the output bias, which is added only
        once.
        """
        if self.parts.is_merged:
            return replace(self.require_plain_attention(), b_O=None)
        cross = self.module._modules.get(self.parts.cross_name)
        if cross is None:
            return None
        read = read_attention(cross, self.model.cfg, self.refuse)
        if not read.hooked:
            raise self.refuse("cross-attention with a gate or a norm inside, which is not supported.")
        return replace(read, value_matrix=self._of_encoder(read.W_V))

    def require_plain_attention(self) -> AttentionWeights:
        """Return the attention weights; raise for attention that is more than pattern, W_V and W_O."""
        if not self.attention.is_plain:
            raise self.refuse(
                "a gate, a norm, a latent or a choice of experts stands inside its attention: what a head reads and "
                "writes is no product of W_V and W_O alone. The operator and everything based on it work (tensorlens, "
                "decompx, terms, effects)."
            )
        return self.attention

    @property
    def branch_factor(self) -> float:
        """The factor applied to both branches before they are added to the stream (Granite)."""
        return self.parts.multiplier("residual_multiplier")

    @property
    def attention_factor(self) -> float:
        """The factor applied to the attention output; it differs from `branch_factor` in Falcon-H1."""
        return self.branch_factor * self.parts.multiplier("attn_out_multiplier")

    @property
    def beside_factor(self) -> float:
        """The factor applied to the output of a mixer in parallel with attention."""
        return self.branch_factor * self.parts.multiplier("ssm_out_multiplier")

    def require_cross_attention(self) -> AttentionWeights:
        """Return the cross-attention weights; raise `UnsupportedModelError` if there are none that can be read."""
        if self.cross_attention is None:
            raise self.refuse("it has no cross-attention.")
        return self.cross_attention

    @weights_read
    def query_key(self) -> QueryKeyWeights:
        """The weights behind the attention scores; raises if they cannot be read."""
        if self.mixer is not None:
            self.require_attention()
        return self._query_key(self.parts.mixer)

    @weights_read
    def cross_query_key(self) -> QueryKeyWeights:
        """The weights behind the scores of cross-attention; raises if they cannot be read."""
        self.require_cross_attention()
        read = self._query_key(self.module._modules[self.parts.cross_name])
        return replace(read, W_K=self._of_encoder(read.W_K))

    def _of_encoder(self, weight: Tensor) -> Tensor:
        """Adapt a matrix that reads the encoder output to the output shown at its hook point."""
        gain = self.model.encoder_gain
        return weight if gain is None else gain[:, None].to(weight.device) * weight

    def _query_key(self, attn: Any) -> QueryKeyWeights:
        if self.values_layer is not None:
            raise self.refuse(
                f"its attention takes the keys of block {self.values_layer} (shared keys and values), so its "
                "attention scores also depend on the stream there; this is not supported."
            )
        if self.parts.is_merged:
            raise self.refuse(
                "its self- and cross-attention share one softmax (T5Gemma 2), so the scores of neither alone "
                "determine its pattern; this is not supported."
            )
        return read_query_key(attn, self.model.cfg, self.refuse, self.parts.multiplier("attention_in_multiplier"))

    @weights_read
    def latent_scores(self) -> QueryKeyWeights | None:
        """The weights behind the scores of latent attention (DeepSeek); None for other attention."""
        attn: Any = self.parts.mixer
        return read_latent_scores(attn, self.model.cfg, self.refuse)

    @property
    def scalar(self) -> Tensor | None:
        """The factor applied to the block's output, inside it (Gemma 4) or after it (RWKV), `[1]`; None for none."""
        if self.halved:
            return torch.tensor([0.5])
        return detached(getattr(innermost(self.module), "layer_scalar", None))

    @cached_property
    def halved(self) -> bool:
        """Whether the model halved the stream after the block, outside its hook points, when this was first read."""
        return self.is_halving

    @property
    def is_halving(self) -> bool:
        """Whether it does so now (RWKV): not in train mode, where the weights that write to the stream are larger."""
        return halves_after(self.module, self.layer)

    @property
    def has_mlp(self) -> bool:
        """Whether the block has an MLP, readable or not."""
        return self.parts.mlp is not None

    @weights_read
    def mlp(self) -> MLPWeights | ExpertsWeights | ChannelMixWeights | None:
        """The weights of the MLP, its experts or a channel mixing; None if there is none; raises for anything else."""
        mlp: Any = self.parts.mlp
        if mlp is None:
            return None
        if is_channel_mix(innermost(mlp)):
            return channel_mix_weights(innermost(mlp))
        if self.parts.has_experts_beside:
            read = read_experts(self.module, self.model.cfg, self.refuse)
            return replace(read, shared=read_mlp(mlp, self.model.cfg, self.refuse), around=EXPERTS_BESIDE)
        if has_experts(mlp):
            read = read_experts(mlp, self.model.cfg, self.refuse)
            if self.parts.shared_name is not None:
                shared = innermost(self.module._modules[self.parts.shared_name])
                read = replace(read, shared=read_module(shared, self.model.cfg, self.refuse))
            return replace(read, branch_factor=self.branch_factor)
        if self.parts.is_mlp_alone:
            return read_module(innermost(mlp), self.model.cfg, self.refuse).scaled(self.branch_factor)
        return read_mlp(mlp, self.model.cfg, self.refuse).scaled(self.branch_factor)

    @property
    def dense_mlp(self) -> MLPWeights | None:
        """The MLP's weights; raises unless its neurons are the same for every token and read that token alone."""
        if isinstance(self.mlp, ChannelMixWeights):
            raise self.refuse(
                f"its {self.parts.mlp_name} reads each token mixed with the one before it, and gates its neurons' "
                "output, so it is held as a whole. The operator and everything based on it work; this needs an MLP of "
                "each token."
            )
        if isinstance(self.mlp, ExpertsWeights):
            raise self.refuse(
                "its MLP is a mixture of experts: which neurons a token meets depends on where it is sent. The "
                "operator and everything based on it work; this needs one MLP for all tokens."
            )
        return self.mlp


# ------------------------------------------------------------------ what a frozen run, or a method, needs


def require_one_stream(block: BlockView) -> None:
    """Raise for a block that reads and writes several vectors per token."""
    inner = innermost(block.module)
    mixed = [cause for name, cause in STREAMS.items() if isinstance(getattr(inner, name, None), nn.Module)]
    if mixed:
        raise block.refuse(
            f"its stream has several vectors for each token, and {mixed[0]}. Only models with one vector for each "
            "token can be frozen."
        )


def require_scaled_weights(block: BlockView) -> None:
    """Raise for offloaded weights of a model that halves its stream."""
    every = halving_period(block.module)
    if block.offloaded and every > 0:
        raise block.refuse(
            f"it halves its stream after every {every} blocks and scales the weights that write to the stream in "
            "its first run, which has no effect on offloaded weights, so its output is wrong. Load "
            "the model into memory, or set config.rescale_every = 0 before it is loaded."
        )


def require_attention_alone(block: BlockView) -> AttentionWeights:
    """Return the attention weights; raise `UnsupportedModelError` if anything else mixes positions as well.

    That is a mixer, or a softmax that also runs over the encoder's tokens.
    """
    if block.parts.is_merged:
        raise block.refuse(
            "its self- and cross-attention share one softmax (T5Gemma 2), so neither alone mixes the values of its "
            "tokens. The operator and everything based on it work (tensorlens, decompx, gradients)."
        )
    if block.has_beside:
        raise block.refuse(
            f"{block.parts.beside_name} stands beside its attention, so its patterns do not show everything that "
            "tokens read from each other. The operator and everything based on it work (tensorlens, gradients, "
            "logit_attribution, with terms for each head and for the mixer)."
        )
    return block.attention


# ------------------------------------------------------------------ with other weights


def with_weights(block: BlockView, weights: Mapping[str, Tensor]) -> BlockView:
    """Return a view of the block with other weights, by TransformerLens' names and shapes; the block is unchanged.

    Raises `UnsupportedModelError` if the weights alone do not determine the block's output: constant multipliers, a
    gate or norm inside attention, or a norm inside the MLP.
    """
    if block.parts.is_multiplied:
        raise block.refuse("its branches are multiplied by a constant; replacing its weights is not supported.")

    def side_by_side(name: str) -> Tensor:
        weight = weights[name].detach().to(block.attention.W_O)
        if name == "W_O":
            return rearrange(weight, "head d_head d_model -> (head d_head) d_model")
        if name.startswith("b"):
            return weight.reshape(-1)
        return rearrange(weight, "head d_model d_head -> d_model (head d_head)")

    other = block.unread()
    fields = {"value_matrix": "W_V", "b_V": "b_V", "W_O": "W_O"}
    values = {field: side_by_side(name) for field, name in fields.items() if name in weights}
    scores = {name: side_by_side(name) for name in ("W_Q", "b_Q", "W_K", "b_K") if name in weights}
    matrices = {name: weights[name] for name in ("W_in", "W_gate", "W_out") if name in weights}
    if values:
        other.attention = replace(block.require_plain_attention(), **values)
    if scores:
        other.query_key = replace(block.query_key, **scores)
    if matrices and isinstance(block.mlp, MLPWeights):
        mlp = block.mlp
        if mlp.post_factor is not None:
            raise block.refuse(f"its MLP contains a norm; replacing {', '.join(matrices)} is not supported.")
        other.mlp = replace(mlp, **{name: weight.to(mlp.W_in) for name, weight in matrices.items()})
    return other
