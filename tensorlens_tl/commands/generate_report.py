"""``tensorlens-tl generate-report``: what made a text that the model wrote, as one page."""

import argparse
from pathlib import Path

from tensorlens_tl.commands import shared

HELP = "What made a text that the model wrote, as one page that opens without a network."
EXAMPLE = 'tensorlens-tl generate-report "If the file is not found, a" --max-new-tokens 4 -o generated.html'


def hops(text: str) -> int | str:
    """A number of hops, or all."""
    if text == "all":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of hops nor 'all'")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_model_arguments(parser)
    parser.add_argument("text", help="the prompt")
    parser.add_argument(
        "--max-new-tokens", type=shared.count, help="the number of tokens to generate, greedily (default: 12)"
    )
    parser.add_argument(
        "--continuation", help="or explain this text instead: only what follows the prompt, with its space"
    )
    parser.add_argument(
        "--span",
        type=shared.stretch,
        default="all",
        help="what is explained: a text (its last occurrence), or START:STOP of the generated tokens (default: all)",
    )
    parser.add_argument("--hops", type=hops, default="all", help="how many hops to follow (default: all)")
    parser.add_argument(
        "--minus",
        help="hold each token against this one, or against its 'runner-up' (default: none, the logit of each token)",
    )
    page = "generated.html"
    parser.add_argument("-o", "--output", type=Path, default=Path(page), help=f"(default: {page} here)")


def run(args: argparse.Namespace) -> None:
    """Write the report of one generated text."""
    import tensorlens_tl as tlens

    shared.check_output(args.output, endings=(".html",))
    most = args.max_new_tokens
    if most is None and args.continuation is None:
        most = 12
    picture = tlens.report.explain_generation(
        shared.loaded_model(args),
        args.text,
        max_new_tokens=most,
        continuation=args.continuation,
        span=args.span,
        hops=args.hops,
        minus=args.minus,
    )
    picture.save(args.output)
    print(f"report written to {args.output}")
