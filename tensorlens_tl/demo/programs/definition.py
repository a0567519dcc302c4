"""A program: a hand-constructed model, prompts for it, and the truth about every answer."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tensorlens_tl._arguments import plain, whole_number
from tensorlens_tl.demo.programs.building import Design
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate import KnownAnswers, KnownAttention, KnownChoice, KnownComponents, Place, PromptPairs
from tensorlens_tl.results import ARROW, TARGET


@dataclass(frozen=True)
class Why:
    """Why a head attends from one position to another, in one prompt; the fields are those of `KnownChoice`."""

    layer: int
    head: int
    query: int
    key: int
    query_tokens: frozenset[int]
    key_tokens: frozenset[int]
    query_parts: frozenset[str]
    key_parts: frozenset[str]


@dataclass(frozen=True)
class Truth:
    """What is true of one prompt and query.

    Attributes:
        answer: the token id that the model predicts.
        paths: along which the answer's content comes to the query; see `KnownComponents`.
        choices: why the heads on the way attend where they do.
        constants: places that write the same to the logits whatever the prompt says.
    """

    answer: int
    paths: tuple[tuple[Place, ...], ...]
    choices: tuple[Why, ...]
    constants: tuple[Place, ...] = ()

    @property
    def sources(self) -> frozenset[int]:
        """Positions of the tokens that determine the answer."""
        return frozenset(path[0][1] for path in self.paths)


Row = list[int]


@dataclass(frozen=True)
class Change:
    """A way to corrupt a prompt, and what then carries the difference; sets as in `KnownComponents`."""

    corrupt: Callable[[Row, random.Random], Row]
    nodes: frozenset[str]
    edges: frozenset[str]


@dataclass(frozen=True, eq=False)
class Program:
    """A hand-constructed model, with its prompts and its truth.

    Attributes:
        name: of the program.
        description: what it does, in a line.
        design: its weights.
        queries: the positions of a prompt at which it gives an answer, rising.
        sample: makes a prompt, as token ids.
        explain: what is true of a prompt, as token ids, and one of `queries`.
        changes: the ways to corrupt a prompt: ``"source"`` replaces a token that the answer is read from, ``"choice"``
            changes where heads attend. What chooses by position alone cannot be changed by a token.
    """

    name: str
    description: str
    design: Design
    queries: tuple[int, ...]
    sample: Callable[[random.Random], Row] = field(repr=False)
    explain: Callable[[Row, int], Truth] = field(repr=False)
    changes: Mapping[str, Change] = field(repr=False)

    def __repr__(self) -> str:
        return f"Program({self.name!r}: {self.description})"

    def model(self, kind: str | None = None, *, norm: bool = False, dtype: torch.dtype = torch.float32) -> Any:
        """The model, in eval mode and without a tokenizer; `words` names its tokens.

        Args:
            kind: ``"hooked"`` for a HookedTransformer (TransformerLens 3.9), ``"bridge"`` for a TransformerBridge (3.9
                and 4.x); None takes the first that is there.
            norm: with a LayerNorm before every sublayer and at the end, in a wider stream.
            dtype: of the weights.

        Raises:
            InvalidInputError: no such kind, or HookedTransformer asked for on TransformerLens 4.
        """
        return self.design.model(kind, norm=norm, dtype=dtype)

    def words(self, tokens: Any) -> list[str]:
        """A prompt's tokens, readable."""
        return [self.design.words[token] for token in plain(tokens)]

    def prompts(self, prompts: Any = 50, *, seed: int = 0) -> Int[Tensor, "prompt pos"]:
        """Random prompts, each with an answer at every one of `queries`.

        Raises:
            InvalidInputError: fewer than one.
        """
        rng = random.Random(seed)
        return torch.tensor([self.sample(rng) for _ in range(whole_number("prompts", prompts, least=1))])

    def truth(self, tokens: Any, query: Any = -1) -> Truth:
        """What is true of one prompt.

        Args:
            tokens: the prompt's token ids.
            query: one of `queries`; −1 is the last of them.

        Raises:
            InvalidInputError: no such query.
        """
        return self.explain(list(plain(tokens)), self._query(query))

    def answers(self, prompts: Any = 50, *, seed: int = 0, query: Any = -1) -> KnownAnswers:
        """The task for `evaluate.known_answer`: prompts end at the query, which no later token can change.

        Args:
            prompts: how many.
            seed: of the prompts.
            query: one of `queries`; −1 is the last of them.

        Raises:
            InvalidInputError: fewer than one prompt, or no such query.
        """
        query = self._query(query)
        tokens = self.prompts(prompts, seed=seed)[:, : query + 1]
        truths = [self.explain(row, query) for row in tokens.tolist()]
        sources = torch.zeros_like(tokens, dtype=torch.bool)
        for row, truth in enumerate(truths):
            sources[row, list(truth.sources)] = True
        return KnownAnswers(self.name, tokens, torch.tensor([truth.answer for truth in truths]), sources)

    def components(self, prompts: Any = 20, *, seed: int = 0, change: str = "source") -> KnownComponents:
        """The task for `evaluate.known_components`, asked at the last query.

        Args:
            prompts: how many.
            seed: of the prompts, and of what is replaced by what.
            change: one of `changes`.

        Raises:
            InvalidInputError: fewer than one prompt, or no such change.
        """
        if change not in self.changes:
            known = ", ".join(map(repr, self.changes))
            raise InvalidInputError(
                f"change={change!r}: {self.name} has {known}; what attends by position alone is chosen by no token."
            )
        replacement = self.changes[change]
        rng = random.Random(seed)
        query = self.queries[-1]
        clean = self.prompts(prompts, seed=seed)[:, : query + 1]
        corrupted = [replacement.corrupt(list(row), rng) for row in clean.tolist()]
        truths = [self.explain(row, query) for row in clean.tolist()]
        others = [self.explain(row, query).answer for row in corrupted]
        answers = [truth.answer for truth in truths]
        tensors = (clean, *(torch.tensor(part) for part in (corrupted, answers, others)))
        pairs = PromptPairs(f"{self.name}, {change} changed", *tensors)
        paths = tuple((*truth.paths, *((place,) for place in truth.constants)) for truth in truths)
        return KnownComponents(pairs.name, pairs, paths, replacement.nodes, replacement.edges)

    def attention(self, prompts: Any = 20, *, seed: int = 0, query: Any = -1) -> KnownAttention:
        """The task for `evaluate.known_attention`; arguments as in `answers`."""
        query = self._query(query)
        tokens = self.prompts(prompts, seed=seed)[:, : query + 1]
        truths = [self.explain(row, query).choices for row in tokens.tolist()]
        return KnownAttention(self.name, tokens, tuple(map(_choice, zip(*truths, strict=True))))

    def _query(self, query: Any) -> int:
        query = whole_number("query", query)
        query = self.queries[-1] if query == -1 else query
        if query not in self.queries:
            raise InvalidInputError(f"query={query}: {self.name} gives answers at {list(self.queries)}.")
        return query


def _choice(rows: tuple[Why, ...]) -> KnownChoice:
    """What is known of one head in every prompt."""
    first = rows[0]
    query, key = (torch.tensor(part) for part in ([why.query for why in rows], [why.key for why in rows]))
    tokens = (tuple(why.query_tokens for why in rows), tuple(why.key_tokens for why in rows))
    return KnownChoice(first.layer, first.head, query, key, *tokens, first.query_parts, first.key_parts)


def carried(*nodes: str, more: tuple[str, ...] = ()) -> tuple[frozenset[str], frozenset[str]]:
    """Nodes and edges of a way from ``"embed"`` to the target.

    Args:
        nodes: each later one's input, as ``"L0H0.v"`` or ``"MLP0"``.
        more: edges besides.
    """
    names = [node.partition(".")[0] for node in nodes]
    edges = [ARROW.join(pair) for pair in zip(["embed", *names], [*nodes, TARGET], strict=True)]
    return frozenset({"embed", *names}), frozenset({*edges, *more})
