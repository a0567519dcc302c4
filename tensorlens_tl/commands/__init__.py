"""The command line: ``tensorlens-tl``, and one of `COMMANDS`.

A file for each command names its arguments and what it does, and imports nothing heavy before it runs, so that help
comes within a second. Help ends in an example, and errors name the nearest word in place of all of them.
"""

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NoReturn

from tensorlens_tl import __version__

CHOICE = re.compile(
    r"argument (?P<what>.*?): invalid choice: '?(?P<word>.*?)'? \(choose from (?P<known>.*)\)", re.DOTALL
)
"""What argparse says of a word that is none of the choices."""

ARGUMENT = re.compile(
    r"\w+\([^()]*\)"  # a call
    r"|(?<!\w)(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"  # a quotation
    r"|(?<![\w.{-])(?P<name>[a-z]\w*)=(?P<true>True\b)?(?P<value>(?=[^\s,.;:)]))?"
)
"""An argument as Python writes it, ``target=``; calls and quotations are passed over."""

OPTION = re.compile(r"--[A-Za-z][\w-]*(?=$|=)")
"""The name of an option in a word."""

FEW = 5
"""Choices that an error lists; of more it names the nearest."""


class Parser(argparse.ArgumentParser):
    """A parser of one command."""

    def __init__(self, *args: Any, example: str = "", **options: Any) -> None:
        if example:
            options["epilog"] = f"example:\n  {example}"
        self._words: list[str] = []
        super().__init__(*args, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Arguments, and nothing that is left over: this parser knows its options, the one above does not."""
        self._words = list(args or [])
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            self.error(self._left_over(left))
        return parsed, left

    @property
    def commands(self) -> dict[str, "Parser"]:
        """The parsers of its commands by name; none of a parser that has no commands."""
        chosen = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {name: sub for action in chosen for name, sub in action.choices.items()}

    @property
    def options(self) -> dict[str, argparse.Action]:
        """Its options, and those of its commands, by name."""
        known = dict(self._option_string_actions)
        for sub in self.commands.values():
            known |= sub.options
        return known

    def format_help(self) -> str:
        """The help, with a short line of usage: options are listed below it."""
        if self.usage is None:
            self.usage = " ".join([self.prog, "[options]", *filter(None, map(_word, self._actions))])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """End with status 2, one line of what is wrong, and where help is."""
        self.exit(2, f"{self.prog}: {self._explained(message)}\nSee {self.prog} -h.\n")

    def _left_over(self, words: Sequence[str]) -> str:
        """What is wrong with words that are no arguments of this command."""
        for word in words:
            if word.startswith("-"):
                name = word.partition("=")[0]
                return f"there is no option {name!r}{nearest(name, self._option_string_actions)}"
        return f"nothing takes {' '.join(map(repr, words))}. Put a text of several words in quotes"

    def _explained(self, message: str) -> str:
        """What argparse says, with what helps."""
        refused = CHOICE.fullmatch(message)
        if refused is not None:
            known = re.findall(r"[\w.+-]+", refused["known"])
            listed = f"; it is one of {', '.join(known)}" if len(known) <= FEW else ""
            return f"{refused['what']}: there is no {refused['word']!r}{listed or nearest(refused['word'], known)}"
        if "required: " in message:  # perhaps because what is there is a misspelt option
            names = [OPTION.match(word) for word in takewhile(lambda word: word != "--", self._words)]
            known = " ".join(self._option_string_actions)
            unknown = [name[0] for name in names if name and f" {name[0]}" not in f" {known}"]
            if unknown:
                return self._left_over(unknown)
        if message.endswith("required: text"):
            return f"{message}. It stands before an option that takes several values, or after --"
        return message


def command_first(words: list[str], parser: Parser) -> list[str]:
    """Return the words of a command line with the command moved before the options in front of it.

    ``--model gpt2 report TEXT`` is ``report --model gpt2 TEXT``, and ``--model gpt2 evaluate stability`` is
    ``evaluate stability --model gpt2``. What follows the command keeps its place.
    """
    commands = parser.commands
    place = _leading(words, parser)
    if place >= len(words) or words[place] not in commands:
        return words
    name = words[place]
    return [name, *command_first([*words[:place], *words[place + 1 :]], commands[name])]


def of_command(words: Sequence[str], parser: Parser) -> Parser:
    """The parser of the command that the words begin with, such as that of ``evaluate stability``."""
    while words and words[0] in parser.commands:
        parser = parser.commands[words[0]]
        words = words[1:]
    return parser


def with_options(message: str, parser: Parser) -> str:
    """Write arguments in a library's message as the command's options, where it has them.

    >>> parser = Parser()
    >>> _ = parser.add_argument("--target"), parser.add_argument("--truncate", action="store_true")
    >>> with_options("target=' a b' is two tokens; direction= takes a vector, and truncate=True cuts.", parser)
    "--target ' a b' is two tokens; direction= takes a vector, and --truncate cuts."
    """

    def option(match: re.Match[str]) -> str:
        flag = "--" + (match["name"] or "").replace("_", "-")
        action = parser._option_string_actions.get(flag)
        if action is None:
            return match[0]
        if action.nargs == 0:
            return flag if match["true"] else match[0]
        after = "True" if match["true"] else ""
        separated = after or match["value"] is not None
        return flag + (" " if separated else "") + after

    return ARGUMENT.sub(option, message)


def _leading(words: Sequence[str], parser: Parser) -> int:
    """How many words at the front are options of the parser's commands, and their values."""
    commands = parser.commands
    options = parser.options
    count = 0
    while count < len(words):
        name, equals, _ = words[count].partition("=")
        if name not in options or name in parser._option_string_actions:
            return count
        action = options[name]
        count += 1
        if equals or action.nargs == 0:
            continue
        if action.nargs is None:
            count += 1
            continue
        while count < len(words) and words[count] not in commands and not words[count].startswith("-"):  # several
            count += 1
    return count


def _word(action: argparse.Action) -> str:
    """What stands for an argument in a line of usage; nothing for an option that may be left out."""
    name = str(action.metavar or action.dest)
    if action.option_strings:
        return f"{action.option_strings[0]} {name.upper()}" if action.required else ""
    if action.nargs == argparse.OPTIONAL:
        return f"[{name}]"
    if action.nargs == argparse.PARSER:
        return f"{name} ..."
    return name


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A question, where a word is nearly one of the known ones."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    if not near:
        return ""
    return f". Did you mean {near[0]!r}?"


COMMANDS = (
    "attribute", "compare", "dataset", "report", "graph", "methods", "evaluate", "reproduce",
    "compress", "whiteness", "verify", "explore", "demo",
)  # fmt: skip


EXAMPLE = 'tensorlens-tl "If the file is not found, a FileNotFoundError is"'

INTERRUPTED = 130
"""The exit status of what Ctrl-C ended, as shells have it: 128 and the number of the signal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (1 for our own errors and 130 for Ctrl-C, both without a traceback).

    A text that is no command, nor nearly one, is attributed. Options may stand before command or text:
    ``tensorlens-tl --model gpt2 report "The Eiffel Tower is in"``.
    """
    if argv is None:
        argv = sys.argv[1:]
    whole = parser()
    words = command_first(list(argv), whole)
    if words and not nearest(words[0], (*COMMANDS, "-h", "--help", "--version"), cutoff=0.7):
        words.insert(0, "attribute")
    args = whole.parse_args(words)
    from tensorlens_tl.commands import early, shared
    from tensorlens_tl.errors import TensorLensError

    try:
        early.check(args)
        shared.run_imports(args)
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
        description="Exact attribution on frozen transformers. A text without a command is attributed.",
        example=EXAMPLE,
    )
    whole.add_argument("--version", action="version", version=__version__)
    commands = whole.add_subparsers(required=True, metavar="command")
    for name in COMMANDS:
        module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
        described = {"help": module.HELP, "description": module.HELP, "example": getattr(module, "EXAMPLE", "")}
        sub = commands.add_parser(name, prog=f"tensorlens-tl {name}", **described)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run, more_methods=getattr(module, "MORE_METHODS", ()))
    return whole
