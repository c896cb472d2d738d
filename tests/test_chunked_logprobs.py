"""The chunked logprob against the float64 textbook (L2, E1, E5), and that no [tokens, vocabulary] matrix is ever built."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.logprob import Head, chosen_logprobs, log_probs


def textbook_logprobs(hidden, weight, targets, temperature, vocab):
    """Logits of the real vocabulary, softmax, log; in float64."""
    logp = torch.log_softmax(hidden @ weight[:vocab].T / temperature, -1)
    return logp[torch.arange(len(targets)), targets], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("rows, width, vocab, head", [(5, 12, 123, 123), (5, 12, 120, 123), (1, 3, 7, 8), (13, 5, 33, 64)])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_l2_chunked_logprobs_equal_the_textbook(rows, width, vocab, head, chunk, temperature):
    """L2: value, entropy and both gradients on odd shapes, chunks that do and do not divide, a head larger than the vocabulary."""
    g = torch.Generator().manual_seed(rows)
    hidden, weight = torch.randn(rows, width, generator=g), torch.randn(head, width, generator=g)
    targets = torch.randint(vocab, (rows,), generator=g)
    pull = torch.randn(2, rows, generator=g)  # gradients that arrive at logprobs and entropies
    results = []
    for function, kind in ((textbook_logprobs, torch.float64), (chosen_logprobs, torch.float32)):
        h, w = hidden.to(kind).requires_grad_(), weight.to(kind).requires_grad_()
        settings = (Head(temperature, vocab, chunk),) if kind == torch.float32 else (temperature, vocab)
        logps, entropies = function(h, w, targets, *settings)
        assert logps.dtype == entropies.dtype == kind and logps.shape == entropies.shape == (rows,)
        each = [torch.autograd.grad((pull[i].to(kind) * x).sum(), [h, w], retain_graph=True)
                for i, x in enumerate((logps, entropies))]
        both = torch.autograd.grad((pull[0].to(kind) * logps + pull[1].to(kind) * entropies).sum(), [h, w])
        results.append([logps, entropies, *each[0], *each[1], *both])
    for right, got in zip(*results, strict=True):
        assert (got.double() - right).abs().max() <= 3e-6 * max(1, right.abs().max()), (got.double() - right).abs().max()
    assert all(got[vocab:].eq(0).all() for got in results[1][3::2]), "a row beyond the tokenizer has a gradient"


def test_chosen_logprobs_of_no_rows():
    """L11: an empty micro-batch still takes part: empty results, zero gradients."""
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(6, 4, requires_grad=True)
    logps, entropies = chosen_logprobs(hidden, weight, torch.zeros(0, dtype=torch.long), Head(1.0, 6, 8))
    (logps.sum() + entropies.sum()).backward()
    assert logps.shape == (0,) and weight.grad.eq(0).all() and hidden.grad.shape == (0, 4)


def test_chosen_logprobs_in_bf16_are_fp32_from_the_logits_on():
    """Logits that bf16 holds exactly (multiples of 1/2 up to 32): a softmax or a sum in bf16 would be off by 1e-2, not 1e-5."""
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randint(-1, 2, (9, 32), generator=g), torch.randint(-2, 3, (500, 32), generator=g) / 2
    targets = torch.randint(500, (9,), generator=g)
    got = chosen_logprobs(hidden.bfloat16(), weight.bfloat16(), targets, Head(0.7, 500, 4))
    for mine, right in zip(got, textbook_logprobs(hidden.double(), weight.double(), targets, 0.7, 500), strict=True):
        assert mine.dtype == torch.float32 and (mine - right).abs().max() <= 1e-5


def test_e1_logits_two_and_zero_at_temperature_one_half():
    """E1: logprob of token 0 is -0.018150, entropy .090095; at T 1 the entropy is .365334."""
    hidden, weight, target = torch.ones(1, 1), torch.tensor([[2.0], [0.0]]), torch.tensor([0])
    logps, entropies = chosen_logprobs(hidden, weight, target, Head(0.5, 2, 8))
    assert (logps.item(), entropies.item()) == pytest.approx((-0.018150, 0.090095), abs=5e-7)
    assert chosen_logprobs(hidden, weight, target, Head(1.0, 2, 8))[1].item() == pytest.approx(0.365334, abs=5e-7)
    assert log_probs(hidden, weight, torch.tensor([[0.5]]), 2)[0, 0].item() == pytest.approx(-0.018150, abs=5e-7)


def test_e5_rows_beyond_the_tokenizer_are_not_in_the_log_partition():
    """E5: a head of 64 for a tokenizer of 60, rows 60-63 raised by +20: the learner's and the engine's logprobs do not move."""
    g = torch.Generator().manual_seed(2)
    hidden, weight = torch.cat([torch.ones(6, 1), torch.randn(6, 15, generator=g)], 1), torch.randn(64, 16, generator=g)
    raised = weight.clone()
    raised[60:, 0] += 20
    targets = torch.randint(60, (6,), generator=g)
    right, right_entropies = textbook_logprobs(hidden.double(), weight.double(), targets, 1.2, 60)
    logps, entropies = chosen_logprobs(hidden, raised, targets, Head(1.2, 60, 4))
    torch.testing.assert_close(logps.double(), right, atol=2e-6, rtol=0)
    torch.testing.assert_close(entropies.double(), right_entropies, atol=2e-6, rtol=0)
    engine = log_probs(hidden, raised, torch.full((6, 1), 1.2), 60)
    assert torch.equal(engine.gather(1, targets[:, None])[:, 0], logps) and engine[:, 60:].eq(-torch.inf).all()
    assert (engine[:, :60].logsumexp(-1).abs() <= 2e-6).all()


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            self.numel = max(self.numel, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return out


@pytest.mark.parametrize("chunk, rows_at_once", [(4, 4), (6, 8), (8, 8)])
def test_no_tensor_of_rows_by_vocabulary_is_built(chunk, rows_at_once):
    """32k tokens x 128k ids are 17 GB in fp32: forward and backward may hold `chunk` rows (padded to 4), and the gradients."""
    R, E, V = 96, 3, 500
    hidden, weight = torch.randn(R, E, requires_grad=True), torch.randn(V, E, requires_grad=True)
    targets = torch.randint(V, (R,))
    with Largest() as forward:
        logps, entropies = chosen_logprobs(hidden, weight, targets, Head(0.7, V, chunk))
    with Largest() as backward:
        (logps.sum() + entropies.sum()).backward()
    assert forward.numel == rows_at_once * V
    assert V * E <= backward.numel <= rows_at_once * V
    with Largest() as naive:  # the recorder itself must see a full matrix where there is one
        textbook_logprobs(hidden, weight, targets, 0.7, V)[0].sum().backward()
    assert naive.numel == R * V
