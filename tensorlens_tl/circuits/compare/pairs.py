"""Two prompts of the same length, and the target of the first: what every comparison of a clean and a corrupted
prompt begins with.

A prompt is *clean* where the model does what one wants to understand, and *corrupted* where a small change takes that
away. Both are frozen; positions must match, so that an activation of one can stand in for the other's.

Sign of every score: what the target loses when the clean value is replaced by the corrupted one,
``number(clean) − number(patched)``. What helps the clean answer is positive.
"""

from dataclasses import replace
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import check_choice, whole_number
from tensorlens_tl.circuits.arguments import Direction, Whole
from tensorlens_tl.circuits.stream import Stream, StreamTarget, stream_target
from tensorlens_tl.core import Rule, rule_of
from tensorlens_tl.errors import FrozenModelError, InvalidInputError, PromptNumber, UnsupportedModelError
from tensorlens_tl.hooks import hook_numbers, other_hooks, refuse_attached
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes import PassLike, check_pass, difference
from tensorlens_tl.passes.operator import resolve_target
from tensorlens_tl.requirements import check_rule

METHODS = ("frozen", "frozen+qk", "gradient", "integrated", "difference", "patching")
"""The ways to get a score of a node or an edge."""

SYNONYMS = {
    "eap": "gradient",
    "eap-ig": "integrated",
    "ig": "integrated",
    "integrated-gradients": "integrated",
    "attribution-patching": "gradient",
    "atp": "gradient",
    "activation-patching": "patching",
    "causal-tracing": "patching",
    "exact": "difference",
    "frozen-qk": "frozen+qk",
}
"""What the literature calls these."""

POINTS = {"midpoint": 0.5, "left": 0.0}
"""Where in each of the equal steps a gradient is taken, as a share of the step."""


def gradient_shares(method: str, steps: Whole, points: str = "midpoint") -> list[float]:
    """Where a method takes gradients on the way from the corrupted to the clean embeddings: none, or shares of it.

    Raises:
        InvalidInputError: no such method or points, or no whole number of steps, 1 or more.
    """
    check_choice("method", method, METHODS, SYNONYMS)
    check_choice("points", points, POINTS)
    steps = whole_number("steps", steps, least=1)
    on_the_way = [(step + POINTS[points]) / steps for step in range(steps)]
    return {"gradient": [1.0], "integrated": on_the_way, "frozen+qk": on_the_way}.get(method, [])


def ruled_method(method: str | None, rule: Any, clean: PassLike) -> tuple[str, Rule | None]:
    """The method, and the rule that its gradients follow.

    Raises:
        InvalidInputError: no such rule, or a method that takes no gradients.
        UnsupportedModelError: the rule says nothing of this model.
    """
    if rule is None:
        return method or "frozen", None
    chosen = rule_of(rule)
    method = method or "gradient"
    if method not in ("gradient", "integrated"):
        raise InvalidInputError(
            f"rule={rule!r}, method={method!r}: a rule says what gradients follow; use it with method='gradient' or "
            "'integrated', or leave one of the two out."
        )
    check_pass(clean)
    check_rule(chosen, clean, f"rule={rule!r}")
    return method, chosen


def check_pair(clean: PassLike, corrupted: PassLike) -> None:
    """Refuse two passes that cannot be compared position by position.

    Raises:
        InvalidInputError: no frozen passes, of different models, of different numbers or lengths of prompts, or padded.
        UnsupportedModelError: blocks in a loop, shared keys and values, or a mixture of experts.
        FrozenModelError: the weights were changed since one of the passes.
    """
    for frozen in (clean, corrupted):
        check_pass(frozen)
    if clean.model is not corrupted.model:
        raise InvalidInputError(
            f"clean and corrupted are passes of two model objects, {_both(clean, corrupted)}; freeze both prompts with "
            "one of them. What two models do differently is the question of tlens.difference(a, b) and "
            "circuits.compare_models."
        )
    clean.view.require_single_streams("comparing two prompts")
    for block in clean.view.blocks:
        if isinstance(block.mlp, ExpertsWeights):
            raise UnsupportedModelError(
                f"{block.name} of this {clean.view.description} is a mixture of experts: two prompts are sent to "
                "different ones, so no node of one prompt stands for a node of the other. Ask about each prompt by "
                "itself, with circuits.total_effects."
            )
    prompts = len(clean.tokens)
    others = len(corrupted.tokens)
    if prompts != others:
        raise InvalidInputError(f"{prompts} clean prompts and {others} corrupted ones; freeze as many, in pairs.")
    for side, length in _lengths(clean).items():
        other = _lengths(corrupted)[side]
        if length != other:
            raise InvalidInputError(
                f"the clean prompts have {length} tokens{side} and the corrupted ones {other}; positions must "
                "match. Replace tokens one for one."
            )
    for name, frozen in (("clean", clean), ("corrupted", corrupted)):
        if not bool(frozen.mask.all()):
            row = int((~frozen.mask).any(1).nonzero()[0])
            raise InvalidInputError(
                f"{name} ",
                PromptNumber(row),
                " is padded; prompts that are compared position by position must have one length. Freeze prompts of "
                "each length by themselves.",
            )
    clean.check_fresh()
    corrupted.check_fresh()


def _lengths(frozen: PassLike) -> dict[str, int]:
    """How many tokens the prompts of a pass have; of an encoder–decoder on each side."""
    if frozen.sides is None:
        return {"": frozen.tokens.shape[1]}
    return dict(zip((" for the encoder", " for the decoder"), frozen.sides, strict=True))


def refuse_hooks(clean: PassLike, corrupted: PassLike) -> None:
    """Refuse what runs the live model from its weights, past any hook, where hooks make it another model.

    Raises:
        FrozenModelError: a frozen pass is attached, or hooks were put on the model or taken off since a pass.
    """
    refuse_attached(clean.model)
    now = other_hooks(clean.model)
    numbers = hook_numbers(clean.model)
    for name, frozen in (("clean", clean), ("corrupted", corrupted)):
        if frozen.capture.hook_numbers != numbers:
            raise FrozenModelError(
                f"hooks were put on the model or taken off since the {name} prompts were frozen (at "
                f"{', '.join(sorted({*now} ^ {*frozen.other_hooks})) or 'the same points'}), so that the live model "
                "is another one than theirs. Take them off, or freeze both again."
            )


def pair_target(
    clean: PassLike,
    corrupted: PassLike,
    target: TokenLike,
    minus: TokenLike,
    direction: Direction,
    query: Query,
    activation: str = "ratio",
) -> StreamTarget:
    """The target of the clean prompt, after `check_pair`; see `stream_target` for what is refused besides."""
    check_pair(clean, corrupted)
    return stream_target(clean, target, minus, direction, query, activation)


def corrupted_stream(readout: StreamTarget, corrupted: PassLike, activation: str = "ratio") -> Stream:
    """The stream of the corrupted prompt, up to where the target reads it.

    Raises:
        InvalidInputError: hooks add to the stream in one of the two passes only.
    """
    of_tokens = readout.read_at == corrupted.points.unembed_in
    stream = Stream.of(corrupted, activation, final_norm=readout.stream.final_norm, to_tokens=of_tokens)
    of_clean, of_corrupted = ([step.outer_name for step in of.steps] for of in (readout.stream, stream))
    if of_clean != of_corrupted:
        points = ", ".join(sorted({*of_clean} ^ {*of_corrupted}))
        raise InvalidInputError(
            f"hooks add to the stream in one of the two passes only ({points}), so that no step of one stands for a "
            "step of the other. Use method='difference', which has what they add as a source, or freeze both passes "
            "with the same hooks."
        )
    return stream


class ChangeTarget(NamedTuple):
    """The change of a number between two runs, and the number in either of them.

    Attributes:
        change: of the number, along the stream of the exact difference.
        clean, corrupted: the number of each run, before any final soft cap.
    """

    change: StreamTarget
    clean: Float[Tensor, "batch query"]
    corrupted: Float[Tensor, "batch query"]


def change_target(
    clean: PassLike,
    corrupted: PassLike,
    target: TokenLike,
    minus: TokenLike,
    direction: Direction,
    query: Query,
) -> ChangeTarget:
    """The change of a number between two runs, after `check_pair`.

    Either run may have been patched by hooks: it is their difference that is asked, and neither of them by itself.

    Raises:
        InvalidInputError: see `check_pair` and `stream_target`.
        UnsupportedModelError: see `tensorlens_tl.passes.difference`.
    """
    check_pair(clean, corrupted)
    change = stream_target(difference(clean, corrupted), target, minus, direction, query, "ratio")
    resolved = resolve_target(clean, target, minus, direction, change.positions)
    numbers = [change.number_of(frozen.activation) + resolved.constant for frozen in (clean, corrupted)]
    return ChangeTarget(replace(change, label=resolved.label), *numbers)  # what other methods call the same number


def _both(clean: PassLike, corrupted: PassLike) -> str:
    """What the models of two passes are called."""
    names = [frozen.view.description for frozen in (clean, corrupted)]
    if names[0] == names[1]:
        return f"both {names[0]} (loaded twice, or copied)"
    return " and ".join(names)
