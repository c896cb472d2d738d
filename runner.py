"""One step of the engine on its device: the step's tensors, attention over pages, CUDA graphs, and sampling.

The scheduler says which tokens of which requests; `StepBuffers` writes that into preallocated host arrays and copies them to the
device at once; `Runner` computes the logits and samples. Nothing here is a decision, and everything that is not a kernel runs on a
CPU too: bucket choice, padding, reset.

On a GPU a decode step of a 70B on 8 H200 takes some 15 ms and launches 1,300 kernels, 5 us each if the host does it. Therefore:
- decode steps are CUDA graphs, one for each bucket of batch sizes up to the largest inclusive; rows behind the batch are padding
  that writes no key (slot -1), reads none (context 0) and is never sampled;
- weights, tables, lengths keep their addresses: a publication overwrites the weights under the live graphs;
- a step waits for the device once, for one small copy of [2, R] tokens and logprobs, and prepares the next step before it waits.

The one uniform number a token needs is a counter-based function of (seed, group, sample, position), so a sample does not depend on
its batch mates, its slot, preemption, or how many actors there are.
"""

import contextlib
import ctypes
import functools
import importlib.util
import math
import mmap
from dataclasses import dataclass
from itertools import chain

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from config import Config, ConfigError
from kernels.attention import PagedAttention
from kernels.kv_write import write_kv
from kernels.paged_attention import Pages, paged_attention
from kernels.sampling import Knobs, sample
from model import Transformer, parameter_shapes, rope_tables
from parallel import EngineLinear, Lane, by_rows, for_engine, lane_layout, packed_backend, refresh
from scheduler import Request
from shape import Shape
from transfer import Layout, same_layout

SHORT = 16  # queries of a request up to which each row walks the pages by itself; a longer chunk is gathered once for SDPA


def uniforms(seeds: int | np.ndarray, keys: list[tuple[int, int, int]] | np.ndarray) -> np.ndarray:
    """One number in [0, 1) for each (group, sample, position), float64 with 48 random bits.

    splitmix64's finaliser over the chained key (Steele, Lea, Flood 2014, doi 10.1145/2660193.2660195). 48 bits, so that
    u x total < total after rounding, and an inverse-CDF search never runs past the last token with a probability.
    """
    columns = np.array(keys, np.int64).reshape(-1, 3).T.astype(np.uint64)
    state = np.zeros(columns.shape[1], np.uint64)
    with np.errstate(over="ignore"):  # 64-bit wrap-around is meant
        for column in (np.asarray(seeds, np.uint64), *columns):  # an unmixed seed would only permute the groups
            state = (state ^ column) + np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(16)).astype(np.float64) * 2.0**-48


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, 8, then steps of 16, and the maximum itself."""
    return sorted({size for size in (1, 2, 4, 8, *range(16, max_num_seqs, 16)) if size < max_num_seqs} | {max_num_seqs})


def working_bytes(shape: Shape, config: Config) -> int:
    """Memory needed beside weights and cache: the widest activations of one layer, the logits thrice in fp32, with fp8 the
    quantised copies, made after the pool, with the temporaries of the largest, and what publications keep to receive into."""
    tokens, rows = config.actor.max_num_batched_tokens, config.actor.max_num_seqs
    itemsize = getattr(torch, config.model.dtype).itemsize
    widest = 3 * shape.hidden + max(3 * shape.ffn, (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    fp8 = 0
    if config.actor.quantization == "fp8":
        fp8 = (shape.matmul_parameters - shape.vocab * shape.hidden + 3 * 4 * 2 * shape.ffn * shape.hidden) // config.actor.tp
    received = int(2e6 * config.publish.bucket_mb)
    if config.publish.mode == "staged":
        received = sum(map(math.prod, parameter_shapes(shape).values())) * itemsize // config.actor.tp
    return tokens * widest * itemsize + 3 * rows * shape.vocab * 4 + fp8 + received


def pool_blocks(config: Config, shape: Shape, device: torch.device) -> int:
    """KV blocks that the configured share of free memory holds, but no more than all slots full of longest sequences need."""
    settings = config.actor
    useful = settings.max_num_seqs * -(-config.max_model_len // settings.block_size)
    if settings.kv_blocks:
        return settings.kv_blocks
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    free = max(0, free - working_bytes(shape, config)) if device.type == "cuda" else free
    block_bytes = shape.kv_bytes_per_token(getattr(torch, config.model.dtype).itemsize) * settings.block_size
    return min(int(free * settings.kv_memory_fraction) * max(1, min(settings.tp, shape.kv_heads)) // block_bytes, useful)


def zeros_on_demand(size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system provides when they are first written: a pool of 6 GB costs nothing until it is used.

    A mapping of its own, which goes back when the tensor goes: calloc would clear, and so take, what the heap has had before.
    """
    pages = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(size)


def keep_freed_memory() -> None:
    """Ask glibc not to give large blocks back: the 50 MB of a step's logits would be faulted in anew, 6 % of a step of 256 rows."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:  # M_MMAP_MAX 0, M_TRIM_THRESHOLD 2 GB
        mallopt(-4, 0)
        mallopt(-1, (1 << 31) - 1)


def give_back_freed_memory() -> None:
    """All the same: without it a learner finds the holes of SmolLM2's released weights too small, and takes 0.9 GB beside them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


@dataclass(slots=True)
class Step:
    """A filled step: T tokens of N requests on the device, of which the rows of R are sampled from."""
    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    pages: Pages
    rows_R: Tensor
    knobs: Knobs
    uniforms_R: Tensor


class StepBuffers:
    """Host arrays that describe one step, in one piece of (pinned) memory, and the same on the device, at fixed addresses."""

    def __init__(self, config: Config, device: torch.device):
        settings = config.actor
        N, self.block_size, self.seed = settings.max_num_seqs, settings.block_size, config.seed
        T, B = max(settings.max_num_batched_tokens, N), -(-config.max_model_len // self.block_size)
        self.longest, self.device = B * self.block_size, device
        sizes = {"ids": (np.int64, T), "positions": (np.int64, T), "slots": (np.int64, T), "rows": (np.int64, N),
                 "uniforms": (np.float64, N), "tables": (np.int32, N * B), "starts": (np.int32, N + 1), "contexts": (np.int32, N),
                 "temperature": (np.float32, N), "top_k": (np.int32, N), "top_p": (np.float32, N), "min_p": (np.float32, N)}
        offsets = np.cumsum([0, *(-(-np.dtype(kind).itemsize * count // 16) * 16 for kind, count in sizes.values())])
        on_gpu = device.type == "cuda"
        self.pinned = torch.zeros(int(offsets[-1]), dtype=torch.uint8, pin_memory=on_gpu)
        self.copied = torch.zeros_like(self.pinned, device=device) if on_gpu else self.pinned  # on a CPU the same memory
        self.host: dict[str, np.ndarray] = {}
        self.there: dict[str, Tensor] = {}
        for (name, (kind, count)), start in zip(sizes.items(), offsets, strict=False):
            part = slice(int(start), int(start) + np.dtype(kind).itemsize * count)
            self.host[name] = self.pinned[part].numpy().view(kind)
            self.there[name] = self.copied[part].view(getattr(torch, np.dtype(kind).name))
        for both in (self.host, self.there):
            both["tables"] = both["tables"].reshape(N, B)
        self.taken: torch.cuda.Event | None = None  # when the device has its copy, and the host may write again
        self.batch: list[Request] = []  # whose next decode step the arrays hold, but for what it samples and the blocks it takes
        self.keys = np.zeros((0, 4), np.int64)  # of each sampled row: seed, group, sample, tokens generated
        self.flags = (False, False)

    def fill(self, batch: list[Request], padded: int = 0) -> Step:
        """Describe `batch`, requests with one token first; up to `padded` rows more, for a graph, that do nothing."""
        self._settle()
        host, N, size = self.host, len(batch), self.block_size
        computed_N = np.array([request.num_computed for request in batch], np.int64)
        counts_N = np.array([request.num_scheduled for request in batch], np.int64)
        T = int(counts_N.sum())
        if not (batch == self.batch and T == N and np.array_equal(computed_N, host["positions"][:N])):
            self._describe(batch, computed_N, counts_N)
        else:  # the step that `advance` foresaw
            host["ids"][:N] = [request.tokens[-1] for request in batch]
            for row in np.flatnonzero(computed_N % size == 0):
                host["tables"][row, computed_N[row] // size] = batch[row].blocks[-1]
        owners_T = np.repeat(np.arange(N), counts_N)
        positions_T = host["positions"][:T]
        host["slots"][:T] = host["tables"][owners_T, positions_T // size].astype(np.int64) * size + positions_T % size
        rows = max(N, padded)
        if rows > N:
            self._pad(N, rows)
        if self.copied is not self.pinned:
            self.copied.copy_(self.pinned, non_blocking=True)
            self.taken = torch.cuda.Event()
            self.taken.record()
        self.batch = []
        decodes = int((counts_N == 1).sum())
        return self._step(rows + T - N, rows, len(self.keys), (int(counts_N.max(initial=1)), max(decodes, rows if T == N else 0)))

    def advance(self, batch: list[Request]) -> None:
        """Foresee the decode step after this one, if all of `batch` decodes and goes on; `fill` checks whether it came so."""
        N, host = len(batch), self.host
        if len(self.keys) != N or any(request.num_scheduled != 1 for request in batch):
            return
        self._settle()
        host["positions"][:N] += 1
        host["contexts"][:N] += 1
        self.keys[:, 3] += 1
        host["uniforms"][:N] = uniforms(self.keys[:, 0], self.keys[:, 1:])
        self.batch = batch

    def _settle(self) -> None:
        """Wait until the last copy to the device has left the host arrays; chunks without logits do not wait for the device."""
        if self.taken is not None:
            self.taken.synchronize()

    def _describe(self, batch: list[Request], computed_N: np.ndarray, counts_N: np.ndarray) -> None:
        """All arrays anew."""
        host, N = self.host, len(batch)
        host["starts"][0] = 0
        starts_N1 = host["starts"][:N + 1]
        np.cumsum(counts_N, out=starts_N1[1:])
        T = int(starts_N1[N])
        within_T = np.arange(T) - np.repeat(starts_N1[:N], counts_N)
        host["positions"][:T] = np.repeat(computed_N, counts_N) + within_T
        host["contexts"][:N] = computed_N + counts_N
        host["ids"][:T] = np.fromiter(chain.from_iterable(
            request.tokens[request.num_computed:request.num_computed + request.num_scheduled] for request in batch), np.int64, T)
        for row, request in enumerate(batch):
            host["tables"][row, :len(request.blocks)] = request.blocks
        drawn = [row for row, request in enumerate(batch) if request.catches_up]
        R, requests = len(drawn), [batch[row] for row in drawn]
        host["rows"][:R] = starts_N1[1:][drawn] - 1
        for name in ("temperature", "top_k", "top_p", "min_p"):
            host[name][:R] = [getattr(request, name) for request in requests]
        self.keys = np.array([(self.seed, request.group, request.sample, request.num_generated) if request.seed is None else
                              (request.seed, 0, request.sample, request.num_generated) for request in requests],
                             np.int64).reshape(-1, 4)
        host["uniforms"][:R] = uniforms(self.keys[:, 0], self.keys[:, 1:])
        draws = host["temperature"][:R] > 0
        cut = (host["top_k"][:R] > 0) | (host["top_p"][:R] < 1) | (host["min_p"][:R] > 0)
        self.flags = bool((draws & cut).any()), bool(draws.any())

    def _pad(self, first: int, last: int) -> None:
        """Rows of no request: a decode that writes no key and reads none, whatever stood there before."""
        host = self.host
        for name in ("ids", "positions", "contexts"):
            host[name][first:last] = 0
        host["slots"][first:last] = -1
        host["starts"][first + 1:last + 1] = np.arange(first + 1, last + 1)

    def _step(self, T: int, N: int, R: int, queries: tuple[int, int]) -> Step:
        at = self.there
        pages = Pages(at["tables"][:N], at["starts"][:N + 1], at["contexts"][:N], self.block_size, *queries, self.longest)
        knobs = Knobs(*(at[name][:R] for name in ("temperature", "top_k", "top_p", "min_p")), *self.flags)
        return Step(at["ids"][:T], at["positions"][:T], at["slots"][:T], pages, at["rows"][:R], knobs, at["uniforms"][:R])


class Attend:
    """What the model calls for attention: writes the step's keys and values into the cache, then attends over the pages."""

    def __init__(self, cache: Tensor, slots_T: Tensor, compute):
        self.cache, self.slots_T, self.compute = cache, slots_T, compute

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, window: int) -> Tensor:
        keys, values = self.cache[layer]
        write_kv(keys, values, k_TKD, v_TKD, self.slots_T)
        return self.compute(q_THD, keys, values, window)


class AttendByRows:
    """The same on a CPU, rotation included: short queries row by row over their pages (numba), long chunks gathered for SDPA."""

    def __init__(self, cache: Tensor, step: tuple[Tensor, Tensor, Tensor], pages: tuple[np.ndarray, np.ndarray, np.ndarray],
                 block_size: int):
        """`step` = (slots_T, cos_T1D, sin_T1D), `pages` = (tables_NB, starts_N1, contexts_N)."""
        from kernels import row_attention  # imports numba, which only this path needs
        tables_NB, starts_N1, contexts_N = pages
        self.attend, self.describe, self.cache = row_attention.attend_rows, row_attention.layout, cache
        self.step = step[0].numpy(), *(table[:, 0].numpy() for table in step[1:])
        self.out: Tensor | None = None  # of every layer in turn
        counts_N = np.diff(starts_N1)
        short = np.flatnonzero(counts_N <= SHORT)
        short = short[np.argsort(tables_NB[short, 0], kind="stable")]  # samples of a prompt become neighbours
        owners_S = np.repeat(short, counts_N[short])
        within_S = np.arange(len(owners_S)) - np.repeat(np.cumsum(counts_N[short]), counts_N[short])  # -S ... -1 of each request
        positions_S = contexts_N[owners_S] + within_S
        work_S, threads = np.cumsum(positions_S + 1), torch.get_num_threads()
        parts_P1 = np.searchsorted(work_S, np.arange(threads + 1) * work_S[-1:].sum() // threads, "right")  # equal work for each
        self.rows = starts_N1[1:][owners_S] + within_S, positions_S, block_size
        ours = tables_NB, owners_S, positions_S, parts_P1, block_size
        self.visits = functools.cache(functools.partial(row_attention.visits, *ours))
        self.long, long = None, np.flatnonzero(counts_N > SHORT)
        if len(long):
            chunks = tables_NB[long], np.concatenate([[0], np.cumsum(counts_N[long])]), contexts_N[long]
            self.long = PagedAttention(chunks, block_size, False, torch.device("cpu"))
            self.long_rows = torch.from_numpy(np.concatenate([np.arange(starts_N1[n], starts_N1[n + 1]) for n in long]))

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, window: int) -> Tensor:
        cache_2RKD = self.cache[layer]
        if self.out is None:  # the same shapes and strides in every layer
            self.out, self.layout = torch.zeros(q_THD.shape), self.describe((q_THD, k_TKD, v_TKD), cache_2RKD.shape[1])
        self.attend((q_THD, k_TKD, v_TKD, cache_2RKD, self.out), self.layout, self.step, self.rows, self.visits(window), window)
        if self.long is not None:
            self.out[self.long_rows] = self.long(q_THD[self.long_rows], *cache_2RKD, window)
        return self.out


class Runner:
    """The engine's model on this rank's device, its KV cache, and the computing of one step."""

    def __init__(self, config: Config, shape: Shape, vocab: int, device: torch.device, lane: Lane):
        self.config, self.shape, self.device, self.lane = config, shape, device, lane
        dtype = getattr(torch, config.model.dtype)
        with torch.device("meta"):
            model = Transformer(shape, vocab)
        self.layout: Layout = same_layout(parameter_shapes(shape))
        self.by_rows = (not config.exact and device.type == "cpu" and dtype == torch.float32 and shape.head_dim % 16 == 0
                        and importlib.util.find_spec("numba") is not None)
        if not config.exact:
            backend = "fp8" if config.actor.quantization == "fp8" else packed_backend(dtype) if device.type == "cpu" else "plain"
            with torch.device("meta"):
                for_engine(model, lane, backend)
            if self.by_rows:
                by_rows(model)
                keep_freed_memory()
            self.layout = lane_layout(shape, lane.rank, lane.size)
        self.model = model.to(dtype).to_empty(device=device).requires_grad_(False)
        self.model.tie()
        self.weight_bytes = self._bytes_read()
        self._size_pool()
        self.cache = None if config.placement == "colocated" else self._new_cache()
        self.buffers = StepBuffers(config, device)
        self.buckets = batch_buckets(config.actor.max_num_seqs) if device.type == "cuda" and config.actor.cuda_graphs else []
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.released: dict[torch.nn.Parameter, torch.Size] = {}
        if device.type == "cuda":
            self.logits_RV = torch.empty(config.actor.max_num_seqs, shape.vocab, device=device)  # written by every graph
            self.drawn = torch.empty(2 * config.actor.max_num_seqs, pin_memory=True)

    def _size_pool(self) -> None:
        """The share of free memory for keys and values. Raises ConfigError."""
        self.blocks = pool_blocks(self.config, self.shape, self.device)
        check_pool(self.blocks * self.config.actor.block_size, self.config)

    def _new_cache(self) -> Tensor:
        size = (self.shape.layers, 2, self.blocks * self.config.actor.block_size, max(1, self.shape.kv_heads // self.lane.size),
                self.shape.head_dim)
        dtype = getattr(torch, self.config.model.dtype)
        return torch.zeros(size, dtype=dtype, device=self.device) if self.device.type == "cuda" else zeros_on_demand(size, dtype)

    def release(self) -> None:
        """Give back the memory of weights, of what is derived from them, and of the pool, whose content is lost."""
        self.cache = None
        for parameter in self.model.parameters():
            self.released[parameter] = parameter.shape
            parameter.data = parameter.new_empty(0)
        for module in self.model.modules():
            if isinstance(module, EngineLinear):
                module.derived = ()
        if self.device.type == "cpu":
            give_back_freed_memory()

    def restore(self) -> None:
        """Take that memory again, with nothing in it. Elsewhere than before, which CUDA graphs could not follow."""
        for parameter, size in self.released.items():
            parameter.data = parameter.new_empty(size)
        self.cache, self.released = self._new_cache() if self.cache is None else self.cache, {}

    def weights(self) -> dict[str, Tensor]:
        """The live tensors by name, a tied head once; where parameters land in them is `layout`."""
        return {name: parameter.data for name, parameter in self.model.named_parameters()}

    def _bytes_read(self) -> int:
        """Bytes of weights that a decode step reads: of a separate embedding only a few rows, of fp8 linears the copies."""
        total = sum(weight.nbytes for weight in self.weights().values())
        if not self.shape.tied:
            total -= self.model.model.embed_tokens.weight.nbytes
        return total - sum(module.weight.nbytes - module.weight.numel() for module in self.model.modules()
                           if isinstance(module, EngineLinear) and module.backend == "fp8")

    def connect(self, group: dist.ProcessGroup | None) -> None:
        """Join the other lanes, agree with them on the smallest pool, and capture the decode graphs.

        Colocated, the learner has been built since, and the pool shares what is free beside it.
        """
        self.lane.group = group
        if self.config.placement == "colocated":
            torch.cuda.empty_cache()  # what loading has left; without a GPU nothing
            self._size_pool()
            self.cache = self._new_cache()
        if self.lane.size > 1:
            smallest = torch.tensor(self.blocks)
            dist.all_reduce(smallest, dist.ReduceOp.MIN, group=group)
            self.blocks = int(smallest)
        if self.buckets:
            self.refresh()
            self._capture()

    def refresh(self) -> None:
        """The live weights were overwritten: derive packed and quantised copies anew."""
        refresh(self.model)

    @torch.inference_mode()
    def compute(self, batch: list[Request]) -> list[tuple[int, float]]:
        """(token, logprob) of every request of `batch` that catches up, in order.

        Raises FloatingPointError if a row of logits is not finite.
        """
        decoding = all(request.num_scheduled == 1 for request in batch)
        bucket = min((size for size in self.graphs if size >= len(batch)), default=0) if decoding else 0
        step = self.buffers.fill(batch, bucket)
        self._copy_blocks(batch)
        if bucket and len(step.rows_R) == len(batch):
            self.graphs[bucket].replay()
            logits_RV = self.logits_RV[:len(batch)]
        elif len(step.rows_R):
            logits_RV = self.model.next_logits(step.ids_T, step.positions_T, self._attend(step), step.rows_R)
        else:
            self.model.model(step.ids_T, step.positions_T, self._attend(step))  # chunks only: no logits, no random number
            return []
        tokens_R, logprobs_R = self._sample(logits_RV, step)
        if self.device.type == "cuda":
            drawn_2R = self.drawn[:2 * len(tokens_R)].view(2, -1)  # in one piece: a strided copy would wait for the device
            drawn_2R.copy_(torch.stack([tokens_R.float(), logprobs_R]), non_blocking=True)  # ids are exact in fp32 below 2^24
            done = torch.cuda.Event()
            done.record()
            self.buffers.advance(batch)
            done.synchronize()
            tokens, logprobs = drawn_2R[0].int().tolist(), drawn_2R[1].tolist()
        else:
            self.buffers.advance(batch)
            tokens, logprobs = tokens_R.tolist(), logprobs_R.tolist()
        if not np.isfinite(logprobs).all():
            raise FloatingPointError("the logits are not finite: the published weights hold NaN or infinities")
        return list(zip(tokens, logprobs, strict=True))

    def _copy_blocks(self, batch: list[Request]) -> None:
        """Prompts' partial blocks for those who start with a copy; nobody's source is written to in this step before it is read."""
        size = self.config.actor.block_size
        pairs = [(request.source, request.blocks[request.num_computed // size]) for request in batch if request.source >= 0]
        if pairs:
            sources, targets = torch.tensor(pairs, device=self.device).T
            blocks = self.cache.unflatten(2, (-1, size))
            blocks[:, :, targets] = blocks[:, :, sources]

    def _sample(self, logits_RV: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        if self.by_rows and not step.knobs.truncates:
            from kernels.rows import draw_rows
            return draw_rows(logits_RV, step.knobs.temperature_R, step.uniforms_R)
        return sample(logits_RV, step.knobs, step.uniforms_R)

    def _attend(self, step: Step) -> Attend | AttendByRows:
        pages = step.pages
        if self.device.type == "cuda":
            return Attend(self.cache, step.slots_T, lambda q, keys, values, window: paged_attention(q, keys, values, pages, window))
        plain = pages.tables_NB.numpy(), pages.query_starts_N1.numpy(), pages.contexts_N.numpy()
        if self.by_rows:
            rotary = rope_tables(self.shape, step.positions_T)
            return AttendByRows(self.cache, (step.slots_T, *rotary), plain, pages.block_size)
        return Attend(self.cache, step.slots_T, PagedAttention(plain, pages.block_size, self.config.exact, self.device))

    @torch.inference_mode()
    def _capture(self) -> None:
        """One graph a bucket, the largest first so that the others fit into its memory. All rows are padding meanwhile."""
        pool = None
        for size in reversed(self.buckets):
            step = self.buffers.fill([], size)
            rows_R = torch.arange(size, device=self.device)

            def decode(step=step, rows_R=rows_R, size=size) -> None:
                attend = self._attend(step)
                self.logits_RV[:size].copy_(self.model.next_logits(step.ids_T, step.positions_T, attend, rows_R))

            decode()  # kernels are compiled, libraries make their workspaces
            torch.cuda.synchronize()
            self.graphs[size] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[size], pool=pool):
                decode()
            pool = pool or self.graphs[size].pool()


def check_pool(capacity: int, config: Config) -> None:
    """Refuse a KV pool that one longest sequence does not fit into. Raises ConfigError."""
    if capacity < config.max_model_len:
        raise ConfigError(f"the KV pool holds {capacity} tokens, one longest sequence (actor.max_model_len, or "
                          f"data.max_prompt_tokens + rollout.max_new_tokens) needs {config.max_model_len}; "
                          "raise actor.kv_blocks or actor.kv_memory_fraction")
