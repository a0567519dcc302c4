"""What compressing attention costs the bundled models: ``make compression`` writes the tables of docs/howto/7_compress_attention.md.

The cost of tensorly's `partial_tucker` is measured where tensorly is installed, in this environment or on PYTHONPATH.
"""

import resource
import subprocess
import sys
import time
from functools import partial
from typing import Any

import torch
from page import rows, save

import tensorlens_tl as tlens
from tensorlens_tl import compress, demo, evaluate

RATIOS = (1.5, 2, 4, 8)


def rounded(weights: compress.HeadWeights, *, ratio: float) -> compress.Dense:
    """Every number rounded to 32 / ratio bits, with a scale for each matrix of each head: another way to save memory."""
    bits, new = int(32 / ratio), {}
    for letter, matrix in weights.matrices.items():
        step = matrix.abs().amax((1, 2), keepdim=True) / (2 ** (bits - 1) - 1)
        new[letter] = (matrix / step).round() * step
    return compress.Dense.of(weights, new, count=weights.parameters * bits // 32)


METHODS = {
    "Tucker (paper)": {"rule": "paper", "sweeps": 25},
    "Tucker (released layout)": {"rule": "paper", "layout": "released", "sweeps": 25},
    "Tucker, any ranks": {},
    "Tucker, balanced": {"balance": True},
    "Tucker, circuit gauge": {"gauge": "circuit"},
    "Tucker, circuit gauge, balanced": {"gauge": "circuit", "balance": True},
    "LASER": {"method": "laser"},
    "head SVD": {"method": "head-svd"},
    "circuit SVD": {"method": "circuit-svd"},
    "rounding": {"method": rounded},
}
SHAPES = {"GPT-2 small": (768, 64, 4, 12), "Llama-2-7B": (4096, 128, 4, 32)}
RANKS = {"GPT-2 small": (384, 32, 4), "Llama-2-7B": (1024, 32, 4)}


def tasks() -> list[tuple[str, Any, Any]]:
    """Each bundled model, and what it is asked: tokens, and where only some of them count, the answers."""
    language, encoder = tlens.load_demo_model(), tlens.load_demo_model("encoder")
    masked = demo.held_out_prompts(encoder, 256, 48, mask_at=20)
    answers = torch.full_like(masked, -100)
    answers[:, 20] = demo.held_out_prompts(encoder, 256, 48)[:, 20]
    found = [("language", language, demo.held_out_prompts(language, 256, 64))]
    found += [(name, tlens.load_demo_model(name), getattr(evaluate, name)(256)) for name in ("recall", "brackets")]
    return [*found, ("encoder", encoder, (masked, answers))]


def plans(model: Any) -> dict:
    return {
        label: {ratio: partial(compress.plan, model, ratio=ratio, **options) for ratio in RATIOS}
        for label, options in METHODS.items()
    }


def cell(mean: float, low: float, high: float) -> str:
    return f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def table(result: evaluate.Evaluation, metric: str) -> list[str]:
    frame = evaluate.compression_table(result, metric).drop(index="uncompressed")
    lines = ["| method | " + " | ".join(f"÷ {ratio:g}" for ratio in RATIOS) + " |", "| --- " * (len(RATIOS) + 1) + "|"]
    for method in frame.index:
        cells = [cell(*frame.loc[method, f"{ratio:g}"]) for ratio in RATIOS]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def headroom(name: str, model: Any, task: Any) -> list[str]:
    """Many candidates, chosen on a third of the prompts: does any raise accuracy on the others?"""
    layers = range(model.cfg.n_layers)
    candidates = [
        partial(compress.plan, model, layer, ratio=ratio, **options)
        for layer in layers
        for ratio in (1.2, *RATIOS)
        for options in ({"rule": "paper"}, {"gauge": "circuit", "balance": True}, {"method": "laser"})
    ]
    result = evaluate.compression(model, task, {"best": candidates}, choose_by="accuracy")
    gain = result.table("accuracy change").loc["best", "accuracy change"]
    return [f"| {name} | {len(candidates)} | {result.settings['chosen']['best'][0]} | {cell(*gain)} |"]


def paper_tables(name: str, model: Any, task: Any) -> tuple[list[str], list[str]]:
    """The paper's Table IV (one kind of matrix alone, or all together) and Table III (with LASER on the MLPs), all layers."""
    alone = {
        letters: partial(compress.plan, model, ratio=2, rule="paper", matrices=letters)
        for letters in ("Q", "K", "V", "O", "QKVO")
    }
    hybrid = {
        "LASER on the MLPs": partial(compress.plan, model, method=None, mlp=0.5),
        "LASER on both": partial(compress.plan, model, method="laser", ratio=2, mlp=0.5),
        "Tucker (paper) and LASER": partial(compress.plan, model, rule="paper", ratio=2, mlp=0.5),
        "Tucker (both changes) and LASER": partial(
            compress.plan, model, balance=True, gauge="circuit", ratio=2, mlp=0.5
        ),
        "circuit SVD and LASER": partial(compress.plan, model, method="circuit-svd", ratio=2, mlp=0.5),
    }
    made = []
    for plans in (alone, hybrid):
        result = evaluate.compression(model, task, plans)
        frame = result.table("added loss").loc[list(plans)]
        cells = [cell(*frame.loc[label, "added loss"]) for label in plans]
        made.append([f"| {name} | " + " | ".join(cells) + " |"])
        head = ["| model | " + " | ".join(plans) + " |", "| --- " * (len(plans) + 1) + "|"]
        made[-1] = [*head, *made[-1]] if name == "language" else made[-1]
    return made[0], made[1]


def costs() -> list[str]:
    lines = [
        "| layer of | HOSVD, all ranks at once | for given ranks | peak memory | tensorly | times faster |",
        "| --- " * 6 + "|",
    ]
    for name in SHAPES:
        own = subprocess.run([sys.executable, __file__, "--cost", name], capture_output=True, text=True, check=True)
        whole, given, peak, theirs = own.stdout.split()
        times = "" if theirs == "-" else f"{float(theirs) / float(whole):.1f}"
        their = "not measured" if theirs == "-" else f"{float(theirs):.2f} s"
        lines.append(
            f"| {name} {SHAPES[name]} | {float(whole):.2f} s | {float(given):.2f} s | {float(peak):.2f} GiB | {their} | {times} |"
        )
    return [*lines, ""]


def cost(name: str) -> None:
    """Seconds (least of three on the small one) and peak memory, in a process of its own."""
    shape, generator = SHAPES[name], torch.Generator().manual_seed(0)
    tensor = torch.randn(shape, generator=generator) * torch.linspace(1, 0.2, shape[0])[:, None, None, None]
    repeats = 3 if name == "GPT-2 small" else 1

    def seconds(function: Any) -> float:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times)

    whole = seconds(lambda: compress.HOSVD.of(tensor))
    given = seconds(lambda: compress.sequential_hosvd(tensor, RANKS[name]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    theirs = "-"
    if name == "GPT-2 small":
        try:
            import tensorly  # pyright: ignore[reportMissingImports]
            from tensorly.decomposition import partial_tucker  # pyright: ignore[reportMissingImports]

            tensorly.set_backend("pytorch")
            theirs = str(seconds(lambda: partial_tucker(tensor, rank=list(RANKS[name]), modes=[0, 1, 2], init="svd")))
        except ImportError:
            pass
    print(whole, given, peak, theirs)


def main() -> None:
    start = time.perf_counter()
    losses = [["model", "number", "method", *(f"÷ {ratio:g}" for ratio in RATIOS)]]
    single: list[str] = []
    hybrid: list[str] = []
    raised = ["| model | candidates | chosen | accuracy change on the other prompts |"]
    for name, model, task in tasks():
        result = evaluate.compression(model, task, plans(model))
        for metric in ("added loss", "accuracy change"):
            losses += [[name, metric, *cells] for cells in rows(table(result, metric))[1:]]
        for number in ("loss", "accuracy"):
            losses.append([name, number, "uncompressed", f"{result.settings[f'base_{number}']:.3f}", "", "", ""])
        one, both = paper_tables(name, model, task)
        single, hybrid = single + one, hybrid + both
        raised += headroom(name, model, task)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    save("compression", losses)
    for what, lines in (("kinds", single), ("mlps", hybrid), ("raised", raised), ("cost", costs())):
        save(f"compression-{what}", rows(lines))
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    cost(sys.argv[2]) if sys.argv[1:2] == ["--cost"] else main()
