"""By which routes a number itself passes each layer: of a frozen pass, or of its run under a rule."""

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.algebra import ZERO
from tensorlens_tl.algebra.memory import Memory, chunks
from tensorlens_tl.algebra.numerics import size_of_sum, upcast
from tensorlens_tl.circuits.stream import Pulled, StreamTarget, Sublayer
from tensorlens_tl.results import HEAD_ROUTES, ROUTES, ChangeRoutes

OF_HEADS = {"head": "values", "query": "queries", "key": "keys", "gate": "gates"}
"""The routes of heads, by the kind of their sublayer."""

Scores = dict[str, Float[Tensor, "query batch"]]
"""What passes one layer, by route."""

Shares = dict[str, Float[Tensor, "query batch _head"]]
"""Each head's part of it."""


def run_routes(readout: StreamTarget, memory: Memory) -> ChangeRoutes:
    """The routes of one run, a layer at a time; see `circuits.routes`."""
    frozen = readout.stream.frozen
    queries = len(readout.seed)
    by_route: list[Tensor] = []
    by_head: list[Tensor] = []
    layers: list[tuple[Scores, Shares]] = []
    for rows in chunks(queries, frozen.row_bytes, memory if queries > 1 else None, "queries"):
        pulled = readout.stream.pull(readout.seed[rows.start : rows.stop])
        layers = list(_layers(readout, pulled, slice(rows.start, rows.stop)))
        by_route.append(torch.stack([_columns(scores, ROUTES) for scores, _ in layers], dim=2))
        most = max((share.shape[-1] for _, heads in layers for share in heads.values()), default=0)
        by_head.append(torch.stack([_of_heads(scores, heads, most) for scores, heads in layers], dim=2))
    names = [f"L{layer}" for layer in readout.stream.layers]
    if len(layers) > len(names):
        names.append("end")
    scores, heads = torch.cat(by_route).transpose(0, 1), torch.cat(by_head).transpose(0, 1)
    routes = ChangeRoutes(names, scores, heads, **readout.fields())
    return frozen.checked(routes, readout.noise[..., None] / size_of_sum(scores, torch.zeros_like(scores[..., 0])))


def _layers(readout: StreamTarget, pulled: Pulled, rows: slice) -> Iterator[tuple[Scores, Shares]]:
    """What passes each layer by every route, and by each head, from the first to what follows the last."""
    stream = readout.stream
    later = readout.constant[:, rows].T
    layers: list[tuple[Scores, Shares]] = []
    backwards = reversed(list(enumerate(stream.steps)))
    for _, of_layer in groupby(backwards, key=lambda numbered: numbered[1].layer):
        passed = defaultdict[str, Tensor](partial(torch.zeros_like, later))
        heads: Shares = {}
        here = list(of_layer)
        added = torch.zeros_like(later)  # by all biases of the layer, through all that is later
        g = upcast(pulled.stream[here[0][0] + 1])
        for number, step in here:
            added = added + _dot(pulled.stream[number + 1], step.outer.bias)
            passed["constants"] = passed["constants"] + _dot(g, step.outer.bias)
            g = step.outer.pull(g)
            for sublayer, hidden in zip(step.sublayers, stream.hidden[number], strict=True):
                whole = pulled.sums[number]
                added = added + _dot(whole, sublayer.write.bias)
                added = added + _dot(sublayer.write.pull(whole), sublayer.read.bias)
                passed["constants"] = passed["constants"] + _dot(g, sublayer.write.bias)
                at_hidden = upcast(sublayer.write.pull(g))
                passed["constants"] = passed["constants"] + _dot(at_hidden, sublayer.read.bias)
                route = _route(sublayer)
                share = sublayer.shares(at_hidden, hidden - sublayer.read.bias)
                passed[route] = passed[route] + share.sum(-1)
                if route in HEAD_ROUTES:
                    heads[route] = share
        first = here[-1][0]
        passed["direct"] = _dot(g, stream.x[first])
        passed["later constants"] = later
        layers.append((dict(passed), heads))
        later = later + added
    yield from reversed(layers)


def _route(sublayer: Sublayer) -> str:
    """The route that a sublayer is."""
    if sublayer.kind in OF_HEADS:
        return f"cross {OF_HEADS[sublayer.kind]}" if sublayer.is_cross else OF_HEADS[sublayer.kind]
    return "mixer" if sublayer.kind == "mixer" else "MLP"


def _columns(scores: Scores, routes: tuple[str, ...]) -> Float[Tensor, "query batch route"]:
    none = torch.zeros_like(scores["direct"])
    return torch.stack([scores.get(route, none) for route in routes], dim=-1)


def _of_heads(scores: Scores, heads: Shares, most: int) -> Float[Tensor, "query batch head route"]:
    """Each head's share of its routes, zero where a layer has fewer heads."""
    shares = scores["direct"].new_zeros(*scores["direct"].shape, most, len(HEAD_ROUTES))
    for route, share in heads.items():
        shares[..., : share.shape[-1], HEAD_ROUTES.index(route)] = share
    return shares


def _dot(g: Float[Tensor, "query batch pos d"], x: Tensor) -> Float[Tensor, "query batch"]:
    if x is ZERO:
        return g.new_zeros(g.shape[:2])
    return (upcast(g) * x).sum((-2, -1))
