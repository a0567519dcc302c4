"""Transformers whose weights are constructed by hand, and how they become TransformerLens models.

The residual stream is a list of named spaces, such as ``token`` (which token stands here, one-hot) or ``position``. A
head is four matrices that read and write such spaces. `Design` holds all of them in the stream's own channels; with
norms, `Design.model` writes the same weights into a wider stream on which LayerNorm does next to nothing:

* every channel x is held twice, as x/√2 and −x/√2, so that the mean is zero and centring changes nothing;
* the position embeddings hold a constant of size `CONSTANT` in two more channels, which nothing reads. The variance is
  then nearly the constant's alone, and the gain multiplies by its root, so that a norm's output is its input times a
  factor within 1e-3 of 1.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError

SHARP = 40.0
"""The score of a key that matches, above one that does not: exp(−40) of the attention goes elsewhere."""

CONSTANT = 100.0
"""The length of the constant vector that programs with norms hold in their stream."""

BOS = "<|bos|>"


class Spaces:
    """Named groups of channels of a residual stream.

    Args:
        sizes: channels of each, in their order.
    """

    def __init__(self, **sizes: int) -> None:
        self.width = sum(sizes.values())
        starts = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
        self._places = {name: slice(starts[i], starts[i] + size) for i, (name, size) in enumerate(sizes.items())}

    def read(self, name: str, matrix: Float[Tensor, "space out"] | None = None) -> Float[Tensor, "width out"]:
        """The map from the stream to a space's channels, times a matrix."""
        place = self._places[name]
        matrix = torch.eye(place.stop - place.start).double() if matrix is None else matrix.double()
        projection = torch.zeros(self.width, matrix.shape[1], dtype=torch.float64)
        projection[place] = matrix
        return projection

    def write(self, name: str, matrix: Float[Tensor, "values space"] | None = None) -> Float[Tensor, "values width"]:
        """A matrix, times the map from a space's channels to the stream."""
        return self.read(name, None if matrix is None else matrix.T).T


@dataclass(frozen=True, eq=False)
class Head:
    """One head: score = (x_i query) · (x_j key), and Σ_j pattern_ij (x_j value) output is written."""

    query: Float[Tensor, "width match"]
    key: Float[Tensor, "width match"]
    value: Float[Tensor, "width moved"]
    output: Float[Tensor, "moved width"]


@dataclass(frozen=True, eq=False)
class Neurons:
    """A ReLU layer: relu(x read + bias) write."""

    read: Float[Tensor, "width neuron"]
    bias: Float[Tensor, "neuron"]
    write: Float[Tensor, "neuron width"]


@dataclass(frozen=True, eq=False)
class Design:
    """A whole transformer, without norms.

    Attributes:
        name: of the program.
        words: its vocabulary; token ids are places in it.
        tokens: what each token's embedding is, `[word, width]`.
        positions: what each position's embedding is, `[pos, width]`.
        layers: the heads of each layer.
        neurons: the ReLU layer after a layer's heads, by layer.
        unembed: logits from the stream, `[width, word]`.
    """

    name: str
    words: tuple[str, ...]
    tokens: Float[Tensor, "word width"]
    positions: Float[Tensor, "pos width"]
    layers: tuple[tuple[Head, ...], ...]
    unembed: Float[Tensor, "width word"]
    neurons: dict[int, Neurons] = field(default_factory=dict[int, Neurons])

    def model(self, kind: str | None, *, norm: bool, dtype: torch.dtype) -> Any:
        """The TransformerLens model; arguments as of `Program.model`."""
        width = self.tokens.shape[1]
        basis = torch.eye(width).double()
        constant = torch.zeros(width).double()
        if norm:
            basis = torch.cat([basis, -basis, torch.zeros(width, 2).double()], dim=1) / math.sqrt(2)
            constant = torch.tensor([0.0] * 2 * width + [1.0, -1.0]).double() * CONSTANT / math.sqrt(2)
        heads = [head for layer in self.layers for head in layer]
        sizes = {
            "n_layers": len(self.layers),
            "n_heads": max(len(layer) for layer in self.layers),
            "d_head": max(max(head.query.shape[1], head.value.shape[1]) for head in heads),
            "d_mlp": max([1, *(len(neurons.bias) for neurons in self.neurons.values())]),
            "d_model": basis.shape[1],
            "d_vocab": len(self.words),
            "n_ctx": len(self.positions),
            "attn_only": not self.neurons,
            "act_fn": "relu",
            "normalization_type": "LN" if norm else None,
        }
        model = _empty(kind, sizes, dtype, f"tensorlens-program-{self.name}{'-norm' * norm}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            _write(model.embed.W_E, self.tokens @ basis)
            _write(model.pos_embed.W_pos, self.positions @ basis + constant)
            _write(model.unembed.W_U, basis.T @ self.unembed)
            for number, block in enumerate(model.blocks):
                _write_heads(block.attn, self.layers[number], basis)
                neurons = self.neurons.get(number)
                if neurons is not None:
                    _write(block.mlp.W_in, basis.T @ neurons.read)
                    _write(block.mlp.b_in, neurons.bias)
                    _write(block.mlp.W_out, neurons.write @ basis)
            for gain in _gains(model) if norm else []:
                gain.fill_(CONSTANT / math.sqrt(basis.shape[1]))
        return model.eval()


def _write(weight: Tensor, value: Tensor) -> None:
    """Copy into the first rows, columns and heads of a weight."""
    weight.data[tuple(slice(size) for size in value.shape)].copy_(value)


def _write_heads(attention: Any, heads: tuple[Head, ...], held: Float[Tensor, "width d_model"]) -> None:
    for number, head in enumerate(heads):
        one = slice(number, number + 1)
        scale = math.sqrt(attention.W_Q.shape[-1])  # which the model divides scores by
        _write(attention.W_Q[one], (held.T @ head.query * scale)[None])
        _write(attention.W_K[one], (held.T @ head.key)[None])
        _write(attention.W_V[one], (held.T @ head.value)[None])
        _write(attention.W_O[one], (head.output @ held)[None])


def _gains(model: Any) -> list[Tensor]:
    """The gain of every norm."""
    blocks = [getattr(block, name) for block in model.blocks for name in ("ln1", "ln2") if hasattr(block, name)]
    norms = [*blocks, model.ln_final]
    return [norm.w if hasattr(norm, "w") else norm.weight for norm in norms]


def _empty(kind: str | None, sizes: dict[str, Any], dtype: torch.dtype, name: str) -> Any:
    """A model of these sizes; what its weights are is of no account."""
    try:
        from transformer_lens import HookedTransformer, HookedTransformerConfig
    except ImportError:  # TransformerLens 4
        HookedTransformer = HookedTransformerConfig = None
    if kind not in (None, "hooked", "bridge"):
        raise InvalidInputError(f"kind={kind!r}; use 'hooked' or 'bridge'.")
    if kind == "hooked" and HookedTransformer is None:
        raise InvalidInputError(
            "kind='hooked': TransformerLens 4 has no HookedTransformer; use kind='bridge', or transformer-lens 3.9."
        )
    if kind == "bridge" or HookedTransformer is None or HookedTransformerConfig is None:
        from transformer_lens.config import TransformerBridgeConfig
        from transformer_lens.model_bridge import TransformerBridge

        config = TransformerBridgeConfig(**sizes, init_weights=False)
        return TransformerBridge.boot_native(config, dtype=dtype, device="cpu", model_name=name)
    config = HookedTransformerConfig(
        **sizes, dtype=dtype, device="cpu", init_weights=False, model_name=name, default_prepend_bos=False
    )
    return HookedTransformer(config, move_to_device=False)
