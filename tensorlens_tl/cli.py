"""The command line: ``tensorlens-tl demo | report | attribute | methods | verify | evaluate``."""

import argparse
import time
from collections.abc import Callable, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tensorlens_tl import demo, evaluate
from tensorlens_tl.attribution import Attribution
from tensorlens_tl.errors import InvalidInputError, TensorLensError
from tensorlens_tl.freezing import freeze
from tensorlens_tl.frozen import FrozenPass
from tensorlens_tl.registry import attribute, get_method, list_methods
from tensorlens_tl.report import explain, terminal
from tensorlens_tl.report.page import page, table
from tensorlens_tl.targets import token_label
from tensorlens_tl.testing import check_model

console = Console()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (1 for our own errors, which are printed without a traceback)."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except TensorLensError as error:
        Console(stderr=True).print(Text(f"{type(error).__name__}: {error}", style="red"))
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tensorlens-tl", description="Exact attribution on frozen transformers.")
    parser.add_argument("--version", action="version", version=version("tensorlens-tl"))
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], None], help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    sub = command("demo", run_demo, "Freeze a sentence on the embedded model and show where its prediction comes from.")
    sub.add_argument("text", nargs="?", default=demo.PROMPT)
    sub.add_argument(
        "-o", "--output", type=Path, default=Path("demo.html"), help="where to write the page (default: demo.html here)"
    )

    sub = command("attribute", run_attribute, "Attribute the last token's output or prediction to the prompt.")
    _model_arguments(sub)
    sub.add_argument("text")
    sub.add_argument("--method", default="tensorlens", help="one of `tensorlens-tl methods`")
    sub.add_argument("--collapse", help="of the tensorlens method: in_out, norm or target")
    sub.add_argument("--target", help="a token, such as ' Paris'")
    sub.add_argument("--minus", help="another token, for a logit difference")
    sub.add_argument("--query", type=int, help="position, counted over the prompt's tokens (default: the last)")
    sub.add_argument("--top", type=int, default=10, help="how many tokens to print")
    sub.add_argument(
        "-o", "--output", type=Path, help="also save: .html for a page, anything else for Attribution.load"
    )

    sub = command("report", run_report, "Everything about one prediction, as one page that opens without a network.")
    _model_arguments(sub)
    sub.add_argument("text")
    sub.add_argument("--target", help="the token to explain (default: the model's first choice)")
    sub.add_argument("--minus", help="another token to hold it against (default: the second choice)")
    sub.add_argument(
        "--query", type=int, help="position, counted over the prompt's tokens (default: the last, or the mask)"
    )
    sub.add_argument("--methods", nargs="+", metavar="METHOD", help="names (default: all of `tensorlens-tl methods`)")
    sub.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="(default: report.html here)")

    command("methods", run_methods, "List the registered methods.")

    sub = command("verify", run_verify, "Is this model supported? Proves every block, and what follows.")
    _model_arguments(sub)
    sub.add_argument("text", nargs="?", default="The quick brown fox jumps over the lazy dog.")

    sub = command("evaluate", run_evaluate, "Which method is faithful? A table over methods, and a saved result.")
    sub.add_argument("what", choices=tuple(EVALUATIONS))
    _model_arguments(sub)
    sub.add_argument("--methods", nargs="+", metavar="METHOD", help="labels such as 'tensorlens in+out' (default: all)")
    sub.add_argument("--prompts", type=Path, help="a text file, one prompt a line (default: the held-out text)")
    sub.add_argument("-n", type=int, default=32, help="how many prompts where we make them (default: 32)")
    sub.add_argument("--query", default="last", help="perturbation: last, cls, mean or a position")
    sub.add_argument("--order", default="descending", choices=("descending", "ascending"), help="perturbation")
    sub.add_argument("--replacement", help="perturbation: mask, pad, mean, zero or a token")
    sub.add_argument("--task", choices=("recall", "brackets", "induction"), help="known-answer: (default: the model's)")
    sub.add_argument("--relations", nargs="+", type=Path, help="relations: JSON files (default: the shipped ones)")
    sub.add_argument("--splits", type=int, default=6, help="relations: draws of examples")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("-o", "--output", type=Path, help="save: .html, .csv, or for Evaluation.load")
    return parser


def _model_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--model",
        default="demo",
        help="'demo', 'demo:NAME' (recall, brackets, relations, encoder), a Hugging Face name, or a local folder",
    )
    sub.add_argument("--kind", choices=("hooked", "bridge"), help="model class (default: hooked where it exists)")
    sub.add_argument("--dtype", choices=("float32", "float64", "bfloat16"), default="float32")


def load_model(name: str, kind: str | None = None, dtype: Any = torch.float32) -> Any:
    """A model by name: ``"demo"``, ``"demo:recall"``, a hub name, or a folder (always a TransformerBridge).

    Raises:
        InvalidInputError: the model cannot be loaded; carries the loader's own message.
    """
    if name.partition(":")[0] == "demo":
        return demo.load_demo_model(kind, dtype, name=name.partition(":")[2] or "language")
    try:
        if kind != "bridge" and not Path(name).exists():
            try:
                from transformer_lens import HookedTransformer

                return HookedTransformer.from_pretrained(name, dtype=dtype)
            except ImportError:
                if kind == "hooked":
                    raise
        from transformer_lens.model_bridge import TransformerBridge

        return TransformerBridge.boot_transformers(name, dtype=dtype)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        why = str(error).strip().split("\n", 1)[0][:200]
        raise InvalidInputError(
            f"--model {name}: no such folder, and it cannot be loaded from the hub ({type(error).__name__}: {why})."
        ) from error


def _frozen(args: argparse.Namespace) -> FrozenPass:
    return freeze(load_model(args.model, args.kind, getattr(torch, args.dtype)), args.text)


# ---------------------------------------------------------------------------------------- commands


def run_methods(args: argparse.Namespace) -> None:
    """Print the registered methods and their options."""
    table = Table("method", "what", "options")
    for name in list_methods():
        method = get_method(name)
        table.add_row(name, Text(method.summary), ", ".join(method.options))
    console.print(table)


def run_verify(args: argparse.Namespace) -> None:
    """Print what each part and each claim measures; exits with an error that names what does not hold."""
    report = check_model(load_model(args.model, args.kind, getattr(torch, args.dtype)), args.text)
    zero = "0 means bit for bit: the same operations in the same order"
    title = Text(f"{report.description}: supported")
    table = Table("part or claim", "layout", "relative error", title=title, caption=zero)
    for part, error in report.errors.items():
        layer = part.removeprefix("blocks.")
        table.add_row(part, report.layouts[int(layer)] if layer.isdigit() else "", f"{error:.1e}")
    for part, why in report.refused.items():
        table.add_row(part, "", Text(f"refused: {why}"))
    console.print(table)


def run_attribute(args: argparse.Namespace) -> None:
    """Attribute and print the top tokens; saves where asked."""
    _check_output(args.output)
    method = get_method(args.method)
    options = {name: getattr(args, name) for name in ("collapse", "target", "minus", "query")}
    options = {name: value for name, value in options.items() if value is not None}
    if {"target", "minus"} & set(options) and "collapse" in method.options:
        options.setdefault("collapse", "target")
    result = attribute(_frozen(args), method=args.method, **options)
    terminal.show(result, args.top, console)
    if args.output is None:
        return
    if args.output.suffix == ".html":
        args.output.write_text(page(args.text, result.to_html(style=False)), encoding="utf-8")
    else:
        result.save(args.output)
    console.print(f"saved to {args.output}")


def run_report(args: argparse.Namespace) -> None:
    """Write the report of one prediction."""
    _check_output(args.output)
    for name in args.methods or ():
        get_method(name)  # a typing error should not cost a forward pass
    picture = explain(_frozen(args), target=args.target, minus=args.minus, query=args.query, methods=args.methods)
    picture.save(args.output)
    console.print(f"report written to {args.output}")


def _check_output(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise InvalidInputError(f"--output {path}: there is no folder {path.parent}.")


# ---------------------------------------------------------------------------------------- evaluation

EVALUATIONS: dict[str, str] = {
    "perturbation": "perturbation",
    "known-answer": "known_answer",
    "relations": "relation_decoding",
    "completeness": "completeness",
    "randomisation": "randomisation",
    "stability": "stability",
    "agreement": "agreement",
}
"""Commands, and the functions of `tensorlens_tl.evaluate` that they run."""


def run_evaluate(args: argparse.Namespace) -> None:
    """Run one evaluation, print its table, and save it where asked."""
    _check_output(args.output)
    model = load_model(args.model, args.kind, getattr(torch, args.dtype))
    run = getattr(evaluate, EVALUATIONS[args.what])
    if args.what == "known-answer":
        result = run(model, _task(args, model), args.methods, seed=args.seed)
    elif args.what == "relations":
        relations = None if args.relations is None else [evaluate.Relation.load(path) for path in args.relations]
        result = run(model, relations, splits=args.splits, seed=args.seed)
    else:
        options: dict[str, Any] = {"seed": args.seed}
        if args.what == "perturbation":
            query = int(args.query) if args.query.lstrip("-").isdigit() else args.query
            options |= {"query": query, "order": args.order, "replacement": args.replacement}
        result = run(model, _prompts(args, model), args.methods, **options)
    if isinstance(result, evaluate.Evaluation):
        result.show()
        table = result.to_dataframe()
    else:
        console.print(result.round(2).to_string())
        table = result
    if args.output is None:
        return
    if args.output.suffix == ".csv" or not isinstance(result, evaluate.Evaluation):
        table.to_csv(args.output)
    elif args.output.suffix == ".html":
        args.output.write_text(page(result.kind, result.to_html(style=False)), encoding="utf-8")
    else:
        result.save(args.output)
    console.print(f"saved to {args.output}")


def _prompts(args: argparse.Namespace, model: Any) -> Any:
    if args.prompts is None:
        if args.model not in ("demo", "demo:language", "demo:encoder"):
            raise InvalidInputError(
                f"--prompts: {args.model} has no text of its own here; pass a file, a prompt a line."
            )
        return demo.held_out_prompts(model, args.n)
    if not args.prompts.is_file():
        raise InvalidInputError(f"--prompts {args.prompts}: no such file.")
    lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise InvalidInputError(f"--prompts {args.prompts}: the file is empty.")
    return lines


def _task(args: argparse.Namespace, model: Any) -> evaluate.KnownAnswers:
    name = args.task or args.model.partition(":")[2] or "induction"
    if name in ("recall", "brackets"):
        return getattr(evaluate, name)(args.n, seed=args.seed)
    return evaluate.induction(args.n, d_vocab=model.cfg.d_vocab, seed=args.seed)


# ---------------------------------------------------------------------------------------- the main job


def run_demo(args: argparse.Namespace) -> None:
    """Freeze a sentence on the embedded model, show what moved its prediction, prove it, and write a page."""
    _check_output(args.output)
    model = demo.load_demo_model()
    frozen = freeze(model, args.text)
    logits = frozen.last_logits
    if logits is None:
        raise TensorLensError("the embedded model gave no logits.")
    best, second = (int(i) for i in logits[0].topk(2).indices)
    target, minus = token_label(frozen.view, best), token_label(frozen.view, second)
    probability = float(logits[0].softmax(-1)[best])
    results = {
        f"logit of {target!r} − {minus!r}": attribute(frozen, collapse="target", target=best, minus=second),
        "in+out": attribute(frozen, collapse="in_out"),
        "norm": attribute(frozen, collapse="norm"),
    }
    costs = _costs(
        {
            "one forward pass": lambda: model(**frozen.inputs),
            "freezing, with the proof": lambda: freeze(model, args.text),
            "target": lambda: frozen.operator().target(best, minus=second),
            "in+out": lambda: frozen.operator().in_out(),
            "norm": lambda: frozen.operator().norm(),
        }
    )

    _print_demo(frozen, results, args.text, target, probability)
    proof = {
        "blocks, head and unembedding against the model's own (largest relative error)": max(frozen.errors.values()),
        **{
            f"{name}: Σ scores + bias − total": float(r.residual.max())
            for name, r in results.items()
            if r.residual is not None
        },
    }
    table = Table("proof", "residual")
    for name, residual in proof.items():
        table.add_row(Text(name), f"{residual:.1e}")
    console.print(table)
    table = Table("cost", "ms", "forward passes")
    for name, seconds in costs.items():
        table.add_row(name, f"{1000 * seconds:.1f}", f"{seconds / costs['one forward pass']:.1f}")
    console.print(table)
    args.output.write_text(_demo_page(args.text, target, probability, results, proof, costs), encoding="utf-8")
    console.print(f"page written to {args.output}")


@torch.no_grad()
def _costs(candidates: dict[str, Callable[[], Any]], rounds: int = 5) -> dict[str, float]:
    """Seconds of each, interleaved, minima over the rounds."""
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def _print_demo(
    frozen: FrozenPass, results: dict[str, Attribution], text: str, target: str, probability: float
) -> None:
    console.print(Text(f"{text!r}\nis continued by {target!r} (probability {probability:.2f})."))
    console.print(Text(repr(frozen), style="dim"))
    table = Table("position", "token", *results, title="the tokens that moved the prediction")
    for entry in next(iter(results.values())).top(10):
        scores = (float(result.scores[0, 0, entry.position]) for result in results.values())
        table.add_row(str(entry.position), Text(repr(entry.token)), *(f"{score:+.4g}" for score in scores))
    bias = ("" if result.bias is None else f"{float(result.bias):+.4g}" for result in results.values())
    total = ("" if result.total is None else f"{float(result.total):+.4g}" for result in results.values())
    table.add_section()
    table.add_row("", "bias (no token)", *bias)
    table.add_row("", "total (the model's own)", *total)
    console.print(table)


def _demo_page(
    text: str,
    target: str,
    probability: float,
    results: dict[str, Attribution],
    proof: dict[str, float],
    costs: dict[str, float],
) -> str:
    forward = costs["one forward pass"]
    prices = ((name, f"{1000 * s:.1f}", f"{s / forward:.1f}") for name, s in costs.items())
    maps = "".join(f"<h2>{escape(name)}</h2>{result.to_html(style=False)}" for name, result in results.items())
    proofs = table(("claim", "residual"), ((name, f"{residual:.1e}") for name, residual in proof.items()), "words")
    cost = table(("what", "ms", "forward passes"), prices)
    return page(
        "tensorlens_tl demo",
        f"<h1>Where a prediction comes from</h1><p>{escape(repr(text))} is continued by <b>{escape(repr(target))}</b> "
        f'(probability {probability:.2f}).</p>{maps}<h2>Proof</h2><div class="tlens">{proofs}</div>'
        f'<h2>Cost</h2><div class="tlens">{cost}</div>',
    )
