"""The learner: FSDP2 over packed sequences; policy, critic, reference and reward model side by side on the same ranks.

Memory of AdamW on fp32 masters with fp32 gradients is 16 bytes a parameter, sharded: 1,129 GB for a 70B, 28 GB a rank on 40 ranks,
plus two unsharded bf16 layers while they compute. A critic of its own doubles that; reference and reward model are 4 bytes a
parameter each, and can wait in host memory (`learner.parked`). Traffic is 3 x parameters a micro-batch: gather forward, gather
backward, reduce-scatter.

A step has up to three passes:

    score       without gradients: the reference's logprobs, values, the reward model's scores, the policy's logprobs
    credit      rewards are known: advantages of every token (GAE, whitening)
    train_step  forward, backward and optimizer on each minibatch, `epochs` times

What is deliberate here:
- The loss is local_sum x world / global_count with weights that rank 0 computed from the whole step, so a step has the same
  gradient for every split into ranks and micro-batches. Every rank runs the same number of micro-batches; an empty one still
  takes part in the collectives.
- Whatever does not change during a step is computed once, before it: a frozen model never sits beside the activations.
"""

import argparse
import dataclasses
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from config import Config
from data import Encoder
from guard import find_fault, load_batch, save_batch
from kernels.logprob import Head
from ledger import Ledger
from losses import Tokens, gae, kl, objective, value_loss, whitening
from memory import Living, nbytes, peak_bytes
from model import Attend
from optimizer import build_optimizer, learning_rate
from packing import Sample, pack
from resume import load_tensors
from settings import build
from shape import Shape, read_shape
from sharding import build_policy, build_scorer, park

HOST = torch.device("cpu")


class Learner:
    """The models of one rank and their optimizers."""

    def __init__(self, config: Config, shape: Shape, vocab: int, mesh: DeviceMesh, device: torch.device):
        self.config, self.shape, self.mesh, self.device = config, shape, mesh, device
        self.algorithm, self.ranks, place = config.algorithm, mesh.size(), (mesh, device)
        gae_critic = self.algorithm.advantage == "gae" and not config.offline
        self.shared = gae_critic and config.critic.trunk == "shared"
        if self.algorithm.loss == "bradley_terry":
            self.model = build_scorer(config, "", "model.path", place)
        else:
            self.model = build_policy(config, shape, vocab, place, self.shared)
        self.critic = self.reference = self.reward_model = None
        if gae_critic and not self.shared:
            self.critic = build_scorer(config, config.critic.path, "critic.path", place)
        if self.algorithm.kl_coef:
            self.reference = build_policy(config, shape, vocab, place).requires_grad_(False)
        if config.reward_model.path:
            self.reward_model = build_scorer(config, config.reward_model.path, "reward_model.path", place).requires_grad_(False)
        for name in config.learner.parked:
            self._park(name, HOST)
        self.head = Head(config.rollout.temperature, vocab, config.learner.logprob_chunk)
        self.activations = 0  # bytes, measured once
        models = [(self.model, config.learner.lr)] + ([(self.critic, config.critic.lr)] if self.critic else [])
        self.trained = [(model, build_optimizer(model.named_parameters(), config.learner), peak) for model, peak in models]

    def _park(self, name: str, device: torch.device) -> None:
        model = getattr(self, name)
        if model is not None and name in self.config.learner.parked:
            park(model, device)

    # --- before the update

    def score(self, micro_batches: list[list[Sample]], ledger: Ledger) -> list[dict[str, float]]:
        """Fill in `ref`, `values`, `old` of all samples, as far as the algorithm needs them. A collective of all learner ranks.

        Returns for each sample, in order, `kl` (summed over its response, 0 without a reference) and `score` (the reward model's,
        read at the last token by length; absent without one).
        """
        several = self.config.learner.epochs * self.config.learner.minibatches > 1
        found: list[dict[str, float]] = [{} for samples in micro_batches for _ in samples]
        with ledger.span("score"), torch.no_grad():
            if self.reference:
                self._visit("reference", micro_batches, lambda part: self.reference(*part[:4], self.head)[0], "ref")
            if self.critic:
                self._visit("critic", micro_batches, lambda part: self.critic(*part[:3]), "values")
            if self.shared or (several and self.algorithm.old_logprobs == "learner"):
                self._look_ahead(micro_batches)
            samples = [sample for samples in micro_batches for sample in samples]
            if self.reward_model:
                self._park("reward_model", self.device)
                scores = [self.reward_model(*self._pack(part, last=True)[:3]) for part in micro_batches]
                self._park("reward_model", HOST)
                for entry, value in zip(found, torch.cat(scores).tolist(), strict=True):
                    entry["score"] = value
            for entry, sample in zip(found, samples, strict=True):
                entry["kl"] = 0.0 if self.config.offline else self._kl(sample).sum().item()
        return found

    def _visit(self, name: str, micro_batches: list[list[Sample]], compute, field: str) -> None:
        self._park(name, self.device)
        for samples in micro_batches:
            values_R = compute(self._pack(samples))
            for sample, part in zip(samples, values_R.split([sample.response for sample in samples]), strict=True):
                setattr(sample, field, part)
        self._park(name, HOST)

    def _look_ahead(self, micro_batches: list[list[Sample]]) -> None:
        """The policy's own logprobs, and a shared critic's values, before the update."""
        for samples in micro_batches:
            ids, attend, rows, targets = self._pack(samples)
            if self.shared:
                logps_R, _, values_R = self.model.with_values(ids, attend, rows, targets, self.head)
            else:
                logps_R, values_R = self.model(ids, attend, rows, targets, self.head)[0], None
            counts = [sample.response for sample in samples]
            for sample, part in zip(samples, logps_R.split(counts), strict=True):
                sample.old = part
            if self.shared:
                for sample, part in zip(samples, values_R.split(counts), strict=True):
                    sample.values = part

    def _kl(self, sample: Sample) -> Tensor:
        """Per token, of the policy that sampled it to the reference; zeros without a reference."""
        logps_R = torch.tensor(sample.logprobs, device=self.device)
        return torch.zeros_like(logps_R) if sample.ref is None else kl(logps_R, sample.ref, self.algorithm.kl_estimator)

    def credit(self, samples: list[Sample]) -> None:
        """Fill in `advantages` and `returns` from each sample's `reward` or `advantage`. A collective of all learner ranks."""
        algorithm = self.algorithm
        if algorithm.advantage in ("returns", "gae") and samples:
            longest = max(sample.response for sample in samples)
            rewards_NT = torch.zeros(len(samples), longest)
            values_NT, mask_NT = torch.zeros_like(rewards_NT), torch.zeros_like(rewards_NT)
            for row, sample in enumerate(samples):
                end = sample.response
                mask_NT[row, :end] = 1
                if algorithm.kl_in == "reward":
                    rewards_NT[row, :end] = -algorithm.kl_coef * self._kl(sample).cpu()
                rewards_NT[row, end - 1] += sample.reward
                if sample.values is not None:
                    values_NT[row, :end] = sample.values.cpu()
            decay = algorithm.gae_lambda if algorithm.advantage == "gae" else 1.0
            advantages_NT, returns_NT = gae(rewards_NT, values_NT, mask_NT, algorithm.gamma, decay)
            for row, sample in enumerate(samples):
                sample.advantages, sample.returns = advantages_NT[row, :sample.response], returns_NT[row, :sample.response]
        else:
            for sample in samples:
                sample.advantages = torch.full((sample.response,), sample.advantage)
        if algorithm.advantage_whiten:
            counted = torch.cat([sample.advantages for sample in samples if sample.weight > 0] or [torch.zeros(0)]).double()
            sums = torch.tensor([counted.numel(), counted.sum(), counted.square().sum()], dtype=torch.float64)
            shift, scale = whitening(*self.sum_over_ranks(sums).tolist())
            for sample in samples:
                sample.advantages = (sample.advantages - shift) * scale

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum of every learner rank's tensor."""
        values = values.to(self.device)
        for axis in self.mesh.mesh_dim_names:
            dist.all_reduce(values, group=self.mesh.get_group(axis))
        return values

    # --- the update

    def train_step(self, micro_batches: list[list[Sample]], step: int, ledger: Ledger) -> dict:
        """Forward, backward and one update of each trained model. All learner ranks call it with equally many micro-batches.

        Returns this rank's sums over trained response tokens (`loss tokens entropy kl clipped gap ...`), `gap_max`, model `flops`,
        the global `grad_norm`, `lr`, and `sample_gaps`: the largest |logprob - engine's| of each sample, in order.
        """
        sums = Counter(loss=0.0, tokens=0, gap_max=0.0, flops=0.0)
        gaps: list[float] = []
        for number, samples in enumerate(micro_batches):
            last = number == len(micro_batches) - 1
            for model, _, _ in self.trained:
                model.set_requires_all_reduce(last)  # between HSDP's replicas, once a step
                model.set_requires_gradient_sync(last or self.config.learner.reduce == "micro_batch")
            with ledger.span("forward"), Living() if self.activations == 0 else nullcontext() as living:
                loss = self._forward(samples, sums, gaps)
            self.activations = living.bytes() if living else self.activations
            with ledger.span("backward"):
                loss.backward()
            if self.critic:
                with ledger.span("forward"):
                    loss = self._value_loss(self.critic(*self._pack(samples)[:3]), samples, sums)
                    sums["flops"] += 3 * self._flops(self.critic.shape, samples, head=False)
                with ledger.span("backward"):
                    loss.backward()
        with ledger.span("optimizer"):
            norms = {name: self._clip(model) for (model, _, _), name in zip(self.trained, ("grad_norm", "critic_grad_norm"),
                                                                            strict=False)}
            fault = self._fault(norms, sums)
            if fault:
                self._report_fault(fault, micro_batches, step)
            for model, optimizer, peak in self.trained:
                if not fault and (model is not self.model or step >= self.config.critic.warmup_steps):
                    optimizer.step(learning_rate(step, self.config.learner, self.config.steps) * peak / self.config.learner.lr)
                optimizer.zero_grad()
        return sums | norms | {"lr": learning_rate(step, self.config.learner, self.config.steps), "sample_gaps": gaps,
                               "skipped": int(bool(fault))}

    def _clip(self, model: nn.Module) -> float:
        """The gradient's global norm before it is scaled down; the same on every learner rank."""
        # Every parameter has a gradient (an empty micro-batch gives zeros), so the norm is the same collective everywhere.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.config.learner.max_grad_norm, foreach=True)
        return float(norm.full_tensor())

    def _fault(self, norms: dict[str, float], sums: Counter) -> str:
        """What `guard` finds wrong with the step, the same on every learner rank."""
        guard, entropy, gap = self.config.guard, None, 0.0
        if (guard.min_entropy or guard.max_gap) and not self.config.offline:
            local = torch.tensor([sums["entropy"], float(sums["tokens"])], dtype=torch.float64)
            total, tokens = self.sum_over_ranks(local).tolist()
            entropy, gap = total / tokens if tokens else None, self._largest(sums["gap_max"])
        return find_fault(guard, norms, entropy, gap)

    def _largest(self, value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        for axis in self.mesh.mesh_dim_names:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.mesh.get_group(axis))
        return tensor.item()

    def _report_fault(self, fault: str, micro_batches: list[list[Sample]], step: int) -> None:
        """Keep the batch; raises FloatingPointError where the run is to stop."""
        file = Path(self.config.run_dir, "guard", f"step-{step}-rank-{dist.get_rank()}.safetensors")
        save_batch(file, micro_batches, {"config": dataclasses.asdict(self.config), "step": step, "fault": fault})
        text = f"step {step}: {fault}; the weights were not touched, the batch is in {file}"
        if self.config.guard.action == "stop":
            raise FloatingPointError(text)
        if dist.get_rank() == 0:
            print(f"warning: {text}", flush=True)

    def measure(self, micro_batches: list[list[Sample]]) -> dict:
        """The sums of `train_step` without an update: the loss on held-out pairs."""
        sums: Counter = Counter()
        with torch.no_grad():
            for samples in micro_batches:
                self._forward(samples, sums, [])
        return dict(sums)

    def train(self, minibatches: list[list[list[Sample]]], step: int, ledger: Ledger) -> dict:
        """All of a step's updates. Sums run over them, losses are their means; gaps to the engine are the first update's, before
        the policy moved.
        """
        updates = [self.train_step(batches, step, ledger) for _ in range(self.config.learner.epochs) for batches in minibatches]
        first, sums = updates[0], dict(updates[-1])
        for name in first.keys() - {"grad_norm", "critic_grad_norm", "lr", "sample_gaps", "gap", "gap_max"}:
            sums[name] = sum(update[name] for update in updates) / (len(updates) if name.endswith("loss") else 1)
        tokens = sum(update["tokens"] for update in updates) // self.config.learner.epochs
        return sums | {name: first.get(name, 0.0) for name in ("sample_gaps", "gap", "gap_max")} | {
            "gap_tokens": first["tokens"], "trained": tokens}

    def _forward(self, samples: list[Sample], sums: Counter, gaps: list[float]) -> Tensor:
        """The micro-batch's loss, already weighted and scaled for FSDP's mean over ranks; adds to `sums` and `gaps`."""
        if self.algorithm.loss == "bradley_terry":
            return self._forward_scores(samples, sums)
        packed = self._pack(samples)
        if self.shared:
            logps_R, entropies_R, values_R = self.model.with_values(*packed, self.head)
        else:
            logps_R, entropies_R = self.model(*packed, self.head)
        tokens = self._tokens(samples, logps_R, entropies_R)
        loss_R, statistics = objective(tokens, self.algorithm)
        if not self.config.offline:
            gaps_R = (logps_R.detach() - tokens.rollout_logps_R).abs()
            gaps += [part.max().item() for part in gaps_R.split(tokens.lengths)] if samples else []
            statistics |= {"gap": gaps_R, "entropy": entropies_R.detach()}
        loss = self._weigh(loss_R, samples, sums, statistics)
        if self.shared:
            loss = loss + self.config.critic.loss_coef * self._value_loss(values_R, samples, sums)
        sums["flops"] += 3 * self._flops(self.shape, samples, head=True)
        return loss

    def _forward_scores(self, samples: list[Sample], sums: Counter) -> Tensor:
        """Bradley-Terry's loss of the micro-batch's pairs: each sequence has one score, read at its last token."""
        scores_N = self.model(*self._pack(samples, last=True)[:3])
        nothing_N = torch.zeros_like(scores_N)
        tokens = Tokens(scores_N, nothing_N, nothing_N, nothing_N, [1] * len(samples))
        loss_N, statistics = objective(tokens, self.algorithm)
        sums["flops"] += 3 * self._flops(self.shape, samples, head=False)
        sums["tokens"] += sum(sample.response - 1 for sample in samples)  # of which _weigh counts the one with the score
        return self._weigh(loss_N, samples, sums, statistics, [1] * len(samples))

    def _tokens(self, samples: list[Sample], logps_R: Tensor, entropies_R: Tensor) -> Tokens:
        lengths = [sample.response for sample in samples]

        def joined(field: str) -> Tensor | None:
            parts = [getattr(sample, field) for sample in samples]
            return None if not parts or parts[0] is None else torch.cat(parts).to(self.device)

        rollout_R = torch.tensor([logprob for sample in samples for logprob in sample.logprobs], device=self.device)
        old_R = rollout_R
        if self.algorithm.old_logprobs == "learner":
            old_R = joined("old")
            old_R = logps_R.detach() if old_R is None else old_R
        advantages_R, ref_R = joined("advantages"), joined("ref")
        if not samples:
            advantages_R, ref_R = torch.zeros_like(logps_R), torch.zeros_like(logps_R) if self.reference else None
        return Tokens(logps_R, old_R, advantages_R, entropies_R, lengths, rollout_R, ref_R)

    def _weigh(self, loss_R: Tensor, samples: list[Sample], sums: Counter, statistics: dict[str, Tensor],
               counts: list[int] | None = None) -> Tensor:
        weights_R = self._weights(samples, counts)
        trained_R = weights_R > 0
        # Masked samples are cut out rather than multiplied by 0: 0 x inf would be NaN.
        loss = torch.where(trained_R, loss_R * weights_R, 0.0).sum()
        for name, value_R in statistics.items():
            sums[name] += value_R[trained_R].double().sum().item()
        if "gap" in statistics and trained_R.any():
            sums["gap_max"] = max(sums["gap_max"], statistics["gap"][trained_R].max().item())
        sums["tokens"] += int(trained_R.sum())
        sums["loss"] += loss.item()
        return loss * self.ranks

    def _weights(self, samples: list[Sample], counts: list[int] | None = None) -> Tensor:
        counts = counts or [sample.response for sample in samples]
        weights_N = torch.tensor([sample.weight for sample in samples], device=self.device)
        return weights_N.repeat_interleave(torch.tensor(counts, dtype=torch.long, device=self.device))

    def _value_loss(self, values_R: Tensor, samples: list[Sample], sums: Counter) -> Tensor:
        weights_R = self._weights(samples)
        if samples:
            old_R, returns_R = (torch.cat([getattr(sample, field) for sample in samples]).to(self.device)
                                for field in ("values", "returns"))
        else:
            old_R = returns_R = torch.zeros_like(values_R)
        loss_R = value_loss(values_R, old_R, returns_R, self.config.critic.value_clip)
        sums["value"] += values_R.detach()[weights_R > 0].double().sum().item()
        sums["return"] += returns_R[weights_R > 0].double().sum().item()
        loss = torch.where(weights_R > 0, loss_R * weights_R, 0.0).sum()
        sums["value_loss"] += loss.item()
        return loss * self.ranks

    def _pack(self, samples: list[Sample], last: bool = False) -> tuple[Tensor, Attend, Tensor, Tensor]:
        return pack(samples, self.config.exact, self.device, last)

    def _flops(self, shape: Shape, samples: list[Sample], head: bool) -> float:
        """Model FLOPs of one forward: causal half of attention, a shared prompt once, the head on response rows only."""
        prompts = [len(prompt) for prompt in {tuple(sample.tokens[:sample.num_prompt]) for sample in samples}]
        responses = sum(sample.response for sample in samples)

        def pairs(length: int) -> int:
            return length * (length + 1) // 2

        context = sum(pairs(len(sample.tokens)) - pairs(sample.num_prompt) for sample in samples) + sum(map(pairs, prompts))
        forward = shape.forward_flops(sum(prompts) + responses, context)
        return forward - 2 * shape.vocab * shape.hidden * (sum(prompts) + (0 if head else responses))

    def shards(self) -> dict[str, Tensor]:
        """This rank's rows of every fp32 master that an engine holds: what is published."""
        return {name: parameter.to_local().detach() for name, parameter in self.model.named_parameters() if name != "score.weight"}

    def state(self) -> dict[str, Tensor]:
        """The live masters and moments of every trained model, sharded: what a checkpoint holds, and is read back into."""
        found = {}
        for label, (model, optimizer, _) in zip(("policy", "critic"), self.trained, strict=False):
            found |= {f"{label}.{name}": parameter.detach() for name, parameter in model.named_parameters()}
            found |= {f"{label}.adamw.{name}": tensor for name, tensor in optimizer.state_dict().items()}
        return found

    def restore(self, checkpoint: Path, group: dist.ProcessGroup) -> None:
        """Go on from a checkpoint, whatever the number of ranks that saved it. Raises ConfigError if it does not fit."""
        tensors = self.state()
        load_tensors(checkpoint, tensors, group)
        for label, (_, optimizer, _) in zip(("policy", "critic"), self.trained, strict=False):
            optimizer.load_state_dict({name: tensors[f"{label}.adamw.{name}"] for name in optimizer.state_dict()})

    def full_tensors(self):
        """(name, whole parameter in the compute type) of the policy, one at a time; every learner rank must walk it."""
        dtype = getattr(torch, self.config.model.dtype)
        for name, parameter in self.model.named_parameters():
            if name != "score.weight" or self.algorithm.loss == "bradley_terry":
                yield name, parameter.detach().full_tensor().to(dtype)

    def memory(self) -> dict[str, int]:
        """Bytes of this rank by kind: its shards of every model, gradients and moments; the largest chunk of logits; the
        activations that the first micro-batch left for its backward; and the process's peak.
        """
        kinds = {"parameters": self.model, "critic": self.critic, "reference": self.reference, "reward_model": self.reward_model}
        found = {kind: nbytes(model.parameters()) for kind, model in kinds.items() if model is not None}
        found["gradients"] = sum(nbytes(model.parameters()) for model, _, _ in self.trained)
        found["moments"] = sum(optimizer.bytes() for _, optimizer, _ in self.trained)
        return found | {"logits": self.head.chunk * self.shape.vocab * 4, "activations": self.activations,
                        "peak": peak_bytes(self.device)}


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


def replay(file: str, weights: str) -> None:
    """Forward and backward of a saved batch on one process, and which samples and parameters stand out."""
    micro_batches, about = load_batch(file)
    about["config"]["learner"] |= {"replicas": 1, "shards": 1, "parked": []}
    about["config"]["guard"] = {}
    if weights:
        about["config"]["model"] |= {"path": weights, "init": "load"}
    config = build(about["config"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shape = read_shape(config.model.path)
    vocab = Encoder(config.model.path).vocab
    learner = Learner(config, shape, vocab, DeviceMesh("cpu", [0], mesh_dim_names=("shard",)), HOST)
    sums, gaps = Counter(), []
    for samples in micro_batches:
        learner._forward(samples, sums, gaps).backward()
    print(f"step {about['step']}: {about['fault']}\nloss {sums['loss']:.6g} over {sums['tokens']} tokens, weights of "
          f"{config.model.path}\nsamples by gap to the engine, the largest first:")
    samples = [sample for samples in micro_batches for sample in samples]
    for gap, sample in sorted(zip(gaps, samples, strict=True), key=lambda pair: -pair[0])[:8]:
        print(f"  gap {gap:.3g} advantage {sample.advantage:.3g} reward {sample.reward:.3g} length {len(sample.tokens)} "
              f"ids {sample.tokens[sample.num_prompt:][:12]}")
    norms = {name: parameter.grad.full_tensor().norm().item() for name, parameter in learner.model.named_parameters()}
    print("parameters by gradient norm, what is not finite first:")
    for name, norm in sorted(norms.items(), key=lambda item: (item[1] == item[1] and item[1] != float("inf"), -item[1]))[:8]:
        print(f"  {norm:.4g} {name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Replay a batch that a guard has kept.")
    parser.add_argument("--replay", required=True, metavar="FILE", help="RUN/guard/step-N-rank-R.safetensors")
    parser.add_argument("--weights", default="", metavar="FOLDER", help="weights to replay it on; default: the run's model.path")
    options = parser.parse_args()
    replay(options.replay, options.weights)
