"""What a publication costs those who are decoding: update modes and staged publication on the same long-tailed work.

    python bench/update_modes.py [--steps 24] [--rounds 3]

Two ranks, one thread each: an actor that is never out of work (staleness 2) and a learner. The learning rate is next to nothing, so
that all versions are equal and every run draws the same samples, token for token: response lengths are geometric (a random toy
ends with probability 1/13 a token, cap 56). Runs take turns, rounds are repeated; medians over all steps but the first four of
each run are printed and written to bench/results/update-modes-cpu.json.
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
RUNS = [(staleness, mode, publish) for staleness, modes in ((0, ["recompute"]), (2, ["drain", "recompute", "keep"]))
        for mode, publish in itertools.product(modes, ["in_place", "staged"])]
TOY = ["configs/toy.yaml", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=8", "rollout.max_new_tokens=56",
       "actor.max_num_seqs=16", "publish.bucket_mb=0.1"]
COLUMNS = {"step_s": "step, s", "publish_exposed_s": "actor stopped, s", "publish_s": "learner publishes, s",
           "learner idle": "learner waits", "actor idle": "actor waits", "publish_staging_mb": "receive buffers, MB"}


def measure(staleness: int, mode: str, publish: str, steps: int) -> list[dict]:
    """One run's metrics without its first four steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py", *TOY,
                   f"run_dir={folder}/run", f"steps={steps}", f"max_staleness={staleness}", f"actor.update_mode={mode}",
                   f"publish.mode={publish}", "learner.lr=1e-30", "learner.warmup_steps=0", "eval.every=0", "log.trackers=[]",
                   "threads=1"]
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in Path(f"{folder}/run/metrics.jsonl").read_text().splitlines()][4:]
    return [row | {"learner idle": row["t_learner_wait_rollouts"] / row["t_learner_wall"],
                   "actor idle": row.get("t_actor_wait_prompts", 0.0) / row["t_actor_wall"]} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows: dict[tuple, list[dict]] = {run: [] for run in RUNS}
    for _, run in itertools.product(range(options.rounds), RUNS):
        rows[run] += measure(*run, options.steps)
    table = [dict(zip(("staleness", "mode", "publish"), run, strict=True))
             | {key: statistics.median(row[key] for row in rows[run]) for key in COLUMNS} for run in RUNS]
    print("| staleness | update mode | publication |", " | ".join(COLUMNS.values()), "|\n" + "|---" * (3 + len(COLUMNS)) + "|")
    for entry in table:
        print("|", " | ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in entry.values()), "|")
    file = ROOT / "bench" / "results" / "update-modes-cpu.json"
    file.write_text(json.dumps({"steps": options.steps, "rounds": options.rounds, "runs": table}, indent=1))


if __name__ == "__main__":
    main()
