"""What a run needs to go on after its processes died: saved beside the training, found again at the next start.

    RUN/checkpoints/step-N/   *.safetensors   masters and moments of every trained model, cut as the ranks held them
                              state.json      config, data cursor, the release gate, headers of finished groups, best evaluation
                              group-G.safetensors   finished groups that no step has trained on yet, whole

A 70B's is 847 GB (fp32 masters and two moments): 21 GB a rank on 40 learners. The step stops only while shards are copied to host
memory; a thread of its own writes them, over a process group of its own. The folder is written as `step-N.partial` and renamed when
every rank's part is on disk, so that what is called `step-N` is complete whatever dies when.

Deliberately not torch's default format, whose metadata are a pickle: tensors go through DCP's safetensors writer, the rest is JSON.
Any number of learner ranks reads them back (DCP reshards). No random state is kept because there is none: every random number is a
function of (seed, group, sample, position), and data order one of (seed, cursor). Unfinished groups start again from their prompt.
All ranks must see one file system.
"""

import dataclasses
import json
import os
import shutil
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from config import Config, ConfigError, fields


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the ones before it are intact."""


def complete(run_dir: str | Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    found = [path for path in Path(run_dir, "checkpoints").glob("step-*") if path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


class Checkpoints:
    """A learner rank's side of saving: `save` starts one, `poll` and `wait` finish it. Collectives are on `group` alone."""

    def __init__(self, run_dir: str, keep: int, group: dist.ProcessGroup):
        self.folder, self.keep, self.group = Path(run_dir, "checkpoints"), keep, group
        self.leads = dist.get_rank(group) == 0
        self._pending: tuple[Path, Future] | None = None
        for leftover in self.folder.glob("step-*.partial") if self.leads else ():
            shutil.rmtree(leftover)  # of a run that was killed

    def save(self, version: int, tensors: dict[str, Tensor], state: dict | None, payloads: dict[int, bytes]) -> None:
        """Copy `tensors`, start writing; `state` and `payloads` are the first rank's. Raises CheckpointError, also for the last."""
        self.wait()
        partial = self.folder / f"step-{version}.partial"
        if self.leads:
            try:
                shutil.rmtree(partial, ignore_errors=True)  # it failed before
                partial.mkdir(parents=True)
                (partial / "state.json").write_text(json.dumps(state))
                for group, payload in payloads.items():
                    (partial / f"group-{group}.safetensors").write_bytes(payload)
            except OSError as error:
                raise CheckpointError(f"checkpoint {partial.name}: {error}; earlier ones are intact") from None
        dist.barrier(self.group)
        writer = HuggingFaceStorageWriter(str(partial / "tensors"), save_distributed=True)
        self._pending = partial, dcp.async_save(tensors, storage_writer=writer, process_group=self.group)

    def poll(self) -> Path | None:
        """Finish the pending checkpoint if its writing is done; returns its folder then."""
        return self.wait() if self._pending and self._pending[1].done() else None

    def wait(self) -> Path | None:
        """Finish the pending checkpoint, if there is one: on disk, renamed, older ones removed. Raises CheckpointError."""
        if not self._pending:
            return None
        (partial, future), self._pending = self._pending, None
        error = future.exception()
        if error is not None:
            raise CheckpointError(f"checkpoint {partial.name}: {str(error).strip().splitlines()[-1]}; earlier ones are intact")
        final = partial.with_suffix("")
        if self.leads:
            for file in partial.rglob("*"):
                _sync(file)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _sync(self.folder)
            for old in complete(self.folder.parent)[:-self.keep]:
                shutil.rmtree(old)
        return final


def _sync(path: Path) -> None:
    """Have the kernel write a file, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


MUST_MATCH = ("seed", "model.path", "data.path", "data.split", "data.shuffle", "data.prompt_column", "data.max_prompt_tokens",
              "rollout.prompts_per_step", "algorithm.loss")


def resume_point(config: Config) -> Path | None:
    """The checkpoint that this run goes on from. Raises ConfigError if it was made under settings that cannot change."""
    found = complete(config.run_dir) if config.resume == "auto" else []
    if not found:
        return None
    before = read_state(found[-1])["config"]
    for key, *_ in fields():
        section, _, name = key.rpartition(".")
        then, now = ((values[section] if section else values)[name] for values in (before, dataclasses.asdict(config)))
        if key in MUST_MATCH and then != now:
            raise ConfigError(f"`{key}` = {now!r}, but {found[-1]} was made with {then!r}: restore it, or set resume=never")
    return found[-1]


def version_of(checkpoint: Path | None) -> int:
    """Updates that a checkpoint holds; 0 without one."""
    return int(checkpoint.name.removeprefix("step-")) if checkpoint else 0


def read_state(checkpoint: Path) -> dict:
    """state.json of a checkpoint. Raises ConfigError if it cannot be read."""
    try:
        return json.loads((checkpoint / "state.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"checkpoint {checkpoint}: state.json cannot be read ({error}); remove the folder, or set "
                          "resume=never") from None


def read_payload(checkpoint: Path, group: int) -> bytes:
    return (checkpoint / f"group-{group}.safetensors").read_bytes()


def load_tensors(checkpoint: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Fill `tensors` in place, whatever the number of ranks that saved them. Raises ConfigError if names or shapes differ.

    DCP skips keys that it is not asked for, and a run that resumes without its moments diverges quietly: names are compared first.
    """
    reader = HuggingFaceStorageReader(str(checkpoint / "tensors"))
    stored = {name: tuple(entry.size) for name, entry in reader.read_metadata().state_dict_metadata.items()}
    for name, tensor in tensors.items():
        if stored.get(name) != tuple(tensor.shape):
            raise ConfigError(f"checkpoint {checkpoint} does not fit this config: {name} is {stored.get(name, 'absent')} there and "
                              f"{tuple(tensor.shape)} here; restore the config, or set resume=never")
    dcp.load(tensors, storage_reader=reader, process_group=group)
