"""What nodes and edges are called, and their order in the forward pass.

An edge leads from what one node writes to what a later one reads. Nodes that write are *sources*: the first block's
input (``"embed"``), heads, MLPs. What reads are *destinations*: a head's queries, keys and values (``"L1H0.q"``,
``"L1H0.k"``, ``"L1H0.v"``) and a gate of what it gives (``"L1H0.g"``), MLPs, and the target. An edge is called
``"L0H3 → L1H0.k"``, one into cross-attention ``"L0H3 → L2.cross.H0.k"``.
"""

import re
import sys

ARROW = " → "
TARGET = "target"
HEAD = r"L\d+(?:\.cross\.)?H\d+"
"""What heads are called: of self-attention ``"L0H3"``, of cross-attention ``"L2.cross.H3"``."""
LETTERS = {"q": "0", "k": "1", "v": "2", "g": "3"}
"""The order of what a head reads by."""
CROSS = "4"
"""Heads of cross-attention come after all that."""
OTHERS = {"mixer": 0, "mlp": 1}
"""The order of what else there is in a layer; what hooks add comes last."""


def node_read_at(destination: str) -> str:
    """The node that a destination belongs to: ``"L0H3"`` of ``"L0H3.q"``."""
    return re.sub(r"(H\d+)\.[qkvg]$", r"\1", destination)


def place(name: str) -> tuple[int, int, str, int]:
    """Where a name comes in the order of the forward pass: a layer's heads and those of cross-attention, its MLP, what
    hooks add.
    """
    if name == TARGET:
        return sys.maxsize, 0, "", 0
    match = re.fullmatch(r"L(\d+)(\.cross\.)?H(\d+)(?:\.([qkvg]))?", name)
    if match is not None:
        layer, cross, head, letter = match.groups()
        order = LETTERS.get(letter, "")
        if cross is not None:
            order = CROSS + order
        return int(layer), 0, order, int(head)
    number = re.search(r"\d+", name)
    if number is None:
        return -1, 0, "", 0
    return int(number[0]), OTHERS.get(kind_of(name), 2), name, 0


def kind_of(name: str) -> str:
    """What a node is: embedding, head, mixer, mlp, target, or a bias, which a hook adds."""
    kinds = {"target": TARGET, "embedding": "embed", "head": HEAD, "mlp": r"MLP\d+|L\d+\.per_layer"}
    kinds["mixer"] = r"L\d+\.mixer"
    return next((kind for kind, pattern in kinds.items() if re.fullmatch(pattern, name)), "bias")
