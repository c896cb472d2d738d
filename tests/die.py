"""train.py in which ranks get signals in the middle of something: one list of $DIE (JSON) for each of torchrun's attempts.

    [[[rank, place, count, signal], ...], ...]   the count-th time that `rank` comes to `place`; later attempts are left alone

Places are inside the work, not between: after an engine's forward, between a publication's buckets, in a hook of autograd, while
the checkpoint's files are half there.
"""

import functools
import json
import os
import resource
import signal
import sys
import time

import torch

import resume
import train
from runner import Runner
from sync import Publisher

PUBLICATIONS = ("send", "receive", "exchange")  # of a learner, an actor, a colocated rank
SEEN_S = 2.2  # two beats of the watch, after which the others have heard of the phase
sleep = time.sleep


def die(number: int, wait: float = SEEN_S) -> None:
    """Get the signal; 0 is no signal: this rank's files may not grow beyond 100 bytes any more."""
    if number == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        return
    sleep(0.0 if number == signal.SIGUSR1 else wait)
    os.kill(os.getpid(), number)


def at(place: str, count: int, number: int) -> None:
    """Wrap what happens at `place`."""
    left = [count]

    def reached() -> bool:
        left[0] -= 1
        return left[0] == 0

    def wrap(owner, name: str, before: bool = False, when=lambda *_: True, wait: float = SEEN_S) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def wrapped(*arguments, **keywords):
            found = None if before else inner(*arguments, **keywords)
            if when(*arguments) and reached():
                die(number, wait)
            return inner(*arguments, **keywords) if before else found

        setattr(owner, name, wrapped)

    if place == "idle":  # once the first version is live
        waits, live = ("turn", "collect", "wait_until"), []
        for name in PUBLICATIONS:
            wrap(Publisher, name, when=lambda _, version, *__: live.append(version))
        wrap(time, "sleep", when=lambda *_: live and sys._getframe(2).f_code.co_name in waits)
    elif place == "decode":
        wrap(Runner, "compute", when=lambda runner, batch: all(request.num_scheduled == 1 for request in batch))
    elif place == "publish":  # after the first, and not where the link is measured
        versions = []
        for name in PUBLICATIONS:
            wrap(Publisher, name, before=True, when=lambda _, version, *__: versions.append(version))
        wrap(Publisher, "_broadcast", when=lambda *_: versions and versions[-1] > 0)
    elif place == "backward":
        inner = torch.Tensor.backward

        def backward(loss, *arguments, **keywords):
            if reached():
                loss.register_hook(lambda gradient: die(number))
            return inner(loss, *arguments, **keywords)

        torch.Tensor.backward = backward
    elif place == "checkpoint":
        wrap(resume.dcp, "async_save", before=True)
    elif place == "writing":  # in the thread that writes, beside the training
        wrap(resume.HuggingFaceStorageWriter, "write_data", wait=0.0)
    elif place == "renaming":  # rank 0: written, not yet complete
        wrap(resume, "_sync", before=True)


if __name__ == "__main__":
    plan = json.loads(os.environ["DIE"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    for rank, *event in plan[attempt] if attempt < len(plan) else ():
        if rank == int(os.environ["RANK"]):
            at(*event)
    status = train.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)
