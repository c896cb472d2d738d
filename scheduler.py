"""Which tokens the engine computes next, where their keys and values live, and which prompts may leave at all.

Pure Python, no torch: property-tested alone, and drivable with a fake clock.

There are no prefill and decode phases. A request has `len(tokens)` tokens, of which `num_computed` have keys and values in the
cache; every step moves `num_computed` towards `len(tokens)` under a token budget. Chunked prefill, prefix hits, preemption
and the restart after a weight update are all this one formula with another starting value.

KV memory is a pool of blocks of `block_size` tokens (16 tokens of a 70B are 5.2 MB). A request's `blocks` is its table; full blocks
can be shared. What differs from vLLM: a shared block is found by exact content, not by a hash that may collide - its key is
(identity of the parent block, its tokens), and the first parent is the weight version, so that keys and values of two versions
never mix. Of a prompt's last, partial block each sibling of a running leader gets a copy, made before the step in which it starts:
of 8 samples of 60 tokens in blocks of 8 that saves the other 7 some 4 rows each. Nobody writes to a block that others read.

New weights arrive between two steps. In mode `recompute` running requests go back to prefill all their tokens, in `drain` they
finish first while nothing new is admitted, in `keep` (PipelineRL, arXiv 2509.19128) they go on over their old keys and values.
Recompute costs a prefill of all that runs: 200 requests of a 70B at 4k tokens are 1.1e17 FLOP, 23 s on 8 H200 at 600 TFLOP/s. Drain
costs the tail, as the batch shrinks to its longest response. Keep costs neither, and pays with a gap between engine and learner.

`ReleaseGate` is the one mechanism behind on-policy and off-policy training, whatever the bound.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, count


@dataclass(slots=True, eq=False)
class Request:
    """One sample: append-only `tokens` (prompt first), and what has happened to it so far."""
    group: int
    sample: int
    tokens: list[int]
    max_new_tokens: int
    temperature: float = 1.0  # 0 is greedy
    stop_ids: frozenset[int] = frozenset()
    min_version: int = 0  # an engine with older weights does not admit it
    top_k: int = 0  # 0, 1.0 and 0.0 keep the whole distribution
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # of its random numbers; None is the engine's
    watch: Callable[[int], bool] | None = None  # called with each new token; true ends the response
    num_prompt: int = field(init=False)
    num_computed: int = 0
    num_scheduled: int = 0
    blocks: array = field(default_factory=lambda: array("i"))  # int32, copied whole into the step's tables
    chain: list[int] = field(default_factory=list)  # identity of each full block, in order
    leader: "Request | None" = None  # the sibling that computes the prompt for all
    source: int = -1  # before this step, the block of position `num_computed` becomes a copy of that one
    start_version: int = 0  # weights under which the current prefill began
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""  # stop, length, abort, or why the prompt was rejected
    preemptions: int = 0
    prefix_hits: int = 0  # tokens whose keys and values came from the table, or from the leader's partial block

    def __post_init__(self):
        self.num_prompt = len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def catches_up(self) -> bool:
        """Whether the scheduled tokens end at the last known one, so that its logits are sampled from."""
        return self.num_computed + self.num_scheduled == len(self.tokens)


class BlockPool:
    """KV blocks with reference counts, an ordered free list, and a table of the full blocks that can be shared.

    A free block keeps its content, and its entry in the table, until it is taken for something else; the free list is ordered so
    that the longest unused goes first, and of one sequence the tail before the head.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.refs = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.table: dict[tuple[int, tuple[int, ...]], int] = {}
        self._key: list[tuple[int, tuple[int, ...]] | None] = [None] * num_blocks
        self._identity = [-1] * num_blocks
        self._fresh = count()

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self) -> int:
        """A private block, with its former content forgotten. The free list must not be empty."""
        block, _ = self.free.popitem(last=False)
        if self._key[block] is not None:
            del self.table[self._key[block]]
            self._key[block] = None
        self.refs[block] = 1
        return block

    def share(self, block: int) -> None:
        if self.refs[block] == 0:
            del self.free[block]
        self.refs[block] += 1

    def release(self, blocks: array) -> None:
        """Give back one reference to each; the only way in which blocks become free."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            assert self.refs[block] >= 0, f"block {block} released twice: two requests would write to it"
            if self.refs[block] == 0:
                self.free[block] = None

    def find(self, parent: int, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        """(block, identity) of the registered block with these tokens behind that parent."""
        block = self.table.get((parent, tokens))
        return None if block is None else (block, self._identity[block])

    def register(self, block: int, parent: int, tokens: tuple[int, ...]) -> int:
        """Offer a full, written block for sharing; returns the identity of that content (an equal block's, if one is known)."""
        known = self.find(parent, tokens)
        if known:
            return known[1]
        key = (parent, tokens)
        self.table[key], self._key[block], self._identity[block] = block, key, next(self._fresh)
        return self._identity[block]

    def forget(self) -> None:
        """Empty the table: after a weight update no cached key or value may be found again."""
        self.table.clear()
        self._key = [None] * self.num_blocks


class Scheduler:
    """Requests of one engine: waiting, held back for a sibling's prefill, running, finished.

    Each engine step calls `schedule()`, computes what it returns, and hands the sampled tokens to `commit()`.
    """

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, version: int = 0,
                 update_mode: str = "recompute"):
        self.pool = BlockPool(num_blocks, block_size)
        self.update_mode, self.draining = update_mode, False
        self.capacity = num_blocks * block_size
        self.max_num_seqs, self.max_num_batched_tokens, self.version = max_num_seqs, max_num_batched_tokens, version
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest admission first
        self.held: dict[Request, list[Request]] = {}  # leader of a group -> siblings waiting for its prompt blocks
        self.finished: list[Request] = []  # taken (and cleared) by the caller

    def add(self, requests: list[Request]) -> None:
        """Queue the samples of one group. A prompt that can never fit finishes at once with the reason."""
        fitting = []
        for request in requests:
            if request.num_prompt == 0:
                self._finish(request, "rejected: empty prompt")
            elif request.num_prompt > self.capacity:
                self._finish(request, f"rejected: prompt of {request.num_prompt} tokens, pool of {self.capacity}")
            else:
                fitting.append(request)
        self.waiting.extend(self._lead(fitting))

    def abort(self, group: int) -> None:
        """Between steps: end every unfinished request of a group with reason `abort`; others are unaffected."""
        gone = [r for r in chain(self.running, self.waiting, *self.held.values()) if r.group == group]
        self.running = [r for r in self.running if r.group != group]
        self.waiting = deque(r for r in self.waiting if r.group != group)
        self.held = {leader: siblings for leader, siblings in self.held.items() if leader.group != group}
        for request in gone:
            self._finish(request, "abort")

    @property
    def unfinished(self) -> int:
        return len(self.running) + len(self.waiting) + sum(map(len, self.held.values()))

    @property
    def idle(self) -> bool:
        """Whether a step would do nothing: no request, or only such as wait for newer weights."""
        return not self.finished and not self.running and not any(map(self._admits, self.waiting))

    @property
    def may_swap(self) -> bool:
        """Between steps: whether `publish` may be called. While draining, not before every sample that was begun has ended."""
        return not self.draining or not (self.running or any(request.num_generated for request in self.waiting))

    def _admits(self, request: Request) -> bool:
        """While draining, only what was preempted in the middle of its response."""
        return request.min_version <= self.version and (not self.draining or request.num_generated > 0)

    def schedule(self) -> list[Request]:
        """Requests to compute now, `num_scheduled` tokens each, blocks for them allocated; those with one token come first."""
        batch, budget, preempted = [], self.max_num_batched_tokens, False
        while len(batch) < len(self.running) and budget:
            request = self.running[len(batch)]
            wanted = min(len(request.tokens) - request.num_computed, budget)
            while self.running[-1] is not request and not self._fits(request, wanted):
                self._preempt()
                preempted = True
            if not self._fits(request, wanted):  # it is the youngest itself
                self._preempt()
                preempted = True
                break
            budget -= self._schedule(request, wanted)
            batch.append(request)
        early: list[Request] = []  # for newer weights; what stands behind them need not wait
        while self.waiting and budget and not preempted and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            if not self._admits(request):
                early.append(self.waiting.popleft())
                continue
            # Admit only what the pool can hold with all its present tokens: half a prefill would be preempted again.
            if not self._adopt_prefix(request):
                break
            self.running.append(self.waiting.popleft())
            budget -= self._schedule(request, min(len(request.tokens) - request.num_computed, budget))
            batch.append(request)
        self.waiting.extendleft(reversed(early))
        return sorted(batch, key=lambda request: request.num_scheduled > 1)

    def commit(self, batch: list[Request], sampled: list[tuple[int, float]]) -> None:
        """Account for a computed batch; `sampled` has (token, logprob) for the requests that caught up, in batch order."""
        size, draws = self.pool.block_size, iter(sampled)
        for request in batch:
            catches_up = request.catches_up
            request.num_computed += request.num_scheduled
            request.num_scheduled, request.source = 0, -1
            fresh = request.start_version == self.version
            assert fresh or self.update_mode == "keep", "keys and values of two weight versions in one chain"
            # What was begun under other weights writes into its own blocks only, and nobody will ever find those.
            for index in range(len(request.chain), request.num_computed // size) if fresh else ():
                content = tuple(request.tokens[index * size:(index + 1) * size])
                request.chain.append(self.pool.register(request.blocks[index], self._parent(request), content))
            if request in self.held and request.num_computed >= request.num_prompt - 1:
                self.waiting.extendleft(reversed(self.held.pop(request)))
            if catches_up:
                self._append(request, *next(draws))

    def announce(self) -> None:
        """A publication is coming: in mode `drain`, running requests finish and no other is admitted until it is there."""
        self.draining = self.update_mode == "drain"

    def publish(self, version: int) -> None:
        """Between steps: new weights are in place and nothing cached may be found; running requests go on as the mode says."""
        assert version > self.version, f"version {version} published after {self.version}"
        assert self.may_swap, "weights swapped under requests that were to finish first"
        self.version, self.draining = version, False
        self.pool.forget()
        # One that has sampled nothing starts anew in every mode: its siblings can then share what it computes.
        kept = [request for request in self.running if self.update_mode == "keep" and request.num_generated]
        requeued = [request for request in self.running if request not in kept]
        groups: dict[int, list[Request]] = {}
        for request in requeued:
            self._reset(request)
        for request in chain(requeued, self.waiting, *self.held.values()):
            groups.setdefault(request.group, []).append(request)
        self.running, self.held = kept, {}
        self.waiting = deque()
        for members in groups.values():
            self.waiting.extend(self._lead(members))

    def _lead(self, members: list[Request]) -> list[Request]:
        """Of a group's requests those that may start now: one, if the others can then share its prompt's full blocks."""
        leader, *siblings = members or [None]
        for request in members:
            request.leader = leader if request is not leader else None
        if not siblings or leader.num_prompt <= self.pool.block_size:
            return members
        self.held[leader] = siblings
        return [leader]

    def _parent(self, request: Request) -> int:
        return request.chain[-1] if request.chain else -1 - request.start_version

    def _adopt_prefix(self, request: Request) -> bool:
        """Take the cached blocks that a waiting request's tokens match, and a copy of the leader's last one of the prompt, if the
        rest then fits; hits stop at len - 1."""
        size, request.start_version = self.pool.block_size, self.version
        hits, parent = [], self._parent(request)
        for index in range((len(request.tokens) - 1) // size):
            hit = self.pool.find(parent, tuple(request.tokens[index * size:(index + 1) * size]))
            if hit is None:
                break
            hits.append(hit)
            parent = hit[1]
        unused = sum(self.pool.refs[block] == 0 for block, _ in hits)
        if self.pool.blocks_for(len(request.tokens)) - len(hits) > len(self.pool.free) - unused:
            return False
        for block, identity in hits:
            self.pool.share(block)
            request.blocks.append(block)
            request.chain.append(identity)
        request.num_computed, leader, known = len(hits) * size, request.leader, request.num_prompt - 1
        if leader and len(hits) == known // size < len(leader.blocks) and leader.num_computed >= known > request.num_computed and (
                leader.tokens[:known] == request.tokens[:known] and leader.start_version == self.version):
            request.source, request.num_computed = leader.blocks[len(hits)], known
            request.blocks.append(self.pool.take())
        request.prefix_hits += request.num_computed
        return True

    def _missing(self, request: Request, tokens: int) -> int:
        return self.pool.blocks_for(request.num_computed + tokens) - len(request.blocks)

    def _fits(self, request: Request, tokens: int) -> bool:
        return self._missing(request, tokens) <= len(self.pool.free)

    def _schedule(self, request: Request, tokens: int) -> int:
        request.blocks.extend(self.pool.take() for _ in range(self._missing(request, tokens)))
        request.num_scheduled = tokens
        return tokens

    def _preempt(self) -> None:
        victim = self.running.pop()
        self._reset(victim)
        victim.preemptions += 1
        self.waiting.appendleft(victim)

    def _reset(self, request: Request) -> None:
        """Back to nothing computed; tokens, logprobs and with them the random position stay."""
        self.pool.release(request.blocks)
        request.blocks, request.chain = array("i"), []
        request.num_computed, request.num_scheduled, request.source = 0, 0, -1

    def _append(self, request: Request, token: int, logprob: float) -> None:
        request.tokens.append(token)
        request.logprobs.append(logprob)
        request.versions.append(self.version)
        watched = request.watch is not None and request.watch(token)
        if token in request.stop_ids or watched:
            reason = "stop"
        elif request.num_generated >= request.max_new_tokens or len(request.tokens) > self.capacity:
            reason = "length"  # the last token needs no slot unless another one follows it
        else:
            return
        self.running.remove(request)
        self._finish(request, reason)

    def _finish(self, request: Request, reason: str) -> None:
        self._reset(request)
        request.finish_reason = reason
        self.finished.append(request)


class ReleaseGate:
    """Lets prompt groups out so that none is trained on by weights more than `max_staleness` updates newer than its start.

    Steps count from 0 and `version` is the number of updates done. The groups of step s are released once
    s - version <= max_staleness; a group's step is fixed at release and step s waits for all its groups, so that nothing is ever
    dropped for its age. Each group ends exactly once: trained, filtered (one replacement is released into the same step) or
    unscored (no reward could be computed; it fills its place in the step without contributing).
    """

    def __init__(self, groups_per_step: int, max_staleness: int, steps: int):
        self.groups_per_step, self.max_staleness, self.steps = groups_per_step, max_staleness, steps
        self.version = 0
        self.ended: Counter[str] = Counter()
        self._running: dict[int, int] = {}  # group -> step
        self._arrived: dict[int, list[tuple[int, str]]] = {}  # step -> (group, outcome)

    def due(self) -> list[int]:
        """The step of each group that may be released now, oldest step first."""
        placed = Counter(self._running.values())
        placed.update({step: len(groups) for step, groups in self._arrived.items()})
        last = min(self.steps - 1, self.version + self.max_staleness)
        return [step for step in range(self.version, last + 1) for _ in range(self.groups_per_step - placed[step])]

    def release(self, group: int, step: int) -> None:
        assert step - self.version <= self.max_staleness, f"group {group} of step {step} released at version {self.version}"
        back = {arrived for groups in self._arrived.values() for arrived, _ in groups}
        assert group not in self._running.keys() | back, f"group {group} released twice"
        assert step in self.due(), f"group {group} released into step {step}, which is full"
        self._running[group] = step

    def step_of(self, group: int) -> int:
        """The step that a released group belongs to. Raises KeyError if it is not out."""
        return self._running[group]

    def arrive(self, group: int, outcome: str) -> int:
        """A finished group comes back as `trained`, `unscored` or `filtered`; returns its step. Raises KeyError if not out."""
        step = self._running.pop(group)
        if outcome == "filtered":
            self.ended[outcome] += 1
        else:
            self._arrived.setdefault(step, []).append((group, outcome))
        return step

    def ready(self) -> bool:
        """Whether every group of the current step is back."""
        return len(self._arrived.get(self.version, [])) == self.groups_per_step

    def groups(self) -> list[int]:
        """The current step's groups that are back, ascending."""
        return sorted(group for group, _ in self._arrived.get(self.version, []))

    def open_groups(self) -> tuple[dict[int, int], dict[int, tuple[int, str]]]:
        """Groups that are out, with their step, and those that are back but not trained, with step and outcome."""
        arrived = {group: (step, outcome) for step, groups in self._arrived.items() for group, outcome in groups}
        return dict(self._running), arrived

    def restore(self, version: int, running: dict[int, int], arrived: dict[int, tuple[int, str]]) -> None:
        """Go on at `version` with the groups that `open_groups` told of then."""
        self.version, self._running, self._arrived = version, dict(running), {}
        for group, (step, outcome) in arrived.items():
            self._arrived.setdefault(step, []).append((group, outcome))

    def train(self) -> list[int]:
        """End the current step's groups and count the update; returns them ascending. The step must be ready."""
        assert self.ready(), f"step {self.version} trained before all its groups were back"
        groups = self.groups()
        self.ended.update(outcome for _, outcome in self._arrived.pop(self.version))
        self.version += 1
        return groups

    @property
    def outstanding(self) -> int:
        """Groups released and not ended: at most (max_staleness + 1) x groups_per_step."""
        return len(self._running) + sum(map(len, self._arrived.values()))
