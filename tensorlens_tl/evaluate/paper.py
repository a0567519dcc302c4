"""The experiments of TensorLens (2026) on your model, with the published numbers beside what was measured.

Tables 1 and 2 and Figures 3, 4, 6 and 7 are perturbation tests (Section 4.1, Appendix A): texts of 128 tokens, or
images, of which 0 to 30 % are replaced, the most relevant first; the area under the curve of the final hidden state's
mean squared change, and in Table 1 of the absolute change of the predicted token's probability. Figure 5 is relation
decoding (Section 4.2, Appendix D). The page "Reproduce the paper's tables" of the documentation lists what the paper
leaves open, and what was chosen here.

The published numbers are the paper's two tables whole, and of its figures the areas that the text of Section 4.1
states, some of them as bounds ("below 0.6"). They lie in ``evaluate/data/published.json``, each row as it is printed
there; None is "N.A".

    >>> [number.value for number in published("table-1") if number.method == "Tensor, Norm"]
    [3.708, 0.147, 0.222, 0.129, 0.892, 0.141]
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from tensorlens_tl._arguments import Seed, Whole, checked_names, whole_number
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.drawing import page, terminal
from tensorlens_tl.errors import FileFormatError, InvalidInputError
from tensorlens_tl.evaluate.checks import spearman
from tensorlens_tl.evaluate.perturbation import FRACTIONS, perturbation
from tensorlens_tl.evaluate.relations import Relation, by_relation, relation_decoding, shipped_relations
from tensorlens_tl.evaluate.scorers import STANDARD, ReplacementName, scorers_of, usable
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.inputs import InputLike, token_rows
from tensorlens_tl.passes.replacement import fixed
from tensorlens_tl.results import Evaluation, Result, cell

if TYPE_CHECKING:
    import pandas as pd

    Data = InputLike | Sequence[Relation] | None
    """Texts, token ids or images; relations, or None for those that come with the library."""
else:
    Data = Any  # our own errors say what is wrong

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

KINDS = {
    "images": ("images [image, channel, height, width]", 4),
    "tokens": ("a list of texts, or token ids [text, pos]", 2),
}
"""What the data of an experiment are, by what its model reads, and how many axes they have as one array."""

RANKED = 3
"""From so many published numbers on, two orders of methods are compared."""


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
        query: the position whose final hidden state is compared: the last, or 0, an encoder's [CLS].
        demo: the bundled model that it runs on by default.
    """

    name: str
    what: str
    data: str
    reads: Literal["tokens", "images", "relations"] = "tokens"
    metrics: tuple[str, ...] = ("hs_mse",)
    methods: tuple[str, ...] = tuple(name for name in PAPER_METHODS if name != "Tensor, In+Class")
    query: int = 0
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
            metrics=("hs_mse", "aopc_abs"), methods=tuple(PAPER_METHODS), query=-1, demo="language",
        ),
        Experiment("table-2", "sentiment models: ModernBert-Base, Gemma3-270M", "IMDB", query=-1),
        Experiment("figure-3", "vision: DeiT-Base", "ImageNet-1K", reads="images", demo="digits"),
        Experiment("figure-4", "encoder: BERT-Base", "IMDB"),
        Experiment("figure-5", "relation decoding: Pythia-1B", "LRE relations", reads="relations", demo="relations"),
        Experiment("figure-6", "encoder: RoBERTa-Base", "IMDB"),
        Experiment("figure-7", "vision: DeiT-Small", "ImageNet-1K", reads="images", demo="digits"),
    )
}  # fmt: skip
"""What `reproduce` can run, by name."""


def experiment_named(name: str) -> Experiment:
    """An experiment by its name."""
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
    """Return the published numbers, all or those of one experiment.

    Args:
        name: one of `EXPERIMENTS`; Figures 5 to 7 are only drawn in the paper, and have none.
        model: a Hugging Face or TransformerLens name: its own numbers only, if there are any.

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


# ------------------------------------------------------------------ what was measured beside it


@dataclass(frozen=True, eq=False, repr=False)
class Reproduction(Result):
    """An `experiment` of the paper and its `evaluation` here, from `reproduce`."""

    experiment: Experiment
    evaluation: Evaluation

    def __repr__(self) -> str:
        return f"Reproduction({self.experiment.name!r}, {self.evaluation!r})"

    @property
    def published(self) -> list[PublishedNumber]:
        """The paper's numbers: those of the same model where it has them, else all of the experiment."""
        return published(self.experiment.name, str(self.evaluation.settings.get("model", "")))

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per metric, method and published model.

        Columns are metric, method, mean, low and high (measured, with the 95 % bootstrap interval), published model,
        bound (``"="``, ``"<"`` or ``">"``) and published: empty and NaN where the paper has no number.
        """
        import pandas as pd

        rows = []
        for metric in self.evaluation.metrics:
            measured = self.evaluation.table(metric)[metric].reindex(self._methods())
            for method, *ours in measured.itertuples(name=None):
                numbers = [n for n in self.published if (n.metric, n.method) == (metric, method)]
                paper_rows = [(n.model, n.bound, n.value) for n in numbers] or [("", "", None)]
                rows += [(metric, method, *ours, *row) for row in paper_rows]
        names = ["metric", "method", "mean", "low", "high", "published model", "bound", "published"]
        return pd.DataFrame(rows, columns=names).astype({"published": float})

    def rank_correlations(self) -> dict[tuple[str, str], float]:
        """Correlate our order of methods with the paper's (Spearman), by metric and published model.

        The scale of the paper's areas is not stated; the order does not depend on it. Bounds, and methods that either
        side lacks, are left out.
        """
        correlations = {}
        for metric, model in dict.fromkeys((number.metric, number.model) for number in self.published):
            known = {
                n.method: n.value
                for n in self.published
                if (n.metric, n.model, n.bound) == (metric, model, "=") and n.value is not None
            }
            methods = [method for method in known if method in self.evaluation.methods]
            if len(methods) >= RANKED:
                ours = torch.tensor([[self.evaluation.mean(metric, method) for method in methods]])
                theirs = torch.tensor([[known[method] for method in methods]])
                correlations[metric, model] = float(spearman(ours, theirs, torch.ones_like(ours).bool()))
        return correlations

    def _print(self, k: int) -> None:
        """What was measured beside what was published, a table for each metric, and what was left out."""
        for title, headings, rows in self._tables():
            terminal.show_table(title, headings, rows, left=("method", "category", "relation"))
        print("\n".join(self._notes()))

    def _html(self, k: int) -> str:
        """The same tables, and the evaluation's curves and intervals."""
        parts = [f"<h4>{escape(title)}</h4>{page.table(headings, rows)}" for title, headings, rows in self._tables()]
        parts += [f"<div>{escape(note)}</div>" for note in self._notes()]
        return page.panel(self.experiment.name, *parts) + self.evaluation.to_html(style=False)

    @property
    def heading(self) -> str:
        """The title of its page."""
        return f"Reproduction: {self.experiment.name}"

    def _figure(self, k: int, metric: str | None = None, methods: list[str] | None = None, *, ax: Any) -> Any:
        return self.evaluation.plot(metric=metric, methods=methods, ax=ax)

    def _write(self, path: Path) -> Path:
        """Write the evaluation to one file, for `Reproduction.load` or `Evaluation.load`."""
        return self.evaluation.save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Reproduction":
        """Read a file that `save` wrote.

        Raises:
            FileFormatError: not such a file, damaged, or an evaluation that reproduces nothing.
        """
        evaluation = Evaluation.load(path)
        name = str(evaluation.settings.get("reproduces"))
        if name not in EXPERIMENTS:
            raise FileFormatError(f"{path}: an Evaluation, but no result of reproduce.")
        return cls(EXPERIMENTS[name], evaluation)

    # ------------------------------------------------------------------ parts

    def _methods(self) -> Sequence[str]:
        """The methods of the tables, those that are not defined on the model included."""
        if self.experiment.reads == "relations":
            return self.evaluation.methods
        return self.experiment.methods

    def _tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, headings and rows: each method's area with its interval, then what was published of it."""
        model = self.evaluation.settings.get("model", "")
        if self.experiment.reads == "relations":
            return [(f"{self.experiment.name}, {self.experiment.what}", *self._relations())]
        theirs = {(n.metric, n.model, n.method): str(n) for n in self.published}
        models = list(dict.fromkeys(n.model for n in self.published))
        tables = []
        for metric in self.evaluation.metrics:
            rows = [
                [method, self._measured(metric, method), *(theirs.get((metric, m, method), "–") for m in models)]
                for method in self._methods()
            ]
            title = f"{self.experiment.name}, {self.experiment.what}: {metric}"
            tables.append((title, ["method", f"here: {model}", *(f"paper: {m}" for m in models)], rows))
        return tables

    def _measured(self, metric: str, method: str) -> str:
        return cell(self.evaluation.table(metric), method, metric) if method in self.evaluation.methods else "N.A"

    def _relations(self) -> tuple[list[str], list[list[str]]]:
        """Figure 5: a row for each relation, by category, mean ± standard deviation over splits."""
        frame = by_relation(self.evaluation)
        methods = self.evaluation.methods
        categories: dict[str, str] = self.evaluation.settings["categories"]
        rows = []
        for name in sorted(self.evaluation.units, key=lambda name: (categories[name], name)):
            spreads = [[float(frame.loc[name, (method, end)]) for end in ("mean", "std")] for method in methods]
            rows.append([categories[name] or "–", name, *(_spread(mean, std) for mean, std in spreads)])
        whole = [f"{self.evaluation.mean('faithful', method):.2f}" for method in methods]
        return ["category", "relation", *methods], [*rows, ["", "mean", *whole]]

    def _notes(self) -> list[str]:
        settings = self.evaluation.settings
        notes = [f"here {settings.get('model')} on {settings['data']}; in the paper {self.experiment.data}"]
        if self.experiment.reads == "relations":
            notes.append(
                "share of held-out subjects with the model's own answer, mean ± standard deviation over splits"
            )
            notes.append("the paper's accuracies are drawn, not printed")
        else:
            notes.append(
                "area under the curve over 0 to 30 %, divided by its range, with its 95 % interval; higher is better"
            )
            if not self.published:
                notes.append("the paper's areas are drawn, not printed")
        for (metric, model), rank in self.rank_correlations().items():
            notes.append(f"rank correlation of the methods' order with {model}, {metric}: {rank:.2f}")
        return notes + [f"left out: {name}: {why}" for name, why in self.evaluation.skipped.items()]


def _spread(mean: float, std: float) -> str:
    """Mean and standard deviation, as far as there are any."""
    if math.isnan(mean):
        return "–"
    if math.isnan(std):
        return f"{mean:.2f}"
    return f"{mean:.2f} ± {std:.2f}"


@checked_names
def reproduce(
    name: str,
    model: ModelLike,
    data: Data = None,
    *,
    length: Whole | None = None,
    n: Whole | None = None,
    replacement: ReplacementName = None,
    seed: Seed = 0,
    memory: Memory = None,
) -> Reproduction:
    """Run one experiment of the paper on a model, by the paper's protocol.

    Args:
        name: one of `EXPERIMENTS`: ``"table-1"``, ``"table-2"``, ``"figure-3"`` to ``"figure-7"``.
        model: a TransformerLens model, those of the paper (`Experiment.what`) or any other of the kind.
        data: texts, or token ids `[text, pos]` as they are; images `[image, channel, height, width]` from the model's
            image processor; for Figure 5 `Relation` objects, or None for those that come with the library.
        length: tokens of each text, special ones included (128): longer texts are cut, shorter ones left out.
        n: how many of the texts or images are used, the first of them; None is all.
        replacement: of a token or patch, see `perturbation`; the paper does not say.
        seed: of the order of equal scores, and of the draws of Figure 5.
        memory: what perturbed runs may allocate, as ``"512MB"`` or bytes.

    Returns:
        A Reproduction: `show()` prints measured and published numbers. Methods that are not defined on the model are
        left out and named, as in the paper.

    Raises:
        InvalidInputError: no such experiment, no data, data of another kind, no text that is long enough, or an option
            that the experiment does not have.
        UnsupportedModelError: the model cannot be frozen, or is not of the experiment's kind.
    """
    experiment = experiment_named(name)
    view = ModelView(model)
    view.refuse_encoder_decoder(f"reproduce {name}")
    if experiment.reads == "relations":
        _refuse_options(name, length=length, n=n, replacement=replacement, memory=memory)
        evaluation = _relations(model, data, experiment, seed)
    else:
        if experiment.reads != "tokens":
            _refuse_options(name, length=length)
        if view.reads != experiment.reads:
            raise InvalidInputError(f"{name} is about {experiment.reads}; {view.description} reads {view.reads}.")
        inputs, facts = _inputs(view, data, experiment, length, n)
        options = {"replacement": fixed(view) if replacement is None else replacement, "seed": seed, "memory": memory}
        evaluation = _perturbed(model, inputs, experiment, options)
        evaluation = replace(evaluation, settings=evaluation.settings | facts)
    return Reproduction(experiment, replace(evaluation, settings=evaluation.settings | {"reproduces": name}))


def _refuse_options(name: str, **options: Any) -> None:
    for option, value in options.items():
        if value is not None:
            raise InvalidInputError(f"{option}={value!r}: {name} has no such option; leave it out.")


def _perturbed(model: ModelLike, inputs: Tensor, experiment: Experiment, options: dict[str, Any]) -> Evaluation:
    """The perturbation test, with those of the paper's methods that are defined on the model."""
    first = freeze(model, inputs[:1])
    if experiment.query == 0 and experiment.reads == "tokens" and first.causal:
        raise InvalidInputError(
            f"{experiment.name} compares the first token's final state, which in a causal model no other reaches; use "
            "an encoder, or table-1 or table-2."
        )
    if "Tensor, In+Class" in experiment.methods and not first.causal:
        raise InvalidInputError(f"{experiment.name} is about the next token; use a causal language model.")
    candidates = {method: STANDARD[PAPER_METHODS[method]] for method in experiment.methods}
    scorers, skipped = usable(scorers_of(candidates), first, experiment.query, skip=True)
    methods = {scorer.label: candidates[scorer.label] for scorer in scorers}
    return replace(perturbation(model, inputs, methods, **experiment.protocol, **options), skipped=skipped)


# ------------------------------------------------------------------ data


def _inputs(
    view: ModelView, data: Any, experiment: Experiment, length: Whole | None, n: Whole | None
) -> tuple[Tensor, dict[str, Any]]:
    """Token ids `[text, pos]` or images, and what is said about them in the settings."""
    name = experiment.name
    expected, axes = KINDS[experiment.reads]
    if n is not None:
        n = whole_number("n", n, least=1)
    if not hasattr(data, "__len__") or isinstance(data, str) or not len(data):
        what = "empty or no list"
        if data is None:
            what = "missing"
        elif isinstance(data, str) and data:
            what = "one text"
        raise InvalidInputError(f"{name}: data is {what}; pass {expected} (the paper's are of {experiment.data}).")
    images = experiment.reads == "images"
    if not images and not isinstance(data, Tensor) and all(isinstance(entry, str) for entry in data):
        return _texts(view, data, name, length, n)
    try:
        values = torch.as_tensor(data)[:n]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"{name}: data is neither texts nor one array ({error}); pass {expected}.") from error
    if values.is_floating_point() != images or values.ndim != axes:
        raise InvalidInputError(f"{name}: data is {tuple(values.shape)} of {values.dtype}; pass {expected}.")
    if images:
        return values, {"data": f"{len(values)} images"}
    _refuse_options(f"{name} on token ids", length=length)
    return values, {"data": f"{len(values)} rows of {values.shape[1]} token ids"}


def _texts(
    view: ModelView, texts: Sequence[str], name: str, length: Whole | None, n: int | None
) -> tuple[Tensor, dict[str, Any]]:
    """The first tokens of the first n texts that have as many, and what is said about them."""
    pos = LENGTH if length is None else whole_number("length", length, least=2)
    if pos > view.n_ctx:
        raise InvalidInputError(f"length={pos}: the context of this model is {view.n_ctx} tokens; pass a smaller one.")
    special = set(getattr(view.tokenizer, "all_special_ids", None) or [])
    rows = list[Tensor]()
    short = 0
    for text in texts:
        if n is not None and len(rows) == n:
            break
        row = torch.empty(0, dtype=torch.long)
        if text.strip():
            (row,) = token_rows(view, [text])
        if len(row) < pos:
            short += 1
            continue
        cut = row[:pos].clone()
        if int(row[-1]) in special:  # an encoder's separator ends what is left of a text too
            cut[-1] = row[-1]
        rows.append(cut.cpu())
    if not rows:
        raise InvalidInputError(
            f"{name}: none of the {len(texts)} texts has {pos} tokens; pass longer ones, or a smaller length."
        )
    return torch.stack(rows), {"data": f"{len(rows)} texts of {pos} tokens, {short} too short", "length": pos}


def _relations(model: ModelLike, data: Any, experiment: Experiment, seed: int) -> Evaluation:
    """Figure 5: relations of the paper's categories; those without a category are taken too."""
    relations = data
    if data is None:
        relations = list(shipped_relations().values())
    if not isinstance(relations, Sequence) or not relations or not all(isinstance(r, Relation) for r in relations):
        raise InvalidInputError(f"{experiment.name}: data is a list of Relation objects (Relation.load reads a file).")
    chosen = [relation for relation in relations if relation.category in ("", *CATEGORIES)]
    if not chosen:
        raise InvalidInputError(f"{experiment.name}: no relation of the categories {', '.join(CATEGORIES)}.")
    result = relation_decoding(model, chosen, seed=seed, **experiment.protocol)
    others = {r.name: f"category {r.category!r}, not in the paper" for r in relations if r not in chosen}
    origin = " that come with the library" if data is None else ""
    facts = {
        "data": f"{len(result.units)} relations{origin}",
        "categories": {relation.name: relation.category for relation in chosen},
    }
    return replace(result, settings=result.settings | facts, skipped=result.skipped | others)
