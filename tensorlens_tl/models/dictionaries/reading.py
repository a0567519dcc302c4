"""A dictionary read from its object, checked."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl._arguments import refuse_meta
from tensorlens_tl.algebra.numerics import maybe, plus
from tensorlens_tl.errors import InvalidInputError, NumericalError
from tensorlens_tl.models.dictionaries.activation import k_of_topk
from tensorlens_tl.models.dictionaries.dictionary import DictionaryWeights
from tensorlens_tl.models.dictionaries.settings import setting

NORMALISED = ("layer_norm", "constant_norm_rescale")
"""How SAELens' dictionaries may normalise each vector they read (`cfg.normalize_activations`)."""

FOLDED = ("none", "expected_average_only_in", "covariance_whitening")
"""Ways that are part of the weights once training has ended, or are none."""

GATED = ("r_mag", "b_gate", "W_gate", "gate_bias")


def read_dictionary(source: Any, *, transcodes: bool | None = None) -> DictionaryWeights:
    """The weights of a sparse dictionary, checked.

    Args:
        source: an object with `W_enc` and `W_dec`; `b_enc`, `b_dec`, `threshold` and `k` are zero or absent where it
            has none. A configuration at `cfg` (or `config`) may say more, as SAELens' does: `apply_b_dec_to_input`,
            `normalize_activations`, `rescale_acts_by_decoder_norm`, `metadata`; and, up to SAELens 5, `architecture`,
            `activation_fn_str`, `activation_fn_kwargs`, `finetuning_scaling_factor`.
        transcodes: whether it reads one place and reconstructs another; None takes what its metadata says.

    Raises:
        InvalidInputError: no dictionary, a weight missing or of a wrong shape, a gated one, a normalisation or
            activation that is not known; of an object without `encode`, anything that is not read, by name.
        NumericalError: weights that are not finite.
    """
    what = f"dictionary: {type(source).__name__}"
    if gates := [name for name in GATED if getattr(source, name, None) is not None]:
        raise InvalidInputError(
            f"{what} is gated ({gates[0]}): whether a feature is active and what it is worth come from different "
            "pre-activations. Only ReLU, JumpReLU and TopK are read."
        )
    W_enc = _weight(source, "W_enc", what)
    W_dec = _weight(source, "W_dec", what)
    if W_enc is None or W_dec is None or W_enc.ndim != 2 or W_dec.ndim != 2 or W_enc.shape[1] != W_dec.shape[0]:
        if isinstance(source, str):
            raise InvalidInputError(
                f"dictionary={source!r}: a text is no dictionary; load it first, such as with SAELens' "
                "SAE.from_pretrained(...)."
            )
        raise InvalidInputError(
            f"{what} has W_enc {_shape(W_enc)}, W_dec {_shape(W_dec)}; needed are W_enc [d_in, feature] and W_dec "
            "[feature, d_out]."
        )
    features, width = W_dec.shape
    b_enc = _vector(source, "b_enc", features, what)
    b_dec = _vector(source, "b_dec", width, what)
    threshold = _vector(source, "threshold", features, what)
    W_skip = _weight(source, "W_skip", what)
    scaled = _finetuned(source, features, what)
    others = {"W_dec": W_dec, "b_enc": b_enc, "b_dec": b_dec, "threshold": threshold, "W_skip": W_skip}
    _refuse_other_kinds(W_enc, others | {"finetuning_scaling_factor": scaled}, what)
    hook_in = setting(source, "hook_name")
    hook_out = setting(source, "hook_name_out")
    if transcodes is None:
        transcodes = hook_out not in (None, hook_in) or W_skip is not None
    read = DictionaryWeights(
        W_enc=W_enc,
        b_enc=plus(W_enc.new_zeros(features), b_enc),
        W_dec=W_dec,
        b_dec=plus(W_dec.new_zeros(width), b_dec),
        threshold=threshold,
        k=k_of_topk(source, features, what),
        normalise=_normalisation(source, what),
        W_skip=maybe(torch.t, W_skip),
        source=source,
        hook=hook_in,
        hook_out=hook_out,
        model_name=setting(source, "model_name"),
        transcodes=transcodes,
    )
    if setting(source, "rescale_acts_by_decoder_norm"):
        norms = W_dec.norm(dim=1)
        read = replace(read, W_enc=W_enc * norms, b_enc=read.b_enc * norms, W_dec=W_dec / norms[:, None])
    if scaled is not None:  # it multiplies features where they are decoded, and only there
        read = replace(read, W_dec=read.W_dec * scaled[:, None])
    if setting(source, "apply_b_dec_to_input") and not transcodes:
        return read.subtracting_b_dec()
    return read


def _refuse_other_kinds(W_enc: Tensor, others: dict[str, Tensor | None], what: str) -> None:
    """Refuse weights of another dtype than W_enc's, or on another device."""
    for name, weight in others.items():
        if weight is not None and (weight.dtype != W_enc.dtype or weight.device != W_enc.device):
            raise InvalidInputError(
                f"{what}.{name} is {weight.dtype} on {weight.device}, W_enc {W_enc.dtype} on {W_enc.device}; convert "
                f"one of them, such as dictionary.to({W_enc.dtype})."
            )


def _shape(weight: Tensor | None) -> str:
    return "missing" if weight is None else str(tuple(weight.shape))


def _weight(source: Any, name: str, what: str) -> Tensor | None:
    weight = getattr(source, name, None)
    if weight is None:
        return None
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        raise InvalidInputError(f"{what}.{name} is a {type(weight).__name__}; pass a tensor of floating-point numbers.")
    refuse_meta(f"{what}.{name}", weight)
    if not bool(torch.isfinite(weight).all()):
        raise NumericalError(f"{what}.{name} has values that are not finite.")
    return weight.detach()


def _vector(source: Any, name: str, length: int, what: str) -> Tensor | None:
    weight = _weight(source, name, what)
    if weight is not None and weight.shape != (length,) and weight.ndim > 0:
        raise InvalidInputError(f"{what}.{name} is {tuple(weight.shape)}; [{length}] fits its other weights.")
    if weight is not None and weight.ndim == 0:
        return weight.expand(length)
    return weight


def _finetuned(source: Any, features: int, what: str) -> Tensor | None:
    """By what SAELens up to 5 multiplies features before they are decoded, or None."""
    weight = getattr(source, "finetuning_scaling_factor", None)
    if isinstance(weight, Tensor):
        return _vector(source, "finetuning_scaling_factor", features, what)
    if setting(source, "finetuning_scaling_factor"):
        raise InvalidInputError(f"{what} says finetuning_scaling_factor and has no such weight [{features}].")
    return None


def _normalisation(source: Any, what: str) -> str | None:
    how = setting(source, "normalize_activations")
    if how is None or how in FOLDED:
        return None
    if how not in NORMALISED:
        known = ", ".join((*FOLDED, *NORMALISED))
        raise InvalidInputError(f"{what} normalises its input by {how!r}; known are {known}.")
    return how
