"""Elementwise functions as programs: calling one with Symbols shows what it computes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gpuattn.arrays import FLOATS, is_array, is_floating, wide
from gpuattn.autodiff.numpy.elementwise import NARROW
from gpuattn.autodiff.record import Box
from gpuattn.autodiff.tape import raw
from gpuattn.errors import UnsupportedError, type_of

CAST = "cast"  # to the dtype of the node; a narrower one only in name, until it is stored
ROUND = "round"  # what astype does: to the values that the dtype has
DTYPES = {*FLOATS, np.dtype(bool), *(np.dtype(f"{kind}{size}") for kind in "iu" for size in (1, 2, 4, 8))}  # fmt: skip  # noqa: E501
FUNCTIONS = {  # that fuse
    np.add, np.subtract, np.multiply, np.divide, np.negative, np.positive, np.absolute, np.square,
    np.sign, np.power, np.sqrt, np.reciprocal, np.exp, np.exp2, np.expm1, np.log, np.log2, np.log10,
    np.log1p, np.logaddexp, np.sin, np.cos, np.tan, np.sinh, np.cosh, np.tanh, np.arcsin, np.arccos,
    np.arctan, np.arctan2, np.hypot, np.arcsinh, np.arccosh, np.arctanh, np.maximum, np.minimum,
    np.floor, np.ceil, np.rint, np.trunc, np.isnan, np.isinf, np.isfinite, np.equal, np.not_equal,
    np.less, np.less_equal, np.greater, np.greater_equal, np.logical_and, np.logical_or,
    np.logical_not, np.logical_xor, np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert,
    np.where, np.clip,
}  # fmt: skip
COMPARISONS = {
    np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal,
}  # fmt: skip
NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)


class Symbol:
    """The result of ``function`` of ``inputs``: Symbols, numbers or None. Functions of NumPy give
    further Symbols.

    ``function``: of NumPy, CAST, ROUND, or None for an input. ``dtype``: of the result by NumPy's
    rules. ``weak``: a Python number that is known when the kernel is launched; dtype is its kind.
    """

    __slots__ = ("dtype", "function", "inputs", "trace", "weak")
    __array_priority__ = 1000  # a CuPy array on the left of an operator defers to a Symbol
    __hash__ = object.__hash__

    def __init__(
        self, trace: "Trace", function: Any, inputs: tuple, dtype: np.dtype, weak: bool = False
    ) -> None:
        self.trace, self.function, self.inputs = trace, function, inputs
        self.dtype, self.weak = dtype, weak

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        name = f"np.{ufunc.__name__}"
        if method != "__call__" or kwargs:
            what = f".{method}" if method != "__call__" else f" with {', '.join(kwargs)}="
            raise UnsupportedError(f"{name}{what} is not elementwise")
        return node(ufunc, *inputs)

    def __array_function__(self, function, types, args, kwargs):
        rule = {np.where: node_where, np.clip: node_clip, np.astype: node_astype}.get(function)
        if rule is None:
            raise UnsupportedError(f"np.{function.__name__} is not among the functions that fuse")
        return rule(*args, **kwargs)

    def astype(self, dtype: Any, copy: bool = True) -> "Symbol":
        return node_astype(self, dtype)

    def clip(self, a_min: Any = None, a_max: Any = None, **limits: Any) -> "Symbol":
        return node_clip(self, a_min, a_max, **limits)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnsupportedError(f".{name} of an array is unknown where it is fused")

    def _unknown(self, *_):
        raise UnsupportedError(
            "it reads values, as an if or float(x) does, or indexes; use np.where, or leave it out"
        )

    __bool__ = __float__ = __int__ = __len__ = __iter__ = __index__ = _unknown
    __getitem__ = __setitem__ = __array__ = _unknown

    def _in_place(self, other):
        raise UnsupportedError("it edits an array in place; write x = x + y for x += y")

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ipow__ = _in_place


def _add_operators():
    binary = {
        "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.divide,
        "pow": np.power, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
        "floordiv": np.floor_divide, "mod": np.remainder,
    }  # fmt: skip
    compared = {
        "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
        "gt": np.greater, "ge": np.greater_equal,
    }  # fmt: skip
    unary = {"neg": np.negative, "pos": np.positive, "abs": np.absolute, "invert": np.invert}
    for name, function in (binary | compared).items():
        setattr(Symbol, f"__{name}__", lambda a, b, function=function: node(function, a, b))
    for name, function in binary.items():
        setattr(Symbol, f"__r{name}__", lambda a, b, function=function: node(function, b, a))
    for name, function in unary.items():
        setattr(Symbol, f"__{name}__", lambda a, function=function: node(function, a))


_add_operators()


class Trace:
    """The inputs of a program: of ``arrays``, then of arrays that the function has from elsewhere.

    ``others``: those arrays and Tensors. ``scalars``: Symbols of Python floats.
    """

    def __init__(self) -> None:
        self.inputs: list[Symbol] = []
        self.scalars: list[Symbol] = []
        self.others: list = []

    def input(self, dtype: np.dtype) -> Symbol:
        if dtype not in DTYPES:
            raise UnsupportedError(f"arrays of {dtype} do not fuse")
        self.inputs.append(Symbol(self, None, (), dtype))
        return self.inputs[-1]

    def scalar(self) -> Symbol:
        self.scalars.append(Symbol(self, None, (), np.dtype(float), weak=True))
        return self.scalars[-1]

    def operand(self, value: Any) -> Any:
        """Return ``value`` as an operand: a Symbol, a number or None."""
        if isinstance(value, Symbol) or value is None or isinstance(value, NUMBERS):
            return value
        if not isinstance(value, Box) and not is_array(value):
            raise UnsupportedError(f"{type_of(value)} does not fuse")
        for known, symbol in zip(self.others, self.inputs[-len(self.others) :], strict=False):
            if known is value:
                return symbol
        self.others.append(value)
        return self.input(raw(value).dtype)


class Program:
    """What a function computes: ``outputs`` of ``trace.inputs`` and ``trace.scalars``.

    ``single``: whether the function returns one array, not a tuple. ``nodes``: all Symbols that the
    outputs depend on, in an order in which they can be computed.
    """

    def __init__(self, trace: Trace, outputs: Sequence[Symbol], single: bool) -> None:
        self.trace, self.outputs, self.single = trace, tuple(outputs), single
        self.nodes = ordered(self.outputs)

    def sources(self, output: Symbol) -> list[int]:
        """Return the numbers of the inputs that an output depends on."""
        needed = set(ordered([output]))
        return [i for i, symbol in enumerate(self.trace.inputs) if symbol in needed]

    def numbers(self, scalars: Sequence[float]) -> dict[Symbol, Any]:
        """Return the values of the weak Symbols."""
        known: dict[Symbol, Any] = dict(zip(self.trace.scalars, scalars, strict=True))
        for symbol in self.nodes:
            if symbol.weak and symbol.function is not None:
                inputs = [known[x] if isinstance(x, Symbol) else x for x in symbol.inputs]
                known[symbol] = symbol.function(*inputs).item()
        return known

    def evaluate(self, arrays: Sequence, scalars: Sequence[float]) -> tuple:
        """Return the outputs, by a call of NumPy or CuPy for every operation."""
        known = self.numbers(scalars)
        for symbol, array in zip(self.trace.inputs, arrays, strict=True):
            known[symbol] = array.astype(computed(array.dtype), copy=False)
        for symbol in self.nodes:
            if symbol not in known:
                inputs = [known[x] if isinstance(x, Symbol) else x for x in symbol.inputs]
                known[symbol] = _computed(symbol, inputs)
        return tuple([known[x].astype(x.dtype, copy=x.function is None) for x in self.outputs])


def ordered(ends: Iterable[Symbol]) -> list[Symbol]:
    """Return the Symbols that ``ends`` depend on, and these, operands first."""
    done: dict[Symbol, None] = {}
    stack = [(end, False) for end in reversed(list(ends))]
    while stack:
        symbol, is_ready = stack.pop()
        if symbol in done:
            continue
        if is_ready:
            done[symbol] = None
            continue
        stack.append((symbol, True))
        stack += [(x, False) for x in reversed(symbol.inputs) if isinstance(x, Symbol)]
    return list(done)


def computed(dtype: np.dtype) -> np.dtype:
    """Return the dtype that values of ``dtype`` are computed in: float32 for 16-bit floats."""
    return wide(dtype) if is_floating(dtype) else dtype


def _computed(symbol, inputs):
    if symbol.function is CAST:
        return inputs[0].astype(computed(symbol.dtype), copy=False)
    if symbol.function is ROUND:
        return inputs[0].astype(symbol.dtype).astype(computed(symbol.dtype), copy=False)
    out = symbol.function(*inputs)
    return np.asarray(out) if np.isscalar(out) else out.astype(computed(symbol.dtype), copy=False)


# ---- nodes ---------------------------------------------------------------------------------------


def node(function: Callable, *inputs: Any) -> Symbol:
    """Return the Symbol of ``function(*inputs)``. Raises UnsupportedError if that does not fuse."""
    if function not in FUNCTIONS:
        raise UnsupportedError(f"np.{function.__name__} is not among the functions that fuse")
    trace = next(x.trace for x in inputs if isinstance(x, Symbol))
    operands = tuple([trace.operand(x) for x in inputs])
    symbols = [x for x in operands if isinstance(x, Symbol)]
    if all(x.weak for x in symbols):
        sample = function(*[_sample(x) for x in operands])
        return Symbol(trace, function, operands, np.asarray(sample).dtype, weak=True)
    return Symbol(trace, function, operands, _dtype(function, operands))


def node_where(condition: Any, x: Any, y: Any) -> Symbol:
    return node(np.where, condition, x, y)


def node_clip(
    x: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None
) -> Symbol:
    low, high = (min if a_min is None else a_min), (max if a_max is None else a_max)
    return node(np.clip, x, low, high)


def node_astype(x: Symbol, dtype: Any, copy: bool = True) -> Symbol:
    dtype = np.dtype(dtype)
    if dtype not in DTYPES:
        raise UnsupportedError(f"arrays of {dtype} do not fuse")
    return x if x.dtype == dtype else Symbol(x.trace, ROUND, (x,), dtype)


def cast(x: Any, dtype: np.dtype) -> Any:
    """Return ``x`` as one of ``dtype``, without rounding to 16 bits."""
    return x if x.dtype == dtype else Symbol(x.trace, CAST, (x,), dtype)


def _dtype(function, operands):
    """Return the dtype of a result by NumPy's rules, where 16-bit floats are as in the tape."""
    strong = [x for x in operands if isinstance(x, Symbol) and not x.weak]
    strong += [x for x in operands if isinstance(x, np.generic)]
    try:
        found = function(*[_sample(x) for x in operands]).dtype
        narrow = {x.dtype for x in strong if x.dtype in NARROW}
        if narrow and found.kind == "f":
            found = np.result_type(*narrow, *[x.dtype for x in strong if x.dtype in ("f4", "f8")])
    except TypeError as error:  # float16 and bfloat16 have no common dtype
        raise UnsupportedError(f"np.{function.__name__}: {error}") from None
    if found not in DTYPES:
        raise UnsupportedError(f"np.{function.__name__} gives {found}, which does not fuse")
    return found


def _sample(x):
    """Return a value of the kind of an operand, to learn the dtype of a result."""
    if not isinstance(x, Symbol):
        return np.float32(x) if isinstance(x, np.generic) and x.dtype in NARROW else x
    if x.weak:
        return True if x.dtype == bool else 1.0
    return np.empty(0, computed(x.dtype))


def trace(function: Callable, kinds: Sequence[Any], names: Sequence[str]) -> Program:
    """Return the Program of ``function`` for arguments of ``kinds``.

    A kind is the dtype of an array, ``float`` for a Python float, or a tuple that begins with the
    type and the value of anything else, which is passed as it is. ``names``: of the last arguments,
    those by keyword. Raises UnsupportedError for what does not fuse.
    """
    made = Trace()
    given = [
        kind[1] if type(kind) is tuple else made.scalar() if kind is float else made.input(kind)
        for kind in kinds
    ]
    split = len(given) - len(names)
    result = function(*given[:split], **dict(zip(names, given[split:], strict=True)))
    outputs = result if isinstance(result, tuple) else (result,)
    for out in outputs:
        if not isinstance(out, Symbol) or out.weak:
            raise UnsupportedError(f"it returns {type_of(out)}, not a computed array")
    return Program(made, outputs, single=not isinstance(result, tuple))
