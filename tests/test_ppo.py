"""PPO's four models through the learner: policy, critic, reference and reward model against transformers in float64."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from learners import (
    SHAPE,
    assert_same,
    double,
    gradients_of,
    hf_config,
    new_learner,
    one_step,
    optimizer_of,
    prepared,
    samples,
    split,
    toy,
)
from ranks import ROOT, job, rows, spawn_ok
from safetensors.torch import load_file, save_file
from tiny import randomise
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from config import ConfigError
from data import Encoder
from launch import check_folders
from learner import Sample
from ledger import Ledger

GAMMA, LAMBDA, KL, LOSS_COEF, VALUE_CLIP = 0.97, 0.9, 0.1, 0.5, 0.2
PPO = {"name": "ppo", "gamma": GAMMA, "gae_lambda": LAMBDA, "kl_coef": KL}
QUIET = Ledger(False)


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def write_scorer(folder: Path, seed: int) -> str:
    """A sequence-classification folder with random weights and the toy's tokenizer."""
    randomise(LlamaForSequenceClassification(hf_config(num_labels=1, pad_token_id=0)), seed).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / "configs/toy" / name, folder / name)
    return str(folder)


@pytest.fixture(scope="module")
def scorers(tmp_path_factory) -> dict[str, str]:
    return {name: write_scorer(tmp_path_factory.mktemp(name), seed) for seed, name in enumerate(("critic", "reward_model"))}


def config_of(trunk: str, critic: str = "", **sections):
    own = {"trunk": "shared"} if trunk == "shared" else {"path": critic}
    return toy(**{"algorithm": PPO, "critic": own} | sections)


def learner_of(config, ranks: tuple[int, int] = (1, 1)):
    """A shared trunk's head starts at 0, which would hide a gradient into the trunk: it gets numbers."""
    learner = new_learner(config, ranks)
    if learner.shared:
        shard = learner.model.score.weight.detach().to_local()  # one row: the first shard has it, the others have none
        shard.copy_(torch.linspace(-0.5, 0.5, SHAPE.hidden)[None][:len(shard)])
    return learner


# --- the textbook, one sequence at a time


def estimates(learner) -> tuple[dict, torch.nn.Module, torch.nn.Module]:
    """(functions of a sample: logps and values of its response, and the two models behind them)"""
    named = dict(learner.model.named_parameters())
    policy = LlamaForCausalLM(hf_config()).double()
    policy.load_state_dict({name: each.full_tensor().double() for name, each in named.items() if name != "score.weight"})
    if learner.shared:
        critic = torch.nn.Linear(SHAPE.hidden, 1, bias=False).double()
        critic.load_state_dict({"weight": named["score.weight"].full_tensor().double()})
    else:
        critic = double(LlamaForSequenceClassification, learner.critic)

    def logps(sample: Sample) -> torch.Tensor:
        logits = policy(torch.tensor([sample.tokens])).logits[0, sample.num_prompt - 1:-1, :13]
        return logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens[sample.num_prompt:])[:, None])[:, 0]

    def values(sample: Sample) -> torch.Tensor:
        trunk, head = (policy.model, critic) if learner.shared else (critic.model, critic.score)
        return head(trunk(torch.tensor([sample.tokens])).last_hidden_state)[0, sample.num_prompt - 1:-1, 0]

    return {"logps": logps, "values": values}, policy, critic


def gae_by_its_sum(rewards: list[float], values: list[float]) -> list[float]:
    """A_t = sum_l (gamma lambda)^l (r_t+l + gamma V_t+l+1 - V_t+l), V behind the end being 0."""
    after = [*values[1:], 0.0]
    deltas = [reward + GAMMA * follow - value for reward, follow, value in zip(rewards, after, values, strict=True)]
    return [sum((GAMMA * LAMBDA) ** (at - start) * deltas[at] for at in range(start, len(deltas))) for start in range(len(deltas))]


def credits_by_the_book(batch: list[Sample], functions: dict) -> list[dict[str, torch.Tensor]]:
    """Old logprobs, old values, whitened advantages and returns of each sample; the reference is the start."""
    found = []
    for sample in batch:
        with torch.no_grad():
            old, values = functions["logps"](sample), functions["values"](sample)
        rewards = (-KL * (torch.tensor(sample.logprobs, dtype=torch.float64) - old)).tolist()
        rewards[-1] += sample.reward
        advantages = torch.tensor(gae_by_its_sum(rewards, values.tolist()), dtype=torch.float64)
        found.append({"old": old, "values": values, "advantages": advantages, "returns": advantages + values})
    every = torch.cat([entry["advantages"] for entry in found])
    for entry in found:
        entry["advantages"] = (entry["advantages"] - every.mean()) / every.std()
    return found


def losses_by_the_book(batch: list[Sample], credits: list[dict], functions: dict, old: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(policy loss, value loss), means over the tokens of `batch`."""
    policy = value = 0.0
    for sample, entry in zip(batch, credits, strict=True):
        before = torch.tensor(sample.logprobs, dtype=torch.float64) if old == "rollout" else entry["old"]
        ratio = (functions["logps"](sample) - before).exp()
        policy = policy - torch.minimum(ratio * entry["advantages"], ratio.clamp(0.8, 1.2) * entry["advantages"]).sum()
        now = functions["values"](sample)
        near = entry["values"] + (now - entry["values"]).clamp(-VALUE_CLIP, VALUE_CLIP)
        value = value + torch.maximum((now - entry["returns"]) ** 2, (near - entry["returns"]) ** 2).sum() / 2
    tokens = sum(sample.response for sample in batch)
    return policy / tokens, value / tokens


def textbook(learner, batch: list[Sample]) -> tuple[list[float], dict[str, torch.Tensor]]:
    functions, policy, critic = estimates(learner)
    policy_loss, value_loss = losses_by_the_book(batch, credits_by_the_book(batch, functions), functions, "rollout")
    (policy_loss + (LOSS_COEF if learner.shared else 1.0) * value_loss).backward()
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    names = {"weight": "score.weight"} if learner.shared else {}
    prefix = "" if learner.shared else "critic."
    gradients |= {prefix + names.get(name, name): parameter.grad for name, parameter in critic.named_parameters()}
    return [policy_loss.item(), value_loss.item()], gradients


# --- gradients


@pytest.mark.parametrize("trunk", ["own", "shared"])
def test_gradients_are_the_textbooks_for_one_and_four_micro_batches(trunk, scorers):
    """L1 for PPO: GAE over the wrong positions, whitening by micro-batch, KL or reward at the wrong token, a value head read one
    row late, a shared trunk that the value loss does not reach."""
    config, batch = config_of(trunk, scorers["critic"]), samples(11)
    losses, wanted = textbook(learner_of(config), batch)
    for bins in (1, 4):
        sums, gradients = gradients_of(learner_of(config), split(batch, bins))
        assert [sums["loss"], sums["value_loss"]] == pytest.approx(losses, rel=1e-4)
        assert gradients.keys() == wanted.keys()
        assert_same(gradients, wanted)


def on_ranks(rank: int, grid: list[int], cases: list[list], critic: str, out: str) -> list:
    """Loss sums of each case, then L11: what both ranks do when one has only masked samples, nothing, or a single token counts."""
    found = []
    for number, (trunk, bins) in enumerate(cases):
        learner = learner_of(config_of(trunk, critic), tuple(grid))
        mine = split(samples(11), learner.ranks * bins)[rank * bins:(rank + 1) * bins]
        sums, gradients = gradients_of(learner, mine)
        found.append([sums["loss"], sums["value_loss"]])
        if rank == 0:
            save_file({name: gradient.contiguous() for name, gradient in gradients.items()}, f"{out}/{number}")
    unclipped = PPO | {"clip_low": 0.999, "clip_high": 1e6}
    learner = learner_of(config_of("own", critic, algorithm=unclipped), tuple(grid))
    single = Sample([3, 4, 5], 2, [-3.0], weight=1.0, reward=1.0)
    for busy, idle in ((samples(4), [samples(2, weight=0.0)]), (samples(4), [[]]), ([single], [[]])):
        sums = one_step(learner, [busy] if rank == 0 else idle)
        found.append([sums["grad_norm"], sums["critic_grad_norm"]])
    return found


@pytest.mark.parametrize(("grid", "cases"), [
    ((1, 2), [["own", 2], ["shared", 3]]),
    pytest.param((2, 2), [["own", 1], ["own", 3], ["shared", 2]], marks=pytest.mark.long)])
def test_gradients_are_the_textbooks_on_several_ranks(grid, cases, scorers, tmp_path):
    """L1 and L11 for PPO: whitening over one rank's tokens, a critic whose gradients are not summed, a rank without work."""
    ranks = grid[0] * grid[1]
    results = spawn_ok(ranks, "test_ppo:on_ranks", list(grid), cases, scorers["critic"], str(tmp_path))
    for number, (trunk, _) in enumerate(cases):
        losses, wanted = textbook(learner_of(config_of(trunk, scorers["critic"])), samples(11))
        assert [sum(found[number][at] for found in results) for at in (0, 1)] == pytest.approx(losses, rel=1e-4)
        assert_same(load_file(tmp_path / str(number)), wanted)
    for norms in zip(*(found[len(cases):] for found in results), strict=True):
        assert all(each == norms[0] for each in norms) and min(norms[0]) > 0


def test_everything_masked_is_a_step_without_gradient(scorers):
    """L11 for PPO: whitening of no tokens divides 0 by 0; one alone has no variance, and is left as it is."""
    learner = learner_of(config_of("own", scorers["critic"]))
    before = [parameter.full_tensor().clone() for model, *_ in learner.trained for parameter in model.parameters()]
    for batches in ([samples(3, weight=0.0)], [[]]):
        sums = one_step(learner, batches)
        assert [sums[name] for name in ("loss", "value_loss", "grad_norm", "critic_grad_norm", "tokens")] == [0.0] * 5
    after = [parameter.full_tensor() for model, *_ in learner.trained for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))
    (single,), = prepared(learner, [[Sample([3, 4, 5], 2, [-1.0], weight=1.0, reward=1.0)]])
    wanted = 1.0 + KL * (1.0 + single.ref.item()) - single.values.item()  # the reward, less KL, against the value
    assert single.advantages.tolist() == pytest.approx([wanted], rel=1e-5)


# --- before the update


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_kl_in_the_reward_is_paid_where_it_occurs(name, scorers):
    """Rewards to go and GAE count each token's KL from that token on; a penalty at the last token would blame the wrong ones."""
    algorithm = PPO | {"name": name, "advantage_whiten": False}
    critic = {"path": scorers["critic"]} if name == "ppo" else {}
    learner = new_learner(toy(algorithm=algorithm, critic=critic))
    (batch,) = prepared(learner, [samples(5)])
    assert learner.algorithm.kl_in == "reward" and learner.algorithm.kl_estimator == "k1"
    for sample in batch:
        rewards = [-KL * (logp - ref) for logp, ref in zip(sample.logprobs, sample.ref.tolist(), strict=True)]
        rewards[-1] += sample.reward
        if name == "ppo":
            wanted = gae_by_its_sum(rewards, sample.values.tolist())
        else:
            ends = range(len(rewards))
            wanted = [sum(GAMMA ** (at - start) * rewards[at] for at in ends[start:]) for start in ends]
        assert sample.advantages.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_whitening_counts_trained_tokens_only():
    """Masked samples must not shift the others' advantages; with them it is mean 0 and variance 1 over the step."""
    learner = new_learner(toy(algorithm={"name": "reinforce_pp", "gamma": GAMMA}))
    batch = samples(6)
    batch[2].weight, batch[2].reward = 0.0, 1e3
    prepared(learner, [batch[:4], batch[4:]])
    trained = torch.cat([sample.advantages for sample in batch if sample.weight]).double()
    assert trained.mean().abs() < 1e-6 and trained.std().item() == pytest.approx(1, abs=1e-6)
    assert batch[2].advantages.abs().max() > 100


def reward_scores(folder: str, batches: list[list[Sample]]) -> list[float]:
    learner = new_learner(toy(exact=True, reward_model={"path": folder}))
    return [entry["score"] for entry in learner.score(batches, QUIET)]


def test_a_score_is_read_at_the_last_token_by_length(scorers):
    """R11: where pad = eos, the last token that is no padding is one too early; the last column of padded rows is padding."""
    ended = Sample([5, 2, 6, 7, 2], 2, [-1.0] * 3)
    others = samples(7)
    alone = reward_scores(scorers["reward_model"], [[ended]])
    together = reward_scores(scorers["reward_model"], [[*others[:3], ended, *others[3:]]])
    assert together[3] == alone[0] and len(together) == 8
    reference = LlamaForSequenceClassification.from_pretrained(scorers["reward_model"]).double()
    reference.config.pad_token_id = None  # then it reads the last token, which for ids without padding is right
    with torch.no_grad():
        wanted = [reference(torch.tensor([sample.tokens])).logits.item() for sample in (*others[:3], ended, *others[3:])]
        early = reference(torch.tensor([[5, 2, 6, 7]])).logits.item()
    assert together == pytest.approx(wanted, abs=1e-5)
    assert abs(early - alone[0]) > 1e-2


def test_parked_models_give_the_same_bits(scorers):
    """Models that wait in host memory and come back as something else, or to the wrong place."""
    found = []
    for parked in ([], ["critic", "reference", "reward_model"]):
        config = config_of("own", scorers["critic"], learner={"max_grad_norm": 1e9, "lr": 1e-2, "parked": parked},
                           reward_model={"path": scorers["reward_model"]})
        learner = learner_of(config)
        batches = split(samples(7), 2)
        scores = learner.score(batches, QUIET)
        found.append((scores, gradients_of(learner, batches)[1]))
    (scores, plain), (parked_scores, parked) = found
    assert scores == parked_scores and all(torch.equal(plain[name], parked[name]) for name in plain)


# --- updates


def flat(named, names) -> torch.Tensor:
    """The parameters `names` as one vector."""
    found = dict(named)
    whole = [found[name].full_tensor() if hasattr(found[name], "full_tensor") else found[name] for name in names]
    return torch.cat([parameter.detach().double().flatten() for parameter in whole])


@pytest.mark.parametrize("trunk", ["own", pytest.param("shared", marks=pytest.mark.long)])
def test_epochs_of_minibatches_are_the_textbooks(trunk, scorers):
    """Old logprobs, values or advantages that move with the policy; a clip against the wrong start; an update left out."""
    # With a large epsilon Adam's step is nearly proportional to the gradient, else elements near 0 would be signs of rounding.
    steps = {"max_grad_norm": 1e9, "lr": 2e-2, "epochs": 2, "minibatches": 2, "adam_eps": 1e-3, "beta1": 0.9, "beta2": 0.95}
    config = config_of(trunk, scorers["critic"], learner=steps, algorithm=PPO | {"old_logprobs": "learner"})
    config = dataclasses.replace(config, critic=dataclasses.replace(config.critic, lr=1e-2))
    learner, batch = learner_of(config), samples(8)
    functions, policy, critic = estimates(learner)
    credits = credits_by_the_book(batch, functions)
    halves = [slice(0, 4), slice(4, 8)]
    for half in halves:
        for sample in batch[half]:
            sample.weight = 1 / sum(each.response for each in batch[half])
    names = sorted(dict(policy.named_parameters()))
    start = flat(policy.named_parameters(), names)
    settings = {"betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-2, **settings)
    critics = torch.optim.AdamW(critic.parameters(), lr=2e-2 if learner.shared else 1e-2, **settings)
    total = 0.0
    for half in halves * 2:
        losses = losses_by_the_book(batch[half], credits[half], functions, "learner")
        total += losses[0].item()
        optimizer.zero_grad(), critics.zero_grad()
        (losses[0] + (LOSS_COEF if learner.shared else 1.0) * losses[1]).backward()
        optimizer.step(), critics.step()
    learner.score([batch], QUIET)
    learner.credit(batch)
    sums = learner.train([split(batch[half], 2) for half in halves], 0, QUIET)
    assert sums["loss"] == pytest.approx(total / 4, abs=1e-5), "the mean over updates"
    moved, wanted = (flat(model.named_parameters(), names) for model in (learner.model, policy))
    assert (moved - wanted).abs().max() <= 1e-3 * (wanted - start).abs().max()
    if not learner.shared:
        names = sorted(dict(critic.named_parameters()))
        moved, wanted = (flat(model.named_parameters(), names) for model in (learner.critic, critic))
        assert (moved - wanted).abs().max() <= 1e-5
    assert sums["trained"] == sum(sample.response for sample in batch) and sums["tokens"] == 2 * sums["trained"]


def test_a_critic_warms_up_while_the_policy_stands_still(scorers):
    """Advantages of a critic that knows nothing would move the policy at random."""
    learner = learner_of(toy(algorithm=PPO, critic={"path": scorers["critic"], "warmup_steps": 2}))
    starts = [[parameter.full_tensor().clone() for parameter in model.parameters()] for model in (learner.model, learner.critic)]

    def moved(model, start) -> bool:
        return any(not torch.equal(parameter.full_tensor(), before)
                   for parameter, before in zip(model.parameters(), start, strict=True))

    for step, wanted in ((0, False), (1, False), (2, True)):
        one_step(learner, [samples(5)], step)
        assert moved(learner.critic, starts[1]) and moved(learner.model, starts[0]) == wanted, step
    assert optimizer_of(learner, 1).adamw.param_groups[0]["lr"] == pytest.approx(1e-5)


# --- R6: no option is read nowhere

OPTIONS = [
    ("critic", {"trunk": "shared"}), ("critic", {"path": ""}), ("critic", {"lr": 1e-3}), ("critic", {"value_clip": 0.01}),
    ("critic", {"warmup_steps": 1}), ("shared", {"loss_coef": 0.1}),
    *(("algorithm", change) for change in (
        {"gamma": 0.9}, {"gae_lambda": 0.5}, {"advantage_whiten": False}, {"advantage": "returns"}, {"clip_low": 0.8},
        {"clip_high": 0.05}, {"dual_clip": 1.5}, {"loss": "gspo"}, {"old_logprobs": "learner"}, {"entropy_coef": 0.1},
        {"kl_coef": 0.5}, {"kl_in": "loss"}, {"kl_estimator": "k2"})),
    *(("learner", change) for change in (
        {"epochs": 1}, {"lr": 1e-3}, {"schedule": "linear"}, {"warmup_steps": 5}, {"beta1": 0.5}, {"beta2": 0.5},
        {"adam_eps": 1e-2}, {"weight_decay": 0.1}, {"max_grad_norm": 0.1})),
    *(("corrected", {"importance": kind}) for kind in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    ("capped", {"importance_cap": 1.1})]


@pytest.mark.parametrize(("section", "change"), OPTIONS, ids=lambda value: str(value))
def test_every_option_changes_what_is_learned(section, change, scorers):
    """R6: a setting without effect costs a run, and whoever compares two of them draws a wrong conclusion."""
    base: dict[str, dict] = {"algorithm": PPO, "critic": {"path": scorers["critic"]},
                             "learner": {"epochs": 2, "lr": 1e-2, "max_grad_norm": 1e9}}
    if section == "shared":
        base["critic"], section = {"trunk": "shared"}, "critic"
    if section in ("corrected", "capped"):
        base["algorithm"] = PPO | {"old_logprobs": "learner"} | ({"importance": "token_truncate"} if section == "capped" else {})
        section = "algorithm"
    changed = base | {section: base[section] | change if change != {"trunk": "shared"} else change}
    if change == {"advantage": "returns"}:
        del changed["critic"]  # which would be refused: there is none

    def learned(sections: dict) -> torch.Tensor:
        learner = learner_of(toy(**sections))
        for step in range(2):
            (batch,) = prepared(learner, [samples(6)])
            learner.train([[batch], [batch]], step, QUIET)
        models = [model for model, *_ in learner.trained]
        return torch.cat([parameter.full_tensor().flatten() for model in models for parameter in model.parameters()])

    before, after = learned(base), learned(changed)
    assert before.shape != after.shape or not torch.equal(before, after)


# --- folders


@pytest.mark.parametrize("section", ["critic", "reward_model"])
def test_folders_that_cannot_serve_are_refused(section, scorers, tmp_path):
    """R6: ids that mean other words, a head that is not there: found before the first process group, by the field's name."""
    encoder = Encoder("configs/toy")

    def refusal(change) -> str:
        folder = tmp_path / change.__name__
        shutil.copytree(scorers[section], folder)
        change(folder)
        config = toy(algorithm=PPO if section == "critic" else {}, **{section: {"path": str(folder)}})
        with pytest.raises(ConfigError) as caught:
            check_folders(config, SHAPE, encoder)
        return str(caught.value)

    def other_tokenizer(folder: Path) -> None:
        text = (folder / "tokenizer.json").read_text()
        vocab = json.loads(text)
        words = vocab["model"]["vocab"]
        words["3"], words["4"] = words["4"], words["3"]
        (folder / "tokenizer.json").write_text(json.dumps(vocab))

    def two_labels(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"score.weight": torch.zeros(2, 64)}, folder / "model.safetensors")

    def no_tokenizer(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()

    def no_config(folder: Path) -> None:
        (folder / "config.json").unlink()

    def no_weights(folder: Path) -> None:
        (folder / "model.safetensors").unlink()

    def no_head(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        del tensors["score.weight"]
        save_file(tensors, folder / "model.safetensors")

    for change, words in ((other_tokenizer, "another tokenizer"), (two_labels, "score.weight"), (no_tokenizer, "tokenizer"),
                          (no_config, "config.json"), (no_weights, "safetensors")):
        message = refusal(change)
        assert message.startswith(f"`{section}.path` = ") and words in message and "\n" not in message, message
    if section == "reward_model":
        message = refusal(no_head)
        assert message.startswith("`reward_model.path` = ") and "no score.weight there" in message


# --- the whole run


def test_a_run_with_four_models(scorers, tmp_path):
    """PPO on two learner ranks with critic, reference and reward model of their own, two epochs of two minibatches."""
    done = job(3, "configs/toy.yaml", f"run_dir={tmp_path / 'run'}", "steps=3", "eval.every=0", "log.trackers=[]",
               "log.samples_per_step=8", "learner.shards=2", "algorithm.name=ppo", "algorithm.old_logprobs=learner",
               f"critic.path={scorers['critic']}", f"reward_model.path={scorers['reward_model']}", "reward_model.weight=0.5",
               "learner.epochs=2", "learner.minibatches=2", "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
               "learner.max_tokens_per_micro_batch=60")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    metrics = rows(tmp_path / "run")
    for row in metrics:
        assert row["logprob_gap_max"] < 1e-4 and row["critic_grad_norm"] > 0 and row["value_loss"] > 0
        assert {"value", "return", "mem_critic_mb", "mem_reference_mb", "mem_reward_model_mb", "t_learner_score"} <= row.keys()
    assert len({row["loss"] for row in metrics}) == 3
    reference = LlamaForSequenceClassification.from_pretrained(scorers["reward_model"])
    reference.config.pad_token_id = None
    encoder, checked = Encoder("configs/toy"), 0
    for sample in rows(tmp_path / "run", "rollouts.jsonl"):
        ids = encoder.tokenizer.encode(sample["prompt"] + sample["text"], add_special_tokens=False)
        with torch.no_grad():
            score = reference(torch.tensor([ids])).logits.item()
        assert sample["reward"] == pytest.approx(sum(sample["reward_parts"].values()) + 0.5 * score, abs=1e-4)
        checked += 1
    assert checked > 6
    LlamaForCausalLM.from_pretrained(tmp_path / "run" / "model")
