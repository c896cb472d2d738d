"""simulate.py against closed forms, the bounds of the release gate, its own slow and full ways, and Young's and Daly's formulas."""

import dataclasses
import json
import math
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import costs
import simulate
from config import ConfigError
from costs import Workload
from fleet import IDLE_S, POLL_S, Scenario, best_interval, goodput, scaled
from hardware import load_hardware
from settings import parse
from shape import read_shape
from sheet import case_of
from simulate import Run

SMALL = ["configs/toy.yaml", "plan.hardware=h100", "rollout.prompts_per_step=8", "rollout.samples_per_prompt=4",
         "rollout.max_new_tokens=96", "data.max_prompt_tokens=40", "plan.mean_prompt=40", "plan.mean_response=24",
         "plan.length_sigma=1", "plan.learner_mfu=0.000001", "actor.block_size=8", "actor.max_num_seqs=16", "actor.kv_blocks=400",
         "actor.max_num_batched_tokens=64"]
MODES = [("colocated", {}), ("sync", {}), ("one_step", {"max_staleness": 1}), ("one_step", {"max_staleness": 1, "update": "drain"}),
         ("async", {"max_staleness": 3, "update": "keep", "staged": True}),
         ("async", {"max_staleness": 3, "update": "drain", "staged": True})]
IDS = [f"{mode}-{'-'.join(map(str, more.values()))}" for mode, more in MODES]


def scenario(*overrides: str, mode: str = "sync", gpus: int = 0, **more) -> Scenario:
    case = case_of(parse([*SMALL, *overrides]))
    gpus = gpus or case.config.world_size
    return Scenario(scaled(case.config, gpus, mode), case.shape, case.hardware, gpus, mode, **more)


class Watched(Run):
    """A run whose promises are checked whenever something is released or comes back."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.released, self.returned, self.mixed = Counter(), {}, 0  # group -> times, when; samples of two versions

    def send(self, group, step):
        self.released[group] += 1
        bound = self.scenario.max_staleness
        assert self.gate.outstanding <= (bound + 1) * self.scenario.groups
        assert 0 <= step - self.gate.version <= bound
        super().send(group, step)

    def completed(self, finished):
        self.mixed += sum(len(set(request.versions)) > 1 for request in finished)
        return super().completed(finished)

    def arrive(self, now, group, engine):
        assert group not in self.returned
        self.returned[group] = now
        super().arrive(now, group, engine)


@pytest.mark.parametrize("mode, more", MODES, ids=IDS)
@pytest.mark.parametrize("blocks", [400, 24])
def test_every_group_ends_once_within_the_bound_and_every_second_is_booked(mode, more, blocks):
    """DESIGN 3, with room and with so few blocks that samples are preempted: what simulate.py adds must not bend the gate. The
    learner is fast enough to publish while samples run, and what then becomes of them is the scheduler's update mode."""
    case = scenario(f"actor.kv_blocks={blocks}", "actor.replicas=3", "plan.learner_mfu=0.0001", mode=mode, gpus=4, **more)
    run = Watched(case, 12)
    found = run.play()
    assert (run.preemptions > 0) == (blocks == 24)
    assert set(run.released.values()) == {1} and run.returned.keys() <= run.released.keys()
    assert run.gate.ended == {"trained": 12 * 8} and sum(run.staleness.values()) == 12 * 8
    assert found["staleness"]["max"] <= run.scenario.max_staleness
    assert (found["staleness"]["max"] > 0) == (run.scenario.max_staleness > 0)
    assert (run.mixed > 0) == (run.scenario.max_staleness > 0 and run.scenario.update != "drain"), "a sample of two versions"
    for account in (run.learner, *(engine.account for engine in run.engines)):
        assert sum(account.values()) == pytest.approx(account.clock, rel=1e-9), "seconds that no kind covers"
        assert min(account.values()) >= 0


def test_a_seed_fixes_everything_and_another_one_does_not():
    """Also failures; the same samples in another mode have the same lengths."""
    first, again, other = (Run(scenario(mode="one_step", max_staleness=1, mtbf_h=0.02, restart_s=1.0, seed=seed), 20).play()
                           for seed in (1, 1, 2))
    assert first == again and first != other
    assert scenario(mode="sync", seed=1).draw(7, 0) == scenario(mode="async", seed=1).draw(7, 0) != scenario(seed=2).draw(7, 0)


def test_one_engine_and_equal_lengths_are_the_formula():
    """16 samples of 24 tokens in 16 slots: a step that prefills the four prompts' first samples, one that starts their siblings, 22
    that decode, an end for each; then the store, the update and the publication, in turn."""
    case = scenario("plan.length_sigma=0", "rollout.prompts_per_step=4", "actor.max_num_batched_tokens=2048")
    found = Run(case, 3).play()
    engine = case.costs
    seconds = max(engine.prefill(4 * 40, 20), POLL_S)  # leaders; no step is shorter than its question for messages
    seconds += engine.decode(4, 4 * 41) + engine.prefill(12, 20)  # their second token; siblings start from a copy
    for token in range(2, 24):
        seconds += engine.decode(16, 4 * (40 + token) + 12 * (39 + token))
    seconds += engine.decode(12, 12 * 63)  # the siblings' last one
    seconds += 4 * IDLE_S  # the engine is idle when its grader hands over one group after the other
    payload = 4 * 24 * 12 / 37e6
    flops = 3 * case.shape.forward_flops(64, 64 * 65 // 2) / (case.hardware.flops * 1e-6)
    training = costs.train_seconds(case.config, case.shape, case.hardware, Workload.of(case.config), 1, 1)
    # Of the four payloads three wait for one another, on the way in and again on the way out.
    assert found["step_s"] == pytest.approx(seconds + 8 * payload + 16 * flops + training.optimizer_s + case.publish_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_completion_is_within_roll_flashs_bound(seed):
    """arXiv 2510.11345 prop. 1: Q samples in K slots end within Q/K mean + the longest; and never before Q/K mean."""
    case = scenario("rollout.prompts_per_step=32", "actor.max_num_batched_tokens=8192", seed=seed)
    run = Run(case, 1)
    run.play()
    seconds = sum(run.engines[0].account[kind] for kind in ("prefill", "decode"))
    lengths = [length for group in range(32) for length in case.draw(group, 0)]
    keys = 40 + max(lengths)
    step = case.costs.decode(16, 16 * keys) + case.costs.prefill(16 * 40, 20)
    assert seconds <= (sum(lengths) / 16 + max(lengths) + 2 * 32) * step
    assert seconds >= sum(lengths) / 16 * case.costs.decode(16, 16 * 40)
    played = costs.roll(case.costs, Workload.of(case.config), lengths, 16).seconds  # plan.py's own, without prefill or siblings
    assert seconds == pytest.approx(played, rel=0.15) and seconds > played


@pytest.mark.parametrize("mode, more", MODES, ids=IDS)
@pytest.mark.parametrize("blocks", [400, 24])
def test_jumps_are_step_by_step(mode, more, blocks):
    """Skipping from event to event must not change one decision of the scheduler, shortage and interruption included."""
    cases = [scenario(f"actor.kv_blocks={blocks}", "actor.replicas=2", "plan.learner_mfu=0.0001", mode=mode, gpus=3, jumps=jumps,
                      **more) for jumps in (False, True)]
    slow, fast = (Watched(case, 8) for case in cases)
    calls = Counter()
    for name, run in (("slow", slow), ("fast", fast)):
        for engine in run.engines:
            engine.commit = lambda *a, name=name, commit=engine.commit: (calls.update([name]), commit(*a))
        run.play()
    assert [row["at"] for row in fast.rows] == pytest.approx([row["at"] for row in slow.rows], rel=1e-9)
    assert (fast.preemptions, fast.staleness) == (slow.preemptions, slow.staleness)
    assert fast.returned == pytest.approx(slow.returned, rel=1e-9) and len(fast.returned) >= 8 * 8
    assert calls["fast"] < 0.8 * calls["slow"], "nothing was skipped"


def test_grain_is_within_five_per_cent():
    """Lengths in units of 8 tokens, a third of the mean: as coarse as 256 of 4,096 would be four times over."""
    fine, coarse = (Run(scenario("rollout.prompts_per_step=64", "rollout.max_new_tokens=384", "plan.mean_response=96",
                                 "actor.kv_blocks=2000", "actor.max_num_batched_tokens=8192", grain=grain), 4).play()
                    for grain in (1, 8))
    assert coarse["step_s"] == pytest.approx(fine["step_s"], rel=0.05)
    assert coarse["idle"]["learners"] == pytest.approx(fine["idle"]["learners"], abs=0.05)


@pytest.mark.parametrize("mode, more, error", [(*MODES[1], 0.05), (*MODES[2], 0.15), (*MODES[4], 0.05)],
                         ids=["sync", "one_step", "async"])
def test_represented_engines_are_all_of_them(mode, more, error):
    """4 engines standing for 16, eight samples each: the last of 16 is later than the last of 4, or a step is 7 % too short. Where
    engines work ahead and rollouts still decide, the estimate is on the late side."""
    full, few = (Run(scenario("actor.replicas=16", "rollout.prompts_per_step=64", "rollout.samples_per_prompt=2",
                              "plan.learner_mfu=0.00005", mode=mode, gpus=17, engines=engines, **more), 12).play()
                 for engines in (16, 4))
    assert few["step_s"] == pytest.approx(full["step_s"], rel=error)
    assert few["tokens_per_s_per_gpu"] == pytest.approx(full["tokens_per_s_per_gpu"], rel=error)
    assert few["idle"]["learners"] == pytest.approx(full["idle"]["learners"], abs=error)


def test_a_slow_engine_holds_up_the_step_by_its_factor():
    """On-policy, with the groups dealt out at once, all wait for the slow one; its tokens are the same."""
    rest = ["actor.replicas=4", "plan.length_sigma=0", "plan.learner_mfu=0.9"]
    even, held = (Run(scenario(*rest, gpus=5, slow=slow), 2) for slow in ((0.0, 1.0), (0.25, 3.0)))
    even.play(), held.play()
    times = [max(sum(engine.account[kind] for kind in ("prefill", "decode")) for engine in run.engines) for run in (even, held)]
    assert times[1] == pytest.approx(3 * times[0])
    assert held.play()["step_s"] > 2.5 * even.play()["step_s"]


def daly(step_s: float, every: int, checkpoint_s: float, mtbf_s: float, restart_s: float) -> float:
    """Daly 2006, eq. 20: a segment is tried until no failure falls into it."""
    work = every * step_s
    return work / ((mtbf_s + restart_s) * math.expm1((work + checkpoint_s) / mtbf_s))


@pytest.mark.parametrize("every", [1, 10, 40, 160])
def test_goodput_is_dalys(every):
    found = statistics.mean(goodput(100.0, every, 60.0, 20_000.0, 600.0, seed) for seed in range(8))
    assert found == pytest.approx(daly(100.0, every, 60.0, 20_000.0, 600.0), rel=0.03)


def test_youngs_interval_is_the_best_one():
    best = best_interval(100.0, 60.0, 20_000.0)
    rates = {every: daly(100.0, every, 60.0, 20_000.0, 600.0) for every in range(1, 100)}
    assert best == 15 and rates[best] > 0.999 * max(rates.values())


def test_failures_cost_what_the_formula_says():
    """The whole run, with its queues: steps since the checkpoint are made again, and a restart begins with empty engines."""
    calm = scenario("checkpoint.every=4", "plan.storage_gb_s=0.0001")
    whole = Run(calm, 60)
    step = whole.play()["step_s"]
    mtbf = 20 * step
    rates, failures = [], 0
    for seed in range(5):
        case = dataclasses.replace(calm, mtbf_h=mtbf * calm.gpus / 3600, restart_s=2 * step, seed=seed)
        run = Run(case, 60)
        run.play()
        failures += run.failures
        rates.append(60 * step / run.rows[-1]["at"])
        assert run.learner["lost"] > 0 and run.gate.version == 60
    assert failures > 15
    assert statistics.mean(rates) == pytest.approx(daly(step, 4, calm.checkpoint_s, mtbf, 2 * step), rel=0.1)


def test_hopeless_failures_are_reported():
    """A run that never reaches its next checkpoint would go on for ever."""
    case = scenario("checkpoint.every=50", mtbf_h=1e-6, restart_s=1.0)
    with pytest.raises(ConfigError, match="lower `checkpoint.every`"):
        Run(case, 2).play()


def test_what_grows_with_the_fleet_and_what_spreads_it():
    """FACTS: 400 MB a step take 11 s through one store; 256 times the GPUs, 256 times that; a store a node makes it constant."""
    seventy = case_of(parse(["configs/llama3.1-70b-64xh100.yaml"]))

    def at(gpus: int, spread: bool) -> Scenario:
        return Scenario(scaled(seventy.config, gpus, "sync"), seventy.shape, seventy.hardware, gpus, spread=spread)

    tokens = 512 * 16 * 4096
    assert at(64, False).payload_seconds(tokens) == pytest.approx(11, rel=0.02)
    large = at(16384, False)
    assert large.payload_seconds(tokens * large.simulated / large.total * 256) == pytest.approx(256 * 10.88, rel=0.01)
    assert at(16384, True).payload_seconds(tokens * 8 / 3) == pytest.approx(10.88 / 5, rel=0.01)  # 5 learner nodes for 64 GPUs
    assert large.publish_s > 5 * at(64, False).publish_s > 2 * at(16384, True).publish_s
    assert (large.total, large.learners, large.config.rollout.prompts_per_step) == (768, 10240, 131072)
    with pytest.raises(ConfigError, match="no multiple"):
        at(100, False)


def test_command_line(tmp_path: Path):
    """A table of all four modes, and --json with a real run's lengths: these, not the config's, decide."""
    rows = [{"step": step, "versions": [0] * 3} for step in range(4)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = subprocess.run([sys.executable, "simulate.py", *SMALL, "--steps", "2"], capture_output=True, text=True, check=True)
    assert [text.split()[1] for text in done.stdout.splitlines()] == ["mode", "colocated", "sync", "one_step", "async"]
    done = subprocess.run([sys.executable, "simulate.py", *SMALL, "--mode", "sync", "--json", "--lengths", str(tmp_path)],
                          capture_output=True, text=True, check=True)
    row, = json.loads(done.stdout)
    assert row["tokens_per_s_per_gpu"] * row["step_s"] * row["gpus"] == pytest.approx(8 * 4 * 3)
    assert simulate.main([*SMALL, "--sweep-gpus", "3"]) == 2


def test_a_colocated_config_is_simulated_as_that(capsys):
    """Its GPUs are both sides: played as one of each, it would have twice the GPUs that it counts."""
    both = [*SMALL, "placement=colocated", "actor.replicas=2", "actor.tp=1", "learner.shards=2", "actor.kv_blocks=0"]
    assert simulate.main([*both, "--steps", "1"]) == 0
    assert [text.split()[:2] for text in capsys.readouterr().out.splitlines()[1:]] == [["2", "colocated"]]
    assert simulate.main([*both, "--mode", "sync"]) == simulate.main([*SMALL, "placement=auto"]) == 2
    config, shape, machine = parse(both), read_shape("configs/toy"), load_hardware("h100")
    pool = Scenario(scaled(config, 2, "colocated"), shape, machine, 2, "colocated").scheduler().capacity
    assert pool == 16 * config.max_model_len, "masters and moments of a toy leave room for all slots at their longest"
