"""Seconds and bytes of a run's parts, by formula from a sheet or along curves measured on a machine. No torch.

Engine   a decode step reads all weights once and every running sample's keys and values: for a 70B on 8 H100 with 256 samples of
         3,072 tokens 6.9 ms of products, 11.3 of KV, 4.8 of all-reduces, 3.4 of gaps between kernels = 26.5 ms.
Learner  6 FLOP a parameter and token at some share of peak, unless 8 bytes a parameter and micro-batch on the wire take longer.
Bytes    weights, KV, moments, activations and the rest, by kind, of one GPU on either side.

Samples of unequal length are played through the slots of one engine rather than averaged: a long sample is met more often among
the running ones, and the last ones run alone.
"""

import bisect
import dataclasses
import functools
import heapq
import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence

from config import Config
from hardware import ALLREDUCE_S, ETHERNET, LAYER_S, LINK, MULTIPLY, PREFILL, READ_KV, STEP_S, STREAM, Hardware, along
from shape import Shape

COMMUNICATOR = 16 * 2 * 4 * 2**20  # bytes: 16 channels x send and receive x NCCL_BUFFSIZE
GRAPH = 8 * 2**20  # bytes of a captured decode step: nodes and their parameters
CONTEXT = 0.6e9  # bytes of a CUDA context and libraries' workspaces
KEPT = ("masters", "moments", "reference", "critic", "reward_model")  # of a colocated learner, while its engine generates
USABLE = 0.95  # of the memory; the rest is lost between the allocator's blocks


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """What one step rolls out and trains on."""
    groups: int
    samples: int  # of each group
    prompt: float
    response: float  # mean, after the cut
    sigma: float
    cap: int

    @classmethod
    def of(cls, config: Config) -> "Workload":
        rollout, plan = config.rollout, config.plan
        return cls(rollout.prompts_per_step, rollout.samples_per_prompt, plan.mean_prompt or config.data.max_prompt_tokens,
                   min(plan.mean_response or rollout.max_new_tokens, rollout.max_new_tokens), plan.length_sigma,
                   rollout.max_new_tokens)

    @property
    def count(self) -> int:
        return self.groups * self.samples

    @property
    def generated(self) -> float:
        return self.count * self.response

    @property
    def tokens(self) -> float:
        return self.count * (self.prompt + self.response)

    def micro_batch(self, limit: int, ranks: int) -> tuple[float, float, float]:
        """Of a learner's largest: tokens that are computed (a group's prompt once), that attention sees, and of responses."""
        samples = min(self.count / ranks, max(1, limit // (self.prompt + self.response)))  # a longer one is alone
        responses = samples * self.response
        return responses + math.ceil(samples / self.samples) * self.prompt, samples * (self.prompt + self.response), responses

    @property
    def context(self) -> float:
        """Keys that a decoded token attends to, mean over samples of equal length."""
        return self.prompt + self.response / 2

    def lengths(self) -> tuple[int, ...]:
        """Response lengths of all samples, in a fixed random order."""
        return cut_lognormal(self.count, self.response, self.sigma, self.cap)

    def running_context(self) -> float:
        """The same among the samples running at a moment, where a long one is met more often: prompt + E[l^2] / 2 E[l]."""
        lengths = self.lengths()
        return self.prompt + sum(length**2 for length in lengths) / sum(lengths) / 2


@functools.lru_cache(4)
def cut_lognormal(count: int, mean: float, sigma: float, cap: int) -> tuple[int, ...]:
    """The quantiles of min(cap, median e^(sigma z)) with that mean, shuffled.

    e^(sigma z) ascends, so a running sum has the mean for any median: the search costs nothing, also of 2 million samples.
    """
    spread = [math.exp(sigma * statistics.NormalDist().inv_cdf((number + 0.5) / count)) for number in range(count)]
    sums = [0.0, *itertools.accumulate(spread)]
    low, high = math.log(mean) - 8, math.log(cap) + 8
    for _ in range(50):
        middle = (low + high) / 2
        whole = bisect.bisect(spread, cap / math.exp(middle))  # so many are not cut
        total = math.exp(middle) * sums[whole] + cap * (count - whole)
        low, high = (middle, high) if total < count * mean else (low, middle)
    lengths = [max(1, round(min(cap, math.exp(middle) * each))) for each in spread]
    random.Random(0).shuffle(lengths)
    return tuple(lengths)


# Seconds of one side.

@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of an engine's steps: by formula from a sheet, or along curves where this model was measured."""
    shape: Shape
    hardware: Hardware
    tp: int
    itemsize: int
    fp8: bool = False

    @property
    def weights(self) -> float:
        """Bytes that a decode step reads."""
        head = self.shape.vocab * self.shape.hidden
        return (self.shape.matmul_parameters - head) * (1 if self.fp8 else self.itemsize) + head * self.itemsize

    @property
    def kv(self) -> float:
        """Bytes of a token's keys and values on one lane; lanes beyond the KV heads hold copies."""
        return self.shape.kv_bytes_per_token(self.itemsize) / min(self.tp, self.shape.kv_heads)

    def parts(self, batch: float, context: float) -> dict[str, float]:
        """A decode step of `batch` samples that attend to `context` tokens in all: weights or products, KV, all-reduces, gaps."""
        shape, hardware, tp = self.shape, self.hardware, self.tp
        peak = hardware.fp8_flops if self.fp8 else hardware.flops
        reduce_s = 0.0
        if tp > 1:
            reduce_s = ALLREDUCE_S + batch * 2 * (tp - 1) / tp * shape.hidden * self.itemsize / (hardware.nvlink * LINK)
        return {"weights": max(self.weights / (tp * hardware.bandwidth * STREAM),
                               2 * shape.matmul_parameters * batch / (tp * peak * MULTIPLY)),
                "kv": context * self.kv / (hardware.bandwidth * READ_KV), "allreduce": 2 * shape.layers * reduce_s,
                "gaps": LAYER_S * shape.layers + STEP_S}

    def decode(self, batch: float, context: float) -> float:
        curves = self.hardware.curves
        if "decode" not in curves:
            return sum(self.parts(batch, context).values())
        return along(curves["decode"], batch) + curves["context_s"] * (context - batch * curves["decode_context"])

    def prefill(self, tokens: float, context: float) -> float:
        """`tokens` computed in chunks, each attending to `context` others on average."""
        if "prefill" in self.hardware.curves:
            return along(self.hardware.curves["prefill"], tokens) if tokens else 0.0
        peak = self.hardware.fp8_flops if self.fp8 else self.hardware.flops
        return self.shape.forward_flops(tokens, tokens * context) / (self.tp * peak * PREFILL)


def shared_tokens(prompt: float, block: int) -> float:
    """Of a prompt, what siblings find in the KV table: its full blocks, the last token excluded."""
    return (prompt - 1) // block * block


def prompt_seconds(costs: Costs, work: Workload, groups: float, block: int, chunk: int) -> float:
    """Prefill of `groups` groups: the first sample's prompt whole, then of each sibling what it cannot share."""
    rest = work.prompt - shared_tokens(work.prompt, block)
    together = rest == work.prompt
    waves = [groups * work.prompt * (work.samples if together else 1)]
    if "prefill" not in costs.hardware.curves:
        return costs.prefill(waves[0] + (0 if together else groups * (work.samples - 1) * rest), work.prompt / 2)
    seconds = sum(costs.prefill(min(chunk, wave - start), 0) for wave in waves for start in range(0, math.ceil(wave), chunk))
    siblings = 0 if together else groups * work.samples  # one row each, like a decode step, in which the first ones decode
    return seconds + (costs.decode(siblings, siblings * work.prompt) if siblings else 0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Rolled:
    """One engine's share of a step's samples, played through."""
    seconds: float  # decode
    full_s: float  # the same samples at all slots full all the time
    longest_s: float  # of one sample in full slots
    steps: int
    peak_context: float  # tokens in the cache at most


def roll(costs: Costs, work: Workload, lengths: Sequence[int], slots: int) -> Rolled:
    """Decode `lengths` in `slots`: the next sample enters when one ends; a step costs what its batch and contexts cost.

    The first token of a sample comes out of its prefill. Between two ends the batch is constant, so one term covers those steps.
    """
    waiting, ends, now, context = list(reversed(lengths)), [], 0, 0.0
    seconds = peak = 0.0
    while waiting or ends:
        while waiting and len(ends) < slots:
            length = waiting.pop()
            heapq.heappush(ends, (now + length - 1, length))
            context += work.prompt
        batch, steps = len(ends), ends[0][0] - now
        seconds += steps * costs.decode(batch, context + batch * (steps + 1) / 2)
        context += batch * steps
        peak, now = max(peak, context), now + steps
        while ends and ends[0][0] == now:
            context -= work.prompt + heapq.heappop(ends)[1] - 1
    batch = min(slots, len(lengths))
    mean = work.prompt + sum(length**2 for length in lengths) / sum(lengths) / 2
    full = costs.decode(batch, batch * mean)
    return Rolled(seconds, sum(lengths) / batch * full, max(lengths) * full, now, peak)


@dataclasses.dataclass(frozen=True, slots=True)
class Training:
    """Seconds of one optimizer step on each learner rank."""
    micro_batches: int
    compute_s: float
    traffic_s: float  # of FSDP and HSDP, all micro-batches
    optimizer_s: float

    @property
    def total(self) -> float:
        return max(self.compute_s, self.traffic_s) + self.optimizer_s


def train_seconds(config: Config, shape: Shape, hardware: Hardware, work: Workload, replicas: int, shards: int) -> Training:
    """Compute, and the wire beside it: each micro-batch gathers all weights twice and reduces fp32 gradients once."""
    size, ranks = itemsize(config), replicas * shards
    mine = work.tokens / ranks
    micro_batches = math.ceil(mine / config.learner.max_tokens_per_micro_batch)
    curves = hardware.curves
    if "forward" in curves:
        each = mine / micro_batches
        return Training(micro_batches, micro_batches * (along(curves["forward"], each) + along(curves["backward"], each)), 0.0,
                        curves["optimizer_s"])
    forwards = 3 + bool(config.algorithm.kl_coef) + bool(config.reward_model.path) + 4 * own_critic(config)  # models of its size
    flops = learner_flops(shape, work) * forwards / 3
    node = min(hardware.nvlink, config.plan.gpus_per_node * hardware.nic)  # a ring crosses each node's cards once
    wire = hardware.nvlink if shards <= config.plan.gpus_per_node else node
    N = shape.parameters
    traffic = (2 * size + 4) * N * (shards - 1) / shards / wire + 2 * 4 * N / shards * (replicas - 1) / replicas / hardware.nic
    optimizer = 28 * N / ranks * replicas / hardware.bandwidth  # reads p, g, m, v and writes p, m, v in fp32
    return Training(micro_batches, mine * flops / (hardware.flops * config.plan.learner_mfu), micro_batches * traffic, optimizer)


def own_critic(config: Config) -> bool:
    """Whether there is a critic with weights of its own, taken to be as large as the policy."""
    return config.algorithm.advantage == "gae" and config.critic.trunk == "own"


def learner_flops(shape: Shape, work: Workload) -> float:
    """A trained token, causal half of attention: forward, and twice that backward."""
    return 3 * shape.forward_flops(1, (work.prompt + work.response) / 2)


def itemsize(config: Config) -> int:
    return 2 if config.model.dtype == "bfloat16" else 4


# Bytes of one side, per GPU.

def layer_elements(shape: Shape, fused: bool) -> int:
    """What one layer keeps of a token for backward: two norms (input, output), q, k, v, o, gate, up, their product.

    Without our kernels also o once more, as the product's input.
    """
    kept = 4 * shape.hidden + 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.ffn
    return kept + (0 if fused else shape.heads * shape.head_dim)


def attention_elements(config: Config, shape: Shape) -> float:
    """What attention over whole sequences keeps of a token besides, on a CPU: q, k, v, o of prompts that samples share, in exact
    mode each block's scores, weights and sums."""
    keys = math.ceil(Workload.of(config).context / 16) * 16
    return 2 * (shape.heads + shape.kv_heads) * shape.head_dim + 3 * shape.heads * keys * config.exact


def staging_bytes(config: Config, shape: Shape) -> float:
    """Two buckets in flight, of a small model at most itself twice."""
    return min(2e6 * config.publish.bucket_mb, 2.0 * shape.parameters * itemsize(config))


def layer_parameters(shape: Shape) -> float:
    return (shape.matmul_parameters - shape.vocab * shape.hidden) / shape.layers


def learner_memory(config: Config, shape: Shape, hardware: Hardware, replicas: int, shards: int) -> dict[str, float]:
    """By kind. The peak is in backward: the optimizer's own temporaries come when activations are gone."""
    settings, size, N = config.learner, itemsize(config), shape.parameters
    on_gpu = "process" not in hardware.curves
    tokens = seen = rows = float(max(settings.max_tokens_per_micro_batch, config.max_model_len))
    if not on_gpu:  # where memory is not reserved but taken as needed
        tokens, seen, rows = Workload.of(config).micro_batch(settings.max_tokens_per_micro_batch, replicas * shards)
    root = (1 if shape.tied else 2) * shape.vocab * shape.hidden
    layer = layer_parameters(shape)
    moments = {"fp32": 8.0, "8bit": 2.0 + 8 / 64}[settings.moments] * (not settings.offload_moments)
    full = settings.activation_checkpointing == "full"  # then one hidden state a layer, and one layer whole
    kept = shape.layers * (shape.hidden if full else layer_elements(shape, on_gpu))
    apart = 0.0 if on_gpu or full else shape.layers * attention_elements(config, shape)
    # Gathered: the root and two layers; gradients not yet reduced: the head's and a layer's, the latter also in fp32.
    unsharded = size * (root + 2 * layer) + size * (shape.vocab * shape.hidden + layer) + 4 * layer
    return {"masters": 4 * N / shards, "gradients": 4 * N / shards, "moments": moments * N / shards,
            "reference": 4 * N / shards if config.algorithm.kl_coef else 0.0,
            "critic": (8 + moments) * N / shards if own_critic(config) else 0.0,
            "reward_model": 4 * N / shards if config.reward_model.path else 0.0,
            "unsharded": unsharded,  # FSDP gathers into copies of a single shard, too
            "activations": size * (tokens * (kept + (layer_elements(shape, on_gpu) if full else 0)) + seen * apart),
            "logits": 3.0 * 4 * min(settings.logprob_chunk, rows) * shape.vocab,
            "staging": staging_bytes(config, shape),
            "communicators": COMMUNICATOR * (2 + (replicas > 1)) if on_gpu else 0.0,
            "context": CONTEXT if on_gpu else hardware.curves["process"]}


def actor_memory(config: Config, shape: Shape, hardware: Hardware, tp: int) -> dict[str, float]:
    """By kind. The KV pool takes its share of what is left beside weights and working space."""
    settings, size = config.actor, itemsize(config)
    on_gpu, linear = "process" not in hardware.curves, shape.matmul_parameters
    head = shape.vocab * shape.hidden
    fp8 = settings.quantization == "fp8"
    derived = (linear - head) / tp if fp8 else linear * size / tp if not on_gpu and not config.exact else 0.0
    widest = 3 * shape.hidden + max(3 * shape.ffn, (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    rows, tokens, work = settings.max_num_seqs, settings.max_num_batched_tokens, Workload.of(config)
    if not on_gpu:  # where memory is not reserved but taken as needed
        rows = min(rows, math.ceil(work.count / settings.replicas))
        tokens = max(rows, min(tokens, math.ceil(work.groups * work.prompt / settings.replicas)))
    graphs = 2 + settings.max_num_seqs // 16 if on_gpu and settings.cuda_graphs else 0
    lanes = max(tp, min(config.learner.shards, config.publish.max_roots)) // tp
    found = {"weights": shape.parameters * size / tp, "derived": derived,
             "working": tokens * widest * size + 3 * 4 * rows * shape.vocab,
             "graphs": GRAPH * graphs + (settings.max_num_seqs * widest * size if graphs else 0),
             "staging": staging_bytes(config, shape),
             "communicators": COMMUNICATOR * ((tp > 1) + lanes) if on_gpu else 0.0,
             "context": CONTEXT if on_gpu else hardware.curves["process"]}
    kv = Costs(shape, hardware, tp, size).kv
    free = hardware.memory - sum(found[kind] for kind in ("weights", "derived", "working", "context"))
    useful = settings.max_num_seqs * config.max_model_len * kv
    pool = settings.kv_blocks * settings.block_size * kv or max(0.0, min(free * settings.kv_memory_fraction, useful))
    return {"weights": found.pop("weights"), "kv": pool} | found


def beside_learner(config: Config, shape: Shape, hardware: Hardware) -> Hardware:
    """What a colocated learner leaves to the engine while it generates; split, all of it."""
    if config.placement != "colocated":
        return hardware
    learner = learner_memory(config, shape, hardware, config.learner.replicas, config.learner.shards)
    return dataclasses.replace(hardware, memory=hardware.memory - sum(learner[kind] for kind in KEPT))


def colocated_memory(config: Config, shape: Shape, hardware: Hardware) -> dict[str, float]:
    """By kind, in whichever phase takes more: learning (beside the engine's weights and pool, unless they are released) or
    generating (when gradients and activations have gone). The pool takes its share of what is free beside masters and moments."""
    learning = learner_memory(config, shape, hardware, config.learner.replicas, config.learner.shards)
    beside = beside_learner(config, shape, hardware)
    generating = actor_memory(config, shape, beside, config.actor.tp) | {kind: learning[kind] for kind in KEPT}
    if not config.actor.release_memory:
        learning |= {kind: generating[kind] for kind in ("weights", "derived", "kv", "graphs")}
    return max(learning, generating, key=lambda kinds: sum(kinds.values()))


def slots_of(config: Config, shape: Shape, hardware: Hardware, context: float) -> int:
    """Samples of `context` tokens that an engine decodes at once: its slots, or fewer if their keys and values do not fit."""
    tp = config.actor.tp
    pool = actor_memory(config, shape, beside_learner(config, shape, hardware), tp)["kv"]
    tokens = pool / Costs(shape, hardware, tp, itemsize(config)).kv
    return min(config.actor.max_num_seqs, int(tokens / context))


def fits(memory: dict[str, float], hardware: Hardware) -> bool:
    return sum(memory.values()) <= USABLE * hardware.memory


# Publication.

def networks(config: Config, hardware: Hardware, total: float) -> dict[str, tuple[float, float, int, float]]:
    """Bytes/s of a sender's card and of an all-gather, learners' cards, and seconds in which an engine takes `total` in: NVLink;
    InfiniBand with a card a GPU, where each lane takes its slice; Ethernet with a card a node."""
    per_node, tp = config.plan.gpus_per_node, config.actor.tp
    learners = config.learner.replicas * config.learner.shards
    nodes = -(-learners // per_node)
    return {"nvlink": (hardware.nvlink, hardware.nvlink, learners, total / tp / hardware.nvlink),
            "infiniband": (hardware.nic, min(hardware.nvlink, per_node * hardware.nic), learners, total / tp / hardware.nic),
            "ethernet": (ETHERNET, ETHERNET, nodes, total / ETHERNET)}


def publish_seconds(config: Config, total: float, wire: tuple[float, float, int, float]) -> dict[str, float]:
    """Each way of sending `total` bytes at line rate; none is faster than the engine's own cards.

    gather: whole on one rank, then from there. one_root: all slices over one card. rails: all cards of a node. lanes: ours; with
    more shards than roots, owners hand their parts to the roots first, in which the roots' cards are busy as long again.
    """
    card, gathered, cards, landing = wire
    roots = roots_of(config)
    lanes = total / (card * min(roots, cards))
    return {"gather": total / gathered + max(total / card, landing), "one_root": max(total / card, landing),
            "rails": max(total / (card * min(config.plan.gpus_per_node, cards)), landing),
            "lanes": max(lanes, landing) + lanes * (config.learner.shards > roots)}


def roots_of(config: Config) -> int:
    return max(config.actor.tp, min(config.learner.shards, config.publish.max_roots))


# The split of GPUs into actors and learners.

def lane_counts(shape: Shape, most: int, per_node: int) -> list[int]:
    """Tensor parallelisms that divide a node and the model, as parallel.check_lanes asks."""
    return [tp for tp in range(1, most + 1) if per_node % tp == 0 and shape.heads % tp == 0 and shape.ffn % tp == 0
            and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)]


def placements(shape: Shape, gpus: int, per_node: int) -> Iterator[tuple[int, int, int, int]]:
    """(actor replicas, tp, learner replicas, shards) that use all GPUs; an engine within a node; HSDP shards whole nodes."""
    for tp in lane_counts(shape, min(gpus - 1, per_node), per_node):
        for replicas in range(1, (gpus - 1) // tp + 1):
            learners = gpus - replicas * tp
            for shards in (size for size in range(1, learners + 1) if learners % size == 0):
                if shards == learners or shards % per_node == 0:
                    yield replicas, tp, learners // shards, shards


def colocations(shape: Shape, gpus: int, per_node: int) -> Iterator[tuple[int, int, int, int]]:
    """The same where every GPU is both."""
    for tp in (size for size in lane_counts(shape, min(gpus, per_node), per_node) if gpus % size == 0):
        for shards in (size for size in range(1, gpus + 1) if gpus % size == 0):
            if shards == gpus or shards % per_node == 0:
                yield gpus // tp, tp, gpus // shards, shards


def placed(config: Config, placement: tuple[int, int, int, int], colocated: bool = False) -> Config:
    replicas, tp, copies, shards = placement
    release = colocated and config.actor.release_memory
    return dataclasses.replace(config, placement="colocated" if colocated else "split",
                               actor=dataclasses.replace(config.actor, replicas=replicas, tp=tp, release_memory=release),
                               learner=dataclasses.replace(config.learner, replicas=copies, shards=shards))


def mode_of(config: Config) -> str:
    """How generating and learning overlap: sync, one_step (weights in place) or async (staged beside decode)."""
    return "sync" if config.max_staleness == 0 else "async" if config.publish.mode == "staged" else "one_step"


def mean_field(config: Config, shape: Shape, hardware: Hardware, context: float) -> float:
    """Seconds of a step's rollouts with all slots full of average samples (`context` keys each) until the end."""
    work, tp, replicas = Workload.of(config), config.actor.tp, config.actor.replicas
    costs = Costs(shape, hardware, tp, itemsize(config), config.actor.quantization == "fp8")
    slots = slots_of(config, shape, hardware, context)
    if not slots:
        return float("inf")
    batch = min(slots, work.count / replicas)
    prompts = prompt_seconds(costs, work, work.groups / replicas, config.actor.block_size, config.actor.max_num_batched_tokens)
    return prompts + work.generated / replicas / batch * costs.decode(batch, batch * context)


def step_seconds(mode: str, generate: float, train: float, publish: float, again: float = 0.0) -> float:
    """Of one step. sync: in turn. one_step: side by side, both pause for the publication, running samples prefill `again`.
    async: side by side, staged weights and kept KV."""
    if mode == "sync":
        return generate + train + publish
    return max(generate + again, train) + publish if mode == "one_step" else max(generate, train)


def search(config: Config, shape: Shape, hardware: Hardware, mode: str, scale: float = 1.0) -> tuple[float, tuple[int, ...]] | None:
    """(seconds, placement) of the fastest split step among those that fit, of equals the one with fewest shards; None if none fits.

    `scale` carries what is known of this engine's speed (given, or tail and all) over to other numbers of it.
    """
    work, best = Workload.of(config), None
    context, rolled, trained = work.running_context(), {}, {}
    for replicas, tp, copies, shards in placements(shape, config.world_size, config.plan.gpus_per_node):
        if config.exact and tp > 1:  # which it refuses
            continue
        there = placed(config, (replicas, tp, copies, shards))
        if (replicas, tp) not in rolled:
            ok = fits(actor_memory(there, shape, hardware, tp), hardware) and slots_of(there, shape, hardware, config.max_model_len)
            rolled[replicas, tp] = scale * mean_field(there, shape, hardware, context) if ok else float("inf")
        if (copies, shards) not in trained:
            ok = fits(learner_memory(there, shape, hardware, copies, shards), hardware)
            trained[copies, shards] = train_seconds(there, shape, hardware, work, copies, shards).total if ok else float("inf")
        seconds = step_seconds(mode, rolled[replicas, tp], trained[copies, shards], 0.0)
        if seconds < float("inf") and (best is None or (seconds, shards) < (best[0], best[1][3])):
            best = seconds, (replicas, tp, copies, shards)
    return best


def search_colocated(config: Config, shape: Shape, hardware: Hardware) -> tuple[float, tuple[int, ...]] | None:
    """The same over placements in which all GPUs generate, then all learn."""
    work, best = Workload.of(config), None
    context = work.running_context()
    for placement in colocations(shape, config.world_size, config.plan.gpus_per_node):
        if config.exact and placement[1] > 1:
            continue
        there = placed(config, placement, colocated=True)
        longest = slots_of(there, shape, hardware, config.max_model_len)
        if not (longest and fits(colocated_memory(there, shape, hardware), hardware)):
            continue
        train = train_seconds(there, shape, hardware, work, *placement[2:]).total
        seconds = mean_field(there, shape, hardware, context) + train
        if seconds < float("inf") and (best is None or (seconds, placement[3]) < (best[0], best[1][3])):
            best = seconds, placement
    return best
