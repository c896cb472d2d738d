"""fp8_linear: e4m3 decoded by its definition, block scales and sums in float64, against the torch path and the Triton kernel.

The interpreter loads fp8e4nv and widens it to fp32 and fp16 (Triton 3.9 and 3.6), so the kernel that the GPU compiles is the kernel
that runs here: addressing, masks, scales, the order of sums, every code. Not proved here: bf16, which the interpreter computes
wrongly, and the tensor cores. That the bf16 kernel builds is test_compiles_without_spills.
"""

import aot
import aot_elementwise
import pytest
import torch

from kernels import fp8_linear as module

PATHS = pytest.mark.parametrize("path", [module.fp8_linear, module.fp8_linear_triton], ids=["torch", "triton"])


def decode(code: int) -> float:
    """e4m3fn by definition: sign, 4 bits of exponent with bias 7, 3 of mantissa; all ones is NaN, there is no infinity."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0**(exponent - 7)
    return -size if code & 128 else size


E4M3 = torch.tensor([decode(code) for code in range(256)], dtype=torch.float64)
FINITE = [code for code in range(256) if code & 127 != 127]


def draw_weight(out: int, width: int) -> torch.Tensor:
    """Every block of 128 x 128 has a magnitude of its own, so that a neighbour's scale is wrong by a factor."""
    weight = torch.randn(out, width, generator=torch.Generator().manual_seed(out * width))
    for row in range(0, out, 128):
        for column in range(0, width, 128):
            weight[row:row + 128, column:column + 128] *= 3.0 ** ((row // 128 * 5 + column // 128 * 2) % 7 - 3)
    return weight


def dequantise_textbook(fp8_OE: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    weight = E4M3[fp8_OE.view(torch.uint8).long()]
    for row in range(0, weight.shape[0], 128):
        for column in range(0, weight.shape[1], 128):
            weight[row:row + 128, column:column + 128] *= scales[row // 128, column // 128].double()
    return weight


@pytest.mark.parametrize("out, width", [(1, 1), (5, 123), (128, 128), (130, 257), (300, 64)])
def test_quantise_rounds_to_the_nearest_code(out, width):
    """A scale of the wrong block or of the whole row, codes cut instead of rounded, a last block that is dropped."""
    weight = draw_weight(out, width)
    fp8, scales = module.quantise(weight)
    assert fp8.shape == (out, width) and scales.shape == (-(-out // 128), -(-width // 128)) and scales.dtype == torch.float32
    levels = E4M3[FINITE].sort().values
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            here = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            block, codes, scale = weight[here].double(), E4M3[fp8[here].view(torch.uint8).long()], scales[row, column].double()
            assert abs(scale * 448 / block.abs().max() - 1) < 1e-6
            wanted, error = block / scale, (codes - block / scale).abs()
            nearest = (wanted.flatten()[:, None] - levels).abs().amin(1).view(error.shape)
            assert (error <= nearest + 1e-5 * wanted.abs()).all()  # the fp32 quotient may tip a tie


def test_quantise_of_zeros_and_of_the_smallest_numbers():
    """0 / 0 is NaN; a scale among the subnormals is inexact, and what then lies beyond 480 becomes NaN (torch 2.13 saturates)."""
    weight = torch.zeros(128, 384)
    weight[0, 128], weight[0, 256] = 9.3e-43, 1e-45  # 9.3e-43 / 448 = 1.48 smallest numbers, stored as 1: the quotient is 663
    fp8, scales = module.quantise(weight)
    restored = module.dequantise(fp8, scales)
    assert scales[0, 0] == 1 and (restored[:, :128] == 0).all() and torch.isfinite(restored).all()
    assert fp8[0, 128].float() == 448


@PATHS
@pytest.mark.parametrize("dtype, atol, rtol", [(torch.float32, 1e-4, 1e-5), (torch.float16, 4e-3, 4e-3)], ids=["fp32", "fp16"])
@pytest.mark.parametrize("tokens, out, width", [(1, 1, 1), (5, 123, 300), (16, 130, 257), (17, 130, 128), (65, 300, 123),
                                                (130, 129, 130)])
def test_linear_equals_the_textbook(path, tokens, out, width, dtype, atol, rtol):
    """All three configurations, edges in every dimension: a mask, a scale index or an offset that is wrong only there."""
    fp8, scales = module.quantise(draw_weight(out, width))
    x, bias = (torch.randn(size, generator=torch.Generator().manual_seed(7)).to(dtype) for size in ((tokens, width), (out,)))
    exact = x.double() @ dequantise_textbook(fp8, scales).T
    for given, expected in ((None, exact), (bias, exact + bias.double())):
        with torch.no_grad():
            y = path(x, fp8, scales, given)
        assert y.dtype == dtype
        scale = expected.abs().max()  # sums cancel: their error is that of the largest terms
        torch.testing.assert_close(y.double() / scale, expected / scale, atol=atol / 10, rtol=rtol)


@PATHS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_every_code_means_what_e4m3_says(path, dtype):
    """Subnormals flushed to zero, a wrong bias, 448 taken for infinity."""
    codes = torch.tensor(FINITE, dtype=torch.uint8).view(2, 127)
    y = path(torch.eye(127, dtype=dtype), codes.view(torch.float8_e4m3fn), torch.tensor([[2.0]]))
    assert torch.equal(y.double().T, 2 * E4M3[codes.long()])


@PATHS
def test_sums_are_fp32(path):
    """4096 from the first block and 1 from each of 32 others: in fp16 the ones vanish one by one, in fp32 they come to 4128."""
    x = torch.zeros(1, 33 * 128, dtype=torch.float16)
    x[0, :128], x[0, 128::128] = 32, 1
    y = path(x, torch.ones(3, 33 * 128).to(torch.float8_e4m3fn), torch.ones(1, 33))
    assert y.tolist() == [[4128.0] * 3]


@PATHS
def test_strided_inputs(path):
    """x as a slice of a wider tensor, or transposed: read with the strides of a dense one."""
    fp8, scales = module.quantise(draw_weight(40, 60))
    for x in (torch.randn(5, 200)[:, 30:90], torch.randn(60, 5).T):
        exact = x.double() @ dequantise_textbook(fp8, scales).T
        torch.testing.assert_close(path(x, fp8, scales).double(), exact, atol=1e-4, rtol=1e-5)


def test_quantised_weights_stay_near_the_original():
    """The whole way: 3 bits of mantissa are an error of at most 1/16 a weight, 2 to 3 % of the norm of a product."""
    weight, x = draw_weight(256, 384), torch.randn(8, 384, generator=torch.Generator().manual_seed(1))
    y, exact = module.fp8_linear(x, *module.quantise(weight)).double(), x.double() @ weight.double().T
    assert 0.01 < ((y - exact).norm() / exact.norm()).item() < 0.04


def test_a_gradient_is_refused():
    """The kernel cuts the graph: a learner given fp8 weights would train nothing below them, without a word."""
    fp8, scales = module.quantise(draw_weight(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(AssertionError, match="no backward pass"):
        module.fp8_linear(x, fp8, scales)
    with torch.no_grad():
        assert module.fp8_linear(x, fp8, scales).shape == (2, 4)


def test_compiles_without_spills():
    """fp8 loads, the conversion to bf16 and the pipelined shared memory exist only on the GPU. sm_80 has no e4m3."""
    assert len(aot_elementwise.FP8) == 3
    aot.check(aot_elementwise.FP8)
