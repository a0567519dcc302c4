"""The layouts of blocks in two runs, if one run alone does not determine them.

If an MLP's output is zero in one run (no ReLU neuron is active), a sequential and a parallel block are the same map
there, and the pass uses the first of these. The other run may determine the layout.
"""

from dataclasses import replace

from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import Layout
from tensorlens_tl.passes.block_maps import BlockMaps
from tensorlens_tl.passes.proof import LayoutSearch


def with_one_layout(a: BlockMaps, b: BlockMaps) -> tuple[BlockMaps, BlockMaps]:
    """Return the maps of two runs, with every block in the one layout that reproduces it in both.

    Args:
        a, b: the maps of either run; blocks with equal layouts are unchanged.

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
    runs = "one model's two runs (a part with zero output in one?)"
    if a.capture.model is not b.capture.model:
        runs = "two models"
    return InvalidInputError(
        f"difference: the blocks of {runs} are composed in different ways, {_names(a.layouts)} and "
        f"{_names(b.layouts)}. Explain each run separately."
    )


def _names(layouts: tuple[Layout, ...]) -> str:
    return ", ".join(dict.fromkeys(layout.name for layout in layouts))
