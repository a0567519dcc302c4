"""``tensorlens-tl methods``: which methods are there?"""

import argparse
from typing import TYPE_CHECKING

from tensorlens_tl.commands.options import add_import_argument, run_imports

if TYPE_CHECKING:
    from tensorlens_tl.registry import Method

HELP = "List the registered methods, their options, and the layer maps that mean and rollout take."
EXAMPLE = "tensorlens-tl methods"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    add_import_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Print methods and layer maps."""
    import tensorlens_tl as tlens
    from tensorlens_tl.drawing.terminal import show_table

    run_imports(args)
    methods = [tlens.get_method(name) for name in tlens.list_methods()]
    rows = [(method.name, _what(method), ", ".join(method.options)) for method in methods]
    headings = ("method", "what", "options")
    show_table("", headings, rows, left=headings, caption=f"layer maps: {', '.join(tlens.list_layer_maps())}")


def _what(method: "Method") -> str:
    """What a method says, and whose numbers it gives."""
    if not method.equal_to:
        return method.summary
    return f"{method.summary} By default the numbers of {method.equal_to}."
