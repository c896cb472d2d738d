"""The learner: FSDP2 over packed sequences, one optimizer step at a time.

Memory of AdamW on fp32 masters with fp32 gradients is 16 bytes a parameter, sharded: 1,129 GB for a 70B, 28 GB a rank on 40 ranks,
plus two unsharded bf16 layers while they compute. Traffic is 3 x parameters a micro-batch: gather forward, gather backward,
reduce-scatter.

What is deliberate here:
- `reshard_after_forward=True` on the root too. FSDP2's default leaves embedding and head unsharded after a forward: an optimizer
  step then updates shards that the next forward does not read, and a publication would send old values.
- The loss is local_sum x world / global_count with weights that rank 0 computed from the whole step, so a step has the same
  gradient for every split into ranks and micro-batches. Every rank runs the same number of micro-batches; an empty one still
  takes part in the collectives.
- Sequences are packed end to end, never padded; masks come from lengths, never from token values.
"""

import heapq
import itertools
import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import losses
from checkpoint import WeightFolder, check_names
from config import Config
from kernels.attention import PackedAttention
from kernels.logprob import Head
from kernels.packed_attention import packed_attention
from ledger import Ledger
from model import Transformer, init_tensor
from optimizer import build_optimizer, learning_rate
from shape import Shape
from transfer import shard_rows


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to train on. `weight` multiplies each response token's loss; 0 masks the sample."""
    tokens: list[int]
    num_prompt: int
    old_logprobs: list[float]  # of the response tokens, as the engine recorded them
    advantage: float
    weight: float


class PackedOnGpu:
    """Attention within each packed sequence by flash-attn or our kernel; what PackedAttention is on a CPU."""

    def __init__(self, lengths: list[int], device: torch.device):
        self.longest = max(lengths)
        self.starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        self.positions = torch.cat([torch.arange(length, device=device) for length in lengths])

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, window: int) -> Tensor:
        return packed_attention(q_THD, k_TKD, v_TKD, self.starts, self.longest, window)


def plan_micro_batches(lengths: list[int], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """[rank][micro-batch] -> indices of sequences, ascending. Equal counts on all ranks (some may be empty), balanced by tokens.

    Longest first onto the emptiest bin; as few micro-batches as keep each under `max_tokens`, a longer sequence being alone.
    """
    count = max(1, -(-sum(lengths) // (ranks * max_tokens)))
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    while True:
        bins: list[list[int]] = [[] for _ in range(ranks * count)]
        filled = [(0, number) for number in range(ranks * count)]
        for index in order:
            tokens, number = heapq.heappop(filled)
            bins[number].append(index)
            heapq.heappush(filled, (tokens + lengths[index], number))
        if all(tokens <= max_tokens or len(bins[number]) == 1 for tokens, number in filled):
            return [[sorted(bins[rank + ranks * batch]) for batch in range(count)] for rank in range(ranks)]
        count += max(1, count // 32)


def build_model(config: Config, shape: Shape, vocab: int, mesh: DeviceMesh, device: torch.device) -> Transformer:
    """A sharded model in fp32 masters: built on meta, each rank reads or draws only its own rows. Raises ConfigError."""
    with torch.device("meta"):
        model = Transformer(shape, vocab)
    bf16 = config.model.dtype == "bfloat16"
    # Inputs stay as they are: casting them would round the fp32 RoPE tables.
    policy = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        layer.recompute = config.learner.activation_checkpointing == "full"
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    model.to_empty(device=device)
    model.tie()
    parameters = dict(model.named_parameters())
    folder = WeightFolder(config.model.path) if config.model.init == "load" else None
    if folder:
        check_names(folder, {name: tuple(parameter.shape) for name, parameter in parameters.items()}, shape.tied)
    shard, shards = mesh.get_local_rank("shard"), mesh.size(mesh.mesh_dim_names.index("shard"))
    for name, parameter in parameters.items():
        first, last = shard_rows(parameter.shape[0], shards, shard)
        local = parameter.to_local()
        assert local.shape[0] == last - first, f"{name}: FSDP2 cut it at other rows than the transfer plan assumes"
        rows = folder.rows(name, first, last) if folder else init_tensor(name, parameter.shape, shape, config.seed)[first:last]
        with torch.no_grad():
            local.copy_(rows)
    if folder:
        folder.close()
    return model


class Learner:
    """Policy, optional frozen reference, and optimizer of one rank."""

    def __init__(self, config: Config, shape: Shape, vocab: int, mesh: DeviceMesh, device: torch.device):
        self.config, self.shape, self.device = config, shape, device
        self.ranks = mesh.size()
        self.model = build_model(config, shape, vocab, mesh, device)
        self.reference = None
        if config.algorithm.kl_coef:
            self.reference = build_model(config, shape, vocab, mesh, device).requires_grad_(False)
        self.optimizer = build_optimizer(self.model.named_parameters(), config.learner)
        self.policy_loss = getattr(losses, config.algorithm.name)

    def shards(self) -> dict[str, Tensor]:
        """This rank's rows of every fp32 master parameter, as plain tensors: what is published and saved."""
        return {name: parameter.to_local().detach() for name, parameter in self.model.named_parameters()}

    def full_tensors(self):
        """(name, whole parameter in the compute type), one at a time; every learner rank must walk it."""
        dtype = getattr(torch, self.config.model.dtype)
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().full_tensor().to(dtype)

    def train_step(self, micro_batches: list[list[Sample]], step: int, ledger: Ledger) -> dict:
        """Forward, backward and one optimizer step. All learner ranks call it with equally many micro-batches.

        Returns this rank's sums over trained response tokens (`loss tokens entropy kl clipped gap`), `gap_max`, model `flops`, the
        global `grad_norm`, `lr`, and `sample_gaps`: the largest |logprob - engine's| of each sample, in order.
        """
        sums = dict.fromkeys(("loss", "tokens", "entropy", "kl", "clipped", "gap", "gap_max", "flops"), 0.0) | {"sample_gaps": []}
        for samples in micro_batches:
            with ledger.span("forward"):
                loss = self._forward(samples, sums)
            with ledger.span("backward"):
                loss.backward()
        with ledger.span("optimizer"):
            # Every parameter has a gradient (an empty micro-batch gives zeros), so the norm is the same collective everywhere.
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.learner.max_grad_norm, foreach=True)
            norm = float(norm.full_tensor())
            if not math.isfinite(norm):  # the same number on every learner rank, so all stop
                raise FloatingPointError(f"step {step}: the gradient's norm is {norm}; the weights were not touched")
            lr = learning_rate(step, self.config.learner, self.config.steps)
            self.optimizer.step(lr)
            self.optimizer.zero_grad()
            sums |= {"grad_norm": norm, "lr": lr}
        return sums

    def _forward(self, samples: list[Sample], sums: dict) -> Tensor:
        """The micro-batch's loss, already weighted and scaled for FSDP's mean over ranks; adds to `sums`."""
        ids, attend, rows_R, targets_R = self._pack(samples)
        head = Head(self.config.rollout.temperature, self.model.vocab, self.config.learner.logprob_chunk)
        logps_R, entropies_R = self.model(ids, attend, rows_R, targets_R, head)
        ref_logps_R = None
        if self.reference is not None:
            with torch.no_grad():
                ref_logps_R, _ = self.reference(ids, attend, rows_R, targets_R, head)
        counts = [len(sample.old_logprobs) for sample in samples]

        def per_token(values: list[float]) -> Tensor:
            repeated = [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
            return torch.tensor(repeated, device=self.device)

        old_logps_R = torch.tensor([logprob for sample in samples for logprob in sample.old_logprobs], device=self.device)
        weights_R = per_token([sample.weight for sample in samples])
        tokens = losses.Tokens(logps_R, old_logps_R, per_token([sample.advantage for sample in samples]), entropies_R, ref_logps_R)
        loss_R, statistics = self.policy_loss(tokens, self.config.algorithm)
        trained_R = weights_R > 0
        # Masked samples are cut out rather than multiplied by 0: 0 x inf would be NaN.
        loss = torch.where(trained_R, loss_R * weights_R, 0.0).sum()
        gaps_R = (logps_R.detach() - old_logps_R).abs()
        sums["sample_gaps"] += [part.max().item() for part in gaps_R.split(counts)] if counts else []
        for name, value_R in {"entropy": entropies_R.detach(), "gap": gaps_R, **statistics}.items():
            sums[name] += value_R[trained_R].double().sum().item()
        sums["tokens"] += int(trained_R.sum())
        sums["gap_max"] = max(sums["gap_max"], gaps_R[trained_R].max().item() if trained_R.any() else 0.0)
        sums["loss"] += loss.item()
        sums["flops"] += self._flops(samples)
        return loss * self.ranks

    def _pack(self, samples: list[Sample]) -> tuple[Tensor, PackedAttention | PackedOnGpu, Tensor, Tensor]:
        """Ids of all sequences end to end, their attention, the rows that predict response tokens, and those tokens."""
        lengths = [len(sample.tokens) for sample in samples] or [1]  # an empty micro-batch is one token that nothing is read from
        ids = [token for sample in samples for token in sample.tokens] or [0]
        rows, targets, start = [], [], 0
        for sample in samples:
            rows += range(start + sample.num_prompt - 1, start + len(sample.tokens) - 1)
            targets += sample.tokens[sample.num_prompt:]
            start += len(sample.tokens)
        as_tensor = {"dtype": torch.long, "device": self.device}
        on_gpu = self.device.type == "cuda"
        attend = PackedOnGpu(lengths, self.device) if on_gpu else PackedAttention(lengths, self.config.exact, self.device)
        return torch.tensor(ids, **as_tensor), attend, torch.tensor(rows, **as_tensor), torch.tensor(targets, **as_tensor)

    def _flops(self, samples: list[Sample]) -> float:
        """Model FLOPs of the update: 3 forwards (and one of the reference), causal half of attention, head on response rows."""
        lengths = [len(sample.tokens) for sample in samples]
        without_head = sum(sample.num_prompt for sample in samples)
        forward = self.shape.forward_flops(sum(lengths), sum(length * (length + 1) // 2 for length in lengths))
        forward -= 2 * self.shape.vocab * self.shape.hidden * without_head
        return forward * (4 if self.reference is not None else 3)


def measure_matmul_flops(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a square matrix product on this rank right now: the bound that the printed MFU is a per cent of."""
    size = 8192 if device.type == "cuda" else 768
    a = torch.randn(size, size, device=device).to(dtype)
    best = 0.0
    for _ in range(4):
        start = time.perf_counter()
        product = a @ a
        product[0, 0].item()  # waits for the device
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best
