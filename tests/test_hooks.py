"""Freezing inside TransformerLens workflows: every switch, any batch, gradients, and nothing left behind."""

import warnings

import pytest
import torch
from conftest import hooks_left, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl.hooks import patterns_take_effect
from tensorlens_tl.testing import model_names

LIVE = "hooked/gqa" if "hooked/gqa" in model_names() else "bridge/llama"
FAMILIES = [name for name in (LIVE, "bridge/gpt2", "bridge/opt", "bridge/bert") if name in model_names()]


@pytest.fixture(params=FAMILIES)
def frozen(request, model_named):
    return tlens.freeze(model_named(request.param), some_tokens())


def other_tokens(frozen):
    return (frozen.tokens + 7) % 40 + 3


def test_frozen_hooks_reproduce_the_run(frozen):
    own = frozen.model(**frozen.inputs)
    held = frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=frozen.fwd_hooks())
    assert torch.allclose(held, own, rtol=1e-5, atol=1e-6)
    with frozen.attached() as model:
        assert torch.allclose(model(**frozen.inputs), own, rtol=1e-5, atol=1e-6)
    assert hooks_left(frozen.model) == 0


@pytest.mark.parametrize("switched_off", ["patterns", "activations", "norms"])
def test_each_switch_leaves_its_part_live(frozen, switched_off):
    inputs = {**frozen.inputs, "input": other_tokens(frozen)}
    run = frozen.model.run_with_hooks
    all_held = run(**inputs, fwd_hooks=frozen.fwd_hooks())
    rest_held = run(**inputs, fwd_hooks=frozen.fwd_hooks(**{switched_off: False}))
    assert not torch.allclose(all_held, rest_held, rtol=1e-3)


def test_held_patterns_really_hold(frozen):
    """Also where `hook_pattern` only observes: values are mixed by the frozen pattern, whatever the tokens."""
    inputs = {**frozen.inputs, "input": other_tokens(frozen)}
    names = [n for p in frozen.points.blocks for n in (p.value, p.z)]
    seen = {}
    save = [(n, lambda t, *, hook, n=n: seen.__setitem__(n, t.detach())) for n in names]
    frozen.model.run_with_hooks(**inputs, fwd_hooks=frozen.fwd_hooks() + save)
    for layer, points in enumerate(frozen.points.blocks):
        pattern, v = frozen.pattern(layer), seen[points.value]
        v = v.repeat_interleave(pattern.shape[1] // v.shape[2], dim=2)
        mixed = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        assert torch.allclose(seen[points.z].reshape(mixed.shape), mixed, rtol=1e-9, atol=1e-12)


def test_one_prompt_serves_any_batch(frozen):
    one = tlens.freeze(frozen.model, frozen.tokens[:1])
    many = other_tokens(frozen).repeat(2, 1)
    with one.attached():
        together = frozen.model(many)
        alone = [frozen.model(row[None]) for row in many]
    assert torch.allclose(together, torch.cat(alone), rtol=1e-9, atol=1e-9)


def test_another_length_or_batch_is_refused(frozen):
    for tokens in (some_tokens(2, 5), some_tokens(3, 6)):
        with pytest.raises(tlens.FrozenModelError, match="same length"), frozen.attached():
            frozen.model(tokens)
        assert hooks_left(frozen.model) == 0


def test_hooks_are_gone_after_an_exception(frozen):
    def bad(tensor, *, hook):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), frozen.attached():
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=[(frozen.points.blocks[0].resid_pre, bad)])
    assert hooks_left(frozen.model) == 0


def test_hooks_taken_off_inside_are_noticed(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    with pytest.raises(tlens.FrozenModelError, match="removed inside"), frozen.attached() as model:
        model.reset_hooks()


def test_other_hooks_are_left_alone(frozen):
    """Somebody else's hook stays on, before and after."""
    name, calls = frozen.points.blocks[0].resid_pre, []
    frozen.model.add_hook(name, lambda t, hook: calls.append(1))
    try:
        before = hooks_left(frozen.model)
        again = tlens.freeze(frozen.model, frozen.tokens)
        with again.attached():
            frozen.model(**again.inputs)
        assert hooks_left(frozen.model) == before == 1
        assert len(calls) >= 2
    finally:
        frozen.model.reset_hooks()


def test_attached_composes_with_activation_patching(frozen):
    """A patch to the frozen model moves the output by exactly the operator's push."""
    op, name = frozen.operator(), frozen.points.blocks[0].resid_pre
    step = torch.randn_like(op.x)
    ends = frozen.points.unembed_in if frozen.view.final_norm is not None else frozen.points.last_output
    seen = []
    with frozen.attached() as model, torch.no_grad():
        for shift in (0 * step, step):
            hooks = [(name, lambda x, *, hook, s=shift: x + s), (ends, lambda x, *, hook: seen.append(x.clone()))]
            model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
    moved = seen[-1] - seen[0] if len(seen) == 2 else seen[len(seen) // 2] - seen[0]
    assert torch.allclose(moved, op.push(step), rtol=1e-5, atol=1e-6)


def test_gradients_flow_through_the_frozen_model(frozen):
    leaf = []

    def watch(x, *, hook):
        leaf.append(x.detach().clone().requires_grad_(True))
        return leaf[-1]

    logits = frozen.model.run_with_hooks(
        **frozen.inputs, fwd_hooks=[(frozen.points.blocks[0].resid_pre, watch), *frozen.fwd_hooks()]
    )
    logits[0, -1, 5].backward()
    assert bool(leaf[-1].grad.abs().sum() > 0)


def test_which_layers_take_patterns_is_measured(model_named):
    expected = {LIVE: True, "bridge/gpt2": True, "bridge/opt": False, "bridge/bert": False}
    for name in FAMILIES:
        frozen = tlens.freeze(model_named(name), some_tokens())
        sites = [block.heads for block in frozen.points.blocks]
        measured = patterns_take_effect(frozen.model, {"input": frozen.tokens[:1, :2]}, sites)
        assert measured == [expected[name]] * frozen.n_layers


def test_captured_activations_can_be_kept_off_the_device(frozen):
    kept = tlens.freeze(frozen.model, frozen.tokens, store="cpu")
    assert {t.device.type for t in kept.capture.activations.values()} == {"cpu"}
    assert torch.equal(kept.operator().in_out().scores, frozen.operator().in_out().scores)


@pytest.mark.parametrize("name", ["bridge/opt", "bridge/gpt2"])
def test_a_point_that_never_fires_is_not_passed_over(model_named, name):
    """Hooks that depend on another point refuse where that one is left out, instead of leaving the model live."""
    frozen = tlens.freeze(model_named(name), some_tokens())
    points = frozen.points.blocks[0]
    recording = {points.value, points.pre}
    hooks = [(point, hook) for point, hook in frozen.fwd_hooks() if point not in recording]
    with pytest.raises(tlens.FrozenModelError, match="did not fire"):
        frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)


def test_a_target_can_be_asked_while_attached(model_named):
    frozen = tlens.freeze(model_named("bridge/gpt2"), some_tokens())
    with frozen.attached():
        inside = frozen.operator().target(5)
    outside = tlens.freeze(model_named("bridge/gpt2"), some_tokens()).operator().target(5)
    assert torch.equal(inside.scores, outside.scores)
    assert frozen.errors["unembed"] < 1e-9


def test_no_graph_is_kept_alive(model_named):
    frozen = tlens.freeze(model_named("bridge/opt"), some_tokens())
    hooks = frozen.fwd_hooks()
    frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks).sum().backward()
    held = [cell.cell_contents for _, hook in hooks for cell in hook.__closure__ or ()]
    live = [value for thing in held if isinstance(thing, dict) for value in thing.values()]
    assert not live


def test_only_the_warning_about_our_own_edits_of_a_scale_is_left_out():
    """TransformerLens says of every edited scale that the output is computed from it: held scales are edited."""
    bridge = tlens.testing.tiny_model("bridge/llama")
    tokens = torch.tensor([[1, 2, 3, 4]])
    frozen = tlens.freeze(bridge, tokens)
    edit = ("blocks.0.ln1.hook_scale", lambda scale, hook: scale * 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with frozen.attached():
            bridge(tokens)
            warnings.warn("another", UserWarning, stacklevel=1)
        assert [str(warning.message) for warning in said] == ["another"]
        assert warnings.filters == before
        bridge.run_with_hooks(tokens, fwd_hooks=[edit])
    assert str(said[-1].message).startswith("A forward hook edited")
