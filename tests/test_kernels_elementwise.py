"""rms_norm, rope, silu_mul and write_kv: the torch path and the Triton kernels (in the interpreter) against float64 textbooks.

Nothing here is compared with our own code. Where the promise is bits, the operations that exact mode was measured with (model.py
before these kernels, commit df2317d) are written out.
bf16 is left out of the Triton path because the interpreter computes it wrongly without a word.
"""

import mmap
from types import SimpleNamespace

import aot
import aot_elementwise
import pytest
import torch
import torch.nn.functional as F
from triton.runtime.interpreter import GridExecutor

from kernels import fp8_linear, kv_write, rms_norm, rope, silu_mul

TOLERANCES = pytest.mark.parametrize("dtype, atol, rtol", [(torch.float32, 1e-5, 1e-5), (torch.float16, 4e-3, 4e-3)],
                                     ids=["fp32", "fp16"])
DIMS = pytest.mark.parametrize("dim", [2, 64, 80, 96, 128])
EPS = 1e-2  # large, so that a kernel that forgets it or puts it outside the root shows


def paths(torch_path, triton_path):
    """The public function on CPU, and the launcher that it calls on a GPU."""
    return pytest.mark.parametrize("path", [torch_path, triton_path], ids=["torch", "triton"])


RMS = paths(rms_norm.rms_norm, rms_norm.rms_norm_triton)
ROPE = paths(rope.rope, rope.rope_triton)
SILU = paths(silu_mul.silu_mul, silu_mul.silu_mul_triton)
WRITE = paths(kv_write.write_kv, kv_write.write_kv_triton)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_(grad)


def compare(actual: list, expected: list, atol: float, rtol: float) -> None:
    for ours, textbook in zip(actual, expected, strict=True):
        assert ours.shape == textbook.shape
        torch.testing.assert_close(ours.double(), textbook, atol=atol, rtol=rtol)


def same(function, textbook, inputs: list[torch.Tensor], atol: float, rtol: float) -> None:
    """Values, types and every input's gradient; each output is weighted by its own random numbers before the sum."""
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    ours, exact = function(*inputs), textbook(*doubles)
    assert all(y.dtype == inputs[0].dtype for y in ours)
    compare(ours, exact, atol, rtol)
    weights = [draw(*y.shape, seed=90 + index).double() for index, y in enumerate(exact)]
    gradients, expected = (torch.autograd.grad(sum((y.double() * w).sum() for y, w in zip(outputs, weights, strict=True)), leaves)
                           for outputs, leaves in ((ours, inputs), (exact, doubles)))
    assert [g.dtype for g in gradients] == [x.dtype for x in inputs]
    compare(gradients, expected, atol, rtol)


# ---- rms_norm ----

def norm_textbook(x, weight, residual=None):
    total = x if residual is None else x + residual
    return weight * total / torch.sqrt((total * total).sum(-1, keepdim=True) / x.shape[-1] + EPS), total


@RMS
@TOLERANCES
@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("shape", [(1,), (5, 123), (5, 3, 123), (2, 2, 3, 40), (3, 2500)], ids=str)
def test_norm_values_and_gradients(path, shape, residual, dtype, atol, rtol):
    """A mean over the padded block, a forgotten gradient through the sum, a weight gradient of the wrong rows."""
    inputs = [draw(*shape, dtype=dtype, grad=True), draw(shape[-1], dtype=dtype, seed=1, grad=True)]
    if residual:
        inputs.append(draw(*shape, dtype=dtype, seed=2, grad=True))
    same(lambda x, weight, residual=None: path(x, weight, EPS, residual), norm_textbook, inputs, atol, rtol)


@RMS
@TOLERANCES
@DIMS
def test_norm_of_heads_inside_a_fused_qkv(path, dim, dtype, atol, rtol):
    """qk-norm reads k out of [T, (H + 2K) D]: a kernel that assumes dense rows normalises q's features or v's."""
    def k_of(fused):
        return fused[:, 4 * dim:6 * dim].view(-1, 2, dim)
    fused, weight = draw(7, 8 * dim, dtype=dtype, grad=True), draw(dim, dtype=dtype, seed=1, grad=True)
    same(lambda fused, weight: path(k_of(fused), weight, EPS)[:1], lambda fused, weight: norm_textbook(k_of(fused), weight)[:1],
         [fused, weight], atol, rtol)
    assert rms_norm._as_rows(k_of(fused)).data_ptr() == k_of(fused).data_ptr(), "copies what it promises to read in place"


@RMS
def test_norm_of_a_transposed_input_and_residual(path):
    """A last dimension that is not contiguous is read with a stride of 1: silently other numbers."""
    inputs = [draw(123, 5, grad=True), draw(123, seed=1, grad=True), draw(123, 5, seed=2, grad=True)]
    same(lambda x, weight, residual: path(x.t(), weight, EPS, residual.t()),
         lambda x, weight, residual: norm_textbook(x.t(), weight, residual.t()), inputs, 1e-5, 1e-5)


@RMS
@pytest.mark.parametrize("used", [0, 1], ids=["y", "sum"])
def test_norm_with_only_one_output_used(path, used):
    """The last layer uses no sum and a frozen head no y: None as a gradient crashes, or counts as garbage."""
    x, weight, residual = draw(5, 123, grad=True), draw(123, seed=1, grad=True), draw(5, 123, seed=2, grad=True)
    doubles = [leaf.detach().double().requires_grad_() for leaf in (x, weight, residual)]
    expected = torch.autograd.grad(norm_textbook(*doubles)[used].sum(), doubles, allow_unused=True, materialize_grads=True)
    ours = torch.autograd.grad(path(x, weight, EPS, residual)[used].sum(), (x, weight, residual), allow_unused=True,
                               materialize_grads=True)
    compare(ours, expected, 1e-5, 1e-5)


def test_norm_weight_gradient_of_more_rows_than_programs(monkeypatch):
    """Each program of the backward pass walks over many tiles: it must drop none, and read none twice."""
    monkeypatch.setattr(rms_norm, "PROGRAMS", 2)
    for shape in [(7, 2500), (75, 123)]:
        inputs = [draw(*shape, grad=True), draw(shape[-1], seed=1, grad=True)]
        same(lambda x, weight: rms_norm.rms_norm_triton(x, weight, EPS), norm_textbook, inputs, 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 576), (5, 3, 64)], ids=str)
def test_norm_on_cpu_keeps_the_models_bits(shape, dtype):
    """Exact mode promises equal bits: a reordered product or rounding changes logprobs in the last place."""
    def norm(x):
        full = x.float()
        full = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + EPS)
        return weight * full.to(x.dtype)
    x, residual, weight = (draw(*size, dtype=dtype, seed=seed) for seed, size in enumerate((shape, shape, shape[-1:])))
    y, total = rms_norm.rms_norm(x, weight, EPS, residual)
    assert torch.equal(total, residual + x) and torch.equal(y, norm(residual + x))
    y, total = rms_norm.rms_norm(x, weight, EPS)
    assert total is x and torch.equal(y, norm(x))


def test_norm_promotes_as_torch_does():
    """An fp32 weight over fp16 data gives fp32; the kernel must not round it away."""
    x, weight = draw(5, 123, dtype=torch.float16), draw(123, seed=1)
    y, total = rms_norm.rms_norm_triton(x, weight, EPS)
    expected, _ = rms_norm.rms_norm(x, weight, EPS)
    assert y.dtype == expected.dtype == torch.float32 and total.dtype == torch.float16
    compare([y], [norm_textbook(x.double(), weight.double())[0]], 4e-3, 4e-3)


# ---- rope ----

def rope_inputs(tokens: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Angles in float64 and the [T, 1, D] fp32 tables that the model makes of them; positions are not 0, 1, 2 ..."""
    positions = torch.tensor([0, 3, 511, 4097, 17, 2, 9])[:tokens].double()
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, dim, 2).double() / dim)
    doubled = torch.cat([angles, angles], -1)[:, None]
    return angles, doubled.cos().float(), doubled.sin().float()


def rope_textbook(x_THD, angles):
    """The pair as a complex number, multiplied by exp(i angle)."""
    half = x_THD.shape[-1] // 2
    turned = torch.complex(x_THD[..., :half], x_THD[..., half:]) * torch.exp(1j * angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


@ROPE
@TOLERANCES
@DIMS
@pytest.mark.parametrize("heads", [1, 3])
def test_rope_values_and_gradients(path, heads, dim, dtype, atol, rtol):
    """Neighbours rotated instead of halves, a swapped sign, a backward pass that turns the same way."""
    angles, cos, sin = rope_inputs(5, dim)
    same(lambda x: [path(x, cos, sin)], lambda x: [rope_textbook(x, angles)], [draw(5, heads, dim, dtype=dtype, grad=True)],
         atol, rtol)


@ROPE
@DIMS
@pytest.mark.parametrize("flat", [False, True], ids=["[T,1,D]", "[T,D]"])
def test_rope_of_heads_inside_a_fused_qkv(path, dim, flat):
    """Strides of a slice taken for those of a dense tensor; a table of [T, D] broadcast over the wrong dimension."""
    angles, cos, sin = rope_inputs(3, dim)
    cos, sin = (cos[:, 0], sin[:, 0]) if flat else (cos, sin)
    def k_of(fused):
        return fused[:, 3 * dim:6 * dim].view(-1, 3, dim)  # as many heads as tokens: broadcasting over heads would be legal
    same(lambda fused: [path(k_of(fused), cos, sin)], lambda fused: [rope_textbook(k_of(fused), angles)],
         [draw(3, 7 * dim, grad=True)], 1e-5, 1e-5)


@ROPE
def test_rope_of_more_heads_than_a_program_holds(path):
    """64 heads of 128 are two programs a token: the second must not start at head 0, nor the last write beyond the end."""
    angles, cos, sin = rope_inputs(2, 128)
    assert rope.launch(35, 128)["BLOCK_H"] < 35, "the case needs a second program"
    same(lambda x: [path(x, cos, sin)], lambda x: [rope_textbook(x, angles)], [draw(2, 35, 128, grad=True)], 1e-5, 1e-5)


@ROPE
def test_rope_gradient_that_is_expanded_or_transposed(path):
    """A plain sum sends a gradient with strides of 0, a transposed attention layout one with a strided last dimension."""
    angles, cos, sin = rope_inputs(5, 64)
    for reduce in (torch.sum, lambda y: (y.permute(2, 1, 0) * draw(64, 3, 5)).sum()):
        x = draw(5, 3, 64, grad=True)
        double = x.detach().double().requires_grad_()
        reduce(path(x, cos, sin)).backward()
        reduce(rope_textbook(double, angles)).backward()
        compare([x.grad], [double.grad], 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rope_on_cpu_keeps_the_models_bits(dtype):
    """Exact mode again: a rewritten product sum rounds elsewhere."""
    _, cos, sin = rope_inputs(7, 64)
    x = draw(7, 5 * 64, dtype=dtype)[:, 64:4 * 64].view(7, 3, 64)
    first, second = x.float().chunk(2, -1)
    expected = (x.float() * cos + torch.cat([-second, first], -1) * sin).to(dtype)
    assert torch.equal(rope.rope(x, cos, sin), expected)


def test_rope_refuses_tables_of_other_lengths():
    """Padded tokens with unpadded tables: the kernel would rotate by what lies behind the table."""
    _, cos, sin = rope_inputs(3, 64)
    with pytest.raises(AssertionError, match="tables of 3 tokens for 4"):
        rope.rope_triton(draw(4, 1, 64), cos, sin)


# ---- silu_mul ----

def silu_textbook(gate, up):
    return [gate / (1 + torch.exp(-gate)) * up]


@SILU
@TOLERANCES
@pytest.mark.parametrize("shape", [(1,), (5, 123), (5, 3, 123), (3, 2500)], ids=str)
def test_silu_mul_values_and_gradients(path, shape, dtype, atol, rtol):
    """The derivative of the sigmoid alone, gate and up exchanged, the second block of a wide row."""
    inputs = [draw(*shape, dtype=dtype, seed=seed, grad=True) for seed in range(2)]
    same(lambda gate, up: [path(gate, up)], silu_textbook, inputs, atol, rtol)


@SILU
@TOLERANCES
def test_silu_mul_of_halves_of_one_fused_tensor(path, dtype, atol, rtol):
    """Rows of 2F read as rows of F: every row but the first would mix gate and up."""
    same(lambda fused: [path(*fused.chunk(2, -1))], lambda fused: silu_textbook(*fused.chunk(2, -1)),
         [draw(5, 246, dtype=dtype, grad=True)], atol, rtol)


@SILU
def test_silu_mul_gradient_that_is_expanded_or_transposed(path):
    """Strides of the incoming gradient are its own, not those of the output."""
    for reduce in (torch.sum, lambda y: (y.t() * draw(123, 5)).sum()):
        inputs = [draw(123, 5, seed=seed, grad=True) for seed in range(2)]
        doubles = [x.detach().double().requires_grad_() for x in inputs]
        reduce(path(*(x.t() for x in inputs))).backward()
        reduce(silu_textbook(*(x.t() for x in doubles))[0]).backward()
        compare([x.grad for x in inputs], [x.grad for x in doubles], 1e-5, 1e-5)


@SILU
def test_silu_mul_of_large_gates(path):
    """exp(100) overflows fp32: 0 x inf would be NaN in the value or in the gradient."""
    gate = torch.tensor([[-100.0, -20.0, 0.0, 20.0, 100.0]], requires_grad=True)
    same(lambda gate, up: [path(gate, up)], silu_textbook, [gate, draw(1, 5, grad=True)], 1e-5, 1e-5)


def test_silu_mul_on_cpu_keeps_the_models_bits():
    """Exact mode: SiLU's bits depend on shapes and strides, so the call must be the model's."""
    gate, up = draw(5, 96).chunk(2, -1)
    assert torch.equal(silu_mul.silu_mul(gate, up), F.silu(gate) * up)


# ---- write_kv ----

def written(path, slots: list[int], heads: int, dim: int, dtype: torch.dtype, rows: int = 12, extra: int = 0) -> list[int]:
    """Writes slices of a fused qkv into a pool of stale numbers, compares all of it, returns the slots that changed."""
    cache = 1e3 * draw(2, 2, rows, heads, dim, seed=3).to(dtype)
    expected, tokens = cache.clone(), len(slots) + extra
    fused = draw(tokens, 3 * heads * dim, dtype=dtype, grad=True)  # q, k, v
    k, v = (fused[:, part * heads * dim:(part + 1) * heads * dim].view(tokens, heads, dim) for part in (1, 2))
    with torch.no_grad():
        path(*cache[1], k, v, torch.tensor(slots, dtype=torch.int64))
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[1, 0, slot], expected[1, 1, slot] = k[token].detach(), v[token].detach()
    assert torch.equal(cache, expected)
    changed = (cache != 1e3 * draw(2, 2, rows, heads, dim, seed=3).to(dtype)).any(-1).any(-1)
    assert not changed[0].any() and torch.equal(changed[1, 0], changed[1, 1])
    return changed[1, 0].nonzero()[:, 0].tolist()


@WRITE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("heads, dim", [(1, 64), (3, 80), (8, 128), (5, 96), (3, 5)])
def test_cache_writes_land_in_their_slots(path, heads, dim, dtype):
    """Keys exchanged with values, padded heads or features written into the next slot, strides of a slice ignored."""
    assert written(path, [7, 0, 11, 3], heads, dim, dtype) == [0, 3, 7, 11]


@WRITE
@pytest.mark.parametrize("extra", [0, 2])
def test_padding_rows_write_nothing(path, extra):
    """E6: slot -1 overwrites the last slot of the pool; rows behind the slots write anywhere."""
    assert written(path, [5, -1, -1], 3, 64, torch.float32, extra=extra) == [5]
    assert written(path, [-1], 3, 64, torch.float32, extra=extra) == []
    assert written(path, [], 3, 64, torch.float32, extra=extra) == []


def test_a_cache_write_keeps_no_graph():
    """A cache that requires gradients keeps every step's activations alive until memory ends."""
    keys, values = torch.zeros(2, 4, 1, 8)
    k = draw(1, 1, 8, grad=True)
    kv_write.write_kv(keys, values, k, 2 * k, torch.tensor([2]))
    assert not keys.requires_grad and torch.equal(values[2], 2 * k.detach()[0])


@pytest.mark.parametrize("k, slots", [(torch.zeros(2, 1, 8, dtype=torch.float16), [0, 1]), (torch.zeros(2, 1, 8), [0, 1, 2]),
                                      (torch.zeros(2, 2, 8), [0, 1]), (torch.zeros(2, 1, 16)[..., ::2], [0, 1])],
                         ids=["type", "rows", "heads", "stride"])
def test_cache_writes_refuse_what_they_would_misread(k, slots):
    """On a GPU each of these is a silent read of foreign memory."""
    with pytest.raises(AssertionError, match="cache and new keys differ|more slots than new rows"):
        kv_write.write_kv_triton(*torch.zeros(2, 4, 1, 8), k, k, torch.tensor(slots))


# ---- all of them ----

@pytest.fixture
def far_apart(monkeypatch):
    """[3, 64] fp16 whose rows lie 2^30 elements apart, in 12 GB of address space of which a few pages exist.

    In 32 bits the offset of row 2 is -2^31: the middle of the mapping, where zeros are read instead of a crash.
    """
    MAP_NORESERVE = 0x4000
    memory = torch.frombuffer(mmap.mmap(-1, 6 * 2**31, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE), dtype=torch.float16)
    rows = memory[2**31:].as_strided((3, 64), (2**30, 1), 2**31)
    rows.copy_(draw(3, 64, dtype=torch.float16))
    # The interpreter copies arguments back, a no-op on a CPU that would touch all 12 GB.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    return rows


@pytest.mark.parametrize("function", [
    lambda x: rms_norm.rms_norm_triton(x, torch.ones(64, dtype=x.dtype), EPS)[0],
    lambda x: rope.rope_triton(x.view(3, 1, 64), torch.ones(3, 64), torch.zeros(3, 64)),
    lambda x: silu_mul.silu_mul_triton(x, x)], ids=["rms_norm", "rope", "silu_mul"])
def test_offsets_beyond_32_bits(function, far_apart):
    """64k tokens of a fused [T, 57344] are more than 2^31 elements: in 32 bits the offset wraps to somewhere else."""
    assert torch.equal(function(far_apart), function(far_apart.contiguous()))


@pytest.mark.parametrize("module, name, arguments", [
    (rms_norm, "rms_norm", 3), (rope, "rope", 3), (silu_mul, "silu_mul", 2), (kv_write, "write_kv", 5),
    (fp8_linear, "fp8_linear", 3)])
def test_gpu_tensors_reach_the_kernel(monkeypatch, module, name, arguments):
    """A dispatch that never leaves torch is right in every test and slow on every GPU."""
    calls = []
    monkeypatch.setattr(module, f"{name}_triton", lambda *given: calls.append(given))
    getattr(module, name)(*[SimpleNamespace(is_cuda=True, requires_grad=False)] * arguments)
    assert len(calls) == 1


@pytest.mark.parametrize("arch", ["sm_90", pytest.param("sm_80", marks=pytest.mark.long)])
def test_compiles_without_spills(arch):
    """The interpreter accepts what the compiler refuses; registers that spill to memory undo a memory-bound kernel."""
    entries = [entry for entry in aot_elementwise.ELEMENTWISE if entry[1] == arch]
    assert len(entries) == 13
    aot.check(entries)
