"""The difference of two runs of whole models with mixers in place of attention, and circuits of it."""

from functools import cache

import pytest
import torch
from conftest import MIXED, Wide, close, rest_whole, some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.errors import InvalidInputError, NumericalError, UnsupportedModelError
from tensorlens_tl.results import ROUTES
from tensorlens_tl.testing import tiny_model
from tensorlens_tl.testing.models import build_bridge

pytestmark = [pytest.mark.numeric, pytest.mark.filterwarnings("error::tensorlens_tl.GapWarning")]

NAMES = [f"bridge/{family}" for family in MIXED]
QUICK = ("bridge/lfm2", "bridge/mamba")
BESIDE = [*NAMES, "bridge/afmoe", "bridge/gpt-oss"]
"""With two whose attention has a gate, or sinks, which are no head's."""

TOLERANCE = 1e-9


@pytest.fixture(autouse=True)
def in_float64():
    """Hugging Face's modules round to float32 inside, whatever their dtype; here they do not."""
    with Wide():
        yield


@cache
def models_of(name):
    """Two, which nothing here changes."""
    return tiny_model(name), tiny_model(name, seed=1)


def two_runs(name, models=1):
    tokens = some_tokens()
    model = models_of(name)[0]
    other = models_of(name)[models - 1]
    return tlens.difference(tlens.freeze(model, tokens), tlens.freeze(other, tokens.flip(0)))


def live(model, tokens):
    with torch.no_grad():
        logits = model(tokens)
    return logits[:, -1:, 5] - logits[:, -1:, 9]


@pytest.mark.parametrize("name", rest_whole(NAMES, *QUICK))
def test_two_models_and_two_prompts_together(name):
    change = two_runs(name, models=2)
    result = tlens.attribute(change, 5, minus=9)
    tokens = some_tokens()
    model, other = models_of(name)
    expected = live(model, tokens) - live(other, tokens.flip(0))
    assert result.bias is not None
    assert close(result.scores.sum(-1) + result.bias, expected, TOLERANCE)
    assert bool((result.bias.abs() > 1e-3).all())


ON_BOTH_SIDES = ("bridge/mamba", "bridge/mamba2")
"""Families that padding changes on neither side, on any TransformerLens."""


def padded_runs(name, side, batches):
    """None where padding changes what the model gives, which is refused."""
    model = models_of(name)[0]
    try:
        return [tlens.freeze(model, rows, padding_side=side) for rows in batches]
    except (UnsupportedModelError, NumericalError) as refused:
        if side == "right" or name in ON_BOTH_SIDES or "Pad on the right" not in str(refused):
            raise
        return None


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", rest_whole(NAMES, *QUICK))
def test_padded_batches_are_their_prompts(name, side):
    lengths = (6, 4)
    batches = [
        [row[:length].tolist() for row, length in zip(some_tokens(2, 6, seed), lengths, strict=True)] for seed in (0, 1)
    ]
    runs = padded_runs(name, side, batches)
    if runs is None:
        return
    together = tlens.attribute(tlens.difference(*runs), 5).scores
    for number, length in enumerate(lengths):
        alone = tlens.difference(*(tlens.freeze(runs[0].model, rows[number]) for rows in batches))
        real = runs[0].mask[number]
        assert int(real.sum()) == length
        assert close(together[number, 0, real], tlens.attribute(alone, 5).scores[0, 0], TOLERANCE)


@pytest.mark.parametrize("name", rest_whole(NAMES, *QUICK))
def test_queries_in_chunks(name):
    change = two_runs(name)
    whole = tlens.attribute(change, 5, query="all")
    parts = tlens.attribute(change, 5, query="all", memory=change.row_bytes)
    assert close(parts.scores, whole.scores, 1e-12)


def test_some_heads_of_a_mixer_are_refused():
    change = two_runs("bridge/mamba")
    with pytest.raises(UnsupportedModelError, match=r"blocks\.0 .*no softmax attention"):
        change.maps.stage(0, heads=[0])


def test_mixers_of_other_sizes_are_two_architectures():
    a, b = (tlens.freeze(build_bridge("mamba", state_size=size), some_tokens()) for size in (4, 6))
    with pytest.raises(InvalidInputError, match=r"two architectures.*Mamba of .*32×4.*32×6"):
        tlens.difference(a, b)


# ------------------------------------------------------------------ circuits


@pytest.mark.parametrize("by", ["matrix", "layer", "component", "head", "head_matrix", "rank"])
@pytest.mark.parametrize("name", rest_whole(BESIDE, *QUICK))
def test_changed_weights_sum_to_the_change_of_the_logit(name, by):
    base, tuned = models_of(name)
    tokens = some_tokens()
    change = tlens.compare_models(base, tuned, tokens, 5, 9, by=by)
    assert close(change.total, live(tuned, tokens) - live(base, tokens), TOLERANCE)
    assert change.remainder is not None
    assert close(change.scores.sum(-1) + change.remainder, change.total, TOLERANCE)
    assert float(change.gap.max()) < TOLERANCE


@pytest.mark.parametrize("name", rest_whole(NAMES, *QUICK))
def test_a_mixer_is_the_sum_of_its_weights(name):
    base, tuned = models_of(name)
    by_matrix = tlens.compare_models(base, tuned, some_tokens(), 5, 9)
    parts = [term for term in by_matrix.names if term.startswith("L0.mixer.")]
    assert {f"{part}.weight" for part in ("out_proj", "o_proj", "output")} & {term[9:] for term in parts}
    for by in ("component", "head"):
        grouped = tlens.compare_models(base, tuned, some_tokens(), 5, 9, by=by)
        assert close(grouped["L0.mixer"], sum(by_matrix[term] for term in parts))


@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("name", rest_whole(BESIDE, *QUICK))
def test_routes_sum_to_the_change_at_every_layer(name, models):
    change = two_runs(name, models)
    by = circuits.routes(change, 5, 9, query=[2, -1])
    assert close(by.scores.sum(-1), by.total[..., None].expand(by.scores.shape[:-1]), TOLERANCE)
    assert float(by.gap.max()) < TOLERANCE
    for layer, block in enumerate(change.view.blocks):
        used = {route for route in ROUTES if bool(by[route][..., layer].any())}
        assert ("mixer" in used) == (block.mixer is not None or block.beside is not None)
        assert ("values" in used) == (block.mixer is None)
        gated = block.mixer is None and block.attention.output_factor is not None
        assert ("gates" in used) == gated
    for layer in range(len(by.layers)):
        assert float(by.at(layer).gap.max()) < TOLERANCE


@pytest.mark.parametrize("name", rest_whole([name for name in NAMES if name != "bridge/qwen3-next"], *QUICK))
def test_edges_into_the_end_sum_to_the_change(name):
    tokens = some_tokens()
    a, b = (tlens.freeze(models_of(name)[0], some) for some in (tokens, tokens.flip(0)))
    terms = circuits.logit_attribution(tlens.difference(a, b), 5, 9)
    assert float(terms.gap.max()) < TOLERANCE
    assert any(term.endswith(".mixer") for term in terms.names)
    edges = circuits.edge_scores(a, b, 5, 9, method="difference")
    assert any(source.endswith(".mixer") for source in edges.sources)
    assert close(edges.scores[..., -1].sum(-1), edges.clean - edges.corrupted, TOLERANCE)


def test_a_gate_after_heads_is_a_node_beside_mixers():
    """Of Qwen3-Next's attention."""
    name = "bridge/qwen3-next"
    change = two_runs(name)
    terms = circuits.patch_scores(change.a, change.b, 5, method="difference", by="head")
    assert {"L0.mixer", "L1H0", "L1H3"} <= set(terms.names)
    direct = circuits.logit_attribution(change, 5, by="head")
    assert float(direct.gap.max()) < TOLERANCE
    edges = circuits.edge_scores(change.a, change.b, 5, method="difference")
    for node in ("L1H0", "L1H3"):
        into = [edges.destinations.index(f"{node}.{letter}") for letter in "qkvg"]
        assert close(edges.scores[:, :, into].sum((1, 2)), terms[node][:, 0], TOLERANCE)
