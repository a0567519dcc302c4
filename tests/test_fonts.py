"""Letters in figures: another font where the first lacks them, and one warning for those that no font has."""

import warnings
from pathlib import Path

import matplotlib
import pytest
import torch
from matplotlib.font_manager import fontManager
from matplotlib.text import Text

import tensorlens_tl as tlens
from tensorlens_tl.drawing import figure
from tensorlens_tl.drawing.figure import heat_map

HEBREW = "שלום"
THAI = "ภาษา"


@pytest.fixture
def bundled(monkeypatch):
    """Only the fonts that matplotlib brings, on whichever machine; no warning was given yet."""
    bundled = Path(matplotlib.get_data_path())
    ours = [font for font in fontManager.ttflist if bundled in Path(font.fname).parents]
    monkeypatch.setattr(fontManager, "ttflist", ours)
    monkeypatch.setattr(figure, "_WARNED", set())
    figure._font_with.cache_clear()
    yield
    figure._font_with.cache_clear()


def families(ax, letters):
    return [text.get_family() for text in ax.findobj(Text) if text.get_text() == letters]


@pytest.mark.parametrize("kind", ["text", "map"])
def test_another_font_is_taken_and_a_script_without_one_is_warned_of_once(bundled, kind):
    values = torch.tensor([[1.0, -2.0], [0.5, 1.0]]).numpy()

    def drawn():
        if kind == "text":
            return figure.text([HEBREW, THAI], values[0], "t")
        return heat_map(values, ["a", "b"], [HEBREW, THAI], "t")

    with pytest.warns(UserWarning, match="letters of Thai, so") as caught:
        ax = drawn()
    (ours,) = (warning for warning in caught if "no font on this machine" in str(warning.message))
    assert Path(ours.filename).name == "test_fonts.py"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ax = drawn()
    if kind == "text":  # DejaVu Sans Mono has no Hebrew, DejaVu Sans has
        assert families(ax, HEBREW)[0][0] == "DejaVu Sans Mono"
        assert len(families(ax, HEBREW)[0]) > 1
    assert families(ax, "t") in ([], [["sans-serif"]])


@pytest.mark.parametrize("ending", [".png", ".pdf", ".svg"])
def test_a_saved_figure_says_it_once(bundled, ending, tmp_path):
    result = tlens.attribute(tlens.load_demo_model(), f"The {THAI} of {HEBREW}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result.save(tmp_path / f"a{ending}")
        result.save(tmp_path / f"b{ending}")
    assert len([warning for warning in caught if "lyph" in str(warning.message)]) == 0
    assert len([warning for warning in caught if "no font on this machine" in str(warning.message)]) <= 1
    assert (tmp_path / f"a{ending}").read_bytes() == (tmp_path / f"b{ending}").read_bytes()
