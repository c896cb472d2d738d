"""kernels/logprob.py on the CPU, in Triton's interpreter, and sharded over two ranks, against float64 softmax."""

import aot
import aot_sampling
import pytest
import torch
import torch.distributed as dist
from ranks import spawn_ok

from kernels import logprob
from kernels.logprob import Head, chosen_logprobs, chosen_logprobs_triton, tile

BOTH = pytest.mark.parametrize("chosen", [chosen_logprobs, chosen_logprobs_triton], ids=["cpu", "triton"])


def textbook(hidden, weight, targets, temperature, vocab):
    """Logits of the real vocabulary, softmax, log; in float64."""
    p = torch.softmax(hidden @ weight[:vocab].T / temperature, -1)
    return p[torch.arange(len(targets)), targets].log(), -(p * p.log()).sum(-1)


def inputs(R: int, E: int, V: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, head, targets, and the gradients that arrive at logprobs and entropies."""
    generator = torch.Generator().manual_seed(R + V)
    hidden, weight = torch.randn(R, E, generator=generator), torch.randn(V, E, generator=generator) * 3 / E**0.5
    weight[vocab:] += 10 * hidden[0] / E**0.5  # rows beyond the tokenizer win row 0 unless they are masked
    targets = torch.randint(vocab, (R,), generator=generator)
    targets[0] = vocab - 1
    return hidden, weight, targets, torch.randn(2, R, generator=generator)


def results(function, hidden, weight, pull) -> list[torch.Tensor]:
    """Values, and the gradients of the logprobs alone, of the entropies alone, and of both."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    values = function(hidden, weight)
    sums = [(pull[i] * value).sum() for i, value in enumerate(values)]
    grads = [torch.autograd.grad(loss, [hidden, weight], retain_graph=True) for loss in (*sums, sum(sums))]
    return [value.detach() for value in values] + [grad for pair in grads for grad in pair]


def check(found: list[torch.Tensor], right: list[torch.Tensor], tolerance: float) -> None:
    for index, (mine, theirs) in enumerate(zip(found, right, strict=True)):
        error, bound = (mine.double() - theirs).abs().max().item(), tolerance * max(1.0, theirs.abs().max().item())
        assert error <= bound, f"result {index}: {error} > {bound}"


SHAPES = [(1, 40, 123, 120, 1.0, 8), (5, 40, 123, 123, 0.7, 2), (5, 123, 1000, 990, 1.3, 3), (70, 33, 300, 290, 0.9, 16)]


@BOTH
@pytest.mark.parametrize("R, E, V, vocab, temperature, chunk", SHAPES)
def test_values_and_gradients_are_the_textbooks(chosen, R, E, V, vocab, temperature, chunk):
    """A row, an id or a column of the last block that is dropped or counted twice; padding ids in the partition; a gradient that
    lacks 1/T; slices of the vocabulary whose target is that of the slice before."""
    hidden, weight, targets, pull = inputs(R, E, V, vocab)
    right = results(lambda h, w: textbook(h, w, targets, temperature, vocab), hidden.double(), weight.double(), pull.double())
    found = results(lambda h, w: chosen(h, w, targets, Head(temperature, vocab, chunk)), hidden, weight, pull)
    assert all(value.dtype == torch.float32 for value in found)
    check(found, right, 5e-6)
    assert all(grad[vocab:].eq(0).all() for grad in found[3::2]), "a row beyond the tokenizer has a gradient"


def test_many_tiles_and_groups_of_rows_are_the_textbooks(monkeypatch):
    """Splits of two tiles, the last without any; a maximum that rises from tile to tile; row blocks of a second group."""
    small = {"BLOCK_R": 16, "BLOCK_V": 16, "BLOCK_E": 16, "EVEN_E": False, "GROUP": 2}
    monkeypatch.setattr(logprob, "tile", lambda *_: small)
    hidden, weight, targets, pull = inputs(33, 20, 1100, 1099)
    weight[:, 0] += torch.linspace(0, 30, 1100)
    hidden[:, 0] = torch.linspace(-1, 1, 33)
    right = results(lambda h, w: textbook(h, w, targets, 0.8, 1099), hidden.double(), weight.double(), pull.double())
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    logps, entropies = chosen_logprobs_triton(hidden, weight, targets, Head(0.8, 1099, 20))
    check([logps.detach(), entropies.detach()], right[:2], 5e-6)
    check(list(torch.autograd.grad((pull[0] * logps + pull[1] * entropies).sum(), [hidden, weight])), right[6:], 1e-5)


@pytest.mark.parametrize("R, E, V, vocab, temperature, chunk", SHAPES)
def test_the_cpu_has_the_bits_of_log_probs(R, E, V, vocab, temperature, chunk):
    """Exact mode: a normaliser by another formula differs from the engine's log_softmax by up to 4e-5."""
    hidden, weight, targets, pull = inputs(R, E, V, vocab)
    found = results(lambda h, w: chosen_logprobs(h, w, targets, Head(temperature, vocab, chunk)), hidden, weight, pull)
    rows = torch.nn.functional.pad(hidden, (0, 0, 0, -R % 4))
    logits = (rows @ weight.T)[:R]
    logits[:, vocab:] = -torch.inf
    logp = torch.log_softmax(logits / torch.full((R, 1), temperature), -1)
    assert torch.equal(found[0], logp.gather(1, targets[:, None])[:, 0])
    assert torch.equal(logprob.log_probs(hidden, weight, torch.full((R, 1), temperature), vocab), logp)


@BOTH
def test_e1_two_logits_at_temperature_one_half(chosen):
    """E1: logits [2, 0], T .5, token 0: logprob -.018150, entropy .090095; at T 1 the entropy is .365334. Also E = R = 1, which
    Triton passes as constants."""
    hidden, weight, target = torch.ones(1, 1), torch.tensor([[2.0], [0.0]]), torch.tensor([0])
    values = chosen(hidden, weight, target, Head(0.5, 2, 8))
    assert [value.item() for value in values] == pytest.approx([-0.018150, 0.090095], abs=5e-7)
    assert chosen(hidden, weight, target, Head(1.0, 2, 8))[1].item() == pytest.approx(0.365334, abs=5e-7)


@BOTH
def test_e8_extreme_logits_stay_finite(chosen):
    """E8: T .01 and logits of +-300: inf - inf or 0 x inf in a logprob, an entropy or a gradient."""
    hidden, weight = torch.tensor([[1.0], [-1.0]]), torch.tensor([[300.0], [-300.0], [0.0], [299.9]])
    found = results(lambda h, w: chosen(h, w, torch.tensor([0, 2]), Head(0.01, 4, 8)), hidden, weight, torch.ones(2, 2))
    assert all(torch.isfinite(value).all() for value in found) and (found[0] <= 0).all() and (found[1] >= 0).all()
    assert found[0].tolist() == pytest.approx([-4.54e-5, -30000.0], rel=1e-2)


@BOTH
def test_no_rows(chosen):
    """L11: an empty micro-batch still takes part: empty results, zero gradients."""
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    logps, entropies = chosen(hidden, weight, torch.zeros(0, dtype=torch.long), Head(1.0, 6, 8))
    (logps.sum() + entropies.sum()).backward()
    assert logps.shape == entropies.shape == (0,) and weight.grad.eq(0).all() and hidden.grad.shape == (0, 4)


def test_fp16_logits_are_not_rounded():
    """Logits rounded to 16 bits before the softmax: 600 +- .25 would be off by that; and gradients in the weight's type."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(5, 64, generator=generator).half(), torch.randn(300, 64, generator=generator).half()
    weight[:, 0], hidden[:, 0] = 30.0, 20.0  # a common offset that only the unrounded logits carry without loss
    targets, pull = torch.randint(300, (5,), generator=generator), torch.randn(2, 5, generator=generator)
    right = results(lambda h, w: textbook(h, w, targets, 1.0, 300), hidden.double(), weight.double(), pull.double())
    found = results(lambda h, w: chosen_logprobs_triton(h, w, targets, Head(1.0, 300, 3)), hidden, weight, pull)
    check(found[:2], right[:2], 2e-4)
    assert all(grad.dtype == torch.float16 for grad in found[2:])
    check(found[2:], right[2:], 5e-3)


def test_backward_holds_chunk_rows_of_gradients(monkeypatch):
    """32k tokens x 128k ids are 8 GB in bf16: a slice is as wide as makes it chunk x V, in the weight's type."""
    sizes, inner = [], logprob._grad_logits

    class Recorder:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                sizes.append(tuple(arguments[11].shape))
                inner[grid](*arguments, **options)
            return launch

    monkeypatch.setattr(logprob, "_grad_logits", Recorder())
    hidden, weight, targets, pull = inputs(40, 32, 640, 640)
    results(lambda h, w: chosen_logprobs_triton(h, w, targets, Head(1.0, 640, 10)), hidden, weight, pull[:, :40])
    block = tile(40, 32, 4, 128)["BLOCK_V"]
    assert set(sizes) == {(40, 640 // 4 // block * block)} and len(sizes) == 3 * 5, sizes


SHARDED = [(5, 40, 123, 120, 0.7, 2, 64), (9, 16, 200, 90, 1.3, 4, 100)]  # the second: rank 1 has masked rows only


def sharded(rank: int, fused: bool) -> list:
    """Runs on each rank: its rows of the head, and what `results` finds."""
    chosen, out = chosen_logprobs_triton if fused else chosen_logprobs, []
    for R, E, V, vocab, temperature, chunk, cut in SHARDED:
        hidden, weight, targets, pull = inputs(R, E, V, vocab)
        first = rank * cut
        head = Head(temperature, vocab, chunk, first, dist.group.WORLD)
        rows = weight[first:cut] if rank == 0 else weight[first:]
        out.append([value.tolist() for value in results(lambda h, w: chosen(h, w, targets, head), hidden, rows, pull)])  # noqa: B023
    return out


@pytest.mark.parametrize("fused", [False, True], ids=["cpu", "triton"])
def test_two_shards_of_the_vocabulary_equal_one(fused):
    """A partition or an entropy of one rank's ids, a target counted by each rank or by none, a hidden gradient of one rank's ids
    (or summed twice), NaN from a rank whose rows are all masked."""
    ranks = spawn_ok(2, "test_kernels_logprob:sharded", fused)
    for number, (R, E, V, vocab, temperature, chunk, _) in enumerate(SHARDED):
        hidden, weight, targets, pull = inputs(R, E, V, vocab)
        whole = Head(temperature, vocab, chunk)
        right = results(lambda h, w: chosen_logprobs(h, w, targets, whole), hidden, weight, pull)  # noqa: B023
        mine, other = ([torch.tensor(value) for value in ranks[rank][number]] for rank in (0, 1))
        for index, value in enumerate(right):
            if index < 2 or index % 2 == 0:  # values and hidden gradients are whole on both ranks
                assert torch.equal(mine[index], other[index])
                check([mine[index]], [value.double()], 5e-6)
            else:
                check([torch.cat([mine[index], other[index]])], [value.double()], 5e-6)


def test_compiles_without_spills():
    """A launch that the interpreter accepts and the compiler refuses, or that keeps its logits in local memory."""
    aot.check([entry for entry in aot_sampling.ENTRIES if "logprob" in entry[0]])


@pytest.mark.long
def test_compiles_without_spills_elsewhere():
    """The same on an A100, for one row, for fp32, and for a width that asynchronous copies do not fit."""
    aot.check([entry for entry in aot_sampling.LONG_ENTRIES if "logprob" in entry[0]])
