"""Run a function on several gloo ranks, each a process, and bring back what it returns (JSON) or how it failed; a run of
train.py on such ranks; or torchrun.

They are forked from a process that has imported torch, transformers and seventy, and has done nothing with them: a start then takes
.1 s, not 4. What torchrun starts itself is started as for a user.
"""

import functools
import importlib
import json
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOY = {"model": {"path": "configs/toy", "init": "random"}, "data": {"max_prompt_tokens": 8}}
IMPORTED = ["torch.distributed.run", "torch.distributed.fsdp", "transformers", "train", "ranks"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@functools.cache
def forkserver() -> multiprocessing.context.ForkServerContext:
    """With the environment of now, and tests/conftest.py's one thread."""
    context, kept = multiprocessing.get_context("forkserver"), os.environ.get("PYTHONPATH")
    context.set_forkserver_preload(IMPORTED)
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    multiprocessing.forkserver.ensure_running()
    del os.environ["PYTHONPATH"]
    os.environ |= {"PYTHONPATH": kept} if kept else {}
    return context


def start(function, arguments: tuple, added: dict[str, str], log: Path) -> multiprocessing.process.BaseProcess:
    """`function` in a process of its own, in ROOT; what it writes goes to two files."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | added
    process = forkserver().Process(target=_begin, args=(function, arguments, environment, str(log)))
    process.start()
    return process


def _begin(function, arguments: tuple, environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ |= environment
    os.chdir(ROOT)
    for stream, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(log + suffix, os.O_WRONLY | os.O_CREAT, 0o600), stream)
    function(*arguments)


def _all_ranks(world: int, folder: str, function, arguments: tuple, timeout_s: float) -> list[int]:
    """`function` on ranks 0...world-1; exit statuses. Rank r writes to folder/r.out and folder/r.err."""
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [start(function, arguments, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, Path(folder) / str(rank))
             for rank in range(world)]
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0.1, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(ranks) if process.exitcode is None]
    for process in ranks:
        process.kill()
        process.join()
    assert not late, f"ranks {late} had not ended after {timeout_s} s: {Path(folder, f'{late[0]}.err').read_text()[-1500:]}"
    return [process.exitcode for process in ranks]


def spawn(world: int, target: str, *arguments, timeout_s: float = 120) -> list[dict]:
    """`module:function` on ranks 0...world-1. Each entry: {"exit", "result" (None if it raised), "stderr"}."""
    with tempfile.TemporaryDirectory() as folder:
        exits = _all_ranks(world, folder, _rank, (target, json.dumps(arguments), folder), timeout_s)
        return [{"exit": status, "stderr": Path(folder, f"{rank}.err").read_text(),
                 "result": json.loads(out.read_text()) if (out := Path(folder, f"{rank}.json")).exists() else None}
                for rank, status in enumerate(exits)]


def spawn_ok(world: int, target: str, *arguments, timeout_s: float = 120) -> list:
    """Results of all ranks; fails with the first rank's stderr if one did not return."""
    done = spawn(world, target, *arguments, timeout_s=timeout_s)
    failed = [f"rank {rank}: {entry['stderr'][-1500:]}" for rank, entry in enumerate(done) if entry["exit"] != 0]
    assert not failed, "\n".join(failed)
    return [entry["result"] for entry in done]


def _rank(target: str, arguments: str, folder: str) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    module, name = target.split(":")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    result = getattr(importlib.import_module(module), name)(dist.get_rank(), *json.loads(arguments))
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # as train.py does


def job(world: int, *arguments: str, timeout_s: float = 280) -> subprocess.CompletedProcess:
    """A run of train.py on forked ranks, for tests of what a run does, not of how torchrun starts and ends one."""
    with tempfile.TemporaryDirectory() as folder:
        exits = _all_ranks(world, folder, _train, (list(arguments),), timeout_s)
        out, err = ("".join(Path(folder, f"{rank}.{end}").read_text() for rank in range(world)) for end in ("out", "err"))
        return subprocess.CompletedProcess(arguments, max(map(abs, exits)), out, err)


def _train(arguments: list[str]) -> None:
    import train
    status = train.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def torchrun(world: int, *arguments: str, script: str = "train.py", timeout_s: float = 280,
             restarts: int = 0) -> subprocess.CompletedProcess:
    """The real command line, but for the import of the launcher."""
    command = ["torchrun", "--nproc-per-node", str(world), "--master-port", str(free_port()), "--max-restarts", str(restarts),
               script, *arguments]
    settings = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = start(_launch, (command,), settings, log)
        process.join(timeout_s)
        if process.exitcode is None:
            process.terminate()  # it ends its ranks
            process.join(30)
            raise subprocess.TimeoutExpired(command, timeout_s)
        out, err = (Path(f"{log}{end}").read_text() for end in (".out", ".err"))
        return subprocess.CompletedProcess(command, process.exitcode, out, err)


def _launch(command: list[str]) -> None:
    sys.argv = command
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (Path(run_dir) / name).read_text().splitlines()]
