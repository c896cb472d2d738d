"""What kernels/rows.py and kernels/row_attention.py are made of: numba functions, and where LLVM must be told, its code.

A tile is G query heads that share a KV head: its size is a type, the length of a tuple, so that G products are G registers.
"""

import math

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

F = np.float32
LOG2_E, LN_2 = F(1 / math.log(2)), F(math.log(2))
WIDTH = 16  # numbers of a register and of a cache line
I32, I64, REGISTER = ir.IntType(32), ir.IntType(64), ir.VectorType(ir.FloatType(), WIDTH)
inlined = numba.njit(fastmath=True, error_model="numpy", inline="always")


@inlined
def exp2(x):
    """2^x for |x| <= 126: the whole part as an exponent, the rest, within ln 2 / 2 of zero, by six terms of the series."""
    whole = np.floor(x + F(0.5))
    f = (x - whole) * LN_2
    series = F(1) + f * (F(1) + f * (F(1 / 2) + f * (F(1 / 6) + f * (F(1 / 24) + f * (F(1 / 120) + f * F(1 / 720))))))
    return series * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@inlined
def ordered(bits):
    """int32 bits of a float, turned so that integers compare as the floats do; its own inverse.

    A maximum of integers vectorises, one of floats does not: what of NaN and -0 is for LLVM to keep. 49,152 numbers: 3 us, not 27.
    """
    return np.int32(bits ^ (np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@intrinsic
def _address(_, address):
    def emit(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))
    return types.CPointer(types.float32)(types.int64), emit


@inlined
def floats(address, size):
    """The array of `size` at an address. For a call of some microseconds, handing over arrays would take as long again."""
    return numba.carray(_address(address), size)


def pointer(context, builder, kind, array, at, target):
    """To number `at` of the array; nothing is checked."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), target.as_pointer())


def register(context, builder, kind, array, at):
    return builder.load(pointer(context, builder, kind, array, at, REGISTER), align=4)


def multiply_add(builder, total, x, y):
    return builder.fadd(total, builder.fmul(x, y, flags=["contract"]), flags=["contract"])


def halved(builder, x, y, width, count):
    """Each `width` lanes of x, then y, as half as many: lower plus upper half. `count` lanes in all."""
    low = [start + lane for start in range(0, count, width) for lane in range(width // 2)]
    masks = [ir.Constant(ir.VectorType(I32, len(low)), [lane + up for lane in low]) for up in (0, width // 2)]
    return builder.fadd(*(builder.shuffle_vector(x, y, mask) for mask in masks))


@intrinsic
def prefetch(_, array, at):
    """Ask for a cache line, into the second level; an address that does not exist is harmless."""
    def emit(context, builder, signature, args):
        line = pointer(context, builder, signature.args[0], *args, ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [line.type, I32, I32, I32])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", (line.type,), kind), [line, I32(0), I32(2), I32(1)])
        return context.get_dummy_value()
    return types.void(array, types.int64), emit


@intrinsic
def score_four(_, tile, weights, at, gap, q, query, cache, key, step, D):
    """weights[at + g gap + j] = q_g . k_j for the tile's heads g, which lie D apart in q, and four keys j, `step` apart."""
    def emit(context, builder, signature, args):
        _, weights, at, gap, q, query, cache, key, step, D = args
        kinds, zero = signature.args, ir.Constant(REGISTER, None)
        heads = range(len(kinds[0]))
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(4)] for _ in heads]
        keys = [builder.add(key, builder.mul(step, I64(j))) for j in range(4)]
        queries = [builder.add(query, builder.mul(D, I64(g))) for g in heads]
        with cgutils.for_range_slice(builder, I64(0), D, I64(WIDTH), I64) as (e, _):
            k = [register(context, builder, kinds[6], cache, builder.add(at_key, e)) for at_key in keys]
            for g in heads:
                x = register(context, builder, kinds[4], q, builder.add(queries[g], e))
                for j in range(4):
                    builder.store(multiply_add(builder, builder.load(sums[g][j]), x, k[j]), sums[g][j])
        for g in heads:  # halved together: 11 operations instead of 4 times 8
            a, b, c, d = map(builder.load, sums[g])
            abcd = halved(builder, halved(builder, a, b, 16, 32), halved(builder, c, d, 16, 32), 8, 32)
            for width in (4, 2):
                abcd = halved(builder, abcd, abcd, width, 4 * width)
            place = builder.add(at, builder.mul(gap, I64(g)))
            builder.store(abcd, pointer(context, builder, kinds[1], weights, place, abcd.type), align=4)
        return context.get_dummy_value()
    return types.void(tile, weights, *[types.int64] * 2, q, types.int64, cache, *[types.int64] * 3), emit


@intrinsic
def mix_some(_, tile, some, o, out, weights, at, gap, cache, value, step, D):
    """o[out + g D:][:D] += sum_j weights[at + g gap + j] v_j for the tile's heads g and as many values j as `some` is long."""
    def emit(context, builder, signature, args):
        _, _, o, out, weights, at, gap, cache, value, step, D = args
        kinds, empty = signature.args, ir.Constant(REGISTER, ir.Undefined)
        heads, count = range(len(kinds[0])), range(len(kinds[1]))

        def spread(place):
            number = builder.load(pointer(context, builder, kinds[4], weights, place, ir.FloatType()))
            one = builder.insert_element(empty, number, I32(0))
            return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(I32, WIDTH), [0] * WIDTH))

        shares = [[spread(builder.add(at, builder.add(builder.mul(gap, I64(g)), I64(j)))) for j in count] for g in heads]
        values = [builder.add(value, builder.mul(step, I64(j))) for j in count]
        with cgutils.for_range_slice(builder, I64(0), D, I64(WIDTH), I64) as (e, _):
            v = [register(context, builder, kinds[7], cache, builder.add(at_value, e)) for at_value in values]
            for g in heads:
                place = pointer(context, builder, kinds[2], o, builder.add(out, builder.add(builder.mul(D, I64(g)), e)), REGISTER)
                x = builder.load(place, align=4)
                for j in count:
                    x = multiply_add(builder, x, shares[g][j], v[j])
                builder.store(x, place, align=4)
        return context.get_dummy_value()
    return types.void(tile, some, o, types.int64, weights, *[types.int64] * 2, cache, *[types.int64] * 3), emit
