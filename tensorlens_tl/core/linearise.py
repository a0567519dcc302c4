"""A run whose every operation is linear, or is what a rule makes of it."""

import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import Token
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from tensorlens_tl.core.choices import CHOOSES, ChoiceError, Trace, by_runs
from tensorlens_tl.core.families import held_of, held_pieces
from tensorlens_tl.core.pairing import Pairing, beside_other_weights
from tensorlens_tl.core.rules import ONES, Ones, Operation, Rule, calling_module, halves, stands
from tensorlens_tl.errors import UnsupportedModelError
from tensorlens_tl.hooks import Placing, lock_of
from tensorlens_tl.models import HookedModel


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
"""Operations that are linear in what is live."""

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
"""What is chosen by live values is held."""

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
"""Operations that add up what they are given, and where what they add stands."""

WITH_STEPS = _names("layer_norm rms_norm") | MOMENTS
"""Operations that are put together of others, each of which is given its own weights."""

LIKE = _names("to type_as view_as reshape_as expand_as")
"""Operations whose other argument only says of which kind the result is."""


def activation(z: Tensor, function: Callable[..., Any]) -> Any:
    """φ(z) as one operation, whatever it is composed of."""
    if has_torch_function_unary(z):
        return handle_torch_function(activation, (z,), z, function)
    return function(z)


def _mark_activations(model: nn.Module, placing: Placing) -> None:
    """Make a model's activations one operation each, until `placing` is taken off."""
    for module in model.modules():
        kind = type(module).__module__
        if kind == "transformers.activations" or (kind == "torch.nn.modules.activation" and _is_elementwise(module)):
            placing.instead_of(module, "forward", functools.partial(activation, function=module.forward))
        act_fn = vars(module).get("act_fn")
        if callable(act_fn):
            placing.instead_of(module, "act_fn", functools.partial(activation, function=act_fn))


def _hold_factors(model: nn.Module, placing: Placing, run: "Linearised") -> None:
    """Hold what `families` says of a model's mixers, until `placing` is taken off."""
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
    """Inside, what is computed from tensors that require gradients passes them on by a rule.

    Parameters are no such tensors: what is computed from weights alone has no gradient.

    Attributes:
        rule: what stands for operations that are not linear.
        trace: of a run of a module that two runs are paired by, if they are not one batch.
        pairing: with another run of the same module, if this is one of two.
        constants: what is held and differs between two runs, by name: its gradient times it is what it adds.

    Raises:
        UnsupportedModelError: an operation that no rule knows.

    >>> from tensorlens_tl.core import ATTNLRP, Linearised
    >>> z = torch.tensor([2.0], requires_grad=True)
    >>> with Linearised(ATTNLRP):
    ...     y = torch.nn.functional.silu(z) * z
    >>> y.backward()
    >>> torch.equal(z * z.grad, y)
    True
    """

    def __init__(self, rule: Rule, pairing: Pairing | None = None) -> None:
        super().__init__()
        self.rule = rule
        self.trace: Trace | None = None
        self.pairing = pairing
        self.constants: list[tuple[str, Tensor]] = []
        self.ones = Ones() if rule.affine else None
        self._entered: list[Token[Ones | None]] = []
        self._pieces: Mapping[int, tuple[int, ...]] = {}

    def __enter__(self) -> "Linearised":
        """As a mode of torch; a rule's functions find the run's `constant` meanwhile."""
        self._entered.append(ONES.set(self.ones))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """Leave the mode."""
        super().__exit__(*exception)
        ONES.reset(self._entered.pop())

    def splitting(
        self, forward: Callable[..., Any], pieces: Mapping[int, tuple[int, ...]], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a mixer, of which some pieces of what it splits are held: which, by the width of what is split."""
        before, self._pieces = self._pieces, pieces
        try:
            return forward(*args, **kwargs)
        finally:
            self._pieces = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One operation of the run."""
        kwargs = kwargs or {}
        name: str = getattr(func, "__name__", "")
        makes_source = kwargs.get("requires_grad") or name == "requires_grad_"
        # the last is `torch.no_grad` of the model's own, which would be undone by ours below
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
        if self.rule.runs == 2:
            if name in CHOOSES or (name == "gather" and self.trace is not None):
                return self._chosen(func, name, args, kwargs)
            args, live = self._beside(name, args, kwargs, live)
        return self._operation(func, name, args, kwargs, live)

    def _operation(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], live: list[Tensor]
    ) -> Any:
        """An operation on live values, linear or as the rule has it."""
        if name in LINEAR or (len(live) == 1 and (name in MATMUL or name in MULTIPLY)):
            return func(*args, **kwargs)
        if name in IN_PLACE:
            with self:
                return args[0].copy_(IN_PLACE[name](args[0].clone(), *args[1:], **kwargs))
        return self._ruled(func, name, args, kwargs, live)

    def _split(self, pieces: Sequence[Tensor], x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """The pieces of a tensor, without the gradients of those that are held."""
        held = {number % len(pieces) for number in self._pieces.get(x.shape[dim], ())}
        return tuple(piece.detach() if number in held else piece for number, piece in enumerate(pieces))

    def _ruled(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], live: list[Tensor]) -> Any:
        """What the rule makes of an operation that is not linear."""
        rule, x = self.rule, args[0]
        kwargs = {key: value for key, value in kwargs.items() if key != "inplace"}

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
        if name in ("maximum", "minimum") and rule.runs == 2:
            return self._larger(func, name, x, args[1])
        if name == "linalg_solve_triangular" and rule.runs == 2:
            return self._solved(func, *args, **kwargs)
        if name in MOMENTS and rule.runs == 2:
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
                f"{name} in {calling_module()}: no rule knows this operation, so that its gradient would be the "
                "model's own. Methods over the operator (tensorlens, cp-lrp, relp) work."
            )
        return out

    def _quotient(self, func: Operation, x: Any, y: Any, **kwargs: Any) -> Tensor:
        """What a norm is divided by, or weights that are to sum to 1, is a scale."""
        if not (isinstance(y, Tensor) and y.requires_grad):
            return func(x, y, **kwargs)
        if self.rule.runs == 1:
            return func(x, self.rule.scale(lambda scale: scale, y), **kwargs)
        inverse = self.rule.scale(torch.reciprocal, y)
        both = isinstance(x, Tensor) and x.requires_grad
        return self.rule.multiply(torch.mul, x, inverse) if both else x * inverse

    def _power(self, f: Operation, x: Tensor, exponent: Any) -> Tensor:
        if isinstance(exponent, Tensor) or exponent >= 1:
            if exponent == 2 and self.rule.runs == 2:
                return self.rule.multiply(torch.mul, x, x)
            return self.rule.function(f, x)
        return self.rule.scale(f, x)

    def _larger(self, func: Operation, name: str, x: Tensor, y: Tensor) -> Tensor:
        """The larger of two values, or the smaller, by the slope of what one exceeds the other by."""
        with self:
            linear = x + torch.relu(y - x) if name == "maximum" else x - torch.relu(x - y)
            return stands(func(x.detach(), y.detach()), linear)

    def _solved(self, func: Operation, matrix: Tensor, y: Tensor, *, upper: bool, **kwargs: Any) -> Tensor:
        """X of A·X = Y: Ā·ΔX = ΔY − ΔA·X̄."""
        x = func(matrix.detach(), y.detach(), upper=upper, **kwargs)
        on_diagonal = int(kwargs.get("unitriangular", False))
        used = matrix.triu(on_diagonal) if upper else matrix.tril(-on_diagonal)
        left = y - used @ self.rule.mean(x)
        return stands(x, func(self.rule.mean(matrix), left, upper=upper, **kwargs))

    # ------------------------------------------------------------------ two runs

    def _of_pair(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], live: list[Tensor]
    ) -> Any:
        """An operation of a run that is paired with another: weights and other held values may differ."""
        assert self.pairing is not None
        if name == "activation" and self.pairing.names and _has_weights(args[1]):
            with self:  # an activation with weights of its own, by its operations
                return args[1](args[0])
        if name in CHOOSES:
            chosen = func(*args, **kwargs)
            if any(x.is_floating_point() for x in _tensors([chosen])):
                raise UnsupportedModelError(
                    f"{name} in {calling_module()}: it gives values that it chooses, and not only which they are. Ask "
                    "about each run by itself."
                )
            self.pairing.choose(_tensors([chosen]))
            return chosen
        changed = args[0] if _is_in_place(name) else None
        beside = [
            x for x in _tensors((*args, *kwargs.values()))
            if x is not changed and x.numel() and not any(x is of for of in live) and name not in LIKE
        ]  # fmt: skip
        self.pairing.choose([x for x in beside if not x.is_floating_point()])
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
        """An operation beside values that are others in the second run."""
        assert self.pairing is not None
        if _is_in_place(name) or name not in LINEAR | MATMUL | MULTIPLY:
            raise UnsupportedModelError(
                f"{name} in {calling_module()}: {self.pairing.name_of(held[0]) or 'what it is given'} is not the same "
                "in both runs, and the operation is not linear in it. Ask about each run by itself."
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

    def constant(self, name: str, value: Tensor) -> Tensor:
        """A value that no source gives, as a source by itself."""
        leaf = value.detach().clone()
        leaf.requires_grad = True
        if self.trace is None:
            self.constants.append((name, leaf))
        elif self.trace.other is not None:
            self.constants.append((self.trace.name, leaf))
        return leaf

    def _chosen(self, func: Operation, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A choice of two runs: of one run of a module its own, or the one that is to be made."""
        if self.trace is None:
            raise ChoiceError(
                f"{name} in {calling_module()}: it chooses by itself in each of the two runs, and no module around it "
                "gives a stream as it is given one. Ask about each run by itself."
            )
        return self.trace.choose(lambda: _fixed(func(*args, **kwargs)))

    def _beside(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], live: list[Tensor]
    ) -> tuple[tuple[Any, ...], list[Tensor]]:
        """What is held beside live values: if it differs between the runs, a constant; other rows are refused."""
        put: dict[int, Tensor] = {}
        changed = args[0] if name.endswith("_") else None  # in place
        for y in _tensors((*args, *kwargs.values())):
            if (
                y is changed
                or isinstance(y, nn.Parameter)
                or any(y is x for x in live)
                or isinstance(y._base, nn.Parameter)
            ):
                continue
            if not y.is_floating_point():
                self._placed(name, y, args, live)
            elif name not in LIKE and self._differs(y, live):
                put[id(y)] = self.constant(calling_module(), y)
        if put:
            args = tuple(_put(arg, put) for arg in args)
            live = [x for x in _tensors((*args, *kwargs.values())) if _is_live(x)]
        return args, live

    def _placed(self, name: str, y: Tensor, args: tuple[Any, ...], live: list[Tensor]) -> None:
        """Note which rows an operation takes; in a batch of both runs, refuse those that are not the same in both."""
        if self.trace is not None:
            return self.trace.places.append(y)
        index = args[1][0] if name == "__getitem__" and isinstance(args[1], tuple) and args[1] else args[-1]
        if (name == "__getitem__" and index is y and y.ndim) or self._differs(y, live):
            raise ChoiceError(
                f"{name} in {calling_module()}: which rows it takes is not the same in both runs, and no module around "
                "it gives a stream as it is given one. Ask about each run by itself."
            )
        return None

    def _differs(self, y: Tensor, live: list[Tensor]) -> bool:
        """Whether a value that is held is another in the second run."""
        if self.trace is not None:
            return self.trace.sees(y)
        if y.ndim == 0 or y.ndim != live[0].ndim or len(y) != len(live[0]) or len(y) % 2:
            return False
        return not torch.equal(*halves(y))

    def _moment(self, name: str, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
        """A norm or a variance, by its steps."""
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
        """A norm that is one operation: its own value, the gradient of its steps."""
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
def ruled(
    model: HookedModel | nn.Module, rule: Rule | None, pairing: Pairing | None = None
) -> Generator[Linearised | None, None, None]:
    """Inside, runs of a model, or of a module, have gradients by a rule, or for None the model's own.

    Args:
        model: runs inside.
        rule: of its operations.
        pairing: with those of another run, by which they are paired.
    """
    if rule is None:
        yield None
        return
    with lock_of(model), Placing() as placing, Linearised(rule, pairing) as linearised:
        assert isinstance(model, nn.Module)
        _mark_activations(model, placing)
        if rule.affine:
            _hold_factors(model, placing, linearised)
        if rule.runs == 2 and pairing is None:
            _run_by_run(model, linearised, placing)
        yield linearised


def _run_by_run(model: nn.Module, linearised: Linearised, placing: Placing) -> None:
    """Let modules that choose be run for each run, until `placing` is taken off."""
    for name, module in model.named_modules():
        if any(True for _ in module.children()):
            routing = f"{name.replace('._original_component', '')}.routing"
            placing.instead_of(module, "forward", functools.partial(by_runs, linearised, routing, module.forward))


def refuse_other_functions(outputs: Iterable[Tensor]) -> None:
    """Refuse a run with a ``torch.autograd.Function`` of the model, which no operation shows; ours are linear.

    Raises:
        UnsupportedModelError: naming it.
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
                "can change. Methods over the operator (tensorlens, cp-lrp, relp) work."
            )
        nodes += [before for before, _ in node.next_functions]


def _with_constants(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: torch.dtype, ones: Ones
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """What an operation is given, with every constant that it adds to what is live as one of the map."""
    places = ADDED[name]

    def of_map(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)(map(of_map, x))
        if isinstance(x, Tensor):
            if _is_live(x) or x.dtype == torch.bool or not x.numel():  # a cache of nothing is joined to keys
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
    """A padded tensor, whose padding is a constant where it is not zero."""
    out = func(*args, **kwargs)
    padding = func(torch.zeros_like(args[0]), *args[1:], **kwargs)
    return stands(out, out + ones.times(padding)) if bool(padding.any()) else out


def _is_in_place(name: str) -> bool:
    return name in ("__setitem__", "__iadd__", "__isub__") or (name.endswith("_") and not name.endswith("__"))


def _has_weights(function: Any) -> bool:
    """Whether a function is a method of a module with weights."""
    module = getattr(function, "__self__", None)
    return isinstance(module, nn.Module) and any(True for _ in module.parameters())


def _is_live(x: Tensor) -> bool:
    return x.requires_grad and not isinstance(x, nn.Parameter)


def _of_factors(
    func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any], live: list[Tensor]
) -> Callable[[Tensor, Tensor], Tensor]:
    """A product as a function of its two live factors, whatever else it is given."""

    def of_factors(x: Tensor, y: Tensor) -> Tensor:
        put = {id(live[0]): x, id(live[1]): y}
        return func(*(_put(arg, put) for arg in args), **kwargs)

    of_factors.__name__ = getattr(func, "__name__", "a product")
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
    """What an operation gives, without its gradient."""
    if isinstance(out, Tensor):
        return out.detach() if out.requires_grad and not isinstance(out, nn.Parameter) else out
    if isinstance(out, tuple):  # a named one too, as of topk
        return tuple(map(_fixed, out)) if type(out) is tuple else type(out)(map(_fixed, out))
    return [_fixed(part) for part in out] if isinstance(out, list) else out
