"""Hooks of TransformerLens and of torch, and forwards that were replaced."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from changed.change import add, bridges, gated_bridges
from changed.weights import (
    HEAD,
    NEURONS,
    WIDTH,
    add_bias,
    add_to_stream,
    inner,
    is_gated,
    is_hooked,
    matrix,
    scale_matrix,
    set_matrix,
    vector,
    wrapper,
)


def hook(point: str, edit: Callable[[Tensor], Tensor | None]) -> Callable[[Any], Any]:
    """A hook put on a model for good."""

    def put(model: Any) -> None:
        def act(tensor: Tensor, hook: Any) -> Tensor:
            tensor = tensor.clone()
            new = edit(tensor)
            return tensor if new is None else new

        model.add_hook(point, act)

    return put


def plus(added: Tensor) -> Callable[[Tensor], Tensor]:
    """A vector at every position of every row, heads side by side or not."""
    return lambda t: (t.flatten(2) + added.to(t)).view_as(t)


def plus_at(added: Tensor, row: int | slice, position: int) -> Callable[[Tensor], None]:
    """``t[row, position] += vector``, as people write it; a prompt that ends before is left as it is."""

    def edit(t: Tensor) -> None:
        if position < t.shape[1]:
            t[row, position] += added.to(t)

    return edit


def zeroed(start: int, stop: int) -> Callable[[Tensor], Tensor]:
    """Some of the channels, heads side by side, are zero."""

    def edit(t: Tensor) -> Tensor:
        flat = t.flatten(2).clone()
        flat[..., start:stop] = 0
        return flat.view_as(t)

    return edit


def without_rows(layer: int, part: str, start: int, stop: int) -> Callable[[Any], None]:
    """The equivalent: these rows of a weight are zero."""

    def edit(model: Any) -> None:
        weight = matrix(model, layer, part)
        weight[start:stop] = 0
        set_matrix(model, layer, part, weight)

    return edit


def with_bias(layer: int | None, part: str, added: Tensor) -> Callable[[Any], None]:
    """The equivalent: a bias has this besides."""
    return lambda model: add_bias(model, layer, part, added)


V = vector(WIDTH)
HOOKS = "TransformerLens' hooks"
SPREAD = "method decompx"
"""What spreads every constant by itself: the equivalent has one bias for two."""
BESIDE = f"{SPREAD}|ff_against|gain_against|flow_edges|eature"
"""And what asks about the MLP's output alone: in the equivalent, what a hook adds after it is a part of that."""
add(
    "a hook adds a vector to the first block's input",
    HOOKS,
    before=hook("blocks.0.hook_resid_pre", plus(V)),
    frozen_as=lambda m: add_to_stream(m, V),
)
add(
    "a hook adds a vector between blocks",
    HOOKS,
    unlike=BESIDE,
    before=hook("blocks.1.hook_resid_pre", plus(V)),
    frozen_as=with_bias(0, "out", V),
)
add(
    "a hook adds a vector to the last block's output",
    HOOKS,
    unlike=BESIDE,
    before=hook("blocks.1.hook_resid_post", plus(V)),
    frozen_as=with_bias(1, "out", V),
)
add(
    "a hook adds a vector to hook_attn_out",
    HOOKS,
    unlike=SPREAD,
    before=hook("blocks.0.hook_attn_out", plus(V)),
    frozen_as=with_bias(0, "o", V),
)
add(
    "a hook adds a vector to hook_mlp_out",
    HOOKS,
    unlike=SPREAD,
    before=hook("blocks.0.hook_mlp_out", plus(V)),
    frozen_as=with_bias(0, "out", V),
)
for letter in "qkv":
    add(
        f"a hook adds a vector to hook_{letter}",
        HOOKS,
        before=(
            lambda m, letter=letter: hook(
                f"blocks.1.attn.hook_{letter}", plus(vector(m.cfg.d_head * _heads(m, letter)))
            )(m)
        ),
        frozen_as=lambda m, letter=letter: add_bias(m, 1, letter, vector(m.cfg.d_head * _heads(m, letter))),
    )
add("a hook adds a vector to hook_z", HOOKS, before=hook("blocks.1.attn.hook_z", plus(V)))
add(
    "a hook adds a vector to mlp.hook_pre (a gate's, where there is one)",
    HOOKS,
    before=hook("blocks.1.mlp.hook_pre", plus(vector(NEURONS))),
    frozen_as=lambda m: add_bias(m, 1, "gate" if is_gated(m) else "in", vector(NEURONS)),
)
add("a hook adds a vector to mlp.hook_post", HOOKS, before=hook("blocks.1.mlp.hook_post", plus(vector(NEURONS))))
add(
    "a hook zeroes a head",
    HOOKS,
    before=hook("blocks.0.attn.hook_z", zeroed(2 * HEAD, 3 * HEAD)),
    frozen_as=without_rows(0, "o", 2 * HEAD, 3 * HEAD),
)
add(
    "a hook zeroes four neurons",
    HOOKS,
    before=hook("blocks.1.mlp.hook_post", zeroed(3, 7)),
    frozen_as=without_rows(1, "out", 3, 7),
)


def _blurred(pattern: Tensor) -> Tensor:
    new = pattern.square()
    return new / new.sum(-1, keepdim=True)


def _scores_moved(scores: Tensor) -> None:
    scores[..., 0] -= 1.0


add("a hook sharpens a pattern", HOOKS, before=hook("blocks.0.attn.hook_pattern", _blurred))
add("a hook adds to attention scores", HOOKS, before=hook("blocks.0.attn.hook_attn_scores", _scores_moved))
add("a hook scales a norm's denominator", HOOKS, before=hook("blocks.0.ln1.hook_scale", lambda t: 1.25 * t))
add("a hook scales the final norm's denominator", HOOKS, before=hook("ln_final.hook_scale", lambda t: 1.25 * t))
add(
    "a hook adds a vector at one position: t[:, 3] += v",
    HOOKS,
    before=hook("blocks.0.hook_resid_pre", plus_at(V, slice(None), 3)),
    frozen_as=lambda m: add_to_stream(m, V, 3),
)
add(
    "a hook acts on the first row: t[0, 3] += v",
    HOOKS,
    of_row=True,
    before=hook("blocks.0.hook_resid_pre", plus_at(V, 0, 3)),
    frozen_as=lambda m: add_to_stream(m, V, 3),
)
add(
    "a hook on the first row between blocks: t[0, 3] += v",
    HOOKS,
    of_row=True,
    before=hook("blocks.1.hook_resid_pre", plus_at(V, 0, 3)),
)
add(
    "a hook on the last row: t[-1, 3] += v",
    HOOKS,
    of_row=True,
    before=hook("blocks.0.hook_resid_pre", plus_at(V, -1, 3)),
    frozen_as=lambda m: add_to_stream(m, V, 3),
)
add(
    "a hook changes the logits",
    HOOKS,
    before=hook("unembed.hook_out", plus(vector(48))),
    frozen_as=with_bias(None, "unembed", vector(48)),
)
add(
    "a hook changes the logits at one position",
    HOOKS,
    before=hook("unembed.hook_out", plus_at(vector(48), slice(None), 2)),
)


def _heads(model: Any, letter: str) -> int:
    return (getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads) if letter in "kv" else model.cfg.n_heads


TORCH = "torch's hooks and replaced forwards"


def first(output: Any, edit: Callable[[Tensor], Tensor]) -> Any:
    """Edit a module's output, or the first of several."""
    return (edit(output[0]), *output[1:]) if isinstance(output, tuple) else edit(output)


def forward_hook(find: Callable[[Any], Any], edit: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """A torch forward hook on a module."""
    return lambda m: find(m).register_forward_hook(lambda _, __, output: first(output, edit)) and None


def block_part(layer: int, name: str) -> Callable[[Any], Any]:
    """A block's attn or mlp."""
    return lambda m: getattr(m.blocks[layer], name)


def edited(edit: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor]:
    """On a copy, as a hook returns one."""

    def act(t: Tensor) -> Tensor:
        t = t.clone()
        new = edit(t)
        return t if new is None else new

    return act


add(
    "a torch hook on the attention module",
    TORCH,
    before=forward_hook(block_part(0, "attn"), plus(V)),
    frozen_as=with_bias(0, "o", V),
)
add(
    "a torch hook on the MLP module",
    TORCH,
    before=forward_hook(block_part(1, "mlp"), plus(V)),
    frozen_as=with_bias(1, "out", V),
)
add(
    "a torch hook on the attention module, at one position",
    TORCH,
    before=forward_hook(block_part(0, "attn"), edited(plus_at(V, slice(None), 3))),
)


def _mlp_pre_hook(model: Any) -> None:
    def act(_: Any, args: tuple[Any, ...]) -> Any:
        return (args[0] + V.to(args[0]), *args[1:])

    model.blocks[1].mlp.register_forward_pre_hook(act)


def _mlp_reads_more(model: Any) -> None:
    for part in ("in", "gate") if is_gated(model) else ("in",):
        add_bias(model, 1, part, V.to(matrix(model, 1, part)) @ matrix(model, 1, part))


add("a torch pre-hook on the MLP module", TORCH, before=_mlp_pre_hook, frozen_as=_mlp_reads_more)
for part in ("q", "v", "o", "out"):
    add(
        f"a torch hook on the linear of {part}",
        TORCH,
        takes=bridges,
        before=lambda m, part=part: forward_hook(lambda m: inner(m, 1, part), plus(_for(m, part)))(m),
        frozen_as=lambda m, part=part: add_bias(m, 1, part, _for(m, part)),
    )
add(
    "a torch hook on a gate's linear",
    TORCH,
    takes=gated_bridges,
    before=forward_hook(lambda m: inner(m, 1, "gate"), plus(vector(NEURONS))),
    frozen_as=with_bias(1, "gate", vector(NEURONS)),
)


def _for(model: Any, part: str) -> Tensor:
    return vector(matrix(model, 1, part).shape[1])


def unembedding(model: Any) -> Any:
    """The module of the unembedding."""
    return model.unembed if is_hooked(model) else wrapper(model, None, "unembed")


add(
    "a torch hook on the unembedding",
    TORCH,
    before=forward_hook(unembedding, plus(vector(48))),
    frozen_as=with_bias(None, "unembed", vector(48)),
)


def _late_at_one_position(t: Tensor) -> Tensor:
    """Positions are counted from the first, and in a run that unembeds some alone the position is not there."""
    if t.shape[1] > 2:
        t = t.clone()
        t[:, 2] += vector(48).to(t)
    return t


add("a torch hook on the unembedding, at one position", TORCH, before=forward_hook(unembedding, _late_at_one_position))


def patched(find: Callable[[Any], Any], edit: Callable[[Tensor], Tensor]) -> Callable[[Any], None]:
    """A module whose forward was replaced."""

    def put(model: Any) -> None:
        module = find(model)
        own = module.forward
        # a Bridge's component hands what is set on it to what it wraps
        object.__setattr__(module, "forward", lambda *args, **options: first(own(*args, **options), edit))

    return put


add(
    "an attention's forward replaced",
    TORCH,
    before=patched(block_part(0, "attn"), plus(V)),
    frozen_as=with_bias(0, "o", V),
)
add(
    "an MLP's forward replaced",
    TORCH,
    before=patched(block_part(1, "mlp"), lambda t: 0.75 * t),
    frozen_as=lambda m: mlp_scaled(m, 0.75),
)


@torch.no_grad()
def mlp_scaled(model: Any, factor: float) -> None:
    scale_matrix(model, 1, "out", factor)
    bias = model.blocks[1].mlp.b_out if is_hooked(model) else inner(model, 1, "out").bias
    if bias is not None:
        bias.mul_(factor)
