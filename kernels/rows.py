"""What a CPU engine does between its matrix products, a row a thread, by numba: rotation, attention over pages, norm, sampling.

    attention   o[t] = sum_j softmax_j(q[t] . k[j] / sqrt(D)) v[j]     j <= position(t), and j > position(t) - window if windowed
    norm        s = residual + x,  y = weight s / sqrt(mean(s^2) + eps)
    rotation    y_i = x_i cos - x_{i+D/2} sin,  y_{i+D/2} = x_{i+D/2} cos + x_i sin
    sampling    as kernels/sampling.py, without truncation

Letters: T rows, S of them attended, R cache slots, H query heads, K KV heads, D head dim, E hidden.

A decode step's attention reads every key and value once and does 4 FLOP with each number, so on a CPU it is bound by how often the
cache is touched. torch has no paged attention there: gathering blocks for SDPA writes and reads them again, and pads a ragged batch
to its longest. This loop walks each row's own pages, in a fourth to a tenth of that (32 rows, contexts of 100 and 250). Norm and
rotation in torch are seven passes over memory each; here one, in place where the old values are not read again.

Four keys at a time: a query is loaded once for four dot products, a row of o once for four values. The next page is prefetched
during work on this one (a fifth to a third of the time of 256 rows). The exponential is written out (relative error 2e-7): the C
library's is a call a number, and calls do not vectorise. Sums are reordered for vector units: not for exact mode. fp32 only.
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
LINE, CHUNK = 16, 256  # numbers of a cache line; probabilities summed in fp32 before the fp64 search
LOG2_E, LN_2 = F(1 / math.log(2)), F(math.log(2))
compiled = numba.njit(parallel=True, fastmath=True, error_model="numpy", cache=True)


@numba.njit(fastmath=True, error_model="numpy", inline="always")
def _exp2(x):
    """2^x for |x| <= 126: the whole part as an exponent, the rest, within ln 2 / 2 of zero, by six terms of the series."""
    whole = np.floor(x + F(0.5))
    f = (x - whole) * LN_2
    series = F(1) + f * (F(1) + f * (F(1 / 2) + f * (F(1 / 6) + f * (F(1 / 24) + f * (F(1 / 120) + f * F(1 / 720))))))
    return series * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


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
    for at in range(part * size // parts, (part + 1) * size // parts, LINE):
        _prefetch(array, np.int64(page) * size + at)


@numba.njit(fastmath=True, error_model="numpy")
def _rotate(x, cos_D, sin_D):
    """All heads of one row, in place."""
    half = len(cos_D) // 2
    for at in range(0, len(x), 2 * half):
        for d in range(half):
            a, b = x[at + d], x[at + half + d]
            x[at + d], x[at + half + d] = a * cos_D[d] - b * sin_D[d], b * cos_D[d] + a * sin_D[d]


@compiled
def _attend(q, k, v, strides, cos_TD, sin_TD, slots_T, keys_RKD, values_RKD, tables_NB, rows_S, owners_S, positions_S, block_size,
            window, o_THD):
    _, H, D = o_THD.shape
    K, S = keys_RKD.shape[1], len(rows_S)
    repeat, scale, page = H // K, F(1 / math.sqrt(D)) * LOG2_E, block_size * K * D
    for t in numba.prange(len(slots_T)):
        _rotate(q[t * strides[0]:t * strides[0] + H * D], cos_TD[t], sin_TD[t])
        key = k[t * strides[1]:t * strides[1] + K * D]
        _rotate(key, cos_TD[t], sin_TD[t])
        for i in range(K * D):
            keys_RKD[slots_T[t], i // D, i % D], values_RKD[slots_T[t], i // D, i % D] = key[i], v[t * strides[2] + i]
    for s in numba.prange(S):
        t, table, stop = rows_S[s], tables_NB[owners_S[s]], positions_S[s] + 1
        query = q[t * strides[0]:t * strides[0] + H * D]
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
                        x = query[h * D + e]
                        a += x * keys_RKD[slot + i, g, e]
                        b += x * keys_RKD[slot + i + 1, g, e]
                        c += x * keys_RKD[slot + i + 2, g, e]
                        d += x * keys_RKD[slot + i + 3, g, e]
                    row = weights[h, at + i:at + i + 4]
                    row[0], row[1], row[2], row[3] = a * scale, b * scale, c * scale, d * scale
                    i += 4
                while i < count:
                    a = F(0)
                    for e in range(D):
                        a += query[h * D + e] * keys_RKD[slot + i, g, e]
                    weights[h, at + i] = a * scale
                    i += 1
            j += count
        for h in range(H):
            row = weights[h]
            largest, total = row[0], F(0)
            for i in range(row.shape[0]):
                largest = max(largest, row[i])
            for i in range(row.shape[0]):
                row[i] = _exp2(max(row[i] - largest, F(-126)))
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


def attend_rows(new: tuple[Tensor, Tensor, Tensor], rotary: tuple[np.ndarray, np.ndarray], slots_T: np.ndarray,
                cache: tuple[Tensor, Tensor], pages: tuple, window: int) -> Tensor:
    """Turns q and k of `new` = (q, k, v) in place, writes k and v into the cache's `slots`, and attends.

    `pages` = (tables_NB, rows of q, their requests, their positions, block_size). Returns o [T, H, D], zeros in rows that are not
    among them. fp32; q, k and v may be slices of one fused qkv.
    """
    o_THD = (torch.empty if len(pages[1]) == len(new[0]) else torch.zeros)(new[0].shape)
    strides = tuple(each.stride(0) for each in new)
    _attend(*map(_flat, new), strides, *rotary, slots_T, cache[0].numpy(), cache[1].numpy(), *pages, window, o_THD.numpy())
    return o_THD


@compiled
def _norm(x_TE, residual_TE, weight_E, eps):
    T, E = x_TE.shape
    for t in numba.prange(T):
        total = F(0)
        for e in range(E):
            residual_TE[t, e] += x_TE[t, e]
            total += residual_TE[t, e] * residual_TE[t, e]
        scale = F(1) / np.sqrt(total / F(E) + eps)
        for e in range(E):
            x_TE[t, e] = weight_E[e] * (residual_TE[t, e] * scale)


def norm_rows(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of residual + x, residual + x), as kernels/rms_norm.py, written over x and residual; contiguous [T, E]."""
    _norm(x_TE.numpy(), residual_TE.numpy(), weight_E.numpy(), F(eps))
    return x_TE, residual_TE


@numba.njit(parallel=True, fastmath={"reassoc", "contract", "arcp"}, error_model="numpy", cache=True)  # NaN must be seen
def _draw(logits_RV, temperature_R, uniforms_R, tokens_R, logprobs_R):
    R, V = logits_RV.shape
    for r in numba.prange(R):
        row, largest, missing, token = logits_RV[r], F(-np.inf), False, -1
        for v in range(V):
            largest, missing = max(largest, row[v]), missing | (row[v] != row[v])
        if missing or not abs(largest) < F(np.inf):
            logprobs_R[r], tokens_R[r] = F(np.nan), 0
            continue
        draws, sums, total = temperature_R[r] > 0, np.zeros(-(-V // CHUNK), np.float32), 0.0
        scale = LOG2_E / (temperature_R[r] if draws else F(1))
        for c in range(len(sums)):
            part = F(0)
            for v in range(c * CHUNK, min(V, (c + 1) * CHUNK)):
                x = (row[v] - largest) * scale
                part += _exp2(max(x, F(-126))) if x > F(-126) else F(0)
            sums[c] = part
            total += part
        wanted, below, c = uniforms_R[r] * total, 0.0, 0
        while draws and below + sums[c] <= wanted:
            below, c = below + sums[c], c + 1
        v = c * CHUNK
        while draws and v < min(V, (c + 1) * CHUNK) and below <= wanted:
            if (row[v] - largest) * scale > F(-126):  # the chunk's last one stands if rounding leaves none
                token = v
                below += _exp2((row[v] - largest) * scale)
            v += 1
        while token < 0 or (row[token] < largest and not draws):
            token += 1
        tokens_R[r], logprobs_R[r] = token, min(0.0, (row[token] - largest) * scale * LN_2 - math.log(total))


def draw_rows(logits_RV: Tensor, temperature_R: Tensor, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels/sampling.py without truncation: a row stays in a core's cache while its largest, sum and token are found."""
    tokens_R, logprobs_R = torch.empty(len(logits_RV), dtype=torch.long), torch.empty(len(logits_RV))
    _draw(*(each.numpy() for each in (logits_RV, temperature_R, uniforms_R, tokens_R, logprobs_R)))
    return tokens_R, logprobs_R


def _flat(x: Tensor) -> np.ndarray:
    """One array from x's first number to its last: rows of a slice lie `x.stride(0)` apart."""
    return x.as_strided(((len(x) - 1) * x.stride(0) + x[0].numel(),), (1,)).numpy()
