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


PER_PROMPT = ("target", "minus", "direction")
"""Options that say which number is explained; they may name one thing for each prompt."""

PROBABILITIES = (
    " A probability is no sum over tokens. With minus= scores sum to a difference of two logits, which is that of "
    "the two tokens' log-probabilities; method='leave-one-out' measures how a probability changes "
    "(of='log_probability')."
)

MEAN = "mean"
"""As `query=`: the mean over every query of a prompt. The word of a prompt is ``" mean"``, with its space."""

DEFAULT = "tensorlens"
DEFAULT_OF_DIFFERENCES = "difference"
"""What `attribute` answers with where no method is named."""

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
    """Attribute with any registered method: ``attribute(model, text, " Paris")`` or ``attribute(frozen, " Paris")``.

    Many prompts run in batches of similar length, as many at once as `memory` allows, and are returned as one result in
    the order given.

    Args:
        model: a TransformerLens model; or a `FrozenPass` or the `Difference` of two, which have their input already, so
            that the target may come next.
        input: text, the messages of a chat or token ids, one prompt or several; images or sound if the model reads
            those (see `freeze`).
        target: for methods that take one: a token, one for each prompt, or `NEXT`; see `FrozenOperator.target`. By
            default the model's first choice against its runner-up; for a `Difference`, the first run's prediction
            against the second's.
        method: one of `list_methods()`; None is ``"tensorlens"``, or ``"difference"`` for a `Difference`.
        rule: what replaces the nonlinear operations: one of `list_rules()`, or your own `Rule`. Rules of the frozen
            model are options of a method that reads weights, by default ``"tensorlens"``; any other rule is
            followed by gradients and takes the place of a method.
        memory: how much may be allocated at once besides the result, as ``"512MB"`` or bytes; None is 256 MiB. It
            limits the batches, and the method's own chunks if it has any.
        options: the method's options (``help(tlens.get_method(name).function)`` describes them; the default method
            takes `collapse`, `query`, `minus`, `direction`, `layers`, `heads`, `mlp`, `rule`, `probes`); options of
            `freeze` (`attention_mask`, `prepend_bos`, `verify` …) are passed to it. ``query="mean"`` explains the mean
            over every query (with `NEXT` as the target, every query that a token follows), for the work of
            ``query="all"``; its total is the mean of the model's own numbers.

    Returns:
        The scores, `[batch, query, key]` unless the method says otherwise, with tokens, positions and provenance.

    Raises:
        RegistryError: unknown method.
        InvalidInputError: an option that neither the method nor `freeze` has; a method of one run for a difference;
            see also `freeze`.
        UnsupportedModelError: the model lacks something that the method needs; see also `freeze`.
        FrozenModelError: the model's weights changed after it was frozen.

    Every built-in method is a function of a frozen pass, too, with its options in its signature, for editors to
    complete and `help` to show:

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
        return _answered(chosen, model, for_method)
    if input is None:
        raise InvalidInputError("attribute: `input` is missing; pass text, messages of a chat or token ids.")
    rows, batches = prompt_batches(unchecked_view(model), input, for_freeze, memory)
    if len(batches) < 2:
        return _frozen_and_answered(chosen, model, input, for_freeze, for_method)
    for_freeze.pop("prepend_bos", None)  # the rows are token ids now
    split = {name: one_per_prompt(name, for_method[name], len(rows)) for name in PER_PROMPT if name in for_method}
    check_slice(for_method.get("query"), [len(row) for row in rows])
    parts = []
    for batch in batches:
        of_batch = {name: taken(values, batch) for name, values in split.items() if values is not None}
        try:
            prompts = [rows[i] for i in batch]
            parts.append(_frozen_and_answered(chosen, model, prompts, for_freeze, for_method | of_batch))
        except InvalidInputError as error:
            raise error.with_prompts(dict(enumerate(map(PromptNumber, batch)))) from error
    explained = {name: for_method[name] for name in PER_PROMPT if for_method.get(name) is not None}
    return joined(parts, batches, explained)


def split_options(method: Method, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of `freeze`, and those of the method.

    Raises:
        InvalidInputError: one that neither knows; suggests the nearest.
    """
    freezing = {k: v for k, v in inspect.signature(freeze).parameters.items() if v.kind is v.KEYWORD_ONLY}
    del freezing["query"]  # of a method; `attribute` tells `freeze` of it
    if "rule" in method.options and "activation" not in method.options:
        options = current_names(method.name, options, ONCE_ACTIVATION)
    for_freeze = {name: value for name, value in options.items() if name in freezing and name not in method.options}
    for_method = {name: value for name, value in options.items() if name not in for_freeze}
    unknown = [name for name in for_method if not method.takes(name)]
    if unknown:
        hint = nearest(unknown[0], method.options)
        if unknown[0] in PER_PROMPT:
            others = [name for name in list_methods() if unknown[0] in get_method(name).options]
            hint = f" What it scores is not one number of the model. These take one: {', '.join(map(repr, others))}."
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
    """The method of a name or a rule, or the default; and the rule, where it is an option of the method."""
    if rule is not None:
        if isinstance(model, Difference):
            raise InvalidInputError("attribute: a rule explains one run; pass one of its passes, or leave rule out.")
        if name is None and is_of_run(rule):
            return method_of_rule(rule), {}
        chosen = get_method(DEFAULT if name is None else name)
        if "rule" not in chosen.options:
            raise InvalidInputError(f"attribute: method={name!r} and rule={rule!r} are two answers; leave one out.")
        return chosen, {"rule": rule}
    if not isinstance(model, Difference):
        return get_method(DEFAULT if name is None else name), {}
    chosen = get_method(DEFAULT_OF_DIFFERENCES if name is None else name)
    if not chosen.explains_differences:
        of_two = [repr(known) for known in list_methods() if get_method(known).explains_differences]
        raise InvalidInputError(
            f"method={name!r} explains one run. For two runs use {', '.join(of_two)}, or leave `method` out."
        )
    return chosen, {}


def _logit_positions(method: Method, options: Mapping[str, Any]) -> Query | None:
    """The positions whose logits a method reads, to be compared while the model is frozen."""
    query = options.get("query")
    if not method.explains_prediction(options) or options.get("direction") is not None:
        return None
    if options.get("target") is None and not isinstance(query, int):
        return None  # several queries need not all predict something
    if isinstance(query, str) and query == MEAN:
        return None
    return query


def _frozen_and_answered(
    method: Method, model: ModelLike, input: Any, for_freeze: Mapping[str, Any], options: Mapping[str, Any]
) -> Attribution:
    """A method's answer on a pass that is frozen for it; what it reads of the pass is proved."""
    proof: dict[str, Any] = {"verify": method.reads_maps, **for_freeze}
    with one_check(model):
        frozen = freeze(model, input, **proof, query=_logit_positions(method, options))
        return _answered(method, frozen, options)


def _answered(method: Method, frozen: FrozenPass | Difference, options: Mapping[str, Any]) -> Attribution:
    """A method's answer, to each query or to their mean."""
    query = options.get("query")
    if not isinstance(query, str) or query != MEAN:
        return _computed(method, frozen, options)
    frozen.view.refuse_encoder_decoder("query='mean'")
    every = _with_prediction(frozen, options.get("target"))
    result = one_query(_computed(method, frozen, {**options, "query": every}), mean=True)
    what = " of the ".join([MEAN_QUERY, *filter(None, [result.target])])
    return replace(result, target=what, options=result.options | {"query": MEAN})


def _with_prediction(frozen: FrozenPass | Difference, target: TokenLike) -> Query:
    """Every query, or for `NEXT` those that a token follows; padding where a prompt has fewer."""
    if target is not NEXT:
        return "all"
    rows = [row.nonzero()[:-1, 0] for row in frozen.mask]
    most = max(map(len, rows))
    if any(len(row) == 0 for row in rows):
        raise InvalidInputError(
            "query='mean': a prompt of one token, which none follows, has no query for target=NEXT; name a token."
        )
    padding = (~frozen.mask).long().argmax(1)
    filled = [torch.cat([row, at.expand(most - len(row))]) for row, at in zip(rows, padding, strict=True)]
    return torch.stack(filled)


def _computed(method: Method, frozen: FrozenPass | Difference, options: Mapping[str, Any]) -> Attribution:
    """The result of a method; no other thread gives the model other weights before it is computed."""
    with one_check(frozen.view.model):
        frozen.check_fresh()
        result: Any = method.function(frozen, **options)
        if not isinstance(result, Attribution):
            raise RegistryError(
                f"method {method.name!r} returned {type(result).__name__}, not an Attribution; wrap its scores with "
                "tlens.Attribution.of(frozen, scores, method=..., query=...)."
            )
        if result.additive and not is_ours(str(method.function.__module__)):
            result = _measured(frozen, result, options)
        return _with_tokens_of_queries(frozen, result, options)


def _measured(frozen: FrozenPass | Difference, result: Attribution, options: Mapping[str, Any]) -> Attribution:
    """The sum of somebody else's method with the gap that it has, whatever gap was handed over.

    Where the method was given a target, the total is the model's own logit, read here.
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
    """The result with the tokens of each prompt and query in its options, where a list or a rank names them."""
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
    """The scores of a rule (see `rule_scores`) as the attribution of a method, a sum where the rule is affine."""
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
    """A rule as a method, which is not registered."""

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
    """What `attribute` answers with for ``rule=``."""
    chosen = rule_of(rule)
    names = [name for name, known in RULES.items() if known is chosen]
    return checking(method_of(chosen, f"rule={names[0] if names else 'own'}"))


@checked_arguments
def register_rule(name: str, rule: Rule) -> Rule:
    """Register a rule under a name, for every question that takes ``rule=``, and as a method of `attribute`.

    Args:
        name: what questions, evaluations and the command line call it. A name of your own may be registered again.
        rule: what stands for each kind of operation.

    Returns:
        The rule.

    Raises:
        RegistryError: the name is that of a built-in rule or of another method.

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
    """Whether a rule says what gradients of a run follow; those of the frozen model are read from weights.

    Raises:
        InvalidInputError: no such name.
    """
    if isinstance(rule, str) and rule != "secant":
        check_choice("rule", rule, list_rules(), OLD_RULES)
    return rule is not None and rule not in FROZEN_RULES


def frozen_rule(rule: Any) -> FrozenRule:
    """The rule of the frozen model that is asked about, or that another rule stands in place of.

    Raises:
        InvalidInputError: no such name.
    """
    if rule is None or is_of_run(rule):
        return "frozen"
    return next(known for known in FROZEN_RULES if known == rule)


def list_rules() -> list[str]:
    """The names that ``rule=`` takes.

    >>> tlens.list_rules()
    ['attnlrp', 'frozen', 'frozen-integrated-gradients', 'frozen-split', 'frozen-tangent', 'gim', 'relp', 'tangent']
    """
    return sorted({*RULES, *FROZEN_RULES})
