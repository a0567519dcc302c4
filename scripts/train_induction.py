"""Train a small model on repeated random letters, with checkpoints: ``python -m scripts.train_induction OUT --seed 2``.

GPT-2 architecture, 2 layers of four heads, width 24. A row is a segment of different letters, repeated; every repeated
letter is learnt, which only induction can predict. Two minutes on two cores; the checkpoints of `CHECKPOINTS` are
stored in half precision, 31 kB each. `tensorlens_tl.demo.induction_checkpoints` loads them.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from scripts.small import read_arguments, report
from scripts.train import optimiser_for, small_gpt2, step
from scripts.train_small import word_tokenizer
from tensorlens_tl.demo import CHECKPOINTS, INDUCTION_WORDS

CONTEXT, WIDTH, RATE = 24, 24, 1e-2
SHORTEST = 5
"""Letters of a segment at least; at most half a row."""


def repeated_rows(generator: torch.Generator, rows: int = 64) -> Iterator[tuple[Tensor, int]]:
    """Rows of a segment of different letters, again and again, and the length of the segment."""
    letters = len(INDUCTION_WORDS) - 2
    while True:
        period = int(torch.randint(SHORTEST, CONTEXT // 2, (1,), generator=generator))
        order = torch.rand(rows, letters, generator=generator).argsort(1)[:, :period] + 2
        repeats = order.repeat(1, CONTEXT // period + 1)[:, : CONTEXT - 1]
        yield torch.cat([torch.zeros(rows, 1, dtype=torch.long), repeats], dim=1), period


def loss_of(model: Any, tokens: Tensor, period: int) -> Tensor:
    """Of what is repeated."""
    logits = model(tokens).logits[:, :-1]
    known = torch.arange(1, CONTEXT) > period
    return cross_entropy(logits[:, known].flatten(0, 1), tokens[:, 1:][:, known].flatten())


def save_checkpoint(model: Any, folder: Path, number: int) -> None:
    """The weights in half precision; the unembedding is the embedding."""
    state = {name: value.half().contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, folder / f"step-{number}.safetensors")


def main(arguments: list[str] | None = None) -> None:
    args = read_arguments(__doc__, max(CHECKPOINTS), arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    torch.manual_seed(args.seed)
    model = small_gpt2(len(INDUCTION_WORDS), 2, CONTEXT, WIDTH)
    batches = repeated_rows(torch.Generator().manual_seed(args.seed))
    held_out = [next(batches) for _ in range(8)]
    optimiser = optimiser_for(model, RATE, 0.01)
    losses: dict[int, float] = {}
    for number in range(args.steps + 1):
        if number in CHECKPOINTS or number == args.steps:
            model.eval()
            with torch.no_grad():
                losses[number] = sum(float(loss_of(model, *rows)) for rows in held_out) / len(held_out)
            model.train()
            print(f"{number:5d}  held-out loss {losses[number]:.3f}  {time.time() - started:.0f} s", flush=True)
            save_checkpoint(model, args.out, number)
        if number == args.steps:
            break
        for group in optimiser.param_groups:  # rising at first, falling in the last fifth
            group["lr"] = RATE * min(1.0, (number + 1) / 100, 0.05 + 5 * (1 - number / max(1, args.steps)))
        step(model, optimiser, loss_of(model, *next(batches)))
    model.config.save_pretrained(args.out)
    word_tokenizer(list(INDUCTION_WORDS)).save_pretrained(args.out)
    report(args, model, started, held_out_loss=losses[args.steps])
    facts = json.loads((args.out / "training.json").read_text(encoding="utf-8"))
    facts["losses"] = {str(number): round(loss, 4) for number, loss in losses.items()}
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
