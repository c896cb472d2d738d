"""Where a decode step's time goes on a CPU: GEMM, attention, sampling, scheduling, the rest - beside the GEMMs measured alone.

    python bench/decode_profile.py [--batch 32] [--steps 60] [--threads 2]

SmolLM2-135M in fp32, `--batch` samples of 4 random prompts of 100 tokens, so that contexts stay below 256. The engine's own
functions are timed from outside by wrapping them, which costs a step of 250 calls some 2 %: right after a product, nothing of
Python is in a cache. Hence two engines take turns: of one only the products are wrapped, and its steps say what is not GEMM; of the
other all that is to be told apart. GEMMs alone: the same packed products with the same rows in the same process, one after the
other, the fastest of several passes. Rounds are repeated and the medians printed and written to
bench/results/decode-profile-cpu.json.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import parallel
import runner
from actor import LLM, SamplingParams
from kernels import rows
from scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "decode-profile-cpu.json"
SPENT: Counter[str] = Counter()
KINDS = {"gemm": [(parallel.EngineLinear, "forward")], "attention": [(runner.AttendByRows, "__call__")],
         "sampling": [(rows, "draw_rows")],
         "scheduling": [(Scheduler, "schedule"), (Scheduler, "commit"), (runner.StepBuffers, "fill"),
                        (runner.StepBuffers, "advance")],
         "norm, SiLU": [(rows, "norm_rows"), (rows, "silu_rows")]}


@contextlib.contextmanager
def wrapped(*kinds: str) -> Iterator[None]:
    """Every call of these KINDS adds its seconds to SPENT."""
    def wrap(inner: Callable, kind: str) -> Callable:
        @functools.wraps(inner)
        def wrapper(*args, **kwargs):
            start = time.perf_counter()
            result = inner(*args, **kwargs)
            SPENT[kind] += time.perf_counter() - start
            return result
        return wrapper

    plain = [(owner, name, getattr(owner, name), kind) for kind in kinds for owner, name in KINDS[kind]]
    for owner, name, inner, kind in plain:
        setattr(owner, name, wrap(inner, kind))
    try:
        yield
    finally:
        for owner, name, inner, _ in plain:
            setattr(owner, name, inner)


def gemms_alone(llm: LLM, rows: int) -> float:
    """Seconds of one step's products, nothing between them."""
    layers = [each for each in llm.engine.runner.model.modules() if isinstance(each, parallel.EngineLinear)]
    inputs, best = [torch.randn(rows, layer.weight.shape[1]) for layer in layers], float("inf")
    with torch.inference_mode():
        for _ in range(5):
            start = time.perf_counter()
            for layer, x in zip(layers, inputs, strict=True):
                layer.forward(x)
            best = min(best, time.perf_counter() - start)
    return best


def measure(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, float]:
    """Seconds of a decode step at the full batch, and of what was counted in it; medians."""
    engine, rows, inner, steps = llm.engine, len(prompts) * params.n, llm.engine.step, []

    def step():
        SPENT.clear()
        start = time.perf_counter()
        finished = inner()
        seconds = time.perf_counter() - start
        if all(len(request.logprobs) > 1 for request in engine.scheduler.running) and len(engine.scheduler.running) == rows:
            steps.append(SPENT | {"step": seconds, "not gemm": seconds - SPENT["gemm"]})
        return finished

    engine.step = step
    llm.generate(prompts, params)
    engine.step = inner
    return {kind: statistics.median(step[kind] for step in steps) for kind in steps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    build = functools.partial(LLM, str(ROOT / "models" / "smollm2-135m"), max_model_len=384, max_num_seqs=256)
    with wrapped("gemm"):
        llm = build()
    with wrapped(*KINDS):
        timed = build()
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1000, 40000, (100,), generator=draw).tolist() for _ in range(4)]
    params = SamplingParams(n=options.batch // 4, max_tokens=options.steps, ignore_eos=True)
    llm.generate(prompts, params)
    rounds = []
    for _ in range(options.repeat):
        alone = gemms_alone(timed, options.batch)
        with wrapped("gemm"):
            found = measure(llm, prompts, params)
        with wrapped(*KINDS):
            parts = measure(timed, prompts, params)
        parts |= {"gemm": found["gemm"], "rest": found["not gemm"] - sum(parts[kind] for kind in KINDS if kind != "gemm")}
        alone = min(alone, gemms_alone(timed, options.batch))
        rounds.append(parts | found | {"step, all wrapped": parts["step"], "gemm alone": alone})
    found = {kind: statistics.median(each[kind] for each in rounds) for kind in rounds[0]}
    other = statistics.median(each["not gemm"] / each["gemm alone"] for each in rounds)
    print(f"batch {options.batch}, contexts 100 to {100 + options.steps}, {options.threads} threads, load {os.getloadavg()[0]:.1f}")
    for kind in (*KINDS, "rest"):
        print(f"  {kind:18}{found[kind] * 1e3:8.2f} ms  {found[kind] / found['step']:6.1%} of the step")
    print(f"  {'step':18}{found['step'] * 1e3:8.2f} ms; GEMMs alone {found['gemm alone'] * 1e3:.2f} ms, "
          f"all that is not GEMM {other:.1%} of that")
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    results[f"batch {options.batch}"] = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"), "cpu": cpu.split(":")[1].strip(), "cores": os.cpu_count(),
        "threads": options.threads, "torch": torch.__version__, "load": os.getloadavg()[0], "seconds": found,
        "not_gemm_over_gemm_alone": other, "rounds": rounds}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
