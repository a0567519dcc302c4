"""Whitening as a layer to train: w_i = L⁻¹(x_i − M w_{i−1}) before a block (Whitened Self-Attention, Eq. 9, Figure 2).

`Whitening` is the layer; `attach` puts it in front of any module that takes the residual stream, by one forward
pre-hook, so the module's own code stays untouched. `tensorlens_tl.whitening.insertion` does so for whole models.
"""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra import scan_where, spectral_radius
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError


@runtime_checkable
class TransformersCache(Protocol):
    """The key–value caches of transformers."""

    def get_seq_length(self, layer_idx: int) -> int:
        """The tokens that a layer has."""
        ...


@runtime_checkable
class HookedCache(Protocol):
    """The key–value cache of one block of a HookedTransformer."""

    past_keys: Tensor


class Whitening(nn.Module):
    """``w_i = L⁻¹(x_i − M w_{i−1})``: two dense linear maps without bias, shared by all heads.

    It starts as the identity (L⁻¹ = 1, M = 0), which changes nothing. The maps are `torch.nn.Linear` modules, so that
    their parameters end in ``.weight``: a TransformerBridge leaves anything else out of its state dict.

    Args:
        width: d_model.
        layer: the block's number, by which a key–value cache tells how many tokens it holds.

    Attributes:
        L_inv, M: the maps, acting on column vectors as in the paper.
        hook_in, hook_out: TransformerLens hook points: the stream x before whitening, and w.
        reads: which of a module's inputs are whitened: ``"stream"``, or an attention layer's ``"attention"`` or
            ``"keys and values"``.
        values: whether the model's W_V were ``"kept"`` when it was put on, or ``"dropped"``.
    """

    # TransformerBridge reads these of its components
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
        """What `print(model)` says of it."""
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
        """The spectral radius of L⁻¹M: what is left of a vector one position later, in the long run.

        Above 1 every position outgrows the one before it.
        """
        return spectral_radius(self.step.detach())

    def forward(
        self, x: Float[Tensor, "batch pos d"], mask: Bool[Tensor, "batch pos"] | None = None
    ) -> Float[Tensor, "batch pos d"]:
        """The whitened stream; positions where `mask` is False (padding) are left out of the recursion."""
        x = self.hook_in(x)
        if x.ndim != 3:
            raise UnsupportedModelError(
                f"whitening needs a stream [batch, pos, d_model], got {tuple(x.shape)}; switch "
                "use_split_qkv_input and use_attn_in off."
            )
        if mask is not None:
            mask = mask.to(x.device)
        with torch.autocast(x.device.type, enabled=False):  # which would round the residual stream
            return self.hook_out(scan_where(x @ self.entry.to(x), self.step.to(x), mask))


@checked_names
def attach(module: nn.Module, whitening: nn.Module) -> None:
    """Put a whitening layer in front of a module, as ``module.whitening``, by one forward pre-hook.

    This is for your modules, such as the blocks of a Hugging Face model in training; a TransformerLens model also has
    to list its new part, as `tensorlens_tl.whiten` does.

    >>> from tensorlens_tl.whitening import Whitening, attach
    >>> block = torch.nn.Identity()
    >>> attach(block, Whitening(4, layer=0))
    >>> x = torch.randn(2, 5, 4)
    >>> torch.equal(block(x), x)  # a new layer is the identity
    True

    Args:
        module: a transformer block whose first input, or ``hidden_states``, is the stream; or its attention.
        whitening: a `Whitening`, or another module of ``(x, mask)`` with a ``layer``.

    Raises:
        InvalidInputError: the module has one already.
    """
    if getattr(module, "whitening", None) is not None:
        raise InvalidInputError("attach: this module is whitened already; whitening twice is one filter too many.")
    module.whitening = whitening
    if _whitened not in module._forward_pre_hooks.values():  # it stays when somebody takes the layer away
        module.register_forward_pre_hook(_whitened, with_kwargs=True)


@checked_names
def detach(module: nn.Module) -> None:
    """Take a whitening layer off a module that `attach` put it on.

    >>> from tensorlens_tl.whitening import Whitening, attach, detach
    >>> block = torch.nn.Identity()
    >>> attach(block, Whitening(4, layer=0))
    >>> detach(block)
    >>> len(block._forward_pre_hooks)
    0

    Raises:
        InvalidInputError: the module has none.
    """
    if getattr(module, "whitening", None) is None:
        raise InvalidInputError("detach: this module is not whitened.")
    del module.whitening
    for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _whitened]:
        del module._forward_pre_hooks[number]
        module._forward_pre_hooks_with_kwargs.pop(number, None)


def _whitened(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The pre-hook; it finds its layer on the module itself, so that copies of a model use their own."""
    whitening: Any = module.whitening
    # a TransformerBridge that stops before this block gives the stream before whitening
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
        module._start_residual = whitening(module._start_residual, mask)  # a Bridge puts it in place of the input
        return None
    names = {"attention": ("value_input", "key_input", "query_input"), "keys and values": ("value_input", "key_input")}
    input_names = [name for name in names.get(reads, ()) if name in kwargs]
    if input_names:  # HookedTransformer's attention gets its input three times over
        whitened = whitening(kwargs[input_names[0]], mask)
        return args, kwargs | dict.fromkeys(input_names, whitened)
    if args:
        return (whitening(args[0], mask), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": whitening(kwargs["hidden_states"], mask)}


def _real_positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bool[Tensor, "batch pos"] | None:
    """Which positions are no padding, from the attention mask that a block is given; None for all.

    A mask of scores `[batch, 1, query, key]` lets every token see itself, and no padding.

    Raises:
        UnsupportedModelError: a mask of another shape, or one that lets padding see everything, as fused attention's.
    """
    unnamed = [value for value in args[1:] if isinstance(value, Tensor) and value.ndim == 4]  # as GPT-2's
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
    """Where a mask lets tokens attend: a mask of scores is zero there, a mask of positions is not."""
    if mask.dtype == torch.bool:
        return mask
    if mask.ndim == 4:
        return mask == 0
    return mask != 0


def _refuse_cache(layer: int, inputs: tuple[object, ...]) -> None:
    """Raise where the module continues from a key–value cache: the last w of the tokens in it is not known.

    Raises:
        UnsupportedModelError: the cache holds tokens.
    """
    cached = max((_cached_tokens(layer, value) for value in inputs), default=0)
    if cached:
        raise UnsupportedModelError(
            f"a whitened model cannot continue from a key–value cache ({cached} tokens at block {layer}): whitening "
            "needs the last whitened vector, which the cache does not hold. Generate with use_past_kv_cache=False "
            "(TransformerLens) or use_cache=False (transformers)."
        )


def _cached_tokens(layer: int, value: object) -> int:
    """The tokens in a block's key–value cache; 0 of a value that is no cache."""
    if isinstance(value, TransformersCache):
        return int(value.get_seq_length(layer))
    if isinstance(value, HookedCache):
        return value.past_keys.shape[1]
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(t, Tensor) and t.ndim == 4 for t in value):
        return value[0].shape[-2]
    return 0
