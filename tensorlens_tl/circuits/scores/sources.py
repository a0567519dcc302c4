"""What comes before the heads of a layer read the stream, and what wrote that stream."""

from torch import Tensor

from tensorlens_tl.algebra import Chain
from tensorlens_tl.circuits.scores.place import ScorePlace
from tensorlens_tl.circuits.scores.reading import stream_to
from tensorlens_tl.passes import PassOrDifference


def maps_before(frozen: PassOrDifference, place: ScorePlace, activation: str = "ratio") -> Chain:
    """All that comes before the heads of a layer read the stream, as a map of what enters the first block."""
    earlier = [frozen.maps.block_map(number, activation=activation) for number in range(place.layer)]
    stream, until = stream_to(frozen, range(place.layer, place.layer + 1), cross=place.cross, activation=activation)
    return Chain((*earlier, *(step.map for step in stream.steps[:until])))


def components_before(
    frozen: PassOrDifference, place: ScorePlace, by: str, activation: str = "ratio"
) -> dict[str, Tensor]:
    """What each component put into the stream that the heads of a layer read, `[batch, pos, d_model]`.

    Args:
        frozen: a pass, or the difference of two: then what each component's part changes by.
        place: tells the layer.
        by: ``"head"``, or attention layers whole.
        activation: the rule for the MLPs before.
    """
    stream, until = stream_to(frozen, range(place.layer + 1), cross=place.cross, activation=activation)
    parts = stream.sources()
    for step, hiddens in zip(stream.steps[:until], stream.hidden[:until], strict=True):
        written: list[tuple[str, Tensor]] = []
        for sublayer, hidden in zip(step.sublayers, hiddens, strict=True):
            if by == "head":
                written += zip(sublayer.nodes, sublayer.outputs(hidden), strict=True)
            else:
                written.append((sublayer.name, sublayer.write.push(hidden)))
        written += [(name, bias.expand_as(stream.x[0])) for name, bias, inside in step.biases if inside]
        _add(parts, written)
        parts = {name: step.outer.push(output) for name, output in parts.items()}
        _add(parts, [(name, bias.expand_as(stream.x[0])) for name, bias, inside in step.biases if not inside])
    return parts


def _add(parts: dict[str, Tensor], more: list[tuple[str, Tensor]]) -> None:
    """Sum by name: a head of a difference writes by its values, its queries and its keys."""
    for name, part in more:
        parts[name] = parts[name] + part if name in parts else part
