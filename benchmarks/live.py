"""What questions to the live model cost, in forwards of the same run: live effects, patching, methods that perturb.

64 tokens, one thread, float32; GPT-2 small's shape with random weights, and the bundled model. Processor time of that
thread, so that what else a machine runs does not count; candidates are interleaved, and minima taken.

    python benchmarks/live.py               # this checkout
    python benchmarks/live.py OTHER         # and another one (a git worktree), in turn
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 2
PROCESSES = 2
TOKENS = 64

QUESTIONS = {
    "effects": "total effects, `live=True`",
    "patching": 'patch scores, `method="patching"`',
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


def measure(*checkouts: str) -> list[dict[str, float]]:
    """In forwards, of each checkout of this repository, in processes that take turns."""
    here = Path(__file__).resolve()
    best: list[dict[str, float]] = [{} for _ in checkouts]
    for _ in range(PROCESSES):
        for number, checkout in enumerate(checkouts):
            environment = {**os.environ, "PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(here), "--seconds"]
            out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            for name, value in json.loads(out.splitlines()[-1]).items():
                best[number][name] = min(value, best[number].get(name, float("inf")))
    return [forwards(times) for times in best]


def forwards(times: dict[str, float]) -> dict[str, float]:
    """Times in forwards of their model."""
    return {name: value / times[f"{name.split('/')[0]}/forward"] for name, value in times.items()}


def main() -> None:
    if sys.argv[1:] == ["--seconds"]:
        print(json.dumps(seconds()))
        return
    found = measure(str(Path(__file__).parents[1]), *sys.argv[1:])
    for name in found[0]:
        print(f"{name:30}", *(f"{of[name]:8.2f}" for of in found))


if __name__ == "__main__":
    main()
