"""Tensor: an array that records the NumPy functions applied to it, by NumPy's own protocols."""

import copy
from typing import Any

import numpy as np

from gpuattn.arrays import as_array, is_floating, on_gpu, to_cpu
from gpuattn.autodiff import backward_pass
from gpuattn.autodiff.numpy import (
    composed,
    elementwise,
    linalg,  # noqa: F401  adds to RULES
    products,
    shapes,
)
from gpuattn.autodiff.numpy.elementwise import PLAIN, RULES
from gpuattn.autodiff.record import Box, edit
from gpuattn.autodiff.tape import raw
from gpuattn.errors import GradientError, UnsupportedError
from gpuattn.typing import Array, DType

REDUCTIONS = {np.add: "np.sum", np.maximum: "np.max", np.minimum: "np.min"}


class Tensor(Box):
    """A NumPy or CuPy array whose computations are recorded for gradients.

    ``data``: an array (or numbers, for a NumPy one). ``requires_grad``: accumulate ``.grad`` in
    ``backward()``. NumPy's own functions and operators work on it: ``np.tanh(x @ w)``.
    Raises TypeError for ``requires_grad`` of integers.
    """

    __slots__ = ()
    __array_priority__ = 1000  # a CuPy array on the left of an operator defers to Tensor
    __hash__ = object.__hash__

    def __init__(
        self, data: Any, node: Any = None, index: int = 0, requires_grad: bool = False
    ) -> None:
        if type(data) is not np.ndarray and not on_gpu(data):
            numbers = isinstance(data, int | float | list | tuple)
            data = np.asarray(data) if numbers else as_array(data, "Tensor", "data")
        if requires_grad and not is_floating(data.dtype):
            raise TypeError(
                f"Tensor: no gradient with respect to {data.dtype}; cast the array to float32"
            )
        super().__init__(data, node, index, requires_grad)
        if node is not None and not is_floating(data.dtype):
            self.requires_grad = False

    # ---- attributes of arrays ----

    shape = property(lambda self: self.data.shape)
    dtype = property(lambda self: self.data.dtype)
    ndim = property(lambda self: self.data.ndim)
    size = property(lambda self: self.data.size)
    T = property(shapes.transpose)

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __repr__(self):
        where = "cupy" if on_gpu(self.data) else "numpy"
        made = f", by {self.node.op}" if self.node is not None else ""
        wants = ", requires_grad=True" if self.requires_grad and self.node is None else ""
        return f"Tensor({self.data!r}, {where}{made}{wants})"

    def numpy(self) -> np.ndarray:
        """Return the values as a NumPy array, not recorded (a copy from a GPU)."""
        return to_cpu(self.data)

    def tolist(self) -> Any:
        """Return the values as Python numbers in nested lists."""
        return self.numpy().tolist()

    def __format__(self, spec):
        return format(self.item(), spec) if spec else str(self)

    def item(self) -> Any:
        """Return the single value as a Python number."""
        return self.data.item()

    def __float__(self):
        return float(self.data)

    def __int__(self):
        return int(self.data)

    def __bool__(self):
        return bool(self.data)

    # ---- gradients ----

    def backward(
        self, grad: Any = None, *, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Add d(self)/d(leaf) into ``.grad`` of every leaf with ``requires_grad``.

        ``grad``: the gradient of self, an array of its shape; optional if self is one number.
        Raises GradientError without ``grad`` for more numbers, for a result that was not recorded
        or whose record was used already, and if saved arrays were edited.
        """
        if not self.requires_grad:
            raise GradientError(
                "backward: nothing recorded leads here; make an input with requires_grad=True, "
                "outside no_grad()"
            )
        if grad is None:
            if self.size != 1:
                raise GradientError(
                    f"backward: the result has shape {self.shape}, not one number; "
                    "reduce it (np.mean, np.sum) or pass backward(grad)"
                )
            grad = np.ones_like(self.data)
        elif raw(grad).shape != self.shape:
            raise GradientError(f"backward: grad has shape {raw(grad).shape}, want {self.shape}")
        backward_pass.backward(self, grad, retain_graph=retain_graph, create_graph=create_graph)

    def detach(self) -> "Tensor":
        """Return a Tensor of the same array that is not recorded."""
        return Tensor(self.data)

    # ---- copies: of the values, without the record ----

    def __copy__(self):
        """Return a Tensor that shares the array and the record."""
        other, _ = object.__new__(type(self)), self.version  # which both share from now on
        for name in Box.__slots__:
            if name != "__weakref__":
                setattr(other, name, getattr(self, name))
        return other

    def __deepcopy__(self, memo):
        """Return a leaf with copies of the values and of ``grad``; results cannot be copied."""
        if self.node is not None:
            raise GradientError(
                f"copy.deepcopy: a result of {self.node.op} is part of a record; accepted: leaves. "
                "Try copy.deepcopy(x.detach())."
            )
        other = type(self)(self.data.copy(), requires_grad=self.requires_grad)
        other.grad = copy.deepcopy(self.grad, memo)
        return other

    def __reduce__(self):
        """Pickle the values, and ``requires_grad`` of a leaf; results are detached."""
        return _unpickled, (type(self), self.data, self.requires_grad and self.node is None)

    # ---- the array protocols of NumPy and others ----

    def __array__(self, *args, **kwargs):
        raise TypeError("a plain array would lose the record of a Tensor; use x.numpy(), or x.data")

    def __dlpack__(self, **options):
        """Export the array without a copy. Raises BufferError if it requires a gradient."""
        if self.requires_grad:
            raise BufferError(
                "Tensor: another library would lose the record of a Tensor that requires a "
                "gradient; export x.detach()"
            )
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **kwargs):
        name = f"np.{ufunc.__name__}"
        if method != "__call__":
            hint = REDUCTIONS.get(ufunc)
            raise UnsupportedError(
                f"{name}.{method} is not recorded" + (f"; use {hint}" if hint else "")
            )
        if kwargs:
            raise UnsupportedError(f"{name}: {', '.join(kwargs)}= is not recorded")
        return _dispatch(ufunc, name, inputs, {"out": out})

    def __array_function__(self, function, types, args, kwargs):
        name = f"{function.__module__}.{function.__name__}".replace("numpy", "np", 1)
        return _dispatch(function, name, args, kwargs)

    # ---- operators and methods ----

    def __getitem__(self, key):
        return shapes.index(self, key)

    def __setitem__(self, key, value):
        if self.node is not None:
            raise GradientError(
                f"item assignment into a result of {self.node.op} is not recorded; use np.where, "
                "np.concatenate, or edit a leaf"
            )
        edit(self, raw(key), raw(value))

    def reshape(self, *shape: Any) -> "Tensor":
        given = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        return shapes.reshape(self, tuple(given))

    def transpose(self, *axes: Any) -> "Tensor":
        given = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
        return shapes.transpose(self, given or None)

    def swapaxes(self, axis1: int, axis2: int) -> "Tensor":
        return shapes.swapaxes(self, axis1, axis2)

    def argmax(self, axis: int | None = None) -> Array:
        return self.data.argmax(axis)

    def argmin(self, axis: int | None = None) -> Array:
        return self.data.argmin(axis)

    def astype(self, dtype: DType, copy: bool = True) -> "Tensor":
        return elementwise.astype(self, dtype)

    sum, mean, max, min, var, std = (
        elementwise.sum, elementwise.mean, elementwise.max,
        elementwise.min, elementwise.var, elementwise.std,
    )  # fmt: skip
    cumsum, clip, ravel, squeeze = (
        elementwise.cumsum,
        elementwise.clip,
        shapes.ravel,
        shapes.squeeze,
    )
    flatten, dot, prod, cumprod, repeat, take = (
        shapes.ravel, products.dot, composed.prod, composed.cumprod, composed.repeat, shapes.take,
    )  # fmt: skip
    __neg__, __pos__, __abs__ = elementwise.negative, elementwise.positive, elementwise.absolute
    __add__ = __radd__ = elementwise.add
    __mul__ = __rmul__ = elementwise.multiply
    __sub__, __truediv__ = elementwise.subtract, elementwise.divide

    def __rsub__(self, other):
        return elementwise.subtract(other, self)

    def __rtruediv__(self, other):
        return elementwise.divide(other, self)

    def __pow__(self, other):
        if type(other) is int and other == 2:  # as in losses: its kernel is planned
            return elementwise.square(self)
        return elementwise.power(self, other)

    def __rpow__(self, other):
        return elementwise.power(other, self)

    def __matmul__(self, other):
        return products.matmul(self, other)

    def __rmatmul__(self, other):
        return products.matmul(other, self)

    def __eq__(self, other):
        return self.data == raw(other)

    def __ne__(self, other):
        return self.data != raw(other)

    def __lt__(self, other):
        return self.data < raw(other)

    def __le__(self, other):
        return self.data <= raw(other)

    def __gt__(self, other):
        return self.data > raw(other)

    def __ge__(self, other):
        return self.data >= raw(other)


def _unpickled(kind, data, requires_grad):
    writeable = on_gpu(data) or data.flags.writeable  # it was read-only if a record had saved it
    return kind(data if writeable else data.copy(), requires_grad=requires_grad)


def _dispatch(function, name, args, kwargs):
    if kwargs.pop("out", None) is not None:
        raise UnsupportedError(f"{name}: out= cannot be recorded; use the returned value")
    if function in PLAIN:
        return function(*_unboxed(args), **{k: raw(v) for k, v in kwargs.items()})
    if function not in RULES:
        raise UnsupportedError(
            f"{name} has no gradient rule here. Apply it to x.data (no gradient), write it in "
            "known functions, or add it as an op: examples/add_an_op"
        )
    try:
        return RULES[function](*args, **kwargs)
    except TypeError as error:
        if f"{RULES[function].__name__}() " in str(error) and "argument" in str(error):
            raise UnsupportedError(f"{name}: {error}; only these are recorded") from None
        raise


def _unboxed(args):
    return [[raw(x) for x in a] if isinstance(a, list | tuple) else raw(a) for a in args]
