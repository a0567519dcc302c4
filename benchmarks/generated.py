"""What freezing, the first question at another position, and generated text cost, everything included, in forwards.

A forward is that of the bare Hugging Face body, in the same run, on one thread, float32. Processor time, so that what
else a machine runs does not count; candidates are interleaved, and minima taken.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from page import Lines, row as line, table
from shapes import Shape, bert_base, gpt2_small, llama_160m
from timing import interleaved

import tensorlens_tl as tlens
from tensorlens_tl.generation import freeze_generation

PROOFS = {"none but each first block": False, "sampled": "sample", "whole": True}
Row = tuple[str, int, dict[str, float]]


def in_forwards(
    shape: Shape, ids: torch.Tensor, calls: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, float]:
    """Each candidate in forwards of the same run."""
    seconds = interleaved({"forward": lambda: shape.forward(ids), **calls}, rounds, time.thread_time)
    return {name: seconds[name] / seconds["forward"] for name in calls}


def freezing(rounds: int = 8) -> Row:
    """Freezing with each proof."""
    shape = gpt2_small()
    ids = shape.tokens(128)
    calls = {name: partial(tlens.freeze, shape.model, ids, verify=verify) for name, verify in PROOFS.items()}
    return "GPT-2 small, freezing", 128, in_forwards(shape, ids, calls, rounds)


def first_questions(rounds: int = 6) -> Row:
    """The first target at a position that was not compared, and at one that was; freezing not counted."""
    shape = bert_base()
    ids = shape.tokens(64)

    def ask(query: int) -> None:
        frozen.logits_check.compared[:, 20] = False
        frozen.operator().target(5, query=query)

    frozen = tlens.freeze(shape.model, ids)
    calls = {"one more run": partial(ask, 20), "compared while freezing": partial(ask, 0)}
    return "BERT base, first target at a position", 64, in_forwards(shape, ids, calls, rounds)


def generated(prompt: int, tokens: int, rounds: int) -> Iterator[Row]:
    """A span of all generated tokens, and its hops."""
    shape = llama_160m()
    ids = shape.tokens(tokens)

    def ask(verify: Any, hops: Any) -> None:
        text = freeze_generation(shape.model, ids[:, :prompt], continuation=ids[0, prompt:], verify=verify)
        text.attribute(span="all", hops=hops)

    calls = {f"{name}, {hops}": partial(ask, PROOFS[name], hops) for name in ("sampled", "whole") for hops in (0, 2)}
    forwards = in_forwards(shape, ids, calls, rounds)
    for hops in (0, 2):
        values = {name: forwards[f"{name}, {hops}"] for name in ("sampled", "whole")}
        yield f"Llama-like 160M, a span after {prompt} tokens, {hops} hops", tokens, values


def everything_included() -> Lines:
    """## Freezing, questions and generated text from token ids to scores, in forwards

    One thread, processor time, forwards of the bare Hugging Face body in the same run.
    """
    torch.set_num_threads(1)
    yield table("what", "tokens", *(f"proof: {name}" for name in PROOFS))
    for what, tokens, values in (freezing(), *generated(96, 128, 6), *generated(768, 1024, 2)):
        yield line(what, tokens, *(values.get(name, "") for name in PROOFS))
    what, tokens, questions = first_questions()
    costs = ", ".join(f"{value:.2f} ({name})" for name, value in questions.items())
    yield f"\n{what} ({tokens} tokens, freezing not counted): {costs}."
