"""What nodes and edges are called, and their order in the forward pass.

An edge leads from what one node writes to what a later one reads. Nodes that write are *sources*: the first block's
input (``"embed"``), heads, MLPs. What reads are *destinations*: a head's queries, keys and values (``"L1H0.q"``,
``"L1H0.k"``, ``"L1H0.v"``) and a gate of what it gives (``"L1H0.g"``), MLPs, and the target. An edge is called
``"L0H3 → L1H0.k"``.
"""

import re
import sys
from collections.abc import Sequence

from torch import Tensor

from tensorlens_tl.errors import InvalidInputError

ARROW = " → "
TARGET = "target"


def node_read_at(destination: str) -> str:
    """The node that a destination belongs to: ``"L0H3"`` of ``"L0H3.q"``."""
    return re.sub(r"(H\d+)\.[qkvg]$", r"\1", destination)


def place(name: str) -> tuple[int, int, str, int]:
    """Where a name comes in the order of the forward pass: queries of a layer, keys, values, its MLP."""
    if name == "embed":
        return -1, 0, "", 0
    if name == TARGET:
        return sys.maxsize, 0, "", 0
    match = re.fullmatch(r"L(\d+)H(\d+)(?:\.([qkv]))?|MLP(\d+)", name)
    assert match is not None
    layer, head, letter, mlp = match.groups()
    if mlp is not None:
        return int(mlp), 1, "", 0
    order = {None: "", "q": "0", "k": "1", "v": "2"}
    return int(layer), 0, order[letter], int(head)


def check_shape(sources: Sequence[str], destinations: Sequence[str], *matrices: Tensor) -> None:
    """Raise `InvalidInputError` unless every matrix has a row for each source and a column for each destination."""
    shape = (len(sources), len(destinations))
    for values in matrices:
        if tuple(values.shape) != shape:
            raise InvalidInputError(f"edges: a matrix is {tuple(values.shape)}, not {shape} of sources, destinations.")
