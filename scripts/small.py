"""What the training scripts of the smallest models share: a loop with a falling rate, arguments, and a report."""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scripts.train import optimiser_for, step


def learn(
    model: nn.Module, steps: int, loss_of: Callable[[], Tensor], *, rate: float, decay: float, every: int
) -> None:
    """Train in place on fresh losses; the rate rises over 100 steps and falls as a cosine."""
    optimiser = optimiser_for(model, rate, decay)
    started = time.time()
    model.train()
    for number in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, number / 100) * (0.02 + 0.49 * (1 + math.cos(math.pi * number / steps)))
        loss = loss_of()
        step(model, optimiser, loss)
        if number % every == 0 or number == steps:
            print(f"{number:5d}  loss {loss.item():.4f}  {time.time() - started:.0f} s", flush=True)
    model.eval()


def read_arguments(description: str | None, steps: int, arguments: list[str] | None) -> argparse.Namespace:
    """The folder, the seed and the number of steps."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=steps)
    return parser.parse_args(arguments)


def report(args: argparse.Namespace, model: nn.Module, started: float, **measured: float) -> None:
    """Write and print what was trained, with which settings, and what was measured."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": args.seed,
        "steps": args.steps,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        **{name: round(value, 4) for name, value in measured.items()},
        "minutes": round((time.time() - started) / 60, 1),
    }
    text = json.dumps(facts, indent=2)
    (args.out / "training.json").write_text(text + "\n", encoding="utf-8")
    print(text)
