"""Vectors of every source token taken through the whole model, with biases spread over them stage by stage.

The operator leaves all biases in one term. DecompX (Modarressi et al. 2023) instead distributes every bias, where it is
added, over the source tokens in proportion to some affinity with their vectors at that stage. A frozen map is a chain
of stages, each with its own bias, so this is a walk along the chain, whatever the stages are.

Attention's bias (pattern·b_V·W_O + b_O) is spread after the residual connection, as in the original. Memory is the
vectors themselves plus one chunk: attention works on a few source tokens at a time, everything else on a few queries.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tensorlens_tl.algebra.maps import ZERO, AffineMap
from tensorlens_tl.algebra.segments import Segment
from tensorlens_tl.errors import InvalidInputError

BiasRule = Literal["absdot", "norm", "equal", "abssim", "dot", "cls", "token", "none"]
BIAS_RULES: tuple[BiasRule, ...] = get_args(BiasRule)

CHUNK_BUDGET = 48 * 2**20
"""Default number of bytes that a chunk may take in addition to the vectors themselves."""

_AFFINITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "absdot": lambda v, b: (v * b).sum(-1).abs(),
    "dot": lambda v, b: (v * b).sum(-1),
    "norm": lambda v, b: v.norm(dim=-1),
    "abssim": lambda v, b: torch.cosine_similarity(v, b.expand_as(v), dim=-1).abs(),
    "equal": lambda v, b: v.new_ones(v.shape[:-1]),
}


@dataclass(frozen=True, eq=False)
class Spread:
    """A rule that distributes a bias over source vectors.

    Attributes:
        rule: `"absdot"` |v·b|, `"dot"` v·b, `"norm"` ‖v‖, `"abssim"` |cos(v, b)|, `"equal"`, `"cls"` (all to the first
            real token), `"token"` (all to one extra source, the last row), `"none"` (dropped).
        reach: `[key, batch, query]`, True where source token `key` can reach `query`; only such tokens get a share.
        first: each prompt's first real token, `[batch]`.
        budget: bytes that a chunk may take.
    """

    rule: BiasRule
    reach: Bool[Tensor, "key batch query"]
    first: Tensor
    budget: int = CHUNK_BUDGET

    def add_everywhere(self, vectors: Tensor, bias: Tensor) -> Tensor:
        """Add their shares of a bias to all vectors in place, a few queries at a time."""
        if bias is ZERO or self.rule == "none":
            return vectors
        rows, batch, pos, width = vectors.shape
        bias = bias.expand(batch, pos, width)
        step = self.step(3 * rows * batch * width * vectors.element_size(), pos)
        for start in range(0, pos, step):
            queries = slice(start, start + step)
            vectors[:, :, queries] = self.add(vectors[:, :, queries], bias[:, queries], slice(None), queries)
        return vectors

    def step(self, bytes_per_item: int, most: int) -> int:
        """Return the items per chunk, with at least four chunks so that a causal model's empty triangle is skipped."""
        return max(1, min(self.budget // max(bytes_per_item, 1), -(-most // 4)))

    def add(self, vectors: Tensor, bias: Tensor, rows: slice, queries: slice) -> Tensor:
        """Return vectors `[rows, batch, queries, d]` plus their shares of a bias."""
        if bias is ZERO or self.rule == "none":
            return vectors
        if bias.ndim == 1:
            bias = bias.expand(*vectors.shape[1:])
        if self.rule == "token":
            vectors[-1] += bias
            return vectors
        reach = self.reach[rows, :, queries]
        if self.rule == "cls":
            keys = torch.arange(len(self.reach), device=reach.device)[rows, None]
            weights = (keys == self.first).to(vectors.dtype)[..., None].expand_as(reach)
        else:
            reach = reach.to(vectors.dtype)
            weights = _AFFINITIES[self.rule](vectors, bias) * reach
            total = weights.sum(0, keepdim=True)
            even = reach / reach.sum(0, keepdim=True).clamp_min(1)
            weights = torch.where(total == 0, even, weights / torch.where(total == 0, 1, total))
        return vectors + weights[..., None] * bias


def check_bias_rule(rule: str) -> BiasRule:
    """Return the rule, or raise `InvalidInputError` if it is not one of `BIAS_RULES`."""
    for known in BIAS_RULES:
        if rule == known:
            return known
    raise InvalidInputError(f"bias={rule!r} is not a rule; use one of {', '.join(map(repr, BIAS_RULES))}.")


def walk(m: AffineMap, vectors: Tensor, spread: Spread, *, causal: bool, width: int) -> Tensor:
    """Take source vectors through a map, spreading each bias where it is added.

    Args:
        m: any map: a block, a norm, a prediction head, or a chain of them.
        vectors: `[key, batch, query, d]`, changed in place if the width stays the same.
        causal: whether source token k is zero before query k, so that the empty triangle can be skipped.
        width: how many numbers one vector takes while it goes through a stage, which sizes the chunks.
    """
    for stage in m.steps:
        if isinstance(stage, Segment) and not stage.only:
            inside = slice(stage.start, stage.stop)
            within = replace(spread, reach=spread.reach[:, :, inside])
            vectors[:, :, inside] = walk(stage.inner, vectors[:, :, inside], within, causal=False, width=width)
        elif stage.mixes:
            vectors = _mixing(stage, vectors, spread, causal, width)
        else:
            vectors = _positionwise(stage, vectors, spread, causal, width)
    return vectors


def _mixing(stage: AffineMap, vectors: Tensor, spread: Spread, causal: bool, width: int) -> Tensor:
    """A step that mixes positions, with or without a residual connection and a parallel MLP.

    Apart from biases, source tokens are independent, so a few of them go through at a time.
    """
    mixing = [term for term in stage.summands if term.mixes]
    residual = any(term.is_identity for term in stage.summands)
    beside = [term for term in stage.summands if not term.mixes and not term.is_identity]
    before = vectors
    out: Tensor | None = None
    if beside:
        before = vectors.clone()
    if residual:
        out = vectors
    batch, pos = vectors.shape[1:3]
    step = spread.step(batch * pos * width * vectors.element_size(), pos)
    for start in range(0, len(vectors), step):
        rows = slice(start, start + step)
        live = slice(0, None)
        has_extra = spread.rule == "token" and rows.stop >= len(vectors)  # a source that reaches every query
        if causal and start < pos and not has_extra:
            live = slice(start, None)
        outputs = [branch.at(live).push(before[rows, :, live]) for branch in mixing]
        added = sum(outputs[1:], start=outputs[0])
        if out is None:
            out = vectors.new_zeros(*vectors.shape[:3], added.shape[-1])
        out[rows, :, live] += added
    assert out is not None
    for branch in beside:
        read = before if branch is beside[-1] else before.clone()  # a walk overwrites its vectors
        out += walk(branch, read, spread, causal=causal, width=width)
    for branch in mixing:
        out = spread.add_everywhere(out, branch.bias)
    return out


def _positionwise(stage: AffineMap, vectors: Tensor, spread: Spread, causal: bool, width: int) -> Tensor:
    """A step that does not mix positions, such as a norm, a residual MLP or a linear map: queries are independent."""
    rows, batch, pos = vectors.shape[:3]
    step = spread.step(rows * batch * width * vectors.element_size(), pos)
    result = vectors
    for start in range(0, pos, step):
        queries = slice(start, min(start + step, pos))
        live = slice(0, None)
        if causal and spread.rule != "token":
            live = slice(0, queries.stop)
        add = partial(spread.add, rows=live, queries=queries)
        output = stage.at(queries).push_adding(vectors[live, :, queries], add)
        if output.shape[-1] != result.shape[-1]:  # the width changes: not possible in place
            result = vectors.new_zeros(*vectors.shape[:3], output.shape[-1])
        result[live, :, queries] = output
    return result


def source_vectors(x: Float[Tensor, "batch pos d"], extra: bool) -> Float[Tensor, "key batch pos d"]:
    """Row j holds x_j at position j and zero elsewhere; `extra` adds one zero row for a bias token."""
    batch, pos, width = x.shape
    vectors = x.new_zeros(pos + extra, batch, pos, width)
    index = torch.arange(pos, device=x.device)
    vectors[index, :, index] = x.transpose(0, 1)
    return vectors
