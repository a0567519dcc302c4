"""How blocks are put together: every known layout as data, and one function that composes a block from it.

A sublayer f (attention or MLP) has up to three norms: *before*, between the residual stream and its input; *after*,
between its output and the addition to the stream; and *outer*, around the sum. A sequential block is
``outer·(1 + after·f·before)`` for attention and then for the MLP; a parallel block adds both branches to the same
stream. Candidate layouts for a block are those that use exactly the norms it has. The block proof
(`tensorlens_tl.passes.proof`), never the model's name, decides between them.

| layout | chain (right to left) | seen in |
| --- | --- | --- |
| pre | (1 + MLP·N2)(1 + Attn·N1) | GPT-2, Llama, OPT, Qwen |
| post | N2 (1 + MLP) N1 (1 + Attn) | BERT, RoBERTa |
| parallel | 1 + Attn·N1 + MLP·N2 (N1 may be N2) | NeoX/Pythia, Phi, GPT-J |
| sandwich | (1 + N2'·MLP·N2)(1 + N1'·Attn·N1) | Gemma 2/3 |
| post-only | (1 + N2·MLP)(1 + N1·Attn) | OLMo 2 |

Attention-only blocks are the attention half of any of these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorlens_tl.algebra import AffineMap, Chain, Identity, Segment, Sum


@dataclass(frozen=True)
class Place:
    """The names of the norms around one sublayer."""

    before: str | None = None
    after: str | None = None
    outer: str | None = None

    @property
    def names(self) -> set[str]:
        """The norms in use."""
        return {name for name in (self.before, self.after, self.outer) if name}


@dataclass(frozen=True)
class Layout:
    """A way to put a block together."""

    name: str
    attn: Place
    mlp: Place
    parallel: bool = False
    cross: Place | None = None

    def norm_names(self, has_mlp: bool) -> set[str]:
        """Return the norms of the whole block."""
        cross = set() if self.cross is None else self.cross.names
        return self.attn.names | cross | (self.mlp.names if has_mlp else set())


LAYOUTS: tuple[Layout, ...] = (
    Layout("pre", Place(before="ln1"), Place(before="ln2")),
    Layout("parallel", Place(before="ln1"), Place(before="ln2"), parallel=True),
    Layout("parallel", Place(before="ln1"), Place(before="ln1"), parallel=True),
    Layout("post", Place(outer="ln1"), Place(outer="ln2")),
    Layout("post-only", Place(after="ln1"), Place(after="ln2")),
    Layout("post-only", Place(after="ln1_post"), Place(after="ln2_post")),
    Layout("sandwich", Place(before="ln1", after="ln1_post"), Place(before="ln2", after="ln2_post")),
    Layout("sandwich", Place(before="ln1", after="ln1_post"), Place(after="ln2_post")),
    Layout("pre", Place(), Place()),
    Layout("pre", Place(), Place(before="ln2")),
    Layout("pre", Place(before="norm"), Place()),
    Layout("pre", Place(), Place(before="norm")),
    Layout("parallel", Place(), Place(), parallel=True),
    Layout("pre", Place(before="ln1"), Place(before="ln3"), cross=Place(before="ln2")),
    Layout("post", Place(outer="ln1"), Place(outer="ln3"), cross=Place(outer="ln2")),
    Layout(
        "sandwich",
        Place(before="ln1", after="ln1_post"),
        Place(before="ln3", after="ln3_post"),
        cross=Place(before="ln2", after="ln2_post"),
    ),
    Layout(  # self- and cross-attention share one softmax, and one norm follows their sum
        "sandwich",
        Place(before="ln1", after="ln1_post"),
        Place(before="ln2", after="ln2_post"),
        cross=Place(after="ln1_post"),
    ),
)
"""Every known layout."""


@dataclass(frozen=True, eq=False)
class Within:
    """The positions `start:stop` of `length` on which a block of an encoder–decoder acts.

    For a decoder block, `read` maps to the input of cross-attention at each of them, and `out` from its output.
    """

    start: int
    stop: int
    length: int
    read: AffineMap | None = None
    out: AffineMap | None = None

    def __call__(self, inner: AffineMap, *, only: bool = False) -> AffineMap:
        """Extend a map of this side's positions to all positions."""
        return Segment(inner, self.start, self.stop, self.length, only)


def candidates(norms: set[str], has_mlp: bool, has_cross: bool = False) -> list[Layout]:
    """Return the layouts that use exactly these norms; without an MLP, parallel and sequential coincide."""
    return [
        layout
        for layout in LAYOUTS
        if layout.norm_names(has_mlp) == norms
        and (has_mlp or not layout.parallel)
        and (layout.cross is not None) == has_cross
    ]


def compose(
    layout: Layout,
    attention: AffineMap | None,
    mlp: AffineMap | None,
    norms: Mapping[str, AffineMap],
    whitening: Chain | None = None,
    within: Within | None = None,
    beside: AffineMap | None = None,
    middle: Sequence[AffineMap] = (),
    late: Sequence[AffineMap] = (),
) -> AffineMap:
    """Compose a block's map from its parts; a sublayer that is None is omitted with its branch, but not its outer norm.

    A mixer `beside` attention has the same input and output. The stream passes `middle` after attention is added and
    `late` after the MLP is added; in a parallel block, it passes both after the single sum. A block of an
    encoder–decoder becomes a map of both sides' positions.
    """
    halves = [(layout.attn, (attention, beside), middle), (layout.mlp, (mlp,), late)]
    stages: list[AffineMap] = [] if whitening is None else [*whitening.stages]
    if layout.parallel:
        both = Sum((Identity(), *(branch for place, parts, _ in halves for branch in _branches(place, parts, norms))))
        return _chained([*stages, _placed(both, within), *middle, *late])
    for number, (place, parts, after) in enumerate(halves):
        if number and layout.cross is not None and within is not None:
            stages += _crossing(layout.cross, norms, within)
        branches = _branches(place, parts, norms)
        if branches:
            stages.append(_placed(Sum((Identity(), *branches)), within))
        stages += after
        if place.outer is not None and place.outer in norms:
            stages.append(_placed(norms[place.outer], within))
    return _chained(stages)


def _chained(stages: list[AffineMap]) -> AffineMap:
    return stages[0] if len(stages) == 1 else Chain(tuple(stages) or (Identity(),))


def _branches(place: Place, parts: Sequence[AffineMap | None], norms: Mapping[str, AffineMap]) -> list[AffineMap]:
    """Return the branches of the sublayers that exist, each with its norms."""
    if all(part is None for part in parts):
        return []  # without the norms either
    before = [norms[place.before]] if place.before else []
    after = [norms[place.after]] if place.after else []
    return [_chained([*before, part, *after]) for part in parts if part is not None]


def _placed(inner: AffineMap, within: Within | None) -> AffineMap:
    return inner if within is None else within(inner)


def _crossing(place: Place, norms: Mapping[str, AffineMap], within: Within) -> list[AffineMap]:
    """Return cross-attention as a map from the encoder output to the decoder's positions, with its pattern fixed."""
    assert within.read is not None
    assert within.out is not None
    written = within.out if place.after is None else Chain((within.out, norms[place.after]))
    stages: list[AffineMap] = [Sum((Identity(), Chain((within.read, within(written, only=True)))))]
    return stages if place.outer is None else [*stages, within(norms[place.outer])]
