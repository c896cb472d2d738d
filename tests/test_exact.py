"""Exact mode: engine and learner give the same bits (DESIGN §7), on every packing, chunking, batch and block size.

A mismatch of one bit is a failure: at staleness 0 the ratio of learner to engine probability must be exactly 1.
"""

import dataclasses
from itertools import product
from pathlib import Path

import pytest
import torch
from paged import run_paged
from tiny import randomise
from torch import Tensor

from kernels.attention import PackedAttention, block_attention
from kernels.logprob import Head
from model import Transformer
from shape import Shape, read_shape

TEMPERATURE = 0.7
TOY = dataclasses.replace(read_shape(Path(__file__).parents[1] / "configs/toy"), hidden=64, ffn=176, heads=4, kv_heads=4,
                          head_dim=16, vocab=16, layers=2, windows=(0, 0))
SHAPES = {
    "toy": TOY,
    "gqa": dataclasses.replace(TOY, hidden=128, heads=4, kv_heads=2, head_dim=64, vocab=64, tied=True, qkv_bias=True),
    "window": dataclasses.replace(TOY, kv_heads=1, windows=(5, 20), qk_norm=True),  # within a block of 16 keys, and over two
}
SMOLLM2 = dataclasses.replace(TOY, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152, tied=True)


@pytest.fixture(params=[1, 2], ids="{}-threads".format)
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make(shape: Shape, count: int, seed: int) -> tuple[Transformer, list[Tensor], list[int]]:
    """A model, and `count` sequences with the length of each one's prompt; groups of four share a prompt's length."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 41, (-(-count // 4),), generator=generator).repeat_interleave(4)[:count].tolist()
    answers = torch.randint(1, 9, (count,), generator=generator).tolist()
    sequences = [torch.randint(shape.vocab - 3, (sum(lengths),), generator=generator)
                 for lengths in zip(prompts, answers, strict=True)]
    return randomise(Transformer(shape, shape.vocab - 3), seed), sequences, prompts


def learner_logprobs(model: Transformer, sequences: list[Tensor], prompts: list[int], exact: bool,
                     micro_batches: list[list[int]], chunk: int) -> list[Tensor]:
    """The learner's logprobs of each sequence's answer, computed in these packings."""
    found: dict[int, Tensor] = {}
    for members in micro_batches:
        attend = PackedAttention([len(sequences[member]) for member in members], exact, torch.device("cpu"))
        rows, start = [], 0
        for member in members:
            rows.append(torch.arange(start + prompts[member] - 1, start + len(sequences[member]) - 1))
            start += len(sequences[member])
        ids = torch.cat([sequences[member] for member in members])
        chosen, _ = model(ids, attend, torch.cat(rows), ids[torch.cat(rows) + 1],
                          Head(TEMPERATURE, model.vocab, chunk))
        found.update(zip(members, chosen.detach().split([len(each) for each in rows]), strict=True))
    return [found[member] for member in range(len(sequences))]


def engine_logprobs(model: Transformer, sequences: list[Tensor], prompts: list[int], exact: bool, chunk: int, batch: int,
                    block_size: int) -> list[Tensor]:
    """The engine's logprobs of the same tokens, recorded as they are sampled."""
    logps = run_paged(model, [ids[:-1] for ids in sequences], prompts, [prompt - 1 for prompt in prompts], chunk=chunk,
                      batch=batch, block_size=block_size, exact=exact,
                      call=lambda ids, positions, attend, rows: torch.log_softmax(
                          model.next_logits(ids, positions, attend, rows) / TEMPERATURE, -1))
    return [rows.gather(1, ids[prompt:, None])[:, 0] for rows, ids, prompt in zip(logps, sequences, prompts, strict=True)]


def packings(count: int) -> list[list[list[int]]]:
    everything = list(range(count))
    return [[everything], [everything[::-2], everything[-2::-2]], [[member] for member in everything]]


WHOLE = 1000
ENGINES = [(1, 17, 4), (3, 1, 16), (7, 3, 4), (WHOLE, 17, 16), (WHOLE, 1, 4), (3, 17, 4), (1, 3, 16), (7, 17, 16)]


@pytest.mark.parametrize("shape", SHAPES)
def test_engine_and_learner_give_the_same_bits(shape, threads):
    """A row whose bits depend on its batch mates, its chunk, its slot, the packing, or on prefill or decode computing it."""
    assert torch.get_num_threads() == threads
    model, sequences, prompts = make(SHAPES[shape], 17, seed=2)
    expected = torch.cat(learner_logprobs(model, sequences, prompts, True, [list(range(17))], WHOLE))
    assert expected.isfinite().all() and expected.std() > 0.5
    for micro_batches, chunk in product(packings(17), (3, 32, WHOLE)):
        found = learner_logprobs(model, sequences, prompts, True, micro_batches, chunk)
        assert torch.equal(torch.cat(found), expected), f"learner: {len(micro_batches)} micro-batches, logprob chunk {chunk}"
    for chunk, batch, block_size in ENGINES:
        found = engine_logprobs(model, sequences, prompts, True, chunk, batch, block_size)
        assert torch.equal(torch.cat(found), expected), f"engine: chunk {chunk}, batch {batch}, blocks of {block_size}"


def test_without_exact_mode_the_bits_differ():
    """The control: the same comparison sees the last bits that SDPA changes between prefill and decode."""
    model, sequences, prompts = make(TOY, 17, seed=2)
    learner = torch.cat(learner_logprobs(model, sequences, prompts, False, [list(range(17))], WHOLE))
    engine = torch.cat(engine_logprobs(model, sequences, prompts, False, 3, 17, 16))
    assert not torch.equal(engine, learner)
    assert (engine - learner).abs().max() <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [*SHAPES, "smollm2"])
def test_engine_and_learner_give_the_same_bits_in_every_combination(shape, seed, threads):
    """The same for all combinations, other weights and lengths, and the widths of SmolLM2."""
    model, sequences, prompts = make((SHAPES | {"smollm2": SMOLLM2})[shape], 17, seed)
    expected = torch.cat(learner_logprobs(model, sequences, prompts, True, [list(range(17))], WHOLE))
    for micro_batches, chunk in product(packings(17), (3, 30, 32, 64)):
        found = learner_logprobs(model, sequences, prompts, True, micro_batches, chunk)
        assert torch.equal(torch.cat(found), expected), f"learner: {len(micro_batches)} micro-batches, logprob chunk {chunk}"
    for chunk, batch, block_size in product((1, 3, 7, WHOLE), (1, 3, 17), (4, 16)):
        found = engine_logprobs(model, sequences, prompts, True, chunk, batch, block_size)
        assert torch.equal(torch.cat(found), expected), f"engine: chunk {chunk}, batch {batch}, blocks of {block_size}"


def textbook(q_SHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, window: int) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for one sequence, head by head."""
    S, H, D = q_SHD.shape
    distance = torch.arange(S)[:, None] - torch.arange(S)
    hidden = (distance < 0) | (distance >= window) if window else distance < 0
    heads = []
    for head in range(H):
        kv_head = head * k_SKD.shape[1] // H
        scores = (q_SHD[:, head] @ k_SKD[:, kv_head].T / D**0.5).masked_fill(hidden, -torch.inf)
        heads.append(scores.softmax(-1) @ v_SKD[:, kv_head])
    return torch.stack(heads, 1)


@pytest.mark.parametrize("exact", [False, True], ids=["sdpa", "exact"])
@pytest.mark.parametrize("window", [0, 2, 5, 20])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_gradients(kv_heads, window, exact):
    """A block loop whose backward loses the rescaling, the mask, a repeated KV head, or turns a masked block into NaN."""
    generator, lengths = torch.Generator().manual_seed(0), [7, 20, 7, 1, 37]

    def draw(heads: int) -> Tensor:
        return 2 * torch.randn(sum(lengths), heads, 16, generator=generator)

    inputs, weights = [draw(4).requires_grad_(), draw(kv_heads).requires_grad_(), draw(kv_heads).requires_grad_()], draw(4)
    out = PackedAttention(lengths, exact, torch.device("cpu"))(*inputs, 0, window)
    double = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = torch.cat([textbook(*parts, window) for parts in zip(*(tensor.split(lengths) for tensor in double), strict=True)])
    grads = torch.autograd.grad((out * weights).sum(), inputs)
    expected_grads = torch.autograd.grad((expected * weights).sum(), double)
    for actual, right in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (actual - right).abs().max() <= 1e-5 * right.abs().max()


def test_queries_in_the_middle_of_their_context():
    """A chunk whose queries count their positions from 0; keys beyond a query that change its bits."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(48, heads, 16, generator=generator) for heads in (4, 2, 2))
    for window in (0, 5, 20):
        expected = textbook(*(tensor.double() for tensor in (q, k, v)), window)[33:37]
        positions = torch.arange(33, 37)[None]
        out = block_attention(q[None, 33:37], k[None], v[None], positions, window)[0]
        assert (out - expected).abs().max() <= 1e-5
        k[37:], v[37:] = 1e4, -1e4
        assert torch.equal(block_attention(q[None, 33:37], k[None], v[None], positions, window)[0], out)
