"""A frozen pass: everything one forward pass leaves behind that makes the model an affine map.

`freeze` runs the model once (or takes an existing cache), reads the weights, composes every block from
maps, and proves each block: the composed map applied to the block's cached input must give the block's
cached output. From the pass come the `FrozenOperator` (the algebra, which reads weights) and `fwd_hooks`
(the live model, held fixed): two independent roads to the same numbers.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tensorlens_tl.activation import Coefficients, check_rule, coefficients
from tensorlens_tl.errors import FrozenModelError, InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.hooks import (
    ModelPoints,
    attention_hooks,
    capture,
    check_finite,
    from_cache,
    is_attached,
    mlp_hooks,
    model_points,
    patterns_take_effect,
    refuse_attached,
    replace,
    run_until,
)
from tensorlens_tl.hooks.freeze import FwdHook
from tensorlens_tl.inputs import Prompt, prepare, query_positions
from tensorlens_tl.layouts import Layout, candidates, compose
from tensorlens_tl.maps import AffineMap, Attention, Chain, Diagonal, Identity, Linear, Norm, Sum
from tensorlens_tl.operator import FrozenOperator
from tensorlens_tl.view import ModelView, NormWeights

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far a block's map may be from the block: the largest relative error of a token. A wrong reading of the
weights misses by far more; float64 models often compute their norms in float32 inside, which costs 1e-7."""


@dataclass(eq=False)
class FrozenPass:
    """One forward pass, held fixed. Made by `freeze`.

    Attributes:
        model: the model the pass was taken from; no hook is left on it.
        view: the reading of its weights.
        prompt: tokens `[batch, pos]`, mask, keyword arguments and readable tokens.
        cache: the captured activations by hook-point name (listed in `tensorlens_tl.hooks.points`).
        layouts: how each block is put together.
        errors: measured residual of each proof (largest relative error of any real token) by ``"blocks.0"`` …,
            ``"head"`` and ``"unembed"``.
        last_logits: the model's own logits at each row's last real token, `[batch, d_vocab]`; None where it has none
            and for a pass from a cache.
        tolerance: the largest error a proof may show.
    """

    model: Any
    view: ModelView
    points: ModelPoints
    prompt: Prompt
    cache: dict[str, Tensor]
    layouts: list[Layout] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)
    last_logits: Float[Tensor, "batch d_vocab"] | None = None
    tolerance: float = 1e-4
    _ratios: dict[int, Coefficients] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._weights = _weight_versions(self.model)

    def check_fresh(self) -> None:
        """Raise `FrozenModelError` if the model's weights were changed, moved or cast since this pass."""
        if _weight_versions(self.model) != self._weights:
            raise FrozenModelError(
                "the model's weights were changed, moved or cast after this pass was frozen, so the two no longer "
                "belong together. Freeze again."
            )

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        worst = f"{max(self.errors.values()):.1e}" if self.errors else "not verified"
        return (
            f"FrozenPass({self.view.description}, batch={batch}, pos={pos}, layers={self.n_layers}, residual={worst})"
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
        return self._kept(self.points.blocks[0].resid_pre if layer == 0 else _output_name(self.points, layer - 1))

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
        through = Diagonal(held.through, _plus(held.rest, weights.b_post, held.through))
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

        They fit inputs of the same length and batch; a pass of one prompt fits any batch. A masked language model's
        prediction head has no hook between its linear map and its activation: it stays live.

        Raises:
            InvalidInputError: no such rule.
            FrozenModelError: the weights changed since the pass, or another frozen pass is attached.
        """
        check_rule(activation)
        self.check_fresh()
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
    def unembedding_error(self) -> float | None:
        """Relative error of ``cap(W_U·x + b_U)`` against the model's own logits at each row's last real token.

        A pass from a cache has no logits: then the model runs once more. None for a model that predicts no tokens.
        """
        if self.view.unembedding is None or self.points.unembed_in is None:
            return None
        if self.last_logits is None:
            self.last_logits = _last_logits(self, capture(self.model, self.inputs, [])[1])
        if self.last_logits is None:
            return float("inf")
        W_U, b_U = self.view.unembedding
        last = query_positions(self.mask, -1)
        made = torch.take_along_dim(self._kept(self.points.unembed_in), last[..., None], dim=1)[:, 0] @ W_U
        made = made if b_U is None else made + b_U
        if self.view.soft_cap is not None:
            made = self.view.soft_cap * torch.tanh(made / self.view.soft_cap)
        error = (made - self.last_logits.to(made)).norm(dim=-1) / self.last_logits.norm(dim=-1).clamp_min(1e-30)
        return float(error.max())

    def _relative_error(self, made: Tensor, own: Tensor) -> float:
        error = (made - own).norm(dim=-1) / own.norm(dim=-1).clamp_min(torch.finfo(own.dtype).tiny)
        return float(error[self.mask].max())


def freeze(
    model: Any,
    input: Any,
    *,
    attention_mask: Any = None,
    token_type_ids: Any = None,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    cache: Any = None,
    store: str = "model",
    verify: bool = True,
    tolerance: float | None = None,
) -> FrozenPass:
    """Run a model once and hold its patterns, activation ratios and norm scales fixed.

    Hooks of other people on the model take part in the run, and so does what they change: where the algebra cannot
    follow, the proof fails and says so.

    Args:
        model: a HookedTransformer, HookedEncoder (TransformerLens 3.9) or TransformerBridge (3.9 and 4.x).
        input: a string, a list of strings, or token ids.
        attention_mask: 1 at real tokens, `[batch, pos]`; with token ids only.
        token_type_ids: segment ids for BERT-like models.
        prepend_bos: as in TransformerLens.
        padding_side: where several strings differ in length.
        cache: the ActivationCache of an earlier ``run_with_cache`` on the same input, instead of a forward pass.
        store: ``"cpu"`` keeps the captured activations off the model's device.
        verify: prove every block against the model's own output; False proves only the first.
        tolerance: largest relative error a block may show; None takes `TOLERANCE` for the model's dtype.

    Raises:
        InvalidInputError: see `tensorlens_tl.inputs.prepare`; also a model in train mode whose dropout is active, and a
            cache of another prompt.
        FrozenModelError: inside ``with frozen.attached()``, where the run would not be the model's own.
        UnsupportedModelError: the model has a part that no known map reproduces, or a block's proof fails.
        NumericalError: NaN or Inf in an activation.
    """
    if store not in ("model", "cpu"):
        raise InvalidInputError(f"store={store!r}; use 'model' or 'cpu'.")
    view = ModelView(model)
    _refuse_dropout(model)
    refuse_attached(model)
    prompt = prepare(
        view,
        input,
        attention_mask=attention_mask,
        token_type_ids=token_type_ids,
        prepend_bos=prepend_bos,
        padding_side=padding_side,
    )
    points = model_points(view)
    # captured activations must be usable with gradients later, also when the caller is in inference mode
    with torch.inference_mode(False), torch.no_grad():
        if cache is None:
            unembed = None if points.unembed_in is None else (points.unembed_in, query_positions(prompt.mask, -1))
            kept, logits = capture(model, prompt.kwargs, points.captured, store=store, unembed=unembed)
        else:
            kept, logits = from_cache(cache, points.captured, *prompt.tokens.shape), None
        frozen = FrozenPass(model, view, points, prompt, kept)
        frozen.tolerance = TOLERANCE.get(frozen.resid_pre(0).dtype, 1e-4) if tolerance is None else tolerance
        if cache is not None:
            _check_same_prompt(frozen)
        _check_padding(prompt, points, kept)
        check_finite({name: kept[name] for name in points.captured})
        frozen.last_logits = _last_logits(frozen, logits)
        _prove(frozen, verify)
    return frozen


def _weight_versions(model: nn.Module) -> list[tuple[int, int]]:
    """What changes when a weight is written to in place, moved or cast."""
    return [(parameter.data_ptr(), parameter._version) for parameter in model.parameters()]


def _check_same_prompt(frozen: FrozenPass) -> None:
    """Refuse a cache whose stream enters the first block otherwise than this prompt's does."""
    own = run_until(frozen.model, frozen.inputs, frozen.points.blocks[0].resid_pre)
    error = frozen._relative_error(frozen.resid_pre(0), own.to(frozen.tokens.device))
    if not error <= frozen.tolerance:
        raise InvalidInputError(
            f"cache: it was made from another input (the first block's input differs by {error:.1e}). Pass the same "
            "tokens, in the same order and padding, that made the cache."
        )


def _refuse_dropout(model: nn.Module) -> None:
    inner = getattr(model, "original_model", None)  # a Bridge's own tree leaves some of its modules out
    modules = {**dict(model.named_modules()), **(dict(inner.named_modules()) if inner is not None else {})}
    for name, module in modules.items():
        rates = [value for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]
        if isinstance(module, nn.Dropout):
            rates.append(module.p)
        if module.training and any(rate > 0 for rate in rates):
            raise InvalidInputError(
                f"the model is in train mode and {name or type(module).__name__} drops activations with probability "
                f"{max(rates)}; two passes would differ. Call model.eval() first."
            )


def _check_padding(prompt: Prompt, points: ModelPoints, kept: Mapping[str, Tensor]) -> None:
    """Refuse padding that the model does not handle: weight on padded tokens, or NaN that padding brought."""
    if bool(prompt.mask.all()):
        return
    padded = ~prompt.mask
    for block in points.blocks:
        pattern = kept[block.pattern].to(padded.device)
        if bool(torch.isnan(pattern).any()):
            raise NumericalError(
                f"NaN at {block.pattern}, in a padded batch: this model does not handle a query all of whose keys are "
                "padding or outside its window (left padding on several bridges, short prompts beside ones longer than "
                "a sliding window). Pad on the right, or freeze the prompts one by one."
            )
        if bool((pattern * (prompt.mask[:, None, :, None] & padded[:, None, None, :])).any()):
            raise UnsupportedModelError(
                f"{block.pattern} puts weight on padded tokens: this model ignores the attention mask (a bidirectional "
                "HookedTransformer does). Freeze the prompts one by one."
            )


def _last_logits(frozen: FrozenPass, logits: Any) -> Tensor | None:
    """The model's logits at each row's last real token, where the forward pass gave any."""
    if frozen.view.unembedding is None:
        return None
    last = query_positions(frozen.mask, -1)[..., None]
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        return None
    return (logits[:, 0] if logits.shape[1] == 1 else torch.take_along_dim(logits, last, dim=1)[:, 0]).detach()


def _prove(frozen: FrozenPass, verify: bool) -> None:
    """Find every block's layout, measure its error, and refuse a block that no layout reproduces."""
    tolerance = frozen.tolerance
    for layer in range(frozen.n_layers):
        block = frozen.view.blocks[layer]
        options = candidates(set(block.norms), block.has_mlp)
        known = frozen.layouts[-1] if frozen.layouts and frozen.layouts[-1] in options else None
        if known is not None and not verify:
            frozen.layouts.append(known)
            continue
        # the first block tells the candidates apart; for its like, one proof is enough
        layout = known or _choose(frozen, layer, options, tolerance)
        error = float("nan") if layout is None else frozen.prove_block(layer, layout)
        if layout is known and not error <= tolerance:
            layout = _choose(frozen, layer, options, tolerance)
            error = float("nan") if layout is None else frozen.prove_block(layer, layout)
        if layout is None or not error <= tolerance:
            errors = {option: frozen.prove_block(layer, option) for option in options}
            raise UnsupportedModelError(_refusal(frozen, layer, errors, tolerance))
        frozen.layouts.append(layout)
        frozen.errors[f"blocks.{layer}"] = error
    if not verify:
        return
    head = frozen.prove_head()
    unembed = frozen.unembedding_error if frozen.last_logits is not None else None
    if head is not None:
        frozen.errors["head"] = head
        if not head <= tolerance:
            raise UnsupportedModelError(
                f"what stands between the last block and the unembedding of this {frozen.view.description} is not a "
                f"norm or prediction head as we read it: relative error {head:.1e}, allowed {tolerance:.0e}."
            )
    if unembed is not None:
        frozen.errors["unembed"] = unembed


def _choose(frozen: FrozenPass, layer: int, options: Sequence[Layout], tolerance: float) -> Layout | None:
    """The one layout that reproduces a block (on its first tokens, where the block is causal), or None.

    Raises:
        UnsupportedModelError: two of them do.
    """
    short = _first_tokens(frozen, layer)
    parts = short._parts(layer)
    errors = {option: short._prove(layer, compose(option, *parts)) for option in options}
    passing = sorted((option for option in options if errors[option] <= tolerance), key=lambda option: errors[option])
    if len(passing) > 1 and errors[passing[1]] < 10 * errors[passing[0]] and not _same_map(short, layer, passing):
        raise UnsupportedModelError(
            f"blocks.{layer} of this {frozen.view.description}: two layouts reproduce it equally well "
            f"({errors[passing[0]]:.1e} and {errors[passing[1]]:.1e}), so this input cannot tell its structure; "
            "freeze a longer prompt, or in float64."
        )
    return passing[0] if passing else None


def _same_map(frozen: FrozenPass, layer: int, options: Sequence[Layout]) -> bool:
    """Whether layouts agree on random vectors too (a sublayer that writes nothing): then any of them is right."""
    x = frozen.resid_pre(layer)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x) * x.std()
    made = [frozen.block(layer, layout=option)(noise) for option in options[:2]]
    return frozen._relative_error(made[0], made[1]) <= frozen.tolerance


def _first_tokens(frozen: FrozenPass, layer: int, length: int = 8) -> FrozenPass:
    """One block of a pass, cut to its first tokens where these do not look ahead; else the whole pass."""
    mask = frozen.mask[:, :length]
    if bool(frozen.pattern(layer)[:, :, :length, length:].any()) or not bool(mask.any(1).all()):
        return frozen
    names = {*frozen.points.blocks[layer].captured, _output_name(frozen.points, layer)}
    cache = {name: frozen._kept(name)[:, :length] for name in names}
    cache[frozen.points.blocks[layer].pattern] = frozen.pattern(layer)[:, :, :length, :length]
    prompt = Prompt(frozen.tokens[:, :length], mask, {}, [])
    return FrozenPass(frozen.model, frozen.view, frozen.points, prompt, cache, tolerance=frozen.tolerance)


def _output_name(points: ModelPoints, layer: int) -> str:
    return points.blocks[layer + 1].resid_pre if layer + 1 < len(points.blocks) else points.last_output


def _refusal(frozen: FrozenPass, layer: int, errors: Mapping[Layout, float], tolerance: float) -> str:
    start = f"blocks.{layer} of this {frozen.view.description} cannot be frozen: "
    if not errors:
        norms = ", ".join(frozen.view.blocks[layer].norms) or "none"
        return start + f"no known layout has the norms it has ({norms})."
    best = min(errors, key=lambda layout: errors[layout])
    tried = ", ".join(f"{layout.name} {error:.1e}" for layout, error in errors.items())
    component = _culprit(frozen, layer, best, tolerance)
    return (
        start
        + f"composed from its weights it misses its own output (relative error: {tried}; allowed {tolerance:.0e}). "
        f"{component} Other hooks on the model, or a part that is not attention, norm or MLP, would explain it."
    )


def _culprit(frozen: FrozenPass, layer: int, layout: Layout, tolerance: float) -> str:
    """Which sublayer of a refused block disagrees, by comparing it alone; runs the model once more."""
    at = f"blocks.{layer}."
    names = [
        at + name
        for name in ("attn.hook_z", "mlp.hook_post", "hook_attn_out")
        if at + name in frozen.view.model.hook_dict
    ]
    seen, _ = capture(frozen.model, frozen.inputs, names)
    x = frozen.resid_pre(layer)
    x = frozen.norm(layer, layout.attn.before)(x) if layout.attn.before else x
    values, mixing, out = frozen.attention(layer).stages
    made = {"attn.hook_z": mixing(values(x))}
    if layout.attn.after is None:
        made["hook_attn_out"] = out(made["attn.hook_z"])
    weights, held = frozen.view.blocks[layer].mlp, frozen.mlp_coefficients(layer)
    if weights is not None and held is not None:
        points = frozen.points.blocks[layer]
        through = frozen._kept(points.pre_linear or points.pre or "")
        made["mlp.hook_post"] = through * held.through + _plus(held.rest, weights.b_post, held.through, zero=True)
    for name, mine in made.items():
        if at + name in seen and seen[at + name].numel() == mine.numel():
            own = seen[at + name].reshape(mine.shape)
            error = float((mine - own).norm() / own.norm().clamp_min(1e-30))
            if not error <= tolerance:
                return f"The first part that differs is {at}{name} ({error:.1e})."
    return f"Attention values and activations agree; the difference is in the norms or in {at}mlp."


def _plus(rest: Tensor | None, vector: Tensor | None, like: Tensor, zero: bool = False) -> Any:
    """rest + vector, where either may be missing."""
    if rest is None and vector is None:
        return torch.zeros_like(like) if zero else None
    if vector is None:
        return rest
    return vector.expand_as(like) if rest is None else rest + vector
