"""Train the small vision model: ``python -m scripts.train_vision OUT_DIR``; four minutes on one core.

A Vision Transformer of 3 layers, width 32 and 4 heads over 16 patches of 2 × 2 pixels and a class token; it tells which
of ten digits an image of 8 × 8 grey pixels shows. It learns from the first half of the shipped digits
(`tensorlens_tl.demo.digit_images`), each time turned, stretched, sheared and moved at random. Rate, batch and number of
steps were chosen on the last 198 images of that half; the other half is only measured.
"""

import time
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import affine_grid, cross_entropy, grid_sample

from scripts import small
from scripts.rounding import round_parameters
from tensorlens_tl.demo import digit_images

STEPS, ROWS, RATE = 6000, 128, 2e-3


def small_vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    digits = {number: str(number) for number in range(10)}
    options: dict[str, Any] = {
        "image_size": 8,
        "patch_size": 2,
        "num_channels": 1,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "id2label": digits,
        "label2id": {name: number for number, name in digits.items()},
    }
    return ViTForImageClassification(ViTConfig(**options))


def distorted(images: Float[Tensor, "image 1 8 8"], generator: torch.Generator) -> Float[Tensor, "image 1 8 8"]:
    """Each image turned by up to 14°, stretched by up to 15 %, sheared, and moved by up to a pixel."""

    def between(most: float) -> Tensor:
        return most * (2 * torch.rand(len(images), generator=generator) - 1)

    angle, shear, across, down = between(0.25), between(0.25), between(0.25), between(0.25)
    wide, high = 1 + between(0.15), 1 + between(0.15)
    maps = [
        torch.stack([angle.cos() * wide, shear - angle.sin() * wide, across], -1),
        torch.stack([angle.sin() * high, angle.cos() * high, down], -1),
    ]
    grid = affine_grid(torch.stack(maps, 1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, align_corners=False)


@torch.no_grad()
def accuracy(model: Any, images: Tensor, labels: Tensor) -> float:
    return float((model(images).logits.argmax(-1) == labels).float().mean())


def learn(model: Any, steps: int, seed: int) -> None:
    """Train in place on the first half of the digits, distorted at random."""
    images, labels = digit_images(held_out=False)
    generator = torch.Generator().manual_seed(seed)

    def loss_of() -> Tensor:
        chosen = torch.randint(0, len(images), (ROWS,), generator=generator)
        return cross_entropy(model(distorted(images[chosen], generator)).logits, labels[chosen], label_smoothing=0.05)

    small.learn(model, steps, loss_of, rate=RATE, decay=0.05, every=500)


def main(arguments: list[str] | None = None) -> None:
    args = small.read_arguments(__doc__, STEPS, arguments)
    started = time.time()
    torch.manual_seed(args.seed)
    model = small_vit()
    learn(model, args.steps, args.seed)
    round_parameters(model)
    args.out.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(args.out)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, args.out / "model.safetensors"
    )
    measured = {
        "accuracy": accuracy(model, *digit_images(held_out=False)),
        "held_out_accuracy": accuracy(model, *digit_images()),
    }
    small.report(args, model, started, **measured)


if __name__ == "__main__":
    main()
