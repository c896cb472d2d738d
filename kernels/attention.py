"""Causal attention over packed sequences (learner) and over paged keys and values (engine), in torch.

    o[t] = sum_j softmax_j(q[t] . k[j] / sqrt(D)) v[j]      over j <= position(t), and j > position(t) - window if windowed

Letters: T packed tokens, N sequences of one bucket, S queries of a sequence, J keys, H query heads, K KV heads, D head dim.

Never padding on the learner: sequences of equal length are gathered into one call. The engine buckets requests by query length
and by context rounded up to a power of two of key blocks, because a batch as ragged as a rollout would otherwise be padded to
its longest.

Exact mode uses `block_attention` everywhere: an online softmax over fixed blocks of 16 keys counted from position 0, masked
keys contributing exact zeros, queries padded to a multiple of 4 rows. A row's bits then depend neither on how the prompt
was chunked, nor on its batch mates, nor on prefill, decode or training being what computes it. SDPA gives no such promise: its
decode differs from its prefill at almost every position.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import ROW_PAD

KEY_BLOCK = 16  # keys of one step of the exact loop


def block_attention(q_NSHD: Tensor, k_NJKD: Tensor, v_NJKD: Tensor, positions_NS: Tensor, window: int) -> Tensor:
    """Attention with a fixed order of summation: S queries at `positions` against keys 0...J-1; returns [N, S, H, D].

    Bought with work: every query meets every key block, masked or not, and autograd keeps `out` once a block.
    """
    queries, repeat = q_NSHD.shape[1], q_NSHD.shape[2] // k_NJKD.shape[2]
    positions_NS = torch.cat([positions_NS, positions_NS[:, -1:].expand(-1, -queries % ROW_PAD)], 1)
    q = (_pad_to(q_NSHD, 1, ROW_PAD) * q_NSHD.shape[3] ** -0.5).transpose(1, 2).contiguous()
    k, v = (_pad_to(x, 1, KEY_BLOCK).transpose(1, 2).repeat_interleave(repeat, 1) for x in (k_NJKD, v_NJKD))
    largest = torch.full_like(q[..., :1], -1e30)  # finite: a row whose first blocks are all masked keeps exp(0) = 1
    total = torch.zeros_like(largest)
    out = torch.zeros_like(q)
    for start in range(0, k.shape[2], KEY_BLOCK):
        keys, values = k[:, :, start:start + KEY_BLOCK].contiguous(), v[:, :, start:start + KEY_BLOCK].contiguous()
        j = torch.arange(start, start + KEY_BLOCK, device=q.device)
        scores = (q @ keys.transpose(-1, -2)).masked_fill(~_visible(j, positions_NS, window)[:, None], -torch.inf)
        new_largest = torch.maximum(largest, scores.detach().amax(-1, keepdim=True))
        scale = torch.exp(largest - new_largest)
        weights = torch.exp(scores - new_largest)
        total = total * scale + weights.sum(-1, keepdim=True)
        out = out * scale + weights @ values
        largest = new_largest
    return (out / total).transpose(1, 2)[:, :queries]


def sdpa_attention(q_NSHD: Tensor, k_NJKD: Tensor, v_NJKD: Tensor, positions_NS: Tensor, window: int) -> Tensor:
    """The same by torch's SDPA with a mask: faster for long contexts, and its bits depend on the shapes."""
    mask = _visible(torch.arange(k_NJKD.shape[1], device=q_NSHD.device), positions_NS, window)[:, None]
    out = F.scaled_dot_product_attention(q_NSHD.transpose(1, 2), k_NJKD.transpose(1, 2), v_NJKD.transpose(1, 2),
                                         attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


def _visible(j: Tensor, positions_NS: Tensor, window: int) -> Tensor:
    visible = j <= positions_NS[..., None]
    return visible & (j > positions_NS[..., None] - window) if window else visible


def _pad_to(x: Tensor, dim: int, multiple: int) -> Tensor:
    missing = -x.shape[dim] % multiple
    return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x


class PackedAttention:
    """Attention within each of the packed sequences; rows behind the last one are padding and give zeros.

    `lengths` (each at least 1) are those of the sequences, in packing order; `positions` of their tokens start at 0.
    """

    def __init__(self, lengths: list[int], exact: bool, device: torch.device):
        self.attend, self.total = block_attention if exact else sdpa_attention, sum(lengths)
        starts: dict[int, list[int]] = {}
        start = 0
        for length in lengths:
            starts.setdefault(length, []).append(start)
            start += length
        self.buckets = [torch.tensor(first, device=device)[:, None] + torch.arange(length, device=device)
                        for length, first in sorted(starts.items())]
        self.inverse = torch.argsort(torch.cat([rows.flatten() for rows in self.buckets]))
        self.positions = torch.cat([torch.arange(length, device=device) for length in lengths])

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, window: int) -> Tensor:
        parts = []
        for rows_NS in self.buckets:
            q, k, v = q_THD[rows_NS], k_TKD[rows_NS], v_TKD[rows_NS]
            if self.attend is block_attention or window:
                positions = torch.arange(rows_NS.shape[1], device=q.device).expand(rows_NS.shape)
                out = self.attend(q, k, v, positions, window)
            else:  # needs no mask tensor
                out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                                                     is_causal=True, enable_gqa=True).transpose(1, 2)
            parts.append(out.flatten(0, 1))
        return torch.cat([torch.cat(parts)[self.inverse], torch.zeros_like(q_THD[self.total:])])


class PagedAttention:
    """Attention of a step's queries over each request's blocks, bucket by bucket: q [T, H, D], keys and values [slots, K, D].

    Slot = block x block_size + offset. `tables_NB`, `starts_N1` (rows of each request) and `contexts_N` (its keys, this step's
    included) are numpy arrays; entries of a table behind its context may be anything.
    """

    def __init__(self, pages: tuple[np.ndarray, np.ndarray, np.ndarray], block_size: int, exact: bool, device: torch.device):
        self.attend = block_attention if exact else sdpa_attention
        tables_NB, starts_N1, contexts_N = pages
        counts_N, used_N = np.diff(starts_N1), -(-contexts_N // block_size)
        padded_N = np.minimum(2 ** np.ceil(np.log2(used_N)).astype(np.int64), tables_NB.shape[1])
        self.buckets = []  # (rows_NS, positions_NS, slots_NJ) of requests with as many queries and about as much context
        for queries, blocks in np.unique(np.stack([counts_N, padded_N], 1), axis=0):
            members = np.flatnonzero((counts_N == queries) & (padded_N == blocks))
            table = np.where(np.arange(blocks) < used_N[members, None], tables_NB[members, :blocks], 0)
            slots_NJ = (table.astype(np.int64)[:, :, None] * block_size + np.arange(block_size)).reshape(len(members), -1)
            first = np.stack([starts_N1[members], contexts_N[members] - queries])[:, :, None]
            rows_NS, positions_NS = (first + np.arange(queries)).astype(np.int64)
            self.buckets.append([torch.from_numpy(each).to(device) for each in (rows_NS, positions_NS, slots_NJ)])

    def __call__(self, q_THD: Tensor, keys_RKD: Tensor, values_RKD: Tensor, window: int) -> Tensor:
        out = torch.zeros_like(q_THD)  # rows of no request are padding
        for rows_NS, positions_NS, slots_NJ in self.buckets:
            part = self.attend(q_THD[rows_NS], keys_RKD[slots_NJ], values_RKD[slots_NJ], positions_NS, window)
            out[rows_NS.flatten()] = part.flatten(0, 1)
        return out
