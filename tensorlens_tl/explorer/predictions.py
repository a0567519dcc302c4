"""What the model says at the query, of one run or two: the likeliest tokens, and the runner-up of the target."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.explorer.inquiry import Inquiry
from tensorlens_tl.explorer.targets import next_logits, runner_up
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.operator import token_label

View = dict[str, Any]

BEST = 10
"""Next tokens that are listed."""


def prompt_view(inquiry: Inquiry) -> View:
    """Tokens of the prompt, and what the model says after the query; of two runs, what each of them says."""
    frozen = inquiry.frozen
    run = inquiry.run
    runs = [frozen]
    logits = [next_logits(inquiry.passes, inquiry.question)]
    if inquiry.question.is_comparison:
        second = inquiry.change.b
        runs.append(second)
        logits.append(logits_at(second, inquiry.query))
    target = inquiry.target
    foils = [runner_up(of, target["target"]) for of in logits]
    view = {
        "tokens": run.str_tokens[0],
        "query": inquiry.query,
        "next": _likeliest(frozen, [of.double().softmax(-1) for of in logits]),
        **{name: token_view(frozen, token) for name, token in target.items()},
        "runners_up": [token_view(frozen, token) for token in foils if token is not None],
        "proof": max(run.errors.values(), default=0.0),
        "numbers": [_number(of, target) for of in logits],
    }
    if len(runs) == 1:
        inquiry.calls.append(f"result = run.logits({inquiry.query})")
        return view
    first, second = runs
    inquiry.calls.append(f"result = [of.logits({inquiry.query}) for of in run.runs]")
    return view | {"changed": (first.tokens != second.tokens)[0].tolist()}


def logits_at(run: FrozenPass, query: int) -> Float[Tensor, "d_vocab"]:
    """A run's logits at a position."""
    logits = run.logits(query)
    assert logits is not None
    return logits[0, 0]


def token_view(frozen: FrozenPass, token: int) -> View:
    """A token's number and text."""
    return {"id": token, "text": token_label(frozen.view, token)}


def _number(logits: Float[Tensor, "d_vocab"], target: Mapping[str, int]) -> float:
    """One run's own logit of the target, or logit difference."""
    number = logits[target["target"]]
    if "minus" in target:
        number = number - logits[target["minus"]]
    return float(number)


def _likeliest(frozen: FrozenPass, chances: list[Float[Tensor, "d_vocab"]]) -> list[View]:
    """The tokens that one of the runs finds likeliest, with their probability in each."""
    best = torch.stack(chances).amax(0).argsort(descending=True)[:BEST].tolist()
    names = ("chance", "other_chance")
    return [
        token_view(frozen, token) | {name: float(of[token]) for name, of in zip(names, chances, strict=False)}
        for token in best
    ]
