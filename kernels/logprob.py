"""Log-probabilities of chosen tokens from hidden states and the head's weight.

    z = (h W^T)[: vocab] / temperature       logp = log_softmax(z)       H = -sum_v p_v logp_v
    d logp_y / dz = onehot(y) - p            dH / dz_v = -p_v (logp_v + H)

`log_probs` is the one function that engine, learner and reference share, so that their logprobs agree: fp32 logits, ids beyond
the tokenizer masked, divided by the temperature, one log_softmax (`logit - logsumexp` differs from it by 4e-5).

The [tokens, vocabulary] matrix is never built: 32k tokens of a 128k vocabulary are 17 GB in fp32, and autograd keeps several.
Chunks of rows are computed forward, dropped, and computed again in backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import ROW_PAD


def log_probs(hidden_RE: Tensor, weight_VE: Tensor, temperature_R1: Tensor, vocab: int) -> Tensor:
    """fp32 [R, V] log-probabilities; rows are computed in multiples of 4 so that their bits do not depend on R."""
    rows = hidden_RE.shape[0]
    logits_RV = F.linear(F.pad(hidden_RE, (0, 0, 0, -rows % ROW_PAD)), weight_VE)[:rows].float()
    if vocab < logits_RV.shape[1]:
        logits_RV[:, vocab:] = -torch.inf
    return torch.log_softmax(logits_RV / temperature_R1, -1)


def entropy(logp_RV: Tensor) -> Tensor:
    """-sum p logp of each row; a masked id (logp = -inf) contributes 0."""
    return -(logp_RV.exp() * logp_RV.clamp_min(torch.finfo(logp_RV.dtype).min)).sum(-1)


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_RE, weight_VE, targets_R, temperature, vocab, chunk):
        ctx.save_for_backward(hidden_RE, weight_VE, targets_R)
        ctx.settings = temperature, vocab, chunk
        ctx.set_materialize_grads(False)
        temperature_11 = torch.full((1, 1), temperature, device=hidden_RE.device)
        logps_R = hidden_RE.new_empty(len(targets_R), dtype=torch.float32)
        entropies_R = torch.empty_like(logps_R)
        for rows in _chunks(len(targets_R), chunk):
            logp_RV = log_probs(hidden_RE[rows], weight_VE, temperature_11, vocab)
            logps_R[rows] = logp_RV.gather(1, targets_R[rows, None])[:, 0]
            entropies_R[rows] = entropy(logp_RV)
        return logps_R, entropies_R

    @staticmethod
    def backward(ctx, grad_logps_R, grad_entropies_R):
        hidden_RE, weight_VE, targets_R = ctx.saved_tensors
        temperature, vocab, chunk = ctx.settings
        temperature_11 = torch.full((1, 1), temperature, device=hidden_RE.device)
        grad_hidden_RE = torch.zeros_like(hidden_RE)
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32)
        for rows in _chunks(len(targets_R), chunk):
            logp_RV = log_probs(hidden_RE[rows], weight_VE, temperature_11, vocab)
            p_RV = logp_RV.exp()
            grad_logits_RV = torch.zeros_like(p_RV)
            if grad_logps_R is not None:
                grad_logits_RV -= p_RV * grad_logps_R[rows, None]
                grad_logits_RV.scatter_add_(1, targets_R[rows, None], grad_logps_R[rows, None])
            if grad_entropies_R is not None:
                surprise_RV = logp_RV.clamp_min(torch.finfo(torch.float32).min) + entropy(logp_RV)[:, None]
                grad_logits_RV -= p_RV * surprise_RV * grad_entropies_R[rows, None]
            grad_logits_RV = (grad_logits_RV / temperature).to(weight_VE.dtype)
            grad_hidden_RE[rows] = grad_logits_RV @ weight_VE
            grad_weight_VE += grad_logits_RV.T @ hidden_RE[rows]
        return grad_hidden_RE, grad_weight_VE.to(weight_VE.dtype), None, None, None, None


def _chunks(rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


def chosen_logprobs(hidden_RE: Tensor, weight_VE: Tensor, targets_R: Tensor, temperature: float, vocab: int,
                    chunk: int) -> tuple[Tensor, Tensor]:
    """(logprob of `targets`, entropy), both fp32 [R], differentiable in hidden and weight; peak extra memory O(chunk x V)."""
    return _ChosenLogprobs.apply(hidden_RE, weight_VE, targets_R, temperature, vocab, chunk)
