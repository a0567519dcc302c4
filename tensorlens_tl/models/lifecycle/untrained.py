"""Which parts of a model depend on weights that its checkpoint lacks: the head, or the hidden state itself?"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from tensorlens_tl.algebra.numerics import maybe
from tensorlens_tl.models.lifecycle.checkpoint import newly_initialised

HEAD_PARTS = ("mlm_head", "prediction_head", "classifier_ln", "unembed")
"""Which parts stand between the hidden state and the logits."""


@dataclass(frozen=True, eq=False)
class Untrained:
    """The weights that a model's checkpoint lacks (`tensorlens_tl.models.lifecycle.checkpoint`).

    They hold random numbers (or zeros and ones): what they compute is noise.

    Attributes:
        model: any TransformerLens model.
    """

    model: Any

    @cached_property
    def _weights(self) -> dict[str, nn.Parameter] | None:
        return newly_initialised(self.model)

    @property
    def names(self) -> tuple[str, ...] | None:
        """All of them, by Hugging Face's names; None where the model does not show it."""
        return maybe(tuple, self._weights)

    @property
    def head(self) -> tuple[str, ...]:
        """Those that stand between the hidden state and the logits."""
        parts: list[str] = [*HEAD_PARTS]
        if hasattr(self.model, "mlm_head"):
            parts.append("ln_final")
        return self._inside(parts)

    @property
    def stack(self) -> tuple[str, ...]:
        """Those that the hidden state itself depends on: of embeddings, blocks and the final norm."""
        parts = [name for name, _ in self.model.named_children() if name != "original_model"]
        head = self.head
        return tuple(name for name in self._inside(parts) if name not in head)

    def _inside(self, parts: Sequence[str]) -> tuple[str, ...]:
        modules = [getattr(self.model, part, None) for part in parts]
        inside = {id(weight) for module in modules if module is not None for weight in module.parameters()}
        return tuple(name for name, weight in (self._weights or {}).items() if id(weight) in inside)
