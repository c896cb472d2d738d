"""The kernels on one device: right against float64, and how fast. bench/gpu.py runs these checks, one after the other.

Every kernel is compared, on fresh random numbers and gradients too, with a textbook version in float64 that stands here and shares
no line with the kernel. The error is max |found - wanted| / max |wanted|; NaN fails. While one is checked, torch.empty hands out
NaN, the cache's unused slots are NaN and unused table entries name no page: what a kernel does not write, or may not read, is seen.

Times are medians over CUDA events with the L2 cache flushed before each call, at the shapes of Llama-3.1-8B. Bytes are those that
must be moved, each input read once and each output written once; FLOPs those of the formula.
"""

import contextlib
import dataclasses
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from kernels import fp8_linear, kv_write, logprob, packed_attention, paged_attention, rms_norm, rope, sampling, silu_mul
from model import rope_tables
from shape import Shape, shape_from_hf

VENDOR = {"copy": 4.8e12, "matmul": 989e12}  # H200, dense bf16
LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072,
         "vocab_size": 128256, "num_key_value_heads": 8, "num_attention_heads": 32, "rope_scaling": {
             "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8192}}
EIGHT = LLAMA | {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}  # Llama-3.1-8B
ONE = LLAMA | {"num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "tie_word_embeddings": True}  # Llama-3.2-1B
TOY = LLAMA | {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
               "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "rope_scaling": None}


@dataclasses.dataclass(slots=True)
class Machine:
    """Where the items run, what bounds them there, and where their rows go."""
    device: torch.device
    tiny: bool
    dtype: torch.dtype
    emit: Callable[[dict], None]
    bounds: dict[str, float] = dataclasses.field(default_factory=dict)  # copy in bytes/s, matmul in FLOP/s

    def shape(self, hf: dict) -> Shape:
        return shape_from_hf(TOY if self.tiny else hf)

    def random(self, *size: int, std: float = 1.0) -> Tensor:
        return torch.randn(size, device=self.device, dtype=torch.float32).mul_(std).to(self.dtype)

    def time(self, fn: Callable) -> float:
        """Median seconds of a call."""
        if self.device.type == "cuda":
            return triton.testing.do_bench(fn, warmup=25, rep=100, return_mode="median") / 1e3
        return statistics.median(self.clock(fn) for _ in range(3))

    def clock(self, fn: Callable) -> float:
        """Seconds of one call, once the device has caught up."""
        self.wait()
        start = time.perf_counter()
        fn()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def measure_bounds(self) -> None:
        source = torch.empty((16 << 20) if self.tiny else (1 << 30), dtype=torch.uint8, device=self.device).random_()
        target, square = torch.empty_like(source), self.random(*[256 if self.tiny else 8192] * 2)
        self.bounds = {"copy": 2 * source.nbytes / self.time(lambda: target.copy_(source)),
                       "matmul": 2 * len(square) ** 3 / self.time(lambda: square @ square)}

    def row(self, name: str, seconds: float | None = None, *, moved: float = 0, flops: float = 0, **more) -> None:
        """A line of the table: bytes moved or FLOPs over seconds against the bound, or whatever `more` says."""
        row = {"name": name, "ms": None if seconds is None else seconds * 1e3}
        if seconds and (moved or flops):
            kind, rate = ("matmul", flops / seconds) if flops else ("copy", moved / seconds)
            row |= {"rate": rate / (1e12 if flops else 1e9), "unit": "TFLOP/s" if flops else "GB/s",
                    "of_measured": rate / self.bounds[kind], "of_vendor": rate / VENDOR[kind]}
        self.emit(row | more)

    def compare(self, name: str, found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float, seconds: float, **cost):
        """A row with the largest error of several tensors, each relative to its own largest value; NaN fails."""
        errors = {key: error(found[key], wanted[key]) for key in wanted}
        self.row(name, seconds, errors=errors, error=max(errors.values()), tolerance=tolerance,
                 passed=max(errors.values()) <= tolerance, **cost)


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape, f"{tuple(found.shape)} instead of {tuple(wanted.shape)}"
    worst = ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-300)).item()
    return worst if math.isfinite(worst) else 1e30  # JSON has no infinity


@contextlib.contextmanager
def poisoned():
    """torch.empty fills with NaN (or the largest integer): what a kernel leaves unwritten fails the comparison."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some torch operation has no deterministic version
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


# Rows: does a row's result depend on how many rows are beside it? Exact mode on a GPU would rest on that.

def check_rows(machine: Machine) -> None:
    """The bits of a product's first row beside 0 to 2047 others, for the linears of an 8B, by library and reduction setting."""
    counts, matmul, on_gpu = (1, 8, 32, 256, 2048), torch.backends.cuda.matmul, machine.device.type == "cuda"
    E, ffn, V, kv = (64, 96, 128, 32) if machine.tiny else (4096, 14336, 128256, 1024)
    sizes = {"qkv": (E + 2 * kv, E), "o": (E, E), "gate_up": (2 * ffn, E), "down": (E, ffn), "head": (V, E)}
    settings = {"split-K off": (False, False), "fp32 sums": False, "default": True}  # (reduced precision, split-K)
    for library in ("cublaslt", "cublas") if on_gpu else ("cpu",):
        for setting, value in settings.items():
            try:
                if on_gpu:
                    torch.backends.cuda.preferred_blas_library(library)
                matmul.allow_bf16_reduced_precision_reduction = value
            except (RuntimeError, TypeError) as problem:  # a torch before 2.10 knows no split-K control
                machine.row(f"{library}, {setting}", note=f"refused: {problem}")
                continue
            alike = {}
            for name, (out, width) in sizes.items():
                x, weight = machine.random(counts[-1], width), machine.random(out, width, std=width**-0.5)
                members: dict[bytes, list[int]] = {}
                for count in counts:
                    bits = F.linear(x[:count], weight)[0].view(torch.uint8).cpu().numpy().tobytes()
                    members.setdefault(bits, []).append(count)
                alike[name] = " | ".join("=".join(map(str, each)) for each in members.values())
            broken = [f"{name} {text}" for name, text in alike.items() if "|" in text]
            machine.row(f"{library}, {setting}", rows_invariant=not broken, same_bits_at_rows=alike,
                        note="; ".join(broken) or "all invariant")
    matmul.allow_bf16_reduced_precision_reduction = True  # torch's default
    if on_gpu:
        torch.backends.cuda.preferred_blas_library("default")


# Kernels: one item each.

def differentiable(machine: Machine, name: str, kernel: Callable, textbook: Callable, inputs: dict[str, Tensor],
                   outputs: tuple[str, ...], costs: tuple[dict, dict], tolerances: tuple[float, float]) -> None:
    """Outputs and gradients against the textbook's, and the time of both passes. `costs` are bytes moved or FLOPs."""
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    with poisoned():
        found = kernel(*leaves)
        flow = [torch.randn_like(x) for x in found]
        gradients = torch.autograd.grad(found, leaves, flow, retain_graph=True)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = textbook(*exact)
    wanted_gradients = torch.autograd.grad(wanted, exact, [x.double() for x in flow])
    wanted = [x.detach() for x in wanted]
    del exact
    backward = machine.time(lambda: torch.autograd.grad(found, leaves, flow, retain_graph=True))
    with torch.no_grad():
        forward = machine.time(lambda: kernel(*leaves))
        for passing, names, mine, theirs, tolerance, seconds, cost in (
                ("", outputs, found, wanted, tolerances[0], forward, costs[0]),
                (", backward", inputs, gradients, wanted_gradients, tolerances[1], backward, costs[1])):
            machine.compare(name + passing, dict(zip(names, mine, strict=True)), dict(zip(names, theirs, strict=True)), tolerance,
                            seconds, **cost)


def check_rms_norm(machine: Machine) -> None:
    T, E, eps = (12, 64, 1e-5) if machine.tiny else (16384, 4096, 1e-5)

    def textbook(x, weight, *residual):
        s = x + residual[0] if residual else x
        y = s / (s.square().mean(-1, keepdim=True) + eps).sqrt() * weight
        return (y, s) if residual else (y,)

    size = T * E * machine.dtype.itemsize
    differentiable(machine, f"rms_norm [{T}, {E}] + residual", lambda x, weight, added: rms_norm.rms_norm(x, weight, eps, added),
                   textbook, {"x": machine.random(T, E), "weight": machine.random(E), "residual": machine.random(T, E)},
                   ("y", "sum"), ({"moved": 4 * size}, {"moved": 4 * size}), (1e-2, 1e-2))
    heads, D = (4, 16) if machine.tiny else (32, 128)
    fused = machine.random(T, (heads + 2) * D)
    differentiable(machine, f"rms_norm [{T}, {heads}, {D}] in a fused qkv", lambda x, weight: rms_norm.rms_norm(x, weight, eps)[:1],
                   textbook, {"x": fused[:, :heads * D].view(T, heads, D), "weight": machine.random(D)}, ("y",),
                   ({"moved": 2 * T * heads * D * fused.itemsize}, {"moved": 3 * T * heads * D * fused.itemsize}), (1e-2, 1e-2))


def check_rope(machine: Machine) -> None:
    T, heads, D = (12, 4, 16) if machine.tiny else (16384, 32, 128)
    cos, sin = rope_tables(dataclasses.replace(shape_from_hf(EIGHT), head_dim=D), torch.arange(T, device=machine.device) * 7)
    turn = torch.complex(cos[..., :D // 2].double(), sin[..., :D // 2].double())

    def textbook(x):
        y = torch.complex(x[..., :D // 2], x[..., D // 2:]) * turn
        return (torch.cat([y.real, y.imag], -1),)

    fused = machine.random(T, (heads + 2) * D)
    moved = 2 * T * heads * D * fused.itemsize
    differentiable(machine, f"rope [{T}, {heads}, {D}] in a fused qkv", lambda x: (rope.rope(x, cos, sin),), textbook,
                   {"x": fused[:, D:(heads + 1) * D].view(T, heads, D)}, ("y",), ({"moved": moved}, {"moved": moved}), (1e-2, 1e-2))


def check_silu_mul(machine: Machine) -> None:
    T, width = (12, 96) if machine.tiny else (8192, 14336)
    gate, up = machine.random(T, 2 * width).chunk(2, -1)
    size = T * width * gate.itemsize
    differentiable(machine, f"silu_mul [{T}, {width}] of a fused gate_up", lambda gate, up: (silu_mul.silu_mul(gate, up),),
                   lambda gate, up: (gate / (1 + (-gate).exp()) * up,), {"gate": gate, "up": up}, ("y",),
                   ({"moved": 3 * size}, {"moved": 5 * size}), (1e-2, 2e-2))


def check_kv_write(machine: Machine) -> None:
    T, K, D, R = (10, 2, 16, 64) if machine.tiny else (16384, 8, 128, 65536)
    k, v = machine.random(T + 2, K, D), machine.random(T + 2, 2 * K * D)[:, :K * D].view(T + 2, K, D)
    cache = machine.random(2, R, K, D)
    slots = torch.randperm(R, device=machine.device)[:T]
    slots[::9] = -1
    kept, wanted = slots >= 0, cache.clone()
    for side, new in zip(wanted, (k, v), strict=True):
        side[slots[kept]] = new[:T][kept]
    kv_write.write_kv(*cache, k, v, slots)
    seconds = machine.time(lambda: kv_write.write_kv(*cache, k, v, slots))
    machine.compare(f"kv_write [{T}, {K}, {D}]", {"cache": cache}, {"cache": wanted}, 0.0, seconds,
                    moved=4 * int(kept.sum()) * K * D * k.itemsize)


def make_pages(machine: Machine, contexts: list[int], queries: list[int], K: int, D: int, size: int) -> tuple:
    """Pages (requests with one query first), their cache, each request's slots. What may not be read is NaN, or no page at all."""
    needed = [-(-context // size) for context in contexts]
    order = torch.randperm(sum(needed) + 3).tolist()
    tables = torch.full((len(contexts), max(needed) + 2), 1 << 30, dtype=torch.int32)
    cache = torch.full((2, len(order) * size, K, D), torch.nan, dtype=machine.dtype, device=machine.device)
    slots_N = []
    for n, (context, blocks) in enumerate(zip(contexts, needed, strict=True)):
        mine = torch.tensor([order.pop() for _ in range(blocks)], dtype=torch.int32)
        tables[n, :blocks] = mine
        slots = (mine.long()[:, None] * size + torch.arange(size)).flatten()[:context].to(machine.device)
        cache[:, slots] = machine.random(2, context, K, D)
        slots_N.append(slots)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    there = (each.to(machine.device) for each in (tables, starts, torch.tensor(contexts, dtype=torch.int32)))
    return paged_attention.Pages(*there, size, max(queries), queries.count(1), tables.shape[1] * size), cache, slots_N


def attend_exactly(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """The last queries of one sequence over all its keys, in float64: [S, H, D], [J, K, D]."""
    (S, H, D), J = q.shape, len(k)
    scores = torch.einsum("skgd,jkd->kgsj", q.double().view(S, k.shape[1], -1, D), k.double()) / math.sqrt(D)
    i, j = torch.arange(J - S, J, device=q.device)[:, None], torch.arange(J, device=q.device)
    hidden = (j > i) | (j <= i - window) if window else j > i
    weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
    return torch.einsum("kgsj,jkd->skgd", weights, v.double()).reshape(S, H, D)


def forward_exactly(parameters: dict[str, Tensor], ids: list[int], shape: Shape) -> Tensor:
    """log-probabilities [S, V] of a whole sequence in float64: the Llama of the textbook, unfused, without a cache."""
    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * parameters[name]

    S, D = len(ids), shape.head_dim
    angles = torch.arange(S).double()[:, None] * shape.rope_theta ** (-torch.arange(0, D, 2).double() / D)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    x = parameters["model.embed_tokens.weight"][ids]
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        h = norm(x, at + "input_layernorm.weight")
        q, k, v = ((h @ parameters[f"{at}self_attn.{part}_proj.weight"].T).view(S, -1, D) for part in "qkv")
        q, k = (torch.complex(part[..., :D // 2], part[..., D // 2:]) * turn for part in (q, k))
        o = attend_exactly(*(torch.cat([part.real, part.imag], -1) for part in (q, k)), v, 0)
        x = x + o.flatten(1) @ parameters[at + "self_attn.o_proj.weight"].T
        h = norm(x, at + "post_attention_layernorm.weight")
        gate = h @ parameters[at + "mlp.gate_proj.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ parameters[at + "mlp.up_proj.weight"].T)) @ parameters[at + "mlp.down_proj.weight"].T
    return torch.log_softmax(norm(x, "model.norm.weight") @ parameters["lm_head.weight"].T, -1)


def check_paged_attention(machine: Machine) -> None:
    H, K, D = (4, 2, 16) if machine.tiny else (32, 8, 128)
    long, many = (40, 4) if machine.tiny else (4096, 64)
    chunk = long // 2
    cases = {  # name -> (contexts, queries, window)
        "decode, ragged": ([random.randint(1, long) for _ in range(many - 3)] + [1, 0, long], [1] * many, 0),
        "decode, batch 1": ([long], [1], 0),
        "decode, window": ([long, long // 3, 5], [1] * 3, long // 4),
        f"decode, {many} x {long}": ([long] * many, [1] * many, 0),
        "decodes and chunks": ([long, 17, 1, chunk, long, long // 3], [1, 1, 1, chunk, chunk - 3, 2], 0),
        "chunk, window": ([long, long // 2 + 1], [1, long // 2 - 2], long // 4),
        f"chunk of {chunk} at {long}": ([long], [chunk], 0)}
    for name, (contexts, queries, window) in cases.items():
        pages, cache, slots_N = make_pages(machine, contexts, queries, K, D, 16)
        T = sum(queries)
        padding = 2 * (max(queries) > 1)  # rows behind the last request
        q = machine.random(T + padding, H, D)
        with poisoned():
            found = paged_attention.paged_attention(q, *cache, pages, window)
        wanted, first, pairs = torch.zeros(q.shape, dtype=torch.float64, device=machine.device), 0, 0
        for slots, count in zip(slots_N, queries, strict=True):
            if len(slots):
                wanted[first:first + count] = attend_exactly(q[first:first + count], cache[0, slots], cache[1, slots], window)
            first += count
            pairs += count * len(slots) - count * (count - 1) // 2
        seconds = machine.time(lambda: paged_attention.paged_attention(q, *cache, pages, window))  # noqa: B023
        cost = {"moved": 2 * sum(contexts) * K * D * q.itemsize} if max(queries) == 1 else {"flops": 4 * pairs * H * D}
        machine.compare(f"paged_attention, {name}", {"o": found}, {"o": wanted}, 1e-2, seconds, **({} if window else cost))


def check_packed_attention(machine: Machine) -> None:
    H, K, D = (4, 2, 16) if machine.tiny else (32, 8, 128)
    cases = (([9, 1, 4, 17], 0), ([9, 1, 17], 5)) if machine.tiny else (([4096, 2048, 1, 130, 1000], 0), ([3000, 70], 512))
    for lengths, window in cases:
        starts = torch.tensor([0, *lengths]).cumsum(0).int().to(machine.device)
        T, pairs = sum(lengths) + 3, sum(length * (length + 1) // 2 for length in lengths)

        def textbook(q, k, v, lengths=lengths, window=window):
            parts, first = [], 0
            for length in lengths:
                parts.append(attend_exactly(*(x[first:first + length] for x in (q, k, v)), window))
                first += length
            return (torch.cat([*parts, torch.zeros_like(q[first:])]),)

        def kernel(q, k, v, starts=starts, lengths=lengths, window=window):
            on_gpu = packed_attention.packed_attention_triton  # flash-attn, where it is installed, is not ours to check
            return ((on_gpu if q.is_cuda else packed_attention.packed_attention)(q, k, v, starts, max(lengths), window),)

        v = machine.random(T, (H + 2 * K) * D)[:, -K * D:].view(T, K, D)  # as in the model: a slice of a fused qkv
        costs = ({}, {}) if window else ({"flops": 4 * pairs * H * D}, {"flops": 10 * pairs * H * D})
        differentiable(machine, f"packed_attention {lengths}" + f", window {window}" * bool(window), kernel, textbook,
                       {"q": machine.random(T, H, D), "k": machine.random(T, K, D), "v": v}, ("o",), costs, (1e-2, 2e-2))


def check_sampling(machine: Machine) -> None:
    """Whether u falls into the token's interval of the float64 distribution, by how much of the mass it misses it otherwise."""
    R, V = (10, 300) if machine.tiny else (256, 128256)
    plain = (1.0, 0, 1.0, 0.0)
    cases = {"temperature 1": [plain], "greedy": [(0.0, 0, 1.0, 0.0)], "truncated": [
        (0.8, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.3, 0, 1.0, 0.05), (0.7, 1000, 0.95, 0.01), (0.0, 5, 0.5, 0.0), plain]}
    for name, kinds in cases.items():
        logits, u = torch.randn(R, V, device=machine.device) * 3, torch.rand(R, device=machine.device, dtype=torch.float64)
        logits[:, -V // 50:] = -torch.inf
        settings = [kinds[row % len(kinds)] for row in range(R)]
        knobs = sampling.Knobs.of(settings, machine.device)
        with poisoned():
            tokens, logps = sampling.sample(logits, knobs, u)
        temperature = torch.tensor([row[0] or 1.0 for row in settings], dtype=torch.float64, device=machine.device)[:, None]
        logp = torch.log_softmax(logits.double() / temperature, -1)
        missed = [0.0]
        for row, (kind, top_k, top_p, min_p) in enumerate(settings):
            p, token = logp[row].exp(), int(tokens[row])
            if kind == 0 or not 0 <= token < V:
                missed.append(float(token != int(p.argmax())))
                continue
            ordered = p.sort(descending=True).values
            lowest = ordered[min(top_k, V) - 1] if top_k else ordered[-1]
            rest = ordered[ordered >= lowest]
            if top_p < 1:
                lowest = rest[int((rest.cumsum(0) < top_p * rest.sum()).sum())]
            lowest = torch.maximum(lowest, min_p * p.max())
            kept = torch.where(p >= lowest, p, 0.0)
            ends = kept.cumsum(0) / kept.sum()
            low = ends[token - 1].item() if token else 0.0
            missed += [max(0.0, low - u[row].item(), u[row].item() - ends[token].item()), float(p[token] < lowest * (1 - 1e-3))]
        seconds = machine.time(lambda: sampling.sample(logits, knobs, u))  # noqa: B023
        chosen = logp.gather(1, tokens[:, None].clamp(0, V - 1))[:, 0]
        machine.compare(f"sampling [{R}, {V}], {name}", {"logprob": logps, "missed": 1 + torch.tensor(missed)},
                        {"logprob": chosen, "missed": torch.ones(len(missed))}, 1e-4, seconds, moved=logits.nbytes)


def check_logprob(machine: Machine) -> None:
    R, E, V = (20, 64, 300) if machine.tiny else (4096, 4096, 128256)
    head = logprob.Head(temperature=0.7, vocab=V - V // 100, chunk=7 if machine.tiny else 1024)
    targets = torch.randint(head.vocab, (R,), device=machine.device)

    def textbook(hidden, weight):
        logp = torch.log_softmax((hidden @ weight.T)[:, :head.vocab] / head.temperature, -1)
        return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    differentiable(machine, f"logprob [{R}, {E}] x {V}", lambda hidden, weight: logprob.chosen_logprobs(
        hidden, weight, targets, head), textbook, {"hidden": machine.random(R, E), "weight": machine.random(V, E, std=2 * E**-0.5)},
        ("logprob", "entropy"), ({"flops": 2 * R * V * E}, {"flops": 6 * R * V * E}), (1e-3, 1e-2))


def check_fp8_linear(machine: Machine) -> None:
    for out, width in ((200, 300),) if machine.tiny else ((28672, 4096), (4096, 14336)):
        weight = machine.random(out, width, std=width**-0.5)
        weight[:, :130] *= 5  # blocks with scales of their own
        codes, scales = fp8_linear.quantise(weight)
        spread = scales.double().repeat_interleave(128, 0)[:out].repeat_interleave(128, 1)[:, :width]
        exact = codes.float().double() * spread
        allowed = weight.double().abs() / 16 + spread / 1024  # half of the last of 3 mantissa bits, or of the smallest step
        worst = ((exact - weight.double()).abs() / allowed).max().item()
        seconds = machine.time(lambda: fp8_linear.quantise(weight))  # noqa: B023
        machine.row(f"quantise [{out}, {width}]", seconds, moved=3 * weight.numel(), error=worst, tolerance=1.001,
                    passed=worst <= 1.001, note="error in halves of a step")
        for tokens in (3, 40, 150) if machine.tiny else (16, 64, 256, 2048):
            x = machine.random(tokens, width)
            with poisoned():
                y = fp8_linear.fp8_linear(x, codes, scales)
            seconds = machine.time(lambda: fp8_linear.fp8_linear(x, codes, scales))  # noqa: B023
            plain = machine.time(lambda: F.linear(x, weight))  # noqa: B023
            cost = {"moved": codes.numel()} if tokens <= 64 else {"flops": 2 * tokens * out * width}
            machine.compare(f"fp8_linear [{tokens}, {width}] x {out}", {"y": y}, {"y": x.double() @ exact.T}, 1e-2, seconds,
                            note=f"cuBLAS bf16 {plain * 1e3:.3f} ms", **cost)


KERNELS = {"rms_norm": check_rms_norm, "rope": check_rope, "silu_mul": check_silu_mul, "kv_write": check_kv_write,
           "paged_attention": check_paged_attention, "packed_attention": check_packed_attention, "sampling": check_sampling,
           "logprob": check_logprob, "fp8_linear": check_fp8_linear}
