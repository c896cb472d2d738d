"""Where every second of every rank goes, and the files that a run leaves behind. No torch.

A rank's main timeline is split without overlap: spans may nest, and an inner span's time is taken from the outer one. What
no span covers is `other`, and is shown like the rest. Work that overlaps the timeline (grading) is counted beside it.

    RUN/metrics.jsonl   one object a step          RUN/config.yaml   the effective config, revision and versions
    RUN/eval.jsonl      one an evaluation          RUN/trace.json    spans of all ranks; open in ui.perfetto.dev
    RUN/rollouts.jsonl  samples with their text    RUN/model/        the trained model
"""

import json
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

# `exchange`: an actor's messages, prompts taken in, finished groups sent; a learner's fetching of payloads is `wait_rollouts`.
# `evaluate` and `report` are rank 0's: waiting for an evaluation (decode and prefill on actors), and writing metrics.
KINDS = ("decode", "prefill", "exchange", "wait_prompts", "wait_rollouts", "score", "forward", "backward", "optimizer", "publish",
         "checkpoint", "evaluate", "report")
MERGE_GAP_S = 1e-3


class Ledger:
    """Spans of one rank. `account()` closes the books since the last call; `events()` hands over the trace's share."""

    def __init__(self, trace: bool):
        self._trace = trace
        self._open: list[list] = []  # [kind, seconds spent in inner spans]
        self._seconds = dict.fromkeys(KINDS, 0.0)
        self._beside: dict[str, float] = {}
        self._events: list[tuple[str, float, float]] = []
        self._since = time.perf_counter()
        self._epoch = time.time() - time.perf_counter()  # one clock for all ranks of a machine

    @contextmanager
    def span(self, kind: str):
        """Count the body's time, less that of spans inside it, as `kind` (one of KINDS), or as what it puts into `[0]`."""
        start = time.perf_counter()
        self._open.append([kind, 0.0])
        try:
            yield self._open[-1]
        finally:
            duration = time.perf_counter() - start
            kind, inner = self._open.pop()
            self._seconds[kind] += duration - inner
            if self._open:
                self._open[-1][1] += duration
            if self._trace:
                self._record(kind, self._epoch + start, duration)

    def _record(self, kind: str, start: float, duration: float) -> None:
        """Spans of one kind in a row become one event: a thousand decode steps are one bar, and a trace stays small."""
        if self._events:
            last, began, lasted = self._events[-1]
            if last == kind and start - began - lasted < MERGE_GAP_S:
                self._events[-1] = (kind, began, start + duration - began)
                return
        self._events.append((kind, start, duration))

    def skip(self, seconds: float) -> None:
        """Leave out time that is no part of a step."""
        self._since += seconds

    def beside(self, kind: str, seconds: float) -> None:
        """Count work that overlapped the main timeline."""
        self._beside[kind] = self._beside.get(kind, 0.0) + seconds

    def account(self) -> dict[str, float]:
        """Seconds by kind since the last call, `other`, their sum `wall`, and `beside_*`; then start anew."""
        now = time.perf_counter()
        wall, self._since = now - self._since, now
        account = {kind: seconds for kind, seconds in self._seconds.items() if seconds}
        account |= {"other": max(0.0, wall - sum(account.values())), "wall": wall}
        account |= {f"beside_{kind}": seconds for kind, seconds in self._beside.items()}
        self._seconds, self._beside = dict.fromkeys(KINDS, 0.0), {}
        return account

    def events(self) -> list[tuple[str, float, float]]:
        """(kind, start in unix seconds, duration) of the spans closed since the last call."""
        events, self._events = self._events, []
        return events


def merge_accounts(accounts: list[dict[str, float]], role: str) -> dict[str, float]:
    """Mean seconds by kind over the ranks of a role, as metrics keys `t_<role>_<kind>`."""
    kinds = sorted({kind for account in accounts for kind in account})
    return {f"t_{role}_{kind}": sum(account.get(kind, 0.0) for account in accounts) / len(accounts) for kind in kinds}


class RunFolder:
    """The files of a run, written by rank 0. An earlier run's folder is renamed, never overwritten."""

    def __init__(self, path: str):
        self.path = Path(path)
        self.moved = None
        if self.path.exists() and any(self.path.iterdir()):
            number = next(n for n in range(1, 1 << 30) if not self.path.with_name(f"{self.path.name}.{n}").exists())
            self.moved = self.path.with_name(f"{self.path.name}.{number}")
            os.rename(self.path, self.moved)
        self.path.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}
        self.append("metrics.jsonl", [])

    def write_config(self, yaml_text: str, provenance: dict[str, str]) -> None:
        header = "".join(f"# {name}: {value}\n" for name, value in provenance.items())
        (self.path / "config.yaml").write_text(header + yaml_text)

    def _file(self, name: str) -> TextIO:
        if name not in self._files:
            self._files[name] = (self.path / name).open("w", encoding="utf-8")
        return self._files[name]

    def append(self, name: str, rows: list[dict]) -> None:
        """Add rows to a JSON-lines file of the run, on disk when this returns."""
        file = self._file(name)
        file.writelines(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        file.flush()

    def trace(self, rank: int, role: str, events: list[tuple[str, float, float]]) -> None:
        """Append spans as Chrome trace events. A run that is cut leaves an open array, which viewers accept."""
        known = "trace.json" in self._files
        rows = [{"name": kind, "cat": role, "ph": "X", "pid": rank, "tid": 0, "ts": start * 1e6, "dur": duration * 1e6}
                for kind, start, duration in events]
        if rows:
            file = self._file("trace.json")
            file.write(("" if known else "[\n") + (",\n" if known else "") + ",\n".join(map(json.dumps, rows)))
            file.flush()

    def close(self) -> None:
        if "trace.json" in self._files:
            self._files["trace.json"].write("\n]\n")
        for file in self._files.values():
            file.close()


def step_line(row: dict, steps: int, bounds: dict[str, float]) -> str:
    """One line a step, with units. Per cents are of `bounds` (FLOP/s, bytes/s, link GB/s, measured at start) and of wall time."""
    def share(role: str) -> str:
        wall = row.get(f"t_{role}_wall", 0.0)
        parts = {key.removeprefix(f"t_{role}_"): row[key] / wall for key in row
                 if wall and key.startswith(f"t_{role}_") and key != f"t_{role}_wall" and "beside" not in key}
        shown = sorted(parts.items(), key=lambda item: -item[1])
        return " ".join(f"{kind} {part:.0%}" for kind, part in shown if part >= 0.005)

    parts = " ".join(f"{part} {row[f'publish_{part}_s'] * 1e3:.0f}" for part in ("cast", "wire", "write", "verify"))
    reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
    return (f"step {row['step'] + 1:>4}/{steps} | reward {reward} kl {row['kl']:.4f} "
            f"ent {row['entropy']:.3f} gap {row['logprob_gap_max']:.1e} len {row['response_len']:.1f} "
            f"stale {row['staleness_max']} | {row['step_s']:.2f} s {row['tokens_per_s']:.0f} tok/s "
            f"MFU {row['learner_flops_per_s'] / bounds['flops']:.1%} MBU {row['decode_bytes_per_s'] / bounds['bandwidth']:.1%} "
            f"publish {row['publish_mb']:.1f} MB {row['publish_s'] * 1e3:.0f} ms "
            f"({parts}; actors stopped {row['publish_exposed_s'] * 1e3:.0f}) {row['publish_wire_gb_s']:.2f} GB/s "
            f"{row['publish_wire_gb_s'] / bounds['link']:.0%} of link | learner: {share('learner')} | actor: {share('actor')}")
