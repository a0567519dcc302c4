"""Names of methods: what is said about one that is not registered."""

from collections.abc import Iterable
from typing import Any

from tensorlens_tl._arguments import nearest

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
