"""What a result depends on besides the prompt: the model, its class, and how its weights were processed."""

from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from torch import Tensor

from tensorlens_tl.models.blocks import BlockView
from tensorlens_tl.models.parameters import adapter_names


def provenance_of(model: Any, processing: str, untrained: Sequence[str]) -> dict[str, str]:
    """Names, versions, weight processing, dtype, and where there are any, adapters and the weights that no checkpoint
    had.

    Args:
        model: any TransformerLens model.
        processing: see `weight_processing`.
        untrained: the names of weights that its checkpoint lacks.
    """
    optional = {"newly_initialised": ", ".join(untrained), "adapters": ", ".join(adapter_names(model))}
    known = {
        "model": str(getattr(model.cfg, "model_name", "custom")),
        "class": type(model).__name__,
        "transformer_lens": _version_of_transformer_lens(),
        "weight_processing": processing,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }
    return known | {name: names for name, names in optional.items() if names}


def weight_processing(blocks: Sequence[BlockView], unembedding: tuple[Tensor, Tensor | None] | None) -> str:
    """How weights were rewritten, read off themselves: norms without gain and shift (folded into what reads them, or
    never trained), and zero means of what is written or unembedded."""
    norms = (norm for block in blocks for norm in block.norms.values())  # the first one tells most often
    first = blocks[0]
    processed = {
        "plain norms": all(norm.is_plain for norm in norms) and any(block.norms for block in blocks),
        "centred writing": first.mixer is None and _zero_mean(first.attention.W_O[:8]),
        "centred unembedding": unembedding is not None and _zero_mean(unembedding[0][:8]),
    }
    return ", ".join(name for name, present in processed.items() if present) or "raw"


def _zero_mean(rows: Tensor) -> bool:
    return all(bool(row.mean().abs() <= 1e-4 * row.std(correction=0)) for row in rows)  # the first one tells most often


@cache
def _version_of_transformer_lens() -> str:
    """The installed version, looked up once: the look-up reads files."""
    return version("transformer-lens")
