"""How is a model copied that has run?"""

import copy
from typing import Any, TypeVar

import torch

from tensorlens_tl.models.parameters import whole

Model = TypeVar("Model")


def copied(model: Model) -> Model:
    """A deep copy of a model, whatever it has run.

    Modules keep tensors of their last run (the attention of a Bridge of GPT-2 its patterns), which have a gradient's
    history that torch refuses to copy; the copy has them without.

    Raises:
        TypeError, RuntimeError, AttributeError: a part of the model cannot be copied.

    >>> from tensorlens_tl.models.lifecycle import copied
    >>> bridge = tlens.load_demo_model(kind="bridge")
    >>> logits = bridge(text)
    >>> torch.equal(copied(bridge)(text), logits)
    True
    """
    without_history: dict[int, Any] = {}
    module: Any = model
    for part in whole(module):
        for value in vars(part).values():
            for tensor in _tensors(value):
                if not tensor.is_leaf:
                    without_history[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(model, without_history)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in an attribute, also in lists, tuples and tables of them."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
