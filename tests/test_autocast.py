"""Inside torch.autocast nothing is computed: its products are neither the pass's nor the model's own outside."""

import importlib.util

import pytest
import torch
from conftest import hooks_left, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits, evaluate
from tensorlens_tl.testing import tiny_model

TARGET = 3


def _class_exists(name):
    return name.startswith("bridge") or importlib.util.find_spec("transformer_lens.HookedTransformer") is not None


NAMES = [name for name in ("hooked/ln", "bridge/gpt2", "bridge/llama") if _class_exists(name)]


def in_float32(name):
    model = tiny_model(name).to(torch.float32)
    model.cfg.dtype = torch.float32
    return model


class Case:
    """A model, and passes and an operator of it that were taken outside autocast."""

    def __init__(self, name):
        self.model = in_float32(name)
        self.frozen = tlens.freeze(self.model, some_tokens(1, 6))
        self.other = tlens.freeze(self.model, some_tokens(1, 6, seed=1))
        self.operator = self.frozen.operator()
        self.vector = torch.randn(self.operator.x.shape)


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    return Case(request.param)


def _method(name):
    def ask(case):
        about = {"target": TARGET} if tlens.get_method(name).explains_prediction() else {}
        return tlens.attribute(case.frozen, method=name, **about)

    return ask


def _check(name):
    return lambda case: getattr(evaluate, name)(case.model, some_tokens(1, 6), ["tensorlens in_out", "alti"])


QUESTIONS = {
    "freeze": lambda case: tlens.freeze(case.model, some_tokens(1, 6)),
    "recompute": lambda case: tlens.freeze(case.model, some_tokens(1, 6), patterns="recompute"),
    "attribute a model": lambda case: tlens.attribute(case.model, some_tokens(1, 6), target=TARGET),
    "operator": lambda case: case.frozen.operator(),
    "push": lambda case: case.operator.push(case.vector),
    "pull": lambda case: case.operator.pull(case.vector),
    "call": lambda case: case.operator(case.vector),
    "transposed": lambda case: case.operator.T.push(case.vector),
    "contributions": lambda case: case.operator.contributions(),
    "slice": lambda case: case.operator.slice(),
    "norm": lambda case: case.operator.norm(),
    "in_out": lambda case: case.operator.in_out(),
    "target": lambda case: case.operator.target(TARGET),
    "gradient": lambda case: case.operator.gradient(TARGET),
    "logits": lambda case: case.frozen.logits(),
    "a map's bias": lambda case: case.frozen.block(0).bias,
    "weights' logits": lambda case: case.frozen.view.logits(case.frozen.unembedded()),
    "hooks": lambda case: case.frozen.fwd_hooks(),
    "logit_attribution": lambda case: circuits.logit_attribution(case.frozen, TARGET),
    "total_effects": lambda case: circuits.total_effects(case.frozen, TARGET),
    "total_effects, live": lambda case: circuits.total_effects(case.frozen, TARGET, live=True),
    "top_paths": lambda case: circuits.top_paths(case.frozen, TARGET),
    "contribution_graph": lambda case: circuits.contribution_graph(case.frozen, TARGET),
    "patch_scores": lambda case: circuits.patch_scores(case.frozen, case.other, TARGET, 4),
    "edge_scores": lambda case: circuits.edge_scores(case.frozen, case.other, TARGET, 4),
    "ov": lambda case: circuits.ov(case.model, 0, 0),
    "copying_scores": lambda case: circuits.copying_scores(case.model),
    "composition_scores": lambda case: circuits.composition_scores(case.model, "K"),
    **{f"method {name}": _method(name) for name in tlens.list_methods()},
    **{f"evaluate.{name}": _check(name) for name in ("completeness", "stability", "agreement", "randomisation")},
}


@pytest.mark.parametrize("what", QUESTIONS)
def test_questions_inside_autocast_are_refused(case, what):
    with torch.autocast("cpu"), pytest.raises(tlens.InvalidInputError, match=r"torch.autocast\('cpu'\) is on"):
        QUESTIONS[what](case)
    assert hooks_left(case.model) == 0
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):  # as the message says
        case.operator.push(case.vector)


def test_a_recomputed_pattern_is_not_made_inside_autocast():
    frozen = tlens.freeze(in_float32("bridge/gpt2"), some_tokens(1, 6), patterns="recompute")
    with torch.autocast("cpu"), pytest.raises(tlens.InvalidInputError, match=r"torch\.autocast"):
        frozen.pattern(0)


def test_a_held_model_does_not_run_inside_autocast(case):
    model, frozen = case.model, case.frozen
    with frozen.attached():
        with torch.autocast("cpu"), pytest.raises(tlens.InvalidInputError, match=r"torch\.autocast"):
            model(frozen.tokens)
        model(frozen.tokens)
    assert hooks_left(model) == 0


def test_autocast_of_another_device_changes_nothing(case):
    with torch.autocast("cuda", enabled=torch.cuda.is_available(), dtype=torch.bfloat16):
        assert tlens.freeze(case.model, some_tokens(1, 6)).errors
