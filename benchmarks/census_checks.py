"""One row of the census: a name of TransformerLens as a tiny random model, frozen, and measured in seven ways.

What is claimed, all in float64 and relative to the largest value:

* ``blocks``: every block, and what follows the last, composed from weights is the model's own (`tensorlens_tl.freeze`);
* ``output``: contributions and bias are the output that the model hands back (or its stream at the end);
* ``held``: the live model under the pass's hooks, at another input, is the operator there;
* ``gradients``: autograd through it is the operator's pull, for random cotangents;
* ``independent``: so is autograd through the model under hooks that share no code with the library, where those make
  it affine (softmax attention, plain or gated MLPs and norms with hook points of their own, experts whose gates go
  through an activation module, and nothing else);
* ``logits``: a target's scores and bias are its total, and the total is the model's own logit, at every position;
* ``difference``: with the same input in reverse, the exact difference of two runs takes the second output to the first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from census_building import BridgeError, Case, NotBuildableError, build, described, result_of
from census_models import VOCABULARY, kind_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlens_tl as tlens
from tensorlens_tl.testing.model_checks import held_output
from tensorlens_tl.testing.requirements import difference

EXACT, FLOAT32, REFUSED, CRASH, WRONG = "exact", "exact (float32 inside)", "refused", "crash", "wrong"
NOT_BUILDABLE, BRIDGE_FAILS = "not buildable offline", "TransformerLens fails"
VERDICTS = (EXACT, FLOAT32, REFUSED, CRASH, WRONG, BRIDGE_FAILS, NOT_BUILDABLE)
LIMIT, FLOAT32_LIMIT = 1e-9, 1e-6
"""The largest error of what is exact: in float64, and where the model itself narrows activations to float32."""

DIFFERENCE_LIMIT = 1e-5
"""The same of a difference, relative to the first run's largest output: two runs are rounded, as one is."""

COTANGENTS = 3


@dataclass
class Row:
    """What was found out about one name.

    Attributes:
        name, variant, kind: of the model; the variant is empty for the first shape of a name.
        verdict: one of `VERDICTS`.
        errors: relative error by claim (above), rounded.
        notes: claims that the library refuses, and where TransformerLens itself differs from Hugging Face.
        reason: why there is no result: the library's refusal, or the exception.
    """

    name: str
    variant: str
    kind: str
    verdict: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def title(self) -> str:
        """Name and variant."""
        return f"{self.name}, {self.variant}" if self.variant else self.name


def examine(name: str, variant: str = "") -> Row:
    """Build, freeze and measure one model; whatever goes wrong is its verdict."""
    row = Row(name, variant, kind_of(name))
    try:
        with _float64_by_default():
            measure(build(name, variant), row)
        changed = row.errors.get("difference", 0.0)
        worst = max(error for claim, error in row.errors.items() if claim != "difference")
    except NotBuildableError as error:
        row.verdict, row.reason = NOT_BUILDABLE, str(error)
    except BridgeError as error:
        row.verdict, row.reason = BRIDGE_FAILS, str(error)
    except tlens.TensorLensError as error:
        row.verdict, row.reason = REFUSED, str(error)
    except Exception as error:
        row.verdict, row.reason = CRASH, described(error)
    else:
        row.verdict = EXACT if worst <= LIMIT and changed <= DIFFERENCE_LIMIT else row.verdict
    return row


@contextmanager
def _float64_by_default() -> Iterator[None]:
    """For the constants that models make as they run; some overflow in float32 (the mask of XGLM)."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --------------------------------------------------------------------------- measuring


class _Narrowing(TorchDispatchMode):
    """Notes whether anything in float64 is made float32."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.float64:
            self.found |= made.dtype == torch.float32
        return made


def measure(case: Case, row: Row) -> None:
    """Fill in a row's errors and notes, and the verdict that it has unless everything is within `LIMIT`."""
    with torch.no_grad(), _Narrowing() as narrowing:
        own = result_of(case.bridge(case.input, **case.options))
    if own is not None and case.reference is not None and (off := difference(own, case.reference)) > 1e-4:
        row.notes.append(f"TransformerLens differs from Hugging Face by {off:.0e}")
    frozen = tlens.freeze(case.bridge, case.input, **case.options)
    op = frozen.operator()
    errors = {"blocks": max(error for part, error in frozen.errors.items() if part != "unembed")}
    made = op.contributions().sum(2) + op.bias
    errors["output"] = difference(made, op.output)
    if own is not None and own.shape == made.shape:
        errors["output"] = max(errors["output"], difference(made, own))
    claims: dict[str, Callable[[], float | None]] = {
        "held": lambda: _held(frozen, op),
        "gradients": lambda: _gradients(op, lambda x: held_output(frozen, x)),
        "independent": lambda: _independent(case, op),
        "logits": lambda: _logits(frozen, op, own),
        "difference": lambda: _two_runs(case, frozen),
    }
    for claim, ask in claims.items():
        try:
            error = ask()
        except tlens.UnsupportedModelError as refusal:
            what = claim if claim in ("logits", "difference") else "hooks"
            row.notes += [] if any(note.startswith(what) for note in row.notes) else [f"{what} refused: {refusal}"]
        else:
            errors |= {} if error is None else {claim: error}
    row.errors = {claim: float(f"{error:.0e}") for claim, error in errors.items()}
    within = errors.pop("difference", 0.0) <= DIFFERENCE_LIMIT and max(errors.values()) <= FLOAT32_LIMIT
    row.verdict = FLOAT32 if within and narrowing.found else WRONG


def _draw(like: Tensor, seed: int, rows: Sequence[int] = ()) -> Tensor:
    """Random numbers as large as `like`."""
    noise = torch.randn(*rows, *like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)
    return noise * like.square().mean().sqrt()


def _held(frozen: Any, op: Any) -> float:
    x = op.x + _draw(op.x, 5)
    with torch.no_grad():
        return difference(held_output(frozen, x), op(x))


def _gradients(op: Any, output: Callable[[Tensor], Tensor]) -> float:
    """How far the operator's pull is from autograd through a function, for random cotangents."""
    cotangents = _draw(op.output, 6, (COTANGENTS,))
    with torch.enable_grad():
        x = op.x.detach().clone().requires_grad_(True)
        made = output(x)
        pulled = [torch.autograd.grad(made, x, g, retain_graph=True)[0] for g in cotangents]
    return difference(op.pull(cotangents), torch.stack(pulled))


def _logits(frozen: Any, op: Any, own: Tensor | None) -> float | None:
    if frozen.view.unembedding is None or frozen.points.unembed_in is None or own is None or own.ndim != 3:
        return None
    worst = 0.0
    for token in (5, VOCABULARY - 1):
        asked = op.target(token, query=slice(frozen.prompt.encoder_length, None))  # an encoder predicts nothing
        total, size = asked.total, own.abs().max()
        worst = max(worst, float((asked.scores.sum(-1) + asked.bias - total).abs().max() / total.abs().max()))
        total = total if asked.soft_cap is None else asked.soft_cap * torch.tanh(total / asked.soft_cap)
        worst = max(worst, float((total - own[..., token]).abs().max() / size))
    return worst


# --------------------------------------------------------------------------- a witness without the library


def _two_runs(case: Case, frozen: Any) -> float:
    """How far the second run's output, with the map of what its input differs by, is from the first one's."""
    other = tlens.freeze(case.bridge, case.input.flip(1), **case.options)
    op = tlens.difference(frozen, other).operator()
    return difference(op(op.x) + other.output, frozen.output)


def _independent(case: Case, op: Any) -> float | None:
    """The same gradients under hooks made from a cache alone; None where these do not make the model affine."""
    model = case.bridge
    try:
        with torch.no_grad():
            cache = dict(model.run_with_cache(case.input, **case.options)[1].items())
        ends = ("ln_final.hook_out", f"blocks.{model.cfg.n_layers - 1}.hook_out")  # an encoder's ln_final is its head's
        end = next(name for name in ends if name in cache and difference(cache[name], op.output) <= FLOAT32_LIMIT)
        plain = [layer for layer in range(model.cfg.n_layers) if _has_activation(model, layer)]
        hooks, experts = _holding(cache, model.cfg.n_layers, plain), _experts_called(case)
        if not _vanish_at_zero(case, [f"blocks.{layer}.mlp.hook_pre" for layer in plain]):
            return None

        def output(x: Tensor) -> Tensor:
            seen: list[Tensor] = []
            placed = [("blocks.0.hook_in", lambda live, hook: x), *hooks, (end, lambda live, hook: seen.append(live))]
            with _experts_held(experts):
                model.run_with_hooks(case.input, **case.options, fwd_hooks=placed)
            return seen[-1]

        step = _draw(op.x, 8)
        with torch.no_grad():
            centre, ahead, behind = output(op.x), output(op.x + step), output(op.x - step)
    except (AttributeError, KeyError, IndexError, RuntimeError, StopIteration, ValueError):
        return None  # a hook point is missing, or means something else than its name says
    if max(difference(ahead + behind, 2 * centre), difference(centre, op.output)) > FLOAT32_LIMIT:
        return None
    return _gradients(op, output)


def _has_activation(model: Any, layer: int) -> bool:
    """Whether a layer has an MLP with hook points around its activation; a mixture of experts calls its ends so."""
    points, start = model.hook_dict, f"blocks.{layer}.mlp."
    return start + "hook_pre" in points and points[start + "hook_pre"] is not points.get(start + "hook_in")


@dataclass
class _Called:
    """A module of experts, what it was called with, and what its activation function gave, call by call."""

    experts: Any
    arguments: tuple[Any, ...] = ()
    activated: list[Tensor] = field(default_factory=list)


def _experts_called(case: Case) -> list[_Called]:
    """The experts of a model's own run: routing as they are given it, and the gates of each of them."""
    called = [
        _Called(module)
        for name, module in case.bridge.original_model.named_modules()
        if name.rsplit(".", 1)[-1] == "experts" and isinstance(getattr(module, "act_fn", None), torch.nn.Module)
    ]
    with ExitStack() as stack, torch.no_grad():
        for one in called:
            see = partial(setattr, one, "arguments")
            stack.callback(one.experts.register_forward_pre_hook(lambda module, given, see=see: see(given)).remove)
            keep = one.activated.append
            hook = one.experts.act_fn.register_forward_hook(lambda module, given, made, keep=keep: keep(made))
            stack.callback(hook.remove)
        case.bridge(case.input, **case.options)
    return called


@contextmanager
def _experts_held(called: Sequence[_Called]) -> Iterator[None]:
    """Experts that get the same tokens with the same weights, and whose gates are what they were."""
    with ExitStack() as stack:
        for one in called:
            gates = iter(one.activated)
            held = lambda module, given, one=one: (given[0], *one.arguments[1:])  # noqa: E731
            stack.callback(one.experts.register_forward_pre_hook(held).remove)
            hook = one.experts.act_fn.register_forward_hook(lambda module, given, made, gates=gates: next(gates))
            stack.callback(hook.remove)
        yield


def _holding(cache: Mapping[str, Tensor], n_layers: int, plain: Sequence[int]) -> list[tuple[str, Callable[..., Any]]]:
    """Hooks that hold scales, patterns and activation ratios at what a cache has."""
    hooks: list[tuple[str, Callable[..., Any]]] = [
        (name, lambda live, hook, scale=scale: scale)
        for name, scale in cache.items()
        if name.endswith("hook_scale") and ".q_norm" not in name and ".k_norm" not in name
    ]
    for layer in range(n_layers):
        start = f"blocks.{layer}."
        pattern = cache[start + "attn.hook_pattern"]

        def mixed(values: Tensor, pattern: Tensor = pattern) -> Tensor:
            values = values.repeat_interleave(pattern.shape[1] // values.shape[2], dim=2)
            return torch.einsum("bhqk,bkhd->bqhd", pattern, values)

        hooks += _carried(start + "attn.hook_v", start + "attn.hook_z", mixed)
        if layer in plain:
            before = start + ("mlp.hook_pre_linear" if start + "mlp.hook_pre_linear" in cache else "mlp.hook_pre")
            ratio = cache[start + "mlp.hook_post"] / cache[before]
            hooks += _carried(before, start + "mlp.hook_post", lambda live, ratio=ratio: ratio * live)
    return hooks


def _vanish_at_zero(case: Case, names: Sequence[str]) -> bool:
    """Whether activations are 0 at 0, so that a ratio says all of them (xIELU is not, by a millionth)."""
    posts: list[Tensor] = []
    hooks: list[tuple[str, Callable[..., Any]]] = [(name, lambda live, hook: torch.zeros_like(live)) for name in names]
    after = [name.replace("hook_pre", "hook_post") for name in names]
    hooks += [(name, lambda live, hook: posts.append(live)) for name in after]
    with torch.no_grad():
        case.bridge.run_with_hooks(case.input, **case.options, fwd_hooks=hooks)
    return not any(bool(post.any()) for post in posts)


def _carried(before: str, after: str, function: Callable[[Tensor], Tensor]) -> list[tuple[str, Callable[..., Any]]]:
    """Hooks that replace one activation by a function of an earlier one."""
    seen: dict[str, Tensor] = {}

    def see(live: Tensor, hook: Any) -> None:
        seen["live"] = live

    return [(before, see), (after, lambda live, hook: function(seen["live"]))]
