"""What whitening and state-space layers cost: sections of `RESULTS.md`."""

from collections.abc import Callable
from typing import Any

import torch
from page import Lines, row, table
from shapes import bundled, gpt2_small, small_neox
from timing import THREADS, interleaved

import tensorlens_tl as tlens
from tensorlens_tl.testing import Allocations


def scans() -> Lines:
    """## Whitening's scan, in scans of one position after the other

    Times are for forward and backward passes with gradients of both inputs, where autograd differentiates the
    sequential scan, and for each direction alone without gradients.
    """
    from tensorlens_tl.algebra import recursion

    yield table("rows, positions, width", "threads", "scan and adjoint", "sequential alone", "prefix", "chosen")
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

            ways = {"sequential": recursion.sequential, "prefix": recursion.prefix}
            calls = {
                "literal": lambda both=both, literal=literal: both(literal),
                "scan": lambda both=both: both(recursion.scan),
                "fastest": lambda x=x, weight=weight: recursion.fastest(x, weight),
                **{name: lambda way=way, x=x, weight=weight: way(x, weight) for name, way in ways.items()},
            }
            seconds = interleaved(calls, 10)
            alone = [seconds[name] / seconds["sequential"] for name in ("sequential", "prefix", "fastest")]
            yield row(f"{shape}", threads, seconds["scan"] / seconds["literal"], *alone)


def selective() -> Lines:
    """## Scans of state-space layers, by the number of positions

    Time per position of a push and a pull, of one row and of 16, relative to 64 positions, so that 1 means linear
    growth. Peak memory beyond the result is in vectors of all rows. The widths are those of Mamba 130M (1,536 channels,
    16 states) and Mamba 2 130M (24 heads of 64 channels, 128 states).
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

    A step is a forward pass, a backward pass and an update by AdamW, over 16 rows of 128 tokens (at GPT-2 small's
    shape: 4 layers, 1 row). The whitened model has twice d_model² more weights per block. Freezing and target maps use
    64 tokens, with whitening initialised to the identity.
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
