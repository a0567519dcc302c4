"""``tensorlens-tl compare``: why two prompts are answered differently."""

import argparse
from pathlib import Path

from tensorlens_tl.commands import shared

HELP = "Explain why two prompts get different answers, and save a page with the circuit behind the change."
EXAMPLE = 'tensorlens-tl compare "Open the file and read the" "Open the socket and read the" -o compare.html'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_model_arguments(parser)
    parser.add_argument("first", help="the prompt whose answer is explained")
    parser.add_argument("second", help="a prompt with the same number of tokens and a different answer")
    shared.add_question_arguments(parser)
    parser.add_argument("--top", type=shared.count, default=5, help="how many tokens and components to print")
    parser.add_argument("-o", "--output", type=Path, default=Path("compare.html"), help="(default: compare.html here)")


def run(args: argparse.Namespace) -> None:
    """Print why the answers differ, and write the page."""
    shared.check_output(args.output, endings=(".html",))
    import tensorlens_tl as tlens
    from tensorlens_tl.report import changed_answer

    model = shared.loaded_model(args)
    first, second = (tlens.freeze(model, text) for text in (args.first, args.second))
    change = changed_answer(tlens.difference(first, second), args.target, args.minus, args.query)
    print(f"{change.question}\n{change.statement}")
    for token, *chances in change.rows:
        print(f"  {token}: {chances[0]} after the first prompt, {chances[1]} after the second")
    differing = int(change.tokens.scores.count_nonzero())  # a token that is the same in both prompts scores 0
    change.tokens.show(max(1, min(args.top, differing)))
    change.components.show(args.top)
    change.page().save(args.output)
    print(f"page written to {args.output}")
