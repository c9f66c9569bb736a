"""``fuse``: elementwise NumPy code as one kernel, with its gradient as another."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from types import MethodType
from typing import Any

import numpy as np

from gpuattn.arrays import device_of, is_array, on_gpu, zeros
from gpuattn.autodiff import tape
from gpuattn.autodiff.fusion.gradient import Gradient
from gpuattn.autodiff.fusion.launch import Launcher
from gpuattn.autodiff.fusion.trace import Program, trace
from gpuattn.autodiff.numpy.elementwise import like, meta
from gpuattn.autodiff.record import Box
from gpuattn.autodiff.watch import Watch
from gpuattn.errors import KernelCompileError, UnsupportedError, problem, type_of, warn_slow_path
from gpuattn.impls import Impl, Impls

MOST_PROGRAMS = 64  # of a function, by dtypes and values: those made last


def fuse(function: Callable) -> Callable:
    """Return an elementwise function as one kernel, and its gradient as another.

    ``function``: of arrays, written in operators and NumPy's functions. It may use those that the
    tape differentiates element by element (``np.exp``, ``np.tanh``, ``np.maximum``, ...),
    comparisons and logic, ``np.where``, ``np.clip`` and ``astype``. Arguments broadcast; it returns
    one array or a tuple of arrays of one shape. Arrays are float16, bfloat16, float32, float64,
    integers or booleans; results have the dtypes of NumPy's rules. 16-bit floats are computed in
    float32, and only results are rounded to 16 bits.

    Python floats among the arguments may change from call to call. Each combination of dtypes and
    of other arguments is compiled once. Arrays and Tensors that the function finds elsewhere are
    inputs too, and what changes there is noticed. Gradients reach Tensors, of any order; backward
    reads the inputs that it needs again and computes the rest anew, so nothing else is kept.

    On NumPy arrays the function is called; with Tensors of NumPy arrays it is one op of the tape.
    What cannot be fused runs op by op, and a SlowPathWarning says why, once: reductions, products,
    indexing, shapes, an ``if`` on values, in-place edits, integer division, CuPy's own functions.
    ``reason`` of what is returned is that sentence, or None. It can decorate:

    >>> import numpy as np
    >>> import gpuattn
    >>> @gpuattn.fuse
    ... def squared_error(x, y):
    ...     return (np.tanh(x) - y) ** 2
    >>> x = gpuattn.Tensor([0.0, 1.0], requires_grad=True)
    >>> np.sum(squared_error(x, np.zeros(2))).backward()
    >>> x.grad.round(3).tolist()
    [0.0, 0.64]

    Raises TypeError for what is no function.
    """
    return Fused(function)


class Fused:
    """A function that runs as one kernel: see ``gpuattn.fuse``.

    ``reason``: None, or why the last call that could not be one kernel ran op by op.
    """

    reason: str | None

    def __init__(self, function: Callable) -> None:
        if not callable(function):
            got, accepted = type_of(function), "a function of arrays"
            raise TypeError(problem("fuse", "function", got, accepted))
        functools.update_wrapper(self, function)
        self.function, self.reason = function, None
        self._known: OrderedDict[Hashable, tuple[Watch, Operation | str]] = OrderedDict()
        self._lock = threading.Lock()
        self._warned: set[str] = set()

    def __repr__(self) -> str:
        return f"gpuattn.fuse({self.function!r})"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        boxed = any(isinstance(x, Box) for x in values)
        if not boxed and not any(map(on_gpu, values)):
            return self.function(*args, **kwargs)
        kinds = tuple([_kind(x) for x in values])
        operation = self._operation(kinds, tuple(kwargs), values)
        if not isinstance(operation, str):
            inputs = [
                x for x, kind in zip(values, kinds, strict=True) if isinstance(kind, np.dtype)
            ]
            inputs += operation.program.trace.others
            if len({on_gpu(tape.raw(x)) for x in inputs}) == 1:
                return operation(inputs, [x for x in values if type(x) is float])
            operation = "its arrays are in part NumPy's, in part on a GPU"
        self._explain(operation)
        return self.function(*args, **kwargs)

    def _operation(self, kinds, names, values):
        """Return the Operation for arguments of these kinds, or why there is none."""
        key = kinds, names
        try:
            with self._lock:
                watch, found = self._known.get(key, (None, ""))
        except TypeError as error:
            return f"an argument is not hashable: {error}"
        if watch is not None and watch.same():
            return found
        others = [x for x, kind in zip(values, kinds, strict=True) if type(kind) is tuple]
        watch = Watch(self.function, *others, of_tensors=("data",))
        try:
            name = getattr(self.function, "__name__", "fused")
            made: Operation | str = Operation(
                name, trace(self.function, kinds, names), self._explain
            )
        except UnsupportedError as error:
            made = str(error)
        except Exception as error:  # noqa: BLE001 a plain call raises it too, or needs arrays
            made = f"{type(error).__name__}: {error}"
        with self._lock:
            while len(self._known) >= MOST_PROGRAMS:
                self._known.popitem(last=False)
            self._known[key] = watch, made
        return made

    def _explain(self, reason):
        self.reason = reason
        if reason not in self._warned:
            self._warned.add(reason)
            name = getattr(self.function, "__name__", repr(self.function))
            warn_slow_path(f"{name} is not fused: {reason}")


class Operation:
    """A program as an op of the tape.

    ``explain(reason)``: called where no kernel computes it, but a call for each operation does.
    """

    def __init__(self, name: str, program: Program, explain: Callable[[str], None]) -> None:
        self.name, self.program, self._explain = name, program, explain
        self._launcher, self._compiles = Launcher(program), True
        self._gradients: dict[tuple, tuple[Gradient, Operation]] = {}
        impl = Impl("fused", self._forward, self._backward, differentiable_twice=True)
        self.impls = Impls(name, impl)

    def __call__(self, inputs: Sequence, scalars: Sequence[float]) -> Any:
        if any(isinstance(x, Box) for x in inputs):
            return tape.apply(self.impls, inputs, scalars=tuple(scalars))
        with device_of(*inputs):
            return self._result(self._run(inputs, scalars))

    def _run(self, arrays, scalars):
        if self._compiles and on_gpu(arrays[0]):
            try:
                return self._launcher(arrays, scalars)
            except UnsupportedError as error:
                self._explain(str(error))
            except KernelCompileError as error:
                self._explain(str(error))
                self._compiles = False
        return self.program.evaluate(arrays, scalars)

    def _result(self, outs):
        return outs[0] if self.program.single else outs

    def _forward(self, *arrays, needs, scalars):
        outs = self._run(arrays, scalars)
        has_grad = (True,) * len(outs)
        read = self._gradient(needs, has_grad)[0].reads if any(needs) else ()
        kept = [x if i in read else None for i, x in enumerate(arrays)]
        return self._result(outs), (tuple(map(meta, arrays)), *kept)

    def _backward(self, saved, *grads, needs, into, scalars):
        metas, *arrays = saved
        gradient, operation = self._gradient(needs, tuple([g is not None for g in grads]))
        given = [arrays[i] for i in gradient.reads] + [grads[i] for i in gradient.grads]
        found: list = [None] * len(needs)
        if gradient.gives:
            for i, slope in zip(gradient.gives, operation(given, scalars), strict=True):
                found[i] = like(slope, metas[i])
        first = tape.raw(next(g for g in grads if g is not None))
        return tuple([
            zeros(first, *m) if need and x is None else x
            for x, need, m in zip(found, needs, metas, strict=True)
        ])  # fmt: skip

    def _gradient(self, needs, has_grad):
        """Return (Gradient, its Operation) for these inputs and outputs."""
        key = needs, has_grad
        if key not in self._gradients:
            gradient = Gradient(self.program, needs, has_grad)
            self._gradients[key] = (
                gradient,
                Operation(f"{self.name}'", gradient.program, self._explain),
            )
        return self._gradients[key]


def _kind(value):
    """Return what a trace depends on: a dtype, ``float``, or a tuple of the value itself."""
    if isinstance(value, Box):
        return value.data.dtype
    if is_array(value):
        return value.dtype
    if type(value) is float:
        return float
    return type(value), value, str(value) if isinstance(value, np.floating) else ""  # 0.0 == -0.0
