"""A frozen pass: everything one forward pass leaves behind that makes the model an affine map.

`tensorlens_tl.freezing` makes it and proves it. A pass hands out the parts of the model as maps, composed from its
weights and its captured activations. From it come the `FrozenOperator` (the algebra, which reads weights) and
`fwd_hooks` (the live model, held fixed): two independent roads to the same numbers.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.activation import Coefficients, check_rule, coefficients
from tensorlens_tl.errors import FrozenModelError, UnsupportedModelError
from tensorlens_tl.hooks import (
    ModelPoints,
    attention_hooks,
    capture,
    is_attached,
    mlp_hooks,
    only_at,
    patterns_take_effect,
    refuse_attached,
    replace,
)
from tensorlens_tl.hooks.freeze import FwdHook
from tensorlens_tl.inputs import Prompt, query_positions
from tensorlens_tl.layouts import Layout, compose
from tensorlens_tl.maps import AffineMap, Attention, Chain, Diagonal, Identity, Linear, Norm, Sum
from tensorlens_tl.model_state import WeightState, refuse_dropout
from tensorlens_tl.operator import FrozenOperator
from tensorlens_tl.view import ModelView, NormWeights


@dataclass(eq=False)
class FrozenPass:
    """One forward pass, held fixed. Made by `freeze`.

    Attributes:
        model: the model the pass was taken from; no hook is left on it.
        view: the reading of its weights.
        prompt: tokens `[batch, pos]`, mask, keyword arguments and readable tokens.
        cache: the captured activations by hook-point name (listed in `tensorlens_tl.hooks.points`).
        weights: what the model's weights were, to tell whether they still are.
        other_hooks: the hook points where other people's hooks were during the pass.
        layouts: how each block is put together.
        errors: measured residual of each proof (largest relative error of any real token) by ``"blocks.0"`` …,
            ``"head"``, and ``"unembed"`` once a token target has asked for it.
        tolerance: the largest error a proof may show.
    """

    model: Any
    view: ModelView
    points: ModelPoints
    prompt: Prompt
    cache: dict[str, Tensor]
    weights: WeightState
    other_hooks: list[str] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    tolerance: float = 1e-4
    _ratios: dict[int, Coefficients] = field(default_factory=dict)

    def check_fresh(self) -> None:
        """Raise `FrozenModelError` if the model's weights were changed, moved or cast since this pass.

        Also for writes through ``.data``, unless they touch no more than lone numbers (see `WeightState`).
        """
        if not self.weights.holds(self.model):
            raise FrozenModelError(
                "the model's weights were changed, moved or cast after this pass was frozen, so the two no longer "
                "belong together. Freeze again."
            )

    def provenance(self) -> dict[str, str]:
        """What results depend on besides the prompt: the model's provenance, and other people's hooks where any are."""
        return self.view.provenance() | ({"hooks": ", ".join(self.other_hooks)} if self.other_hooks else {})

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        worst = f"{max(self.errors.values()):.1e}" if self.errors else "not verified"
        hooks = f", other_hooks={len(self.other_hooks)}" if self.other_hooks else ""
        return (
            f"FrozenPass({self.view.description}, batch={batch}, pos={pos}, layers={self.n_layers}, "
            f"residual={worst}{hooks})"
        )

    # ------------------------------------------------------------------ what was frozen

    @property
    def inputs(self) -> dict[str, Any]:
        """The keyword arguments that reproduce this pass: ``model.run_with_hooks(**frozen.inputs, fwd_hooks=...)``."""
        return dict(self.prompt.kwargs)

    @property
    def tokens(self) -> Int[Tensor, "batch pos"]:
        """Token ids."""
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

    def resid_pre(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """The residual stream entering a block; ``layer == n_layers`` is the last block's output."""
        return self._kept(self.points.blocks[0].resid_pre if layer == 0 else output_name(self.points, layer - 1))

    @property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """The model's own output that the operator reproduces: after the final norm, or the last block's output."""
        if self.view.final_norm is not None and self.points.unembed_in is not None:
            return self._kept(self.points.unembed_in)
        return self.resid_pre(self.n_layers)

    def unembedded(self) -> Float[Tensor, "batch pos d_model"]:
        """The stream that the model itself unembeds: after the final norm, or a masked model's prediction head."""
        if self.points.unembed_in is None:
            raise UnsupportedModelError(f"{self.view.description} predicts no tokens.")
        return self._kept(self.points.unembed_in)

    def pattern(self, layer: int) -> Float[Tensor, "batch head query key"]:
        """The attention probabilities of one layer."""
        return self._kept(self.points.blocks[layer].pattern)

    @cached_property
    def causal(self) -> bool:
        """Whether no layer attends forwards."""
        return not any(bool(self.pattern(layer).triu(1).any()) for layer in range(self.n_layers))

    def _kept(self, name: str) -> Tensor:
        tensor = self.cache[name].to(self.tokens.device)
        # OPT flattens batch and position inside its MLP.
        return tensor if tensor.ndim > 2 else tensor.reshape(*self.tokens.shape, -1)

    # ------------------------------------------------------------------ maps

    def norm(self, layer: int, name: str) -> Norm:
        """One norm of one block, scale frozen."""
        return self._norm(self.view.blocks[layer].norms[name], self.points.blocks[layer].scales[name])

    def final_norm(self) -> Norm | None:
        """The norm after the last block, or None."""
        if self.view.final_norm is None or self.points.final_scale is None:
            return None
        return self._norm(self.view.final_norm, self.points.final_scale)

    def _norm(self, weights: NormWeights, scale_name: str) -> Norm:
        return Norm(self._kept(scale_name), weights.gain, weights.shift, weights.centre)

    def attention(self, layer: int, heads: Collection[int] | None = None) -> Chain:
        """One attention sublayer, pattern frozen: values, mixing, output. `heads` keeps only those (b_O stays)."""
        weights = self.view.blocks[layer].attention
        pattern = self.pattern(layer).to(weights.W_O.dtype)
        if heads is not None:
            kept = torch.zeros(pattern.shape[1], dtype=pattern.dtype, device=pattern.device)
            kept[list(heads)] = 1
            pattern = pattern * kept[:, None, None]
        return Chain(
            (
                Linear(weights.W_V, weights.b_V),
                Attention(pattern, weights.kv_heads),
                Linear(weights.W_O, weights.b_O),
            )
        )

    def mlp_coefficients(self, layer: int, activation: str = "ratio") -> Coefficients | None:
        """What one layer's activation is replaced by under a rule; None without an MLP."""
        points, weights = self.points.blocks[layer], self.view.blocks[layer].mlp
        if weights is None or points.pre is None:
            return None
        if activation == "ratio" and layer in self._ratios:  # the proof and every default operator use them
            return self._ratios[layer]
        linear = self._kept(points.pre_linear) if points.pre_linear else None
        held = coefficients(weights.activation, self._kept(points.pre), linear, activation)
        if activation == "ratio":
            self._ratios[layer] = held
        return held

    def mlp(self, layer: int, activation: str = "ratio") -> Chain | None:
        """One MLP with its activation frozen, or None without one."""
        weights, held = self.view.blocks[layer].mlp, self.mlp_coefficients(layer, activation)
        if weights is None or held is None:
            return None
        through = Diagonal(held.through, plus(held.rest, weights.b_post, held.through))
        if weights.W_gate is None or held.gate is None:
            hidden: tuple[AffineMap, ...] = (Linear(weights.W_in, weights.b_in), through)
        else:
            branches = (
                Chain((Linear(weights.W_in, weights.b_in), through)),
                Chain((Linear(weights.W_gate, weights.b_gate), Diagonal(held.gate))),
            )
            hidden = (Sum(branches),)
        return Chain((*hidden, Linear(weights.W_out, weights.b_out)))

    def block(
        self,
        layer: int,
        *,
        activation: str = "ratio",
        heads: Collection[int] | None = None,
        mlp: bool = True,
        layout: Layout | None = None,
    ) -> AffineMap:
        """One block as a map; `heads` keeps only those heads, ``mlp=False`` leaves the MLP's branch out."""
        parts = self._parts(layer, activation, heads, mlp)
        return compose(layout or self.layouts[layer], *parts)

    def _parts(
        self, layer: int, activation: str = "ratio", heads: Collection[int] | None = None, mlp: bool = True
    ) -> tuple[Chain, Chain | None, dict[str, Norm]]:
        """What a block is composed of: attention, MLP, norms."""
        norms = {name: self.norm(layer, name) for name in self.view.blocks[layer].norms}
        return self.attention(layer, heads), self.mlp(layer, activation) if mlp else None, norms

    def prediction_head(self, activation: str = "ratio") -> Chain | None:
        """A masked language model's transform before its unembedding, norm(φ(x·W + b)), frozen; None otherwise."""
        head = self.view.mlm_head
        if head is None:
            return None
        dense = Linear(head.W, head.b)
        held = coefficients(head.activation, dense(self.output), rule=activation)
        return Chain((dense, Diagonal(held.through, held.rest), self._norm(head.norm, head.scale_name)))

    # ------------------------------------------------------------------ the operator and the hooks

    def operator(
        self,
        *,
        layers: Any = None,
        heads: Any = None,
        mlp: Any = True,
        activation: str = "ratio",
    ) -> FrozenOperator:
        """The frozen pass as one affine map, from ``blocks.0`` input to the final norm's output (or the last block's).

        Args:
            layers: a contiguous range; one that ends at the last layer includes the final norm.
            heads: layer → heads to keep. Unnamed layers keep all. A dropped head drops its b_V share; b_O stays.
            mlp: False leaves every MLP out, a collection of layers keeps only theirs.
            activation: `"ratio"`, `"ig"`, `"split"` or `"tangent"` (see `tensorlens_tl.activation`).

        Raises:
            InvalidInputError: a layer or head out of range, a gap in the layers, or no such rule.
        """
        return FrozenOperator.of(self, layers=layers, heads=heads, mlp=mlp, activation=activation)

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
        refuse_dropout(self.model)
        refuse_attached(self.model)
        hooks: list[FwdHook] = []
        for layer, points in enumerate(self.points.blocks):
            if patterns:
                hooks += attention_hooks(points, self.pattern(layer), self._patterns_take_effect[layer])
            if norms:
                hooks += [replace(name, self._kept(name)) for name in points.scales.values()]
            held = self.mlp_coefficients(layer, activation) if activations else None
            weights = self.view.blocks[layer].mlp
            if held is not None and weights is not None:
                hooks += mlp_hooks(points, held, weights.b_post)
        if norms and self.points.final_scale is not None:
            hooks.append(replace(self.points.final_scale, self._kept(self.points.final_scale)))
        return hooks

    @contextmanager
    def attached(self, **options: Any) -> Iterator[Any]:
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

    # ------------------------------------------------------------------ proofs

    def prove_block(self, layer: int, layout: Layout) -> float:
        """The largest relative error of any real token between the composed block and the model's own output."""
        return self._prove(layer, self.block(layer, layout=layout))

    def _prove(self, layer: int, block: AffineMap) -> float:
        return self._relative_error(block(self.resid_pre(layer)), self.resid_pre(layer + 1))

    def prove_head(self) -> float | None:
        """The same for what follows the last block: the final norm, or a masked language model's transform."""
        if self.points.unembed_in is None:
            return None
        after = self.final_norm() or self.prediction_head() or Identity()
        made, own = after(self.resid_pre(self.n_layers)), self._kept(self.points.unembed_in)
        return self._relative_error(made, own) if made.shape == own.shape else float("inf")

    @cached_property
    def last_logits(self) -> Float[Tensor, "batch d_vocab"] | None:
        """The model's own logits at each row's last real token, by running it once more; None where it gives none."""
        self.check_fresh()
        refuse_dropout(self.model)
        if self.view.unembedding is None or self.points.unembed_in is None:
            return None
        last = query_positions(self.mask, -1)
        _, logits = capture(self.model, self.inputs, [], hooks=[only_at(self.points.unembed_in, last)])
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            return None
        logits = logits if logits.shape[1] == 1 else torch.take_along_dim(logits, last[..., None], dim=1)
        return logits[:, 0].detach()

    @cached_property
    def unembedding_error(self) -> float | None:
        """Relative error of ``cap(W_U·x + b_U)`` against the model's own logits, on the prompt's first two tokens.

        Measured when a token target first asks for it, since logits can cost as much as several blocks. None for a
        model that predicts no tokens.
        """
        self.check_fresh()
        if self.view.unembedding is None or self.points.unembed_in is None:
            return None
        # while this pass is attached, its hooks fit its own prompt alone
        inputs = self.inputs if is_attached(self.model) else {"input": self.tokens[:1, :2]}
        kept, logits = capture(self.model, inputs, [self.points.unembed_in])
        if not isinstance(logits, Tensor):
            return float("inf")
        W_U, b_U = self.view.unembedding
        made = kept[self.points.unembed_in].to(W_U) @ W_U
        made = made if b_U is None else made + b_U
        if self.view.soft_cap is not None:
            made = self.view.soft_cap * torch.tanh(made / self.view.soft_cap)
        error = (made - logits.to(made)).norm(dim=-1) / logits.norm(dim=-1).clamp_min(1e-30)
        self.errors["unembed"] = float(error.max())
        return self.errors["unembed"]

    def _relative_error(self, made: Tensor, own: Tensor) -> float:
        error = (made - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(torch.finfo(own.dtype).tiny)
        return float(error[self.mask].max())


def output_name(points: ModelPoints, layer: int) -> str:
    """The hook point that holds a block's output."""
    return points.blocks[layer + 1].resid_pre if layer + 1 < len(points.blocks) else points.last_output


def plus(rest: Tensor | None, vector: Tensor | None, like: Tensor, zero: bool = False) -> Any:
    """rest + vector, where either may be missing."""
    if rest is None and vector is None:
        return torch.zeros_like(like) if zero else None
    if vector is None:
        return rest
    return vector.expand_as(like) if rest is None else rest + vector
