"""What compressing attention costs the bundled models: ``make compression`` writes docs/compression.md.

What stands between the two comment lines of that page is written by people and kept; all else is measured. The cost of
tensorly's `partial_tucker` is measured where tensorly is installed, in this environment or on PYTHONPATH.
"""

import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch

import tensorlens_tl as tlens
from tensorlens_tl import compress, demo, evaluate

PAGE = Path(__file__).parent.parent / "docs" / "compression.md"
START, END = "<!-- findings, written by hand -->", "<!-- end of the findings -->"
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


def tasks() -> list[tuple[str, object, object]]:
    """Each bundled model, and what it is asked: tokens, and where only some of them count, the answers."""
    language, encoder = tlens.load_demo_model(), tlens.load_demo_model("encoder")
    masked = demo.held_out_prompts(encoder, 256, 48, mask_at=20)
    answers = torch.full_like(masked, -100)
    answers[:, 20] = demo.held_out_prompts(encoder, 256, 48)[:, 20]
    found = [("language", language, demo.held_out_prompts(language, 256, 64))]
    found += [(name, tlens.load_demo_model(name), getattr(evaluate, name)(256)) for name in ("recall", "brackets")]
    return [*found, ("encoder", encoder, (masked, answers))]


def plans(model: object) -> dict:
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


def headroom(name: str, model: object, task: object) -> list[str]:
    """Many candidates, chosen on a third of the prompts: does any raise accuracy on the others?"""
    layers = range(model.cfg.n_layers)  # type: ignore[attr-defined]
    candidates = [
        partial(compress.plan, model, layer, ratio=ratio, **options)
        for layer in layers
        for ratio in (1.2, *RATIOS)
        for options in ({"rule": "paper"}, {"gauge": "circuit", "balance": True}, {"method": "laser"})
    ]
    result = evaluate.compression(model, task, {"best": candidates}, choose_by="accuracy")
    gain = result.table("accuracy change").loc["best", "accuracy change"]
    return [f"| {name} | {len(candidates)} | {result.settings['chosen']['best'][0]} | {cell(*gain)} |"]


def paper_tables(name: str, model: object, task: object) -> tuple[list[str], list[str]]:
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

    def seconds(function: object) -> float:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            function()  # type: ignore[operator]
            times.append(time.perf_counter() - start)
        return min(times)

    whole = seconds(lambda: compress.HOSVD.of(tensor))
    given = seconds(lambda: compress.sequential_hosvd(tensor, RANKS[name]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    theirs = "-"
    if name == "GPT-2 small":
        try:
            import tensorly
            from tensorly.decomposition import partial_tucker

            tensorly.set_backend("pytorch")
            theirs = str(seconds(lambda: partial_tucker(tensor, rank=list(RANKS[name]), modes=[0, 1, 2], init="svd")))
        except ImportError:
            pass
    print(whole, given, peak, theirs)


def main() -> None:
    start = time.perf_counter()
    written = PAGE.read_text(encoding="utf-8") if PAGE.exists() else f"{START}\n{END}"
    findings = written[written.index(START) : written.index(END) + len(END)]
    lines = [
        "# What does compressing attention cost?", "",
        "Regenerated by `make compression` (bundled models, float32, attention of every layer compressed, mean [95 % bootstrap interval] over 256 prompts;",
        "how each number is made: `tensorlens_tl.evaluate.compression`; what each method keeps: [compress attention](howto/7_compress_attention.md)).", "",
        "Each column is the ratio asked for; more is reached where ranks are small (head SVD on the recall model: 12.8 instead of 8). The language model is a HookedTransformer where there is one; its prompts have",
        "64 tokens, the encoder's 48, one of them masked. The paper's two rows have ranks (r·h, r, s) and 25 sweeps of HOOI; the other Tucker rows any ranks, truncated without sweeps.",
        "Rounding keeps every number in 32 ÷ ratio bits, with a scale for each matrix of each head.", "",
        findings, "",
    ]  # fmt: skip
    single: list[str] = []
    hybrid: list[str] = []
    raised = ["| model | candidates | chosen | accuracy change on the other prompts |", "| --- " * 4 + "|"]
    for name, model, task in tasks():
        result = evaluate.compression(model, task, plans(model))
        base = result.settings
        lines += [
            f"## {name}",
            "",
            f"Uncompressed: loss {base['base_loss']:.3f}, accuracy {base['base_accuracy']:.3f} ({base['task']}).",
            "",
        ]
        for metric in ("added loss", "accuracy change"):
            lines += [f"### {name}: {metric}", "", *table(result, metric)]
        one, both = paper_tables(name, model, task)
        single, hybrid = single + one, hybrid + both
        raised += headroom(name, model, task)
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    lines += [
        "## One kind of matrix alone (the paper's Table IV)",
        "",
        "Added loss; shared Tucker with the paper's ranks at ratio 2, of these matrices alone.",
        "",
        *single,
        "",
        "## With the MLPs (the paper's Table III)",
        "",
        "Added loss; attention at ratio 2, and LASER that keeps half of the ranks (ρ = 0.5) of the MLPs' matrices.",
        "",
        *hybrid,
        "",
        "## Does compression ever raise accuracy?",
        "",
        "One layer at a time, the candidate with the best accuracy on a third of the prompts, reported on the others.",
        "",
    ]
    lines += [
        *raised,
        "",
        "## Cost of the factorisation",
        "",
        "Two cores, float32; tensorly 0.9 with its defaults.",
        "",
        *costs(),
    ]
    PAGE.write_text("\n".join(lines), encoding="utf-8")
    print(f"{PAGE}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    cost(sys.argv[2]) if sys.argv[1:2] == ["--cost"] else main()
