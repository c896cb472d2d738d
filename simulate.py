"""A run on a fake clock: the real scheduler and release gate, and the seconds that plan.py's costs give to what they decide.

    python simulate.py configs/llama3.1-70b-64xh100.yaml [section.key=value ...] [--mode async --staleness 2]
    python simulate.py configs/llama3.1-70b-64xh100.yaml --sweep-gpus 64,256,1024,4096,16384 --plot scale.png
    python simulate.py configs/toy.yaml plan.hardware=toy.json --lengths runs/toy      # with a real run's lengths

plan.py averages; here every sample has a length of its own, every engine its own queue, and a step waits for the last of them. What
happens is a heap of events: an engine's step ends, a group's payload is in the store, a publication is acknowledged, a GPU dies.
Nothing decides here but scheduler.Scheduler (admission, blocks, preemption), scheduler.ReleaseGate and balance.plan_micro_batches.

Three things make 16,384 GPUs of a 70B affordable, of which the first is exact:

jumps      from one admission, end or shortage of blocks to the next, all steps of an engine are alike. The scheduler's one formula
           takes them at once: k - 1 tokens are appended, and the next schedule() is of k tokens a request.
grain      lengths in units of g tokens, at 128 3 % of a mean response; a step of the scheduler then stands for g.
engines    beyond `--engines` each stands for many. The last of all to finish is estimated as the mean of those simulated plus as
           many standard deviations as the largest of n normal numbers lies above their mean: 1.6 for 12, 3.2 for 768.
"""

import argparse
import heapq
import json
import math
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count

from config import ConfigError
from costs import Workload
from fleet import MODES, MTBF_H, Account, Engine, Scenario, best_interval, goodput, scaled, trace
from scheduler import ReleaseGate, Request
from settings import parse
from sheet import case_of


class Run:
    """The heap of events, and rank 0's loop: release, wait, train, publish."""

    def __init__(self, scenario: Scenario, steps: int):
        self.scenario, self.steps, self.era = scenario, steps, 0
        self.heap: list[tuple[float, int, int, Callable, tuple]] = []
        self.order = count()
        self.gate = ReleaseGate(scenario.groups, scenario.max_staleness, steps + scenario.max_staleness + 1)
        self.learner, self.store_free, self.ready_at = Account(), 0.0, 0.0
        self.slot_seconds = self.step_seconds = 0.0
        self.next_group, self.waiting = 0, False
        self.home: dict[int, int] = {}  # group -> engine
        self.samples: dict[int, list[Request]] = {}  # group -> finished
        self.arrivals: dict[int, list[tuple[float, int]]] = {}  # step -> (time, engine)
        self.rows: list[dict] = []
        self.staleness: Counter[int] = Counter()
        self.failures = self.preemptions = 0
        share, factor = scenario.slow
        slow, n, total = round(share * scenario.total), scenario.simulated, scenario.total
        few = 0 if not slow else min(n, max(1, round(slow * n / total)))
        self.engines = [Engine(self, number, factor if number < few else 1.0,
                               slow / few if number < few else (total - slow) / (n - few)) for number in range(n)]
        self.saved: tuple = 0, {}, {}, 0, {}
        self.chance = random.Random(f"{scenario.seed} failures")
        self.marks: list[tuple[float, Counter, Counter]] = []
        self.to_swap, self.deferred = 0, False

    # Events.

    def at(self, time: float, call: Callable, *arguments, era: int | None = None) -> None:
        """Call at `time`, unless a failure comes first; what is due at the same time goes in the order asked for."""
        heapq.heappush(self.heap, (time, next(self.order), self.era if era is None else era, call, arguments))

    def play(self) -> dict:
        """Until `steps` updates are done. Raises ConfigError if failures leave no time for them."""
        self.at(0.0, self.assign)
        self.at(self.lifetime(), self.fail, era=-1)
        while len(self.rows) < self.steps:
            time, _, era, call, arguments = heapq.heappop(self.heap)
            if era in (self.era, -1):
                call(time, *arguments)
            if self.failures > 200 * self.steps:
                raise ConfigError(f"{self.failures} failures and {len(self.rows)} steps kept: lower `checkpoint.every`")
        return self.result()

    def lifetime(self) -> float:
        rate = self.scenario.gpus / self.scenario.mtbf_h / 3600 if self.scenario.mtbf_h else 0.0
        return self.chance.expovariate(rate) if rate else math.inf

    # Rank 0 and the learners.

    def assign(self, now: float) -> None:
        for step in self.gate.due():
            self.gate.release(self.next_group, step)
            self.send(self.next_group, step)
            self.next_group += 1
        for engine in self.engines:
            if engine.inbox:
                engine.nudge(now)
        self.waiting = True
        self.check(now)

    def send(self, group: int, step: int) -> None:
        """To the engine with the fewest groups out."""
        scenario, out = self.scenario, Counter(self.home.values())
        engine = min(self.engines, key=lambda engine: out[engine.number])
        self.home[group], self.samples[group] = engine.number, []
        prompt = max(1, round(Workload.of(scenario.config).prompt / scenario.grain))
        engine.inbox.append([Request(group, number, [group] * prompt, max(1, round(length / scenario.grain)),
                                     min_version=max(0, step - scenario.max_staleness))
                             for number, length in enumerate(scenario.draw(group, step))])

    def completed(self, finished: list[Request]) -> list[int]:
        """The groups whose last sample is among these."""
        groups = []
        for request in finished:
            self.samples[request.group].append(request)
            self.preemptions += request.preemptions
            if len(self.samples[request.group]) == self.scenario.config.rollout.samples_per_prompt:
                groups.append(request.group)
        return groups

    def store(self, engine: Engine, groups: list[int], now: float) -> float:
        """Put payloads into the store, which serves one after the other; returns when the last is there."""
        for group in groups:
            tokens = self.scenario.grain * sum(request.num_generated for request in self.samples[group])
            now = self.store_free = max(now, self.store_free) + self.scenario.payload_seconds(tokens)
            self.at(now, self.arrive, group, engine.number)
        return now

    def arrive(self, now: float, group: int, engine: int) -> None:
        step = self.gate.arrive(group, "trained")
        del self.home[group]
        self.arrivals.setdefault(step, []).append((now, engine))
        self.check(now)

    def check(self, now: float) -> None:
        if self.waiting and self.gate.ready():
            self.waiting = False
            self.at(max(now, self.last_of_all()), self.ready)

    def last_of_all(self) -> float:
        """When the last group of the current step is back from all the engines that the simulated ones stand for."""
        ends: dict[int, float] = {}
        for time, engine in self.arrivals.get(self.gate.version, []):
            ends[engine] = max(time, ends.get(engine, 0.0))
        latest, spread = 0.0, 0.0
        for slowness in sorted({engine.slowness for engine in self.engines}):  # the slow ones are too few for a spread of their own
            alike = [engine for engine in self.engines if engine.slowness == slowness and engine.number in ends]
            found, number = [ends[engine.number] for engine in alike], sum(engine.stands_for for engine in alike)
            spread = statistics.stdev(found) if len(found) > 1 else spread
            if number > len(found) > 0:
                lifted = statistics.NormalDist().inv_cdf((number - 0.375) / (number + 0.25))  # Blom 1958
                latest = max(latest, statistics.mean(found) + lifted * spread)
        return latest

    def ready(self, now: float) -> None:
        """The step's groups are there; the last tenth of them is the tail."""
        times = sorted(time for time, _ in self.arrivals.pop(self.gate.version, [(now, 0)]))
        self.learner.book("rollouts", min(now, max(self.learner.clock, times[len(times) * 9 // 10 - 1])))
        self.learner.book("tail", now)
        self.ready_at = now
        groups = [self.samples[group] for group in self.gate.groups()]
        for group in groups:
            tokens = self.scenario.grain * sum(request.num_generated for request in group)
            self.store_free = max(now, self.store_free) + self.scenario.payload_seconds(tokens)
        lengths = [[self.scenario.grain * len(request.tokens) for request in group] for group in groups]
        self.at(self.store_free, self.train, self.scenario.train_seconds(lengths))

    def train(self, now: float, seconds: float) -> None:
        self.learner.book("store", now)
        self.at(now + seconds, self.announce)

    def announce(self, now: float) -> None:
        """In place: all stop at a boundary, then the wire. Staged: the wire beside decoding, then each swaps by itself. What runs
        ends first in mode `drain`, and staged that is from now on."""
        self.learner.book("train" if not self.deferred else "publish", now)
        self.deferred = self.to_swap > 0  # the staging buffer still holds the version before
        if self.deferred:
            return
        self.to_swap = len(self.engines)
        for engine in self.engines:
            engine.coming = self.gate.version + 1
        if self.scenario.staged:
            self.at(now + self.scenario.publish_s, self.landed)
            self.finish(now)
        else:
            self.landed(now)

    def landed(self, now: float) -> None:
        for engine in self.engines:
            engine.arrived = True
            engine.nudge(now)

    def acknowledge(self, engine: Engine, now: float) -> None:
        if self.scenario.staged:
            copy = 2 * self.scenario.costs.weights / self.scenario.config.actor.tp / self.scenario.hardware.bandwidth
            self.at(now + copy, self.swap, [engine])
            return
        self.to_swap -= 1
        if not self.to_swap:
            self.to_swap = len(self.engines)
            self.at(now + self.scenario.publish_s, self.swap, self.engines)

    def swap(self, now: float, engines: list[Engine]) -> None:
        for engine in engines:
            engine.account.book("publish", now)
            engine.publish(engine.coming)
        self.to_swap -= len(engines)
        if not self.scenario.staged:
            self.learner.book("publish", now)
        for engine in engines:
            engine.go_on(now)
        if not self.scenario.staged:
            self.finish(now)
        elif self.deferred and not self.to_swap:
            self.announce(now)

    def finish(self, now: float) -> None:
        """Close the step's books, save if it is time, go on."""
        step, config = self.gate.version, self.scenario.config
        tokens = 0
        for group in self.gate.train():
            done = self.samples.pop(group)
            stale = step - min(version for request in done for version in request.versions)
            assert stale <= self.scenario.max_staleness, f"group {group} of step {step} is {stale} versions old"
            self.staleness[stale] += 1
            tokens += self.scenario.grain * sum(request.num_generated for request in done)
        self.rows.append({"step": step, "at": now, "tokens": tokens * self.scenario.total / self.scenario.simulated})
        actors = Counter()
        for engine in self.engines:
            if not engine.busy:
                self.book_idle(engine.account, now)
            actors.update({kind: seconds * engine.stands_for for kind, seconds in engine.account.items()})
        self.marks.append((now, actors, Counter(self.learner)))
        saves = self.scenario.mtbf_h and config.checkpoint.every and self.gate.version % config.checkpoint.every == 0
        beside = self.scenario.hardware.curves.get("beside_s", 0.0) + (self.scenario.checkpoint_s if saves else 0.0)
        self.at(now + beside, self.go_on, bool(saves))

    def go_on(self, now: float, saves: bool) -> None:
        self.learner.book("checkpoint" if saves else "report", now)
        if saves:
            running, arrived = self.gate.open_groups()
            self.saved = (self.gate.version, running, arrived, self.next_group, {group: self.samples[group] for group in arrived})
        self.assign(now)

    def book_idle(self, account: Account, now: float) -> None:
        """An engine without work waits for the slowest one, then for the learner."""
        account.book("tail", min(now, max(account.clock, self.ready_at if self.ready_at > account.clock else now * self.waiting)))
        account.book("learner", now)

    def fail(self, now: float) -> None:
        """A GPU dies and with it the job; what was done since the last checkpoint is done again."""
        self.failures += 1
        self.era += 1
        back = now + self.scenario.restart_s
        version, running, arrived, self.next_group, samples = self.saved
        for account in (self.learner, *(engine.account for engine in self.engines)):
            account.book("lost", now)
            account.book("down", back)
        del self.rows[version:], self.marks[version:]
        self.gate.restore(version, running, arrived)
        self.home, self.samples, self.arrivals, self.waiting = {}, dict(samples), {}, False
        self.to_swap, self.deferred, self.store_free, self.ready_at = 0, False, back, back
        for step, _ in arrived.values():
            self.arrivals.setdefault(step, []).append((back, 0))
        for engine in self.engines:
            engine.restart(version)
        for group, step in running.items():
            self.send(group, step)
        self.at(back, self.assign)
        self.at(back + self.lifetime(), self.fail, era=-1)

    # What came of it.

    def result(self) -> dict:
        """Shares of time after the steps in which the pipeline fills; from the start if there are failures."""
        scenario, first = self.scenario, 0 if self.failures else min(self.scenario.max_staleness + 1, self.steps - 1)
        start, actors, learners = self.marks[first - 1] if first else (0.0, Counter(), Counter())
        end, later_actors, later_learners = self.marks[-1]
        seconds, tokens = end - start, sum(row["tokens"] for row in self.rows[first:])
        found = {"mode": scenario.mode, "gpus": scenario.gpus, "engines": scenario.total, "simulated": scenario.simulated,
                 "step_s": seconds / (self.steps - first), "tokens_per_s_per_gpu": tokens / seconds / scenario.gpus,
                 "actors": shares(later_actors, actors), "learners": shares(later_learners, learners)}
        busy = {"actors": ("decode", "prefill", "exchange", "publish"), "learners": ("train", "publish", "report", "checkpoint")}
        idle = {side: 1 - sum(found[side].get(kind, 0.0) for kind in kinds) for side, kinds in busy.items()}
        stale = self.staleness.total()
        return found | {"idle": idle, "empty_slots": 1 - self.slot_seconds / self.step_seconds,
                        "staleness": {"mean": sum(k * n for k, n in self.staleness.items()) / stale, "max": max(self.staleness)},
                        "preemptions": self.preemptions, "failures": self.failures, "steps": self.steps}


def shares(later: Counter, earlier: Counter) -> dict[str, float]:
    spent = {kind: later[kind] - earlier[kind] for kind in later}
    return {kind: seconds / sum(spent.values()) for kind, seconds in sorted(spent.items()) if seconds > 0}


# The command line.

def scenario_of(arguments: list[str], options: argparse.Namespace, mode: str, gpus: int = 0, **more) -> Scenario:
    """Raises ConfigError."""
    case = case_of(parse(arguments))
    gpus = gpus or case.config.world_size
    staleness = MODES[mode] if options.staleness is None or not MODES[mode] else options.staleness
    settings = {"staged": mode == "async", "update": "keep" if mode == "async" else "recompute", "grain": options.grain,
                "engines": options.engines, "slow": tuple(map(float, options.slow.split(":"))), "seed": options.seed,
                "mtbf_h": options.mtbf, "restart_s": options.restart, "spread": options.spread}
    settings |= {"update": options.update} if options.update else {}
    settings |= {"staged": options.publish == "staged"} if options.publish else {}
    return Scenario(scaled(case.config, gpus, mode), case.shape, case.hardware, gpus, mode, staleness,
                    lengths=trace(options.lengths) if options.lengths else (), **settings | more)


def simulate(scenario: Scenario, steps: int) -> dict:
    """Shares and rates of `steps` updates after those in which the pipeline fills, and what failures would leave of them."""
    found = Run(scenario, steps + scenario.max_staleness + 1).play()
    apart, every = MTBF_H * 3600 / scenario.gpus, scenario.config.checkpoint.every
    best = best_interval(found["step_s"], scenario.checkpoint_s, apart)
    kept = {interval: goodput(found["step_s"], interval, scenario.checkpoint_s, apart, scenario.restart_s)
            for interval in sorted({1, best, *([every] if every else [])})}
    return found | {"spread": scenario.spread, "publish_s": scenario.publish_s, "goodput": kept, "goodput_every": every,
                    "goodput_best": best}


HEAD = (f"{'GPUs':>6} {'mode':10}{'':7}{'step':>8} {'tok/s/GPU':>10} | actors: {'idle':>5} {'tail':>5} {'learner':>7} | learners: "
        f"{'idle':>5} {'rollouts':>8} {'tail':>5} {'store':>5} {'publish':>7} | {'stale':>5} {'empty':>5} | goodput")


def line(found: dict) -> str:
    """One row under HEAD, in per cent where no unit stands."""
    actors, learners = found["actors"], found["learners"]
    kept = ", ".join(f"{share:.1%} at {every}" for every, share in found["goodput"].items())
    return (f"{found['gpus']:>6} {found['mode']:10}{'spread' if found['spread'] else '':7}{found['step_s']:>7.4g}s "
            f"{found['tokens_per_s_per_gpu']:>10.1f} | {'':7} {found['idle']['actors']:>5.1%} {actors.get('tail', 0):>5.1%} "
            f"{actors.get('learner', 0):>7.1%} | {'':9} {found['idle']['learners']:>5.1%} {learners.get('rollouts', 0):>8.1%} "
            f"{learners.get('tail', 0):>5.1%} {learners.get('store', 0):>5.1%} {learners.get('publish', 0):>7.2%} | "
            f"{found['staleness']['mean']:>5.2f} {found['empty_slots']:>5.1%} | {kept}")


def plot(rows: list[dict], file: str) -> None:
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), constrained_layout=True)
    for number, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
        for spread in (False, True):
            mine = [row for row in rows if row["mode"] == mode and row["spread"] == spread]
            every = "goodput_best" if spread else "goodput_every"
            panels = [[row["tokens_per_s_per_gpu"] * row["goodput"].get(row[every], 1.0) for row in mine],
                      *([100 * row["idle"][side] for row in mine] for side in ("actors", "learners"))]
            for panel, values in zip(axes, panels, strict=True):
                panel.plot([row["gpus"] for row in mine], values, "o-" if spread else "o--", color=f"C{number}",
                           alpha=1 if spread else 0.5, label=f"{mode}{', spread' if spread else ''}")
    for panel, title in zip(axes, ("response tokens/s a GPU, failures counted", "actors idle, %", "learners idle, %"), strict=True):
        panel.set(xscale="log", xlabel="GPUs", title=title, ylim=(0, None))
    axes[0].legend(fontsize=7)
    figure.savefig(file, dpi=90)


def main(argv: list[str]) -> int:
    """0, or 2 for a config that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="*", help="a .yaml and section.key=value overrides")
    parser.add_argument("--mode", choices=MODES, action="append", help="again for another one; default: all of the placement")
    parser.add_argument("--staleness", type=int, help="max_staleness of one_step and async")
    parser.add_argument("--update", choices=("recompute", "drain", "keep"), help="of running requests (async: keep)")
    parser.add_argument("--publish", choices=("in_place", "staged"), help="default in async: staged")
    parser.add_argument("--steps", type=int, default=3, help="updates after those in which the pipeline fills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grain", type=int, default=1, help="tokens taken for one")
    parser.add_argument("--engines", type=int, default=8, help="engines simulated; more are represented by them")
    parser.add_argument("--slow", default="0:1", metavar="SHARE:TIMES", help="share of slow engines, and how many times slower")
    parser.add_argument("--mtbf", type=float, default=0.0, metavar="GPU_HOURS", help="fail at random during the run; 0 never")
    parser.add_argument("--restart", type=float, default=600.0, metavar="SECONDS", help="from a failure to the next step")
    parser.add_argument("--spread", action="store_true", help="a store on each learner node, digests summed among actors")
    parser.add_argument("--lengths", metavar="RUN", help="response lengths from RUN/rollouts.jsonl")
    parser.add_argument("--sweep-gpus", metavar="A,B,C", help="the config scaled to so many GPUs, each as it is and spread")
    parser.add_argument("--plot", metavar="FILE", help="PNG of a sweep")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_intermixed_args(argv)
    sizes = [(int(size), spread) for size in (options.sweep_gpus or "").split(",") if size for spread in (False, True)]
    rows = []
    try:
        for mode in options.mode or (["colocated"] if parse(options.config).placement == "colocated" else MODES):
            for gpus, spread in sizes or [(0, options.spread)]:
                rows.append(simulate(scenario_of(options.config, options, mode, gpus, spread=spread), options.steps))
                if not options.json:
                    print(*([HEAD] if len(rows) == 1 else []), line(rows[-1]), sep="\n", flush=True)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(rows, indent=1))
    if options.plot:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
