"""Registering methods and layer maps, and finding them by their names."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from importlib.metadata import entry_points
from typing import Annotated, Any, TypeVar, cast

from torch import Tensor

from tensorlens_tl._arguments import checked_arguments, checked_names, nearest
from tensorlens_tl.errors import InvalidInputError, RegistryError, UnsupportedModelError, warn_caller
from tensorlens_tl.layerwise import Maps
from tensorlens_tl.passes import Difference, FrozenPass, check_pass
from tensorlens_tl.requirements import Requirement, resolved
from tensorlens_tl.results import Attribution

ENTRY_POINTS = "tensorlens_tl.methods"

_METHODS: "dict[str, Method]" = {}

_LAYER_MAPS: "dict[str, LayerMap]" = {}

_LOADED: set[str] = set()

SYNONYMS = {
    "ig": "integrated-gradients",
    "gradient-x-input": "input-x-gradient",
    "ixg": "input-x-gradient",
    "occlusion": "leave-one-out",
    "loo": "leave-one-out",
    "lrp": "attnlrp",
    "attention-rollout": "rollout",
    "raw-attention": "attention",
    "information-flow-routes": "ifr",
    "transformer-attribution": "chefer",
    "vector-norms": "norm",
}
"""What the literature calls methods."""

MethodFunction = TypeVar("MethodFunction", bound=Callable[..., Attribution])

MapFunction = TypeVar("MapFunction", bound=Callable[..., Tensor])

ExplainsPrediction = bool | Callable[[Mapping[str, Any]], bool] | None
"""Whether a method explains a prediction: always or never, by its options, or as its signature says (None)."""

Runs = Callable[[FrozenPass, Mapping[str, Any]], int] | None
"""How many forward passes a method costs beyond the pass, by its options; None is a few at most."""

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
        explains_differences: whether it takes the difference of two passes as well.
        perturbs: whether it takes something away and runs the live model again.
        reads_maps: see `register_method`.
        runs: see `register_method`; `cost` reads it.
        same_numbers: see `register_method`; `equal_to` reads it.

    >>> tlens.get_method("alti")
    Method('alti', options: distance, query; needs: head_vectors, unwhitened)
    >>> tlens.get_method("cp-lrp").alias_of
    ('tensorlens', {'collapse': 'target'})
    """

    name: str
    function: Callable[..., Attribution]
    about_prediction: ExplainsPrediction = None
    needs: Needs | Callable[[Mapping[str, Any]], Needs] = ()
    alias_of: tuple[str, Mapping[str, Any]] | None = None
    explains_differences: bool = False
    perturbs: bool = False
    reads_maps: bool = True
    runs: Runs = None
    same_numbers: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", inspect.getdoc(self.function))  # help() of a method is its own

    def __repr__(self) -> str:
        options = ", ".join(self.options) or "none"
        needs = ", ".join(need.name for need in self.requirements()) or "none"
        return f"Method({self.name!r}, options: {options}; needs: {needs})"

    def requirements(self, options: Mapping[str, Any] | None = None) -> tuple[Requirement, ...]:
        """What it needs of a model, called with these options, in the order in which it is checked.

        >>> [need.name for need in tlens.get_method("rollout").requirements({"layer_map": "norm:attn"})]
        ['head_vectors', 'unwhitened']
        """
        needs = self.needs
        if callable(needs):
            needs = needs({**self.options, **(options or {})})
        return resolved(needs, f"method {self.name!r}")

    def refusal(self, frozen: FrozenPass | Difference, options: Mapping[str, Any] | None = None) -> str:
        """Why it refuses the model of this pass, called with these options; an empty text where it does not.

        >>> tlens.get_method("alti").refusal(frozen)
        ''
        """
        try:
            self.check(frozen, options)
        except UnsupportedModelError as error:
            return str(error)
        return ""

    def check(self, frozen: FrozenPass | Difference, options: Mapping[str, Any] | None = None) -> None:
        """Refuse a model that it cannot be called on with these options.

        Raises:
            UnsupportedModelError: the model does not meet one of its requirements; names the block.
        """
        for requirement in self.requirements(options):
            requirement.check(frozen, self.name)

    def cost(self, frozen: FrozenPass, options: Mapping[str, Any] | None = None) -> int:
        """How many forward passes of the model it costs with these options; 1 stands for a few.

        >>> tlens.get_method("leave-one-out").cost(frozen) == frozen.tokens.shape[1]
        True
        """
        if self.runs is None:
            return 1
        return self.runs(frozen, {**self.options, **(options or {})})

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
    def equal_to(self) -> str:
        """The method whose numbers it gives by default, in words; an empty text where it has numbers of its own.

        >>> tlens.get_method("cp-lrp").equal_to
        'tensorlens (collapse=target)'
        >>> tlens.get_method("alti").equal_to
        ''
        """
        if self.alias_of is None:
            return self.same_numbers
        name, fixed = self.alias_of
        options = ", ".join(f"{option}={value}" for option, value in fixed.items())
        return f"{name} ({options})"

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
        needs: see `register_method`; `one_stack` besides, unless it is for both stacks.
        both_stacks: whether it gives maps of encoder–decoders too.

    >>> attention = tlens.registry.get_layer_map("attention")
    >>> tuple(attention(frozen).shape), attention.requirements()[-1].name
    ((4, 1, 7, 7), 'patterns')
    """

    name: str
    function: Callable[..., Tensor]
    holds_residual: bool
    needs: Needs = ()
    both_stacks: bool = False

    def requirements(self) -> tuple[Requirement, ...]:
        """What it needs of a model, in the order in which it is checked."""
        needs = self.needs if self.both_stacks else ("one_stack", *self.needs)
        return resolved(needs, f"layer map {self.name!r}")

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


@checked_arguments
def register_method(
    name: Any,
    *,
    needs: Needs | Callable[[Mapping[str, Any]], Needs] | None = None,
    explains_prediction: ExplainsPrediction = None,
    explains_differences: bool = False,
    perturbs: bool = False,
    reads_maps: bool = True,
    runs: Annotated[Runs, "a function of a pass and the options, or None"] = None,
    same_numbers: str = "",
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
        explains_differences: whether it takes a `Difference` of two passes in place of a pass.
        perturbs: whether it takes something away and runs the live model again, as leave-one-out does. Reports show
            such methods together.
        reads_maps: whether its scores come from what the pass holds fixed. False is for a method that only runs or
            differentiates the live model: `attribute` of a model then proves the first block of each kind alone, unless
            `verify` says otherwise.
        runs: a function of the pass and the options, defaults included, that returns how many forward passes the
            method costs, where these are many. Reports leave out what costs too much. None is a few at most.
        same_numbers: of a method that by default gives the numbers of another one: of which, and when. Lists of methods
            say so.

    Returns:
        A decorator. It returns the function itself, or where `needs` are given one that checks them first.

    Raises:
        RegistryError: the name belongs to another function, or `needs` names no requirement.

    >>> from tensorlens_tl.passes.inputs import query_positions
    >>> @tlens.register_method("first-pattern", needs=("patterns",))
    ... def first_pattern(frozen, *, query=-1):
    ...     \"\"\"The first layer's attention, averaged over heads.\"\"\"
    ...     rows = query_positions(frozen.prompt, query)
    ...     scores = frozen.pattern(0).mean(1).take_along_dim(rows[..., None], dim=1)
    ...     return tlens.Attribution.of(frozen, scores, method="first-pattern", query=query)
    >>> round(float(first_pattern(frozen).scores.sum()), 4)
    1.0
    >>> report = tlens.testing.check_method("first-pattern")  # what every method promises, on tiny models
    """
    _check_name(name, "register_method('my-method')")
    if needs is not None and not callable(needs):
        needs = resolved(needs, f"register_method({name!r})")

    def decorate(function: MethodFunction) -> MethodFunction:
        if not callable(function):
            raise InvalidInputError(
                f"register_method({name!r}): it decorates a function of a frozen pass, got {type(function).__name__}."
            )
        _load_built_in(function)
        _check_free(_METHODS.get(name), function, f"register_method: {name!r}", name)
        method = Method(
            name,
            function,
            explains_prediction,
            needs or (),
            explains_differences=explains_differences,
            perturbs=perturbs,
            reads_maps=reads_maps,
            runs=runs,
            same_numbers=same_numbers,
        )
        if needs is not None:
            method = checking(method)
        _METHODS[name] = method
        return cast(MethodFunction, method.function)

    return decorate


def checking(method: Method) -> Method:
    """A method whose function checks what it needs before it is called."""

    @wraps(method.function)
    def checked(frozen: Any, *others: Any, **options: Any) -> Attribution:
        if not (method.explains_differences and isinstance(frozen, Difference)):
            check_pass(frozen)
        method.check(frozen, options)
        return method.function(frozen, *others, **options)  # ours refuse others, with their signature

    return replace(method, function=checked)


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

    def runs(frozen: FrozenPass, options: Mapping[str, Any]) -> int:
        return get_method(of).cost(frozen, {**options, **fixed})

    def decorate(declared: MethodFunction) -> MethodFunction:
        defaults = Method(name, declared).options

        @checked_names
        @wraps(declared)
        def alias(frozen: FrozenPass, **options: Any) -> Attribution:
            chosen = defaults | options
            return renamed(get_method(of).function(frozen, **fixed, **chosen), name, chosen)

        registered = register_method(
            name,
            needs=needs_of_original if needs is None else needs,
            explains_prediction=explains_prediction,
            runs=runs,
        )(alias)
        _METHODS[name] = replace(_METHODS[name], alias_of=(of, fixed))
        return cast(MethodFunction, registered)

    return decorate


def renamed(attribution: Attribution, method: str, options: Mapping[str, Any]) -> Attribution:
    """A result of one method as that of another, with its options as the first recorded them.

    `memory`, which changes no number, is left out.
    """
    recorded = {name: attribution.options.get(name, value) for name, value in options.items() if name != "memory"}
    return replace(attribution, method=method, options=recorded)


@checked_arguments
def register_layer_map(
    name: Any, *, holds_residual: bool, needs: Needs = (), both_stacks: bool = False
) -> Callable[[MapFunction], MapFunction]:
    """Register a function of a pass that gives one map of token pairs per layer, as a decorator.

    Args:
        name: what `mean` and `rollout` call it, ``layer_map=name``.
        holds_residual: whether the residual connection is in the maps already; a rollout adds it otherwise.
        needs: what it needs of a model, see `register_method`.
        both_stacks: whether it takes encoder–decoders, and gives maps of the encoder's tokens followed by the decoder's
            (`tensorlens_tl.layerwise.side_by_side` does); they are refused otherwise.

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
        _LAYER_MAPS[name] = LayerMap(name, function, holds_residual, needs, both_stacks)
        return function

    return decorate


def _check_name(name: Any, example: str) -> None:
    if not isinstance(name, str) or not name:
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


def _load_built_in(function: Callable[..., Any]) -> None:
    """Before somebody else's function takes a name: the built-in ones have theirs first."""
    if not is_ours(str(function.__module__)):
        _load_published(built_in=True)


def _load_published(built_in: bool = False) -> None:
    """Load what is published once; it may register itself, or is registered under its entry point's name."""
    points = sorted(entry_points(group=ENTRY_POINTS), key=lambda point: not is_ours(point.value))
    for point in points:
        ours = is_ours(point.value)
        if point.value in _LOADED or (built_in and not ours):
            continue
        try:
            _LOADED.add(point.value)
            loaded: Any = point.load()
            known = [entry.function for entry in (*_METHODS.values(), *_LAYER_MAPS.values())]
            if not ours and callable(loaded) and all(function is not loaded for function in known):
                register_method(point.name)(cast(Callable[..., Attribution], loaded))
        except Exception as error:
            if ours:  # a defect of our own is no warning
                _LOADED.discard(point.value)
                raise
            warn_caller(  # somebody else's package must not take ours down
                f"the published method {point.name!r} ({point.value}) cannot be loaded: {error!r}. Update or uninstall "
                "the package that publishes it; everything else works.",
            )
        except BaseException:  # an interrupt: the next call loads the rest
            _LOADED.discard(point.value)
            raise


def is_ours(value: str) -> bool:
    """Whether a module, or what an entry point names, is part of this package."""
    return value.partition(":")[0].partition(".")[0] == __name__.partition(".")[0]


def unknown_method(name: Any, known: Iterable[str]) -> str:
    """What to say about a name that is none of the known ones: the nearest, or all of them where none is near."""
    known = list(known)
    near = nearest(name, known, SYNONYMS)
    if near:
        return f"no method called {name!r}.{near}"
    return f"no method called {name!r}. There are {', '.join(map(repr, known))}."
