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

and once: the last block's output, `ln_final.hook_scale`, `unembed.hook_in` (d_model each).
"""

from dataclasses import dataclass

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.view import ModelView


@dataclass(frozen=True)
class BlockPoints:
    """The hook-point names of one block.

    `pre_linear` is None for a plain MLP, both are None without one; `whitened` is None unless the model is.
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

    @property
    def captured(self) -> list[str]:
        """What a pass keeps of this block."""
        names = [self.resid_pre, self.whitened, self.pattern, *self.scales.values(), self.pre, self.pre_linear]
        return [name for name in names if name is not None]


@dataclass(frozen=True)
class ModelPoints:
    """All hook-point names a frozen pass needs of one model."""

    blocks: list[BlockPoints]
    last_output: str
    final_scale: str | None
    head_scale: str | None
    unembed_in: str | None

    @property
    def captured(self) -> list[str]:
        """Everything a pass keeps."""
        once = [self.last_output, self.final_scale, self.head_scale, self.unembed_in]
        return [name for block in self.blocks for name in block.captured] + [n for n in once if n is not None]


def model_points(view: ModelView) -> ModelPoints:
    """The hook points of a model.

    Raises:
        UnsupportedModelError: a hook point is missing, or a block has a part that cannot be frozen.
    """
    last = "hook_normalized_resid_post" if view.is_hooked_encoder else "hook_resid_post"
    head = view.mlm_head
    points = ModelPoints(
        blocks=[_block_points(view, layer) for layer in range(view.n_layers)],
        last_output=f"blocks.{view.n_layers - 1}.{last}",
        final_scale="ln_final.hook_scale" if view.final_norm is not None else None,
        head_scale=head.scale_name if head is not None else None,
        unembed_in="unembed.hook_in" if view.unembedding is not None else None,
    )
    known = view.model.hook_dict
    missing = [name for name in points.captured if name not in known]
    if missing:
        raise UnsupportedModelError(
            f"{view.description} has no hook point {missing[0]!r}"
            + (f" (nor {len(missing) - 1} others)" if len(missing) > 1 else "")
            + "; a frozen pass needs it (see tensorlens_tl.hooks.points)."
        )
    return points


def _block_points(view: ModelView, layer: int) -> BlockPoints:
    block, at = view.blocks[layer], f"blocks.{layer}."
    # each refuses what cannot be frozen, naming the block
    mlp, _, whitening = block.mlp, block.attention, block.whitening
    return BlockPoints(
        resid_pre=at + ("hook_resid_pre" if whitening is None else "whitening.hook_in"),
        whitened=None if whitening is None else at + "whitening.hook_out",
        pattern=at + "attn.hook_pattern",
        value=at + "attn.hook_v",
        z=at + "attn.hook_z",
        scales={name: f"{at}{name}.hook_scale" for name in block.norms},
        pre=at + "mlp.hook_pre" if mlp is not None else None,
        pre_linear=at + "mlp.hook_pre_linear" if mlp is not None and mlp.W_gate is not None else None,
        post=at + "mlp.hook_post" if mlp is not None else None,
    )
