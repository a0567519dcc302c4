"""What questions to the live model cost, in forwards of the same run: live effects, patching, methods that perturb.

64 tokens, one thread, float32; GPT-2 small's shape with random weights, and the bundled model. Processor time of that
thread, so that what else a machine runs does not count; candidates are interleaved, and minima taken.

    python benchmarks/live.py               # this checkout
    python benchmarks/live.py OTHER         # and another one (a git worktree), in turn
"""

import time
from collections.abc import Callable
from typing import Any

from checkouts import in_turn, main
from page import Lines, row, table

ROUNDS = 1
TOKENS = 64

QUESTIONS = {
    "effects": "total effects of heads and MLPs",
    "patching": "patching of the same and the embedding",
    "value-zeroing": "value zeroing",
    "leave-one-out": "leave one out",
}


def seconds() -> dict[str, float]:
    """Of each candidate, with the package that is imported here."""
    import torch
    from shapes import bundled, gpt2_small
    from timing import interleaved

    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for shape in (gpt2_small(), bundled()):
        candidates: dict[str, Callable[[], Any]] = {"forward": lambda shape=shape: shape.forward(shape.tokens(TOKENS))}
        candidates |= questions(shape)
        for name, value in interleaved(candidates, ROUNDS, time.thread_time).items():
            found[f"{shape.name}/{name}"] = value
    return found


def questions(shape: Any) -> dict[str, Callable[[], Any]]:
    """What is asked about a pass of a shape's model."""
    import tensorlens_tl as tlens
    from tensorlens_tl import circuits

    frozen = tlens.freeze(shape.model, shape.tokens(TOKENS))
    other = tlens.freeze(shape.model, shape.tokens(TOKENS).flip(1))
    return {
        "effects": lambda: circuits.total_effects(frozen, 5, live=True),
        "patching": lambda: circuits.patch_scores(frozen, other, 5, method="patching"),
        "value-zeroing": lambda: tlens.attribute(frozen, method="value-zeroing"),
        "leave-one-out": lambda: tlens.attribute(frozen, method="leave-one-out", target=5, replacement=7),
    }


def forwards(times: dict[str, float]) -> dict[str, float]:
    """Times in forwards of their model."""
    return {name: value / times[f"{name.split('/')[0]}/forward"] for name, value in times.items()}


def changes(shape: str, question: str) -> int:
    """How many changes a question tries: nodes, or tokens."""
    nodes = {"GPT-2 small": 12 * (12 + 1), "bundled": 4 * (4 + 1)}[shape]
    return {"effects": nodes, "patching": nodes + 1}.get(question, TOKENS)


def live_changes() -> Lines:
    """## The live model with something changed, in forwards

    Processor time for 64 tokens on one thread, in forward passes of the blocks in the same run, with the pass already
    frozen. Without sharing, each change would take at least one forward pass. `python benchmarks/live.py OTHER`
    alternates with another checkout.
    """
    yield table("shape", "question", "changes", "forwards", "forwards ÷ changes")
    for name, value in forwards(in_turn(__file__)[0]).items():
        shape, question = name.split("/")
        if question in QUESTIONS:
            count = changes(shape, question)
            yield row(shape, QUESTIONS[question], count, value, value / count)


if __name__ == "__main__":
    main(__file__, seconds, forwards)
