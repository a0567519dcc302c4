"""Perturbation tests over the rows of a data set, in shards that a run resumes from."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import checked_names, plain
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.datasets import (
    UNKNOWN_ID,
    DatasetResults,
    Engine,
    LoadModel,
    Reading,
    Rows,
    RowSource,
    RunOptions,
    read_prompts,
    run_work,
)
from tensorlens_tl.datasets.work import Record, Work
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.arguments import (
    Fractions,
    Hidden,
    MethodFunction,
    Methods,
    Metrics,
    Order,
    PerturbationQuery,
    ReplacementName,
    WholeNumber,
)
from tensorlens_tl.evaluate.perturbing import FRACTIONS, METRICS, PerturbationTest, explained_in_words
from tensorlens_tl.evaluate.resampling import RESAMPLED, replacement_of
from tensorlens_tl.evaluate.scorers import Scorer, usable
from tensorlens_tl.models import ModelLike, ModelView, TokenLike
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.inputs import Prompt, prepare
from tensorlens_tl.passes.replacement import Replacement, vocabulary_mean
from tensorlens_tl.results import SEVERAL_TARGETS


@checked_names
def perturbation_dataset(
    model: ModelLike,
    rows: RowSource,
    out: str | os.PathLike[str],
    methods: Methods = None,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    columns: Mapping[str, str] | None = None,
    query: PerturbationQuery = "last",
    fractions: Fractions = FRACTIONS,
    replacement: ReplacementName = None,
    draws: WholeNumber = 3,
    metrics: Metrics = METRICS,
    order: Order = "descending",
    absolute: bool = False,
    hidden: Hidden = "unembedded",
    seed: int = 0,
    memory: Memory = None,
    text: str = "text",
    id: str = UNKNOWN_ID,
    tokens_per_batch: int = 8192,
    truncate: bool = False,
    resume: bool = True,
    progress: bool = True,
    prepend_bos: bool | None = None,
    engine: Engine = None,
    load_model: LoadModel | None = None,
    num_actors: int = 1,
    num_gpus: float | int = 0,
) -> DatasetResults:
    """`perturbation` over every row of a data set, each row's curves written to Parquet shards.

    The numbers are those of one call of `perturbation` with all rows; `DatasetResults.evaluation` gives them as one
    `Evaluation`, with its table and comparisons. A row of which no token may be replaced is written with its
    error. Called again with the same arguments, an interrupted run is resumed.

    Args:
        model: a TransformerLens model that reads text.
        rows, out, text, id, tokens_per_batch, truncate, resume, progress, prepend_bos: see `tlens.attribute_dataset`.
        methods, query, fractions, metrics, order, absolute, hidden, seed, memory: see `perturbation`. Functions among
            the methods are known by their names alone when a run is resumed.
        target, minus: see `perturbation`; the same of every row.
        columns: the columns that hold each row's own `target` or `minus`: ``{"target": "answer"}``.
        replacement, draws: see `perturbation`; ``"mean"`` is the token embedding's mean over all rows.
        engine, load_model, num_actors, num_gpus: see `tlens.attribute_dataset`.

    Raises:
        InvalidInputError: what `perturbation` and `tlens.attribute_dataset` refuse.
        UnsupportedModelError: the model cannot be frozen, or a metric needs a prediction and it has none.
        FileFormatError: the folder's manifest or one of its shards is damaged.
        OSError: a shard cannot be written; those before it are whole.
    """
    test = PerturbationTest(methods, query, fractions, metrics, order, absolute, hidden, seed, draws, memory)
    explained = {name: value for name, value in (("target", target), ("minus", minus)) if value is not None}
    _check_columns(columns or {}, explained)
    named = explained | dict.fromkeys(columns or {}, "")
    test.check_explained(named.get("target"), named.get("minus"))
    reading = Reading(text, id, columns, truncate, prepend_bos)
    run = RunOptions(out, reading, tokens_per_batch, resume, progress, engine, load_model, num_actors, num_gpus)
    view, prompts = read_prompts(model, rows, run.reading)
    work = _work(view, prompts, test, replacement, explained, tuple(columns or ()), skip=methods is None)
    return run_work(view, prompts, work, run)


@dataclass(frozen=True, eq=False)
class _Perturbing(Work):
    """A perturbation test of each row.

    Attributes:
        test: what is measured, by which methods.
        replacement: what tokens are replaced by, the same in all rows unless it is drawn.
        skipped: methods that do not fit the model.
        explained: the tokens that all rows are asked about, if any are named.
        described: what an Evaluation says besides its numbers.
        options: all of this, as a manifest holds it.
    """

    test: PerturbationTest
    replacement: Replacement
    scorers: list[Scorer]
    skipped: dict[str, str]
    explained: dict[str, Any]
    described: dict[str, Any]
    options: Mapping[str, Any]

    name = "perturbation"
    double = True

    def identity(self) -> dict[str, Any]:
        """What must be the same when a run of it is resumed."""
        return {"method": self.name, "options": dict(self.options), "keep": "scores"}

    def together(
        self, model: ModelLike, tokens: Sequence[list[int]], per_row: Mapping[str, Sequence[Any]]
    ) -> tuple[Prompt, Float[Tensor, "metric method prompt step"]]:
        """The result of some rows."""
        view = ModelView(model)
        prompt = prepare(view, list(tokens))
        self.test.query_of(view, prompt)
        explained = self.explained | dict(per_row)
        runs = self.test.runs(view, prompt, self.replacement, explained.get("target"), explained.get("minus"))
        return prompt, self.test.curves(runs, self.scorers, progress=False)

    def packed(self, result: tuple[Prompt, Tensor]) -> list[Record]:
        """Such a result as one record for each row."""
        prompt, curves = result
        return [
            {
                "tokens": [token for token, is_real in zip(prompt.str_tokens[row], real, strict=True) if is_real],
                "shape": list(curves[:, :, row].shape),
                "scores": curves[:, :, row].flatten().numpy(),
            }
            for row, real in enumerate(prompt.mask.tolist())
        ]

    def facts(self, result: Any) -> dict[str, Any]:
        """What the rows of such a result have in common."""
        about = {"result": "Evaluation", "dtype": "float64", "axis": self.test.steps, "skipped": self.skipped}
        return about | self.described


def _check_columns(columns: Mapping[str, str], explained: Mapping[str, Any]) -> None:
    """Refuse tokens of rows that cannot be distinguished from those of all rows.

    Raises:
        InvalidInputError: an unknown column, one that is also an option, or a list of tokens.
    """
    unknown = sorted(set(columns) - {"target", "minus"})
    if unknown:
        raise InvalidInputError(f"columns: {unknown[0]!r} is not one of target, minus.")
    both = sorted(set(columns) & set(explained))
    if both:
        raise InvalidInputError(f"columns: {both[0]!r} is in a column and an option as well; leave one out.")
    for name, value in explained.items():
        if not isinstance(plain(value), str | int):
            raise InvalidInputError(f"{name}={value!r}: pass one token for every row; columns= names a column of them.")


def _work(
    view: ModelView,
    rows: Rows,
    test: PerturbationTest,
    replacement: ReplacementName,
    explained: dict[str, Any],
    columns: Sequence[str],
    *,
    skip: bool,
) -> Work:
    """The test of these rows: methods that fit the model, and what tokens are replaced by."""
    prompts = [rows.tokens[row] for row in rows.prompts()]
    # a token's embedding is the same at every position: the mean over all rows needs their counts alone
    counts = torch.from_numpy(sum(np.bincount(ids, minlength=view.d_vocab) for ids in prompts))
    longest = max(prompts, key=len).tolist()
    prompt = prepare(view, [longest])
    try:
        query = test.query_of(view, prompt)
    except InvalidInputError as error:
        raise InvalidInputError(f"perturbation: the longest row cannot be tested. {error}") from error
    by = replacement_of(view, prompt, replacement, vocabulary_mean(view, counts))
    scorers, skipped = usable(test.scorers, freeze(view.model, [longest]), query, skip)
    options = {
        "methods": {scorer.label: [_name(scorer.method), repr(dict(scorer.options))] for scorer in scorers},
        "skipped": sorted(skipped),
        "fractions": test.steps,
        "replacement": by.name,
        "query": test.query,
        "metrics": test.names,
        **{name: getattr(test, name) for name in ("order", "absolute", "hidden", "seed")},
    }
    if by.name == RESAMPLED:
        options["draws"] = test.draws
    options |= explained
    words = explained_in_words(view, explained.get("target"), explained.get("minus"))
    if columns:
        words = SEVERAL_TARGETS
    described = test.described(view, by, scorers, len(prompts), words)
    return _Perturbing(test, by, scorers, skipped, explained, described, options)


def _name(method: str | MethodFunction) -> str:
    """A method in a manifest: a function is known by its name alone."""
    if isinstance(method, str):
        return method
    return f"{method.__module__}.{getattr(method, '__qualname__', '?')}"
