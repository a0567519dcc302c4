"""What two models differ in besides matrices that every model has: whitening, and positions that only attention reads.

The independent computation is the models' own logits.
"""

import copy

import pytest
import torch
from conftest import close, rerun_tolerance, rest_whole, some_tokens, tolerance

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.circuits.two_runs import BY
from tensorlens_tl.models import ModelView
from tensorlens_tl.testing import model_names, tiny_model

pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("error::tensorlens_tl.GapWarning")]
HERE = set(model_names())
WHITENED = rest_whole(
    [name for name in ("hooked/whitened", "bridge/whitened", "bridge/whitened-neox") if name in HERE],
    "bridge/whitened",
)
SHORTFORMER = [name for name in ("hooked/shortformer",) if name in HERE]
NAMES = WHITENED + SHORTFORMER
GAPS = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
"""Padding on either side."""


def two(name, attention_mask=None):
    models = [tiny_model(name, seed=seed) for seed in (1, 0)]
    return models, [tlens.freeze(model, some_tokens(), attention_mask=attention_mask) for model in models]


def live(frozen):
    return frozen.logits(-1)[..., 5] - frozen.logits(-1)[..., 9]


@pytest.mark.parametrize("mask", [None, GAPS], ids=["whole", "padded"])
@pytest.mark.parametrize("name", NAMES)
def test_two_models_are_explained(name, mask):
    _, runs = two(name, mask)
    difference = tlens.difference(*runs)
    allowed = tolerance(name)
    if name == "bridge/whitened-neox" and mask is not None:
        allowed = 1e-7  # its rotary tables are float32, and left padding counts positions from another one
    tokens = tlens.attribute(difference, 5, minus=9)
    terms = circuits.logit_attribution(difference, 5, 9)
    routes = circuits.routes(difference, 5, 9)
    expected = live(runs[0]) - live(runs[1])
    assert close(tokens.scores.sum(-1) + tokens.bias, expected, allowed)
    assert close(terms.scores.sum(-1), expected, allowed)
    assert close(routes.scores.sum(-1), expected[..., None].expand_as(routes.scores[..., 0]), allowed)


@pytest.mark.parametrize("name", NAMES)
def test_graph_paths_and_attention_of_two_models(name):
    models, _ = two(name)
    difference = tlens.difference(*(tlens.freeze(model, some_tokens()[:1]) for model in models))
    allowed = tolerance(name)
    assert circuits.contribution_graph(difference, 5, 9).gap < allowed
    for by in ("token", "component", "head"):
        moved = circuits.qk_attribution(difference, 1, 2, query=4, key=3, by=by, of="pattern")
        whole = moved.query_sources.sum(-1) + moved.key_sources.sum(-1) + moved.constants.sum(-1)
        change = difference.a.pattern(1)[:, 2, 4, 3] - difference.b.pattern(1)[:, 2, 4, 3]
        assert close(whole, change, allowed)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("name", NAMES)
def test_their_terms_sum_to_the_change(name, by):
    models, runs = two(name)
    change = tlens.compare_models(models[1], models[0], some_tokens(), 5, 9, by=by)
    assert close(change.scores.sum(-1) + change.remainder, live(runs[0]) - live(runs[1]), tolerance(name))


@pytest.mark.parametrize("name", NAMES)
def test_one_of_them_alone_is_the_whole_change(name):
    """The step of the recursion is −M·L⁻¹: it changes with both parameters."""
    base = tiny_model(name)
    parameters = {"M": {"L0.whitening.step"}, "L_inv": {"L0.whitening.entry", "L0.whitening.step"}}
    if name in SHORTFORMER:
        parameters = {"W_pos": {"W_pos"}}
    for parameter, terms in parameters.items():
        tuned = copy.deepcopy(base)
        changed = next(key for key, _ in tuned.named_parameters() if parameter in key)
        with torch.no_grad():
            tuned.get_parameter(changed).copy_(tiny_model(name, seed=1).get_parameter(changed))
        change = tlens.compare_models(base, tuned, some_tokens(), 5, 9)
        assert {term for term in change.names if bool(change[term].any())} == terms
        assert float(change.total.abs().max()) > 1e-4


def test_a_whitened_model_beside_the_one_that_it_was():
    name = "bridge/gpt2"
    plain = tiny_model(name)
    tokens = some_tokens()
    width = plain.cfg.d_model
    generator = torch.Generator().manual_seed(3)
    mixing = torch.eye(width) + 0.1 * torch.randn(width, width, generator=generator)
    step = 0.1 * torch.randn(width, width, generator=generator)
    filters = [(mixing.double(), step.double())] * plain.cfg.n_layers
    whitened = tlens.whiten(tiny_model(name), init=filters)
    runs = [tlens.freeze(model, tokens) for model in (whitened, plain)]
    for first, second in (runs, runs[::-1]):
        result = tlens.attribute(tlens.difference(first, second), 5, minus=9)
        assert close(result.scores.sum(-1) + result.bias, live(first) - live(second), tolerance(name))
        assert float(result.total.abs().max()) > 1e-3


WINDOWED = [name for name in ("bridge/gemma2", "bridge/mistral") if name in HERE]
UNEQUAL = [[3, 4, 5, 6, 7, 8], [3, 9, 5], [2, 4, 6, 8], [5]]


@pytest.mark.parametrize("name", WINDOWED)
def test_prompts_that_differ_by_more_than_a_sliding_window_go_apart(name):
    """Padded to one length, a query of padding would see padding alone, and a Bridge makes NaN of that."""
    assert ModelView(tiny_model(name)).sliding_window == 3
    assert ModelView(tiny_model("bridge/qwen2-moe")).sliding_window is None  # its configuration says 0
    base, tuned = (tiny_model(name, seed=seed) for seed in (0, 1))
    change = tlens.compare_models(base, tuned, UNEQUAL, 5, 9)
    scores = tlens.attribute(base, UNEQUAL, 5)
    for row, prompt in enumerate(UNEQUAL):
        alone = tlens.compare_models(base, tuned, [prompt], 5, 9)
        assert close(change.scores[row], alone.scores[0], rerun_tolerance(name))
        assert close(scores.total[row], tlens.attribute(base, [prompt], 5).total[0], rerun_tolerance(name))
    assert close(change.scores.sum(-1), change.total, rerun_tolerance(name))
