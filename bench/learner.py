"""One GRPO update on a CPU: this learner beside TRL's trainer, SmolLM2-135M in fp32, the same tokens, loss and optimizer.

    python -m bench.learner [--repeat 3] [--engines seventy,trl,...] [--trl-python PATH]

An update is forward, backward, clipping and AdamW on 4 prompts x 4 samples. Both sides get the same token ids, advantages and old
logprobs (the model's own with noise of 0.1, so that ratios differ from 1 and some are clipped), GRPO's sequence mean, and fp32
masters. Two workloads:

  equal  prompts and responses of 64 tokens: nothing to pad
  tail   prompts of 20 to 100 tokens, responses lognormal (median 48, sigma 0.8, cap 256): a rectangle holds mostly padding

Each measurement is a process of its own that loads the model, makes one update to warm up (moments exist after it) and UPDATES
timed ones, so peak memory is that engine's and that workload's alone. Rounds are interleaved and ratios are taken within a round;
the table has their medians. On shared cores the ratio of CPU seconds is the steadier one, so both are shown. Two threads each:

  seventy            `learner.Learner.train_step` on one rank, one micro-batch, 256 rows of logits at a time; also with
                     `activation_checkpointing` (seventy-selective, seventy-full)
  trl                `GRPOTrainer.train()` itself, timed from its on_step_begin to its on_step_end; only `_prepare_inputs`, which
                     would generate, is replaced by the prepared batch. 16 rows at once, no checkpointing: its fastest.
  trl-checkpointing  the same with checkpointing, its default: its smallest.

The updates are the same or nothing is printed: losses and gradient norms of every update, so also those after an optimizer step,
must agree to 1e-3. MFU is of a 768-cube GEMM measured in the same process. Its FLOPs are the model's on real tokens, for both
engines alike: 3 forwards, a group's prompt once, the causal half of attention, the head on response rows only; recomputation counts
nothing.

TRL is among the test packages of requirements.txt; `--trl-python` names another environment's interpreter.
"""

import argparse
import datetime
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "learner-cpu.json"
MODEL = ROOT / "models" / "smollm2-135m"
THREADS = 2
UPDATES = 1  # timed ones of a process, after the one that warms up
PROMPTS, SAMPLES = 4, 4
MEDIAN, SIGMA, CAP = 48, 0.8, 256  # tokens of a response in the tail
VOCAB = 49152
TRAINING = {"learning_rate": 1e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "weight_decay": 0.0, "max_grad_norm": 1.0}
TOLERANCE = 1e-3  # of losses and gradient norms, relative


def workload(name: str) -> list[dict]:
    """16 sequences: prompt and response ids, and an advantage each; those of a group share the prompt."""
    draw, batch = random.Random(0), []
    for _ in range(PROMPTS):
        prompt = [draw.randrange(3, VOCAB) for _ in range(64 if name == "equal" else draw.randint(20, 100))]
        for _ in range(SAMPLES):
            length = 64 if name == "equal" else min(CAP, max(1, round(draw.lognormvariate(math.log(MEDIAN), SIGMA))))
            batch.append({"prompt": prompt, "response": [draw.randrange(3, VOCAB) for _ in range(length)],
                          "advantage": draw.gauss(0, 1)})
    return batch


# The engines, each in its own process: UPDATES + 1 updates, of each its seconds, CPU seconds, loss and gradient norm.


def clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def new_learner(recompute: str = "none"):
    """A Learner on one rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from learner import Learner
    from settings import build
    from shape import read_shape
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = build({"model": {"path": str(MODEL)}, "data": {"max_prompt_tokens": 256},
                    "rollout": {"max_new_tokens": CAP},
                    "learner": {"lr": TRAINING["learning_rate"], "beta1": TRAINING["adam_beta1"], "beta2": TRAINING["adam_beta2"],
                                "weight_decay": TRAINING["weight_decay"], "max_grad_norm": TRAINING["max_grad_norm"],
                                "activation_checkpointing": recompute, "logprob_chunk": 256},
                    "algorithm": {"name": "grpo", "loss_mean": "sequence"}})
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("shard",))
    return Learner(config, read_shape(MODEL), VOCAB, mesh, torch.device("cpu"))


def to_samples(batch: list[dict]) -> list:
    from learner import Sample
    from losses import token_weight
    tokens = sum(len(each["response"]) for each in batch)
    return [Sample(each["prompt"] + each["response"], len(each["prompt"]), each.get("old") or [0.0] * len(each["response"]),
                   each["advantage"], token_weight("sequence", len(each["response"]), tokens, len(batch), CAP)) for each in batch]


def seventy(batch: list[dict], recompute: str = "none") -> dict:
    from ledger import Ledger
    learner = new_learner(recompute)
    ledger, samples, updates = Ledger(False), to_samples(batch), []
    learner.credit(samples)
    for number in range(UPDATES + 1):
        wall, cpu = clock()
        sums = learner.train_step([samples], number, ledger)
        after = clock()
        updates.append({"seconds": after[0] - wall, "cpu_seconds": after[1] - cpu, "loss": sums["loss"],
                        "grad_norm": sums["grad_norm"], "parts": ledger.account()})
    return {"updates": updates, "flops": sums["flops"], "memory": learner.memory()}


def old_logprobs(batch: list[dict]) -> dict:
    """The model's logprobs of every response with noise of 0.1, as an older version might have recorded them."""
    import torch
    learner = new_learner()
    samples = to_samples(batch)
    with torch.no_grad():
        logps_R, _ = learner.model(*learner._pack(samples), learner.head)
    logps_R += 0.1 * torch.randn(logps_R.shape, generator=torch.Generator().manual_seed(0))
    return {"old": [part.tolist() for part in logps_R.split([sample.response for sample in samples])]}


def new_trainer(folder: str, recompute: str, steps: int, reward: Callable, prompts: list, **settings):
    """TRL's trainer, fp32 on the CPU and otherwise its defaults, and the list that its callback fills, one entry a step."""
    import torch
    import transformers
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    transformers.utils.logging.set_verbosity_error()
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, model_init_kwargs={"dtype": torch.float32}, loss_type="grpo", beta=0.0,
        per_device_train_batch_size=PROMPTS * SAMPLES, num_generations=SAMPLES, max_completion_length=CAP, max_steps=steps,
        gradient_checkpointing=recompute == "full", lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, shuffle_dataset=False, **TRAINING, **settings)
    found: list[dict] = []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, *_, **__):
            self.wall, self.cpu = clock()

        def on_step_end(self, *_, **__):
            wall, cpu = clock()
            found.append({"seconds": wall - self.wall, "cpu_seconds": cpu - self.cpu})

        def on_log(self, args, state, control, logs, **_):
            if "grad_norm" in logs:
                found[-1] |= {"loss": float(logs["loss"]), "grad_norm": float(logs["grad_norm"])}

    trainer = GRPOTrainer(str(MODEL), reward_funcs=reward, args=config, callbacks=[Watch()],
                          train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]))
    return trainer, found


def trl(batch: list[dict], recompute: str = "none") -> dict:
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def padded(rows: list[list], side: str) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side=side)

    prompts, responses = ([each[part] for each in batch] for part in ("prompt", "response"))
    inputs = {
        "prompt_ids": padded(prompts, "left"), "prompt_mask": padded([[1] * len(each) for each in prompts], "left"),
        "completion_ids": padded(responses, "right"), "completion_mask": padded([[1] * len(each) for each in responses], "right"),
        "old_per_token_logps": padded([each["old"] for each in batch], "right"),
        "advantages": torch.tensor([each["advantage"] for each in batch]),
        "num_items_in_batch": torch.tensor(sum(map(len, responses)))}
    with tempfile.TemporaryDirectory() as folder:
        trainer, updates = new_trainer(folder, recompute, UPDATES + 1, lambda completions, **_: [0.0] * len(completions),
                                       ["-"] * PROMPTS)
        trainer._prepare_inputs = lambda generation_batch: inputs
        trainer.train()
    return {"updates": updates}


ENGINES = {"seventy": seventy, "trl": trl, "seventy-selective": lambda batch: seventy(batch, "selective"),
           "seventy-full": lambda batch: seventy(batch, "full"), "trl-checkpointing": lambda batch: trl(batch, "full")}


def serve(name: str) -> None:
    """The child: a batch on standard input, the answer on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print do so into the log
    import torch
    torch.set_num_threads(THREADS)
    batch = json.load(sys.stdin)
    if name == "old":
        json.dump(old_logprobs(batch), answers)
    else:
        import transformers
        result = ENGINES[name](batch)
        # Linux counts in KiB; what the process held at most, its libraries included
        result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        from learner import measure_matmul_flops
        result["matmul_flops"] = measure_matmul_flops(torch.float32, torch.device("cpu"))
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        if name.startswith("trl"):
            import trl as package
            versions["trl"] = package.__version__
        json.dump(result | {"versions": versions}, answers)
    answers.close()


# The parent.


def ask(module: str, name: str, job, python: str = sys.executable) -> dict:
    """The answer of a fresh process of this or another script. Raises SystemExit with its last words if it dies."""
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
                        "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "20000"}  # as train.py
    done = subprocess.run([python, "-m", module, "--serve", name], input=json.dumps(job), capture_output=True, text=True, env=env,
                          cwd=ROOT)
    if done.returncode:
        lines = done.stderr.strip().split("\n")
        raise SystemExit(f"{name} died: {([line for line in lines if 'Error' in line] or lines)[-1][:300]}")
    return json.loads(done.stdout)


def machine() -> dict:
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {"cpu": cpu.split(":")[1].strip(), "cores": os.cpu_count(), "threads": THREADS}


def best(run: dict, key: str) -> float:
    """The fastest of a process's timed updates: what disturbs it only adds."""
    return min(update[key] for update in run["updates"][1:])


def check_same(name: str, runs: dict[str, list[dict]]) -> str:
    """A line with both sides' losses and norms. Raises SystemExit if any engine's differ: it was another update."""
    first = runs["seventy"][0]["updates"]
    for engine, each in runs.items():
        for run in each:
            for number, (mine, theirs) in enumerate(zip(first, run["updates"], strict=True)):
                for key in ("loss", "grad_norm"):
                    if not math.isclose(mine[key], theirs[key], rel_tol=TOLERANCE):
                        raise SystemExit(f"{name}: not the same update, so no ratio: {key} of update {number} is {mine[key]} "
                                         f"(seventy) and {theirs[key]} ({engine})")
    return "; ".join(f"{engine} loss {run[0]['updates'][-1]['loss']:+.6f} norm {run[0]['updates'][-1]['grad_norm']:.5f}"
                     for engine, run in runs.items())


def table(runs: dict[str, list[dict]]) -> list[dict]:
    """Medians over the rounds; every ratio is TRL's fastest setting by the engine, within a round."""
    def ratio(name: str, value: Callable[[dict], float]) -> float:
        return statistics.median(value(theirs) / value(mine) for mine, theirs in zip(runs[name], runs.get("trl", []), strict=True))
    flops = runs["seventy"][0]["flops"]
    return [{"engine": name, "seconds": statistics.median(best(run, "seconds") for run in each),
             "peak_gb": statistics.median(run["peak_bytes"] for run in each) / 1e9,
             "mfu": statistics.median(flops / best(run, "seconds") / run["matmul_flops"] for run in each),
             "trl_seconds_ratio": ratio(name, lambda run: best(run, "seconds")) if "trl" in runs else None,
             "trl_cpu_ratio": ratio(name, lambda run: best(run, "cpu_seconds")) if "trl" in runs else None,
             "memory_of_trl": 1 / ratio(name, lambda run: run["peak_bytes"]) if "trl" in runs else None}
            for name, each in runs.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--workloads", default="equal,tail")
    parser.add_argument("--engines", default=",".join(ENGINES), help="in the order in which a round runs them; seventy is needed")
    parser.add_argument("--trl-python", default=sys.executable, help="of an environment with TRL, see the top of this file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    results = {"date": datetime.datetime.now().isoformat(timespec="seconds"), "hardware": machine(), "rounds": options.repeat}
    for name in options.workloads.split(","):
        batch = workload(name)
        for each, old in zip(batch, ask("bench.learner", "old", batch)["old"], strict=True):
            each["old"] = old
        runs: dict[str, list[dict]] = {engine: [] for engine in options.engines.split(",")}
        for number in range(options.repeat):
            for engine, each in runs.items():
                run = ask("bench.learner", engine, batch, options.trl_python if engine.startswith("trl") else sys.executable)
                each.append(run | {"load": os.getloadavg()[0]})
                print(f"{name}, round {number + 1}: {engine:18} {best(run, 'seconds'):6.2f} s, {best(run, 'cpu_seconds'):6.2f} "
                      f"CPU s, peak {run['peak_bytes'] / 1e9:.2f} GB, load {each[-1]['load']:.1f}", flush=True)
        lengths = [(len(each["prompt"]), len(each["response"])) for each in batch]
        rectangle = len(batch) * sum(map(max, zip(*lengths, strict=True)))
        print(f"\n{name}: {sum(map(sum, lengths))} tokens, {sum(size for _, size in lengths)} of responses; padded {rectangle}")
        print(f"last update: {check_same(name, runs)}")
        rows = table(runs)
        print(f"{'engine':20}{'seconds':>9}{'MFU':>7}{'peak GB':>9}{'x faster':>10}{'by CPU s':>10}{'x memory':>10}")
        for row in rows:
            against = [f"{row[key]:.2f}" if row[key] else "-" for key in ("trl_seconds_ratio", "trl_cpu_ratio", "memory_of_trl")]
            print(f"{row['engine']:20}{row['seconds']:>9.2f}{row['mfu']:>7.0%}{row['peak_gb']:>9.2f}"
                  f"{against[0]:>10}{against[1]:>10}{against[2]:>10}")
        kept = runs["seventy"][0]["memory"]
        print("kept between updates: " + ", ".join(f"{kind} {size / 1e9:.2f} GB" for kind, size in kept.items()) + "\n", flush=True)
        results[name] = {"tokens": sum(map(sum, lengths)), "padded": rectangle, "table": rows, "runs": runs}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
