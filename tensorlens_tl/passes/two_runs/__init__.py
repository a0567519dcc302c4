"""Two runs and the exact linear map between their differences, with nothing held.

| module | question |
| --- | --- |
| `values` | what did the parts of a block read in one run? |
| `attention`, `scores`, `cross`, `mlps`, `experts`, `whitening` | which linear map takes Δ of inputs to Δ of outputs? |
| `recorded` | the same of attention whose scores no weights explain: the live module says |
| `maps` | the parts of every block as such secants |
| `layouts` | how are blocks put together, where one run cannot tell? |
| `runs` | the two runs, checked, and their map proved block by block |
"""

from tensorlens_tl.passes.two_runs.maps import SecantMaps
from tensorlens_tl.passes.two_runs.runs import (
    Difference,
    check_one_architecture,
    difference,
)

__all__ = ["Difference", "SecantMaps", "check_one_architecture", "difference"]
