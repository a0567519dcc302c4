"""Models built from programs: the weights are constructed by hand, so that the truth about every answer is known.

| program | what it says next | how |
| --- | --- | --- |
| `previous-token` | the token before | L0H0 |
| `two-back` | the token two before | L0H0 copies one back, L1H0 copies that one back |
| `reverse` | letters from the last to the first | L0H0 finds the separator, MLP0 computes where to look, L1H0 copies |
| `sort` | letters in the order of the alphabet | L0H0 attends to the next letter |
| `induction` | what followed last time | L0H0 notes what came before, L1H0 matches and copies |
| `two-hop` | the partner of the question's partner | L0H0 notes partners, L1H0 and L2H0 look up |
| `counting` | how many of a letter there are | L0H0 attends to them, a little to each |

`program` gives one by name. Each comes without norms and with LayerNorms, as a HookedTransformer (TransformerLens 3.9)
and as a TransformerBridge (3.9 and 4), and states its truth: the source tokens of every answer, the components that
write and move it with the edges between them, and what chose where each head attends. No token is drawn from a text,
and no weight is trained; all are ours.

The residual stream is a list of named spaces, such as ``token`` (which token stands here, one-hot) or ``position``. A
head is four matrices that read and write such spaces. `Design` holds all of them in the stream's own channels; with
norms, `Design.model` writes the same weights into a wider stream on which LayerNorm does next to nothing:

* every channel x is held twice, as x/√2 and −x/√2, so that the mean is zero and centring changes nothing;
* the position embeddings hold a constant of size `CONSTANT` in two more channels, which nothing reads. The variance is
  then nearly the constant's alone, and the gain multiplies by its root, so that a norm's output is its input times a
  factor within 1e-3 of 1.

Every layer has one head more than the program needs: it attends to all tokens and copies them into a space that nothing
reads. Its vectors are as long as the program's own, so that a method that measures vectors sees it, and one that
asks what reaches the answer does not.

    >>> sorting = program("sort")
    >>> prompt = sorting.prompts(1)[0]
    >>> " ".join(sorting.words(prompt))
    '<|bos|> m y a i q | a i m q'
    >>> truth = sorting.truth(prompt)
    >>> sorting.words([truth.answer]), sorted(truth.sources)
    (['y'], [2])
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import Seed, Whole, check_choice, plain, whole_count, whole_number, whole_seed
from tensorlens_tl.errors import InvalidInputError
from tensorlens_tl.evaluate import KnownAnswers, KnownAttention, KnownChoice, KnownComponents, Place, PromptPairs
from tensorlens_tl.passes.inputs import IdsLike
from tensorlens_tl.results import ARROW, TARGET

__all__ = ["PROGRAMS", "Program", "Truth", "Why", "program"]

SHARP = 40.0
"""The score of a key that matches, above one that does not: exp(−40) of the attention goes elsewhere."""

CONSTANT = 100.0
"""The length of the constant vector that programs with norms hold in their stream."""

BOS = "<|bos|>"


# --------------------------------------------------------------------------- weights by hand


class Spaces:
    """Named groups of channels of a residual stream.

    Args:
        sizes: channels of each, in their order.
    """

    def __init__(self, **sizes: int) -> None:
        self.width = sum(sizes.values())
        starts = torch.tensor([0, *sizes.values()]).cumsum(0).tolist()
        self._places = {name: slice(starts[i], starts[i] + size) for i, (name, size) in enumerate(sizes.items())}

    def read(self, name: str, matrix: Float[Tensor, "space out"] | None = None) -> Float[Tensor, "width out"]:
        """The map from the stream to a space's channels, times a matrix."""
        place = self._places[name]
        matrix = torch.eye(place.stop - place.start).double() if matrix is None else matrix.double()
        projection = torch.zeros(self.width, matrix.shape[1], dtype=torch.float64)
        projection[place] = matrix
        return projection

    def write(self, name: str, matrix: Float[Tensor, "values space"] | None = None) -> Float[Tensor, "values width"]:
        """A matrix, times the map from a space's channels to the stream."""
        return self.read(name, None if matrix is None else matrix.T).T

    def head(self, query: tuple[Any, ...], key: tuple[Any, ...], value: tuple[Any, ...], out: str) -> "Head":
        """A head that reads its query, key and value from spaces, by a matrix or as they are, and writes to another."""
        return Head(self.read(*query), self.read(*key), self.read(*value), self.write(out))


@dataclass(frozen=True, eq=False)
class Head:
    """One head: score = (x_i query) · (x_j key), and Σ_j pattern_ij (x_j value) output is written."""

    query: Float[Tensor, "width match"]
    key: Float[Tensor, "width match"]
    value: Float[Tensor, "width moved"]
    output: Float[Tensor, "moved width"]


@dataclass(frozen=True, eq=False)
class Neurons:
    """A ReLU layer: relu(x read + bias) write."""

    read: Float[Tensor, "width neuron"]
    bias: Float[Tensor, "neuron"]
    write: Float[Tensor, "neuron width"]


@dataclass(frozen=True, eq=False)
class Design:
    """A whole transformer, without norms.

    Attributes:
        words: its vocabulary; token ids are places in it.
        tokens: what each token's embedding is, `[word, width]`.
        positions: what each position's embedding is, `[pos, width]`.
        layers: the heads of each layer.
        neurons: the ReLU layer after a layer's heads, by layer.
        unembed: logits from the stream, `[width, word]`.
    """

    words: tuple[str, ...]
    tokens: Float[Tensor, "word width"]
    positions: Float[Tensor, "pos width"]
    layers: tuple[tuple[Head, ...], ...]
    unembed: Float[Tensor, "width word"]
    neurons: dict[int, Neurons] = field(default_factory=dict[int, Neurons])

    def model(self, name: str, kind: str | None, *, norm: bool, dtype: torch.dtype) -> Any:
        """The TransformerLens model of a program's name; other arguments as of `Program.model`."""
        width = self.tokens.shape[1]
        basis = torch.eye(width).double()
        constant = torch.zeros(width).double()
        if norm:
            basis = torch.cat([basis, -basis, torch.zeros(width, 2).double()], dim=1) / math.sqrt(2)
            constant = torch.tensor([0.0] * 2 * width + [1.0, -1.0]).double() * CONSTANT / math.sqrt(2)
        heads = [head for layer in self.layers for head in layer]
        sizes = {
            "n_layers": len(self.layers),
            "n_heads": max(len(layer) for layer in self.layers),
            "d_head": max(max(head.query.shape[1], head.value.shape[1]) for head in heads),
            "d_mlp": max([1, *(len(neurons.bias) for neurons in self.neurons.values())]),
            "d_model": basis.shape[1],
            "d_vocab": len(self.words),
            "n_ctx": len(self.positions),
            "attn_only": not self.neurons,
            "act_fn": "relu",
            "normalization_type": "LN" if norm else None,
        }
        model = _empty(kind, sizes, dtype, f"tensorlens-program-{name}{'-norm' * norm}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            _write(model.embed.W_E, self.tokens @ basis)
            _write(model.pos_embed.W_pos, self.positions @ basis + constant)
            _write(model.unembed.W_U, basis.T @ self.unembed)
            for number, block in enumerate(model.blocks):
                _write_heads(block.attn, self.layers[number], basis)
                neurons = self.neurons.get(number)
                if neurons is not None:
                    _write(block.mlp.W_in, basis.T @ neurons.read)
                    _write(block.mlp.b_in, neurons.bias)
                    _write(block.mlp.W_out, neurons.write @ basis)
            for gain in _gains(model) if norm else []:
                gain.fill_(CONSTANT / math.sqrt(basis.shape[1]))
        return model.eval()


def _write(weight: Tensor, value: Tensor) -> None:
    """Copy into the first rows, columns and heads of a weight."""
    weight.data[tuple(slice(size) for size in value.shape)].copy_(value)


def _write_heads(attention: Any, heads: tuple[Head, ...], held: Float[Tensor, "width d_model"]) -> None:
    for number, head in enumerate(heads):
        one = slice(number, number + 1)
        scale = math.sqrt(attention.W_Q.shape[-1])  # which the model divides scores by
        _write(attention.W_Q[one], (held.T @ head.query * scale)[None])
        _write(attention.W_K[one], (held.T @ head.key)[None])
        _write(attention.W_V[one], (held.T @ head.value)[None])
        _write(attention.W_O[one], (head.output @ held)[None])


def _gains(model: Any) -> list[Tensor]:
    """The gain of every norm."""
    blocks = [getattr(block, name) for block in model.blocks for name in ("ln1", "ln2") if hasattr(block, name)]
    norms = [*blocks, model.ln_final]
    return [norm.w if hasattr(norm, "w") else norm.weight for norm in norms]


def _empty(kind: str | None, sizes: dict[str, Any], dtype: torch.dtype, name: str) -> Any:
    """A model of these sizes; what its weights are is of no account."""
    try:
        from transformer_lens import HookedTransformer, HookedTransformerConfig
    except ImportError:  # TransformerLens 4
        HookedTransformer = HookedTransformerConfig = None
    if kind not in (None, "hooked", "bridge"):
        raise InvalidInputError(f"kind={kind!r}; use 'hooked' or 'bridge'.")
    if kind == "hooked" and HookedTransformer is None:
        raise InvalidInputError(
            "kind='hooked': TransformerLens 4 has no HookedTransformer; use kind='bridge', or transformer-lens 3.9."
        )
    if kind == "bridge" or HookedTransformer is None or HookedTransformerConfig is None:
        from transformer_lens.config import TransformerBridgeConfig
        from transformer_lens.model_bridge import TransformerBridge

        config = TransformerBridgeConfig(**sizes, init_weights=False)
        return TransformerBridge.boot_native(config, dtype=dtype, device="cpu", model_name=name)
    config = HookedTransformerConfig(
        **sizes, dtype=dtype, device="cpu", init_weights=False, model_name=name, default_prepend_bos=False
    )
    return HookedTransformer(config, move_to_device=False)


# --------------------------------------------------------------------------- a program


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
        return self.design.model(self.name, kind, norm=norm, dtype=dtype)

    def words(self, tokens: IdsLike) -> list[str]:
        """A prompt's tokens, readable."""
        return [self.design.words[token] for token in plain(tokens)]

    def prompts(self, prompts: Whole = 50, *, seed: Seed = 0) -> Int[Tensor, "prompt pos"]:
        """Random prompts, each with an answer at every one of `queries`.

        Raises:
            InvalidInputError: fewer than one.
        """
        rng = random.Random(whole_seed(seed))
        return torch.tensor([self.sample(rng) for _ in range(whole_count("prompts", prompts))])

    def truth(self, tokens: IdsLike, query: Whole = -1) -> Truth:
        """What is true of one prompt.

        Args:
            tokens: the prompt's token ids.
            query: one of `queries`; −1 is the last of them.

        Raises:
            InvalidInputError: no such query.
        """
        return self.explain(list(plain(tokens)), self._query(query))

    def answers(self, prompts: Whole = 50, *, seed: Seed = 0, query: Whole = -1) -> KnownAnswers:
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

    def components(self, prompts: Whole = 20, *, seed: Seed = 0, change: str = "source") -> KnownComponents:
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
        rng = random.Random(whole_seed(seed))
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

    def attention(self, prompts: Whole = 20, *, seed: Seed = 0, query: Whole = -1) -> KnownAttention:
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


# --------------------------------------------------------------------------- what several programs are made of

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
SEPARATOR = "|"
EMBED = frozenset({"embed"})
POSITION = frozenset({"pos_embed"})
PREVIOUS = frozenset({"L0H0"})

CONFIDENCE = 10.0
"""The logit of the right answer, where a whole token is copied; all others are 0."""


def idle(spaces: Spaces, positions: int) -> Head:
    """A head that attends to all tokens, to later ones a little more, and writes what nothing reads."""
    always = torch.ones(positions, 1)
    later = torch.arange(positions)[:, None] / 4
    return spaces.head(("position", always), ("position", later), ("token",), "idle")


def before(spaces: Spaces, positions: int, value: str, out: str) -> Head:
    """A head that copies a space of the position before."""
    one_before = torch.diag(torch.ones(positions - 1), -1)
    return spaces.head(("position", SHARP * one_before), ("position",), (value,), out)


def design(
    words: tuple[str, ...],
    spaces: Spaces,
    heads: list[Head],
    neurons: dict[int, Neurons] | None = None,
    unembed: Float[Tensor, "width word"] | None = None,
) -> Design:
    """One head of the program in each layer, and an idle one."""
    unembed = CONFIDENCE * spaces.read("answer") if unembed is None else unembed
    positions = spaces.write("position")
    layers = tuple((head, idle(spaces, len(positions))) for head in heads)
    return Design(words, spaces.write("token"), positions, layers, unembed, neurons or {})


def vocabulary(*special: str, letters: int) -> tuple[tuple[str, ...], list[int]]:
    """The words of a program, and the token ids of its letters."""
    words = (BOS, *special, *LETTERS[:letters])
    return words, list(range(len(words) - letters, len(words)))


def places(*positions: int) -> frozenset[int]:
    """Positions as a set."""
    return frozenset(positions)


def by_position(layer: int, query: int, key: int) -> Why:
    """A choice of the layer's first head that position embeddings alone make."""
    return Why(layer, 0, query, key, places(query), places(key), POSITION, POSITION)


def swapped(row: Row, first: int, second: int) -> Row:
    """The row with two of its tokens exchanged."""
    row[first], row[second] = row[second], row[first]
    return row


def replaced(row: Row, place: int, letters: list[int], rng: random.Random) -> Row:
    """The row with a letter in one place that it has nowhere."""
    row[place] = rng.choice([letter for letter in letters if letter not in row])
    return row


# --------------------------------------------------------------------------- programs that move tokens


def previous_token() -> Program:
    """L0H0 attends to the token before, and copies it."""
    positions = 12
    words, letters = vocabulary(letters=12)
    spaces = Spaces(token=len(words), position=positions, answer=len(words), idle=len(words))

    def explain(row: Row, query: int) -> Truth:
        path = (("embed", query - 1), ("L0H0", query))
        return Truth(row[query - 1], (path,), (by_position(0, query, query - 1),))

    return Program(
        "previous-token",
        "says the token before",
        design(words, spaces, [before(spaces, positions, "token", "answer")]),
        tuple(range(2, 10)),
        lambda rng: [0, *rng.choices(letters, k=9)],
        explain,
        {"source": Change(lambda row, rng: replaced(row, len(row) - 2, letters, rng), *carried("L0H0.v"))},
    )


def two_back() -> Program:
    """L0H0 copies the token before; L1H0 copies what L0H0 has put there, one position before."""
    positions = 12
    words, letters = vocabulary(letters=12)
    spaces = Spaces(token=len(words), position=positions, previous=len(words), answer=len(words), idle=len(words))
    heads = [before(spaces, positions, "token", "previous"), before(spaces, positions, "previous", "answer")]

    def explain(row: Row, query: int) -> Truth:
        path = (("embed", query - 2), ("L0H0", query - 1), ("L1H0", query))
        return Truth(row[query - 2], (path,), (by_position(0, query - 1, query - 2), by_position(1, query, query - 1)))

    return Program(
        "two-back",
        "says the token two before, by way of the one between",
        design(words, spaces, heads),
        tuple(range(3, 10)),
        lambda rng: [0, *rng.choices(letters, k=9)],
        explain,
        {"source": Change(lambda row, rng: replaced(row, len(row) - 3, letters, rng), *carried("L0H0.v", "L1H0.v"))},
    )


def reverse() -> Program:
    """Letters, a separator, and the letters again from the last to the first.

    L0H0 finds the separator and copies its position s. At query p, a neuron of MLP0 for each pair (s, p) writes where
    to look, 2s − 1 − p; L1H0 looks there and copies the token.
    """
    positions = 12
    words, letters = vocabulary(SEPARATOR, letters=12)
    spaces = Spaces(
        token=len(words), position=positions, separator=positions, aim=positions, answer=len(words), idle=len(words)
    )
    score = torch.zeros(len(words), 1)
    score[:2, 0] = torch.tensor([SHARP, 2 * SHARP])  # the first token, where there is no separator yet
    find = spaces.head(("position", torch.ones(positions, 1)), ("token", score), ("position",), "separator")
    copy = spaces.head(("aim", SHARP * torch.eye(positions)), ("position",), ("token",), "answer")
    pairs = [(s, p) for s in range(2, positions) for p in range(s, min(2 * s - 1, positions))]
    one_hot = torch.eye(positions)
    both = Neurons(  # 1 where separator and query are the pair's, nothing where one of them is not
        spaces.read("separator", 2 * one_hot[:, [s for s, _ in pairs]])
        + spaces.read("position", 2 * one_hot[:, [p for _, p in pairs]]),
        torch.full((len(pairs),), -3.0).double(),
        spaces.write("aim", one_hot[[2 * s - 1 - p for s, p in pairs]]),
    )

    def sample(rng: random.Random) -> Row:
        row = rng.sample(letters, rng.choice([5, 6, 7]))
        return [0, *row, 1, *reversed(row)][:11]

    def explain(row: Row, query: int) -> Truth:
        separator = row.index(1)
        source = 2 * separator - 1 - query
        finds = Why(0, 0, query, separator, places(query), places(separator), POSITION, EMBED)
        read = frozenset({"MLP0"})
        copies = Why(1, 0, query, source, places(separator, query), places(source), read, POSITION)
        return Truth(row[source], ((("embed", source), ("L1H0", query)),), (finds, copies))

    def other_source(row: Row, rng: random.Random) -> Row:
        return replaced(row, 2 * row.index(1) - len(row), letters, rng)

    return Program(
        "reverse",
        "says the letters before the separator, from the last to the first",
        design(words, spaces, [find, copy], {0: both}),
        (8, 9, 10),
        sample,
        explain,
        {
            "source": Change(other_source, *carried("L1H0.v")),
            "choice": Change(
                lambda row, _: swapped(row, row.index(1), row.index(1) + 1), *carried("L0H0.k", "MLP0", "L1H0.q")
            ),
        },
    )


def sort() -> Program:
    """Letters, a separator, and the letters again in their order.

    L0H0 scores each letter by how soon it comes after the query's own token in the alphabet, and copies the first.
    """
    words, letters = vocabulary(SEPARATOR, letters=26)
    positions = 12
    last = len(words)
    spaces = Spaces(token=len(words), position=positions, answer=len(words), idle=len(words))
    query_word = torch.arange(len(words))[:, None]
    key_word = torch.arange(len(words))
    later = (key_word > query_word) & (query_word >= 1)  # the separator asks for the first of all
    table = torch.where(later, SHARP * (last - (key_word - query_word)), 0)
    copy = spaces.head(("token", table), ("token",), ("token",), "answer")

    def sample(rng: random.Random) -> Row:
        row = rng.sample(letters[::2], 5)  # every other letter, so that the next one can take its place
        return [0, *row, 1, *sorted(row)[:-1]]

    def explain(row: Row, query: int) -> Truth:
        end = row.index(1)
        answer = min(letter for letter in row[1:end] if letter > row[query])
        source = row.index(answer)
        why = Why(0, 0, query, source, places(query), places(source), EMBED, EMBED)
        return Truth(answer, ((("embed", source), ("L0H0", query)),), (why,))

    def other_source(row: Row, rng: random.Random) -> Row:
        source = row.index(explain(row, len(row) - 1).answer)
        row[source] += 1
        return row

    def other_choice(row: Row, rng: random.Random) -> Row:
        row[-1] = rng.choice(row[row.index(1) : -1])
        return row

    return Program(
        "sort",
        "says the letters before the separator in the order of the alphabet",
        design(words, spaces, [copy]),
        (6, 7, 8, 9, 10),
        sample,
        explain,
        {"source": Change(other_source, *carried("L0H0.v")), "choice": Change(other_choice, *carried("L0H0.q"))},
    )


# --------------------------------------------------------------------------- programs that look something up


RARE = 0.1
"""In `counting`: the attention that a counted letter gets, as a share of the first token's."""

LOGITS = 5000.0
"""In `counting`: what logits are multiplied by; the right digit is then above its neighbours by 8 or more."""


def induction() -> Program:
    """A segment of different letters, and its beginning again.

    L0H0 notes at each token which one came before; L1H0 attends to where that is the query's own token, and copies.
    """
    positions = 16
    words, letters = vocabulary(letters=16)
    spaces = Spaces(token=len(words), position=positions, previous=len(words), answer=len(words), idle=len(words))
    match = spaces.head(("token", SHARP * torch.eye(len(words))), ("previous",), ("token",), "answer")

    def sample(rng: random.Random) -> Row:
        row = rng.sample(letters, 8)
        return [0, *row, *row[:4]]

    def explain(row: Row, query: int) -> Truth:
        source = row.index(row[query]) + 1
        why = Why(1, 0, query, source, places(query), places(source - 1), EMBED, PREVIOUS)
        return Truth(row[source], ((("embed", source), ("L1H0", query)),), (by_position(0, source, source - 1), why))

    return Program(
        "induction",
        "goes on with a segment that it has seen",
        design(words, spaces, [before(spaces, positions, "token", "previous"), match]),
        (9, 10, 11, 12),
        sample,
        explain,
        {
            "source": Change(lambda row, rng: replaced(row, 5, letters, rng), *carried("L1H0.v")),
            # the query's own token then stands elsewhere, and another follows it
            "choice": Change(lambda row, _: swapped(row, 4, 7), *carried("L0H0.v", "L1H0.k")),
        },
    )


def two_hop() -> Program:
    """Pairs such as ``a b`` and ``b c`` in any order, then ``a``, which asks for ``c``.

    L0H0 notes at the second of each pair which one is the first; L1H0 finds the question's partner, L2H0 that one's.
    """
    pairs = 4
    words, letters = vocabulary(letters=12)
    positions = 12
    ends = range(2, 2 * pairs + 1, 2)
    spaces = Spaces(
        token=len(words), position=positions, previous=len(words), hop=len(words), answer=len(words), idle=len(words)
    )
    aim = torch.zeros(positions, positions)
    aim[:, 0] = SHARP  # all others than a pair's end attend to the first token, and note nothing
    aim[list(ends)] = SHARP * torch.eye(positions)[[end - 1 for end in ends]]
    known = torch.eye(len(words))
    known[0] = 0
    note = spaces.head(("position", aim), ("position",), ("token", known), "previous")
    match = SHARP * torch.eye(len(words))
    first = spaces.head(("token", match), ("previous",), ("token",), "hop")
    second = spaces.head(("hop", match), ("previous",), ("token",), "answer")

    def sample(rng: random.Random) -> Row:
        a, b, c, d, e, f = rng.sample(letters, 6)
        facts = [(a, b), (b, c), (d, e), (e, f)]
        rng.shuffle(facts)
        return [0, *(letter for fact in facts for letter in fact), a, c, d]

    def explain(row: Row, query: int) -> Truth:
        partner = {row[end - 1]: end for end in ends}
        middle = partner[row[query]]
        source = partner[row[middle]]
        hop = Why(1, 0, query, middle, places(query), places(middle - 1), EMBED, PREVIOUS)
        answer = Why(2, 0, query, source, places(middle), places(source - 1), frozenset({"L1H0"}), PREVIOUS)
        choices = (by_position(0, source, source - 1), hop, answer)
        return Truth(row[source], ((("embed", source), ("L2H0", query)),), choices)

    def other_source(row: Row, rng: random.Random) -> Row:
        (source,) = explain(row, 11).sources
        return replaced(row, source, letters, rng)

    def other_choice(row: Row, rng: random.Random) -> Row:
        row[11] = row[9]
        return row

    return Program(
        "two-hop",
        "says the partner of the question's partner",
        design(words, spaces, [note, first, second]),
        (9, 11),
        sample,
        explain,
        {
            "source": Change(other_source, *carried("L2H0.v")),
            "choice": Change(other_choice, *carried("L1H0.q", "L2H0.q")),
        },
    )


def counting() -> Program:
    """Letters and dots, then questions such as ``?a``: how many of that letter are there?

    L0H0 attends to the first token, and to each letter asked for `RARE` as much; of n letters it writes the attention
    f_n = n·RARE / (1 + n·RARE) that they get together. The logit of the digit k is 2·f·f_k − f_k² (times `LOGITS`),
    which is largest where f_k is nearest to f.
    """
    digits = tuple("0123456")
    question_words = tuple(f"?{letter}" for letter in "abcd")
    words = (BOS, ".", *"abcd", *question_words, *digits)
    dot = 1
    letters = [2, 3, 4, 5]
    questions = 6
    numbers = 10
    positions = 12
    slots = 9
    spaces = Spaces(token=len(words), position=positions, count=1, idle=len(words))
    table = torch.zeros(len(words), len(words))
    is_letter = torch.zeros(len(words), 1)
    table[questions:numbers, letters] = SHARP * torch.eye(len(letters))
    table[questions:numbers, 0] = SHARP - math.log(RARE)
    is_letter[letters] = 1
    count = spaces.head(("token", table), ("token",), ("token", is_letter), "count")
    shares = RARE * torch.arange(len(digits)).double()
    shares = shares / (1 + shares)
    slope = torch.zeros(len(words)).double()
    offset = torch.full((len(words),), -1.0).double()
    slope[numbers:] = 2 * shares
    offset[numbers:] = -(shares**2)
    unembed = spaces.read("count", slope[None]) + spaces.read("position", offset.expand(positions, -1))

    def sample(rng: random.Random) -> Row:
        while True:
            row = rng.choices([dot, *letters], k=slots)
            some = [letter for letter in letters if 2 <= row.count(letter) < len(digits)]
            if len({row.count(letter) for letter in some}) > 1:
                break
        first = rng.choice(some)
        second = rng.choice([letter for letter in some if row.count(letter) != row.count(first)])
        return [0, *row, *(questions + letters.index(letter) for letter in (first, second))]

    def explain(row: Row, query: int) -> Truth:
        letter = letters[row[query] - questions]
        matches = [place for place in range(1, slots + 1) if row[place] == letter]
        why = Why(0, 0, query, matches[0], places(query), places(matches[0]), EMBED, EMBED)
        paths = tuple((("embed", place), ("L0H0", query)) for place in matches)
        return Truth(numbers + len(matches), paths, (why,), (("pos_embed", query),))

    def other_source(row: Row, rng: random.Random) -> Row:
        row[rng.choice(sorted(explain(row, len(row) - 1).sources))] = dot
        return row

    def other_choice(row: Row, rng: random.Random) -> Row:
        row[-1] = row[-2]
        return row

    return Program(
        "counting",
        "says how many of the letter asked for there are",
        design(words, spaces, [count], unembed=LOGITS * unembed),
        (slots + 1, slots + 2),
        sample,
        explain,
        {
            "source": Change(other_source, *carried("L0H0.v", more=(f"embed{ARROW}L0H0.k",))),
            "choice": Change(other_choice, *carried("L0H0.q")),
        },
    )


# --------------------------------------------------------------------------- all of them by name


_BUILDERS = {
    "previous-token": previous_token,
    "two-back": two_back,
    "reverse": reverse,
    "sort": sort,
    "induction": induction,
    "two-hop": two_hop,
    "counting": counting,
}

PROGRAMS = tuple(_BUILDERS)
"""The names of the programs."""


def program(name: str) -> Program:
    """A program by its name.

    Args:
        name: one of `PROGRAMS`.

    Raises:
        InvalidInputError: no program of that name.

    >>> program = tlens.demo.program("induction")
    >>> program.model().cfg.n_layers
    2
    """
    check_choice("program", name, PROGRAMS)
    return _program(name)


@cache
def _program(name: str) -> Program:
    return _BUILDERS[name]()
