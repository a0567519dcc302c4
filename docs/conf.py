"""Sphinx settings: `make docs` builds the site into docs/_build/html."""

import importlib.metadata
import re

project = "tensorlens_tl"
release = importlib.metadata.version("tensorlens-tl")
copyright = "the tensorlens_tl authors, MIT licence"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = "tensorlens_tl"
html_static_path = ["_static"]
html_css_files = ["pictures.css"]
exclude_patterns = ["_build", "tutorial/third-party-method"]

# every notebook runs, at every build: a page that shows an old result would be worse than none
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars, and what the machine at hand warns about
suppress_warnings = ["mystnb.unknown_mime_type"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
default_role = "code"  # docstrings write `names` as Markdown does

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_use_rtype = False
napoleon_use_ivar = True


def as_written(app, what, name, obj, options, lines):
    """Let docstrings look as they do in the source: tables and indented formulas verbatim, ``|x|`` a size."""
    if what in ("data", "attribute") and lines:
        lines[0] = lines[0].replace(": ", " - ", 1)  # napoleon would take what stands before a colon for a type
    made, verbatim = [], False
    for line in lines:
        block = line.startswith("| ") or (what == "module" and line.startswith("    "))
        if block and not verbatim and not (made and made[-1].rstrip().endswith("::")):
            made += [*([""] if made and made[-1] else []), "::", ""]
        verbatim = block or (verbatim and not line)
        bars = re.sub(r"(?<![`|\\])\|(?!`)", r"\|", line)
        made.append(f"   {line}" if block else bars)
    lines[:] = made


def setup(app):
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", as_written, priority=400)  # before napoleon reads sections
