"""Advantages and policy losses as pure functions on tensors: what researchers fork most.

One signature: a loss takes `Tokens` (fp32 vectors over the response tokens of a micro-batch) and the algorithm's settings, and
returns the loss of each token with per-token statistics. How tokens are averaged is decided by `token_weight` from *global* counts,
so that a step's gradient is the same for every split into ranks and micro-batches:

    loss = sum_t w_t loss_t,   token: w = 1/tokens   sequence: 1/(sequences len)   constant: 1/(sequences cap)   sum: 1/sequences

R response tokens of a micro-batch.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from config import Algorithm

MAX_LOG_RATIO = 20.0  # e^20 = 4.9e8: far outside every clip, and finite after squaring in fp32


@dataclass(slots=True)
class Tokens:
    """What a loss may look at, one entry a response token."""
    logps_R: Tensor  # under the current weights, with gradient
    old_logps_R: Tensor  # recorded by the engine when the token was sampled
    advantages_R: Tensor
    entropies_R: Tensor  # with gradient
    ref_logps_R: Tensor | None = None  # under the frozen reference


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


def token_weight(mean: str, length: int, tokens: int, sequences: int, max_new_tokens: int) -> float:
    """Weight of each token of a sequence of `length`, from the global counts of contributing tokens and sequences."""
    if sequences == 0 or length == 0:
        return 0.0
    return {"token": 1 / tokens, "sequence": 1 / (sequences * length), "constant": 1 / (sequences * max_new_tokens),
            "sum": 1 / sequences}[mean]


def kl(logps: Tensor, ref_logps: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(policy || reference) on the policy's samples; k3 is unbiased and never negative.

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


def clipped_surrogate(ratio: Tensor, advantages: Tensor, algorithm: Algorithm) -> Tensor:
    """-min(r A, clip(r) A), for negative A at most -dual_clip A. Sources: PPO, arXiv 1707.06347; dual clip, 1912.09729."""
    clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if algorithm.dual_clip:
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * algorithm.dual_clip), loss)
    return loss


def grpo(tokens: Tokens, algorithm: Algorithm) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped surrogate with the group-relative advantage, KL to the reference and an entropy bonus.

    Returns (loss [R], statistics [R]): `kl` (to the reference, else k3 of KL(sampling policy || current)),
    `clipped` (1 where the clip binds). Source: arXiv 2402.03300.
    """
    log_ratio = tokens.logps_R - tokens.old_logps_R
    ratio = torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    loss = clipped_surrogate(ratio, tokens.advantages_R, algorithm)
    outside = torch.where(tokens.advantages_R > 0, ratio > 1 + algorithm.clip_high, ratio < 1 - algorithm.clip_low)
    if tokens.ref_logps_R is None:
        divergence = kl(tokens.old_logps_R, tokens.logps_R.detach(), "k3")  # the samples are the old policy's
    else:
        divergence = kl(tokens.logps_R, tokens.ref_logps_R, algorithm.kl_estimator)
        loss = loss + algorithm.kl_coef * divergence
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * tokens.entropies_R
    if algorithm.dual_clip:
        outside |= (tokens.advantages_R < 0) & (ratio > algorithm.dual_clip)
    return loss, {"kl": divergence.detach(), "clipped": (outside & (tokens.advantages_R != 0)).float()}
