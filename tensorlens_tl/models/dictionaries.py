"""Reading any sparse dictionary: an autoencoder of one activation, or a transcoder from one hook point to another.

A dictionary is any object with ``W_enc`` `[d_in, feature]` and ``W_dec`` `[feature, d_out]`, under its own or SAELens'
names. With the set of active features fixed (and the scale, if it normalises its input), it is affine:

    f_i = ⟨W_enc_i, n(x)⟩ + b_enc_i     for active i, 0 for all others
    x̂   = s · (Σ_i f_i · W_dec_i + b_dec)  (+ the mean that n takes away, + x·W_skip)

The active set is the dictionary's own, whatever chooses it; ReLU, JumpReLU and TopK differ in nothing else. The reading
is compared with the object's own `encode` and `decode`, if it has them, and rejected if they disagree.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MethodType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tensorlens_tl._arguments import refuse_meta
from tensorlens_tl.algebra.numerics import centred, maybe, plus, relative_error
from tensorlens_tl.errors import InvalidInputError, NumericalError

# ------------------------------------------------------------------ an object's own description


def setting(source: Any, name: str) -> Any:
    """Return a setting from an object, its configuration or its metadata, in this order; None if none has it."""
    values = (entry(holder, name) for holder in holders(source))
    return next((value for value in values if value is not None), None)


def holders(source: Any) -> list[Any]:
    """Return an object, its configuration and its metadata."""
    configurations = [part for name in ("cfg", "config") if (part := entry(source, name)) is not None]
    metadata = [entry(holder, "metadata") for holder in (source, *configurations)]
    return [source, *configurations, *(part for part in metadata if part is not None)]


def entry(holder: Any, name: str) -> Any:
    """Return an item of a mapping or an attribute of an object; None if it is missing."""
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def attributes_of(holder: Any) -> dict[str, Any]:
    """Return an object's attributes other than methods: its own, a module's weights and submodules, and its class's."""
    if isinstance(holder, Mapping):
        return dict(holder)
    attributes = dict[str, Any]()
    for kind in reversed(type(holder).__mro__):
        if kind.__module__.partition(".")[0] not in ("builtins", "torch", "types"):
            methods = (property, classmethod, staticmethod, cached_property)
            members = vars(kind).items()
            attributes |= {
                name: value for name, value in members if not (callable(value) or isinstance(value, methods))
            }
    attributes |= getattr(holder, "__dict__", {})
    for inside in ("_parameters", "_buffers", "_modules"):
        attributes |= attributes.pop(inside, None) or {}
    return {
        name: value
        for name, value in attributes.items()
        if not name.startswith("_") and not hasattr(value, "fwd_hooks")
    }


def says_nothing(value: Any) -> bool:
    """Whether a value stands for something absent."""
    if isinstance(value, Tensor):
        return False
    if value is None or value is False or value == "none":
        return True
    return isinstance(value, str | Mapping | Sequence) and not value


# ------------------------------------------------------------------ which features are active

ACTIVATIONS = (
    "activation_fn", "activation_fn_str", "activation", "activation_function", "act_fn", "nonlinearity", "architecture",
)  # fmt: skip
"""Attributes that name an activation, or hold one."""

KNOWN_ACTIVATIONS = ("relu", "jumprelu", "topk", "standard", "transcoder", "skip_transcoder")

READ = {
    "W_enc", "W_dec", "b_enc", "b_dec", "threshold", "k", "W_skip", "finetuning_scaling_factor", "activation_fn_kwargs",
    "apply_b_dec_to_input", "normalize_activations", "rescale_acts_by_decoder_norm", "cfg", "config", "metadata",
    "hook_name", "hook_name_out", "model_name", *ACTIVATIONS,
}  # fmt: skip
"""Attributes of an object, its configuration or its metadata that are read."""

WITHOUT_INFLUENCE = {
    "d_in", "d_out", "d_sae", "d_model", "d_hidden", "dict_size", "n_features", "dtype", "device", "training", "name",
    "layer", "hook_layer", "hook_layer_out", "model_class_name", "model_from_pretrained_kwargs", "neuronpedia_id",
    "sae_lens_version", "sae_lens_training_version", "context_size", "prepend_bos", "seqpos_slice", "dataset_path",
    "dataset_trust_remote_code", "exclude_special_tokens", "use_error_term", "l1_coefficient", "l0_coefficient",
    "lp_norm", "use_ghost_grads", "normalize_sae_decoder", "noise_scale", "decoder_orthogonal_init", "sparsity",
    "mse_loss_normalization", "b_dec_init_method", "decoder_heuristic_init", "init_encoder_as_decoder_transpose",
    "scale_sparsity_penalty_by_decoder_norm", "jumprelu_init_threshold", "jumprelu_bandwidth", "aux_loss_coefficient",
    "sequence_separator_token", "disable_concat_sequences",
}  # fmt: skip
"""Other attributes in SAELens and similar libraries, which may be ignored: shapes, origin, training."""


def k_of_topk(source: Any, features: int, what: str) -> int | None:
    """Return the k of TopK, or None; without `encode` to compare with, raise for anything ambiguous."""
    activations = {name: value for name in ACTIVATIONS if (value := setting(source, name)) is not None}
    if isinstance(architecture := activations.get("architecture"), MethodType):  # a method in SAELens 6
        activations["architecture"] = architecture()
    k = _number_of_features(source, activations)
    if k is not None:
        whole = isinstance(k, int) or (isinstance(k, Tensor) and k.numel() == 1 and not k.is_floating_point())
        if isinstance(k, bool) or not whole or not 1 <= int(k) <= features:
            raise InvalidInputError(
                f"{what}.k is {k!r}; TopK of {features} features takes a whole number from 1 to {features}."
            )
        k = int(k)
    if not callable(getattr(source, "encode", None)):
        _refuse_unknown(source, activations, k, features, what)
    return k


def _number_of_features(source: Any, activations: Mapping[str, Any]) -> Any:
    """Return the k of an object or of its activation; SAELens up to 5 keeps it among the arguments of "topk"."""
    if (k := setting(source, "k")) is not None:
        return k
    for activation in activations.values():
        if (k := getattr(activation, "k", None)) is not None:
            return k
    if "topk" not in (_activation_name(activation).lower() for activation in activations.values()):
        return None
    return entry(setting(source, "activation_fn_kwargs") or {}, "k")


def _activation_name(activation: Any) -> str:
    return activation if isinstance(activation, str) else getattr(activation, "__name__", type(activation).__name__)


def _refuse_unknown(source: Any, activations: Mapping[str, Any], k: int | None, features: int, what: str) -> None:
    """Raise for a dictionary without `encode` that has, or states, anything that might change its features."""
    show = "Give the object an encode(x) method, so that its output can be compared."
    threshold = setting(source, "threshold")
    for name, activation in activations.items():
        if (named := _activation_name(activation).lower()) not in KNOWN_ACTIVATIONS:
            raise InvalidInputError(
                f"{what}.{name} is {_activation_name(activation)}; only ReLU, JumpReLU and TopK are supported. {show}"
            )
        for kind, needed, value in (("topk", "k", k), ("jumprelu", "threshold", threshold)):
            if named == kind and value is None:
                raise InvalidInputError(f"{what}.{name} is {named}, and it has no {needed}. {show}")
        if callable(activation) and not isinstance(activation, type) and threshold is None:
            _check_activation(activation, k, features, f"{what}.{name}")
    others = [name for name in setting(source, "activation_fn_kwargs") or {} if name != "k"]
    if others:
        raise InvalidInputError(f"{what}.activation_fn_kwargs has {others[0]}, which is not supported. {show}")
    if k is not None and threshold is not None:
        raise InvalidInputError(f"{what} has both k and threshold: which features are active is not clear. {show}")
    names = [_activation_name(activation).lower() for activation in activations.values()]
    if k is not None and ("relu" in names or "jumprelu" in names):
        raise InvalidInputError(f"{what} has k, and its activation is not TopK: what k does is not clear. {show}")
    known = READ | WITHOUT_INFLUENCE
    for holder in holders(source):
        for name, value in attributes_of(holder).items():
            if name not in known and not says_nothing(value):
                raise InvalidInputError(
                    f"{what} has {name}, which is not supported. {show} If it does not affect features, remove it."
                )


def _check_activation(function: Any, k: int | None, features: int, name: str) -> None:
    """Compare an activation with ReLU or TopK on random pre-activations."""
    before = torch.randn(4, features, generator=torch.Generator().manual_seed(0))
    expected = before.relu()
    what = "ReLU"
    if k is not None:
        what = f"TopK with k={k} and a ReLU"
        best = before.topk(k)
        expected = torch.zeros_like(before).scatter(-1, best.indices, best.values.relu())
    with torch.no_grad():
        output = function(before.clone())
    if not isinstance(output, Tensor) or not torch.allclose(output.float(), expected):
        raise InvalidInputError(f"{name} differs from {what} on random numbers; nothing else is supported.")


# ------------------------------------------------------------------ the weights

EPSILON = 1e-5  # SAELens adds it to the standard deviation by which it divides, not to the one it multiplies by
CHUNK_BYTES = 64 * 2**20


class Normalised(NamedTuple):
    """How a dictionary normalises the vectors of a pass, `[*any, 1]` each."""

    divided_by: Float[Tensor, "*any 1"]
    multiplied_by: Float[Tensor, "*any 1"]
    centred: bool


class Encoded(NamedTuple):
    """Active features of tokens: `where` `[active, 2]` (token, feature), their `values`, and the output `decoded`."""

    where: Int[Tensor, "active 2"]
    values: Float[Tensor, "active"]
    decoded: Float[Tensor, "token d_out"]


@dataclass(frozen=True, eq=False)
class DictionaryWeights:
    """The weights of a sparse dictionary, from `read_dictionary`.

    Attributes:
        b_enc: including ``−b_dec·W_enc`` if the dictionary subtracts b_dec from its input.
        threshold: for JumpReLU, or None.
        k: for TopK, or None.
        normalise: one of `NORMALISED`, or None.
        W_skip: the matrix of a skip transcoder, `[d_in, d_out]`, or None.
        source: the object it was read from.
        hook, hook_out, model_name: where the object says it belongs, or None.
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
        """Its class name, for messages."""
        return type(self.source).__name__

    @property
    def features(self) -> int:
        """The number of features."""
        return self.W_enc.shape[1]

    def normalised(self, x: Float[Tensor, "*any d_in"]) -> Normalised | None:
        """Return the factors by which it divides its input and multiplies its output; None if it does neither."""
        if self.normalise is None:
            return None
        if self.normalise == "layer_norm":
            deviation = x.std(-1, keepdim=True)
            scales = Normalised(deviation + EPSILON, deviation, centred=True)
        else:
            norm = x.norm(dim=-1, keepdim=True) / x.shape[-1] ** 0.5
            scales = Normalised(norm, norm, centred=False)
        if self.transcodes:  # its output belongs to another hook point, and SAELens does not scale it
            return scales._replace(multiplied_by=torch.ones_like(scales.multiplied_by))
        return scales

    def reads(self, x: Float[Tensor, "*any d_in"]) -> Float[Tensor, "*any d_in"]:
        """Return the encoder's input: the vectors, normalised if it does so."""
        how = self.normalised(x)
        if how is None:
            return x
        return centred(x, how.centred) / how.divided_by

    def beside(self, x: Float[Tensor, "*any d_in"]) -> dict[str, Float[Tensor, "*any d_out"]]:
        """Return the parts of its output other than features and b_dec, by name."""
        scales = self.normalised(x)
        parts = {}
        if scales is not None and scales.centred and not self.transcodes:
            parts["input mean"] = x.mean(-1, keepdim=True).expand_as(x)
        if self.W_skip is not None:
            parts["skip"] = x @ self.W_skip
        return parts

    def encode(self, x: Float[Tensor, "token d_in"], tolerance: float) -> Encoded:
        """Return the active features of some vectors and the reconstruction, compared with the object's own output.

        Args:
            x: in the dictionary's dtype and on its device.
            tolerance: the largest relative error.

        Raises:
            InvalidInputError: the object's own features or reconstruction differ from those of its weights.
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
        if decoded is not None:  # a skip transcoder's decode omits the skip
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
        # compared over all vectors together, since a single one may have no active features
        error = relative_error(ours.flatten(), expected.flatten())
        if not error <= tolerance:
            raise InvalidInputError(
                f"dictionary: {self.name}.{what} differs from the output of its weights (relative error "
                f"{error:.1e}). Only dictionaries with active features ⟨W_enc, x⟩ + b_enc "
                "(ReLU, JumpReLU, TopK) and the reconstruction features·W_dec + b_dec are supported."
            )

    def subtracting_b_dec(self) -> "DictionaryWeights":
        """Return the dictionary with b_dec subtracted from its input."""
        return replace(self, b_enc=self.b_enc - self.b_dec @ self.W_enc)

    def fitting(self, x: Float[Tensor, "token d_in"]) -> "DictionaryWeights":
        """Return the dictionary, with b_dec subtracted from its input if its `encode` shows so.

        Used if the object does not say which; without `encode`, b_dec is not subtracted.
        """
        stated = setting(self.source, "apply_b_dec_to_input") is not None
        undecidable = not callable(getattr(self.source, "encode", None))
        if stated or undecidable or self.transcodes:
            return self
        if self.b_dec.shape != self.W_enc.shape[:1] or not bool(self.b_dec.any()):
            return self
        return min((self, self.subtracting_b_dec()), key=lambda read: read._misfit(x[:64]))

    def _misfit(self, x: Float[Tensor, "token d_in"]) -> float:
        """Return how far the features of some tokens are from the object's own, as the median relative error."""
        with torch.no_grad():
            expected, _ = features_and_reconstruction(self.source, x)
        ours = (self.reads(x) @ self.W_enc + self.b_enc) * (expected != 0)
        errors = (ours - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(torch.finfo(expected.dtype).tiny)
        return float(errors.float().median())


def features_and_reconstruction(source: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the outputs of an object's `encode` and `decode`, called in this order since they may share a scale."""
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


# ------------------------------------------------------------------ a dictionary read from its object

NORMALISED = ("layer_norm", "constant_norm_rescale")
"""How SAELens dictionaries may normalise each input vector (`cfg.normalize_activations`)."""

FOLDED = ("none", "expected_average_only_in", "covariance_whitening")
"""Normalisations that are folded into the weights after training, or that do nothing."""

GATED = ("r_mag", "b_gate", "W_gate", "gate_bias")


def read_dictionary(source: Any, *, transcodes: bool | None = None) -> DictionaryWeights:
    """Read and check the weights of a sparse dictionary.

    Args:
        source: an object with `W_enc` and `W_dec`, and optionally `b_enc`, `b_dec`, `threshold` and `k`. A
            configuration at `cfg` (or `config`) may add settings, as in SAELens: `apply_b_dec_to_input`,
            `normalize_activations`, `rescale_acts_by_decoder_norm`, `metadata`; and, up to SAELens 5, `architecture`,
            `activation_fn_str`, `activation_fn_kwargs`, `finetuning_scaling_factor`.
        transcodes: whether it reads one hook point and reconstructs another; None takes what its metadata say.

    Raises:
        InvalidInputError: not a dictionary, a weight missing or of a wrong shape, a gated one, an unknown normalisation
            or activation; or, without `encode`, any setting that is not understood.
        NumericalError: weights that are not finite.
    """
    what = f"dictionary: {type(source).__name__}"
    if gates := [name for name in GATED if getattr(source, name, None) is not None]:
        raise InvalidInputError(
            f"{what} is gated ({gates[0]}): a feature's value and whether it is active come from different "
            "pre-activations. Only ReLU, JumpReLU and TopK are supported."
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
    if scaled is not None:  # it multiplies features only where they are decoded
        read = replace(read, W_dec=read.W_dec * scaled[:, None])
    if setting(source, "apply_b_dec_to_input") and not transcodes:
        return read.subtracting_b_dec()
    return read


def _refuse_other_kinds(W_enc: Tensor, others: dict[str, Tensor | None], what: str) -> None:
    """Raise for weights whose dtype or device differs from that of W_enc."""
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
    """Return the factor that SAELens up to 5 applies to features before decoding, or None."""
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
