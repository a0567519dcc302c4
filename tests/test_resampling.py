"""Tokens drawn from what a model itself would write stand for those that a perturbation replaces."""

import pytest
import torch
from conftest import some_tokens

import tensorlens_tl as tlens
from tensorlens_tl import evaluate
from tensorlens_tl.evaluate.perturbation import drawn, replacement_of
from tensorlens_tl.models import ModelView
from tensorlens_tl.passes.inputs import prepare
from tensorlens_tl.testing import tiny_model

TEXTS = ["Return the value of the module", "If the file is not found, a FileNotFoundError is raised here today"]


def draws_of(model, prompts, draws, seed=0, **options):
    view = ModelView(model)
    prompt = prepare(view, prompts, **options)
    replacements = drawn(view, prompt, replacement_of(view, prompt, None), draws, seed)
    return prompt, torch.stack([each.tokens for each in replacements])


def test_tokens_are_drawn_as_often_as_the_model_expects_them():
    """Without the token that stands there and special ones; of the first position from the mean over all."""
    model = tlens.load_demo_model(dtype=torch.float64)
    ids = model.to_tokens(TEXTS[0])
    _, tokens = draws_of(model, ids.tolist(), 2000)
    logits = model(ids)[0].double()
    logits[:, list(model.tokenizer.all_special_ids)] = -torch.inf
    for position in range(1, ids.shape[1]):
        row = logits[position - 1].clone()
        row[ids[0, position]] = -torch.inf
        expected = row.softmax(-1)
        often = torch.bincount(tokens[:, 0, position], minlength=len(expected)) / len(tokens)
        assert float((often - expected).abs().max()) < 0.05
        assert not bool((tokens[:, 0, position] == ids[0, position]).any())


def test_the_first_token_is_drawn_from_the_mean_where_nothing_is_before_it():
    model, tokens, count = tiny_model("bridge/gpt2"), some_tokens(1, 4), 3000
    _, draws = draws_of(model, tokens, count)
    logits = model(tokens)[0].detach().double()
    logits[:, tokens[0, 0]] = -torch.inf
    expected = count * logits.softmax(-1).mean(0)
    often = draws[:, 0, 0].bincount(minlength=len(expected))
    assert often[tokens[0, 0]] == 0
    assert float(((often - expected) / expected.sqrt().clamp(min=1)).abs().max()) < 6


@pytest.mark.parametrize("side", ["left", "right"])
def test_draws_do_not_hang_on_the_batch(side):
    model = tlens.load_demo_model()
    prompt, together = draws_of(model, TEXTS, 3, padding_side=side)
    for row, text in enumerate(TEXTS):
        _, alone = draws_of(model, text, 3)
        assert torch.equal(together[:, row, prompt.mask[row]], alone[:, 0])
    assert not torch.equal(together, draws_of(model, TEXTS, 3, seed=1, padding_side=side)[1])


def test_damages_are_means_over_draws():
    """Three draws are three runs of a replacement each, and rows of a batch are those of each prompt alone."""
    model, methods = tlens.load_demo_model(dtype=torch.float64), ["tensorlens target", "random"]
    asked = {"methods": methods, "metrics": ["logit", "aopc"], "fractions": (0, 0.3, 0.6)}
    together = evaluate.perturbation(model, TEXTS, **asked)
    assert together.settings["replacement"] == "resampled"
    assert together.settings["draws"] == 3
    for row, text in enumerate(TEXTS):
        alone = evaluate.perturbation(model, text, **asked)
        torch.testing.assert_close(together.curves[..., row, :], alone.curves[..., 0, :], rtol=1e-9, atol=1e-9)
    one = evaluate.perturbation(model, TEXTS, **asked, draws=1)
    assert not torch.equal(one.values, together.values)


def test_damage_is_that_of_runs_by_hand(tmp_path):
    """Everything but BOS replaced: the mean over draws of how far the first choice's logit falls; also in shards."""
    model = tlens.load_demo_model(dtype=torch.float64)
    asked = {"methods": ["random"], "fractions": (0, 1), "metrics": ["logit"], "seed": 4, "draws": 2}
    together = evaluate.perturbation(model, TEXTS, **asked)
    run = evaluate.perturbation_dataset(model, TEXTS, tmp_path, tokens_per_batch=8, progress=False, **asked)
    for row, text in enumerate(TEXTS):
        _, draws = draws_of(model, text, 2, seed=4)
        tokens = model.to_tokens(text)
        whole = model(tokens)[0, -1]
        changed = torch.cat([tokens[:, :1].expand(2, 1), draws[:, 0, 1:]], dim=1)
        falls = (whole - model(changed)[:, -1])[:, whole.argmax()]
        for found in (together, run.evaluation()):
            torch.testing.assert_close(found.curves[0, 0, row, 1], falls.mean(), rtol=1e-9, atol=1e-9)


def test_it_tells_methods_from_a_random_order():
    """On a trained model the order of a faithful method does more harm than a random one."""
    model = tlens.load_demo_model()
    prompts = tlens.demo.held_out_prompts(model, 24, 24)
    result = evaluate.perturbation(model, prompts, ["tensorlens target", "random"], metrics=["aopc"])
    won = result.compare("tensorlens target", "random")
    assert won.low > 0


def test_models_that_predict_no_next_token_keep_their_replacement():
    model = tiny_model("bridge/bert")
    default = evaluate.perturbation(model, some_tokens(1, 6), ["random"], metrics=["hs_mse"])
    assert default.settings["replacement"] == "mean"
    with pytest.raises(tlens.InvalidInputError, match=r"replacement='resampled': .* Use 'mean', 'zero'"):
        evaluate.perturbation(model, some_tokens(1, 6), ["random"], replacement="resampled")
    with pytest.raises(tlens.InvalidInputError, match="draws"):
        evaluate.perturbation(tlens.load_demo_model(), TEXTS, ["random"], draws=0)
