"""The conformance battery: what any method, ours or yours, must hold on any model.

>>> from tensorlens_tl.testing import check_method, tiny_model
>>> check_method("globenc", tiny_model("bridge/gpt2"))
>>> print(check_method("globenc", tiny_model("bridge/neox"))[:18])
globenc: undefined
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensorlens_tl.attribution import Attribution
from tensorlens_tl.errors import NumericalError, UnsupportedModelError
from tensorlens_tl.freezing import freeze
from tensorlens_tl.frozen import FrozenPass
from tensorlens_tl.registry import attribute

LENGTH, SHORT = 6, 4


def check_method(
    name: str, model: Any, *, options: dict[str, Any] | None = None, tolerance: float = 1e-9, seed: int = 0
) -> str | None:
    """Put a registered method through everything that a result of this library promises.

    The same result twice, for a prompt alone as in its batch, padding that takes nothing and changes nothing, no score
    ahead of the query on causal models, declared additivity, saving and loading, and a model without hooks afterwards.

    Args:
        name: a registered method.
        model: a small model, best in float64.
        options: the method's options (a target, where it needs one).
        tolerance: largest relative difference; 1e-6 where the model's own norms compute in float32.
        seed: of the random tokens.

    Returns:
        None if everything holds; the method's own words if it refuses the model (`UnsupportedModelError`).

    Raises:
        AssertionError: naming what does not hold.
    """
    options = options or {}
    before = _hooks(model)
    tokens = torch.randint(3, model.cfg.d_vocab, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    frozen = freeze(model, tokens)
    try:
        result = attribute(frozen, method=name, **options)
    except UnsupportedModelError as refusal:
        assert _hooks(model) == before, f"{name}: hooks are left on the model after a refusal."
        return str(refusal)
    check_attribution(result, frozen, tolerance=tolerance)
    again = attribute(frozen, method=name, **options)
    assert torch.equal(result.scores, again.scores), f"{name}: two runs on one pass differ."
    for row in range(2):
        alone = attribute(freeze(model, tokens[row : row + 1]), method=name, **options)
        _same(result.scores[row], alone.scores[0], tolerance, f"{name}: a batch differs from its prompts one by one")
    _check_padding(name, model, tokens, options, tolerance)
    assert _hooks(model) == before, f"{name}: hooks are left on the model."
    return None


def check_attribution(result: Attribution, frozen: FrozenPass, *, tolerance: float = 1e-9) -> None:
    """What every Attribution of a pass must hold: shapes, finite scores, padding, causality, additivity, files.

    Raises:
        AssertionError: naming what does not hold.
    """
    name = result.method
    assert isinstance(result, Attribution), f"{name}: returns {type(result).__name__}, not an Attribution."
    sizes = dict(zip(result.axes, result.scores.shape, strict=True))
    assert {"batch", "query", "key"} <= set(sizes), f"{name}: axes {result.axes} lack batch, query or key."
    batch, keys = result.mask.shape
    assert sizes["batch"] == batch == len(frozen.tokens), f"{name}: batch axis of {sizes['batch']} for {batch} prompts."
    assert sizes["key"] == keys == len(result.tokens[0]), f"{name}: key axis of {sizes['key']} for {keys} tokens."
    assert result.queries.shape == (batch, sizes["query"]), f"{name}: queries {tuple(result.queries.shape)} do not fit."
    assert bool(torch.isfinite(result.scores).all()), f"{name}: scores that are not finite."

    scores = _pairs_first(result)
    real_query = torch.take_along_dim(result.mask, result.queries, dim=1)
    padded = ~(real_query[:, :, None] & result.mask[:, None, :])
    assert not bool(scores[padded].any()), f"{name}: padding gives or receives scores."
    if frozen.causal:
        ahead = torch.arange(frozen.tokens.shape[1])[None, None] > result.queries[..., None]
        assert not bool(scores[:, :, : ahead.shape[2]][ahead].any()), f"{name}: scores ahead of the query."
    if result.additive:
        assert result.bias is not None, f"{name}: additive, but without a bias."
        assert result.total is not None, f"{name}: additive, but without a total."
        off = (result.scores.sum(-1) + result.bias - result.total).abs()
        size = result.scores.abs().sum(-1) + result.bias.abs()
        worst = float((off / size.clamp_min(1e-30)).max())
        assert worst <= tolerance, f"{name}: declared additive, but off by {worst:.1e}."
    with tempfile.TemporaryDirectory() as folder:
        loaded = Attribution.load(result.save(Path(folder) / "result"))
    assert torch.equal(loaded.scores, result.scores.cpu()), f"{name}: saving and loading changes the scores."


def _check_padding(name: str, model: Any, tokens: Tensor, options: dict[str, Any], tolerance: float) -> None:
    """The second prompt cut short and padded on the right must be what it is alone."""
    mask = torch.ones_like(tokens)
    mask[1, SHORT:] = 0
    try:
        frozen = freeze(model, torch.where(mask.bool(), tokens, 0), attention_mask=mask)
    except (UnsupportedModelError, NumericalError):
        return  # the model itself does not handle padding
    padded = attribute(frozen, method=name, **options)
    check_attribution(padded, frozen, tolerance=tolerance)
    alone = attribute(freeze(model, tokens[1:, :SHORT]), method=name, **options)
    real = frozen.mask[1]
    mine, theirs = _pairs_first(padded)[1], _pairs_first(alone)[0]
    if len(mine) == LENGTH:
        mine = mine[real]
    extra = mine.shape[1] - LENGTH  # a source that is no token, such as a bias
    mine = torch.cat([mine[:, :LENGTH][:, real], mine[:, LENGTH:]], dim=1) if extra else mine[:, real]
    _same(mine, theirs, tolerance, f"{name}: padding changes the scores")


def _pairs_first(result: Attribution) -> Tensor:
    """Scores with batch, query and key in front of any other axis."""
    order = [result.axes.index(axis) for axis in ("batch", "query", "key")]
    rest = [axis for axis in range(result.scores.ndim) if axis not in order]
    return result.scores.permute(*order, *rest)


def _same(mine: Tensor, theirs: Tensor, tolerance: float, what: str) -> None:
    difference = float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30))
    assert difference <= 10 * tolerance, f"{what} (relative difference {difference:.1e})."


def _hooks(model: Any) -> int:
    points = {id(point): point for point in model.hook_dict.values()}.values()
    return sum(len(point.fwd_hooks) + len(point.bwd_hooks) for point in points)
