"""The exact difference of two runs: a linear map of the difference of their inputs, in which nothing is held fixed.

The frozen operator of one run misses effects through changes of attention, activation ratios or norm scales. Between
two runs every part of a transformer has an exact secant (`tensorlens_tl.algebra.secants`), so the difference of any two
activations is a linear map of the difference of the input streams, plus constants for other differences, such as the
weights of two models. Each of those constants is the bias of its map.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tensorlens_tl._arguments import checked_names
from tensorlens_tl.algebra import Chain
from tensorlens_tl.algebra.numerics import refuse_nan, upcast
from tensorlens_tl.errors import InvalidInputError, UnsupportedModelError
from tensorlens_tl.models import BlockView, FrozenRule, HeadChoice, LayerRange, MlpChoice, ModelView
from tensorlens_tl.passes.capture import one_question
from tensorlens_tl.passes.frozen import FrozenPass, PassLike, check_pass
from tensorlens_tl.passes.linearisation import Linearisation
from tensorlens_tl.passes.operator import FrozenOperator
from tensorlens_tl.passes.two_runs.layouts import with_one_layout
from tensorlens_tl.passes.two_runs.maps import SecantMaps

QUESTION = "a difference of two runs"
ROUNDING = 64
"""The rounding error of a run's own numbers, in units of rounding, when two runs are subtracted."""


@dataclass(frozen=True, eq=False, repr=False)
class Difference(Linearisation):
    """Two runs and the exact linear map between their differences; `difference` returns one.

    Each of its activations is the first run's minus the second's.

    Attributes:
        maps: the parts of every block as secants.
        a, b: the two runs.
        errors: the error of each block's map, by ``"blocks.0"`` … and ``"head"``, relative to the difference of the
            block's outputs plus their rounding.
    """

    maps: SecantMaps
    a: FrozenPass
    b: FrozenPass
    errors: dict[str, float] = field(default_factory=dict[str, float])

    def __repr__(self) -> str:
        batch, pos = self.tokens.shape
        gap = max(self.errors.values(), default=0.0)
        return f"Difference({self.view.description}, batch={batch}, pos={pos}, layers={self.n_layers}, gap={gap:.1e})"

    # ------------------------------------------------------------------ the two runs

    @property
    def runs(self) -> tuple[FrozenPass, FrozenPass]:
        """Both runs."""
        return self.a, self.b

    @property
    def str_tokens(self) -> list[list[str]]:
        """Readable tokens; where the two prompts differ, ``"first|second"``."""
        pairs = zip(self.a.str_tokens, self.b.str_tokens, strict=True)
        return [[a if a == b else f"{a}|{b}" for a, b in zip(*pair, strict=True)] for pair in pairs]

    @property
    def tolerance(self) -> float:
        """The largest error that a proof allows."""
        return max(self.a.tolerance, self.b.tolerance)

    @property
    def causal(self) -> bool:
        """Whether no layer attends to later positions, in either run."""
        return self.a.causal and self.b.causal

    @property
    def soft_cap(self) -> None:
        """None: the difference of two capped logits is not a capped difference. Sums explain it before the cap."""
        return None

    @property
    def of_one_model(self) -> bool:
        """Whether both runs are of one model; otherwise weights differ as well."""
        return self.a.model is self.b.model

    def activation(self, name: str) -> Tensor:
        """Return the difference of the activations at one hook point."""
        return self.a.activation(name) - self.b.activation(name)

    def resid_pre(self, layer: int) -> Float[Tensor, "batch pos d_model"]:
        """Return the difference of the streams entering a block; ``layer == n_layers``: of the last block's outputs."""
        return self.a.resid_pre(layer) - self.b.resid_pre(layer)

    @property
    def output(self) -> Float[Tensor, "batch pos d_model"]:
        """The difference of the models' outputs."""
        return self.a.output - self.b.output

    def unembedded(self) -> Float[Tensor, "batch pos d_model"]:
        """Return the difference of the unembedded streams."""
        return self.a.unembedded() - self.b.unembedded()

    def check_fresh(self) -> None:
        """Raise `FrozenModelError` if a model has changed since its run."""
        self.a.check_fresh()
        self.b.check_fresh()

    def provenance(self) -> dict[str, str]:
        """Return what results depend on besides the prompts; entries of the second run are called ``"second …"``.

        For one model these are only entries that differ; for two models, all of them.
        """
        first = self.a.provenance()
        second = self.b.provenance()
        if self.of_one_model:
            second = {name: value for name, value in second.items() if first.get(name) != value}
        return first | {f"second {name}": value for name, value in second.items()}

    # ------------------------------------------------------------------ maps

    def operator(
        self,
        *,
        layers: LayerRange = None,
        heads: HeadChoice = None,
        mlp: MlpChoice = True,
        final_norm: bool | None = None,
        rule: FrozenRule = "frozen",
    ) -> FrozenOperator:
        """Return the difference as a linear map, from ``blocks.0`` input to the final norm's (or last block's) output.

        Args:
            layers, heads, mlp, final_norm: as in `FrozenPass.operator`.
            rule: has no effect: the secant of an activation is unique.

        >>> other = tlens.freeze(model, text.replace("red", "blue"))
        >>> op = tlens.difference(frozen, other).operator()
        >>> torch.allclose(op(op.x), frozen.output - other.output, atol=1e-4)
        True
        """
        return FrozenOperator.of(self, layers=layers, heads=heads, mlp=mlp, final_norm=final_norm, rule=rule)

    # ------------------------------------------------------------------ logits

    def logit_vectors(
        self, ids: Int[Tensor, "batch query"], positions: Int[Tensor, "batch query"]
    ) -> tuple[Float[Tensor, "batch query d_model"], Float[Tensor, "batch query"]]:
        """Return the mean directions of some tokens' logits, and the effect of their difference: x̄·ΔW_U + Δb_U.

        Raises:
            UnsupportedModelError: see `FrozenPass.logit_vectors`.
        """
        vectors_a, constant_a = self.a.logit_vectors(ids, positions)
        vectors_b, constant_b = self.b.logit_vectors(ids, positions)  # each checks its run's logits
        if self.of_one_model:
            return vectors_a, torch.zeros_like(constant_a)
        states = (self.a.unembedded() + self.b.unembedded()) / 2
        at = upcast(torch.take_along_dim(states, positions[..., None], dim=1))
        constant = (at * (vectors_a - vectors_b)).sum(-1) + constant_a - constant_b
        return (vectors_a + vectors_b) / 2, constant

    # ------------------------------------------------------------------ proof

    @property
    def allowed_gap(self) -> float:
        """The largest gap allowed for a sum."""
        return max(self.tolerance, sum(self.errors.values()))

    @cached_property
    def rounding(self) -> float:
        """The relative rounding error of the runs' numbers, at most what their proofs allow."""
        return min(self.tolerance, ROUNDING * _epsilon(self))

    def noise(self, unembedded: bool) -> Float[Tensor, "batch pos"]:
        """Return the length of possible rounding errors of the two runs in `output`, or in the unembedded stream."""
        states = [frozen.unembedded() if unembedded else frozen.output for frozen in (self.a, self.b)]
        lengths = [upcast(state).norm(dim=-1) for state in states]
        return self.rounding * (lengths[0] + lengths[1])

    @property
    def is_strict(self) -> bool:
        """Whether one of the runs was frozen with ``strict=True``."""
        return self.a.strict or self.b.strict

    def _missed(self, parts: str, gap: float) -> str:
        """Return the message for a sum that misses its total by too much."""
        return (
            f"{parts}: its parts miss the difference of the models' own numbers by {gap:.1e} of their size beyond "
            f"rounding, but the proof allows {self.allowed_gap:.1e}. Load the model in a wider dtype."
        )


@checked_names
@one_question
def difference(a: PassLike, b: PassLike) -> Difference:
    """Return the exact difference of two runs, verified block by block.

    Only the routing of experts is frozen: their choice is not a linear function of the input, so a changed routing is a
    separate constant, named ``"L{layer}.routing"``. If both runs are the same, the map is the model's Jacobian with the
    routing fixed.

    A vector that a hook adds to the stream of only one run is a constant, named after the hook point. So is a patch:
    its constant is the patched value minus the value that it replaced, so that earlier differences still pass.

    The runs are of one model, or of two models of one architecture (base and fine-tuned, two checkpoints, with and
    without an adapter). They must match position by position: the same number of prompts, of the same lengths.

    Args:
        a: the first run.
        b: the second run; the difference is a − b.

    Returns:
        The difference a − b: a linear map of the difference of the input streams, with constants for everything else
        that differs. ``tlens.attribute(difference, target)`` has a score for each token.

    Raises:
        InvalidInputError: not two frozen passes; prompts that differ in number, length or padding; different
            architectures or vocabularies.
        UnsupportedModelError: the response of a part (such as attention scores) to another input cannot be read, or the
            map does not reproduce a block.
        FrozenModelError: a model has changed since its run.

    >>> other = tlens.freeze(model, text.replace("red", "blue"))
    >>> change = tlens.attribute(tlens.difference(frozen, other), " value")
    >>> torch.allclose(change.scores.sum(-1), change.total, rtol=1e-3)
    True
    """
    for frozen in (a, b):
        check_pass(frozen)
    _check_alike(a, b)
    a.check_fresh()
    b.check_fresh()
    result = Difference(SecantMaps.of(*with_one_layout(a.maps, b.maps)), a, b)
    result.errors.update(_errors(result))
    return result


def _check_alike(a: FrozenPass, b: FrozenPass) -> None:
    """Refuse two runs that do not match position by position and block by block."""
    if a.tokens.shape != b.tokens.shape or a.sides != b.sides or not torch.equal(a.mask, b.mask):
        lengths = [frozen.mask.sum(1).tolist() for frozen in (a, b)]
        raise InvalidInputError(
            f"difference: the prompts do not match position by position: {lengths[0]} and {lengths[1]} tokens"
            f"{_apart(a, b)}. Both runs need the same number of prompts, each with the same number of tokens and the "
            "same padding: replace words by others with as many tokens."
        )
    a.view.require_single_streams(QUESTION)
    if a.model is not b.model:
        check_one_architecture(a.view, b.view)
        b.view.require_single_streams(QUESTION)


def _apart(a: FrozenPass, b: FrozenPass) -> str:
    """Return the tokens between the first and the last difference of two prompts; empty for several prompts."""
    if len(a.tokens) != 1 or len(b.tokens) != 1:
        return ""
    first, second = ([t for t, real in zip(of.str_tokens[0], of.mask[0], strict=True) if real] for of in (a, b))
    start = _alike(first, second)
    end = _alike(first[start:][::-1], second[start:][::-1])
    return f", with {first[start : len(first) - end]} in the one and {second[start : len(second) - end]} in the other"


def _alike(first: list[str], second: list[str]) -> int:
    """Return the length of the common prefix of two prompts, in tokens."""
    pairs = zip(first, second, strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


SIZES = ("n_layers", "d_model", "n_heads", "n_key_value_heads", "d_head", "d_mlp")
"""The configuration entries that two models of one architecture must share."""


def check_one_architecture(a: ModelView, b: ModelView) -> None:
    """Refuse, before any work, two models whose weights or tokens do not correspond.

    Raises:
        InvalidInputError: the models differ in sizes, in the parts of a block, or in their vocabularies.
    """
    sizes_a, sizes_b = (
        {name: getattr(view.cfg, name, None) for name in SIZES} | {"d_vocab": view.d_vocab} for view in (a, b)
    )
    differing = [f"{name} {sizes_a[name]} and {sizes_b[name]}" for name in sizes_a if sizes_a[name] != sizes_b[name]]
    if not differing:
        parts = [(block.name, _parts(block), _parts(other)) for block, other in zip(a.blocks, b.blocks, strict=True)]
        differing = [f"{name} has {ours} and {theirs}" for name, ours, theirs in parts if ours != theirs]
        blocks = [block for block, other in zip(a.blocks, b.blocks, strict=True) if _act_otherwise(block, other)]
        differing += [f"{block.name} has two activation functions" for block in blocks]
    if differing:
        raise InvalidInputError(
            f"difference: two architectures, {a.description} and {b.description}: {', '.join(differing)}. Both runs "
            "must be of one architecture."
        )
    tokenizers = (a.tokenizer, b.tokenizer)
    if None not in tokenizers and tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise InvalidInputError(
            f"difference: {a.description} and {b.description} have different vocabularies, so the same token ids are "
            "different tokens."
        )


def _parts(block: BlockView) -> str:
    """Describe the norms and the MLP of a block."""
    names = sorted(block.norms)
    if block.has_mlp:
        names.append(block.parts.mlp_name)
    with block.loaded():
        mixes = ["attention"] if block.mixer is None else [block.mixer.form]
        if block.has_beside:
            mixes.append(block.beside.form)
    return "+".join([*mixes, *names])


def _act_otherwise(block: BlockView, other: BlockView) -> bool:
    """Return whether the MLPs of two blocks have different activation functions."""
    values: list[Tensor] = []
    for of in (block, other):
        with of.loaded():
            phi = getattr(of.mlp, "activation", None)
            if phi is None:
                return False
            # an activation with weights of its own computes where they are
            x = torch.linspace(-6, 6, 97, dtype=torch.float64, device=next(of.module.parameters()).device)
            values.append(phi(x).cpu())
    return not torch.allclose(*values, rtol=1e-5, atol=1e-5)


def _errors(difference: Difference) -> dict[str, float]:
    """Return the error of each block's map, and of the maps after the last block.

    Raises:
        UnsupportedModelError: an error exceeds the tolerance.
    """
    errors: dict[str, float] = {}
    a, b = difference.a, difference.b
    for layer in range(difference.n_layers):
        ours = difference.maps.block_map(layer)(difference.resid_pre(layer))
        errors[f"blocks.{layer}"] = _error(difference, ours, a.resid_pre(layer + 1), b.resid_pre(layer + 1))
    after = [part for part in (difference.final_map(), difference.prediction_head()) if part is not None]
    if after:
        predicts = a.points.unembed_in is not None
        states = [frozen.unembedded() if predicts else frozen.output for frozen in (a, b)]
        ours = Chain(tuple(after))(difference.resid_pre(difference.n_layers))
        errors["head"] = _error(difference, ours, *states)
    for name, error in errors.items():
        refuse_nan(f"difference: the output of the map of {name}", error)
        if not error <= difference.tolerance:
            raise UnsupportedModelError(
                f"difference: the map of {name} of this {difference.view.description} does not give the difference of "
                f"its outputs (relative error {error:.1e}, allowed {difference.tolerance:.0e}). {_suspects(a, b)}"
            )
    return errors


def _suspects(a: FrozenPass, b: FrozenPass) -> str:
    """Return possible causes of a changed block, and what to do."""
    for frozen in (a, b):
        if not bool(frozen.resid_pre(0)[frozen.mask].any(-1).all()):
            return (
                "The stream of a token is zero in one run, so the scale of a norm is just its epsilon and its output "
                "is rounding: use another baseline, such as 'mean'."
            )
    hooks = dict.fromkeys([*a.capture.hooks_in(), *b.capture.hooks_in()])
    if hooks:
        return (
            f"There were hooks on the model ({', '.join(hooks)}), whose changes inside a block are not supported: "
            "freeze both runs without them, or explain each run separately."
        )
    dtypes = [str(frozen.resid_pre(0).dtype).removeprefix("torch.") for frozen in (a, b)]
    if dtypes[0] != dtypes[1]:
        return (
            f"One run is in {dtypes[0]}, the other in {dtypes[1]}: the difference is mostly rounding. Load both models "
            "in one dtype."
        )
    if a.model is not b.model:
        return "The two models seem to have different architectures: explain each run separately."
    return "A part responds to another input in a different way than its weights imply: explain each run separately."


def _epsilon(difference: Difference) -> float:
    """Return the rounding unit of the narrowest dtype in which two runs compute, including norms and softmax."""
    runs = (difference.a, difference.b)
    coarsest = max(torch.finfo(frozen.resid_pre(0).dtype).eps for frozen in runs)
    errors = map(difference.maps.pattern_error, range(difference.n_layers))
    in_float32 = any(frozen.view.norms_in_float32 for frozen in runs)
    if in_float32 or any(error > ROUNDING * coarsest for error in errors):
        return max(coarsest, torch.finfo(torch.float32).eps)
    return coarsest


def _error(difference: Difference, ours: Tensor, of_a: Tensor, of_b: Tensor) -> float:
    """Return the largest error of a real token, relative to the difference plus the rounding of its terms."""
    mask = difference.mask
    expected = upcast(of_a) - upcast(of_b)
    rounding = difference.rounding / difference.tolerance
    sizes = expected.norm(dim=-1) + rounding * (upcast(of_a).norm(dim=-1) + upcast(of_b).norm(dim=-1))
    misses = (upcast(ours) - expected).norm(dim=-1) / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    return float(misses[mask].max()) if bool(mask.any()) else 0.0
