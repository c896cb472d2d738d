"""The books and the trace: seconds that add up, on a host and on a device that runs behind it; one clock; arrows that land."""

import json

import pytest

import ledger
from director import step_row
from ledger import Ledger, RunFolder


class Host:
    """A clock that moves when told, in place of the module's `time`."""

    def __init__(self, now: float = 1000.0):
        self.now, self.stream_busy_until, self.waits = now, 0.0, 0

    def perf_counter(self) -> float:
        return self.now

    def launch(self, seconds: float) -> None:
        """Work for the device, which does it in order and begins no earlier than now."""
        self.stream_busy_until = max(self.stream_busy_until, self.now) + seconds

    def event(self) -> "Event":
        return Event(self)


class Event:
    """torch.cuda.Event(enable_timing=True), by its documentation."""

    def __init__(self, host: Host):
        self.host = host

    def record(self) -> None:
        self.at = max(self.host.now, self.host.stream_busy_until)

    def query(self) -> bool:
        return self.host.now >= self.at

    def synchronize(self) -> None:
        self.host.waits += self.host.now < self.at
        self.host.now = max(self.host.now, self.at)

    def elapsed_time(self, later: "Event") -> float:
        assert self.query() and later.query(), "cudaErrorNotReady"
        return (later.at - self.at) * 1e3


@pytest.fixture
def host(monkeypatch) -> Host:
    clock = Host()
    monkeypatch.setattr(ledger, "time", clock)
    return clock


def test_nested_spans_are_counted_once(host):
    """A span around others that also counts their time makes shares add up to more than the wall."""
    books = Ledger(trace=True)
    host.now += 1
    with books.span("evaluate"):
        host.now += 2
        with books.span("decode") as name:
            host.now += 4
            name[0] = "prefill"
        with books.span("exchange"):
            host.now += 8
            with books.span("publish"):
                host.now += 16
        host.now += 32
    host.now += 64
    assert books.account() == pytest.approx(
        {"prefill": 4, "exchange": 8, "publish": 16, "evaluate": 34, "other": 65, "wall": 127}, abs=1e-6)
    assert books.account() == {"other": 0, "wall": 0}
    assert sorted(books.events()["spans"], key=lambda span: span[1]) == [
        ("evaluate", pytest.approx(1001), pytest.approx(62)), ("prefill", pytest.approx(1003), pytest.approx(4)),
        ("exchange", pytest.approx(1007), pytest.approx(24)), ("publish", pytest.approx(1015), pytest.approx(16))]


def test_on_a_device_seconds_are_its_own_and_nobody_waits_for_them(host):
    """Timed on the host, launches cost nothing and whoever waits first gets the bill for all."""
    books = Ledger(trace=True, new_event=host.event)
    with books.span("forward"):
        host.launch(2.0)
        host.now += 0.01
    with books.span("backward"):
        host.launch(4.0)
        host.now += 0.01
    with books.span("optimizer"):
        host.launch(0.5)
    host.now += 0.5
    with books.span("exchange"):  # while the device still works: costs nothing
        host.now += 1.0
    assert host.waits == 0 and host.now == pytest.approx(1001.52)
    host.now = 1010.0  # the device was done at 1006.5
    with books.span("wait_rollouts"):
        host.now += 3.0
        books.flow("s", 0)
    assert books.account() == pytest.approx(
        {"forward": 2, "backward": 4, "optimizer": 0.5, "wait_rollouts": 3, "other": 3.5, "wall": 13}, abs=1e-6)
    events = books.events()
    assert [span[0] for span in events["spans"]] == ["forward", "backward", "optimizer", "exchange", "wait_rollouts"]
    assert events["spans"][1][1:] == (pytest.approx(1002), pytest.approx(4)), "where the device did it, not where it was launched"
    assert events["flows"] == [("s", "group", 0, pytest.approx(1013))]


def test_a_device_that_is_behind_is_waited_for_when_books_close(host):
    """A wait in the decode loop would leave the device idle between any two steps."""
    books = Ledger(trace=False, new_event=host.event)
    for _ in range(50):
        with books.span("decode"):
            host.launch(0.1)
    assert host.waits == 0
    assert books.account()["decode"] == pytest.approx(5)
    assert host.now == pytest.approx(1005)


def test_a_thousand_decode_steps_are_one_bar(host):
    """A bar for each would be gigabytes of trace; a bar for what lies around a long span must not swallow it."""
    books = Ledger(trace=True)
    for _ in range(1000):
        with books.span("exchange"):
            host.now += 2e-4
        with books.span("decode"):
            host.now += 0.01
    with books.span("exchange"):
        host.now += 0.5
        with books.span("publish"):
            host.now += 1.0
    spans = books.events()["spans"]
    assert [(kind, round(seconds, 3)) for kind, _, seconds in spans] == [
        ("exchange", 0.0), ("decode", 10.2), ("publish", 1.0), ("exchange", 1.5)]


class Store:
    """The queues as a rank elsewhere sees them: rank 0's clock shows `ahead` s more, and answers take time both ways."""

    def __init__(self, host: Host, ahead: float, trips: list[tuple[float, float]], boot: str):
        self.host, self.ahead, self.trips, self.boot = host, ahead, list(trips), boot

    def push(self, queue: str, message: dict) -> None:
        assert (queue, message) == ("clock", {"rank": 3})

    def wait(self, queue: str, what: str) -> dict:
        assert queue == "clock/3"
        there, back = self.trips.pop(0)
        self.host.now += there
        now = self.host.now + self.ahead
        self.host.now += back
        return {"boot": self.boot, "now": now}


def test_a_rank_elsewhere_is_put_on_rank_0s_clock_within_the_error_it_states(host):
    """Arrows that go back in time: hosts' monotonic clocks differ by their uptimes, and an answer may be slow one way only."""
    trips = [(0.003, 0.001), (0.0001, 0.02), (0.0009, 0.0001), (0.004, 0.004)] * 2
    books, store = Ledger(trace=True), Store(host, 5432.1, trips, boot="another")
    books.follow(store, rank=3, world=4)
    assert store.trips == []
    assert books.error_s == pytest.approx(0.0005), "half of the quickest trip"
    assert 0 < abs(books.offset_s - 5432.1) <= books.error_s + 1e-9
    with books.span("decode"):
        host.now += 1.0
    start = books.events()["spans"][0][1]
    assert start == pytest.approx(host.now - 1.0 + 5432.1, abs=books.error_s + 1e-6)


def test_ranks_of_one_machine_are_exactly_on_one_clock(host):
    books = Ledger(trace=True)
    books.follow(Store(host, 0.0, [(0.003, 0.001)] * 8, boot=open("/proc/sys/kernel/random/boot_id").read()), rank=3, world=4)
    assert books.offset_s == books.error_s == 0.0


def test_rank_0_answers_every_question(host):
    class Asked:
        answers: list = []
        questions = [1, 2, 2, 1] * 4

        def wait(self, queue: str, what: str) -> dict:
            return {"rank": self.questions.pop()}

        def push(self, queue: str, message: dict) -> None:
            self.answers.append((queue, message["now"]))

    channel = Asked()
    Ledger(trace=True).follow(channel, rank=0, world=3)
    assert sorted(channel.answers) == [("clock/1", 1000.0)] * 8 + [("clock/2", 1000.0)] * 8


def test_the_trace_names_its_rows_and_draws_a_few_groups_of_each_step(host, tmp_path):
    """Arrows of evaluations, or of all 512 prompts of a step; rows that are called 0 and 1."""
    folder, books = RunFolder(str(tmp_path / "run")), Ledger(trace=True, groups_per_step=64)
    with books.span("exchange"):
        for group in (*range(64), -1, -4):
            host.now += 1e-5
            books.flow("s", group)
        books.flow("t", 7, "weights to rank 1")
    folder.trace(0, "learner", books.events())
    folder.trace_step(0, 1000.0, 1001.0)
    folder.trace(0, "learner", books.events())
    folder.close()
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    names = {(row["tid"], row["name"]): row["args"] for row in trace if row["ph"] == "M"}
    assert names[0, "process_name"] == {"name": "rank 0 learner"} and names[1, "thread_name"] == {"name": "steps"}
    assert names[0, "process_labels"] == {"labels": "clock within 0.00 ms of rank 0's"}
    assert len(names) == sum(row["ph"] == "M" for row in trace), "names are given once"
    assert [row["id"] for row in trace if row["name"] == "group"] == list(range(0, 64, 4))
    bar = next(row for row in trace if row["name"] == "exchange")
    assert all(bar["ts"] <= row["ts"] <= bar["ts"] + bar["dur"] for row in trace if row["ph"] in "st")
    assert [row["dur"] for row in trace if row["tid"] == 1 and row["ph"] == "X"] == [1e6]


def test_the_token_ledger_adds_up():
    """Tokens paid for and not trained on are nowhere else to be seen: those without a reward, and those that were masked."""
    def header(rewards: list, lengths: list, reasons: list) -> dict:
        return {"rewards": rewards, "lengths": [[4 + length, length] for length in lengths], "reasons": reasons, "oldest": 0}

    headers = [header([1.0, 0.0, None], [5, 8, 7], ["stop", "length", "length"]), header([None] * 3, [1, 2, 3], ["stop"] * 3)]
    train = {"skipped": 0, "loss": 0.0, "entropy": 1.0, "kl": 0.0, "clipped": 0.0, "gap": 0.0, "gap_max": 0.0, "flops": 1.0,
             "grad_norm": 1.0, "lr": 1e-3}
    publish = {"bytes": 1, "total": 1.0, "wire": 1.0}
    reports = [{"train": train | {"tokens": tokens, "trained": tokens, "gap_tokens": tokens}, "publish": publish, "account": {},
                "memory": {}} for tokens in (5, 4)]  # of 8, 4 were masked
    counted = ("buffer_bytes", "peak_bytes", "decode_bytes", "decode_seconds", "prefix_hits", "preemptions")
    actor = {"account": {}} | dict.fromkeys(counted, 0)
    row = step_row(0, 1.0, (headers, [6, 5]), reports, [actor])  # and two groups were replaced
    assert {key: value for key, value in row.items() if key.startswith("tokens_")} == {
        "tokens_generated": 37, "tokens_trained": 9, "tokens_unscored": 13, "tokens_filtered": 15, "tokens_truncated": 15,
        "tokens_per_s": 26.0}
