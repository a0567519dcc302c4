"""A Llama of 3.4 GB, in memory or with its blocks on disk; each in a process of its own.

    python benchmarks/offloaded.py in-memory FOLDER ROUNDS   # saves the weights and the answers
    python benchmarks/offloaded.py on-disk FOLDER ROUNDS     # nothing but the unembedding in memory; compares the answers

With 0 rounds nothing is timed.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from checkouts import json_of
from page import Lines, row, table
from shapes import bridge
from timing import interleaved

import tensorlens_tl as tlens

TOKENS = torch.arange(1, 33)[None]
PLACES = ("in-memory", "on-disk")
ROUNDS = 3
QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "target, one query": lambda frozen: frozen.operator().target(3, 5, query=-1),
    "target, all queries": lambda frozen: frozen.operator().target(3, 5, query="all"),
    "`input-x-gradient`": lambda frozen: tlens.attribute(frozen, method="input-x-gradient", target=3),
    "`attnlrp`": lambda frozen: tlens.attribute(frozen, method="attnlrp", target=3),
}


class Peak(threading.Thread):
    """Inside, how many bytes this process has at most that no file stands behind, beyond those at the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._over = threading.Event()

    def run(self) -> None:
        """Look every 5 ms."""
        before = anonymous()
        while not self._over.wait(0.005):
            self.bytes = max(self.bytes, anonymous() - before)

    def __enter__(self) -> "Peak":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def anonymous() -> int:
    """Bytes of this process that no file stands behind; from Linux' /proc."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=64,
        attn_implementation="eager",
        attention_bias=True,
        mlp_bias=True,
    )


def in_memory(folder: Path) -> Any:
    """The module with random weights, which are saved."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
    weights = module.state_dict()
    for name in weights:
        if name.endswith("bias"):
            weights[name].normal_(std=0.02)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "weights.safetensors")
    return module


def on_disk(folder: Path) -> Any:
    """The module of the saved weights, which accelerate reads block by block."""
    from accelerate import dispatch_model, init_empty_weights
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM

    file = str(folder / "weights.safetensors")
    with init_empty_weights(include_buffers=False):
        module = AutoModelForCausalLM.from_config(config(), attn_implementation="eager")
    index = {name: {"safetensors_file": file, "weight_name": name, "dtype": "float32"} for name in module.state_dict()}
    with safe_open(file, "pt") as weights:
        module.lm_head.weight = torch.nn.Parameter(weights.get_tensor("lm_head.weight"))
    where = {"model": "disk", "lm_head": "cpu"}
    dispatch_model(module, where, main_device="cpu", offload_dir=str(folder), offload_index=index, force_hooks=True)
    return module


def cold(job: Callable[[], Any], folder: Path) -> float:
    """Seconds of a job whose files are not in the system's cache when it begins."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def reads(frozen: Any) -> list[int]:
    """How often each block's weights are read for a target of all queries."""
    before = [block.loads for block in frozen.view.blocks]
    QUESTIONS["target, all queries"](frozen)
    return [block.loads - count for block, count in zip(frozen.view.blocks, before, strict=True)]


def answers(frozen: Any) -> dict[str, torch.Tensor]:
    """One query and B by the same products as in memory; all queries through others, which round otherwise."""
    operator = frozen.operator()
    last, every = (operator.target(3, 5, query=query) for query in (-1, "all"))
    return {
        "scores": last.scores,
        "bias": last.bias,
        "B": operator.bias,
        "all scores": every.scores,
        "gap": every.gap,
    }


def process(place: str, folder: Path, rounds: int) -> dict[str, Any]:
    """What one process measures."""
    from safetensors.torch import load_file, save_file

    module = {"in-memory": in_memory, "on-disk": on_disk}[place](folder)
    weights = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    with Peak() as peak:
        model = bridge(module, "LlamaForCausalLM", config())
        frozen = tlens.freeze(model, TOKENS)
        jobs: dict[str, Callable[[], Any]] = {"freeze": lambda: tlens.freeze(model, TOKENS)}
        jobs |= {name: partial(question, frozen) for name, question in QUESTIONS.items()}
        result: dict[str, Any] = {"weights": weights, "reads": reads(frozen)}
        if rounds:
            result["seconds"] = interleaved(jobs, rounds)
        if rounds and place == "on-disk":
            result["cold"] = {name: min(cold(job, folder) for _ in range(rounds)) for name, job in jobs.items()}
        tensors = {name: tensor.contiguous() for name, tensor in answers(frozen).items()}
    result["resident"] = peak.bytes
    result["captured"] = sum(each.numel() * each.element_size() for each in frozen.capture.activations.values())
    if place == "in-memory":
        save_file(tensors, folder / "answers.safetensors")
        return result
    expected = load_file(folder / "answers.safetensors")
    result["gap"] = float(expected["gap"].max())
    result["differences"] = {
        name: float(torch.linalg.vector_norm(tensors[name] - right) / torch.linalg.vector_norm(right))
        for name, right in expected.items()
    }
    return result


def offloaded() -> Lines:
    """## A model on disk beside the same in memory

    A Llama-like model of 16 layers with 3.4 GB of weights explains 32 tokens. The weights are on disk except for the
    unembedding, or in memory; each case runs in a separate process. "Cold" means that the system has not cached the
    file at first. Memory is the peak that all these calls add to the process, including captured activations but not
    the pages of the file. Processes run with `MALLOC_MMAP_THRESHOLD_=1000000`, because glibc would otherwise keep some
    freed memory.
    """
    if not Path("/proc/self/status").is_file() or not hasattr(os, "posix_fadvise"):
        yield "Not measured: memory is read from /proc, and files are dropped from the cache as Linux does it."
        return
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    with TemporaryDirectory() as folder:
        here, away = (json_of([sys.executable, __file__, place, folder, str(ROUNDS)], environment) for place in PLACES)
    yield table("what", "in memory", "on disk", "on disk, cold", "on disk ÷ in memory")
    for name, seconds in here["seconds"].items():
        there = away["seconds"][name]
        yield row(f"{name}, s", seconds, there, away["cold"][name], there / seconds)
    yield row("memory on disk ÷ weights", "", away["resident"] / away["weights"], "", "")


if __name__ == "__main__":
    print(json.dumps(process(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
