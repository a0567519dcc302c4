"""What is registered: a method, or a layer map, with what it needs and what it explains."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from torch import Tensor

from tensorlens_tl.errors import RegistryError, UnsupportedModelError
from tensorlens_tl.layerwise import Maps
from tensorlens_tl.passes import Difference, FrozenPass
from tensorlens_tl.requirements import Requirement, resolved
from tensorlens_tl.results import Attribution

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
