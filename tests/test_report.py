"""RUN/report.html: what it takes from a run's files, what it does with broken ones, and that a browser shows it."""

import html.parser
import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from browser import browse, why_none
from ranks import ROOT

import report
from config import ConfigError
from ledger import RunFolder

HOSTILE = ("</script><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\"> & <b>bold</b> "
           "<!--data-->")
SEPARATORS = "one\u2028two\x85three\rfour"
STEPS = 12


def metrics_row(step: int, **more) -> dict:
    return {"step": step, "version": step + 1, "reward": step / STEPS, "kl": 1e-3, "entropy": 2.0, "logprob_gap_max": 1e-6,
            "logprob_gap_mean": 1e-7, "response_len": 6.0, "truncated": 0.25, "zero_variance": 0.0, "staleness_max": 1,
            "grad_norm": 0.5, "tokens_generated": 900, "tokens_trained": 600, "tokens_filtered": 200, "tokens_unscored": 100,
            "tokens_per_s": 1000.0, "step_s": 2.0, "publish_s": 0.1, "publish_gb_s": 1.0, "publish_wire_gb_s": 2.0,
            "publish_wire_s": 0.05, "t_learner_forward": 0.5, "t_learner_wait_rollouts": 1.5, "t_learner_wall": 2.0,
            "t_actor_decode": 1.0, "t_actor_wait_prompts": 1.0, "t_actor_wall": 2.0, "t_actor_beside_grading": 9.0} | more


@pytest.fixture
def run(tmp_path) -> Path:
    """Twelve steps of 2 s: the learner waits for 1.5 s and computes, the actor decodes and waits for half of each."""
    folder = RunFolder(str(tmp_path / "a run"))
    folder.append("metrics.jsonl", [metrics_row(step) for step in range(STEPS)])
    folder.append("eval.jsonl", [{"version": version, "reward": 0.5, "response_len": 4.0} for version in (0, 6, 12)])
    folder.write_config("steps: 12 # <b>\n", {"torch": "2"})
    texts = [HOSTILE, SEPARATORS, "needle", *(f"answer {number}" for number in range(STEPS - 3))]
    for step, text in enumerate(texts):
        folder.append("rollouts.jsonl", [{
            "step": step, "group": step, "sample": 0, "row": 5, "prompt": f"prompt {step}", "text": text, "reward": (step * 7) % 5,
            "reward_parts": {"f": 1.0}, "advantage": -0.5, "finish_reason": "stop", "versions": [step] * (step + 1),
            "logprob_gap_max": 1e-6}])
        start = 100.0 + 2 * step
        learner = [("wait_rollouts", start, 1.5), ("forward", start + 1.5, 0.5)]
        actor = [("decode", start, 1.0), ("wait_prompts", start + 1.0, 1.0)]
        for rank, (role, spans) in enumerate({"learner": learner, "actor": actor}.items()):
            folder.trace(rank, role, {"spans": spans, "flows": [("s", "group", step, start)], "error_s": 0.0})
            seconds = {kind: lasted for kind, _, lasted in spans}
            folder.append("ledger.jsonl", [{"step": step, "rank": rank, "role": role, **seconds, "other": 0.1, "wall": 2.1}])
        folder.trace_step(step, start, start + 2)
    folder.close()
    return folder.path


class Scripts(html.parser.HTMLParser):
    """The elements of a page as a browser would find them, and the text inside its scripts."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.scripts, self.inside = Counter(), [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.inside = tag == "script"
        if self.inside:
            self.scripts.append("")

    def handle_data(self, text):
        if self.inside:
            self.scripts[-1] += text

    def handle_endtag(self, tag):
        self.inside = False


def data_of(page: str) -> dict:
    return json.loads(Scripts(page).scripts[0])


def chart_of(page: str, title: str) -> dict:
    return next(chart for chart in data_of(page)["charts"] if chart["title"] == title)


def test_what_a_model_wrote_stays_text(run):
    """A response that closes the script element runs code in the reader's browser; one with odd line ends loses its row."""
    page = report.make_page(run)
    found = Scripts(page)
    assert len(found.scripts) == 2 and not found.tags["img"] and not found.tags["b"]
    rows = data_of(page)["samples"]["rows"]
    assert [row["text"] for row in rows[:3]] == [HOSTILE, SEPARATORS, "needle"]
    assert "steps: 12 # &lt;b&gt;" in page


def test_the_page_loads_nothing(run):
    page = report.make_page(run)
    assert "default-src 'none'" in page
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org/2000/svg)""",
                          page.replace(json.dumps(HOSTILE)[1:-1].replace("<", "\\u003c"), ""))


def test_series_are_those_of_the_files(run):
    """Held-out rewards shown a step late or early, waiting left out of a stack, grading counted as the timeline's."""
    page = report.make_page(run)
    reward = chart_of(page, "reward")
    assert reward["x"] == list(range(13))
    assert reward["series"] == [
        {"name": "samples of the step", "join": False, "y": [*(step / 12 for step in range(12)), None]},
        {"name": "greedy, held out", "join": True, "y": [0.5, *[None] * 5, 0.5, *[None] * 5, 0.5]}]
    stack = {series["name"]: series["y"] for series in chart_of(page, "actor ranks: seconds of a step")["series"]}
    assert stack == {"decode": [1.0] * 12, "wait_prompts": [1.0] * 12}
    tokens = {series["name"]: series["y"][0] for series in chart_of(page, "response tokens of a step")["series"]}
    assert tokens == {"trained": 600, "filtered": 200, "unscored": 100}
    assert data_of(page)["books"] == [
        {"name": "rank 0 learner", "seconds": pytest.approx({"wait_rollouts": 18.0, "forward": 6.0, "other": 1.2, "wall": 25.2})},
        {"name": "rank 1 actor", "seconds": pytest.approx({"decode": 12.0, "wait_prompts": 12.0, "other": 1.2, "wall": 25.2})}]
    assert "<dd>0.000 → 0.542</dd>" in page and "<dd>75.0%</dd>" in page, "mean of the last ten steps; the learner's waiting"


def test_the_timeline_has_every_rank_on_one_clock(run):
    timeline = data_of(report.make_page(run))["timeline"]
    assert [lane["name"] for lane in timeline["lanes"]] == ["rank 0 learner", "rank 1 actor"]
    kinds = timeline["kinds"]
    assert timeline["lanes"][1]["spans"][:6] == [
        0, 1_000_000, kinds.index("decode"), 1_000_000, 2_000_000, kinds.index("wait_prompts")]
    assert timeline["steps"][3] == [3, 6_000_000, 8_000_000] and timeline["resolution"] == 0
    some = data_of(report.make_page(run, (3, 4)))["timeline"]
    assert [step for step, *_ in some["steps"]] == [3, 4]
    assert [lane["spans"] for lane in some["lanes"]] == [lane["spans"][:12] for lane in timeline["lanes"]], "two like the first"


def test_nan_and_none_are_gaps(run):
    rows = [metrics_row(0), metrics_row(1, reward=None, kl=float("nan")), metrics_row(2, kl=float("inf"))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "eval.jsonl").unlink()
    page = report.make_page(run)
    assert chart_of(page, "reward")["series"][0]["y"] == [0.0, None, 2 / 12]
    assert chart_of(page, "KL")["series"][0]["y"] == [1e-3, None, None]


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "rollouts.jsonl", "ledger.jsonl", "trace.json"])
def test_a_killed_runs_last_line_may_be_cut(run, name):
    """A page that only finished runs have is missing when it is needed; a fault elsewhere in a file is not passed over."""
    whole = (run / name).read_text(encoding="utf-8").removesuffix("\n]\n").rstrip("\n")
    (run / name).write_text(whole[:-20], encoding="utf-8")
    report.make_page(run)
    lines = whole.split("\n")
    lines[1] = lines[1][:-20]
    (run / name).write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{re.escape(name)}, line 2, is not a JSON object"):
        report.make_page(run)


def test_a_cut_line_takes_only_itself(run):
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text[:-20])
    assert chart_of(report.make_page(run), "KL")["x"] == list(range(STEPS - 1))


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    folder = RunFolder(str(tmp_path / "new"))
    folder.close()
    data = data_of(report.make_page(folder.path))
    assert data["timeline"]["lanes"] == data["books"] == data["samples"]["rows"] == []
    assert all(chart["series"] == [] for chart in data["charts"])


def test_the_command_line(run, tmp_path):
    """A folder that is no run, and steps that it has not, end with one line that says what to give."""
    def call(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "report.py", *arguments], cwd=ROOT, capture_output=True, text=True)

    assert call(str(run)).returncode == 0 and Scripts((run / "report.html").read_text()).scripts
    for arguments, message in (([str(tmp_path)], "is no run folder: it has no metrics.jsonl; give the run_dir of a run"),
                               ([str(run), "--steps", "7"], "--steps 7: give two step numbers, such as 100:120"),
                               ([str(run), "--steps", "50:60"], "has no step from 50 to 60, but those from 0 to 11")):
        done = call(*arguments)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
        assert done.stderr.startswith("report error: ")


def test_a_long_run_is_thinned_but_keeps_its_peaks(run, monkeypatch):
    """100,000 steps are a page that no browser opens; a mean over 67 of them hides the one step whose gap exploded."""
    monkeypatch.setattr(report, "POINTS", 5)
    rows = [metrics_row(step, kl=float(step), logprob_gap_max=9.0 if step == 7 else 1e-6) for step in range(STEPS)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = report.make_page(run)
    assert chart_of(page, "KL")["x"] == [0, 3, 6, 9] and chart_of(page, "KL")["series"][0]["y"] == [1.0, 4.0, 7.0, 10.0]
    assert chart_of(page, "logprob gap, learner − engine")["series"][0]["y"] == [1e-6, 1e-6, 9.0, 1e-6]


def test_a_large_trace_is_made_coarser_until_it_fits(run, monkeypatch):
    """A day of 64 ranks: short spans go by the kind that took most of their time, long ones stay as they are."""
    monkeypatch.setattr(report, "SPANS", 40)
    source, at, rows = random.Random(0), 0.0, []
    for _ in range(500):
        for kind, seconds in (("decode", 1e-3 * source.uniform(1, 2)), ("exchange", 1e-4)):
            rows.append({"ph": "X", "pid": 1, "tid": 0, "name": kind, "ts": at * 1e6, "dur": seconds * 1e6})
            at += seconds
    rows.append({"ph": "X", "pid": 1, "tid": 0, "name": "publish", "ts": at * 1e6, "dur": 5e6})
    (run / "trace.json").write_text("[\n" + ",\n".join(json.dumps(row) for row in rows))
    timeline = report.make_timeline(run / "trace.json", None)
    flat = timeline["lanes"][0]["spans"]
    spans = [(flat[place], flat[place + 1], timeline["kinds"][flat[place + 2]]) for place in range(0, len(flat), 3)]
    assert 10 <= len(spans) <= 40
    assert 1e3 * at / 40 < timeline["resolution"] < 1e3 * at / 5, "coarser than it must be"
    assert sum(end - start for start, end, kind in spans if kind == "decode") > 0.99e6 * at
    assert spans[-1] == (round(at * 1e6), round((at + 5) * 1e6), "publish")
    assert spans[0][0] == 0 and all(one[1] == pytest.approx(two[0], abs=1) for one, two in zip(spans, spans[1:], strict=False))


def test_too_much_text_is_sampled(run, monkeypatch):
    monkeypatch.setattr(report, "SAMPLE_CHARACTERS", 200)
    samples = data_of(report.make_page(run))["samples"]
    assert samples["total"] == STEPS and 0 < len(samples["rows"]) < STEPS


@pytest.fixture(scope="module")
def chromium() -> None:
    if reason := why_none():
        pytest.skip(f"no browser: pip install -r requirements-browser.txt ({reason})")


LOOK = {
    "charts": "[...document.querySelectorAll('figure')].map(f => [f.innerText.split('\\n')[0], f.querySelectorAll('path').length])",
    "longest path": "Math.max(...[...document.querySelectorAll('path')].map(path => path.getTotalLength()))",
    "painted": "(c => [...c.getContext('2d').getImageData(120, 0, c.width - 120, c.height).data].filter(Boolean).length / 4"
               " / c.width / c.height)(document.getElementById('timeline'))",
    "shares": "document.getElementById('shares').innerText",
    "overflow": "document.documentElement.scrollWidth - innerWidth",
    "title": "document.title", "bold": "document.querySelectorAll('b, img').length",
    "first text": "document.querySelector('#samples tbody td:nth-child(4)').textContent",
}
COLUMN = "[...document.querySelectorAll('#samples tbody tr:not(.detail)')].map(row => row.cells[{}].textContent)"
TYPE = "(i => {{ i.value = '{value}'; i.dispatchEvent(new Event('{event}')); }})(document.getElementById('{id}'))"


@pytest.mark.long
def test_a_browser_shows_it(run, chromium):
    """Looked at in Chromium: nothing on the console, charts with lines, a timeline with colour, a table to sort and filter."""
    page = run / "report.html"
    page.write_text(report.make_page(run), encoding="utf-8")
    header = "document.querySelectorAll('#samples th button')[{}].click()"
    acts = [*LOOK.values(),
            header.format(1), COLUMN.format(1), header.format(1), COLUMN.format(1),  # by reward, up and down
            TYPE.format(id="filter", value="NEEDLE", event="input"), COLUMN.format(3),
            TYPE.format(id="filter", value="", event="input"),
            TYPE.format(id="since", value="4", event="input"), TYPE.format(id="until", value="5", event="input"), COLUMN.format(0),
            TYPE.format(id="since", value="0", event="input"), TYPE.format(id="until", value="0", event="input"),
            "document.querySelector('#samples tbody tr').click()", "document.querySelectorAll('.detail pre')[1].textContent",
            TYPE.format(id="from", value="3", event="change"), TYPE.format(id="to", value="3", event="change"), LOOK["shares"],
            "document.querySelector('svg').dispatchEvent(new PointerEvent('pointermove', {clientX: 60, clientY: 200})) && null",
            "document.getElementById('tip').innerText", LOOK["title"]]
    results, console = browse(page, acts)
    assert console == []
    seen = dict(zip(LOOK, results, strict=False))
    assert len(seen["charts"]) == len(data_of(page.read_text(encoding="utf-8"))["charts"])
    assert all(paths >= 1 for _, paths in seen["charts"]), f"an empty chart: {seen['charts']}"
    assert seen["longest path"] > 300 and seen["painted"] > 0.6
    assert "wait_rollouts 37.5 %" in seen["shares"] and "decode 25.0 %" in seen["shares"]
    assert seen["title"] == results[-1] == "a run" and seen["bold"] == 0 and seen["first text"] == f"answer {STEPS - 4}"
    later = [result for result in results[len(LOOK):] if result is not None]
    rewards = sorted((step * 7) % 5 for step in range(STEPS))
    assert later[0] == [str(reward) for reward in rewards] and later[1] == [str(reward) for reward in reversed(rewards)]
    assert later[2] == ["needle"] and sorted(later[3]) == ["4", "5"]
    assert later[4] == HOSTILE
    assert "wait_rollouts 37.5 %" in later[5] and "forward 12.5 %" in later[5], "one step of the timeline"
    assert later[6].startswith("step 0") and "samples of the step  0" in later[6]


@pytest.mark.long
@pytest.mark.parametrize(("width", "scheme"), [(500, "dark"), (500, "light"), (1600, "dark")])
def test_it_is_legible_in_the_dark_and_on_a_telephone(run, chromium, width, scheme):
    """WCAG asks for 4.5 between text and its ground; a page wider than its window is read through a keyhole."""
    page = run / "report.html"
    page.write_text(report.make_page(run), encoding="utf-8")
    colours = "['color', 'backgroundColor'].map(name => getComputedStyle({})[name].match(/\\d+/g).map(Number))"
    (body, soft, overflow, axis), console = browse(
        page, [colours.format("document.body"), f"{{small: {colours.format('document.querySelector(`dt`)')}[0]}}.small".join("()"),
               LOOK["overflow"], "Math.min(...[...document.querySelectorAll('svg text')].map(t => t.getBBox().x))"], width, scheme)
    assert console == [] and overflow <= 0 and axis >= 0

    def luminance(rgb: list[int]) -> float:
        parts = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in rgb[:3]]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    text, ground = luminance(body[0]), luminance(body[1])
    assert (ground < text) == (scheme == "dark")
    for ink in (text, luminance(soft)):
        bright, dim = max(ink, ground), min(ink, ground)
        assert (bright + 0.05) / (dim + 0.05) > 4.5
