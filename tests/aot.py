"""Compile Triton kernels for GPUs that are not here, and read what ptxas made of them: registers, spills, shared memory.

    python tests/aot.py '[["kernels.rms_norm:_forward", "sm_90", {"x": "*bf16", ...}, {"BLOCK": 1024, ...}, {"num_warps": 4}]]'

Runs in a process of its own, because TRITON_INTERPRET must not be set when triton is imported. It proves that a kernel builds and
fits, not that it runs. A spill shows as STACK or LOCAL in cuobjdump's -res-usage.
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED = {"sm_80": 166_912, "sm_90": 232_448}  # bytes a block may use


def compile_one(kernel: str, arch: str, types: dict, constants: dict, options: dict) -> dict:
    """`types`: Triton type of every runtime argument ("*bf16", "i32", "fp32"; pointers and "i32:16" are divisible by 16)."""
    import triton.backends.nvidia
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    module, name = kernel.split(":")
    function = getattr(importlib.import_module(module), name)
    order = list(inspect.signature(function.fn).parameters)
    assert set(order) == types.keys() | constants.keys(), f"{kernel}: {set(order) ^ (types.keys() | constants.keys())}"
    signature = {argument: types[argument].removesuffix(":16") if argument in types else "constexpr" for argument in order}
    divisible = {(index,): [["tt.divisibility", 16]] for index, argument in enumerate(order)
                 if types.get(argument, "").startswith("*") or types.get(argument, "").endswith(":16")}
    compiled = compile(ASTSource(function, signature, constants, divisible), target=GPUTarget("cuda", int(arch[3:]), 32),
                       options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return found | {"shared": compiled.metadata.shared}


def compile_all(entries: list) -> list[dict]:
    """The same in a fresh process. Raises AssertionError with the compiler's message."""
    clean = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__, json.dumps(entries)], cwd=ROOT, capture_output=True, text=True,
                          env=clean | {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def check(entries: list) -> None:
    """Every entry compiles, spills nothing and fits into shared memory."""
    for entry, usage in zip(entries, compile_all(entries), strict=True):
        assert usage["stack"] == 0 and usage["local"] == 0, f"{entry[0]} for {entry[1]} spills: {usage} {entry[3]}"
        assert usage["shared"] <= SHARED[entry[1]], f"{entry[0]} for {entry[1]}: {usage['shared']} bytes of shared memory"


if __name__ == "__main__":
    print(json.dumps([compile_one(*entry) for entry in json.loads(sys.argv[1])]))
