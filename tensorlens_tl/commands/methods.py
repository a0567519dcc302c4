"""``tensorlens-tl methods``: which methods are there?"""

import argparse

from tensorlens_tl.commands import shared

HELP = "List the registered methods, their options, and the layer maps for mean and rollout."
EXAMPLE = "tensorlens-tl methods"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_import_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Print methods and layer maps."""
    import tensorlens_tl as tlens
    from tensorlens_tl.drawing.terminal import show_table

    methods = [tlens.get_method(name) for name in tlens.list_methods()]
    rows = []
    for method in methods:
        what = method.summary
        if method.equal_to:
            what += f" By default the numbers of {method.equal_to}."
        rows.append((method.name, what, ", ".join(method.options)))
    headings = ("method", "what", "options")
    show_table("", headings, rows, left=headings, caption=f"layer maps: {', '.join(tlens.list_layer_maps())}")
