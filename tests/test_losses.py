"""The losses of rollouts and the value loss (L7, L8, L11) against a naive float64 version on padded matrices."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config import PRESETS, Algorithm, ConfigError
from losses import LOSSES, Tokens, clipped_surrogate, importance_weights, kl, objective, token_weight, value_loss
from settings import build

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


# --- the textbook: padded matrices, one token at a time


CAP = 6  # longest response
LENGTHS = [3, 6, 0, 1, 4, 6, 5]
FLOAT64, FLOAT32 = (torch.float64, 1e-12), (torch.float32, 3e-6)  # and the tolerance, absolute and relative


def batch(lengths: list[int], seed: int, spread: float = 0.5) -> dict[str, torch.Tensor]:
    """Padded [N, CAP] matrices with NaN behind each row's end; every number is exact in fp32."""
    g = torch.Generator().manual_seed(seed)
    shape, outside = (len(lengths), CAP), torch.arange(CAP) >= torch.tensor(lengths)[:, None]
    rollout = -3 * torch.rand(shape, generator=g)
    old = rollout + spread * torch.randn(shape, generator=g)
    rows = {"rollout": rollout, "old": old, "logps": old + spread * torch.randn(shape, generator=g),
            "ref": old + spread * torch.randn(shape, generator=g), "entropies": torch.rand(shape, generator=g),
            "advantages": torch.randn(shape, generator=g).round(decimals=1)}
    return {name: values.masked_fill(outside, torch.nan) for name, values in rows.items()}


def textbook(rows: dict[str, torch.Tensor], lengths: list[int], a: Algorithm, with_ref: bool) -> torch.Tensor:
    """The step's loss."""
    total, tokens, sequences = torch.zeros((), dtype=torch.float64), sum(lengths), sum(length > 0 for length in lengths)
    for n, length in enumerate(lengths):
        logps, old, rollout, ref, entropies, advantages = (
            [rows[name][n, t] for t in range(length)] for name in ("logps", "old", "rollout", "ref", "entropies", "advantages"))
        for t in range(length):
            A = advantages[t].item()
            ratio = (logps[t] - old[t]).exp()
            if a.loss == "gspo":
                ratio = (sum(logps[u] - old[u] for u in range(length)) / length).exp()
            if a.loss == "cispo":
                loss = -min(ratio.item(), 1 + a.clip_high) * A * logps[t]
            else:
                clipped = 1 - a.clip_low if ratio < 1 - a.clip_low else 1 + a.clip_high if ratio > 1 + a.clip_high else ratio
                surrogate = min(ratio * A, clipped * A)
                if a.dual_clip and A < 0 and surrogate < a.dual_clip * A:
                    surrogate = a.dual_clip * A
                loss = -surrogate
            if a.importance != "none":
                level, way = a.importance.split("_")
                weight = 1.0
                for u in range(length) if level == "sequence" else [t]:
                    weight *= (old[u] - rollout[u]).exp().item()
                if way == "truncate":
                    weight = min(weight, a.importance_cap)
                elif weight > a.importance_cap or weight < 1 / a.importance_cap:
                    weight = 0.0
                loss = loss * weight
            if with_ref and a.kl_in == "loss":
                gap = logps[t] - ref[t]
                loss = loss + a.kl_coef * {"k1": gap, "k2": gap**2 / 2, "k3": (-gap).exp() - 1 + gap}[a.kl_estimator]
            loss = loss - a.entropy_coef * entropies[t]
            total = total + loss / {"token": tokens, "sequence": sequences * length, "constant": sequences * CAP,
                                    "sum": sequences}[a.loss_mean]
    return total


def packed(rows: dict[str, torch.Tensor], lengths: list[int], with_ref: bool = False) -> Tokens:
    """The same tokens behind each other, as losses take them."""
    inside = torch.arange(CAP) < torch.tensor(lengths, dtype=torch.long)[:, None]
    flat = {f"{name}_R": values[inside] for name, values in rows.items()}
    return Tokens(flat["logps_R"], flat["old_R"], flat["advantages_R"], flat["entropies_R"], lengths, flat["rollout_R"],
                  flat["ref_R"] if with_ref else None)


def step_loss(tokens: Tokens, a: Algorithm) -> torch.Tensor:
    """Weighted as the learner does it, from global counts."""
    count, sequences = sum(tokens.lengths), sum(length > 0 for length in tokens.lengths)
    weights = [token_weight(a.loss_mean, length, count, sequences, CAP) for length in tokens.lengths for _ in range(length)]
    return (objective(tokens, a)[0] * torch.tensor(weights, dtype=tokens.logps_R.dtype)).sum()


def compare(lengths: list[int], seed: int, a: Algorithm, with_ref: bool, precision: tuple, spread: float = 0.5) -> None:
    """Value, and gradients in logprobs and entropies."""
    (dtype, tolerance), results = precision, []
    for kind, loss_of in ((torch.float64, textbook), (dtype, lambda rows, *rest: step_loss(packed(rows, lengths, with_ref), a))):
        rows = {name: values.to(kind) for name, values in batch(lengths, seed, spread).items()}
        leaves = [rows["logps"].requires_grad_(), rows["entropies"].requires_grad_()]
        loss = loss_of(rows, lengths, a, with_ref)
        loss = loss + 0.0 * sum(leaf.nan_to_num().sum() for leaf in leaves)  # has a gradient, if only of zeros
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    for right, got in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), right, atol=tolerance, rtol=tolerance)


ALGORITHMS = st.builds(
    Algorithm, loss=st.sampled_from(["clip", "gspo", "cispo"]), clip_low=st.sampled_from([0.0, 0.1, 0.2]),
    clip_high=st.sampled_from([0.0, 0.28, 4.0]), dual_clip=st.sampled_from([0.0, 1.2, 3.0]),
    importance=st.sampled_from(["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]),
    importance_cap=st.sampled_from([1.0, 1.5, 2.0]), entropy_coef=st.sampled_from([0.0, 0.01]),
    kl_coef=st.sampled_from([0.0, 0.1]), kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    kl_in=st.sampled_from(["loss", "reward"]), loss_mean=st.sampled_from(["token", "sequence", "constant", "sum"]))


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(0, CAP), max_size=5), st.integers(0, 999), ALGORITHMS, st.booleans())
def test_every_loss_equals_the_textbook(lengths, seed, algorithm, with_ref):
    """Any loss, importance weight, KL, mean and clip, on sequences of 0 to 6 tokens: value and gradients within 1e-12."""
    compare(lengths, seed, algorithm, with_ref, FLOAT64)


@pytest.mark.parametrize("name", sorted(name for name in PRESETS if name not in ("dpo", "reward_model")))
@pytest.mark.parametrize("seed", range(3))
def test_presets_in_fp32_equal_the_textbook(name, seed):
    """What the learner computes in is fp32: within 3e-6 of the float64 loop, at the preset's own clips and mean."""
    algorithm = build({"algorithm": {"name": name, "entropy_coef": 0.01}}).algorithm
    spread = 1e-3 if name == "gspo" else 3.0 if name == "cispo" else 0.5  # so that some tokens clip and some do not
    compare(LENGTHS, seed, algorithm, True, FLOAT32, spread)
    clipped = objective(packed(batch(LENGTHS, seed, spread), LENGTHS), algorithm)[1]["clipped"]
    assert 0 < clipped.sum() < sum(LENGTHS)


# --- single properties


def one(logp: float, old: float, advantage: float, **more) -> Tokens:
    """A response of one token."""
    fields = {name: torch.tensor([value]) for name, value in more.items()}
    return Tokens(torch.tensor([logp], requires_grad=True), torch.tensor([old]), torch.tensor([advantage]), torch.zeros(1), [1],
                  **fields)


def test_gspo_takes_the_geometric_mean_of_a_sequences_ratios():
    """Ratios e^.3 and e^-.1 of two tokens: both get e^.1, and half of the slope each; the neighbour of one token keeps its own."""
    logps = torch.tensor([-0.7, -1.1, -2.0], requires_grad=True)
    tokens = Tokens(logps, torch.tensor([-1.0, -1.0, -1.8]), torch.ones(3), torch.zeros(3), [2, 1])
    losses, _ = objective(tokens, Algorithm(loss="gspo", clip_low=0.5, clip_high=0.5))
    s, s2 = math.exp(0.1), math.exp(-0.2)
    assert losses.tolist() == pytest.approx([-s, -s, -s2], rel=1e-6)
    assert torch.autograd.grad(losses.sum(), logps)[0].tolist() == pytest.approx([-s, -s, -s2], rel=1e-6)


def test_cispo_keeps_the_gradient_of_every_token():
    """Ratio e^2 with clip_high 4: weight 5, slope -5 A, where PPO's clip would leave none; no lower bound on the weight."""
    for gap, A, weight in [(2.0, 1.0, 5.0), (2.0, -1.0, 5.0), (-3.0, 1.0, math.exp(-3)), (0.5, 2.0, math.exp(0.5))]:
        tokens = one(-1.0 + gap, -1.0, A)
        losses, stats = objective(tokens, Algorithm(loss="cispo", clip_high=4.0))
        assert torch.autograd.grad(losses.sum(), tokens.logps_R)[0].item() == pytest.approx(-weight * A, rel=1e-6)
        assert stats["clipped"].item() == float(gap == 2.0)


@pytest.mark.parametrize("importance, right", [
    ("token_truncate", [2.5, 0.25, 1.5, 2.0]), ("token_mask", [0.0, 0.0, 1.5, 2.0]),
    ("sequence_truncate", [0.75, 0.75, 2.5, 2.5]), ("sequence_mask", [0.75, 0.75, 0.0, 0.0])])
def test_importance_weights_of_two_sequences(importance, right):
    """Weights 3, 1/4 | 1.5, 2 with cap 2.5: cut or dropped, by token or by the sequence's product 3/4 | 3; without a gradient."""
    old = torch.tensor([3.0, 0.25, 1.5, 2.0]).log().requires_grad_()
    tokens = Tokens(torch.zeros(4), old, torch.ones(4), torch.zeros(4), [2, 2], torch.zeros(4))
    weights = importance_weights(tokens, Algorithm(importance=importance, importance_cap=2.5))
    assert weights.tolist() == pytest.approx(right, rel=1e-6) and not weights.requires_grad


def test_sequence_mask_drops_a_whole_sequence():
    """The product 6 is beyond the cap, though one of the two tokens is not; the other sequence stays."""
    old = torch.tensor([3.0, 2.0, 0.9]).log()
    tokens = Tokens(old.clone().requires_grad_(), old, torch.ones(3), torch.zeros(3), [2, 1], torch.zeros(3))
    losses, stats = objective(tokens, Algorithm(importance="sequence_mask", importance_cap=5.0))
    assert stats["importance"].tolist() == pytest.approx([0, 0, 0.9]) and losses.tolist() == pytest.approx([0, 0, -0.9])


def test_the_importance_weight_leaves_kl_and_entropy_alone():
    """A masked token loses its policy loss, and is still held to the reference."""
    tokens = one(-1.0, -1.0, 1.0, rollout_logps_R=-9.0, ref_logps_R=-1.5)
    losses, stats = objective(tokens, Algorithm(importance="token_mask", kl_coef=0.1, kl_estimator="k2"))
    assert stats["importance"].item() == 0 and losses.item() == pytest.approx(0.1 * 0.125)


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_l11_an_empty_micro_batch_gives_nothing_and_a_zero_gradient(loss):
    """L11: a rank without sequences still runs forward and backward, or the others wait for it."""
    empty = torch.zeros(0)
    logps = torch.zeros(0, requires_grad=True)
    tokens = Tokens(logps, empty, empty, empty, [], empty, empty)
    losses, stats = objective(tokens, Algorithm(loss=loss, importance="sequence_mask", kl_coef=0.1, entropy_coef=0.1))
    losses.sum().backward()
    assert losses.shape == logps.grad.shape == (0,) and all(values.shape == (0,) for values in stats.values())


@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
@pytest.mark.parametrize("with_ref", [True, False])
def test_statistics_of_a_clipped_loss(dual_clip, with_ref):
    """`clipped` where the ratio leaves the range on the side that binds; `kl` to the reference, else from the sampling policy."""
    lengths = [CAP] * 40
    tokens = packed(batch(lengths, 1), lengths, with_ref)
    tokens.logps_R.requires_grad_()
    algorithm = Algorithm(clip_high=0.3, dual_clip=dual_clip, kl_estimator="k2")
    _, stats = objective(tokens, algorithm)
    ratio, A = (tokens.logps_R.detach() - tokens.old_logps_R).exp(), tokens.advantages_R
    binds = ((A > 0) & (ratio > 1.3)) | ((A < 0) & (ratio < 0.8))
    if dual_clip:
        binds |= (A < 0) & (ratio > dual_clip)
    assert torch.equal(stats["clipped"], binds.float()) and 10 < binds.sum() < 200
    # Without a reference: the drift from the policy that sampled, KL(old || new), whose samples these are.
    gap = tokens.logps_R.detach() - (tokens.ref_logps_R if with_ref else tokens.old_logps_R)
    right = gap**2 / 2 if with_ref else gap.exp() - 1 - gap
    torch.testing.assert_close(stats["kl"], right, atol=1e-6, rtol=1e-5)
    assert not stats["kl"].requires_grad


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_losses_stay_finite_where_the_policy_has_moved_100_nats(loss):
    """A ratio of e^100 is inf in fp32, and inf * 0 is NaN for the whole batch's gradient."""
    logps, old = torch.tensor([-100.0, 0.0, -100.0, 0.0], requires_grad=True), torch.tensor([0.0, -100.0, 0.0, -100.0])
    tokens = Tokens(logps, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.zeros(4), [1] * 4, -100 - old)
    for importance in ("none", "token_truncate", "sequence_mask"):
        losses, stats = objective(tokens, Algorithm(loss=loss, importance=importance))
        assert losses.isfinite().all() and torch.autograd.grad(losses.sum(), logps)[0].isfinite().all()
        assert all(values.isfinite().all() for values in stats.values())


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_on_policy_gradient_is_minus_the_advantage(loss):
    """Ratio 1 exactly: every loss is REINFORCE there; kl 0, nothing clipped."""
    logps, advantages = torch.tensor([-0.3, -2.0, -0.7], requires_grad=True), torch.tensor([1.5, -0.5, 0.0])
    algorithm = Algorithm(loss=loss, dual_clip=3.0 if loss == "clip" else 0.0)
    losses, stats = objective(Tokens(logps, logps.detach().clone(), advantages, torch.zeros(3), [1, 1, 1]), algorithm)
    assert torch.autograd.grad(losses.sum(), logps)[0].tolist() == [-1.5, 0.5, 0.0]
    assert stats["kl"].tolist() == stats["clipped"].tolist() == [0.0] * 3


def test_kl_in_the_reward_is_not_in_the_loss_as_well():
    """It would act twice."""
    tokens = one(-1.0, -1.0, 1.0, ref_logps_R=-1.5)
    in_reward = Algorithm(kl_coef=0.1, kl_in="reward", kl_estimator="k1")
    assert objective(tokens, in_reward)[0].item() == -1.0
    assert objective(tokens, replace(in_reward, kl_in="loss"))[0].item() == pytest.approx(-0.95)


# --- values


@pytest.mark.parametrize("limit", [0.0, 0.2])
def test_value_loss_against_a_loop(limit):
    """Half the larger of two squares; value and slope of 200 values, some within the limit of the old one and some not."""
    g = torch.Generator().manual_seed(0)
    old, returns = torch.randn(2, 200, generator=g, dtype=torch.float64)
    values = (old + 0.2 * torch.randn(200, generator=g)).requires_grad_()
    loss = value_loss(values, old, returns, limit)
    slopes = torch.autograd.grad(loss.sum(), values)[0]
    stopped = 0
    for value, before, target, got, slope in zip(values.tolist(), old.tolist(), returns.tolist(), loss.tolist(), slopes.tolist(),
                                                 strict=True):
        near = min(max(value, before - limit), before + limit) if limit else value
        right = max((value - target) ** 2, (near - target) ** 2) / 2
        binds = (near - target) ** 2 > (value - target) ** 2  # moved further than allowed, towards the target
        stopped += binds
        assert (got, slope) == (pytest.approx(right, abs=1e-12), pytest.approx(0.0 if binds else value - target, abs=1e-12))
    assert stopped > 20 if limit else stopped == 0
