"""``tensorlens-tl demo``: the main job on the bundled model, with its proofs and its cost."""

import argparse
import time
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorlens_tl.commands import shared

if TYPE_CHECKING:
    from torch import Tensor

    from tensorlens_tl.report import Prediction
    from tensorlens_tl.results import Attribution

HELP = "Freeze a sentence on the bundled model and show where its prediction comes from."
EXAMPLE = 'tensorlens-tl demo "Return the value of the" -o demo.html'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("text", nargs="?")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("demo.html"), help="where to write the page (default: demo.html here)"
    )


def run(args: argparse.Namespace) -> None:
    """Freeze a sentence on the bundled model, show what moved its prediction, prove it, and write a page."""
    import tensorlens_tl as tlens
    from tensorlens_tl.drawing.terminal import show_table
    from tensorlens_tl.report import predict

    shared.check_output(args.output, endings=(".html",))
    text = args.text
    if text is None:
        text = tlens.demo.PROMPT
    model = tlens.load_demo_model()
    frozen = tlens.freeze(model, text)
    prediction = predict(frozen)
    results = {
        prediction.label: tlens.attribute(frozen, **prediction.options),
        "in_out": tlens.attribute(frozen, collapse="in_out"),
        "norm": tlens.attribute(frozen, collapse="norm"),
    }
    costs = _costs(
        {
            "one forward pass": lambda: model(**frozen.inputs),
            "freezing, with the proof": lambda: tlens.freeze(model, text),
            "target": lambda: frozen.operator().target(**prediction.options),
            "in_out": lambda: frozen.operator().in_out(),
            "norm": lambda: frozen.operator().norm(),
        }
    )
    proofs = {
        "blocks, head and unembedding against the model's own (largest relative error)": max(frozen.errors.values())
    }
    proofs |= {
        f"{name}: Σ scores + bias − total": float(r.gap.max()) for name, r in results.items() if r.gap is not None
    }
    token, chance = prediction.best[0]
    print(f"{text!r}\nis continued by {token!r} (probability {chance:.2f}).\n{frozen!r}")
    _print_scores(results)
    show_table("", ("proof", "gap"), [(name, f"{value:.1e}") for name, value in proofs.items()], left=("proof",))
    forward = costs["one forward pass"]
    prices = [(name, f"{1000 * cost:.1f}", f"{cost / forward:.1f}") for name, cost in costs.items()]
    show_table("", ("cost", "ms", "forward passes"), prices, left=("cost",))
    args.output.write_text(_page(text, prediction, results, proofs, prices), encoding="utf-8")
    print(f"page written to {args.output}")


def _costs(candidates: Mapping[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """Seconds of each, interleaved, minima over the rounds."""
    import torch

    best = dict.fromkeys(candidates, float("inf"))
    with torch.no_grad():
        for _ in range(rounds):
            for name, work in candidates.items():
                start = time.perf_counter()
                work()
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def _print_scores(results: Mapping[str, "Attribution"]) -> None:
    """The largest tokens by the first result, with the others' scores of them, and what all others add up to."""
    from tensorlens_tl.drawing.terminal import show_table

    first = next(iter(results.values()))
    entries = first.top(10)
    positions = [entry.position for entry in entries]
    scores = {name: result.plane()[0].double() for name, result in results.items()}
    rows = [
        (str(entry.position), repr(entry.token), *(f"{float(row[entry.position]):+.4g}" for row in scores.values()))
        for entry in entries
    ]
    left = len(first.tokens[0]) - len(entries)
    if left > 0:
        rest = (float(row.sum() - row[positions].sum()) for row in scores.values())
        rows.append(("", f"{left} others", *(f"{value:+.4g}" for value in rest)))
    bias = (_number(result.bias) for result in results.values())
    total = (_number(result.total) for result in results.values())
    sums = [("", "bias (no token)", *bias), ("", "total (the model's own)", *total)]
    show_table("the tokens that moved the prediction", ("position", "token", *results), rows, sums, left=("token",))


def _number(value: "Tensor | None") -> str:
    """A number of a table, empty where there is none."""
    if value is None:
        return ""
    return f"{float(value):+.4g}"


def _page(
    text: str,
    prediction: "Prediction",
    results: Mapping[str, "Attribution"],
    proofs: Mapping[str, float],
    prices: list[tuple[str, str, str]],
) -> str:
    from tensorlens_tl.drawing.page import page, table

    maps = "".join(f"<h2>{escape(name)}</h2>{result.to_html(style=False)}" for name, result in results.items())
    proved = table(("claim", "gap"), ((name, f"{value:.1e}") for name, value in proofs.items()), "words")
    token, chance = prediction.best[0]
    return page(
        "tensorlens_tl demo",
        f"<h1>Where a prediction comes from</h1><p>{escape(repr(text))} is continued by <b>{escape(repr(token))}</b> "
        f'(probability {chance:.2f}).</p>{maps}<h2>Proof</h2><div class="tlens">{proved}</div>'
        f'<h2>Cost</h2><div class="tlens">{table(("what", "ms", "forward passes"), prices)}</div>',
    )
