"""The command line: ``tensorlens-tl``, and one of `COMMANDS`.

A file for each command names its arguments and what it does, and imports nothing heavy before it runs, so that help
comes within a second.
"""

import importlib
import sys
from collections.abc import Sequence

from tensorlens_tl import __version__
from tensorlens_tl.commands.parsing import Parser, command_first, nearest, of_command, with_options

COMMANDS = (
    "attribute", "dataset", "report", "generate-report", "graph", "methods", "evaluate", "reproduce", "compress",
    "whiteness", "verify", "explore", "demo",
)  # fmt: skip


EXAMPLE = 'tensorlens-tl "If the file is not found, a FileNotFoundError is"'

INTERRUPTED = 130
"""The exit status of what Ctrl-C ended, as shells have it: 128 and the number of the signal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (1 for our own errors and 130 for Ctrl-C, both without a traceback).

    A text that is no command, nor nearly one, is attributed, and so is one behind options:
    ``tensorlens-tl "The Eiffel Tower is in"``, ``tensorlens-tl --model gpt2 "The Eiffel Tower is in"``. Options may
    stand before a command as well: ``tensorlens-tl --model gpt2 report "The Eiffel Tower is in"``.
    """
    if argv is None:
        argv = sys.argv[1:]
    whole = parser()
    words = command_first(list(argv), whole)
    if words and not nearest(words[0], (*COMMANDS, "-h", "--help", "--version"), cutoff=0.7):
        words.insert(0, "attribute")
    args = whole.parse_args(words)
    from tensorlens_tl.errors import TensorLensError

    try:
        args.run(args)
    except TensorLensError as error:
        print(f"{type(error).__name__}: {with_options(str(error), of_command(words, whole))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:  # Ctrl-C; a run over a data set says how to go on
        print(str(interrupt) or "Interrupted.", file=sys.stderr)
        return INTERRUPTED
    return 0


def parser() -> Parser:
    """The parser of all commands."""
    whole = Parser(
        prog="tensorlens-tl",
        usage="tensorlens-tl [-h] [--version] TEXT | command ...",
        description="Exact attribution on frozen transformers. A text by itself is attributed.",
        example=EXAMPLE,
    )
    whole.add_argument("--version", action="version", version=__version__)
    commands = whole.add_subparsers(required=True, metavar="command")
    for name in COMMANDS:
        module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
        described = {"help": module.HELP, "description": module.HELP, "example": getattr(module, "EXAMPLE", "")}
        sub = commands.add_parser(name, prog=f"tensorlens-tl {name}", **described)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return whole
