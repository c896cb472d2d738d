"""This machine measured on a config's model: `python plan.py CONFIG --calibrate FILE`, under a minute where nothing else runs.

    bounds      products of the model's widths by rows, a copy, a broadcast between two processes by bytes
    engine      `prefill`: (tokens, seconds) of whole prompts; `decode`: (rows, seconds) at `decode_context` keys each; `context_s`:
                one key more for one row
    learner     `forward`, `backward`: (tokens, seconds) of a micro-batch; `optimizer_s`
    between     `publish_s`: announce to proof; `sample_s`: a sample's way from tokens to text, grade, payload and back; `beside_s`:
                what a step costs besides

Every curve comes from the real class, with sequences of the workload's mean lengths, beside a process that waits as the other side
of a run does. Each point is the lower quartile of its repeats: what else runs on the machine only adds, and no run is as lucky as
the fastest.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from actor import Engine, measure_copy_bandwidth
from channel import Channel, open_channel
from config import Config, ConfigError
from costs import placed
from data import Encoder, Prompts, Rollout, load_rows, pack_group, unpack_group
from hardware import Hardware, along
from learner import Learner, Sample
from ledger import Ledger
from memory import device_name, machine_bytes
from model import parameter_shapes
from reward import Grader
from scheduler import Request
from settings import parse, to_yaml
from shape import Shape, read_shape
from sync import Grid, Publisher, agree_on_plan, make_groups
from transfer import same_layout

POLLS_S = 8e-3  # some six messages a step, one after the other, each polled for every 0.2 to 5 ms


def calibrate(config: Config, prompt: int, response: int, file: str) -> str:
    """Measure with sequences of `prompt` + `response` tokens, write `file`, and say what was found."""
    started, shape = time.perf_counter(), read_shape(config.model.path)
    on_gpu = torch.cuda.is_available() and not config.exact
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.set_num_threads(threads_of(config))
    curves = {"process": psutil.Process().memory_info().rss, "gemm_flops": product_rates(config, shape, device)}
    copy = measure_copy_bandwidth(device)
    with waiting_side():
        # The learner first: the engine leaves threads and an allocator's setting.
        curves |= learner_curves(config, shape, prompt, response, device)
        curves |= engine_curves(config, shape, prompt, response, device)
    curves |= group_seconds(config, response)
    link = 0.0
    if not on_gpu or torch.cuda.device_count() > 1:
        curves |= publication(config)
        link = max(size / seconds for size, seconds in curves["broadcast"])
    peak = max(rate for _, rate in curves["gemm_flops"])
    name = f"{device_name(device)}, {threads_of(config)} threads"
    origin = f"measured on {config.model.path}, {config.model.dtype}{', exact' if config.exact else ''}"
    found = Hardware(name, peak, peak, peak, copy, float(machine_bytes(device)), link, link, curves, origin)
    Path(file).write_text(json.dumps(dataclasses.asdict(found), indent=1) + "\n")
    return (f"{name}: GEMM {peak / 1e9:.0f} GFLOP/s, copy {copy / 1e9:.1f} GB/s, link {link / 1e9:.2f} GB/s; {origin} in "
            f"{time.perf_counter() - started:.0f} s -> {file}")


def threads_of(config: Config) -> int:
    """As train.py gives them to a rank when all ranks are on this machine."""
    learners, actors = config.learner.replicas * config.learner.shards, config.actor.replicas * config.actor.tp
    busy = learners + actors if config.max_staleness else max(learners, actors)
    return config.threads or min(max(1, len(os.sched_getaffinity(0)) // busy), 2 if config.exact else 1 << 10)


def again(seconds: float, least: int) -> Iterator[int]:
    """Count repeats, for as long as they take `seconds` together: many of what is short, few of what is long.

    A pause before each, as a side that waits for the other has it: on shared cores a process that never rests is served last.
    """
    start, number = time.monotonic(), 0
    while number < least or time.monotonic() - start < seconds:
        time.sleep(0.05)
        yield number
        number += 1


def low(seconds: list[float]) -> float:
    """The lower quartile of all but the first, which warms up; of one that took long, that one."""
    rest = sorted(seconds[1:] or seconds)
    return rest[len(rest) // 4]


def usual(work: Callable[[], object]) -> float:
    """Seconds of `work`, after one call that warms up."""
    found = []
    for _ in again(0.4, 3):
        start = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return low(found)


@contextlib.contextmanager
def waiting_side() -> Iterator[None]:
    """Beside what is measured, a process that looks for messages every millisecond, as the side of a run that waits does.

    Raises ConfigError if it fails.
    """
    with subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE) as process:
        try:
            if not process.stdout.readline():
                raise ConfigError("calibration: the process that waits beside the engine failed; its message stands above")
            yield
        finally:
            process.kill()


def look_for_messages() -> None:
    """What the process of `waiting_side` runs, for as long as its parent lives."""
    channel, parent = Channel(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 60.0), os.getppid()
    print("looking", flush=True)
    while os.getppid() == parent:
        channel.pop("headers")
        time.sleep(1e-3)


def product_rates(config: Config, shape: Shape, device: torch.device) -> list[tuple[int, float]]:
    """FLOP/s of one layer's products and the head's, by rows."""
    E, F, queries = shape.hidden, shape.ffn, shape.heads * shape.head_dim
    sizes = [(queries + 2 * shape.kv_heads * shape.head_dim, E), (E, queries), (2 * F, E), (E, F), (shape.vocab, E)]
    kind = {"dtype": getattr(torch, config.model.dtype), "device": device}
    weights, rates = [torch.randn(size, **kind) for size in sizes], []
    for rows in (1, 16, 64, 256, 1024):
        inputs = [torch.randn(rows, columns, **kind) for _, columns in sizes]
        seconds = usual(lambda inputs=inputs: [x @ w.T for x, w in zip(inputs, weights, strict=True)])
        rates.append((rows, 2 * rows * sum(a * b for a, b in sizes) / seconds))
    return rates


def engine_curves(config: Config, shape: Shape, prompt: int, response: int, device: torch.device) -> dict:
    """Steps of the engine with random weights: requests prefill in one step and decode to their end, a response or 8 tokens."""
    engine = Engine(config, shape, shape.vocab, device, Ledger(False))
    for name, weight in engine.weights().items():
        weight.fill_(1) if name.endswith("norm.weight") else weight.normal_(0, shape.init_std)
    engine.connect()
    engine.publish(0)
    draw, groups, each = torch.Generator().manual_seed(0), itertools.count(), min(max(2, response), 8)

    def steps(rows: int, length: int) -> tuple[float, float]:
        """Of the prefill, and of a decode step, mean: the first describes its batch anew, the last sees all requests off."""
        for _ in range(rows):
            engine.scheduler.add([Request(next(groups), 0, torch.randint(shape.vocab, (length,), generator=draw).tolist(), each)])
        marks = [time.perf_counter()]
        while engine.scheduler.unfinished:
            engine.step()
            marks.append(time.perf_counter())
        return marks[1] - marks[0], (marks[-1] - marks[1]) / (len(marks) - 2)

    budget, prefill, decode = config.actor.max_num_batched_tokens, [], []
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    most = min(config.actor.max_num_seqs, -(-samples // config.actor.replicas), max(1, budget // prompt))
    for rows in sorted({1, -(-most // 8), most}):
        rounds = [steps(rows, prompt) for _ in again(3.0, 1)]
        prefill.append((rows * prompt, low([first for first, _ in rounds])))
        decode.append((rows, low([other for _, other in rounds])))
    longer = min(prompt + response + config.rollout.max_new_tokens, config.max_model_len - 8)
    rows = min(most, max(1, budget // max(1, longer)))
    extra = low([steps(rows, longer)[1] for _ in again(0.5, 1)]) - along(decode, rows) if longer > prompt else 0.0
    return {"prefill": prefill, "decode": decode, "decode_context": prompt + each / 2,
            "context_s": max(0.0, extra) / rows / max(1, longer - prompt)}


def learner_curves(config: Config, shape: Shape, prompt: int, response: int, device: torch.device) -> dict:
    """Whole train steps of one rank that holds the model alone."""
    alone = dataclasses.replace(config, model=dataclasses.replace(config.model, init="random"))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, ledger = DeviceMesh(device.type, [0], mesh_dim_names=("shard",)), Ledger(False)
    learner = Learner(alone, shape, shape.vocab, mesh, device)
    ranks = config.learner.replicas * config.learner.shards
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt // ranks
    most = max(1, min(samples, config.learner.max_tokens_per_micro_batch // (prompt + response)))
    curves: dict = {"forward": [], "backward": []}
    for count in sorted({1, -(-most // 4), most}):
        batch = []
        for number in range(count):  # a group's prompt is computed once, another's differs in its digits
            group = number // config.rollout.samples_per_prompt
            ids = [group // shape.vocab**place % shape.vocab for place in range(prompt)]
            batch.append(Sample([*ids, *[1] * response], prompt, [-1.0] * response, 1.0, 1.0 / count))
        accounts = []
        for _ in again(2.0, 2):
            learner.credit(batch)
            ledger.account()
            learner.train_step([batch], 0, ledger)
            accounts.append(ledger.account())
        for kind, curve in curves.items():
            curve.append((count * (prompt + response), low([account[kind] for account in accounts])))
    dist.destroy_process_group()
    return curves | {"optimizer_s": low([account["optimizer"] for account in accounts])}


def group_seconds(config: Config, response: int) -> dict:
    """One group's way through decoding to text, a grading process, the store and back; and a step's tracker."""
    encoder, samples = Encoder(config.model.path, config.rollout.stop), config.rollout.samples_per_prompt
    prompt = Prompts(load_rows(config.data.path, config.data.split, "data.path"), config.data, encoder, config.seed).draw()
    channel = Channel(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), 60.0)
    grader, ids = Grader(config.reward), [1] * response
    grader.wait_ready()
    rollouts = [Rollout([*prompt.ids, *ids], len(prompt.ids), [-1.0] * response, [0] * response)] * samples

    def once() -> None:
        texts = [encoder.decode(ids) for _ in range(samples)]
        grader.submit({"group": 0, "prompt": prompt.prompt, "columns": prompt.columns}, texts, [ids] * samples)
        while not grader.poll():
            pass
        channel.put("payload/0", pack_group(rollouts))
        unpack_group(channel.fetch("payload/0", "the payload"))
        channel.drop("payload/0")

    sample_s, report_s = usual(once) / samples, 0.0
    grader.close()
    if "tensorboard" in config.log.trackers:
        from accelerate.tracking import TensorBoardTracker
        with tempfile.TemporaryDirectory() as folder:
            tracker = TensorBoardTracker("calibration", logging_dir=folder)
            tracker.start()
            report_s = usual(lambda: tracker.log({f"value/{number}": 1.0 for number in range(60)}, step=0))
            tracker.finish()
    return {"sample_s": sample_s, "beside_s": report_s + POLLS_S}


def publication(config: Config) -> dict:
    """One learner and one actor, two processes. Raises ConfigError if they fail."""
    pair = placed(config, (1, 1, 1, 1))
    pair = dataclasses.replace(pair, publish=dataclasses.replace(pair.publish, mode="in_place"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pair.yaml").write_text(to_yaml(pair))
        both = [subprocess.Popen([sys.executable, __file__, folder], env=os.environ | {
            "RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}) for rank in (0, 1)]
        ended = [rank.wait() for rank in both]
        if any(ended):
            raise ConfigError("calibration: the two processes of the publication failed; their messages stand above")
        return json.loads((Path(folder) / "found.json").read_text())


def one_of_two(folder: str, rank: int) -> None:
    """What each process of `publication` runs."""
    config = parse([f"{folder}/pair.yaml"])
    torch.set_num_threads(threads_of(config))
    device = torch.device("cuda", rank) if torch.cuda.is_available() and not config.exact else torch.device("cpu")
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    channel, shapes = open_channel(rank, 60.0), parameter_shapes(read_shape(config.model.path))
    plan = agree_on_plan(channel, config, shapes, (same_layout(shapes), shapes) if rank else None)
    publisher = Publisher(channel, plan, make_groups(Grid.of(config), plan, device.type, 60.0), config, device)
    dtype = getattr(torch, config.model.dtype) if rank else torch.float32
    tensors, seconds = {name: torch.ones(shape, dtype=dtype, device=device) for name, shape in shapes.items()}, []
    for version in range(6):
        dist.barrier()
        start = time.perf_counter()
        if rank:
            while channel.pop("control/1") is None:  # as an engine without work looks into its inbox
                time.sleep(1e-3)
            publisher.receive(version, tensors)
        else:
            publisher.announce(version)
            publisher.send(version, tensors)
        seconds.append(time.perf_counter() - start)
    found: dict = {"publish_s": low(seconds), "broadcast": []}
    for size in (1 << 16, 1 << 20, 1 << 24, 1 << 26):
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        taken = []
        for _ in range(6):  # as often on both sides
            dist.barrier()
            start = time.perf_counter()
            dist.broadcast(buffer, 0)
            dist.barrier()  # until the receiver has it
            taken.append(time.perf_counter() - start)
        found["broadcast"].append((size, low(taken)))
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:]:
        one_of_two(sys.argv[1], int(os.environ["RANK"]))
    else:
        look_for_messages()
