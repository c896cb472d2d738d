"""What this project does on one GPU: kernels, decode, the learner, a publication. Under eight minutes on an H200.

    python bench/gpu.py [--out FILE] [--only kernels,decode] [--budget 470]
    python bench/gpu.py --tiny      # the same code on a CPU with toy sizes: tries this script, its figures mean nothing

bench/gpu_kernels.py has the kernels. A per cent is of a bound measured in the same process (a device copy, read + written; an
8192^3 bf16 product) and, beside it, of the H200's data sheet (4.8 TB/s, 989 TFLOP/s).

Decode without minutes of prefill: requests are put into the scheduler as a prefill of `context` - 1 tokens would have left them,
with blocks of their own, scattered over a pool of random keys and values. From there on `Engine.step` is the real one: scheduling,
copies, graph, sampling, commit. Its bound is (weights multiplied with + keys and values read) / bandwidth. "graph alone" is the
replay by itself: the rest of a step is the host's and the sampling's.

One process measures everything. Rows leave it as they are measured, so when it dies (an illegal access poisons the CUDA context) or
hangs, that costs the item it was at; a new process goes on with the next. A failed check makes the exit status 1.
"""

import argparse
import dataclasses
import datetime
import gc
import json
import math
import os
import platform
import queue
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import triton
from gpu_kernels import EIGHT, KERNELS, ONE, TOY, VENDOR, Machine, check_rows, forward_exactly
from torch import Tensor
from triton.errors import TritonError

import config
import sync
from actor import Engine
from kernels import fp8_linear
from learner import Learner, Sample
from ledger import Ledger
from model import parameter_shapes
from parallel import EngineLinear
from scheduler import Request
from settings import build
from shape import Shape, shape_from_hf
from transfer import Digest, TransferPlan, make_plan, matrix

RESULTS = Path(__file__).resolve().parent / "results"
START_S = 120  # imports, a CUDA context, the bounds
FORESEEN = (RuntimeError, AssertionError, ValueError, FloatingPointError, TritonError, config.ConfigError)


# The engine.

def build_engine(machine: Machine, shape: Shape, longest: int, **actor) -> Engine:
    settings = build({"model": {"dtype": str(machine.dtype).removeprefix("torch.")}, "rollout": {"max_new_tokens": 64},
                             "data": {"max_prompt_tokens": longest - 64}, "actor": actor})
    return Engine(settings, shape, shape.vocab, machine.device, Ledger(trace=False))


def place(engine: Engine, batch: int, context: int) -> None:
    """Running requests, each with its own blocks, whose last token is all that is left to compute."""
    scheduler, size = engine.scheduler, engine.config.actor.block_size
    for number in range(batch):
        request = Request(number, 0, [number % engine.shape.vocab] * context, max_new_tokens=1 << 30)
        request.num_computed, request.start_version = context - 1, scheduler.version
        request.blocks.extend(scheduler.pool.take() for _ in range(scheduler.pool.blocks_for(context - 1)))
        request.chain = [0] * ((context - 1) // size)
        scheduler.running.append(request)


def measure_steps(engine: Engine, steps: int) -> tuple[float, float]:
    """(median seconds of a decode step, tokens that one attends to)"""
    seconds, running = [], engine.scheduler.running
    for _ in range(steps + 3):
        start = time.perf_counter()
        engine.step()  # ends with the sampled tokens on the host
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[3:]), sum(request.num_computed for request in running) - len(running) * steps / 2


def decode(machine: Machine, quantization: str) -> None:
    shape = machine.shape(EIGHT)
    contexts, batches, steps = ((16, 32), (1, 3), 2) if machine.tiny else ((1024, 4096), (1, 16, 64, 256), 12)
    engine = build_engine(machine, shape, contexts[-1] + 128, quantization=quantization, max_num_seqs=batches[-1],
                          **({"kv_blocks": 64} if machine.tiny else {"kv_memory_fraction": 0.85}))
    runner = engine.runner
    for name, weight in engine.weights().items():
        weight.fill_(1) if name.endswith("norm.weight") else weight.normal_(0, weight.shape[-1] ** -0.5)
    for layer in runner.cache:
        layer.normal_()
    machine.row(f"{quantization}: connect and capture", machine.clock(engine.connect),
                note=f"graphs {len(runner.buckets)}, KV pool {runner.blocks * engine.config.actor.block_size} tokens")
    machine.row(f"{quantization}: publish", machine.clock(lambda: engine.publish(0)), note="derived weights made anew")
    free = engine.scheduler.pool.free
    for block in random.sample(list(free), len(free)):  # in no order, as after an hour of decoding
        free.move_to_end(block)
    multiplied = [tensor for module in runner.model.modules() if isinstance(module, EngineLinear)
                  for tensor in (module.derived if quantization == "fp8" and module.derived else (module.weight,))]
    weight_bytes = sum(tensor.nbytes for tensor in multiplied)
    for context in contexts:
        for wanted in batches:
            batch = min(wanted, runner.blocks // engine.scheduler.pool.blocks_for(context + 64))
            fits = "" if batch == wanted else f"{wanted} do not fit into a pool of {engine.scheduler.capacity} tokens"
            place(engine, batch, context)
            captured = runner.graphs
            for graphs in (True, False) if captured else (False,):
                runner.graphs = captured if graphs else {}
                seconds, attended = measure_steps(engine, steps if graphs else steps // 2)
                bound = weight_bytes + attended * shape.kv_bytes_per_token(machine.dtype.itemsize)
                alone, note = None, fits
                if graphs:
                    alone = machine.time(captured[min(size for size in captured if size >= batch)].replay) * 1e3
                    note = f"graph alone {alone:.2f} ms" + f"; {fits}" * bool(fits)
                machine.row(f"{quantization}: batch {batch}, context {context}, {'graphs' if graphs else 'no graphs'}", seconds,
                            rate=batch / seconds, unit="tokens/s", of_measured=bound / machine.bounds["copy"] / seconds,
                            of_vendor=bound / VENDOR["copy"] / seconds, bytes_needed=bound, graph_alone_ms=alone, note=note)
            runner.graphs = captured
            for number in range(batch):
                engine.scheduler.abort(number)
            engine.scheduler.finished.clear()


def load_random(engine: Engine, seed: int) -> dict[str, Tensor]:
    """Write new weights into the live tensors; returns what the engine then multiplies with, by the learner's names, in float64."""
    torch.manual_seed(seed)
    live, kept = engine.weights(), {}
    for name, size in parameter_shapes(engine.shape).items():
        values = (torch.rand(size) + 0.5 if name.endswith("norm.weight") else torch.randn(size) * 1.5 * size[-1] ** -0.5).to(
            getattr(torch, engine.config.model.dtype))
        for at in engine.runner.layout[name]:
            part = matrix(values)[at.row0:at.row1, at.col0:at.col1]
            matrix(live[at.tensor])[at.to_row:at.to_row + part.shape[0], at.to_col:at.to_col + part.shape[1]].copy_(part)
        if engine.config.actor.quantization == "fp8" and "_proj" in name:  # sizes are multiples of 128: blocks do not straddle
            values = fp8_linear.dequantise(*fp8_linear.quantise(values))
        kept[name] = values.double()
    return kept


def answer(engine: Engine, late: bool) -> list[Request]:
    """Greedy responses. `late` keeps the device some milliseconds behind the host, which must not run over what it has not read."""
    draw = random.Random(5)
    requests = [Request(group, 0, [draw.randrange(engine.shape.vocab) for _ in range(length)], 8, temperature=0.0)
                for group, length in enumerate((200, 3, 40, 17, 33, 1, 64, 16, 90))]  # 200 tokens are six chunks without logits
    for request in requests:
        engine.scheduler.add([request])
    while engine.scheduler.unfinished:
        if late:
            torch.cuda._sleep(20_000_000)
        engine.step()
    engine.scheduler.finished.clear()
    return requests


def judge(requests: list[Request], parameters: dict[str, Tensor], shape: Shape) -> float:
    """The largest error of a logprob, or by which a chosen token falls short of the best, relative to the largest |logprob|."""
    worst = 0.0
    for request in requests:
        logp_SV = forward_exactly(parameters, request.tokens[:-1], shape)[request.num_prompt - 1:]
        chosen = logp_SV.gather(1, torch.tensor(request.tokens[request.num_prompt:])[:, None])[:, 0]
        recorded = torch.tensor(request.logprobs, dtype=torch.float64)
        misses = torch.maximum((recorded - chosen).abs(), logp_SV.amax(-1) - chosen)
        worst = max(worst, (misses.max() / logp_SV.abs().max()).item())
    return worst if math.isfinite(worst) else 1e30


def sanity(machine: Machine) -> None:
    """A toy engine on the device against float64 on the CPU: prefill in chunks, decode, graphs, new weights under live graphs."""
    shape, on_gpu = shape_from_hf(TOY), machine.device.type == "cuda"
    # On a GPU fp32 too, for the tightest bound: last, because its kernels have to be compiled for this alone.
    for dtype, quantization in (machine.dtype, "none"), (machine.dtype, "fp8"), *[(torch.float32, "none")] * on_gpu:
        engine = build_engine(dataclasses.replace(machine, dtype=dtype), shape, 256, quantization=quantization, kv_blocks=200,
                              max_num_seqs=16, max_num_batched_tokens=32)
        weights, name = load_random(engine, 1), f"{str(dtype).removeprefix('torch.')} {quantization}"
        limit = 1e-4 if dtype == torch.float32 else 3e-2
        engine.connect()
        engine.publish(0)
        answers, captured = {}, engine.runner.graphs
        for label in ("graphs", "late device", "no graphs") if on_gpu else ("no graphs",):
            engine.runner.graphs = {} if label == "no graphs" else captured
            answers[label] = answer(engine, label == "late device")
            worst = judge(answers[label], weights, shape)
            machine.row(f"{name}: {label}, logprobs and greedy choice", error=worst, tolerance=limit, passed=worst <= limit)
        engine.runner.graphs = captured
        if on_gpu:
            same = [a.tokens == b.tokens for a, b in zip(answers["graphs"], answers["no graphs"], strict=True)]
            machine.row(f"{name}: greedy tokens with graphs and without", passed=dtype != torch.float32 or all(same),
                        note=f"{sum(same)} of {len(same)} requests alike (in bf16 near ties may differ)")
        else:
            machine.row(f"{name}: graphs, late device", note="skipped: needs CUDA graphs")
        fresh = load_random(engine, 2)
        engine.publish(1)
        requests = answer(engine, False)
        new, old = judge(requests, fresh, shape), judge(requests, weights, shape)
        machine.row(f"{name}: after a publication", error=new, tolerance=limit, passed=new <= limit < old,
                    note=f"error against the former weights {old:.2g}")
        del engine


# The learner, and a publication.

def learner(machine: Machine) -> None:
    shape, on_gpu = machine.shape(ONE), machine.device.type == "cuda"
    lengths = [20, 33, 9] if machine.tiny else [4096, 3072, 2048, 4096, 3072]
    for library in ("NCCL", "GLOO"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")  # one rank: no network is needed
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=store, rank=0, world_size=1,
                            timeout=datetime.timedelta(seconds=60))
    try:
        groups = sync.make_groups(sync.Grid(1, 1, 0, 1), TransferPlan({}, (), ()), machine.device.type, 60.0)
        settings = build({"model": {"init": "random", "dtype": str(machine.dtype).removeprefix("torch.")}})
        trainer = Learner(settings, shape, shape.vocab, groups.mesh, machine.device)
        draw, micro_batches = random.Random(0), []
        for _ in range(2):
            trained = sum(length - length // 4 for length in lengths)
            micro_batches.append([Sample([draw.randrange(shape.vocab) for _ in range(length)], length // 4,
                                         [-math.log(shape.vocab)] * (length - length // 4), draw.choice((-1.0, 1.0)), 0.5 / trained)
                                  for length in lengths])
        trainer.credit([sample for samples in micro_batches for sample in samples])
        for mode in ("none", "selective", "full"):
            for layer in trainer.model.model.layers:
                layer.recompute = mode  # all that learner.activation_checkpointing does
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            seconds, sums = [], {}
            for step in range(2 if machine.tiny else 4):
                start = time.perf_counter()
                sums = trainer.train_step(micro_batches, step, Ledger(trace=False))
                machine.wait()
                seconds += [time.perf_counter() - start] if step else []
            peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0
            tokens, took = 2 * sum(lengths), statistics.median(seconds)
            machine.row(f"train_step, 2 x {sum(lengths)} tokens, checkpointing {mode}", took, flops=sums["flops"],
                        passed=math.isfinite(sums["loss"]) and math.isfinite(sums["grad_norm"]), tokens_per_second=tokens / took,
                        peak_memory_gb=peak, note=f"MFU without recomputation; {tokens / took:.0f} tokens/s, peak {peak:.1f} GB")
    finally:
        dist.destroy_process_group()


def publication(machine: Machine) -> None:
    """What both sides of sync.py do besides the wire, by its own methods: a learner of one rank and an engine of one lane."""
    shape = machine.shape(EIGHT)
    engine = build_engine(machine, shape, 128, kv_blocks=64, cuda_graphs=False, max_num_seqs=4)
    live, shapes = engine.weights(), parameter_shapes(shape)
    shards = {name: torch.randn(size, device=machine.device) for name, size in shapes.items()}
    bucket = 2**12 if machine.tiny else int(engine.config.publish.bucket_mb * 1e6) // machine.dtype.itemsize
    targets = {name: tuple(weight.shape) for name, weight in live.items()}
    plan = make_plan(shapes, (engine.runner.layout,), (targets,), (1, 1), (bucket, 8))
    reports: list[dict] = []
    channel = types.SimpleNamespace(push=lambda queue, message: reports.append(message))
    # What a Publisher has, but for process groups: its methods for the rest are called with this in its place.
    sides = [types.SimpleNamespace(plan=plan, grid=sync.Grid(1, 1, 1, 1), rank=rank, lane=0, names=sorted(shapes), channel=channel,
                                   digest=Digest(machine.device), dtype=machine.dtype, device=machine.device) for rank in (0, 1)]
    matrices, live_matrices = ({name: matrix(each) for name, each in tensors.items()} for tensors in (shards, live))
    size, each = sum(weight.nbytes for weight in live.values()), machine.dtype.itemsize
    for turn in range(2):  # the first compiles and touches fresh memory
        seconds = {"cast": 0.0, "write": 0.0}
        for pieces in plan.streams[0].buckets:
            buffer = torch.empty(sum(piece.numel for piece in pieces), dtype=machine.dtype, device=machine.device)
            seconds["cast"] += machine.clock(lambda: sync.Publisher._cast(sides[0], pieces, matrices, buffer))  # noqa: B023
            seconds["write"] += machine.clock(lambda: sync._write(pieces, buffer, live_matrices))  # noqa: B023
        if turn:
            label = f"{size / 1e9:.1f} GB in {len(plan.streams[0].buckets)} buckets"
            machine.row(f"cast fp32 to buckets, {label}", seconds["cast"], moved=size * (4 + each) / each)
            machine.row(f"write buckets to live tensors, {label}", seconds["write"], moved=2 * size)
    sender, receiver = (machine.clock(fn) for fn in (lambda: sync.Publisher._report_shards(sides[0], 0, shards),
                                                     lambda: sync.Publisher._report_live(sides[1], 0, live, {})))
    machine.row("digest of the shards, cast included", sender, moved=size * (4 + 2 * each) / each)
    machine.row("digest of the live tensors", receiver, moved=size)

    def differing() -> list[str]:
        return [name for name, *pair in zip(sorted(shapes), *(reports[at]["digests"] for at in (0, -1)), strict=True)
                if (pair[0] - pair[1]) % (1 << 64)]

    machine.row("digests of both sides agree", passed=differing() == [], note=", ".join(differing()[:3]))
    victim = f"model.layers.{shape.layers - 1}.mlp.up_proj.weight"
    at = plan.layouts[0][victim][0]
    bits = live_matrices[at.tensor].view(torch.int16 if each == 2 else torch.int32)
    bits[at.to_row + 3, at.to_col + 5] ^= 1
    sync.Publisher._report_live(sides[1], 0, live, {})
    machine.row("one flipped bit is found and named", passed=differing() == [victim], note=", ".join(differing()[:3]))


ITEMS: dict[str, tuple[Callable[[Machine], None], int]] = {  # section/item -> what runs, seconds it may take
    "rows/cublas": (check_rows, 40), **{f"kernels/{name}": (check, 60) for name, check in KERNELS.items()},
    "sanity/engine": (sanity, 90), "decode/bf16": (lambda machine: decode(machine, "none"), 100),
    "decode/fp8": (lambda machine: decode(machine, "fp8"), 90), "learner/1b": (learner, 110), "publication/8b": (publication, 60)}


# The process that measures, and the one that watches it.

def hardware() -> dict:
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
    try:
        smi = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        smi = ""
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "memory_gb": properties.total_memory / 1e9, "driver, power limit, top clock": smi or "unknown",
            "multiprocessors": properties.multi_processor_count}


def serve(names: list[str], tiny: bool) -> int:
    """Measure the items, saying each thing at once as a line of JSON. Ends early where the device is not as it was found."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print do so into the log

    def say(kind: str, content) -> None:
        print(json.dumps({kind: content}), file=answers)

    torch.manual_seed(0)
    random.seed(0)
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda:0", torch.bfloat16)
    machine = Machine(torch.device(device), tiny, dtype, lambda row: say("row", row))
    machine.measure_bounds()
    say("machine", {
        "hardware": {"name": platform.machine()} if tiny else hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
                     "triton": triton.__version__},
        "bounds": {f"{whose}{kind}": bounds[bound] / unit for whose, bounds in (("", machine.bounds), ("vendor_", VENDOR))
                   for kind, bound, unit in (("copy_gb_s", "copy", 1e9), ("matmul_tflop_s", "matmul", 1e12))}})
    for name in names:
        say("start", name)
        start, message = time.perf_counter(), ""
        try:
            ITEMS[name][0](machine)
        except FORESEEN as problem:
            message = f"{type(problem).__name__}: {str(problem)[:500]} " + "".join(traceback.format_tb(problem.__traceback__)[-2:])
        say("end", {"seconds": time.perf_counter() - start, "message": message})
        gc.collect()
        if not tiny:
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError:  # an illegal access: every later call would fail too
                return 3
            if torch.cuda.memory_allocated() > 1 << 30:  # somebody still holds a model
                return 3
    return 0


def watch(left: list[str], deadline: float, tiny: bool, results: dict, show: Callable[[dict], None]) -> None:
    """One measuring process over the items `left`, which are taken off as they end, well or not."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, sys.argv[0], "--serve", ",".join(left), *["--tiny"] * tiny]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        lines: queue.Queue[str] = queue.Queue()

        def pump() -> None:
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=pump, daemon=True).start()
        item, began, before, why = None, time.monotonic(), len(left), ""
        until = min(began + START_S, deadline)
        try:
            while left:
                line = lines.get(timeout=max(0.0, until - time.monotonic()))
                if not line:
                    log.seek(0)
                    why = "the process died: " + " ".join(log.read().split("\n")[-8:])[-600:]
                    break
                (kind, content), = json.loads(line).items()
                if kind == "machine":
                    results.update(content)
                elif kind == "start":
                    item, began = {"status": "running", "limit_s": ITEMS[content][1], "rows": []}, time.monotonic()
                    results["items"][content], until = item, min(began + item["limit_s"], deadline)
                elif kind == "row":
                    item["rows"].append(content)
                else:
                    failed = content["message"] or any(row.get("passed") is False for row in item["rows"])
                    item.update(content, status="failed" if failed else "ok")
                    left.pop(0)
                    item, until = None, min(time.monotonic() + START_S, deadline)
                show({kind: content})
        except queue.Empty:
            why = f"took longer than {until - began:.0f} s" + " (the budget was spent)" * (until == deadline)
        finally:
            process.kill()
            process.wait()
    if item is not None or len(left) == before and left:  # it ended within an item, or before it began any
        item = results["items"].setdefault(left.pop(0), {"rows": []})
        item.update(status="failed", seconds=time.monotonic() - began, message=why)
        show({"end": item})


def line_of(row: dict) -> str:
    def cell(key: str, form: str, width: int, scale: float = 1.0) -> str:
        return " " * width if row.get(key) is None else f"{row[key] * scale:{form}}".rjust(width)

    verdict = {True: "ok", False: "FAILED", None: ""}[row.get("passed")]
    speed = f"{cell('ms', '.3f', 10)}{cell('rate', '.1f', 10)} {row.get('unit', ''):9}"
    shares = cell("of_measured", ".0f", 4, 100) + cell("of_vendor", ".0f", 6, 100)
    right = cell("error", ".1e", 9) + cell("tolerance", ".0e", 7)
    return f"  {row['name']:56}{speed}{shares}{right} {verdict:7}{row.get('note', '')}".rstrip()


def print_table(results: dict) -> None:
    print(f"\n  {'':56}{'ms':>10}{'rate':>10} {'':9}{'%':>4}{'%spec':>6}{'error':>9}{'bound':>7}")
    for name, item in results["items"].items():
        print(f"{name}: {item['status']}, {item.get('seconds', 0.0):.1f} s " + item.get("message", "").strip())
        print("\n".join(line_of(row) for row in item["rows"]) or "  no rows")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="", help="the JSON file; default bench/results/gpu-<name>.json, with --tiny none")
    parser.add_argument("--only", default="", help=f"sections or items, with commas between, of {', '.join(ITEMS)}")
    parser.add_argument("--budget", type=float, default=470.0, help="seconds; what does not fit is reported as not run")
    parser.add_argument("--tiny", action="store_true", help="a dry run on the CPU")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        return serve(options.serve.split(","), options.tiny)
    wanted = set(filter(None, options.only.split(",")))
    if unknown := wanted - {part for name in ITEMS for part in (name, name.split("/")[0])}:
        parser.error(f"--only: no {', '.join(sorted(unknown))} among {', '.join(ITEMS)}")
    left = [name for name in ITEMS if not wanted or wanted & {name, name.split("/")[0]}]
    if not options.tiny and not torch.cuda.is_available():
        print("error: bench/gpu.py needs a CUDA device; --tiny tries the script on a CPU", file=sys.stderr)
        return 2
    results = {"date": datetime.datetime.now().isoformat(timespec="seconds"), "dry_run": options.tiny, "items": {}}
    if options.tiny:
        print("DRY RUN on a CPU with toy sizes: the figures below mean nothing")
    deadline = time.monotonic() + options.budget

    def save() -> str:
        name = re.sub(r"[^a-z0-9]+", "-", results.get("hardware", {}).get("name", "unknown").lower()).strip("-")
        path = options.out or ("" if options.tiny else str(RESULTS / f"gpu-{name}.json"))
        if path:
            Path(path).write_text(json.dumps(results, indent=1) + "\n")
        return path

    def show(said: dict) -> None:
        (kind, content), = said.items()
        if kind == "machine":
            print("\n".join(f"{part}: " + ", ".join(f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}"
                                                    for key, value in content[part].items()) for part in content), flush=True)
        elif kind == "start":
            print(content, end=" ... ", flush=True)
        elif kind == "row" and "rows_invariant" in content:
            print(f"\n  rows by {content['name']}: {content['note']}", end="   ", flush=True)
        elif kind == "end":
            print(f"{content['seconds']:.1f} s {content['message']}".strip(), flush=True)
            save()

    while left and time.monotonic() < deadline:
        watch(left, deadline, options.tiny, results, show)
    for name in left:
        results["items"][name] = {"status": "not run", "message": f"the budget of {options.budget:.0f} s was spent", "rows": []}
    path = save()
    print_table(results)
    bad = [name for name, item in results["items"].items() if item["status"] != "ok"]
    print(f"\n{len(results['items']) - len(bad)} of {len(results['items'])} items ok" + (f"; not: {', '.join(bad)}" if bad else ""))
    print(f"written to {path}" if path else "DRY RUN: nothing was written, the figures mean nothing")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
