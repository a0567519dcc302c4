"""``tensorlens-tl compare``: why two prompts are answered differently."""

import argparse
from pathlib import Path
from typing import Any

from tensorlens_tl.commands import shared

HELP = "Why are two prompts answered differently? The answer, and a page with the circuit that changed it."
EXAMPLE = 'tensorlens-tl compare "Open the file and read the" "Open the socket and read the" -o compare.html'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_model_arguments(parser)
    parser.add_argument("first", help="the prompt whose answer is explained")
    parser.add_argument("second", help="a prompt of as many tokens that is answered otherwise")
    shared.add_question_arguments(parser)
    parser.add_argument("--top", type=shared.count, default=5, help="how many tokens and components to print")
    parser.add_argument("-o", "--output", type=Path, default=Path("compare.html"), help="(default: compare.html here)")


def run(args: argparse.Namespace) -> None:
    """Print why the answers differ, and write the page."""
    import tensorlens_tl as tlens
    from tensorlens_tl.report import change_of, change_page

    shared.check_output(args.output, endings=(".html",))
    model = shared.loaded_model(args)
    first, second = (tlens.freeze(model, text) for text in (args.first, args.second))
    _check_lengths(first, second)
    change = change_of(tlens.difference(first, second), args.target, args.minus, args.query)
    print(f"{change.question}\n{change.statement}")
    for token, *chances in change.rows:
        print(f"  {token}: {chances[0]} after the first prompt, {chances[1]} after the second")
    differing = int(change.tokens.scores.count_nonzero())  # a token that is the same in both prompts scores 0
    change.tokens.show(max(1, min(args.top, differing)))
    change.components.show(args.top)
    change_page(change).save(args.output)
    print(f"page written to {args.output}")


def _check_lengths(first: Any, second: Any) -> None:
    """Refuse prompts of different lengths, and show how each is split into tokens."""
    from tensorlens_tl.errors import InvalidInputError

    tokens = [frozen.str_tokens[0] for frozen in (first, second)]
    if len(tokens[0]) != len(tokens[1]):
        raise InvalidInputError(
            f"compare: the prompts have {len(tokens[0])} and {len(tokens[1])} tokens, and are compared position by "
            f"position: {tokens[0]} and {tokens[1]}. Replace words by others of as many tokens."
        )
