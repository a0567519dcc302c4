"""Published numbers, and the experiments that they come from: what `tensorlens_tl.evaluate.reproduce` can run.

The numbers are those of TensorLens (2026): its two tables whole, and of its figures the areas that the text of Section
4.1 states, some of them as bounds ("below 0.6"). They lie in ``evaluate/paper/data/published.json``, each row as it is
printed there; None is "N.A".

    >>> [number.value for number in published("table-1") if number.method == "Tensor, Norm"]
    [3.708, 0.147, 0.222, 0.129, 0.892, 0.141]
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.perturbing import FRACTIONS

FILE = Path(__file__).parent / "data" / "published.json"
LENGTH = 128
"""Tokens of a text, special ones included (Section 4.1)."""

PAPER_METHODS: Mapping[str, str] = {
    "Tensor, Norm": "tensorlens norm",
    "Tensor, In+Out": "tensorlens in_out",
    "Tensor, In+Class": "tensorlens target",
    "Rollout, Attn": "rollout attention",
    "Rollout, W-Attn": "rollout norm:attn",
    "Rollout, W-AttnResLN": "rollout norm:attn_res_ln",
    "Rollout, GlbEnc": "rollout globenc",
    "Mean, Attn": "mean attention",
    "Mean, W-Attn": "mean norm:attn",
    "Mean, W-AttnResLN": "mean norm:attn_res_ln",
    "Mean, GlbEnc": "mean globenc",
}
"""The paper's collapses and its eight baselines by the names of its tables, and their labels in `STANDARD`. All leave
the biases out of the scores, as Appendix B says of the perturbation tests."""

CATEGORIES = ("bias", "commonsense", "factual")
"""The categories of relations in Appendix D; LRE's data set has others too."""


@dataclass(frozen=True)
class Experiment:
    """A table or a figure of the paper, as far as the paper's text describes it.

    Attributes:
        name: such as ``"table-1"``.
        what: in a line.
        data: the paper's data set.
        reads: ``"tokens"``, ``"images"`` or ``"relations"``.
        metrics: of `perturbation`.
        methods: the paper's names.
        query: whose final hidden state is compared: ``"last"`` token or ``"cls"``, the first.
        demo: the bundled model that it runs on without any other.
    """

    name: str
    what: str
    data: str
    reads: Literal["tokens", "images", "relations"] = "tokens"
    metrics: tuple[str, ...] = ("hs_mse",)
    methods: tuple[str, ...] = tuple(name for name in PAPER_METHODS if name != "Tensor, In+Class")
    query: Literal["last", "cls"] = "cls"
    demo: str = "encoder"

    @property
    def protocol(self) -> dict[str, Any]:
        """Arguments of `perturbation` that the paper fixes; of `relation_decoding` for Figure 5."""
        if self.reads == "relations":
            return {"protocol": "paper"}
        return {"query": self.query, "metrics": list(self.metrics), "fractions": FRACTIONS, "hidden": "output"}


EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "table-1", "next-token prediction: Pythia-1B, Pico-570M, Phi-1.5", "WikiText-103",
            metrics=("hs_mse", "aopc_abs"), methods=tuple(PAPER_METHODS), query="last", demo="language",
        ),
        Experiment("table-2", "sentiment models: ModernBert-Base, Gemma3-270M", "IMDB", query="last"),
        Experiment("figure-3", "vision: DeiT-Base", "ImageNet-1K", reads="images", demo="digits"),
        Experiment("figure-4", "encoder: BERT-Base", "IMDB"),
        Experiment("figure-5", "relation decoding: Pythia-1B", "LRE relations", reads="relations", demo="relations"),
        Experiment("figure-6", "encoder: RoBERTa-Base", "IMDB"),
        Experiment("figure-7", "vision: DeiT-Small", "ImageNet-1K", reads="images", demo="digits"),
    )
}  # fmt: skip
"""What `reproduce` can run, by name."""


def experiment_named(name: str) -> Experiment:
    """An experiment by its name.

    Raises:
        InvalidInputError: there is none.
    """
    if name not in EXPERIMENTS:
        raise InvalidInputError(f"reproduce: no {name!r}; use one of {', '.join(map(repr, EXPERIMENTS))}.")
    return EXPERIMENTS[name]


@dataclass(frozen=True)
class PublishedNumber:
    """One number of the paper.

    Attributes:
        name: the experiment, such as ``"table-1"``.
        source: where it is printed.
        model: the paper's name of the model.
        hub: how the model's name begins on the Hugging Face hub.
        data: the data set.
        metric: as `perturbation` calls it; the number is an area under its curve.
        method: one of `PAPER_METHODS`.
        value: None where the paper has "N.A".
        bound: ``"="``, or ``">"`` and ``"<"`` where the text says no more.
    """

    name: str
    source: str
    model: str
    hub: str
    data: str
    metric: str
    method: str
    value: float | None
    bound: str = "="

    def __str__(self) -> str:
        if self.value is None:
            return "N.A"
        return f"{self.bound.strip('=')}{self.value:g}"


@lru_cache
def _all() -> tuple[PublishedNumber, ...]:
    numbers: list[PublishedNumber] = []
    for name, table in json.loads(FILE.read_text(encoding="utf-8")).items():
        for row in table["rows"]:
            bounds = row.get("bounds", ["="] * len(table["methods"]))
            where = (name, table["source"], row["model"], row["hub"], table["data"], row["metric"])
            cells = zip(table["methods"], row["values"], bounds, strict=True)
            numbers += [PublishedNumber(*where, *cell) for cell in cells]
    return tuple(numbers)


@checked_names
def published(name: str | None = None, model: str | None = None) -> list[PublishedNumber]:
    """The published numbers, all or those of one experiment.

    Args:
        name: one of `EXPERIMENTS`; Figures 5 to 7 are only drawn in the paper, and have none.
        model: a Hugging Face name or a TransformerLens name. Where numbers of it were published, those alone.

    Raises:
        InvalidInputError: no such experiment.

    >>> from tensorlens_tl import evaluate
    >>> len(evaluate.published()) > 100
    True
    """
    numbers = [number for number in _all() if name is None or number.name == experiment_named(name).name]
    if model is None:
        return numbers
    short = model.rpartition("/")[2].casefold()
    return [number for number in numbers if short.startswith(number.hub)] or numbers
