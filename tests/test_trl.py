"""TRL 1.16 as an oracle: its trainers' own advantages, importance ratios, losses and gradients, equal to ours.

TRL's trainers are run on stubs that hand them logprobs instead of a model; what they return is kept in golden/trl_losses.json,
which the quick tests read without TRL. `PYTHONPATH=. python tests/test_trl.py --write` makes it anew, and the long tests hold it,
and fresh batches, against the TRL that is installed.

Where the two differ by choice: TRL adds 1e-4 to a group's standard deviation, ours are exact and 0 below rounding error; its
CISPO cuts at epsilon_high, ours at 1 + clip_high as in the paper; its entropy bonus is a mean over tokens whatever the loss's mean;
its RLOO takes one ratio a sequence, ours one a token (the same gradient on policy, which is all its paper has).
"""

import itertools
import json
import random
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from config import Algorithm
from losses import Tokens, group_advantages, kl, leave_one_out, objective, token_weight

GOLDEN = Path(__file__).with_name("golden") / "trl_losses.json"
LENGTHS = [7, 1, 4, 5, 2, 6]  # two prompts of three samples
T, CAP, SAMPLES = 7, 9, 3
REWARDS = [[1.0, 0.0, 0.25], [None, 0.5, 1.0]]
FLOAT64, FLOAT32 = (torch.float64, 1e-10), (torch.float32, 1e-5)

# name: (TRL's settings, ours, how far apart policies are in nats, micro-batches)
Case = tuple[dict, dict, float, int]
CASES: dict[str, Case] = {}
for _name, _mean in (("grpo", "sequence"), ("bnpo", "token"), ("dr_grpo", "constant"), ("dapo", "token")):
    _clip = {"epsilon_low": 0.2, "epsilon_high": 0.28}, {"clip_high": 0.28, "loss_mean": _mean}
    CASES[_name] = {"loss_type": _name, **_clip[0]}, _clip[1], 0.5, 1
    CASES[f"{_name} on policy"] = {"loss_type": _name, **_clip[0], "on_policy": True}, _clip[1], 0.5, 1
    CASES[f"{_name} with KL"] = {"loss_type": _name, **_clip[0], "beta": 0.1}, {**_clip[1], "kl_coef": 0.1}, 0.5, 1
    if _name != "bnpo":  # whose mean is each micro-batch's own
        CASES[f"{_name} in micro-batches"] = {"loss_type": _name, **_clip[0], "beta": 0.1}, {**_clip[1], "kl_coef": 0.1}, 0.5, 3
_cispo = {"loss_type": "cispo", "epsilon_high": 1.5}, {"loss": "cispo", "clip_high": 0.5, "loss_mean": "token"}
CASES |= {
    "cispo": (*_cispo, 0.7, 1),
    "cispo in micro-batches": (*_cispo, 0.7, 3),
    "cispo with KL": ({**_cispo[0], "beta": 0.1}, {**_cispo[1], "kl_coef": 0.1}, 0.7, 1),
    "cispo with importance": ({**_cispo[0], "importance": "token_truncate", "cap": 1.2},
                              {**_cispo[1], "importance": "token_truncate", "importance_cap": 1.2}, 0.7, 1),
    "gspo": ({"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
             {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4}, 1e-3, 1),
    "gspo far off policy": ({"importance_sampling_level": "sequence", "beta": 0.1}, {"loss": "gspo", "kl_coef": 0.1}, 0.7, 3),
    "dual clip": ({"delta": 1.5}, {"dual_clip": 1.5}, 0.7, 1),
    "entropy bonus": ({"loss_type": "bnpo", "entropy_coef": 0.01}, {"loss_mean": "token", "entropy_coef": 0.01}, 0.5, 1),
    "everything": ({"importance": "token_truncate", "cap": 1.2, "beta": 0.1, "delta": 1.5},
                   {"importance": "token_truncate", "importance_cap": 1.2, "kl_coef": 0.1, "dual_clip": 1.5}, 0.7, 3),
}
for _way in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
    CASES[f"importance {_way}"] = {"importance": _way, "cap": 1.5}, {"importance": _way, "importance_cap": 1.5}, 0.7, 1
PAIR_CASES = {  # name: (TRL's settings, ours); aot on one pair at a time is conservative DPO, nothing being left to sort
    "dpo": ({"loss_types": ["sigmoid"], "beta": 0.1}, {"loss": "dpo", "kl_coef": 0.1}),
    "dpo beta 2": ({"loss_types": ["sigmoid"], "beta": 2.0}, {"loss": "dpo", "kl_coef": 2.0}),
    "dpo with label smoothing": ({"loss_types": ["aot"], "beta": 0.5, "label_smoothing": 0.1},
                                 {"loss": "dpo", "kl_coef": 0.5, "label_smoothing": 0.1}),
    "ipo": ({"loss_types": ["ipo"], "beta": 0.1}, {"loss": "ipo", "kl_coef": 0.1}),
}


def batch(seed: int, spread: float) -> dict[str, torch.Tensor]:
    """Padded [N, T] matrices in float64, of numbers that fp32 holds. `random` draws the same ones in every Python."""
    draw = random.Random(seed).random
    def matrix(centre, width):
        return torch.tensor([[draw() for _ in range(T)] for _ in LENGTHS]).sub(0.5).mul(2 * width).add(centre).double()

    rollout = matrix(-2.0, 1.5)
    old = (rollout + matrix(0.0, spread)).float().double()
    return {"rollout": rollout, "old": old, "logps": (old + matrix(0.0, 2 * spread)).float().double(),
            "ref": (old + matrix(0.0, spread)).float().double(), "entropies": matrix(1.0, 1.0)}


def flat(values: torch.Tensor) -> torch.Tensor:
    """[N, T] -> [R]."""
    return values[torch.arange(T) < torch.tensor(LENGTHS)[:, None]]


# --- TRL


def stub(**settings) -> SimpleNamespace:
    """What the trainers' methods read of `self`, at GRPOConfig's defaults, for one process and no logging."""
    same = dict.fromkeys(("gather", "gather_for_metrics"), lambda x: x)
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    return SimpleNamespace(**{
        "accelerator": SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0, sync_gradients=True,
                                       reduce=lambda x, reduction: x, **same),
        "model": model, "ref_model": SimpleNamespace(), "aux_loss_enabled": False, "beta": 0.0, "epsilon_low": 0.2,
        "epsilon_high": 0.2, "loss_type": "grpo", "importance_sampling_level": "token", "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None, "max_completion_length": CAP, "_entropy_bonus_enabled": False, "entropy_coef": 0.0,
        "use_adaptive_entropy": False, "environment_factories": None, "environments": None, "tools": None, "num_iterations": 2,
        "_tokenizer": SimpleNamespace(pad_token_id=0), "pad_to_multiple_of": None, "mask_truncated_completions": False,
        "num_generations": SAMPLES, "reward_weights": torch.ones(1), "reward_func_names": ["r"], "reward_clip_range": None,
        "multi_objective_aggregation": "sum_then_normalize", "scale_rewards": "group", "normalize_advantages": False,
        "use_vllm": False, "vllm_importance_sampling_correction": True, "_pending_extra_logs": {}, "_pending_metrics": {},
        "_metrics": {"train": defaultdict(list)}, "_logs": defaultdict(lambda: defaultdict(list)) | {
            name: [] for name in ("prompt", "completion", "advantages")}, "log_multimodal": False} | settings)


def scored(trainer_class, self: SimpleNamespace, rows: dict[str, torch.Tensor], rewards: list[list]) -> dict:
    """The trainer's own way from samples and rewards to a training batch: advantages, old logprobs, importance ratios."""
    prompts, ids = [[1, 2]] * len(LENGTHS), [list(range(1, length + 1)) for length in LENGTHS]
    sampled = [row[:length].tolist() for row, length in zip(rows["rollout"], LENGTHS, strict=True)]
    whole = (prompts, ids, None, ["x"] * len(ids), sampled, {}, None, None)
    self._generate = lambda _: whole if trainer_class.__name__ == "GRPOTrainer" else (prompts, ids, ["x"] * len(ids))
    values = [float("nan") if reward is None else reward for group in rewards for reward in group]
    self._calculate_rewards = lambda *_: torch.tensor(values, dtype=torch.float64)[:, None]
    self._get_per_token_logps_and_entropies = lambda model, *_, **__: (
        rows["old" if model is self.model else "ref"], None, None)
    return trainer_class._generate_and_score_completions(self, [{"prompt": "x"} for _ in ids])


def trl_step(case: Case, seed: int) -> dict[str, list]:
    """GRPOTrainer's loss of a step, its gradients in logprobs and entropies, and the advantages that it formed."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    given, (_, _, spread, micro) = dict(case[0]), case
    on_policy, importance, cap = (given.pop(key, None) for key in ("on_policy", "importance", "cap"))
    args = SimpleNamespace(use_bias_correction_kl=False, delta=given.pop("delta", None), steps_per_generation=micro,
                           gradient_accumulation_steps=micro, per_device_train_batch_size=6, gradient_checkpointing_kwargs=None)
    self = stub(**given, args=args, current_gradient_accumulation_steps=micro, use_vllm=importance is not None,
                num_iterations=1 if on_policy else 2, _entropy_bonus_enabled="entropy_coef" in given,
                vllm_importance_sampling_mode=importance, vllm_importance_sampling_clip_max=cap,
                vllm_importance_sampling_clip_min=1 / cap if importance and "mask" in importance else None)
    rows = batch(seed, spread)
    whole = scored(GRPOTrainer, self, rows, REWARDS)
    assert ("old_per_token_logps" in whole) == (not on_policy) and ("importance_sampling_ratio" in whole) == bool(importance)
    leaves = [rows[name].requires_grad_() for name in ("logps", "entropies")]
    total, size = torch.zeros((), dtype=torch.float64), len(LENGTHS) // micro
    for start in range(0, len(LENGTHS), size):
        part = slice(start, start + size)
        self._get_per_token_logps_and_entropies = lambda *_, part=part, **__: (leaves[0][part], leaves[1][part], None)
        total = total + GRPOTrainer._compute_loss(self, None, {
            name: value[part] if value.dim() else value for name, value in whole.items()})
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return {"loss": total.item(), "advantages": whole["advantages"].tolist(),
            **{name: flat(gradient).tolist() for name, gradient in zip(("logps", "entropies"), gradients, strict=True)
               if gradient is not None}}


def trl_advantages(rewards: list[list], seed: int) -> dict[str, list]:
    """Of GRPOTrainer with and without the standard deviation, and of RLOOTrainer without and with a KL penalty on its rewards."""
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer
    args = SimpleNamespace(steps_per_generation=1, gradient_accumulation_steps=1, per_device_train_batch_size=6,
                           gradient_checkpointing_kwargs=None)
    kinds = {"group": (GRPOTrainer, {}), "centred": (GRPOTrainer, {"scale_rewards": "none"}), "rloo": (RLOOTrainer, {}),
             "rloo with KL": (RLOOTrainer, {"beta": 0.1})}
    return {name: scored(trainer, stub(args=args, **settings), batch(seed, 0.5), rewards)["advantages"].tolist()
            for name, (trainer, settings) in kinds.items()}


def trl_rloo(seed: int) -> list[float]:
    """RLOOTrainer's gradient on policy."""
    from trl.trainer.rloo_trainer import RLOOTrainer
    args = SimpleNamespace(per_device_train_batch_size=6, gradient_checkpointing_kwargs=None)
    self, rows = stub(args=args), batch(seed, 0.5)
    inputs = scored(RLOOTrainer, self, rows, REWARDS)
    logps = rows["old"].clone().requires_grad_()
    self._get_per_token_logps_and_entropies = lambda *_, **__: (logps, rows["entropies"], None)
    return flat(torch.autograd.grad(RLOOTrainer._compute_loss(self, None, inputs), logps)[0]).tolist()


def trl_pairs(settings: dict, seed: int) -> dict[str, list]:
    """DPOTrainer's loss, one pair at a time, averaged; TRL's batch is all chosen, then all rejected."""
    from trl.trainer.dpo_trainer import DPOTrainer
    self = stub(ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_weights=[1.0], use_weighting=False,
                _total_train_tokens=0, _tp_size=1, **settings)
    rows = batch(seed, 0.5)
    logps, losses = rows["logps"].requires_grad_(), []
    for chosen in range(0, len(LENGTHS), 2):
        pair = slice(chosen, chosen + 2)
        mask = (torch.arange(T) < torch.tensor(LENGTHS[pair])[:, None]).long()
        ids = torch.ones(2, T + 1, dtype=torch.long)
        zeros = torch.zeros(2, T)
        outputs = SimpleNamespace(log_probs=logps[pair] * mask, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
        ref = (rows["ref"][pair] * mask).sum(1)
        losses.append(DPOTrainer._compute_loss(self, lambda outputs=outputs, **_: outputs, {
            "input_ids": ids, "attention_mask": ids, "completion_mask": torch.cat([torch.zeros(2, 1).long(), mask], 1),
            "ref_chosen_logps": ref[:1], "ref_rejected_logps": ref[1:]}, False))
    loss = torch.stack(losses).mean()
    return {"loss": loss.item(), "logps": flat(torch.autograd.grad(loss, logps)[0]).tolist()}


def trl_reward(seed: int) -> dict[str, list]:
    """RewardTrainer's loss and gradient; scores are the first column, chosen and rejected in turn."""
    from trl.trainer.reward_trainer import RewardTrainer
    scores, order = batch(seed, 0.5)["logps"][:, 0].clone().requires_grad_(), torch.tensor([0, 2, 4, 1, 3, 5])
    self = stub(args=SimpleNamespace(center_rewards_coefficient=None), _total_train_tokens=0, _tp_size=1)
    loss = RewardTrainer.compute_loss(self, lambda **_: SimpleNamespace(logits=scores[order][:, None]),
                                      {"attention_mask": torch.ones(6, 1, dtype=torch.long)})
    return {"loss": loss.item(), "logps": torch.autograd.grad(loss, scores)[0].tolist()}


def trl_answers(seed: int) -> dict:
    """All of the above: what the golden file holds for seed 0."""
    return {"steps": {name: trl_step(case, seed) for name, case in CASES.items()},
            "advantages": trl_advantages(REWARDS, seed), "rloo": trl_rloo(seed),
            "pairs": {name: trl_pairs(settings, seed) for name, (settings, _) in PAIR_CASES.items()}, "reward": trl_reward(seed)}


# --- ours against it


def our_step(rows: dict[str, torch.Tensor], advantages: list[float], a: Algorithm, micro: int) -> dict:
    """Loss and gradients of a step as the learner takes it: packed, weighted from global counts, one micro-batch after another."""
    leaves = [rows[name].requires_grad_() for name in ("logps", "entropies")]
    total, size = 0.0, len(LENGTHS) // micro
    for start in range(0, len(LENGTHS), size):
        part, lengths = slice(start, start + size), LENGTHS[start:start + size]
        inside = torch.arange(T) < torch.tensor(lengths)[:, None]
        R = {name: values[part][inside] for name, values in rows.items()}
        per_token = [(A, token_weight(a.loss_mean, length, sum(LENGTHS), len(LENGTHS), CAP))
                     for A, length in zip(advantages[part], lengths, strict=True) for _ in range(length)]
        advantages_R, weight_R = torch.tensor(per_token, dtype=R["logps"].dtype).T
        tokens = Tokens(R["logps"], R["old"], advantages_R, R["entropies"], lengths, R["rollout"],
                        R["ref"] if a.kl_coef else None)
        loss = (objective(tokens, a)[0] * weight_R).sum()
        loss.backward()
        total += loss.item()
    return {"loss": total, **{name: flat(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf))
                              for name, leaf in zip(("logps", "entropies"), leaves, strict=True)}}


def close(ours, trls, tolerance: float) -> None:
    """Largest difference within `tolerance` of the largest number."""
    got, right = torch.as_tensor(ours, dtype=torch.float64), torch.tensor(trls, dtype=torch.float64)
    assert got.shape == right.shape and (got - right).abs().max() <= tolerance * max(1e-2, right.abs().max())


def check_step(name: str, answer: dict, seed: int, precision: tuple) -> None:
    settings, mine, spread, micro = CASES[name]
    rows = {key: values.to(precision[0]) for key, values in batch(seed, spread).items()}
    if settings.get("on_policy"):
        rows["old"] = rows["logps"].clone()
    ours = our_step(rows, answer["advantages"], Algorithm(**mine), micro)
    for key in ("loss", "logps", "entropies"):
        close(ours[key], answer.get(key, [0.0] * sum(LENGTHS)), precision[1])


def check_advantages(answer: dict, rewards: list[list], seed: int) -> None:
    """TRL's (r - mean) / (std + 1e-4) is ours times std / (std + 1e-4)."""
    trls = {name: [values[start:start + SAMPLES] for start in range(0, len(values), SAMPLES)] for name, values in answer.items()}
    rows, inside = batch(seed, 0.5), torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    penalties = (kl(rows["old"], rows["ref"], "k1") * inside).sum(1).view(-1, SAMPLES).tolist()
    for i, group in enumerate(rewards):
        scored_ones = [reward for reward in group if reward is not None]
        std = statistics.stdev(scored_ones) if len(scored_ones) > 1 else 0.0
        assert trls["group"][i] == pytest.approx([A * std / (std + 1e-4) for A in group_advantages(group, True)], abs=1e-9)
        assert trls["centred"][i] == pytest.approx(group_advantages(group, False), abs=1e-9)
        assert trls["rloo"][i] == pytest.approx(leave_one_out(group), abs=1e-9)
        penalised = [None if r is None else r - 0.1 * k for r, k in zip(group, penalties[i], strict=True)]
        assert trls["rloo with KL"][i] == pytest.approx(leave_one_out(penalised), abs=1e-9)


def check_rloo(answer: list[float], advantages: list[float], seed: int) -> None:
    rows = batch(seed, 0.5)
    rows["logps"] = rows["old"].clone()
    close(our_step(rows, advantages, Algorithm(advantage="rloo", loss_mean="sum"), 1)["logps"], answer, 1e-10)


def check_pairs(answer: dict, mine: dict, seed: int, precision: tuple, lengths: list[int] = LENGTHS) -> None:
    rows = {key: values.to(precision[0]) for key, values in batch(seed, 0.5).items()}
    logps, ref = (rows[name][:, 0] if mine["loss"] == "bradley_terry" else flat(rows[name]) for name in ("logps", "ref"))
    logps.requires_grad_()
    zeros = torch.zeros_like(ref)
    losses, _ = objective(Tokens(logps, zeros, zeros, zeros, lengths, None, ref), Algorithm(**mine))
    loss = losses.sum() * token_weight("sum", 1, sum(lengths), len(lengths) // 2, CAP)
    close(loss, answer["loss"], precision[1])
    close(torch.autograd.grad(loss, logps)[0], answer["logps"], precision[1])


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(GOLDEN.read_text())


BOTH = pytest.mark.parametrize("precision", [FLOAT64, FLOAT32], ids=["fp64", "fp32"])


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_trls(name, precision, golden):
    """Value and gradients in logprobs and entropies, from TRL's advantages; 1e-10 in float64, 1e-5 in the fp32 of a run."""
    check_step(name, golden["steps"][name], 0, precision)


def test_the_cases_do_what_they_are_named_for(golden):
    """Some tokens clip and some do not, every importance cap binds somewhere, and no two cases have one answer."""
    for name, (_, mine, spread, _) in CASES.items():
        if "on policy" in name:
            continue
        rows = {key: flat(values) for key, values in batch(0, spread).items()}
        advantages = [A for A, length in zip(golden["steps"][name]["advantages"], LENGTHS, strict=True) for _ in range(length)]
        stats = objective(Tokens(rows["logps"], rows["old"], torch.tensor(advantages), rows["entropies"], LENGTHS, rows["rollout"]),
                          Algorithm(**mine))[1]
        assert 0 < stats["clipped"].sum() < sum(LENGTHS), name
        if "importance" in mine:
            weights, cap = stats["importance"].unique(), mine["importance_cap"]
            assert weights.numel() > 1 and (cap if "truncate" in mine["importance"] else 0) in weights, name
    # One answer may stand twice where it must: for micro-batches, and for bnpo, which in one micro-batch is dapo.
    answers = [answer["logps"] for name, answer in golden["steps"].items() if "micro" not in name and not name.startswith("bnpo")]
    assert all(one != other for one, other in itertools.combinations(answers, 2))


def test_advantages_equal_trls(golden):
    """GRPO's up to TRL's 1e-4, Dr.GRPO's and RLOO's exactly, with an unscored sample, and with the KL penalty in the reward."""
    check_advantages(golden["advantages"], REWARDS, 0)


def test_rloos_gradient_equals_trls_on_policy(golden):
    check_rloo(golden["rloo"], golden["advantages"]["rloo"], 0)


@BOTH
@pytest.mark.parametrize("name", PAIR_CASES)
def test_pairs_equal_trls(name, precision, golden):
    """DPOTrainer's value and gradient."""
    check_pairs(golden["pairs"][name], PAIR_CASES[name][1], 0, precision)


@BOTH
def test_the_reward_models_loss_equals_trls(precision, golden):
    check_pairs(golden["reward"], {"loss": "bradley_terry"}, 0, precision, [1] * 6)


def numbers(tree) -> list[float]:
    """Every number of nested dicts and lists, in order."""
    if isinstance(tree, dict | list):
        return [number for branch in (tree.values() if isinstance(tree, dict) else tree) for number in numbers(branch)]
    return [tree] if isinstance(tree, float) else []


@pytest.mark.long
def test_the_golden_file_is_what_trl_says(golden):
    """Not edited by hand, and not of another TRL."""
    import trl
    assert trl.__version__ == golden["trl"]
    fresh = {"trl": trl.__version__, **trl_answers(0)}
    assert [*fresh["steps"], *fresh["pairs"]] == [*golden["steps"], *golden["pairs"]]
    assert numbers(fresh) == pytest.approx(numbers(golden), rel=1e-9, abs=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 6))
def test_trl_itself_on_other_batches(seed):
    """Everything above, on batches that no file holds."""
    answers = trl_answers(seed)
    for name, answer in answers["steps"].items():
        check_step(name, answer, seed, FLOAT64)
    draw = random.Random(seed).choice
    for rewards in (REWARDS, [[draw([0.0, 0.5, 1.0, None]) for _ in range(SAMPLES)] for _ in range(2)]):
        check_advantages(trl_advantages(rewards, seed), rewards, seed)
    check_rloo(answers["rloo"], answers["advantages"]["rloo"], seed)
    for name, answer in answers["pairs"].items():
        check_pairs(answer, PAIR_CASES[name][1], seed, FLOAT64)
    check_pairs(answers["reward"], {"loss": "bradley_terry"}, seed, FLOAT64, [1] * 6)


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    import trl
    GOLDEN.write_text(json.dumps({"trl": trl.__version__, **trl_answers(0)}).replace("], ", "],\n").replace("}, ", "},\n") + "\n")
