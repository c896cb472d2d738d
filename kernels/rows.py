"""What a CPU engine does between its products and its attention (kernels/row_attention.py), a row a thread, by numba.

    norm        s = residual + x,  y = weight s / sqrt(mean(s^2) + eps)
    SiLU        y = gate / (1 + exp(-gate)) up
    sampling    as kernels/sampling.py, without truncation

Letters: T rows, E hidden, F ffn, R sampled rows, V vocabulary.

A norm in torch is seven passes over memory; here one, in place where the old values are not read again. A few rows are done before
a second thread is there: norms of up to SMALL numbers stay with the first (32 rows of SmolLM2: 3.2 us instead of 4.7). The
exponential is written out (relative error 2e-7): the C library's is a call a number, and calls do not vectorise. Sums are reordered
for vector units: not for exact mode. fp32 only.
"""

import math

import numba
import numpy as np
import torch
from torch import Tensor

F = np.float32
SMALL = 20_000
CHUNK = 256  # probabilities summed in fp32 before the fp64 search
LOG2_E, LN_2 = F(1 / math.log(2)), F(math.log(2))
compiled = numba.njit(parallel=True, fastmath=True, error_model="numpy", cache=True)


@numba.njit(fastmath=True, error_model="numpy", inline="always")
def _exp2(x):
    """2^x for |x| <= 126: the whole part as an exponent, the rest, within ln 2 / 2 of zero, by six terms of the series."""
    whole = np.floor(x + F(0.5))
    f = (x - whole) * LN_2
    series = F(1) + f * (F(1) + f * (F(1 / 2) + f * (F(1 / 6) + f * (F(1 / 24) + f * (F(1 / 120) + f * F(1 / 720))))))
    return series * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


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


_norm_alone = numba.njit(fastmath=True, error_model="numpy", cache=True)(_norm.py_func)


def norm_rows(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of residual + x, residual + x), as kernels/rms_norm.py, written over x and residual; contiguous [T, E]."""
    (_norm_alone if x_TE.numel() <= SMALL else _norm)(x_TE.numpy(), residual_TE.numpy(), weight_E.numpy(), F(eps))
    return x_TE, residual_TE


@compiled
def _silu(gate, up, strides, y_TF):
    for t in numba.prange(y_TF.shape[0]):
        for f in range(y_TF.shape[1]):
            x = gate[t * strides[0] + f]
            y_TF[t, f] = x / (F(1) + _exp2(min(max(-x * LOG2_E, F(-126)), F(126)))) * up[t * strides[1] + f]


def silu_rows(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) up, as kernels/silu_mul.py; both may be halves of one fused [T, 2F]."""
    y_TF, parts = torch.empty(gate_TF.shape), (gate_TF, up_TF)
    flat = (x.as_strided(((len(x) - 1) * x.stride(0) + x.shape[1],), (1,)).numpy() for x in parts)
    _silu(*flat, (gate_TF.stride(0), up_TF.stride(0)), y_TF.numpy())
    return y_TF


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
