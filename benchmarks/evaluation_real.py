"""Methods on trained language models: `make evaluation-real` writes the tables of docs/evaluation.md and their CSV file.

Lines of docs/_static/evaluation_real.csv are written as soon as they are measured, and what is there is not measured
again: delete lines, or the file, to do so. Names of models and tests choose some (``evaluation_real.py gemma3 nodes``);
``tables`` measures nothing. float32, TransformerBridge, one thread.
"""

import csv
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformer_lens.model_bridge import TransformerBridge

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.real_models import FOLDER, MODELS
from tensorlens_tl import evaluate
from tensorlens_tl.circuits.compare import corrupted_stream, edge_layout, pair_target
from tensorlens_tl.circuits.live_edges import LiveEdges
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate.language import TASKS, LanguageTask
from tensorlens_tl.evaluate.patching import EDGE_ROWS, ROWS, FrozenPairs

DOCS = Path(__file__).parent.parent / "docs"
PAGE, NUMBERS = DOCS / "evaluation.md", DOCS / "_static" / "evaluation_real.csv"
START, END = "<!-- trained models, written by benchmarks/evaluation_real.py -->", "<!-- end of trained models -->"
PROMPTS, CIRCUIT_PROMPTS, EDGE_PROMPTS = 8, 4, 2
"""Pairs of each task, and of how many circuits are run and edges are patched."""
EDGES = 25
"""So many edges are patched that the difference, the gradient and EAP-IG each take for the largest; as many others."""
CIRCUITS = ("gradient", "integrated", "integrated, left", "difference", "measured", "random")
NAMES = {"smollm2": "SmolLM2", "gemma3": "Gemma 3"}
MEAN, WORST = "{0:.3g}", "{0:.3g}; {1:.3g}"
TABLES = (
    (
        "Heads and MLPs, Pearson's r with patching each of them in the live model: mean of the prompts; worst prompt",
        "nodes",
        "pearson",
        WORST,
    ),
    ("Edges, r with patching: mean; worst prompt", "edges", "pearson", WORST),
    ("Area under the curve of circuits (CPR)", "circuits", "cpr", MEAN),
    ("Area between that curve and 1 (CMD, lower is better)", "circuits", "cmd", MEAN),
    ("The known source of an answer, reciprocal rank: mean; worst prompt", "sources", "mrr", WORST),
    (
        "Processor time of one thread for the heads and MLPs of one pair, in forwards of the model, while others used the machine",
        "cost",
        "forwards",
        MEAN,
    ),
)


class Line(NamedTuple):
    """One number: a metric's mean over prompts and its worst prompt; of a task that was not solved, the reason."""

    model: str
    test: str
    task: str
    method: str
    metric: str
    mean: str
    worst: str
    prompts: str


def numbers_of(result: evaluate.Evaluation) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Method, metric and the values of prompts."""
    for metric, values in zip(result.metrics, result.values, strict=True):
        for method, row in zip(result.methods, values, strict=True):
            yield method, metric, row


def nodes(model: Any, task: LanguageTask) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Scores of heads and MLPs beside patching."""
    methods = [name for name in ROWS if name not in ("frozen+qk", "patching")]
    yield from numbers_of(evaluate.patching_agreement(model, task.pairs, methods))


def edges(model: Any, task: LanguageTask) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Scores of some edges beside patching: what three methods take for the largest, and as many at random."""
    part = FrozenPairs(model, task.pairs.only(torch.arange(EDGE_PROMPTS)), verify=False)
    methods = [name for name in EDGE_ROWS if name not in ("frozen+qk", "patching")]
    scores = {name: part.edges(name) for name in methods}
    exists = scores["frozen"].exists
    by_method = {name: of.scores[:, exists].double() for name, of in scores.items()}
    found = [by_method[name].abs() for name in ("difference", "gradient", "integrated")]
    noise = torch.rand(found[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    chosen = torch.cat([size.topk(EDGES).indices for size in (*found, noise, noise.neg(), (noise - 0.5).abs())], 1)
    readout = pair_target(part.clean, part.corrupted, part.target, part.minus, None, -1)
    layout = edge_layout(readout.stream, readout.positions)
    live = LiveEdges(readout, corrupted_stream(readout, part.corrupted), layout.exists)
    runs = torch.zeros(chosen.shape[1], *found[0].shape, dtype=torch.bool).scatter_(2, chosen.T[..., None], True)
    masks = runs.new_zeros(*runs.shape[:2], *exists.shape).masked_scatter(exists, runs)
    truth = live.losses(masks, None).T.double()
    for name, values in by_method.items():
        pairs = zip(values.gather(1, chosen), truth, strict=True)
        yield name, "pearson", torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs])


def circuits(model: Any, task: LanguageTask) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The areas of the benchmark, CPR and CMD."""
    pairs = task.pairs.only(torch.arange(CIRCUIT_PROMPTS))
    yield from numbers_of(evaluate.circuit_faithfulness(model, pairs, CIRCUITS, only_correct=False))


def sources(model: Any, task: LanguageTask) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The rank of the token that determines the answer, by every method of attribution."""
    yield from numbers_of(evaluate.known_answer(model, task.known, progress=False))


TESTS = {"nodes": nodes, "sources": sources, "edges": edges, "circuits": circuits}
TASKS_OF = {"sources": ["retrieval"], "cost": ["15 tokens", "64 tokens", "256 tokens"]}
COSTS = ("gradient", "integrated", "atp*", "difference", "measured", "patching")


def costs(model: Any, tokens: int) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Processor time of one thread, in forwards of the model, for the nodes of one pair."""
    ids = torch.randint(1000, 20_000, (1, tokens), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, tokens // 2] += 1
    pairs = evaluate.PromptPairs("random", ids, other, torch.tensor([5]), torch.tensor([7]))
    part = FrozenPairs(model, pairs, verify=False)
    with torch.no_grad():
        forward = min(seconds(lambda: model(ids)) for _ in range(3))
    for name in COSTS:
        yield name, "forwards", torch.tensor([seconds(lambda name=name: part.nodes(name)) / forward])


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
            for of in TASKS_OF.get(test, TASKS):
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
            results = TESTS[test](model, evaluate.language_task(model, of, PROMPTS))
        except InvalidInputError as error:
            return [Line(name, test, of, "not solved", str(error), "", "", "0")]
    found = []
    for method, metric, values in results:
        worst = values.min() if metric != "cmd" else values.max()
        found.append(Line(name, test, of, method, metric, f"{values.mean():.4g}", f"{worst:.4g}", str(len(values))))
    return found


def add(found: list[Line]) -> None:
    """Write lines behind those that are there."""
    new = not NUMBERS.exists()
    with NUMBERS.open("a", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([Line._fields, *found] if new else found)


# ------------------------------------------------------------------ the page


def verdicts(found: list[Line]) -> list[str]:
    """What the page concludes, with its numbers; tests/test_evaluation_pages.py holds the claims to them."""
    means, worst = (
        {
            name: [float(getattr(line, which)) for line in found if line[1:2] + line[3:5] == ("nodes", name, "pearson")]
            for name in ROWS
        }
        for which in ("mean", "worst")
    )
    ranks = {
        line.method: f"{float(line.mean):.2f}" for line in found if line[:2] + line[4:5] == ("gemma3", "sources", "mrr")
    }
    off = max(abs(a - b) for a, b in zip(means["atp*"], means["gradient"], strict=True))
    low = {name: f"{min(values):.2f}" for name, values in worst.items() if values}
    return [
        f"* **`measured` agrees with patching best in every task, on average and on the worst prompt**: its mean r is at "
        f"least {min(means['measured']):.3f}, its worst prompt has {min(worst['measured']):.3f}.",
        f"* What costs a pass or a few gradients is a step behind: the worst prompt of `difference` has {low['difference']}, "
        f"of `integrated` {low['integrated']}. Gradients at the clean prompt fail on some prompts: `gradient` {low['gradient']}, "
        f"`atp*` {low['atp*']}.",
        f"* AtP\\* is nearly attribution patching here (mean r within {off:.2f}): its correction of the softmax is for "
        'queries and keys, which are nodes only with `by="qkv"`.',
        f"* **From which token the answer was read** (Gemma 3, retrieval): only leaving one out puts it first on every "
        f"prompt. `tensorlens norm` has a mean reciprocal rank of {ranks['tensorlens norm']}, `tensorlens target` "
        f"{ranks['tensorlens target']}, random scores {ranks['random']}.",
    ]


def drawn(found: list[Line]) -> str:
    """The verdicts, and the tables: of each test and metric what every method has in every task."""
    parts = ["\n".join(verdicts(found))]
    for title, test, metric, shown in TABLES:
        chosen = [line for line in found if line.test == test and line.metric == metric]
        if chosen:
            parts.append(f"{title}\n\n{table(chosen, shown)}")
    failed = [f"* {line.model}, {line.test}: {line.metric}" for line in found if line.method == "not solved"]
    return "\n\n".join([*parts, *(["\n".join(failed)] if failed else [])])


def table(chosen: list[Line], shown: str) -> str:
    """A row for each method, the best mean first; a column for each model and task."""
    columns = list(dict.fromkeys((line.model, line.task) for line in chosen))
    cells = {
        (line.method, (line.model, line.task)): shown.format(float(line.mean), float(line.worst)) for line in chosen
    }
    means = {
        method: sum(float(line.mean) for line in chosen if line.method == method) for method, _ in dict.fromkeys(cells)
    }
    rows = [["method", *(f"{NAMES[model]}, {task}" for model, task in columns)], ["---"] * (1 + len(columns))]
    for method in sorted(means, key=lambda method: -means[method]):
        rows.append([f"`{method}`", *(cells.get((method, column), "–") for column in columns)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def page() -> str:
    """The page with these tables written again."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(START)], text[text.index(END) :]
    return f"{before}{START}\n\n{drawn(lines())}\n\n{after}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:] != ["tables"]:
        measure(set(sys.argv[1:]))
    PAGE.write_text(page(), encoding="utf-8")
