"""A prompt computed once for all of its samples: the values and gradients of sequences computed one by one."""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

from learner import Learner, Sample
from ledger import Ledger
from settings import build
from shape import read_shape


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def new_learner(**sections) -> Learner:
    config = build({"model": {"path": "configs/toy", "init": "random"}, "learner": {"max_grad_norm": 1e9}} | sections)
    return Learner(config, read_shape("configs/toy"), 13, DeviceMesh("cpu", [0], mesh_dim_names=("shard",)), torch.device("cpu"))


def groups() -> list[Sample]:
    """Groups of unequal size, one of a single sample, two with the same prompt apart from each other, one that begins another."""
    rng = random.Random(1)
    samples = []
    for prompt, count in (([3, 4, 5], 4), ([7], 1), ([3, 4], 3), ([8, 9, 10, 11, 12, 1], 2), ([3, 4, 5], 2)):
        for _ in range(count):
            response = [rng.randrange(13) for _ in range(rng.randint(1, 9))]
            samples.append(Sample(prompt + response, len(prompt), [-rng.random() * 3 for _ in response], rng.gauss(0, 1), 1 / 12))
    return samples


def test_gradient_is_that_of_sequences_one_by_one():
    """A prompt's gradient comes from the keys and values that all its samples read, and its last row predicts for all."""
    learner, batch = new_learner(), groups()
    hf = json.loads(Path("configs/toy/config.json").read_text()) | {"pad_token_id": None}  # else transformers never trains row 0
    model = LlamaForCausalLM(LlamaConfig(**hf)).double()
    model.load_state_dict({name: parameter.full_tensor().double() for name, parameter in learner.model.named_parameters()})
    loss = 0.0
    for sample in batch:
        logits = model(torch.tensor([sample.tokens])).logits[0, sample.num_prompt - 1:-1, :13]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens[sample.num_prompt:])[:, None])[:, 0]
        ratio = (chosen - torch.tensor(sample.logprobs, dtype=torch.float64)).exp()
        loss = loss - torch.minimum(ratio * sample.advantage, ratio.clamp(0.8, 1.2) * sample.advantage).sum() / 12
    loss.backward()
    ids = learner._pack(batch)[0]
    assert len(ids) == 3 + 1 + 2 + 6 + sum(sample.response for sample in batch)
    learner.credit(batch)
    learner.trained[0][1].step, learner.trained[0][1].zero_grad = lambda lr: None, lambda: None
    sums = learner.train_step([batch], 0, Ledger(False))
    assert sums["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in learner.model.named_parameters():
        wanted = dict(model.named_parameters())[name].grad
        error = (parameter.grad.full_tensor() - wanted).abs().max()
        assert error <= 1e-5 * wanted.abs().max(), f"{name}: {error}"


def test_exact_mode_gives_the_bits_of_sequences_one_by_one():
    learner, batch = new_learner(exact=True), groups()

    def logps(samples: list[Sample]) -> torch.Tensor:
        with torch.no_grad():
            return learner.model(*learner._pack(samples), learner.head)[0]

    assert torch.equal(logps(batch), torch.cat([logps([sample]) for sample in batch]))


def test_model_flops_count_a_prompt_once():
    """Else MFU rises with the number of samples, for work that nobody does."""
    learner, shape = new_learner(), read_shape("configs/toy")
    samples = [Sample([1, 2, 3, 4], 3, [0.0]), Sample([1, 2, 3, 5, 6], 3, [0.0, 0.0])]
    matmul = 2 * (shape.matmul_parameters - shape.vocab * shape.hidden) * 6 + 2 * shape.vocab * shape.hidden * 3
    pairs = (1 + 2 + 3) + 4 + (4 + 5)
    assert learner._flops(shape, samples, head=True) == matmul + 4 * shape.layers * shape.heads * shape.head_dim * pairs
