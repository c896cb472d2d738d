"""The compiled loops of a CPU engine (kernels/rows.py, kernels/row_attention.py) against float64, and against PagedAttention."""

import itertools
import math

import numpy as np
import pytest
import torch

from kernels.attention import PagedAttention
from runner import SHORT, AttendByRows

CPU = torch.device("cpu")


def test_norm_by_rows():
    """A residual that is not added, a weight of another feature, an epsilon outside the root."""
    pytest.importorskip("numba")
    from kernels.rows import norm_rows
    draw = torch.Generator().manual_seed(0)
    for rows, width in ((1, 5), (7, 123), (40, 64), (200, 123)):  # the last one by all threads
        x, residual, weight = (torch.randn(*size, generator=draw) for size in ((rows, width), (rows, width), (width,)))
        plain = x + residual
        wide = x.double() + residual.double()
        y, total = norm_rows(x, weight, 1e-3, residual)
        right = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
        assert torch.equal(total, plain)
        torch.testing.assert_close(y.double(), right, atol=1e-6, rtol=1e-6)


def test_silu_by_rows():
    """Halves of one fused tensor read as if each were contiguous, gate and up changed round, an exponential that overflows."""
    pytest.importorskip("numba")
    from kernels.rows import silu_rows
    draw = torch.Generator().manual_seed(0)
    for rows, width in ((1, 5), (7, 123), (40, 64)):
        both = 3 * torch.randn(rows, 2 * width + 1, generator=draw)
        both[0, :3] = torch.tensor([-100.0, 100.0, -0.0])
        gate, up = both[:, :width], both[:, width:2 * width]
        right = gate.double() * gate.double().sigmoid() * up.double()
        torch.testing.assert_close(silu_rows(gate, up).double(), right, atol=1e-6, rtol=1e-6)
    assert silu_rows(torch.tensor([[torch.nan]]), torch.ones(1, 1)).isnan().all(), "NaN must be seen"


@pytest.mark.parametrize("vocab", [3, 300, 5003])
def test_draws_by_rows(vocab):
    """The token before or after, a masked id, a tail lost to rounding, a tempered greedy logprob, NaN that a comparison drops."""
    pytest.importorskip("numba")
    from kernels.rows import draw_rows
    draw = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(60, vocab, generator=draw)
    logits[torch.rand(60, vocab, generator=draw) < 0.3] = -torch.inf
    logits[:, 1] = 0.0
    logits[5, 0], logits[6], logits[7, -1], logits[8, 2] = torch.nan, -torch.inf, torch.nan, torch.inf
    temperature = torch.tensor([0.0, 0.01, 0.7, 1.0, 5.0]).repeat(12)
    numbers = torch.rand(60, generator=draw, dtype=torch.float64)
    numbers[:20], numbers[20:40] = 0.0, 1 - 2.0**-48
    tokens, logprobs = draw_rows(logits, temperature, numbers)
    assert logprobs[5:9].isnan().all() and logprobs.isfinite().sum() == 56
    for row in [*range(5), *range(9, 60)]:
        t = float(temperature[row])
        logp = torch.log_softmax(logits[row].double() / (t or 1.0), -1)
        below = logp.exp().cumsum(0)
        token = int(tokens[row])
        assert logprobs[row].item() == pytest.approx(logp[token].item(), abs=2e-6, rel=2e-6) and logprobs[row] <= 0
        if t == 0:
            assert token == int(logits[row].argmax())
        else:  # fp32 sums may decide a tie of 1e-6 either way
            assert logp[token] > -88 and below[token] > numbers[row] - 1e-6
            assert token == 0 or below[token - 1] <= numbers[row] * below[-1] + 1e-6


def turned(x_THD: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Each pair (i, i + D/2) as a complex number, turned."""
    points = torch.complex(*x_THD.double().chunk(2, -1)) * torch.polar(torch.ones(()).double(), angles.double())
    return torch.cat([points.real, points.imag], -1).float()


def attention_float64(q, keys, values, pages, size: int, window: int) -> torch.Tensor:
    """The formula, a query head of a row at a time; rows of no request are zeros."""
    tables, starts, contexts = pages
    out, repeat = torch.zeros(q.shape, dtype=torch.float64), q.shape[1] // keys.shape[1]
    for n, context in enumerate(contexts):
        slots = [int(tables[n, j // size]) * size + j % size for j in range(context)]
        for row in range(starts[n], starts[n + 1]):
            position = context - (starts[n + 1] - row)
            seen = slots[max(0, position + 1 - window) if window else 0:position + 1]
            for head in range(q.shape[1]):
                k, v = keys[seen, head // repeat].double(), values[seen, head // repeat].double()
                out[row, head] = torch.softmax(k @ q[row, head].double() / math.sqrt(q.shape[2]), 0) @ v
    return out


def paged_batch(counts: list[int], befores: list[int], size: int, heads: tuple[int, int], garbage: float, seed: int):
    """(q with two rows of no request, keys, values, pages): scattered blocks, garbage wherever nobody may look."""
    rng, (q_heads, kv_heads) = np.random.default_rng(seed), heads
    contexts = np.array([count + before for count, before in zip(counts, befores, strict=True)], np.int32)
    used = -(-contexts // size)
    free = rng.permutation(int(used.sum()) + 5)
    tables = rng.choice(np.array([-1, 10**6], np.int32), (len(counts), int(used.max()) + 2))
    seen = []
    for n, blocks in enumerate(used):
        tables[n, :blocks], free = free[:blocks], free[blocks:]
        seen += [tables[n, j // size] * size + j % size for j in range(contexts[n])]
    keys, values = torch.full((2, (int(used.sum()) + 5) * size, kv_heads, 16), garbage)
    keys[seen], values[seen] = torch.from_numpy(rng.standard_normal((2, len(seen), kv_heads, 16)).astype(np.float32))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    q = torch.from_numpy(rng.standard_normal((int(starts[-1]) + 2, q_heads, 16)).astype(np.float32))
    return q, keys, values, (tables, starts, contexts)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 4, pytest.param(16, marks=pytest.mark.long)])
@pytest.mark.parametrize(("counts", "befores"), [
    ([1, 1, 1], [0, 36, 7]), ([1, 5, SHORT], [15, 16, 3]), ([SHORT + 1], [0]), ([1, 2, SHORT, SHORT + 1, 40], [31, 0, 1, 9, 0]),
    ([SHORT + 1, 30, 1, SHORT + 1], [4, 0, 8, 12])], ids=["decode", "short", "one chunk", "mixed", "chunks first"])
def test_rows_against_the_formula_in_float64(counts, befores, size):
    """A page too few or too many, a window off by one, another request's rows, a head of the wrong group."""
    pytest.importorskip("numba")
    garbage = torch.nan if max(counts) <= SHORT else 1e3  # a long chunk gathers whole pages and masks
    cases = [*itertools.product(((6, 1), (6, 2), (6, 6)), (0, 1, 5, size)), ((6, 3), 0), ((4, 1), 5)]  # tiles of 3, 3, 1, 2, 4
    for seed, ((heads, kv_heads), window) in enumerate(cases):
        q, keys, values, pages = paged_batch(counts, befores, size, (heads, kv_heads), garbage, seed)
        q[:, ::2] *= 8  # some rows see one key, some all of them
        wanted = attention_float64(q, keys, values, pages, size, window)
        tables, starts, contexts = pages
        slots = torch.tensor([int(tables[n, position // size]) * size + position % size for n, context in enumerate(contexts)
                              for position in range(context - counts[n], context)])
        angles = 9 * torch.rand(len(q), 1, 8, generator=torch.Generator().manual_seed(seed))
        cache, fused = torch.stack([keys, values])[None].clone(), torch.full((len(q), heads + 2 * kv_heads, 16), 0.5)
        fused[:, :heads], fused[:len(slots), heads:-kv_heads], fused[:len(slots), -kv_heads:] = q, keys[slots], values[slots]
        fused[:, :-kv_heads] = turned(fused[:, :-kv_heads], -angles)  # what the call must turn back
        cache[:, :, slots] = 1e6  # what it must write first
        twice = angles.repeat(1, 1, 2)
        attend = AttendByRows(cache, (slots, twice.cos(), twice.sin()), pages, size)
        out = attend(fused[:, :heads], fused[:, heads:-kv_heads], fused[:, -kv_heads:], 0, window)
        torch.testing.assert_close(cache[0], torch.stack([keys, values]), atol=1e-5, rtol=1e-5, equal_nan=True)
        torch.testing.assert_close(out.double(), wanted, atol=2e-5, rtol=0)
        assert not out[-2:].any(), "rows of no request"
        finite = keys.nan_to_num(1e3), values.nan_to_num(1e3)
        torch.testing.assert_close(out, PagedAttention(pages, size, False, CPU)(q, *finite, window), atol=2e-5, rtol=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_samples_of_a_prompt_visit_its_pages_together(threads, monkeypatch):
    """A page shared too far, a sibling of another prompt, a family cut by a thread's part or longer than its limit."""
    pytest.importorskip("numba")
    from kernels.row_attention import FAMILY
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    size, siblings = 4, [FAMILY + 5, 1, 3, 2]
    befores = [16 + (5 * n) % 23 for n in range(sum(siblings))]
    q, keys, values, pages = paged_batch([1] * len(befores), befores, size, (6, 2), torch.nan, 0)
    tables, leader = pages[0], 0
    for number, count in enumerate(siblings):
        tables[leader:leader + count, :3 + number % 2] = tables[leader, :3 + number % 2]  # 3 or 4 full pages of a prompt
        leader += count
    tables[:, 0] = tables[0, 0]  # and one of a common instruction
    slots = torch.tensor([int(tables[n, at // size]) * size + at % size for n, at in enumerate(befores)])
    cache = torch.stack([keys, values])[None]
    still = torch.ones(len(q), 1, 16), torch.zeros(len(q), 1, 16)
    k, v = (torch.zeros(len(q), 2, 16) for _ in range(2))
    k[:-2], v[:-2] = cache[0][:, slots]
    for window in (0, 6):
        attend = AttendByRows(cache, (slots, *still), pages, size)
        out = attend(q, k, v, 0, window)
        torch.testing.assert_close(out.double(), attention_float64(q, keys, values, pages, size, window), atol=2e-5, rtol=0)
        families, visits, _ = attend.visits(window)
        spared = sum(-(-(before + 1) // size) for before in befores) - len(visits)
        if window:
            assert len(families) - 1 == len(befores)
        else:  # of FAMILY + 5, 1, 3 and 2 samples, whatever the cuts
            assert len(families) - 1 <= 5 + threads and spared >= 3 * (FAMILY + 5 - 1 - threads)
