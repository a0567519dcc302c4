"""Sphinx settings: `make docs` builds the site into docs/_build/html."""

import ast
import importlib
import inspect
import re
import sys
from itertools import groupby
from pathlib import Path

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.pycode import ModuleAnalyzer

sys.path.insert(0, str(Path(__file__).parent))

import annotations
import reference
import terms

from tensorlens_tl import __version__

project = "tensorlens_tl"
release = __version__
copyright = "the tensorlens_tl authors, MIT licence"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "tensorlens_tl"
html_math_renderer = "mathml"  # browsers draw it themselves: no script, and nothing from a network
html_static_path = ["_static"]
html_css_files = ["pictures.css"]
html_js_files = ["filter.js"]
exclude_patterns = ["_build", "tutorial/third-party-method"]

# every notebook runs, at every build: a page that shows an old result would be worse than none
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_in_temp = True  # pages write files
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars, and what the machine at hand warns about
suppress_warnings = ["mystnb.unknown_mime_type"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
default_role = "code"  # docstrings write `names` as Markdown does

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False  # a subclass shows what it does otherwise than its base
autodoc_default_options = {"members": True}
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the text says what an attribute is


def as_written(app, what, name, obj, options, lines):
    """Let docstrings look as they do in the source: tables as tables, formulas verbatim, ``|x|`` a size."""
    if what == "data":
        lines[:] = comment_of(name)
    if what in ("data", "property") and lines:
        lines[0] = lines[0].replace(": ", " – ", 1)  # napoleon would take what stands before a colon for a type
    if what == "class" and "Attributes:" not in lines:
        lines += attributes_of_base(obj)
    made = []
    for kind, group in groupby(lines, lambda line: kind_of(line, what)):
        if kind == "table":
            made += table(list(group))
        elif kind == "formula":
            introduced = any(line.rstrip().endswith("::") for line in made[-2:])
            made += [*([] if introduced else ["", "::", ""]), *(f"   {line}" for line in group), ""]
        else:
            made += [re.sub(r"(``.*?``|`[^`]*`)|\|", lambda found: found[1] or r"\|", line) for line in group]
    lines[:] = one_each(made)


def kind_of(line, what):
    """Text, a row of a table, or a formula (indented, in a module's docstring)."""
    return "table" if line.startswith("| ") else "formula" if what == "module" and line.startswith("    ") else "text"


def table(rows):
    """A Markdown table in reStructuredText; the list of a package's own modules is for those who read the source."""
    header, _, *others = ([cell.strip() for cell in row.strip(" |").split(" | ")] for row in rows)
    if header[0] == "module":
        return []
    cells = [f"   {'  -' if column else '* -'} {cell}" for row in (header, *others) for column, cell in enumerate(row)]
    return ["", ".. list-table::", "   :header-rows: 1", "", *cells, ""]


def one_each(lines):
    """Attributes that share a line, each on its own: napoleon does so for arguments only."""
    text = "\n".join(lines)
    before, found, after = text.partition("\nAttributes:\n")
    shared = re.compile(r"^    ([a-z_]\w*(?:, [a-z_]\w*)+)(:.*(?:\n     .*)*)", flags=re.M)
    after = shared.sub(lambda m: "\n".join(f"    {name}{m[2]}" for name in m[1].split(", ")), after)
    return (before + found + after).split("\n")


def comment_of(name):
    """The string below a constant, where it is defined: a package that passes it on has none."""
    package, _, constant = name.rpartition(".")
    module = importlib.import_module(package)
    homes = [
        node.module
        for node in ast.parse(inspect.getsource(module)).body
        if isinstance(node, ast.ImportFrom) and constant in [alias.name for alias in node.names]
    ]
    analyzer = ModuleAnalyzer.for_module(homes[0] if homes else package)
    analyzer.analyze()
    return list(analyzer.attr_docs.get(("", constant), []))


def attributes_of_base(cls):
    """The attributes that a base class describes, for one that adds none."""
    for base in cls.__mro__[1:]:
        text = inspect.cleandoc(base.__doc__ or "")
        if base.__module__.startswith("tensorlens_tl") and "Attributes:" in text:
            return ["", *text[text.index("Attributes:") :].splitlines(), ""]
    return []


def signatures(app, what, name, obj, options, signature, returns):
    """Signatures with the types that the source has; of classes whose fields are in part private, none."""
    if what == "class" and re.search(r"\b_\w+:", signature or ""):
        return "", None
    written = annotations.of(obj)
    untyped = re.compile(r"\b(\w+): (?:~?typing\.)?Any\b(?: \| None)?")
    shown = untyped.sub(lambda match: f"{match[1]}: {written.get(match[1], 'Any')}", signature or "")
    return shown or signature, written.get("return", returns) if (returns or "").endswith("Any") else returns


def skipped(app, what, name, obj, skip, options):
    """Fields of a named tuple are described in its own docstring."""
    return True if str(getattr(obj, "__doc__", "")).startswith("Alias for field number") else None


def inline_formula(self, node):
    """A formula within a line, as MathML."""
    self.body.append(tex2mathml(node.astext()))
    raise SkipNode


def displayed_formula(self, node):
    """A formula by itself, as MathML."""
    self.body.append(f'<div class="formula">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise SkipNode


HEAD = """---
file_format: mystnb
kernelspec:
  name: python3
  display_name: python3
---
"""


def run_how_to(app, page, source):
    """Let the Python of a how-to page run as a notebook's, so that what it gives stands below it."""
    if not page.startswith("howto/"):
        return
    source[0] = HEAD + re.sub(r"```python\n(.*?)```", cell, source[0], flags=re.S)


def cell(block):
    """A block as a cell that runs, unless it needs a model of the hub."""
    needs_hub = re.findall(r"(?:boot_transformers|from_pretrained)\(", block[1])
    return block[0] if needs_hub else f"```{{code-cell}} python\n{block[1]}```"


titles: dict = {}
"""The table of contents of each page, without its sections and documented names."""


def collect_titles(app, env):
    """Cut every page's table of contents to the page's title, unless other pages hang from its sections."""
    for page, contents in env.tocs.items():
        titles[page] = contents.deepcopy()
        if not any(contents.findall(addnodes.toctree)):
            del titles[page][0][1:]


def tree_of_titles(app, page, template, context, doctree):
    """The tree beside a page shows titles alone: to build it out of all documented names took half of the time."""
    tree_of = context["toctree"]

    def tree(**options):
        if not options.get("titles_only"):
            return tree_of(**options)
        contents, app.env.tocs = app.env.tocs, titles
        try:
            return tree_of(**options)
        finally:
            app.env.tocs = contents

    context["toctree"] = tree


def setup(app):
    """Sphinx calls this."""
    app.add_html_math_renderer("mathml", (inline_formula, None), (displayed_formula, None))
    app.connect("builder-inited", reference.write)
    app.connect("source-read", reference.read)
    app.connect("source-read", run_how_to)
    app.connect("doctree-read", terms.link)
    app.connect("autodoc-process-docstring", as_written, priority=400)  # before napoleon reads sections
    app.connect("autodoc-process-signature", signatures)
    app.connect("autodoc-skip-member", skipped)
    app.connect("env-updated", collect_titles)
    app.connect("html-page-context", tree_of_titles, priority=400)  # before the theme calls it
