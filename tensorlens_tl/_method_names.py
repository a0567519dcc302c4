"""Names of methods, without an import of the methods: torch alone takes seconds, which a typing error need not cost."""

import re
from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tensorlens_tl._arguments import nearest

ENTRY_POINTS = "tensorlens_tl.methods"

SYNONYMS = {
    "ig": "integrated-gradients",
    "gradient-x-input": "input-x-gradient",
    "ixg": "input-x-gradient",
    "occlusion": "leave-one-out",
    "loo": "leave-one-out",
    "lrp": "attnlrp",
    "attention-rollout": "rollout",
    "raw-attention": "attention",
    "information-flow-routes": "ifr",
    "transformer-attribution": "chefer",
    "vector-norms": "norm",
}
"""What the literature calls methods."""


def unknown_method(name: Any, known: Iterable[str]) -> str:
    """What to say about a name that is none of the known ones: the nearest, or all of them where none is near."""
    known = list(known)
    near = nearest(name, known, SYNONYMS)
    if near:
        return f"no method called {name!r}.{near}"
    return f"no method called {name!r}. There are {', '.join(map(repr, known))}."


def is_ours(value: str) -> bool:
    """Whether a module, or what an entry point names, is part of this package."""
    return value.partition(":")[0].partition(".")[0] == __name__.partition(".")[0]


def published_elsewhere() -> bool:
    """Whether another installed package publishes methods, whose names are not known before it is imported."""
    return not all(is_ours(point.value) for point in entry_points(group=ENTRY_POINTS))


def built_in_methods() -> list[str]:
    """The names under which this package registers methods, as its source has them.

    >>> "alti-logit" in built_in_methods()
    True
    """
    files = sorted((Path(__file__).parent / "methods").glob("*.py"))
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    return sorted(re.findall(r'^@register_(?:method|alias)\(\s*"([\w-]+)"', source, flags=re.MULTILINE))
