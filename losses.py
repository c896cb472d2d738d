"""Advantages and losses as pure functions on tensors: what researchers fork most.

One signature: a loss takes `Tokens` (fp32 vectors over the response tokens of a micro-batch, sequences behind each other) and the
algorithm's settings, and returns the loss of each token with per-token statistics. How tokens are averaged is decided by
`token_weight` from *global* counts, so that a step's gradient is the same for every split into ranks and micro-batches:

    loss = sum_t w_t loss_t,   token: w = 1/tokens   sequence: 1/(sequences len)   constant: 1/(sequences cap)   sum: 1/sequences

An algorithm is a loss, an advantage and a mean (config.PRESETS); `objective` puts a loss together with the importance weight, the
KL penalty and the entropy bonus. To try an idea of your own, write a function like `clip` and name it in LOSSES and in config.py.

R response tokens of a micro-batch, N its sequences, T the longest response.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from config import Algorithm

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: far outside every clip, and finite after squaring in fp32


@dataclass(slots=True)
class Tokens:
    """What a loss may look at, one entry a response token."""
    logps_R: Tensor  # under the current weights, with gradient
    old_logps_R: Tensor  # the ratio's denominator: the engine's, or the learner's at the step's start
    advantages_R: Tensor
    entropies_R: Tensor  # with gradient
    lengths: list[int]  # response tokens of each sequence; their sum is R
    rollout_logps_R: Tensor | None = None  # recorded by the engine when the token was sampled
    ref_logps_R: Tensor | None = None  # under the frozen reference

    @property
    def lengths_N(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.long, device=self.logps_R.device)  # a micro-batch may be empty

    def sums(self, values_R: Tensor) -> Tensor:
        """Sum over each sequence, [N]."""
        sequence_R = self.spread(torch.arange(len(self.lengths), device=values_R.device))
        return values_R.new_zeros(len(self.lengths)).index_add(0, sequence_R, values_R)

    def spread(self, values_N: Tensor) -> Tensor:
        """Each sequence's value at all of its tokens, [R]."""
        return values_N.repeat_interleave(self.lengths_N, output_size=len(self.logps_R))


Loss = tuple[Tensor, dict[str, Tensor]]  # of each token, and its statistics


# --- rewards and advantages


def overlong_penalty(length: int, cap: int, buffer: int) -> float:
    """0 up to cap - buffer tokens, then falling linearly to -1 at the cap. Source: DAPO, arXiv 2503.14476, eq. 13."""
    return 0.0 if buffer == 0 else -max(0, length - (cap - buffer)) / buffer


def group_advantages(rewards: list[float | None], use_std: bool) -> list[float]:
    """Rewards of one prompt's samples, centred and (GRPO) divided by their standard deviation, ddof 1.

    Unscored samples (None) get 0 and do not count. A group whose rewards are equal up to rounding is 0 exactly: in
    fp32 the standard deviation of eight times 0.35 is 3e-8, and dividing by it would make noise into advantages of 0.9.
    Source: GRPO, arXiv 2402.03300; without the division, Dr.GRPO, arXiv 2503.20783.
    """
    scored = [reward for reward in rewards if reward is not None]
    if len(scored) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(scored) / len(scored)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in scored) / (len(scored) - 1))
    if std <= 1e-6 * max(1e-3, max(map(abs, scored))):
        return [0.0] * len(rewards)
    scale = std if use_std else 1.0
    return [0.0 if reward is None else (reward - mean) / scale for reward in rewards]


def leave_one_out(rewards: list[float | None]) -> list[float]:
    """Each reward less the mean of the group's others: n/(n - 1) of the centred one. Source: RLOO, arXiv 2402.14740."""
    count = sum(reward is not None for reward in rewards)
    return [advantage * count / max(1, count - 1) for advantage in group_advantages(rewards, use_std=False)]


def gae(rewards_NT: Tensor, values_NT: Tensor, mask_NT: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """(advantages, returns = advantages + values), both [N, T] and 0 where masked; masks are prefixes of rows.

    delta_t = r_t + gamma V_t+1 - V_t;  A_t = delta_t + gamma lam A_t+1, V and A being 0 behind the end. With V = 0 and
    lam = 1, A is the discounted reward to go (REINFORCE++). Source: arXiv 1506.02438, eq. 16.
    """
    values_NT, rewards_NT = values_NT * mask_NT, rewards_NT * mask_NT
    advantages_NT = torch.zeros_like(rewards_NT)
    following_N = next_value_N = rewards_NT.new_zeros(rewards_NT.shape[0])
    for t in reversed(range(rewards_NT.shape[1])):
        delta_N = rewards_NT[:, t] + gamma * next_value_N - values_NT[:, t]
        following_N = (delta_N + gamma * lam * following_N) * mask_NT[:, t]
        next_value_N = values_NT[:, t]
        advantages_NT[:, t] = following_N
    return advantages_NT, advantages_NT + values_NT


def whitening(count: float, total: float, squares: float) -> tuple[float, float]:
    """(shift, scale) that give `count` numbers with this sum and sum of squares mean 0 and variance 1 (ddof 1).

    Fewer than two are left alone; equal ones become 0 rather than noise.
    """
    if count < 2:
        return 0.0, 1.0
    mean = total / count
    std = math.sqrt(max(0.0, squares - count * mean**2) / (count - 1))
    return mean, 1 / std if std > 1e-6 * max(1e-3, abs(mean)) else 0.0


def token_weight(mean: str, length: int, tokens: int, sequences: int, max_new_tokens: int) -> float:
    """Weight of each token of a sequence of `length`, from the global counts of contributing tokens and sequences."""
    if sequences == 0 or length == 0:
        return 0.0
    return {"token": 1 / tokens, "sequence": 1 / (sequences * length), "constant": 1 / (sequences * max_new_tokens),
            "sum": 1 / sequences}[mean]


# --- divergences and ratios


def kl(logps: Tensor, ref_logps: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) on the policy's samples; k3 is unbiased and never negative.

    That holds for values: as a loss, only k2's gradient is the divergence's own.

    Source: J. Schulman, Approximating KL divergence, joschu.net/blog/kl-approx.html.
    """
    gap = logps - ref_logps
    if estimator == "k1":
        return gap
    if estimator == "k2":
        return gap.square() / 2
    # exp(-gap) - 1 + gap, continued along its tangent beyond the limit: finite, and still pushing the right way.
    near = (-gap).clamp(max=MAX_LOG_RATIO)
    return torch.exp(near) * (-gap - near) + torch.expm1(near) + gap


def exp_ratio(log_ratio: Tensor) -> Tensor:
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_surrogate(ratio: Tensor, advantages: Tensor, algorithm: Algorithm) -> Tensor:
    """-min(r A, clip(r) A), for negative A at most -dual_clip A. Sources: PPO, arXiv 1707.06347; dual clip, 1912.09729."""
    clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if algorithm.dual_clip:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * algorithm.dual_clip), loss)
    return loss


def outside_clip(ratio: Tensor, advantages: Tensor, algorithm: Algorithm) -> Tensor:
    """1 where the clip takes a token's gradient away."""
    outside = torch.where(advantages > 0, ratio > 1 + algorithm.clip_high, ratio < 1 - algorithm.clip_low)
    if algorithm.dual_clip:
        outside |= (advantages < 0) & (ratio > algorithm.dual_clip)
    return (outside & (advantages != 0)).float()


def importance_weights(tokens: Tokens, algorithm: Algorithm) -> Tensor:
    """learner's start / engine, per token or per sequence (the product over its tokens); cut at the cap, or 0 beyond it.

    Corrects for stale versions and for two implementations of one policy. Sources: decoupled PPO, arXiv 2110.00641 (in RLHF: AReaL,
    2505.24298); truncation, fengyao.notion.site/off-policy-rl; masking, IcePop, arXiv 2510.18855.
    """
    log_weight_R = (tokens.old_logps_R - tokens.rollout_logps_R).detach()
    level, _, way = algorithm.importance.partition("_")
    if level == "sequence":
        log_weight_R = tokens.spread(tokens.sums(log_weight_R))
    weight_R = exp_ratio(log_weight_R)
    if way == "truncate":
        return weight_R.clamp(max=algorithm.importance_cap)
    inside = (weight_R <= algorithm.importance_cap) & (weight_R >= 1 / algorithm.importance_cap)
    return torch.where(inside, weight_R, 0.0)


# --- losses of rollouts


def clip(tokens: Tokens, algorithm: Algorithm) -> Loss:
    """PPO's clipped surrogate on each token's ratio: PPO, GRPO, Dr.GRPO, DAPO, RLOO, REINFORCE++. Source: arXiv 1707.06347."""
    ratio_R = exp_ratio(tokens.logps_R - tokens.old_logps_R)
    loss_R = clipped_surrogate(ratio_R, tokens.advantages_R, algorithm)
    return loss_R, {"clipped": outside_clip(ratio_R.detach(), tokens.advantages_R, algorithm)}


def gspo(tokens: Tokens, algorithm: Algorithm) -> Loss:
    """The surrogate on each sequence's ratio (pi / pi_old)^(1/length), the same at all its tokens. Source: arXiv 2507.18071."""
    mean_N = tokens.sums(tokens.logps_R - tokens.old_logps_R) / tokens.lengths_N.clamp(min=1)
    ratio_R = tokens.spread(exp_ratio(mean_N))
    loss_R = clipped_surrogate(ratio_R, tokens.advantages_R, algorithm)
    return loss_R, {"clipped": outside_clip(ratio_R.detach(), tokens.advantages_R, algorithm)}


def cispo(tokens: Tokens, algorithm: Algorithm) -> Loss:
    """-sg(min(ratio, 1 + clip_high)) A logp: every token keeps its gradient, only its weight is cut. Source: arXiv 2506.13585."""
    ratio_R = exp_ratio(tokens.logps_R.detach() - tokens.old_logps_R)
    loss_R = -ratio_R.clamp(max=1 + algorithm.clip_high) * tokens.advantages_R * tokens.logps_R
    return loss_R, {"clipped": ((ratio_R > 1 + algorithm.clip_high) & (tokens.advantages_R != 0)).float()}


# --- losses of preference pairs: sequence 2i is chosen over 2i + 1. A pair's loss stands at the first token of the chosen one.


def margins(tokens: Tokens) -> Tensor:
    """log (pi/ref)(chosen) - log (pi/ref)(rejected) of each pair, [N / 2]."""
    gain_N = tokens.sums(tokens.logps_R - tokens.ref_logps_R)
    return gain_N[0::2] - gain_N[1::2]


def at_pairs(tokens: Tokens, pair_loss: Tensor, margin: Tensor) -> Loss:
    """Each pair's loss at the chosen sequence's first token, 0 elsewhere; statistics so that their token sums count pairs."""
    starts = (tokens.lengths_N.cumsum(0) - tokens.lengths_N)[0::2]

    def place(values: Tensor) -> Tensor:
        return torch.zeros_like(tokens.logps_R, dtype=values.dtype).index_add(0, starts, values)

    return place(pair_loss), {"margin": place(margin.detach()), "accuracy": place((margin.detach() > 0).float())}


def dpo(tokens: Tokens, algorithm: Algorithm) -> Loss:
    """-(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m), beta = kl_coef, e = label_smoothing.

    Sources: arXiv 2305.18290; label smoothing (conservative DPO), ericmitchell.ai/cdpo.pdf.
    """
    margin, smoothing = algorithm.kl_coef * margins(tokens), algorithm.label_smoothing
    return at_pairs(tokens, -(1 - smoothing) * F.logsigmoid(margin) - smoothing * F.logsigmoid(-margin), margin)


def ipo(tokens: Tokens, algorithm: Algorithm) -> Loss:
    """(m - 1 / (2 beta))^2 with log ratios averaged over tokens, as its authors implement it. Source: arXiv 2310.12036."""
    gain_N = tokens.sums(tokens.logps_R - tokens.ref_logps_R) / tokens.lengths_N.clamp(min=1)
    margin = gain_N[0::2] - gain_N[1::2]
    return at_pairs(tokens, (margin - 1 / (2 * algorithm.kl_coef)).square(), algorithm.kl_coef * margin)


def bradley_terry(tokens: Tokens, algorithm: Algorithm) -> Loss:
    """-log sigmoid(score(chosen) - score(rejected)); `logps_R` holds one score a sequence. Source: arXiv 2203.02155, eq. 1."""
    margin = tokens.logps_R[0::2] - tokens.logps_R[1::2]
    return at_pairs(tokens, -F.logsigmoid(margin), margin)


LOSSES = {"clip": clip, "gspo": gspo, "cispo": cispo, "dpo": dpo, "ipo": ipo, "bradley_terry": bradley_terry}


def objective(tokens: Tokens, algorithm: Algorithm) -> Loss:
    """The configured loss; on rollouts also importance weight, KL penalty and entropy bonus. Returns (loss [R], statistics [R]).

    Statistics of rollouts: `clipped` (1 where the clip binds), `kl` (to the reference, else k3 of KL(sampling policy || current)).
    """
    loss_R, statistics = LOSSES[algorithm.loss](tokens, algorithm)
    if algorithm.loss in ("dpo", "ipo", "bradley_terry"):
        return loss_R, statistics
    if algorithm.importance != "none":
        weight_R = importance_weights(tokens, algorithm)
        loss_R = loss_R * weight_R
        statistics["importance"] = weight_R
    if tokens.ref_logps_R is None:
        divergence_R = kl(tokens.old_logps_R, tokens.logps_R.detach(), "k3")  # the samples are the old policy's
    else:
        divergence_R = kl(tokens.logps_R, tokens.ref_logps_R, algorithm.kl_estimator)
        if algorithm.kl_in == "loss":
            loss_R = loss_R + algorithm.kl_coef * divergence_R
    if algorithm.entropy_coef:
        loss_R = loss_R - algorithm.entropy_coef * tokens.entropies_R
    return loss_R, statistics | {"kl": divergence_R.detach()}


def value_loss(values_R: Tensor, old_values_R: Tensor, returns_R: Tensor, limit: float) -> Tensor:
    """max((V - R)^2, (clip(V, V_old +- limit) - R)^2) / 2 of each token; limit 0: no clip. Source: arXiv 2005.12729, sec. 3."""
    loss_R = (values_R - returns_R).square()
    if limit:
        near_R = old_values_R + (values_R - old_values_R).clamp(-limit, limit)
        loss_R = torch.maximum(loss_R, (near_R - returns_R).square())
    return loss_R / 2
