"""The features of a sparse dictionary in one frozen pass: where it reads and writes, and which features are active.

The set of active features is frozen, as patterns, ratios and scales are. The encoder is then affine, and so is the
reconstruction error: whatever reads the stream reads features, error and b_dec as separate terms. How dictionaries are
loaded: `tensorlens_tl.models.dictionaries`.

Hook point names differ between the classes of TransformerLens and do not always mean what they say (`hook_resid_mid`
of a post-LN Bridge is the sum after the MLP), so the values at a hook point decide: in this pass they must be the
stream before a step of the block, or the input or output of that block's MLP. Anything else is rejected.

Feature labels come from a CSV or JSON file, or from a mapping.
"""

import csv
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.algebra import ZERO, AffineMap, Chain, Diagonal, Identity, Norm
from tensorlens_tl.algebra.memory import slices
from tensorlens_tl.algebra.numerics import relative_error, widest
from tensorlens_tl.circuits.arguments import FeatureLike, HookName, LabelsLike
from tensorlens_tl.circuits.stream import Stream
from tensorlens_tl.drawing import figure, matrix, terminal
from tensorlens_tl.drawing.marks import number, visible
from tensorlens_tl.errors import FileFormatError, InvalidInputError, NumericalError, warn_caller
from tensorlens_tl.hooks import capture
from tensorlens_tl.models import DictionaryWeights, FrozenRule, read_dictionary
from tensorlens_tl.passes import FrozenPass, PassLike, check_pass
from tensorlens_tl.passes.inputs import one_query
from tensorlens_tl.results import Entry, Parts, Scored, check_batch

if TYPE_CHECKING:
    import pandas as pd

# ------------------------------------------------------------------ where it reads and writes

RESIDUAL = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post")
MLP_IN = ("mlp.hook_in", "ln2.hook_normalized", "ln1.hook_normalized")
MLP_OUT = ("hook_mlp_out", "mlp.hook_out")


@dataclass(frozen=True, order=True)
class StreamAt:
    """The residual stream before one step of a block; ``(n_layers, 0)`` is the last block's output."""

    layer: int
    step: int


@dataclass(frozen=True, eq=False)
class ReadAt:
    """Where an encoder reads.

    Attributes:
        place: the stream that it reads.
        through: what the stream passes on the way: nothing, or the norm before an MLP; positionwise.
        x: the values at the hook point, `[batch, pos, d_in]`.
    """

    place: StreamAt
    through: AffineMap
    x: Float[Tensor, "batch pos d_in"]


@dataclass(frozen=True, eq=False)
class WriteAt:
    """Where a decoder writes.

    Attributes:
        place: the stream that contains the output, after `outer`.
        outer: what the sum passes before that (a post-LN norm); positionwise.
        after: what the written vector passes before it is added (a norm after an MLP); positionwise.
        x: what is reconstructed, `[batch, pos, d_out]`: the stream, or an MLP's output.
        beside: everything else in the sum, `[batch, pos, d_model]`; None where the whole stream is reconstructed.
        beside_name: the term's name for `beside`.
    """

    place: StreamAt
    outer: AffineMap
    after: AffineMap
    x: Float[Tensor, "batch pos d_out"]
    beside: Float[Tensor, "batch pos d_model"] | None = None
    beside_name: str = ""


def stream_to(frozen: FrozenPass, place: StreamAt, rule: FrozenRule) -> Stream:
    """Return the stream from the embeddings to a place."""
    layers = slice(0, min(place.layer + 1, frozen.n_layers))
    stream = Stream.of(frozen, rule, layers=layers, final_norm=False, to_tokens=False)
    return replace(stream, steps=stream.steps[: stream.step_at(place.layer, place.step)])


def read_at(frozen: FrozenPass, hook: str, *, mlp: bool) -> ReadAt:
    """Find where a dictionary's encoder reads; `mlp` also allows an MLP's input besides the stream.

    Raises:
        InvalidInputError: no such hook point, or it shows neither.
    """
    layer, x = _held(frozen, hook, mlp)
    stream = Stream.of(frozen, layers=slice(layer, layer + 1), final_norm=False, to_tokens=False)
    candidates: list[tuple[StreamAt, AffineMap, Tensor]] = [
        (_place(stream, step), Identity(), before) for step, before in enumerate(stream.x)
    ]
    for at, step in enumerate(stream.steps):
        norm = next((sublayer.read.stages[0] for sublayer in step.sublayers if sublayer.is_mlp), None)
        if mlp and isinstance(norm, Norm):
            for through in (norm, replace(norm, gain=None, shift=None)):
                candidates.append((StreamAt(layer, at), through, through(stream.x[at])))
    for place, through, read in candidates:
        if _same(frozen, read, x):
            return ReadAt(place, through, x)
    what = "the residual stream"
    if mlp:
        what += " or what the MLP reads"
    raise _other(frozen, layer, hook, what, mlp)


def write_at(frozen: FrozenPass, hook: str) -> WriteAt:
    """Find where a transcoder's decoder writes: an MLP's output, before or after a norm that follows it.

    Raises:
        InvalidInputError: no such hook point, or it shows something else.
    """
    layer, x = _held(frozen, hook, True)
    stream = Stream.of(frozen, layers=slice(layer, layer + 1), final_norm=False, to_tokens=False)
    for at, step in enumerate(stream.steps):
        hidden = dict(zip(step.sublayers, stream.hidden[at], strict=True))
        for sublayer in [sublayer for sublayer in step.sublayers if sublayer.is_mlp]:
            *inside, last = sublayer.write.stages
            ends: list[tuple[Chain, AffineMap]] = [(sublayer.write, Identity())]
            if isinstance(last, Norm):
                ends.append((Chain(tuple(inside)), last))
            for output, after in ends:
                if _same(frozen, output(hidden[sublayer]), x):
                    others = (s.write(h) for s, h in hidden.items() if s is not sublayer)
                    beside = sum(others, start=stream.x[at])
                    if after.bias is not ZERO:
                        beside = beside + after.bias
                    return WriteAt(_place(stream, at + 1), step.outer, after, x, beside, f"beside {sublayer.name}")
    raise _other(frozen, layer, hook, "what the MLP gives", True)


def _same(frozen: FrozenPass, candidate: Tensor, expected: Tensor) -> bool:
    return candidate.shape == expected.shape and relative_error(candidate, expected, frozen.mask) <= frozen.tolerance


def _place(stream: Stream, step: int) -> StreamAt:
    """Return the place of the stream before a step; the end of a block is the beginning of the next."""
    (layer,) = stream.layers
    return StreamAt(layer + 1, 0) if step == len(stream.steps) else StreamAt(layer, step)


def _held(frozen: FrozenPass, hook: str, mlp: bool) -> tuple[int, Tensor]:
    """Return a hook point's block, and its values in this pass."""
    frozen.view.require_chain("sparse dictionaries")
    match = re.match(r"blocks\.(\d+)\.", hook)
    # GPT-1's last output is at no hook point of a block
    ends = {frozen.capture.output_name(layer): layer for layer in range(frozen.n_layers)}
    layer = ends.get(hook, -1)
    if match:
        layer = int(match[1])
    if hook not in frozen.model.hook_dict or not 0 <= layer < frozen.n_layers:
        near = min(max(layer, 0), frozen.n_layers - 1)
        raise InvalidInputError(
            f"hook={hook!r} is no hook point of a block of this {frozen.view.description}, which has "
            f"{frozen.n_layers}; of blocks.{near} there are {', '.join(_names(frozen, near, mlp))}."
        )
    if hook in frozen.capture.activations:
        return layer, frozen.activation(hook)
    frozen.live(f"hook={hook!r}").check_hooks()
    activations, _ = capture(frozen.model, frozen.inputs, [hook], last=hook, optional=[hook])
    if hook not in activations:
        raise _other(frozen, layer, hook, "anything (it does not fire)", mlp)
    x = activations[hook].to(frozen.tokens.device)
    if x.ndim <= 2:
        x = x.reshape(*frozen.tokens.shape, x.shape[-1])
    return layer, x


def _names(frozen: FrozenPass, layer: int, mlp: bool) -> list[str]:
    """List the hook points of a block that a dictionary may use."""
    known = frozen.model.hook_dict
    at = frozen.view.blocks[layer].name
    suffixes = list(RESIDUAL)
    if mlp:
        suffixes += [*MLP_IN, *MLP_OUT]
    names = [f"{at}.{suffix}" for suffix in suffixes]
    stream_names = [frozen.points.blocks[layer].resid_pre, frozen.capture.output_name(layer)]
    return list(dict.fromkeys(name for name in (*stream_names, *names) if name in known))


def _other(frozen: FrozenPass, layer: int, hook: str, what: str, mlp: bool) -> InvalidInputError:
    return InvalidInputError(
        f"hook={hook!r} does not hold {what} in this {frozen.view.description}. Try one of "
        f"{', '.join(_names(frozen, layer, mlp))}: what each of them holds is compared with the model's own steps."
    )


# ------------------------------------------------------------------ what features are called

NUMBER_COLUMNS = ("feature", "index", "feature_id", "id")
LABEL_COLUMNS = ("label", "description", "explanation", "name")
"""Columns that are read, the first of each that a file has; Neuronpedia exports have `index` and `description`."""

ENDINGS = (".csv", ".tsv", ".json")


@checked_names
def feature_labels(labels: LabelsLike) -> dict[int, str]:
    """Read labels of features from a file or a mapping.

    Args:
        labels: a path, or a mapping of features (``12``, ``"12"`` or ``"F12"``) to texts. A ``.csv`` or ``.tsv`` file
            has a header with a column of `NUMBER_COLUMNS` and one of `LABEL_COLUMNS`; a ``.json`` file is an object
            ``{"12": "a label"}``, or a list of objects with such keys. Empty labels are dropped.

    Raises:
        FileFormatError: a file in another format, or one that labels a feature twice.
        InvalidInputError: neither a path nor a mapping, another file extension, or an invalid feature or label.
        OSError: there is no such file.

    >>> tlens.circuits.feature_labels({"F12": "forms of *to be*"})
    {12: 'forms of *to be*'}
    """
    if labels is None:
        return {}
    if isinstance(labels, Mapping):
        return dict(_checked(labels.items()))
    if not isinstance(labels, str | os.PathLike):
        raise InvalidInputError(
            f"labels: cannot read a {type(labels).__name__}; pass a mapping such as {{12: 'a label'}}, or the path of "
            "a CSV or JSON file."
        )
    path = Path(labels)
    if path.suffix.lower() not in ENDINGS:
        raise InvalidInputError(f"labels: {path.name!r} ends in {path.suffix!r}; use one of {', '.join(ENDINGS)}.")
    read: dict[int, str] = {}
    try:
        for number, label in _checked(_lines(path)):
            if number in read:
                raise InvalidInputError(f"feature {number} is labelled twice, {read[number]!r} and {label!r}")
            read[number] = label
    except (InvalidInputError, UnicodeDecodeError, json.JSONDecodeError, csv.Error) as error:
        raise FileFormatError(f"{path}: no labels of features ({error}).") from error
    return read


def names_with_labels(names: Iterable[str], labels: Mapping[int, str]) -> dict[str, str]:
    """Map the names of parts that are labelled features, such as ``"F12@7"`` and ``"L2.F12"``, to their labels.

    >>> from tensorlens_tl.circuits.dictionary_features import names_with_labels
    >>> names_with_labels(["F12@7", "error@7", "F3@7"], {12: "to be"})
    {'F12@7': 'to be'}
    """
    labelled: dict[str, str] = {}
    for name in names:
        match = re.search(r"(?:^|\.)F(\d+)(?:@\d+)?$", name)
        if match and int(match[1]) in labels:
            labelled[name] = labels[int(match[1])]
    return labelled


def _lines(path: Path) -> list[tuple[Any, Any]]:
    """Return the features and labels of a file, unchecked."""
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix.lower() == ".json":
        content = json.loads(text)
        if isinstance(content, Mapping):
            return list(content.items())
        if not isinstance(content, list) or not all(isinstance(row, Mapping) for row in content):
            raise InvalidInputError('it is neither an object {"12": "a label"} nor a list of objects')
        rows = content
    else:
        delimiter = ","
        if path.suffix.lower() == ".tsv":
            delimiter = "\t"
        rows = list(csv.DictReader(text.splitlines(), delimiter=delimiter))
    if not rows:
        return []
    number, label = (_column(rows[0], names) for names in (NUMBER_COLUMNS, LABEL_COLUMNS))
    return [(row.get(number), row.get(label)) for row in rows]


def _column(row: Mapping[str, Any], names: Iterable[str]) -> str:
    """Return the first of some names that a row has."""
    for name in names:
        if name in row:
            return name
    raise InvalidInputError(f"its columns are {', '.join(map(repr, row))}; one of {', '.join(names)} is needed")


def _checked(lines: Iterable[tuple[Any, Any]]) -> Iterable[tuple[int, str]]:
    for feature, label in lines:
        number = feature
        if isinstance(feature, str) and re.fullmatch(r"F?\d+", feature.strip()):
            number = int(feature.strip().removeprefix("F"))
        number = whole_number("labels: feature", number, least=0, why="a feature's number, or its name such as 'F12'")
        if label is not None and not isinstance(label, str):
            raise InvalidInputError(f"labels: feature {number} has the label {label!r}; pass a text.")
        if label and label.strip():
            yield number, label.strip()


# ------------------------------------------------------------------ the features of a pass

MANY = 100
"""More active features per token than a reader can follow in a table or graph."""


@dataclass(frozen=True, eq=False, repr=False)
class Features(Scored):
    """The active features of a dictionary in one frozen pass, as returned by `features`.

    `show`, `plot` and a notebook list the most active ones at a token; `save` writes tables, figures and pages. The
    token is selected by `query`, a position among the prompt's real tokens or a text, and by `batch`; the default is
    the last token of the first prompt.

    Attributes:
        frozen: the pass.
        dictionary: its weights.
        hook, hook_out: where it reads, and what it reconstructs (the same for an autoencoder).
        reads, writes: the same as places of the stream.
        index: prompt, position and feature of every active feature at a real token, `[active, 3]`, in this order.
        values: their activations, `[active]`.
        reconstruction: the dictionary's output, `[batch, pos, d_out]`; zero at padding.
        labels: labels of features by number, which results and pictures of these features show.
    """

    frozen: FrozenPass
    dictionary: DictionaryWeights
    hook: str
    hook_out: str
    reads: ReadAt
    writes: WriteAt
    index: Int[Tensor, "active 3"]
    values: Float[Tensor, "active"]
    reconstruction: Float[Tensor, "batch pos d_out"]
    labels: Mapping[int, str] = field(default_factory=dict[int, str])

    LOADABLE: ClassVar = ()
    """None: features contain a pass and a dictionary. Their tables, figures and pages can be saved."""

    def __repr__(self) -> str:
        hooks = " -> ".join(dict.fromkeys((repr(self.hook), repr(self.hook_out))))
        return (
            f"Features({self.dictionary.name} at {hooks}, {self.dictionary.features} features, "
            f"{self.active_per_token:.1f} active at a token, explained={self.explained:.3f})"
        )

    @property
    def provenance(self) -> dict[str, str]:
        """What they depend on besides the prompts, as for `Attribution`."""
        return self.frozen.provenance()

    @cached_property
    def error(self) -> Float[Tensor, "batch pos d_out"]:
        """The reconstruction error, zero at padding."""
        return (self.writes.x - self.reconstruction) * self.frozen.mask[..., None]

    @property
    def active_per_token(self) -> float:
        """L0: the mean number of active features per real token."""
        return len(self.values) / int(self.frozen.mask.sum())

    @property
    def explained(self) -> float:
        """The share of variance that the reconstruction explains, over all real tokens of the pass."""
        x = self.writes.x[self.frozen.mask]
        return 1 - float(self.error.square().sum() / (x - x.mean(0)).square().sum())

    def value(self, feature: FeatureLike) -> Float[Tensor, "batch pos"]:
        """Return one feature's activation at every token, zero where it is not active.

        Raises:
            InvalidInputError: no such feature.

        >>> sae = tlens.circuits.features(frozen, tlens.load_demo_dictionary())
        >>> sae.value(sae.top(1)[0][0]).shape  # batch pos
        torch.Size([1, 7])
        """
        values = self.values.new_zeros(self.frozen.tokens.shape)
        here = self.index[:, 2] == self.checked(feature)
        values[self.index[here, 0], self.index[here, 1]] = self.values[here]
        return values

    def checked(self, feature: FeatureLike | Entry) -> int:
        """Return a feature's number, given its number, its name ``"F12"``, or an `Entry` that `top` returned.

        Raises:
            InvalidInputError: no such feature.
        """
        if isinstance(feature, Entry):  # as `top` returns them
            feature = feature.name
        if isinstance(feature, str) and re.fullmatch(r"F\d+", feature):
            feature = int(feature[1:])
        return whole_number("feature", feature, 0, self.dictionary.features - 1, why="a feature of this dictionary")

    @cached_property
    def reader(self) -> AffineMap:
        """The map from the stream to the encoder's input, with scales frozen."""
        how = self.dictionary.normalised(self.reads.x)
        if how is None:
            return chained([self.reads.through])
        return chained([self.reads.through, Norm(how.divided_by, centre=how.centred)])

    @cached_property
    def writer(self) -> AffineMap:
        """The map that the decoder's output passes: the frozen scale of a dictionary that normalises."""
        how = self.dictionary.normalised(self.reads.x)
        return Identity() if how is None else Diagonal(how.multiplied_by)

    def gains(self, g: Float[Tensor, "row batch pos d_out"]) -> Float[Tensor, "row active"]:
        """Return what a target gains per unit of each active feature, along its vector where the dictionary writes.

        Parts are often hundreds of times larger than their sum, so the products are in float64.
        """
        g = self.writer.pull(g)
        gains = widest(g[:0]).new_zeros(len(g), len(self.values))
        for part in slices(len(self.values), (len(g) + 2) * g.shape[-1] * gains.element_size(), None, "features"):
            prompt, position, feature = self.index[part].T
            W_dec = widest(self.dictionary.W_dec[feature])
            gains[:, part] = torch.einsum("rad,ad->ra", widest(g[:, prompt, position]), W_dec)
        return gains

    @cached_property
    def others(self) -> dict[str, Float[Tensor, "batch pos d_out"]]:
        """The other summands of the output, zero at padding: b_dec, and any mean that the dictionary adds back."""
        b_dec = self.writer(self.dictionary.b_dec.expand_as(self.error))
        parts = {"b_dec": b_dec} | self.dictionary.beside(self.reads.x)
        return {name: part * self.frozen.mask[..., None] for name, part in parts.items()}

    def pre_activation(
        self, features: Int[Tensor, "row"], positions: Int[Tensor, "row batch"]
    ) -> Float[Tensor, "row batch"]:
        """Return the pre-activations of some features, at one position of every prompt for each."""
        read = self.dictionary.reads(self.reads.x)
        here = read[torch.arange(len(read), device=read.device), positions]
        return (
            torch.einsum("rbd,dr->rb", here, self.dictionary.W_enc[:, features]) + self.dictionary.b_enc[features, None]
        )

    # ------------------------------------------------------------------ as tables and pictures

    def _parts(self, query: int | str = -1, batch: int = 0) -> Parts:
        """Return the active features at one token, with their labels."""
        batch, position = self._place(query, batch)
        here = (self.index[:, 0] == batch) & (self.index[:, 1] == position)
        numbers = self.index[here, 2].tolist()
        names = [f"F{feature}" for feature in numbers]
        labels = {f"F{feature}": self.labels.get(feature, "") for feature in numbers}
        return Parts(self.values[here], names, [position] * len(names), labels)

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per active feature of every token: batch, position, token, feature, label, activation.

        >>> frame = tlens.circuits.features(frozen, tlens.load_demo_dictionary()).to_dataframe()
        >>> list(frame.columns)
        ['batch', 'position', 'token', 'feature', 'label', 'activation']
        """
        import pandas as pd

        batch, position, feature = self.index.T.tolist()
        tokens = self.frozen.str_tokens
        columns = {"batch": batch, "position": position}
        columns["token"] = [tokens[b][p] for b, p in zip(batch, position, strict=True)]
        columns["feature"] = feature
        columns["label"] = [self.labels.get(number, "") for number in feature]
        columns["activation"] = self.values.detach().double().cpu().tolist()
        return pd.DataFrame(columns)

    @property
    def heading(self) -> str:
        """The title of the HTML page."""
        return f"Active features of {self.dictionary.name} at {self.hook}"

    def _html(self, k: int, query: int | str = -1, batch: int = 0) -> str:
        """Show the k most active features at one token as rows, with their activations at every token."""
        rows, tokens, plane = self._plane(k, query, batch)
        parts = ["<p>No feature is active at this token.</p>"]
        if rows:
            parts = [matrix.matrix(rows, tokens, plane, label=self.heading, corner="feature ↓ token →")]
        notes = [self._which(query, batch), f"{self.explained:.1%} of the variance is explained"]
        return self._panel(*parts, notes=notes)

    def _figure(self, k: int, query: int | str = -1, batch: int = 0, *, ax: Any) -> Any:
        """Plot the matrix of `_html`."""
        rows, tokens, plane = self._plane(k, query, batch)
        if not rows:
            raise InvalidInputError(f"plot: no feature of {self.dictionary.name} is active at query={query!r}.")
        return figure.heat_map(plane, rows, tokens, self._which(query, batch), ax, names=("feature", "token"))

    def _print(self, k: int, query: int | str = -1, batch: int = 0) -> None:
        rows = [(entry.labelled, number(entry.score)) for entry in self.top(k, query=query, batch=batch)]
        caption = f"{self.dictionary.name} at {self.hook} explains {self.explained:.1%} of the variance"
        terminal.show_table(
            self._which(query, batch), ("feature", "activation"), rows, left=("feature",), caption=caption
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NoReturn:
        """Raise an error: features contain the pass and the dictionary, which are not saved.

        Raises:
            InvalidInputError: always; it says how to compute them again.
        """
        raise InvalidInputError(
            f"{cls.__name__}.load({str(path)!r}): features hold a pass and a dictionary, which are not saved. "
            "Call circuits.features(frozen, dictionary) again; tables (.csv, .parquet, .json) are read with pandas."
        )

    def _place(self, query: int | str, batch: int) -> tuple[int, int]:
        """Return the prompt and position of a token."""
        check_batch(batch, self.frozen.str_tokens)
        batch %= len(self.frozen.tokens)
        return batch, int(one_query(self.frozen.prompt, query)[batch, 0])

    def _which(self, query: int | str, batch: int) -> str:
        """Describe the selected token, and how many features are active there."""
        batch, position = self._place(query, batch)
        count = int(((self.index[:, 0] == batch) & (self.index[:, 1] == position)).sum())
        token = visible(self.frozen.str_tokens[batch][position])
        which = f"{count} features active at {position} {token!r}"
        if len(self.frozen.tokens) > 1:
            which += f", prompt {batch} of {len(self.frozen.tokens)}"
        return which

    def _plane(self, k: int, query: int | str, batch: int) -> tuple[list[str], list[str], np.ndarray]:
        """Return labels of the most active features at a token, the prompt's real tokens, and their activations."""
        entries = self.top(k, query=query, batch=batch)
        batch, _ = self._place(query, batch)
        row_of = {int(entry.name[1:]): row for row, entry in enumerate(entries)}
        plane = np.zeros((len(entries), self.frozen.tokens.shape[1]))
        of_prompt = self.index[:, 0] == batch
        active = zip(self.index[of_prompt].tolist(), self.values[of_prompt].tolist(), strict=True)
        for (_, position, feature), value in active:
            if feature in row_of:
                plane[row_of[feature], position] = value
        real = self.frozen.mask[batch].cpu().numpy()
        tokens = [token for token, shown in zip(self.frozen.str_tokens[batch], real.tolist(), strict=True) if shown]
        return [entry.labelled for entry in entries], tokens, plane[:, real]


def chained(maps: Iterable[AffineMap]) -> AffineMap:
    """Compose maps in order, without identities."""
    stages = [m for m in maps if not isinstance(m, Identity)]
    if not stages:
        return Identity()
    return Chain(tuple(stages))


if TYPE_CHECKING:
    FeaturesLike = Features
    """Features as a user passes them."""
else:
    FeaturesLike = Any  # our errors say what is wrong


@checked_names
def features(
    frozen: PassLike,
    dictionary: Any,
    hook: HookName = None,
    *,
    hook_out: HookName = None,
    any_model: bool = False,
    labels: LabelsLike = None,
) -> Features:
    """Find the active features of a sparse dictionary in a frozen pass.

    Args:
        frozen: the pass.
        dictionary: any object with ``W_enc`` `[d_model, feature]` and ``W_dec`` `[feature, d_model]`, such as one of
            SAELens; see `tensorlens_tl.models.dictionaries.read_dictionary`.
        hook: the hook point that it reads: in the residual stream, or, for a transcoder, at an MLP's input. None uses
            the dictionary's own `hook_name`.
        hook_out: for a transcoder, the hook point that it reconstructs: an MLP's output (`hook_name_out`).
        any_model: accept a dictionary that was trained on another model (a fine-tuned model's base, for example) or at
            another hook point.
        labels: labels of features: a mapping, or a CSV or JSON file; see `feature_labels`.

    Warns:
        UserWarning: more than `MANY` features are active at a token on average.

    Raises:
        InvalidInputError: no such hook point, or one with other values; a dictionary of another width, dtype, model or
            hook point; a gated dictionary, or one that computes something else than its weights say; and what
            `read_dictionary` rejects.
        NumericalError: weights that are not finite.
        UnsupportedModelError: an encoder–decoder.

    >>> sae = tlens.circuits.features(frozen, tlens.load_demo_dictionary())
    >>> sae.top(1)[0][0].startswith("F")
    True
    """
    check_pass(frozen)
    read = read_dictionary(dictionary, transcodes=hook_out is not None or None)
    named = _labels_of(read, labels)
    if hook is None:
        hook = read.hook
    for name, point in (("hook", hook), ("hook_out", hook_out)):
        if point is not None and not isinstance(point, str):
            raise InvalidInputError(
                f"{name}={point!r}: pass the name of a hook point, such as {frozen.capture.output_name(0)!r}."
            )
    if hook is None:
        raise InvalidInputError(
            f"features: this {read.name} does not say where it belongs; pass hook=, such as "
            f"{frozen.capture.output_name(0)!r}."
        )
    if read.transcodes:
        hook_out = hook_out or read.hook_out or f"{'.'.join(hook.split('.')[:2])}.{MLP_OUT[0]}"
    _check_fit(frozen, read, hook, any_model)
    reads = read_at(frozen, hook, mlp=read.transcodes)
    if not any_model:
        _check_place(frozen, read, hook, reads)
    if hook_out is None:
        writes = WriteAt(reads.place, Identity(), Identity(), reads.x)
    else:
        writes = write_at(frozen, hook_out)
        if writes.place < reads.place:
            raise InvalidInputError(f"features: hook_out={hook_out!r} comes before hook={hook!r}.")
    mask = frozen.mask
    read = read.fitting(reads.x[mask])
    encoding = read.encode(reads.x[mask], frozen.tolerance)
    if not bool(torch.isfinite(encoding.values).all() and torch.isfinite(encoding.decoded).all()):
        raise NumericalError(f"features: {read.name} overflows; use a wider dtype for model and dictionary.")
    reconstruction = torch.zeros_like(writes.x)
    reconstruction[mask] = encoding.decoded
    tokens = mask.nonzero()[encoding.where[:, 0]]
    index = torch.cat([tokens, encoding.where[:, 1:]], dim=1)
    active = Features(
        frozen, read, hook, hook_out or hook, reads, writes, index, encoding.values, reconstruction, named
    )
    if active.active_per_token > MANY:
        warn_caller(
            f"features: {active.active_per_token:.0f} of {read.features} features of this {read.name} are active at a "
            "token on average, too many to read one by one. Look at the largest, with features.top(k), "
            "terms.top(k, names='F*') and contribution_graph(..., features=k), or use a sparser dictionary: one with a "
            "higher threshold, a smaller k or a larger sparsity penalty. Hundreds can also mean that the dictionary "
            "reads another hook point than it was trained on.",
        )
    return active


def _labels_of(read: DictionaryWeights, labels: LabelsLike) -> dict[int, str]:
    """Return the labels of a dictionary's features.

    Raises:
        InvalidInputError: a label for a feature that the dictionary does not have.
    """
    named = feature_labels(labels)
    unknown = [number for number in named if number >= read.features]
    if unknown:
        raise InvalidInputError(
            f"labels: there is one for feature {unknown[0]}, but this {read.name} has {read.features} features, 0 to "
            f"{read.features - 1}. Do they belong to another dictionary?"
        )
    return named


def _check_fit(frozen: FrozenPass, read: DictionaryWeights, hook: str, any_model: bool) -> None:
    """Reject a dictionary of another width, dtype, device or model."""
    x = frozen.resid_pre(0)
    weight = read.W_enc
    width = x.shape[-1]
    for name, of in (("reads", read.W_enc.shape[0]), ("writes", read.W_dec.shape[1])):
        if of != width:
            raise InvalidInputError(
                f"dictionary: this {read.name} {name} vectors of {of} numbers, {hook} of this "
                f"{frozen.view.description} has {width}. Is it another model's?"
            )
    if weight.dtype != x.dtype or weight.device != x.device:
        raise InvalidInputError(
            f"dictionary: this {read.name} is {weight.dtype} on {weight.device}, the model's stream {x.dtype} on "
            f"{x.device}. Convert one of them, such as dictionary.to({x.dtype})."
        )
    model_name = str(getattr(frozen.view.cfg, "model_name", "custom"))
    if read.model_name is None or any_model or model_name in ("custom", "external", "native"):
        return
    if _plain_name(str(read.model_name)) != _plain_name(model_name):
        raise InvalidInputError(
            f"dictionary: this {read.name} was trained on {read.model_name!r}, and this model is {model_name!r}. Pass "
            "any_model=True if the two belong together."
        )


def _check_place(frozen: FrozenPass, read: DictionaryWeights, hook: str, reads: ReadAt) -> None:
    """Reject a dictionary that was trained at another place; one place may have several names."""
    if read.hook is None or read.hook == hook:
        return
    try:
        expected = read_at(frozen, str(read.hook), mlp=read.transcodes)
    except InvalidInputError:  # a name from another class of models
        return
    if expected.place != reads.place:
        raise InvalidInputError(
            f"hook={hook!r}: this {read.name} says that it belongs at {read.hook!r}. Leave hook out, or pass "
            "any_model=True to read it elsewhere."
        )


def _plain_name(name: str) -> str:
    """Return a model's name without its publisher, with TransformerLens aliases resolved."""
    try:
        from transformer_lens.loading_from_pretrained import get_official_model_name

        name = get_official_model_name(name)
    except (ImportError, ValueError):
        pass
    return name.rsplit("/", 1)[-1].lower()
