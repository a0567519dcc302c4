"""What one forward pass leaves behind: activations by hook-point name, and the streams that they make up."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra.numerics import refuse_autocast
from tensorlens_tl.errors import (
    FrozenModelError,
    InvalidInputError,
    NumericalError,
    ResidualWarning,
    UnsupportedModelError,
)
from tensorlens_tl.hooks import ModelPoints, lock_of
from tensorlens_tl.models.layouts import Layout
from tensorlens_tl.models.lifecycle import WeightState, changed, configuration
from tensorlens_tl.models.protocol import HookedModel
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.held_scores import HeldScores
from tensorlens_tl.passes.inputs import Prompt

SumOfPass = TypeVar("SumOfPass")
"""A result with a `residual`: how far its parts are from the number that they explain."""


@dataclass(frozen=True, eq=False)
class HeldConfiguration:
    """A model's configuration as it was when a pass was frozen; it can be copied and pickled."""

    texts: Mapping[str, str]

    def __getstate__(self) -> dict[str, Any]:
        return {"texts": dict(self.texts)}


@dataclass(eq=False)
class Captured:
    """One forward pass as data.

    Attributes:
        view: the reading of the model's weights.
        points: the hook points it was captured at.
        prompt: tokens `[batch, pos]`, mask, keyword arguments and readable tokens.
        cache: the captured activations by hook-point name (listed in `tensorlens_tl.hooks.points`).
        weights: what the model's weights were, to tell whether they still are.
        other_hooks: the hook points and modules where other people's hooks were during the pass.
        hook_numbers: which hooks those were.
        configuration: what decided the model's numbers besides its weights
            (`tensorlens_tl.models.lifecycle.settings`).
        layouts: how each block is put together.
        errors: measured residual of each proof (largest relative error of any real token) by ``"blocks.0"`` …,
            ``"head"``, and ``"unembed"`` (of the tokens whose logits were compared: the last ones, and those asked
            about since).
        tolerance: the largest error a proof may show.
        held_scores: of a pass frozen with ``patterns="recompute"``, what each pattern is made from, by hook-point name.
        proved_positions: where blocks were proved, of a pass frozen with ``verify="sample"``; None for every position.
        strict: whether a sum that is further from its total than `allowed_residual` is an error instead of a warning.
    """

    view: ModelView
    points: ModelPoints
    prompt: Prompt
    cache: dict[str, Tensor]
    weights: WeightState
    other_hooks: list[str] = field(default_factory=list)
    hook_numbers: frozenset[int] = frozenset()
    configuration: "HeldConfiguration | None" = None
    layouts: list[Layout] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    tolerance: float = 1e-4
    logits_compared: Tensor | None = None
    held_scores: dict[str, HeldScores] = field(default_factory=dict)
    proved_positions: Int[Tensor, "batch query"] | None = None
    strict: bool = False

    # ------------------------------------------------------------------ the model and the prompt

    @property
    def model(self) -> HookedModel:
        """The model the pass was taken from; no hook is left on it."""
        return self.view.model

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments that reproduce this pass: ``model.run_with_hooks(**frozen.inputs, fwd_hooks=...)``."""
        return dict(self.prompt.kwargs)

    @property
    def tokens(self) -> Int[Tensor, "batch pos"]:
        """Token ids; of images and sound, position numbers."""
        return self.prompt.tokens

    @property
    def mask(self) -> Bool[Tensor, "batch pos"]:
        """True at real tokens."""
        return self.prompt.mask

    @property
    def str_tokens(self) -> list[list[str]]:
        """Readable tokens, one list per prompt."""
        return self.prompt.str_tokens

    @property
    def n_layers(self) -> int:
        """The number of blocks."""
        return self.view.n_layers

    def check_fresh(self) -> None:
        """Raise `FrozenModelError` if the model's weights or its configuration are no longer those of this pass.

        Weights that were changed, moved or cast, adapters that were switched, scaled or merged; also writes through
        ``.data``, unless they touch no more than lone numbers (see `WeightState`). Where another thread runs the model,
        or has given it other weights for a while, it is waited for. Inside ``torch.autocast``, whose products are not
        the pass's, it raises `InvalidInputError`.
        """
        refuse_autocast(self.view.device)
        with lock_of(self.view.model):
            same_weights = self.weights.holds(self.view.model)
            now = configuration(self.view.model)
        if not same_weights:
            raise FrozenModelError(
                "the model's weights were changed, moved or cast, or its adapters switched, after this pass was "
                "frozen, so the two no longer belong together. Freeze again (or leave the `with plan.applied():` that "
                "changed them)."
            )
        differences = [] if self.configuration is None else changed(self.configuration.texts, now)
        if differences:
            more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
            raise FrozenModelError(
                f"the model's configuration was changed after this pass was frozen ({'; '.join(differences[:3])}"
                f"{more}), so the two no longer belong together. Change it back, or freeze again."
            )

    def provenance(self) -> dict[str, str]:
        """What results depend on besides the prompt: the model's provenance, other people's hooks where any are, and
        that the proof was of sampled positions where it was."""
        sampled = {} if self.proved_positions is None else {"proof": self.proof_scope}
        return self.view.provenance() | ({"hooks": ", ".join(self.other_hooks)} if self.other_hooks else {}) | sampled

    @property
    def allowed_residual(self) -> float:
        """The largest residual that a sum may show: the tolerance of a block, or what all blocks together miss by."""
        outputs = [error for name, error in self.errors.items() if not name.endswith(".writes")]
        return max(self.tolerance, sum(outputs))

    def checked(self, result: SumOfPass) -> SumOfPass:
        """A sum made from this pass, after a look at its residual.

        Warns (`ResidualWarning`) where that is above `allowed_residual`.

        Raises:
            NumericalError: instead of the warning, if the pass was frozen with ``strict=True``.
        """
        checked: Any = result
        residual = float(torch.as_tensor(checked.residual).max())
        if residual <= self.allowed_residual:
            return result
        message = (
            f"{type(result).__name__}: its parts miss the model's own number by {residual:.1e} of their size, and the "
            f"proof of this pass allows {self.allowed_residual:.1e}. They are not what the model does: load the model "
            "in a wider dtype, or look for what was changed on it (frozen.other_hooks)."
        )
        if self.strict:
            raise NumericalError(message)
        warnings.warn(message, ResidualWarning, stacklevel=3)
        return result

    @property
    def proof_scope(self) -> str:
        """The positions that blocks were proved at, in words."""
        if self.proved_positions is None:
            return "every position"
        return "sampled positions of each prompt"

    # ------------------------------------------------------------------ activations

    def captured(self, name: str) -> Tensor:
        """The activation kept at one hook point, on the prompt's device, with batch and position apart."""
        if name not in self.cache and name in self.held_scores:
            held = self.held_scores[name]
            return held.attention(held.sums.dtype).pattern
        tensor = self.cache[name].to(self.tokens.device)
        # OPT flattens batch and position inside its MLP, and experts are called with them flattened.
        return tensor if tensor.ndim > 2 else tensor.reshape(len(self.tokens), -1, tensor.shape[-1])

    @property
    def sides(self) -> tuple[int, int] | None:
        """How many positions are an encoder's and a decoder's, in this order; None where there is one stack."""
        if not self.view.is_encoder_decoder:
            return None
        encoder = self.prompt.encoder_length
        return encoder, self.tokens.shape[1] - encoder

    def side(self, layer: int) -> tuple[int, int]:
        """The positions that a block acts on: the first, and the one after the last."""
        if self.sides is None:
            return 0, self.tokens.shape[1]
        encoder, decoder = self.sides
        return (0, encoder) if layer < self.view.encoder_layers else (encoder, encoder + decoder)

    def span(self, name: str) -> slice:
        """The positions that an activation is of: all of them, or one side of an encoder–decoder."""
        encoder = self.prompt.encoder_length
        return slice(0, encoder) if encoder and name.startswith("encoder") else slice(encoder, self.tokens.shape[1])

    def output_name(self, layer: int) -> str:
        """The hook point that holds a block's output."""
        blocks = self.points.blocks
        if self.points.encoder_output is not None and layer + 1 == self.view.encoder_layers:
            return self.points.encoder_output
        return blocks[layer + 1].resid_pre if layer + 1 < len(blocks) else self.points.last_output

    def resid_pre(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream entering a block; ``layer == n_layers`` is the last block's output.

        Raises:
            InvalidInputError: no such layer.
        """
        layer = whole_number("layer", layer, 0, self.n_layers, why="a layer, or their number for the last one's output")
        if self.sides is not None:
            return torch.cat([self.captured(name) for name in self.stream_names(layer)], dim=1)
        return self.captured(self.points.blocks[0].resid_pre if layer == 0 else self.output_name(layer - 1))

    def stream_names(self, layer: int) -> list[str]:
        """The hook points that together hold what `resid_pre` gives."""
        if self.sides is None:
            return [self.points.blocks[0].resid_pre if layer == 0 else self.output_name(layer - 1)]
        first = self.view.encoder_layers
        blocks = self.points.blocks
        output = self.points.encoder_output
        assert output is not None
        encoder = blocks[layer].resid_pre if layer < first else output
        decoder = blocks[max(layer, first)].resid_pre if layer < self.n_layers else self.points.last_output
        return [encoder, decoder]

    def resid_read(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream that a block's norms, attention and MLP read: `resid_pre`, whitened where it is."""
        x = self.resid_pre(layer)
        blocks = self.points.blocks
        name = blocks[layer].whitened if layer < len(blocks) else None
        return x if name is None else self.captured(name)

    @property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """The model's own output that the operator reproduces: after the final norm, or the last block's output."""
        return self.beside_encoder(self.captured(self.points.output))

    def beside_encoder(self, decoder: Tensor) -> Tensor:
        """Beside what an encoder–decoder's decoder gives, its encoder's output."""
        if self.points.encoder_output is None:
            return decoder
        return torch.cat([self.captured(self.points.encoder_output), decoder], dim=1)

    def unembedded(self) -> Float[Tensor, "batch pos d_model"]:
        """The stream that the model itself unembeds: after the final norm, or a masked model's prediction head."""
        if self.points.unembed_in is None:
            raise UnsupportedModelError(f"{self.view.description} predicts no tokens.")
        own = self.beside_encoder(self.captured(self.points.unembed_in))
        return own if self.view.class_head is None else own.expand(-1, self.tokens.shape[1], -1)

    def pattern(self, layer: int) -> Float[Tensor, "batch head query key"]:
        """The attention probabilities of one layer; of an encoder–decoder's, between the positions of its own side.

        Raises:
            InvalidInputError: no such layer.
            UnsupportedModelError: a layer without attention.
        """
        layer = whole_number("layer", layer, 0, self.n_layers - 1, why="a layer of this model")
        name = self.points.blocks[layer].pattern
        if name is None:
            self.view.blocks[layer].require_attention()
            raise AssertionError(layer)
        return self.captured(name)

    def pattern_rows(self, layer: int, length: int) -> Float[Tensor, "batch head query key"]:
        """The pattern's rows of the first queries, and no more of it where it is recomputed."""
        name = self.points.blocks[layer].pattern
        if name is None or name in self.cache or name not in self.held_scores:
            return self.pattern(layer)[:, :, :length]
        held = self.held_scores[name]
        batch, pos = self.tokens.shape
        at = torch.arange(min(length, pos), device=held.queries.device)
        rows = held.rows(at.expand(batch, -1), held.sums.dtype)
        return torch.nn.functional.pad(rows, (0, pos - rows.shape[-1]))

    def cross_pattern(self, layer: int) -> Float[Tensor, "batch head decoder encoder"]:
        """The probabilities by which a decoder block of an encoder–decoder attends to the encoder's positions.

        Args:
            layer: counted with the encoder's blocks, which come first.

        Raises:
            InvalidInputError: no such layer, or one without cross-attention.
        """
        layer = whole_number("layer", layer, 0, self.n_layers - 1, why="a layer of this model")
        points = self.points.blocks[layer].cross
        first = self.view.encoder_layers
        if points is None:
            some = f"layers {first} to {self.n_layers - 1} have" if self.view.is_encoder_decoder else "no layer has"
            raise InvalidInputError(f"layer={layer} has no cross-attention; of this model {some}.")
        return self.captured(points.pattern)

    @cached_property
    def causal(self) -> bool:
        """Whether no layer attends forwards."""
        return self.sides is None and not any(
            self._looks_ahead(points.pattern) for points in self.points.blocks if points.pattern is not None
        )

    def _looks_ahead(self, pattern: str) -> bool:
        """Whether a pattern has weight on later tokens; one that is recomputed says so without being made."""
        if pattern not in self.cache and pattern in self.held_scores:
            return self.held_scores[pattern].ahead != 0
        return bool(self.captured(pattern).triu(1).any())
