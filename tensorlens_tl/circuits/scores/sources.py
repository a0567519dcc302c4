"""What wrote the stream that a layer's attention reads."""

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from tensorlens_tl.algebra import ZERO
from tensorlens_tl.circuits.stream import Stream
from tensorlens_tl.passes import PassOrDifference


def places_of(
    tokens: Sequence[Sequence[str]], layer: int, head: int, query: Int[Tensor, "batch"], key: Int[Tensor, "batch"]
) -> list[str]:
    """Head, query and key of each prompt in words: ``"L1H0, 5 ' the' → 2 ' value'"``."""
    pairs = zip(tokens, query.tolist(), key.tolist(), strict=True)
    return [f"L{layer}H{head}, {q} {row[q]!r} → {k} {row[k]!r}" for row, q, k in pairs]


def components_before(frozen: PassOrDifference, layer: int, by: str, activation: str = "ratio") -> dict[str, Tensor]:
    """What each component before a layer put into the stream that its attention reads, `[batch, pos, d_model]`.

    Args:
        frozen: a pass, or the difference of two: then what each component's part changes by.
        layer: which one.
        by: ``"head"``, or attention layers whole.
        activation: the rule for the MLPs before.
    """
    stream = Stream.of(frozen, activation, layers=range(layer) if layer else [0])
    parts = stream.sources()
    if layer == 0:
        return _whitened(parts, frozen, layer)
    for number, step in enumerate(stream.steps):
        written: list[tuple[str, Tensor]] = []
        for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
            if by == "head":
                written += zip(sublayer.nodes, sublayer.outputs(hidden), strict=True)
            else:
                written.append((sublayer.name, sublayer.write.push(hidden)))
        written += [(name, bias.expand_as(stream.x[0])) for name, bias, inside in step.biases if inside]
        _add(parts, written)
        parts = {name: step.outer.push(output) for name, output in parts.items()}
        _add(parts, [(name, bias.expand_as(stream.x[0])) for name, bias, inside in step.biases if not inside])
    return _whitened(parts, frozen, layer)


def _whitened(parts: dict[str, Tensor], frozen: PassOrDifference, layer: int) -> dict[str, Tensor]:
    """The same after the whitening before a layer, and what that adds where two models differ in it."""
    whitening = frozen.maps.whitening(layer)
    if whitening is None:
        return parts
    whitened = {name: whitening.push(part) for name, part in parts.items()}
    if whitening.bias is not ZERO:
        whitened[f"L{layer}.whitening"] = whitening.bias.expand_as(frozen.resid_pre(layer))
    return whitened


def _add(parts: dict[str, Tensor], more: list[tuple[str, Tensor]]) -> None:
    """Sum by name: a head of a difference writes by its values, its queries and its keys."""
    for name, part in more:
        parts[name] = parts[name] + part if name in parts else part
