"""Weights that change under running requests: drain, recompute, keep, each in place and staged (DESIGN 3 and 6, case E11).

The scheduler's decisions on random sequences of operations, with test_scheduler.py's rig; the engine's logprobs against
transformers, whose cache is carried from one model into the other; and whole runs with the real command line.
"""

import copy
from collections import Counter

import pytest
import torch
from engines import add, build, finish, key, load, naive, next_logp, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import job, rows
from test_scheduler import ADD, POOLS, STOP, Rig
from tiny import FAMILIES, randomise

import settings as config_file
from config import ConfigError
from runner import uniforms
from scheduler import Request

MODES = ("drain", "recompute", "keep")
STEP = st.tuples(st.just("step"), st.integers(1, 4))
ANNOUNCE, ABORT = st.just(("announce",)), st.tuples(st.just("abort"), st.integers(0, 9))
OPERATIONS = st.lists(st.one_of(ADD, STEP, STEP, ANNOUNCE, ANNOUNCE, ABORT), min_size=6, max_size=20)


def swap(rig: Rig) -> None:
    """The publication, with what each mode promises of running requests."""
    scheduler = rig.scheduler
    running = {request: (request.num_computed, len(request.tokens)) for request in scheduler.running}
    begun = [request for request in rig.prompts if request.versions and not request.finish_reason]
    rig.coming = False
    rig.publish(scheduler.version + 1)
    if rig.mode == "drain":
        assert not running and not begun, "drained, and a sample is unfinished"
    for request, before in running.items():
        assert request.num_generated == len(request.logprobs) == len(request.versions), "a partial response is lost"
        kept = rig.mode == "keep" and request.versions
        assert (request.num_computed, len(request.tokens)) == (before if kept else (0, before[1]))
        rig.seen["kept" if kept else "requeued"] += 1


def advance(rig: Rig, steps: int) -> None:
    """Engine steps; an announced version goes live at the first boundary at which it may."""
    for _ in range(steps):
        if rig.coming and rig.scheduler.may_swap:
            swap(rig)
        rig.seen["steps of a drain"] += rig.coming
        if rig.scheduler.unfinished:
            rig.step()


def play(mode: str, pool, operations) -> Rig:
    """The operations in order, one more publication, and steps until nothing is left."""
    num_blocks, block_size, max_num_seqs, spare = pool
    rig, groups = Rig(num_blocks, block_size, max_num_seqs, max_num_seqs + spare, mode=mode), 0
    for operation, *values in operations:
        if operation == "add":
            family, length, samples, new, ahead = values
            prompt = [family + 1] * (length // 2) + [3] * (length - length // 2)
            rig.add(groups, prompt, samples, new, {STOP}, rig.scheduler.version + ahead)
            groups += 1
        elif operation == "announce":
            rig.coming = True
            rig.scheduler.announce()
        elif operation == "abort":
            rig.scheduler.abort(values[0])
            rig.check()
        else:
            advance(rig, values[0])
    rig.coming = True
    rig.scheduler.announce()
    while rig.coming:
        advance(rig, 1)
    rig.run()
    rig.check_outputs()
    for request in rig.prompts:
        rig.seen["preempted"] += request.preemptions > 0
        rig.seen["hit"] += request.prefix_hits > 0
        rig.seen["two versions"] += len(set(request.versions)) > 1
        assert mode != "drain" or len(set(request.versions)) <= 1, "drained, and a response is of two versions"
        assert not request.versions or request.versions[0] >= request.min_version, "admitted before its weights"
    return rig


def explore(mode: str, examples: int, fixed: bool) -> Counter:
    seen = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=fixed, database=None)
    @given(POOLS, OPERATIONS)
    def run(pool, operations):
        seen.update(play(mode, pool, operations).seen)

    run()
    return seen


@pytest.mark.parametrize(("mode", "events"), [
    ("drain", {"steps of a drain"}), ("recompute", {"requeued", "two versions"}), ("keep", {"requeued", "kept", "two versions"})])
def test_every_invariant_under_publications_in_flight(mode, events):
    """A request lost or begun twice, old keys found by a new request, a drain that lets somebody in or never ends."""
    seen = explore(mode, 400, fixed=True)
    assert {event for event in events | {"preempted", "hit"} if seen[event] < 10} == set(), f"never reached: {seen}"


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_every_invariant_on_many_new_sequences(mode):
    """The same with other sequences every time."""
    explore(mode, 4000, fixed=False)


def test_a_drain_finishes_what_was_begun_and_nothing_else():
    """Two of three are running: both end under version 0, also the one that was preempted meanwhile; the third begins under 1."""
    rig = Rig(4, 2, max_num_seqs=2, mode="drain")
    old, young, third = (rig.add(group, [1, 2, 3], new=4)[0] for group in range(3))
    rig.step()
    rig.coming = True
    rig.scheduler.announce()
    with pytest.raises(AssertionError, match="weights swapped under requests that were to finish first"):
        rig.scheduler.publish(1)
    while not rig.scheduler.may_swap:
        rig.step()
    assert young.preemptions > 0 and list(rig.scheduler.waiting) == [third]
    assert rig.scheduler.schedule() == [] and not rig.scheduler.running
    rig.coming = False
    rig.publish(1)
    rig.run()
    assert (old.versions, young.versions, third.versions) == ([0] * 4, [0] * 4, [1] * 4)


def test_kept_keys_and_values_are_never_shared():
    """A prompt equal to that of a running request is computed anew, and its blocks are those that a third one then finds."""
    rig = Rig(32, 4, mode="keep")
    old, = rig.add(0, [1] * 9, new=12)
    rig.step()
    rig.publish(1)
    assert dict(rig.step()) == {old: 1} and rig.scheduler.pool.table == {}
    new, = rig.add(1, [1] * 9, new=2)
    assert dict(rig.step()) == {old: 1, new: 9}
    again, = rig.add(2, [1] * 9, new=2)
    rig.run()
    rig.check_outputs()
    assert (old.versions, new.prefix_hits, again.prefix_hits) == ([0] + [1] * 11, 0, 8)


def test_exact_refuses_to_keep():
    """Old keys under new weights have no logprob that the learner could reproduce, bit for bit or otherwise."""
    with pytest.raises(ConfigError, match=r"`exact` needs `actor\.update_mode` = recompute or drain"):
        config_file.build({"exact": True, "actor": {"update_mode": "keep"}})


# --- real logits


@torch.no_grad()
def continued(old, new, request: Request, first: int, total: int, seed: int) -> tuple[list[int], list[float]]:
    """Textbook `keep`: transformers' cache filled by `old`, and every token after the `first` sampled ones computed by `new`."""
    tokens, draws = list(request.tokens[:request.num_prompt]), uniforms(seed, [(*key(request), at) for at in range(total)])
    early = naive(old, tokens, first, request.temperature, draws)
    tokens += early[0]
    cache = old(torch.tensor([tokens[:-1]]), use_cache=True).past_key_values
    logps = list(early[1])
    for at in range(first, total):
        logits = new(torch.tensor([tokens[-1:]]), past_key_values=cache, use_cache=True).logits[0, -1, :64]
        logp = torch.log_softmax(logits / request.temperature, -1)
        tokens.append(int((logp.exp().double().cumsum(0) <= draws[at] * logp.exp().double().sum()).sum()))
        logps.append(logp[tokens[-1]].item())
    return tokens[request.num_prompt:], logps


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_on_both_sides_of_a_publication(mode):
    """E11: versions 7..7,8..8; each logprob is that of the weights, and of the keys and values, that its token was drawn from."""
    old = FAMILIES["qwen3"]
    new = randomise(copy.deepcopy(old), 99)
    engine = build(old, version=7, seed=4, update_mode=mode)
    requests = [Request(group, number, prompt_of(5 + 3 * group, group), 14) for group in range(3) for number in range(2)]
    late = Request(9, 0, requests[-1].tokens[:11], 14)  # the last group's prompt: its old keys must not be found
    add(engine, requests)
    for _ in range(6):
        assert engine.step() == []
    engine.scheduler.announce()
    add(engine, [late])
    done = []
    while not engine.scheduler.may_swap:
        done += engine.step()
    assert len(done) == (len(requests) if mode == "drain" else 0)
    load(engine, new)
    engine.publish(8)
    finish(engine, [*requests, late], done)
    for request in [*requests, late]:
        first = request.versions.count(7)
        assert request.versions == [7] * first + [8] * (14 - first) and (first in (0, 14)) == (mode == "drain" or request is late)
        if mode == "keep" and first > 0:
            tokens, logps = continued(old, new, request, first, 14, 4)
        else:
            draws = uniforms(4, [(*key(request), position) for position in range(14)])
            early = naive(old, request.tokens[:request.num_prompt], first, 1.0, draws[:first])
            after = naive(new, request.tokens[:request.num_prompt + first], 14 - first, 1.0, draws[first:])
            tokens, logps = early[0] + after[0], early[1] + after[1]
        assert request.tokens[request.num_prompt:] == tokens
        assert request.logprobs == pytest.approx(logps, abs=1e-5, rel=0)
    if mode == "keep":
        request = requests[0]
        mixed = next_logp(new, request.tokens[:-1], 1.0)[request.tokens[-1]].item()
        assert abs(mixed - request.logprobs[-1]) > 1e-3, "a full recompute gives the same: the old keys were not kept"


# --- whole runs

SMALL = ("steps=8", "eval.every=0", "log.trackers=[]", "log.samples_per_step=64", "rollout.prompts_per_step=4",
         "rollout.samples_per_prompt=4", "rollout.max_new_tokens=24", "actor.max_num_seqs=8", "publish.bucket_mb=0.05")
LONG = pytest.mark.long


def train(run_dir, world: int, *overrides: str) -> list[dict]:
    done = job(world, "configs/toy.yaml", f"run_dir={run_dir}", *SMALL, *overrides)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return rows(run_dir)


@pytest.mark.parametrize(("mode", "publish", "lanes"), [
    ("keep", "staged", 1), *(pytest.param(*case, marks=LONG) for case in (
        ("drain", "staged", 1), ("recompute", "in_place", 1), ("drain", "in_place", 1), ("recompute", "staged", 2),
        ("keep", "in_place", 2)))])
def test_three_steps_off(tmp_path, mode, publish, lanes):
    """A sample older than the bound, a group lost or trained on twice, a version stamped late, a logprob that is not the engine's
    own: at this learning rate all versions are equal, and the learner must find every logprob again."""
    metrics = train(tmp_path / "run", 1 + lanes, "max_staleness=3", "learner.lr=1e-30", f"actor.update_mode={mode}",
                    f"publish.mode={publish}", f"actor.tp={lanes}")
    assert max(row["logprob_gap_max"] for row in metrics) < 1e-5
    assert 1 <= max(row["staleness_max"] for row in metrics) <= 3
    samples = rows(tmp_path / "run", "rollouts.jsonl")
    ended = Counter((row["step"], row["group"], row["sample"]) for row in samples)
    assert ended == Counter((group // 4, group, sample) for group in range(32) for sample in range(4))
    for row in samples:
        assert row["versions"] == sorted(row["versions"]), "a token is stamped with older weights than the one before it"
        assert row["step"] - 3 <= row["versions"][0] and row["versions"][-1] <= row["step"]
    mixed = sum(len(set(row["versions"])) > 1 for row in samples)
    assert (mixed == 0) == (mode == "drain"), f"{mixed} of 128 samples went on across a publication"
    for row in metrics:
        assert row["publish_staging_mb"] == pytest.approx(row["publish_mb"] / lanes if publish == "staged" else 0.1, rel=0.1)
        assert row["publish_exposed_s"] > 0 and (lanes > 1 or row["publish_exposed_s"] == row["t_actor_publish"])


@pytest.mark.long
@pytest.mark.parametrize("mode", ["drain", "recompute"])
def test_on_policy_and_staged(tmp_path, mode):
    """Nothing runs when new weights arrive: nothing is gained, and bit for bit nothing may change."""
    metrics = train(tmp_path / "run", 2, "exact=true", "publish.mode=staged", f"actor.update_mode={mode}")
    assert {(row["logprob_gap_max"], row["staleness_max"]) for row in metrics} == {(0.0, 0)}
