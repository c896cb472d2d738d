"""Predictions held against runs on this machine: calibrate, run the toy and SmolLM2 for a few steps, compare.

    python bench/plan.py [--only toy] [--out bench/results/plan-cpu.json]

Lengths are the policy's business, not the machine's: mean, spread and prompt length are taken from the run, all else from the
calibration just before it. Calibration takes the fastest of its repeats, so the fastest quarter of the run's steps stand against
it; the load is printed. Memory: the highest resident set of each rank less the toy's, whose tensors are 2 MB; what remains are
tensors.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil

from config import Config
from costs import Workload
from data import Encoder, Prompts, load_rows
from hardware import load_hardware
from plan import compare, predict
from settings import parse
from shape import read_shape

ROOT = Path(__file__).resolve().parents[1]
RUNS = {"toy": (["configs/toy.yaml", "steps=40", "eval.every=0"]),
        "smollm2": (["configs/smollm2-135m-cpu.yaml", "steps=6", "eval.every=0"])}
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def run(arguments: list[str], folder: Path) -> tuple[list[dict], dict[str, int]]:
    """metrics.jsonl's rows, and the highest resident set of each role, in bytes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", *arguments, f"run_dir={folder}"]
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    highest = {"learner": 0, "actor": 0}
    while process.poll() is None:
        for child in psutil.Process(process.pid).children():
            try:
                rank = child.environ().get("RANK")
                status = Path(f"/proc/{child.pid}/status").read_text()
            except (psutil.Error, OSError):  # it has just ended
                continue
            peak = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0)
            role = "learner" if rank == "0" else "actor"
            highest[role] = max(highest[role], peak)
        time.sleep(0.1)
    if process.returncode:
        sys.exit(f"the run {arguments[0]} failed")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], highest


def seen(config: Config, rows: list[dict]) -> Workload:
    """The lengths that the run had: mean prompt of its data, mean response, and the spread that cuts as many."""
    encoder = Encoder(config.model.path, config.rollout.stop)
    prompts = Prompts(load_rows(config.data.path, config.data.split, "data.path"), config.data, encoder, config.seed)
    prompt = statistics.mean(len(prompts.draw().ids) for _ in range(64))
    response = statistics.mean(row["response_len"] for row in rows[1:])
    cut = statistics.mean(row["truncated"] for row in rows[1:])
    work = dataclasses.replace(Workload.of(config), prompt=prompt, response=response)
    spreads = [dataclasses.replace(work, sigma=number / 10) for number in range(31)]
    return min(spreads, key=lambda each: abs(each.lengths().count(each.cap) / each.count - cut))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=RUNS)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "plan-cpu.json")
    options = parser.parse_args()
    results, baseline = {}, {}
    for name, arguments in RUNS.items():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder, calibration = Path(scratch) / "run", Path(scratch) / "calibration.json"
            config = parse(arguments)
            subprocess.run([sys.executable, "plan.py", *arguments, "--calibrate", str(calibration)], cwd=ROOT, env=ENVIRONMENT,
                           check=True)
            rows, highest = run(arguments, folder)
            hardware = load_hardware(str(calibration))
        baseline = baseline or highest
        work = seen(config, rows)
        predicted = predict(config, read_shape(config.model.path), hardware, work)
        if name != "toy" and highest is not baseline:
            for side, memory in predicted["memory_bytes"].items():
                memory["total"] -= memory["context"]
                for row in rows:
                    row[f"peak_bytes_{side}"] = highest[side] - baseline[side]
        quiet = sorted(rows[1:], key=lambda row: row["step_s"])[:max(2, len(rows) // 4)]
        table = compare(predicted, [rows[0], *quiet])
        print(f"{name}: {hardware.name}, prompts of {work.prompt:.1f} tokens, responses of {work.response:.1f}, "
              f"load {os.getloadavg()[0]:.1f}\n{table}")
        results[name] = {"load": os.getloadavg()[0], "predicted": predicted, "curves": hardware.curves,
                         "table": table.splitlines()}
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
