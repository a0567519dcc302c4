"""Many prompts: how long is each, and which of them are frozen together?"""

from collections.abc import Sequence
from typing import Any

from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.prompts import token_rows

WASTE = 0.25
"""The share of a batch that may be padding before a new one begins."""


def tokenized(view: ModelView, input: Any, prepend_bos: bool | None = None) -> list[list[int]]:
    """Each prompt's token ids; see `tensorlens_tl.passes.prompts.prepare` for what may be passed."""
    return [row.tolist() for row in token_rows(view, input, prepend_bos)]


def memory_batches(view: ModelView, lengths: Sequence[int], memory: Memory = None) -> list[list[int]]:
    """Prompts of like length, longest first, as many together as fit the bound when padded to the longest of them.

    Args:
        view: the model.
        lengths: of the prompts, in tokens.
        memory: what the captured activations of one batch may take; None is the library's default.

    Returns:
        Numbers of prompts.
    """
    bound = in_bytes(memory)
    batches: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        batch = batches[-1] if batches else []
        full = (len(batch) + 1) * captured_bytes(view, longest) > bound
        if not batch or full or (len(batch) >= 8 and lengths[number] < (1 - WASTE) * longest):
            batches.append([])
            longest = lengths[number]
        batches[-1].append(number)
    return batches


def captured_bytes(view: ModelView, length: int) -> int:
    """What freezing keeps of one prompt of so many tokens: streams, patterns, pre-activations and ratios."""
    numbers = 0
    for block in view.blocks:
        mlp, attention = block.mlp, block.attention
        hidden = 0 if mlp is None else mlp.W_in.shape[1] * (2 if mlp.W_gate is None else 3)
        numbers += length * (3 * attention.W_V.shape[0] + hidden + 2 * attention.heads * length)
    return numbers * view.blocks[0].attention.W_O.element_size()
