"""What questions to the live model cost, in forwards of the same run: live effects, patching, methods that perturb.

64 tokens, one thread, float32; GPT-2 small's shape with random weights, and the bundled model. Processor time of that
thread, so that what else a machine runs does not count; candidates are interleaved, and minima taken.

    python benchmarks/live.py               # prints the section
    python benchmarks/live.py --write       # and puts it into RESULTS.md
    python benchmarks/live.py OTHER         # this checkout and another one (a git worktree), in turn
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "RESULTS.md"
HEADING = "## The live model with something changed, in forwards"
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


def measure(*checkouts: str) -> list[dict[str, float]]:
    """In forwards, of each checkout of this repository, in processes that take turns."""
    here = Path(__file__).resolve()
    found: list[dict[str, float]] = []
    for checkout in checkouts:
        environment = {**os.environ, "PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(here), "--seconds"]
        out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        found.append(forwards(json.loads(out.splitlines()[-1])))
    return found


def forwards(times: dict[str, float]) -> dict[str, float]:
    """Times in forwards of their model."""
    return {name: value / times[f"{name.split('/')[0]}/forward"] for name, value in times.items()}


def changes(shape: str, question: str) -> int:
    """How many changes a question tries: nodes, or tokens."""
    nodes = {"GPT-2 small": 12 * (12 + 1), "bundled": 4 * (4 + 1)}[shape]
    return {"effects": nodes, "patching": nodes + 1}.get(question, TOKENS)


def section() -> list[str]:
    """The section of RESULTS.md, by lines."""
    (found,) = measure(str(Path(__file__).parents[1]))
    lines = [
        HEADING,
        "",
        f"{TOKENS} tokens, one thread, processor time, forwards of the blocks in the same run; the pass is frozen before. "
        "Each change by itself would take one forward and more: `python benchmarks/live.py OTHER` measures another "
        f"checkout in turn. Measured on {date.today()}.",
        "",
        "| shape | question | changes | forwards | forwards ÷ changes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, value in found.items():
        shape, question = name.split("/")
        if question in QUESTIONS:
            count = changes(shape, question)
            lines.append(f"| {shape} | {QUESTIONS[question]} | {count} | {value:.2f} | {value / count:.2f} |")
    return [*lines, ""]


def main() -> None:
    if sys.argv[1:] == ["--seconds"]:
        print(json.dumps(seconds()))
        return
    if sys.argv[1:] not in ([], ["--write"]):
        found = measure(str(Path(__file__).parents[1]), *sys.argv[1:])
        for name in found[0]:
            print(f"{name:30}", *(f"{of[name]:8.2f}" for of in found))
        return
    lines = section()
    print("\n".join(lines))
    if "--write" in sys.argv[1:]:
        before, _, after = RESULTS.read_text(encoding="utf-8").partition(f"{HEADING}\n")
        following = after[after.index("\n## ") + 1 :] if "\n## " in after else ""
        RESULTS.write_text(before.rstrip() + "\n\n" + "\n".join(lines) + following, encoding="utf-8")


if __name__ == "__main__":
    main()
