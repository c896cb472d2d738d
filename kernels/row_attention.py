"""Attention of a CPU engine's step over its pages, a row a thread at a time, by numba; rotation and the cache's writing included.

    o[t] = sum_j softmax_j(q[t] . k[j] / sqrt(D)) v[j]     j <= position(t), and j > position(t) - window if windowed
    q, k rotated:   y_i = x_i cos - x_{i+D/2} sin,   y_{i+D/2} = x_{i+D/2} cos + x_i sin

Letters: T rows, S of them attended, P threads, R cache slots, H query heads, K KV heads, D head dim (a multiple of 16).

A decode step's attention reads every key and value once and does 4 FLOP with each number, so on a CPU it is bound by how often the
cache is touched. torch has no paged attention there: gathering blocks for SDPA writes and reads them again, and pads a ragged batch
to its longest. This loop walks each row's own pages.

- A tile of G query heads that share a KV head, and four keys: 4 + G loads for 4 G products of registers, where one head and one
  key would take two for one. LLVM, left to itself, puts checks and prologues around such loops that are longer than their 64
  products; hence `Lanes`, whose operations are written out, and tiles whose size is a type: G is the length of a tuple.
- The page after the next is fetched meanwhile, into the second-level cache: into the first, a core can have few lines underway.
  Both together save a fourth to a third of the time of 24 and of 256 rows.
- Threads get neighbouring rows of equal total context: those that share a prefix find it in the caches.

The exponential is written out (relative error 2e-7): calls do not vectorise. Sums are reordered: not for exact mode. fp32 only.
"""

import math

import numba
import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.extending import intrinsic
from torch import Tensor

F = np.float32
WIDTH, AHEAD = 16, 2  # numbers of a register and of a cache line; pages between a fetch and its use
LOG2_E, LN_2 = F(1 / math.log(2)), F(math.log(2))
I32, I64, REGISTER = ir.IntType(32), ir.IntType(64), ir.VectorType(ir.FloatType(), WIDTH)
TILE = 4 if get_host_cpu_features().get("avx512f") else 1  # heads at most: 16 sums, 4 keys and a query need 21 of 32 registers
inlined = numba.njit(fastmath=True, error_model="numpy", inline="always")


def _pointer(context, builder, kind, array, at, target):
    """To number `at` of the array; nothing is checked."""
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), target.as_pointer())


def _register(context, builder, kind, array, at):
    return builder.load(_pointer(context, builder, kind, array, at, REGISTER), align=4)


def _multiply_add(builder, total, x, y):
    return builder.fadd(total, builder.fmul(x, y, flags=["contract"]), flags=["contract"])


def _halved(builder, x, y, width, count):
    """Each `width` lanes of x, then y, as half as many: lower plus upper half. `count` lanes in all."""
    low = [start + lane for start in range(0, count, width) for lane in range(width // 2)]
    masks = [ir.Constant(ir.VectorType(I32, len(low)), [lane + up for lane in low]) for up in (0, width // 2)]
    return builder.fadd(*(builder.shuffle_vector(x, y, mask) for mask in masks))


@intrinsic
def _score_four(_, tile, weights, at, gap, q, query, cache, key, step, D):
    """weights[at + g gap + j] = q_g . k_j for the tile's heads g, which lie D apart in q, and four keys j, `step` apart."""
    def emit(context, builder, signature, args):
        _, weights, at, gap, q, query, cache, key, step, D = args
        kinds, zero = signature.args, ir.Constant(REGISTER, None)
        heads = range(len(kinds[0]))
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in range(4)] for _ in heads]
        keys = [builder.add(key, builder.mul(step, I64(j))) for j in range(4)]
        queries = [builder.add(query, builder.mul(D, I64(g))) for g in heads]
        with cgutils.for_range_slice(builder, I64(0), D, I64(WIDTH), I64) as (e, _):
            k = [_register(context, builder, kinds[6], cache, builder.add(at_key, e)) for at_key in keys]
            for g in heads:
                x = _register(context, builder, kinds[4], q, builder.add(queries[g], e))
                for j in range(4):
                    builder.store(_multiply_add(builder, builder.load(sums[g][j]), x, k[j]), sums[g][j])
        for g in heads:  # halved together: 11 operations instead of 4 times 8
            a, b, c, d = map(builder.load, sums[g])
            abcd = _halved(builder, _halved(builder, a, b, 16, 32), _halved(builder, c, d, 16, 32), 8, 32)
            for width in (4, 2):
                abcd = _halved(builder, abcd, abcd, width, 4 * width)
            place = builder.add(at, builder.mul(gap, I64(g)))
            builder.store(abcd, _pointer(context, builder, kinds[1], weights, place, abcd.type), align=4)
        return context.get_dummy_value()
    return types.void(tile, weights, *[types.int64] * 2, q, types.int64, cache, *[types.int64] * 3), emit


@intrinsic
def _mix_some(_, tile, some, o, out, weights, at, gap, cache, value, step, D):
    """o[out + g D:][:D] += sum_j weights[at + g gap + j] v_j for the tile's heads g and as many values j as `some` is long."""
    def emit(context, builder, signature, args):
        _, _, o, out, weights, at, gap, cache, value, step, D = args
        kinds, empty = signature.args, ir.Constant(REGISTER, ir.Undefined)
        heads, count = range(len(kinds[0])), range(len(kinds[1]))

        def spread(place):
            number = builder.load(_pointer(context, builder, kinds[4], weights, place, ir.FloatType()))
            one = builder.insert_element(empty, number, I32(0))
            return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(I32, WIDTH), [0] * WIDTH))

        shares = [[spread(builder.add(at, builder.add(builder.mul(gap, I64(g)), I64(j)))) for j in count] for g in heads]
        values = [builder.add(value, builder.mul(step, I64(j))) for j in count]
        with cgutils.for_range_slice(builder, I64(0), D, I64(WIDTH), I64) as (e, _):
            v = [_register(context, builder, kinds[7], cache, builder.add(at_value, e)) for at_value in values]
            for g in heads:
                place = _pointer(context, builder, kinds[2], o, builder.add(out, builder.add(builder.mul(D, I64(g)), e)), REGISTER)
                x = builder.load(place, align=4)
                for j in count:
                    x = _multiply_add(builder, x, shares[g][j], v[j])
                builder.store(x, place, align=4)
        return context.get_dummy_value()
    return types.void(tile, some, o, types.int64, weights, *[types.int64] * 2, cache, *[types.int64] * 3), emit


@intrinsic
def _prefetch(_, array, at):
    """Ask for a cache line, into the second level; an address that does not exist is harmless."""
    def emit(context, builder, signature, args):
        line = _pointer(context, builder, signature.args[0], *args, ir.IntType(8))
        kind = ir.FunctionType(ir.VoidType(), [line.type, I32, I32, I32])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", (line.type,), kind), [line, I32(0), I32(2), I32(1)])
        return context.get_dummy_value()
    return types.void(array, types.int64), emit


@inlined
def _exp2(x):
    """2^x for |x| <= 126, as in kernels/rows.py."""
    whole = np.floor(x + F(0.5))
    f = (x - whole) * LN_2
    series = F(1) + f * (F(1) + f * (F(1 / 2) + f * (F(1 / 6) + f * (F(1 / 24) + f * (F(1 / 120) + f * F(1 / 720))))))
    return series * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@inlined
def _rotate(x, cos_D, sin_D):
    """All heads of one row, in place."""
    half = len(cos_D) // 2
    for at in range(0, len(x), 2 * half):
        for d in range(half):
            a, b = x[at + d], x[at + half + d]
            x[at + d], x[at + half + d] = a * cos_D[d] - b * sin_D[d], b * cos_D[d] + a * sin_D[d]


@inlined
def _softmax(row, scale):
    """In place; the scale is that of powers of two."""
    largest, total = row[0], F(0)
    for i in range(row.shape[0]):
        largest = max(largest, row[i])
    for i in range(row.shape[0]):
        row[i] = _exp2(max((row[i] - largest) * scale, F(-126)))
        total += row[i]
    for i in range(row.shape[0]):
        row[i] /= total


@inlined
def _score(tile, weights, at, gap, q, query, cache, key, step, count, D):
    """weights[at + g gap:][:count] = q_g . k of the tile's heads g, for `count` keys that lie `step` numbers apart."""
    last = at + count
    while at + 4 <= last:
        _score_four(tile, weights, at, gap, q, query, cache, key, step, D)
        at, key = at + 4, key + 4 * step
    while at < last:
        for g in range(len(tile)):
            total = F(0)
            for e in range(D):
                total += q[query + g * D + e] * cache[key + e]
            weights[at + g * gap] = total
        at, key = at + 1, key + step


@inlined
def _mix(tile, o, out, weights, at, gap, cache, value, step, count, D):
    """o[out + g D:][:D] += the sum of `count` weighted values, for the tile's heads g."""
    last = at + count
    while at + 4 <= last:
        _mix_some(tile, (0, 0, 0, 0), o, out, weights, at, gap, cache, value, step, D)
        at, value = at + 4, value + 4 * step
    while at < last:
        _mix_some(tile, (0,), o, out, weights, at, gap, cache, value, step, D)
        at, value = at + 1, value + step


@numba.njit(parallel=True, fastmath=True, error_model="numpy", cache=True)
def _attend(q, k, v, strides, rotary, slots_T, cache, tile, sizes, pages, window, o):
    (H, K, D), (tables_NB, rows_S, owners_S, positions_S, parts_P1, block_size) = sizes, pages
    values, step, page, repeat, scale = len(cache) // 2, K * D, block_size * K * D, H // K, F(1 / math.sqrt(D)) * LOG2_E
    share = -(-page // (H * WIDTH)) * WIDTH  # of the fetching of a page, beside the work on a head
    for t in numba.prange(len(slots_T)):
        _rotate(q[t * strides[0]:t * strides[0] + H * D], rotary[0][t], rotary[1][t])
        key, slot = k[t * strides[1]:t * strides[1] + step], slots_T[t] * step
        _rotate(key, rotary[0][t], rotary[1][t])
        for i in range(step):
            cache[slot + i], cache[values + slot + i] = key[i], v[t * strides[2] + i]
    for p in numba.prange(len(parts_P1) - 1):
        for s in range(parts_P1[p], parts_P1[p + 1]):
            table, query, out, stop = tables_NB[owners_S[s]], rows_S[s] * strides[0], rows_S[s] * H * D, positions_S[s] + 1
            first = max(0, stop - window) if window else 0
            length, used = stop - first, (stop - 1) // block_size + 1
            weights = np.empty(H * length, np.float32)
            o[out:out + H * D] = 0
            for half in (0, values):  # all keys, then all values, a page at a time
                j = first
                while j < stop:
                    n, within = j // block_size, j % block_size
                    count, at = min(block_size - within, stop - j), half + (np.int64(table[n]) * block_size + within) * step
                    if n + AHEAD < used:
                        ahead = half + np.int64(table[n + AHEAD]) * page
                    elif half == 0:
                        ahead = values + np.int64(table[min(first // block_size + n + AHEAD - used, used - 1)]) * page
                    else:
                        next_row = owners_S[min(s + 1, len(rows_S) - 1)]
                        ahead = np.int64(tables_NB[next_row, min(n + AHEAD - used, tables_NB.shape[1] - 1)]) * page
                    for h in range(0, H, len(tile)):
                        for line in range(ahead + h * share, ahead + min(page, (h + len(tile)) * share), WIDTH):
                            _prefetch(cache, line)
                        weight, head = h * length + j - first, at + h // repeat * D
                        if half == 0:
                            _score(tile, weights, weight, length, q, query + h * D, cache, head, step, count, D)
                        else:
                            _mix(tile, o, out + h * D, weights, weight, length, cache, head, step, count, D)
                    j += count
                for h in range(H if half == 0 else 0):
                    _softmax(weights[h * length:(h + 1) * length], scale)


def attend_rows(new: tuple[Tensor, Tensor, Tensor], rotary: tuple[np.ndarray, np.ndarray], slots_T: np.ndarray, cache_2RKD: Tensor,
                pages: tuple, window: int) -> Tensor:
    """Turns q and k of `new` = (q, k, v) in place, writes k and v into the cache's `slots`, and attends.

    `pages` = (tables_NB, rows of q, their requests, their positions, where each thread's part of them begins and the last ends,
    block_size). Returns o [T, H, D], zeros in rows that are not among them. fp32; q, k and v may be slices of one fused qkv.
    """
    o_THD = (torch.empty if len(pages[1]) == len(new[0]) else torch.zeros)(new[0].shape)
    strides, sizes = tuple(x.stride(0) for x in new), (new[0].shape[1], *new[1].shape[1:])
    flat = (x.as_strided(((len(x) - 1) * x.stride(0) + x[0].numel(),), (1,)).numpy() for x in new)  # a slice's gaps included
    tile = (0,) * max(size for size in range(1, TILE + 1) if sizes[0] // sizes[1] % size == 0)
    _attend(*flat, strides, rotary, slots_T, cache_2RKD.view(-1).numpy(), tile, sizes, pages, window, o_THD.view(-1).numpy())
    return o_THD
