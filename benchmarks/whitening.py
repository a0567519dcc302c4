"""What whitening does: ``make whitening`` writes the tables of docs/howto/8_whiten_a_model.md.

The training table is read from what `scripts/train_whitened.py` left beside the bundled whitened model, or from
another folder: ``python benchmarks/whitening.py OUT_DIR``.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

from page import rows, save

import tensorlens_tl as tlens
from tensorlens_tl import demo, whitening
from tensorlens_tl.whitening.measures import SETTLING

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


def training(facts: dict) -> dict[str, list[str]]:
    """Loss at the end, against steps, and against time."""
    runs = defaultdict(list)
    for run in facts["runs"]:
        runs[run["row"]].append(run)
    final = {row: mean(run["loss"][-1] for run in found) for row, found in runs.items()}
    columns = [f"seed {run['seed']}" for run in runs["standard"]]
    lines = head("model", "parameters", *columns, "mean", "below standard", "ms per step", "radius of L⁻¹M")
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
    curves = head("model", *(f"{steps[at]:,}" for at in shown))
    for row, name in ROWS.items():
        if row in runs:
            curves.append(line(name, *(f"{mean(run['loss'][at] for run in runs[row]):.3f}" for at in shown)))
    reached = head("model", "standard's steps", "seconds", "larger's steps", "seconds")
    for row, name in ROWS.items():
        if row not in runs:
            continue
        curve = [mean(run["loss"][at] for run in runs[row]) for at in range(len(steps))]
        spent = [mean(run["seconds"][at] for run in runs[row]) for at in range(len(steps))]
        cells: list[str] = []
        for goal in (final["standard"], final["larger"]):
            at = next((at for at, loss in enumerate(curve) if loss <= goal), None)
            cells += ["not reached", ""] if at is None else [f"{steps[at]:,}", f"{spent[at]:.0f}"]
        reached.append(line(name, *cells))
    return {"training": lines, "curves": curves, "steps": reached}


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
    lines = head(
        "model", "hook point", "Ψ", "Ψ of correlations", "floor", "ρ", "relative ρ", "the same without noise",
        "filter's reach", "its radius", "Ψ after it", "Ψ of correlations after it",
    )  # fmt: skip
    for point in points:
        row, whiter, made = own.loc[point], after.loc[point], filters[point]
        lines.append(
            line(
                name,
                f"`{point}`",
                *(f"{row[column]:.4f}" for column in ("whiteness", "of correlations", "floor")),
                *(f"{row[column]:.3g}" for column in ("rho", "relative", "relative without noise")),
                f"{made.reach:g}",
                f"{made.radius:.2f}",
                *(f"{whiter[column]:.4f}" for column in ("whiteness", "of correlations")),
            )
        )
    return lines


def main() -> None:
    folder = Path(sys.argv[1]) if sys.argv[1:] else demo.FOLDERS["whitened"]
    facts = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    language, whitened = (rows(measured(name)) for name in ("language", "whitened"))
    save("whitening-streams", [*language, *whitened[1:]])
    for what, lines in training(facts).items():
        save(f"whitening-{what}", rows(lines))


if __name__ == "__main__":
    main()
