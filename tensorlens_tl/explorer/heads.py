"""One head: where it attends, what it moves to the answer, why it attends there, and what it promotes."""

from typing import Any

from tensorlens_tl.circuits import full_ov
from tensorlens_tl.errors import InvalidInputError, TensorLensError
from tensorlens_tl.explorer.inquiry import Inquiry
from tensorlens_tl.explorer.parts import TOP, why_rows
from tensorlens_tl.explorer.predictions import token_view
from tensorlens_tl.passes import Difference, FrozenPass
from tensorlens_tl.passes.operator import chosen_head

View = dict[str, Any]


def head_view(inquiry: Inquiry) -> View:
    """Where a head attends, what it moves, what it promotes, and why it attends there.

    Raises:
        InvalidInputError: no head was named, or a key after the query.
    """
    question = inquiry.question
    if question.layer is None or question.head is None:
        raise InvalidInputError("explorer: layer and head are missing; click a head.")
    run = inquiry.run
    frozen = inquiry.frozen
    layer, head = chosen_head(frozen.view, question.layer, question.head)
    query = inquiry.query
    if question.key is not None and question.key > query and frozen.prompt.class_at is None:
        raise InvalidInputError(f"explorer: key is {question.key}; the query, {query}, comes before it.")
    name = f"L{layer}H{head}"
    patterns = [frozen.pattern(layer)[0, head, query]]
    strength = patterns[0]
    if isinstance(run, Difference):
        patterns.append(run.b.pattern(layer)[0, head, query])
        strength = (patterns[0] - patterns[1]).abs()
    terms = inquiry.result(run, "circuits.logit_attribution", by="head_token", **inquiry.aim)
    moved = terms.keys[0, 0, terms.names.index(name)]
    key = question.key
    if key is None:
        key = int(strength.argmax())
    return {
        "name": name,
        "pattern": patterns[0].tolist(),
        "other_pattern": patterns[1].tolist() if len(patterns) > 1 else None,
        "moved": moved.nan_to_num(0.0).tolist(),
        "score": float(terms[name][0, 0]),
        "key": key,
        "reads": frozen.str_tokens[0][key],
        "why": _why(inquiry, layer, head, query, key),
        "promotes": _promotes(frozen, layer, head, key),
    }


def _why(inquiry: Inquiry, *place: int) -> View:
    """Why a head attends there: the score, or the change of its pattern, by components.

    Args:
        inquiry: of one run, or the difference of two.
        place: layer, head, query and key.
    """
    run = inquiry.run
    of = "pattern" if isinstance(run, Difference) else "score"
    try:
        parts = inquiry.result(run, "circuits.qk_attribution", *place, by="head", of=of)
    except TensorLensError as error:
        return {"refused": str(error)}
    return {
        "of": of,
        "rows": why_rows(parts),
        "total": float(parts.total[0]),
        "gap": float(parts.gap[0]),
    }


def _promotes(frozen: FrozenPass, layer: int, head: int, key: int) -> list[View]:
    """The tokens whose logits a head raises most where it reads the key's token, by its weights alone."""
    try:
        circuit = full_ov(frozen, layer, head)
    except TensorLensError:
        return []
    row = circuit.A[frozen.tokens[0, key]] @ circuit.B
    best = row.topk(min(TOP, len(row)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [token_view(frozen, token) | {"score": score} for token, score in pairs]
