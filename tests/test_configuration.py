"""What of a model is not weights: it stays the same whatever is run, and every change that acts is seen and named."""

import copy
import gc
import time
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from tensorlens_tl.models import lifecycle
from tensorlens_tl.models.lifecycle import changed, compact, configuration
from tensorlens_tl.testing import model_names, tiny_input, tiny_model

HOOKED = pytest.mark.skipif("hooked/ln" not in model_names(), reason="HookedTransformer is gone in TransformerLens 4")


def fresh(model):
    """A configuration that is read again, with nothing remembered."""
    lifecycle._readings.pop(model, None)
    return dict(configuration(model))


def inner(part):
    """The Hugging Face module that a part of a Bridge wraps."""
    return part._modules["_original_component"]


def test_it_stays_the_same_whatever_is_run(model, name):
    before = configuration(model)
    input, options = tiny_input(model)
    model(input, **options)
    hook = (lambda name: name.endswith("resid_pre"), lambda value, hook: value + 1)
    model.run_with_hooks(input[:1, :3], **{key: value[:1] for key, value in options.items()}, fwd_hooks=[hook])
    model.run_with_cache(input, **options, names_filter=hook[0])  # not every name: TransformerLens fails on OPT-350m
    training = model.training
    model.eval()
    assert configuration(model) is before  # nothing was put together again
    model.train(training)
    model.to("cpu")
    assert changed(before, configuration(model)) == []
    assert changed(before, fresh(model)) == []
    assert changed(compact(before), fresh(model)) == []
    assert changed(before, fresh(tiny_model(name))) == []


@pytest.mark.parametrize("name", ["bridge/llama", "bridge/gpt2"])
def test_a_cache_of_keys_and_other_lengths_change_nothing(name):
    model = tiny_model(name)
    before = fresh(model)
    for length in (3, 20):
        model.original_model(torch.full((1, length), 5), use_cache=True)
    model.reset_hooks()
    assert changed(before, configuration(model)) == []


def assert_seen(model, change, *words):
    before, kept = configuration(model), dict(configuration(model))
    change(model)
    for after in (configuration(model), fresh(model)):
        said = changed(before, after)
        assert all(word in said[0] for word in words), said
        assert changed(compact(before), after) == changed(before, compact(after)) == said
        assert changed(compact(before), compact(after)) == said
        assert len(changed(compact(after), compact(before))) == len(said)
    assert dict(before) == kept


def set_to(path, value):
    def change(model):
        *parts, last = path.split(".")
        for part in parts:
            model = model[int(part)] if part.isdecimal() else model._modules.get(part) or getattr(model, part)
        setattr(model, last, value)

    return change


ORIGINAL = "_original_component"


@HOOKED
@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("hooked/ln", set_to("blocks.0.attn.attn_scale", 4.0), ("blocks.0.attn.attn_scale: 2 -> 4",)),
        ("hooked/ln", set_to("blocks.1.mlp.act_fn", torch.nn.functional.silu), ("blocks.1.mlp.act_fn", "silu")),
        ("hooked/ln", set_to("cfg.eps", 0.1), ("cfg.eps: 1e-05 -> 0.1",)),
        ("hooked/ln", set_to("blocks.0.ln1.eps", 0.1), ("blocks.0.ln1.eps",)),
        ("hooked/local", set_to("cfg.window_size", 3), ("cfg.window_size: 2 -> 3",)),
        ("hooked/rotary", lambda model: model.blocks[0].attn.rotary_sin.mul_(2), ("blocks.0.attn.rotary_sin",)),
        ("hooked/rotary", lambda model: model.blocks[0].attn.rotary_sin.data.mul_(2), ("blocks.0.attn.rotary_sin",)),
        ("hooked/soft-caps", set_to("cfg.output_logits_soft_cap", 2.0), ("cfg.output_logits_soft_cap: 3 -> 2",)),
    ],
)
def test_what_is_changed_in_a_hooked_transformer_is_named(name, change, words):
    assert_seen(tiny_model(name), change, *words)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("gpt2", set_to(f"blocks.0.attn.{ORIGINAL}.scaling", 4.0), ("blocks.0.", "attn.scaling", "-> 4")),
        (
            "gpt2",
            set_to(f"blocks.1.mlp.{ORIGINAL}.act", nn.ReLU()),
            ("blocks.1.", "mlp.act: ", "modules.activation.ReLU"),
        ),
        ("gpt2", set_to(f"blocks.0.ln1.{ORIGINAL}.eps", 0.1), ("eps: 1e-05 -> 0.1",)),
        ("gpt2", set_to("cfg.attn_scale", 3.0), ("cfg.attn_scale", "-> 3")),
        ("gpt2", set_to(f"blocks.0.attn.{ORIGINAL}.forward", partial(print, end="")), ("forward", "print", "end")),
        ("llama", set_to(f"blocks.0.ln1.{ORIGINAL}.variance_epsilon", 0.1), ("variance_epsilon: 1e-06 -> 0.1",)),
        (
            "llama",
            lambda model: model.original_model.config.rope_parameters.update(rope_theta=500.0),
            (".rope_parameters", "rope_theta: 10000", "rope_theta: 500"),
        ),
        ("llama", lambda model: model.original_model.model.rotary_emb.inv_freq.mul_(2), ("rotary_emb", "inv_freq")),
        ("llama", lambda model: model.original_model.model.rotary_emb.inv_freq.data.mul_(2), ("inv_freq",)),
        (
            "gemma2",
            set_to("original_model.config.sliding_window", 2),
            ("original_model.config.sliding_window: 3 -> 2",),
        ),
        ("gemma2", set_to(f"blocks.0.attn.{ORIGINAL}.sliding_window", 2), ("sliding_window: 3 -> 2",)),
    ],
)
def test_what_is_changed_in_a_bridge_is_named(name, change, words):
    assert_seen(tiny_model(f"bridge/{name}"), change, *words)


def test_what_changes_in_every_layer_is_said_once():
    model = tiny_model("bridge/gpt2")
    before = configuration(model)
    for block in model.blocks:
        inner(block.attn).scaling = 3.0
    [said] = changed(before, configuration(model))
    assert "blocks.*." in said
    assert said.endswith("scaling: 0.5 -> 3 (2 places)")
    assert changed(compact(before), configuration(model)) == [said]
    assert len(compact(before)) < 0.7 * len(before)


def test_what_stands_once_in_a_file_loses_nothing():
    texts = dict.fromkeys(["blocks.0", "blocks.1", "blocks.2", "blocks.0.attn", "blocks.2.attn"], "a class")
    texts |= {"blocks.0.attn.scale": "1", "blocks.2.attn.scale": "1", "blocks.1.extra": "2", "blocks.2.extra": "2"}
    short = compact(texts)
    assert "blocks.*.attn.scale" in short
    assert "blocks.*.extra" not in short
    moved = {place.replace(".2.", ".1."): text for place, text in texts.items()}
    said = ["blocks.1.attn: (not there) -> a class", "blocks.2.attn: a class -> (not there)"]
    for before, after in ((texts, moved), (short, moved), (texts, compact(moved)), (short, compact(moved))):
        assert set(said) <= set(changed(before, after))
    other = {"blocks.0.extra" if place == "blocks.1.extra" else place: text for place, text in texts.items()}
    assert changed(short, compact(other)) == [
        "blocks.0.extra: (not there) -> 2",
        "blocks.1.extra: 2 -> (not there)",
    ]


def test_functions_without_a_name_differ_by_their_code_and_what_they_hold():
    def scaled(factor):
        return lambda z: z * factor

    model = tiny_model("bridge/gpt2")
    layer = inner(model.blocks[0].mlp)
    texts = []
    for function in (scaled(1.0), scaled(1.0), scaled(2.0), lambda z: z - 1):
        layer.forward = function
        texts.append(configuration(model))
    assert changed(texts[0], texts[1]) == []
    assert all(len(changed(texts[0], other)) == 1 for other in texts[2:])


def test_a_module_put_in_the_place_of_another_of_its_class_is_read():
    model = tiny_model("bridge/gpt2")
    before = configuration(model)
    norm = copy.deepcopy(inner(model.blocks[0].ln1))
    norm.eps = 0.5
    model.blocks[0].ln1._modules["_original_component"] = norm
    [said] = changed(before, configuration(model))
    assert said.endswith("eps: 1e-05 -> 0.5")


@pytest.mark.parametrize("name", ["hooked/ln", "bridge/gpt2", "bridge/llama", "bridge/bart", "bridge/whitened"])
@pytest.mark.few(2)
def test_nothing_keeps_the_model_alive(name):
    if name not in model_names():
        pytest.skip("HookedTransformer is gone in TransformerLens 4")
    model = tiny_model(name)
    configuration(model)
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


def test_to_ask_again_costs_little():
    model = tiny_model("bridge/gpt2")
    configuration(model)
    start = time.thread_time()
    for _ in range(20):
        configuration(model)
    assert (time.thread_time() - start) / 20 < 5e-3  # 0.2 ms on a fast machine
