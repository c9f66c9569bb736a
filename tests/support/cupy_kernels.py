"""Which operations of CuPy need a kernel of CuPy's own, on the fake GPU of ``fake_runs``.

CuPy compiles a kernel at the first call of each operation with new dtypes, which takes a fifth of a
second each, one after the other, and no rehearsal helps. Allocations, copies of contiguous memory
of one dtype, zeros and copies between host and device need none. What does follows CuPy 14:
``_core/core.pyx``, ``_core/_routines_indexing.pyx``.
"""

import contextlib
import math
import sys
import threading
from pathlib import Path
from types import FunctionType
from typing import NamedTuple
from unittest import mock

import numpy as np
from fake_runs import Array

import gpuattn
from gpuattn import arrays

PACKAGE = f"{Path(gpuattn.__file__).parent}/"
# functions of arrays that are views, allocations, zeros or copies from the host
FREE = {
    "array", "asarray", "broadcast_to", "can_cast", "dtype", "empty", "empty_like", "expand_dims",
    "isscalar", "moveaxis", "ndim", "result_type", "shape", "split", "squeeze", "swapaxes",
    "transpose", "zeros", "zeros_like", "array_split", "ascontiguousarray", "promote_types",
}  # fmt: skip
FILLING = {"full": lambda args: args[1], "ones": lambda args: 1, "ones_like": lambda args: 1}
# (file, operation): why it may stay. A run of commands at their usual options has no others.
ALLOWED = {
    ("runtime/workspace.py", "astype"): "compiles while data are read: cold_start.start_libraries",
    ("runtime/workspace.py", "setitem"): "the same kernel",
    ("ops/attention/step_attention.py", "subtract"): "float32 alone, which is not a default",
}
METHODS = ("argmax", "argmin", "argsort", "sort", "cumsum", "take", "repeat", "nonzero", "dot")


class Used(NamedTuple):
    """An operation: ``where``, "engine/beam.py:130", called ``name`` for arrays of ``dtypes``."""

    where: str
    name: str
    dtypes: tuple[str, ...]

    @property
    def file(self) -> str:
        return self.where.partition(":")[0]


class Recorder:
    """``used``: the operations so far, each once, in the order of their first calls."""

    def __init__(self) -> None:
        self.used: dict[Used, None] = {}
        self._inside = threading.local()

    def unexpected(self) -> list[Used]:
        """Return the operations that ALLOWED lacks."""
        return [used for used in self.used if (used.file, used.name.split()[0]) not in ALLOWED]

    def note(self, name, *arrays):
        dtypes = tuple(str(x.dtype) for x in arrays if isinstance(x, np.ndarray | np.generic))
        self.used.setdefault(Used(_where(), name, dtypes))

    @contextlib.contextmanager
    def alone(self):
        """Note nothing that NumPy does inside."""
        before, self._inside.on = getattr(self._inside, "on", False), True
        try:
            yield before
        finally:
            self._inside.on = before


def _where():
    frame = sys._getframe(2)
    while frame is not None:
        if (file := frame.f_code.co_filename).startswith(PACKAGE):
            return f"{file[len(PACKAGE) :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside"


def plain(x):
    if isinstance(x, Array):
        return x.view(np.ndarray)
    return type(x)(map(plain, x)) if type(x) in (list, tuple) else x


def device(x):
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x).view(Array)
    return tuple(map(device, x)) if isinstance(x, tuple) else x


def arrays_in(values):
    for value in values:
        if isinstance(value, Array):
            yield value
        elif isinstance(value, list | tuple):
            yield from arrays_in(value)


@contextlib.contextmanager
def recorded():
    """Record the operations of CuPy inside ``training_on``; yield a Recorder."""
    recorder = Recorder()
    cupy = sys.modules["cupy"]

    def ufunc(self, function, method, *inputs, out=(), **kwargs):
        name = function.__name__ + ("" if method == "__call__" else f".{method}")
        with recorder.alone() as inside:
            if not inside and all(x.size for x in arrays_in((*inputs, *out))):
                recorder.note(name, *(x for x in inputs if isinstance(x, np.ndarray)))
            if out:
                kwargs["out"] = tuple(map(plain, out))
            kwargs = {key: plain(value) for key, value in kwargs.items()}
            found = getattr(function, method)(*map(plain, inputs), **kwargs)
        if out:
            return out[0] if len(out) == 1 else out
        return device(found)

    def module_function(name, function):
        def call(*args, **kwargs):
            with recorder.alone() as inside:
                if not inside and (kernel := _of_function(name, args, kwargs)):
                    recorder.note(kernel, *arrays_in((*args, *kwargs.values())))
                kwargs = {key: plain(value) for key, value in kwargs.items()}
                return device(function(*map(plain, args), **kwargs))

        return call

    def method(name, needs):
        real = getattr(np.ndarray, name)

        def call(self, *args, **kwargs):
            with recorder.alone() as inside:
                if not inside and self.size and (kernel := needs(self, args, kwargs)):
                    recorder.note(kernel, self, *arrays_in(args))
                return real(self, *args, **kwargs)

        return call

    real_get, real_set = Array.get, Array.set

    def get(self, *args, **kwargs):
        with recorder.alone():
            if self.size and not self.flags.c_contiguous:
                recorder.note("get of a view", self)
            return real_get(self, *args, **kwargs)

    def set_(self, *args, **kwargs):
        with recorder.alone():
            assert self.flags.c_contiguous
            return real_set(self, *args, **kwargs)

    methods = {name: method(name, lambda x, args, kwargs, name=name: name) for name in METHODS}
    methods |= {
        "__getitem__": method("__getitem__", lambda x, args, kwargs: _of_getitem(*args)),
        "__setitem__": method("__setitem__", lambda x, args, kwargs: _of_setitem(x, *args)),
        "astype": method("astype", _of_astype),
        "fill": method("fill", lambda x, args, kwargs: _of_fill(x, args[0])),
        "__array_ufunc__": ufunc,
        "get": get,
        "set": set_,
    }
    for name in ("copy", "reshape", "ravel", "flatten"):
        methods[name] = method(name, lambda x, args, kwargs, name=name: _of_copy(name, x, args))
    attribute = cupy.__getattr__

    def getattr_(name):
        found = attribute(name)
        known = isinstance(found, FunctionType | np.ufunc) or type(found).__name__ in (
            "builtin_function_or_method", "_ArrayFunctionDispatcher",
        )  # fmt: skip
        return module_function(name, found) if known else found

    functions = {
        name: module_function(name, value)
        for name, value in vars(cupy).items()
        if isinstance(value, FunctionType) and hasattr(np, name)
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(arrays, "allocate", None))  # poison is a kernel
        stack.enter_context(mock.patch.multiple(Array, create=True, **methods))
        stack.enter_context(mock.patch.multiple(cupy, **functions))
        stack.enter_context(mock.patch.object(cupy, "__getattr__", getattr_))
        yield recorder


def _of_function(name, args, kwargs):
    """Return the name of the kernel that a function of the module needs, or None."""
    if name in FILLING:
        size = args[0] if isinstance(args[0], tuple) else (np.size(args[0]),)
        return "fill" if math.prod(size) and FILLING[name](args) != 0 else None
    if name in ("array", "asarray", "ascontiguousarray"):
        x = args[0]
        if not isinstance(x, Array) or not x.size:
            return None
        dtype = kwargs.get("dtype") or (args[1] if len(args) > 1 else None) or x.dtype
        if np.dtype(dtype) != x.dtype:
            return "astype"
        return None if x.flags.c_contiguous or name == "asarray" else "copy of a view"
    if name in FREE:
        return None
    return name


def _of_getitem(index):
    index = index if isinstance(index, tuple) else (index,)
    return "getitem" if any(isinstance(i, np.ndarray | list) for i in index) else None


def _of_setitem(x, index, value):
    if _of_getitem(index):
        return "setitem of indices"
    target = np.ndarray.__getitem__(x, index)
    if not target.size:
        return None
    if not isinstance(value, Array):
        return _of_fill(target, value)
    while value.ndim and value.shape[0] == 1:  # as CuPy does
        value = np.ndarray.__getitem__(value, 0)
    if not isinstance(value, np.ndarray):
        return "setitem"
    if value.shape == target.shape and value.strides == target.strides:
        if value.ctypes.data == target.ctypes.data:
            return None
        if target.flags.c_contiguous and value.dtype == target.dtype:
            return None
    return "setitem"


def _of_astype(x, args, kwargs):
    if np.dtype(args[0]) == x.dtype:
        copies = kwargs.get("copy", True)
        return "copy of a view" if copies and not x.flags.c_contiguous else None
    return f"astype {np.dtype(args[0])}"


def _of_fill(x, value):
    if not isinstance(value, Array) and np.all(value == 0) and x.flags.c_contiguous:
        return None
    return "fill"


def _of_copy(name, x, args):
    if x.flags.c_contiguous:
        return None
    if name == "reshape" and np.shares_memory(np.ndarray.reshape(x, *args), x):
        return None
    return f"{name} of a view"
