"""Requirements that methods and layer maps place on a model: named checks of a frozen pass, run before they start.

A registration lists them by name, ``@register_method("mine", needs=("head_vectors", "unwhitened"))``, or supplies a
requirement of its own that is not in `REQUIREMENTS`:

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
    """A requirement of a method on a model; decorates the function that checks it.

    Attributes:
        check: called with a frozen pass and the name of the method or layer map. Returns nothing, or raises
            `UnsupportedModelError` that names the block and an alternative to the method. Its docstring describes, in
            one sentence, the models that pass.
    """

    check: Callable[[Any, str], None]

    @property
    def name(self) -> str:
        """The name that registrations use: that of the check."""
        return self.check.__name__

    @property
    def summary(self) -> str:
        """The models that meet the requirement, in one sentence: the docstring of the check."""
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
            f"{method}: {frozen.view.description} predicts no tokens, so there is no target to explain. Use "
            "tensorlens with direction=, or a method without a target."
        )


@Requirement
def norm_after_sum(frozen: FrozenPass, method: str) -> None:
    """In every block, a norm (a post-LN block's, or the MLP's) reads attention plus the residual stream."""
    for number, (layout, block) in enumerate(zip(frozen.layouts, frozen.view.blocks, strict=True)):
        if layout.attn.outer is not None:
            continue
        if layout.parallel:
            why = "attention and MLP are parallel"
        elif block.has_mlp and (layout.mlp.before is not None or layout.name == "pre"):
            continue  # without norms in layout "pre", the MLP reads the sum directly
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
                "attention, so a source token's contribution is not its pattern times a value. Methods over the "
                "operator (tensorlens, decompx) and input-x-gradient work."
            )


@Requirement
def unwhitened(frozen: FrozenPass, method: str) -> None:
    """No block reads a whitened stream, because whitening moves vectors between positions outside attention."""
    refuse_whitened(frozen, method)


@Requirement
def attention_products(frozen: FrozenPass, method: str) -> None:
    """Softmax attention alone mixes tokens in every block; self- and cross-attention may share a softmax."""
    for block in frozen.view.blocks:
        if block.mixer is not None or block.has_beside:
            name = block.parts.beside_name if block.has_beside else block.parts.mixer_name
            raise UnsupportedModelError(
                f"{block.name} of this {frozen.view.description}: its {name} is no softmax attention, and "
                f"{method} defines nothing for its products. tensorlens, cp-lrp and relp with attention='frozen' are "
                "exact for it."
            )


@Requirement
def full_rows(frozen: FrozenPass, method: str) -> None:
    """The rows of every attention pattern sum to 1: there are no learned attention sinks (extra softmax logits)."""
    for layer, points in enumerate(frozen.points.blocks):
        total = frozen.pattern(layer).sum(-1)
        off = ((total - 1).abs() > frozen.tolerance) & (total != 0)  # a fully masked row sums to 0
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
"""The named requirements, in the order in which they are checked."""


def check_needs(rule: Rule, frozen: FrozenPass, what: str) -> None:
    """Raise `UnsupportedModelError`, naming the block, unless the model meets all of the rule's requirements."""
    for requirement in resolved(rule.needs, what):
        requirement.check(frozen, what)


def resolved(needs: Iterable[str | Requirement], what: str) -> tuple[Requirement, ...]:
    """Return names and requirements as requirements: those of `REQUIREMENTS` first, in its order.

    Raises:
        RegistryError: an unknown name, or something that is neither a name nor a `Requirement`.
    """
    if isinstance(needs, str):
        raise RegistryError(f"{what}: needs={needs!r} is one string; pass names, as in needs=({needs!r},).")
    chosen = dict.fromkeys(_resolved(need, what) for need in needs)
    known = list(REQUIREMENTS.values())
    return (*(need for need in known if need in chosen), *(need for need in chosen if need not in known))


def _resolved(need: str | Requirement, what: str) -> Requirement:
    if isinstance(need, Requirement):
        return need
    if not isinstance(need, str) or need not in REQUIREMENTS:
        raise RegistryError(
            f"{what}: needs {need!r}, which is not a requirement; choose from {', '.join(map(repr, REQUIREMENTS))}, or "
            "pass a Requirement of your own."
        )
    return REQUIREMENTS[need]
