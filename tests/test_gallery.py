"""The gallery's code runs, snippet by snippet, and draws the pictures that the page shows."""

import re

import pytest

from scripts.gallery import PAGE, PICTURES, pictures, run, snippets, texts
from tensorlens_tl.testing import model_names

pytest.importorskip("matplotlib")
HAS_HOOKED = any(name.startswith("hooked/") for name in model_names())
MOST_BYTES = 600_000
MOST_LINES = 6


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """What the page's code draws: the folder, and the new files of every snippet."""
    folder = tmp_path_factory.mktemp("gallery")
    names, files = {}, []
    for code in snippets():
        before = set(folder.iterdir())
        run(code, names, folder)
        files.append(sorted(path.name for path in set(folder.iterdir()) - before))
    return folder, files


@pytest.mark.whole
@pytest.mark.whole
def test_each_snippet_draws_the_picture_below_it(drawn):
    _, files = drawn
    assert files[0] == []  # the names that all others use
    assert [names for names in files[1:] if len(names) != 1] == []
    assert [name for (name,) in files[1:]] == pictures()
    blocks = re.findall(r"```python\n|\(_static/gallery/", PAGE.read_text(encoding="utf-8"))
    assert blocks == ["```python\n", *["```python\n", "(_static/gallery/"] * len(pictures())]


def test_snippets_are_short():
    assert max(code.strip().count("\n") + 1 for code in snippets()[1:]) <= MOST_LINES


@pytest.mark.whole
def test_the_pictures_in_the_documentation_are_those_of_the_code(drawn):
    """`make gallery` draws them again.

    On TransformerLens 4, which has no HookedTransformer, value biases are not folded into b_O, and some bars differ.
    """
    folder, _ = drawn
    assert sorted(path.name for path in PICTURES.iterdir()) == sorted(pictures())
    for name in pictures():
        if HAS_HOOKED:
            assert texts(PICTURES / name) == texts(folder / name), name
        assert len(texts(folder / name)) > 2, name
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) < MOST_BYTES


@pytest.mark.whole
def test_a_picture_is_the_same_every_time(drawn, tmp_path):
    names = {}
    for code in snippets()[:2]:
        run(code, names, tmp_path)
    (again,) = tmp_path.iterdir()
    assert again.read_bytes() == (drawn[0] / again.name).read_bytes()


SECTIONS = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    names = {}
    run(snippets()[0], names, tmp_path_factory.mktemp("common"))
    return names


@pytest.mark.whole
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.split("\n")[0])
def test_a_section_needs_no_other(section, common, tmp_path):
    """One copies the first snippet and a section."""
    names = dict(common)
    for code in re.findall(r"```python\n(.*?)```", section, flags=re.S):
        run(code, names, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(re.findall(r"_static/gallery/([\w.-]+)", section))
