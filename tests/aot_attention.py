"""What tests/aot.py's `check` compiles of the attention kernels: exactly what is launched for bf16 on H100 / H200 and A100.

    python tests/aot_attention.py            # registers and shared memory of every entry
    python tests/aot_attention.py _decode    # of those whose name contains this
"""

import sys

from aot import compile_all

from kernels.packed_attention import packed_launch
from kernels.paged_attention import decode_launch, prefill_launch, reduce_launch

BF16 = 2  # bytes
PAGED = {"q": "*bf16", "keys": "*bf16", "values": "*bf16", "tables": "*i32", "contexts": "*i32", "out": "*bf16",
         "stride_qt": "i32:16", "stride_qh": "i32:16", "stride_slot": "i32:16", "stride_head": "i32:16", "stride_table": "i32",
         "scale": "fp32"}
PACKED = {"q": "*bf16", "k": "*bf16", "v": "*bf16", "lse": "*fp32", "cu_seqlens": "*i32", "T": "i32", "scale": "fp32"} | {
    f"stride_{name}": "i32:16" for name in ("qt", "qh", "kt", "kh", "vt", "vh")}
OF_PASS = {  # kernel, and its arguments beside those that all have
    "forward": ("_forward", {"out": "*bf16"}),
    "dq": ("_backward_q", {"out": "*bf16", "dout": "*bf16", "delta": "*fp32", "dq": "*bf16"}),
    "dkdv": ("_backward_kv", {"dout": "*bf16", "delta": "*fp32", "dk": "*bf16", "dv": "*bf16"}),
}


def entry(kernel: str, arch: str, types: dict, launch: dict, **constants) -> list:
    """An element for `check`: a launch's upper-case values are compile-time constants, the others the compiler's options."""
    constants |= {name: value for name, value in launch.items() if name.isupper()}
    return [f"kernels.{kernel}", arch, types, constants, {name: value for name, value in launch.items() if not name.isupper()}]


def decode(arch: str, head_dim: int, repeat: int, window: int = 0, split: bool = True) -> list:
    scratch = {"partial": "*fp32", "lse": "*fp32"} if split else {"partial": "*bf16", "lse": "*bf16"}
    return entry("paged_attention:_decode", arch, PAGED | scratch, decode_launch(head_dim, repeat, BF16), BLOCK_SIZE=16,
                 WINDOW=window, SPLIT=split)


def reduce(arch: str, head_dim: int, window: int = 0) -> list:
    types = {"partial": "*fp32", "lse": "*fp32", "contexts": "*i32", "out": "*bf16", "splits": "i32"}
    return entry("paged_attention:_reduce", arch, types, reduce_launch(head_dim), WINDOW=window,
                 BLOCK_J=decode_launch(head_dim, 1, BF16)["BLOCK_J"])


def prefill(arch: str, head_dim: int, repeat: int, window: int = 0) -> list:
    return entry("paged_attention:_prefill", arch, PAGED | {"query_starts": "*i32", "first_request": "i32"},
                 prefill_launch(head_dim, repeat, BF16), BLOCK_SIZE=16, WINDOW=window)


def packed(arch: str, which: str, head_dim: int, repeat: int, window: int = 0) -> list:
    kernel, types = OF_PASS[which]
    return entry(f"packed_attention:{kernel}", arch, PACKED | types, packed_launch(which, head_dim, repeat, BF16), WINDOW=window)


def family(arch: str, head_dim: int, repeat: int, window: int = 0) -> list:
    """All kernels for one shape of head."""
    return [decode(arch, head_dim, repeat, window), decode(arch, head_dim, repeat, window, split=False),
            reduce(arch, head_dim, window), prefill(arch, head_dim, repeat, window),
            *(packed(arch, which, head_dim, repeat, window) for which in OF_PASS)]


# Llama and Qwen3-8B have 8 or 4 query heads of 128 on a KV head, SmolLM2 3 of 64; 80 stands for widths that are padded.
ENTRIES = [one for arch in ("sm_90", "sm_80")
           for shape in ((128, 8), (128, 4), (128, 4, 4096), (64, 3), (80, 4), (80, 8, 4096)) for one in family(arch, *shape)]
FEW = [decode("sm_90", 128, 8), reduce("sm_90", 128), prefill("sm_90", 128, 8), prefill("sm_90", 80, 4, 4096),
       *(packed("sm_90", which, 128, 8) for which in OF_PASS)]


if __name__ == "__main__":
    wanted = [one for one in ENTRIES if sys.argv[1:] == [] or sys.argv[1] in one[0]]
    for (kernel, arch, _, constants, options), usage in zip(wanted, compile_all(wanted), strict=True):
        print(kernel.split(":")[1], arch, *(f"{key}={value}" for key, value in (constants | options).items()), usage)
