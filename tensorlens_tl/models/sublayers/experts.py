"""How is a mixture of experts read: its experts, what stands beside them, and where its routing is seen?

A Bridge has no hook points inside experts, and those of routers are missing or mean different things. Routing is read
where it takes effect: in the arguments that the experts are called with. A HookedTransformer's own mixture shows its
routing at hook points that take effect, and so does each of its experts, one module each.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorlens_tl.algebra import Linear, on_device
from tensorlens_tl.algebra.numerics import maybe
from tensorlens_tl.models.activations import Activation
from tensorlens_tl.models.parameters import (
    Gate,
    MLPWeights,
    Refuse,
    detached,
    floating,
    in_effect,
    innermost,
    is_adapter,
    is_bridge_component,
    read_linear,
)
from tensorlens_tl.models.sublayers.mlps import read_activation, read_module

LATENT = ("fc1_latent_proj", "fc2_latent_proj")
"""What stands before and after experts that read a latent (NemotronH)."""


@dataclass(frozen=True)
class Routing:
    """Where routing is seen.

    Attributes:
        module: called in every forward pass.
        index, weight: arguments of its forward, `[token, choice]`: a token's experts, and their weights; `weight` may
            be the name of its output.
        dense: `weight` is `[token, expert]`, zero where not chosen, and `index` is not given.
        scales_input: the weight scales an expert's input, not its output (Llama 4).
        factor: multiplies all weights (Laguna).
        shown: `index` and `weight` are hook points of a HookedTransformer, the second `[token, expert]`, chosen or not.
        softmax: `weight` is a router's numbers: the largest choose, and count by their softmax (JetMoe).
        normalised: a token's weights are then divided by their sum.
        router: its first output is a number for every expert, `[token, expert]`; None where none is known.
        read: from the output to the weights, where they are not its first tensor.
    """

    module: nn.Module
    index: str
    weight: str
    dense: bool = False
    scales_input: bool = False
    factor: float = 1.0
    shown: bool = False
    softmax: bool = False
    normalised: bool = False
    router: nn.Module | None = None
    read: Callable[[Any], Any] | None = None

    @property
    def has_capacity(self) -> bool:
        """True if an expert takes so many tokens of a prompt and no more, in their order (Switch Transformers)."""
        return self.read is _within_capacity

    def of_choices(
        self, weight: Float[Tensor, "batch pos number"], index: Int[Tensor, "batch pos choice"]
    ) -> Float[Tensor, "batch pos choice"]:
        """What each choice counts, from what is seen of the weights."""
        if self.shown:
            weight = weight.gather(-1, index)
        if self.softmax:
            weight = weight.float().softmax(-1).to(weight)  # the router computes in float32, whatever the dtype
        if self.normalised:
            weight = weight / weight.sum(-1, keepdim=True)
        return weight * self.factor


@dataclass(frozen=True)
class ExpertsWeights:
    """``Σ_e weight_e · expert_e(x)``, and ``gate(x) · shared(x)`` for every token.

    Attributes:
        count: of experts.
        expert: from a number to that expert's weights, views of the model's own.
        routing: where the routing is seen.
        shared, shared_gate: the shared experts as one MLP, and what scales it; None for none, and for 1.
        shared_module: the module called for the shared expert, where the layer has one.
        module, modules: called for all of it, and for each expert, where a HookedTransformer's are frozen from inside.
        around: for experts next to an MLP, the names of the norms before and after each:
            ``{"experts": (before, after), "shared": ...}`` (Gemma 4).
        choices: experts per token (all, where the model does not say).
        branch_factor: what the block multiplies all of it by.
    """

    count: int
    expert: Callable[[int], MLPWeights]
    routing: Routing
    shared: MLPWeights | None = None
    shared_gate: Gate | None = None
    shared_module: nn.Module | None = None
    module: nn.Module | None = None
    modules: Sequence[nn.Module] = ()
    around: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    choices: int = 1
    branch_factor: float = 1.0

    @property
    def hooked(self) -> bool:
        """Never: nothing inside can be held."""
        return False

    @property
    def hidden(self) -> int:
        """Numbers that a vector takes inside at most: every expert that it is sent to, and the shared one."""
        hidden = self.choices * self.expert(0).hidden
        if self.shared is not None:
            hidden += self.shared.hidden
        return hidden

    def on(self, device: torch.device) -> "ExpertsWeights":
        """The same with all weights on a device, those of an expert once they are read."""
        return replace(on_device(self, device), expert=partial(_on_device, self.expert, device))


def _on_device(expert: Callable[[int], MLPWeights], device: torch.device, number: int) -> MLPWeights:
    return on_device(expert(number), device)


@dataclass(frozen=True)
class PerLayerWeights:
    """What a block adds for a token's own input at each layer (Gemma 3n, Gemma 4): out(φ(gate(x)) ⊙ input).

    The input is `module`'s argument `argument`.
    """

    W_gate: Float[Tensor, "d_model d_input"]
    W_out: Float[Tensor, "d_input d_model"]
    activation: Activation
    module: nn.Module
    argument: str


def read_per_layer(block: Any, cfg: Any, refuse: Refuse) -> PerLayerWeights:
    """The same of one block."""
    parts = (getattr(block, name) for name in ("per_layer_input_gate", "per_layer_projection"))
    W_gate, W_out = (read_linear(part, "per_layer", refuse).weight for part in parts)
    return PerLayerWeights(W_gate, W_out, read_activation(block, cfg, refuse), block, "per_layer_input")


def has_experts(mlp: Any) -> bool:
    """True if an MLP sends its tokens to experts."""
    experts = innermost(getattr(innermost(mlp), "experts", None))
    if isinstance(experts, nn.Module):
        return any(True for _ in experts.parameters())
    return _is_parallel(innermost(mlp))


def _is_parallel(layer: Any) -> bool:
    """True if a layer's own projections are those of all its experts, one matrix each (JetMoe)."""
    parts = (innermost(getattr(layer, name, None)) for name in ("input_linear", "output_linear"))
    weights = [getattr(part, "weight", None) for part in parts]
    return all(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights)


def read_experts(mlp: Any, cfg: Any, refuse: Refuse) -> ExpertsWeights:
    """Return the experts of an MLP, or of a block where they stand next to its MLP.

    Raises `UnsupportedModelError` for weights, or arguments of their call, of an unknown form.
    """
    layer = innermost(mlp)
    if not is_bridge_component(mlp):
        return _read_shown(mlp, cfg, refuse)
    if _is_parallel(layer):
        return _read_parallel(layer, cfg, refuse)
    experts = innermost(layer.experts)
    if any(isinstance(innermost(getattr(layer, name, None)), nn.Linear) for name in LATENT):
        raise refuse("its experts read a latent of the vectors (moe_latent_size), which is not read.")
    called = _first_child(layer, "shared_experts", "shared_expert", "shared_mlp")
    shared = innermost(called)
    gate = _first_module(layer, "shared_expert_gate")
    count, expert = _experts(experts, cfg, refuse)
    routing = _routing(layer, experts, refuse)
    return ExpertsWeights(
        count=count,
        expert=expert,
        routing=routing,
        shared=maybe(partial(read_module, cfg=cfg, refuse=refuse), shared),
        shared_gate=maybe(partial(_shared_gate, refuse=refuse), gate),
        shared_module=called,
        choices=_choices(layer, routing, count),
    )


def _read_parallel(layer: Any, cfg: Any, refuse: Refuse) -> ExpertsWeights:
    """Experts whose matrices the layer has itself; what it adds to their sum is in each, as their weights sum to 1."""
    router, top_k = parallel_router(layer, refuse)
    first, down = (
        floating(innermost(getattr(layer, name)).weight, f"mlp.{name}", refuse).mT
        for name in ("input_linear", "output_linear")
    )
    bias = detached(getattr(layer, "bias", None))
    phi = read_activation(layer, cfg, refuse)

    def expert(number: int) -> MLPWeights:
        W_gate, W_in = first[number].chunk(2, dim=1)
        return MLPWeights(W_in, None, W_gate, None, None, down[number], bias, phi, hooked=False)

    routing = Routing(router, "", "output", dense=True, softmax=True, router=router)
    return ExpertsWeights(len(first), expert, routing, choices=top_k)


def parallel_router(layer: Any, refuse: Refuse) -> tuple[nn.Module, int]:
    """What gives a number for every expert of such a layer, and how many of them a token is sent to."""
    router = innermost(getattr(layer, "router", None))
    linear = innermost(getattr(router, "layer", None))
    top_k = getattr(router, "top_k", None)
    if not isinstance(linear, nn.Module) or not isinstance(top_k, int):
        raise refuse(f"the router of its experts ({type(router).__name__}) has no layer and top_k that are read.")
    return linear, top_k


def _read_shown(mlp: Any, cfg: Any, refuse: Refuse) -> ExpertsWeights:
    """A HookedTransformer's own mixture: experts with matrices and hook points of TransformerLens' names."""
    parts = ("experts", "W_gate", "hook_expert_indices", "hook_expert_weights")
    missing = [part for part in parts if not isinstance(getattr(mlp, part, None), nn.Module)]
    if missing:
        raise refuse(f"its mixture of experts ({type(mlp).__name__}) has no {missing[0]}, and no routing that is read.")
    read = [_read_shown_expert(expert, cfg, refuse) for expert in mlp.experts]
    softmax_of_choices = _glu_constants(mlp) is not None
    routing = Routing(
        mlp.hook_expert_weights,
        "hook_expert_indices",
        "hook_expert_weights",
        shown=True,
        normalised=bool(getattr(cfg, "norm_topk_prob", False)) and not softmax_of_choices,
        router=mlp.W_gate,
    )
    return ExpertsWeights(
        count=len(read),
        expert=read.__getitem__,
        routing=routing,
        module=mlp,
        modules=tuple(mlp.experts),
        choices=mlp.experts_per_token,
    )


def _read_shown_expert(expert: Any, cfg: Any, refuse: Refuse) -> MLPWeights:
    (W_in, b_in), (W_gate, b_gate), (W_out, b_out) = (
        read_linear(getattr(expert, name, None), f"mlp.experts.{name}", refuse) for name in ("W_in", "W_gate", "W_out")
    )
    constants = _glu_constants(expert)
    if constants is None:
        phi, psi = read_activation(expert, cfg, refuse), None
    else:
        phi, psi = _clamped_glu(*constants)
    return MLPWeights(W_in, b_in, W_gate, b_gate, None, W_out, b_out, phi, psi, hooked=False)


def _glu_constants(module: Any) -> tuple[float, float] | None:
    """α and the limit of GPT-OSS' gated unit, which TransformerLens has as constants beside its class; else None."""
    constants = vars(sys.modules[type(module).__module__])
    if "GPT_OSS_ALPHA" not in constants or "GPT_OSS_LIMIT" not in constants:
        return None
    return float(constants["GPT_OSS_ALPHA"]), float(constants["GPT_OSS_LIMIT"])


def _first_child(layer: Any, *names: str) -> nn.Module | None:
    """Return the first of a layer's modules with one of these names, as the layer calls it.

    In compatibility mode a Bridge's component computes without calling what it wraps.
    """
    parts = (getattr(layer, name, None) for name in names)
    return next((part for part in parts if isinstance(innermost(part), nn.Module)), None)


def _first_module(layer: Any, *names: str) -> nn.Module | None:
    """The innermost of that."""
    return innermost(_first_child(layer, *names))


def _shared_gate(linear: nn.Module, refuse: Refuse) -> Gate:
    return Gate(Linear(*read_linear(linear, "shared_expert_gate", refuse)), torch.sigmoid)


def _routing(layer: Any, experts: nn.Module, refuse: Refuse) -> Routing:
    """Where routing is seen: at the experts, or, where they are given every token (Llama 4), at the router."""
    arguments = list(inspect.signature(experts.forward).parameters)
    factor = float(getattr(layer, "routed_scaling_factor", 1.0))
    router = _first_module(layer, "gate", "router")
    if router is not None and hasattr(router, "expert_capacity"):
        return Routing(router, "", "output", dense=True, read=_within_capacity)
    if len(arguments) == 3:
        return Routing(experts, arguments[1], arguments[2], factor=factor, router=router)
    if len(arguments) == 1 and router is not None:
        return Routing(router, "", "output", dense=True, scales_input=True)
    raise refuse(
        f"its experts ({type(experts).__name__}) are called with {', '.join(arguments)}: no routing that is read."
    )


def _choices(layer: Any, routing: Routing, count: int) -> int:
    """How many experts a token is sent to; of all, where the model does not say."""
    if routing.has_capacity:
        return 1
    numbers = (getattr(module, "top_k", None) for module in (layer, routing.router))
    return next((number for number in numbers if isinstance(number, int)), count)


def _within_capacity(output: tuple[Tensor, ...]) -> Float[Tensor, "batch pos expert"]:
    """Return every expert's weight from a router that sends each token to one expert, or to none if that is full.

    It gives a one-hot choice and its probability (Switch Transformers).
    """
    sent, weight, *_ = output
    return sent * weight


def _experts(experts: Any, cfg: Any, refuse: Refuse) -> tuple[int, Callable[[int], MLPWeights]]:
    """How many, and the weights of each."""
    if is_adapter(experts):
        raise refuse(
            f"its experts have adapters ({', '.join(in_effect(experts))}), which are not read there. Merge them "
            "(merge_and_unload()) before the model is wrapped."
        )
    weights = dict(experts.named_parameters(recurse=False))
    name = "gate_up_proj" if "gate_up_proj" in weights else "up_proj"
    if not {name, "down_proj"} <= set(weights):
        members = [m for m in experts.children() if any(True for _ in m.parameters())]
        if not members:
            raise refuse(f"its experts ({type(experts).__name__}) have no gate_up_proj and down_proj that are read.")
        read = [read_module(member, cfg, refuse) for member in members]
        return len(read), read.__getitem__
    first = floating(weights[name], f"experts.{name}", refuse)
    down = floating(weights["down_proj"], "experts.down_proj", refuse)
    gated = name == "gate_up_proj"
    halves = 2 if gated else 1
    in_first = first.shape[1] == down.shape[2] and first.shape[2] == halves * down.shape[1]
    if not getattr(experts, "is_transposed", in_first):
        first = first.mT  # to [expert, in, out]
        down = down.mT
    b_first, b_down = (detached(weights.get(f"{which}_bias")) for which in (name, "down_proj"))
    phi, psi = _activations(experts, cfg, refuse)
    mixed = gated and not getattr(experts, "is_concatenated", True)

    def gate_and_input(both: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if both is None or not gated:
            return None, both
        if mixed:
            return both[..., ::2], both[..., 1::2]
        gate, linear = both.chunk(2, dim=-1)
        return gate, linear

    def expert(number: int) -> MLPWeights:
        W_gate, W_in = gate_and_input(first[number])
        b_gate, b_in = gate_and_input(maybe(itemgetter(number), b_first))
        b_out = maybe(itemgetter(number), b_down)
        assert W_in is not None
        return MLPWeights(W_in, b_in, W_gate, b_gate, None, down[number], b_out, phi, psi, hooked=False)

    return len(first), expert


def _activations(experts: Any, cfg: Any, refuse: Refuse) -> tuple[Callable[[Tensor], Tensor], Any]:
    """φ of the gate and ψ of what it gates."""
    limit = getattr(experts, "limit", None)
    alpha = getattr(experts, "alpha", None)
    if limit is None or alpha is None:
        return read_activation(experts, cfg, refuse), None
    return _clamped_glu(alpha, limit)


def _clamped_glu(alpha: float, limit: float) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """φ and ψ of GPT-OSS, both clamped."""

    def swish(gate: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(gate * alpha)

    return swish, lambda linear: linear.clamp(-limit, limit) + 1
