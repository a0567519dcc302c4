"""What each component does to a logit, over the rows of a data set."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from tensorlens_tl.circuits.effects import logit_attribution, total_effects
from tensorlens_tl.datasets.attributions import repeated_options, with_query
from tensorlens_tl.datasets.packing import numbers_of_prompt, row_of_prompt, stored_dtype
from tensorlens_tl.datasets.work import Record, Work
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.inputs import memory_batches
from tensorlens_tl.registry import Method, split_options
from tensorlens_tl.results import Terms
from tensorlens_tl.results.storage import tagged

CIRCUITS: dict[str, Callable[..., Any]] = {"logit_attribution": logit_attribution, "total_effects": total_effects}
"""The functions of `tensorlens_tl.circuits` that name the parts of one number, and run over data sets."""


@dataclass(frozen=True)
class CircuitTerms(Work):
    """What a function of `CIRCUITS` gives of each row.

    Attributes:
        name: the function.
        keep: ``"scores"``: all that there is.
        options: the function's and those of `freeze`.
        of_rows: the options of which every row has another value.

    Raises:
        InvalidInputError: an unknown option, another `keep`, or terms by source token.
    """

    name: str
    keep: str
    options: Mapping[str, Any]
    of_rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        split_options(self._function, dict(self.options) | dict.fromkeys(self.of_rows))
        if self.keep != "scores":
            raise InvalidInputError(f"keep={self.keep!r}: {self.name} stores a row's terms whole; use keep='scores'.")
        if self.options.get("by") == "head_token":
            raise InvalidInputError(
                f"by='head_token': rows have no source tokens in common. Use by='head' over a data set, and "
                f"circuits.{self.name} for single prompts."
            )

    @property
    def _function(self) -> Method:
        return Method(self.name, CIRCUITS[self.name])

    def identity(self) -> dict[str, Any]:
        """What must be the same when a run of it is resumed."""
        return {"method": self.name, "options": with_query(self._function, self.options), "keep": self.keep}

    def together(
        self, model: ModelLike, tokens: Sequence[list[int]], per_row: Mapping[str, Sequence[Any]]
    ) -> list[tuple[list[int], Terms]]:
        """The result of some rows."""
        freeze_options, options = split_options(self._function, self.options)
        parts = []
        for batch in memory_batches(ModelView(model), list(map(len, tokens)), self.options.get("memory")):
            frozen = freeze(model, [tokens[row] for row in batch], **freeze_options)
            batch_options = {name: _of_batch(name, values, batch) for name, values in per_row.items()}
            parts.append((batch, CIRCUITS[self.name](frozen, **repeated_options(options, len(batch)) | batch_options)))
        return parts

    def packed(self, result: list[tuple[list[int], Terms]]) -> list[Record]:
        """Such a result as one record for each row."""
        records = {row: record for batch, terms in result for row, record in zip(batch, _packed(terms), strict=True)}
        return [records[row] for row in range(len(records))]

    def facts(self, result: list[tuple[list[int], Terms]]) -> dict[str, Any]:
        """What the rows of such a result have in common."""
        first = result[0][1]
        dtype = stored_dtype(first.scores)
        return {
            "result": "Terms",
            "options": tagged(self.options),
            "dtype": dtype,
            "soft_cap": first.soft_cap,
            "provenance": first.provenance,
        }

    def aligned(self, records: list[Record], facts: dict[str, Any]) -> tuple[list[Record], dict[str, Any]]:
        """Records of several batches with the same terms in the same order."""
        # a constant that is zero in every row of a batch, such as b_U, is no term of it
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


def _of_batch(name: str, values: Sequence[Any], batch: Sequence[int]) -> list[Any] | torch.Tensor:
    """An option of some rows, as `freeze` and circuits take it."""
    chosen = [values[row] for row in batch]
    if name == "direction":
        return torch.as_tensor(np.asarray(chosen))
    return chosen


def _packed(terms: Terms) -> list[Record]:
    """Each prompt's terms as a row; what is padding is left out."""
    queries = terms.queries.cpu()
    numbers = {"rest": terms.remainder, "total": terms.total}
    if terms.additive:
        numbers["gap"] = terms.gap
    rows = []
    for number, real in enumerate(terms.mask.cpu()):
        is_real = real[queries[number]]  # a shorter prompt of the batch has fewer
        row = row_of_prompt(terms, number, is_real) | numbers_of_prompt(numbers, number, is_real)
        scores = terms.scores[number].detach().cpu()[is_real]
        rows.append(row | {"names": terms.names, "shape": list(scores.shape), "scores": scores.flatten().numpy()})
    return rows


def unpacked_terms(row: Mapping[str, Any], facts: Mapping[str, Any]) -> Terms:
    """One row as the terms of one prompt."""
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
