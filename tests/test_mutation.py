"""The model is changed between freezing and use: refused, or valid and right; and user-installed hooks."""

import pytest
import torch
from conftest import close, hooks_left, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.models.lifecycle import WeightState
from tensorlens_tl.testing import model_names, tiny_model

GPT2, BERT = "bridge/gpt2", "bridge/bert"


@pytest.fixture
def model():
    return tiny_model(GPT2)


@pytest.fixture
def frozen(model):
    return tlens.freeze(model, some_tokens())


def uses(frozen):
    """Everything that would mix the pass with the model's weights of now."""
    operator = frozen.operator()
    return {
        "operator": frozen.operator,
        "in_out": operator.in_out,
        "norm": operator.norm,
        "contributions": operator.contributions,
        "slice": operator.slice,
        "dense": operator.dense,
        "target": lambda: operator.target(5),
        "fwd_hooks": frozen.fwd_hooks,
        "attached": lambda: frozen.attached().__enter__(),
        "last_logits": lambda: frozen.last_logits,
        "logit_attribution": lambda: circuits.logit_attribution(frozen, 5),
        "paths": lambda: circuits.paths(frozen, 5),
        "qk_attribution": lambda: circuits.qk_attribution(frozen, 1, 0, query=-1, key=1),
        **{
            method: lambda method=method: tlens.attribute(frozen, method=method)
            for method in (
                "tensorlens",
                "attention",
                "rollout",
                "norm",
                "globenc",
                "alti",
                "decompx",
                "ff-ig",
                "mean",
                "value-zeroing",
            )
        },
        "ifr": lambda: tlens.attribute(frozen, method="ifr"),
        **{
            method: lambda method=method: tlens.attribute(frozen, method=method, target=5)
            for method in (
                "input-x-gradient",
                "integrated-gradients",
                "alti-logit",
                "chefer",
                "leave-one-out",
                "relp",
                "attnlrp",
            )
        },
    }


def in_place(model):
    with torch.no_grad():
        model.blocks[1].attn.original_component.c_proj.weight.mul_(1.1)


def through_data(model):
    model.blocks[1].attn.original_component.c_proj.weight.data.mul_(1.1)


def one_head_through_data(model):
    model.blocks[1].attn.original_component.c_proj.weight.data[4:8] = 0


def one_neuron_through_data(model):
    model.blocks[0].mlp.original_component.c_fc.weight.data[:, 17] = 0


def one_token_through_data(model):
    next(p for p in model.parameters() if p.shape == (48, 16)).data[31] += 1


def one_bias_through_data(model):
    model.blocks[0].mlp.original_component.c_fc.bias.data[3] += 1


def one_number_through_data(model):
    model.blocks[0].mlp.original_component.c_fc.weight.data[0, 3] += 1e-9


def new_storage(model):
    weight = model.blocks[0].mlp.original_component.c_fc.weight
    weight.data = weight.data.clone()


def new_parameter(model):
    inner = model.blocks[0].mlp.original_component.c_fc
    inner.weight = torch.nn.Parameter(inner.weight.detach().clone())


def cast(model):
    model.to(torch.float32)


def moved(model):
    model.to("meta")


def loaded(model):
    model.load_state_dict(tiny_model(GPT2, seed=1).state_dict())


def trained(model):
    model(some_tokens()).sum().backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()


def processed(model):
    model.enable_compatibility_mode(disable_warnings=True)


CHANGES = [
    in_place, through_data, one_head_through_data, one_neuron_through_data, one_token_through_data,
    one_bias_through_data, one_number_through_data, new_storage, new_parameter, cast, moved, loaded, trained, processed,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.few(6)
def test_a_pass_older_than_the_weights_is_refused(model, frozen, change):
    stale = uses(frozen)
    change(model)
    for use in stale.values():
        with pytest.raises(tlens.FrozenModelError, match="Freeze again"):
            use()
    assert hooks_left(model) == 0


@pytest.mark.parametrize("change", ["in place", "cast", "loaded"])
def test_a_pass_and_its_operator_older_than_the_weights_are_refused(change):
    model = tiny_model(GPT2)
    frozen = tlens.freeze(model, some_tokens())
    operator = frozen.operator()
    if change == "in place":
        with torch.no_grad():
            next(iter(model.parameters())).mul_(1.1)
    elif change == "cast":
        model.to(torch.float32)
    else:
        model.load_state_dict(tiny_model(GPT2, seed=1).state_dict())
    for stale in (frozen.operator, operator.in_out, operator.norm, operator.contributions, frozen.fwd_hooks):
        with pytest.raises(tlens.FrozenModelError, match="Freeze again"):
            stale()


def test_a_pass_is_fresh_again_where_the_weights_are(model, frozen):
    scores = frozen.operator().in_out().scores
    model.blocks[1].attn.original_component.c_proj.weight.data.mul_(2)
    with pytest.raises(tlens.FrozenModelError):
        frozen.operator()
    model.blocks[1].attn.original_component.c_proj.weight.data.div_(2)
    assert torch.equal(frozen.operator().in_out().scores, scores)


ABLATIONS = {
    "a head": lambda weight: weight[4:8].zero_(),
    "one number": lambda weight: weight[3, 2].add_(1e-9),
    "all of it": lambda weight: weight.neg_(),
    "two numbers change places": lambda weight: weight[5].copy_(weight[5, [1, 0, *range(2, weight.shape[1])]]),
    "two signs": lambda weight: weight[5].mul_(torch.where(weight[5].abs() >= weight[5].abs().topk(2)[0][1], -1, 1)),
}


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_weights_restored_in_place_are_the_same_weights(model, frozen, ablation):
    """An ablation needs no new pass."""
    scores = frozen.operator().in_out().scores
    weight = model.blocks[1].attn.original_component.c_proj.weight
    for _ in range(2):
        before = weight.detach().clone()
        with torch.no_grad():
            ABLATIONS[ablation](weight)
        assert not torch.equal(before, weight)
        with pytest.raises(tlens.FrozenModelError):
            frozen.operator()
        with torch.no_grad():
            weight.copy_(before)
        assert torch.equal(frozen.operator().in_out().scores, scores)
    in_place(model)
    with pytest.raises(tlens.FrozenModelError):
        frozen.operator()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(5, 7), (4, 16, 4), (9,), (1,), (3, 1 << 18)])
def test_any_single_number_and_any_two_that_change_places_are_noticed(shape, dtype):
    """A write through .data is noticed by the sum, one that torch counts by the hash."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype))
    state = WeightState.of(module)
    bits = module.weight.data.view(torch.uint8).view(-1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        place = int(torch.randint(len(bits), (), generator=generator))
        bit = int(torch.randint(8, (), generator=generator))
        bits[place] ^= 1 << bit
        assert not state.holds(module), (place, bit)
        bits[place] ^= 1 << bit
        assert state.holds(module)
    numbers = module.weight.data.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    numbers = numbers.view(-1)
    for _ in range(20):
        two = torch.randperm(min(len(numbers), 1000), generator=generator)[:2]
        if len(two) < 2 or numbers[two[0]] == numbers[two[1]]:
            continue
        numbers[two] = numbers[two.flip(0)]
        with torch.no_grad():
            module.weight.copy_(module.weight.clone())  # torch counts it
        assert not state.holds(module), two
        numbers[two] = numbers[two.flip(0)]
        assert state.holds(module)


@pytest.mark.parametrize("shape", [(5, 7), (7, 5), (16, 24), (1, 9), (4, 16, 4), (4, 4, 16), (9,), ()])
def test_every_row_column_and_head_is_sampled(shape):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(shape))
    state = WeightState.of(module)
    assert state.holds(module)
    slices = [(*(slice(None),) * axis, index) for axis in range(len(shape)) for index in range(shape[axis])]
    for where in slices or [...]:
        module.weight.data[where] += 1
        assert not state.holds(module), where
        state = WeightState.of(module)


def test_weights_that_are_nan_where_nobody_looks_are_no_change():
    model = tiny_model(GPT2)
    with torch.no_grad():
        next(p for p in model.parameters() if p.shape == (48, 16))[0] = float("nan")  # a token the prompt lacks
    frozen = tlens.freeze(model, some_tokens())
    frozen.check_fresh()


def test_what_may_change_without_harm(model, frozen):
    """Gradients, requires_grad, a train mode without dropout, another prompt: the pass is still its own."""
    before = frozen.operator().in_out().scores
    model(some_tokens(seed=3)).sum().backward()
    model.requires_grad_(False)
    model.train()
    tlens.attribute(model, some_tokens(seed=4))
    assert torch.equal(frozen.operator().in_out().scores, before)
    with frozen.attached():
        model(**frozen.inputs)


def test_dropout_switched_on_later_is_refused_where_the_model_runs(model, frozen):
    next(m for m in model.original_model.modules() if isinstance(m, torch.nn.Dropout)).p = 0.3
    model.original_model.train()
    frozen.operator().in_out()  # algebra: no run, no dropout
    for live in (frozen.fwd_hooks, lambda: frozen.last_logits):
        with pytest.raises(tlens.InvalidInputError, match=r"model\.eval"):
            live()


def test_passes_of_two_prompts_and_lengths_interleave(model):
    a, b = tlens.freeze(model, some_tokens(2, 6)), tlens.freeze(model, some_tokens(1, 3, seed=5))
    alone = [tlens.freeze(tiny_model(GPT2), f.tokens).operator().in_out("all").scores for f in (a, b)]
    with a.attached():
        model(**a.inputs)
        inside = b.operator().in_out("all").scores
    with b.attached():
        model(**b.inputs)
    assert torch.equal(a.operator().in_out("all").scores, alone[0])
    assert torch.equal(b.operator().in_out("all").scores, inside)
    assert torch.equal(inside, alone[1])


def test_two_passes_do_not_interfere(model_named):
    model = model_named(GPT2)
    a, b = (tlens.freeze(model, some_tokens(seed=seed)) for seed in (0, 1))
    first = a.operator().in_out().scores
    with b.attached():
        model(**b.inputs)
    assert torch.equal(a.operator().in_out().scores, first)


# ------------------------------------------------------------------------------- user-installed hooks


def test_other_peoples_hooks_are_respected_and_reported(model):
    """An edit that the algebra can follow is part of the pass: the model's own output is the edited one."""
    plain = tlens.freeze(model, some_tokens())
    assert plain.other_hooks == []
    assert "hooks" not in tlens.attribute(plain).provenance
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: 0.5 * x)
    frozen = tlens.freeze(model, some_tokens())
    (name,) = frozen.other_hooks  # a Bridge's points have several names
    assert model.hook_dict[name] is model.hook_dict["blocks.0.hook_resid_pre"]
    assert "other_hooks=1" in repr(frozen)
    assert tlens.attribute(frozen).provenance["hooks"] == name
    assert float(frozen.operator().in_out().gap.max()) < 1e-9
    assert close(frozen.operator().target(5).total[:, 0], model(some_tokens())[:, -1, 5])
    with frozen.attached():
        model(**frozen.inputs)
    assert hooks_left(model) == 1


def test_hooks_of_transformer_lens_itself_are_not_reported():
    for name in (BERT, "bridge/opt"):
        assert tlens.freeze(tiny_model(name), some_tokens()).other_hooks == []


def test_permanent_hooks_and_gradient_hooks_are_reported(model):
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: x, is_permanent=True)
    model.add_hook("blocks.1.attn.hook_z", lambda g, hook: None, dir="bwd")
    reported = {id(model.hook_dict[name]) for name in tlens.freeze(model, some_tokens()).other_hooks}
    assert reported == {id(model.hook_dict[name]) for name in ("blocks.0.hook_resid_pre", "blocks.1.attn.hook_z")}


def test_hooks_put_on_later_do_not_change_a_pass(model, frozen):
    before = frozen.operator().in_out().scores
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: 0 * x)
    assert torch.equal(frozen.operator().in_out().scores, before)
    with frozen.attached():
        assert not close(model(**frozen.inputs)[:, -1, 5], frozen.operator().target(5).total[:, 0])


# ------------------------------------------------------------------------------- errors inside a run


class Interrupted(BaseException):
    pass


ERRORS = [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError, RuntimeError, Interrupted, GeneratorExit]


def raised_inside(model, error, run):
    """An error raised by a hook in the last block, after ours are on."""

    def bad(tensor, hook):
        raise error

    model.add_hook("blocks.1.hook_resid_pre", bad)
    with pytest.raises(error):
        run()
    model.reset_hooks()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize(
    "run",
    [
        lambda m, f: tlens.freeze(m, some_tokens()),
        lambda m, f: tlens.attribute(m, some_tokens(), method="rollout"),
        lambda m, f: m.run_with_hooks(**f.inputs, fwd_hooks=f.fwd_hooks()),
        lambda m, f: tlens.attribute(f, method="input-x-gradient", target=5),
        lambda m, f: tlens.attribute(f, method="integrated-gradients", target=5, steps=2),
        lambda m, f: tlens.attribute(f, method="value-zeroing"),
        lambda m, f: tlens.attribute(f, method="chefer", target=5),
        lambda m, f: tlens.attribute(f, method="leave-one-out", target=5),
        lambda m, f: tlens.attribute(f, method="gim", target=5),
        lambda m, f: f.last_logits,
        lambda m, f: f.operator().target(5, query=0),
        lambda m, f: circuits.logit_attribution(f, 5, query=0),
        lambda m, f: circuits.total_effects(f, 5, live=True),
    ],
    ids=[
        "freeze", "rollout", "fwd_hooks", "ixg", "ig", "value-zeroing", "chefer", "leave-one-out", "gim",
        "last_logits", "unembedding", "circuits", "total",
    ],
)  # fmt: skip
@pytest.mark.few(10)
def test_an_error_inside_a_run_leaves_no_hook(model, frozen, run, error):
    raised_inside(model, error, lambda: run(model, frozen))
    assert hooks_left(model) == 0
    tlens.freeze(model, some_tokens())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_inside_an_attached_run_leaves_the_block_to_its_caller(model, frozen, error):
    """Entered by hand, and never left."""
    raised_inside(model, error, lambda: frozen.attached().__enter__()(**frozen.inputs))
    tlens.freeze(model, some_tokens())


def test_an_error_leaves_other_peoples_hooks_where_they_were(model, frozen):
    model.add_hook("blocks.0.hook_resid_pre", lambda x, hook: x)
    for wrong in (lambda: tlens.freeze(model, [3, 99]), lambda: tlens.attribute(frozen, method="decompx", bias="no")):
        with pytest.raises(tlens.InvalidInputError):
            wrong()
    assert hooks_left(model) == 1


@pytest.mark.skipif(not any(name.startswith("hooked/") for name in model_names()), reason="TransformerLens 4")
@pytest.mark.parametrize("name", ["W_Q", "W_K", "W_V", "W_O"])
@pytest.mark.parametrize("axis", [1, 2])
def test_every_channel_of_every_head_is_sampled(name, axis):
    model = tiny_model("hooked/ln")
    for channel in range(getattr(model.blocks[0].attn, name).shape[axis]):
        frozen = tlens.freeze(model, some_tokens())
        getattr(model.blocks[0].attn, name).data.select(axis, channel).add_(1)
        with pytest.raises(tlens.FrozenModelError, match="Freeze again"):
            frozen.check_fresh()


def test_weights_of_every_kind_have_a_state():
    """Made under inference mode, empty, in float8 beside bfloat16."""
    module = torch.nn.Module()
    with torch.inference_mode():
        module.inference = torch.nn.Parameter(torch.randn(3, 4), requires_grad=False)
    module.empty = torch.nn.Parameter(torch.zeros(0, 4))
    module.brain = torch.nn.Parameter(torch.randn(3, 4).bfloat16())
    module.eight = torch.nn.Parameter(torch.randn(3, 4).to(torch.float8_e4m3fn), requires_grad=False)
    state = WeightState.of(module)
    assert state.holds(module)
    module.brain.data[2] += 1
    assert not state.holds(module)
