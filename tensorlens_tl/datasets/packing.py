"""Results as rows of a table, and back: each row has the tokens of one prompt, without padding."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import TOKENS_OF_QUERIES, Attribution, Terms
from tensorlens_tl.results.storage import tagged, untagged

if TYPE_CHECKING:
    import pyarrow as pa

FACTS = "tensorlens_tl"
"""Where a shard's metadata say what its rows have in common."""

PER_QUERY = ("bias", "total", "gap")
"""Numbers of each query."""


def entry_limit(keep: str) -> int | None:
    """How many scores of each query are stored: None for all of them.

    Raises:
        InvalidInputError: neither ``"scores"``, ``"all"`` nor ``"top:N"``.
    """
    if keep in ("scores", "all"):
        return None
    if isinstance(keep, str) and keep.startswith("top:") and keep[4:].isdecimal() and int(keep[4:]) > 0:
        return int(keep[4:])
    raise InvalidInputError(f"keep={keep!r}; use 'scores', 'all', or 'top:32' for the 32 largest of each query.")


def schema(double: bool) -> "pa.Schema":
    """The columns of a shard; scores in float64 or float32."""
    import pyarrow as pa

    number = pa.float64() if double else pa.float32()
    return pa.schema(
        [
            ("id", pa.string()),
            ("row", pa.int64()),
            ("error", pa.string()),
            ("dropped_tokens", pa.int32()),
            ("token_ids", pa.list_(pa.int32())),
            ("tokens", pa.list_(pa.string())),
            ("word_starts", pa.list_(pa.bool_())),
            ("queries", pa.list_(pa.int32())),
            ("shape", pa.list_(pa.int32())),
            ("keys", pa.list_(pa.int32())),
            ("scores", pa.list_(number)),
            ("rest", pa.list_(number)),
            *((name, pa.list_(number)) for name in PER_QUERY),
            ("target", pa.string()),
            ("options", pa.string()),
        ]
    )


def packed(result: Attribution, keep: str) -> list[dict[str, Any]]:
    """Each prompt of a result as a row: what is padding is left out.

    ``shape`` is that of the prompt's scores, the axes of the result but the batch. Of ``"top:N"``, ``keys`` says which
    source tokens the scores belong to, and ``rest`` is the sum of the others, so that sums still hold.
    """
    limit = entry_limit(keep)
    scores = result.scores.detach().cpu()
    mask = result.mask.cpu()
    queries = result.queries.cpu()
    starts = result.word_starts
    query, key = (result.axes.index(name) - 1 for name in ("query", "key"))
    if limit is not None and key != len(result.axes) - 2:
        raise InvalidInputError(
            f"keep={keep!r}: these results are {result.axes}, not one number for each source token."
        )
    numbers = {name: getattr(result, name) for name in PER_QUERY}
    rows = []
    for number, real in enumerate(mask):
        positions = real.nonzero()[:, 0]
        is_real = real[queries[number]]  # a shorter prompt of the batch has fewer
        row = row_of_prompt(result, number, is_real) | numbers_of_prompt(numbers, number, is_real)
        row_scores = scores[number].index_select(key, positions).index_select(query, is_real.nonzero()[:, 0])
        if limit is not None:
            row_scores, keys, rest = _largest(row_scores, limit)
            row |= {"keys": keys.flatten().numpy(), "rest": rest.flatten().numpy()}
        if TOKENS_OF_QUERIES in result.options:
            row["options"] = json.dumps({TOKENS_OF_QUERIES: [result.options[TOKENS_OF_QUERIES][number]]})
        if starts is not None:
            row["word_starts"] = [starts[number][position] for position in positions.tolist()]
        rows.append(row | {"shape": list(row_scores.shape), "scores": row_scores.flatten().numpy()})
    return rows


def row_of_prompt(result: Attribution | Terms, number: int, is_real: Bool[Tensor, "query"]) -> dict[str, Any]:
    """What a row says of a prompt besides its scores: its tokens, its queries among them, and its target."""
    real = result.mask[number].cpu()
    queries = result.queries[number].cpu()[is_real]
    return {
        "tokens": [result.tokens[number][position] for position in real.nonzero()[:, 0].tolist()],
        "queries": (real.long().cumsum(0) - 1)[queries].numpy(),
        "target": result.target or None,
    }


def numbers_of_prompt(
    numbers: Mapping[str, Tensor | None], number: int, is_real: Bool[Tensor, "query"]
) -> dict[str, np.ndarray]:
    """Numbers of each query, `[batch, query]`, of one prompt; a result that lacks some has no entry of them."""
    return {name: value[number].detach().cpu()[is_real].numpy() for name, value in numbers.items() if value is not None}


def stored_dtype(scores: Tensor) -> str:
    """The dtype that a row's scores are read back in."""
    return {torch.float64: "float64"}.get(scores.dtype, "float32")


def _largest(scores: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest scores of each query by size, the keys they belong to, and the sum of all the others."""
    keys = scores.abs().sort(dim=-1, descending=True, stable=True).indices[..., :most].sort(-1).values
    top = scores.gather(-1, keys)
    return top, keys, scores.sum(-1) - top.sum(-1)


def unpacked(row: Mapping[str, Any], facts: Mapping[str, Any]) -> Attribution:
    """One row as a result. Scores that were not stored are zero, and then the result does not claim to be additive."""
    shape = list(row["shape"])
    dtype = getattr(torch, facts["dtype"])
    scores = torch.tensor(row["scores"], dtype=dtype).reshape(shape)
    if row["keys"] is not None:
        keys = torch.tensor(row["keys"]).reshape(shape)
        scores = scores.new_zeros(*shape[:-1], len(row["tokens"])).scatter(-1, keys, scores)
    optional: dict[str, Any] = {
        name: torch.tensor(row[name], dtype=dtype)[None] for name in PER_QUERY if row[name] is not None
    }
    if row["word_starts"] is not None:
        optional["word_starts"] = [list(row["word_starts"])]
    return Attribution(
        scores=scores[None],
        tokens=[list(row["tokens"])],
        queries=torch.tensor(row["queries"])[None],
        mask=torch.ones(1, len(row["tokens"]), dtype=torch.bool),
        axes=tuple(facts["axes"]),
        additive=facts["additive"] and row["keys"] is None,
        target=row["target"] or "",
        method=facts["method"],
        options=untagged(facts["options"] | json.loads(row["options"] or "{}")),
        provenance=facts["provenance"],
        **optional,
    )


def facts_of(result: Attribution, options: Mapping[str, Any]) -> dict[str, Any]:
    """What all rows of a result have in common; its options as they were given for one row."""
    row_options = {
        name: options.get(name, value) for name, value in result.options.items() if name != TOKENS_OF_QUERIES
    }
    return {
        "method": result.method, "options": tagged(row_options), "axes": list(result.axes),
        "additive": result.additive, "dtype": stored_dtype(result.scores), "provenance": result.provenance,
    }  # fmt: skip


def table_of(records: list[dict[str, Any]], facts: Mapping[str, Any], double: bool) -> "pa.Table":
    """Records as a shard, whose metadata say what they have in common."""
    import pyarrow as pa

    return pa.Table.from_pylist(records, schema(double).with_metadata({FACTS: json.dumps(facts)}))


def facts_in(table: "pa.Table") -> dict[str, Any]:
    """What the rows of a shard have in common."""
    return json.loads((table.schema.metadata or {})[FACTS.encode()])
