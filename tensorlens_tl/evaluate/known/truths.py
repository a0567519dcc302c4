"""What is known of a model besides the source tokens: which components make the answer, and what chose the attention.

`KnownComponents` and `KnownAttention` are to components and attention what `KnownAnswers` is to tokens. Nobody knows
them of a trained model; a hand-constructed model states them (`tensorlens_tl.demo.programs`).
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.known.pairs import PromptPairs

Place = tuple[str, int]
"""A node at a position, such as ``("L0H3", 5)``: where it writes."""


@dataclass(frozen=True)
class KnownComponents:
    """Prompts whose answer known components compute.

    Attributes:
        name: of the task.
        pairs: the prompts, each beside a corrupted one.
        paths: for each prompt, the paths along which the answer's content comes to the last position: places in their
            order, from an embedding to the node that writes to the target.
        nodes: what carries the difference between clean and corrupted prompt, named as by `circuits.patch_scores`;
            ``"embed"`` is the first block's input.
        edges: the same for edges, named as by `circuits.edge_scores`.
    """

    name: str
    pairs: PromptPairs
    paths: tuple[tuple[tuple[Place, ...], ...], ...]
    nodes: frozenset[str]
    edges: frozenset[str]

    def __post_init__(self) -> None:
        if len(self.paths) != len(self.pairs):
            raise InvalidInputError(
                f"KnownComponents: paths of {len(self.paths)} prompts, but there are {len(self.pairs)} prompts."
            )
        if not self.nodes or not self.edges or not all(paths and all(paths) for paths in self.paths):
            raise InvalidInputError(
                f"KnownComponents: {self.name!r} has a prompt without a path, or no true node or edge; each is needed."
            )

    def __len__(self) -> int:
        return len(self.pairs)

    def __repr__(self) -> str:
        return f"KnownComponents({self.name!r}, prompts={len(self)}, nodes={sorted(self.nodes)})"


@dataclass(frozen=True)
class KnownChoice:
    """Why one head attends from one position to another.

    Attributes:
        layer, head: which head.
        query, key: the two positions in each prompt, `[prompt]`.
        query_tokens, key_tokens: for each prompt, the positions of the tokens that make the head's query, and its key.
        query_parts, key_parts: the components that write what the head's query, and its key, is read from.
    """

    layer: int
    head: int
    query: Int[Tensor, "prompt"]
    key: Int[Tensor, "..."]
    query_tokens: tuple[frozenset[int], ...]
    key_tokens: tuple[frozenset[int], ...]
    query_parts: frozenset[str]
    key_parts: frozenset[str]


@dataclass(frozen=True)
class KnownAttention:
    """Prompts with known reasons for where heads attend.

    Attributes:
        name: of the task.
        tokens: `[prompt, pos]`, all of one length.
        choices: what is known, the same heads for every prompt.
    """

    name: str
    tokens: Int[Tensor, "prompt pos"]
    choices: tuple[KnownChoice, ...]

    def __post_init__(self) -> None:
        prompts, pos = self.tokens.shape
        if not self.choices:
            raise InvalidInputError(f"KnownAttention: {self.name!r} has no choices; state at least one head's.")
        for choice in self.choices:
            where = f"KnownAttention: L{choice.layer}H{choice.head} of {self.name!r}"
            lengths = {len(choice.query), len(choice.key), len(choice.query_tokens), len(choice.key_tokens)}
            if lengths != {prompts}:
                raise InvalidInputError(f"{where} is stated for {sorted(lengths)} prompts; there are {prompts}.")
            ends = torch.cat([choice.query, choice.key])
            positions = frozenset(ends.tolist()).union(*choice.query_tokens, *choice.key_tokens)
            if not all(0 <= position < pos for position in positions):
                raise InvalidInputError(f"{where} names a position outside 0 to {pos - 1}.")
            if not all((*choice.query_tokens, *choice.key_tokens, choice.query_parts, choice.key_parts)):
                raise InvalidInputError(f"{where} lacks a true source of its query or of its key.")

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        heads = ", ".join(f"L{choice.layer}H{choice.head}" for choice in self.choices)
        return f"KnownAttention({self.name!r}, prompts={len(self)}, heads={heads})"


if TYPE_CHECKING:
    ComponentTask = KnownComponents
    AttentionTask = KnownAttention
else:
    ComponentTask = AttentionTask = Any  # another object is refused with a message
