"""kernels/sampling.py on the CPU and in Triton's interpreter, against sorting in plain Python and float64."""

import math

import aot
import aot_sampling
import pytest
import torch
import triton

from kernels import sampling
from kernels.logprob import head_logits, log_probs
from kernels.sampling import Knobs, sample, sample_triton

BOTH = pytest.mark.parametrize("draw", [sample, sample_triton], ids=["cpu", "triton"])
ALMOST_ONE = 1 - 2.0**-48
OFF = (1.0, 0, 1.0, 0.0)


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 64 logits instead of 2048: several a row where the vocabulary is small, and less to interpret."""
    monkeypatch.setattr(sampling, "launch", lambda vocab: {"BLOCK": 64, "BLOCKS": triton.next_power_of_2(-(-vocab // 64))})


def textbook_kept(z: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """Float64 probabilities (unnormalised) of tempered logits, 0 where a sort drops the token; ties with the last one kept stay."""
    largest = max(z)
    p = [math.exp(value - largest) for value in z]
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if top_k:
        order = [token for token in order if p[token] >= p[order[min(top_k, len(order)) - 1]]]
    if top_p < 1:
        needed, mass = top_p * math.fsum(p[token] for token in order), 0.0
        for last in order:
            mass += p[last]
            if mass >= needed:
                break
        order = [token for token in order if p[token] >= p[last]]
    kept = {token for token in order if p[token] >= min_p}
    return [p[token] if token in kept else 0.0 for token in range(len(p))]


def textbook(logits: torch.Tensor, row: tuple, u: float) -> tuple[int, float, float]:
    """(token, logprob, how near u lies to the boundary of another token, as a share of the mass kept)."""
    temperature = row[0] or 1.0
    z = (logits.double() / temperature).tolist()
    logp = torch.log_softmax(torch.tensor(z, dtype=torch.float64), -1)
    if row[0] == 0:
        token = max(range(len(z)), key=lambda token: (z[token], -token))
        return token, logp[token].item(), 1.0
    kept = textbook_kept(z, *row[1:])
    total, running = math.fsum(kept), 0.0
    for token, p in enumerate(kept):
        running += p
        if running > u * total:
            return token, logp[token].item(), min(running - u * total, u * total - running + p) / total
    raise AssertionError("no token")


def support(draw, p: list[float], row: tuple, count: int = 24) -> list[int]:
    """The tokens that a grid of uniforms reaches."""
    logits = torch.tensor(p).log().expand(count, -1).contiguous()
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return sorted(set(draw(logits, Knobs.of([row] * count, "cpu"), grid)[0].tolist()))


ROWS = [OFF, (0.7, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (1.3, 20, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (0.8, 0, 1.0, 0.1),
        (1.5, 60, 0.6, 0.02), (0.01, 0, 1.0, 0.0), (0.0, 5, 0.5, 0.5), (2.0, 1, 1.0, 0.0), (1.0, 10_000, 0.999, 0.0)]


@BOTH
@pytest.mark.parametrize("R, V, masked", [(1, 123, 0), (5, 123, 3), (5, 1000, 100), (7, 5003, 7)])
def test_tokens_and_logprobs_are_the_textbooks(draw, R, V, masked):
    """Top-p before top-k, a nucleus over unrenormalised mass, a truncated or untempered logprob, rows that take their neighbour's
    knobs, a search that is off by one at a block's edge."""
    generator = torch.Generator().manual_seed(V)
    logits = 2 * torch.randn(R, V, generator=generator)
    logits[:, V - masked:] = -torch.inf
    decided = 0
    for shift in range(3 if V < 5000 else 1):
        rows = [ROWS[(row + 4 * shift) % len(ROWS)] for row in range(R)]
        uniforms = torch.rand(R, generator=generator, dtype=torch.float64)
        tokens, logprobs = draw(logits, Knobs.of(rows, "cpu"), uniforms)
        assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float32 and tokens.shape == logprobs.shape == (R,)
        for row in range(R):
            token, logprob, margin = textbook(logits[row], rows[row], uniforms[row].item())
            if margin > 1e-5:  # nearer, fp32 may round to the other side
                assert tokens[row] == token, rows[row]
                assert logprobs[row].item() == pytest.approx(logprob, abs=2e-5 / (rows[row][0] or 1))
                decided += 1
    assert decided >= R


@BOTH
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("top_p, kept", [(0.8, [0, 1, 2]), (0.0, [0]), (1e-8, [0]), (1.0, [0, 1, 2, 3]), (0.95, [0, 1, 2, 3])])
def test_e7_top_p_keeps_the_fewest_that_reach_it(draw, top_p, kept):
    """E7: .4 .3 .2 .1 with top-p .8 keeps 3 (2 where mass must stay below), 0 and 1e-8 the argmax rather than nothing, 1 all."""
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        p = [0.0] * 4
        for token, value in zip(order, (0.4, 0.3, 0.2, 0.1), strict=True):
            p[token] = value
        assert support(draw, p, (1.0, 0, top_p, 0.0)) == sorted(order[rank] for rank in kept)


@BOTH
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("row, kept", [
    ((1.0, 2, 1.0, 0.0), [0, 1]), ((1.0, 3, 0.75, 0.0), [0, 1]), ((1.0, 3, 0.8, 0.0), [0, 1, 2]), ((1.0, 0, 1.0, 0.49), [0, 1, 2]),
    ((1.0, 0, 1.0, 1.0), [0]), ((1.0, 0, 0.7, 0.6), [0, 1]), ((1.0, 4, 1.0, 0.0), [0, 1, 2, 3]), ((0.5, 0, 0.8, 0.0), [0, 1])])
def test_truncations_compose(draw, row, kept):
    """Top-k 3 leaves .9, of which .75 is .675: without renormalising, or with top-p first, a third token stays; min-p is relative
    to the largest; the temperature sharpens before the nucleus is measured."""
    assert support(draw, [0.401, 0.3, 0.2005, 0.0985], row) == kept


@BOTH
@pytest.mark.usefixtures("small_blocks")
def test_ties_with_the_last_token_kept_are_kept(draw):
    """A sort that drops one of two equal tokens, by an order that differs between CPU and GPU; zeros of either sign are equal."""
    assert support(draw, [0.2, 0.3, 0.2, 0.2, 0.1], (1.0, 2, 1.0, 0.0), 10) == [0, 1, 2, 3]
    assert support(draw, [0.2, 0.3, 0.2, 0.2, 0.1], (1.0, 0, 0.45, 0.0), 10) == [0, 1, 2, 3]
    assert support(draw, [0.3, 0.3, 0.3, 0.1], (1.0, 0, 0.0, 0.0), 10) == [0, 1, 2]
    logits = torch.tensor([[0.0, -0.0, -1.0, -0.0]]).expand(12, -1).contiguous()
    tokens, _ = draw(logits, Knobs.of([(1.0, 1, 1.0, 0.0)] * 12, "cpu"), torch.arange(12) / 12)
    assert set(tokens.tolist()) == {0, 1, 3}


@BOTH
def test_e1_logprob_is_tempered_and_never_truncated(draw):
    """E1: logits [2, 0] at T .5: -0.018150, also where truncation leaves one token (0 if renormalised); greedy counts as T 1."""
    rows = [(0.5, 0, 1.0, 0.0), (0.5, 1, 1.0, 0.0), (0.5, 0, 0.1, 0.0), (0.5, 0, 1.0, 1.0), (0.0, 0, 1.0, 0.0)]
    tokens, logprobs = draw(torch.tensor([[2.0, 0.0]] * 5), Knobs.of(rows, "cpu"), torch.full((5,), 0.5))
    assert tokens.tolist() == [0] * 5
    assert logprobs.tolist() == pytest.approx([-0.018150] * 4 + [-0.126928], abs=1e-6)


@BOTH
@pytest.mark.parametrize("row", [OFF, (1.2, 300, 1.0, 0.0), (1.2, 0, 0.97, 0.0), (0.01, 0, 1.0, 0.0)])
def test_e5_e8_a_token_without_probability_is_never_drawn(draw, row):
    """u = 0 takes a masked first id, u next to 1 (or rounded to it) runs past the last id with a probability; -inf in a logprob."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 4500, generator=generator)
    logits[:, :300] = -torch.inf
    logits[:, 4400:] = -torch.inf
    logits[0, 700:4300] = -torch.inf  # blocks that are masked altogether between others
    logits[1] = torch.where(torch.arange(4500) == 1500, 50.0, -90.0)  # exp(-140 / 1.2) is 0 in fp32
    edges = torch.tensor([0.0, 2.0**-48, ALMOST_ONE, 1.0], dtype=torch.float64)
    logits, uniforms = logits.repeat(4, 1), edges.repeat_interleave(3)
    tokens, logprobs = draw(logits, Knobs.of([row] * 12, "cpu"), uniforms)
    assert all(logits[index, token] > -torch.inf for index, token in enumerate(tokens))
    assert (tokens[1::3] == 1500).all() and torch.isfinite(logprobs).all() and (logprobs <= 0).all()


@BOTH
@pytest.mark.usefixtures("small_blocks")
def test_e5_ids_beyond_the_tokenizer_are_never_sampled(draw):
    """E5: masked ids among 10^4 draws at T 1.2, or as the argmax."""
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    logits[:, 60:] = -torch.inf
    count = 10_000 if draw is sample else 30
    grid = torch.arange(count, dtype=torch.float64) / count
    knobs = Knobs.of([(1.2, 0, 1.0, 0.0)] * (count - 1) + [(0.0, 0, 1.0, 0.0)], "cpu")
    tokens, _ = draw(logits.expand(count, -1).contiguous(), knobs, grid)
    assert tokens.max() < 60 and tokens[-1] == logits[0].argmax()


@BOTH
@pytest.mark.parametrize("row", [OFF, (0.0, 0, 1.0, 0.0), (1.0, 3, 0.5, 0.1)])
def test_rows_that_are_not_finite_are_reported(draw, row):
    """A NaN weight drawn from as if nothing were wrong, an id outside the head, or one bad row that spoils the others."""
    logits = torch.zeros(4, 700)
    logits[0, 5], logits[1], logits[2, 699] = torch.nan, -torch.inf, torch.inf
    tokens, logprobs = draw(logits, Knobs.of([row] * 4, "cpu"), torch.full((4,), 0.3))
    assert logprobs.isnan().tolist() == [True, True, True, False]
    assert ((tokens >= 0) & (tokens < 700)).all()


@BOTH
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("row", [(1.1, 0, 1.0, 0.0), (1.1, 40, 0.9, 0.0)])
def test_a_grid_of_uniforms_follows_the_distribution(draw, row):
    """A CDF that is off by one id or drops a block's first token: equally spaced u hit each token p x N times, give or take one."""
    count = 20_000 if draw is sample else 30
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(9))
    p = torch.tensor(textbook_kept((logits[0].double() / row[0]).tolist(), *row[1:]), dtype=torch.float64)
    p /= p.sum()
    grid = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, _ = draw(logits.expand(count, -1).contiguous(), Knobs.of([row] * count, "cpu"), grid)
    counts = torch.bincount(tokens, minlength=300)
    assert (counts - count * p).abs().max() <= 1.01 and counts[p == 0].sum() == 0
    assert ((counts - count * p) ** 2 / (count * p + 1e-9))[p > 1e-3].sum() < (p > 1e-3).sum()


@BOTH
def test_a_boundary_belongs_to_the_token_above_it(draw):
    """The CDF must exceed u: four equal tokens, in one block or one a block, and u on the boundaries between them."""
    for place in (torch.arange(4), 5 + 2100 * torch.arange(4)):
        logits = torch.full((4, 8000), -torch.inf)
        logits[:, place] = 0.0
        tokens, _ = draw(logits, Knobs.of([OFF] * 4, "cpu"), torch.tensor([0.0, 0.25, 0.5, 0.75]))
        assert tokens.tolist() == place.tolist()


@BOTH
def test_a_large_vocabulary_keeps_its_tail(draw):
    """A CDF summed in fp32: 49151 tokens of 2e-9 behind one likely token would never be drawn, or always the same ones."""
    logits = torch.zeros(1, 49152)
    logits[0, 1000] = 20.0
    numbers = [5e-7, *(1 - 10.0**-exponent for exponent in (4.1, 4.5, 5, 5.5, 6))]
    tokens, _ = draw(logits.expand(6, -1).contiguous(), Knobs.of([OFF] * 6, "cpu"), torch.tensor(numbers, dtype=torch.float64))
    p, total = math.exp(-20), 1 + 49151 * math.exp(-20)
    right = [numbers[0] * total / p] + [1001 + (u * total - 1000 * p - 1) / p for u in numbers[1:]]
    assert all(abs(token - place) < 60 for token, place in zip(tokens.tolist(), right, strict=True)), (tokens, right)  # 60 p = 1e-7
    assert len(set(tokens.tolist())) == 6 and 1000 not in tokens


def test_the_cpu_logprob_has_the_learners_bits(monkeypatch):
    """Exact mode: a logprob by another formula, or one that depends on which rows are worked on together, shows as a gap."""
    generator = torch.Generator().manual_seed(8)
    hidden, weight = torch.randn(9, 24, generator=generator), torch.randn(4099, 24, generator=generator)
    temperatures = [1.0, 0.7, 0.3, 1.2, 0.0, 1.0, 0.9, 2.0, 0.0]
    logits, uniforms = head_logits(hidden, weight, 4000), torch.rand(9, generator=generator)
    right = log_probs(hidden, weight, torch.tensor([[t or 1.0] for t in temperatures]), 4000)
    results = []
    for elements in (1, 3 * 4099, 2**21):
        monkeypatch.setattr(sampling, "ELEMENTS", elements)
        tokens, logprobs = sample(logits, Knobs.of([(t, 0, 1.0, 0.0) for t in temperatures], "cpu"), uniforms)
        assert torch.equal(logprobs, right.gather(1, tokens[:, None])[:, 0])
        results.append(tokens.tolist())
    assert results[0] == results[1] == results[2]


def test_a_nucleus_beyond_the_candidates_is_found(monkeypatch):
    """CPU: a row that keeps more tokens than were sorted loses its tail; a row beside it that needs fewer is cut elsewhere."""
    monkeypatch.setattr(sampling, "CANDIDATES", 8)
    p = [1.0 / (token + 20) for token in range(200)]
    for row in ((1.0, 0, 0.9, 0.0), (1.0, 50, 1.0, 0.0), (1.0, 50, 0.5, 0.0), (1.0, 3, 0.999, 0.0)):
        right = [token for token, value in enumerate(textbook_kept([math.log(value) for value in p], *row[1:])) if value]
        assert support(sample, p, row, 4000) == right


@BOTH
def test_inputs_of_other_shapes(draw):
    """No rows at all; fp32 uniforms; a view of wider rows; 16-bit logits, which are fp32 from the first operation on."""
    tokens, logprobs = draw(torch.zeros(0, 50), Knobs.of([], "cpu"), torch.zeros(0))
    assert tokens.shape == logprobs.shape == (0,) and tokens.dtype == torch.int64
    wide = torch.randn(3, 4000, generator=torch.Generator().manual_seed(4)).half()
    knobs, uniforms = Knobs.of([(0.9, 0, 0.7, 0.0)] * 3, "cpu"), torch.tensor([0.1, 0.5, 0.9])
    found = draw(wide[:, 500:3001], knobs, uniforms)
    right = [textbook(wide[row, 500:3001].float(), (0.9, 0, 0.7, 0.0), uniforms[row].item()) for row in range(3)]
    assert found[0].tolist() == [token for token, _, _ in right]
    assert found[1].tolist() == pytest.approx([logprob for _, logprob, _ in right], abs=1e-5)


def test_flags_follow_the_rows():
    """A truncating row drawn by the kernels that do not truncate; a greedy batch that pays for a draw."""
    assert Knobs.of([OFF, (0.0, 5, 0.5, 0.1)], "cpu").truncates is False, "a greedy row has nothing to truncate"
    for row in ((1.0, 5, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1)):
        assert Knobs.of([OFF, row], "cpu").truncates is True
    assert Knobs.of([(0.0, 0, 1.0, 0.0)], "cpu").draws is False and Knobs.of([OFF, (0.0, 0, 1.0, 0.0)], "cpu").draws is True


def test_compiles_without_spills():
    """A launch that the interpreter accepts and the compiler refuses, or that keeps its logits in local memory."""
    aot.check([entry for entry in aot_sampling.ENTRIES if "sampling" in entry[0]])


@pytest.mark.long
def test_compiles_without_spills_elsewhere():
    """The same on an A100."""
    aot.check([entry for entry in aot_sampling.LONG_ENTRIES if "sampling" in entry[0]])
