"""``freeze(verify="sample")``: what it proves, what it refuses, what it cannot see, and what it says about itself."""

import pytest
import torch
from conftest import hooks_left, some_tokens, tolerance
from torch import nn

import tensorlens_tl as tlens
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.passes.proof import POSITIONS, can_be_sampled, sampled_positions
from tensorlens_tl.testing import tiny_model

pytestmark = pytest.mark.numeric
GPT2 = "bridge/gpt2"


def long_tokens(length=20, batch=2):
    return torch.randint(1, 48, (batch, length), generator=torch.Generator().manual_seed(3))


def unsampled(tokens, least):
    """The first position from `least` on that no prompt is proved at."""
    sampled = set(sampled_positions(torch.ones_like(tokens, dtype=torch.bool)).flatten().tolist())
    return min(set(range(least, tokens.shape[1])) - sampled)


def test_it_freezes_what_the_full_proof_freezes_with_the_same_layouts_and_errors(model, name):
    tokens = some_tokens() if name.startswith("bridge/t5") else long_tokens(16)
    whole, sampled = (tlens.freeze(model, tokens, verify=verify) for verify in (True, "sample"))
    assert sampled.layouts == whole.layouts
    assert sampled.errors.keys() == whole.errors.keys()
    assert whole.proof.positions is None
    for layer in range(whole.n_layers):
        proved = whole.errors[f"blocks.{layer}"]
        assert sampled.errors[f"blocks.{layer}"] <= max(2 * proved, tolerance(name))
        if not can_be_sampled(sampled.view, layer):
            assert sampled.errors[f"blocks.{layer}"] == pytest.approx(proved, rel=1e-3, abs=1e-12)


def test_errors_are_those_of_the_full_proof_at_the_sampled_positions():
    """With a tolerance that lets a wrong map pass, so that errors are no rounding."""
    model = tiny_model(GPT2)
    change(model, "blocks.1.hook_mlp_out", lambda out: out + 0.01 * out.roll(1, -1))
    sampled = tlens.freeze(model, long_tokens(), verify="sample", tolerance=0.5)
    block, positions = sampled.block(1), sampled.proof.positions
    made, own = (
        torch.take_along_dim(x, positions[..., None], dim=1)
        for x in (block(sampled.resid_pre(1)), sampled.resid_pre(2))
    )
    assert sampled.errors["blocks.1"] == pytest.approx(relative_error(made, own), rel=1e-9)
    assert sampled.errors["blocks.1"] > 1e-4
    model.reset_hooks()


def change(model, point, how):
    """A hook of somebody's that changes what the weights say."""
    model.add_hook(point, lambda tensor, hook: how(tensor))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("point", ["attn.hook_out", "mlp.hook_out"])
def test_a_map_that_is_wrong_everywhere_is_refused_by_name(layer, point):
    model = tiny_model(GPT2)
    name = f"blocks.{layer}.{point}"
    change(model, name, lambda out: out + 0.1 * out.roll(1, -1))
    with pytest.raises(tlens.UnsupportedModelError, match=rf"blocks\.{layer} .* at sampled positions of each prompt"):
        tlens.freeze(model, long_tokens(), verify="sample")
    model.reset_hooks()
    assert hooks_left(model) == 0


def test_a_pattern_that_leaves_out_a_key_is_seen_from_a_sampled_query():
    """All keys count: the values of one early token are changed, and queries see it that are not that token."""
    model, tokens = tiny_model(GPT2), long_tokens()
    free = unsampled(tokens, least=0)

    def other_value(value):
        value = value.clone()
        value[:, free] += 1.0
        return value

    change(model, "blocks.1.attn.hook_v", other_value)
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1 "):
        tlens.freeze(model, tokens, verify="sample")
    model.reset_hooks()


def test_an_error_at_one_other_token_is_what_it_cannot_see():
    model, tokens = tiny_model(GPT2), long_tokens()
    free = unsampled(tokens, least=8)  # the layout is told apart at the first tokens

    def once(out):
        out = out.clone()
        out[:, free] *= 1.5
        return out

    change(model, "blocks.1.hook_mlp_out", once)
    with pytest.raises(tlens.UnsupportedModelError, match=r"blocks\.1 "):
        tlens.freeze(model, tokens)
    assert tlens.freeze(model, tokens, verify="sample").errors["blocks.1"] < 1e-9
    model.reset_hooks()


def test_positions_are_real_tokens_the_last_one_among_them_and_the_same_again():
    mask = torch.ones(4, 30, dtype=torch.bool)
    mask[1, 20:], mask[2, :27], mask[3, 1:] = False, False, False
    positions = sampled_positions(mask)
    assert positions.shape == (4, POSITIONS)
    assert bool(torch.take_along_dim(mask, positions, 1).all())
    assert positions[:, -1].tolist() == [29, 19, 29, 0]
    assert bool((positions.diff(dim=1) >= 0).all())
    assert [len(set(row)) for row in positions.tolist()] == [8, 8, 3, 1]
    assert torch.equal(positions, sampled_positions(mask))
    assert sampled_positions(mask[3:, :3]).tolist() == [[0]]


def test_padded_prompts(model_named):
    prompts = [list(range(3, 20)), [5, 6], list(range(9, 21))]
    sampled = tlens.freeze(model_named("bridge/llama"), prompts, verify="sample")
    assert max(sampled.errors.values()) < 1e-6
    assert bool(torch.take_along_dim(sampled.mask, sampled.proof.positions, 1).all())


def test_a_sampled_proof_says_so(model_named):
    model = model_named(GPT2)
    whole, sampled = tlens.freeze(model, long_tokens()), tlens.freeze(model, long_tokens(), verify="sample")
    assert "at sampled positions of each prompt" in repr(sampled)
    assert sampled.provenance()["proof"] == "sampled positions of each prompt"
    assert "proof" not in whole.provenance()
    assert "sampled" not in repr(whole)
    made, same = (frozen.operator().target(5) for frozen in (sampled, whole))
    torch.testing.assert_close(made.scores, same.scores, rtol=0, atol=1e-12)
    assert tlens.attribute(model, long_tokens(), target=5, verify="sample").provenance["proof"].startswith("sampled")


def test_no_activation_ratio_is_made_of_all_tokens(model_named):
    sampled = tlens.freeze(model_named(GPT2), long_tokens(), verify="sample")
    assert not sampled.maps.cache.ratios


@pytest.mark.parametrize("verify", ["all", "", None, 2, 1, ["sample"]])
def test_other_values_are_refused(model_named, verify):
    with pytest.raises(tlens.InvalidInputError, match=r"verify=.* use True .* 'sample' .* or False"):
        tlens.freeze(model_named(GPT2), [3, 4], verify=verify)


def test_a_layout_that_was_told_apart_once_is_not_kept_for_other_weights():
    model = tiny_model(GPT2)
    tlens.freeze(model, long_tokens(), verify="sample")
    with torch.no_grad():
        next(module for module in model.modules() if isinstance(module, nn.LayerNorm)).weight.mul_(1.5)
    assert {layout.name for layout in tlens.freeze(model, long_tokens(), verify="sample").layouts} == {"pre"}
