"""The documentation: its code runs, its links lead to what they name, and the reference shows what is public."""

import contextlib
import importlib
import inspect
import pkgutil
import re
import runpy
from functools import cached_property, reduce
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import tensorlens_tl as tlens
from scripts import choose, method_pages
from scripts.gallery import texts
from tensorlens_tl.testing.models import HookedTransformer

DOCS = Path(__file__).parent.parent / "docs"
API = sorted((DOCS / "api").glob("*.md"))
PAGES = sorted(path for path in DOCS.rglob("*.md") if not {"_build", "names", "tutorial"} & set(path.parts))
HOW_TO = [DOCS / "install.md", *sorted((DOCS / "howto").glob("*.md"))]
SECTIONS = ["Cost", "Trust", "Source", "Deviations"]
PACKAGES = [found.name for found in pkgutil.iter_modules(tlens.__path__, "tensorlens_tl.") if found.ispkg]
DIRECTIVE = re.compile(r"^\.\. auto(\w+):: ([\w.]+)\n((?: {3}:.*\n)*)", flags=re.M)
EXCLUDED = re.compile(r":exclude-members:(.*)")


def resolve(name):
    """The object of a dotted name; where a function is called as its module, the function."""
    first, *parts = name.split(".")
    with contextlib.suppress(AttributeError):
        return reduce(getattr, parts, importlib.import_module(first))
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module(name)
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def reference():
    """Every name that the pages of the reference show, as autodoc reads their directives."""
    shown = []
    for kind, name, options in DIRECTIVE.findall("".join(path.read_text(encoding="utf-8") for path in API)):
        shown += [] if ":no-index:" in options else [name]
        if kind == "module" and ":no-members:" not in options:
            module, left_out = importlib.import_module(name), re.findall(r"\w+", "".join(EXCLUDED.findall(options)))
            listed = getattr(module, "__all__", [n for n, o in vars(module).items() if here(o, name)])
            # a constant has no docstring that autodoc finds: each needs a directive of its own
            listed = {n: getattr(module, n) for n in listed if n not in left_out}
            classes = {f"{name}.{n}": o for n, o in listed.items() if inspect.isclass(o)}
            shown += [*classes, *(f"{name}.{n}" for n, o in listed.items() if inspect.isroutine(o))]
        else:
            classes = {name: resolve(name)} if kind == "class" else {}
        for each, cls in classes.items():
            bases = [base for base in cls.__mro__ if base.__module__.startswith("tensorlens_tl")]
            shown += {
                f"{each}.{n}" for base in bases if base is cls or ":inherited" in options for n in described(base)
            }
    return shown


def described(cls):
    """The public methods and properties that a class itself defines, with a docstring."""
    kinds = (property, cached_property, classmethod, staticmethod, FunctionType)
    return [
        name for name, member in vars(cls).items() if name[0] != "_" and isinstance(member, kinds) and member.__doc__
    ]


def here(thing, module):
    """Whether it is public in a module that has no `__all__`."""
    return getattr(thing, "__module__", None) == module and getattr(thing, "__name__", "_")[0] != "_"


@pytest.fixture(scope="module")
def shown():
    return reference()


@pytest.mark.parametrize("path", HOW_TO, ids=lambda path: path.stem)
@pytest.mark.few(5)
def test_how_to_pages_run(path, tmp_path, monkeypatch, clean_registry):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.S):
        code = compile(block, path.name, "exec")
        booted = re.findall(r"boot_transformers\((.*?)[,)]", block)
        if set(booted) <= {'"my-model"'}:  # others need the hub
            exec(code, names)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_links_lead_to_what_they_name(path, shown):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(#(tensorlens_tl[\w.]*)\)", text):
        assert resolve(target) is not None
        assert target in shown, "no page of the reference shows it"
    for target in re.findall(r"\]\(([\w/.-]+\.(?:md|ipynb))\)", text):
        assert (path.parent / target).exists(), target


def test_every_formula_of_the_mathematics_is_linked():
    """Each row of a table with calls names the function that computes it."""
    lines = (DOCS / "mathematics.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|") and "---" not in line]
    headings = ("| what is frozen", "| name")
    assert len(rows) > 12
    for row in rows:
        assert row.startswith(headings) or "](#tensorlens_tl." in row, row


@pytest.mark.parametrize(
    "method",
    [
        name
        for name in tlens.list_methods()
        if tlens.get_method(name).function.__module__.startswith("tensorlens_tl.methods")
    ],
)
def test_every_method_has_its_section(method):
    page = method_pages.page_of(method)
    text = method_pages.sections((DOCS / "methods" / f"{page}.md").read_text(encoding="utf-8"))[method]
    assert re.findall(r"\*\*(\w+)\.\*\*", text) == SECTIONS
    assert "\n$$\n" in text, "no formula"
    (target,) = re.findall(r"^\[`methods\.\w+`\]\(#(tensorlens_tl\.methods\.\w+)\) ", text, flags=re.M)
    assert resolve(target) is tlens.get_method(method).function
    assert f'method="{method}"' in text
    assert f"methods/{page}.md#{method}" in choose.TABLE.read_text(encoding="utf-8")


@pytest.mark.whole
@pytest.mark.skipif(HookedTransformer is None, reason="measured on a HookedTransformer")
def test_the_table_of_methods_is_what_is_measured():
    """`make choose` writes it again."""
    assert choose.read() == choose.table()


def test_every_method_is_in_the_table_of_methods():
    assert set(choose.QUESTIONS) == set(choose.built_in())


def test_equal_methods_are_recognised():
    """The table would not call two methods the same whose scores differ."""
    model = tlens.load_demo_model()
    scores = choose.results(model)
    assert choose.equals("relp", scores) == ["tensorlens", "cp-lrp"]
    assert choose.equals("alti", scores) == []


@pytest.mark.parametrize("page", sorted(set(method_pages.pages().values())))
def test_every_method_begins_with_its_example(page):
    """`make methods` writes them again."""
    text = (method_pages.PAGES / f"{page}.md").read_text(encoding="utf-8")
    assert text == method_pages.written(text)


@pytest.mark.whole
@pytest.mark.skipif(HookedTransformer is None, reason="drawn with a HookedTransformer")
@pytest.mark.parametrize("name", method_pages.pages())
def test_the_example_of_a_method_draws_its_picture(name, tmp_path):
    """The same words; processors round numbers differently."""
    pytest.importorskip("matplotlib")
    method_pages.draw(name, tmp_path)
    assert texts(tmp_path / f"{name}.svg") == texts(method_pages.PICTURES / f"{name}.svg")


@pytest.mark.parametrize("package", ["tensorlens_tl", *PACKAGES])
def test_every_public_name_is_in_the_reference(package, shown):
    """Each once at least, where it is defined or where it is passed on."""
    module = importlib.import_module(package)
    objects = [resolve(name) for name in shown]
    for name in getattr(module, "__all__", []):
        assert any(getattr(module, name) is found for found in objects), f"{package}.{name}"


def test_every_top_level_name_is_on_its_page():
    text = API[0].read_text(encoding="utf-8")
    for name in vars(tlens)["__all__"]:
        found = getattr(tlens, name)
        error = inspect.isclass(found) and issubclass(found, tlens.TensorLensError)
        assert error or f"[`tlens.{name}`](#" in text, name
    for name, target in re.findall(r"\[`tlens\.(\w+)`\]\(#([\w.]+)\)", text):
        assert resolve(target) is getattr(tlens, name)


def test_a_page_is_written_for_each_name_of_the_reference(shown):
    """`docs/reference.py` splits the pages that ask for it: nothing but constants and short pages stays whole."""
    pages = runpy.run_path(str(DOCS / "reference.py"))
    texts = {path.stem: path.read_text(encoding="utf-8") for path in API}
    split = {stem: text for stem, text in texts.items() if pages["SPLIT"] in text}
    names = [name for text in split.values() for _, name, _ in pages["documented"](text)]
    assert len(names) == len(set(names)) > 250
    assert set(names) <= set(shown)
    left = [name for kind, name, _ in DIRECTIVE.findall("".join(split.values())) if kind in ("function", "class")]
    assert set(left) <= set(names)
    assert set(texts) - set(split) == {"0_names", "6e_datasets"}
    assert pages["summary"]("tensorlens_tl.passes.freeze").startswith("Run")


HEIGHT = {"page": 700, "name": 45, "line": 24}
"""Pixels that a page of the reference takes at a width of 1280, by its names and the lines of their docstrings: fitted
to the heights that Chromium shows, of which none is more than 400 above."""


def test_no_page_of_the_reference_is_too_long_to_read(shown):
    """A class with as many methods needs `LARGE` to be lower, a page of several names to be split."""
    pages = runpy.run_path(str(DOCS / "reference.py"))
    on_page = {}
    for path in API:
        text = path.read_text(encoding="utf-8")
        if pages["SPLIT"] not in text:
            names = [name for _, name, _ in DIRECTIVE.findall(text)]
            on_page[path.stem] = [each for each in shown if any(f"{each}.".startswith(f"{name}.") for name in names)]
            continue
        for kind, name, _ in [*pages["documented"](text), *pages["explained"](text)]:
            apart = [f"{name}.{method}" for method in pages["own_methods"](kind, name)]
            members = [each for each in shown if kind == "class" and each.startswith(f"{name}.")]
            on_page[f"methods of {name}"] = apart
            on_page[name] = [name, *(each for each in members if each not in apart)]
    lines = {
        name: sum(len((inspect.getdoc(resolve(each)) or "").splitlines()) for each in on_page[name]) for name in on_page
    }
    heights = {
        name: HEIGHT["page"] + HEIGHT["name"] * len(on_page[name]) + HEIGHT["line"] * lines[name] for name in on_page
    }
    assert len(heights) > 500
    assert {name: height for name, height in heights.items() if height > 6000} == {}


def test_the_reference_shows_each_name_once(shown):
    assert len(shown) == len(set(shown))


def test_nothing_private_is_in_the_reference(shown):
    for name in shown:
        assert not any(part.startswith("_") for part in name.split(".")), name
    for name in [name for name in shown if isinstance(resolve(name), ModuleType)]:
        assert importlib.import_module(name).__doc__, f"{name} is shown for its docstring"
