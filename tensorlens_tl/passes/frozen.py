"""A frozen pass: everything one forward pass leaves behind that makes the model an affine map.

From it come the `FrozenOperator` (the algebra, which reads weights) and `fwd_hooks` (the live model, held fixed): two
independent ways to the same numbers.
"""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import FrozenModelError
from tensorlens_tl.hooks import (
    FwdHook,
    attention_hooks,
    capture,
    is_attached,
    mlp_hooks,
    only_at,
    patterns_take_effect,
    refuse_attached,
    replace,
)
from tensorlens_tl.models.activations import check_rule
from tensorlens_tl.models.protocol import LayerRange
from tensorlens_tl.models.state import refuse_dropout
from tensorlens_tl.passes.operator import FrozenOperator
from tensorlens_tl.passes.prompts import query_positions
from tensorlens_tl.passes.proof import unembedding_error
from tensorlens_tl.passes.record import Record


@dataclass(eq=False)
class FrozenPass(Record):
    """One forward pass, held fixed. Made by `freeze`.

    What was captured and the maps of the model's parts are those of a `Record`; here are the operator, and the hooks
    that hold the live model.

    Attributes:
        model: the model the pass was taken from.
        view: the reading of its weights.
        prompt: tokens `[batch, pos]`, mask, keyword arguments and readable tokens.
        cache: the captured activations by hook-point name (listed in `tensorlens_tl.hooks.points`).
        other_hooks: the hook points where other people's hooks were during the pass.
        layouts: how each block is put together.
        errors: measured residual of each proof (largest relative error of any real token) by ``"blocks.0"`` …,
            ``"head"``, and ``"unembed"`` once a token target has asked for it.
        tolerance: the largest error a proof may show.
    """

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        worst = f"{max(self.errors.values()):.1e}" if self.errors else "not verified"
        hooks = f", other_hooks={len(self.other_hooks)}" if self.other_hooks else ""
        return (
            f"FrozenPass({self.view.description}, batch={batch}, pos={pos}, layers={self.n_layers}, "
            f"residual={worst}{hooks})"
        )

    def operator(
        self,
        *,
        layers: LayerRange = None,
        heads: Mapping[int, Collection[int]] | Any = None,
        mlp: bool | Collection[int] | Any = True,
        final_norm: bool = True,
        activation: str = "ratio",
    ) -> FrozenOperator:
        """The frozen pass as one affine map, from ``blocks.0`` input to the final norm's output (or the last block's).

        Args:
            layers: a contiguous range; one that ends at the last layer includes the final norm.
            heads: layer → heads to keep. Unnamed layers keep all. A dropped head drops its b_V share; b_O stays.
            mlp: False leaves every MLP out, a collection of layers keeps only theirs.
            final_norm: False ends at the last block's output.
            activation: `"ratio"`, `"ig"`, `"split"` or `"tangent"` (see `tensorlens_tl.models.activations`).

        Raises:
            InvalidInputError: a layer or head out of range, a gap in the layers, or no such rule.
        """
        return FrozenOperator.of(
            self, layers=layers, heads=heads, mlp=mlp, final_norm=final_norm, activation=activation
        )

    # ------------------------------------------------------------------ the live model, held

    @cached_property
    def _patterns_take_effect(self) -> list[bool]:
        short = {"input": self.tokens[:1, :2]}
        return patterns_take_effect(self.model, short, self.points.blocks)

    def fwd_hooks(
        self,
        patterns: bool = True,
        activations: bool = True,
        norms: bool = True,
        activation: str = "ratio",
    ) -> list[FwdHook]:
        """TransformerLens hooks that hold this pass's patterns, activation ratios and norm scales fixed.

        They fit inputs of the same length and batch; a pass of one prompt fits any batch. Put your own hooks
        after them: these replace whatever an earlier one wrote at a pattern, an activation or a scale. A masked
        language model's prediction head has no hook between its linear map and its activation: it stays live.

        Raises:
            InvalidInputError: no such rule.
            InvalidInputError: the model was put in train mode since, and drops activations there.
            FrozenModelError: the weights changed since the pass, or another frozen pass is attached.
        """
        check_rule(activation)
        self.check_fresh()
        refuse_dropout(self.view.model)
        refuse_attached(self.model)
        hooks: list[FwdHook] = []
        for layer, points in enumerate(self.points.blocks):
            if patterns:
                hooks += attention_hooks(points, self.pattern(layer), self._patterns_take_effect[layer])
            if norms:
                hooks += [replace(name, self.captured(name)) for name in points.scales.values()]
            held = self.mlp_coefficients(layer, activation) if activations else None
            weights = self.view.blocks[layer].mlp
            if held is not None and weights is not None:
                hooks += mlp_hooks(points, held, weights.b_post)
        if norms and self.points.final_scale is not None:
            hooks.append(replace(self.points.final_scale, self.captured(self.points.final_scale)))
        return hooks

    @contextmanager
    def attached(self, **options: Any) -> Generator[Any, None, None]:
        """``with frozen.attached(): ...`` runs the frozen model; takes the options of `fwd_hooks`.

        Only these hooks are removed at the end, also after an exception.

        Raises:
            FrozenModelError: the hooks were taken off inside, as ``model.reset_hooks()`` does.
        """
        with self.model.hooks(fwd_hooks=self.fwd_hooks(**options)):
            yield self.model
            if not is_attached(self.model):
                raise FrozenModelError(
                    "the hooks of this frozen pass were removed inside `with frozen.attached():` (by "
                    "model.reset_hooks()?), so the model ran unfrozen since."
                )

    # ------------------------------------------------------------------ logits

    @cached_property
    def last_logits(self) -> Float[Tensor, "batch d_vocab"] | None:
        """The model's own logits at each row's last real token, by running it once more; None where it gives none."""
        if self.view.unembedding is None or self.points.unembed_in is None:
            return None
        logits = self.logits(-1)
        return None if logits is None else logits[:, 0]

    def logits(self, query: Any = -1) -> Float[Tensor, "batch query d_vocab"] | None:
        """The model's own logits at some positions, by running it once more; None where it gives none.

        Args:
            query: see `tensorlens_tl.passes.prompts.query_positions`.
        """
        self.check_fresh()
        refuse_dropout(self.view.model)
        if self.view.unembedding is None or self.points.unembed_in is None:
            return None
        positions = query_positions(self.prompt, query)
        hooks = [only_at(self.points.unembed_in, positions)] if positions.shape[1] == 1 else []
        _, logits = capture(self.model, self.inputs, [], hooks=hooks)
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            return None
        picked = logits.shape[1] == positions.shape[1] == 1
        return (logits if picked else torch.take_along_dim(logits, positions[..., None], dim=1)).detach()

    @property
    def unembedding_error(self) -> float | None:
        """See `tensorlens_tl.passes.proof.unembedding_error`."""
        return unembedding_error(self)


if TYPE_CHECKING:
    PassLike = FrozenPass
    """A pass, as a user passes it."""
else:
    PassLike = Any  # what is none is refused by `check_pass`, in our own words
