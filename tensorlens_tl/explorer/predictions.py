"""What a model says after a prompt, by one run of it: before a pass is frozen, and of two prompts of any lengths."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.hooks import (
    hook_numbers,
    lock_of,
    model_points,
    refuse_attached,
    states_and_logits,
    unheld_run,
)
from tensorlens_tl.models import ModelView
from tensorlens_tl.models.lifecycle import WeightState, configuration, refuse_devices, refuse_dropout
from tensorlens_tl.passes import note_fresh
from tensorlens_tl.passes.inputs import Prompt, Query, prepare, query_positions

MOST_LOGITS = 2**22
"""Up to so many logits of a prompt are computed at once, so that another position takes no run."""


class Predictor:
    """A model as it is now: it reads prompts, and says what follows them.

    Args:
        model: of either class of TransformerLens.

    Attributes:
        view: the model, read.

    >>> from tensorlens_tl.explorer.predictions import Predictor
    >>> predictor = Predictor(model)
    >>> predictor.logits(predictor.prompt(text), [0, -1]).shape
    torch.Size([2, 2048])
    """

    def __init__(self, model: Any) -> None:
        self.view = ModelView(model)
        with lock_of(model):
            self._weights = WeightState.of(model)
            self._configuration = configuration(model)
            self._hooks = hook_numbers(model)
        self._unembed_in: str | None = None

    def is_current(self) -> bool:
        """Whether the model's weights, its configuration and the hooks on it still are what they were.

        Inside `one_check`, passes that had the same weights are then not compared with the model again.
        """
        model = self.view.model
        with lock_of(model):
            if not self._weights.holds(model):
                return False
            note_fresh(self._weights, model)
            return configuration(model) == self._configuration and hook_numbers(model) == self._hooks

    def prompt(self, input: Any) -> Prompt:
        """The tokens of an input, or the patches of an image; nothing is run.

        Raises:
            InvalidInputError: what `freeze` refuses of an input.
        """
        return prepare(self.view, input)

    def has_few_logits(self, prompt: Prompt) -> bool:
        """Whether the logits of every position fit into `MOST_LOGITS`; not of a model that has one for all of them."""
        unembedding = self.view.unembedding
        if unembedding is None or prompt.class_at is not None or prompt.encoder_length:
            return False
        return prompt.tokens.shape[1] * unembedding[0].shape[1] <= MOST_LOGITS

    def logits(self, prompt: Prompt, query: Query) -> Float[Tensor, "query d_vocab"] | None:
        """The model's logits at some positions, by one run; None of a model that has none.

        Raises:
            InvalidInputError: dropout is active, or parts of the model lie where no run reaches them.
            FrozenModelError: a frozen pass is attached.
        """
        view = self.view
        if view.unembedding is None:
            return None
        positions = prompt.in_logits(query_positions(prompt, query))
        with torch.inference_mode(False), torch.no_grad(), unheld_run(view.model):
            refuse_dropout(view.model)
            refuse_devices(view.model)
            refuse_attached(view.model)
            if self._unembed_in is None:
                self._unembed_in = model_points(view).unembed_in
            if self._unembed_in is None:
                return None
            _, logits = states_and_logits(view.model, prompt.kwargs, self._unembed_in, positions)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            return None
        return logits[0].detach()
