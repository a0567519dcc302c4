"""A script's times with the package of this checkout, and of others (git worktrees), in processes that take turns."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import run
from typing import Any

HERE = str(Path(__file__).parents[1])

Times = dict[str, float]


def in_turn(script: str, *others: str, processes: int = 1) -> list[Times]:
    """Seconds of each candidate: the least of some processes of this checkout, and of each other one."""
    checkouts = [HERE, *others]
    best: list[Times] = [{} for _ in checkouts]
    for _ in range(processes):
        for times, checkout in zip(best, checkouts, strict=True):
            environment = {**os.environ, "PYTHONPATH": checkout, "OMP_NUM_THREADS": "1"}
            for name, value in json_of([sys.executable, script, "--seconds"], environment).items():
                times[name] = min(value, times.get(name, float("inf")))
    return best


def json_of(command: list[str], environment: dict[str, str]) -> Any:
    """What the last line that a process prints stands for, as JSON."""
    out = run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def main(script: str, seconds: Callable[[], Times], ratios: Callable[[Times], Times], processes: int = 1) -> None:
    """What such a script does: print the seconds of its own process, or the ratios of all checkouts side by side."""
    if sys.argv[1:] == ["--seconds"]:
        print(json.dumps(seconds()))
        return
    columns = [ratios(times) for times in in_turn(script, *sys.argv[1:], processes=processes)]
    for name in columns[0]:
        print(f"{name:85}", *(f"{column[name]:8.2f}" for column in columns))
