"""Low-rank adapters, parametrised and pruned weights."""

from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from changed.change import add, bridges, gated_bridges, untouched
from changed.weights import inner, is_hooked, matrix, set_matrix, vector, wrapper

ADAPTERS = "adapters and parametrised weights"


def lora(base: nn.Module, adapters: dict[str, tuple[Tensor, Tensor, float]]) -> nn.Module:
    """A linear layer with peft's own low-rank adapters."""
    layer: Any = None
    for name, (A, B, scale) in adapters.items():
        rank = A.shape[1]
        config = LoraConfig(r=rank, lora_alpha=scale * rank, init_lora_weights=False)
        if layer is None:
            transposed = not isinstance(base, nn.Linear)
            layer = Linear(
                base, name, config, rank, config.lora_alpha, fan_in_fan_out=transposed,
                is_target_conv_1d_layer=transposed,
            )  # fmt: skip
        else:
            layer.update_layer(name, rank, config.lora_alpha, config=config)
        for modules, weight in ((layer.lora_A, A), (layer.lora_B, B)):
            modules[name].weight = nn.Parameter(weight.T.contiguous().to(base.weight))
    layer.set_adapter(list(adapters))
    return layer.eval()


def low_rank(model: Any, layer: int | None, part: str, seed: int = 0) -> tuple[Tensor, Tensor, float]:
    """A, B and the scale of an adapter."""
    rows, columns = matrix(model, layer, part).shape
    A = vector(rows * 2, 10 + seed, 0.3).view(rows, 2)
    B = vector(2 * columns, 20 + seed, 0.5).view(2, columns)
    return A, B, 1.5


def adapted(places: list[tuple[int | None, str]], *, state: str = "on", count: int = 1) -> Callable[[Any], None]:
    """Low-rank adapters on these linears."""

    def put(model: Any) -> None:
        for layer, part in places:
            owner = wrapper(model, layer, part)
            base = owner.original_component
            adapters = {f"adapter{n}": low_rank(model, layer, part, n) for n in range(count)}
            adapted_layer = lora(base, adapters)
            if state == "off":
                adapted_layer.enable_adapters(False)
            if state == "merged":
                adapted_layer.merge()
            owner._modules["_original_component"] = adapted_layer.requires_grad_(False)

    return put


def merged(places: list[tuple[int | None, str]], count: int = 1) -> Callable[[Any], None]:
    """The equivalent: W + s·AB."""

    def edit(model: Any) -> None:
        for layer, part in places:
            weight = matrix(model, layer, part)
            for n in range(count):
                A, B, scale = low_rank(model, layer, part, n)
                weight += scale * A.to(weight) @ B.to(weight)
            set_matrix(model, layer, part, weight)

    return edit


def merged_by_peft(places: list[tuple[int | None, str]]) -> Callable[[Any], None]:
    """The equivalent of a merged adapter: the layer that it leaves behind, whatever its sum is rounded to."""

    def edit(model: Any) -> None:
        adapted(places, state="merged")(model)
        for layer, part in places:
            owner = wrapper(model, layer, part)
            owner._modules["_original_component"] = owner.original_component.get_base_layer()

    return edit


for label, places in (
    ("q", [(1, "q")]),
    ("k", [(1, "k")]),
    ("v", [(1, "v")]),
    ("o", [(1, "o")]),
    ("q and v of every layer", [(0, "q"), (0, "v"), (1, "q"), (1, "v")]),
    ("an MLP's input", [(1, "in")]),
    ("an MLP's output", [(1, "out")]),
    ("the unembedding", [(None, "unembed")]),
):
    add(f"LoRA on {label}", ADAPTERS, before=adapted(places), frozen_as=merged(places), takes=bridges)
add("LoRA on a gate", ADAPTERS, before=adapted([(1, "gate")]), frozen_as=merged([(1, "gate")]), takes=gated_bridges)
TWO = [(0, "v"), (1, "o")]
add("two adapters at once", ADAPTERS, before=adapted(TWO, count=2), frozen_as=merged(TWO, 2), takes=bridges)
add("an adapter that is switched off", ADAPTERS, before=adapted(TWO, state="off"), frozen_as=untouched, takes=bridges)
add(
    "an adapter that is merged",
    ADAPTERS,
    before=adapted([(1, "o")], state="merged"),
    frozen_as=merged_by_peft([(1, "o")]),
    takes=bridges,
)


class Scaled(nn.Module):
    """A parametrization: the weight by a fixed pattern of factors."""

    def forward(self, weight: Tensor) -> Tensor:
        """Another weight of the same shape."""
        return weight * factors(weight)


def factors(weight: Tensor) -> Tensor:
    """Between 0.7 and 1.3."""
    return (1 + 0.3 * torch.sin(torch.arange(weight.numel(), device=weight.device))).view_as(weight).to(weight)


def _parametrised(model: Any) -> None:
    if is_hooked(model):
        parametrize.register_parametrization(model.blocks[1].attn, "W_O", Scaled(), unsafe=True)
    else:
        parametrize.register_parametrization(inner(model, 1, "o"), "weight", Scaled(), unsafe=True)


@torch.no_grad()
def _rescaled(model: Any) -> None:
    weight = model.blocks[1].attn.W_O if is_hooked(model) else inner(model, 1, "o").weight
    weight.mul_(factors(weight))


add("a torch parametrization of W_O", ADAPTERS, before=_parametrised, frozen_as=_rescaled)


def _pruned(model: Any) -> None:
    home, name = (model.blocks[1].mlp, "W_out") if is_hooked(model) else (inner(model, 1, "out"), "weight")
    prune.custom_from_mask(home, name, factors(getattr(home, name)) > 0.85)


@torch.no_grad()
def _masked(model: Any) -> None:
    weight = model.blocks[1].mlp.W_out if is_hooked(model) else inner(model, 1, "out").weight
    weight.mul_(factors(weight) > 0.85)


add("W_out pruned by torch.nn.utils.prune", ADAPTERS, before=_pruned, frozen_as=_masked)
add("weights merged by hand", ADAPTERS, before=merged([(0, "v"), (1, "o")]), frozen_as=merged([(0, "v"), (1, "o")]))
