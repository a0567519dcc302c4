"""Active features as tables and pictures."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl.drawing import figure, matrix, page, terminal
from tensorlens_tl.drawing.marks import number, visible
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.models import DictionaryWeights
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.inputs import one_query
from tensorlens_tl.results import Entry, Result, check_batch, largest, panel, provenance_note

if TYPE_CHECKING:
    import pandas as pd


class ShownFeatures(Result):
    """How the active features of a pass are listed and drawn; see `Features`, which has these fields."""

    LOADABLE: ClassVar = ()
    """None: features hold a pass and a dictionary. Tables, figures and pages of them can be saved."""

    frozen: FrozenPass
    dictionary: DictionaryWeights
    hook: str
    index: Int[Tensor, "active 3"]
    values: Float[Tensor, "active"]
    labels: Mapping[int, str]

    @property
    @abstractmethod
    def explained(self) -> float:
        """The share of variance that the reconstruction explains, over all real tokens of the pass."""

    def top(self, k: int = 10, query: int | str = -1, batch: int = 0) -> list[Entry]:
        """The k most active features at one token, with their labels.

        Args:
            k: how many.
            query: which token, counted over the prompt's real ones, or its text.
            batch: the prompt.

        Raises:
            InvalidInputError: k below 1, or no such token or prompt.

        >>> sae = tlens.circuits.features(frozen, tlens.load_demo_dictionary())
        >>> len(sae.top(3))
        3
        """
        batch, position = self._place(query, batch)
        here = (self.index[:, 0] == batch) & (self.index[:, 1] == position)
        numbers = self.index[here, 2].tolist()
        names = [f"F{feature}" for feature in numbers]
        labels = {f"F{feature}": self.labels.get(feature, "") for feature in numbers}
        return largest(self.values[here], names, k, [position] * len(names), labels)

    def to_dataframe(self) -> "pd.DataFrame":
        """One line per active feature of every token: batch, position, token, feature, label, activation.

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
        """The title of its page."""
        return f"Active features of {self.dictionary.name} at {self.hook}"

    def to_html(self, k: int = 15, query: int | str = -1, batch: int = 0, *, style: bool = True) -> str:
        """The k most active features at one token as rows, and how active each is at every token.

        Args:
            k, query, batch: as in `top`.
            style: with the style and the script that a page needs once.

        Raises:
            InvalidInputError: k below 1, or no such token or prompt.
        """
        rows, tokens, plane = self._plane(k, query, batch)
        parts = ["<p>No feature is active at this token.</p>"]
        if rows:
            parts = [matrix.matrix(rows, tokens, plane, label=self.heading, corner="feature ↓ token →")]
        notes = [self._which(query, batch), f"{self.explained:.1%} of the variance is explained"]
        notes.append(provenance_note(self.frozen.provenance()))
        return panel(self.heading, *parts, notes=notes, style=style)

    def plot(self, k: int = 15, query: int | str = -1, batch: int = 0, *, ax: Any = None) -> Any:
        """The same matrix as a matplotlib heat map (extra ``plot``); returns the axes.

        Args:
            k, query, batch: as in `top`.
            ax: draw here; None makes a figure of fitting size.

        Raises:
            InvalidInputError: k below 1, no such token or prompt, or no feature is active at the token.
            ImportError: matplotlib is not installed.

        >>> tlens.circuits.features(frozen, tlens.load_demo_dictionary()).plot(k=5)
        <Axes: ...>
        """
        rows, tokens, plane = self._plane(k, query, batch)
        if not rows:
            raise InvalidInputError(f"plot: no feature of {self.dictionary.name} is active at query={query!r}.")
        return figure.heat_map(plane, rows, tokens, self._which(query, batch), ax, names=("feature", "token"))

    def show(self, k: int = 10, query: int | str = -1, batch: int = 0) -> None:
        """Display the matrix in a notebook; elsewhere print the k most active features at one token.

        Args:
            k, query, batch: as in `top`.
        """
        if page.display_in_notebook(lambda: self.to_html(k, query, batch)):
            return
        rows = [(entry.labelled, number(entry.score)) for entry in self.top(k, query, batch)]
        caption = f"{self.dictionary.name} at {self.hook} explains {self.explained:.1%} of the variance"
        terminal.show_table(
            self._which(query, batch), ("feature", "activation"), rows, left=("feature",), caption=caption
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> NoReturn:
        """Not possible: features hold the pass and the dictionary, which no file of ours has.

        Raises:
            InvalidInputError: always; says how to have them again.
        """
        raise InvalidInputError(
            f"{cls.__name__}.load({str(path)!r}): features hold a pass and a dictionary, which are not saved. "
            "Call circuits.features(frozen, dictionary) again; tables (.csv, .parquet, .json) are read with pandas."
        )

    def _place(self, query: int | str, batch: int) -> tuple[int, int]:
        """Prompt and position of a token."""
        check_batch(batch, self.frozen.str_tokens)
        batch %= len(self.frozen.tokens)
        return batch, int(one_query(self.frozen.prompt, query)[batch, 0])

    def _which(self, query: int | str, batch: int) -> str:
        """Which token is looked at, and how many features are active there."""
        batch, position = self._place(query, batch)
        count = int(((self.index[:, 0] == batch) & (self.index[:, 1] == position)).sum())
        token = visible(self.frozen.str_tokens[batch][position])
        which = f"{count} features active at {position} {token!r}"
        if len(self.frozen.tokens) > 1:
            which += f", prompt {batch} of {len(self.frozen.tokens)}"
        return which

    def _plane(self, k: int, query: int | str, batch: int) -> tuple[list[str], list[str], np.ndarray]:
        """The most active features at a token, the prompt's real tokens, and the activations of one at the other."""
        entries = self.top(k, query, batch)
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
