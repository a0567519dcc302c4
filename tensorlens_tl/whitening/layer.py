"""Whitening as a layer to train: w_i = L⁻¹(x_i − M w_{i−1}) before a block (Whitened Self-Attention, Eq. 9, Figure 2).

`Whitening` is the layer; `attach` puts it in front of any module that takes the residual stream, by one forward
pre-hook, so the module's own code stays untouched. `tensorlens_tl.whitening.insertion` does so for whole models.
"""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from tensorlens_tl.algebra.recursion import scan, spectral_radius
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError


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
    """

    # what a TransformerBridge asks of a component
    name, is_list_item = "whitening", False

    def __init__(self, width: int, layer: int = 0, reads: str = "stream") -> None:
        super().__init__()
        self.layer, self.reads = layer, reads
        self.submodules: dict[str, Any] = {}
        self.hook_aliases: dict[str, str] = {}
        self.L_inv, self.M = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.hook_in, self.hook_out = HookPoint(), HookPoint()
        self.mask: Bool[Tensor, "batch pos"] | None = None
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
        if mask is None:
            return self.hook_out(scan(x @ self.entry, self.step))
        padding = ~mask[..., None].to(x.device)  # what some models make of it is not even finite
        whitened = scan(x.masked_fill(padding, 0) @ self.entry, self.step)
        return self.hook_out(whitened.masked_fill(padding, 0))


def attach(module: nn.Module, whitening: nn.Module) -> None:
    """Put a whitening layer in front of a module, as ``module.whitening``.

    Args:
        module: a transformer block, of TransformerLens or of Hugging Face; its first input, or ``hidden_states``, is
            the stream.
        whitening: a `Whitening`, or another module of ``(x, mask)``.

    Raises:
        InvalidInputError: the module has one already.
    """
    if getattr(module, "whitening", None) is not None:
        raise InvalidInputError("whiten: this model is whitened already; whitening twice is one filter too many.")
    module.whitening = whitening
    module.register_forward_pre_hook(_whitened, with_kwargs=True)


def _whitened(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """The pre-hook; it finds its layer on the module itself, so that copies of a model use their own."""
    whitening: Any = module.whitening
    if getattr(module, "_stop_at_layer_idx", None) == getattr(whitening, "layer", -1):
        return None  # a TransformerBridge stops before this block: it is asked for the stream before whitening
    _refuse_cache(getattr(whitening, "layer", 0), (*args, *kwargs.values()))
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        mask = getattr(whitening, "mask", None)
    mask = None if mask is None or bool(mask.all()) else mask.bool()
    names = {"attention": ("value_input", "key_input", "query_input"), "keys and values": ("value_input", "key_input")}
    given = [name for name in names.get(getattr(whitening, "reads", ""), ()) if name in kwargs]
    if given:  # HookedTransformer's attention gets its input three times over
        whitened = whitening(kwargs[given[0]], mask)
        return args, kwargs | dict.fromkeys(given, whitened)
    if args:
        return (whitening(args[0], mask), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": whitening(kwargs["hidden_states"], mask)}


def _refuse_cache(layer: int, inputs: tuple[Any, ...]) -> None:
    """Raise where the module continues from a key–value cache: the last w of the tokens in it is not known.

    Raises:
        UnsupportedModelError: the cache holds tokens.
    """
    for given in inputs:
        held = 0
        if hasattr(given, "get_seq_length"):  # transformers' caches
            held = int(given.get_seq_length(layer))
        elif hasattr(given, "past_keys"):  # HookedTransformer's
            held = given.past_keys.shape[1]
        elif isinstance(given, tuple) and len(given) == 2 and all(isinstance(t, Tensor) and t.ndim == 4 for t in given):
            held = given[0].shape[-2]
        if held:
            raise UnsupportedModelError(
                f"a whitened model cannot continue from a key–value cache ({held} tokens at block {layer}): whitening "
                "needs the last whitened vector, which the cache does not hold. Generate with use_past_kv_cache=False."
            )
