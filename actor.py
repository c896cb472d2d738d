"""The rollout engine: paged KV cache, continuous batching, sampling. scheduler.py decides what, this file computes it.

One step gathers the scheduled tokens of all requests into one packed forward, prefill chunks and decodes together, writes their
keys and values, and samples a token for every request that has caught up. Decode is memory-bound: a step reads all weights once
(141 GB for a 70B in bf16, 3.7 ms on 8 H200) whether it serves one request or 200, which is why everything here is about keeping
the batch full.

Sampling is one log_softmax for the token and its logprob, the tempered and untruncated one that the learner reproduces. The one
uniform number a token needs is a counter-based function of (seed, group, sample, position), so a sample does not depend on its
batch mates, its slot, preemption, or how many actors there are.
"""

import math
import time
from collections import Counter

import numpy as np
import psutil
import torch
from torch import Tensor

from config import Config, ConfigError
from kernels.attention import Bucket, PagedAttention
from ledger import Ledger
from model import Transformer
from scheduler import Request, Scheduler
from shape import Shape


def uniforms(seed: int, keys: list[tuple[int, int, int]]) -> np.ndarray:
    """One number in [0, 1) for each (group, sample, position), float64 with 48 random bits.

    splitmix64's finaliser over the chained key (Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195). 48 bits, so that
    u x total < total after rounding, and an inverse-CDF search never runs past the last token with a probability.
    """
    columns = np.array(keys, np.int64).reshape(-1, 3).T.astype(np.uint64)
    state = np.zeros(len(keys), np.uint64)
    with np.errstate(over="ignore"):  # 64-bit wrap-around is meant
        for column in (np.full(len(keys), seed, np.uint64), *columns):  # an unmixed seed would only permute the groups
            state = (state ^ column) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(16)).astype(np.float64) * 2.0**-48


def sample(logp_RV: Tensor, greedy_R: list[bool], uniforms_R: np.ndarray) -> list[tuple[int, float]]:
    """(token, logprob) of each row: argmax where greedy, else the first token whose cumulative probability exceeds u.

    Raises FloatingPointError if a row is not finite.
    """
    if all(greedy_R):
        tokens_R = logp_RV.argmax(-1)
    else:
        cumulative_RV = torch.cumsum(logp_RV.exp(), -1, dtype=torch.float64)
        targets_R1 = torch.from_numpy(uniforms_R).to(logp_RV.device)[:, None] * cumulative_RV[:, -1:]
        tokens_R = torch.searchsorted(cumulative_RV, targets_R1, right=True)[:, 0]
        if any(greedy_R):
            tokens_R = torch.where(torch.tensor(greedy_R, device=logp_RV.device), logp_RV.argmax(-1), tokens_R)
    tokens_R = tokens_R.clamp(max=logp_RV.shape[1] - 1)  # a row of NaN finds no token; it is reported below
    drawn = list(zip(tokens_R.tolist(), logp_RV.gather(1, tokens_R[:, None])[:, 0].tolist(), strict=True))
    if not all(math.isfinite(logprob) for _, logprob in drawn):
        raise FloatingPointError("the logits are not finite: the published weights hold NaN or infinities")
    return drawn


def pool_blocks(config: Config, shape: Shape, device: torch.device) -> int:
    """KV blocks that the configured share of free memory holds, but no more than all slots full of longest sequences need."""
    settings = config.actor
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    useful = settings.max_num_seqs * -(-longest // settings.block_size)
    if settings.kv_blocks:
        return settings.kv_blocks
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    block_bytes = shape.kv_bytes_per_token(getattr(torch, config.model.dtype).itemsize) * settings.block_size
    return min(int(free * settings.kv_memory_fraction) // block_bytes, useful)


class Engine:
    """Requests in, finished requests out. Weights arrive from outside, written into `weights()` in place."""

    def __init__(self, config: Config, shape: Shape, vocab: int, device: torch.device, ledger: Ledger):
        self.config, self.shape, self.device, self.ledger = config, shape, device, ledger
        dtype = getattr(torch, config.model.dtype)
        with torch.device("meta"):
            model = Transformer(shape, vocab)
        self.model = model.to(dtype).to_empty(device=device).requires_grad_(False)
        self.model.tie()
        settings = config.actor
        blocks = pool_blocks(config, shape, device)
        self.scheduler = Scheduler(blocks, settings.block_size, settings.max_num_seqs, settings.max_num_batched_tokens, version=-1)
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        if self.scheduler.capacity < longest:
            raise ConfigError(f"the KV pool holds {self.scheduler.capacity} tokens, one longest sequence (data.max_prompt_tokens + "
                              f"rollout.max_new_tokens) needs {longest}; raise actor.kv_blocks or actor.kv_memory_fraction")
        slots = blocks * settings.block_size
        self.cache = torch.zeros(shape.layers, 2, slots, shape.kv_heads, shape.head_dim, dtype=dtype, device=device)
        self.full_length_sequences = self.scheduler.capacity // longest
        self.weight_bytes = sum(weight.nbytes for weight in self.weights().values())  # read by a decode step
        if not shape.tied:  # of a separate embedding only a few rows are
            self.weight_bytes -= self.weights()["model.embed_tokens.weight"].nbytes
        self._counters: Counter[str] = Counter()

    def weights(self) -> dict[str, Tensor]:
        """The live tensors by parameter name, a tied head once."""
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def publish(self, version: int) -> None:
        """The weights have been overwritten: nothing cached is valid; running requests prefill again under `version`."""
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
                self.scheduler.commit(batch, self._compute(batch))
        if decoding and batch:
            read = self.weight_bytes + context * self.shape.kv_bytes_per_token(self.cache.element_size())
            self._counters.update(decode_seconds=time.perf_counter() - start, decode_bytes=read)
        finished, self.scheduler.finished = self.scheduler.finished, []
        for request in finished:
            self._counters.update(prefix_hits=request.prefix_hits, preemptions=request.preemptions)
        return finished

    def take_counters(self) -> dict[str, float]:
        """Since the last call: bytes that decode steps had to read, their seconds; of finished requests, the tokens found in the
        prefix table and the preemptions suffered."""
        counters, self._counters = dict(self._counters), Counter()
        return {name: counters.get(name, 0) for name in ("decode_bytes", "decode_seconds", "prefix_hits", "preemptions")}

    @torch.inference_mode()
    def _compute(self, batch: list[Request]) -> list[tuple[int, float]]:
        ids_T, positions_T, attend = self._pack(batch)
        ends = np.cumsum([request.num_scheduled for request in batch]) - 1
        drawn = [(request, int(end)) for request, end in zip(batch, ends, strict=True) if request.catches_up]
        if not drawn:
            self.model.model(ids_T, positions_T, attend)  # chunks only: no logits, no random number
            return []
        requests = [request for request, _ in drawn]
        temperatures = torch.tensor([[request.temperature or 1.0] for request in requests], device=self.device)
        rows_R = torch.tensor([end for _, end in drawn], device=self.device)
        logp_RV = self.model.next_log_probs(ids_T, positions_T, attend, rows_R, temperatures)
        numbers = uniforms(self.config.seed, [(request.group, request.sample, request.num_generated) for request in requests])
        return sample(logp_RV, [request.temperature == 0 for request in requests], numbers)

    def _pack(self, batch: list[Request]) -> tuple[Tensor, Tensor, PagedAttention]:
        """The batch's tokens end to end, their positions, and the attention over their block tables."""
        size = self.scheduler.pool.block_size
        ids, positions, buckets = [], [], {}
        for request in batch:
            start, stop = request.num_computed, request.num_computed + request.num_scheduled
            blocks = -(-stop // size)
            padded = 1 << (blocks - 1).bit_length()  # contexts of one power of two of blocks are attended together
            buckets.setdefault((request.num_scheduled, padded), []).append((len(ids), start, request.blocks[:blocks]))
            ids += request.tokens[start:stop]
            positions += range(start, stop)
        slots = np.empty(len(ids), np.int64)
        tensors = []
        for (queries, padded), members in buckets.items():
            tables = np.zeros((len(members), padded), np.int64)
            for row, (_, _, blocks) in enumerate(members):
                tables[row, :len(blocks)] = blocks
            context = (tables[:, :, None] * size + np.arange(size)).reshape(len(members), -1)
            rows = np.array([first for first, _, _ in members])[:, None] + np.arange(queries)
            places = np.array([start for _, start, _ in members])[:, None] + np.arange(queries)
            slots[rows] = np.take_along_axis(context, places, 1)
            tensors.append(Bucket(*(torch.from_numpy(array).to(self.device) for array in (rows, places, context))))
        attend = PagedAttention(self.cache, torch.from_numpy(slots).to(self.device), tensors, self.config.exact)
        return torch.tensor(ids, device=self.device), torch.tensor(positions, device=self.device), attend


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
