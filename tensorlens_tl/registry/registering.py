"""Registering methods and layer maps, and finding them by their names."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from importlib.metadata import entry_points
from typing import Annotated, Any, cast

from tensorlens_tl._arguments import checked_arguments, checked_names
from tensorlens_tl.errors import InvalidInputError, RegistryError, warn_caller
from tensorlens_tl.passes import Difference, FrozenPass, check_pass
from tensorlens_tl.registry.entries import (
    ExplainsPrediction,
    LayerMap,
    MapFunction,
    Method,
    MethodFunction,
    Needs,
    Runs,
)
from tensorlens_tl.registry.names import unknown_method
from tensorlens_tl.requirements import resolved
from tensorlens_tl.results import Attribution

ENTRY_POINTS = "tensorlens_tl.methods"

_METHODS: dict[str, Method] = {}

_LAYER_MAPS: dict[str, LayerMap] = {}

_LOADED: set[str] = set()


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
