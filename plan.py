"""The arithmetic of a run before a GPU is rented, and beside what was measured afterwards. No torch (but for --calibrate).

    python plan.py configs/llama3.1-70b-64xh100.yaml [section.key=value ...]      # a page to follow with a pencil
    python plan.py CONFIG --json | --explain KEY | --sweep learner.shards=24,40,56 | --calibrate FILE
    python plan.py --fit                                              # the largest model on 1 and 8 GPUs of 24 to 141 GB

Two numbers rule a 70B. A token costs 2 x 69.5e9 = 139 GFLOP forward and thrice that in training, plus attention; and a decode
step reads 139 GB of weights whatever it decodes, so it pays to decode 295 samples at once on an H100 (FLOP/s by bytes/s), if
their keys and values, 328 kB a token, fit. All else on the page follows from these, the lengths, and the wires.

What is deliberate here: every quantity is written down once, with its formula in numbers and its source; the page, --json and
--explain are that one list. What is taken as given (`plan.decode_tokens_per_gpu`, `plan.learner_mfu`) is called so, and what is
derived for hardware that was not measured is called that. costs.py has the formulas, hardware.py the constants.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator

from config import Config, ConfigError, build, parse
from costs import (USABLE, Costs, Rolled, Workload, actor_memory, fits, itemsize, layer_parameters, learner_flops, learner_memory,
                   prompt_seconds, roll, shared_tokens, slots_of, train_seconds)
from hardware import ETHERNET, Hardware, load_hardware
from shape import Shape, read_shape, shape_from_hf

SOURCES = {
    "flops": "PaLM app. B arxiv.org/abs/2204.02311; causal half: Megatron arxiv.org/abs/2104.04473",
    "kv": "PagedAttention arxiv.org/abs/2309.06180", "roofline": "Pope et al. arxiv.org/abs/2211.05102",
    "decode": "fitted to published points, +-30 %: github.com/ai-dynamo/aiconfigurator",
    "zero": "ZeRO arxiv.org/abs/1910.02054", "activations": "Korthikanti et al. arxiv.org/abs/2205.05198",
    "nccl": "github.com/NVIDIA/nccl-tests doc/PERFORMANCE.md", "fsdp": "FSDP arxiv.org/abs/2304.11277",
    "buffers": "NCCL_BUFFSIZE docs.nvidia.com/deeplearning/nccl", "async": "ROLL Flash arxiv.org/abs/2510.11345",
    "slots": "played through costs.roll", "": ""}
MODES = ("sync", "one_step", "async")


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One quantity: SI value, its unit, how it comes about in numbers, and where the formula is from."""
    value: float | int | bool
    unit: str
    how: str
    source: str


class Sheet:
    """Quantities by dotted key, in the order in which they are derived, under headings."""

    def __init__(self):
        self.entries: dict[str, Entry] = {}
        self.headings: dict[str, str] = {}  # first key under it -> heading
        self._heading = ""

    def under(self, heading: str) -> None:
        self._heading = heading

    def add(self, key: str, value: float | int | bool, unit: str, how: str, source: str = "") -> float | int | bool:
        if self._heading:
            self.headings[key], self._heading = self._heading, ""
        self.entries[key] = Entry(value, unit, how, SOURCES[source])
        return value

    def tree(self) -> dict:
        """Nested plain values: what --json prints."""
        tree: dict = {}
        for key, entry in self.entries.items():
            *parents, leaf = key.split(".")
            at = tree
            for parent in parents:
                at = at.setdefault(parent, {})
            at[leaf] = entry.value
        return tree

    def page(self) -> str:
        lines = []
        for key, entry in self.entries.items():
            if key in self.headings:
                lines += ["", self.headings[key]]
            lines.append(f"  {key:34} {show(entry.value, entry.unit):>13}  {entry.how}")
        return "\n".join(lines)


def show(value: float | int | bool, unit: str) -> str:
    """A number to read: `141 GB`, `26.5 ms`, `47.8 %`."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "":
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    steps = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "u"))
    if unit in ("s", "dollars"):
        steps = ((1, ""), *steps[-2:]) if unit == "s" else ((1, ""),)
    scale, prefix = next((step for step in steps if abs(value) >= step[0]), steps[-1] if value else (1, ""))
    return f"{value / scale:,.0f} {prefix}{unit}" if abs(value) >= 1000 * scale else f"{value / scale:.3g} {prefix}{unit}"


def gb(value: float) -> str:
    return show(value, "B")


# Publication.

def publish_seconds(config: Config, total: float, network: tuple[float, float, int], roots: int) -> dict[str, float]:
    """Each way of sending `total` bytes at line rate; `network` is bytes/s of a card, of an all-gather, and how many cards there are.

    gather: whole on one rank, then from there. one_root: its slices still converge on one card. rails: every card of a node sends
    what it owns. lanes: ours; with more shards than roots, owners hand their parts to the roots first.
    """
    card, gathered, cards = network
    spread = card * min(roots, cards)
    hand_off = config.learner.shards > roots
    return {"gather": total / gathered + total / card, "one_root": total / card,
            "rails": total / (card * min(config.plan.gpus_per_node, cards)), "lanes": total / spread * (1 + hand_off)}


def networks(config: Config, hardware: Hardware) -> dict[str, tuple[float, float, int]]:
    """NVLink inside a node; InfiniBand with a card a GPU; Ethernet with a card a node."""
    per_node = config.plan.gpus_per_node
    nodes = max(1, -(-config.learner.replicas * config.learner.shards // per_node))
    return {"nvlink": (hardware.nvlink, hardware.nvlink, per_node),
            "infiniband": (hardware.nic, min(hardware.nvlink, per_node * hardware.nic), per_node * nodes),
            "ethernet": (ETHERNET, ETHERNET, nodes)}


# The split of GPUs into actors and learners.

def placements(shape: Shape, gpus: int, per_node: int) -> Iterator[tuple[int, int, int, int]]:
    """(actor replicas, tp, learner replicas, shards) that use all GPUs; an engine within a node; HSDP shards whole nodes."""
    for tp in (size for size in range(1, min(gpus - 1, per_node) + 1) if per_node % size == 0):
        if shape.heads % tp or shape.ffn % tp or (shape.kv_heads % tp and tp % shape.kv_heads):
            continue
        for replicas in range(1, (gpus - 1) // tp + 1):
            learners = gpus - replicas * tp
            for shards in (size for size in range(1, learners + 1) if learners % size == 0):
                if shards == learners or shards % per_node == 0:
                    yield replicas, tp, learners // shards, shards


def placed(config: Config, placement: tuple[int, int, int, int]) -> Config:
    replicas, tp, copies, shards = placement
    return dataclasses.replace(config, actor=dataclasses.replace(config.actor, replicas=replicas, tp=tp),
                               learner=dataclasses.replace(config.learner, replicas=copies, shards=shards))


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
    """(seconds, placement) of the fastest step among those that fit, of equals the one with fewest shards; None if none fits.

    `scale` carries what is known of this engine's speed (given, or tail and all) over to other numbers of it.
    """
    work, best = Workload.of(config), None
    context, rolled, trained = work.running_context(), {}, {}
    for replicas, tp, copies, shards in placements(shape, config.world_size, config.plan.gpus_per_node):
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


# The page.

@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What is asked."""
    config: Config
    shape: Shape
    hardware: Hardware
    work: Workload

    @property
    def ranks(self) -> tuple[int, int]:
        """GPUs of the actors, and of the learners."""
        return self.config.actor.replicas * self.config.actor.tp, self.config.learner.replicas * self.config.learner.shards

    @property
    def costs(self) -> Costs:
        fp8 = self.config.actor.quantization == "fp8"
        return Costs(self.shape, self.hardware, self.config.actor.tp, itemsize(self.config), fp8)


def derive(case: Case) -> Sheet:
    """Everything, in the order in which a pencil gets there."""
    sheet = Sheet()
    add_tokens(sheet, case)
    add_memory(sheet, case)
    add_rollout(sheet, case)
    add_training(sheet, case)
    add_publication(sheet, case)
    add_modes(sheet, case)
    return sheet


def predict(config: Config, shape: Shape, hardware: Hardware, work: Workload) -> dict:
    """Nested values in SI units, as --json prints them."""
    return derive(Case(config, shape, hardware, work)).tree()


def add_tokens(sheet: Sheet, case: Case) -> None:
    shape, work, hardware, size = case.shape, case.work, case.hardware, itemsize(case.config)
    L, E, F, D, V = shape.layers, shape.hidden, shape.ffn, shape.head_dim, shape.vocab
    N, N_mat, pair = shape.parameters, shape.matmul_parameters, 4 * L * shape.heads * D
    sheet.under("MODEL AND TOKEN")
    sheet.add("matmul_params", N_mat, "", f"L ({E} (2 H + 2 K) D + 3 E F) + V E; L {L}, E {E}, F {F}, H {shape.heads}, K "
              f"{shape.kv_heads}, D {D}, V {V}")
    sheet.add("params", N, "", f"+ norms, biases{'' if shape.tied else f', the input embedding V E = {V * E:,}'}")
    sheet.add("weight_bytes", N * size, "B", f"{size} x params, {case.config.model.dtype}")
    sheet.add("kv_bytes_per_token", shape.kv_bytes_per_token(size), "B", f"2 x {L} x {shape.kv_heads} x {D} x {size}", "kv")
    length = work.prompt + work.response
    for kind, factor, context, why in (
            ("prefill", 1, work.prompt / 2, "half a prompt"), ("decode", 1, work.context, "prompt + half a response"),
            ("learner", 3, length / 2, "half a sequence: causal"), ("logprob", 1, length / 2, "a reference: forward only")):
        sheet.add(f"flops_per_token.{kind}", factor * shape.forward_flops(1, context), "FLOP",
                  f"{f'{factor} x ' if factor > 1 else ''}(2 x {N_mat:.4g} + {pair:,} x {context:,.0f}); {why}", "flops")
    batch, weights = case.config.actor.max_num_seqs, case.costs.weights
    sheet.add("bytes_per_token.decode", weights / batch + work.context * case.costs.kv * min(case.config.actor.tp, shape.kv_heads), "B",
              f"{gb(weights)} / {batch} samples + {work.context:,.0f} keys x kv_bytes_per_token", "roofline")
    chunk = case.config.actor.max_num_batched_tokens
    sheet.add("bytes_per_token.prefill", weights / chunk + shape.kv_bytes_per_token(size), "B",
              f"{gb(weights)} / chunk of {chunk:,} + the keys and values written")
    sheet.add("bytes_per_token.learner", (2 * size + 4) * N / case.config.learner.max_tokens_per_micro_batch, "B",
              f"on the wire: (2 gathers x {size} + fp32 reduce 4) params / {case.config.learner.max_tokens_per_micro_batch:,} tokens", "fsdp")
    sheet.add("intensity.decode", sheet.entries["flops_per_token.decode"].value / sheet.entries["bytes_per_token.decode"].value,
              "FLOP/B", f"flops / bytes; attention alone does H/K = {shape.heads // shape.kv_heads} and stays memory-bound", "roofline")
    sheet.add("batch_where_compute_bound", hardware.flops / hardware.bandwidth * size / 2, "",
              f"{show(hardware.flops, 'FLOP/s')} / {show(hardware.bandwidth, 'B/s')} x {size} bytes / 2 FLOP: below, weights bound",
              "roofline")
    sheet.add("context_where_kv_is_weights", 2 * N_mat / shape.kv_bytes_per_token(2), "", "tokens in a batch whose KV is read as long "
              "as the weights: 2 x matmul_params / kv bytes in bf16", "roofline")


def add_memory(sheet: Sheet, case: Case) -> None:
    config, shape, hardware, work = case.config, case.shape, case.hardware, case.work
    settings, tp = config.learner, config.actor.tp
    how = {"weights": f"params x {itemsize(config)} / TP {tp}", "kv": f"pool: {config.actor.kv_memory_fraction:g} of what is left, "
           "at most all slots at their longest", "derived": "fp8 or packed copies", "working": "a chunk's widest layer + 3 x fp32 "
           "logits", "graphs": "captured decode steps", "staging": f"2 x {config.publish.bucket_mb:g} MB in flight",
           "communicators": "16 channels x 2 x 4 MiB each", "context": "CUDA context, libraries",
           "masters": f"4 params / {settings.shards} shards", "gradients": f"4 params / {settings.shards} shards",
           "moments": f"{settings.moments}{', on the host' if settings.offload_moments else ''} / {settings.shards} shards",
           "reference": "fp32, sharded" if config.algorithm.kl_coef else "none: kl_coef is 0",
           "unsharded": "embedding, head, 2 layers gathered; gradients of the head and a layer",
           "activations": f"checkpointing {settings.activation_checkpointing}, of the longest micro-batch",
           "logits": f"{settings.logprob_chunk} rows x V x 3 x 4"}
    source = {"masters": "zero", "moments": "zero", "unsharded": "fsdp", "activations": "activations", "kv": "kv",
              "communicators": "buffers"}
    sides = {"actor": actor_memory(config, shape, hardware, tp),
             "learner": learner_memory(config, shape, hardware, settings.replicas, settings.shards)}
    for side, memory in sides.items():
        sheet.under(f"MEMORY OF {side.upper()}, each of {case.ranks[side == 'learner']} GPUs")
        for kind, value in memory.items():
            sheet.add(f"memory_bytes.{side}.{kind}", value, "B", how[kind], source.get(kind, ""))
        sheet.add(f"memory_bytes.{side}.total", sum(memory.values()), "B", f"of {gb(hardware.memory)}")
    longest, tokens = config.max_model_len, sides["actor"]["kv"] / case.costs.kv
    sheet.add("fits.actor", fits(sides["actor"], hardware) and tokens >= longest, "", f"total within {USABLE:.0%}, pool of "
              f"{tokens:,.0f} tokens >= one longest sequence of {longest:,}")
    sheet.add("fits.learner", fits(sides["learner"], hardware), "", f"total within {USABLE:.0%}")
    running = work.running_context()
    sheet.add("kv_sequences.longest", int(tokens / longest), "", f"{tokens:,.0f} tokens / {longest:,}")
    sheet.add("kv_sequences.running", int(tokens / running), "", f"/ {running:,.0f} = prompt + E[l^2] / 2 E[l], of the samples running "
              "at a moment")
    sheet.add("checkpoint_bytes", 12 * shape.parameters, "B", "fp32 masters and two moments", "zero")
    nodes = -(-case.ranks[1] // config.plan.gpus_per_node)
    sheet.add("checkpoint_s", 12 * shape.parameters / (nodes * config.plan.storage_gb_s * 1e9), "s",
              f"{nodes} learner nodes x {config.plan.storage_gb_s:g} GB/s")


def add_rollout(sheet: Sheet, case: Case) -> None:
    config, shape, work, costs = case.config, case.shape, case.work, case.costs
    actor, actors, given = config.actor, case.ranks[0], config.plan.decode_tokens_per_gpu
    running = work.running_context()
    slots = max(1, slots_of(config, shape, case.hardware, running))
    lengths = work.lengths()
    sheet.under(f"ROLLOUT: {work.groups} prompts x {work.samples} samples on {actor.replicas} engines of TP {actor.tp}")
    batch = min(slots, -(-work.count // actor.replicas))
    if "decode" not in case.hardware.curves:
        for part, seconds in costs.parts(batch, batch * work.context).items():
            sheet.add(f"decode_step_parts_s.{part}", seconds, "s", {
                "weights": f"max({gb(costs.weights)} / (TP BW .90), 2 matmul_params x {batch} / (TP FLOP/s .65))",
                "kv": f"{batch} x {work.context:,.0f} x KV / (TP BW .85)", "allreduce": f"2 x {shape.layers} x (11 us + bytes)",
                "gaps": f"20 us x {shape.layers} + 1.8 ms"}[part], "decode")
    sheet.add("decode_step_s", costs.decode(batch, batch * work.context), "s", f"sum: {batch} samples, {work.context:,.0f} keys each",
              "decode")
    prompts = prompt_seconds(costs, work, work.groups / actor.replicas, actor.block_size, actor.max_num_batched_tokens)
    sheet.add("prefill_s", prompts, "s", f"{work.groups} prompts once; siblings share {shared_tokens(work.prompt, actor.block_size):.0f} "
              f"of {work.prompt:.0f} tokens")
    played = max((roll(costs, work, lengths[first::actor.replicas], slots) for first in range(actor.replicas)),
                 key=lambda each: each.seconds)
    sheet.add("generate_derived_s", prompts + played.seconds, "s", f"the slowest engine's samples through {slots} slots", "slots")
    sheet.add("tail_loss", 1 - min(1.0, played.full_s / played.seconds), "%", f"lognormal, sigma {work.sigma:g}, cut at {work.cap:,}: "
              "1 - the same with all slots full to the end", "slots")
    sheet.add("generate_bound_s", prompts + played.full_s + played.longest_s, "s", "Q/K mu + L: full slots, then the longest alone",
              "async")
    sheet.add("decode_tokens_per_gpu.derived", work.generated / actors / (prompts + played.seconds), "token/s",
              "generated tokens / generate_derived_s / GPUs, tail and all")
    if given:
        sheet.add("decode_tokens_per_gpu.given", given, "token/s", "GIVEN: plan.decode_tokens_per_gpu; 0 takes the derived one")
    sheet.add("generate_s", work.generated / (given * actors) if given else prompts + played.seconds, "s",
              f"{work.generated:.4g} tokens / ({given:g} x {actors} GPUs)" if given else "generate_derived_s")
    sheet.add("generate_flops", work.generated * sheet.entries["flops_per_token.decode"].value, "FLOP", "decode, all samples")
    sheet.add("decode_share_of_peak", sheet.entries["generate_flops"].value / (actors * case.hardware.flops
              * sheet.entries["generate_s"].value), "%", "of the actors' FLOP/s: what memory-bound means")


def add_training(sheet: Sheet, case: Case) -> None:
    config, work, hardware, learners = case.config, case.work, case.hardware, case.ranks[1]
    settings = config.learner
    sheet.under(f"LEARNER: {work.tokens:.4g} tokens on {learners} GPUs ({settings.replicas} x {settings.shards} shards)")
    training = train_seconds(config, case.shape, hardware, work, settings.replicas, settings.shards)
    flops = work.tokens * learner_flops(case.shape, work)
    sheet.add("train_flops", flops, "FLOP", "tokens x flops_per_token.learner", "flops")
    sheet.add("micro_batches", training.micro_batches, "", f"{work.tokens / learners:,.0f} tokens a GPU, at most "
              f"{settings.max_tokens_per_micro_batch:,} each")
    sheet.add("train_parts_s.compute", training.compute_s, "s", "curves measured" if hardware.curves else
              f"train_flops / ({learners} x {show(hardware.flops, 'FLOP/s')} x MFU {config.plan.learner_mfu:g}, GIVEN)")
    sheet.add("train_parts_s.wire", training.traffic_s, "s", "gathers and reductions of all micro-batches; beside compute", "fsdp")
    sheet.add("train_parts_s.optimizer", training.optimizer_s, "s", "28 bytes a parameter of the shard / bandwidth")
    sheet.add("train_s", training.total, "s", "max(compute, wire) + optimizer")
    mfu = flops / (learners * hardware.flops * training.total)
    sheet.add("mfu", mfu, "%", "train_flops by that, causal half of attention")


def add_publication(sheet: Sheet, case: Case) -> None:
    config, shape, hardware = case.config, case.shape, case.hardware
    total = shape.parameters * itemsize(config)
    roots = max(config.actor.tp, min(config.learner.shards, config.publish.max_roots))
    wires = networks(config, hardware)
    linear = shape.matmul_parameters - shape.vocab * shape.hidden
    inside = config.world_size <= config.plan.gpus_per_node
    sheet.under(f"PUBLICATION of {gb(total)} to {config.actor.replicas} engines, {roots} roots, at line rate")
    here = "nvlink" if inside else "infiniband"
    how = {"gather": "all-gather to one rank, then one card", "one_root": "slices over one card", "rails": "every card of a node sends",
           "lanes": f"{roots} roots" + (", owners hand over first" if config.learner.shards > roots else ", owners are roots")}
    for way, seconds in publish_seconds(config, total, wires[here], roots).items():
        sheet.add(f"publish_s.{way}", seconds, "s", f"{how[way]}; {here}", "nccl")
    narrow = total - linear * (itemsize(config) - 1)
    sheet.add("publish_s.fp8", publish_seconds(config, narrow, wires[here], roots)["lanes"], "s",
              f"lanes with linears of one byte: {gb(narrow)}", "nccl")
    for name, wire in wires.items():
        for way, seconds in publish_seconds(config, total, wire, roots).items():
            sheet.add(f"publish_over.{name}.{way}", seconds, "s", f"card {show(wire[0], 'B/s')}, {wire[2]} cards", "nccl")
    measured = hardware.curves.get("publish_s")
    sheet.add("publish_now_s", measured or sheet.entries["publish_s.lanes"].value, "s",
              "measured: announce, cast, wire, write, verify" if measured else "lanes, in place: all wait for it. sync: exposed on both "
              "sides. one_step: exposed, and running samples prefill again. async with staged weights: hidden behind decode")


def add_modes(sheet: Sheet, case: Case) -> None:
    config, work = case.config, case.work
    value = {key: entry.value for key, entry in sheet.entries.items()}
    generate, train, publish = value["generate_s"], value["train_s"], value["publish_now_s"]
    actors, learners = case.ranks
    slots = max(1, slots_of(config, case.shape, case.hardware, work.running_context()))
    prefilled = min(slots, work.count / config.actor.replicas) * work.running_context()
    again = case.costs.prefill(prefilled, work.running_context() / 2)
    beside = case.hardware.curves.get("beside_s", 0.0) + case.hardware.curves.get("sample_s", 0.0) * work.count
    sheet.under("A STEP BY MODE")
    sheet.add("reprefill_s", again, "s", f"{prefilled:,.0f} tokens of running samples, after a publication in one_step")
    if beside:
        sheet.add("beside_s", beside, "s", "messages, text, grading, report: measured")
    for mode in MODES:
        seconds = step_seconds(mode, generate, train, publish, again) + beside
        sheet.add(f"step_s.{mode}", seconds, "s", {"sync": "generate + train + publish", "one_step": "max(generate + reprefill, "
                  "train) + publish", "async": "max(generate, train); staged"}[mode], "async" if mode == "async" else "")
        busy = {"actors": generate + again * (mode == "one_step"), "learners": train}
        for side, spent in busy.items():
            idle = 1 - (spent + publish * (mode != "async")) / seconds
            sheet.add(f"idle.{mode}.{side}", max(0.0, idle), "%", "1 - (own work + publication) / step")
    mode = "one_step" if config.max_staleness else "sync"
    seconds = value_of = sheet.entries[f"step_s.{mode}"].value
    sheet.add("tokens_per_s_per_gpu", work.generated / seconds / config.world_size, "token/s", f"response tokens, {mode}, all GPUs")
    price = config.plan.dollars_per_gpu_hour * config.world_size / 3600
    sheet.add("dollars.step", price * seconds, "dollars", f"{config.world_size} GPUs x {config.plan.dollars_per_gpu_hour:g} an hour, {mode}")
    sheet.add("dollars.run", price * seconds * config.steps, "dollars", f"x {config.steps} steps")
    field = mean_field(config, case.shape, case.hardware, work.running_context())
    sheet.under("SPLIT OF THE GPUS")
    best = search(config, case.shape, case.hardware, mode, generate / field) if config.world_size > 2 and field < float("inf") else None
    if best:
        seconds, (replicas, tp, copies, shards) = best
        how = f"fastest {mode} step over TP, engines, HSDP copies x shards that fit: {seconds:,.4g} s before publication"
        for key, number in {"actors": replicas * tp, "learners": copies * shards, "tp": tp, "engines": replicas,
                            "learner_replicas": copies, "shards": shards}.items():
            sheet.add(f"placement.{key}", number, "", how)
        sheet.add("ratio", replicas * tp / (copies * shards), "", f"actors / learners = {replicas * tp} : {copies * shards}")
    else:
        sheet.add("ratio", actors / learners, "", f"as configured, {actors} : {learners}" + ("" if config.world_size == 2 else
                  "; NO placement fits"))
    longest = work.cap * value["decode_step_s"]
    training, rolling = train * learners, generate * actors
    sheet.add("learner_share_closed_form", training / (rolling + actors * longest / (config.max_staleness + 1) + training), "%",
              f"of all GPUs, beta* = T / (G + K L / (alpha + 1) + T); GPU seconds T {training:,.0f}, G {rolling:,.0f}, L {longest:,.0f} s",
              "async")


# Afterwards.

def compare(predicted: dict, rows: list[dict]) -> str:
    """Predicted, measured, error: medians of metrics.jsonl's rows (but the first, which warms up), as a table."""
    rows = rows[1:] or rows

    def median(*keys: str) -> float | None:
        found = [sum(row.get(key, 0.0) for key in keys) for row in rows if any(key in row for key in keys)]
        return statistics.median(found) if found else None

    mode = "one_step" if any(row["staleness_max"] for row in rows) else "sync"
    pairs = [("step", predicted["step_s"][mode], median("step_s"), "s"),
             ("decode and prefill", predicted["generate_s"], median("t_actor_decode", "t_actor_prefill"), "s"),
             ("learner", predicted["train_s"], median("t_learner_forward", "t_learner_backward", "t_learner_optimizer"), "s"),
             ("publication", predicted["publish_now_s"], median("publish_s"), "s"),
             *((f"peak memory, {side}", predicted["memory_bytes"][side]["total"], median(f"peak_bytes_{side}"), "B")
               for side in ("actor", "learner"))]
    lines = [f"{'':24}{'predicted':>12}{'measured':>12}{'error':>9}"]
    lines += [f"{name:24}{show(guess, unit):>12}{show(found, unit):>12}{guess / found - 1:>+9.1%}"
              for name, guess, found, unit in pairs if found]
    return "\n".join(lines)


# The command line.

def sweep(argv: list[str], key: str, values: list[str], out: str) -> str:
    """A table with one line a value, and a PNG of the same."""
    rows = []
    for value in values:
        config = parse([*argv, f"{key}={value}"])
        entries = derive(case_of(config)).entries
        rows.append({name: entries[name] for name in (
            "generate_s", "train_s", "publish_now_s", "step_s.sync", "step_s.one_step", "tokens_per_s_per_gpu", "dollars.step",
            "fits.actor", "fits.learner")})
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(8, 5), constrained_layout=True)
    for name in ("generate_s", "train_s", "step_s.sync", "step_s.one_step"):
        axes.plot(values, [row[name].value for row in rows], "o-", label=name)
    axes.set(xlabel=key, ylabel="seconds a step", ylim=(0, None))
    axes.legend()
    figure.savefig(out, dpi=110)
    lines = [f"{key:>24}" + "".join(f"{name:>22}" for name in rows[0])]
    lines += [f"{value:>24}" + "".join(f"{show(entry.value, entry.unit):>22}" for entry in row.values())
              for value, row in zip(values, rows, strict=True)]
    return "\n".join([*lines, f"plot: {out}"])


def family(hidden: int) -> Shape:
    """A Llama of any width, in the proportions of the 70B: heads of 128, 8 KV heads at most, ffn 3.5 x, a layer each 102 of width."""
    heads = hidden // 128
    return shape_from_hf({"model_type": "llama", "hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "vocab_size": 128256,
                          "num_hidden_layers": max(1, round(hidden / 102.4)), "num_attention_heads": heads,
                          "num_key_value_heads": 8 if heads % 8 == 0 else 4 if heads % 4 == 0 else 1})


def largest(memory: float, gpus: int, colocated: bool, learner: dict) -> float:
    """Parameters of the largest of the family that trains on sequences of 4k tokens with 16 samples at once; 0 if none does."""
    hardware = dataclasses.replace(load_hardware("h100"), memory=memory)
    best = 0
    for hidden in range(512, 16384, 512):
        shape = family(hidden)
        splits = [(gpus, gpus)] if colocated else [(tp, gpus - tp) for tp in (1, 2, 4) if tp < gpus]
        for tp, shards in splits:
            config = build({"model": {"dtype": "bfloat16"}, "data": {"max_prompt_tokens": 1024}, "rollout": {"max_new_tokens": 3072},
                            "actor": {"tp": tp, "max_num_seqs": 16}, "learner": {
                                "shards": shards, "activation_checkpointing": "full", **learner}})
            actor = actor_memory(config, shape, hardware, tp)
            actor["kv"] = 16 * config.max_model_len * Costs(shape, hardware, tp, 2).kv
            trainer = learner_memory(config, shape, hardware, 1, shards)
            if colocated:  # one context; the engine's working space and activations are never there together
                trainer |= {"weights": actor["weights"], "kv": actor["kv"], "graphs": actor["graphs"]}
            if fits(trainer, hardware) and (colocated or fits(actor, hardware)):
                best = max(best, shape.parameters)
    return best


def fit_table() -> str:
    moments = {"fp32": {}, "8bit": {"moments": "8bit"}, "offloaded": {"offload_moments": True}}
    lines = ["largest Llama-like model, 4k tokens, 16 samples at once, full checkpointing (derived, not measured)",
             f"{'':10}" + "".join(f"{f'{place}, {name}':>22}" for place in ("colocated", "split") for name in moments)]
    for gpus in (1, 8):
        for size in (24, 48, 80, 141):
            sizes = [largest(size * 1e9, gpus, colocated, settings) if colocated or gpus > 1 else 0
                     for colocated in (True, False) for settings in moments.values()]
            lines.append(f"{gpus} x {size:>3} GB" + "".join(f"{f'{N / 1e9:.1f} B' if N else '-':>22}" for N in sizes))
    return "\n".join(lines)


def case_of(config: Config) -> Case:
    return Case(config, read_shape(config.model.path), load_hardware(config.plan.hardware), Workload.of(config))


def main(argv: list[str]) -> int:
    """0, or 2 for a config or a key that is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="*", help="a .yaml and section.key=value overrides")
    parser.add_argument("--json", action="store_true", help="all quantities, SI units")
    parser.add_argument("--explain", metavar="KEY", help="formula and source of the quantities that begin with KEY")
    parser.add_argument("--sweep", metavar="KEY=A,B,C", help="a table and a plot over values of one config key")
    parser.add_argument("--plot", default="plan.png", help="file for the sweep's plot")
    parser.add_argument("--fit", action="store_true", help="largest model by memory, GPUs, placement and moments")
    parser.add_argument("--calibrate", metavar="FILE", help="measure this machine on the config's model and write FILE")
    options = parser.parse_intermixed_args(argv)
    try:
        if options.fit:
            print(fit_table())
            return 0
        if options.sweep:
            key, _, values = options.sweep.partition("=")
            print(sweep(options.config, key, values.split(","), options.plot))
            return 0
        case = case_of(parse(options.config))
        if options.calibrate:
            from hardware import calibrate
            print(calibrate(case.config, case.shape, case.work, options.calibrate))
            return 0
        sheet = derive(case)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2
    if options.explain:
        found = {key: entry for key, entry in sheet.entries.items() if key.startswith(options.explain)}
        if not found:
            print(f"no quantity begins with {options.explain}; there are {', '.join(sheet.entries)}", file=sys.stderr)
            return 2
        for key, entry in found.items():
            print(f"{key} = {show(entry.value, entry.unit)} ({entry.value!r})\n    = {entry.how}\n    {entry.source}")
    elif options.json:
        print(json.dumps(sheet.tree() | {"hardware": {"name": case.hardware.name, "origin": case.hardware.origin}}, indent=1))
    else:
        print(f"{case.config.model.path} on {case.config.world_size} x {case.hardware.name}: {case.hardware.origin}")
        print(sheet.page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
