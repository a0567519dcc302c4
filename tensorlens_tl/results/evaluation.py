"""The result of every evaluation: a value per metric, method and unit (a prompt or split), with its uncertainty."""

from dataclasses import dataclass, field, replace
from html import escape
from math import isnan
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl._arguments import Number, nearest
from tensorlens_tl.drawing import charts, figure, page, terminal
from tensorlens_tl.drawing.marks import note
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.result import Result
from tensorlens_tl.results.statistics import bootstrap_interval, holm, sign_flip_p

if TYPE_CHECKING:
    import pandas as pd

_ENDS = ("mean", "low", "high")

BASELINE = "random"
"""The baseline method that every figure labels."""

AS_GOOD = 0.01
"""A table distinguishes methods only if random order falls short of the best value by this share of it."""


def area(
    curves: Float[Tensor, "metric method unit step"], axis: Float[Tensor, "step"]
) -> Float[Tensor, "metric method unit"]:
    """Return the area under curves by the trapezoid rule, divided by the axis' range: the mean over the axis."""
    return torch.trapezoid(curves, axis) / (axis[-1] - axis[0])


class Comparison(NamedTuple):
    """Two methods compared on the same prompts: mean difference with its interval, and a sign-flip test's p-value.

    The p-value is uncorrected; `Evaluation.paired` corrects for several comparisons.
    """

    difference: float
    low: float
    high: float
    p: float


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Result):
    """Metrics of methods over units: the result of every evaluation.

    `plot` takes one `metric` and some of the `methods`; by default it draws a panel for each metric with every method.

    Attributes:
        kind: which evaluation it is.
        values: `[metric, method, unit]`; NaN where a metric does not apply.
        metrics: name → whether a higher value is better (None if neither is).
        methods: labels of the methods.
        units: the items along the last axis, such as prompts.
        curves: `[metric, method, unit, step]` if the values are areas under curves.
        axis: the curves' x axis, `[step]` (fraction perturbed, layers randomised), labelled `axis_name`.
        settings: how it was run: model, prompts, options, seed.
        skipped: methods that do not apply to the model, with the reasons.
    """

    NAMES: ClassVar = {"metric": "metrics", "method": "methods", "unit": "units"}

    kind: str
    values: Float[Tensor, "metric method unit"]
    metrics: dict[str, bool | None]
    methods: list[str]
    units: list[str]
    curves: Float[Tensor, "metric method unit step"] | None = None
    axis: Float[Tensor, "step"] | None = None
    axis_name: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.TENSORS:  # small and meant to be read, so kept on the CPU
            value = getattr(self, name)
            if isinstance(value, Tensor):
                object.__setattr__(self, name, value.cpu())
        super().__post_init__()

    def __repr__(self) -> str:
        return (
            f"Evaluation({self.kind!r}, metrics={list(self.metrics)}, methods={len(self.methods)}, "
            f"units={len(self.units)})"
        )

    # ------------------------------------------------------------------ reading

    def mean(self, metric: str, method: str) -> float:
        """Return a method's mean over units.

        Raises:
            InvalidInputError: unknown metric or method.

        >>> result = tlens.evaluate.stability(model, [text, "Set the name"], ["ifr", "random"], draws=1)
        >>> result.mean("similarity", "ifr") > 0.5
        True
        """
        return float(self._row(metric, method).nanmean())

    def _row(self, metric: str, method: str) -> Float[Tensor, "unit"]:
        for name, known, what in (("metric", list(self.metrics), metric), ("method", self.methods, method)):
            if what not in known:
                near = nearest(what, known)
                raise InvalidInputError(f"{name}={what!r}: this {self.kind} has {', '.join(map(repr, known))}.{near}")
        return self.values[list(self.metrics).index(metric), self.methods.index(method)]

    @property
    def same_numbers(self) -> list[list[str]]:
        """Groups of methods whose numbers are all equal here up to rounding, and so are not independent evidence.

        >>> result = tlens.evaluate.completeness(model, text, ["tensorlens target", "cp-lrp", "decompx target"])
        >>> result.same_numbers
        [['tensorlens target', 'cp-lrp']]
        """
        values = self.values if self.curves is None else self.curves
        numbers = values.movedim(1, 0).flatten(1).double()
        groups: dict[str, list[str]] = {}
        rows: dict[str, Tensor] = {}
        for name, row in zip(self.methods, numbers, strict=True):
            if not bool(row.isfinite().any()):
                continue
            first = next((of for of, known in rows.items() if _same(row, known)), name)
            rows.setdefault(first, row)
            groups.setdefault(first, []).append(name)
        return [names for names in groups.values() if len(names) > 1]

    def _same_notes(self) -> list[str]:
        return [f"the same numbers: {', '.join(names)}" for names in self.same_numbers]

    def table(self, metric: str | None = None, *, level: Number = 0.95) -> "pd.DataFrame":
        """Return means with bootstrap intervals, one row per method, best first by one metric (default: the first).

        Columns are ``(metric, "mean" | "low" | "high")``; bounds are NaN for a single unit. Printed with three digits.

        Raises:
            InvalidInputError: unknown metric, or a level outside (0, 1).

        >>> result = tlens.evaluate.stability(model, [text, "Set the name"], ["ifr", "random"], draws=1)
        >>> sorted(result.table().index)
        ['ifr', 'random']
        """
        import pandas as pd

        from tensorlens_tl.results.printed import PrintedFrame

        names = list(self.metrics)
        by = metric or names[0]
        self._row(by, self.methods[0])
        low, high = bootstrap_interval(self.values, level)
        columns = {}
        for number, name in enumerate(names):
            columns[name, "mean"] = self.values[number].nanmean(-1).tolist()
            columns[name, "low"] = low[number].tolist()
            columns[name, "high"] = high[number].tolist()
        frame = pd.DataFrame(columns, index=pd.Index(self.methods, name="method"))
        ordered = frame.sort_values((by, "mean"), ascending=self.metrics[by] is False, kind="stable")
        return PrintedFrame(ordered)

    def compare(self, first: str, second: str, metric: str | None = None, *, level: Number = 0.95) -> Comparison:
        """Return the difference first − second over the same units, by one metric (default: the first).

        Raises:
            InvalidInputError: unknown metric or method.
        """
        metric = metric or next(iter(self.metrics))
        difference = self._row(metric, first) - self._row(metric, second)
        low, high = bootstrap_interval(difference, level)
        return Comparison(float(difference.nanmean()), float(low), float(high), sign_flip_p(difference))

    def paired(self, reference: str, metric: str | None = None) -> "pd.DataFrame":
        """Return every other method minus `reference`, by one metric (default: the first).

        Columns are difference, low, high, p (uncorrected) and p_holm, corrected by Holm's method for the comparisons in
        this table only, not for other metrics or results.

        Raises:
            InvalidInputError: unknown metric or method.
        """
        import pandas as pd

        self._row(metric or next(iter(self.metrics)), reference)
        rows = {m: self.compare(m, reference, metric) for m in self.methods if m != reference}
        frame = pd.DataFrame(rows.values(), index=pd.Index(rows, name="method"), columns=Comparison._fields)
        frame["p_holm"] = holm(torch.tensor(frame["p"].tolist(), dtype=torch.float64)).tolist()
        return frame

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per metric, method and unit, and per step if there are curves.

        >>> result = tlens.evaluate.stability(model, [text, "Set the name"], ["ifr", "random"], draws=1)
        >>> len(result.to_dataframe())
        4
        """
        import pandas as pd

        values, places = self.values, {"metric": list(self.metrics), "method": self.methods, "unit": self.units}
        if self.curves is not None and self.axis is not None:
            values, places = self.curves, {**places, self.axis_name: self.axis.tolist()}
        index = pd.MultiIndex.from_product([*places.values()], names=[*places])
        return pd.DataFrame({"value": values.flatten().tolist()}, index=index).reset_index()

    def to_markdown(self, metric: str | None = None, digits: int = 3) -> str:
        """Return the table as Markdown: ``mean [low, high]``, the best method of each metric in bold.

        >>> result = tlens.evaluate.stability(model, [text, "Set the name"], ["ifr", "random"], draws=1)
        >>> result.to_markdown().startswith("|")
        True
        """
        frame = self.table(metric)
        lines = [f"| method | {' | '.join(self.metrics)} |", f"| --- |{' --- |' * len(self.metrics)}"]
        best = {}
        for name, higher in self.metrics.items():
            means = frame[name, "mean"].dropna()
            if higher is not None and len(means):
                best[name] = {True: means.idxmax, False: means.idxmin}[higher]()
        for method in frame.index:
            cells = [cell(frame, method, name, digits, bold=best.get(name) == method) for name in self.metrics]
            lines.append(f"| {method} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def _print(self, k: int) -> None:
        """Print the table, best method first, and the methods that were left out."""
        frame = self.table()
        arrows = {True: " ↑", False: " ↓", None: ""}
        headings = ["method", *(name + arrows[higher] for name, higher in self.metrics.items())]
        rows = [(str(method), *(cell(frame, method, name) for name in self.metrics)) for method in frame.index]
        over = f"mean over {len(self.units)} with 95 % bootstrap intervals"
        if len(self.units) == 1:
            over = "one unit"
        title = f"{self.kind}: {over}"
        notes = ["↑ higher is better, ↓ lower is better"]
        if self.settings.get("dropped"):
            notes.append(f"{self.settings['dropped']} prompts dropped, which the model answers wrongly")
        notes += self._same_notes()
        notes += self._random_notes()
        notes += [f"left out: {name}: {why}" for name, why in self.skipped.items()]
        caption = "\n".join(notes)
        terminal.show_table(title, headings, rows, left=("method",), caption=caption)

    def _random_notes(self) -> list[str]:
        """Name the metrics on which random order does as well as the best method, so that they distinguish none."""
        if BASELINE not in self.methods or "replacement" not in self.settings:
            return []
        notes: list[str] = []
        advice = "Use more prompts, more draws, or larger fractions."
        if self.settings["replacement"] != "resampled":
            advice = (
                f"With replacement {self.settings['replacement']!r} a single token may break the prediction whichever "
                "it is: use replacement='resampled' (of a causal language model), a token that fits anywhere, or "
                "larger fractions."
            )
        means = np.nanmean(np.asarray(self.values), axis=-1)  # [metric, method]
        random = self.methods.index(BASELINE)
        for (name, higher), row in zip(self.metrics.items(), means, strict=True):
            others = np.delete(row, random)
            if higher is None or not np.isfinite(others).any():
                continue
            best = np.nanmax(others) if higher else np.nanmin(others)
            lead = best - row[random] if higher else row[random] - best
            if lead <= AS_GOOD * abs(best):
                notes.append(
                    f"{name}: random does as well as every method, so this metric cannot tell them apart. {advice}"
                )
        return notes

    def _figure(self, k: int, metric: str | None = None, methods: list[str] | None = None, *, ax: Any) -> Any:
        """Draw mean curves with 95 % bootstrap intervals, or bars if there are no curves; `k` has no effect.

        The best few methods by the first metric get colours and dashes, the same in every panel; others are grey,
        ``random`` is dotted. Methods with the same numbers share a line. With `ax`, only one metric is drawn.
        """
        chosen = [str(method) for method in self.table(metric).index]
        if methods is not None:
            chosen = self.only(*methods).methods
        if metric is None and ax is None and len(self.metrics) > 1:
            return self._plot_panels(chosen)
        return self._plot_metric(metric or next(iter(self.metrics)), chosen, ax)

    def _plot_panels(self, methods: list[str]) -> list[Any]:
        """Draw a panel for each metric; lines are labelled once, bars at the left of each row."""
        has_curves = self.curves is not None
        size = (2.6, 2.4)
        if not has_curves:
            size = (2.6, 0.9 + figure.ROW * len(methods))
        every = figure.panels(len(self.metrics), size, shared=not has_curves)
        for metric, ax in zip(self.metrics, every, strict=True):
            self._plot_metric(metric, methods, ax, legend=False)
        if has_curves:
            figure.legend_beside(every[0])
        return every

    def _lines(self, methods: list[str]) -> list[list[str]]:
        """Group methods that share a line: those with the same numbers, which would hide each other."""
        first = {name: names[0] for names in self.same_numbers for name in names}
        lines: dict[str, list[str]] = {}
        for method in methods:
            lines.setdefault(first.get(method, method), []).append(method)
        return list(lines.values())

    def _plot_metric(self, metric: str, methods: list[str], ax: Any, *, legend: bool = True) -> Any:
        arrow = {True: " ↑", False: " ↓", None: ""}[self.metrics[metric]]
        if self.curves is not None and self.axis is not None:
            lines = {}
            baseline = ""
            for names in self._lines(methods):
                values = self.curves[list(self.metrics).index(metric), self.methods.index(names[0])]
                low, high = bootstrap_interval(values.T)
                name = " = ".join(names)
                lines[name] = (values.nanmean(0).numpy(), low.numpy(), high.numpy())
                if BASELINE in names:
                    baseline = name
            labels = {"xlabel": self.axis_name, "title": metric + arrow}
            return figure.curves(self.axis.numpy(), lines, labels, ax, legend=legend, baseline=baseline)
        frame = self.table(metric)
        frame = frame.where(np.isfinite(frame))
        bars = {method: [float(frame.loc[method, (metric, end)]) for end in _ENDS] for method in methods}
        return figure.bars(bars, {"title": metric + arrow}, ax)

    def _html(self, k: int) -> str:
        """Draw curves and intervals, one section per metric with the first open; the best few methods are coloured."""
        parts = []
        for metric, higher in self.metrics.items():
            better = {True: "higher is better", False: "lower is better", None: "neither is better"}[higher]
            frame = self.table(metric)
            names = [str(method) for method in frame.index]
            chart = charts.intervals(names, *(frame[metric, end].to_numpy() for end in _ENDS))
            shown = "" if parts else " open"
            curves = self._curves_html(metric, names)
            parts.append(
                f"<details{shown}><summary><b>{escape(metric)}</b>, {better}</summary>{curves}{chart}</details>"
            )
        parts += [note(text) for text in self._same_notes()]
        if self.skipped:
            reasons = page.table(("method", "why"), self.skipped.items(), "words")
            parts.append(f"<details><summary>{len(self.skipped)} methods left out</summary>{reasons}</details>")
        rounded = {name: f"{fact:.3g}" if isinstance(fact, float) else fact for name, fact in self.settings.items()}
        facts = [f"{name.replace('_', ' ')}: {fact}" for name, fact in rounded.items()]
        title = f"{self.kind}: means over {len(self.units)}, with 95 % bootstrap intervals"
        return self._panel(*parts, title=title, notes=facts)

    def _curves_html(self, metric: str, names: list[str]) -> str:
        """Draw the metric over the axis, with a line per method that has values."""
        if self.curves is None or self.axis is None:
            return ""
        row = list(self.metrics).index(metric)
        names = [n for n in names if bool(self.values[row, self.methods.index(n)].isfinite().any())]
        if not names:
            return ""
        values = self.curves[row, [self.methods.index(name) for name in names]].double()
        means = torch.where(values.isfinite(), values, torch.nan).nanmean(1).numpy()
        low, high = (end.numpy() for end in bootstrap_interval(values[: len(charts.LINES)].transpose(1, 2)))
        steps = self.axis.double().numpy()
        return charts.curves(names, steps, means, low, high, metric=metric, axis_name=self.axis_name)

    @property
    def heading(self) -> str:
        """The title of its page."""
        return self.kind

    # ------------------------------------------------------------------ parts

    def _misfit(self) -> str:
        if not self.metrics or not self.methods or not self.units or len(set(self.methods)) < len(self.methods):
            return "metrics, methods or units are empty, or a method occurs twice"
        if (self.curves is None) != (self.axis is None):
            return "curves and axis go together"
        return super()._misfit()

    def only(self, *methods: str) -> "Evaluation":
        """Return only some of the methods; raise `InvalidInputError` for an unknown one."""
        for method in methods:
            self._row(next(iter(self.metrics)), method)
        rows = [self.methods.index(method) for method in methods]
        curves = self.curves
        if curves is not None:
            curves = curves[:, rows]
        return replace(self, values=self.values[:, rows], curves=curves, methods=list(methods))


def cell(frame: "pd.DataFrame", method: Any, metric: str, digits: int = 3, *, bold: bool = False) -> str:
    """Format a method's mean and interval: a dash without a mean, no interval for a single prompt."""
    mean, low, high = (float(frame.loc[method, (metric, end)]) for end in _ENDS)
    if isnan(mean):
        return "–"
    cell = f"{mean:.{digits}g}"
    if bold:
        cell = f"**{cell}**"
    if isnan(low):
        return cell
    return f"{cell} [{low:.{digits}g}, {high:.{digits}g}]"


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two rows of numbers are equal up to rounding, with NaN in the same places."""
    size = float(second[second.isfinite()].abs().max())
    return torch.allclose(first, second, rtol=1e-6, atol=1e-6 * size, equal_nan=True)
