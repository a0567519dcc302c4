"""What freezing, a first question, generated text and rows of a data set cost, everything included, in forwards.

A forward is that of the bare Hugging Face body, in the same run; of rows of a data set, all that the plain model does
with the same batches. One thread, float32. Processor time of that thread, so that what else a machine runs does not
count; candidates are interleaved, and minima taken.

    python benchmarks/everything_included.py               # this checkout
    python benchmarks/everything_included.py OTHER         # and another one (a git worktree), in turn
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from checkouts import Times, in_turn, main
from page import Lines, row, table

PROCESSES = 2
FORWARD = "forward"
PROOFS = {"each first block proved": False, "sampled proof": "sample", "whole proof": True}
ROWS = 500
TOKENS_PER_BATCH = (512, 2048, 8192)


class Subject(NamedTuple):
    """A model with an input, and what is asked about them; one candidate is the `FORWARD`."""

    name: str
    candidates: dict[str, Callable[[], Any]]
    rounds: int


def freezing() -> Subject:
    """Freezing with each proof, and what TransformerLens' own run takes of it."""
    from shapes import gpt2_small

    import tensorlens_tl as tlens

    shape = gpt2_small()
    ids = shape.tokens(128)
    last = [("unembed.hook_in", lambda activation, hook: activation[:, -1:])]
    candidates: dict[str, Callable[[], Any]] = {
        FORWARD: partial(shape.forward, ids),
        "TransformerLens' own run, one token's logits": partial(shape.model.run_with_hooks, ids, fwd_hooks=last),
    }
    for proof, verify in PROOFS.items():
        candidates[f"freezing, {proof}"] = partial(tlens.freeze, shape.model, ids, verify=verify)
    return Subject("GPT-2 small, 128 tokens", candidates, 6)


def first_question() -> Subject:
    """A target at the first position, freezing included."""
    from shapes import bert_base

    import tensorlens_tl as tlens

    shape = bert_base()
    ids = shape.tokens(64)
    candidates: dict[str, Callable[[], Any]] = {
        FORWARD: partial(shape.forward, ids),
        "freezing": partial(tlens.freeze, shape.model, ids),
        "a target at [CLS] from token ids": partial(tlens.attribute, shape.model, ids, target=5, query=0),
    }
    return Subject("BERT base, 64 tokens", candidates, 6)


def generated(prompt: int, tokens: int, rounds: int) -> Subject:
    """A span of all generated tokens, and its hops."""
    from shapes import llama_160m

    from tensorlens_tl.generation import freeze_generation

    shape = llama_160m()
    ids = shape.tokens(tokens)

    def ask(verify: Any, hops: Any) -> None:
        text = freeze_generation(shape.model, ids[:, :prompt], continuation=ids[0, prompt:], verify=verify)
        text.attribute(span="all", hops=hops)

    candidates: dict[str, Callable[[], Any]] = {FORWARD: partial(shape.forward, ids)}
    for proof in ("sampled proof", "whole proof"):
        for hops, name in ((0, "a span"), (2, "two hops")):
            candidates[f"{name}, {proof}"] = partial(ask, PROOFS[proof], hops)
    return Subject(f"Llama-like 160M, {prompt} + {tokens - prompt} tokens", candidates, rounds)


def data_set(folder: Path, tokens_per_batch: int) -> Subject:
    """Rows of held-out text on the bundled model."""
    from data_sets import attributed, forwards, rows_of_text

    import tensorlens_tl as tlens

    model = tlens.load_demo_model()
    rows = rows_of_text(ROWS)

    def ask() -> None:
        with TemporaryDirectory(dir=folder) as run:
            attributed(model, rows, Path(run) / "run", tokens_per_batch=tokens_per_batch)

    candidates: dict[str, Callable[[], Any]] = {
        FORWARD: partial(forwards, model, rows, folder, tokens_per_batch),
        "`attribute_dataset`": ask,
    }
    return Subject(f"Bundled model, {ROWS} rows, {tokens_per_batch} tokens a batch", candidates, 2)


def subjects(folder: Path) -> Iterator[Subject]:
    yield freezing()
    yield first_question()
    yield generated(96, 128, 4)
    yield generated(768, 1024, 1)
    for size in TOKENS_PER_BATCH:
        yield data_set(folder, size)


def seconds() -> Times:
    """Of each candidate, with the package that is imported here."""
    import torch
    from timing import interleaved

    torch.set_num_threads(1)
    times: Times = {}
    with TemporaryDirectory() as place:
        for subject in subjects(Path(place)):
            for name, value in interleaved(subject.candidates, subject.rounds, time.thread_time).items():
                times[f"{subject.name}: {name}"] = value
    return times


def in_forwards(times: Times) -> Times:
    """Times in forwards of their subject."""
    ratios: Times = {}
    for label, value in times.items():
        subject, _, name = label.partition(": ")
        if name != FORWARD:
            ratios[label] = value / times[f"{subject}: {FORWARD}"]
    return ratios


def everything_included() -> Lines:
    """## Freezing, questions, generated text and rows from token ids to scores, in forwards

    Processor time on one thread, in forward passes of the bare Hugging Face model body in the same run; rows are
    relative to the plain model over the same batches. `python benchmarks/everything_included.py OTHER` alternates with
    another checkout.
    """
    yield table("model and input", "what", "forwards")
    for label, value in in_forwards(in_turn(__file__, processes=PROCESSES)[0]).items():
        subject, _, name = label.partition(": ")
        yield row(subject, name, value)


if __name__ == "__main__":
    main(__file__, seconds, in_forwards, PROCESSES)
