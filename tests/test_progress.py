"""Work that is watched: the same numbers, how far it is, and nothing left behind where it is stopped."""

import itertools

import pytest
import torch

import tensorlens_tl as tlens
from tensorlens_tl.algebra.progress import CancelledError, watching
from tensorlens_tl.hooks import hooks_on

try:
    from transformer_lens import HookedTransformer
except ImportError:  # TransformerLens 4
    HookedTransformer = None

KINDS = ["bridge"] if HookedTransformer is None else ["hooked", "bridge"]


@pytest.mark.parametrize("kind", KINDS)
def test_watched_work_gives_the_same_numbers_and_says_how_far_it_is(kind):
    model = tlens.load_demo_model(kind=kind)
    text = "The value of the item is"
    expected = tlens.attribute(tlens.freeze(model, text), target=5, method="leave-one-out").scores
    seen = []
    with watching(lambda what, share: seen.append((what, share))):
        scores = tlens.attribute(tlens.freeze(model, text), target=5, method="leave-one-out").scores
    assert torch.equal(scores, expected)
    shares = [share for what, share in seen if what == "proof of the blocks"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert {"proof of the blocks", "leave one out"} <= {what for what, _ in seen}
    before = len(seen)
    tlens.freeze(model, text)
    assert len(seen) == before


@pytest.mark.parametrize("kind", KINDS)
def test_work_that_is_cancelled_anywhere_leaves_nothing_behind(kind):
    model = tlens.load_demo_model(kind=kind)

    def work():
        written = tlens.generation.freeze_generation(model, "Return the value", max_new_tokens=3)
        return tlens.attribute(written.frozen, target=5, method="leave-one-out").scores

    expected = work()
    marks = []
    with watching(lambda what, share: marks.append(what)):
        work()
    hooks = hooks_on(model)
    for last in {0, len(marks) - 1, *range(3, len(marks), 17)}:
        steps = itertools.count()

        def stop(what, share, steps=steps, last=last):
            if next(steps) == last:
                raise CancelledError

        with watching(stop), pytest.raises(CancelledError):
            work()
        assert hooks_on(model) == hooks
    assert torch.equal(work(), expected)
