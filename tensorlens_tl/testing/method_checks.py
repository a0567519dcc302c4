"""The conformance battery of methods: what any method, ours or yours, must hold on any model.

>>> from tensorlens_tl.testing import check_method
>>> refusals = check_method("globenc", ["bridge/gpt2", "bridge/neox"])
>>> print(refusals["bridge/neox"][:18])
globenc: undefined
"""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.attribution import Attribution
from tensorlens_tl.errors import (
    ConformanceError,
    FrozenModelError,
    InvalidInputError,
    NumericalError,
    UnsupportedModelError,
)
from tensorlens_tl.freezing import freeze
from tensorlens_tl.frozen import FrozenPass
from tensorlens_tl.model_state import WeightState
from tensorlens_tl.registry import attribute, get_method
from tensorlens_tl.testing.models import tiny_model
from tensorlens_tl.testing.requirements import COARSEST, Untouched, precision, require, same

LENGTH, SHORT = 6, 4
EVERY_LAYOUT = [f"bridge/{family}" for family in ("gpt2", "llama", "neox", "bert", "opt", "gemma2", "olmo2")]
"""Pre, parallel, post, sandwich and post-only blocks; LayerNorm and RMSNorm; plain, gated, grouped-query."""


def check_method(
    name: str,
    models: Any = None,
    *,
    options: dict[str, Any] | None = None,
    tolerance: float | None = None,
    seed: int = 0,
) -> dict[str, str]:
    """Put a registered method through everything that a result of this library promises.

    Shapes and axes, finite scores, the same scores twice, a batch that equals its prompts one by one, padding that
    gives nothing and changes nothing, no score ahead of the query on causal models and none that later tokens change,
    declared additivity, saving and loading, refusals in the library's own words, and a model left as it was: no hook,
    no gradient, the same weights and modes.

    Args:
        name: a registered method.
        models: a model, or several models or names of `model_names()`, best in float64; None takes one of every layout.
        options: the method's options (a target, where it needs one).
        tolerance: largest relative difference; None takes 1e-9, or a hundred times what the model's own proof measures
            where that is more (norms that compute in float32).
        seed: of the random tokens.

    Returns:
        The models that the method refuses (`UnsupportedModelError`), each with the method's own words; empty if it
        holds everywhere.

    Raises:
        ConformanceError: naming what does not hold, and where.
    """
    refusals = {}
    for label, model in _labelled(models):
        refusal = _MethodChecks(name, model, f"{name} on {label}", options or {}, tolerance, seed).run()
        if refusal is not None:
            refusals[label] = refusal
    return refusals


def _labelled(models: Any) -> Iterator[tuple[str, Any]]:
    if models is None:
        models = EVERY_LAYOUT
    elif isinstance(models, str) or hasattr(models, "run_with_hooks") or not isinstance(models, Iterable):
        models = [models]
    for number, model in enumerate(models):
        if isinstance(model, str):
            yield model, tiny_model(model)
        else:
            yield f"{type(model).__name__} {number}", model


class _MethodChecks:
    """One method on one model."""

    def __init__(
        self, name: str, model: Any, who: str, options: dict[str, Any], tolerance: float | None, seed: int
    ) -> None:
        self.name, self.model, self.who, self.options, self.tolerance = name, model, who, options, tolerance
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, model.cfg.d_vocab, (2, LENGTH), generator=generator)

    def run(self) -> str | None:
        with Untouched(self.model, self.who):
            frozen = freeze(self.model, self.tokens)
            if self.tolerance is None:
                self.tolerance = precision(frozen)
            try:
                result = self.made(frozen)
            except UnsupportedModelError as refusal:
                return str(refusal)
            check_attribution(result, frozen, tolerance=self.tolerance)
            self.repeatable(result, frozen)
            self.one_by_one(result)
            self.causality(result, frozen)
            self.every_query(result, frozen)
            self.padding()
            self.refusals(frozen)
        return None

    def made(self, frozen: FrozenPass, **more: Any) -> Attribution:
        return attribute(frozen, method=self.name, **{**self.options, **more})

    def require(self, holds: bool, message: str) -> None:
        require(holds, f"{self.who}: {message}")

    def same(self, mine: Tensor, theirs: Tensor, what: str) -> None:
        same(mine, theirs, min(10 * (self.tolerance or 0), 2 * COARSEST), f"{self.who}: {what}")

    def repeatable(self, result: Attribution, frozen: FrozenPass) -> None:
        """Twice on one pass, and on a pass made again: to the last bit."""
        again = self.made(frozen)
        self.require(torch.equal(result.scores, again.scores), "two runs on one pass differ.")
        anew = self.made(freeze(self.model, self.tokens))
        self.require(torch.equal(result.scores, anew.scores), "two passes over one prompt differ.")

    def one_by_one(self, result: Attribution) -> None:
        for row in range(2):
            alone = self.made(freeze(self.model, self.tokens[row : row + 1]), **_per_prompt(self.options, row))
            self.same(result.scores[row], alone.scores[0], "a batch differs from its prompts one by one")

    def causality(self, result: Attribution, frozen: FrozenPass, **more: Any) -> None:
        """In a causal model the queries before a token do not know of it."""
        if not frozen.causal:
            return
        tokens = self.tokens.clone()
        tokens[:, -1] = (tokens[:, -1] + 1) % self.model.cfg.d_vocab
        other = self.made(freeze(self.model, tokens), **more)
        for row in range(2):
            before = result.queries[row] < LENGTH - 1
            mine, theirs = (_pairs_first(made)[row][before.to(made.scores.device)] for made in (result, other))
            if len(mine):
                self.same(mine, theirs, "a query's scores change with a token after it")

    def every_query(self, result: Attribution, frozen: FrozenPass) -> None:
        """Queries beside the default one: each asked alone is what it is among all, and none knows a later token."""
        if "query" not in get_method(self.name).options or "query" in self.options:
            return
        try:
            whole = self.made(frozen, query=None)
        except InvalidInputError:  # one query at a time
            rows = {query: self.made(frozen, query=query) for query in (0, LENGTH // 2)}
        else:
            check_attribution(whole, frozen, tolerance=self.tolerance or 0)
            self.causality(whole, frozen, query=None)
            rows = {}
            at = result.queries[..., None].expand(-1, -1, _pairs_first(whole).shape[2])
            if _pairs_first(whole).ndim == 3:
                there = torch.take_along_dim(_pairs_first(whole), at.to(whole.scores.device), dim=1)
                self.same(_pairs_first(result), there, "what it gives by default is not what query=None gives there")
            for query in (0, LENGTH // 2, LENGTH - 1):
                rows[query] = alone = self.made(frozen, query=query)
                mine = _pairs_first(alone)[:, 0]
                self.same(mine, _pairs_first(whole)[:, query], f"query={query} is not what query=None gives there")
        for query, alone in rows.items():
            self.require(
                alone.queries.tolist() == [[query]] * 2, f"query={query} gives queries {alone.queries.tolist()}."
            )
            check_attribution(alone, frozen, tolerance=self.tolerance or 0)
            self.causality(alone, frozen, query=query)

    def padding(self) -> None:
        """The second prompt cut short and padded must be what it is alone."""
        short = freeze(self.model, self.tokens[1:, :SHORT])
        alone = self.made(short, **_per_prompt(self.options, 1))
        for side, real in (("right", slice(0, SHORT)), ("left", slice(LENGTH - SHORT, LENGTH))):
            tokens, mask = self.tokens.clone(), torch.ones_like(self.tokens)
            tokens[1], mask[1] = 0, 0
            tokens[1, real], mask[1, real] = self.tokens[1, :SHORT], 1
            try:
                frozen = freeze(self.model, tokens, attention_mask=mask)
            except (UnsupportedModelError, NumericalError):
                continue  # the model itself does not handle such padding
            if not _same_stream(frozen, short, real):
                continue  # an encoder that counts positions from the first column: another input
            try:
                padded = self.made(frozen)
            except (UnsupportedModelError, NumericalError):
                continue  # refused is not wrong
            check_attribution(padded, frozen, tolerance=self.tolerance or 0)
            mine, theirs = _pairs_first(padded)[1], _pairs_first(alone)[0]
            mine = mine[real] if len(mine) == LENGTH else mine
            mine = torch.cat([mine[:, real], mine[:, LENGTH:]], dim=1)  # a source may be no token, such as a bias
            self.same(mine, theirs, f"padding on the {side} changes the scores")

    def refusals(self, frozen: FrozenPass) -> None:
        """What is wrong is said in the library's own errors."""
        method = get_method(self.name)
        if not method.takes_any_option:
            self.refused(InvalidInputError, "an option it does not have", lambda: self.made(frozen, no_such_option=1))
        if "query" in method.options:
            self.refused(InvalidInputError, "a query out of range", lambda: self.made(frozen, query=LENGTH))
        stale = replace(frozen, weights=WeightState(frozen.weights.versions, frozen.weights.sample + 1))
        self.refused(FrozenModelError, "a pass older than the model's weights", lambda: self.made(stale))

    def refused(self, error: type[Exception], what: str, call: Any) -> None:
        try:
            call()
        except error as refusal:
            self.require(len(str(refusal)) > 20, f"refuses {what} with no more than {str(refusal)!r}.")
            return
        except Exception as other:
            message = f"{self.who}: refuses {what} with {type(other).__name__}, not {error.__name__}."
            raise ConformanceError(message) from other
        self.require(False, f"takes {what}; raise {error.__name__}.")


def check_attribution(result: Any, frozen: FrozenPass, *, tolerance: float = 1e-9) -> None:
    """What every Attribution of a pass must hold: shapes, finite scores, padding, causality, additivity, files.

    Raises:
        ConformanceError: naming what does not hold.
    """
    require(isinstance(result, Attribution), f"the result is {type(result).__name__}, not an Attribution.")
    name = result.method
    batch, prompts = len(result.mask), len(frozen.tokens)  # that its parts fit each other it has checked itself
    require(batch == prompts, f"{name}: a batch axis of {batch} for {prompts} prompts.")
    require(bool(torch.isfinite(result.scores).all()), f"{name}: scores that are not finite.")

    scores = _pairs_first(result)
    real_query = torch.take_along_dim(result.mask, result.queries, dim=1)
    padded = ~(real_query[:, :, None] & result.mask[:, None, :])
    require(not bool(scores[padded].any()), f"{name}: padding gives or receives scores.")
    if frozen.causal:
        ahead = torch.arange(frozen.tokens.shape[1], device=result.queries.device) > result.queries[..., None]
        require(not bool(scores[:, :, : ahead.shape[2]][ahead].any()), f"{name}: scores ahead of the query.")
    if result.additive:
        _additive(result, tolerance)
    with tempfile.TemporaryDirectory() as folder:
        loaded = Attribution.load(result.save(Path(folder) / "result"))
    require(torch.equal(loaded.scores, result.scores.cpu()), f"{name}: saving and loading changes the scores.")


def _additive(result: Attribution, tolerance: float) -> None:
    name = result.method
    if result.bias is None or result.total is None:
        require(False, f"{name}: declared additive, but without {'a bias' if result.bias is None else 'a total'}.")
        return
    off = (result.scores.sum(-1) + result.bias - result.total).abs()
    size = result.scores.abs().sum(-1) + result.bias.abs()
    worst = float((off / size.clamp_min(1e-30)).max())
    require(worst <= tolerance, f"{name}: declared additive, but off by {worst:.1e}.")


def _per_prompt(options: dict[str, Any], row: int) -> dict[str, Any]:
    """Options that name one thing for each prompt, cut to one of the prompts."""
    lists = {name: value for name, value in options.items() if isinstance(value, list) and len(value) == 2}
    return {name: value[row : row + 1] for name, value in lists.items()}


def _same_stream(padded: FrozenPass, short: FrozenPass, real: slice) -> bool:
    mine, theirs = padded.resid_pre(0)[1, real], short.resid_pre(0)[0]
    return bool(torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max())))


def _pairs_first(result: Attribution) -> Tensor:
    """Scores with batch, query and key in front of any other axis."""
    order = [result.axes.index(axis) for axis in ("batch", "query", "key")]
    rest = [axis for axis in range(result.scores.ndim) if axis not in order]
    return result.scores.permute(*order, *rest)
