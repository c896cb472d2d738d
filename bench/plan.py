"""Predictions held against runs on this machine: calibrate, run the toy and SmolLM2 for a few steps, compare.

    python bench/plan.py [--only toy] [--out bench/results/plan-cpu.json]

Lengths are the policy's business, not the machine's: mean, spread and prompt length are taken from the run, all else from the
calibration just before it. Calibration takes the lower quartile of its repeats, so that of the run's steps (the median of the
faster half) stands against it; the load is printed. Memory: the highest resident set of each rank less the toy's in exact mode, as
SmolLM2 runs, whose tensors are 2 MB; what remains are tensors. Every run prints such a table at its end, of all its steps and with
the whole process in it.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hardware import load_hardware
from plan import compare, comparison, seen
from settings import parse
from sheet import case_of, derive

ROOT = Path(__file__).resolve().parents[1]
RUNS = {"toy": (["configs/toy.yaml", "steps=40", "eval.every=0"]),
        "smollm2": (["configs/smollm2-135m-cpu.yaml", "steps=6", "eval.every=0", "actor.kv_blocks=256"])}  # soon all used
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def run(arguments: list[str], folder: Path) -> list[dict]:
    """metrics.jsonl's rows."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", *arguments, f"run_dir={folder}"]
    if subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL).returncode:
        sys.exit(f"the run {arguments[0]} failed")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=RUNS)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "plan-cpu.json")
    options = parser.parse_args()
    results, toy = {}, {}
    if options.only in (None, "smollm2"):
        with tempfile.TemporaryDirectory() as scratch:
            small = run(["configs/toy.yaml", "steps=3", "eval.every=0", "exact=true"], Path(scratch) / "run")
        peaks = {"learner": "mem_peak_mb", "actor": "mem_actor_peak_mb"}
        toy = {side: max(row[key] for row in small) * 1e6 for side, key in peaks.items()}
    for name, arguments in RUNS.items():
        if options.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder, calibration = Path(scratch) / "run", Path(scratch) / "calibration.json"
            config = parse(arguments)
            subprocess.run([sys.executable, "plan.py", *arguments, "--calibrate", str(calibration)], cwd=ROOT, env=ENVIRONMENT,
                           check=True)
            rows = run(arguments, folder)
            hardware = load_hardware(str(calibration))
        work = seen(config, rows[1:])
        predicted = derive(dataclasses.replace(case_of(config), hardware=hardware, work=work)).tree()
        quiet = sorted(rows[1:], key=lambda row: row["step_s"])[:max(2, len(rows) // 2)]
        found = compare(predicted, quiet, "sync")
        for side, kinds in predicted["memory_bytes"].items():
            total, measured, unit = found.pop(f"peak memory, {side}")
            if name != "toy":
                found[f"tensors, {side}"] = total - kinds["context"], measured - toy[side], unit
        table = comparison(found)
        print(f"{name}: {hardware.name}, prompts of {work.prompt:.1f} tokens, responses of {work.response:.1f}, "
              f"load {os.getloadavg()[0]:.1f}\n{table}")
        results[name] = {"load": os.getloadavg()[0], "predicted": predicted, "curves": hardware.curves,
                         "found": found, "table": table.splitlines()}
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
