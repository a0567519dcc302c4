"""What putting whitening on a model asks of its class: one adapter for HookedTransformer, one for TransformerBridge."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models import ModelView
from tensorlens_tl.whitening.layer import Whitening


class Uncentred:
    """A whitened model's method for processing weights, which refuses to centre the weights that write to the stream.

    Centring is harmless only where every reader of the stream subtracts its mean; whitening does not. TransformerLens
    calls nothing of ours before it centres, so that this stands in front of its method, on this one model.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model = model
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own method.

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


class WhiteningAdapter(ABC):
    """What `whiten` does to the models of one class.

    Attributes:
        view: the model's reading.
        model: the model.
        processing: its methods that may centre the weights that write to the residual stream.
    """

    processing: ClassVar[tuple[str, ...]]

    def __init__(self, view: ModelView) -> None:
        self.view = view
        self.model: Any = view.model

    @abstractmethod
    def check_separate_queries(self) -> None:
        """Raise `UnsupportedModelError` where queries have the same input as keys and values."""

    @abstractmethod
    def set_values_to_identity(self) -> None:
        """Set W_V to the identity, so that each head reads separate channels, without bias and without gradient.

        Raises:
            UnsupportedModelError: values that cannot be set so.
        """

    @abstractmethod
    def list_hook_points(self, layers: Sequence[Whitening]) -> None:
        """List the hook points of whitening layers that were put on the blocks, one for each."""

    @abstractmethod
    def forget_hook_points(self, layers: Sequence[Whitening]) -> None:
        """Take those of layers that were taken off out of the list again."""

    def allow_centring(self) -> None:
        """Allow again what `refuse_centring` refuses."""
        for name in self.processing:
            self.model.__dict__.pop(name, None)

    def refuse_centring(self) -> None:
        """Refuse to centre weights from now on."""
        for name in self.processing:
            setattr(self.model, name, Uncentred(self.model, name))

    def values_refused(self, layer: int) -> UnsupportedModelError:
        """What is raised where values cannot be the identity."""
        shape = tuple(self.model.blocks[layer].attn.W_V.shape)
        return UnsupportedModelError(
            f"whiten: values='dropped' needs a HookedTransformer whose heads share d_model evenly; blocks.{layer} of "
            f"this {self.view.description} has W_V {shape}."
        )


class HookedAdapter(WhiteningAdapter):
    """For HookedTransformer, whose attention has separate inputs for queries, keys and values."""

    processing = ("process_weights_", "load_and_process_state_dict")

    def check_separate_queries(self) -> None:
        """Nothing to refuse."""

    def set_values_to_identity(self) -> None:
        """As `WhiteningAdapter` says; heads must share d_model evenly, and have values each."""
        attentions = [block.attn for block in self.model.blocks]
        for layer, attn in enumerate(attentions):
            heads, width, d_head = attn.W_V.shape
            is_parameter = attn._parameters.get("W_V") is not None  # with grouped queries it is a view
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
        """The model finds its hook points by itself."""
        self.model.setup()

    def forget_hook_points(self, layers: Sequence[Whitening]) -> None:
        """As they are listed."""
        self.model.setup()


class BridgeAdapter(WhiteningAdapter):
    """For TransformerBridge, which lists its components and hook points."""

    processing = ("enable_compatibility_mode", "process_weights")

    def check_separate_queries(self) -> None:
        """A Bridge's attention has one input."""
        raise UnsupportedModelError(
            f"whiten: reads='keys and values' needs queries with an input of their own, which {self.view.description} "
            "does not have; use reads='attention'."
        )

    def set_values_to_identity(self) -> None:
        """A Bridge's W_V is a view of another weight."""
        raise self.values_refused(0)

    def list_hook_points(self, layers: Sequence[Whitening]) -> None:
        """Name the layer as a component, by which the state dict is put together, and each of its hook points."""
        component = self.model.adapter.component_mapping["blocks"]
        prefix = "whitening"
        if layers[0].reads != "stream":
            component = component.submodules["attn"]
            prefix = "attn.whitening"
        component.submodules["whitening"] = layers[0]
        for layer, whitening in enumerate(layers):
            for end in ("hook_in", "hook_out"):
                name = f"blocks.{layer}.{prefix}.{end}"
                setattr(self.model, name, getattr(whitening, end))  # a Bridge lists each hook point assigned to it
                delattr(self.model, name)  # which belongs to the layer all the same

    def forget_hook_points(self, layers: Sequence[Whitening]) -> None:
        """Take the layer out of the components, and its hook points out of the registry."""
        blocks = self.model.adapter.component_mapping["blocks"]
        for component in (blocks, blocks.submodules.get("attn")):
            if component is not None:
                component.submodules.pop("whitening", None)
        gone = {id(point) for layer in layers for point in (layer.hook_in, layer.hook_out)}
        registry = self.model._hook_registry
        for name in [name for name, point in registry.items() if id(point) in gone]:
            del registry[name]


def adapter_of(view: ModelView) -> WhiteningAdapter:
    """The adapter of a model's class.

    Raises:
        UnsupportedModelError: a model of another class.
    """
    if view.is_bridge:
        return BridgeAdapter(view)
    if view.is_hooked_encoder or not hasattr(view.model, "setup"):
        raise UnsupportedModelError(
            f"whiten: {view.description} is neither a HookedTransformer nor a TransformerBridge."
        )
    return HookedAdapter(view)
