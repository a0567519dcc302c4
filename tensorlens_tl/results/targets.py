"""What is explained, in words: of a whole result, and at each query of each prompt."""

import re
from ast import literal_eval
from collections.abc import Sequence
from typing import Any

from jaxtyping import Int
from torch import Tensor

from tensorlens_tl._arguments import plain
from tensorlens_tl.models import NEXT
from tensorlens_tl.passes.inputs import joined
from tensorlens_tl.passes.operator import EACH_NEXT, RANKED
from tensorlens_tl.results.entry import LIST_OF_TOKENS, MINUS, shown_target

SEVERAL_TARGETS = "a target of its own for each prompt"
"""What is explained, where that differs."""

EACH_GENERATED = "each generated token"
"""What is explained of generated text, a query for each token."""

EACH_SPAN = "each prompt's span"
"""What is explained of generated text after several prompts, a query for each span."""

EACH_MINUS = "each minus token"
"""What generated tokens are compared with, where that differs."""

MEAN_QUERY = "mean over the queries"
"""What is explained with ``query="mean"``."""

OF_GENERATED = ("generated", "asked")
"""Options of an attribution of generated text: where its generated tokens stand, and which of them are asked about."""


TOKENS_OF_QUERIES = "explained"
"""Option of an attribution whose queries or prompts have tokens of their own: the texts of target and foil of each."""


Explained = Any
"""An `Attribution`, whose module imports this one."""


def explained_positions(result: Explained, batch: int) -> list[list[int]]:
    """The positions of the tokens that each query of a prompt is about: its own, or those that the model wrote."""
    queries = result.queries[batch].tolist()
    written = _spans(result, batch)
    if written and len(queries) == 1:
        return [list(dict.fromkeys(written))]  # a word may hold several of them
    generated = iter(written)
    return [[next(generated, position) if result.mask[batch, position] else position] for position in queries]


def query_texts(result: Explained, batch: int) -> list[str]:
    """What each query of a prompt is, in words: its token, or the stretch of text that it stands for."""
    if isinstance(result.options.get("query"), str) and result.options["query"] == "mean":
        return [MEAN_QUERY]
    tokens = result.tokens[batch]
    return [joined([tokens[place] for place in places]) for places in explained_positions(result, batch)]


def target_texts(result: Explained, batch: int) -> list[str]:
    """What is explained at each query of a prompt, in words, its own tokens named."""
    tokens = result.tokens[batch]
    explained = explained_positions(result, batch)
    labels = list[str]()
    for row, position in enumerate(result.queries[batch].tolist()):
        label = _label_of_query(result, batch, row)
        after = position + 1
        if EACH_SPAN in label:
            label = label.replace(EACH_SPAN, span_text([tokens[place] for place in _spans(result, batch)]))
        elif EACH_GENERATED in label and result.mask[batch, position]:
            label = label.replace(EACH_GENERATED, repr(tokens[explained[row][0]]))
        elif EACH_NEXT in label and after < len(tokens) and MEAN_QUERY not in label:
            label = label.replace(EACH_NEXT, repr(tokens[after]))
        labels.append(label)
    return labels


def target_of_prompt(result: Explained, batch: int, row: int | None = None) -> str:
    """What is explained of a prompt, its own tokens named where that is one thing.

    Args:
        result: the attribution.
        batch: the prompt.
        row: one of its queries; None is all of them.
    """
    shown = shown_target(result.target)
    of_each = row is not None and (EACH_GENERATED in shown or EACH_NEXT in shown)
    names_rank = any(rank in shown for rank in RANKED.values())
    if len(result.tokens) == 1 and shown == result.target and not of_each and not names_rank:
        return shown
    texts = target_texts(result, batch)
    if row is not None:
        return texts[row]
    real = result.mask[batch].tolist()
    positions = result.queries[batch].tolist()
    labels = {text for text, position in zip(texts, positions, strict=True) if real[position]}
    if len(labels) == 1:
        return labels.pop()
    return shown


def targets_of_queries(target: str, queries: Int[Tensor, "batch query"]) -> list[list[str]]:
    """A target in words for each prompt and query, with its own of the tokens that the words list.

    >>> from tensorlens_tl.results.targets import targets_of_queries
    >>> targets_of_queries("logit of [' a', ' b'] − [1, 2]", torch.tensor([[4], [5]]))
    [["logit of ' a' − 1"], ["logit of ' b' − 2"]]
    """
    prompts, count = queries.shape

    def of_query(batch: int, row: int) -> str:
        def single(tokens: re.Match[str]) -> str:
            token = _of_query(literal_eval(tokens[0]), batch, row, prompts, count)
            return tokens[0] if isinstance(token, list) else _named(token)

        return shown_target(MINUS.join(re.sub(LIST_OF_TOKENS, single, part) for part in target.split(MINUS)))

    return [[of_query(batch, row) for row in range(count)] for batch in range(prompts)]


def number_of(target: str) -> str:
    """The words of a target before its token, such as ``"change of the logit of "``; nothing where it has no token."""
    number = re.match(r".*?\b(?:logit|probability) of ", target)
    return "" if number is None else number[0]


def span_text(tokens: Sequence[str]) -> str:
    """Generated tokens in words: how many, and where they are few which."""
    count = "1 generated token"
    if len(tokens) != 1:
        count = f"{len(tokens)} generated tokens"
    if len(tokens) > 12:
        return count
    return f"{count} {joined(tokens)!r}"


def _spans(result: Explained, batch: int) -> list[int]:
    """The positions of the generated tokens that a prompt is asked about."""
    rows: Sequence[list[int]] = result.options.get(OF_GENERATED[1], [])
    return rows[batch] if rows else []


def with_next_tokens(result: Any) -> dict[str, Any]:
    """The options of a result, with each query's next token in words: a result of words has its tokens no more."""
    options: dict[str, Any] = result.options
    if EACH_NEXT not in result.target or MEAN_QUERY in result.target or TOKENS_OF_QUERIES in options:
        return options
    minus = plain(options.get("minus"))
    others = [] if minus is None else [minus if isinstance(minus, str) else str(minus)]
    texts = [
        [[*row[position + 1 : position + 2], *others] for position in positions]
        for row, positions in zip(result.tokens, result.queries.tolist(), strict=True)
    ]
    return {**options, TOKENS_OF_QUERIES: texts}


def _label_of_query(result: Explained, batch: int, row: int) -> str:
    """The target in words; where prompts or queries have tokens of their own, those of one query."""
    if result.target == SEVERAL_TARGETS:
        what = "logit of "
    else:
        what = number_of(result.target)
    tokens = _tokens_of_query(result, batch, row)
    if tokens and EACH_MINUS in result.target:
        return result.target.replace(EACH_MINUS, tokens[-1])
    if not tokens or not what or MEAN_QUERY in what:
        return result.target
    return what + " − ".join(tokens)


def _tokens_of_query(result: Explained, batch: int, row: int) -> list[str]:
    """Target and foil of one query of one prompt, in words; none where all queries have the same, or it is unknown."""
    texts: Sequence[Sequence[Sequence[str]]] = result.options.get(TOKENS_OF_QUERIES, [])
    if -len(texts) <= batch < len(texts) and row < len(texts[batch]):
        return [repr(text) for text in texts[batch][row]]
    named = [plain(result.options.get(name)) for name in ("target", "minus")]
    prompts, queries = result.queries.shape
    tokens = [_of_query(value, batch, row, prompts, queries) for value in named if value is not None]
    is_known = not any(isinstance(token, list | tuple) for token in tokens)
    if is_known and any(isinstance(value, list | tuple) for value in named):
        return list(map(_named, tokens))
    return []


def _named(token: Any) -> str:
    """A token of an option, in words."""
    if token is NEXT:
        return EACH_NEXT
    if isinstance(token, str) and token in RANKED:
        return RANKED[token]
    return repr(token)


def _of_query(value: Any, batch: int, row: int, prompts: int, queries: int) -> Any:
    """What a list of tokens says of one query of one prompt."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) == prompts and (prompts > 1 or queries == 1 or isinstance(value[0], list | tuple)):
        value = value[batch]
    if isinstance(value, list | tuple) and len(value) == queries:
        return value[row]
    return value
