"""The engine on real logits: greedy output of every family, the pool (E2, E4), prefix hits (E3), publication (E11), pool size."""

import copy
import functools
import itertools
from types import SimpleNamespace

import psutil
import pytest
import torch
from engines import add, build, everything_is_free, finish, key, load, naive, prompt_of, response, run, same, scored
from tiny import FAMILIES, randomise

from config import ConfigError
from runner import uniforms
from scheduler import Request

EXACT = pytest.mark.parametrize("exact", [False, True], ids=["sdpa", "exact"])


@functools.cache
def greedy(family: str) -> list[tuple[list[int], tuple]]:
    return [(prompt, naive(FAMILIES[family], prompt, 9)) for prompt in (prompt_of(1, 1), prompt_of(6, 2), prompt_of(29, 3))]


@EXACT
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_that_of_a_full_recompute(family, exact):
    """A slot, position, mask, window, or row of logits that is wrong in one of prefill, chunk, and decode of one family."""
    for budget, seqs, block_size in [(1, 1, 4), (3, 3, 3), (7, 2, 16), (64, 16, 4)]:
        engine = build(family, exact=exact, max_num_batched_tokens=budget, max_num_seqs=seqs, block_size=block_size)
        requests = [Request(group, 0, list(prompt), 9, 0.0) for group, (prompt, _) in enumerate(greedy(family))]
        run(engine, requests)
        for request, (_, expected) in zip(requests, greedy(family), strict=True):
            same(request, expected)
            assert request.finish_reason == "length" and request.versions == [0] * 9
        assert sum(request.num_generated for request in requests) == 27


def test_bfloat16():
    """A dtype that is set but not that of weights, cache and computation; a logprob whose rounding is more than that of bf16."""
    reference = copy.deepcopy(FAMILIES["qwen3"])
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())
    engine = build(reference, dtype="bfloat16")
    assert {weight.dtype for weight in engine.weights().values()} == {engine.runner.cache.dtype} == {torch.bfloat16}
    requests = [Request(group, 0, prompt_of(9, group), 12, 0.5) for group in range(4)]
    run(engine, requests)
    gaps = torch.cat([torch.tensor(request.logprobs) - scored(reference, request) for request in requests])
    assert 1e-5 < gaps.abs().max() < 0.1 and abs(gaps.mean()) < 0.01, gaps


def test_nothing_is_computed_before_weights_have_arrived():
    """Tokens sampled from uninitialised memory: version 0 is a publication too."""
    engine, request = build(version=-1), Request(0, 0, [1, 2, 3], 2)
    add(engine, [request])
    assert engine.step() == [] and not request.versions and request.num_generated == 0 and not engine.runner.cache.any()
    engine.publish(0)
    finish(engine, [request])
    assert request.versions == [0, 0]


# --- pool, prefix hits, publication


@EXACT
def test_preempted_requests_finish_as_if_alone(exact):
    """E2: a preempted request that loses tokens, draws its position again, or reads blocks that are no longer its own."""
    outputs = []
    for blocks in (8, 100):
        engine = build("mistral", exact=exact, kv_blocks=blocks, longest=(4, 12))
        requests = [Request(group, 0, prompt_of(4, group), 12, 0.0) for group in range(3)]
        run(engine, requests)
        assert (sum(request.preemptions for request in requests) > 0) == (blocks == 8)
        outputs.append(requests)
    for tight, ample in zip(*outputs, strict=True):
        same(tight, naive(FAMILIES["mistral"], ample.tokens[:4], 12))
        assert response(tight) == response(ample)
        assert tight.logprobs == (ample.logprobs if exact else pytest.approx(ample.logprobs, abs=1e-5, rel=0))


@EXACT
@pytest.mark.parametrize("siblings", [True, False], ids=["one group", "two groups"])
def test_prefix_hits_change_nothing(siblings, exact):
    """E3: prompts of 15, 16, 17, 32: a hit on a partial block, on the last token (no query left), or on another prefix."""
    engine = build("qwen3", exact=exact, block_size=16, max_num_batched_tokens=256)
    lengths = (15, 16, 17, 32)
    hits = {15: 0, 16: 0, 17: 16, 32: 16}
    copied = {32: 15} if siblings else {}  # of the leader's last block of the prompt, all but the last token
    first, schedule = {}, engine.scheduler.schedule

    def watch() -> list[Request]:
        batch = schedule()
        for request in batch:
            first.setdefault(request, (request.num_computed, request.num_scheduled))
        return batch

    engine.scheduler.schedule = watch
    number = itertools.count(10)
    twice = [Request(length if siblings else next(number), copy, prompt_of(length, length), 6, 0.0)
             for length in lengths for copy in range(2)]
    again = [Request(next(number), 0, prompt_of(length, length), 6, 0.0) for length in lengths]
    run(engine, twice)
    run(engine, again)
    for request in twice + again:
        hit = hits[request.num_prompt] if request in again or (siblings and request.sample) else 0
        hit += copied.get(request.num_prompt, 0) if request in twice and request.sample else 0
        assert request.prefix_hits == first[request][0] == hit and first[request][1] == request.num_prompt - hit >= 1
    for length in lengths:
        cold = Request(0, 0, prompt_of(length, length), 6, 0.0)
        run(build("qwen3", exact=exact, block_size=16), [cold])
        same(cold, naive(FAMILIES["qwen3"], cold.tokens[:length], 6))
        for request in [request for request in twice + again if request.num_prompt == length]:
            assert response(request) == response(cold)
            assert request.logprobs == (cold.logprobs if exact else pytest.approx(cold.logprobs, abs=1e-5, rel=0))


def test_prompts_at_the_edge_of_the_pool():
    """E4: 32 slots, prompts of 31, 32, 33, 500: a spin, a crash, or a neighbour that never gets its turn."""
    engine = build(kv_blocks=8, longest=(28, 4))
    requests = [Request(group, 0, prompt_of(length, length), 4, 0.0) for group, length in enumerate((31, 5, 32, 500, 33, 9))]
    run(engine, requests)
    ends = [request.finish_reason for request in requests]
    assert [end for end in ends if not end.startswith("rejected")] == ["length"] * 4
    assert "500" in ends[3] and "33" in ends[4] and all("32" in ends[group] for group in (3, 4)), "the reason names both sizes"
    for request, new in zip(requests, (2, 4, 1, 0, 0, 4), strict=True):  # the last token sampled needs no slot
        same(request, naive(FAMILIES["llama"], request.tokens[:request.num_prompt], new))
        assert len(request.versions) == new


@EXACT
def test_publication_in_the_middle_of_a_response(exact):
    """E11: old keys under new weights, logprobs rewritten after the swap, a tied head or a waiting sibling left at version 7."""
    old = FAMILIES["llama-tied"]
    new = randomise(copy.deepcopy(old), 99)
    engine, undisturbed = (build(old, version=7, exact=exact, seed=4, max_num_seqs=5, max_num_batched_tokens=12) for _ in range(2))

    def work() -> list[Request]:
        sizes = {0: (9, 3), 1: (6, 1), 2: (21, 2), 3: (2, 2), 4: (5, 1)}
        return [Request(group, number, prompt_of(length, group), 14, 0.0 if group == 1 else 1.0, min_version=8 * (group == 4))
                for group, (length, samples) in sizes.items() for number in range(samples)]

    requests, controls = work(), work()
    add(engine, requests)
    for _ in range(9):
        assert engine.step() == []
    before = {request: (list(request.tokens), list(request.logprobs)) for request in requests}
    load(engine, new)
    engine.publish(8)
    finish(engine, requests)
    run(undisturbed, controls[:-1])

    parts = [(sum(version == 7 for version in request.versions), sum(version == 8 for version in request.versions))
             for request in requests]
    assert sum(part[0] > 0 and part[1] > 0 for part in parts) >= 3 and parts[-1] == (0, 14)
    for request, control, (first, second) in zip(requests, controls, parts, strict=True):
        assert request.versions == [7] * first + [8] * second and first + second == 14
        at = request.num_prompt + first
        assert (request.tokens[:at], request.logprobs[:first]) == before[request]
        old_part = naive(old, request.tokens[:request.num_prompt], first, request.temperature,
                         uniforms(4, [(*key(request), position) for position in range(first)]))
        new_part = naive(new, request.tokens[:at], second, request.temperature,
                         uniforms(4, [(*key(request), position) for position in range(first, 14)]))
        assert request.tokens[request.num_prompt:] == old_part[0] + new_part[0]
        assert request.logprobs == pytest.approx(old_part[1] + new_part[1], abs=1e-5, rel=0)
        if exact:
            assert request.logprobs[:first] == control.logprobs[:first]


def test_after_an_abort_everything_is_free():
    """Blocks, held siblings, or a half-prefilled request that outlive the abort of their group; a neighbour that notices."""
    engine = build(max_num_batched_tokens=8, max_num_seqs=4, kv_blocks=40)
    requests = [Request(group, number, prompt_of(length, group), 8, 0.0)
                for group, (length, samples) in enumerate([(3, 2), (30, 3), (5, 2)]) for number in range(samples)]
    add(engine, requests)
    for _ in range(3):
        engine.step()
    assert requests[0].logprobs and 0 < requests[2].num_computed < 30 and engine.scheduler.held
    for group in (0, 1):
        engine.scheduler.abort(group)
    finish(engine, requests)
    assert [request.finish_reason for request in requests] == ["abort"] * 5 + ["length"] * 2
    for request in requests[5:]:
        same(request, naive(FAMILIES["llama"], request.tokens[:5], 8))
    again = [Request(9, number, prompt_of(30, 1), 8, 0.0) for number in range(3)]
    add(engine, again)
    for _ in range(5):
        engine.step()
    engine.scheduler.abort(9)
    assert {request.finish_reason for request in engine.step()} == {"abort"}
    everything_is_free(engine)


# --- pool size and printed numbers


def test_pool_is_sized_from_free_memory(monkeypatch):
    """A pool larger than its share, in the wrong dtype's bytes, or larger than all running requests can ever use."""
    block_bytes = 2 * 3 * 2 * 16 * 4 * 4  # keys and values, layers, KV heads, head_dim, fp32, tokens
    free = SimpleNamespace(available=2 * (20 * block_bytes + 1))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    engine = build(kv_blocks=0, kv_memory_fraction=0.5)
    assert engine.scheduler.pool.num_blocks == 20 and engine.runner.cache.nbytes == 20 * block_bytes
    assert engine.full_length_sequences == 1  # of 80 slots, 64 each
    half = build(kv_blocks=0, kv_memory_fraction=0.5, dtype="bfloat16")
    assert half.scheduler.pool.num_blocks == 40 and half.runner.cache.nbytes == 20 * block_bytes
    free.available = 2 * 400 * block_bytes
    assert build(kv_blocks=0, kv_memory_fraction=0.5, max_num_seqs=3).scheduler.pool.num_blocks == 3 * 16
    assert build(kv_blocks=77, max_num_seqs=3).scheduler.pool.num_blocks == 77
    for blocks, available in ((0, 0), (0, 2 * 15 * block_bytes), (15, 2 * 400 * block_bytes)):
        free.available = available
        with pytest.raises(ConfigError, match=r"needs 64; raise actor\.kv_blocks or actor\.kv_memory_fraction"):
            build(kv_blocks=blocks, kv_memory_fraction=0.5)
    longest = Request(0, 0, prompt_of(40, 0), 24, 0.0)
    run(build(kv_blocks=16), [longest])
    assert len(longest.logprobs) == 24 and not longest.preemptions


def test_bytes_of_decode_steps():
    """The printed MBU: requests that finish in a step must count with what the step read for them."""
    engine, request = build("llama-tied"), Request(0, 0, prompt_of(6, 0), 4, 0.0)
    run(engine, [request])
    weights = sum(parameter.numel() * 4 for parameter in FAMILIES["llama-tied"].parameters())
    contexts = 7 + 8 + 9  # keys and values that each of the three decode steps attends over
    counters = engine.take_counters()
    assert counters["decode_seconds"] > 0
    assert counters["decode_bytes"] == 3 * weights + contexts * 2 * 3 * 2 * 16 * 4
