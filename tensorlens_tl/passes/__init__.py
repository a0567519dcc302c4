"""One forward pass as an exact affine map: made, proved, held fixed, and asked.

| module | question |
| --- | --- |
| `prompts`, `spans` | what does a model take, which positions does a query stand for, where does a text stand? |
| `captured`, `record`, `mlps` | what does one pass leave behind, and which maps do its parts become? |
| `proof` | is what the weights say what the model does? |
| `target`, `selection`, `collapse` | about what, of which part, and with what result is the map asked? |
| `operator` | what can be asked of the whole map? |
| `signals` | what do models of images and sound read, and what else do multimodal ones take? |
| `pixels` | what does each pixel give? |
| `frozen` | the pass that users hold: its operator, and the hooks that hold the live model |
| `freezing` | how is a pass made and checked? |
"""

from tensorlens_tl.passes.freezing import freeze
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.mlps import Routes
from tensorlens_tl.passes.operator import (
    Collapse,
    FrozenOperator,
    PatchEmbedding,
    PixelScores,
    patch_embedding,
    pixel_scores,
)

__all__ = [
    "Collapse",
    "FrozenOperator",
    "FrozenPass",
    "PatchEmbedding",
    "PixelScores",
    "Routes",
    "freeze",
    "patch_embedding",
    "pixel_scores",
]
