"""What of a model's behaviour is not in its weights: configurations, numbers and functions of modules, buffers.

`tensorlens_tl.models.lifecycle.weight_state` tells whether a model's *weights* are still those of another time. The
same weights compute something else with another base of rotary positions, epsilon, activation function, attention scale
or window, and those lie in three places: in configurations (TransformerLens' own, and Hugging Face's of a Bridge), in
plain attributes of modules, and in buffers. A configuration that is changed after a model was built need not change the
model, and the reverse; so all three are read.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from re import sub
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from tensorlens_tl.models.lifecycle.weight_state import sampled

WITHOUT_INFLUENCE = {
    "name", "model_name", "name_or_path", "architectures", "model_type", "problem_type", "loss_type",
    "transformers_version", "tokenizer_class", "tokenizer_name", "tokenizer_prepends_bos", "tokenizer_appends_eos",
    "default_prepend_bos", "default_padding_side", "seed", "init_mode", "init_weights", "initializer_range",
    "initializer_factor", "initializer_cutoff_factor", "init_std", "checkpoint_index", "checkpoint_label_type",
    "checkpoint_value", "from_checkpoint", "trust_remote_code", "n_params", "device", "n_devices", "dtype",
    "torch_dtype", "training", "is_training", "gradient_checkpointing", "use_cache", "return_dict",
    "output_attentions", "output_hidden_states", "output_router_logits", "router_aux_loss_coef", "pretraining_tp",
    "use_attn_result", "use_attn_in", "use_split_qkv_input", "use_hook_mlp_in", "use_hook_tokens", "is_caching",
    "context_level", "attn_implementation", "generation_config", "kernel_config", "all_tied_weights_keys", "optional",
    "conversion_rule", "cfg", "config", "disable_warnings", "label2id", "in_features", "out_features", "nx", "nf",
    "num_embeddings", "embedding_dim", "normalized_shape", "max_seq_len_cached", "alibi", "hook_dict", "mod_dict",
    "submodules", "real_components", "hook_aliases", "property_aliases", "hooks_to_cache",
}  # fmt: skip
"""Attributes that change no number of a run in eval mode, or that a run itself writes."""

CONFIGURATIONS = ("cfg", "config")
"""Attributes under which modules hold a configuration."""

PLAIN = (bool, int, float, complex, str, type(None))
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
ACTING = (*PLAIN, *FUNCTIONS, np.generic, Tensor, list, tuple, dict, set, frozenset)

ROTARY_TABLES = ("rotary_sin", "rotary_cos")
"""Buffers of a HookedTransformer that grow with the prompt."""

_readings: "WeakKeyDictionary[Any, _Reading]" = WeakKeyDictionary()  # by model


def configuration(model: nn.Module) -> Mapping[str, str]:
    """What decides a model's numbers besides its weights, as it is now: where it lies, and its value as text.

    The same mapping, read-only, is returned until something changes; another call compares every value, and writes no
    text. Attributes without influence on the numbers of a run are left out, as are hooks, devices and dtypes, and what
    a run itself leaves in a model. Functions and classes of modules are known by their names, functions without a name
    by their code; buffers by a digest of a sample (`tensorlens_tl.models.lifecycle.weight_state.sampled`), so that a
    lone changed number in a large one may go unnoticed, as does a method that is put into a class.

    Args:
        model: a TransformerLens model.

    Returns:
        Texts by place, in the order of the modules: ``{"cfg.eps": "1e-05", "blocks.0.attn.attn_scale": "8", …}``.
    """
    reading = _readings.get(model)
    if reading is None or not reading.is_of(model):
        reading = _readings[model] = _Reading(model)
    return reading.read()


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The differences of two configurations, in words; what changed alike in many layers is one of them.

    Args:
        before, after: see `configuration`; either may be `compact`.

    Returns:
        Such as ``"blocks.*.attn.attn_scale: 8 -> 4 (12 places)"``; empty where they agree.
    """
    if before is after:
        return []
    places = defaultdict[tuple[str, str, str], list[str]](list)
    everywhere = dict.fromkeys([*after, *before])
    listed = {_pattern(place) for place in everywhere if "*" not in place}
    for place in everywhere:
        then = _value(before, place)
        now = _value(after, place)
        # what one of the two says of all layers at once is compared layer by layer with the other
        if then != now and not ("*" in place and place in listed):
            places[_pattern(place), then, now].append(place)
    return [_difference(*key, where) for key, where in places.items()]


def compact(texts: Mapping[str, str]) -> dict[str, str]:
    """A configuration in which what is the same in every layer stands once, under ``"blocks.*.…"``; for files.

    Nothing is lost: an attribute stands once only where all parts of that name have it, and parts that are not in every
    layer are listed one by one.
    """
    values = defaultdict[str, list[str]](list)
    for place, text in texts.items():
        values[_pattern(place)].append(text)

    def shared(pattern: str) -> bool:
        everywhere = len(values[pattern]) == len(values.get(pattern.rpartition(".")[0], ()))
        return everywhere and len(set(values[pattern])) == 1

    patterns = {pattern for pattern in list(values) if shared(pattern)}
    return {_pattern(place) if _pattern(place) in patterns else place: text for place, text in texts.items()}


def _value(texts: Mapping[str, str], place: str) -> str:
    return texts.get(place, texts.get(_pattern(place), "(not there)"))


def _pattern(place: str) -> str:
    return sub(r"(?<=\.)\d+(?=\.|$)", "*", place)


def _difference(pattern: str, then: str, now: str, places: Sequence[str]) -> str:
    where = places[0]
    count = ""
    if len(places) > 1:
        where = pattern
        count = f" ({len(places)} places)"
    where = where.replace("._original_component", "")  # a Bridge's parts hand on what they wrap
    return f"{where}: {then} -> {now}{count}"


class _Reading:
    """Where a model's configuration lies, collected once, and what was read there last.

    It holds modules and configurations by weak references alone, so that it keeps no model alive.
    """

    def __init__(self, model: nn.Module):
        parts = dict(_parts(model))
        self.parts = [ref(part) for part in parts.values()]
        self.inside = [ref(part) for held in map(vars, parts.values()) for part in _inside(held)]
        self.counts = [len(vars(part)) for part in parts.values()]
        self.names = [_names(vars(part), top=part is model) for part in parts.values()]
        self.classes = {where or "class": _name_of(type(part)) for where, part in parts.items()}
        self.places: list[str] = []
        for kind in (0, 1):  # attributes, then buffers
            for where, names in zip(parts, self.names, strict=True):
                self.places += [_joined(where, name) for name in names[kind]]
        self.values: list[Any] = []
        self.numbers = torch.zeros(0)
        self.texts: Mapping[str, str] = {}

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model is still put together of the same modules, configurations and attributes."""
        parts = [part() for part in self.parts]
        if any(part is None for part in parts):
            return False
        holders = [vars(part) for part in parts]
        inside = [part for held in holders for part in _inside(held)]
        if len(inside) != len(self.inside) or not all(map(is_, inside, [part() for part in self.inside])):
            return False
        counts = [len(held) for held in holders]
        for place, held in enumerate(holders):
            if counts[place] != self.counts[place] and _names(held, top=not place) != self.names[place]:
                return False
        self.counts = counts  # a Bridge's parts note private things in themselves as they run
        return True

    def read(self) -> Mapping[str, str]:
        """See `configuration`."""
        holders = [vars(part()) for part in self.parts]
        values: list[Any] = []
        samples: list[Tensor] = []
        for held, (attributes, buffers) in zip(holders, self.names, strict=True):
            values += [_comparable(held.get(name)) for name in attributes]
            samples += [_sample(held, name) for name in buffers]
        numbers = _joined_numbers(samples)
        if not self.texts or values != self.values or not torch.equal(numbers, self.numbers):
            texts = [*map(_text, values), *map(_digest, samples)]
            self.values = values
            self.numbers = numbers
            self.texts = MappingProxyType(self.classes | dict(zip(self.places, texts, strict=True)))
        return self.texts


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """A model's modules and configurations by name, each once; no hook points, which hold no numbers, nor dropouts."""
    seen = set[int]()
    stack: list[tuple[str, Any]] = [("", model)]
    while stack:
        where, part = stack.pop()
        held = vars(part)
        if id(part) in seen or "fwd_hooks" in held or isinstance(part, nn.Dropout):
            continue
        seen.add(id(part))
        yield where, part
        inner: list[tuple[str, Any]] = [(name, held[name]) for name in CONFIGURATIONS if name in held]
        if not isinstance(part, nn.Module):
            inner = list(held.items())
        inside = held.get("original_model")
        if inside is not None:  # its configuration by this name, and not by that of the first block that has it
            inner.append(("original_model.config", vars(inside).get("config")))
        inner = [(name, value) for name, value in inner if _is_configuration(value)]
        inner += [*held.get("_modules", {}).items(), ("original_model", inside)]
        # from the end: the first one is taken from the stack first
        stack += [(_joined(where, name), value) for name, value in reversed(inner) if value is not None]


def _is_configuration(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)


def _inside(held: Mapping[str, Any]) -> list[Any]:
    """The modules and configurations that a module holds."""
    if "_modules" not in held:
        return []
    configurations = [held[name] for name in CONFIGURATIONS if _is_configuration(held.get(name))]
    modules = [*held["_modules"].values(), held.get("original_model")]
    return [part for part in (*modules, *configurations) if part is not None]


def _names(held: Mapping[str, Any], top: bool) -> tuple[list[str], list[str]]:
    """The attributes and the buffers that may act; of TransformerLens' own model only attributes that are functions."""
    kinds = FUNCTIONS if top else ACTING
    attributes = [name for name, value in held.items() if isinstance(value, kinds) and _acts(held, name)]
    return attributes, [name for name in held.get("_buffers", ()) if not _is_dynamic(held, name)]


def _acts(held: Mapping[str, Any], name: str) -> bool:
    if name.startswith("_") or name in WITHOUT_INFLUENCE or "drop" in name:
        return False
    if name == "forward" and "_hf_hook" in held:  # accelerate's, which brings in weights that are offloaded
        return False
    return not isinstance(held[name], nn.Parameter) and not _is_dynamic(held, name)


def _is_dynamic(held: Mapping[str, Any], name: str) -> bool:
    """Whether a run writes it: the frequencies of rotary positions that are stretched with the prompt."""
    kind = str(held.get("rope_type"))
    if "dynamic" in kind or "longrope" in kind:
        return "original" not in name and name.endswith(("inv_freq", "attention_scaling", "max_seq_len_cached"))
    return name in ROTARY_TABLES and getattr(held.get("cfg"), "use_dynamic_ntk_rope", False)


def _sample(held: Mapping[str, Any], name: str) -> Shaped[Tensor, "n"]:
    """A sample of a buffer's numbers."""
    buffer = held["_buffers"].get(name)
    if buffer is None or buffer.is_meta:
        return torch.zeros(0)
    if name in ROTARY_TABLES:  # longer prompts add rows
        buffer = buffer[: held["cfg"].n_ctx]
    return sampled(buffer.detach())


def _joined_numbers(samples: Sequence[Tensor]) -> Shaped[Tensor, "n"]:
    return torch.cat([torch.zeros(0, dtype=torch.float64), *map(_as_doubles, samples)])


def _as_doubles(sample: Shaped[Tensor, "n"]) -> Float[Tensor, "m"]:
    """Numbers on the CPU; of complex ones, both parts."""
    if sample.is_complex():
        sample = torch.view_as_real(sample).flatten()
    return sample.cpu().double()


def _digest(sample: Shaped[Tensor, "n"]) -> str:
    digest = hashlib.sha256(_joined_numbers([sample]).numpy().tobytes()).hexdigest()
    return f"{sample.numel()} numbers, {digest[:16]}"


def _comparable(value: Any) -> Any:
    """A value as it is compared with a later one: what may be written to in place as text."""
    if type(value) in PLAIN:
        return value
    return _text(value)


def _text(value: Any) -> str:
    """A value in words, the same in another process."""
    if isinstance(value, Tensor):
        return _digest(sampled(value.detach()))
    if isinstance(value, np.generic):
        return _text(value.item())
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, set | frozenset):
        return _text(sorted(value, key=str))
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    if isinstance(value, FUNCTIONS):
        return _function(value)
    if isinstance(value, PLAIN):
        return str(value)
    return _name_of(type(value))


def _function(function: Any) -> str:
    """A function by its name; one that no name leads to, by its code and what it was closed over."""
    if isinstance(function, partial):
        return f"partial({_function(function.func)}, {_text(function.args)}, {_text(function.keywords)})"
    if isinstance(function, MethodType):
        return f"{_name_of(function.__func__)} of {_name_of(type(function.__self__))}"
    name = _name_of(function)
    if "<" not in name:
        return name
    inside = [_code(function.__code__), _text(function.__defaults__ or ())]
    inside += [_text(cell.cell_contents) for cell in function.__closure__ or ()]
    return f"{name} ({hashlib.sha256(repr(inside).encode()).hexdigest()[:16]})"


def _code(code: CodeType) -> str:
    constants = [_constant(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _constant(value: Any) -> str:
    return _code(value) if isinstance(value, CodeType) else repr(value)


def _name_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None) or 'builtins'}.{getattr(thing, '__qualname__', repr(thing))}"


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}".removeprefix(".")
