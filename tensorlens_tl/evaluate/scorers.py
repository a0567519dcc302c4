"""What is evaluated: a method with its options, under a label, as one score per source token.

`methods=` of every evaluation is a list of labels of `STANDARD` or names of registered methods, or a mapping from
labels of your choice to a name, a pair of name and options, or a function of a `FrozenPass` that returns an
`Attribution` or a tensor `[batch, key]`. `PREDICTED` among the options stands for the token that the model predicts at
the query. A registered method that explains a prediction (`register_method`) is given it as its target, unless its
options say more.

    >>> scorers_of({"mine": ("rollout", {"normalize": False}), "last token": lambda frozen: frozen.mask.cumsum(1)})
    [Scorer('mine'), Scorer('last token')]
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import Seed, Whole, checked_names, whole_seed
from tensorlens_tl._method_names import unknown_method
from tensorlens_tl.errors import InvalidInputError, MethodError, RegistryError, TensorLensError, UnsupportedModelError
from tensorlens_tl.generation import scored_by
from tensorlens_tl.models import FIRST_CHOICE
from tensorlens_tl.passes import FrozenPass
from tensorlens_tl.passes.inputs import query_positions
from tensorlens_tl.registry import attribute, get_method, list_methods
from tensorlens_tl.results import Attribution

# The aliases tell a type checker and whoever reads a signature what may be passed; at run time they are `Any`, because
# our own errors say what is wrong with an argument and what to do.
if TYPE_CHECKING:
    MethodFunction = Callable[[FrozenPass], Attribution | Tensor]
    """A method as a function of a pass: it gives an Attribution, or scores `[batch, key]`."""

    MethodSpec = str | tuple[str, Mapping[str, Any]] | MethodFunction
    """A method: a label of `STANDARD` or a registered name, a name with options, or a function."""

    Methods = str | Sequence[str] | Mapping[str, MethodSpec] | None
    """Names, or a mapping from labels to methods; None is an evaluation's default."""

    Names = str | Sequence[str] | None
    """Names of methods out of a fixed list; None is an evaluation's default."""

    TokenIds = Tensor | Sequence[int] | Sequence[Sequence[int]]
    Mask = Tensor | Sequence[Sequence[bool]]

    PromptLength = Whole | Literal["most common"] | None
    """The token length of prompts: a number, the most common, or None where all must agree."""

    PerturbationQuery = Literal["mean"] | Whole
    """A position, or the mean over all positions."""

    Fractions = Sequence[float] | Tensor
    Metric = Literal["hs_mse", "aopc", "aopc_abs", "logit"]
    Metrics = Metric | Sequence[Metric]
    Order = Literal["descending", "ascending"]
    Hidden = Literal["unembedded", "output"]

    ReplacementName = Literal["resampled", "mask", "pad", "mean", "zero"] | str | int | None
    """What stands for a replaced token: see `tensorlens_tl.evaluate.perturbation`."""
else:
    MethodFunction = MethodSpec = Methods = Names = PerturbationQuery = Fractions = TokenIds = Mask = Any
    PromptLength = Metric = Metrics = Order = Hidden = ReplacementName = Any

PROMPTS_AT_ONCE = 16
"""So many prompts of an evaluation are frozen together."""

PREDICTED = FIRST_CHOICE
"""As a method's target: the token that the model itself predicts at the query."""

RANDOM = "random"
"""The label of the baseline that every evaluation has: random scores, the same for the same prompt and seed."""

STANDARD: dict[str, tuple[str, dict[str, Any]]] = {
    "tensorlens norm": ("tensorlens", {"collapse": "norm"}),
    "tensorlens in_out": ("tensorlens", {"collapse": "in_out"}),
    "tensorlens in_out, biases": ("tensorlens", {"collapse": "in_out", "bias": "position"}),
    "tensorlens target": ("tensorlens", {"collapse": "target", "target": PREDICTED}),
    "tensorlens target, biases": ("tensorlens", {"collapse": "target", "target": PREDICTED, "bias": "position"}),
    "mean attention": ("mean", {"layer_map": "attention"}),
    "mean norm:attn": ("mean", {"layer_map": "norm:attn"}),
    "mean norm:attn_res_ln": ("mean", {"layer_map": "norm:attn_res_ln"}),
    "mean globenc": ("mean", {"layer_map": "globenc"}),
    "rollout attention": ("rollout", {"layer_map": "attention"}),
    "rollout norm:attn": ("rollout", {"layer_map": "norm:attn"}),
    "rollout norm:attn_res_ln": ("rollout", {"layer_map": "norm:attn_res_ln"}),
    "rollout globenc": ("rollout", {"layer_map": "globenc"}),
    "globenc": ("globenc", {}),
    "ff-ig": ("ff-ig", {}),
    "alti": ("alti", {}),
    "alti-logit": ("alti-logit", {"target": PREDICTED}),
    "ifr": ("ifr", {}),
    "decompx norm": ("decompx", {"aggregate": "norm"}),
    "decompx target": ("decompx", {"aggregate": "target", "target": PREDICTED}),
    "input-x-gradient": ("input-x-gradient", {"target": PREDICTED}),
    "integrated-gradients": ("integrated-gradients", {"target": PREDICTED}),
    "value-zeroing": ("value-zeroing", {}),
    "chefer": ("chefer", {"target": PREDICTED}),
    "leave-one-out": ("leave-one-out", {"target": PREDICTED}),
    "relp": ("relp", {"target": PREDICTED}),
    "attnlrp": ("attnlrp", {"target": PREDICTED}),
    "cp-lrp": ("cp-lrp", {"target": PREDICTED}),
    "gim": ("gim", {"target": PREDICTED}),
}
"""The methods of this library as they are usually run, by label: the paper's collapses, without biases as the paper has
them and with; its eight baselines (mean and rollout of four layer maps); and the other methods of the field."""


class Explained(NamedTuple):
    """The `target` ids that prompts are explained by, in place of predictions, and ids to subtract, or None."""

    target: list[int]
    minus: list[int] | None


class Stretch(NamedTuple):
    """A stretch of text that a model wrote after each of some prompts, explained as a whole.

    `queries` predict its tokens (padding where a prompt has fewer); `minus` are ids to subtract, or None.
    """

    queries: Int[Tensor, "batch query"]
    minus: list[list[int]] | None


MEAN_TOLERANCE = 0.05
"""To which relative standard error a mean over all queries takes each norm of T; one query's is exact."""


@dataclass(frozen=True)
class Scorer:
    """One method under a label: called with a pass and a query it gives `[batch, pos]`, zero at padding."""

    label: str
    method: str | MethodFunction
    options: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Scorer({self.label!r})"

    @property
    def needs_target(self) -> bool:
        """True if the predicted token is among its options."""
        return any(map(_is_predicted, self.options.values()))

    @property
    def estimates_norms(self) -> bool:
        """True if it takes norms of the tensor that may be estimated."""
        norm = self.method == "tensorlens" and self.options.get("collapse") == "norm"
        return norm and not {"probes", "tol"} & set(self.options)

    def check_minus(self) -> None:
        """Refuse a method that explains a token and cannot hold it against another."""
        if isinstance(self.method, str) and self.needs_target and not get_method(self.method).takes("minus"):
            raise InvalidInputError(
                f"minus: method {self.label!r} explains a token's logit and no difference of two. Leave it out, or "
                "leave minus= out."
            )

    def check_stretch(self) -> None:
        """Refuse a method that cannot explain a stretch of generated text."""
        if callable(self.method):
            return
        if not get_method(self.method).takes("query"):
            raise InvalidInputError(
                f"span: method {self.label!r} has no option 'query', so that it says nothing about a span's tokens. "
                "Leave it out."
            )
        about = [name for name in ("target", "minus", "direction", "query") if self.options.get(name) is not None]
        about = [name for name in about if not _is_predicted(self.options[name])]
        if about:
            raise InvalidInputError(
                f"span: method {self.label!r} has {about[0]}= among its options, and a span's tokens are their own "
                "targets. Leave it out."
            )

    def result(
        self, frozen: FrozenPass, query: int | Literal["all"] = -1, explained: Explained | Stretch | None = None
    ) -> Any:
        """Return the method's own result: an Attribution, or the output of a function.

        A `Stretch` has its own queries; None explains the token that the model predicts.
        """
        with _named(self.label):
            if callable(self.method):
                return self.method(frozen)
            if isinstance(explained, Stretch):
                options = {name: value for name, value in self.options.items() if not _is_predicted(value)}
                if self.needs_target and explained.minus is not None:
                    options["minus"] = explained.minus
                return scored_by(frozen, self.method, explained.queries, options, span=True)
            return attribute(frozen, method=self.method, **self._question(frozen, query, explained))

    def _question(self, frozen: FrozenPass, query: int | Literal["all"], explained: Explained | None) -> dict[str, Any]:
        """The method's options, with target and query."""
        options = dict(self.options)
        if self.needs_target:
            if query == "all":
                raise InvalidInputError(
                    "it explains a prediction, and a target needs one query; with query='mean' use methods or options "
                    "without a target, such as 'tensorlens in_out'."
                )
            if explained is None:
                explained = Explained(predictions(frozen, query)[0].tolist(), None)
            if explained.minus is not None:
                options.setdefault("minus", explained.minus)
            predicted = explained.target
            options |= {name: predicted for name, value in options.items() if _is_predicted(value)}
        if query == "all" and self.estimates_norms:  # exactly, d_model rows are pulled for every query
            options["tol"] = MEAN_TOLERANCE
        if get_method(str(self.method)).takes("query"):
            options["query"] = query
        return options

    def _scores(
        self,
        result: Attribution,
        frozen: FrozenPass,
        query: int | Literal["all"],
        explained: Explained | Stretch | None,
    ) -> Float[Tensor, "batch key"]:
        """An Attribution's scores of the query, or the mean over all, or those of a stretch."""
        if tuple(result.axes) != ("batch", "query", "key"):
            raise InvalidInputError(
                f"{result.method}: its axes are {result.axes}; choose options that leave batch, query and key."
            )
        scores = result.scores[..., : frozen.mask.shape[1]]  # a source that is no token, such as a bias, has no rank
        if isinstance(explained, Stretch):
            if callable(self.method):
                raise InvalidInputError(
                    f"{self.label}: a function is not told which tokens a span has, and this one attributes queries of "
                    "its own. Register it as a method with the options target and query (tlens.register_method)."
                )
            return scores[:, 0]
        if query == "all":
            real = torch.take_along_dim(frozen.mask, result.queries, dim=1)
            return (scores * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return torch.take_along_dim(scores, query_rows(result, frozen, query)[..., None], dim=1)[:, 0]

    def __call__(
        self, frozen: FrozenPass, query: int | Literal["all"] = -1, explained: Explained | Stretch | None = None
    ) -> Float[Tensor, "batch pos"]:
        """Scores of source tokens for one query, or averaged over all of them where it is "all"."""
        scores = self.result(frozen, query, explained)
        if isinstance(scores, Attribution):
            scores = self._scores(scores, frozen, query, explained)
        expected = tuple(frozen.mask.shape)
        if not isinstance(scores, Tensor) or tuple(scores.shape) != expected:
            shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise InvalidInputError(f"{self.label}: gives {shape}; an evaluation needs [batch, key] = {expected}.")
        scores = scores.detach().to(torch.float64) * frozen.mask
        if not bool(torch.isfinite(scores).all()):
            raise InvalidInputError(f"{self.label}: gives scores that are not finite.")
        return scores


@contextmanager
def _named(label: str) -> Iterator[None]:
    """A method's errors, with its label in front."""
    try:
        yield
    except InvalidInputError as error:
        raise InvalidInputError(f"{label}: ", *error.args) from error
    except TensorLensError:
        raise
    except Exception as error:
        raise MethodError(f"method {label!r} failed: {type(error).__name__}: {error}") from error


def _is_predicted(value: object) -> bool:
    return isinstance(value, str) and value == PREDICTED


def query_rows(result: Attribution, frozen: FrozenPass, query: int) -> Int[Tensor, "batch 1"]:
    """Where a query of a pass lies on a result's query axis, in each prompt."""
    positions = query_positions(frozen.prompt, query)
    matches = result.queries.to(positions.device) == positions
    if not bool(matches.any(1).all()):
        raise InvalidInputError(
            f"{result.method}: the query is position {positions[:, 0].tolist()}, and the result holds "
            f"{result.queries.tolist()}; a function must attribute the query that the evaluation is about."
        )
    return matches.long().argmax(1, keepdim=True)


def scorers_of(methods: Methods = None, *, seed: Seed = 0) -> list[Scorer]:
    """The methods of an evaluation, checked; see the module for what may be given. None is `STANDARD` and random."""
    if methods is None:
        methods = [*STANDARD, RANDOM]
    if isinstance(methods, str):
        methods = [methods]
    if not isinstance(methods, Mapping | Sequence) or not methods:
        raise InvalidInputError(f"methods={methods!r}: pass a list of names, or a mapping from labels to methods.")
    if isinstance(methods, Mapping):
        return [_scorer(label, method, seed) for label, method in methods.items()]
    repeated = sorted(str(name) for name in methods if methods.count(name) > 1)
    if repeated:
        raise InvalidInputError(f"methods: {repeated[0]!r} is there twice; give each its own label.")
    return [_scorer(name, name, seed) for name in methods]


def _scorer(label: str, what: MethodSpec, seed: int) -> Scorer:
    """One method of an evaluation, its options checked."""
    label = str(label)
    if callable(what):
        return Scorer(label, what)
    if what == RANDOM:
        return Scorer(label, random_scores(seed))
    pair: tuple[Any, Any] = STANDARD.get(str(what), (what, {}))
    if isinstance(what, tuple) and len(what) == 2:
        pair = what
    name, options = pair
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise InvalidInputError(f"methods: {label!r} is {what!r}; pass a name, (name, options), or a function.")
    if name not in list_methods():
        raise RegistryError(unknown_method(name, dict.fromkeys([*STANDARD, *list_methods(), RANDOM])))
    method = get_method(name)
    unknown = [option for option in options if not method.takes(option)]
    if unknown:
        raise InvalidInputError(
            f"methods: {label!r} has no option {unknown[0]!r}; {name} takes {list(method.options)}."
        )
    if "target" not in options and method.explains_prediction(options):
        options = {**options, "target": PREDICTED}
    return Scorer(label, name, dict(options))


def random_scores(seed: Seed = 0) -> Callable[[FrozenPass], Float[Tensor, "batch pos"]]:
    """The random baseline: uniform scores that depend on the seed and on the prompt's tokens, not on its batch."""
    seed = whole_seed(seed)

    def draw(frozen: FrozenPass) -> Tensor:
        masks = frozen.mask.tolist()
        inputs = frozen.inputs["input"]
        prompts: list[list[Any]] = inputs.flatten(1).tolist()  # of images and sound, all their values
        if not inputs.is_floating_point():
            prompts = [list(compress(tokens, mask)) for tokens, mask in zip(frozen.tokens.tolist(), masks, strict=True)]
        scores = torch.zeros(frozen.mask.shape, dtype=torch.float64)
        for row, (prompt, mask) in enumerate(zip(prompts, masks, strict=True)):
            rng = random.Random(hash((seed, *prompt)))
            scores[row, mask] = torch.tensor([rng.random() for _ in range(sum(mask))], dtype=torch.float64)
        return scores.to(frozen.tokens.device)

    return draw


def usable(
    scorers: Sequence[Scorer],
    frozen: FrozenPass,
    query: int | Literal["all"],
    skip: bool,
    explained: Explained | Stretch | None = None,
) -> tuple[list[Scorer], dict[str, str]]:
    """Try every method on a short pass before work starts; returns those that work, and errors by label (with
    `skip`)."""
    fitting = []
    refusals = {}
    for scorer in scorers:
        try:
            if skip and scorer.needs_target and (query == "all" or frozen.view.unembedding is None):
                raise UnsupportedModelError("needs one predicted token.")
            scorer(frozen, query, explained)
            fitting.append(scorer)
        except UnsupportedModelError as error:
            if not skip:
                raise UnsupportedModelError(f"{scorer.label}: {error}") from error
            refusals[scorer.label] = str(error)
    if not fitting:
        raise UnsupportedModelError(f"no method fits this model: {refusals}")
    return fitting, refusals


@checked_names
def predictions(frozen: FrozenPass, query: int = -1) -> tuple[Int[Tensor, "batch"], Float[Tensor, "batch d_vocab"]]:
    """Return the token that the live model predicts at a query, and its logits there.

    Raises:
        UnsupportedModelError: the model predicts no tokens.

    >>> from tensorlens_tl import evaluate
    >>> token, logits = evaluate.predictions(frozen)
    >>> model.tokenizer.decode(token)
    ' value'
    """
    logits = frozen.logits(query)
    if logits is None:
        raise UnsupportedModelError(f"{frozen.view.description} predicts no tokens.")
    return logits[:, 0].argmax(-1), logits[:, 0]
