"""Passes of one run share the reading of their model only while the model is what was read."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.models import lifecycle
from tensorlens_tl.models.activations import in_one_kernel
from tensorlens_tl.models.lifecycle import WeightState
from tensorlens_tl.passes import one_check, one_reading
from tensorlens_tl.testing import tiny_model


@pytest.fixture(params=["bridge/llama", "bridge/gpt2"])
def model(request):
    return tiny_model(request.param)


@contextmanager
def nothing():
    yield


@pytest.fixture(params=[one_reading, nothing])
def inside(request):
    """Also elsewhere, passes share the reading of another that is still there."""
    return request.param


def test_passes_share_a_view(model, inside):
    tokens = some_tokens()
    with inside():
        first, second = tlens.freeze(model, tokens), tlens.freeze(model, tokens)
    assert first.view is second.view
    assert first.points is second.points


def test_a_view_stays_as_long_as_a_pass_has_it(model):
    view = weakref.ref(tlens.freeze(model, some_tokens()).view)
    gc.collect()
    assert view() is None


def test_a_model_with_another_tokenizer_is_read_again(model, inside):
    with inside():
        first = tlens.freeze(model, some_tokens())
        model.tokenizer = object.__new__(type("Tokenizer", (), {"all_special_ids": (), "__len__": lambda self: 0}))
        assert tlens.freeze(model, some_tokens()).view is not first.view


def _through_data(model):
    next(model.parameters()).data[:] += 0.1


def _in_place(model):
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)


def _hooked(model):
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: x + 0.1)


@pytest.mark.parametrize("change", [_through_data, _in_place, _hooked])
def test_a_changed_model_is_read_again(change, inside):
    model = tiny_model("bridge/gpt2")
    tokens = some_tokens()
    with inside():
        before = tlens.freeze(model, tokens)
        change(model)
        after = tlens.freeze(model, tokens)
        scores = after.operator().in_out().scores
    assert after.view is not before.view
    assert torch.equal(scores, tlens.freeze(model, tokens).operator().in_out().scores)
    model.reset_hooks()


def test_a_model_in_another_mode_is_read_again(inside):
    """RWKV halves its stream in eval mode."""
    model = tiny_model("bridge/rwkv")
    tokens = some_tokens()
    with inside():
        before = tlens.freeze(model, tokens)
        model.train()
        after = tlens.freeze(model, tokens)
    assert after.view is not before.view
    assert after.proof is not None


def test_hook_points_are_those_of_now(model, inside):
    """What heads write is shown where it was switched on."""
    tokens = some_tokens()
    with inside():
        for shown in (False, True, False):
            model.set_use_attn_result(shown)
            points = tlens.freeze(model, tokens).points
            assert [block.head_writes is not None for block in points.blocks] == [shown, shown]


def test_another_model_is_read_by_itself():
    models = [tiny_model("bridge/llama"), tiny_model("bridge/gpt2")]
    with one_reading():
        views = [tlens.freeze(model, some_tokens()).view for model in (*models, models[0])]
    assert [view.model for view in views] == [*models, models[0]]


def test_gelu_of_the_libraries_is_computed_by_one_kernel():
    from transformers.activations import NewGELUActivation

    written = NewGELUActivation()
    z = torch.linspace(-12, 12, 999, dtype=torch.float64)
    assert in_one_kernel(written, z.dtype) is not written
    torch.testing.assert_close(in_one_kernel(written, z.dtype)(z), written(z), rtol=1e-9, atol=1e-14)
    assert in_one_kernel(written, torch.bfloat16) is written


def test_an_activation_with_anything_of_somebody_else_stays():
    from transformers.activations import NewGELUActivation

    hooked = NewGELUActivation()
    hooked.register_forward_hook(lambda *_: None)
    replaced = NewGELUActivation()
    replaced.forward = torch.relu
    for phi in (hooked, replaced, torch.relu, torch.nn.SiLU()):
        assert in_one_kernel(phi, torch.float32) is phi


def test_without_proof_nothing_is_shared(model):
    """What a check of a shared reading may miss (a buffer written through .data, say) a proof sees."""
    with one_reading():
        first = tlens.freeze(model, some_tokens(batch=1))
        assert tlens.freeze(model, some_tokens(batch=1)).view is first.view
        assert tlens.freeze(model, some_tokens(batch=1), verify=False).view is not first.view


def test_one_question_compares_a_pass_with_its_model_once(model, monkeypatch):
    compared: list[WeightState] = []
    holds = WeightState.holds

    def counted(state: WeightState, model: torch.nn.Module) -> bool:
        compared.append(state)
        return holds(state, model)

    monkeypatch.setattr(WeightState, "holds", counted)
    tlens.attribute(model, some_tokens(batch=1), 5)
    assert not compared  # it was frozen for the question
    frozen = tlens.freeze(model, some_tokens(batch=1))
    tlens.attribute(frozen, 5)
    assert compared == [frozen.capture.weights]


def test_a_change_inside_one_question_is_noticed_as_it_ends(model):
    frozen = tlens.freeze(model, some_tokens(batch=1))

    def question() -> None:
        with one_check(model), torch.no_grad():
            frozen.check_fresh()
            next(model.parameters()).add_(1)
            frozen.check_fresh()  # not compared again

    with pytest.raises(tlens.FrozenModelError, match="while this question was answered"):
        question()
    with pytest.raises(tlens.FrozenModelError, match="weights were changed"):
        frozen.check_fresh()


def test_a_hook_that_writes_single_numbers_past_the_count_is_noticed_as_the_question_ends(model):
    a, b = some_tokens(batch=2)
    unused = next(token for token in range(model.cfg.d_vocab) if token not in a and token not in b)
    column = (unused + 1) % model.cfg.d_model  # not among the numbers that a pass stores
    writes: list[float] = []

    def write(*_: object) -> None:
        model.embed.W_E.data[unused, column] += sum(writes)

    handle = model.blocks[0].register_forward_hook(write)
    try:
        first, second = (tlens.freeze(model, tokens[None]) for tokens in (a, b))
        circuits.patch_scores(first, second, 5, method="gradient")
        writes.append(1.0)
        with pytest.raises(tlens.FrozenModelError, match="while this question was answered"):
            circuits.patch_scores(first, second, 5, method="gradient")
    finally:
        handle.remove()


def test_a_change_inside_one_question_that_is_taken_back_is_none(model):
    with one_check(model):
        frozen = tlens.freeze(model, some_tokens(batch=1))
        weight = next(model.parameters())
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(1)
            weight.copy_(before)
    frozen.check_fresh()


QUESTIONS = {
    "difference": lambda a, b: tlens.difference(a, b),
    "scores of nodes": lambda a, b: circuits.patch_scores(a, b, 5, method="gradient"),
    "edges": lambda a, b: circuits.edge_scores(a, b, 5, method="difference"),
    "terms": lambda a, b: circuits.logit_attribution(a, 5),
    "paths": lambda a, b: circuits.top_paths(a, 5, 3),
    "graph": lambda a, b: circuits.contribution_graph(a, 5),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_reads_all_weights_once_for_all_its_passes(model, monkeypatch, name):
    a, b = (tlens.freeze(model, tokens[None]) for tokens in some_tokens(batch=2))
    read = []
    sums = lifecycle._sums
    monkeypatch.setattr(lifecycle, "_sums", lambda weights: read.append(len(weights)) or sums(weights))
    QUESTIONS[name](a, b)
    assert len(read) == 1
    with torch.no_grad():
        next(model.parameters()).data.view(-1)[1] += 5
    with pytest.raises(tlens.FrozenModelError, match="weights were changed"):
        QUESTIONS[name](a, b)
