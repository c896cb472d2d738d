"""Predictions held against runs on this machine: calibrate, run the toy and SmolLM2 for a few steps, calibrate again, compare.

    python bench/plan.py [--only toy] [--out bench/results/plan-cpu.json]

Lengths are the policy's business, not the machine's: mean, spread and prompt length are taken from the run, all else from the
calibrations just before and just after it, whose predictions are averaged: between two minutes such a machine changes its speed by
a fifth, and the table says how far the two are apart. Calibration takes the lower quartile of its repeats, so that of the run's
steps (the median of the faster half) stands against it. Rounds are repeated, and the one in the middle by its error of the step is
shown. Memory: the highest resident set of each rank less the toy's in exact mode, as
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

from hardware import Hardware, load_hardware
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


def calibrated(arguments: list[str], file: Path) -> Hardware:
    command = [sys.executable, "plan.py", *arguments, "--calibrate", str(file)]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True)
    return load_hardware(str(file))


def one_round(name: str, toy: dict[str, float]) -> dict:
    """Calibrate, run, calibrate. `toy`: resident bytes of the toy's ranks, by side."""
    arguments = RUNS[name]
    with tempfile.TemporaryDirectory() as scratch:
        folder, config = Path(scratch) / "run", parse(arguments)
        machines = [calibrated(arguments, Path(scratch) / "before")]
        rows = run(arguments, folder)
        machines.append(calibrated(arguments, Path(scratch) / "after"))
    work, quiet = seen(config, rows[1:]), sorted(rows[1:], key=lambda row: row["step_s"])[:max(2, len(rows) // 2)]
    trees = [derive(dataclasses.replace(case_of(config), hardware=machine, work=work)).tree() for machine in machines]
    before, after = (compare(tree, quiet, "sync") for tree in trees)
    found = {key: ((one + after[key][0]) / 2, measured, unit) for key, (one, measured, unit) in before.items()}
    for side, kinds in trees[0]["memory_bytes"].items():
        total, measured, unit = found.pop(f"peak memory, {side}")
        if name != "toy":
            found[f"tensors, {side}"] = total - kinds["context"], measured - toy[side], unit
    table = comparison(found)
    apart = max(before["step"][0], after["step"][0]) / min(before["step"][0], after["step"][0]) - 1
    print(f"{name}: {machines[0].name}, prompts of {work.prompt:.1f} tokens, responses of {work.response:.1f}, load "
          f"{os.getloadavg()[0]:.1f}, calibrations {apart:.0%} apart\n{table}")
    return {"load": os.getloadavg()[0], "apart": apart, "predicted": trees, "curves": [each.curves for each in machines],
            "found": found, "table": table.splitlines()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=RUNS)
    parser.add_argument("--rounds", type=int, default=3, help="of the toy")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "plan-cpu.json")
    options = parser.parse_args()
    results, toy = {}, {}
    if options.only in (None, "smollm2"):
        with tempfile.TemporaryDirectory() as scratch:
            small = run(["configs/toy.yaml", "steps=3", "eval.every=0", "exact=true"], Path(scratch) / "run")
        peaks = {"learner": "mem_peak_mb", "actor": "mem_actor_peak_mb"}
        toy = {side: max(row[key] for row in small) * 1e6 for side, key in peaks.items()}
    for name in RUNS:
        if options.only in (None, name):
            rounds = [one_round(name, toy) for _ in range(options.rounds if name == "toy" else 1)]
            by_error = sorted(rounds, key=lambda each: each["found"]["step"][0] / each["found"]["step"][1])
            results[name] = by_error[len(rounds) // 2] | {"tables": [each["table"] for each in rounds]}
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
