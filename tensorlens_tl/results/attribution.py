"""One result for every method: scores of source tokens for queries, with what is needed to trust and show them."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import whole_number, whole_slice
from tensorlens_tl.algebra.numerics import relative_residual
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models.protocol import Query
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.inputs import find_real, query_positions, without_mark, word_ids, word_starts
from tensorlens_tl.results.entry import Entry, largest, query_row
from tensorlens_tl.results.storage import Stored
from tensorlens_tl.results.views import AXES, OF_GENERATED, Shown

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Attribution(Shown, Stored):
    """What every method returns.

    Attributes:
        scores: `[batch, query, key]` unless `axes` says otherwise: how much source token `key` gave to `query`.
        tokens: readable tokens, one list per prompt.
        queries: the positions the query axis stands for, `[batch, query]`.
        mask: True at real tokens, `[batch, pos]`; padding has zero scores.
        axes: names of the axes of `scores`.
        layers: the method's local map per layer, `[layer, batch, query, key]`, where it has them.
        bias: what no source token explains, `[batch, query]`.
        total: what scores and bias sum to where `additive`, `[batch, query]`.
        residual: measured abs(Σ scores + bias − total) / (Σ abs(scores) + abs(bias)), `[batch, query]`.
        stderr: standard error of estimated scores.
        additive: whether scores and bias sum to `total`.
        sides: of an encoder–decoder, which side each token is on, ``"encoder"`` or ``"decoder"`` (``""`` of a source
            that is no token), one list per prompt; None of any other model.
        word_starts: which tokens begin a word, for `merge_words`; None reads it off white space.
        image: of an image model, what its patches tile, `[batch, channel, height, width]`: pictures show it.
        target: what the scores explain, in words.
        method, options: how they were made.
        provenance: model name, class, TransformerLens version, weight processing, dtype, other people's hooks.
    """

    TENSORS: ClassVar = ("scores", "queries", "mask", "layers", "bias", "total", "residual", "stderr", "image")
    FACTS: ClassVar = (
        "tokens", "word_starts", "sides", "axes", "additive", "target", "method", "options", "provenance",
    )  # fmt: skip

    scores: Float[Tensor, "..."]
    tokens: list[list[str]]
    queries: Int[Tensor, "batch query"]
    mask: Bool[Tensor, "batch pos"]
    method: str
    axes: tuple[str, ...] = AXES
    layers: Float[Tensor, "layer ..."] | None = None
    bias: Float[Tensor, "batch query"] | None = None
    total: Float[Tensor, "batch query"] | None = None
    residual: Float[Tensor, "batch query"] | None = None
    stderr: Float[Tensor, "batch query key"] | None = None
    additive: bool = False
    word_starts: list[list[bool]] | None = None
    sides: list[list[str]] | None = None
    image: Float[Tensor, "batch channel height width"] | None = None
    target: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, frozen: FrozenPass, scores: Tensor, *, method: str, query: Query = None, **fields: Any
    ) -> "Attribution":
        """An Attribution of a frozen pass: tokens, mask, query positions and provenance are filled in.

        Where a bias and a total are given, the residual is measured.

        Args:
            frozen: the pass the scores were made from.
            scores: `[batch, query, key]`.
            method: the method's name.
            query: the queries that the second axis holds, as the method was asked for them.
            fields: any other field of Attribution.
        """
        of_pass = {
            "tokens": [list(row) for row in frozen.str_tokens],
            "word_starts": frozen.prompt.word_starts,
            "sides": frozen.prompt.sides,
            "queries": query_positions(frozen.prompt, query),
            "mask": frozen.mask,
            "image": frozen.prompt.image,
            "provenance": frozen.provenance(),
        }
        values = of_pass | fields
        if values.get("bias") is not None and values.get("total") is not None and values.get("residual") is None:
            values["residual"] = relative_residual(scores, values["bias"], values["total"])
        return cls(scores=scores, method=method, **values)

    def __post_init__(self) -> None:
        try:
            _check_fit(self)
        except ValueError as error:
            raise InvalidInputError(f"Attribution: {error}.") from None

    def __repr__(self) -> str:
        shape = ", ".join(f"{name}={size}" for name, size in zip(self.axes, self.scores.shape, strict=True))
        target = f", {self.target!r}" if self.target else ""
        residual = "" if self.residual is None else f", residual={float(self.residual.max()):.1e}"
        return f"Attribution({self.method!r}{target}, {shape}{residual})"

    # ------------------------------------------------------------------ reading

    def top(self, k: int = 10, query: int | str = -1, batch: int = 0) -> list[Entry]:
        """The k source tokens of largest absolute score for one query.

        Args:
            k: how many.
            query: which of the held queries, counted over the prompt's real ones, or a text: its last token, where it
                occurs last.
            batch: the prompt.

        Raises:
            InvalidInputError: k below 1, or no such query.
        """
        row = self._row(query, batch)
        tokens = self.tokens[batch]
        real = self.mask[batch].nonzero()[:, 0].to(row.device)
        positions = real.tolist()
        return largest(row[real], [tokens[i] for i in positions], k, positions)

    def __getitem__(self, where: Any) -> list[Entry]:
        """What the tokens of a text gave to the last query of the first prompt: ``attribution["file"]``.

        One entry for every place where the text occurs, whole tokens only, the scores of its tokens summed; an integer
        or a slice picks positions. `score` asks about other queries and prompts.
        """
        return self.score(where)

    def score(self, where: Any, query: int | str = -1, batch: int = 0) -> list[Entry]:
        """What some source tokens gave to one query.

        Args:
            where: a text of one token or several (outer spaces do not count), a position (a negative one counts from
                the last token), or a slice of positions.
            query, batch: as in `top`.

        Returns:
            One entry for every occurrence of the text: its first position, its tokens, the sum of their scores.

        Raises:
            InvalidInputError: the text does not occur, or a position out of range.
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
        return [Entry("".join(tokens[i] for i in span), float(row[span].sum()), span[0]) for span in spans]

    @staticmethod
    def _position(where: Any, mask: list[bool]) -> int:
        """A real token's position; a negative one counts from the last real token."""
        place = whole_number("position", where, -sum(mask), len(mask) - 1)
        if place < 0:
            place = [i for i, real in enumerate(mask) if real][place]
        if not mask[place]:
            raise InvalidInputError(f"position={place} is padding in this prompt, which has {sum(mask)} real tokens.")
        return place

    def _ipython_key_completions_(self) -> list[str]:
        """The tokens of the first prompt, for ``attribution["<tab>``."""
        return sorted({token.strip() for token in self.tokens[0]} - {""})

    def query_row(self, query: int | str = -1, batch: int = 0) -> int:
        """Where a query lies on the query axis: counted over the prompt's real queries, or named by its text.

        Raises:
            InvalidInputError: not among the held queries.
        """
        return query_row(self.queries, self.mask, self.tokens, query, batch)

    def _row(self, query: int | str, batch: int) -> Float[Tensor, "key"]:
        row = self.plane(batch)[self.query_row(query, batch)]
        return row.masked_fill(~self.mask[batch].to(row.device), 0)

    def normalize(self) -> "Attribution":
        """Scores divided by the sum of their absolute values, per query; no longer additive."""
        size = self.scores.abs().sum(self.axes.index("key"), keepdim=True)
        scores = self.scores / size.clamp_min(torch.finfo(self.scores.dtype).tiny)
        return replace(self, scores=scores, additive=False, bias=None, total=None, residual=None, stderr=None)

    def merge_words(self) -> "Attribution":
        """Sub-word tokens joined into words: scores are summed over a word's keys and averaged over its queries.

        Where a word starts is the tokenizer's own mark (`word_starts`), else white space. Sums over keys, and so
        completeness, are kept.
        """
        if self.axes != AXES:
            raise InvalidInputError(f"merge_words: needs scores [batch, query, key], these are {self.axes}.")
        starts = self.word_starts or [word_starts(row) for row in self.tokens]
        words = [word_ids(row, mask) for row, mask in zip(starts, self.mask.tolist(), strict=True)]
        count = max(max(row) for row in words) + 1
        length = self.mask.shape[1]
        membership = self.scores.new_zeros(len(words), length, count + 1)  # padding goes to the extra column
        prompts = torch.arange(len(words))[:, None]
        membership[prompts, torch.arange(length)[None], torch.tensor(words) % (count + 1)] = 1
        membership = membership[..., :count]
        scores = self.scores @ membership
        bias = self.bias
        total = self.total
        residual = self.residual
        n_queries = self.queries.shape[1]
        first_queries = torch.arange(n_queries).expand_as(self.queries)
        if n_queries > 1 and torch.equal(self.queries.cpu(), first_queries):
            # every query, or the first of them: the last key may be a bias instead of a token
            if n_queries < length and len({max(row) for row in words}) > 1:
                raise InvalidInputError("merge_words: one source is no token (a bias); merge one prompt at a time.")
            mean = (membership / membership.sum(1, keepdim=True).clamp_min(1)).transpose(1, 2)[:, :, :n_queries]
            mean = mean[:, : int(mean.any(2).sum(1).max())]
            scores = mean @ scores
            bias = None if bias is None else (mean @ bias[..., None])[..., 0]
            total = None if total is None else (mean @ total[..., None])[..., 0]
            residual = None
            queries = torch.arange(mean.shape[1]).expand(len(words), -1)
        else:
            queries = torch.take_along_dim(torch.tensor(words), self.queries.cpu(), dim=1)
        return replace(
            self,
            scores=scores,
            tokens=[_word_texts(row, ids, count) for row, ids in zip(self.tokens, words, strict=True)],
            mask=membership.any(1),
            queries=queries,
            bias=bias,
            total=total,
            residual=residual,
            sides=self.sides and [_word_sides(row, ids, count) for row, ids in zip(self.sides, words, strict=True)],
            layers=None,
            stderr=None,
            word_starts=[[True] * count for _ in words],
            # options of generated text hold token positions, which no longer apply
            options={name: value for name, value in self.options.items() if name not in OF_GENERATED},
        )

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per score of real tokens: the axes, the two tokens, of an encoder–decoder their sides, the score."""
        import pandas as pd

        index = torch.cartesian_prod(*(torch.arange(size) for size in self.scores.shape)).reshape(-1, self.scores.ndim)
        frame = pd.DataFrame({name: index[:, axis].numpy() for axis, name in enumerate(self.axes)})
        rows = frame["batch"].to_numpy()
        keys = frame["key"].to_numpy()
        frame["query"] = self.queries.cpu().numpy()[rows, frame["query"].to_numpy()]
        frame["query_token"] = [self.tokens[b][q] for b, q in zip(rows, frame["query"], strict=True)]
        frame["key_token"] = [self.tokens[b][k] for b, k in zip(rows, keys, strict=True)]
        if self.sides is not None:
            frame["query_side"] = [self.sides[b][q] for b, q in zip(rows, frame["query"], strict=True)]
            frame["key_side"] = [self.sides[b][k] for b, k in zip(rows, keys, strict=True)]
        frame["score"] = self.scores.detach().double().cpu().reshape(-1).numpy()
        mask = self.mask.cpu().numpy()
        real = mask[rows, keys] & mask[rows, frame["query"].to_numpy()]
        return frame.loc[real].reset_index(drop=True)

    @classmethod
    def _unpacked(cls, tensors: dict[str, Tensor], facts: dict[str, Any]) -> "Attribution":
        return super()._unpacked(tensors, {"sides": None} | facts | {"axes": tuple(facts["axes"])})

    def __sub__(self, other: "Attribution") -> "Attribution":
        """Scores minus another's, of the same prompt, queries and weight processing.

        Only logit differences are invariant to folding and centring, so mixed processing is refused.
        """
        if not isinstance(other, Attribution):
            return NotImplemented
        for name, left, right in (
            ("tokens", self.tokens, other.tokens),
            ("axes", self.axes, other.axes),
            ("queries", self.queries.tolist(), other.queries.tolist()),
            ("weight processing", *(a.provenance.get("weight_processing") for a in (self, other))),
        ):
            if left != right:
                values = f" ({left!r} and {right!r})" if name == "weight processing" else ""
                raise InvalidInputError(f"difference: the two differ in {name}{values}; compare like with like.")

        def difference(name: str) -> Tensor | None:
            a = getattr(self, name)
            b = getattr(other, name)
            return a - b if a is not None and b is not None else None

        additive = self.additive and other.additive
        return replace(
            self,
            scores=self.scores - other.scores,
            layers=difference("layers"),
            bias=difference("bias"),
            total=difference("total") if additive else None,
            residual=None,
            stderr=None,
            additive=additive,
            target=f"{self.target} − {other.target}",
            method=self.method if self.method == other.method else f"{self.method} − {other.method}",
            options={"left": self.options, "right": other.options},
        )


def _word_texts(tokens: list[str], words: list[int], count: int) -> list[str]:
    """The text of each word of a prompt: its tokens joined, without their marks of a word's start."""
    texts = [""] * count
    for token, word in zip(tokens, words, strict=True):
        if word >= 0:
            texts[word] += without_mark(token)
    return texts


def _word_sides(sides: list[str], words: list[int], count: int) -> list[str]:
    """The side of each word of a prompt, that of its first token; empty where the prompt has fewer words."""
    side_of = dict(zip(words[::-1], sides[::-1], strict=True))
    return [side_of.get(word, "") for word in range(count)]


def _check_fit(result: Attribution) -> None:
    """Raise ValueError unless the parts of a result fit together, whether it was computed or read from a file."""
    if not isinstance(result.scores, Tensor):
        raise ValueError(f"scores are {type(result.scores).__name__}, not a tensor")
    _check_axes(result)
    _check_shapes(result)
    _check_numbers(result)
    _check_prompts(result)


def _check_axes(result: Attribution) -> None:
    shape = tuple(result.scores.shape)
    sizes = dict(zip(result.axes, shape, strict=False))
    if len(result.axes) != len(shape):
        raise ValueError(f"scores have {len(shape)} axes, {shape}, but {len(result.axes)} are named, {result.axes}")
    if len(sizes) != len(shape) or [axis for axis in result.axes if axis in AXES] != list(AXES):
        raise ValueError(f"axes are {result.axes}; they must hold {', '.join(AXES)} once each, in this order")
    if result.axes[0] != "batch":
        raise ValueError(f"axes are {result.axes}; the first must be 'batch'")


def _check_shapes(result: Attribution) -> None:
    shape = tuple(result.scores.shape)
    batch, query, key = (shape[result.axes.index(axis)] for axis in AXES)
    if result.queries.shape == (batch, 1) and query == key > 1:
        raise ValueError(
            f"scores {shape} are of every query, but one query was named; name query=None, or pass that query's scores"
        )
    expected = dict.fromkeys(("queries", "bias", "total", "residual"), (batch, query))
    expected |= {"mask": (batch, key), "stderr": shape}
    for name, expected_shape in expected.items():
        tensor = getattr(result, name)
        if tensor is not None and tuple(tensor.shape) != expected_shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, not {expected_shape}")
    if result.layers is not None and (*result.layers.shape[1:2], result.layers.shape[-1]) != (batch, key):
        raise ValueError(f"layers is {tuple(result.layers.shape)}, not [layer, {batch}, …, {key}]")


def _check_numbers(result: Attribution) -> None:
    floating = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    kinds_fit = (
        result.mask.dtype == torch.bool,
        result.queries.dtype in (torch.int64, torch.int32),
        result.scores.dtype in floating,
    )
    if not all(kinds_fit):
        raise ValueError("mask, queries or scores are not of their kind")
    if bool(((result.queries < 0) | (result.queries >= result.mask.shape[1])).any()):
        raise ValueError("queries lie outside the prompt")


def _check_prompts(result: Attribution) -> None:
    """What is known of the prompts besides numbers: images, tokens, words and sides."""
    batch, key = result.mask.shape
    if result.image is not None and (result.image.ndim != 4 or len(result.image) != batch):
        raise ValueError(f"image is {tuple(result.image.shape)}, not [{batch}, channel, height, width]")
    for lines in (result.tokens, result.word_starts, result.sides):
        if lines is None:
            continue
        if len(lines) != batch or any(not isinstance(line, list | tuple) or len(line) != key for line in lines):
            raise ValueError(f"tokens are not {key} for each of {batch} prompts")
    if not all(isinstance(token, str) for line in result.tokens for token in line):
        raise ValueError("tokens are not text")
    if not all(isinstance(start, bool) for line in result.word_starts or () for start in line):
        raise ValueError("word_starts are not yes or no")
    if not all(side in ("encoder", "decoder", "") for line in result.sides or () for side in line):
        raise ValueError("sides are neither 'encoder' nor 'decoder'")
    if not isinstance(result.options, dict) or not isinstance(result.provenance, dict):
        raise ValueError("options or provenance are not tables")
