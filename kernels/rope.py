"""Rotary position embedding: each pair of features (i, i + D/2) of a head is a point that turns with its position.

    y_i       = x_i cos - x_{i+D/2} sin
    y_{i+D/2} = x_{i+D/2} cos + x_i sin       the angle of token t and pair i stands in both halves of the table
    dx        = the same rotation of dy by -angle, because rotations are orthogonal

Letters: T tokens, H heads (query or key), D head dim.
Source: arXiv 2104.09864, in Hugging Face's layout (halves, not the paper's neighbours), which is how checkpoints are stored.

Memory-bound: every feature is read and written once, (64 + 8) x 128 x 2 x 2 bytes = 36.9 kB a token and layer for a 70B's queries
and keys, 2.9 MB a token, 0.9 us at 3.35 TB/s. The table is 512 bytes a token, read once for all heads of a program.

Deliberately different: nothing is rotated in place, since q and k are slices of a fused qkv that backward still needs whole; and
the arithmetic is fp32 for any data type, since angles of late positions lose all their digits in bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def rope_torch(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Exact mode compares bits: two products and a sum over whole heads, in this order."""
    cos, sin = (table.reshape(-1, 1, x_THD.shape[-1]) for table in (cos_TD, sin_TD))
    x = x_THD.float()  # a product of two bf16 rounded to bf16 twice would move the pair off its circle
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x_THD.dtype)


def launch(heads: int, head_dim: int) -> dict:
    """One token a program with all its heads, up to 2048 pairs; about 8 pairs a thread."""
    half = triton.next_power_of_2(head_dim // 2)
    together = min(triton.next_power_of_2(heads), max(1, 2048 // half))
    return {"BLOCK_H": together, "BLOCK_HALF": half, "num_warps": min(8, max(1, together * half // 256))}


@triton.jit
def _rotate(x, cos, sin, y, heads, half, token_stride, head_stride, table_stride,
            BACKWARD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, BLOCK_HALF)
    # Only the first half of the table is read: the second repeats it.
    c = tl.load(cos + token * table_stride + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * table_stride + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        s = -s  # cos is even, sin is odd
    mask = (head < heads)[:, None] & (pair < half)[None, :]
    source = x + token * token_stride + head.to(tl.int64)[:, None] * head_stride + pair[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=mask, other=0.0).to(tl.float32)
    target = y + (token * heads + head[:, None]) * (2 * half) + pair[None, :]
    # Both halves in one program: each is needed for the other, and is read once.
    tl.store(target, first * c - second * s, mask=mask)
    tl.store(target + half, second * c + first * s, mask=mask)


def _launch_rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, backward: bool) -> Tensor:
    tokens, heads, dim = x_THD.shape
    x = x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous()
    y_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    parameters = launch(heads, dim)
    # Tokens lie on the first grid axis, the only one that may exceed 65,535.
    _rotate[(tokens, triton.cdiv(heads, parameters["BLOCK_H"]))](
        x, cos_TD, sin_TD, y_THD, heads, dim // 2, x.stride(0), x.stride(1), cos_TD.stride(0), BACKWARD=backward, **parameters)
    return y_THD


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_THD, cos_TD, sin_TD):
        ctx.save_for_backward(cos_TD, sin_TD)  # the tables are one pair for all layers; x is not needed
        return _launch_rotate(x_THD, cos_TD, sin_TD, backward=False)

    @staticmethod
    def backward(ctx, grad_THD):
        return _launch_rotate(grad_THD, *ctx.saved_tensors, backward=True), None, None


def rope_triton(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    cos, sin = (table.reshape(-1, x_THD.shape[-1]) for table in (cos_TD, sin_TD))
    assert len(cos) == len(sin) == len(x_THD), f"tables of {len(cos)} tokens for {len(x_THD)}: rows beyond them would be garbage"
    # One stride serves both; a table with a gap between its features is copied.
    return _Rope.apply(x_THD, cos.contiguous(), sin.contiguous())


def rope(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """x rotated by the angles of its tokens; the tables are fp32 [T, D] or [T, 1, D], their two halves equal."""
    return (rope_triton if x_THD.is_cuda else rope_torch)(x_THD, cos_TD, sin_TD)
