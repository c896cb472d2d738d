"""One whole GRPO step on a CPU beside TRL's trainer, SmolLM2-135M in fp32: prompts, generation, rewards, loss, update, new weights.

    python -m bench.step [--repeat 3] [--trl-python PATH]

4 prompts x 4 samples at temperature 1; a response ends at EOS or after 256 tokens, so lengths are the model's own and have a tail.
Prompts are short questions in the chat template, the same ids for both; the reward counts letters, and costs nothing. Samples are
drawn from the same distribution but not the same, so that steps differ in length: the table has seconds a step and response
tokens a second, and ratios of both.

  seventy  `actor.LLM` and `learner.Learner` in one process, taking turns as a run's two ranks do on-policy; new weights are copied
           into the engine's tensors. A run also pays for grading in a process of its own and for the wire: README has its ledger.
  trl      `GRPOTrainer.train()`, transformers' `generate`, gradient checkpointing off (as in bench/learner.py, the faster setting)

As in bench/learner.py (which proves that both updates are the same, and says how to install TRL) a measurement is a process of its
own with one step to warm up and STEPS timed ones, two threads each, rounds interleaved, ratios taken within a round.
"""

import argparse
import datetime
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

from bench.learner import CAP, MODEL, PROMPTS, ROOT, SAMPLES, THREADS, ask, clock, machine, new_learner, new_trainer

RESULTS = ROOT / "bench" / "results" / "step-cpu.json"
STEPS = 2  # timed ones of a process, after the one that warms up
QUESTIONS = ("Name {} kinds of fruit.", "What is {} plus 17?", "Write one sentence about the number {}.", "Count down from {}.",
             "How many legs have {} spiders?", "Why do people like the number {}?", "Say hello {} times.", "Is {} an even number?")


def questions() -> list[str]:
    """Prompts of all steps of a process, as the chat template renders them."""
    from transformers import AutoTokenizer
    draw, tokenizer = random.Random(0), AutoTokenizer.from_pretrained(MODEL)
    return [tokenizer.apply_chat_template([{"role": "user", "content": draw.choice(QUESTIONS).format(draw.randint(2, 30))}],
                                          tokenize=False, add_generation_prompt=True) for _ in range(PROMPTS * (STEPS + 1))]


def reward(completions: list[str], **_) -> list[float]:
    return [text.count("e") / (1 + len(text)) for text in completions]


# The engines, each in its own process: STEPS + 1 steps, of each its seconds and what came of it.


def seventy(prompts: list[str]) -> list[dict]:
    from actor import LLM, SamplingParams
    from checkpoint import load_layout
    from learner import Sample
    from ledger import Ledger
    from losses import group_advantages, token_weight
    learner, ledger, steps = new_learner(), Ledger(False), []
    llm = LLM(str(MODEL), max_model_len=512, max_num_seqs=PROMPTS * SAMPLES, block_size=8)

    class Masters:
        """The learner's weights, as a folder's are read."""
        def rows(self, name: str, first: int, last: int):
            return learner.shards()[name][first:last]

    for number in range(STEPS + 1):
        wall, cpu = clock()
        outputs = llm.generate(prompts[number * PROMPTS:(number + 1) * PROMPTS], SamplingParams(n=SAMPLES, max_tokens=CAP))
        generated, samples = time.perf_counter(), []
        tokens = sum(len(each.token_ids) for output in outputs for each in output.samples)
        for output in outputs:
            advantages = group_advantages(reward([each.text for each in output.samples]), use_std=True)
            samples += [Sample(output.prompt_token_ids + each.token_ids, len(output.prompt_token_ids), each.logprobs, advantage,
                               token_weight("sequence", len(each.token_ids), tokens, PROMPTS * SAMPLES, CAP))
                        for each, advantage in zip(output.samples, advantages, strict=True)]
        learner.credit(samples)
        sums = learner.train_step([samples], number, ledger)
        updated = time.perf_counter()
        load_layout(Masters(), llm.engine.runner.layout, llm.engine.weights())
        llm.engine.publish(number + 1)
        after = clock()
        steps.append({"seconds": after[0] - wall, "cpu_seconds": after[1] - cpu, "generate_s": generated - wall,
                      "update_s": updated - generated, "weights_s": after[0] - updated, "grad_norm": sums["grad_norm"],
                      "lengths": [sample.response for sample in samples]})
    return steps


def trl(prompts: list[str]) -> list[dict]:
    generations: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer, steps = new_trainer(folder, "none", STEPS + 1, reward, prompts)
        generate, score = trainer._generate_single_turn, trainer._generate_and_score_completions

        def timed(*arguments):
            start = time.perf_counter()
            result = generate(*arguments)
            generations.append({"generate_s": time.perf_counter() - start, "lengths": [len(ids) for ids in result[0]]})
            return result

        def scored(inputs):
            start = time.perf_counter()
            result = score(inputs)
            generations[-1]["score_s"] = time.perf_counter() - start - generations[-1]["generate_s"]
            return result

        trainer._generate_single_turn, trainer._generate_and_score_completions = timed, scored
        trainer.train()
    for step, generation in zip(steps, generations, strict=True):
        step |= generation | {"update_s": step["seconds"] - generation["generate_s"] - generation["score_s"]}
    return steps


ENGINES = {"seventy": seventy, "trl": trl}


def serve(name: str) -> None:
    """The child: prompts on standard input, the answer on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    torch.set_num_threads(THREADS)
    steps = ENGINES[name](json.load(sys.stdin))
    json.dump({"steps": steps, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
               "torch": torch.__version__}, answers)
    answers.close()


# The parent.


def mean(run: dict, key: str) -> float:
    return statistics.mean(step[key] for step in run["steps"][1:])


def rate(run: dict, seconds: str) -> float:
    """Response tokens by these seconds."""
    return sum(sum(step["lengths"]) for step in run["steps"][1:]) / sum(step[seconds] for step in run["steps"][1:])


def table(runs: dict[str, list[dict]]) -> list[dict]:
    """Medians over the rounds; ratios to TRL within a round, above 1 where the engine is better."""
    def ratio(name: str, value: Callable[[dict], float]) -> float:
        return statistics.median(value(mine) / value(theirs) for mine, theirs in zip(runs[name], runs["trl"], strict=True))

    seconds = ("seconds", "generate_s", "update_s")
    return [{"engine": name, **{key: statistics.median(mean(run, key) for run in each) for key in seconds},
             "tokens_per_s": statistics.median(rate(run, "seconds") for run in each),
             "peak_gb": statistics.median(run["peak_bytes"] for run in each) / 1e9,
             "steps_ratio": ratio(name, lambda run: 1 / mean(run, "seconds")),
             "tokens_ratio": ratio(name, lambda run: rate(run, "seconds")),
             "tokens_cpu_ratio": ratio(name, lambda run: rate(run, "cpu_seconds")),
             "memory_of_trl": ratio(name, lambda run: run["peak_bytes"])} for name, each in runs.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--trl-python", default=sys.executable, help="of an environment with TRL, see bench/learner.py")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)
    prompts, runs = questions(), {name: [] for name in ENGINES}
    for number in range(options.repeat):
        for name, each in runs.items():
            run = ask("bench.step", name, prompts, options.trl_python if name == "trl" else sys.executable)
            each.append(run | {"load": os.getloadavg()[0]})
            lengths = sorted(size for step in run["steps"][1:] for size in step["lengths"])
            print(f"round {number + 1}: {name:8} {mean(run, 'seconds'):6.1f} s a step ({mean(run, 'generate_s'):.1f} generating, "
                  f"{mean(run, 'update_s'):.1f} updating, {mean(run, 'cpu_seconds'):.1f} CPU s), responses of {lengths[0]} to "
                  f"{lengths[-1]} tokens, median {statistics.median(lengths):.0f}, load {each[-1]['load']:.1f}", flush=True)
    rows = table(runs)
    print(f"\n{'engine':10}{'s a step':>9}{'generate':>10}{'update':>8}{'tok/s':>8}{'peak GB':>9}"
          f"{'x steps/s':>11}{'x tok/s':>9}{'x tok/CPU s':>13}{'x memory':>10}")
    for row in rows:
        print(f"{row['engine']:10}{row['seconds']:>9.1f}{row['generate_s']:>10.1f}{row['update_s']:>8.1f}{row['tokens_per_s']:>8.1f}"
              f"{row['peak_gb']:>9.2f}{row['steps_ratio']:>11.2f}{row['tokens_ratio']:>9.2f}{row['tokens_cpu_ratio']:>13.2f}"
              f"{row['memory_of_trl']:>10.2f}")
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"date": datetime.datetime.now().isoformat(timespec="seconds"), "hardware": machine(),
                                   "rounds": options.repeat, "table": rows, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
