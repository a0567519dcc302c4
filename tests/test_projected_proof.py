"""Whole proofs that compare products by random projections: what they accept, and that no mutation passes them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl.hooks import observe
from tensorlens_tl.passes.proof import COLUMNS, SHARE, SeenWrites, block_error, projected_errors
from tensorlens_tl.testing import model_names, tiny_model

pytestmark = pytest.mark.numeric

PLAIN = [name for name in ("bridge/gpt2", "bridge/llama", "bridge/neox", "hooked/ln") if name in model_names()]
CHANGE = {torch.float64: 0.01, torch.float32: 0.3}


class Proved:
    """A block of a model beside what the model showed there; its weights can be read wrongly."""

    def __init__(self, name, dtype, layer=1):
        self.model = tiny_model(name).to(dtype)
        self.frozen = tlens.freeze(self.model, some_tokens(2, 9))
        capture = self.frozen.capture
        seen = SeenWrites.of(capture.view, capture.points, len(capture.tokens), None, "model")
        observe(self.model, capture.inputs, capture.points.proved, seen.see, optional=capture.points.proved)
        self.seen = seen.tensors
        self.layer = layer
        self.maps = self.frozen.maps
        self.block = self.maps.view.blocks[layer]
        self.layout = self.frozen.layouts[layer]

    def errors(self):
        self.maps.forget(self.layer)
        return projected_errors(self.maps, self.layer, self.layout, self.seen)

    def exact(self):
        self.maps.forget(self.layer)
        block = self.maps.composed(self.layer, self.layout, self.maps.parts(self.layer))
        capture = self.maps.capture
        return block_error(capture, self.layer, block(capture.resid_pre(self.layer)))

    def read(self, part, name, weight):
        vars(self.block)[part] = replace(getattr(self.block, part), **{name: weight})


def mutations(weight, factor):
    """Every entry of a matrix of at most 300, 300 drawn entries of a larger one, every row and every column."""
    chosen = range(weight.numel())
    if weight.numel() > 300:
        chosen = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(0))[:300].tolist()
    for number in chosen:
        changed = weight.clone()
        changed.view(-1)[number] *= 1 + factor
        yield f"entry {number}", changed
    for axis in range(weight.ndim if weight.ndim == 2 else 0):
        for index in range(weight.shape[axis]):
            changed = weight.clone()
            changed.select(axis, index).mul_(1 + factor)
            yield f"axis {axis}, {index}", changed


@pytest.mark.parametrize("name", PLAIN)
def test_a_block_that_is_read_right_is_accepted_with_the_errors_of_the_whole_proof(name):
    proved = Proved(name, torch.float64)
    errors = proved.errors()
    assert errors is not None
    assert errors.output < proved.frozen.tolerance * SHARE
    assert proved.exact() < proved.frozen.tolerance * SHARE
    points = proved.maps.points.blocks[1]
    compared = {write.point for write in errors.writes}
    shown = {points.z, points.post, points.attention_write, points.mlp_write}
    assert shown | {"what blocks.1 adds to the stream"} <= compared


@pytest.mark.parametrize("dtype", CHANGE, ids=str)
@pytest.mark.parametrize("name", PLAIN[:2])
@pytest.mark.few(1)
def test_no_weight_that_is_read_wrongly_is_accepted(name, dtype):
    """Whatever the composed block misses by more than the tolerance, projections do not let pass."""
    proved = Proved(name, dtype)
    count = 0
    for part, names in (
        ("attention", ("value_matrix", "b_V", "W_O", "b_O")),
        ("mlp", ("W_in", "b_in", "W_out", "b_out")),
    ):
        original = getattr(proved.block, part)
        for weight_name in names:
            weight = getattr(original, weight_name)
            if weight is None:
                continue
            for where, changed in mutations(weight.detach().contiguous(), CHANGE[dtype]):
                proved.read(part, weight_name, changed)
                accepted = proved.errors() is not None
                if proved.exact() > proved.frozen.tolerance:
                    assert not accepted, (weight_name, where)
                    count += 1
        vars(proved.block)[part] = original
    assert count > 900


@pytest.mark.parametrize("point", ["attention_write", "mlp_write", "z", "post"])
@pytest.mark.parametrize("position", range(9))
@pytest.mark.few(5)
def test_no_single_token_that_is_changed_is_accepted(point, position):
    proved = Proved("bridge/gpt2", torch.float64)
    name = getattr(proved.maps.points.blocks[1], point)
    for channel in range(proved.seen[name].shape[-1]):
        shown = proved.seen[name]
        changed = shown.clone()
        changed[0, position, channel] += 1e-3 * shown[0, position].norm()
        proved.seen[name] = changed
        assert proved.errors() is None
        proved.seen[name] = shown
    assert proved.errors() is not None


def test_a_refusal_names_what_the_whole_proof_names():
    model = tiny_model("bridge/gpt2")
    named = pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1 .*first part that differs is .*mlp")
    with model.hooks([("blocks.1.hook_mlp_out", lambda out, *, hook: 1.001 * out)]), named:
        tlens.freeze(model, some_tokens())


@pytest.mark.parametrize("name", ["bridge/gemma2", "bridge/bert"])
def test_other_layouts_are_composed(name):
    proved = Proved(name, torch.float32)
    assert proved.errors() is None
    assert proved.exact() < proved.frozen.tolerance


def test_half_precision_is_composed():
    assert Proved("bridge/gpt2", torch.bfloat16).errors() is None


def test_the_stated_probability_of_a_miss():
    """χ² of 8 degrees of freedom below 8/100, by its series, is at most 1.1e-7."""
    half = COLUMNS * SHARE**2 / 2
    terms = [half**number / torch.arange(1.0, number + 1).prod().item() for number in range(COLUMNS // 2)]
    probability = 1 - torch.exp(torch.tensor(-half, dtype=torch.float64)) * sum(terms)
    assert 0.9e-7 < float(probability) < 1.1e-7
    assert f"on {COLUMNS} random vectors" in (Path(__file__).parents[1] / "docs/cost.md").read_text()
