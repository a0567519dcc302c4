"""Rows of a data set, each candidate in a process of its own: how many a second, and how much memory.

    python benchmarks/data_sets.py CANDIDATE FOLDER ROWS     # one of them, as JSON

`INSEQ_PYTHON` names an interpreter that has inseq (`pip install inseq`), where it is to be measured as well.
"""

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from checkouts import json_of
from page import Lines, row, table

ROWS, ROUNDS = 2000, 2
PLAIN = "plain forward, batched"
SMALLER = (512, 2048)
"""Tokens a batch, beside those that are the default."""
TARGET = 5
"""A token: which one it is changes nothing."""


def resident() -> float:
    """This process' resident memory, in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def rows_of_text(count: int) -> list[dict[str, Any]]:
    """Windows of the held-out text, 16 to 79 tokens long, as token ids."""
    import tensorlens_tl as tlens

    windows = tlens.demo.held_out_prompts(tlens.load_demo_model(), count, 79)
    return [{"id": n, "text": window[: 16 + (29 * n) % 64].tolist()} for n, window in enumerate(windows)]


def forwards(model: Any, rows: list[dict[str, Any]], out: Path, tokens_per_batch: int = 8192) -> None:
    """The plain model over the same batches."""
    import torch

    from tensorlens_tl.datasets.folder import planned

    texts = [row["text"] for row in rows]
    tokens = [model.to_tokens(text)[0] if isinstance(text, str) else torch.tensor(text) for text in texts]
    with torch.no_grad():
        for batch in planned([len(ids) for ids in tokens], [], tokens_per_batch)[0]:
            model(torch.nn.utils.rnn.pad_sequence([tokens[row] for row in batch], batch_first=True))


def attributed(model: Any, rows: list[dict[str, Any]], out: Path, **options: Any) -> None:
    import tensorlens_tl as tlens

    tlens.attribute_dataset(model, rows, out, target=TARGET, progress=False, **options)


def looped(model: Any, rows: list[dict[str, Any]], out: Path, **options: Any) -> None:
    """A loop that a user would write, which holds everything."""
    import tensorlens_tl as tlens

    kept = [tlens.attribute(model, row["text"], target=TARGET, **options) for row in rows]
    assert len(kept) == len(rows)


def by_inseq(model: Any, rows: list[dict[str, Any]], out: Path) -> None:
    """inseq's input × gradient of the same token after the same rows; it runs decoders one row at a time."""
    texts = [row["text"] for row in rows]
    model.attribute(texts, [row["with_target"] for row in rows], batch_size=32, show_progress=False)


def with_effects(model: Any, rows: list[dict[str, Any]], out: Path) -> None:
    attributed(model, rows, out, method="logit_attribution", by="head")


def by_gradient(work: Callable[..., None]) -> Callable[..., None]:
    return lambda model, rows, out: work(model, rows, out, method="input-x-gradient")


def by_batch() -> Iterator[tuple[str, Callable[..., None]]]:
    """A plain forward and ours in smaller batches."""
    for size in SMALLER:
        for name, work in ((PLAIN, forwards), ("`attribute_dataset`", attributed)):
            yield f"{name}{_smaller(size)}", partial(work, tokens_per_batch=size)


def _smaller(size: int) -> str:
    return f", {size} tokens a batch"


OURS = {
    PLAIN: forwards,
    "`attribute_dataset`": attributed,
    "loop over `attribute`": looped,
    '`attribute_dataset(method="logit_attribution", by="head")`': with_effects,
    **dict(by_batch()),
}
BESIDE_INSEQ = {
    PLAIN: forwards,
    '`attribute_dataset(method="input-x-gradient")`': by_gradient(attributed),
    'loop over `attribute(method="input-x-gradient")`': by_gradient(looped),
    "inseq, `input_x_gradient`": by_inseq,
}


def saved_gpt2(folder: Path, **shape: int) -> None:
    """A random GPT-2 of a shape, the bundled model's by default, with its tokenizer, as Hugging Face saves them."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import tensorlens_tl as tlens

    tokenizer: Any = tlens.load_demo_model().tokenizer
    torch.manual_seed(0)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    bundled = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 256, "vocab_size": len(tokenizer)}
    config = GPT2Config(**bundled | shape | ends)
    GPT2LMHeadModel(config).eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measured(candidate: str, folder: Path, count: int) -> dict[str, Any]:
    """Seconds of the work alone, the memory it added to what was there before, and that after every tenth of it."""
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))[:count]
    saved = folder / "gpt2"
    if "inseq" in candidate:
        import inseq  # pyright: ignore[reportMissingImports]

        work, model = by_inseq, inseq.load_model(str(saved), "input_x_gradient", device="cpu")
    else:
        import torch

        import tensorlens_tl as tlens

        model = tlens.load_demo_model()
        if saved.is_dir():
            from transformer_lens.model_bridge import TransformerBridge
            from transformers import GPT2LMHeadModel

            module = GPT2LMHeadModel.from_pretrained(saved, attn_implementation="eager")
            model = TransformerBridge.boot_transformers(str(saved), hf_model=module, dtype=torch.float32)
        work = (BESIDE_INSEQ if saved.is_dir() else OURS)[candidate]
    out = folder / f"run-{os.getpid()}"
    work(model, rows[:4], out.with_name(f"{out.name}-warm"))  # what is loaded once
    before, samples, over = resident(), list[float](), threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            samples.append(resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    work(model, rows, out)
    seconds = time.perf_counter() - start
    over.set()
    watcher.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # kilobytes, on Linux
    tenth = max(1, len(samples) // 10)
    late = [max(samples[at : at + tenth]) - before for at in range(0, len(samples), tenth)]
    return {"seconds": seconds, "peak": max(0.0, peak - before), "late": late}


def in_turn(candidates: dict[str, str], folder: Path, count: int) -> dict[str, dict[str, Any]]:
    """Every candidate in processes of its own, in turn: the least of their seconds, medians of their memory."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, interpreter in candidates.items():
            paths = {} if "inseq" in name else {"PYTHONPATH": str(Path(__file__).parents[1])}
            environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | paths
            command = [interpreter, __file__, name, str(folder), str(count)]
            found[name].append(json_of(command, environment))
    return {
        name: {
            "seconds": min(one["seconds"] for one in made),
            "peak": median(one["peak"] for one in made),
            "late": made[-1]["late"],
        }
        for name, made in found.items()
    }


def data_sets() -> Lines:
    """## Rows of a data set: how many a second, and how much memory

    2,000 rows of held-out text, 16 to 79 tokens long, on the bundled model, and 200 of them on a random GPT-2 of its
    shape, compared with inseq. Candidates take turns, each in separate processes that have already loaded the model and
    the libraries. Memory is what the work adds to the process, and by how much the peak of its second half exceeds that
    of its first.
    """
    if not Path("/proc/self/statm").is_file():
        yield "Not measured: resident memory is read from /proc."
        return
    yield table("model", "what", "rows", "rows/s", "÷ plain forward's", "memory, MB", "more in the second half, MB")
    for *cells, peak, grown in _measured_in_turn():
        yield row(*cells, f"{peak:.0f}", f"{grown:.0f}")
    if not os.environ.get("INSEQ_PYTHON"):
        yield "\ninseq was not measured: `INSEQ_PYTHON` names no interpreter that has it."


def _measured_in_turn(count: int = ROWS) -> Iterator[tuple[Any, ...]]:
    """Lines of the table: candidate, rows a second, share of the plain forward's, peak MB, its growth from a tenth on."""
    inseq = os.environ.get("INSEQ_PYTHON", "")
    for candidates, few in ((OURS, count), (BESIDE_INSEQ, min(count, 200))):
        interpreters = {
            name: inseq if "inseq" in name else sys.executable for name in candidates if inseq or "inseq" not in name
        }
        with TemporaryDirectory() as place:
            folder = Path(place)
            rows = rows_of_text(few)
            if candidates is BESIDE_INSEQ:
                saved_gpt2(folder / "gpt2")
                import tensorlens_tl as tlens

                tokenizer: Any = tlens.load_demo_model().tokenizer
                for text in rows:  # texts that are the same tokens again for inseq, which begins each by itself
                    ids = text["text"][1:]
                    text["text"] = tokenizer.decode(ids)
                    text["with_target"] = tokenizer.decode([*ids, TARGET])
            (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
            made = in_turn(interpreters, folder, few)
        shape = "bundled" if candidates is OURS else "random GPT-2"
        for name, one in made.items():
            size = next((size for size in map(_smaller, SMALLER) if name.endswith(size)), "")
            base = made[f"{PLAIN}{size}"]["seconds"]
            late = one["late"]
            grown = max(late[len(late) // 2 :]) - max(late[: len(late) // 2]) if len(late) > 3 else 0.0
            yield shape, name, few, few / one["seconds"], base / one["seconds"], one["peak"], grown


if __name__ == "__main__":
    chosen, where, number = sys.argv[1:]
    print(json.dumps(measured(chosen, Path(where), int(number))))
