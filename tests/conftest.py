import os
import random
import re
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from weakref import WeakKeyDictionary
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, settings
from rounding import OtherRounding
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import tensorlens_tl as tlens
from tensorlens_tl import registry
from tensorlens_tl.hooks import hooks_on
from tensorlens_tl.testing import encoder_decoder_names, model_names, tiny_model

settings.register_profile(
    "default", max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)  # the same examples everywhere; new ones are for the nightly run
settings.register_profile("nightly", max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("default")

# tiny tensors: more threads only wait for each other, and every core has a process of its own
torch.set_num_threads(int(os.environ.get("TENSORLENS_TEST_THREADS", "1")))
NAMES = [name for name in model_names() if name not in encoder_decoder_names()]  # those that read one input
_models: dict = {}


REPRESENTATIVES = {
    "hooked/ln", "hooked/rmspre", "hooked/attn-only-no-norm", "hooked/gqa-ungrouped", "hooked/alibi",
    "hooked/shortformer", "hooked/sandwich", "hooked/post-only", "hooked/soft-caps", "hooked/sinks",
    "hooked/parallel-processed", "encoder/bert", "bridge/gpt2", "bridge/neox", "bridge/llama", "bridge/gemma2",
    "bridge/phi", "bridge/opt", "bridge/bert", "bridge/llama-compatibility", "bridge/native-rms",
    "bridge/whitened", "bridge/bart", "bridge/t5",
}  # fmt: skip
"""One model at least of every class, block layout, norm, activation, position encoding and way to make attention; the
others belong to the marked set `whole`."""

FEW = 12
"""A list of models that a test names itself runs as it stands, up to so many."""


MIXED = ("mamba", "mamba2", "jamba", "falcon-h1", "lfm2", "qwen3-next", "rwkv")
"""Families with layers that have no attention, or a mixer beside it: what heads do, and what compresses them, is asked
of others; these have `test_mixers`."""


MODELS_OF_A_TEST = 2
"""On so many models a test runs by default, with each of its options on one at least: other tests run on others, so
that every model is run."""


OF_EVERY_MODEL = ("test_families", "test_battery", "test_methods")
"""Files whose tests run on all representatives: what is exact, what is refused, and every method."""


SCORES = {
    "encoder": ({"layer": 1, "query": 4, "key": 1}, (4, 1)),
    "decoder": ({"layer": 3, "query": -1, "key": 7}, (-1, 1)),
    "cross": ({"layer": 2, "query": 8, "key": 3, "cross": True}, (2, 3)),
    "cross-later": ({"layer": 3, "query": -1, "key": 2, "cross": True}, (-1, 2)),
}
"""Attention scores of an encoder–decoder of two and two layers that reads six and four tokens: as `qk_attribution`
takes them, and the place in the pattern."""


UNREAD = ("jetmoe",)
"""Families whose heads' scores are not read, and their two runs not compared; `test_attention_experts` is of these."""


OF_ONE_LINE = re.compile("hooked/|encoder/|encoder-decoder/|bridge/roberta|bridge/t5(?!gemma)|bridge/wav2vec2")
"""Models that one line of TransformerLens alone has or runs."""


SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").split())
"""Tests whose cases take long (`scripts/slow_tests.py`): one of them runs by default."""


TURNS = 5
"""So many commits run each of the marked cases once."""


def pytest_addoption(parser):
    parser.addoption("--cases", type=int, help="of each test no more than so many cases, evenly spread")
    parser.addoption(
        "--half", type=int, choices=(1, 2), help="of the marked cases that both lines of TransformerLens have, one half"
    )
    fifth = "of the marked cases one fifth, the same on both lines"
    parser.addoption("--turn", type=int, choices=range(TURNS), help=fifth)
    parser.addoption("--other-rounding", action="store_true", help="round otherwise than this processor does")


@pytest.fixture(autouse=True)
def rounding(request):
    """Under ``--other-rounding``, a test's own process rounds as another processor might (`rounding.py`)."""
    with OtherRounding() if request.config.getoption("other_rounding") else nullcontext():
        yield


def rest_whole(names, *quick):
    """Names to parametrise by: all but a few belong to the marked set `whole`."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.whole) for name in names]


def pytest_collection_modifyitems(config, items):
    """Tests of every model run on the representatives by default, on the whole table where `whole` is asked for."""
    of_heads = [item for item in items if item.path.stem in ("test_circuits", "test_compress") and _is_mixed(item)]
    items[:] = [item for item in items if item not in of_heads]
    config.hook.pytest_deselected(items=of_heads)
    of_model = {}
    for item in items:
        params = (getattr(item, "callspec", None) and item.callspec.params) or {}
        asked = next((params[key] for key in ("name", "whitened", "plain") if key in params), None)
        asked = asked or getattr(params.get("check"), "of", None)
        named = [mark.args[1] for mark in item.iter_markers("parametrize") if mark.args[0] == "name"]
        if asked in model_names() and asked not in REPRESENTATIVES and not (named and len(named[0]) <= FEW):
            item.add_marker(pytest.mark.whole)
        asked = next((value for value in params.values() if isinstance(value, str) and value in model_names()), None)
        if asked and item.path.stem not in OF_EVERY_MODEL:
            of_model[item] = asked
    _mark_other_models(items, of_model)
    _mark_slow(items)
    surplus = set()
    cases = config.getoption("cases")
    if cases is not None:
        for tests in _by_test(items):
            surplus |= _beyond(tests, cases)
    half = config.getoption("half")
    if half is not None:
        surplus |= {item for item in items if _is_whole(item) and _of_other_half(item, half)}
    turn = config.getoption("turn")
    if turn is not None:
        surplus |= {item for item in items if _is_whole(item) and _of_other_turn(item, turn)}
    items[:] = [item for item in items if item not in surplus]
    config.hook.pytest_deselected(items=list(surplus))


def _mark_other_models(items, of_model):
    """Of the cases of a test that differ in nothing but their model, most belong to the marked set."""
    for tests in _by_test(items):
        options = {}
        for item in tests:
            if item in of_model:
                options.setdefault(item.nodeid.replace(of_model[item], ""), []).append(item)
        count = -(-MODELS_OF_A_TEST // max(1, len(options)))
        first = crc32(tests[0].name.split("[")[0].encode())
        for number, cases in enumerate(options.values(), start=first):
            chosen = {(number + len(cases) * place // count) % len(cases) for place in range(count)}
            for place, item in enumerate(cases):
                if place not in chosen:
                    item.add_marker(pytest.mark.whole)


def _mark_slow(items):
    """Of slow tests, of those marked `few`, and of each file's tests in a browser, most cases are in the marked set."""
    for tests in _by_test(items):
        few = tests[0].get_closest_marker("few")
        count = len(tests) if few is None else min(few.args[0], len(tests))
        name = f"{tests[0].path.stem}::{tests[0].name.split('[')[0]}"
        if name in SLOW:
            count = 1
        first = crc32(name.encode()) if count == 1 else 0  # not the first model of every list
        left_out = {(place + first) % len(tests) for place in _beyond(range(len(tests)), count)}
        for place in left_out:
            tests[place].add_marker(pytest.mark.whole)
    shown = set()
    for item in items:
        if "browser" in item.fixturenames and not _is_whole(item):
            if item.path in shown:
                item.add_marker(pytest.mark.whole)
            shown.add(item.path)


def _is_whole(item):
    return item.get_closest_marker("whole") is not None


def _by_test(items):
    """The cases of each test that are not in the marked set."""
    of_test = {}
    for item in items:
        if not _is_whole(item):
            of_test.setdefault(item.nodeid.split("[")[0], []).append(item)
    return of_test.values()


def _beyond(tests, count):
    """All but so many cases of a test, evenly spread over its parameters."""
    if len(tests) <= count:
        return set()
    spread = {len(tests) * number // count for number in range(count)}
    return {item for place, item in enumerate(tests) if place not in spread}


def _of_other_half(item, half):
    """Whether a case is left to the other line of TransformerLens, which has it as well: by its name's checksum."""
    if OF_ONE_LINE.search(item.nodeid):
        return False
    return crc32(item.nodeid.encode()) % 2 != half - 1


def _of_other_turn(item, turn):
    """Whether a case is left to other commits; another part of the same checksum, so that turns divide both halves."""
    return crc32(item.nodeid.encode()) // 2 % TURNS != turn


def _is_mixed(item):
    params = getattr(item, "callspec", None) and item.callspec.params
    return bool(params) and params.get("name") in {f"bridge/{family}" for family in (*MIXED, *UNREAD)}


@pytest.fixture(autouse=True)
def _seeded():
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def model_named():
    """Models are built once and shared; a test that changes one must build its own. Whatever a test does, also what
    fails inside it, must leave no hook behind."""
    used = {}

    def get(name):
        if name not in _models:
            _models[name] = tiny_model(name)
        used[name] = _models[name]
        return used[name]

    yield get
    assert not {name: count for name, model in used.items() if (count := hooks_left(model))}


@pytest.fixture
def clean_registry(monkeypatch):
    """What a test registers is gone after it."""
    tlens.list_methods()  # the built-in methods are registered when somebody asks
    for table in ("_METHODS", "_LAYER_MAPS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def model(name, model_named):
    return model_named(name)


@pytest.fixture(scope="session")
def demo_model():
    return tlens.load_demo_model(dtype=torch.float64)


def bridge_of(module):
    """A TransformerBridge of a copy of a Hugging Face model, which itself stays free of hooks, as a witness."""
    inside = deepcopy(module)
    return build_bridge_from_module(inside, type(inside).__name__, hf_config=inside.config).eval()


class Choices:
    """What a literal forward pass holds: its scales, patterns and gates, or those of another pass.

    Attributes:
        noted: what was held, in the order of the pass.
        given: what is held instead; None for what this pass computes.
    """

    def __init__(self, given=None):
        self.noted = []
        self.given = None if given is None else iter(given)

    def hold(self, value):
        self.noted.append(value if self.given is None else next(self.given))
        return self.noted[-1]


@pytest.fixture
def read_anew(monkeypatch):
    """A model is read anew by the next pass, whatever passes of it there are: for tests that change how it is read."""
    monkeypatch.setattr("tensorlens_tl.passes.linearisation._views", WeakKeyDictionary())


def some_tokens(batch=2, pos=6, seed=0):
    return torch.randint(3, 48, (batch, pos), generator=torch.Generator().manual_seed(seed))


FLOAT32_INSIDE = (
    "llama", "mistral", "qwen", "gemma", "phi3", "olmo2", "native-rms", "mixtral", "gpt-oss", "deepseek", "granite",
    "afmoe", "bitnet", "mamba", "jamba", "falcon-h1", "lfm2", "jetmoe", "t5",
)  # fmt: skip
"""Families whose own norms compute in float32 whatever the dtype."""


def tolerance(name):
    return 1e-6 if any(family in name for family in FLOAT32_INSIDE) else 1e-9


FLOAT32_SOFTMAX = ("bridge/opt", "neox", "gptj", "bridge/phi", "modernbert", "rwkv")
"""Families of Hugging Face whose softmax, or the scores before it, compute in float32 whatever the dtype; so do keys of
RWKV."""


def rerun_tolerance(name):
    """Where two runs of the model, or a pattern made anew, are compared: rounding depends on shapes."""
    return 1e-6 if any(family in name for family in FLOAT32_SOFTMAX) else tolerance(name)


class Wide(TorchFunctionMode):
    """Hugging Face's modules round to float32 inside whatever the model's dtype; here they stay in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if func is Tensor.float or (func in (Tensor.to, Tensor.type) and torch.float32 in args[1:]):
            return args[0].double()
        return func(*args, **kwargs)


def close(made, expected, atol=1e-9):
    """Equal to this share of the largest value, or of 1; no wider, as torch.allclose is by default."""
    assert made.shape == expected.shape
    return float((made - expected).abs().max()) <= atol * max(1.0, float(expected.abs().max()))


def pattern_point(frozen, layer, cross=False):
    """The hook point of a layer's pattern."""
    points = frozen.points.blocks[layer]
    return points.cross.pattern if cross else points.pattern


def hooks_left(model):
    """How many hooks a user or we have put on the model (a Bridge of 4.x has a few permanent ones of its own)."""
    return sum(not hook.permanent for hook in hooks_on(model))
