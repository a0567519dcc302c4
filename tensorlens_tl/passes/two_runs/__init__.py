"""Two runs and the exact linear map between their differences, in which nothing is held fixed.

| module | question |
| --- | --- |
| `values` | what were the inputs of a block's parts in one run? |
| `attention`, `scores`, `cross`, `mlps`, `experts`, `whitening` | which linear map takes Δ of inputs to Δ of outputs? |
| `recorded` | the same from the live module, for attention whose scores cannot be read from weights |
| `maps` | the parts of every block as such secants |
| `layouts` | how are blocks composed, if one run does not determine it? |
| `runs` | the two runs, checked, and their map verified block by block |
"""

from tensorlens_tl.passes.two_runs.maps import SecantMaps
from tensorlens_tl.passes.two_runs.runs import (
    Difference,
    check_one_architecture,
    difference,
)

__all__ = ["Difference", "SecantMaps", "check_one_architecture", "difference"]
