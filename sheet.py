"""The page that plan.py prints: every quantity written down once, with its formula in numbers and its source. No torch.

The page, --json and --explain are one list (`Sheet`), derived in the order in which a pencil gets there (`derive`). What is taken
as given (`plan.decode_tokens_per_gpu`, `plan.learner_mfu`) is called so. costs.py has the formulas, hardware.py the constants.
"""

import dataclasses
import statistics

import costs
from config import Config
from costs import Costs, Workload, actor_memory, fits, itemsize, learner_memory, networks, publish_seconds, slots_of
from hardware import Hardware, load_hardware
from shape import Shape, read_shape

SOURCES = {
    "flops": "PaLM app. B arxiv.org/abs/2204.02311; causal half: Megatron arxiv.org/abs/2104.04473",
    "kv": "PagedAttention arxiv.org/abs/2309.06180", "roofline": "Pope et al. arxiv.org/abs/2211.05102",
    "decode": "fitted to published points, +-30 %: github.com/ai-dynamo/aiconfigurator",
    "zero": "ZeRO arxiv.org/abs/1910.02054", "activations": "Korthikanti et al. arxiv.org/abs/2205.05198",
    "nccl": "github.com/NVIDIA/nccl-tests doc/PERFORMANCE.md", "fsdp": "FSDP arxiv.org/abs/2304.11277",
    "buffers": "NCCL_BUFFSIZE docs.nvidia.com/deeplearning/nccl", "async": "ROLL Flash arxiv.org/abs/2510.11345", "": ""}


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One quantity: SI value, its unit, how it comes about in numbers, and where the formula is from (a key of SOURCES)."""
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
        self.entries[key] = Entry(value, unit, how, source)
        return value

    def value(self, key: str) -> float | int | bool:
        return self.entries[key].value

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
            source = f"  [{entry.source}]" if entry.source else ""
            lines.append(f"  {key:33} {show(entry.value, entry.unit):>14}  {entry.how}{source}")
        used = dict.fromkeys(entry.source for entry in self.entries.values() if entry.source)
        return "\n".join([*lines, "", *(f"  [{source}] {SOURCES[source]}" for source in used)])


def show(value: float | int | bool, unit: str) -> str:
    """A number to read: `141 GB`, `26.5 ms`, `47.8 %`."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if unit == "%":
        return f"{100 * value:.1f} %"
    if unit == "token/s":
        return f"{value:,.0f} token/s"
    if unit == "":
        return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    steps = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "u"))
    if unit in ("s", "dollars"):
        steps = ((1, ""), *steps[-2:]) if unit == "s" else ((1, ""),)
    scale, prefix = next((step for step in steps if abs(value) >= step[0]), steps[-1] if value else (1, ""))
    return f"{value / scale:,.0f} {prefix}{unit}" if abs(value) >= 1000 * scale else f"{value / scale:.3g} {prefix}{unit}"


def gb(value: float) -> str:
    return show(value, "B")


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
    def modes(self) -> tuple[str, ...]:
        """How generating and learning can go together."""
        return ("sync",) if self.config.placement == "colocated" else ("sync", "async", "one_step")

    @property
    def engine(self) -> Costs:
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
    add, config, shape, work, hardware = sheet.add, case.config, case.shape, case.work, case.hardware
    L, E, F, D, V, size = shape.layers, shape.hidden, shape.ffn, shape.head_dim, shape.vocab, itemsize(config)
    sheet.under("MODEL AND TOKEN")
    N_mat = add("matmul_params", shape.matmul_parameters, "", f"L (E (2 H + 2 K) D + 3 E F) + V E; L {L}, E {E}, F {F}, "
                f"H {shape.heads}, K {shape.kv_heads}, D {D}, V {V}")
    N = add("params", shape.parameters, "", f"+ norms, biases{'' if shape.tied else f', input embedding V E = {V * E:,}'}")
    add("weight_bytes", N * size, "B", f"{size} x params, {config.model.dtype}")
    kv = add("kv_bytes_per_token", shape.kv_bytes_per_token(size), "B", f"2 x {L} x {shape.kv_heads} x {D} x {size}", "kv")
    half = (work.prompt + work.response) / 2
    for kind, times, keys, why in (
            ("prefill", 1, work.prompt / 2, "half a prompt"), ("decode", 1, work.context, "prompt + half a response"),
            ("learner", 3, half, "causal half of a sequence"), ("logprob", 1, half, "of a reference, forward only")):
        add(f"flops_per_token.{kind}", times * shape.forward_flops(1, keys), "FLOP",
            f"{times} x (2 x {N_mat:,} + 4 x {L} x {shape.heads} x {D} x {keys:,.0f} keys), {why}", "flops")
    batch, chunk, micro = config.actor.max_num_seqs, config.actor.max_num_batched_tokens, config.learner.max_tokens_per_micro_batch
    read = gb(case.engine.weights)
    add("bytes_per_token.decode", case.engine.weights / batch + work.context * kv, "B",
        f"weights {read} / {batch} samples + {work.context:,.0f} keys x kv_bytes_per_token", "roofline")
    add("bytes_per_token.prefill", case.engine.weights / chunk + kv, "B", f"weights {read} / chunk of {chunk:,} + KV written")
    add("bytes_per_token.learner", (2 * size + 4) * N / micro, "B",
        f"on the wire: (two gathers of {size} B + a reduction of 4 B) x params / {micro:,} tokens", "fsdp")
    add("intensity.decode", sheet.value("flops_per_token.decode") / sheet.value("bytes_per_token.decode"), "FLOP/B",
        f"of those; attention alone has H / K = {shape.heads // shape.kv_heads} and never leaves the memory bound", "roofline")
    add("batch_where_compute_bound", hardware.flops / hardware.bandwidth * size / 2, "", f"{show(hardware.flops, 'FLOP/s')} / "
        f"{show(hardware.bandwidth, 'B/s')} x {size} B / 2 FLOP", "roofline")
    add("context_where_kv_is_weights", 2 * N_mat / shape.kv_bytes_per_token(2), "",
        "tokens of a batch whose KV takes as long to read as the weights", "roofline")


def add_memory(sheet: Sheet, case: Case) -> None:
    add, config, shape, hardware = sheet.add, case.config, case.shape, case.hardware
    settings, tp = config.learner, config.actor.tp
    shards = f"{settings.shards} shards"
    how = {"weights": (f"params x {itemsize(config)} / TP {tp}", ""), "derived": ("fp8 or packed copies", ""),
           "kv": (f"pool: {config.actor.kv_memory_fraction:g} of what is left, at most all slots at their longest", "kv"),
           "working": ("a chunk's widest layer, fp32 logits x 3", ""), "graphs": ("captured decode steps", ""),
           "staging": (f"2 x {config.publish.bucket_mb:g} MB in flight", ""), "context": ("CUDA, libraries", ""),
           "communicators": ("16 channels x 2 x 4 MiB each", "buffers"), "masters": (f"4 x params / {shards}", "zero"),
           "gradients": (f"4 x params / {shards}", "zero"), "reference": ("fp32, sharded, if kl_coef > 0", ""),
           "critic": ("masters, gradients, moments of its own", ""), "reward_model": ("fp32, sharded", ""),
           "moments": (f"{settings.moments}{', on the host' if settings.offload_moments else ''}, {shards}", "zero"),
           "unsharded": ("embedding, head, two layers gathered; gradients of head and a layer", "fsdp"),
           "activations": (f"checkpointing {settings.activation_checkpointing}, longest micro-batch", "activations"),
           "logits": (f"{settings.logprob_chunk} rows x V x 3 x 4", "")}
    beside = costs.beside_learner(config, shape, hardware)
    sides = {"actor": actor_memory(config, shape, beside, tp),
             "learner": learner_memory(config, shape, hardware, settings.replicas, settings.shards)}
    tokens, longest = sides["actor"]["kv"] / case.engine.kv, config.max_model_len
    if config.placement == "colocated":
        sides = {"colocated": costs.colocated_memory(config, shape, hardware)}
    for side, memory in sides.items():
        phase = f", while it {'learns' if 'gradients' in memory else 'generates'}, which takes more" if side == "colocated" else ""
        sheet.under(f"MEMORY OF EACH {side.upper()} GPU, {gb(hardware.memory)}{phase}")
        for kind, value in memory.items():
            add(f"memory_bytes.{side}.{kind}", value, "B", *how[kind])
        add(f"memory_bytes.{side}.total", sum(memory.values()), "B", "sum")
        enough = side == "learner" or tokens >= longest
        add(f"fits.{side}", fits(memory, hardware) and enough, "", f"sum <= {costs.USABLE:.0%} of memory" + (
            "" if side == "learner" else f", and the pool of {tokens:,.0f} tokens holds a longest sequence of {longest:,}"))
    running = case.work.running_context()
    add("kv_sequences.longest", int(tokens / longest), "", f"in an engine: {tokens:,.0f} tokens / {longest:,}")
    add("kv_sequences.running", int(tokens / running), "", f"/ {running:,.0f} = prompt + E[l^2] / 2 E[l]: a long one runs longer")
    nodes = -(-case.ranks[1] // config.plan.gpus_per_node)
    total = add("checkpoint_bytes", 12 * shape.parameters, "B", "fp32 masters and two moments", "zero")
    add("checkpoint_s", total / (nodes * config.plan.storage_gb_s * 1e9), "s", f"{nodes} nodes x {config.plan.storage_gb_s:g} GB/s")


def add_rollout(sheet: Sheet, case: Case) -> None:
    add, config, shape, work, engine = sheet.add, case.config, case.shape, case.work, case.engine
    actor, gpus, given = config.actor, case.ranks[0], config.plan.decode_tokens_per_gpu
    slots, lengths = max(1, slots_of(config, shape, case.hardware, work.running_context())), work.lengths()
    batch, keys = min(slots, -(-work.count // actor.replicas)), work.context
    sheet.under(f"ROLLOUT of {work.groups} x {work.samples} samples by {actor.replicas} engines of TP {actor.tp}")
    if not case.hardware.curves:
        how = {"weights": f"max({gb(engine.weights)} / (TP x BW x .90), 2 N_mat x {batch} / (TP x FLOP/s x .65))",
               "kv": f"{batch} x {keys:,.0f} keys x KV / (TP x BW x .85)", "gaps": f"20 us x {shape.layers} + 1.8 ms",
               "allreduce": f"2 x {shape.layers} x (11 us + 2 (TP - 1) / TP x bytes / (NVLink x .85))"}
        for part, seconds in engine.parts(batch, batch * keys).items():
            add(f"decode_step_parts_s.{part}", seconds, "s", how[part], "decode")
    add("decode_step_s", engine.decode(batch, batch * keys), "s", f"{batch} samples with {keys:,.0f} keys each", "decode")
    shared = costs.shared_tokens(work.prompt, actor.block_size)
    prefill = costs.prompt_seconds(engine, work, work.groups / actor.replicas, actor.block_size, actor.max_num_batched_tokens)
    add("prefill_s", prefill, "s", f"prompts once; siblings share {shared:.0f} of {work.prompt:.0f} tokens")
    played = [costs.roll(engine, work, lengths[first::actor.replicas], slots) for first in range(actor.replicas)]
    slowest, full = max(played, key=lambda each: each.seconds), statistics.mean(each.full_s for each in played)
    derived = add("generate_derived_s", prefill + slowest.seconds, "s", f"the slowest engine, played through {slots} slots")
    add("tail_loss", max(0.0, 1 - full / slowest.seconds) if slowest.seconds else 0.0, "%",
        f"1 - mean engine with its slots always full; lognormal, sigma {work.sigma:g}, cut at {work.cap:,}")
    add("generate_bound_s", prefill + slowest.full_s + slowest.longest_s, "s", "Q/K mu + L: always full, then the longest", "async")
    add("decode_tokens_per_gpu.derived", work.generated / gpus / derived, "token/s", f"{work.generated:,.0f} tokens, {gpus} GPUs")
    if given:
        add("decode_tokens_per_gpu.given", given, "token/s", "GIVEN: plan.decode_tokens_per_gpu; 0 takes the derived")
    generate = add("generate_s", work.generated / (given * gpus) if given else derived, "s",
                   f"{work.generated:,.0f} tokens / ({given:g} x {gpus} GPUs), as GIVEN" if given else "as derived")
    flops = work.generated * sheet.value("flops_per_token.decode")
    add("generate_flops", flops, "FLOP", "tokens x flops_per_token.decode", "flops")
    add("decode_share_of_peak", flops / (gpus * case.hardware.flops * generate), "%", "what memory-bound means")


def add_training(sheet: Sheet, case: Case) -> None:
    add, config, work, hardware, gpus = sheet.add, case.config, case.work, case.hardware, case.ranks[1]
    settings = config.learner
    training = costs.train_seconds(config, case.shape, hardware, work, settings.replicas, settings.shards)
    sheet.under(f"LEARNER, {work.tokens:,.0f} tokens on {gpus} GPUs ({settings.replicas} x {settings.shards} shards)")
    flops = work.tokens * costs.learner_flops(case.shape, work)
    add("train_flops", flops, "FLOP", "tokens x flops_per_token.learner", "flops")
    add("micro_batches", training.micro_batches, "", f"of {work.tokens / gpus:,.0f} tokens a GPU, at most "
        f"{settings.max_tokens_per_micro_batch:,} each")
    add("train_parts_s.compute", training.compute_s, "s", "along measured curves" if hardware.curves else
        f"train_flops / ({gpus} x {show(hardware.flops, 'FLOP/s')} x MFU {config.plan.learner_mfu:g}, as GIVEN)")
    add("train_parts_s.wire", training.traffic_s, "s", "gathers and reductions of all micro-batches, beside compute", "fsdp")
    add("train_parts_s.optimizer", training.optimizer_s, "s", "measured" if hardware.curves else "28 B a parameter / bandwidth")
    train = add("train_s", training.total, "s", "max(compute, wire) + optimizer")
    add("mfu", flops / (gpus * hardware.flops * train), "%", "causal half of attention", "flops")


def add_publication(sheet: Sheet, case: Case) -> None:
    add, config, shape, hardware, size = sheet.add, case.config, case.shape, case.hardware, itemsize(case.config)
    total, roots = shape.parameters * size, costs.roots_of(config)
    narrow = total - (shape.matmul_parameters - shape.vocab * shape.hidden) * (size - 1)
    here = "nvlink" if config.world_size <= config.plan.gpus_per_node else "infiniband"
    how = {"gather": "all-gather to one rank, then its card", "one_root": "one card", "rails": "all cards of a node",
           "lanes": f"{roots} roots" + (", owners hand over to them first" if config.learner.shards > roots else ", the owners")}
    sheet.under(f"PUBLICATION of {gb(total)} to {config.actor.replicas} engines, at line rate")
    for way, seconds in publish_seconds(config, total, networks(config, hardware, total)[here]).items():
        add(f"publish_s.{way}", seconds, "s", f"{how[way]}; {here}", "nccl")
    add("publish_s.fp8", publish_seconds(config, narrow, networks(config, hardware, narrow)[here])["lanes"], "s",
        f"lanes, if linears went as one byte: {gb(narrow)}", "nccl")
    for name, wire in networks(config, hardware, total).items():
        for way, seconds in publish_seconds(config, total, wire).items():
            add(f"publish_over.{name}.{way}", seconds, "s", f"{wire[2]} cards x {show(wire[0], 'B/s')}; an engine takes it in in "
                f"{show(wire[3], 's')}", "nccl")
    measured = hardware.curves.get("publish_s")
    now = add("publish_now_s", measured or sheet.value("publish_s.lanes"), "s", "measured, with proof" if measured else "lanes")
    exposed = {"sync": (now, "in place, both sides wait"), "one_step": (now, "in place, and actors prefill again"),
               "async": (0.0, "staged behind decode, for one more copy of the weights")}
    for mode in case.modes:
        add(f"publish_exposed_s.{mode}", exposed[mode][0], "s", exposed[mode][1])


def add_modes(sheet: Sheet, case: Case) -> None:
    add, config, work, curves = sheet.add, case.config, case.work, case.hardware.curves
    generate, train, publish = (sheet.value(key) for key in ("generate_s", "train_s", "publish_now_s"))
    running, gpus = work.running_context(), config.world_size
    prefilled = min(max(1, slots_of(config, case.shape, case.hardware, running)), work.count / config.actor.replicas) * running
    sheet.under("A STEP BY MODE")
    again, colocated = case.engine.prefill(prefilled, running / 2), config.placement == "colocated"
    if not colocated:
        add("reprefill_s", again, "s", f"{prefilled:,.0f} tokens that are running at a publication")
    beside = add("beside_s", curves.get("beside_s", 0.0) + curves.get("sample_s", 0.0) * work.count, "s",
                 f"messages, text, report: {'measured' if curves else 'not counted'}")
    how = {"sync": "generate + train + publish + beside", "async": "max(generate, train) + beside",
           "one_step": "max(generate + reprefill, train) + publish + beside"}
    for mode in case.modes:
        seconds = add(f"step_s.{mode}", costs.step_seconds(mode, generate, train, publish, again) + beside, "s", how[mode], "async")
        work_s = {"actors": generate + again * (mode == "one_step"), "learners": train}
        for side, spent in ({"ranks": sum(work_s.values())} if colocated else work_s).items():
            idle = 1 - (spent + sheet.value(f"publish_exposed_s.{mode}")) / seconds
            add(f"idle.{mode}.{side}", max(0.0, idle), "%", "1 - (own work + publication) / step")
    mode = costs.mode_of(config)
    seconds = sheet.value(f"step_s.{mode}")
    add("tokens_per_s_per_gpu", work.generated / seconds / gpus, "token/s", f"response tokens by all {gpus} GPUs, {mode}")
    dollars = add("dollars.step", config.plan.dollars_per_gpu_hour * gpus / 3600 * seconds, "dollars",
                  f"{gpus} GPUs x {config.plan.dollars_per_gpu_hour:g} an hour, {mode}")
    add("dollars.run", dollars * config.steps, "dollars", f"x {config.steps} steps")
    if colocated:
        return
    sheet.under("SPLIT OF THE GPUS")
    field = costs.mean_field(config, case.shape, case.hardware, running)
    searches = gpus > 2 and field < float("inf")
    best = costs.search(config, case.shape, case.hardware, mode, generate / field) if searches else None
    actors, learners = case.ranks
    if best:
        replicas, tp, copies, shards = best[1]
        actors, learners = replicas * tp, copies * shards
        add("placement.step_s", best[0], "s", f"fastest {mode} over TP, engines, HSDP copies x shards that fit, before publication")
        for key, number, why in (("tp", tp, ""), ("engines", replicas, f"{actors} actors"), ("learner_replicas", copies, ""),
                                 ("shards", shards, f"{learners} learners")):
            add(f"placement.{key}", number, "", why)
    missing = ", as configured: NO placement fits" if searches and not best else ""
    add("ratio", actors / learners, "", f"{actors} actors : {learners} learners{missing}")
    T, G, L = train * case.ranks[1], generate * case.ranks[0], work.cap * sheet.value("decode_step_s")
    add("learner_share_closed_form", T / (G + case.ranks[0] * L / (config.max_staleness + 1) + T), "%",
        f"of GPUs: T / (G + K L / (alpha + 1) + T), T {T:,.0f} and G {G:,.0f} GPU s, L {L:,.0f} s", "async")


def case_of(config: Config) -> Case:
    return Case(config, read_shape(config.model.path), load_hardware(config.plan.hardware), Workload.of(config))
