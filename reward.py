"""Rewards: functions with TRL's signature, run in worker processes of the actor's host while decoding goes on.

    def my_reward(prompts, completions, **columns) -> list[float | None]

called once a group with one entry a sample; `columns` are the data set's other columns and `completion_ids`. None means that
no reward can be given (the sample is masked, never counted as 0). With several functions the reward is their weighted sum over
those that gave one. For message prompts, completions are [{"role": "assistant", "content": text}], as in TRL.

A worker is `python reward.py SPEC…` speaking JSON lines on its pipes: killable, nothing pickled. A call that hangs is killed
after `timeout_s` and costs its own group only; that a function raised is reported, and its group ends as unscored.
"""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path

from config import ConfigError, Reward


def copy_digits(prompts, completions, target, **columns):
    """The embedded task: share of positions that match, over the longer of the two lengths."""
    return [sum(a == b for a, b in zip(text, wanted, strict=False)) / max(len(text), len(wanted), 1)
            for text, wanted in zip(completions, target, strict=True)]


def right_sum(prompts, completions, answer, **columns):
    """Half of the addition task's reward: the first line of the completion is the sum."""
    return [0.5 * (text.split("\n")[0].strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]


def stops_after_number(prompts, completions, **columns):
    """The other half: digits, then the end of the line and nothing more."""
    return [0.5 * (text.endswith("\n") and text[:-1].isdigit()) for text in completions]


def load_function(spec: str) -> Callable:
    """The function named by `path/to/file.py:name` or `package.module:name`. Raises ConfigError if there is none."""
    module_name, colon, name = spec.rpartition(":")
    if not colon:
        raise ConfigError(f"`reward.functions` = {spec!r}: write file.py:function or module:function")
    try:
        if module_name.endswith(".py"):
            file = Path(module_name) if Path(module_name).is_file() else Path(__file__).parent / module_name
            sys.path.insert(0, str(file.parent.absolute()))  # a reward file may import its neighbours
            module_spec = importlib.util.spec_from_file_location(file.stem, file)
            module = importlib.util.module_from_spec(module_spec)
            sys.modules.setdefault(file.stem, module)  # dataclasses look their module up there
            module_spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(module_name)
        function = getattr(module, name)
        if not callable(function):
            raise AttributeError(f"{name} is not a function")
        return function
    except (ImportError, FileNotFoundError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"`reward.functions` = {spec!r}: {type(error).__name__}: {error}") from None


def total(parts: list[float | None], weights: tuple[float, ...]) -> float | None:
    """Weighted sum of the parts that gave a reward; None if none did, 0 where no function grades (a reward model does)."""
    if not parts:
        return 0.0
    given = [weight * part for weight, part in zip(weights or (1.0,) * len(parts), parts, strict=True) if part is not None]
    return math.fsum(given) if given else None


def _call(function: Callable, call: dict) -> list[float | None]:
    """One function on one group, its answer checked. Raises whatever the function raises, ValueError for a wrong answer."""
    rewards = function(prompts=call["prompts"], completions=call["completions"],
                       completion_ids=call["completion_ids"], **call["columns"])
    if len(rewards) != len(call["completions"]):
        raise ValueError(f"returned {len(rewards)} rewards for {len(call['completions'])} completions")
    return [float(reward) if reward is not None and math.isfinite(reward) else None for reward in rewards]


def _die_with_parent(parent: int) -> None:
    """A call that hangs must not outlive an actor that was killed: a child ends this session then, graded programs included.

    A process and not a thread: a regular expression that backtracks for ever holds the interpreter's lock.
    """
    worker = os.getpid()
    if os.fork():
        return
    os.closerange(0, 2)  # the actor must see the worker's end of the pipes close
    stat = Path(f"/proc/{worker}/stat")
    with contextlib.suppress(FileNotFoundError):  # the worker went between the two looks
        while os.getppid() == worker and int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
            time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)



def serve(specs: list[str]) -> None:
    """A worker's life: one JSON line in, one out. The functions' own prints go to stderr."""
    _die_with_parent(os.getppid())
    calls, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a graded program that reads its input must not swallow the next call
    os.dup2(2, 1)
    try:
        functions = [load_function(spec) for spec in specs]
    except ConfigError as error:
        print(json.dumps({"broken": str(error)}), file=answers)
        return
    print(json.dumps({"ready": True}), file=answers)
    for line in calls:
        call = json.loads(line)
        start = time.perf_counter()
        try:
            answer = {"parts": [_call(function, call) for function in functions]}
        except Exception:  # a process boundary: whatever a user's function raises is its group's problem alone
            answer = {"error": traceback.format_exc(limit=-2)}
        print(json.dumps(answer | {"id": call["id"], "seconds": time.perf_counter() - start}), file=answers)


class _Worker:
    """One worker process and the call it is busy with."""

    def __init__(self, specs: tuple[str, ...]):
        # A session of its own: Ctrl-C is the actor's to handle, and what the functions start can be killed with them.
        self.process = subprocess.Popen([sys.executable, __file__, *specs], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        start_new_session=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        os.set_blocking(self.process.stdout.fileno(), False)
        self.buffer = b""
        self.ready = False
        self.call: dict | None = None
        self.deadline = math.inf

    def read(self) -> dict | None:
        """A whole answer line, if one is there; `{}` if the process has gone."""
        while b"\n" not in self.buffer:
            piece = self.process.stdout.read(1 << 20)
            if piece is None:
                return None
            if piece == b"":
                return {}
            self.buffer += piece
        line, self.buffer = self.buffer.split(b"\n", 1)
        return json.loads(line)

    def start(self, call: dict, timeout_s: float) -> None:
        self.call, self.deadline = call, time.monotonic() + timeout_s
        with contextlib.suppress(BrokenPipeError):  # it has died: poll() will see that
            self.process.stdin.write(json.dumps(call).encode() + b"\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


class Grader:
    """Worker processes with a queue before them. `submit` and `poll` never block."""

    def __init__(self, settings: Reward):
        self.settings = settings
        self.pending: deque[dict] = deque()
        self.workers = [_Worker(settings.functions) for _ in range(settings.workers)]
        self._seconds = 0.0

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Block until every worker has imported its functions. Raises ConfigError if one cannot."""
        deadline = time.monotonic() + timeout_s
        for worker in self.workers:
            while not worker.ready:
                answer = worker.read()
                if answer is not None and not answer.get("ready"):
                    raise ConfigError(answer.get("broken", f"`reward.functions` = {list(self.settings.functions)}: "
                                                           "the worker process died while importing them"))
                worker.ready = answer is not None
                if time.monotonic() > deadline:
                    raise ConfigError(f"`reward.functions`: importing them took longer than {timeout_s:.0f} s")
                time.sleep(0.005)

    def submit(self, group: dict, completions: list, completion_ids: list[list[int]]) -> None:
        """Queue a group {group, prompt, columns} for grading; prompt and columns hold one value each, given to every sample."""
        n = len(completions)
        self.pending.append({"id": group["group"], "prompts": [group["prompt"]] * n, "completions": completions,
                             "completion_ids": completion_ids,
                             "columns": {name: [value] * n for name, value in group["columns"].items()}})
        self._feed()

    def poll(self) -> list[tuple[int, list[list[float | None]], str]]:
        """Graded groups as (id, parts per function and sample, error); with an error every part is None."""
        done = []
        for index, worker in enumerate(self.workers):
            answer = worker.read()
            if answer and "ready" in answer:
                worker.ready = True
                answer = worker.read()
            late = worker.call is not None and time.monotonic() > worker.deadline
            if answer is None and not late:
                continue
            if answer and "broken" in answer:
                raise ConfigError(answer["broken"])
            if answer == {} and not worker.ready:
                raise ConfigError(f"`reward.functions` = {list(self.settings.functions)}: a worker died while importing them")
            if answer:
                self._seconds += answer["seconds"]
                done.append(self._result(worker.call, answer.get("parts"), answer.get("error", "")))
                worker.call, worker.deadline = None, math.inf
                continue
            cause = f"no answer within {self.settings.timeout_s:g} s" if late else "the grading process died"
            if worker.call is not None:
                done.append(self._result(worker.call, None, cause))
            worker.stop()
            self.workers[index] = _Worker(self.settings.functions)
        self._feed()
        return done

    def take_seconds(self) -> float:
        """Seconds spent inside reward functions since the last call: beside the main timeline."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()

    def _result(self, call: dict, parts, error: str):
        unscored = [[None] * len(call["completions"]) for _ in self.settings.functions]
        return call["id"], parts or unscored, error[-2000:]  # an exception may carry a whole file

    def _feed(self) -> None:
        for worker in self.workers:
            if self.pending and worker.ready and worker.call is None:
                worker.start(self.pending.popleft(), self.settings.timeout_s)


if __name__ == "__main__":
    serve(sys.argv[1:])
