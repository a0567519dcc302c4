"""Every notebook in examples/ runs from top to bottom, and shows what it ends its cells with."""

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))


def cells(path):
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def run(source, names):
    """Execute one cell as a notebook does: what its last expression gives is displayed."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is not None:
        shown = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
        getattr(shown, "_repr_html_", shown.__repr__)()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.few(3)
def test_notebook_runs(path):
    names = {"__name__": "__main__"}
    for cell in cells(path):
        if cell["cell_type"] == "code":
            run("".join(cell["source"]), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_says_what_differs_elsewhere(path):
    text = "".join("".join(cell["source"]) for cell in cells(path))
    assert '"gpt2"' in text
    assert "TransformerBridge" in text
    assert "BERT" in text
    assert not any(cell.get("outputs") for cell in cells(path))  # outputs belong to the built documentation


def test_none_is_missing():
    assert [path.stem[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5", "6", "7", "8", "9"]
