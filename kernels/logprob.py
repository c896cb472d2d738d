"""Log-probabilities of chosen tokens, and entropies, from hidden states and the head's weight.

    z = (h W^T)[: vocab] / T             logp = log_softmax(z)            H = -sum_v p_v logp_v
    d logp_y / dz = onehot(y) - p        dH / dz_v = -p_v (logp_v + H)

Letters: R rows, V vocabulary (this rank's part), E hidden, S splits of the vocabulary in the forward kernel.

The [R, V] matrix is never built: 32k tokens of a 128k vocabulary are 17 GB in fp32, and autograd keeps several. With m = max z,
s = sum e^(z-m), w = sum e^(z-m) (z-m), which one online pass finds and which combine over splits and tensor-parallel ranks:
    logp_y = z_y - m - log s             H = log s - w / s

GPU, bound by the tensor cores: 2RVE forward, 6RVE backward. For the 70B (V 128256, E 8192) and 32k rows 69 + 207 TFLOP, 0.28 s at
an H200's 989 TFLOP/s in bf16, shared by the group. Forward keeps logits in registers, as cut cross-entropy (arXiv 2411.09009) does.
Backward stores the gradients of a vocabulary slice's logits, R x slice = chunk x V, in the weight's type; cuBLAS does the rest.

Deliberately different
- Liger (arXiv 2410.10989) makes bf16 logits by chunks of rows and sums the weight's gradient over chunks. A slice of the vocabulary
  finishes its rows of that gradient at once (no fp32 [V, E], 4.2 GB), and logits are never rounded.
- Cut cross-entropy skips tiles whose p lie below bf16's resolution. Not here: their sum is the entropy's gradient.
- On the CPU chunks of rows, without a group bit for bit `log_probs`, which engine, learner and reference share.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import ROW_PAD

GROUP = 2048  # rows whose hidden states (32 MB in bf16 at E 8192) stay in L2 while the vocabulary passes by


@dataclass(frozen=True, slots=True)
class Head:  # how hidden states become log-probabilities
    temperature: float
    vocab: int  # ids from here on are the head's padding: masked, no gradient
    chunk: int  # rows whose logits (CPU) or logit gradients (GPU) exist at a time
    first: int = 0  # global id of the first row of the weight
    group: dist.ProcessGroup | None = None  # its ranks hold the rows of one head between them


def head_logits(hidden_RE: Tensor, weight_VE: Tensor, vocab: int) -> Tensor:
    """fp32 [R, V], -inf beyond `vocab`; rows are computed in multiples of 4 so that their bits do not depend on R."""
    rows = hidden_RE.shape[0]
    logits_RV = F.linear(F.pad(hidden_RE, (0, 0, 0, -rows % ROW_PAD)), weight_VE)[:rows].float()
    logits_RV[:, vocab:] = -torch.inf
    return logits_RV


def log_probs(hidden_RE: Tensor, weight_VE: Tensor, temperature_R1: Tensor, vocab: int) -> Tensor:
    """fp32 [R, V] log-probabilities."""
    return torch.log_softmax(head_logits(hidden_RE, weight_VE, vocab) / temperature_R1, -1)


def entropy(logp_RV: Tensor) -> Tensor:
    """-sum p logp of each row; a masked id (logp = -inf) contributes 0."""
    return -(logp_RV.exp() * logp_RV.clamp_min(torch.finfo(logp_RV.dtype).min)).sum(-1)


def chosen_logprobs(hidden_RE: Tensor, weight_VE: Tensor, targets_R: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """(logprob of the global ids `targets`, entropy), fp32 [R], whole on every rank, as is the gradient of `hidden`."""
    return _ChosenLogprobs.apply(hidden_RE, weight_VE, targets_R, head, hidden_RE.is_cuda)


def chosen_logprobs_triton(hidden_RE: Tensor, weight_VE: Tensor, targets_R: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    return _ChosenLogprobs.apply(hidden_RE, weight_VE, targets_R, head, True)


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_RE, weight_VE, targets_R, head, fused):
        ctx.set_materialize_grads(False)
        ctx.head, ctx.compute = head, _backward_triton if fused else _backward
        hidden_RE, weight_VE, local_R = hidden_RE.contiguous(), weight_VE.contiguous(), targets_R - head.first
        logps_R, entropies_R, lse_R = (_forward_triton if fused else _forward)(hidden_RE, weight_VE, local_R, head)
        ctx.save_for_backward(hidden_RE, weight_VE, local_R, entropies_R, lse_R)
        return logps_R, entropies_R

    @staticmethod
    def backward(ctx, *grads):
        grad_hidden_RE, grad_weight_VE = ctx.compute(*ctx.saved_tensors, *grads, ctx.head)
        if ctx.head.group is not None:
            dist.all_reduce(grad_hidden_RE, group=ctx.head.group)
        return grad_hidden_RE.to(ctx.saved_tensors[0].dtype), grad_weight_VE.to(ctx.saved_tensors[1].dtype), None, None, None


def _combine(max_SR: Tensor, sum_SR: Tensor, weighted_SR: Tensor, target_R: Tensor, group) -> tuple[Tensor, Tensor, Tensor]:
    """(logps, entropies, log-partition) from the parts of splits and ranks; `target` is 0 where another rank has the token."""
    max_R = max_SR.amax(0)
    if group is not None:
        dist.all_reduce(max_R, dist.ReduceOp.MAX, group)
    shift_SR = max_SR - max_R
    scale_SR = shift_SR.exp()
    parts_3R = torch.stack([(scale_SR * sum_SR).sum(0), (scale_SR * (weighted_SR + shift_SR * sum_SR)).sum(0), target_R])
    if group is not None:
        dist.all_reduce(parts_3R, group=group)
    sum_R, weighted_R, target_R = parts_3R
    return target_R - max_R - sum_R.log(), sum_R.log() - weighted_R / sum_R, max_R + sum_R.log()


def _chunks(rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, rows)) for start in range(0, rows, chunk)]


def _tempered(hidden_RE: Tensor, weight_VE: Tensor, head: Head) -> Tensor:
    z_RV = head_logits(hidden_RE, weight_VE, max(0, head.vocab - head.first))
    z_RV /= torch.full((1, 1), head.temperature, device=hidden_RE.device)  # divided as the engine's rows are
    return z_RV if head.group is None else z_RV.clamp_min_(-1e30)  # finite, as a rank may hold nothing but masked rows


def _forward(hidden_RE: Tensor, weight_VE: Tensor, local_R: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor | None]:
    logps_R, entropies_R, lse_R = (torch.zeros(len(local_R), device=hidden_RE.device) for _ in range(3))
    at_R1 = local_R[:, None].clamp(0, len(weight_VE) - 1)
    for rows in _chunks(len(local_R), head.chunk):
        z_RV = _tempered(hidden_RE[rows], weight_VE, head)
        logp_RV = torch.log_softmax(z_RV, -1)
        logps_R[rows], entropies_R[rows] = logp_RV.gather(1, at_R1[rows])[:, 0], entropy(logp_RV)
        lse_R[rows] = z_RV.logsumexp(-1) if head.group is not None else 0.0
    if head.group is None:
        return logps_R, entropies_R, None
    # What a rank knows of its rows is a part with m = its log-partition: then s = 1, w = -(its entropy).
    target_R = (logps_R + lse_R).where(at_R1[:, 0] == local_R, 0.0)
    return _combine(lse_R[None], torch.ones_like(lse_R)[None], -entropies_R[None], target_R, head.group)


def _backward(hidden_RE, weight_VE, local_R, entropies_R, lse_R, grad_logps_R, grad_entropies_R, head):
    at_R1 = local_R[:, None].clamp(0, len(weight_VE) - 1)
    grad_hidden_RE, grad_weight_VE = torch.zeros_like(hidden_RE), torch.zeros_like(weight_VE, dtype=torch.float32)
    grad_logps_R = torch.zeros_like(entropies_R) if grad_logps_R is None else grad_logps_R
    for rows in _chunks(len(local_R), head.chunk):  # in place: [1024, 49152] in fp32 are 0.2 GB, and were seven at a time
        logp_RV = _tempered(hidden_RE[rows], weight_VE, head)
        logp_RV = torch.log_softmax(logp_RV, -1) if lse_R is None else logp_RV.sub_(lse_R[rows, None])
        grad_logits_RV = logp_RV.exp()
        if grad_entropies_R is not None:  # p comes first: of masked ids it is 0, and their logp, -3e38, must not overflow
            surprise_RV = logp_RV.clamp_min_(torch.finfo(torch.float32).min).add_(entropies_R[rows, None])
            surprise_RV.mul_(grad_logits_RV).mul_(grad_entropies_R[rows, None])
        grad_logits_RV *= grad_logps_R[rows, None]
        grad_logits_RV.scatter_add_(1, at_R1[rows], -grad_logps_R.where(at_R1[:, 0] == local_R, 0.0)[rows, None])
        grad_logits_RV = (grad_logits_RV if grad_entropies_R is None else grad_logits_RV.add_(surprise_RV)).to(weight_VE.dtype)
        grad_hidden_RE[rows] = grad_logits_RV @ weight_VE
        grad_weight_VE.addmm_(grad_logits_RV.T.float(), hidden_RE[rows].float())
    return grad_hidden_RE.div_(-head.temperature), grad_weight_VE.div_(-head.temperature)


def tile(R: int, E: int, element_size: int, rows: int) -> dict[str, int]:
    """Blocks and options. `rows`: forward on Hopper takes 256 (128 logits a thread, 197 KB), with which backward would spill."""
    blocks = {"BLOCK_R": rows, "BLOCK_V": 128, "BLOCK_E": 64, "num_warps": 8, "num_stages": 4}
    if element_size != 2 or E % 64:  # fp32, or a width that asynchronous copies do not fit: right, not fast
        blocks = {"BLOCK_R": 64, "BLOCK_V": 64, "BLOCK_E": 32, "num_warps": 8, "num_stages": 3}
    group = triton.next_power_of_2(triton.cdiv(min(max(R, 1), GROUP), blocks["BLOCK_R"]))
    return blocks | {"EVEN_E": E % blocks["BLOCK_E"] == 0, "GROUP": group}


def _forward_triton(hidden_RE: Tensor, weight_VE: Tensor, local_R: Tensor, head: Head) -> tuple[Tensor, Tensor, Tensor]:
    (R, E), V = hidden_RE.shape, max(0, min(len(weight_VE), head.vocab - head.first))
    hopper = hidden_RE.is_cuda and torch.cuda.get_device_capability(hidden_RE.device) >= (9, 0)
    options = tile(R, E, hidden_RE.element_size(), 256 if hopper else 128)
    splits = max(1, min(triton.cdiv(V, options["BLOCK_V"]), 128 // options["GROUP"]))  # about a program an SM
    parts_3SR, target_R = torch.empty(3, splits, R, device=hidden_RE.device), torch.zeros(R, device=hidden_RE.device)
    grid = triton.cdiv(R, options["BLOCK_R"] * options["GROUP"]) * options["GROUP"] * splits,  # without rows no program runs
    _partials[grid](hidden_RE, weight_VE, R, V, E, head.temperature, local_R, parts_3SR, target_R, splits, **options)
    return _combine(*parts_3SR, target_R, head.group)


def _backward_triton(hidden_RE, weight_VE, local_R, entropies_R, lse_R, grad_logps_R, grad_entropies_R, head):
    (R, E), V = hidden_RE.shape, max(0, min(len(weight_VE), head.vocab - head.first))
    options = tile(R, E, hidden_RE.element_size(), 128)
    grads = [torch.zeros_like(lse_R) if grad_R is None else grad_R.contiguous() for grad_R in (grad_logps_R, grad_entropies_R)]
    grad_hidden_RE, grad_weight_VE = torch.zeros_like(hidden_RE, dtype=torch.float32), torch.zeros_like(weight_VE)
    row_blocks = triton.cdiv(R, options["BLOCK_R"] * options["GROUP"]) * options["GROUP"]
    width = max(1, head.chunk * V // max(1, R) // options["BLOCK_V"]) * options["BLOCK_V"]
    for ids in _chunks(V, width):
        slice_VE, grad_logits_RV = weight_VE[ids], weight_VE.new_empty(R, ids.stop - ids.start)
        _grad_logits[row_blocks * triton.cdiv(len(slice_VE), options["BLOCK_V"]),](
            hidden_RE, slice_VE, R, len(slice_VE), E, head.temperature, local_R - ids.start, lse_R, entropies_R, *grads,
            grad_logits_RV, **options)
        torch.mm(grad_logits_RV.T, hidden_RE, out=grad_weight_VE[ids])
        grad_hidden_RE += grad_logits_RV @ slice_VE
    return grad_hidden_RE, grad_weight_VE


@triton.jit
def _logits(hidden_ptr, weight_ptr, row, column, R, V, E, temperature, EVEN_E: tl.constexpr, BLOCK_R: tl.constexpr,
            BLOCK_V: tl.constexpr, BLOCK_E: tl.constexpr):
    """z of the tile at (row, column) in fp32. Rows and columns beyond the end repeat the last, so that loads need no mask."""
    lane, rows, columns = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    hidden_ptrs = hidden_ptr + row * tl.cast(E, tl.int64) + (tl.minimum(rows, R - 1 - row)[:, None] * E + lane[None, :])
    weight_ptrs = weight_ptr + column * tl.cast(E, tl.int64) + (tl.minimum(columns, V - 1 - column)[None, :] * E + lane[:, None])
    z = tl.zeros((BLOCK_R, BLOCK_V), tl.float32)
    for start in range(0, E, BLOCK_E):
        inside = (start + lane < E) | EVEN_E
        hidden = tl.load(hidden_ptrs + start, mask=inside[None, :], other=0.0)
        weight = tl.load(weight_ptrs + start, mask=inside[:, None], other=0.0)
        z = tl.dot(hidden, weight, z, input_precision="ieee")
    return z * (1 / temperature)


@triton.jit
def _partials(hidden_ptr, weight_ptr, R, V, E, temperature, local_ptr, parts_ptr, target_ptr, splits, EVEN_E: tl.constexpr,
              GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_E: tl.constexpr):
    """max, sum, weighted sum and chosen z over one split of the vocabulary. Row blocks of a group run first, then splits."""
    program, split = tl.program_id(0), tl.program_id(0) // GROUP % splits
    row = (program // (GROUP * splits) * GROUP + program % GROUP) * BLOCK_R
    rows, columns = row + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_V)
    real = rows < R
    local = tl.load(local_ptr + rows, mask=real, other=-1).to(tl.int32)
    largest = tl.full((BLOCK_R,), -1e30, tl.float32)
    total, weighted, chosen = tl.zeros_like(largest), tl.zeros_like(largest), tl.zeros_like(largest)
    tiles = tl.cdiv(tl.cdiv(V, BLOCK_V), splits)
    start = split * tiles * BLOCK_V
    stop = tl.where(row < R, tl.minimum(start + tiles * BLOCK_V, V), start)
    for first in range(start, stop, BLOCK_V):
        z = _logits(hidden_ptr, weight_ptr, row, first, R, V, E, temperature, EVEN_E, BLOCK_R, BLOCK_V, BLOCK_E)
        z = tl.where((columns < V - first)[None, :], z, -1e30)
        chosen += tl.sum(tl.where(columns[None, :] == (local - first)[:, None], z, 0.0), 1)
        previous, largest = largest, tl.maximum(largest, tl.max(z, 1))
        scale = tl.exp(previous - largest)
        shifted = z - largest[:, None]
        e = tl.exp(shifted)
        weighted = scale * (weighted + (previous - largest) * total) + tl.sum(e * shifted, 1)
        total = scale * total + tl.sum(e, 1)
    out, stride = parts_ptr + split * tl.cast(R, tl.int64) + rows, splits * tl.cast(R, tl.int64)
    tl.store(out, largest, mask=real)
    tl.store(out + stride, total, mask=real)
    tl.store(out + 2 * stride, weighted, mask=real)
    tl.store(target_ptr + rows, chosen, mask=real & (local >= start) & (local < stop))


@triton.jit
def _grad_logits(hidden_ptr, weight_ptr, R, V, E, temperature, local_ptr, lse_ptr, entropy_ptr, grad_logp_ptr, grad_entropy_ptr,
                 out_ptr, EVEN_E: tl.constexpr, GROUP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
                 BLOCK_E: tl.constexpr):
    """One tile of d loss / d (h W^T) over a slice of the vocabulary whose first id is 0 for `local`."""
    program, tiles = tl.program_id(0), tl.cdiv(V, BLOCK_V)
    row, column = (program // (GROUP * tiles) * GROUP + program % GROUP) * BLOCK_R, program // GROUP % tiles * BLOCK_V
    if row < R:
        rows, columns = row + tl.arange(0, BLOCK_R), column + tl.arange(0, BLOCK_V)
        at, real = tl.minimum(rows, R - 1), rows < R
        z = _logits(hidden_ptr, weight_ptr, row, column, R, V, E, temperature, EVEN_E, BLOCK_R, BLOCK_V, BLOCK_E)
        lse, entropy, local = tl.load(lse_ptr + at), tl.load(entropy_ptr + at), tl.load(local_ptr + at).to(tl.int32)
        grad_logp, grad_entropy = tl.load(grad_logp_ptr + at) / temperature, tl.load(grad_entropy_ptr + at) / temperature
        grad = tl.where(columns[None, :] == local[:, None], grad_logp[:, None], 0.0)
        grad -= tl.exp(z - lse[:, None]) * ((grad_logp + grad_entropy * (entropy - lse))[:, None] + grad_entropy[:, None] * z)
        out = out_ptr + row * tl.cast(V, tl.int64) + (tl.arange(0, BLOCK_R)[:, None] * V + columns[None, :])
        tl.store(out, grad.to(out_ptr.dtype.element_ty), mask=real[:, None] & (columns < V)[None, :])
