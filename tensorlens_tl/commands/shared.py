"""Arguments that several commands share, and what they stand for: models, questions, prompts of a file, outputs."""

import argparse
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from tensorlens_tl.results import Result

Kind = Literal["hooked", "bridge"] | None
"""The class of a model, None for a HookedTransformer where it exists."""

DTYPES = ("float32", "float64", "bfloat16")
PROMPTS = 32
TASKS = ("recall", "brackets", "induction")

LANGUAGE_TASKS = (
    "indirect objects", "agreement", "retrieval", "facts", "greater than", "sequences", "opposites", "copying",
    "arguments", "pronouns",
)  # fmt: skip
"""Those of `evaluate.language_task`."""

LANGUAGE_PROMPTS = 8
"""How many pairs of them are used where `-n` does not say."""

ENDINGS = "its ending says how: .html, .csv, .parquet, .json, .pdf, .svg, .png, or .safetensors to load it again"
"""What `-o` of a result takes, for its help."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, of which class, in which dtype, on which device."""
    parser.add_argument(
        "--model",
        default="demo",
        help="'demo', 'demo:NAME' (recall, brackets, relations, encoder, whitened), 'program:NAME' (a hand-constructed "
        "model, such as program:induction; program:induction:norm has norms), a Hugging Face name, or a folder",
    )
    parser.add_argument("--kind", choices=("hooked", "bridge"), help="model class (default: hooked where it exists)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", help="such as cpu, cuda or mps (default: the model's own)")
    parser.add_argument(
        "--allow-untrained",
        action="store_true",
        help="continue even if the checkpoint lacks weights, such as the head's, which are then random",
    )


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Which logit is explained, and where; `tensorlens_tl.report.predict` has the same defaults."""
    parser.add_argument(
        "--target",
        help="the token to explain, such as ' Paris', or first-choice (default: the model's first choice, against its "
        "second)",
    )
    parser.add_argument(
        "--minus",
        help="a token to compare it with, or runner-up, for a logit difference (default: none if --target is given)",
    )
    parser.add_argument(
        "--query",
        type=position,
        help="a position, counted over the prompt's tokens, or a text of it (default: the last, or the mask)",
    )


def add_import_argument(parser: argparse.ArgumentParser) -> None:
    """Files that register the user's methods."""
    parser.add_argument(
        "--import",
        dest="imports",
        metavar="FILE",
        action="append",
        default=[],
        help="a Python file or module that registers methods or layer maps (repeatable)",
    )


def position(text: str) -> int | str:
    """A query of the command line: a number, or a text of the prompt."""
    if text.removeprefix("-").isdecimal():
        return int(text)
    return text


def stretch(text: str) -> tuple[int, int] | str:
    """Generated tokens by number, ``2:5``, or a text of them."""
    start, colon, stop = text.partition(":")
    if colon and start.isdecimal() and stop.isdecimal():
        return int(start), int(stop)
    return text


def given(**options: Any) -> dict[str, Any]:
    """The options that the command line gives: those that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def count(text: str) -> int:
    """A number of things, at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def run_imports(args: argparse.Namespace) -> None:
    """Run what ``--import`` names, of a command that has it."""
    import importlib
    import runpy

    for name in getattr(args, "imports", ()):
        try:
            if name.endswith(".py"):
                runpy.run_path(name, run_name=Path(name).stem)
            else:
                importlib.import_module(name)
        except Exception as error:
            raise InvalidInputError(f"--import {name}: {type(error).__name__}: {error}") from error


def check_output(path: Path | None, name: str = "--output", *, endings: Sequence[str] = ()) -> None:
    """Raise `InvalidInputError` before work starts where the output of a flag `name` cannot be written; any ending
    if none."""
    if path is None:
        return
    if path.is_dir():
        raise InvalidInputError(f"{name} {path}: that is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise InvalidInputError(f"{name} {path}: there is no folder {path.parent}.")
    if endings and path.suffix.lower() not in endings:
        raise InvalidInputError(f"{name} {path}: end its name in {' or '.join(filter(None, endings))}.")


def check_result_output(path: Path | None, kind: "type[Result] | None" = None) -> None:
    """Raise `InvalidInputError` before work starts where a result of some `kind` cannot be saved to the output."""
    from tensorlens_tl.results import Result, check_file

    if path is not None:
        check_file(path, kind or Result, "--output")


def named_model(args: argparse.Namespace, name: str | None = None, *, images: bool = False) -> Any:
    """The model that the arguments name (or `name` does), also where its checkpoint lacks weights."""
    import torch

    return load_model(name or args.model, args.kind, getattr(torch, args.dtype), args.device, images=images)


def loaded_model(
    args: argparse.Namespace, name: str | None = None, *, images: bool = False, logits: bool = True
) -> Any:
    """Return the model that the arguments name, to be explained.

    Raises `InvalidInputError` also for one whose checkpoint lacks weights (of the head, if `logits` are explained),
    unless the arguments allow it.
    """
    model = named_model(args, name, images=images)
    _warn_unlike_checkpoint(model)
    if not args.allow_untrained:
        refuse_untrained(model, name or args.model, logits=logits)
    return model


MOST_COMPARED = 4 * 2**30
"""Up to how many bytes of weights a model is loaded once more, to compare it with its checkpoint."""


def _warn_unlike_checkpoint(model: Any) -> None:
    """Warn where the logits of a model that is not too large are not those of its checkpoint."""
    from tensorlens_tl.errors import ConformanceError
    from tensorlens_tl.testing import check_checkpoint

    if sum(weight.nbytes for weight in model.parameters()) > MOST_COMPARED:
        return
    try:
        check_checkpoint(model)
    except ConformanceError as error:
        warnings.warn(str(error), UserWarning, stacklevel=2)


def refuse_untrained(model: Any, name: str, *, logits: bool) -> None:
    """Raise `InvalidInputError` where what is to be explained comes from weights that the checkpoint does not have."""
    from tensorlens_tl.models import ModelView

    untrained = ModelView(model).untrained
    why = untrained.noise(logits=logits)
    if why is None:
        return
    instead = "Load a checkpoint that has them, or pass --allow-untrained."
    if logits and not untrained.stack:
        instead = (
            "Explain the hidden state instead (tensorlens-tl attribute TEXT --collapse in_out), load a checkpoint with "
            "its head, or pass --allow-untrained."
        )
    raise InvalidInputError(f"--model {name}: {why} {instead}")


def load_model(
    name: str,
    kind: Kind = None,
    dtype: "torch.dtype | None" = None,
    device: str | None = None,
    *,
    images: bool = False,
) -> Any:
    """Load a model: ``"demo"``, ``"demo:recall"``, ``"program:sort"``, a hub name, or a folder (always a Bridge).

    ``images=True`` allows the bundled model that reads images.
    """
    import torch

    from tensorlens_tl import demo

    dtype = dtype or torch.float32
    place = checked_device(device)
    if name == "demo:digits" and not images:
        raise InvalidInputError("--model demo:digits: it reads images, and the commands take text; use it from Python.")
    source, _, rest = name.partition(":")
    if source == "demo":
        model = demo.load_demo_model(rest or "language", dtype, kind=kind)
    elif source == "program":
        model = named_program(name).model(kind, norm=name.endswith(":norm"), dtype=dtype)
    else:
        return _load_checkpoint(name, kind, given(dtype=dtype, device=place))
    if place is None:
        return model
    return model.to(place)


def checked_device(device: str | None) -> "torch.device | None":
    """A device by its name."""
    import torch

    if device is None:
        return None
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise InvalidInputError(f"--device {device}: {str(error).splitlines()[0]}") from error
    return place


def _load_checkpoint(name: str, kind: Kind, placed: dict[str, Any]) -> Any:
    """A model of the hub or of a folder."""
    from tensorlens_tl.classifiers import is_classifier, load_classifier

    tried = "not a local folder, and not found on the Hugging Face Hub"
    if Path(name).is_dir():
        if kind == "hooked":
            raise InvalidInputError("--kind hooked: a folder is loaded as a TransformerBridge; leave --kind out.")
        tried = "the model in this folder cannot be loaded"
        kind = "bridge"
    try:
        if kind != "bridge":
            try:
                from transformer_lens import HookedTransformer

                return HookedTransformer.from_pretrained(name, **placed)
            except (ImportError, ValueError):  # TransformerLens 4, or a model that only a Bridge knows
                if kind == "hooked":
                    raise
        from transformer_lens.model_bridge import TransformerBridge

        if is_classifier(name):
            with suppress(UnsupportedModelError):  # the backbone alone, whose logits are then refused with the reason
                return load_classifier(name, **placed)
        return TransformerBridge.boot_transformers(name, **placed)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())
        if len(why) > 300:
            why = f"{why[:300]} …"
        raise InvalidInputError(f"--model {name}: {tried} ({type(error).__name__}: {why}).") from error


def named_program(name: str) -> Any:
    """The program of a model's name, ``"program:sort"`` or ``"program:sort:norm"``."""
    from tensorlens_tl import demo

    if name.partition(":")[0] != "program":
        raise InvalidInputError(
            f"--model {name}: this is known of programs only; use program:NAME, such as program:induction."
        )
    return demo.program(name.partition(":")[2].removesuffix(":norm"))


def write_result(result: Any, path: Path | None) -> None:
    """Save a result where a path is given, as its ending says."""
    if path is not None:
        print(f"saved to {result.save(path)}")


def task_of(args: argparse.Namespace, model: Any) -> Any:
    """The task with known answers that the arguments name, by default the model's, or induction."""
    from tensorlens_tl import evaluate

    if args.task is None and args.model.startswith("program:"):
        return named_program(args.model).answers(args.n or PROMPTS, seed=args.seed)
    name = args.task or args.model.partition(":")[2] or "induction"
    if name in ("recall", "brackets"):
        return getattr(evaluate, name)(args.n or PROMPTS, seed=args.seed)
    return evaluate.induction(args.n or PROMPTS, d_vocab=model.cfg.d_vocab, seed=args.seed)


COLUMNS = ("prompt", "text")
"""The columns of a table that prompts are read from, the first that it has."""

QUESTIONS = ("target", "minus", "query")
"""The columns of a table that say what is asked of each prompt."""

SHOWN = 5
"""Rows that an error lists by their numbers."""

PROMPTS_HELP = "a text file, one prompt a line, or a .csv, .jsonl or .parquet file with a column 'prompt' or 'text'"
"""What ``--prompts`` takes, for its help."""


def prompts_of(args: argparse.Namespace, model: Any, *, most: int = PROMPTS, length: int = 48) -> Any:
    """The prompts of a file, or `most` windows of the text that a bundled model was not trained on."""
    from tensorlens_tl import demo

    if args.prompts is None:
        if args.model not in ("demo", "demo:language", "demo:encoder", "demo:whitened"):
            raise InvalidInputError(
                f"--prompts: {args.model} has no text of its own here; pass a file, a prompt a line."
            )
        return demo.held_out_prompts(model, args.n or most, length)
    return read_prompts(args.prompts)


def check_prompts(args: argparse.Namespace) -> None:
    """Raise `InvalidInputError` before a model is loaded for a file that `read_prompts` cannot read, or one with
    `-n`."""
    path = getattr(args, "prompts", None)
    if path is None:
        return
    if getattr(args, "n", None) is not None:
        raise InvalidInputError("-n: it counts prompts that we make; with --prompts every line of the file is one.")
    read_prompts(path)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file; empty lines of a text file are left out."""
    from tensorlens_tl._row_files import FILES

    if path.suffix.lower() in FILES:
        rows, name = _rows(path)
        lines = [row[name] for row in rows]
    else:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"--prompts {path}: not a text file in UTF-8 ({error}).") from error
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise InvalidInputError(f"--prompts {path}: the file is empty.")
    return lines


def questions_of(path: Path | None) -> dict[str, list[Any]]:
    """What the columns `QUESTIONS` of a table say of each of its prompts; nothing of a text file, or of none."""
    from tensorlens_tl._row_files import FILES

    if path is None or path.suffix.lower() not in FILES:
        return {}
    rows, _ = _rows(path)
    columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in QUESTIONS if name in rows[0]}
    for name, values in columns.items():
        missing = next((number for number, value in enumerate(values) if value in (None, "")), None)
        if missing is not None:
            raise InvalidInputError(
                f"--prompts {path}: prompt {missing} has no {name!r}; fill it in, or leave the column out."
            )
    return columns


def _rows(path: Path) -> tuple[list[Mapping[str, Any]], str]:
    """The rows of a table, and the column that their prompts are in."""
    from tensorlens_tl._row_files import file_rows

    try:
        rows = list(file_rows(path))
    except InvalidInputError as error:
        raise InvalidInputError(f"--prompts: {str(error).removeprefix('rows: ')}") from error
    names = list(rows[0]) if rows else list(COLUMNS)
    name = next((column for column in COLUMNS if column in names), "")
    if not name:
        raise InvalidInputError(
            f"--prompts {path}: its columns are {', '.join(map(repr, names))}; call the one with the prompts "
            f"{' or '.join(map(repr, COLUMNS))}."
        )
    for number, row in enumerate(rows, 1):
        text = row.get(name)
        if not isinstance(text, str):
            raise InvalidInputError(f"--prompts {path}: {name!r} of row {number} is {text!r}, no text.")
    if not rows:
        raise InvalidInputError(f"--prompts {path}: the file is empty.")
    _check_filled(path, rows, name)
    return rows, name


def _check_filled(path: Path, rows: list[Mapping[str, Any]], name: str) -> None:
    """Raise `InvalidInputError` for empty prompts: without their rows, those that follow would have other numbers."""
    empty = [number for number, row in enumerate(rows, 1) if not row[name].strip()]
    if not empty:
        return
    which = f"row {empty[0]}"
    advice = "fill it in, or take the row out"
    if len(empty) > 1:
        which = f"rows {', '.join(map(str, empty[:SHOWN]))}"
        advice = "fill them in, or take the rows out"
    if len(empty) > SHOWN:
        which += f" and {len(empty) - SHOWN} more"
    raise InvalidInputError(
        f"--prompts {path}: {name!r} is empty in {which}; {advice}. Rows are counted from 1, without a header."
    )
