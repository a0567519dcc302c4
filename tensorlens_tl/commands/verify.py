"""``tensorlens-tl verify``: is this model supported?"""

import argparse
from typing import TYPE_CHECKING

from tensorlens_tl.commands import shared

if TYPE_CHECKING:
    from tensorlens_tl.models import ModelView

HELP = "Check whether a model is supported: compare each block, and what follows the last, with the model."
EXAMPLE = 'tensorlens-tl verify "Return the value of the"'
TEXT = "The quick brown fox jumps over the lazy dog."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_model_arguments(parser)
    parser.add_argument("text", nargs="?", help=f"(default: {TEXT!r}, or random tokens if there is no tokenizer)")


def run(args: argparse.Namespace) -> None:
    """Print what each part and each claim measures; ends with an error that names what does not hold."""
    from tensorlens_tl.drawing.terminal import show_table
    from tensorlens_tl.models import ModelView
    from tensorlens_tl.testing import check_checkpoint, check_model

    model = shared.named_model(args)  # proofs hold of any weights; which of them are random is said at the end
    text = args.text
    view = ModelView(model)
    if text is None and view.tokenizer is not None and not view.is_encoder_decoder:
        text = TEXT
    if text is None:
        print("This model has no tokenizer, or two inputs: verified on random tokens.")
    report = check_model(model, text)
    rows = []
    for part, error in report.errors.items():
        layer = part.removeprefix("blocks.")
        layout = report.layouts[int(layer)] if layer.isdigit() else ""
        rows.append((part, layout, f"{error:.1e}"))
    rows += [(part, "", f"refused: {why}") for part, why in report.refused.items()]
    headings = ("part or claim", "layout", "relative error")
    caption = "0: identical to the last bit"
    show_table(f"{report.description}: supported", headings, rows, left=headings, caption=caption)
    error = check_checkpoint(model)
    print(_newly_initialised(view))
    if error is not None:
        print(f"Its logits equal those of the Hugging Face model of this checkpoint (largest difference {error:.1e}).")


def _newly_initialised(view: "ModelView") -> str:
    """What is known about weights that the checkpoint does not have."""
    if view.untrained.classifier:
        return f"This model is incomplete: {view.untrained.noise(logits=True)}"
    if view.untrained.names is None:
        return "It is unknown whether the checkpoint had every weight of this model."
    if not view.untrained.names:
        return "All weights come from the checkpoint."
    names = ", ".join(view.untrained.names)
    return f"Newly initialised, as the checkpoint does not have them: {names}. What these compute is noise."
