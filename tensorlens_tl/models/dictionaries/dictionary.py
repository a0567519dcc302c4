"""The weights of a sparse dictionary, and what they give: active features and the reconstruction."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorlens_tl.algebra.numerics import centred, relative_error
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models.dictionaries.settings import setting

EPSILON = 1e-5  # SAELens adds it to the standard deviation by which it divides, not to the one it multiplies by
CHUNK_BYTES = 64 * 2**20


class Normalised(NamedTuple):
    """How one dictionary normalises the vectors of one pass, `[*any, 1]` each."""

    divided_by: Float[Tensor, "*any 1"]
    multiplied_by: Float[Tensor, "*any 1"]
    centred: bool


class Encoded(NamedTuple):
    """What a dictionary makes of some tokens.

    Attributes:
        where: token and feature of every active feature, `[active, 2]`, tokens in order.
        values: what they are worth.
        decoded: the reconstruction, `[token, d_out]`.
    """

    where: Int[Tensor, "active 2"]
    values: Float[Tensor, "active"]
    decoded: Float[Tensor, "token d_out"]


@dataclass(frozen=True, eq=False)
class DictionaryWeights:
    """A sparse dictionary, as its weights say. `read_dictionary` returns it.

    Attributes:
        b_enc: with ``−b_dec·W_enc`` inside, where the dictionary subtracts b_dec from what it reads.
        threshold: of JumpReLU, or None.
        k: of TopK, or None.
        normalise: one of `NORMALISED`, or None.
        W_skip: of a skip transcoder, `[d_in, d_out]`, or None.
        source: the object it was read from.
        hook, hook_out, model_name: what the object says about where it belongs, or None.
    """

    W_enc: Float[Tensor, "d_in feature"]
    b_enc: Float[Tensor, "feature"]
    W_dec: Float[Tensor, "feature d_out"]
    b_dec: Float[Tensor, "d_out"]
    threshold: Float[Tensor, "feature"] | None
    k: int | None
    normalise: str | None
    W_skip: Float[Tensor, "d_in d_out"] | None
    source: Any
    hook: str | None = None
    hook_out: str | None = None
    model_name: str | None = None
    transcodes: bool = False

    @property
    def name(self) -> str:
        """Its class, for messages."""
        return type(self.source).__name__

    @property
    def features(self) -> int:
        """How many features it has."""
        return self.W_enc.shape[1]

    def normalised(self, x: Float[Tensor, "*any d_in"]) -> Normalised | None:
        """By what it divides vectors, and multiplies its reconstruction of them; None where it does neither."""
        if self.normalise is None:
            return None
        if self.normalise == "layer_norm":
            deviation = x.std(-1, keepdim=True)
            scales = Normalised(deviation + EPSILON, deviation, centred=True)
        else:
            norm = x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
            scales = Normalised(norm, norm, centred=False)
        if self.transcodes:  # its output is another hook point's: SAELens does not scale it
            return scales._replace(multiplied_by=torch.ones_like(scales.multiplied_by))
        return scales

    def reads(self, x: Float[Tensor, "*any d_in"]) -> Float[Tensor, "*any d_in"]:
        """What its encoder is given: the vectors, normalised where it does so."""
        how = self.normalised(x)
        if how is None:
            return x
        return centred(x, how.centred) / how.divided_by

    def beside(self, x: Float[Tensor, "*any d_in"]) -> dict[str, Float[Tensor, "*any d_out"]]:
        """What it gives besides its features and b_dec, by name."""
        scales = self.normalised(x)
        parts = {}
        if scales is not None and scales.centred and not self.transcodes:
            parts["input mean"] = x.mean(-1, keepdim=True).expand_as(x)
        if self.W_skip is not None:
            parts["skip"] = x @ self.W_skip
        return parts

    def encode(self, x: Float[Tensor, "token d_in"], tolerance: float) -> Encoded:
        """Its active features for some vectors, and the reconstruction, compared with what the object itself gives.

        Args:
            x: in the dictionary's dtype and on its device.
            tolerance: the largest relative error.

        Raises:
            InvalidInputError: the object's own features or reconstruction are others than those of its weights.
        """
        chunks = [self._encoded(part, start, tolerance) for start, part in self._chunks(x)]
        return Encoded(*(torch.cat(column) for column in zip(*chunks, strict=True)))

    def _chunks(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        size = max(1, CHUNK_BYTES // (4 * self.features * x.element_size()))
        return ((start, x[start : start + size]) for start in range(0, max(1, len(x)), size))

    def _encoded(self, x: Tensor, start: int, tolerance: float) -> Encoded:
        preactivations = self.reads(x) @ self.W_enc + self.b_enc
        expected = None
        decoded = None
        active = self._active(preactivations)
        if callable(getattr(self.source, "encode", None)):
            with torch.no_grad():
                expected, decoded = features_and_reconstruction(self.source, x)
            active = expected != 0
        features = preactivations * active
        output = features @ self.W_dec + self.b_dec
        how = self.normalised(x)
        if how is not None:
            output = output * how.multiplied_by
        beside = self.beside(x)
        if expected is not None:
            self._check("encode", features, expected, tolerance)
        if decoded is not None:  # a skip transcoder's decode leaves the skip out
            self._check("decode", output + beside.get("input mean", 0), decoded, tolerance)
        for part in beside.values():
            output = output + part
        if (self.W_skip is not None or expected is None) and is_callable(self.source):
            with torch.no_grad():
                whole: Any = self.source(x)
            if self.W_skip is not None or (isinstance(whole, Tensor) and whole.shape == output.shape):
                self._check("forward", output, whole, tolerance)
        index = active.nonzero()
        values = features[index[:, 0], index[:, 1]]
        index[:, 0] += start
        return Encoded(index, values, output)

    def _active(self, before: Float[Tensor, "token feature"]) -> Tensor:
        if self.k is not None:
            chosen = torch.zeros_like(before, dtype=torch.bool)
            return chosen.scatter(-1, before.topk(self.k).indices, True) & (before > 0)
        active = before > 0
        if self.threshold is not None:
            active &= before > self.threshold
        return active

    def _check(self, what: str, ours: Tensor, expected: Tensor, tolerance: float) -> None:
        # over all vectors together: at one of them nothing may be active
        error = relative_error(ours.flatten(), expected.flatten())
        if not error <= tolerance:
            raise InvalidInputError(
                f"dictionary: {self.name}.{what} gives something else than its weights say (relative error "
                f"{error:.1e}). Only dictionaries whose features are ⟨W_enc, x⟩ + b_enc where they "
                "are active (ReLU, JumpReLU, TopK) and whose reconstruction is features·W_dec + b_dec are read."
            )

    def subtracting_b_dec(self) -> "DictionaryWeights":
        """The same with b_dec taken from what it reads."""
        return replace(self, b_enc=self.b_enc - self.b_dec @ self.W_enc)

    def fitting(self, x: Float[Tensor, "token d_in"]) -> "DictionaryWeights":
        """The same, or with b_dec taken from what it reads: where the object does not say which, its `encode` shows.

        Without `encode`, b_dec is not taken away.
        """
        stated = setting(self.source, "apply_b_dec_to_input") is not None
        undecidable = not callable(getattr(self.source, "encode", None))
        if stated or undecidable or self.transcodes:
            return self
        if self.b_dec.shape != self.W_enc.shape[:1] or not bool(self.b_dec.any()):
            return self
        return min((self, self.subtracting_b_dec()), key=lambda read: read._misfit(x[:64]))

    def _misfit(self, x: Float[Tensor, "token d_in"]) -> float:
        """How far the features of some tokens are from those that the object gives: the median token's error."""
        with torch.no_grad():
            expected, _ = features_and_reconstruction(self.source, x)
        ours = (self.reads(x) @ self.W_enc + self.b_enc) * (expected != 0)
        errors = (ours - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(torch.finfo(expected.dtype).tiny)
        return float(errors.float().median())


def features_and_reconstruction(source: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What an object's `encode` and `decode` give, in this order: a scale may pass from one to the other."""
    features = source.encode(x)
    if isinstance(features, Tensor) and features.is_sparse:
        features = features.to_dense()
    if not isinstance(features, Tensor):
        raise InvalidInputError(
            f"dictionary: {type(source).__name__}.encode gives a {type(features).__name__}, no tensor."
        )
    decode: Any = getattr(source, "decode", None)
    decoded: Any = None
    if callable(decode):
        decoded = decode(features)
    return features, decoded


def is_callable(source: Any) -> bool:
    """Whether an object can be called with vectors."""
    if isinstance(source, nn.Module):
        return type(source).forward is not nn.Module.forward
    return callable(source)
