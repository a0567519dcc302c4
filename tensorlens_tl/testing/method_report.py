"""What the battery of methods measured, to be read."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class Residual(NamedTuple):
    """The largest relative difference that a check measured, and what it allows; none where it compares no numbers."""

    measured: float | None = None
    allowed: float | None = None

    @property
    def share(self) -> float:
        """The measured part of what is allowed; below zero where nothing was measured."""
        if self.measured is None or not self.allowed:
            return -1.0
        return self.measured / self.allowed


class MethodReport(dict[str, str]):
    """The models that a method refuses, with its words; and what was measured on the others.

    >>> from tensorlens_tl.testing import check_method
    >>> report = check_method("rollout", ["bridge/gpt2", "bridge/neox"])
    >>> dict(report), len(report.to_dataframe())
    ({}, 14)

    Attributes:
        method: the method's name.
        residuals: of each model that it holds on: the checks, and the largest relative difference that each measured.
    """

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.residuals: dict[str, dict[str, Residual]] = {}

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per model and check: the largest relative difference that was measured, and what is allowed."""
        import pandas as pd

        rows = [
            (model, name, *residual) for model, checks in self.residuals.items() for name, residual in checks.items()
        ]
        return pd.DataFrame(rows, columns=["model", "check", "measured", "allowed"])

    def __repr__(self) -> str:
        models = len(self.residuals) + len(self)
        lines = [f"{self.method} holds on {len(self.residuals)} of {models} models; the largest relative differences:"]
        width = max(map(len, [*self.residuals, *self]), default=0)
        for model, checks in self.residuals.items():
            said = ", ".join(f"{name} {_number(residual)}" for name, residual in checks.items())
            lines.append(f"  {model:<{width}}  {said}")
        lines += [f"  {model:<{width}}  refused: {why}" for model, why in self.items()]
        return "\n".join(lines)


def _number(residual: Residual) -> str:
    """A residual in two digits; of a check that compares no numbers, that it holds."""
    if residual.measured is None:
        return "ok"
    return f"{residual.measured:.1e}"
