"""``tensorlens-tl explore``: a local page for prompts, tokens, heads and two runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tensorlens_tl.commands import shared
from tensorlens_tl.errors import InvalidInputError

HELP = "Open a local page: type a prompt, click, and see exact sums. Ctrl-C stops it."
EXAMPLE = "tensorlens-tl explore --model demo --dictionary demo"
IMAGES = 20
"""Handwritten digits that the page of the bundled image model offers."""

CONFIGURATION = "cfg.json"
WEIGHTS = "sae_weights.safetensors"
"""The two files of a folder that SAELens' ``save_model`` writes."""
NO_LABELS = "-"
"""What stands for no labels of a dictionary, beside others that have some."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    shared.add_model_arguments(parser)
    parser.add_argument(
        "--tuned", help="a second model of the same architecture, to compare with: named as for --model"
    )
    parser.add_argument(
        "--dictionary",
        action="append",
        default=[],
        metavar="FOLDER",
        help="a sparse autoencoder of the model, whose features the page shows: a folder as SAELens' save_model writes "
        "it, or demo (may be given again)",
    )
    parser.add_argument(
        "--labels",
        action="append",
        default=[],
        metavar="FILE",
        help="labels of its features: a CSV or JSON file for each --dictionary, in the same order; - for none",
    )
    parser.add_argument("--port", type=int, default=0, help="the port, on this machine only (default: any free port)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(args: argparse.Namespace) -> None:
    """Serve the page until Ctrl-C."""
    import webbrowser

    from tensorlens_tl.demo import digit_images
    from tensorlens_tl.explorer import Explorer, Session, check_installed

    check_installed()
    for name in args.dictionary:
        check_dictionary(name)
    labels = named_labels(args.labels, len(args.dictionary))
    print(f"Loading {args.model} …", file=sys.stderr, flush=True)
    model = shared.loaded_model(args, images=True)
    dictionaries = [named_dictionary(of, model) for of in args.dictionary]
    tuned = None if args.tuned is None else shared.loaded_model(args, args.tuned)
    name = args.model if args.tuned is None else f"{args.model} and {args.tuned}"
    images = None
    if args.model == "demo:digits":
        images = digit_images()[0][:IMAGES]
    session = Session(model, tuned, name=name, images=images, dictionaries=dictionaries, labels=labels)
    page = Explorer(session, args.port)
    print(f"Explorer of {name}: {page.url}\nCtrl-C stops it.", flush=True)
    if args.open:
        webbrowser.open(page.url)
    page.run()


def named_dictionary(name: str, model: Any) -> Any:
    """Return a dictionary in the model's dtype and on its device.

    `name` is ``"demo"``, ``"demo:blocks.0.hook_resid_post"``, a folder as SAELens' ``save_model`` writes it, or its
    file of weights. Raises `InvalidInputError` where it is missing, unreadable, or not of a kind that
    `circuits.features` reads.
    """
    from tensorlens_tl.demo import load_demo_dictionary

    files = check_dictionary(name)
    if files is not None:
        return _of_folder(Path(name), *files, next(model.parameters()))
    hook = name.partition(":")[2]
    if hook:
        return load_demo_dictionary(hook, model.cfg.dtype)
    return load_demo_dictionary(dtype=model.cfg.dtype)


def check_dictionary(name: str) -> tuple[Path, Path] | None:
    """The folder and the file of weights of a dictionary; None for a bundled one."""
    if name.partition(":")[0] == "demo":
        return None
    path = Path(name)
    folder = path
    file = path / WEIGHTS
    if path.is_file():
        folder = path.parent
        file = path
    for needed in (file, folder / CONFIGURATION):
        if not needed.is_file():
            raise InvalidInputError(
                f"--dictionary {path}: there is no file {needed}. Name a folder with {CONFIGURATION} and {WEIGHTS}, as "
                "SAELens' save_model writes it, or demo for those of the bundled model."
            )
    return folder, file


def _of_folder(path: Path, folder: Path, file: Path, like: Any) -> Any:
    """The dictionary of a folder, its weights in the dtype and on the device of a tensor."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from tensorlens_tl.models import read_dictionary

    try:
        configuration = json.loads((folder / CONFIGURATION).read_text(encoding="utf-8"))
        weights = load_file(file)
    except (ValueError, OSError, SafetensorError) as error:
        raise InvalidInputError(f"--dictionary {path}: it cannot be read ({type(error).__name__}: {error}).") from error
    if not isinstance(configuration, dict):
        raise InvalidInputError(f"--dictionary {path}: {CONFIGURATION} is no JSON object.")
    dictionary = SimpleNamespace(**{name: weight.to(like) for name, weight in weights.items()}, cfg=configuration)
    try:
        read = read_dictionary(dictionary)
    except InvalidInputError as error:
        raise InvalidInputError(f"--dictionary {path}: {error}") from error
    dictionary.hook_name = read.hook
    return dictionary


def named_labels(files: Sequence[str], count: int) -> list[dict[int, str]] | None:
    """Return the labels of `count` dictionaries from one file each (see `circuits.feature_labels`), or `NO_LABELS`."""
    from tensorlens_tl.circuits import feature_labels

    if not files:
        return None
    if len(files) != count:
        raise InvalidInputError(
            f"--labels: {len(files)} for {count} --dictionary; give one for each in the same order, {NO_LABELS} for "
            "none."
        )
    for file in files:
        if file != NO_LABELS and not Path(file).is_file():
            raise InvalidInputError(f"--labels {file}: there is no such file.")
    return [{} if file == NO_LABELS else feature_labels(file) for file in files]
