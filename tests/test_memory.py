"""What an operation allocates beyond its result stays within `memory=`, measured by watching every tensor."""

import gc
import weakref

import accelerate
import numpy as np
import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl.algebra.memory import in_bytes
from tensorlens_tl.testing import Allocations, tiny_model
from tensorlens_tl.testing.models import build_bridge

CALLS = {
    "norm": lambda op, memory: op.norm(memory=memory).scores,
    "norm of all queries": lambda op, memory: op.norm("all", probes=2, memory=memory).scores,
    "slice": lambda op, memory: op.slice(memory=memory),
    "contributions": lambda op, memory: op.contributions(memory=memory),
    "contributions to one": lambda op, memory: op.contributions(-1, memory=memory),
    "in_out": lambda op, memory: op.in_out("all", memory=memory).scores,
    "target": lambda op, memory: op.target(5, query="all", memory=memory).scores,
}
SIZES = {"hidden_size": 64, "intermediate_size": 224, "max_position_embeddings": 64}
WIDER = {
    "gpt2": {"n_embd": 64, "n_inner": 256, "n_positions": 64},
    "llama": {**SIZES, "head_dim": 16},
    "bert": SIZES,
    "neox": SIZES,
}
# the other two are a causal model with parallel blocks, and one that looks forward
FAMILIES = [pytest.param(f, marks=pytest.mark.whole) if f in ("gpt2", "llama") else f for f in WIDER]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.whole) if f != "neox" else f for f in WIDER])
@pytest.mark.few(4)
def test_the_bound_holds_and_changes_nothing(family, call):
    torch.manual_seed(0)
    model = build_bridge(family, **WIDER[family])
    op = tlens.freeze(model, torch.randint(3, 48, (2, 48))).operator()
    _ = op.x, op.output, op.target(5)  # what is kept on the pass is not the operation's
    free = CALLS[call](op, None)
    for memory in ("2MB", "8MB", 32 * 10**6):
        with Allocations() as used:
            made = CALLS[call](op, memory)
        assert used.peak - made.numel() * made.element_size() <= 1.2 * in_bytes(memory)
        assert torch.allclose(made, free, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bias", ["absdot", "token", "cls"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(3)
def test_decompx_keeps_within_its_bound(family, bias):
    """The vectors themselves, twice in parallel blocks, and what is left for the work on them."""
    torch.manual_seed(0)
    frozen = tlens.freeze(build_bridge(family, **WIDER[family]), torch.randint(3, 48, (1, 60)))
    vectors = 60 * frozen.resid_pre(0).numel() * 8 * (2 if frozen.layouts[0].parallel else 1)
    asked = {"method": "decompx", "bias": bias, "target": 5, "query": -1}
    free = tlens.attribute(frozen, **asked).scores
    for times in (1.6, 2.5, 4):
        memory = int(times * vectors)
        with Allocations() as used:
            made = tlens.attribute(frozen, **asked, memory=memory)
        assert used.peak <= 1.2 * memory
        assert torch.allclose(made.scores, free, rtol=1e-9, atol=1e-12)
    if frozen.causal:  # what comes after the query is not carried
        frozen.operator().target(5, query=19)  # compares the logits there, by a run of the model
        with Allocations() as used:
            early = tlens.attribute(frozen, **asked | {"query": 19}, memory=int(0.4 * vectors))
        assert used.peak <= 0.48 * vectors
        every = tlens.attribute(frozen, **asked | {"query": "all"})
        assert torch.allclose(early.scores[:, 0], every.scores[:, 19], rtol=1e-9, atol=1e-12)
        norms = {"method": "decompx", "bias": bias}
        early = tlens.attribute(frozen, **norms, query=[3, 19])
        assert torch.allclose(early.scores, tlens.attribute(frozen, **norms).scores[:, [3, 19]], atol=1e-12)
    with pytest.raises(tlens.SizeError, match=r"one for every source token at every position, take \d+"):
        tlens.attribute(frozen, **asked, memory=vectors)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MB", 512e6), ("2GiB", 2**31), ("1.5 kb", 1500), (100, 100), (np.int64(100), 100), (None, 256 * 2**20)],
)
def test_bounds_are_read(text, size):
    assert in_bytes(text) == int(size)


@pytest.mark.parametrize("wrong", ["", "much", "-1MB", "5TB", 0, -3, 1.5, True, [1]])
def test_other_bounds_are_refused(wrong, model_named):
    op = tlens.freeze(model_named("bridge/gpt2"), torch.randint(3, 48, (1, 4))).operator()
    with pytest.raises(tlens.InvalidInputError, match="512MB"):
        op.norm(memory=wrong)


def test_a_row_that_does_not_fit_is_refused(model_named):
    op = tlens.freeze(model_named("bridge/gpt2"), torch.randint(3, 48, (1, 4))).operator()
    with pytest.raises(tlens.SizeError, match=r"one row .* takes [\d,]+ bytes"):
        op.norm(memory="1KB")


def test_a_chain_of_composition_scores_forms_no_large_matrix():
    """Peak memory of composition scores is far below one [head, later head, d_model, d_model] table."""
    model = build_bridge("gpt2", n_embd=64, n_layer=6, n_inner=64)
    with Allocations() as used:
        scores = tlens.circuits.composition_scores(model, "V")
    assert used.peak < 0.2 * scores.numel() * 64 * 64 * 8


@pytest.mark.parametrize("name", ["language", "encoder", "digits"])
def test_what_a_pass_holds_goes_with_it(name):
    """Without circles of references, which Python would look for hundreds of passes later."""
    model = tlens.load_demo_model(name)
    text = {"language": "The value of the", "encoder": "The value"}.get(name, tlens.demo.digit_images()[0][:1])
    gc.collect()
    gc.disable()
    try:
        frozen = tlens.freeze(model, text)
        tlens.attribute(frozen, target=5, query=-1 if name == "digits" else 1)
        gone = [weakref.ref(part) for part in (frozen, frozen.view, frozen.view.blocks[0], frozen.resid_pre(0))]
        del frozen
        assert [part() for part in gone] == [None] * len(gone)
    finally:
        gc.enable()


@pytest.fixture
def older():
    """What was there before the test is not looked at, by the collector neither."""
    gc.freeze()
    yield
    gc.unfreeze()


def alive():
    """How many tensors there are, of those that came since the test began."""
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("method", [*tlens.list_methods(), "relp live"])
@pytest.mark.few(4)
def test_a_question_leaves_no_tensor_behind(method, place, tmp_path, older):
    """A graph that holds itself is never freed: its activations would add up from question to question."""
    model = tiny_model("bridge/llama")
    if place == "disk":
        accelerate.disk_offload(model.original_model, str(tmp_path), execution_device=torch.device("cpu"))
    frozen = tlens.freeze(model, torch.arange(3, 9)[None])
    name, _, live = method.partition(" ")
    options = {"target": 5} if "target" in tlens.get_method(name).options else {}
    if live:
        options["attention"] = "live"

    def question():
        tlens.attribute(frozen, method=name, **options)

    try:
        question()
    except tlens.UnsupportedModelError:
        pytest.skip(f"{method} refuses this model")
    question()
    before = alive()
    question()
    assert alive() <= before


@pytest.mark.parametrize(("family", "gates"), [("gpt2", 1), ("llama", 2)])
def test_a_pass_keeps_what_the_page_of_costs_says(family, gates):
    model = build_bridge(family, **WIDER[family])
    cfg, n = model.cfg, 48
    frozen = tlens.freeze(model, torch.arange(n)[None] % 7)
    kept = sum(activation.nbytes for activation in frozen.capture.activations.values())
    stated = cfg.n_layers * (cfg.n_heads * n**2 + n * (cfg.d_model + gates * cfg.d_mlp))
    assert 1 <= kept / (frozen.output.element_size() * stated) < 1.15
