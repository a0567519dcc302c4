"""Whether what a question answers on a changed model is right: the outcome of one cell of the table.

The numbers of an answer are compared with those that the same question gives on the untouched equivalent in float64,
where there is one, and totals always with the changed model's own logits, run by hand, one prompt at a time. How far
they may be apart is what the same question's own rounding is on the equivalent in the dtype of the cell.
"""

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from conftest import hooks_left
from torch import Tensor

import tensorlens_tl as tlens
from changed import applied, weights
from changed.adapters import ADAPTERS
from changed.change import Change, untouched
from changed.questions import MIDDLE, MINUS, TARGET, TOKENS, Question, Setting, questions
from changed.weights import DTYPES, NoEquivalentError, built
from tensorlens_tl.algebra import AffineMap
from tensorlens_tl.circuits import ScoreAttribution

EXACT, SUM, REFUSED, RAN, WRONG, CRASH, ABSENT = "exact", "sum exact", "refused", "ran", "WRONG", "CRASH", "-"
"""What a cell can be: `RAN` is an answer without a total where no equivalent exists, which nothing here can check;
`ABSENT` a question that this class of models has no answer to, changed or not."""

FAILURES = (WRONG, CRASH)
FLOAT64, FACTOR = 1e-9, 3.0
"""What is exact in float64, and by how many times the question's own rounding an answer in another dtype may be off."""
HALF = ("float16", "bfloat16")


class Cell(NamedTuple):
    """One question on one changed model.

    Attributes:
        outcome: one of the constants above.
        note: why it is refused, or how far off it is, in a few words.
    """

    outcome: str
    note: str = ""


# ------------------------------------------------------------------ the numbers of an answer

SKIPPED = {
    "compressed",
    "frozen", "model", "options", "provenance", "settings", "queries", "mask", "gap", "stderr", "freedom",
    "tokens", "dictionary", "hook", "reads", "writes", "image", "exists", "config", "errors", "inputs",
    "skipped", "proof", "reading_error", "index", "completeness", "replacements", "sweeps", "fixed_scores",
    "units", "sources", "kept", "energy",
}  # fmt: skip
"""Fields that are facts about an answer, measured errors, or the model itself."""


def numbers(thing: Any, name: str = "") -> dict[str, Tensor]:
    """Every floating-point number of an answer, by where it stands; terms and rows of tables by what they are called.

    Raises:
        TypeError: an answer of a kind that nobody has said how to read.
    """
    return dict(_numbers(thing, name))


def _numbers(thing: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if thing is None or isinstance(thing, str | bool | int | range | slice | torch.dtype | torch.device):
        return
    if isinstance(thing, Tensor):
        yield from _of_tensor(thing, name)
    elif isinstance(thing, float | np.ndarray | np.floating):
        yield from _of_tensor(torch.as_tensor(thing), name)
    elif isinstance(thing, AffineMap):
        yield from _of_map(thing, name)
    elif isinstance(thing, pd.DataFrame):
        yield from _of_table(thing, name)
    elif hasattr(thing, "AB"):
        yield from _of_tensor(thing.AB, name)
    elif isinstance(thing, tlens.Terms):
        yield from _of_terms(thing, name)
    elif isinstance(thing, ScoreAttribution):
        yield from _of_pairs(thing, name)
    elif isinstance(thing, tlens.ContributionGraph):
        yield from _of_graph(thing, name)
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from _numbers(value, f"{name}.{key}")
    elif isinstance(thing, tuple | list):
        for number, value in enumerate(thing):
            yield from _numbers(value, f"{name}.{number}")
    elif dataclasses.is_dataclass(thing):
        for field in dataclasses.fields(thing):
            if field.name not in SKIPPED and not field.name.startswith("_"):
                yield from _numbers(getattr(thing, field.name), f"{name}.{field.name}")
    else:
        raise TypeError(f"changed.answers.numbers: say how the numbers of a {type(thing).__name__} are read.")


def _of_tensor(tensor: Tensor, name: str) -> Iterator[tuple[str, Tensor]]:
    tensor = tensor.detach().cpu()
    if tensor.is_complex():  # eigenvalues in any order: their power sums
        yield name, torch.stack([(tensor**power).sum().real for power in (1, 2, 3)]).double()
    elif tensor.is_floating_point():
        yield name, tensor.double()


def _of_map(map: AffineMap, name: str) -> Iterator[tuple[str, Tensor]]:
    """What it does to a vector, and what it adds."""
    width = weights.WIDTH
    x = torch.randn(1, len(TOKENS), width, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    yield f"{name}.push", _pushed(map, x)
    if isinstance(map.bias, Tensor):
        yield f"{name}.bias", map.bias.detach().double().expand_as(x).clone()


def _pushed(map: AffineMap, x: Tensor) -> Tensor:
    """A map does not say in which dtype its weights are."""
    for dtype in DTYPES.values():
        with suppress(RuntimeError):
            return map.push(x.to(dtype)).detach().double()
    raise TypeError(f"changed.answers.numbers: no dtype that a {type(map).__name__} takes.")


def _of_table(table: pd.DataFrame, name: str) -> Iterator[tuple[str, Tensor]]:
    """A row is called by its cells that are no fractions."""
    floats = [column for column in table if pd.api.types.is_float_dtype(table[column])]
    words = table.drop(columns=floats).map(str).agg(" ".join, axis=1) if len(floats) < len(table.columns) else None
    labels = [str(label) for label in (table.index if words is None else words)]
    for column in table:
        if column in floats:
            for label, value in zip(labels, table[column], strict=True):
                yield f"{name}.{label}.{column}", torch.tensor(value, dtype=torch.float64)
        elif len(table) and isinstance(table[column].iloc[0], np.ndarray | list):
            for label, value in enumerate(table[column]):
                yield from _of_tensor(torch.as_tensor(np.array(value, dtype=float)), f"{name}.{label}.{column}")


def _merged(found: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Parts of the first block's input under one name: what a hook adds to it belongs to none of them. What a hook
    adds later has a name of its own, and is added to the bias that it is a part of in the equivalent."""
    summed: dict[str, Tensor] = {}
    for name, value in found:
        for part in ("pos_embed", "token_type_embed"):
            name = name.replace(part, "embed")
        name = STEERED.sub(_bias_beside, name)
        summed[name] = summed[name] + value if name in summed else value.detach().double()
    yield from summed.items()


STEERED = re.compile(r"blocks\.(\d+)\.hook_(resid_pre|resid_post|attn_out|mlp_out)")


def _bias_beside(point: re.Match[str]) -> str:
    """The bias that stands where a hook point is."""
    layer = int(point[1]) - (point[2] == "resid_pre")
    return f"L{layer}.b_O" if point[2] == "attn_out" else f"L{layer}.b_out"


def _of_terms(terms: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    yield from _merged((f"{name}.{part}", terms.scores[..., number]) for number, part in enumerate(terms.names))
    if terms.keys is not None:
        keys = terms.keys.nan_to_num()
        yield from _merged((f"{name}.{part}.keys", keys[..., number, :]) for number, part in enumerate(terms.names))
    for field in ("total", "remainder"):
        yield from _numbers(getattr(terms, field), f"{name}.{field}")


def _of_pairs(found: ScoreAttribution, name: str) -> Iterator[tuple[str, Tensor]]:
    names = found.names[0]
    for field in ("query_sources", "key_sources"):
        scores = getattr(found, field)
        yield from _merged((f"{name}.{field}.{a}", scores[:, i]) for i, a in _numbered(names, found.by))
    yield from _merged(
        (f"{name}.{a} | {b}", found.pairs[:, i, j])
        for i, a in _numbered(names, found.by)
        for j, b in _numbered(names, found.by)
    )
    for field in ("bias", "total", "alibi"):
        yield from _numbers(getattr(found, field), f"{name}.{field}")


def _numbered(names: list[str], by: str) -> list[tuple[int, str]]:
    """Components by name, tokens by position too."""
    return [(number, f"{number} {name}" if by == "token" else name) for number, name in enumerate(names)]


def _of_graph(graph: tlens.ContributionGraph, name: str) -> Iterator[tuple[str, Tensor]]:
    nodes = [f"{row.name} at {row.pos}.{row.part}" for row in graph.nodes.itertuples(index=False)]
    weights = torch.tensor(graph.nodes["weight"].to_numpy(dtype=float))
    yield from _merged((f"{name}.{node}", weights[number]) for number, node in enumerate(nodes))
    edges = graph.edges.itertuples(index=False)
    yield from _merged((f"{name}.{nodes[e.source]} → {nodes[e.target]}", torch.tensor(float(e.weight))) for e in edges)
    yield f"{name}.total", torch.tensor(graph.total, dtype=torch.float64)


def apart(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of two answers over the second's largest number; a term that is not there is 0."""
    size = max((float(value.nan_to_num().abs().max()) for value in other.values() if value.numel()), default=0.0)
    worst = 0.0
    for name in {*mine, *other}:
        a, b = mine.get(name), other.get(name)
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        assert a is not None
        assert b is not None
        if a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
            return float("inf")
        difference = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=0.0, posinf=float("inf"))
        worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
    return worst / (size or 1.0)


# ------------------------------------------------------------------ truths


@cache
def _truth_setting(
    name: str, dtype: str, edit: Callable[[Any], None], as_dtype: str
) -> Setting | tlens.TensorLensError | None:
    """An untouched equivalent: built in one dtype, so that weights are rounded as the changed model's are."""
    model = built(name, DTYPES[dtype]).to(DTYPES[as_dtype])
    try:
        edit(model)
    except NoEquivalentError:
        return None
    setting = Setting(model)
    try:
        setting.freeze()
    except tlens.TensorLensError as error:
        return error
    return setting


_truths: dict[tuple[Any, ...], Any] = {}


def truth(name: str, dtype: str, edit: Callable[[Any], None], as_dtype: str, question: Question) -> Any:
    """The numbers that a question gives on an equivalent, or the error that it raises there."""
    key = (name, dtype, edit, as_dtype, question.name)
    if key not in _truths:
        setting = _truth_setting(name, dtype, edit, as_dtype)
        try:
            if isinstance(setting, Setting):
                _truths[key] = numbers(question.ask(setting))
            else:
                _truths[key] = setting
        except Exception as error:
            _truths[key] = error
    return _truths[key]


def forget() -> None:
    """Truths of one change are of no use to another, but for the untouched model's."""
    kept = {key: value for key, value in _truths.items() if key[2] is untouched}
    _truths.clear()
    _truths.update(kept)
    _truth_setting.cache_clear()


# ------------------------------------------------------------------ cells


def cells(name: str, change: Change, dtype: str, asked: list[Question]) -> dict[str, Cell]:
    """What every question answers on one changed model: it is frozen once, and asked them all."""
    model = built(name, DTYPES[dtype])
    found: dict[str, Cell] = {}
    with warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")
        with applied(change, model) as model:
            runner = _Runner(name, change, dtype, model)
            for question in asked:
                found[question.name] = runner.cell(question)
    return found


def quiet() -> Any:
    """Bars and tables are not shown."""
    import os
    from contextlib import ExitStack, redirect_stderr, redirect_stdout

    stack, sink = ExitStack(), open(os.devnull, "w")  # noqa: SIM115
    stack.enter_context(sink)
    stack.enter_context(redirect_stdout(sink))
    stack.enter_context(redirect_stderr(sink))
    return stack


class _Runner:
    """One changed model: its passes, its own numbers, and what it is compared with."""

    def __init__(self, name: str, change: Change, dtype: str, model: Any) -> None:
        self.name, self.change, self.dtype, self.setting = name, change, dtype, Setting(model)
        self.failure: BaseException | None = None
        self.own_then = self._own()
        try:
            with (change.freezing or nullcontext_of)(model):
                self.setting.freeze()
        except Exception as error:
            self.failure = error
        if change.after is not None:
            change.after(model)
        self.own_now = self._own() if change.after is not None else self.own_then
        self.hooks = hooks_left(model)

    def _own(self) -> Tensor | None:
        """The model's own logits, by hand: one prompt, one run."""
        try:
            with torch.no_grad():
                return self.setting.model(torch.tensor([TOKENS]))[0].double()
        except Exception:
            return None

    def cell(self, question: Question) -> Cell:
        """One question's outcome."""
        plain = truth(self.name, "float64", untouched, "float64", question)
        if isinstance(plain, tlens.TensorLensError):
            return Cell(ABSENT)
        if self.own_now is None or self.own_then is None:
            return self._unrun(question)
        answer = self._ask(question)
        if isinstance(answer, Cell):
            return answer
        left = hooks_left(self.setting.model)
        if left != self.hooks:
            return Cell(WRONG, f"{left - self.hooks} hooks are left behind")
        try:
            mine = numbers(answer)  # a map is pushed here
        except Exception as error:
            return _raised(error)
        checked = self._sum(question, answer)
        edits = self._equivalents(question)
        if not edits:
            return checked
        compared = [self._compared(question, mine, edit) for edit in edits]
        best = min(compared, key=lambda cell: (EXACT, SUM, RAN, WRONG).index(cell.outcome))
        return checked if checked.outcome == WRONG or best.outcome == SUM else best

    def _unrun(self, question: Question) -> Cell:
        """A model that does not run by itself: a refusal, or its own error."""
        answer = self._ask(question)
        return answer if isinstance(answer, Cell) and answer.outcome == REFUSED else Cell(ABSENT)

    def _ask(self, question: Question) -> Any:
        if question.of == "pass" and self.failure is not None:
            return _raised(self.failure)
        try:
            with (self.change.asking or nullcontext_of)(self.setting.model):
                return question.ask(self.setting)
        except Exception as error:
            return _raised(error)

    def _equivalents(self, question: Question) -> list[Callable[[Any], None]]:
        """What an answer may be equal to: weights alone know nothing of hooks, and a pass is of when it was made."""
        if (question.gathers and self.change.of_row) or (question.runs and self.change.after is not None):
            return []
        if question.function == "evaluate.known_attention" and self.change.leaves_weights:
            return []  # ranks among parts: under a hook, the first block's input is one of them
        if question.function == "evaluate.randomisation" and self.change.group == ADAPTERS:
            return []  # weights are drawn parameter by parameter, and a model with adapters has other parameters
        if self.change.unlike and re.search(self.change.unlike, question.name):
            return []
        edits = [self.change.frozen_as] if question.of == "pass" else [self.change.now]
        if question.of == "weights" and self.change.leaves_weights:
            edits.append(untouched)
        return [edit for edit in edits if edit is not None]

    def _compared(self, question: Question, mine: dict[str, Tensor], edit: Callable[[Any], None]) -> Cell:
        exact = truth(self.name, self.dtype, edit, "float64", question)
        if exact is None or isinstance(exact, Exception):
            return Cell(SUM)
        allowed = self._allowed(question, exact, edit)
        off = apart(mine, exact)
        if off <= allowed:
            return Cell(EXACT)
        return Cell(WRONG, f"off by {off:.1e} of its largest number (allowed {allowed:.0e})")

    def _allowed(self, question: Question, exact: dict[str, Tensor], edit: Callable[[Any], None]) -> float:
        # Llama's own norms compute in float32, and a graph keeps the weights of its edges so
        single = "llama" in self.name or question.function == "circuits.contribution_graph"
        floor = 1e-6 if single else FLOAT64
        if self.dtype == "float64":
            return floor
        eps = torch.finfo(DTYPES[self.dtype]).eps
        rounding = self._rounding(question, edit)
        if rounding is None:
            return max(floor, 64 * eps)
        own = max(FACTOR * rounding * eps, self._rounding_of_runs(question, exact, edit))
        return max(own, (32 if self.dtype == "float32" else 2) * eps, floor)

    def _rounding(self, question: Question, edit: Callable[[Any], None]) -> float | None:
        """The rounding of an answer, in units of its dtype's spacing; None where there is no answer.

        One answer's rounding is one draw, which may be small by chance: both half precisions are tried for either.
        """
        draws = []
        for dtype in HALF if self.dtype in HALF else (self.dtype,):
            exact = truth(self.name, dtype, edit, "float64", question)
            rounded = truth(self.name, dtype, edit, dtype, question)
            if isinstance(rounded, dict) and isinstance(exact, dict):
                draws.append(apart(rounded, exact) / torch.finfo(DTYPES[dtype]).eps)
            elif dtype == self.dtype:
                return None
        return max(draws)

    def _rounding_of_runs(self, question: Question, exact: dict[str, Tensor], edit: Callable[[Any], None]) -> float:
        """What rounding of two runs leaves in an answer that explains their difference, over its largest number.

        A small difference of two large numbers is rounded as these are, and one answer's rounding is one draw of it: so
        the changed model's own logits are compared with the equivalent's in float64, over the whole vocabulary.
        """
        kind, _, method = question.function.partition(" ")
        if kind != "method" or not tlens.get_method(method).explains_differences:
            return 0.0
        setting = _truth_setting(self.name, self.dtype, edit, "float64")
        assert isinstance(setting, Setting)
        assert self.own_then is not None
        with torch.no_grad():
            logits = setting.model(torch.tensor([TOKENS]))[0].double()
        row = MIDDLE if question.middle else -1
        rounding = (self.own_then[row] - logits[row]).square().mean().sqrt()
        return 2**0.5 * float(rounding) / max(float(value.abs().max()) for value in exact.values())

    def _sum(self, question: Question, answer: Any) -> Cell:
        """Whether a total is the model's own number."""
        total = explained(question, answer)
        if total is None:
            return Cell(RAN)
        then = self.own_then if question.of == "pass" else self.own_now
        assert then is not None
        row = then[MIDDLE if question.middle else -1]
        own = float(row[TARGET] - row[MINUS])
        precision = next(self.setting.model.parameters()).dtype if question.of == "model" else DTYPES[self.dtype]
        eps = torch.finfo(precision).eps
        size = float(row.abs().max()) + weights.LOUD
        exact = precision is torch.float64 and "llama" not in self.name
        allowed = FLOAT64 * size if exact else max(1e-6, 8 * eps) * size
        off = abs(total - own)
        if not off <= allowed:
            return Cell(WRONG, f"its total is {total:.4g}, the model's own number {own:.4g}")
        gap = _gap(answer)
        if gap is not None and not gap <= max(1e-6 if self.dtype == "float64" else 0, 16 * eps):
            return Cell(WRONG, f"gap {gap:.1e}")
        return Cell(SUM)


def nullcontext_of(model: Any) -> Any:
    """No context."""
    return nullcontext(model)


def _raised(error: BaseException) -> Cell:
    first = (str(error) or type(error).__name__).split("\n")[0]
    if isinstance(error, tlens.TensorLensError):
        return Cell(REFUSED, first)
    return Cell(CRASH, f"{type(error).__name__}: {first[:160]}")


def explained(question: Question, answer: Any) -> float | None:
    """The logit difference that an answer explains, by its own word."""
    of_target = "target" in question.name or "logit" in str(getattr(answer, "target", ""))
    total = getattr(answer, "total", None)
    if not of_target or total is None or "probability" in str(getattr(answer, "target", "")):
        return None
    if "FrozenOperator" in question.name and "target" not in question.name:
        return None
    if not (isinstance(total, float) or (isinstance(total, Tensor) and total.numel() == 1)):
        return None
    return float(total)


def _gap(answer: Any) -> float | None:
    if getattr(answer, "additive", True) is False:
        return None
    gap = getattr(answer, "gap", None)
    return float(torch.as_tensor(gap).max()) if gap is not None else None


def all_questions() -> list[Question]:
    """In the order of the table."""
    return questions()
