"""The two sublayers of RWKV-4 (Peng and others 2023) as exact affine maps, with their gates held at one input.

Both read each token mixed with the one before it, ``mix(x)_i = μ ⊙ x_i + (1 − μ) ⊙ x_{i−1}``, with a μ for each
matrix. Time mixing gives every channel the weighted mean of its values so far,

    y_i = (Σ_{j<i} exp(k_j − (i−1−j)·w)·v_j + exp(k_i + u)·v_i) / (the same without v)

whose weights, which sum to 1, take the place of an attention pattern; w and u are parameters of the channel. With the
weights and the gate σ(r) held, it is linear in the values. Channel mixing is an MLP, ``σ(r) ⊙ (relu(k)²·W_out)``. Right
to left, with what a token's mean takes from earlier ones written as a scan,

    time mixing:    Linear(out) @ σ(r) @ (SelectiveScan @ shift + Diagonal) @ Linear(value) @ mix
    channel mixing: σ(r) @ Linear(out) @ ratio @ Linear(key) @ mix

Hugging Face's module rounds the keys of time mixing to float32 whatever its dtype, and so does the map. Padding counts
as any token does: the model takes no notice of its mask.

The model halves its stream after every few blocks, past its hook points, and in its first run scales weights to fit.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from tensorlens_tl.algebra import AffineMap, CausalConvolution, Chain, Diagonal, Identity, Linear, SelectiveScan, Sum
from tensorlens_tl.models.activations import coefficients
from tensorlens_tl.models.parameters import innermost
from tensorlens_tl.models.sublayers.mixing import Ends, Mask, MixerWeights, read_linear, read_part, require

TIME_MIX = ("time_decay", "time_first", "time_mix_key", "time_mix_value", "time_mix_receptance", "output")
"""What a time mixing has; beside them, its matrices `key`, `value` and `receptance`."""

CHANNEL_MIX = ("time_mix_key", "time_mix_receptance", "key", "value", "receptance")
"""What a channel mixing has."""


@dataclass(frozen=True)
class Mix:
    """A matrix that reads each token mixed with the one before it."""

    convolution: CausalConvolution
    linear: Linear

    def __call__(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos width"]:
        """What the matrix gives."""
        return self.linear(self.convolution(x))

    def stages(self, length: int) -> tuple[AffineMap, AffineMap]:
        """The same as maps of so many positions."""
        return replace(self.convolution, length=length), self.linear


def weighted_mean(
    k: Float[Tensor, "batch pos channel"], A: Float[Tensor, "channel"], bonus: Tensor, dtype: torch.dtype
) -> Sum:
    """Return what a channel takes from earlier values, and what from the token's own.

    `A` are the rates at which weights decay, `bonus` is added to a token's key where it reads itself; computed in
    `dtype`.
    """
    keys = k.double()  # weights of far tokens are small beside those of a channel's largest key, and must not vanish
    largest = keys.amax(1, keepdim=True)
    itself = (keys + bonus - largest).exp()
    earlier = pad((keys - largest).exp(), (0, 0, 1, 0))[:, :-1, :, None]
    ones = torch.ones_like(itself)
    scan = SelectiveScan(ones, A.double(), earlier, ones[..., None])
    before = k.new_tensor([[1.0, 0.0]], dtype=dtype).expand(k.shape[-1], -1)
    shift = CausalConvolution(before, length=k.shape[1])  # every channel of the position before; zero at the first
    total = scan.push(shift.push(ones)) + itself
    held = replace(scan, C=total.reciprocal()[..., None])
    return Sum((Chain((shift, held)), Diagonal((itself / total).to(dtype))))


@dataclass(frozen=True)
class ChannelMixWeights:
    """Channel mixing, in the place of an MLP, frozen as a whole: neurons read by `key`, gated by `receptance`."""

    key: Mix
    receptance: Mix
    W_out: Float[Tensor, "d_mlp d_model"]
    b_out: Float[Tensor, "d_model"] | None

    @property
    def hooked(self) -> bool:
        """True if its pre-activations are held one by one."""
        return False

    @property
    def hidden(self) -> int:
        """Numbers that a vector takes inside at most."""
        return 2 * self.W_out.shape[0] + 2 * self.W_out.shape[1]

    def hold(self, x: Float[Tensor, "batch pos d_model"], rule: str) -> Chain:
        """Return the sublayer as a map, with neurons and gate frozen at `x` by an activation rule.

        The neurons are a plain MLP's; their output times the gate is a gated MLP's product.
        """
        length = x.shape[1]
        pre = self.key(x)
        neurons = coefficients(squared_relu, pre, None, rule)
        out = Linear(self.W_out, self.b_out)
        gate = self.receptance(x)
        held = coefficients(torch.sigmoid, gate, out(squared_relu(pre)), rule)
        written = (*self.key.stages(length), Diagonal(neurons.through, neurons.rest), out)
        if held.gate is None:
            return Chain((*written, Diagonal(held.through)))
        by_gate = Chain((*self.receptance.stages(length), Diagonal(held.gate, held.rest)))
        return Chain((Sum((Chain((*written, Diagonal(held.through))), by_gate)), Identity()))


def squared_relu(z: Tensor) -> Tensor:
    """relu(z)²."""
    return z.relu().square()


# ------------------------------------------------------------------ reading modules


def is_time_mix(module: nn.Module) -> bool:
    """True if a mixer is a time mixing, by what it is made of."""
    return all(hasattr(module, name) for name in TIME_MIX)


def read_time_mix(module: Any) -> MixerWeights:
    """Return the parts of a time mixing; raise `UnsupportedModelError` with the part that is not as expected."""
    names = ("key", "value", "receptance")
    key, value, receptance = mixes = [_mix(module, name) for name in names]
    W_out, b_out = read_linear(module, "output")
    channels = len(W_out)
    for name, mix in zip(names, mixes, strict=True):
        width = mix.linear.weight.shape[1]
        require(width == channels, module, name, f"gives {width} numbers, not the {channels} that `output` reads")
    A, bonus = -module.time_decay.detach().exp(), module.time_first.detach()
    require(A.shape == (channels,), module, "time_decay", "is not one number for each channel")

    def hold(x: Float[Tensor, "batch pos d_model"], mask: Mask | None) -> Chain:
        """With the weights of the mean and the gate held; no token is masked."""
        gate = receptance(x).sigmoid()
        mean = weighted_mean(key(x).float(), A, bonus, x.dtype)
        return Chain((*value.stages(x.shape[1]), mean, Diagonal(gate), Linear(W_out, b_out)))

    ends = Ends(value.linear.weight, value.linear.offset, value.convolution, nn.Identity(), W_out, b_out)
    return MixerWeights("TimeMix", ends, hold, A, f"{type(module).__name__} reads padding as it reads tokens")


def is_channel_mix(module: Any) -> bool:
    """True if what stands in the place of an MLP is a channel mixing, by what it is made of."""
    return all(hasattr(module, name) for name in CHANNEL_MIX)


def channel_mix_weights(module: Any) -> ChannelMixWeights:
    """Return the parts of a channel mixing; raise `UnsupportedModelError` with the part that is not as expected."""
    return ChannelMixWeights(_mix(module, "key"), _mix(module, "receptance"), *read_linear(module, "value"))


def halving_period(block: Any) -> int:
    """After how many blocks the model halves its stream; 0 where it does not."""
    return getattr(getattr(innermost(block), "config", None), "rescale_every", 0)


def halves_after(block: Any, layer: int) -> bool:
    """True if the model halves its stream after a block: not in train mode, in which its weights are not scaled."""
    every = halving_period(block)
    return every > 0 and not innermost(block).training and (layer + 1) % every == 0


def _mix(module: Any, name: str) -> Mix:
    weight, bias = read_linear(module, name)
    share = getattr(module, f"time_mix_{name}").detach().flatten()
    require(len(share) == len(weight), module, f"time_mix_{name}", "is not one number for each channel of the stream")
    require(_shifts_by_one(module), module, "time_shift", "does not give each token the one before it")
    return Mix(CausalConvolution(torch.stack([1 - share, share], dim=-1)), Linear(weight, bias))


@torch.no_grad()
def _shifts_by_one(module: Any) -> bool:
    """True if its `time_shift` is what its name says."""
    probe = torch.arange(1.0, 4.0)[None, :, None]
    return read_part(module, "time_shift")(probe).flatten().tolist() == [0.0, 1.0, 2.0]
