"""Which features of a dictionary are active, as its object says: ReLU, JumpReLU, TopK, or a refusal."""

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models.dictionaries.settings import attributes_of, entry, holders, says_nothing, setting

ACTIVATIONS = (
    "activation_fn", "activation_fn_str", "activation", "activation_function", "act_fn", "nonlinearity", "architecture",
)  # fmt: skip
"""Attributes that name an activation, or are one."""

KNOWN_ACTIVATIONS = ("relu", "jumprelu", "topk", "standard", "transcoder", "skip_transcoder")

READ = {
    "W_enc", "W_dec", "b_enc", "b_dec", "threshold", "k", "W_skip", "finetuning_scaling_factor", "activation_fn_kwargs",
    "apply_b_dec_to_input", "normalize_activations", "rescale_acts_by_decoder_norm", "cfg", "config", "metadata",
    "hook_name", "hook_name_out", "model_name", *ACTIVATIONS,
}  # fmt: skip
"""What is read of an object, its configuration and its metadata."""

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
"""What SAELens and others say besides: shapes, where it came from, how it was trained."""


def k_of_topk(source: Any, features: int, what: str) -> int | None:
    """The k of TopK; without `encode`, which shows what an object does, refuses whatever else could be meant."""
    activations = {name: value for name in ACTIVATIONS if (value := setting(source, name)) is not None}
    if isinstance(architecture := activations.get("architecture"), MethodType):  # SAELens 6 has it as a method
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
    """The k that an object says, or its activation; SAELens up to 5 keeps it among the arguments of "topk"."""
    if (k := setting(source, "k")) is not None:
        return k
    for activation in activations.values():
        if (k := getattr(activation, "k", None)) is not None:
            return k
    if "topk" not in map(_activation_name, activations.values()):
        return None
    return entry(setting(source, "activation_fn_kwargs") or {}, "k")


def _activation_name(activation: Any) -> str:
    return _written_name(activation).lower()


def _written_name(activation: Any) -> str:
    return activation if isinstance(activation, str) else getattr(activation, "__name__", type(activation).__name__)


def _refuse_unknown(source: Any, activations: Mapping[str, Any], k: int | None, features: int, what: str) -> None:
    """Refuse a dictionary without `encode` that has, or says, what might change its features."""
    show = "Give the object an encode(x) method: what it does is then measured."
    threshold = setting(source, "threshold")
    for name, activation in activations.items():
        if (named := _activation_name(activation)) not in KNOWN_ACTIVATIONS:
            raise InvalidInputError(
                f"{what}.{name} is {_written_name(activation)}; only ReLU, JumpReLU and TopK are read. {show}"
            )
        for kind, needed, value in (("topk", "k", k), ("jumprelu", "threshold", threshold)):
            if named == kind and value is None:
                raise InvalidInputError(f"{what}.{name} is {named}, and it has no {needed}. {show}")
        if callable(activation) and not isinstance(activation, type) and threshold is None:
            _check_activation(activation, k, features, f"{what}.{name}")
    others = [name for name in setting(source, "activation_fn_kwargs") or {} if name != "k"]
    if others:
        raise InvalidInputError(f"{what}.activation_fn_kwargs has {others[0]}, which is not read. {show}")
    if k is not None and threshold is not None:
        raise InvalidInputError(f"{what} has both k and threshold: which features are active is not clear. {show}")
    names = [_activation_name(activation) for activation in activations.values()]
    if k is not None and ("relu" in names or "jumprelu" in names):
        raise InvalidInputError(f"{what} has k, and its activation is not TopK: what k does is not clear. {show}")
    known = READ | WITHOUT_INFLUENCE
    for holder in holders(source):
        for name, value in attributes_of(holder).items():
            if name not in known and not says_nothing(value):
                raise InvalidInputError(
                    f"{what} has {name}, which is not read. {show} If it has no influence on features, leave it out."
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
        raise InvalidInputError(f"{name} gives something else than {what} on random numbers; only these are read.")
