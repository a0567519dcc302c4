"""The registry: methods and layer maps, one name, one call, one kind of result.

A method is a function of a `FrozenPass` and keyword options that returns an `Attribution`:

    >>> import tensorlens_tl as tlens
    >>> @tlens.register_method("uniform")
    ... def uniform(frozen, *, query=-1):
    ...     \"\"\"The same score for every source token: a baseline.\"\"\"
    ...     scores = frozen.operator().in_out(query).scores
    ...     return tlens.Attribution.of(frozen, 0 * scores + 1, method="uniform", query=query)
    >>> "uniform" in tlens.list_methods()
    True

A layer map is a function of a `FrozenPass` that returns one map of token pairs per layer,
`[layer, batch, query, key]`. `mean` and `rollout` aggregate it by its name:

    >>> import torch
    >>> @tlens.register_layer_map("first-head", holds_residual=False)
    ... def first_head(frozen):
    ...     \"\"\"The pattern of each layer's first head, between real tokens.\"\"\"
    ...     real = frozen.mask[:, :, None] & frozen.mask[:, None]
    ...     return torch.stack([frozen.pattern(layer)[:, 0] * real for layer in range(frozen.n_layers)])
    >>> frozen = tlens.freeze(tlens.load_demo_model(), "Return the value of the")
    >>> tlens.attribute(frozen, method="rollout", layer_map="first-head", query=-1)
    Attribution('rollout', batch=1, query=1, key=6)

What a method needs of a model, its registration says by names of `tensorlens_tl.requirements.REQUIREMENTS`, as in
``@register_method("mine", needs=("head_vectors", "unwhitened"))``: other models are refused before any work starts.

Packages publish methods and layer maps through the entry-point group ``tensorlens_tl.methods``: a function, or a module
that registers them when it is imported. The built-in ones are published and registered in just that way.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from importlib.metadata import entry_points
from typing import Annotated, Any, TypeVar, cast

from torch import Tensor

from tensorlens_tl._arguments import checked_arguments
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.errors import InvalidInputError, RegistryError, UnsupportedModelError
from tensorlens_tl.hooks import lock_of
from tensorlens_tl.layerwise import Maps
from tensorlens_tl.models import ModelLike, ModelView, TokenLike
from tensorlens_tl.passes import FrozenPass, check_pass, freeze
from tensorlens_tl.passes.inputs import (
    check_slice,
    memory_batches,
    numbered,
    one_per_prompt,
    prepare,
    taken,
    tokenized,
)
from tensorlens_tl.requirements import Requirement, resolved
from tensorlens_tl.results import Attribution, joined

__all__ = [
    "LayerMap",
    "Method",
    "attribute",
    "get_layer_map",
    "get_method",
    "list_layer_maps",
    "list_methods",
    "register_alias",
    "register_layer_map",
    "register_method",
]

ENTRY_POINTS = "tensorlens_tl.methods"
MethodFunction = TypeVar("MethodFunction", bound=Callable[..., Attribution])
MapFunction = TypeVar("MapFunction", bound=Callable[..., Tensor])

PER_PROMPT = ("target", "minus", "direction")
"""Options that may name one thing for each prompt."""

ExplainsPrediction = bool | Callable[[Mapping[str, Any]], bool] | None
"""Whether a method explains a prediction: always or never, by its options, or as its signature says (None)."""

Needs = Annotated[Iterable[str | Requirement], "names of requirements, or requirements"]
"""Names of `tensorlens_tl.requirements.REQUIREMENTS`, or requirements that a registration brings."""


@dataclass(frozen=True, repr=False)
class Method:
    """A registered method: its function, the options it takes with their defaults, what it needs and what it explains.

    Attributes:
        name: what `attribute`, evaluations and the command line call it.
        function: what was registered, to be called with a frozen pass and options.
        about_prediction: see `register_method`.
        needs: see `register_method`.
        alias_of: the method that it stands for, and the options that are fixed, where it is an alias.

    >>> tlens.get_method("alti")
    Method('alti', options: distance, query; needs: one_stack, head_vectors, unwhitened)
    >>> tlens.get_method("cp-lrp").alias_of
    ('tensorlens', {'collapse': 'target'})
    """

    name: str
    function: Callable[..., Attribution]
    about_prediction: ExplainsPrediction = None
    needs: Needs | Callable[[Mapping[str, Any]], Needs] = ()
    alias_of: tuple[str, Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", inspect.getdoc(self.function))  # help() of a method is its own

    def __repr__(self) -> str:
        options = ", ".join(self.options) or "none"
        needs = ", ".join(need.name for need in self.requirements()) or "none"
        return f"Method({self.name!r}, options: {options}; needs: {needs})"

    def requirements(self, options: Mapping[str, Any] | None = None) -> tuple[Requirement, ...]:
        """What it needs of a model, called with these options, in the order in which it is checked.

        >>> [need.name for need in tlens.get_method("rollout").requirements({"layer_map": "norm:attn"})]
        ['one_stack', 'head_vectors', 'unwhitened']
        """
        needs = self.needs
        if callable(needs):
            needs = needs({**self.options, **(options or {})})
        return resolved(needs, f"method {self.name!r}")

    def refusal(self, frozen: FrozenPass, options: Mapping[str, Any] | None = None) -> str:
        """Why it refuses the model of this pass, called with these options; an empty text where it does not.

        >>> tlens.get_method("alti").refusal(frozen)
        ''
        """
        try:
            self.check(frozen, options)
        except UnsupportedModelError as error:
            return str(error)
        return ""

    def check(self, frozen: FrozenPass, options: Mapping[str, Any] | None = None) -> None:
        """Refuse a model that it cannot be called on with these options.

        Raises:
            UnsupportedModelError: the model does not meet one of its requirements; names the block.
        """
        for requirement in self.requirements(options):
            requirement.check(frozen, self.name)

    @property
    def options(self) -> dict[str, Any]:
        """Its keyword options with their defaults."""
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        return {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}

    @property
    def takes_any_option(self) -> bool:
        """Whether it accepts options it does not name."""
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.function).parameters.values())

    def takes(self, option: str) -> bool:
        """Whether it accepts an option of this name."""
        return option in self.options or self.takes_any_option

    def explains_prediction(self, options: Mapping[str, Any] | None = None) -> bool:
        """Whether it explains a predicted token, called with these options: then it is to be given one as `target`.

        What its registration says, or else its signature: a method that accepts a `target` explains it, unless it is
        given a `direction` instead.
        """
        options = options or {}
        if callable(self.about_prediction):
            return self.about_prediction(options)
        if self.about_prediction is not None:
            return self.about_prediction
        return self.takes("target") and options.get("direction") is None

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc(self.function) or "").split("\n", 1)[0]


@dataclass(frozen=True)
class LayerMap:
    """A registered layer map: its function, and whether its maps hold the residual connection already.

    Attributes:
        name: what `mean` and `rollout` call it.
        function: what was registered, to be called with a frozen pass.
        holds_residual: whether the residual connection is in the maps already.
        needs: see `register_method`; `one_stack` besides.

    >>> attention = tlens.registry.get_layer_map("attention")
    >>> tuple(attention(frozen).shape), attention.requirements()[-1].name
    ((4, 1, 7, 7), 'patterns')
    """

    name: str
    function: Callable[..., Tensor]
    holds_residual: bool
    needs: Needs = ()

    def requirements(self) -> tuple[Requirement, ...]:
        """What it needs of a model, in the order in which it is checked."""
        return resolved(("one_stack", *self.needs), f"layer map {self.name!r}")

    def __call__(self, frozen: FrozenPass) -> Maps:
        """The maps of every layer.

        Raises:
            UnsupportedModelError: the map is undefined for this model.
            RegistryError: the function gives something else than `[layer, batch, query, key]`.
        """
        for requirement in self.requirements():
            requirement.check(frozen, f"layer map {self.name!r}")
        maps = self.function(frozen)
        batch, pos = frozen.tokens.shape
        wanted = (frozen.n_layers, batch, pos, pos)
        shape = tuple(maps.shape) if isinstance(maps, Tensor) else type(maps).__name__
        if shape != wanted:
            raise RegistryError(f"layer map {self.name!r} gives {shape}, not [layer, batch, query, key] = {wanted}.")
        return maps


_METHODS: dict[str, Method] = {}
_LAYER_MAPS: dict[str, LayerMap] = {}
_LOADED: set[str] = set()


@checked_arguments
def register_method(
    name: Any,
    *,
    needs: Needs | Callable[[Mapping[str, Any]], Needs] | None = None,
    explains_prediction: ExplainsPrediction = None,
) -> Callable[[MethodFunction], MethodFunction]:
    """Register a function under a name, as a decorator.

    The same function (by module and qualified name) may register again, as notebook cells do.

    Args:
        name: what `attribute`, evaluations and the command line call it.
        needs: what it needs of a model: names of `tensorlens_tl.requirements.REQUIREMENTS`, or requirements that
            you define. Other models are refused before it is called. Where needs depend on options, pass a function of
            the options, defaults included, that returns them. None is none.
        explains_prediction: whether it explains a predicted token. Evaluations, reports and the command line give such
            a method the model's own prediction as `target`, unless one is given. None goes by the signature: a method
            with an option `target`, or with ``**options``, explains it. A function of the options says it of a method
            that explains a prediction with some of them only.

    Returns:
        A decorator. It returns the function itself, or where `needs` are given one that checks them first.

    Raises:
        RegistryError: the name belongs to another function, or `needs` names no requirement.

    >>> @tlens.register_method("first-pattern", needs=("patterns",))
    ... def first_pattern(frozen, *, query=-1):
    ...     \"\"\"The first layer's attention, averaged over heads.\"\"\"
    ...     scores = frozen.pattern(0).mean(1)[:, [query]]
    ...     return tlens.Attribution.of(frozen, scores, method="first-pattern", query=query)
    >>> round(float(first_pattern(frozen).scores.sum()), 4)
    1.0
    """
    _check_name(name, "register_method('my-method')")
    if needs is not None and not callable(needs):
        needs = resolved(needs, f"register_method({name!r})")

    def decorate(function: MethodFunction) -> MethodFunction:
        _load_built_in(function)
        _check_free(_METHODS.get(name), function, f"register_method: {name!r}", name)
        method = Method(name, function, explains_prediction, needs or ())
        if needs is not None:
            method = replace(method, function=_checking(method))
        _METHODS[name] = method
        return cast(MethodFunction, method.function)

    return decorate


def _checking(method: Method) -> Callable[..., Attribution]:
    """A method's function that checks what the method needs before it is called."""

    @wraps(method.function)
    def checked(frozen: Any, **options: Any) -> Attribution:
        check_pass(frozen)
        method.check(frozen, options)
        return method.function(frozen, **options)

    return checked


@checked_arguments
def register_alias(
    name: str,
    *,
    of: str,
    needs: Needs | None = None,
    **fixed: Any,
) -> Callable[[MethodFunction], MethodFunction]:
    """Register a name for another method with some options fixed, as a decorator.

    Args:
        name: what `attribute`, evaluations and the command line call it.
        of: the method that it stands for.
        needs: see `register_method`; None takes those of the other method with the fixed options.
        fixed: the options of the other method that are fixed.

    Returns:
        A decorator of a function that declares the options which are left and documents the name; its body is not run.
        The function that the decorator returns calls the other method, and gives its results the new name and the
        declared options.

    Raises:
        RegistryError: the name belongs to another function, or `needs` names no requirement.

    >>> @tlens.registry.register_alias("max-attention", of="attention", head_reduction="max")
    ... def max_attention(frozen, *, query=-1):
    ...     \"\"\"The largest attention of any head, averaged over layers.\"\"\"
    >>> max_attention(frozen)
    Attribution('max-attention', batch=1, query=1, key=7)
    """

    def needs_of_original(options: Mapping[str, Any]) -> Needs:
        return get_method(of).requirements({**options, **fixed})

    def explains_prediction(options: Mapping[str, Any]) -> bool:
        return get_method(of).explains_prediction({**options, **fixed})

    def decorate(declared: MethodFunction) -> MethodFunction:
        defaults = Method(name, declared).options

        @wraps(declared)
        def alias(frozen: FrozenPass, **options: Any) -> Attribution:
            chosen = defaults | options
            return renamed(get_method(of).function(frozen, **fixed, **chosen), name, chosen)

        registered = register_method(
            name, needs=needs_of_original if needs is None else needs, explains_prediction=explains_prediction
        )(alias)
        _METHODS[name] = replace(_METHODS[name], alias_of=(of, fixed))
        return cast(MethodFunction, registered)

    return decorate


def renamed(attribution: Attribution, method: str, options: Mapping[str, Any]) -> Attribution:
    """A result of one method as that of another, with its options; `memory`, which changes no number, is none."""
    return replace(attribution, method=method, options={k: v for k, v in options.items() if k != "memory"})


@checked_arguments
def register_layer_map(name: Any, *, holds_residual: bool, needs: Needs = ()) -> Callable[[MapFunction], MapFunction]:
    """Register a function of a pass that gives one map of token pairs per layer, as a decorator.

    Args:
        name: what `mean` and `rollout` call it, ``layer_map=name``.
        holds_residual: whether the residual connection is in the maps already; a rollout adds it otherwise.
        needs: what it needs of a model, see `register_method`; no layer map is read of an encoder–decoder.

    Returns:
        A decorator, which returns the function.

    Raises:
        RegistryError: the name belongs to another function, or `needs` names no requirement.

    >>> @tlens.register_layer_map("last-head", holds_residual=False, needs=("patterns",))
    ... def last_head(frozen):
    ...     return torch.stack([frozen.pattern(layer)[:, -1] for layer in range(frozen.n_layers)])
    >>> tlens.attribute(frozen, method="mean", layer_map="last-head").scores.shape
    torch.Size([1, 7, 7])
    """
    _check_name(name, "register_layer_map('my-map', holds_residual=False)")
    needs = resolved(needs, f"register_layer_map({name!r})")

    def decorate(function: MapFunction) -> MapFunction:
        _load_built_in(function)
        _check_free(_LAYER_MAPS.get(name), function, f"register_layer_map: {name!r}", name)
        _LAYER_MAPS[name] = LayerMap(name, function, holds_residual, needs)
        return function

    return decorate


def _check_name(name: Any, example: str) -> None:
    if not isinstance(name, str):
        raise RegistryError(f"a name is needed: write @{example}.")


def _check_free(taken: Method | LayerMap | None, function: Callable[..., Any], what: str, name: str) -> None:
    if taken is not None and _identity(taken.function) != _identity(function):
        raise RegistryError(
            f"{what} is already {'.'.join(_identity(taken.function))}; choose another name, such as 'my-{name}'."
        )


def _identity(function: Callable[..., Any]) -> tuple[str, str]:
    # what exec defines has no module
    return str(function.__module__), getattr(function, "__qualname__", repr(function))


def list_methods(frozen: FrozenPass | None = None) -> list[str]:
    """The names `attribute` knows: built in, registered here, and published by installed packages.

    Args:
        frozen: a pass, for the methods alone whose requirements its model meets (with their default options).

    Returns:
        The names, sorted.

    >>> "globenc" in tlens.list_methods()
    True
    >>> parallel = tlens.testing.tiny_model("bridge/neox")
    >>> "globenc" in tlens.list_methods(tlens.freeze(parallel, [[3, 4, 5]]))
    False
    """
    _load_published()
    names = sorted(_METHODS)
    if frozen is None:
        return names
    check_pass(frozen)
    return [name for name in names if not _METHODS[name].refusal(frozen)]


def get_method(name: str) -> Method:
    """A registered method.

    Args:
        name: one of `list_methods()`.

    Returns:
        What was registered: its function, options and requirements.

    Raises:
        RegistryError: no such name; suggests the nearest.

    >>> tlens.get_method("globenc").summary
    'The product over layers of norms through attention, residual and both norms (Modarressi 2022).'
    """
    if name not in _METHODS:
        _load_published()
    if name not in _METHODS:
        raise RegistryError(unknown_method(name, list_methods()))
    return _METHODS[name]


def list_layer_maps() -> list[str]:
    """The names that ``layer_map=`` of `mean` and `rollout` takes.

    >>> "norm:attn_res" in tlens.list_layer_maps()
    True
    """
    _load_published()
    return list(_LAYER_MAPS)


def get_layer_map(name: str) -> LayerMap:
    """A registered layer map.

    Args:
        name: one of `list_layer_maps()`.

    Raises:
        InvalidInputError: no such name.

    >>> tlens.registry.get_layer_map("globenc").holds_residual
    True
    """
    if name not in _LAYER_MAPS:
        _load_published()
    if name not in _LAYER_MAPS:
        raise InvalidInputError(f"layer_map={name!r}; use one of {', '.join(map(repr, _LAYER_MAPS))}.")
    return _LAYER_MAPS[name]


def unknown_method(name: Any, known: Iterable[str]) -> str:
    """What to say about a name that is none of the known ones: the nearest, and all of them."""
    known = list(known)
    return f"no method called {name!r}.{_nearest(name, known)} There are {', '.join(map(repr, known))}."


def _nearest(name: Any, known: Iterable[str]) -> str:
    """A question, where a name is nearly one of the known ones."""
    near = difflib.get_close_matches(str(name).lower(), list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def _load_built_in(function: Callable[..., Any]) -> None:
    """Before somebody else's function takes a name: the built-in ones have theirs first."""
    if not _is_ours(str(function.__module__)):
        _load_published(built_in=True)


def _load_published(built_in: bool = False) -> None:
    """Load what is published once; it may register itself, or is registered under its entry point's name."""
    points = sorted(entry_points(group=ENTRY_POINTS), key=lambda point: not _is_ours(point.value))
    for point in points:
        ours = _is_ours(point.value)
        if point.value in _LOADED or (built_in and not ours):
            continue
        _LOADED.add(point.value)
        try:
            loaded: Any = point.load()
            known = [entry.function for entry in (*_METHODS.values(), *_LAYER_MAPS.values())]
            if not ours and callable(loaded) and all(function is not loaded for function in known):
                register_method(point.name)(cast(Callable[..., Attribution], loaded))
        except Exception as error:
            if ours:  # a defect of our own is no warning
                _LOADED.discard(point.value)
                raise
            warnings.warn(  # somebody else's package must not take ours down
                f"the published method {point.name!r} ({point.value}) cannot be loaded: {error!r}. Update or uninstall "
                "the package that publishes it; everything else works.",
                stacklevel=3,
            )


def _is_ours(value: str) -> bool:
    return value.partition(":")[0].partition(".")[0] == __name__.partition(".")[0]


def attribute(
    model: ModelLike | FrozenPass,
    input: Any = None,
    target: TokenLike = None,
    *,
    method: str = "tensorlens",
    memory: Memory = None,
    **options: Any,
) -> Attribution:
    """Attribute with any registered method: ``attribute(model, text, " Paris")`` or ``attribute(frozen, " Paris")``.

    Many prompts are run in batches of like length, as many at once as fit the bound of `memory`, and come back as one
    result in their own order.

    Args:
        model: a TransformerLens model, or a `FrozenPass`, which has its input already: the target may come next.
        input: a string, a list of strings, or token ids; images or sound where the model reads those (see `freeze`).
        target: of the methods that take one: a token, one for each prompt, or `NEXT`; see `FrozenOperator.target`.
        method: one of `list_methods()`.
        memory: what may be allocated at once besides the result, as ``"512MB"`` or bytes; None is 256 MiB. It bounds
            the batches, and whatever the method itself bounds by it.
        options: the method's options (``help(tlens.get_method(name).function)`` describes them; the default method
            takes `collapse`, `query`, `minus`, `direction`, `layers`, `heads`, `mlp`, `activation`,
            `probes`); options of `freeze` (`attention_mask`, `prepend_bos`, `verify` …) are passed to
            it.

    Returns:
        The scores, `[batch, query, key]` unless the method says otherwise, with tokens, positions and provenance.

    Raises:
        RegistryError: unknown method.
        InvalidInputError: an option that neither knows; see also `freeze`.
        UnsupportedModelError: the model does not meet what the method needs; see also `freeze`.
        FrozenModelError: the model's weights changed after it was frozen.

    Every built-in method is a function of a frozen pass, too, with its options in its signature, for editors to
    complete and `help` to show:

    >>> attribution = tlens.attribute(model, text, method="alti", distance="l2")
    >>> torch.equal(attribution.scores, tlens.methods.alti(frozen, distance="l2").scores)
    True
    """
    chosen = get_method(method)
    in_bytes(memory)
    if memory is not None and "memory" in chosen.options:
        options = {**options, "memory": memory}
    if isinstance(model, FrozenPass) and input is not None:
        if target is not None:
            raise InvalidInputError(
                "attribute: a frozen pass has its input already, so what follows it is the target: "
                "attribute(frozen, ' Paris')."
            )
        target = input
    if target is not None:
        options = {**options, "target": target}
    for_freeze, for_method = split_options(chosen, options)
    if isinstance(model, FrozenPass):
        if for_freeze:
            raise InvalidInputError(
                f"attribute: a frozen pass has its input already; leave {', '.join(for_freeze)} out, or pass it to "
                "freeze."
            )
        return _answered(chosen, model, for_method)
    if input is None:
        raise InvalidInputError("attribute: `input` is missing; pass a string, a list of strings or token ids.")
    rows, batches = _batches(model, input, for_freeze, memory)
    if len(batches) < 2:
        return _answered(chosen, freeze(model, input, **for_freeze), for_method)
    for_freeze.pop("prepend_bos", None)  # the rows are token ids now
    split = {name: one_per_prompt(name, for_method[name], len(rows)) for name in PER_PROMPT if name in for_method}
    check_slice(for_method.get("query"), [len(row) for row in rows])
    parts = []
    for batch in batches:
        of_batch = {name: taken(values, batch) for name, values in split.items() if values is not None}
        try:
            frozen = freeze(model, [rows[i] for i in batch], **for_freeze)
            parts.append(_answered(chosen, frozen, for_method | of_batch))
        except InvalidInputError as error:
            raise InvalidInputError(numbered(str(error), batch)) from error
    explained = {name: for_method[name] for name in PER_PROMPT if for_method.get(name) is not None}
    return joined(parts, batches, explained)


def _answered(method: Method, frozen: FrozenPass, options: Mapping[str, Any]) -> Attribution:
    """A method's answer; no other thread gives the model other weights before it is there."""
    with lock_of(frozen.model):
        frozen.check_fresh()
        return _checked(method.name, method.function(frozen, **options))


def split_options(method: Method, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `freeze`, and those of the method.

    Raises:
        InvalidInputError: one that neither knows; suggests the nearest.
    """
    freezing = {k: v for k, v in inspect.signature(freeze).parameters.items() if v.kind is v.KEYWORD_ONLY}
    for_freeze = {name: value for name, value in options.items() if name in freezing and name not in method.options}
    for_method = {name: value for name, value in options.items() if name not in for_freeze}
    unknown = [name for name in for_method if not method.takes(name)]
    if unknown:
        raise InvalidInputError(
            f"attribute: method {method.name!r} has no option {unknown[0]!r}.{_nearest(unknown[0], method.options)} It "
            f"takes {', '.join(method.options) or 'none'}; freezing takes {', '.join(freezing)}."
        )
    return for_freeze, for_method


def _batches(
    model: ModelLike, input: Any, for_freeze: dict[str, Any], memory: Memory
) -> tuple[list[Any], list[list[int]]]:
    """Many prompts as rows of token ids, and which of them go together; no batches where one pass is asked for.

    Images and sounds are their own rows.
    """
    whole = {"attention_mask", "token_type_ids", "cache", "decoder_input_ids", "model_inputs"} & set(for_freeze)
    if whole or isinstance(input, str | Mapping) or not hasattr(input, "__len__") or len(input) < 2:
        return [], []
    view = ModelView(model)
    if view.reads != "tokens":
        prompt = prepare(view, input)
        values = list(prompt.kwargs["input"])
        return values, memory_batches(view, [prompt.tokens.shape[1]] * len(values), memory)
    rows = tokenized(view, input, for_freeze.get("prepend_bos"))
    return rows, memory_batches(view, [len(row) for row in rows], memory)


def _checked(method: str, result: Any) -> Attribution:
    if not isinstance(result, Attribution):
        raise RegistryError(
            f"method {method!r} returned {type(result).__name__}, not an Attribution; wrap its scores with "
            "tlens.Attribution.of(frozen, scores, method=..., query=...)."
        )
    return result
