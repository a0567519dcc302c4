"""Which positions a query or a key stands for: the one rule everywhere in the library."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tensorlens_tl._arguments import plain, whole_number, whole_slice
from tensorlens_tl.errors import InvalidInputError, PromptNumber
from tensorlens_tl.models import Query
from tensorlens_tl.passes.inputs.prompts import Prompt
from tensorlens_tl.passes.inputs.spans import find_real


def is_all(query: Query) -> bool:
    """True if a query or keys are the word that stands for every position."""
    return isinstance(query, str) and query == "all"


def query_positions(prompt: Prompt, query: Query | None = "all", name: str = "query") -> Int[Tensor, "batch query"]:
    """The positions a query stands for: the one rule for `query` everywhere in the library.

    Args:
        prompt: the prompts.
        query: an integer counts each prompt's real tokens (−1 is the last, or where a classifier of images or sound
            reads its classes: the CLS token); a list holds several; a slice is taken of the real tokens; a text stands
            for the last token of its last occurrence. ``"all"``, the default, stands for every position, padding
            included (whose entries are zero in every result); the word of a prompt is ``" all"``, with its space. A
            tensor `[batch, query]` holds positions of each prompt, padding counted.
        name: the argument's name, for messages. Keys predict nothing: of them −1 is always the last.

    Returns:
        Positions in each prompt's row, padding counted, `[batch, query]`.

    >>> from tensorlens_tl.passes.inputs import query_positions
    >>> frozen.str_tokens[0]
    ['<|bos|>', 'Return', ' the', ' value', '.', ' Return', ' the']
    >>> query_positions(frozen.prompt, -1), query_positions(frozen.prompt, [0, " value"])
    (tensor([[6]]), tensor([[0, 3]]))

    Raises:
        InvalidInputError: None, beyond a prompt's real tokens, not in it, an empty list, or a slice of unequal lengths.
    """
    mask = prompt.mask
    if query is None:
        raise InvalidInputError(f'{name}=None: pass "all" for every position, or -1 for the last.')
    if is_all(query):
        return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    if isinstance(query, Tensor) and query.ndim == 2:
        return _checked(query.to(mask.device), mask, name)
    if isinstance(query, slice):
        query = whole_slice(name, query, why="positions of a prompt")
        return _equally_many([where[query] for where in _real_positions(mask)], mask, f"{name}={query}")
    query = plain(query)
    if isinstance(query, str) or not isinstance(query, Sequence):
        return _position(prompt, query, name)
    if not query:
        raise InvalidInputError(f'{name}=[]: pass at least one position, or "all" for every one.')
    return torch.cat([_position(prompt, one, name) for one in query], dim=1)


def _checked(positions: Tensor, mask: Bool[Tensor, "batch pos"], name: str) -> Int[Tensor, "batch query"]:
    """The positions of each prompt that a user passed as a tensor."""
    batch, pos = mask.shape
    whole = not (positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool)
    inside = whole and bool(((positions >= 0) & (positions < pos)).all())
    if len(positions) != batch or not positions.numel() or not inside:
        raise InvalidInputError(
            f"{name}: a tensor {tuple(positions.shape)} of {positions.dtype}; positions of several prompts are "
            f"integers of 0 to {pos - 1}, [{batch}, query]."
        )
    return positions.long()


def one_query(prompt: Prompt, query: Query, name: str = "query") -> Int[Tensor, "batch 1"]:
    """Return the single position that a query stands for; raise `InvalidInputError` for several or none."""
    positions = query_positions(prompt, query, name)
    if positions.shape[1] != 1:
        raise InvalidInputError(
            f"{name}={query!r} stands for {positions.shape[1]} positions; this is about one: pass an integer or a text."
        )
    return positions


def span_positions(prompt: Prompt, keys: Query, name: str = "keys") -> Int[Tensor, "batch key"]:
    """Like `query_positions` for source tokens: a text stands for all its tokens, ``"all"`` for every source token.

    Raises also where a text has another number of tokens in another prompt.
    """
    if is_all(keys) or not isinstance(keys, str):
        return query_positions(prompt, keys, name)
    return _equally_many(_spans(prompt, keys, name), prompt.mask, f"{name}={keys!r}")


def _spans(prompt: Prompt, text: str, name: str) -> list[list[int]]:
    """The positions of each prompt's last occurrence of a text."""
    spans = []
    for row, (tokens, mask) in enumerate(zip(prompt.str_tokens, prompt.mask.tolist(), strict=True)):
        try:
            spans.append(find_real(tokens, mask, text)[-1])
        except InvalidInputError as error:
            raise InvalidInputError(f"{name}, ", PromptNumber(row), f": {error}") from None
    return spans


def _position(prompt: Prompt, query: object, name: str) -> Int[Tensor, "batch 1"]:
    mask = prompt.mask
    if isinstance(query, str):
        return torch.tensor([[span[-1]] for span in _spans(prompt, query, name)], device=mask.device)
    query = whole_number(name, query, why='a position, a list or a slice of them, a text, or "all"')
    if query == -1 and prompt.class_at is not None and not name.startswith("key"):
        query = prompt.class_at
    counts = mask.sum(1)
    shortest = int(counts.min())
    if not -shortest <= query < shortest:
        row = int(counts.argmin())
        raise InvalidInputError(
            f"{name}={query} is out of range: ",
            PromptNumber(row, "row"),
            f" has {shortest} real tokens; use -{shortest} to {shortest - 1}.",
        )
    numbers = mask.long().cumsum(1) - 1
    if query < 0:
        numbers -= counts[:, None]
    return ((numbers == query) & mask).long().argmax(1, keepdim=True)


def _real_positions(mask: Bool[Tensor, "batch pos"]) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in mask]


def _equally_many(rows: list[list[int]], mask: Tensor, what: str) -> Int[Tensor, "batch query"]:
    counts = [len(row) for row in rows]
    if len(set(counts)) > 1 or not counts[0]:
        raise InvalidInputError(
            f"{what} stands for {sorted(set(counts))} tokens of these prompts; it must be the same number in each, and "
            "at least one."
        )
    return torch.tensor(rows, device=mask.device)
