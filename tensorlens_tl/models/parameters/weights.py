"""The weights of a model's parts, in one form for every class."""

from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import Chain, Diagonal, Linear, Norm
from tensorlens_tl.algebra.numerics import maybe, times
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.models.activations import Activation
from tensorlens_tl.models.parameters.norms import NormWeights


@dataclass(frozen=True)
class Gate:
    """``squash(x·W + b)``, from what a sublayer reads: a factor, each channel for several of what it multiplies."""

    linear: Linear
    squash: Activation
    each: int = 1

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos width"]:
        """The factor of every channel."""
        return self.squash(self.linear(x)).repeat_interleave(self.each, dim=-1)


@dataclass(frozen=True)
class InverseScale:
    """1 / the scale of a norm inside a sublayer, from what the norm reads; its gain belongs to the next matrix."""

    norm: NormWeights

    def __call__(self, z: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos 1"]:
        """The factor of every position."""
        return (1 / self.norm.scale_of(z)).to(z)


@dataclass(frozen=True)
class InnerValues:
    """Values through a norm: that of each head's values (Gemma 4), or of a latent vector before them (DeepSeek).

    Attributes:
        entry: from what attention reads to what the norm reads.
        norm: with one scale for each of `groups` of channels; one that only scales, if there are several.
        out: from there to the values; None where the norm gives them.
    """

    entry: Linear
    norm: NormWeights
    groups: int
    out: Linear | None = None

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Chain:
        """With the scales held that the norm has at x."""
        read = self.entry(x)
        if self.out is not None:
            return Chain((self.entry, self.held(read), self.out))
        by_group = read.unflatten(-1, (self.groups, -1))
        factor = times((1 / self.norm.scale_of(by_group)).to(read).expand_as(by_group), self.norm.gain)
        return Chain((self.entry, Diagonal(factor.flatten(-2))))

    def held(self, read: Float[Tensor, "batch pos width"]) -> Norm:
        """The norm of a latent vector, with the scale that it has there."""
        return Norm(self.norm.scale_of(read), self.norm.gain, self.norm.shift, self.norm.centre)


@dataclass(frozen=True)
class HeadRouting:
    """Which experts a token's queries are read by, of a mixture of attention heads (JetMoe).

    Attributes:
        linear: from what attention reads to a number for every expert.
        count: how many experts there are.
        choices: how many a token is sent to: those with the largest numbers, which count by their softmax.
    """

    linear: Linear
    count: int
    choices: int

    def patterns(
        self, pattern: Float[Tensor, "batch choice_kv query key"], x: Float[Tensor, "batch query d_model"]
    ) -> Float[Tensor, "batch head query key"]:
        """The pattern of every expert's heads, times what the expert counts for the query; zero for one not chosen.

        Args:
            pattern: of the choices, the first choice's heads first.
            x: what attention reads.
        """
        numbers, index = self.linear(x).topk(self.choices, dim=-1)
        weight = numbers.float().softmax(-1).to(pattern)  # the router computes in float32, whatever the dtype
        sent = torch.nn.functional.one_hot(index, self.count).to(pattern) * weight[..., None]
        by_choice = pattern.unflatten(1, (self.choices, -1))
        return torch.einsum("bckqj,bqce->bkeqj", by_choice, sent).flatten(1, 2)


@dataclass(frozen=True)
class AttentionWeights:
    """Value and output weights with heads side by side; values keep the key-value heads of grouped attention.

    With the pattern held, attention is ``(output_factor ⊙ (pattern · values(x)))·W_O + b_O``. Values are most often
    x·W_V + b_V, and there is seldom a factor.

    Attributes:
        value_matrix, b_V: W_V and its bias; no matrix where values go through a norm inside (latent attention).
        inner_values: values where they are more than x·W_V + b_V.
        output_factor: what multiplies what the heads give: a gate, or the scale of a norm before W_O. None for 1.
        routing: where heads belong to experts that a token is sent to; None where every token has all heads.
        shared: whether values are those of an earlier block, read from the stream there.
        shown: whether values and what heads give have hook points.
    """

    value_matrix: Float[Tensor, "d_model kv_width"] | None
    b_V: Float[Tensor, "kv_width"] | None
    W_O: Float[Tensor, "width d_model"]
    b_O: Float[Tensor, "d_model"] | None
    heads: int
    kv_heads: int
    inner_values: InnerValues | None = None
    output_factor: Gate | InverseScale | None = None
    routing: HeadRouting | None = None
    shared: bool = False
    shown: bool = True

    @property
    def is_plain(self) -> bool:
        """Whether it is no more than pattern, W_V and W_O."""
        return self.inner_values is None and self.output_factor is None and self.routing is None and not self.shared

    @property
    def hooked(self) -> bool:
        """Whether holding the pattern holds it; else it is held as a whole, by what it reads."""
        return self.is_plain and self.shown

    def scaled(self, factor: float, reads: float = 1.0) -> "AttentionWeights":
        """The same, with what it writes multiplied by a factor, and what it reads by another."""
        scaled = self
        if factor != 1:
            scaled = replace(self, W_O=self.W_O * factor, b_O=maybe(partial(torch.mul, other=factor), self.b_O))
        if reads == 1:
            return scaled
        return replace(scaled, value_matrix=maybe(partial(torch.mul, other=reads), self.value_matrix))

    @property
    def W_V(self) -> Float[Tensor, "d_model kv_width"]:
        """The value weights.

        Raises:
            UnsupportedModelError: values, or what heads give, depend on more than weights and pattern.
        """
        if self.value_matrix is None or not self.is_plain:
            raise UnsupportedModelError(
                "attention with a gate, a norm or a latent inside: what a head reads and writes is no product of its "
                "weights alone. The operator and what is made from it (tensorlens, decompx, stream terms) work."
            )
        return self.value_matrix


@dataclass(frozen=True)
class Latent:
    """What queries or keys are read from in place of the stream (DeepSeek): x·W + b, its first channels normed.

    Attributes:
        entry: the matrix.
        norm: one that only scales.
        rank: how many channels it norms.
    """

    entry: Linear
    norm: NormWeights
    rank: int

    def scale(self, read: Float[Tensor, "batch pos width"]) -> Float[Tensor, "batch pos 1"]:
        """The norm's scale, from what the matrix gives."""
        return self.norm.scale_of(read[..., : self.rank])

    @property
    def gain(self) -> Float[Tensor, "width"]:
        """What every channel is multiplied by, the scale apart."""
        gain = torch.ones_like(self.entry.weight[0])
        return torch.cat([times(gain[: self.rank], self.norm.gain).to(gain), gain[self.rank :]])


@dataclass(frozen=True)
class QueryKeyWeights:
    """Query and key weights with heads side by side, and the norms of queries and keys where there are any.

    `epsilon` is those norms'. Keys keep the key-value heads of grouped attention. With a latent, the weights are from
    that to heads.
    """

    W_Q: Float[Tensor, "d_read width"]
    b_Q: Float[Tensor, "width"] | None
    W_K: Float[Tensor, "d_latent kv_width"]
    b_K: Float[Tensor, "kv_width"] | None
    q_norm: NormWeights | None
    k_norm: NormWeights | None
    epsilon: float
    query_latent: Latent | None = None
    key_latent: Latent | None = None


@dataclass(frozen=True)
class WhiteningWeights:
    """What the stream goes through before a block: ``w_i = x_i @ entry + w_{i−1} @ step``."""

    entry: Float[Tensor, "d_model d_model"]
    step: Float[Tensor, "d_model d_model"]


@dataclass(frozen=True)
class MLPWeights:
    """``out(φ(in))`` or gated ``out(φ(gate)·in + b_post)``; `W_gate` is None for a plain MLP.

    Attributes:
        linear_activation: ψ of a gated MLP φ(gate)·ψ(in) (the clamp of gpt-oss); None for the identity.
        post_factor: what multiplies the hidden vector after the activation: the scale of a norm inside (BitNet); None
            without.
        hooked: whether its pre-activations have hook points; else they follow from what it reads, and it is held as a
            whole.
    """

    W_in: Float[Tensor, "d_model d_mlp"]
    b_in: Float[Tensor, "d_mlp"] | None
    W_gate: Float[Tensor, "d_model d_mlp"] | None
    b_gate: Float[Tensor, "d_mlp"] | None
    b_post: Float[Tensor, "d_mlp"] | None
    W_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, "d_model"] | None
    activation: Activation
    linear_activation: Activation | None = None
    post_factor: InverseScale | None = None
    hooked: bool = True

    @property
    def hidden(self) -> int:
        """Numbers that a vector takes inside at most."""
        matrices = [W for W in (self.W_in, self.W_gate, self.W_out) if W is not None]
        return self.W_in.shape[1] * len(matrices)

    def scaled(self, factor: float) -> "MLPWeights":
        """The same, with what it writes multiplied by a factor."""
        if factor == 1:
            return self
        return replace(self, W_out=self.W_out * factor, b_out=maybe(partial(torch.mul, other=factor), self.b_out))


@dataclass(frozen=True)
class MLMHead:
    """The transform between a masked language model's encoder and its unembedding: norm(φ(x·W + b)).

    `norm` is None in a classifier's pooler, which has none. `scale_name` is the hook point of its norm's scale, or None
    where that follows from what the norm reads.
    """

    W: Float[Tensor, "d_model d_model"]
    b: Float[Tensor, "d_model"] | None
    activation: Activation
    norm: NormWeights | None
    scale_name: str | None
