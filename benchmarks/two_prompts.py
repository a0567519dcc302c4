"""Scores of nodes and edges between two prompts against patching: ``python benchmarks/two_prompts.py`` writes the tables
of docs/howto/26_evaluate_circuits.md, each a CSV file.

float64, TransformerBridge; 64 pairs of recall and 32 of induction, of which those count that the model answers.
"""

import csv
import sys
import time
from pathlib import Path
from typing import Any

import torch

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.evaluate.checks import spearman
from tensorlens_tl.evaluate.patching import EDGE_ROWS, PairWork

TABLES = Path(__file__).parent.parent / "docs" / "_static"
PAIRS = {"recall": 64, "induction": 32}
CHANGES = ("source", "question")
COLUMNS = [f"{task}, {change}" for task in PAIRS for change in CHANGES]
METHODS = [name for name in EDGE_ROWS if name != "patching"]
LARGEST = 0.1
"""The share of edges, by the size of their patching score, that are called the largest."""

Rows = dict[str, list[torch.Tensor]]
"""Values of every prompt, `[prompt]`, by row of a table: one for each column."""


def path(name: str) -> Path:
    """The file of a table."""
    return TABLES / f"circuits-{name.replace(' ', '-')}.csv"


def cell(values: torch.Tensor, *, best: bool = False) -> str:
    """A mean over prompts with its bootstrap interval."""
    low, high = evaluate.bootstrap_interval(values)
    mean = f"{float(values.nanmean()):.3g}"
    if best:
        mean = f"**{mean}**"
    return f"{mean} [{float(low):.3g}, {float(high):.3g}]"


def table(blocks: dict[str, tuple[Rows, bool | None]]) -> list[list[str]]:
    """A table of blocks of rows, the best of each block in bold; its flag says whether higher is better, or neither."""
    lines = [["", *COLUMNS]]
    for prefix, (rows, higher) in blocks.items():
        means = {name: [float(values.nanmean()) for values in columns] for name, columns in rows.items()}
        for name, columns in rows.items():
            cells = []
            for number, values in enumerate(columns):
                others = [means[other][number] for other in rows]
                extreme = None
                if higher is not None:
                    extreme = max(others) if higher else min(others)
                cells.append(cell(values, best=means[name][number] == extreme))
            label = "random scores" if name == "random" else f"`{name}`"
            lines.append([f"{prefix} {label}", *cells])
    return lines


def tasks() -> list[tuple[Any, Any]]:
    """A model and its pairs of prompts for every column."""
    recall = tlens.load_demo_model("recall", torch.float64, kind="bridge")
    language = tlens.load_demo_model(dtype=torch.float64, kind="bridge")
    of_recall = evaluate.recall(PAIRS["recall"])
    of_induction = evaluate.induction(PAIRS["induction"], d_vocab=language.cfg.d_vocab)
    return [
        (model, evaluate.prompt_pairs(task, change))
        for model, task in ((recall, of_recall), (language, of_induction))
        for change in CHANGES
    ]


def by_method(result: evaluate.Evaluation, metric: str, rows: Rows) -> None:
    """Add a column: one metric of every method."""
    values = result.values[list(result.metrics).index(metric)]
    for name, of_prompts in zip(result.methods, values, strict=True):
        rows.setdefault(name, []).append(of_prompts)


def both_ends(model: Any, pairs: evaluate.PromptPairs) -> dict[str, dict[str, torch.Tensor]]:
    """Correlations by rank over the edges: with patching at the clean prompt, the largest edges and the others apart,
    and with the mean of patching at both prompts; and the others' share of all that patching finds.

    At the corrupted prompt an edge is patched with its clean value; its score there is what the number gains.
    """
    seen: dict[str, dict[str, list[torch.Tensor]]] = {}

    def note(what: str, method: str, value: torch.Tensor) -> None:
        seen.setdefault(what, {}).setdefault(method, []).append(value)

    for part in PairWork(model, pairs, only_correct=True).parts():
        asked = {"target": part.target, "minus": part.minus}

        def scores(method: str, swapped: bool = False, part=part, asked=asked, **options: Any) -> torch.Tensor:
            passes = (part.corrupted, part.clean) if swapped else (part.clean, part.corrupted)
            edges = circuits.edge_scores(*passes, **asked, method=method, **options)
            found = edges.scores[:, edges.exists].double()
            return -found if swapped else found

        patched = scores("patching")
        at_both = (patched + scores("patching", swapped=True)) / 2
        gradient = scores("gradient")
        methods = {
            "gradient": gradient,
            "gradient, mean of both ends": (gradient + scores("gradient", swapped=True)) / 2,
            "integrated-gradients": scores("integrated-gradients"),
            "integrated-gradients, left": scores("integrated-gradients", points="left"),
            "difference": scores("difference"),
        }
        sizes = patched.abs()
        threshold = sizes.quantile(1 - LARGEST, dim=-1, keepdim=True)
        largest = sizes >= threshold
        everything = torch.ones_like(largest)
        note("share", "others", (sizes * ~largest).sum(-1) / sizes.sum(-1))
        for name, found in methods.items():
            for what, truth, where in (
                ("largest", patched, largest),
                ("others", patched, ~largest),
                ("both ends", at_both, everything),
            ):
                note(what, name, spearman(found[None], truth[None], where)[0])
    return {what: {name: torch.cat(values) for name, values in rows.items()} for what, rows in seen.items()}


def measured() -> dict[str, list[list[str]]]:
    """Every table by its name."""
    nodes: Rows = {}
    edges: Rows = {}
    ranks: Rows = {}
    cpr: Rows = {}
    cmd: Rows = {}
    parts: dict[str, Rows] = {"largest": {}, "others": {}, "both ends": {}, "share": {}}
    for model, pairs in tasks():
        started = time.time()
        by_method(evaluate.patching_agreement(model, pairs, METHODS), "pearson", nodes)
        by_edge = evaluate.patching_agreement(model, pairs, METHODS, by="edge")
        by_method(by_edge, "pearson", edges)
        by_method(by_edge, "spearman", ranks)
        chosen = evaluate.circuit_faithfulness(model, pairs, [*METHODS, "random"])
        by_method(chosen, "cpr", cpr)
        by_method(chosen, "cmd", cmd)
        for what, rows in both_ends(model, pairs).items():
            for name, values in rows.items():
                parts[what].setdefault(name, []).append(values)
        print(f"{pairs.name}: {len(by_edge.units)} pairs, {time.time() - started:.0f} s", file=sys.stderr, flush=True)
    small = {
        "largest tenth:": (parts["largest"], True),
        "all others:": (parts["others"], True),
        "patched from both ends:": (parts["both ends"], True),
        "share of the sum of sizes:": (parts["share"], None),
    }
    return {
        "agreement": table({"nodes:": (nodes, True), "edges:": (edges, True)}),
        "circuits": table({"CPR": (cpr, True), "CMD": (cmd, False)}),
        "ranks": table({"edges:": (ranks, True)}),
        "small edges": table(small),
    }


def main() -> None:
    """Write every table."""
    for name, lines in measured().items():
        with path(name).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
