"""``tensorlens-tl evaluate``: which method is faithful?"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorlens_tl.commands.options import (
    add_import_argument,
    add_model_arguments,
    check_output,
    count,
    loaded_model,
    position,
    run_imports,
    write_result,
)
from tensorlens_tl.errors import InvalidInputError

HELP = "Which method is faithful? A table over methods, and a saved result."

EVALUATIONS = {
    "perturbation": "Replace tokens in the order of their scores, and see what that does to the model.",
    "known-answer": "How high do scores rank the tokens that truly determine the answer?",
    "relations": "Does a linear map made from a few examples give the objects of other subjects?",
    "completeness": "Do scores sum to what they explain?",
    "randomisation": "Do scores change when the weights are scrambled?",
    "stability": "Do scores stay when the embeddings get a little noise?",
    "agreement": "How alike do methods rank the tokens?",
}


PROMPTS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command: an evaluation each has its own."""
    kinds = parser.add_subparsers(required=True, metavar="evaluation", dest="what")
    for name, help in EVALUATIONS.items():
        sub = kinds.add_parser(name, help=help, description=help)
        add_model_arguments(sub)
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("-o", "--output", type=Path, help="save: .html, .csv, or for Evaluation.load")
        if name == "relations":
            sub.add_argument("--relations", nargs="+", type=Path, help="JSON files (default: the shipped ones)")
            sub.add_argument("--splits", type=count, default=6, help="draws of examples")
            continue
        add_import_argument(sub)
        sub.add_argument(
            "--methods", nargs="+", metavar="METHOD", help="labels such as 'tensorlens in+out' (default: all)"
        )
        sub.add_argument("-n", type=count, help=f"how many prompts where we make them (default: {PROMPTS})")
        if name == "known-answer":
            sub.add_argument("--task", choices=("recall", "brackets", "induction"), help="(default: the model's)")
            continue
        sub.add_argument("--prompts", type=Path, help="a text file, one prompt a line (default: the held-out text)")
        if name == "perturbation":
            sub.add_argument("--query", type=position, default="last", help="last, cls, mean or a position")
            sub.add_argument("--order", default="descending", choices=("descending", "ascending"))
            sub.add_argument("--replacement", help="mask, pad, mean, zero or a token")


def run(args: argparse.Namespace) -> None:
    """Run one evaluation, print its table, and save it where asked."""
    from tensorlens_tl import evaluate

    check_output(args.output)
    run_imports(args) if args.what != "relations" else None
    model = loaded_model(args)
    result = _RUN.get(args.what, _check)(args, model)
    if args.what == "agreement":
        print(evaluate.agreement_table(result).round(2).to_string())
    else:
        result.show()
    write_result(result, result.kind, args.output)


def _known_answer(args: argparse.Namespace, model: Any) -> Any:
    from tensorlens_tl import evaluate

    name = args.task or args.model.partition(":")[2] or "induction"
    if name in ("recall", "brackets"):
        task = getattr(evaluate, name)(args.n or PROMPTS, seed=args.seed)
    else:
        task = evaluate.induction(args.n or PROMPTS, d_vocab=model.cfg.d_vocab, seed=args.seed)
    return evaluate.known_answer(model, task, args.methods, seed=args.seed)


def _relations(args: argparse.Namespace, model: Any) -> Any:
    from tensorlens_tl import evaluate

    relations = None if args.relations is None else [evaluate.Relation.load(path) for path in args.relations]
    return evaluate.relation_decoding(model, relations, splits=args.splits, seed=args.seed)


def _perturbation(args: argparse.Namespace, model: Any) -> Any:
    from tensorlens_tl import evaluate

    options = {"query": args.query, "order": args.order, "replacement": args.replacement, "seed": args.seed}
    return evaluate.perturbation(model, _prompts(args, model), args.methods, **options)


def _check(args: argparse.Namespace, model: Any) -> Any:
    from tensorlens_tl import evaluate

    return getattr(evaluate, args.what)(model, _prompts(args, model), args.methods, seed=args.seed)


_RUN: dict[str, Callable[[argparse.Namespace, Any], Any]] = {
    "known-answer": _known_answer,
    "relations": _relations,
    "perturbation": _perturbation,
}


def _prompts(args: argparse.Namespace, model: Any) -> Any:
    from tensorlens_tl import demo

    if args.prompts is None:
        if args.model not in ("demo", "demo:language", "demo:encoder"):
            raise InvalidInputError(
                f"--prompts: {args.model} has no text of its own here; pass a file, a prompt a line."
            )
        return demo.held_out_prompts(model, args.n or PROMPTS)
    if args.n is not None:
        raise InvalidInputError("-n: it counts prompts that we make; with --prompts every line of the file is one.")
    if not args.prompts.is_file():
        raise InvalidInputError(f"--prompts {args.prompts}: no such file.")
    lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise InvalidInputError(f"--prompts {args.prompts}: the file is empty.")
    return lines
