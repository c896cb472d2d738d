"""Reward functions in worker processes (L13, DESIGN 9): TRL's signature as it is; no hang, crash or NaN becomes a zero."""

import os
import time
from pathlib import Path

import pytest

from config import ConfigError, Reward
from reward import Grader, copy_digits, load_function, right_sum, stops_after_number, total

FUNCTIONS = '''
import os, subprocess, sys, time

calls = 0


def trl_style(prompts, completions, completion_ids, answer, **kwargs) -> list[float]:
    """As in TRL's documentation; also works on conversations."""
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer), "one entry a sample"
    assert set(kwargs) == {"level"} and kwargs["level"] == [3] * len(prompts)
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    assert all(c == texts[i] or c[0]["role"] == "assistant" for i, c in enumerate(completions))
    return [1.0 if text == wanted else 0.0 for text, wanted in zip(texts, answer)]


def length(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def echo(prompts, completions, **kwargs):
    """Does what the completion says: a number, or something that goes wrong."""
    global calls
    calls += 1
    rewards = []
    for text in completions:
        if text == "none": rewards.append(None)
        elif text == "nan": rewards.append(float("nan"))
        elif text == "inf": rewards.append(-float("inf"))
        elif text == "calls": rewards.append(calls)
        elif text == "bool": rewards.append(True)
        elif text == "raise": raise KeyError("the gold is broken")
        elif text == "hang": time.sleep(60)
        elif text == "exit": os._exit(3)
        elif text == "sys.exit": sys.exit()
        elif text == "short": return [1.0]
        elif text == "scalar": return 1.0
        elif text == "nothing": return None
        elif text == "string": rewards.append("1.0")
        elif text == "print":
            print("hello"); print('{"id": 0, "parts": [[9.0]]}', flush=True); os.system("echo from a child")
            sys.stdout.write("no newline"); sys.stdout.flush(); rewards.append(2.0)
        elif text == "stdin":
            child = subprocess.run([sys.executable, "-c", "import sys; print(len(sys.stdin.read()))"], capture_output=True)
            rewards.append(float(child.stdout))
        elif text.startswith("child "):
            child = subprocess.Popen(["sleep", "60"])
            open(text[6:], "w").write(str(child.pid)); child.wait()
        elif text.startswith("leave "):
            open(text[6:], "w").write(str(os.getpid())); rewards.append(0.0)
        elif text.startswith("slow "): time.sleep(float(text[5:])); rewards.append(1.0)
        else: rewards.append(float(text))
    return rewards
'''


@pytest.fixture
def make(tmp_path):
    """Builds a ready Grader on the functions above; all workers end with the test."""
    graders = []
    (tmp_path / "rewards.py").write_text(FUNCTIONS)

    def grader(*names: str, **settings) -> Grader:
        specs = tuple(name if ":" in name else f"{tmp_path}/rewards.py:{name}" for name in names)
        graders.append(Grader(Reward(functions=specs, **settings)))
        graders[-1].wait_ready()
        return graders[-1]

    yield grader
    for one in graders:
        one.close()


def submit(grader: Grader, number: int, completions: list, prompt="1+1", ids=None, **columns) -> None:
    grader.submit({"group": number, "prompt": prompt, "columns": columns}, completions, ids or [[7]] * len(completions))


def collect(grader: Grader, count: int, limit_s: float = 20.0) -> dict[int, tuple[list, str]]:
    """Results by group; fails on a duplicate, and if `count` have not come within the limit."""
    found, deadline = {}, time.monotonic() + limit_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} groups graded in {limit_s} s"
        for group, parts, error in grader.poll():
            assert group not in found, "a group came back twice"
            found[group] = parts, error
        time.sleep(0.002)
    assert grader.poll() == []
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- TRL's signature


@pytest.mark.parametrize("conversation", [False, True])
def test_a_trl_reward_function_works_unchanged(conversation, make):
    """Keyword arguments prompts, completions, completion_ids and the columns, a list each; conversations as lists of messages."""
    grader = make("trl_style", "length")
    completions = ["two", "2", "2"]
    if conversation:
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    prompt = [{"role": "user", "content": "1+1"}] if conversation else "1+1"
    submit(grader, 5, completions, prompt, [[1], [2, 3], [4, 5, 6]], answer="2", level=3)
    assert collect(grader, 1) == {5: ([[0.0, 1.0, 1.0], [1.0, 2.0, 3.0]], "")}


def test_a_file_with_dataclasses_and_future_annotations_loads(tmp_path):
    """dataclasses and pickle look their module up in sys.modules; a file that is not there fails with a riddle."""
    (tmp_path / "judge.py").write_text("from __future__ import annotations\nfrom dataclasses import dataclass\n\n@dataclass\n"
                                       "class Verdict:\n    value: float\n\ndef f(**k):\n    return Verdict(0.5).value\n")
    assert load_function(f"{tmp_path}/judge.py:f")() == 0.5


def test_text_survives_the_pipe(make, tmp_path):
    """Quotes, newlines, emoji and U+2028 in prompt, completion and columns arrive as they were sent."""
    odd = 'a "quote"\n\\n {"id": 1}\u2028é汉🦙\x00\x1b'
    (tmp_path / "same.py").write_text("def same(prompts, completions, gold, **k):\n"
                                      "    return [p == c == g == gold[0] for p, c, g in zip(prompts, completions, gold)]\n")
    grader = make(f"{tmp_path}/same.py:same")
    submit(grader, 0, [odd, odd + " "], odd, gold=odd)
    assert collect(grader, 1) == {0: ([[1.0, 0.0]], "")}


def test_a_call_larger_than_a_pipe(make):
    """16 samples of 100 kB: more than a pipe holds in one piece, in both directions of a busy queue."""
    grader = make("echo")
    for group in range(3):
        submit(grader, group, ["1." + "0" * 100_000] * 16)
    assert collect(grader, 3) == {group: ([[1.0] * 16], "") for group in range(3)}


def test_weighted_sum_of_parts():
    """Weights default to 1; a part of None is left out, not counted as 0; None alone stays None (L13)."""
    assert total([1.0, 0.5], ()) == 1.5 and total([1.0, 0.5], (2.0, -4.0)) == 0.0
    assert total([None, 0.5], (2.0, 3.0)) == 1.5 and total([0.0, None], (2.0, 3.0)) == 0.0
    assert total([None, None], ()) is None and total([None], (2.0,)) is None
    assert total([0.1] * 10, ()) == 1.0


def test_the_toy_rewards():
    """The functions that the shipped tasks use, at their ends and in between."""
    assert copy_digits(None, ["6311", "631", "6312", "", "63119"], ["6311"] * 5) == [1.0, 0.75, 0.75, 0.0, 0.8]
    assert copy_digits(None, [""], [""]) == [0.0]
    assert right_sum(None, ["12\n", " 12", "13", "12\nmore"], ["12"] * 4) == [0.5, 0.5, 0.0, 0.5]
    assert stops_after_number(None, ["12\n", "12", "\n", "1 2\n", "12\n\n"]) == [0.5, 0.0, 0.0, 0.0, 0.0]


# --- what functions do wrong


def test_l13_none_nan_and_infinity_are_unscored(make):
    """L13: a sample without a reward is None, never 0; NaN and infinity would poison the group's mean."""
    grader = make("echo")
    submit(grader, 0, ["1", "none", "nan", "inf", "bool", "-0.5"])
    submit(grader, 1, ["none", "none"])
    assert collect(grader, 2) == {0: ([[1.0, None, None, None, 1.0, -0.5]], ""), 1: ([[None, None]], "")}


@pytest.mark.parametrize("completions, text", [
    (["1", "raise", "1"], "KeyError: 'the gold is broken'"), (["short", "1"], "returned 1 rewards for 2 completions"),
    (["1", "scalar"], "TypeError"), (["nothing", "1"], "TypeError"), (["string", "1"], "TypeError")])
def test_l13_a_function_that_fails_leaves_its_group_unscored(completions, text, make):
    """L13: raises, returns the wrong length or type: every part of that group is None, the error's text is there, others go on."""
    grader = make("length", "echo")
    submit(grader, 0, completions)
    submit(grader, 1, ["1", "calls"])
    results = collect(grader, 2)
    assert results[0][0] == [[None] * len(completions)] * 2 and text in results[0][1]
    assert results[1] == ([[1.0, 1.0], [1.0, 2.0]], ""), "the same process went on: its second call"


def test_a_hang_is_killed_and_costs_its_own_call_only(make):
    """DESIGN 9: killed after timeout_s, unscored with the reason; the calls queued behind it are graded."""
    grader = make("echo", timeout_s=0.5)
    start = time.monotonic()
    for group, text in enumerate(["1", "hang", "2", "3"]):
        submit(grader, group, [text])
    results = collect(grader, 4)
    assert results == {0: ([[1.0]], ""), 1: ([[None]], "no answer within 0.5 s"), 2: ([[2.0]], ""), 3: ([[3.0]], "")}
    assert 0.5 <= time.monotonic() - start < 15


def test_the_limit_is_each_calls_own(make):
    """Time in the queue does not count: five calls of 0.3 s behind each other all end within a limit of 0.9 s."""
    grader = make("echo", timeout_s=0.9)
    for group in range(5):
        submit(grader, group, ["slow 0.3"])
    assert collect(grader, 5) == {group: ([[1.0]], "") for group in range(5)}


@pytest.mark.parametrize("how", ["exit", "sys.exit"])
def test_a_worker_that_dies_costs_its_own_call_only(how, make):
    """A segfault or os._exit in a grader: its group is unscored, a new worker takes the rest."""
    grader = make("echo")
    for group, text in enumerate([how, "2", how, "4"]):
        submit(grader, group, [text, "1"])
    results = collect(grader, 4)
    assert results[0] == results[2] and results[0][0] == [[None, None]] and results[0][1]
    assert (results[1], results[3]) == (([[2.0, 1.0]], ""), ([[4.0, 1.0]], ""))


def test_a_worker_killed_while_idle_costs_nothing(make, tmp_path):
    """The out-of-memory killer takes a worker between two calls: the next submit must not raise BrokenPipeError in the engine."""
    grader = make("echo")
    submit(grader, 0, [f"leave {tmp_path}/pid"])
    collect(grader, 1)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 9)
    while alive(pid):
        time.sleep(0.005)
    submit(grader, 1, ["1" + "0" * 200_000, "2"])  # larger than a pipe's buffer, so that nothing hides the closed end
    submit(grader, 2, ["3"])
    results = collect(grader, 2)
    assert results[2] == ([[3.0]], "") and (results[1][0] == [[None, None]] or results[1][1] == "")


def test_prints_do_not_corrupt_the_protocol(make):
    """Python's stdout, a child's stdout and a line that looks like an answer all end on stderr."""
    grader = make("echo")
    submit(grader, 4, ["print", "3"])
    submit(grader, 5, ["5"])
    assert collect(grader, 2) == {4: ([[2.0, 3.0]], ""), 5: ([[5.0]], "")}


def test_a_child_that_reads_stdin_does_not_eat_the_protocol(make):
    """A graded program that calls input() inherits the worker's stdin: it would wait for, and swallow, the next group."""
    grader = make("echo", timeout_s=3.0)
    submit(grader, 0, ["stdin"])
    submit(grader, 1, ["1"])
    assert collect(grader, 2) == {0: ([[0.0]], ""), 1: ([[1.0]], "")}


def test_children_of_a_killed_worker_end_with_it(make, tmp_path):
    """A hang is mostly a hung child (a program under test): killing the worker alone leaves one busy orphan a step."""
    grader = make("echo", timeout_s=1.0)
    submit(grader, 0, [f"child {tmp_path}/pid"])
    assert collect(grader, 1)[0][1] == "no answer within 1 s"
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    orphaned = alive(pid)
    if orphaned:
        os.kill(pid, 9)
    assert not orphaned


# --- many, loading, closing


def test_many_groups_on_two_workers_come_back_exactly_once(make):
    """200 groups, every tenth raising and one hanging: each id once, each with its own values."""
    grader = make("echo", "length", workers=2, timeout_s=2.0)
    texts = {group: "raise" if group % 10 == 3 else "hang" if group == 77 else str(group) for group in range(200)}
    results = {}
    for group, text in texts.items():
        submit(grader, group, [text, "1"], ids=[[0] * (group % 5), [0]])
        for number, *result in grader.poll():
            assert number not in results
            results[number] = tuple(result)
    results |= collect(grader, 200 - len(results))
    for group, text in texts.items():
        parts, error = results[group]
        if text.isdigit():
            assert (parts, error) == ([[float(group), 1.0], [float(group % 5), 1.0]], "")
        else:
            assert parts == [[None, None]] * 2 and error
    assert sum(bool(error) for _, error in results.values()) == 21


def test_submit_and_poll_do_not_block(make):
    """The engine decodes while functions run: 20 calls behind a slow one are taken in well under its second."""
    grader = make("echo")
    submit(grader, 0, ["slow 1.0"])
    start = time.monotonic()
    for group in range(1, 21):
        submit(grader, group, [str(group)])
        assert grader.poll() == []
    assert time.monotonic() - start < 0.5
    assert len(collect(grader, 21)) == 21


@pytest.mark.parametrize("source, spec, text", [
    ("import a_module_that_is_not_there", "bad.py:f", "a_module_that_is_not_there"),
    ("def f(:", "bad.py:f", "SyntaxError"), ("def g(): pass", "bad.py:f", "no attribute 'f'"),
    ("raise ValueError('half-written')", "bad.py:f", "died while importing"), ("f = 3", "bad.py:f", "bad.py:f"),
    ("def f(): pass", "gone.py:f", "No such file"), ("def f(): pass", "bad.py", "file.py:function"),
    ("import os; os._exit(1)", "bad.py:f", "died while importing")])
def test_a_function_that_cannot_be_imported_is_a_config_error(source, spec, text, tmp_path):
    """Found when the actor starts, with the spec and the cause, not by a run whose groups are all unscored."""
    (tmp_path / "bad.py").write_text(source)
    grader = Grader(Reward(functions=(f"{tmp_path}/{spec}",)))
    try:
        with pytest.raises(ConfigError, match="`reward.functions`") as error:
            grader.wait_ready()
        assert spec in str(error.value) and text in str(error.value)
    finally:
        grader.close()


@pytest.mark.parametrize("source", ["def f(:", "import os; os._exit(1)"])
def test_a_file_that_breaks_during_the_run_is_an_error(source, make, tmp_path):
    """A restarted worker imports the file again: if that fails now, the queue must not wait while workers are born and die."""
    grader = make("echo")
    (tmp_path / "rewards.py").write_text(source)
    submit(grader, 0, ["exit"])
    submit(grader, 1, ["1"])
    with pytest.raises(ConfigError, match="`reward.functions`"):
        collect(grader, 2, limit_s=5.0)


def test_load_function_by_file_and_by_module(tmp_path):
    """`file.py:name` relative to the working directory or the project, `module:name` for installed packages."""
    assert load_function("reward.py:copy_digits").__name__ == "copy_digits"
    assert load_function("math:fsum")([1, 2]) == 3
    (tmp_path / "json.py").write_text("def f(**k): return 'mine'")
    assert load_function(f"{tmp_path}/json.py:f")() == "mine", "a file named like a standard module is still the file"
    with pytest.raises(ConfigError, match="write file.py:function or module:function"):
        load_function("reward.py")


def test_close_ends_every_worker(make):
    """No grading process survives its actor, busy or idle."""
    grader = make("echo", workers=2)
    submit(grader, 0, ["hang"])
    pids = [worker.process.pid for worker in grader.workers]
    grader.close()
    assert not any(map(alive, pids))


def test_seconds_inside_functions_are_counted(make):
    """Grading overlaps decoding; the ledger shows its seconds beside the timeline, once."""
    grader = make("echo", workers=2)
    submit(grader, 0, ["slow 0.3"])
    submit(grader, 1, ["slow 0.2"])
    collect(grader, 2)
    assert 0.5 <= grader.take_seconds() < 1.5 and grader.take_seconds() == 0.0
