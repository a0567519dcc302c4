"""``tensorlens-tl attribute``: which tokens moved a prediction?"""

import argparse
from pathlib import Path
from typing import Any

from tensorlens_tl.commands import shared

HELP = "Show what the model predicts here, and which tokens led to it."
EXAMPLE = 'tensorlens-tl attribute "Return the value of the" --target " file" --minus " first" --top 5'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_model_arguments(parser)
    shared.add_import_argument(parser)
    parser.add_argument("text")
    parser.add_argument("--method", default="tensorlens", help="one of `tensorlens-tl methods`")
    parser.add_argument("--collapse", help="for the method tensorlens: target (default), in_out or norm")
    shared.add_question_arguments(parser)
    parser.add_argument("--top", type=shared.count, default=10, help="how many tokens to print")
    parser.add_argument("-o", "--output", type=Path, help=f"also save; {shared.ENDINGS}")


def run(args: argparse.Namespace) -> None:
    """Say what the model predicts, and print what moved it; save where asked."""
    import tensorlens_tl as tlens
    from tensorlens_tl.report import predict

    shared.check_result_output(args.output)
    method = tlens.get_method(args.method)
    if args.collapse is not None and "collapse" not in method.options:
        raise tlens.InvalidInputError(f"--collapse: method {args.method!r} has none; it belongs to tensorlens.")
    options = shared.given(collapse=args.collapse)
    explains = method.explains_prediction(options)
    frozen = tlens.freeze(shared.loaded_model(args, logits=explains), args.text)
    prediction = predict(frozen, args.target, args.minus, args.query)
    explains = explains and bool(prediction.options)
    if not explains and (args.target is not None or args.minus is not None):
        raise tlens.InvalidInputError(f"--target, --minus: {args.method!r} explains no token; leave them out.")
    if args.minus is not None and not method.takes("minus"):
        raise tlens.InvalidInputError(f"--minus: {args.method!r} has no such option; leave it out.")
    if args.query is not None and not method.takes("query"):
        raise tlens.InvalidInputError(f"--query: {args.method!r} has no such option; leave it out.")
    if prediction.best and (args.allow_untrained or not frozen.view.untrained.head):
        token = frozen.str_tokens[0][prediction.position]
        choices = ", ".join(f"{token!r} {chance:.1%}" for token, chance in prediction.best)
        place = "After" if frozen.view.classes is None else "At"
        print(f"{place} {token!r} at position {prediction.position} the model predicts {choices}.")
    question: dict[str, Any] = {"query": prediction.query}
    if explains:
        question |= prediction.options
    options |= {name: value for name, value in question.items() if method.takes(name)}
    result = tlens.attribute(frozen, method=args.method, **options)
    result.show(args.top)
    shared.write_result(result, args.output)
