"""Arguments that several commands share, and what they stand for."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorlens_tl.errors import InvalidInputError

DTYPES = ("float32", "float64", "bfloat16")
PROMPTS = 32
TASKS = ("recall", "brackets", "induction")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, of which class, in which dtype, on which device."""
    parser.add_argument(
        "--model",
        default="demo",
        help="'demo', 'demo:NAME' (recall, brackets, relations, encoder, whitened), 'program:NAME' (a model that was "
        "written down, such as program:induction; program:induction:norm has norms), a Hugging Face name, or a folder",
    )
    parser.add_argument("--kind", choices=("hooked", "bridge"), help="model class (default: hooked where it exists)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", help="such as cpu, cuda or mps (default: the model's own)")
    parser.add_argument(
        "--allow-untrained",
        action="store_true",
        help="go on although the checkpoint lacks weights of the model, such as its head, which are then random",
    )


def add_import_argument(parser: argparse.ArgumentParser) -> None:
    """Files that register methods of one's own."""
    parser.add_argument(
        "--import",
        dest="imports",
        metavar="FILE",
        action="append",
        default=[],
        help="a Python file or module that registers methods or layer maps (may be given again)",
    )


def position(text: str) -> int | str:
    """A query of the command line: a number, or a text of the prompt."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def count(text: str) -> int:
    """A number of things, at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def run_imports(args: argparse.Namespace) -> None:
    """Run what ``--import`` names.

    Raises:
        InvalidInputError: no such file or module, or it fails.
    """
    import importlib
    import runpy

    for name in args.imports:
        try:
            if name.endswith(".py"):
                runpy.run_path(name, run_name=Path(name).stem)
            else:
                importlib.import_module(name)
        except Exception as error:
            raise InvalidInputError(f"--import {name}: {type(error).__name__}: {error}") from error


def check_output(path: Path | None, name: str = "--output") -> None:
    """Raise `InvalidInputError` before work starts where the output cannot be written."""
    if path is not None and path.is_dir():
        raise InvalidInputError(f"{name} {path}: that is a folder; name a file in it.")
    if path is not None and not path.parent.is_dir():
        raise InvalidInputError(f"{name} {path}: there is no folder {path.parent}.")


def named_model(args: argparse.Namespace, name: str | None = None, *, images: bool = False) -> Any:
    """The model that the arguments name (or `name` does), whatever its checkpoint has."""
    import torch

    chosen: str = args.model if name is None else name
    return load_model(chosen, args.kind, getattr(torch, args.dtype), args.device, images=images)


def loaded_model(
    args: argparse.Namespace, name: str | None = None, *, images: bool = False, logits: bool = True
) -> Any:
    """The same model, to be explained.

    Raises:
        InvalidInputError: see `load_model`; also a model whose weights, or whose head where `logits` are explained, its
            checkpoint does not have, unless the arguments allow it.
    """
    model = named_model(args, name, images=images)
    if not args.allow_untrained:
        refuse_untrained(model, args.model if name is None else name, logits=logits)
    return model


def refuse_untrained(model: Any, name: str, *, logits: bool) -> None:
    """Raise `InvalidInputError` where what is to be explained comes from weights that the checkpoint does not have."""
    from tensorlens_tl.models import ModelView

    view = ModelView(model)
    if view.untrained_stack:
        raise InvalidInputError(
            f"--model {name}: its checkpoint does not have {_some(view.untrained_stack)}; these are newly initialised, "
            "and what the model computes with them is noise. Load a checkpoint that has them, or pass "
            "--allow-untrained."
        )
    if logits and view.untrained_head:
        raise InvalidInputError(
            f"--model {name}: its checkpoint does not have {_some(view.untrained_head)}; these are newly initialised, "
            "and the logits are noise. Explain the hidden state instead (tensorlens-tl attribute TEXT --collapse "
            "in_out), load a checkpoint with its head, or pass --allow-untrained."
        )


def _some(names: Sequence[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def load_model(
    name: str, kind: str | None = None, dtype: Any = None, device: str | None = None, *, images: bool = False
) -> Any:
    """A model by name: ``"demo"``, ``"demo:recall"``, ``"program:sort"``, a hub name, or a folder (always a Bridge).

    ``images=True`` allows the embedded model that reads images, for a command that can give it some.

    Raises:
        InvalidInputError: the model cannot be loaded, or there is no such device; carries the loader's own message.
    """
    import torch

    from tensorlens_tl import demo

    dtype = torch.float32 if dtype is None else dtype
    try:
        where = None if device is None else torch.device(device)
        if where is not None:
            torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise InvalidInputError(f"--device {device}: {str(error).splitlines()[0]}") from error
    if name == "demo:digits" and not images:
        raise InvalidInputError("--model demo:digits: it reads images, and the commands take text; use it from Python.")
    if name.partition(":")[0] == "demo":
        model = demo.load_demo_model(kind, dtype, name=name.partition(":")[2] or "language")
        return model if where is None else model.to(where)
    if name.partition(":")[0] == "program":
        model = named_program(name).model(kind, norm=name.endswith(":norm"), dtype=dtype)
        return model if where is None else model.to(where)
    placed: dict[str, Any] = {"dtype": dtype} if where is None else {"dtype": dtype, "device": where}
    folder = Path(name).is_dir()
    if folder and kind == "hooked":
        raise InvalidInputError("--kind hooked: a folder is loaded as a TransformerBridge; leave --kind out.")
    try:
        if kind != "bridge" and not folder:
            try:
                from transformer_lens import HookedTransformer

                return HookedTransformer.from_pretrained(name, **placed)
            except (ImportError, ValueError):  # TransformerLens 4, or a model that only a Bridge knows
                if kind == "hooked":
                    raise
        from transformer_lens.model_bridge import TransformerBridge

        return TransformerBridge.boot_transformers(name, **placed)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())
        why = why if len(why) <= 300 else f"{why[:300]} …"
        tried = "the model in this folder cannot be loaded" if folder else "no such folder, and the hub gives no model"
        raise InvalidInputError(f"--model {name}: {tried} ({type(error).__name__}: {why}).") from error


def named_program(name: str) -> Any:
    """The program of a model's name, ``"program:sort"`` or ``"program:sort:norm"``.

    Raises:
        InvalidInputError: no program of that name.
    """
    from tensorlens_tl import demo

    if name.partition(":")[0] != "program":
        raise InvalidInputError(
            f"--model {name}: this is known of programs only; use program:NAME, such as program:induction."
        )
    return demo.program(name.partition(":")[2].removesuffix(":norm"))


def write_result(result: Any, title: str, path: Path | None) -> None:
    """Save a result where asked: ``.html`` is a page, ``.csv`` a table, anything else a file that `load` reads."""
    if path is None:
        return
    from tensorlens_tl.drawing.page import page

    if path.suffix == ".html":
        path.write_text(page(title, result.to_html(style=False)), encoding="utf-8")
    elif path.suffix == ".csv":
        result.to_dataframe().to_csv(path, index=False)
    else:
        result.save(path)
    print(f"saved to {path}")


def task_of(args: argparse.Namespace, model: Any) -> Any:
    """The task with known answers that is asked for: the model's own unless said, or induction."""
    from tensorlens_tl import evaluate

    if args.task is None and args.model.startswith("program:"):
        return named_program(args.model).answers(args.n or PROMPTS, seed=args.seed)
    name = args.task or args.model.partition(":")[2] or "induction"
    if name in ("recall", "brackets"):
        return getattr(evaluate, name)(args.n or PROMPTS, seed=args.seed)
    return evaluate.induction(args.n or PROMPTS, d_vocab=model.cfg.d_vocab, seed=args.seed)


def prompts_of(args: argparse.Namespace, model: Any, *, most: int = PROMPTS, length: int = 48) -> Any:
    """The prompts of a file, a line each, or `most` windows of the text that an embedded model was not trained on.

    Raises:
        InvalidInputError: no such file, an empty one, or a model without text.
    """
    from tensorlens_tl import demo

    if args.prompts is None:
        if args.model not in ("demo", "demo:language", "demo:encoder", "demo:whitened"):
            raise InvalidInputError(
                f"--prompts: {args.model} has no text of its own here; pass a file, a prompt a line."
            )
        return demo.held_out_prompts(model, args.n or most, length)
    if args.n is not None:
        raise InvalidInputError("-n: it counts prompts that we make; with --prompts every line of the file is one.")
    if not args.prompts.is_file():
        raise InvalidInputError(f"--prompts {args.prompts}: no such file.")
    lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise InvalidInputError(f"--prompts {args.prompts}: the file is empty.")
    return lines
