"""Losses, advantages, token weights (L1-L4, L6-L8, L13); the chunked logprob against the float64 textbook (L2, E1, E5)."""

import itertools
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from config import Algorithm, ConfigError
from kernels.logprob import Head, chosen_logprobs, log_probs
from losses import Tokens, clipped_surrogate, group_advantages, grpo, kl, token_weight
from settings import build

ALGORITHM = Algorithm()


def weighted(sequences: list[list[float]], mean: str, cap: int = 4) -> list[list[float]]:
    """Each sequence's token losses times the weight that the learner gives them, from the global counts."""
    tokens = sum(map(len, sequences))
    return [[loss * token_weight(mean, len(losses), tokens, len(sequences), cap) for loss in losses] for losses in sequences]


# --- L1, L2: means


@pytest.mark.parametrize("mean, right", [("token", 1.4), ("sequence", 2.0), ("constant", 0.875), ("sum", 3.5)])
def test_l2_each_mean_of_two_sequences(mean, right):
    """L2: losses [[1,1,1,1],[3]], max length 4: the four means are 1.4, 2.0, 0.875 and 3.5, and not each other's."""
    assert sum(map(sum, weighted([[1, 1, 1, 1], [3]], mean))) == pytest.approx(right, rel=1e-12)


def test_l1_token_mean_over_micro_batches_is_global():
    """L1: {1,1,1} in one micro-batch and {3} in another is 1.5, not the mean of means 2.0."""
    first, second = weighted([[1, 1, 1], [3]], "token")
    assert sum(first) + sum(second) == 1.5


@pytest.mark.parametrize("mean", ["token", "sequence", "constant", "sum"])
def test_token_weights_give_the_same_total_for_every_split(mean):
    """L1: all 15 ways to split four sequences over micro-batches add up to the textbook mean."""
    sequences, cap = [[0.3, -1.2], [2.0] * 5, [0.7, 0.1, 0.4], [-0.9]], 7
    textbook = {"token": sum(map(sum, sequences)) / 11, "sequence": sum(sum(s) / len(s) for s in sequences) / 4,
                "constant": sum(sum(s) / cap for s in sequences) / 4, "sum": sum(map(sum, sequences)) / 4}[mean]
    parts = [sum(part) for part in weighted(sequences, mean, cap)]
    splits = {frozenset(tuple(i for i in range(4) if place[i] == micro) for micro in range(4))
              for place in itertools.product(range(4), repeat=4)}
    assert len(splits) == 15
    for split in splits:
        assert math.fsum(math.fsum(parts[i] for i in micro) for micro in split) == pytest.approx(textbook, rel=1e-12)


@pytest.mark.parametrize("mean", ["token", "sequence", "constant", "sum"])
def test_l11_no_contributing_tokens_is_weight_zero(mean):
    """L11: everything masked, or a response of length 0: weight 0 and no division by zero."""
    assert token_weight(mean, 3, 0, 0, 4) == 0.0 and token_weight(mean, 0, 0, 0, 4) == 0.0
    assert token_weight(mean, 0, 5, 2, 4) == 0.0


# --- L3, L4, L13: advantages


@pytest.mark.parametrize("rewards", [[0.35] * 8, [0.7] * 8, [0.1] * 3, [-1e6] * 5, [0.0] * 4, [1e-30] * 4,
                                     [0.1 + 0.2, 0.3, 0.3, 0.3]], ids=str)
@pytest.mark.parametrize("use_std", [True, False])
def test_l3_equal_rewards_give_exactly_zero(rewards, use_std):
    """L3: the std of eight times 0.35 is not 0 in floating point; dividing by it makes advantages of 0.71 out of noise."""
    assert group_advantages(rewards, use_std) == [0.0] * len(rewards)


def test_l4_advantages_by_prompt():
    """L4: [1,0,0,0] and [1,1,1,1] (ddof 1), also where the two prompts' samples arrive interleaved."""
    assert group_advantages([1, 0, 0, 0], True) == [1.5, -0.5, -0.5, -0.5]
    assert group_advantages([1, 1, 1, 1], True) == [0.0] * 4
    rewards, prompts = [1, 1, 0, 1, 0, 1, 0, 1], [0, 1] * 4
    got = {prompt: group_advantages([r for r, p in zip(rewards, prompts, strict=True) if p == prompt], True) for prompt in (0, 1)}
    assert got == {0: [1.5, -0.5, -0.5, -0.5], 1: [0.0] * 4}


def test_advantages_without_std_and_of_real_numbers():
    """Dr.GRPO only centres; neither version changes with the order of samples or a constant added to the rewards."""
    assert group_advantages([1, 0, 0, 0], False) == [0.75, -0.25, -0.25, -0.25]
    rewards = [0.25, -1.5, 3.0, 0.5]
    mean = sum(rewards) / 4
    std = (sum((r - mean) ** 2 for r in rewards) / 3) ** 0.5
    assert group_advantages(rewards, True) == pytest.approx([(r - mean) / std for r in rewards], rel=1e-12)
    assert group_advantages([r + 8 for r in rewards], True) == pytest.approx(group_advantages(rewards, True), rel=1e-12)
    assert group_advantages(rewards[::-1], True) == group_advantages(rewards, True)[::-1]


def test_l13_unscored_samples_do_not_count():
    """L13: [1, None, 0, None] has mean .5 over the scored; None gets 0 and is not a reward of 0 in disguise."""
    assert group_advantages([1, None, 0, None], False) == [0.5, 0.0, -0.5, 0.0]
    assert group_advantages([1, None, 0, None], True) == pytest.approx([0.5**0.5, 0, -(0.5**0.5), 0], rel=1e-12)
    for rewards in ([None] * 3, [None, 1.0, None], [1.0], []):
        assert group_advantages(rewards, True) == [0.0] * len(rewards)


def test_l6_one_sample_per_prompt_is_refused():
    """L6: a group of one has no spread: refused at start, instead of NaN advantages."""
    with pytest.raises(ConfigError, match="`rollout.samples_per_prompt` = 1"):
        build({"rollout": {"samples_per_prompt": 1}})


# --- L7: KL


def value_and_slope(function, at: float) -> tuple[float, float]:
    x = torch.tensor([at], requires_grad=True)
    y = function(x)
    return y.item(), torch.autograd.grad(y.sum(), x)[0].item()


@pytest.mark.parametrize("estimator, logp, ref, value, slope", [
    ("k1", -1.0, -1.5, 0.5, 1.0), ("k2", -1.0, -1.5, 0.125, 0.5), ("k3", -1.0, -1.5, 0.106531, 0.393469),
    ("k1", -1.5, -1.0, -0.5, 1.0), ("k2", -1.5, -1.0, 0.125, -0.5), ("k3", -1.5, -1.0, 0.148721, -0.648721),
    ("k3", -1.0, -1.0, 0.0, 0.0)])
def test_l7_kl_estimators_and_their_derivatives(estimator, logp, ref, value, slope):
    """L7: k1 .5, k2 .125, k3 .106531; d k3/d logp .393469; swapped .148721 and -.648721."""
    got = value_and_slope(lambda x: kl(x, torch.tensor([ref]), estimator), logp)
    assert got == pytest.approx((value, slope), abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gap", [100.0, -100.0, 30.0, -30.0, 21.0, -21.0])
def test_l7_a_gap_of_100_nats_stays_finite_and_keeps_its_direction(estimator, gap):
    """L7: no inf, no NaN in value or gradient; and k3 must not turn round and push policy and reference further apart."""
    value, slope = value_and_slope(lambda x: kl(x, torch.zeros(1), estimator), gap)
    assert math.isfinite(value) and math.isfinite(slope)
    assert slope == 1.0 if estimator == "k1" else slope * gap > 0
    assert estimator == "k1" or value > 0


# --- L8: clipping


@pytest.mark.parametrize("advantage, ratio, loss, slope", [
    (1, 0.1, -0.1, -1), (1, 2, -1.2, 0), (1, 10, -1.2, 0), (-1, 0.1, 0.8, 0), (-1, 1.1, 1.1, 1), (-1, 2, 2, 1), (-1, 10, 3, 0),
    (1, 1.0, -1.0, -1), (-1, 1.0, 1.0, 1)])
@pytest.mark.parametrize("scale", [1, 2.5])
def test_l8_clipped_surrogate_with_dual_clip(advantage, ratio, loss, slope, scale):
    """L8: eps .2, dual clip 3: loss and d loss/d ratio of every listed triple, also when the advantage is not +-1."""
    algorithm = Algorithm(dual_clip=3.0)
    got = value_and_slope(lambda r: clipped_surrogate(r, torch.tensor([scale * float(advantage)]), algorithm), float(ratio))
    assert got == pytest.approx((scale * loss, scale * slope), abs=1e-6)


def test_l8_without_dual_clip_and_with_two_bounds():
    """Off (0), ratio 10 at A -1 costs 10; clip_low and clip_high are each used on their own side (clip-higher)."""
    cases = [(-1, 10, 10, 1), (1, 1.25, -1.25, -1), (1, 1.5, -1.3, 0), (-1, 0.85, 0.9, 0), (-1, 0.95, 0.95, 1)]
    for advantage, ratio, loss, slope in cases:
        got = value_and_slope(lambda r, a=advantage: clipped_surrogate(r, torch.tensor([float(a)]),
                                                                       Algorithm(clip_low=0.1, clip_high=0.3)), float(ratio))
        assert got == pytest.approx((loss, slope), abs=1e-6)


@pytest.mark.parametrize("dual_clip", [1, 0.2])
def test_l8_dual_clip_of_at_most_one_is_refused(dual_clip):
    """L8: a bound at or below the ratio 1 would cut every negative advantage's gradient."""
    with pytest.raises(ConfigError, match="`algorithm.dual_clip`.*must be > 1"):
        build({"algorithm": {"dual_clip": dual_clip}})


# --- grpo as a whole


def textbook_grpo(logps, old, advantages, entropies, ref, a: Algorithm):
    """Token by token in float64, with Python's own min and max."""
    losses = []
    for i in range(len(logps)):
        ratio, advantage = (logps[i] - old[i]).exp(), advantages[i].item()
        surrogate = min(ratio * advantage, min(max(ratio, torch.tensor(1 - a.clip_low).double()), 1 + a.clip_high) * advantage)
        if a.dual_clip and advantage < 0:
            surrogate = max(surrogate, torch.tensor(a.dual_clip * advantage).double())
        loss = -surrogate - a.entropy_coef * entropies[i]
        if ref is not None:
            gap = logps[i] - ref[i]
            loss = loss + a.kl_coef * {"k1": gap, "k2": gap**2 / 2, "k3": (-gap).exp() - 1 + gap}[a.kl_estimator]
        losses.append(loss)
    return torch.stack(losses)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
@pytest.mark.parametrize("with_ref", [True, False])
def test_grpo_against_a_loop_in_float64(estimator, dual_clip, with_ref):
    """Loss within 1e-6 and gradients in logps and entropies within 1e-6 of the loop's, over 200 tokens of every kind."""
    g = torch.Generator().manual_seed(0)
    old, advantages = -3 * torch.rand(200, generator=g), torch.randn(200, generator=g).round(decimals=1)
    logps = (old + 0.5 * torch.randn(200, generator=g)).requires_grad_()
    entropies, ref = torch.rand(200, generator=g).requires_grad_(), old + 0.3 * torch.randn(200, generator=g) if with_ref else None
    algorithm = Algorithm(clip_high=0.3, dual_clip=dual_clip, kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.01)
    losses, statistics = grpo(Tokens(logps, old, advantages, entropies, ref), algorithm)
    gradients = torch.autograd.grad(losses.sum(), [logps, entropies])
    doubles = [x.detach().double().requires_grad_() for x in (logps, entropies)]
    ref_double = None if ref is None else ref.double()
    right = textbook_grpo(doubles[0], old.double(), advantages.double(), doubles[1], ref_double, algorithm)
    torch.testing.assert_close(losses.double(), right, atol=1e-6, rtol=1e-6)
    for got, wanted in zip(gradients, torch.autograd.grad(right.sum(), doubles), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=1e-6, rtol=1e-6)
    ratio = (logps.detach() - old).exp()
    binds = ((advantages > 0) & (ratio > 1.3)) | ((advantages < 0) & (ratio < 0.8))
    if dual_clip:
        binds |= (advantages < 0) & (ratio > dual_clip)
    assert torch.equal(statistics["clipped"], binds.float()) and 10 < binds.sum() < 190
    # Without a reference: the drift from the policy that sampled, KL(old || new), whose samples these are.
    drift = kl(old, logps.detach(), "k3") if ref is None else kl(logps.detach(), ref, estimator)
    assert torch.equal(statistics["kl"], drift) and not statistics["kl"].requires_grad


def test_grpo_stays_finite_where_the_policy_has_moved_100_nats():
    """A ratio of e^100 is inf in fp32, and inf * 0 is NaN for the whole batch's gradient."""
    logps = torch.tensor([-100.0, 0.0, -100.0, 0.0], requires_grad=True)
    tokens = Tokens(logps, torch.tensor([0.0, -100.0, 0.0, -100.0]), torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.zeros(4))
    losses, statistics = grpo(tokens, ALGORITHM)
    assert losses.isfinite().all() and torch.autograd.grad(losses.sum(), logps)[0].isfinite().all()
    assert statistics["kl"].isfinite().all()


def test_on_policy_gradient_is_minus_the_advantage():
    """Ratio 1 exactly: loss -A, d loss/d logp -A, kl 0, nothing clipped."""
    logps, advantages = torch.tensor([-0.3, -2.0, -0.7], requires_grad=True), torch.tensor([1.5, -0.5, 0.0])
    losses, statistics = grpo(Tokens(logps, logps.detach().clone(), advantages, torch.zeros(3)), Algorithm(dual_clip=3.0))
    assert losses.tolist() == [-1.5, 0.5, 0.0] and torch.autograd.grad(losses.sum(), logps)[0].tolist() == [-1.5, 0.5, 0.0]
    assert statistics["kl"].tolist() == statistics["clipped"].tolist() == [0.0] * 3


# --- chunked logprobs


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
