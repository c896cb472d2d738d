"""The learner on 1, 2 and 4 FSDP2 ranks: the same step for every split, nothing trained that is masked, nothing stale read."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from learners import SHAPE, assert_same, double, gradients_of, new_learner, one_step, optimizer_of, samples, split, toy
from ranks import spawn_ok
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from kernels.logprob import Head
from learner import Learner, Sample
from ledger import Ledger

PENALTIES = {"entropy_coef": 0.05, "kl_coef": 0.1}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def textbook_gradients(batch: list[Sample], learner: Learner | None = None) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """GRPO by its formula on transformers' model in float64, one sequence at a time, averaged over all response tokens.

    Returns (loss, gradients, each sample's largest distance from its recorded logprobs).
    """
    learner = learner or new_learner(toy(algorithm=PENALTIES))
    model, start = (double(LlamaForCausalLM, each) for each in (learner.model, learner.reference))
    total, count, gaps = 0.0, sum(len(sample.logprobs) for sample in batch), []
    for sample in batch:
        targets = torch.tensor(sample.tokens[sample.num_prompt:])[:, None]
        logps, ref_logps = (each(torch.tensor([sample.tokens])).logits[0, sample.num_prompt - 1:-1, :13].log_softmax(-1)
                            for each in (model, start))
        chosen, reference = logps.gather(1, targets)[:, 0], ref_logps.gather(1, targets)[:, 0].detach()
        gaps.append((chosen - torch.tensor(sample.logprobs, dtype=torch.float64)).abs().max().item())
        ratio = (chosen - torch.tensor(sample.logprobs, dtype=torch.float64)).exp()
        surrogate = torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage)
        entropy = -(logps.exp() * logps).sum(-1)
        kl = (reference - chosen).exp() - 1 - (reference - chosen)
        total = total + (-surrogate + 0.1 * kl - 0.05 * entropy).sum() / count
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}, gaps


def test_gradient_is_the_textbooks_for_one_and_four_micro_batches():
    """L1, proof 3: a mean of micro-batch means weighs the tokens of short micro-batches more."""
    batch = samples(11)
    loss, wanted, _ = textbook_gradients(batch)
    for bins in (1, 4):
        sums, gradients = gradients_of(new_learner(toy(algorithm=PENALTIES)), split(batch, bins))
        assert sums["loss"] == pytest.approx(loss, rel=1e-5)
        assert_same(gradients, wanted)


def on_ranks(rank: int, grid: list[int], bins: int, out: str) -> float:
    learner = new_learner(toy(algorithm=PENALTIES), tuple(grid))
    mine = split(samples(11), learner.ranks * bins)[rank * bins:(rank + 1) * bins]
    sums, gradients = gradients_of(learner, mine)
    if rank == 0:
        save_file({name: gradient.contiguous() for name, gradient in gradients.items()}, out)
    return sums["loss"]


@pytest.mark.parametrize(("grid", "bins"), [((1, 2), 2), *(pytest.param(*case, marks=pytest.mark.long)
                                                           for case in (((1, 4), 1), ((2, 2), 3), ((2, 1), 2)))])
def test_gradient_is_the_textbooks_on_several_ranks(grid, bins, tmp_path):
    """L1, proof 3: 2 x 2 (ranks x micro-batches), 4 shards, HSDP 2 x 2 with empty micro-batches."""
    loss, wanted, _ = textbook_gradients(samples(11))
    losses = spawn_ok(grid[0] * grid[1], "test_learner:on_ranks", list(grid), bins, str(tmp_path / "gradients"))
    assert sum(losses) == pytest.approx(loss, rel=1e-5)
    assert_same(load_file(tmp_path / "gradients"), wanted)


def test_everything_masked_is_a_counted_step_without_gradient():
    """L11: NaN from 0/0, or a step that never returns."""
    learner = new_learner(toy())
    before = {name: shard.clone() for name, shard in learner.shards().items()}
    for batches in ([samples(3, weight=0.0)], [[]]):
        sums = one_step(learner, batches)
        assert (sums["loss"], sums["grad_norm"], sums["tokens"]) == (0.0, 0.0, 0)
    assert all(torch.equal(before[name], shard) for name, shard in learner.shards().items())


def masked_on_one(rank: int) -> list[float]:
    """Rank 1 has only masked samples, then nothing at all; both ranks must return and move alike."""
    learner, norms = new_learner(toy(algorithm=PENALTIES), (1, 2)), []
    for idle in ([samples(2, weight=0.0)], [[]]):
        norms.append(one_step(learner, [samples(4)] if rank == 0 else idle)["grad_norm"])
    return norms


def test_masked_on_one_rank_only():
    """L11: the rank without work must still take part in every collective."""
    first, second = spawn_ok(2, "test_learner:masked_on_one")
    assert first == second and all(norm > 0 for norm in first)


def test_the_mask_comes_from_lengths_not_from_token_values():
    """L12: pad = eos = 2 inside and at the end of a response: all three tokens are trained on; a prompt token never is."""
    learner = new_learner(toy())
    for tokens, num_prompt in (([5, 6, 2], 1), ([4, 5, 6, 2, 2], 2), ([0, 5, 6, 7, 0], 1)):
        _, _, rows, targets = learner._pack([Sample(tokens, num_prompt, [-1.0] * (len(tokens) - num_prompt), 1.0, 0.1)])
        assert rows.tolist() == list(range(num_prompt - 1, len(tokens) - 1))
        assert targets.tolist() == tokens[num_prompt:]


def test_small_steps_of_bf16_training_are_not_lost():
    """L14: in bf16 the next number after 1.0 is 1.0078; at lr 1e-6 a parameter kept in bf16 never moves."""
    learner = new_learner(toy(model={"dtype": "bfloat16"}, learner={"lr": 1e-6}))
    optimizer = optimizer_of(learner)
    for value, wanted in ((1.0, 0.99990), (0.02, 0.01990)):
        optimizer.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in optimizer.state_dict().items()})
        for parameter in learner.model.parameters():
            torch.nn.init.constant_(parameter, value)
        for _ in range(100):
            for parameter in learner.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step(1e-6)
        for name, shard in learner.shards().items():
            assert shard.dtype == torch.float32
            torch.testing.assert_close(shard, torch.full_like(shard, wanted), rtol=0, atol=5e-6, msg=name)
    assert {moment.dtype for moment in optimizer.moments.values()} == {torch.float32}


def stale_reads(rank: int) -> None:
    """R1 on two shards: no-grad forwards before and between must not leave unsharded copies that are read or sent later."""
    config = toy(learner={"lr": 1e-3})
    learner, probe = new_learner(config, (1, 2)), samples(3)

    def logps(model) -> torch.Tensor:
        ids, attend, rows, targets = learner._pack(probe)
        with torch.no_grad():
            return model(ids, attend, rows, targets, Head(1.0, model.vocab, 64))[0]

    before, start = logps(learner.model), {name: shard.clone() for name, shard in learner.shards().items()}
    optimizer = optimizer_of(learner)
    inner = optimizer.step

    def step_after_a_forward(lr: float):
        logps(learner.model)
        inner(lr)

    optimizer.step = step_after_a_forward
    one_step(learner, [samples(4)])
    after = logps(learner.model)
    sent = learner.shards()  # taken right after a forward
    for name, parameter in learner.model.named_parameters():
        whole = parameter.full_tensor()
        first = rank * -(-len(whole) // 2)
        assert torch.equal(sent[name], whole[first:first + len(sent[name])]), f"{name}: sent is not the shard"
        assert not torch.equal(sent[name], start[name]), f"{name} did not change"
    fresh = new_learner(config, (1, 2))
    for name, shard in fresh.shards().items():
        shard.copy_(sent[name])
    assert torch.equal(after, logps(fresh.model)) and not torch.equal(after, before)


def test_no_forward_leaves_stale_weights_behind():
    """R1: FSDP2's default keeps the root unsharded after a forward; then updates are lost and old weights are sent."""
    spawn_ok(2, "test_learner:stale_reads")


def tied_rows(rank: int, folder: str) -> dict:
    """R2: learner on rank 0, engine on rank 1; one embedding row is moved, published, saved."""
    import json
    from pathlib import Path

    from actor import Engine
    from channel import open_channel
    from checkpoint import save_hf
    from model import parameter_shapes
    from shape import shape_from_hf
    from sync import Grid, Publisher, agree_on_plan, make_groups
    hf = json.loads(Path("configs/toy/config.json").read_text()) | {"tie_word_embeddings": True}
    if rank == 0:
        Path(folder, "source").mkdir()
        Path(folder, "source", "config.json").write_text(json.dumps(hf))
    shape, config = shape_from_hf(hf), toy(data={"max_prompt_tokens": 8})
    shapes = parameter_shapes(shape)
    channel = open_channel(rank, 30)
    engine = Engine(config, shape, 13, torch.device("cpu"), Ledger(False)) if rank else None
    live = {name: tuple(weight.shape) for name, weight in engine.weights().items()} if rank else {}
    plan = agree_on_plan(channel, config, shapes, (engine.runner.layout, live) if rank else None)
    groups = make_groups(Grid.of(config), plan, "cpu", 30)
    publisher = Publisher(channel, plan, groups, config, torch.device("cpu"))
    result = {}
    if rank == 0:
        learner = Learner(config, shape, 13, groups.mesh, torch.device("cpu"))
        learner.shards()["model.embed_tokens.weight"][7] += 1.0
        publisher.announce(0)
        publisher.send(0, learner.shards())
        save_hf(Path(folder, "saved"), Path(folder, "source"), learner.full_tensors())
    else:
        publisher.receive(0, engine.weights())
        model = engine.runner.model
        result = {"head": model.lm_head.weight[7].tolist(), "embedding": model.model.embed_tokens.weight[7].tolist(),
                  "head_is_embedding": model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()}
    dist.barrier()
    return result


def test_a_tied_head_moves_with_its_embedding(tmp_path):
    """R2: the tie is lost on the engine, in the saved folder, or on reload."""
    from transformers import AutoModelForCausalLM
    _, engine = spawn_ok(2, "test_learner:tied_rows", str(tmp_path))
    assert engine["head_is_embedding"] and engine["head"] == engine["embedding"]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert "lm_head.weight" not in saved and saved["model.embed_tokens.weight"][7].tolist() == engine["head"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert loaded.lm_head.weight[7].tolist() == engine["head"] and min(engine["head"]) > 0.5


def test_reference_is_the_start_and_stays_there():
    """KL to the reference is 0 exactly at step 0 and grows with training; the reference itself must not be trained."""
    learner = new_learner(toy(algorithm=PENALTIES))
    first = one_step(learner, [samples(6)])
    kept = [parameter.full_tensor().clone() for parameter in learner.reference.parameters()]
    second = one_step(learner, [samples(6)], step=1)
    assert first["kl"] == 0.0 and second["kl"] > 1e-4
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(kept, learner.reference.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_gradient_and_gap_are_the_textbooks_after_real_steps(kind):
    """Recomputed activations of weights that an optimizer has moved since; a reference that moved with them."""
    learner = new_learner(toy(learner={"activation_checkpointing": kind}, algorithm=PENALTIES))
    for step in range(2):
        one_step(learner, split(samples(8), 2), step)
    batch = samples(11)
    loss, wanted, gaps = textbook_gradients(batch, learner)
    sums, gradients = gradients_of(learner, [batch])
    assert sums["loss"] == pytest.approx(loss, rel=1e-4) and sums["kl"] > 1e-3
    assert sums["sample_gaps"] == pytest.approx(gaps, abs=1e-5) and sums["gap_max"] == pytest.approx(max(gaps), abs=1e-5)
    assert_same(gradients, wanted, 2e-5)


def test_activation_checkpointing_changes_no_bit():
    found = []
    for kind in ("none", "selective", "full"):
        learner = new_learner(toy(learner={"activation_checkpointing": kind}, algorithm=PENALTIES))
        one_step(learner, split(samples(8), 2))
        sums, gradients = gradients_of(learner, split(samples(7), 2))
        found.append((sums["loss"], sums["sample_gaps"], gradients))
    for loss, gaps, gradients in found[1:]:
        assert (loss, gaps) == found[0][:2] and all(torch.equal(found[0][2][name], gradients[name]) for name in gradients)


class Reductions(TorchDispatchMode):
    """Counts reduce-scatters of gradients."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += "reduce_scatter" in str(function)
        return function(*arguments, **(keywords or {}))


def reduced(rank: int, grid: list[int]) -> list:
    """[largest relative difference of the gradients, reductions by micro-batch, reductions by step]"""
    gradients, counts = [], []
    for reduce in ("micro_batch", "step"):
        learner = new_learner(toy(learner={"reduce": reduce}, algorithm=PENALTIES), tuple(grid))
        mine = split(samples(11), learner.ranks * 3)[rank * 3:(rank + 1) * 3]
        with Reductions() as reductions:
            gradients.append(gradients_of(learner, mine)[1])
        counts.append(reductions.count)
    differences = [(one - gradients[1][name]).abs().max() / one.abs().max() for name, one in gradients[0].items()]
    return [max(differences).item(), *counts]


@pytest.mark.parametrize("grid", [(1, 2), pytest.param((2, 2), marks=pytest.mark.long)])
def test_reducing_once_a_step_gives_the_same_gradient(grid):
    """Whole gradients that are not added up over micro-batches, or a setting that changes no traffic."""
    for difference, by_micro_batch, by_step in spawn_ok(grid[0] * grid[1], "test_learner:reduced", list(grid)):
        assert difference <= 1e-6 and by_micro_batch == 3 * by_step > 0


class LargestAllocation(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_tensor_of_tokens_by_vocabulary_exists():
    """600 response tokens x 4096 ids would be 2.5M elements; the largest tensor of a whole step is FSDP's root unit."""
    shape = dataclasses.replace(SHAPE, vocab=4096)
    learner = new_learner(toy(learner={"logprob_chunk": 64}, algorithm=PENALTIES), shape=shape, vocab=4096)
    batch = [Sample([index % 4000] * 61, 1, [-8.0] * 60, 1.0, 1 / 600) for index in range(10)]
    with LargestAllocation() as largest:
        one_step(learner, [batch])
    assert largest.numel == 2 * 4096 * 64 + 64  # embedding, head and last norm; a chunk of logits is half of it


def test_gradients_are_clipped_to_the_global_norm():
    _, plain = gradients_of(new_learner(toy()), [samples(6)])
    sums, clipped = gradients_of(new_learner(toy(learner={"max_grad_norm": 1e-3})), [samples(6)])
    norm = torch.sqrt(sum(gradient.double().square().sum() for gradient in plain.values())).item()
    assert sums["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert torch.sqrt(sum(g.double().square().sum() for g in clipped.values())).item() == pytest.approx(1e-3, rel=1e-3)
