"""The names of the hook points that a frozen pass reads and writes.

HookedTransformer-style names also resolve on bridges, with measured exceptions: a HookedEncoder's block output is
`hook_normalized_resid_post` (its `hook_resid_post` is before ln2), and `hook_resid_mid` is missing on parallel blocks
and means something else on a post-LN Bridge, so it is not used. Scales are chosen by place, never by suffix:
`attn.q_norm.hook_scale` belongs to the pattern.

Captured per block and token, as a count of numbers in the model's dtype (``h`` heads, ``n`` tokens):

| what | hook point | size per token |
| --- | --- | --- |
| block input | `hook_resid_pre`; in a whitened block `whitening.hook_in` and `whitening.hook_out` | d_model each |
| pattern | `attn.hook_pattern`, or an output of the module (`CallPoint`) | h · n |
| norm scales | `ln1.hook_scale` and the like | 1 each |
| pre-activations | `mlp.hook_pre`; if gated, also `mlp.hook_pre_linear` | d_mlp; if gated, 2 · d_mlp |
| inputs of parts held as a whole | `hook_in` of attention, MLP or norm | d_model each |
| routing of experts | the experts' arguments (`CallPoint`) | 2 for each chosen expert |

A part is held from inside if TransformerLens has effective hook points there. A mixture of experts, gated or latent
attention, an MLP with a norm inside, and norms without a replaceable scale are held as a whole: such a part's input is
recorded at its `hook_in`, and its `hook_out` is replaced by the map of that input. A HookedTransformer's own mixture of
experts is held from inside: its routing, and the activation of each expert.

Captured once: the last block's output, `ln_final.hook_scale`, `unembed.hook_in` (d_model each).
"""

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks.running import START, hook_points, numbered
from tensorlens_tl.models import BlockView, ModelView, require_one_stream, require_scaled_weights
from tensorlens_tl.models.names import END_NORM
from tensorlens_tl.models.parameters import NormWeights, first_output, innermost
from tensorlens_tl.models.sublayers import ExpertsWeights, pattern_reader

PATTERN = ".pattern"
"""The suffix for names of patterns without a hook point."""


@dataclass(frozen=True)
class CallPoint:
    """An `argument` of a module's forward, or its ``"output"``, in a place where TransformerLens has no hook point.

    An `optional` one may be missing. `read` selects a tensor from the output, by default the first of several.
    """

    module: nn.Module
    argument: str
    optional: bool = False
    read: Callable[[Any], Any] = first_output


@dataclass(frozen=True)
class Ends:
    """The input and output points of a part that is held as a whole."""

    into: str
    out: str


@dataclass(frozen=True)
class AttentionPoints:
    """The hook points of one attention layer; its pattern may be a name in `ModelPoints.calls` instead."""

    pattern: str
    value: str
    z: str


@dataclass(frozen=True)
class BlockPoints:
    """The hook-point names of one block; `Ends` are the input and output of a part.

    Attributes:
        resid_pre: the block's input.
        whitened: the same after whitening, or after a loop has added the embedding; None in other blocks.
        heads: those of attention, including `pattern`, `value` and `z`; None for another mixer.
        scales: by norm, the point of its scale; for a norm in `norms`, of its input.
        pre, pre_linear, post: those of an MLP frozen from inside; the second exists if it is gated.
        attention, mlp: their ends if they are frozen as a whole, as mixers other than attention always are.
        beside: the ends of a mixer next to attention.
        shared: the ends of a shared expert next to the experts.
        per_layer: the ends of a separate input of each token at this layer; `per_layer_input` names that input in
            `ModelPoints.calls`.
        norms: the ends of norms.
        cross: those of cross-attention; if one softmax covers both sides, its values and outputs are those of `heads`.
        index, weight: the routing, in `ModelPoints.calls` or at hook points; `index` is None if the weights imply it.
        experts: `pre`, `pre_linear` and `post` of each expert of a HookedTransformer.
        attention_write, mlp_write: a sublayer's output to the block, in some classes after its norm; None if not shown.
        head_writes: each head's output, ``hook_result``, which only fires if the model is configured so.
        call_end: the block's output at the end of a call of a looped stack.
    """

    resid_pre: str
    whitened: str | None = None
    heads: AttentionPoints | None = None
    scales: dict[str, str] = field(default_factory=dict)
    pre: str | None = None
    pre_linear: str | None = None
    post: str | None = None
    attention: Ends | None = None
    mlp: Ends | None = None
    beside: Ends | None = None
    shared: Ends | None = None
    per_layer: Ends | None = None
    per_layer_input: str | None = None
    norms: dict[str, Ends] = field(default_factory=dict)
    cross: AttentionPoints | None = None
    index: str | None = None
    weight: str | None = None
    experts: "tuple[BlockPoints, ...]" = ()
    attention_write: str | None = None
    mlp_write: str | None = None
    head_writes: str | None = None
    call_end: str | None = None

    @property
    def pattern(self) -> str | None:
        """The point of attention's pattern."""
        return self.heads and self.heads.pattern

    @property
    def value(self) -> str | None:
        """The point of attention's values."""
        return self.heads and self.heads.value

    @property
    def z(self) -> str | None:
        """The point of the heads' outputs, before the output weights."""
        return self.heads and self.heads.z

    @property
    def merged(self) -> bool:
        """Whether self- and cross-attention have a joint output (T5Gemma 2)."""
        return self.heads is not None and self.cross is not None and self.heads.z == self.cross.z

    @property
    def captured(self) -> list[str]:
        """The points of this block that a pass stores."""
        names = [self.resid_pre, self.whitened, self.pattern, *self.scales.values(), self.pre, self.pre_linear]
        names.append(self.cross and self.cross.pattern)
        names += [ends and ends.into for ends in (self.attention, self.beside, self.mlp, self.shared, self.per_layer)]
        names += [self.index, self.weight, self.per_layer_input, self.call_end]
        return _given(names)

    @property
    def proved(self) -> list[str]:
        """The points of this block that verification compares but no pass stores: states and outputs of sublayers."""
        names = [self.head_writes, self.attention_write, self.cross and self.cross.z, self.post, self.mlp_write]
        if self.attention is None:
            names.insert(0, self.z)
        return _given(names)


@dataclass(frozen=True)
class ModelPoints:
    """All hook-point names that a frozen pass needs from one model.

    `output` is after the final norm, or the last block. `routers` are by block; they are read once and not stored.
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
        """All points that a pass stores."""
        names: list[str | None] = [name for block in self.blocks for name in block.captured]
        names += [self.encoder_output, self.encoder_scale]
        names += [self.last_output, self.final_scale, self.head_scale, self.output, self.unembed_in]
        return _given(names)

    def writers(self, view: ModelView) -> dict[str, str]:
        """Return the block that wrote each block's input, by hook point, except for the first block of a stack."""
        names = [block.name for block in view.blocks]
        return {
            block.resid_pre: names[number - 1]
            for number, block in enumerate(self.blocks)
            if number not in (0, view.encoder_layers)
        }

    @property
    def proved(self) -> list[str]:
        """The points that verification compares but no pass stores; a hook point that does not fire is skipped."""
        captured = set(self.captured)
        return [name for block in self.blocks for name in block.proved if name not in captured]


def model_points(view: ModelView) -> ModelPoints:
    """Return the hook points of a model; raise `UnsupportedModelError` if one is missing, or a part cannot be frozen.

    >>> from tensorlens_tl.hooks import model_points
    >>> points = model_points(frozen.view)
    >>> points.blocks[0].pattern, points.output
    ('blocks.0.attn.hook_pattern', 'unembed.hook_in')
    """
    known = numbered(view.model, hook_points(view.model))
    blocks: list[BlockPoints] = []
    calls: dict[str, CallPoint] = {}
    routers: dict[str, CallPoint] = {}
    for block in view.blocks:
        with block.loaded():
            blocks.append(_block_points(view, block, known))
            calls |= _calls(block, blocks[-1])
            if isinstance(block.mlp, ExpertsWeights) and block.mlp.routing.router is not None:
                routers[block.name] = CallPoint(block.mlp.routing.router, "output", optional=True)
    points = ModelPoints(blocks, calls=calls, routers=routers, **_encoder_end(view), **_end(view))
    missing = [name for name in points.captured if name not in known and name not in points.calls]
    if missing:
        count = f" ({len(missing)} are missing)" if len(missing) > 1 else ""
        raise UnsupportedModelError(
            f"{view.description} has no hook point {missing[0]!r}{count}; a frozen pass needs it "
            "(see tensorlens_tl.hooks.points)."
        )
    return points


def _given(names: Iterable[str | None]) -> list[str]:
    """Return the names that are not None, each once."""
    return list(dict.fromkeys(name for name in names if name is not None))


def _end(view: ModelView) -> dict[str, Any]:
    """Return the points after the last block."""
    output_hook = "hook_normalized_resid_post" if view.is_hooked_encoder else "hook_resid_post"
    last = f"{view.blocks[-1].name}.{output_hook}"
    unembed_in: str | None = None
    if view.unembedding is not None:
        unembed_in = "unembed.hook_in" if view.projection is None else "project_out.hook_in"
        if view.is_bridge and view.final_norm is None and view.mlm_head is None:
            last = unembed_in  # the same tensor; the hook after the block does not fire everywhere (GPT-1)
    if view.blocks[-1].halved:
        last = f"{view.final_norm_name}.hook_in"
    points: dict[str, Any] = {"last_output": last, "output": last, "final_scale": None}
    if view.final_norm is not None:
        norm_out = f"{view.final_norm_name}.hook_out"
        # if the unembedding reads a scaled output, or one position of it, capture the norm's output
        reads_one_position = view.class_head is not None and view.class_head.norm is None
        if view.scales_decoder_output or reads_one_position:
            unembed_in = norm_out
        points["output"] = norm_out
        if unembed_in is not None and view.mlm_head is None and view.class_head is None:
            points["output"] = unembed_in
        points["final_scale"] = f"{view.final_norm_name}.hook_scale"
        if view.final_norm.epsilon is not None:
            # some models norm the embeddings with the same module: its last input is the last block's output
            points |= {"final_scale": last, "final_norm": Ends(last, norm_out)}
    head_scale = view.mlm_head and view.mlm_head.scale_name
    if view.class_head is not None and view.class_head.norm is not None:
        head_scale = _scale_point("classifier_ln", view.class_head.norm)
    return points | {"unembed_in": unembed_in, "head_scale": head_scale}


def _scale_point(name: str, norm: NormWeights) -> str:
    """Return the point of a norm's scale, or of the norm's input if the scale follows from that."""
    return f"{name}.hook_scale" if norm.epsilon is None else f"{name}.hook_in"


def _block_points(view: ModelView, block: BlockView, known: Collection[str]) -> BlockPoints:
    """Return the hook points of one block; a part that cannot be frozen raises an error that names the block."""
    readers = (_stream_points, _mixer_points, _mlp_points, _norm_points)
    points = {name: point for read in readers for name, point in read(block).items()}
    if block.per_layer is not None:  # a separate input of each token at this layer
        points["per_layer"] = Ends(
            f"{block.name}.per_layer_input_gate.hook_in", f"{block.name}.per_layer_projection.hook_out"
        )
        points["per_layer_input"] = f"{block.name}.per_layer_input"
    attn = f"{block.name}.{block.parts.mixer_name}"
    if not block.parts.is_mlp_alone:
        points["attention_write"] = _first_known(known, f"{block.name}.hook_attn_out", f"{attn}.hook_out")
    if block.mlp is not None:
        writes = [f"{block.name}.hook_mlp_out"]
        if block.parts.shared_name is None:  # else its module computes only a part of the output
            writes.append(f"{block.name}.{block.parts.mlp_name}.hook_out")
        points["mlp_write"] = _first_known(known, *writes)
    if getattr(view.cfg, "use_attn_result", False):
        points["head_writes"] = _first_known(known, f"{attn}.hook_result")  # a mixer in place of attention has none
    return BlockPoints(**points)


def _stream_points(block: BlockView) -> dict[str, Any]:
    """Return the points where the stream enters."""
    require_one_stream(block)
    if block.reads_embedding:
        return {"resid_pre": START, "whitened": f"{block.name}.hook_resid_pre"}
    require_scaled_weights(block)
    if block.parts.entry_norm is not None:
        return {"resid_pre": f"{block.name}.{block.parts.entry_norm}.hook_out"}
    if block.whitening is None:
        return {"resid_pre": f"{block.name}.hook_resid_pre"}
    return {"resid_pre": f"{block.name}.whitening.hook_in", "whitened": f"{block.name}.whitening.hook_out"}


def _mixer_points(block: BlockView) -> dict[str, Any]:
    """Return the points of self-attention or another mixer, and of cross-attention."""
    name = f"{block.name}.{block.parts.mixer_name}"
    if block.parts.is_mlp_alone:
        return {}
    if block.mixer is not None:
        return {"attention": _ends(name)}
    points: dict[str, Any] = {"heads": _attention_points(block, block.parts.mixer_name)}
    if not block.attention.hooked:
        points["attention"] = Ends(block.reads_at, f"{name}.hook_out")
    if block.has_beside:
        points["beside"] = _ends(f"{block.name}.{block.parts.beside_name}")
    if block.cross_attention is not None:
        points["cross"] = _attention_points(block, block.parts.cross_name)
    if block.parts.is_merged:
        points["cross"] = replace(points["cross"], pattern=f"{name}.hook_cross_pattern")
    return points


def _mlp_points(block: BlockView) -> dict[str, Any]:
    """Return the points of an MLP from inside or as a whole, or of experts and a shared expert."""
    name = f"{block.name}.{block.parts.mlp_name}"
    points: dict[str, Any] = {}
    if block.parts.shared_name is not None:
        points["shared"] = _ends(f"{block.name}.{block.parts.shared_name}")
    if isinstance(block.mlp, ExpertsWeights) and block.mlp.routing.shown:
        points["mlp"] = Ends(f"{name}.input", f"{block.name}.hook_mlp_out")
        points |= {part: f"{name}.{getattr(block.mlp.routing, part)}" for part in ("index", "weight")}
        points["experts"] = tuple(_expert_points(f"{name}.experts.{number}") for number in range(block.mlp.count))
    elif isinstance(block.mlp, ExpertsWeights):
        experts = f"{block.name}.experts" if block.parts.has_experts_beside else name
        points |= {"mlp": _ends(experts), "weight": f"{name}.experts.weight"}
        if not block.mlp.routing.dense:
            points["index"] = f"{name}.experts.index"
    elif block.mlp is not None and block.mlp.hooked:
        points |= {"pre": f"{name}.hook_pre", "post": f"{name}.hook_post"}
        if block.mlp.W_gate is not None:
            points["pre_linear"] = f"{name}.hook_pre_linear"
    elif block.mlp is not None:
        points["mlp"] = _ends(name)
    return points


def _expert_points(name: str) -> BlockPoints:
    """Return the points inside an expert of a HookedTransformer's mixture, where its tokens are packed."""
    return BlockPoints(name, pre=f"{name}.hook_gate", pre_linear=f"{name}.hook_pre", post=f"{name}.hook_post")


def _norm_points(block: BlockView) -> dict[str, Any]:
    """Return the scales of the block's norms, and the ends of those held as a whole."""
    norms = {f"{block.name}.{name}": (name, norm) for name, norm in (block.norms | block.inner_norms).items()}
    if block.end_norm is not None:
        norms[block.end_norm] = norms.pop(f"{block.name}.{END_NORM}")
    return {
        "scales": {name: _scale_point(at, norm) for at, (name, norm) in norms.items()},
        "norms": {name: _ends(at) for at, (name, norm) in norms.items() if norm.epsilon is not None},
        "call_end": f"{block.end_norm}.hook_out" if block.end_norm else None,
    }


def _attention_points(block: BlockView, attention: str) -> AttentionPoints:
    name = f"{block.name}.{attention}"
    pattern = f"{name}.hook_pattern"
    if pattern_reader(block.module._modules.get(attention)) is not None:
        pattern = name + PATTERN
    return AttentionPoints(pattern=pattern, value=f"{name}.hook_v", z=f"{name}.hook_z")


def _first_known(known: Collection[str], *names: str) -> str | None:
    """Return the first of some names that is a hook point."""
    return next((name for name in names if name in known), None)


def _encoder_end(view: ModelView) -> dict[str, Any]:
    """Return the points at the end of an encoder–decoder's encoder."""
    if not view.is_encoder_decoder:
        return {}
    norm = view.encoder_norm_name
    if view.is_hooked_encoder_decoder:
        return {"encoder_output": f"{norm}.hook_normalized", "encoder_scale": f"{norm}.hook_scale"}
    last = f"{view.blocks[view.encoder_layers - 1].name}.hook_resid_post"
    if view.encoder_norm is None:
        return {"encoder_output": last}
    output = f"{norm}.hook_out"
    if view.encoder_norm.epsilon is None:
        return {"encoder_output": output, "encoder_scale": f"{norm}.hook_scale"}
    return {"encoder_output": output, "encoder_scale": last, "encoder_norm": Ends(last, output)}


def _ends(name: str) -> Ends:
    return Ends(f"{name}.hook_in", f"{name}.hook_out")


def _calls(block: BlockView, points: BlockPoints) -> dict[str, CallPoint]:
    """Return where patterns without a hook point, expert routing, and per-layer inputs are read."""
    calls: dict[str, CallPoint] = {}
    for site, name in ((points.heads, block.parts.mixer_name), (points.cross, block.parts.cross_name)):
        attention = block.module._modules.get(name)
        read = pattern_reader(attention)
        if site is not None and read is not None:
            calls[site.pattern] = CallPoint(innermost(attention), "output", read=read)
    if block.per_layer is not None and points.per_layer_input is not None:
        calls[points.per_layer_input] = CallPoint(block.per_layer.module, block.per_layer.argument)
    if isinstance(block.mlp, ExpertsWeights) and block.mlp.module is not None and points.mlp is not None:
        argument = next(iter(inspect.signature(block.mlp.module.forward).parameters))
        calls[points.mlp.into] = CallPoint(block.mlp.module, argument)
    elif isinstance(block.mlp, ExpertsWeights):
        routing = block.mlp.routing
        arguments = {points.index: routing.index, points.weight: routing.weight}
        for name, argument in arguments.items():
            if name is not None:
                calls[name] = CallPoint(routing.module, argument, read=routing.read or first_output)
    return calls
