"""One page about a run: what it learned, what it produced, where the seconds went, and what the samples say.

    python report.py RUN [--steps FIRST:LAST]        writes RUN/report.html

The page is one file that loads nothing: data as JSON, charts drawn by the script at its end, so that it can be mailed and opened in
ten years. Model output is untrusted text: inside the JSON every `<` is escaped, and the script only ever makes text nodes of it.

How to read it. A reward that rises while entropy falls to nothing and responses all hit the limit is hacking: sort the samples by
reward. The logprob gap is rounding at staleness 0 (1e-5 in fp32) and must not grow. Of the seconds, grey is waiting: where actors
wait for prompts and learners for rollouts in turn, max_staleness=1 overlaps them; where one side waits alone, it has too many
ranks. A step of a 70B is minutes and a run days, so long runs are thinned to means of some steps, and in the timeline spans shorter
than its resolution are shown by the kind that took most of their time; `--steps` shows a stretch in full.
"""

import argparse
import html
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from config import ConfigError
from ledger import KINDS, ROLES

POINTS, SPANS, SAMPLE_CHARACTERS = 1500, 60_000, 8_000_000  # at most, on the page


def objects(file: Path, only: str = "") -> Iterator[dict]:
    """The objects of JSON lines or of a trace, one a line, if the line contains `only`. A killed run's half-written last line is
    left out; ConfigError for any other that is none."""
    broken = 0
    if not file.is_file():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            line = line.strip().rstrip(",")
            if line in ("", "[", "]") or only not in line:
                continue
            if broken:
                raise ConfigError(f"{file}, line {broken}, is not a JSON object: only the last line of a killed run may be cut")
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                row = None
            if isinstance(row, dict):
                yield row
            else:
                broken = number


def finite(value):
    """The same JSON value with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def fold(rows: list[dict], at: str, key: str, every: int) -> dict[int, float]:
    """Values of `key` by step, `every` steps together: their mean, or the largest of a maximum. What is no number is left out."""
    together = defaultdict(list)
    for row in rows:
        if isinstance(row.get(key), int | float):
            together[row[at] // every].append(row[key])
    return {step: max(values) if key.endswith("_max") else sum(values) / len(values) for step, values in together.items()}


def make_charts(metrics: list[dict], evaluations: list[dict]) -> list[dict]:
    """What the page draws: title, unit, steps, and a list of values for each series. Lines, or layers that add up (`stack`)."""
    every = max(1, -(-len(metrics) // POINTS))

    def chart(title: str, unit: str, keys: dict[str, str], held_out: str = "", **style) -> dict:
        columns = {name: fold(metrics, "step", key, every) for name, key in keys.items()}
        if held_out:
            columns["greedy, held out"] = fold(evaluations, "version", held_out, every)
        steps = sorted({row["step"] // every for row in metrics}.union(*columns.values()))
        series = [{"name": name, "join": name not in keys, "y": [values.get(step) for step in steps]}
                  for name, values in columns.items() if values]
        return {"title": title, "unit": unit, "x": [step * every for step in steps], "series": series} | style

    def seconds(role: str) -> dict:
        found = {key.removeprefix(f"t_{role}_") for row in metrics for key in row if key.startswith(f"t_{role}_")}
        kinds = [*KINDS, *sorted(kind for kind in found if kind not in (*KINDS, "other", "wall") and "beside" not in kind), "other"]
        return chart(f"{role} ranks: seconds of a step", "s, mean", {kind: f"t_{role}_{kind}" for kind in kinds}, stack=True)

    roles = [role for role in ("actor", "learner", "colocated") if any(f"t_{role}_wall" in row for row in metrics)]
    publication = ("wait", "cast", "wire", "write", "verify")
    return [
        chart("reward", "mean", {"samples of the step": "reward"}, "reward"),
        chart("KL", "nats a token", {"KL": "kl"}), chart("entropy", "nats a token", {"entropy": "entropy"}),
        chart("logprob gap, learner − engine", "nats", {"max": "logprob_gap_max", "mean": "logprob_gap_mean"}, log=True),
        chart("response length", "tokens", {"mean": "response_len"}, "response_len"),
        chart("share of samples truncated, of groups without variance", "",
              {"truncated": "truncated", "zero variance": "zero_variance"}),
        chart("response tokens of a step", "tokens", {name: f"tokens_{name}" for name in ("trained", "filtered", "unscored")},
              stack=True),
        chart("staleness", "versions", {"max": "staleness_max"}), chart("gradient norm", "", {"norm": "grad_norm"}),
        chart("throughput", "response tokens/s", {"tokens/s": "tokens_per_s"}), *map(seconds, roles),
        chart("publication", "s, parts overlap", {"total": "publish_s"} | {part: f"publish_{part}_s" for part in publication}),
        chart("publication rate", "GB/s", {"in all": "publish_gb_s", "wire + write": "publish_wire_gb_s"})]


def coarsen(spans: list[tuple], shortest: float) -> list[tuple]:
    """Spans (start, end, kind) with neighbours that together are shorter than `shortest` made one, of the kind with most of it."""
    coarse, seconds = [], Counter()
    for start, end, kind in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not coarse or end - coarse[-1][0] > shortest:
            coarse.append((start, end, kind))
            seconds.clear()
        seconds[kind] += end - start
        coarse[-1] = (coarse[-1][0], max(end, coarse[-1][1]), seconds.most_common(1)[0][0])
    return coarse


def make_timeline(trace: Path, steps: tuple[int, int] | None) -> dict:
    """A lane of spans for each rank, in microseconds, at the finest resolution at which they fit on the page."""
    bounds = {int(row["name"].removeprefix("step ")): (row["ts"], row["ts"] + row["dur"])
              for row in objects(trace, '"cat": "step"')}
    shown = [step for step in sorted(bounds) if steps is None or steps[0] <= step <= steps[1]]
    if steps and not shown:
        raise ConfigError(f"{trace} has no step from {steps[0]} to {steps[1]}" +
                          (f", but those from {min(bounds)} to {max(bounds)}" if bounds else ""))
    first, last = (bounds[shown[0]][0], bounds[shown[-1]][1]) if steps else (-math.inf, math.inf)
    lanes, names, count, shortest = defaultdict(list), {}, 0, 0.0

    def coarsen_all() -> int:
        """Spans that are left."""
        for rank, spans in lanes.items():
            lanes[rank] = coarsen(spans, shortest)
        return sum(map(len, lanes.values()))

    for row in objects(trace):
        if row["ph"] == "M" and row["name"] == "process_name":
            names[row["pid"]] = row["args"]["name"]
        if row["ph"] != "X" or row["tid"] or row["ts"] >= last or row["ts"] + row["dur"] <= first:
            continue
        lanes[row["pid"]].append((max(first, row["ts"]), min(last, row["ts"] + row["dur"]), row["name"]))
        count += 1
        if count > SPANS:
            count = coarsen_all()
            while count > SPANS / 2:
                shortest = 2 * shortest or 1.0
                count = coarsen_all()
    coarsen_all()
    zero = min((start for spans in lanes.values() for start, _, _ in spans), default=0.0)
    kinds = sorted({kind for spans in lanes.values() for _, _, kind in spans})
    return {"kinds": kinds, "resolution": shortest / 1e3,
            "steps": [[step, *(round(at - zero) for at in bounds[step])] for step in shown],
            "lanes": [{"name": names.get(rank, f"rank {rank}"), "spans": [
                number for start, end, kind in spans for number in (round(start - zero), round(end - zero), kinds.index(kind))]}
                for rank, spans in sorted(lanes.items())]}


def make_books(run: Path) -> list[dict]:
    """Seconds of the whole run by rank and kind."""
    books: dict[tuple, Counter] = defaultdict(Counter)
    for row in objects(run / "ledger.jsonl"):
        books[row["rank"], row["role"]].update({kind: value for kind, value in row.items() if kind not in ("step", "rank", "role")})
    return [{"name": f"rank {rank} {role}", "seconds": book} for (rank, role), book in sorted(books.items())]


def make_samples(run: Path) -> dict:
    """Rows of the table, every n-th if all their text were too much for a page."""
    rows = list(objects(run / "rollouts.jsonl"))
    every = max(1, -(-sum(len(row["text"]) + len(row["prompt"]) for row in rows) // SAMPLE_CHARACTERS))
    return {"total": len(rows), "rows": [{"tokens": len(row["versions"]), "version": min(row["versions"], default=None)} | row
                                         for row in rows[::every]]}


def make_facts(metrics: list[dict], evaluations: list[dict]) -> dict[str, str]:
    """The page's first lines."""
    def share(role: str, kind: str) -> str:
        wall = sum(row.get(f"t_{role}_wall", 0.0) for row in metrics)
        return f"{sum(row.get(f't_{role}_{kind}', 0.0) for row in metrics) / wall:.1%}" if wall else "–"

    roles = [role for role in ROLES if any(f"t_{role}_wall" in row for row in metrics)]
    one = roles[0] if len(roles) == 1 else ""  # colocated, or a trainer without actors
    rewards = [row["reward"] for row in metrics if row["reward"] is not None]
    greedy = [row["reward"] for row in evaluations if row["reward"] is not None]
    seconds = sum(row["step_s"] for row in metrics)
    return {
        "steps": f"{len(metrics)}", "training": f"{seconds:,.0f} s",
        "reward": f"{rewards[0]:.3f} → {sum(rewards[-10:]) / len(rewards[-10:]):.3f}" if rewards else "–",
        "held out": f"{greedy[0]:.3f} → {greedy[-1]:.3f}" if greedy else "–",
        "response tokens/s": f"{sum(row['tokens_per_s'] * row['step_s'] for row in metrics) / seconds:,.0f}" if seconds else "–",
        "largest logprob gap": f"{max((row['logprob_gap_max'] for row in metrics), default=0.0):.1e}",
        "actors wait for prompts": share(one or "actor", "wait_prompts"),
        "learners wait for rollouts": share(one or "learner", "wait_rollouts"),
        **{f"other, {role} ranks": share(role, "other") for role in roles}}


def make_page(run: Path, steps: tuple[int, int] | None = None) -> str:
    """The report of a run folder as HTML. Raises ConfigError."""
    if not (run / "metrics.jsonl").is_file():
        raise ConfigError(f"{run} is no run folder: it has no metrics.jsonl; give the run_dir of a run, such as runs/toy")
    metrics, evaluations = (finite(list(objects(run / name))) for name in ("metrics.jsonl", "eval.jsonl"))
    data = finite({"charts": make_charts(metrics, evaluations), "timeline": make_timeline(run / "trace.json", steps),
                   "books": make_books(run), "samples": make_samples(run)})
    facts = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>"
                    for name, value in make_facts(metrics, evaluations).items())
    config = run / "config.yaml"
    parts = {"name": html.escape(run.resolve().name), "facts": facts,
             "config": html.escape(config.read_text(encoding="utf-8")) if config.is_file() else "",
             "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")}
    return re.sub("<!--(\\w+)-->", lambda mark: parts[mark[1]], Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))


def main(argv: list[str]) -> int:
    """Write the page; 2 for a folder that is no run, or whose files are broken."""
    parser = argparse.ArgumentParser(description="Write RUN/report.html: what a run learned, and who was idle.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--steps", metavar="FIRST:LAST", help="show these steps in the timeline (default: all, coarser)")
    arguments = parser.parse_args(argv)
    try:
        steps = re.fullmatch(r"(\d+):(\d+)", arguments.steps or "0:0")
        if not steps:
            raise ConfigError(f"--steps {arguments.steps}: give two step numbers, such as 100:120")
        page = make_page(arguments.run, (int(steps[1]), int(steps[2])) if arguments.steps else None)
    except ConfigError as error:
        print(f"report error: {error}", file=sys.stderr)
        return 2
    out = arguments.run / "report.html"
    out.write_text(page, encoding="utf-8")
    print(f"{out}: {len(page) / 1e6:.1f} MB, open it in a browser")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
