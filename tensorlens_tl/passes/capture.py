"""The data of one forward pass: activations by hook-point name, and the streams composed from them."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import nearest, whole_number
from tensorlens_tl.algebra import HeldScores, on_device
from tensorlens_tl.algebra.numerics import refuse_autocast, upcast
from tensorlens_tl.errors import FrozenModelError, InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, ModelPoints, StreamPoint, foreign_hooks, listed_once, lock_of, with_other_names
from tensorlens_tl.models import HookedModel, ModelView
from tensorlens_tl.models.lifecycle import WeightState, changed, configuration
from tensorlens_tl.passes.inputs import Prompt

_checked: ContextVar[dict[WeightState, Any] | None] = ContextVar("checked", default=None)
"""States of passes, by identity, that were compared with their model during the current call."""

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


@contextmanager
def one_check(model: HookedModel) -> Generator[None, None, None]:
    """Lock the model for this thread, and compare each capture with it at most once, while the context is open.

    It surrounds the steps of one public function, and may be nested. All passes of one model share the reading of its
    weights. At the end they are compared once more: every number if user-installed hooks are on the model, as these may
    write to weights while it runs, otherwise only torch's count of writes.

    Raises:
        FrozenModelError: at the end, if the weights of a compared pass have changed.
    """
    with listed_once(model):
        if _checked.get() is not None:
            yield
            return
        checked: dict[WeightState, Any] = {}
        token = _checked.set(checked)
        try:
            yield
            if not _still_held(checked):
                raise FrozenModelError(
                    "the model's weights were changed while this question was answered, by a hook or another thread, "
                    "so the results are not those of a single model. Remove the cause, freeze again, and repeat the "
                    "call."
                )
        finally:
            _checked.reset(token)


def note_fresh(weights: WeightState, model: HookedModel) -> None:
    """Skip further comparisons inside `one_check`: the weights were just taken from the model, or compared with it."""
    checked = _checked.get()
    if checked is not None:
        checked[weights] = model


def _still_held(checked: Mapping[WeightState, Any]) -> bool:
    """Return whether weights that were compared at the beginning are still the same."""
    distinct: dict[WeightState, Any] = {}
    for weights, model in checked.items():
        if not any(of is model and weights.equals(other) for other, of in distinct.items()):
            distinct[weights] = model
    return all(
        weights.holds(model) if foreign_hooks(model) else weights.seems_held(model)
        for weights, model in distinct.items()
    )


def one_question(function: Callable[Arguments, Answer]) -> Callable[Arguments, Answer]:
    """Run a function of passes inside `one_check`, if they share one model."""

    @wraps(function)
    def answered(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        views = [getattr(each, "view", None) for each in (*args, *kwargs.values())]
        models = {id(view.model): view.model for view in views if isinstance(view, ModelView)}
        if len(models) != 1:
            return function(*args, **kwargs)
        with one_check(*models.values()):
            return function(*args, **kwargs)

    return answered


@dataclass(frozen=True, eq=False)
class HeldConfiguration:
    """A model's configuration when a pass was frozen; it can be copied and pickled."""

    texts: Mapping[str, str]

    def __getstate__(self) -> dict[str, Any]:
        return {"texts": dict(self.texts)}


@dataclass(frozen=True, eq=False)
class Additions:
    """The vectors that user-installed hooks add to the residual stream.

    Attributes:
        constant: by hook point, additions that do not depend on the hook's input; for a patch, the new values minus the
            replaced ones.
        patched: the hook points where hooks replace entries of the stream.
        dependent: the hook points where hooks add something else that depends on their input.
    """

    constant: Mapping[StreamPoint, Float[Tensor, "batch pos d_model"]] = field(default_factory=dict)
    patched: tuple[StreamPoint, ...] = ()
    dependent: tuple[StreamPoint, ...] = ()

    def of(self, layer: int) -> dict[StreamPoint, Float[Tensor, "batch pos d_model"]]:
        """Return the constants of one block, in the order of the pass."""
        return {point: vectors for point, vectors in self.constant.items() if point.layer == layer}

    def at(self, index: Any) -> "Additions":
        """Return the additions at some positions, given an index of batch and position."""
        return replace(self, constant={point: vectors[index] for point, vectors in self.constant.items()})


@dataclass(frozen=True, eq=False)
class Capture:
    """The data of one forward pass; it does not run or verify anything.

    Attributes:
        view: the reader of the model's weights.
        points: the hook points of its activations.
        prompt: tokens `[batch, pos]`, mask, keyword arguments and readable tokens.
        activations: by hook-point name (listed in `tensorlens_tl.hooks.points`).
        held_scores: with ``patterns="recompute"``, the factors of each pattern, by hook-point name.
        weights: the state of the model's weights, to detect changes.
        configuration: the settings that determine the model's outputs besides its weights
            (`tensorlens_tl.models.lifecycle`).
        other_hooks: the hook points and modules that had user-installed hooks during the pass.
        hook_numbers: the numbers of those hooks.
        additions: the vectors that they added to the residual stream.
        entry_hooks: our own hooks that replace the tokens' embeddings, for baselines.
    """

    view: ModelView
    points: ModelPoints
    prompt: Prompt
    activations: Mapping[str, Tensor]
    weights: WeightState
    held_scores: Mapping[str, HeldScores] = field(default_factory=dict[str, HeldScores])
    configuration: HeldConfiguration | None = None
    other_hooks: tuple[str, ...] = ()
    hook_numbers: frozenset[int] = frozenset()
    additions: Additions = field(default_factory=Additions)
    entry_hooks: tuple[FwdHook, ...] = ()

    # ------------------------------------------------------------------ the model and the prompt

    @property
    def model(self) -> HookedModel:
        """The model that the pass was taken from; no hook is left on it."""
        return self.view.model

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments that reproduce this pass: ``model.run_with_hooks(**frozen.inputs, fwd_hooks=...)``."""
        return dict(self.prompt.kwargs)

    @property
    def tokens(self) -> Int[Tensor, "batch pos"]:
        """Token ids; for images and sound, position numbers."""
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
        """Raise `FrozenModelError` if the model's weights or configuration have changed since this pass.

        Weights may have been changed, moved or cast, also through ``.data`` (see `WeightState`), and adapters switched,
        scaled or merged. Weights that were changed and restored in place count as unchanged. It waits for another
        thread that runs the model or temporarily changes its weights. Inside ``torch.autocast``, whose products differ
        from the pass's, it raises `InvalidInputError`.
        """
        refuse_autocast(self.view.device)
        checked = _checked.get()
        if checked is not None and self.weights in checked:
            return
        with lock_of(self.view.model):
            same_weights = self._shares_a_check() or self.weights.holds(self.view.model)
            now = configuration(self.view.model)
        if not same_weights:
            raise FrozenModelError(
                "the model's weights were changed, moved or cast, or its adapters switched, after this pass was "
                "frozen, so the two no longer belong together. Freeze again; if a compression is applied "
                "(`with plan.applied():`), leave that first. To compare two states of one model, such as with and "
                "without an adapter, load it twice."
            )
        self._check_configuration(now)
        if any(block.halved != block.is_halving for block in self.view.blocks):
            raise FrozenModelError(
                "the model was switched between train and eval mode after this pass was frozen, and scales its stream "
                "and its weights differently in train mode. Switch it back, or freeze again."
            )
        self.note_fresh()

    def note_fresh(self) -> None:
        """Skip further comparisons of the pass with its model inside `one_check`: it was just taken or compared."""
        note_fresh(self.weights, self.view.model)

    def _shares_a_check(self) -> bool:
        """Whether another pass with the same weights was already compared with the model during this call."""
        model = self.view.model
        return any(of is model and self.weights.equals(weights) for weights, of in (_checked.get() or {}).items())

    def _check_configuration(self, now: Mapping[str, str]) -> None:
        if self.configuration is None:
            return
        differences = changed(self.configuration.texts, now)
        if not differences:
            return
        listed = "; ".join(differences[:3])
        if len(differences) > 3:
            listed += f" and {len(differences) - 3} more"
        raise FrozenModelError(
            f"the model's configuration was changed after this pass was frozen ({listed}), so the two no longer belong "
            "together. Change it back, or freeze again."
        )

    def provenance(self) -> dict[str, str]:
        """Return what results depend on besides the prompt: model provenance, a digest of the weights, user hooks.

        For weights on disk no numbers are stored, and there is no digest.
        """
        facts = dict(self.view.provenance())
        if self.weights.digest:
            facts["weights"] = self.weights.digest
        if self.other_hooks:
            facts["hooks"] = ", ".join(self.other_hooks)
        return facts

    def hooks_in(self, block: str = "") -> list[str]:
        """Return where user-installed hooks were, in one block or everywhere, with all names of their hook points."""
        inside = [name for name in self.other_hooks if not block or name.startswith(f"{block}.")]
        return with_other_names(self.model, inside)

    # ------------------------------------------------------------------ activations

    def activation(self, name: str) -> Tensor:
        """Return the activation at one hook point, on the prompt's device, with separate batch and position axes."""
        if name not in self.activations and name in self.held_scores:
            held = self.scores_behind(name)
            return held.attention(held.sums.dtype).pattern
        if name not in self.activations:
            stored = (*self.activations, *self.held_scores)
            raise InvalidInputError(
                f"activation: this pass stores none at {name!r}.{nearest(name, stored)} It stores what its maps need, "
                f"such as {', '.join(map(repr, stored[:3]))}; model.run_with_cache(text) returns every hook point."
            )
        tensor = self.activations[name].to(self.tokens.device)
        if tensor.ndim > 2:
            return tensor
        # OPT flattens batch and position inside its MLP, and experts are called with them flattened.
        return tensor.reshape(len(self.tokens), -1, tensor.shape[-1])

    def scores_behind(self, name: str) -> HeldScores:
        """Return the tensors from which a pattern is recomputed."""
        return self.held_scores[name].on(self.tokens.device)

    def on(self, device: torch.device) -> "Capture":
        """Return the same pass with activations on another device; blocks that run there need not move weights."""
        if device == self.tokens.device:
            return self
        prompt = replace(self.prompt, tokens=self.tokens.to(device), mask=self.mask.to(device))
        additions = on_device(self.additions, device)
        return replace(self, view=self.view.unmoved(device), prompt=prompt, additions=additions)

    def in_float32(self, layer: int) -> "Capture":
        """Return the same pass with one block's half-precision inputs and activations in float32."""
        inside = f"{self.view.blocks[layer].name}."
        streams = self.stream_names(layer)
        activations = {
            name: upcast(held) if name.startswith(inside) or name in streams else held
            for name, held in self.activations.items()
        }
        constant = {point: upcast(vectors) for point, vectors in self.additions.constant.items()}
        return replace(self, activations=activations, additions=replace(self.additions, constant=constant))

    @property
    def sides(self) -> tuple[int, int] | None:
        """The numbers of encoder and decoder positions, in this order; None if there is one stack."""
        if not self.view.is_encoder_decoder:
            return None
        encoder = self.prompt.encoder_length
        return encoder, self.tokens.shape[1] - encoder

    def side(self, layer: int) -> tuple[int, int]:
        """Return the positions that a block acts on: the first, and the one after the last."""
        if self.sides is None:
            return 0, self.tokens.shape[1]
        encoder, decoder = self.sides
        if layer < self.view.encoder_layers:
            return 0, encoder
        return encoder, encoder + decoder

    def span(self, name: str) -> slice:
        """Return the positions of an activation: all of them, or one side of an encoder–decoder."""
        encoder = self.prompt.encoder_length
        if encoder and name.startswith("encoder"):
            return slice(0, encoder)
        return slice(encoder, self.tokens.shape[1])

    def output_name(self, layer: int) -> str:
        """Return the hook point of a block's output."""
        blocks = self.points.blocks
        call_end = blocks[layer].call_end
        if call_end is not None:
            return call_end
        if self.points.encoder_output is not None and layer + 1 == self.view.encoder_layers:
            return self.points.encoder_output
        if layer + 1 == len(blocks):
            return self.points.last_output
        return blocks[layer + 1].resid_pre

    def resid_pre(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream entering a block; ``layer == n_layers`` is the last block's output.

        Raises:
            InvalidInputError: no such layer.
        """
        layer = whole_number("layer", layer, 0, self.n_layers, why="a layer, or their number for the last one's output")
        streams = [self.activation(name) for name in self.stream_names(layer)]
        return streams[0] if len(streams) == 1 else torch.cat(streams, dim=1)

    def resid_post(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """Return a block's output: the next one's input, except at the end of a stack that runs in a loop."""
        if self.view.loop is None:
            return self.resid_pre(layer + 1)
        return self.activation(self.output_name(layer))

    def stream_names(self, layer: int) -> list[str]:
        """Return the hook points that together hold `resid_pre`."""
        blocks = self.points.blocks
        first = self.view.encoder_layers
        if self.view.loop is not None and layer < self.n_layers:
            return [blocks[layer].resid_pre]
        if self.sides is None and layer > 0:
            return [self.output_name(layer - 1)]
        if self.sides is None:
            return [blocks[0].resid_pre]
        if layer < first:
            return [blocks[layer].resid_pre, blocks[first].resid_pre]
        assert self.points.encoder_output is not None
        decoder = self.points.last_output if layer == self.n_layers else blocks[layer].resid_pre
        return [self.points.encoder_output, decoder]

    def resid_read(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream that a block's norms, attention and MLP read: `resid_pre`, after any whitening."""
        x = self.resid_pre(layer)
        if layer == self.n_layers:
            return x
        name = self.points.blocks[layer].whitened
        return x if name is None else self.activation(name)

    @property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """The model's own output, which the operator reproduces: after the final norm, or the last block's output."""
        return self.beside_encoder(self.activation(self.points.output))

    def beside_encoder(self, decoder: Tensor) -> Tensor:
        """Return a result of the decoder preceded by the encoder's output; with a single stack, just the result."""
        if self.points.encoder_output is None:
            return decoder
        return torch.cat([self.activation(self.points.encoder_output), decoder], dim=1)

    def unembedded(self) -> Float[Tensor, "batch pos d_model"]:
        """Return the stream that the model unembeds: after the final norm, or a masked model's prediction head."""
        if self.points.unembed_in is None:
            raise UnsupportedModelError(f"{self.view.description} predicts no tokens.")
        states = self.beside_encoder(self.activation(self.points.unembed_in))
        if self.view.class_head is None:
            return states
        return states.expand(-1, self.tokens.shape[1], -1)

    def pattern(self, layer: int) -> Float[Tensor, "batch head query key"]:
        """Return one layer's attention pattern; in an encoder–decoder, between the positions of the layer's own side.

        Raises:
            InvalidInputError: no such layer.
            UnsupportedModelError: the layer has no attention.
        """
        layer = whole_number("layer", layer, 0, self.n_layers - 1, why="a layer of this model")
        name = self.points.blocks[layer].pattern
        if name is None:
            self.view.blocks[layer].require_attention()
            raise AssertionError(layer)
        return self.activation(name)

    def pattern_rows(self, layer: int, length: int) -> Float[Tensor, "batch head query key"]:
        """Return the pattern's rows for the first queries; if it is recomputed, only those."""
        name = self.points.blocks[layer].pattern
        if name is None or name in self.activations or name not in self.held_scores:
            return self.pattern(layer)[:, :, :length]
        held = self.scores_behind(name)
        batch, pos = self.tokens.shape
        at = torch.arange(min(length, pos), device=held.queries.device)
        rows = held.rows(at.expand(batch, -1), held.sums.dtype)
        return torch.nn.functional.pad(rows, (0, pos - rows.shape[-1]))

    def cross_pattern(self, layer: int) -> Float[Tensor, "batch head decoder encoder"]:
        """Return the pattern with which a decoder block of an encoder–decoder attends to the encoder's positions.

        Args:
            layer: the number of the block, counting the encoder's blocks first.

        Raises:
            InvalidInputError: no such layer, or one without cross-attention.
        """
        layer = whole_number("layer", layer, 0, self.n_layers - 1, why="a layer of this model")
        points = self.points.blocks[layer].cross
        if points is None:
            layers = self.view.crossing_layers()
            raise InvalidInputError(f"layer={layer} has no cross-attention; of this model {layers}.")
        return self.activation(points.pattern)

    @cached_property
    def causal(self) -> bool:
        """Whether no layer attends to later positions."""
        return self.sides is None and not any(
            self._looks_ahead(points.pattern) for points in self.points.blocks if points.pattern is not None
        )

    def is_causal_at(self, layer: int) -> bool:
        """Return whether a block's self-attention is causal, as in a decoder."""
        if self.sides is None:
            return self.causal
        return layer >= self.view.encoder_layers

    @property
    def real_tokens_look_ahead(self) -> bool:
        """Whether a real token attends to a later one; left padding may, as all its keys are masked."""
        if self.causal:
            return False
        patterns = (
            self.pattern(layer) for layer, points in enumerate(self.points.blocks) if points.pattern is not None
        )
        return any(looks_ahead(pattern, self.mask) for pattern in patterns)

    def _looks_ahead(self, pattern: str) -> bool:
        """Whether a pattern has weight on later tokens; for a recomputed one, given by the reach of its keys."""
        if pattern not in self.activations and pattern in self.held_scores:
            return self.held_scores[pattern].ahead != 0
        return looks_ahead(self.activation(pattern))

    # ------------------------------------------------------------------ parts of the pass

    def cut(self, length: int) -> "Capture":
        """Return the first tokens of a causal pass."""
        patterns = {block.pattern for block in self.points.blocks}
        activations: dict[str, Tensor] = {}
        for name in self.points.captured:
            if name in patterns and name not in self.held_scores:
                activations[name] = self.activation(name)[:, :, :length, :length]
            elif name not in patterns:
                activations[name] = self.activation(name)[:, :length]
        prompt = replace(
            self.prompt,
            tokens=self.tokens[:, :length],
            mask=self.mask[:, :length],
            str_tokens=[row[:length] for row in self.str_tokens],
            kwargs={},
            word_starts=None,
        )
        held_scores = {name: held.cut(length) for name, held in self.held_scores.items()}
        additions = self.additions.at(_first(length))
        return replace(self, prompt=prompt, activations=activations, held_scores=held_scores, additions=additions)

    def block_at_start(self, layer: int, length: int = 8) -> "Capture":
        """Return one block, restricted to its first tokens if these do not look ahead; else the whole capture."""
        mask = self.mask[:, :length]
        pattern = self.points.blocks[layer].pattern
        if self.sides is not None or not bool(mask.any(1).all()):
            return self
        names = {*self.points.blocks[layer].captured, self.output_name(layer)} - {pattern}
        activations = {name: self.activation(name)[:, :length] for name in names}
        if pattern is not None:
            rows = self.pattern_rows(layer, length)
            if bool(rows[..., length:].any()):
                return self
            activations[pattern] = rows[..., :length]
        prompt = Prompt(self.tokens[:, :length], mask, {}, [])
        additions = self.additions.at(_first(length))
        return replace(self, prompt=prompt, activations=activations, held_scores={}, additions=additions)

    def block_at(self, layer: int, positions: Int[Tensor, "batch query"]) -> "Capture":
        """Return one block at some positions, without its pattern."""
        points = self.points.blocks[layer]
        index = torch.arange(len(positions), device=positions.device)[:, None], positions
        names = {*points.captured, self.output_name(layer)} - {points.pattern}
        activations: dict[str, Tensor] = {}
        for name in names:
            tensor = self.activation(name)
            activations[name] = tensor.expand(*self.tokens.shape, *tensor.shape[2:])[index]
        prompt = Prompt(self.tokens[index], self.mask[index], {}, [])
        additions = self.additions.at(index)
        return replace(self, prompt=prompt, activations=activations, held_scores={}, additions=additions)


def looks_ahead(
    pattern: Float[Tensor, "batch head query key"], mask: Bool[Tensor, "batch query"] | None = None
) -> bool:
    """Return whether any query, or any real one, has weight on a later key, checking some queries at a time."""
    for start in range(0, pattern.shape[-2], 128):
        at = slice(start, start + 128)
        ahead = pattern[..., at, start:].triu(1) != 0
        if mask is not None:
            ahead &= mask[:, None, at, None]
        if bool(ahead.any()):
            return True
    return False


def _first(length: int) -> tuple[slice, slice]:
    """Return an index of the first positions of every prompt."""
    return slice(None), slice(length)
