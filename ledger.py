"""Where every second of every rank goes, and the files that a run leaves behind. No torch.

A rank's main timeline is split without overlap: spans may nest, and an inner span's time is taken from the outer one. What
no span covers is `other`, and is shown like the rest. Work that overlaps the timeline (grading) is counted beside it.

On a GPU the timeline is the stream's. A launch returns in microseconds while a 70B's backward runs for seconds, and a host's clock
would book those on whichever line next waits for the device. So each end of a span is an event in the stream, read once it has
passed: spans still follow each other without overlap, and nothing waits until the books are closed.

All ranks are on rank 0's clock. A flow is an arrow between spans of different ranks: `group` from a prompt's release through the
actor to the forward that trains on it, `weights to rank r` from the optimizer step through the publication to the swap.

    RUN/metrics.jsonl   one object a step          RUN/config.yaml   the effective config, revision and versions
    RUN/eval.jsonl      one an evaluation          RUN/trace.json    spans of all ranks; open in ui.perfetto.dev
    RUN/rollouts.jsonl  samples with their text    RUN/model/        the trained model
    RUN/ledger.jsonl    seconds, one a rank and step
"""

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

# `exchange`: an actor's messages, prompts taken in, finished groups sent; a learner's fetching of payloads is `wait_rollouts`.
# `evaluate` and `report` are rank 0's: waiting for an evaluation (decode and prefill on actors), and writing metrics.
KINDS = ("decode", "prefill", "exchange", "wait_prompts", "wait_rollouts", "score", "forward", "backward", "optimizer", "publish",
         "checkpoint", "evaluate", "report")
ROLES = ("learner", "actor", "colocated")  # whose mean seconds metrics.jsonl has as t_<role>_<kind>
MERGE_GAP_S = 1e-3
MFU_CONVENTION = "2 FLOP a weight and forward, the causal half of attention, the head on response tokens, nothing recomputed"
FLOWS = 16  # groups of a step whose way is drawn: arrows for 512 of them would hide the picture
ROUND_TRIPS = 8


class HostEvent:
    """What a CUDA event is, on the host's clock: passed as soon as it is recorded."""
    __slots__ = ("at",)

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "HostEvent") -> float:  # milliseconds
        return (later.at - self.at) * 1e3


class Ledger:
    """Spans of one rank. `account()` closes the books since the last call; `events()` hands over the trace's share."""

    def __init__(self, trace: bool, new_event: Callable = HostEvent, groups_per_step: int = FLOWS):
        self._trace, self._new_event = trace, new_event
        self._every = -(-groups_per_step // FLOWS)
        self._open: list[list[str]] = []  # names of the spans that are open, outer ones first
        self._last = "start"  # name of the span that was closed last
        self._closed: deque = deque()  # (kind, begin, end, depth), inner spans before the one around them
        self._inner: dict[int, float] = {}  # depth -> seconds of the spans there, for the one around them
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._beside: dict[str, float] = {}
        self._spans: list[tuple[str, float, float]] = []
        self._marks: list[tuple] = []  # (phase, name, number, event) of flows
        self._flows: list[tuple[str, str, int, float]] = []
        self.offset_s = self.error_s = 0.0
        self._set_zero(self._mark())

    def _mark(self):
        event = self._new_event()
        event.record()
        return event

    def _set_zero(self, event) -> None:
        """Count from `event`, whose time is known once the host has waited for it: within 10 us on a GPU. Done for every account,
        since the driver's milliseconds are fp32, which resolve 30 us after 300 s."""
        event.synchronize()
        self._zero, self._zero_at = event, time.perf_counter()

    def _at(self, event) -> float:
        """An event's time on the host's clock; waits for it."""
        event.synchronize()
        return self._zero_at + self._zero.elapsed_time(event) / 1e3

    def follow(self, channel, rank: int, world: int) -> None:
        """Put this rank's trace on rank 0's clock, which it asks for through the store. All ranks call it.

        On one machine all read the same clock. Elsewhere the answer was read at some time of a round trip, so its middle is wrong
        by half of it at most, as in NTP; the quickest of a few is taken.
        """
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        for _ in range(ROUND_TRIPS * (world - 1) if rank == 0 else 0):
            asking = channel.wait("clock", "all ranks to read the clock")["rank"]
            channel.push(f"clock/{asking}", {"boot": boot, "now": time.perf_counter()})
        trips = []
        for _ in range(ROUND_TRIPS if rank else 0):
            asked = time.perf_counter()
            channel.push("clock", {"rank": rank})
            answer = channel.wait(f"clock/{rank}", "rank 0's clock")
            seconds = time.perf_counter() - asked
            trips.append((seconds, answer["now"] - asked - seconds / 2))
        if trips and answer["boot"] != boot:
            self.error_s, self.offset_s = min(trips)[0] / 2, min(trips)[1]

    @contextmanager
    def span(self, kind: str):
        """Count the body's time, less that of spans inside it, as `kind` (one of KINDS), or as what it puts into `[0]`."""
        begin, name = self._mark(), [kind]
        self._open.append(name)
        try:
            yield name
        finally:
            self._last = self._open.pop()[0]
            self._closed.append((name[0], begin, self._mark(), len(self._open)))
            self._settle(wait=False)

    @property
    def phase(self) -> str:
        """The kind of the innermost open span, or of the last one; asked by another thread, too."""
        return [[self._last], *self._open][-1][0]

    def flow(self, phase: str, number: int, name: str = "group") -> None:
        """A point (`s`tart, s`t`ep or `f`inish) of an arrow, in the span that is open. Evaluations have negative numbers."""
        drawn = number >= 0 and (name != "group" or number % self._every == 0)
        if self._trace and drawn:
            self._marks.append((phase, name, number, self._mark()))

    def _settle(self, wait: bool) -> None:
        """Book the closed spans that have passed; with `wait`, all of them."""
        while self._closed and (wait or self._closed[0][2].query()):
            kind, begin, end, depth = self._closed.popleft()
            start = self._at(begin)
            duration = self._at(end) - start
            self._seconds[kind] += duration - self._inner.pop(depth + 1, 0.0)
            if depth:
                self._inner[depth] = self._inner.get(depth, 0.0) + duration
            if self._trace:
                self._record(kind, start + self.offset_s, duration)

    def _record(self, kind: str, start: float, duration: float) -> None:
        """Neighbours of one kind become one event, and so they do around a moment elsewhere: a thousand decode steps with a look
        into the inbox after each are one bar, and a trace stays small."""
        for back in (1, 2):
            last, began, lasted = self._spans[-back] if back <= len(self._spans) else ("", 0.0, 0.0)
            if start < began + lasted - MERGE_GAP_S / 10:  # around it, not after it
                break
            if last == kind and start - began - lasted < MERGE_GAP_S:
                self._spans[-back:] = [(kind, began, start + duration - began)]
                return
        self._spans.append((kind, start, duration))

    def beside(self, kind: str, seconds: float) -> None:  # what overlapped the main timeline
        self._beside[kind] = self._beside.get(kind, 0.0) + seconds

    def account(self) -> dict[str, float]:
        """Seconds by kind since the last call, `other`, their sum `wall`, and `beside_*`; then start anew. No span may be open."""
        self._close()
        before = self._zero
        self._set_zero(self._mark())
        wall = before.elapsed_time(self._zero) / 1e3
        account = {kind: seconds for kind, seconds in self._seconds.items() if seconds}
        account |= {"other": max(0.0, wall - sum(account.values())), "wall": wall}
        account |= {f"beside_{kind}": seconds for kind, seconds in self._beside.items()}
        self._seconds, self._beside = dict.fromkeys(KINDS, 0.0), {}
        return account

    def events(self) -> dict:
        """What the trace gets since the last call: `spans` (kind, start, seconds) and `flows` (phase, name, number, time)."""
        self._close()
        events = {"spans": self._spans, "flows": self._flows, "error_s": self.error_s}
        self._spans, self._flows = [], []
        return events

    def _close(self) -> None:
        self._settle(wait=True)
        self._flows += [(*flow, self._at(event) + self.offset_s) for *flow, event in self._marks]
        self._marks = []


def merge_accounts(accounts: list[dict[str, float]], role: str) -> dict[str, float]:
    """Mean seconds by kind over the ranks of a role, as metrics keys `t_<role>_<kind>`."""
    kinds = sorted({kind for account in accounts for kind in account})
    return {f"t_{role}_{kind}": sum(account.get(kind, 0.0) for account in accounts) / len(accounts) for kind in kinds}


class RunFolder:
    """The files of a run, written by rank 0. An earlier run's folder is renamed, never overwritten, unless it goes on.

    A run that goes on at `version` forgets the rows of later steps; what they took stays in the trace.
    """

    def __init__(self, path: str, version: int | None = None):
        self.path = Path(path)
        self.moved = None
        self._files: dict[str, TextIO] = {}
        self._named: set[int] = set()
        if version is not None:
            for name, key in (("metrics", "step"), ("ledger", "step"), ("rollouts", "step"), ("eval", "version")):
                self._cut(self.path / f"{name}.jsonl", key, version)
            self._open_trace()
        elif self.path.exists() and any(self.path.iterdir()):
            number = next(n for n in range(1, 1 << 30) if not self.path.with_name(f"{self.path.name}.{n}").exists())
            self.moved = self.path.with_name(f"{self.path.name}.{number}")
            self.path.rename(self.moved)
        self.path.mkdir(parents=True, exist_ok=True)
        self.append("metrics.jsonl", [])

    def _cut(self, file: Path, key: str, version: int) -> None:
        """Keep the rows before `version`; the last line of a killed run may be half a row."""
        if file.exists():
            lines = file.read_text(encoding="utf-8").split("\n")
            whole = [line for line in lines[:-1] if json.loads(line)[key] < version]
            file.write_text("".join(f"{line}\n" for line in whole), encoding="utf-8")
            self._files[file.name] = file.open("a", encoding="utf-8")

    def _open_trace(self) -> None:
        """Cut the trace behind its last whole event, so that more can follow."""
        file = self.path / "trace.json"
        if file.exists():
            events = [line.removesuffix(",") for line in file.read_text().split("\n") if line.startswith("{")]
            whole = [event for event in events if event.endswith("}")]
            file.write_text("[\n" + ",\n".join(whole))
            if whole:
                self._files[file.name] = file.open("a")

    def write_config(self, yaml_text: str, provenance: dict[str, str]) -> None:
        header = "".join(f"# {name}: {value}\n" for name, value in provenance.items())
        (self.path / "config.yaml").write_text(header + yaml_text)

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            self._files[name] = (self.path / name).open("w", encoding="utf-8")
        return self._files[name]

    def append(self, name: str, rows: list[dict]) -> None:
        """Add rows to a JSON-lines file of the run, with the kernel when this returns."""
        self._write(name, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))

    def read(self, name: str) -> list[dict]:
        """All rows of a JSON-lines file of the run, those of earlier attempts among them."""
        return [json.loads(line) for line in (self.path / name).read_text(encoding="utf-8").splitlines()]

    def _write(self, name: str, text: str) -> None:
        try:
            self._file(name).write(text)
            self._file(name).flush()
        except OSError as error:
            error.filename = str(self.path / name)  # a full disk's error does not say where
            raise

    def trace(self, rank: int, role: str, events: dict) -> None:
        """Append a rank's events to the Chrome trace. A run that is cut leaves an open array, which viewers accept."""
        labels = [(0, "process_name", {"name": f"rank {rank} {role}"}), (0, "process_sort_index", {"sort_index": rank}),
                  (0, "process_labels", {"labels": f"clock within {events['error_s'] * 1e3:.2f} ms of rank 0's"}),
                  (0, "thread_name", {"name": "main timeline"}), *([(1, "thread_name", {"name": "steps"})] if rank == 0 else [])]
        rows = [{"tid": tid, "name": name, "ph": "M", "args": label} for tid, name, label in labels if rank not in self._named]
        rows += [{"name": kind, "cat": role, "ph": "X", "ts": start * 1e6, "dur": seconds * 1e6}
                 for kind, start, seconds in events["spans"]]
        rows += [{"name": name, "cat": "flow", "ph": phase, "id": number, "bp": "e", "ts": at * 1e6}
                 for phase, name, number, at in events["flows"]]
        if events["spans"]:
            self._named.add(rank)
            self._append_trace([{"pid": rank, "tid": 0} | row for row in rows])

    def trace_step(self, step: int, start: float, end: float) -> None:
        """Append a step, on a second line of rank 0."""
        if self._named:
            self._append_trace([{"pid": 0, "tid": 1, "name": f"step {step}", "cat": "step", "ph": "X", "ts": start * 1e6,
                                 "dur": (end - start) * 1e6}])

    def _append_trace(self, rows: list[dict]) -> None:
        opening = ",\n" if "trace.json" in self._files else "[\n"
        self._write("trace.json", opening + ",\n".join(map(json.dumps, rows)))

    def close(self) -> None:
        if "trace.json" in self._files:
            self._files["trace.json"].write("\n]\n")
        for file in self._files.values():
            file.close()


def memory_line(kinds: dict[str, int]) -> str:
    """Rank 0's bytes by kind, largest first."""
    shown = ", ".join(f"{kind} {size / 1e6:.1f}" for kind, size in sorted(kinds.items(), key=lambda item: -item[1])
                      if kind != "peak" and size)
    return f"memory of rank 0 in MB: {shown}; peak of the process {kinds['peak'] / 1e6:.0f}"


def step_line(row: dict, steps: int, bounds: dict[str, float]) -> str:
    """One line a step, with units. Per cents are of `bounds` (FLOP/s, bytes/s, link GB/s, measured at start) and of wall time."""
    def share(role: str) -> str:
        wall = row.get(f"t_{role}_wall", 0.0)
        parts = {key.removeprefix(f"t_{role}_"): row[key] / wall for key in row
                 if wall and key.startswith(f"t_{role}_") and key != f"t_{role}_wall" and "beside" not in key}
        shown = sorted(parts.items(), key=lambda item: -item[1])
        return " ".join(f"{kind} {part:.0%}" for kind, part in shown if part >= 0.005)

    shares = " | ".join(f"{role}: {share(role)}" for role in ROLES if f"t_{role}_wall" in row)
    parts = " ".join(f"{part} {row[f'publish_{part}_s'] * 1e3:.0f}" for part in ("cast", "wire", "write", "verify"))
    link = f" {row['publish_wire_gb_s'] / bounds['link']:.0%} of link" if bounds["link"] else ""
    reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
    return (f"step {row['step'] + 1:>4}/{steps} | reward {reward} kl {row['kl']:.4f} "
            f"ent {row['entropy']:.3f} gap {row['logprob_gap_max']:.1e} len {row['response_len']:.1f} "
            f"stale {row['staleness_max']} | {row['step_s']:.2f} s {row['tokens_per_s']:.0f} tok/s "
            f"MFU {row['learner_flops_per_s'] / bounds['flops']:.1%} MBU {row['decode_bytes_per_s'] / bounds['bandwidth']:.1%} "
            f"publish {row['publish_mb']:.1f} MB {row['publish_s'] * 1e3:.0f} ms "
            f"({parts}; actors stopped {row['publish_exposed_s'] * 1e3:.0f}) {row['publish_wire_gb_s']:.2f} GB/s{link} | {shares}")
