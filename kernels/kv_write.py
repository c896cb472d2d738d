"""New keys and values into the paged cache, both in one launch.

    keys[slots[t]] = k[t],  values[slots[t]] = v[t]        for t < len(slots) with slots[t] >= 0

Letters: T tokens, R slots of the cache, K KV heads, D head dim. A slot is block x block_size + offset; -1 marks a padding row, and
rows of k and v behind the last slot are padding too.
Source: vLLM's reshape_and_cache, without its layouts and its fp8 scales.

Latency-bound: 2 x 8 x 128 x 2 bytes read and written are 8 kB a token and layer for a 70B, 0.3 us at 3.35 TB/s for a batch of 128,
less than a launch costs. Hence one launch for both, and no test of the slots on the host: that would wait for the GPU 80 times a
step.

Deliberately different: slots are not checked against R, for the same reason. The scheduler owns them, and a slot beyond the cache
writes into foreign memory on a GPU (the torch version raises).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def write_kv_torch(keys_RKD: Tensor, values_RKD: Tensor, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    # Model inputs are padded to a multiple of 4 rows, slots are not.
    k_TKD, v_TKD = k_TKD[:len(slots_T)], v_TKD[:len(slots_T)]
    kept_T = slots_T >= 0
    if not kept_T.all():  # boolean indexing copies k and v; decode and most prefill steps have no padding
        slots_T, k_TKD, v_TKD = slots_T[kept_T], k_TKD[kept_T], v_TKD[kept_T]
    keys_RKD[slots_T] = k_TKD
    values_RKD[slots_T] = v_TKD


def launch(kv_heads: int, head_dim: int) -> dict:
    """All heads of a token in one program: 1024 elements of keys and as many of values, 8 of each a thread."""
    heads, dim = triton.next_power_of_2(kv_heads), triton.next_power_of_2(head_dim)
    return {"BLOCK_K": heads, "BLOCK_D": dim, "num_warps": min(8, max(1, heads * dim // 256))}


@triton.jit
def _write(keys, values, k, v, slots, heads, dim, keys_row, keys_head, values_row, values_head, k_row, k_head, v_row, v_head,
           BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    # int64: a 32-bit product of slot and row wraps at 2.1 million slots of 1024 elements, into somebody else's keys.
    slot = tl.load(slots + token).to(tl.int64)
    head = tl.arange(0, BLOCK_K).to(tl.int64)[:, None]
    feature = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < heads) & (feature < dim)
    if slot >= 0:  # one branch a program; as part of the mask the scalar breaks Triton's interpreter
        new_k = tl.load(k + token * k_row + head * k_head + feature, mask=mask)
        new_v = tl.load(v + token * v_row + head * v_head + feature, mask=mask)
        tl.store(keys + slot * keys_row + head * keys_head + feature, new_k, mask=mask)
        tl.store(values + slot * values_row + head * values_head + feature, new_v, mask=mask)


def write_kv_triton(keys_RKD: Tensor, values_RKD: Tensor, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    heads, dim = keys_RKD.shape[1:]
    tensors = keys_RKD, values_RKD, k_TKD, v_TKD
    assert all(x.shape[1:] == (heads, dim) and x.dtype == keys_RKD.dtype and x.stride(2) == 1 for x in tensors), \
        f"cache and new keys differ in heads, head dim, type, or are not contiguous in it: {[(x.shape, x.dtype) for x in tensors]}"
    assert len(slots_T) <= min(len(k_TKD), len(v_TKD)), "more slots than new rows: memory behind them would enter the cache"
    # k and v are slices of one qkv product and keys and values of one cache: four tensors, four pairs of strides, no copy.
    strides = [stride for x in tensors for stride in x.stride()[:2]]
    _write[(len(slots_T),)](*tensors, slots_T.contiguous(), heads, dim, *strides, **launch(heads, dim))


@torch.no_grad()  # nothing flows back through a cache, and without this a rollout would keep its graph alive
def write_kv(keys_RKD: Tensor, values_RKD: Tensor, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    """In place. Two rows must not name the same slot: which of them stays would be chance."""
    (write_kv_triton if keys_RKD.is_cuda else write_kv_torch)(keys_RKD, values_RKD, k_TKD, v_TKD, slots_T)
