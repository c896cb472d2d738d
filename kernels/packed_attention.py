"""Causal attention within packed sequences, with its gradients: the learner's on GPUs where flash-attn is not installed.

    s = q k^T / sqrt(D)    p = exp(s - lse)    o = p v     over j <= i, and j > i - window if windowed; i, j from 0 in a sequence
    dv = p^T do            ds = p * (do v^T - delta)       delta = rowsum(do * o)
    dq = ds k / sqrt(D)    dk = ds^T q / sqrt(D)

Letters: T packed tokens, N sequences, S queries and J keys of a tile, H query heads, K KV heads, D head dim.

Source: FlashAttention-2 (arXiv 2307.08691): p is never stored but computed again in backward from each row's logsumexp.

What bounds it: tensor cores. A causal sequence of S tokens costs 2 S^2 H D FLOP forward and 2.5 times that backward; for the 70B
at 4096 tokens 22 TFLOP forward over its 80 layers, beside 569 of its matrices. Kept for backward are q, k, v, o and 4 bytes a row
and head: 1 MB a layer, where the scores would be 2 GB in bf16. (Its 327,680 bytes of keys and values a token bind the engine, see
paged_attention.py; here a tile of 64 keys serves 128 queries.)

Deliberately different from FlashAttention-2: dk and dv of a KV head are summed over its query heads within one program, so K and
V are not repeated, nothing is added atomically and gradients are the same bits on every run; delta is computed by the dq kernel,
which reads do anyway. No dropout, ALiBi or soft cap.
"""

import importlib.util

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)  # softmax in powers of two: exp2 is one instruction, exp is two
FLASH = importlib.util.find_spec("flash_attn") is not None


def packed_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens_N1: Tensor, max_seqlen: int, window: int) -> Tensor:
    """o [T, H, D]; rows cu_seqlens[N] and later belong to no sequence: zeros, and no gradient."""
    on_gpu = packed_attention_flash if FLASH else packed_attention_triton
    attend = on_gpu if q_THD.is_cuda else packed_attention_torch
    return attend(q_THD, k_TKD, v_TKD, cu_seqlens_N1, max_seqlen, window)


def packed_attention_torch(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens_N1: Tensor, max_seqlen: int,
                           window: int) -> Tensor:
    """The formula, one sequence at a time, in fp32."""
    repeat, starts, outputs = q_THD.shape[1] // k_TKD.shape[1], cu_seqlens_N1.tolist(), []
    for start, stop in zip(starts, starts[1:], strict=False):
        q, k, v = (x[start:stop].float() for x in (q_THD, k_TKD, v_TKD))
        i, j = torch.arange(stop - start, device=q.device)[:, None], torch.arange(stop - start, device=q.device)
        visible_SJ = (j <= i) & (j > i - window) if window else j <= i
        scores_HSJ = torch.einsum("shd,jhd->hsj", q, k.repeat_interleave(repeat, 1)) * q.shape[2] ** -0.5
        weights_HSJ = scores_HSJ.masked_fill(~visible_SJ, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hsj,jhd->shd", weights_HSJ, v.repeat_interleave(repeat, 1)).to(q_THD.dtype))
    return torch.cat([*outputs, torch.zeros_like(q_THD[starts[-1]:])])


def packed_attention_flash(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens_N1: Tensor, max_seqlen: int,
                           window: int) -> Tensor:
    """The same by flash-attn, which leaves rows behind the last sequence, and their gradients, as it found the memory."""
    from flash_attn import flash_attn_varlen_func
    inside_T11 = (torch.arange(len(q_THD), device=q_THD.device) < cu_seqlens_N1[-1])[:, None, None]
    q, k, v = (x.where(inside_T11, 0) for x in (q_THD, k_TKD, v_TKD))  # where's backward drops what lies outside, NaN too
    o_THD = flash_attn_varlen_func(q, k, v, cu_seqlens_N1, cu_seqlens_N1, max_seqlen, max_seqlen, causal=True,
                                   window_size=(window - 1, 0) if window else (-1, -1))  # it counts keys before the query
    return o_THD.where(inside_T11, 0)


def packed_attention_triton(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, cu_seqlens_N1: Tensor, max_seqlen: int,
                            window: int) -> Tensor:
    return _PackedAttention.apply(q_THD, k_TKD, v_TKD, cu_seqlens_N1, max_seqlen, window)


def packed_launch(kernel: str, head_dim: int, repeat: int, itemsize: int) -> dict[str, int]:
    """Tiles that keep a 128-wide head's fp32 sums in registers on sm_80 and sm_90: dk and dv of 64 keys leave 4 warps room for 32
    queries at a time, and two such programs run on an SM. fp32 data takes twice the space, so it gets half the rows."""
    queries, keys, warps, stages = {"forward": (128, 64, 8, 3), "dq": (128, 32, 8, 3), "dkdv": (32, 64, 4, 2)}[kernel]
    half = itemsize // 2
    return {"REPEAT": repeat, "D": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_S": queries // half,
            "BLOCK_J": keys // half, "num_warps": warps // half, "num_stages": stages}


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THD, k_TKD, v_TKD, cu_seqlens_N1, max_seqlen, window):
        T, H, D = q_THD.shape
        K, N = k_TKD.shape[1], len(cu_seqlens_N1) - 1
        assert q_THD.stride(2) == k_TKD.stride(2) == v_TKD.stride(2) == 1, "a head's numbers must be contiguous"
        o_THD = torch.zeros(T, H, D, dtype=q_THD.dtype, device=q_THD.device)
        lse_HT = torch.empty(H, T, dtype=torch.float32, device=q_THD.device)
        launch = packed_launch("forward", D, H // K, q_THD.element_size())
        _forward[triton.cdiv(max_seqlen, launch["BLOCK_S"]), H, N](
            q_THD, k_TKD, v_TKD, o_THD, lse_HT, cu_seqlens_N1, T, *_strides(q_THD, k_TKD, v_TKD), D**-0.5,
            WINDOW=window, **launch)
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, o_THD, lse_HT, cu_seqlens_N1)
        ctx.settings = max_seqlen, window
        return o_THD

    @staticmethod
    def backward(ctx, do_THD):
        q_THD, k_TKD, v_TKD, o_THD, lse_HT, cu_seqlens_N1 = ctx.saved_tensors
        max_seqlen, window = ctx.settings
        (T, H, D), K, N = q_THD.shape, k_TKD.shape[1], len(cu_seqlens_N1) - 1
        do_THD = do_THD.contiguous()
        dq_THD, dk_TKD, dv_TKD = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q_THD, k_TKD, v_TKD))
        delta_HT = torch.empty_like(lse_HT)
        strides, size = _strides(q_THD, k_TKD, v_TKD), q_THD.element_size()
        launch = packed_launch("dq", D, H // K, size)
        _backward_q[triton.cdiv(max_seqlen, launch["BLOCK_S"]), H, N](
            q_THD, k_TKD, v_TKD, o_THD, do_THD, lse_HT, delta_HT, dq_THD, cu_seqlens_N1, T, *strides, D**-0.5,
            WINDOW=window, **launch)
        launch = packed_launch("dkdv", D, H // K, size)
        _backward_kv[triton.cdiv(max_seqlen, launch["BLOCK_J"]), K, N](
            q_THD, k_TKD, v_TKD, do_THD, lse_HT, delta_HT, dk_TKD, dv_TKD, cu_seqlens_N1, T, *strides, D**-0.5,
            WINDOW=window, **launch)
        return dq_THD, dk_TKD, dv_TKD, None, None, None


def _strides(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> tuple[int, ...]:
    return *q_THD.stride()[:2], *k_TKD.stride()[:2], *v_TKD.stride()[:2]


@triton.jit
def _tile(base, first, rows, stride, D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows first...first + BLOCK_ROWS - 1 of one head; zeros from row `rows` on and beyond D."""
    row, d = tl.arange(0, BLOCK_ROWS)[:, None], tl.arange(0, BLOCK_D)[None]
    return tl.load(base + tl.cast(first, tl.int64) * stride + (row * stride + d), mask=(row < rows - first) & (d < D), other=0.0)


@triton.jit
def _put(base, x, first, rows, stride, D: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    row, d = tl.arange(0, BLOCK_ROWS)[:, None], tl.arange(0, BLOCK_D)[None]
    tl.store(base + tl.cast(first, tl.int64) * stride + (row * stride + d), x.to(base.dtype.element_ty),
             mask=(row < rows - first) & (d < D))


@triton.jit(do_not_specialize=["T"])
def _forward(q, k, v, out, lse, cu_seqlens, T, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, scale,
             REPEAT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr,
             WINDOW: tl.constexpr):
    """BLOCK_S queries of one head over the keys that any of them sees."""
    head = tl.program_id(1).to(tl.int64)
    row0 = tl.load(cu_seqlens + tl.program_id(2)).to(tl.int64)
    rows = tl.load(cu_seqlens + tl.program_id(2) + 1) - row0.to(tl.int32)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_S  # late queries see most keys: those programs start first
    if first >= rows:
        return
    q_SD = _tile(q + row0 * stride_qt + head * stride_qh, first, rows, stride_qt, D, BLOCK_S, BLOCK_D)
    k += row0 * stride_kt + head // REPEAT * stride_kh
    v += row0 * stride_vt + head // REPEAT * stride_vh
    i_S1 = first + tl.arange(0, BLOCK_S)[:, None]
    acc_SD = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    # Finite: a row that has seen only masked keys keeps exp2(0) = 1 as its scale, where -inf would make NaN.
    largest_S, total_S = tl.full([BLOCK_S], -1e30, tl.float32), tl.zeros([BLOCK_S], tl.float32)
    start = tl.maximum(first - WINDOW + 1, 0) // BLOCK_J * BLOCK_J if WINDOW else 0
    for block in range(start, tl.minimum(first + BLOCK_S, rows), BLOCK_J):
        k_JD = _tile(k, block, rows, stride_kt, D, BLOCK_J, BLOCK_D)
        scores_SJ = tl.dot(q_SD, tl.trans(k_JD), input_precision="ieee") * (scale * LOG2_E)
        j_1J = block + tl.arange(0, BLOCK_J)[None]
        if WINDOW:
            scores_SJ = tl.where((j_1J <= i_S1) & (i_S1 - j_1J < WINDOW), scores_SJ, float("-inf"))
        elif block + BLOCK_J - 1 > first:  # else all of the queries see all of the keys
            scores_SJ = tl.where(j_1J <= i_S1, scores_SJ, float("-inf"))
        new_S = tl.maximum(largest_S, tl.max(scores_SJ, 1))
        rescale_S = tl.exp2(largest_S - new_S)
        weights_SJ = tl.exp2(scores_SJ - new_S[:, None])
        total_S = total_S * rescale_S + tl.sum(weights_SJ, 1)
        v_JD = _tile(v, block, rows, stride_vt, D, BLOCK_J, BLOCK_D)
        acc_SD = tl.dot(weights_SJ.to(v_JD.dtype), v_JD, acc_SD * rescale_S[:, None], input_precision="ieee")
        largest_S = new_S
    total_S = tl.where(total_S > 0, total_S, 1.0)  # with a window, rows behind the sequence may have seen no key
    stride_ot = tl.num_programs(1) * D
    _put(out + row0 * stride_ot + head * D, acc_SD / total_S[:, None], first, rows, stride_ot, D, BLOCK_S, BLOCK_D)
    s = first + tl.arange(0, BLOCK_S)
    tl.store(lse + head * T + row0 + s, largest_S + tl.log2(total_S), mask=s < rows)


@triton.jit(do_not_specialize=["T"])
def _backward_q(q, k, v, out, dout, lse, delta, dq, cu_seqlens, T, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                scale, REPEAT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
                BLOCK_J: tl.constexpr, WINDOW: tl.constexpr):
    """delta and dq of BLOCK_S queries of one head."""
    head = tl.program_id(1).to(tl.int64)
    row0 = tl.load(cu_seqlens + tl.program_id(2)).to(tl.int64)
    rows = tl.load(cu_seqlens + tl.program_id(2) + 1) - row0.to(tl.int32)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_S
    if first >= rows:
        return
    stride_ot = tl.num_programs(1) * D
    q_SD = _tile(q + row0 * stride_qt + head * stride_qh, first, rows, stride_qt, D, BLOCK_S, BLOCK_D)
    do_SD = _tile(dout + row0 * stride_ot + head * D, first, rows, stride_ot, D, BLOCK_S, BLOCK_D)
    o_SD = _tile(out + row0 * stride_ot + head * D, first, rows, stride_ot, D, BLOCK_S, BLOCK_D)
    s = first + tl.arange(0, BLOCK_S)
    delta_S = tl.sum(o_SD.to(tl.float32) * do_SD.to(tl.float32), 1)
    tl.store(delta + head * T + row0 + s, delta_S, mask=s < rows)
    lse_S = tl.load(lse + head * T + row0 + s, mask=s < rows, other=0.0)
    k += row0 * stride_kt + head // REPEAT * stride_kh
    v += row0 * stride_vt + head // REPEAT * stride_vh
    dq_SD = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    start = tl.maximum(first - WINDOW + 1, 0) // BLOCK_J * BLOCK_J if WINDOW else 0
    for block in range(start, tl.minimum(first + BLOCK_S, rows), BLOCK_J):
        k_JD = _tile(k, block, rows, stride_kt, D, BLOCK_J, BLOCK_D)
        v_JD = _tile(v, block, rows, stride_vt, D, BLOCK_J, BLOCK_D)
        scores_SJ = tl.dot(q_SD, tl.trans(k_JD), input_precision="ieee") * (scale * LOG2_E)
        j_1J = block + tl.arange(0, BLOCK_J)[None]
        visible_SJ = (j_1J <= s[:, None]) & (s[:, None] - j_1J < WINDOW) if WINDOW else j_1J <= s[:, None]
        p_SJ = tl.where(visible_SJ, tl.exp2(scores_SJ - lse_S[:, None]), 0.0)
        ds_SJ = p_SJ * (tl.dot(do_SD, tl.trans(v_JD), input_precision="ieee") - delta_S[:, None])
        dq_SD = tl.dot(ds_SJ.to(k_JD.dtype), k_JD, dq_SD, input_precision="ieee")
    _put(dq + row0 * stride_ot + head * D, dq_SD * scale, first, rows, stride_ot, D, BLOCK_S, BLOCK_D)


@triton.jit(do_not_specialize=["T"])
def _backward_kv(q, k, v, dout, lse, delta, dk, dv, cu_seqlens, T, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh,
                 scale, REPEAT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
                 BLOCK_J: tl.constexpr, WINDOW: tl.constexpr):
    """dk and dv of BLOCK_J keys of one KV head, over all its query heads and the queries that see any of the keys."""
    kv_head = tl.program_id(1).to(tl.int64)
    row0 = tl.load(cu_seqlens + tl.program_id(2)).to(tl.int64)
    rows = tl.load(cu_seqlens + tl.program_id(2) + 1) - row0.to(tl.int32)
    first = tl.program_id(0) * BLOCK_J  # early keys are seen by most queries: in order already
    if first >= rows:
        return
    k_JD = _tile(k + row0 * stride_kt + kv_head * stride_kh, first, rows, stride_kt, D, BLOCK_J, BLOCK_D)
    v_JD = _tile(v + row0 * stride_vt + kv_head * stride_vh, first, rows, stride_vt, D, BLOCK_J, BLOCK_D)
    j_J1 = first + tl.arange(0, BLOCK_J)[:, None]
    dk_JD, dv_JD = tl.zeros([BLOCK_J, BLOCK_D], tl.float32), tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    start = first // BLOCK_S * BLOCK_S
    stop = tl.minimum(first + BLOCK_J - 1 + WINDOW, rows) if WINDOW else rows
    tiles = tl.cdiv(stop - start, BLOCK_S)
    stride_ot = tl.num_programs(1) * REPEAT * D
    for step in range(tiles * REPEAT):  # one loop, so that the next head's tiles load while this head's are computed
        head, block = kv_head * REPEAT + step // tiles, start + step % tiles * BLOCK_S
        i = block + tl.arange(0, BLOCK_S)
        q_SD = _tile(q + row0 * stride_qt + head * stride_qh, block, rows, stride_qt, D, BLOCK_S, BLOCK_D)
        do_SD = _tile(dout + row0 * stride_ot + head * D, block, rows, stride_ot, D, BLOCK_S, BLOCK_D)
        lse_S = tl.load(lse + head * T + row0 + i, mask=i < rows, other=0.0)
        delta_S = tl.load(delta + head * T + row0 + i, mask=i < rows, other=0.0)
        scores_JS = tl.dot(k_JD, tl.trans(q_SD), input_precision="ieee") * (scale * LOG2_E)
        visible_JS = (j_J1 <= i[None]) & (i[None] - j_J1 < WINDOW) if WINDOW else j_J1 <= i[None]
        p_JS = tl.where(visible_JS, tl.exp2(scores_JS - lse_S[None]), 0.0)
        dv_JD = tl.dot(p_JS.to(do_SD.dtype), do_SD, dv_JD, input_precision="ieee")
        ds_JS = p_JS * (tl.dot(v_JD, tl.trans(do_SD), input_precision="ieee") - delta_S[None])
        dk_JD = tl.dot(ds_JS.to(q_SD.dtype), q_SD, dk_JD, input_precision="ieee")
    stride_dt = tl.num_programs(1) * D
    _put(dk + row0 * stride_dt + kv_head * D, dk_JD * scale, first, rows, stride_dt, D, BLOCK_J, BLOCK_D)
    _put(dv + row0 * stride_dt + kv_head * D, dv_JD, first, rows, stride_dt, D, BLOCK_J, BLOCK_D)
