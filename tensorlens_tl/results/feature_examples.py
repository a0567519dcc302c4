"""Examples of the features of a sparse dictionary: where in a data set they are most active, and what they promote."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.drawing import charts, figure, heat_maps, terminal
from tensorlens_tl.drawing.marks import number, visible
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.results.scores import Parts, Scored

if TYPE_CHECKING:
    import pandas as pd

MOST_FEATURES = 20
"""How many features one picture shows."""
PANEL = (4.5, 2.4)
"""The size in inches of one feature's panel in a figure of several."""


@dataclass(frozen=True, eq=False, repr=False)
class FeatureExamples(Scored):
    """The top activating examples of features over a data set, from `circuits.feature_examples`.

    An example is a row of the data set around the feature's most active token; each row yields at most one example per
    feature. Missing examples have row −1. `top` and `plot` take a `feature`, its number or name; by default `top` shows
    the first.

    Attributes:
        features: the features' numbers.
        labels: their names, or empty strings.
        activations: activation at every token of every window, `[feature, example, window]`; zero outside the row.
        tokens: the same tokens as indices into `texts`; −1 outside the row.
        rows, positions: the row and the position of its most active token, `[feature, example]`; −1 for no example.
        counts: histogram of activations over tokens, `[feature, bin]`.
        edges: the bin edges; the outer bins include everything beyond them.
        promoted: tokens whose logits the decoder row raises most, as indices into `texts`, `[feature, token]`.
        promotion: how much one unit of the decoder row adds to these logits, `[feature, token]`.
        texts: every token that occurs, once.
        before: the number of tokens in a window before the most active one.
        n_rows, n_tokens: the numbers of rows and tokens read.
        dictionary, hook: the dictionary's class, and its hook point.
        provenance: model name, class, TransformerLens version, weight processing, dtype.
    """

    PRINTED: ClassVar = 5
    DRAWN: ClassVar = 20

    features: list[int]
    labels: list[str]
    activations: Float[Tensor, "feature example window"]
    tokens: Int[Tensor, "feature example window"]
    rows: Int[Tensor, "feature example"]
    positions: Int[Tensor, "feature example"]
    counts: Int[Tensor, "feature bin"]
    promoted: Int[Tensor, "feature token"]
    promotion: Float[Tensor, "feature token"]
    texts: list[str]
    before: int
    n_rows: int
    n_tokens: int
    dictionary: str
    hook: str
    edges: list[float]
    provenance: dict[str, str] = field(default_factory=dict[str, str])

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, feature: int | str) -> "FeatureExamples":
        """Return the examples of one feature; see `only`."""
        return self.only(feature)

    def __repr__(self) -> str:
        what = f"{len(self)} features"
        if len(self) == 1:
            what = self._name(0)
        return (
            f"FeatureExamples({what} of {self.dictionary} at {self.hook!r}, up to {self.rows.shape[1]} examples each "
            f"from {self.n_rows} rows, {self.n_tokens} tokens)"
        )

    @property
    def peaks(self) -> Float[Tensor, "feature example"]:
        """The largest activation of each example."""
        return self.activations[..., self.before]

    @property
    def density(self) -> Float[Tensor, "feature"]:
        """The share of tokens on which each feature is active."""
        return self.counts.sum(1).double() / max(1, self.n_tokens)

    def only(self, *features: int | str) -> "FeatureExamples":
        """Return only some of the features, by number or by name such as ``"F12"``.

        Raises:
            InvalidInputError: none is named, or one that this result does not have.

        >>> rows = tlens.demo.held_out_prompts(model, 4, 32)
        >>> examples = tlens.circuits.feature_examples(model, tlens.load_demo_dictionary(), rows, k=2)
        >>> examples.only("F357").features
        [357]
        """
        if not features:
            raise InvalidInputError("only: name at least one feature, such as only('F12').")
        places = [self._place(feature) for feature in features]
        tensors = {name: getattr(self, name)[places] for name in self.TENSORS}
        words = {name: [getattr(self, name)[place] for place in places] for name in ("features", "labels")}
        return replace(self, **tensors, **words)

    def _parts(self, feature: int | str | None = None) -> Parts:
        """Return the examples of one feature (default: the first), with token, activation and position in the row."""
        examples = self._examples(0 if feature is None else self._place(feature), self.rows.shape[1])
        scores = torch.tensor([example.largest[1] for example in examples], dtype=torch.float64)
        return Parts(scores, [example.largest[0] for example in examples], [example.largest[2] for example in examples])

    def to_dataframe(self) -> "pd.DataFrame":
        """Return one row per token of each example: feature, label, rank, row, position, token, activation, is_peak.

        >>> rows = tlens.demo.held_out_prompts(model, 4, 32)
        >>> examples = tlens.circuits.feature_examples(model, tlens.load_demo_dictionary(), rows, [357], k=2)
        >>> examples.to_dataframe().query("is_peak")["token"].tolist()
        [' are', ' are']
        """
        import pandas as pd

        place, rank, column = (self.tokens >= 0).nonzero(as_tuple=True)
        positions = self.positions[place, rank] + column - self.before
        return pd.DataFrame(
            {
                "feature": [self.features[number] for number in place.tolist()],
                "label": [self.labels[number] for number in place.tolist()],
                "rank": rank.numpy(),
                "row": self.rows[place, rank].numpy(),
                "position": positions.numpy(),
                "token": [self.texts[number] for number in self.tokens[place, rank, column].tolist()],
                "activation": self.activations[place, rank, column].double().numpy(),
                "is_peak": (column == self.before).numpy(),
            }
        )

    # ------------------------------------------------------------------ showing

    @property
    def heading(self) -> str:
        """The title of its page."""
        if len(self) == 1:
            return self._name(0)
        return f"{len(self)} features at {self.hook}"

    def _html(self, k: int) -> str:
        """Draw a panel for each of the first `MOST_FEATURES`: label, histogram, promoted tokens, and k top examples."""
        panels = [self._panel_of(place, k) for place in range(min(len(self), MOST_FEATURES))]
        left = len(self) - len(panels)
        if left:
            panels.append(f'<div class="tlens n">{left} more features: only("F12", …) chooses some.</div>')
        return "".join(panels)

    def _panel_of(self, place: int, k: int) -> str:
        counts: list[int] = self.counts[place].tolist()
        tokens = [self.texts[number] for number in self.promoted[place].tolist()]
        facts = f"active at {float(self.density[place]):.2%} of {self.n_tokens} tokens in {self.n_rows} rows"
        return self._panel(
            f'<div class="n">{escape(facts)}. Activations, on a logarithmic scale:</div>',
            charts.histogram(self.edges, counts),
            heat_maps.promoted(tokens, self.promotion[place].tolist()),
            heat_maps.examples(self._examples(place, k)),
            title=self._name(place),
            notes=[f"{self.dictionary} at {self.hook}"],
        )

    def _print(self, k: int) -> None:
        for place in range(min(len(self), MOST_FEATURES)):
            rows: list[tuple[str, str, str]] = []
            for example in self._examples(place, k):
                _, value, position = example.largest
                rows.append((number(value), f"{example.row}:{position}", _line(example)))
            title = f"{self._name(place)} · active at {float(self.density[place]):.3%} of {self.n_tokens} tokens"
            tokens = [repr(self.texts[number]) for number in self.promoted[place].tolist()]
            caption = f"promotes {', '.join(tokens)}" if tokens else ""
            terminal.show_table(title, ("activation", "row:position", "text"), rows, left=("text",), caption=caption)
        if len(self) > MOST_FEATURES:
            print(f'{len(self) - MOST_FEATURES} more features: only("F12", …) chooses some.')

    def _figure(self, k: int, feature: int | str | None = None, *, ax: Any) -> Any:
        """Draw histograms of activations for one feature or, by default, the first active `MOST_FEATURES`."""
        if feature is not None:
            return self._plot_one(self._place(feature), ax)
        active = self.counts.any(1).nonzero()[:, 0].tolist() or [0]
        shown = active[:MOST_FEATURES]
        if ax is not None or len(active) == 1:
            shown = active[:1]
            panels = [figure.axes(ax, PANEL)]
        else:
            panels = figure.panels(len(shown), PANEL)
        for place, axes in zip(shown, panels, strict=True):
            self._plot_one(place, axes)
        if len(shown) < len(self):
            title = panels[0].get_title(loc="left")
            figure.set_title(panels[0], f"{title} · {len(shown)} of {len(self)} features shown")
        if len(panels) == 1:
            return panels[0]
        return panels

    def _plot_one(self, place: int, ax: Any) -> Any:
        filled = self.counts[place].nonzero()[:, 0].tolist()
        if not filled:
            raise InvalidInputError(f"plot: {self._name(place)} is active at no token of these rows.")
        shown = slice(filled[0], filled[-1] + 1)
        edges = self.edges[shown.start : shown.stop + 1]
        return figure.histogram(edges, self.counts[place][shown].tolist(), self._name(place), "activation", ax)

    # ------------------------------------------------------------------ inside

    def _name(self, place: int) -> str:
        return " · ".join(filter(None, [f"F{self.features[place]}", self.labels[place]]))

    def _place(self, feature: int | str) -> int:
        text = str(feature)
        number = -1
        if text.removeprefix("F").isdecimal() and not isinstance(feature, bool):
            number = int(text.removeprefix("F"))
        if number not in self.features:
            names = ", ".join(f"F{known}" for known in self.features[:8])
            if len(self) > 8:
                names += ", …"
            raise InvalidInputError(f"feature {feature!r} is not in this result; it has {names}.")
        return self.features.index(number)

    def _examples(self, place: int, k: int) -> list[heat_maps.Example]:
        """Return the k largest examples of one feature."""
        shown = []
        for rank in range(min(k, int((self.rows[place] >= 0).sum()))):
            columns = (self.tokens[place, rank] >= 0).nonzero()[:, 0]
            start = int(self.positions[place, rank]) - self.before
            shown.append(
                heat_maps.Example(
                    row=int(self.rows[place, rank]),
                    positions=(columns + start).tolist(),
                    tokens=[self.texts[number] for number in self.tokens[place, rank, columns].tolist()],
                    values=self.activations[place, rank, columns].double().tolist(),
                    peak=columns.tolist().index(self.before),
                )
            )
        return shown


def _line(example: heat_maps.Example) -> str:
    """Format an example as text, with its most active token in guillemets."""
    tokens: Sequence[str] = [visible(token) for token in example.tokens]
    return "".join(f"«{token}»" if column == example.peak else token for column, token in enumerate(tokens))
