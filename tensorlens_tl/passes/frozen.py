"""A frozen pass: the data of one forward pass that turn the model into an affine map.

It provides the `FrozenOperator` (the algebra, which reads weights) and `fwd_hooks` (the live model, held fixed): two
independent ways to the same numbers.
"""

from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import formerly
from tensorlens_tl.algebra import AffineMap
from tensorlens_tl.algebra.numerics import refuse_nan
from tensorlens_tl.errors import (
    FrozenModelError,
    InvalidInputError,
    UnsupportedModelError,
)
from tensorlens_tl.hooks import FwdHook, hooked, is_attached, lock_of, refuse_attached, states_and_logits
from tensorlens_tl.models import (
    ONCE_ACTIVATION,
    FrozenRule,
    HeadChoice,
    HookedModel,
    LayerRange,
    Layout,
    MlpChoice,
    Query,
    known_rule,
)
from tensorlens_tl.models.lifecycle import refuse_dropout
from tensorlens_tl.passes.block_maps import BlockMaps, Routes
from tensorlens_tl.passes.capture import Capture
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.linearisation import Linearisation
from tensorlens_tl.passes.live import LiveModel, holding_hooks
from tensorlens_tl.passes.operator import FrozenOperator
from tensorlens_tl.passes.proof import LogitsCheck, Proof, logits_error
from tensorlens_tl.passes.target import chosen_heads


@dataclass(frozen=True, eq=False, repr=False)
class FrozenPass(Linearisation):
    """One frozen forward pass, as `freeze` returns it: activations, the maps of its blocks, and their proof.

    It is immutable apart from caches.

    Attributes:
        maps: the parts of every block as maps; ``maps.capture`` has the activations.
        proof: how each block is composed, and the error of its map.
        strict: whether a sum that misses its total by more than `allowed_gap` is an error instead of a warning.

    >>> frozen.operator().target(" value").gap.max() < 1e-4
    tensor(True)
    """

    maps: BlockMaps
    proof: Proof
    strict: bool = False
    logits_check: LogitsCheck = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "logits_check", LogitsCheck(self.mask))

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        gap = f"{max(self.errors.values()):.1e}" if self.errors else "not verified"
        if self.proof.positions is not None:
            gap += f" at {self.proof.scope}"
        shape = f"batch={batch}, pos={pos}, layers={self.n_layers}"
        parts = [self.view.description, shape, f"gap={gap}"]
        if self.other_hooks:
            parts.append(f"other_hooks={len(self.other_hooks)}")
        return f"FrozenPass({', '.join(parts)})"

    # ------------------------------------------------------------------ captured data

    @property
    def capture(self) -> Capture:
        """The activations by hook point, and the streams composed from them."""
        return self.maps.capture

    @property
    def model(self) -> HookedModel:
        """The model that the pass was taken from; no hook is left on it."""
        return self.capture.model

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments that reproduce this pass: ``model.run_with_hooks(**frozen.inputs, fwd_hooks=...)``."""
        return self.capture.inputs

    @property
    def str_tokens(self) -> list[list[str]]:
        """Readable tokens, one list per prompt."""
        return self.capture.str_tokens

    @property
    def other_hooks(self) -> list[str]:
        """The hook points and modules that had user-installed hooks during the pass."""
        return list(self.capture.other_hooks)

    @property
    def causal(self) -> bool:
        """Whether no layer attends to later positions."""
        return self.capture.causal

    @property
    def soft_cap(self) -> float | None:
        """The cap c of a final c·tanh(x/c); sums explain the logit before it. None without a cap."""
        return self.view.soft_cap

    def activation(self, name: str) -> Tensor:
        """Return the activation at one hook point, with separate batch and position axes.

        Raises:
            InvalidInputError: the pass stores no activation of that name; suggests a similar name.

        >>> frozen.activation("blocks.0.hook_resid_pre").shape
        torch.Size([1, 7, 128])
        """
        return self.capture.activation(name)

    def resid_pre(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """Return the residual stream entering a block; ``layer == n_layers`` is the last block's output.

        Raises:
            InvalidInputError: no such layer.

        >>> frozen.resid_pre(frozen.n_layers).shape  # after the last block
        torch.Size([1, 7, 128])
        """
        return self.capture.resid_pre(layer)

    @property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """The model's own output, which the operator reproduces: after the final norm, or the last block's output."""
        return self.capture.output

    def unembedded(self) -> Float[Tensor, "batch pos d_model"]:
        """Return the stream that the model unembeds: after the final norm, or a masked model's prediction head.

        Raises:
            UnsupportedModelError: the model predicts no tokens.

        >>> logits = frozen.unembedded() @ model.W_U + model.b_U
        >>> torch.allclose(logits, model(text), atol=1e-3)
        True
        """
        return self.capture.unembedded()

    def pattern(self, layer: int) -> Float[Tensor, "batch head query key"]:
        """Return one layer's attention pattern; in an encoder–decoder, between the positions of the layer's own side.

        If heads belong to experts (JetMoe), those of a token's first choice come first; `BlockMaps.pattern` has them by
        expert.

        Raises:
            InvalidInputError: no such layer.
            UnsupportedModelError: the layer has no attention.

        >>> frozen.pattern(0).shape  # batch head query key
        torch.Size([1, 4, 7, 7])
        """
        return self.capture.pattern(layer)

    def cross_pattern(self, layer: int) -> Float[Tensor, "batch head decoder encoder"]:
        """Return the pattern with which a decoder block of an encoder–decoder attends to the encoder's positions.

        Args:
            layer: the number of the block, counting the encoder's blocks first.

        Raises:
            InvalidInputError: no such layer, or one without cross-attention.
        """
        return self.capture.cross_pattern(layer)

    def check_fresh(self) -> None:
        """Raise `FrozenModelError` if the model's weights or configuration have changed since this pass."""
        self.capture.check_fresh()

    def provenance(self) -> dict[str, str]:
        """Return what results depend on besides the prompt: model provenance, user hooks, the scope of a sampled proof.

        >>> frozen.provenance()["dtype"]
        'float32'
        """
        if self.proof.positions is None:
            return self.capture.provenance()
        return self.capture.provenance() | {"proof": self.proof.scope}

    # ------------------------------------------------------------------ the proof

    @property
    def tolerance(self) -> float:
        """The largest error that a proof allows."""
        return self.maps.tolerance

    @property
    def errors(self) -> dict[str, float]:
        """The errors of the proof, and ``"unembed"`` for the logits compared so far.

        Logits are compared at the last tokens, and where results needed them since. Their error is measured at first
        access, from the weights of the pass, and is missing if the model has changed before.
        """
        errors = dict(self.proof.errors)
        if self.logits_check.postponed is not None and self.capture.weights.holds(self.view.model):
            self.logits_check.catch_up(self.capture, self.unembedded())
        if self.logits_check.error is not None:
            errors["unembed"] = self.logits_check.error
        return errors

    @property
    def allowed_gap(self) -> float:
        """The largest gap allowed for a sum: the tolerance of a block, or the total error of all blocks if larger."""
        outputs = [error for name, error in self.errors.items() if not name.endswith(".writes")]
        return max(self.tolerance, sum(outputs))

    @property
    def is_strict(self) -> bool:
        """See `strict`."""
        return self.strict

    def _missed(self, parts: str, gap: float) -> str:
        """Return the message for a sum that misses its total by too much."""
        return (
            f"{parts}: its parts miss the model's own number by {gap:.1e} of their size, but the proof of this pass "
            f"allows {self.allowed_gap:.1e}. They do not explain the model's output: load the model in a wider dtype, "
            "or check it for changes (frozen.other_hooks)."
        )

    # ------------------------------------------------------------------ maps

    @formerly(ONCE_ACTIVATION)
    def operator(
        self,
        *,
        layers: LayerRange = None,
        heads: HeadChoice = None,
        mlp: MlpChoice = True,
        final_norm: bool | None = None,
        rule: FrozenRule = "frozen",
    ) -> FrozenOperator:
        """Return the pass as an affine map from the first block's input to the output of the final norm or last block.

        Args:
            layers: a contiguous range; one that ends at the last layer includes the final norm.
            heads: for some layers, the heads of self-attention to keep; other layers keep all. Leaving out a head also
                leaves out its share of b_V, but not b_O.
            mlp: False leaves out every MLP; a collection of layers keeps only theirs.
            final_norm: False ends at the last block's output; True raises an error if the layers end earlier.
            rule: how activations are replaced, one of `tlens.FROZEN_RULES` (see `tensorlens_tl.models.activations`).

        >>> op = frozen.operator()
        >>> torch.allclose(op(op.x), frozen.output, atol=1e-4)
        True

        Raises:
            InvalidInputError: a layer or head out of range, a gap in the layers, or no such rule.
        """
        return FrozenOperator.of(self, layers=layers, heads=heads, mlp=mlp, final_norm=final_norm, rule=rule)

    @formerly(ONCE_ACTIVATION)
    def block(
        self,
        layer: int,
        *,
        rule: FrozenRule = "frozen",
        heads: Collection[int] | None = None,
        mlp: bool = True,
        layout: Layout | None = None,
    ) -> AffineMap:
        """Return one block as a map; `heads` keeps only those of self-attention, ``mlp=False`` leaves out the MLP.

        Values taken from an earlier block (shared keys and values) are constants; the operator of both blocks carries
        them.

        >>> torch.allclose(frozen.block(0)(frozen.resid_pre(0)), frozen.resid_pre(1), atol=1e-4)
        True

        Raises:
            InvalidInputError: no such layer, head or rule.
            FrozenModelError: the model has changed since the pass.
        """
        known_rule(rule)
        self.check_fresh()
        if heads is not None:
            heads = chosen_heads(self, layer, range(self.n_layers), heads)
        return self.maps.block_map(layer, rule=rule, heads=heads, mlp=mlp, layout=layout)

    def routing(self, layer: int) -> Routes:
        """Return the experts that each token of a layer is routed to, and their weights: `[batch, pos, choice]` each.

        Raises:
            InvalidInputError: no such layer.
            UnsupportedModelError: the layer has no experts.
        """
        return self.maps.routing(layer)

    def cut(self, length: int) -> "FrozenPass":
        """Return the first tokens of a causal pass."""
        return self.with_capture(self.capture.cut(length))

    def with_capture(self, capture: Capture) -> "FrozenPass":
        """Return the same blocks at other activations, or with other weights, without verification."""
        return replace(self, maps=self.maps.with_capture(capture))

    # ------------------------------------------------------------------ the live model, held

    @formerly(ONCE_ACTIVATION)
    def fwd_hooks(
        self,
        patterns: bool = True,
        activations: bool = True,
        norms: bool = True,
        rule: FrozenRule = "frozen",
    ) -> list[FwdHook]:
        """Return TransformerLens hooks that hold this pass's patterns, activation ratios and norm scales fixed.

        They fit inputs of the same length and batch; a pass of one prompt fits any batch. Install your own hooks after
        them: these overwrite the result of any earlier hook at a pattern, an activation or a scale. A masked language
        model's prediction head has no hook between its linear map and its activation, so it stays live.

        Raises:
            InvalidInputError: no such rule, or the model is now in train mode with active dropout.
            FrozenModelError: the weights have changed since the pass, or another frozen pass is attached.
            UnsupportedModelError: a hook point of this model only observes (tested once per model, with another
                residual stream).

        >>> held = model.run_with_hooks(**frozen.inputs, fwd_hooks=frozen.fwd_hooks())
        >>> torch.allclose(held, model(text), atol=1e-3)
        True
        """
        known_rule(rule)
        self.check_fresh()
        refuse_dropout(self.view.model)
        refuse_attached(self.model)
        with lock_of(self.model):
            return holding_hooks(self.maps, patterns, activations, norms, rule)

    @contextmanager
    def attached(self, **options: Any) -> Generator[Any, None, None]:
        """Freeze the model inside ``with frozen.attached(): ...``; takes the options of `fwd_hooks`.

        Only these hooks are removed at the end, also after an exception. Other threads that run this model wait until
        then.

        >>> with frozen.attached() as held:
        ...     logits = held(frozen.tokens)
        >>> torch.allclose(logits[:, -1], frozen.last_logits, atol=1e-4)
        True

        Raises:
            FrozenModelError: the hooks were removed inside, for instance by ``model.reset_hooks()``.
        """
        with lock_of(self.model), hooked(self.model, self.fwd_hooks(**options)):
            yield self.model
            if not is_attached(self.model):
                raise FrozenModelError(
                    "the hooks of this frozen pass were removed inside `with frozen.attached():` (by "
                    "model.reset_hooks()?), so the model has run unfrozen since then."
                )

    # ------------------------------------------------------------------ logits

    def live(self, question: str) -> LiveModel:
        """Return the model, for another run.

        Args:
            question: the subject of messages, such as ``"logits"``.

        Raises:
            InvalidInputError: the model is now in train mode with active dropout.
            FrozenModelError: its weights or configuration have changed since the pass, or a frozen pass is attached.
        """
        return LiveModel(self.capture, self.tolerance, question)

    @cached_property
    def last_logits(self) -> Float[Tensor, "batch d_vocab"] | None:
        """The model's own logits at each row's last real token; None for a model without logits."""
        logits = self.logits(-1)
        return None if logits is None else logits[:, 0]

    def logits(self, query: Query = -1) -> Float[Tensor, "batch query d_vocab"] | None:
        """Return the model's own logits at some positions; None for a model without logits.

        This takes one more run, except for logits that the pass still stores: each row's last, until its error is read.

        Args:
            query: see `tensorlens_tl.passes.inputs.query_positions`.

        >>> frozen.logits([0, -1]).shape[:2]
        torch.Size([1, 2])

        Raises:
            FrozenModelError: the model has changed since the pass.
        """
        live = self.live("logits")
        if self.view.unembedding is None or self.points.unembed_in is None:
            return None
        positions = query_positions(self.prompt, query)
        if live.same_hooks and not live.alone:
            held = self.logits_check.held(positions)
            if held is not None:
                return held.detach()
        states, logits = self._run_for_logits(live, positions)
        if not live.same_hooks:  # a hook may act after the unembedding
            error = logits_error(self.capture, states, logits, positions)
            if not error <= self.tolerance:
                raise FrozenModelError(
                    f"logits: hooks were put on the model or taken off since this pass, and its logits are no longer "
                    f"W_U·x + b_U (relative error {error:.1e}). Freeze again."
                )
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            return None
        return logits.detach()

    @property
    def unembedding_error(self) -> float | None:
        """The difference of ``cap(W_U·x + b_U)`` from the model's own logits; None for a model that predicts no tokens.

        This is the largest ``max abs(ours − logits) / max abs(logits)`` of all tokens compared so far, without padding.
        Each prompt's last real token was compared when the pass was frozen. Others are compared, by one more run of the
        model, when a result first needs them.
        """
        return self._unembedding_error(query_positions(self.prompt, -1))

    def _unembedding_error(self, positions: Int[Tensor, "batch query"]) -> float | None:
        if self.view.unembedding is None or self.points.unembed_in is None:
            return None
        if not self.logits_check.covers(positions):
            live = self.live("the logits at positions that were not compared before")
            states, logits = self._run_for_logits(live, positions)
            self.logits_check.add(logits_error(self.capture, states, logits, positions), positions)
        if self.logits_check.postponed is not None:
            self.capture.check_fresh()
            self.logits_check.catch_up(self.capture, self.unembedded())
        return self.logits_check.error

    def _run_for_logits(self, live: LiveModel, positions: Int[Tensor, "batch query"]) -> tuple[Tensor, Any]:
        """Run the model for the stream that it unembeds, checked against the pass, and its logits at some positions."""
        name = self.points.unembed_in
        assert name is not None  # a model with an unembedding
        states, logits = states_and_logits(self.model, self.inputs, name, self.prompt.in_logits(positions))
        live.check({name: states})
        return self.capture.beside_encoder(states), logits

    def logit_vectors(
        self, ids: Int[Tensor, "batch query"], positions: Int[Tensor, "batch query"]
    ) -> tuple[Float[Tensor, "batch query d_model"], Float[Tensor, "batch query"]]:
        """Return the directions of some tokens' logits in the unembedded stream, and their constants b_U.

        Warns (`UntrainedWarning`) if the model's checkpoint lacks the head, or is a classifier's.

        Raises:
            UnsupportedModelError: the model predicts no tokens, or its logits at one of the positions differ from
                ``cap(W_U·x + b_U)``.
            NumericalError: some of them are NaN.
        """
        if self.view.unembedding is None:
            raise UnsupportedModelError(f"target: {self.view.description} predicts no tokens; use direction=.")
        self.view.untrained.warn(logits=True)
        error = self._unembedding_error(positions)
        refuse_nan("target: the logits computed from the unembedding", error or 0.0)
        if error is None or not error <= self.tolerance:
            raise UnsupportedModelError(
                f"target: the logits of {self.view.description} are not cap(W_U·x + b_U) as read from its weights "
                f"(relative error {error:.1e}; scaled logits, or a hook after the unembedding?). Use direction=."
            )
        W_U, b_U = self.view.unembedding
        vectors = W_U[:, ids.to(W_U.device)].permute(1, 2, 0) * self.view.logit_factor
        constant = vectors.new_zeros(ids.shape)
        if b_U is not None:
            constant = b_U[ids.to(b_U.device)] * self.view.logit_factor
        return vectors.to(self.tokens.device), constant.to(self.tokens.device)


def check_pass(frozen: Any) -> None:
    """Raise `InvalidInputError` if the argument is not a frozen pass, but a model, for instance."""
    if not isinstance(frozen, FrozenPass):
        raise InvalidInputError(
            f"a frozen pass is needed, got {type(frozen).__name__}: tlens.freeze(model, text) returns one."
        )


if TYPE_CHECKING:
    PassLike = FrozenPass
    """A frozen pass, as an argument."""
else:
    PassLike = Any  # `check_pass` raises our own error for anything else
