"""What pages say of tables that are CSV files is what the tables say."""

import csv
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
COMPRESSION, WHITENING = "howto/7_compress_attention.md", "howto/8_whiten_a_model.md"


def cell(table, row, column):
    """The number of one cell, without its interval."""
    with (DOCS / "_static" / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        (found,) = [line for line in csv.DictReader(file) if row.items() <= line.items()]
    return found[column].split(" ")[0]


def added(method):
    return {"model": "language", "number": "added loss", "method": method}


@pytest.mark.parametrize(
    ("page", "sentence", "cells"),
    [
        (
            COMPRESSION,
            "rises by {} nats per token with Tucker, by {} with LASER and by {} with circuit SVD",
            [("compression", added(method), "÷ 2") for method in ("Tucker (paper)", "LASER", "circuit SVD")],
        ),
        (
            COMPRESSION,
            "make up most of this difference** at this ratio: with both options, the loss rises by {}. Choosing the "
            "ranks freely instead of by the paper's rule helps a little ({}). A second layout of the stacked tensor, "
            "which splits d_model instead of the heads, is worse ({}).",
            [
                ("compression", added(f"Tucker{method}"), "÷ 2")
                for method in (", circuit gauge, balanced", ", any ranks", " (released layout)")
            ],
        ),
        (
            COMPRESSION,
            "rounding to 4 bits (an eighth of the size, counted as ratio 8) costs {} nats.",
            [("compression", added("rounding"), "÷ 8")],
        ),
        (WHITENING, "{} nats per character below", [("whitening-training", {"model": "whitened"}, "below standard")]),
        (WHITENING, "{} of 6,000 steps", [("whitening-steps", {"model": "whitened"}, "standard's steps")]),
    ],
)
def test_a_page_quotes_its_table(page, sentence, cells):
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    assert sentence.format(*(cell(*each) for each in cells)) in text


def test_every_architecture_that_cannot_be_frozen_is_named():
    page = (DOCS / "howto" / "4_model_families.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if "cannot be frozen" in line]
    with (DOCS / "_static" / "census.csv").open(encoding="utf-8", newline="") as file:
        refused = {line["name"] for line in csv.DictReader(file) if line["verdict"] == "refused"}
    names = {re.sub("For(CausalLM|ConditionalGeneration)", "", name.strip("`").split("`")[0]) for name in refused}
    assert {name for name in names if f"`{name}`" not in row} == {"TransformerLensNative"}
    assert "solu_ln" in row
    assert any("solu_ln" in name for name in refused)


def test_no_compression_raises_accuracy():
    with (DOCS / "_static" / "compression-raised.csv").open(encoding="utf-8", newline="") as file:
        changes = [float(row["accuracy change on the other prompts"].split(" ")[0]) for row in csv.DictReader(file)]
    assert max(changes) == 0
