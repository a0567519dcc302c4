"""Every Python block of the README runs, and the commands it names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block, tmp_path, monkeypatch):
    if "from_pretrained(" in block or "boot_transformers(" in block:
        compile(block, "README.md", "exec")  # needs the hub
        return
    monkeypatch.chdir(tmp_path)
    exec(block, {})


def test_there_is_a_ten_line_example():
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 10


def test_commands_named_in_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`?make ([a-z0-9-]+)", TEXT):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


@pytest.mark.parametrize("link", ["hooks", "methods"])
def test_the_two_links_of_the_repository_resolve(link):
    assert (ROOT / link).resolve() == ROOT / "tensorlens_tl" / link
