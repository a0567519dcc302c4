"""The bundled weights in the bits that they need: the last bits of a float32 are noise, which no archive makes smaller.

    python -m scripts.rounding FILE...           rounds the float32 weights of safetensors files in place
    python -m scripts.rounding --half FILE...    writes them in half precision

The training scripts save what `rounded` returns; `train_small.py` saves half precision.
"""

import argparse
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SIGNIFICANT = 15
"""Bits of a weight, with the leading one: a weight changes by 3e-5 of itself at most (a float32 has 24)."""
LAST = 24 - SIGNIFICANT


def rounded(weights: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Each float32 weight to the nearest number of `SIGNIFICANT` bits, ties to even; other dtypes stay as they are.

    >>> rounded(torch.tensor([1 + 2**-14 + 2**-20, -0.1])).tolist()
    [1.00006103515625, -0.09999847412109375]
    """
    if weights.dtype != torch.float32:
        return weights
    bits = weights.contiguous().view(torch.int32)
    is_odd = (bits >> LAST) & 1
    nearest = bits + (1 << (LAST - 1)) - 1 + is_odd
    return (nearest >> LAST << LAST).view(torch.float32)


@torch.no_grad()
def round_parameters(model: nn.Module) -> None:
    """Round every weight of a model in place."""
    for parameter in model.parameters():
        parameter.copy_(rounded(parameter))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--half", action="store_true", help="half precision (11 bits)")
    args = parser.parse_args(arguments)
    for path in args.files:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        weights = load_file(path)
        saved = {name: weight.half() if args.half else rounded(weight) for name, weight in weights.items()}
        save_file(saved, path, metadata)


if __name__ == "__main__":
    main()
