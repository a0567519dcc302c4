"""Models whose blocks compute on several devices: the same numbers, and nothing mixed."""

import importlib
import inspect
from contextlib import contextmanager

import pytest
import torch
from conftest import hooks_left
from stand_in_devices import HOME, OTHER, Elsewhere, put, several_devices, with_last_blocks_elsewhere

import tensorlens_tl as tlens
from tensorlens_tl import circuits, compress
from tensorlens_tl.algebra import Linear, Placed, on_device
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.testing import model_names, tiny_input, tiny_model
from tensorlens_tl.testing.models import HookedTransformer
from tensorlens_tl.testing.requirements import precision

QUERIES = [0, 2, 5]
BRIDGES = [name for name in model_names() if name.startswith("bridge/")]
HOOKED = [name for name in model_names() if name.startswith("hooked/")]
MODELS = ["bridge/llama"]
if HookedTransformer is not None:
    MODELS.append(pytest.param("hooked/ln", marks=pytest.mark.whole))


@pytest.fixture(scope="module", autouse=True)
def devices():
    with several_devices():
        yield


@contextmanager
def dispatched():
    """Bridges of models that accelerate has put on two devices before, as `from_pretrained(device_map=…)` does."""
    builder = importlib.import_module("transformer_lens.model_bridge.sources._bridge_builder")
    build = builder.build_bridge_from_module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            builder,
            "build_bridge_from_module",
            lambda module, *given, **options: build(with_last_blocks_elsewhere(module), *given, **options),
        )
        yield


@contextmanager
def on_two_devices(model):
    """A HookedTransformer as ``n_devices=2`` has it; its forward moves the stream to each block's device."""
    for part in (model.blocks[-1], getattr(model, "ln_final", None), model.unembed):
        if part is not None:
            put(part)
    with pytest.MonkeyPatch.context() as patch:
        names = inspect.unwrap(type(model).forward).__globals__
        last = model.cfg.n_layers - 1

        def device_of(layer, cfg, device=None):
            return OTHER if cfg is model.cfg and layer == last else HOME

        patch.setitem(names, "get_device_for_block_index", device_of)
        yield model


def spread(name):
    with dispatched():
        return tiny_model(name)


@pytest.fixture(scope="module", params=MODELS)
def passes(request):
    """The same pass on one device, and on two."""
    with several_devices():
        here = tiny_model(request.param)
        input, options = tiny_input(here)
        expected = tlens.freeze(here, input, **options)
        if request.param.startswith("bridge/"):
            yield expected, tlens.freeze(spread(request.param), input, **options)
        else:
            with on_two_devices(tiny_model(request.param)) as model:
                yield expected, tlens.freeze(model, input, **options)


def same(ours, expected, frozen):
    assert not isinstance(ours, Elsewhere)  # results are on the device of the embedding
    assert torch.allclose(ours, expected, rtol=0, atol=precision(frozen), equal_nan=True)


def test_stand_in_devices_are_not_mixed():
    here, there = torch.ones(2, 3), torch.ones(2, 3, device=OTHER)
    assert (there * 2).device == there.new_zeros(1).device == torch.tensor([1], device=OTHER).device == OTHER
    assert there.to(OTHER) is there
    assert there.cpu().device == HOME
    assert torch.equal(here, there.to(here))
    for mixed in (lambda: here + there, lambda: here @ there.T, lambda: torch.cat([here, there])):
        with pytest.raises(RuntimeError, match="same device"):
            mixed()
    leaf = here.clone().requires_grad_(True)
    (leaf.to(OTHER) * there).sum().backward()
    assert type(leaf.grad) is torch.Tensor


def test_blocks_are_on_two_devices(passes):
    there = passes[1]
    assert [block.device for block in there.view.blocks][-1] == OTHER
    assert there.view.device == HOME
    last = next(iter(there.points.blocks[-1].scales.values()))
    assert there.capture.activations[last].device == OTHER  # it stays where it was computed
    assert there.activation(last).device == HOME
    assert repr(there.operator().map.stages[there.n_layers - 1]).endswith("on cpu:1")


@pytest.mark.parametrize("removed", ["_forward", "_backward", "_pull"])
def test_a_map_that_moves_nothing_is_noticed(passes, monkeypatch, removed):
    there = passes[1]
    monkeypatch.setattr(Placed, removed, lambda self, *given: getattr(self.inner, removed)(*given))
    operator = there.operator()
    with pytest.raises(RuntimeError, match="same device"):
        operator.push(operator.x), operator.pull(operator.x), operator.target(3)


QUESTIONS = {
    "contributions": lambda operator: operator.contributions(),
    "bias": lambda operator: operator.bias,
    "push": lambda operator: operator.push(operator.x),
    "pull": lambda operator: operator.pull(operator.x),
    "pull with bias": lambda operator: operator.map.pull_with_bias(operator.x)[1],
    "norm": lambda operator: operator.norm().scores,
    "slice": lambda operator: operator.slice(),
    "in_out": lambda operator: operator.in_out(query=QUERIES).scores,
    "target": lambda operator: operator.target(3, 5, query=QUERIES).scores,
    "bias by position": lambda operator: operator.target(3, query=QUERIES, bias="position").scores,
    "summed": lambda operator: operator.target(3, query=QUERIES, summed=True).bias,
    "gradient": lambda operator: operator.gradient(3, query=QUERIES),
    "bound": lambda operator: torch.tensor(operator.map.norm_bound()),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.few(6)
def test_same_numbers_as_on_one_device(passes, question):
    here = passes[0]
    same(*(QUESTIONS[question](frozen.operator()) for frozen in reversed(passes)), here)
    part = [frozen.operator(layers=slice(0, frozen.n_layers), final_norm=False) for frozen in reversed(passes)]
    same(*(operator.bias for operator in part), here)


@pytest.mark.parametrize("name", tlens.list_methods())
@pytest.mark.few(7)
def test_every_method_is_the_same_or_refused(passes, name):
    here, there = passes
    known = tlens.get_method(name).options
    options = {option: value for option, value in {"target": 3, "steps": 3}.items() if option in known}
    try:
        expected = tlens.attribute(here, method=name, **options)
    except UnsupportedModelError:
        with pytest.raises(UnsupportedModelError):
            tlens.attribute(there, method=name, **options)
        return
    same(tlens.attribute(there, method=name, **options).scores, expected.scores, here)
    assert hooks_left(there.model) == hooks_left(here.model)


CIRCUITS = {
    "logit_attribution": lambda frozen: circuits.logit_attribution(frozen, 3).scores,
    "by neuron": lambda frozen: circuits.logit_attribution(frozen, 3, by="neuron").scores,
    "total_effects": lambda frozen: circuits.total_effects(frozen, 3).scores,
    "live": lambda frozen: circuits.total_effects(frozen, 3, live=True).scores,
    "paths": lambda frozen: circuits.top_paths(frozen, 3).scores,
    "graph": lambda frozen: circuits.contribution_graph(frozen, 3).weights,
    "head_map": lambda frozen: circuits.head_map(frozen, 1, 0).pattern,
    "qk_attribution": lambda frozen: circuits.qk_attribution(frozen, 1, 0).pairs,
    "ov": lambda frozen: circuits.ov(frozen.model, 1, 0).AB,
    "composition_scores": lambda frozen: circuits.composition_scores(frozen.model, "V"),
}


@pytest.mark.parametrize("question", CIRCUITS)
def test_circuits_are_the_same(passes, question):
    here, there = passes
    try:
        expected = CIRCUITS[question](here)
    except tlens.errors.TensorLensError as error:
        with pytest.raises(type(error)):
            CIRCUITS[question](there)
        return
    same(CIRCUITS[question](there), expected, here)


@pytest.mark.parametrize(
    "options", [{"patterns": "recompute"}, {"verify": "sample"}, {"verify": False}, {"store": "cpu"}]
)
def test_every_way_to_freeze(passes, options):
    here, there = passes
    try:
        expected = tlens.freeze(here.model, **here.inputs, **options)
    except UnsupportedModelError:
        with pytest.raises(UnsupportedModelError):
            tlens.freeze(there.model, **there.inputs, **options)
        return
    again = tlens.freeze(there.model, **there.inputs, **options)
    scores = [frozen.operator().target(3, query=QUERIES).scores for frozen in (again, expected)]
    assert torch.allclose(*scores, rtol=0, atol=1e-6 if "patterns" in options else precision(here))


def test_steering_and_the_held_model(passes):
    here = passes[0]
    vectors = torch.linspace(-1, 1, here.view.cfg.d_model, dtype=torch.float64)
    results = []
    for frozen in reversed(passes):
        name = frozen.points.blocks[-1].resid_pre
        with frozen.model.hooks(fwd_hooks=[(name, lambda stream, *, hook: stream + vectors.to(stream))]):
            steered = tlens.freeze(frozen.model, **frozen.inputs)
            results.append(steered.operator().target(3).bias)
    same(*results, here)
    logits = []
    for frozen in reversed(passes):
        with frozen.attached() as held:
            logits.append(held(frozen.tokens).detach().cpu())
    same(*logits, here)


def test_two_runs(passes):
    results = []
    for frozen in reversed(passes):
        other = tlens.freeze(frozen.model, frozen.tokens.flip(1))
        results.append(tlens.difference(frozen, other).operator().target(3).scores)
    same(*results, passes[0])


PAIRS = {
    "gradient": lambda a, b: circuits.patch_scores(a, b, 3, method="gradient").scores,
    "integrated-gradients": lambda a, b: (
        circuits.patch_scores(a, b, 3, method="integrated-gradients", positions=True).keys
    ),
    "patching": lambda a, b: circuits.patch_scores(a, b, 3, method="patching").scores,
    "edges": lambda a, b: circuits.edge_scores(a, b, 3, method="gradient").scores,
    "integrated edges": lambda a, b: circuits.edge_scores(a, b, 3, method="integrated-gradients", steps=2).scores,
    "routes": lambda a, b: circuits.routes(tlens.difference(a, b), 3).scores,
    "routes under a rule": lambda a, b: circuits.routes(a, 3, rule="gim").scores,
    "paths under a rule": lambda a, b: circuits.paths(a, 3, rule="attnlrp", max_order=1).scores,
}


@pytest.mark.parametrize("question", PAIRS)
@pytest.mark.few(4)
def test_two_prompts_are_compared_alike(passes, question):
    here, there = (PAIRS[question](run, tlens.freeze(run.model, run.tokens.flip(1))) for run in passes)
    same(there, here, passes[0])


EXPERTS = {
    "terms": lambda a, b: circuits.logit_attribution(a, 3, by="head").scores,
    "tangent": lambda a, b: circuits.total_effects(a, 3, rule="frozen-tangent").scores,
    "live": lambda a, b: circuits.total_effects(a, 3, live=True).scores,
    "routes": lambda a, b: circuits.routes(tlens.difference(a, b), 3).scores,
}


@pytest.mark.parametrize("question", EXPERTS)
@pytest.mark.few(2)
def test_experts_of_another_device(question):
    """Their weights are read one expert at a time, after those of the rest of the block."""
    results = []
    for model in (tiny_model("bridge/mixtral"), spread("bridge/mixtral")):
        tokens, _ = tiny_input(model)
        runs = [tlens.freeze(model, ids) for ids in (tokens, tokens.flip(1))]
        results.append(EXPERTS[question](*runs))
    same(*reversed(results), runs[0])


CANNOT_RUN = {
    "bridge/bert", "bridge/marian", "bridge/pegasus", "bridge/t5gemma", "hooked/gpt-oss",
    "hooked/alibi", "hooked/sinks",
}  # fmt: skip
"""Models that cannot run on these devices by themselves."""


@pytest.mark.parametrize("name", BRIDGES)
@pytest.mark.few(4)
def test_every_model_is_the_same_or_refused(name):
    here = tiny_model(name)
    input, options = tiny_input(here)
    try:
        model = spread(name)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        pytest.skip(f"TransformerLens or accelerate cannot: {error}")
    try:
        there = tlens.freeze(model, input, **options)
    except UnsupportedModelError:
        assert name in CANNOT_RUN or "whitened" in name or "native" in name
        return
    places = {block.device for block in there.view.blocks}
    if "native" in name and places == {HOME}:
        pytest.skip("TransformerLens builds its own model from the config, on one device")
    assert places == {HOME, OTHER}
    expected = tlens.freeze(here, input, **options)
    same(*(frozen.operator().contributions() for frozen in (there, expected)), expected)
    there.fwd_hooks()


@pytest.mark.skipif(HookedTransformer is None, reason="no HookedTransformer")
@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.few(4)
def test_every_hooked_transformer(name):
    here = tiny_model(name)
    input, options = tiny_input(here)
    expected = tlens.freeze(here, input, **options)
    with on_two_devices(tiny_model(name)) as model:
        try:
            there = tlens.freeze(model, input, **options)
        except UnsupportedModelError:
            assert name in CANNOT_RUN
            return
        same(*(frozen.operator().contributions() for frozen in (there, expected)), expected)
        there.fwd_hooks()


def test_a_block_on_two_devices_is_refused():
    model = spread("bridge/llama")
    put(model.blocks[0].mlp)
    with pytest.raises(UnsupportedModelError, match="run on cpu, cpu:1; those of a block must be on one device"):
        tlens.freeze(model, tiny_input(model)[0])


def test_other_weights_are_refused():
    model = spread("bridge/llama")
    with pytest.raises(UnsupportedModelError, match="runs on cpu:1"):
        compress.plan(model, [1], method="circuit-svd", rank=1)


def test_a_map_is_moved_as_a_whole():
    double = Linear(2 * torch.eye(3), torch.ones(3))
    there = on_device(double @ double, OTHER)
    assert there(torch.ones(1, 1, 3, device=OTHER)).device == OTHER
    assert on_device(double, HOME) is double
