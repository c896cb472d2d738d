"""Ranks, groups, and the publication of weights from learners to actors.

Learners are ranks 0...L-1 (replicas x shards), actors the ranks after them (replicas x tp), or colocated the same ranks. Process
groups carry weights and gradients only; everything else goes through the store (channel.py).

A publication, after every optimizer step and once at the start (actors never read policy weights from disk):

    announced on the store -> each actor acknowledges at a step boundary -> when all have, every rank enters the broadcasts
    -> bucket by bucket: cast | wire | write, two buckets in flight -> digests of the live tensors compared -> version v is live

That is `in_place`: actors stand still from acknowledgement to proof, and hold two buckets a stream. `staged`, an actor acknowledges
at once and decodes on while its slice arrives in buffers of its own; it stands still only from the step boundary at which all is
there, to copy (of a 70B on 8 H200, 17.6 GB each: 8 ms) and to prove. The price is one more copy of the slice. Live tensors are
written in either mode, never replaced: CUDA graphs hold their addresses.

Colocated, every rank comes to the publication by itself, and the same broadcasts have roots that also receive.

The model is never gathered on the learner's side. What lands where is transfer.py's plan.
"""

import json
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from channel import Channel, wait_until
from config import Config
from transfer import Digest, Landing, Layout, Piece, Shapes, TransferPlan, make_plan, matrix, matrix_shape, shard_rows

LINK_PROBE_BYTES = 64 << 20


class PublicationError(RuntimeError):
    """Learner and actor do not hold the same weights; the message names the parameter."""


@dataclass(frozen=True)
class Grid:
    """Which rank does what."""
    replicas: int
    shards: int
    actors: int
    tp: int
    colocated: bool = False

    @classmethod
    def of(cls, config: Config) -> "Grid":
        return cls(config.learner.replicas, config.learner.shards, 0 if config.offline else config.actor.replicas, config.actor.tp,
                   config.placement == "colocated")

    @property
    def learners(self) -> int:
        return self.replicas * self.shards

    @property
    def actor_ranks(self) -> range:
        first = 0 if self.colocated else self.learners
        return range(first, first + self.actors * self.tp)

    @property
    def world(self) -> int:
        return max(self.learners, self.actor_ranks.stop)

    def role(self, rank: int) -> str:
        return "colocated" if self.colocated else "learner" if rank < self.learners else "actor"

    def lane(self, rank: int) -> int:
        """An actor's place in its engine."""
        return (rank - self.actor_ranks.start) % self.tp

    @property
    def leaders(self) -> list[int]:
        """The first rank of every engine, which receives its messages."""
        return list(self.actor_ranks)[::self.tp]

    def learner_rank(self, replica: int, shard: int) -> int:
        return replica * self.shards + shard

    def lane_ranks(self, lane: int) -> list[int]:
        return list(self.actor_ranks)[lane::self.tp]


@dataclass(frozen=True)
class Groups:
    """Everything made of process groups. Other modules receive these and never make their own."""
    mesh: DeviceMesh | None  # of the learners: (shard,) or (replicate, shard)
    shard_group: dist.ProcessGroup | None  # this learner's copy of the model
    streams: tuple[dist.ProcessGroup, ...]  # one a stream of the plan: its root and the actors of its lane
    lanes: dist.ProcessGroup | None  # the ranks of this actor's engine, if it has several
    checkpoint: dist.ProcessGroup | None = None  # of all learners, used by the thread that writes


def make_groups(grid: Grid, plan: TransferPlan | None, device: str, timeout_s: float) -> Groups:
    """Every rank calls this once, with an equal plan (None without actors): groups must be made by all ranks in one order."""
    limit = timedelta(seconds=timeout_s)  # DeviceMesh would give its own groups torch's 30 minutes
    ranks = torch.arange(grid.learners).view(grid.replicas, grid.shards)
    shard_groups = [dist.new_group(row.tolist(), timeout=limit) for row in ranks]
    replicate_groups = [dist.new_group(column.tolist(), timeout=limit) for column in ranks.T] if grid.replicas > 1 else []
    streams = tuple(dist.new_group(sorted({grid.learner_rank(stream.replica, stream.root), *grid.lane_ranks(stream.lane)}),
                                   timeout=limit) for stream in (plan.streams if plan else ()))
    engines = [dist.new_group(list(range(leader, leader + grid.tp)), timeout=limit) for leader in grid.leaders if grid.tp > 1]
    lanes = next((group for group in engines if dist.get_rank(group) >= 0), None)
    checkpoint = dist.new_group(list(range(grid.learners)), timeout=limit, backend="gloo")
    replica, shard = divmod(dist.get_rank(), grid.shards)
    if replica >= grid.replicas:
        return Groups(None, None, streams, lanes)
    if grid.replicas == 1:
        mesh = DeviceMesh.from_group(shard_groups[0], device, mesh_dim_names=("shard",))
    else:
        mesh = DeviceMesh.from_group([replicate_groups[shard], shard_groups[replica]], device, mesh=ranks,
                                     mesh_dim_names=("replicate", "shard"))
    return Groups(mesh, shard_groups[replica], streams, lanes, checkpoint)


def agree_on_plan(channel: Channel, config: Config, shapes: Shapes, layout: tuple[Layout, Shapes] | None) -> TransferPlan:
    """Build the transfer plan from what both sides say, and check by a handshake that every rank built the same one.

    `shapes` are this rank's parameters; `layout` is an actor's (layout, tensor shapes). Raises PublicationError on every rank,
    naming the parameter, if names, shapes or the compute type differ anywhere.
    """
    grid, rank, dtype = Grid.of(config), dist.get_rank(), config.model.dtype
    if rank == 0:
        channel.put("plan/table", json.dumps([dtype, sorted(shapes.items())]).encode())
    if rank in grid.actor_ranks[:grid.tp]:
        plain = {name: [[at.row0, at.row1, at.col0, at.col1, at.tensor, at.to_row, at.to_col] for at in places]
                 for name, places in layout[0].items()}
        channel.put(f"plan/layout/{grid.lane(rank)}", json.dumps([plain, layout[1]]).encode())
    their_dtype, table = json.loads(channel.fetch("plan/table", "the learner's parameter table"))
    theirs = {name: tuple(shape) for name, shape in table}
    different = next((name for name in sorted(theirs.keys() | shapes.keys()) if theirs.get(name) != shapes.get(name)), None)
    verdict = ""
    if different is not None:
        verdict = (f"{different}: {theirs.get(different, 'missing')} on the learner, "
                   f"{shapes.get(different, 'missing')} on rank {rank}")
    elif their_dtype != dtype:
        verdict = f"compute type {their_dtype} on the learner, {dtype} on rank {rank}"
    else:
        lanes = [json.loads(channel.fetch(f"plan/layout/{lane}", "the actors' layout")) for lane in range(grid.tp)]
        layouts = tuple({name: tuple(Landing(*place) for place in places) for name, places in lane[0].items()} for lane in lanes)
        targets = tuple({name: tuple(shape) for name, shape in lane[1].items()} for lane in lanes)
        itemsize = getattr(torch, dtype).itemsize
        limits = int(config.publish.bucket_mb * 1e6) // itemsize, config.publish.max_roots
        plan = make_plan(theirs, layouts, targets, (grid.replicas, grid.shards), limits)
        verdict = "plan " + plan.fingerprint()
    channel.put(f"plan/verdict/{rank}", verdict.encode())
    verdicts = [channel.fetch(f"plan/verdict/{other}", f"rank {other} to build its plan").decode() for other in range(grid.world)]
    if len(set(verdicts)) > 1 or not verdicts[0].startswith("plan "):
        bad = next((text for text in verdicts if not text.startswith("plan ")), "ranks computed different transfer plans")
        raise PublicationError(f"learner and actors do not fit together: {bad}")
    return plan


class Publisher:
    """One rank's side of every publication: `send` on learners, `arrived` and `receive` on actors, `exchange` where it is both."""

    def __init__(self, channel: Channel, plan: TransferPlan, groups: Groups, config: Config, device: torch.device):
        self.channel, self.plan, self.groups = channel, plan, groups
        self.grid, self.verify = Grid.of(config), config.publish.verify
        self.rank, self.device, self.dtype = dist.get_rank(), device, getattr(torch, config.model.dtype)
        self.names = sorted(plan.shapes)
        self.lane = self.grid.lane(self.rank) if self.rank in self.grid.actor_ranks else -1
        self.digest = Digest(device)
        self.bytes = sum(rows * columns for rows, columns in map(matrix_shape, plan.shapes.values())) * self.dtype.itemsize
        self.serial = device.type == "cuda"  # two communicators in flight on one GPU can deadlock
        self.staged = config.publish.mode == "staged"
        draining = config.actor.update_mode == "drain"  # what runs then ends within the generation limit, or the run does
        self.patience = channel.timeout_s + draining * config.rollout.generation_timeout_s
        self.streams = [number for number, group in enumerate(groups.streams) if dist.get_rank(group) >= 0]  # that this rank is in
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._acknowledged = -1  # version; this and what follows: staged
        self._to_come: deque[tuple[int, int, tuple[Piece, ...]]] = deque()  # (stream, turn, bucket)
        self._flying: deque[dist.Work] = deque()
        self._posted = self._wire_s = 0.0
        self.link_gb_s = self._measure_link()

    # -- learner ------------------------------------------------------------------------------------------------------

    def announce(self, version: int) -> None:
        """Learner rank 0: ask every engine to come to a step boundary."""
        for rank in self.grid.leaders:
            self.channel.push(f"control/{rank}", {"kind": "publish", "version": version})

    def send(self, version: int, shards: dict[str, Tensor]) -> dict[str, float]:
        """Send this learner's fp32 row shards as `version`; returns seconds by part, their `total`, and model `bytes`.

        Raises PublicationError on rank 0 if the actors' live tensors are not the learner's.
        """
        start = self._clock()
        self._wait_for_actors(version)
        if self.rank == 0 and version:
            self.channel.store.delete_key(f"ack/{version - 1}")  # everyone is past it: actors acknowledged, learners trained since
        seconds = {"wait": self._clock() - start} | self._transfer(shards, {})
        if self.verify:
            before = self._clock()
            self._report_shards(version, shards)
            if self.rank == 0:
                self._compare(version, seconds)
            seconds["verify"] = self._clock() - before
        return seconds | {"total": self._clock() - start, "bytes": self.bytes}

    def _fill(self, turn: int, buckets: dict[int, tuple[Piece, ...]], shards: dict[str, Tensor]) -> dict[int, Tensor]:
        """The buckets of this turn whose root this rank is, cast and flattened; owners hand their parts to the roots first."""
        replica, me = divmod(self.rank, self.grid.shards)
        buckets = {number: bucket for number, bucket in buckets.items() if self.plan.streams[number].replica == replica}
        roots = {number: self.plan.streams[number].root for number in buckets}
        if not self.plan.hands_off:
            return {number: self._cast(bucket, shards, self._buffer(number, turn % 2, bucket))
                    for number, bucket in buckets.items() if roots[number] == me}

        def owned(source: int, root: int) -> list[Piece]:
            return [piece for number, bucket in buckets.items() if roots[number] == root
                    for piece in bucket if piece.owner == source]

        everyone = range(self.grid.shards)
        outgoing = [owned(me, root) for root in everyone]
        incoming = [owned(source, me) for source in everyone]
        ours = [piece for pieces in outgoing for piece in pieces]
        arrived = [piece for pieces in incoming for piece in pieces]
        sent, received = self._cast(ours, shards, self._buffer(-1, 0, ours)), self._buffer(-1, 1, arrived)
        sizes = [[sum(piece.numel for piece in pieces) for pieces in side] for side in (incoming, outgoing)]
        dist.all_to_all_single(received, sent, *sizes, group=self.groups.shard_group)
        parts = dict(zip(arrived, received.split([piece.numel for piece in arrived]), strict=True))
        return {number: torch.cat([parts[piece] for piece in bucket], out=self._buffer(number, turn % 2, bucket))
                for number, bucket in buckets.items() if roots[number] == me}

    def _cast(self, pieces: tuple[Piece, ...] | list[Piece], shards: dict[str, Tensor], buffer: Tensor) -> Tensor:
        done = 0
        for piece in pieces:
            at = piece.landing
            first, _ = shard_rows(self.plan.shapes[piece.name][0], self.grid.shards, self.rank % self.grid.shards)
            source = shards[piece.name][at.row0 - first:at.row1 - first, at.col0:at.col1]
            buffer[done:done + piece.numel].view(source.shape).copy_(source)
            done += piece.numel
        return buffer

    def _report_shards(self, version: int, shards: dict[str, Tensor]) -> None:
        _, me = divmod(self.rank, self.grid.shards)
        digests = []
        for name in self.names:
            rows, columns = matrix_shape(self.plan.shapes[name])
            cast = matrix(shards[name]).to(self.dtype)
            digests.append(self.digest(cast, shard_rows(rows, self.grid.shards, me)[0], 0, columns))
        self.channel.push(f"digest/{version}", {"rank": self.rank, "side": "shard", "digests": torch.stack(digests).tolist()})

    def _compare(self, version: int, seconds: dict[str, float]) -> None:
        """Learner rank 0: hold every actor's live digests against the learner's, and tell the actors the verdict."""
        world = self.grid.learners + len(self.grid.actor_ranks)
        reports = {}
        for _ in range(world):
            report = self.channel.wait(f"digest/{version}", "digests of the published weights", self.patience)
            reports[report["side"], report["rank"]] = report
        for part in ("wire", "write"):  # the slowest actor's: a sender is done when its socket has taken the bytes
            seconds[part] = max(reports["live", rank][part] for rank in self.grid.actor_ranks)

        def summed(holders: list[tuple[str, int]], index: int) -> int:
            return sum(reports[holder]["digests"][index] for holder in holders) % (1 << 64)

        problems = []
        for index, name in enumerate(self.names):
            copies = [[("shard", self.grid.learner_rank(replica, shard)) for shard in range(self.grid.shards)]
                      for replica in range(self.grid.replicas)]
            copies += [[("live", leader + lane) for lane in lanes] for leader in self.grid.leaders
                       for lanes in self.plan.copies(name)]
            wanted = summed(copies[0], index)
            wrong = [holders for holders in copies if summed(holders, index) != wanted]
            problems += [f"{name} differs on rank {'+'.join(str(rank) for _, rank in holders)}" for holders in wrong]
        verdict = "; ".join(problems[:4])
        self.channel.put(f"verdict/{version}", verdict.encode())
        if self.channel.store.check([f"verdict/{version - 1}"]):
            self.channel.drop(f"verdict/{version - 1}")
        if verdict:
            raise PublicationError(f"publication of version {version} is not what was sent: {verdict}")

    # -- actor --------------------------------------------------------------------------------------------------------

    def arrived(self, version: int, idle: bool) -> bool:
        """At every step boundary from the announcement on: whether `receive` can be called now, the same on all lanes of an engine.

        Staged, slices arrive between these calls; an engine that is `idle` waits for them here.
        """
        if not self.staged:
            return True
        if self._acknowledged < version:
            self.channel.count(f"ack/{version}", 1)
            self._acknowledged, self._to_come = version, deque(self._incoming())
        if idle:
            self._wait_for_actors(version)
        if self._flying or (self._to_come and self._all_acknowledged(version)):
            self._receive_beside(idle)
        here = torch.tensor(not self._to_come and not self._flying, dtype=torch.int32)
        if self.groups.lanes is not None:  # a step in which lanes had different weights would be of no model
            dist.all_reduce(here, dist.ReduceOp.MIN, group=self.groups.lanes)
        return bool(here)

    def _receive_beside(self, wait: bool) -> None:
        """Enter the broadcasts, all of them at once and on a GPU one after the other, and take note of those that are through."""
        while self._to_come or self._flying:
            while self._to_come and not (self.serial and self._flying):
                number, turn, bucket = self._to_come.popleft()
                self._posted = self._posted if turn else time.perf_counter()
                self._flying.append(self._issue(number, self._buffer(number, turn, bucket)))
            if not (wait or self._flying[0].is_completed()):
                return
            self._flying.popleft().wait()  # raises what went wrong; on a GPU, orders the copy behind it
            self._wire_s = time.perf_counter() - self._posted

    def receive(self, version: int, tensors: dict[str, Tensor]) -> None:
        """At a step boundary, after `arrived`: overwrite the live `tensors` with `version`, and wait for the proof.

        Raises PublicationError if the digests do not agree; the weights must not be used then.
        """
        if not self.staged:
            self.channel.count(f"ack/{version}", 1)
            self._wait_for_actors(version)
        seconds = self._write_staged(tensors) if self.staged else self._transfer({}, tensors)
        if self.verify:
            self._report_live(version, tensors, seconds)
            self._hear_verdict(version)

    def _hear_verdict(self, version: int) -> None:
        verdict = self.channel.fetch(f"verdict/{version}", "the verdict on the published weights", self.patience).decode()
        if verdict:
            raise PublicationError(f"publication of version {version} is not what was sent: {verdict}")

    def _incoming(self) -> list[tuple[int, int, tuple[Piece, ...]]]:
        """(stream, turn, bucket) of all that this actor's lane gets, in the order of its sending."""
        return [(number, turn, stream.buckets[turn]) for turn in range(self.plan.rounds)
                for number, stream in enumerate(self.plan.streams) if stream.lane == self.lane and turn < len(stream.buckets)]

    def _write_staged(self, tensors: dict[str, Tensor]) -> dict[str, float]:
        """Write all staged buckets; returns the seconds that they were on the wire, beside decoding, and writing."""
        before, live = self._clock(), {name: matrix(tensor) for name, tensor in tensors.items()}
        for number, turn, bucket in self._incoming():
            _write(bucket, self._buffer(number, turn, bucket), live)
        return {"wire": self._wire_s, "write": self._clock() - before}

    def _report_live(self, version: int, tensors: dict[str, Tensor], seconds: dict[str, float]) -> None:
        digests = []
        for name in self.names:
            columns = matrix_shape(self.plan.shapes[name])[1]
            total = torch.zeros((), dtype=torch.int64, device=self.device)
            for at in self.plan.layouts[self.lane][name]:
                live = matrix(tensors[at.tensor])
                held = live[at.to_row:at.to_row + at.row1 - at.row0, at.to_col:at.to_col + at.col1 - at.col0]
                total += self.digest(held, at.row0, at.col0, columns)
            digests.append(total)
        self.channel.push(f"digest/{version}", {"rank": self.rank, "side": "live", "digests": torch.stack(digests).tolist(),
                                                **seconds})

    # -- both ---------------------------------------------------------------------------------------------------------

    def exchange(self, version: int, shards: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, float]:
        """Colocated, on every rank at the same point of the loop: `send` and `receive` in one, with the same proof and result."""
        start = self._clock()
        seconds = {"wait": 0.0} | self._transfer(shards, tensors)
        if self.verify:
            before = self._clock()
            self._report_shards(version, shards)
            self._report_live(version, tensors, seconds)
            if self.rank == 0:
                self._compare(version, seconds)
            self._hear_verdict(version)
            seconds["verify"] = self._clock() - before
        return seconds | {"total": self._clock() - start, "bytes": self.bytes}

    def _transfer(self, shards: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, float]:
        """All buckets of the streams that this rank is in, two turns in flight: a learner's `shards` out, an actor's `tensors` in.

        Returns the seconds casting (a hand-over to the roots included), waiting for the wire, and writing.
        """
        mine, live = ({name: matrix(tensor) for name, tensor in side.items()} for side in (shards, tensors))
        seconds, flying = {"cast": 0.0, "wire": 0.0, "write": 0.0}, []
        for turn in range(self.plan.rounds + 1):
            before = self._clock()
            buckets = {number: stream.buckets[turn] for number, stream in enumerate(self.plan.streams)
                       if turn < len(stream.buckets)}
            filled = self._fill(turn, buckets, mine) if shards else {}
            seconds["cast"] += self._clock() - before
            landed, flying = flying, []
            for number, bucket in buckets.items():
                if number in self.streams:
                    buffer = filled[number] if number in filled else self._buffer(number, turn % 2, bucket)
                    flying.append((number, bucket, *self._broadcast(number, buffer)))
            for number, bucket, buffer, work in landed:
                before = self._clock()
                work.wait()
                arrived = self._clock()
                if tensors and self.plan.streams[number].lane == self.lane:
                    _write(bucket, buffer, live)
                seconds["wire"] += arrived - before
                seconds["write"] += self._clock() - arrived
        return seconds

    def _wait_for_actors(self, version: int) -> None:
        """No rank enters a collective before every actor has come to its boundary."""
        wait_until(lambda: self._all_acknowledged(version), self.patience, f"all actors to acknowledge version {version}")

    def _all_acknowledged(self, version: int) -> bool:
        return self.channel.count(f"ack/{version}", 0) == len(self.grid.actor_ranks)

    def _buffer(self, number: int, slot: int, pieces: tuple[Piece, ...] | list[Piece]) -> Tensor:
        """Room for these elements of a stream, kept from one publication to the next: faults on fresh pages were 30 % of the
        link on a CPU. In place two slots take turns; staged, every bucket has its own."""
        size, kept = sum(piece.numel for piece in pieces), self._buffers.get((number, slot))
        if kept is None or len(kept) < size:
            kept = self._buffers[number, slot] = torch.empty(size, dtype=self.dtype, device=self.device)
        return kept[:size]

    @property
    def buffer_bytes(self) -> int:
        """Memory that publications keep beside the weights on this rank."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _issue(self, number: int, buffer: Tensor) -> dist.Work:
        stream = self.plan.streams[number]
        root = self.grid.learner_rank(stream.replica, stream.root)
        return dist.broadcast(buffer, root, self.groups.streams[number], async_op=True)

    def _broadcast(self, number: int, buffer: Tensor) -> tuple[Tensor, dist.Work]:
        work = self._issue(number, buffer)
        if self.serial:
            work.wait()
        return buffer, work

    def _clock(self) -> float:
        """Seconds, once the device has caught up: on a GPU work.wait() only orders streams."""
        if self.serial:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _measure_link(self) -> float:
        """GB/s at which the streams carry plain buffers with nothing else going on: the bound of `publish_wire_gb_s`.

        Every rank takes part; the streams of a lane share a model's bytes (at most 64 MB) twice over, two buffers in flight as
        in a publication. Four times; the fastest counts, as the first touches fresh memory and opens connections. A rank that is
        alone has no link: 0.
        """
        if self.grid.world == 1:
            return 0.0
        probe = min(self.bytes, LINK_PROBE_BYTES)
        share = -(-probe // sum(stream.lane == 0 for stream in self.plan.streams))
        mine = self.streams * 2
        buffers = [torch.zeros(share, dtype=torch.uint8, device=self.device) for _ in mine]
        best = 0.0
        for _ in range(4):
            dist.barrier()
            start = self._clock()
            for _, work in [self._broadcast(number, buffer) for number, buffer in zip(mine, buffers, strict=True)]:
                work.wait()
            dist.barrier()  # until the last receiver has it
            best = max(best, 2 * probe / (self._clock() - start) / 1e9)
        return best


def _write(bucket: tuple[Piece, ...], buffer: Tensor, live: dict[str, Tensor]) -> None:
    done = 0
    for piece in bucket:
        at = piece.landing
        place = live[at.tensor][at.to_row:at.to_row + at.row1 - at.row0, at.to_col:at.to_col + at.col1 - at.col0]
        place.copy_(buffer[done:done + piece.numel].view(place.shape))
        done += piece.numel
