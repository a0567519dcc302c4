"""The factorisation by itself: the table of errors is what is measured, and the best ranks are the best."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import tensorlens_tl as tlens
from tensorlens_tl.compress import HOSVD, hooi, paper_ranks, parameter_count, sequential_hosvd

pytestmark = pytest.mark.numeric
GOLDEN = Path(__file__).parent / "golden" / "tensorly.npz"


def random_tensor(shape, seed=0, decay=0.5):
    """A tensor whose directions differ in energy."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for mode, length in enumerate(shape[:3]):
        weights = torch.linspace(1, decay, length, dtype=torch.float64)
        tensor = tensor * weights.view([-1 if m == mode else 1 for m in range(4)])
    return tensor


def measured(tensor, tucker):
    return float((tucker.dense() - tensor).norm() / tensor.norm())


@pytest.mark.parametrize(
    ("shape", "r", "s", "printed"),
    [
        ((768, 64, 4, 12), 53, 4, 1.12), ((768, 64, 4, 12), 26, 4, 3.74), ((768, 64, 4, 12), 15, 4, 8.78),
        ((768, 64, 4, 12), 37, 3, 2.52), ((4096, 256, 4, 16), 4, 2, 247.30), ((4096, 256, 4, 16), 42, 4, 14.69),
        ((4096, 256, 4, 16), 13, 1, 74.68), ((4096, 256, 4, 16), 19, 2, 46.77), ((4096, 128, 4, 32), 60, 3, 3.54),
        ((4096, 128, 4, 32), 60, 1, 5.81),
    ],
)  # fmt: skip
def test_every_ratio_that_the_paper_prints(shape, r, s, printed):
    ranks = paper_ranks(shape, r, s)
    assert round(math.prod(shape) / parameter_count(shape, ranks), 2) == printed


@settings(max_examples=25)
@given(st.tuples(*(st.integers(1, 6) for _ in range(4))), st.integers(0, 1000))
def test_the_table_is_what_is_measured(shape, seed):
    tensor = random_tensor(shape, seed)
    whole = HOSVD.of(tensor)
    for ranks in itertools.product(*(range(1, n + 1) for n in shape[:3])):
        made = whole.truncated(ranks)
        assert made.ranks == ranks
        assert made.shape == shape
        assert made.parameters == int(whole.counts[tuple(r - 1 for r in ranks)])
        assert abs(whole.error(ranks) - measured(tensor, made)) <= 1e-12
        assert math.isclose(whole.ratio(ranks), tensor.numel() / made.parameters)
    assert whole.error(shape[:3]) == 0
    assert measured(tensor, whole.truncated(shape[:3])) <= 1e-12


def test_a_small_error_is_not_rounded_away():
    tensor = torch.zeros(3, 3, 3, 2, dtype=torch.float64)
    tensor[0, 0, 0], tensor[2, 1, 1] = 1.0, 1e-13
    assert math.isclose(HOSVD.of(tensor).error((1, 1, 1)), 1e-13, rel_tol=1e-6)


@settings(max_examples=25)
@given(st.tuples(*(st.integers(2, 6) for _ in range(4))), st.floats(0.7, 20), st.floats(0.05, 1), st.booleans())
def test_the_best_ranks_are_the_best(shape, ratio, energy, by_paper):
    whole, rule = HOSVD.of(random_tensor(shape)), "paper" if by_paper else "free"
    everything = itertools.product(*(range(1, n + 1) for n in shape[:3]))
    looked = [r for r in everything if not by_paper or r[0] == shape[3] * r[1]]
    fitting = [r for r in looked if whole.ratio(r) >= ratio]
    for given_, fits, cost in (
        ({"ratio": ratio}, fitting, whole.error),
        ({"energy": energy}, [r for r in looked if 1 - whole.error(r) ** 2 >= energy], lambda r: -whole.ratio(r)),
    ):
        if not fits:
            with pytest.raises(tlens.InvalidInputError, match="rule"):
                whole.best_ranks(**given_, rule=rule)
        else:
            assert math.isclose(cost(whole.best_ranks(**given_, rule=rule)), min(map(cost, fits)), abs_tol=1e-9)


def test_iterations_never_make_it_worse():
    for seed in range(5):
        tensor = random_tensor((9, 7, 4, 5), seed, decay=1.0)
        for ranks in ((2, 3, 1), (4, 4, 2), (9, 1, 4)):
            start = HOSVD.of(tensor).truncated(ranks)
            made, errors = hooi(tensor, start, tolerance=0.0)
            assert all(after <= before + 1e-14 for before, after in itertools.pairwise(errors))
            assert abs(errors[-1] - measured(tensor, made)) <= 1e-12
            assert abs(errors[0] - measured(tensor, start)) <= 1e-12


def test_sequential_truncation():
    tensor = random_tensor((9, 7, 4, 5))
    assert measured(tensor, sequential_hosvd(tensor, (9, 7, 4))) <= 1e-12
    for ranks in ((3, 3, 2), (5, 2, 4)):  # as good as the HOSVD to its own bound: √3 times the best
        best = hooi(tensor, HOSVD.of(tensor).truncated(ranks)).errors[-1]
        assert best - 1e-12 <= measured(tensor, sequential_hosvd(tensor, ranks)) <= math.sqrt(3) * best


def test_against_tensorly():
    stored = np.load(GOLDEN)  # tensorly 0.9 with the torch backend: partial_tucker(modes=[0, 1, 2], init="svd")
    tensor = torch.tensor(stored["tensor"], dtype=torch.float64)
    for ranks, theirs in zip(stored["ranks"].tolist(), stored["errors"].tolist(), strict=True):
        ours = hooi(tensor, HOSVD.of(tensor).truncated(ranks), sweeps=200, tolerance=1e-12).errors[-1]
        assert abs(ours - theirs) <= 1e-3
        assert ours <= theirs + 1e-6


def test_a_planted_tensor_is_recovered():
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    clean = torch.einsum("abch,ia,jb,kc->ijkh", random(12, 6, 3, 8), random(128, 12), random(32, 6), random(4, 3))
    noise = random(128, 32, 4, 8)
    noisy = clean + 0.3 * noise * clean.norm() / noise.norm()
    assert measured(clean, hooi(noisy, HOSVD.of(noisy).truncated((12, 6, 3))).tucker) <= 0.10


def test_float32_keeps_its_dtype_and_small_directions():
    tensor = random_tensor((12, 6, 4, 3)).float()
    made = HOSVD.of(tensor).truncated((12, 6, 4))
    assert made.core.dtype == torch.float32
    assert measured(tensor, made) < 1e-6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda t: HOSVD.of(t[0]), "four modes"),
        (lambda t: HOSVD.of(0 * t), "zeros"),
        (lambda t: HOSVD.of(t / 0), "not finite"),
        (lambda t: HOSVD.of(t).truncated((0, 1, 1)), r"ranks\[0\]=0"),
        (lambda t: HOSVD.of(t).truncated((1, 1, 5)), r"ranks\[2\]=5: pass 1 to 4"),
        (lambda t: HOSVD.of(t).error((1, 1)), "pass three"),
        (lambda t: HOSVD.of(t).best_ranks(ratio=1e9), "the largest here is"),
        (lambda t: HOSVD.of(t).best_ranks(ratio=-1), "positive"),
        (lambda t: HOSVD.of(t).best_ranks(energy=1.5), "at most 1"),
        (lambda t: HOSVD.of(t).best_ranks(), "pass one of"),
        (lambda t: HOSVD.of(t).best_ranks(ratio=2, energy=0.5), "pass one of"),
        (lambda t: HOSVD.of(t).best_ranks(ratio=2, rule="best"), "rule='best'"),
        (lambda t: HOSVD.of(t[:2]).best_ranks(ratio=2, rule="paper"), "more than 2"),
        (lambda t: hooi(t, HOSVD.of(t).truncated((1, 1, 1)), sweeps=0), "sweeps"),
        (lambda t: hooi(t[:3], HOSVD.of(t).truncated((1, 1, 1))), "of shape"),
        (lambda t: paper_ranks(t.shape, 3, 1), "r=3"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(tlens.InvalidInputError, match=words):
        call(random_tensor((6, 5, 4, 3)))
