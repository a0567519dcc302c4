"""Direct effects: what each component writes straight into a logit; and one head taken by itself.

A component's direct effect is what it adds to the logit along the residual stream alone, past every later head and
MLP: the inner product of its output with the target's direction pulled through the final norm (and, in a post-LN
model, through the norms on the way). With all biases counted the direct effects are the logit, exactly.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.arguments import check_pass
from tensorlens_tl.budget import check_size
from tensorlens_tl.circuits.embeddings import embedding_parts
from tensorlens_tl.circuits.terms import Terms
from tensorlens_tl.circuits.trunk import Branch, Trunk, ask
from tensorlens_tl.collapse import wide
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.inputs import query_positions
from tensorlens_tl.maps import AffineMap, Attention, Chain, Linear, Norm
from tensorlens_tl.selection import chosen_head

if TYPE_CHECKING:
    from tensorlens_tl.frozen import FrozenPass

BY = ("component", "head", "head_token", "neuron")


def logit_attribution(
    frozen: "FrozenPass",
    target: Any = None,
    minus: Any = None,
    *,
    by: str = "component",
    query: Any = -1,
    direction: Any = None,
    activation: str = "ratio",
) -> Terms:
    """The direct effect of every component on a logit; with the biases they sum to it.

    Heads count with b_V inside, as TransformerLens' ``hook_result``; b_O and b_out are terms of their own.

    Args:
        frozen: the pass.
        target, minus, direction: as in `FrozenOperator.target`.
        by: ``"component"`` (embeddings, each layer's attention and MLP, each bias), ``"head"`` (attention by head),
            ``"head_token"`` (the same, and each head's source tokens in `Terms.keys`), or ``"neuron"`` (also MLPs by
            neuron).
        query: the position whose prediction is explained, counted over each prompt's real tokens.
        activation: the rule; it matters where a prediction head's activation lies on the way (masked models): direct
            effects pass every MLP by.

    Raises:
        InvalidInputError: no such `by`, a query out of range, no target, and what `target` refuses.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
    """
    if by not in BY:
        raise InvalidInputError(f"by={by!r}; use one of {', '.join(BY)}.")
    asked = ask(frozen, target, minus, direction, query, activation)
    trunk, positions = asked.trunk, asked.positions
    pulled = trunk.pull(asked.seed, branches=False)
    names: list[str] = []
    scores: list[Tensor] = []
    keys: list[Tensor] = []  # per term, where by="head_token"

    def add(found: list[str], values: Tensor, by_key: Tensor | None = None) -> None:
        names.extend(found)
        scores.append(values)
        if by == "head_token":  # what reads no other token is the query's own
            own = values.new_zeros(*values.shape, trunk.x[0].shape[1])
            own.scatter_(2, positions[:, None].expand(-1, values.shape[1], 1), values[..., None])
            keys.append(own if by_key is None else by_key)

    for name, part in embedding_parts(frozen).items():
        add([name], dot(pulled.stream[0][0], part))
    biases = list(pulled.of_biases(trunk.steps))
    for number, step in enumerate(trunk.steps):
        for branch, hidden in zip(step.branches, trunk.hidden[number], strict=True):
            met = branch.write.pull(pulled.sums[number][0])
            if by == "neuron" and not branch.is_attention:
                neurons = [f"{branch.nodes[0]}.N{neuron}" for neuron in range(hidden.shape[-1])]
                add(neurons, (wide(met) * hidden).sum(-2))
            elif by == "component":
                add([f"L{branch.layer}.attn" if branch.is_attention else branch.nodes[0]], dot(met, hidden))
            else:
                pairs = by == "head_token" and branch.is_attention
                by_key = token_pairs(branch, trunk.x[number], met).sum(2) if pairs else None
                add(list(branch.nodes), branch.split(wide(met) * hidden).sum((1, 3)), by_key)
        for at, name, bias, g in biases:
            if at == number:
                add([name], dot(g[0], bias))
    if bool(asked.constant.any()):
        add(["b_U"], asked.constant[:, None])
    return Terms(
        names=names,
        scores=torch.cat(scores, dim=1),
        total=asked.total,
        remainder=torch.zeros_like(asked.total),
        tokens=frozen.str_tokens,
        question=asked.label,
        keys=torch.cat(keys, dim=1) if keys else None,
        soft_cap=asked.soft_cap,
    )


def dot(g: Float[Tensor, "batch pos d"], x: Tensor) -> Float[Tensor, "batch 1"]:
    """⟨g, x⟩ of each prompt, as one column; `x` may be one vector for all positions."""
    return (wide(g) * x).sum((-2, -1))[:, None]


def token_pairs(
    branch: Branch, x: Float[Tensor, "batch pos d_model"], met: Float[Tensor, "batch pos width"]
) -> Float[Tensor, "batch head query key"]:
    """What each head moves from each source token to each query, along `met` (a vector at its hidden layer).

    ``A^h_ij ⟨met_i^h, v_j^h⟩``: summed over keys, the inner product of `met` with the hidden vector.
    """
    *before, mix = branch.read.stages
    assert isinstance(mix, Attention)
    values = rearrange(Chain(tuple(before))(x), "b k (kv d) -> b kv k d", kv=mix.kv_heads)
    values = values.repeat_interleave(mix.pattern.shape[1] // mix.kv_heads, dim=1)
    return mix.pattern * (rearrange(branch.split(met), "b q h d -> b h q d") @ values.mT)


# ------------------------------------------------------------------ one head by itself


@dataclass(frozen=True, eq=False)
class HeadMap:
    """One head by itself, pattern frozen: what it moves from token to token, and what becomes of that.

    Attributes:
        layer, head: which one.
        map: stream before the head -> what it writes (b_V inside, b_O not), an `AffineMap`.
        pattern: `[batch, query, key]`.
        vectors: what each source token offers, v_j W_O, through the linear part of a norm after the sublayer but its
            denominator, `[batch, key, d_model]`.
    """

    frozen: "FrozenPass"
    layer: int
    head: int
    map: Chain
    pattern: Float[Tensor, "batch query key"]
    vectors: Float[Tensor, "batch key d_model"]
    _scale: Float[Tensor, "batch query 1"]
    _trunk: Trunk
    _step: int
    _branch: Branch
    _activation: str

    def __repr__(self) -> str:
        batch, query, _ = self.pattern.shape
        return f"HeadMap(L{self.layer}H{self.head} of {self.frozen.view.description}, batch={batch}, pos={query})"

    def contributions(self, query: Any = None) -> Float[Tensor, "batch query key d_model"]:
        """``A_ij v_j W_O``: what source token j puts into position i through this head.

        Raises:
            InvalidInputError: a query out of range.
            SizeError: the result would be larger than `tensorlens_tl.budget.MOST_BYTES`.
        """
        positions = query_positions(self.frozen.mask, query)
        batch, _, key = self.pattern.shape
        check_size("contributions", (batch, positions.shape[1], key, self.vectors.shape[-1]), self.vectors)
        weights = torch.take_along_dim(self._weights, positions[..., None], dim=1)
        return weights[..., None] * self.vectors[:, None]

    @property
    def _weights(self) -> Float[Tensor, "batch query key"]:
        """The pattern over the scale of a norm after the sublayer, between real tokens."""
        mask = self.frozen.mask
        return self.pattern / self._scale * (mask[:, :, None] & mask[:, None])

    @property
    def norms(self) -> Float[Tensor, "batch query key"]:
        """‖A_ij v_j W_O‖ (Kobayashi et al. 2020) for all pairs."""
        return self._weights.abs() * self.vectors.norm(dim=-1)[:, None]

    @property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """What the head writes to the residual stream, zero at padding."""
        return self.map(self._trunk.x[self._step]) * self.frozen.mask[..., None]

    @cached_property
    def effect(self) -> Float[Tensor, "batch pos d_out"]:
        """The head's total effect: its output pushed through everything later, to the stream that is unembedded."""
        self.frozen.check_fresh()
        x = self._trunk.steps[self._step].outer.push(self.output)
        for step in self._trunk.steps[self._step + 1 :]:
            x = step.map.push(x)
        return x

    def target(
        self, target: Any = None, minus: Any = None, *, query: Any = -1, direction: Any = None, direct: bool = False
    ) -> Float[Tensor, "batch query key"]:
        """What each token pair of this head adds to a logit through everything later, `[batch, query, key]`.

        Args:
            target, minus, direction: as in `FrozenOperator.target`.
            query: the position whose prediction is asked about.
            direct: only along the residual stream, past every later head and MLP.

        Returns:
            Scores whose sum is ⟨output, pulled-back target⟩, the head's total (or direct) effect on the logit.
        """
        asked = ask(self.frozen, target, minus, direction, query, self._activation)
        pulled = asked.trunk.pull(asked.seed, branches=not direct)
        met = self._branch.write.pull(pulled.sums[self._step][0])
        return token_pairs(self._branch, self._trunk.x[self._step], met)[:, self.head]


def head_map(frozen: "FrozenPass", layer: Any, head: Any, *, activation: str = "ratio") -> HeadMap:
    """One head of a frozen pass, by itself.

    Args:
        frozen: the pass.
        layer, head: which one; with grouped-query attention the head is a query head.
        activation: the rule for the MLPs that its effect goes through.

    Raises:
        InvalidInputError: no such layer or head.
    """
    check_pass(frozen)
    layer, head = chosen_head(frozen.view, layer, head)
    trunk = Trunk.of(frozen, activation, to_tokens=frozen.view.unembedding is not None)
    number, branch = next(
        (number, branch)
        for number, step in enumerate(trunk.steps)
        for branch in step.branches
        if branch.layer == layer and branch.is_attention
    )
    read = branch.read_of(head)
    output, *after = branch.write.stages
    assert isinstance(output, Linear)
    width = output.weight.shape[0] // len(branch.nodes)
    linear: list[AffineMap] = [Linear(output.weight[head * width : (head + 1) * width])]
    scale = torch.ones_like(trunk.x[0][..., :1])
    unscaled = list(linear)
    for norm in after:
        assert isinstance(norm, Norm)
        linear.append(Norm(norm.scale, norm.gain, None, norm.centre))
        unscaled.append(Norm(torch.ones_like(norm.scale[:1, :1]), norm.gain, None, norm.centre))
        scale = scale * norm.scale.to(scale)
    *before, mix = read.stages
    assert isinstance(mix, Attention)
    vectors = Chain((*before, *unscaled))(trunk.x[number])
    alone = Chain((*read.stages, *linear))
    return HeadMap(frozen, layer, head, alone, mix.pattern[:, 0], vectors, scale, trunk, number, branch, activation)
