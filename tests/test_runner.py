"""One step of the engine: arrays that foresee the next one, padding for graphs, attention row by row, memory.

References: a step written down token by token, a full forward of transformers a token, attention in float64 loops.
"""

import itertools
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from engines import add, build, finish, load, naive, prompt_of, run, same
from tiny import FAMILIES

import config
import settings as from_yaml
from actor import Engine
from kernels.kv_write import write_kv
from kernels.paged_attention import paged_attention, paged_attention_torch
from kernels.rope import rope
from ledger import Ledger
from model import rope_tables
from parallel import EngineLinear
from runner import Attend, StepBuffers, batch_buckets, keep_freed_memory, pool_blocks, uniforms, working_bytes, zeros_on_demand
from scheduler import Request, Scheduler
from shape import Shape

CPU = torch.device("cpu")
SEED = 11


def settings(dtype="float32", **actor) -> config.Config:
    """Sequences of at most 24 + 16 tokens."""
    return from_yaml.build({
        "seed": SEED, "model": {"dtype": dtype}, "data": {"max_prompt_tokens": 24}, "rollout": {"max_new_tokens": 16},
        "actor": {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64} | actor})


# --- the step's arrays


def written_down(batch: list[Request], size: int) -> dict[str, list]:
    """The step of `batch`, token by token."""
    step = {name: [] for name in ("ids", "positions", "slots", "starts", "contexts", "rows", "knobs", "uniforms")}
    step["starts"].append(0)
    for request in batch:
        for position in range(request.num_computed, request.num_computed + request.num_scheduled):
            step["ids"].append(request.tokens[position])
            step["positions"].append(position)
            step["slots"].append(request.blocks[position // size] * size + position % size)
        step["starts"].append(len(step["ids"]))
        step["contexts"].append(position + 1)
        if position + 1 == len(request.tokens):
            step["rows"].append(len(step["ids"]) - 1)
            step["knobs"].append((request.temperature, request.top_k, request.top_p, request.min_p))
            drawn = len(request.tokens) - request.num_prompt
            group = request.group if request.seed is None else 0
            step["uniforms"] += uniforms(SEED if request.seed is None else request.seed, [(group, request.sample, drawn)]).tolist()
    return step


def check_step(step, batch: list[Request], size: int, padded: int) -> None:
    """What the device gets is what is written down, then `padded` rows that do nothing."""
    wanted, pages = written_down(batch, size), step.pages
    extra, N = max(0, padded - len(batch)), len(batch)
    assert step.ids_T.tolist() == wanted["ids"] + [0] * extra
    assert step.positions_T.tolist() == wanted["positions"] + [0] * extra
    assert step.slots_T.tolist() == wanted["slots"] + [-1] * extra
    assert pages.query_starts_N1.tolist() == wanted["starts"] + [wanted["starts"][-1] + row for row in range(1, extra + 1)]
    assert pages.contexts_N.tolist() == wanted["contexts"] + [0] * extra
    assert step.rows_R.tolist() == wanted["rows"] and step.uniforms_R.tolist() == wanted["uniforms"]
    columns = [column.tolist() for column in (step.knobs.temperature_R, step.knobs.top_k_R, step.knobs.top_p_R, step.knobs.min_p_R)]
    assert np.stack(columns, 1).astype(np.float32).tolist() == np.array(wanted["knobs"], np.float32).reshape(-1, 4).tolist()
    assert step.knobs.draws == any(t > 0 for t, _, _, _ in wanted["knobs"])
    assert step.knobs.truncates == any(t > 0 and (k > 0 or p < 1 or m > 0) for t, k, p, m in wanted["knobs"])
    for row, request in enumerate(batch):
        used = -(-wanted["contexts"][row] // size)
        assert pages.tables_NB[row, :used].tolist() == list(request.blocks[:used])
    counts = [request.num_scheduled for request in batch]
    assert pages.max_queries == max(counts) and pages.max_context >= max(wanted["contexts"]) and pages.block_size == size
    assert pages.num_decodes == (counts.count(1) + extra if extra else counts.count(1))
    assert len(pages.tables_NB) == N + extra


def new_group(rng: random.Random, number: int, prompts: list[list[int]]) -> list[Request]:
    """One to three samples of a prompt from a small stock, so that prefixes are found again."""
    knobs = rng.choice([(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (0.7, 5, 0.9, 0.1), (0.0, 3, 1.0, 0.0)])
    prompt = rng.choice(prompts)
    cut, seed = rng.randint(1, len(prompt)), rng.choice([None, None, 5, 1 << 62])
    return [Request(number, sample, prompt[:cut], rng.randint(1, 16), knobs[0], frozenset([0]), 0, *knobs[1:], seed=seed)
            for sample in range(rng.randint(1, 3))]


def drive(seed: int) -> Counter:
    """A scheduler under random load, as the runner uses it; every step is checked. Returns what has happened."""
    rng, seen = random.Random(seed), Counter()
    size, seqs = rng.choice([1, 3, 4, 16]), rng.randint(1, 7)
    blocks = rng.randint(-(-40 // size), -(-90 // size))
    budget = seqs + rng.choice([0, 0, 3, 40])
    buffers = StepBuffers(settings(block_size=size, max_num_seqs=seqs, max_num_batched_tokens=budget), CPU)
    scheduler, anew = Scheduler(blocks, size, seqs, budget), buffers._describe

    def rebuilt(*arguments) -> None:
        seen["rebuilt"] += 1
        anew(*arguments)

    buffers._describe = rebuilt
    prompts = [[rng.randint(0, 30) for _ in range(24)] for _ in range(3)]
    for number in range(250):
        if scheduler.unfinished < 2 * seqs and rng.random() < 0.3:
            scheduler.add(new_group(rng, number, prompts))
        if rng.random() < 0.03:
            scheduler.publish(scheduler.version + 1)
            seen["published while running"] += bool(scheduler.waiting)
        if rng.random() < 0.02 and scheduler.running:
            scheduler.abort(rng.choice(scheduler.running).group)
        batch = scheduler.schedule()
        if not batch:
            continue
        decoding = all(request.num_scheduled == 1 for request in batch)
        padded = rng.randint(len(batch), seqs) if decoding and rng.random() < 0.5 else 0
        before = seen["rebuilt"]
        step = buffers.fill(batch, padded)
        check_step(step, batch, size, padded)
        seen["foreseen"] += seen["rebuilt"] == before
        seen["padded"] += padded > len(batch)
        seen["chunks only"] += len(step.rows_R) == 0
        if len(step.rows_R):  # without a row to sample from, the runner does not wait
            buffers.advance(batch)
        scheduler.commit(batch, [(rng.randint(0, 30), -1.0)] * len(step.rows_R))
        for request in scheduler.finished:
            seen.update(preemptions=request.preemptions, hits=request.prefix_hits, stops=request.finish_reason == "stop")
        scheduler.finished.clear()
    return seen


def test_a_foreseen_step_is_the_step():
    """A block, token, position, or random number of the step before in one that was prepared before its tokens were known."""
    seen = sum(map(drive, range(16)), Counter())
    assert set(seen) == {"foreseen", "rebuilt", "padded", "chunks only", "preemptions", "hits", "stops", "published while running"}
    assert min(seen.values()) >= 10 and seen["foreseen"] > 300, seen


def test_a_step_that_came_otherwise_is_not_the_foreseen_one():
    """A publication sends the only request back to its first token: same batch, one token, and nothing of what was foreseen."""
    buffers, scheduler = StepBuffers(settings(max_num_seqs=1, max_num_batched_tokens=1), CPU), Scheduler(20, 4, 1, 1)
    request = Request(0, 0, [7], 9)
    scheduler.add([request])
    for number in range(3):
        batch = scheduler.schedule()
        check_step(buffers.fill(batch), batch, 4, 0)
        buffers.advance(batch)
        scheduler.commit(batch, [(20 + number, -1.0)])
    scheduler.publish(1)
    batch = scheduler.schedule()
    assert batch == [request] and (request.num_computed, request.num_scheduled) == (0, 1)
    check_step(buffers.fill(batch), batch, 4, 0)


def test_a_step_in_between_is_not_forgotten():
    """One request at a position that was foreseen for another one: the table in the arrays is the other one's by then."""
    first, second = Request(0, 0, list(range(1, 8)), 9), Request(1, 0, list(range(11, 31)), 9)
    first.blocks.extend([5, 6])
    second.blocks.extend([7, 8, 9])
    buffers = StepBuffers(settings(), CPU)
    for request, computed, scheduled in ((first, 6, 1), (second, 7, 2), (first, 7, 1)):
        request.num_computed, request.num_scheduled = computed, scheduled
        check_step(buffers.fill([request]), [request], 4, 0)
        buffers.advance([request])
        if request is first:
            request.tokens.append(40)


def test_random_numbers_are_those_of_the_sample():
    """A number drawn by row, batch or engine: per-request seeds and the engine's, in one batch, wherever they stand in it."""
    requests = [Request(4, 2, [1, 2], 9), Request(4, 2, [1, 2], 9, seed=3), Request(9, 2, [1, 2], 9, seed=3)]
    for number, request in enumerate(requests):
        request.num_scheduled = 2
        request.blocks.append(number)
    own, seeded = uniforms(SEED, [(4, 2, 0)])[0], uniforms(3, [(0, 2, 0)])[0]
    assert own != seeded
    for order in itertools.permutations(range(3)):
        step = StepBuffers(settings(), CPU).fill([requests[number] for number in order])
        assert step.uniforms_R.tolist() == [(own, seeded, seeded)[number] for number in order]


# --- what a CUDA graph relies on


def test_every_batch_has_a_bucket():
    """A batch size without a graph, the largest above all, or one whose graph computes far more rows than it has."""
    for largest in range(1, 301):
        buckets = batch_buckets(largest)
        assert buckets == sorted(set(buckets)) and buckets[0] == 1 and buckets[-1] == largest
        for size in range(1, largest + 1):
            bucket = min(bucket for bucket in buckets if bucket >= size)
            assert bucket < 2 * size or bucket - size < 16


def admitted(lengths: list[int], scheduler: Scheduler, first: int = 0) -> list[Request]:
    """Requests with these prompts, prefilled, so that the next batch decodes one token of each."""
    rng = random.Random(first)
    for number, length in enumerate(lengths):
        scheduler.add([Request(first + number, 0, [rng.randint(1, 30) for _ in range(length)], 16, seed=number)])
    batch = scheduler.schedule()
    scheduler.commit(batch, [(number + 1, -1.0) for number in range(len(batch))])
    return scheduler.schedule()


def test_padding_rows_do_nothing():
    """Rows of a larger batch that stay behind a smaller one: they would write keys into blocks that others own by now."""
    buffers, scheduler = StepBuffers(settings(), CPU), Scheduler(60, 4, 8, 64)
    large = admitted([5, 9, 1, 4, 8, 3, 7, 2], scheduler)
    buffers.fill(large)
    assert buffers.host["contexts"].min() > 0 and buffers.host["slots"][:8].min() >= 0
    scheduler.commit(large, [(1, -1.0)] * 8)
    for group in range(3, 8):
        scheduler.abort(group)
    small = scheduler.schedule()
    assert len(small) == 3
    step = buffers.fill(small, 8)
    assert step.ids_T[3:].tolist() == step.positions_T[3:].tolist() == step.pages.contexts_N[3:].tolist() == [0] * 5
    assert step.slots_T[3:].tolist() == [-1] * 5 and step.pages.query_starts_N1.tolist() == list(range(9))
    assert len(step.rows_R) == len(step.uniforms_R) == len(step.knobs.temperature_R) == 3, "padding is never sampled"

    poisoned = torch.full((2, 60 * 4, 2, 16), torch.nan)
    for request in small:
        for position in range(request.num_computed):
            poisoned[:, request.blocks[position // 4] * 4 + position % 4] = torch.randn(2, 2, 16)
    keys, values = poisoned.clone()
    q, k, v = torch.randn(8, 4, 16), torch.randn(8, 2, 16), torch.randn(8, 2, 16)
    write_kv(keys, values, k, v, step.slots_T)
    changed = {slot for new, old in ((keys, poisoned[0]), (values, poisoned[1]))
               for slot in torch.nonzero(~((new == old) | (new.isnan() & old.isnan())).all((1, 2))).flatten().tolist()}
    assert changed == {request.blocks[request.num_computed // 4] * 4 + request.num_computed % 4 for request in small}
    out = paged_attention_torch(q, keys, values, step.pages, 0)
    assert not out[3:].any() and out[:3].isfinite().all()
    alone = paged_attention_torch(q[:3], keys, values, buffers.fill(small).pages, 0)
    assert torch.equal(out[:3], alone)


def test_arrays_are_not_rewritten_before_the_device_has_them(monkeypatch):
    """A copy queued behind the kernels of a chunk, for which nobody waits: it would carry the tokens of a later step."""
    buffers, arrived = StepBuffers(settings(max_num_batched_tokens=8), CPU), []

    class Late:
        """Device memory whose copies wait for the event behind them."""
        queued = None

        def copy_(self, source, non_blocking):
            assert self.queued is None, "two copies out of one buffer under way"
            self.queued = source

    class Event:
        def record(self):
            assert buffers.copied.queued is not None, "recorded before what it stands for"

        def synchronize(self):
            if buffers.copied.queued is not None:
                arrived.append((buffers.host["ids"][:8].tolist(), buffers.host["positions"][:8].tolist()))
                buffers.copied.queued = None

    buffers.copied = Late()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    scheduler, request = Scheduler(40, 4, 8, 8), Request(0, 0, list(range(1, 25)), 9)
    scheduler.add([request])
    for _ in range(4):
        batch = scheduler.schedule()
        step = buffers.fill(batch)
        if len(step.rows_R):
            buffers.advance(batch)
        scheduler.commit(batch, [(40, -1.0)] * len(step.rows_R))
    chunks = [(list(range(first + 1, first + 9)), list(range(first, first + 8))) for first in (0, 8, 16)]
    assert arrived[:3] == chunks and [(ids[0], positions[0]) for ids, positions in arrived[3:]] == [(40, 24)]


class Replay:
    """A CUDA graph without a GPU: it knows the addresses that it was captured with, and nothing of the batch."""

    def __init__(self, runner, size: int, replays: list[int]):
        self.runner, self.size, self.replays = runner, size, replays
        self.step = runner.buffers.fill([], size)

    def replay(self) -> None:
        runner, step = self.runner, self.step
        attend = Attend(runner.cache, step.slots_T, lambda q, k, v, window: paged_attention(q, k, v, step.pages, window))
        decoder = runner.model.model
        blocks = [layer.self_attn for layer in decoder.layers]
        kept = decoder.rotary, [block.rotate for block in blocks]
        decoder.rotary = rope_tables
        for block in blocks:  # on a CPU the attention call rotates
            block.rotate = rope
        logits_RV = runner.model.next_logits(step.ids_T, step.positions_T, attend, torch.arange(self.size))
        decoder.rotary = kept[0]
        for block, rotate in zip(blocks, kept[1], strict=True):
            block.rotate = rotate
        runner.logits_RV[:self.size].copy_(logits_RV)
        self.replays.append(self.size)


@pytest.mark.parametrize("family", ["llama-narrow", "qwen2", "qwen3-window"])
def test_padded_replays_give_the_tokens_of_a_full_recompute(family):
    """Graphs that read another batch's lengths, tables or ids, a bucket that is too small, or padding that reaches a real row."""
    engine, replays = build(family, max_num_seqs=7, max_num_batched_tokens=20, kv_blocks=40, seed=SEED), []
    runner, sizes = engine.runner, []
    runner.cache.normal_(0, 1e3)
    runner.logits_RV = torch.full((7, runner.shape.vocab), torch.nan)
    runner.buckets = batch_buckets(7)
    runner.graphs = {size: Replay(runner, size, replays) for size in reversed(runner.buckets)}
    compute = runner.compute

    def watched(batch: list[Request]) -> list[tuple[int, float]]:
        before = len(replays)
        drawn = compute(batch)
        sizes.extend([len(batch)] * (len(replays) - before))
        return drawn

    runner.compute = watched
    work = [(3, 24, 0.0), (20, 12, 1.0), (1, 9, 0.0), (33, 6, 0.0), (8, 20, 0.7), (2, 3, 1.0), (11, 4, 0.0), (5, 8, 1.0)]
    requests = [Request(group, 0, prompt_of(length, group), *limits) for group, (length, *limits) in enumerate(work)]
    add(engine, requests)
    finish(engine, requests)
    assert replays == [min(bucket for bucket in (1, 2, 4, 7) if bucket >= size) for size in sizes]
    assert set(replays) == {1, 2, 4, 7} and any(bucket > size for bucket, size in zip(replays, sizes, strict=True))
    assert sum(request.preemptions for request in requests) == 0
    for request in requests:
        numbers = uniforms(SEED, [(request.group, 0, position) for position in range(24)])
        prompt = request.tokens[:request.num_prompt]
        same(request, naive(FAMILIES[family], prompt, request.max_new_tokens, request.temperature, numbers))


def test_padded_logits_are_those_of_the_bare_batch():
    """A padded step by the GPU's formula against the bare one by the CPU's, on the same pages; a key that padding writes."""
    engine = build("qwen3", max_num_seqs=6)
    add(engine, [Request(group, 0, prompt_of(5 + 7 * group, group), 9, 0.0) for group in range(3)])
    for _ in range(3):
        engine.step()
    runner, batch = engine.runner, engine.scheduler.schedule()
    assert [request.num_scheduled for request in batch] == [1, 1, 1]
    with torch.inference_mode():
        step = runner.buffers.fill(batch)
        bare = runner.model.next_logits(step.ids_T, step.positions_T, runner._attend(step), step.rows_R)
        cache = runner.cache.clone()
        for size in (4, 6):
            padded = Replay(runner, size, [])
            runner.logits_RV = torch.full((6, runner.shape.vocab), torch.nan)
            runner.buffers.fill(batch, size)
            padded.replay()
            torch.testing.assert_close(runner.logits_RV[:3], bare, atol=1e-5, rtol=0)
            assert runner.logits_RV[:size].isfinite().all() and torch.allclose(runner.cache, cache, atol=1e-5, rtol=0)
            written = {request.blocks[request.num_computed // 4] * 4 + request.num_computed % 4 for request in batch}
            others = [slot for slot in range(cache.shape[2]) if slot not in written]
            assert torch.equal(runner.cache[:, :, others], cache[:, :, others])


# --- memory


def shape_of(**fields) -> Shape:
    return Shape(**{"layers": 3, "hidden": 64, "ffn": 80, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 64, "tied": False,
                    "qkv_bias": False, "o_bias": False, "qk_norm": False, "norm_eps": 1e-6, "rope_theta": 1e4, "rope_scaling": None,
                    "windows": (0, 0, 0), "max_position": 512, "init_std": 0.02} | fields)


def test_pool_of_a_lane(monkeypatch):
    """A lane whose pool counts the heads of the others, or more lanes than heads that share what they do not share."""
    block = 2 * 3 * 2 * 16 * 4 * 4  # keys and values, layers, KV heads, head_dim, fp32, tokens
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * 20 * block))
    for tp, kv_heads, blocks in ((1, 2, 20), (2, 2, 40), (4, 2, 40), (2, 1, 40), (4, 4, 40)):  # one head: blocks half as large
        config_ = settings(tp=tp, kv_memory_fraction=0.5, max_num_seqs=32)
        assert pool_blocks(config_, shape_of(kv_heads=kv_heads), CPU) == blocks
    assert pool_blocks(settings(kv_memory_fraction=0.5, max_num_seqs=1), shape_of(), CPU) == 10, "one sequence of 40 tokens"


def test_pool_on_a_gpu_leaves_room_for_the_step(monkeypatch):
    """A cache that takes the memory which activations and logits need: the first large prefill then ends the run."""
    big = shape_of(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, vocab=128256)
    config_ = settings(dtype="bfloat16", max_num_seqs=256, max_num_batched_tokens=2048, block_size=16, kv_memory_fraction=0.5)
    needed = working_bytes(big, config_)
    logits, products = 256 * 128256 * 4, 2048 * 28672 * 2
    assert 3 * logits + 3 * products <= needed <= 3 * logits + 5 * products  # of one layer: gate, up, and their product
    block = 327_680 * 16  # DESIGN's bytes of a token
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed + 200 * block, 0))
    assert pool_blocks(config_, big, torch.device("cuda")) == 100
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (needed // 2, 0))
    assert pool_blocks(config_, big, torch.device("cuda")) == 0, "check_pool then names the setting"


@pytest.mark.parametrize("exact", [True, False])
def test_released_memory_comes_back_empty_and_works(exact):
    """Colocated: a copy of the weights (packed ones too) or a pool that stays, or a tied head that comes back as two tensors."""
    reference, prompt = FAMILIES["qwen3-bias"], prompt_of(9, 1)
    engine = build(reference, exact=exact)
    add(engine, [Request(0, 0, list(prompt), 5, 0.0)])
    engine.step()
    shapes = {name: tensor.shape for name, tensor in engine.weights().items()}
    finish(engine, [*engine.scheduler.running])
    engine.runner.release()
    assert engine.runner.cache is None and not any(tensor.nbytes for tensor in engine.weights().values())
    assert not any(module.derived for module in engine.runner.model.modules() if isinstance(module, EngineLinear))
    engine.runner.restore()
    assert {name: tensor.shape for name, tensor in engine.weights().items()} == shapes
    load(engine, reference)
    engine.publish(1)
    request = Request(1, 0, list(prompt), 5, 0.0)
    run(engine, [request])
    same(request, naive(reference, prompt, 5))


def test_released_memory_goes_back_to_the_system():
    """A heap that keeps the released weights and their packed copies, in holes too small for what the learner needs."""
    big = shape_of(layers=8, hidden=512, ffn=2048, heads=8, kv_heads=8, head_dim=64, vocab=4096, windows=(0,) * 8)
    engine = Engine(settings(dtype="float32"), big, 4096, torch.device("cpu"), Ledger(False))
    for weight in engine.weights().values():
        weight.fill_(0.01)
    engine.publish(0)
    before, weights = psutil.Process().memory_info().rss, sum(weight.nbytes for weight in engine.weights().values())
    engine.runner.release()
    assert weights > 140e6 and before - psutil.Process().memory_info().rss > 1.8 * weights


def test_zeros_cost_nothing_until_written():
    """A pool of gigabytes that is written to at start, or again after a release, or is not zero."""
    keep_freed_memory()
    before = psutil.Process().memory_info().rss
    for _ in range(2):  # a heap that keeps what was freed clears it by hand the second time
        zeros = None
        zeros = zeros_on_demand((2, 1 << 14, 1 << 14), torch.bfloat16)
        assert zeros.shape == (2, 1 << 14, 1 << 14) and zeros.dtype == torch.bfloat16 and zeros.nbytes == 1 << 30
        assert psutil.Process().memory_info().rss - before < 1 << 28
    zeros[1, -1] = 3.0
    assert zeros[1, -1].sum() == 3 * (1 << 14) and not zeros[:, ::1000, ::1000].any()
    assert not zeros_on_demand((3, 5), torch.float32).any()
