"""The page of findings: its code runs on the trained model, and its sentences quote what comes out."""

import pytest

from scripts.findings import PAGE, PICTURES, code, numbers, sections
from scripts.gallery import run
from scripts.real_models import FOLDER


@pytest.mark.parametrize("model", ["smollm2"])
def test_sentences_quote_what_the_code_gives(model, tmp_path):
    pytest.importorskip("matplotlib")
    if not (FOLDER / model).exists():
        pytest.skip(f"no {model} in {FOLDER}: make real")
    names = {}
    quoted = 0
    for section in sections():
        run(code(section), names, tmp_path)
        for written, expression, value in numbers(section, names):
            digits = len(written.partition(".")[2])
            number = float(written.replace("−", "-"))
            below = f"less than {written}" in section
            off = abs(value) <= number if below else abs(value - number) <= 10.0**-digits
            assert off, f"{expression} is {value:.4f}, not {written}"
            quoted += 1
    assert quoted > 25
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in PICTURES.iterdir()}
    assert all(f"(_static/findings/{name})" in PAGE.read_text(encoding="utf-8") for name in drawn)
