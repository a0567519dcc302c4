"""A method published by a package of its own, installed as a user would, is found and passes the shipped battery."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "examples" / "third-party-method"
SCRIPT = """
import tensorlens_tl as tlens
from tensorlens_tl.testing import check_method
assert "value-times-attention" in tlens.list_methods(), tlens.list_methods()
assert check_method("value-times-attention", ["bridge/gpt2", "bridge/neox", "bridge/bert"]) == {}
print("passed")
"""


@pytest.mark.whole
def test_installed_from_its_own_folder(tmp_path):
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), str(PACKAGE)]
    subprocess.run(install, check=True, capture_output=True, text=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert run.stdout.strip() == "passed", run.stderr


def test_it_is_twenty_lines():
    source = (PACKAGE / "tlens_values" / "__init__.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 20
