"""The names of the hook points a frozen pass reads and writes.

TransformerLens' HookedTransformer-style names resolve on bridges too, with exceptions that were measured:
a HookedEncoder's block output is `hook_normalized_resid_post` (its `hook_resid_post` is before ln2), and
`hook_resid_mid` is missing on parallel blocks and means something else on a post-LN Bridge, so it is not
used. Scales are chosen by place, never by suffix: `attn.q_norm.hook_scale` belongs to the pattern.

Captured per block and token, in numbers of the model's dtype (``h`` heads, ``n`` tokens):

| what | hook point | size per token |
| --- | --- | --- |
| block input | `hook_resid_pre`, of a whitened block `whitening.hook_in` and `whitening.hook_out` | d_model each |
| pattern | `attn.hook_pattern` | h · n |
| norm scales | `ln1.hook_scale` and the like | 1 each |
| pre-activations | `mlp.hook_pre`, gated also `mlp.hook_pre_linear` | d_mlp, gated 2 · d_mlp |
| what is held as a whole reads | `hook_in` of attention, MLP or norm | d_model each |
| routing of experts | the arguments they are called with (`CallPoint`) | 2 for each expert chosen |

A part is held from inside where TransformerLens has hook points there that take effect. A mixture of experts, gated or
latent attention, an MLP with a norm inside, and norms without a scale to be replaced are held as a whole: what such a
part reads is recorded at its `hook_in`, and its `hook_out` is replaced by its map of that.

and once: the last block's output, `ln_final.hook_scale`, `unembed.hook_in` (d_model each).
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks.running import hook_points
from tensorlens_tl.models.block import BlockView
from tensorlens_tl.models.parameters import MLPWeights
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.models.view import ModelView


@dataclass(frozen=True)
class CallPoint:
    """An argument that a module is called with, or its output, where TransformerLens has no hook point.

    Attributes:
        module: called once in a forward pass.
        argument: a name in its forward's signature, or ``"output"`` (of several, the first).
        optional: whether it is left out where the module is not called, or gives no tensor.
    """

    module: nn.Module
    argument: str
    optional: bool = False


@dataclass(frozen=True)
class Ends:
    """Where a part that is held as a whole begins and ends."""

    into: str
    out: str


@dataclass(frozen=True)
class AttentionPoints:
    """The hook points of one attention layer."""

    pattern: str
    value: str
    z: str


@dataclass(frozen=True)
class BlockPoints:
    """The hook-point names of one block.

    Attributes:
        resid_pre: what the block reads.
        whitened: the same after whitening; None unless the model is whitened.
        pattern, value, z: of attention; None for another mixer (a state-space layer, a convolution).
        scales: of each norm, the point of its scale; of a norm in `norms`, of what it reads.
        pre, pre_linear, post: of an MLP held from inside, the second if it is gated.
        attention, mlp: where they begin and end, if they are held as a whole; any other mixer always is.
        shared: the same of a shared expert that stands beside the experts.
        per_layer: the same of what an input of each token at this layer adds; `per_layer_input` names that input in
            `ModelPoints.calls`.
        norms: the same of norms.
        cross: of cross-attention.
        index, weight: where the routing of experts is seen, names in `ModelPoints.calls`; `index` is None where the
            weights say it.
        attention_write, mlp_write: what a sublayer hands to the block, in some classes after the norm that follows it;
            None where no hook point shows it.
        head_writes: what each head writes, ``hook_result``, which fires only where the model was told to compute it.
    """

    resid_pre: str
    whitened: str | None
    pattern: str | None
    value: str | None
    z: str | None
    scales: dict[str, str]
    pre: str | None
    pre_linear: str | None
    post: str | None
    attention: Ends | None = None
    mlp: Ends | None = None
    shared: Ends | None = None
    per_layer: Ends | None = None
    per_layer_input: str | None = None
    norms: dict[str, Ends] = field(default_factory=dict)
    cross: AttentionPoints | None = None
    index: str | None = None
    weight: str | None = None
    attention_write: str | None = None
    mlp_write: str | None = None
    head_writes: str | None = None

    @property
    def heads(self) -> AttentionPoints | None:
        """The points of attention, or None."""
        if self.pattern is None or self.value is None or self.z is None:
            return None
        return AttentionPoints(self.pattern, self.value, self.z)

    @property
    def captured(self) -> list[str]:
        """What a pass keeps of this block."""
        parts = (self.attention, self.mlp, self.shared, self.per_layer)
        whole = [ends.into for ends in parts if ends is not None]
        names = [self.resid_pre, self.whitened, self.pattern, *self.scales.values(), self.pre, self.pre_linear]
        names.append(None if self.cross is None else self.cross.pattern)
        names += [*whole, self.index, self.weight, self.per_layer_input]
        return list(dict.fromkeys(name for name in names if name is not None))

    @property
    def proved(self) -> list[str]:
        """What only the proof of this block compares, and no pass keeps: what its sublayers hold and write."""
        z = None if self.attention is not None else self.z
        cross_z = None if self.cross is None else self.cross.z
        names = (z, self.head_writes, self.attention_write, cross_z, self.post, self.mlp_write)
        return [name for name in names if name is not None]


@dataclass(frozen=True)
class ModelPoints:
    """All hook-point names a frozen pass needs of one model.

    `output` is the model's own output: after the final norm where there is one, or the last block's. `routers` are the
    numbers by which experts are chosen, by block; they are looked at once and not kept.
    """

    blocks: list[BlockPoints]
    last_output: str
    output: str
    final_scale: str | None
    head_scale: str | None
    unembed_in: str | None
    calls: dict[str, CallPoint] = field(default_factory=dict)
    routers: dict[str, CallPoint] = field(default_factory=dict)
    final_norm: Ends | None = None
    encoder_output: str | None = None
    encoder_scale: str | None = None
    encoder_norm: Ends | None = None

    @property
    def captured(self) -> list[str]:
        """Everything a pass keeps."""
        names: list[str | None] = [name for block in self.blocks for name in block.captured]
        names += [self.encoder_output, self.encoder_scale]
        names += [self.last_output, self.final_scale, self.head_scale, self.output, self.unembed_in]
        return list(dict.fromkeys(name for name in names if name is not None))

    @property
    def proved(self) -> list[str]:
        """What only the proofs of its blocks compare; a hook point that does not fire is left out."""
        captured = set(self.captured)
        return [name for block in self.blocks for name in block.proved if name not in captured]


def model_points(view: ModelView) -> ModelPoints:
    """The hook points of a model.

    Raises:
        UnsupportedModelError: a hook point is missing, or a block has a part that cannot be frozen.
    """
    output_hook = "hook_normalized_resid_post" if view.is_hooked_encoder else "hook_resid_post"
    last_output = f"{view.blocks[-1].name}.{output_hook}"
    unembed_in = "unembed.hook_in" if view.unembedding is not None else None
    if unembed_in is not None and view.is_bridge and view.final_norm is None and view.mlm_head is None:
        last_output = unembed_in  # nothing lies between; the hook after the block does not fire everywhere (GPT-1)
    output = last_output
    final_scale: str | None = None
    final_norm: Ends | None = None
    if view.final_norm is not None:
        norm_out = f"{view.final_norm_name}.hook_out"
        # where the unembedding reads a scaled output, or one position of it, the norm's output is what is captured
        reads_one_position = view.class_head is not None and view.class_head.norm is None
        if view.scales_decoder_output or reads_one_position:
            unembed_in = norm_out
        headless = view.mlm_head is None and view.class_head is None
        output = unembed_in if unembed_in is not None and headless else norm_out
        if view.final_norm.epsilon is None:
            final_scale = f"{view.final_norm_name}.hook_scale"
        else:  # some models norm the embeddings with the same module: its last input is the last block's output
            final_scale = last_output
            final_norm = Ends(last_output, norm_out)
    blocks: list[BlockPoints] = []
    known = hook_points(view.model)
    calls = dict[str, CallPoint]()
    routers = dict[str, CallPoint]()
    for layer, block in enumerate(view.blocks):
        with block.loaded():
            blocks.append(_block_points(view, layer, known))
            calls |= _calls(block, blocks[-1])
            if isinstance(block.mlp, ExpertsWeights) and block.mlp.routing.router is not None:
                routers[block.name] = CallPoint(block.mlp.routing.router, "output", optional=True)
    points = ModelPoints(
        blocks=blocks,
        calls=calls,
        routers=routers,
        **_encoder_end(view),
        last_output=last_output,
        output=output,
        final_scale=final_scale,
        final_norm=final_norm,
        head_scale=_head_scale(view),
        unembed_in=unembed_in,
    )
    missing = [name for name in points.captured if name not in known and name not in points.calls]
    if missing:
        others = f" (nor {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise UnsupportedModelError(
            f"{view.description} has no hook point {missing[0]!r}{others}; a frozen pass needs it "
            "(see tensorlens_tl.hooks.points)."
        )
    return points


def _head_scale(view: ModelView) -> str | None:
    """Where the scale of a prediction head's norm is, or of a classifier's."""
    classes = view.class_head
    if classes is not None and classes.norm is not None:
        return "classifier_ln.hook_scale" if classes.norm.epsilon is None else "classifier_ln.hook_in"
    return None if view.mlm_head is None else view.mlm_head.scale_name


def _block_points(view: ModelView, layer: int, known: Collection[str]) -> BlockPoints:
    """The hook points of one block; reading a part that cannot be frozen raises an error that names the block."""
    block = view.blocks[layer]
    at = f"{block.name}."
    attn_at = at + block.mixer_name
    mlp_at = at + block.mlp_name
    experts_at = at + "experts" if block.has_experts_beside else mlp_at
    mlp = block.mlp
    whitening = block.whitening
    attention = None if block.mixer is not None else block.attention
    heads = None if attention is None else _attention_points(attn_at)
    hooked_mlp = mlp if isinstance(mlp, MLPWeights) and mlp.hooked else None
    gated = hooked_mlp is not None and hooked_mlp.W_gate is not None
    routed = isinstance(mlp, ExpertsWeights)
    norms = block.norms | block.inner_norms
    per_layer = block.per_layer
    per_layer_ends = Ends(f"{at}per_layer_input_gate.hook_in", f"{at}per_layer_projection.hook_out")
    norm_ends = {name: _ends(at + name) for name, norm in norms.items() if norm.epsilon is not None}
    shared = "mlp" if block.has_experts_beside else block.shared_name
    return BlockPoints(
        resid_pre=at + ("hook_resid_pre" if whitening is None else "whitening.hook_in"),
        whitened=None if whitening is None else at + "whitening.hook_out",
        pattern=None if heads is None else heads.pattern,
        value=None if heads is None else heads.value,
        z=None if heads is None else heads.z,
        scales={name: norm_ends[name].into if name in norm_ends else f"{at}{name}.hook_scale" for name in norms},
        pre=f"{mlp_at}.hook_pre" if hooked_mlp is not None else None,
        pre_linear=f"{mlp_at}.hook_pre_linear" if gated else None,
        post=f"{mlp_at}.hook_post" if hooked_mlp is not None else None,
        attention=None if attention is not None and attention.hooked else _ends(attn_at),
        mlp=_ends(experts_at) if mlp is not None and not mlp.hooked else None,
        shared=None if shared is None else _ends(at + shared),
        per_layer=None if per_layer is None else per_layer_ends,
        per_layer_input=None if per_layer is None else f"{at}per_layer_input",
        norms=norm_ends,
        cross=None if block.cross_attention is None else _attention_points(f"{at}cross_attn"),
        index=f"{mlp_at}.experts.index" if routed and not mlp.routing.dense else None,
        weight=f"{mlp_at}.experts.weight" if routed else None,
        attention_write=_first_known(known, f"{at}hook_attn_out", f"{attn_at}.hook_out"),
        mlp_write=None if mlp is None else _first_known(known, f"{at}hook_mlp_out", f"{mlp_at}.hook_out"),
        head_writes=f"{attn_at}.hook_result" if getattr(view.cfg, "use_attn_result", False) else None,
    )


def _attention_points(name: str) -> AttentionPoints:
    return AttentionPoints(pattern=f"{name}.hook_pattern", value=f"{name}.hook_v", z=f"{name}.hook_z")


def _first_known(known: Collection[str], *names: str) -> str | None:
    """The first of some names that is a hook point."""
    return next((name for name in names if name in known), None)


def _encoder_end(view: ModelView) -> dict[str, Any]:
    """What an encoder–decoder's encoder ends with."""
    if not view.is_encoder_decoder:
        return {}
    last = f"{view.blocks[view.encoder_layers - 1].name}.hook_resid_post"
    if view.encoder_norm is None:
        return {"encoder_output": last}
    output = "encoder_ln_final.hook_out"
    if view.encoder_norm.epsilon is None:
        return {"encoder_output": output, "encoder_scale": "encoder_ln_final.hook_scale", "encoder_norm": None}
    return {"encoder_output": output, "encoder_scale": last, "encoder_norm": Ends(last, output)}


def _ends(name: str) -> Ends:
    return Ends(f"{name}.hook_in", f"{name}.hook_out")


def _calls(block: BlockView, points: BlockPoints) -> dict[str, CallPoint]:
    """Where the routing of a mixture of experts is seen, and an input of this layer alone."""
    calls: dict[str, CallPoint] = {}
    if block.per_layer is not None and points.per_layer_input is not None:
        calls[points.per_layer_input] = CallPoint(block.per_layer.module, block.per_layer.argument)
    if isinstance(block.mlp, ExpertsWeights):
        routing = block.mlp.routing
        for name, argument in ((points.index, routing.index), (points.weight, routing.weight)):
            if name is not None:
                calls[name] = CallPoint(routing.module, argument)
    return calls
