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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Identity, Segment, Sum, Tap, stages_of
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import maybe, size_of_sum, upcast
from tensorlens_tl.algebra.positions import widened
from tensorlens_tl.algebra.secants import Offset, offset_terms, pull_noting
from tensorlens_tl.circuits.arguments import Direction, RuleLike
from tensorlens_tl.circuits.stream import Pulled, StreamTarget, Sublayer, stream_target, target_under
from tensorlens_tl.circuits.two_runs.reading import Reading
from tensorlens_tl.core import recordable
from tensorlens_tl.models import Query, TokenLike, Within
from tensorlens_tl.passes import Difference, PassOrDifference
from tensorlens_tl.results import HEAD_ROUTES, ROUTES, ChangeRoutes

ATTENTION = "attention"
BESIDE = "beside"
MLP = "mlp"
CROSSING = "crossing"
KINDS = ("values", "queries", "keys", "gates")
"""What a head reads, in the order of the secant of attention; most have no gate."""
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
    if not isinstance(difference, Difference) or rule is not None:
        readout = stream_target(difference, target, minus, direction, query, "ratio", one=False)
        return _of_one_run(target_under(readout, rule, "routes"), memory)
    reading = Reading.of(difference, target, minus, direction, query)
    scores: list[Tensor] = []
    heads: list[Tensor] = []
    for seed in reading.seeds(memory):
        cuts = list(_cuts(reading, seed))[::-1]
        scores.append(torch.stack([cut.scores() for cut in cuts], dim=2))
        heads.append(_stacked(cuts))
    layers = [f"L{layer}" for layer in range(difference.n_layers)]
    whole = torch.cat(scores).transpose(0, 1)
    whole[..., ROUTES.index("later constants")] += reading.constant[..., None]
    routes = ChangeRoutes([*layers, "end"], whole, torch.cat(heads).transpose(0, 1), **reading.fields())
    sizes = size_of_sum(whole, torch.zeros_like(whole[..., 0]))
    return difference.checked(routes, reading.noise[..., None] / sizes)


@dataclass
class _Cut:
    """What passes one depth by every route, `[query, batch]`, and by each head, `[query, batch, head]`.

    Attributes:
        x: the change where it begins.
        by_route, by_head: what was counted so far.
        seen: what every norm and sublayer reads, of the change.
        pulled: the vector at what sublayers write and at what the scales of norms add by responding.
    """

    x: Float[Tensor, "batch pos d_model"]
    by_route: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    by_head: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    seen: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    pulled: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def add(self, route: str, value: Float[Tensor, "query batch"]) -> None:
        """More of a route."""
        if route in self.by_route:
            value = self.by_route[route] + value
        self.by_route[route] = value

    def add_heads(
        self,
        route: str,
        written: AffineMap,
        changes: Mapping[str, Tensor],
        g: Float[Tensor, "query batch pos width"],
        heads: int,
    ) -> None:
        """What heads give by one route, along a vector at what they give.

        Args:
            route: its name.
            written: from what it reads to what heads give, side by side.
            changes: what it reads, by how a norm before it lets it pass.
            g: the vector.
            heads: how many.
        """
        for how, change in changes.items():
            products = (g * written.push(change)).unflatten(-1, (heads, -1))
            share = products.sum((2, -1))
            self.by_head[f"{route}{how}"] = share
            self.add(f"{route}{how}", share.sum(-1))

    def add_constants(self, m: AffineMap, g: Float[Tensor, "query batch pos d"]) -> None:
        """What the weights of two models add inside a map, along a vector at its end."""
        for _, value in offset_terms(m, g):
            self.add("constants", value.sum(-1))

    def add_stream(
        self, direct: AffineMap, norms: Mapping[str, AffineMap], g: Float[Tensor, "query batch pos d"]
    ) -> None:
        """What goes past every sublayer, and what norms on that way add by responding.

        Args:
            direct: the way past, made of `tapped`, `held_norm` and `absent`.
            norms: its norms by name.
            g: the vector at its end.
        """
        self.add_constants(direct, g)
        self.add("direct", _dot(direct.pull(g), self.x))
        for name, norm in norms.items():
            if name in self.pulled:  # that before cross-attention is part of the route by its queries
                self.add("norms", _dot(self.pulled[name], _parts_of(norm)[1].push(self.seen[name])))

    def tapped(self, name: str, part: AffineMap) -> Chain:
        """A part that notes what it reads."""
        return Chain((Tap(self.seen, name), part))

    def held_norm(self, name: str, norm: AffineMap) -> Chain:
        """A norm with its scale held, which notes the vector that the scale's response would get."""
        assert isinstance(norm, Chain)
        held, _ = _parts_of(norm)
        return Chain((Sum((held, self.absent(name))), *norm.stages[1:]))

    def absent(self, name: str) -> Chain:
        """Nothing in place of a part, which notes the vector that the part would get."""
        return Chain((Diagonal(self.x.new_zeros(1, 1, 1)), Tap(self.seen, name, self.pulled)))

    def tapped_crossing(self, within: Within) -> Within:
        """Where a block acts, noting the stream that its cross-attention reads."""
        if within.read is None:
            return within
        return replace(within, read=self.tapped(CROSSING, within.read))

    def without_crossing(self, within: Within) -> Within:
        """Where a block acts, with nothing in place of cross-attention, as `absent`."""
        if within.read is None:
            return within
        return replace(within, read=Identity(), out=self.absent(CROSSING))

    def scores(self) -> Float[Tensor, "query batch route"]:
        """Of all routes, zero where there is none."""
        zero = torch.zeros_like(self.by_route["direct"])
        return torch.stack([self.by_route.get(route, zero) for route in ROUTES], dim=-1)


# ------------------------------------------------------------------ one run


def _of_one_run(readout: StreamTarget, memory: Memory) -> ChangeRoutes:
    """The routes of the number itself, along the steps of its stream."""
    frozen = readout.stream.frozen
    queries = len(readout.seed)
    scores: list[Tensor] = []
    heads: list[Tensor] = []
    cuts: list[_Cut] = []
    for rows in chunks(queries, frozen.row_bytes, memory if queries > 1 else None, "queries"):
        chosen = slice(rows.start, rows.stop)
        pulled = readout.stream.pull(readout.seed[chosen])
        cuts = list(_cuts_of_steps(readout, pulled, readout.constant[:, chosen].T))[::-1]
        scores.append(torch.stack([cut.scores() for cut in cuts], dim=2))
        heads.append(_stacked(cuts))
    layers = [f"L{layer}" for layer in readout.stream.layers]
    whole = torch.cat(scores).transpose(0, 1)
    routes = ChangeRoutes([*layers, "end"][: len(cuts)], whole, torch.cat(heads).transpose(0, 1), **readout.fields())
    return frozen.checked(routes, readout.noise[..., None] / size_of_sum(whole, torch.zeros_like(whole[..., 0])))


def _cuts_of_steps(readout: StreamTarget, pulled: Pulled, later: Float[Tensor, "query batch"]) -> Iterator[_Cut]:
    """The cuts from the end to the first layer; `later` is what is added after all of them.

    What a sublayer writes goes past the others of its layer, whose own routes have what it gives them.
    """
    stream = readout.stream
    backwards = reversed(list(enumerate(stream.steps)))
    for _, of_layer in groupby(backwards, key=lambda numbered: numbered[1].layer):
        steps = list(of_layer)
        first, last = steps[-1][0], steps[0][0]
        cut = _Cut(stream.x[first])
        cut.add("later constants", later)
        g = pulled.stream[last + 1]
        for number, step in steps:
            cut.add("constants", _dot(g, step.outer.bias))
            later = later + _dot(pulled.stream[number + 1], step.outer.bias)
            g = step.outer.pull(g)
            for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
                whole = pulled.sums[number]
                later = later + _dot(whole, sublayer.write.bias)
                later = later + _dot(sublayer.write.pull(whole), sublayer.read.bias)
                cut.add("constants", _dot(g, sublayer.write.bias))
                at_hidden = sublayer.write.pull(g)
                cut.add("constants", _dot(at_hidden, sublayer.read.bias))
                route = _route(sublayer)
                shares = sublayer.shares(at_hidden, hidden - sublayer.read.bias)
                cut.add(route, shares.sum(-1))
                if route in HEAD_ROUTES:
                    cut.by_head[route] = shares
        cut.add("direct", _dot(g, cut.x))
        yield cut


def _route(sublayer: Sublayer) -> str:
    """The route that a sublayer of one run is."""
    of_heads = {"head": "values", "query": "queries", "key": "keys", "gate": "gates"}
    if sublayer.kind in of_heads:
        return f"{'cross ' * sublayer.is_cross}{of_heads[sublayer.kind]}"
    return "mixer" if sublayer.kind == "mixer" else "MLP"


# ------------------------------------------------------------------ two runs


def _cuts(reading: Reading, g: Float[Tensor, "query batch pos d"]) -> Iterator[_Cut]:
    """The cuts from the end to the first layer."""
    difference = reading.difference
    cut = _end(reading, g)
    later = torch.zeros_like(cut.by_route["direct"])

    def note(offset: Offset, vectors: Tensor) -> None:
        nonlocal later
        later = later + _dot(vectors, offset.vectors)

    g = pull_noting(reading.ends(), g, note)
    yield cut
    for layer in reversed(range(difference.n_layers)):
        cut = _block(difference, layer, g)
        cut.add("later constants", later)
        g = pull_noting(difference.maps.block_map(layer), g, note)
        yield cut


def _end(reading: Reading, g: Float[Tensor, "query batch pos d"]) -> _Cut:
    """What follows the last block."""
    cut = _Cut(reading.difference.resid_pre(reading.difference.n_layers))
    norms: dict[str, AffineMap] = {}

    def noted(name: str, norm: AffineMap) -> AffineMap:
        norms[name] = norm
        return cut.tapped(name, norm)

    reading.ends(noted)(cut.x)
    cut.add_stream(reading.ends(cut.held_norm), norms, g)
    return cut


def _block(difference: Difference, layer: int, g: Float[Tensor, "query batch pos d_model"]) -> _Cut:
    """What passes one block by every route, along a vector at its output."""
    maps = difference.maps
    layout = difference.layouts[layer]
    parts = maps.parts(layer)
    block = difference.view.blocks[layer]
    heads = block.attention.heads if block.mixer is None else 0
    cut = _Cut(difference.resid_pre(layer))
    sublayers = {ATTENTION: parts.attention}
    if parts.beside is not None:
        sublayers[BESIDE] = parts.beside
    if parts.mlp is not None:
        sublayers[MLP] = parts.mlp
    tapped = {name: cut.tapped(name, part) for name, part in sublayers.items()}
    norms = {name: cut.tapped(name, norm) for name, norm in parts.norms.items()}
    within = maybe(cut.tapped_crossing, parts.within)
    maps.composed(layer, layout, parts._replace(**tapped, norms=norms, within=within))(cut.x)
    absent = {name: cut.absent(name) for name in sublayers}
    held = {name: cut.held_norm(name, norm) for name, norm in parts.norms.items()}
    within = maybe(cut.without_crossing, parts.within)
    cut.add_stream(maps.composed(layer, layout, parts._replace(**absent, norms=held, within=within)), parts.norms, g)
    for name, place in ((ATTENTION, layout.attn), (BESIDE, layout.attn), (MLP, layout.mlp)):
        if name in sublayers:
            _add_sublayer(cut, name, sublayers[name], maybe(parts.norms.get, place.before), place.before or name, heads)
    if layout.cross is not None and parts.within is not None:
        before = maybe(parts.norms.get, layout.cross.before)
        _add_crossing(cut, parts.within, before, block.require_cross_attention().heads)
    return cut


def _add_sublayer(cut: _Cut, name: str, sublayer: AffineMap, before: AffineMap | None, reads: str, heads: int) -> None:
    """What a sublayer writes, with the scale of the norm before it held, and by the response of that scale."""
    g = cut.pulled[name]
    changes = _by_scale(cut.seen[reads], before)
    cut.add_constants(sublayer if before is None else Chain((before, sublayer)), g)
    if name != ATTENTION or not heads:
        route = "MLP" if name == MLP else "mixer"
        for how, change in changes.items():
            cut.add(f"{route}{how}", _dot(g, sublayer.push(change)))
        return
    assert isinstance(sublayer, Chain)
    kinds, *after = sublayer.stages
    at_heads = upcast(Chain(tuple(after)).pull(g))
    for kind, route in zip(KINDS, kinds.summands, strict=False):
        cut.add_heads(kind, route, changes, at_heads, heads)


def _add_crossing(cut: _Cut, within: Within, before: AffineMap | None, heads: int) -> None:
    """What heads of cross-attention write, by the encoder's output, the decoder's queries and the encoder's keys."""
    assert within.read is not None
    assert within.out is not None
    g = cut.pulled[CROSSING]
    x = cut.seen[CROSSING]
    cut.add_constants(Chain((within.read, within(within.out, only=True))), widened(g, within.start, within.length))
    by_values, by_queries, by_keys = within.read.summands
    at_heads = upcast(within.out.pull(g))
    for kind, route in (("values", by_values), ("keys", by_keys)):
        cut.add_heads(f"cross {kind}", route, {"": x}, widened(at_heads, within.start, within.length), heads)
    (of_decoder,) = stages_of(by_queries)
    assert isinstance(of_decoder, Segment)
    assert isinstance(of_decoder.inner, Chain)
    stages = of_decoder.inner.stages if before is None else of_decoder.inner.stages[1:]
    changes = _by_scale(x[:, within.start : within.stop], before)
    cut.add_heads("cross queries", Chain(stages), changes, at_heads, heads)


def _by_scale(x: Float[Tensor, "batch pos d_model"], before: AffineMap | None) -> dict[str, Tensor]:
    """What a sublayer reads after the norm before it, with its scale held, and by the response of the scale."""
    if before is None:
        return {"": x}
    assert isinstance(before, Chain)
    after = Chain(before.stages[1:])
    held, response = _parts_of(before)
    return {"": after.push(held.push(x)), SCALE: after.push(response.push(x))}


def _parts_of(norm: AffineMap) -> tuple[AffineMap, AffineMap]:
    """A norm with its scale held, and what the scale adds by responding."""
    assert isinstance(norm, Chain)
    held, response = norm.stages[0].summands
    return held, response


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
