"""Every Python block of the README runs, and the commands it names exist."""

import re
from pathlib import Path

import pytest

import tensorlens_tl as tlens

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)


def test_blocks_run_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in BLOCKS:
        if "from_pretrained(" in block or "boot_transformers(" in block:
            compile(block, "README.md", "exec")  # needs the hub
        else:
            exec(block, names)
    assert {path.name for path in tmp_path.iterdir()} == {"graph.html", "circuit.html"}


def test_the_output_is_that_of_the_first_block(capsys):
    exec(BLOCKS[0], {})
    printed = re.sub(r"[│┃├┤┼─━┏┓┗┛┡┩┴┳╇└┘]", " ", capsys.readouterr().out).split()
    shown = re.search(r"```\n(tensorlens: .*?)```", TEXT, flags=re.S)[1].split()
    gap = shown.index("gap") + 1
    assert float(shown.pop(gap)) < 1e-6
    assert float(printed.pop(printed.index("gap") + 1)) < 1e-6
    assert shown == printed


def of_this_package(method):
    """Other tests register methods of their own."""
    return tlens.get_method(method).function.__module__.startswith("tensorlens_tl.")


def test_it_is_short_and_its_numbers_hold():
    assert len(TEXT.split()) <= 600
    built_in = [name for name in tlens.list_methods() if of_this_package(name)]
    assert f"# {len(built_in)} methods; all return the same type" in TEXT


def test_there_is_a_ten_line_example():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 10


def test_commands_named_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make ([a-z0-9-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


@pytest.mark.parametrize("link", ["hooks", "methods"])
def test_the_two_links_of_the_repository_resolve(link):
    assert (ROOT / link).resolve() == ROOT / "tensorlens_tl" / link
