"""The rollout engine: requests in, finished requests out. scheduler.py decides what is computed, runner.py computes it.

    python actor.py --model models/smollm2-135m --prompt "The capital of France is" --max-tokens 32

One step gathers the scheduled tokens of all requests into one packed forward, prefill chunks and decodes together, writes their
keys and values, and samples a token for every request that has caught up. Decode is memory-bound: a step reads all weights once
(141 GB for a 70B in bf16, 3.7 ms on 8 H200) whether it serves one request or 200, which is why everything here is about keeping
the batch full.

`Engine` is what train.py drives: weights arrive from outside, and the scheduler's update mode says what running requests then do.
`LLM` is the same engine for use alone, with the interface of vLLM's: load a folder, `generate(prompts, params)`. What differs from
vLLM: a sample's random numbers depend on its seed, prompt and number only, never on the batch; the logprob of a token is the
tempered, untruncated one, whatever top-p and top-k cut away, because that is what a learner can reproduce.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in train.py; read when torch is imported
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from checkpoint import WeightFolder, check_names, load_layout
from config import Config, ConfigError
from data import Detokenizer, Encoder
from ledger import Ledger
from model import parameter_shapes
from parallel import Lane, check_lanes
from runner import Runner
from scheduler import Request, Scheduler
from settings import build
from shape import Shape, check_exact, read_shape


class Engine:
    """Requests in, finished requests out. Weights arrive from outside, written into `weights()` in place.

    With several lanes every rank of the engine runs one, and must make the same calls in the same order: scheduling and sampling
    are deterministic, so all of them then hold the same state.
    """

    def __init__(self, config: Config, shape: Shape, vocab: int, device: torch.device, ledger: Ledger, lane: Lane | None = None):
        self.config, self.shape, self.device, self.ledger = config, shape, device, ledger
        self.runner = Runner(config, shape, vocab, device, lane or Lane())
        self._make_scheduler()
        self._counters: Counter[str] = Counter()

    def _make_scheduler(self) -> None:
        settings = self.config.actor
        self.scheduler = Scheduler(self.runner.blocks, settings.block_size, settings.max_num_seqs, settings.max_num_batched_tokens,
                                   version=-1, update_mode=settings.update_mode)

    def connect(self, group: dist.ProcessGroup | None = None) -> None:
        """Before the first step, once process groups exist: join the other lanes, agree on the pool, capture CUDA graphs."""
        self.runner.connect(group)
        self._make_scheduler()

    def release(self) -> None:
        """Between a step's last token and the next `restore`: with actor.release_memory, give back weights and KV pool."""
        if self.config.actor.release_memory:
            self.runner.release()

    def restore(self) -> None:
        """Before weights are written and `publish` is called: have room for them and for keys and values again."""
        if self.config.actor.release_memory:
            self.runner.restore()

    @property
    def full_length_sequences(self) -> int:
        """Longest sequences that the KV pool holds at once."""
        return self.scheduler.capacity // self.config.max_model_len

    def weights(self) -> dict[str, Tensor]:
        """The live tensors by name, a tied head once; `runner.layout` says where the learner's parameters land in them."""
        return self.runner.weights()

    def publish(self, version: int) -> None:
        """The weights have been overwritten: every token from now on is sampled by `version`, and stamped with it."""
        self.runner.refresh()
        self.scheduler.publish(version)

    def step(self) -> list[Request]:
        """Compute one batch; returns the requests that finished. Returns at once if there is nothing to do."""
        start = time.perf_counter()
        with self.ledger.span("decode") as span:
            batch = self.scheduler.schedule()
            decoding = all(request.num_scheduled == 1 for request in batch)
            context = sum(request.num_computed + request.num_scheduled for request in batch)
            span[0] = "decode" if decoding else "prefill"
            if batch:
                self.scheduler.commit(batch, self.runner.compute(batch))
            for request in self.scheduler.finished if self.runner.lane.rank == 0 else ():
                if request.sample == 0:
                    self.ledger.flow("t", request.group)
        if decoding and batch:
            read = self.runner.weight_bytes + context * self.runner.cache[:, :, 0].nbytes
            self._counters.update(decode_seconds=time.perf_counter() - start, decode_bytes=read)
        finished, self.scheduler.finished = self.scheduler.finished, []
        for request in finished if self.runner.lane.rank == 0 else ():  # every lane sees the same
            self._counters.update(prefix_hits=request.prefix_hits, preemptions=request.preemptions)
        return finished

    def take_counters(self) -> dict[str, float]:
        """Since the last call: bytes that decode steps had to read, their seconds; of finished requests, the tokens found in the
        prefix table and the preemptions suffered."""
        counters, self._counters = dict(self._counters), Counter()
        return {name: counters.get(name, 0) for name in ("decode_bytes", "decode_seconds", "prefix_hits", "preemptions")}


@dataclass(frozen=True)
class SamplingParams:
    """How the samples of one prompt are drawn. Raises ValueError naming the field."""
    n: int = 1
    """Samples of the prompt; they share its full KV blocks."""
    temperature: float = 1.0
    """0 takes the most probable token."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this much probability, at least one; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the most probable one; 0 keeps all."""
    max_tokens: int | tuple[int, ...] = 16
    """Tokens of a response; a tuple gives each of the n samples its own limit."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, also across tokens. The text stops before it, the tokens include it."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    seed: int | None = None
    """Fixes the samples whatever else is generated; None: they depend on the LLM's seed and the number of prompts before."""

    def __post_init__(self):
        for field, kind in {"n": int, "temperature": float | int, "top_k": int, "top_p": float | int, "min_p": float | int,
                            "max_tokens": int | tuple | list, "stop": str | tuple | list, "seed": int | None}.items():
            if not isinstance(getattr(self, field), kind) or isinstance(getattr(self, field), bool):
                raise ValueError(f"SamplingParams.{field} = {getattr(self, field)!r}: must be {getattr(kind, '__name__', kind)}")
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        limits = self.max_tokens if isinstance(self.max_tokens, int) else tuple(self.max_tokens)
        object.__setattr__(self, "max_tokens", limits)
        each = (limits,) if isinstance(limits, int) else limits
        for field, valid, fix in (
                ("n", self.n >= 1, "at least 1"),
                ("temperature", self.temperature == 0 or 1e-3 <= self.temperature <= 1e3, "0 (greedy), or between 0.001 and 1000"),
                ("top_k", 0 <= self.top_k < 1 << 31, "between 0 (off) and 2^31 - 1"),
                ("top_p", 0 <= self.top_p <= 1, "between 0 and 1"), ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
                ("stop", all(isinstance(text, str) and text for text in self.stop), "strings that are not empty"),
                ("max_tokens", all(isinstance(limit, int) and limit >= 1 for limit in each) and each, "whole numbers from 1 on"),
                ("max_tokens", isinstance(limits, int) or len(limits) == self.n, f"one number, or one for each of n = {self.n}"),
                ("seed", self.seed is None or 0 <= self.seed < 1 << 63, "between 0 and 2^63 - 1")):
            if not valid:
                raise ValueError(f"SamplingParams.{field} = {getattr(self, field)!r}: must be {fix}")


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample."""
    prompt: int  # index into the prompts of the call
    sample: int
    token_ids: list[int]
    logprobs: list[float]  # of each token, at its temperature, untruncated
    text: str  # without special tokens, and without the stop string
    finish_reason: str  # stop, length, or why the prompt was rejected


@dataclass(frozen=True, slots=True)
class Output:
    """A prompt and its n samples."""
    prompt_token_ids: list[int]
    samples: list[Completion]


class LLM:
    """The engine alone: `LLM("models/smollm2-135m").generate(["2+2="], SamplingParams(n=4, max_tokens=8))`.

    Settings are those of the config's `actor` section, and `dtype`, `seed`, `exact`. Under torchrun with `tp` ranks all make the
    same calls and get the same outputs. Raises ConfigError for a folder or a setting that does not fit.
    """

    def __init__(self, model: str, *, dtype: str = "", seed: int = 0, exact: bool = False, max_model_len: int = 0, **actor):
        shape = read_shape(model)
        on_gpu = torch.cuda.is_available() and not exact
        longest = max_model_len or min(shape.max_position, 4096)
        if not isinstance(longest, int) or not 2 <= longest <= shape.max_position:
            raise ConfigError(f"`max_model_len` = {longest!r}: must be from 2 to config.json's max_position_embeddings = "
                              f"{shape.max_position}")
        self.config = build({
            "seed": seed, "exact": exact, "model": {"path": model, "dtype": dtype or ("bfloat16" if on_gpu else "float32")},
            "data": {"max_prompt_tokens": longest - 1}, "rollout": {"max_new_tokens": 1},
            "actor": {"kv_memory_fraction": 0.85 if on_gpu else 0.3} | actor})
        rank, lanes = int(os.environ.get("RANK", 0)), self.config.actor.tp
        if int(os.environ.get("WORLD_SIZE", 1)) != lanes:
            raise ConfigError(f"`tp` = {lanes} needs as many ranks: torchrun --nproc-per-node {lanes} ...")
        check_lanes(shape, lanes)
        check_exact(self.config, shape)
        device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        self.encoder, self.longest = Encoder(model), longest
        if self.encoder.vocab > shape.vocab:
            raise ConfigError(f"`model.path` = {model!r}: tokenizer of {self.encoder.vocab} ids, model of {shape.vocab} rows")
        self.engine = Engine(self.config, shape, self.encoder.vocab, device, Ledger(trace=False), Lane(rank, lanes))
        if lanes > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        folder = WeightFolder(model)
        check_names(folder, parameter_shapes(shape), shape.tied)
        load_layout(folder, self.engine.runner.layout, self.engine.weights())
        self.engine.connect(dist.group.WORLD if lanes > 1 else None)
        self.engine.publish(0)
        self._groups = 0  # prompts so far: each gets its own random numbers

    def generate(self, prompts: list[str | list[int]],
                 params: SamplingParams | list[SamplingParams] = SamplingParams()) -> list[Output]:
        """Outputs in the order of the prompts (texts, or token ids); `params` for all of them, or one for each."""
        encoded = self._encode(prompts)
        samples: list[list[Completion]] = [[] for _ in prompts]
        for completion in self.stream(encoded, params):
            samples[completion.prompt].append(completion)
        return [Output(ids, sorted(each, key=lambda completion: completion.sample))
                for ids, each in zip(encoded, samples, strict=True)]

    def stream(self, prompts: list[str | list[int]],
               params: SamplingParams | list[SamplingParams] = SamplingParams()) -> Iterator[Completion]:
        """Samples as they finish, in any order. A call that is closed before its end is aborted."""
        encoded = self._encode(prompts)
        each = params if isinstance(params, list) else [params] * len(encoded)
        if len(each) != len(encoded):
            raise ValueError(f"{len(encoded)} prompts, but {len(each)} sampling params: give one for all, or one for each")
        if self.engine.scheduler.unfinished:
            raise RuntimeError("another stream of this LLM is unfinished and would lose samples to this one: read it to its end, "
                               "or close it")
        first, self._groups = self._groups, self._groups + len(encoded)
        texts: dict[Request, Detokenizer | None] = {}
        for number, (ids, settings) in enumerate(zip(encoded, each, strict=True)):
            self.engine.scheduler.add([self._request((first + number, sample), ids, settings, texts)
                                       for sample in range(settings.n)])
        try:
            while self.engine.scheduler.unfinished or self.engine.scheduler.finished:
                for request in self.engine.step():
                    if first <= (prompt := request.group) < first + len(encoded):
                        ids, text = request.tokens[request.num_prompt:], texts[request]
                        yield Completion(prompt - first, request.sample, ids, request.logprobs,
                                         text.close() if text else self.encoder.decode(ids), request.finish_reason)
        finally:
            for group in range(first, first + len(encoded)):
                self.engine.scheduler.abort(group)

    def warm_up(self) -> None:
        """Compile and load what a first call would, without a trace in what later calls give."""
        groups = self._groups
        self.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True))
        self.reset_prefix_cache()
        self.engine.take_counters()
        self._groups = groups

    def reset_prefix_cache(self) -> None:
        """Forget the keys and values of earlier prompts; between calls."""
        self.engine.scheduler.pool.forget()

    def _encode(self, prompts: list[str | list[int]]) -> list[list[int]]:
        if isinstance(prompts, str):
            raise ValueError(f"prompts = {prompts!r}: give a list of prompts")
        encoded = [self.encoder.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        for number, ids in enumerate(encoded):
            if not 0 < len(ids) < self.longest or not all(0 <= token < self.encoder.vocab for token in ids):
                raise ValueError(f"prompt {number} has {len(ids)} tokens: it needs 1 to max_model_len - 1 = {self.longest - 1}, "
                                 f"with ids from 0 to {self.encoder.vocab - 1}")
        return encoded

    def _request(self, key: tuple[int, int], ids: list[int], params: SamplingParams,
                 texts: dict[Request, Detokenizer | None]) -> Request:
        text = Detokenizer(self.encoder.tokenizer, params.stop) if params.stop else None
        limit = params.max_tokens if isinstance(params.max_tokens, int) else params.max_tokens[key[1]]
        request = Request(
            *key, tokens=list(ids), max_new_tokens=min(limit, self.longest - len(ids)), temperature=params.temperature,
            stop_ids=frozenset() if params.ignore_eos else self.encoder.stop_ids, top_k=params.top_k, top_p=params.top_p,
            min_p=params.min_p, seed=params.seed, watch=text.push if text else None)
        texts[request] = text
        return request


def measure_copy_bandwidth(device: torch.device) -> float:
    """Bytes/s (read + written) of a device copy on this rank right now: the bound that the printed MBU is a per cent of."""
    source = torch.ones((1 << 30) if device.type == "cuda" else (64 << 20), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(4):
        start = time.perf_counter()
        target.copy_(source)
        target[0].item()  # waits for the device
        best = max(best, 2 * source.nbytes / (time.perf_counter() - start))
    return best


def main(argv: list[str]) -> int:
    """Answer prompts from the command line; 2 for a folder or a setting that does not fit."""
    parser = argparse.ArgumentParser(description="Generate with the rollout engine alone.")
    parser.add_argument("--model", required=True, help="Hugging Face folder: config.json, tokenizer, safetensors")
    parser.add_argument("--prompt", action="append", required=True, help="may be given several times")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message through the chat template")
    parser.add_argument("--n", type=int, default=1, help="samples a prompt")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--stop", action="append", default=[], help="a string that ends a response; may be given several times")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="any of the config's actor settings, such as tp=2")
    options = parser.parse_intermixed_args(argv)
    try:
        settings = {"model": options.model, "dtype": options.dtype, "seed": options.seed}
        settings |= {key: yaml.safe_load(value) for key, _, value in (setting.partition("=") for setting in options.settings)}
        params = SamplingParams(options.n, options.temperature, options.top_k, options.top_p, options.min_p, options.max_tokens,
                                tuple(options.stop), options.ignore_eos)
        llm = LLM(**settings)
        prompts = [llm.encoder.encode([{"role": "user", "content": prompt}] if options.chat else prompt)
                   for prompt in options.prompt]
        llm.warm_up()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
    except (ConfigError, ValueError, yaml.YAMLError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    seconds = time.perf_counter() - start
    if int(os.environ.get("RANK", 0)) == 0:
        report(llm, options.prompt, outputs, seconds)
    return 0


def report(llm: LLM, prompts: list[str], outputs: list[Output], seconds: float) -> None:
    """The answers, then tokens/s and the share of this machine's memory bandwidth that decode steps reached."""
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.samples:
            print(f"--- {prompt!r} [{completion.sample}] {completion.finish_reason}, {len(completion.token_ids)} tokens, "
                  f"logprob {sum(completion.logprobs):.2f}\n{completion.text}")
    tokens, counters = sum(len(each.token_ids) for output in outputs for each in output.samples), llm.engine.take_counters()
    line = f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s"
    if counters["decode_seconds"]:
        read, bound = counters["decode_bytes"] / counters["decode_seconds"], measure_copy_bandwidth(llm.engine.device)
        line += f"; decode steps read {read / 1e9:.1f} GB/s, {read / bound:.0%} of a copy's {bound / 1e9:.1f} (read and written)"
    print(line)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # as train.py does
