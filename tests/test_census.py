"""docs/support.md, its CSV file and benchmarks/census.json say what the census finds on their TransformerLens."""

import importlib
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tensorlens_tl.passes.operator import FrozenOperator
from tensorlens_tl.testing.models import HookedTransformer

if HookedTransformer is not None:
    pytest.skip("the census is of TransformerLens 4", allow_module_level=True)

with patch.object(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path]):
    census, census_checks = (importlib.import_module(name) for name in ("census", "census_checks"))

VERSIONS, ROWS = census.read()
FOUND = {(row.name, row.variant): row for row in ROWS}


def test_every_name_is_there():
    if VERSIONS["transformer-lens"] != census.version("transformer-lens"):
        pytest.skip("another TransformerLens maps other names")
    assert list(FOUND) == census.everything()


def test_the_page_says_what_was_found():
    text = census.PAGE.read_text(encoding="utf-8")
    assert text == census.written(text, VERSIONS, ROWS)
    assert census.TABLE.read_text(encoding="utf-8") == census.table(ROWS)


def test_verdicts_follow_from_errors():
    assert {row.verdict for row in ROWS} <= set(census.VERDICTS)
    for row in ROWS:
        exact = row.verdict in (census.EXACT, census.FLOAT32)
        assert exact is not bool(row.reason), row.title
        if exact:
            limit = 1e-9 if row.verdict == census.EXACT else 1e-6
            assert {"blocks", "output"} <= set(row.errors), row.title
            of_one = [error for claim, error in row.errors.items() if claim != "difference"]
            assert max(of_one) <= limit, row.title
            assert row.errors.get("difference", 0.0) <= 1e-5, row.title


def test_nothing_is_silently_wrong_and_nothing_crashes():
    assert not [row.title for row in ROWS if row.verdict in (census.WRONG, census.CRASH)]


def test_most_names_are_exact():
    """Of the names that can be built and run offline."""
    first = [
        row
        for row in ROWS
        if not row.variant and row.verdict not in (census_checks.NOT_BUILDABLE, census_checks.BRIDGE_FAILS)
    ]
    exact = [row.name for row in first if row.verdict in (census.EXACT, census.FLOAT32)]
    assert len(exact) >= 134
    assert sum("difference" in row.errors for row in first) >= 127
    assert len(first) >= 140


@pytest.mark.parametrize(
    "model",
    [
        ("LlamaForCausalLM", ""),
        ("BertForMaskedLM", ""),
        ("TransformerLensNative", "soft caps"),
        ("DreamModel", ""),
        ("GraniteMoeHybridForCausalLM", ""),
        ("NemotronHForCausalLM", ""),
        ("SwitchTransformersForConditionalGeneration", ""),
    ],
    ids=" ".join,
)
def test_run_again(model):
    again = census.examine(*model)
    assert (again.verdict, set(again.errors)) == (FOUND[model].verdict, set(FOUND[model].errors)), again


REFUSALS = {
    (
        "Gemma3nForConditionalGeneration",
        "",
    ): "blocks.0 of this .* several vectors .* AltUp .* outside of every hook point",
    ("DeepseekV4ForCausalLM", ""): "blocks.0 of this .* several vectors .* hyper-connections .* no pattern",
    ("LongT5ForConditionalGeneration", ""): "LongT5LocalAttention.* no pattern over all pairs of tokens",
}


@pytest.mark.parametrize("model", REFUSALS, ids=" ".join)
def test_what_cannot_be_held_is_refused_by_name(model):
    row = census.examine(*model)
    assert row.verdict == census.REFUSED
    assert re.search(REFUSALS[model], row.reason)


def test_a_wrong_number_is_seen(monkeypatch):
    """The verdict comes from what was measured: an operator that is off by 1e-5 is silently wrong."""
    right = FrozenOperator.pull
    monkeypatch.setattr(FrozenOperator, "pull", lambda self, g: right(self, g) * (1 + 1e-5))
    row = census.examine("GPT2LMHeadModel")
    assert row.verdict == census.WRONG
    assert f"**{row.title} is silently wrong:" in census.counts(VERSIONS, [row])


def test_what_hangs_or_dies_is_a_crash(monkeypatch):
    """A model that takes too long is stopped, one that ends its process is noticed, and the others still run."""

    def examine(name, variant=""):
        if name == "hangs":
            census.time.sleep(60)
        if name == "dies":
            census.os._exit(3)
        return census.Row(name, variant, "Other", census.EXACT, {"blocks": 0.0})

    monkeypatch.setattr(census, "examine", examine)
    rows = {row.name: row for row in census.run_all([(name, "") for name in ("hangs", "dies", "runs")], 2, limit=1.0)}
    assert [rows[name].verdict for name in ("hangs", "dies", "runs")] == [census.CRASH, census.CRASH, census.EXACT]
    assert "exit code 3" in rows["dies"].reason
    assert "time limit" in rows["hangs"].reason
