"""What questions cost on deep models that were loaded, in forwards of the bare model.

Llamas with random weights and 4, 16 and 48 layers are written by transformers and booted from their folder, so that
they have every hook that a loaded model has; SmolLM2 is measured as well where `make real` has fetched it. Prompts of
15 tokens, one thread and its processor time, the candidates of all models interleaved, minima.

    python benchmarks/depth.py               # this checkout
    python benchmarks/depth.py OTHER         # and another one (a git worktree), in turn
"""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from checkouts import HERE, Times, in_turn, main
from page import Lines, row, table
from timing import interleaved
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tensorlens_tl as tlens
from tensorlens_tl import circuits

LAYERS = (4, 16, 48)
POSITIONS = 15
ROUNDS = 2
PROCESSES = 2
TRAINED = Path(os.environ.get("TENSORLENS_REAL", Path(HERE) / ".real")) / "smollm2"

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
        "target and foil over components": lambda: circuits.logit_attribution(one, 5, minus=6, by="component"),
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


def times_of(folders: dict[str, str], names: tuple[str, ...] = ()) -> Times:
    """Seconds of each candidate, as ``"model/candidate"``; of some candidates, where names are given.

    The forward runs before each of the others: all are divided by it, and it is the shortest and so the noisiest.
    """
    runs: Candidates = {}
    for model, folder in folders.items():
        each = candidates(folder)
        forward = each.pop("forward")
        for name in names or each:
            runs[f"{model}/forward/{name}"], runs[f"{model}/{name}"] = forward, each[name]
    times: Times = {}
    for label, value in interleaved(runs, ROUNDS, time.thread_time).items():
        name = "/".join(label.split("/")[:2])
        times[name] = min(value, times.get(name, value))
    return times


def random_times(layers: tuple[int, ...], names: tuple[str, ...] = (), trained: dict[str, str] | None = None) -> Times:
    """`times_of` random Llamas, and of models in folders."""
    transformers.logging.disable_progress_bar()
    with ExitStack() as stack:
        written = {f"{count} layers": stack.enter_context(TemporaryDirectory()) for count in layers}
        for count, folder in zip(layers, written.values(), strict=True):
            llama(count, folder)
        return times_of(written | (trained or {}), names)


def seconds() -> Times:
    """Of each candidate, with the package that is imported here."""
    torch.set_num_threads(1)
    return random_times(LAYERS, trained={"SmolLM2": str(TRAINED)} if TRAINED.exists() else {})


def in_forwards(times: Times) -> Times:
    """Times in forwards of their model."""
    forwards = {name: value / times[f"{name.partition('/')[0]}/forward"] for name, value in times.items()}
    return {name: value for name, value in forwards.items() if not name.endswith("/forward")}


def depths() -> Lines:
    """## Questions about deep models, in forwards

    Llamas with random weights and SmolLM2 135M (30 layers), each loaded from a folder, explain two prompts of 15
    tokens. Processor time on one thread, in forward passes of the bare Hugging Face model in the same run, including
    its logits. A graph of a difference includes the difference. `python benchmarks/depth.py OTHER` alternates with
    another checkout.
    """
    costs = in_forwards(in_turn(__file__, processes=PROCESSES)[0])
    models = dict.fromkeys(name.partition("/")[0] for name in costs)
    yield table("question", *models)
    for question in dict.fromkeys(name.partition("/")[2] for name in costs):
        yield row(question, *(costs[f"{model}/{question}"] for model in models))


if __name__ == "__main__":
    main(__file__, seconds, in_forwards, PROCESSES)
