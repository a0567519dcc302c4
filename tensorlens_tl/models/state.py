"""Is a model in a state to be frozen, and still in the one its pass was taken in?"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError


@dataclass(frozen=True, eq=False)
class WeightState:
    """What tells the weights of now from those of another time, without a copy of them.

    `versions` (storage and torch's own count of writes) change when a weight is replaced, moved, cast, or written to in
    place. Writes through ``.data`` are not counted by torch, so some numbers are kept as well: one or more of every row
    and every column of each matrix of each attention head. A head, neuron, channel or token embedding that was changed
    is seen; a lone number that was changed through ``.data``, or a buffer, may not be. A copy, or what a pickle gives
    back, knows no versions: it takes those of its own model when it is first asked, if the numbers agree.
    """

    versions: list[tuple[int, int]] | None
    sample: Float[Tensor, "n"]

    def __getstate__(self) -> dict[str, Any]:
        return {"versions": None, "sample": self.sample}  # a copy's weights lie elsewhere

    @classmethod
    def of(cls, model: nn.Module) -> "WeightState":
        """The state of a model's weights now."""
        parameters = list(model.parameters())
        return cls(_versions(parameters), _sample(parameters))

    def holds(self, model: nn.Module) -> bool:
        """Whether the model's weights are still these."""
        parameters = list(model.parameters())
        versions = _versions(parameters)
        if self.versions is None:  # a copied or pickled pass, with its own copy of the model
            object.__setattr__(self, "versions", versions)
        if versions != self.versions:
            return False
        return bool(torch.allclose(_sample(parameters), self.sample, rtol=0, atol=0, equal_nan=True))


def fingerprint(weights: Sequence[Tensor]) -> str:
    """A digest of some weights' numbers, of the same sample as `WeightState`: widening them does not change it."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(str(tuple(weight.shape)).encode())
        digest.update(sampled(weight.detach()).double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _versions(parameters: list[nn.Parameter]) -> list[tuple[int, int]]:
    # tensors made under inference_mode keep no count of writes
    return [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in parameters]


@torch.no_grad()
def _sample(parameters: list[nn.Parameter]) -> Tensor:
    found = [sampled(parameter) for parameter in parameters if parameter.numel()]
    found = [numbers.to(torch.float16) if numbers.dtype.itemsize == 1 else numbers for numbers in found]  # float8
    dtype = reduce(torch.promote_types, [numbers.dtype for numbers in found], torch.float16)
    return torch.cat([numbers.to(dtype) for numbers in found])


def sampled(weight: Tensor) -> Tensor:
    """A weight's numbers down the diagonal, starting again at the other edge: every row and column of each head."""
    if weight.ndim < 2:
        return weight.reshape(-1)
    return weight[(..., *_steps(*weight.shape[-2:], weight.device))].reshape(-1)


@lru_cache(maxsize=512)
def _steps(rows: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows and columns that diagonal goes through; made once a shape, as every question asks."""
    steps = torch.arange(max(rows, columns), device=device)
    return steps % rows, steps % columns


def refuse_devices(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for weights on several devices."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"the model's weights lie on {', '.join(devices)}; a frozen pass needs them on one device. Load it without "
            "n_devices or device_map, or move it with model.to(...)."
        )


def refuse_dropout(model: nn.Module) -> None:
    """Raise `InvalidInputError` for a model in train mode, if that changes what it computes."""
    inner = getattr(model, "original_model", None)  # a Bridge's own tree leaves some of its modules out
    seen = set[nn.Module]()
    others = [] if inner is None else inner.named_modules(memo=seen)
    for name, module in chain(model.named_modules(memo=seen), others):
        if not module.training:
            continue
        rates = [value for key, value in vars(module).items() if "drop" in key and isinstance(value, float)]
        if isinstance(module, nn.Dropout):
            rates.append(module.p)
        if any(rate > 0 for rate in rates):
            raise InvalidInputError(
                f"the model is in train mode and {name or type(module).__name__} drops activations with probability "
                f"{max(rates)}; two passes would differ. Call model.eval() first."
            )
