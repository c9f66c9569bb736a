"""CUDA text of a program: one kernel that computes all outputs, element by element."""

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np

from gpuattn.autodiff.fusion.trace import CAST, COMPARISONS, ROUND, Program, Symbol, computed
from gpuattn.cuda.compiler import ROOT
from gpuattn.errors import UnsupportedError

BLOCK = 256  # threads
STORED = {
    "float32": "float", "float64": "double", "float16": "f16", "bfloat16": "bf16", "bool": "bool",
    "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned int",
    "uint64": "unsigned long long",
}  # fmt: skip
# what follows T: the type of the result; f: the letter of float functions
EXPRESSIONS = {
    np.add: "{0} + {1}", np.subtract: "{0} - {1}", np.multiply: "{0} * {1}",
    np.divide: "{0} / {1}", np.negative: "-{0}", np.positive: "{0}", np.square: "{0} * {0}",
    np.absolute: "{0} < (T)0 ? -{0} : {0} + (T)0", np.reciprocal: "(T)1 / {0}",
    np.sqrt: "sqrt{f}({0})", np.exp: "exp{f}({0})", np.exp2: "exp2{f}({0})",
    np.expm1: "expm1{f}({0})", np.log: "log{f}({0})", np.log2: "log2{f}({0})",
    np.log10: "log10{f}({0})", np.log1p: "log1p{f}({0})", np.sin: "sin{f}({0})",
    np.cos: "cos{f}({0})", np.tan: "tan{f}({0})", np.sinh: "sinh{f}({0})",
    np.cosh: "cosh{f}({0})", np.tanh: "tanh{f}({0})", np.arcsin: "asin{f}({0})",
    np.arccos: "acos{f}({0})", np.arctan: "atan{f}({0})", np.arctan2: "atan2{f}({0}, {1})",
    np.hypot: "hypot{f}({0}, {1})", np.arcsinh: "asinh{f}({0})", np.arccosh: "acosh{f}({0})",
    np.arctanh: "atanh{f}({0})", np.floor: "floor{f}({0})", np.ceil: "ceil{f}({0})",
    np.rint: "rint{f}({0})", np.trunc: "trunc{f}({0})", np.power: "pow{f}({0}, {1})",
    np.maximum: "{0} != {0} || {0} > {1} ? {0} : {1}",
    np.minimum: "{0} != {0} || {0} < {1} ? {0} : {1}",
    np.logaddexp: "{0} == {1} ? {0} + log{f}((T)2) : {0} != {0} || {1} != {1} ? {0} + {1} : "
                  "{0} > {1} ? {0} + log1p{f}(exp{f}({1} - {0}))"
                  " : {1} + log1p{f}(exp{f}({0} - {1}))",
    np.sign: "{0} != {0} ? {0} : (T)(({0} > (T)0) - ({0} < (T)0))",
    np.isnan: "{0} != {0}", np.isfinite: "{0} - {0} == 0", np.isinf: "{0} == {0} && {0} - {0} != 0",
    np.equal: "{0} == {1}", np.not_equal: "{0} != {1}", np.less: "{0} < {1}",
    np.less_equal: "{0} <= {1}", np.greater: "{0} > {1}", np.greater_equal: "{0} >= {1}",
    np.logical_and: "{0} && {1}", np.logical_or: "{0} || {1}", np.logical_not: "!{0}",
    np.logical_xor: "{0} != {1}", np.bitwise_and: "{0} & {1}", np.bitwise_or: "{0} | {1}",
    np.bitwise_xor: "{0} ^ {1}", np.invert: "~{0}", np.where: "{0} ? {1} : {2}",
}  # fmt: skip
OF_BOOLS = {np.logical_and, np.logical_or, np.logical_not, np.logical_xor}
OF_FLOAT_TESTS = {np.isnan, np.isinf, np.isfinite}
ROUNDINGS = {np.floor, np.ceil, np.rint, np.trunc}
MOST_FACTORS = 8  # of a power with a constant integer exponent, as products


class Layout(NamedTuple):
    """How a launch goes through memory. Kernels are made for it.

    ``axes``: how many axes are left after neighbours were joined. ``width``: adjacent elements that
    a thread computes. ``inner``: for each input, the step of the last axis: 1 packed, 0 the same
    element, None any other. ``is_small``: whether 32 bits number the elements.
    """

    axes: int
    width: int
    inner: tuple[int | None, ...]
    is_small: bool


def parameters(program: Program, layout: Layout) -> list[tuple[str, str]]:
    """Return the (C type, name) of every parameter: inputs, outputs, numbers, chunks, lengths,
    and for each input the steps of its axes; the first axis needs no length."""
    index = "unsigned int" if layout.is_small else "unsigned long long"
    found = [
        (f"const {STORED[x.dtype.name]}*", f"in{i}") for i, x in enumerate(program.trace.inputs)
    ]
    found += [(f"{STORED[x.dtype.name]}*", f"out{i}") for i, x in enumerate(program.outputs)]
    found += [("double", f"number{i}") for i, _ in enumerate(numbers_used(program))]
    found.append((index, "chunks"))
    found += [(index, f"length{axis}") for axis in range(1, layout.axes)]
    for i, inner in enumerate(layout.inner):
        axes = _stepped_axes(layout, inner)
        found += [("long long", f"step{i}_{axis}") for axis in axes]
    return found


def _stepped_axes(layout, inner):
    """Return the axes whose steps of an input are parameters: not the last, if it is packed."""
    return range(layout.axes if inner is None else layout.axes - 1)


def numbers_used(program: Program) -> list[Symbol]:
    """Return the weak Symbols that elements are computed from."""
    strong = [x for x in program.nodes if not x.weak]
    used = dict.fromkeys(x for y in strong for x in y.inputs if isinstance(x, Symbol) and x.weak)
    return list(used)


def text(program: Program, layout: Layout) -> str:
    """Return the source of a kernel ``fused``."""
    given = ", ".join(f"{kind} __restrict__ {name}" if kind.endswith("*") else f"{kind} {name}"
                      for kind, name in parameters(program, layout))  # fmt: skip
    digest = hashlib.sha256((ROOT / "common/types.cuh").read_bytes()).hexdigest()[:16]
    lines = [
        '#include "common/types.cuh"', f"// {digest}", "template <typename T, int N>",
        "struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {", "    T x[N];", "};",
        f'extern "C" __global__ void __launch_bounds__({BLOCK}) fused({given}) {{',
        *[f"    {line}" for line in (*_loads(program, layout), *_elements(program, layout))],
        "}", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _loads(program, layout):
    index = "unsigned int" if layout.is_small else "unsigned long long"
    yield f"const {index} chunk = ({index})blockIdx.x * {BLOCK} + threadIdx.x;"
    yield "if (chunk >= chunks) return;"
    left = "chunk"
    for axis in reversed(range(layout.axes)):
        size = f"length{axis}" if axis < layout.axes - 1 else f"(length{axis} / {layout.width})"
        place = left if axis == 0 else f"{left} % {size}"
        wide = f" * {layout.width}" if axis == layout.axes - 1 else ""
        yield f"const long long at{axis} = (long long)({place}){wide};"
        if axis:
            yield f"const {index} left{axis} = {left} / {size};"
            left = f"left{axis}"
    for i, (symbol, inner) in enumerate(zip(program.trace.inputs, layout.inner, strict=True)):
        terms = [f"at{axis} * step{i}_{axis}" for axis in _stepped_axes(layout, inner)]
        terms += [f"at{layout.axes - 1}"] if inner == 1 else []
        yield f"const auto* from{i} = in{i} + {' + '.join(terms or ['0'])};"
        if inner == 1:
            pack = f"Pack<{STORED[symbol.dtype.name]}, {layout.width}>"
            yield f"const auto pack{i} = *reinterpret_cast<const {pack}*>(from{i});"
        elif inner == 0:
            yield f"const auto same{i} = *from{i};"
    for i, symbol in enumerate(program.outputs):
        yield f"Pack<{STORED[symbol.dtype.name]}, {layout.width}> result{i};"


def _elements(program, layout):
    names: dict[Symbol, str] = {}
    yield "#pragma unroll"
    yield f"for (int i = 0; i < {layout.width}; ++i) {{"
    for i, (symbol, inner) in enumerate(zip(program.trace.inputs, layout.inner, strict=True)):
        names[symbol] = f"x{i}"
        step = f"step{i}_{layout.axes - 1}"
        source = {1: f"pack{i}.x[i]", 0: f"same{i}", None: f"from{i}[i * {step}]"}[inner]
        kind = _type(symbol.dtype)
        yield f"    const {kind} x{i} = ({kind}){source};"
    for i, symbol in enumerate(numbers_used(program)):
        names[symbol] = f"number{i}"
    strong = [x for x in program.nodes if not x.weak and x.function is not None]
    for i, symbol in enumerate(strong):
        names[symbol] = f"v{i}"
        yield f"    const {_type(symbol.dtype)} v{i} = {_expression(symbol, names)};"
    for i, symbol in enumerate(program.outputs):
        kind = STORED[symbol.dtype.name]
        yield f"    result{i}.x[i] = ({kind}){names[symbol]};"
    yield "}"
    for i, _ in enumerate(program.outputs):
        at = f"out{i} + chunk * {layout.width}ull"
        yield f"*reinterpret_cast<decltype(result{i})*>({at}) = result{i};"


def _type(dtype):
    return STORED[computed(dtype).name]


def _expression(symbol, names):
    function, kind = symbol.function, _type(symbol.dtype)
    if function is CAST or function is ROUND:
        inner = _operand(symbol.inputs[0], kind, names)
        narrow = STORED[symbol.dtype.name]
        return f"({kind})({narrow}){inner}" if function is ROUND and narrow != kind else inner
    kinds = [kind] * len(symbol.inputs)
    if function in COMPARISONS or function in OF_FLOAT_TESTS:
        kinds = [_common(symbol.inputs)] * len(symbol.inputs)
    elif function in OF_BOOLS:
        kinds = ["bool"] * len(symbol.inputs)
    elif function is np.where:
        kinds[0] = "bool"
    given = [
        None if x is None else _operand(x, to, names)
        for x, to in zip(symbol.inputs, kinds, strict=True)
    ]
    letter = "" if kind == "double" or kinds[0] == "double" else "f"
    if function is np.clip:
        return _clip(*given, kind)
    if function is np.power and _is_half(symbol.inputs[1]) and kind in ("float", "double"):
        function, given = np.sqrt, given[:1]
    if function is np.power and (product := _product(given[0], symbol.inputs[1])):
        return f"({kind})({product})"
    if function is np.power and kind not in ("float", "double"):
        raise UnsupportedError("np.power of integers fuses for constant exponents from 0 to 8 only")
    if function in ROUNDINGS and kind not in ("float", "double"):
        return str(given[0])
    if function is np.invert and kind == "bool":
        return f"!{given[0]}"
    body = EXPRESSIONS[function].format(*given, f=letter).replace("(T)", f"({kind})")
    return f"({kind})({body})"


def _clip(x, low, high, kind):
    for limit, sign in ((low, "<"), (high, ">")):
        if limit is not None:
            x = f"({kind})({x} {sign} {limit} || {limit} != {limit} ? {limit} : {x})"
    return x


def _is_half(exponent):
    return not isinstance(exponent, Symbol) and exponent == 0.5


def _product(base, exponent):
    """Return a power with a constant exponent as a product, or None."""
    if isinstance(exponent, Symbol) or not 0 <= exponent <= MOST_FACTORS or exponent % 1:
        return None
    return " * ".join([base] * int(exponent)) or "1"


def _common(operands):
    """Return the C type in which operands are compared."""
    kinds: list[Any] = [
        (1.0 if x.dtype.kind == "f" else True) if isinstance(x, Symbol) and x.weak
        else computed(x.dtype) if isinstance(x, Symbol | np.generic) else x
        for x in operands
    ]  # fmt: skip
    return _type(np.result_type(*kinds))


def _operand(x, kind, names):
    """Return an operand as a value of the C type ``kind``."""
    if isinstance(x, Symbol):
        is_same = not x.weak and _type(x.dtype) == kind
        return names[x] if is_same else f"({kind}){names[x]}"
    return _literal(x, kind)


def _literal(value: Any, kind: str) -> str:
    if isinstance(value, bool | np.bool_):
        return f"({kind}){str(bool(value)).lower()}"
    if isinstance(value, int | np.integer):
        if value == -(1 << 63):
            return f"({kind})(-9223372036854775807ll - 1)"
        return f"({kind})({int(value)}{'ull' if value >= 1 << 63 else 'll'})"
    number = float(value)
    if math.isfinite(number):
        return f"({kind})({number.hex()})"
    bits = np.float64(number).view(np.uint64)
    return f"({kind})__builtin_bit_cast(double, 0x{bits:016x}ull)"
