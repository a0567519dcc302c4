"""The command line: ``tensorlens-tl``, and one of `COMMANDS`.

A file for each command names its arguments and what it does, and imports nothing heavy before it runs, so that help
comes within a second.
"""

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence

from tensorlens_tl import __version__

COMMANDS = (
    "attribute", "dataset", "report", "generate-report", "graph", "methods", "evaluate", "reproduce", "compress",
    "whiteness", "verify", "explore", "demo",
)  # fmt: skip


INTERRUPTED = 130
"""The exit status of what Ctrl-C ended, as shells have it: 128 and the number of the signal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (1 for our own errors and 130 for Ctrl-C, both without a traceback).

    A text that is no command, nor nearly one, is attributed: ``tensorlens-tl "The Eiffel Tower is in"``.
    """
    if argv is None:
        argv = sys.argv[1:]
    words = list(argv)
    if words and not words[0].startswith("-") and not difflib.get_close_matches(words[0], COMMANDS, n=1, cutoff=0.7):
        words.insert(0, "attribute")
    args = parser().parse_args(words)
    from tensorlens_tl.errors import TensorLensError

    try:
        args.run(args)
    except TensorLensError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:  # Ctrl-C; a run over a data set says how to go on
        print(f"Interrupted. {interrupt}".rstrip(), file=sys.stderr)
        return INTERRUPTED
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    whole = argparse.ArgumentParser(
        prog="tensorlens-tl",
        usage="tensorlens-tl [-h] [--version] TEXT | command ...",
        description="Exact attribution on frozen transformers. A text by itself is attributed: "
        "tensorlens-tl 'The Eiffel Tower is in'",
    )
    whole.add_argument("--version", action="version", version=__version__)
    commands = whole.add_subparsers(required=True, metavar="command")
    for name in COMMANDS:
        module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
        sub = commands.add_parser(name, prog=f"tensorlens-tl {name}", help=module.HELP, description=module.HELP)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return whole
