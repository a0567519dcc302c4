"""What pages say about costs, written from the tables of `RESULTS.md`, so that neither drifts from the other.

``python benchmarks/sentences.py`` writes them again, without measuring; `benchmarks/run.py` does so after every section.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from page import RESULTS

HOWTO = Path(__file__).parent.parent / "docs" / "howto"
END = "<!-- end of the costs -->"

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
    sizes = {8192: "", 2048: ", 2048 tokens a batch", 512: ", 512 tokens a batch"}

    def of(what: str, column: str = "rows/s") -> float:
        return number(rows, column, model="bundled", what=what)

    def of_gpt2(column: str) -> float:
        short = results["Freezing and target maps, in forwards"]
        return number(short, column, shape="GPT-2 small", threads=2, tokens=64)

    ours = {size: of(f"`attribute_dataset`{words}") for size, words in sizes.items()}
    plain = {size: of(f"plain forward, batched{words}") for size, words in sizes.items()}
    loop = of("loop over `attribute`")
    best = max(plain, key=plain.__getitem__)
    memory = {size: of(f"`attribute_dataset`{sizes[size]}", "memory, MB") for size in (8192, 2048)}
    return (
        f"On two cores, `attribute_dataset` explained {of('`attribute_dataset`', 'rows'):,.0f} rows of 16 to 79 tokens on the bundled model "
        f"at {ours[8192]:.0f} rows a second, including every check. That is {ours[8192] / loop:.1f} times the rate of a loop over "
        f"`attribute`, and {ours[8192] / plain[best]:.2f} times that of the fastest batched forward pass. It added {memory[8192]:.0f} MB to the process; with `tokens_per_batch=2048`, it added {memory[2048]:.0f} MB "
        f"and explained {ours[2048]:.0f} rows a second. On GPT-2 small, [freezing a row of 64 tokens and explaining one "
        f"target](../cost.md#run-a-1b-model) takes about {of_gpt2('forward, ms') / 1000 * (of_gpt2('freeze') + of_gpt2('target')):.1f} s."
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
        "For GPT-2 small's shape on two threads, freezing a prompt of 64, 256 or 2,048 tokens takes as long as "
        f"{at(64, 'freeze'):.1f}, {at(256, 'freeze'):.1f} or {at_length(2048, 'freeze'):.1f} forward passes of that prompt; "
        f"a target of one query takes {at(64, 'target'):.2f}, {at(256, 'target'):.2f} or "
        f"{at_length(2048, 'target'):.2f} forward passes. The cost of all queries is quadratic in the prompt's length. "
        f"Explaining all queries takes {every:.2f} forward passes per query at 128 tokens, so about "
        f'{round(2048 * every, -2):.0f} in all at 2,048 tokens (extrapolated). With `patterns="recompute"`, a target of one query takes '
        f"{recomputed[0]:.1f} times as long as with stored patterns at 1,024 tokens and {recomputed[1]:.1f} times at 2,048."
    )


def of_offloaded(results: Tables) -> str:
    """What a model on disk costs beside the same in memory."""
    rows = results["A model on disk beside the same in memory"]

    def line(what: str, words: str) -> str:
        seconds = (number(rows, column, what=f"{what}, s") for column in ("in memory", "on disk", "on disk, cold"))
        return f"| {words} | {' | '.join(f'{each:.1f}' for each in seconds)} |"

    share = number(rows, "on disk", what="memory on disk ÷ weights")
    lines = [
        "Times in seconds for a Llama-like model of 16 layers (3.4 GB of weights) and a prompt of 32 tokens, on two cores:",
        "",
        "| | in memory | on disk | on disk, empty file cache |",
        "| --- | --- | --- | --- |",
        line("freeze", "freezing"),
        line("target, one query", "a target of one query"),
        line("target, all queries", "a target of all queries"),
        line("`input-x-gradient`", "`input-x-gradient`"),
        "",
        f"With the weights on disk, memory use grows by at most {100 * share:.0f} % of the weights' size. Set "
        "`MALLOC_MMAP_THRESHOLD_=1000000`; otherwise, glibc does not release freed memory.",
    ]
    return "\n".join(lines)


def of_all_queries(results: Tables) -> str:
    """What one query of all queries costs, beside the 0.42 forwards that are counted."""
    rows = results["Freezing and target maps, in forwards"]
    column = "all queries ÷ tokens"
    measured = [(row["shape"], float(row[column])) for row in rows if row.get(column)]
    decoders = [number for shape, number in measured if shape != "BERT base"]
    encoder = [number for shape, number in measured if shape == "BERT base"]
    return (
        f"In [measurements](cost.md), each of the n queries cost as much as {min(decoders):.2f} to {max(decoders):.2f} forward passes on "
        f"decoders and {min(encoder):.2f} to {max(encoder):.2f} on an encoder, in which no position can be skipped "
        "(`python benchmarks/run.py`)."
    )


def of_hops(results: Tables) -> str:
    """What two hops of a stretch cost beside the stretch alone, everything included."""
    rows = results["Freezing, questions, generated text and rows from token ids to scores, in forwards"]
    stretches = [f"Llama-like 160M, {tokens} tokens" for tokens in ("96 + 32", "768 + 256")]

    def times(stretch: str, proof: str) -> str:
        alone, hops = (
            number(rows, "forwards", **{"model and input": stretch, "what": f"{what}, {proof} proof"})
            for what in ("a span", "two hops")
        )
        return f"{hops / alone:.2f}"

    whole, sampled = ([times(stretch, proof) for stretch in stretches] for proof in ("whole", "sampled"))
    same = len(set(sampled)) == 1
    ratios = f"both ratios are {sampled[0]}" if same else f"the ratios are {sampled[0]} and {sampled[1]}"
    return (
        "On a Llama-like model with 160 million parameters, freezing and attributing with `hops=2` takes "
        f"{whole[0]} times as long as with `hops=0` (32 tokens generated after a prompt of 96), or {whole[1]} times as "
        "long (256 after 768). With a [sampled proof](../cost.md#what-the-proofs-compute) "
        f'(`verify="sample"`), {ratios}.'
    )


EXPLANATIONS = {
    "freeze": "freezing, needed before any explanation",
    "target and foil over components": "`logit_attribution` by head and MLP",
    "attnlrp": '`method="attnlrp"`',
    "difference": "`tlens.difference` of two frozen prompts",
    "nodes by gradient": "`patch_scores` of two prompts, by gradient",
    "edges of a difference": '`edge_scores` of two prompts, `method="difference"`',
    "graph of a difference": "`contribution_graph` of a difference, including the difference",
}
"""Rows of the table of deep models, in a reader's words."""


def of_this_machine(results: Tables) -> str:
    """What a reader's own model would take: seconds and memory of measured sizes, and forwards for any other."""
    short, long = results["Freezing and target maps, in forwards"], results["Long prompts"]
    disk, deep = (
        results["A model on disk beside the same in memory"],
        results["Questions about deep models, in forwards"],
    )
    rows = [
        "| model | tokens | forward pass, s | freezing, s | scores of one target, s |",
        "| --- | --- | --- | --- | --- |",
    ]
    for shape, name in (("GPT-2 small", "GPT-2 small (124M parameters)"), ("Llama-like 160M", "Llama-like, 160M")):
        for tokens in (64, 256):
            forward, freeze, target = (
                number(short, column, shape=shape, threads=2, tokens=tokens)
                for column in ("forward, ms", "freeze", "target")
            )
            seconds = (forward / 1000, forward * freeze / 1000, forward * target / 1000)
            rows.append(f"| {name} | {tokens} | {' | '.join(f'{each:.2f}' for each in seconds)} |")
    for column in ("in memory", "on disk"):
        freeze, target = (number(disk, column, what=what) for what in ("freeze, s", "target, one query, s"))
        rows.append(f"| Llama-like, 0.85B (3.4 GB), {column} | 32 | – | {freeze:.2f} | {target:.2f} |")
    forwards = ["| explanation | SmolLM2 135M | Llama-like, 48 layers |", "| --- | --- | --- |"]
    for question, words in EXPLANATIONS.items():
        cells = (f"{number(deep, column, question=question):.1f}" for column in ("SmolLM2", "48 layers"))
        forwards.append(f"| {words} | {' | '.join(cells)} |")

    def most(tokens: int, patterns: str) -> str:
        return f"{number(long, 'freezing', shape='GPT-2 small', tokens=tokens, patterns=patterns):,.0f}"

    return "\n\n".join(
        (
            "Yes, two CPU cores are enough. In float32, the weights of a 1B model take 4 GB. These times are for one prompt on two cores:",
            "\n".join(rows),
            "Freezing, and each explanation after it, costs this many forward passes of the model (prompts of 15 tokens, one thread):",
            "\n".join(forwards),
            "(memory-for-explanations)=",
            "**Explanations need memory** beyond that of the weights. Short prompts need little: with the weights on disk, freezing and each timed explanation of a 32-token prompt "
            f"added at most {100 * number(disk, 'on disk', what='memory on disk ÷ weights'):.0f} % of the weights' size. Long prompts need more: at GPT-2 small's shape, "
            f"freezing allocates at most {most(1024, 'keep')} MiB for 1,024 tokens and {most(2048, 'keep')} MiB for 2,048 tokens. "
            f'With `patterns="recompute"`, these are {most(1024, "recompute")} MiB and {most(2048, "recompute")} MiB.',
        )
    )


SENTENCES: dict[tuple[Path, str], Callable[[Tables], str]] = {
    (HOWTO / "3_large_models_and_long_prompts.md", "costs"): of_long_prompts,
    (HOWTO / "3_large_models_and_long_prompts.md", "offloaded"): of_offloaded,
    (HOWTO / "10_generated_text.md", "hops"): of_hops,
    (HOWTO.parent / "mathematics.md", "queries"): of_all_queries,
    (HOWTO / "17_data_sets.md", "costs"): of_data_sets,
    (HOWTO.parent / "cost.md", "machine"): of_this_machine,
}
"""What is written into each page, by its subject there."""


def written(page: Path, subject: str, text: str) -> str:
    """A page's text with what is said of one subject written again."""
    start = f"<!-- {subject}, written by benchmarks/sentences.py -->"
    before, marker, rest = text.partition(start)
    if not marker:
        raise LookupError(f"{page.name} has no line {start}")
    after = rest.partition(END)[2]
    words = SENTENCES[page, subject](tables(RESULTS.read_text(encoding="utf-8")))
    return f"{before}{start}\n\n{words}\n\n{END}{after}"


def main() -> None:
    for page, subject in SENTENCES:
        page.write_text(written(page, subject, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
