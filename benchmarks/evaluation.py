"""The evaluation of every method on the bundled models: ``make evaluation`` writes benchmarks/EVALUATION.md.

`evaluation_pages` then writes the CSV files of docs/evaluation.md, whose findings are written by hand.
Each table is written as soon as it is drawn; names of some (``python benchmarks/evaluation.py "Recall model"``) draw
these again and leave the others as they are.
"""

import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import evaluation_pages
import programs
import torch

import tensorlens_tl as tlens
from tensorlens_tl import demo, evaluate
from tensorlens_tl.evaluate.scorers import RANDOM, scorers_of, usable

PROMPTS, FEWER, IMAGES = 104, 48, 96
MASK_AT = 25
SEEDS = (11, 12, 13)
"""Of drawn prompts, random orders, noise and scrambled weights."""

SINGLE_LAYERS = ("attention", "norm")
"""Registered methods that show layers one by one, and have no map of the whole model."""


def every_method() -> dict[str, Any]:
    """The usual methods by label, then whatever else is registered, then a random order."""
    chosen: dict[str, Any] = {label: label for label in evaluate.STANDARD}
    named = {name for name, _ in evaluate.STANDARD.values()} | set(SINGLE_LAYERS)
    for name in tlens.list_methods():
        if name not in named:
            targeted = "target" in tlens.get_method(name).options
            chosen[name] = (name, {"target": evaluate.PREDICTED} if targeted else {})
    # a quarter of the usual steps: the page is to be made in minutes
    chosen["integrated-gradients"] = ("integrated-gradients", {"target": evaluate.PREDICTED, "steps": 8})
    return chosen | {RANDOM: RANDOM}


METHODS = every_method()


def fitting(model: Any, prompts: torch.Tensor, query: Any = -1) -> tuple[dict[str, Any], dict[str, str]]:
    """The methods that are defined on a model, and the refusals of the others."""
    scorers, refused = usable(scorers_of(METHODS), tlens.freeze(model, prompts[:1]), query, skip=True)
    return {scorer.label: METHODS[scorer.label] for scorer in scorers}, refused


def with_random_seeds(result: evaluate.Evaluation, run) -> evaluate.Evaluation:
    """The result with its random order as the mean over `SEEDS`: no other method depends on them."""
    drawn = evaluate.over_seeds(lambda seed: run({RANDOM: RANDOM}, seed=seed), SEEDS)
    row = result.methods.index(RANDOM)
    assert result.curves is not None
    assert drawn.curves is not None
    values, curves = result.values.clone(), result.curves.clone()
    values[:, row], curves[:, row] = drawn.values[:, 0], drawn.curves[:, 0]
    return replace(result, values=values, curves=curves)


def leaders(result: evaluate.Evaluation, metric: str, units: str = "prompts") -> str:
    """Who leads, who does not differ from it significantly, and how far the best TensorLens variant is behind."""
    frame = result.table(metric)
    best = str(frame.index[0])
    compared = result.paired(best, metric)  # one family: the first against every other method
    tied = [m for m in frame.index[1:] if compared.loc[m, "p_holm"] >= 0.05]
    ours = next((str(m) for m in frame.index if str(m).startswith("tensorlens")), None)
    line = f"* `{metric}`: first is **{best}**"
    smallest = len(compared) * 2 / 2 ** len(result.units)  # Holm's factor times both signs of all differences
    if smallest >= 0.05:
        return (
            f"{line}; with {len(result.units)} {units} and {len(compared)} comparisons no difference can be significant "
            f"after correction (smallest possible p = {smallest:.3f})."
        )
    line += (
        f"; not significantly different (corrected p ≥ 0.05, paired): {', '.join(tied)}."
        if tied
        else "; all others differ from it (corrected p < 0.05)."
    )
    if ours is not None and ours != best:
        gap = compared.loc[ours]
        line += f" Best TensorLens: {ours}, behind by {abs(gap['difference']):.3g} (corrected p = {gap['p_holm']:.2g})."
    return line


def section(title: str, result: evaluate.Evaluation, note: str = "", units: str = "prompts") -> str:
    lines = [f"### {title}", "", *([note, ""] if note else []), result.to_markdown(), ""]
    lines += [leaders(result, metric, units) for metric in result.metrics]
    if result.skipped:
        lines += ["", f"Left out, undefined on this model: {', '.join(result.skipped)}."]
    return "\n".join([*lines, ""])


def perturbations(
    name: str, model: Any, prompts: torch.Tensor, query: Any, what: tuple[str, str] = ("tokens", "prompts")
) -> list[str]:
    parts = []
    methods, refused = fitting(model, prompts, query)
    replacement = "mean" if query == -1 else None
    for order, better in (("descending", "higher"), ("ascending", "lower")):

        def run(methods, *, seed=SEEDS[0], order: Any = order):
            return evaluate.perturbation(
                model, prompts, methods, query=query, order=order, replacement=replacement, seed=seed
            )

        result = replace(with_random_seeds(run(methods), run), skipped=refused)
        first = "most relevant first" if order == "descending" else "least relevant first"
        parts_of, whole = what
        note = (
            f"{parts_of.capitalize()} replaced {first}; area under the curve over 0 to 30 % of the {parts_of} of "
            f"{len(prompts)} {whole}, {better} is better."
        )
        parts.append(section(f"{name}: {result.kind}", result, note))
    return parts


def vision() -> list[str]:
    """Patches of digits that the model has not seen, replaced by the mean patch at their position."""
    images, _ = demo.digit_images()
    chosen = images[:: len(images) // IMAGES][:IMAGES]
    return perturbations("Digits", tlens.load_demo_model("digits"), chosen, 0, ("patches", "images"))


def drawn_recall(prompts: int) -> torch.Tensor:
    """Prompts of the recall task, as many from each seed."""
    return torch.cat([evaluate.recall(prompts // len(SEEDS), seed=seed).tokens for seed in SEEDS])


def known_answers(name: str, model: Any, drawn) -> list[str]:
    """A task whose prompts are resampled for each seed."""
    methods, refused = fitting(model, drawn(SEEDS[0]).tokens)
    result = evaluate.over_seeds(
        lambda seed: evaluate.known_answer(model, drawn(seed), methods, seed=seed), SEEDS, units="drawn"
    )
    facts = result.settings
    note = (
        f"{facts['prompts']} prompts of {facts['tokens']} tokens from {len(SEEDS)} seeds, {facts['accuracy']:.1%} answered "
        f"by the model; a random score is expected to have mrr {facts['random_mrr']:.3f}."
    )
    return [section(name, replace(result, skipped=refused), note)]


def tables() -> dict[str, Callable[[], list[str]]]:
    """What draws the tables of each name, in the order of the page."""
    language, encoder = tlens.load_demo_model(), tlens.load_demo_model("encoder")
    recall, brackets = (tlens.load_demo_model(name) for name in ("recall", "brackets"))
    text, masked = demo.held_out_prompts(language, PROMPTS), demo.held_out_prompts(encoder, FEWER, mask_at=MASK_AT)
    width = language.cfg.d_vocab
    perturbed = (
        ("Language model", language, text, -1),
        ("Masked encoder", encoder, masked, MASK_AT),
        ("Recall model", recall, drawn_recall(FEWER), -1),
    )
    known = (
        ("Key–value recall", recall, lambda seed: evaluate.recall(66, seed=seed)),
        ("Brackets", brackets, lambda seed: evaluate.brackets(66, seed=seed)),
        ("Induction, language model", language, lambda seed: evaluate.induction(33, d_vocab=width, seed=seed)),
    )
    return {
        **{name: partial(perturbations, name, *asked) for name, *asked in perturbed},
        "Digits": vision,
        **{name: partial(known_answers, name, *asked) for name, *asked in known},
        "Programs": programs.sections,
        "Relations": relations,
        "Checks": partial(checks, language, text[:: PROMPTS // 8]),
    }


def relations() -> list[str]:
    """Relation decoding, of all relations and by relation."""
    result = evaluate.relation_decoding(tlens.load_demo_model("relations"))
    note = (
        f"m = 3, 6 splits, {len(result.units)} relations; share of held-out subjects whose answer is the model's own."
    )
    shown = [method for method in result.methods if "2.25" not in method]
    table = evaluate.by_relation(result)
    rows = [f"| relation | {' | '.join(shown)} |", "| --- |" + " --- |" * len(shown)]
    for relation in table.index:
        cells = [f"{table.loc[relation, (m, 'mean')]:.2f} ± {table.loc[relation, (m, 'std')]:.2f}" for m in shown]
        rows.append(f"| {relation} | {' | '.join(cells)} |")
    title = "### By relation, mean ± standard deviation over splits (`faithful`)"
    return [section("All relations", result, note, "relations"), title, "", *rows, ""]


def checks(model: Any, prompts: torch.Tensor) -> list[str]:
    """What every method's scores are held against, and how alike they are."""
    methods, _ = fitting(model, prompts)
    parts: list[str] = []
    for run, seeds in (
        (evaluate.completeness, SEEDS[:1]),
        (evaluate.randomisation, SEEDS),
        (evaluate.stability, SEEDS),
    ):
        result = evaluate.over_seeds(lambda seed, run=run: run(model, prompts, methods, seed=seed), seeds)
        known = [m for m, row in zip(result.methods, result.values[0], strict=True) if bool(row.isfinite().any())]
        result = result.only(*known)  # a method that sums to nothing has no completeness
        said = f"{len(prompts)} prompts" + (f", each the mean over {len(seeds)} seeds." if len(seeds) > 1 else ".")
        parts += [f"### {result.kind.capitalize()}", "", said, "", result.to_markdown(), ""]
    table = evaluate.agreement_table(evaluate.agreement(model, prompts, methods)).round(2)
    heads = [str(n) for n in range(1, len(table) + 1)]
    parts += [
        "### Agreement (Spearman)",
        "",
        f"| | method | {' | '.join(heads)} |",
        "| --- | --- |" + " --- |" * len(heads),
    ]
    parts += [f"| {n} | {m} | {' | '.join(f'{v:.2f}' for v in table.loc[m])} |" for n, m in enumerate(table.index, 1)]
    return [*parts, ""]


HEAD = """# The evaluation, table by table

Regenerated by `make evaluation` (bundled models, float32, mean [95 % bootstrap interval] over prompts; how each number is made: `tensorlens_tl.evaluate`). [What the tables say](../docs/evaluation.md) is on one screen; the numbers are also
[one CSV file](../docs/_static/evaluation.csv).
p-values are of paired tests of the first method against every other one in the same metric, corrected for their number by Holm's method within each table and metric. Prompts that are drawn, random orders,
noise and scrambled weights are of {seeds} seeds: of drawn prompts all are counted, else each prompt's value is its mean over the seeds.
Methods without *biases* in their label leave the model's biases out of the scores, as the paper does.
"""


def put(page: str, drawn: str) -> str:
    """The page with each drawn table in place of the one with its heading."""
    parts = re.split(r"^(?=##)", page, flags=re.M)
    headings = [part.partition("\n")[0] for part in parts]
    for table in re.split(r"^(?=##)", drawn, flags=re.M):
        heading = table.partition("\n")[0]
        if heading not in headings:
            raise LookupError(
                f"{evaluation_pages.TABLES.name} has no line {heading!r}: write it where the table belongs"
            )
        parts[headings.index(heading)] = f"{table.strip()}\n\n"
    return "".join(parts).rstrip() + "\n"


def main() -> None:
    drawings = tables()
    if unknown := {*sys.argv[1:]} - {*drawings}:
        sys.exit(f"no table {', '.join(sorted(unknown))}; there are {', '.join(drawings)}")
    for name in sys.argv[1:] or drawings:
        started = time.time()
        drawn = "\n".join([HEAD.format(seeds=len(SEEDS)), *drawings[name]()])
        page = evaluation_pages.TABLES.read_text(encoding="utf-8")
        evaluation_pages.TABLES.write_text(put(page, drawn), encoding="utf-8")
        evaluation_pages.main()
        print(f"{name}: {time.time() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
