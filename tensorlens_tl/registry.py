"""The registry of attribution methods and layer maps: every method is called by name and returns an `Attribution`.

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
`[layer, batch, query, key]`. `mean` and `rollout` aggregate such maps, selected by name:

    >>> import torch
    >>> @tlens.register_layer_map("first-head", holds_residual=False)
    ... def first_head(frozen):
    ...     \"\"\"The pattern of each layer's first head, between real tokens.\"\"\"
    ...     real = frozen.mask[:, :, None] & frozen.mask[:, None]
    ...     return torch.stack([frozen.pattern(layer)[:, 0] * real for layer in range(frozen.n_layers)])
    >>> frozen = tlens.freeze(tlens.load_demo_model(), "Return the value of the")
    >>> tlens.attribute(frozen, method="rollout", layer_map="first-head", query=-1)
    Attribution('rollout', batch=1, query=1, key=6)

A registration lists a method's requirements on the model by name (`tensorlens_tl.requirements.REQUIREMENTS`), as in
``@register_method("mine", needs=("head_vectors", "unwhitened"))``. Models that do not meet them are rejected up front.

Packages publish methods and layer maps through the entry-point group ``tensorlens_tl.methods``: either a function, or a
module that registers them on import. The built-in methods are published in the same way.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from importlib.metadata import entry_points
from typing import Annotated, Any, TypeVar, cast

import torch
from torch import Tensor

from tensorlens_tl._arguments import check_choice, checked_arguments, checked_names, current_names, nearest, plain
from tensorlens_tl._method_names import ENTRY_POINTS, is_ours, unknown_method
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import relative_gap
from tensorlens_tl.core import RULES, Rule, rule_of
from tensorlens_tl.errors import InvalidInputError, PromptNumber, RegistryError, UnsupportedModelError, warn_caller
from tensorlens_tl.layerwise import Maps
from tensorlens_tl.models import FROZEN_RULES, NEXT, OLD_RULES, ONCE_ACTIVATION, FrozenRule, ModelLike, Query, TokenLike
from tensorlens_tl.passes import Difference, FrozenPass, check_pass, freeze, one_check, rule_scores, unchecked_view
from tensorlens_tl.passes.inputs import InputLike, check_slice, one_per_prompt, prompt_batches, query_positions, taken
from tensorlens_tl.passes.target import RANKED, explained_tokens, logit_label, target_ids, token_label
from tensorlens_tl.requirements import Requirement, resolved
from tensorlens_tl.results import MEAN_QUERY, TOKENS_OF_QUERIES, Attribution, joined, one_query

__all__ = [
    "LayerMap",
    "Method",
    "attribute",
    "get_layer_map",
    "get_method",
    "list_layer_maps",
    "list_methods",
    "list_rules",
    "register_alias",
    "register_layer_map",
    "register_method",
    "register_rule",
]

_METHODS: "dict[str, Method]" = {}

_LAYER_MAPS: "dict[str, LayerMap]" = {}

_LOADED: set[str] = set()

MethodFunction = TypeVar("MethodFunction", bound=Callable[..., Attribution])

MapFunction = TypeVar("MapFunction", bound=Callable[..., Tensor])

ExplainsPrediction = bool | Callable[[Mapping[str, Any]], bool] | None
"""Whether a method explains a prediction: always, never, depending on its options, or as its signature says (None)."""

Runs = Callable[[FrozenPass, Mapping[str, Any]], int] | None
"""The number of extra forward passes a method costs, given its options; None means a few at most."""

Needs = Annotated[Iterable[str | Requirement], "names of requirements, or requirements"]
"""Names of `tensorlens_tl.requirements.REQUIREMENTS`, or requirements of the registration's own."""


@dataclass(frozen=True, repr=False)
class Method:
    """A registered method: its function, options with defaults, requirements, and what it explains.

    Attributes:
        name: the name used by `attribute`, evaluations and the command line.
        function: the registered function, called with a frozen pass and options.
        about_prediction: see `register_method`.
        needs: see `register_method`.
        alias_of: for an alias, the original method and the options that are fixed.
        explains_differences: whether it also accepts the difference of two passes.
        perturbs: whether it removes something and runs the live model again.
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
        object.__setattr__(self, "__doc__", inspect.getdoc(self.function))  # so that help() shows the function's text

    def __repr__(self) -> str:
        options = ", ".join(self.options) or "none"
        needs = ", ".join(need.name for need in self.requirements()) or "none"
        return f"Method({self.name!r}, options: {options}; needs: {needs})"

    def requirements(self, options: Mapping[str, Any] | None = None) -> tuple[Requirement, ...]:
        """Return its requirements on a model when called with these options, in the order in which they are checked.

        >>> [need.name for need in tlens.get_method("rollout").requirements({"layer_map": "norm:attn"})]
        ['head_vectors', 'unwhitened']
        """
        needs = self.needs
        if callable(needs):
            needs = needs({**self.options, **(options or {})})
        return resolved(needs, f"method {self.name!r}")

    def refusal(self, frozen: FrozenPass | Difference, options: Mapping[str, Any] | None = None) -> str:
        """Return why it cannot be applied to this pass with these options; empty if it can.

        >>> tlens.get_method("alti").refusal(frozen)
        ''
        """
        try:
            self.check(frozen, options)
        except UnsupportedModelError as error:
            return str(error)
        return ""

    def check(self, frozen: FrozenPass | Difference, options: Mapping[str, Any] | None = None) -> None:
        """Raise unless the model meets the method's requirements for these options.

        Raises:
            UnsupportedModelError: a requirement is not met; names the block.
        """
        for requirement in self.requirements(options):
            requirement.check(frozen, self.name)

    def cost(self, frozen: FrozenPass, options: Mapping[str, Any] | None = None) -> int:
        """Return the number of forward passes it costs with these options; 1 stands for a few.

        >>> tlens.get_method("leave-one-out").cost(frozen) == frozen.tokens.shape[1]
        True
        """
        if self.runs is None:
            return 1
        return self.runs(frozen, {**self.options, **(options or {})})

    @property
    def options(self) -> dict[str, Any]:
        """Its keyword options with their default values."""
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        return {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}

    @property
    def takes_any_option(self) -> bool:
        """Whether it accepts arbitrary options (``**options``)."""
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.function).parameters.values())

    def takes(self, option: str) -> bool:
        """Return whether it accepts an option of this name."""
        return option in self.options or self.takes_any_option

    def explains_prediction(self, options: Mapping[str, Any] | None = None) -> bool:
        """Return whether it explains a predicted token with these options, and so needs a `target`.

        Decided by its registration, or else by its signature: a method that accepts a `target` explains it, unless
        a `direction` is given instead.
        """
        options = options or {}
        if callable(self.about_prediction):
            return self.about_prediction(options)
        if self.about_prediction is not None:
            return self.about_prediction
        return self.takes("target") and options.get("direction") is None

    @property
    def equal_to(self) -> str:
        """The method whose numbers it reproduces by default, in words; empty if its numbers are its own.

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
    """A registered layer map: its function, and whether its maps already include the residual connection.

    Attributes:
        name: the name used by `mean` and `rollout`.
        function: the registered function, called with a frozen pass.
        holds_residual: whether the maps already include the residual connection.
        needs: see `register_method`; `one_stack` is added unless `both_stacks`.
        both_stacks: whether it also supports encoder–decoders.

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
        """Return its requirements on a model, in the order in which they are checked."""
        needs = self.needs if self.both_stacks else ("one_stack", *self.needs)
        return resolved(needs, f"layer map {self.name!r}")

    def __call__(self, frozen: FrozenPass) -> Maps:
        """Return the maps of every layer, `[layer, batch, query, key]`.

        Raises:
            UnsupportedModelError: the map is undefined for this model.
            RegistryError: the function returns another shape.
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
    """Register a function as an attribution method; use as a decorator.

    The same function (by module and qualified name) may be registered again, as when a notebook cell is rerun.

    Args:
        name: the name used by `attribute`, evaluations and the command line.
        needs: requirements on the model: names of `tensorlens_tl.requirements.REQUIREMENTS`, or requirements of your
            own, checked before the function is called. If they depend on the options, pass a function of the options
            (defaults included) that returns them. None means no requirements.
        explains_prediction: whether it explains a predicted token. Evaluations, reports and the command line pass the
            model's own prediction as `target` to such a method, unless one is given. None decides by the signature: a
            method with an option `target`, or with ``**options``, explains it. Pass a function of the options if the
            method explains a prediction with some of them only.
        explains_differences: whether it accepts a `Difference` of two passes in place of a pass.
        perturbs: whether it removes something and runs the live model again, as leave-one-out does. Reports group
            such methods.
        reads_maps: whether its scores come from the frozen maps. Pass False for a method that only runs or
            differentiates the live model: when called on a model, `attribute` then verifies only the first block of
            each kind, unless `verify` says otherwise.
        runs: for an expensive method, a function of the pass and the options (defaults included) that returns the
            number of forward passes it costs, so that reports can leave it out. None means a few at most.
        same_numbers: if the method by default reproduces another one's numbers: which one, and when. Shown in lists of
            methods.

    Returns:
        A decorator that returns the function itself, or, with `needs`, a version that checks them first.

    Raises:
        RegistryError: the name belongs to another function, or `needs` contains an unknown requirement.

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
    """Return a copy of the method whose function checks the requirements before it runs."""

    @wraps(method.function)
    def checked(frozen: Any, *others: Any, **options: Any) -> Attribution:
        if not (method.explains_differences and isinstance(frozen, Difference)):
            check_pass(frozen)
        method.check(frozen, options)
        return method.function(frozen, *others, **options)  # built-in functions reject `others` themselves

    return replace(method, function=checked)


@checked_arguments
def register_alias(
    name: str,
    *,
    of: str,
    needs: Needs | None = None,
    **fixed: Any,
) -> Callable[[MethodFunction], MethodFunction]:
    """Register a name for another method with some options fixed; use as a decorator.

    Args:
        name: the name used by `attribute`, evaluations and the command line.
        of: the original method.
        needs: see `register_method`; None takes the original's requirements with the fixed options.
        fixed: the options of the original that are fixed.

    Returns:
        A decorator for a function that declares the remaining options and documents the alias; its body is never run.
        The decorated function calls the original and labels the result with the new name and the declared options.

    Raises:
        RegistryError: the name belongs to another function, or `needs` contains an unknown requirement.

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
    """Relabel a result with another method name and these options, in the form in which the original recorded them.

    `memory` is dropped, as it does not affect the numbers.
    """
    recorded = {name: attribution.options.get(name, value) for name, value in options.items() if name != "memory"}
    return replace(attribution, method=method, options=recorded)


@checked_arguments
def register_layer_map(
    name: Any, *, holds_residual: bool, needs: Needs = (), both_stacks: bool = False
) -> Callable[[MapFunction], MapFunction]:
    """Register a function of a pass that returns one map of token pairs per layer; use as a decorator.

    Args:
        name: the name used by `mean` and `rollout`, ``layer_map=name``.
        holds_residual: whether the maps already include the residual connection; if not, a rollout adds it.
        needs: requirements on the model, see `register_method`.
        both_stacks: whether it supports encoder–decoders, returning maps of the encoder's tokens followed by the
            decoder's (as `tensorlens_tl.layerwise.side_by_side` does). Without it, they are rejected.

    Returns:
        A decorator that returns the function.

    Raises:
        RegistryError: the name belongs to another function, or `needs` contains an unknown requirement.

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
    # a function defined by exec has no module
    return str(function.__module__), getattr(function, "__qualname__", repr(function))


def list_methods(frozen: FrozenPass | None = None) -> list[str]:
    """List the methods that `attribute` knows: built in, registered in this session, or published by packages.

    Args:
        frozen: list only methods whose requirements this pass's model meets (with default options).

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
    """Return a registered method by name.

    Args:
        name: one of `list_methods()`.

    Returns:
        The method: its function, options and requirements.

    Raises:
        RegistryError: unknown name; suggests the nearest.

    >>> tlens.get_method("globenc").summary
    'The product over layers of norms through attention, residual and both norms (Modarressi 2022).'
    """
    if name not in list(_METHODS):
        _load_published()
    if name not in list(_METHODS):
        raise RegistryError(unknown_method(name, list_methods()))
    return _METHODS[name]


def list_layer_maps() -> list[str]:
    """List the layer maps that ``layer_map=`` of `mean` and `rollout` accepts.

    >>> "norm:attn_res" in tlens.list_layer_maps()
    True
    """
    _load_published()
    return list(_LAYER_MAPS)


def get_layer_map(name: str) -> LayerMap:
    """Return a registered layer map by name.

    Args:
        name: one of `list_layer_maps()`.

    Raises:
        InvalidInputError: unknown name.

    >>> tlens.registry.get_layer_map("globenc").holds_residual
    True
    """
    if name not in list(_LAYER_MAPS):
        _load_published()
    if name not in list(_LAYER_MAPS):
        raise InvalidInputError(f"layer_map={name!r}; use one of {', '.join(map(repr, _LAYER_MAPS))}.")
    return _LAYER_MAPS[name]


def _load_built_in(function: Callable[..., Any]) -> None:
    """Load the built-in methods before a foreign function registers, so that it cannot take one of their names."""
    if not is_ours(str(function.__module__)):
        _load_published(built_in=True)


def _load_published(built_in: bool = False) -> None:
    """Load every published entry point once: it registers itself, or is registered under the entry point's name."""
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
            if ours:  # a bug of our own must not be reduced to a warning
                _LOADED.discard(point.value)
                raise
            warn_caller(  # a broken third-party package must not break the library
                f"the published method {point.name!r} ({point.value}) cannot be loaded: {error!r}. Update or uninstall "
                "the package that publishes it; everything else works.",
            )
        except BaseException:  # interrupted: the next call loads the rest
            _LOADED.discard(point.value)
            raise


PER_PROMPT = ("target", "minus", "direction")
"""Options that choose the explained number; each may hold one value per prompt."""

PROBABILITIES = (
    " A probability is no sum over tokens. With minus= scores sum to a difference of two logits, which is that of "
    "the two tokens' log-probabilities; method='leave-one-out' measures how a probability changes "
    "(of='log_probability')."
)

MEAN = "mean"
"""As `query=`: the mean over all queries of a prompt. The token "mean" of a prompt is ``" mean"``, with its space."""

DEFAULT = "tensorlens"
DEFAULT_OF_DIFFERENCES = "difference"
"""The default method of `attribute` for a `Difference`."""

_BUILT_IN = frozenset(RULES) | frozenset(FROZEN_RULES)


@checked_names
def attribute(
    model: ModelLike | FrozenPass | Difference,
    input: InputLike | None = None,
    target: TokenLike = None,
    *,
    method: str | None = None,
    rule: Rule | str | None = None,
    memory: Memory = None,
    **options: Any,
) -> Attribution:
    """Run any registered attribution method: ``attribute(model, text, " Paris")`` or ``attribute(frozen, " Paris")``.

    Prompts run in batches of similar length, as many at once as `memory` allows, and are returned as one result in the
    original order.

    Args:
        model: a TransformerLens model; or a `FrozenPass` or the `Difference` of two, which already include the input:
            the target may then come next.
        input: text, the messages of a chat or token ids, one prompt or several; images or sound if the model reads
            those (see `freeze`).
        target: for methods that take one: a token, one per prompt, or `NEXT`; see `FrozenOperator.target`. By default,
            the model's top prediction against the runner-up; for a `Difference`, the first run's prediction against
            the second's.
        method: one of `list_methods()`; None is ``"tensorlens"``, or ``"difference"`` for a `Difference`.
        rule: how nonlinear operations are replaced: one of `list_rules()`, or your own `Rule`. Rules of the frozen
            model are options of a method that reads weights, by default ``"tensorlens"``; any other rule is applied to
            gradients and takes the place of a method.
        memory: how much may be allocated at once besides the result, as ``"512MB"`` or bytes; None is 256 MiB. Limits
            the batch size and the method's own chunks, if any.
        options: the method's options (see ``help(tlens.get_method(name).function)``; the default method takes
            `collapse`, `query`, `minus`, `direction`, `layers`, `heads`, `mlp`, `rule`, `probes`). Options of `freeze`
            (`attention_mask`, `prepend_bos`, `verify` …) are passed on to it. ``query="mean"`` explains the mean
            over all queries (with `NEXT` as the target, all queries that a token follows), at the cost of
            ``query="all"``; its total is the mean of the model's own numbers.

    Returns:
        The scores, `[batch, query, key]` unless the method says otherwise, with tokens, positions and provenance.

    Raises:
        RegistryError: unknown method.
        InvalidInputError: an option that neither the method nor `freeze` has, or a method that cannot explain a
            difference; see also `freeze`.
        UnsupportedModelError: the model does not meet a requirement of the method; see also `freeze`.
        FrozenModelError: the model's weights changed after it was frozen.

    Every built-in method is also a function of a frozen pass, with its options in the signature for editors and `help`:

    >>> attribution = tlens.attribute(model, text, method="alti", distance="l2")
    >>> torch.equal(attribution.scores, tlens.methods.alti(frozen, distance="l2").scores)
    True
    """
    chosen, of_rule = _chosen(model, method, rule)
    options |= of_rule
    in_bytes(memory)
    if memory is not None and "memory" in chosen.options:
        options = {**options, "memory": memory}
    if isinstance(model, FrozenPass | Difference) and input is not None:
        if target is not None:
            raise InvalidInputError(
                "attribute: a frozen pass has its input already, so what follows it is the target: "
                "attribute(frozen, ' Paris')."
            )
        target = cast("TokenLike", input)
    if target is not None:
        options = {**options, "target": target}
    for_freeze, for_method = split_options(chosen, options)
    if isinstance(model, FrozenPass | Difference):
        if for_freeze:
            raise InvalidInputError(
                f"attribute: a frozen pass has its input already; leave {', '.join(for_freeze)} out, or pass it to "
                "freeze."
            )
        return _run_for_queries(chosen, model, for_method)
    if input is None:
        raise InvalidInputError("attribute: `input` is missing; pass text, the messages of a chat, or token ids.")
    rows, batches = prompt_batches(unchecked_view(model), input, for_freeze, memory)
    if len(batches) < 2:
        return _freeze_and_run(chosen, model, input, for_freeze, for_method)
    for_freeze.pop("prepend_bos", None)  # the rows are token ids now
    split = {name: one_per_prompt(name, for_method[name], len(rows)) for name in PER_PROMPT if name in for_method}
    check_slice(for_method.get("query"), [len(row) for row in rows])
    parts = []
    for batch in batches:
        of_batch = {name: taken(values, batch) for name, values in split.items() if values is not None}
        try:
            prompts = [rows[i] for i in batch]
            parts.append(_freeze_and_run(chosen, model, prompts, for_freeze, for_method | of_batch))
        except InvalidInputError as error:
            raise error.with_prompts(dict(enumerate(map(PromptNumber, batch)))) from error
    explained = {name: for_method[name] for name in PER_PROMPT if for_method.get(name) is not None}
    return joined(parts, batches, explained)


def split_options(method: Method, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into those of `freeze` and those of the method.

    Raises:
        InvalidInputError: neither knows an option; suggests the nearest.
    """
    freezing = {k: v for k, v in inspect.signature(freeze).parameters.items() if v.kind is v.KEYWORD_ONLY}
    del freezing["query"]  # belongs to the method; `attribute` passes it on to `freeze`
    if "rule" in method.options and "activation" not in method.options:
        options = current_names(method.name, options, ONCE_ACTIVATION)
    for_freeze = {name: value for name, value in options.items() if name in freezing and name not in method.options}
    for_method = {name: value for name, value in options.items() if name not in for_freeze}
    unknown = [name for name in for_method if not method.takes(name)]
    if unknown:
        hint = nearest(unknown[0], method.options)
        if unknown[0] in PER_PROMPT:
            others = [name for name in list_methods() if unknown[0] in get_method(name).options]
            hint = f" Its scores do not explain one number of the model. These do: {', '.join(map(repr, others))}."
        elif unknown[0] == "of" or "probab" in unknown[0]:
            hint = PROBABILITIES
        raise InvalidInputError(
            f"attribute: method {method.name!r} has no option {unknown[0]!r}.{hint} It "
            f"takes {', '.join(method.options) or 'none'}; freezing takes {', '.join(freezing)}."
        )
    return for_freeze, for_method


def _chosen(
    model: ModelLike | FrozenPass | Difference, name: str | None, rule: Rule | str | None
) -> tuple[Method, dict[str, Any]]:
    """Resolve the method from its name, a rule or the default; also return the rule if the method takes it."""
    if rule is not None:
        if isinstance(model, Difference):
            raise InvalidInputError("attribute: a rule explains one run; pass one of its passes, or leave rule out.")
        if name is None and is_of_run(rule):
            return method_of_rule(rule), {}
        chosen = get_method(DEFAULT if name is None else name)
        if "rule" not in chosen.options:
            raise InvalidInputError(f"attribute: method={name!r} and rule={rule!r} exclude each other; leave one out.")
        return chosen, {"rule": rule}
    if not isinstance(model, Difference):
        return get_method(DEFAULT if name is None else name), {}
    chosen = get_method(DEFAULT_OF_DIFFERENCES if name is None else name)
    if not chosen.explains_differences:
        of_two = [repr(known) for known in list_methods() if get_method(known).explains_differences]
        raise InvalidInputError(
            f"method={name!r} explains one run. For two runs use {', '.join(of_two)}, or pass one of the two runs."
        )
    return chosen, {}


def _logit_positions(method: Method, options: Mapping[str, Any]) -> Query | None:
    """Return the positions whose logits the method reads, to be verified while the model is frozen."""
    query = options.get("query")
    if not method.explains_prediction(options) or options.get("direction") is not None:
        return None
    if options.get("target") is None and not isinstance(query, int):
        return None  # with several queries, some may predict nothing
    if isinstance(query, str) and query == MEAN:
        return None
    return query


def _freeze_and_run(
    method: Method, model: ModelLike, input: Any, for_freeze: Mapping[str, Any], options: Mapping[str, Any]
) -> Attribution:
    """Freeze the model for a method, verify what the method reads of the pass, and run it."""
    proof: dict[str, Any] = {"verify": method.reads_maps, **for_freeze}
    with one_check(model):
        frozen = freeze(model, input, **proof, query=_logit_positions(method, options))
        return _run_for_queries(method, frozen, options)


def _run_for_queries(method: Method, frozen: FrozenPass | Difference, options: Mapping[str, Any]) -> Attribution:
    """Run a method for each query, or for their mean."""
    query = options.get("query")
    if not isinstance(query, str) or query != MEAN:
        return _run_checked(method, frozen, options)
    frozen.view.refuse_encoder_decoder("query='mean'")
    every = _with_prediction(frozen, options.get("target"))
    result = one_query(_run_checked(method, frozen, {**options, "query": every}), mean=True)
    what = " of the ".join([MEAN_QUERY, *filter(None, [result.target])])
    return replace(result, target=what, options=result.options | {"query": MEAN})


def _with_prediction(frozen: FrozenPass | Difference, target: TokenLike) -> Query:
    """Return all queries, or for `NEXT` those that a token follows; padded where a prompt has fewer."""
    if target is not NEXT:
        return "all"
    rows = [row.nonzero()[:-1, 0] for row in frozen.mask]
    most = max(map(len, rows))
    if any(len(row) == 0 for row in rows):
        raise InvalidInputError(
            "query='mean': a prompt of one token has no query for target=NEXT, since no token follows; name a token."
        )
    padding = (~frozen.mask).long().argmax(1)
    filled = [torch.cat([row, at.expand(most - len(row))]) for row, at in zip(rows, padding, strict=True)]
    return torch.stack(filled)


def _run_checked(method: Method, frozen: FrozenPass | Difference, options: Mapping[str, Any]) -> Attribution:
    """Run the method under the model's lock, so that no other thread can swap the weights meanwhile."""
    with one_check(frozen.view.model):
        frozen.check_fresh()
        result: Any = method.function(frozen, **options)
        if not isinstance(result, Attribution):
            raise RegistryError(
                f"method {method.name!r} returned {type(result).__name__}, not an Attribution; wrap its scores with "
                "tlens.Attribution.of(frozen, scores, method=..., query=...)."
            )
        if result.additive and not is_ours(str(method.function.__module__)):
            result = _with_measured_gap(frozen, result, options)
        return _with_tokens_of_queries(frozen, result, options)


def _with_measured_gap(frozen: FrozenPass | Difference, result: Attribution, options: Mapping[str, Any]) -> Attribution:
    """Measure the gap of a third-party method's sum, ignoring the one it reports.

    If the method was given a target, the total is the model's own logit, read here.
    """
    if result.bias is None:
        return result
    total = result.total
    if options.get("target") is not None and options.get("direction") is None:
        named = {name: options[name] for name in ("target", "minus") if name in options}
        total = frozen.operator().totals(**named, query=result.queries)
    if total is None:
        return result
    return frozen.checked(replace(result, total=total, gap=relative_gap(result.scores, result.bias, total)))


def _with_tokens_of_queries(
    frozen: FrozenPass | Difference, result: Attribution, options: Mapping[str, Any]
) -> Attribution:
    """Add the explained tokens of each prompt and query to the options, if they are given as a list or by rank."""
    target, minus = (plain(result.options.get(name, options.get(name))) for name in ("target", "minus"))
    if target is None or not any(isinstance(token, list | tuple) or token in RANKED for token in (target, minus)):
        return result
    ids = [each for each in target_ids(frozen, result.queries, target, minus) if each is not None]
    texts = [
        [[token_label(frozen.view, token) for token in query] for query in prompt]
        for prompt in torch.stack(ids, dim=-1).tolist()
    ]
    return replace(result, options={**result.options, TOKENS_OF_QUERIES: texts})


# ------------------------------------------------------------------ rules of gradients


def by_rule(
    frozen: FrozenPass,
    method: str,
    rule: Rule,
    target: TokenLike,
    minus: TokenLike,
    query: Query,
    memory: Memory,
) -> Attribution:
    """Compute a rule's scores (see `rule_scores`) as an attribution; additive if the rule is affine."""
    target, minus = explained_tokens(frozen, target, minus, query_positions(frozen.prompt, query))
    result = rule_scores(frozen, rule, target, minus, query=query, memory=memory)
    return Attribution.of(
        frozen,
        result.scores,
        method=method,
        query=query,
        bias=result.bias,
        total=result.total,
        gap=None if rule.affine else result.gap,
        additive=rule.affine,
        target=logit_label(frozen.view, target, minus),
        options={"target": target, "minus": minus, "query": query},
    )


def method_of(rule: Rule, name: str) -> Method:
    """Wrap a rule as a method, without registering it."""

    def of_rule(
        frozen: FrozenPass,
        *,
        target: TokenLike = None,
        minus: TokenLike = None,
        query: Query = -1,
        memory: Memory = None,
    ) -> Attribution:
        """x_j · ∂logit/∂x_j under a rule; `gap` is how far scores (and an affine rule's bias) are from the logit."""
        return by_rule(frozen, name, rule, target, minus, query, memory)

    of_rule.__module__, of_rule.__qualname__ = "rules", name
    return Method(name, of_rule, needs=("predictions", *rule.needs), reads_maps=False)


def method_of_rule(rule: Any) -> Method:
    """Return the method that `attribute` runs for ``rule=``."""
    chosen = rule_of(rule)
    names = [name for name, known in RULES.items() if known is chosen]
    return checking(method_of(chosen, f"rule={names[0] if names else 'own'}"))


@checked_arguments
def register_rule(name: str, rule: Rule) -> Rule:
    """Register a rule under a name: for every function that takes ``rule=``, and as a method of `attribute`.

    Args:
        name: the name used by functions, evaluations and the command line. You may register your own name again.
        rule: the replacement for each kind of operation.

    Returns:
        The rule.

    Raises:
        RegistryError: the name belongs to a built-in rule or to a method.

    >>> from tensorlens_tl.core import held, shared
    >>> mlps = tlens.register_rule("no-mixing", tlens.Rule(softmax=held, multiply=shared))
    >>> torch.equal(
    ...     tlens.attribute(frozen, " value", method="no-mixing").scores,
    ...     tlens.attribute(frozen, " value", rule=mlps).scores,
    ... )
    True
    """
    if name in _BUILT_IN:
        raise RegistryError(f"register_rule: {name!r} is a built-in rule; choose another name, such as 'my-{name}'.")
    method = method_of(rule, name)
    register_method(name, needs=method.needs, reads_maps=False)(method.function)
    RULES[name] = rule
    return rule


def is_of_run(rule: Any) -> bool:
    """Whether a rule applies to the gradients of a run, rather than to the frozen model's weights.

    Raises:
        InvalidInputError: unknown name.
    """
    if isinstance(rule, str) and rule != "secant":
        check_choice("rule", rule, list_rules(), OLD_RULES)
    return rule is not None and rule not in FROZEN_RULES


def frozen_rule(rule: Any) -> FrozenRule:
    """Return the frozen-model rule that is requested, or the one used with a rule of gradients.

    Raises:
        InvalidInputError: unknown name.
    """
    if rule is None or is_of_run(rule):
        return "frozen"
    return next(known for known in FROZEN_RULES if known == rule)


def list_rules() -> list[str]:
    """List the names that ``rule=`` accepts.

    >>> tlens.list_rules()
    ['attnlrp', 'frozen', 'frozen-integrated-gradients', 'frozen-split', 'frozen-tangent', 'gim', 'relp', 'tangent']
    """
    return sorted({*RULES, *FROZEN_RULES})
