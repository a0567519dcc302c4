"""How a model's blocks follow each other: in one stack, in an encoder's and a decoder's, or in a loop of two."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.blocks import BlockView
from tensorlens_tl.models.loops import Loop, is_looped
from tensorlens_tl.models.names import LOOPS

STACKS = ("encoder_blocks", "decoder_blocks")
HOOKED_STACKS = ("encoder", "decoder")
"""What an encoder–decoder calls its blocks: a Bridge, and a HookedEncoderDecoder."""


@dataclass(frozen=True, eq=False)
class Structure:
    """How the blocks of a model follow each other, and what is refused of it therefore.

    Attributes:
        description: class and name of the model, for messages.
        is_encoder_decoder: whether there are an encoder's blocks and a decoder's.
        loop: the calls of two stacks that run several times each; None of any other model.
        blocks: in the order in which they run.
    """

    description: str
    is_encoder_decoder: bool
    loop: Loop | None
    blocks: Sequence[BlockView]

    def refuse_encoder_decoder(self, what: str) -> None:
        """Refuse an encoder–decoder or a loop, where something reads blocks as those of one stack."""
        self.refuse_loop(what)
        if self.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{what}: not read of an encoder–decoder yet, whose blocks are of two stacks ({self.description}). The "
                "operator, every method of attribution, the circuits logit_attribution, total_effects, head_map, "
                "paths, contribution_graph, patch_scores, edge_scores, qk_attribution and routes, and ov, qk, "
                "virtual_head and composition_scores take it."
            )

    def crossing_layers(self) -> str:
        """Which layers have cross-attention, in words."""
        crossing = [layer for layer, block in enumerate(self.blocks) if block.cross_attention is not None]
        if not crossing:
            return "no layer has"
        if len(crossing) == 1:
            return f"only layer {crossing[0]} has"
        return f"layers {crossing[0]} to {crossing[-1]} have"

    def refuse_loop(self, what: str) -> None:
        """Refuse blocks that run in a loop, where something reads them as a chain."""
        if self.loop is not None:
            raise UnsupportedModelError(
                f"{what}: not read of a model whose blocks run in a loop ({self.description}): {' and '.join(LOOPS)} "
                "each have a state, and a block reads the sum of both. The operator and method='tensorlens' take it."
            )

    def refuse_shared_values(self, what: str) -> None:
        """Refuse a block whose attention takes keys and values of an earlier one, naming both."""
        for block in self.blocks:
            if block.values_layer is not None:
                raise UnsupportedModelError(
                    f"{what}: {block.name} of this {self.description} takes keys and values of block "
                    f"{block.values_layer} (shared keys and values), so that what it writes depends on the stream "
                    "there as well: no map of one block's stream is all of it. The operator, method='tensorlens' and "
                    "gradients take both streams and are exact."
                )

    def refuse_gradients(self, what: str) -> None:
        """Refuse a loop of which the live model runs some calls without recording gradients."""
        if self.loop is None or not self.loop.without_gradients:
            return
        slow, fast = (sum(call.stack == stack for call in self.loop.calls) for stack in LOOPS)
        raise UnsupportedModelError(
            f"{what}: {self.description} runs {self.loop.without_gradients} of its {len(self.loop.calls)} calls of "
            "a stack without recording gradients (config.L_bp_cycles), so that those of the live model lack what "
            f"passes through them. method='tensorlens' has all of it; or load the model with L_bp_cycles="
            f"{[fast // slow] * slow}."
        )


def stacks_of(model: Any) -> tuple[str, ...]:
    """What a model calls its lists of blocks.

    Raises:
        UnsupportedModelError: it is none of TransformerLens' classes.
    """
    stacks = _stack_names(model)
    for needed in ("cfg", *stacks, "hook_dict", "run_with_hooks"):
        # the class comes first: a Bridge puts its hook_dict together anew whenever it is read
        if not hasattr(type(model), needed) and not hasattr(model, needed):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no `{needed}`: pass a HookedTransformer, a HookedEncoder, a "
                "HookedEncoderDecoder or a TransformerBridge." + _hint(model)
            )
    return stacks


def _stack_names(model: Any) -> tuple[str, ...]:
    if is_looped(model):
        return LOOPS
    if _has_hooked_stacks(model):
        return HOOKED_STACKS
    return STACKS if all(hasattr(model, stack) for stack in STACKS) else ("blocks",)


def _has_hooked_stacks(model: Any) -> bool:
    """Whether it is one of TransformerLens' own encoder–decoders, which are no Bridge (up to 3.9)."""
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
