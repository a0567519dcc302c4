"""How an Attribution shows itself: which arrays and words of it a picture is made of."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.drawing import figure, generated, heat_maps, images, page, printed_text, terminal
from tensorlens_tl.drawing.marks import number, numbers
from tensorlens_tl.passes.inputs import joined
from tensorlens_tl.results.entry import (
    MINUS,
    Entry,
    check_batch,
    panel,
    provenance_note,
    query_row,
    shown_prompt,
    shown_query,
    shown_target,
    with_others,
)
from tensorlens_tl.results.result import Result
from tensorlens_tl.results.targets import OF_GENERATED, explained_positions, target_of_prompt, target_texts

AXES = ("batch", "query", "key")

PATCH = " patch "
"""What the names of an image's patches begin with; their row and column follow, from 0."""

MOST_PROMPTS = 8
"""Prompts of a batch that one picture shows."""


class Shown(Result):
    """The pictures of an Attribution, whose fields these are."""

    scores: Float[Tensor, "..."]
    tokens: list[list[str]]
    sides: list[list[str]] | None
    queries: Int[Tensor, "batch query"]
    mask: Bool[Tensor, "batch pos"]
    method: str
    axes: tuple[str, ...]
    layers: Float[Tensor, "layer ..."] | None
    bias: Float[Tensor, "batch query"] | None
    total: Float[Tensor, "batch query"] | None
    gap: Float[Tensor, "batch query"] | None
    image: Float[Tensor, "batch channel height width"] | None
    left_out: list[list[int]] | None
    additive: bool
    target: str
    options: dict[str, Any]
    provenance: dict[str, str]

    @abstractmethod
    def top(self, k: int = 10, query: int | str = -1, batch: int = 0) -> list[Entry]:
        """See `Attribution.top`."""

    def query_row(self, query: int | str = -1, batch: int = 0) -> int:
        """Where a query lies on the query axis: counted over the prompt's real queries, or named by its text.

        A query is named by its token; of generated text by the token that it explains.

        Raises:
            InvalidInputError: not among the held queries.
        """
        check_batch(batch, self.tokens)
        return query_row(self.queries, self.mask, self.tokens, query, batch, explained_positions(self, batch))

    @property
    def heading(self) -> str:
        """The title of its page."""
        return self.describe()

    def describe(self, batch: int | None = None, row: int | None = None) -> str:
        """What the scores are, in one line.

        Args:
            batch: a prompt, whose own target is named; None for all of them.
            row: one of its queries.
        """
        target = shown_target(self.target)
        if batch is not None:
            target = target_of_prompt(self, batch, row)
        notes = [": ".join(filter(None, [self.method, target]))]
        if self.additive and self.gap is not None:
            notes.append(f"gap {float(self.gap.max()):.1e}{self._shown_miss()}")
        return " · ".join(notes)

    def _shown_miss(self) -> str:
        """How far the sums are from their totals, where that shows in the four digits of a table: half precision."""
        if self.bias is None or self.total is None or tuple(self.axes) != AXES:
            return ""
        missed = (self.scores.sum(-1) + self.bias - self.total).abs()
        if not bool((missed > 5e-4 * self.total.abs()).any()):
            return ""
        return f", {self.provenance.get('dtype', 'rounding')} is off by up to {float(missed.max()):.2g}"

    def plane(self, batch: int = 0) -> Float[Tensor, "query key"]:
        """Scores of one prompt as they are shown: other axes (heads, say) averaged, vectors by their norm."""
        check_batch(batch, self.tokens)
        scores = self.scores[batch].detach()
        axes = list(self.axes[1:])
        for name in [axis for axis in axes if axis not in AXES]:
            axis = axes.index(name)
            reduce = {"d_model": torch.linalg.vector_norm}.get(name, torch.mean)
            scores = reduce(scores, dim=axis)
            axes.remove(name)
        return scores

    def to_html(self, *, batch: int | None = None, style: bool = True) -> str:
        """The heat maps as an HTML fragment: coloured text for one query, a matrix for several, patches over an image.

        Args:
            batch: one prompt, or None for the first few of them.
            style: with the style and the script that a page needs once.
        """
        prompts, left = self._prompts(batch)
        parts = [self._prompt_html(prompt) for prompt in prompts]
        if left:
            parts.append(f'<div class="n">{left} more prompts: to_html(batch={MOST_PROMPTS}) …</div>')
        return panel(self.describe(), *parts, notes=[provenance_note(self.provenance)], style=style)

    def show(self, k: int = 10, query: int | str = -1, batch: int | None = None) -> None:
        """Display the heat maps in a notebook, or a table of one query's top tokens in a terminal.

        Args:
            k: how many tokens the table names; all others are one line.
            query: which of the held queries the table is about, as in `top`.
            batch: one prompt, or None for the first few of them.
        """
        if page.display_in_notebook(lambda: self.to_html(batch=batch)):
            return
        prompts, left = self._prompts(batch)
        for prompt in prompts:
            self._print_table(k, query, prompt)
        if left:
            print(f"{left} more prompts: show(batch={MOST_PROMPTS}) …")

    def _prompts(self, batch: int | None) -> tuple[Sequence[int], int]:
        """The prompts that one picture shows, and how many more there are."""
        if batch is not None:
            check_batch(batch, self.tokens)
            return [batch], 0
        count = len(self.tokens)
        return range(min(count, MOST_PROMPTS)), max(0, count - MOST_PROMPTS)

    def _print_table(self, k: int, query: int | str, batch: int) -> None:
        row = self.query_row(query, batch)
        entries = self.top(k, query, batch)
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
        names = [(str(entry.position), repr(entry.name)) for entry in entries]
        names += [("", name) for name, _ in lines[len(entries) :]]
        rows = [(*name, text) for name, text in zip(names, texts, strict=False)]
        headings = ["position", "token", f"score / {unit}" if unit else "score"]
        below = ("bias (no token)", "total")
        sums: list[tuple[str, ...]] = [("", *line) for line in zip(below, texts[len(rows) :], strict=False)]
        if self.sides is not None:  # a column more, between the token and its score
            headings.insert(2, "side")
            sides = [self.sides[batch][int(str(entry.position))] for entry in entries]
            sides += [""] * (len(rows) - len(entries))
            rows = [(*row[:2], side, row[2]) for row, side in zip(rows, sides, strict=True)]
            sums = [(*line[:2], "", line[2]) for line in sums]
        which = shown_query(self.queries, self.mask, self.tokens, row, batch, explained_positions(self, batch))
        if self.queries.shape[1] > 1:
            which += "; show(query=...) shows another"
        title = " · ".join(filter(None, [self.describe(batch, row), which]))
        terminal.show_table(title, headings, rows, sums, left=("token", "side"), caption=self._sink_note(batch, row))

    def plot(
        self, batch: int = 0, *, query: int | str | None = None, ax: Any = None, values: bool | None = None
    ) -> Any:
        """One prompt as a matplotlib figure (extra ``plot``); returns the axes.

        One query is drawn as coloured text, or over an image as a map of its patches; several as a heat map, of which
        generated tokens are the rows.

        Args:
            batch: the prompt.
            query: one of the held queries, as in `top`; None for all of them.
            ax: draw here; None makes a figure of fitting size.
            values: write numbers into the cells of a heat map; None does so where they fit.

        Raises:
            InvalidInputError: no such prompt or query.
            ImportError: matplotlib is not installed.

        >>> tlens.attribute(frozen, " value").plot()
        <Axes: ...>
        """
        keys, rows = self._shown(batch)
        if query is not None:
            rows = [self.query_row(query, batch)]
        plane = array(self.plane(batch))[np.ix_(rows, list(keys))]
        tokens = list(keys.values())
        if len(rows) > 1:
            labels = [self.tokens[batch][self._explained(batch, row)[-1]] for row in rows]
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
        marked = [columns[position] for position in self._explained(batch, rows[0]) if position in columns]
        first = None
        if self._is_generated():
            first = columns[self.options["generated"][batch][0]]
        return printed_text.text(tokens, plane[0], self._strip_title(batch, rows[0]), ax, marked=marked, first=first)

    def _left_out_note(self, batch: int, row: int) -> str:
        left = self.left_out[batch] if self.left_out else []
        if not left:
            return ""
        return f"{len(left)} left out: {number(float(self.plane(batch)[row][left].sum()))}"

    def _sink_note(self, batch: int, row: int) -> str:
        """What to do where most of a query's score is the first token's, which says little about the text."""
        listed = self.listed(batch)
        sizes = self.plane(batch)[row].abs()[listed]
        if len(listed) < 3 or listed[0] == int(self.queries[batch, row]) or not bool(sizes[0] > sizes[1:].sum()):
            return ""
        share = float(sizes[0] / sizes.sum())
        note = f"position {listed[0]} has {share:.0%} of all scores; without({listed[0]}) leaves it out"
        if self.target and MINUS not in self.target:  # a map of token pairs has no other token to compare with
            note += ", and a contrast (minus=) often cancels it"
        return f"{note}."

    def _is_generated(self) -> bool:
        return set(OF_GENERATED) <= set(self.options)

    def _explained(self, batch: int, row: int) -> list[int]:
        """The positions of the tokens that a row of scores is about: the query, or what was generated."""
        return explained_positions(self, batch)[row]

    def _strip_title(self, batch: int, row: int) -> str:
        notes = [self.describe(batch, row)]
        if self._is_generated():
            text = joined([self.tokens[batch][position] for position in self._explained(batch, row)])
            if repr(text) not in notes[0]:
                notes.append(f"of {text!r}")
        notes.append(shown_prompt(batch, len(self.tokens)))
        return " · ".join(filter(None, notes))

    # ------------------------------------------------------------------ arrays

    def listed(self, batch: int) -> list[int]:
        """The positions of real source tokens that are not left out."""
        left = set(self.left_out[batch] if self.left_out else ())
        return [position for position, real in enumerate(self.mask[batch].tolist()) if real and position not in left]

    def _shown(self, batch: int) -> tuple[dict[int, str], list[int]]:
        """Real source tokens by position, and the rows of real queries."""
        check_batch(batch, self.tokens)
        mask = self.mask[batch].tolist()
        keys = {position: self.tokens[batch][position] for position in self.listed(batch)}
        return keys, [row for row, position in enumerate(self.queries[batch].tolist()) if mask[position]]

    def _prompt_html(self, batch: int) -> str:
        if self._is_generated():
            return self._generated_html(batch)
        keys, rows = self._shown(batch)
        positions = self.queries[batch].tolist()
        named = [self._explained(batch, row)[-1] for row in rows]
        queries = [(place, self.tokens[batch][place]) for place in named]
        notes = self._target_notes(batch, rows)
        if self.additive and self.bias is not None and self.total is not None and len(rows) == 1:
            bias, total = (float(t[batch, rows[0]]) for t in (self.bias, self.total))
            notes.append(f"bias, from no token: {number(bias)} · total: {number(total)}")
        if len(rows) == 1:
            notes += filter(None, [self._left_out_note(batch, rows[0]), self._sink_note(batch, rows[0])])
        stacks = []
        for name, planes in self._stacks(batch):
            chosen = rows
            labels = [token for _, token in queries]
            if planes.shape[1] != len(positions):  # a method's layers may hold every query beside scores of one
                chosen = list(keys)
                labels = list(keys.values())
            stacks.append(heat_maps.Stack(name, planes[:, chosen][:, :, list(keys)], labels))
        plane = array(self.plane(batch))[np.ix_(rows, list(keys))]
        tokens = list(keys.values())
        label = self.describe(batch)
        sides: list[str] = []
        if self.sides is not None:
            sides = [self.sides[batch][position] for position in keys]
        if sides and len(rows) > 1:
            notes.append(f"the first {sides.count('encoder')} keys are the encoder's tokens, then come the decoder's")
        prompt_html = heat_maps.prompt(
            tokens, list(keys), plane, queries, label=label, stacks=stacks, note=" · ".join(notes), parts=sides
        )
        if self.image is None or len(rows) != 1:
            return prompt_html
        return self._image_html(batch, plane[0], tokens) + prompt_html

    def _target_notes(self, batch: int, rows: list[int]) -> list[str]:
        """What is explained of a prompt and its queries, where the title cannot say it."""
        if target_of_prompt(self, batch) == shown_target(self.target) and self.target == shown_target(self.target):
            return []
        texts = target_texts(self, batch)
        return list(dict.fromkeys(texts[row] for row in rows))

    def _generated_html(self, batch: int) -> str:
        """Generated text: each of its tokens can be asked; the matrix of all pairs below, to be opened."""
        keys, rows = self._shown(batch)
        columns = {position: column for column, position in enumerate(keys)}
        tokens = list(keys.values())
        plane = array(self.plane(batch))[np.ix_(rows, list(keys))]
        targets = [columns[position] for position in self.options["asked"][batch]]
        by_row = [[target] for target in targets]
        if len(rows) == 1:
            by_row = [targets]
        facts = []
        for row, row_targets in zip(rows, by_row, strict=False):
            fact = f"what made {''.join(tokens[target] for target in row_targets)!r}"
            if self.bias is not None and self.total is not None:
                bias, total = (float(values[batch, row]) for values in (self.bias, self.total))
                fact += f" · bias, from no token: {number(bias)} · total: {number(total)}"
            facts.append(fact)
        picture = generated.generated_text(
            tokens,
            list(keys),
            plane,
            columns[self.options["generated"][batch][0]],
            by_row,
            facts,
        )
        if len(rows) == 1:
            return picture
        labels = [tokens[target] for target in targets]
        whole = heat_maps.matrix(labels, tokens, plane, label=self.describe(batch), corner="generated ↓ source →")
        return f"{picture}<details><summary>All of them as a matrix</summary>{whole}</details>"

    def _image_html(self, batch: int, scores: np.ndarray, tokens: list[str]) -> str:
        """One query's scores over the image, beside those of tokens that are no patch."""
        assert self.image is not None
        patches, rows, columns = _patches(tokens)
        if not patches:
            return ""
        others = {token.strip(): float(scores[n]) for n, token in enumerate(tokens) if n not in patches}
        return images.patch_scores(
            array(self.image[batch]),
            scores[patches].reshape(rows, columns),
            title=self.target or self.method,
            special=others,
        )

    def _stacks(self, batch: int) -> list[tuple[str, np.ndarray]]:
        """What can be taken apart further, `[plane, query, key]` each: a head axis, and layers."""
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


def _patches(tokens: Sequence[str]) -> tuple[list[int], int, int]:
    """Which tokens are patches of an image, and the rows and columns that they make."""
    patches = [number for number, token in enumerate(tokens) if token.startswith(PATCH)]
    if not patches:
        return [], 0, 0
    row, column = tokens[patches[-1]].removeprefix(PATCH).split(",")
    return patches, int(row) + 1, int(column) + 1


def array(tensor: Tensor) -> np.ndarray:
    """A tensor as drawing takes it."""
    return tensor.detach().double().cpu().numpy()
