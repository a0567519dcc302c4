"""A run whose gradient is a linear map, by a rule: no architecture is described here, only kinds of operations."""

from tensorlens_tl.core.linearise import Linearised, activation, marked_activations, refuse_other_functions
from tensorlens_tl.core.rules import (
    ATTNLRP,
    GIM,
    RELP,
    SECANT,
    Rule,
    by_ratio,
    held,
    shared,
    stands,
    unchanged,
)

__all__ = [
    "ATTNLRP",
    "GIM",
    "RELP",
    "SECANT",
    "Linearised",
    "Rule",
    "activation",
    "by_ratio",
    "held",
    "marked_activations",
    "refuse_other_functions",
    "shared",
    "stands",
    "unchanged",
]
