"""The targets of results: a token's logit, a logit difference, or any direction of the residual stream."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl._arguments import nearest, plain, whole_number, whole_slice
from tensorlens_tl.errors import InvalidInputError, PromptNumber, UnsupportedModelError
from tensorlens_tl.models import FIRST_CHOICE, NEXT, RUNNER_UP, LayerRange, ModelView, Query, TokenLike
from tensorlens_tl.passes.inputs import Prompt, is_all, query_positions, span_positions
from tensorlens_tl.passes.linearisation import Linearisation, check_explained
from tensorlens_tl.passes.texts import text_ids, token_text

EACH_NEXT = "each query's next token"
"""The description of the target `NEXT`."""

RUNNER_UP_ID = -1
"""A placeholder for the runner-up among the ids of `minus`, until the logits are known."""

FIRST_CHOICE_ID = -2
"""A placeholder for the model's first choice, until the logits are known."""

RANKED = {FIRST_CHOICE: "the first choice", RUNNER_UP: "the runner-up"}
"""Descriptions of the tokens that are named by the rank of their logits."""

RANKED_IDS = {
    "target": {FIRST_CHOICE: FIRST_CHOICE_ID},
    "minus": {FIRST_CHOICE: FIRST_CHOICE_ID, RUNNER_UP: RUNNER_UP_ID},
}
"""Their placeholder ids, by argument."""


def token_ids(
    view: ModelView, tokens: TokenLike, batch: int, name: str = "target", queries: int = 1
) -> Int[Tensor, "batch query"]:
    """Return one token id per prompt and query.

    `tokens` is a text of one token or an id, for all; a list with one for each prompt (for a single prompt, each
    query); or lists ``[batch][query]``. `name` is the argument in messages; ids for ``"target"`` and ``"minus"`` may be
    `RANKED_IDS`. Raises `InvalidInputError` for several tokens, none, one out of the vocabulary, or another count.
    """
    plain_tokens = plain(tokens)
    by_prompt: Sequence[Any] = [plain_tokens] * batch
    if isinstance(plain_tokens, Sequence) and not isinstance(plain_tokens, str):
        by_prompt = plain_tokens
    if len(by_prompt) == queries != batch == 1:
        by_prompt = [by_prompt]
    if len(by_prompt) != batch:
        of_queries = f" (or one for each of its {queries} queries)" if batch == 1 < queries else ""
        raise InvalidInputError(
            f"{name}: {len(by_prompt)} tokens for {batch} prompts; pass one, or one for each prompt{of_queries}. For a "
            "difference of two tokens pass the second as minus=, for a vector use direction=."
        )
    rows: list[list[int]] = []
    for row in by_prompt:
        if isinstance(row, str) or not isinstance(row, Sequence):
            rows.append([_token_id(view, row, name)] * queries)
        elif len(row) == queries:
            rows.append([_token_id(view, token, name) for token in row])
        else:
            raise InvalidInputError(f"{name}: {len(row)} tokens for {queries} queries of a prompt; pass one for each.")
    return torch.tensor(rows)


def next_ids(prompt: Prompt, positions: Int[Tensor, "batch query"], name: str = "target") -> Int[Tensor, "batch query"]:
    """Return the token after each query (arbitrary at padding); raise an error at the last one, or without tokens."""
    if prompt.kwargs.get("input", prompt.tokens).is_floating_point():
        raise InvalidInputError(f"{name}=NEXT: images and sound have no next token; pass a class, or direction=.")
    pos = prompt.mask.shape[1]
    numbers = torch.arange(pos, device=prompt.mask.device)
    last = (numbers * prompt.mask).amax(1, keepdim=True)
    if prompt.encoder_length:  # the decoder's first token does not follow the encoder's last
        inside = prompt.mask[:, : prompt.encoder_length]
        last = torch.cat([(numbers[: prompt.encoder_length] * inside).amax(1, keepdim=True), last], dim=1)
    ends = (positions[..., None] == last[:, None]).any(-1)
    if bool(ends.any()):
        row, query = ends.nonzero()[0].tolist()
        at = int(positions[row, query])
        token = prompt.str_tokens[row][at]
        raise InvalidInputError(
            f"{name}=NEXT: nothing follows position {at} ({token!r}), the last token of ",
            PromptNumber(row),
            ". Use earlier queries, such as query=slice(None, -1), or name a token.",
        )
    return torch.take_along_dim(prompt.tokens, (positions + 1).clamp_max(pos - 1), dim=1)


def _token_id(view: ModelView, token: object, name: str) -> int:
    ranked = RANKED_IDS.get(name, {})
    if isinstance(token, str) and token in ranked:
        _refuse_token_text(view, token, name)
        return ranked[token]
    if isinstance(token, str) and view.labels:
        return _class_number(view, token, name)
    if isinstance(token, str):
        return _id_of_text(view, token, name)
    if isinstance(token, bool) or not isinstance(token, int):
        raise InvalidInputError(f"{name}={token!r}: pass a token as a string or an id, or use direction= for a vector.")
    vocabulary = view.d_vocab
    if view.unembedding is not None:
        vocabulary = view.unembedding[0].shape[1]
    if not 0 <= token < vocabulary and view.labels:
        raise InvalidInputError(f"{name}={token} is no class of this model: classes are 0 to {vocabulary - 1}.")
    if not 0 <= token < vocabulary:
        raise InvalidInputError(
            f"{name}={token} is outside the vocabulary of {vocabulary} tokens; ids are 0 to {vocabulary - 1}."
        )
    return token


def _refuse_token_text(view: ModelView, word: str, name: str) -> None:
    """Raise `InvalidInputError` if a word for a rank is also the text of a token, or a label."""
    numbers = [number for number, label in view.labels.items() if word in map(str.strip, label.split(","))]
    if not view.labels and view.tokenizer is not None:
        ids = text_ids(view, word)
        if len(ids) == 1 and ids[0] != getattr(view.tokenizer, "unk_token_id", None):
            numbers = ids
    if numbers:
        raise InvalidInputError(
            f"{name}={word!r} is {RANKED[word]}, but here also the text of {int(numbers[0])}. Pass that id for this "
            "text; tlens.evaluate.predictions(frozen) returns the ids of predicted tokens, and their logits."
        )


def _id_of_text(view: ModelView, text: str, name: str) -> int:
    """Return the id of a text that is one token.

    Without a leading space a text continues a word, with one it begins a word; if only one of the two is a token, that
    is used. Tokens that the tokenizer itself puts before a text do not count.
    """
    tokenizer = view.tokenizer
    if tokenizer is None:
        others = " or ".join(["a token id", *map(repr, RANKED_IDS.get(name, {}))])
        raise InvalidInputError(f"{name}={text!r}: this model has no tokenizer; pass {others}.")
    ids = text_ids(view, text)
    if not ids:
        raise InvalidInputError(f"{name}={text!r} is empty; pass the text of one token, or its id.")
    if len(ids) != 1:
        pieces = [token_text(view, piece) for piece in ids]
        raise InvalidInputError(
            f"{name}={text!r} is {len(ids)} tokens {pieces}; a target is one token, such as the first of these, or an "
            "id. For several tokens use attribute_generation." + nearest(text, RANKED_IDS.get(name, {}))
        )
    if ids[0] == getattr(tokenizer, "unk_token_id", None) and text != tokenizer.unk_token:
        raise InvalidInputError(f"{name}={text!r} is not in the vocabulary; pass a token the tokenizer knows.")
    return int(ids[0])


def _class_number(view: ModelView, label: str, name: str) -> int:
    """Return the class that a label, or one of its comma-separated synonyms, belongs to."""
    label = label.strip()
    synonyms = {number: [part.strip() for part in text.split(",")] for number, text in view.labels.items()}
    matches = [number for number, text in view.labels.items() if text.strip() == label]
    matches = matches or [number for number, names in synonyms.items() if label in names]
    if len(matches) == 1:
        return matches[0]
    labels = ", ".join(map(repr, list(view.labels.values())[:8])) + " …" * (len(view.labels) > 8)
    what = f"the label of classes {matches}" if matches else "no class"
    near = "" if matches else nearest(label, view.labels.values())
    raise InvalidInputError(
        f"{name}={label!r} is {what} of this model, whose labels are {labels}; or pass a number.{near}"
    )


def token_label(view: ModelView, token: int) -> str:
    """Return a token id, or the number of a class, as readable text."""
    if view.labels or view.tokenizer is None:
        return view.labels.get(token, str(token))
    return token_text(view, token)


def _label_of_text(view: ModelView, text: str) -> str:
    """Return the token that a text denotes; for a word without its space, also the token that it does not denote."""
    if view.labels or view.tokenizer is None:
        return repr(text)
    taken = token_label(view, _id_of_text(view, text, "target"))
    spaced = f" {text}"
    if taken != text or not text[:1].isalpha() or text_ids(view, spaced) == text_ids(view, text):
        return repr(taken)
    other = text_ids(view, spaced)
    if len(other) != 1 or token_label(view, other[0]) != spaced:
        return repr(taken)
    return f"{taken!r} (not {spaced!r})"


UNCAPPED = "uncapped logit"
"""The name of a logit before the model's soft cap."""


def logit_word(view: ModelView, capped: bool = False) -> str:
    """Return the name of a logit: ``"uncapped logit"`` if a soft cap follows, unless it is `capped` already."""
    if view.soft_cap is None or capped:
        return "logit"
    return UNCAPPED


def logit_label(view: ModelView, target: TokenLike, minus: TokenLike = None, *, capped: bool = False) -> str:
    """Return a token target in words: ids are named by their text, and so is a list of one.

    Args:
        view: the model, `frozen.view` of a pass.
        target, minus: tokens, as in `FrozenOperator.target`.
        capped: see `logit_word`.

    >>> from tensorlens_tl.passes.target import logit_label
    >>> logit_label(frozen.view, model.to_single_token(" file"))
    "logit of ' file'"
    >>> logit_label(frozen.view, " file", "runner-up")
    "logit of ' file' − the runner-up"

    If a text is also a token with a leading space, the label says that it does not denote that one.
    """

    def named(token: Any) -> str:
        while isinstance(token, list | tuple) and len(token) == 1:
            token = token[0]
        if token is NEXT:
            return EACH_NEXT
        if isinstance(token, str) and token in RANKED:
            return RANKED[token]
        if isinstance(token, str):
            return _label_of_text(view, token)
        if isinstance(token, int):
            token = token_label(view, token)
        return repr(token)

    tokens = " − ".join(named(plain(token)) for token in (target, minus) if token is not None)
    return f"{logit_word(view, capped)} of {tokens}"


@dataclass(frozen=True)
class Target:
    """Numbers read at the end of a model, one per prompt and query: ``vector · stream + constant``.

    With `of_tokens`, the stream is the unembedded one (a token's logit), otherwise the operator's own output.
    """

    vectors: Float[Tensor, "batch query d"]
    constant: Float[Tensor, "batch query"]
    of_tokens: bool
    label: str


def resolve_target(
    frozen: Any,
    target: TokenLike = None,
    minus: TokenLike = None,
    direction: Any = None,
    positions: Int[Tensor, "batch query"] | None = None,
) -> Target:
    """Check and return the target defined by `target`, `minus` and `direction`.

    Args:
        target: a token, see `token_ids`; `NEXT` is each query's own next token, ``"first-choice"`` the token that the
            model predicts. For None, see `explained_tokens`.
        minus: another token, for ``logit(target) − logit(minus)``; ``"runner-up"`` has the largest logit besides the
            target. In a difference, both words refer to tokens of its first run.
        direction: instead of a token, a vector `[d_model]`, `[batch, d_model]` or `[batch, query, d_model]` at the
            operator's output.
        positions: the queries, None for each prompt's last real token.

    Raises:
        InvalidInputError: both kinds, target and minus the same, a wrong shape, or an error of `token_ids`.
        UnsupportedModelError: the target is a token, but the model's logits are not ``cap(W_U·x + b_U)``.
    """
    check_explained(frozen)
    if positions is None:
        positions = query_positions(frozen.prompt, -1)
    if direction is not None:
        if target is not None or minus is not None:
            raise InvalidInputError("target: pass either tokens or direction=, not both.")
        vectors = _directions(frozen, direction, positions.shape[1])
        return Target(vectors, vectors.new_zeros(vectors.shape[:2]), False, "direction")
    target, minus = explained_tokens(frozen, target, minus, positions)
    with frozen.view.loaded("unembedding"):  # if offloaded, load it only once
        vectors, constant = unembedding_rows(frozen, positions, target, minus)
        return Target(vectors, constant, True, logit_label(frozen.view, target, minus))


def _directions(frozen: Linearisation, direction: Any, queries: int) -> Float[Tensor, "batch query d"]:
    batch = len(frozen.mask)
    width = frozen.output.shape[-1]
    try:
        direction = torch.as_tensor(direction).detach().to(frozen.output)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInputError(f"direction={direction!r} is not a vector of numbers.") from None
    if direction.shape == (batch, width):
        direction = direction[:, None]
    if direction.shape not in ((width,), (batch, 1, width), (batch, queries, width)):
        raise InvalidInputError(
            f"direction is {tuple(direction.shape)}; pass [{width}], one for each prompt, [{batch}, {width}], or one "
            f"for each query as well, [{batch}, {queries}, {width}]."
        )
    if not bool(torch.isfinite(direction).all()):
        raise InvalidInputError("direction has values that are not finite.")
    return direction.expand(batch, queries, width)


def predicts_at(frozen: Linearisation, positions: Int[Tensor, "batch query"]) -> bool:
    """Return whether the model predicts a token or a class at all of these positions."""
    return frozen.view.unembedding is not None and frozen.prompt.predicts(positions)


def explained_tokens(
    frozen: Linearisation, target: TokenLike, minus: TokenLike, positions: Int[Tensor, "batch query"]
) -> tuple[TokenLike, TokenLike]:
    """Return target and minus; by default the first choice against the runner-up.

    In a difference these are the tokens that the two runs predict, or if they agree, that token and the first run's
    runner-up. With only `minus`, the target is the first choice.
    """
    if target is not None:
        return target, minus
    if minus is not None:
        return FIRST_CHOICE, minus
    classes = frozen.view.classes
    if classes is not None and not classes.exclude:  # classes that do not exclude each other have no alternative
        return FIRST_CHOICE, None
    if frozen.view.unembedding is None or len(frozen.runs) == 1:
        return FIRST_CHOICE, RUNNER_UP
    first, second = (likeliest(run, positions) for run in frozen.runs)
    if bool((first == second).all()):
        return FIRST_CHOICE, RUNNER_UP
    return first.tolist(), torch.where(first == second, likeliest(frozen, positions, first), second).tolist()


def target_ids(
    frozen: Linearisation, positions: Int[Tensor, "batch query"], target: TokenLike, minus: TokenLike = None
) -> tuple[Int[Tensor, "batch query"], Int[Tensor, "batch query"] | None]:
    """Return ids of target and minus on the pass's device; see `token_ids`, `next_ids`. They must not be the same."""
    batch, queries = positions.shape

    def read(tokens: TokenLike, name: str) -> Int[Tensor, "batch query"]:
        if tokens is NEXT and frozen.view.classes is not None:
            raise InvalidInputError(f"{name}=NEXT: a classifier predicts no next token; pass a class, or direction=.")
        if tokens is NEXT:
            return next_ids(frozen.prompt, positions, name)
        return token_ids(frozen.view, tokens, batch, name, queries).to(positions.device)

    ids = _with_ranks_read(frozen, positions, read(target, "target"))
    if minus is None:
        return ids, None
    others = _with_ranks_read(frozen, positions, read(minus, "minus"), ids)
    same = (ids == others) & torch.take_along_dim(frozen.mask, positions, dim=1)
    if bool(same.any()):
        label = token_label(frozen.view, int(ids[same][0]))
        raise InvalidInputError(f"target and minus are the same token, {label!r}: their difference is zero everywhere.")
    return ids, others


def _with_ranks_read(
    frozen: Linearisation,
    positions: Int[Tensor, "batch query"],
    ids: Int[Tensor, "batch query"],
    besides: Int[Tensor, "batch query"] | None = None,
) -> Int[Tensor, "batch query"]:
    """Replace the placeholders of tokens that are named by the rank of their logits by their ids."""
    if bool((ids == FIRST_CHOICE_ID).any()):
        ids = torch.where(ids == FIRST_CHOICE_ID, likeliest(frozen, positions), ids)
    if bool((ids == RUNNER_UP_ID).any()):
        ids = torch.where(ids == RUNNER_UP_ID, likeliest(frozen, positions, besides), ids)
    return ids


def likeliest(
    frozen: Linearisation,
    positions: Int[Tensor, "batch query"],
    besides: Int[Tensor, "batch query"] | None = None,
) -> Int[Tensor, "batch query"]:
    """Return the token of largest logit at each query (in a difference, of its first run), without those in `besides`.

    Raises `UnsupportedModelError` if the model predicts no tokens, or its logits are not ``cap(W_U·x + b_U)``.
    """
    run = frozen.runs[0]
    states = torch.take_along_dim(run.unembedded(), positions[..., None], dim=1)
    logits = run.view.logits(states)
    if besides is not None:
        logits = logits.scatter(-1, besides[..., None].to(logits.device), -torch.inf)
    ids = logits.argmax(-1).to(positions.device)
    run.logit_vectors(ids, positions)  # raises if these logits are not the model's
    return ids


def unembedding_rows(
    frozen: Linearisation, positions: Int[Tensor, "batch query"], target: TokenLike, minus: TokenLike = None
) -> tuple[Float[Tensor, "batch query d"], Float[Tensor, "batch query"]]:
    """Return the direction of a token's logit (or a difference) for each prompt and query, and its constant b_U.

    Raises the errors of `target_ids` and `likeliest`.
    """
    if frozen.view.unembedding is None:
        raise UnsupportedModelError(f"target: {frozen.view.description} predicts no tokens; use direction=.")
    ids, others = target_ids(frozen, positions, target, minus)
    vectors, constant = frozen.logit_vectors(ids, positions)
    if others is None:
        return vectors, constant
    other_vectors, other_constant = frozen.logit_vectors(others, positions)
    return vectors - other_vectors, constant - other_constant


# ------------------------------------------------------------------
# Checks of arguments that choose layers, heads, MLPs and source tokens.


def chosen_layers(n_layers: int, layers: LayerRange) -> range:
    """Return a contiguous range from a slice, a sequence, or None for all."""
    if layers is None:
        return range(n_layers)
    if not isinstance(layers, slice):
        layers = plain(layers)
    if not isinstance(layers, slice | Sequence):
        raise InvalidInputError(
            f"layers={layers!r}: use a slice or consecutive layers, such as slice(0, {layers}) for those before the "
            f"input of blocks.{layers}."
        )
    if isinstance(layers, slice):
        layers = whole_slice("layers", layers, why="layers of this model")
        start, stop, step = layers.indices(n_layers)
        bounds = [bound for bound in (layers.start, layers.stop) if bound is not None]
        if step != 1 or start >= stop or any(not -n_layers <= bound <= n_layers for bound in bounds):
            raise InvalidInputError(f"layers={layers}: no such range in a model of {n_layers} layers.")
        return range(start, stop)
    chosen = [whole_number("layers", layer, 0, n_layers - 1, why="layers of this model") for layer in layers]
    if not chosen:
        raise InvalidInputError(f"layers=[]: use layers 0 to {n_layers - 1}.")
    if chosen != list(range(chosen[0], chosen[0] + len(chosen))):
        raise InvalidInputError(f"layers={chosen}: an operator needs consecutive layers without a gap.")
    return range(chosen[0], chosen[-1] + 1)


def end_of(frozen: Linearisation, last: int, final_norm: bool) -> str:
    """Return the end of some layers in words; `last` is the first layer after them."""
    if last < frozen.n_layers:
        return f"{frozen.view.blocks[last].name} input"
    if final_norm and frozen.view.final_norm is not None:
        return "the final norm's output"
    return "the last block's output"


def through_final_norm(frozen: Linearisation, last: int, final_norm: bool | None) -> bool:
    """Return whether to include the final norm: for None, whether the layers end there.

    Raises `InvalidInputError` if it is requested, but the layers end before it.
    """
    if final_norm and last < frozen.n_layers:
        raise InvalidInputError(
            f"final_norm=True: these layers end at {end_of(frozen, last, True)}, before the final norm. Leave it out "
            "for a direction of the stream there; tlens.circuits.logit_lens(frozen, ...) applies the final norm to the "
            "stream before every layer."
        )
    return last == frozen.n_layers and final_norm is not False


def chosen_heads(frozen: Linearisation, layer: int, chosen: range, ids: object) -> list[int]:
    """Return the heads of one layer to keep."""
    if layer not in chosen:
        raise InvalidInputError(f"heads: layer {layer} is not among the operator's layers {list(chosen)}.")
    count = frozen.view.blocks[layer].attention.heads
    if not isinstance(ids, Collection):
        raise InvalidInputError(f"heads: pass a collection of heads for layer {layer}, such as {{{layer}: [0, 2]}}.")
    return [whole_number(f"heads[{layer}]", head, 0, count - 1, why=f"heads of layer {layer}") for head in ids]


def chosen_head(view: ModelView, layer: object, head: object, *, cross: bool = False) -> tuple[int, int]:
    """Return one head as a layer and a query head; with `cross`, a head of an encoder–decoder's cross-attention."""
    layer = whole_number("layer", layer, 0, view.n_layers - 1, why="a layer of this model")
    weights = view.blocks[layer].attention
    if cross:
        check_crossing(view, layer)
        weights = view.blocks[layer].require_cross_attention()
    heads = weights.heads
    kv_heads = weights.kv_heads
    which = f"a head of layer {layer}"
    if cross:
        which += "'s cross-attention"
    if kv_heads != heads:
        which += f" (query heads; each of {kv_heads} key-value heads serves {heads // kv_heads})"
    return layer, whole_number("head", head, 0, heads - 1, why=which)


def check_crossing(view: ModelView, layer: int) -> None:
    """Raise `InvalidInputError` for a layer without cross-attention."""
    if view.blocks[layer].cross_attention is not None:
        return
    raise InvalidInputError(f"layer={layer} has no cross-attention; of this model {view.crossing_layers()}.")


def chosen_mlps(layers: object, chosen: range) -> set[int]:
    """Return the layers whose MLPs to keep."""
    if not isinstance(layers, Collection) or isinstance(layers, Mapping):
        raise InvalidInputError(f"mlp={layers!r}: use True, False, or the layers whose MLPs to keep (each whole).")
    outside = [layer for layer in layers if layer not in chosen]
    if outside:
        raise InvalidInputError(f"mlp: layers {outside} are not among the operator's layers {list(chosen)}.")
    return set(layers)


def places_bias(bias: str) -> bool:
    """Return whether biases are assigned to the positions where they are added, instead of being kept apart."""
    if bias not in ("apart", "position"):
        raise InvalidInputError(f"bias={bias!r}; use 'apart' (not part of the scores) or 'position'.")
    return bias == "position"


@dataclass(frozen=True, eq=False)
class Keys:
    """The requested source tokens.

    Attributes:
        positions: the positions requested in any prompt, ascending.
        mask: True where such a position is a real token.
        columns: each prompt's and key's index in `positions`; None for all in order.
    """

    positions: list[int]
    mask: Bool[Tensor, "batch position"]
    columns: Int[Tensor, "batch key"] | None = None

    @property
    def chosen(self) -> list[int] | None:
        """The positions, or None for all."""
        return None if self.columns is None else self.positions

    def select(self, result: Tensor, dim: int) -> Tensor:
        """Return a result over `positions`, indexed by the requested keys instead."""
        if self.columns is None:
            return result
        in_order = torch.arange(len(self.positions), device=self.columns.device).expand(len(self.columns), -1)
        if torch.equal(self.columns, in_order):  # nothing to copy
            return result
        index = self.columns.reshape(len(self.columns), *(1,) * (dim - 1), -1, *(1,) * (result.ndim - dim - 1))
        return torch.take_along_dim(result, index, dim=dim)


def chosen_keys(prompt: Prompt, keys: Query) -> Keys:
    """Return source tokens, see `span_positions`."""
    mask = prompt.mask
    if is_all(keys):
        return Keys(list(range(mask.shape[1])), mask)
    requested = span_positions(prompt, keys)
    positions = requested.unique()
    return Keys(positions.tolist(), mask[:, positions], torch.searchsorted(positions, requested.contiguous()))
