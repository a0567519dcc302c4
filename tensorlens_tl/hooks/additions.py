"""What user-installed hooks add to the residual stream while a model runs: steering vectors, and what acts like them.

A hook point is the identity. Its module's input is what the model computes, and its output what hooks make of that:
the difference is what they add.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor, nn

from tensorlens_tl.hooks.inspection import other_hooks
from tensorlens_tl.hooks.placing import Placing
from tensorlens_tl.hooks.points import BlockPoints, ModelPoints
from tensorlens_tl.hooks.running import hook_points
from tensorlens_tl.models import BlockView, ModelView

StreamPlace = Literal["attention", "middle", "mlp", "late", "end"]
"""Where in a block something joins the stream: with what attention writes, after that has joined it, with what the MLP
writes, after that has joined it (and before a norm around the sum), or after the whole block."""


@dataclass(frozen=True)
class StreamPoint:
    """A hook point whose tensor is the residual stream, or becomes a part of it as it stands.

    Attributes:
        name: of the hook point.
        layer: the block.
        place: where in the block.
        inside: whether it is the output of a sublayer's own module, before the block's factor.
    """

    name: str
    layer: int
    place: StreamPlace
    inside: bool = False


@dataclass(frozen=True, eq=False)
class Passed:
    """What a hook point's module was given, and what it gave."""

    before: Float[Tensor, "..."]
    after: Float[Tensor, "..."]


def hooked_stream_points(view: ModelView, points: ModelPoints) -> list[StreamPoint]:
    """The points of the stream that somebody else's hooks are on, in the order of the pass."""
    names = other_hooks(view.model)
    if not names or view.is_encoder_decoder or view.loop is not None:
        return []
    known = hook_points(view.model)
    hooked = {id(known[name]) for name in names if name in known}
    unseen = {id(known[point.name]): point for point in reversed(_stream_points(view, points, known))}
    return [point for module, point in reversed(unseen.items()) if module in hooked]


def _stream_points(view: ModelView, points: ModelPoints, known: dict[str, Any]) -> list[StreamPoint]:
    """Every point of the stream that a model has."""
    stream: list[StreamPoint] = []
    for layer, (block, of_block) in enumerate(zip(view.blocks, points.blocks, strict=True)):
        norms = {id(known.get(f"{block.name}.{norm}.hook_out")) for norm in block.norms}
        for place, (name, module, factor) in _writes(block, of_block).items():
            if name is None:
                continue
            scaled = factor != 1 and known[name] is not known.get(module)
            if scaled and module in known:
                stream.append(StreamPoint(module, layer, place, inside=True))
            inside = view.is_bridge and not scaled and id(known[name]) not in norms
            stream.append(StreamPoint(name, layer, place, inside))
        sums: dict[str, StreamPlace] = {f"{block.name}.{name}": place for name, place in _sums(view).items()}
        if layer + 1 < len(view.blocks):
            sums[f"{view.blocks[layer + 1].name}.hook_resid_pre"] = "end"
        stream += [StreamPoint(name, layer, place) for name, place in sums.items()]
    return [point for point in stream if point.name in known]


def _writes(block: BlockView, points: BlockPoints) -> dict[StreamPlace, tuple[str | None, str, float]]:
    """By place, the point of what a sublayer writes, that of its module's output, and the block's factor between them.

    Where the two are one hook point, or the factor is 1, they show the same; Granite's blocks have a hook point of
    their own after the factor.
    """
    attention = f"{block.name}.{block.parts.mixer_name}.hook_out"
    mlp = f"{block.name}.{block.parts.mlp_name}.hook_out"
    return {
        "attention": (points.attention_write, attention, block.attention_factor),
        "mlp": (points.mlp_write, mlp, block.branch_factor),
    }


def _sums(view: ModelView) -> dict[str, StreamPlace]:
    """The points of a block that hold the stream itself; a Bridge's `hook_resid_mid` is what the second norm reads."""
    if view.is_hooked_encoder:
        return {"hook_resid_mid": "middle", "hook_resid_post": "late", "hook_normalized_resid_post": "end"}
    if view.is_bridge:
        return {"hook_resid_post": "end"}
    return {"hook_resid_mid": "middle", "hook_resid_post": "end"}


@contextmanager
def passing(
    view: ModelView,
    points: Sequence[StreamPoint],
    see: Callable[[StreamPoint, Passed], None],
    *,
    instead: Callable[[Tensor], Tensor] | None = None,
) -> Generator[None, None, None]:
    """Inside, `see` is shown what goes through some hook points in this thread, before hooks and after them.

    Args:
        view: of the model.
        points: which.
        see: called with each of them.
        instead: what their hooks are given in the place of what the model computes, from that.
    """
    known = hook_points(view.model) if points else {}
    home = threading.get_ident()
    entered: dict[str, Tensor] = {}

    def before(point: StreamPoint, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != home:
            return None
        x = args[0] if instead is None else instead(args[0])
        entered[point.name] = x.detach().clone()  # a hook may write into it
        return (x, *args[1:]), kwargs

    def after(point: StreamPoint, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if threading.get_ident() == home:
            see(point, Passed(entered.pop(point.name), output.detach()))

    with Placing() as placing:
        for point in points:
            module = known[point.name]
            placing.on_module(module, partial(before, point), before=True)
            placing.on_module(module, partial(after, point))
        yield
