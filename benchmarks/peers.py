"""Rows of a data set beside other libraries: the same rows, targets and weights, in one process.

A forward is that of the plain Hugging Face model over all rows in one batch. One thread, processor time, so that what
else a machine runs does not count; candidates are interleaved, and minima taken. Peers are measured where they are
installed, and are no dependency of this package: inseq and captum beside it need ``pip install --no-deps inseq captum
treescope``, as inseq pins an older typeguard.

    python benchmarks/run.py peers
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from data_sets import saved_gpt2
from page import Lines, table
from timing import interleaved
from torch import Tensor

import tensorlens_tl as tlens
from tensorlens_tl.passes import one_reading

ROWS, STEPS, ROUNDS = 6, 5, 2
PEERS = ("inseq", "captum", "lxt")
GPT2_SMALL = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257}


@dataclass
class Rows:
    """Texts of one length that tokenize to themselves, and the token after each, in every form that a peer takes."""

    ids: Tensor
    answers: Tensor
    texts: list[str]
    with_answers: list[str]

    @classmethod
    def of(cls, tokenizer: Any, count: int, length: int) -> "Rows":
        """Windows of the held-out text."""
        chosen: list[list[int]] = []
        texts: list[tuple[str, str]] = []
        for window in tlens.demo.held_out_prompts(tlens.load_demo_model(), 20 * count, length + 1):
            ids = window[: length + 1].tolist()
            forms = tokenizer.decode(ids[1:-1]), tokenizer.decode(ids[1:])
            tokenized = [tokenizer(text)["input_ids"] for text in forms]
            if tokenized in ([ids[:-1], ids], [ids[1:-1], ids[1:]]):
                chosen.append(ids if tokenized[1] == ids else ids[1:])
                texts.append(forms)
            if len(chosen) == count:
                break
        tokens = torch.tensor(chosen)
        return cls(tokens[:, :-1], tokens[:, -1], *map(list, zip(*texts, strict=True)))

    def tables(self) -> list[dict[str, Any]]:
        """As `attribute_dataset` reads them."""
        pairs = zip(self.ids.tolist(), self.answers.tolist(), strict=True)
        return [{"text": ids, "answer": answer} for ids, answer in pairs]


def ours(saved: Path, rows: Rows) -> dict[str, Callable[[], Any]]:
    """What `attribute_dataset` does with a batch: proof, attribution and the table that it writes."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import GPT2LMHeadModel

    module = GPT2LMHeadModel.from_pretrained(saved, attn_implementation="eager")
    model = TransformerBridge.boot_transformers(str(saved), hf_model=module, dtype=torch.float32)
    columns = {"id": [*range(len(rows.ids))], "text": rows.ids.tolist(), "answer": rows.answers.tolist()}

    def run(**options: Any) -> Tensor:
        batch = tlens.BatchAttributor(lambda: model, columns={"target": "answer"}, **options)
        return torch.tensor(batch(columns)["scores"].to_pylist())

    return {
        "`tensorlens`, every block proved at every token": run,
        "`tensorlens`, proved at 8 tokens a row": partial(run, verify="sample"),
        "`input-x-gradient`": partial(run, method="input-x-gradient"),
        f"`integrated-gradients`, {STEPS} steps": partial(run, method="integrated-gradients", steps=STEPS),
    }


def by_captum(module: Any, rows: Rows) -> dict[str, Callable[[], Any]]:
    """captum, all rows in one batch."""
    from captum.attr import (  # pyright: ignore[reportMissingImports]
        LayerGradientXActivation,
        LayerIntegratedGradients,
    )

    def logits(ids: Tensor, answers: Tensor) -> Tensor:
        return module(ids).logits[torch.arange(len(ids)), -1, answers]

    read = module.transformer.drop  # gives what enters the first block
    product = LayerGradientXActivation(logits, read)
    integrated = LayerIntegratedGradients(logits, module.transformer.wte)
    zeros = torch.zeros_like(rows.ids)

    def input_x_gradient() -> Tensor:
        return product.attribute(rows.ids, additional_forward_args=(rows.answers,)).sum(-1).detach()

    def integrated_gradients() -> Any:
        return integrated.attribute(rows.ids, zeros, additional_forward_args=(rows.answers,), n_steps=STEPS)

    return {
        "captum, `LayerGradientXActivation`": input_x_gradient,
        f"captum, `LayerIntegratedGradients`, {STEPS} steps": integrated_gradients,
    }


def by_inseq(saved: Path, rows: Rows) -> dict[str, Callable[[], Any]]:
    """inseq, of the logit of the same tokens, in its own batches."""
    import inseq  # pyright: ignore[reportMissingImports]

    model = inseq.load_model(str(saved), "saliency", device="cpu")

    def run(method: str, **options: Any) -> Any:
        return model.attribute(
            rows.texts, rows.with_answers, method=method, attributed_fn="logit", batch_size=len(rows.texts),
            show_progress=False, **options,
        )  # fmt: skip

    return {
        "inseq, `saliency`": partial(run, "saliency"),
        "inseq, `input_x_gradient`": partial(run, "input_x_gradient"),
        f"inseq, `integrated_gradients`, {STEPS} steps": partial(run, "integrated_gradients", n_steps=STEPS),
    }


def missing(peer: str) -> str | None:
    """Why a peer is not measured, if it is not."""
    try:
        importlib.import_module("lxt.efficient" if peer == "lxt" else peer)
    except ImportError as error:
        try:
            return f"{peer} {version(peer)} cannot be imported beside transformers {version('transformers')} ({str(error).partition(' (')[0]})"
        except PackageNotFoundError:
            return f"{peer} is not installed"
    return "lxt replaces classes of transformers in the whole process" if peer == "lxt" else None


def peers(count: int = ROWS, length: int = 24, rounds: int = ROUNDS) -> Lines:
    """## Rows of a data set beside other libraries

    A random GPT-2 small, the logit of the token after each row, float32. Rows a second as a share of a plain batched
    forward's; one thread, processor time, one process. Ours is what `attribute_dataset` does with a batch, without the
    digest of all weights that a run takes once. inseq runs decoders one row at a time.
    """
    from transformers import AutoTokenizer, GPT2LMHeadModel

    torch.set_num_threads(1)
    reasons = {peer: missing(peer) for peer in PEERS}
    with TemporaryDirectory() as place:
        saved = Path(place) / "gpt2"
        saved_gpt2(saved, **GPT2_SMALL)
        rows = Rows.of(AutoTokenizer.from_pretrained(saved), count, length)
        module = GPT2LMHeadModel.from_pretrained(saved, attn_implementation="eager")

        @torch.no_grad()
        def forward() -> None:
            module(rows.ids)

        calls = ours(saved, rows)
        if reasons["captum"] is None:
            calls |= by_captum(module, rows)
        if reasons["inseq"] is None:
            calls |= by_inseq(saved, rows)
        with one_reading():  # as the batches of a data set
            seconds = interleaved({"forward": forward, **calls}, rounds, time.process_time)
            agreement = _agreement(calls)
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "transformer-lens")]
    versions += [f"{peer} {version(peer)}" for peer, reason in reasons.items() if reason is None]
    yield f"{len(rows.ids)} rows of {rows.ids.shape[1]} tokens; {', '.join(versions)}.\n"
    yield table("what", "rows ÷ plain forward's")
    for name in calls:
        yield f"| {name} | {seconds['forward'] / seconds[name]:.3f} |"
    yield ""
    if agreement is not None:
        yield (
            "\n`input-x-gradient` and captum's gradient × activation at the input of the first block are one formula: their largest difference is "
            f"{agreement:.0e} of the largest score."
        )
    unmeasured = [reason for reason in reasons.values() if reason is not None]
    if unmeasured:
        yield f"\nNot measured: {'; '.join(unmeasured)}."


def _agreement(calls: dict[str, Callable[[], Any]]) -> float | None:
    """How far our input × gradient is from captum's, relative to the largest score; it must be rounding."""
    peer = calls.get("captum, `LayerGradientXActivation`")
    if peer is None:
        return None
    expected = peer()
    difference = float((calls["`input-x-gradient`"]() - expected).abs().max() / expected.abs().max())
    assert difference < 1e-4, f"input × gradient differs from captum's by {difference:.1e}"
    return difference
