"""Runs of the live model for a pass: they are of the pass's own model, whatever somebody else's code does there."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import close, hooks_left, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits, compress, evaluate
from tensorlens_tl.circuits.effects import Ablation
from tensorlens_tl.circuits.live import LiveTarget
from tensorlens_tl.hooks import other_hooks
from tensorlens_tl.methods import gradients
from tensorlens_tl.methods.live_logits import LiveLogits
from tensorlens_tl.passes import frozen as frozen_module
from tensorlens_tl.passes.live import EarlierLayers, Form
from tensorlens_tl.testing import model_names, tiny_model

MODELS = [name for name in ("hooked/ln", "bridge/gpt2") if name in model_names()]
every_class = pytest.mark.parametrize("name", MODELS)


def _vector(model):
    noise = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return 2 * noise


def _add(model, rows):
    """What adds a vector to some rows of an activation, at one position."""
    vector = _vector(model)

    def add(tensor):
        tensor = tensor.clone()
        tensor[rows, 3] += vector
        return tensor

    return add


def _transformer_lens_hook(model, add):
    model.add_hook("blocks.0.hook_resid_pre", lambda tensor, hook: add(tensor))


def _torch_hook(model, add):
    model.embed.register_forward_hook(lambda module, args, output: add(output))


def _torch_pre_hook(model, add):
    model.blocks[0].register_forward_pre_hook(lambda module, args: (add(args[0]), *args[1:]))


def _forward(model, add):
    module = getattr(model.embed, "original_component", model.embed)
    forward = module.forward
    module.forward = lambda *args, **kwargs: add(forward(*args, **kwargs))


def _class_forward(model, add):
    """Nobody can see it: the class of one module is another."""
    module = getattr(model.embed, "original_component", model.embed)

    class Changed(type(module)):
        def forward(self, *args, **kwargs):
            return add(super().forward(*args, **kwargs))

    module.__class__ = Changed


SEEN = {
    "hook": _transformer_lens_hook,
    "torch hook": _torch_hook,
    "torch pre-hook": _torch_pre_hook,
    "forward": _forward,
}


def _patching(model, frozen):
    corrupted = tlens.freeze(model, some_tokens(1, 6, seed=5))
    return circuits.patch_scores(frozen, corrupted, 5, method="patching").scores


def _attributed(method, **options):
    return lambda model, frozen: tlens.attribute(frozen, method=method, **options).scores


def _ablation(model, frozen):
    """The first call has unchanged copies in its run, the second does not."""
    ablation = Ablation(frozen)
    first, second = (ablation.logits(["L0H1"], by="mean") for _ in range(2))
    assert close(first, second)
    return first


QUESTIONS = {
    "total_effects": lambda model, frozen: circuits.total_effects(frozen, 5, live=True, query=[2, -1]).scores,
    "patch_scores": _patching,
    "ablation": _ablation,
    "leave-one-out": _attributed("leave-one-out", target=5, replacement=7, query=[2, -1]),
    "deleted": _attributed("leave-one-out", target=5, replacement="delete"),
    "value-zeroing": _attributed("value-zeroing"),
    "chefer": _attributed("chefer", target=5, query=[3, 4, -1]),
    "input-x-gradient": _attributed("input-x-gradient", target=5, query="all"),
    "integrated-gradients": _attributed("integrated-gradients", target=5, steps=3, query=[2, -1]),
}
BY_COPIES = {"total_effects", "patch_scores", "leave-one-out", "deleted"}
"""Value zeroing runs copies too, but puts the pass's own input before its first block."""


# ------------------------------------------------------------------ code that acts on one row


@every_class
@pytest.mark.parametrize(
    ("question", "kind"),
    [(question, "hook") for question in QUESTIONS] + [("total_effects", kind) for kind in SEEN if kind != "hook"],
)
@pytest.mark.few(8)
def test_what_acts_on_one_row_reaches_every_copy(name, question, kind):
    """With one prompt, adding to row 0 and adding to every row is the same model."""
    found = []
    for rows in (0, slice(None)):
        model = tiny_model(name)
        SEEN[kind](model, _add(model, rows))
        frozen = tlens.freeze(model, some_tokens(1, 6))
        assert len(frozen.other_hooks) == 1
        found.append(QUESTIONS[question](model, frozen))
    plain = tiny_model(name)
    assert not close(QUESTIONS[question](plain, tlens.freeze(plain, some_tokens(1, 6))), found[1], 1e-3)
    assert close(found[0], found[1], 1e-9)


@every_class
def test_total_effects_beside_a_hook_on_one_row_by_hand(name):
    model = tiny_model(name)
    add, tokens = _add(model, 0), some_tokens(1, 6)
    model.add_hook("blocks.0.hook_resid_pre", lambda tensor, hook: add(tensor))
    frozen = tlens.freeze(model, tokens)
    effects, own = circuits.total_effects(frozen, 5, live=True), model(tokens)[0, -1, 5]
    for layer in range(2):
        for head in range(4):

            def without(z, hook, head=head):
                z = z.clone()
                z[:, :, head] = 0
                return z

            number = model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", without)])[0, -1, 5]
            column = effects.names.index(f"L{layer}H{head}")
            assert close(effects.scores[0, 0, column], (own - number).detach())


@every_class
def test_two_prompts_beside_a_hook_on_the_second(name):
    """A batch of copies is of the pass's own shape, so that the second row is the second prompt."""
    tokens, added = some_tokens(2, 6), tiny_model(name)
    _transformer_lens_hook(added, _add(added, 1))
    both = QUESTIONS["total_effects"](added, tlens.freeze(added, tokens))
    every = tiny_model(name)
    _transformer_lens_hook(every, _add(every, slice(None)))
    second = QUESTIONS["total_effects"](every, tlens.freeze(every, tokens[1:]))
    plain = tiny_model(name)
    first = QUESTIONS["total_effects"](plain, tlens.freeze(plain, tokens[:1]))
    assert close(both, torch.cat([first, second]))


@every_class
@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.few(12)
def test_what_nobody_can_see_is_refused_where_it_acts_on_some_rows(name, row, question):
    model = tiny_model(name)
    _class_forward(model, _add(model, row))
    frozen = tlens.freeze(model, some_tokens(1, 6))
    assert frozen.other_hooks == []
    if question in BY_COPIES:
        with pytest.raises(tlens.FrozenModelError, match=r"no longer reproduces|different results|another number"):
            QUESTIONS[question](model, frozen)
    else:  # one run in the pass's own shape
        every = tiny_model(name)
        _class_forward(every, _add(every, slice(None)))
        expected = QUESTIONS[question](every, tlens.freeze(every, some_tokens(1, 6)))
        assert close(QUESTIONS[question](model, frozen), expected)
    assert hooks_left(model) == 0


@every_class
@pytest.mark.parametrize("row", [0, -1])
def test_two_passes_are_ablated_separately_if_unseen_code_acts_on_one_row(name, row):
    model = tiny_model(name)
    _class_forward(model, _add(model, row))
    first = some_tokens(1, 6)
    runs = [tlens.freeze(model, tokens) for tokens in (first, first.flip(1))]
    together = Ablation(runs[0], also=runs[1])
    singly = torch.cat([Ablation(run).logits(["L0H1"]) for run in runs])
    assert close(together.logits(["L0H1"]), singly)
    assert together._singly


@every_class
@pytest.mark.parametrize("acts", ["nowhere", "a hook", "unseen on the first row", "unseen on the last row"])
def test_steps_of_integrated_gradients_share_runs(name, acts, monkeypatch):
    """As many as fit in one run, with the pass's own input at both ends; one by one where rows may not be alike."""
    model = tiny_model(name)
    if acts == "a hook":
        model.add_hook("blocks.0.hook_resid_post", lambda tensor, hook: tensor)
    elif acts != "nowhere":
        add = _add(model, 0 if "first" in acts else -1)
        module = getattr(model.blocks[0].mlp, "original_component", model.blocks[0].mlp)

        class Changed(type(module)):
            def forward(self, *args, **kwargs):
                output = super().forward(*args, **kwargs)
                return add(output) if len(output) > 1 else output

        module.__class__ = Changed
    frozen = tlens.freeze(model, some_tokens(1, 6))
    runs = []
    graph = LiveLogits.graph

    def counted(self, x, *args, **options):
        runs.append(len(x))
        return graph(self, x, *args, **options)

    monkeypatch.setattr(LiveLogits, "graph", counted)
    ask = _attributed("integrated-gradients", target=5, steps=6, query=[2, -1])
    found = ask(model, frozen)
    ends = [1, 1]  # the logits of the input, and of the baseline
    assert runs == ends + {"nowhere": [8], "a hook": [1] * 6}.get(acts, [8] + [1] * 6)
    monkeypatch.setattr(gradients, "LEAST_AT_ONCE", 7)
    assert close(found, ask(model, frozen))


# ------------------------------------------------------------------ hooks of torch


@every_class
def test_torch_hooks_are_found_and_named(name):
    model = tiny_model(name)
    assert other_hooks(model) == []
    handles = [
        model.blocks[1].mlp.register_forward_hook(lambda module, args, output: None),
        model.unembed.register_forward_pre_hook(lambda module, args: None),
        model.blocks[0].register_full_backward_hook(lambda module, grads, more: None),
    ]
    frozen = tlens.freeze(model, some_tokens())
    assert set(frozen.other_hooks) == {f"{name} (torch hook)" for name in ("unembed", "blocks.1.mlp", "blocks.0")}
    assert "blocks.1.mlp (torch hook)" in frozen.provenance()["hooks"]
    for handle in handles:
        handle.remove()
    assert other_hooks(model) == []


@every_class
def test_a_torch_hook_after_the_unembedding_is_noticed_where_it_acts(name):
    model = tiny_model(name)

    def late(module, args, logits):
        logits = logits.clone()
        if logits.shape[1] > 3:
            logits[:, 3, 5] -= 3
        return logits

    model.unembed.register_forward_hook(late)
    frozen = tlens.freeze(model, some_tokens())
    own = model(**frozen.inputs)[:, 2, 5]
    total = frozen.operator().target(5, query=2).total
    assert total is not None
    assert close(total[:, 0], own)
    for query in (3, [0, 3]):
        with pytest.raises(tlens.UnsupportedModelError, match="a hook after the unembedding"):
            frozen.operator().target(5, query=query)


# ------------------------------------------------------------------ a model that is no longer the pass's


ALL = {**QUESTIONS, "attnlrp": _attributed("attnlrp", target=5), "gim": _attributed("gim", target=5)}


@every_class
@pytest.mark.parametrize("question", ALL)
def test_a_hook_put_on_since_is_refused(name, question):
    model = tiny_model(name)
    frozen = tlens.freeze(model, some_tokens(1, 6))
    ALL[question](model, frozen)
    point = frozen.points.blocks[1].z
    with (
        model.hooks(fwd_hooks=[(point, lambda z, hook: 1.001 * z)]),
        pytest.raises((tlens.FrozenModelError, tlens.NumericalError, tlens.UnsupportedModelError)) as raised,
    ):
        ALL[question](model, frozen)
    assert question == "patch_scores" or raised.type in (tlens.FrozenModelError, tlens.NumericalError)
    assert hooks_left(model) == 0


@every_class
@pytest.mark.parametrize("question", [question for question in ALL if question != "patch_scores"])
def test_a_hook_that_only_looks_changes_nothing(name, question):
    model = tiny_model(name)
    frozen = tlens.freeze(model, some_tokens(1, 6))
    expected = ALL[question](model, frozen)
    with model.hooks(fwd_hooks=[(frozen.points.blocks[1].z, lambda z, hook: None)]):
        assert close(ALL[question](model, frozen), expected)


def _change_scale(model):
    attention = model.blocks[1].attn
    if hasattr(attention, "attn_scale"):
        attention.attn_scale *= 2
    else:
        inner = attention.original_component
        inner.scaling = 2 * inner.scaling


def _change_epsilon(model):
    norm = model.blocks[1].ln1
    inner = getattr(norm, "original_component", norm)
    inner.eps = 0.5 if not isinstance(getattr(inner, "eps", None), torch.Tensor) else torch.tensor(0.5)


def _change_activation(model):
    mlp = model.blocks[1].mlp
    inner = getattr(mlp, "original_component", mlp)
    setattr(inner, "act_fn" if hasattr(inner, "act_fn") else "act", torch.nn.ReLU())


FROZEN_TOO = {"tensorlens": _attributed("tensorlens", target=5), "decompx": _attributed("decompx", target=5)}


@every_class
@pytest.mark.parametrize("change", [_change_scale, _change_epsilon, _change_activation])
def test_another_configuration_is_refused_by_name(name, change):
    model = tiny_model(name)
    frozen = tlens.freeze(model, some_tokens(1, 6))
    change(model)
    for question in {**ALL, **FROZEN_TOO}.values():
        with pytest.raises(tlens.FrozenModelError, match=r"configuration was changed .*blocks\.1\."):
            question(model, frozen)
    again = tlens.freeze(model, some_tokens(1, 6))
    assert QUESTIONS["chefer"](model, again).isfinite().all()


@every_class
def test_logits_that_are_asked_for_later_are_of_the_same_model(name):
    model = tiny_model(name)
    frozen = tlens.freeze(model, some_tokens(1, 6))
    expected = frozen.logits(2)
    with model.hooks(fwd_hooks=[(frozen.points.blocks[1].z, lambda z, hook: 1.1 * z)]):
        with pytest.raises(tlens.FrozenModelError, match=r"logits.*hooks were put on it"):
            frozen.logits(2)
        with pytest.raises(tlens.FrozenModelError, match=r"logits at positions.*hooks were put on it"):
            frozen.operator().target(5, query=3)
    assert close(frozen.logits(2), expected)


@every_class
def test_the_last_logits_need_no_run_beside_the_passs_own(name, monkeypatch):
    """They are the model's, and of the same model: what has changed since is refused as by a run."""
    model, tokens = tiny_model(name), some_tokens(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    frozen = tlens.freeze(model, tokens, attention_mask=mask)
    expected = model(tokens, attention_mask=mask).detach()[[0, 1], [5, 3]]
    runs = []
    run = frozen_module.states_and_logits
    monkeypatch.setattr(frozen_module, "states_and_logits", lambda *args: runs.append(args) or run(*args))
    assert close(frozen.last_logits, expected)
    assert not runs
    changed = model.hooks(fwd_hooks=[(frozen.points.blocks[1].z, lambda z, hook: 1.1 * z)])
    with changed, pytest.raises(tlens.FrozenModelError, match=r"logits.*hooks were put on it"):
        frozen.logits(-1)
    assert frozen.errors["unembed"] < 1e-9  # after that they are no longer stored
    runs.clear()
    assert close(frozen.logits(-1), expected[:, None])
    assert len(runs) == 1
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(tlens.FrozenModelError, match="weights"):
        frozen.logits(-1)


# ------------------------------------------------------------------ perturbed prompts


@every_class
def test_perturbed_prompts_beside_a_hook_on_one_row(name):
    """One by one where a hook is seen, as if each were the only prompt; refused where nobody can see what acts."""
    tokens, options = some_tokens(3, 6), {"fractions": (0, 0.5, 1), "replacement": 7, "metrics": ["hs_mse", "logit"]}
    found = []
    for rows in (0, slice(None)):
        model = tiny_model(name)
        _transformer_lens_hook(model, _add(model, rows))
        found.append(evaluate.perturbation(model, tokens, ["random", "tensorlens in_out"], **options).values)
    assert close(found[0], found[1])
    for row in (0, -1):
        model = tiny_model(name)
        _class_forward(model, _add(model, row))
        with pytest.raises(tlens.FrozenModelError, match="acts on some rows only"):
            evaluate.perturbation(model, tokens, ["random"], **options)


# ------------------------------------------------------------------ what is shared with others


@every_class
def test_a_cache_that_is_written_to_later_changes_no_pass(name):
    model = tiny_model(name)
    _, cache = model.run_with_cache(some_tokens())
    frozen = tlens.freeze(model, some_tokens(), cache=cache)
    expected = tlens.attribute(frozen, target=5).scores.clone()
    for tensor in cache.cache_dict.values():
        if tensor.is_floating_point() and 0 not in tensor.stride():
            tensor.mul_(1.5)
    assert close(tlens.attribute(frozen, target=5).scores, expected)


def test_a_thread_that_applies_a_plan_keeps_questions_waiting():
    model = tiny_model("bridge/gpt2")
    frozen, plan = tlens.freeze(model, some_tokens()), compress.plan(model, ratio=2)
    expected = {name: question(model, frozen) for name, question in FROZEN_TOO.items()}
    with ThreadPoolExecutor(2) as pool:
        with plan.applied():
            waiting = {name: pool.submit(question, model, frozen) for name, question in FROZEN_TOO.items()}
            model(some_tokens())
            assert not any(answer.done() for answer in waiting.values())
            with pytest.raises(tlens.FrozenModelError, match="weights were changed"):
                frozen.check_fresh()
        for name, answer in waiting.items():
            assert close(answer.result(timeout=60), expected[name])


def test_a_plan_is_not_applied_before_a_question_is_answered(clean_registry):
    """What is asked reads the weights step by step."""
    model = tiny_model("bridge/gpt2")
    frozen, plan = tlens.freeze(model, some_tokens()), compress.plan(model, ratio=2)
    begun, goes_on = threading.Event(), threading.Event()

    @tlens.register_method("slow")
    def slow(frozen):
        begun.set()
        assert not goes_on.wait(0.2)
        return tlens.get_method("tensorlens").function(frozen, target=5)

    def apply():
        begun.wait(60)
        with plan.applied():
            goes_on.set()

    with ThreadPoolExecutor(1) as pool:
        applied = pool.submit(apply)
        scores = tlens.attribute(frozen, method="slow").scores
        applied.result(timeout=60)
    assert close(scores, tlens.attribute(frozen, target=5).scores)


def _forwards(model):
    return [vars(block).get("forward") for block in model.blocks]


def _whole_runs(monkeypatch):
    monkeypatch.setattr(LiveTarget, "shares_layers", False)


def _live_questions(frozen, other):
    return {
        "total_effects": lambda: circuits.total_effects(frozen, 5, live=True, query=[2, -1]).scores,
        "components": lambda: circuits.total_effects(frozen, 5, live=True, by="component").scores,
        "direction": lambda: _along_direction(frozen),
        "patching": lambda: circuits.patch_scores(frozen, other, 5, method="patching").scores,
        "stream": lambda: circuits.patch_scores(frozen, other, 5, method="patching", by="stream", positions=True).keys,
        "neurons": lambda: circuits.patch_scores(frozen, other, 5, method="patching", by="neuron").scores,
    }


def _along_direction(frozen):
    direction = torch.linspace(-1, 2, frozen.resid_pre(0).shape[-1], dtype=torch.float64)
    return circuits.total_effects(frozen, direction=direction, live=True, layers=[0], final_norm=False).scores


@pytest.mark.few(8)
def test_runs_that_begin_at_a_later_layer_are_whole_runs(model, monkeypatch):
    frozen, other = tlens.freeze(model, some_tokens()), tlens.freeze(model, some_tokens(seed=1))
    forwards = _forwards(model)
    for name, question in _live_questions(frozen, other).items():
        try:
            scores = question()
        except (tlens.InvalidInputError, tlens.UnsupportedModelError):  # no target, or a part that no hook reaches
            continue
        with monkeypatch.context() as patch:
            _whole_runs(patch)
            expected = question()
        assert close(scores, expected, atol=1e-6 * max(1, float(expected.abs().max()))), name
    assert _forwards(model) == forwards
    assert hooks_left(model) == 0


@every_class
@pytest.mark.parametrize("question", ["total_effects", "components", "direction", "patching", "stream", "neurons"])
def test_shared_runs_differ_by_rounding_alone(name, question, monkeypatch):
    model = tiny_model(name)
    frozen, other = tlens.freeze(model, some_tokens()), tlens.freeze(model, some_tokens(seed=1))
    scores = _live_questions(frozen, other)[question]()
    _whole_runs(monkeypatch)
    expected = _live_questions(frozen, other)[question]()
    assert close(scores, expected, atol=1e-12 * max(1, float(expected.abs().max())))


def _sizes(module, monkeypatch):
    """The shapes of what a module is called with; by its class, which is no change of this model."""
    shapes = []
    forward = type(module).forward

    def noting(self, *args, **kwargs):
        if self is module:
            shapes.append(next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)).shape)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(module), "forward", noting)
    return shapes


@every_class
def test_only_what_a_change_reaches_is_computed(name, monkeypatch):
    """Copies enter at the layer of their change, and the last MLP reads the query alone."""
    model = tiny_model(name)
    frozen = tlens.freeze(model, some_tokens(1, 6))
    circuits.total_effects(frozen, 5, live=True)  # what is proved once
    first = _sizes(model.blocks[0].attn, monkeypatch)
    last = _sizes(model.blocks[-1].attn, monkeypatch)
    mlp = _sizes(model.blocks[-1].mlp, monkeypatch)
    circuits.total_effects(frozen, 5, live=True)
    nodes = 5  # of each layer: four heads and an MLP
    assert [shape[0] for shape in first] == [1, nodes + 2]
    assert [shape[0] for shape in last] == [1, 2 * nodes + 2]
    assert [shape[:2] for shape in mlp] == [(1, 6), (2 * nodes + 2, 1)]


@every_class
def test_a_model_that_reads_earlier_layers_is_run_whole(name, monkeypatch):
    """The unchanged copy gives another number where a block needs what an earlier one left behind."""
    model = tiny_model(name)
    frozen = tlens.freeze(model, some_tokens())
    expected = circuits.total_effects(frozen, 5, live=True).scores
    output = Form.output
    monkeypatch.setattr(Form, "output", lambda self, stream: output(self, stream + 1))
    for nodes in (np.array(["L1H0", "MLP1"]), dict.fromkeys(["L1H0", "MLP1"]), iter(["L1H0", "MLP1"])):
        effects = circuits.total_effects(frozen, 5, live=True, nodes=nodes)
        assert close(effects.scores, expected[..., [5, 9]], atol=1e-6)


@every_class
def test_an_error_in_a_later_layer_leaves_every_block_as_it_was(name):
    model = tiny_model(name)
    frozen = tlens.freeze(model, some_tokens())
    earlier = EarlierLayers(frozen.capture)
    with earlier.seen():
        model(**frozen.inputs)
    assert earlier.may_be_skipped
    forwards = _forwards(model)
    with earlier.skipped([1]):
        assert _forwards(model) != forwards
    assert _forwards(model) == forwards
    with pytest.raises(RuntimeError, match="in between"):
        _fail_inside(earlier)
    assert _forwards(model) == forwards


def _fail_inside(earlier):
    with earlier.skipped([1]):
        raise RuntimeError("in between")
