"""``tensorlens-tl report``: everything about one prediction, as one page."""

import argparse
from pathlib import Path

from tensorlens_tl.commands import shared

HELP = "Everything about one prediction, as one page that opens without a network."
EXAMPLE = 'tensorlens-tl report "If the file is not found, a FileNotFoundError is" -o report.html'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_model_arguments(parser)
    shared.add_import_argument(parser)
    parser.add_argument("text")
    shared.add_question_arguments(parser)
    parser.add_argument(
        "--methods", nargs="+", metavar="METHOD", help="names (default: all of `tensorlens-tl methods`)"
    )
    parser.add_argument(
        "--slow", action="store_true", help="also run methods that cost much on this model, and compute norms exactly"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="(default: report.html here)")


def run(args: argparse.Namespace) -> None:
    """Write the report of one prediction."""
    import tensorlens_tl as tlens

    shared.check_output(args.output, endings=(".html",))
    for name in args.methods or ():
        tlens.get_method(name)  # a typing error should not cost a forward pass
    frozen = tlens.freeze(shared.loaded_model(args), args.text)
    picture = tlens.report.explain(
        frozen, target=args.target, minus=args.minus, query=args.query, methods=args.methods, slow=args.slow
    )
    picture.save(args.output)
    print(f"report written to {args.output}")
