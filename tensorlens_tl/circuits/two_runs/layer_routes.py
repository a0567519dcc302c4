"""By which routes the change of a number passes each layer: heads, mixers in their place, the MLP, norm scales.

Let g be the target's vector pulled back to a block's output, and Δx the change of the stream there. ⟨g, Δx⟩, with what
the weights of two models add later, is the whole change. What the block writes is a sum of routes: the stream that goes
past it, each head by its values, its queries, its keys and its gate where it has one, or what mixes positions in place
of attention, the heads of an encoder–decoder's cross-attention, and the MLP by the slopes of its activation. Before
such a sublayer a norm divides by a scale that responds (the map of rank one of its secant): every route is split into
what passes with the scale held, and what the response of the scale adds. Norms around the stream or after a sublayer
respond likewise, and are a route of their own.

Each layer is a cut through the same change: its scores sum to all of it. **Layers do not add up to each other**: what
passes layer 0 by a head's keys may pass layer 1 directly, and counts in both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra import AffineMap, Chain, Segment, Sum
from tensorlens_tl.algebra.memory import Memory
from tensorlens_tl.algebra.numerics import size_of_sum, upcast
from tensorlens_tl.algebra.secants import RankOne
from tensorlens_tl.circuits.arguments import Direction, RuleLike
from tensorlens_tl.circuits.stream import StreamTarget, Sublayer, stream_target, target_under
from tensorlens_tl.circuits.two_runs.target import change_target
from tensorlens_tl.core import recordable
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import Difference, PassOrDifference
from tensorlens_tl.results import HEAD_ROUTES, ROUTES, ChangeRoutes

SCALE = ", scale"
"""What a route by the response of a norm's scale is called beside the same with the scale held."""


@recordable()
@checked_names
def routes(
    difference: PassOrDifference,
    target: TokenLike = None,
    minus: TokenLike = None,
    *,
    query: Query = -1,
    direction: Direction = None,
    rule: RuleLike = None,
    memory: Memory = None,
) -> ChangeRoutes:
    """By which routes the change of a number passes each layer, exactly; of one pass, the number itself.

    At layer l, with the target's vector pulled back to the block's output, every route's score is what it writes there
    along that vector: past the layer (``"direct"``), by each head's values, by its attention through queries and
    through keys, by its gate where it has one (``"gates"``), through what mixes positions in place of attention
    (``"mixer"``), and through the MLP by the slopes of its activations. Where the norm before the sublayer responds
    with its scale, that is a route of its own (``"values, scale"``). ``"norms"`` are the responses of norms around the
    stream or after a sublayer (post-LN, sandwich blocks), and of the one after an encoder. ``"constants"`` is what the
    changed weights of two models add in this layer, ``"later constants"`` after it. A last row, ``"end"``, is what
    follows the last block: the final norm and a masked model's transform, whose own routes are ``"direct"`` and
    ``"norms"``.

    A head of an encoder–decoder's cross-attention responds by what it reads of the encoder's output, by the decoder's
    queries and by the encoder's keys: ``"cross values"``, ``"cross queries"``, ``"cross keys"``. The decoder's stream
    goes past an encoder's layer, and the encoder's output past a decoder's, directly.

    The scores of each layer sum to the whole change. Layers do not add up to each other: every layer is a cut through
    one and the same change, seen at that depth.

    Of one pass, the routes are those of the frozen model, or under a rule of its run: what passes with scales held or
    not is one route then, and ``"constants"`` are all biases of a layer.

    Args:
        difference: of two passes, of one model or of two; or one pass.
        target, minus, direction: the number whose change is explained, as in `FrozenOperator.target`.
        query: positions, the last real token by default; see `tensorlens_tl.passes.inputs.query_positions`.
        rule: of one pass, what stands in place of the frozen model, as in `contribution_graph`.
        memory: what several queries may allocate at once, as ``"512MB"`` or bytes.

    Returns:
        Scores by layer and route, and each head's share of them.

    Raises:
        InvalidInputError: no pass or difference, a rule for a difference, a query out of range, and what
            `FrozenOperator.target` refuses.
        UnsupportedModelError: a token target where the logits are not ``cap(W_U·x + b_U)``.
        FrozenModelError: a model is no longer that of its run.

    Source: ours; the rules are those of `tensorlens_tl.algebra.secants`.

    >>> other = tlens.freeze(model, text.replace("red", "blue"))
    >>> by = tlens.circuits.routes(tlens.difference(frozen, other), " value")
    >>> torch.allclose(by.scores.sum(-1), by.total[..., None], atol=1e-4)
    True
    >>> by.layers[0], by.layers[-1]
    ('L0', 'end')
    """
    if isinstance(difference, Difference) and rule is None:
        readout = change_target(difference, target, minus, direction, query)
    else:
        readout = stream_target(difference, target, minus, direction, query, "ratio", one=False)
        readout = target_under(readout, rule, "routes")
    readout = replace(readout, stream=readout.stream.anchored())
    frozen = readout.stream.frozen
    layers = [*readout.stream.layers]  # and what follows the last block, of one run where there is any
    if isinstance(frozen, Difference) or any(step.layer < 0 for step in readout.stream.steps):
        layers.append(-1)
    scores: list[Tensor] = []
    heads: list[Tensor] = []
    for rows in readout.some_queries(frozen.row_bytes, memory):
        cuts = list(_cuts(readout, layers, rows))[::-1]
        scores.append(torch.stack([cut.scores() for cut in cuts], dim=2))
        heads.append(_stacked(cuts))
    names = ["end" if layer < 0 else f"L{layer}" for layer in layers]
    whole = torch.cat(scores).transpose(0, 1)
    routes = ChangeRoutes(names, whole, torch.cat(heads).transpose(0, 1), **readout.fields())
    return frozen.checked(routes, readout.noise[..., None] / size_of_sum(whole, torch.zeros_like(whole[..., 0])))


@dataclass
class _Cut:
    """What passes one depth by every route, `[query, batch]`, and by each head, `[query, batch, head]`.

    Attributes:
        by_route, by_head: what was counted so far.
    """

    by_route: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    by_head: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add(self, route: str, value: Float[Tensor, "query batch"]) -> None:
        """More of a route."""
        if route in self.by_route:
            value = self.by_route[route] + value
        self.by_route[route] = value

    def held(self, m: AffineMap, x: Tensor, g: Float[Tensor, "query batch pos d"]) -> AffineMap:
        """A map with the scale of its norm held; what the scale adds by responding is a route of the norms.

        Args:
            m: the map.
            x: what it reads.
            g: the vector at its end.
        """
        stages = m.stages if isinstance(m, Chain) else (m,)
        for number, stage in enumerate(stages):
            held, response = _by_scale(stage)
            if response is not None:
                before, after = stages[:number], stages[number + 1 :]
                self.add("norms", _dot(Chain(after).pull(g), response.push(Chain(before)(x))))
                return Chain((*before, held, *after))
        return m

    def add_sublayer(
        self, sublayer: Sublayer, x: Float[Tensor, "batch pos d_model"], hidden: Tensor, g: Tensor
    ) -> None:
        """What a sublayer gives by its route and by the scale of the norm before it, along a vector where it writes."""
        write = self.held(sublayer.write, hidden, g)
        self.add("constants", _dot(g, write.bias))
        g = write.pull(g)
        self.add("constants", _dot(g, sublayer.read.bias))
        changes = {"": hidden - sublayer.read.bias}
        _, response = _by_scale(sublayer.read)
        if response is not None:
            changes[SCALE] = response.push(x)
            changes[""] = changes[""] - changes[SCALE]
        for how, change in changes.items():
            route = f"{_route(sublayer)}{how}"
            shares = sublayer.shares(g, change)
            self.add(route, shares.sum(-1))
            if route in HEAD_ROUTES:
                self.by_head[route] = shares

    def scores(self) -> Float[Tensor, "query batch route"]:
        """Of all routes, zero where there is none."""
        zero = torch.zeros_like(self.by_route["direct"])
        return torch.stack([self.by_route.get(route, zero) for route in ROUTES], dim=-1)


def _cuts(readout: StreamTarget, layers: Sequence[int], queries: slice) -> Iterator[_Cut]:
    """The cuts from the end to the first layer.

    What a sublayer writes goes past the others of its layer, whose own routes have what it gives them.
    """
    stream = readout.stream
    pulled = stream.pull(readout.seed_of(queries))
    later = readout.constant[:, queries].T  # what is added after a layer
    before = len(stream.steps)
    for layer in reversed(layers):
        numbers = [number for number, step in enumerate(stream.steps) if step.layer == layer]
        cut = _Cut()
        cut.add("later constants", later)
        g = pulled.stream[before]
        for number in reversed(numbers):
            before = number
            g = _add_step(cut, readout, number, g)
            step, at_sum = stream.steps[number], pulled.sums[number]
            later = later + _dot(pulled.stream[number + 1], step.outer.bias)
            for sublayer in step.sublayers:
                later = later + _dot(at_sum, sublayer.write.bias)
                later = later + _dot(sublayer.write.pull(at_sum), sublayer.read.bias)
        cut.add("direct", _dot(g, stream.x[before]))
        yield cut


def _add_step(cut: _Cut, readout: StreamTarget, number: int, g: Float[Tensor, "query batch pos d"]) -> Tensor:
    """What passes a step by its sublayers and by its norms; the vector that what goes past them meets before it."""
    stream = readout.stream
    step, x = stream.steps[number], stream.x[number]
    if isinstance(stream.frozen, Difference) and any(part.kind == "per_layer" for part in step.sublayers):
        cut.add("constants", _dot(g, step.map.bias))
        return step.map.pull(g)  # between two runs what a token brings into a layer belongs to the way past it
    written = sum((part.write(h) for part, h in zip(step.sublayers, stream.hidden[number], strict=True)), start=x)
    outer = cut.held(step.outer, written, g)
    cut.add("constants", _dot(g, outer.bias))
    g = outer.pull(g)
    for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
        cut.add_sublayer(sublayer, x, hidden, g)
    return g


def _by_scale(m: AffineMap) -> tuple[AffineMap, AffineMap | None]:
    """A map that may begin with a norm of two runs: with the scale held, and what the scale adds by responding."""
    match m:
        case Sum(terms=(held, RankOne() as response)):
            return held, response
        case Chain(stages=(first, *rest)):
            held, response = _by_scale(first)
            return Chain((held, *rest)), response and Chain((response, *rest))
        case Segment():
            held, response = _by_scale(m.inner)
            return replace(m, inner=held), response and replace(m, inner=response, only=True)
        case _:
            return m, None


def _route(sublayer: Sublayer) -> str:
    """The route that a sublayer is."""
    of_heads = {"head": "values", "query": "queries", "key": "keys", "gate": "gates"}
    if sublayer.kind in of_heads:
        return f"{'cross ' * sublayer.is_cross}{of_heads[sublayer.kind]}"
    return "mixer" if sublayer.kind == "mixer" else "MLP"


def _dot(g: Float[Tensor, "query batch pos d"], x: Tensor) -> Float[Tensor, "query batch"]:
    """⟨g, x⟩; `x` may be one vector for all positions, or a bias that is zero."""
    return (upcast(g) * x).sum((-2, -1))


def _stacked(cuts: Sequence[_Cut]) -> Float[Tensor, "query batch layer head route"]:
    """Each head's share of its routes; a layer with fewer heads, as the end with none, is zero there."""
    most = max((share.shape[-1] for cut in cuts for share in cut.by_head.values()), default=0)
    none = torch.zeros_like(cuts[0].by_route["direct"])[..., None].expand(-1, -1, most)
    layers: list[Tensor] = []
    for cut in cuts:
        shares = [cut.by_head.get(route, none) for route in HEAD_ROUTES]
        layers.append(torch.stack([pad(share, (0, most - share.shape[-1])) for share in shares], dim=-1))
    return torch.stack(layers, dim=2)
