"""Some rows of a data set at once: the unit of work of our own loop, of ``datasets.map`` and of Ray."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorlens_tl._arguments import plain
from tensorlens_tl.datasets.packing import packed
from tensorlens_tl.errors import TensorLensError
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.target import logit_label
from tensorlens_tl.registry import attribute
from tensorlens_tl.results.attribution import Attribution
from tensorlens_tl.results.joining import SEVERAL_TARGETS
from tensorlens_tl.results.storage import tagged


def attribute_rows(
    model: Any,
    tokens: Sequence[np.ndarray],
    *,
    method: str,
    keep: str,
    per_row: Mapping[str, Sequence[Any]],
    options: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], list[tuple[int | None, Attribution]]]:
    """One record for each row, and the results they were made from: of all rows (None), or of one by its place.

    The rows are run together; where that fails, each by itself, and a row that fails then is a record with its error.

    Args:
        model: a TransformerLens model.
        tokens: each row's token ids.
        method, keep, options: see `attribute_dataset`.
        per_row: options of which every row has a value of its own.
    """

    # a list asks for one token at each query, whatever the number of rows that are run together
    several = {name for name in ("target", "minus") if isinstance(plain(options.get(name)), list | tuple)}

    def run(rows: Sequence[int]) -> Attribution:
        given: dict[str, Any] = dict(options) | {name: [options[name]] * len(rows) for name in several}
        given |= {name: [values[row] for row in rows] for name, values in per_row.items()}
        return attribute(model, [tokens[row].tolist() for row in rows], method=method, **given)

    records: list[dict[str, Any]] = []
    results: list[tuple[int | None, Attribution]] = []
    try:
        together = run(range(len(tokens)))
        records, results = packed(together, keep), [(None, together)]
    except TensorLensError:
        for row in range(len(tokens)):
            try:
                alone = run([row])
                records += packed(alone, keep)
                results.append((row, alone))
            except TensorLensError as error:
                records.append({"error": f"{type(error).__name__}: {error}"})
    for row, record in enumerate(records if per_row else ()):
        own = {name: values[row] for name, values in per_row.items()}
        record["options"] = json.dumps(tagged(own))
        if (record.get("target") or "").startswith(("logit of", SEVERAL_TARGETS)) and "direction" not in own:
            asked = {"target": None, "minus": None} | dict(options) | own
            record["target"] = logit_label(ModelView(model), asked["target"], asked["minus"])
    return records, results
