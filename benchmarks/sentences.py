"""What pages say about costs, written from the tables of `RESULTS.md`, so that neither drifts from the other.

``python benchmarks/sentences.py`` writes them again, without measuring; `benchmarks/run.py` does so after every section.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from page import RESULTS

HOWTO = Path(__file__).parent.parent / "docs" / "howto"
START, END = "<!-- costs, written by benchmarks/sentences.py -->", "<!-- end of the costs -->"

Row = dict[str, str]
Tables = dict[str, list[Row]]
"""The rows of each section's table, by its heading."""


def tables(text: str) -> Tables:
    """Every table of the page of results."""
    parts = text.split("\n## ")[1:]
    return {part.partition("\n")[0]: rows_of(part) for part in parts}


def rows_of(section: str) -> list[Row]:
    """The rows of a section's first table, each cell by its column."""
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    head, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
    return [dict(zip(head, row, strict=False)) for row in rows]


def number(rows: list[Row], column: str, **wanted: Any) -> float:
    """One cell of the row that has the wanted cells."""
    matches = [row for row in rows if all(row[name] == str(cell) for name, cell in wanted.items())]
    if len(matches) != 1:
        raise LookupError(f"{len(matches)} rows have {wanted}; a sentence needs one.")
    return float(matches[0][column])


def of_data_sets(results: Tables) -> str:
    """How fast rows of a data set go, and in how much memory."""
    rows = results["Rows of a data set: how many a second, and how much memory"]

    def of(what: str, column: str = "rows/s") -> float:
        return number(rows, column, model="bundled", what=what)

    ours = of("`attribute_dataset`")
    plain = of("plain forward, batched")
    loop = of("loop over `attribute`")
    shares = {size: of(f"`attribute_dataset`, {size} tokens a batch", "÷ plain forward's") for size in (2048, 512)}
    return (
        f"On two cores, {of('`attribute_dataset`', 'rows'):,.0f} rows of 16 to 79 tokens on the bundled model went "
        f"through `attribute_dataset` at {ours:.0f} rows a second, including the proof of every pass: "
        f"{ours / plain:.2f} of the rate of the plain model's batched forward ({plain:.0f}), and {ours / loop:.1f} "
        f"times that of a loop over `attribute` ({loop:.0f}). In smaller batches the share of a plain forward in "
        f"batches of that size is {shares[2048]:.2f} (`tokens_per_batch=2048`) and {shares[512]:.2f} (512). Memory is "
        "that of one batch and one shard, besides the token ids of all rows: "
        f"{of('`attribute_dataset`', 'memory, MB'):.0f} MB here."
    )


def of_long_prompts(results: Tables) -> str:
    """How freezing and questions grow with the prompt."""
    short = results["Freezing and target maps, in forwards"]
    long = results["Long prompts"]

    def at(tokens: int, column: str) -> float:
        return number(short, column, shape="GPT-2 small", threads=2, tokens=tokens)

    def at_length(tokens: int, column: str, patterns: str = "keep") -> float:
        return number(long, f"{column} ÷ forward", shape="GPT-2 small", tokens=tokens, patterns=patterns)

    every = at(128, "all queries ÷ tokens")
    recomputed = [at_length(n, "target", "recompute") / at_length(n, "target") for n in (1024, 2048)]
    return (
        "In units of one forward pass of the same prompt, at GPT-2 small's shape and on two threads, freezing with its "
        "whole proof takes "
        f"{at(64, 'freeze'):.1f} forwards at 64 tokens, {at(256, 'freeze'):.1f} at 256 and "
        f"{at_length(2048, 'freeze'):.1f} at 2,048; a target takes {at(64, 'target'):.2f}, {at(256, 'target'):.2f} and "
        f"{at_length(2048, 'target'):.2f}. Asking all queries is quadratic in the prompt: "
        f"{at(64, 'all queries ÷ tokens'):.2f} forwards for each query at 64 tokens and {every:.2f} at 128, so that "
        f"every position of a prompt of 2,048 tokens would take some {round(2048 * every, -2):.0f} forwards "
        '(extrapolated). With `patterns="recompute"` (below) a target costs '
        f"{recomputed[0]:.1f} times as much as with patterns kept at 1,024 tokens, and {recomputed[1]:.1f} times at "
        "2,048."
    )


SENTENCES: dict[Path, Callable[[Tables], str]] = {
    HOWTO / "3_large_models_and_long_prompts.md": of_long_prompts,
    HOWTO / "17_data_sets.md": of_data_sets,
}
"""Each page's paragraph of costs."""


def written(page: Path) -> str:
    """A page with its paragraph of costs written again."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    after = rest.partition(END)[2]
    paragraph = SENTENCES[page](tables(RESULTS.read_text(encoding="utf-8")))
    return f"{before}{START}\n\n{paragraph}\n\n{END}{after}"


def main() -> None:
    for page in SENTENCES:
        page.write_text(written(page), encoding="utf-8")


if __name__ == "__main__":
    main()
