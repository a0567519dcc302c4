"""A stretch of generated text as what a perturbation test is about."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tensorlens_tl.generation import FrozenGeneration, Span, freeze_generation
from tensorlens_tl.models import ModelLike, TokenLike
from tensorlens_tl.passes.inputs import InputLike, Prompt


@dataclass(frozen=True, eq=False)
class GeneratedStretch:
    """Some tokens of the text that stands after each prompt.

    Attributes:
        written: prompts and continuations.
        queries: the positions that predict the tokens; of padding where a prompt has fewer of them.
    """

    written: FrozenGeneration
    queries: Int[Tensor, "prompt query"]

    @classmethod
    def of(cls, model: ModelLike, prompts: InputLike, span: Span = None, **writing: Any) -> "GeneratedStretch":
        """A stretch of what a model writes or is given.

        Args:
            model: a causal language model.
            prompts: strings or token ids.
            span: as for `tlens.attribute_generation`; None is everything that was generated.
            writing: `max_new_tokens` or `continuation`, and `prepend_bos`.

        Raises:
            InvalidInputError, UnsupportedModelError: see `tlens.attribute_generation`.
        """
        written = freeze_generation(model, prompts, **writing)
        return cls(written, written.queries("all" if span is None else span))

    @property
    def prompt(self) -> Prompt:
        """The whole texts."""
        return self.written.frozen.prompt

    def in_words(self, minus: TokenLike) -> str:
        """What is explained."""
        return self.written.label(self.queries, "all", minus)
