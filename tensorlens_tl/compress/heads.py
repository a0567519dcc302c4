"""One layer's attention projections by head, as tensors: how they are stacked, and the freedom that they have.

No circuit sees the basis inside a head: with any invertible G, queries W_Q·G and keys W_K·G⁻ᵀ make the same scores, and
values W_V·G with outputs G⁻¹·W_O write the same. Tucker's shared factor of that axis does see it. `in_circuit_gauge`
moves every head to the one basis that its own circuits single out.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_names, whole_number
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.scores import score_reading
from tensorlens_tl.circuits.weights import as_pass, as_view
from tensorlens_tl.compress.tucker import Layout
from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.models.writing import writable
from tensorlens_tl.passes import FrozenPass

LETTERS = "QKVO"
LAYOUTS = ("paper", "released")
"""What `stack_heads` splits: the heads, or d_model."""
GAUGES = (None, "circuit")


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """One layer's four projections by head, outputs transposed, and the biases of the first three.

    Keys and values have the key-value heads of grouped attention: query head h has key head ``h // group``.

    Attributes:
        matrices: by letter: Q and O `[head, d_model, d_head]`, K and V `[kv, d_model, d_head]`.
        biases: by letter, `[head, d_head]`, where there are any.
        fixed_scores: says why the basis of queries and keys in a head is not free (rotary positions, say), or None;
            called only where it matters.
        where: the layer, for messages.
    """

    matrices: Mapping[str, Float[Tensor, "_head _d_model _d_head"]]
    biases: Mapping[str, Float[Tensor, "_head d_head"]]
    fixed_scores: Callable[[], str | None] = lambda: None
    where: str = "this layer"

    @property
    def heads(self) -> int:
        """The query heads."""
        return len(self.matrices["Q"])

    @property
    def kv_heads(self) -> int:
        """The key-value heads."""
        return len(self.matrices["K"])

    @property
    def group(self) -> int:
        """How many query heads share a key-value head."""
        return self.heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """The numbers in all four matrices; biases are never counted."""
        return self.count(LETTERS)

    def count(self, letters: str) -> int:
        """The numbers in some of the matrices."""
        return sum(self.matrices[letter].numel() for letter in letters)

    def changed(self, matrices: Mapping[str, Tensor], biases: Mapping[str, Tensor] | None = None) -> "HeadWeights":
        """The same with other weights for some letters."""
        return replace(self, matrices={**self.matrices, **matrices}, biases={**self.biases, **(biases or {})})

    def check_free(self, letters: str) -> None:
        """Raise `UnsupportedModelError` where queries or keys are among the letters and their basis is not free."""
        if not set(letters) & set("QK"):
            return
        why = self.fixed_scores()
        if why is not None:
            raise UnsupportedModelError(
                f"{self.where}: the basis of queries and keys inside a head is not free here ({why}), so "
                "their circuit has no gauge. Use matrices='VO', or a method that leaves the basis alone."
            )


def check_letters(matrices: object) -> str:
    """Some of Q, K, V and O, in that order."""
    if not isinstance(matrices, str) or not matrices or set(matrices) - set(LETTERS):
        raise InvalidInputError(f"matrices={matrices!r}: pass some of 'QKVO', such as 'VO'.")
    return "".join(letter for letter in LETTERS if letter in matrices)


# ------------------------------------------------------------------ tensors


@checked_names
def stack_heads(
    weights: HeadWeights, matrices: str = LETTERS, layout: Layout = "paper"
) -> Float[Tensor, "d1 d2 slices h"]:
    """The matrices of every head as one tensor (TensorLLM Eqs. 7–8): `[d_model, d_head, slices, heads]`.

    The unit of grouped attention is the key-value group: Q and O give a slice for each of its query heads, K and V one,
    2g + 2 in all. ``layout="released"`` is what the authors' code is reported to do instead: it views each matrix
    `[heads·d_head, d_model]` as `[heads·d_head, heads, d_model/heads]`, which cuts d_model, not the heads.

    Raises:
        InvalidInputError: no such layout, or one that these shapes do not allow.

    >>> from tensorlens_tl import compress
    >>> compress.stack_heads(compress.head_weights(model, 0)).shape  # d_model d_head matrices heads
    torch.Size([128, 32, 4, 4])
    """
    if layout == "paper":
        widths = {letter: weights.matrices[letter].shape[2] for letter in matrices}
        if len(set(widths.values())) > 1:
            raise InvalidInputError(f"{weights.where}: heads of different widths ({widths}) cannot be stacked.")
        split = [rearrange(weights.matrices[m], "(kv g) d k -> d k g kv", kv=weights.kv_heads) for m in matrices]
        return torch.cat(split, dim=2)
    check_choice("layout", layout, LAYOUTS)
    first, *others = (weights.matrices[letter].shape for letter in matrices)
    heads, d_model, _ = first
    if any(shape != first for shape in others) or d_model % heads:
        raise InvalidInputError(
            f"layout='released': it needs matrices of one shape and as many heads as divide d_model; {weights.where} "
            f"has {weights.heads} query heads, {weights.kv_heads} key-value heads and d_model {d_model}."
        )
    return torch.stack([rearrange(weights.matrices[m], "h (c e) k -> (h k) e c", c=heads) for m in matrices], dim=2)


def unstacked(
    tensor: Float[Tensor, "d1 d2 slices h"], matrices: str, layout: Layout, heads: int, kv_heads: int
) -> dict[str, Float[Tensor, "_head d_model d_head"]]:
    """`stack_heads` undone: the matrices by letter."""
    if layout == "released":
        slices = zip(matrices, tensor.unbind(2), strict=True)
        return {letter: rearrange(part, "(h k) e c -> h (c e) k", h=heads) for letter, part in slices}
    group = heads // kv_heads
    counts = {"Q": group, "K": 1, "V": 1, "O": group}
    parts = zip(matrices, tensor.split([counts[letter] for letter in matrices], dim=2), strict=True)
    return {letter: rearrange(part, "d k g kv -> (kv g) d k") for letter, part in parts}


def slice_scales(tensor: Float[Tensor, "d1 d2 slices h"]) -> Float[Tensor, "slices"]:
    """1 / ‖slice‖, by which ``balance=True`` scales: else the largest matrices (Q and K) take most of the ranks."""
    norms = tensor.double().square().sum((0, 1, 3)).sqrt()
    return (1 / norms.clamp_min(torch.finfo(tensor.dtype).tiny)).to(tensor)


# ------------------------------------------------------------------ the basis inside a head


@checked_names
def in_circuit_gauge(weights: HeadWeights, matrices: str = LETTERS) -> HeadWeights:
    """Move every head into the singular basis of its own circuits, biases too; the model computes the same.

    >>> from tensorlens_tl import compress
    >>> before = compress.head_weights(model, 0)
    >>> after = compress.in_circuit_gauge(before)
    >>> circuits = [weights.matrices["Q"] @ weights.matrices["K"].mT for weights in (before, after)]
    >>> torch.allclose(*circuits, atol=1e-4)
    True

    The QK circuit is ``[W_Q; b_Q]·[W_K; b_K]ᵀ``, the OV circuit ``[W_V; b_V]·W_O``; in a group, those of all its query
    heads together. Both sides get the square root of the singular values, so that directions come in descending order
    and cutting them off is the circuit's truncated SVD. A direction's sign, which its circuit does not fix, is taken so
    that the sum of cubes of its query (value) side is positive. `matrices` are ``"QK"``, ``"VO"`` or both.

    Raises:
        InvalidInputError: half a circuit.
        UnsupportedModelError: queries and keys are among them and their basis is not free.
    """
    if check_letters(matrices) not in ("QKVO", "QK", "VO"):
        raise InvalidInputError(f"matrices={matrices!r}: a circuit's basis belongs to both its matrices; use QK, VO.")
    weights.check_free(matrices)
    new_matrices: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for read, other in (("Q", "K"), ("V", "O")):
        if read not in matrices:
            continue
        sides = [_side(weights, letter) for letter in (read, other)]
        for letter, side in zip((read, other), _singular(*sides), strict=True):
            group = len(weights.matrices[letter]) // weights.kv_heads
            rows = rearrange(side, "kv (g rows) k -> (kv g) rows k", g=group)
            new_matrices[letter] = rows
            if letter in weights.biases:  # the row below those of the matrix
                new_matrices[letter] = rows[:, :-1]
                biases[letter] = rows[:, -1]
    return weights.changed(new_matrices, biases)


def _side(weights: HeadWeights, letter: str) -> Float[Tensor, "kv rows d_head"]:
    """One side of the circuits, rows of a group's heads below each other, each with its bias as a row of its own."""
    matrix = weights.matrices[letter]
    if letter in weights.biases:
        matrix = torch.cat([matrix, weights.biases[letter][:, None]], dim=1)
    return rearrange(matrix, "(kv g) rows k -> kv (g rows) k", kv=weights.kv_heads)


def _singular(a: Float[Tensor, "h n k"], b: Float[Tensor, "h m k"]) -> tuple[Tensor, Tensor]:
    """``a·bᵀ`` of every head by its singular vectors, the square root of the values on either side."""
    qa, ra = torch.linalg.qr(a)
    qb, rb = torch.linalg.qr(b)
    u, values, vh = torch.linalg.svd(ra @ rb.mT, full_matrices=False)
    left = qa @ u
    right = qb @ vh.mT
    signs = torch.where(left.pow(3).sum(1, keepdim=True) < 0, -1.0, 1.0).to(a)
    roots = values.sqrt()[:, None] * signs
    wider = (0, a.shape[-1] - values.shape[-1])  # heads wider than the stream: what no circuit can use is zero
    return torch.nn.functional.pad(left * roots, wider), torch.nn.functional.pad(right * roots, wider)


@checked_names
def rotate_heads(weights: HeadWeights, seed: int = 0) -> HeadWeights:
    """Return the same circuits in a random basis in every head, to see whether a method depends on it.

    >>> from tensorlens_tl import compress
    >>> heads = compress.head_weights(model, 0)
    >>> before, after = (h.matrices["V"] @ h.matrices["O"].mT for h in (heads, compress.rotate_heads(heads)))
    >>> torch.allclose(before, after, atol=1e-5)
    True
    """
    generator = torch.Generator().manual_seed(whole_number("seed", seed))
    like = weights.matrices["Q"]
    new_matrices: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for pair in ("QK", "VO"):
        if pair == "QK" and weights.fixed_scores() is not None:
            continue
        width = weights.matrices[pair[0]].shape[2]
        basis = torch.randn(weights.kv_heads, width, width, generator=generator, dtype=torch.float64)
        basis = (basis + 2 * width**0.5 * torch.eye(width, dtype=torch.float64)).to(like)  # far from singular
        for letter, change in zip(pair, (basis, torch.linalg.inv(basis).mT), strict=True):
            by_head = change.repeat_interleave(len(weights.matrices[letter]) // weights.kv_heads, dim=0)
            new_matrices[letter] = weights.matrices[letter] @ by_head
            if letter in weights.biases:
                biases[letter] = (weights.biases[letter][:, None] @ by_head)[:, 0]
    return weights.changed(new_matrices, biases)


def circuits(weights: HeadWeights) -> dict[str, tuple[Tensor, Tensor]]:
    """Both factors of every query head's circuits, biases left out: ``{"QK": (W_Q, W_K), "OV": (W_V, W_Oᵀ)}``."""
    expand = {letter: len(weights.matrices["Q"]) // len(matrix) for letter, matrix in weights.matrices.items()}
    by_head = {letter: matrix.repeat_interleave(expand[letter], dim=0) for letter, matrix in weights.matrices.items()}
    return {"QK": (by_head["Q"], by_head["K"]), "OV": (by_head["V"], by_head["O"])}


@checked_names
def head_weights(model: ModelLike | ModelView, layer: int) -> HeadWeights:
    """Return one layer's projections by head, copied, half precision as float32; `model` may be a `FrozenPass`.

    >>> from tensorlens_tl import compress
    >>> compress.head_weights(model, 0).matrices["Q"].shape  # head, d_model, d_head
    torch.Size([4, 128, 32])

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
    """One layer's MLP matrices by name, copied."""
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
    """Say why another basis of queries and keys would change the scores, or None.

    Decided by a pass: scores that are a plain product of queries and keys reproduce the layer's pattern
    (`tensorlens_tl.circuits.scores`), others do not.
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
