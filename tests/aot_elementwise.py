"""What test_kernels_elementwise.py and test_kernels_fp8.py compile ahead of time, for tests/aot.py's `check`.

Every entry takes its block sizes and warps from the `launch` function that the launcher uses, at shapes of real models: the norm of
a 70B, qk-norm heads, a hidden size that is no power of two, head dims that are none.
"""

from kernels import fp8_linear, kv_write, rms_norm, rope, silu_mul

OPTIONS = {"num_warps", "num_stages"}
ARCHES = ("sm_90", "sm_80")


def entry(kernel: str, arch: str, pointers: str, numbers: dict, parameters: dict, **constants) -> list:
    """`pointers`: names of the arguments in bf16, or name=type."""
    types = {name: "*" + (kind or "bf16") for name, _, kind in (word.partition("=") for word in pointers.split())}
    return [f"kernels.{kernel}", arch, types | numbers,
            constants | {key: value for key, value in parameters.items() if key not in OPTIONS},
            {key: value for key, value in parameters.items() if key in OPTIONS}]


def ints(names: str) -> dict:
    """Sizes and strides, which are multiples of 16 in real models; Triton specialises on that at launch too."""
    return dict.fromkeys(names.split(), "i32:16")


def norms(arch: str, width: int, residual: bool, heads: bool) -> list:
    """[T, H, D] or [T, E]; in the second `inner` is 1, and Triton makes a constant of every integer that is 1 at launch."""
    sizes = ints("width outer_stride inner_stride") | {"rows": "i32"} | ({"inner": "i32"} if heads else {})
    one = {} if heads else {"inner": 1}
    forward = entry("rms_norm:_forward", arch, "x residual weight total y rstd=fp32", sizes | {"eps": "fp32"},
                    rms_norm.launch(width), HAS_RESIDUAL=residual, **one)
    backward = entry("rms_norm:_backward", arch, "grad_y grad_total total weight rstd=fp32 grad_x partial=fp32", sizes,
                     rms_norm.launch(width), HAS_GRAD_TOTAL=residual, **one)
    return [forward, backward]


def rotation(arch: str, heads: int, dim: int, backward: bool) -> list:
    sizes = {"heads": "i32", "half": "i32:16" if dim % 32 == 0 else "i32"} | ints("token_stride head_stride table_stride")
    return entry("rope:_rotate", arch, "x cos=fp32 sin=fp32 y", sizes, rope.launch(heads, dim), BACKWARD=backward)


def activations(arch: str) -> list:
    sizes = ints("width gate_stride up_stride")
    return [entry("silu_mul:_forward", arch, "gate up y", sizes, silu_mul.launch()),
            entry("silu_mul:_backward", arch, "grad_y gate up grad_gate grad_up", sizes, silu_mul.launch())]


def cache_write(arch: str, heads: int, dim: int) -> list:
    strides = ints("dim keys_row keys_head values_row values_head k_row k_head v_row v_head")
    return entry("kv_write:_write", arch, "keys values k v slots=i64", strides | {"heads": "i32"}, kv_write.launch(heads, dim))


def linear(tokens: int, bias: bool) -> list:
    return entry("fp8_linear:_linear", "sm_90", "x weight=fp8e4nv scales=fp32 bias y",
                 {"tokens": "i32", "scale_stride": "i32"} | ints("out width x_stride"),
                 fp8_linear.launch(tokens), HAS_BIAS=bias, BLOCK_E=fp8_linear.SCALE_BLOCK)


ELEMENTWISE = [made for arch in ARCHES for made in (
    *norms(arch, 8192, True, False), *norms(arch, 128, False, True), *norms(arch, 576, True, False),
    rotation(arch, 64, 128, False), rotation(arch, 8, 128, True), rotation(arch, 32, 80, False),
    *activations(arch), cache_write(arch, 8, 128), cache_write(arch, 32, 80))]
FP8 = [linear(16, False), linear(64, True), linear(4096, False)]  # sm_80 knows no fp8e4nv
ENTRIES = ELEMENTWISE + FP8
