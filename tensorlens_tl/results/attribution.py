"""The result of every attribution method: scores of source tokens for queries, with what is needed to check them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from tensorlens_tl._arguments import Whole, whole_number, whole_slice
from tensorlens_tl.algebra.numerics import maybe, relative_gap
from tensorlens_tl.drawing import figure, heat_maps, terminal
from tensorlens_tl.drawing.marks import number, numbers
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import Query
from tensorlens_tl.passes import Difference, FrozenPass
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.passes.texts import find_real, joined, special_positions, without_mark, word_ids, word_starts
from tensorlens_tl.results.entry import (
    MINUS,
    OF_GENERATED,
    TOKENS_OF_QUERIES,
    Entry,
    Explained,
    check_batch,
    shown_prompt,
    shown_target,
    with_others,
)
from tensorlens_tl.results.result import array
from tensorlens_tl.results.scores import Parts, QueryScores, refuse_ranked

if TYPE_CHECKING:
    import pandas as pd

AXES = ("batch", "query", "key")

SPECIAL = "special"
"""For `Attribution.without`: the tokenizer's special tokens."""

PATCH = " patch "
"""The prefix of an image patch's name; its row and column follow, counted from 0."""

MOST_PROMPTS = 8
"""How many prompts of a batch one picture shows."""


class Shown(NamedTuple):
    """What is drawn of one prompt: source tokens with positions, rows of the query axis, and their scores."""

    positions: list[int]
    tokens: list[str]
    rows: list[int]
    plane: np.ndarray


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Explained, QueryScores):
    """Scores of source tokens for queries: the result of every attribution method.

    `top`, `show` and `plot` take `batch` and `query`; `plot` also takes `values`, which prints numbers in a heat map.

    Attributes:
        scores: `[batch, query, key]` unless `axes` says otherwise: the contribution of source token `key` at `query`.
        tokens: readable tokens, one list per prompt.
        queries: the positions of the query axis, `[batch, query]`.
        mask: True at real tokens, `[batch, pos]`; padding has zero scores.
        axes: names of the axes of `scores`.
        layers: the method's local map per layer, `[layer, batch, query, key]`, if it has one.
        bias: the part of the total that no source token accounts for, `[batch, query]`.
        total: the sum of scores and bias if `additive`, `[batch, query]`.
        gap: the measured abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias)), `[batch, query]`.
        stderr: standard error of estimated scores.
        additive: whether scores and bias sum to `total`.
        sides: for an encoder–decoder, the side of each token, ``"encoder"`` or ``"decoder"`` (``""`` for entries that
            are not tokens), one list per prompt; None for other models.
        word_starts: which tokens begin a word, for `merge_words`; None infers it from white space.
        image: the image that an image model's patches tile, `[batch, channel, height, width]`.
        target: what the scores explain.
        method, options: how they were computed.
        provenance: model name, class, TransformerLens version, weight processing, dtype, user-installed hooks.
        special: positions of special tokens, such as BOS, one list per prompt; None if no tokenizer identifies them.
        left_out: positions that `without` hides from pictures, tables and shares, one list per prompt.
    """

    NUMBERS: ClassVar = ("scores", "layers", "bias", "total")

    scores: Float[Tensor, "..."]
    tokens: list[list[str]]
    queries: Int[Tensor, "batch query"]
    mask: Bool[Tensor, "batch pos"]
    method: str
    axes: tuple[str, ...] = AXES
    layers: Float[Tensor, "layer ..."] | None = None
    bias: Float[Tensor, "batch query"] | None = None
    total: Float[Tensor, "batch query"] | None = None
    gap: Float[Tensor, "batch query"] | None = None
    stderr: Float[Tensor, "batch query key"] | None = None
    additive: bool = False
    word_starts: list[list[bool]] | None = None
    sides: list[list[str]] | None = None
    image: Num[Tensor, "batch channel height width"] | None = None
    target: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)
    special: list[list[int]] | None = None
    left_out: list[list[int]] | None = None

    @classmethod
    def of(
        cls, frozen: FrozenPass | Difference, scores: Tensor, *, method: str, query: Query = "all", **fields: Any
    ) -> "Attribution":
        """Build an Attribution for a frozen pass, filling in tokens, mask, positions and provenance.

        If bias and total are given without a gap, the gap is measured; for an additive result it is compared with the
        pass's tolerance, as in `FrozenPass.checked`.

        Args:
            frozen: the pass, or the difference of two.
            scores: `[batch, query, key]`.
            method: the method's name.
            query: the queries of the second axis, as passed to the method.
            fields: any other field of Attribution.

        Raises:
            NumericalError: an additive sum misses its total in a pass frozen with ``strict=True`` (otherwise a
                `GapWarning`), or the gap is NaN.

        >>> scores = torch.rand(1, 7, 7)
        >>> tlens.Attribution.of(frozen, scores, method="random").scores.shape
        torch.Size([1, 7, 7])
        """
        of_pass = {
            "tokens": [list(row) for row in frozen.str_tokens],
            "word_starts": frozen.prompt.word_starts,
            "sides": frozen.prompt.sides,
            "queries": query_positions(frozen.prompt, query),
            "mask": frozen.mask,
            "image": frozen.prompt.image,
            "provenance": frozen.provenance(),
            "special": special_positions(frozen.view, frozen.prompt),
        }
        values = of_pass | fields
        attribution = cls(scores=scores, method=method, **values)
        is_sum = attribution.bias is not None and attribution.total is not None
        if not is_sum or attribution.gap is not None:
            return attribution
        attribution = attribution._measured()
        return frozen.checked(attribution) if attribution.additive else attribution

    def _measured(self) -> "Attribution":
        """Return the same result with its gap measured, if bias and total are known."""
        if self.bias is None or self.total is None:
            return self
        return replace(self, gap=relative_gap(self.scores, self.bias, self.total))

    def __repr__(self) -> str:
        shape = ", ".join(f"{name}={size}" for name, size in zip(self.axes, self.scores.shape, strict=True))
        facts = [repr(self.method), shape]
        if self.target:
            facts.insert(1, repr(shown_target(self.target)))
        if self.gap is not None:
            facts.append(f"gap={float(self.gap.max()):.1e}")
        return f"Attribution({', '.join(facts)})"

    # ------------------------------------------------------------------ reading

    def _parts(self, query: int | str = -1, batch: int = 0) -> Parts:
        """Return one query's source tokens, except those hidden by `without`; `query` as in `query_row`."""
        row = self._row(query, batch)
        positions = self.listed(batch)
        return Parts(row[positions], [self.tokens[batch][i] for i in positions], positions)

    def __getitem__(self, where: Any) -> list[Entry]:
        """Return the scores of a text's tokens for the first prompt's last query: ``attribution["file"]``.

        There is one entry, with summed scores, for each occurrence of the text as whole tokens. An integer or a slice
        selects positions. Use `score` for other queries and prompts.
        """
        return self.score(where)

    def score(self, where: str | Whole | slice, query: int | str = -1, batch: int = 0) -> list[Entry]:
        """Return the scores of some source tokens for one query.

        Args:
            where: a text of whole tokens (outer spaces are ignored), a position (negative: from the end), or a slice.
            query, batch: as in `top`.

        Returns:
            One entry per occurrence: its first position, its tokens, and the sum of their scores.

        Raises:
            InvalidInputError: the text does not occur, or a position is out of range.
        """
        row = self._row(query, batch)
        tokens = self.tokens[batch]
        mask = self.mask[batch].tolist()
        if isinstance(where, str):
            spans = find_real(tokens, mask, where)
        elif isinstance(where, slice):
            where = whole_slice("position", where)
            spans = [[place] for place in range(len(tokens))[where] if mask[place]]
        else:
            spans = [[self._position(where, mask)]]
        return [Entry(joined([tokens[i] for i in span]), float(row[span].sum()), span[0]) for span in spans]

    @staticmethod
    def _position(where: Any, mask: list[bool]) -> int:
        """Return a real token's position; negative ones count from the last real token."""
        place = whole_number("position", where, -sum(mask), len(mask) - 1)
        if place < 0:
            place = [i for i, real in enumerate(mask) if real][place]
        if not mask[place]:
            raise InvalidInputError(f"position={place} is padding in this prompt, which has {sum(mask)} real tokens.")
        return place

    def _ipython_key_completions_(self) -> list[str]:
        """Return the first prompt's tokens, to complete ``attribution["<tab>``."""
        return sorted({token.strip() for token in self.tokens[0]} - {""})

    def _row(self, query: int | str, batch: int) -> Float[Tensor, "key"]:
        row = self.plane(batch)[self.query_row(query, batch)]
        return row.masked_fill(~self.mask[batch].to(row.device), 0)

    def without(self, *what: str | int) -> "Attribution":
        """Hide some source tokens from tables, pictures and shares.

        A prompt's first token often receives most of a logit and says little about the text. Scores do not change, so
        the sum still holds: tables show the hidden tokens as one line.

        Args:
            what: ``"special"`` for special tokens (BOS, EOS, chat markup), texts of whole tokens, or positions
                (negative ones count from the end). A text must occur in at least one prompt.

        Raises:
            InvalidInputError: nothing is named, no tokenizer identifies special tokens, no prompt contains the text, a
                position is out of range or in the explained generated text, or no token would remain.

        >>> attribution = tlens.attribute(frozen, " value").without(0)
        >>> 0 in [entry.position for entry in attribution.top(7)], len(attribution.top(7))
        (False, 6)
        """
        if not what:
            raise InvalidInputError("without: name what to leave out: 'special', a text, or a position.")
        out = [set(row) for row in self.left_out or [[]] * len(self.tokens)]
        for one in what:
            for row, positions in zip(out, self._named(one), strict=True):
                row.update(positions)
        for row, (first, _) in zip(out, self.options.get(OF_GENERATED[0], []), strict=False):
            if any(position >= first for position in row):
                raise InvalidInputError(
                    f"without{what!r}: positions from {first} on were generated; they are explained."
                )
        for prompt, row in enumerate(out):
            if len(row) == int(self.mask[prompt].sum()):
                raise InvalidInputError(f"without{what!r}: no token of prompt {prompt} would remain.")
        return replace(self, left_out=[sorted(row) for row in out])

    def _named(self, one: str | int) -> list[list[int]]:
        """Return the positions in each prompt that one argument of `without` names."""
        masks = self.mask.tolist()
        if not isinstance(one, str):
            return [[self._position(one, mask)] for mask in masks]
        if one == SPECIAL:
            if self.special is None:
                raise InvalidInputError(
                    "without('special'): this result does not know which tokens are special (no tokenizer, or an older "
                    "file); name their positions instead, as in without(0)."
                )
            starts = [first for first, _ in self.options.get(OF_GENERATED[0], [])] or [len(masks[0])] * len(masks)
            return [[at for at in row if at < start] for row, start in zip(self.special, starts, strict=True)]
        by_prompt: list[list[int]] = []
        for prompt, mask in enumerate(masks):
            try:
                spans = find_real(self.tokens[prompt], mask, one)
            except InvalidInputError:
                if prompt == len(masks) - 1 and not any(by_prompt):
                    raise
                spans = []
            by_prompt.append([place for span in spans for place in span])
        return by_prompt

    def normalize(self) -> "Attribution":
        """Divide scores by their absolute sum per query. Not additive any more; tokens hidden by `without` become zero.

        >>> shares = tlens.attribute(frozen, " value").normalize()
        >>> round(shares.scores[0, -1].abs().sum().item(), 5)
        1.0
        """
        key = self.axes.index("key")
        shape = [
            size if name in ("batch", "key") else 1 for name, size in zip(self.axes, self.scores.shape, strict=True)
        ]
        scores = self.scores.masked_fill(~self._listed.reshape(shape).to(self.scores.device), 0)
        scores = scores / scores.abs().sum(key, keepdim=True).clamp_min(torch.finfo(scores.dtype).tiny)
        return replace(self, scores=scores, additive=False, bias=None, total=None, gap=None, stderr=None)

    def merge_words(self) -> "Attribution":
        """Merge sub-word tokens into words: sum scores over a word's keys, average them over its queries.

        Words start where the tokenizer says (`word_starts`), or else at white space. Sums over keys are preserved.

        >>> words = tlens.attribute(frozen, " value").merge_words()
        >>> len(words.tokens[0])
        6
        """
        if self.axes != AXES:
            raise InvalidInputError(f"merge_words: needs scores [batch, query, key], but these are {self.axes}.")
        starts = self.word_starts or [word_starts(row) for row in self.tokens]
        words = [word_ids(row, mask) for row, mask in zip(starts, self.mask.tolist(), strict=True)]
        count = max(max(row) for row in words) + 1
        of_token = torch.tensor(words, device=self.scores.device)
        membership = (of_token[..., None] == torch.arange(count, device=of_token.device)).to(self.scores)
        scores = self.scores @ membership
        n_queries = self.queries.shape[1]
        first_queries = torch.arange(n_queries).to(self.queries).expand_as(self.queries)
        options = self._with_next_tokens()
        left_out = {OF_GENERATED[0]}  # a word may begin in the prompt
        if OF_GENERATED[1] in options:  # token positions
            pairs = zip(words, options[OF_GENERATED[1]], strict=True)
            options = options | {OF_GENERATED[1]: [[row[place] for place in places] for row, places in pairs]}
        if n_queries > 1 and OF_GENERATED[1] not in options and torch.equal(self.queries, first_queries):
            # all queries, or only the first ones: the last key may be a bias rather than a token
            if n_queries < len(of_token[0]) and len({max(row) for row in words}) > 1:
                raise InvalidInputError("merge_words: one source is no token (a bias); merge one prompt at a time.")
            members = membership[:, :n_queries]
            mean = (members / members.sum(1, keepdim=True).clamp_min(1)).mT
            mean = mean[:, : int(mean.any(2).sum(1).max())]
            by_query = self._of_queries(mean, scores)
            by_query["queries"] = torch.arange(mean.shape[1], device=mean.device).expand(len(mean), -1)
            left_out = {*left_out, TOKENS_OF_QUERIES}
        else:
            queries = torch.take_along_dim(of_token, self.queries.to(of_token), dim=1)
            by_query = {"scores": scores, "queries": queries}
        return replace(
            self,
            **by_query,
            tokens=[_word_texts(row, ids, count) for row, ids in zip(self.tokens, words, strict=True)],
            mask=membership.any(1),
            sides=self.sides and [_word_sides(row, ids, count) for row, ids in zip(self.sides, words, strict=True)],
            layers=None,
            stderr=None,
            word_starts=[[True] * count for _ in words],
            special=_words_of(self.special, words),
            left_out=_words_of(self.left_out, words),
            options={name: value for name, value in options.items() if name not in left_out},
        )

    def _of_queries(self, weights: Float[Tensor, "batch new query"], scores: Tensor) -> dict[str, Tensor | None]:
        """Return the fields with a query axis for new queries, weighted sums of the old ones."""
        axis = self.axes.index("query")
        scores = torch.einsum("bnq,bq...->bn...", weights, scores.movedim(axis, 1)).movedim(1, axis)

        def weighted(values: Tensor) -> Tensor:
            return (weights.to(values) @ values[..., None])[..., 0]

        bias, total = maybe(weighted, self.bias), maybe(weighted, self.total)
        return {"scores": scores, "bias": bias, "total": total, "gap": None}

    def to_dataframe(self) -> "pd.DataFrame":
        """Return a long table: a row per prompt, query and source token, and one for each query's bias and total.

        Columns (see `COLUMNS`): the axes, ``query_token`` (in generated text, the explained tokens), ``key_token``, an
        encoder–decoder's sides, ``kind``, ``generated``, ``method``, ``target`` and ``score``. If the result is
        additive, rows of kind ``"token"`` and ``"bias"`` sum to the ``"total"`` row.

        >>> frame = tlens.attribute(frozen, " value").to_dataframe()
        >>> frame["kind"].value_counts().to_dict()
        {'token': 7, 'bias': 1, 'total': 1}
        """
        import pandas as pd

        places = np.indices(tuple(self.scores.shape)).reshape(self.scores.ndim, -1)
        columns = {"kind": "token", "score": array(self.scores).ravel()}
        tokens = pd.DataFrame(dict(zip(self.axes, places, strict=True)) | columns)
        frames = [tokens.loc[self._listed.cpu().numpy()[tokens["batch"], tokens["key"]]]]
        sums = {"left out": None, "bias": self.bias, "total": self.total}
        if self.left_out and self.axes == AXES:
            rows = zip(self.scores, self.left_out, strict=True)
            sums["left out"] = torch.stack([scores[:, positions].sum(-1) for scores, positions in rows])
        batch, row = np.indices(tuple(self.queries.shape)).reshape(2, -1)
        for kind, values in sums.items():
            if values is not None:
                columns = {"batch": batch, "query": row, "kind": kind, "score": array(values).ravel()}
                frames.append(pd.DataFrame(columns))
        frame = pd.concat(frames).sort_values(["batch", "query"], kind="stable", ignore_index=True)

        batch, row = (frame[name].to_numpy() for name in ("batch", "query"))
        positions = self.queries.cpu().numpy()[batch, row]
        keys = frame["key"].fillna(-1).astype(int)  # −1 (the last) for rows that concern no token
        prompts = range(len(self.tokens))
        texts, targets = (list(map(words, prompts)) for words in (self._query_texts, self._target_texts))
        names = [[*tokens, ""] for tokens in self.tokens]
        ranges: Sequence[Sequence[int]] = self.options.get(OF_GENERATED[0], [(0, 0)] * len(self.tokens))
        frame["query"] = positions
        frame["query_token"] = [texts[b][r] for b, r in zip(batch, row, strict=True)]
        frame["key_token"] = [names[b][key] for b, key in zip(batch, keys, strict=True)]
        frame["generated"] = [ranges[b][0] <= key < ranges[b][1] for b, key in zip(batch, keys, strict=True)]
        frame["method"] = self.method
        frame["target"] = [targets[b][r] for b, r in zip(batch, row, strict=True)]
        sides: list[str] = []
        if self.sides is not None:
            sides = ["query_side", "key_side"]
            of_tokens = [[*row, ""] for row in self.sides]
            for name, column in zip(sides, (positions, keys), strict=True):
                frame[name] = [of_tokens[b][place] for b, place in zip(batch, column, strict=True)]
        frame = frame.loc[self.mask.cpu().numpy()[batch, positions]].reset_index(drop=True)
        frame = frame.astype({axis: "Int64" for axis in self.axes if axis not in ("batch", "query")})
        return frame[[*self.axes, "query_token", "key_token", *sides, "kind", "generated", "method", "target", "score"]]

    @classmethod
    def _unpacked(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> "Attribution":
        return super()._unpacked(tensors, facts | {"axes": tuple(facts["axes"])})

    def _axes(self) -> dict[str, list[str]]:
        axes = super()._axes()
        axes |= {name: list(self.axes) for name in ("scores", "stderr") if name in axes}
        if self.layers is not None:
            axes["layers"] = ["layer", "batch", *map(str, range(self.layers.ndim - 4)), "layer query", "key"]
        return axes

    def _misfit(self) -> str:
        if not isinstance(self.scores, Tensor):
            return f"scores are {type(self.scores).__name__}, not a tensor"
        shape, axes = tuple(self.scores.shape), self.axes
        if len(axes) != len(shape):
            return f"scores have {len(shape)} axes, {shape}, but {len(axes)} are named, {axes}"
        if len(set(axes)) != len(axes) or [axis for axis in axes if axis in AXES] != list(AXES):
            return f"axes are {axes}; they must include {', '.join(AXES)} once each, in this order"
        if axes[0] != "batch":
            return f"axes are {axes}; the first must be 'batch'"
        batch, queries, keys = (shape[axes.index(axis)] for axis in AXES)
        if self.queries.shape == (batch, 1) and queries == keys > 1:
            return (
                f"scores {shape} are of every query, but one query was named; name query='all', or pass that query's "
                "scores"
            )
        wrong = super()._misfit()
        if wrong:
            return wrong
        if bool(((self.queries < 0) | (self.queries >= keys)).any()):
            return "queries lie outside the prompt"
        for lines in filter(None, (self.tokens, self.word_starts, self.sides)):
            if [len(line) for line in lines] != [keys] * batch:
                return f"there are not {keys} tokens for each of {batch} prompts"
        for lines in filter(None, (self.special, self.left_out)):
            if len(lines) != batch or not all(0 <= at < keys for line in lines for at in line):
                return "special or hidden tokens include positions outside the prompts"
        if not {side for line in self.sides or () for side in line} <= {"encoder", "decoder", ""}:
            return "sides are neither 'encoder' nor 'decoder'"
        return ""

    def _aligned(self, other: Any) -> tuple[Any, Any]:
        """Check that another result is for the same prompt, queries and weight processing (which logits depend on)."""
        processing = [result.provenance.get("weight_processing") for result in (self, other)]
        for name, left, right in (
            ("tokens", self.tokens, other.tokens),
            ("axes", self.axes, other.axes),
            ("queries", self.queries.tolist(), other.queries.tolist()),
            (f"weight processing ({processing[0]!r} and {processing[1]!r})", *processing),
        ):
            if left != right:
                raise InvalidInputError(f"difference: the two differ in {name}; compare like with like.")
        tokens = [of.options.get(name) for of in (self, other) for name in ("target", "minus")]
        refuse_ranked(self.target, other.target, *tokens)
        changes: dict[str, Any] = {"additive": self.additive and other.additive, "gap": None, "stderr": None}
        changes["method"] = " − ".join(dict.fromkeys((self.method, other.method)))
        changes["options"] = {"left": self.options, "right": other.options}
        if not changes["additive"]:
            changes["total"] = None
        return replace(self, **changes), other

    def _difference(self, other: Any) -> str:
        if self.target == other.target and self.provenance != other.provenance:
            return f"change of the {self.target or 'scores'}"
        return super()._difference(other)

    def __sub__(self, other: Any) -> "Attribution":
        less = super().__sub__(other)
        if less is NotImplemented or not less.additive:
            return less
        return less._measured()

    # ------------------------------------------------------------------ showing

    @property
    def heading(self) -> str:
        """The title of the result's page."""
        return self.describe()

    def describe(self, batch: int | None = None, row: int | None = None) -> str:
        """Describe the scores in one line: for one prompt or (None) all, and for one query `row` or all."""
        target = shown_target(self.target)
        if batch is not None:
            check_batch(batch, self.tokens)
            target = self._target_of_prompt(batch, row)
        notes = [": ".join(filter(None, [self.method, target]))]
        if self.gap is not None:
            exact = self._shown_miss() if self.additive else ", no exact sum"
            notes.append(f"gap {float(self.gap.max()):.1e}{exact}")
        return " · ".join(notes)

    def _shown_miss(self) -> str:
        """Describe how far sums miss their totals if it is visible in a table's four digits, as in half precision."""
        if self.bias is None or self.total is None or tuple(self.axes) != AXES:
            return ""
        missed = (self.scores.sum(-1) + self.bias - self.total).abs()
        if not bool((missed > 5e-4 * self.total.abs()).any()):
            return ""
        return f", {self.provenance.get('dtype', 'rounding')} is off by up to {float(missed.max()):.2g}"

    def plane(self, batch: int = 0) -> Float[Tensor, "query key"]:
        """Return one prompt's scores as shown: other axes (such as heads) averaged, vectors reduced to their norm."""
        check_batch(batch, self.tokens)
        scores = self.scores[batch].detach()
        axes = list(self.axes[1:])
        for name in [axis for axis in axes if axis not in AXES]:
            axis = axes.index(name)
            reduce = {"d_model": torch.linalg.vector_norm}.get(name, torch.mean)
            scores = reduce(scores, dim=axis)
            axes.remove(name)
        return scores

    def _html(self, k: int, batch: int | None = None) -> str:
        """Draw one query as coloured text, several as a matrix, images as patches; by default the first few prompts."""
        prompts, left = self._prompts(batch)
        parts = [self._prompt_html(prompt) for prompt in prompts]
        if left:
            parts.append(f'<div class="n">{left} more prompts: to_html(batch={MOST_PROMPTS}) …</div>')
        return self._panel(*parts)

    def _print(self, k: int, query: int | str = -1, batch: int | None = None) -> None:
        """Print the top tokens of one query, for one prompt or (None) the first few."""
        prompts, left = self._prompts(batch)
        for prompt in prompts:
            self._print_table(k, query, prompt)
        if left:
            print(f"{left} more prompts: show(batch={MOST_PROMPTS}) …")

    def _prompts(self, batch: int | None) -> tuple[Sequence[int], int]:
        """Return the prompts that one picture shows, and how many more there are."""
        if batch is not None:
            check_batch(batch, self.tokens)
            return [batch], 0
        count = len(self.tokens)
        return range(min(count, MOST_PROMPTS)), max(0, count - MOST_PROMPTS)

    def _print_table(self, k: int, query: int | str, batch: int) -> None:
        row = self.query_row(query, batch)
        entries = self.top(k, query=query, batch=batch)
        scores = self.plane(batch)[row].double()
        listed = self.listed(batch)
        lines = with_others(entries, float(scores[listed].sum()), len(listed))
        left = self.left_out[batch] if self.left_out else []
        if left:
            lines.append((f"{len(left)} left out", float(scores[left].sum())))
        values = [score for _, score in lines]
        if self.bias is not None and self.total is not None:
            values += [float(self.bias[batch, row]), float(self.total[batch, row])]
        texts, unit = numbers(values)
        columns = {
            "position": [str(entry.position) for entry in entries],
            "token": [repr(entry.name) for entry in entries],
        }
        if self.sides is not None:
            columns["side"] = [self.sides[batch][int(str(entry.position))] for entry in entries]
        columns = {heading: [*cells, *[""] * (len(texts) - len(entries))] for heading, cells in columns.items()}
        below = [*(name for name, _ in lines), "bias (no token)", "total"]
        columns["token"][len(entries) :] = below[len(entries) : len(texts)]
        columns[f"score / {unit}" if unit else "score"] = texts
        rows = list(zip(*columns.values(), strict=True))
        which = self._which(batch, row)
        if self.queries.shape[1] > 1:
            which += "; show(query=...) shows another"
        title = " · ".join(filter(None, [self.describe(batch, row), which]))
        sums = rows[len(lines) :]
        note = " ".join(filter(None, [self._sink_note(batch, row), self._bias_note(batch, row)]))
        terminal.show_table(title, list(columns), rows[: len(lines)], sums, left=("token", "side"), caption=note)

    def _figure(
        self, k: int, batch: int | None = None, query: int | str | None = None, values: bool | None = None, *, ax: Any
    ) -> Any:
        """Draw one prompt: one query as coloured text or over an image, several as a heat map; `k` has no effect.

        `values` prints numbers in the cells; None does so where they fit.
        """
        batch = batch or 0
        keys, tokens, rows, plane = self._shown(batch, query)
        if len(rows) > 1:
            labels = [self.tokens[batch][self._explained(batch)[row][-1]] for row in rows]
            names = ("query", "source token")
            if self._is_generated():
                names = ("generated token", "source token")
            title = " · ".join(filter(None, [self.describe(batch), shown_prompt(batch, len(self.tokens))]))
            return figure.heat_map(plane, labels, tokens, title, ax, values, names)
        if self.image is not None and _patches(tokens)[0]:
            patches, height, width = _patches(tokens)
            square = plane[0][patches].reshape(height, width)
            labels = [str(number) for number in range(max(height, width))]
            names = ("row of patches", "column of patches")
            title = self._strip_title(batch, rows[0])
            return figure.heat_map(square, labels[:height], labels[:width], title, ax, values, names)
        columns = {position: column for column, position in enumerate(keys)}
        marked = [columns[position] for position in self._explained(batch)[rows[0]] if position in columns]
        first = None
        if self._is_generated():
            first = columns[self.options["generated"][batch][0]]
        return figure.text(tokens, plane[0], self._strip_title(batch, rows[0]), ax, marked=marked, first=first)

    def _left_out_note(self, batch: int, row: int) -> str:
        left = self.left_out[batch] if self.left_out else []
        if not left:
            return ""
        return f"{len(left)} left out: {number(float(self.plane(batch)[row][left].sum()))}"

    def _sink_note(self, batch: int, row: int) -> str:
        """Say what to do if most of a query's score belongs to the first token, which says little about the text."""
        listed = self.listed(batch)
        sizes = self.plane(batch)[row].abs()[listed]
        if len(listed) < 3 or listed[0] == int(self.queries[batch, row]) or not bool(sizes[0] > sizes[1:].sum()):
            return ""
        share = float(sizes[0] / sizes.sum())
        note = f"position {listed[0]} has {share:.0%} of all scores; without({listed[0]}) leaves it out"
        if self.target and MINUS not in self.target:  # a map of token pairs has no contrast
            note += ", and a contrast (minus=) often cancels it"
        return f"{note}."

    def _bias_note(self, batch: int, row: int) -> str:
        """Say how to explain the bias if it exceeds all scores together, as with a steering vector."""
        if self.bias is None or not self.additive or not re.search("logit|direction", self.target or ""):
            return ""
        if not bool(self.bias[batch, row].abs() > self.plane(batch)[row].abs().sum()):
            return ""
        return "Most of it belongs to no token: circuits.logit_attribution splits the bias into its parts."

    def _is_generated(self) -> bool:
        return set(OF_GENERATED) <= set(self.options)

    def _strip_title(self, batch: int, row: int) -> str:
        notes = [self.describe(batch, row)]
        if self._is_generated():
            text = joined([self.tokens[batch][position] for position in self._explained(batch)[row]])
            if repr(text) not in notes[0]:
                notes.append(f"of {text!r}")
        notes.append(shown_prompt(batch, len(self.tokens)))
        return " · ".join(filter(None, notes))

    # ------------------------------------------------------------------ arrays

    def listed(self, batch: int) -> list[int]:
        """Return the positions of real source tokens that are not hidden."""
        check_batch(batch, self.tokens)
        return self._listed[batch].nonzero()[:, 0].tolist()

    @property
    def _listed(self) -> Bool[Tensor, "batch key"]:
        """Return which source tokens are real and not hidden."""
        listed = self.mask.clone()
        for row, positions in zip(listed, self.left_out or [], strict=False):
            row[positions] = False
        return listed

    def _shown(self, batch: int, query: int | str | None = None) -> "Shown":
        """Return what is drawn of one prompt: one real query, or all."""
        check_batch(batch, self.tokens)
        rows = self._real_rows(batch)
        if query is not None:
            rows = [self.query_row(query, batch)]
        positions = self.listed(batch)
        plane = array(self.plane(batch))[np.ix_(rows, positions)]
        return Shown(positions, [self.tokens[batch][position] for position in positions], rows, plane)

    def _sums_note(self, batch: int, row: int) -> str:
        """Describe bias and total of a query; empty if either is unknown."""
        if self.bias is None or self.total is None:
            return ""
        bias, total = (float(values[batch, row]) for values in (self.bias, self.total))
        return f"bias, from no token: {number(bias)} · total: {number(total)}"

    def _prompt_html(self, batch: int) -> str:
        if self._is_generated():
            return self._generated_html(batch)
        keys, tokens, rows, plane = self._shown(batch)
        named = [self._explained(batch)[row][-1] for row in rows]
        queries = [(place, self.tokens[batch][place]) for place in named]
        notes = self._target_notes(batch, rows)
        if len(rows) == 1:
            of_query = [
                self._left_out_note(batch, rows[0]),
                self._sink_note(batch, rows[0]),
                self._bias_note(batch, rows[0]),
            ]
            notes += filter(None, [self._sums_note(batch, rows[0]) if self.additive else "", *of_query])
        stacks = []
        for name, planes in self._stacks(batch):
            chosen = rows
            labels = [token for _, token in queries]
            if planes.shape[1] != self.queries.shape[1]:  # layers may hold all queries, while scores hold one
                chosen, labels = keys, tokens
            stacks.append(heat_maps.Stack(name, planes[:, chosen][:, :, keys], labels))
        label = self.describe(batch)
        sides: list[str] = []
        if self.sides is not None:
            sides = [self.sides[batch][position] for position in keys]
        if sides and len(rows) > 1:
            notes.append(f"the first {sides.count('encoder')} keys are the encoder's tokens, then come the decoder's")
        prompt_html = heat_maps.prompt(
            tokens, keys, plane, queries, label=label, stacks=stacks, note=" · ".join(notes), parts=sides
        )
        if self.image is None or len(rows) != 1:
            return prompt_html
        return self._image_html(batch, plane[0], tokens) + prompt_html

    def _target_notes(self, batch: int, rows: list[int]) -> list[str]:
        """Say what is explained for a prompt and its queries, if the title does not."""
        if self._target_of_prompt(batch) == shown_target(self.target) and self.target == shown_target(self.target):
            return []
        texts = self._target_texts(batch)
        return list(dict.fromkeys(texts[row] for row in rows))

    def _generated_html(self, batch: int) -> str:
        """Draw generated text: select a token to see its sources; below, a folded matrix of all pairs."""
        keys, tokens, rows, plane = self._shown(batch)
        columns = {position: column for column, position in enumerate(keys)}
        targets = [columns[position] for position in self.options["asked"][batch]]
        by_row = [[target] for target in targets]
        if len(rows) == 1:
            by_row = [targets]
        facts: list[str] = []
        for row, row_targets in zip(rows, by_row, strict=False):
            question = f"what made {''.join(tokens[target] for target in row_targets)!r}"
            facts.append(" · ".join(filter(None, [question, self._sums_note(batch, row)])))
        first = columns[self.options["generated"][batch][0]]
        picture = heat_maps.generated_text(tokens, keys, plane, first, by_row, facts)
        if len(rows) == 1:
            return picture
        labels = [tokens[target] for target in targets]
        whole = heat_maps.matrix(labels, tokens, plane, label=self.describe(batch), corner="generated ↓ source →")
        return f"{picture}<details><summary>All of them as a matrix</summary>{whole}</details>"

    def _image_html(self, batch: int, scores: np.ndarray, tokens: list[str]) -> str:
        """Draw one query's scores over the image, next to those of tokens that are not patches."""
        assert self.image is not None
        patches, rows, columns = _patches(tokens)
        if not patches:
            return ""
        others = {token.strip(): float(scores[n]) for n, token in enumerate(tokens) if n not in patches}
        return heat_maps.patch_scores(
            array(self.image[batch]),
            scores[patches].reshape(rows, columns),
            title=self.target or self.method,
            special=others,
        )

    def _stacks(self, batch: int) -> list[tuple[str, np.ndarray]]:
        """Return the scores in more detail, `[plane, query, key]` each: by head, and by layer."""
        stacks = []
        for axis in self.axes:
            if axis not in (*AXES, "d_model"):
                scores = self.scores[batch].movedim(self.axes.index(axis) - 1, 0)
                if scores.ndim == 3:
                    stacks.append((axis, array(scores)))
        if self.layers is not None:
            layers = array(self.layers[:, batch])
            while layers.ndim > 3:  # heads
                layers = layers.mean(1)
            if layers.shape[-1] == self.mask.shape[1]:
                stacks.append(("layer", layers))
        return stacks


def one_query(result: Attribution, *, mean: bool) -> Attribution:
    """Sum (or average) the scores of each prompt's real queries, placed at its last query.

    Bias and total are treated alike, so sums still hold. Standard errors, which are not independent, are dropped.
    """
    queries = result.queries.to(result.mask.device)
    real = torch.take_along_dim(result.mask, queries, dim=1)
    weights = real.to(result.scores)[:, None]
    if mean:
        weights = weights / weights.sum(2, keepdim=True).clamp_min(1)
    fields = result._of_queries(weights, result.scores)
    fields["queries"] = (queries * real).amax(1, keepdim=True)
    options = {name: value for name, value in result.options.items() if name != TOKENS_OF_QUERIES}
    return replace(result, **fields, options=options, stderr=None)._measured()


def _word_texts(tokens: list[str], words: list[int], count: int) -> list[str]:
    """Return the text of each word of a prompt: its tokens joined, without word-start marks."""
    parts: list[list[str]] = [[] for _ in range(count)]
    for token, word in zip(tokens, words, strict=True):
        if word >= 0:
            parts[word].append(without_mark(token))
    return list(map(joined, parts))


def _words_of(positions: list[list[int]] | None, words: list[list[int]]) -> list[list[int]] | None:
    """Map token positions of each prompt to the words they belong to."""
    if positions is None:
        return None
    return [sorted({of_token[at] for at in row}) for row, of_token in zip(positions, words, strict=True)]


def _word_sides(sides: list[str], words: list[int], count: int) -> list[str]:
    """Return the side of each word, that of its first token; padded with empty strings."""
    side_of = dict(zip(words[::-1], sides[::-1], strict=True))
    return [side_of.get(word, "") for word in range(count)]


def _patches(tokens: Sequence[str]) -> tuple[list[int], int, int]:
    """Return which tokens are image patches, and the numbers of rows and columns they form."""
    patches = [number for number, token in enumerate(tokens) if token.startswith(PATCH)]
    if not patches:
        return [], 0, 0
    row, column = tokens[patches[-1]].removeprefix(PATCH).split(",")
    return patches, int(row) + 1, int(column) + 1
