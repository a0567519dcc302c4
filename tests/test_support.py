"""docs/support.md says what runs: rows and refusals are compared with the installed TransformerLens."""

import re
import runpy
from pathlib import Path

import pytest
from conftest import REPRESENTATIVES

import tensorlens_tl as tlens
from tensorlens_tl.testing import model_names, tiny_input
from tensorlens_tl.testing.models import BRIDGE, HookedTransformer

support = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "support.py"))
ROWS, REASONS = map(support["read"], support["files"](support["version"]("transformer-lens")))
pytestmark = pytest.mark.skipif(not ROWS, reason="docs/support.md is about other versions of TransformerLens")


def table():
    return {row["model"].strip("`"): row for row in ROWS}


def test_every_model_and_method_is_there():
    """After a new model or method: `make support`."""
    rows = table()
    assert list(rows) == model_names()
    asked = ["QK", *support["methods"]()]
    assert list(next(iter(rows.values())))[-len(asked) :] == asked
    used = {cell for row in rows.values() for cell in row.values() if cell.isdigit()}
    assert used == {row["number"] for row in REASONS} - {"–"}


def test_what_only_the_other_release_line_has_is_named():
    """Every family that has no row here, with a reason; other lines' reasons are not in this section."""
    missing = {f"bridge/{family}" for family in BRIDGE} - set(table())
    line = support["absent"]()
    assert REASONS[-1] == {"number": "–", "reason": line}
    assert set(re.findall(r"`(bridge/[\w-]+)`", line)) == missing
    assert ("HookedEncoderDecoder, which" in line) is (HookedTransformer is None)


def test_the_page_has_the_tables_and_what_methods_need():
    """`make support` writes them."""
    text = support["PATH"].read_text(encoding="utf-8")
    assert support["written"](text) == text


@pytest.mark.parametrize("name", sorted(REPRESENTATIVES & set(model_names())))
def test_refusals_are_those_of_the_requirements(name, model):
    """The table says of each cell what the registrations say; what holds is run by the battery."""
    row, refusals = table()[name], support["refusals"](model)
    assert {method for method in refusals if row[method] != "✓"} == {method for method, why in refusals.items() if why}


@pytest.mark.whole
@pytest.mark.parametrize("name", model_names())
def test_what_is_refused_is_refused_and_nothing_else(name, model):
    row, frozen = table()[name], tlens.freeze(model, [[3, 4, 5]], **tiny_input(model, 1, 3)[1])
    refused = {}
    for method in support["methods"]():
        try:
            tlens.attribute(frozen, method=method, **support["options"](method))
        except tlens.UnsupportedModelError as error:
            refused[method] = str(error)
    assert {method for method in support["methods"]() if row[method] != "✓"} == set(refused)
    assert (row["QK"] == "✓") is (support["scores_read"](model) == "")
    assert row["blocks"] == ", ".join(dict.fromkeys(layout.name for layout in frozen.layouts))
