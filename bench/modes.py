"""The modes of one loop on the same long-tailed work: who waits for whom, and what a publication costs those who are decoding.

    python bench/modes.py [--steps 24] [--rounds 3]

The learning rate is next to nothing, so that all versions are equal and every run draws the same samples, token for token: response
lengths are geometric (a random toy ends with probability 1/13 a token, cap 56). All runs have the machine to themselves, threads as
train.py gives them: two a rank where ranks take turns, one where they work side by side. Runs take turns, rounds are repeated;
medians over all steps but the first four of each run are printed and written to bench/results/modes-cpu.json.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = {
    "colocated, 1 rank": ["placement=colocated"],
    "colocated, 1 rank, memory released": ["placement=colocated", "actor.release_memory=true"],
    "colocated, 2 ranks": ["placement=colocated", "learner.shards=2", "actor.replicas=2"],
    "split, on-policy": [],
    "split, one-step-off": ["max_staleness=1"],
    **{f"split, async 2, {mode}": ["max_staleness=2", f"actor.update_mode={mode}"] for mode in ("drain", "recompute", "keep")},
    **{f"split, async 2, {mode}, staged": ["max_staleness=2", f"actor.update_mode={mode}", "publish.mode=staged"]
       for mode in ("drain", "recompute", "keep")},
}
TOY = ["configs/toy.yaml", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=8", "rollout.max_new_tokens=56",
       "actor.max_num_seqs=16", "publish.bucket_mb=0.1", "learner.lr=1e-30", "learner.warmup_steps=0", "eval.every=0",
       "log.trackers=[]"]
COLUMNS = {"step_s": "step, s", "tokens_per_s": "response tokens/s", "actor prompts": "actor waits for prompts",
           "actor publish": "actor in publications", "learner rollouts": "learner waits for rollouts",
           "learner publish": "learner in publications", "publish_exposed_s": "decoding stopped, s",
           "publish_staging_mb": "receive buffers, MB", "staleness_max": "staleness"}


def measure(overrides: list[str], steps: int) -> list[dict]:
    """One run's metrics without its first four steps."""
    ranks = 1 if "placement=colocated" in overrides and "learner.shards=2" not in overrides else 2
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "train.py", *TOY,
                   f"run_dir={folder}/run", f"steps={steps}", *overrides]
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()][4:]
    return [row | idle(row) for row in rows]


def idle(row: dict) -> dict:
    """Shares of each side's time by cause."""
    def share(side: str, kind: str) -> float:
        role = side if f"t_{side}_wall" in row else "colocated"
        return row.get(f"t_{role}_{kind}", 0.0) / row[f"t_{role}_wall"]

    return {"actor prompts": share("actor", "wait_prompts"), "actor publish": share("actor", "publish"),
            "learner rollouts": share("learner", "wait_rollouts"), "learner publish": share("learner", "publish")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows: dict[str, list[dict]] = {run: [] for run in RUNS}
    for _, run in itertools.product(range(options.rounds), RUNS):
        rows[run] += measure(RUNS[run], options.steps)
    table = {run: {key: statistics.median(row[key] for row in found) for key in COLUMNS} | {
        "staleness_max": max(row["staleness_max"] for row in found)} for run, found in rows.items()}
    print("| mode |", " | ".join(COLUMNS.values()), "|\n" + "|---" * (1 + len(COLUMNS)) + "|")
    for run, entry in table.items():
        print("|", " | ".join([run, *(f"{entry[key]:.0%}" if " " in key else f"{entry[key]:.3g}" for key in COLUMNS)]), "|")
    file = ROOT / "bench" / "results" / "modes-cpu.json"
    file.write_text(json.dumps({"steps": options.steps, "rounds": options.rounds, "load": os.getloadavg()[0], "runs": table},
                               indent=1) + "\n")


if __name__ == "__main__":
    main()
