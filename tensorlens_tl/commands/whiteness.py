"""``tensorlens-tl whiteness``: how white and how stationary is a model's stream?"""

import argparse
from pathlib import Path
from typing import Any

from tensorlens_tl.commands import shared
from tensorlens_tl.errors import InvalidInputError

HELP = "Measure how white and how stationary the residual stream is, before and after a fitted filter."
EXAMPLE = "tensorlens-tl whiteness -n 16 -o whiteness.csv"
PROMPTS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_model_arguments(parser)
    parser.add_argument("--hooks", nargs="+", metavar="HOOK", help="hook points (default: the stream between blocks)")
    parser.add_argument("--prompts", type=Path, help=f"{shared.PROMPTS_HELP} (default: held-out text)")
    parser.add_argument(
        "--length", type=shared.count, default=16, help="tokens of each prompt, without special ones (default: 16)"
    )
    parser.add_argument("-n", type=shared.count, help=f"prompts of held-out text (default: {PROMPTS})")
    parser.add_argument(
        "--filters", action="store_true", help="also measure after filters fitted to the other half of the prompts"
    )
    parser.add_argument("-o", "--output", type=Path, help="save: .html, or .csv")


def run(args: argparse.Namespace) -> None:
    """Measure, print the tables, and save where asked."""
    import pandas as pd

    from tensorlens_tl import whitening
    from tensorlens_tl.whitening import SETTLING

    shared.check_output(args.output, endings=(".html", ".csv"))
    if (
        args.output is not None
        and args.output.suffix.lower() == ".html"
        and args.hooks is not None
        and len(args.hooks) < 2
    ):
        raise InvalidInputError("--hooks: a page draws curves over 2 hook points or more; save one as .csv.")
    shared.check_prompts(args)
    model = shared.loaded_model(args, logits=False)
    tokens = _tokens(args, model)
    half = len(tokens) // 2
    if args.filters and len(tokens) < 8:
        raise InvalidInputError(f"{len(tokens)} prompts; at least 8 are needed with --filters.")
    if len(tokens) < 4:
        raise InvalidInputError(f"{len(tokens)} prompts; at least 4 are needed.")
    measured = tokens
    skip = 0
    heading = f"{len(tokens)} prompts of {tokens.shape[1]} tokens"
    if args.filters:  # they are made from the first half of the text, and everything is measured on the second
        measured = tokens[half:]
        skip = SETTLING
        heading = f"{len(measured)} prompts of {tokens.shape[1]} tokens, the first {skip} left out"
    table = whitening.measure(model, measured, args.hooks, skip=skip)
    tables = {"as it is": table}
    print(heading)
    print(table.round(4).to_string())
    if args.filters:
        filters = whitening.stream_filters(model, tokens[:half], args.hooks)
        tables["filtered"] = whitening.measure(model, measured, filters=filters, skip=skip)
        print(f"\nafter filters made from the {half} prompts before them:")
        print("\n".join(f"{name}: {stream_filter}" for name, stream_filter in filters.items()))
        print(tables["filtered"].round(4).to_string())
    if args.output is None:
        return
    if args.output.suffix.lower() == ".csv":
        pd.concat(tables).to_csv(args.output)
    else:
        title = f"Whiteness of {args.model}: {len(measured)} prompts of {measured.shape[1]} tokens"
        whitening.picture(table, tables.get("filtered"), title).save(args.output)
    print(f"saved to {args.output}")


def _tokens(args: argparse.Namespace, model: Any) -> Any:
    """Prompts of one length: those of the file cut to it, shorter ones left out, or windows of held-out text."""
    import torch

    from tensorlens_tl.models import ModelView
    from tensorlens_tl.passes.inputs import token_rows

    if args.length > model.cfg.n_ctx - 2:
        raise InvalidInputError(f"--length {args.length}: the model reads {model.cfg.n_ctx} tokens.")
    lines = shared.prompts_of(args, model, most=PROMPTS, length=args.length)
    if isinstance(lines, torch.Tensor):
        return lines
    rows = token_rows(ModelView(model), lines)
    bos = getattr(getattr(model, "tokenizer", None), "bos_token_id", None)
    special = int(all(row[0] == bos for row in rows))
    rows = [row[: args.length + special] for row in rows if len(row) >= args.length + special]
    if not rows:
        raise InvalidInputError(
            f"--prompts {args.prompts}: none of {len(lines)} lines has {args.length} tokens; lower --length."
        )
    return torch.stack(rows)
