"""The engines and learners that simulate.py sets in motion: how many, what their steps cost, what an engine does next. No torch.

costs.py prices one engine and one learner; here are the things that grow with their number. One store serves all: at 37 MB/s a
step's 400 MB of payloads take 11 s in and 11 s out at 64 GPUs, and 47 minutes each way at 16,384. Every actor rank reports its
digests, every engine asks for messages between two steps, and a GPU dies every 50,000 hours, which is every 3 hours at 16,384.

What the design does then, and is not built yet, is `spread`: a store on each learner node for the payloads of its ranks; and
digests, which are sums, added up among the actors before one engine reports. Checkpoints come at Young's interval, the square root
of 2 x their seconds x the seconds between failures.
"""

import dataclasses
import json
import math
import random
import sys
from collections import Counter
from functools import cached_property
from pathlib import Path

import costs
from balance import Item, plan_micro_batches
from config import Config, ConfigError
from costs import Costs, Workload, itemsize, placed
from hardware import Hardware, along
from scheduler import Request, Scheduler
from shape import Shape

STORE = 37e6  # bytes/s through one TCPStore, measured: 1.3 ms for 48 KB
POLL_S = 53e-6  # of it for one small request, measured
TOKEN_BYTES = 12  # a response token in a payload: id, logprob, version
DIGEST_BYTES = 60  # a parameter's name and digest in an actor's report
HOP_S = 15e-6  # latency of one more receiver in a broadcast's chain
IDLE_S = 1e-3  # between an idle engine's questions
MTBF_H = 50_000.0  # GPU hours between failures: 419 in 54 days on 16,384 (Llama 3, arXiv 2407.21783)
MODES = {"colocated": 0, "sync": 0, "one_step": 1, "async": 2}  # max_staleness, where none is given


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What is simulated. `config` has the layout, also of a colocated run, whose engines and learners share all GPUs."""
    config: Config
    shape: Shape
    hardware: Hardware
    gpus: int
    mode: str = "sync"
    max_staleness: int = 0
    update: str = "recompute"  # as actor.update_mode
    staged: bool = False  # weights arrive beside decoding
    engines: int = 8  # simulated at most
    grain: int = 1
    jumps: bool = True
    slow: tuple[float, float] = (0.0, 1.0)  # share of engines, and times slower
    mtbf_h: float = 0.0  # GPU hours between failures; 0 is none
    restart_s: float = 600.0
    spread: bool = False  # a store on each learner node; actors sum their digests before they report
    seed: int = 0
    lengths: tuple[tuple[int, ...], ...] = ()  # a real run's, by step

    @property
    def total(self) -> int:
        """Engines there are."""
        return self.config.actor.replicas

    @property
    def simulated(self) -> int:
        return min(self.engines, self.total)

    @property
    def learners(self) -> int:
        return self.config.learner.replicas * self.config.learner.shards

    @property
    def groups(self) -> int:
        """Prompt groups a step of the simulated engines."""
        return max(1, round(self.config.rollout.prompts_per_step * self.simulated / self.total))

    @cached_property
    def stores(self) -> int:
        return max(1, self.learners // self.config.plan.gpus_per_node) if self.spread else 1

    @cached_property
    def costs(self) -> Costs:
        config = self.config
        return Costs(self.shape, self.hardware, config.actor.tp, itemsize(config), config.actor.quantization == "fp8")

    @cached_property
    def stretch(self) -> float:
        """Seconds of an engine by those derived, where its speed with full slots is given."""
        config, work = self.config, Workload.of(self.config)
        if not config.plan.decode_tokens_per_gpu:
            return 1.0
        context = dataclasses.replace(work, groups=1024, samples=1).running_context()  # of fewer lengths, but the same
        derived = costs.mean_field(config, self.shape, self.hardware, context)
        return work.generated / (config.plan.decode_tokens_per_gpu * config.actor.replicas * config.actor.tp) / derived

    @cached_property
    def pool(self) -> tuple[int, ...]:
        """Response lengths to draw from."""
        return dataclasses.replace(Workload.of(self.config), groups=1024, samples=1).lengths()

    def draw(self, group: int, step: int) -> list[int]:
        """A group's response lengths: the same in every mode."""
        pool = self.lengths[min(step, len(self.lengths) - 1)] if self.lengths else self.pool
        return random.Random(f"{self.seed} {group}").choices(pool, k=self.config.rollout.samples_per_prompt)

    def scheduler(self) -> Scheduler:
        actor, config = self.config.actor, self.config
        kv = costs.actor_memory(config, self.shape, costs.beside_learner(config, self.shape, self.hardware), actor.tp)["kv"]
        size = max(1, actor.block_size // self.grain)
        blocks = round(kv / self.costs.kv) // (size * self.grain)
        if blocks * size * self.grain < config.max_model_len:
            raise ConfigError(f"{self.mode}: the KV pool of {max(0, blocks) * size * self.grain} tokens holds no longest sequence")
        return Scheduler(blocks, size, actor.max_num_seqs, actor.max_num_batched_tokens, update_mode=self.update)

    def step_seconds(self, decoding: int, context: float, prefill: int, begun: int) -> float:
        """Of one engine step: rows that decode with `context` keys in all, and `prefill` tokens, of which `begun` rows catch up."""
        if prefill and "prefill" in self.hardware.curves:
            return self.costs.prefill(prefill + decoding, 0)
        rows = decoding + begun * (1 - 1 / self.grain)
        seconds = self.grain * self.costs.decode(rows, context) if rows else 0.0
        seconds += self.costs.prefill(prefill, Workload.of(self.config).prompt / 2) if prefill else 0.0
        return max(seconds * self.stretch, self.grain * self.total * POLL_S / self.stores * (not self.hardware.curves))

    def payload_seconds(self, tokens: int) -> float:
        """Of a group in the store, for all that the simulated ones stand for."""
        if self.hardware.curves:
            return self.hardware.curves.get("sample_s", 0.0) / 2 * self.config.rollout.samples_per_prompt
        return tokens * TOKEN_BYTES / (STORE * self.stores) * self.total / self.simulated

    @cached_property
    def publish_s(self) -> float:
        """Wire, the chain of receivers (Laminar, arXiv 2510.12633 app. D), and the proof: a report of every actor rank."""
        if "publish_s" in self.hardware.curves:
            return self.hardware.curves["publish_s"]
        config, weights = self.config, self.shape.parameters * itemsize(self.config)
        network = "nvlink" if self.gpus <= config.plan.gpus_per_node else "infiniband"
        wire = costs.publish_seconds(config, weights, costs.networks(config, self.hardware, weights)[network])["lanes"]
        more, reports = max(0, self.total - 1), config.actor.tp * (1 if self.spread else self.total)
        proof = reports * DIGEST_BYTES * (9 * self.shape.layers + 3) / STORE * config.publish.verify
        return wire + more * HOP_S + 2 * math.sqrt(more * wire * HOP_S) + proof

    @cached_property
    def checkpoint_s(self) -> float:
        nodes = max(1, self.learners // self.config.plan.gpus_per_node)
        return 12 * self.shape.parameters / (nodes * self.config.plan.storage_gb_s * 1e9)

    def train_seconds(self, groups: list[list[int]]) -> float:
        """An update on these sequences: micro-batches are collectives, so each takes what its slowest rank takes."""
        config, curves, ranks = self.config, self.hardware.curves, max(1, round(self.learners * self.simulated / self.total))
        mean = costs.train_seconds(config, self.shape, self.hardware, Workload.of(config), config.learner.replicas,
                                   config.learner.shards)
        flops = [self.shape.forward_flops(length, length * (length + 1) // 2) for group in groups for length in group]
        items = [Item(number, length, cost) for (number, length), cost in zip(
            ((number, length) for number, group in enumerate(groups) for length in group), flops, strict=True)]
        speed = self.hardware.flops * config.plan.learner_mfu / (4 if config.algorithm.kl_coef else 3)

        def seconds(batch: list[int]) -> float:
            if not curves:
                return sum(items[index].cost for index in batch) / speed
            tokens = sum(items[index].tokens for index in batch)
            return along(curves["forward"], tokens) + along(curves["backward"], tokens) if tokens else 0.0

        plan = plan_micro_batches(items, ranks, config.learner.max_tokens_per_micro_batch)
        wire = mean.traffic_s / mean.micro_batches
        spent = sum(max(wire, *(seconds(batch) for batch in turn)) for turn in zip(*plan, strict=True))
        mine = self.total * ranks / self.simulated / self.learners  # whole ranks stand for a share of them
        return spent * mine + mean.optimizer_s


class Account(Counter):
    """Seconds by kind, without gaps: what has passed since the last entry goes under the next."""

    def __init__(self, **seconds):
        super().__init__(**seconds)
        self.clock = 0.0

    def book(self, kind: str, now: float) -> None:
        self[kind] += now - self.clock
        self.clock = now


class Engine:
    """One rollout engine: the scheduler decides, the scenario says what it takes."""

    def __init__(self, run, number: int, slowness: float, stands_for: float):
        self.run, self.number, self.slowness, self.stands_for = run, number, slowness, stands_for  # run: simulate.Run
        self.account, self.busy = Account(), False
        self.slots = run.scenario.config.actor.max_num_seqs
        self.restart(0)

    def restart(self, version: int) -> None:
        self.scheduler = self.run.scenario.scheduler()
        self.scheduler.version, self.settled, self.busy = version, False, False
        self.jump: tuple | None = None
        self.inbox: list[list[Request]] = []
        self.grading: list[int] = []  # groups in or before the graders, oldest first; those of this step come after a look at them
        self.fresh: list[int] = []
        self.coming: int | None = None  # a version that was announced and is not live
        self.arrived = False

    def nudge(self, now: float) -> None:
        """Something has arrived: an idle engine sees it now, one in a jump at its next step boundary."""
        if not self.busy:
            self.boundary(now)
        elif self.jump:
            start, steps, seconds = self.jump
            low, high = 1, steps
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if start + seconds(middle) >= now else (middle + 1, high)
            if low < steps:
                self.jump = start, low, seconds
                self.run.at(start + seconds(low), self.land, self.jump)

    def boundary(self, now: float) -> None:
        """Between two steps: a graded group from each worker into the store, which the engine waits for; then go on."""
        if not self.busy:
            self.run.book_idle(self.account, now)
        self.busy, most = True, self.run.scenario.config.reward.workers * self.run.scenario.grain
        graded, self.grading = self.grading[:most], self.grading[most:] + self.fresh
        self.fresh = []
        if graded:
            self.run.at(self.run.store(self, graded, now), self.go_on)
        else:
            self.go_on(now)

    def go_on(self, now: float) -> None:
        """Take messages in, then a publication, then compute."""
        self.account.book("exchange", now)
        self.busy = False
        for requests in self.inbox:
            self.scheduler.add(requests)
            self.settled = False
        self.inbox = []
        if self.coming is not None:
            self.scheduler.announce()
            if self.arrived and self.scheduler.may_swap:
                self.busy = True
                self.run.acknowledge(self, now)
                return
        if self.scheduler.idle:
            if self.grading:
                self.run.at(now + IDLE_S, self.look)
            return
        self.busy, steps = True, self.steps_alike() if self.run.scenario.jumps else 1
        if steps > 1:
            running, grain = self.scheduler.running, self.run.scenario.grain
            rows, keys = len(running), grain * sum(request.num_computed for request in running)

            def seconds(count: int) -> float:
                return count * self.seconds(rows, keys + rows * (count * grain + 1) / 2, 0, 0)

            self.jump = now, steps, seconds
            self.run.at(now + seconds(steps), self.land, self.jump)
            return
        before = len(self.scheduler.waiting), len(self.scheduler.running), len(self.scheduler.held)
        batch, grain = self.scheduler.schedule(), self.run.scenario.grain
        decoding = [request for request in batch if request.num_scheduled == 1 and request.num_generated]
        tokens = grain * (sum(request.num_scheduled for request in batch) - len(decoding))
        begun = sum(request.catches_up for request in batch) - len(decoding)
        context = sum(request.num_computed * grain + (grain + 1) / 2 for request in decoding)
        seconds = self.seconds(len(decoding), context, tokens, begun)
        self.run.at(now + seconds, self.commit, batch, before, "prefill" if tokens else "decode")

    def look(self, now: float) -> None:
        """An idle engine asks its graders."""
        if not self.busy and self.grading:
            self.boundary(now)

    def seconds(self, *what: float) -> float:
        return self.slowness * self.run.scenario.step_seconds(*what)

    def steps_alike(self) -> int:
        """Steps until one of the running ends or blocks run short, if nothing waiting can be admitted before; else 1."""
        scheduler, running = self.scheduler, self.scheduler.running
        stuck = not scheduler.waiting or len(running) >= scheduler.max_num_seqs or self.settled
        if self.grading or not (stuck and running) or any(len(r.tokens) - r.num_computed != 1 for r in running):
            return 1
        steps = min(min(r.max_new_tokens - r.num_generated, scheduler.capacity + 1 - len(r.tokens)) for r in running)
        pool = scheduler.pool
        while steps > 1 and sum(pool.blocks_for(r.num_computed + steps) - len(r.blocks) for r in running) > len(pool.free):
            steps //= 2
        return steps

    def land(self, now: float, jump: tuple) -> None:
        if self.jump is not jump:
            return  # it was cut short
        steps, scheduler, self.jump = jump[1], self.scheduler, None
        for request in scheduler.running:
            request.tokens += [self.token(request)] * (steps - 1)
        budget, scheduler.max_num_batched_tokens = scheduler.max_num_batched_tokens, sys.maxsize
        batch = scheduler.schedule()
        scheduler.max_num_batched_tokens = budget
        assert {request.num_scheduled for request in batch} == {steps}, "steps that were not alike"
        self.commit(now, batch, (), "decode")

    def token(self, request: Request) -> int:
        """Different for every sample, so that none finds another's keys and values beyond the prompt."""
        return -1 - request.group * self.run.scenario.config.rollout.samples_per_prompt - request.sample

    def commit(self, now: float, batch: list[Request], before: tuple, kind: str) -> None:
        scheduler, run = self.scheduler, self.run
        seconds = now - self.account.clock
        run.slot_seconds += self.stands_for * seconds * min(1.0, len(batch) / self.slots)
        run.step_seconds += self.stands_for * seconds
        self.account.book(kind, now)
        scheduler.commit(batch, [(self.token(request), 0.0) for request in batch if request.catches_up])
        finished, scheduler.finished = scheduler.finished, []
        # Had the budget been short, some would not have decoded: what was not admitted did not fit, and will not while these grow.
        after = len(scheduler.waiting), len(scheduler.running), len(scheduler.held)
        self.settled = kind == "decode" and not finished and before == after
        self.fresh = run.completed(finished)
        self.boundary(now)

    def publish(self, version: int) -> None:
        self.scheduler.publish(version)
        self.coming, self.arrived, self.settled = None, False, False


def scaled(config: Config, gpus: int, mode: str) -> Config:
    """As many times the engines, HSDP copies and prompts as GPUs; colocated ones all act, and all learn. Raises ConfigError."""
    if config.placement not in ("split", mode):
        raise ConfigError(f"{mode}: `placement` = {config.placement} does not say which GPUs act and which learn; set split")
    times, rest = divmod(gpus, config.world_size)
    learner, tp = config.learner, config.actor.tp
    if rest or not times:
        raise ConfigError(f"{gpus} GPUs are no multiple of the config's {config.world_size}")
    placement = config.actor.replicas * times, tp, learner.replicas * times, learner.shards
    if mode == "colocated":
        if config.world_size % learner.replicas or gpus % tp:
            raise ConfigError(f"colocated: {gpus} GPUs divide neither into engines of {tp} nor into {learner.replicas} learners")
        placement = gpus // tp, tp, learner.replicas * times, config.world_size // learner.replicas
    prompts = config.rollout.prompts_per_step * times
    there = placed(config, placement, mode == "colocated")
    return dataclasses.replace(there, rollout=dataclasses.replace(config.rollout, prompts_per_step=prompts))


def goodput(step_s: float, every: int, checkpoint_s: float, mtbf_s: float, restart_s: float, seed: int = 0,
            segments: int = 1000) -> float:
    """Share of the time in which steps are made that stay, with a checkpoint every so many of them and failures at random."""
    chance, clock = random.Random(f"{seed} failures"), 0.0
    segment, failure = every * step_s + checkpoint_s, chance.expovariate(1 / mtbf_s)
    if segment > 7 * mtbf_s:
        return 0.0  # of a thousand segments one is not hit
    for _ in range(segments):
        while failure < clock + segment:
            clock = failure + restart_s
            failure = clock + chance.expovariate(1 / mtbf_s)
        clock += segment
    return segments * every * step_s / clock


def best_interval(step_s: float, checkpoint_s: float, mtbf_s: float) -> int:
    """Steps between checkpoints that lose least: Young 1974."""
    return max(1, round(math.sqrt(2 * checkpoint_s * mtbf_s) / step_s))


def trace(run: str) -> tuple[tuple[int, ...], ...]:
    """Response lengths of a run's logged samples, by step. Raises ConfigError."""
    file, lengths = Path(run) / "rollouts.jsonl", {}
    if not file.is_file():
        raise ConfigError(f"no {file}: a run writes it if `log.samples_per_step` > 0")
    for row in map(json.loads, file.read_text().splitlines()):
        lengths.setdefault(row["step"], []).append(len(row["versions"]))
    return tuple(tuple(lengths[step]) for step in sorted(lengths))
