"""Measure, and write `RESULTS.md`: every figure is a ratio within one run.

Candidates are interleaved and minima taken, because the machines are noisy. A run whose plain forward falls
below 40 % of the matrix-product rate measured beside it is discarded, and said so. "Forward" means the blocks only.

    make bench
"""

import os
import platform
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import tensorlens_tl as tlens
from tensorlens_tl.testing import Allocations

RESULTS = Path(__file__).parent / "RESULTS.md"


def interleaved(candidates: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of each candidate, minima over interleaved rounds after one warm-up."""
    best = dict.fromkeys(candidates, float("inf"))
    for number in range(rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if number:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def gpt2_small(n_layers: int = 12) -> Any:
    """GPT-2 small's shape with random weights, of whichever class this TransformerLens has."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_layer=n_layers, attn_implementation="eager")
    module = GPT2LMHeadModel(config).eval()
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

    return build_bridge_from_module(module, "GPT2LMHeadModel", hf_config=config).eval()


def blocks_flops(d_model: int, d_mlp: int, layers: int, tokens: int, score_products: bool) -> float:
    """Multiply-adds × 2 of a pass through the blocks: all four attention matrices, or only V and O when frozen."""
    matrices = (4 if score_products else 2) * d_model**2 + 2 * d_model * d_mlp
    mixing = (2 if score_products else 1) * tokens * d_model
    return 2.0 * layers * tokens * (matrices + mixing)


def embedded_model(threads: int) -> list[str]:
    """Freezing and one target map on the embedded model."""
    torch.set_num_threads(threads)
    model = tlens.load_demo_model()
    stream = model.tokenizer(" ".join(tlens.demo.held_out_text()), add_special_tokens=False)["input_ids"]
    lines = []
    for length in (32, 64, 128, 256):
        tokens = torch.tensor([[0, *stream[: length - 1]]])
        frozen = tlens.freeze(model, tokens)

        def forward(tokens: torch.Tensor = tokens) -> None:
            with torch.no_grad():
                model(tokens, stop_at_layer=4)

        seconds = interleaved(
            {
                "forward": forward,
                "freeze": lambda tokens=tokens: tlens.freeze(model, tokens),
                "freeze without proof": lambda tokens=tokens: tlens.freeze(model, tokens, verify=False),
                "target": lambda frozen=frozen: frozen.operator().target(5),
                "freeze and target": lambda tokens=tokens: tlens.freeze(model, tokens).operator().target(5),
            },
            rounds=25,
        )
        base = seconds.pop("forward")
        cells = " | ".join(f"{value / base:.2f}" for value in seconds.values())
        lines.append(f"| {threads} | {length} | {1000 * base:.2f} | {cells} |")
    return lines


def norm_slice(threads: int, tokens: int = 64, rows: int = 96) -> list[str]:
    """The exact norm slice against batched autograd through the hook-frozen model; both are linear in rows."""
    torch.set_num_threads(threads)
    model = gpt2_small()
    ids = torch.randint(0, 50257, (1, tokens))
    frozen = tlens.freeze(model, ids)
    op = frozen.operator()
    width = op.x.shape[-1]
    basis = torch.eye(width)[:rows]
    a, b = torch.randn(rows * tokens, width), torch.randn(width, 4 * width)

    from transformers import GPT2Config, GPT2Model

    plain = GPT2Model(GPT2Config(attn_implementation="eager")).eval()  # no bridge around it

    def forward() -> None:
        with torch.no_grad():
            plain(ids, use_cache=False)

    def pull() -> None:
        for part in basis.split(32):
            placed = torch.zeros(len(part), 1, tokens, width)
            placed[:, 0, -1] = part
            op.pull(placed).square().sum((0, -1))

    def autograd(chunk: int) -> Callable[[], None]:
        leaf = op.x.clone().requires_grad_(True)
        seen = {}
        hooks = [(frozen.points.blocks[0].resid_pre, lambda x, *, hook: leaf), *frozen.fwd_hooks()]
        hooks.append((frozen.points.unembed_in, lambda x, *, hook: seen.__setitem__("x", x)))
        model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)

        def run() -> None:
            for part in basis.split(chunk):
                seeds = torch.zeros(len(part), 1, tokens, width)
                seeds[:, 0, -1] = part
                (g,) = torch.autograd.grad(seen["x"], leaf, seeds, is_grads_batched=True, retain_graph=True)
                g.square().sum((0, -1))

        return run

    seconds = interleaved(
        {
            "forward": forward,
            "product": lambda: a @ b,
            "pull": pull,
            **{f"autograd, {chunk} rows at once": autograd(chunk) for chunk in (8, 32, 96)},
        },
        rounds=4,
    )
    rate = 2.0 * rows * tokens * width * 4 * width / seconds["product"]
    forward_rate = blocks_flops(width, 4 * width, 12, tokens, True) / seconds["forward"]
    if forward_rate < 0.4 * rate:
        return [
            f"| {threads} | discarded: the forward ran at {forward_rate / rate:.0%} of the matrix-product rate ||||"
        ]
    pull_rate = rows * blocks_flops(width, 4 * width, 12, tokens, False) / seconds["pull"]
    best = min((name for name in seconds if name.startswith("autograd")), key=lambda name: seconds[name])
    return [
        f"| {threads} | {rate / 1e9:.0f} | {forward_rate / rate:.0%} | {pull_rate / rate:.0%} | "
        f"{seconds[best] / seconds['pull']:.2f} ({best.removeprefix('autograd, ')}) |"
    ]


def methods_on_bert(threads: int, tokens: int = 64) -> list[str]:
    """GlobEnc, ALTI and DecompX at BERT-base size, freezing and proof included, against one plain forward."""
    from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
    from transformers import BertConfig, BertForMaskedLM, BertModel

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = BertConfig(attn_implementation="eager")
    model = build_bridge_from_module(BertForMaskedLM(config).eval(), "BertForMaskedLM", hf_config=config).eval()
    plain = BertModel(config).eval()
    ids = torch.randint(5, 30000, (1, tokens))

    def forward() -> None:
        with torch.no_grad():
            plain(ids)

    def run(method: str, **options: Any) -> Callable[[], Any]:
        return lambda: tlens.attribute(model, ids, method=method, **options)

    calls = {
        "GlobEnc": run("globenc"),
        "ALTI": run("alti"),
        "DecompX vectors": run("decompx", aggregate="vector"),
    }
    seconds = interleaved({"forward": forward, **calls}, rounds=3)
    lines = []
    for name, call in calls.items():
        with Allocations() as memory:
            call()
        ratio = seconds[name] / seconds["forward"]
        lines.append(f"| {threads} | {name} | {ratio:.1f} | {seconds[name]:.2f} | {memory.peak / 2**20:.0f} |")
    return lines


def causal_triangle(threads: int, tokens: int = 64) -> list[str]:
    """Contributions of a causal model with the empty triangle skipped, and without."""
    torch.set_num_threads(threads)
    model = gpt2_small(n_layers=4)
    frozen = tlens.freeze(model, torch.randint(0, 50257, (1, tokens)))
    whole = tlens.freeze(model, frozen.tokens)
    whole.__dict__["causal"] = False  # pretend not to know
    seconds = interleaved(
        {"skipped": frozen.operator().contributions, "whole": whole.operator().contributions}, rounds=3
    )
    return [f"| {threads} | {tokens} | {seconds['whole'] / seconds['skipped']:.2f} |"]


def main() -> None:
    cores = os.cpu_count() or 1
    threads = [1, 2] if cores >= 2 else [1]
    load = os.getloadavg()
    text = [
        "# Results",
        "",
        'Written by `make bench`. Every figure is a ratio within one run: candidates interleaved, minima taken; "forward" means the',
        "blocks only.",
        "",
        f"{date.today()} · {platform.machine()}, {cores} cores, load average {load[0]:.2f} at the start · Python {platform.python_version()} · "
        f"torch {torch.__version__} · transformer-lens {version('transformer-lens')} · float32",
        "",
        "## Freezing and one target map, embedded model (4 layers, width 128), in forwards",
        "",
        "| threads | tokens | forward, ms | freeze with proof | freeze without | target | freeze and target |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for count in threads:
        text += embedded_model(count)
    text += [
        "",
        "## Exact norm slice, GPT-2-small shape (random weights), 64 tokens",
        "",
        "The share is of the rate of one large matrix product measured in the same run; autograd differentiates the hook-frozen",
        "model in batches, and its best batch size is taken. 96 of the 768 rows are timed, since both are linear in rows.",
        "",
        "| threads | matrix product, GFLOP/s | forward's share | pull's share | autograd ÷ pull |",
        "| --- | --- | --- | --- | --- |",
    ]
    for count in threads:
        text += norm_slice(count)
    text += [
        "",
        "## Methods at BERT-base size (random weights), 64 tokens, freezing and proof included",
        "",
        "In forwards of the plain encoder in the same run; peak memory of tensors allocated beyond the model's own.",
        "",
        "| threads | method | forwards | seconds | peak, MiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for count in threads[-1:]:
        text += methods_on_bert(count)
    text += [
        "",
        "## The empty triangle of a causal model",
        "",
        "| threads | tokens | contributions without skipping ÷ with |",
        "| --- | --- | --- |",
    ]
    for count in threads[-1:]:
        text += causal_triangle(count)
    RESULTS.write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


if __name__ == "__main__":
    main()
