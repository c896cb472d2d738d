"""Every way for a rank, or the job, to die: it ends, nothing is left running, and one line says who it was and in what phase.

Real processes by the real command line; tests/die.py sends the signal in the middle of something. Limits are generous (other work
may hold the machine) and nothing here is about speed: a job that does not end is killed by its timeout and fails the test.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
import torch
from ranks import ROOT, free_port, rows

from launch import set_nccl_limits
from resume import complete
from settings import parse

SETTINGS = ("configs/toy.yaml", "eval.every=0", "log.trackers=[]", "rollout.prompts_per_step=2", "rollout.samples_per_prompt=4",
            "steps=400", "checkpoint.every=2")
LIMIT = "collective_timeout_s=20"
KILL, STOP, FULL = 9, 19, 0


class Job:
    """A torchrun with all that it started, found again by a mark in their environment."""

    def __init__(self, world: int, run_dir: Path, *overrides: str, die: list = (), port: int = 0):
        self.mark, self.port = uuid.uuid4().hex, port or free_port()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", str(self.port),
                   "tests/die.py", *SETTINGS, f"run_dir={run_dir}", *overrides]
        added = os.environ | {"DIE": json.dumps([die]), "MARK": self.mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                              "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        pipe = subprocess.PIPE  # not a file: a full disk must not swallow the line about it
        self.process = subprocess.Popen(command, cwd=ROOT, env=added, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    def processes(self) -> dict[int, str]:
        """Command lines of those that still run."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"MARK={self.mark}".encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                pass
        return found

    def wait(self, timeout_s: float = 150) -> str:
        """Our one line on stderr, once the job and every process has ended; also graders, which are sessions of their own."""
        try:
            _, text = self.process.communicate(timeout=timeout_s)
            assert self.process.returncode != 0
            deadline = time.monotonic() + 20
            while (left := self.processes()) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not left, f"still running: {left}"
        finally:
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
        assert not re.search(rf'File "{ROOT}/\w+\.py"', text), f"a traceback of ours: {text[-3000:]}"
        lines = [line for line in text.splitlines() if re.match(r"rank \d+ \(", line)]
        assert len(lines) == 1, f"one line says what happened: {lines}"
        return lines[0]

    def until_step(self, run_dir: Path, step: int, timeout_s: float = 150) -> None:
        deadline = time.monotonic() + timeout_s
        while not (run_dir / "metrics.jsonl").exists() or len(rows(run_dir)) < step:
            assert self.process.poll() is None and time.monotonic() < deadline, f"step {step} was never done"
            time.sleep(0.1)


PHASES = {
    "learner": {"idle": "wait_rollouts|publish", "publish": "publish", "backward": "backward", "checkpoint": "checkpoint",
                "writing": r"\w+"},
    "actor": {"idle": "wait_prompts", "decode": "decode", "publish": "publish"}}
PHASES["colocated"] = PHASES["learner"] | {"idle": "wait_prompts|wait_rollouts|publish|report", "decode": "decode"}
COUNTS = {"idle": 20, "writing": 2, "checkpoint": 2, "decode": 9, "publish": 2, "backward": 9}
FATES = {KILL: "died", STOP: r"has been silent for \d+ s"}


def check_named(tmp_path: Path, world: int, rank: int, role: str, place: str, number: int, *overrides: str) -> None:
    """One line names the rank, its role and its phase, by rank 0 or, where it is rank 0 that is gone, by rank 1."""
    job = Job(world, tmp_path / "run", LIMIT, *overrides, die=[[rank, place, COUNTS[place], number]])
    line = job.wait()
    witness, phase = 0 if rank else 1, PHASES[role][place]
    assert re.match(rf"rank {rank} \({role}, ({phase})\) {FATES[number]}; rank {witness} \(\w+, \w+\) ends the job$", line), line


def test_a_killed_learner_is_named_by_an_actor(tmp_path):
    """Rank 0 holds the store and would have been the witness; the others must not wait for it."""
    check_named(tmp_path, 2, 0, "learner", "backward", KILL)


@pytest.mark.long
def test_a_killed_idle_actor_is_named(tmp_path):
    """No collective is pending, nothing is on its way: rank 0 would find out after half an hour of waiting for its groups."""
    check_named(tmp_path, 2, 1, "actor", "idle", KILL)


def test_a_stopped_actor_ends_the_job_within_the_limit(tmp_path):
    """SIGSTOP: no socket closes, and rank 0 would wait for the group for generation_timeout_s, half an hour. The stopped process is
    killed too: SIGTERM does not reach it."""
    check_named(tmp_path, 2, 1, "actor", "decode", STOP)


@pytest.mark.parametrize(("number", "role"), [
    (signal.SIGTERM, "learner"), *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (signal.SIGINT, "learner"), (signal.SIGTERM, "colocated"), (signal.SIGINT, "colocated")))])
def test_the_job_ends_at_a_signal(tmp_path, number, role):
    """A scheduler's SIGTERM to torchrun, and Ctrl-C, which the terminal sends to every process of the group."""
    job = Job(2, tmp_path / "run", LIMIT, *(COLOCATED if role == "colocated" else ()))
    job.until_step(tmp_path / "run", 2)
    if number == signal.SIGTERM:
        job.process.terminate()
    else:
        os.killpg(job.process.pid, number)
    line = job.wait()
    assert re.match(rf"rank 0 \({role}, \w+\) stopped by {number.name}$", line), line


def test_a_full_disk_ends_the_job_with_the_file_it_met(tmp_path):
    """Metrics, samples, trace or checkpoint, whichever comes first; the last complete checkpoint is whole."""
    job = Job(2, tmp_path / "run", LIMIT, "log.trace=false", "log.samples_per_step=0", die=[[0, "backward", 6, FULL]])
    line = job.wait()
    assert re.match(r"rank 0 \(learner, report\) stopped: \[Errno 27\] File too large: '.*/run/metrics.jsonl'$", line), line
    assert complete(tmp_path / "run")


@pytest.mark.long
def test_a_generation_that_takes_too_long_has_its_own_limit(tmp_path):
    """R8: longer than the process groups' timeout is no fault; rollout.generation_timeout_s is, and its line says what is out."""
    (tmp_path / "slow.py").write_text("import time\n\ndef wait(completions, **columns):\n"
                                      "    time.sleep(15 if wait.calls == 0 else 600)\n    wait.calls += 1\n"
                                      "    return [0.0] * len(completions)\n\nwait.calls = 0\n")
    job = Job(2, tmp_path / "run", "collective_timeout_s=9", "rollout.generation_timeout_s=25", "reward.timeout_s=900",
              f"reward.functions=[{tmp_path / 'slow.py'}:wait]", "rollout.prompts_per_step=1")
    line = job.wait()
    assert len(rows(tmp_path / "run")) == 1, "a step of 15 s must pass with process groups of 9 s"
    assert line == ("rank 0 (learner, wait_rollouts) stopped: the groups of step 1 took longer than rollout.generation_timeout_s "
                    "= 25; groups still out, by actor rank: {1: 1}")


def test_nccl_limits(monkeypatch, tmp_path):
    """Set before any group is made, unless the user has; every name is one that torch reads."""
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    monkeypatch.setattr(os, "environ", environment)
    set_nccl_limits(parse(["configs/toy.yaml", "collective_timeout_s=90", f"run_dir={tmp_path}"]))
    assert environment == {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "90", "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/nccl-rank-"}
    headers = Path(torch.__file__).parent.glob("include/torch/csrc/distributed/c10d/*.hpp")
    read = " ".join(header.read_text() for header in headers)
    assert all(f'"{name}"' in read for name in environment if "_FILE" not in name), "torch has renamed a variable"


# --- the whole matrix

MATRIX = [(rank, role, place) for rank, role in enumerate(("learner", "learner", "actor", "actor")) for place in PHASES[role]]
FOUR = ("learner.shards=2", "actor.replicas=2")
COLOCATED = ("placement=colocated", *FOUR)  # the same on two ranks


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(("rank", "role", "place"), MATRIX)
def test_any_rank_killed_anywhere(tmp_path, rank, role, place, staleness):
    check_named(tmp_path, 4, rank, role, place, KILL, *FOUR, f"max_staleness={staleness}")


@pytest.mark.long
@pytest.mark.parametrize(("rank", "role", "place"), MATRIX)
def test_any_rank_stopped_anywhere(tmp_path, rank, role, place):
    """Whoever waits for it, in a collective or on the store, the hung one is named, not those that wait."""
    check_named(tmp_path, 4, rank, role, place, STOP, *FOUR)


@pytest.mark.long
@pytest.mark.parametrize("number", [KILL, STOP])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("place", PHASES["colocated"])
def test_a_colocated_rank_gone_anywhere(tmp_path, rank, place, number):
    """Learner and engine at once: the phase tells which of the two it was."""
    check_named(tmp_path, 2, rank, "colocated", place, number, *COLOCATED)


@pytest.mark.long
@pytest.mark.parametrize(("world", "settings", "line"), [
    (3, (), r"rank 2 \(actor, decode\) died; rank 0 \(learner, wait_rollouts\)"),
    (2, ("placement=colocated", "learner.shards=2"), r"rank 1 \(colocated, decode\) died; rank 0 \(colocated, \w+\)")])
def test_two_lanes_of_one_engine(tmp_path, world, settings, line):
    """A lane that is not the leader dies: its leader is in an all-reduce with it."""
    job = Job(world, tmp_path / "run", LIMIT, "actor.tp=2", *settings, die=[[world - 1, "decode", 9, KILL]])
    said = job.wait()
    assert re.match(line, said), said


@pytest.mark.long
def test_two_jobs_beside_each_other_and_one_again_on_the_same_port(tmp_path):
    """R7: neither the store nor the watch has a fixed port, and a killed job leaves none behind."""
    first, second = Job(2, tmp_path / "first", LIMIT, die=[[1, "publish", 3, KILL]]), Job(2, tmp_path / "second", "steps=3")
    assert first.wait().startswith("rank 1 (actor, publish) died")
    again = Job(2, tmp_path / "first", "steps=4", port=first.port)
    for job, run, steps in ((second, "second", 3), (again, "first", 4)):
        _, text = job.process.communicate(timeout=150)
        assert job.process.returncode == 0 and not job.processes(), text[-3000:]
        assert [row["step"] for row in rows(tmp_path / run)] == list(range(steps))


@pytest.mark.long
def test_torchrun_killed(tmp_path):
    """Nobody is left to end the ranks: they see it themselves."""
    job = Job(2, tmp_path / "run", LIMIT)
    job.until_step(tmp_path / "run", 1)
    job.process.kill()
    line = job.wait()
    assert re.match(r"rank 0 \(learner, \w+\) stopped: torchrun has died$", line), line


@pytest.mark.long
def test_a_grader_that_never_lets_go_of_the_interpreter_dies_with_its_actor(tmp_path):
    """A regular expression that backtracks for ever holds the GIL: no thread of the grader can see that the actor has gone."""
    (tmp_path / "stuck.py").write_text("import re\n\ndef match(completions, **columns):\n"
                                       "    return [float(bool(re.match('(a+)+$', 'a' * 60 + 'b'))) for _ in completions]\n")
    job = Job(2, tmp_path / "run", LIMIT, "reward.timeout_s=900", f"reward.functions=[{tmp_path / 'stuck.py'}:match]",
              die=[[0, "idle", 600, KILL]])
    line = job.wait()
    assert line.startswith("rank 0 (learner, wait_rollouts) died; rank 1 (actor, "), line


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a tmpfs")
def test_a_full_tmpfs(tmp_path):
    """R5 with a real ENOSPC: 3 MB hold two checkpoints of the toy and not three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(disk)]).returncode:
        pytest.skip("mount is not permitted here")
    try:
        job = Job(2, tmp_path / "run", LIMIT, f"run_dir={disk / 'run'}", "checkpoint.keep=9", "checkpoint.every=1")
        line = job.wait()
        assert re.match(r"rank 0 \(learner, \w+\) stopped: .*No space left on device", line), line
        assert [path.name for path in complete(disk / "run")] == ["step-1", "step-2"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
