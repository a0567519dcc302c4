"""Writes `docs/_static/large.csv` (`make large`): what works with which.

Every cell is a run on a tiny random Llama in float64: scores are compared with those of the pass in memory, and the
weights that accelerate brings in are counted. A cell says ✓, or the first sentence of the refusal.
"""

import csv
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch

import tensorlens_tl as tlens
from scripts.choose import built_in
from tensorlens_tl.models.offload import offload_hooks, whole
from tensorlens_tl.testing import tiny_model

TABLE = Path(__file__).parent.parent / "docs" / "_static" / "large.csv"
"""A table of docs/howto/3_large_models_and_long_prompts.md."""
MODEL = "bridge/llama"
TOKENS = torch.arange(3, 9)[None]
WAYS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "weights offloaded": {},
    "patterns recomputed": {"patterns": "recompute"},
}
"""Options of `freeze`."""
ALLOWED = {"in memory": 0.0, "weights offloaded": 1e-9, "patterns recomputed": 1e-6}
"""How far scores may be from those in memory; this model takes its softmax in float32."""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {'`relp`, `attention="live"`': ("relp", {"attention": "live"})}
"""Further rows: a method with options that change what it runs."""


def rows() -> dict[str, tuple[str, dict[str, Any]]]:
    """Of each row its method and options."""
    return {f"`{name}`": (name, {}) for name in built_in()} | OTHERS


def models(folder: str) -> dict[str, Any]:
    """The model of every way."""
    every: dict[str, Any] = {way: tiny_model(MODEL) for way in WAYS}
    away = every["weights offloaded"].original_model
    accelerate.disk_offload(away, folder, execution_device=torch.device("cpu"))
    return every


@contextmanager
def counted(model: Any) -> Iterator[Counter[Any]]:
    """How often the matrices of each block's linear layers are brought in, inside."""
    reads: Counter[Any] = Counter()
    blocks = [module for block in model.blocks for module in whole(block)]
    hooks = [hook for module in blocks for hook in offload_hooks(module)]

    def counting(before: Callable[..., Any]) -> Callable[..., Any]:
        def pre_forward(module: Any, *arguments: Any, **options: Any) -> Any:
            if isinstance(module, torch.nn.Linear):
                reads[module] += 1
            return before(module, *arguments, **options)

        return pre_forward

    for hook in hooks:
        hook.pre_forward = counting(hook.pre_forward)
    try:
        yield reads
    finally:
        for hook in hooks:
            del hook.pre_forward


def scores(frozen: Any, method: str, options: dict[str, Any]) -> torch.Tensor:
    """What a method gives of a pass; a target where it takes one."""
    known = tlens.get_method(method).options
    given = {name: value for name, value in {"target": 5, "steps": 4}.items() if name in known}
    return tlens.attribute(frozen, method=method, **given, **options).scores


def cells(every: dict[str, Any], method: str, options: dict[str, Any]) -> dict[str, str]:
    """One row of the table, of passes that nothing else has read.

    Raises:
        AssertionError: scores differ from those in memory.
    """
    row: dict[str, str] = {}
    expected: torch.Tensor | None = None
    for way, model in every.items():
        each = tlens.freeze(model, TOKENS, **WAYS[way])
        try:
            scores(each, method, options)  # what is proved once is proved here
            with counted(model) as reads:
                result = scores(each, method, options)
        except tlens.UnsupportedModelError as refusal:
            row[way] = str(refusal).removeprefix(f"{method}: ").split(". ", 1)[0].rstrip(".")
            continue
        row[way] = "✓"
        if reads:
            row[way] = f"✓ {max(reads.values())}"
        if expected is None:
            expected = result
        error = float((result - expected).abs().max())
        assert error <= ALLOWED[way], (method, way, error)
    return row


def table(names: Iterable[str]) -> list[list[str]]:
    """Some rows, below their head."""
    lines = [["method", *WAYS]]
    with tempfile.TemporaryDirectory() as folder:
        every = models(folder)
        for name in names:
            method, options = rows()[name]
            lines.append([name, *cells(every, method, options).values()])
    return lines


def main() -> None:
    """Write the table."""
    lines = table(rows())
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


if __name__ == "__main__":
    main()
