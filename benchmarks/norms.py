"""What exact and estimated norms of the operator cost: sections of `RESULTS.md`."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from page import Lines, row, table
from shapes import Shape, bert_base, bundled, gpt2_small, llama_160m
from timing import LEAST_SHARE, THREADS, beside_a_product, interleaved

import tensorlens_tl as tlens
from tensorlens_tl.algebra.memory import in_bytes
from tensorlens_tl.algebra.positions import RowPositions, place
from tensorlens_tl.testing import Allocations


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

    Shares are relative to the speed of one large matrix product in the same run. "Pull" is a plain pull of every
    position, and its share counts those operations; "slice" is `op.norm()`, which skips positions that contribute
    nothing. Autograd differentiates the model frozen by hooks in batches of rows, with the best batch size. We time 48
    of the 768 rows, because all times are linear in the number of rows.
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

    Measured on four layers of GPT-2 small's shape, 64 tokens and all 768 rows. The peak counts the tensors that the
    call allocates.
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

    The table has the relative error of the norm, and how often the stated 95 % interval contains the exact norm, over
    100 seeds and all source tokens of the last query.
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

    Peak bytes allocated beyond the result, divided by the bound, for `op.norm()` of one query and `op.contributions()`
    of all queries; two layers of GPT-2 small's shape, 128 tokens.
    """
    torch.set_num_threads(THREADS[-1])
    shape = gpt2_small(layers=2)
    op = tlens.freeze(shape.model, shape.tokens(128)).operator()
    yield table("bound", "norm", "contributions", "largest difference to the smallest bound's numbers")
    first: list[torch.Tensor] = []
    for bound in ("64MB", "256MB", "1GB"):
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
