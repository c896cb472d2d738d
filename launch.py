"""Before the first process group: everything a user can get wrong is found here, on every rank, in one line.

A job on 64 GPUs that fails after the weights are loaded has cost ten minutes of each; one that fails here has cost seconds.
"""

import dataclasses
import functools
import importlib.util
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from checkpoint import WeightFolder, check_names
from config import Config, ConfigError
from data import Encoder, Prompt, Prompts, load_rows
from ledger import HostEvent, Ledger
from model import parameter_shapes
from parallel import check_lanes
from resume import read_state, resume_point
from shape import Shape, check_exact, check_positions, read_shape
from sharding import open_folder
from sync import Grid


@dataclass(frozen=True)
class Start:
    """What a rank knows once its config has been found good."""
    rank: int
    shape: Shape
    encoder: Encoder
    device: torch.device
    checkpoint: Path | None = None  # to go on from
    process_bytes: int = 0  # resident before any model


def prepare(config: Config) -> Start:
    """Check the config against the world, the model folders and the machine; set this rank's threads. Raises ConfigError."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world != config.world_size:
        actors = " + actor.replicas x actor.tp" if config.placement == "split" and not config.offline else ""
        raise ConfigError(f"{world} ranks were started, but learner.replicas x learner.shards{actors} = {config.world_size}; "
                          f"run torchrun --nproc-per-node {config.world_size} train.py ...")
    shape = read_shape(config.model.path)
    check_exact(config, shape)
    check_positions(config, shape)
    check_lanes(shape, config.actor.tp)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    check_nodes(config, local_ranks)
    torch.set_num_threads(threads_per_rank(config, len(os.sched_getaffinity(0)), local_ranks))
    if "wandb" in config.log.trackers and importlib.util.find_spec("wandb") is None:
        raise ConfigError("`log.trackers` names wandb, which is not installed; pip install wandb, or use tensorboard")
    if config.learner.moments == "8bit" and importlib.util.find_spec("torchao") is None:
        raise ConfigError("`learner.moments` = 8bit needs torchao, which is not installed; pip install torchao, or set fp32")
    encoder = Encoder(config.model.path, config.rollout.stop)
    if encoder.vocab > shape.vocab:
        raise ConfigError(f"`model.path` = {config.model.path!r}: tokenizer of {encoder.vocab} ids, model of {shape.vocab} rows")
    if rank == 0:
        check_folders(config, shape, encoder)
    device = pick_device(config)
    if config.actor.release_memory and config.actor.cuda_graphs and device.type == "cuda":
        raise ConfigError("`actor.release_memory` needs `actor.cuda_graphs` = false: graphs hold the addresses of the weights")
    return Start(rank, shape, encoder, device, resume_point(config), psutil.Process().memory_info().rss)


def check_folders(config: Config, shape: Shape, encoder: Encoder) -> None:
    """Weights fit their configs, and scorers read the policy's token ids. Raises ConfigError."""
    if config.model.init == "load" and config.algorithm.loss != "bradley_terry":
        check_names(WeightFolder(config.model.path), parameter_shapes(shape), shape.tied)
    starts_scorer = config.model.init == "load" and config.algorithm.loss == "bradley_terry"
    for field, path in (("critic.path", config.critic.path), ("reward_model.path", config.reward_model.path),
                        ("model.path", config.model.path if starts_scorer else "")):
        if path:
            theirs = read_shape(path, field)
            shapes = {name: size for name, size in parameter_shapes(theirs).items() if name != "lm_head.weight"}
            open_folder(path, field, shapes | {"score.weight": (1, theirs.hidden)}, theirs.tied)
            if Encoder(path, field=field).tokenizer.get_vocab() != encoder.tokenizer.get_vocab():
                raise ConfigError(f"`{field}` = {path!r} has another tokenizer than `model.path`, and would read other words into "
                                  "the same ids; serve it from a `reward.functions` entry, which gets text")


def make_ledger(config: Config, device: torch.device) -> Ledger:
    """A rank's ledger, on the clock of its device."""
    new_event = functools.partial(torch.cuda.Event, enable_timing=True) if device.type == "cuda" else HostEvent
    return Ledger(config.log.trace, new_event, config.rollout.prompts_per_step)


def set_nccl_limits(config: Config) -> None:
    """How NCCL ends a hung collective, said in one place; a variable that is already set wins. Before any process group.

    Each group's own timeout is collective_timeout_s (join, sync.make_groups). Beyond it NCCL's watchdog writes the flight recorder
    (the last 2000 collectives of each rank: which was called where, and who never came; read it with `torchfrtrace`) and takes the
    process down. ncclCommAbort is left out (3, not 1): it can hang itself, and the process's end ends its communicators.
    """
    for name, value in {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_ENABLE_MONITORING": "1",
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(max(60, int(config.collective_timeout_s))),
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_FR_DUMP_TEMP_FILE": str(Path(config.run_dir).absolute() / "nccl-rank-")}.items():
        os.environ.setdefault(name, value)


def join(config: Config, device: torch.device) -> None:
    """The default process group: control messages on gloo, weights and gradients on NCCL where there are GPUs.

    torchrun keeps its store over --max-restarts, with the addresses of ranks that have died: an attempt has keys of its own.
    """
    if device.type == "cuda":
        set_nccl_limits(config)
    limit = timedelta(seconds=config.collective_timeout_s)
    store, rank, world = next(rendezvous("env://", timeout=limit))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=limit, rank=rank, world_size=world,
                            store=dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store))


def load_prompts(config: Config, start: Start) -> tuple[Prompts, list[Prompt]]:
    """Training prompts, at the checkpoint's cursor, and the held-out ones. Raises ConfigError."""
    encoder = start.encoder
    prompts = Prompts(load_rows(config.data.path, config.data.split, "data.path"), config.data, encoder, config.seed)
    prompts.draw()  # raises if no prompt fits
    prompts.cursor = prompts.skipped = 0
    if start.checkpoint:
        state = read_state(start.checkpoint)
        if state["rows"] != prompts.fingerprint():
            raise ConfigError(f"`data.path` = {config.data.path!r} has changed since {start.checkpoint} was made, and its cursor "
                              "would mean other rows: restore the data, or set resume=never")
        prompts.cursor, prompts.skipped = state["cursor"], state["skipped"]
    if not config.eval.every:
        return prompts, []
    rows = load_rows(config.data.eval_path, config.data.eval_split, "data.eval_path")
    data = dataclasses.replace(config.data, path=config.data.eval_path)
    return prompts, Prompts(rows[:config.eval.max_prompts], data, encoder, config.seed).fitting()


def pick_device(config: Config) -> torch.device:
    """A GPU of its own for every rank of this machine, or the CPU for all of them; exact mode is the CPU's."""
    local, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if config.exact or torch.cuda.device_count() < ranks:
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def threads_per_rank(config: Config, cores: int, local_ranks: int) -> int:
    """Cores by the ranks of this machine that compute at the same time: on-policy, actors and learners take turns."""
    if config.threads:
        return config.threads
    learners = min(config.learner.replicas * config.learner.shards, local_ranks)
    actors = min(config.actor.replicas * config.actor.tp, local_ranks)
    busy = max(learners, actors) if config.max_staleness == 0 else local_ranks
    return min(max(1, cores // busy), 2 if config.exact else cores)  # torch's SiLU rounds differently at the seams of three


def check_nodes(config: Config, local_ranks: int) -> None:
    """Refuse an engine on two machines: 2 L all-reduces a step would cross the network. Raises ConfigError."""
    grid = Grid.of(config)
    for leader in grid.leaders:
        if leader // local_ranks != (leader + grid.tp - 1) // local_ranks:
            raise ConfigError(f"`actor.tp` = {grid.tp}: ranks {leader} to {leader + grid.tp - 1} share an engine but not a machine "
                              f"({local_ranks} ranks each); choose the numbers of learners and lanes so that none straddles two")
