"""Checks of one capture before anything is proved of it: each refuses, or warns of, what a proof would not see."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tensorlens_tl.algebra import spectral_radius
from tensorlens_tl.algebra.numerics import relative_error, upcast
from tensorlens_tl.errors import NumericalError, UnsupportedModelError, warn_caller
from tensorlens_tl.hooks import capture as run_and_capture
from tensorlens_tl.models.lifecycle import OncePerWeights
from tensorlens_tl.models.sublayers import ExpertsWeights
from tensorlens_tl.passes.capture import Capture
from tensorlens_tl.passes.proof import check_pattern, looks_ahead


def check_growth(capture: Capture, tolerance: float) -> None:
    """Refuse whitening whose growth over a prompt hides from a proof all but the recursion.

    Raises:
        NumericalError: what a block adds to its later tokens is lost beside what they have of the earlier ones.
    """
    for layer, block in enumerate(capture.view.blocks):
        if block.whitening is None:
            continue
        sizes = [
            torch.linalg.vector_norm(upcast(x[capture.mask]), dim=-1).max()
            for x in (capture.resid_pre(layer) @ block.whitening.entry, capture.resid_read(layer))
        ]
        growth = float(sizes[1] / sizes[0].clamp_min(torch.finfo(sizes[0].dtype).tiny))
        most = max(1 / tolerance, 1e3)
        if growth <= most**0.5 or not bool(torch.isfinite(sizes[0])):  # another check names what is not finite
            continue
        radius = spectral_radius(block.whitening.step)
        what = (
            f"blocks.{layer}.whitening of this {capture.view.description} (spectral radius {radius:.3g}) makes vectors "
            f"{growth:.1e} times larger over this prompt"
        )
        if not growth <= most:
            raise NumericalError(
                f"{what}; what blocks add to them is lost beside that, and no proof could see it. Freeze a shorter "
                "prompt, or train L⁻¹M towards a radius below 1."
            )
        warn_caller(f"{what}; longer prompts will be refused.")


def warn_of_ties(capture: Capture, logits: Mapping[str, Tensor]) -> None:
    """Say where a token's choice of experts is arbitrary: one that is chosen and one that is not count the same."""
    for block, points in zip(capture.view.blocks, capture.points.blocks, strict=True):
        if block.name not in logits or points.index is None or not isinstance(block.mlp, ExpertsWeights):
            continue
        index = capture.activation(points.index).flatten(0, 1)
        count = block.mlp.count
        numbers = logits[block.name].to(index.device).flatten(0, -2)
        if numbers.shape != (len(index), count):
            continue
        chosen = torch.zeros(len(index), count + 1, dtype=torch.bool, device=index.device)
        chosen = chosen.scatter(1, index.clamp_max(count), True)[:, :count]  # some have a choice that is no expert
        least = torch.where(chosen, numbers, torch.inf).amin(1, keepdim=True)
        tied = ((numbers == least) & ~chosen).any(1).unflatten(0, capture.tokens.shape) & capture.mask
        if bool(tied.any()):
            row, pos = tied.nonzero()[0].tolist()
            warn_caller(
                f"{block.name}.mlp of this {capture.view.description}: {int(tied.sum())} tokens (first: prompt {row}, "
                f"position {pos}) are sent to an expert whose router logit equals that of an expert that is left out. "
                "Which of the two is chosen is arbitrary, and may differ on another machine or in another batch.",
            )


_repeats: OncePerWeights[bool] = OncePerWeights()


def check_repeats(capture: Capture, tolerance: float) -> None:
    """Refuse a model that gives another output on the same prompt when it runs again; checked once per model."""
    if capture.other_hooks or _repeats.get(capture.model, capture.weights):
        return
    name = capture.points.last_output
    again, _ = run_and_capture(capture.model, capture.inputs, [name], last=name)
    output = capture.activation(name)
    repeated = again[name].to(output).reshape(output.shape)
    error = relative_error(repeated, output, capture.mask[:, -output.shape[1] :])
    if not error <= tolerance:
        raise UnsupportedModelError(
            f"two runs of this {capture.view.description} on the same prompt differ by {error:.1e} in the last block's "
            "output: something in it is random (dropout that is on in eval mode?). Switch it off."
        )
    _repeats.set(capture.model, capture.weights, True)


def check_shown_patterns(capture: Capture) -> None:
    """Refuse an encoder–decoder that shows something else where its patterns should be.

    TransformerLens gives `hook_pattern` the second output of an attention module that it leaves as it is, which of some
    is the bias of relative positions.
    """
    if capture.sides is None:
        return
    for points in capture.points.blocks:
        pattern = points.pattern and capture.activations.get(points.pattern)
        if isinstance(pattern, Tensor) and bool((pattern < 0).any()):
            raise UnsupportedModelError(
                f"{points.pattern} of this {capture.view.description} has numbers below 0, which are no attention "
                "probabilities: TransformerLens shows something else there, such as the bias of relative positions. "
                "Without its patterns attention cannot be held."
            )


def check_dtype(capture: Capture) -> None:
    """Refuse a state-space model that keeps its stream in float32 beside narrower weights."""
    for layer, block in enumerate(capture.view.blocks):
        stream = capture.resid_pre(layer).dtype
        weights = next(block.module.parameters()).dtype
        if stream == weights or weights not in (torch.float16, torch.bfloat16):
            continue  # nothing is read of weights that are offloaded
        if block.mixer is not None or block.has_beside:
            raise UnsupportedModelError(
                f"{block.name} of this {capture.view.description} reads a residual stream in {stream} with weights in "
                f"{weights} (residual_in_fp32). Load the model in float32."
            )


def check_width(capture: Capture) -> None:
    """Refuse a model whose number of positions differs from the number of tokens."""
    stream = capture.resid_pre(0).shape[:2]
    tokens = capture.tokens.shape
    if stream != tokens:
        raise UnsupportedModelError(
            f"{capture.view.description} makes {stream[1]} positions of {tokens[1]} tokens (virtual tokens of a "
            "prompt or prefix adapter, or a hook?); only models with one position for each token can be frozen."
        )


def _check_capacity(capture: Capture, layer: int) -> None:
    """Refuse padding that fills an expert before a real token that was left out."""
    weights = capture.view.blocks[layer].mlp
    point = capture.points.blocks[layer].weight
    if point is None or not isinstance(weights, ExpertsWeights) or not weights.routing.has_capacity:
        return
    real = capture.prompt.mask[:, slice(*capture.side(layer))]
    is_sent = (capture.activation(point) != 0).any(-1).to(real.device)
    after_padding = (is_sent & ~real).cumsum(1) > 0
    if bool((real & ~is_sent & after_padding).any()):
        raise UnsupportedModelError(
            f"blocks.{layer} of this {capture.view.description}: an expert takes so many tokens of a prompt and no "
            "more, and padding before a token that was left out counts as well: padding changes what the model gives. "
            "Pad on the right, or freeze the prompts one by one."
        )


def check_padding(capture: Capture) -> None:
    """Refuse padding that the model does not handle: weight on padded tokens, or NaN that padding brought."""
    prompt = capture.prompt
    points = capture.points
    if bool(prompt.mask.all()):
        return
    for layer, block in enumerate(points.blocks):
        start, stop = capture.side(layer)
        queries = slice(start, stop)
        spans: dict[str, slice] = {}
        if block.pattern is not None:
            spans[block.pattern] = queries
        if block.cross is not None:
            spans[block.cross.pattern] = slice(0, start)
        for name, keys in spans.items():
            if name in capture.activations:  # a pattern that is recomputed was checked while the model ran
                check_pattern(name, capture.activation(name), prompt.mask[:, queries], prompt.mask[:, keys])
        _check_capacity(capture, layer)
    first = points.blocks[0].pattern
    if first is None or capture.sides is not None:
        return
    ahead = not capture.causal
    if ahead and first in capture.activations:
        ahead = looks_ahead(capture.activation(first), prompt.mask)  # of real queries
    if not ahead:
        return
    # GPT-1's Bridge is bidirectional when it is given a mask, and only then
    # all prompts at their width, so that hooks which know their shape run as well
    without = {name: value for name, value in prompt.kwargs.items() if "attention_mask" not in name}
    alone, _ = run_and_capture(capture.model, without, [first], last=first)
    if prompt.tokens.shape[1] > 1 and not bool(alone[first].triu(1).any()):
        raise UnsupportedModelError(
            f"{first} puts weight on later tokens when the model is given an attention mask, and on none without one: "
            "this model does not handle padding. Freeze the prompts one by one."
        )
