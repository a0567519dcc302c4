"""Arguments that several commands share, and what they stand for."""

import argparse
from pathlib import Path
from typing import Any

from tensorlens_tl.errors import InvalidInputError

DTYPES = ("float32", "float64", "bfloat16")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, of which class, in which dtype, on which device."""
    parser.add_argument(
        "--model",
        default="demo",
        help="'demo', 'demo:NAME' (recall, brackets, relations, encoder), a Hugging Face name, or a local folder",
    )
    parser.add_argument("--kind", choices=("hooked", "bridge"), help="model class (default: hooked where it exists)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", help="such as cpu, cuda or mps (default: the model's own)")


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
    return int(text) if text.lstrip("-").isdigit() else text


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


def check_output(path: Path | None) -> None:
    """Raise `InvalidInputError` before work starts where the output cannot be written."""
    if path is not None and not path.parent.is_dir():
        raise InvalidInputError(f"--output {path}: there is no folder {path.parent}.")


def loaded_model(args: argparse.Namespace) -> Any:
    """The model that the arguments name."""
    import torch

    return load_model(args.model, args.kind, getattr(torch, args.dtype), args.device)


def load_model(name: str, kind: str | None = None, dtype: Any = None, device: str | None = None) -> Any:
    """A model by name: ``"demo"``, ``"demo:recall"``, a hub name, or a folder (always a TransformerBridge).

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
    if name.partition(":")[0] == "demo":
        model = demo.load_demo_model(kind, dtype, name=name.partition(":")[2] or "language")
        return model if where is None else model.to(where)
    placed: dict[str, Any] = {} if where is None else {"device": where}
    try:
        if kind != "bridge" and not Path(name).exists():
            try:
                from transformer_lens import HookedTransformer

                return HookedTransformer.from_pretrained(name, dtype=dtype, **placed)
            except ImportError:
                if kind == "hooked":
                    raise
        from transformer_lens.model_bridge import TransformerBridge

        return TransformerBridge.boot_transformers(name, dtype=dtype, **placed)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        why = str(error).strip().split("\n", 1)[0][:200]
        raise InvalidInputError(
            f"--model {name}: no such folder, and it cannot be loaded from the hub ({type(error).__name__}: {why})."
        ) from error


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
