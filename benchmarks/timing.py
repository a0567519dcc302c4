"""How things are timed: interleaved, minima, beside a matrix product; and what a run is discarded for."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

THREADS = [1, 2] if (os.cpu_count() or 1) >= 2 else [1]

LEAST_SHARE = 0.4
"""A run counts only if its plain forward reaches this share of the matrix-product rate measured beside it."""


def interleaved(
    candidates: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of each candidate, minima over interleaved rounds after one warm-up; 0 rounds time one run, cold."""
    best = dict.fromkeys(candidates, float("inf"))
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = clock()
            run()
            if number or not rounds:
                best[name] = min(best[name], clock() - start)
    return best


def product(rows: int, inner: int, outer: int) -> tuple[Callable[[], Any], float]:
    """One large matrix product, and its floating-point operations."""
    a, b = torch.randn(rows, inner), torch.randn(inner, outer)
    return lambda: a @ b, 2.0 * rows * inner * outer


def beside_a_product(
    candidates: dict[str, Callable[[], Any]], rounds: int, width: int, forward_flops: float
) -> tuple[dict[str, float], float, float]:
    """Times, the matrix-product rate of the same run, and the share of it that ``"forward"`` reached.

    A run below `LEAST_SHARE` is measured once more: something else was using the machine.
    """
    multiply, flops = product(1024, width, 4 * width)
    share, seconds, rate = 0.0, {}, 0.0
    for _ in range(2):
        seconds = interleaved({"product": multiply, **candidates}, rounds)
        rate = flops / seconds.pop("product")
        share = forward_flops / seconds["forward"] / rate
        if share >= LEAST_SHARE:
            break
    return seconds, rate, share
