"""What a run computes for each row of a data set, and how results are stored as table rows.

`Attributions` and `CircuitTerms` are the kinds of `Work` behind `attribute_dataset`; `evaluate.perturbation_dataset`
has its own. A stored row holds the tokens of one prompt, without padding.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from tensorlens_tl._arguments import plain
from tensorlens_tl.circuits.effects import logit_attribution, total_effects
from tensorlens_tl.datasets.rows import Rows
from tensorlens_tl.errors import InvalidInputError, TensorLensError
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.inputs import memory_batches
from tensorlens_tl.passes.target import UNCAPPED, logit_label
from tensorlens_tl.registry import PER_PROMPT, Method, attribute, get_method, split_options
from tensorlens_tl.results import SEVERAL_TARGETS, TOKENS_OF_QUERIES, Attribution, Terms, number_of
from tensorlens_tl.results.storage import tagged, untagged

if TYPE_CHECKING:
    import pyarrow as pa

Record = dict[str, Any]
"""A row of a shard, by column."""

FACTS = "tensorlens_tl"
"""The metadata key for what a shard's rows have in common."""

PER_QUERY = ("bias", "total", "gap")
"""Numbers stored for each query."""


class Work(ABC):
    """What a run computes for each row; can be pickled, and holds no model.

    Attributes:
        name: the name used in messages.
        double: whether its numbers are float64 for every model dtype.
        save_whole: whether results are also saved as safetensors.
    """

    name: str
    double = False
    save_whole = False
    options: Mapping[str, Any]

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Return what must be the same to resume a run of it: ``method``, ``options``, ``keep``."""

    @abstractmethod
    def together(self, model: ModelLike, tokens: Sequence[list[int]], per_row: Mapping[str, Sequence[Any]]) -> Any:
        """Compute the result of some rows, given as token ids; `per_row` holds options that differ between rows."""

    @abstractmethod
    def packed(self, result: Any) -> list[Record]:
        """Split a result into one record per row; see `schema`."""

    @abstractmethod
    def facts(self, result: Any) -> dict[str, Any]:
        """Return what a result's rows have in common, as JSON-compatible values."""

    def aligned(self, records: list[Record], facts: dict[str, Any]) -> tuple[list[Record], dict[str, Any]]:
        """Give records of several results the same layout; also return what they have in common."""
        return records, facts

    def table(self, records: list[Record], facts: dict[str, Any], double: bool) -> "pa.Table":
        """Return records as a shard's table, with what they have in common in its metadata."""
        import pyarrow as pa

        records, facts = self.aligned(records, facts)
        columns = schema(double or self.double)
        return pa.Table.from_pylist(records, columns.with_metadata({FACTS: json.dumps(facts)}))


def schema(double: bool) -> "pa.Schema":
    """Return the columns of a shard, with scores in float64 or float32."""
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


def facts_in(table: "pa.Table") -> dict[str, Any]:
    """Return what the rows of a shard have in common."""
    return json.loads((table.schema.metadata or {})[FACTS.encode()])


def run_rows(
    work: Work, model: ModelLike, rows: Rows, batch: Sequence[int]
) -> tuple[list[Record], list[tuple[int | None, Any]]]:
    """Return a record for each row of a batch, and its results: of all (None) or of parts, by their first row's number.

    The rows run together; if that fails, each half is tried, and so on, so that a row that fails alone becomes a record
    with its error. If results are saved, they are split into single rows at once.
    """
    records: list[Record] = []
    results: list[tuple[int | None, Any]] = []
    parts = [batch]
    while parts:
        part = parts.pop()
        try:
            per_row = {name: [values[row] for row in part] for name, values in rows.options.items()}
            result = work.together(model, [rows.tokens[row].tolist() for row in part], per_row)
            part_records = work.packed(result)
            results.append((None if len(part) == len(batch) else part[0], result))
        except TensorLensError as error:
            if len(part) > 1:
                length = 1 if work.save_whole else len(part) // 2
                parts += reversed([part[start : start + length] for start in range(0, len(part), length)])
                continue
            part_records = [{"error": f"{type(error).__name__}: {error.with_prompts({0: 'this row'})}"}]
        records += part_records
    view = ModelView(model)
    for row, record in zip(batch, records, strict=True):
        _describe(record, view, work.options, {name: values[row] for name, values in rows.options.items()})
    return records, results


def _describe(record: Record, view: ModelView, options: Mapping[str, Any], row_options: Mapping[str, Any]) -> None:
    """Complete a row's record with its own options and target label, in place of its batch's."""
    label = record.get("target") or ""
    number = "logit of " if label == SEVERAL_TARGETS else number_of(label)
    is_logit = number in ("logit of ", f"{UNCAPPED} of ")
    stored = json.loads(record.pop("options", "{}"))
    tokens = {tuple(texts) for texts in stored.get(TOKENS_OF_QUERIES, [[]])[0]}
    is_named = is_logit and len(tokens) == 1
    if is_named:
        record["target"] = number + " − ".join(map(repr, tokens.pop()))
        stored = {}
    if stored or row_options:
        record["options"] = json.dumps(stored | tagged(row_options))
    if is_named:
        return
    lists_tokens = any(isinstance(plain(options.get(name)), list | tuple) for name in ("target", "minus"))
    if not (row_options or lists_tokens) or "direction" in row_options:
        return
    if is_logit:
        options = {**options, **row_options}
        capped = UNCAPPED not in number
        record["target"] = logit_label(view, options.get("target"), options.get("minus"), capped=capped)


# ------------------------------------------------------------------ what `attribute_dataset` computes


@dataclass(frozen=True)
class MethodWork(Work):
    """A method's results; `of_rows` names the options that differ between rows."""

    name: str
    keep: str
    options: Mapping[str, Any]
    of_rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        split_options(self.method, dict(self.options) | dict.fromkeys(self.of_rows))

    @property
    def method(self) -> Method:
        """The method, with its options and their defaults."""
        return get_method(self.name)

    def identity(self) -> dict[str, Any]:
        """Return its options, with the method's default query filled in, so that both spellings are the same run."""
        options = dict(self.options)
        if "query" in self.method.options:
            options = {"query": self.method.options["query"], **options}
        return {"method": self.name, "options": options, "keep": self.keep}

    def row_options(self, rows: int) -> dict[str, Any]:
        """Return the options for some rows: a list holds one token per query, for however many rows."""
        several = {name for name in PER_PROMPT[:2] if isinstance(plain(self.options.get(name)), list | tuple)}
        return {**self.options, **{name: [self.options[name]] * rows for name in several}}


class Attributions(MethodWork):
    """The results of `attribute` for each row, by a registered method."""

    def __post_init__(self) -> None:
        super().__post_init__()
        entry_limit(self.keep)

    @property
    def save_whole(self) -> bool:
        """Whether results are also saved as safetensors."""
        return self.keep == "all"

    def together(
        self, model: ModelLike, tokens: Sequence[list[int]], per_row: Mapping[str, Sequence[Any]]
    ) -> Attribution:
        """Compute the attribution of some rows."""
        options: dict[str, Any] = self.row_options(len(tokens)) | dict(per_row)
        return attribute(model, list(tokens), method=self.name, **options)

    def packed(self, result: Attribution) -> list[Record]:
        """Return each prompt as a row, with the ``shape`` of its scores.

        With ``"top:N"``, ``keys`` holds the source tokens of the scores, and ``rest`` the sum of the others.
        """
        limit = entry_limit(self.keep)
        scores = result.scores.detach().cpu()
        query, key = (result.axes.index(name) - 1 for name in ("query", "key"))
        if limit is not None and key != len(result.axes) - 2:
            raise InvalidInputError(
                f"keep={self.keep!r}: these results are {result.axes}, not one number per source token."
            )
        numbers = {name: getattr(result, name) for name in PER_QUERY}
        rows = []
        for number, real in enumerate(result.mask.cpu()):
            positions = real.nonzero()[:, 0]
            is_real = real[result.queries[number].cpu()]  # shorter prompts of a batch have fewer queries
            row = _row_of_prompt(result, number, is_real, numbers)
            row_scores = scores[number].index_select(key, positions).index_select(query, is_real.nonzero()[:, 0])
            if limit is not None:
                row_scores, keys, rest = _largest(row_scores, limit)
                row |= {"keys": keys.flatten().numpy(), "rest": rest.flatten().numpy()}
            if TOKENS_OF_QUERIES in result.options:
                row["options"] = json.dumps({TOKENS_OF_QUERIES: [result.options[TOKENS_OF_QUERIES][number]]})
            if result.word_starts is not None:
                row["word_starts"] = [result.word_starts[number][position] for position in positions.tolist()]
            rows.append(row | {"shape": list(row_scores.shape), "scores": row_scores.flatten().numpy()})
        return rows

    def facts(self, result: Attribution) -> dict[str, Any]:
        """Return what all rows of a result have in common, with its options as given for a single row."""
        row_options = {
            name: self.options.get(name, value) for name, value in result.options.items() if name != TOKENS_OF_QUERIES
        }
        return {
            "method": result.method, "options": tagged(row_options), "axes": list(result.axes),
            "additive": result.additive, "dtype": _stored_dtype(result.scores), "provenance": result.provenance,
        }  # fmt: skip


def entry_limit(keep: str) -> int | None:
    """Return how many scores of each query are stored; None for all."""
    if keep in ("scores", "all"):
        return None
    if isinstance(keep, str) and keep.startswith("top:") and keep[4:].isdecimal() and int(keep[4:]) > 0:
        return int(keep[4:])
    raise InvalidInputError(f"keep={keep!r}; use 'scores', 'all', or 'top:32' for the 32 largest of each query.")


def _largest(scores: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each query's scores of largest absolute value, their keys, and the sum of the others."""
    keys = scores.abs().sort(dim=-1, descending=True, stable=True).indices[..., :most].sort(-1).values
    top = scores.gather(-1, keys)
    return top, keys, scores.sum(-1) - top.sum(-1)


def unpacked(row: Mapping[str, Any], facts: Mapping[str, Any]) -> Attribution:
    """Rebuild one row's result. Scores that were not stored are zero, and the result is then not marked additive."""
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


CIRCUITS: dict[str, Callable[..., Any]] = {"logit_attribution": logit_attribution, "total_effects": total_effects}
"""The functions of `tensorlens_tl.circuits` that name the parts of one number and can run over data sets."""


class CircuitTerms(MethodWork):
    """The results of a function of `CIRCUITS` for each row: terms common to all rows, all of them stored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep != "scores":
            raise InvalidInputError(f"keep={self.keep!r}: {self.name} stores a row's terms whole; use keep='scores'.")
        if self.options.get("by") == "head_token":
            raise InvalidInputError(
                f"by='head_token': rows have no source tokens in common. Use by='head' over a data set, and "
                f"circuits.{self.name} for single prompts."
            )

    @property
    def method(self) -> Method:
        """The function, with its options and their defaults."""
        return Method(self.name, CIRCUITS[self.name])

    def together(
        self, model: ModelLike, tokens: Sequence[list[int]], per_row: Mapping[str, Sequence[Any]]
    ) -> list[tuple[list[int], Terms]]:
        """Compute the terms of some rows, in batches that fit into memory."""
        parts = []
        for batch in memory_batches(ModelView(model), list(map(len, tokens)), self.options.get("memory")):
            freeze_options, options = split_options(self.method, self.row_options(len(batch)))
            for name, values in per_row.items():
                options[name] = [values[row] for row in batch]
            if "direction" in per_row:
                options["direction"] = torch.as_tensor(np.asarray(options["direction"]))
            frozen = freeze(model, [tokens[row] for row in batch], **freeze_options)
            parts.append((batch, CIRCUITS[self.name](frozen, **options)))
        return parts

    def packed(self, result: list[tuple[list[int], Terms]]) -> list[Record]:
        """Return each prompt's terms as a row."""
        records = dict[int, Record]()
        for batch, terms in result:
            numbers = {"rest": terms.remainder, "total": terms.total}
            if terms.additive:
                numbers["gap"] = terms.gap
            for number, (row, real) in enumerate(zip(batch, terms.mask.cpu(), strict=True)):
                is_real = real[terms.queries[number].cpu()]  # shorter prompts of a batch have fewer queries
                scores = terms.scores[number].detach().cpu()[is_real]
                record = _row_of_prompt(terms, number, is_real, numbers)
                record |= {"names": terms.names, "shape": list(scores.shape), "scores": scores.flatten().numpy()}
                records[row] = record
        return [records[row] for row in range(len(records))]

    def facts(self, result: list[tuple[list[int], Terms]]) -> dict[str, Any]:
        """Return what the rows of a result have in common."""
        first = result[0][1]
        return {
            "result": "Terms",
            "options": tagged(self.options),
            "dtype": _stored_dtype(first.scores),
            "soft_cap": first.soft_cap,
            "provenance": first.provenance,
        }

    def aligned(self, records: list[Record], facts: dict[str, Any]) -> tuple[list[Record], dict[str, Any]]:
        """Align the records of several batches to the same terms in the same order."""
        # a batch in which a constant such as b_U is zero in every row has no term for it
        names = list(dict.fromkeys(chain.from_iterable(record.get("names", ()) for record in records)))
        columns = {name: column for column, name in enumerate(names)}
        for record in records:
            record_names = record.pop("names", names)
            if record_names != names:
                wide = np.zeros((record["shape"][0], len(names)), dtype=record["scores"].dtype)
                wide[:, [columns[name] for name in record_names]] = record["scores"].reshape(record["shape"])
                record |= {"scores": wide.flatten(), "shape": list(wide.shape)}
        if names:
            facts = facts | {"names": names}
        return records, facts


def unpacked_terms(row: Mapping[str, Any], facts: Mapping[str, Any]) -> Terms:
    """Rebuild one row's terms, for one prompt."""
    dtype = getattr(torch, facts["dtype"])
    numbers = {name: torch.tensor(row[name], dtype=dtype)[None] for name in ("rest", "total") if row[name] is not None}
    return Terms(
        names=list(facts["names"]),
        scores=torch.tensor(row["scores"], dtype=dtype).reshape(1, *row["shape"]),
        total=numbers["total"],
        remainder=numbers.get("rest"),
        queries=torch.tensor(row["queries"])[None],
        mask=torch.ones(1, len(row["tokens"]), dtype=torch.bool),
        tokens=[list(row["tokens"])],
        target=row["target"] or "",
        soft_cap=facts["soft_cap"],
        provenance=facts.get("provenance", {}),
    )


def _row_of_prompt(
    result: Attribution | Terms, number: int, is_real: Bool[Tensor, "query"], numbers: Mapping[str, Tensor | None]
) -> Record:
    """Return a prompt's fields other than its scores: tokens, real queries, target and `numbers` `[batch, query]`."""
    real = result.mask[number].cpu()
    queries = result.queries[number].cpu()[is_real]
    return {
        "tokens": [result.tokens[number][position] for position in real.nonzero()[:, 0].tolist()],
        "queries": (real.long().cumsum(0) - 1)[queries].numpy(),
        "target": result.target or None,
        **{name: each[number].detach().cpu()[is_real].numpy() for name, each in numbers.items() if each is not None},
    }


def _stored_dtype(scores: Tensor) -> str:
    """Return the dtype in which a row's scores are read back."""
    return {torch.float64: "float64"}.get(scores.dtype, "float32")
