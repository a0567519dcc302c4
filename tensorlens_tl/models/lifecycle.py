"""Checking that a model can be frozen, and that it is still in the state in which its pass was taken.

`WeightState` tells whether a model's *weights* have changed. The same weights also compute something else after a
change of rotary base, epsilon, activation function, attention scale or window. These live in configurations
(TransformerLens' own, and Hugging Face's within a Bridge), in plain attributes of modules, and in buffers. Changing a
configuration after a model was built may not change the model, and vice versa, so `configuration` reads all three.
`OncePerWeights` caches what is found out about a model for as long as its weights stay the same.
"""

import copy
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, reduce
from itertools import chain
from operator import is_
from re import sub
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models.names import PACKED
from tensorlens_tl.models.offload import modules_of, offload_hooks, sources, version_of, whole
from tensorlens_tl.models.parameters import adapter_layers, adapter_state
from tensorlens_tl.models.protocol import HookedModel

# ------------------------------------------------------------------ weights


@dataclass(frozen=True, eq=False)
class WeightState:
    """A compact record of a model's weights, to tell whether they have changed since.

    `versions` (storage, and torch's write count) change when a weight is replaced, moved, cast or written in place.
    torch does not count writes through ``.data``, so a sample covering every row and column of each head's matrices
    (`sample`) and the sum of each weight's bits (`sums`) are recorded too. They reveal any change of a single number,
    head, neuron, channel or token embedding; changes of two numbers' bits that cancel, or of a buffer, may go
    unnoticed. `hashes` recognise weights that were ablated and restored. Offloaded weights are identified by the times
    and sizes of their files, adapters by which are active. A copied or unpickled state adopts its model's versions at
    the first `holds`, if the numbers agree.
    """

    versions: list[tuple[Any, ...]] | None
    sample: Float[Tensor, "n"]
    adapters: tuple[Any, ...] = ()
    sums: tuple[int, ...] = ()
    hashes: tuple[int, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"versions": None}  # a copy's weights have other storage

    @classmethod
    def of(cls, model: nn.Module) -> "WeightState":
        """Record the current state of a model's weights."""
        parameters, files = sources(model)
        sums = _sums(parameters)
        hashes = tuple(_remembered_hash(*each) for each in zip(parameters, sums, strict=True))
        return cls([*map(version_of, parameters), *files], _sample(parameters), _adapters(model), sums, hashes)

    @cached_property
    def digest(self) -> str:
        """Twelve hexadecimal digits that identify the stored numbers; empty if there are none."""
        if not self.sample.numel():
            return ""
        return hashlib.sha256(self.sample.double().cpu().numpy().tobytes()).hexdigest()[:12]

    def equals(self, other: "WeightState") -> bool:
        """Whether two states were taken of the same unchanged weights, compared without reading the model."""
        if self.versions is None or self.versions != other.versions or self.adapters != other.adapters:
            return False
        return self.sums == other.sums and _equal(self.sample, other.sample)

    def seems_held(self, model: nn.Module) -> bool:
        """As `holds`, but trust torch's write count: for the end of a computation that began with `holds`."""
        parameters, files = sources(model)
        if self.versions == [*map(version_of, parameters), *files] and _adapters(model) == self.adapters:
            return True
        return self.holds(model)

    def holds(self, model: nn.Module) -> bool:
        """Whether the model's weights are unchanged."""
        parameters, files = sources(model)
        versions: list[tuple[Any, ...]] = [*map(version_of, parameters), *files]
        before = versions if self.versions is None else self.versions  # None: a copied pass, with a model of its own
        if _places(versions) != _places(before) or _adapters(model) != self.adapters:
            return False
        if not _equal(_sample(parameters), self.sample) or _sums(parameters) != self.sums:
            return False
        if versions[len(parameters) :] != before[len(parameters) :]:
            return False
        if versions != before and tuple(map(_hash, parameters)) != self.hashes:  # written in place and not restored
            return False
        object.__setattr__(self, "versions", versions)
        return True


def _equal(a: Float[Tensor, "n"], b: Float[Tensor, "m"]) -> bool:
    """Whether the numbers are equal bit for bit; NaN equals NaN."""
    return torch.equal(a, b) or (a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))


def fingerprint(weights: Sequence[Tensor]) -> str:
    """Return a digest of some weights, from the same sample as `WeightState`; it survives casting to wider floats."""
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(str(tuple(weight.shape)).encode())
        digest.update(sampled(weight.detach()).double().cpu().numpy().tobytes())
    return digest.hexdigest()


def _adapters(model: nn.Module) -> tuple[Any, ...]:
    return tuple(adapter_state(layer) for layer in adapter_layers(model))


def _places(versions: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return where weights are stored: versions without torch's write count."""
    return [version[0] for version in versions]


@torch.no_grad()
def _sums(parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the sum of each weight's bits, in words of eight bytes; cheaper than one run of the model."""
    sums: list[Tensor] = []
    for parameter in parameters:
        bits = _bits(parameter)
        words = len(bits) // 8 * 8
        sums.append(bits[:words].view(torch.int64).sum() + bits[words:].sum())
    if not sums:
        return ()
    return tuple(torch.stack([total.to(sums[0].device) for total in sums]).tolist())


def _bits(weight: Tensor) -> UInt8[Tensor, "n"]:
    bits = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    return bits.clone() if bits.storage_offset() % 8 else bits


CHUNK = 1 << 18
"""How many words are multiplied at once."""

_hashes: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For each weight, its version, sum and hash, computed once for all passes of a model."""


def _remembered_hash(weight: Tensor, total: int) -> int:
    state = (*version_of(weight), total)
    stored = _hashes.get(weight)
    if stored is None or stored[0] != state:
        stored = _hashes[weight] = (state, _hash(weight))
    return stored[1]


@torch.no_grad()
def _hash(weight: Tensor) -> int:
    """Return the sum of a weight's bits, with a different factor at each position.

    Words have half the length of the sum and factors are odd, so no single change is lost to overflow.
    """
    bits = _bits(weight)
    words = bits[: len(bits) // 4 * 4].view(torch.int32)
    rest = int.from_bytes(bits[len(words) * 4 :].tolist(), "little")
    within = _factors(0, weight.device)
    sums = [(chunk * within[: len(chunk)]).sum() for chunk in words.split(CHUNK)]
    return rest + int((torch.stack(sums) * _factors(1, weight.device)[: len(sums)]).sum())


@lru_cache(maxsize=8)
def _factors(seed: int, device: torch.device) -> Int[Tensor, "n"]:
    drawn = torch.randint(-(2**62), 2**62, (CHUNK,), generator=torch.Generator().manual_seed(seed))
    return (2 * drawn + 1).to(device)


@torch.no_grad()
def _sample(parameters: Sequence[Tensor]) -> Tensor:
    samples = [sampled(parameter) for parameter in parameters if parameter.numel()]
    if not samples:
        return torch.zeros(0)
    # torch has no type promotion for float8
    samples = [numbers.to(torch.float16) if numbers.dtype.itemsize == 1 else numbers for numbers in samples]
    dtype = reduce(torch.promote_types, [numbers.dtype for numbers in samples], torch.float16)
    return torch.cat([numbers.to(samples[0].device, dtype) for numbers in samples])


def sampled(weight: Tensor) -> Tensor:
    """Return a weight's entries along wrapped diagonals, which cover every row and column of each head."""
    if weight.ndim < 2:
        return weight.reshape(-1)
    steps = _steps(weight.shape, weight.device)
    if weight.dtype.itemsize == 1:  # torch cannot index float8
        return torch.take(weight.view(torch.uint8), steps).view(weight.dtype)
    return torch.take(weight, steps)


@lru_cache(maxsize=512)
def _steps(shape: torch.Size, device: torch.device) -> Int[Tensor, "n"]:
    """Return the indices of those diagonals in each matrix; cached per shape, since every check needs them."""
    rows, columns = shape[-2:]
    steps = torch.arange(max(rows, columns), device=device)
    matrices = torch.arange(shape[:-2].numel(), device=device)[:, None]
    return (matrices * rows * columns + steps % rows * columns + steps % columns).flatten()


def refuse_devices(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` for blocks spread over devices, and for packed, distributed or empty weights.

    Offloaded weights count as being on the device they are loaded to.
    """
    brought: set[nn.Module] = set()
    empty: list[tuple[str, nn.Module]] = []  # weights without numbers, and their modules
    resident: set[torch.device] = set()
    for module in whole(model):
        for name, weight in module._parameters.items():
            if weight is not None:
                refuse_packed(name, weight, module)
                resident.add(weight.device)
                if weight.is_meta:
                    empty.append((name, module))
        for hook in offload_hooks(module):
            brought.add(module)
            if hook.place_submodules:
                brought.update(module.modules())
    if len(resident) == 1 and not empty and not brought:
        return  # the common case
    sources(model)  # raises for missing files
    if brought and getattr(model, "compatibility_mode", False):
        raise UnsupportedModelError(
            "the model's weights are offloaded after enable_compatibility_mode changed them: TransformerLens runs some "
            "such models with other weights than those it shows. Offload it without compatibility mode."
        )
    blocks = [getattr(model, stack, None) for stack in ("blocks", "encoder_blocks", "decoder_blocks")]
    inside = set(modules_of(*blocks))
    for name, module in empty:
        if module in inside and module not in brought:
            raise UnsupportedModelError(
                f"{name} of a {type(module).__name__} lies on the meta device, and no hook of accelerate brings it in. "
                "A Bridge that splits joint weights (GPT-2, GPT-NeoX) makes such copies of a model that was offloaded "
                "before; load that model into memory."
            )
    stacks = [stack for stack in blocks if isinstance(stack, nn.Module)]
    for block in chain.from_iterable(stack.children() for stack in stacks):
        devices = _devices(block)
        if len(devices) > 1:
            raise UnsupportedModelError(
                f"the weights of one {type(block).__name__} run on {', '.join(sorted(devices))}; those of a block must "
                "be on one device, different blocks may be on several. Load the model with a device_map that names "
                "whole blocks (no_split_module_classes does)."
            )


def _devices(block: nn.Module) -> set[str]:
    """Return the devices on which a block's weights are used."""
    devices: set[str] = set()
    for module in modules_of(block):
        devices.update(str(weight.device) for weight in module.parameters(recurse=False) if not weight.is_meta)
        for hook in offload_hooks(module):
            if hook.execution_device is not None:
                devices.add(str(torch.device(hook.execution_device)))
    return devices


def refuse_packed(name: str, weight: Tensor, module: nn.Module) -> None:
    """Raise `UnsupportedModelError` for a weight that is quantised or distributed over processes."""
    kind = type(weight)
    if kind is nn.Parameter:
        return
    if is_traceable_wrapper_subclass(weight) or any(hasattr(weight, attribute) for attribute in PACKED):
        raise UnsupportedModelError(
            f"{name} of a {type(module).__name__} is a {kind.__module__}.{kind.__name__}: weights that are packed "
            "(quantised), or spread over processes (tensor parallelism), are not read. Load the model in floating "
            "point, in one process."
        )


def refuse_dropout(model: nn.Module) -> None:
    """Raise `InvalidInputError` for a model in train mode, if that affects its output."""
    inner = getattr(model, "original_model", None)  # a Bridge's own module tree is incomplete
    seen = set[nn.Module]()
    trees = [tree for tree in (model, inner) if tree is not None]
    for name, module in chain.from_iterable(tree.named_modules(memo=seen) for tree in trees):
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
        noise = [value for key, value in vars(module).items() if "jitter" in key and isinstance(value, float)]
        if any(size > 0 for size in noise):
            raise InvalidInputError(
                f"the model is in train mode and {name or type(module).__name__} multiplies what it reads by random "
                f"numbers (jitter noise of {max(noise)}); two passes would differ. Call model.eval() first."
            )


# ------------------------------------------------------------------ configuration

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
"""Attributes that affect no number of a run in eval mode, or that a run itself writes."""

CONFIGURATIONS = ("cfg", "config")
"""Attributes in which modules keep a configuration."""

PLAIN = (bool, int, float, complex, str, type(None))
FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
ACTING = (*PLAIN, *FUNCTIONS, np.generic, Tensor, list, tuple, dict, set, frozenset)

ROTARY_TABLES = ("rotary_sin", "rotary_cos")
"""Buffers of a HookedTransformer that grow with the prompt."""

_readings: "WeakKeyDictionary[Any, _Reading]" = WeakKeyDictionary()  # by model


def configuration(model: nn.Module) -> Mapping[str, str]:
    """Return everything but weights that affects a model's numbers, as text by place: ``{"cfg.eps": "1e-05", …}``.

    The same read-only mapping is returned until a value changes. Hooks, devices, dtypes and traces of earlier runs are
    left out. Functions and classes are identified by name, anonymous functions by their code, and buffers by a digest
    of
    a sample: a single changed number in a large buffer, or a method replaced on a class, may go unnoticed.
    """
    reading = _readings.get(model)
    if reading is None or not reading.is_of(model):
        reading = _readings[model] = _Reading(model)
    return reading.read()


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Describe the differences between two configurations (or `compact` ones), merging equal changes in several layers.

    Such as ``"blocks.*.attn.attn_scale: 8 -> 4 (12 places)"``.
    """
    if before is after:
        return []
    places = defaultdict[tuple[str, str, str], list[str]](list)
    everywhere = dict.fromkeys([*after, *before])
    listed = {_pattern(place) for place in everywhere if "*" not in place}
    for place in everywhere:
        then = _value(before, place)
        now = _value(after, place)
        # entries that one of the two states for all layers at once are compared layer by layer
        if then != now and not ("*" in place and place in listed):
            places[_pattern(place), then, now].append(place)
    return [_difference(*key, where) for key, where in places.items()]


def compact(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the configuration with entries shared by all layers merged as ``"blocks.*.…"``, without loss."""
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
    where = where.replace("._original_component", "")  # a Bridge's components forward to what they wrap
    return f"{where}: {then} -> {now}{count}"


class _Reading:
    """The places of a model's configuration, found once, and their last values; holds only weak references."""

    def __init__(self, model: nn.Module):
        parts = dict(_parts(model))
        self.parts = [ref(part) for part in parts.values()]
        self.inside = [ref(part) for held in map(vars, parts.values()) for part in _inside(held)]
        self.counts = [len(vars(part)) for part in parts.values()]
        self.names = [_names(vars(part), top=part is model) for part in parts.values()]
        self.classes = {where or "class": _name_of(type(part)) for where, part in parts.items()}
        self.places: list[str] = []
        for kind in (0, 1):  # attributes, buffers
            for where, names in zip(parts, self.names, strict=True):
                self.places += [_joined(where, name) for name in names[kind]]
        self.values: list[Any] = []
        self.numbers = torch.zeros(0)
        self.texts: Mapping[str, str] = {}

    def is_of(self, model: nn.Module) -> bool:
        """Whether the model still consists of the same modules, configurations and attributes."""
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
        self.counts = counts  # a Bridge's components add private attributes as they run
        return True

    def read(self) -> Mapping[str, str]:
        """Return the current configuration; see `configuration`."""
        holders = [vars(part()) for part in self.parts]
        values: list[Any] = []
        samples: list[Tensor] = []
        for held, (attributes, buffers) in zip(holders, self.names, strict=True):
            current = (held.get(name) for name in attributes)
            # mutable values are compared as text
            values += [value if type(value) in PLAIN else _text(value) for value in current]
            samples += [_buffer_sample(held, name) for name in buffers]
        numbers = _joined_numbers(samples)
        if not self.texts or values != self.values or not torch.equal(numbers, self.numbers):
            texts = [*map(_text, values), *map(_digest, samples)]
            self.values = values
            self.numbers = numbers
            self.texts = MappingProxyType(self.classes | dict(zip(self.places, texts, strict=True)))
        return self.texts


def _parts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a model's modules and configurations by name, each once, except hook points and dropouts."""
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
        if inside is not None:  # use this name for its configuration, rather than that of the first block that has it
            inner.append(("original_model.config", vars(inside).get("config")))
        inner = [(name, value) for name, value in inner if _is_configuration(value)]
        inner += [*held.get("_modules", {}).items(), ("original_model", inside)]
        # reversed, since the stack is popped from the end
        stack += [(_joined(where, name), value) for name, value in reversed(inner) if value is not None]


def _is_configuration(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)


def _inside(held: Mapping[str, Any]) -> list[Any]:
    """Return the modules and configurations that a module has."""
    if "_modules" not in held:
        return []
    configurations = [held[name] for name in CONFIGURATIONS if _is_configuration(held.get(name))]
    modules = [*held["_modules"].values(), held.get("original_model")]
    return [part for part in (*modules, *configurations) if part is not None]


def _names(held: Mapping[str, Any], top: bool) -> tuple[list[str], list[str]]:
    """Return relevant attributes and buffers; for TransformerLens' own model, only attributes that are functions."""
    kinds = FUNCTIONS if top else ACTING
    attributes = [name for name, value in held.items() if isinstance(value, kinds) and _acts(held, name)]
    return attributes, [name for name in held.get("_buffers", ()) if not _is_dynamic(held, name)]


def _acts(held: Mapping[str, Any], name: str) -> bool:
    if name.startswith("_") or name in WITHOUT_INFLUENCE or "drop" in name:
        return False
    if name == "forward" and "_hf_hook" in held:  # accelerate's wrapper, which loads offloaded weights
        return False
    return not isinstance(held[name], nn.Parameter) and not _is_dynamic(held, name)


def _is_dynamic(held: Mapping[str, Any], name: str) -> bool:
    """Whether a run writes it: rotary frequencies that are scaled with the prompt."""
    kind = str(held.get("rope_type"))
    if "dynamic" in kind or "longrope" in kind:
        return "original" not in name and name.endswith(("inv_freq", "attention_scaling", "max_seq_len_cached"))
    return name in ROTARY_TABLES and getattr(held.get("cfg"), "use_dynamic_ntk_rope", False)


def _buffer_sample(held: Mapping[str, Any], name: str) -> Shaped[Tensor, "n"]:
    buffer = held["_buffers"].get(name)
    if buffer is None or buffer.is_meta:
        return torch.zeros(0)
    if name in ROTARY_TABLES:  # longer prompts add rows
        buffer = buffer[: held["cfg"].n_ctx]
    return sampled(buffer.detach())


def _joined_numbers(samples: Sequence[Tensor]) -> Shaped[Tensor, "n"]:
    """Concatenate numbers on the CPU, splitting complex ones into real and imaginary parts."""
    real = [torch.view_as_real(sample).flatten() if sample.is_complex() else sample for sample in samples]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(sample.cpu().double() for sample in real)])


def _digest(sample: Shaped[Tensor, "n"]) -> str:
    digest = hashlib.sha256(_joined_numbers([sample]).numpy().tobytes()).hexdigest()
    return f"{sample.numel()} numbers, {digest[:16]}"


def _text(value: Any) -> str:
    """Describe a value in a way that is the same across processes."""
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
    """Describe a function by its name or, if no name leads to it, by its code and closure."""
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
    constants = [_code(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _name_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', None) or 'builtins'}.{getattr(thing, '__qualname__', repr(thing))}"


def _joined(where: str, name: str) -> str:
    return f"{where}.{name}".removeprefix(".")


# ------------------------------------------------------------------ caches that last as long as the weights

Value = TypeVar("Value")


class OncePerWeights(Generic[Value]):
    """A cache of one value per model, valid while the model's weights keep their versions.

    Models are referenced weakly. Nothing is stored for weights of unknown versions (in a copied pass).
    """

    def __init__(self) -> None:
        self._stored: WeakKeyDictionary[nn.Module | HookedModel, tuple[list[tuple[object, ...]], Value]] = (
            WeakKeyDictionary()
        )

    def get(self, model: nn.Module | HookedModel, weights: WeightState) -> Value | None:
        """Return the value stored for a model with these weights, or None."""
        versions, value = self._stored.get(model, (None, None))
        return value if versions is not None and versions == weights.versions else None

    def set(self, model: nn.Module | HookedModel, weights: WeightState, value: Value) -> None:
        """Store a value, replacing any other for this model."""
        if weights.versions is not None:
            self._stored[model] = (weights.versions, value)


# ------------------------------------------------------------------ copies of a model that has run

Model = TypeVar("Model")


def copied(model: Model) -> Model:
    """Return a deep copy of a model that may have been run.

    Modules keep tensors of their last run (a Bridge of GPT-2 keeps its patterns) with an autograd history, which torch
    cannot copy; the copy has no history. Parts that cannot be copied raise `TypeError`, `RuntimeError` or
    `AttributeError`.
    """
    without_history: dict[int, Any] = {}
    module: Any = model
    for part in whole(module):
        for value in vars(part).values():
            for tensor in _tensors(value):
                if not tensor.is_leaf:
                    without_history[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(model, without_history)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in an attribute, including those in lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
