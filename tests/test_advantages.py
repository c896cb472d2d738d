"""Advantages, returns, token weights and whitening (L1-L6, L9-L11, L13) against naive loops."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config import ConfigError
from losses import gae, group_advantages, leave_one_out, overlong_penalty, token_weight, whitening
from settings import build

FIXED = settings(max_examples=200, deadline=None, derandomize=True, database=None)
REWARDS = st.none() | st.integers(-8, 8).map(lambda eighths: eighths / 8)


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
        assert group_advantages(rewards, True) == leave_one_out(rewards) == [0.0] * len(rewards)


def test_l6_one_sample_per_prompt_is_refused():
    """L6: a group of one has no spread: refused at start, instead of NaN advantages."""
    with pytest.raises(ConfigError, match="`rollout.samples_per_prompt` = 1"):
        build({"rollout": {"samples_per_prompt": 1}})


@FIXED
@given(st.lists(REWARDS, max_size=9), st.booleans())
def test_group_advantages_equal_the_statistics_modules(rewards, use_std):
    """Mean and standard deviation of the scored, by the standard library; rewards are multiples of 1/8."""
    scored = [reward for reward in rewards if reward is not None]
    right = [0.0] * len(rewards)
    if len(set(scored)) > 1:
        mean, scale = statistics.mean(scored), statistics.stdev(scored) if use_std else 1.0
        right = [0.0 if reward is None else (reward - mean) / scale for reward in rewards]
    assert group_advantages(rewards, use_std) == pytest.approx(right, rel=1e-12, abs=1e-12)


# --- L5: RLOO


def test_l5_leave_one_out_of_three_right_in_eight():
    """L5: .714286 for the right, -.428571 for the wrong ones."""
    right = pytest.approx([5 / 7] * 3 + [-3 / 7] * 5, rel=1e-12)
    assert leave_one_out([1.0] * 3 + [0.0] * 5) == right
    assert [round(x, 6) for x in (5 / 7, -3 / 7)] == [0.714286, -0.428571]


@FIXED
@given(st.lists(REWARDS, max_size=9))
def test_leave_one_out_is_the_reward_less_the_mean_of_the_other_scored(rewards):
    """One by one, as the name says; alone among the unscored there is nothing to compare with: 0."""
    right = []
    for i, reward in enumerate(rewards):
        others = [other for j, other in enumerate(rewards) if j != i and other is not None]
        right.append(reward - sum(others) / len(others) if others and reward is not None else 0.0)
    assert leave_one_out(rewards) == pytest.approx(right, rel=1e-12, abs=1e-12)


# --- L9: overlong penalty


@pytest.mark.parametrize("length, right", [(0, 0), (79, 0), (80, 0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1)])
def test_l9_overlong_penalty(length, right):
    """L9: cap 100, buffer 20: it starts behind token 80 and reaches -1 at the cap; -0.0 would be logged as such."""
    got = overlong_penalty(length, 100, 20)
    assert got == pytest.approx(right, abs=1e-12) and math.copysign(1, got) == (1 if right == 0 else -1)


def test_l9_buffers_of_nothing_and_of_everything():
    """L9: 0 switches it off, at the cap too; a buffer of the whole cap falls from the first token on; a longer one is refused."""
    assert overlong_penalty(100, 100, 0) == 0.0
    assert [overlong_penalty(length, 4, 4) for length in range(5)] == [0, -0.25, -0.5, -0.75, -1]
    with pytest.raises(ConfigError, match="`algorithm.overlong_buffer` = 9 .*`rollout.max_new_tokens` = 8"):
        build({"algorithm": {"overlong_buffer": 9}, "rollout": {"max_new_tokens": 8}})


# --- L10: GAE


def test_l10_gae_does_not_read_behind_the_mask():
    """L10: the value 9 behind the end leaks into neither advantages nor returns."""
    rewards, values, mask = torch.tensor([[[0.0, 1, 0]], [[0.5, 0.6, 9]], [[1.0, 1, 0]]])
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    torch.testing.assert_close(advantages, torch.tensor([[0.48, 0.40, 0]]), atol=1e-7, rtol=0)
    torch.testing.assert_close(returns, torch.tensor([[0.98, 1.0, 0]]), atol=1e-7, rtol=0)


def textbook_gae(rewards, values, gamma, lam):
    """A_t = sum_u (gamma lam)^(u - t) delta_u, each sum written out."""
    T = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < T else 0.0) - values[t] for t in range(T)]
    return [sum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, T)) for t in range(T)]


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.7), (1.0, 1.0), (0.9, 1.0), (0.9, 0.0)])
def test_gae_equals_the_sum_over_deltas(gamma, lam):
    """Rows of every length from 0 to T at once, with other numbers behind each end."""
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 7, 6, generator=g, dtype=torch.float64)
    mask = (torch.arange(6) < torch.arange(7)[:, None]).double()
    before = rewards.clone(), values.clone()
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    assert torch.equal(rewards, before[0]) and torch.equal(values, before[1]), "the inputs were written over"
    for row in range(7):
        right = textbook_gae(rewards[row, :row].tolist(), values[row, :row].tolist(), gamma, lam)
        assert advantages[row].tolist() == pytest.approx(right + [0.0] * (6 - row), rel=1e-12, abs=1e-12)
        targets = [a + v for a, v in zip(right, values[row, :row].tolist(), strict=True)] + [0.0] * (6 - row)
        assert returns[row].tolist() == pytest.approx(targets, rel=1e-12, abs=1e-12)


def test_gae_without_a_critic_is_the_discounted_reward_to_go():
    """REINFORCE++: V = 0 and lam = 1."""
    rewards = torch.tensor([[0.25, 0.0, 1.0, 8.0]])
    advantages, returns = gae(rewards, torch.zeros(1, 4), torch.tensor([[1.0, 1, 1, 0]]), 0.5, 1.0)
    assert advantages.tolist() == returns.tolist() == [[0.5, 0.5, 1.0, 0.0]]


# --- L11: whitening


def whitened(values: list[float]) -> list[float]:
    shift, scale = whitening(len(values), math.fsum(values), math.fsum(value**2 for value in values))
    return [(value - shift) * scale for value in values]


def test_l11_whitening_is_skipped_below_two_tokens():
    """L11: exactly one token, or none: left alone, where a standard deviation of one number is NaN."""
    assert whitening(0, 0.0, 0.0) == whitening(1, 3.0, 9.0) == (0.0, 1.0)
    assert whitened([3.0]) == [3.0]


@FIXED
@given(st.lists(st.floats(-3, 3, width=32), min_size=2, max_size=50).filter(lambda values: max(values) - min(values) > 0.01),
       st.sampled_from([0.0, 10.0, -100.0]))
def test_whitening_against_the_statistics_module(values, shift):
    """From sums alone, which add over ranks: mean 0 and variance 1 (ddof 1), also far from 0, where squares nearly cancel."""
    values = [value + shift for value in values]
    mean, std = statistics.mean(values), statistics.stdev(values)
    assert whitened(values) == pytest.approx([(value - mean) / std for value in values], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, 0.35, -0.7, 1e-3, 1e6, 1 / 3])
@pytest.mark.parametrize("count", [2, 3, 8, 1000])
def test_l3_whitening_equal_advantages_gives_zero_not_noise(value, count):
    """L3's neighbour: sum of squares less n mean^2 is rounding error, and dividing by its root makes noise of it."""
    shift, scale = whitening(count, sum([value] * count), sum([value**2] * count))
    assert scale == 0.0 and shift == pytest.approx(value, rel=1e-12)
