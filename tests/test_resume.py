"""Going on after a death: a resumed run is the run that nobody killed, and what was saved is whole or not there.

Runs that die are torchrun's, killed by tests/die.py; pieces are tested on ranks of their own, or alone.
"""

import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import job, rows, spawn, spawn_ok, torchrun
from test_run import without_clocks

from config import ConfigError
from data import Encoder
from launch import Start, load_prompts
from ledger import RunFolder
from resume import complete, read_state, resume_point
from scheduler import ReleaseGate
from settings import build, parse
from shape import read_shape

SMALL = ("configs/toy.yaml", "eval.every=0", "log.trackers=[]", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4",
         "collective_timeout_s=60")
COLOCATED = ("placement=colocated", "learner.shards=2", "actor.replicas=2")  # two ranks
SPLIT, ALONE = (2,), (1, "placement=colocated")  # ranks, settings
KILL, SAVE, PAUSE = 9, 10, 28  # SIGKILL, SIGUSR1, and SIGWINCH, which does nothing: the wait before it lets a checkpoint be written


def start(world: int, run_dir: Path, *overrides: str, die: list = (), restarts: int = 0, **keywords):
    """One start of a small toy run; `die` has one list of [rank, place, count, signal] an attempt."""
    if not die:
        return job(world, *SMALL, f"run_dir={run_dir}", *overrides, **keywords)
    environment = dict(os.environ)
    os.environ["DIE"] = json.dumps([die] if die and isinstance(die[0][0], int) else list(die))
    try:
        return torchrun(world, *SMALL, f"run_dir={run_dir}", *overrides, script="tests/die.py", restarts=restarts, **keywords)
    finally:
        os.environ.clear()
        os.environ.update(environment)


def ok(done) -> None:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[:4000]


def without_memory(metrics: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if not key.startswith("mem_")} for row in without_clocks(metrics)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    ok(start(2, run_dir, "exact=true", "steps=7", "checkpoint.every=2", "checkpoint.keep=9"))
    return run_dir


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """Killed in the backward of step 5 of 7; step-4 is its last checkpoint, and the files have later rows."""
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    done = start(2, run_dir, "exact=true", "steps=7", "checkpoint.every=2", "log.trackers=[tensorboard]",
                 die=[[0, "backward", 5, PAUSE], [0, "backward", 6, KILL]])
    assert done.returncode != 0 and len(rows(run_dir)) == 5
    assert [path.name for path in complete(run_dir)] == ["step-2", "step-4"]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # half a row, as a full buffer leaves it
    return run_dir


def test_a_killed_run_goes_on_as_if_it_had_not_been_on_other_actors_too(undisturbed, killed, tmp_path):
    """Exact, staleness 0: metrics equal bit for bit, on two actors instead of one. No row twice, none lost, no half row; the trace
    is JSON; TensorBoard shows each step once."""
    run_dir = tmp_path / "run"
    shutil.copytree(killed, run_dir)
    done = start(3, run_dir, "exact=true", "steps=7", "checkpoint.every=2", "log.trackers=[tensorboard]", "actor.replicas=2")
    ok(done)
    assert f"going on from {run_dir}/checkpoints/step-4" in done.stdout and "3 steps left" in done.stdout
    assert without_memory(rows(run_dir)) == without_memory(rows(undisturbed))
    for name, times in (("rollouts.jsonl", 4), ("ledger.jsonl", None)):
        steps = Counter(row["step"] for row in rows(run_dir, name))
        assert sorted(steps) == list(range(7)) and (times is None or set(steps.values()) == {times})
    keys = ("step", "group", "sample", "row", "text", "versions", "reward")
    mine, theirs = ([[row[key] for key in keys] for row in rows(run, "rollouts.jsonl")] for run in (run_dir, undisturbed))
    assert mine == theirs
    trace = json.loads((run_dir / "trace.json").read_text())
    assert [event["name"] for event in trace if event.get("tid") == 1 and event["ph"] == "X"][-3:] == ["step 4", "step 5", "step 6"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    folder = next(path.parent for path in run_dir.rglob("events.out.tfevents*"))
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == list(range(1, 8)), "steps trained twice show twice"


@pytest.mark.long
def test_a_colocated_rank_is_started_again_by_torchrun_alone(undisturbed, tmp_path):
    """Nobody is left to say a line or to keep the store. It goes on, and has the metrics of the split run."""
    done = start(1, tmp_path / "run", "exact=true", "placement=colocated", "steps=4", "checkpoint.every=1", restarts=1,
                 die=[[[0, "backward", 4, KILL]]])
    ok(done)
    assert re.search(rf"^going on from {tmp_path}/run/checkpoints/step-[23]:", done.stdout, re.M)
    assert without_memory(rows(tmp_path / "run")) == without_memory(rows(undisturbed))[:4]


@pytest.mark.long
@pytest.mark.parametrize(("settings", "roles"), [((), ("learner", "actor")), (COLOCATED, ("colocated", "colocated"))])
def test_torchrun_starts_a_killed_run_again_by_itself(undisturbed, tmp_path, settings, roles):
    """--max-restarts 3: rank 1 dies while it decodes, rank 0 in a publication, then as it completes a checkpoint. Each time all
    go on from the last complete one: the store's keys are a new attempt's, and metrics equal the undisturbed run's bit for bit."""
    run_dir, whole = tmp_path / "run", undisturbed
    if settings:  # two shards sum in another order than one
        whole = tmp_path / "whole"
        ok(start(2, whole, "exact=true", "steps=7", *settings))
    done = start(2, run_dir, "exact=true", "steps=7", "checkpoint.every=2", *settings, restarts=3,
                 die=[[[1, "decode", 9, KILL]], [[0, "publish", 3, KILL]], [[0, "renaming", 1, KILL]]])
    ok(done)
    lines = [line for line in done.stderr.splitlines() if " died; " in line]
    dead = [rf"rank 1 \({roles[1]}, decode\)", rf"rank 0 \({roles[0]}, publish\)", rf"rank 0 \({roles[0]}, \w+\)"]
    assert len(lines) == 3 and all(re.match(*pair) for pair in zip(dead, lines, strict=True)), lines
    assert without_memory(rows(run_dir)) == without_memory(rows(whole))
    trained = 0
    for words in re.findall(r"^(?:step +(\d+)/7|going on from .*/step-(\d+))", done.stdout, re.M):
        if words[0]:
            trained = int(words[0])
        else:
            assert trained - 4 < int(words[1]) <= trained, "at most an interval, and the one that was being written"


@pytest.mark.long
@pytest.mark.parametrize("layouts", [(SPLIT, ALONE), (ALONE, SPLIT), (ALONE, ALONE)])
def test_a_run_goes_on_in_either_placement(undisturbed, tmp_path, layouts):
    """Saved at SIGUSR1, killed, and gone on with by other roles: exact metrics are those of a split run that nobody killed."""
    (first, *settings), (second, *others) = layouts
    run_dir = tmp_path / "run"
    done = start(first, run_dir, "exact=true", "steps=7", "checkpoint.every=0", *settings,
                 die=[[0, "backward", 2, SAVE], [0, "backward", 4, PAUSE], [0, "backward", 5, KILL]])
    assert done.returncode != 0 and len(rows(run_dir)) == 4
    assert [path.name for path in complete(run_dir)] == ["step-3"]
    ok(start(second, run_dir, "exact=true", "steps=7", *others))
    assert without_memory(rows(run_dir)) == without_memory(rows(undisturbed))


@pytest.mark.long
def test_a_run_goes_on_on_another_number_of_learners(undisturbed, killed, tmp_path):
    """L15 in a run: one rank saved, two shards load. The next step samples what the undisturbed run sampled, from the same weights
    and at the same rate; sums are over other parts, so the rest agrees to rounding."""
    run_dir = tmp_path / "run"
    shutil.copytree(killed, run_dir)
    ok(start(3, run_dir, "exact=true", "steps=7", "learner.shards=2"))
    mine, theirs = rows(run_dir), rows(undisturbed)
    assert [row["step"] for row in mine] == list(range(7))
    for name in ("reward", "response_len", "lr", "logprob_gap_max", "trained_tokens"):
        assert mine[4][name] == theirs[4][name]
    for name in ("loss", "grad_norm", "entropy"):
        for step in (4, 5):
            assert mine[step][name] == pytest.approx(theirs[step][name], rel=1e-3, abs=1e-6), f"{name} of step {step}"


@pytest.mark.long
def test_a_run_that_one_learner_resumes_from_two(tmp_path):
    """The other way: two shards save (SIGUSR1, no interval), one rank loads, and is like two shards that go on."""
    first, second = tmp_path / "two", tmp_path / "one"
    settings = ("exact=true", "steps=5", "checkpoint.every=0", "learner.warmup_steps=5")
    done = start(3, first, *settings, "learner.shards=2",
                 die=[[0, "backward", 2, SAVE], [0, "backward", 4, PAUSE], [0, "backward", 5, KILL]])
    assert done.returncode != 0
    assert [path.name for path in complete(first)] == ["step-3"], "asked for in step 1, when what step 1 saves was settled"
    shutil.copytree(first, second)
    ok(start(3, first, *settings, "learner.shards=2"))
    ok(start(2, second, *settings))
    mine, theirs = rows(second), rows(first)
    assert [row["step"] for row in mine] == list(range(5))
    assert [row["lr"] for row in mine] == [row["lr"] for row in theirs] == pytest.approx([3e-3 * n / 5 for n in range(1, 6)])
    for step in (3, 4):
        assert mine[step]["reward"] == theirs[step]["reward"] or step == 4
        assert mine[step]["grad_norm"] == pytest.approx(theirs[step]["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("staleness", [1])
def test_an_async_run_keeps_its_bound_its_order_and_its_finished_groups(tmp_path, staleness):
    """Finished groups that no step has trained on are in the checkpoint whole and are not generated again; running ones start from
    their prompts; every group ends once, in the step and from the row that it would have had."""
    run_dir, bound = tmp_path / "run", 2 * (staleness + 1)
    settings = (f"max_staleness={staleness}", "steps=9", "checkpoint.every=1", "checkpoint.keep=9", "actor.max_num_seqs=4",
                "log.samples_per_step=99", "learner.epochs=2")
    done = start(2, run_dir, *settings, die=[[0, "backward", 17, KILL]])
    assert done.returncode != 0
    states = {path: read_state(path) for path in complete(run_dir)}
    assert len(states) >= 7 and all(len(state["running"]) + len(state["arrived"]) <= bound for state in states.values())
    with_both = [path for path, state in states.items() if state["arrived"]]
    assert with_both, "no checkpoint caught a finished group: nothing is tested"
    saved = with_both[0]
    for path in states:
        if path.name > saved.name:
            shutil.rmtree(path)
    kept = {group: header for group, _, _, header in states[saved]["arrived"]}
    before = rows(run_dir, "rollouts.jsonl")
    done = start(2, run_dir, *settings)
    ok(done)
    assert f"{len(kept)} finished groups kept, {len(states[saved]['running'])} started again" in done.stdout
    samples, version = rows(run_dir, "rollouts.jsonl"), int(saved.name.removeprefix("step-"))
    assert Counter((row["group"], row["sample"]) for row in samples) == Counter((g, n) for g in range(18) for n in range(4))
    assert all(row["step"] == row["group"] // 2 for row in samples), "a group's step is fixed at release"
    assert all(row["step"] - staleness <= min(row["versions"]) for row in samples)
    assert max(row["staleness_max"] for row in rows(run_dir)) <= staleness
    config = parse(["configs/toy.yaml", *settings])
    order, _ = load_prompts(config, Start(0, read_shape("configs/toy"), Encoder("configs/toy", ()), torch.device("cpu")))
    drawn = [order.draw().row for _ in range(18)]
    assert {row["group"]: row["row"] for row in samples} == dict(enumerate(drawn))
    for group, header in kept.items():
        mine = sorted((row for row in samples if row["group"] == group), key=lambda row: row["sample"])
        assert [row["reward"] for row in mine] == header["rewards"]
        assert all(max(row["versions"], default=0) <= version for row in mine), "generated again after the resume"
        old = [row["text"] for row in before if row["group"] == group]
        assert not old or old == [row["text"] for row in mine]


@pytest.mark.long
def test_an_async_run_goes_on_colocated(tmp_path):
    """On-policy from then on: what had been finished under older weights is sampled again, and each group ends once."""
    run_dir = tmp_path / "run"
    done = start(2, run_dir, "max_staleness=1", "steps=7", "checkpoint.every=1", "checkpoint.keep=9", "actor.max_num_seqs=4",
                 "learner.epochs=2", die=[[0, "backward", 13, KILL]])
    assert done.returncode != 0
    saved = complete(run_dir)
    too_old = [path for path in saved if any(header["oldest"] < step for _, step, _, header in read_state(path)["arrived"])]
    assert too_old, "no checkpoint caught a finished group: nothing is tested"
    for path in saved[saved.index(too_old[0]) + 1:]:
        shutil.rmtree(path)
    version = int(too_old[0].name.removeprefix("step-"))
    ok(start(1, run_dir, "placement=colocated", "actor.release_memory=true", "steps=7", "log.samples_per_step=99"))
    metrics, samples = rows(run_dir), rows(run_dir, "rollouts.jsonl")
    assert [row["step"] for row in metrics] == list(range(7)) and {row["staleness_max"] for row in metrics[version + 1:]} == {0}
    ended = Counter((row["step"], row["group"]) for row in samples if row["step"] >= version)
    assert ended == {(group // 2, group): 4 for group in range(2 * version, 14)}


@pytest.mark.long
def test_preference_runs_go_on_too(tmp_path):
    """DPO: moments, cursor and the best evaluation are there again; metrics equal an uninterrupted run's bit for bit."""
    data = [{"prompt": f"{number}>", "chosen": str(number), "rejected": str(9999 - number)} for number in range(1000, 1040)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    settings = ("algorithm.name=dpo", f"data.path={tmp_path / 'pairs.jsonl'}", f"data.eval_path={tmp_path / 'pairs.jsonl'}",
                "steps=6", "checkpoint.every=2", "eval.every=3", "algorithm.entropy_coef=0", "reward.functions=[]")
    ok(start(1, tmp_path / "whole", *settings))
    done = start(1, tmp_path / "run", *settings, die=[[0, "backward", 6, KILL]])
    assert done.returncode != 0
    ok(start(1, tmp_path / "run", *settings))
    for name in ("metrics.jsonl", "eval.jsonl"):
        mine, theirs = (without_memory(rows(tmp_path / run, name)) for run in ("run", "whole"))
        assert mine == theirs and len(mine) == {"metrics.jsonl": 6, "eval.jsonl": 3}[name]


@pytest.mark.long
def test_resume_never_starts_over_and_changed_settings_are_refused(killed, tmp_path):
    """An old run is moved aside, not mixed with the new; one that cannot go on says which setting and how to help it."""
    run_dir = tmp_path / "run"
    shutil.copytree(killed, run_dir)
    done = start(2, run_dir, "exact=true", "seed=5", timeout_s=120)
    assert done.returncode != 0 and done.stderr.count("config error") == 1
    assert "`seed` = 5" in done.stderr and "was made with 0" in done.stderr and "resume=never" in done.stderr
    ok(start(2, run_dir, "exact=true", "seed=5", "steps=1", "resume=never"))
    assert [row["step"] for row in rows(run_dir)] == [0] and len(complete(tmp_path / "run.1")) == 2
    assert [path.name for path in complete(run_dir)] == ["step-1"]


# --- pieces


@pytest.mark.long
@pytest.mark.parametrize("saved_after", [3, 4])
def test_rows_follow_as_in_an_uninterrupted_run_and_changed_data_are_refused(tmp_path, saved_after):
    """R4: 6 rows, batch 2, saved after step 3 and 4, resumed to 9: two epochs' shuffles are crossed."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}>", "target": str(n)}) + "\n" for n in range(6)))
    config = build({"model": {"path": "configs/toy", "init": "random"}, "data": {"path": str(data), "max_prompt_tokens": 8}})
    fresh = Start(0, read_shape("configs/toy"), Encoder("configs/toy", ()), torch.device("cpu"))
    whole, _ = load_prompts(config, fresh)
    sequence = [whole.draw().row for _ in range(18)]
    assert [Counter(sequence[at:at + 6]) for at in (0, 6, 12)] == [Counter(range(6))] * 3
    part, _ = load_prompts(config, fresh)
    assert [part.draw().row for _ in range(2 * saved_after)] == sequence[:2 * saved_after]
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / "state.json").write_text(json.dumps(
        {"rows": part.fingerprint(), "cursor": part.cursor, "skipped": part.skipped}))
    resumed = Start(0, fresh.shape, fresh.encoder, fresh.device, tmp_path / "step-4")
    rest, _ = load_prompts(config, resumed)
    assert [rest.draw().row for _ in range(18 - 2 * saved_after)] == sequence[2 * saved_after:]
    data.write_text(data.read_text().replace("5>", "7>"))
    with pytest.raises(ConfigError, match=r"`data\.path`.*has changed.*resume=never"):
        load_prompts(config, resumed)


def test_only_whole_checkpoints_count(tmp_path):
    """A folder that is still called partial, or whose state cannot be read, is not resumed from in silence."""
    config = build({"run_dir": str(tmp_path), "model": {"path": "configs/toy", "init": "random"}, "data": {"max_prompt_tokens": 8}})
    assert resume_point(config) is None
    for name in ("step-10.partial", "step-9", "step-2"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert [path.name for path in complete(tmp_path)] == ["step-2", "step-9"], "by number"
    with pytest.raises(ConfigError, match=r"step-9: state\.json cannot be read"):
        resume_point(config)
    (tmp_path / "checkpoints" / "step-9" / "state.json").write_text('{"config": {"se')
    with pytest.raises(ConfigError, match="remove the folder"):
        resume_point(config)


@given(st.data())
def test_a_restored_gate_goes_on_like_the_one_that_was_saved(data):
    """After any history: the same groups are due, the bound holds, and a finished group is neither out nor due again."""
    batch, staleness = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
    gate, next_group = ReleaseGate(batch, staleness, 9), 0
    for _ in range(data.draw(st.integers(0, 40))):
        for step in gate.due():
            gate.release(next_group, step)
            next_group += 1
        running, _ = gate.open_groups()
        if gate.ready() and gate.version < 8 and data.draw(st.booleans()):
            gate.train()
        elif running:
            outcome = data.draw(st.sampled_from(["trained", "filtered", "unscored"]))
            gate.arrive(data.draw(st.sampled_from(sorted(running))), outcome)
    running, arrived = gate.open_groups()
    again = ReleaseGate(batch, staleness, 9)
    again.restore(gate.version, running, arrived)
    assert again.outstanding == gate.outstanding <= (staleness + 1) * batch
    assert (again.due(), again.groups(), again.ready()) == (gate.due(), gate.groups(), gate.ready())
    assert not running.keys() & arrived.keys() and all(again.step_of(group) == step for group, step in running.items())


def test_a_run_folder_forgets_what_a_resumed_run_does_again(tmp_path):
    """Whole rows before the version stay, as they are; a trace that was cut in an event goes on as valid JSON."""
    folder = RunFolder(str(tmp_path / "run"))
    folder.append("metrics.jsonl", [{"step": step, "text": "\u2028 é"} for step in range(5)])  # a line end to str.splitlines
    folder.append("eval.jsonl", [{"version": version} for version in (0, 2, 4)])
    folder.trace(0, "learner", {"spans": [("forward", 1.0, 0.5), ("backward", 1.5, 0.5)], "flows": [], "error_s": 0.0})
    before = (tmp_path / "run" / "metrics.jsonl").read_text().split("\n")[:3]
    for name, cut in (("metrics.jsonl", '{"step": 5, "te'), ("trace.json", ',\n{"pid": 0, "tid": 0, "na')):
        with (tmp_path / "run" / name).open("a") as file:
            file.write(cut)
    for _ in range(2):  # a run may be resumed twice
        folder = RunFolder(str(tmp_path / "run"), 3)
        assert folder.moved is None
        folder.append("metrics.jsonl", [{"step": 3}])
        folder.append("eval.jsonl", [{"version": 3}])
        folder.trace(0, "learner", {"spans": [("optimizer", 9.0, 0.5)], "flows": [], "error_s": 0.0})
        folder.close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text().split("\n") == [*before, '{"step": 3}', ""]
    assert [row["version"] for row in rows(tmp_path / "run", "eval.jsonl")] == [0, 2, 3]
    names = [event["name"] for event in json.loads((tmp_path / "run" / "trace.json").read_text()) if event["ph"] == "X"]
    assert names == ["forward", "backward", "optimizer", "optimizer"]


def test_a_checkpoint_holds_what_was_there_when_save_returned(tmp_path):
    """The copy is taken before training goes on; the last k stay; a leftover of the same step is not mixed in; any number of ranks
    reads it back; tensors that it lacks are named, since DCP would leave them as they are."""
    for result in spawn_ok(2, "savers:save_three", str(tmp_path)):
        assert result == {"kept": ["step-2", "step-3"], "loaded": [[2.0, [2.0] * 3], [3.0, [3.0] * 3]], "payload": "seven"}
    assert not list((tmp_path / "checkpoints").rglob("*00009*"))
    [alone] = spawn_ok(1, "savers:load_alone", str(tmp_path))
    assert alone["loaded"] == [3.0, [3.0] * 3] and "c is absent there and (2,) here" in alone["error"]


@pytest.mark.long
@pytest.mark.parametrize("limited", [0, 1])
def test_a_full_disk_costs_the_checkpoint_being_written_and_no_other(tmp_path, limited):
    """R5: every rank hears of it in one line, nobody waits for ever, and the earlier one is intact."""
    for raised, left, first, second in spawn_ok(2, "savers:save_on_a_full_disk", str(tmp_path), limited):
        assert raised.startswith("checkpoint step-2.partial: ") and raised.endswith("earlier ones are intact")
        assert "\n" not in raised and "large" in raised, raised  # EFBIG
        assert left == ["step-1"] and first == [1.0, [1.0] * 3] and second == [2.5, [2.5] * 3]


@pytest.mark.long
@pytest.mark.parametrize("place", ["writing", "renaming"])
def test_a_save_that_was_killed_is_not_there(tmp_path, place):
    """R5: step-1 stays the last, and can be read."""
    assert {entry["exit"] for entry in spawn(2, "savers:be_killed", str(tmp_path), place)} == {-KILL} or place == "renaming"
    assert [path.name for path in complete(tmp_path)] == ["step-1"]
    assert (tmp_path / "checkpoints" / "step-2.partial").is_dir()
    [alone] = spawn_ok(1, "savers:load_first", str(tmp_path))
    assert alone == [1.0, [1.0] * 3]
