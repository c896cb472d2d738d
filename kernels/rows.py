"""What a CPU engine does between its products and its attention (kernels/row_attention.py), a row a thread, by numba.

    norm        s = residual + x,  y = weight s / sqrt(mean(s^2) + eps)
    SiLU        y = gate / (1 + exp(-gate)) up
    sampling    as kernels/sampling.py, without truncation

Letters: T rows, E hidden, F ffn, R sampled rows, V vocabulary.

A norm in torch is seven passes over memory; here one, in place where the old values are not read again. A few rows are done before
a second thread is there: norms of up to SMALL numbers stay with the first (32 rows of SmolLM2: 3.2 us instead of 4.7). The
exponential is written out (relative error 2e-7): the C library's is a call a number, and calls do not vectorise. Nor do loops that
index from the middle of an array (numba checks each index's sign) or look for the largest float (of which some may be NaN): hence
slices of rows, and floats compared as integers. SiLU then takes 19 cycles for 16 numbers instead of 75. Sums are reordered for
vector units: not for exact mode. fp32 only.
"""

import math

import numba
import numpy as np
import torch
from torch import Tensor

from kernels.compiled import LN_2, LOG2_E, F, exp2, floats, ordered

SMALL = 20_000
CHUNK = 256  # probabilities summed in fp32 before the fp64 search
compiled = numba.njit(parallel=True, fastmath=True, error_model="numpy", cache=True)


@compiled
def _norm(x_at, residual_at, weight_at, size, eps):
    T, E = size
    x_TE, residual_TE, weight_E = floats(x_at, size), floats(residual_at, size), floats(weight_at, E)
    for t in numba.prange(T):
        x, residual, total = x_TE[t], residual_TE[t], F(0)
        for e in range(E):
            residual[e] += x[e]
            total += residual[e] * residual[e]
        scale = F(1) / np.sqrt(total / F(E) + F(eps))
        for e in range(E):
            x[e] = weight_E[e] * (residual[e] * scale)


_norm_alone = numba.njit(fastmath=True, error_model="numpy", cache=True)(_norm.py_func)


def norm_rows(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor) -> tuple[Tensor, Tensor]:
    """(norm of residual + x, residual + x), as kernels/rms_norm.py, written over x and residual; contiguous [T, E]."""
    compute = _norm_alone if x_TE.numel() <= SMALL else _norm
    compute(x_TE.data_ptr(), residual_TE.data_ptr(), weight_E.data_ptr(), tuple(x_TE.shape), eps)
    return x_TE, residual_TE


@compiled
def _silu(gate_at, up_at, strides, y_at, size):
    T, width = size
    y_TF = floats(y_at, size)
    for t in numba.prange(T):
        gate, up, y = floats(gate_at + 4 * t * strides[0], width), floats(up_at + 4 * t * strides[1], width), y_TF[t]
        for f in range(width):
            y[f] = gate[f] / (F(1) + exp2(min(max(-gate[f] * LOG2_E, F(-126)), F(126)))) * up[f]


def silu_rows(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """silu(gate) up, as kernels/silu_mul.py; both may be halves of one fused [T, 2F]."""
    y_TF, strides = torch.empty(gate_TF.shape), (gate_TF.stride(0), up_TF.stride(0))
    _silu(gate_TF.data_ptr(), up_TF.data_ptr(), strides, y_TF.data_ptr(), tuple(gate_TF.shape))
    return y_TF


@numba.njit(parallel=True, fastmath={"reassoc", "contract", "arcp"}, error_model="numpy", cache=True)  # NaN must be seen
def _draw(logits_RV, temperature_R, uniforms_R, tokens_R, logprobs_R):
    R, V = logits_RV.shape
    for r in numba.prange(R):
        row, bits, highest, widest, token = logits_RV[r], logits_RV[r].view(np.int32), np.int32(-(1 << 31)), np.int32(0), -1
        for v in range(V):
            highest, widest = max(highest, ordered(bits[v])), max(widest, np.int32(bits[v] & np.int32(0x7FFFFFFF)))
        largest = ordered(highest).view(np.float32)
        if widest > np.int32(0x7F800000) or not abs(largest) < F(np.inf):  # NaN are beyond infinity
            logprobs_R[r], tokens_R[r] = F(np.nan), 0
            continue
        draws, sums, total = temperature_R[r] > 0, np.zeros(-(-V // CHUNK), np.float32), 0.0
        scale = LOG2_E / (temperature_R[r] if draws else F(1))
        for c in range(len(sums)):
            part, chunk = F(0), row[c * CHUNK:(c + 1) * CHUNK]
            for v in range(len(chunk)):
                x = (chunk[v] - largest) * scale
                part += exp2(max(x, F(-126))) if x > F(-126) else F(0)
            sums[c] = part
            total += part
        wanted, below, c = uniforms_R[r] * total, 0.0, 0
        while draws and below + sums[c] <= wanted:
            below, c = below + sums[c], c + 1
        v = c * CHUNK
        while draws and v < min(V, (c + 1) * CHUNK) and below <= wanted:
            if (row[v] - largest) * scale > F(-126):  # the chunk's last one stands if rounding leaves none
                token = v
                below += exp2((row[v] - largest) * scale)
            v += 1
        while token < 0 or (row[token] < largest and not draws):
            token += 1
        tokens_R[r], logprobs_R[r] = token, min(0.0, (row[token] - largest) * scale * LN_2 - math.log(total))


def draw_rows(logits_RV: Tensor, temperature_R: Tensor, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
    """As kernels/sampling.py without truncation: a row stays in a core's cache while its largest, sum and token are found."""
    tokens_R, logprobs_R = torch.empty(len(logits_RV), dtype=torch.long), torch.empty(len(logits_RV))
    _draw(*(each.numpy() for each in (logits_RV, temperature_R, uniforms_R, tokens_R, logprobs_R)))
    return tokens_R, logprobs_R
