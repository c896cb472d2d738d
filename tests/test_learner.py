"""The learner on 1, 2 and 4 FSDP2 ranks: the same step for every split, nothing trained that is masked, nothing stale read."""

import dataclasses
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import spawn_ok
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.logprob import Head
from learner import Learner, Sample, learning_rate, plan_micro_batches
from ledger import Ledger
from settings import build
from shape import read_shape

SHAPE = read_shape("configs/toy")


def toy(**sections):
    """A config of the toy whose clipping does not touch the gradients."""
    values = {"model": {"path": "configs/toy", "init": "random"}, "learner": {"max_grad_norm": 1e9, "lr": 1e-2},
              "algorithm": {"entropy_coef": 0.05, "kl_coef": 0.1}}
    for section, entries in sections.items():
        values[section] = values.get(section, {}) | entries
    return build(values)


def samples(number: int, weight: float | None = None) -> list[Sample]:
    """Sequences of unequal length; the token mean's weight unless another is given."""
    rng = random.Random(5)
    drafts = []
    for _ in range(number):
        prompt, response = ([rng.randrange(13) for _ in range(rng.randint(1, longest))] for longest in (6, 9))
        drafts.append((prompt, response, [-rng.random() * 3 for _ in response], rng.gauss(0, 1)))
    share = 1 / sum(len(response) for _, response, _, _ in drafts) if weight is None else weight
    return [Sample(prompt + response, len(prompt), logprobs, advantage, share) for prompt, response, logprobs, advantage in drafts]


def new_learner(config, ranks: tuple[int, int] = (1, 1), shape=SHAPE, vocab: int = 13) -> Learner:
    grid = torch.arange(ranks[0] * ranks[1]).view(ranks)
    mesh = DeviceMesh("cpu", grid[0], mesh_dim_names=("shard",)) if ranks[0] == 1 else DeviceMesh(
        "cpu", grid, mesh_dim_names=("replicate", "shard"))
    return Learner(config, shape, vocab, mesh, torch.device("cpu"))


def gradients_of(learner: Learner, micro_batches: list[list[Sample]]) -> tuple[dict, dict]:
    """What a step would apply: the optimizer is kept from moving anything."""
    learner.optimizer.step = learner.optimizer.zero_grad = lambda: None
    sums = learner.train_step(micro_batches, 0, Ledger(False))
    return sums, {name: parameter.grad.full_tensor() for name, parameter in learner.model.named_parameters()}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def textbook_gradients(batch: list[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    """GRPO by its formula on transformers' model in float64, one sequence at a time, averaged over all response tokens."""
    import json
    from pathlib import Path

    from transformers import LlamaConfig, LlamaForCausalLM
    hf = json.loads(Path("configs/toy/config.json").read_text()) | {"pad_token_id": None}  # else transformers never trains row 0
    config = LlamaConfig(**hf)
    model = LlamaForCausalLM(config).double()
    start = new_learner(toy())
    model.load_state_dict({name: parameter.full_tensor().double() for name, parameter in start.model.named_parameters()})
    total, count = 0.0, sum(len(sample.old_logprobs) for sample in batch)
    for sample in batch:
        logits = model(torch.tensor([sample.tokens])).logits[0, sample.num_prompt - 1:-1, :13]
        logps = logits.log_softmax(-1)
        chosen = logps.gather(1, torch.tensor(sample.tokens[sample.num_prompt:])[:, None])[:, 0]
        ratio = (chosen - torch.tensor(sample.old_logprobs, dtype=torch.float64)).exp()
        surrogate = torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage)
        entropy = -(logps.exp() * logps).sum(-1)
        reference = chosen.detach()  # the reference is the start itself
        kl = (reference - chosen).exp() - 1 - (reference - chosen)
        total = total + (-surrogate + 0.1 * kl - 0.05 * entropy).sum() / count
    total.backward()
    return total.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(gradients: dict, wanted: dict) -> None:
    for name, gradient in wanted.items():
        error = (gradients[name] - gradient).abs().max().item()
        assert error <= 1e-5 * gradient.abs().max().item(), f"{name}: {error}"


def split(batch: list[Sample], bins: int) -> list[list[Sample]]:
    return [batch[number::bins] for number in range(bins)]


def test_gradient_is_the_textbooks_for_one_and_four_micro_batches():
    """L1, proof 3: a mean of micro-batch means weighs the tokens of short micro-batches more."""
    batch = samples(11)
    loss, wanted = textbook_gradients(batch)
    for bins in (1, 4):
        sums, gradients = gradients_of(new_learner(toy()), split(batch, bins))
        assert sums["loss"] == pytest.approx(loss, rel=1e-5)
        assert_same(gradients, wanted)


def on_ranks(rank: int, grid: list[int], bins: int, out: str) -> float:
    learner = new_learner(toy(), tuple(grid))
    mine = split(samples(11), learner.ranks * bins)[rank * bins:(rank + 1) * bins]
    sums, gradients = gradients_of(learner, mine)
    if rank == 0:
        save_file({name: gradient.contiguous() for name, gradient in gradients.items()}, out)
    return sums["loss"]


@pytest.mark.parametrize(("grid", "bins"), [((1, 2), 2), *(pytest.param(*case, marks=pytest.mark.long)
                                                           for case in (((1, 4), 1), ((2, 2), 3), ((2, 1), 2)))])
def test_gradient_is_the_textbooks_on_several_ranks(grid, bins, tmp_path):
    """L1, proof 3: 2 x 2 (ranks x micro-batches), 4 shards, HSDP 2 x 2 with empty micro-batches."""
    loss, wanted = textbook_gradients(samples(11))
    losses = spawn_ok(grid[0] * grid[1], "test_learner:on_ranks", list(grid), bins, str(tmp_path / "gradients"))
    assert sum(losses) == pytest.approx(loss, rel=1e-5)
    assert_same(load_file(tmp_path / "gradients"), wanted)


def test_everything_masked_is_a_counted_step_without_gradient():
    """L11: NaN from 0/0, or a step that never returns."""
    learner = new_learner(toy())
    before = {name: shard.clone() for name, shard in learner.shards().items()}
    for batches in ([samples(3, weight=0.0)], [[]]):
        sums = learner.train_step(batches, 0, Ledger(False))
        assert (sums["loss"], sums["grad_norm"], sums["tokens"]) == (0.0, 0.0, 0)
    assert all(torch.equal(before[name], shard) for name, shard in learner.shards().items())


def masked_on_one(rank: int) -> list[float]:
    """Rank 1 has only masked samples, then nothing at all; both ranks must return and move alike."""
    learner, norms = new_learner(toy(), (1, 2)), []
    for idle in ([samples(2, weight=0.0)], [[]]):
        norms.append(learner.train_step([samples(4)] if rank == 0 else idle, 0, Ledger(False))["grad_norm"])
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
    learner = new_learner(toy(model={"dtype": "bfloat16"}, learner={"lr": 1e-6}, algorithm={"kl_coef": 0.0}))
    for value, wanted in ((1.0, 0.99990), (0.02, 0.01990)):
        learner.optimizer.state.clear()
        for parameter in learner.model.parameters():
            torch.nn.init.constant_(parameter, value)
        for _ in range(100):
            for parameter in learner.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            learner.optimizer.step()
        for name, shard in learner.shards().items():
            assert shard.dtype == torch.float32
            torch.testing.assert_close(shard, torch.full_like(shard, wanted), rtol=0, atol=5e-6, msg=name)
    assert {state["exp_avg"].dtype for state in learner.optimizer.state.values()} == {torch.float32}


def stale_reads(rank: int) -> None:
    """R1 on two shards: no-grad forwards before and between must not leave unsharded copies that are read or sent later."""
    config = toy(learner={"lr": 1e-3})
    learner, probe = new_learner(config, (1, 2)), samples(3)

    def logps(model) -> torch.Tensor:
        ids, attend, rows, targets = learner._pack(probe)
        with torch.no_grad():
            return model(ids, attend, rows, targets, Head(1.0, model.vocab, 64))[0]

    before, start = logps(learner.model), {name: shard.clone() for name, shard in learner.shards().items()}
    inner = learner.optimizer.step

    def step_after_a_forward():
        logps(learner.model)
        inner()

    learner.optimizer.step = step_after_a_forward
    learner.train_step([samples(4)], 0, Ledger(False))
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
    shape, config = shape_from_hf(hf), toy(algorithm={"kl_coef": 0.0}, data={"max_prompt_tokens": 8})
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
    learner = new_learner(toy())
    first = learner.train_step([samples(6)], 0, Ledger(False))
    kept = [parameter.full_tensor().clone() for parameter in learner.reference.parameters()]
    second = learner.train_step([samples(6)], 1, Ledger(False))
    assert first["kl"] == 0.0 and second["kl"] > 1e-4
    assert all(torch.equal(a, b.full_tensor()) for a, b in zip(kept, learner.reference.parameters(), strict=True))


def test_activation_checkpointing_changes_no_bit():
    batch = split(samples(7), 2)
    (_, plain), (_, recomputed) = (gradients_of(new_learner(toy(learner={"activation_checkpointing": kind})), batch)
                                   for kind in ("none", "full"))
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


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
    learner = new_learner(toy(learner={"logprob_chunk": 64}), shape=shape, vocab=4096)
    batch = [Sample([index % 4000] * 61, 1, [-8.0] * 60, 1.0, 1 / 600) for index in range(10)]
    with LargestAllocation() as largest:
        learner.train_step([batch], 0, Ledger(False))
    assert largest.numel == 2 * 4096 * 64 + 64  # embedding, head and last norm; a chunk of logits is half of it


def test_a_gradient_that_is_not_finite_touches_nothing():
    """NaN applied, published and proved: the run ends naming the step, and the weights are those of the step before."""
    learner = new_learner(toy())
    before = {name: shard.clone() for name, shard in learner.shards().items()}
    with pytest.raises(FloatingPointError, match="step 7: the gradient's norm is nan"):
        learner.train_step([[dataclasses.replace(samples(1)[0], advantage=float("nan"))]], 7, Ledger(False))
    assert all(torch.equal(before[name], shard) for name, shard in learner.shards().items())


def test_gradients_are_clipped_to_the_global_norm():
    _, plain = gradients_of(new_learner(toy()), [samples(6)])
    sums, clipped = gradients_of(new_learner(toy(learner={"max_grad_norm": 1e-3})), [samples(6)])
    norm = torch.sqrt(sum(gradient.double().square().sum() for gradient in plain.values())).item()
    assert sums["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert torch.sqrt(sum(g.double().square().sum() for g in clipped.values())).item() == pytest.approx(1e-3, rel=1e-3)


def test_learning_rate_warms_up_and_decays_to_its_floor():
    """L15's neighbour: off-by-one at either end. 10 steps up to 1e-6, then down to a tenth in the last of 30."""
    linear = dataclasses.replace(toy().learner, lr=1e-6, warmup_steps=10, schedule="linear", min_lr_ratio=0.1)
    assert [learning_rate(step, linear, 30) for step in (0, 4, 9)] == pytest.approx([1e-7, 5e-7, 1e-6])
    assert learning_rate(19, linear, 30) == pytest.approx(5.5e-7) and learning_rate(29, linear, 30) == pytest.approx(1e-7)
    cosine = dataclasses.replace(linear, schedule="cosine")
    assert learning_rate(19, cosine, 30) == pytest.approx(5.5e-7) and learning_rate(14, cosine, 30) > learning_rate(14, linear, 30)
    constant = dataclasses.replace(linear, schedule="constant")
    assert learning_rate(29, constant, 30) == 1e-6


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 5), st.integers(50, 400))
@settings(deadline=None)
def test_micro_batches_hold_every_sequence_once_in_equal_numbers(lengths, ranks, limit):
    """A rank with fewer micro-batches than the others hangs them in a collective until the timeout."""
    plan = plan_micro_batches(lengths, ranks, limit)
    assert len(plan) == ranks and len({len(batches) for batches in plan}) == 1
    assert sorted(index for batches in plan for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in batch) <= limit or len(batch) == 1 for batches in plan for batch in batches)
