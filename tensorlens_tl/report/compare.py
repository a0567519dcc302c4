"""Several results of one prompt, side by side."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.drawing.heat_maps import LOOSE, side_by_side
from tensorlens_tl.drawing.page import Picture, panel
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results import Attribution, array

if TYPE_CHECKING:
    Results = Attribution | Iterable[Attribution] | Mapping[str, Attribution]
else:
    Results = Any  # what is no Attribution is refused by `compare`

FACTS = {"bias": "bias", "total": "total", "gap": "gap"}
"""What stands below the tokens, by the member of a result that has it."""

CAPTION = "Blue adds, orange takes away; each column from its own largest value."


@checked_names
def compare(results: Results, *, batch: int = 0, query: int | str = -1) -> Picture:
    """Several results of one prompt side by side: a row per source token, a column per result.

    Columns do not share their colours, since the units of methods differ. Where a result comes with a total, its
    bias, total and gap stand below.

    Args:
        results: Attributions, or a mapping from headings to Attributions.
        batch: the prompt.
        query: which query of those that hold several, counted over real ones, or a text.

    Returns:
        A Picture: a notebook shows it, and ``.save("page.html")`` writes it.

    Raises:
        InvalidInputError: no results, or results of different prompts.

    >>> results = {name: tlens.attribute(frozen, method=name) for name in ("ifr", "alti")}
    >>> tlens.report.compare(results).title
    '2 attributions of one prompt'
    """
    named = _named(results)
    first = next(iter(named.values()))
    tokens = first.tokens[batch]
    for name, result in named.items():
        if result.tokens[batch : batch + 1] != [tokens]:
            raise InvalidInputError(
                f"compare: {name!r} is of other tokens than {next(iter(named))!r}; compare one prompt."
            )
    rows = {name: result.query_row(query, batch) for name, result in named.items()}
    positions = {name: int(result.queries[batch, rows[name]]) for name, result in named.items()}
    if len(set(positions.values())) > 1:
        raise InvalidInputError(f"compare: results of different queries (positions {positions}); compare one query.")
    real = [position for position in range(len(tokens)) if first.mask[batch, position]]
    columns = {name: array(result.plane(batch)[rows[name]])[real] for name, result in named.items()}
    hints = {name: result.target or result.method for name, result in named.items()}
    facts = {what: {name: fact(result, what, batch, rows[name]) for name, result in named.items()} for what in FACTS}
    caption = " ".join([CAPTION, *footnotes(named, batch, rows)])
    chart = side_by_side({position: tokens[position] for position in real}, columns, hints, facts, caption=caption)
    title = f"{len(named)} attributions of one prompt"
    return Picture(title, panel(title, chart))


def fact(result: Attribution, what: str, batch: int, row: int) -> float | None:
    """A number of one query, by its name in `FACTS`, where the result has it."""
    values = getattr(result, FACTS[what])
    if values is None:
        return None
    return float(values[batch, row])


def footnotes(results: Mapping[str, Attribution], batch: int, rows: Mapping[str, int]) -> list[str]:
    """What each gap means that is framed because it is large: a sentence for each kind of reason."""
    loose: dict[str, list[str]] = {}
    for name, result in results.items():
        if is_loose(result, batch, rows[name]):
            loose.setdefault(_why_loose(result), []).append(name)
    return [f"The gap of {' and '.join(names)} is framed: {why}" for why, names in loose.items()]


def is_loose(result: Attribution, batch: int, row: int) -> bool:
    """Whether a query's scores and bias are visibly not its total."""
    gap = fact(result, "gap", batch, row)
    return gap is not None and gap > LOOSE


def _why_loose(result: Attribution) -> str:
    """Why scores and bias are not the total."""
    if "steps" in result.options:
        return f"its integral has not converged at steps={result.options['steps']}; take more steps."
    if not result.additive:
        return "the method does not claim that scores and bias add up to the logit."
    return "scores and bias should add up and do not; compute in float64."


def _named(results: Results) -> dict[str, Attribution]:
    """Results by their headings: those that are given, or the methods' names."""
    if isinstance(results, Attribution):
        results = [results]
    named: dict[str, Any] = {}
    if isinstance(results, Mapping):
        named = {str(name): result for name, result in results.items()}
    else:
        for result in results:
            name = _heading(result)
            if name in named:
                name = f"{name} {len(named)}"
            named[name] = result
    if not named or not all(isinstance(result, Attribution) for result in named.values()):
        raise InvalidInputError("compare: pass Attributions, [a, b, …] or {'heading': a, …}, of one prompt.")
    return named


def _heading(result: Any) -> str:
    """A method's name, and the option that says what its scores measure."""
    options = getattr(result, "options", {})
    kind = options.get("collapse") or options.get("aggregate")
    name = str(getattr(result, "method", result))
    if kind:
        return f"{name} ({kind})"
    return name
