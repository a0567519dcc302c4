"""Reading the parts of a block: MLPs, experts and their routing, attention's values and output, queries and keys.

A Bridge has no hook points inside experts, and those of routers are missing or inconsistent. Routing is therefore read
where it takes effect, in the arguments that the experts are called with. In a HookedTransformer's own mixture, each
expert is a module, and both the routing and the experts have hook points that take effect.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorlens_tl.algebra import Linear, on_device
from tensorlens_tl.algebra.numerics import maybe, times
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.activations import Activation, is_elementwise
from tensorlens_tl.models.parameters import (
    AttentionWeights,
    Gate,
    HeadRouting,
    InnerValues,
    InverseScale,
    Latent,
    MLPWeights,
    QueryKeyWeights,
    Refuse,
    detached,
    find_activation,
    flattened,
    floating,
    in_effect,
    innermost,
    is_adapter,
    is_bridge_component,
    norm_epsilon,
    norm_weights,
    read_linear,
    refuse_bypassed,
    shown,
    tried_norm,
    unlike_shown,
)

MLP_PROJECTIONS: Sequence[tuple[str, ...]] = (
    ("up_proj", "down_proj", "gate_proj"),
    ("w3", "w2", "w1"),
    ("wi_1", "wo", "wi_0"),
    ("up_proj", "down_proj"),
    ("wi", "wo"),
    ("fc1", "fc2"),
)
"""Names of input, output and gate in Hugging Face's MLPs; the gate is optional."""


MLP_PARTS = ("in", "out", "gate")
"""TransformerLens' names for the projections of an MLP."""


def read_mlp(mlp: Any, cfg: Any, refuse: Refuse) -> MLPWeights:
    """Return the weights of a plain or gated MLP; raise `UnsupportedModelError` for anything else."""
    refuse_bypassed(mlp, MLP_PARTS, "mlp", refuse)
    (W_in, b_in), (W_out, b_out), (W_gate, b_gate) = (_projection(mlp, part, refuse) for part in MLP_PARTS)
    if not isinstance(W_in, Tensor) or not isinstance(W_out, Tensor) or W_in.ndim != 2:
        raise refuse(
            f"mlp ({type(mlp).__name__}) has no readable W_in and W_out [d_model, d_mlp], and no readable experts. "
            "Only plain and gated MLPs, and mixtures of them, can be frozen."
        )
    phi = read_activation(mlp, cfg, refuse)
    b_post: Tensor | None = None
    fused = False
    if not isinstance(W_gate, Tensor):
        W_gate = None
        b_gate = None
        fused = W_in.shape[1] == 2 * W_out.shape[0]  # gate and input share one projection (ModernBERT)
        if fused:
            W_gate, W_in = W_in.chunk(2, dim=1)
            b_gate, b_in = maybe(partial(torch.chunk, chunks=2), b_in) or (None, None)
    elif not is_bridge_component(mlp):  # HookedTransformer: φ(g)·u + b_in
        b_post = b_in
        b_in = None
    read = MLPWeights(
        W_in=floating(W_in, "mlp.W_in", refuse),
        b_in=b_in,
        W_gate=maybe(partial(floating, name="mlp.W_gate", refuse=refuse), W_gate),
        b_gate=b_gate,
        b_post=b_post,
        W_out=floating(W_out, "mlp.W_out", refuse),
        b_out=b_out,
        activation=phi,
        hooked=not fused,
    )
    return _with_inner_norm(_with_multipliers(read, innermost(mlp)), innermost(mlp), cfg, refuse)


def _with_multipliers(read: MLPWeights, inner: Any) -> MLPWeights:
    """Include the constants that multiply gate and output in some models (Falcon-H1)."""
    gate = float(getattr(inner, "gate_multiplier", 1.0))
    phi = read.activation
    if gate != 1:
        read = replace(read, activation=lambda z: phi(z * gate))
    return read.scaled(float(getattr(inner, "down_multiplier", 1.0)))


def _projection(mlp: Any, part: str, refuse: Refuse) -> tuple[Any, Tensor | None]:
    """Return one of an MLP's matrices, from input to output, as its module computes it, and its bias."""
    module = unlike_shown(mlp, part)
    if module is not None:
        return read_linear(module, f"mlp.{part}", refuse)
    return shown(mlp, f"W_{part}"), _bias(mlp, f"b_{part}", part)


def _bias(mlp: Any, name: str, part: str) -> Tensor | None:
    bias = shown(mlp, name)
    if isinstance(bias, Tensor) and bias.is_meta:  # a Bridge shows the bias from when it wrapped the model
        bias = shown(mlp._modules.get(part), "bias")
    return detached(bias)


def _with_inner_norm(read: MLPWeights, inner: Any, cfg: Any, refuse: Refuse) -> MLPWeights:
    """Include a norm between activation and output, if there is one (BitNet)."""
    norm = innermost(getattr(inner, "ffn_sub_norm", None))
    if not isinstance(norm, nn.Module):
        return read
    weights = tried_norm(norm, cfg, width=read.W_out.shape[0])
    if not weights.only_scales:
        raise refuse(f"the norm inside its mlp ({type(norm).__name__}) is centred or shifted; it is not supported.")
    W_out = times(read.W_out.mT, weights.gain).mT
    return replace(read, W_out=W_out, post_factor=InverseScale(weights), hooked=False)


def has_projections(module: nn.Module) -> bool:
    """Whether a module has the projections of an MLP under known names."""
    return any(all(isinstance(getattr(module, name, None), nn.Module) for name in names) for names in MLP_PROJECTIONS)


def read_module(module: nn.Module, cfg: Any, refuse: Refuse) -> MLPWeights:
    """Read a Hugging Face MLP that TransformerLens does not show (an expert); raise if its parts are unknown."""
    fused = [innermost(getattr(module, name, None)) for name in ("input_linear", "output_linear")]
    if all(isinstance(getattr(part, "weight", None), Tensor) and part.weight.ndim == 2 for part in fused):
        both, out = (read_linear(part, "shared_mlp", refuse).weight for part in fused)
        gate, linear = both.chunk(2, dim=1)
        phi = read_activation(module, cfg, refuse)
        return MLPWeights(linear, None, gate, None, None, out, None, phi, hooked=False)
    for names in MLP_PROJECTIONS:
        parts = {name: innermost(getattr(module, name, None)) for name in names}
        if all(isinstance(getattr(part, "weight", None), Tensor) for part in parts.values()):
            linear, out, *gates = (read_linear(part, name, refuse) for name, part in parts.items())
            W_gate, b_gate = gates[0] if gates else (None, None)
            return MLPWeights(
                W_in=linear.weight,
                b_in=linear.bias,
                W_gate=W_gate,
                b_gate=b_gate,
                b_post=None,
                W_out=out.weight,
                b_out=out.bias,
                activation=read_activation(module, cfg, refuse),
                hooked=False,
            )
    raise refuse(f"{type(module).__name__} has no projections with known names.")


def read_activation(owner: Any, cfg: Any, refuse: Refuse) -> Activation:
    """Return an MLP's activation; raise `UnsupportedModelError` if it is missing, not elementwise, or has a norm."""
    phi = find_activation(owner, cfg)
    if phi is None:
        raise refuse(f"mlp has no activation function called {cfg.act_fn!r} that can be found.")
    like = torch.zeros(())
    if isinstance(phi, nn.Module):  # xIELU has weights
        like = next(iter(phi.parameters()), like)
    if not is_elementwise(phi, like.dtype, like.device):
        raise refuse(f"mlp activation {cfg.act_fn!r} mixes channels; only elementwise ones can be frozen.")
    if getattr(owner, "hook_mid", None) is not None:
        raise refuse(f"mlp activation {cfg.act_fn!r} has a LayerNorm inside, which cannot be frozen.")
    return phi


LATENT = ("fc1_latent_proj", "fc2_latent_proj")
"""Projections before and after experts that read a latent vector (NemotronH)."""


@dataclass(frozen=True)
class Routing:
    """Where the routing of tokens to experts can be observed.

    Attributes:
        module: the module that is called in every forward pass.
        index, weight: arguments of its forward, `[token, choice]`: a token's experts and their weights. `weight` may be
            the name of its output.
        dense: `weight` is `[token, expert]`, zero for experts that are not chosen, and `index` is not given.
        scales_input: the weight scales an expert's input rather than its output (Llama 4).
        factor: multiplies all weights (Laguna).
        shown: `index` and `weight` are hook points of a HookedTransformer; `weight` is `[token, expert]`, including
            experts that are not chosen.
        softmax: `weight` holds a router's raw numbers: the largest are chosen and weighted by their softmax (JetMoe).
        normalised: a token's weights are finally divided by their sum.
        router: its first output is a number per expert, `[token, expert]`; None if no router is known.
        read: extracts the weights from the output, if they are not its first tensor.
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
        """Whether an expert accepts only a fixed number of a prompt's tokens, in order (Switch Transformers)."""
        return self.read is _within_capacity

    def of_choices(
        self, weight: Float[Tensor, "batch pos number"], index: Int[Tensor, "batch pos choice"]
    ) -> Float[Tensor, "batch pos choice"]:
        """Return the weight of each choice from the observed weights."""
        if self.shown:
            weight = weight.gather(-1, index)
        if self.softmax:
            weight = weight.float().softmax(-1).to(weight)  # the router computes in float32 whatever the dtype
        if self.normalised:
            weight = weight / weight.sum(-1, keepdim=True)
        return weight * self.factor


@dataclass(frozen=True)
class ExpertsWeights:
    """A mixture ``Σ_e weight_e · expert_e(x)``, plus ``gate(x) · shared(x)`` for every token.

    Attributes:
        count: the number of experts.
        expert: returns the weights of an expert by number, as views of the model's own.
        routing: where the routing can be observed.
        shared, shared_gate: the shared experts as one MLP (None for none), and its gate (None for 1).
        shared_module: the module that is called for the shared expert, if the layer has one.
        module, modules: the modules called for the whole mixture and for each expert, if a HookedTransformer's are
            frozen from inside.
        around: for experts next to an MLP, the names of the norms before and after each:
            ``{"experts": (before, after), "shared": ...}`` (Gemma 4).
        choices: experts per token (all, if the model does not say).
        branch_factor: the factor that the block applies to the whole output.
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
        """Always False: nothing inside can be held."""
        return False

    @property
    def hidden(self) -> int:
        """The largest number of entries of a vector inside, over all experts it is sent to and the shared one."""
        hidden = self.choices * self.expert(0).hidden
        if self.shared is not None:
            hidden += self.shared.hidden
        return hidden

    def on(self, device: torch.device) -> "ExpertsWeights":
        """Return the mixture with its weights on a device; an expert's are moved when they are read."""
        return replace(on_device(self, device), expert=partial(_on_device, self.expert, device))


def _on_device(expert: Callable[[int], MLPWeights], device: torch.device, number: int) -> MLPWeights:
    return on_device(expert(number), device)


@dataclass(frozen=True)
class PerLayerWeights:
    """A block's addition for each token's own input at this layer (Gemma 3n, Gemma 4): out(φ(gate(x)) ⊙ input).

    The input is the argument `argument` of `module`.
    """

    W_gate: Float[Tensor, "d_model d_input"]
    W_out: Float[Tensor, "d_input d_model"]
    activation: Activation
    module: nn.Module
    argument: str


def read_per_layer(block: Any, cfg: Any, refuse: Refuse) -> PerLayerWeights:
    """Read the `PerLayerWeights` of a block."""
    parts = (getattr(block, name) for name in ("per_layer_input_gate", "per_layer_projection"))
    W_gate, W_out = (read_linear(part, "per_layer", refuse).weight for part in parts)
    return PerLayerWeights(W_gate, W_out, read_activation(block, cfg, refuse), block, "per_layer_input")


def has_experts(mlp: Any) -> bool:
    """Whether an MLP routes its tokens to experts."""
    experts = innermost(getattr(innermost(mlp), "experts", None))
    if isinstance(experts, nn.Module):
        return any(True for _ in experts.parameters())
    return _is_parallel(innermost(mlp))


def _is_parallel(layer: Any) -> bool:
    """Whether a layer stores the projections of all its experts as joint matrices (JetMoe)."""
    parts = (innermost(getattr(layer, name, None)) for name in ("input_linear", "output_linear"))
    weights = [getattr(part, "weight", None) for part in parts]
    return all(isinstance(weight, Tensor) and weight.ndim == 3 for weight in weights)


def read_experts(mlp: Any, cfg: Any, refuse: Refuse) -> ExpertsWeights:
    """Return the experts of an MLP, or of a block if they are next to its MLP.

    Raises `UnsupportedModelError` if the weights, or the arguments of the experts' call, have an unknown form.
    """
    layer = innermost(mlp)
    if not is_bridge_component(mlp):
        return _read_shown(mlp, cfg, refuse)
    if _is_parallel(layer):
        return _read_parallel(layer, cfg, refuse)
    experts = innermost(layer.experts)
    if any(isinstance(innermost(getattr(layer, name, None)), nn.Linear) for name in LATENT):
        raise refuse("its experts read a latent of the vectors (moe_latent_size), which is not supported.")
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
    """Read experts from joint matrices; the layer's bias is added to each, since their weights sum to 1."""
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
    """Return the router of such a layer, which outputs a number per expert, and how many experts a token is sent to."""
    router = innermost(getattr(layer, "router", None))
    linear = innermost(getattr(router, "layer", None))
    top_k = getattr(router, "top_k", None)
    if not isinstance(linear, nn.Module) or not isinstance(top_k, int):
        raise refuse(f"the router of its experts ({type(router).__name__}) has no readable layer and top_k.")
    return linear, top_k


def _read_shown(mlp: Any, cfg: Any, refuse: Refuse) -> ExpertsWeights:
    """Read a HookedTransformer's own mixture, whose experts have TransformerLens' matrices and hook points."""
    parts = ("experts", "W_gate", "hook_expert_indices", "hook_expert_weights")
    missing = [part for part in parts if not isinstance(getattr(mlp, part, None), nn.Module)]
    if missing:
        raise refuse(f"its mixture of experts ({type(mlp).__name__}) has no {missing[0]}, and no readable routing.")
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
    """Return α and the limit of gpt-oss' gated unit, constants in TransformerLens' module for it; otherwise None."""
    constants = vars(sys.modules[type(module).__module__])
    if "GPT_OSS_ALPHA" not in constants or "GPT_OSS_LIMIT" not in constants:
        return None
    return float(constants["GPT_OSS_ALPHA"]), float(constants["GPT_OSS_LIMIT"])


def _first_child(layer: Any, *names: str) -> nn.Module | None:
    """Return the first of a layer's submodules with one of these names, as the layer calls it.

    In compatibility mode, a Bridge's component computes without calling what it wraps.
    """
    parts = (getattr(layer, name, None) for name in names)
    return next((part for part in parts if isinstance(innermost(part), nn.Module)), None)


def _first_module(layer: Any, *names: str) -> nn.Module | None:
    """Return the same module, unwrapped."""
    return innermost(_first_child(layer, *names))


def _shared_gate(linear: nn.Module, refuse: Refuse) -> Gate:
    return Gate(Linear(*read_linear(linear, "shared_expert_gate", refuse)), torch.sigmoid)


def _routing(layer: Any, experts: nn.Module, refuse: Refuse) -> Routing:
    """Return where routing can be observed: at the experts or, if they receive every token (Llama 4), at the router."""
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
        f"its experts ({type(experts).__name__}) are called with {', '.join(arguments)}: no known form of routing."
    )


def _choices(layer: Any, routing: Routing, count: int) -> int:
    """Return how many experts a token is sent to; all, if the model does not say."""
    if routing.has_capacity:
        return 1
    numbers = (getattr(module, "top_k", None) for module in (layer, routing.router))
    return next((number for number in numbers if isinstance(number, int)), count)


def _within_capacity(output: tuple[Tensor, ...]) -> Float[Tensor, "batch pos expert"]:
    """Return every expert's weight from a router that sends each token to one expert, or to none if that is full.

    The router returns a one-hot choice and its probability (Switch Transformers).
    """
    sent, weight, *_ = output
    return sent * weight


def _experts(experts: Any, cfg: Any, refuse: Refuse) -> tuple[int, Callable[[int], MLPWeights]]:
    """Return the number of experts, and a function that returns the weights of each."""
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
            raise refuse(f"its experts ({type(experts).__name__}) have no readable gate_up_proj and down_proj.")
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
    """Return φ of the gate, and ψ of the input that it multiplies."""
    limit = getattr(experts, "limit", None)
    alpha = getattr(experts, "alpha", None)
    if limit is None or alpha is None:
        return read_activation(experts, cfg, refuse), None
    return _clamped_glu(alpha, limit)


def _clamped_glu(alpha: float, limit: float) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """Return φ and ψ of gpt-oss, both clamped."""

    def swish(gate: Tensor) -> Tensor:
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(gate * alpha)

    return swish, lambda linear: linear.clamp(-limit, limit) + 1


PROJECTIONS = ("q", "k", "v", "o")
"""A Bridge's names for the projections of attention."""


def read_attention(attn: Any, cfg: Any, refuse: Refuse) -> AttentionWeights:
    """Return one attention layer's weights; raise `UnsupportedModelError` unless it is readable softmax attention."""
    inner = innermost(attn)
    if isinstance(getattr(inner, "kv_b_proj", None), nn.Module):
        return _latent(inner, cfg, refuse)
    if isinstance(getattr(inner, "kv_proj", None), nn.Module) and hasattr(inner, "experts"):
        return _of_experts(inner, refuse)
    refuse_bypassed(attn, PROJECTIONS, "attn", refuse)
    W_O, b_O = head_projection(attn, "O", cfg, refuse)
    W_V, b_V = head_projection(attn, "V", cfg, refuse)
    if not isinstance(W_O, Tensor) or not isinstance(W_V, Tensor):
        if (read := _by_module(inner, refuse)) is not None:
            return _with_inner_norms(read, inner, cfg, refuse)
        raise refuse(
            "no attention with readable W_V and W_O (a state-space, recurrent or compressed-attention "
            "layer?). Only softmax attention can be frozen."
        )
    W_O = floating(W_O, "attn.W_O", refuse)
    W_V = floating(W_V, "attn.W_V", refuse)
    if W_V.ndim != 3 or W_O.ndim != 3:
        raise refuse(
            f"attn.W_V is {tuple(W_V.shape)} and attn.W_O {tuple(W_O.shape)}, not [head, d_model, d_head] "
            "and [head, d_head, d_model]."
        )
    read = AttentionWeights(
        value_matrix=rearrange(W_V, "kv d_model d_head -> d_model (kv d_head)"),
        b_V=maybe(flattened, b_V),
        W_O=rearrange(W_O, "head d_head d_model -> (head d_head) d_model"),
        b_O=detached(b_O),
        heads=W_O.shape[0],
        kv_heads=W_V.shape[0],
    )
    return _with_inner_norms(read, inner, cfg, refuse)


def read_shared_attention(attn: Any, source: Any, cfg: Any, refuse: Refuse) -> AttentionWeights:
    """Return the weights of attention that takes keys and values from the earlier `source` (Gemma 4).

    Raises `UnsupportedModelError` for a gate or norm after either's heads, or weights that cannot be read.
    """
    values = read_attention(source, cfg, refuse)
    inner = innermost(attn)
    W_O, b_O = read_linear(inner.o_proj, "attn.o_proj", refuse)
    gated = isinstance(innermost(getattr(inner, "attn_sub_norm", None)), nn.Module)
    if gated or values.output_factor is not None or values.routing is not None:
        raise refuse("a gate or a norm before W_O with values of an earlier block, which is not supported.")
    return replace(values, W_O=W_O, b_O=b_O, heads=len(W_O) // inner.head_dim, shared=True)


def pattern_reader(attn: Any) -> Callable[[Any], Any] | None:
    """Return a function that extracts the pattern from the outputs of attention's module; None if a hook point has it.

    In a Bridge the hook point may be missing (NemotronH), or show the second output, which may be a bias of relative
    positions before the pattern (Switch Transformers; TransformerLens handles this for T5).
    """
    if not is_bridge_component(attn):
        return None
    if not hasattr(attn, "hook_pattern"):
        return partial(_returned, number=1)
    is_relative = hasattr(innermost(attn), "has_relative_attention_bias")
    if is_relative and not getattr(attn, "requires_relative_position_bias", True):
        return partial(_returned, number=2)
    return None


def _returned(outputs: Any, number: int) -> Any:
    """Return one of a module's outputs, or None if it returns fewer."""
    return outputs[number] if isinstance(outputs, tuple) and len(outputs) > number else None


def shared_source(attentions: Sequence[Any]) -> int | None:
    """Return which earlier attention the last of several takes keys and values from; None if it has its own.

    Raises `UnsupportedModelError` if no earlier layer stores what it takes.
    """
    *earlier, last = (innermost(attn) for attn in attentions)
    if not getattr(last, "is_kv_shared_layer", False):
        return None
    for number in reversed(range(len(earlier))):
        stores = getattr(earlier[number], "store_full_length_kv", False)
        if stores and getattr(earlier[number], "layer_type", None) == getattr(last, "layer_type", None):
            return number
    raise UnsupportedModelError("it takes keys and values of an earlier block, and none that stores them is known.")


def head_projection(attn: Any, letter: str, cfg: Any, refuse: Refuse) -> tuple[Any, Any]:
    """Return one of Q, K, V, O by head, as its module computes it, and its bias.

    The matrix is `[head, d_model, d_head]` (O: `[head, d_head, d_model]`), with key-value heads for grouped attention;
    None if it is missing or not shown by head.
    """
    module = unlike_shown(attn, letter.lower())
    if is_bridge_component(attn) and not hasattr(attn, "hook_pattern"):  # the Bridge shows nothing of it (NemotronH)
        module = innermost(getattr(innermost(attn), f"{letter.lower()}_proj", None))
    if module is None:
        # HookedTransformer expands W_V to query heads, but not _W_V; a Bridge has only the unexpanded one, as W_V.
        prefix = "_" if letter in "KV" and hasattr(attn, f"_W_{letter}") else ""
        weight = shown(attn, f"{prefix}W_{letter}")
        module = innermost(attn._modules.get("q"))
        if weight is not None or letter != "Q" or not isinstance(module, nn.Module):
            return weight, shown(attn, f"{prefix}b_{letter}")
    weight, bias = read_linear(module, f"attn.{letter.lower()}", refuse)
    heads = cfg.n_heads
    if letter in "KV":
        heads = getattr(cfg, "n_key_value_heads", None) or heads
    if letter == "O":
        return rearrange(weight, "(head d_head) d_model -> head d_head d_model", head=heads), bias
    width = weight.shape[1] // heads
    if letter == "Q" and width == 2 * cfg.d_head:  # each head's query is followed by a gate
        width = cfg.d_head
    by_head = rearrange(weight, "d_model (head d_head) -> head d_model d_head", head=heads)[..., :width]
    return by_head, maybe(lambda b: b.unflatten(0, (heads, -1))[:, :width], bias)


def _by_module(inner: Any, refuse: Refuse) -> AttentionWeights | None:
    """Read a layer with another head size (Gemma 4), which a Bridge does not show; None if its weights are missing.

    Values may be computed by the keys' projection.
    """
    projections = (innermost(getattr(inner, name, None)) for name in ("v_proj", "k_proj"))
    values = next((part for part in projections if isinstance(part, nn.Module)), None)
    out = innermost(getattr(inner, "o_proj", None))
    d_head = getattr(inner, "head_dim", None)
    if values is None or not isinstance(out, nn.Module) or not isinstance(d_head, int):
        return None
    linear = Linear(*read_linear(values, "attn.v_proj", refuse))
    read = Linear(*read_linear(out, "attn.o_proj", refuse))
    heads = read.weight.shape[0] // d_head
    kv_heads = linear.weight.shape[1] // d_head
    return AttentionWeights(linear.weight, linear.offset, read.weight, read.offset, heads, kv_heads)


def _with_inner_norms(read: AttentionWeights, inner: Any, cfg: Any, refuse: Refuse) -> AttentionWeights:
    """Include a norm of values (Gemma 4), a norm before W_O (BitNet) and a gate, if there are any."""
    value_norm, sub_norm = (innermost(getattr(inner, name, None)) for name in ("v_norm", "attn_sub_norm"))
    if isinstance(value_norm, nn.Module):
        assert read.value_matrix is not None
        norm = tried_norm(value_norm, cfg, width=read.value_matrix.shape[1] // read.kv_heads)
        if not norm.only_scales:
            raise UnsupportedModelError(f"{type(value_norm).__name__} of values is centred or shifted; not read.")
        read = replace(read, inner_values=InnerValues(Linear(read.value_matrix, read.b_V), norm, read.kv_heads))
    if isinstance(sub_norm, nn.Module):
        outer = tried_norm(sub_norm, cfg, width=read.W_O.shape[0])
        if not outer.only_scales:
            raise UnsupportedModelError(f"{type(sub_norm).__name__} before W_O is centred or shifted; not read.")
        W_O = times(read.W_O.mT, outer.gain).mT
        read = replace(read, W_O=W_O, output_factor=InverseScale(outer))
    return replace(read, output_factor=_gate(inner, read, refuse) or read.output_factor)


def _gate(inner: Any, read: AttentionWeights, refuse: Refuse) -> Gate | None:
    """Return a gate of the heads' outputs, computed from attention's input, per head or per channel."""
    width = read.W_O.shape[0]
    for name, squash in (("gate_proj", torch.sigmoid), ("g_proj", torch.nn.functional.softplus)):
        linear = innermost(getattr(inner, name, None))
        if isinstance(linear, nn.Module) and isinstance(getattr(linear, "weight", None), Tensor):
            weight, bias = read_linear(linear, f"attn.{name}", refuse)
            return Gate(Linear(weight, bias), squash, width // weight.shape[1])
    return _gate_beside_queries(inner, width, refuse)


def _gate_beside_queries(inner: Any, width: int, refuse: Refuse) -> Gate | None:
    """Return a gate that the query projection also outputs, after each head's query (Qwen3-Next, Qwen3.5)."""
    linear = innermost(getattr(inner, "q_proj", None))
    d_head = getattr(inner, "head_dim", None)
    weight = getattr(linear, "weight", None)
    if not isinstance(weight, Tensor) or not isinstance(d_head, int) or len(weight) != 2 * width or width % d_head:
        return None
    weight, bias = read_linear(linear, "attn.q_proj", refuse)

    def second_half(both: Tensor) -> Tensor:
        return both.unflatten(-1, (-1, 2, d_head))[..., 1, :].flatten(-2)

    return Gate(Linear(second_half(weight), maybe(second_half, bias)), torch.sigmoid, 1)


def _of_experts(inner: Any, refuse: Refuse) -> AttentionWeights:
    """Read a mixture of attention heads (JetMoe), whose experts have their own queries and outputs but share values.

    Each key-value head has one head of each expert.
    """
    experts = innermost(inner.experts)
    router, choices = parallel_router(experts, refuse)
    _, W_V = read_linear(inner.kv_proj, "attn.kv_proj", refuse).weight.chunk(2, dim=1)
    W_O = floating(innermost(experts.output_linear).weight, "attn.experts.output_linear", refuse)
    kv_heads = int(inner.num_key_value_heads)
    count = len(W_O)
    return AttentionWeights(
        value_matrix=W_V,
        b_V=None,
        W_O=rearrange(W_O, "expert d_model (kv d_head) -> (kv expert d_head) d_model", kv=kv_heads),
        b_O=detached(getattr(experts, "bias", None)),
        heads=kv_heads * count,
        kv_heads=kv_heads,
        routing=HeadRouting(Linear(*read_linear(router, "attn.experts.router", refuse)), count, choices),
    )


def _latent(inner: Any, cfg: Any, refuse: Refuse) -> AttentionWeights:
    """Read multi-head latent attention (DeepSeek-V2): values are computed from a normed latent vector of each token."""
    down, norm, up, out = (
        getattr(inner, name, None) for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
    )
    if not all(isinstance(innermost(part), nn.Module) for part in (down, norm, up, out)):
        raise refuse("latent attention without kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj and o_proj.")
    norm = innermost(norm)
    W_down, b_down = read_linear(down, "attn.kv_a_proj_with_mqa", refuse)
    W_up, b_up = read_linear(up, "attn.kv_b_proj", refuse)
    W_O, b_O = read_linear(out, "attn.o_proj", refuse)
    rank = len(W_up)
    width = int(inner.v_head_dim)
    heads = len(W_O) // width
    read = tried_norm(norm, cfg, width=rank)

    def values_of(both: Tensor) -> Tensor:
        return both.unflatten(-1, (heads, -1))[..., -width:].flatten(-2)

    latent = Linear(W_down[:, :rank], maybe(partial(torch.narrow, dim=0, start=0, length=rank), b_down))
    b_up = maybe(values_of, b_up)
    up_to_values = Linear(values_of(W_up), b_up)

    values = InnerValues(latent, read, 1, up_to_values)
    return AttentionWeights(None, b_up, W_O, b_O, heads, heads, inner_values=values)


def read_query_key(attn: Any, cfg: Any, refuse: Refuse, factor: float = 1.0) -> QueryKeyWeights:
    """Return the weights behind one layer's scores; `factor` multiplies the block's input.

    Raises `UnsupportedModelError` for queries computed by experts, or without readable W_Q and W_K.
    """
    inner = innermost(attn)
    if hasattr(inner, "kv_proj") and hasattr(inner, "experts"):
        raise refuse(
            "its queries are computed by experts that each token is sent to (a mixture of attention heads), so "
            "its attention scores cannot be read."
        )
    (W_Q, b_Q), (W_K, b_K) = (head_projection(attn, letter, cfg, refuse) for letter in "QK")
    if not isinstance(W_Q, Tensor) or not isinstance(W_K, Tensor) or W_Q.ndim != 3 or W_K.ndim != 3:
        raise refuse("no readable W_Q and W_K [head, d_model, d_head]; its attention scores cannot be read.")
    q_norm, k_norm = (getattr(attn, name, None) for name in ("q_norm", "k_norm"))
    read_norm = partial(norm_weights, cfg=cfg)
    for_both = innermost(getattr(inner, "qk_norm", None))  # in Llama 4
    if isinstance(for_both, nn.Module):
        q_norm = k_norm = for_both
        read_norm = partial(tried_norm, cfg=cfg, width=W_Q.shape[2])
    keys = float(getattr(inner, "key_multiplier", 1.0))  # in Falcon-H1
    W_Q = _multiplied(floating(W_Q, "attn.W_Q", refuse), factor)
    W_K = _multiplied(floating(W_K, "attn.W_K", refuse), factor * keys)
    return QueryKeyWeights(
        W_Q=rearrange(W_Q, "head d_model d_head -> d_model (head d_head)"),
        b_Q=maybe(flattened, b_Q),
        W_K=rearrange(W_K, "kv d_model d_head -> d_model (kv d_head)"),
        b_K=maybe(partial(_multiplied, factor=keys), maybe(flattened, b_K)),
        q_norm=maybe(read_norm, q_norm),
        k_norm=maybe(read_norm, k_norm),
        epsilon=norm_epsilon(q_norm, cfg),
    )


def _multiplied(weight: Tensor, factor: float) -> Tensor:
    """Multiply a weight by a constant, without a copy if it is 1."""
    return weight if factor == 1 else weight * factor


def read_latent_scores(attn: Any, cfg: Any, refuse: Refuse) -> QueryKeyWeights | None:
    """Return queries and keys of latent attention, with each head's rotated channels first; None for other attention.

    A key is computed from the values' latent vector, and from channels that all heads share.
    """
    inner = innermost(attn)
    if not isinstance(getattr(inner, "kv_b_proj", None), nn.Module):
        return None
    rotated = int(inner.qk_rope_head_dim)
    plain = int(inner.qk_nope_head_dim)
    W_Q, b_Q, query_latent = _latent_queries(inner, cfg, refuse)
    W_up, b_up = read_linear(inner.kv_b_proj, "attn.kv_b_proj", refuse)
    heads = W_Q.shape[1] // (rotated + plain)
    rank = len(W_up)

    def rotated_first(both: Tensor) -> Tensor:
        return both.unflatten(-1, (heads, -1)).roll(rotated, dims=-1).flatten(-2)

    W_K = W_up.new_zeros(rank + rotated, heads, rotated + plain)
    W_K[:rank, :, rotated:] = W_up.unflatten(-1, (heads, -1))[..., :plain]
    W_K[rank:, :, :rotated] = torch.eye(rotated).to(W_up)[:, None]
    b_K = None
    if b_up is not None:
        b_K = torch.nn.functional.pad(b_up.unflatten(-1, (heads, -1))[..., :plain], (rotated, 0)).flatten()
    return QueryKeyWeights(
        W_Q=rotated_first(W_Q),
        b_Q=maybe(rotated_first, b_Q),
        W_K=W_K.flatten(1),
        b_K=b_K,
        q_norm=None,
        k_norm=None,
        epsilon=0.0,
        query_latent=query_latent,
        key_latent=_latent_of(inner, "kv_a_proj_with_mqa", "kv_a_layernorm", rank, cfg, refuse),
    )


def _latent_queries(inner: Any, cfg: Any, refuse: Refuse) -> tuple[Tensor, Tensor | None, Latent | None]:
    """Return the query matrix, its bias, and the latent vector it reads (None for attention's own input)."""
    if isinstance(getattr(inner, "q_b_proj", None), nn.Module):
        W_Q, b_Q = read_linear(inner.q_b_proj, "attn.q_b_proj", refuse)
        return W_Q, b_Q, _latent_of(inner, "q_a_proj", "q_a_layernorm", len(W_Q), cfg, refuse)
    W_Q, b_Q = read_linear(inner.q_proj, "attn.q_proj", refuse)
    return W_Q, b_Q, None


def _latent_of(inner: Any, entry: str, norm: str, rank: int, cfg: Any, refuse: Refuse) -> Latent:
    read = tried_norm(innermost(getattr(inner, norm)), cfg, width=rank)
    if not read.only_scales:
        raise refuse(f"attn.{norm} is centred or shifted; queries and keys through it are not supported.")
    return Latent(Linear(*read_linear(getattr(inner, entry), f"attn.{entry}", refuse)), read, rank)
