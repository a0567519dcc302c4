"""What pages say about costs is what benchmarks/RESULTS.md measured."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest

with patch.object(sys, "path", [str(Path(__file__).parents[1] / "benchmarks"), *sys.path]):
    import sentences

PAGE = """# Results

## A

Explained.

| shape | tokens | freeze ÷ forward |
| --- | --- | --- |
| small | 64 | 2.50 |
| small | 128 | 2.00 |
| large | 64 | 1.50 |

*When.*

## B

| what | ms |
| --- | --- |
| `x` | 3 |
"""


@pytest.mark.parametrize(
    ("page", "subject"), sentences.SENTENCES, ids=[f"{p.stem}-{s}" for p, s in sentences.SENTENCES]
)
def test_a_page_says_what_was_measured(page, subject):
    """`python benchmarks/sentences.py` writes all of them again."""
    text = page.read_text(encoding="utf-8")
    assert text == sentences.written(page, subject, text)


def test_a_page_without_the_place_is_an_error():
    with pytest.raises(LookupError, match="has no line"):
        sentences.written(sentences.HOWTO / "17_data_sets.md", "costs", "nothing")


def test_a_cell_is_that_of_the_one_row_that_is_meant():
    tables = sentences.tables(PAGE)
    assert list(tables) == ["A", "B"]
    assert sentences.number(tables["A"], "freeze ÷ forward", shape="small", tokens=128) == 2
    assert sentences.number(tables["B"], "ms", what="`x`") == 3


@pytest.mark.parametrize(("wanted", "count"), [({"shape": "small"}, 2), ({"shape": "small", "tokens": 32}, 0)])
def test_no_row_or_several_are_an_error(wanted, count):
    with pytest.raises(LookupError, match=f"^{count} rows have"):
        sentences.number(sentences.tables(PAGE)["A"], "freeze ÷ forward", **wanted)
