"""A linear layer whose weight is stored in fp8, for rollouts.

    scale_bc = max |W| over block (b, c) of 128 x 128, / 448           448 is the largest e4m3
    Q        = round_e4m3(W / scale)
    y        = sum over c of scale_bc (x_c Q_bc^T) + bias              c: blocks of E; fp32 sums, one rounding at the end

Letters: T tokens, E input features, O output features.
Source: DeepSeek-V3's weight format (arXiv 2412.19437, section 3.3).

Decode reads every weight once a step, so its bytes are its time: 69.5 GB for a 70B, 8.7 GB a GPU at TP8, 2.6 ms at 3.35 TB/s
where bf16 takes 5.2. The scales add 4 bytes to 16384. From about 150 tokens a step on (989 TFLOP/s / 3.35 TB/s / 2) the tensor
cores bound it, and they run at bf16 speed here: fp8 then saves memory, not time.

Deliberately different: weight-only. Activations stay bf16, because their rounding is what moves logprobs of engine and learner
apart; there is no backward pass, because the learner keeps bf16 weights. e4m3 is exact in bf16 and in fp16, so the tensor cores get
Q itself, and the scale multiplies the fp32 sum over a block instead of being rounded into the weight. No split over E: a row's bits
do not depend on its batch within one configuration below, but a narrow layer leaves SMs idle (the 70B's qkv at TP8 has 1280
outputs: 40 programs for 132 SMs). Needs sm_89 or newer: an A100 knows no e4m3.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

SCALE_BLOCK = 128
LARGEST = 448.0


def quantise(weight_OE: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [O, E], fp32 scales [O/128, E/128], both rounded up). Plain torch: it runs once a weight sync."""
    out, width = weight_OE.shape
    padded = F.pad(weight_OE.float(), (0, -width % SCALE_BLOCK, 0, -out % SCALE_BLOCK))
    blocks = padded.view(padded.shape[0] // SCALE_BLOCK, SCALE_BLOCK, -1, SCALE_BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    scales = torch.where(scales > 0, scales, 1.0)  # a block of zeros: 0 / 0 would be NaN
    # Clamped because a scale among the subnormals is inexact, and what lies beyond 480 is NaN to all but the newest casts.
    codes = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).view(padded.shape)[:out, :width]
    return codes.contiguous().to(torch.float8_e4m3fn), scales


def dequantise(fp8_OE: Tensor, scales: Tensor) -> Tensor:
    """fp32 [O, E]."""
    out, width = fp8_OE.shape
    spread = scales.repeat_interleave(SCALE_BLOCK, 0)[:out].repeat_interleave(SCALE_BLOCK, 1)[:, :width]
    return fp8_OE.float() * spread


def fp8_linear_torch(x_TE: Tensor, fp8_OE: Tensor, scales: Tensor, bias_O: Tensor | None = None) -> Tensor:
    # fp32 throughout, like the kernel's sums; bf16 products on a CPU are three times slower anyway.
    bias = None if bias_O is None else bias_O.float()
    return F.linear(x_TE.float(), dequantise(fp8_OE, scales), bias).to(x_TE.dtype)


def launch(tokens: int) -> dict:
    """Three configurations. A block of outputs and a step over E stay within one scale block."""
    if tokens <= 16:  # decode: small tiles for many programs, and stages enough to keep 16 kB of weight a program in flight
        return {"BLOCK_T": 16, "BLOCK_O": 32, "num_warps": 4, "num_stages": 5}
    if tokens <= 64:
        return {"BLOCK_T": 64, "BLOCK_O": 64, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_T": 128, "BLOCK_O": 128, "num_warps": 8, "num_stages": 3}


@triton.jit
def _linear(x, weight, scales, bias, y, tokens, out, width, x_stride, scale_stride,
            HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_E: tl.constexpr):
    # Neighbouring programs share a block of the weight, so that HBM delivers it once and L2 the other times.
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(1) * BLOCK_O
    output = first.to(tl.int64) + tl.arange(0, BLOCK_O)
    feature = tl.arange(0, BLOCK_E)
    # BLOCK_E is the scale block, so every step has one scale.
    x_tile = x + token[:, None] * x_stride + feature[None, :]
    w_tile = weight + output[:, None] * width + feature[None, :]
    scale_row = scales + first // BLOCK_E * scale_stride
    total = tl.zeros([BLOCK_T, BLOCK_O], tl.float32)
    for block in range(tl.cdiv(width, BLOCK_E)):
        inside = feature < width - block * BLOCK_E
        x_block = tl.load(x_tile, mask=(token < tokens)[:, None] & inside[None, :], other=0.0)
        # Both are masked: what lies behind the weight may decode to NaN, and 0 x NaN is NaN.
        w_block = tl.load(w_tile, mask=(output < out)[:, None] & inside[None, :], other=0.0)
        # "ieee" concerns fp32 inputs only: tf32 would cut them to 10 bits.
        part = tl.dot(x_block, tl.trans(w_block.to(x_block.dtype)), input_precision="ieee")
        total += part * tl.load(scale_row + block)
        x_tile += BLOCK_E
        w_tile += BLOCK_E
    if HAS_BIAS:
        total += tl.load(bias + output, mask=output < out, other=0.0).to(tl.float32)[None, :]
    tl.store(y + token[:, None] * out + output[None, :], total, mask=(token < tokens)[:, None] & (output < out)[None, :])


def fp8_linear_triton(x_TE: Tensor, fp8_OE: Tensor, scales: Tensor, bias_O: Tensor | None = None) -> Tensor:
    tokens, (out, width), parameters = len(x_TE), fp8_OE.shape, launch(len(x_TE))
    assert x_TE.shape[1] == width and fp8_OE.is_contiguous() and scales.is_contiguous(), "weight and scales are read row after row"
    x = x_TE if x_TE.stride(1) == 1 else x_TE.contiguous()
    y_TO = torch.empty(tokens, out, dtype=x.dtype, device=x.device)
    # Without a bias x stands in for a pointer that is never read.
    grid = triton.cdiv(tokens, parameters["BLOCK_T"]), triton.cdiv(out, parameters["BLOCK_O"])
    _linear[grid](x, fp8_OE, scales, x if bias_O is None else bias_O, y_TO, tokens, out, width, x.stride(0), scales.stride(0),
                  HAS_BIAS=bias_O is not None, BLOCK_E=SCALE_BLOCK, **parameters)
    return y_TO


def fp8_linear(x_TE: Tensor, fp8_OE: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias in x's type, for W as `quantise` stored it."""
    assert not (torch.is_grad_enabled() and x_TE.requires_grad), "fp8 weights have no backward pass: x would train on nothing"
    return (fp8_linear_triton if x_TE.is_cuda else fp8_linear_torch)(x_TE, fp8_OE, scales, bias)
