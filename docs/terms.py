"""Links from where a page first uses a word of the field to the glossary."""

import re

from docutils import nodes
from sphinx import addnodes

LINKED = {
    "gap": "gap",
    "additive": "additive",
    "frozen pass": "frozen pass",
    "frozen": "frozen",
    "freeze": "freeze",
    "live model": "live",
    "pull": "pull",
    "push": "push",
    "secant": "secant",
    "attention pattern": "pattern",
    "norm scale": "scale",
    "layer map": "layer map",
    "exact difference": "difference",
    "difference of two runs": "difference",
    "hop": "hop",
    "proof": "proof",
    "activation ratio": "activation ratio",
    "direct effect": "direct effect",
    "total effect": "total effect",
    "contribution": "contribution",
    "residual stream": "residual stream",
}
"""Words, each with its entry; words that plain English uses in another sense are left out."""
WORDS = re.compile(rf"\b({'|'.join(sorted(LINKED, key=len, reverse=True))})(?:e?s)?\b", flags=re.I)
PAGES = (
    "howto/",
    "methods/",
    "choose",
    "comparison",
    "cost",
    "guarantees",
    "evaluation",
    "findings",
    "install",
    "index",
    "mathematics",
    "support",
    "troubleshooting",
    "tutorial/",
)
LINKS = (nodes.reference, addnodes.pending_xref)
ELSEWHERE = (nodes.literal, nodes.literal_block, nodes.title, nodes.raw, nodes.math, *LINKS)


def link(app, doctree):
    """Link the first use of each word in a page's paragraphs."""
    page = app.env.docname
    if not page.startswith(PAGES):
        return
    used = set()
    for text in list(doctree.findall(nodes.Text)):
        if outside_prose(text):
            continue
        parts = list(linked(str(text), page, used))
        if len(parts) > 1:
            text.parent.replace(text, parts)


def outside_prose(text):
    """True if it is part of code, a formula, a heading or another link, or of no paragraph."""
    above, inside = text.parent, False
    while above is not None:
        if isinstance(above, ELSEWHERE):
            return True
        inside = inside or isinstance(above, nodes.paragraph)
        above = above.parent
    return not inside


def linked(text, page, used):
    """The text in parts, with a link for each word that was not used before."""
    start = 0
    for match in WORDS.finditer(text):
        term = LINKED[match[1].lower()]
        if term in used:
            continue
        used.add(term)
        options = {"refdomain": "std", "reftype": "term", "reftarget": term, "refdoc": page, "refexplicit": True}
        yield nodes.Text(text[start : match.start()])
        yield addnodes.pending_xref("", nodes.inline("", match[0]), **options)
        start = match.end()
    yield nodes.Text(text[start:])
