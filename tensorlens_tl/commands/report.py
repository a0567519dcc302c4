"""``tensorlens-tl report``: everything about one prediction, or about a text that the model wrote, as one page."""

import argparse
from pathlib import Path

from tensorlens_tl.commands import shared
from tensorlens_tl.errors import InvalidInputError

HELP = "Write one page about a prediction, or about a text that the model generates."
EXAMPLE = 'tensorlens-tl report "If the file is not found, a FileNotFoundError is" -o report.html'

OF_PREDICTION = ("target", "query", "methods", "slow")
"""Options of a page about one prediction."""


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
        "--slow", action="store_true", help="also run methods that are slow on this model, and compute norms exactly"
    )
    generated = parser.add_argument_group("of a text that the model wrote")
    generated.add_argument("--max-new-tokens", type=shared.count, help="how many tokens to generate, greedily")
    generated.add_argument(
        "--continuation", help="or explain this text instead: the text after the prompt, with its leading space"
    )
    generated.add_argument(
        "--span",
        type=shared.stretch,
        help="what is explained: a text (its last occurrence), or START:STOP of the generated tokens (default: all)",
    )
    generated.add_argument("--hops", type=hops, help="how many hops to follow (default: all)")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="(default: report.html here)")


def hops(text: str) -> int | str:
    """A number of hops, or all."""
    if text == "all":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of hops nor 'all'")
    return int(text)


def run(args: argparse.Namespace) -> None:
    """Write the report of one prediction, or of one generated text."""
    import tensorlens_tl as tlens

    shared.check_output(args.output, endings=(".html",))
    for name in args.methods or ():
        tlens.get_method(name)  # a typing error should not cost a forward pass
    generated = shared.given(max_new_tokens=args.max_new_tokens, continuation=args.continuation)
    parts = shared.given(span=args.span, hops=args.hops)
    if parts and not generated:
        raise InvalidInputError(f"--{next(iter(parts))}: it is of generated text; say --max-new-tokens as well.")
    foreign = [name for name in OF_PREDICTION if generated and getattr(args, name)]
    if foreign:
        raise InvalidInputError(
            f"--{foreign[0]}: a page about generated text explains every token of it; leave it out."
        )
    model = shared.loaded_model(args)
    if generated:
        picture = tlens.report.explain_generation(model, args.text, minus=args.minus, **generated, **parts)
    else:
        frozen = tlens.freeze(model, args.text)
        picture = tlens.report.explain(
            frozen, target=args.target, minus=args.minus, query=args.query, methods=args.methods, slow=args.slow
        )
    picture.save(args.output)
    print(f"report written to {args.output}")
