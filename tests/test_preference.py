"""Learning from pairs without actors: DPO, IPO and Bradley-Terry against float64 textbooks, and whole runs on toy pairs."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from learners import (
    QUIET,
    SHAPE,
    assert_same,
    double,
    gradients_of,
    hf_config,
    new_learner,
    one_step,
    split,
    toy,
)
from ranks import ROOT, job, rows, spawn_ok
from safetensors.torch import load_file, save_file
from test_data import ASSISTANT, END, EOS, HELLO, MESSAGES, TEMPLATE, WORLD, tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaForSequenceClassification

import preference
from config import ConfigError, Data
from data import Encoder, Prompts
from launch import Start, check_folders
from learner import Sample
from preference import Pairs
from sync import Grid

BETA = 0.1
ALGORITHMS = {"dpo": {"name": "dpo", "label_smoothing": 0.1}, "ipo": {"name": "dpo", "loss": "ipo"},
              "bradley_terry": {"name": "reward_model"}}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pairs(number: int) -> list[tuple[Sample, Sample]]:
    """Pairs of unequal lengths behind common prompts, weighted for their mean."""
    rng = random.Random(3)
    found = []
    for _ in range(number):
        prompt = [rng.randrange(13) for _ in range(rng.randint(1, 6))]
        both = [[rng.randrange(13) for _ in range(rng.randint(1, 9))] for _ in range(2)]
        found.append(tuple(Sample(prompt + response, len(prompt), [], weight=1 / number) for response in both))
    return found


def config_of(loss: str):
    """A real optimizer step must move policy and reference apart; Adam's large epsilon keeps that step free of rounding's signs."""
    return toy(algorithm=ALGORITHMS[loss], learner={"adam_eps": 1e-3, "lr": 0.1, "max_grad_norm": 1e9})


def moved(loss: str, ranks: tuple[int, int] = (1, 1), rank: int = 0):
    """A learner after one real step on other pairs; a head of zeros would give the trunk no gradient."""
    learner = new_learner(config_of(loss), ranks)
    for step, (part, number) in enumerate(((0, 5), (2, 7))):
        drawn = pairs(number)[part:]
        mine = split(drawn, learner.ranks)[rank]
        one_step(learner, [[sample for pair in mine for sample in pair]], step)
    return learner


def textbook(learner, loss: str, batch: list[tuple[Sample, Sample]]) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """(mean loss, gradients, margins) by the papers' formulas, one sequence at a time."""
    scorer = loss == "bradley_terry"
    policy = double(LlamaForSequenceClassification if scorer else LlamaForCausalLM, learner.model)
    reference = None if scorer else double(LlamaForCausalLM, learner.reference)

    def number(model, sample: Sample) -> torch.Tensor:
        """The sequence's score, or the sum of its response's logprobs."""
        if scorer:
            return model(torch.tensor([sample.tokens])).logits[0, 0]
        logits = model(torch.tensor([sample.tokens])).logits[0, sample.num_prompt - 1:-1, :13]
        return logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens[sample.num_prompt:])[:, None]).sum()

    total, margins = 0.0, []
    for pair in batch:
        gains = []
        for sample in pair:
            gain = number(policy, sample)
            if reference:
                gain = gain - number(reference, sample).detach()
            gains.append(gain / sample.response if loss == "ipo" else gain)
        margin = gains[0] - gains[1]
        margins.append((margin if scorer else BETA * margin).item())
        right, wrong = -torch.log(torch.sigmoid(BETA * margin)), -torch.log(torch.sigmoid(-BETA * margin))
        total = total + {"dpo": 0.9 * right + 0.1 * wrong, "ipo": (margin - 1 / (2 * BETA)) ** 2,
                         "bradley_terry": -torch.log(torch.sigmoid(margin))}[loss]
    (total / len(batch)).backward()
    return total.item() / len(batch), {name: parameter.grad for name, parameter in policy.named_parameters()}, margins


def flat(batch: list[tuple[Sample, Sample]]) -> list[Sample]:
    return [sample for pair in batch for sample in pair]


@pytest.mark.parametrize("loss", ALGORITHMS)
def test_gradients_are_the_textbooks_for_one_and_four_micro_batches(loss):
    """L1 for pairs: a mean over micro-batches of unequal numbers, a prompt's tokens that count, beta at one side only."""
    batch = pairs(7)
    value, wanted, margins = textbook(moved(loss), loss, batch)
    assert min(margins) < -1e-3 and max(margins) > 1e-3, "policy and reference must differ, to both sides"
    for bins in (1, 4):
        sums, gradients = gradients_of(moved(loss), [flat(part) for part in split(batch, bins)])
        assert sums["loss"] == pytest.approx(value, rel=1e-5)
        assert sums["margin"] == pytest.approx(sum(margins), rel=1e-3, abs=1e-5)
        assert sums["accuracy"] == sum(margin > 0 for margin in margins)
        assert sums["tokens"] == sum(sample.response for sample in flat(batch))
        assert_same(gradients, wanted, 2e-5)


def on_ranks(rank: int, grid: list[int], bins: int, out: str) -> dict[str, float]:
    losses = {}
    for loss in ALGORITHMS:
        learner = moved(loss, tuple(grid), rank)
        mine = split(pairs(7), learner.ranks * bins)[rank * bins:(rank + 1) * bins]
        sums, gradients = gradients_of(learner, [flat(part) for part in mine])
        losses[loss] = sums["loss"]
        if rank == 0:
            save_file({name: gradient.contiguous() for name, gradient in gradients.items()}, f"{out}/{loss}")
    return losses


@pytest.mark.parametrize(("grid", "bins"), [((1, 2), 4), pytest.param((2, 2), 1, marks=pytest.mark.long)])
def test_gradients_are_the_textbooks_on_several_ranks(grid, bins, tmp_path):
    """L1 for pairs: two ranks of four micro-batches for seven pairs, so that one is empty and its rank must not stop."""
    losses = spawn_ok(grid[0] * grid[1], "test_preference:on_ranks", list(grid), bins, str(tmp_path))
    for loss in ALGORITHMS:
        value, wanted, _ = textbook(moved(loss), loss, pairs(7))
        assert sum(each[loss] for each in losses) == pytest.approx(value, rel=1e-4)
        assert_same(load_file(tmp_path / loss), wanted, 1e-4)  # two real steps lie before it, rounded differently


def test_each_rank_takes_its_share_of_the_same_plan():
    """A pair on two ranks has no margin; one that is left out or trained twice is another loss."""
    drawn, grid = pairs(9), Grid(1, 3, 0, 1)
    shares = [preference.split(drawn, SHAPE, grid, rank, 40) for rank in range(3)]
    assert len({len(share) for share in shares}) == 1
    for batch in (batch for share in shares for batch in share):
        assert sum(len(sample.tokens) for sample in batch) <= 40
        assert all(any(pair[0] is chosen and pair[1] is rejected for pair in drawn)
                   for chosen, rejected in zip(batch[::2], batch[1::2], strict=True))
    trained = [id(sample) for share in shares for batch in share for sample in batch]
    assert sorted(trained) == sorted(id(sample) for sample in flat(drawn))
    assert {sample.weight for sample in flat(drawn)} == {1 / 9}


# --- data


def test_a_response_ends_with_one_eos(tmp_path):
    """A response that never ends teaches the policy to go on; two ends, or a line break behind the end, are never sampled."""
    plain = Encoder(tokenizer(tmp_path / "plain"))
    assert plain.encode_response("hello", "world one") == [WORLD, 7, EOS]
    assert plain.encode_response("hello", "world </s>") == [WORLD, EOS]
    template = TEMPLATE.replace("<|user|> {{ m['content'] }} ", "<|{{ m['role'] }}|> {{ m['content'] }} </s> hello ")
    chat = Encoder(tokenizer(tmp_path / "chat", template=template))  # "hello" stands for the template's line break
    turn = [{"role": "assistant", "content": "world one"}]
    assert chat.encode(MESSAGES)[-1] == ASSISTANT
    for response in (turn, "world one"):
        assert chat.encode_response(MESSAGES, response) == [WORLD, 7, EOS]
    named = Encoder(tokenizer(tmp_path / "named", template=template.replace("</s>", "<|end|>"),
                              generation_config={"eos_token_id": [EOS, END]}))
    assert named.encode_response(MESSAGES, turn) == [WORLD, 7, END]
    odd = Encoder(tokenizer(tmp_path / "odd", template="{{ messages | length }} hello {{ messages[-1]['content'] }}"))
    with pytest.raises(ConfigError, match="changes a prompt"):
        odd.encode_response(MESSAGES, turn)
    assert HELLO not in chat.encode_response(MESSAGES, turn)


@pytest.mark.parametrize(("row", "words"), [
    ({"chosen": "one"}, "columns `chosen` and `rejected`"), ({"chosen": "one", "rejected": ""}, "columns `chosen` and `rejected`"),
    ({"chosen": "one", "rejected": [{"role": "assistant", "content": "two"}]}, "both strings or both lists")])
def test_rows_without_two_responses_are_refused(row, words, tmp_path):
    """A missing column must not train towards an empty response; mixed kinds would compare a template's tokens with none."""
    encoder = Encoder(tokenizer(tmp_path / "tok"))
    source = Pairs(Prompts([{"prompt": "hello"} | row], Data(), encoder, 0), 8)
    with pytest.raises(ConfigError, match=words) as caught:
        source.draw()
    assert str(caught.value).startswith("`data.path`: row 0")


def test_pairs_with_a_long_response_are_skipped_and_counted(tmp_path):
    """Cutting one side of a pair would change what is compared."""
    encoder = Encoder(tokenizer(tmp_path / "tok"))
    data = [{"prompt": "hello", "chosen": "one " * count, "rejected": "two"} for count in (1, 9, 2)]
    source = Pairs(Prompts(data, Data(shuffle=False), encoder, 0), 3)
    assert [source.draw()[0].response for _ in range(4)] == [2, 3, 2, 3] and source.skipped == 2
    with pytest.raises(ConfigError, match="rollout.max_new_tokens"):
        Pairs(Prompts(data[1:2], Data(), encoder, 0), 3).draw()


def test_held_out_pairs_are_checked_before_the_run(tmp_path):
    """A mistake in the evaluation's file must not show up as a division by zero after the first steps, or as data.path's."""
    good = {"prompt": "12>", "chosen": "12", "rejected": "13"}
    long, empty = good | {"chosen": "123456789"}, {"prompt": "12>"}
    for row, field in ((long, "`rollout.max_new_tokens` = 4"), (empty, "`data.eval_path`: row 0")):
        for name, content in (("train", good), ("eval", row)):
            (tmp_path / f"{name}.jsonl").write_text(json.dumps(content))
        config = toy(algorithm=ALGORITHMS["dpo"], rollout={"max_new_tokens": 4}, eval={"every": 1},
                     data={"path": str(tmp_path / "train.jsonl"), "eval_path": str(tmp_path / "eval.jsonl")})
        with pytest.raises(ConfigError) as caught:
            preference.load_pairs(config, Start(0, SHAPE, Encoder("configs/toy"), torch.device("cpu")))
        assert str(caught.value).startswith(field)


def test_a_reward_models_start_is_checked_before_the_run(tmp_path):
    """R6: a head of two labels, found after 64 ranks have loaded."""
    LlamaForSequenceClassification(hf_config(num_labels=2)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / "configs/toy" / name, tmp_path / name)
    config = toy(algorithm=ALGORITHMS["bradley_terry"], model={"path": str(tmp_path), "init": "load"})
    with pytest.raises(ConfigError, match="`model.path` = .*score.weight has shape \\(2, 64\\)"):
        check_folders(config, SHAPE, Encoder("configs/toy"))


# --- whole runs


def write_pairs(path: Path, number: int, seed: int) -> str:
    """Copies of four digits below 5; in the rejected ones, one digit is wrong, and above 4."""
    rng, lines = random.Random(seed), []
    for _ in range(number):
        digits = [rng.choice("01234") for _ in range(4)]
        wrong = list(digits)
        wrong[rng.randrange(4)] = rng.choice("56789")
        lines.append(json.dumps({"prompt": "".join(digits) + ">", "chosen": "".join(digits), "rejected": "".join(wrong)}))
    path.write_text("\n".join(lines))
    return str(path)


@pytest.mark.parametrize("name", ["dpo", pytest.param("reward_model", marks=pytest.mark.long)])
def test_pairs_are_learned_without_actors(name, tmp_path):
    """On two shards held-out accuracy rises, the best and the last version are saved, and every step is written down."""
    run = tmp_path / "run"
    done = job(2, f"run_dir={run}", "model.init=random", f"algorithm.name={name}", "steps=16", "learner.shards=2", "threads=1",
               f"data.path={write_pairs(tmp_path / 'train.jsonl', 200, 0)}", "rollout.prompts_per_step=16",
               f"data.eval_path={write_pairs(tmp_path / 'eval.jsonl', 40, 1)}", "eval.every=8", "eval.keep_best=true",
               "learner.lr=5e-3", "learner.minibatches=2", "learner.max_tokens_per_micro_batch=100", "export.every=10",
               "data.max_prompt_tokens=8", "learner.activation_checkpointing=selective", "learner.reduce=step")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    judged, metrics = rows(run, "eval.jsonl"), rows(run)
    assert [row["version"] for row in judged] == [0, 8, 16] and {row["pairs"] for row in judged} == {40}
    assert judged[-1]["accuracy"] > 0.9 > judged[0]["accuracy"] + 0.2 and judged[-1]["margin"] > judged[0]["margin"]
    assert judged[0]["loss"] == pytest.approx(0.6931, abs=1e-3) and judged[-1]["loss"] < 0.6
    assert [row["version"] for row in metrics] == list(range(1, 17))
    assert metrics[0]["loss"] == pytest.approx(0.69, abs=0.05) and metrics[-1]["accuracy"] > 0.9
    folders = {"best", "model", "step-10"}
    assert folders <= {path.name for path in run.iterdir()} and json.loads((run / "trace.json").read_text())
    stored = {folder: load_file(run / folder / "model.safetensors") for folder in folders}
    for tensors in stored.values():
        assert ("score.weight" in tensors) == (name == "reward_model") == ("lm_head.weight" not in tensors)
    assert any(not torch.equal(stored["model"][tensor], stored["step-10"][tensor]) for tensor in stored["model"])
    assert judged[-1]["loss"] == min(row["loss"] for row in judged)
    assert all(torch.equal(stored["model"][tensor], stored["best"][tensor]) for tensor in stored["model"]), "lowest held-out loss"
    if name == "dpo":
        for folder in folders:
            loaded = AutoModelForCausalLM.from_pretrained(run / folder)
            assert torch.equal(loaded.lm_head.weight, stored[folder]["lm_head.weight"])


def test_held_out_loss_is_measured_without_moving_anything():
    """An evaluation that leaves gradients behind, or whose sums are a step's."""
    learner, batch = moved("dpo"), pairs(7)
    before = {name: shard.clone() for name, shard in learner.shards().items()}
    micro_batches = [flat(part) for part in split(batch, 2)]
    learner.score(micro_batches, QUIET)
    sums = learner.measure(micro_batches)
    value, _, margins = textbook(learner, "dpo", batch)
    assert sums["loss"] == pytest.approx(value, rel=1e-5) and sums["accuracy"] == sum(margin > 0 for margin in margins)
    assert all(parameter.grad is None for parameter in learner.model.parameters())
    assert all(torch.equal(before[name], shard) for name, shard in learner.shards().items())
