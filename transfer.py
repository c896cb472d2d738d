"""Which bytes of which learner shard land where in which actor, and the digest that proves they did. Imports nothing of ours.

Every parameter is seen as a matrix [rows, columns] (a vector is [n, 1]). FSDP2 cuts it by rows into equal chunks; an actor holds
some rectangle of it, at some place of some tensor (a fused qkv, a tensor-parallel slice, a tied head). The plan is the list of
rectangles, each owned by one shard and landing at one place, and every destination element is written exactly once.

Destinations are *lanes*: tensor-parallel rank t of every actor replica. A lane's rectangles are carried by one or more *streams*,
each a broadcast from one root learner to all actors of the lane, in buckets. With TP 1 and at most `max_roots` shards each owner is
the root of its own stream, and nothing is gathered first. A 70B in bf16 is 141 GB: 8 roots x 400 Gb/s
send it in 0.35 s, one root takes 2.8 s.

Digest of a parameter, on bit patterns:  sum_i bits[i] * K1[i mod 2^18] * K2[i div 2^18]  mod 2^64,  i the element's global index,
odd random keys. Additive over shards and slices, and any single changed element changes it: the keys' product is odd, so it
annihilates no difference below 2^32. A guard against faults, not against adversaries.
"""

import functools
import hashlib
import json
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

KEYS = 1 << 18


@dataclass(frozen=True, slots=True)
class Landing:
    """Rows [row0, row1) x columns [col0, col1) of a parameter land at (to_row, to_col) of an actor's tensor."""
    row0: int
    row1: int
    col0: int
    col1: int
    tensor: str
    to_row: int = 0
    to_col: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a landing that one learner shard owns."""
    name: str
    owner: int
    landing: Landing

    @property
    def numel(self) -> int:
        return (self.landing.row1 - self.landing.row0) * (self.landing.col1 - self.landing.col0)


@dataclass(frozen=True, slots=True)
class Stream:
    """Broadcasts from learner (replica, root shard) to all actors of a lane, bucket after bucket."""
    lane: int
    replica: int
    root: int
    buckets: tuple[tuple[Piece, ...], ...]


Layout = dict[str, tuple[Landing, ...]]  # parameter -> where it lands in one lane
Shapes = dict[str, tuple[int, ...]]


def matrix(tensor: Tensor) -> Tensor:
    """A parameter as the plan sees it: [rows, columns], a view."""
    return tensor.view(matrix_shape(tuple(tensor.shape)))  # not -1: a shard may have no rows


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape[0], 1
    for size in shape[1:]:
        columns *= size
    return rows, columns


def same_layout(shapes: Shapes) -> Layout:
    """The layout of an actor whose tensors are the learner's parameters."""
    return {name: (Landing(0, rows, 0, columns, name),)
            for name, (rows, columns) in ((name, matrix_shape(shape)) for name, shape in shapes.items())}


def shard_rows(rows: int, shards: int, shard: int) -> tuple[int, int]:
    """Rows that an FSDP2 shard owns: chunks of ceil(rows / shards), the last ones short or empty."""
    size = -(-rows // shards)
    return min(shard * size, rows), min((shard + 1) * size, rows)


@dataclass(frozen=True)
class TransferPlan:
    """All streams of a publication, computed once; equal on every rank, which `fingerprint` lets them check."""
    shapes: Shapes
    layouts: tuple[Layout, ...]
    streams: tuple[Stream, ...]

    @property
    def rounds(self) -> int:
        return max((len(stream.buckets) for stream in self.streams), default=0)

    @functools.cached_property
    def hands_off(self) -> bool:
        """Whether some owner is not the root of its stream, and so must send its part to the root first."""
        return any(piece.owner != stream.root for stream in self.streams for bucket in stream.buckets for piece in bucket)

    def fingerprint(self) -> str:
        content = [[stream.lane, stream.replica, stream.root,
                    [[[piece.name, piece.owner, *_fields(piece.landing)] for piece in bucket] for bucket in stream.buckets]]
                   for stream in self.streams]
        return hashlib.sha256(json.dumps([sorted(self.shapes.items()), content]).encode()).hexdigest()

    def copies(self, name: str) -> list[list[int]]:
        """Sets of lanes that each hold the whole parameter once: one set of all lanes for a sliced parameter, every lane by itself
        for a norm, and in between where several lanes share a KV head."""
        holders: dict[tuple, list[int]] = {}
        for lane, layout in enumerate(self.layouts):
            holders.setdefault(tuple((at.row0, at.row1, at.col0, at.col1) for at in layout[name]), []).append(lane)
        return [list(lanes) for lanes in zip(*holders.values(), strict=True)]


def _fields(landing: Landing) -> list:
    return [landing.row0, landing.row1, landing.col0, landing.col1, landing.tensor, landing.to_row, landing.to_col]


def make_plan(shapes: Shapes, layouts: tuple[Layout, ...], targets: tuple[Shapes, ...], learner: tuple[int, int],
              limits: tuple[int, int]) -> TransferPlan:
    """Plan for `learner` = (replicas, shards), one layout and the tensors' shapes a lane, `limits` = (elements a bucket, roots).

    Asserts that every element of every actor tensor is written exactly once.
    """
    (replicas, shards), (bucket_elements, max_roots) = learner, limits
    lanes = len(layouts)
    per_lane = max(lanes, min(shards, max_roots)) // lanes
    streams = []
    for lane, (layout, target) in enumerate(zip(layouts, targets, strict=True)):
        _assert_written_once(shapes, layout, target)
        roots = [(lane * per_lane + index) % shards for index in range(per_lane)]
        for index, root in enumerate(roots):
            mine = [piece for name in sorted(shapes) for piece in _pieces(name, shapes[name], layout[name], shards)
                    if (piece.owner if piece.owner in roots else roots[piece.owner % per_lane]) == root]
            # Replicas of an HSDP learner take turns by stream, so that their network cards share the sending.
            number = lane * per_lane + index
            streams.append(Stream(lane, number % replicas, root, _buckets(mine, max(1, bucket_elements // per_lane))))
    _assert_covered(shapes, layouts)
    return TransferPlan(shapes, layouts, tuple(streams))


def _pieces(name: str, shape: tuple[int, ...], landings: tuple[Landing, ...], shards: int) -> list[Piece]:
    pieces = []
    for owner in range(shards):
        first, last = shard_rows(shape[0], shards, owner)
        for landing in landings:
            row0, row1 = max(first, landing.row0), min(last, landing.row1)
            if row0 < row1:
                part = Landing(row0, row1, landing.col0, landing.col1, landing.tensor,
                               landing.to_row + row0 - landing.row0, landing.to_col)
                pieces.append(Piece(name, owner, part))
    return pieces


def _buckets(pieces: list[Piece], limit: int) -> tuple[tuple[Piece, ...], ...]:
    """Cut pieces by rows into buckets of at most `limit` elements (one row may be longer), each ordered by owner."""
    buckets, bucket, filled = [], [], 0
    for piece in pieces:
        landing, width = piece.landing, piece.landing.col1 - piece.landing.col0
        row = landing.row0
        while row < landing.row1:
            rows = min(landing.row1 - row, max(0 if bucket else 1, (limit - filled) // width))
            if rows == 0:
                buckets.append(bucket)
                bucket, filled = [], 0
                continue
            part = Landing(row, row + rows, landing.col0, landing.col1, landing.tensor,
                           landing.to_row + row - landing.row0, landing.to_col)
            bucket.append(Piece(piece.name, piece.owner, part))
            filled += rows * width
            row += rows
    return tuple(tuple(sorted(bucket, key=lambda piece: piece.owner)) for bucket in [*buckets, bucket] if bucket)


def _assert_written_once(shapes: Shapes, layout: Layout, target: Shapes) -> None:
    assert layout.keys() == shapes.keys(), f"in the plan on one side only: {sorted(layout.keys() ^ shapes.keys())}"
    written: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name in target}
    for name, landings in layout.items():
        rows, columns = matrix_shape(shapes[name])
        for landing in landings:
            assert landing.row1 <= rows and landing.col1 <= columns, f"{name}: reads rows or columns that do not exist"
            height, width = landing.row1 - landing.row0, landing.col1 - landing.col0
            written[landing.tensor].append((landing.to_row, landing.to_row + height, landing.to_col, landing.to_col + width))
    for name, rectangles in written.items():
        rows, columns = matrix_shape(target[name])
        area = sum((bottom - top) * (right - left) for top, bottom, left, right in rectangles)
        overlap = any(a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]
                      for index, a in enumerate(rectangles) for b in rectangles[:index])
        inside = all(bottom <= rows and right <= columns for _, bottom, _, right in rectangles)
        assert area == rows * columns and inside and not overlap, f"{name}: not every element is written exactly once"


def _assert_covered(shapes: Shapes, layouts: tuple[Layout, ...]) -> None:
    """Different slices of a parameter must make it up without overlap, or the digests of its lanes do not add up to its own."""
    for name, shape in shapes.items():
        slices = {(at.row0, at.row1, at.col0, at.col1) for layout in layouts for at in layout[name]}
        area = sum((bottom - top) * (right - left) for top, bottom, left, right in slices)
        rows, columns = matrix_shape(shape)
        assert area == rows * columns, f"{name}: the lanes' slices hold {area} of its {rows * columns} elements"


class Digest:
    """The keys, and the digest of a rectangle of a parameter as a 0-dim int64 tensor (to be summed mod 2^64)."""

    def __init__(self, device: torch.device):
        self.dot = device.type == "cpu"  # eight times as fast there as product and sum; CUDA has no integer dot
        # On a CPU as many as torch converts with one thread: sides that prove together would wait for each other's threads.
        self.scratch = torch.empty(1 << 15 if self.dot else KEYS, dtype=torch.int64, device=device)
        draw = np.random.Generator(np.random.PCG64(70))
        self.low, self.high = (torch.from_numpy((draw.integers(0, 1 << 64, KEYS, np.uint64) | np.uint64(1)).view(np.int64))
                               .to(device) for _ in range(2))

    def __call__(self, values: Tensor, row0: int, col0: int, columns: int) -> Tensor:
        """`values` [rows, width] are what lies at (row0, col0) of a parameter with `columns` columns."""
        bits = values.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[values.element_size()])
        if bits.shape[1] == columns and bits.is_contiguous():
            return self._range(bits.view(-1), row0 * columns)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        step = max(1, len(self.scratch) // bits.shape[1])  # rows at once, so that the index tensor stays small
        for start in range(0, bits.shape[0], step):
            part = bits[start:start + step].long()
            rows = torch.arange(row0 + start, row0 + start + part.shape[0], device=bits.device)[:, None]
            index = rows * columns + torch.arange(col0, col0 + part.shape[1], device=bits.device)
            total += (part * self.low[index % KEYS] * self.high[index // KEYS]).sum()
        return total

    def _range(self, bits: Tensor, first: int) -> Tensor:
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        done = 0
        while done < len(bits):
            high, low = divmod(first + done, KEYS)
            rows = 0 if low or self.dot else min(64, (len(bits) - done) // KEYS)  # 64: 134 MB of products, one launch
            if rows:
                part = bits[done:done + rows * KEYS]
                total += ((part.view(rows, KEYS) * self.low).sum(1) * self.high[high:high + rows]).sum()
            else:
                part = bits[done:done + min(KEYS - low, len(self.scratch))]
                keys, wide = self.low[low:low + len(part)], self.scratch[:len(part)].copy_(part)
                total += (torch.dot(wide, keys) if self.dot else (wide * keys).sum()) * self.high[high]
            done += len(part)
        return total
