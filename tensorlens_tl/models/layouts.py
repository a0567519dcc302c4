"""How blocks are put together: every known layout as data, and the one function that composes it.

A sublayer f (attention or MLP) sits between up to three norms: *before* it reads the residual stream,
*after* it before it is added back, and *outer*, around the sum. A sequential block is
``outer·(1 + after·f·before)`` for attention and then for the MLP; a parallel block adds both branches to
the same stream. Candidates for a block are the layouts that use exactly the norms it has; which of them
it is, is decided by the proof (`tensorlens_tl.passes.proof`), never by the model's name.

| layout | chain (right to left) | seen in |
| --- | --- | --- |
| pre | (1 + MLP·N2)(1 + Attn·N1) | GPT-2, Llama, OPT, Qwen |
| post | N2 (1 + MLP) N1 (1 + Attn) | BERT, RoBERTa |
| parallel | 1 + Attn·N1 + MLP·N2 (N1 may be N2) | NeoX/Pythia, Phi, GPT-J |
| sandwich | (1 + N2'·MLP·N2)(1 + N1'·Attn·N1) | Gemma 2/3 |
| post-only | (1 + N2·MLP)(1 + N1·Attn) | OLMo 2 |

Attention-only blocks are the attention half of any of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tensorlens_tl.algebra import AffineMap, Chain, Identity, Norm, Sum


@dataclass(frozen=True)
class Place:
    """The norms around one sublayer, by name."""

    before: str | None = None
    after: str | None = None
    outer: str | None = None

    @property
    def names(self) -> set[str]:
        """The norms it uses."""
        return {name for name in (self.before, self.after, self.outer) if name}


@dataclass(frozen=True)
class Layout:
    """One way to put a block together."""

    name: str
    attn: Place
    mlp: Place
    parallel: bool = False

    def norm_names(self, has_mlp: bool) -> set[str]:
        """The norms the whole block uses."""
        return self.attn.names | (self.mlp.names if has_mlp else set())


LAYOUTS: tuple[Layout, ...] = (
    Layout("pre", Place(before="ln1"), Place(before="ln2")),
    Layout("parallel", Place(before="ln1"), Place(before="ln2"), parallel=True),
    Layout("parallel", Place(before="ln1"), Place(before="ln1"), parallel=True),
    Layout("post", Place(outer="ln1"), Place(outer="ln2")),
    Layout("post-only", Place(after="ln1"), Place(after="ln2")),
    Layout("post-only", Place(after="ln1_post"), Place(after="ln2_post")),
    Layout("sandwich", Place(before="ln1", after="ln1_post"), Place(before="ln2", after="ln2_post")),
    Layout("pre", Place(), Place()),
    Layout("pre", Place(), Place(before="ln2")),
    Layout("parallel", Place(), Place(), parallel=True),
)
"""Every known layout."""


def candidates(norms: set[str], has_mlp: bool) -> list[Layout]:
    """The layouts that use exactly these norms; without an MLP, parallel and sequential are the same thing."""
    return [layout for layout in LAYOUTS if layout.norm_names(has_mlp) == norms and (has_mlp or not layout.parallel)]


def compose(
    layout: Layout,
    attention: AffineMap | None,
    mlp: AffineMap | None,
    norms: Mapping[str, Norm],
    whitening: Chain | None = None,
) -> AffineMap:
    """The block's map from its parts; a sublayer that is None is left out with its branch.

    The outer norm of a left-out sublayer stays: it is part of the stream, not of the branch.
    """

    def branch(place: Place, sublayer: AffineMap) -> AffineMap:
        parts = (norms[place.before] if place.before else None, sublayer, norms[place.after] if place.after else None)
        stages = [part for part in parts if part is not None]
        return stages[0] if len(stages) == 1 else Chain(tuple(stages))

    halves = [(place, sub) for place, sub in ((layout.attn, attention), (layout.mlp, mlp))]
    stages: list[AffineMap] = [] if whitening is None else [*whitening.stages]
    if layout.parallel:
        both = Sum((Identity(), *(branch(place, sub) for place, sub in halves if sub is not None)))
        return Chain((*stages, both)) if stages else both
    for place, sub in halves:
        if sub is not None:
            stages.append(Sum((Identity(), branch(place, sub))))
        if place.outer is not None and place.outer in norms:
            stages.append(norms[place.outer])
    return stages[0] if len(stages) == 1 else Chain(tuple(stages) or (Identity(),))
