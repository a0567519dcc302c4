"""Train the bundled language model: ``python -m scripts.train OUT_DIR``.

About an hour on two cores. The text is what every Python installation carries (the language
reference in ``pydoc_data.topics`` and the standard library's docstrings), so the exact numbers depend
on the Python version; the shipped model was trained with the one named in ``model/training.json``.

Two phases, because the order matters: trained on text alone a model this small never forms
induction heads, and mixing text and repeats from the start did not either.

1. *Induction*: rows that repeat a uniformly random segment, until the copying circuit has formed.
2. *Text with a reminder*: documents, plus a few repeated rows so that the circuit survives.

Documents are split by a hash of their own text and duplicates are dropped, also those shared in
part between the two sides (word 8-grams), so that the held-out loss is not a memory test.
"""

import argparse
import ast
import copy
import json
import math
import platform
import sysconfig
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from scripts.rounding import round_parameters

BOS = "<|bos|>"
VOCABULARY = 2048
CONTEXT = 256
HELD_OUT_SHARE = 0.05


# -------------------------------------------------------------------------------------------- text


def python_documents() -> list[str]:
    """The language reference and every standard-library docstring above 80 characters, without duplicates."""
    from pydoc_data.topics import topics

    found = [str(text) for text in topics.values()]
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if {"test", "tests", "idle_test", "site-packages", "pydoc_data"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 80:
                    found.append(text)
    return list(dict.fromkeys(text.strip() for text in found))


def split_documents(documents: list[str]) -> tuple[list[str], list[str]]:
    """Training and held-out documents; a held-out one shares less than a quarter of its word 8-grams with training."""

    def held_out(text: str) -> bool:
        return int(sha256(text.encode()).hexdigest()[:8], 16) / 16**8 < HELD_OUT_SHARE

    def grams(text: str) -> set[str]:
        words = text.split()
        return {" ".join(words[k : k + 8]) for k in range(max(1, len(words) - 7))}

    training = [text for text in documents if not held_out(text)]
    known = set().union(*(grams(text) for text in training))
    unseen = [text for text in documents if held_out(text)]
    unseen = [text for text in unseen if len(grams(text) & known) < 0.25 * len(grams(text))]
    return training, unseen


def train_tokenizer(documents: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE; ``<|bos|>`` is token 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS, unk_token=BOS)


def encode(tokenizer: Any, documents: list[str]) -> np.ndarray:
    """One stream of token ids, ``<|bos|>`` before each document."""
    rows = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    return np.concatenate([np.asarray([0, *row], dtype=np.int64) for row in rows])


# -------------------------------------------------------------------------------------------- batches


def repeated_rows(generator: torch.Generator, rows: int, length: int, longest: int) -> tuple[torch.Tensor, int]:
    """Rows `[rows, length]` that repeat a random segment to the end, and the segment's length."""
    period = int(torch.randint(3, longest + 1, (1,), generator=generator))
    segment = torch.randint(1, VOCABULARY, (rows, period), generator=generator)
    return segment.repeat(1, math.ceil(length / period))[:, :length], period


def text_rows(generator: torch.Generator, stream: torch.Tensor, rows: int, length: int) -> torch.Tensor:
    starts = torch.randint(0, len(stream) - length, (rows,), generator=generator)
    return stream[starts[:, None] + torch.arange(length)]


def logits_of(model: Any, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Logits with the row placed at a random offset, so that all positions are trained."""
    offset = int(torch.randint(0, CONTEXT - rows.shape[1] + 1, (1,), generator=generator))
    positions = torch.arange(offset, offset + rows.shape[1])[None]
    return model(rows, position_ids=positions).logits


def next_token_loss(logits: torch.Tensor, rows: torch.Tensor, start: int = 1) -> torch.Tensor:
    """Mean cross-entropy in nats of predicting ``rows[:, start:]``."""
    return cross_entropy(logits[:, start - 1 : -1].flatten(0, 1), rows[:, start:].flatten())


@torch.no_grad()
def held_out_loss(model: Any, stream: torch.Tensor, length: int = 128) -> float:
    """Mean loss over the whole held-out stream in windows of `length` tokens."""
    model.eval()
    windows = stream[: len(stream) // length * length].view(-1, length)
    losses = [next_token_loss(model(part).logits, part) * len(part) for part in windows.split(32)]
    model.train()
    return float(sum(losses) / len(windows))


@torch.no_grad()
def copy_loss(model: Any, seed: int = 0) -> float:
    """Loss on the second copy of 50 random tokens (chance: ln 2048 = 7.6)."""
    model.eval()
    segment = torch.randint(1, VOCABULARY, (64, 50), generator=torch.Generator().manual_seed(seed))
    rows = torch.cat([torch.zeros(64, 1, dtype=torch.long), segment, segment], dim=1)
    loss = float(next_token_loss(model(rows).logits, rows, start=52))
    model.train()
    return loss


def set_dropout(model: Any, rate: float) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
        if hasattr(module, "attn_dropout") and not isinstance(module.attn_dropout, torch.nn.Module):
            module.__dict__["attn_dropout"] = rate


# -------------------------------------------------------------------------------------------- training


def small_gpt2(vocabulary: int, layers: int, context: int, width: int) -> Any:
    """A GPT-2 of four heads, without dropout."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def optimiser_for(model: Any, rate: float, decay: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))


def step(model: Any, optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()


def learn_induction(model: Any, generator: torch.Generator, most_steps: int, rate: float) -> int:
    """Train on repeated rows until the mean loss of 100 steps is below 0.5: the circuit has formed.

    Returns the number of steps.
    """
    optimiser = optimiser_for(model, rate, 0.01)
    started, losses = time.time(), []
    for number in range(1, most_steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, number / 100)
        rows, period = repeated_rows(generator, 64, 64, 24)
        loss = next_token_loss(logits_of(model, rows, generator), rows, start=period + 1)
        step(model, optimiser, loss)
        losses.append(loss.item())
        if number % 100 == 0:
            recent = sum(losses[-100:]) / 100
            print(
                f"induction {number:5d}  loss {recent:.3f}  copy {copy_loss(model):.3f}  {time.time() - started:.0f} s",
                flush=True,
            )
            if recent < 0.5:
                return number
    raise SystemExit(f"no induction after {most_steps} steps: try another --seed")


def learn_text(
    model: Any, generator: torch.Generator, train: torch.Tensor, unseen: torch.Tensor, steps: int, dropout: float
) -> Any:
    """Train on text with a share of repeated rows; returns the exponential moving average of the weights."""
    optimiser = optimiser_for(model, 2e-3, 0.1)
    set_dropout(model, dropout)
    average = copy.deepcopy(model)
    started = time.time()
    for number in range(steps):
        warmup, progress = min(1.0, (number + 1) / 200), number / steps
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * warmup * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        repeats, period = repeated_rows(generator, 8, 128, 63)
        rows = torch.cat([text_rows(generator, train, 24, 128), repeats])
        logits = logits_of(model, rows, generator)
        loss = next_token_loss(logits[:24], rows[:24])
        reminder = next_token_loss(logits[24:], rows[24:], start=period + 1)
        step(model, optimiser, loss + 0.15 * reminder)
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, max(0.002, 1 / (number + 1)))
        if number % 500 == 0 or number == steps - 1:
            print(
                f"text {number:5d}  loss {loss.item():.3f}  held out {held_out_loss(average, unseen):.3f}  "
                f"copy {copy_loss(average):.3f}  {time.time() - started:.0f} s",
                flush=True,
            )
    set_dropout(average, 0.0)
    return average.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the model, its tokenizer and the held-out text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-induction-steps", type=int, default=4000)
    parser.add_argument("--induction-rate", type=float, default=1e-3)
    parser.add_argument("--text-steps", type=int, default=5000)
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()

    documents = python_documents()
    training, unseen = split_documents(documents)
    tokenizer = train_tokenizer(training)
    train_stream, unseen_stream = (torch.from_numpy(encode(tokenizer, part)) for part in (training, unseen))
    print(f"{len(training)} documents, {len(train_stream)} tokens; held out {len(unseen)}, {len(unseen_stream)}")

    generator = torch.Generator().manual_seed(args.seed)
    torch.manual_seed(args.seed)
    model = small_gpt2(VOCABULARY, layers=4, context=CONTEXT, width=128)
    induction_steps = learn_induction(model, generator, args.most_induction_steps, args.induction_rate)
    model = learn_text(model, generator, train_stream, unseen_stream, args.text_steps, args.dropout)

    round_parameters(model)
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "held_out.json").write_text(json.dumps(unseen, indent=0), encoding="utf-8")
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": args.seed,
        "induction_steps": induction_steps,
        "text_steps": args.text_steps,
        "dropout": args.dropout,
        "training_tokens": len(train_stream),
        "held_out_tokens": len(unseen_stream),
        "held_out_loss": round(held_out_loss(model, unseen_stream), 4),
        "training_loss": round(held_out_loss(model, train_stream[:65536]), 4),
        "second_copy_loss": round(copy_loss(model), 4),
    }
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
