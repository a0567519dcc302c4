"""Ctrl-C, or a hook that takes all hooks off: no hook of ours stays on a model, and no run goes on without them."""

import random
import sys

import pytest
import torch
from conftest import hooks_left

import tensorlens_tl as tlens
from tensorlens_tl.hooks import is_attached, lock_of, take_off_leftovers
from tensorlens_tl.hooks.running import run_placing
from tensorlens_tl.testing import model_names, tiny_model

MODELS = [name for name in ("bridge/llama", "hooked/ln") if name in model_names()]
POINTS = 4
"""At how many instructions each question is interrupted."""

PROMPT = torch.tensor([[3, 4, 5, 6]])

QUESTIONS = {
    "leave-one-out": lambda model: tlens.attribute(model, PROMPT, 7, method="leave-one-out", replacement="zero"),
    "value-zeroing": lambda model: tlens.attribute(model, PROMPT, method="value-zeroing"),
    "attnlrp": lambda model: tlens.attribute(model, PROMPT, 7, method="attnlrp"),
    "integrated-gradients": lambda model: tlens.attribute(model, PROMPT, 7, method="integrated-gradients", steps=2),
    "difference": lambda model: tlens.attribute(model, PROMPT, 7, method="difference", baseline="mean"),
    "attached": lambda model: _attached(model),
    "patching": lambda model: tlens.circuits.total_effects(tlens.freeze(model, PROMPT), 7, live=True),
}


def _attached(model):
    with tlens.freeze(model, PROMPT).attached() as held:
        return held(PROMPT)


class _Interrupting:
    """Raises KeyboardInterrupt at the n-th instruction that this thread runs in the files that place hooks."""

    FILES = ("hooks/running.py", "hooks/capture.py", "live/layers.py", "hook_points.py")

    def __init__(self, number):
        self.left = number

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        frame.f_trace_opcodes = True
        return self._within

    def _within(self, frame, event, argument):
        if event == "opcode" and not self._in_finaliser(frame):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._within

    @staticmethod
    def _in_finaliser(frame):
        """Python itself swallows what is raised there."""
        while frame is not None:
            if frame.f_code.co_name == "__del__":
                return True
            frame = frame.f_back
        return False


def _enter(model):
    """As a run inside of a run does."""
    take_off_leftovers(model)


def _clean(model, own, what):
    assert not hooks_left(model), what
    assert not any("forward" in vars(module) for module in model.modules()), what
    assert torch.equal(model(PROMPT).detach(), own), what


IN_TURN = [
    pytest.param(name, question, marks=[] if (place + number) % len(MODELS) == 0 else pytest.mark.whole)
    for place, name in enumerate(MODELS)
    for number, question in enumerate(QUESTIONS)
]
"""One question of one model, the next of the other."""


@pytest.mark.parametrize(("name", "question"), IN_TURN)
def test_an_interrupt_at_any_instruction_leaves_no_hook(name, question):
    model = tiny_model(name)
    own = model(PROMPT).detach()
    level = model.context_level
    QUESTIONS[question](model)  # everything imported and proved
    counting = _Interrupting(0)
    sys.settrace(counting)
    try:
        QUESTIONS[question](model)
    finally:
        sys.settrace(None)
    total = -counting.left
    interrupted = 0
    for number in random.Random(question).sample(range(1, total + 1), POINTS):
        sys.settrace(_Interrupting(number))
        try:
            QUESTIONS[question](model)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        _clean(model, own, number)
        assert model.context_level == level
    assert interrupted == POINTS
    assert bool(torch.isfinite(tlens.attribute(model, PROMPT, 7).scores).all())
    with tlens.freeze(model, PROMPT).attached():
        assert is_attached(model)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_second_interrupt_leaves_is_taken_off_by_the_next_run(name):
    model = tiny_model(name)
    own = model(PROMPT).detach()
    kept = []  # as a traceback keeps them

    def cut_short(keep=kept.append):
        placing = run_placing(model)
        placing.at_points(model, model.hook_dict, [("blocks.0.hook_resid_pre", lambda stream, *, hook: 0 * stream)])
        keep(placing)

    def running():
        placing = run_placing(model)
        placing.at_points(model, model.hook_dict, [("blocks.1.hook_resid_pre", lambda stream, *, hook: 0 * stream)])
        _enter(model)
        still_there = placing.is_whole and hooks_left(model)
        placing.take_off()
        return still_there

    with lock_of(model):
        cut_short()
        assert not torch.equal(model(PROMPT).detach(), own)
        assert running() == 1  # what this thread is about to take off itself stays
    _clean(model, own, "between")
    with lock_of(model):
        cut_short()
    frozen = tlens.freeze(model, PROMPT)
    assert not frozen.other_hooks
    _clean(model, own, "after")
    with lock_of(model):
        cut_short(keep=id)
    _clean(model, own, "freed")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("question", ["leave-one-out", "value-zeroing", "attnlrp", "integrated-gradients", "patching"])
@pytest.mark.few(3)
def test_hooks_that_are_taken_off_during_a_run_are_missed(name, question):
    """Whichever call of a user's hook takes them off: the answer is that of an undisturbed run, or refused by name."""
    model = tiny_model(name)
    scores = QUESTIONS[question](model).scores
    refusals = []
    for stop in range(1, 12):
        calls = 0

        def reset(stream, *, hook, stop=stop):
            nonlocal calls
            calls += 1
            if calls == stop:
                model.reset_hooks()

        model.add_hook("blocks.0.hook_resid_pre", reset)
        try:
            assert torch.allclose(QUESTIONS[question](model).scores, scores, atol=1e-5), stop
        except tlens.FrozenModelError as error:
            refusals.append(str(error))
        finally:
            model.reset_hooks()
    assert refusals
    assert all("removed" in refusal for refusal in refusals)
