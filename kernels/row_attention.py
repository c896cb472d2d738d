"""Attention of a CPU engine's step over its pages, a row a thread at a time, by numba; rotation and the cache's writing included.

    o[t] = sum_j softmax_j(q[t] . k[j] / sqrt(D)) v[j]     j <= position(t), and j > position(t) - window if windowed
    q, k rotated:   y_i = x_i cos - x_{i+D/2} sin,   y_{i+D/2} = x_{i+D/2} cos + x_i sin

Letters: T rows, S of them attended, P threads, R cache slots, H query heads, K KV heads, D head dim (a multiple of 16).

A decode step's attention reads every key and value once and does 4 FLOP with each number, so on a CPU it is bound by how often the
cache is touched. torch has no paged attention there: gathering blocks for SDPA writes and reads them again, and pads a ragged batch
to its longest. This loop walks each row's own pages.

- Four keys at a time: a query is loaded once for four dot products, a row of o once for four values. LLVM, left to itself, puts
  checks and prologues around such loops that are longer than their 64 products; hence `Lanes`, whose operations are written out.
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
from numba.core import types
from numba.extending import intrinsic, models, register_model
from torch import Tensor

F = np.float32
WIDTH, AHEAD = 16, 2  # numbers of a register and of a cache line; pages between a fetch and its use
LOG2_E, LN_2 = F(1 / math.log(2)), F(math.log(2))
I32, REGISTER = ir.IntType(32), ir.VectorType(ir.FloatType(), WIDTH)
inlined = numba.njit(fastmath=True, error_model="numpy", inline="always")


class Lanes(types.Type):
    """WIDTH fp32 numbers in a register."""


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, REGISTER)


lanes = Lanes("lanes")


def _address(context, builder, signature, args, kind):
    """Of number args[1] of the array args[0]; nothing is checked."""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), kind.as_pointer())


@intrinsic
def _load(_, array, at):
    def emit(*call):
        return call[1].load(_address(*call, REGISTER), align=4)
    return lanes(array, types.int64), emit


@intrinsic
def _store(_, array, at, x):
    def emit(context, builder, signature, args):
        builder.store(args[2], _address(context, builder, signature, args, REGISTER), align=4)
        return context.get_dummy_value()
    return types.void(array, types.int64, lanes), emit


@intrinsic
def _spread(_, array, at):
    """array[at] in every lane."""
    def emit(*call):
        builder, empty = call[1], ir.Constant(REGISTER, ir.Undefined)
        one = builder.insert_element(empty, builder.load(_address(*call, ir.FloatType())), I32(0))
        return builder.shuffle_vector(one, empty, ir.Constant(ir.VectorType(I32, WIDTH), [0] * WIDTH))
    return lanes(array, types.int64), emit


@intrinsic
def _zeros(_):
    return lanes(), lambda *call: ir.Constant(REGISTER, None)


@intrinsic
def _add(_, total, x, y):
    """total + x y"""
    def emit(context, builder, signature, args):
        return builder.fadd(args[0], builder.fmul(args[1], args[2], flags=["contract"]), flags=["contract"])
    return lanes(lanes, lanes, lanes), emit


@intrinsic
def _store_sums(_, array, at, a, b, c, d):
    """array[at:at + 4] = the sums over the lanes of a, b, c, d, halved together: 11 operations instead of 4 times 8."""
    def emit(context, builder, signature, args):
        def halved(x, y, width, count):
            """Each `width` lanes of x, then y, as half as many: lower plus upper half. `count` lanes in all."""
            low = [start + lane for start in range(0, count, width) for lane in range(width // 2)]
            masks = [ir.Constant(ir.VectorType(I32, len(low)), [lane + up for lane in low]) for up in (0, width // 2)]
            return builder.fadd(*(builder.shuffle_vector(x, y, mask) for mask in masks))
        a, b, c, d = args[2:]
        abcd = halved(halved(a, b, 16, 32), halved(c, d, 16, 32), 8, 32)
        for width in (4, 2):
            abcd = halved(abcd, abcd, width, 4 * width)
        builder.store(abcd, _address(context, builder, signature, args, abcd.type), align=4)
        return context.get_dummy_value()
    return types.void(array, types.int64, lanes, lanes, lanes, lanes), emit


@intrinsic
def _prefetch(_, array, at):
    """Ask for a cache line, into the second level; an address that does not exist is harmless."""
    def emit(context, builder, signature, args):
        line = _address(context, builder, signature, args, ir.IntType(8))
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
def _score(weights, at, q, query, cache, key, step, count, D):
    """weights[at:at + count] = q . k of one head, for `count` keys that lie `step` numbers apart."""
    last = at + count
    while at + 4 <= last:
        a, b, c, d = _zeros(), _zeros(), _zeros(), _zeros()
        for e in range(0, D, WIDTH):
            x = _load(q, query + e)
            a = _add(a, x, _load(cache, key + e))
            b = _add(b, x, _load(cache, key + step + e))
            c = _add(c, x, _load(cache, key + 2 * step + e))
            d = _add(d, x, _load(cache, key + 3 * step + e))
        _store_sums(weights, at, a, b, c, d)
        at, key = at + 4, key + 4 * step
    while at < last:
        total = F(0)
        for e in range(D):
            total += q[query + e] * cache[key + e]
        weights[at] = total
        at, key = at + 1, key + step


@inlined
def _mix(o, out, weights, at, cache, value, step, count, D):
    """o[out:out + D] += the sum of `count` weighted values of one head."""
    last = at + count
    while at + 4 <= last:
        a, b, c, d = _spread(weights, at), _spread(weights, at + 1), _spread(weights, at + 2), _spread(weights, at + 3)
        for e in range(0, D, WIDTH):
            x = _add(_load(o, out + e), a, _load(cache, value + e))
            x = _add(x, b, _load(cache, value + step + e))
            x = _add(x, c, _load(cache, value + 2 * step + e))
            _store(o, out + e, _add(x, d, _load(cache, value + 3 * step + e)))
        at, value = at + 4, value + 4 * step
    while at < last:
        a = _spread(weights, at)
        for e in range(0, D, WIDTH):
            _store(o, out + e, _add(_load(o, out + e), a, _load(cache, value + e)))
        at, value = at + 1, value + step


@numba.njit(parallel=True, fastmath=True, error_model="numpy", cache=True)
def _attend(q, k, v, strides, rotary, slots_T, cache, sizes, pages, window, o):
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
                    for h in range(H):
                        for line in range(ahead + h * share, ahead + min(page, (h + 1) * share), WIDTH):
                            _prefetch(cache, line)
                        if half == 0:
                            _score(weights, h * length + j - first, q, query + h * D, cache, at + h // repeat * D, step, count, D)
                        else:
                            _mix(o, out + h * D, weights, h * length + j - first, cache, at + h // repeat * D, step, count, D)
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
    _attend(*flat, strides, rotary, slots_T, cache_2RKD.view(-1).numpy(), sizes, pages, window, o_THD.view(-1).numpy())
    return o_THD
