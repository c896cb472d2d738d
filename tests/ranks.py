"""Run a function on several gloo ranks, each its own process, and bring back what it returns (JSON) or how it failed."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TOY = {"model": {"path": "configs/toy", "init": "random"}, "data": {"max_prompt_tokens": 8}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    return os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                         "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}


def spawn(world: int, target: str, *arguments, timeout_s: float = 120) -> list[dict]:
    """`module:function` on ranks 0...world-1. Each entry: {"exit", "result" (None if it raised), "stderr"}."""
    port, ranks = free_port(), []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(world):
            log = open(Path(folder) / f"{rank}.err", "w")
            command = [sys.executable, __file__, target, json.dumps(arguments), str(Path(folder) / f"{rank}.json")]
            ranks.append(subprocess.Popen(command, env=environment(rank, world, port), stderr=log, stdout=log, cwd=ROOT))
            log.close()
        deadline = time.monotonic() + timeout_s
        try:
            for process in ranks:
                process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        results = []
        for rank, process in enumerate(ranks):
            file = Path(folder) / f"{rank}.json"
            results.append({"exit": process.returncode, "result": json.loads(file.read_text()) if file.exists() else None,
                            "stderr": (Path(folder) / f"{rank}.err").read_text()})
    return results


def spawn_ok(world: int, target: str, *arguments, timeout_s: float = 120) -> list:
    """Results of all ranks; fails with the first rank's stderr if one did not return."""
    done = spawn(world, target, *arguments, timeout_s=timeout_s)
    failed = [f"rank {rank}: {entry['stderr'][-1500:]}" for rank, entry in enumerate(done) if entry["exit"] != 0]
    assert not failed, "\n".join(failed)
    return [entry["result"] for entry in done]


def torchrun(world: int, *arguments: str, script: str = "train.py", timeout_s: float = 280,
             restarts: int = 0) -> subprocess.CompletedProcess:
    """The real command line."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), "--master-port", str(free_port()),
               "--max-restarts", str(restarts), script, *arguments]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, env=os.environ | settings)


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (Path(run_dir) / name).read_text().splitlines()]


def main(target: str, arguments: list, out: str) -> None:
    import importlib
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    module, name = target.split(":")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    result = getattr(importlib.import_module(module), name)(dist.get_rank(), *arguments)
    Path(out).write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)  # as train.py does


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
