"""``tensorlens-tl evaluate``: which method is faithful?"""

import argparse
from pathlib import Path
from typing import Any

from tensorlens_tl.commands import shared
from tensorlens_tl.errors import InvalidInputError

HELP = "Measure which methods are faithful: print a table, and save the result."

EVALUATIONS = {
    "perturbation": "Replace tokens in the order of their scores, and see what that does to the model.",
    "known-answer": "How high do scores rank the tokens that truly determine the answer?",
    "known-components": "Do scores of heads, MLPs and edges find those that make the answer of a program?",
    "known-attention": "Do the sources of an attention score name what chose the attention of a program?",
    "patching": "Do scores of nodes, from a clean and a corrupted prompt, agree with patching the live model?",
    "circuits": "CPR and CMD: which scores choose the circuits that do the task?",
    "relations": "Does a linear map fitted to a few examples give the objects of other subjects?",
    "completeness": "Do scores sum to what they explain?",
    "randomisation": "Do scores change when the weights are scrambled?",
    "stability": "Do scores stay when the embeddings get a little noise?",
    "agreement": "How alike do methods rank the tokens?",
}

EXAMPLES = {
    "perturbation": "--methods 'tensorlens target' random -n 2",
    "known-answer": "--task recall --model demo:recall --methods 'tensorlens target' random -n 4",
    "known-components": "--model program:induction -n 2",
    "known-attention": "--model program:induction -n 2",
    "patching": "--model demo:recall -n 4 --methods frozen+qk",
    "circuits": "--model demo:recall -n 4 --methods frozen+qk",
    "relations": "--model demo:relations --splits 1",
    "completeness": "--methods 'tensorlens target' -n 2",
    "randomisation": "--methods 'tensorlens target' -n 2",
    "stability": "--methods 'tensorlens target' -n 2",
    "agreement": "--methods 'tensorlens target' alti -n 2",
}
"""What follows the name of each evaluation in the example of its help."""

EXAMPLE = f"tensorlens-tl evaluate perturbation {EXAMPLES['perturbation']}"

MORE_METHODS = ("random",)
"""What `--methods` takes besides the methods and their labels, which begin with a method's name."""

OF_PROGRAMS = ("known-components", "known-attention")
"""Evaluations of what is known of programs only: ``--model program:NAME``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command, which differ between evaluations."""
    kinds = parser.add_subparsers(required=True, metavar="evaluation", dest="what")
    for name, help in EVALUATIONS.items():
        example = f"tensorlens-tl evaluate {name} {EXAMPLES[name]}"
        sub = kinds.add_parser(name, help=help, description=help, example=example)
        shared.add_model_arguments(sub)
        sub.add_argument("--seed", type=int, default=0)
        sub.add_argument("-o", "--output", type=Path, help=f"save; {shared.ENDINGS}")
        if name == "relations":
            sub.add_argument("--relations", nargs="+", type=Path, help="JSON files (default: the shipped ones)")
            sub.add_argument("--splits", type=shared.count, default=6, help="draws of examples")
            continue
        if name in OF_PROGRAMS:
            _add_program_arguments(sub, name)
            continue
        if name in ("patching", "circuits"):
            _add_pair_arguments(sub, name)
            continue
        shared.add_import_argument(sub)
        sub.add_argument(
            "--methods", nargs="+", metavar="METHOD", help="labels such as 'tensorlens in_out' (default: all)"
        )
        sub.add_argument("-n", type=shared.count, help=f"how many prompts to generate (default: {shared.PROMPTS})")
        if name == "known-answer":
            sub.add_argument("--task", choices=shared.TASKS, help="(default: the model's)")
            continue
        sub.add_argument("--prompts", type=Path, help=f"{shared.PROMPTS_HELP} (default: the held-out text)")
        if name == "perturbation":
            sub.add_argument("--query", type=shared.position, help="a position (default: -1, the last), or mean")
            sub.add_argument("--order", default="descending", choices=("descending", "ascending"))
            sub.add_argument(
                "--replacement",
                help="resampled, mask, pad, mean, zero or a token (default: resampled of a causal language model)",
            )
            sub.add_argument("--draws", type=shared.count, help="how many draws of 'resampled' to average (default: 3)")
            _add_question_arguments(sub)


def _add_question_arguments(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--target",
        help="the token that methods explain, of every prompt, or a column 'target' of the table of prompts "
        "(default: first-choice, what the model predicts)",
    )
    sub.add_argument("--minus", help="a token to compare it with, or runner-up; or a column 'minus'")
    sub.add_argument(
        "--fractions", nargs="+", type=float, metavar="SHARE", help="shares of the tokens to replace, starting with 0"
    )
    sub.add_argument(
        "--max-new-tokens", type=shared.count, help="test methods on this many tokens that the model generates"
    )
    sub.add_argument(
        "--span",
        type=shared.stretch,
        help="which of those: a text, or START:STOP of the generated tokens (default: all)",
    )


def _add_program_arguments(sub: argparse.ArgumentParser, name: str) -> None:
    sub.set_defaults(model="program:induction")
    sub.add_argument("-n", type=shared.count, default=12, help="how many prompts (default: 12)")
    sub.add_argument("--methods", nargs="+", metavar="METHOD", help="such as 'contribution_graph' (default: all)")
    if name == "known-components":
        change = "what the corrupted prompt has: another source, or another choice of the source (default: source)"
        sub.add_argument("--change", choices=("source", "choice"), default="source", help=change)


def _add_pair_arguments(sub: argparse.ArgumentParser, name: str) -> None:
    sub.add_argument(
        "--pairs",
        type=Path,
        metavar="FILE",
        help="your own: a CSV file with columns 'clean' and 'corrupted', and where known 'target' and 'minus'",
    )
    sub.add_argument(
        "--task",
        choices=("recall", "induction", *shared.LANGUAGE_TASKS),
        metavar="TASK",
        help="recall or induction, of the bundled models (default: the model's); of a trained language model "
        f"{', '.join(shared.LANGUAGE_TASKS[:-1])} or {shared.LANGUAGE_TASKS[-1]}",
    )
    sub.add_argument("--change", choices=("source", "question"), help="what the corrupted prompt has (default: source)")
    sub.add_argument("-n", type=shared.count, help=f"how many pairs of prompts (default: {shared.PROMPTS})")
    sub.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="such as 'frozen+qk' or 'integrated-gradients' (default: all)"
    )
    sub.add_argument("--steps", type=shared.count, default=5, help="how many gradients to average (default: 5)")
    if name == "patching":
        sub.add_argument(
            "--by",
            default="head",
            choices=("component", "head", "neuron", "stream", "edge"),
            metavar="NODES",
            help="component, head, neuron, stream or edge (default: head)",
        )
        return
    sub.add_argument("--choice", default="top", choices=("top", "greedy"), help="how to choose the edges of circuits")
    sub.add_argument("--circuits", type=Path, metavar="FOLDER", help="save each method's circuit there, as MIB's JSON")


def run(args: argparse.Namespace) -> None:
    """Run one evaluation, print its table, and save it where asked."""
    from tensorlens_tl import evaluate
    from tensorlens_tl.drawing.terminal import show_table

    shared.check_result_output(args.output)
    if args.what in OF_PROGRAMS:
        shared.named_program(args.model)  # before a model is loaded
    shared.check_prompts(args)
    if args.what == "relations":  # files are read before a model is
        args.relations = [evaluate.Relation.load(path) for path in args.relations or ()] or None
    _check_pairs(args)
    model = shared.loaded_model(args)
    result = _result(args, model)
    if args.what == "agreement":  # a square table of methods
        table = evaluate.agreement_table(result)
        rows = [(str(method), *(f"{value:.2f}" for value in line)) for method, *line in table.itertuples(name=None)]
        show_table("agreement of methods: mean rank correlation", ("method", *table.columns), rows, left=("method",))
    else:
        result.show()
    shared.write_result(result, args.output)


def _result(args: argparse.Namespace, model: Any) -> Any:
    """What the evaluation that was named measures of a model."""
    from tensorlens_tl import evaluate

    methods = getattr(args, "methods", None)
    if args.what == "known-answer":
        return evaluate.known_answer(model, shared.task_of(args, model), methods, seed=args.seed)
    if args.what == "known-components":
        components = shared.named_program(args.model).components(args.n, seed=args.seed, change=args.change)
        return evaluate.known_components(model, components, methods)
    if args.what == "known-attention":
        choices = shared.named_program(args.model).attention(args.n, seed=args.seed)
        return evaluate.known_attention(model, choices, methods, seed=args.seed)
    if args.what == "patching":
        return evaluate.patching_agreement(model, _pairs(args, model), methods, by=args.by, steps=args.steps)
    if args.what == "circuits":
        options = {"choice": args.choice, "steps": args.steps, "seed": args.seed, "folder": args.circuits}
        return evaluate.circuit_faithfulness(model, _pairs(args, model), methods, **options)
    if args.what == "relations":
        return evaluate.relation_decoding(model, args.relations, splits=args.splits, seed=args.seed)
    if args.what == "perturbation":
        options = {"order": args.order, "replacement": args.replacement, "seed": args.seed}
        options |= shared.given(
            query=args.query,
            target=args.target,
            minus=args.minus,
            fractions=args.fractions,
            draws=args.draws,
            max_new_tokens=args.max_new_tokens,
            span=args.span,
        )
        return evaluate.perturbation(model, shared.prompts_of(args, model), methods, **_with_columns(args, options))
    columns = shared.questions_of(args.prompts)
    if columns:
        print(f"--prompts: {', '.join(columns)}: not read here; methods explain what the model predicts last.")
    return getattr(evaluate, args.what)(model, shared.prompts_of(args, model), methods, seed=args.seed)


def _check_pairs(args: argparse.Namespace) -> None:
    """Raise `InvalidInputError` for pairs of which flags say two things, or that are nowhere."""
    change = getattr(args, "change", None)
    path = getattr(args, "pairs", None)
    if getattr(args, "task", None) in shared.LANGUAGE_TASKS and change is not None:
        raise InvalidInputError(f"--change: the corrupted prompts of {args.task!r} are always the same; leave it out.")
    if path is None:
        return
    for flag, value in (("--task", args.task), ("--change", change), ("-n", args.n)):
        if value is not None:
            raise InvalidInputError(
                f"{flag}: it is about pairs that we make; with --pairs every row of the file is one."
            )


def _pairs(args: argparse.Namespace, model: Any) -> Any:
    """Clean and corrupted prompts: of a file, of a program, or of a task and what changes in it."""
    from tensorlens_tl import evaluate

    if args.pairs is not None:
        return evaluate.text_pairs(model, args.pairs, name=args.pairs.stem)
    if args.task in shared.LANGUAGE_TASKS:
        return evaluate.language_task(model, args.task, args.n or shared.LANGUAGE_PROMPTS, seed=args.seed).pairs
    if args.task is None and args.model.startswith("program:"):
        change = "choice" if args.change == "question" else "source"
        return (
            shared.named_program(args.model).components(args.n or shared.PROMPTS, seed=args.seed, change=change).pairs
        )
    return evaluate.prompt_pairs(shared.task_of(args, model), args.change or "source", seed=args.seed)


def _with_columns(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Options with what a table says of each prompt."""
    columns = shared.questions_of(args.prompts)
    for name, values in columns.items():
        flag = getattr(args, name)
        if flag is not None:
            raise InvalidInputError(f"--{name}: --prompts {args.prompts} has a column {name!r} as well; leave one out.")
        if name != "query":
            options[name] = values
            continue
        queries = {shared.position(str(value)) for value in values}
        if len(queries) > 1:
            raise InvalidInputError(
                f"--prompts {args.prompts}: its column 'query' has {len(queries)} different values, and this "
                "evaluation has one query of all prompts. Split the file, or end each prompt where it is asked."
            )
        options[name] = queries.pop()
    return options
