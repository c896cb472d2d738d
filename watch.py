"""Who died, hung or gave up, and in what phase: the job's one line when it ends early.

Every rank keeps a socket to rank 0 and says once a second what its ledger is counting; rank 0 answers with its own phase. The
kernel closes a dead process's sockets, so that a death is known in milliseconds, wherever the others are: in a collective that will
never return, waiting half an hour for rollouts, or idle. A hung process (SIGSTOP, a lost host) keeps its socket and falls silent;
it is given collective_timeout_s, or less once a rank complains that something timed out.

A thread of its own does this, and takes SIGTERM and SIGINT: Python runs signal handlers between bytecodes of the main thread, which
may be deep in gloo or NCCL. One rank speaks: rank 0, or where it is the one that is gone, one survivor on each host. torchrun's own
report follows; with --max-restarts it starts all ranks again, and they go on from the last complete checkpoint.

Why no keys in the store: what a dead rank last wrote there is still there, and telling it from a slow one takes a time limit.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from config import Config, ConfigError
from ledger import Ledger
from resume import CheckpointError
from sync import Grid, PublicationError

BEAT_S = 1.0
QUIET_S = 4.0  # silence that is blamed for somebody's timeout
GRACE_S = 6.0  # in which rank 0 finds out what a rank that timed out cannot see
FORESEEN = (PublicationError, CheckpointError, TimeoutError, FloatingPointError, OSError)


@dataclass(slots=True)
class Peer:
    """The other end of a socket."""
    rank: int = -1  # until it has said
    pid: int = 0
    phase: str = "start"
    heard: float = field(default_factory=time.monotonic)
    left: int | None = None  # exit status that it announced
    rest: bytes = b""  # of a line that is not whole yet


def lost_peer(error: BaseException | None) -> bool:
    """Whether an error is the far side's: NCCL's and the store's have a type, gloo's are RuntimeErrors known by their text."""
    known = isinstance(error, RuntimeError) and any(part in str(error) for part in ("third_party/gloo", "pair closure"))
    return known or isinstance(error, dist.DistError)


class Watch:
    """`with Watch(config, ledger):` around everything that needs the other ranks. All ranks enter, after init_process_group."""

    def __init__(self, config: Config, ledger: Ledger):
        self.rank, self.grid, self.ledger = dist.get_rank(), Grid.of(config), ledger
        self.limit_s, self.peers = config.collective_timeout_s, {}
        self._local = int(os.environ.get("LOCAL_RANK", self.rank))
        self._near = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))  # ranks on rank 0's host
        self.speaks = self.rank in (0, max(1, self.rank - self._local))
        self._parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._trouble, self._over_at = False, 0.0  # something timed out; a rank left and has said why
        self._selector, self._ending = selectors.DefaultSelector(), threading.Lock()
        self._connect()
        signals, wakeup = socket.socketpair()
        wakeup.setblocking(False)
        self._selector.register(signals, selectors.EVENT_READ, self._signalled)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # the interpreter writes the number into `wakeup`, whatever main is doing
        signal.set_wakeup_fd(wakeup.detach(), warn_on_full_buffer=False)
        threading.Thread(target=self._keep, name="watch", daemon=True).start()

    def _connect(self) -> None:
        """A star around rank 0; its port travels by a broadcast in the default group."""
        server = None
        if self.rank == 0:
            dual = socket.has_dualstack_ipv6()
            server = socket.create_server(("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual,
                                          backlog=dist.get_world_size())
            self._selector.register(server, selectors.EVENT_READ, lambda server: self._meet(server.accept()[0], Peer()))
        port = torch.tensor([server.getsockname()[1] if server else 0])
        dist.broadcast(port, 0)
        if self.rank:
            self._meet(socket.create_connection((os.environ["MASTER_ADDR"], int(port)), self.limit_s), Peer(rank=0))

    def _meet(self, connection: socket.socket, peer: Peer) -> None:
        connection.setblocking(False)
        self.peers[connection] = peer
        self._selector.register(connection, selectors.EVENT_READ, self._hear)
        self._tell({"rank": self.rank, "pid": os.getpid(), "phase": self.ledger.phase})

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind, error: BaseException | None, where) -> None:
        """Say goodbye, or end this process for what is not a mistake in the config, which main() reports."""
        if error is None or isinstance(error, ConfigError):
            self._tell({"left": 2 if error else 0})
            return
        if lost_peer(error) or isinstance(error, TimeoutError):
            self._trouble = True
            self._tell({"trouble": True})
            time.sleep(GRACE_S)  # the thread ends this process if anyone knows better
        elif not isinstance(error, FORESEEN):
            traceback.print_exception(error)
            os._exit(1)  # without a goodbye: the others name this rank
        reason = str(error).strip().splitlines()[0] if str(error).strip() else kind.__name__
        self.end(1, f"{self.name()} stopped: {reason}", linger_s=2.0 if self.rank == 0 else 0.0)  # the store says why to the others

    def name(self, peer: Peer | None = None) -> str:
        """`rank 2 (actor, decode)`; this rank without a peer."""
        rank, phase = (peer.rank, peer.phase) if peer else (self.rank, self.ledger.phase)
        return f"rank {rank} ({self.grid.role(rank)}, {phase})"

    def end(self, status: int, line: str = "", linger_s: float = 0.0) -> None:
        """End this process, whatever its main thread is doing, with the job's one line if it is this rank's to say."""
        if not self._ending.acquire(blocking=False):
            time.sleep(60)  # the other thread is at it
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            sys.stderr.write(f"{line}\n" if line else "")  # in one piece: other processes write here too
            sys.stdout.flush()
            sys.stderr.flush()
        self._tell({"left": status})
        time.sleep(linger_s)
        os._exit(status)

    def _tell(self, message: dict) -> None:
        for connection in list(self.peers):
            with contextlib.suppress(OSError):  # closed: the next read says so; full: it has not read for hours
                connection.send(json.dumps(message).encode() + b"\n")

    def _keep(self) -> None:
        due = 0.0
        while True:
            self._listen(max(0.0, due - time.monotonic()))
            if time.monotonic() < due:
                continue
            due = time.monotonic() + BEAT_S
            self._tell({"phase": self.ledger.phase})
            self._blame_silent()
            if self._over_at and time.monotonic() - self._over_at > GRACE_S:
                self.end(1)  # a rank has said why it left, and nothing has ended this one yet
            if self._parent not in (0, os.getppid()):
                self.end(1, f"{self.name()} stopped: torchrun has died" if self._local == 0 else "")

    def _listen(self, seconds: float) -> bool:
        """Handle what comes within `seconds`, signals last: the death that caused one is in the sockets by then."""
        ready = self._selector.select(seconds)
        for key, _ in sorted(ready, key=lambda entry: entry[0].fileobj not in self.peers):
            key.data(key.fileobj)
        return any(key.fileobj in self.peers for key, _ in ready)

    def _signalled(self, wakeup: socket.socket) -> None:
        numbers = set(wakeup.recv(64)) & {signal.SIGTERM, signal.SIGINT}
        while numbers and self._listen(0.0):
            pass
        for number in numbers:
            by = "" if self._over_at or self.rank else f"{self.name()} stopped by {signal.Signals(number).name}"
            self.end(128 + number, by)

    def _hear(self, connection: socket.socket) -> None:
        """A rank's lines, or the end of its socket."""
        peer = self.peers[connection]
        try:
            data = connection.recv(1 << 16)
        except OSError:  # reset
            data = b""
        *lines, peer.rest = (peer.rest + data).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:  # not one of ours
            messages, data = [], b""
        for message in messages:
            peer.rank, peer.pid = message.get("rank", peer.rank), message.get("pid", peer.pid)
            peer.phase, peer.left, peer.heard = message.get("phase", peer.phase), message.get("left", peer.left), time.monotonic()
            self._trouble |= "trouble" in message
            if peer.left in (1, 2):
                self._over_at = self._over_at or time.monotonic()
        if data:
            return
        self._selector.unregister(connection)
        del self.peers[connection]
        if peer.rank >= 0 and peer.left is None:
            self.end(1, f"{self.name(peer)} died; {self.name()} ends the job" if self.speaks else "")
        if self.rank and peer.left:
            self.end(1)  # rank 0 has said why

    def _blame_silent(self) -> None:
        """End the job if a rank has been silent for too long."""
        now, limit_s = time.monotonic(), QUIET_S if self._trouble else self.limit_s
        hung = [peer for peer in self.peers.values() if peer.rank >= 0 and peer.left is None and now - peer.heard > limit_s]
        for peer in hung:
            if max(peer.rank, self.rank) < self._near:
                os.kill(peer.pid, signal.SIGKILL)  # on rank 0's host and this one; torchrun would give it another 30 s
        if hung:
            names = ", ".join(f"{self.name(peer)} has been silent for {now - peer.heard:.0f} s" for peer in hung[:8])
            self.end(1, f"{names}; {self.name()} ends the job" if self.speaks else "")
