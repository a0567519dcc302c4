"""The table of changed models as CSV files: what is changed, what was asked, and what came of it."""

import csv
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm

from changed import CHANGES, answers
from changed.answers import ABSENT, CRASH, EXACT, RAN, REFUSED, SUM, WRONG, Cell
from changed.change import Change
from changed.questions import Question
from changed.weights import DTYPES, MODELS

FOLDER = Path(__file__).parents[2] / "docs" / "_static"

Outcomes = Mapping[tuple[str, str], Mapping[str, Cell]]
"""Cells of one change: by model and dtype, by question."""

ORDER = (EXACT, SUM, REFUSED, RAN, WRONG, CRASH)
SHORT = {EXACT: "exact", SUM: "sum", REFUSED: "refused", RAN: "ran", WRONG: "**WRONG**", CRASH: "**CRASH**"}


def path(what: str = "") -> Path:
    """A file about the installed TransformerLens: the table, its `refusals` or the `questions`."""
    return FOLDER / ("-".join(["changed", version("transformer-lens"), *([what] if what else [])]) + ".csv")


def save(results: Iterable[tuple[Change, Outcomes]], asked: Iterable[Question]) -> None:
    """Everything about one TransformerLens: what came of every change, what is refused and why, what was asked."""
    results = list(results)
    for what, rows in (("", _table(results)), ("refusals", _refusals(results)), ("questions", _asked(asked))):
        with path(what).open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def _table(results: Iterable[tuple[Change, Outcomes]]) -> Iterator[tuple[str, ...]]:
    classes = list(dict.fromkeys(_class(name) for name in MODELS))
    columns = [(of, dtype) for of in classes for dtype in DTYPES]
    yield ("kind of change", "what is changed", *(f"{of}, {dtype}" for of, dtype in columns))
    for change, outcomes in results:
        group = change.group[0].upper() + change.group[1:]
        yield (group, change.name, *(_counted(outcomes, of, dtype) for of, dtype in columns))


def _class(name: str) -> str:
    return "HookedTransformer" if name.startswith("hooked") else "TransformerBridge"


def _counted(outcomes: Outcomes, of: str, dtype: str) -> str:
    """How many questions of a class and dtype have each outcome."""
    found = Counter(
        cell.outcome
        for (name, at), cells in outcomes.items()
        if _class(name) == of and at == dtype
        for cell in cells.values()
    )
    return ", ".join(f"{SHORT[outcome]} {found[outcome]}" for outcome in ORDER if found[outcome]) or "–"


def _refusals(results: Iterable[tuple[Change, Outcomes]]) -> Iterator[tuple[str, str]]:
    """The reasons of each change, and how many questions have them."""
    yield "what is changed", "refused because (how many questions)"
    for change, outcomes in results:
        reasons = Counter(
            _reason(cell.note) for cells in outcomes.values() for cell in cells.values() if cell.outcome == REFUSED
        )
        if reasons:
            most = "; ".join(f"{reason} ({count})" for reason, count in reasons.most_common(3))
            yield change.name, most


def _reason(note: str) -> str:
    """The first sentence of a refusal, without what it measured."""
    sentence = re.split(r"(?<=[a-z)\"'])[.;:] ", note, maxsplit=1)[0]
    return re.sub(r"\d\.\d+e[+-]\d+", "…", sentence).rstrip(".")[:160]


def _asked(asked: Iterable[Question]) -> Iterator[tuple[str, str]]:
    yield "function", "ways"
    ways: dict[str, list[str]] = {}
    for question in asked:
        way = question.name.removeprefix(question.function).strip(" []")
        ways.setdefault(question.function, []).extend([way] if way else [])
    yield from ((function, ", ".join(found)) for function, found in ways.items())


def written() -> dict[str, dict[str, set[str]]]:
    """What the committed table says of the installed TransformerLens: change → class and dtype → outcomes."""
    if not path().exists():
        return {}
    with path().open(encoding="utf-8", newline="") as file:
        _, _, *columns = head = next(csv.reader(file))
        rows = list(csv.DictReader(file, head))
    return {
        row["what is changed"]: {name: {part.rsplit(" ", 1)[0] for part in row[name].split(", ")} for name in columns}
        for row in rows
    }


def column(name: str, dtype: str) -> str:
    """The heading under which a model's cells stand."""
    return f"{_class(name)}, {dtype}"


def places(number: int, change: Change) -> list[tuple[str, str]]:
    """A model and a dtype of every class, other ones for the next change."""
    found = []
    for of in dict.fromkeys(map(_class, MODELS)):
        fit = [(name, dtype) for dtype in DTYPES for name in MODELS if _class(name) == of and change.takes(name, dtype)]
        if fit:
            found.append(fit[(3 * number + len(found)) % len(fit)])
    return found


HANDFUL = ("method tensorlens", "circuits.ov", "circuits.total_effects [live=True]", "registry.attribute")
"""Questions that are asked of every change, class and dtype."""

TURNS = 8
"""Of so many questions one is asked of each change in each class."""

LINE = int(version("transformer-lens").split(".")[0])
"""The other TransformerLens is asked other questions."""


def in_turn(turn: int, turns: int, dtype: str) -> list[Question]:
    """The `HANDFUL`, and those of all questions whose turn it is.

    Evaluations rank what rounding moves, and are asked in wide dtypes only.
    """
    asked = [question for question in answers.all_questions() if not question.heavy or dtype in ("float64", "float32")]
    return [question for place, question in enumerate(asked) if (place + turn) % turns == 0 or question.name in HANDFUL]


def run(number: int) -> tuple[int, dict[tuple[str, str], dict[str, Cell]]]:
    """Some of the questions about one change in each class, models and dtypes in turn, and a handful everywhere."""
    torch.set_num_threads(1)
    change, outcomes = CHANGES[number], {}
    there = places(number, change)
    for place, (name, dtype) in enumerate(there):
        chosen = in_turn(number + 3 * place + LINE, TURNS, dtype)
        cells = answers.cells(name, change, dtype, chosen)
        outcomes[name, dtype] = {question: cell for question, cell in cells.items() if cell.outcome != ABSENT}
    answers.forget()
    return number, outcomes


def main(pattern: str = "") -> None:
    """Write the installed TransformerLens' tables; a pattern runs some changes and prints what fails."""
    chosen = [number for number, change in enumerate(CHANGES) if re.search(pattern, change.name)]
    results: dict[int, Outcomes] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool, tqdm(total=len(chosen), desc="changes") as bar:
        for done in as_completed([pool.submit(run, number) for number in chosen]):
            number, outcomes = done.result()
            results[number] = outcomes
            bar.update()
            for line in failures(CHANGES[number], outcomes):
                tqdm.write(line)
    if pattern:
        return
    save([(CHANGES[number], results[number]) for number in chosen], answers.all_questions())


def failures(change: Change, outcomes: Outcomes) -> Iterator[str]:
    """A line for each cell that is neither exact nor refused."""
    for (name, dtype), cells in outcomes.items():
        for question, cell in cells.items():
            if cell.outcome in answers.FAILURES:
                yield f"{cell.outcome} | {change.name} | {name} | {dtype} | {question} | {cell.note}"
