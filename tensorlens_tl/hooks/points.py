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

from dataclasses import dataclass, field

from torch import nn

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.experts import ExpertsWeights
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.models.weights import MLPWeights


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
class BlockPoints:
    """The hook-point names of one block.

    Attributes:
        resid_pre: what the block reads.
        whitened: the same after whitening; None unless the model is whitened.
        pattern, value, z: of attention.
        scales: of each norm, the point of its scale; of a norm in `norms`, of what it reads.
        pre, pre_linear, post: of an MLP held from inside, the second if it is gated.
        attention, mlp: where they begin and end, if they are held as a whole.
        norms: the same of norms.
        index, weight: where the routing of experts is seen, names in `ModelPoints.calls`; `index` is None where the
            weights say it.
    """

    resid_pre: str
    whitened: str | None
    pattern: str
    value: str
    z: str
    scales: dict[str, str]
    pre: str | None
    pre_linear: str | None
    post: str | None
    attention: Ends | None = None
    mlp: Ends | None = None
    norms: dict[str, Ends] = field(default_factory=dict)
    index: str | None = None
    weight: str | None = None

    @property
    def captured(self) -> list[str]:
        """What a pass keeps of this block."""
        whole = [ends.into for ends in (self.attention, self.mlp) if ends is not None]
        names = [self.resid_pre, self.whitened, self.pattern, *self.scales.values(), self.pre, self.pre_linear]
        return list(dict.fromkeys(name for name in (*names, *whole, self.index, self.weight) if name is not None))


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

    @property
    def captured(self) -> list[str]:
        """Everything a pass keeps."""
        once = [self.last_output, self.final_scale, self.head_scale, self.output, self.unembed_in]
        names = [name for block in self.blocks for name in block.captured] + [n for n in once if n is not None]
        return list(dict.fromkeys(names))


def model_points(view: ModelView) -> ModelPoints:
    """The hook points of a model.

    Raises:
        UnsupportedModelError: a hook point is missing, or a block has a part that cannot be frozen.
    """
    last = "hook_normalized_resid_post" if view.is_hooked_encoder else "hook_resid_post"
    head = view.mlm_head
    last_output = f"{view.blocks[-1].name}.{last}"
    unembed_in = "unembed.hook_in" if view.unembedding is not None else None
    if unembed_in is not None and view.is_bridge and view.final_norm is None and view.mlm_head is None:
        last_output = unembed_in  # nothing lies between; a block's own end does not fire everywhere (GPT-1)
    final_scale, final_out, whole = None, None, None
    if view.final_norm is not None:
        final_out = unembed_in if unembed_in is not None and view.mlm_head is None else "ln_final.hook_out"
        # some models norm the embeddings with the same module: what it reads last is the last block's output
        whole = None if view.final_norm.epsilon is None else Ends(last_output, "ln_final.hook_out")
        final_scale = "ln_final.hook_scale" if whole is None else last_output
    blocks = [_block_points(view, layer) for layer in range(view.n_layers)]
    points = ModelPoints(
        blocks=blocks,
        calls=_calls(view, blocks),
        routers={
            block.name: CallPoint(block.mlp.routing.router, "output", optional=True)
            for block in view.blocks
            if isinstance(block.mlp, ExpertsWeights) and block.mlp.routing.router is not None
        },
        last_output=last_output,
        output=final_out or last_output,
        final_scale=final_scale,
        final_norm=whole,
        head_scale=head.scale_name if head is not None else None,
        unembed_in=unembed_in,
    )
    known = view.model.hook_dict
    missing = [name for name in points.captured if name not in known and name not in points.calls]
    if missing:
        raise UnsupportedModelError(
            f"{view.description} has no hook point {missing[0]!r}"
            + (f" (nor {len(missing) - 1} others)" if len(missing) > 1 else "")
            + "; a frozen pass needs it (see tensorlens_tl.hooks.points)."
        )
    return points


def _block_points(view: ModelView, layer: int) -> BlockPoints:
    block = view.blocks[layer]
    at = block.name + "."
    # each refuses what cannot be frozen, naming the block
    mlp, attention, whitening = block.mlp, block.attention, block.whitening
    inside = mlp if isinstance(mlp, MLPWeights) and mlp.hooked else None
    whole = {name: _ends(at + name) for name, norm in block.norms.items() if norm.epsilon is not None}
    index, weight = (f"{at}mlp.experts.{what}" for what in ("index", "weight"))
    routed = isinstance(mlp, ExpertsWeights)
    return BlockPoints(
        resid_pre=at + ("hook_resid_pre" if whitening is None else "whitening.hook_in"),
        whitened=None if whitening is None else at + "whitening.hook_out",
        pattern=at + "attn.hook_pattern",
        value=at + "attn.hook_v",
        z=at + "attn.hook_z",
        scales={name: whole[name].into if name in whole else f"{at}{name}.hook_scale" for name in block.norms},
        pre=at + "mlp.hook_pre" if inside is not None else None,
        pre_linear=at + "mlp.hook_pre_linear" if inside is not None and inside.W_gate is not None else None,
        post=at + "mlp.hook_post" if inside is not None else None,
        attention=None if attention.hooked else _ends(at + "attn"),
        mlp=_ends(at + "mlp") if mlp is not None and not mlp.hooked else None,
        norms=whole,
        index=index if routed and not mlp.routing.dense else None,
        weight=weight if routed else None,
    )


def _ends(name: str) -> Ends:
    return Ends(f"{name}.hook_in", f"{name}.hook_out")


def _calls(view: ModelView, blocks: list[BlockPoints]) -> dict[str, CallPoint]:
    """Where the routing of every mixture of experts is seen."""
    calls: dict[str, CallPoint] = {}
    for block, points in zip(view.blocks, blocks, strict=True):
        if isinstance(block.mlp, ExpertsWeights):
            routing = block.mlp.routing
            for name, argument in ((points.index, routing.index), (points.weight, routing.weight)):
                if name is not None:
                    calls[name] = CallPoint(routing.module, argument)
    return calls
