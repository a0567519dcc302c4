"""Two prompts of different lengths: which of their tokens stand opposite, and how to make them equally long.

A difference of two runs is taken position by position. Where lengths differ, tokens can be left out of the longer
prompt, or others put into the shorter one, at the places where the two differ. The model is run on each mended prompt,
so that a reader sees how far the mend changes what it says.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import islice
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor

from tensorlens_tl.explorer.predictions import Predictor
from tensorlens_tl.passes.inputs import Prompt
from tensorlens_tl.passes.target import token_label

FILLERS = ("\n", " ", ",", " and", " the", ".")
"""What is put into a shorter prompt; each is one token of many vocabularies."""
MOST_TRIED = 8
"""Mends of each kind that the model is run on."""
MOST_OFFERED = 2
"""Mends of each kind that are offered: those that change the prediction least."""

Stretch = tuple[str, int, int, int, int]


def aligned(first: Prompt, second: Prompt) -> list[dict[str, Any]]:
    """Stretches of two prompts' tokens, in their order: what both have, and what stands opposite where they differ."""
    texts = [prompt.str_tokens[0] for prompt in (first, second)]
    return [
        {"first": texts[0][a:b], "second": texts[1][c:d], "same": kind == "equal"}
        for kind, a, b, c, d in _stretches(first, second)
    ]


def _stretches(first: Prompt, second: Prompt) -> list[Stretch]:
    ids = [prompt.tokens[0].tolist() for prompt in (first, second)]
    return [*SequenceMatcher(None, *ids, autojunk=False).get_opcodes()]


class Edit(NamedTuple):
    """The tokens of a changed prompt, and the text that was left out of it or put into it."""

    ids: list[int]
    what: str


def mends(
    prompts: Sequence[Prompt], predictor: Predictor, say: Callable[[Prompt, int], Float[Tensor, "d_vocab"]]
) -> list[dict[str, Any]]:
    """Ways to make two prompts equally long; of each kind those that change the prediction least.

    Args:
        prompts: the two, of different lengths.
        predictor: reads prompts.
        say: the logits after a prompt, of the model that reads the first prompt (0) or the second (1).

    Returns:
        Which prompt is changed and how, its text then, and the probability of its first choice before and after.
    """
    lengths = [prompt.tokens.shape[1] for prompt in prompts]
    long = lengths.index(max(lengths))
    ways = (
        (long, "leave out", _shortened(prompts, long)),
        (1 - long, "put in", _lengthened(prompts, 1 - long, predictor)),
    )
    rows: list[dict[str, Any]] = []
    for which, kind, edits in ways:
        before = say(prompts[which], which).double().softmax(-1)
        choice = int(before.argmax())
        tried: list[dict[str, Any]] = []
        for edit, prompt in islice(_readable(edits, predictor), MOST_TRIED):
            after = say(prompt, which).double().softmax(-1)
            chances = {"before": float(before[choice]), "after": float(after[choice])}
            row = {"which": which, "kind": kind, "what": edit.what, "text": _text(edit.ids, predictor)}
            stays = int(after.argmax()) == choice
            tried.append(row | chances | {"choice": token_label(predictor.view, choice), "stays": stays})
        tried.sort(key=lambda row: (not row["stays"], abs(row["after"] - row["before"])))
        rows += tried[:MOST_OFFERED]
    return rows


def _readable(edits: Iterable[Edit], predictor: Predictor) -> Iterator[tuple[Edit, Prompt]]:
    """Changed prompts whose text has just the tokens that they are meant to have."""
    for edit in edits:
        text = _text(edit.ids, predictor)
        if not text.strip():
            continue
        prompt = predictor.prompt(text)
        if prompt.tokens[0].tolist() == edit.ids:
            yield edit, prompt


def _text(ids: Sequence[int], predictor: Predictor) -> str:
    """Tokens as the text that one types: without those that the tokenizer adds."""
    tokenizer: Any = predictor.view.tokenizer
    special = set(tokenizer.all_special_ids)
    return tokenizer.decode([token for token in ids if token not in special], clean_up_tokenization_spaces=False)


def _shortened(prompts: Sequence[Prompt], long: int) -> Iterator[Edit]:
    """The longer prompt without so many tokens as it has more: of each place where the two differ, or in one piece."""
    ids, texts = prompts[long].tokens[0].tolist(), prompts[long].str_tokens[0]
    surplus = len(ids) - prompts[1 - long].tokens.shape[1]
    differing = [(a, b, (b - a) - (d - c)) for _, a, b, c, d in _differing(prompts, long)]
    gone: list[list[int]] = []
    if all(more >= 0 for _, _, more in differing):
        gone.append([at for a, _, more in differing for at in range(a, a + more)])
        gone.append([at for _, b, more in differing for at in range(b - more, b)])
    inside = {at for a, b, _ in differing for at in range(a, b)}
    pieces = [[*range(start, start + surplus)] for start in range(len(ids) - surplus + 1)]
    gone += sorted((piece for piece in pieces if inside & {*piece}), key=lambda piece: -len(inside & {*piece}))
    for piece in gone:
        rest = [token for at, token in enumerate(ids) if at not in piece]
        yield Edit(rest, "".join(texts[at] for at in piece))


def _lengthened(prompts: Sequence[Prompt], short: int, predictor: Predictor) -> Iterator[Edit]:
    """The shorter prompt filled up: at each place where the two differ, or at the first."""
    ids = prompts[short].tokens[0].tolist()
    surplus = prompts[1 - short].tokens.shape[1] - len(ids)
    differing = [(b, (d - c) - (b - a)) for _, a, b, c, d in _differing(prompts, short)]
    if any(more < 0 for _, more in differing):
        differing = [(differing[0][0], surplus)]
    tokenizer: Any = predictor.view.tokenizer
    for filler in FILLERS:
        filling = tokenizer.encode(filler, add_special_tokens=False)
        if len(filling) != 1:
            continue
        longer = [*ids]
        for at, more in reversed(differing):
            longer[at:at] = filling * more
        yield Edit(longer, filler * surplus)


def _differing(prompts: Sequence[Prompt], first: int) -> list[Stretch]:
    """Where the two differ, the positions of one of them first."""
    stretches = _stretches(prompts[first], prompts[1 - first])
    return [stretch for stretch in stretches if stretch[0] != "equal"]
