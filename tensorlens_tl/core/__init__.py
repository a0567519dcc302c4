"""Runs whose gradient is a linear map defined by a rule, in terms of kinds of operations, not of architectures."""

from tensorlens_tl.core.linearise import Linearised, activation, refuse_other_functions, ruled
from tensorlens_tl.core.pairing import Constant
from tensorlens_tl.core.pairs import Paired, in_two_runs, paired, readable
from tensorlens_tl.core.recorded import Cuts, Recorded, Side, depends, gradients, recordable
from tensorlens_tl.core.rules import (
    ATTNLRP,
    FROZEN,
    GIM,
    RELP,
    RULES,
    SAME_VALUE as SAME_VALUE,
    TANGENT,
    Rule,
    by_ratio,
    constant,
    doubted,
    gates_held,
    held,
    rule_of,
    shared,
    stands,
    unchanged,
)

__all__ = [
    "ATTNLRP",
    "FROZEN",
    "GIM",
    "RELP",
    "RULES",
    "TANGENT",
    "Constant",
    "Cuts",
    "Linearised",
    "Paired",
    "Recorded",
    "Rule",
    "Side",
    "activation",
    "by_ratio",
    "constant",
    "depends",
    "doubted",
    "gates_held",
    "gradients",
    "held",
    "in_two_runs",
    "paired",
    "readable",
    "recordable",
    "refuse_other_functions",
    "rule_of",
    "ruled",
    "shared",
    "stands",
    "unchanged",
]
