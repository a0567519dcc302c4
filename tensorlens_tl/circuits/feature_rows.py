"""Describe features by a data set: where they are most active, how often, and which tokens they promote.

Rows are read in batches, and only each feature's k largest examples are kept, so memory is bounded by one batch and the
examples, however many rows there are. A row gives a feature at most one example: its largest token.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from tensorlens_tl._arguments import checked_names, plain, whole_number
from tensorlens_tl.algebra.memory import Memory, chunks, slices
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.circuits.arguments import FeatureChoice, HookName, LabelsLike, RowsLike, Whole, Window
from tensorlens_tl.circuits.dictionary_features import Features, feature_labels, features as features_of
from tensorlens_tl.circuits.weights import stream_unembedding
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import ModelLike, ModelView
from tensorlens_tl.passes import freeze
from tensorlens_tl.passes.inputs import memory_batches, prepare, token_rows
from tensorlens_tl.passes.texts import readable_tokens
from tensorlens_tl.results import Entry, FeatureExamples

# ------------------------------------------------------------------ the largest so far

OCTAVE = 2
"""Histogram bins per factor of two."""

LOWEST = -10
HIGHEST = 15
"""Powers of two that the histogram spans; values beyond them are counted in its first and last bin."""

BINS = OCTAVE * (HIGHEST - LOWEST)


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples of features: rows of a data set, each at the token where the feature is largest.

    Attributes:
        peaks: the value there, `[feature, example]`.
        rows, positions: the row, and the position in it; −1 for no example.
        activations: the values around it, `[feature, example, window]`, zero outside the row.
        tokens: the token ids there; −1 outside the row.
    """

    peaks: Float[Tensor, "feature example"]
    rows: Int[Tensor, "feature example"]
    positions: Int[Tensor, "feature example"]
    activations: Float[Tensor, "feature example window"]
    tokens: Int[Tensor, "feature example window"]

    @classmethod
    def of(
        cls, values: Float[Tensor, "row pos feature"], tokens: Int[Tensor, "row pos"], rows: Int[Tensor, "row"],
        lengths: Int[Tensor, "row"], k: int, window: tuple[int, int],
    ) -> "Examples":  # fmt: skip
        """Return the largest examples of one batch: at most one per row, from the k rows with the largest values.

        Values are zero where a feature is not active; rows ascend, lengths count real tokens, and the window is the
        number of tokens before and after.
        """
        sizes = values.abs()
        size = sizes.amax(dim=1)
        positions = (sizes == size[:, None]).int().argmax(dim=1)  # the first of several that are alike
        order = size.argsort(dim=0, descending=True, stable=True)[:k].T  # [feature, example]
        at = positions.T.gather(1, order)
        before, after = window
        columns = at[..., None] + torch.arange(-before, after + 1, device=at.device)
        inside = (columns >= 0) & (columns < lengths[order][..., None])
        columns = columns.clamp(0, values.shape[1] - 1)
        features = torch.arange(values.shape[2], device=at.device)[:, None]
        peaks = values[order, at, features]
        active = peaks != 0
        around = values[order[..., None], columns, features[..., None]] * inside * active[..., None]
        ids = tokens[order[..., None], columns].masked_fill(~inside | ~active[..., None], -1)
        return cls(peaks, rows[order].masked_fill(~active, -1), at.masked_fill(~active, -1), around, ids)

    @classmethod
    def of_features(cls, parts: Sequence["Examples"]) -> "Examples":
        """Concatenate the examples of several groups of features."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))

    def merged(self, other: "Examples", k: int) -> "Examples":
        """Return the k largest of both; among equal examples, those of the earlier rows."""
        both = Examples(
            *(torch.cat([getattr(self, name), getattr(other, name)], dim=1) for name in self.__dataclass_fields__)
        )
        by_row = torch.where(both.rows < 0, torch.iinfo(torch.long).max, both.rows).argsort(dim=1, stable=True)
        sizes = both.peaks.abs().gather(1, by_row)
        order = by_row.gather(1, sizes.argsort(dim=1, descending=True, stable=True))[:, :k]
        wide = order[..., None].expand(-1, -1, both.tokens.shape[-1])
        numbers = (both.peaks, both.rows, both.positions)
        windows = (both.activations, both.tokens)
        return Examples(*(part.gather(1, order) for part in numbers), *(part.gather(1, wide) for part in windows))


def histogram(
    values: Float[Tensor, "active"], columns: Int[Tensor, "active"], features: int
) -> Int[Tensor, "feature bin"]:
    """Count each feature's values by size, in half octaves from 2**LOWEST to 2**HIGHEST."""
    bins = (OCTAVE * (values.double().abs().log2() - LOWEST)).floor().clamp(0, BINS - 1).long()
    return (columns * BINS + bins).bincount(minlength=features * BINS).reshape(features, BINS)


# ------------------------------------------------------------------ the rows of a data set

ROWS_AT_ONCE = 256
"""Rows that are read before they are grouped into batches of similar length."""

PROBED = 64
"""Tokens of the first row on which the dictionary is compared with its hook point and with its own `encode`."""

READERS = {
    ".csv": "pandas.read_csv({})['text']",
    ".tsv": "pandas.read_csv({}, sep='\\t')['text']",
    ".json": "pandas.read_json({})['text']",
    ".jsonl": "pandas.read_json({}, lines=True)['text']",
    ".parquet": "pandas.read_parquet({})['text']",
    ".txt": "open({}, encoding='utf-8').read().splitlines()",
}
"""How to read the rows of a file, by the end of its name."""


@checked_names
def feature_examples(
    model: ModelLike,
    dictionary: Any,
    input: RowsLike,
    features: FeatureChoice = None,
    *,
    hook: HookName = None,
    k: Whole = 20,
    window: Window = (12, 4),
    skip: Whole = 0,
    promoted: Whole = 10,
    labels: LabelsLike = None,
    truncate: bool = False,
    prepend_bos: bool | None = None,
    any_model: bool = False,
    memory: Memory = None,
) -> FeatureExamples:
    """Find the top activating examples of features over a data set, how often each is active, and what it promotes.

    Args:
        model: a TransformerLens model that reads tokens.
        dictionary, hook, any_model: as in `circuits.features`.
        input: texts or rows of token ids: a list, a tensor `[row, pos]`, or any iterable of them, such as
            ``dataset["text"]``, ``pandas.read_csv("rows.csv")["text"]`` or a generator. It is read once, some rows at a
            time. File names and whole tables are rejected.
        features: numbers or names (``"F12"``) of features, one or several; None is all of them. The position in
            a term's name, ``"F12@7"``, is ignored: examples are of all tokens.
        k: the number of examples per feature, from different rows.
        window: how many tokens an example shows before and after the largest one.
        skip: how many tokens to ignore at the beginning of each row; 1 leaves out a token that every row begins with,
            where many dictionaries have their largest values.
        promoted: how many of the tokens whose logits a feature's decoder row raises most are listed.
        labels: as in `feature_labels`.
        truncate: read only the beginning of a row that is longer than the model's context, which is otherwise an error.
        prepend_bos: as in `freeze`.
        memory: how much one batch may allocate, as ``"512MB"`` or bytes. The examples take a further
            features × k × window numbers.

    Returns:
        A `FeatureExamples`. Values are the dictionary's own, checked against its `encode` in every batch; examples are
        ordered by size. The promoted tokens follow from ``W_dec · W_U``, with the final norm's gain and centring but
        without its scale; there are none if no matrix leads from the stream to the logits.

    Raises:
        InvalidInputError: what `circuits.features` rejects; no rows, a file name or a table in their place, or a row
            that is neither text nor token ids; no such feature, or one twice; an invalid window or number.
        UnsupportedModelError: a model that reads no tokens, an encoder–decoder.

    >>> rows = tlens.demo.held_out_prompts(model, 8, 32)
    >>> examples = tlens.circuits.feature_examples(model, tlens.load_demo_dictionary(), rows, ["F357"], k=3)
    >>> [entry.token for entry in examples.top(2)]
    [' are', ' is']
    """
    view = ModelView(model)
    sizes = _window(window)
    k = whole_number("k", k, least=1, why="how many examples to keep")
    skip = whole_number("skip", skip, least=0, why="how many tokens at the beginning of a row to leave out")
    count = whole_number("promoted", promoted, least=0, why="how many tokens to list")
    rows = _rows(view, input, truncate, prepend_bos)
    first = next(rows, None)
    if first is None:
        raise InvalidInputError("input: there are no rows; pass texts or rows of token ids.")
    probe = features_of(freeze(model, first[None, :PROBED]), dictionary, hook, any_model=any_model, labels=labels)
    chosen = _chosen(probe, features)
    running = _Running(view, probe, chosen, k, sizes, skip)
    with tqdm(desc="rows", delay=2.0, unit=" rows", leave=False) as bar:
        stream = chain([first], rows)
        while some := list(islice(stream, ROWS_AT_ONCE)):
            running.read(some, memory)
            bar.update(len(some))
    return running.result(_promoted(view, probe, chosen, count), feature_labels(labels))


def _rows(view: ModelView, input: Any, truncate: bool, prepend_bos: bool | None) -> Iterator[Int[Tensor, "pos"]]:
    """Yield each row's token ids.

    Raises:
        InvalidInputError: neither texts nor token ids; an empty or too long row, or ids outside the vocabulary.
    """
    if view.reads != "tokens":
        raise UnsupportedModelError(
            f"feature_examples: {view.description} reads no tokens. circuits.features(frozen, dictionary) gives the "
            "features of its passes."
        )
    _check_no_file_or_table(input)
    if isinstance(input, str):
        input = [input]
    if isinstance(input, Mapping) or not isinstance(input, Iterable):
        raise InvalidInputError(
            f"input: cannot read {type(input).__name__} as rows; pass a list of texts, rows of token ids, or one "
            "column of a data set, such as dataset['text']."
        )
    for number, row in enumerate(input):
        if isinstance(row, Mapping):
            raise InvalidInputError(
                f"input: row {number} is a {type(row).__name__} with {', '.join(map(repr, row))}; pass the column that "
                "holds the texts, such as dataset['text']."
            )
        try:
            ids = token_rows(view, row, prepend_bos)
        except InvalidInputError as error:
            raise InvalidInputError(f"row {number}: {error}") from error
        if len(ids) != 1:
            raise InvalidInputError(f"input: row {number} holds {len(ids)} rows; pass texts or rows of token ids.")
        length = view.n_ctx
        if len(ids[0]) > length and not truncate:
            raise InvalidInputError(
                f"input: row {number} has {len(ids[0])} tokens, and the context of this model is {length}; cut it into "
                "pieces, or pass truncate=True to read its beginning."
            )
        outside = (ids[0] < 0) | (ids[0] >= view.d_vocab)
        if bool(outside.any()):
            raise InvalidInputError(
                f"input: row {number} has the token id {int(ids[0][outside][0])}, and the vocabulary ends at "
                f"{view.d_vocab - 1}. Does it come from another tokenizer?"
            )
        yield ids[0][:length].cpu()


class _Running:
    """The running examples and counts of the chosen features."""

    def __init__(
        self, view: ModelView, probe: Features, chosen: list[int], k: int, window: tuple[int, int], skip: int
    ) -> None:
        weights = probe.dictionary.W_enc
        self.view = view
        self.probe = probe
        self.chosen = chosen
        self.k = k
        self.window = window
        self.skip = skip
        self.column = torch.full((probe.dictionary.features,), -1, device=weights.device)
        self.column[chosen] = torch.arange(len(chosen), device=weights.device)
        self.examples: Examples | None = None
        self.counts = histogram(weights.new_empty(0), self.column[:0], len(chosen))
        self.n_rows = 0
        self.n_tokens = 0

    def read(self, rows: list[Tensor], memory: Memory) -> None:
        """Process some rows, which follow those read before."""
        for batch in memory_batches(self.view, [len(row) for row in rows], memory):
            batch = sorted(batch)
            self._read([rows[number] for number in batch], [self.n_rows + number for number in batch], memory)
        self.n_rows += len(rows)

    def _read(self, rows: list[Tensor], numbers: list[int], memory: Memory) -> None:
        lengths = torch.tensor([len(row) for row in rows])
        tokens = pad_sequence(rows, batch_first=True)
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        x = self._activations(tokens, mask)
        device = x.device
        seen = mask.to(device)
        seen[:, : self.skip] = False
        encoded = self.probe.dictionary.encode(x[seen], self.probe.frozen.tolerance)
        column = self.column[encoded.where[:, 1]]
        wanted = column >= 0
        column, values = column[wanted], encoded.values[wanted]
        row, position = seen.nonzero()[encoded.where[wanted, 0]].T

        def dense(part: range) -> Float[Tensor, "row pos feature"]:
            """Return the values of some of the chosen features at every token, zero where they are not active."""
            here = (column >= part.start) & (column < part.stop)
            whole = values.new_zeros(*tokens.shape, len(part))
            whole[row[here], position[here], column[here] - part.start] = values[here]
            return whole

        facts = (tokens.to(device), torch.tensor(numbers, device=device), lengths.to(device), self.k, self.window)
        per_feature = 4 * tokens.numel() * x.element_size()
        parts = chunks(len(self.chosen), per_feature, memory, "features")
        examples = Examples.of_features([Examples.of(dense(part), *facts) for part in parts])
        self.examples = examples if self.examples is None else self.examples.merged(examples, self.k)
        self.counts += histogram(values, column, len(self.chosen))
        self.n_tokens += int(seen.sum())

    def _activations(self, tokens: Int[Tensor, "row pos"], mask: Tensor) -> Float[Tensor, "row pos d_in"]:
        """Return the values at the hook point, for every token."""
        given: dict[str, Any] = {}
        if not bool(mask.all()):
            given["attention_mask"] = mask
        prompt = prepare(self.view, tokens, **given)
        hook = self.probe.hook
        held, _ = capture(self.view.model, prompt.kwargs, [hook], last=hook)
        return held[hook].reshape(*tokens.shape, -1).to(self.probe.dictionary.W_enc.device)

    def result(
        self, promoted: tuple[Int[Tensor, "feature token"], Float[Tensor, "feature token"]], labels: Mapping[int, str]
    ) -> FeatureExamples:
        """Return the examples, with readable tokens."""
        assert self.examples is not None  # there are rows
        texts, (windows, tokens) = _as_texts(self.view, [self.examples.tokens, promoted[0]])
        return FeatureExamples(
            features=self.chosen,
            labels=[labels.get(number, "") for number in self.chosen],
            activations=self.examples.activations.cpu(),
            tokens=windows,
            rows=self.examples.rows.cpu(),
            positions=self.examples.positions.cpu(),
            counts=self.counts.cpu(),
            promoted=tokens,
            promotion=promoted[1].cpu(),
            texts=texts,
            before=self.window[0],
            n_rows=self.n_rows,
            n_tokens=self.n_tokens,
            dictionary=self.probe.dictionary.name,
            hook=self.probe.hook,
            edges=[2 ** (LOWEST + step / OCTAVE) for step in range(OCTAVE * (HIGHEST - LOWEST) + 1)],
            provenance=dict(self.view.provenance()),
        )


def _promoted(
    view: ModelView, probe: Features, chosen: list[int], count: int
) -> tuple[Int[Tensor, "feature token"], Float[Tensor, "feature token"]]:
    """Return the tokens whose logits each feature's decoder row raises most, and by how much.

    There are none if no matrix leads from the stream to the logits of tokens.
    """
    rows = upcast(probe.dictionary.W_dec[chosen])
    none = (torch.empty(len(chosen), 0, dtype=torch.long), rows.new_empty(len(chosen), 0))
    try:
        W_U = upcast(stream_unembedding(view, fold_norms=True))
    except UnsupportedModelError:
        return none
    if not count:
        return none
    best = [
        (rows[part] @ W_U).topk(min(count, W_U.shape[1]))
        for part in slices(len(chosen), 3 * W_U.shape[1] * W_U.element_size(), None, "features")
    ]
    return torch.cat([top.indices for top in best]), torch.cat([top.values for top in best])


def _as_texts(view: ModelView, ids: list[Int[Tensor, "..."]]) -> tuple[list[str], list[Int[Tensor, "..."]]]:
    """Return every token that occurs as text, once, and the ids as indices into these; −1 stays."""
    device = torch.device("cpu")
    flat = torch.cat([part.to(device).flatten() for part in ids])
    known = flat[flat >= 0].unique()
    if not len(known):
        return [], [part.to(device) for part in ids]
    texts = readable_tokens(view, known[None])[0][0]
    return texts, [
        torch.where(part.to(device) < 0, -1, torch.searchsorted(known, part.to(device).contiguous())) for part in ids
    ]


def _check_no_file_or_table(input: Any) -> None:
    """Raise `InvalidInputError` for a file name, which would be read as text, or a table, read by its column names."""
    if hasattr(input, "to_dict") and hasattr(input, "columns"):  # a data frame
        names = ", ".join(map(repr, input.columns))
        raise InvalidInputError(
            f"input: {type(input).__name__} is a table with {names}; pass the column that holds the texts, such as "
            "table['text']."
        )
    if not isinstance(input, str | os.PathLike):
        return
    path = os.fspath(input)
    reader = READERS.get(Path(path).suffix.lower())
    if reader is not None and "\n" not in path:
        raise InvalidInputError(
            f"input: {path!r} is the name of a file, and rows are texts or token ids; read it first, and pass the "
            f"column that holds the texts, such as {reader.format(repr(path))}. If it is the text itself, pass "
            f"input=[{path!r}]."
        )


def _window(window: Any) -> tuple[int, int]:
    values = plain(window)
    if not isinstance(values, list | tuple) or len(values) != 2:
        raise InvalidInputError(f"window={window!r}: pass how many tokens before and how many after, such as (12, 4).")
    before, after = (whole_number("window", size, least=0, why="tokens before and after") for size in values)
    return before, after


def _chosen(probe: Features, features: Any) -> list[int]:
    """Return the numbers of the features, in the given order."""
    if features is None:
        return list(range(probe.dictionary.features))
    values = plain(features)
    if isinstance(values, str | Entry) or not isinstance(values, Iterable):
        values = [values]
    names = [feature.name if isinstance(feature, Entry) else feature for feature in values]
    # a term's name may have a position, as "F12@7"
    plain_names = [re.sub(r"^(F\d+)@\d+$", r"\1", name) if isinstance(name, str) else name for name in names]
    numbers = [probe.checked(name) for name in plain_names]
    if not numbers:
        raise InvalidInputError("features=[]: name at least one, or leave it out for all of them.")
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise InvalidInputError(f"features: F{twice} is named twice; name each feature once.")
    return numbers
