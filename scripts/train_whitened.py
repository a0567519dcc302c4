"""Train whitened models beside standard ones: ``python -m scripts.train_whitened OUT_DIR``.

The experiment of Whitened Self-Attention (§5): a GPT of two blocks with two heads each, rotary positions and a 4×
feed-forward layer, over characters. By default at a size for two cores (width 32, context 128, 6,000 steps) on the text
that every Python installation carries; with a GPU at the paper's own:

    python -m scripts.train_whitened OUT_DIR --text dickens.txt --width 256 --larger 276 --context 256 \\
        --batch 256 --steps 100000 --device cuda

| row | what |
| --- | --- |
| `standard` | no whitening |
| `larger` | the same, wider, so that it has as many parameters as the whitened model or more |
| `whitened` | w_i = L⁻¹(x_i − M w_{i−1}) before every block |
| `control` | L⁻¹(x_i − M x_{i−1}): the same parameters and one token of context, but no recursion |

With ``--rows`` also `attention`: whitening of what attention reads, after the norm, the residual stream left alone
(`tensorlens_tl.whiten`, ``reads="attention"``). Every row is trained from each seed on the same batches, and measured
on held-out text every `--every` steps and at the end. The learning rate is not decayed, as the paper says nothing of a
schedule. ``load_demo_model("whitened", folder=OUT_DIR / "whitened")`` loads what was trained; TransformerLens' own
loaders know nothing of whitening.
"""

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedTokenizerFast

from scripts.rounding import rounded
from scripts.train import python_documents, split_documents
from tensorlens_tl.algebra.recursion import spectral_radius
from tensorlens_tl.whitening.layer import Whitening, attach

ROWS = ("standard", "larger", "whitened", "control")
VARIANTS = ("attention",)


class Shift(nn.Module):
    """The control, ``L⁻¹(x_i − M x_{i−1})``: what whitening would be without its recursion."""

    def __init__(self, width: int, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.L_inv, self.M = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        nn.init.eye_(self.L_inv.weight)
        nn.init.zeros_(self.M.weight)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The shifted stream; there is no padding in training, so `mask` is not looked at."""
        return self.L_inv(x - self.M(pad(x, (0, 0, 1, 0))[..., :-1, :]))


# -------------------------------------------------------------------------------------------- text


def characters(path: Path | None) -> tuple[Tensor, Tensor, list[str]]:
    """Training and held-out text as character numbers, and the characters.

    A file's last tenth is held out, as in the paper; Python's own documents are split by their own hash.
    """
    if path is None:
        parts = ["\n\n".join(documents) for documents in split_documents(python_documents())]
        parts = [part.encode("ascii", "replace").decode() for part in parts]
    else:
        text = path.read_text(encoding="utf-8")
        parts = [text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]]
    known = sorted({*"".join(parts), "\n", "?"})  # a text begins after a line break; ? stands for what is not known
    number = {character: at for at, character in enumerate(known)}
    train, unseen = (torch.tensor([number[character] for character in part]) for part in parts)
    return train, unseen, known


def windows(stream: Tensor, starts: Tensor, length: int) -> Tensor:
    return stream[starts[:, None] + torch.arange(length)]


# -------------------------------------------------------------------------------------------- models


def small_gpt(vocabulary: int, width: int, context: int, heads: int = 2, layers: int = 2) -> Any:
    """A pre-LN GPT with rotary positions, in Hugging Face's GPT-NeoX."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    options: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": context,
        "rotary_pct": 1.0,
        "use_parallel_residual": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
    }
    return GPTNeoXForCausalLM(GPTNeoXConfig(**options))


def model_of(row: str, vocabulary: int, width: int, larger: int, context: int) -> Any:
    """One row's model."""
    width = larger if row == "larger" else width
    model = small_gpt(vocabulary, width, context)
    for number, block in enumerate(model.gpt_neox.layers):
        if row == "whitened":
            attach(block, Whitening(width, number))
        if row == "control":
            attach(block, Shift(width, number))
        if row == "attention":
            attach(block.attention, Whitening(width, number, row))
    return model


def radii(model: Any) -> list[float]:
    """Spectral radius of L⁻¹M in every block."""
    blocks = model.gpt_neox.layers
    layers = [getattr(block, "whitening", getattr(block.attention, "whitening", None)) for block in blocks]
    return [round(spectral_radius((w.L_inv.weight @ w.M.weight).detach()), 4) for w in layers if w is not None]


# -------------------------------------------------------------------------------------------- training


@torch.no_grad()
def held_out_loss(model: Any, stream: Tensor, context: int, rows: int) -> float:
    """Mean loss in nats over windows spread evenly over the held-out text."""
    starts = torch.linspace(0, len(stream) - context - 1, rows).long()
    losses = []
    for part in windows(stream, starts, context + 1).to(next(model.parameters()).device).split(32):
        logits = model(part[:, :-1]).logits
        losses.append(float(cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten())) * len(part))
    return sum(losses) / rows


def train(model: Any, text: tuple[Tensor, Tensor], args: argparse.Namespace, seed: int) -> dict[str, list[Any]]:
    """Train on random windows; every `args.every` steps the held-out loss, and the seconds of training until then."""
    device = next(model.parameters()).device
    optimiser = torch.optim.AdamW(model.parameters(), lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    log: dict[str, list[Any]] = {"steps": [], "loss": [], "seconds": []}
    spent = 0.0
    for number in range(args.steps + 1):
        if number % args.every == 0 or number == args.steps:
            loss = held_out_loss(model, text[1], args.context, args.held_out)
            log["steps"].append(number)
            log["loss"].append(round(loss, 4))
            log["seconds"].append(round(spent, 1))
            print(f"{number:6d}  held out {loss:.4f}  {spent:.0f} s  radii {radii(model)}", flush=True)
        if number == args.steps:
            break
        started = clock()
        for group in optimiser.param_groups:
            group["lr"] = args.rate * min(1.0, (number + 1) / 100)
        starts = torch.randint(0, len(text[0]) - args.context - 1, (args.batch,), generator=generator)
        batch = windows(text[0], starts, args.context + 1).to(device)
        loss = cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent += clock() - started
    return log


def character_tokenizer(known: list[str]) -> PreTrainedTokenizerFast:
    """A token for every character; a text begins after a line break, and what is not known is a question mark."""
    number = {character: at for at, character in enumerate(known)}
    tokenizer = Tokenizer(models.BPE(number, [], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="\n", unk_token="?")


def save(model: Any, known: list[str], folder: Path) -> None:
    """Weights, configuration and tokenizer of one model."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    weights = {name: rounded(tensor).contiguous().cpu() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    character_tokenizer(known).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the table and the models of the first seed")
    parser.add_argument("--text", type=Path, help="a text file; without it the text of the Python installation")
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=(*ROWS, *VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--larger", type=int, default=36, help="width of the larger standard model")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--every", type=int, default=250, help="steps between measurements")
    parser.add_argument("--held-out", type=int, default=256, help="held-out windows")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)

    if args.text is not None and not args.text.is_file():
        parser.error(f"--text {args.text}: no such file")
    if args.width % 4 or args.larger % 4 or args.larger <= args.width:
        parser.error(
            "--width and --larger: two heads with rotary positions need multiples of 4, --larger the larger one"
        )
    train_text, unseen, known = characters(args.text)
    if min(len(train_text), len(unseen)) < args.context + 2:
        parser.error(
            f"the held-out tenth of the text has {len(unseen)} characters; --context {args.context} needs more"
        )
    print(f"{len(train_text)} characters, {len(known)} different; held out {len(unseen)}")
    facts = {name: value for name, value in vars(args).items() if name not in ("out", "text", "rows", "seeds")}
    facts |= {"python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    facts |= {"characters": len(train_text), "held_out_characters": len(unseen), "vocabulary": len(known)}
    args.out.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in args.seeds:
        for row in args.rows:
            torch.manual_seed(seed)
            model = model_of(row, len(known), args.width, args.larger, args.context).to(args.device)
            size = sum(parameter.numel() for parameter in model.parameters())
            print(f"{row}, seed {seed}: {size} parameters", flush=True)
            log = train(model, (train_text, unseen), args, seed)
            runs.append({"row": row, "seed": seed, "parameters": size, "radii": radii(model), **log})
            (args.out / "training.json").write_text(json.dumps(facts | {"runs": runs}) + "\n", encoding="utf-8")
            if seed == args.seeds[0]:
                save(model, known, args.out / row)


if __name__ == "__main__":
    main()
