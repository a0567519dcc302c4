"""What a frozen pass costs, by shape, prompt and batch: sections of `RESULTS.md`."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from page import Lines, row, table
from shapes import Shape, bert_base, bundled, bundled_longer, gpt2_small, llama_160m, mixture
from timing import LEAST_SHARE, THREADS, beside_a_product, interleaved

import tensorlens_tl as tlens
from tensorlens_tl.testing import Allocations


def costs() -> Lines:
    """## Freezing and target maps, in forwards

    "All queries" is the cost of explaining all queries, divided by the number of tokens. "Logits" is the extra
    run that checks the target's logit, if its position was not compared during freezing.
    """
    yield table(
        "shape",
        "threads",
        "tokens",
        "forward, ms",
        "its share of the product rate",
        "freeze",
        "sampled proof",
        "without proof",
        "target",
        "In+Out",
        "logits",
        "all queries ÷ tokens",
    )
    for shape in (bundled(), gpt2_small(), llama_160m(), bert_base()):
        for threads in THREADS:
            torch.set_num_threads(threads)
            for length in (16, 64, 128, 256):
                ids = shape.tokens(length)
                frozen = tlens.freeze(shape.model, ids)
                op = frozen.operator()
                op.target(5)

                def logits(frozen: Any = frozen) -> None:
                    frozen.logits_check.compared.fill_(False)
                    _ = frozen.unembedding_error

                calls = {
                    "forward": lambda ids=ids, shape=shape: shape.forward(ids),
                    "freeze": lambda ids=ids, shape=shape: tlens.freeze(shape.model, ids),
                    "sampled": lambda ids=ids, shape=shape: tlens.freeze(shape.model, ids, verify="sample"),
                    "unproved": lambda ids=ids, shape=shape: tlens.freeze(shape.model, ids, verify=False),
                    "target": lambda frozen=frozen: frozen.operator().target(5),
                    "in_out": lambda frozen=frozen: frozen.operator().in_out(),
                    "logits": logits,
                }
                rounds = 15 if shape.name == "bundled" else 3
                seconds, _, share = beside_a_product(calls, rounds, shape.d_model, shape.flops(length))
                if share < LEAST_SHARE and shape.name != "bundled":
                    yield row(shape.name, threads, length, f"discarded: {share:.0%} of the product rate", *[""] * 8)
                    continue
                everything = ""
                if threads == THREADS[-1] and length <= 128:
                    both = {"forward": calls["forward"], "all": lambda op=op: op.target(5, query="all")}
                    times = interleaved(both, 1)
                    everything = times["all"] / times["forward"] / length
                base = seconds.pop("forward")
                yield row(
                    shape.name,
                    threads,
                    length,
                    1000 * base,
                    f"{share:.0%}",
                    *(value / base for value in seconds.values()),
                    everything,
                )


def batches_of_prompts() -> Lines:
    """## Batches of prompts, per token

    The time per token to freeze prompts of 64 tokens and explain one target of each, on one thread, divided by that for a
    single prompt. Below 1, a batch is faster.
    """
    yield table("shape", "proof", *(f"batch {size}" for size in (1, 8, 32)), "8 padded prompts")
    torch.set_num_threads(1)
    for shape in (bundled(),):
        for verify in (True, "sample", False):
            prompts = {size: shape.tokens(64, size) for size in (1, 8, 32)}
            lengths = [64, 40, 57, 33, 61, 48, 52, 36]
            padded = [ids[:length].tolist() for ids, length in zip(prompts[8], lengths, strict=True)]
            given = [*((ids, ids.numel()) for ids in prompts.values()), (padded, sum(lengths))]

            def ask(ids: Any, shape: Shape = shape, verify: Any = verify) -> None:
                tlens.freeze(shape.model, ids, verify=verify).operator().target(5)

            calls = {str(number): partial(ask, ids) for number, (ids, _) in enumerate(given)}
            seconds = interleaved(calls, 10)
            each = [seconds[str(number)] / tokens for number, (_, tokens) in enumerate(given)]
            yield row(
                shape.name, {True: "full", False: "first block"}.get(verify, verify), *(t / each[0] for t in each)
            )


def batches() -> Lines:
    """## Many short prompts in one pass, GPT-2 small

    The time per token, relative to one prompt of 256 tokens.
    """
    torch.set_num_threads(THREADS[-1])
    shape = gpt2_small()
    passes = {
        f"{batch} × {256 // batch}": (
            tlens.freeze(shape.model, shape.tokens(256 // batch, batch)),
            shape.tokens(256 // batch, batch),
        )
        for batch in (1, 4, 16)
    }
    for frozen, _ in passes.values():
        frozen.operator().target(5)
    calls: dict[str, Callable[[], Any]] = {}
    for name, (frozen, ids) in passes.items():
        calls[f"freeze {name}"] = lambda ids=ids: tlens.freeze(shape.model, ids)
        calls[f"target {name}"] = lambda frozen=frozen: frozen.operator().target(5)
    seconds = interleaved(calls, 3)
    yield table("prompts × tokens", "freeze", "target")
    for name in passes:
        yield row(
            name,
            seconds[f"freeze {name}"] / seconds["freeze 1 × 256"],
            seconds[f"target {name}"] / seconds["target 1 × 256"],
        )


def experts() -> Lines:
    """## Mixtures of experts, in forwards

    Each token uses two experts, and the model's own forward pass runs only those.
    """
    yield table(
        "shape", "threads", "tokens", "forward, ms", "its share of the product rate", "freeze", "target", "In+Out"
    )
    for threads in THREADS:
        torch.set_num_threads(threads)
        for count in (8, 32):
            shape = mixture(count)
            ids = shape.tokens(128)
            frozen = tlens.freeze(shape.model, ids)
            frozen.operator().target(5)
            calls = {
                "forward": lambda ids=ids, shape=shape: shape.forward(ids),
                "freeze": lambda ids=ids, shape=shape: tlens.freeze(shape.model, ids),
                "target": lambda frozen=frozen: frozen.operator().target(5),
                "in_out": lambda frozen=frozen: frozen.operator().in_out(),
            }
            seconds, _, share = beside_a_product(calls, 10, shape.d_model, shape.flops(128))
            base = seconds.pop("forward")
            yield row(shape.name, threads, 128, 1000 * base, f"{share:.0%}", *(t / base for t in seconds.values()))


def growth() -> Lines:
    """## How cost grows with the prompt, GPT-2 small

    The cost of one target is linear in the number of tokens, except for the attention products. The cost of all queries is
    quadratic (half of the work is skipped, because tokens after the query contribute nothing). Times are also given
    relative to those of 32 tokens.
    """
    torch.set_num_threads(THREADS[-1])
    shape = gpt2_small()
    yield table("tokens", "target, ms per token", "÷ 32 tokens", "all queries, ms per token²", "÷ 32 tokens")
    base: list[float] = []
    for length in (32, 64, 128, 256):
        op = tlens.freeze(shape.model, shape.tokens(length)).operator()
        op.target(5)
        one = interleaved({"one": lambda op=op: op.target(5)}, 5)["one"] / length
        everything = interleaved({"all": lambda op=op: op.target(5, query="all")}, 1)["all"] / length**2
        base = base or [one, everything]
        yield row(length, 1000 * one, one / base[0], 1000 * everything, everything / base[1])


def long_prompts() -> Lines:
    """## Long prompts

    Memory in MiB, counted as tensors are allocated: the size of one layer's pattern, the peak of a plain forward pass, the
    size of a pass, and the peaks of freezing (without the model's weights) and of a target. The last two columns are
    times in forward passes. Rows whose patterns alone would exceed 4 GiB are left out.
    """
    torch.set_num_threads(THREADS[-1])
    yield table(
        "shape", "tokens", "patterns", "one pattern", "forward", "kept", "freezing", "target", "freeze ÷ forward",
        "target ÷ forward",
    )  # fmt: skip
    for make, lengths in ((bundled_longer, (1024, 2048, 4096, 8192)), (gpt2_long, (1024, 2048, 4096))):
        shape = make(lengths[-1])
        for length in lengths:
            ids = shape.tokens(length)
            with Allocations() as plainly:
                shape.forward(ids)
            for patterns in ("keep", "recompute"):
                one = 4 * shape.model.cfg.n_heads * length**2
                if patterns == "keep" and one * shape.layers > 4 * 2**30:
                    continue
                with Allocations() as freezing:
                    frozen = tlens.freeze(shape.model, ids, patterns=patterns)
                held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in kept_by(frozen)}
                with Allocations() as asking:
                    frozen.operator().target(5)
                calls = {
                    "forward": lambda ids=ids, shape=shape: shape.forward(ids),
                    "freeze": lambda ids=ids, shape=shape, how=patterns: tlens.freeze(shape.model, ids, patterns=how),
                    "target": lambda frozen=frozen: frozen.operator().target(5),
                }
                seconds = interleaved(calls, 0)  # each ran before
                sizes = (one, plainly.peak, sum(held.values()), freezing.peak, asking.peak)
                yield row(
                    shape.name,
                    length,
                    patterns,
                    *(round(size / 2**20) for size in sizes),
                    seconds["freeze"] / seconds["forward"],
                    seconds["target"] / seconds["forward"],
                )
                del frozen, calls


def gpt2_long(context: int) -> Shape:
    """GPT-2 small's shape with a longer context."""
    return gpt2_small(context=context)


def kept_by(frozen: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a pass keeps of its run."""
    yield from frozen.capture.activations.values()
    for held in frozen.capture.held_scores.values():
        yield from (held.queries, held.keys, held.sums)
