"""Whitening put on a TransformerLens model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import refuse_attached
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.whitening.adapters import adapter_of
from tensorlens_tl.whitening.estimation import WhiteningFilter
from tensorlens_tl.whitening.layer import Whitening, attach, detach

Model = TypeVar("Model", bound=ModelLike)
Filters = Sequence[tuple[Tensor, Tensor]]
"""L⁻¹ and M of every block."""

if TYPE_CHECKING:
    Init = (
        Literal["identity", "random"]
        | Mapping[str, WhiteningFilter]
        | Sequence[WhiteningFilter | Sequence[Tensor] | tuple[Tensor, Tensor]]
    )
    """What the layers start as."""

    Reads = Literal["stream", "attention", "keys and values"]
    Values = Literal["kept", "dropped"]
else:
    Init = Any
    Reads = Values = str

READS = ("stream", "attention", "keys and values")
VALUES = ("kept", "dropped")


@dataclass(frozen=True)
class WhitenOptions:
    """What is whitened, and what becomes of W_V; see `whiten`.

    Raises:
        InvalidInputError: an unknown option.
    """

    reads: Reads = "stream"
    values: Values = "kept"

    def __post_init__(self) -> None:
        if self.reads not in READS or self.values not in VALUES:
            raise InvalidInputError(
                f"whiten: reads={self.reads!r}, values={self.values!r}; reads is one of {', '.join(map(repr, READS))}, "
                "values is 'kept' or 'dropped'."
            )


@checked_names
def whiten(model: Model, *, init: Init = "identity", reads: Reads = "stream", values: Values = "kept") -> Model:
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

    >>> whitened = tlens.whiten(tlens.load_demo_model(kind="bridge"))
    >>> torch.allclose(whitened(text), model(text), atol=1e-5)  # it begins as the identity
    True
    """
    view = ModelView(model)
    view.require_chain("whiten")
    adapter = adapter_of(view)
    options = WhitenOptions(reads, values)
    if options.reads == "keys and values":
        adapter.check_separate_queries()
    core: Any = view.model
    refuse_attached(core)
    parents = _parents(view, options)
    filters = _filters(init, view.cfg.d_model, len(parents))
    if options.values == "dropped":
        adapter.set_values_to_identity()
    like = next(core.parameters())
    layers = [Whitening(view.cfg.d_model, layer, options.reads).to(like) for layer in range(len(parents))]
    for layer, (L_inv, M) in zip(layers, filters, strict=bool(filters)):
        with torch.no_grad():
            layer.L_inv.weight.copy_(L_inv)
            layer.M.weight.copy_(M)
    for parent, layer in zip(parents, layers, strict=True):
        layer.values = options.values
        attach(parent, layer.train(core.training))
    adapter.list_hook_points(layers)
    adapter.refuse_centring()
    return model


@checked_names
def unwhiten(model: Model) -> Model:
    """Take off what `whiten` put on: the layers, their hook points, and the refusal to centre weights.

    All other weights stay as they are, with what they learned beside the layers.

    Args:
        model: a model that `whiten` changed; changed in place, and returned.

    Raises:
        InvalidInputError: it is not whitened, or was with ``values="dropped"``, whose W_V are gone.
        UnsupportedModelError: a model of another class.

    >>> bridge = tlens.load_demo_model(kind="bridge")
    >>> logits = bridge(text)
    >>> torch.equal(tlens.unwhiten(tlens.whiten(bridge, init="random"))(text), logits)
    True
    """
    view = ModelView(model)
    adapter = adapter_of(view)
    refuse_attached(view.model)
    blocks: list[Any] = [block.module for block in view.blocks]
    modules = [*blocks, *(block.attn for block in blocks)]
    parents = [module for module in modules if getattr(module, "whitening", None) is not None]
    if not parents:
        raise InvalidInputError(f"unwhiten: this {view.description} is not whitened.")
    layers = [parent.whitening for parent in parents]
    if any(parent.whitening.values == "dropped" for parent in parents):
        raise InvalidInputError(
            "unwhiten: this model was whitened with values='dropped', which replaced its W_V; load it again."
        )
    for parent in parents:
        detach(parent)
    adapter.forget_hook_points(layers)
    adapter.allow_centring()
    return model


def _parents(view: ModelView, options: WhitenOptions) -> list[nn.Module]:
    """The modules whose input is whitened: blocks, or their attention.

    Raises:
        InvalidInputError: whitened already.
        UnsupportedModelError: attention that reads several inputs.
    """
    if options.reads != "stream" and getattr(view.cfg, "positional_embedding_type", None) == "shortformer":
        raise UnsupportedModelError(
            f"whiten: reads={options.reads!r} needs one input for queries, keys and values; a shortformer adds "
            "positions to two of them."
        )
    blocks = [block.module for block in view.blocks]
    attentions = [block.attn for block in blocks]
    if any(getattr(module, "whitening", None) is not None for module in (*blocks, *attentions)):
        raise InvalidInputError(
            "whiten: this model is whitened already; take that off by unwhiten(model), or load it again."
        )
    if options.reads == "stream":
        return blocks
    return attentions


def _filters(init: Init, width: int, blocks: int) -> Filters:
    """L⁻¹ and M of every block; none for the identity.

    Raises:
        InvalidInputError: see `whiten`.
    """
    match init:
        case str("identity"):
            return []
        case str("random"):
            matrices = [nn.Linear(width, width, bias=False).weight.detach() for _ in range(2 * blocks)]
            return list(zip(matrices[::2], matrices[1::2], strict=True))
        case str():
            raise _bad_init(repr(init), blocks)
        case Mapping():  # by hook point, as `stream_filters` gives them; the last one belongs to no block
            names = [f"blocks.{layer}.hook_resid_pre" for layer in range(blocks)]
            if not set(names) <= set(init):
                raise InvalidInputError(f"whiten: init has filters for {', '.join(init)}; it needs {', '.join(names)}.")
            return [_filter(init[name], width, layer) for layer, name in enumerate(names)]
        case Sequence():
            if len(init) != blocks:
                raise _bad_init(f"{len(init)} filters", blocks)
            return [_filter(start, width, layer) for layer, start in enumerate(init)]
        case _:
            raise _bad_init(repr(init), blocks)


def _filter(start: object, width: int, layer: int) -> tuple[Tensor, Tensor]:
    """L⁻¹ and M of one block.

    Raises:
        InvalidInputError: neither a filter nor a pair of tensors, of another width, or not finite.
    """
    if isinstance(start, WhiteningFilter):
        start = (start.L_inv, start.M)
    if not isinstance(start, Sequence) or not all(isinstance(matrix, Tensor) for matrix in start):
        raise InvalidInputError(
            f"whiten: the filter of block {layer} is a {type(start).__name__}; pass what `estimate` gives, or a "
            "pair of tensors (L_inv, M)."
        )
    shapes = [tuple(matrix.shape) for matrix in start]
    if shapes != [(width, width)] * 2:
        raise InvalidInputError(
            f"whiten: the filter of block {layer} is {shapes}; this model needs two matrices of {(width, width)}."
        )
    if not all(bool(torch.isfinite(matrix).all()) for matrix in start):
        raise InvalidInputError(f"whiten: the filter of block {layer} has values that are not finite.")
    L_inv, M = start
    return L_inv, M


def _bad_init(description: str, blocks: int) -> InvalidInputError:
    return InvalidInputError(
        f"whiten: init is {description}; pass 'identity', 'random', or a filter (L_inv, M) for each of {blocks} blocks."
    )
