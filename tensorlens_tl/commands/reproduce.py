"""``tensorlens-tl reproduce``: the tables and figures of TensorLens (2026) on your model."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorlens_tl.commands import shared
from tensorlens_tl.errors import FileFormatError, InvalidInputError

if TYPE_CHECKING:
    from tensorlens_tl.evaluate import Experiment, Relation

HELP = "Run a table or a figure of the TensorLens paper on a model; the published numbers are printed next to ours."
EXAMPLE = "tensorlens-tl reproduce table-1 -n 2 --length 16"
EXPERIMENTS = ("table-1", "table-2", "figure-3", "figure-4", "figure-5", "figure-6", "figure-7")
DEMO_INPUTS = 16
"""How many texts or images a bundled model is run on unless said."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(EXPERIMENTS)}")
    shared.add_model_arguments(parser)
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help="texts, one a line, or .jsonl with a field 'text'; of figure-3 and figure-7 images as .npy, [image, "
        "channel, height, width]; of figure-5 a folder of relations in LRE's format (default: what comes with bundled "
        "models)",
    )
    parser.add_argument("--length", type=shared.count, help="tokens of each text (default: 128, as in the paper)")
    parser.add_argument(
        "-n", type=shared.count, help=f"how many texts or images (default: all; {DEMO_INPUTS} of bundled ones)"
    )
    parser.add_argument("--replacement", help="mask, pad, mean, zero or a token (default: mask where there is one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, help=f"save; {shared.ENDINGS}")


def run(args: argparse.Namespace) -> None:
    """Run one experiment, print its tables, and save it where asked."""
    from tensorlens_tl import evaluate
    from tensorlens_tl.evaluate import experiment_named

    shared.check_result_output(args.output)
    experiment = experiment_named(args.name)
    data = _read(args.data, experiment)
    name = args.model
    if name == "demo":
        name = f"demo:{experiment.demo}"  # one that fits the experiment
    model = shared.loaded_model(args, name, images=True)
    options: dict[str, Any] = {"length": args.length, "n": args.n, "replacement": args.replacement}
    if data is None and name.startswith("demo"):
        data, options = _bundled(name.partition(":")[2], model, experiment, options)
    result = evaluate.reproduce(args.name, model, data, seed=args.seed, **options)
    result.show()
    shared.write_result(result, args.output)


def _bundled(name: str, model: Any, experiment: "Experiment", options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Held-out text or images of a bundled model, and the options that are left; None where it has none."""
    from tensorlens_tl import demo
    from tensorlens_tl.evaluate import LENGTH

    n = options["n"] or DEMO_INPUTS
    if experiment.reads == "images" and name == "digits":
        images, _ = demo.digit_images()
        return images[:: max(1, len(images) // n)], options | {"n": n}
    if experiment.reads == "tokens" and name in ("language", "encoder", "whitened"):
        special = demo.held_out_prompts(model, 1, 1).shape[1] - 1
        length = options["length"] or LENGTH
        if length <= special:
            raise InvalidInputError(f"--length {length}: that leaves no token beside the special ones.")
        return demo.held_out_prompts(model, n, length - special), options | {"length": None}
    return None, options


def _read(path: Path | None, experiment: "Experiment") -> Any:
    """Texts, images or relations of a file or folder; None where none is named."""
    if path is None:
        return None
    if experiment.reads == "relations":
        return _relations(path)
    if path.is_dir():
        raise InvalidInputError(f"--data {path}: that is a folder; {experiment.name} reads a file.")
    if experiment.reads == "images":
        return _images(path)
    return _texts(path)


def _relations(path: Path) -> "list[Relation]":
    """Every relation of a folder and of those in it; of a file, that one."""
    from tensorlens_tl.evaluate import Relation

    files = [path]
    if path.is_dir():
        files = sorted(path.rglob("*.json"))
    if not files:
        raise InvalidInputError(f"--data {path}: no .json file in this folder.")
    return [Relation.load(file) for file in files]


def _images(path: Path) -> Any:
    """Images of a .npy file, as floating-point numbers."""
    import numpy as np
    import torch

    try:
        values = np.load(path, allow_pickle=False)
        return torch.from_numpy(values)
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise FileFormatError(f"--data {path}: not an array of numbers in .npy ({error}).") from error


def _texts(path: Path) -> list[str]:
    """The lines of a file, or the field "text" of each line of a .jsonl file; empty ones are left out."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        texts = lines
        if path.suffix == ".jsonl":
            texts = [json.loads(line)["text"] for line in lines]
    except (UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(
            f"--data {path}: not UTF-8 text, or a line that is no JSON with a field 'text' ({type(error).__name__}: "
            f"{error})."
        ) from error
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidInputError(f"--data {path}: the file is empty, or a 'text' in it is no text.")
    return texts
