"""Measure, and write `RESULTS.md`: every figure is a ratio within one run.

Candidates are interleaved and minima taken, because the machines are noisy. A run whose plain forward falls below 40 % of
the matrix-product rate measured beside it is repeated once, then discarded, and said so. "Forward" means the blocks only,
of the plain model without hooks.

    make bench                        # all sections, about a quarter of an hour
    python benchmarks/run.py probes   # some of them, printed and not written
"""

import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from subprocess import run
from tempfile import TemporaryDirectory
from typing import Any

import torch
from browser import CLICK, SLIDE, chromium
from data_sets import measure as measure_data_sets
from difference import measure as measure_difference
from generated import section as measure_generated
from live import section as measure_live
from peers import section as measure_peers
from shapes import Shape, bert_base, bundled, bundled_longer, gpt2_small, llama_160m, mixture, small_neox
from timing import LEAST_SHARE, beside_a_product, interleaved

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.algebra.memory import in_bytes
from tensorlens_tl.algebra.positions import RowPositions, place
from tensorlens_tl.testing import Allocations

RESULTS = Path(__file__).parent / "RESULTS.md"
THREADS = [1, 2] if (os.cpu_count() or 1) >= 2 else [1]
Lines = Iterator[str]


def table(*columns: str) -> str:
    return f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}"


def row(*cells: Any) -> str:
    return f"| {' | '.join(f'{cell:.2f}' if isinstance(cell, float) else str(cell) for cell in cells)} |"


def target_of(shape: Shape) -> int | None:
    return 5 if shape.model.cfg.d_vocab > 5 else None


def costs() -> Lines:
    """## Freezing and target maps, in forwards

    "All queries" is divided by the number of tokens: in forwards per token. The target's logits are compared
    when the pass is frozen; at another position, once, by one more run ("logits" is that run).
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

    Freezing and one target of each prompt of 64 tokens, on one thread: the time for a token divided by that of a single
    prompt. Below 1, a batch is faster.
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


def experts() -> Lines:
    """## Mixtures of experts, in forwards

    Two experts for each token; the model's own forward goes through those only.
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


def frozen_output(frozen: Any, shape: Shape) -> Callable[[torch.Tensor], torch.Tensor]:
    """The live model, held fixed by hooks: from the first block's input to the operator's output."""
    end = frozen.points.unembed_in if frozen.view.final_norm is not None else frozen.points.last_output

    class ReachedError(Exception):
        pass

    def run(x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []

        def see(live: torch.Tensor, *, hook: Any) -> None:
            seen.append(live)
            raise ReachedError

        hooks = [(frozen.points.blocks[0].resid_pre, lambda live, *, hook: x), *frozen.fwd_hooks(), (end, see)]
        with suppress(ReachedError):
            shape.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
        return seen[0]

    return run


def norm_slice() -> Lines:
    """## Exact norm slice of one query, 64 tokens

    Shares are of the rate of one large matrix product in the same run. "Pull" is a plain pull of every position, on whose
    operations the share counts; "slice" is `op.norm()`, which leaves dead positions out. Autograd differentiates the
    hook-frozen model in batches of rows; its best batch size is taken. 48 of the 768 rows are timed, as all are linear in them.
    """
    yield table(
        "shape",
        "threads",
        "product, GFLOP/s",
        "forward's share",
        "pull's share",
        "slice ÷ pull",
        "autograd ÷ pull",
        "autograd ÷ slice",
    )
    rows, length = 48, 64
    for shape in (gpt2_small(), llama_160m(), bert_base()):
        for threads in THREADS:
            torch.set_num_threads(threads)
            ids = shape.tokens(length)
            frozen = tlens.freeze(shape.model, ids)
            op = frozen.operator()
            leaf = op.x.clone().requires_grad_(True)
            output = frozen_output(frozen, shape)(leaf)
            basis = torch.eye(shape.d_model)[:rows]

            def seeds(part: torch.Tensor, op: Any = op) -> torch.Tensor:
                return place(part[:, None], torch.full((len(part), 1), length - 1), op.x)

            def pull(op: Any = op, basis: torch.Tensor = basis, seeds: Any = seeds) -> None:
                for part in basis.split(32):
                    op.pull(seeds(part)).square().sum((0, -1))

            def sliced(op: Any = op, basis: torch.Tensor = basis) -> None:
                for part in basis.split(32):
                    pulled = op._pull(op.map, part[:, None], RowPositions(torch.tensor([[length - 1]])))
                    torch.linalg.vector_norm(pulled, dim=(0, -1))

            def autograd(
                chunk: int, output: Any = output, leaf: Any = leaf, basis: Any = basis, seeds: Any = seeds
            ) -> Callable[[], None]:
                def run() -> None:
                    for part in basis.split(chunk):
                        (g,) = torch.autograd.grad(output, leaf, seeds(part), is_grads_batched=True, retain_graph=True)
                        g.square().sum((0, -1))

                return run

            calls = {"forward": lambda ids=ids, shape=shape: shape.forward(ids), "pull": pull, "slice": sliced}
            batched = {f"{chunk}": autograd(chunk) for chunk in (8, 24, 48)}
            seconds, rate, share = beside_a_product({**calls, **batched}, 2, shape.d_model, shape.flops(length))
            if share < LEAST_SHARE:
                yield row(shape.name, threads, f"discarded: {share:.0%} of the product rate", *[""] * 5)
                continue
            best = min(batched, key=lambda chunk: seconds[chunk])
            reached = rows * shape.frozen_flops(length) / seconds["pull"] / rate
            yield row(
                shape.name,
                threads,
                f"{rate / 1e9:.0f}",
                f"{share:.0%}",
                f"{reached:.0%}",
                seconds["slice"] / seconds["pull"],
                f"{seconds[best] / seconds['pull']:.2f} ({best} rows)",
                seconds[best] / seconds["slice"],
            )


def jacobians() -> Lines:
    """## The same slice with torch.func.jacrev, the paper's own way (Appendix C)

    Four layers of GPT-2 small's shape, 64 tokens, all 768 rows. Peak memory of tensors that the call allocates.
    """
    torch.set_num_threads(THREADS[-1])
    shape = gpt2_small(layers=4)
    frozen = tlens.freeze(shape.model, shape.tokens(64))
    op, run = frozen.operator(), frozen_output(frozen, shape)

    def jacrev() -> torch.Tensor:
        slice_ = torch.func.jacrev(lambda x: run(x)[0, -1])(op.x)
        return slice_[:, 0].norm(dim=(0, -1))

    yield table("way", "÷ op.norm()", "peak, MB")
    calls = {
        "`op.norm()`": lambda: op.norm(),
        '`op.norm(memory="64MB")`': lambda: op.norm(memory="64MB"),
        "`torch.func.jacrev`": jacrev,
    }
    op.norm(probes=8)
    seconds: dict[str, float] = {}
    for name, call in calls.items():
        with Allocations() as memory:
            call()
        seconds[name] = interleaved({name: call}, 0)[name]
        yield row(name, seconds[name] / seconds["`op.norm()`"], f"{memory.peak / 1e6:.0f}")


def probes() -> Lines:
    """## Norm by random probes, bundled model, 64 tokens of held-out text

    Over 100 seeds and all source tokens of the last query: relative error of the norm, and how often the stated 95 % interval
    holds the exact one.
    """
    torch.set_num_threads(THREADS[-1])
    shape = bundled()
    stream = shape.model.tokenizer(" ".join(tlens.demo.held_out_text()), add_special_tokens=False)["input_ids"]
    op = tlens.freeze(shape.model, torch.tensor([[0, *stream[:63]]])).operator()
    exact = op.norm().scores
    yield table("rows", "probes", "median relative error", "95th percentile", "interval holds the truth")
    for kind in ("gaussian", "orthonormal"):
        for count in (16, 32, 48, 64):
            found = [op.norm(probes=count, rows=kind, seed=seed) for seed in range(100)]
            errors = torch.stack([((estimate.scores - exact) / exact).abs() for estimate in found])
            ends = [estimate.interval() for estimate in found]
            inside = torch.stack([(low <= exact) & (exact <= high) for low, high in ends]).double().mean()
            yield row(kind, count, f"{errors.median():.1%}", f"{errors.quantile(0.95):.1%}", f"{inside:.1%}")


def bounded() -> Lines:
    """## Bounded memory

    Peak bytes allocated beyond the result ÷ the bound, `op.norm()` of one query and `op.contributions()` of all;
    two layers of GPT-2 small's shape, 128 tokens.
    """
    torch.set_num_threads(THREADS[-1])
    shape = gpt2_small(layers=2)
    op = tlens.freeze(shape.model, shape.tokens(128)).operator()
    yield table("bound", "norm", "contributions", "largest difference to the smallest bound's numbers")
    first: list[torch.Tensor] = []
    for bound in ("64MB", "128MB", "256MB", "512MB", "1GB", "2GB"):
        cells, results = [], []
        for call in (
            lambda m: op.norm(memory=m).scores,
            lambda m: op.contributions(memory=m),
        ):
            with Allocations() as memory:
                made = call(bound)
            cells.append((memory.peak - made.numel() * made.element_size()) / in_bytes(bound))
            results.append(made)
        first = first or results
        off = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(results, first, strict=True))
        yield row(bound, *cells, f"{off:.0e}")


def growth() -> Lines:
    """## How cost grows with the prompt, GPT-2 small

    A target map is linear in tokens but for the attention products, all queries quadratic (half of it is spared: nothing
    lives after the query). Times are divided by those of 32 tokens.
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

    Bytes in MiB, counted as tensors are allocated: what a plain forward allocates at most, what a pass keeps, the most
    that freezing (without the plain forward's weights) and a target allocate, and what one layer's pattern takes. Times
    of a target in forwards. Rows whose patterns alone would exceed 4 GiB are left out.
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
                seconds = interleaved(calls, 1)
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


def batches() -> Lines:
    """## Many short prompts in one pass, GPT-2 small

    Per token, in units of one prompt of 256 tokens.
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


def methods() -> Lines:
    """## Methods at BERT-base size, 64 tokens, freezing and proof included

    In forwards of the plain encoder in the same run; peak memory of tensors allocated beyond the model's own.
    """
    torch.set_num_threads(THREADS[-1])
    shape = bert_base()
    ids = shape.tokens(64)
    calls = {
        "GlobEnc": lambda: tlens.attribute(shape.model, ids, method="globenc"),
        "ALTI": lambda: tlens.attribute(shape.model, ids, method="alti"),
        "ALTI-Logit": lambda: tlens.attribute(shape.model, ids, method="alti-logit", target=5),
        "Information flow routes": lambda: tlens.attribute(shape.model, ids, method="ifr"),
        "DecompX vectors": lambda: tlens.attribute(shape.model, ids, method="decompx", aggregate="vector"),
    }
    seconds = interleaved({"forward": lambda: shape.forward(ids), **calls}, rounds=3)
    yield table("method", "forwards", "seconds", "peak, MB")
    for name, call in calls.items():
        with Allocations() as memory:
            call()
        yield row(name, seconds[name] / seconds["forward"], seconds[name], f"{memory.peak / 1e6:.0f}")


def perturbing() -> Lines:
    """## Methods that run the live model, 64 tokens, one thread

    In forwards of the plain blocks in the same run, the pass frozen before; "÷ token" of that divided by the tokens.
    """
    torch.set_num_threads(1)
    yield table("shape", "method", "forwards", "÷ token", "seconds", "peak, MB")
    for shape in (bert_base(), gpt2_small()):
        ids = shape.tokens(64)
        frozen = tlens.freeze(shape.model, ids)
        asked: dict[str, dict[str, Any]] = {"value-zeroing": {}}
        if target_of(shape) is not None and frozen.view.unembedding is not None:
            asked |= {"chefer": {"target": 5}, "leave-one-out": {"target": 5, "replacement": 7}}
        calls = {
            name: lambda name=name, options=options, frozen=frozen: tlens.attribute(frozen, method=name, **options)
            for name, options in asked.items()
        }
        seconds = interleaved({"forward": lambda ids=ids, shape=shape: shape.forward(ids), **calls}, rounds=1)
        for name, call in calls.items():
            with Allocations() as memory:
                call()
            cells = seconds[name] / seconds["forward"], seconds[name] / seconds["forward"] / 64, seconds[name]
            yield row(shape.name, name, *cells, f"{memory.peak / 1e6:.0f}")


def rules() -> Lines:
    """## Backward rules, 64 tokens

    Of a pass that is frozen already: one query, and the last 16 together, per query; in forwards of the plain model in the same run.
    """
    torch.set_num_threads(THREADS[0])
    yield table("shape", "method", "one query, forwards", "16 queries, forwards each")
    for shape in (gpt2_small(), bert_base()):
        ids = shape.tokens(64)
        frozen = tlens.freeze(shape.model, ids)
        target = target_of(shape)
        if target is None or frozen.view.unembedding is None:
            continue
        cases: dict[str, dict[str, Any]] = {
            "input-x-gradient": {}, "relp": {}, "relp, live": {"attention": "live"}, "cp-lrp": {}, "attnlrp": {}, "gim": {},
        }  # fmt: skip

        def ask(name: str, options: dict[str, Any], query: Any, of: Any = frozen, to: int = target) -> Any:
            return tlens.attribute(of, method=name.split(",")[0], target=to, query=query, **options)

        calls = {name: lambda n=name, o=options: ask(n, o, -1) for name, options in cases.items()}
        calls |= {
            f"{name} all": lambda n=name, o=options: ask(n, o, slice(-16, None)) for name, options in cases.items()
        }
        for call in calls.values():
            call()  # what is proved once
        forward = partial(shape.forward, ids)
        seconds = interleaved({"forward": forward, **calls}, rounds=2)
        for name in cases:
            yield row(
                shape.name, name, seconds[name] / seconds["forward"], seconds[f"{name} all"] / 16 / seconds["forward"]
            )


def composition() -> Lines:
    """## Composition scores of all pairs of heads, GPT-2 small's shape

    Beside TransformerLens' own `all_composition_scores` on the same weights.
    """
    torch.set_num_threads(THREADS[-1])
    shape = gpt2_small()
    own = getattr(shape.model, "all_composition_scores", None)
    yield table("kind", "seconds", "peak, MB", "TransformerLens' ÷ ours", "its peak, MB", "largest difference")
    for kind in "QKV":
        with Allocations() as ours:
            made = circuits.composition_scores(shape.model, kind)
        seconds = interleaved({"ours": lambda kind=kind: circuits.composition_scores(shape.model, kind)}, 2)["ours"]
        if own is None:
            yield row(kind, seconds, f"{ours.peak / 1e6:.0f}", "", "", "")
            continue
        with Allocations() as theirs, torch.no_grad():
            expected = own(kind)
        expected = getattr(expected, "scores", expected)

        def run(kind: str = kind) -> None:
            with torch.no_grad():
                own(kind)

        peer = interleaved({"theirs": run}, 1)["theirs"]
        yield row(
            kind,
            seconds,
            f"{ours.peak / 1e6:.0f}",
            peer / seconds,
            f"{theirs.peak / 1e6:.0f}",
            f"{float((made - expected).abs().max()):.0e}",
        )


def graphs() -> Lines:
    """## Circuits of one target, bundled model, 32 tokens, in forwards"""
    torch.set_num_threads(THREADS[-1])
    shape = bundled()
    ids = shape.tokens(32)
    frozen = tlens.freeze(shape.model, ids)
    frozen.operator().target(5)
    calls = {
        "`contribution_graph(threshold=0.01)`": lambda: circuits.contribution_graph(frozen, 5),
        "`contribution_graph(threshold=0)`, every edge": lambda: circuits.contribution_graph(frozen, 5, threshold=0),
        "`contribution_graph(neurons=5, sources=2)`": lambda: circuits.contribution_graph(
            frozen, 5, neurons=5, sources=2
        ),
        '`logit_attribution(by="head")`': lambda: circuits.logit_attribution(frozen, 5, by="head"),
        "`paths(max_order=2)`": lambda: circuits.paths(frozen, 5, max_order=2),
        "`top_paths(10)`": lambda: circuits.top_paths(frozen, 5, k=10),
        "`qk_attribution` of layer 1": lambda: circuits.qk_attribution(frozen, 1, 0),
    }
    seconds = interleaved({"forward": lambda: shape.forward(ids), **calls}, 10)
    yield table("call", "forwards")
    for name in calls:
        yield row(name, seconds[name] / seconds["forward"])


def clicks() -> Lines:
    """## From a click in a contribution graph to the picture, in milliseconds

    Chromium without a window, a page of the bundled model's graph with neurons and source tokens. From the click's dispatch to the
    second frame after it (at 60 frames a second two frames are 33 ms by themselves), and the script's own part; medians and largest of 30 nodes.
    """
    try:
        browser = chromium()
    except Exception as error:
        yield f"Not measured: no Chromium with selenium here ({type(error).__name__})."
        return
    shape = bundled()
    frozen = tlens.freeze(shape.model, shape.tokens(32))
    graph = circuits.contribution_graph(frozen, 5, threshold=0, neurons=2, sources=1)
    yield table(
        "nodes", "edges", "width", "page, kB", "median", "largest", "the script's median", "hiding by threshold"
    )
    with TemporaryDirectory() as folder, browser:
        for most in (300, 1000, 6000):
            page = graph.export(Path(folder) / f"{most}.html", most=most)
            for width in (1280, 400):
                browser.set_window_size(width, 900)
                browser.get(page.as_uri())
                count = "return [document.querySelectorAll('.circuit .t').length, document.querySelectorAll('[data-e]').length]"
                nodes, edges = browser.execute_script(count)
                timed = [browser.execute_async_script(CLICK, number * nodes // 30) for number in range(30)]
                own, frames = (sorted(column) for column in zip(*timed, strict=True))
                slid = sorted(browser.execute_async_script(SLIDE, value)[1] for value in range(5, 65, 2))
                times = (float(frames[15]), float(frames[-1]), float(own[15]), float(slid[15]))
                yield row(nodes, edges, width, page.stat().st_size // 1000, *times)


def scans() -> Lines:
    """## Whitening's scan, in scans of one position after the other

    Forward and backward, gradients of both inputs; the sequential one is differentiated by autograd. Without gradients, each way by itself.
    """
    from tensorlens_tl.algebra import recursion

    yield table(
        "rows, positions, width", "threads", "scan and adjoint", "sequential alone", "chunked", "prefix", "chosen"
    )
    for shape in ((1, 128, 32), (16, 128, 32), (1, 64, 128), (1, 1024, 256), (8, 256, 256), (1, 1024, 768)):
        for threads in THREADS:
            torch.set_num_threads(threads)
            x, weight = torch.randn(shape), 0.5 * torch.randn(shape[-1], shape[-1]) / shape[-1] ** 0.5

            def literal(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                rows = [x[:, 0]]
                for position in range(1, x.shape[1]):
                    rows.append(x[:, position] + rows[-1] @ weight)
                return torch.stack(rows, dim=1)

            def both(scan: Any, x: torch.Tensor = x, weight: torch.Tensor = weight) -> None:
                a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
                scan(a, b).sum().backward()

            ways = {"sequential": recursion.sequential, "chunked": recursion.chunked, "prefix": recursion.prefix}
            calls = {
                "literal": lambda both=both, literal=literal: both(literal),
                "scan": lambda both=both: both(recursion.scan),
                "fastest": lambda x=x, weight=weight: recursion.fastest(x, weight),
                **{name: lambda way=way, x=x, weight=weight: way(x, weight) for name, way in ways.items()},
            }
            seconds = interleaved(calls, 10)
            alone = [seconds[name] / seconds["sequential"] for name in ("sequential", "chunked", "prefix", "fastest")]
            yield row(f"{shape}", threads, seconds["scan"] / seconds["literal"], *alone)


def selective() -> Lines:
    """## Scans of state-space layers, by the number of positions

    A push and a pull of one row and of 16, by position, in those of 64 positions: linear growth is 1. Peak memory beyond the result, in vectors
    of all rows. The widths of Mamba 130M (1,536 channels, 16 states) and of Mamba 2 130M (24 heads of 64 channels, 128 states).
    """
    from tensorlens_tl.algebra import SelectiveScan

    torch.set_num_threads(1)
    lengths = (64, 128, 256, 512, 1024)
    kinds = {"Mamba": (1536, 1, 16, (1536, 16)), "Mamba 2": (24, 64, 128, (24,))}
    yield table(
        "kind", "rows", "positions", "push, ms", "push", "pull", "whole matrix, MB", "peak, MB", "peak ÷ vectors"
    )
    for kind, (heads, width, states, rates) in kinds.items():
        for rows, rounds in ((1, 20), (16, 4)):
            calls: dict[str, Callable[[], Any]] = {}
            for pos in lengths:
                held = torch.rand(1, pos, heads), -torch.rand(rates), *torch.randn(2, 1, pos, 1, states)
                scan = SelectiveScan(*held, head_dim=width)
                x = torch.randn(rows, 1, pos, heads * width)
                calls[f"push {pos}"] = lambda scan=scan, x=x: scan.push(x)
                calls[f"pull {pos}"] = lambda scan=scan, x=x: scan.pull(x)
            seconds = interleaved(calls, rounds)
            for pos in lengths:
                with Allocations() as memory:
                    made = calls[f"push {pos}"]()
                size = made.numel() * made.element_size()
                growth = [seconds[f"{way} {pos}"] / seconds[f"{way} 64"] * 64 / pos for way in ("push", "pull")]
                beyond, whole = memory.peak - size, 4 * heads * pos**2
                megabytes = (f"{number / 1e6:.0f}" for number in (whole, beyond))
                yield row(kind, rows, pos, 1000 * seconds[f"push {pos}"], *growth, *megabytes, beyond / size)


def whitened() -> Lines:
    """## Whitened models, in times of the same model without

    A step is forward, backward and AdamW, over 16 rows of 128 tokens (GPT-2 small's shape: 4 layers, 1 row). The whitened model holds twice
    d_model² more weights a block. Freezing and target maps are of 64 tokens, whitening started at the identity.
    """
    yield table("shape", "threads", "parameters", "training step", "forward", "freeze", "target")
    for threads in THREADS:
        torch.set_num_threads(threads)
        for make, rows in ((small_neox, 16), (bundled, 16), (lambda: gpt2_small(layers=4), 1)):
            plain, changed = make(), make()
            tlens.whiten(changed.model)
            ids, tokens, calls = plain.tokens(64), plain.tokens(128, rows), {}
            for name, shape in (("plain", plain), ("whitened", changed)):
                if shape.model.cfg.d_vocab < 1000:
                    ids, tokens = ids % shape.model.cfg.d_vocab, tokens % shape.model.cfg.d_vocab
                optimiser = torch.optim.AdamW(shape.model.parameters(), lr=1e-5)
                op = tlens.freeze(shape.model, ids).operator()

                def step(model: Any = shape.model, optimiser: Any = optimiser, tokens: torch.Tensor = tokens) -> None:
                    optimiser.zero_grad(set_to_none=True)
                    model(tokens, return_type="loss").backward()
                    optimiser.step()

                def forward(model: Any = shape.model, ids: torch.Tensor = ids) -> None:
                    with torch.no_grad():
                        model(ids)

                calls[f"{name}, freeze"] = lambda model=shape.model, ids=ids: tlens.freeze(model, ids)
                calls[f"{name}, target"] = lambda op=op: op.map.pull(op.x[None])
                calls[f"{name}, forward"] = forward
                calls[f"{name}, step"] = step
            for shape in (plain, changed):  # what a target costs needs weights that stay
                shape.model.requires_grad_(True)
            seconds = interleaved({name: call for name, call in calls.items() if not name.endswith("step")}, 10)
            seconds |= interleaved({name: call for name, call in calls.items() if name.endswith("step")}, 5)
            sizes = [sum(p.numel() for p in shape.model.parameters()) for shape in (changed, plain)]
            kinds = ("step", "forward", "freeze", "target")
            ratios = [seconds[f"whitened, {kind}"] / seconds[f"plain, {kind}"] for kind in kinds]
            yield row(plain.name, threads, sizes[0] / sizes[1], *ratios)


def profile() -> Lines:
    """## Where the time of the slowest operation goes: the exact norm slice, four layers of GPT-2 small's shape, 64 tokens"""
    torch.set_num_threads(THREADS[-1])
    shape = gpt2_small(layers=4)
    op = tlens.freeze(shape.model, shape.tokens(64)).operator()
    op.norm(probes=32)
    with torch.profiler.profile() as measured:
        op.norm()
    own = {event.key: event.self_cpu_time_total for event in measured.key_averages()}
    whole = sum(own.values())
    matrix = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear")
    yield table("operation", "share of the time")
    yield row("matrix products", f"{sum(own.get(name, 0) for name in matrix) / whole:.1%}")
    others = sorted(((name, time) for name, time in own.items() if name not in matrix), key=lambda item: -item[1])[:5]
    for name, time in others:
        yield row(f"`{name}`", f"{time / whole:.1%}")


def imports() -> Lines:
    """## Import time, in imports of TransformerLens

    Fresh interpreters, minima of five. The first result is freezing and attributing one sentence on the bundled model, after both imports.
    """
    first = "tlens.attribute(tlens.freeze(tlens.load_demo_model(), 'Return the value of the'))"
    code = {
        "import transformer_lens": "import transformer_lens",
        "import tensorlens_tl": "import tensorlens_tl",
        "import tensorlens_tl, and a first result": f"import tensorlens_tl as tlens; {first}",
    }
    seconds = interleaved(
        {name: lambda text=text: run([sys.executable, "-c", text], check=True) for name, text in code.items()}, 5
    )
    yield table("what", "seconds", "imports of TransformerLens")
    for name in code:
        yield row(name, seconds[name], seconds[name] / seconds["import transformer_lens"])


def generated() -> Lines:
    """## Generated text: 96 tokens of prompt, 32 generated, in forwards

    What freezing the whole text does not include. "Matrix" is divided by the 32 tokens: in forwards per token. Hops are counted from the matrix, which
    they need once.
    """
    from tensorlens_tl.generation import freeze_generation

    yield table(
        "shape", "threads", "forward, ms", "its share of the product rate", "span", "matrix ÷ 32", "all hops of a span"
    )
    for shape in (gpt2_small(), llama_160m()):
        ids = shape.tokens(128)
        text = freeze_generation(shape.model, ids[:, :96], continuation=ids[0, 96:])
        for threads in THREADS:
            torch.set_num_threads(threads)

            def matrix(text: Any = text) -> None:
                text._links.clear()
                text.attribute()

            text.attribute()
            calls = {
                "forward": lambda shape=shape, ids=ids: shape.forward(ids),
                "hops": lambda text=text: text.attribute(span="all", hops="all"),
                "span": lambda text=text: text.attribute(span="all"),
                "matrix": matrix,
            }
            seconds, _, share = beside_a_product(calls, 3, shape.d_model, shape.flops(128))
            if share < LEAST_SHARE:
                yield row(shape.name, threads, f"discarded: {share:.0%} of the product rate", *[""] * 4)
                continue
            base = seconds["forward"]
            ratios = (seconds["span"] / base, seconds["matrix"] / base / 32, (seconds["hops"] - seconds["span"]) / base)
            yield row(shape.name, threads, 1000 * base, f"{share:.0%}", *ratios)


def flashtrace_of(shape: Shape, ids: torch.Tensor) -> Any:
    """FlashTrace around a Hugging Face model with the weights of a Llama-like shape."""
    from flashtrace.attribution import LLMIFRAttribution
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    config = shape.model.original_model.config
    _, module = LlamaForCausalLM(config), LlamaForCausalLM(config).eval()  # drawn as the shape draws its own
    with torch.no_grad():
        assert torch.allclose(module(ids).logits, shape.model(ids), atol=1e-3)
    return LLMIFRAttribution(module, None, show_progress=False)


def routes() -> Lines:
    """## Information flow routes of all queries, 128 tokens, in forwards

    From token ids to scores, freezing and proof included, the same random Llama of 160M parameters, float32, one thread. FlashTrace adds up attention's edges over layers, as
    `aggregate="sum"` does; the product follows them to the input tokens. "Difference" is the largest one from FlashTrace's scores, in shares of its largest score.
    """
    try:
        from flashtrace.core import compute_ifr_for_all_positions
    except ImportError:
        yield "Not measured: flashtrace is not installed here."
        return
    torch.set_num_threads(1)
    shape = llama_160m()
    ids = shape.tokens(128)
    peer = flashtrace_of(shape, ids)

    @torch.no_grad()
    def theirs() -> Any:
        cache, attentions, metadata, weights = peer._capture_model_state(ids, torch.ones_like(ids))
        asked: dict[str, Any] = {"params": peer._build_ifr_params(metadata, 128), "rotary_emb": metadata.rotary_emb}
        return compute_ifr_for_all_positions(cache, attentions, weights, **asked).token_importance_matrix

    def ours(method: str, **options: Any) -> Any:
        return tlens.attribute(shape.model, ids, method=method, **options).scores[0]

    calls = {
        "FlashTrace": theirs,
        '`ifr`, `aggregate="sum"`': lambda: ours("ifr", aggregate="sum"),
        "`ifr`": lambda: ours("ifr"),
        "`alti`": lambda: ours("alti"),
        "`alti-logit`, one query": lambda: ours("alti-logit", target=5),
        "`alti-logit`, every query": lambda: ours("alti-logit", target=5, query="all"),
    }
    seconds = interleaved({"forward": lambda: shape.forward(ids), **calls}, 2)
    yield table("what", "forwards", "seconds", "peak, MB", "difference")
    expected = theirs()
    for name, call in calls.items():
        with Allocations() as memory:
            made = call()
        off = f"{float((made - expected).abs().max() / expected.max()):.0e}" if "sum" in name else ""
        yield row(name, seconds[name] / seconds["forward"], seconds[name], f"{memory.peak / 1e6:.0f}", off)


def data_sets() -> Lines:
    """## Rows of a data set: how many a second, and how much memory

    2,000 rows of held-out text, 16 to 79 tokens long, on the bundled model; and 200 of them on a random GPT-2 of its shape, beside inseq. Each
    candidate has processes of its own, in turn; model and libraries are loaded before. Memory is what the work adds to them, and how much more
    its second half needed at most than its first.
    """
    if not Path("/proc/self/statm").is_file():
        yield "Not measured: resident memory is read from /proc."
        return
    yield table("model", "what", "rows", "rows/s", "÷ plain forward's", "memory, MB", "more in the second half, MB")
    for *cells, peak, grown in measure_data_sets():
        yield row(*cells, f"{peak:.0f}", f"{grown:.0f}")
    if not os.environ.get("INSEQ_PYTHON"):
        yield "\ninseq was not measured: `INSEQ_PYTHON` names no interpreter that has it."


def flashtrace() -> Lines:
    """## Generated text beside FlashTrace

    One span of 32 generated tokens after 96, both from token ids to scores, the same random Llama of 160M parameters, float32. Conservation error: of FlashTrace, how far what lands
    on the prompt and what is left on generated tokens after its hops are from what it began with, its own scores at hop 0; of ours, how far scores and bias are from the model's logits.
    """
    try:
        from flashtrace.core import compute_ifr_sentence_aggregate, compute_multi_hop_ifr
    except ImportError:
        yield "Not measured: flashtrace is not installed here."
        return
    from tensorlens_tl.generation import freeze_generation

    shape = llama_160m()
    ids, prompt = shape.tokens(128), 96
    peer = flashtrace_of(shape, ids)

    @torch.no_grad()
    def theirs(hops: int = 0) -> Any:
        cache, attentions, metadata, weights = peer._capture_model_state(ids, torch.ones_like(ids))
        asked: dict[str, Any] = {
            "sink_start": prompt, "sink_end": 127, "cache": cache, "attentions": attentions, "weight_pack": weights,
            "params": peer._build_ifr_params(metadata, 128), "rotary_emb": metadata.rotary_emb,
        }  # fmt: skip
        if not hops:
            return compute_ifr_sentence_aggregate(**asked)
        return compute_multi_hop_ifr(thinking_span=(prompt, 127), n_hops=hops, **asked)

    def ours(hops: Any = 0, verify: bool = True) -> Any:
        text = freeze_generation(shape.model, ids[:, :prompt], continuation=ids[0, prompt:], verify=verify)
        return text.attribute(span="all", hops=hops)

    yield table("what", "threads", "FlashTrace, s", "ours, s", "ratio", "FlashTrace's conservation error", "ours")
    for threads in THREADS:
        torch.set_num_threads(threads)
        for hops in (0, 2):
            seconds = interleaved({"theirs": lambda hops=hops: theirs(hops), "ours": lambda hops=hops: ours(hops)}, 2)
            began, error = float(theirs().token_importance_total.sum()), "no total but its own"
            if hops:
                found = theirs(hops)
                ended = float(found.observation["sum"].sum()) + found.thinking_ratios[-1] * began
                error = f"{abs(ended - began) / began:.1e}"
            cells = seconds["theirs"], seconds["ours"], seconds["theirs"] / seconds["ours"]
            yield row(f"a span, {hops} hops", threads, *cells, error, f"{float(ours(hops).gap):.1e}")


def everything_included() -> Lines:
    """## Freezing, questions and generated text from token ids to scores, in forwards"""
    yield from measure_generated()[2:]


def live_changes() -> Lines:
    """## The live model with something changed, in forwards"""
    yield from measure_live()[2:]


def peers() -> Lines:
    """## Rows of a data set beside other libraries"""
    yield from list(measure_peers())[2:]


def differences() -> Lines:
    """## The difference of two runs, in forwards

    Six blocks of GPT-2 small's shape, two prompts of 128 tokens, one thread, processor time. Edges and nodes by "difference" build and prove it each time.
    `python benchmarks/difference.py OTHER` measures another checkout in turn.
    """
    (found,) = measure_difference(str(Path(__file__).parents[1]))
    yield table("what", "forwards")
    for name, value in found.items():
        yield row(name, value)


SECTIONS = (
    imports,
    costs,
    batches_of_prompts,
    experts,
    norm_slice,
    jacobians,
    probes,
    bounded,
    growth,
    long_prompts,
    batches,
    methods,
    perturbing,
    rules,
    composition,
    graphs,
    clicks,
    scans,
    selective,
    whitened,
    generated,
    routes,
    flashtrace,
    everything_included,
    live_changes,
    differences,
    data_sets,
    peers,
    profile,
)


def main() -> None:
    chosen = [section for section in SECTIONS if not sys.argv[1:] or section.__name__ in sys.argv[1:]]
    text = [
        "# Results",
        "",
        "Written by `make bench`. " + " ".join((__doc__ or "").split("\n\n")[1].split()),
        "",
        f"{date.today()} · {platform.machine()}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f} at the start · "
        f"Python {platform.python_version()} · torch {torch.__version__} · transformer-lens {version('transformer-lens')} · float32",
    ]
    for section in chosen:
        lines = (section.__doc__ or "").strip().splitlines()
        text += ["", lines[0], "", *([" ".join(line.strip() for line in lines[2:]), ""] if len(lines) > 2 else [])]
        print("\n".join(text[-4:]), flush=True)
        for line in section():
            text.append(line)
            print(line, flush=True)
    text.append(f"\nLoad average at the end: {os.getloadavg()[0]:.2f}.")
    if not sys.argv[1:]:
        RESULTS.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
