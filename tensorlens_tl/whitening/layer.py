"""Whitening as a trainable layer: w_i = L⁻¹(x_i − M w_{i−1}) before a block (Whitened Self-Attention, Eq. 9, Figure 2).

`Whitening` is the layer. `attach` puts it in front of any module that takes the residual stream, using one forward
pre-hook, so the module's own code is unchanged. `whiten` does so for whole TransformerLens models, with an adapter for
each model class, and `unwhiten` removes it.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra import scan_where, spectral_radius
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import refuse_attached
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.whitening.measures import WhiteningFilter


class Whitening(nn.Module):
    """``w_i = L⁻¹(x_i − M w_{i−1})``: two dense linear maps without bias, shared by all heads.

    It starts as the identity (L⁻¹ = 1, M = 0). The maps are `torch.nn.Linear` modules because a TransformerBridge omits
    parameters whose names do not end in ``.weight`` from its state dict.

    Args:
        width: d_model.
        layer: the block's number, used to look up how many tokens a key–value cache holds.

    Attributes:
        L_inv, M: the maps, acting on column vectors as in the paper.
        hook_in, hook_out: TransformerLens hook points for the stream x before whitening, and for w.
        reads: what is whitened: ``"stream"``, or an attention layer's ``"attention"`` or ``"keys and values"`` input.
        values: whether the model's W_V were ``"kept"`` or ``"dropped"`` when the layer was added.
    """

    # attributes that TransformerBridge reads from its components
    name = "whitening"
    is_list_item = False

    def __init__(self, width: int, layer: int, reads: str = "stream") -> None:
        super().__init__()
        self.layer = layer
        self.reads = reads
        self.values = "kept"
        self.submodules: dict[str, Any] = {}
        self.hook_aliases: dict[str, str] = {}
        self.L_inv = nn.Linear(width, width, bias=False)
        self.M = nn.Linear(width, width, bias=False)
        self.hook_in = HookPoint()
        self.hook_out = HookPoint()
        nn.init.eye_(self.L_inv.weight)
        nn.init.zeros_(self.M.weight)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows for it."""
        return "w_i = L⁻¹(x_i − M w_{i−1})"

    @property
    def entry(self) -> Float[Tensor, "d d"]:
        """``(L⁻¹)ᵀ``, for vectors as rows: ``w_i = x_i @ entry + w_{i−1} @ step``."""
        return self.L_inv.weight.mT

    @property
    def step(self) -> Float[Tensor, "d d"]:
        """``−(L⁻¹M)ᵀ``, for vectors as rows."""
        return -(self.L_inv.weight @ self.M.weight).mT

    @property
    def radius(self) -> float:
        """The spectral radius of L⁻¹M, the factor by which a vector's influence decays per position in the long run.

        Above 1, every position outgrows the one before it.
        """
        return spectral_radius(self.step.detach())

    def forward(
        self, x: Float[Tensor, "batch pos d"], mask: Bool[Tensor, "batch pos"] | None = None
    ) -> Float[Tensor, "batch pos d"]:
        """Whiten the stream; positions where `mask` is False (padding) are skipped by the recursion."""
        x = self.hook_in(x)
        if x.ndim != 3:
            raise UnsupportedModelError(
                f"whitening needs a stream [batch, pos, d_model], got {tuple(x.shape)}; switch "
                "use_split_qkv_input and use_attn_in off."
            )
        if mask is not None:
            mask = mask.to(x.device)
        with torch.autocast(x.device.type, enabled=False):  # autocast would round the residual stream
            return self.hook_out(scan_where(x @ self.entry.to(x), self.step.to(x), mask))


@checked_names
def attach(module: nn.Module, whitening: nn.Module) -> None:
    """Put a whitening layer in front of a module, as ``module.whitening``, by one forward pre-hook.

    For modules of your own, such as the blocks of a Hugging Face model in training. A TransformerLens model must also
    list its new part, which `tensorlens_tl.whiten` takes care of.

    >>> from tensorlens_tl.whitening import Whitening, attach
    >>> block = torch.nn.Identity()
    >>> attach(block, Whitening(4, layer=0))
    >>> x = torch.randn(2, 5, 4)
    >>> torch.equal(block(x), x)  # a new layer is the identity
    True

    Args:
        module: a transformer block whose first input, or ``hidden_states``, is the stream; or its attention.
        whitening: a `Whitening`, or another module of ``(x, mask)`` with an attribute ``layer``.

    Raises:
        InvalidInputError: the module is whitened already.
    """
    if getattr(module, "whitening", None) is not None:
        raise InvalidInputError("attach: this module is whitened already; whitening twice is one filter too many.")
    module.whitening = whitening
    if _whitened not in module._forward_pre_hooks.values():  # remains if only the layer was deleted
        module.register_forward_pre_hook(_whitened, with_kwargs=True)


@checked_names
def detach(module: nn.Module) -> None:
    """Remove a whitening layer that `attach` put on a module.

    >>> from tensorlens_tl.whitening import Whitening, attach, detach
    >>> block = torch.nn.Identity()
    >>> attach(block, Whitening(4, layer=0))
    >>> detach(block)
    >>> len(block._forward_pre_hooks)
    0

    Raises:
        InvalidInputError: the module is not whitened.
    """
    if getattr(module, "whitening", None) is None:
        raise InvalidInputError("detach: this module is not whitened.")
    del module.whitening
    for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _whitened]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def _whitened(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Whiten a module's input, as its pre-hook; reads the layer from the module, so that copies use their own."""
    whitening: Any = module.whitening
    # a TransformerBridge that stops before this block returns the stream before whitening
    if whitening is None or getattr(module, "_stop_at_layer_idx", None) == whitening.layer:
        return None
    _refuse_cache(whitening.layer, (*args, *kwargs.values()))
    reads = getattr(whitening, "reads", "stream")
    mask = _real_positions(args, kwargs)
    config = getattr(module, "config", getattr(module, "cfg", None))
    if reads != "stream" and (getattr(config, "use_split_qkv_input", 0) or getattr(config, "use_attn_in", 0)):
        raise UnsupportedModelError(
            f"whitening with reads={reads!r} needs one input for queries, keys and values; switch "
            "use_split_qkv_input and use_attn_in off."
        )
    if getattr(module, "_start_at_layer_idx", None) == whitening.layer and module._start_residual is not None:
        module._start_residual = whitening(module._start_residual, mask)  # which a Bridge uses instead of the input
        return None
    names = {"attention": ("value_input", "key_input", "query_input"), "keys and values": ("value_input", "key_input")}
    input_names = [name for name in names.get(reads, ()) if name in kwargs]
    if input_names:  # HookedTransformer's attention receives its input three times
        whitened = whitening(kwargs[input_names[0]], mask)
        return args, kwargs | dict.fromkeys(input_names, whitened)
    if args:
        return (whitening(args[0], mask), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": whitening(kwargs["hidden_states"], mask)}


def _real_positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bool[Tensor, "batch pos"] | None:
    """Return which positions are not padding, from the attention mask passed to a block; None for all.

    In a mask of scores `[batch, 1, query, key]`, every token can see itself but no padding.
    """
    unnamed = [value for value in args[1:] if isinstance(value, Tensor) and value.ndim == 4]  # positional, as in GPT-2
    mask = kwargs.get("attention_mask")
    if mask is None:
        mask = next(iter(unnamed), None)
    if not isinstance(mask, Tensor):
        return None
    allowed = _allowed(mask)
    if allowed.ndim == 4 and allowed.shape[2] == 1:
        allowed = allowed[:, 0, 0]
    elif allowed.ndim == 4:
        ahead = allowed[:, 0].triu(1).any(-1)[:, :-1]
        if bool(ahead.any()) and not bool(ahead.all()):
            raise UnsupportedModelError(
                "whitening cannot tell padding from this attention mask, in which some tokens see later ones and "
                "others do not (fused attention lets padding see everything): use attn_implementation='eager'."
            )
        allowed = allowed[:, 0].diagonal(dim1=-2, dim2=-1)
    if allowed.ndim != 2:
        raise UnsupportedModelError(
            f"whitening cannot tell padding from an attention mask of shape {tuple(mask.shape)}; pass [batch, pos]."
        )
    if bool(allowed.all()):
        return None
    return allowed


def _allowed(mask: Tensor) -> Bool[Tensor, "..."]:
    """Return where a mask allows attention: zeros in a mask of scores, non-zeros in a mask of positions."""
    if mask.dtype == torch.bool:
        return mask
    if mask.ndim == 4:
        return mask == 0
    return mask != 0


def _refuse_cache(layer: int, inputs: tuple[object, ...]) -> None:
    """Raise if the module continues from a key–value cache, since the last w of the cached tokens is unknown."""
    cached = max((_cached_tokens(layer, value) for value in inputs), default=0)
    if cached:
        raise UnsupportedModelError(
            f"a whitened model cannot continue from a key–value cache ({cached} tokens at block {layer}): whitening "
            "needs the last whitened vector, which the cache does not hold. Generate with use_past_kv_cache=False "
            "(TransformerLens) or use_cache=False (transformers)."
        )


def _cached_tokens(layer: int, value: Any) -> int:
    """Return the number of tokens in a block's key–value cache; 0 if the value is not a cache."""
    if hasattr(value, "get_seq_length"):  # of transformers
        return int(value.get_seq_length(layer))
    if hasattr(value, "past_keys"):  # of one HookedTransformer block
        return value.past_keys.shape[1]
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(t, Tensor) and t.ndim == 4 for t in value):
        return value[0].shape[-2]
    return 0


class Uncentred:
    """A wrapper for a whitened model's weight processing, which must not centre weights that write to the stream.

    Centring is only harmless if every reader of the stream subtracts its mean, which whitening does not.
    TransformerLens offers no hook to intervene before it centres.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model = model
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own method, or raise `UnsupportedModelError` if it would centre the weights."""
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


class WhiteningAdapter(ABC):
    """The steps of `whiten` for one class of models; `processing` lists methods that may centre weights."""

    processing: ClassVar[tuple[str, ...]]

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.model: Any = view.model

    @abstractmethod
    def check_separate_queries(self) -> None:
        """Raise `UnsupportedModelError` if queries share their input with keys and values."""

    @abstractmethod
    def set_values_to_identity(self) -> None:
        """Set W_V to a frozen identity without bias, so that each head reads its own channels; raise if impossible."""

    @abstractmethod
    def list_hook_points(self, layers: Sequence[Whitening]) -> None:
        """List the hook points of whitening layers that were added to the blocks, one for each."""

    @abstractmethod
    def forget_hook_points(self, layers: Sequence[Whitening]) -> None:
        """Remove the hook points of whitening layers that were taken off."""

    def allow_centring(self) -> None:
        """Undo `refuse_centring`."""
        for name in self.processing:
            self.model.__dict__.pop(name, None)

    def refuse_centring(self) -> None:
        """Make weight processing raise an error if it would centre weights."""
        for name in self.processing:
            setattr(self.model, name, Uncentred(self.model, name))

    def values_refused(self, layer: int) -> UnsupportedModelError:
        """Return the error for values that cannot be the identity."""
        shape = tuple(self.model.blocks[layer].attn.W_V.shape)
        return UnsupportedModelError(
            f"whiten: values='dropped' needs a HookedTransformer whose heads share d_model evenly; blocks.{layer} of "
            f"this {self.view.description} has W_V {shape}."
        )


class HookedAdapter(WhiteningAdapter):
    """The adapter for HookedTransformer, whose attention has separate inputs for queries, keys and values."""

    processing = ("process_weights_", "load_and_process_state_dict")

    def check_separate_queries(self) -> None:
        """Accept any model of this class."""

    def set_values_to_identity(self) -> None:
        """See `WhiteningAdapter`; heads must share d_model evenly, with values of their own."""
        attentions = [block.attn for block in self.model.blocks]
        for layer, attn in enumerate(attentions):
            heads, width, d_head = attn.W_V.shape
            is_parameter = attn._parameters.get("W_V") is not None  # with grouped queries, it is a view
            if not is_parameter or heads * d_head != width:
                raise self.values_refused(layer)
        for attn in attentions:
            heads, width, d_head = attn.W_V.shape
            with torch.no_grad():
                attn.W_V.copy_(torch.eye(width).reshape(width, heads, d_head).transpose(0, 1))
                attn.b_V.zero_()
            attn.W_V.requires_grad_(False)
            attn.b_V.requires_grad_(False)

    def list_hook_points(self, layers: Sequence[Whitening]) -> None:
        """Do the same through the model, which finds its hook points itself."""
        self.model.setup()

    def forget_hook_points(self, layers: Sequence[Whitening]) -> None:
        """Do the same as when listing them."""
        self.model.setup()


class BridgeAdapter(WhiteningAdapter):
    """The adapter for TransformerBridge, which lists its components and hook points."""

    processing = ("enable_compatibility_mode", "process_weights")

    def check_separate_queries(self) -> None:
        """Raise, since a Bridge's attention has a single input."""
        raise UnsupportedModelError(
            f"whiten: reads='keys and values' needs queries with an input of their own, which {self.view.description} "
            "does not have; use reads='attention'."
        )

    def set_values_to_identity(self) -> None:
        """Raise, since a Bridge's W_V is a view of another weight."""
        raise self.values_refused(0)

    def list_hook_points(self, layers: Sequence[Whitening]) -> None:
        """Register the layer as a component, which adds it to the state dict, and each of its hook points."""
        component = self.model.adapter.component_mapping["blocks"]
        prefix = "whitening"
        if layers[0].reads != "stream":
            component = component.submodules["attn"]
            prefix = "attn.whitening"
        component.submodules["whitening"] = layers[0]
        for layer, whitening in enumerate(layers):
            for end in ("hook_in", "hook_out"):
                name = f"blocks.{layer}.{prefix}.{end}"
                setattr(self.model, name, getattr(whitening, end))  # a Bridge registers hook points on assignment
                delattr(self.model, name)  # the hook point still belongs to the layer

    def forget_hook_points(self, layers: Sequence[Whitening]) -> None:
        """Remove the layer from the components, and its hook points from the registry."""
        blocks = self.model.adapter.component_mapping["blocks"]
        for component in (blocks, blocks.submodules.get("attn")):
            if component is not None:
                component.submodules.pop("whitening", None)
        gone = {id(point) for layer in layers for point in (layer.hook_in, layer.hook_out)}
        registry = self.model._hook_registry
        for name in [name for name, point in registry.items() if id(point) in gone]:
            del registry[name]


def adapter_of(view: ModelView) -> WhiteningAdapter:
    """Return the adapter for a model's class."""
    if view.is_bridge:
        return BridgeAdapter(view)
    if view.is_hooked_encoder or not hasattr(view.model, "setup"):
        raise UnsupportedModelError(
            f"whiten: {view.description} is neither a HookedTransformer nor a TransformerBridge."
        )
    return HookedAdapter(view)


Model = TypeVar("Model", bound=ModelLike)
Filters = Sequence[tuple[Tensor, Tensor]]
"""L⁻¹ and M of every block."""

if TYPE_CHECKING:
    Init = (
        Literal["identity", "random"]
        | Mapping[str, WhiteningFilter]
        | Sequence[WhiteningFilter | Sequence[Tensor] | tuple[Tensor, Tensor]]
    )
    """The initial state of the layers."""

    Reads = Literal["stream", "attention", "keys and values"]
    Values = Literal["kept", "dropped"]
else:
    Init = Any
    Reads = Values = str

READS = ("stream", "attention", "keys and values")
VALUES = ("kept", "dropped")


@checked_names
def whiten(model: Model, *, init: Init = "identity", reads: Reads = "stream", values: Values = "kept") -> Model:
    """Put a whitening layer in front of every block: ``w_i = L⁻¹(x_i − M w_{i−1})`` (Whitened Self-Attention, Eq. 9).

    The model gets ``model.blocks[i].whitening`` with hook points ``blocks.{i}.whitening.hook_in`` (the residual stream)
    and ``hook_out`` (what ``hook_resid_pre`` now shows). Training, hooks, caches and freezing work as before.
    ``stop_at_layer=i`` returns the stream before block i is whitened (a Bridge's ``run_with_cache``: after).
    TransformerLens' own sums over the stream, such as ``cache.decompose_resid``, ignore whitening. The options cover
    choices that the paper leaves open.

    Args:
        model: a HookedTransformer or TransformerBridge; it is changed in place and returned.
        init: ``"identity"`` changes nothing until it is trained; ``"random"`` initialises both maps as
            `torch.nn.Linear` does. Or a filter for each block (from `stream_filters`, or a list; their means are
            ignored), or pairs ``(L_inv, M)``. Filters are only a starting point for training: each was estimated with
            nothing else whitened, and makes a trained model's predictions worse.
        reads: what is whitened. ``"stream"`` (default) is the paper's Figure 2: before the block and its norm, for
            attention and residual connection alike; the frozen model stays one affine map, and all of its parts can be
            read. ``"attention"`` whitens attention's input, after the norm. ``"keys and values"`` leaves out the
            queries, as Eq. 4 is printed (HookedTransformer only: elsewhere queries, keys and values share one input).
            Models with the latter two run and train, but cannot be frozen.
        values: ``"kept"`` (default) keeps W_V, since every head needs its own. ``"dropped"`` sets it to the identity,
            so that each head reads its own channels, and stops its training: Eq. 4 has no V, which L⁻¹ absorbs. Folding
            a norm into it afterwards undoes that.

    Raises:
        InvalidInputError: the model is whitened already, an option is unknown, or filters have the wrong width or
            number.
        UnsupportedModelError: a model of another class, or one that reads images or sound; ``reads`` that its attention
            cannot separate; or, for ``values="dropped"``, heads that do not share d_model evenly.

    >>> whitened = tlens.whiten(tlens.load_demo_model(kind="bridge"))
    >>> torch.allclose(whitened(text), model(text), atol=1e-5)  # starts as the identity
    True
    """
    view = ModelView(model)
    view.require_chain("whiten")
    adapter = adapter_of(view)
    if reads not in READS or values not in VALUES:
        raise InvalidInputError(
            f"whiten: reads={reads!r}, values={values!r}; reads is one of {', '.join(map(repr, READS))}, values is "
            "'kept' or 'dropped'."
        )
    if reads == "keys and values":
        adapter.check_separate_queries()
    core: Any = view.model
    refuse_attached(core)
    parents = _parents(view, reads)
    filters = _filters(init, view.cfg.d_model, len(parents))
    if values == "dropped":
        adapter.set_values_to_identity()
    like = next(core.parameters())
    layers = [Whitening(view.cfg.d_model, layer, reads).to(like) for layer in range(len(parents))]
    for layer, (L_inv, M) in zip(layers, filters, strict=bool(filters)):
        with torch.no_grad():
            layer.L_inv.weight.copy_(L_inv)
            layer.M.weight.copy_(M)
    for parent, layer in zip(parents, layers, strict=True):
        layer.values = values
        attach(parent, layer.train(core.training))
    adapter.list_hook_points(layers)
    adapter.refuse_centring()
    return model


@checked_names
def unwhiten(model: Model) -> Model:
    """Remove what `whiten` put on a model, in place, and return the model; all other weights stay as they are.

    Raises:
        InvalidInputError: the model is not whitened, or was with ``values="dropped"``, so that its W_V are lost.
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


def _parents(view: ModelView, reads: Reads) -> list[nn.Module]:
    """Return the modules whose input is whitened: blocks, or their attention."""
    if reads != "stream" and getattr(view.cfg, "positional_embedding_type", None) == "shortformer":
        raise UnsupportedModelError(
            f"whiten: reads={reads!r} needs one input for queries, keys and values; a shortformer adds "
            "positions to two of them."
        )
    blocks = [block.module for block in view.blocks]
    attentions = [block.attn for block in blocks]
    if any(getattr(module, "whitening", None) is not None for module in (*blocks, *attentions)):
        raise InvalidInputError(
            "whiten: this model is whitened already; undo that with unwhiten(model), or load it again."
        )
    if reads == "stream":
        return blocks
    return attentions


def _filters(init: Init, width: int, blocks: int) -> Filters:
    """Return L⁻¹ and M of every block; empty for the identity."""
    match init:
        case str("identity"):
            return []
        case str("random"):
            matrices = [nn.Linear(width, width, bias=False).weight.detach() for _ in range(2 * blocks)]
            return list(zip(matrices[::2], matrices[1::2], strict=True))
        case str():
            raise _bad_init(repr(init), blocks)
        case Mapping():  # by hook point, from `stream_filters`; the last one belongs to no block
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
    if isinstance(start, WhiteningFilter):
        start = (start.L_inv, start.M)
    if not isinstance(start, Sequence) or not all(isinstance(matrix, Tensor) for matrix in start):
        raise InvalidInputError(
            f"whiten: the filter of block {layer} is a {type(start).__name__}; pass a filter from `estimate`, or a "
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
