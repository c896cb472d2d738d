"""Scheduler: every invariant of DESIGN 4 after every step of random sequences, and cases E2, E3, E4, E11.

`Rig` is an engine whose model is bookkeeping. It remembers for every KV slot which weights wrote it and behind which tokens, reads
all of a request's slots back before it samples, and derives the next token from (group, sample, what it read). A shared, stale,
overwritten or missing slot therefore fails at once, and would also change the output.
"""

import zlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import Request, Scheduler

VOCAB, STOP = 11, 0  # a random token ends a sample with probability 1/11


def next_token(group: int, sample: int, tokens: tuple[int, ...]) -> int:
    return zlib.crc32(repr((group, sample, tokens)).encode()) % VOCAB


def alone(request: Request, prompt: list[int]) -> tuple[list[int], str]:
    """Textbook decoding of one request with all the memory in the world: its tokens and how it ends."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(request.group, request.sample, tuple(tokens)))
        if tokens[-1] in request.stop_ids:
            return tokens, "stop"
        if len(tokens) - len(prompt) == request.max_new_tokens:
            return tokens, "length"


class Rig:
    """A scheduler, the model that is bookkeeping, and all requests ever added with their prompts."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int = 64, budget: int = 4096, version: int = 0,
                 mode: str = "recompute"):
        self.scheduler, self.mode, self.coming = Scheduler(num_blocks, block_size, max_num_seqs, budget, version, mode), mode, False
        self.slots: dict[int, tuple[int, tuple[int, ...]]] = {}  # slot -> (version, tokens up to the one it holds)
        self.prompts: dict[Request, list[int]] = {}
        self.logprobs: dict[Request, list[float]] = {}
        self.content: dict[int, tuple[int, ...]] = {}  # identity of a registered block -> tokens from 0 to its end
        self.seen = Counter()  # what happened, so that a test can tell that it did

    def add(self, group: int, prompt: list[int], samples: int = 1, new: int = 12, stop=frozenset(), min_version: int = 0):
        requests = [Request(group, sample, list(prompt), new, stop_ids=frozenset(stop), min_version=min_version)
                    for sample in range(samples)]
        self.prompts |= {request: list(prompt) for request in requests}
        self.logprobs |= {request: [] for request in requests}
        self.scheduler.add(requests)
        self.check()
        return requests

    def publish(self, version: int) -> None:
        self.scheduler.publish(version)
        self.content.clear()
        assert self.scheduler.pool.table == {}, "keys and values of the old weights can still be found"
        self.check()

    def slot(self, request: Request, position: int) -> int:
        size = self.scheduler.pool.block_size
        return request.blocks[position // size] * size + position % size

    def copy_block(self, request: Request) -> None:
        """What the runner does before a step: the whole block, also what the leader has generated since."""
        size = self.scheduler.pool.block_size
        if request.source >= 0:
            self.seen["copied"] += 1
            target = request.blocks[request.num_computed // size]
            assert self.scheduler.pool.refs[target] == 1 and self.scheduler.pool.refs[request.source] >= 1
            for offset in range(size):
                self.slots[target * size + offset] = self.slots.get(request.source * size + offset, (None, ()))

    def step(self) -> list[tuple[Request, int]]:
        """One engine step; returns (request, tokens computed). Fails unless something that could run did run."""
        scheduler = self.scheduler
        draining = self.mode == "drain" and self.coming
        startable = any(r.min_version <= scheduler.version and (r.versions or not draining)
                        for r in self.prompts if not r.finish_reason)
        before, was_running = {request: request.preemptions for request in self.prompts}, set(scheduler.running)
        batch = scheduler.schedule()
        for request in batch:
            self.copy_block(request)
        self.check()
        assert batch or not startable, "spin: unfinished requests, and nothing was scheduled"
        work = [(request, request.num_scheduled) for request in batch]
        assert len(set(batch)) == len(batch) and all(computed >= 1 for _, computed in work)
        assert sum(computed for _, computed in work) <= scheduler.max_num_batched_tokens
        assert len(scheduler.running) <= scheduler.max_num_seqs
        preempted = sum(request.preemptions - before[request] for request in self.prompts)
        self.seen["preempted"] += preempted
        assert not preempted or set(batch) <= was_running, "somebody is let in while others are thrown out"
        assert not draining or all(r in was_running or r.versions for r in batch), "a new request is let in before the new weights"
        for request, computed in work:
            for position in range(request.num_computed, request.num_computed + computed):
                block = request.blocks[position // scheduler.pool.block_size]
                assert scheduler.pool.refs[block] == 1, f"write to block {block}, which another request shares"
                self.slots[self.slot(request, position)] = scheduler.version, tuple(request.tokens[:position + 1])
        sampled = []
        for request, computed in work:
            self.seen["chunked"] += request.num_computed + computed < len(request.tokens)
            if request.num_computed + computed == len(request.tokens):
                cached = tuple(self.slots[self.slot(request, position)][1][-1] for position in range(len(request.tokens)))
                sampled.append((next_token(request.group, request.sample, cached), -len(cached) / 100 - scheduler.version))
                self.logprobs[request].append(sampled[-1][1])
        scheduler.commit(batch, sampled)
        self.check()
        return work

    def run(self, limit: int = 2000) -> int:
        """Steps until nothing is left; then everything must have been returned."""
        for steps in range(limit):
            if not self.scheduler.unfinished:
                assert self.scheduler.pool.refs == [0] * self.scheduler.pool.num_blocks
                assert len(self.scheduler.pool.free) == self.scheduler.pool.num_blocks
                assert set(self.scheduler.finished) == set(self.prompts) and len(self.scheduler.finished) == len(self.prompts)
                return steps
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def check(self) -> None:
        """All invariants of DESIGN 4."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        tables = Counter(block for request in self.prompts for block in request.blocks)
        assert pool.refs == [tables[block] for block in range(pool.num_blocks)], "ref count is not the number of tables"
        free = list(pool.free)
        assert sorted(free) == [block for block in range(pool.num_blocks) if not tables[block]], "used + free is not the total"
        places = Counter([*scheduler.running, *scheduler.waiting, *scheduler.finished])
        places.update(request for siblings in scheduler.held.values() for request in siblings)
        assert places == Counter(self.prompts.keys()), "a request is lost, or in two places"
        assert set(scheduler.finished) == {request for request in self.prompts if request.finish_reason}
        assert scheduler.unfinished == len(self.prompts) - len(scheduler.finished)
        for request in self.prompts:
            assert request in scheduler.running or not (request.blocks or request.chain or request.num_computed)
            assert len(set(request.blocks)) == len(request.blocks)
            for position in range(request.num_computed):
                version, prefix = self.slots.get(self.slot(request, position), (-1, ()))
                assert prefix == tuple(request.tokens[:position + 1]), "computed tokens without their keys and values"
                kept = self.mode == "keep" and request.start_version <= version < scheduler.version
                assert version == scheduler.version or kept, "keys and values of other weights"
        for (parent, tokens), block in pool.table.items():
            held = [self.slots.get(block * pool.block_size + offset, (None, ())) for offset in range(pool.block_size)]
            prefix = held[-1][1]
            before = () if parent == -1 - scheduler.version else self.content[parent]
            assert prefix == before + tokens and len(tokens) == pool.block_size, "table entry for other content"
            assert held == [(scheduler.version, prefix[:len(before) + offset + 1]) for offset in range(pool.block_size)]
            self.content[pool.find(parent, tokens)[1]] = prefix

    def check_outputs(self) -> None:
        """Every output is the one that an unconstrained pool gives, or its start if aborted or if the pool cannot hold more."""
        for request, prompt in self.prompts.items():
            tokens, reason = alone(request, prompt)
            assert request.logprobs == self.logprobs[request], "logprobs are not the engine's own"
            assert len(request.logprobs) == len(request.versions) == request.num_generated
            assert request.versions == sorted(request.versions)
            if request.finish_reason.startswith("rejected"):
                assert request.tokens == prompt and (not prompt or len(prompt) > self.scheduler.capacity)
            elif request.finish_reason == "abort" or len(request.tokens) < len(tokens):
                assert request.tokens == tokens[:len(request.tokens)]
                assert request.finish_reason == "abort" or (
                    request.finish_reason == "length" and len(request.tokens) == self.scheduler.capacity + 1)
            else:
                assert (request.tokens, request.finish_reason) == (tokens, reason)


# --- all invariants under random operations

POOLS = st.tuples(st.integers(2, 10), st.integers(1, 4), st.integers(1, 5), st.integers(0, 12))
ADD = st.tuples(st.just("add"), st.integers(0, 1), st.integers(0, 14), st.integers(1, 4), st.integers(1, 8), st.booleans())
STEP, ABORT = st.tuples(st.just("step"), st.integers(1, 6)), st.tuples(st.just("abort"), st.integers(0, 9))
OPERATIONS = st.lists(st.one_of(ADD, ADD, STEP, STEP, ABORT, st.just(("publish",))), min_size=1, max_size=14)


def play(pool, operations) -> Rig:
    """The operations in order, then steps until nothing is left. Two prompt families share prefixes across groups."""
    num_blocks, block_size, max_num_seqs, spare = pool
    rig, groups, needed = Rig(num_blocks, block_size, max_num_seqs, max_num_seqs + spare), 0, 0
    for operation, *values in operations:
        if operation == "add":
            family, length, samples, new, ahead = values
            needed = max(needed, rig.scheduler.version + ahead)  # a group may wait for the next publication
            rig.add(groups, [family + 1] * (length // 2) + [3] * (length - length // 2), samples, new, {STOP}, needed)
            groups += 1
        elif operation == "step":
            for _ in range(values[0]):
                rig.step()
        elif operation == "abort":
            rig.seen["held aborted"] += any(r.group == values[0] for siblings in rig.scheduler.held.values() for r in siblings)
            rig.scheduler.abort(values[0])
            assert all(request.finish_reason for request in rig.prompts if request.group == values[0])
            rig.check()
        else:
            rig.seen["published in flight"] += bool(rig.scheduler.running)
            rig.publish(rig.scheduler.version + 1)
    rig.publish(rig.scheduler.version + 1)  # lets the last group with a min_version in
    rig.run()
    rig.check_outputs()
    for request in rig.prompts:
        rig.seen[request.finish_reason.partition(":")[0]] += 1
        rig.seen["hit"] += request.prefix_hits > 0
        assert not request.versions or request.versions[0] >= request.min_version, "admitted before its weights"
    return rig


def explore(examples: int, fixed: bool) -> Counter:
    seen = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=fixed, database=None)
    @given(POOLS, OPERATIONS)
    def run(pool, operations):
        seen.update(play(pool, operations).seen)

    run()
    return seen


EVENTS = {"preempted", "chunked", "published in flight", "held aborted", "stop", "length", "abort", "rejected", "hit", "copied"}


def test_every_invariant_after_every_step_of_random_sequences():
    """Double free, lost block, write to a shared block, stale prefix hit, lost request: add, abort, stop, preempt, publish."""
    seen = explore(400, fixed=True)
    assert {event for event in EVENTS if seen[event] < 10} == set(), "the sequences never reached what they are to test"


@pytest.mark.long
def test_every_invariant_on_many_new_random_sequences():
    """The same with other sequences every time."""
    explore(5000, fixed=False)


# --- the cases


def test_e2_three_requests_that_need_more_than_the_pool():
    """E2: 8 blocks x 4, three requests of 4 + 12 tokens (12 blocks): outputs of an unconstrained pool, 8 blocks free at the end."""
    rig, roomy = Rig(8, 4), Rig(800, 4)
    for one in (rig, roomy):
        for group in range(3):
            one.add(group, [group + 1] * 4)
        one.run()
        one.check_outputs()
    assert [r.tokens for r in rig.prompts] == [r.tokens for r in roomy.prompts]
    assert [r.logprobs for r in rig.prompts] == [r.logprobs for r in roomy.prompts]
    assert rig.seen["preempted"] > 0 and roomy.seen["preempted"] == 0
    assert list(rig.scheduler.pool.refs) == [0] * 8 and len(rig.scheduler.pool.free) == 8


@pytest.mark.parametrize("length, hit, copied", [(15, 0, 0), (16, 0, 0), (17, 16, 0), (32, 16, 15), (33, 32, 0), (35, 32, 2)])
@pytest.mark.parametrize("times", [1, 2])
def test_e3_prefix_hits_stop_before_the_last_token(length, hit, copied, times):
    """E3: block 16, the prompt twice in one batch and again later: at least one query token each, outputs of a miss."""
    rig, prompt = Rig(64, 16), [n % 7 + 1 for n in range(length)]
    for group in range(times):
        leader, sibling = rig.add(group, prompt, samples=2)
        work = dict(rig.step())
        assert work[leader] == length - (hit if group else 0), "the first prefill computes all, a later one what was not found"
        assert hit == 0 or sibling not in work, "a sibling that can share waits for the leader's blocks"
        computed = work.get(sibling) or dict(rig.step())[sibling]
        assert computed == length - hit - copied >= 1
        assert (leader.prefix_hits, sibling.prefix_hits) == (hit if group else 0, hit + copied)
        rig.run()
    rig.check_outputs()


def test_e3_different_prompts_in_one_batch():
    """E3 as written: prompts of 15, 16, 17 and 32 tokens at once, each twice, and all again later."""
    rig = Rig(64, 16)
    for _ in range(2):
        for length in (15, 16, 17, 32):
            rig.add(len(rig.prompts), [n % 7 + 1 for n in range(length)], samples=2)
        rig.run()
    rig.check_outputs()
    assert [r.prefix_hits for r in rig.prompts][8:] == [0, 0, 0, 0, 16, 16, 16, 31]


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_e4_prompts_as_large_as_the_pool_and_larger(block_size):
    """E4: 32 slots, prompts of 31, 32, 33, 500 tokens: `length` or a rejection with its reason; others finish; no spin."""
    rig = Rig(32 // block_size, block_size)
    before, = rig.add(0, [1, 2, 3], new=5)
    big = [rig.add(group, [n % 7 + 1 for n in range(length)])[0] for group, length in ((31, 31), (32, 32), (33, 33), (500, 500))]
    after, = rig.add(1, [1, 2, 3], new=5)
    assert rig.run() <= 200
    rig.check_outputs()
    assert [(r.finish_reason, r.num_generated) for r in big] == [
        ("length", 2), ("length", 1), ("rejected: prompt of 33 tokens, pool of 32", 0),
        ("rejected: prompt of 500 tokens, pool of 32", 0)]
    assert [(r.finish_reason, r.num_generated) for r in (before, after)] == [("length", 5)] * 2


def test_empty_prompt_is_rejected_with_its_reason():
    """A prompt without a token has no logits to sample from; its neighbours are unaffected."""
    rig = Rig(8, 4)
    empty, = rig.add(0, [])
    other, = rig.add(1, [1])
    rig.run()
    assert (empty.finish_reason, empty.tokens) == ("rejected: empty prompt", []) and other.finish_reason == "length"


def test_e11_versions_of_a_request_across_a_publication():
    """E11: started at version 7, 8 published after five tokens: versions 7,7,7,7,7,8,8,...; logprobs stay those of their time."""
    rig = Rig(16, 4, version=7)
    request, = rig.add(0, [1, 2, 3, 4, 5])
    for _ in range(5):
        rig.step()
    early = list(request.logprobs)
    rig.publish(8)
    assert request.num_computed == 0 and request.tokens[:5] == [1, 2, 3, 4, 5] and request.num_generated == 5
    assert dict(rig.step()) == {request: 10}, "all its tokens are prefilled again under the new weights"
    rig.run()
    rig.check_outputs()
    assert request.versions == [7] * 5 + [8] * 7 and request.logprobs[:5] == early


def test_a_version_is_published_once():
    """The same version twice would let keys and values of two weights meet under one name."""
    rig = Rig(8, 4, version=7)
    for version in (7, 6):
        with pytest.raises(AssertionError, match=f"version {version} published after 7"):
            rig.scheduler.publish(version)


# --- siblings, chunks, admission


def test_siblings_wait_for_the_leaders_prompt_blocks_and_share_them():
    """Eight samples of a 13-token prompt compute its 12 tokens in full blocks once, also when the budget cuts the prefill."""
    rig = Rig(64, 4, budget=5)
    leader, *siblings = rig.add(0, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6], samples=8, new=3)
    assert dict(rig.step()) == {leader: 5} and dict(rig.step()) == {leader: 5}
    assert rig.scheduler.held == {leader: siblings}
    assert dict(rig.step()) == {leader: 3} and rig.scheduler.held == {}
    rig.step()
    assert all(request.blocks[:3] == leader.blocks[:3] for request in rig.scheduler.running)
    rig.run()
    rig.check_outputs()
    assert [r.prefix_hits for r in (leader, *siblings)] == [0] + [12] * 7


def test_siblings_go_before_the_groups_behind_them():
    """At the end of the queue they would start when the leader's blocks have long been taken for something else."""
    rig = Rig(64, 4, budget=13)
    leader, sibling = rig.add(0, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6], samples=2)
    other, = rig.add(1, [2] * 5)
    rig.step()
    assert dict(rig.step()) == {leader: 1, sibling: 1, other: 5} and rig.scheduler.running == [leader, sibling, other]


@pytest.mark.parametrize("fault", ["preempted", "finished", "another prompt"])
def test_siblings_copy_only_from_a_leader_that_has_the_block(fault):
    """A block that its owner has given back may hold anything; a sibling with other tokens may share only what is equal."""
    rig = Rig(64, 4, budget=9)
    leader, sibling = rig.add(0, [1, 2, 3, 4, 5, 6, 7], samples=2, new=1 if fault == "finished" else 5)
    if fault == "another prompt":
        sibling.tokens[5] = 9
        rig.prompts[sibling] = list(sibling.tokens)
    work = dict(rig.step())
    assert work == {leader: 7} and rig.scheduler.held == {}
    if fault == "preempted":
        rig.scheduler._preempt()
        assert rig.scheduler.waiting[0] is leader and leader.blocks.tolist() == []
        rig.scheduler.waiting.rotate(-1)
        assert rig.scheduler.waiting[0] is sibling
    assert dict(rig.step())[sibling] == 3 and sibling.prefix_hits == 4
    rig.run()
    rig.check_outputs()
    assert rig.seen["copied"] == 0


def test_a_group_without_a_full_prompt_block_starts_at_once():
    """Waiting would gain nothing where nothing can be shared: a prompt of one block leaves no full block before its last token."""
    rig = Rig(64, 4)
    requests = rig.add(0, [1, 2, 3, 4], samples=3)
    assert dict(rig.step()) == dict.fromkeys(requests, 4)


def test_chunked_prefill_under_a_tiny_budget():
    """11 tokens at 3 a step: 3, 3, 3, 2, and only the last chunk draws a token; a decoding neighbour goes first."""
    rig = Rig(16, 4, max_num_seqs=2, budget=3)
    request, = rig.add(0, [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], new=30)
    for computed, generated in ((3, 0), (3, 0), (3, 0), (2, 1), (1, 2)):
        assert dict(rig.step()) == {request: computed} and request.num_generated == generated
    other, = rig.add(1, [2] * 5)
    for chunk in (2, 2, 1):
        assert dict(rig.step()) == {request: 1, other: chunk}
    assert other.num_generated == 1
    rig.run()
    rig.check_outputs()


def test_the_youngest_is_preempted_and_goes_first_again():
    """Preempting the oldest would throw away the most work, and could go round for ever."""
    rig = Rig(4, 2)
    old, young, = *rig.add(0, [1, 2, 3]), *rig.add(1, [2, 3, 1])
    third, = rig.add(2, [3, 3])
    while not young.preemptions:
        rig.step()
    assert old.preemptions == 0 and list(rig.scheduler.waiting) == [young, third] and rig.scheduler.running == [old]
    rig.run()
    assert rig.scheduler.finished == [old, young, third]


def test_min_version_waits_for_its_publication():
    """A group of a later step is not started by older weights, however idle the engine is."""
    rig = Rig(16, 4)
    now, = rig.add(0, [1, 2], new=2)
    later, = rig.add(1, [1, 2], new=2, min_version=2)
    rig.step()
    rig.step()
    assert now.finish_reason == "length" and rig.step() == [] and rig.scheduler.unfinished == 1
    rig.publish(1)
    assert rig.step() == []
    rig.publish(2)
    rig.run()
    assert later.versions == [2, 2]


def test_a_group_ahead_of_its_weights_does_not_block_those_behind_it():
    """A replacement into an older step may start, though a group queued before it waits for the next publication."""
    rig = Rig(16, 4)
    later, = rig.add(0, [1, 2], new=2, min_version=1)
    now, = rig.add(1, [1, 2], new=2, min_version=0)
    rig.step()
    rig.step()
    assert now.versions == [0, 0] and later.versions == []


def test_abort_of_a_leader_ends_its_held_siblings_alone():
    """Held siblings of an aborted leader would wait for ever; another group with the same prompt must not notice."""
    rig, prompt = Rig(16, 4, budget=4), [1, 2, 3, 4, 5, 6, 7, 1, 2]
    group = rig.add(0, prompt, samples=3)
    other = rig.add(1, prompt, samples=2, new=3)
    rig.step()
    assert set(rig.scheduler.held) == {group[0], other[0]} and group[0].num_computed == 4
    rig.scheduler.abort(0)
    rig.check()
    assert [r.finish_reason for r in group] == ["abort"] * 3 and set(rig.scheduler.held) == {other[0]}
    rig.run()
    rig.check_outputs()
    assert other[0].prefix_hits == 4, "the aborted leader's written block may still be shared"


def test_abort_of_an_unknown_group_does_nothing():
    """A late abort of a group that has just finished."""
    rig = Rig(16, 4)
    request, = rig.add(0, [1, 2], new=2)
    rig.run()
    rig.scheduler.abort(0)
    rig.scheduler.abort(5)
    assert request.finish_reason == "length" and rig.scheduler.finished == [request]
