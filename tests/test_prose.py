"""Plain English: phrases that we avoid, in pages, notebooks, docstrings and messages, with what to write instead."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(path for path in (ROOT / "docs").rglob("*.md") if not {"_build", "names", "tutorial"} & set(path.parts)),
    ]
)
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MODULES = sorted((ROOT / "tensorlens_tl").rglob("*.py"))
SCRIPTS = sorted((ROOT / "tensorlens_tl" / "explorer" / "static").glob("*.js"))

EVERYWHERE = {
    r"\bembedded (?:[\w-]+ )?models?\b": "bundled model",
    r"\bother people": "user-installed",
    r"\bnot to be told\b|\bcannot be told (?:from|apart)": "not significantly different",
    r"\bis told in\b": "is explained in",
    r"\bof like length\b": "of similar length",
    r"\b(?:add|sum)s? (?:up )?to (?:nothing|anything)\b": "do not sum to the logit",
    r"\banew\b": "again",
    r"\bheld against\b": "compared with",
    r"\bof yours\b": "your own",
    r"\b(?:model|weights) (?:that|which) (?:was|were) written down\b": "hand-constructed",
    r"\bwhatever has\b": "any object with",
    r"\bbeside its peers\b": "comparison",
    r"\bis another thing\b": "is different",
    r"\babove all\b": "especially",
    r"\bsays? the same of every\b": "applies to every",
}
"""Not in any text that users read."""

IN_PAGES = {
    r"\bsomebody\b": "name the actor, or use the passive",
    r"\b(?:can|may) be asked (?:of|about)\b": "can be computed from, can be explained",
    r"\bquestion is asked\b": "a result is computed",
    r"\brefused in words\b": "raises an error",
    r"\b(?:positions?|tokens?) (?:that (?:is|are) )?asked about\b": "the explained position",
    r"\bdevice that runs\b": "execution device",
    r"\bas (?:it|they) (?:is|are) asked\b": "when called",
    r"\b(?:its|their) residuals?\b(?! (?:stream|connection))": "gap",
    r"\bgo(?:es)? on with\b": "continue with, resume",
    r"\b(?:be|are|were) told apart\b": "distinguished",
    r"\bby which ways\b": "how",
    r"\bmay as well be\b": "can also be",
    r"\b(?:lands?|landed) on\b": "reach, be assigned to",
    r"\bmade by others\b": "generated from earlier ones",
    r"\bhand(?:s|ed)? on\b": "pass on",
    r"\b(?:is|are) level with\b": "on a par with",
    r"\basks? (?:another|every) (?:method|query)\b": "apply another method, explain every query",
    r"\bproof not counted\b": "excluding verification",
    r"\b(?:what goes|what passes) through two\b": "an effect that passes through two",
    r"\bwhat (?:speaks|spoke) (?:for|against)\b": "evidence for, evidence against",
    r"\bnobody reads\b": "too many to inspect",
    r"\btruth (?:is|was) written down\b": "known ground truth",
    r"\btakes? this change apart\b": "split",
}
"""Not in pages and notebooks either."""


def prose(path):
    """A page without its code."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"```.*?```|`[^`\n]*`", " ", path.read_text(encoding="utf-8"), flags=re.S)


def strings(path):
    """The docstrings and messages of a module."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def avoided(text, phrases):
    """The phrases that a text has, each with what to write instead."""
    text = re.sub(r"\s+", " ", text)
    return [
        f"{text[max(0, match.start() - 30) : match.end() + 30]!r}: write {instead!r}"
        for phrase, instead in phrases.items()
        for match in re.finditer(phrase, text, flags=re.IGNORECASE)
    ]


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS], ids=lambda path: str(path.relative_to(ROOT)))
def test_pages(path):
    assert avoided(prose(path), EVERYWHERE | IN_PAGES) == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_and_messages(path):
    assert avoided(strings(path), EVERYWHERE) == []


@pytest.mark.parametrize(
    "text",
    [
        "an embedded language\nmodel",
        "The scores add up to nothing.",
        "It is not to be told from random.",
        "what other people's hooks do",
        "The positions asked about",
    ],
)
def test_a_phrase_is_noticed_across_lines(text):
    assert len(avoided(text, EVERYWHERE | IN_PAGES)) == 1


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_sum_of_the_explorer_has_a_gap(path):
    code = path.read_text(encoding="utf-8")
    assert '"residual' not in code
    assert "their residual" not in code


@pytest.mark.parametrize("path", [*PAGES, *MODULES], ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_installed_that_is_not_released(path):
    found = re.findall(r"pip install ['\"]?tensorlens[-_]tl\b.*", path.read_text(encoding="utf-8"))
    assert found == [], "write: pip install -e '.[…]', in a clone"


def test_code_is_not_prose(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Text `anew`.\n\n```python\nanew = 1\n```\n", encoding="utf-8")
    assert avoided(prose(page), EVERYWHERE) == []


def test_strings_of_code_are_read(tmp_path):
    module = tmp_path / "module.py"
    module.write_text('"""Doc anew."""\nraise ValueError(f"run it anew: {x}")  # anew\n', encoding="utf-8")
    assert len(avoided(strings(module), EVERYWHERE)) == 2
