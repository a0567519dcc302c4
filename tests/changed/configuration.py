"""Another configuration, before freezing and after; and what else happens to a model after it was frozen."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from changed.adapters import adapted, merged
from changed.change import add, bridges, gpt2, hooked, rotary, untouched
from changed.hooks import (
    V,
    block_part,
    forward_hook,
    hook,
    mlp_scaled,
    patched,
    plus,
    plus_at,
    unembedding,
    with_bias,
    without_rows,
    zeroed,
)
from changed.weights import HEAD, add_to_stream, inner, is_hooked, scale_matrix, vector

CONFIGURATION = "configuration"


def _attention_scale(model: Any) -> None:
    if is_hooked(model):
        for block in model.blocks:
            block.attn.attn_scale = block.attn.attn_scale * 1.5
        model.cfg.attn_scale *= 1.5
        return
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), float):
            module.scaling *= 0.7
        if isinstance(getattr(module, "scale_attn_weights", None), bool):
            module.scale_attn_weights = False
    model.cfg.attn_scale = (getattr(model.cfg, "attn_scale", None) or HEAD**0.5) * 1.5


def _epsilon(model: Any) -> None:
    model.cfg.eps = 0.5
    for module in model.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(getattr(module, name, None), float):
                with suppress_errors():
                    setattr(module, name, 0.5)


@contextmanager
def suppress_errors() -> Iterator[None]:
    """Some modules show another's epsilon and take none."""
    try:
        yield
    except (AttributeError, TypeError):
        return


def _activation(model: Any) -> None:
    for block in model.blocks:
        for module in block.mlp.modules():
            for name in ("act_fn", "act"):
                if callable(getattr(module, name, None)):
                    new = nn.Tanh()
                    with suppress_errors():
                        setattr(module, name, new)


def _rope(model: Any) -> None:
    for module in model.modules():
        if isinstance(module._buffers.get("inv_freq"), Tensor):
            module._buffers["inv_freq"] = module._buffers["inv_freq"] * 0.5


for stage in ("before", "after"):
    at = {"after": None} if stage == "before" else {"frozen_as": untouched, "asked_as": None}
    for label, edit, takes in (
        ("attention's scale", _attention_scale, lambda name, dtype: True),
        ("epsilon", _epsilon, lambda name, dtype: True),
        ("the activation function", _activation, lambda name, dtype: True),
        ("rotary frequencies", _rope, rotary),
    ):
        fields = {"before": edit} if stage == "before" else {"after": edit, **at}
        add(f"{label} changed {stage} freezing", CONFIGURATION, takes=takes, **fields)
add(
    "use_attn_result and split inputs switched on after freezing",
    CONFIGURATION,
    takes=hooked,
    after=lambda m: (m.set_use_attn_result(True), m.set_use_split_qkv_input(True)),
    frozen_as=untouched,
)


def _dropping(model: Any, train: bool = True) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    if train:
        model.train()
        getattr(model, "original_model", model).train()


add("dropout, in train mode before freezing", CONFIGURATION, before=_dropping, takes=gpt2)
add(
    "dropout, in train mode after freezing",
    CONFIGURATION,
    after=_dropping,
    frozen_as=untouched,
    asked_as=None,
    takes=gpt2,
)
add(
    "dropout that is off in eval mode",
    CONFIGURATION,
    before=partial(_dropping, train=False),
    frozen_as=untouched,
    takes=gpt2,
)


AFTER = "after freezing"
add(
    "a hook put on after freezing",
    AFTER,
    after=hook("blocks.0.hook_resid_pre", plus(V)),
    frozen_as=untouched,
    asked_as=lambda m: add_to_stream(m, V),
)
add(
    "a hook that zeroes a head put on after freezing",
    AFTER,
    after=hook("blocks.0.attn.hook_z", zeroed(2 * HEAD, 3 * HEAD)),
    frozen_as=untouched,
    asked_as=without_rows(0, "o", 2 * HEAD, 3 * HEAD),
)
add(
    "a hook on the first row put on after freezing",
    AFTER,
    of_row=True,
    after=hook("blocks.0.hook_resid_pre", plus_at(V, 0, 3)),
    frozen_as=untouched,
    asked_as=lambda m: add_to_stream(m, V, 3),
)
add(
    "a hook taken off after freezing",
    AFTER,
    before=hook("blocks.0.hook_resid_pre", plus(V)),
    after=lambda m: m.reset_hooks(),
    frozen_as=lambda m: add_to_stream(m, V),
    asked_as=untouched,
)
add(
    "a torch hook on attention put on after freezing",
    AFTER,
    after=forward_hook(block_part(0, "attn"), plus(V)),
    frozen_as=untouched,
    asked_as=with_bias(0, "o", V),
)
add(
    "a torch hook on the unembedding put on after freezing",
    AFTER,
    after=forward_hook(unembedding, plus(vector(48))),
    frozen_as=untouched,
    asked_as=with_bias(None, "unembed", vector(48)),
)
add(
    "an MLP's forward replaced after freezing",
    AFTER,
    after=patched(block_part(1, "mlp"), lambda t: 0.75 * t),
    frozen_as=untouched,
    asked_as=lambda m: mlp_scaled(m, 0.75),
)
add(
    "LoRA put on after freezing",
    AFTER,
    after=adapted([(1, "v"), (1, "o")]),
    takes=bridges,
    frozen_as=untouched,
    asked_as=merged([(1, "v"), (1, "o")]),
)
add(
    "a weight changed in place after freezing",
    AFTER,
    after=lambda m: scale_matrix(m, 1, "o", 1.1),
    frozen_as=untouched,
    asked_as=lambda m: scale_matrix(m, 1, "o", 1.1),
)


def _through_data(model: Any) -> None:
    weight = model.blocks[1].mlp.W_out if is_hooked(model) else inner(model, 1, "out").weight
    weight.data.mul_(1.1)


add(
    "a weight changed through .data after freezing",
    AFTER,
    after=_through_data,
    frozen_as=untouched,
    asked_as=_through_data,
)
add("a weight moved to another tensor after freezing", AFTER, after=lambda m: _moved(m), frozen_as=untouched)
add(
    "cast to float32 after freezing",
    AFTER,
    after=lambda m: m.to(torch.float32) and None,
    frozen_as=untouched,
    asked_as=None,
    takes=lambda name, dtype: dtype != "float32",
)


def _moved(model: Any) -> None:
    home, name = (model.blocks[1].mlp, "W_out") if is_hooked(model) else (inner(model, 1, "out"), "weight")
    setattr(home, name, nn.Parameter(getattr(home, name).detach().clone()))
