"""A frozen pass: everything one forward pass leaves behind that makes the model an affine map.

From it come the `FrozenOperator` (the algebra, which reads weights) and `fwd_hooks` (the live model, held fixed): two
independent ways to the same numbers.
"""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import AffineMap
from tensorlens_tl.errors import FrozenModelError
from tensorlens_tl.hooks import (
    FwdHook,
    is_attached,
    lock_of,
    own_logits,
    refuse_attached,
)
from tensorlens_tl.models.activations import check_rule
from tensorlens_tl.models.layouts import Layout
from tensorlens_tl.models.lifecycle import refuse_dropout
from tensorlens_tl.models.protocol import LayerRange
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.live import LiveModel, holding_hooks
from tensorlens_tl.passes.operator import FrozenOperator
from tensorlens_tl.passes.proof import logits_error, unembedding_error
from tensorlens_tl.passes.record import Record


@dataclass(eq=False)
class FrozenPass(Record):
    """One forward pass, held fixed. Made by `freeze`.

    What was captured, and the maps of the model's parts, are those of a `Record`, whose attributes these are; here are
    the operator, and the hooks that hold the live model.
    """

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        worst = f"{max(self.errors.values()):.1e}" if self.errors else "not verified"
        worst += "" if self.proved_positions is None else f" at {self.proof_scope}"
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
            heads: layer → heads of self-attention to keep. Unnamed layers keep all. A dropped head drops its b_V share;
                b_O stays.
            mlp: False leaves every MLP out, a collection of layers keeps only theirs.
            final_norm: False ends at the last block's output.
            activation: `"ratio"`, `"ig"`, `"split"` or `"tangent"` (see `tensorlens_tl.models.activations`).

        Raises:
            InvalidInputError: a layer or head out of range, a gap in the layers, or no such rule.
        """
        return FrozenOperator.of(
            self, layers=layers, heads=heads, mlp=mlp, final_norm=final_norm, activation=activation
        )

    def block(
        self,
        layer: int,
        *,
        activation: str = "ratio",
        heads: Collection[int] | None = None,
        mlp: bool = True,
        layout: Layout | None = None,
    ) -> AffineMap:
        """One block as a map; `heads` keeps only those of self-attention, ``mlp=False`` leaves the MLP's branch out.

        Raises:
            InvalidInputError: no such layer or rule.
            FrozenModelError: the model is no longer the one that the pass was taken from.
        """
        check_rule(activation)
        self.check_fresh()
        return self.block_map(layer, activation=activation, heads=heads, mlp=mlp, layout=layout)

    # ------------------------------------------------------------------ the live model, held

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
            UnsupportedModelError: a hook point of this model only observes (tried once per model, with another residual
                stream); or its weights are offloaded.
        """
        check_rule(activation)
        self.check_fresh()
        refuse_dropout(self.view.model)
        refuse_attached(self.model)
        with lock_of(self.model):
            return holding_hooks(self, patterns, activations, norms, activation)

    @contextmanager
    def attached(self, **options: Any) -> Generator[Any, None, None]:
        """``with frozen.attached(): ...`` runs the frozen model; takes the options of `fwd_hooks`.

        Only these hooks are removed at the end, also after an exception. Other threads wait with their own passes of
        this model until then.

        Raises:
            FrozenModelError: the hooks were taken off inside, as ``model.reset_hooks()`` does.
        """
        with lock_of(self.model), self.model.hooks(fwd_hooks=self.fwd_hooks(**options)):
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
            query: see `tensorlens_tl.passes.inputs.prompts.query_positions`.

        Raises:
            FrozenModelError: the model is no longer that of the pass.
        """
        live = LiveModel(self, "logits")
        if self.view.unembedding is None or self.points.unembed_in is None:
            return None
        positions = query_positions(self.prompt, query)
        own = self.prompt.in_logits(positions)
        states, logits = own_logits(self.model, self.inputs, self.points.unembed_in, own)
        live.check({self.points.unembed_in: states})
        if not live.same_hooks:  # one of them may act after the unembedding
            error = logits_error(self, self.beside_encoder(states), logits, positions)
            if not error <= self.tolerance:
                raise FrozenModelError(
                    f"logits: hooks were put on the model or taken off since this pass, and its logits are not "
                    f"W_U·x + b_U now (relative error {error:.1e}). Freeze again."
                )
        return logits.detach() if isinstance(logits, Tensor) and logits.ndim == 3 else None

    @property
    def unembedding_error(self) -> float | None:
        """How far the logits that were compared are from the weights'; see `proof.unembedding_error`."""
        return unembedding_error(self)


if TYPE_CHECKING:
    PassLike = FrozenPass
    """A pass, as a user passes it."""
else:
    PassLike = Any  # what is none is refused by `check_pass`, in our own words
