"""Which model holds what, on the installed TransformerLens: writes its tables for docs/support.md (`make support`).

Everything in the table was run: `check_model` on a tiny random model of every class and family, then `check_method`
with every built-in method, and a reading of one head's attention score. A method refuses the models that do not meet the
requirements of its registration (`tensorlens_tl.requirements`), and says why below.
"""

import csv
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.requirements import REQUIREMENTS
from tensorlens_tl.testing import check_method, check_model, model_names, tiny_input, tiny_model
from tensorlens_tl.testing.models import BRIDGE, HookedTransformer

PATH = Path(__file__).parents[1] / "docs" / "support.md"
TABLES = PATH.parent / "_static"
NEEDS = "<!-- needs, written by `make support` -->", "<!-- end of the needs -->"
LINES = "<!-- tables, written by `make support` -->", "<!-- end of the tables -->"
ABSENT = "Not in this table: "
NO_T5 = "TransformerLens 3.9 cannot run a Bridge of T5 with current versions of transformers (its HookedEncoderDecoder is a T5)"
NO_BRIDGE = {"roberta": "TransformerLens 3.9 has no adapter for RoBERTa", "t5": NO_T5, "t5-gated": NO_T5}
"""Why a family has no Bridge on a release line."""
OPTIONS: dict[str, Any] = {"target": 5, "steps": 3}
"""What a method is called with, of what it takes: a token where it explains one, and few steps."""


def methods() -> list[str]:
    """The built-in ones."""
    ours = "tensorlens_tl.methods."
    return [name for name in tlens.list_methods() if str(tlens.get_method(name).function.__module__).startswith(ours)]


def options(method: str) -> dict[str, Any]:
    """The options that a method is called with: a target where it cannot do without one."""
    registered = tlens.get_method(method)
    if REQUIREMENTS["predictions"] not in registered.requirements():
        return {}
    return {name: value for name, value in OPTIONS.items() if name in registered.options}


def frozen_pass(model: Any) -> tlens.FrozenPass:
    """A pass of three tokens, with what else the model takes."""
    further: dict[str, Any] = tiny_input(model, 1, 3)[1]
    return tlens.freeze(model, torch.tensor([[3, 4, 5]]), **further)


def refusals(model: Any) -> dict[str, str]:
    """Why each method refuses a model, by the requirements of its registration: "" where it does not."""
    frozen = frozen_pass(model)
    return {method: tlens.get_method(method).refusal(frozen, options(method)) for method in methods()}


def row(name: str) -> dict[str, str]:
    """One model's line: what was measured, and for every method "" or the reason of its refusal.

    Raises:
        ConformanceError: a method does not hold what every method must.
        AssertionError: a method refuses what meets its requirements, or the reverse.
    """
    model = tiny_model(name)
    report = check_model(model)
    proof, claims = (
        max(error for claim, error in report.errors.items() if claim.startswith(("blocks.", "unembed")) is part)
        for part in (True, False)
    )
    sides = [side for side in ("left", "right") if f"padding on the {side}" not in report.refused]
    cells = {
        "model": f"`{name}`",
        "blocks": ", ".join(dict.fromkeys(report.layouts)),
        "proof": f"{proof:.0e}",
        "whole": f"{claims:.0e}",
        "padding": ", ".join(sides) or "none",
        "QK": scores_read(model),
    }
    reasons = refusals(model)
    for method, reason in reasons.items():
        measured = next(iter(check_method(method, model, options=options(method)).values()), "")
        assert measured == reason, (name, method)
    cells |= reasons
    return {column: text.replace(report.description, "model") for column, text in cells.items()}


def scores_read(model: Any) -> str:
    """Why attention scores cannot be read from this model's weights, or ""."""
    try:
        frozen = frozen_pass(model)
        circuits.qk_attribution(frozen, 0, 0, query=2, key=1)
        if frozen.sides is not None:
            circuits.qk_attribution(frozen, frozen.n_layers - 1, 0, cross=True)
    except tlens.TensorLensError as refusal:
        return str(refusal)
    return ""


def files(line: str) -> tuple[Path, Path]:
    """The table of a TransformerLens version, and the reasons of its refusals by number."""
    return TABLES / f"support-{line}.csv", TABLES / f"support-{line}-reasons.csv"


def save(rows: Iterable[dict[str, str]]) -> None:
    """Write both tables of the installed version."""
    rows = list(rows)
    answers = ["QK", *methods()]
    notes_of = [{column: note(column, row[column]) for column in answers} for row in rows]
    reasons = dict.fromkeys(reason for notes in notes_of for reason in notes.values() if reason)
    marks = {"": "✓"} | {reason: str(number) for number, reason in enumerate(reasons, start=1)}
    lines = [
        row | {column: marks[notes[column]] for column in answers} for row, notes in zip(rows, notes_of, strict=True)
    ]
    numbered = [(marks[reason], reason) for reason in reasons]
    tables = (list(rows[0]), *(line.values() for line in lines)), (("number", "reason"), *numbered, ("–", absent()))
    for path, table in zip(files(version("transformer-lens")), tables, strict=True):
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(table)


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a table, or none where this version was not measured."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def absent() -> str:
    """Which models only the other release line has, and why."""
    if HookedTransformer is None:
        return (
            f"{ABSENT}HookedTransformer, HookedEncoder and HookedEncoderDecoder, which TransformerLens 4 does not have."
        )
    models_of: dict[str, list[str]] = {}
    for family in BRIDGE:
        if f"bridge/{family}" not in model_names():
            models_of.setdefault(NO_BRIDGE[family], []).append(f"`bridge/{family}`")
    return ABSENT + "; ".join(f"{' and '.join(names)}, because {why}" for why, names in models_of.items()) + "."


def needs() -> str:
    """What methods need of a model, called with their default options, as a table."""
    needed = {method: tlens.get_method(method).requirements(options(method)) for method in methods()}
    requirements = dict.fromkeys([*REQUIREMENTS.values(), *(need for some in needed.values() for need in some)])
    lines = ["| requirement for the model | methods |", "| --- | --- |"]
    for requirement in requirements:
        names = ", ".join(method for method, some in needed.items() if requirement in some)
        names = names or "layer maps that you register without `both_stacks=True`"
        lines.append(f"| `{requirement.name}`: {requirement.summary} | {names} |")
    return "\n".join(lines) + "\n"


def note(method: str, refusal: str) -> str:
    """The first sentence of a refusal, without the method's name, which the column has."""
    sentence = refusal.removeprefix(f"{method}: ").split(". ", 1)[0].rstrip(".")
    return f"{sentence}." if sentence else ""


def tables() -> str:
    """The tables of every version that was measured, as they stand on the page."""
    lines = [path.stem.split("-")[1] for path in sorted(TABLES.glob("support-*-reasons.csv"))]
    found = []
    for line in lines:
        table, reasons = (f"_static/{path.name}" for path in files(line))
        found += [f"### TransformerLens {line}", "", f"Download [the table]({table}) and [the reasons]({reasons}).", ""]
        for file in (table, reasons):
            found += ["```{csv-table}", f":file: {file}", ":header-rows: 1", "```", ""]
    return "\n".join(found)


def written(text: str) -> str:
    """The page with what methods need, and the tables, written again."""
    for (start, end), part in ((NEEDS, needs()), (LINES, tables())):
        before, after = text.split(start)[0], text.split(end)[1]
        text = f"{before}{start}\n\n{part.strip()}\n\n{end}{after}"
    return text


def main() -> int:
    """Write the tables of this line, and the page."""
    torch.set_num_threads(1)
    save(row(name) for name in tqdm(model_names(), desc="models"))
    PATH.write_text(written(PATH.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
