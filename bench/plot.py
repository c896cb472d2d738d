"""Plot a run's reward, entropy, logprob gap and seconds by phase from its metrics.jsonl, and say what it learned.

    python bench/plot.py runs/toy [--out FILE.png]
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def plot(run: Path, out: Path) -> None:
    metrics, evaluations = read(run / "metrics.jsonl"), read(run / "eval.jsonl")
    steps = [row["version"] for row in metrics]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    reward, entropy, gap, seconds = axes.flat
    reward.plot(steps, [row["reward"] for row in metrics], label="samples of the step")
    reward.plot([row["version"] for row in evaluations], [row["reward"] for row in evaluations], "o-", label="greedy, held out")
    reward.set(title="reward", xlabel="updates")
    reward.legend()
    entropy.plot(steps, [row["entropy"] for row in metrics])
    entropy.set(title="entropy (nats a token)", xlabel="updates")
    gap.plot(steps, [row["logprob_gap_max"] for row in metrics])
    gap.set(title="largest |learner logprob - engine logprob|", xlabel="updates")
    gap.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3))
    shares = {role: {key.removeprefix(f"t_{role}_") for row in metrics for key in row
                     if key.startswith(f"t_{role}_") and "beside" not in key and not key.endswith("_wall")}
              for role in ("learner", "actor", "colocated") if f"t_{role}_wall" in metrics[0]}
    kinds = sorted(set().union(*shares.values()))
    for number, role in enumerate(shares):
        left = 0.0
        for index, kind in enumerate(kinds):
            mean = sum(row.get(f"t_{role}_{kind}", 0.0) for row in metrics) / max(1, len(metrics))
            seconds.barh(number, mean, left=left, color=plt.get_cmap("tab20")(index), label=kind if number == 0 else None)
            left += mean
    seconds.set(title="seconds a step, mean", yticks=range(len(shares)), yticklabels=list(shares))
    seconds.legend(fontsize=7, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--out", type=Path, help="PNG to write (default: RUN/plot.png)")
    arguments = parser.parse_args()
    metrics = read(arguments.run / "metrics.jsonl")
    if not metrics:
        parser.error(f"{arguments.run}/metrics.jsonl has no steps")
    out = arguments.out or arguments.run / "plot.png"
    plot(arguments.run, out)
    rewards = [row["reward"] for row in metrics if row["reward"] is not None]
    if rewards:
        last = rewards[-10:]
        seconds = sum(row["step_s"] for row in metrics)
        print(f"reward {rewards[0]:.3f} at the start, {sum(last) / len(last):.3f} over the last {len(last)} "
              f"of {len(metrics)} steps, {seconds:.0f} s of training")
    print(f"plots: {out} and `tensorboard --logdir {arguments.run}`")


if __name__ == "__main__":
    main()
