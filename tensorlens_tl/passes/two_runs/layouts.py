"""How the blocks of two runs are put together, where each run by itself could not tell.

Where an MLP gives nothing in one run (no neuron of a ReLU is active), a sequential block and a parallel one are the
same map there, and the pass takes the first of them. The other run may tell which one it is.
"""

from dataclasses import replace

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import Layout
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.proof import LayoutSearch


def with_one_layout(a: BlockMaps, b: BlockMaps) -> tuple[BlockMaps, BlockMaps]:
    """The maps of two runs with every block put together in the one way that reproduces it in both.

    Args:
        a, b: of either run; blocks that they put together alike stay so.

    Raises:
        InvalidInputError: no layout of a block reproduces it in both runs, or several do.
    """
    if a.layouts == b.layouts:
        return a, b
    layouts = list(a.layouts)
    for layer, pair in enumerate(zip(a.layouts, b.layouts, strict=True)):
        if pair[0] == pair[1]:
            continue
        others = LayoutSearch(b, layer).reproducing()
        both = [layout for layout in LayoutSearch(a, layer).reproducing() if layout in others]
        if len(both) != 1:
            raise _refusal(a, b)
        layouts[layer] = both[0]
    return replace(a, layouts=tuple(layouts)), replace(b, layouts=tuple(layouts))


def _refusal(a: BlockMaps, b: BlockMaps) -> InvalidInputError:
    runs = "one model's two runs (a part that gives nothing in one?)"
    if a.capture.model is not b.capture.model:
        runs = "two models"
    return InvalidInputError(
        f"difference: the blocks of {runs} are put together in different ways, {_names(a.layouts)} and "
        f"{_names(b.layouts)}. Ask about each run by itself."
    )


def _names(layouts: tuple[Layout, ...]) -> str:
    return ", ".join(dict.fromkeys(layout.name for layout in layouts))
