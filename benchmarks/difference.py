"""What the difference of two runs costs, in forwards of the same run and in frozen pulls.

Six blocks of GPT-2 small's shape with random weights, two prompts of 128 tokens, one thread, float32. Processor time of
that thread, so that what else a machine runs does not count; candidates are interleaved, and minima taken.

    python benchmarks/difference.py               # this checkout
    python benchmarks/difference.py OTHER         # and another one (a git worktree), in turn
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 5
PROCESSES = 2

COLUMNS = {
    "freeze": "freezing one run",
    "frozen pull": "a frozen target's pull",
    "difference": "building and proving the difference",
    "difference pull": "its target's pull",
    "edges, frozen": "edges, frozen",
    "edges, difference": "edges, difference",
    "edges, integrated": "edges, EAP-IG of 5 steps",
    "nodes, frozen": "nodes, frozen",
    "nodes, difference": "nodes, difference",
    "nodes, integrated": "nodes, integrated of 5 steps",
}


def seconds() -> dict[str, float]:
    """Of each candidate, with the package that is imported here."""
    import torch
    from shapes import gpt2_small
    from timing import interleaved

    import tensorlens_tl as tlens
    from tensorlens_tl import circuits

    torch.set_num_threads(1)
    shape = gpt2_small(layers=6)
    prompts = torch.randint(5, 1000, (2, 128), generator=torch.Generator().manual_seed(0))
    a, b = (tlens.freeze(shape.model, prompt[None]) for prompt in prompts)
    change = tlens.difference(a, b)
    candidates = {
        "forward": lambda: shape.forward(prompts[:1]),
        "freeze": lambda: tlens.freeze(shape.model, prompts[:1]),
        "frozen pull": lambda: a.operator().target(5),
        "difference": lambda: tlens.difference(a, b),
        "difference pull": lambda: change.operator().target(5),
    }
    for method in ("frozen", "difference", "integrated"):
        candidates[f"edges, {method}"] = lambda method=method: circuits.edge_scores(a, b, 5, method=method)
        candidates[f"nodes, {method}"] = lambda method=method: circuits.patch_scores(a, b, 5, method=method)
    return interleaved(candidates, ROUNDS, time.thread_time)


def ratios(times: dict[str, float]) -> dict[str, float]:
    """In forwards; and how many frozen pulls a difference's target costs beyond its two runs."""
    found = {column: times[name] / times["forward"] for name, column in COLUMNS.items()}
    whole = times["difference"] + times["difference pull"]
    return found | {"difference, proof and pull, in frozen pulls": whole / times["frozen pull"]}


def measure(*checkouts: str) -> list[dict[str, float]]:
    """The ratios of each checkout of this repository, in processes that take turns."""
    here = Path(__file__).resolve()
    best: list[dict[str, float]] = [{} for _ in checkouts]
    for _ in range(PROCESSES):
        for number, checkout in enumerate(checkouts):
            environment = {**os.environ, "PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, str(here), "--seconds"]
            out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            for name, value in json.loads(out.splitlines()[-1]).items():
                best[number][name] = min(value, best[number].get(name, float("inf")))
    return [ratios(times) for times in best]


def main() -> None:
    if sys.argv[1:] == ["--seconds"]:
        print(json.dumps(seconds()))
        return
    found = measure(str(Path(__file__).parents[1]), *sys.argv[1:])
    for name in found[0]:
        print(f"{name:45}", *(f"{of[name]:8.2f}" for of in found))


if __name__ == "__main__":
    main()
