"""The features of a sparse dictionary in one frozen pass.

Which features are active is held, as patterns, ratios and scales are. The encoder is then affine, and so is the error
of the reconstruction: whatever reads the stream reads features, error and b_dec, as separate terms. How the
dictionary is read: `tensorlens_tl.models.dictionaries`; where it stands:
`tensorlens_tl.circuits.dictionary_features.hook_points`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_names, whole_number
from tensorlens_tl.algebra import AffineMap, Chain, Diagonal, Identity, Norm
from tensorlens_tl.circuits.arguments import FeatureLike, HookName, LabelsLike
from tensorlens_tl.circuits.dictionary_features.hook_points import ReadAt, WriteAt, mlp_output, read_at, write_at
from tensorlens_tl.circuits.dictionary_features.labels import feature_labels
from tensorlens_tl.circuits.dictionary_features.shown import ShownFeatures
from tensorlens_tl.errors import InvalidInputError, NumericalError, warn_caller
from tensorlens_tl.models import DictionaryWeights, read_dictionary
from tensorlens_tl.passes import FrozenPass, PassLike, check_pass
from tensorlens_tl.results import Entry

MANY = 100
"""So many active features at a token, and no table or graph of them can be read."""


@dataclass(frozen=True, eq=False, repr=False)
class Features(ShownFeatures):
    """The active features of a dictionary in one frozen pass, as `features` gives them.

    `show`, `plot` and a notebook list the most active ones at a token; `save` writes tables, figures and pages.

    Attributes:
        frozen: the pass.
        dictionary: its weights.
        hook, hook_out: where it reads, and what it reconstructs (the same of an autoencoder).
        reads, writes: the same as places of the stream.
        index: prompt, position and feature of every active feature at a real token, `[active, 3]`, in this order.
        values: what they are worth, `[active]`.
        reconstruction: what the dictionary makes of them, `[batch, pos, d_out]`; zero at padding.
        labels: what features are called, by their numbers; results and pictures made of these features show them.
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

    def __repr__(self) -> str:
        hooks = " -> ".join(dict.fromkeys((repr(self.hook), repr(self.hook_out))))
        return (
            f"Features({self.dictionary.name} at {hooks}, {self.dictionary.features} features, "
            f"{self.active_per_token:.1f} active at a token, explained={self.explained:.3f})"
        )

    @property
    def provenance(self) -> dict[str, str]:
        """What they depend on besides the prompts, as of `Attribution`."""
        return self.frozen.provenance()

    @cached_property
    def error(self) -> Float[Tensor, "batch pos d_out"]:
        """What the reconstruction leaves out, zero at padding."""
        return (self.writes.x - self.reconstruction) * self.frozen.mask[..., None]

    @property
    def active_per_token(self) -> float:
        """L0: active features at a real token, on average."""
        return len(self.values) / int(self.frozen.mask.sum())

    @property
    def explained(self) -> float:
        """The share of variance that the reconstruction explains, over all real tokens of the pass."""
        x = self.writes.x[self.frozen.mask]
        return 1 - float(self.error.square().sum() / (x - x.mean(0)).square().sum())

    def value(self, feature: FeatureLike) -> Float[Tensor, "batch pos"]:
        """What one feature is worth at every token, zero where it is not active.

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
        """A feature's number, which may be passed as its name, ``"F12"``, or as the `Entry` that `top` returns.

        Raises:
            InvalidInputError: there is none.
        """
        if isinstance(feature, Entry):  # as `top` returns them
            feature = feature.name
        if isinstance(feature, str) and re.fullmatch(r"F\d+", feature):
            feature = int(feature[1:])
        return whole_number("feature", feature, 0, self.dictionary.features - 1, why="a feature of this dictionary")

    @cached_property
    def reader(self) -> AffineMap:
        """From the stream to what the encoder is given, scales held."""
        how = self.dictionary.normalised(self.reads.x)
        if how is None:
            return chained([self.reads.through])
        return chained([self.reads.through, Norm(how.divided_by, centre=how.centred)])

    @cached_property
    def writer(self) -> AffineMap | None:
        """What the decoder's output goes through, held: the scale of a dictionary that normalises; None for nothing."""
        how = self.dictionary.normalised(self.reads.x)
        if how is None:
            return None
        return Diagonal(how.multiplied_by)

    def pre_activation(
        self, features: Int[Tensor, "row"], positions: Int[Tensor, "row batch"]
    ) -> Float[Tensor, "row batch"]:
        """What the encoder makes of some features before its activation, at a position of every prompt."""
        read = self.dictionary.reads(self.reads.x)
        here = read[torch.arange(len(read), device=read.device), positions]
        return (
            torch.einsum("rbd,dr->rb", here, self.dictionary.W_enc[:, features]) + self.dictionary.b_enc[features, None]
        )


def chained(maps: Iterable[AffineMap]) -> AffineMap:
    """Maps one after the other, identities left out."""
    stages = [m for m in maps if not isinstance(m, Identity)]
    if not stages:
        return Identity()
    return Chain(tuple(stages))


if TYPE_CHECKING:
    FeaturesLike = Features
    """Features, as a user passes them."""
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
    """The active features of a sparse dictionary in a frozen pass.

    Args:
        frozen: the pass.
        dictionary: any object with ``W_enc`` `[d_model, feature]` and ``W_dec`` `[feature, d_model]`, such as one of
            SAELens; see `tensorlens_tl.models.dictionaries.read_dictionary`.
        hook: the hook point that it reads: of the residual stream, or, of a transcoder, of what an MLP reads; None for
            what the dictionary says (`hook_name`).
        hook_out: of a transcoder, the hook point that it reconstructs: what the MLP gives (`hook_name_out`).
        any_model: take a dictionary that says it belongs to another model (a fine-tuned model's base, say) or to
            another hook point.
        labels: what features are called: a mapping, or a CSV or JSON file; see `feature_labels`.

    Warns:
        UserWarning: more than `MANY` features are active at a token on average.

    Raises:
        InvalidInputError: no such hook point, or one that holds something else; a dictionary of another width, dtype,
            model or hook point; one that is gated, or gives something else than its weights say; and what
            `read_dictionary` refuses.
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
        hook_out = hook_out or read.hook_out or mlp_output(hook)
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
    """Labels of a dictionary's features.

    Raises:
        InvalidInputError: one of a feature that the dictionary does not have.
    """
    named = feature_labels(labels)
    unknown = [number for number in named if number >= read.features]
    if unknown:
        raise InvalidInputError(
            f"labels: feature {unknown[0]} has one, and this {read.name} has {read.features} features, 0 to "
            f"{read.features - 1}. Are they another dictionary's?"
        )
    return named


def _check_fit(frozen: FrozenPass, read: DictionaryWeights, hook: str, any_model: bool) -> None:
    """Refuse a dictionary of another width, dtype, device or model."""
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
    """Refuse a dictionary that says it reads another place; classes may give one place several names."""
    if read.hook is None or read.hook == hook:
        return
    try:
        expected = read_at(frozen, str(read.hook), mlp=read.transcodes)
    except InvalidInputError:  # a name of another class of models
        return
    if expected.place != reads.place:
        raise InvalidInputError(
            f"hook={hook!r}: this {read.name} says that it belongs at {read.hook!r}. Leave hook out, or pass "
            "any_model=True to read it elsewhere."
        )


def _plain_name(name: str) -> str:
    """A model's name without its publisher; aliases of TransformerLens count as the model they stand for."""
    try:
        from transformer_lens.loading_from_pretrained import get_official_model_name

        name = get_official_model_name(name)
    except (ImportError, ValueError):
        pass
    return name.rsplit("/", 1)[-1].lower()
