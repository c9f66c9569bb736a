"""Rows of float32, float16 or bfloat16 in Numba kernels, 16 bytes at a time, as float32 numbers.

Numba has neither such loads nor bfloat16, so both are written in LLVM. Kernels take bfloat16 as its
bits, in arrays of uint16. ``x[row, column]`` has to be at a multiple of 16 bytes.
"""

import ml_dtypes
import numpy as np

from gpuattn.numbakernels.device import SIMULATED
from gpuattn.typing import Array


def numbers(x: Array) -> Array:
    """Return ``x`` as the array that kernels take: bfloat16 as its bits."""
    return x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x


if SIMULATED:
    exp2 = np.exp2

    def load(x, row, column):
        """Return the numbers in the 16 bytes at ``x[row, column]`` as a tuple of float32."""
        count = 16 // x.dtype.itemsize
        part = np.array([x[row, column + i] for i in range(count)], x.dtype)
        part = part.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else part
        return tuple(part.astype(np.float32))

    def store(x, row, column, values):
        """Write float32 numbers, rounded to nearest, to the 16 bytes at ``x[row, column]``."""
        dtype = ml_dtypes.bfloat16 if x.dtype == np.uint16 else x.dtype
        for i, value in enumerate(np.array(values, dtype).view(x.dtype)):
            x[row, column + i] = value

    def fetch(x, row, column, words, start):
        """Copy 16 bytes to four uint32 from ``words[start]`` on, without converting them."""
        count = 16 // x.dtype.itemsize
        part = np.array([x[row, column + i] for i in range(count)], x.dtype)
        words[start : start + 4] = part.view(np.uint32)

    def floats(x, words, start):
        """Return the numbers that ``fetch`` copied, as a tuple of float32."""
        part = words[start : start + 4].view(x.dtype)
        part = part.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else part
        return tuple(part.astype(np.float32))

    def gather(x, values, start):
        """Return what ``store`` writes to 16 bytes of ``x``: a part of an array of float32."""
        return tuple(values[start : start + 16 // x.dtype.itemsize])

else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    FLOAT, HALF_WORD, WORD, LONG = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
    WORDS = ir.VectorType(WORD, 4)
    PACK = {
        types.uint16: "cvt.rn.bf16x2.f32",  # type: ignore[attr-defined]
        types.float16: "cvt.rn.f16x2.f32",  # type: ignore[attr-defined]
    }

    def _place(context, builder, signature, arguments):
        """Return the address of the 16 bytes at ``x[row, column]``."""
        kind = signature.args[0]
        array = context.make_array(kind)(context, builder, arguments[0])
        strides = [builder.extract_value(array.strides, 0), LONG(kind.dtype.bitwidth // 8)]
        place = builder.ptrtoint(array.data, LONG)
        for index, type_, stride in zip(arguments[1:3], signature.args[1:3], strides, strict=True):
            index = context.cast(builder, index, type_, types.int64)
            place = builder.add(place, builder.mul(index, stride))
        return builder.inttoptr(place, WORDS.as_pointer(addrspace=1))

    def _two_floats(builder, kind, word):
        if kind == types.uint16:
            low = builder.shl(word, WORD(16))
            high = builder.and_(word, WORD(0xFFFF0000))
            return [builder.bitcast(part, FLOAT) for part in (low, high)]
        halves = [word, builder.lshr(word, WORD(16))]
        widen = ir.InlineAsm(ir.FunctionType(FLOAT, [HALF_WORD]), "cvt.f32.f16 $0, $1;", "=f,h")
        return [builder.call(widen, [builder.trunc(half, HALF_WORD)]) for half in halves]

    def _floats(builder, kind, words):
        if kind == types.float32:
            return [builder.bitcast(word, FLOAT) for word in words]
        return [value for word in words for value in _two_floats(builder, kind, word)]

    def _elements(context, builder, kind, array, start_type, start, count):
        """Return the addresses of ``count`` elements of a one-dimensional array."""
        data = context.make_array(kind)(context, builder, array).data
        first = builder.gep(data, [context.cast(builder, start, start_type, types.intp)])
        return [builder.gep(first, [LONG(i)]) for i in range(count)]

    @intrinsic
    def load(typing, x, row, column):
        """Return the numbers in the 16 bytes at ``x[row, column]`` as a tuple of float32."""

        def generate(context, builder, signature, arguments):
            vector = builder.load(_place(context, builder, signature, arguments), align=16)
            words = [builder.extract_element(vector, WORD(i)) for i in range(4)]
            values = _floats(builder, x.dtype, words)
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(types.float32, 128 // x.dtype.bitwidth)(x, row, column), generate

    @intrinsic
    def fetch(typing, x, row, column, words, start):
        """Copy 16 bytes to four uint32 from ``words[start]`` on, without converting them."""

        def generate(context, builder, signature, arguments):
            vector = builder.load(_place(context, builder, signature, arguments), align=16)
            places = _elements(context, builder, words, arguments[3], start, arguments[4], 4)
            for i, place in enumerate(places):
                builder.store(builder.extract_element(vector, WORD(i)), place)
            return context.get_dummy_value()

        return types.void(x, row, column, words, start), generate

    @intrinsic
    def floats(typing, x, words, start):
        """Return the numbers that ``fetch`` copied, as a tuple of float32."""

        def generate(context, builder, signature, arguments):
            places = _elements(context, builder, words, arguments[1], start, arguments[2], 4)
            values = _floats(builder, x.dtype, [builder.load(place) for place in places])
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(types.float32, 128 // x.dtype.bitwidth)(x, words, start), generate

    @intrinsic
    def store(typing, x, row, column, values):
        """Write float32 numbers, rounded to nearest, to the 16 bytes at ``x[row, column]``."""

        def generate(context, builder, signature, arguments):
            count = 128 // x.dtype.bitwidth
            parts = [builder.extract_value(arguments[3], i) for i in range(count)]
            if x.dtype == types.float32:
                words = [builder.bitcast(part, WORD) for part in parts]
            else:
                kind = ir.FunctionType(WORD, [FLOAT, FLOAT])
                pack = ir.InlineAsm(kind, f"{PACK[x.dtype]} $0, $1, $2;", "=r,f,f")
                words = [builder.call(pack, parts[i : i + 2][::-1]) for i in range(0, count, 2)]
            vector = ir.Constant(WORDS, ir.Undefined)
            for i, word in enumerate(words):
                vector = builder.insert_element(vector, word, WORD(i))
            builder.store(vector, _place(context, builder, signature, arguments), align=16)
            return context.get_dummy_value()

        return types.void(x, row, column, values), generate

    @intrinsic
    def exp2(typing, x):
        """Return 2**x by the hardware instruction, within two roundings."""

        def generate(context, builder, signature, arguments):
            kind = ir.FunctionType(FLOAT, [FLOAT])
            return builder.call(ir.InlineAsm(kind, "ex2.approx.ftz.f32 $0, $1;", "=f,f"), arguments)

        return types.float32(types.float32), generate

    @intrinsic
    def gather(typing, x, values, start):
        """Return what ``store`` writes to 16 bytes of ``x``: a part of an array of float32."""

        def generate(context, builder, signature, arguments):
            count = len(signature.return_type)
            places = _elements(context, builder, values, arguments[1], start, arguments[2], count)
            parts = [builder.load(place) for place in places]
            return context.make_tuple(builder, signature.return_type, parts)

        return types.UniTuple(types.float32, 128 // x.dtype.bitwidth)(x, values, start), generate
