"""Causal attention of new queries over paged keys and values: one launch for decoding requests, one for chunks of prompts.

    o[t] = sum_j softmax_j(q[t] . k[j] / sqrt(D)) v[j]      over j <= position(t), and j > position(t) - window if windowed
    position of query i of a request with S queries = context - S + i
    slot of key j of request n = tables[n, j // block_size] * block_size + j % block_size

Letters: T query rows, N requests, S queries of one request, J keys, R cache slots, H query heads, K KV heads, D head dim,
M rows of a tile: the queries of one KV head, (query, head of the group) flattened, so that each key is read once for all of them.

Sources: online softmax and tiles, FlashAttention-2 (arXiv 2307.08691); splits over the keys, Flash-Decoding (its partial results
are merged by a second kernel); pages, PagedAttention (arXiv 2309.06180).

What bounds it: decode reads the whole cache once a token. 327,680 bytes a key for the 70B in bf16 (80 layers x 2 x 8 heads x 128 x
2) make 128 requests at context 3072 read 129 GB a step: 38 ms on one H100's 3.35 TB/s, 4.8 ms on eight. Its arithmetic is H/K = 8
FLOP a byte, far below the 295 where an H100's tensor cores would bind, so padding 8 rows to the 16 of an MMA costs nothing. A chunk
of S queries does 8 S FLOP a byte: compute-bound from 40 queries on.

Deliberately different from vLLM: one page lookup a key (a step of 64 keys spans 4 pages of 16, so the tile does not shrink to the
page); the number of splits is fixed by the launch, their length by each request's context on the device, so that a CUDA graph
captured for 32k contexts still spreads a context of 1k over the GPU; no scales, sinks, soft caps or ALiBi.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634  # softmax in powers of two: exp2 is one instruction, exp is two


@dataclass(frozen=True, slots=True)
class Pages:
    """Where the keys of the step's N requests lie. The first `num_decodes` requests have exactly one query each."""
    tables_NB: Tensor  # int32, page ids; entries behind a request's context are never read
    query_starts_N1: Tensor  # int32 [N + 1], cumulative: request n has the rows starts[n]...starts[n + 1] - 1 of q
    contexts_N: Tensor  # int32, keys including this step's own; 0 marks a padding row of a captured graph, which gives zeros
    block_size: int  # slots of a page
    max_queries: int  # of any request
    num_decodes: int
    max_context: int  # upper bound of contexts_N; a captured graph keeps the one it was captured with


def paged_attention(q_THD: Tensor, keys_RKD: Tensor, values_RKD: Tensor, pages: Pages, window: int) -> Tensor:
    """o [T, H, D]; rows that belong to no request, or to one with context 0, are zeros."""
    attend = paged_attention_triton if q_THD.is_cuda else paged_attention_torch
    return attend(q_THD, keys_RKD, values_RKD, pages, window)


def paged_attention_torch(q_THD: Tensor, keys_RKD: Tensor, values_RKD: Tensor, pages: Pages, window: int) -> Tensor:
    """The formula, one request at a time, in fp32."""
    o_THD = torch.zeros(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    repeat = q_THD.shape[1] // keys_RKD.shape[1]
    starts = pages.query_starts_N1.tolist()
    for n, context in enumerate(pages.contexts_N.tolist()):
        rows = slice(starts[n], starts[n + 1])
        if context == 0:
            continue
        j = torch.arange(context, device=q_THD.device)
        slots_J = pages.tables_NB[n, j // pages.block_size].long() * pages.block_size + j % pages.block_size
        k_JHD, v_JHD = (cache[slots_J].float().repeat_interleave(repeat, 1) for cache in (keys_RKD, values_RKD))
        positions_S1 = torch.arange(context - (rows.stop - rows.start), context, device=q_THD.device)[:, None]
        visible_SJ = (j <= positions_S1) & (j > positions_S1 - window) if window else j <= positions_S1
        scores_HSJ = torch.einsum("shd,jhd->hsj", q_THD[rows].float(), k_JHD) * q_THD.shape[2] ** -0.5
        weights_HSJ = scores_HSJ.masked_fill(~visible_SJ, -torch.inf).softmax(-1)
        o_THD[rows] = torch.einsum("hsj,jhd->shd", weights_HSJ, v_JHD).to(q_THD.dtype)
    return o_THD


def decode_splits(requests: int, kv_heads: int, max_context: int) -> int:
    """Programs that share one request's keys: 4 an SM of an H100 in all (three run at once, the rest evens ragged contexts), and
    no more than one for 256 keys, below which writing and merging partial results costs more than it spreads."""
    return max(1, min(triton.cdiv(4 * 132, requests * kv_heads), triton.cdiv(max_context, 256)))


def decode_launch(head_dim: int, repeat: int, itemsize: int) -> dict[str, int]:
    """Steps of 16 KB of keys and as many values (64 keys of 128 bf16 numbers), the next already under way: 72 KB, three programs
    an SM. Looking pages up takes half of Triton's stages: only the fifth keeps two steps of keys in flight."""
    wide = triton.next_power_of_2(head_dim)
    return {"REPEAT": repeat, "M": max(16, triton.next_power_of_2(repeat)), "D": head_dim, "BLOCK_D": wide,
            "BLOCK_J": 16_384 // (wide * itemsize), "num_warps": 4, "num_stages": 5}


def reduce_launch(head_dim: int) -> dict[str, int]:
    return {"D": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_SPLITS": 16, "num_warps": 4, "num_stages": 2}


def prefill_launch(head_dim: int, repeat: int, itemsize: int) -> dict[str, int]:
    """128 rows are 16 queries of 8 heads: beyond that the sums no longer fit into the registers of 8 warps."""
    rows = 256 // itemsize
    assert repeat <= rows, f"{repeat} query heads a KV head do not fit into a tile of {rows} rows"
    return decode_launch(head_dim, repeat, itemsize) | {"M": rows, "BLOCK_J": rows // 2, "num_warps": rows // 16}


def paged_attention_triton(q_THD: Tensor, keys_RKD: Tensor, values_RKD: Tensor, pages: Pages, window: int) -> Tensor:
    """The same by three kernels; launches depend on shapes and on the integers of `pages` only, so they can be captured."""
    T, H, D = q_THD.shape
    K, N, decodes = keys_RKD.shape[1], len(pages.contexts_N), pages.num_decodes
    assert keys_RKD.stride() == values_RKD.stride(), "keys and values are addressed by one offset"
    assert q_THD.stride(2) == keys_RKD.stride(2) == 1, "a head's numbers must be contiguous"
    assert pages.tables_NB.stride(1) == 1, "table rows must be contiguous"
    # Every row is written where each is a decoding request; rows of no request must not be left with NaN bits.
    new = torch.empty if decodes == T else torch.zeros
    o_THD = new(T, H, D, dtype=q_THD.dtype, device=q_THD.device)
    strides = {"stride_qt": q_THD.stride(0), "stride_qh": q_THD.stride(1), "stride_slot": keys_RKD.stride(0),
               "stride_head": keys_RKD.stride(1), "stride_table": pages.tables_NB.stride(0), "scale": LOG2_E * D**-0.5}
    constants = {"BLOCK_SIZE": pages.block_size, "WINDOW": window}
    if decodes:
        splits = decode_splits(decodes, K, pages.max_context)
        launch = decode_launch(D, H // K, q_THD.element_size())
        # With one split, kernels are not given scratch: any pointers do.
        partial_NPHD, lse_NPH = o_THD, o_THD
        if splits > 1:
            partial_NPHD = torch.empty(decodes, splits, H, D, dtype=torch.float32, device=q_THD.device)
            lse_NPH = torch.empty(decodes, splits, H, dtype=torch.float32, device=q_THD.device)
        _decode[decodes, K, splits](q_THD, keys_RKD, values_RKD, pages.tables_NB, pages.contexts_N, o_THD, partial_NPHD, lse_NPH,
                                    **strides, **constants, SPLIT=splits > 1, **launch)
        if splits > 1:
            _reduce[decodes, H](partial_NPHD, lse_NPH, pages.contexts_N, o_THD, splits, WINDOW=window,
                                BLOCK_J=launch["BLOCK_J"], **reduce_launch(D))
    if decodes < N:
        launch = prefill_launch(D, H // K, q_THD.element_size())
        tiles = triton.cdiv(pages.max_queries, launch["M"] // launch["REPEAT"])
        _prefill[tiles, K, N - decodes](q_THD, keys_RKD, values_RKD, pages.tables_NB, pages.query_starts_N1, pages.contexts_N,
                                        o_THD, decodes, **strides, **constants, **launch)
    return o_THD


@triton.jit
def _attend(q_MD, keys, values, table, positions_M, whole, context, start, stop, stride_slot, scale, M: tl.constexpr,
            D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """(o, log2 of the sum of exponents) of the rows over the keys start...stop - 1; without a window all see the first `whole`."""
    d = tl.arange(0, BLOCK_D)
    acc_MD = tl.zeros([M, BLOCK_D], tl.float32)
    # Finite: a row that has seen only masked keys keeps exp2(0) = 1 as its scale, where -inf would make NaN.
    largest_M, total_M = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32)
    for block in range(start, stop, BLOCK_J):
        j = block + tl.arange(0, BLOCK_J)
        # Neither a table entry nor a slot behind the context may be touched: both may hold anything, NaN too.
        page_J = tl.load(table + j // BLOCK_SIZE, mask=j < context, other=0)
        slot_J = page_J.to(tl.int64) * BLOCK_SIZE + j % BLOCK_SIZE  # int32 numbers end at 4 GB of bf16 cache
        offset_JD = slot_J[:, None] * stride_slot + d[None]
        loaded_JD = (j < context)[:, None] & (d < D)[None]
        k_JD = tl.load(keys + offset_JD, mask=loaded_JD, other=0.0)
        scores_MJ = tl.dot(q_MD, tl.trans(k_JD), input_precision="ieee") * scale
        if WINDOW:
            visible_MJ = (j[None] <= positions_M[:, None]) & (positions_M[:, None] - j[None] < WINDOW)
            scores_MJ = tl.where(visible_MJ, scores_MJ, float("-inf"))
        elif block + BLOCK_J > whole:
            scores_MJ = tl.where(j[None] <= positions_M[:, None], scores_MJ, float("-inf"))
        new_M = tl.maximum(largest_M, tl.max(scores_MJ, 1))
        rescale_M = tl.exp2(largest_M - new_M)
        weights_MJ = tl.exp2(scores_MJ - new_M[:, None])
        total_M = total_M * rescale_M + tl.sum(weights_MJ, 1)
        v_JD = tl.load(values + offset_JD, mask=loaded_JD, other=0.0)
        acc_MD = tl.dot(weights_MJ.to(v_JD.dtype), v_JD, acc_MD * rescale_M[:, None], input_precision="ieee")
        largest_M = new_M
    total_M = tl.where(total_M > 0, total_M, 1.0)  # no key at all, as with context 0, gives 0 / 1
    return acc_MD / total_M[:, None], largest_M + tl.log2(total_M)


@triton.jit
def _split_keys(context, splits, BLOCK_J: tl.constexpr, WINDOW: tl.constexpr):
    """(first key block that the last position sees, keys of one split): equal shares in whole key blocks."""
    first = tl.maximum(context - WINDOW, 0) // BLOCK_J * BLOCK_J if WINDOW else context * 0
    return first, tl.cdiv(tl.cdiv(context - first, BLOCK_J), splits) * BLOCK_J


@triton.jit(do_not_specialize=["stride_table"])
def _decode(q, keys, values, tables, contexts, out, partial, lse, stride_qt, stride_qh, stride_slot, stride_head, stride_table,
            scale, REPEAT: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_J: tl.constexpr,
            BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """One request, one KV head, one share of the keys. Request n has row n of q: all before it have one query too."""
    n, k, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    context = tl.load(contexts + n)
    first, share = _split_keys(context, tl.num_programs(2), BLOCK_J, WINDOW)
    start = first + split * share
    if SPLIT and start >= context:  # `_reduce` knows that there is nothing to read
        return
    row, d = tl.arange(0, M), tl.arange(0, BLOCK_D)
    head_M = k * REPEAT + row
    held_MD = (row < REPEAT)[:, None] & (d < D)[None]
    q_MD = tl.load(q + n * stride_qt + head_M[:, None] * stride_qh + d[None], mask=held_MD, other=0.0)
    o_MD, lse_M = _attend(
        q_MD, keys + k.to(tl.int64) * stride_head, values + k.to(tl.int64) * stride_head, tables + n * stride_table,
        tl.full([M], 0, tl.int32) + context - 1, context, context, start, tl.minimum(start + share, context), stride_slot, scale,
        M, D, BLOCK_D, BLOCK_J, BLOCK_SIZE, WINDOW)
    if SPLIT:
        row_M = (n * tl.num_programs(2) + split) * tl.num_programs(1) * REPEAT + head_M
        tl.store(partial + row_M[:, None] * D + d[None], o_MD, mask=held_MD)
        tl.store(lse + row_M, lse_M, mask=row < REPEAT)
    else:
        row_M = n * tl.num_programs(1) * REPEAT + head_M
        tl.store(out + row_M[:, None] * D + d[None], o_MD.to(out.dtype.element_ty), mask=held_MD)


@triton.jit(do_not_specialize=["splits"])
def _reduce(partial, lse, contexts, out, splits, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_J: tl.constexpr,
            WINDOW: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """o = sum_p 2^(lse_p - max) o_p / sum_p 2^(lse_p - max) over the splits that had keys."""
    n, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK_D)
    context = tl.load(contexts + n)
    first, share = _split_keys(context, splits, BLOCK_J, WINDOW)
    used = tl.cdiv(context - first, tl.maximum(share, 1))
    acc_D, largest, total = tl.zeros([BLOCK_D], tl.float32), -1e30, 0.0
    for start in range(0, used, BLOCK_SPLITS):
        split_P = start + tl.arange(0, BLOCK_SPLITS)
        row_P = (n * splits + split_P) * tl.num_programs(1) + head
        lse_P = tl.load(lse + row_P, mask=split_P < used, other=float("-inf"))
        o_PD = tl.load(partial + row_P[:, None] * D + d[None], mask=(split_P < used)[:, None] & (d < D)[None], other=0.0)
        new = tl.maximum(largest, tl.max(lse_P, 0))
        weight_P = tl.exp2(lse_P - new)
        total = total * tl.exp2(largest - new) + tl.sum(weight_P, 0)
        acc_D = acc_D * tl.exp2(largest - new) + tl.sum(weight_P[:, None] * o_PD, 0)
        largest = new
    o_D = acc_D / tl.where(total > 0, total, 1.0)
    tl.store(out + (n * tl.num_programs(1) + head) * D + d, o_D.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["stride_table", "first_request"])
def _prefill(q, keys, values, tables, query_starts, contexts, out, first_request, stride_qt, stride_qh, stride_slot, stride_head,
             stride_table, scale, REPEAT: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
             BLOCK_J: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """M // REPEAT queries of one request with all their heads of one KV head, over the keys that any of them sees."""
    n, k = first_request + tl.program_id(2), tl.program_id(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see most keys: those programs start first
    first_row, context = tl.load(query_starts + n), tl.load(contexts + n)
    queries = tl.load(query_starts + n + 1) - first_row
    first_query = tile * (M // REPEAT)
    if first_query >= queries:
        return
    row, d = tl.arange(0, M), tl.arange(0, BLOCK_D)
    query_M = first_query + row // REPEAT
    held_MD = ((row < M // REPEAT * REPEAT) & (query_M < queries))[:, None] & (d < D)[None]  # 128 rows: 42 queries of 3 heads
    head_M, row_M = k * REPEAT + row % REPEAT, (first_row + query_M).to(tl.int64)
    q_MD = tl.load(q + (row_M * stride_qt + head_M * stride_qh)[:, None] + d[None], mask=held_MD, other=0.0)
    position = context - queries + first_query  # of the tile's first query
    start = tl.maximum(position - WINDOW + 1, 0) // BLOCK_J * BLOCK_J if WINDOW else 0
    o_MD, _ = _attend(
        q_MD, keys + k.to(tl.int64) * stride_head, values + k.to(tl.int64) * stride_head, tables + n.to(tl.int64) * stride_table,
        context - queries + query_M, position + 1, context, start, tl.minimum(position + M // REPEAT, context), stride_slot,
        scale, M, D, BLOCK_D, BLOCK_J, BLOCK_SIZE, WINDOW)
    row_M = row_M * tl.num_programs(1) * REPEAT + head_M
    tl.store(out + row_M[:, None] * D + d[None], o_MD.to(out.dtype.element_ty), mask=held_MD)
