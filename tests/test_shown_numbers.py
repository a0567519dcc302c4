"""Numbers in a table are read at a glance: one unit, four digits, and nothing for what rounding leaves."""

from dataclasses import replace

import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl.drawing.marks import numbers

TEXT = "If the file is not found, a File"


@pytest.mark.parametrize("factor", [1e-300, 1e-12, 1e-4, 1.0, 999.0, 1e5, 5e18, 1e300])
def test_a_unit_makes_any_size_readable(factor):
    values = [1.5 * factor, -0.25 * factor, 1e-3 * factor, 1e-9 * factor, 0.0]
    texts, unit = numbers(values)
    assert texts[3:] == ["≈0", "+0"]
    assert max(map(len, texts)) <= len("+1.234e-05")
    for text, value in zip(texts[:3], values[:3], strict=True):
        assert float(text) * float(unit or 1) == pytest.approx(value, rel=1e-3)
        assert abs(float(text)) < 1e5


def test_the_smallest_numbers_are_written_too():
    assert numbers([5e-324, 0.0]) == (["+4.941e-24", "+0"], "1e-300")


def test_a_table_has_one_unit_and_keeps_its_sum(capsys):
    result = tlens.attribute(tlens.load_demo_model(dtype=torch.float64), TEXT)
    result.show()
    assert "score /" not in capsys.readouterr().out
    assert result.bias is not None
    assert result.total is not None
    replace(result, scores=result.scores * 1e18, bias=result.bias * 1e18, total=result.total * 1e18).show(k=99)
    table = capsys.readouterr().out
    assert "score / 1e18" in table
    cells = [line.split("│")[3] for line in table.splitlines() if line.startswith("│")]
    *parts, total = [float(cell.replace("≈", "")) for cell in cells]
    assert sum(parts) == pytest.approx(total, abs=1e-2)
    assert total == pytest.approx(float(result.total), rel=1e-3)


def test_a_map_of_token_pairs_is_not_told_to_take_a_contrast(capsys):
    frozen = tlens.freeze(tlens.load_demo_model(), TEXT)
    result = tlens.attribute(frozen, method="rollout", query=-1)
    at_first = torch.full_like(result.scores, 1e-9)
    at_first[..., 0] = 1.0
    replace(result, scores=at_first).show()
    shown = " ".join(capsys.readouterr().out.split())
    assert "position 0 has 100% of all scores; without(0) leaves it out." in shown
    assert "≈0" in shown
    assert "minus=" not in shown
    alone = tlens.attribute(frozen, " the")
    replace(alone, scores=at_first).show()
    assert "minus=" in capsys.readouterr().out
