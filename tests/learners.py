"""Learners of the toy's shape on one or several ranks, samples for them, and what a step would apply."""

import json
import random
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from learner import Learner, Sample
from ledger import Ledger
from settings import build
from shape import read_shape

SHAPE = read_shape("configs/toy")
QUIET = Ledger(False)


def toy(**sections):
    """A config of the toy whose clipping does not touch the gradients."""
    values = {"model": {"path": "configs/toy", "init": "random"}, "learner": {"max_grad_norm": 1e9, "lr": 1e-2}}
    for section, entries in sections.items():
        values[section] = values.get(section, {}) | entries if isinstance(entries, dict) else entries
    return build(values)


def samples(number: int, weight: float | None = None) -> list[Sample]:
    """Sequences of unequal length; the token mean's weight unless another is given."""
    rng = random.Random(5)
    drafts = []
    for _ in range(number):
        prompt, response = ([rng.randrange(13) for _ in range(rng.randint(1, longest))] for longest in (6, 9))
        drafts.append((prompt, response, [-rng.random() * 3 for _ in response], rng.gauss(0, 1)))
    share = 1 / sum(len(response) for _, response, _, _ in drafts) if weight is None else weight
    return [Sample(prompt + response, len(prompt), logprobs, advantage, share, reward=2 * advantage + 0.5)
            for prompt, response, logprobs, advantage in drafts]


def mesh_of(ranks: tuple[int, int]) -> DeviceMesh:
    """Replicas x shards, as sync.py makes it."""
    grid = torch.arange(ranks[0] * ranks[1]).view(ranks)
    if ranks[0] == 1:
        return DeviceMesh("cpu", grid[0], mesh_dim_names=("shard",))
    return DeviceMesh("cpu", grid, mesh_dim_names=("replicate", "shard"))


def new_learner(config, ranks: tuple[int, int] = (1, 1), shape=SHAPE, vocab: int = 13) -> Learner:
    return Learner(config, shape, vocab, mesh_of(ranks), torch.device("cpu"))


def optimizer_of(learner: Learner, number: int = 0):
    """The policy's optimizer, or with 1 the critic's."""
    return learner.trained[number][1]


def prepared(learner: Learner, micro_batches: list[list[Sample]]) -> list[list[Sample]]:
    """`micro_batches` with all that a step needs beside them."""
    learner.score(micro_batches, QUIET)
    learner.credit([sample for samples in micro_batches for sample in samples])
    return micro_batches


def one_step(learner: Learner, micro_batches: list[list[Sample]], step: int = 0) -> dict:
    return learner.train_step(prepared(learner, micro_batches), step, QUIET)


def gradients_of(learner: Learner, micro_batches: list[list[Sample]]) -> tuple[dict, dict[str, Tensor]]:
    """What a step would apply, the critic's under `critic.*`: the optimizers are kept from moving anything."""
    for number in range(len(learner.trained)):
        optimizer = optimizer_of(learner, number)
        optimizer.step, optimizer.zero_grad = lambda lr: None, lambda: None
    sums = one_step(learner, micro_batches)
    return sums, {prefix + name: parameter.grad.full_tensor() for prefix, (model, *_) in zip(("", "critic."), learner.trained,
                  strict=False) for name, parameter in model.named_parameters()}


def split(batch: list, bins: int) -> list[list]:
    return [batch[number::bins] for number in range(bins)]


def hf_config(**changes):
    """The toy's transformers config; transformers never trains the row of a padding token, so there is none."""
    from transformers import LlamaConfig
    return LlamaConfig(**json.loads(Path("configs/toy/config.json").read_text()) | {"pad_token_id": None} | changes)


def double(kind, model) -> torch.nn.Module:
    """transformers' model of class `kind` in float64 with the weights of one of a learner's models."""
    theirs = kind(hf_config(num_labels=1)).double()
    theirs.load_state_dict({name: parameter.full_tensor().double() for name, parameter in model.named_parameters()})
    return theirs


def assert_same(gradients: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Tensor by tensor: |difference| <= tolerance x the largest entry."""
    for name, gradient in wanted.items():
        error = (gradients[name] - gradient).abs().max().item()
        assert error <= tolerance * gradient.abs().max().item(), f"{name}: {error} of {gradient.abs().max().item()}"
