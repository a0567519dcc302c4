"""Do the heads of a layer share a subspace, as TensorLLM conjectures?

Each head's circuits ``W_Q W_Kᵀ`` and ``W_V W_O`` are scaled to norm 1, so that no head counts for more. On each of the
four sides (what queries, keys and values read, what outputs write) the energy of all heads' circuits is spread over
d_model directions; how much of it the best few directions hold says how far the heads share them. The measure is of
circuits, so that the basis inside a head does not matter.

What is large by itself? With ``baseline="random"`` every head keeps its own singular values and gets random directions:
what heads would share by chance.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.circuits.weights import as_view
from tensorlens_tl.compress.heads import HeadWeights, circuits, head_weights
from tensorlens_tl.compress.tucker import Count
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import ModelLike

if TYPE_CHECKING:
    import pandas as pd

    Baseline = Literal["random"] | None
else:
    Baseline = str | None  # `sharing` says which there is

SIDES = ("query", "key", "value", "output")
CIRCUITS = ("QK", "OV")


@dataclass(frozen=True, eq=False)
class Sharing:
    """How far the heads of each layer share directions of the residual stream.

    Attributes:
        energy: the share of the energy of all heads' circuits, each of norm 1, in the best R directions, `[layer, side,
            R − 1]`, sides as `SIDES`.
        chance: the mean of the same for random directions; None without a baseline.
        similarity: cosine of every two heads' circuits, `[layer, circuit, head, head]`, circuits as `CIRCUITS`.
        core_similarity: the same inside the best `rank` directions of both sides: of the heads' cores.
        rank: d_head, the directions that one head can use.
    """

    energy: Float[Tensor, "layer side rank"]
    chance: Float[Tensor, "layer side rank"] | None
    similarity: Float[Tensor, "layer circuit head head"]
    core_similarity: Float[Tensor, "layer circuit head head"]
    rank: int

    def to_dataframe(self) -> "pd.DataFrame":
        """One row per layer and side: the share of energy in the best d_head directions, and by chance."""
        import pandas as pd

        index = pd.MultiIndex.from_product([range(len(self.energy)), SIDES], names=["layer", "side"])
        table = pd.DataFrame({"energy": self.energy[..., self.rank - 1].flatten().tolist()}, index=index)
        if self.chance is not None:
            table["chance"] = self.chance[..., self.rank - 1].flatten().tolist()
        return table.reset_index()

    def __repr__(self) -> str:
        layers, _, width = self.energy.shape
        return f"Sharing(layers={layers}, d_model={width}, heads={self.similarity.shape[-1]}, rank={self.rank})"


@checked_names
def sharing(model: ModelLike, *, baseline: Baseline = "random", draws: Count = 4, seed: int = 0) -> Sharing:
    """Measure how far the heads of each layer share directions, and what they would share by chance.

    >>> from tensorlens_tl import compress
    >>> shared = compress.sharing(model, draws=1)
    >>> shared
    Sharing(layers=4, d_model=128, heads=4, rank=32)
    >>> bool(shared.energy[1, 0, 31] > shared.chance[1, 0, 31])  # what the heads of layer 1 have as queries
    True

    Every head's circuits are scaled to norm 1 first. Rotary positions and norms of queries and keys are left out of
    the QK circuit.

    Args:
        model: a model or a `FrozenPass`.
        baseline: ``"random"``, or None for none.
        draws, seed: of random directions.

    Raises:
        InvalidInputError: no such baseline, or no draws.
        UnsupportedModelError: attention that cannot be read.
    """
    if baseline not in (None, "random"):
        raise InvalidInputError(f"baseline={baseline!r}; use 'random' or None.")
    draws = whole_number("draws", draws, least=1)
    view = as_view(model)
    generator = torch.Generator().manual_seed(seed)
    energies = []
    random = []
    similar = []
    cores = []
    rank = 0
    for layer in range(view.n_layers):
        heads = head_weights(view, layer)
        rank = min(heads.matrices["V"].shape[1:])
        factors = _unit_circuits(heads)
        energy = (torch.einsum("hdk,hkl,hel->de", a, b.mT @ b, a) for a, b in factors)  # Σ over heads of C·Cᵀ, C = a·bᵀ
        spectra, bases = zip(*map(_subspace, energy), strict=True)
        energies.append(torch.stack(spectra))
        pairs = [(factors[0], bases[0], bases[1]), (factors[2], bases[2], bases[3])]
        similar.append(torch.stack([_cosines(*factor) for factor, _, _ in pairs]))
        cut = [(left[:, :rank].T @ a, right[:, :rank].T @ b) for (a, b), left, right in pairs]
        cores.append(torch.stack([_cosines(*factor) for factor in cut]))
        if baseline is not None:
            random.append(sum(_by_chance(factors, heads.group, generator) for _ in range(draws)) / draws)
    chance = torch.stack(random) if random else None
    return Sharing(torch.stack(energies), chance, torch.stack(similar), torch.stack(cores), rank)


def _unit_circuits(heads: HeadWeights) -> list[tuple[Tensor, Tensor]]:
    """For each side, its own factor and the other one `[head, d_model, d_head]`, the circuit's norm being 1."""
    sides = []
    for name in CIRCUITS:
        a, b = (factor.double() for factor in circuits(heads)[name])
        size = ((a.mT @ a) * (b.mT @ b)).sum((1, 2)).clamp_min(0).sqrt()
        a = a / size.clamp_min(torch.finfo(a.dtype).tiny)[:, None, None]
        sides += [(a, b), (b, a)]
    return sides


def _subspace(energy: Float[Tensor, "d d"]) -> tuple[Float[Tensor, "d"], Float[Tensor, "d d"]]:
    values, directions = torch.linalg.eigh(energy)
    values = values.flip(0).clamp_min(0)
    total = values.sum().clamp_min(torch.finfo(values.dtype).tiny)
    return values.cumsum(0) / total, directions.flip(1)


def _cosines(a: Float[Tensor, "h n k"], b: Float[Tensor, "h m k"]) -> Float[Tensor, "head head"]:
    """⟨C_g, C_h⟩ / ‖C_g‖‖C_h‖ of circuits C = a·bᵀ, by their factors."""
    inner = torch.einsum("gnk,hnl,gmk,hml->gh", a, a, b, b)
    norms = inner.diagonal().clamp_min(torch.finfo(inner.dtype).tiny).sqrt()
    return inner / norms[:, None] / norms


def _by_chance(
    factors: list[tuple[Tensor, Tensor]], group: int, generator: torch.Generator
) -> Float[Tensor, "side rank"]:
    """Return the share of energy where each head has its singular values, and random directions.

    Heads that share keys and values have those directions in common here too.
    """
    spectra = []
    for together, (a, b) in zip((1, group, group, 1), factors, strict=True):  # sides as `SIDES`
        _, narrow = torch.linalg.qr(a)
        inside = narrow @ (b.mT @ b) @ narrow.mT
        gaussian = torch.randn(len(a) // together, *a.shape[1:], generator=generator, dtype=torch.float64).to(a)
        random = torch.linalg.qr(gaussian)[0].repeat_interleave(together, dim=0)
        spectra.append(_subspace(torch.einsum("hdk,hkl,hel->de", random, inside, random))[0])
    return torch.stack(spectra)
