"""The simulator held against runs on this machine, and represented engines against all of them.

    python bench/simulate.py runs [--steps 60]        # toy, on-policy, one-step-off and async, measured and simulated
    python bench/simulate.py engines [--grain 256]    # the 70B on 64 and 256 GPUs: all 3 and 12 engines against 2 and 3
    python bench/simulate.py scale [--grain 256]      # the 70B from 64 to 16,384 GPUs in all modes, and docs/simulate-scale.png

Of a run on shared cores two things can be off: how fast its parts are, and what follows when they wait for one another. The second
is what a simulator is for. So three predictions stand beside a run's step and idle shares: from the calibration before it (`cold`);
with the mean seconds of engine, learner, publication and messages of another mode's run a minute before (`other run`); and with
those of the run itself (`own parts`), where all that is left to get wrong is who waits for whom, and how long.
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
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet import Scenario, scaled, trace
from hardware import Hardware
from settings import parse
from sheet import case_of
from simulate import Run

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
KINDS = {"on-policy": 1, "one-step-off": 0, "async": 1}  # at max_staleness 0, 1, 2; which of them is the other run
PARTS = {"engine": ("t_actor_decode", "t_actor_prefill"), "messages": ("t_actor_exchange", "t_actor_other"),
         "learner": ("t_learner_forward", "t_learner_backward", "t_learner_optimizer", "t_learner_score"),
         "publish": ("publish_s",), "report": ("t_learner_report", "t_learner_checkpoint", "t_learner_other")}


def measure(arguments: list[str], folder: Path) -> dict:
    """Mean seconds a step by part, the step's, and idle shares; the steps that fill and drain the pipeline left out."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", *arguments]
    subprocess.run([*command, "log.samples_per_step=16", f"run_dir={folder}"], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                   check=True)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][2:-2]

    def mean(*keys: str) -> float:
        return statistics.mean(sum(row.get(key, 0.0) for key in keys) for row in rows)

    walls = {side: mean(f"t_{side}_wall") for side in ("actor", "learner")}
    return {"step_s": mean("step_s"), "actors idle": mean("t_actor_wait_prompts") / walls["actor"],
            "learners idle": mean("t_learner_wait_rollouts") / walls["learner"]} | {
            name: mean(*keys) for name, keys in PARTS.items()}


def predict(arguments: list[str], hardware: Hardware, lengths: tuple, staleness: int, steps: int) -> tuple[dict, dict]:
    """What is compared, and the seconds a step of the parts that it came from, both once the pipeline is full."""
    case = case_of(parse(arguments))
    found = Run(Scenario(case.config, case.shape, hardware, 2, ("sync", "one_step", "async")[staleness], staleness,
                         case.config.actor.update_mode, lengths=lengths), steps).play()
    step, actors = found["step_s"], found["actors"]
    parts = {"engine": step * (actors["prefill"] + actors["decode"]), "learner": step * found["learners"]["train"]}
    return {"step_s": step, "actors idle": found["idle"]["actors"], "learners idle": found["idle"]["learners"]}, parts


def at_the_level_of(hardware: Hardware, measured: dict, samples: int, play: Callable[[Hardware], tuple[dict, dict]]) -> Hardware:
    """The calibration's curves, moved up or down until the simulated parts take what a run's took.

    More than once: how many samples a publication sends back to prefill depends on how fast the sides are.
    """
    curves = hardware.curves | {"publish_s": measured["publish"], "beside_s": measured["report"],
                                "sample_s": 2 * measured["messages"] / samples}
    for _ in range(6):
        _, parts = play(dataclasses.replace(hardware, curves=curves))
        engine, learner = (measured[side] / parts[side] for side in ("engine", "learner"))
        for key, factor in (("prefill", engine), ("decode", engine), ("forward", learner), ("backward", learner)):
            curves |= {key: [(size, seconds * factor) for size, seconds in curves[key]]}
        curves |= {"context_s": curves["context_s"] * engine, "optimizer_s": curves["optimizer_s"] * learner}
    return dataclasses.replace(hardware, curves=curves)


def compare(base: list[str], hardware: Hardware, measured: list[dict], traces: list[tuple], steps: int) -> list[tuple]:
    """(mode, quantity, measured, cold, other run, own parts)"""
    table, samples = [], case_of(parse(base)).work.count
    for staleness, (mode, other) in enumerate(KINDS.items()):
        def play(rates: Hardware, staleness: int = staleness) -> tuple[dict, dict]:
            return predict(base, rates, traces[staleness], staleness, steps)

        levels = []
        for of in (other, staleness):
            def there(rates: Hardware, of: int = of) -> tuple[dict, dict]:
                return predict(base, rates, traces[of], of, steps)
            levels.append(at_the_level_of(hardware, measured[of], samples, there))
        cold, other, own = (play(rates)[0] for rates in (hardware, *levels))
        table += [(mode, name, measured[staleness][name], cold[name], other[name], own[name]) for name in cold]
    return table


def runs(options: argparse.Namespace) -> None:
    base = ["configs/toy.yaml", f"steps={options.steps}", "eval.every=0", "checkpoint.every=0"]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "calibration.json"
        subprocess.run([sys.executable, "plan.py", *base, "--calibrate", str(file)], cwd=ROOT, env=ENVIRONMENT, check=True,
                       stdout=subprocess.DEVNULL)
        hardware = case_of(parse([*base, f"plan.hardware={file}"])).hardware
        folders = [Path(scratch) / f"run{staleness}" for staleness in range(len(KINDS))]
        measured = [measure([*base, f"max_staleness={staleness}"], folder) for staleness, folder in enumerate(folders)]
        table = compare(base, hardware, measured, [trace(str(folder)) for folder in folders], options.steps)
    print(f"load {os.getloadavg()[0]:.1f}")
    print(f"{'':14}{'':14}{'measured':>10}{'cold':>10}{'other run':>11}{'own parts':>11}{'error':>9}")
    for mode, name, found, cold, other, own in table:
        error = f"{own / found - 1:+.1%}" if name == "step_s" else f"{100 * (own - found):+.1f} pt"
        print(f"{mode:14}{name:14}{found:>10.3f}{cold:>10.3f}{other:>11.3f}{own:>11.3f}{error:>9}")
    save(options.out, "runs", table)


def engines(options: argparse.Namespace) -> None:
    case, table = case_of(parse(["configs/llama3.1-70b-64xh100.yaml"])), []
    modes = {"sync": {}, "async": {"max_staleness": 2, "staged": True, "update": "keep"}}
    for gpus, counts in ((64, (3, 2)), (256, (12, 3))):
        for mode, more in modes.items():
            for count in counts:
                start = time.process_time()
                scenario = Scenario(scaled(case.config, gpus, mode), case.shape, case.hardware, gpus, mode, engines=count,
                                    grain=options.grain, **more)
                found = Run(scenario, options.steps + 1 + scenario.max_staleness).play()
                table.append((gpus, mode, count, found["step_s"], found["idle"]["actors"], found["idle"]["learners"],
                              time.process_time() - start))
                full = next(row for row in table if row[:2] == (gpus, mode))
                _, _, _, step, actors, learners, spent = table[-1]
                print(f"{gpus:>4} GPUs {mode:6} {count:>3} engines: step {step:.0f} s ({step / full[3] - 1:+.1%}), "
                      f"idle {actors:.1%} / {learners:.1%} ({100 * (actors - full[4]):+.1f} / {100 * (learners - full[5]):+.1f} "
                      f"pt), {spent:.0f} s of a core", flush=True)
    save(options.out, "engines", table)


def scale(options: argparse.Namespace) -> None:
    """Three engines stand for all; then one engine in a hundred takes 1.5 times as long."""
    base = ["configs/llama3.1-70b-64xh100.yaml", "--engines", "3", "--steps", str(options.steps), "--grain", str(options.grain)]
    for key, more in {"scale": ["--sweep-gpus", "64,256,1024,4096,16384", "--plot", "docs/simulate-scale.png"],
                      "slow": ["--sweep-gpus", "4096,16384", "--slow", "0.01:1.5"]}.items():
        done = subprocess.run([sys.executable, "simulate.py", *base, *more, "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                              check=True)
        save(options.out, key, json.loads(done.stdout))


def save(file: Path, key: str, table: list) -> None:
    held = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(held | {key: table}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("runs", "engines", "scale"))
    parser.add_argument("--steps", type=int, default=0, help="updates: 60 of a run, 3 or 2 of the 70B")
    parser.add_argument("--grain", type=int, default=256)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "simulate.json")
    options = parser.parse_args()
    options.steps = options.steps or {"runs": 60, "engines": 3, "scale": 2}[options.what]
    {"runs": runs, "engines": engines, "scale": scale}[options.what](options)


if __name__ == "__main__":
    main()
