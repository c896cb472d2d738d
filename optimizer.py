"""AdamW on this rank's shards of the fp32 masters, and where its moments live.

    m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2      w <- w - lr (decay w + m/(1 - b1^t) / (sqrt(v/(1 - b2^t)) + eps))

Master and gradient are 4 bytes a parameter each in every form; the moments differ (GB = 10^9 bytes):

                                  bytes a parameter     7B (7.62e9), one GPU   70B (70.55e9), each of 40 ranks
    moments = fp32                8 + 8                 122 GB                 28.2 GB
    moments = 8bit                8 + 2 (1 + 4/64)      77 GB                  17.9 GB
    offload_moments (fp32)        8, and 8 on the host  61 and 61 GB           14.1 and 14.1 GB

Offloading moves 12 bytes a parameter over the link, 91 GB or 2 s a step for the 7B at 50 GB/s; the host reads and writes 28, 395 GB
a step for the 70B's eight ranks. 8 bits cost no time and follow fp32 within 2 % where gradients are noisy (the test says why).

Deliberately different
- Every form steps plain tensors that alias the shards, fetched anew: Module.to and FSDP2's padding give a shard new storage.
- Moments exist from the start: what does not fit fails before the first rollout, and a checkpoint is read into place.
- 8 bits are torchao's AdamW8bit (arXiv 2110.02861) with blocks of 64, not 256: 64 divides the rows of every supported model, so no
  block crosses a shard's edge, and any number of ranks reads a checkpoint exactly. Matrices with other rows stay fp32.
- torchao's CPUOffloadOptimizer knows one GPU, FSDP2's CPUOffloadPolicy moves the masters too. Here moments never cross the link, so
  they are ordinary memory; only two parameters' master and gradient are staged, pinned: 9 GB where a 7B's embedding is one shard.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from config import Learner as Settings

BLOCK = 64  # values that share a scale
LEAST = 4096  # smaller matrices keep fp32 moments, as in bitsandbytes; counted over all shards, so that they agree


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def learning_rate(step: int, settings: Settings, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0): linear warm-up, then the schedule, at its floor in the last step."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    progress = (step + 1 - settings.warmup_steps) / max(1, steps - settings.warmup_steps)
    shape = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr * (settings.min_lr_ratio + (1 - settings.min_lr_ratio) * shape)


def build_optimizer(named_parameters: Iterable[tuple[str, Tensor]], settings: Settings) -> "Optimizer":
    """AdamW as `settings` asks for it; matrices decay, vectors do not."""
    # A rank without rows of a parameter (more ranks than rows) has nothing to update or to save.
    parameters = {name: parameter for name, parameter in named_parameters if _local(parameter).numel()}
    device = torch.device("cpu") if settings.offload_moments else next(iter(parameters.values())).device
    shards = {name: torch.empty(0, device=device) for name in parameters}
    groups = [{"params": [shards[name] for name, parameter in parameters.items() if (parameter.ndim > 1) == decays],
               "weight_decay": settings.weight_decay if decays else 0.0} for decays in (True, False)]
    common = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.adam_eps}
    if eight := settings.moments == "8bit":
        from torchao.optim import AdamW8bit  # slow to import; launch.py has made sure that it is there
        from torchao.optim.subclass_8bit import OptimState8bit
        adamw = AdamW8bit(groups, block_size=BLOCK, **common)
        if device.type == "cpu":  # it would compile for 10 s a shape
            adamw.step = torch.compiler.set_stance("force_eager")(adamw.step)
    else:
        adamw = torch.optim.AdamW(groups, fused=True, **common)
    moments = {}
    for name, parameter in parameters.items():
        quantized = eight and parameter.ndim == 2 and parameter.numel() >= LEAST and parameter.shape[1] % BLOCK == 0
        state = adamw.state[shards[name]]
        state["step"] = torch.zeros((), device="cpu" if eight else device)  # where each library counts
        for moment, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if quantized:
                codes = torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False)
                scale = torch.zeros_like(parameter.detach()[:, ::BLOCK], memory_format=torch.contiguous_format)
                qmap = OptimState8bit.zeros((BLOCK,), signed, BLOCK, device).qmap  # the value of each code
                state[moment] = OptimState8bit(_local(codes), _local(scale).view(-1), qmap, signed, torch.float32)
                moments |= {f"{name}.{moment}.codes": codes, f"{name}.{moment}.scale": scale}
            else:
                moments[f"{name}.{moment}"] = torch.zeros_like(parameter, device=device, requires_grad=False)
                state[moment] = _local(moments[f"{name}.{moment}"])
    largest, on_gpu = max(_local(p).numel() for p in parameters.values()), next(iter(parameters.values())).is_cuda
    slots = [torch.empty(2, largest, pin_memory=on_gpu) for _ in range(2)] if settings.offload_moments else []
    return Optimizer(parameters, shards, adamw, moments, slots, torch.cuda.Stream() if slots and on_gpu else None)


@dataclass
class Optimizer:
    """A torch optimizer over this rank's shards. Stateful for torch.distributed.checkpoint: hand it over as it is."""
    parameters: dict[str, Tensor]
    shards: dict[str, Tensor]  # what `adamw` steps: while a step lasts, a parameter's shard or its place in a slot
    adamw: torch.optim.Optimizer
    moments: dict[str, Tensor]
    slots: list[Tensor]  # host memory that master and gradient pass through; empty where `adamw` steps on the device
    stream: torch.cuda.Stream | None  # of the copies to and from them

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update; every parameter has a gradient."""
        for group in self.adamw.param_groups:
            group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], Tensor) else lr
        if self.slots:
            self._step_on_host()
        else:
            for name, parameter in self.parameters.items():
                self.shards[name].data, self.shards[name].grad = _local(parameter), _local(parameter.grad)
            self.adamw.step()
            self.adamw.zero_grad()

    def _step_on_host(self) -> None:
        """While the host computes a parameter, the next one comes in and the one before goes out, in the order of one stream."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())  # the gradients are there
        coming = None
        for turn, name in enumerate([*self.parameters, None]):
            here, coming = coming, None
            if name:
                shard, gradient = _local(self.parameters[name]), _local(self.parameters[name].grad)
                staged = self.slots[turn % 2][:, :shard.numel()].unflatten(1, shard.shape)  # [master, gradient]
                with torch.cuda.stream(self.stream):
                    staged[0].copy_(shard, non_blocking=True)
                    staged[1].copy_(gradient, non_blocking=True)
                    coming = name, shard, staged, self.stream and self.stream.record_event()
            if here:
                done, shard, staged, arrived = here
                if arrived:
                    arrived.synchronize()
                self.shards[done].data, self.shards[done].grad = staged
                self.adamw.step()  # passes over shards without a gradient
                self.shards[done].grad = None
                with torch.cuda.stream(self.stream):
                    shard.copy_(staged[0], non_blocking=True)
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """The live moments, sharded as their parameters are, and the number of updates."""
        return self.moments | {"updates": next(iter(self.adamw.state.values()))["step"]}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for key, tensor in self.state_dict().items():
            tensor.copy_(state[key])
        for moments in self.adamw.state.values():
            moments["step"].copy_(state["updates"])

    def bytes(self) -> int:
        """Memory of this rank's moments."""
        return sum(_local(moment).nbytes for moment in self.moments.values())
