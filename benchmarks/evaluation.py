"""The evaluation of every method on the embedded models: ``make evaluation`` writes docs/evaluation.md.

What stands between the two comment lines of that page is written by people and kept; all else is measured.
"""

import sys
import time
from pathlib import Path

import torch

import tensorlens_tl as tlens
from tensorlens_tl import demo, evaluate

PAGE = Path(__file__).parent.parent / "docs" / "evaluation.md"
START, END = "<!-- findings, written by hand -->", "<!-- end of the findings -->"
PROMPTS, FEWER, IMAGES = 104, 48, 96
MASK_AT = 25
METHODS = {label: label for label in evaluate.STANDARD} | {
    # a quarter of the usual steps: the page is to be made in minutes
    "integrated-gradients": ("integrated-gradients", {"target": evaluate.PREDICTED, "steps": 8}),
    "random": "random",
}


def leaders(result: evaluate.Evaluation, metric: str) -> str:
    """Who leads, who cannot be told from it (paired test), and how the best TensorLens variant stands."""
    frame = result.table(metric)
    best = str(frame.index[0])
    tied = [m for m in frame.index[1:] if result.compare(best, str(m), metric).p >= 0.05]
    ours = next((str(m) for m in frame.index if str(m).startswith("tensorlens")), None)
    line = f"* `{metric}`: first is **{best}**"
    line += (
        f"; not to be told from it (p ≥ 0.05, paired): {', '.join(tied)}."
        if tied
        else "; all others differ from it (p < 0.05)."
    )
    if ours is not None and ours != best:
        gap = result.compare(best, ours, metric)
        line += f" Best TensorLens: {ours}, behind by {abs(gap.difference):.3g} (p = {gap.p:.2g})."
    return line


def section(title: str, result: evaluate.Evaluation, note: str = "") -> str:
    lines = [f"### {title}", "", *([note, ""] if note else []), result.to_markdown(), ""]
    lines += [leaders(result, metric) for metric in result.metrics]
    if result.skipped:
        lines += ["", f"Left out, undefined on this model: {', '.join(result.skipped)}."]
    return "\n".join([*lines, ""])


def perturbations(
    name: str, model: object, prompts: torch.Tensor, query: object, what: tuple[str, str] = ("tokens", "prompts")
) -> list[str]:
    parts = []
    for order, better in (("descending", "higher"), ("ascending", "lower")):
        result = evaluate.perturbation(model, prompts, METHODS, query=query, order=order)
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
    return perturbations("Digits", tlens.load_demo_model(name="digits"), chosen, "cls", ("patches", "images"))


def page() -> str:
    language, encoder = tlens.load_demo_model(), tlens.load_demo_model(name="encoder")
    recall, brackets = (tlens.load_demo_model(name=name) for name in ("recall", "brackets"))
    relations = tlens.load_demo_model(name="relations")
    text = demo.held_out_prompts(language, PROMPTS)
    parts = ["## Perturbation", ""]
    parts += perturbations("Language model", language, text, "last")
    parts += perturbations("Masked encoder", encoder, demo.held_out_prompts(encoder, FEWER, mask_at=MASK_AT), MASK_AT)
    parts += perturbations("Recall model", recall, evaluate.recall(FEWER, seed=11).tokens, "last")
    parts += vision()
    parts += ["## Known answers", ""]
    for name, model, task in (
        ("Key–value recall", recall, evaluate.recall(200, seed=12)),
        ("Brackets", brackets, evaluate.brackets(200, seed=12)),
        ("Induction, language model", language, evaluate.induction(100, d_vocab=language.cfg.d_vocab, seed=12)),
    ):
        result = evaluate.known_answer(model, task, METHODS)
        note = (
            f"{len(task)} prompts of {result.settings['tokens']} tokens, {result.settings['accuracy']:.1%} answered by the "
            f"model; a random score is expected to have mrr {result.settings['random_mrr']:.3f}."
        )
        parts.append(section(name, result, note))
    parts += ["## Relation decoding", ""]
    result = evaluate.relation_decoding(relations)
    note = (
        f"m = 3, 6 splits, {len(result.units)} relations; share of held-out subjects whose answer is the model's own."
    )
    parts.append(section("All relations", result, note))
    shown = [method for method in result.methods if "2.25" not in method]
    table = evaluate.by_relation(result)
    rows = [f"| relation | {' | '.join(shown)} |", "| --- |" + " --- |" * len(shown)]
    for relation in table.index:
        cells = [f"{table.loc[relation, (m, 'mean')]:.2f} ± {table.loc[relation, (m, 'std')]:.2f}" for m in shown]
        rows.append(f"| {relation} | {' | '.join(cells)} |")
    parts += ["### By relation, mean ± standard deviation over splits (`faithful`)", "", *rows, ""]
    parts += ["## Checks, language model", ""]
    few = text[:: PROMPTS // 8]
    for run in (evaluate.completeness, evaluate.randomisation, evaluate.stability):
        result = run(language, few)
        parts += [f"### {result.kind.capitalize()}", "", f"{len(few)} prompts.", "", result.to_markdown(), ""]
    table = evaluate.agreement_table(evaluate.agreement(language, few)).round(2)
    heads = [str(n) for n in range(1, len(table) + 1)]
    parts += [
        "### Agreement (Spearman)",
        "",
        f"| | method | {' | '.join(heads)} |",
        "| --- | --- |" + " --- |" * len(heads),
    ]
    parts += [f"| {n} | {m} | {' | '.join(f'{v:.2f}' for v in table.loc[m])} |" for n, m in enumerate(table.index, 1)]
    return "\n".join([*parts, ""])


def main() -> None:
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else f"{START}\n{END}"
    findings = old[old.index(START) : old.index(END) + len(END)]
    started = time.time()
    measured = page()
    head = (
        "# Which method is faithful?\n\nRegenerated by `make evaluation` (embedded models, float32, mean [95 % bootstrap interval] over prompts; how each number "
        "is made: `tensorlens_tl.evaluate`).\nMethods without *biases* in their label leave the model's biases out of the scores, as the paper does.\n"
    )
    PAGE.write_text(f"{head}\n{findings}\n\n{measured}", encoding="utf-8")
    print(f"{PAGE.name}: {time.time() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
