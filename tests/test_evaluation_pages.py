"""docs/evaluation.md and its CSV file say what the tables say."""

import runpy
from pathlib import Path

pages = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "evaluation_pages.py"))
TEXT = pages["TABLES"].read_text(encoding="utf-8")


def test_the_overview_and_the_numbers_are_those_of_the_tables():
    """`python benchmarks/evaluation_pages.py` writes both again."""
    assert pages["PAGE"].read_text(encoding="utf-8") == pages["page"]()
    assert pages["NUMBERS"].read_text(encoding="utf-8") == pages["numbers_file"](TEXT)


def test_every_method_of_a_test_is_in_the_overview():
    rows = [line for line in pages["overview"](TEXT).splitlines() if line.startswith("| leave-one-out")]
    first = rows[0].replace(pages["SPACE"], " ")
    assert first.startswith("| leave-one-out | ○ 7.35 | ● -0.373 | 7.74 | ● -0.758 | ○ 15 | ● -0.379 | 2.87 |")


def test_names_with_commas_are_not_divided():
    section = (
        "* `mass`: first is **b**; not significantly different (corrected p ≥ 0.05, paired): a, biases, c. "
        "Best TensorLens: a, behind by 0.1 (corrected p = 1).\n"
    )
    assert pages["leading"](section, "mass", ["a", "a, biases", "b", "c"]) == ("b", {"a, biases", "c"})
    alone = "* `mass`: first is **b**; all others differ from it (corrected p < 0.05).\n"
    assert pages["leading"](alone, "mass", ["a", "b"]) == ("b", set())


def test_a_cell_is_a_mean_with_its_interval():
    text = "### A\n\n| method | x | y |\n| --- | --- | --- |\n| m | **-0.5** [-1, 0] | 3e-05 |\n| n | – | 2 |\n"
    assert [tuple(cell) for cell in pages["cells"](text)] == [
        ("A", "m", "x", "-0.5", "-1", "0"),
        ("A", "m", "y", "3e-05", "", ""),
        ("A", "n", "y", "2", "", ""),
    ]
