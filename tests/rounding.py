"""Another processor's rounding, on this one: sums in another order, and functions a unit in the last place off.

A test that holds because two computations agree to the last bit, or because a difference is exactly zero, holds on the
processor that it was written on. Inside `OtherRounding` sums are taken in another order, and which one hangs on the
shape, as in a library that multiplies one row by other code than many. What a function gives hangs on the place of
the number, as where a processor computes eight numbers at once and the last few one by one. The same operation on the
same tensors gives the same bits twice; nothing is drawn at random.
"""

from functools import cache

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

PRODUCTS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1, aten.baddbmm.default: 1}
"""Matrix products, and which argument is the left one."""

SUMS = {aten.sum.dim_IntList, aten.mean.dim, aten.linalg_vector_norm.default, aten.sum.default, aten.mean.default}

FUNCTIONS = {
    aten.exp.default, aten.tanh.default, aten.sigmoid.default, aten.erf.default, aten.gelu.default, aten.silu.default,
    aten.rsqrt.default,
}  # fmt: skip
"""Functions of each number whose last bit differs between processors."""

ROWS = {aten._softmax.default, aten.native_layer_norm.default}
"""The same of functions of a row."""


class OtherRounding(TorchDispatchMode):
    """Every floating-point tensor operation of this thread, its gradients included, rounded otherwise."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in PRODUCTS:
            return func(*_reordered_product(list(args), PRODUCTS[func]), **kwargs)
        if func in SUMS and args[0].is_floating_point() and args[0].ndim:
            return func(args[0].flip(tuple(range(args[0].ndim))).flip(_kept(args)), *args[1:], **kwargs)
        if func in FUNCTIONS:
            output = func(*args, **kwargs)
            return _off_by_a_unit(output, torch.arange(output.numel()).reshape(output.shape))
        if func in ROWS:
            output = func(*args, **kwargs)
            first, *others = output if isinstance(output, tuple) else (output,)
            first = _off_by_a_unit(first, torch.arange(first.shape[-1] if first.ndim else 1))
            return (first, *others) if others else first
        if _is_composite(func):  # under inference_mode, matmul, linear and einsum come whole
            with self:
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


@cache
def _is_composite(func):
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def _reordered_product(args, left):
    a, b = args[left], args[left + 1]
    if a.is_floating_point() and a.is_cpu:
        inner = a.shape[-1]
        if a.shape[-2] % 2:
            args[left], args[left + 1] = a.flip(-1), b.flip(-2)
        else:
            args[left], args[left + 1] = a.roll(inner // 3, -1), b.roll(inner // 3, -2)
    return args


def _kept(args):
    """The dimensions that a sum does not run over: they stay in their order."""
    x = args[0]
    dims = next((each for each in args[1:] if isinstance(each, list | tuple)), None)
    if not dims:
        return ()
    summed = {dim % x.ndim for dim in dims}
    return tuple(dim for dim in range(x.ndim) if dim not in summed)


def _off_by_a_unit(x, places):
    """Two of three numbers, by their places, a unit up or down; 0, 1 and −1 are exact on every processor."""
    if not x.is_floating_point() or not x.is_cpu:
        return x
    unit = torch.finfo(x.dtype).eps * (places % 3 - 1).to(x)
    return torch.where((x == 0) | (x.abs() == 1), x, x + x * unit)
