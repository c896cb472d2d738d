"""Samples end to end in one row of tokens, never padded: a padded batch of lognormal lengths (sigma 0.8) is a third padding.

Attention sees every sequence by itself; masks come from lengths, never from token values. A group's prompt stands in the row once:
of 16 samples with 1,024 tokens of prompt and 256 of response that leaves 5,120 of 20,480 rows for everything but attention.
"""

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import PackedAttention
from kernels.packed_attention import packed_attention
from model import Attend


@dataclass(slots=True, eq=False)
class Sample:
    """One sequence to train on. `weight` multiplies each response token's loss; 0 masks the sample.

    The tensors have an entry a response token: `advantages`, and what `score` and `credit` found out, None where not needed.
    """
    tokens: list[int]
    num_prompt: int
    logprobs: list[float]  # of the response tokens, as the engine recorded them
    advantage: float = 0.0  # the sequence's, where the algorithm has one
    weight: float = 0.0
    reward: float = 0.0
    old: Tensor | None = None  # the policy's logprobs before the update
    ref: Tensor | None = None  # the reference's
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    @property
    def response(self) -> int:
        return len(self.tokens) - self.num_prompt


class PackedOnGpu:
    """Attention within each packed sequence by flash-attn or our kernel; what PackedAttention is on a CPU."""

    def __init__(self, lengths: list[int], device: torch.device):
        self.longest = max(lengths)
        self.starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        self.positions = torch.cat([torch.arange(length, device=device) for length in lengths])

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, window: int) -> Tensor:
        return packed_attention(q_THD, k_TKD, v_TKD, self.starts, self.longest, window)


class SharedPrompts:
    """`attend` sees every sequence whole, everything else a prompt once, however many samples follow it.

    `whole` names the row of each token of each sequence. A prompt's rows and bits are the same in all of its samples, and its
    gradient comes together from their keys and values; its attention alone is computed for each.
    """

    def __init__(self, attend: PackedAttention | PackedOnGpu, whole: list[int], device: torch.device):
        place = {row: at for at, row in reversed(list(enumerate(whole)))}  # of each row's first copy
        kept = [place[row] for row in range(len(place))]
        self.attend = attend
        self.whole, self.kept = (torch.tensor(each, device=device) for each in (whole, kept))
        self.positions = attend.positions[self.kept]

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, window: int) -> Tensor:
        o_WHD = self.attend(*(x.index_select(0, self.whole) for x in (q_THD, k_TKD, v_TKD)), layer, window)
        padding = len(q_THD) - len(self.kept)  # rows behind the last sequence
        return F.pad(o_WHD.index_select(0, self.kept), (0, 0, 0, 0, 0, padding))


def pack(samples: list[Sample], exact: bool, device: torch.device, last: bool = False) -> tuple[Tensor, Attend, Tensor, Tensor]:
    """Ids of all sequences end to end (a prompt once), their attention, the rows that predict response tokens, those tokens.

    With `last`, the rows are each sequence's last token instead, where a scorer's number is read.
    """
    starts: dict[tuple[int, ...], int] = {}  # of the prompts
    ids, whole, rows, targets = [], [], [], []  # whole: for each token of each sequence, where it is in ids
    for sample in samples:
        prompt, response = tuple(sample.tokens[:sample.num_prompt]), sample.tokens[sample.num_prompt:]
        if prompt not in starts:
            starts[prompt] = len(ids)
            ids += prompt
        whole += range(starts[prompt], starts[prompt] + len(prompt))
        whole += range(len(ids), len(ids) + len(response))
        ids += response
        rows += whole[-1:] if last else whole[-1 - len(response):-1]
        targets += response
    lengths = [len(sample.tokens) for sample in samples] or [1]  # an empty micro-batch is one token that nothing is read from
    on_gpu = device.type == "cuda"
    attend = PackedOnGpu(lengths, device) if on_gpu else PackedAttention(lengths, exact, device)
    if len(whole) > len(ids):
        attend = SharedPrompts(attend, whole, device)
    ids, rows, targets = (torch.tensor(each, dtype=torch.long, device=device) for each in (ids or [0], rows, targets))
    return ids, attend, rows, targets
