"""One process of `test_a_model_of_three_gigabytes`: a Llama of that size, in memory or with its blocks on disk.

``python large_model.py in-memory FOLDER`` makes it, saves its weights and what is asked of it;
``python large_model.py offloaded FOLDER`` asks the same with nothing but the unembedding in memory.
"""

import importlib
import json
import sys
import threading
import time
from pathlib import Path

import torch
from accelerate import dispatch_model, init_empty_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import tensorlens_tl as tlens

CONFIG = LlamaConfig(
    vocab_size=8192, hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16,
    num_key_value_heads=16, max_position_embeddings=64, attn_implementation="eager",
    attention_bias=True, mlp_bias=True,
)  # fmt: skip
TOKENS = torch.arange(1, 33)[None]


def wrapped(module):
    builder = importlib.import_module("transformer_lens.model_bridge.sources._bridge_builder")
    return builder.build_bridge_from_module(module, "LlamaForCausalLM", hf_config=CONFIG).eval()


def answers(frozen):
    """One query and B by the same products as in memory; all queries through others, which round otherwise."""
    operator = frozen.operator()
    last, every = (operator.target(3, 5, query=query) for query in (-1, "all"))
    return {"scores": last.scores, "bias": last.bias, "B": operator.bias, "all scores": every.scores,
            "gap": every.gap}  # fmt: skip


def anonymous():
    """Bytes of this process that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """The most memory that the process has while this runs."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = 0, False

    def run(self):
        while not self.over:
            self.most = max(self.most, anonymous())
            time.sleep(0.005)


def in_memory(folder):
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager").eval()
    weights = module.state_dict()
    for name in weights:
        if name.endswith("bias"):
            weights[name].normal_(std=0.02)
    save_file({name: weight.contiguous() for name, weight in weights.items()}, str(folder / "weights.safetensors"))
    frozen = tlens.freeze(wrapped(module), TOKENS)
    save_file({name: made.contiguous() for name, made in answers(frozen).items()}, str(folder / "answers.safetensors"))
    return {"weights": sum(weight.numel() * weight.element_size() for weight in weights.values())}


def offloaded(folder):
    with init_empty_weights(include_buffers=False):
        module = AutoModelForCausalLM.from_config(CONFIG, attn_implementation="eager").eval()
    before = anonymous()
    names = {name: {"safetensors_file": str(folder / "weights.safetensors"), "weight_name": name, "dtype": "float32"}
             for name in module.state_dict()}  # fmt: skip
    with safe_open(str(folder / "weights.safetensors"), "pt") as file:
        module.lm_head.weight = torch.nn.Parameter(file.get_tensor("lm_head.weight"))
    dispatch_model(
        module, {"model": "disk", "lm_head": "cpu"}, main_device="cpu", offload_dir=str(folder), offload_index=names,
        force_hooks=True,
    )  # fmt: skip
    peak = Peak()
    peak.start()
    started = time.perf_counter()
    frozen = tlens.freeze(wrapped(module), TOKENS)
    freezing = time.perf_counter() - started
    counts = [block.loads for block in frozen.view.blocks]
    started = time.perf_counter()
    frozen.operator().target(3, 5, query="all")
    pulling = time.perf_counter() - started
    counts = [block.loads - count for block, count in zip(frozen.view.blocks, counts, strict=True)]
    made = answers(frozen)
    peak.over = True
    peak.join()
    expected = load_file(str(folder / "answers.safetensors"))
    return {
        "resident": peak.most - before,
        "cache": sum(kept.numel() * kept.element_size() for kept in frozen.capture.activations.values()),
        "reads": counts,
        "layers": frozen.n_layers,
        "differences": {
            name: float(torch.linalg.vector_norm(made[name] - right) / torch.linalg.vector_norm(right))
            for name, right in expected.items()
        },
        "gap": float(expected["gap"].max()),
        "seconds": {"freezing": freezing, "pulling": pulling},
    }


if __name__ == "__main__":
    print(json.dumps({"in-memory": in_memory, "offloaded": offloaded}[sys.argv[1]](Path(sys.argv[2]))))
