"""A layer's attention weights as `HeadWeights`, from any model."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.scores import score_reading
from tensorlens_tl.circuits.weights import as_pass, as_view
from tensorlens_tl.compress.heads import HeadWeights
from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.models.writing import writable
from tensorlens_tl.passes import FrozenPass


@checked_names
def head_weights(model: ModelLike | ModelView, layer: int) -> HeadWeights:
    """One layer's projections by head, copied, half precision as float32.

    >>> from tensorlens_tl import compress
    >>> compress.head_weights(model, 0).matrices["Q"].shape  # head, d_model, d_head
    torch.Size([4, 128, 32])

    Args:
        model: a model or a `FrozenPass`.
        layer: which one.

    Returns:
        Q, K, V and O by letter, each `[head, d_model, d_head]`, and the biases.

    Raises:
        InvalidInputError: no such layer.
        UnsupportedModelError: attention that cannot be read or written, or quantised weights.
        NumericalError: NaN or Inf in a weight.
    """
    view = as_view(model)
    layer = whole_number("layer", layer, -view.n_layers, view.n_layers - 1, why="a layer of this model")
    return read(view, layer % view.n_layers, cache(partial(as_pass, view)))


def read(view: ModelView, layer: int, short_pass: Callable[[], FrozenPass]) -> HeadWeights:
    """`head_weights`, with a pass of a few tokens that serves all layers and runs when it is first needed."""
    view.blocks[layer].require_plain_attention()  # not more than four matrices
    parameters = writable(view.blocks[layer])
    matrices = {letter: _copied(parameters[f"W_{letter}"]) for letter in "QKV"} | {"O": _copied(parameters["W_O"].mT)}
    biases = {letter: _copied(parameters[f"b_{letter}"]) for letter in "QKV" if f"b_{letter}" in parameters}
    where = f"blocks.{layer} of this {view.description}"
    for kind, weights in (("W", matrices), ("b", biases)):
        for letter, weight in weights.items():
            if not bool(torch.isfinite(weight).all()):
                raise NumericalError(f"{where}: attn.{kind}_{letter} has values that are not finite.")
    return HeadWeights(matrices, biases, partial(why_scores_fix_the_basis, view, layer, short_pass), where)


def mlp_matrices(view: ModelView, layer: int) -> dict[str, Tensor]:
    """One layer's MLP matrices by name, copied.

    Raises:
        InvalidInputError: the layer has no MLP.
        UnsupportedModelError: an MLP that cannot be read or written, or quantised weights.
    """
    block = view.blocks[layer]
    where = f"blocks.{layer} of this {view.description}"
    if block.dense_mlp is None:
        raise InvalidInputError(f"mlp: {where} has no MLP.")
    if block.dense_mlp.post_factor is not None:
        raise UnsupportedModelError(
            f"mlp: {where} has a norm inside its MLP, whose gain and scale stand between its matrices; they are not "
            "compressed. Leave mlp= out."
        )
    names = ["W_in", "W_gate", "W_out"]
    if block.dense_mlp.W_gate is None:
        names.remove("W_gate")
    parameters = writable(block)
    packed = [name for name in names if name not in parameters]
    if packed:
        raise UnsupportedModelError(
            f"{where}: mlp.{packed[0]} is not a view of the model's floating-point parameters (packed or quantised?), "
            "so writing to it would change nothing. Load the model in floating point."
        )
    return {name: _copied(parameters[name]) for name in names}


def why_scores_fix_the_basis(view: ModelView, layer: int, short_pass: Callable[[], FrozenPass]) -> str | None:
    """Why queries and keys cannot be given another basis without changing the scores, or None where they can.

    Read from the weights, and decided by a pass: scores that are a plain product of queries and keys reproduce the
    layer's pattern (`tensorlens_tl.circuits.scores`), or they do not.
    """
    weights = view.blocks[layer].query_key
    if weights.q_norm is not None or weights.k_norm is not None:
        return "norms of queries and keys"
    try:
        reading = score_reading(short_pass(), layer)
    except UnsupportedModelError as error:
        return str(error)
    if reading.rotation is None:
        return None
    return "rotary positions"


def _copied(weight: Tensor) -> Tensor:
    return upcast(weight.detach()).clone(memory_format=torch.contiguous_format)
