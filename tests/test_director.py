"""The director against a scripted actor: which groups a step trains on, and what each sample is worth."""

import json
import math
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import job, rows

from config import Config
from data import Prompt
from director import Director
from ledger import Ledger
from scheduler import ReleaseGate
from settings import build
from shape import read_shape
from sync import Grid

SHAPE = read_shape("configs/toy")


class Script:
    """A channel whose far end answers each prompt with a header at once, rewards by `rewards(row)`; scores by `found(entry)`."""

    def __init__(self, config: Config, rewards, found=None):
        self.config, self.rewards, self.found = config, rewards, found
        self.headers, self.dropped, self.sent = [], [], {}
        self.late: list[dict] = []

    def push_many(self, queue: str, prompts: list[dict]) -> None:
        for prompt in prompts:
            rewards = self.rewards(prompt["row"])
            lengths = [[3 + number % 4 + 1, number % 4 + 1] for number in range(len(rewards))]
            self.headers.append({"group": prompt["group"], "row": prompt["row"], "rank": int(queue.split("/")[1]), "error": "",
                                 "rewards": list(rewards), "parts": [list(rewards)], "lengths": lengths,
                                 "oldest": prompt["min_version"], "reasons": ["stop"] * len(rewards)})

    def push(self, queue: str, message: dict) -> None:
        name, rank = queue.split("/")
        self.sent[queue] = json.loads(json.dumps(message))
        if name == "work" and self.found:
            entries = [entry for batches in message["minibatches"] for batch in batches for entry in batch]
            self.late.append({"rank": int(rank), "found": [self.found(*entry) for entry in entries]})

    def pop(self, queue: str) -> list[dict] | None:
        return [self.headers.pop(0)] if self.headers else None

    def wait(self, queue: str, what: str) -> dict:
        return self.late.pop()

    def put(self, key: str, data: bytes) -> None:
        self.sent[key] = data

    def drop(self, key: str) -> None:
        self.dropped.append(key)


class Rows:
    """Prompts 0, 1, 2 ... without end."""

    def __init__(self):
        self.drawn = 0

    def draw(self) -> Prompt:
        self.drawn += 1
        return self.encode(self.drawn - 1)

    def encode(self, row: int) -> Prompt:
        return Prompt([3, 4, 5], "12>", {}, row)


def directed(config: Config, rewards, found=None) -> Director:
    """A Director as a run has it, but for files and measurements."""
    director = object.__new__(Director)
    director.config, director.shape, director.grid = config, SHAPE, Grid.of(config)
    director.channel, director.prompts = Script(config, rewards, found), Rows()
    director.gate = ReleaseGate(config.rollout.prompts_per_step, config.max_staleness, config.steps)
    director.next_group, director.headers, director.rows, director.filtered = 0, {}, {}, defaultdict(list)
    director.ledger, director.signalled, director.worker = Ledger(False), False, None
    director.out = Counter(dict.fromkeys(director.grid.leaders, 0))
    director.note = lambda text: None
    return director


def config_of(prompts: int = 4, learners: int = 1, samples: int = 4, **sections) -> Config:
    rollout = {"prompts_per_step": prompts, "samples_per_prompt": samples}
    return build({"rollout": rollout, "learner": {"shards": learners}} | sections)


def credits(director: Director) -> dict[tuple[int, int], list]:
    """What each sample was credited with, by group and number, as the learners receive it."""
    found = {}
    for rank in range(director.grid.learners):
        work, credit = director.channel.sent[f"work/{rank}"], director.channel.sent[f"credit/{rank}"]
        entries = [tuple(entry) for batches in work["minibatches"] for batch in batches for entry in batch]
        found |= dict(zip(entries, credit["credits"], strict=True))
    return found


# --- dynamic sampling


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 4), st.integers(0, 3), st.integers(0, 1))
@settings(deadline=None)
def test_groups_without_variance_are_replaced_in_their_step(varied, batch, resample, staleness):
    """DAPO: a group that teaches nothing is drawn again, at most resample x batch times a step; each group ends exactly once."""
    def rewards(row: int) -> list[float]:
        return [0.0, 1.0, 0.0, 1.0] if varied[row % len(varied)] else [0.25] * 4

    config = config_of(batch, algorithm={"name": "dapo", "resample": resample}, steps=3, max_staleness=staleness)
    director, trained = directed(config, rewards), []
    for step in range(config.steps):
        director.assign()
        director.credit()
        groups, filtered = director.gate.groups(), len(director.filtered.pop(step, []))
        assert len(groups) == batch and filtered <= resample * batch
        same = [group for group in groups if not varied[director.headers[group]["row"] % len(varied)]]
        assert not same or filtered == resample * batch, "a group without variance is kept only when no more may be drawn"
        assert credits(director).keys() == {(group, number) for group in groups for number in range(4)}
        director.gate.train()
        trained += groups
    dropped = [int(key.removeprefix("payload/")) for key in director.channel.dropped]
    assert director.gate.ended["filtered"] == len(dropped) and director.gate.ended["trained"] == len(trained)
    assert sorted(trained + dropped) == list(range(director.next_group)), "each group ends once, as trained or as filtered"
    assert director.gate.outstanding == 0 and director.out.total() == 0
    assert all(not varied[group % len(varied)] for group in dropped)


def test_a_run_replaces_groups_and_counts_them(tmp_path):
    """Rows of metrics.jsonl say how many were replaced, and what trained had variance."""
    done = job(3, "configs/toy.yaml", f"run_dir={tmp_path / 'run'}", "steps=3", "eval.every=0", "log.trackers=[]",
               "actor.replicas=2", "algorithm.name=dapo", "reward.functions=[tests/parity.py:odd_start]",
               "rollout.prompts_per_step=6", "rollout.samples_per_prompt=8", "log.samples_per_step=48")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    metrics = rows(tmp_path / "run")
    assert sum(row["filtered"] for row in metrics) >= 3 and {row["zero_variance"] for row in metrics} == {0.0}
    logged = rows(tmp_path / "run", "rollouts.jsonl")
    assert {row["group"] for row in logged} < set(range(18 + sum(row["filtered"] for row in metrics))) and len(logged) == 3 * 48
    assert all(int(row["prompt"][0]) % 2 for row in logged)


def test_without_resampling_every_group_trains():
    director = directed(config_of(), lambda row: [0.5] * 4)
    director.assign()
    assert director.gate.groups() == [0, 1, 2, 3] and director.prompts.drawn == 4 and not any(director.filtered.values())


# --- a checkpoint


def test_what_a_checkpoint_kept_is_held_to_the_bound_of_now(tmp_path):
    """Saved two steps off, gone on with on-policy: of two finished groups of step 3 one saw version 2, and the one of step 4 will
    be too old when its turn comes. Both start again from their rows, under the weights of their steps."""
    rewards, folder = [1.0, 0.0, 0.0, 1.0], tmp_path / "step-3"
    finished = [[group, step, "trained", {"group": group, "row": group + 50, "rank": 1, "error": "", "rewards": rewards,
                                          "parts": [rewards], "lengths": [[4, 1]] * 4, "oldest": oldest, "reasons": ["stop"] * 4}]
                for group, step, oldest in ((6, 3, 3), (7, 3, 2), (8, 4, 3))]
    folder.mkdir()
    for group in (6, 7, 8):
        (folder / f"group-{group}.safetensors").write_bytes(b"%d" % group)
    (folder / "state.json").write_text(json.dumps({"next_group": 10, "best": None, "filtered": [], "running": [[9, 4, 59]],
                                                   "arrived": finished}))
    director, notes = directed(config_of(prompts=2), lambda row: [0.5, 0.0, 0.5, 0.0]), []
    director.note = notes.append
    director.restore(folder)
    assert director.channel.sent == {"payload/6": b"6"} and "1 finished groups kept, 3 started again" in notes[0]
    asked = [(header["group"], header["row"], header["oldest"]) for header in director.channel.headers]
    assert sorted(asked) == [(7, 57, 3), (8, 58, 4), (9, 59, 4)]
    for groups in ([6, 7], [8, 9]):
        director.assign()
        assert director.gate.groups() == groups and director.next_group == 10
        director.gate.train()
    assert [director.headers[group]["rewards"][0] for group in (6, 7, 8, 9)] == [1.0, 0.5, 0.5, 0.5]


# --- credit


def test_rloo_pays_the_kl_of_the_whole_response():
    """RLOO's KL belongs to the reward: forgotten, added, or paid by the sample's neighbours."""
    rewards, kl = [1.0, 0.0, 0.5, 0.25], [0.3, -0.1, 0.0, 2.0]
    config = config_of(prompts=2, learners=2, algorithm={"name": "rloo", "kl_coef": 0.1})
    director = directed(config, lambda row: rewards, lambda group, number: {"kl": kl[number] * (group + 1)})
    director.assign()
    director.credit()
    for (group, number), (reward, advantage, weight) in credits(director).items():
        paid = [value - 0.1 * divergence * (group + 1) for value, divergence in zip(rewards, kl, strict=True)]
        others = [value for other, value in enumerate(paid) if other != number]
        assert reward == pytest.approx(paid[number]) and advantage == pytest.approx(paid[number] - sum(others) / 3)
        assert weight == 1 / 8
    assert len(credits(director)) == 8


def test_a_reward_models_score_is_weighted_and_unscored_samples_stay_out():
    """L13: a sample whose grader failed has no reward, whatever the reward model says, and does not shift its group's mean."""
    config = config_of(prompts=1, reward_model={"path": "somewhere", "weight": 0.5}, algorithm={"advantage_std": False})
    director = directed(config, lambda row: [1.0, None, 0.0, 1.0], lambda group, number: {"kl": 0.0, "score": float(number)})
    director.assign()
    director.credit()
    assert [number for _, number in credits(director)] == [0, 2, 3]
    wanted = {0: 1.0, 2: 1.0, 3: 2.5}
    for (_, number), (reward, advantage, weight) in credits(director).items():
        assert reward == wanted[number] and advantage == pytest.approx(wanted[number] - 1.5)
        assert weight == pytest.approx(1 / (3 * (number % 4 + 1)))
    assert director.headers[0]["rewards"] == [1.0, None, 1.0, 2.5], "metrics show what was trained on"


def test_scores_that_differ_by_rounding_are_no_advantage():
    """L13's neighbour: a reward model's equal scores differ in the eighth digit, which a standard deviation blows up to 1."""
    director = directed(config_of(prompts=1, reward_model={"path": "somewhere"}), lambda row: [0.25] * 4,
                        lambda group, number: {"kl": 0.0, "score": 0.1 + number * 1e-9})
    director.assign()
    director.credit()
    assert [advantage for _, advantage, _ in credits(director).values()] == [0.0] * 4


@pytest.mark.parametrize(("algorithm", "weights"), [
    ({"loss_mean": "token"}, lambda length, tokens: 1 / tokens),
    ({"loss_mean": "sequence"}, lambda length, tokens: 1 / (8 * length)),
    ({"loss_mean": "constant"}, lambda length, tokens: 1 / (8 * 8)),
    ({"loss_mean": "sum"}, lambda length, tokens: 1 / 8)])
def test_weights_of_a_minibatch_come_from_its_own_counts(algorithm, weights):
    """With two minibatches each update is a mean over its half: by the whole step's counts it would be half a mean."""
    config = config_of(algorithm=algorithm, learner={"minibatches": 2, "shards": 2})
    director = directed(config, lambda row: [0.0, 1.0, 0.0, 1.0])
    director.assign()
    director.credit()
    for (_, number), (_, _, weight) in credits(director).items():
        assert weight == pytest.approx(weights(number % 4 + 1, 2 * (1 + 2 + 3 + 4)))
    halves = [{group for rank in range(2) for batch in director.channel.sent[f"work/{rank}"]["minibatches"][half]
               for group, _ in batch} for half in range(2)]
    assert halves == [{0, 1}, {2, 3}]


@pytest.mark.parametrize(("algorithm", "wanted"), [
    ({}, [(reward - 0.4375) / math.sqrt((0.5625**2 + 0.4375**2 + 0.0625**2 + 0.1875**2) / 3) for reward in (1, 0, 0.5, 0.25)]),
    ({"advantage_std": False}, [0.5625, -0.4375, 0.0625, -0.1875]),
    ({"advantage": "rloo"}, [0.75, -0.5833333, 0.0833333, -0.25]),
    # Lengths 1...4 of at most 4 with a buffer of 2: the third pays 1/2, the fourth 1.
    ({"advantage_std": False, "overlong_buffer": 2}, [0.9375, -0.0625, -0.0625, -0.8125]),
    ({"advantage": "returns"}, [0.0] * 4)])
def test_advantages_follow_their_settings(algorithm, wanted):
    """R6: an option of the algorithm that is read nowhere."""
    config = config_of(rollout={"prompts_per_step": 1, "samples_per_prompt": 4, "max_new_tokens": 4}, algorithm=algorithm)
    director = directed(config, lambda row: [1.0, 0.0, 0.5, 0.25])
    director.assign()
    director.credit()
    assert [advantage for _, advantage, _ in credits(director).values()] == pytest.approx(wanted, abs=1e-6)
