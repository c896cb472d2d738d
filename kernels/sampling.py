"""From logits to a token and its logprob: temperature, top-k, top-p, min-p, and one uniform number a row.

    z = logits / T      logp = log_softmax(z)      p = exp(logp)
    top-k   keep p >= the k-th largest
    top-p   keep the fewest most probable of the rest whose mass >= top_p x (mass of the rest), never fewer than one
    min-p   keep p >= min_p x max p
    token = the first kept v with sum_{w <= v} p_w > u x (mass kept)          T = 0: the first argmax

The logprob returned is logp, tempered and never truncated (T = 0 counts as 1): what the learner reproduces. A row that holds NaN,
or no finite logit, gets a NaN logprob, which the caller reports.

Letters: R rows, V vocabulary, N blocks (CPU: chunks) of it. The draw searches the blocks' sums, then inside one, where u's place is
uniform again. Sums are fp32, searches fp64: a long tail is not rounded away, and a probability of 0 is drawn for no u.

Bound by memory: 256 rows of the 70B (V 128256, fp32) are 131 MB, 27 us on an H200, read once, or 6 to 13 times if truncated.

Deliberately different
- vLLM sorts the vocabulary; FlashInfer (https://flashinfer.ai/2025/03/10/sampling.html) draws until a token is accepted, a random
  number a round. Here a threshold is bisected, 8 pivots a pass, and a sample is a function of one number.
- Tokens that tie with the last one kept are kept too: a sort's order may not decide.
- The CPU takes a few rows at a time: passes over 50 MB of fresh memory cost more than the arithmetic.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 256  # CPU: probabilities summed in fp32 before the fp64 search; 192 sums for a vocabulary of 49152
ELEMENTS = 2**21  # CPU: logits worked on at a time, 8 MB
CANDIDATES = 1024  # CPU: a row that keeps more than these is sorted (4 ms at V 49152 instead of .4 ms)


@dataclass(frozen=True, slots=True)
class Knobs:
    """What each row is drawn with, on the logits' device. The flags are known on the host: no kernel waits to learn them."""
    temperature_R: Tensor  # fp32; 0 is greedy
    top_k_R: Tensor  # int32; 0 is off
    top_p_R: Tensor  # fp32; 1 is off
    min_p_R: Tensor  # fp32; 0 is off
    truncates: bool  # a row that is not greedy has one of the three on
    draws: bool  # a row is not greedy

    @classmethod
    def of(cls, rows: list[tuple[float, int, float, float]], device: torch.device | str) -> "Knobs":
        """(temperature, top_k, top_p, min_p) of each row."""
        columns, kinds = zip(*rows, strict=True) if rows else [()] * 4, (torch.float32, torch.int32, torch.float32, torch.float32)
        tensors = (torch.tensor(column, dtype=kind, device=device) for column, kind in zip(columns, kinds, strict=True))
        return cls(*tensors, any(t > 0 and (k > 0 or p < 1 or m > 0) for t, k, p, m in rows), any(row[0] > 0 for row in rows))


@torch.no_grad()
def sample(logits_RV: Tensor, knobs: Knobs, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens int64 [R], logprobs fp32 [R]); `uniforms` in [0, 1), fp64 or fp32. Masked ids are logits of -inf."""
    if logits_RV.is_cuda:
        return sample_triton(logits_RV, knobs, uniforms_R)
    step = max(1, ELEMENTS // logits_RV.shape[1])
    spans = (slice(start, start + step) for start in range(0, max(1, len(logits_RV)), step))
    tokens, logprobs = zip(*(_sample_rows(logits_RV, knobs, uniforms_R, rows) for rows in spans), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _sample_rows(logits_RV: Tensor, knobs: Knobs, uniforms_R: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    logits_RV, temperature_R = logits_RV[rows], knobs.temperature_R[rows]
    greedy_R = temperature_R == 0
    # The same two operations as the learner's, in fp32: exact mode compares bits.
    logp_RV = torch.log_softmax(logits_RV.float() / torch.where(greedy_R, 1.0, temperature_R)[:, None], -1)
    R, V = logp_RV.shape
    tokens_R = torch.empty(R, dtype=torch.long)
    if knobs.draws:
        p_RNC = logp_RV.new_empty(R, -(-V // CHUNK), CHUNK)
        p_RV = p_RNC.view(R, -1)[:, :V]
        p_RNC.view(R, -1)[:, V:] = 0
        torch.exp(logp_RV, out=p_RV)
        if knobs.truncates:
            top_k_R, top_p_R, min_p_R = knobs.top_k_R[rows].long(), knobs.top_p_R[rows], knobs.min_p_R[rows]
            cut_R = (~greedy_R & ((top_k_R > 0) | (top_p_R < 1) | (min_p_R > 0))).nonzero()[:, 0]
            kept_RV, cuts = p_RV[cut_R], (top_k_R[cut_R, None], top_p_R[cut_R, None], min_p_R[cut_R, None])
            p_RV[cut_R] = kept_RV.masked_fill_(kept_RV < _smallest_kept(kept_RV, *cuts, min(CANDIDATES, V)), 0.0)
        chunk_R, inside_R = _search_rows(p_RNC.sum(-1), uniforms_R[rows])
        token_R, _ = _search_rows(p_RNC[torch.arange(R), chunk_R], inside_R)
        tokens_R = (chunk_R * CHUNK + token_R).clamp(max=V - 1)  # only a row of NaN would go further
    if greedy_R.any():
        tokens_R[greedy_R] = (logits_RV[greedy_R] if knobs.draws else logits_RV).argmax(-1)
    return tokens_R, logp_RV.gather(1, tokens_R[:, None])[:, 0]


def _search_rows(weights_RN: Tensor, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
    """(first index whose cumulative weight exceeds u x total, where in that weight u x total lies as a number in [0, 1])."""
    cumulative_RN = weights_RN.cumsum(-1, dtype=torch.float64)
    total_R1 = cumulative_RN[:, -1:].contiguous()
    target_R1 = uniforms_R[:, None] * total_R1
    last_R1 = torch.searchsorted(cumulative_RN, total_R1).clamp(max=weights_RN.shape[1] - 1)  # NaN is found nowhere
    index_R1 = torch.minimum(torch.searchsorted(cumulative_RN, target_R1, right=True), last_R1)  # u x total may round to total
    before_R1 = cumulative_RN.gather(1, (index_R1 - 1).clamp(min=0)).where(index_R1 > 0, 0.0)
    return index_R1[:, 0], ((target_R1 - before_R1) / weights_RN.gather(1, index_R1))[:, 0]


def _smallest_kept(p_RV: Tensor, top_k_R1: Tensor, top_p_R1: Tensor, min_p_R1: Tensor, width: int) -> Tensor:
    """The smallest probability that each row keeps, [R, 1], looked for among its `width` largest and, if it is not there, all."""
    V = p_RV.shape[1]
    largest_RW = p_RV.topk(width).values
    top_k_R1 = top_k_R1.where(top_k_R1 > 0, V).clamp(max=V)
    kth_R1 = largest_RW.gather(1, top_k_R1.clamp(max=width) - 1).where(top_k_R1 < V, 0.0)
    rest_R1 = p_RV.masked_fill(p_RV < kth_R1, 0.0).sum(-1, keepdim=True)
    nucleus_R1 = (largest_RW.cumsum(-1, dtype=torch.float64) < top_p_R1 * rest_R1).sum(-1, keepdim=True)
    found_R1 = ((top_k_R1 <= width) | (top_k_R1 == V)) & ((nucleus_R1 < width) | (top_p_R1 >= 1))
    if width < V and not found_R1.all():
        return _smallest_kept(p_RV, top_k_R1, top_p_R1, min_p_R1, V)
    last_R1 = largest_RW.gather(1, nucleus_R1.clamp(max=width - 1)).where(top_p_R1 < 1, 0.0)
    return torch.maximum(torch.maximum(kth_R1, last_R1), min_p_R1 * largest_RW[:, :1])


def launch(vocab: int) -> dict[str, int]:
    """BLOCK logits are one program of `_stats`: 63 a row at V 128256, so that even one row is read by half of an H200's SMs."""
    return {"BLOCK": 2048, "BLOCKS": triton.next_power_of_2(-(-vocab // 2048))}


def sample_triton(logits_RV: Tensor, knobs: Knobs, uniforms_R: Tensor) -> tuple[Tensor, Tensor]:
    R, V = logits_RV.shape
    sizes = launch(V)
    maxima_RN, sums_RN, kept_RN = logits_RV.new_empty(3, R, -(-V // sizes["BLOCK"]), dtype=torch.float32).unbind()
    tokens_R, lowest_R, logprobs_R = (logits_RV.new_empty(R, dtype=kind) for kind in (torch.int64, torch.int32, torch.float32))
    assert logits_RV.stride(1) == 1, "the kernels step through a row one logit at a time"
    rows = logits_RV, logits_RV.stride(0), V, knobs.temperature_R
    _stats[R, maxima_RN.shape[1]](*rows, maxima_RN, sums_RN, sizes["BLOCK"], num_warps=4)
    if knobs.truncates:
        cuts = knobs.top_k_R, knobs.top_p_R, knobs.min_p_R
        _truncate[R,](*rows, *cuts, maxima_RN, kept_RN, lowest_R, **sizes, PIVOTS=8, num_warps=16)
    _draw[R,](*rows, maxima_RN, sums_RN, kept_RN if knobs.truncates else sums_RN, lowest_R, uniforms_R, tokens_R, logprobs_R,
              **sizes, TRUNCATES=knobs.truncates, num_warps=4)
    return tokens_R, logprobs_R


@triton.jit
def _tempered(row_ptr, temperature, V, start, BLOCK: tl.constexpr):
    """z of one block, -inf beyond the vocabulary."""
    columns = start + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + columns, mask=columns < V, other=-float("inf")).to(tl.float32)
    return logits / tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def _key(z):
    """An int32 that orders as the floats do: negative ones have their magnitude's bits flipped; -0 is 0."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _stats(logits_ptr, stride, V, temperature_ptr, maxima_ptr, sums_ptr, BLOCK: tl.constexpr):
    """The largest z of each block and sum exp(z - largest); a block that is masked altogether has the sum 0."""
    row, block = tl.program_id(0), tl.program_id(1)
    z = _tempered(logits_ptr + row.to(tl.int64) * stride, tl.load(temperature_ptr + row), V, block * BLOCK, BLOCK)
    largest = tl.max(z, 0)
    tl.store(maxima_ptr + row * tl.num_programs(1) + block, largest)
    tl.store(sums_ptr + row * tl.num_programs(1) + block, tl.sum(tl.exp(z - tl.maximum(largest, -1e30)), 0))


@triton.jit
def _above(row_ptr, temperature, V, largest, pivots, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """How many tokens have a key >= each pivot, and the sum of exp(z - largest) over them: one pass over the row."""
    counts, masses = tl.zeros((BLOCK, PIVOTS), tl.int32), tl.zeros((BLOCK, PIVOTS), tl.float32)
    for start in range(0, V, BLOCK):
        z = _tempered(row_ptr, temperature, V, start, BLOCK)
        above = _key(z)[:, None] >= pivots.to(tl.int32)[None, :]
        counts += above.to(tl.int32)
        masses += tl.where(above, tl.exp(z - largest)[:, None], 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)  # added up in one order for every pivot, so both fall as the pivot rises


@triton.jit
def _cut(row_ptr, temperature, V, largest, low, needed, MASS: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr):
    """The largest key above which at least `needed` tokens (or mass) lie; `low` if there is none above it."""
    low, high = low.to(tl.int64), _key(largest).to(tl.int64) + 1  # a difference of keys needs 33 bits
    count_low, count_high = V + 1, 0
    while (high - low > 1) & (count_low - count_high > 1):  # with one token between them all keys between keep the same set
        pivots = low + (high - low) * (tl.arange(0, PIVOTS) + 1) // (PIVOTS + 1)
        counts, masses = _above(row_ptr, temperature, V, largest, pivots, BLOCK, PIVOTS)
        enough = (masses if MASS else counts) >= needed
        count_low = tl.min(tl.where(enough, counts, count_low), 0)
        count_high = tl.max(tl.where(enough, count_high, counts), 0)
        low, high = tl.max(tl.where(enough, pivots, low), 0), tl.min(tl.where(enough, high, pivots), 0)
    return low.to(tl.int32)


@triton.jit
def _truncate(logits_ptr, stride, V, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr, kept_ptr, lowest_ptr,
              BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PIVOTS: tl.constexpr):
    """The lowest key that the row keeps, and what `_stats` summed, over the kept tokens."""
    row, blocks, lane = tl.program_id(0), tl.cdiv(V, BLOCK), tl.arange(0, BLOCKS)
    row_ptr, temperature = logits_ptr + row.to(tl.int64) * stride, tl.load(temperature_ptr + row)
    largest = tl.max(tl.load(maxima_ptr + row * blocks + lane, mask=lane < blocks, other=-float("inf")), 0)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    lowest = _key(largest - 104.0)  # exp(-104) is 0 in fp32
    if temperature > 0:
        if (top_k > 0) & (top_k < V):
            lowest = _cut(row_ptr, temperature, V, largest, lowest, top_k, False, BLOCK, PIVOTS)
        if top_p < 1:
            _, masses = _above(row_ptr, temperature, V, largest, lowest + tl.zeros((PIVOTS,), tl.int32), BLOCK, PIVOTS)
            needed = top_p * tl.max(masses, 0)  # 0 is reached everywhere, and the search ends at the largest
            lowest = _cut(row_ptr, temperature, V, largest, lowest, needed, True, BLOCK, PIVOTS)
        if min_p > 0:
            lowest = tl.maximum(lowest, _key(largest + tl.log(min_p)))
    tl.store(lowest_ptr + row, lowest)
    for block in range(blocks):
        z = _tempered(row_ptr, temperature, V, block * BLOCK, BLOCK)
        p = tl.exp(z - tl.maximum(tl.load(maxima_ptr + row * blocks + block), -1e30))
        tl.store(kept_ptr + row * blocks + block, tl.sum(tl.where(_key(z) >= lowest, p, 0.0), 0))


@triton.jit
def _search(weights, u):
    """As on the CPU. A scan need not be monotone in its last bit, so an index without a weight is refused by name."""
    index = tl.arange(0, weights.shape[0])
    cumulative = tl.cumsum(weights, 0)
    target = u * tl.max(cumulative, 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    chosen = tl.min(tl.where((weights > 0) & (cumulative > target), index, last), 0)
    weight = tl.sum(tl.where(index == chosen, weights, 0.0), 0)
    return chosen, (target - tl.sum(tl.where(index == chosen, cumulative, 0.0), 0) + weight) / weight


@triton.jit
def _draw(logits_ptr, stride, V, temperature_ptr, maxima_ptr, sums_ptr, kept_ptr, lowest_ptr, uniforms_ptr, tokens_ptr,
          logprobs_ptr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TRUNCATES: tl.constexpr):
    """Choose the block, read it again, choose the token."""
    row, blocks, lane, index = tl.program_id(0), tl.cdiv(V, BLOCK), tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    row_ptr, temperature = logits_ptr + row.to(tl.int64) * stride, tl.load(temperature_ptr + row)
    at, real = row * blocks + lane, lane < blocks
    maxima = tl.load(maxima_ptr + at, mask=real, other=-float("inf"))
    largest = tl.max(maxima, 0)
    scales = tl.exp(maxima - largest)
    total = tl.sum(tl.load(sums_ptr + at, mask=real, other=0.0) * scales, 0)
    weights = tl.load(kept_ptr + at, mask=real, other=0.0) * scales
    block, inside = _search(weights.to(tl.float64), tl.load(uniforms_ptr + row).to(tl.float64))
    if temperature == 0:
        block = tl.min(tl.where(maxima == largest, lane, blocks - 1), 0)
    z = _tempered(row_ptr, temperature, V, block * BLOCK, BLOCK)
    p = tl.exp(z - tl.max(z, 0))
    if TRUNCATES:
        p = tl.where(_key(z) >= tl.load(lowest_ptr + row), p, 0.0)
    token, _ = _search(p.to(tl.float64), inside)
    if temperature == 0:
        token = tl.min(tl.where(z == tl.max(z, 0), index, 0x7FFFFFFF), 0)
    token = tl.minimum(token, V - 1 - block * BLOCK)  # only a row of NaN would go further
    tl.store(tokens_ptr + row, (block * BLOCK + token).to(tl.int64))
    tl.store(logprobs_ptr + row, tl.sum(tl.where(index == token, z - largest, 0.0), 0) - tl.log(total))
