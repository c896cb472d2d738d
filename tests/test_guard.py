"""Guards: a step that would spoil the weights is skipped or stops the run, and its batch can be looked at again."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from learners import new_learner, one_step, prepared, samples, split, toy
from ranks import ROOT, rows, spawn_ok, torchrun

from config import Guard
from guard import find_fault, load_batch, save_batch


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("limits, norms, entropy, gap, fault", [
    ({}, {"grad_norm": 1e30}, 0.0, 9.0, ""),  # nothing is limited
    ({}, {"grad_norm": math.inf}, 1.0, 0.0, "grad_norm is inf"),
    ({}, {"grad_norm": 1.0, "critic_grad_norm": math.nan}, 1.0, 0.0, "critic_grad_norm is nan"),
    ({"max_grad_norm": 2.0}, {"grad_norm": 2.0}, 1.0, 0.0, ""),
    ({"max_grad_norm": 2.0}, {"grad_norm": 2.01}, 1.0, 0.0, "grad_norm is 2.01, above guard.max_grad_norm = 2"),
    ({"min_entropy": 0.1}, {"grad_norm": 1.0}, 0.09, 0.0, "entropy is 0.09, below guard.min_entropy = 0.1"),
    ({"min_entropy": 0.1}, {"grad_norm": 1.0}, None, 0.0, ""),  # everything masked: no entropy has collapsed
    ({"max_gap": 0.5}, {"grad_norm": 1.0}, 1.0, 0.51, "a logprob is 0.51 from the engine's, above guard.max_gap = 0.5")])
def test_what_is_a_fault(limits, norms, entropy, gap, fault):
    assert find_fault(Guard(**limits), norms, entropy, gap) == fault


def shards(learner) -> list[torch.Tensor]:
    return [shard.clone() for shard in learner.shards().values()]


def test_not_a_number_touches_nothing_and_its_batch_is_kept(tmp_path):
    """NaN applied, published and proved: the run ends naming the step, with the weights of the step before."""
    learner = new_learner(toy(run_dir=str(tmp_path)))
    before, bad = shards(learner), dataclasses.replace(samples(1)[0], advantage=math.nan)
    with pytest.raises(FloatingPointError, match="step 7: grad_norm is nan; the weights were not touched, the batch is in "):
        one_step(learner, [samples(2), [bad]], 7)
    assert all(map(torch.equal, before, shards(learner)))
    kept, about = load_batch(str(tmp_path / "guard" / "step-7-rank-0.safetensors"))
    assert [len(part) for part in kept] == [2, 1] and kept[1][0].tokens == bad.tokens and math.isnan(kept[1][0].advantage)
    assert about["step"] == 7 and about["fault"] == "grad_norm is nan"


def test_a_skipped_step_moves_nothing_and_the_next_one_does(tmp_path):
    """The gradients of a skipped step must not be added to the next one's."""
    config = toy(run_dir=str(tmp_path), guard={"max_grad_norm": 1e-9, "action": "skip"})
    learner, other = new_learner(config), new_learner(toy())
    before = shards(learner)
    assert one_step(learner, [samples(3)])["skipped"] == 1
    assert all(map(torch.equal, before, shards(learner)))
    learner.config = toy(run_dir=str(tmp_path))
    for each in (learner, other):
        assert one_step(each, [samples(4)])["skipped"] == 0
    assert all(map(torch.equal, shards(learner), shards(other)))


def entropies(rank: int, folder: str) -> list[int]:
    """Rank 1 has nothing: the limit is on the mean over all ranks, and both must decide alike."""
    found = []
    for limit in (0.5, 5.0):
        learner = new_learner(toy(run_dir=folder, guard={"min_entropy": limit, "max_gap": 100.0, "action": "skip"}), (1, 2))
        found.append(one_step(learner, [samples(4)] if rank == 0 else [[]])["skipped"])
    return found


def test_all_ranks_skip_or_none(tmp_path):
    assert spawn_ok(2, "test_guard:entropies", str(tmp_path)) == [[0, 1]] * 2


def test_a_batch_is_read_back_as_it_was(tmp_path):
    """Every number that the loss saw, bit for bit, in the same micro-batches; PPO has all of them."""
    learner = new_learner(toy(algorithm={"name": "ppo"}, learner={"minibatches": 2}))
    batches = prepared(learner, split(samples(5), 2))
    save_batch(tmp_path / "a", batches, {"step": 1})
    again, _ = load_batch(str(tmp_path / "a"))
    for old, new in zip([s for part in batches for s in part], [s for part in again for s in part], strict=True):
        for field in dataclasses.fields(old):
            then, now = getattr(old, field.name), getattr(new, field.name)
            same = torch.equal(then, now) if torch.is_tensor(then) else then is now or then == pytest.approx(now, rel=1e-7)
            assert same, field.name
        assert old.values is not None and old.ref is not None


def test_a_run_stops_and_replays(tmp_path):
    """By the command line: exit 1 with one line, and the replay has the loss and gradient of the step that stopped."""
    done = torchrun(2, "configs/toy.yaml", f"run_dir={tmp_path}/run", "steps=3", "eval.every=0", "guard.max_gap=1e-12")
    assert done.returncode != 0 and "step 0: a logprob is" in done.stderr and "rank 0 (learner" in done.stderr
    assert rows(tmp_path / "run") == []
    file = tmp_path / "run" / "guard" / "step-0-rank-0.safetensors"
    command = [sys.executable, "learner.py", "--replay", file]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0, shown.stderr
    for text in ("above guard.max_gap = 1e-12", "  gap ", "model.embed_tokens.weight"):
        assert text in shown.stdout
