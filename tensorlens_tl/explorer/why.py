"""Why a head attends to a token: what tokens and layers give to its score, by the query and by the key, and what these
are made of."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.drawing.marks import short
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.explorer.questions import Inquiry
from tensorlens_tl.passes import Difference
from tensorlens_tl.passes.target import chosen_head
from tensorlens_tl.results import SIDES, ScoreAttribution, ScoreChange, closing, layer_of

LISTED = 6
"""Tokens and layers that a list has at least, where there are as many."""

View = dict[str, Any]


def attended(inquiry: Inquiry) -> tuple[int, int, int, list[Float[Tensor, "key"]]]:
    """Layer, head and key of a question, and the head's pattern at the query, of either run."""
    question = inquiry.question
    if question.layer is None or question.head is None:
        raise InvalidInputError("explorer: layer and head are missing; click a head.")
    run = inquiry.run
    layer, head = chosen_head(run.view, question.layer, question.head)
    query = inquiry.query
    if question.key is not None and question.key > query and run.prompt.class_at is None:
        raise InvalidInputError(f"explorer: key is {question.key}; the query, {query}, comes before it.")
    runs = run.runs if isinstance(run, Difference) else [inquiry.frozen]
    patterns = [of.pattern(layer)[0, head, query] for of in runs]
    key = question.key
    if key is None:
        gained = patterns[0] - patterns[1] if len(patterns) > 1 else patterns[0]
        key = int(gained.argmax())
    return layer, head, key, patterns


def why_view(inquiry: Inquiry) -> View:
    """Why a head attends to a key: lists of its score, or of two runs of the change of its pattern.

    A list is by token or by layer, of the query or of the key. Of one run each sums to the score; of two runs each sums
    to its side's share. `part` opens a row: a layer's parts, or a source's pairs with those of the other side.
    """
    layer, head, key, _ = attended(inquiry)
    of = "pattern" if inquiry.question.is_comparison else "score"
    place = layer, head, inquiry.query, key
    by_token: ScoreAttribution | ScoreChange
    by_token, by_part = (
        inquiry.result(inquiry.run, "circuits.qk_attribution", *place, by=way, of=of) for way in ("token", "head")
    )
    layers = by_part.by_layer()
    positions = [str(at) for at in range(len(by_token.names[0]))]
    lists = [
        {"by": by, "side": side, **_listed(result, number, names)}
        for by, result, names in (("token", by_token, positions), ("layer", layers, layers.names[0]))
        for number, side in enumerate(SIDES)
    ]
    sums: dict[str, float] = {}
    if isinstance(by_part, ScoreChange):
        sums = {side: float(sources[0].double().sum()) for side, sources in zip(SIDES, by_part.sides, strict=True)}
        sums |= dict(zip(by_part.constant_names, by_part.constants[0].tolist(), strict=True))
    part = inquiry.question.part
    return {
        "name": f"L{layer}H{head}",
        "key": key,
        "of": of,
        "lists": lists,
        "opened": None if part is None else _opened(part, by_token, by_part),
        "sums": sums,
        "total": float(by_part.total[0]),
        "gap": float(max(by_token.gap[0], by_part.gap[0])),
    }


def _listed(result: ScoreAttribution | ScoreChange, number: int, names: Sequence[str]) -> View:
    """One side's sources, what belongs to none of them, and their sum."""
    scores = result.sides[number][0]
    if isinstance(result, ScoreChange):
        return {"rows": _rows(scores, names, f"{SIDES[number]} "), "total": float(scores.double().sum())}
    alone = result.alone(0, SIDES[number])
    return {"rows": _rows(scores, names, f"{SIDES[number]} ", alone), "total": float(result.total[0])}


def _rows(
    scores: Float[Tensor, "source"], names: Sequence[str], part: str | None, alone: dict[str, float] | None = None
) -> list[View]:
    """Sources of a list, all others as one, and what stands alone; `part` and a name open one."""
    known = {*names}
    rows: list[View] = []
    for name, score in closing(scores, names, LISTED):
        opens = None if part is None or name not in known else f"{part}{name}"
        rows.append({"name": name, "score": score, "part": opens, "muted": name not in known})
    return rows + [{"name": name, "score": score, "part": None, "muted": True} for name, score in (alone or {}).items()]


def _opened(part: str, by_token: ScoreAttribution | ScoreChange, by_part: ScoreAttribution | ScoreChange) -> View:
    """What a row of a list is made of."""
    side, _, name = part.partition(" ")
    is_token = name.isdecimal() and name.isascii()
    names = [str(at) for at in range(len(by_token.names[0]))] if is_token else by_part.names[0]
    inside = [] if is_token else [at for at, source in enumerate(names) if layer_of(source) == name]
    is_pairs = isinstance(by_part, ScoreAttribution)
    if side not in SIDES or not ((name in names and is_pairs) or inside):
        raise InvalidInputError(f"explorer: part is {short(part, 40)!r}; click a row of a list.")
    number = SIDES.index(side)
    opened = {"part": part, "by": "token" if is_token else "layer", "side": side, "name": name}
    if name not in names or not is_pairs:
        scores = by_part.sides[number][0][torch.tensor(inside)]
        rows = _rows(scores, [names[at] for at in inside], f"{side} " if is_pairs else None)
        return opened | {"rows": rows, "total": float(scores.double().sum()), "pairs": False}
    result = by_token if is_token else by_part
    assert isinstance(result, ScoreAttribution)
    at = names.index(name)
    pairs = result.pairs[0].select(number, at).double()
    bias = (result.query_sources, result.key_sources)[number][0, at].double()
    sums = _summed(pairs.tolist(), names if is_token else map(layer_of, names))
    other = SIDES[1 - number]
    alone = {f"with the {other}’s bias": float(bias)} if bias else {}
    rows = _rows(torch.tensor([*sums.values()], dtype=torch.float64), [*sums], None, alone)
    return opened | {"rows": rows, "total": float(pairs.sum() + bias), "pairs": True}


def _summed(scores: Iterable[float], names: Iterable[str]) -> dict[str, float]:
    """Numbers of the same name as one."""
    sums: dict[str, float] = {}
    for score, name in zip(scores, names, strict=True):
        sums[name] = sums.get(name, 0.0) + score
    return sums
