"""RMSNorm and the residual addition before it, in one pass over memory.

    s  = residual + x                       rounded to the type of the data; s = x without a residual
    r  = 1 / sqrt(mean(s^2) + eps)          fp32, one number a row
    y  = weight * round(s r)                rounded where Hugging Face rounds, before the weight
    ds = r (g - n mean(g n)) + dsum         g = weight dy, n = s r; this is both dx and dresidual
    dweight = sum over rows of dy round(n)

Letters: T tokens, E hidden; [T, H, D] works too (qk-norm on heads inside a fused qkv), "row" is then one head of one token.
Source: arXiv 1910.07467; the addition is fused as in vLLM, the backward as in Liger-Kernel.

Memory-bound. A row is read twice (x, residual) and written twice (s, y): 4 x 8192 x 2 bytes = 64 KiB a token and norm for a 70B,
10.5 MB a token for its 160, 3.1 us at 3.35 TB/s. The torch version below moves 42 bytes an element where this moves 8.

Deliberately different: vLLM writes s over the residual, here it is a new tensor, because autograd keeps it (the same bytes). Liger
sums dweight over as many programs as the GPU has SMs; here their number is fixed, so that a gradient has the same bits everywhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264  # of the backward kernel, at most: two for each SM of an H100


class _OnCpu(torch.autograd.Function):
    """Keeps the sum and one number a row; autograd would keep n too, 2.3 kB a token and norm of SmolLM2."""

    @staticmethod
    def forward(ctx, x_TE, weight_E, eps, residual_TE):
        # Exact mode compares bits: these are the operations of Hugging Face's LlamaRMSNorm, in their order.
        sum_TE = x_TE if residual_TE is None else residual_TE + x_TE
        full_TE = sum_TE.float()
        rstd_T1 = torch.rsqrt(full_TE.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(sum_TE, weight_E, rstd_T1)
        ctx.has_residual = residual_TE is not None
        ctx.set_materialize_grads(False)
        y_TE = weight_E * (full_TE * rstd_T1).to(sum_TE.dtype)
        return (y_TE, sum_TE) if ctx.has_residual else y_TE

    @staticmethod
    def backward(ctx, grad_y_TE, grad_sum_TE=None):
        if grad_y_TE is None:
            return grad_sum_TE, None, None, grad_sum_TE
        sum_TE, weight_E, rstd_T1 = ctx.saved_tensors
        n_TE = sum_TE * rstd_T1
        grad_weight_E = (grad_y_TE * n_TE.to(sum_TE.dtype)).reshape(-1, len(weight_E)).sum(0, dtype=torch.float32)
        g_TE = grad_y_TE.float() * weight_E
        along_T1 = (g_TE * n_TE).mean(-1, keepdim=True)
        grad_TE = g_TE.sub_(n_TE.mul_(along_T1)).mul_(rstd_T1).to(sum_TE.dtype)
        if grad_sum_TE is not None:
            grad_TE += grad_sum_TE
        return grad_TE, grad_weight_E.to(weight_E.dtype), None, grad_TE if ctx.has_residual else None


def rms_norm_torch(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
    y = _OnCpu.apply(x_TE, weight_E, eps, residual_TE)
    return (y, x_TE) if residual_TE is None else y


def launch(width: int) -> dict:
    """Whole rows in registers, 16 elements a thread; narrow rows (heads) share a program."""
    block = triton.next_power_of_2(width)
    rows = max(1, 2048 // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(4, rows * block // 512))}


@triton.jit
def _forward(x, residual, weight, total, y, rstd, rows, inner, width, outer_stride, inner_stride, eps,
             HAS_RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    # Row numbers fit 32 bits and divide faster there; offsets do not fit: 64k tokens x 57344 features are beyond 2^31.
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    flat = row.to(tl.int64)[:, None] * width + column[None, :]
    s = tl.load(x + start[:, None] + column[None, :], mask=mask, other=0.0)
    if HAS_RESIDUAL:
        added = tl.load(residual + flat, mask=mask, other=0.0)
        # Rounded before the statistics are taken: the backward pass and the next layer see only the rounded sum.
        s = (added.to(tl.float32) + s.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + flat, s, mask=mask)
    full = s.to(tl.float32)
    # The padding up to a power of two was loaded as 0: it adds nothing here, and the divisor is the true width.
    r = tl.rsqrt(tl.sum(full * full, 1) / width + eps)
    normed = (full * r[:, None]).to(s.dtype).to(tl.float32)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + flat, normed * w[None, :], mask=mask)
    tl.store(rstd + row, r, mask=row < rows)  # 4 bytes a row spare backward a reduction


@triton.jit
def _backward(grad_y, grad_total, total, weight, rstd, grad_x, partial, rows, inner, width, outer_stride, inner_stride,
              HAS_GRAD_TOTAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    grad_w = tl.zeros([ROWS, BLOCK], tl.float32)  # reduced over ROWS once, at the end: that crosses warps
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
        flat = row.to(tl.int64)[:, None] * width + column[None, :]
        s = tl.load(total + start[:, None] + column[None, :], mask=mask, other=0.0)
        dy = tl.load(grad_y + flat, mask=mask, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, mask=row < rows, other=0.0)
        n = s.to(tl.float32) * r[:, None]
        g = dy * w[None, :]
        # What n already points along is taken out: a longer s is the same n.
        ds = (g - n * (tl.sum(g * n, 1) / width)[:, None]) * r[:, None]
        if HAS_GRAD_TOTAL:
            ds += tl.load(grad_total + flat, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad_x + flat, ds, mask=mask)
        # The forward pass multiplied the weight with the rounded n.
        grad_w += dy * n.to(s.dtype).to(tl.float32)
    tl.store(partial + tl.program_id(0).to(tl.int64) * width + column, tl.sum(grad_w, 0), mask=column < width)


def _as_rows(x: Tensor) -> Tensor:
    """[..., E] as [outer, inner, E]: two strides describe heads inside a fused qkv, so nothing is copied."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.view(1, 1, -1) if x.ndim == 1 else x[:, None] if x.ndim == 2 else x.flatten(0, -3)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TE, weight_E, eps, residual_TE):
        x, width = _as_rows(x_TE), x_TE.shape[-1]
        rows, parameters = x.shape[0] * x.shape[1], launch(width)
        # An fp32 weight over bf16 data gives fp32, as in torch.
        y_TE = torch.empty(x_TE.shape, dtype=torch.promote_types(x_TE.dtype, weight_E.dtype), device=x_TE.device)
        sum_TE = x_TE if residual_TE is None else torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
        rstd_R = torch.empty(rows, dtype=torch.float32, device=x_TE.device)
        residual = x_TE if residual_TE is None else residual_TE.contiguous()
        _forward[(triton.cdiv(rows, parameters["ROWS"]),)](
            x, residual, weight_E, sum_TE, y_TE, rstd_R, rows, x.shape[1], width, x.stride(0), x.stride(1), eps,
            HAS_RESIDUAL=residual_TE is not None, **parameters)
        ctx.save_for_backward(sum_TE, weight_E, rstd_R)
        ctx.has_residual = residual_TE is not None
        ctx.set_materialize_grads(False)  # a sum that nothing reads costs no tensor of zeros
        return (y_TE, sum_TE) if ctx.has_residual else y_TE

    @staticmethod
    def backward(ctx, grad_y_TE, grad_sum_TE=None):
        if grad_y_TE is None:
            return grad_sum_TE, None, None, grad_sum_TE
        sum_TE, weight_E, rstd_R = ctx.saved_tensors
        s, width, parameters = _as_rows(sum_TE), sum_TE.shape[-1], launch(sum_TE.shape[-1])
        # Gradients may come expanded (stride 0, from a plain sum) or transposed.
        grad_y, grad_sum = grad_y_TE.contiguous(), None if grad_sum_TE is None else grad_sum_TE.contiguous()
        grad_x_TE = torch.empty(sum_TE.shape, dtype=sum_TE.dtype, device=sum_TE.device)
        programs = min(PROGRAMS, triton.cdiv(len(rstd_R), parameters["ROWS"]))
        partial_PE = torch.empty(programs, width, dtype=torch.float32, device=sum_TE.device)
        _backward[(programs,)](
            grad_y, grad_y if grad_sum is None else grad_sum, s, weight_E, rstd_R, grad_x_TE, partial_PE, len(rstd_R), s.shape[1],
            width, s.stride(0), s.stride(1), HAS_GRAD_TOTAL=grad_sum is not None, **parameters)
        # No atomics: the same rows give the same bits, and the order does not depend on the GPU.
        grad_weight_E = partial_PE.sum(0).to(weight_E.dtype)
        return grad_x_TE, grad_weight_E, None, grad_x_TE if ctx.has_residual else None


def rms_norm_triton(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if residual_TE is None:
        # x goes around the Function: an input returned from it would be taken for a new tensor.
        return _RMSNorm.apply(x_TE, weight_E, eps, None), x_TE
    assert residual_TE.shape == x_TE.shape and residual_TE.dtype == x_TE.dtype, "the residual would be read beyond its end"
    return _RMSNorm.apply(x_TE, weight_E, eps, residual_TE)


def rms_norm(x_TE: Tensor, weight_E: Tensor, eps: float, residual_TE: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weight * norm(residual + x), residual + x); the second is the residual of the next layer."""
    return (rms_norm_triton if x_TE.is_cuda else rms_norm_torch)(x_TE, weight_E, eps, residual_TE)
