"""The logit lens: each layer's stream, through the live model's own final norm, head and unembedding."""

import pytest
import torch
from conftest import close, some_tokens, tolerance

import tensorlens_tl as tlens
from tensorlens_tl import circuits
from tensorlens_tl.testing import encoder_decoder_names, tiny_input, tiny_model


def end_of_live_model(frozen, x):
    """The logits that the live model gives where its last block's output is replaced."""
    name = frozen.points.last_output
    hooks = [(name, lambda live, hook: x.to(live)[:, -live.shape[1] :])]
    with torch.no_grad():
        logits = frozen.model.run_with_hooks(**frozen.inputs, fwd_hooks=hooks)
    if isinstance(logits, torch.Tensor) and logits.ndim == 2:  # of classes, one answer
        logits = logits[:, None]
    cap = frozen.soft_cap
    return logits if cap is None else cap * torch.atanh(logits / cap)


def test_the_lens_is_what_the_live_model_makes_of_each_stream(name, model):
    tokens, options = tiny_input(model)
    frozen = tlens.freeze(model, tokens, **options)
    if frozen.view.unembedding is None:
        with pytest.raises(tlens.UnsupportedModelError, match="predicts no tokens"):
            circuits.logit_lens(frozen, 5)
        return
    lens = circuits.logit_lens(frozen, 5, 2)
    first = frozen.view.encoder_layers
    assert lens.shape == (len(tokens), 1, frozen.n_layers - first + 1)
    for depth, layer in enumerate(range(first, frozen.n_layers + 1)):
        logits = end_of_live_model(frozen, frozen.resid_pre(layer))[:, -1]
        assert close(lens[:, 0, depth], logits[:, 5] - logits[:, 2], tolerance(name))


def test_a_norm_that_the_layers_do_not_reach_is_not_dropped_without_a_word():
    model = tiny_model("bridge/llama")
    frozen = tlens.freeze(model, some_tokens(batch=1))
    direction = torch.randn(16, dtype=torch.float64)
    early = {"direction": direction, "layers": slice(0, 1)}
    for question in (
        lambda **options: frozen.operator(layers=early["layers"], **options),
        lambda **options: tlens.attribute(frozen, collapse="target", **early, **options),
        lambda **options: circuits.logit_attribution(frozen, **early, **options),
        lambda **options: circuits.total_effects(frozen, **early, **options),
        lambda **options: circuits.top_paths(frozen, **early, **options),
        lambda **options: circuits.contribution_graph(frozen, **early, **options),
        lambda **options: circuits.head_map(frozen, 0, 0, layers=early["layers"], **options),
    ):
        question()
        question(final_norm=False)
        with pytest.raises(tlens.InvalidInputError, match=r"before the final norm.*logit_lens"):
            question(final_norm=True)
    norm = model.ln_final.original_component
    expected = norm(frozen.resid_pre(1)).detach()[:, -1] @ direction
    assert close(circuits.logit_lens(frozen, direction=direction)[:, 0, 1], expected, 1e-6)


@pytest.mark.parametrize("name", encoder_decoder_names())
def test_of_an_encoder_decoder_it_is_of_the_decoder(name, model_named):
    test_the_lens_is_what_the_live_model_makes_of_each_stream(name, model_named(name))
