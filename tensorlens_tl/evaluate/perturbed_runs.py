"""The live model on perturbed prompts, compared with itself on the whole ones."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.errors import FrozenModelError, InvalidInputError, PromptNumber
from tensorlens_tl.evaluate.scorers import Explained, ReplacementName, Stretch
from tensorlens_tl.generation import not_causal
from tensorlens_tl.hooks import SomeLogits, capture, foreign_hooks, model_points
from tensorlens_tl.models import FIRST_CHOICE, NEXT, RUNNER_UP, ModelView, TokenLike
from tensorlens_tl.passes import TOLERANCE
from tensorlens_tl.passes.inputs import Prompt, prepare, query_positions
from tensorlens_tl.passes.operator import FIRST_CHOICE_ID, RUNNER_UP_ID, next_ids, token_ids
from tensorlens_tl.passes.replacement import Mean, Placement, Replacement, inputs_of

OF_PREDICTION = ("aopc", "aopc_abs", "logit")
"""Metrics of a prediction."""

RESAMPLED = "resampled"
"""The name of the replacement; a `Replacement` of that name has no tokens before they are drawn for some prompts."""

AT_ONCE = 2**23
"""How many probabilities are held at once, in float64."""


class PerturbedRuns:
    """Runs the live model on perturbed prompts, and compares it with itself on the whole ones.

    User code may act on some rows of a batch only (see `tensorlens_tl.passes.live.runs`): prompts then run one by one
    (`alone`), else between whole ones that must come out the same. A query is one position of each prompt, "all" for
    the mean, or the positions that predict a stretch of generated text, `[prompt, query]` with `NEXT` as the target.
    Damages of several replacements are averaged.
    """

    def __init__(
        self,
        view: ModelView,
        prompt: Prompt,
        query: int | Literal["all"] | Int[Tensor, "prompt query"],
        replacements: Sequence[Replacement],
        metrics: Sequence[str],
        of_output: bool,
        memory: int,
        target: TokenLike = None,
        minus: TokenLike = None,
    ) -> None:
        if isinstance(target, str) and target == FIRST_CHOICE:  # as where none is named
            target = None
        self.model = view.model
        self.prompt = prompt
        self.is_stretch = isinstance(query, Tensor)
        self.query: int | Literal["all"] = -1 if isinstance(query, Tensor) else query
        self.metrics = metrics
        points = model_points(view)
        self.unembed_at = points.unembed_in or points.output
        # a mean over positions is one of the output; a classifier's head reads too few of them
        of_output = of_output or (self.query == "all" and view.class_head is not None)
        self.hidden_at = points.output if of_output else self.unembed_at
        self.positions = None if self.query == "all" else query_positions(prompt, query)
        self.predicts = bool(set(OF_PREDICTION) & set(metrics))
        for metric in set(metrics) & {"aopc", "aopc_abs"}:
            view.require_probabilities(f"metrics={metric!r}")
        self.alone = bool(foreign_hooks(view.model))
        self._placements = [Placement.of(view, prompt, one, singly=self.alone) for one in replacements]
        self.rows = self._rows_at_once(view, memory)
        self.tolerance = TOLERANCE.get(next(view.model.parameters()).dtype, 1e-4)
        self._whole: list[Tensor] = []  # hidden states of whole prompts, and logits where they are read, once known
        nothing = torch.zeros_like(prompt.mask).cpu()
        self._whole = self._measure(torch.arange(len(prompt.tokens)), nothing, self._placements[0])
        self._tokens = self._tokens_of(view, target, minus)
        self._is_named = target is not None or minus is not None

    def _tokens_of(
        self, view: ModelView, target: TokenLike, minus: TokenLike
    ) -> tuple[Int[Tensor, "prompt query"] | None, Int[Tensor, "prompt query"] | None]:
        """The tokens that each prompt is measured by, and those that they are compared with."""
        if self.positions is None:  # a mean over all queries is about no token
            return None, None
        prompts, queries = self.positions.shape
        ids = None
        if target is NEXT:
            ids = next_ids(self.prompt, self.positions).cpu()
        elif target is not None:
            ids = self._ranked("target", token_ids(view, target, prompts, queries=queries))
        elif self.predicts:
            ids = self._whole[1].argmax(-1)
        if minus is None:
            return ids, None
        if ids is None:
            raise InvalidInputError("perturbation: minus= needs target=, or a metric of the prediction.")
        others = self._ranked("minus", token_ids(view, minus, prompts, "minus", queries), ids)
        same = ((ids == others) & self._real(torch.arange(prompts))).any(1)
        if bool(same.any()):
            raise InvalidInputError(
                f"perturbation: target and minus of prompt {int(same.nonzero()[0])} are the same token."
            )
        return ids, others

    def _ranked(
        self, name: str, ids: Int[Tensor, "prompt query"], besides: Int[Tensor, "prompt query"] | None = None
    ) -> Int[Tensor, "prompt query"]:
        """Token ids, with those that are named by the rank of their logits; a runner-up is none of `besides`."""
        words = {FIRST_CHOICE_ID: FIRST_CHOICE, RUNNER_UP_ID: RUNNER_UP}
        for number, word in words.items():
            if not bool((ids == number).any()):
                continue
            if not self.predicts:
                raise InvalidInputError(f"{name}={word!r}: measure 'aopc' or 'logit' as well, or name a token.")
            logits = self._whole[1]
            if number == RUNNER_UP_ID and besides is not None:
                logits = logits.scatter(-1, besides[..., None], -torch.inf)
            ids = torch.where(ids == number, logits.argmax(-1), ids)
        return ids

    def _real(self, index: Int[Tensor, "row"]) -> Bool[Tensor, "row query"]:
        """Which queries of some prompts are none of padding."""
        assert self.positions is not None
        return torch.take_along_dim(self.prompt.mask, self.positions, dim=1).cpu()[index]

    def explained(self, part: slice) -> Explained | Stretch | None:
        """What methods explain of some prompts; None where it is the token that the model predicts."""
        ids, others = self._tokens
        minus = None if others is None else others[part].tolist()
        if self.is_stretch and self.positions is not None:
            return Stretch(self.positions[part], minus)
        if not self._is_named or ids is None:
            return None
        if minus is not None:
            minus = [row[0] for row in minus]
        return Explained(ids[part, 0].tolist(), minus)

    def _rows_at_once(self, view: ModelView, memory: int) -> int:
        """How many perturbed prompts are run together."""
        if self.alone:
            return 1
        pos = self.prompt.tokens.shape[1]
        widest = max((block.mlp.hidden for block in view.blocks if block.mlp is not None), default=0)
        heads = max((block.attention.heads for block in view.blocks if block.mixer is None), default=0)
        per_row = pos * (8 * view.cfg.d_model + 2 * widest + 2 * pos * heads)
        if self.predicts:
            per_row += view.d_vocab * (1 if self.positions is None else self.positions.shape[1])
        return max(1, memory // (4 * per_row))

    def damage(self, part: slice, replaced: Bool[Tensor, "prompt step pos"]) -> Float[Tensor, "metric prompt step"]:
        """Every metric of some prompts with some of their tokens replaced."""
        prompts, steps, _ = replaced.shape
        index = torch.arange(part.start, part.start + prompts).repeat_interleave(steps)
        before = [whole[index] for whole in self._whole]
        ids, others = (None if tokens is None else tokens[index] for tokens in self._tokens)
        real = torch.ones(len(index), 1, dtype=torch.bool) if self.positions is None else self._real(index)
        damages: list[Tensor] = []
        for placement in self._placements:
            after = self._measure(index, replaced.flatten(0, 1), placement)
            damages.append(torch.stack([_damage(name, before, after, ids, others, real) for name in self.metrics]))
        return torch.stack(damages).mean(0).unflatten(1, (prompts, steps))

    def _measure(
        self, index: Int[Tensor, "row"], replaced: Bool[Tensor, "row pos"], placement: Placement
    ) -> list[Float[Tensor, "row query _width"]]:
        """Final hidden states at the queries, and where a metric reads them the logits there."""
        chunks = zip(index.split(self.rows), replaced.split(self.rows), strict=True)
        outputs = [self._between_whole(rows, part, placement) for rows, part in chunks]
        return [torch.cat(parts) for parts in zip(*outputs, strict=True)]

    def _between_whole(self, rows: Tensor, replaced: Tensor, placement: Placement) -> list[Tensor]:
        """One run: a row by itself, or several between the first and the last of their prompts, whole."""
        if len(rows) == 1:
            return self._run(rows, replaced, placement)
        whole = torch.zeros_like(replaced[:1])
        ends = rows[[0, -1]]
        outputs = self._run(torch.cat([ends[:1], rows, ends[1:]]), torch.cat([whole, replaced, whole]), placement)
        # the whole prompts themselves are measured first: their rows beside the ends are the same prompts
        expected = [known[ends] for known in self._whole] or [output[[1, -2]] for output in outputs]
        for output, prompts in zip(outputs, expected, strict=True):
            error = relative_error(output[[0, -1]], prompts)
            if not error <= self.tolerance:
                raise FrozenModelError(
                    f"perturbation: a prompt gives another number in the first or the last row of a batch than "
                    f"elsewhere (they differ by {error:.1e}): something acts on some rows only, and it is none of "
                    "the model's hooks. Let it act on every row; or put it on the model as a hook, and prompts are run "
                    "one by one."
                )
        return [output[1:-1] for output in outputs]

    def _run(self, rows: Tensor, replaced: Tensor, placement: Placement) -> list[Tensor]:
        """What `_measure` gives, of one batch."""
        rows = rows.to(self.prompt.tokens.device)
        inputs, hooks = placement.put(inputs_of(self.prompt, rows), replaced.to(rows.device), rows)
        at = None if self.positions is None else self.positions[rows]
        if at is not None and self.predicts:
            some = SomeLogits(self.model, self.unembed_at, at)
            activations, logits = capture(self.model, inputs, [self.hidden_at], hooks=[*hooks, *some.hooks])
            outputs = [_vectors(activations[self.hidden_at], at), some.of(logits)]
        else:
            activations, _ = capture(self.model, inputs, [self.hidden_at], hooks=hooks, last=self.hidden_at)
            hidden, mask = activations[self.hidden_at], self.prompt.mask[rows]
            if at is None:  # the mean over real tokens
                outputs = [((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))[:, None]]
            else:
                outputs = [_vectors(hidden, at)]
        return [output.double().cpu() for output in outputs]


def _damage(
    metric: str,
    before: list[Tensor],
    after: list[Tensor],
    ids: Int[Tensor, "row query"] | None,
    others: Int[Tensor, "row query"] | None,
    real: Bool[Tensor, "row query"],
) -> Float[Tensor, "row"]:
    """Return one metric, from hidden states and logits of whole prompts and of perturbed ones.

    Metrics of a prediction are about the tokens `ids`, less `others`. Falls of logits are summed over the `real`
    queries, everything else is averaged.
    """
    counts = real.sum(1)
    if metric == "hs_mse":
        return ((after[0] - before[0]).square().mean(-1) * real).sum(1) / counts
    whole = before[1]
    perturbed = after[1]
    assert ids is not None
    if metric != "logit":
        whole = whole.softmax(-1)
        perturbed = perturbed.softmax(-1)
    changes = whole - perturbed
    fall = changes.gather(-1, ids[..., None])[..., 0]
    if others is not None:
        fall = fall - changes.gather(-1, others[..., None])[..., 0]
    fall = (fall * real).sum(1)
    if metric == "logit":
        return fall
    fall = fall / counts
    if metric == "aopc_abs":
        return fall.abs()
    return fall


def _vectors(hidden: Tensor, at: Int[Tensor, "row query"]) -> Float[Tensor, "row query d"]:
    """Vectors at some positions per prompt; a classifier's head may have been given no other."""
    if hidden.ndim == 2:
        return hidden[:, None]
    return torch.take_along_dim(hidden, at[..., None], dim=1)


# ------------------------------------------------------------------ what stands for a token

# A mean embedding, or a token that fits nowhere, takes a trained model to inputs that it has never seen: one of them
# may break a prediction wherever it stands, so that a test by it says nothing about which token mattered. A token that
# the model expects after what stands before keeps the prompt a text.


def replacement_of(view: ModelView, prompt: Prompt, name: ReplacementName, mean: Mean | None = None) -> Replacement:
    """The replacement that a user names; None is ``"resampled"`` of a causal language model that reads tokens alone."""
    if name is not None and not (isinstance(name, str) and name == RESAMPLED):
        return Replacement.of(view, prompt, name, mean)
    why = not_causal(view)
    if why is None and prompt.extra:
        why = f"reads more than tokens here ({', '.join(sorted(prompt.extra))})"
    if why is None and view.unembedding is not None and view.unembedding[0].shape[1] != view.d_vocab:
        why = "has logits that are not those of the tokens that it reads"
    if why is None:
        return Replacement(RESAMPLED)
    if name is None:
        return Replacement.of(view, prompt, None, mean)
    raise InvalidInputError(
        f"replacement={RESAMPLED!r}: a token is drawn from a causal language model's own predictions, and "
        f"{view.description} {why}. Use 'mean', 'zero', or of a model that reads text 'mask' or a token."
    )


def drawn(view: ModelView, prompt: Prompt, replacement: Replacement, draws: int, seed: int) -> list[Replacement]:
    """Return what replaces tokens in some prompts: `draws` times other tokens, or a fixed replacement itself.

    Prompts run one by one without padding; draws depend on the seed, their number and the prompt's tokens, so they are
    the same in every batch.
    """
    if replacement.name != RESAMPLED:
        return [replacement]
    tokens = prompt.tokens.repeat(draws, 1, 1)
    for row, mask in enumerate(prompt.mask):
        ids = prompt.tokens[row, mask]
        seeds = [hash((seed, draw, *ids.tolist())) for draw in range(draws)]
        rngs = [random.Random(one) for one in seeds]
        uniform = torch.tensor([[rng.random() for _ in range(len(ids))] for rng in rngs], dtype=torch.float64)
        parts: list[Tensor] = []
        for probabilities in _expected(view, ids):
            if not bool(torch.isfinite(probabilities).all()):
                raise InvalidInputError(
                    PromptNumber(row),
                    f": replacement={RESAMPLED!r} finds no other token to draw: all are special tokens, or the logits "
                    "are not finite. Use 'mean', 'zero' or a token.",
                )
            first = sum(part.shape[1] for part in parts)
            up_to = probabilities.cumsum(-1)
            at = (uniform[:, first : first + len(up_to)].T * up_to[:, -1:]).contiguous()
            parts.append(torch.searchsorted(up_to, at, right=True).T)
        tokens[:, row, mask] = torch.cat(parts, dim=1).to(tokens.device)
    return [replace(replacement, tokens=some) for some in tokens]


def _expected(view: ModelView, ids: Int[Tensor, "pos"]) -> Iterator[Float[Tensor, "_some d_vocab"]]:
    """Return what the model expects at each position of a prompt, some at a time, in float64 on the CPU.

    The token itself and special ones are excluded. The first position (never replaced where it is BOS) has the mean
    over what follows each token.
    """
    _, logits = capture(view.model, prepare(view, [ids.tolist()]).kwargs, [])
    logits = logits[0]
    ids = ids.cpu()
    size = max(1, AT_ONCE // logits.shape[-1])
    special = torch.tensor(sorted(getattr(view.tokenizer, "all_special_ids", None) or []), dtype=torch.long)
    special = special[special < logits.shape[-1]]

    def without(some: Tensor, besides: Tensor) -> Tensor:
        some = some.double().cpu()
        some[:, special] = -torch.inf
        return some.scatter(1, besides[:, None], -torch.inf).softmax(-1)

    sums = [without(some, ids[:1].expand(len(some))).sum(0) for some in logits.split(size)]
    yield torch.stack(sums).sum(0, keepdim=True) / len(ids)
    for some, besides in zip(logits[:-1].split(size), ids[1:].split(size), strict=True):
        if len(besides):
            yield without(some, besides)
