"""Hooks that hold a model's patterns, activation ratios and norm scales fixed.

They are ordinary TransformerLens ``fwd_hooks``, so any workflow can run on the frozen model, including gradients. On
some bridges (BERT, RoBERTa, OPT) `attn.hook_pattern` only observes: a replacement is silently ignored. There the live
`attn.hook_v` is recorded and `attn.hook_z` replaced by pattern @ v, which is exact everywhere. A test run decides which
of the two a layer needs (`patterns_take_effect`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from threading import get_ident
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.algebra import AffineMap, on_device
from tensorlens_tl.algebra.numerics import refuse_autocast
from tensorlens_tl.errors import FrozenModelError
from tensorlens_tl.hooks.points import AttentionPoints, BlockPoints, Ends
from tensorlens_tl.hooks.running import FwdHook, in_this_thread, is_unheld, run
from tensorlens_tl.models import Coefficients

Held = Tensor | Callable[[], Tensor]
"""A held value: a tensor, or a function that computes it again in every run."""


def replace(name: str, value: Held) -> FwdHook:
    """Return a hook that replaces an activation by `value`, or by its result if it is a function.

    It is a pair of name and function, as in ``run_with_hooks(fwd_hooks=[...])``; a batch of 1 serves any batch.

    >>> from tensorlens_tl.hooks import replace
    >>> hook = replace("blocks.0.attn.hook_pattern", frozen.pattern(0))
    >>> torch.allclose(model.run_with_hooks(text, fwd_hooks=[hook]), model(text), atol=1e-3)
    True
    """

    def hook(live: Tensor, *, hook: Any) -> Tensor:
        return _like(_now(value), live, name).expand(live.shape)

    return name, _marked(hook)


def _now(held: Held) -> Tensor:
    return held if isinstance(held, Tensor) else held()


def leave_out(name: str, padding: Tensor) -> FwdHook:
    """Return a hook that keeps padding out of a whitened model's recursion, even in runs without a mask."""

    def hook(live: Tensor, *, hook: Any) -> Tensor:
        return live.masked_fill(_like(padding, live[..., 0], name).bool()[..., None], 0)

    return name, _marked(hook)


def attention_hooks(
    points: AttentionPoints, pattern: Held, takes_effect: bool, beside: Held | None = None
) -> list[FwdHook]:
    """Return hooks that freeze one layer's pattern, at `hook_pattern` if that takes effect, else at `hook_z`.

    `beside` is the pattern for a second call of the value projection, whose contribution is added.
    """
    if takes_effect:
        return [replace(points.pattern, pattern)]
    patterns = [pattern] if beside is None else [pattern, beside]
    values: dict[int, list[Tensor]] = {}  # by thread
    fired: set[str] = set()

    def record(v: Tensor, *, hook: Any) -> None:
        calls = values.setdefault(get_ident(), [])
        if not calls or calls[-1] is not v:
            calls.append(v)
        del calls[: -len(patterns)]
        fired.add(points.value)

    def mix(z: Tensor, *, hook: Any) -> Tensor | None:
        calls = values.pop(get_ident(), [])  # do not keep them: they may hold an autograd graph
        if not calls:
            _check_fired(points.value, fired)
            return None  # a Bridge in compatibility mode calls a hook once for each of its point's names
        if len(calls) < len(patterns):
            raise FrozenModelError(f"{points.value} fired once in this run, but the frozen pattern needs two calls.")
        shares = (_gathered(_now(held), v, points.pattern) for held, v in zip(patterns, calls, strict=True))
        return reduce(torch.add, shares).reshape(z.shape)

    return [(points.value, _marked(record)), (points.z, _marked(mix))]


def _gathered(pattern: Tensor, v: Tensor, name: str) -> Float[Tensor, "batch query kv group d_head"]:
    """Mix values by a held pattern, for every head."""
    held = _like(pattern, v, name, batch_only=True)
    grouped = rearrange(held, "b (kv group) q k -> b kv group q k", kv=v.shape[2])
    return torch.einsum("bcgqk,bkcd->bqcgd", grouped, v)


def mlp_hooks(
    points: BlockPoints, held: Coefficients, after: Tensor | None, choice: Int[Tensor, "token"] | None = None
) -> list[FwdHook]:
    """Return hooks that freeze one layer's activation: ``through·u + gate·g + rest`` of the live pre-activations.

    Args:
        points: the points of an MLP, or inside an expert.
        held: the coefficients; for an expert, `[1, token, d_mlp]` of its tokens.
        after: a term that the model adds to the product (HookedTransformer's gated `b_in`).
        choice: which of each token's choices the expert is; its tokens are packed in this order.
    """
    fitted = _like if choice is None else partial(_packed, choice=choice)
    if points.pre is None or points.post is None:
        return []
    gate_name = points.pre
    through_name = points.pre_linear or points.pre
    recorded = {through_name}
    if held.gate is not None:
        recorded.add(gate_name)
    live: dict[tuple[str, int], Tensor] = {}  # by name and thread
    fired: set[str] = set()

    def record(name: str) -> FwdHook:
        def hook(tensor: Tensor, *, hook: Any) -> None:
            live[name, get_ident()] = tensor
            fired.add(name)

        return name, _marked(hook)

    def post(tensor: Tensor, *, hook: Any) -> Tensor | None:
        u, g = (live.get((name, get_ident())) for name in (through_name, gate_name))
        for name in recorded:
            live.pop((name, get_ident()), None)
        if u is None:
            _check_fired(through_name, fired)
            return None
        out = fitted(held.through, u, through_name) * u
        if held.gate is not None and g is not None:
            out = out + fitted(held.gate, g, gate_name) * g
        if held.rest is not None:
            out = out + fitted(held.rest, out, through_name)
        if after is not None:
            out = out + after.to(out)
        return out.reshape(tensor.shape)

    return [*(record(name) for name in sorted(recorded)), (points.post, _marked(post))]


def whole_hooks(ends: Ends, held: AffineMap, shape: tuple[int, int], *, again: bool = False) -> list[FwdHook]:
    """Return hooks that replace a part's output by the map `held` of its live input.

    `shape` is the pass's batch and positions; with `again`, the end may fire before the beginning (a norm that the
    embeddings go through too).
    """
    live: dict[int, Tensor] = {}  # by thread
    fired: set[str] = set()

    def record(x: Tensor, *, hook: Any) -> None:
        live[get_ident()] = x
        fired.add(ends.into)

    def put(out: Tensor, *, hook: Any) -> Tensor | None:
        x = live.pop(get_ident(), None)
        if x is None:
            if not again:
                _check_fired(ends.into, fired)
            return None
        batch, pos = shape
        fits = x.numel() % (pos * x.shape[-1]) == 0 and (x.ndim != 3 or x.shape[1] == pos)
        if not fits or batch not in (1, x[..., 0].numel() // pos):
            raise FrozenModelError(_other_shape(ends.into, shape, x.shape))
        prompts = x.reshape(-1, pos, x.shape[-1])
        if batch == 1:  # prompts become rows of one prompt's map
            prompts = prompts[:, None]
        return on_device(held, x.device)(prompts).reshape(out.shape).to(out)

    return [(ends.into, _marked(record)), (ends.out, _marked(put))]


def _check_fired(name: str, fired: set[str]) -> None:
    """Raise an error if a recorded point never fired, as the model would silently stay unfrozen."""
    if name not in fired:
        raise FrozenModelError(f"{name} did not fire in this run, so the part that reads it cannot be held fixed.")


def _marked(function: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    """Mark a hook for `tensorlens_tl.hooks.running`, and make it idle in `unheld_run`."""

    def hook(tensor: Tensor, *, hook: Any) -> Tensor | None:
        if is_unheld():
            return None
        refuse_autocast(tensor.device)
        return function(tensor, hook=hook)

    hook.holds_fixed = True  # pyright: ignore[reportFunctionMemberAccess]
    return hook


def patterns_take_effect(model: Any, inputs: Mapping[str, Any], sites: Sequence[AttentionPoints]) -> list[bool]:
    """Return for each layer whether replacing its `hook_pattern` changes `hook_z`: zero patterns give zero z."""
    reached = [False] * len(sites)

    def watch(layer: int) -> FwdHook:
        def hook(z: Tensor, *, hook: Any) -> None:
            reached[layer] = not bool(z.any())

        return sites[layer].z, in_this_thread(hook)

    zeroed = in_this_thread(lambda pattern, hook: torch.zeros_like(pattern))
    hooks: list[FwdHook] = [(site.pattern, zeroed) for site in sites]
    with torch.no_grad():
        run(model, inputs, hooks + [watch(layer) for layer in range(len(sites))])
    return reached


def _like(value: Tensor, live: Tensor, name: str, *, batch_only: bool = False) -> Tensor:
    """Return the captured value on the live tensor's device and dtype; another batch or length raises an error."""
    if live.ndim < value.ndim:  # some bridges flatten batch and position
        batches = 1
        if value.shape[0] == 1:
            batches = live.shape[0] // value.shape[1]
        value = value.flatten(0, 1).repeat(batches, *(1 for _ in value.shape[2:]))
    fits = value.shape[0] in (1, live.shape[0]) and (batch_only or value.shape[1:] == live.shape[1:])
    if not fits or (batch_only and value.shape[-1] != live.shape[1]):
        raise FrozenModelError(_other_shape(name, value.shape, live.shape))
    return value.to(device=live.device, dtype=live.dtype)


def _packed(
    value: Float[Tensor, "1 token d"], live: Float[Tensor, "row d"], name: str, choice: Int[Tensor, "token"]
) -> Float[Tensor, "row d"]:
    """Return an expert's held values in the live order: by choice, then by copy of the prompts."""
    copies, rest = divmod(len(live), len(choice))
    if rest:
        raise FrozenModelError(_other_shape(name, value.shape[1:], live.shape))
    order = [(choice == number).nonzero()[:, 0].repeat(copies) for number in choice.unique()]
    return value[0, torch.cat(order)].to(live)


def _other_shape(name: str, held: Sequence[int], live: Sequence[int]) -> str:
    return (
        f"{name}: the model was frozen at {tuple(held)}, but this run has {tuple(live)}. Run the "
        "frozen model on inputs of the same length, and the same batch (or freeze one prompt, which serves any)."
    )
