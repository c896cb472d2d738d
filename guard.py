"""What stops a step before it spoils the weights, and the batch that did it, kept for a second look.

A gradient that is not finite is always a fault; a norm, an entropy or a gap to the engine beyond its limit is one where `guard`
sets the limit. All learner ranks see the same numbers, so all skip or all stop, before any weight has moved. Each writes its own
samples:

    python learner.py --replay RUN/guard/step-12-rank-0.safetensors

Source for the gap as an alarm: J. Liu et al., When Speed Kills Stability, richardli.xyz/post/rl-collapse-training-inference.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from config import Guard
from packing import Sample

FIELDS = ("logprobs", "old", "ref", "values", "advantages", "returns")  # a number a response token, or absent


def find_fault(guard: Guard, norms: dict[str, float], entropy: float | None, gap: float) -> str:
    """What is wrong with a step, from global numbers; empty if nothing is."""
    for name, norm in norms.items():
        if not norm < float("inf"):  # also NaN
            return f"{name} is {norm}"
        if guard.max_grad_norm and norm > guard.max_grad_norm:
            return f"{name} is {norm:.4g}, above guard.max_grad_norm = {guard.max_grad_norm:g}"
    if guard.min_entropy and entropy is not None and entropy < guard.min_entropy:
        return f"entropy is {entropy:.4g}, below guard.min_entropy = {guard.min_entropy:g}"
    if guard.max_gap and gap > guard.max_gap:
        return f"a logprob is {gap:.4g} from the engine's, above guard.max_gap = {guard.max_gap:g}"
    return ""


def save_batch(path: Path, micro_batches: list[list[Sample]], about: dict) -> None:
    """Write micro-batches of samples, with `about` (JSON), as one safetensors file."""
    samples = [sample for samples in micro_batches for sample in samples]
    flat = {
        "tokens": torch.tensor([token for sample in samples for token in sample.tokens], dtype=torch.int32),
        "sizes": torch.tensor([[len(sample.tokens), sample.num_prompt] for sample in samples], dtype=torch.int32).view(-1, 2),
        "scalars": torch.tensor([[sample.advantage, sample.weight, sample.reward] for sample in samples],
                                dtype=torch.float64).view(-1, 3)}
    for field in FIELDS:
        parts = [getattr(sample, field) for sample in samples]
        if parts and parts[0] is not None and len(parts[0]):
            flat[field] = torch.cat([torch.as_tensor(part, dtype=torch.float32).cpu() for part in parts])
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(flat, path, {"about": json.dumps(about | {"micro_batches": [len(samples) for samples in micro_batches]})})


def load_batch(path: str) -> tuple[list[list[Sample]], dict]:
    """(micro-batches, about): inverse of `save_batch`."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
        flat: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    samples, start, at = [], 0, 0
    for (size, num_prompt), (advantage, weight, reward) in zip(flat["sizes"].tolist(), flat["scalars"].tolist(), strict=True):
        end = at + size - num_prompt
        parts = {field: flat[field][at:end] for field in FIELDS if field in flat}
        logprobs = parts.pop("logprobs", torch.zeros(0)).tolist()
        tokens = flat["tokens"][start:start + size].tolist()
        samples.append(Sample(tokens, num_prompt, logprobs, advantage, weight, reward, **parts))
        start, at = start + size, end
    order = iter(samples)
    return [[next(order) for _ in range(count)] for count in about["micro_batches"]], about
