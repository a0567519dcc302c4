"""Leave one out: what the prediction loses on the live model when a token is replaced or deleted.

    score of token j = f(prompt) − f(prompt with token j replaced)

f is the target's logit, probability or log-probability at the query (or the difference of two tokens'). Nothing is
frozen. Every token takes one run, and several are run at once as copies of the prompts, between two unchanged copies
(`tensorlens_tl.passes.live`).

In a causal model nothing changes before the replaced token. Tokens are taken in order, and what lies before the first
one in a run is computed once for all, as keys and values from which the model continues. If a model has no such cache,
or an unchanged prompt is not reproduced with it, whole prompts are run: bidirectional models, padded batches, deleted
tokens, TransformerLens' native bridges and state-space models among them.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from tensorlens_tl._arguments import Whole, checked_arguments
from tensorlens_tl.algebra.memory import Memory, in_bytes
from tensorlens_tl.algebra.numerics import upcast
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.hooks import FwdHook, SomeLogits, capture, run
from tensorlens_tl.methods.live_logits import LiveLogits
from tensorlens_tl.models import Query, TokenLike
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.live import Copies, repeated
from tensorlens_tl.passes.replacement import REPLACEMENTS, Placement, Replacement, vocabulary_mean
from tensorlens_tl.registry import register_method
from tensorlens_tl.results import Attribution

Compared = Literal["logit", "probability", "log_probability"]
"""The quantities that can be compared."""

DELETE = "delete"

PARTS = 8
"""How many runs a causal model's tokens are divided into, each sharing the tokens before its first one; more if memory
requires it."""

LEAST = 4
"""The fewest tokens in one such run; short prompts take fewer runs than `PARTS`."""


def _runs(frozen: FrozenPass, options: Mapping[str, Any]) -> int:
    """Count one run for each token."""
    return frozen.tokens.shape[1]


@register_method("leave-one-out", needs=("predictions",), perturbs=True, reads_maps=False, runs=_runs)
@checked_arguments
def leave_one_out(
    frozen: FrozenPass,
    *,
    target: TokenLike = None,
    minus: TokenLike = None,
    of: Compared = "logit",
    replacement: str | Whole | None = None,
    query: Query = -1,
    memory: Memory = None,
) -> Attribution:
    """Score what the target's logit, or its probability, loses when a token is replaced (Li et al. 2016).

    The live model is run on copies of the pass's prompt.

    Args:
        of: ``"logit"``, ``"probability"`` or ``"log_probability"``.
        replacement: ``"mask"`` or ``"pad"`` (the tokenizer's), a token (string or id), ``"mean"`` (the vocabulary's
            mean embedding) or ``"zero"`` (no token embedding; positions stay); or ``"delete"``, which moves later
            tokens up. None is the mask token if there is one, else the mean, as in `evaluate.perturbation` (whose mean
            is that of the prompts). For images and sound ``"zero"`` (the default), or the mean patch of all images of
            the pass.
        query: if its own token is deleted, a causal model is read at the token before it. At the first token, and in a
            bidirectional model, nothing can be read, and the score is 0.

    Raises:
        InvalidInputError: also ``"delete"`` for a model that reads more than tokens.
        UnsupportedModelError: the model predicts no tokens; ``"delete"`` in an encoder–decoder; or a replacement that
            does not reach the first block.

    >>> result = tlens.methods.leave_one_out(frozen, target=" value", of="probability", replacement="delete")
    >>> result.target, result.scores.shape
    ("probability of ' value'", torch.Size([1, 1, 7]))
    """
    live_logits = LiveLogits(frozen, target, minus, query, "leave-one-out")
    in_bytes(memory)
    if of != "logit":
        frozen.view.require_probabilities(f"of={of!r}")
    if replacement == DELETE:
        _refuse_deletion(frozen)
        runs = _Deleted(frozen, live_logits, of)
        name = DELETE
    else:
        chosen = _replacement(frozen, replacement)
        runs = _Replaced(frozen, live_logits, of, chosen)
        name = chosen.name
    batch, pos = frozen.tokens.shape
    losses = torch.zeros(pos, batch, live_logits.positions.shape[1], dtype=upcast(frozen.resid_pre(0)).dtype)
    stop = pos
    if frozen.causal:  # tokens after the last query change nothing
        stop = int(live_logits.positions.max()) + 1
    changed = live_logits.live.changed(
        stop, runs.numbers, runs.error, runs.bytes_per_copy, memory, "leave one out", parts=runs.parts
    )
    for tokens, numbers in changed:
        losses[tokens.start : tokens.stop] = runs.losses(tokens, numbers).cpu()
    scores = losses.permute(1, 2, 0).to(frozen.resid_pre(0)).where(_scored(frozen, live_logits), 0)
    return live_logits.attribution(scores, of=of.replace("_", "-"), options={"of": of, "replacement": name})


def _replacement(frozen: FrozenPass, replacement: Any) -> Replacement:
    if frozen.view.reads != "tokens" and replacement is None:
        replacement = "zero"
    try:
        return Replacement.of(frozen.view, frozen.prompt, replacement, vocabulary_mean(frozen.view))
    except InvalidInputError as error:
        raise InvalidInputError(f"{str(error).rstrip('.')}, or {DELETE!r}.") from error


def _refuse_deletion(frozen: FrozenPass) -> None:
    """Reject deletion of tokens or other inputs with a fixed place."""
    if frozen.view.is_encoder_decoder:
        raise UnsupportedModelError(
            f"replacement={DELETE!r}: tokens of this {frozen.view.description} can be replaced on either side, but not "
            f"deleted; use one of {', '.join(map(repr, REPLACEMENTS))}, or a token."
        )
    if frozen.view.reads != "tokens" or frozen.prompt.extra:
        raise InvalidInputError(
            f"replacement={DELETE!r}: this prompt is more than tokens, and a patch or a frame cannot be deleted; use "
            f"one of {', '.join(map(repr, REPLACEMENTS))}."
        )


def _scored(frozen: FrozenPass, live_logits: LiveLogits) -> Bool[Tensor, "batch query key"]:
    """Return which tokens can matter to which query."""
    number = torch.arange(frozen.tokens.shape[1], device=frozen.mask.device)
    scored = live_logits.real[:, :, None] & frozen.mask[:, None] & (number >= frozen.prompt.special)
    if frozen.causal:
        scored = scored & (number <= live_logits.positions[..., None])
    return scored


class _Runs:
    """Runs on copies of the prompts, each without one token, or unchanged.

    `unchanged` are the prompts' own numbers, `[batch, query]`, from a run that was compared with the pass; `parts` is
    the least number of runs.
    """

    def __init__(self, frozen: FrozenPass, live_logits: LiveLogits, of: Compared) -> None:
        self.frozen = frozen
        self.live_logits = live_logits
        self.of = of
        self.parts = 1
        batch, pos = frozen.tokens.shape
        heads = max((block.attention.heads for block in frozen.view.blocks if block.mixer is None), default=0)
        unembedded = pos if live_logits.positions.shape[1] > 1 else 1
        size = frozen.resid_pre(0).element_size()
        per_prompt = 4 * pos * heads * pos + 2 * unembedded * frozen.view.d_vocab
        self.bytes_per_copy = 2 * frozen.row_bytes + batch * per_prompt * size
        self.unchanged = self._unchanged()

    def numbers(self, copies: Copies) -> Float[Tensor, "copy batch query"]:
        """Return the target's value in each copy, which has one token replaced or none."""
        raise NotImplementedError

    def losses(self, tokens: range, numbers: Float[Tensor, "token batch query"]) -> Float[Tensor, "token batch query"]:
        """Return what each query's value loses without each of these tokens."""
        return self.unchanged - numbers

    def error(self, numbers: Float[Tensor, "batch query"]) -> float:
        """Return the relative error of unchanged prompts against the first run."""
        least = 0.0 if self.of == "probability" else 1.0  # logits and log-probabilities are of order 1
        size = max(least, float(self.unchanged.abs().max()))
        return float((numbers - self.unchanged).abs().max()) / size

    def _unchanged(self) -> Float[Tensor, "batch query"]:
        """Return the values of the unchanged prompts, from one run in the pass's own shape, which must reproduce it."""
        frozen = self.frozen
        at = self.live_logits.in_logits
        name = frozen.points.unembed_in
        assert name is not None  # a model with an unembedding
        some = SomeLogits(frozen.model, name, at)
        activations, output = capture(frozen.model, frozen.inputs, [name], hooks=some.hooks)
        logits = some.of(output)
        self.live_logits.check(activations[name], logits)
        return self._read(logits)

    def _run(
        self, inputs: dict[str, Any], hooks: list[FwdHook], at: Int[Tensor, "copy batch query"]
    ) -> Float[Tensor, "copy batch query"]:
        """Return the values of one run, at positions counted in it."""
        rows = at.flatten(0, 1)
        some = SomeLogits(self.frozen.model, self.frozen.points.unembed_in, rows)
        with torch.no_grad():
            logits = some.of(run(self.frozen.model, inputs, [*hooks, *some.hooks]))
        return self._read(logits.unflatten(0, at.shape[:2]))

    def _read(self, logits: Float[Tensor, "*copy batch query d_vocab"]) -> Float[Tensor, "*copy batch query"]:
        logits = upcast(logits)
        if self.of == "probability":
            logits = logits.softmax(-1)
        elif self.of == "log_probability":
            logits = logits.log_softmax(-1)
        return self.live_logits.read(logits)


class SharedPrefix:
    """Keys and values of the prompts' first tokens, shared by runs of different endings; it grows with `reach`.

    A TransformerBridge continues from Hugging Face's cache, a HookedTransformer from TransformerLens'. The values of
    an unchanged ending are compared with those of the whole run.
    """

    def __init__(self, frozen: FrozenPass) -> None:
        self.frozen = frozen
        self.length = 0
        self._bridge = frozen.view.is_bridge
        self._cache = None
        if not self._bridge:
            device = frozen.inputs["input"].device
            self._cache: Any = TransformerLensKeyValueCache.init_cache(frozen.view.cfg, device, len(frozen.tokens))

    @staticmethod
    def applies(frozen: FrozenPass) -> bool:
        """Whether the pass reads only token ids, causally and without padding, by attention alone."""
        view = frozen.view
        plain = set(frozen.inputs) <= {"input", "attention_mask"} and view.reads == "tokens" and not view.is_whitened
        attends = all(block.mixer is None and not block.has_beside for block in view.blocks)
        # keys that are repeated for their queries do not fit TransformerLens' own cache
        fits = not getattr(view.cfg, "ungroup_grouped_query_attention", False)
        # a user's hooks may count positions
        return plain and attends and fits and frozen.causal and bool(frozen.mask.all()) and not frozen.other_hooks

    def reach(self, stop: int) -> bool:
        """Run up to the token before `stop`; False if the model returns no cache."""
        if stop > self.length:
            inputs: dict[str, Any] = {"input": self.frozen.inputs["input"][:, self.length : stop]}
            if self._bridge:
                inputs |= {"use_cache": True, "return_type": "logits_and_cache"}
                if self._cache is not None:
                    inputs["past_key_values"] = self._cache
                output = run(self.frozen.model, inputs, [])
                self._cache = output[1] if isinstance(output, tuple) else None
            else:
                run(self.frozen.model, inputs | self._masked(self._cache, inputs["input"]), [])
            self.length = stop
        return self._cache is not None and (not self._bridge or hasattr(self._cache, "batch_select_indices"))

    def before(self, inputs: dict[str, Any], copies: int) -> dict[str, Any]:
        """Return the inputs of a run that continues from here, on as many copies of the prompts, copy after copy."""
        rows = torch.arange(len(self.frozen.tokens), device=inputs["input"].device).repeat(copies)
        cache = deepcopy(self._cache)  # a run appends to it
        if self._bridge:
            cache.batch_select_indices(rows)
            return inputs | {"past_key_values": cache, "use_cache": True}
        for entry in cache.entries:
            entry.past_keys = entry.past_keys[rows]
            entry.past_values = entry.past_values[rows]
        cache.previous_attention_mask = cache.previous_attention_mask[rows]
        return inputs | self._masked(cache, inputs["input"])

    @staticmethod
    def _masked(cache: Any, tokens: Tensor) -> dict[str, Any]:
        """Add a mask: without one, a HookedTransformer asks its tokenizer."""
        return {"past_kv_cache": cache, "attention_mask": torch.ones_like(tokens)}


class _Replaced(_Runs):
    """Runs with the token replaced by something else."""

    def __init__(self, frozen: FrozenPass, live_logits: LiveLogits, of: Compared, replacement: Replacement) -> None:
        super().__init__(frozen, live_logits, of)
        self.placement = Placement.of(frozen.view, frozen.prompt, replacement)
        self.prefix = None
        if SharedPrefix.applies(frozen) and not live_logits.live.alone:
            self.prefix = SharedPrefix(frozen)
            self.parts = max(1, min(PARTS, frozen.tokens.shape[1] // LEAST))

    def numbers(self, copies: Copies) -> Float[Tensor, "copy batch query"]:
        """See `_Runs.numbers`."""
        numbers = self._after_prefix(copies)
        if numbers is None:
            return self._with_replaced(copies, 0)
        return numbers

    def _after_prefix(self, copies: Copies) -> Float[Tensor, "copy batch query"] | None:
        """Return values from a run that begins at the first of the tokens; None if the model cannot begin there."""
        start = min((token for token in copies if token is not None), default=0)
        if self.prefix is None or not start:
            return None
        numbers = None
        try:
            with torch.no_grad():
                if self.prefix.reach(start):
                    numbers = self._with_replaced(copies, start)
        except Exception:  # a model may raise anything for a cache that it does not support: run whole prompts instead
            numbers = None
        if numbers is not None:
            after = self.live_logits.positions >= start
            numbers = numbers.where(after.to(numbers.device), self.unchanged)  # earlier queries are unchanged
            errors = [self.error(row) for row, token in zip(numbers, copies, strict=True) if token is None]
            if max(errors, default=float("inf")) <= self.frozen.tolerance:
                return numbers
        self.prefix = None
        return None

    def _with_replaced(self, tokens: Copies, start: int) -> Float[Tensor, "copy batch query"]:
        """Run from the token at `start` onwards."""
        frozen = self.frozen
        copies = len(tokens)
        batch, pos = frozen.tokens.shape
        replaced = torch.zeros(copies, batch, pos, dtype=torch.bool, device=frozen.tokens.device)
        for copy, token in enumerate(tokens):
            if token is not None:
                replaced[copy, :, token] = True
        inputs = repeated(frozen.inputs, copies)
        if start and self.prefix is not None:
            inputs = self.prefix.before({"input": inputs["input"][:, start:]}, copies)
        inputs, hooks = self.placement.put(inputs, replaced.flatten(0, 1)[:, start:])
        at = (self.live_logits.in_logits - start).clamp_min(0)
        return self._run(inputs, hooks, at.expand(copies, *at.shape))


class _Deleted(_Runs):
    """Runs with the token deleted, so that later tokens move up."""

    def numbers(self, copies: Copies) -> Float[Tensor, "copy batch query"]:
        """See `_Runs.numbers`; unchanged prompts are a token longer than the others, and run separately."""
        if self.frozen.tokens.shape[1] == 1:
            return self.unchanged.expand(len(copies), *self.unchanged.shape)
        tokens = [token for token in copies if token is not None]
        if len(tokens) == len(copies) == 1:
            return self._without(tokens)
        if not tokens:
            return self._unchanged()[None]
        # instead of unchanged copies, the first and the last copy have the same token deleted
        numbers = self._without([*tokens, tokens[0]])
        last = self.unchanged + (numbers[-1] - numbers[0])
        return torch.cat([self.unchanged[None], numbers[:-1], last[None]])

    def _without(self, tokens: list[int]) -> Float[Tensor, "token batch query"]:
        frozen = self.frozen
        live_logits = self.live_logits
        batch, pos = frozen.tokens.shape
        number = torch.arange(pos - 1, device=frozen.tokens.device)
        deleted = torch.tensor(tokens, device=frozen.tokens.device)
        remaining = torch.where(number >= deleted[:, None], number + 1, number)  # [copy, pos - 1]
        index = remaining.repeat_interleave(batch, dim=0)
        inputs = repeated(frozen.inputs, len(tokens))
        for name, value in inputs.items():
            if isinstance(value, Tensor) and value.shape[:2] == (batch * len(tokens), pos):
                inputs[name] = value.gather(1, index.to(value.device))
        at = live_logits.positions - (deleted[:, None, None] <= live_logits.positions).long()
        return self._run(inputs, [], at.clamp_min(0))

    def losses(self, tokens: range, numbers: Float[Tensor, "token batch query"]) -> Float[Tensor, "token batch query"]:
        """See `_Runs.losses`; 0 if the query's token is deleted and no other can replace it."""
        frozen = self.frozen
        positions = self.live_logits.positions
        deleted = torch.tensor(tokens, device=frozen.tokens.device)[:, None, None]
        has_predecessor = torch.take_along_dim(frozen.mask, (positions - 1).clamp_min(0), dim=1) & (positions > 0)
        readable = (deleted != positions) | (has_predecessor & (not frozen.capture.real_tokens_look_ahead))
        losses = self.unchanged - numbers
        return torch.where(readable, losses, torch.zeros_like(losses))
