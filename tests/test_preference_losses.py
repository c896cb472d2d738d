"""DPO, IPO and Bradley-Terry against the formulas of their papers, written out pair by pair in float64."""

import math

import pytest
import torch

from config import Algorithm
from losses import Tokens, objective, token_weight

LENGTHS = [[4, 2, 1, 5], [1, 1], [3, 6, 2, 2, 7, 1]]  # chosen, rejected, chosen, rejected ...


def pairs(lengths: list[int], dtype: torch.dtype) -> Tokens:
    """Logprobs of pairs, exact in fp32."""
    g = torch.Generator().manual_seed(sum(lengths))
    logps, ref = (-3 * torch.rand(2, sum(lengths), generator=g)).to(dtype)
    return Tokens(logps.requires_grad_(), logps.detach(), torch.zeros_like(ref), torch.zeros_like(ref), lengths, None, ref)


def sequences(tokens: Tokens) -> list[tuple[list, list]]:
    """(logps, reference's logps) of each sequence, as lists of scalars."""
    found, start = [], 0
    for length in tokens.lengths:
        found.append(([*tokens.logps_R[start:start + length]], [*tokens.ref_logps_R[start:start + length]]))
        start += length
    return found


def textbook(tokens: Tokens, a: Algorithm) -> list[torch.Tensor]:
    """Each pair's loss."""
    losses, rows = [], sequences(tokens)
    for (chosen, chosen_ref), (rejected, rejected_ref) in zip(rows[0::2], rows[1::2], strict=True):
        if a.loss == "dpo":
            m = (sum(chosen) - sum(chosen_ref)) - (sum(rejected) - sum(rejected_ref))
            p = 1 / (1 + (-a.kl_coef * m).exp())
            losses.append(-(1 - a.label_smoothing) * p.log() - a.label_smoothing * (1 - p).log())
        else:
            m = (sum(chosen) - sum(chosen_ref)) / len(chosen) - (sum(rejected) - sum(rejected_ref)) / len(rejected)
            losses.append((m - 1 / (2 * a.kl_coef)) ** 2)
    return losses


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("loss, beta, smoothing", [
    ("dpo", 0.1, 0.0), ("dpo", 0.5, 0.0), ("dpo", 0.1, 0.1), ("dpo", 2.0, 0.4), ("ipo", 0.1, 0.0), ("ipo", 1.5, 0.0)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 3e-6)], ids=["fp64", "fp32"])
def test_pair_losses_equal_the_textbook(lengths, loss, beta, smoothing, dtype, tolerance):
    """Mean over pairs: value and gradient; each pair's loss at the first token of its chosen sequence, nothing elsewhere."""
    algorithm = Algorithm(loss=loss, kl_coef=beta, label_smoothing=smoothing)
    tokens, double = pairs(lengths, dtype), pairs(lengths, torch.float64)
    losses, stats = objective(tokens, algorithm)
    right, count = textbook(double, algorithm), len(lengths) // 2
    firsts = [sum(lengths[:2 * pair]) for pair in range(count)]
    assert losses[firsts].tolist() == pytest.approx([value.item() for value in right], rel=tolerance, abs=tolerance)
    assert losses.count_nonzero() == count and all(values.count_nonzero() <= count for values in stats.values())
    weight = token_weight("sum", 1, sum(lengths), count, 9)
    gradients = [torch.autograd.grad(weight * losses.sum(), tokens.logps_R)[0].double(),
                 torch.autograd.grad(sum(right) / count, double.logps_R)[0]]
    torch.testing.assert_close(*gradients, atol=tolerance, rtol=tolerance)
    scale = [1] * len(lengths) if loss == "dpo" else lengths
    gains = [beta * (sum(own) - sum(ref)).item() / n for (own, ref), n in zip(sequences(double), scale, strict=True)]
    margins = [chosen - rejected for chosen, rejected in zip(gains[0::2], gains[1::2], strict=True)]
    assert stats["margin"][firsts].tolist() == pytest.approx(margins, rel=1e-5)
    assert stats["accuracy"][firsts].tolist() == [float(margin > 0) for margin in margins]


def test_dpo_at_the_reference_is_log_two():
    """Before the first step: margin 0, loss log 2, slope -beta/2 on each chosen token and +beta/2 on each rejected one."""
    logps = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    tokens = Tokens(logps, logps.detach(), torch.zeros(3), torch.zeros(3), [2, 1], None, logps.detach().clone())
    losses, stats = objective(tokens, Algorithm(loss="dpo", kl_coef=0.1))
    assert losses.tolist() == pytest.approx([math.log(2), 0, 0]) and stats["accuracy"].tolist() == [0, 0, 0]
    assert torch.autograd.grad(losses.sum(), logps)[0].tolist() == pytest.approx([-0.05, -0.05, 0.05])


def test_label_smoothing_has_its_minimum_where_the_labels_noise_is():
    """cDPO: with one label in five wrong the slope is 0 at sigmoid(margin) = .8, and turns round beyond."""
    slopes = []
    for p in (0.7, 0.8, 0.9):
        logps = torch.tensor([math.log(p / (1 - p)), 0.0], dtype=torch.float64, requires_grad=True)
        zeros = torch.zeros(2, dtype=torch.float64)
        tokens = Tokens(logps, zeros, zeros, zeros, [1, 1], None, zeros)
        losses, _ = objective(tokens, Algorithm(loss="dpo", kl_coef=1.0, label_smoothing=0.2))
        slopes.append(torch.autograd.grad(losses.sum(), logps)[0][0].item())
    assert slopes == pytest.approx([-0.1, 0.0, 0.1], abs=1e-12)


def test_ipo_does_not_change_with_a_response_said_twice():
    """Log ratios are means over tokens: the same tokens twice are the same margin."""
    short = pairs([2, 3], torch.float64)
    def twice(values):
        return torch.cat([values[:2], values[:2], values[2:], values[2:]]).detach()

    long = Tokens(*[twice(values) for values in (short.logps_R, short.old_logps_R, short.advantages_R, short.entropies_R)], [4, 6],
                  None, twice(short.ref_logps_R))
    algorithm = Algorithm(loss="ipo", kl_coef=0.1)
    assert objective(long, algorithm)[0].sum().item() == pytest.approx(objective(short, algorithm)[0].sum().item(), rel=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=["fp64", "fp32"])
def test_bradley_terry_equals_the_textbook(dtype, tolerance):
    """-log(e^chosen / (e^chosen + e^rejected)) of each pair, and its slope 1 - p."""
    scores = torch.tensor([1.0, 0.5, -2.0, 0.25, 3.0, 3.0], dtype=dtype, requires_grad=True)
    zeros = torch.zeros(6, dtype=dtype)
    losses, stats = objective(Tokens(scores, zeros, zeros, zeros, [1] * 6), Algorithm(loss="bradley_terry"))
    p = [math.exp(a) / (math.exp(a) + math.exp(b)) for a, b in ((1.0, 0.5), (-2.0, 0.25), (3.0, 3.0))]
    assert losses.tolist() == pytest.approx([-math.log(p[0]), 0, -math.log(p[1]), 0, -math.log(p[2]), 0], rel=tolerance)
    assert torch.autograd.grad(losses.sum(), scores)[0].tolist() == pytest.approx(
        [slope for chosen in p for slope in (chosen - 1, 1 - chosen)], rel=tolerance)
    assert stats["margin"].tolist() == [0.5, 0, -2.25, 0, 0, 0] and stats["accuracy"].tolist() == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("loss", ["dpo", "bradley_terry"])
def test_a_margin_of_a_thousand_stays_finite(loss):
    """log(sigmoid(-1000)) is -inf when taken in two steps; the loss is 1000 and the slope +-1."""
    for sign, value in ((1, 0.0), (-1, 1000.0)):
        logps = torch.tensor([500.0 * sign, -500.0 * sign], requires_grad=True)
        tokens = Tokens(logps, torch.zeros(2), torch.zeros(2), torch.zeros(2), [1, 1], None, torch.zeros(2))
        losses, _ = objective(tokens, Algorithm(loss=loss, kl_coef=1.0))
        assert losses.tolist() == [value, 0.0]
        assert torch.autograd.grad(losses.sum(), logps)[0].tolist() == [0.0 if sign > 0 else -1.0, 0.0 if sign > 0 else 1.0]


def test_preference_losses_take_no_kl_entropy_or_importance_term():
    """kl_coef is DPO's beta: a KL penalty beside it would count it twice."""
    tokens = pairs([2, 2], torch.float64)
    tokens.rollout_logps_R = tokens.logps_R.detach() - 1
    plain = objective(tokens, Algorithm(loss="dpo", kl_coef=0.3))
    loaded = objective(tokens, Algorithm(loss="dpo", kl_coef=0.3, entropy_coef=1.0, importance="token_mask", kl_estimator="k1"))
    assert torch.equal(plain[0], loaded[0]) and set(loaded[1]) == {"margin", "accuracy"}
