"""``tensorlens-tl dataset``: one method over a file of texts."""

import argparse
from pathlib import Path
from typing import Any

from tensorlens_tl.commands import shared
from tensorlens_tl.errors import InvalidInputError

HELP = "Attribute every row of a JSONL, CSV or Parquet file, and write the results as Parquet shards."
EXAMPLE = 'tensorlens-tl dataset texts.csv --target " file" -o run'

MORE_METHODS = ("logit_attribution", "total_effects")
"""What `--method` takes besides the methods: `datasets.work.CIRCUITS`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_model_arguments(parser)
    shared.add_import_argument(parser)
    parser.add_argument("rows", type=Path, metavar="FILE", help="a .jsonl, .csv or .parquet file")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the run's folder; a run in it is resumed")
    parser.add_argument(
        "--method",
        default="tensorlens",
        help="one of `tensorlens-tl methods`, or logit_attribution or total_effects: each component's effect",
    )
    parser.add_argument("--text", default="text", help="the column of texts or token ids (default: text, or prompt)")
    parser.add_argument("--id", default="id", help="the column that names rows (default: id, else their number)")
    parser.add_argument(
        "--target", help="a token to explain in every row, such as ' Paris', or first-choice, what the model predicts"
    )
    parser.add_argument("--target-column", help="the column with each row's target")
    parser.add_argument("--minus", help="a token to compare the target with in every row, or runner-up")
    parser.add_argument("--minus-column", help="the column with the token to compare each row's target with")
    parser.add_argument(
        "--query", type=shared.position, help="a position, a text of each row, or all (default: the method's)"
    )
    parser.add_argument("--keep", default="scores", help="scores, top:32 (the largest of each query), or all")
    parser.add_argument(
        "--tokens-per-batch", type=shared.count, default=8192, help="the most tokens to run together (default: 8192)"
    )
    parser.add_argument("--memory", help="the most memory to allocate at once, such as 512MB")
    parser.add_argument(
        "--summary",
        type=Path,
        metavar="FILE",
        help="for logit_attribution and total_effects: write each component's mean, variance and quantiles as CSV",
    )
    parser.add_argument("--truncate", action="store_true", help="cut the end off texts longer than the context")
    parser.add_argument(
        "--option",
        dest="options",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="another option of the method, with its value as JSON or text, such as collapse=norm (repeatable)",
    )


def run(args: argparse.Namespace) -> None:
    """Run what is left of the run, and say what came of it."""
    from tensorlens_tl._row_files import Reading, check_rows

    columns = shared.given(target=args.target_column or None, minus=args.minus_column or None)
    shared.check_output(args.summary, "--summary")
    check_rows(args.rows, Reading(text=args.text, id=args.id, columns=columns))
    import tensorlens_tl as tlens
    from tensorlens_tl.datasets import CIRCUITS

    if args.summary is not None and args.method not in CIRCUITS:
        raise InvalidInputError(f"--summary: it is of --method {' or '.join(CIRCUITS)}, not {args.method}.")
    options: dict[str, Any] = dict(_option(option) for option in args.options)
    options |= shared.given(target=args.target, minus=args.minus, query=args.query, memory=args.memory)
    logits = args.method in CIRCUITS or tlens.get_method(args.method).explains_prediction(options)
    results = tlens.attribute_dataset(
        shared.loaded_model(args, logits=logits),
        args.rows,
        args.output,
        method=args.method,
        text=args.text,
        id=args.id,
        columns=columns,
        tokens_per_batch=args.tokens_per_batch,
        keep=args.keep,
        truncate=args.truncate,
        **options,
    )
    if args.summary is not None:
        results.summary().to_csv(args.summary)
    print(f"{len(results)} rows in {results.path}, {len(results.errors())} of them with an error")


def _option(option: str) -> tuple[str, Any]:
    import json

    name, equals, value = option.partition("=")
    if not equals or not name.isidentifier():
        raise InvalidInputError(f"--option {option}: write NAME=VALUE, such as collapse=norm.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
