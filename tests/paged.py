"""A rollout engine without its scheduler: hand-made block tables and continuous batching, for tests of attention over pages.

Written from DESIGN §4 and without actor.py, so that both can be compared with the same reference. Every sequence's blocks are
scattered over the pool, the pool is full of large stale values, and table entries beyond a request's context are wild.
"""

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from kernels.attention import PagedAttention
from model import Transformer
from runner import Attend

Call = Callable[[Tensor, Tensor, Attend, Tensor], Tensor]  # (ids_T, positions_T, attend, rows_R) -> [R, V]


def engine_steps(lengths: list[int], prompts: list[int], chunk: int, batch: int) -> Iterator[dict[int, range]]:
    """{sequence: positions computed} of each step: `batch` sequences at once, prompts in chunks, then token by token."""
    done, waiting, running = [0] * len(lengths), deque(range(len(lengths))), []
    while waiting or running:
        while waiting and len(running) < batch:
            running.insert(0, waiting.popleft())
        step = {}
        for sequence in running:
            start = done[sequence]
            done[sequence] = min(start + chunk, prompts[sequence]) if start < prompts[sequence] else start + 1
            step[sequence] = range(start, done[sequence])
        running = [sequence for sequence in running if done[sequence] < lengths[sequence]]
        yield step


@torch.no_grad()
def run_paged(model: Transformer, sequences: list[Tensor], prompts: list[int], wanted: list[int], *, chunk: int, batch: int,
              block_size: int, exact: bool, call: Call, seed: int = 0) -> list[Tensor]:
    """For each sequence what `call` gives for its positions from `wanted` on, every token going through the paged cache."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-len(ids) // block_size) for ids in sequences]
    tables = torch.randperm(sum(blocks), generator=generator).split(blocks)
    slots = [(table[:, None] * block_size + torch.arange(block_size)).flatten() for table in tables]
    shape = model.shape
    cache = 1e3 * torch.randn(shape.layers, 2, sum(blocks) * block_size, shape.kv_heads, shape.head_dim, generator=generator)
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    for step in engine_steps([len(ids) for ids in sequences], prompts, chunk, batch):
        ids, positions, written, rows, owners, first = [], [], [], [], [], 0
        members = sorted(step.items(), key=lambda item: len(item[1]))
        table = np.full((len(members), max(blocks)), 10**6, np.int32)
        for row, (sequence, here) in enumerate(members):
            ids.append(sequences[sequence][here.start:here.stop])
            positions.append(torch.arange(here.start, here.stop))
            written.append(slots[sequence][here.start:here.stop])
            used = -(-here.stop // block_size)
            table[row, :used] = tables[sequence][:used]
            rows += [first + index for index, position in enumerate(here) if position >= wanted[sequence]]
            owners += [sequence for position in here if position >= wanted[sequence]]
            first += len(here)
        starts = np.cumsum([0, *(len(here) for _, here in members)])
        pages = table, starts, np.array([here.stop for _, here in members])
        attend = Attend(cache, torch.cat(written), PagedAttention(pages, block_size, exact, torch.device("cpu")))
        result = call(torch.cat(ids), torch.cat(positions), attend, torch.tensor(rows, dtype=torch.long))
        for sequence, row in zip(owners, result, strict=True):
            outputs[sequence].append(row)
    return [torch.stack(found) for found in outputs]
