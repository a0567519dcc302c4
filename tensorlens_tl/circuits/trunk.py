"""The frozen model as one road with side roads: the form in which paths are counted.

The residual stream goes through *steps*. At each step *branches* (the attention heads, the MLP) read the stream and
write back to it, and then the whole stream goes through the step's *outer* map, if it has one (a post-LN norm; at the
end the final norm or a prediction head):

    x[s+1] = outer( x[s] + Σ_branches write(read(x[s])) )

A sequential block is two steps, a parallel block one with two branches. The road without its branches is how a vector
written to the stream reaches the end *directly*: the identity in a pre-LN model, the norms in a post-LN model.

A branch's hidden vector, read(x), is a row of groups: one per head, or one for the whole MLP. A group is a *node*:
what it writes is linear in its own part of the hidden vector, so its share of anything is an inner product with the
part of the pulled-back vector. What `write` and `outer` add besides are *biases*, sources of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.activation import check_rule
from tensorlens_tl.collapse import wide
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.inputs import query_positions
from tensorlens_tl.layouts import Place
from tensorlens_tl.maps import ZERO, AffineMap, Attention, Chain, Identity, Linear, Sum
from tensorlens_tl.positions import place
from tensorlens_tl.targets import question

if TYPE_CHECKING:
    from tensorlens_tl.frozen import FrozenPass


@dataclass(frozen=True, eq=False)
class Branch:
    """One sublayer beside the road.

    Attributes:
        layer: its block.
        read: stream -> hidden: heads side by side (mixed over positions), or the MLP's neurons after the activation.
        write: hidden -> stream; its bias is `bias_name`'s, not the nodes'.
        nodes: the names of its nodes, ``"L0H3"`` or ``"MLP0"``.
        is_attention: whether the nodes are heads.
    """

    layer: int
    read: Chain
    write: Chain
    nodes: tuple[str, ...]
    bias_name: str
    is_attention: bool

    def split(self, hidden: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows node channel"]:
        """A hidden vector by node."""
        return rearrange(hidden, "... (node channel) -> ... node channel", node=len(self.nodes))

    def read_of(self, node: int) -> Chain:
        """What one node reads, as a map of its own: for a head its values and pattern only."""
        if not self.is_attention:
            return self.read
        *before, values, mix = self.read.stages
        assert isinstance(values, Linear)
        assert isinstance(mix, Attention)
        group = mix.pattern.shape[1] // mix.kv_heads
        width = values.weight.shape[1] // mix.kv_heads
        kept = slice(node // group * width, (node // group + 1) * width)
        own = Linear(values.weight[:, kept], None if values.offset is None else values.offset[kept])
        return Chain((*before, own, Attention(mix.pattern[:, node : node + 1], 1)))


@dataclass(frozen=True, eq=False)
class Step:
    """Branches of one layer that read the same stream, and what the stream goes through after them."""

    layer: int
    branches: tuple[Branch, ...]
    outer: AffineMap
    outer_name: str

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of all branches, in their order."""
        return tuple(node for branch in self.branches for node in branch.nodes)

    @property
    def map(self) -> Chain:
        """The whole step."""
        inside = Sum((Identity(), *(branch.write @ branch.read for branch in self.branches)))
        return Chain((inside, self.outer))

    def along(self, x: Float[Tensor, "*rows batch pos d_model"]) -> Float[Tensor, "*rows batch pos d_model"]:
        """What the road alone does to the stream, the step's own biases included."""
        for branch in self.branches:
            x = x if branch.write.bias is ZERO else x + branch.write.bias
        return self.outer(x)

    @property
    def biases(self) -> list[tuple[str, Tensor, bool]]:
        """What the step adds by itself: name, bias, and whether it still goes through `outer`."""
        found = [(branch.bias_name, branch.write.bias, True) for branch in self.branches]
        found.append((self.outer_name, self.outer.bias, False))
        return [item for item in found if item[1] is not ZERO]


@dataclass(frozen=True, eq=False)
class Pulled:
    """A vector at the end, pulled back along the steps.

    Attributes:
        stream: at the stream before each step, and at the end, each `[*rows, batch, pos, d_model]`.
        sums: at each step's sum: after its branches have written and before its outer map.
    """

    stream: list[Tensor]
    sums: list[Tensor]

    def of_biases(self, steps: tuple[Step, ...]) -> Iterator[tuple[int, str, Tensor, Tensor]]:
        """Every bias on the way: step, name, the bias, and the vector that meets it."""
        for number, step in enumerate(steps):
            for name, bias, inside in step.biases:
                yield number, name, bias, self.sums[number] if inside else self.stream[number + 1]


@dataclass(frozen=True, eq=False)
class Trunk:
    """A frozen pass as steps, with the values that its own input gives them.

    Attributes:
        x: the stream before each step, and after the last, `[batch, pos, d_model]`.
        hidden: each branch's hidden vector, by step and branch, `[batch, pos, width]`.
    """

    frozen: "FrozenPass"
    steps: tuple[Step, ...]
    x: list[Tensor] = field(default_factory=list)
    hidden: list[tuple[Tensor, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, frozen: "FrozenPass", activation: str = "ratio", *, to_tokens: bool = True) -> "Trunk":
        """The trunk up to the stream that is unembedded, or (``to_tokens=False``) to the operator's output.

        Raises:
            InvalidInputError: no such activation rule.
            FrozenModelError: the weights were changed since the pass.
        """
        rule = check_rule(activation)
        frozen.check_fresh()
        steps = [step for layer in range(frozen.n_layers) for step in _block_steps(frozen, layer, rule)]
        final, head = frozen.final_norm(), frozen.prediction_head(rule) if to_tokens else None
        for end, name in ((final, "ln_final.b"), (head, "prediction head b")):
            if end is not None:
                steps.append(Step(-1, (), end, name))
        trunk = cls(frozen, tuple(steps))
        x = frozen.resid_pre(0)
        for step in steps:
            hidden = tuple(branch.read(x) for branch in step.branches)
            trunk.x.append(x)
            trunk.hidden.append(hidden)
            written = sum((b.write(h) for b, h in zip(step.branches, hidden, strict=True)), start=x)
            x = step.outer(written)
        trunk.x.append(x)
        return trunk

    def pull(self, g: Float[Tensor, "*rows batch pos d_model"], *, branches: bool = True) -> Pulled:
        """A vector at the end pulled through everything, or (``branches=False``) along the road alone: directly."""
        stream, sums = [g], []
        for step in reversed(self.steps):
            g = step.outer.pull(g)
            sums.append(g)
            if branches:
                g = sum((branch.read.pull(branch.write.pull(g)) for branch in step.branches), start=g)
            stream.append(g)
        return Pulled(stream[::-1], sums[::-1])

    @cached_property
    def road(self) -> list[Tensor]:
        """What the road alone carries, the input and the biases on the way: before each step, and to the end."""
        carried = [self.x[0]]
        for step in self.steps:
            carried.append(step.along(carried[-1]))
        return carried

    @cached_property
    def constant_hidden(self) -> list[tuple[Tensor, ...]]:
        """Each branch's hidden vector for what the road alone carries to it."""
        return [
            tuple(branch.read(x) for branch in step.branches) for step, x in zip(self.steps, self.road, strict=False)
        ]


@dataclass(frozen=True, eq=False)
class Asked:
    """A question about one query of a frozen pass, and the trunk that leads to it.

    Attributes:
        seed: the question's vector at the query of every prompt, as one row `[1, batch, pos, d_model]`.
        constant: what the answer adds besides (b_U), `[batch]`.
        total: the model's own number that is asked for, before any final soft cap, `[batch]`.
        positions: the query's place, `[batch, 1]`.
        soft_cap: the cap that the model applies after it, or None.
        label: the question for people.
    """

    trunk: Trunk
    seed: Float[Tensor, "1 batch pos d_model"]
    constant: Float[Tensor, "batch"]
    total: Float[Tensor, "batch"]
    positions: Int[Tensor, "batch 1"]
    soft_cap: float | None
    label: str


def ask(frozen: "FrozenPass", target: Any, minus: Any, direction: Any, query: Any, activation: str) -> Asked:
    """Check a question and build the trunk to its end.

    Raises:
        InvalidInputError: no frozen pass, a query that is None or out of range, and what `question` refuses.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
    """
    asked = question(frozen, target, minus, direction)
    if query is None:
        raise InvalidInputError("query=None: one query at a time here; pass an integer.")
    positions = query_positions(frozen.mask, query)
    trunk = Trunk.of(frozen, activation, to_tokens=asked.of_tokens)
    own = frozen.unembedded() if asked.of_tokens else frozen.output
    own = wide(torch.take_along_dim(own, positions[..., None], dim=1)[:, 0])
    return Asked(
        trunk,
        seed=place(asked.vectors[None], positions.T, trunk.x[-1]),
        constant=asked.constant.to(own),
        total=(own * asked.vectors).sum(-1) + asked.constant,
        positions=positions,
        soft_cap=frozen.view.soft_cap if asked.of_tokens else None,
        label=asked.label,
    )


def _block_steps(frozen: "FrozenPass", layer: int, rule: str) -> list[Step]:
    """One block's steps, by its proven layout."""
    layout = frozen.layouts[layer]
    *values, output = frozen.attention(layer).stages
    heads = tuple(f"L{layer}H{head}" for head in range(frozen.view.blocks[layer].attention.heads))
    branches = [(layout.attn, _branch(frozen, layer, layout.attn, (*values,), output, heads, "b_O", True))]
    mlp = frozen.mlp(layer, rule)
    if mlp is not None:
        *hidden, output = mlp.stages
        branches.append((layout.mlp, _branch(frozen, layer, layout.mlp, (*hidden,), output, (f"MLP{layer}",), "b_out")))
    if layout.parallel:
        return [Step(layer, tuple(branch for _, branch in branches), Identity(), f"L{layer}")]
    steps = []
    for at, branch in branches:
        outer = Identity() if at.outer is None else frozen.norm(layer, at.outer)
        steps.append(Step(layer, (branch,), outer, f"L{layer}.{at.outer}.b"))
    return steps


def _branch(
    frozen: "FrozenPass",
    layer: int,
    at: Place,
    read: tuple[AffineMap, ...],
    output: AffineMap,
    nodes: tuple[str, ...],
    bias_name: str,
    is_attention: bool = False,
) -> Branch:
    before = () if at.before is None else (frozen.norm(layer, at.before),)
    after = () if at.after is None else (frozen.norm(layer, at.after),)
    return Branch(layer, Chain((*before, *read)), Chain((output, *after)), nodes, f"L{layer}.{bias_name}", is_attention)
