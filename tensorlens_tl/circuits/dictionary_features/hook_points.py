"""Where a sparse dictionary reads the residual stream and writes to it, by what its hook points hold.

Names differ between the classes of TransformerLens and do not always mean what they say (`hook_resid_mid` of a post-LN
Bridge is the sum after the MLP), so a hook point is looked at: what it holds in this pass must be the stream before a
step of its block, or what the MLP of that block reads or gives. Nothing else is taken.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import ZERO, AffineMap, Chain, Identity, Norm
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.circuits.stream import Step, Stream, Sublayer, block_steps
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import Rule
from tensorlens_tl.passes import FrozenPass

RESIDUAL = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")
MLP_IN = ("mlp.hook_in", "ln2.hook_normalized", "ln1.hook_normalized")
MLP_OUT = ("hook_mlp_out", "mlp.hook_out")


@dataclass(frozen=True, order=True)
class Place:
    """The residual stream before one step of a block; ``(n_layers, 0)`` is the last block's output."""

    layer: int
    step: int


@dataclass(frozen=True, eq=False)
class ReadAt:
    """Where an encoder reads.

    Attributes:
        place: the stream that it reads.
        through: what the stream goes through on the way: nothing, or the norm before an MLP; positionwise.
        x: what the hook point holds, `[batch, pos, d_in]`.
    """

    place: Place
    through: AffineMap
    x: Float[Tensor, "batch pos d_in"]


@dataclass(frozen=True, eq=False)
class WriteAt:
    """Where a decoder writes.

    Attributes:
        place: the stream that holds what is written, after `outer`.
        outer: what the sum goes through before that (a post-LN norm); positionwise.
        after: what the written vector goes through before it is added (a norm after an MLP); positionwise.
        x: what is reconstructed, `[batch, pos, d_out]`: the stream, or what an MLP gives.
        beside: what else is in the sum, `[batch, pos, d_model]`; None where the whole stream is reconstructed.
        beside_name: the same in words.
    """

    place: Place
    outer: AffineMap
    after: AffineMap
    x: Float[Tensor, "batch pos d_out"]
    beside: Float[Tensor, "batch pos d_model"] | None = None
    beside_name: str = ""


def maps_between(frozen: FrozenPass, start: Place, stop: Place, rule: Rule) -> list[AffineMap]:
    """What the stream goes through from one place to another, which does not come before it."""
    maps: list[AffineMap] = []
    for layer in range(start.layer, min(stop.layer + 1, frozen.n_layers)):
        steps = block_steps(frozen, layer, rule)
        if layer == stop.layer:
            steps = steps[: stop.step]
        if layer == start.layer:
            steps = steps[start.step :]
        maps += [step.map for step in steps]
    return maps


def stream_to(frozen: FrozenPass, place: Place, rule: Rule) -> Stream:
    """The stream from the embeddings to a place."""
    last = min(place.layer, frozen.n_layers - 1)
    stream = Stream.of(frozen, rule, layers=slice(0, last + 1), final_norm=False, to_tokens=False)
    layers = [step.layer for step in stream.steps]
    count = len(layers)
    if place.layer == last:
        count = layers.index(last) + place.step
    return replace(
        stream, steps=stream.steps[:count], x=stream.x[: count + 1], hidden=stream.hidden[:count]
    )  # fmt: skip


def read_at(frozen: FrozenPass, hook: str, *, mlp: bool) -> ReadAt:
    """Where the encoder of a dictionary reads; `mlp` allows what an MLP reads besides the stream.

    Raises:
        InvalidInputError: no such hook point, or it holds neither.
    """
    layer, x = _held(frozen, hook, mlp)
    stream = _block(frozen, layer)
    candidates = [(place, Identity(), at) for place, at in _places(frozen, stream)]
    if mlp:
        for number, step in enumerate(stream.steps):
            norm = next((s.read.stages[0] for s in _mlps(step)), None)
            if isinstance(norm, Norm):
                plain = replace(norm, gain=None, shift=None)
                place = Place(layer, number)
                at = stream.x[number]
                candidates += [(place, norm, norm(at)), (place, plain, plain(at))]
    for place, through, at in candidates:
        if _same(frozen, at, x):
            return ReadAt(place, through, x)
    what = "the residual stream"
    if mlp:
        what += " or what the MLP reads"
    raise _other(frozen, layer, hook, what, mlp)


def write_at(frozen: FrozenPass, hook: str) -> WriteAt:
    """Where the decoder of a transcoder writes: what an MLP gives, before or after a norm that follows it.

    Raises:
        InvalidInputError: no such hook point, or it holds something else.
    """
    layer, x = _held(frozen, hook, True)
    stream = _block(frozen, layer)
    for number, step in enumerate(stream.steps):
        for sublayer in _mlps(step):
            hidden = dict(zip(step.sublayers, stream.hidden[number], strict=True))
            *inside, last = sublayer.write.stages
            ends: list[tuple[Chain, AffineMap]] = [(sublayer.write, Identity())]
            if isinstance(last, Norm):
                ends.append((Chain(tuple(inside)), last))
            for output, after in ends:
                candidate = output(hidden[sublayer])
                if _same(frozen, candidate, x):
                    others = (s.write(h) for s, h in hidden.items() if s is not sublayer)
                    beside = sum(others, start=stream.x[number])
                    if after.bias is not ZERO:
                        beside = beside + after.bias
                    place = _normal(Place(layer, number + 1), len(stream.steps))
                    return WriteAt(place, step.outer, after, x, beside, f"beside {sublayer.name}")
    raise _other(frozen, layer, hook, "what the MLP gives", True)


def mlp_output(hook: str) -> str:
    """The hook point of what the MLP of the same block gives."""
    return f"{'.'.join(hook.split('.')[:2])}.{MLP_OUT[0]}"


# ---------------------------------------------------------------------- inside


def _block(frozen: FrozenPass, layer: int) -> Stream:
    return Stream.of(frozen, layers=slice(layer, layer + 1), final_norm=False, to_tokens=False)


def _same(frozen: FrozenPass, candidate: Tensor, expected: Tensor) -> bool:
    return candidate.shape == expected.shape and relative_error(candidate, expected, frozen.mask) <= frozen.tolerance


def _places(frozen: FrozenPass, stream: Stream) -> Iterator[tuple[Place, Tensor]]:
    layer = stream.layers.start
    count = len(stream.steps)
    yield from ((_normal(Place(layer, number), count), x) for number, x in enumerate(stream.x))


def _normal(place: Place, steps: int) -> Place:
    """The end of a block is the beginning of the next."""
    if place.step == steps:
        return Place(place.layer + 1, 0)
    return place


def _mlps(step: Step) -> list[Sublayer]:
    return [sublayer for sublayer in step.sublayers if sublayer.is_mlp]


def _held(frozen: FrozenPass, hook: str, mlp: bool) -> tuple[int, Tensor]:
    """A hook point's block, and what it holds in this pass."""
    frozen.view.require_chain("sparse dictionaries")
    match = re.match(r"blocks\.(\d+)\.", hook)
    # GPT-1's last output is at no hook point of a block
    ends = {frozen.capture.output_name(layer): layer for layer in range(frozen.n_layers)}
    layer = ends.get(hook, -1)
    if match:
        layer = int(match[1])
    if hook not in frozen.model.hook_dict or not 0 <= layer < frozen.n_layers:
        near = min(max(layer, 0), frozen.n_layers - 1)
        raise InvalidInputError(
            f"hook={hook!r} is no hook point of a block of this {frozen.view.description}, which has "
            f"{frozen.n_layers}; of blocks.{near} there are {', '.join(_names(frozen, near, mlp))}."
        )
    if hook in frozen.capture.activations:
        return layer, frozen.activation(hook)
    frozen.live(f"hook={hook!r}").check_hooks()
    activations, _ = capture(frozen.model, frozen.inputs, [hook], last=hook, optional=[hook])
    if hook not in activations:
        raise _other(frozen, layer, hook, "anything (it does not fire)", mlp)
    x = activations[hook].to(frozen.tokens.device)
    if x.ndim <= 2:
        x = x.reshape(*frozen.tokens.shape, x.shape[-1])
    return layer, x


def _names(frozen: FrozenPass, layer: int, mlp: bool) -> list[str]:
    """Hook points of a block that may be named."""
    known = frozen.model.hook_dict
    at = frozen.view.blocks[layer].name
    suffixes = list(RESIDUAL)
    if mlp:
        suffixes += [*MLP_IN, *MLP_OUT]
    names = [f"{at}.{suffix}" for suffix in suffixes]
    stream_names = [frozen.points.blocks[layer].resid_pre, frozen.capture.output_name(layer)]
    return list(dict.fromkeys(name for name in (*stream_names, *names) if name in known))


def _other(frozen: FrozenPass, layer: int, hook: str, what: str, mlp: bool) -> InvalidInputError:
    return InvalidInputError(
        f"hook={hook!r} does not hold {what} in this {frozen.view.description}. Try one of "
        f"{', '.join(_names(frozen, layer, mlp))}: what each of them holds is compared with the model's own steps."
    )
