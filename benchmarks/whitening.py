"""What whitening does: ``make whitening`` writes docs/whitening.md.

The training table is read from what `scripts/train_whitened.py` left beside the bundled whitened model, or from
another folder: ``python benchmarks/whitening.py OUT_DIR``. What stands between the two comment lines of the page is
written by people and kept.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

import tensorlens_tl as tlens
from tensorlens_tl import demo, whitening
from tensorlens_tl.whitening.measures import SETTLING

PAGE = Path(__file__).parent.parent / "docs" / "whitening.md"
START, END = "<!-- findings, written by hand -->", "<!-- end of the findings -->"
ROWS = {
    "standard": "standard",
    "larger": "larger standard",
    "whitened": "whitened",
    "control": "control: L⁻¹(x_i − M x_{i−1})",
    "attention": "variant: what attention reads",
}
PROMPTS, LENGTH = 4000, 19


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def head(*cells: str) -> list[str]:
    return [line(*cells), "| --- " * len(cells) + "|"]


def training(facts: dict) -> list[str]:
    """Loss at the end, against steps, and against time."""
    runs = defaultdict(list)
    for run in facts["runs"]:
        runs[run["row"]].append(run)
    seeds = len(runs["standard"])
    final = {row: mean(run["loss"][-1] for run in found) for row, found in runs.items()}
    lines = [
        "## Training",
        "",
        f"Two blocks, two heads, width {facts['width']} (larger: {facts['larger']}), {facts['context']} characters, batches of {facts['batch']}, "
        f"{facts['steps']:,} steps of AdamW at {facts['rate']:g}; {facts['characters']:,} characters of the Python installation's own documentation, "
        f"{facts['vocabulary']} different. Loss in nats per character on {facts['held_out']} held-out windows; seconds of processor time "
        f"({facts['threads']} thread{'s' * (facts['threads'] > 1)}). Runs of one seed see the same batches.",
        "",
        *head("model", "parameters", *(f"seed {run['seed']}" for run in runs["standard"]), "mean", "below standard", "ms per step", "radius of L⁻¹M"),
    ]  # fmt: skip
    for row, name in ROWS.items():
        if row not in runs:
            continue
        found = runs[row]
        radii = [max(run["radii"]) for run in found if run["radii"]]
        lines.append(
            line(
                name,
                f"{found[0]['parameters']:,}",
                *(f"{run['loss'][-1]:.3f}" for run in found),
                f"{final[row]:.3f}",
                "" if row == "standard" else f"{final['standard'] - final[row]:.3f}",
                f"{1000 * mean(run['seconds'][-1] / run['steps'][-1] for run in found):.1f}",
                "" if not radii else f"{min(radii):.2f} to {max(radii):.2f}",
            )
        )
    steps = runs["standard"][0]["steps"]
    shown = [at for at, step in enumerate(steps) if step in {250, 500, 1000, 2000, 3000, 4000, 5000, steps[-1]}]
    lines += ["", f"Held-out loss against steps, mean over {seeds} seeds:", "", *head("model", *(f"{steps[at]:,}" for at in shown))]  # fmt: skip
    for row, name in ROWS.items():
        if row in runs:
            lines.append(line(name, *(f"{mean(run['loss'][at] for run in runs[row]):.3f}" for at in shown)))
    lines += [
        "",
        "Steps and seconds until a model is at or below what the standard and the larger standard model end with (mean of their seeds), from the mean curve of "
        "its own seeds, measured every 250 steps:",
        "",
        *head("model", "standard's steps", "seconds", "larger's steps", "seconds"),
    ]
    for row, name in ROWS.items():
        if row not in runs:
            continue
        curve = [mean(run["loss"][at] for run in runs[row]) for at in range(len(steps))]
        spent = [mean(run["seconds"][at] for run in runs[row]) for at in range(len(steps))]
        cells: list[str] = []
        for goal in (final["standard"], final["larger"]):
            at = next((at for at, loss in enumerate(curve) if loss <= goal), None)
            cells += ["not reached", ""] if at is None else [f"{steps[at]:,}", f"{spent[at]:.0f}"]
        lines.append(line(name, *cells))
    return [*lines, ""]


def measured(name: str) -> list[str]:
    """The measures of one bundled model, as it is and after filters made from other prompts."""
    model = tlens.load_demo_model(name)
    tokens = demo.held_out_prompts(model, PROMPTS, LENGTH)
    blocks = range(model.cfg.n_layers)
    points = [f"blocks.{layer}.hook_resid_pre" for layer in blocks]
    if name == "whitened":
        points = [f"blocks.{layer}.whitening.hook_{end}" for layer in blocks for end in ("in", "out")]
    points.append(f"blocks.{len(blocks) - 1}.hook_resid_post")
    half, skip = PROMPTS // 2, SETTLING
    filters = whitening.stream_filters(model, tokens[:half], points)
    own = whitening.measure(model, tokens[half:], points, skip=skip)
    after = whitening.measure(model, tokens[half:], filters=filters, skip=skip)
    lines = [
        f"### {name}",
        "",
        *head(
            "hook point", "Ψ", "Ψ of correlations", "floor", "ρ", "relative ρ", "the same without noise",
            "filter's reach", "its radius", "Ψ after it", "Ψ of correlations after it",
        ),
    ]  # fmt: skip
    for point in points:
        row, whiter, made = own.loc[point], after.loc[point], filters[point]
        lines.append(
            line(
                f"`{point}`",
                *(f"{row[column]:.4f}" for column in ("whiteness", "of correlations", "floor")),
                *(f"{row[column]:.3g}" for column in ("rho", "relative", "relative without noise")),
                f"{made.reach:g}",
                f"{made.radius:.2f}",
                *(f"{whiter[column]:.4f}" for column in ("whiteness", "of correlations")),
            )
        )
    return [*lines, ""]


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else demo.FOLDERS["whitened"]
    written = PAGE.read_text(encoding="utf-8") if PAGE.exists() else f"{START}\n{END}"
    findings = written[written.index(START) : written.index(END) + len(END)]
    facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    lines = [
        "# What does whitening do?",
        "",
        "[Whitened self-attention](references.md) puts w_i = L⁻¹(x_i − M w_{i−1}) before every block, with two learned matrices L⁻¹ and M: a filter that could make the stream white, "
        "that is, without correlation between its numbers and between neighbouring tokens. This page measures what it does. "
        "Regenerated by `make whitening`; how to use it: [whiten a model](howto/8_whiten_a_model.md); what it costs: `benchmarks/RESULTS.md`.",
        "",
        findings,
        "",
        *training(facts),
        "## Whiteness and stationarity of the bundled models' streams",
        "",
        "* **Ψ** (Eq. 12) is the mean absolute covariance of two numbers of the stream, over all positions and channels, divided by their mean variance; *of correlations* scales "
        "every number to variance 1 first. The *floor* is what independent numbers show with so many prompts. Lower is whiter.",
        "* **ρ** (Eq. 14) is how much the covariance of neighbouring tokens changes along the sequence. It grows with the size of the stream, so rows compare by *relative ρ*, its share of the "
        "sum of the covariances' sizes; *without noise* takes off what a finite number of prompts adds. Lower is more stationary.",
        "* A **filter** is the first-order one that the covariances imply. Where there is none, only a share of the covariance of neighbours (its *reach*) is used; its *radius* is the spectral radius of L⁻¹M.",
        "",
        f"{PROMPTS // 2:,} windows of {LENGTH} tokens (and `<bos>`) from the second half of the held-out text, filters made from as many of the first half; within a half, windows overlap. "
        f"The first {SETTLING} positions, where a filter has not settled yet, are left out before and after.",
        "",
    ]
    for name in ("language", "whitened"):
        lines += measured(name)
    PAGE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
