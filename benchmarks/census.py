"""The census: every name that TransformerLens maps, as a tiny random model, frozen and measured.

    python benchmarks/census.py [--names NAME ...] [--jobs 2] [--limit 120]

Writes benchmarks/census.json, and from it docs/_static/census.csv and the counts of docs/support.md. With names, only those are run, and take the place of what the
file has of them. Each model has a process of its own, so that one that hangs or dies is a row as well. The exit status
is 1 where a result is silently wrong.
"""

import argparse
import csv
import io
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import torch
from census_checks import CRASH, EXACT, FLOAT32, REFUSED, VERDICTS, WRONG, Row, examine
from census_models import KINDS, VARIANTS, kind_of
from tqdm.auto import tqdm
from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES

RESULTS = Path(__file__).parent / "census.json"
PAGE = Path(__file__).parents[1] / "docs" / "support.md"
TABLE = PAGE.parent / "_static" / "census.csv"
START, END = "<!-- counts, written by benchmarks/census.py -->", "<!-- end of the counts -->"
LIMIT = 120.0
VERSIONS = ("transformer-lens", "transformers")


# --------------------------------------------------------------------------- running


@dataclass(frozen=True)
class _Run:
    """One process at work."""

    process: BaseProcess
    name: str
    variant: str
    deadline: float


def _work(out: Connection, name: str, variant: str) -> None:
    torch.set_num_threads(1)
    out.send(examine(name, variant))


def _collected(out: Connection, run: _Run) -> Row:
    """The row of a process that has answered, died, or taken too long."""
    row = Row(run.name, run.variant, kind_of(run.name), CRASH, reason="no answer within the time limit")
    if out.poll():
        try:
            row = out.recv()
        except EOFError:
            run.process.join()
            row.reason = f"the process died with exit code {run.process.exitcode}"
    run.process.kill()
    run.process.join()
    out.close()
    return row


def run_all(wanted: Iterable[tuple[str, str]], jobs: int = 1, limit: float = LIMIT) -> Iterator[Row]:
    """Examine names and variants, each in a process of its own, so many at a time; rows come as they are ready."""
    context, waiting, running = multiprocessing.get_context("fork"), list(wanted)[::-1], dict[Any, _Run]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name, variant = waiting.pop()
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(theirs, name, variant), daemon=True)
            process.start()
            theirs.close()
            running[mine] = _Run(process, name, variant, time.monotonic() + limit)
        soonest = min(run.deadline for run in running.values())
        ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
        late = [out for out, run in running.items() if run.deadline <= time.monotonic()]
        for out in {*ready, *late}:
            yield _collected(out, running.pop(out))  # pyright: ignore[reportArgumentType]


def everything() -> list[tuple[str, str]]:
    """Every name that the installed TransformerLens maps, and the further shapes of some."""
    return [(name, variant) for name in SUPPORTED_ARCHITECTURES for variant in ("", *VARIANTS.get(name, ()))]


# --------------------------------------------------------------------------- the file and the page


def read(path: Path = RESULTS) -> tuple[dict[str, str], list[Row]]:
    """Versions and rows of a file of results."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return found["versions"], [Row(**row) for row in found["rows"]]


def counts(versions: dict[str, str], rows: Sequence[Row]) -> str:
    """How many models of each kind have each verdict; what is wrong is named above."""
    of = f"TransformerLens {versions['transformer-lens']} with transformers {versions['transformers']}"
    names = len({row.name for row in rows})
    lines = [f"{of} lists {names} architecture names as supported; the census covers them with {len(rows)} models.", ""]
    wrong = [f"**{row.title} is silently wrong: {_finding(row)}.**" for row in rows if row.verdict == WRONG]
    lines += [*wrong, ""] if wrong else []
    lines += [_line("", *VERDICTS, "difference of two runs"), "|" + " --- |" * (len(VERDICTS) + 2)]
    for kind in KINDS:
        of_kind = [row for row in rows if row.kind == kind]
        verdicts = Counter(row.verdict for row in of_kind)
        paired = sum("difference" in row.errors for row in of_kind)
        lines.append(_line(kind, *(verdicts[verdict] or "" for verdict in VERDICTS), paired or ""))
    return "\n".join(lines)


def written(text: str, versions: dict[str, str], rows: Sequence[Row]) -> str:
    """The page with its counts written again."""
    return f"{text.split(START)[0]}{START}\n\n{counts(versions, rows)}\n\n{END}{text.split(END)[1]}"


def table(rows: Sequence[Row]) -> str:
    """Every model with its verdict, as a CSV file."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("kind", "name", "verdict", "worst error, or what stands in the way", "difference"))
    for row in sorted(rows, key=lambda row: (KINDS.index(row.kind), row.title.lower())):
        name = f"`{row.name}`" + (f", {row.variant}" if row.variant else "")
        verdict = f"**{row.verdict}**" if row.verdict in (WRONG, CRASH) else row.verdict
        change = f"{row.errors['difference']:.0e}" if "difference" in row.errors else ""
        writer.writerow((row.kind, name, verdict, _finding(row), change))
    return out.getvalue()


def _line(*cells: object) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def _finding(row: Row) -> str:
    """The worst error with what is refused beside it, or the first sentence of the reason."""
    if row.verdict in (EXACT, FLOAT32):
        worst = max(error for claim, error in row.errors.items() if claim != "difference")
        return "; ".join([f"{worst:.0e}", *map(_short, row.notes)])
    if row.verdict == WRONG:
        return "; ".join([*(f"{claim} {error:.0e}" for claim, error in row.errors.items()), *map(_short, row.notes)])
    return _short(row.reason) if row.verdict in (REFUSED, CRASH) else row.reason


def _short(reason: str) -> str:
    """The first sentence, without the model's own name."""
    first, _, _ = reason.replace("\n", " ").partition(". ")
    head, of, rest = first.partition(" of this TransformerBridge (")
    return (head + rest.partition(")")[2] if of else first).rstrip(".")


def main() -> int:
    """Run what is asked for, write both files, and say what is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--names", nargs="+", metavar="NAME", help="only these, with their variants")
    parser.add_argument("--jobs", type=int, default=1, help="how many processes at a time")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds that a model may take")
    asked = parser.parse_args()
    unknown = set(asked.names or ()) - set(SUPPORTED_ARCHITECTURES)
    if unknown:
        parser.error(f"TransformerLens {version('transformer-lens')} maps no {', '.join(sorted(unknown))}")
    wanted = [model for model in everything() if not asked.names or model[0] in asked.names]
    kept = read()[1] if asked.names and RESULTS.exists() else []
    known = {(row.name, row.variant): row for row in kept if row.name not in (asked.names or ())}
    for row in tqdm(run_all(wanted, asked.jobs, asked.limit), total=len(wanted), desc="models"):
        known[row.name, row.variant] = row
        tqdm.write(f"{row.verdict:24} {row.title:60} {_finding(row)[:200]}")
    rows = [known[model] for model in everything() if model in known]
    versions = {name: version(name) for name in VERSIONS}
    found = {"versions": versions, "rows": [asdict(row) for row in rows]}
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), versions, rows), encoding="utf-8")
    TABLE.write_text(table(rows), encoding="utf-8")
    wrong = [row.title for row in rows if row.verdict == WRONG]
    print("SILENTLY WRONG: " + ", ".join(wrong) if wrong else "nothing is silently wrong", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
