"""Train the bundled model's sparse dictionaries: ``python -m scripts.train_dictionary OUT_DIR``.

Nineteen minutes on one core of a busy machine. One TopK sparse autoencoder (Gao et al., 2024, arXiv 2406.04093) for
each of `DICTIONARIES`, both trained on the same rows of the text that the model was trained on
(`scripts/train.py`). Features that have not been active for a while learn from what the others leave (the
paper's auxiliary loss), so that none of them dies. The streams are divided by their mean norm during training; the
weights that are saved read the stream as it is. What is reported is measured with the saved weights, on held-out text.
"""

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from scripts.train import encode, python_documents, split_documents, text_rows
from tensorlens_tl.demo import DICTIONARIES, Dictionary, dictionary_of, held_out_prompts, load_demo_model
from tensorlens_tl.hooks import capture

FEATURES, ACTIVE, STEPS = 512, 16, 2500
ROWS, LENGTH, RATE = 16, 128, 2e-3
ASLEEP, WOKEN = 200, 32
"""After how many steps without being active a feature counts as asleep, and how many of those learn at once."""


class Autoencoder(nn.Module):
    """What is trained: a dictionary of streams of mean norm √d."""

    def __init__(self, width: int, features: int, active: int):
        super().__init__()
        rows = torch.randn(features, width)
        self.W_dec = nn.Parameter(rows / rows.norm(dim=1, keepdim=True))
        self.W_enc = nn.Parameter(self.W_dec.detach().T.clone())
        self.b_enc, self.b_dec = nn.Parameter(torch.zeros(features)), nn.Parameter(torch.zeros(width))
        self.active, self.idle = active, torch.zeros(features)

    def loss(self, x: Tensor) -> Tensor:
        """The squared error, and that of the features that are asleep on what the others leave."""
        before = (x - self.b_dec) @ self.W_enc + self.b_enc
        chosen = before.topk(self.active)
        left = x - self.b_dec - torch.zeros_like(before).scatter(1, chosen.indices, chosen.values.relu()) @ self.W_dec
        self.idle += 1
        self.idle[chosen.indices[chosen.values > 0].unique()] = 0
        error, asleep = left.square().sum(1).mean(), self.idle > ASLEEP
        if not bool(asleep.any()):
            return error
        woken = before.masked_fill(~asleep, -torch.inf).topk(min(WOKEN, int(asleep.sum())))
        made = torch.zeros_like(before).scatter(1, woken.indices, woken.values.relu()) @ self.W_dec
        return error + (left.detach() - made).square().sum(1).mean() / 32

    @torch.no_grad()
    def keep_unit_rows(self) -> None:
        """Scale every row of the decoder to norm 1."""
        self.W_dec /= self.W_dec.norm(dim=1, keepdim=True)

    @torch.no_grad()
    def saved(self, scale: float) -> dict[str, Tensor]:
        """The weights that read the stream as it is, ``scale`` times what was trained on, in half precision."""
        b_enc = (self.b_enc - self.b_dec @ self.W_enc) * scale
        kept = {"W_enc": self.W_enc, "b_enc": b_enc, "W_dec": self.W_dec, "b_dec": self.b_dec * scale}
        return {name: tensor.detach().half().contiguous() for name, tensor in kept.items()}


def learn(model: Any, stream: Tensor, steps: int, seed: int) -> dict[str, tuple[Autoencoder, float]]:
    """The autoencoder of each hook point, and what its stream was divided by."""
    generator = torch.Generator().manual_seed(seed)
    first = streams(model, text_rows(generator, stream, ROWS, LENGTH))
    width = first[DICTIONARIES[0]].shape[1]
    scales = {hook: float(x.norm(dim=1).mean()) / math.sqrt(width) for hook, x in first.items()}
    made = {hook: Autoencoder(width, FEATURES, ACTIVE) for hook in DICTIONARIES}
    with torch.no_grad():
        for hook, autoencoder in made.items():
            autoencoder.b_dec.copy_(first[hook].mean(0) / scales[hook])
    optimiser = torch.optim.Adam([p for part in made.values() for p in part.parameters()], lr=RATE, betas=(0.9, 0.99))
    started = time.time()
    for number in range(1, steps + 1):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, number / 100, 5 * (1 - number / (steps + 1)))
        seen = streams(model, text_rows(generator, stream, ROWS, LENGTH))
        losses = [made[hook].loss(x / scales[hook]) for hook, x in seen.items()]
        optimiser.zero_grad(set_to_none=True)
        torch.stack(losses).sum().backward()
        optimiser.step()
        for autoencoder in made.values():
            autoencoder.keep_unit_rows()
        if number % 500 == 0 or number == steps:
            shown = "  ".join(f"{loss.item() / width:.3f}" for loss in losses)
            print(f"{number:5d}  error {shown}  {time.time() - started:.0f} s", flush=True)
    return {hook: (made[hook], scales[hook]) for hook in DICTIONARIES}


def streams(model: Any, rows: Tensor) -> dict[str, Tensor]:
    """The residual stream of every token at each of `DICTIONARIES`; half of the rows begin as a document does."""
    rows = rows.clone()
    rows[: len(rows) // 2, 0] = 0
    seen, _ = capture(model, {"input": rows}, DICTIONARIES, last=DICTIONARIES[-1])
    return {hook: x.flatten(0, 1) for hook, x in seen.items()}


@torch.no_grad()
def measure(model: Any, hook: str, dictionary: Dictionary) -> dict[str, float]:
    """L0, the share of variance explained, and the share of features that are ever active, on held-out text."""
    seen, _ = capture(model, {"input": held_out_prompts(model, 256, 64)}, [hook], last=hook)
    x = seen[hook][:, 1:].flatten(0, 1)  # <|bos|> is the same vector in every prompt
    active = dictionary.encode(x)
    left = (x - dictionary.decode(active)).square().sum()
    return {
        "active": round(float((active > 0).sum(1).float().mean()), 2),
        "explained": round(1 - float(left / (x - x.mean(0)).square().sum()), 4),
        "ever_active": round(float((active > 0).any(0).float().mean()), 4),
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the dictionaries")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args(arguments)
    started = time.time()
    torch.manual_seed(args.seed)
    model = load_demo_model(kind="bridge")
    training, _ = split_documents(python_documents())
    stream = torch.from_numpy(encode(model.tokenizer, training))
    args.out.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    facts |= {"seed": args.seed, "steps": args.steps, "features": FEATURES, "k": ACTIVE}
    for hook, (autoencoder, scale) in learn(model, stream, args.steps, args.seed).items():
        weights = autoencoder.saved(scale)
        save_file(weights, args.out / f"{hook}.safetensors")
        whole = {name: tensor.float() for name, tensor in weights.items()}
        facts[hook] = measure(model, hook, dictionary_of(whole, ACTIVE, hook))
    facts["minutes"] = round((time.time() - started) / 60, 1)
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
