"""Attention of a CPU engine's step over its pages, a row a thread at a time, by numba; rotation and the cache's writing included.

    o[t] = sum_j softmax_j(q[t] . k[j] / sqrt(D)) v[j]     j <= position(t), and j > position(t) - window if windowed
    q, k rotated:   y_i = x_i cos - x_{i+D/2} sin,   y_{i+D/2} = x_{i+D/2} cos + x_i sin

Letters: T rows, S of them attended, P threads, R cache slots, H query heads, K KV heads, D head dim (a multiple of 16).

A decode step's attention reads every key and value once and does 4 FLOP with each number, so on a CPU it is bound by how often the
cache is touched. torch has no paged attention there: gathering blocks for SDPA writes and reads them again, and pads a ragged batch
to its longest. Here each row walks its own pages, from a list of visits that all layers of a step share.

- Samples of one prompt begin with the same pages: such a family visits a page together, and finds it in the first-level cache.
- A tile of G query heads that share a KV head, and four keys: 4 + G loads for 4 G products of registers, where one head and one
  key would take two for one. LLVM, left to itself, puts checks and prologues around such loops that are longer than their 64
  products; hence operations that are written out, and tiles whose size is a type: G is the length of a tuple.
- The page after the next is fetched meanwhile, into the second-level cache: into the first, a core can have few lines underway.
- Threads get neighbouring rows of equal total context.
- Layers hand over addresses, and what a step shares as it is: preparing a dozen arrays took as long as three rows' attention.

The exponential is written out (relative error 2e-7): calls do not vectorise. Sums are reordered: not for exact mode. fp32 only.
"""

import functools
import math

import numba
import numpy as np
from llvmlite.binding import get_host_cpu_features
from torch import Tensor

from kernels.compiled import LOG2_E, WIDTH, F, exp2, floats, inlined, mix_some, ordered, prefetch, score_four

AHEAD = 2  # pages between a fetch and its use
FAMILY = 16  # rows that visit a shared page together, at most: their scores must fit into the second-level cache
TILE = 4 if get_host_cpu_features().get("avx512f") else 1  # heads at most: 16 sums, 4 keys and a query need 21 of 32 registers


@inlined
def _rotate(x, cos_D, sin_D):
    """All heads of one row, in place."""
    half = len(cos_D) // 2
    for at in range(0, len(x), 2 * half):
        lower, upper = x[at:at + half], x[at + half:at + 2 * half]
        for d in range(half):
            a, b = lower[d], upper[d]
            lower[d], upper[d] = a * cos_D[d] - b * sin_D[d], b * cos_D[d] + a * sin_D[d]


@inlined
def _softmax(row, scale):
    """In place; the scale is that of powers of two."""
    bits, highest, total = row.view(np.int32), np.int32(-(1 << 31)), F(0)
    for i in range(row.shape[0]):
        highest = max(highest, ordered(bits[i]))
    largest = ordered(highest).view(np.float32)
    for i in range(row.shape[0]):
        row[i] = exp2(max((row[i] - largest) * scale, F(-126)))
        total += row[i]
    for i in range(row.shape[0]):
        row[i] /= total


@inlined
def _score(tile, weights, at, gap, q, query, cache, key, step, count, D):
    """weights[at + g gap:][:count] = q_g . k of the tile's heads g, for `count` keys that lie `step` numbers apart."""
    last = at + count
    while at + 4 <= last:
        score_four(tile, weights, at, gap, q, query, cache, key, step, D)
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
        mix_some(tile, (0, 0, 0, 0), o, out, weights, at, gap, cache, value, step, D)
        at, value = at + 4, value + 4 * step
    while at < last:
        mix_some(tile, (0,), o, out, weights, at, gap, cache, value, step, D)
        at, value = at + 1, value + step


@functools.cache
def _tile(repeat: int) -> tuple[int, ...]:
    """As long as the largest tile that divides the query heads of a KV head."""
    return (0,) * max(size for size in range(1, TILE + 1) if repeat % size == 0)


@numba.njit(cache=True)
def visits(tables_NB, owners_S, positions_S, parts_P1, block_size, window):
    """Families [F + 1, 2]: first row, first visit. Visits [M, 5]: first row, last + 1, slot, key, keys. Each thread's families.

    Rows of a thread's part that begin with the same pages are a family: a shared page is visited once for all of them.
    """
    families, parts = np.empty((len(owners_S) + 1, 2), np.int64), np.zeros_like(parts_P1)
    found = np.empty((np.sum(positions_S // block_size + 1), 5), np.int64)
    F = M = 0
    for p in range(len(parts_P1) - 1):
        a = parts_P1[p]
        while a < parts_P1[p + 1]:
            b, shared, table = a + 1, 0, tables_NB[owners_S[a]]
            while b < min(parts_P1[p + 1], a + FAMILY) and not window:
                common, most = 0, (min(positions_S[a], positions_S[b]) + 1) // block_size
                while common < most and table[common] == tables_NB[owners_S[b], common]:
                    common += 1
                if common * (b - a) <= shared * (b - a - 1):
                    break  # the others would share less than is gained
                b, shared = b + 1, common if b == a + 1 else min(shared, common)
            families[F], F = (a, M), F + 1
            for n in range(shared):
                found[M], M = (a, b, np.int64(table[n]) * block_size, n * block_size, block_size), M + 1
            for s in range(a, b):
                stop = positions_S[s] + 1
                j = max(shared * block_size, stop - window if window else 0)
                while j < stop:
                    n, within = j // block_size, j % block_size
                    count = min(block_size - within, stop - j)
                    found[M], M = (s, s + 1, np.int64(tables_NB[owners_S[s], n]) * block_size + within, j, count), M + 1
                    j += count
            a = b
        parts[p + 1] = F
    families[F] = len(owners_S), M
    return families[:F + 1], found[:M], parts


@numba.njit(parallel=True, fastmath=True, error_model="numpy", cache=True)
def _attend(places, strides, sizes, tile, new, rows, walk, window):
    (T, H, K, D, slots), (slots_T, cos_TD, sin_TD), (rows_S, positions_S, block_size) = sizes, new, rows
    families_F2, visits_M5, parts_P1 = walk
    values, step, repeat, scale = slots * K * D, K * D, H // K, F(1 / math.sqrt(D)) * LOG2_E
    page, tiles = block_size * step, H // len(tile)
    q, k, v = floats(places[0], T * strides[0]), floats(places[1], T * strides[1]), floats(places[2], T * strides[2])
    cache, o = floats(places[3], 2 * values), floats(places[4], T * H * D)
    for t in numba.prange(len(slots_T)):  # rows behind are padding
        _rotate(q[t * strides[0]:t * strides[0] + H * D], cos_TD[t], sin_TD[t])
        key, slot = k[t * strides[1]:t * strides[1] + step], slots_T[t] * step
        _rotate(key, cos_TD[t], sin_TD[t])
        cache[slot:slot + step] = key
        cache[values + slot:values + slot + step] = v[t * strides[2]:t * strides[2] + step]
    for p in numba.prange(len(parts_P1) - 1):
        for f in range(parts_P1[p], parts_P1[p + 1]):
            (a, start), (b, end), longest = families_F2[f], families_F2[f + 1], 0
            for s in range(a, b):
                longest = max(longest, positions_S[s] + 1)
                o[rows_S[s] * H * D:(rows_S[s] + 1) * H * D] = 0
            weights = np.empty((b - a) * H * longest, np.float32)
            for half in (0, values):  # all keys, then all values, a page at a time
                for i in range(start, end):
                    first, last, slot, j, count = visits_M5[i]
                    at, next_i = half + slot * step, i + AHEAD
                    if half == 0 and next_i >= end:
                        ahead = values + visits_M5[min(start + next_i - end, end - 1), 2] * step
                    else:
                        ahead = half * (next_i < end) + visits_M5[min(next_i, len(visits_M5) - 1), 2] * step
                    share = -(-page // ((last - first) * tiles * WIDTH)) * WIDTH  # of a page's fetching, beside the work of a tile
                    for s in range(first, last):
                        for h in range(0, H, len(tile)):
                            for line in range(ahead, ahead + share, WIDTH):
                                prefetch(cache, line)
                            ahead += share
                            weight, head = ((s - a) * H + h) * longest + j, at + h // repeat * D
                            if half == 0:
                                query = rows_S[s] * strides[0] + h * D
                                _score(tile, weights, weight, longest, q, query, cache, head, step, count, D)
                            else:
                                _mix(tile, o, (rows_S[s] * H + h) * D, weights, weight, longest, cache, head, step, count, D)
                for s in range(a, b if half == 0 else a):
                    stop = positions_S[s] + 1
                    first = max(0, stop - window) if window else 0
                    for h in range(H):
                        row = ((s - a) * H + h) * longest
                        _softmax(weights[row + first:row + stop], scale)


def layout(new: tuple[Tensor, Tensor, Tensor], slots: int) -> tuple:
    """What `attend_rows` must know of q [T, H, D], k, v [T, K, D] and of a cache of so many slots: it is the same in all layers."""
    (T, H, D), K = new[0].shape, new[1].shape[1]
    return tuple(x.stride(0) for x in new), (T, H, K, D, slots), _tile(H // K)


def attend_rows(tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], layout: tuple, step: tuple, rows: tuple, walk: tuple,
                window: int) -> None:
    """`tensors` = (q, k, v, cache [2, R, K, D], o). Turns q and k in place, writes k and v into the cache, and attends into o.

    `step` = (slots, cos, sin) of the new rows, `rows` = (rows of q that attend, their positions, block_size), `walk` = `visits` of
    these. Rows of o that do not attend stay. fp32; q, k and v may be slices of one fused qkv.
    """
    _attend(tuple([x.data_ptr() for x in tensors]), *layout, step, rows, walk, window)
