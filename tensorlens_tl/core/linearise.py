"""Runs in which every operation is linear, or replaced in its gradient by a rule."""

import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import Token
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from tensorlens_tl.core.families import held_of, held_pieces
from tensorlens_tl.core.pairing import (
    CHOOSES,
    Call,
    Constant,
    OtherWayError,
    Pairing,
    beside_other_weights,
    is_weight,
    same_indices,
)
from tensorlens_tl.core.rules import ONES, Ones, Operation, Rule, calling_module, stands, unchanged
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import Placing, lock_of
from tensorlens_tl.models import HookedModel
from tensorlens_tl.models.parameters import first_output

Given = TypeVar("Given")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LINEAR = _names(
    """
    view view_as reshape reshape_as flatten unflatten transpose permute t movedim swapaxes swapdims squeeze unsqueeze
    squeeze_ unsqueeze_ expand expand_as broadcast_to contiguous clone __get__ real imag view_as_real view_as_complex
    to type type_as float double half bfloat16 cpu cuda
    split split_with_sizes tensor_split chunk unbind narrow select index_select gather take_along_dim __getitem__
    diagonal cat concat concatenate stack hstack vstack repeat repeat_interleave roll flip unfold pad tril triu
    sum mean cumsum neg __neg__ positive dropout masked_fill masked_fill_ where
    add __add__ __radd__ __iadd__ add_ sub __sub__ __rsub__ __isub__ sub_ rsub subtract
    scatter scatter_ scatter_add scatter_add_ index_add index_add_ index_copy index_copy_ index_put index_put_
    masked_scatter masked_scatter_ copy_ __setitem__ conv1d conv2d adaptive_avg_pool1d
    """
)
"""Operations that are linear in their live inputs."""

MATMUL = _names("matmul __matmul__ mm bmm einsum addmm baddbmm linear")
MULTIPLY = _names("mul __mul__ __rmul__ multiply")
DIVIDE = _names("div __truediv__ __rtruediv__ __rdiv__ true_divide divide")
IN_PLACE = {
    "mul_": torch.mul,
    "__imul__": torch.mul,
    "div_": torch.div,
    "__itruediv__": torch.div,
    "relu_": torch.relu,
    "clamp_": torch.clamp,
}
ACTIVATIONS = _names(
    "gelu silu relu leaky_relu elu selu celu mish hardswish relu6 hardtanh clamp clamp_min clamp_max activation"
)
FUNCTIONS = _names("tanh exp exp2 expm1 log log1p softplus erf abs sin cos logsigmoid pow __pow__ square")
MOMENTS = _names("norm vector_norm var std")
SCALES = _names("rsqrt sqrt reciprocal sigmoid hardsigmoid") | MOMENTS
CHOICES = _names("max min amax amin maximum minimum cummax")
"""Choices between live values are held."""

SPLITS = _names("split split_with_sizes chunk")

ADDED: dict[str, tuple[int | str, ...]] = {
    **dict.fromkeys(_names("add __add__ __radd__ __iadd__ add_ sub __sub__ __rsub__ __isub__ sub_ rsub subtract"),
                    (0, 1, "input", "other")),
    **dict.fromkeys(_names("cat concat concatenate stack hstack vstack"), (0, "tensors")),
    **dict.fromkeys(_names("linear conv1d conv2d"), (2, "bias")),
    **dict.fromkeys(_names("addmm baddbmm"), (0, "input")),
    **dict.fromkeys(_names("scatter scatter_ scatter_add scatter_add_"), (0, 3, "src")),
    **dict.fromkeys(_names("index_add index_add_ index_copy index_copy_"), (0, 3, "source")),
    **dict.fromkeys(_names("index_put index_put_"), (0, 2, "values")),
    **dict.fromkeys(_names("masked_scatter masked_scatter_"), (0, 2, "source")),
    **dict.fromkeys(_names("masked_fill masked_fill_"), (0, 2, "value")),
    **dict.fromkeys(("copy_",), (1, "src")),
    **dict.fromkeys(("__setitem__",), (0, 2)),
    **dict.fromkeys(("where",), (0, 1, 2, "input", "other")),
}  # fmt: skip
"""Operations that add their arguments, and the positions or names of these arguments."""

WITH_STEPS = _names("layer_norm rms_norm") | MOMENTS
"""Operations that are computed as a sequence of others."""

LIKE = _names("to type_as view_as reshape_as expand_as")
"""Operations whose second argument only determines the dtype, device or shape of the result."""

_FIELDS = ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout")
READS = frozenset(
    [getattr(Tensor, name).__get__ for name in _FIELDS]
    + [Tensor.is_floating_point, torch.is_floating_point, Tensor.numel, torch.numel, Tensor.dim, Tensor.size]
)
"""Calls that read a tensor's metadata, not its numbers: half of all calls in a run."""


def activation(z: Tensor, function: Callable[..., Any]) -> Any:
    """Apply φ as one operation, whatever it is composed of."""
    if has_torch_function_unary(z):
        return handle_torch_function(activation, (z,), z, function)
    return function(z)


def _mark_activations(model: nn.Module, placing: Placing) -> None:
    """Make each of a model's activations a single operation, until `placing` is taken off."""
    for module in model.modules():
        kind = type(module).__module__
        if kind == "transformers.activations" or (kind == "torch.nn.modules.activation" and _is_elementwise(module)):
            placing.instead_of(module, "forward", functools.partial(activation, function=module.forward))
        act_fn = vars(module).get("act_fn")
        if callable(act_fn):
            placing.instead_of(module, "act_fn", functools.partial(activation, function=act_fn))


def _hold_factors(model: nn.Module, placing: Placing, run: "Linearised") -> None:
    """Hold the factors of a model's mixers that `families` names, until `placing` is taken off."""
    for module in model.modules():
        held = held_of(module)
        if held is None:
            continue
        for name in held.outputs.split():
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                placing.instead_of(part, "forward", functools.partial(_without_gradient, part.forward))
        pieces = held_pieces(module, held)
        placing.instead_of(module, "forward", functools.partial(run.splitting, module.forward, pieces))


def _without_gradient(forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    return forward(*args, **kwargs).detach()


def _is_elementwise(module: nn.Module) -> bool:
    return not isinstance(
        module, nn.Softmax | nn.Softmax2d | nn.LogSoftmax | nn.Softmin | nn.MultiheadAttention | nn.GLU
    )


class Linearised(TorchFunctionMode):
    """A torch mode in which gradients are computed by a rule.

    It applies to values computed from tensors that require gradients. Parameters do not count as such: values computed
    from weights alone have no gradient.

    Attributes:
        rule: the rule for operations that are not linear.
        pairing: the pairing with another run, if this is one of two.

    Raises:
        UnsupportedModelError: no rule covers an operation.

    >>> from tensorlens_tl.core import ATTNLRP, Linearised
    >>> z = torch.tensor([2.0], requires_grad=True)
    >>> with Linearised(ATTNLRP):
    ...     y = torch.nn.functional.silu(z) * z
    >>> y.backward()
    >>> torch.equal(z * z.grad, y)
    True
    """

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        self.pairing: Pairing | None = None
        self._routers: set[str] = set()
        self.ones = Ones() if rule.affine else None
        self._entered: list[Token[Ones | None]] = []
        self._pieces: Mapping[int, tuple[int, ...]] = {}

    def __enter__(self) -> "Linearised":
        """Enter the mode; `constant` refers to this run meanwhile."""
        self._entered.append(ONES.set(self.ones))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """Leave the mode."""
        super().__exit__(*exception)
        ONES.reset(self._entered.pop())

    def splitting(
        self, forward: Callable[..., Any], pieces: Mapping[int, tuple[int, ...]], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a mixer in which some pieces of a split are held, given by the width of the tensor that is split."""
        before, self._pieces = self._pieces, pieces
        try:
            return forward(*args, **kwargs)
        finally:
            self._pieces = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if func in READS:
            return func(*args, **kwargs)
        name: str = getattr(func, "__name__", "")
        makes_source = kwargs.get("requires_grad") or name == "requires_grad_"
        # the last is the model's own `torch.no_grad`, which ours below would undo
        if makes_source or not torch.is_grad_enabled() or name == "_set_grad_enabled":
            return func(*args, **kwargs)
        given = args[:1] if name in LIKE else (*args, *kwargs.values())
        live = [x for x in _tensors(given) if _is_live(x)]
        if self.pairing is not None and _is_in_place(name):
            self.pairing.before_change(args[0])
        if not live:
            with torch.no_grad():
                out = _fixed(func(*args, **kwargs))  # a view of a parameter requires a gradient even here
            return out if self.pairing is None else self.pairing.named(out, _tensors((*args, *kwargs.values())))
        if self.ones is not None and name in ADDED:
            args, kwargs = _with_constants(name, args, kwargs, live[0].dtype, self.ones)
        if self.ones is not None and name == "pad":
            return _padded(func, args, kwargs, self.ones)
        if name in SPLITS and self._pieces:
            return self._split(func(*args, **kwargs), args[0], kwargs.get("dim", args[2] if len(args) > 2 else 0))
        if name == "linalg_solve_triangular" and not args[0].requires_grad:
            return func(*args, **kwargs)
        if self.pairing is not None:
            return self._of_pair(func, name, args, kwargs, live)
        return self._operation(func, name, args, kwargs, live)

    def _operation(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], live: list[Tensor]
    ) -> Any:
        """Run an operation on live values, as a linear one or by the rule."""
        if name in LINEAR or (len(live) == 1 and (name in MATMUL or name in MULTIPLY)):
            return func(*args, **kwargs)
        if name in IN_PLACE:
            with self:
                return args[0].copy_(IN_PLACE[name](args[0].clone(), *args[1:], **kwargs))
        return self._ruled(func, name, args, kwargs, live)

    def _split(self, pieces: Sequence[Tensor], x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """The pieces of a tensor, with those that are held detached."""
        held = {number % len(pieces) for number in self._pieces.get(x.shape[dim], ())}
        return tuple(piece.detach() if number in held else piece for number, piece in enumerate(pieces))

    def _ruled(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], live: list[Tensor]) -> Any:
        """Run an operation that is not linear, by the rule."""
        kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}
        if not args:
            args = (kwargs.pop("input"),)
        rule, x = self.rule, args[0]

        def of_first(z: Tensor) -> Tensor:
            return func(z, *args[1:], **kwargs)

        of_first.__name__ = name
        if name in MULTIPLY:
            return rule.multiply(func, *live)
        if name in MATMUL:
            return rule.matmul(_of_factors(func, args, kwargs, live), *live)
        if name in DIVIDE:
            return self._quotient(func, *(args if name not in ("__rdiv__", "__rtruediv__") else (args[1], x)), **kwargs)
        if name == "activation":
            return rule.activation(args[1], x)
        if name in ACTIVATIONS:
            return rule.activation(of_first, x)
        if name == "softmax":
            dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
            return rule.softmax(lambda scores, dim: of_first(scores), x, dim)
        if name in ("pow", "__pow__", "square"):
            return self._power(of_first, x, 2 if name == "square" else kwargs.get("exponent", args[-1]))
        if name in ("maximum", "minimum") and self.pairing is not None:
            return self._larger(func, name, x, args[1])
        if name == "linalg_solve_triangular" and (self.pairing is not None or rule.matmul is unchanged):
            return self._solved(func, *args, **kwargs)
        if name in MOMENTS and self.pairing is not None:
            return self._moment(name, x, *args[1:], **kwargs)
        if name in FUNCTIONS:
            return rule.function(of_first, x)
        if name in SCALES:
            return rule.scale(of_first, x)
        if name in ("layer_norm", "rms_norm"):
            return self._norm(func, name, *args, **kwargs)
        out = func(*args, **kwargs)
        if name in CHOICES or name in CHOOSES:
            return _fixed(out)
        if any(y.requires_grad for y in _tensors([out])):
            raise UnsupportedModelError(
                f"{name} in {calling_module()}: no rule knows this operation, so its gradient would be the model's "
                "own. Use a method based on the operator (tensorlens, cp-lrp, relp)."
            )
        return out

    def _quotient(self, func: Operation, x: Any, y: Any, **kwargs: Any) -> Tensor:
        """Run a division; the denominator of a norm, or of weights that sum to 1, is a scale."""
        if not (isinstance(y, Tensor) and y.requires_grad):
            return func(x, y, **kwargs)
        if self.pairing is None:
            return func(x, self.rule.scale(lambda scale: scale, y), **kwargs)
        inverse = self.rule.scale(torch.reciprocal, y)
        both = isinstance(x, Tensor) and x.requires_grad
        return self.rule.multiply(torch.mul, x, inverse) if both else x * inverse

    def _power(self, f: Operation, x: Tensor, exponent: Any) -> Tensor:
        if isinstance(exponent, Tensor) or exponent >= 1:
            if exponent == 2 and self.pairing is not None:
                return self.rule.multiply(torch.mul, x, x)
            return self.rule.function(f, x)
        return self.rule.scale(f, x)

    def _larger(self, func: Operation, name: str, x: Tensor, y: Tensor) -> Tensor:
        """Run a maximum or minimum, by the slope of the difference of the two values."""
        with self:
            linear = x + torch.relu(y - x) if name == "maximum" else x - torch.relu(x - y)
            return stands(func(x.detach(), y.detach()), linear)

    def _solved(self, func: Operation, matrix: Tensor, y: Tensor, *, upper: bool, **kwargs: Any) -> Tensor:
        """Solve A·X = Y for X: Ā·ΔX = ΔY − ΔA·X̄."""
        x = func(matrix.detach(), y.detach(), upper=upper, **kwargs)
        on_diagonal = int(kwargs.get("unitriangular", False))
        used = matrix.triu(on_diagonal) if upper else matrix.tril(-on_diagonal)
        left = y - used @ self.rule.mean(x)
        return stands(x, func(self.rule.mean(matrix), left, upper=upper, **kwargs))

    # ------------------------------------------------------------------ two runs

    def _of_pair(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], live: list[Tensor]
    ) -> Any:
        """Run an operation in one of two paired runs, which may differ in weights and other held values."""
        assert self.pairing is not None
        if name == "activation" and self.pairing.names and _has_weights(args[1]):
            with self:  # an activation that has weights, by its operations
                return args[1](args[0])
        if name in CHOOSES or (name == "gather" and self.pairing.chooses):
            return self.pairing.choose(_fixed(func(*args, **kwargs)))
        changed = args[0] if _is_in_place(name) else None
        beside = [
            x for x in _tensors((*args, *kwargs.values()))
            if x is not changed and x.numel() and not any(x is of for of in live) and name not in LIKE
        ]  # fmt: skip
        indices = [x for x in beside if not x.is_floating_point()]
        weights = [x for x in beside if x.is_floating_point() and is_weight(x)]
        if indices or weights:
            self.pairing.index(indices, weights)
        held = [x for x in beside if x.is_floating_point() and self.pairing.may_differ(x)]
        if not held or name in WITH_STEPS:
            return self._operation(func, name, args, kwargs, live)
        other = self.pairing.beside(held, live)
        if other is None:
            return self._operation(func, name, args, kwargs, live)
        if name in DIVIDE and len(held) == 1 and args[1] is held[0]:
            inverse = self.pairing.named(1 / held[0].detach(), held)
            others = [1 / other[0][0]], other[1]
            return self._beside_others(torch.mul, "mul", (args[0], inverse), {}, live, [inverse], others)
        return self._beside_others(func, name, args, kwargs, live, held, other)

    def _beside_others(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], live: list[Tensor],
        held: list[Tensor], other: tuple[list[Tensor], list[Tensor]],
    ) -> Tensor:  # fmt: skip
        """Run an operation with held values that differ in the second run."""
        assert self.pairing is not None
        if _is_in_place(name) or name not in LINEAR | MATMUL | MULTIPLY:
            raise UnsupportedModelError(
                f"{name} in {calling_module()}: {self.pairing.name_of(held[0]) or 'an argument'} differs between the "
                "two runs, and the operation is not linear in it. Explain each run separately."
            )

        def operation(stands_for: Callable[[Tensor], Tensor]) -> Tensor:
            put = {id(x): stands_for(x) for x in (*held, *live)}
            with torch.no_grad():
                return func(*(_put(arg, put) for arg in args), **{key: _put(arg, put) for key, arg in kwargs.items()})

        def of_means(stands_for: Callable[[Tensor], Tensor]) -> Tensor:
            put = {id(x): stands_for(x) for x in held}
            means = {key: _put(arg, put) for key, arg in kwargs.items()}
            return self._operation(func, name, tuple(_put(arg, put) for arg in args), means, live)

        return beside_other_weights(self.pairing, operation, of_means, held, live, other)

    # ------------------------------------------------------------------ modules that choose

    def calling(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module of one of two runs, which may make choices, or receive those of a router."""
        pairing, call = self.pairing, Call(forward, args, kwargs)
        assert pairing is not None
        if not torch.is_grad_enabled():  # inside a router
            return call()
        before = pairing.routing, pairing.chooses
        pairing.routing, pairing.chooses = pairing.label(name), False
        try:
            if name in self._routers:
                with torch.no_grad():  # its choice, and the weight of the choice, are held
                    return pairing.choose(call())
            return self._first(call, name) if pairing.first is None else self._second(call)
        finally:
            pairing.routing, pairing.chooses = before

    def _first(self, call: Call, name: str) -> Any:
        """Make a call in the run that goes first."""
        assert self.pairing is not None
        call.start = self.pairing.noted
        self.pairing.calls.append(call)
        out = call()
        if call.gives_choices and not call.gives_stream:
            self._routers.add(name)
            self.pairing.drop(call)
            out = self.pairing.choose(_fixed(out))
        call.end = self.pairing.noted
        return out

    def _second(self, call: Call) -> Any:
        """Make a call in the other run; if the two runs choose differently, with the choices of both."""
        pairing = self.pairing
        assert pairing is not None
        other = pairing.other_call()
        constants = len(pairing.constants)
        given_alike = not other.gives_stream or same_indices(call.given, other.given)
        try:
            if not given_alike:
                raise OtherWayError
            return call()
        except OtherWayError:
            alike = given_alike and other.start.choices == other.end.choices
            if alike or not other.gives_stream or pairing.forced is not None:
                raise
        del pairing.constants[constants:]
        out = self._by_choices(call, other)
        pairing.place = other.end
        return out

    def _by_choices(self, call: Call, other: Call) -> Any:
        """Average a call over both choices, each made in both runs, and add a constant for the changed choice."""
        pairing = self.pairing
        assert pairing is not None
        assert pairing.first is not None
        alone = Pairing(pairing.names, pairing.label)
        whole = self.under(alone, call.with_held_of(call))
        of_other = pairing.first.choices[other.start.choices : other.end.choices]
        shares: list[Tensor] = []
        explained: list[Tensor] = []
        for choices, chosen in ((alone.choices, call), (of_other, other)):
            first = Pairing(pairing.first.names, pairing.label, forced=choices)
            theirs = self.under(first, other.with_held_of(chosen))
            second = Pairing(pairing.names, pairing.label, first, choices)
            mine = first_output(self.under(second, call.with_held_of(chosen)))
            second.finish()
            pairing.constants += second.constants
            shares.append(mine / 2)
            explained.append((mine.detach() - first_output(theirs).detach()) / 2)
        linear = shares[0] + shares[1]
        added = first_output(whole).detach() - first_output(other.out).detach() - explained[0] - explained[1]
        leaf = torch.zeros_like(added, requires_grad=True)
        pairing.constants.append(Constant(pairing.routing, leaf, added, None, linear))
        out = stands(first_output(whole), linear + leaf)
        return (out, *_fixed(whole[1:])) if isinstance(whole, tuple) else out

    def under(self, pairing: Pairing, run: Callable[[], Given]) -> Given:
        """Return the result of a run, or of a call, as one of two runs."""
        before = self.pairing, self.rule
        self.pairing, self.rule = pairing, pairing.rule
        try:
            return run()
        finally:
            self.pairing, self.rule = before

    # ------------------------------------------------------------------ by their steps

    def _moment(self, name: str, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
        """Compute a norm or a variance step by step."""
        with self:
            if name in ("norm", "vector_norm"):
                return x.pow(2).sum(dim, keepdim=keepdim).sqrt()
            squares = (x - x.mean(dim, keepdim=True)).pow(2)
            total = squares.sum(dim, keepdim=keepdim)
            count = x.numel() // total.numel() - kwargs.get("correction", int(kwargs.get("unbiased", True)))
            return total / count if name == "var" else (total / count).sqrt()

    def _norm(
        self, func: Callable[..., Tensor], name: str, x: Tensor, shape: Any, weight: Tensor | None = None,
        *rest: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Compute a norm that is a single operation: its own value, with the gradient of its steps."""
        value = func(x.detach(), shape, weight, *rest, **kwargs)
        eps = kwargs.get("eps", rest[-1] if rest else None)
        eps = (1e-5 if name == "layer_norm" else torch.finfo(x.dtype).eps) if eps is None else eps
        bias = kwargs.get("bias", rest[0] if name == "layer_norm" and rest else None)
        with self:
            centred = x - x.mean(-1, keepdim=True) if name == "layer_norm" else x
            out = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
            out = out if weight is None else out * weight
            return stands(value, out if bias is None else out + bias)


@contextmanager
def ruled(model: HookedModel | nn.Module, rule: Rule | None) -> Generator[Linearised | None, None, None]:
    """Give runs of a model or module gradients by a rule while the context is open; None keeps its own gradients."""
    if rule is None:
        yield None
        return
    with lock_of(model), Placing() as placing, Linearised(rule) as linearised:
        assert isinstance(model, nn.Module)
        _mark_activations(model, placing)
        if rule.affine:
            _hold_factors(model, placing, linearised)
        yield linearised


@contextmanager
def in_pairs(modules: Sequence[nn.Module]) -> Generator[Linearised, None, None]:
    """Pair runs of the modules while the context is open.

    Args:
        modules: one module, or those of two models; they are called inside `Linearised.under`.
    """
    with ExitStack() as stack:
        for module in dict.fromkeys(modules):
            stack.enter_context(lock_of(module))
        placing = stack.enter_context(Placing())
        linearised = stack.enter_context(Linearised(Rule()))
        for module in dict.fromkeys(modules):
            _mark_activations(module, placing)
            for name, part in module.named_modules():
                if any(True for _ in part.children()) or any(weight.ndim > 2 for weight in part.parameters()):
                    name = name.replace("._original_component", "")
                    placing.instead_of(part, "forward", functools.partial(linearised.calling, name, part.forward))
        yield linearised


def refuse_other_functions(outputs: Iterable[Tensor]) -> None:
    """Refuse a run that uses a ``torch.autograd.Function`` of the model, as torch functions do not show its operations.

    Raises:
        UnsupportedModelError: names the function.
    """
    nodes: list[Any] = [y.grad_fn for y in outputs]
    seen = set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", None)
        if function is not None and not function.__module__.startswith("tensorlens_tl."):
            raise UnsupportedModelError(
                f"the model computes with {function.__name__}, an autograd function of its own, whose gradient no rule "
                "can change. Use a method based on the operator (tensorlens, cp-lrp, relp)."
            )
        nodes += [before for before, _ in node.next_functions]


def _with_constants(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: torch.dtype, ones: Ones
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return an operation's arguments, with every constant that it adds to live values made a constant of the map."""
    places = ADDED[name]

    def of_map(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(map(of_map, x))
        if isinstance(x, Tensor):
            if _is_live(x) or x.dtype == torch.bool or not x.numel():  # an empty cache is joined to keys
                return x
            return ones.times(x if x.is_floating_point() else x.to(like))
        if not isinstance(x, int | float) or x == 0 or name.startswith("scatter"):
            return x
        return ones.times(torch.tensor(x, dtype=torch.promote_types(like, torch.float32)))

    if _is_in_place(name):
        if 0 in places and not _is_live(args[0]):
            args[0].copy_(ones.times(args[0].clone()))
        places = [place for place in places if place != 0]
    args = tuple(of_map(arg) if place in places else arg for place, arg in enumerate(args))
    return args, {key: of_map(arg) if key in places else arg for key, arg in kwargs.items()}


def _padded(func: Operation, args: tuple[Any, ...], kwargs: Mapping[str, Any], ones: Ones) -> Tensor:
    """Pad a tensor; padding that is not zero is a constant of the map."""
    out = func(*args, **kwargs)
    padding = func(torch.zeros_like(args[0]), *args[1:], **kwargs)
    return stands(out, out + ones.times(padding)) if bool(padding.any()) else out


def _is_in_place(name: str) -> bool:
    return name in ("__setitem__", "__iadd__", "__isub__") or (name.endswith("_") and not name.endswith("__"))


def _has_weights(function: Any) -> bool:
    """Return whether a function is a method of a module with weights."""
    module = getattr(function, "__self__", None)
    return isinstance(module, nn.Module) and any(True for _ in module.parameters())


def _is_live(x: Tensor) -> bool:
    return x.requires_grad and not (x.is_leaf and isinstance(x, nn.Parameter))


def _of_factors(
    func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], live: list[Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a product as a function of its two live factors, which may be one tensor; other arguments are fixed.

    Raises:
        UnsupportedModelError: more than two are live.
    """
    name = getattr(func, "__name__", "a product")
    if len(live) != 2:
        raise UnsupportedModelError(
            f"{name} in {calling_module()}: {len(live)} of its factors depend on the input, and rules only cover "
            "products of two. Use a method based on the operator (tensorlens, cp-lrp, relp)."
        )

    def of_factors(x: Tensor, y: Tensor) -> Tensor:
        factors = iter((x, y))

        def put(arg: Any) -> Any:
            if isinstance(arg, list | tuple):
                return type(arg)(map(put, arg))
            return next(factors) if any(arg is factor for factor in live) else arg

        return func(*map(put, args), **{key: put(arg) for key, arg in kwargs.items()})

    of_factors.__name__ = name
    return of_factors


def _put(arg: Any, put: Mapping[int, Tensor]) -> Any:
    if isinstance(arg, list | tuple):
        return type(arg)(_put(part, put) for part in arg)
    return put.get(id(arg), arg) if isinstance(arg, Tensor) else arg


def _tensors(values: Any) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors(value)
    return tensors


def _fixed(out: Any) -> Any:
    """Detach an operation's output."""
    if isinstance(out, Tensor):
        return out.detach() if out.requires_grad and not isinstance(out, nn.Parameter) else out
    if isinstance(out, tuple):  # also a named tuple, such as topk's
        return tuple(map(_fixed, out)) if type(out) is tuple else type(out)(map(_fixed, out))
    return [_fixed(part) for part in out] if isinstance(out, list) else out
