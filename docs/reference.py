"""The API reference: what stands on pages of `docs/api` as one directive becomes a page for each name.

`docs/api/*.md` says which names there are and in which order. At each build, a page that holds `SPLIT` shows a table of
links in place of what its directives document, and every function and class has a page of its own in `docs/api/names`.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path
from types import FunctionType

API = Path(__file__).parent / "api"
NAMES = API / "names"
SPLIT = "<!-- a page for each name -->"
DIRECTIVE = re.compile(r"^\.\. auto(module|class|function):: ([\w.]+)\n((?: {3}:.*\n)*)", flags=re.M)
BLOCK = re.compile(r"```\{eval-rst\}\n(.*?)```\n?", flags=re.S)
PAGE = """---
orphan: true
---

# {title}

{{doc}}`{area} <../{stem}>`

{more}```{{eval-rst}}
{directives}```
"""
LARGE = 30
"""With more members than these, a class shows its methods on a page of their own."""


def write(app):
    """Write the page of every name."""
    NAMES.mkdir(exist_ok=True)
    written = set()
    for path in sorted(API.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if SPLIT not in text:
            continue
        area = re.findall(r"^# (.*)$", text, flags=re.M)[0]
        for kind, name, options in [*documented(text), *explained(text)]:
            stem, methods = file_of(kind, name), own_methods(kind, name)
            pages = {stem: (short(name), "", f".. auto{kind}:: {name}\n{options}")}
            if methods:
                left_out = f".. auto{kind}:: {name}\n{options}   :exclude-members: {', '.join(methods)}\n"
                apart = "".join(f".. automethod:: {name}.{method}\n\n" for method in methods)
                link = f"{{doc}}`Its methods <{stem}-methods>`\n\n"
                pages = {
                    stem: (short(name), link, left_out),
                    f"{stem}-methods": (f"Methods of {short(name)}", "", apart),
                }
            for each, (title, more, directives) in pages.items():
                page = PAGE.format(title=title, area=area, stem=path.stem, more=more, directives=directives)
                target = NAMES / f"{each}.md"
                if not target.exists() or target.read_text(encoding="utf-8") != page:
                    target.write_text(page, encoding="utf-8")
                written.add(target)
    for old in set(NAMES.iterdir()) - written:
        old.unlink()


def own_methods(kind, name):
    """The methods of a class that has so many members that they need a page of their own."""
    if kind != "class":
        return []
    members = {key: member for key, member in vars(resolved(name)).items() if key[0] != "_" and inspect.getdoc(member)}
    kinds = (FunctionType, classmethod, staticmethod)
    return [key for key, member in members.items() if isinstance(member, kinds)] if len(members) > LARGE else []


def read(app, page, source):
    """Show links to the pages of names, in sections by the module that defines them."""
    if not page.startswith("api/") or SPLIT not in source[0]:
        return
    text = source[0].replace(SPLIT, "")
    names = [name for _, name, _ in documented(text)]
    placed = set()
    for module in re.findall(r"^\.\. automodule:: ([\w.]+)\n(?: {3}:.*\n)* {3}:no-members:", text, flags=re.M):
        here = [name for name in names if name not in placed and home(name) == module]
        placed.update(here)
        if here:
            block = next(block for block in BLOCK.finditer(text) if f"automodule:: {module}\n" in block[0])
            text = text[: block.end()] + "\n" + table(here) + text[block.end() :]
    first = [name for name in names if name not in placed]
    text = BLOCK.sub(without_objects, text)
    title, _, rest = text.partition("\n")
    start = rest.find("\n## ")
    start = len(rest) if start < 0 else start
    source[0] = f"{title}\n{rest[:start]}\n\n{table(first) if first else ''}{rest[start:]}"


def documented(text):
    """Every function and class that the directives of a page document, with the directive of its own page."""
    found = []
    for kind, name, options in DIRECTIVE.findall(text):
        if ":no-index:" in options and kind == "module":
            continue
        if kind != "module":
            found.append((kind, name, options))
            continue
        if ":no-members:" in options:
            continue
        module = importlib.import_module(name)
        left_out = re.findall(r"\w+", "".join(re.findall(r":exclude-members:(.*)", options)))
        inherited = "".join(re.findall(r" {3}:(?:inherited-members|show-inheritance):.*\n", options))
        names = getattr(module, "__all__", [n for n, o in vars(module).items() if is_here(o, name)])
        for each in names:
            thing = getattr(module, each)
            if each in left_out:
                continue
            if inspect.isclass(thing):
                found.append(("class", f"{name}.{each}", f"   :members:\n{inherited}"))
            elif inspect.isroutine(thing):
                found.append(("function", f"{name}.{each}", ""))
    return found


def explained(text):
    """Every module whose docstring explains how something is computed, below the first one of a page."""
    modules = [found for found in DIRECTIVE.findall(text) if found[0] == "module" and ":no-members:" in found[2]]
    return [found for found in modules if found[1].count(".") > 1]


def file_of(kind, name):
    """The file of a page: a function can have the name of its module."""
    return f"{'about-' if kind == 'module' else ''}{short(name)}"


def is_here(thing, module):
    """True if it is public in a module that has no `__all__`."""
    return getattr(thing, "__module__", None) == module and getattr(thing, "__name__", "_")[0] != "_"


def without_objects(block):
    """A block of directives without what has a page of its own; a module's explanation is a link."""
    stays, links = [], []
    for part in re.split(r"^(?=\.\. )", block[1], flags=re.M):
        match = DIRECTIVE.match(part)
        if match is None:
            stays.append(part)
        elif match[1] == "module" and ":no-members:" in part and match[2].count(".") > 1:
            what = summary(match[2]).replace("`", "").rstrip(".")
            links.append(f"{{doc}}`{what} <names/{file_of('module', match[2])}>`\n")
        elif match[1] == "module":
            stays.append(f".. automodule:: {match[2]}\n   :no-members:\n\n")
    text = "".join(stays)
    shown = f"```{{eval-rst}}\n{text}```\n" if text.strip() else ""
    return "\n".join([*links, shown])


def table(names):
    """Links, each with the first sentence of what it documents."""
    rows = [f"| [`{short(name)}`](#{name}) | {summary(name)} |" for name in names]
    return "\n".join(["| name | what it does |", "| --- | --- |", *rows]) + "\n"


def short(name):
    """A name as one writes it after `import tensorlens_tl as tlens`."""
    return name.removeprefix("tensorlens_tl.")


def resolved(name):
    """The object of a dotted name."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


def home(name):
    """The module that defines a name."""
    return resolved(name).__module__


def summary(name):
    """The first sentence of a docstring, for a cell of a table."""
    thing = sys.modules.get(name) or resolved(name)
    text = inspect.getdoc(thing) or ""
    first = re.split(r"(?<=[.?!:])\s", re.sub(r"\s+", " ", text.partition("\n\n")[0]))[0]
    return first.rstrip(":").replace("``", "`").replace("|", "\\|")
