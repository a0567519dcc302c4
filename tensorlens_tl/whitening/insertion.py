"""Whitening put on a TransformerLens model."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import refuse_attached
from tensorlens_tl.models.protocol import ModelLike
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.whitening.estimation import WhiteningFilter
from tensorlens_tl.whitening.layer import Whitening, attach

Model = TypeVar("Model", bound=ModelLike)

READS = ("stream", "attention", "keys and values")
PROCESSING = ("process_weights_", "load_and_process_state_dict", "enable_compatibility_mode", "process_weights")
"""Methods of TransformerLens that may centre the weights that write to the residual stream."""


def whiten(model: Model, *, init: Any = "identity", reads: str = "stream", values: str = "kept") -> Model:
    """Put a whitening layer in front of every block: ``w_i = L⁻¹(x_i − M w_{i−1})`` (Whitened Self-Attention, Eq. 9).

    The model gets ``model.blocks[i].whitening`` with the hook points ``blocks.{i}.whitening.hook_in`` (the residual
    stream, what the block before it gave) and ``hook_out`` (what ``hook_resid_pre`` sees now). Training, hooks, caches
    and freezing work as before. ``stop_at_layer=i`` gives the stream before block i is whitened (a Bridge's
    ``run_with_cache``, which stops at the block's own hook, after). TransformerLens' own sums over the residual stream,
    as ``cache.decompose_resid``, know nothing of whitening. What the paper leaves open is an option:

    Args:
        model: a HookedTransformer or TransformerBridge; changed in place, and returned.
        init: ``"identity"`` changes nothing until it is trained; ``"random"`` draws both maps as `torch.nn.Linear`
            does; or a filter for each block (what `stream_filters` gave, or a list; their means are not used), or pairs
            ``(L_inv, M)``. Filters are a start for training: each was made for a stream that nothing else whitens, and
            a trained model that is given them predicts worse than before.
        reads: what is whitened. ``"stream"``, the default, is the paper's Figure 2: before the block and its norm, for
            attention and residual connection alike; the frozen model stays one affine map and every part of it can be
            read. ``"attention"`` whitens what attention reads, after the norm, and leaves the residual stream alone.
            ``"keys and values"`` leaves queries alone too, as Eq. 4 is printed (HookedTransformer only: others give
            queries, keys and values one input). Models with the latter two run and train, and are refused by `freeze`.
        values: ``"kept"``, the default, keeps W_V, as every head needs its own; ``"dropped"`` sets it to the identity,
            each head reading channels of its own, and stops its training: Eq. 4 has no V, which L⁻¹ contains. Folding a
            norm into it afterwards undoes that.

    Raises:
        InvalidInputError: whitened already; an unknown option; a filter of another width, or for another number of
            blocks.
        UnsupportedModelError: a model of another class, or one that takes images or sound; ``reads`` that its attention
            cannot separate; heads that do not share d_model evenly, for ``values="dropped"``.
    """
    view = ModelView(model)
    view.refuse_encoder_decoder("whiten")
    if view.is_hooked_encoder or not (view.is_bridge or hasattr(model, "setup")):
        raise UnsupportedModelError(
            f"whiten: {view.description} is neither a HookedTransformer nor a TransformerBridge."
        )
    if reads not in READS or values not in ("kept", "dropped"):
        raise InvalidInputError(
            f"whiten: reads={reads!r}, values={values!r}; reads is one of {', '.join(map(repr, READS))}, values is "
            "'kept' or 'dropped'."
        )
    if reads == "keys and values" and view.is_bridge:
        raise UnsupportedModelError(
            f"whiten: reads='keys and values' needs queries with an input of their own, which {view.description} "
            "does not have; use reads='attention'."
        )
    core: Any = view.model
    refuse_attached(core)
    if reads != "stream" and getattr(view.cfg, "positional_embedding_type", None) == "shortformer":
        raise UnsupportedModelError(
            f"whiten: reads={reads!r} needs one input for queries, keys and values; a shortformer adds positions to "
            "two of them."
        )
    modules = [block.module for block in view.blocks]
    attentions = [module.attn for module in modules]
    if any(getattr(module, "whitening", None) is not None for module in (*modules, *attentions)):
        raise InvalidInputError("whiten: this model is whitened already.")
    parents = modules if reads == "stream" else attentions
    parameter = next(core.parameters())
    width = view.cfg.d_model
    starts = _starts(init, width, len(parents))
    if values == "dropped":
        _drop_values(view)
    for layer, (parent, start) in enumerate(zip(parents, starts, strict=True)):
        whitening = Whitening(width, layer, reads).to(parameter)
        if start is not None:
            with torch.no_grad():
                L_inv, M = start
                whitening.L_inv.weight.copy_(L_inv)
                whitening.M.weight.copy_(M)
        whitening.train(core.training)
        attach(parent, whitening)
    if view.is_bridge:
        _register_on_bridge(core, parents[0].whitening, reads)
    else:
        core.setup()
    for name in PROCESSING:
        if hasattr(type(core), name):
            setattr(core, name, Uncentred(core, name))
    return model


class Uncentred:
    """A whitened model's method for processing weights, which refuses to centre the weights that write to the stream.

    Centring is harmless only where every reader of the stream subtracts its mean; whitening does not.
    """

    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The method itself.

        Raises:
            UnsupportedModelError: it would centre the weights.
        """
        method = getattr(type(self.model), self.name)
        bound = inspect.signature(method).bind(self.model, *args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        if arguments.get("center_writing_weights") and not arguments.get("no_processing"):
            raise UnsupportedModelError(
                f"{self.name}: center_writing_weights changes what a whitened model computes, as whitening reads the "
                "stream's mean. Pass center_writing_weights=False, or process the weights before whitening."
            )
        return method(self.model, *args, **kwargs)


def _starts(init: Any, width: int, blocks: int) -> Sequence[tuple[Tensor, Tensor] | None]:
    """L⁻¹ and M of every block, or None for the identity."""
    if isinstance(init, Mapping):  # by hook point, as `stream_filters` gives them; the last one belongs to no block
        names = [f"blocks.{layer}.hook_resid_pre" for layer in range(blocks)]
        if not set(names) <= set(init):
            raise InvalidInputError(f"whiten: init has filters for {', '.join(init)}; it needs {', '.join(names)}.")
        init = [init[name] for name in names]
    if isinstance(init, str):
        if init == "identity":
            return [None] * blocks
        if init == "random":
            matrices = [nn.Linear(width, width, bias=False).weight.detach() for _ in range(2 * blocks)]
            return list(zip(matrices[::2], matrices[1::2], strict=True))
    if isinstance(init, str) or not isinstance(init, Sequence):
        raise _bad_init(repr(init), blocks)
    if len(init) != blocks:
        raise _bad_init(f"{len(init)} filters", blocks)
    pairs = [(one.L_inv, one.M) if isinstance(one, WhiteningFilter) else one for one in init]
    for layer, pair in enumerate(pairs):
        if not isinstance(pair, Sequence) or not all(isinstance(matrix, Tensor) for matrix in pair):
            raise InvalidInputError(
                f"whiten: the filter of block {layer} is a {type(pair).__name__}; pass what `estimate` gives, or a "
                "pair of tensors (L_inv, M)."
            )
        shapes = [tuple(matrix.shape) for matrix in pair]
        if shapes != [(width, width)] * 2:
            raise InvalidInputError(
                f"whiten: the filter of block {layer} is {shapes}; this model needs two matrices of {(width, width)}."
            )
        if not all(bool(torch.isfinite(matrix).all()) for matrix in pair):
            raise InvalidInputError(f"whiten: the filter of block {layer} has values that are not finite.")
    return [(pair[0], pair[1]) for pair in pairs]


def _bad_init(description: str, blocks: int) -> InvalidInputError:
    return InvalidInputError(
        f"whiten: init is {description}; pass 'identity', 'random', or a filter (L_inv, M) for each of {blocks} blocks."
    )


def _drop_values(view: ModelView) -> None:
    """Set W_V to the identity, so that each head reads separate channels, without bias and without gradient."""
    for block in view.blocks:
        attn: Any = block.module.attn
        heads, width, d_head = attn.W_V.shape
        is_parameter = attn._parameters.get("W_V") is not None
        if view.is_bridge or not is_parameter or heads * d_head != width:
            raise UnsupportedModelError(
                f"whiten: values='dropped' needs a HookedTransformer whose heads share d_model evenly; blocks."
                f"{block.layer} of this {view.description} has W_V {(heads, width, d_head)}."
            )
    for block in view.blocks:
        attn = block.module.attn
        heads, width, d_head = attn.W_V.shape
        with torch.no_grad():
            attn.W_V.copy_(torch.eye(width).reshape(width, heads, d_head).transpose(0, 1))
            attn.b_V.zero_()
        attn.W_V.requires_grad_(False)
        attn.b_V.requires_grad_(False)


def _register_on_bridge(model: Any, whitening: Whitening, reads: str) -> None:
    """Register the new component on a TransformerBridge, which builds its state dict and hook points from a list."""
    component = model.adapter.component_mapping["blocks"]
    if reads != "stream":
        component = component.submodules["attn"]
    component.submodules["whitening"] = whitening
    model.clear_hook_registry()
    model._initialize_hook_registry()
