"""What a CPU engine does between its matrix products, a row a thread, compiled by numba: attention over pages, norm, rotation.

    attention   o[t] = sum_j softmax_j(q[t] . k[j] / sqrt(D)) v[j]     j <= position(t), and j > position(t) - window if windowed
    norm        s = residual + x,  y = weight s / sqrt(mean(s^2) + eps)
    rotation    y_i = x_i cos - x_{i+D/2} sin,  y_{i+D/2} = x_{i+D/2} cos + x_i sin

Letters: T rows, S of them attended, R cache slots, H query heads, K KV heads, D head dim, E hidden.

A decode step's attention reads every key and value once and does 4 FLOP with each number, so on a CPU it is bound by how often the
cache is touched. torch has no paged attention there: gathering a request's blocks into a rectangle for SDPA writes and reads them
again, and pads a batch as ragged as a rollout to its longest. This loop walks each row's own pages in place, and took a fourth to a
tenth of gather + SDPA (32 rows, contexts of 100 and 250, 9 query and 3 KV heads of 64). Norm and rotation in torch are seven passes
over memory each, and as many waits for all threads; here they are one.

Four keys at a time: a query is loaded once for four dot products, a row of o once for four values. The next page is prefetched
during work on this one, since pages lie anywhere (a fifth to a third of the time of 256 rows). The exponential is written out,
2^n times a polynomial (relative error 2e-7): the C library's is a call a number, and calls do not vectorise. Sums are reordered for
vector units: not for exact mode. fp32 only.
"""

import math

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

F = np.float32
LINE = 16  # numbers of a cache line
LOG2_E, LN_2 = F(1 / math.log(2)), F(math.log(2))
compiled = numba.njit(parallel=True, fastmath=True, error_model="numpy", cache=True)


def use_threads(count: int) -> None:
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))


@intrinsic
def _prefetch(_, array, index):
    """Ask for the cache line of `array`'s number `index`, counted in memory's order; past the end is harmless."""
    def emit(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        line, i32 = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer()), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [line.type, i32, i32, i32])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", (line.type,), kind), [line, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()
    return types.void(array, types.int64), emit


@numba.njit(error_model="numpy")
def _fetch(array, page, size, part, parts):
    """One of `parts` shares of a page, spread over the work on the page before it."""
    share = -(-size // (LINE * parts)) * LINE
    for at in range(part * share, min((part + 1) * share, size), LINE):
        _prefetch(array, np.int64(page) * size + at)


@compiled
def _attend(q_THD, k_TKD, v_flat, v_stride, slots_T, keys_RKD, values_RKD, tables_NB, rows_S, owners_S, positions_S, block_size,
            window, o_THD):
    _, H, D = q_THD.shape
    K, S = keys_RKD.shape[1], len(rows_S)
    repeat, scale, page = H // K, F(1 / math.sqrt(D)) * LOG2_E, block_size * K * D
    for t in numba.prange(len(slots_T)):
        slot = slots_T[t]
        for g in range(K):
            for e in range(D):
                keys_RKD[slot, g, e] = k_TKD[t, g, e]
                values_RKD[slot, g, e] = v_flat[t * v_stride + g * D + e]
    for s in numba.prange(S):
        t, table, stop = rows_S[s], tables_NB[owners_S[s]], positions_S[s] + 1
        first = max(0, stop - window) if window else 0
        weights = np.empty((H, stop - first), np.float32)
        j = first
        while j < stop:  # a page at a time
            slot, count = np.int64(table[j // block_size]) * block_size + j % block_size, min(block_size - j % block_size, stop - j)
            for h in range(H):
                g, i, at = h // repeat, 0, j - first
                if j + count < stop:
                    _fetch(keys_RKD, table[(j + count) // block_size], page, h, H)
                else:
                    _fetch(values_RKD, table[first // block_size], page, h, H)
                while i + 4 <= count:
                    a, b, c, d = F(0), F(0), F(0), F(0)
                    for e in range(D):
                        x = q_THD[t, h, e]
                        a += x * keys_RKD[slot + i, g, e]
                        b += x * keys_RKD[slot + i + 1, g, e]
                        c += x * keys_RKD[slot + i + 2, g, e]
                        d += x * keys_RKD[slot + i + 3, g, e]
                    weights[h, at + i], weights[h, at + i + 1] = a * scale, b * scale
                    weights[h, at + i + 2], weights[h, at + i + 3] = c * scale, d * scale
                    i += 4
                while i < count:
                    a = F(0)
                    for e in range(D):
                        a += q_THD[t, h, e] * keys_RKD[slot + i, g, e]
                    weights[h, at + i] = a * scale
                    i += 1
            j += count
        for h in range(H):
            row = weights[h]
            largest, total = row[0], F(0)
            for i in range(row.shape[0]):
                largest = max(largest, row[i])
            for i in range(row.shape[0]):
                x = max(row[i] - largest, F(-126))
                whole = np.floor(x + F(0.5))
                f = (x - whole) * LN_2  # within ln 2 / 2 of zero, where six terms of the series reach fp32
                series = F(1) + f * (F(1) + f * (F(1 / 2) + f * (F(1 / 6) + f * (F(1 / 24) + f * (F(1 / 120) + f * F(1 / 720))))))
                row[i] = series * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
                total += row[i]
            for i in range(row.shape[0]):
                row[i] /= total
            o_THD[t, h] = 0
        j = first
        while j < stop:
            slot, count = np.int64(table[j // block_size]) * block_size + j % block_size, min(block_size - j % block_size, stop - j)
            for h in range(H):
                g, i, at = h // repeat, 0, j - first
                if j + count < stop:
                    _fetch(values_RKD, table[(j + count) // block_size], page, h, H)
                elif s + 1 < S and not window:
                    _fetch(keys_RKD, tables_NB[owners_S[s + 1], 0], page, h, H)
                while i + 4 <= count:
                    a, b, c, d = weights[h, at + i], weights[h, at + i + 1], weights[h, at + i + 2], weights[h, at + i + 3]
                    for e in range(D):
                        o_THD[t, h, e] += ((a * values_RKD[slot + i, g, e] + b * values_RKD[slot + i + 1, g, e])
                                           + (c * values_RKD[slot + i + 2, g, e] + d * values_RKD[slot + i + 3, g, e]))
                    i += 4
                while i < count:
                    a = weights[h, at + i]
                    for e in range(D):
                        o_THD[t, h, e] += a * values_RKD[slot + i, g, e]
                    i += 1
            j += count


def attend_rows(new: tuple[Tensor, Tensor, Tensor], slots_T: np.ndarray, cache: tuple[Tensor, Tensor], tables_NB: np.ndarray,
                rows: tuple[np.ndarray, np.ndarray, np.ndarray], block_size: int, window: int) -> Tensor:
    """Writes the new keys and values (q, k, v) into the cache's `slots`, then attends for `rows` = (row of q, request, position).

    Returns o [T, H, D], zeros in other rows. fp32; v may be a slice of a fused qkv, the others are contiguous.
    """
    q_THD, k_TKD, v_TKD = new
    o_THD = torch.empty_like(q_THD) if len(rows[0]) == len(q_THD) else torch.zeros_like(q_THD)
    flat = v_TKD.as_strided(((len(v_TKD) - 1) * v_TKD.stride(0) + v_TKD[0].numel(),), (1,))
    _attend(q_THD.numpy(), k_TKD.numpy(), flat.numpy(), v_TKD.stride(0), slots_T, cache[0].numpy(), cache[1].numpy(), tables_NB,
            *rows, block_size, window, o_THD.numpy())
    return o_THD


@compiled
def _norm(x_TE, residual_TE, weight_E, eps, y_TE, sum_TE):
    T, E = x_TE.shape
    for t in numba.prange(T):
        total = F(0)
        for e in range(E):
            s = residual_TE[t, e] + x_TE[t, e]
            sum_TE[t, e] = s
            total += s * s
        scale = F(1) / np.sqrt(total / F(E) + eps)
        for e in range(E):
            y_TE[t, e] = weight_E[e] * (sum_TE[t, e] * scale)


def norm_rows(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of residual + x, residual + x), as kernels/rms_norm.py; contiguous [T, E]."""
    y_TE, sum_TE = torch.empty_like(x_TE), torch.empty_like(x_TE)
    _norm(x_TE.numpy(), residual_TE.numpy(), weight_E.numpy(), F(eps), y_TE.numpy(), sum_TE.numpy())
    return y_TE, sum_TE


@compiled
def _rotate(x, stride, cos_TD, sin_TD, y_THD):
    T, H, D = y_THD.shape
    half = D // 2
    for t in numba.prange(T):
        for h in range(H):
            at = t * stride + h * D
            for d in range(half):
                a, b, c, s = x[at + d], x[at + half + d], cos_TD[t, d], sin_TD[t, d]
                y_THD[t, h, d] = a * c - b * s
                y_THD[t, h, half + d] = b * c + a * s


def rope_rows(x_THD: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
    """As kernels/rope.py; x may be a slice of a fused qkv, so it is read as one flat array with a stride."""
    T, H, D = x_THD.shape
    y_THD = torch.empty(T, H, D)
    flat = x_THD.as_strided(((T - 1) * x_THD.stride(0) + H * D,), (1,))
    _rotate(flat.numpy(), x_THD.stride(0), cos_T1D.view(T, D).numpy(), sin_T1D.view(T, D).numpy(), y_THD.numpy())
    return y_THD
