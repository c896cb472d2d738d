"""The Triton attention kernels, run by Triton's interpreter on the CPU, and their torch versions, against a float64 textbook.

bf16 is silently wrong in the interpreter, so values are tested in fp32 and fp16; that bf16 compiles and fits is aot_attention's.
"""

import math
import mmap
import sys
from types import SimpleNamespace

import aot
import pytest
import torch
from aot_attention import ENTRIES, FEW, entry
from torch import Tensor

import kernels.packed_attention as packed
import kernels.paged_attention as paged
from kernels.paged_attention import Pages, decode_splits

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}  # of values around 1
PAGED = {"triton": paged.paged_attention_triton, "torch": paged.paged_attention_torch}
PACKED = {"triton": packed.packed_attention_triton, "torch": packed.packed_attention_torch}


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    """torch.empty gives NaN, so that a row which no kernel writes cannot pass for zeros by luck."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def textbook(q_SHD: Tensor, k_JKD: Tensor, v_JKD: Tensor, window: int) -> Tensor:
    """One query at a time in float64; the queries are the last S of the J positions. Differentiable."""
    repeat, rows = q_SHD.shape[1] // k_JKD.shape[1], []
    k, v = (x.double().repeat_interleave(repeat, 1) for x in (k_JKD, v_JKD))
    for i, q_HD in enumerate(q_SHD.double()):
        position = len(k) - len(q_SHD) + i
        seen = slice(max(0, position - window + 1) if window else 0, position + 1)
        weights_JH = ((q_HD * k[seen]).sum(-1) / math.sqrt(q_SHD.shape[2])).softmax(0)
        rows.append((weights_JH[..., None] * v[seen]).sum(0))
    return torch.stack(rows)


def fused_views(T: int, H: int, K: int, D: int, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(qkv, its strided views q_THD, k_TKD, v_TKD), as a fused projection gives them."""
    qkv = torch.randn(T, (H + 2 * K) * D).to(dtype)
    return qkv, tuple(part.unflatten(1, (-1, D)) for part in qkv.split([H * D, K * D, K * D], 1))


def paged_case(contexts: list[int], queries: list[int], H: int, K: int, D: int, dtype: torch.dtype, block_size: int = 16,
               spare_rows: int = 2):
    """(q, keys, values, pages, what `textbook` needs of each request): pages scattered over a pool.

    Slots of nobody, page 0 (where a masked lookup points) and the slots behind a context among them, hold NaN, and so do the pages
    that table entries behind a context name: -1 and one too many.
    """
    torch.manual_seed(0)
    blocks = [-(-context // block_size) for context in contexts]
    owned = (1 + torch.randperm(sum(blocks))).split(blocks)
    tables = torch.tensor([-1, sum(blocks) + 1]).int().repeat(len(contexts), max(blocks) + 4)
    keys, values = torch.full((2, (sum(blocks) + 3) * block_size, K, D), torch.nan, dtype=dtype)[:, block_size:-block_size]
    histories = []
    for n, (context, mine) in enumerate(zip(contexts, owned, strict=True)):
        tables[n, :len(mine)] = mine.int()
        slots = (mine[:, None] * block_size + torch.arange(block_size)).flatten()[:context]
        keys[slots], values[slots] = torch.randn(2, context, K, D).to(dtype)
        histories.append((keys[slots], values[slots]))
    starts = torch.tensor([0, *queries]).cumsum(0)
    q_THD = fused_views(int(starts[-1]) + spare_rows, H, K, D, dtype)[1][0]
    decodes = next((n for n, count in enumerate(queries) if count != 1), len(queries))
    pages = Pages(tables, starts.int(), torch.tensor(contexts).int(), block_size, max(queries), decodes, max(contexts))
    return q_THD, keys, values, pages, [(q_THD[a:b], *kv) for a, b, kv in zip(starts, starts[1:], histories, strict=False)]


def check_paged(o_THD: Tensor, requests: list, window: int):
    """Every request as in the textbook; those without context, and the rows behind the last request, exactly zero."""
    first = 0
    for n, (q_SHD, k_JKD, v_JKD) in enumerate(requests):
        here = o_THD[first:first + len(q_SHD)]
        first += len(q_SHD)
        if len(k_JKD) == 0:
            assert torch.equal(here, torch.zeros_like(here)), f"request {n} has no context, but an output"
        else:
            torch.testing.assert_close(here.double(), textbook(q_SHD, k_JKD, v_JKD, window), rtol=0,
                                       atol=TOLERANCE[o_THD.dtype], msg=lambda text, n=n: f"request {n}: {text}")
    assert torch.equal(o_THD[first:], torch.zeros_like(o_THD[first:])), "rows of no request must be zeros"


SHAPES = [  # H, K, D, dtype, window: shorter than a page, shorter and longer than a key block
    (6, 2, 64, torch.float16, 0), (2, 2, 128, torch.float32, 0), (4, 1, 80, torch.float16, 100), (3, 1, 96, torch.float32, 5),
    (8, 1, 128, torch.float16, 5), (1, 1, 64, torch.float32, 100),
]


@pytest.mark.parametrize("implementation", PAGED)
@pytest.mark.parametrize("H, K, D, dtype, window", SHAPES)
def test_mixed_batch(implementation, H, K, D, dtype, window):
    """Decodes and chunks of prompts in one call, contexts around a page's border, a padding row among them: an off-by-one in
    slots, positions, windows or the packing of heads into rows, or a read of another request's or of nobody's memory."""
    # 51 - 40 + 21: where 21 queries of 3 heads fill 63 of 64 rows, the last row must not be the next tile's first query.
    contexts, queries = [1, 15, 0, 16, 17, 300, 51, 170, 16], [1, 1, 1, 1, 1, 1, 40, 37, 2]
    *arguments, requests = paged_case(contexts, queries, H, K, D, dtype)
    check_paged(PAGED[implementation](*arguments, window), requests, window)


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("window", [0, 10, 300])
def test_splits(splits, window, monkeypatch):
    """Any number of splits gives the one answer: shares that miss or repeat keys at their borders, or count the window's start
    twice, empty splits that count (40 splits of at most 11 key blocks), padding rows that come out of the reduction as NaN."""
    monkeypatch.setattr(paged, "decode_splits", lambda *_: splits)
    *arguments, requests = paged_case([700, 0, 64, 65, 1, 257], [1] * 6, 3, 1, 64, torch.float32, spare_rows=0)
    check_paged(paged.paged_attention_triton(*arguments, window), requests, window)


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_block_sizes(block_size):
    """A key step spans many pages, or a page several steps: a lookup once a step instead of once a key."""
    *arguments, requests = paged_case([127, 128, 129, 200], [1, 1, 1, 90], 2, 1, 64, torch.float32, block_size)
    check_paged(paged.paged_attention_triton(*arguments, 0), requests, 0)


def test_only_prefill_and_only_decode():
    """A step with no decodes, and one whose rows are all decodes: an empty launch, or NaN in memory that nobody wrote."""
    for queries in ([5, 3], [1, 1]):
        *arguments, requests = paged_case([20, 3], queries, 2, 1, 64, torch.float32, spare_rows=0)
        check_paged(paged.paged_attention_triton(*arguments, 0), requests, 0)


def test_large_page_ids():
    """Offsets beyond 2^31 numbers: int32 page arithmetic reads other pages, or unmapped memory, once the cache has 4 GB."""
    D, block_size, blocks = 64, 16, 2**20 + 8
    rows = blocks * block_size
    # Takes RAM where touched. The cache is its upper half, so that an offset that wraps to -2^31 reads zeros and does not crash.
    memory = mmap.mmap(-1, 2 * rows * 2 * D * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    keys, values = torch.frombuffer(memory, dtype=torch.float16).view(2 * rows, 1, 2 * D)[rows:].split(D, 2)
    torch.manual_seed(0)
    tables = torch.tensor([[2**20 + 5, 3], [2**20 + 1, 2**20 + 7]]).int()
    slots = (tables.long()[..., None] * block_size + torch.arange(block_size)).flatten(1)[:, :30]
    for one in slots:
        keys[one], values[one] = torch.randn(2, 30, 1, D).half()
    q = torch.randn(6, 2, D).half()
    pages = Pages(tables, torch.tensor([0, 1, 6]).int(), torch.tensor([30, 30]).int(), block_size, 5, 1, 30)
    assert slots.max() * keys.stride(0) > 2**31
    o_THD = paged.paged_attention_triton(q, keys, values, pages, 0)
    check_paged(o_THD, [(q[:1], keys[slots[0]], values[slots[0]]), (q[1:], keys[slots[1]], values[slots[1]])], 0)


def test_a_row_does_not_depend_on_its_batch_mates():
    """Alone, a request is cut into more splits than in a batch: the sums may differ in order only, 1e-6."""
    q, keys, values, pages, _ = paged_case([300, 20, 500, 0, 77], [1] * 5, 4, 2, 64, torch.float32, spare_rows=0)
    together = paged.paged_attention_triton(q, keys, values, pages, 0)
    for n in (0, 1, 2, 4):
        alone = Pages(pages.tables_NB[n:n + 1], pages.query_starts_N1[:2], pages.contexts_N[n:n + 1], 16, 1, 1, 4096)
        torch.testing.assert_close(paged.paged_attention_triton(q[n:n + 1], keys, values, alone, 0), together[n:n + 1],
                                   rtol=0, atol=1e-6)


def test_launches_read_no_device_data(monkeypatch):
    """A captured CUDA graph replays its grids with other contexts: a grid taken from tensors' values would be a stale one. Meta
    tensors have no values to read."""
    grids = {}

    class Recorder:
        def __init__(self, name: str):
            self.name = name

        def __getitem__(self, grid):
            grids[self.name] = grid
            return lambda *_, **__: None

    for name in ("_decode", "_reduce", "_prefill"):
        monkeypatch.setattr(paged, name, Recorder(name))
    meta = {"device": "meta", "dtype": torch.int32}
    pages = Pages(torch.empty(6, 9, **meta), torch.empty(7, **meta), torch.empty(6, **meta), 16, 100, 4, 32_768)
    cache = torch.empty(160, 8, 128, device="meta", dtype=torch.bfloat16)
    paged.paged_attention_triton(torch.empty(204, 64, 128, device="meta", dtype=torch.bfloat16), cache, cache, pages, 0)
    assert grids == {"_decode": (4, 8, 17), "_reduce": (4, 64), "_prefill": (7, 8, 2)}


def test_decode_splits_fill_the_gpu():
    """One split for a large batch, else enough programs for 132 SMs: a lone long request read by 8 of 132 SMs takes 16 times as
    long, and splits below 256 keys cost more than they bring."""
    assert decode_splits(128, 8, 32_768) == decode_splits(66, 8, 32_768) == 1
    assert decode_splits(1, 8, 256) == decode_splits(1, 1, 1) == 1
    assert decode_splits(1, 8, 257) == 2
    for requests in (1, 3, 16, 64):
        for kv_heads in (1, 3, 8):
            splits = decode_splits(requests, kv_heads, 262_144)
            assert requests * kv_heads * splits >= 4 * 132 > requests * kv_heads * (splits - 1)


@pytest.mark.parametrize("repeat", [1, 3, 7, 8, 16, 24, 64])
def test_tiles_hold_every_head(repeat):
    """All query heads of a KV head must be rows of one tile of at least 16, else tl.dot refuses or heads are lost."""
    for itemsize in (2, 4):
        decode, prefill = paged.decode_launch(128, repeat, itemsize), paged.prefill_launch(128, repeat, itemsize)
        assert decode["M"] >= max(16, repeat) and prefill["M"] >= repeat
        assert decode["M"] & (decode["M"] - 1) == 0 and min(decode["BLOCK_J"], prefill["BLOCK_J"]) >= 16
    with pytest.raises(AssertionError, match="do not fit"):
        paged.prefill_launch(128, 256, 2)


@pytest.mark.parametrize("implementation", PACKED)
@pytest.mark.parametrize("H, K, D, dtype, window", SHAPES)
def test_packed_values_and_gradients(implementation, H, K, D, dtype, window):
    """Sequences of 1, 2, and beyond a tile, as views of a fused projection, NaN in the rows behind them: masks at tile borders,
    lse and delta of the wrong row, dk and dv that miss a query head, neighbours or padding that leak in."""
    torch.manual_seed(0)
    lengths, padding = [1, 140, 2, 65], 3
    total = sum(lengths)
    qkv, _ = fused_views(total + padding, H, K, D, dtype)
    qkv[total:] = torch.nan
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    upstream = torch.randn(total + padding, H, D).to(dtype)

    def run(leaf: Tensor, attend) -> tuple[Tensor, Tensor]:
        leaf = leaf.requires_grad_()
        parts = [part.unflatten(1, (-1, D)) for part in leaf.split([H * D, K * D, K * D], 1)]
        o_THD = attend(*parts)
        return o_THD.detach(), torch.autograd.grad(o_THD, leaf, upstream[:len(o_THD)].to(o_THD.dtype))[0]

    o_THD, grad = run(qkv.clone(), lambda q, k, v: PACKED[implementation](q, k, v, cu, max(lengths), window))
    expected, expected_grad = run(qkv[:total].double(), lambda q, k, v: torch.cat(
        [textbook(q[a:b], k[a:b], v[a:b], window) for a, b in zip(cu, cu[1:], strict=False)]))
    torch.testing.assert_close(o_THD[:total].double(), expected, rtol=0, atol=TOLERANCE[dtype])
    # Gradients of k and v sum over up to 140 queries of 8 heads: compared with the largest.
    for name, found, wanted in zip(("dq", "dk", "dv"), grad[:total].double().split([H * D, K * D, K * D], 1),
                                   expected_grad.split([H * D, K * D, K * D], 1), strict=True):
        worst = (found - wanted).abs().max() / wanted.abs().max()
        assert worst < TOLERANCE[dtype], f"{name} is off by {worst:.1e} of its largest value"
    assert torch.equal(o_THD[total:], torch.zeros_like(o_THD[total:])), "rows behind the last sequence must be zeros"
    assert torch.equal(grad[total:], torch.zeros_like(grad[total:])), "and get no gradient"


def test_packed_upstream_gradient_is_read_as_it_lies():
    """`sum().backward()` sends an expanded gradient, whose strides are all zero: reading it as contiguous leaves its memory."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(20, 1, 64, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 20]).int()
    found = torch.autograd.grad(packed.packed_attention_triton(q, k, v, cu, 20, 0).sum(), (q, k, v))
    for one, wanted in zip(found, torch.autograd.grad(textbook(q, k, v, 0).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(one, wanted, rtol=0, atol=5e-6)


@pytest.mark.parametrize("window", [0, 3])
def test_flash_attn_is_called_as_documented(window, monkeypatch):
    """flash-attn counts `window_size` in keys before the query, and leaves rows behind the last sequence, and their gradients,
    uninitialised: a window one too long, or NaN weights after the first step. A stand-in does what its documentation says."""
    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size):
        assert causal and window_size[1] == (0 if window else -1) and max_seqlen_q == max_seqlen_k == 9
        total, left = int(cu_seqlens_q[-1]), window_size[0]
        inner = packed.packed_attention_torch(q[:total], k[:total], v[:total], cu_seqlens_k, 9, left + 1 if left >= 0 else 0)
        for x in (q, k, v):
            x.register_hook(lambda grad: torch.cat([grad[:total], torch.full_like(grad[total:], torch.nan)]))
        return torch.cat([inner, torch.full_like(q[total:], torch.nan)])

    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    torch.manual_seed(0)
    q, k, v = (torch.randn(16, heads, 64, requires_grad=True) for heads in (2, 1, 1))
    cu, upstream = torch.tensor([0, 5, 14]).int(), torch.randn(16, 2, 64)
    results = []
    for attend in (packed.packed_attention_flash, packed.packed_attention_torch):
        o_THD = attend(q, k, v, cu, 9, window)
        results.append((o_THD, *torch.autograd.grad(o_THD, (q, k, v), upstream)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)


def test_dispatch(monkeypatch):
    """CPU tensors go to torch, GPU tensors to flash-attn where there is one, else to Triton: a wrong branch crashes or crawls."""
    calls = []
    for module, name in ((paged, "paged_attention_torch"), (paged, "paged_attention_triton"), (packed, "packed_attention_torch"),
                         (packed, "packed_attention_triton"), (packed, "packed_attention_flash")):
        monkeypatch.setattr(module, name, lambda *_, name=name: calls.append(name))
    for is_cuda in (False, True):
        paged.paged_attention(SimpleNamespace(is_cuda=is_cuda), None, None, None, 0)
        for flash in (False, True):
            monkeypatch.setattr(packed, "FLASH", flash)
            packed.packed_attention(SimpleNamespace(is_cuda=is_cuda), None, None, None, 0, 0)
    assert calls == ["paged_attention_torch", "packed_attention_torch", "packed_attention_torch",
                     "paged_attention_triton", "packed_attention_triton", "packed_attention_flash"]


@pytest.mark.long
def test_compiles_without_spills():
    """What the interpreter accepts the compiler may refuse; a spill or a tile too large for shared memory shows here only."""
    aot.check(FEW)


@pytest.mark.long
def test_every_shape_compiles_without_spills():
    """The same for all shapes of head, with windows, and for A100: a tile that fits one of them need not fit the others."""
    aot.check(ENTRIES)


@pytest.mark.long
def test_the_check_bites():
    """dk and dv of 128 keys and 64 queries do not fit into 8 warps' registers: a check that passes this would pass anything."""
    kernel, arch, types, constants, _ = next(one for one in ENTRIES if "_backward_kv" in one[0])
    with pytest.raises(AssertionError, match="spills"):
        aot.check([entry(kernel.removeprefix("kernels."), arch, types, constants | {
            "BLOCK_S": 64, "BLOCK_J": 128, "num_warps": 8, "num_stages": 2})])
