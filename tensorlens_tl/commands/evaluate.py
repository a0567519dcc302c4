"""``tensorlens-tl evaluate``: which method is faithful?"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorlens_tl.commands.options import (
    PROMPTS,
    TASKS,
    add_import_argument,
    add_model_arguments,
    check_output,
    count,
    loaded_model,
    position,
    prompts_of,
    run_imports,
    task_of,
    write_result,
)

HELP = "Which method is faithful? A table over methods, and a saved result."

EVALUATIONS = {
    "perturbation": "Replace tokens in the order of their scores, and see what that does to the model.",
    "known-answer": "How high do scores rank the tokens that truly determine the answer?",
    "patching": "Do scores of nodes, from a clean and a corrupted prompt, agree with patching the live model?",
    "circuits": "CPR and CMD: which scores choose the circuits that do the task?",
    "relations": "Does a linear map made from a few examples give the objects of other subjects?",
    "completeness": "Do scores sum to what they explain?",
    "randomisation": "Do scores change when the weights are scrambled?",
    "stability": "Do scores stay when the embeddings get a little noise?",
    "agreement": "How alike do methods rank the tokens?",
}


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
        if name in ("patching", "circuits"):
            _add_pair_arguments(sub, name)
            continue
        add_import_argument(sub)
        sub.add_argument(
            "--methods", nargs="+", metavar="METHOD", help="labels such as 'tensorlens in+out' (default: all)"
        )
        sub.add_argument("-n", type=count, help=f"how many prompts where we make them (default: {PROMPTS})")
        if name == "known-answer":
            sub.add_argument("--task", choices=TASKS, help="(default: the model's)")
            continue
        sub.add_argument("--prompts", type=Path, help="a text file, one prompt a line (default: the held-out text)")
        if name == "perturbation":
            sub.add_argument("--query", type=position, default="last", help="last, cls, mean or a position")
            sub.add_argument("--order", default="descending", choices=("descending", "ascending"))
            sub.add_argument("--replacement", help="mask, pad, mean, zero or a token")


def _add_pair_arguments(sub: argparse.ArgumentParser, name: str) -> None:
    sub.add_argument("--task", choices=("recall", "induction"), help="(default: the model's)")
    sub.add_argument("--change", choices=("source", "question"), default="source", help="what the corrupted prompt has")
    sub.add_argument("-n", type=count, help=f"how many pairs of prompts (default: {PROMPTS})")
    sub.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="such as 'frozen+qk' or 'integrated' (default: all)"
    )
    sub.add_argument("--steps", type=count, default=5, help="gradients that are averaged (default: 5)")
    if name == "patching":
        sub.add_argument("--by", default="head", choices=("component", "head", "neuron", "stream", "edge"))
        return
    sub.add_argument("--choice", default="top", choices=("top", "greedy"), help="which edges circuits take in")
    sub.add_argument("--circuits", type=Path, metavar="FOLDER", help="save each method's circuit there, as MIB's JSON")


def run(args: argparse.Namespace) -> None:
    """Run one evaluation, print its table, and save it where asked."""
    from tensorlens_tl import evaluate

    check_output(args.output)
    run_imports(args) if args.what not in ("relations", "patching", "circuits") else None
    model = loaded_model(args)
    result = _RUN.get(args.what, _check)(args, model)
    if args.what == "agreement":
        print(evaluate.agreement_table(result).round(2).to_string())
    else:
        result.show()
    write_result(result, result.kind, args.output)


def _known_answer(args: argparse.Namespace, model: Any) -> Any:
    from tensorlens_tl import evaluate

    return evaluate.known_answer(model, task_of(args, model), args.methods, seed=args.seed)


def _patching(args: argparse.Namespace, model: Any) -> Any:
    from tensorlens_tl import evaluate

    pairs = evaluate.prompt_pairs(task_of(args, model), args.change, seed=args.seed)
    return evaluate.patching_agreement(model, pairs, args.methods, by=args.by, steps=args.steps)


def _circuits(args: argparse.Namespace, model: Any) -> Any:
    from tensorlens_tl import evaluate

    pairs = evaluate.prompt_pairs(task_of(args, model), args.change, seed=args.seed)
    options = {"choice": args.choice, "steps": args.steps, "seed": args.seed, "folder": args.circuits}
    return evaluate.circuit_faithfulness(model, pairs, args.methods, **options)


def _relations(args: argparse.Namespace, model: Any) -> Any:
    from tensorlens_tl import evaluate

    relations = None if args.relations is None else [evaluate.Relation.load(path) for path in args.relations]
    return evaluate.relation_decoding(model, relations, splits=args.splits, seed=args.seed)


def _perturbation(args: argparse.Namespace, model: Any) -> Any:
    from tensorlens_tl import evaluate

    options = {"query": args.query, "order": args.order, "replacement": args.replacement, "seed": args.seed}
    return evaluate.perturbation(model, prompts_of(args, model), args.methods, **options)


def _check(args: argparse.Namespace, model: Any) -> Any:
    from tensorlens_tl import evaluate

    return getattr(evaluate, args.what)(model, prompts_of(args, model), args.methods, seed=args.seed)


_RUN: dict[str, Callable[[argparse.Namespace, Any], Any]] = {
    "known-answer": _known_answer,
    "patching": _patching,
    "circuits": _circuits,
    "relations": _relations,
    "perturbation": _perturbation,
}
