"""What ranks of test_resume.py do: save sharded tensors, be killed, meet a full disk, load."""

import os
import resource
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import resume
from config import ConfigError
from resume import CheckpointError, Checkpoints, complete, load_tensors


def sharded(value: float):
    """A matrix and a vector, row-sharded over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {"a.weight": torch.arange(35.0).view(7, 5) + value, "b": torch.full((3,), value)}
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}


def values(folder: str, version: int) -> list:
    """What a checkpoint gives back here, gathered; checked against `sharded` by the caller."""
    found = sharded(-1.0)
    load_tensors(Path(folder, "checkpoints", f"step-{version}"), found, dist.group.WORLD)
    return [found["a.weight"].full_tensor()[0, 0].item(), found["b"].full_tensor().tolist()]


def save_three(rank: int, folder: str) -> dict:
    """Three saves with keep=2; each one's tensors are overwritten as soon as `save` returns, as training does."""
    for name in ("step-2.partial", "step-9.partial") if rank == 0 else ():
        tensors = Path(folder, "checkpoints", name, "tensors")
        tensors.mkdir(parents=True)
        (tensors / "shard-00009-model-00009-of-00009.safetensors").write_bytes(b"left over")
    dist.barrier()
    saver = Checkpoints(folder, 2, dist.new_group())  # as sync.make_groups: its thread must not meet the training's collectives
    for version in (1, 2, 3):
        tensors = sharded(float(version))
        saver.save(version, tensors, {"version": version} if rank == 0 else None, {7: b"seven"} if rank == 0 else {})
        for tensor in tensors.values():
            tensor.to_local().fill_(99.0)
    saver.wait()
    assert saver.poll() is None
    dist.barrier()
    checkpoints = Path(folder, "checkpoints")
    return {"kept": sorted(path.name for path in checkpoints.iterdir()), "loaded": [values(folder, 2), values(folder, 3)],
            "payload": (checkpoints / "step-3" / "group-7.safetensors").read_bytes().decode()}


def load_alone(rank: int, folder: str) -> dict:
    unfit = sharded(0.0) | {"c": torch.zeros(2)}
    try:
        load_tensors(Path(folder, "checkpoints", "step-3"), unfit, dist.group.WORLD)
    except ConfigError as error:
        return {"loaded": values(folder, 3), "error": str(error)}


def save_on_a_full_disk(rank: int, folder: str, limited: int) -> list:
    """A good checkpoint, then one whose files may have at most 100 bytes on rank `limited`; what it raised, and what is left."""
    saver = Checkpoints(folder, 2, dist.new_group())
    saver.save(1, sharded(1.0), {"version": 1} if rank == 0 else None, {})
    saver.wait()
    dist.barrier()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    raised = ""
    try:
        saver.save(2, sharded(2.0), {"version": 2} if rank == 0 else None, {})
        saver.wait()
    except CheckpointError as error:
        raised = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    dist.barrier()
    saver.save(2, sharded(2.5), {"version": 2} if rank == 0 else None, {})  # over the leftover
    left = [path.name for path in complete(folder)]
    dist.barrier()
    saver.wait()
    dist.barrier()
    return [raised, left, values(folder, 1), values(folder, 2)]


def be_killed(rank: int, folder: str, place: str) -> None:
    saver = Checkpoints(folder, 2, dist.new_group())
    saver.save(1, sharded(1.0), {"version": 1} if rank == 0 else None, {})
    saver.wait()
    dist.barrier()
    owner, name = (resume.HuggingFaceStorageWriter, "write_data") if place == "writing" else (resume, "_sync")
    setattr(owner, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    saver.save(2, sharded(2.0), {"version": 2} if rank == 0 else None, {})
    saver.wait()


def load_first(rank: int, folder: str) -> list:
    return values(folder, 1)
