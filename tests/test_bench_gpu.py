"""bench/gpu.py without a GPU: its dry run, and that each of its checks notices a wrong kernel.

Nobody watches while it runs on a GPU for the first time: a check that cannot fail, a crash that takes the other items along, or a
result file that lacks its figures would cost the machine's time.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from kernels import fp8_linear, kv_write, logprob, packed_attention, paged_attention, rms_norm, rope, sampling, silu_mul

BENCH = Path(__file__).parents[1] / "bench"
sys.path.append(str(BENCH))  # behind the root: some benchmarks are named as what they measure

import gpu_kernels  # noqa: E402


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess:
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=env, timeout=280)


def test_the_dry_run_measures_everything_and_says_that_it_means_nothing(tmp_path):
    """A section that fails on any machine, a figure without its unit, a toy's figures that look like a GPU's."""
    done = run(BENCH / "gpu.py", "--tiny", "--out", str(tmp_path / "tiny.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("DRY RUN") and any(line.startswith("bounds:") for line in lines)
    results = json.loads((tmp_path / "tiny.json").read_text())
    assert results["dry_run"] and results["bounds"].keys() >= {"copy_gb_s", "matmul_tflop_s", "vendor_copy_gb_s"}
    items = results["items"]
    assert {name.split("/")[0] for name in items} == {"rows", "kernels", "sanity", "decode", "learner", "publication"}
    for name, item in items.items():
        assert item["status"] == "ok" and item["message"] == "" and item["seconds"] <= item["limit_s"] and item["rows"], name
        for row in item["rows"]:
            assert ("rate" in row) == ("unit" in row) and row.get("passed", True), row
    kernels = [row for name, item in items.items() if name.startswith("kernels/") for row in item["rows"]]
    assert len(kernels) >= 25 and all(row["passed"] and row["error"] <= row["tolerance"] and row["ms"] > 0 for row in kernels)
    assert sum(row["name"].endswith("backward") for row in kernels) == 7  # two norms, rope, silu, attention twice, logprob
    assert all(row["unit"] == "tokens/s" and row["of_measured"] > 0 for name in ("decode/bf16", "decode/fp8")
               for row in items[name]["rows"] if "batch" in row["name"])
    assert any("skipped" in row.get("note", "") for row in items["sanity/engine"]["rows"])  # CUDA graphs
    assert items["publication/8b"]["rows"][-1]["note"] == "model.layers.1.mlp.up_proj.weight"  # where the bit was flipped


def wrong_page(attend):
    def run(q, keys, values, pages, window):
        pages.tables_NB[:, 0] = 0
        return attend(q, keys, values, pages, window)
    return run


class WrongGradient(torch.autograd.Function):
    """The identity, with a gradient that is 3 % too large."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * 1.03


PLANTED = {  # item -> (module, function, what makes a wrong one of it)
    "rms_norm": (rms_norm, "rms_norm", lambda f: lambda x, w, eps, residual=None: f(x, w, eps + 0.1, residual)),
    "rope": (rope, "rope", lambda f: lambda x, cos, sin: f(x, cos, -sin)),
    "silu_mul": (silu_mul, "silu_mul", lambda f: lambda gate, up: f(WrongGradient.apply(gate), up)),
    "kv_write": (kv_write, "write_kv", lambda f: lambda keys, values, k, v, slots: f(keys, values, k, v, slots.clamp(min=0))),
    "paged_attention": (paged_attention, "paged_attention", wrong_page),
    "packed_attention": (packed_attention, "packed_attention", lambda f: lambda q, k, v, starts, longest, window:
                         f(q, k, v, starts, longest, 0)),
    "sampling": (sampling, "sample", lambda f: lambda logits, knobs, u: f(logits, knobs, (u + 0.01) % 1)),
    "logprob": (logprob, "chosen_logprobs", lambda f: lambda h, w, t, head:
                       f(h, w, t, logprob.Head(head.temperature, len(w), head.chunk))),
    "fp8_linear": (fp8_linear, "fp8_linear", lambda f: lambda x, codes, scales: f(x, codes, scales.flip(1)))}


def rows_of(item: str) -> list[dict]:
    torch.manual_seed(0)
    rows: list[dict] = []
    machine = gpu_kernels.Machine(torch.device("cpu"), True, torch.float32, rows.append, {"copy": 1e9, "matmul": 1e9})
    gpu_kernels.KERNELS[item](machine)
    return rows


def test_every_kernel_has_a_planted_fault():
    assert PLANTED.keys() == gpu_kernels.KERNELS.keys()


@pytest.mark.parametrize("item", PLANTED)
def test_a_wrong_kernel_is_reported(item, monkeypatch):
    """A comparison with the kernel's own code, or a tolerance that lets anything through."""
    module, name, spoil = PLANTED[item]
    assert all(row["passed"] for row in rows_of(item))
    monkeypatch.setattr(module, name, spoil(getattr(module, name)))
    wrong = [row for row in rows_of(item) if not row["passed"]]
    assert wrong and all(row["error"] > row["tolerance"] for row in wrong)


def test_what_a_kernel_leaves_unwritten_is_an_error(monkeypatch):
    """Memory that happens to hold the right numbers from the call before."""
    def half(gate, up):
        y = torch.empty_like(gate)
        y[::2] = (gate * up)[::2]
        return y + 0 * (gate + up)
    monkeypatch.setattr(silu_mul, "silu_mul", half)
    assert rows_of("silu_mul")[0]["error"] == 1e30  # NaN


def test_a_dead_or_hanging_item_costs_itself_only(tmp_path):
    """An illegal access that poisons the process, a kernel that never ends, an exception: the others still run."""
    script = tmp_path / "patched.py"
    script.write_text(textwrap.dedent(f"""
        import os, sys, time
        sys.path.append({str(BENCH)!r})
        import gpu

        def fails(machine):
            machine.row("before", passed=True)
            raise RuntimeError("out of memory")

        gpu.ITEMS = {{"a/good": (lambda machine: machine.row("one"), 60), "a/dies": (lambda machine: os._exit(9), 60),
                     "a/hangs": (lambda machine: time.sleep(100), 1), "a/fails": (fails, 60),
                     "a/wrong": (lambda machine: machine.row("two", passed=False), 60),
                     "a/last": (lambda machine: machine.row("three"), 60)}}
        sys.exit(gpu.main(sys.argv[1:]))
    """))
    done = run(script, "--tiny", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 1, done.stdout + done.stderr
    items = json.loads((tmp_path / "out.json").read_text())["items"]
    assert {name: item["status"] for name, item in items.items()} == {
        "a/good": "ok", "a/dies": "failed", "a/hangs": "failed", "a/fails": "failed", "a/wrong": "failed", "a/last": "ok"}
    assert "died" in items["a/dies"]["message"] and "longer than 1 s" in items["a/hangs"]["message"]
    assert items["a/fails"]["message"].startswith("RuntimeError: out of memory") and items["a/fails"]["rows"][0]["name"] == "before"
    assert "not: a/dies, a/hangs, a/fails, a/wrong" in done.stdout


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    """A traceback, or figures of a CPU under the name of a GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(BENCH / "gpu.py", "--out", str(tmp_path / "none.json"))
    assert done.returncode == 2
    assert done.stderr.strip() == "error: bench/gpu.py needs a CUDA device; --tiny tries the script on a CPU"
    assert not (tmp_path / "none.json").exists()
