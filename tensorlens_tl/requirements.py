"""What methods and layer maps need of a model: one named check each, which a pass has to meet before they start.

A registration names them, ``@register_method("mine", needs=("head_vectors", "unwhitened"))``, or brings a requirement
that is not in `REQUIREMENTS`:

    >>> from tensorlens_tl.errors import UnsupportedModelError
    >>> @tlens.Requirement
    ... def few_layers(frozen, method):
    ...     \"\"\"The model has at most four layers.\"\"\"
    ...     if frozen.n_layers > 4:
    ...         raise UnsupportedModelError(f"{method}: {frozen.n_layers} layers; take a model of four at most.")
    >>> few_layers
    Requirement('few_layers': The model has at most four layers.)
    >>> few_layers.check(frozen, "mine")
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tensorlens_tl.core import Rule
from tensorlens_tl.errors import RegistryError, UnsupportedModelError
from tensorlens_tl.layerwise import refuse_whitened
from tensorlens_tl.models import require_attention_alone
from tensorlens_tl.passes import Difference, FrozenPass

__all__ = ["REQUIREMENTS", "Requirement"]


@dataclass(frozen=True, repr=False)
class Requirement:
    """One thing that a method needs of a model, made from the function that checks it, as a decorator.

    Attributes:
        check: called with a frozen pass and the name of the method or layer map. It returns nothing, or raises
            `UnsupportedModelError`, naming the block and what to use in place of the method. Its docstring is one
            sentence about the models that it passes.
    """

    check: Callable[[Any, str], None]

    @property
    def name(self) -> str:
        """What registrations call it: the name of the check."""
        return self.check.__name__

    @property
    def summary(self) -> str:
        """The models that meet it, in one sentence: the docstring of the check."""
        return inspect.getdoc(self.check) or ""

    def __repr__(self) -> str:
        return f"Requirement({self.name!r}: {self.summary})"


@Requirement
def one_stack(frozen: FrozenPass, method: str) -> None:
    """The model has one stack of blocks: no encoder–decoder, and no block that uses another block's keys and values."""
    frozen.view.require_chain(method)


@Requirement
def predictions(frozen: FrozenPass, method: str) -> None:
    """The model predicts tokens: it has an unembedding."""
    if frozen.view.unembedding is None:
        raise UnsupportedModelError(
            f"{method}: {frozen.view.description} predicts no tokens, so there is no target to explain. Use tensorlens "
            "with direction=, or a method without a target."
        )


@Requirement
def norm_after_sum(frozen: FrozenPass, method: str) -> None:
    """In every block, a norm reads attention plus the residual stream: a post-LN block's norm, or the MLP's."""
    for number, (layout, block) in enumerate(zip(frozen.layouts, frozen.view.blocks, strict=True)):
        if layout.attn.outer is not None:
            continue
        if layout.parallel:
            why = "attention and MLP are parallel"
        elif block.has_mlp and (layout.mlp.before is not None or layout.name == "pre"):
            continue  # of the layout "pre" without norms, the MLP reads the sum itself
        else:
            why = "no norm reads attention plus residual"
        raise UnsupportedModelError(
            f"{method}: undefined at blocks.{number} of this {frozen.view.description}, where {why}. "
            "Use norm with scope='attn_res_ln', which is defined for every block."
        )


@Requirement
def sequential_mlp(frozen: FrozenPass, method: str) -> None:
    """In every block, an MLP reads attention's output."""
    for number, (layout, block) in enumerate(zip(frozen.layouts, frozen.view.blocks, strict=True)):
        if layout.parallel or not block.has_mlp:
            raise UnsupportedModelError(
                f"{method}: undefined at blocks.{number} of this {frozen.view.description}: no MLP reads attention. "
                "Use norm with scope='attn_res_ln', which is defined for every block."
            )


@Requirement
def patterns(frozen: FrozenPass, method: str) -> None:
    """Softmax attention alone mixes tokens in every block; self- and cross-attention share no softmax."""
    frozen.view.require_single_streams(method)
    for block in frozen.view.blocks:
        require_attention_alone(block)


@Requirement
def head_vectors(frozen: FrozenPass, method: str) -> None:
    """A source token adds the pattern times a vector to a head's output: no gate and no norm precede W_O."""
    frozen.view.require_single_streams(method)
    for number, block in enumerate(frozen.view.blocks):
        if require_attention_alone(block).output_factor is not None:
            raise UnsupportedModelError(
                f"{method}: blocks.{number} of this {frozen.view.description} has a gate or a norm inside its "
                "attention, so that what a source token gives is not its pattern times a value. Methods over the "
                "operator (tensorlens, decompx) and input-x-gradient work."
            )


@Requirement
def unwhitened(frozen: FrozenPass, method: str) -> None:
    """No block reads a whitened stream, which moves vectors between positions outside attention."""
    refuse_whitened(frozen, method)


@Requirement
def attention_products(frozen: FrozenPass, method: str) -> None:
    """Softmax attention alone mixes tokens in every block; self- and cross-attention may share a softmax."""
    for block in frozen.view.blocks:
        if block.mixer is not None or block.has_beside:
            name = block.parts.beside_name if block.has_beside else block.parts.mixer_name
            raise UnsupportedModelError(
                f"{block.name} of this {frozen.view.description}: its {name} is no softmax attention, and "
                f"{method} says nothing of its products. tensorlens, cp-lrp and relp with attention='frozen' are exact "
                "for it."
            )


@Requirement
def full_rows(frozen: FrozenPass, method: str) -> None:
    """The rows of every pattern sum to 1: there are no attention sinks."""
    for layer, points in enumerate(frozen.points.blocks):
        total = frozen.pattern(layer).sum(-1)
        off = ((total - 1).abs() > frozen.tolerance) & (total != 0)  # a row without any key is empty
        if bool(off.any()):
            raise UnsupportedModelError(
                f"{points.pattern} of {frozen.view.description}: its rows do not sum to 1 (attention sinks), and "
                f"{method} does not read softmax at another temperature there; attnlrp and relp do."
            )


@Requirement
def secants(frozen: FrozenPass | Difference, method: str) -> None:
    """The residual stream has one vector for each token, and no routed experts compute the queries."""
    frozen.view.require_single_streams("a difference of two runs")
    for block in frozen.view.blocks:
        if block.mixer is None and block.attention.routing is not None:
            block.require_query_key()


REQUIREMENTS = {
    requirement.name: requirement
    for requirement in (
        one_stack,
        predictions,
        norm_after_sum,
        sequential_mlp,
        patterns,
        head_vectors,
        unwhitened,
        attention_products,
        full_rows,
        secants,
    )
}
"""Those that have names, in the order in which they are checked."""


def check_rule(rule: Rule, frozen: FrozenPass, what: str) -> None:
    """Refuse a model of which a rule says nothing.

    Raises:
        UnsupportedModelError: it does not meet one of the rule's needs; names the block.
    """
    for requirement in resolved(rule.needs, what):
        requirement.check(frozen, what)


def resolved(needs: Iterable[str | Requirement], what: str) -> tuple[Requirement, ...]:
    """Names and requirements as requirements, in the order of `REQUIREMENTS`; others follow.

    Args:
        needs: as a registration gives them.
        what: the registration, for messages.

    Raises:
        RegistryError: a name that is not in `REQUIREMENTS`, or something else than names and requirements.
    """
    if isinstance(needs, str):
        raise RegistryError(f"{what}: needs={needs!r} is one text; pass names, as in needs=({needs!r},).")
    chosen = dict.fromkeys(_resolved(need, what) for need in needs)
    known = list(REQUIREMENTS.values())
    return (*(need for need in known if need in chosen), *(need for need in chosen if need not in known))


def _resolved(need: str | Requirement, what: str) -> Requirement:
    if isinstance(need, Requirement):
        return need
    if not isinstance(need, str) or need not in REQUIREMENTS:
        raise RegistryError(
            f"{what}: needs {need!r}, which is no requirement; there are {', '.join(map(repr, REQUIREMENTS))}. Pass a "
            "Requirement for another one."
        )
    return REQUIREMENTS[need]
