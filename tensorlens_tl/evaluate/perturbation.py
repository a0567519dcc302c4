"""Perturbation tests: replace source tokens in the order of their scores, and see what that does to the live model.

With the most relevant tokens first (``order="descending"``, positive perturbation) a faithful map breaks the model
sooner: higher is better. With the least relevant first (``"ascending"``, negative perturbation) it leaves the model as
it was: lower is better. After a share f of a prompt's tokens has been replaced, at the query:

| metric | damage(f) |
| --- | --- |
| `hs_mse` | mean squared difference of the final hidden state (what the model unembeds, or what its blocks give) |
| `aopc` | p(0) − p(f), p the probability of the token that was predicted for the whole prompt |
| `logit` | the same token's logit(0) − logit(f) |

An area under the curve is the trapezoid rule over the fractions, divided by their range: the damage averaged over it.
Special tokens and padding are never replaced. (TensorLens 2026, Figures 3 to 7; AOPC: Samek et al. 2017.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm.auto import tqdm

from tensorlens_tl._arguments import whole_number
from tensorlens_tl.algebra.memory import in_bytes
from tensorlens_tl.algebra.numerics import relative_error
from tensorlens_tl.errors import FrozenModelError, InvalidInputError, UnsupportedModelError
from tensorlens_tl.evaluate.scorers import MEAN_TOLERANCE, Scorer, random_scores, scorers_of, usable
from tensorlens_tl.hooks import ModelPoints, capture, foreign_hooks, logit_hooks, logits_at, model_points
from tensorlens_tl.models.view import ModelView
from tensorlens_tl.passes.freezing import TOLERANCE, freeze
from tensorlens_tl.passes.frozen import FrozenPass
from tensorlens_tl.passes.inputs import Prompt, prepare, query_positions
from tensorlens_tl.passes.replacement import Replacement, inputs_of
from tensorlens_tl.results.evaluation import Evaluation, area

FRACTIONS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
METRICS = ("hs_mse", "aopc", "logit")
"""The metrics that are measured unless others are named."""

PREDICTED = ("aopc", "aopc_abs", "logit")
"""Metrics of a prediction."""
HIDDEN = ("unembedded", "output")
PROMPTS_AT_ONCE = 16


def perturbation(
    model: Any,
    prompts: Any,
    methods: Any = None,
    *,
    query: Any = "last",
    fractions: Any = FRACTIONS,
    replacement: Any = None,
    metrics: Any = METRICS,
    order: str = "descending",
    absolute: bool = False,
    hidden: str = "unembedded",
    attention_mask: Any = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
    memory: Any = None,
) -> Evaluation:
    """How much damage is done by replacing the tokens that each method names first.

    Args:
        model: a TransformerLens model.
        prompts: strings, or token ids `[prompt, pos]`; of a model of images or sound, what it reads (see
            `tlens.freeze`): its patches are replaced, or a sound's frames.
        methods: see `tensorlens_tl.evaluate.scorers`; None is all that fit the model, and a random order. Methods that
            you name must fit the model.
        query: ``"last"``, ``"cls"`` (the first token), a position counted over real tokens, or ``"mean"``: scores and
            final hidden states averaged over all positions (metric `hs_mse` alone; norms of T are then estimated, to
            `MEAN_TOLERANCE`).
        fractions: shares of a prompt's tokens to replace, ascending, the first 0.
        replacement: ``"mask"`` or ``"pad"`` (the tokenizer's), a token (string or id), ``"mean"`` (the token
            embedding's mean over all prompts) or ``"zero"`` (no token embedding; positions stay). None is the mask
            token where there is one, else the mean. Of patches, `"mean"` and `"zero"` are those of what the patch
            embedding gives.
        metrics: of `hs_mse` (mean squared change of the final hidden state), `aopc` (how far the probability of the
            model's own first choice falls), `aopc_abs` (the absolute value of that: TensorLens' Table 1), `logit` (how
            far its logit falls).
        order: ``"descending"`` (positive perturbation) or ``"ascending"`` (negative).
        absolute: order by absolute score; the paper and the default keep the sign.
        hidden: which vector `hs_mse` measures: ``"unembedded"``, what the model unembeds, or ``"output"``, what its
            blocks and final norm give. They differ where a prediction head lies between (masked language models).
        attention_mask: 1 at real tokens, with token ids only.
        prepend_bos: as in TransformerLens, with strings only.
        seed: of the random order and of the order of equal scores.
        memory: what the perturbed runs may allocate, as ``"512MB"`` or bytes.

    Returns:
        An Evaluation: areas per prompt in `values`, curves over the fractions.

    Raises:
        InvalidInputError: fractions outside [0, 1] or not ascending, an unknown metric, order or replacement, prompts
            too short for the smallest fraction, or methods that cannot be run as asked.
        UnsupportedModelError: the model cannot be frozen, or a metric needs a prediction and it has none.
    """
    test = PerturbationTest.of(
        methods,
        query=query,
        fractions=fractions,
        metrics=metrics,
        order=order,
        absolute=absolute,
        hidden=hidden,
        seed=seed,
        memory=memory,
    )
    view = ModelView(model)
    view.refuse_encoder_decoder("perturbation")
    prompt = prepare(view, prompts, attention_mask=attention_mask, prepend_bos=prepend_bos)
    engine = test.engine(model, view, prompt, lambda: Replacement.of(view, prompt, replacement))
    scorers, skipped = usable(test.scorers, _pass(model, prompt, slice(0, 1)), engine.place, skip=methods is None)
    curves = test.curves(engine, scorers)
    axis = torch.tensor(test.steps, dtype=torch.float64)
    return Evaluation(
        values=area(curves, axis),
        units=[f"prompt {number}" for number in range(len(prompt.tokens))],
        curves=curves,
        axis=axis,
        skipped=skipped,
        **test.described(view, engine.replacement, scorers, len(prompt.tokens)),
    )


@dataclass(frozen=True)
class PerturbationTest:
    """What is asked of prompts; see `perturbation`. It can be pickled where its scorers can.

    Attributes:
        scorers: the methods.
        query, order, absolute, hidden, seed: as they were given.
        steps: the shares of tokens that are replaced.
        metrics: what is measured.
        memory: in bytes.
    """

    scorers: list[Scorer]
    query: Any
    steps: list[float]
    metrics: list[str]
    order: str
    absolute: bool
    hidden: str
    seed: int
    memory: int

    @classmethod
    def of(
        cls, methods: Any, *, query: Any, fractions: Any, metrics: Any, order: str, absolute: bool, hidden: str,
        seed: int, memory: Any,
    ) -> "PerturbationTest":  # fmt: skip
        """The test, its options checked.

        Raises:
            InvalidInputError: see `perturbation`.
        """
        scorers = scorers_of(methods, seed=seed)
        steps = _fractions(fractions)
        metric_names = _metrics(metrics, query)
        if order not in ("descending", "ascending"):
            raise InvalidInputError(f"order={order!r}; use 'descending' (most relevant first) or 'ascending'.")
        if hidden not in HIDDEN:
            raise InvalidInputError(
                f"hidden={hidden!r}; use 'unembedded' or 'output' (what blocks and final norm give)."
            )
        return cls(scorers, query, steps, metric_names, order, absolute, hidden, seed, in_bytes(memory))

    def engine(self, model: Any, view: ModelView, prompt: Prompt, replacement: Callable[[], Replacement]) -> "_Engine":
        """What runs the live model on some prompts, which are checked before.

        Raises:
            InvalidInputError: prompts too short for the smallest fraction or for the query.
            UnsupportedModelError: a metric needs a prediction, and the model has none.
        """
        place = _query(self.query, prompt)
        predicts = bool(set(PREDICTED) & set(self.metrics))
        if predicts and place is not None:
            prompt.in_logits(query_positions(prompt, place))
        if view.unembedding is None and predicts:
            raise UnsupportedModelError(f"{view.description} predicts no tokens; use metrics=['hs_mse'].")
        _counts(perturbable(view, prompt), self.steps)
        of_output = self.hidden == "output"
        return _Engine(
            model, view, model_points(view), prompt, place, replacement(), self.metrics, of_output, self.memory
        )

    def curves(
        self, engine: "_Engine", scorers: Sequence[Scorer], progress: bool = True
    ) -> Float[Tensor, "metric method prompt step"]:
        """The damage done to each of the engine's prompts after each step."""
        model = engine.model
        prompt = engine.prompt
        place = engine.place
        allowed = perturbable(ModelView(model), prompt)
        counts = _counts(allowed, self.steps)
        shape = len(self.metrics), len(scorers), len(prompt.tokens), len(self.steps)
        curves = torch.zeros(shape, dtype=torch.float64)
        ties_of = random_scores(self.seed)
        at_once = 1 if engine.alone else PROMPTS_AT_ONCE
        starts = range(0, len(prompt.tokens), at_once)
        for start in tqdm(starts, desc="perturbation", leave=False, delay=2.0, disable=not progress):
            part = slice(start, start + at_once)
            frozen = _pass(model, prompt, part)
            ties = ties_of(frozen).cpu()  # a prompt's own, whatever is run beside it
            for number, scorer in enumerate(scorers):
                scores = scorer(frozen, place).cpu()
                ranks = rank(scores.abs() if self.absolute else scores, allowed[part], self.order, ties)
                # nothing is replaced at the first step, and no damage done
                curves[:, number, part, 1:] = engine.damage(part, ranks[:, None] < counts[part, 1:, None])
        return curves

    def described(
        self, view: ModelView, replacement: Replacement, scorers: Sequence[Scorer], prompts: int
    ) -> dict[str, Any]:
        """What an Evaluation says besides the numbers."""
        settings = {
            **view.provenance(),
            "prompts": prompts,
            "query": self.query,
            "replacement": replacement.name,
            "order": self.order,
            "absolute": self.absolute,
            "hidden": self.hidden,
            "seed": self.seed,
            "biases": "methods without 'biases' in their label leave the model's biases out of the scores, as the "
            "paper",
        }
        if self.query == "mean" and any(scorer.estimates_norms for scorer in scorers):
            settings["norms"] = f"estimated by random rows to a relative standard error of {MEAN_TOLERANCE:g}"
        return {
            "kind": f"{'positive' if self.order == 'descending' else 'negative'} perturbation",
            "metrics": dict.fromkeys(self.metrics, self.order == "descending"),
            "methods": [scorer.label for scorer in scorers],
            "axis_name": "share of tokens replaced",
            "settings": settings,
        }


def rank(
    scores: Float[Tensor, "batch pos"],
    allowed: Bool[Tensor, "batch pos"],
    order: str = "descending",
    ties: Float[Tensor, "batch pos"] | None = None,
) -> Int[Tensor, "batch pos"]:
    """Each token's place in the order of replacement, from 0; tokens that are not allowed come after all others.

    Equal scores are ordered by `ties`, by position without them. Reversing the order reverses the ranks.
    """
    ties = torch.arange(scores.shape[1]).expand_as(scores) if ties is None else ties
    by_ties = ties.argsort(dim=1)
    key = scores.gather(1, by_ties)
    ordered = by_ties.gather(1, key.argsort(dim=1, stable=True))  # ascending
    ordered = ordered.flip(1) if order == "descending" else ordered
    forbidden = ~allowed.gather(1, ordered)
    ordered = ordered.gather(1, forbidden.long().argsort(dim=1, stable=True))
    return ordered.argsort(dim=1)


def perturbable(view: ModelView, prompt: Prompt) -> Bool[Tensor, "prompt pos"]:
    """True at tokens that may be replaced: neither padding nor special tokens (of an image, all but its patches)."""
    tokenizer = view.tokenizer
    if view.reads != "tokens":
        return (prompt.mask & (prompt.tokens >= prompt.special)).cpu()
    special = torch.tensor(sorted(getattr(tokenizer, "all_special_ids", None) or []), dtype=torch.long)
    return (prompt.mask.cpu() & ~torch.isin(prompt.tokens.cpu(), special)).clone()


# ------------------------------------------------------------------------------------------- checks


def _fractions(fractions: Any) -> list[float]:
    try:
        steps = [float(f) for f in fractions]
    except (TypeError, ValueError):
        raise InvalidInputError(f"fractions={fractions!r}: pass shares such as (0, 0.1, 0.2).") from None
    if len(steps) < 2 or steps[0] != 0 or any(b <= a for a, b in pairwise(steps)) or steps[-1] > 1:
        raise InvalidInputError(f"fractions={steps}: pass at least two shares in [0, 1], ascending, the first 0.")
    return steps


def _metrics(metrics: Any, query: Any) -> list[str]:
    names = [metrics] if isinstance(metrics, str) else list(metrics)
    known = ("hs_mse", *PREDICTED)
    unknown = [metric for metric in names if metric not in known]
    if unknown or not names:
        raise InvalidInputError(f"metrics={names!r}; use some of {', '.join(map(repr, known))}.")
    if query == "mean":
        names = ["hs_mse"] if tuple(names) == METRICS else names
        if names != ["hs_mse"]:
            raise InvalidInputError("query='mean' has no single prediction; use metrics=['hs_mse'], or one query.")
    return names


def _query(query: Any, prompt: Prompt) -> int | None:
    """The query as the methods take it: an integer, or None for the mean."""
    if isinstance(query, str):
        known: dict[str, int | None] = {"last": -1, "cls": 0, "mean": None}
        if query not in known:
            raise InvalidInputError(f"query={query!r}; use 'last', 'cls', 'mean' or a position.")
        return known[query]
    place = whole_number("query", query, why="or 'last', 'cls', 'mean'")
    query_positions(prompt, place)
    return place


def _counts(allowed: Bool[Tensor, "prompt pos"], steps: Sequence[float]) -> Int[Tensor, "prompt step"]:
    """How many tokens each step replaces.

    Raises:
        InvalidInputError: a prompt so short that the smallest fraction replaces none.
    """
    tokens = allowed.sum(1)
    counts = (tokens[:, None] * torch.tensor(steps, dtype=torch.float64) + 0.5).long()
    short = (counts[:, 1] == 0).nonzero()
    if len(short):
        row = int(short[0])
        least = -int(-0.5 // steps[1])
        raise InvalidInputError(
            f"prompt {row} has {int(tokens[row])} tokens that may be replaced, and the fraction {steps[1]} of them is "
            f"none: use prompts of {least} or more, or larger fractions."
        )
    return counts


# ------------------------------------------------------------------------------------- perturbed runs


class _Engine:
    """Runs the live model on perturbed prompts, and compares it with itself on the whole ones.

    Somebody's code on the model may act on some rows of a batch only, as `tensorlens_tl.passes.live.runs` says: each
    prompt is run by itself where such code is seen (`alone`), else between whole ones that must come out the same.
    """

    def __init__(
        self,
        model: Any,
        view: ModelView,
        points: ModelPoints,
        prompt: Prompt,
        place: int | None,
        replacement: Replacement,
        metrics: Sequence[str],
        of_output: bool,
        memory: int,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self.replacement = replacement
        self.metrics = metrics
        # a mean over positions is one of the output; a classifier's head reads too few of them
        of_output = of_output or (place is None and view.class_head is not None)
        self.unembed_at = points.unembed_in or points.output
        self.hidden_at = points.output if of_output else self.unembed_at
        self.place = place
        self.predicts = bool(set(PREDICTED) & set(metrics))
        batch, pos = prompt.tokens.shape
        self.positions = None if place is None else query_positions(prompt, place)
        widest = max(block.mlp.hidden if block.mlp is not None else 0 for block in view.blocks)
        heads = max((block.attention.heads for block in view.blocks if block.mixer is None), default=0)
        per_row = pos * (8 * view.cfg.d_model + 2 * widest + 2 * pos * heads)
        self.alone = bool(foreign_hooks(model))
        if self.predicts:
            per_row += view.d_vocab
        self.rows = 1 if self.alone else max(1, memory // (4 * per_row))
        self.tolerance = TOLERANCE.get(next(view.model.parameters()).dtype, 1e-4)
        self._whole: list[Tensor] = []  # hidden states and logits of whole prompts, once they are known
        self.hidden, logits = self._measure(torch.arange(batch), torch.zeros_like(prompt.mask).cpu())
        self.logits = self.hidden if logits is None else logits  # without a metric that needs them, never read
        self._whole = [self.hidden, self.logits]

    def damage(self, part: slice, replaced: Bool[Tensor, "prompt step pos"]) -> Float[Tensor, "metric prompt step"]:
        """Every metric of some prompts with some of their tokens replaced."""
        prompts, steps, _ = replaced.shape
        index = torch.arange(part.start, part.start + prompts).repeat_interleave(steps)
        hidden, logits = self._measure(index, replaced.flatten(0, 1))
        damages = []
        for metric in self.metrics:
            if metric == "hs_mse":
                damages.append((hidden - self.hidden[index]).square().mean(-1))
                continue
            assert logits is not None
            before = self.logits[index]
            after = logits
            token = before.argmax(-1, keepdim=True)
            if metric != "logit":
                before = before.softmax(-1)
                after = after.softmax(-1)
            fall = (before.gather(1, token) - after.gather(1, token))[:, 0]
            damages.append(fall.abs() if metric == "aopc_abs" else fall)
        return torch.stack(damages).unflatten(1, (prompts, steps))

    def _measure(
        self, index: Int[Tensor, "row"], replaced: Bool[Tensor, "row pos"]
    ) -> tuple[Float[Tensor, "row d_model"], Float[Tensor, "row d_vocab"] | None]:
        """Final hidden state at the query, and logits there where a metric needs them."""
        hidden = []
        logits = []
        for rows, part in zip(index.split(self.rows), replaced.split(self.rows), strict=True):
            h, z = self._between_whole(rows, part)
            hidden.append(h)
            logits += [] if z is None else [z]
        return torch.cat(hidden), torch.cat(logits) if logits else None

    def _between_whole(self, rows: Tensor, replaced: Tensor) -> tuple[Tensor, Tensor | None]:
        """One run: a row by itself, or several between the first and the last of their prompts, whole.

        Raises:
            FrozenModelError: a whole prompt does not come out the same in another row.
        """
        several = len(rows) > 1
        if several:
            whole = torch.zeros_like(replaced[:1])
            rows = torch.cat([rows[:1], rows, rows[-1:]])
            replaced = torch.cat([whole, replaced, whole])
        h, z = self._run(rows.to(self.prompt.tokens.device), replaced.to(self.prompt.tokens.device))
        h = h.double().cpu()
        z = None if z is None else z.double().cpu()
        if not several:
            return h, z
        outputs = [h] if z is None else [h, z]
        for number, output in enumerate(outputs):
            whole = self._whole[number][rows[[0, -1]].cpu()] if self._whole else output[[1, -2]]
            error = relative_error(output[[0, -1]], whole)
            if not error <= self.tolerance:
                raise FrozenModelError(
                    f"perturbation: a prompt gives another number in the first or the last row of a batch than "
                    f"elsewhere (they differ by {error:.1e}): something acts on some rows only, and it is no hook that "
                    "could be found. Let it act on every row; or put it on the model as a hook, and prompts are run "
                    "one by one."
                )
        return h[1:-1], None if z is None else z[1:-1]

    def _run(self, rows: Tensor, replaced: Tensor) -> tuple[Tensor, Tensor | None]:
        inputs = inputs_of(self.prompt, rows)
        mask = self.prompt.mask[rows]
        inputs, hooks = self.replacement.put(inputs, replaced)
        if self.positions is None:
            activations, _ = capture(self.model, inputs, [self.hidden_at], hooks=hooks, last=self.hidden_at)
            hidden = activations[self.hidden_at] * mask[..., None]
            return hidden.sum(1) / mask.sum(1, keepdim=True), None
        at = self.positions[rows]
        if not self.predicts:
            activations, _ = capture(self.model, inputs, [self.hidden_at], hooks=hooks, last=self.hidden_at)
            return _vectors(activations[self.hidden_at], at), None
        hooks += logit_hooks(self.model, self.unembed_at, at)
        activations, logits = capture(self.model, inputs, [self.hidden_at], hooks=hooks)
        return _vectors(activations[self.hidden_at], at), logits_at(logits, at)[:, 0]


def _vectors(hidden: Tensor, at: Int[Tensor, "row 1"]) -> Tensor:
    """Vectors at one position per prompt; a classifier's head may have been given no other."""
    return hidden if hidden.ndim == 2 else torch.take_along_dim(hidden, at[..., None], dim=1)[:, 0]


def _pass(model: Any, prompt: Prompt, part: slice) -> FrozenPass:
    """Some of the prompts, frozen."""
    return freeze(model, **prompt.again(part))
