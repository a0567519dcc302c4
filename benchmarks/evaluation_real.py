"""Methods on trained language models: `make evaluation-real` writes a section of docs/evaluation.md, its chart and tables.

Lines of docs/_static/evaluation_real.csv are written as soon as they are measured, and what is there is not measured
again: delete lines, or the file, to do so. Names of models, tests and tasks choose some (``evaluation_real.py gemma3
nodes facts``); ``tables`` measures nothing. float32, TransformerBridge, one thread.
"""

import csv
import ctypes
import io
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformer_lens.model_bridge import TransformerBridge

sys.path.insert(0, str(Path(__file__).parents[1]))

import tensorlens_tl as tlens
from scripts.real_models import FOLDER, MODELS
from tensorlens_tl import evaluate
from tensorlens_tl.circuits import contribution_graph
from tensorlens_tl.circuits.compare import corrupted_stream, edge_layout, pair_target
from tensorlens_tl.circuits.live_edges import LiveEdges
from tensorlens_tl.circuits.measured import LARGEST as LARGEST_LIVE
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.evaluate import LANGUAGE_TASKS
from tensorlens_tl.evaluate.language import SOURCED, LanguageTask
from tensorlens_tl.evaluate.patching import EDGE_ROWS, ROWS, FrozenPairs
from tensorlens_tl.results import COVERED, MeasuredTerms

DOCS = Path(__file__).parent.parent / "docs"
PAGE, NUMBERS = DOCS / "evaluation.md", DOCS / "_static" / "evaluation_real.csv"
CHART = DOCS / "_static" / "evaluation_real.svg"
START, END = "<!-- trained models, written by benchmarks/evaluation_real.py -->", "<!-- end of trained models -->"
PROMPTS = {"gemma3": 8, "smollm2": 4}
"""Pairs of each task: to patch every node takes 301 runs of SmolLM2 for each pair, and 91 of Gemma 3."""
CIRCUIT_PROMPTS, EDGE_PROMPTS, SOURCE_PROMPTS = 4, 2, 4
"""Of how many pairs circuits are run, edges are patched, and sources are ranked."""
EDGES = 25
"""So many edges are patched that the difference, the gradient and EAP-IG each take for the largest; as many others."""
LARGEST = 20
"""Of so many of the largest nodes it is counted how many a method has among as many of its own."""
NONE = "not measured"
CIRCUITS = ("gradient", "integrated-gradients", "integrated-gradients, left", "difference", "measured", "random")
NAMES = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}
SIZES = {"smollm2": "135M", "gemma3": "270M"}


class Line(NamedTuple):
    """One number of every prompt, their mean, and the worst; of a task that was not measured, the reason."""

    model: str
    test: str
    task: str
    method: str
    metric: str
    mean: str
    worst: str
    prompts: str
    values: str

    @property
    def numbers(self) -> torch.Tensor:
        """Of each prompt."""
        return torch.tensor([float(value) for value in self.values.split()], dtype=torch.float64)


Row = tuple[str, str, torch.Tensor]
"""Method, metric, and the values of prompts."""

LOWER = ("cmd", "error", "forwards", "megabytes", "nodes", "fall, least relevant first")
"""Metrics of which less is better."""


def numbers_of(result: evaluate.Evaluation) -> Iterator[Row]:
    """An evaluation's values."""
    for metric, values in zip(result.metrics, result.values, strict=True):
        for method, row in zip(result.methods, values, strict=True):
            yield method, metric, row


def agreement(method: str, scores: torch.Tensor, truth: torch.Tensor) -> Iterator[Row]:
    """Pearson's and Spearman's r with patching, the sizes of errors as a share, and the largest that are found."""
    ranks = [values.argsort(1).argsort(1).double() for values in (scores, truth)]
    for metric, pair in (("pearson", (scores, truth)), ("spearman", ranks)):
        first, second = (values - values.mean(1, keepdim=True) for values in pair)
        yield method, metric, torch.nn.functional.cosine_similarity(first, second, dim=1)
    yield method, "error", (scores - truth).abs().sum(1) / truth.abs().sum(1)
    of_scores, of_truth = (values.abs().topk(LARGEST).indices for values in (scores, truth))
    yield method, "largest", (of_scores[..., None] == of_truth[:, None]).any(2).double().mean(1)


def nodes(model: Any, task: LanguageTask) -> Iterator[Row]:
    """Scores of heads and MLPs beside patching, and whether the error that measured ones state holds."""
    part = FrozenPairs(model, task.pairs, verify=False)
    patched = part.nodes("patching").scores[:, 0].double()
    for name in NODES:
        result = part.nodes(name)
        scores = result.scores[:, 0].double()
        yield from agreement(name, scores[:, 1:], patched[:, 1:])
        if isinstance(result, MeasuredTerms):
            misses, stated = (scores - patched).abs(), result.rest()
            shares = misses.sum(1) / scores.abs().sum(1)
            yield name, "stated error holds", (shares <= torch.tensor(stated["high"])).double()
            yield name, "stated bound holds", (misses.amax(1) <= torch.tensor(stated["largest"]) + ROUNDING).double()


def edges(model: Any, task: LanguageTask) -> Iterator[Row]:
    """Scores of some edges beside patching: what three methods take for the largest, and as many at random."""
    part = FrozenPairs(model, task.pairs.only(torch.arange(EDGE_PROMPTS)), verify=False)
    methods = [name for name in EDGE_ROWS if name not in ("frozen+qk", "patching")]
    scores = {name: part.edges(name) for name in methods}
    exists = scores["frozen"].exists
    by_method = {name: of.scores[:, exists].double() for name, of in scores.items()}
    found = [by_method[name].abs() for name in ("difference", "gradient", "integrated-gradients")]
    noise = torch.rand(found[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chosen = torch.cat([size.topk(EDGES).indices for size in (*found, noise, noise.neg(), (noise - 0.5).abs())], 1)
    readout = pair_target(part.clean, part.corrupted, part.target, part.minus, None, -1)
    layout = edge_layout(readout.stream, readout.positions)
    live = LiveEdges(readout, corrupted_stream(readout, part.corrupted), layout.exists)
    runs = torch.zeros(chosen.shape[1], *found[0].shape, dtype=torch.bool).scatter_(2, chosen.T[..., None], True)
    masks = runs.new_zeros(*runs.shape[:2], *exists.shape).masked_scatter(exists, runs)
    truth = live.losses(masks, None).T.double()
    for name, values in by_method.items():
        yield from agreement(name, values.gather(1, chosen), truth)


def circuits(model: Any, task: LanguageTask) -> Iterator[Row]:
    """The areas of the benchmark, CPR and CMD."""
    pairs = task.pairs.only(torch.arange(CIRCUIT_PROMPTS))
    yield from numbers_of(evaluate.circuit_faithfulness(model, pairs, CIRCUITS, only_correct=False))


def sources(model: Any, task: LanguageTask) -> Iterator[Row]:
    """The rank of the token that is the answer, of its logit and of that less the other answer's."""
    task = replace(task, pairs=task.pairs.only(torch.arange(SOURCE_PROMPTS)))
    for question, others in (("", None), (" of a difference", task.pairs.minus.tolist())):
        for method, metric, values in numbers_of(
            evaluate.known_answer(model, task.known, minus=others, progress=False)
        ):
            yield method, metric + question, values


def replacements(model: Any, task: LanguageTask) -> Iterator[Row]:
    """How far the difference of the answers' logits falls where tokens that the model predicts replace those there."""
    pairs = task.pairs
    chosen = {"target": pairs.target.tolist(), "minus": pairs.minus.tolist(), "metrics": "logit"}
    for order, first in (("descending", "most"), ("ascending", "least")):
        result = evaluate.perturbation(model, pairs.clean, REPLACING, order=order, **chosen)
        for method, _, values in numbers_of(result):
            yield method, f"fall, {first} relevant first", values


def graphs(model: Any, task: LanguageTask) -> Iterator[Row]:
    """What the nodes of a graph that is to carry 80 % carry, how many they are, and by how much sums at them are off."""
    pairs = task.pairs
    found: dict[tuple[str, str], list[float]] = {}
    for prompt in zip(pairs.clean[:, None], pairs.corrupted[:, None], pairs.target, pairs.minus, strict=True):
        clean, corrupted = (tlens.freeze(model, ids) for ids in prompt[:2])
        for of, runs in (("difference", tlens.difference(clean, corrupted)), ("one run", clean)):
            graph = contribution_graph(runs, *map(int, prompt[2:]), nodes=COVERED)
            gap = float(abs(graph.with_others().others).max()) / abs(graph.total)
            for metric, value in (("share", graph.coverage), ("nodes", float(len(graph.nodes) - 1)), ("error", gap)):
                found.setdefault((of, metric), []).append(value)
    for (of, metric), values in found.items():
        yield of, metric, torch.tensor(values)


TESTS = {
    "nodes": nodes,
    "sources": sources,
    "edges": edges,
    "circuits": circuits,
    "graphs": graphs,
    "replacements": replacements,
}
TASKS_OF = {
    "sources": SOURCED,
    "replacements": ("indirect objects", "agreement", "facts"),
    "cost": ("15 tokens", "64 tokens", "256 tokens"),
}
REPLACING = (
    "tensorlens target", "tensorlens in_out", "attnlrp", "decompx target", "input-x-gradient", "difference", "ifr",
    "alti", "leave-one-out", "random",
)  # fmt: skip
"""Methods whose order replacements follow: one of each kind, since each replacement is a run of its own."""
NODES = [name for name in ROWS if name not in ("frozen+qk", "patching")]
COSTS = ("gradient", "integrated-gradients", "atp*", "difference", "measured", "patching")
FORWARDS = 3
"""So many are timed just before a method, and just after it: other work of the machine slows all of them."""
ROUNDING = 1e-4
"""How far scores of float32 may be from those of other runs of it."""


def costs(model: Any, tokens: int) -> Iterator[Row]:
    """Processor time of one thread, in forwards of the model, and memory, for the nodes of one pair."""
    ids = torch.randint(1000, 20_000, (1, tokens), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, tokens // 2] += 1
    pairs = evaluate.PromptPairs("random", ids, other, torch.tensor([5]), torch.tensor([7]))

    @torch.no_grad()
    def nearby() -> list[float]:
        return [seconds(lambda: model(ids)) for _ in range(FORWARDS)]

    for name in COSTS:
        part = FrozenPairs(model, pairs, verify=False)
        forwards = nearby()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed is the system's again, and counts where it is used again
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of what follows
        spent = seconds(lambda name=name, part=part: part.nodes(name))
        yield name, "megabytes", torch.tensor([memory("VmHWM") - before])
        yield name, "forwards", torch.tensor([spent / statistics.median(forwards + nearby())])


def memory(name: str) -> float:
    """What this process has, or had at most, in megabytes (Linux)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1000


def seconds(work: Callable[[], Any]) -> float:
    """What this thread takes."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def lines() -> list[Line]:
    """What is measured already."""
    if not NUMBERS.exists():
        return []
    with NUMBERS.open(encoding="utf-8", newline="") as file:
        return [Line(*row) for row in csv.reader(file)][1:]


def measure(chosen: set[str]) -> None:
    """Add what is lacking to the file, the tests in their order."""
    models = {name: None for name in MODELS if name in chosen or not chosen & set(MODELS)}
    for name in models:
        model = TransformerBridge.boot_transformers(str(FOLDER / name), dtype=torch.float32)
        every = [*TESTS, "cost"]
        for test in [test for test in every if test in chosen or not chosen & {*every}]:
            tasks = [*TASKS_OF.get(test, LANGUAGE_TASKS)]
            for of in [of for of in tasks if of in chosen or not chosen & {*tasks}]:
                if (name, test, of) in {line[:3] for line in lines()}:
                    continue
                start = time.time()
                add(measured(model, name, test, of))
                print(f"{name}, {test}, {of}: {time.time() - start:.0f} s", flush=True)


def measured(model: Any, name: str, test: str, of: str) -> list[Line]:
    """One test of one task; a task that the model does not do is reported."""
    if test == "cost":
        results = costs(model, int(of.split()[0]))
    else:
        try:
            results = list(TESTS[test](model, evaluate.language_task(model, of, PROMPTS[name])))
        except (InvalidInputError, UnsupportedModelError) as error:
            return [Line(name, test, of, NONE, str(error).replace(f"{FOLDER}/", ""), "", "", "0", "")]
    found = []
    for method, metric, values in results:
        worst = values.max() if metric in LOWER else values.min()
        numbers = " ".join(f"{value:.4g}" for value in values.tolist())
        found.append(
            Line(name, test, of, method, metric, f"{values.mean():.4g}", f"{worst:.4g}", str(len(values)), numbers)
        )
    return found


def add(found: list[Line]) -> None:
    """Write lines behind those that are there."""
    new = not NUMBERS.exists()
    with NUMBERS.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([Line._fields, *found] if new else found)


# ------------------------------------------------------------------ the page


def columns_of(found: list[Line]) -> list[tuple[str, str]]:
    """The models and tasks that have numbers, in their order."""
    every = {line[0:3:2] for line in found}
    return [
        (model, task) for model in MODELS for task in (*LANGUAGE_TASKS, *TASKS_OF["cost"]) if (model, task) in every
    ]


def lines_of(found: list[Line], test: str, metric: str) -> list[Line]:
    """The numbers of one metric."""
    return [line for line in found if line.test == test and line.metric == metric]


def pooled(found: list[Line]) -> evaluate.Evaluation:
    """One metric of every prompt of these models and tasks, for the methods that all have."""
    columns = columns_of(found)
    methods = list(dict.fromkeys(line.method for line in found))
    of_method = {name: {line[0:3:2]: line.numbers for line in found if line.method == name} for name in methods}
    methods = [name for name in methods if len(of_method[name]) == len(columns)]
    values = torch.stack([torch.cat([of_method[name][column] for column in columns]) for name in methods])[None]
    units = [f"{column}, {number}" for column in columns for number in range(len(of_method[methods[0]][column]))]
    metric = found[0].metric
    return evaluate.Evaluation(metric, values, {metric: metric not in LOWER}, methods, units, settings={})


def leading(result: evaluate.Evaluation) -> tuple[str, list[str]]:
    """The first method, and those that these prompts do not tell apart from it (paired, Holm-corrected, 5 %)."""
    best = result.table().index[0]
    paired = result.paired(best)
    return best, [name for name in result.methods if name != best and not paired.loc[name, "p_holm"] < 0.05]


def visible(result: evaluate.Evaluation, first: str, second: str) -> float:
    """The difference of two methods that so many prompts show in four of five cases (paired, at 5 %)."""
    rows = [result.values[0, result.methods.index(name)] for name in (first, second)]
    return float(POWER * (rows[0] - rows[1]).std() / len(rows[0]) ** 0.5)


def prompts_needed(result: evaluate.Evaluation, first: str, second: str) -> str:
    """How many prompts show the difference of two methods in four of five cases, if it and its scatter are these."""
    (metric,) = result.metrics
    seen = abs(result.mean(metric, first) - result.mean(metric, second))
    if not seen:
        return f"`{first}` and `{second}` have the same mean"
    needed = max(math.ceil(len(result.units) * (visible(result, first, second) / seen) ** 2), 2)
    return (
        f"a new test needs {float(f'{needed:.2g}'):,.0f} prompts to separate `{first}` from `{second}` with 80 % power"
    )


FEWEST = 6
"""Prompts below which no paired test of signs comes to 5 %."""
POWER = 2.8
"""1.96 + 0.84: the standard errors by which an effect must be off zero for a test at 5 % to see it in 80 %."""


def listed(names: Iterable[str]) -> str:
    """Methods in a sentence."""
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def level_with(others: list[str]) -> str:
    """What a sentence says of those that are not told apart from the first."""
    return f"not significantly different: {listed(others)}" if others else "all other methods are significantly worse"


def of_nodes(found: list[Line]) -> Iterator[str]:
    """What follows about heads and MLPs."""
    by_r = lines_of(found, "nodes", "pearson")
    columns = columns_of(by_r)
    means, worst = (
        {name: {line[0:3:2]: float(getattr(line, which)) for line in by_r if line.method == name} for name in NODES}
        for which in ("mean", "worst")
    )
    first = sum(max(NODES, key=lambda name: means[name][column]) == "measured" for column in columns)
    low = min(columns, key=lambda column: worst["measured"][column])
    later = [column for column in columns if column[1] in LATER]
    result = pooled(by_r)
    best, others = leading(result)
    yield (
        f"**To find the heads and MLPs that made the difference, use [`measured`](howto/12_two_prompts.md#which-heads-and-mlps).** Its scores agree best with patching in {first} of "
        f"{len(columns)} tasks (counting each model's tasks separately). Its mean r is at least 0.99 in {sum(mean >= 0.99 for mean in means['measured'].values())} of "
        f"these tasks and {min(means['measured'].values()):.3f} in the worst. Its worst pair has r = {worst['measured'][low]:.3f} ({NAMES[low[0]]}, {low[1]}). In the {len({task for _, task in later})} tasks that we "
        f"chose after we had fixed the method ({', '.join(dict.fromkeys(task for _, task in later))}), the worst pair has r = "
        f"{min(worst['measured'][column] for column in later):.3f}."
    )
    holds = [
        torch.cat([line.numbers for line in lines_of(found, "nodes", f"stated {what} holds")])
        for what in ("error", "bound")
    ]
    yield (
        f"For each pair, `measured` patches up to {LARGEST_LIVE} nodes with large estimated effects and up to {LARGEST_LIVE // 2} random nodes. On these nodes, patching is compared with itself, so part of "
        "the lead is by construction. The method also estimates the error of all other scores. The 90 % interval of this estimate contained the true error on "
        f"{holds[0].mean():.0%} of the {len(holds[0])} pairs, and the bound on the error of a single score held on {holds[1].mean():.0%}."
    )
    low_of = {name: f"{min(worst[name].values()):.2f}" for name in NODES}
    yield (
        f"Cheaper methods ([definitions](howto/12_two_prompts.md#which-heads-and-mlps)) agree less well. On their respective worst pairs, `difference` (one {{term}}`pull`) has r = {low_of['difference']}, and EAP-IG "
        f"(`integrated-gradients`, five gradients) has r = {low_of['integrated-gradients']}. Methods that rely on a linear approximation at the clean prompt fail on some pairs: r falls to "
        f"{low_of['gradient']} for `gradient`, {low_of['atp*']} for `atp*` and {low_of['frozen']} for `frozen`."
    )
    shortlists, ranks = (pooled(lines_of(found, "nodes", metric)) for metric in ("largest", "spearman"))
    shares = ", ".join(f"`{name}` {shortlists.mean('largest', name):.0%}" for name in SHORTLISTS)
    first = max(SHORTLISTS[1:], key=lambda name: shortlists.mean("largest", name))
    in_order = ", ".join(f"`{name}` {ranks.mean('spearman', name):.2f}" for name in SHORTLISTS)
    yield (
        f"The correlation r depends on the sizes of scores, whereas a shortlist depends only on their order. Each method's top {LARGEST} nodes include this share of patching's top {LARGEST}: {shares}. "
        f"The rank correlations with patching are {in_order}. So `gradient` ranks nodes better than `difference` but misjudges some effect sizes. For a shortlist without live runs, use `{first}`."
    )
    runner = result.table().index[1]
    yield (
        f"Over all {len(result.units)} pairs, `{best}` has the highest mean r ({level_with(others)}). With 80 % power, this many pairs detect a lead of "
        f"{visible(result, best, runner):.3f} over `{runner}`; the observed lead is "
        f"{result.mean('pearson', best) - result.mean('pearson', runner):.3f}."
    )


def of_edges(found: list[Line]) -> Iterator[str]:
    """What follows about edges and circuits."""
    few = list[str]()
    before = ""
    for test, metric, what in (
        ("edges", "pearson", "agreement with patching over edges"),
        ("circuits", "cpr", "the area under the [faithfulness curve](howto/26_evaluate_circuits.md) of circuits (CPR)"),
        ("circuits", "cmd", "the area between that curve and 1 (CMD)"),
    ):
        chosen = lines_of(found, test, metric)
        if not chosen:
            continue
        result = pooled(chosen)
        if len(result.units) < FEWEST:
            tasks = ", ".join(dict.fromkeys(line.task for line in chosen))
            few.append(f"{len(result.units)} pairs ({tasks}) for {what}")
            continue
        best, others = leading(result)
        pairs = prompts_of(chosen, result, "prompt pairs")
        yield (
            f"By {what} ({'the same pairs' if pairs == before else pairs}), the best method is `{best}` with "
            f"{'r = ' if metric == 'pearson' else ''}{result.mean(metric, best):.3f} ({level_with(others)})."
        )
        before = pairs
    if few:
        yield f"Too few pairs were measured to rank methods: {', '.join(few)}."


def prompts_of(chosen: list[Line], result: evaluate.Evaluation, units: str = "prompts") -> str:
    """Models, tasks and the number of prompts or pairs, in words."""
    models_of: dict[str, list[str]] = {}
    for model in dict.fromkeys(line.model for line in chosen):
        tasks = ", ".join(dict.fromkeys(line.task for line in chosen if line.model == model))
        models_of.setdefault(tasks, []).append(NAMES[model])
    of_tasks = "; ".join(f"{' and '.join(models)}: {tasks}" for tasks, models in models_of.items())
    return f"{of_tasks}; {len(result.units)} {units}"


def of_sources(found: list[Line]) -> Iterator[str]:
    """What follows about the token that an answer was read from."""
    before = ""
    for metric, asked in (
        ("mrr", "the answer's logit"),
        ("mrr of a difference", "the answer's logit minus that of the paired prompt's answer"),
    ):
        chosen = lines_of(found, "sources", metric)
        if not chosen:
            continue
        result = pooled(chosen)
        best, others = leading(result)
        names = [
            name
            for name in ("tensorlens target", "leave-one-out", "mean attention", "rollout attention", "random")
            if name in result.methods
        ]
        *means, last = (f"{result.mean(metric, name):.2f} with `{name}`" for name in names)
        ranks = f"{', '.join(means)} and {last}"
        question = f"Which token was the answer read from ({prompts_of(chosen, result)})? "
        yield (
            f"{question if question != before else ''}In explanations of {asked}, the mean reciprocal "
            f"rank of the true source is {ranks}. The best method is `{best}` with {result.mean(metric, best):.2f} ({level_with(others)})."
        )
        before = question


def of_replacements(found: list[Line]) -> Iterator[str]:
    """What follows where tokens are replaced in the order of scores, or that this cannot tell methods apart."""
    before = ""
    for first in ("most", "least"):
        metric = f"fall, {first} relevant first"
        chosen = lines_of(found, "replacements", metric)
        if not chosen:
            continue
        result = pooled(chosen)
        best, others = leading(result)
        where = prompts_of(chosen, result)
        test = (
            f"When the {first} relevant tokens are replaced first, by tokens that the model predicts "
            f"({'the same prompts' if where == before else where})"
        )
        before = where
        if best == "random" or "random" in others:
            needed = prompts_needed(result, best if best != "random" else result.table().index[1], "random")
            yield f"{test}, no method differs significantly from a random order, so there is no verdict ({needed})."
        else:
            size = {"most": "largest", "least": "smallest"}[first]
            needed = prompts_needed(result, best, result.table().index[1])
            yield (
                f"{test}, `{best}` gives the {size} mean fall in the logit difference between the two answers, {result.mean(metric, best):.2f} ({level_with(others)}). A random order gives "
                f"{result.mean(metric, 'random'):.2f}. {needed[0].upper()}{needed[1:]}."
            )


def of_graphs(found: list[Line]) -> Iterator[str]:
    """What follows about the nodes that a graph shows."""
    chosen = lines_of(found, "graphs", "share")
    if not chosen:
        return
    of = {
        name: torch.cat([line.numbers for line in chosen if line.method == name]) for name in ("difference", "one run")
    }
    counts = {
        name: torch.cat([line.numbers for line in lines_of(found, "graphs", "nodes") if line.method == name])
        for name in of
    }
    enough = {name: float((shares >= COVERED).double().mean()) for name, shares in of.items()}
    gap = max(float(line.worst) for line in lines_of(found, "graphs", "error"))
    models = " and ".join(dict.fromkeys(NAMES[line.model] for line in chosen))
    yield (
        f"**How much of the answer does a graph show?** With `contribution_graph(…, nodes={COVERED:g})` ({models}; {len(of['difference'])} pairs), the graph of a "
        f"difference has {counts['difference'].mean():.0f} nodes on average. These account for {of['difference'].mean():.0%} of the sum of the absolute values of the answer's inputs ({COVERED:.0%} or more on "
        f"{enough['difference']:.0%} of the pairs, never less than {of['difference'].min():.0%}). The graph of a single run has {counts['one run'].mean():.0f} nodes on average, which account for "
        f"{of['one run'].mean():.0%}. If all other nodes are included, the inputs of each node sum to its value; the largest error is {gap:.0e} of the explained number."
    )


def of_costs(found: list[Line]) -> str:
    """A table of time and memory of one pair's nodes."""
    cells = {(line.method, line.metric, line[0:3:2]): float(line.mean) for line in found if line.test == "cost"}
    columns = columns_of([line for line in found if line.test == "cost"])
    rows = [
        "Each cell gives the processor time (in forward passes of the model) and the additional peak memory for scoring the nodes of one pair:",
        f"| method | {' | '.join(f'{NAMES[model]}, {tokens}' for model, tokens in columns)} |",
        "| --- |" + " --- |" * len(columns),
    ]
    for name in COSTS:
        shown_in = [[cells.get((name, metric, column)) for metric in ("forwards", "megabytes")] for column in columns]
        of_columns = ["–" if None in pair else "{:.0f}; {:.0f} MB".format(*pair) for pair in shown_in]
        rows.append(f"| `{name}` | {' | '.join(of_columns)} |")
    return "\n\n".join([rows[0], "\n".join(rows[1:])])


REASONS = {
    r"of (\d+) pairs of prompts, (\d+) have one length .* answers (\d+) of these, fewer than (\d+)": (
        r"Of \1 candidate pairs, \2 have prompts of equal length and one-token answers; the model answers \3 of these "
        r"pairs correctly, and the test needs \4."
    ),
    "sandwich layout has norms": (
        "Patching of edges is not defined in blocks that normalise each sublayer's output before adding it to the "
        "residual stream."
    ),
}
"""Errors by which a test is not measured, and how the page words them; others are quoted."""


def worded(reason: str) -> str:
    """Why a test was not measured, in a sentence."""
    for error, sentence in REASONS.items():
        if match := re.search(error, reason):
            return match.expand(sentence)
    return f"The error was “{reason}”"


def verdicts(found: list[Line]) -> list[str]:
    """What the page concludes, with its numbers: those that are not measured yet are left out."""
    parts = (of_nodes, of_edges, of_sources, of_replacements, of_graphs)
    return [re.sub(r"(?<=\d)%", " %", sentence) for part in parts for sentence in part(found)]


def drawn(found: list[Line]) -> str:
    """What was measured, the chart, the verdicts, and where the tables are."""
    nodes_of = lines_of(found, "nodes", "pearson")
    counts = " and ".join(
        f"{NAMES[model]} {SIZES[model]} ({sum({line.task: int(line.prompts) for line in nodes_of if line.model == model}.values())} prompt pairs from "
        f"{len({line.task for line in nodes_of if line.model == model})} tasks)"
        for model in MODELS
        if any(line.model == model for line in nodes_of)
    )
    links = [f"[{title}](_static/{name})" for name, title, _, _ in TABLES if (DOCS / "_static" / name).exists()]
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for line in found:
        if line.method == NONE:
            reason = line.metric.removeprefix(f"{line.task}: ")
            reasons.setdefault((NAMES[line.model], reason), []).append((line.test, line.task))
    failed = [
        f"* {model}, {' and '.join(dict.fromkeys(test for test, _ in of))} "
        f"({', '.join(dict.fromkeys(task for _, task in of))}): not measured. {worded(reason)}"
        for (model, reason), of in reasons.items()
    ]
    measured_already = {line[:3] for line in found}
    lacking = list[str]()
    for model, test in product(MODELS, (*TESTS, "cost")):
        every = TASKS_OF.get(test, LANGUAGE_TASKS)
        left = [of for of in every if (model, test, of) not in measured_already]
        done = [of for of in every if of not in left]
        if left:
            most = f"all except {', '.join(done)}" if done else "all"
            lacking.append(f"{NAMES[model]} {test} ({most if len(done) < len(left) else ', '.join(left)})")
    parts = [
        f"These results are for {counts}, computed in float32 from weights quantised to four bits. Each model answers both prompts of its "
        "pairs correctly (`evaluate.language_task`). The chart shows the correlation r between each method's scores of all heads and "
        "MLPs (nodes) and the effects of patching these nodes in the live model:",
        "![Correlation r with patching by method and task, with 95 % intervals](_static/evaluation_real.svg)",
        "\n".join(f"* {sentence}" for sentence in verdicts(found)),
        f"Tables: {', '.join(links)}; {{download}}`the numbers of every prompt <_static/evaluation_real.csv>`.",
    ]
    if any(line.test == "cost" for line in found):
        parts.insert(3, of_costs(found))
    if failed:
        parts.append("\n".join(failed))
    if lacking:
        parts.append(f"Not measured yet (`make evaluation-real` adds these): {'; '.join(lacking)}.")
    return "\n\n".join(parts)


TABLES = (
    ("evaluation_real-nodes.csv", "nodes, r", "nodes", "pearson"),
    ("evaluation_real-ranks.csv", "nodes, rank correlation", "nodes", "spearman"),
    ("evaluation_real-errors.csv", "relative errors", "nodes", "error"),
    ("evaluation_real-largest.csv", "share of the 20 largest nodes found", "nodes", "largest"),
    ("evaluation_real-edges.csv", "edges, r", "edges", "pearson"),
    ("evaluation_real-cpr.csv", "CPR", "circuits", "cpr"),
    ("evaluation_real-cmd.csv", "CMD", "circuits", "cmd"),
    ("evaluation_real-sources.csv", "sources of a logit", "sources", "mrr"),
    ("evaluation_real-contrasts.csv", "sources of a logit difference", "sources", "mrr of a difference"),
    ("evaluation_real-replaced-most.csv", "most relevant tokens replaced", "replacements", "fall, most relevant first"),
    (
        "evaluation_real-replaced-least.csv",
        "least relevant tokens replaced",
        "replacements",
        "fall, least relevant first",
    ),
    ("evaluation_real-graphs.csv", "share carried by a graph's nodes", "graphs", "share"),
    ("evaluation_real-cost.csv", "cost", "cost", "forwards"),
)
"""File, title, test and metric of each table."""


def table(chosen: list[Line]) -> list[list[str]]:
    """A row for each method, the best mean first; a column for each model and task: the mean, and the worst prompt."""
    columns = columns_of(chosen)
    cells = {(line.method, line[0:3:2]): line for line in chosen}
    methods = dict.fromkeys(line.method for line in chosen)
    sign = 1 if chosen[0].metric in LOWER else -1
    means = {name: [float(line.mean) for line in chosen if line.method == name] for name in methods}
    rows = [["method", *(f"{NAMES[model]}, {task}" for model, task in columns)]]
    for name in sorted(methods, key=lambda name: sign * sum(means[name]) / len(means[name])):
        of_method = [cells.get((name, column)) for column in columns]
        rows.append([name, *("" if line is None else shown(line) for line in of_method)])
    return rows


def shown(line: Line) -> str:
    """A mean, and the worst prompt of several."""
    mean = f"{float(line.mean):.3g}"
    return mean if int(line.prompts) == 1 else f"{mean}; {float(line.worst):.3g}"


def chart(found: list[Line]) -> str:
    """Mean r with patching by method and task, with 95 % intervals, one panel for each model, as SVG."""
    chosen = lines_of(found, "nodes", "pearson")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {TOP + 36 * len(LANGUAGE_TASKS) + 24}" font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, colour) in enumerate(COLOURS.items()):
        x = 120 + 150 * number
        parts.append(f'<circle cx="{x}" cy="14" r="4" fill="{colour}"/><text x="{x + 8}" y="18">{name}</text>')
    for row, task in enumerate(LANGUAGE_TASKS):
        parts.append(f'<text x="112" y="{TOP + 36 * row + 22}" text-anchor="end">{task}</text>')
    for panel, model in enumerate(MODELS):
        left, bottom = 120 + 325 * panel, TOP + 36 * len(LANGUAGE_TASKS)
        parts.append(
            f'<text x="{left + 150}" y="{TOP - 6}" text-anchor="middle" font-weight="bold">{NAMES[model]}</text>'
        )
        for tick in (0, 0.25, 0.5, 0.75, 1):
            x = left + 300 * tick
            parts.append(
                f'<path d="M{x:g} {TOP}V{bottom}" stroke="#ddd"/><text x="{x:g}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>'
            )
        for row, task in enumerate(LANGUAGE_TASKS):
            lines_here = [line for line in chosen if line[0:3:2] == (model, task) and line.method in COLOURS]
            if not lines_here:
                parts.append(f'<text x="{left + 8}" y="{TOP + 36 * row + 22}" fill="#777">not measured yet</text>')
                continue
            of_methods = pooled(lines_here).table()
            for number, (name, colour) in enumerate(COLOURS.items()):
                mean, low, high = (left + 300 * max(float(end), 0) for end in of_methods.loc[name])
                y = TOP + 36 * row + 7 + 7 * number
                parts.append(
                    f'<path d="M{low:.1f} {y}H{high:.1f}" stroke="{colour}" stroke-width="2"/>'
                    f'<circle cx="{mean:.1f}" cy="{y}" r="3.5" fill="{colour}"><title>{name}: {of_methods.loc[name].iloc[0]:.3f}</title></circle>'
                )
    return "\n".join([*parts, "</svg>", ""])


COLOURS = {"measured": "#0a7d4f", "difference": "#1f5fbf", "integrated-gradients": "#d98200", "gradient": "#8a8a8a"}
"""The methods of the chart."""
TOP = 46
"""Where its first row begins."""
SHORTLISTS = ("measured", "gradient", "integrated-gradients", "difference")
"""Methods that are compared by the largest nodes that they find."""
LATER = ("greater than", "copying", "arguments")
"""Tasks of which no number was known when the methods and their options were chosen."""


def page() -> str:
    """The page with this section written again."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(START)], text[text.index(END) :]
    return f"{before}{START}\n\n{drawn(lines())}\n\n{after}"


def files() -> dict[Path, str]:
    """The chart, and the tables of what is measured."""
    found = [line for line in lines() if line.method != NONE]
    texts = {CHART: chart(found)}
    for name, _, test, metric in TABLES:
        chosen = lines_of(found, test, metric)
        if chosen:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(table(chosen))
            texts[DOCS / "_static" / name] = text.getvalue()
    return texts


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] != ["tables"]:
        measure(set(sys.argv[1:]))
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
