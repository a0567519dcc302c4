"""``tensorlens-tl graph``: the contribution graph of one prediction, as a page or in a format of others."""

import argparse
from pathlib import Path

from tensorlens_tl.commands import shared

HELP = (
    "The contribution graph of one prediction: an interactive page, or a file for circuit-tracer, networkx and others."
)
EXAMPLE = 'tensorlens-tl graph "Return the value of the" --target " file" -o graph.html'
SUFFIX_OF = {"json": ".json", "circuit-tracer": ".json", "graphml": ".graphml", "csv": ".csv"}
"""What the default output ends in, by its format."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_model_arguments(parser)
    parser.add_argument("text")
    shared.add_question_arguments(parser)
    parser.add_argument("--threshold", type=float, default=0.01, help="leave out edges below this share of the largest")
    parser.add_argument(
        "--share",
        type=share,
        default=1.0,
        help="then keep the largest edges that carry this share of the total (default: 1)",
    )
    parser.add_argument(
        "--neurons",
        type=parts,
        help="split MLPs: this many neurons at each position, or all above a share of the largest",
    )
    parser.add_argument("--sources", type=parts, help="split heads by source token, in the same way")
    parser.add_argument(
        "--rule", help="in place of the frozen model: gim, attnlrp, relp, tangent, or a registered rule"
    )
    parser.add_argument(
        "--format", help="html, circuit-tracer, graphml, json or csv (default: from the output's ending)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, help=f"where to write it (default: graph.html here); {shared.ENDINGS}, or .graphml"
    )


def parts(text: str) -> int | float:
    """How many neurons or source tokens, or a share of the largest."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor a share, such as 0.1") from None


def share(text: str) -> float:
    """A share, above 0 and at most 1."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share above 0 and at most 1")
    return number


def run(args: argparse.Namespace) -> None:
    """Write the graph of one prediction."""
    import tensorlens_tl as tlens
    from tensorlens_tl import circuits
    from tensorlens_tl.circuits.graph import check_options
    from tensorlens_tl.core import rule_of
    from tensorlens_tl.report import predict

    output = args.output or Path(f"graph{SUFFIX_OF.get(args.format, '.html')}")
    _check(output, args.format)
    check_options(args.threshold, args.neurons, args.sources)
    if args.rule is not None:
        rule_of(args.rule)
    frozen = tlens.freeze(shared.loaded_model(args), args.text)
    prediction = predict(frozen, args.target, args.minus, args.query)
    if prediction.target is None:
        raise tlens.InvalidInputError(
            f"graph: {frozen.view.description} predicts no tokens; use direction= from Python."
        )
    graph = circuits.contribution_graph(
        frozen,
        prediction.target,
        prediction.minus,
        threshold=args.threshold,
        neurons=args.neurons,
        sources=args.sources,
        query=prediction.query,
        rule=args.rule,
    )
    if args.share < 1:
        graph = graph.prune(args.share)
    print(graph)
    if args.format is None:
        shared.write_result(graph, output)
        return
    options = {"circuit-tracer": {"slug": output.stem}}.get(args.format, {})
    print(f"saved to {graph.export(output, args.format, **options)}")


def _check(output: Path, format: str | None) -> None:
    """Raise `InvalidInputError` where the graph cannot be written: by its format, or as the output's ending says."""
    from tensorlens_tl.results import ContributionGraph
    from tensorlens_tl.results.exchange import format_of

    if format is None:
        shared.check_result_output(output, ContributionGraph)
        return
    shared.check_output(output)
    format_of(output, format)
