"""Writes `docs/_static/methods.csv` (`make choose`): what is known of every built-in method, most of it measured.

Signs, sums, equal scores and costs come from runs on the bundled language model; targets and refusals come from the
registrations. The questions that methods answer, and whether changes of attention are credited, are written by hand.
"""

import csv
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import tensorlens_tl as tlens
from scripts.method_pages import page_of
from tensorlens_tl import demo

TABLE = Path(__file__).parent.parent / "docs" / "_static" / "methods.csv"
"""The table of docs/choose.md."""
SHORT, LONG = 32, 64
"""Tokens of the two prompts whose costs are compared."""
TARGET = " raised"

QUESTIONS = {
    "tensorlens": ("what each token adds to the prediction, through the whole frozen model", "frozen", "no"),
    "difference": ("what each token adds to the change between two runs", "two runs", "yes, exactly"),
    "leave-one-out": ("what the prediction loses without a token", "live", "yes"),
    "cp-lrp": ("like `tensorlens` with a target", "frozen", "no"),
    "relp": (
        "like `tensorlens`, with half of a gated MLP's output credited to the gate",
        "frozen",
        'no; `attention="live"`: to first order',
    ),
    "attnlrp": ("relevance of each token, including via queries and keys", "live backward", "to first order, halved"),
    "gim": ("relevance if several tokens can substitute for each other", "live backward", "to first order, softened"),
    "decompx": ("each token's vector after all layers, with biases divided among the tokens", "frozen", "no"),
    "alti-logit": ("attention's direct contribution to a logit, by source token", "frozen", "no"),
    "input-x-gradient": (
        "how the logit responds to scaling a token's vector",
        "live backward",
        "to first order",
    ),
    "integrated-gradients": ("the same, averaged along a path from zero", "live backward", "along the path"),
    "chefer": ("attention weighted by its positive gradients, over all layers", "live backward", "to first order"),
    "attention": ("where heads look", "frozen", "no"),
    "mean": ("the average of one map per layer", "frozen", "no"),
    "rollout": ("the flow through one map per layer", "frozen", "no"),
    "norm": ("norm of the value vectors, weighted by attention", "frozen", "no"),
    "globenc": ("the same, including both norms of a block, over all layers", "frozen", "no"),
    "alti": ("how close each token's contribution is to the layer's output", "frozen", "no"),
    "ifr": ("which routes through heads and stream carry the most", "frozen", "no"),
    "ff-ig": ("norm of the vectors that attention moves, after the MLP", "frozen", "no"),
    "value-zeroing": ("how much a layer's output changes direction without a token's value", "live layers", "no"),
}
"""Of each method: the question, which run answers it, and whether changes of attention are credited."""


class Products(TorchDispatchMode):
    """Counts the operations of matrix products, forwards and backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.operations += count(*args, **(kwargs or {}), out_val=result)
        return result


def built_in() -> list[str]:
    """The built-in methods, in the order of `QUESTIONS`."""
    ours = "tensorlens_tl.methods."
    names = [name for name in tlens.list_methods() if tlens.get_method(name).function.__module__.startswith(ours)]
    lacking = sorted(set(names) - set(QUESTIONS))
    if lacking:
        raise SystemExit(f"QUESTIONS in scripts/choose.py has no line for {', '.join(lacking)}: add what it answers.")
    return sorted(names, key=list(QUESTIONS).index)


def options(name: str) -> dict[str, Any]:
    """A target where the method takes one, and the last token as the query."""
    method = tlens.get_method(name)
    chosen = {"target": TARGET, "query": -1}
    return {option: value for option, value in chosen.items() if method.takes(option)}


def results(model: Any) -> dict[str, tlens.Attribution]:
    """Every method on one prompt."""
    frozen = tlens.freeze(model, demo.held_out_prompts(model, 1, SHORT))
    return {name: tlens.attribute(frozen, method=name, **options(name)) for name in built_in()}


def operations(model: Any, tokens: int) -> dict[str, float]:
    """The cost of every method after freezing, in forward passes of the prompt."""
    prompt = demo.held_out_prompts(model, 1, tokens)
    with torch.no_grad(), Products() as forward:
        model(prompt)
    costs = {}
    for name in built_in():
        frozen = tlens.freeze(model, prompt)
        frozen.operator().target(TARGET)  # the check of the logits is paid once for each pass
        with Products() as counted:
            tlens.attribute(frozen, method=name, **options(name))
        costs[name] = counted.operations / forward.operations
    return costs


def cost_text(short: float, long: float) -> str:
    """The longer prompt's cost, and that it grows with the prompt where it does."""
    grows = ", grows with the prompt" if long > 1.3 * short and long > 1 else ""
    number = f"{long:.1f}" if long < 10 else f"{long:.0f}"
    return f"{number}{grows}"


def sum_text(result: tlens.Attribution) -> str:
    """What scores and bias sum to."""
    if not result.additive and result.gap is not None:
        return f"no: gap {float(result.gap.max()):.2f}"
    if not result.additive:
        return "–"
    change = str(result.target).startswith("change")
    return "the change of the logit" if change else "the logit"


def equals(name: str, scores: dict[str, tlens.Attribution]) -> list[str]:
    """The other methods with the same scores on the bundled model, whose MLPs have no gates."""
    mine = scores[name].scores
    others = [other for other in scores if other != name and scores[other].scores.shape == mine.shape]
    return [other for other in others if torch.allclose(scores[other].scores, mine, atol=1e-4)]


def table() -> list[list[str]]:
    """All built-in methods, a row each."""
    model = tlens.load_demo_model()
    scores = results(model)
    short, long = operations(model, SHORT), operations(model, LONG)
    head = (
        "method", "question", "signed", "target", "sums to", "credits attention changes", "run",
        "cost in forwards", "needs of the model", "same as",
    )  # fmt: skip
    lines: list[list[str]] = [list(head)]
    for name in built_in():
        question, run, change = QUESTIONS[name]
        method = tlens.get_method(name)
        signed = bool((scores[name].scores < 0).any())
        needs = [f"`{need.name}`" for need in method.requirements(options(name))]
        cells = [
            f"[`{name}`](methods/{page_of(name)}.md#{name})", question, yes(signed), yes(method.takes("target")),
            sum_text(scores[name]), change, run, cost_text(short[name], long[name]), ", ".join(needs) or "–",
            ", ".join(f"`{other}`" for other in equals(name, scores)) or "–",
        ]  # fmt: skip
        lines.append(cells)
    return lines


def yes(answer: bool) -> str:
    """A tick, or a dash."""
    return "✓" if answer else "–"


def read() -> list[list[str]]:
    """The table as it was measured last."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def main() -> None:
    lines = table()
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


if __name__ == "__main__":
    main()
