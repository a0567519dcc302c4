"""Seconds and megabytes at the sizes of SmolLM2 135M and Llama 3.2 1B; each size and length in a process of its own.

python benchmarks/sizes.py 1B 64   # prints JSON
"""

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from checkouts import json_of
from offloaded import Peak
from page import Lines, row, table
from shapes import bridge
from timing import THREADS, interleaved

import tensorlens_tl as tlens
from tensorlens_tl import circuits

SIZES = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "vocab_size": 49152},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
LENGTHS = (64, 256)
TARGET: dict[str, Any] = {"target": 3, "minus": 5}


def process(size: str, tokens: int) -> dict[str, Any]:
    """What one process measures: seconds, and megabytes that are added to the weights at most, and in the end."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(THREADS[-1])
    config = LlamaConfig(
        **SIZES[size], max_position_embeddings=1024, tie_word_embeddings=True, attn_implementation="eager"
    )
    module = LlamaForCausalLM(config)
    model = bridge(module, "LlamaForCausalLM", config)
    first = torch.randint(5, 1000, (1, tokens), generator=torch.Generator().manual_seed(0))
    second = first.clone()
    second[0, tokens // 2] += 1
    with torch.no_grad():
        model(first)  # what a process does once is not counted
        measured = interleaved({"forward": lambda: model(first)}, 0)
    measured |= interleaved({"freeze": lambda: tlens.freeze(model, first)}, 0)
    with Peak() as peak:
        frozen, other = (tlens.freeze(model, ids) for ids in (first, second))
        questions: dict[str, Callable[[], Any]] = {
            "tokens": lambda: tlens.attribute(frozen, **TARGET),
            "heads": lambda: circuits.logit_attribution(frozen, **TARGET),
            "difference": lambda: tlens.attribute(tlens.difference(frozen, other), **TARGET),
            "nodes": lambda: circuits.patch_scores(frozen, other, **TARGET, method="measured"),
        }
        measured |= interleaved(questions, 0)
    return measured | {
        "weights": megabytes(module.parameters()),
        "kept": megabytes(frozen.capture.activations.values()),
        "most": peak.bytes / 1e6,
    }


def megabytes(tensors: Iterable[torch.Tensor]) -> float:
    """What tensors take together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / 1e6


def sizes() -> Lines:
    """## In seconds and megabytes

    Llama-like models with random weights in float32 on this CPU, with all cores. Each call runs once, so the times
    include what a model's first call computes. "A forward" is the model's own forward pass through its hook points;
    "freeze" includes the proof. Both prompts are frozen before they are compared. "Kept" is the size of one pass; "at
    most" is the peak memory of all these calls on top of the weights, including two passes.
    """
    if not Path("/proc/self/status").is_file():
        yield "Not measured: memory is read from Linux' /proc."
        return
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    yield table(
        "model", "weights, MB", "tokens", "a forward, s", "freeze, s", "tokens' scores, s", "heads' scores, s",
        "difference of two prompts, s", "heads and MLPs measured by patching, s", "kept, MB", "at most, MB",
    )  # fmt: skip
    for size in SIZES:
        for tokens in LENGTHS:
            of = json_of([sys.executable, __file__, size, str(tokens)], environment)
            times = [of[name] for name in ("forward", "freeze", "tokens", "heads", "difference", "nodes")]
            yield row(f"{size}", f"{of['weights']:.0f}", tokens, *times, f"{of['kept']:.0f}", f"{of['most']:.0f}")


if __name__ == "__main__":
    print(json.dumps(process(sys.argv[1], int(sys.argv[2]))))
