"""What a classifier of text, booted as a model whose logits are its classes, knows besides its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

ATTRIBUTE = "tensorlens_classes"
"""What `Classes` are called in the Hugging Face model that a Bridge wraps."""


@dataclass(frozen=True)
class Classes:
    """The classes that take the place of tokens in a model's logits.

    Attributes:
        classifier: transformers' class of the classifier.
        labels: their names.
        at_first: whether they are read at a prompt's first token ([CLS]); else at its last, or at any.
        exclude: whether answers exclude each other, so that the first choice is compared with the runner-up.
        padding: the token that a prompt must not end in: the classifier reads the last token that is another.
        renamed: the checkpoint's name of each module of the head.
    """

    classifier: str
    labels: Mapping[int, str]
    at_first: bool
    exclude: bool
    padding: int | None = None
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])

    def name_of(self, weight: str) -> str:
        """A weight of the wrapped model by the name that the checkpoint has for it."""
        module, _, name = weight.rpartition(".")
        return f"{self.renamed[module]}.{name}" if module in self.renamed else weight


class ClassScores(nn.Module):
    """The head of an encoder's classifier, at every position: ``φ(x·W + b)`` where there is a pooler, then linear.

    `seq_relationship` is the linear layer: TransformerLens looks for this name, and takes it as the unembedding.
    """

    def __init__(self, dense: nn.Module | None, act: nn.Module | None, linear: nn.Module):
        super().__init__()
        self.dense = dense
        self.act = act
        self.seq_relationship = linear

    def forward(self, hidden: Tensor) -> Tensor:
        """The logits of the classes, `[batch, pos, class]`."""
        if self.dense is not None and self.act is not None:
            hidden = self.act(self.dense(hidden))
        return self.seq_relationship(hidden)


def name_classes(language: Any, classes: Classes) -> None:
    """Say what the logits of a Hugging Face model are, before a Bridge wraps it."""
    setattr(language, ATTRIBUTE, classes)


def classes_of(model: Any) -> Classes | None:
    """The classes of a model that `load_classifier` booted; None of any other."""
    return getattr(getattr(model, "original_model", None), ATTRIBUTE, None)


def class_scores(model: Any) -> ClassScores | None:
    """The head of an encoder's classifier that a Bridge holds, where it has a pooler."""
    head = getattr(getattr(model, "original_model", None), "cls", None)
    return head if isinstance(head, ClassScores) and head.dense is not None else None
