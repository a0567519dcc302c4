"""Which parts a block has, and what it calls them: read from its modules' names, without any weights."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tensorlens_tl.models.names import ATTENTION, ENTRY_NORM, MIXERS, MLPS
from tensorlens_tl.models.parameters import innermost, is_bridge_component, is_norm
from tensorlens_tl.models.sublayers import is_attention, is_mlp


@dataclass(frozen=True, eq=False)
class BlockParts:
    """The parts of one block.

    Attributes:
        module: the block.
    """

    module: Any

    def _has_any(self, names: Iterable[str]) -> bool:
        return any(name in self.module._modules for name in names)

    def _first_of(self, names: Iterable[str], default: str) -> str:
        """The first of some names under which the block has a part."""
        return next((name for name in names if self.module._modules.get(name) is not None), default)

    @property
    def mixer_name(self) -> str:
        """What the block calls its self-attention, or what it has instead."""
        return next((name for name in (*ATTENTION, *MIXERS) if name in self.module._modules), "attn")

    @property
    def mixer(self) -> Any:
        """Its self-attention, or what it has instead; None without."""
        return getattr(self.module, self.mixer_name, None)

    @property
    def has_attention(self) -> bool:
        """Whether it has self-attention."""
        return self._has_any(ATTENTION) or self._named_as_mixer(is_attention) is not None

    @property
    def mixers(self) -> dict[str, Any]:
        """What it has under a mixer's name that is neither attention nor an MLP."""
        parts = {name: part for name in MIXERS if (part := self.module._modules.get(name)) is not None}
        return {name: part for name, part in parts.items() if not is_attention(part) and not is_mlp(part)}

    def _named_as_mixer(self, kind: Callable[[Any], bool]) -> str | None:
        """The name of a mixer under which it has attention, or an MLP (NemotronH); None where it has none there."""
        return next((name for name in MIXERS if kind(self.module._modules.get(name))), None)

    @property
    def is_merged(self) -> bool:
        """Whether its self-attention attends to the encoder's output as well, in the same softmax (T5Gemma 2)."""
        return getattr(self.mixer, "hook_cross_pattern", None) is not None

    @property
    def cross_name(self) -> str:
        """What a decoder block calls its cross-attention."""
        return self.mixer_name if self.is_merged else "cross_attn"

    @property
    def has_beside(self) -> bool:
        """Whether a mixer stands beside attention."""
        return self.has_attention and bool(self.mixers)

    @property
    def beside_name(self) -> str:
        """What the block calls the mixer that stands beside its attention."""
        return next(iter(self.mixers), MIXERS[0])

    @property
    def missing_mixer(self) -> str:
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

    @property
    def entry_norm(self) -> str | None:
        """What the first block calls a norm that the embeddings go through inside it; None without."""
        return ENTRY_NORM if is_norm(self.module._modules.get(ENTRY_NORM)) else None

    @property
    def mlp_name(self) -> str:
        """What the block calls its MLP or its experts."""
        return self._first_of(MLPS, self._named_as_mixer(is_mlp) or "mlp")

    @property
    def is_mlp_alone(self) -> bool:
        """Whether it has an MLP or experts under a mixer's name, and nothing that mixes positions (NemotronH)."""
        return self.mlp_name in MIXERS

    @property
    def mlp(self) -> Any:
        """Its MLP or its experts; None without."""
        return getattr(self.module, self.mlp_name, None)

    @property
    def has_experts_beside(self) -> bool:
        """Whether experts stand beside its MLP, each with norms of its own (Gemma 4)."""
        return {"mlp", "experts"} <= set(self.module._modules)

    @property
    def shared_name(self) -> str | None:
        """What it calls an MLP for every token that stands beside its experts instead of among them; None without."""
        if self.has_experts_beside:
            return "mlp"
        shared = self._first_of([name for name in MLPS if name != self.mlp_name], "")
        return shared or None

    def multiplier(self, name: str) -> float:
        """A constant that stands beside the block's matrices (Granite, Falcon-H1), by its name; 1 without."""
        return float(getattr(innermost(self.module), name, 1.0))

    @property
    def is_multiplied(self) -> bool:
        """Whether the block, its mixer or its MLP has any such constant."""
        modules = [vars(innermost(part)) for part in (self.module, self.mixer, self.mlp) if part is not None]
        return any(
            name.endswith("_multiplier") and value != 1 for attributes in modules for name, value in attributes.items()
        )
