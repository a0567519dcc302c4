"""What questions cost on deep models that were loaded, in forwards of the bare model: no cost of ours grows faster.

Llamas with random weights and 4, 16 and 48 layers are written by transformers and booted from their folder, so that
they have every hook that a loaded model has. A folder that is named as an argument is measured as well. Prompts of 15
tokens, one thread and its processor time, the candidates of all models interleaved, minima.

    python benchmarks/depth.py
    python benchmarks/depth.py path/to/SmolLM2
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from timing import interleaved
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tensorlens_tl as tlens
from tensorlens_tl import circuits

LAYERS = (4, 16, 48)
POSITIONS = 15
ROUNDS = 3

Candidates = dict[str, Callable[[], Any]]


def candidates(folder: str) -> Candidates:
    """By name; ``"forward"``, of the bare model of the same folder, is the unit."""
    bare = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = TransformerBridge.boot_transformers(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, bare.config.vocab_size, (2, POSITIONS), generator=generator)
    one, other = (tlens.freeze(model, prompt[None]) for prompt in prompts)

    @torch.no_grad()
    def forward() -> None:
        bare(prompts[:1])

    return {
        "forward": forward,
        "freeze": lambda: tlens.freeze(model, prompts[:1]),
        "target and foil over components": lambda: circuits.logit_attribution(one, 5, minus=6),
        "attnlrp": lambda: tlens.attribute(one, 5, method="attnlrp"),
        "gim": lambda: tlens.attribute(one, 5, method="gim"),
        "difference": lambda: tlens.difference(one, other),
        "nodes by gradient": lambda: circuits.patch_scores(one, other, 5, method="gradient"),
        "edges of a difference": lambda: circuits.edge_scores(one, other, 5, method="difference"),
        "graph of a difference": lambda: circuits.contribution_graph(tlens.difference(one, other), 5),
        "top paths": lambda: circuits.top_paths(one, 5),
    }


def llama(layers: int, folder: str) -> None:
    """Write one with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(config.vocab_size)}, "w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2").save_pretrained(folder)


def costs(folders: dict[str, str], names: tuple[str, ...] = ()) -> dict[str, dict[str, float]]:
    """Forwards of each candidate, by the name of its model; of some candidates, where names are given."""
    by_model = {model: candidates(folder) for model, folder in folders.items()}
    runs = {
        (model, name): run
        for model, each in by_model.items()
        for name, run in each.items()
        if name in ("forward", *(names or each))
    }
    seconds = interleaved(runs, ROUNDS, time.thread_time)
    return {
        model: {
            name: seconds[model, name] / seconds[model, "forward"]
            for name in each
            if name != "forward" and (model, name) in seconds
        }
        for model, each in by_model.items()
    }


def random_costs(layers: tuple[int, ...], names: tuple[str, ...] = (), *folders: str) -> dict[str, dict[str, float]]:
    """`costs` of random Llamas, and of models in folders."""
    transformers.logging.disable_progress_bar()
    with ExitStack() as stack:
        written = {f"{count} layers": stack.enter_context(TemporaryDirectory()) for count in layers}
        for count, folder in zip(layers, written.values(), strict=True):
            llama(count, folder)
        return costs(written | {folder: folder for folder in folders}, names)


def main() -> None:
    torch.set_num_threads(1)
    by_model = random_costs(LAYERS, (), *sys.argv[1:])
    print(f"{'':34}" + "".join(f"{name[-14:]:>16}" for name in by_model))
    for name in next(iter(by_model.values())):
        print(f"{name:34}" + "".join(f"{each[name]:16.2f}" for each in by_model.values()))


if __name__ == "__main__":
    main()
