"""Publication: every byte lands where it should, and whatever does not is caught by name.

Ranks are real gloo processes. Learners hold row shards of random parameters; actors hold tensors of their own layout.
"""

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from ranks import TOY, spawn, spawn_ok

from settings import build
from transfer import Digest, Landing, make_plan, matrix, same_layout, shard_rows

SHAPES = {"embed.weight": (23, 8), "layer.q.weight": (8, 8), "layer.k.weight": (4, 8), "layer.o.weight": (8, 8),
          "norm.weight": (8,), "tiny.weight": (1, 8)}


def value(name: str, version: int) -> torch.Tensor:
    """The whole parameter of a version, the same on every rank."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)) * 100 + version)
    return torch.randn(SHAPES[name], generator=generator)


def layout_of(kind: str, lane: int):
    """(layout, tensor shapes) of one lane: unfused, or q and k fused; or two lanes of column and row slices."""
    if kind == "plain":
        return same_layout(SHAPES), dict(SHAPES)
    layout, targets = same_layout(SHAPES), dict(SHAPES)
    del targets["layer.q.weight"], targets["layer.k.weight"]
    if kind == "fused":
        layout["layer.q.weight"] = (Landing(0, 8, 0, 8, "layer.qk.weight", 0),)
        layout["layer.k.weight"] = (Landing(0, 4, 0, 8, "layer.qk.weight", 8),)
        return layout, targets | {"layer.qk.weight": (12, 8)}
    layout["layer.q.weight"] = (Landing(4 * lane, 4 * lane + 4, 0, 8, "layer.qk.weight", 0),)
    layout["layer.k.weight"] = (Landing(2 * lane, 2 * lane + 2, 0, 8, "layer.qk.weight", 4),)
    layout["layer.o.weight"] = (Landing(0, 8, 4 * lane, 4 * lane + 4, "layer.o.weight"),)
    return layout, targets | {"layer.qk.weight": (6, 8), "layer.o.weight": (8, 4)}


def expected(tensor: str, kind: str, lane: int, version: int) -> torch.Tensor:
    """What an actor must hold, written down without the plan."""
    if tensor == "layer.qk.weight":
        q, k = value("layer.q.weight", version), value("layer.k.weight", version)
        return torch.cat([q, k]) if kind == "fused" else torch.cat([q[4 * lane:4 * lane + 4], k[2 * lane:2 * lane + 2]])
    if tensor == "layer.o.weight" and kind == "tp2":
        return value(tensor, version)[:, 4 * lane:4 * lane + 4]
    return value(tensor, version)


def toy_config(replicas: int, shards: int, actors: int, tp: int, **publish):
    config = build(TOY | {"publish": publish, "collective_timeout_s": 30})
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, replicas=replicas, shards=shards),
                               actor=dataclasses.replace(config.actor, replicas=actors, tp=tp))


def shard_of(name: str, version: int, config, rank: int) -> torch.Tensor:
    shards = config.learner.shards
    return value(name, version)[slice(*shard_rows(SHAPES[name][0], shards, rank % shards))]


def set_up(rank: int, config, kind: str, shapes=None):
    from channel import open_channel
    from sync import Grid, Publisher, agree_on_plan, make_groups
    grid, channel = Grid.of(config), open_channel(rank, config.collective_timeout_s)
    lane = grid.lane(rank)
    layout = layout_of(kind, lane) if rank in grid.actor_ranks else None
    plan = agree_on_plan(channel, config, shapes or SHAPES, layout)
    return Publisher(channel, plan, make_groups(grid, plan, "cpu", 30), config, torch.device("cpu")), layout, lane


def publish_on(rank: int, grid: list[int], kind: str, publish: dict, fault: str = "", idle: bool = False) -> dict:
    """Two publications; actors compare with `expected` and may first suffer a fault between receipt and proof.

    Staged, the actors come by at boundaries, and in the second publication wait if they are `idle`.
    """
    config = toy_config(*grid, **publish)
    order = sorted(SHAPES, reverse=rank % 2 == 1)  # R7: parameters inserted in another order on some ranks
    publisher, layout, lane = set_up(rank, config, kind, {name: SHAPES[name] for name in order})
    kept: list[set[int]] = []  # addresses after each publication
    if layout is None:
        for version in range(2):
            if rank == 0:
                publisher.announce(version)
            report = publisher.send(version, {name: shard_of(name, version, config, rank) for name in order})
            kept.append({buffer.data_ptr() for buffer in publisher._buffers.values()})
        assert kept[1:] == kept[:-1], "a publication receives or casts into fresh memory"
        dist.barrier()  # rank 0 holds the store
        return report | {"buffers": publisher.buffer_bytes}
    live = {name: torch.full(shape, torch.nan) for name, shape in layout[1].items()}
    inner, old_norm = publisher._report_live, torch.full(SHAPES["norm.weight"], torch.nan)

    def faulty(version, tensors, seconds):
        if fault == "bit":
            tensors["layer.o.weight"].view(torch.int32)[5, 3] ^= 1
        if fault == "left out":
            tensors["norm.weight"].copy_(old_norm)
        if fault == "offset":
            tensors["embed.weight"].copy_(tensors["embed.weight"].roll(1, 0))
        inner(version, tensors, seconds)

    publisher._report_live = faulty
    for version in range(2):
        if rank in publisher.grid.leaders:  # who tells the other lanes: train.py's Inbox
            assert publisher.channel.wait(f"control/{rank}", "the announcement")["version"] == version
        before = {name: tensor.clone() for name, tensor in live.items()}
        boundaries = 0
        while not publisher.arrived(version, idle=version == 1 and idle):
            boundaries += 1
            time.sleep(1e-3)  # a step of the engine
        assert all(tensor.equal(before[name]) for name, tensor in live.items() if version), "live weights touched before the swap"
        publisher.receive(version, live)
        kept.append({buffer.data_ptr() for buffer in publisher._buffers.values()})
        for name, tensor in live.items():
            assert torch.equal(tensor, expected(name, kind, lane, version)), f"{name} of version {version}"
    assert kept[0] == kept[1], "a publication receives into fresh memory"
    dist.barrier()
    return {"buffers": publisher.buffer_bytes, "slice": sum(tensor.nbytes for tensor in live.values()), "boundaries": boundaries,
            "streams": len(publisher.plan.streams), "handoff": publisher.plan.hands_off}


@pytest.mark.parametrize(("grid", "kind", "publish", "streams", "handoff"), [
    pytest.param((1, 2, 1, 1), "plain", {}, 2, False, marks=pytest.mark.long),  # each owner is a root
    ((1, 3, 1, 1), "fused", {"bucket_mb": 1e-4, "max_roots": 2}, 2, True),  # more shards than roots, many buckets
    ((2, 1, 1, 2), "tp2", {"bucket_mb": 1e-4}, 2, False),  # two lanes, two HSDP replicas taking turns
])
def test_every_actor_tensor_equals_the_learners(grid, kind, publish, streams, handoff):
    """Proof 2: bit for bit after every publication, whatever the layout, the shards, the roots and the bucket size."""
    world = grid[0] * grid[1] + grid[2] * grid[3]
    results = spawn_ok(world, "test_publication:publish_on", list(grid), kind, publish)
    actor = results[-1]
    assert (actor["streams"], actor["handoff"]) == (streams, handoff)
    assert results[0]["bytes"] == 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values())


@pytest.mark.parametrize(("grid", "kind", "idle"), [
    pytest.param((1, 2, 1, 1), "fused", True, marks=pytest.mark.long), ((1, 1, 2, 2), "tp2", False)])
def test_staged_slices_arrive_beside_and_replace_the_live_ones_at_once(grid, kind, idle):
    """A torn read, lanes that swap at different steps, a digest of what was staged and not of what is live."""
    results = spawn_ok(grid[0] * grid[1] + grid[2] * grid[3], "test_publication:publish_on", list(grid), kind,
                       {"mode": "staged", "bucket_mb": 1e-4}, "", idle)
    for actor in results[grid[0] * grid[1]:]:
        assert actor["buffers"] == actor["slice"], "staging takes one more copy of the slice"
    boundaries = [actor["boundaries"] for actor in results[grid[0] * grid[1]:]]
    assert boundaries == [0] if idle else (boundaries[0] == boundaries[1] and boundaries[2] == boundaries[3]), "lanes disagree"


def exchange_on(rank: int, grid: list[int], kind: str, publish: dict, faulty: int = -1) -> None:
    """Two publications between colocated ranks; on rank `faulty` a bit flips between receipt and proof of the second."""
    config = dataclasses.replace(toy_config(*grid, **publish), placement="colocated")
    publisher, layout, lane = set_up(rank, config, kind)
    live = {name: torch.full(shape, torch.nan) for name, shape in layout[1].items()}
    inner = publisher._report_live

    def flip(version, tensors, seconds):
        if version == 1 and rank == faulty:
            tensors["layer.o.weight"].view(torch.int32)[5, 3] ^= 1
        inner(version, tensors, seconds)

    publisher._report_live = flip
    for version in range(2):
        publisher.exchange(version, {name: shard_of(name, version, config, rank) for name in SHAPES}, live)
        for name, tensor in live.items():
            assert torch.equal(tensor, expected(name, kind, lane, version)), f"{name} of version {version}"
    dist.barrier()


COLOCATED = [((1, 1, 1, 1), "fused", {}), ((1, 2, 2, 1), "plain", {"bucket_mb": 1e-4}), ((1, 2, 1, 2), "tp2", {}),
             ((2, 2, 2, 2), "tp2", {"bucket_mb": 1e-4, "max_roots": 1})]


@pytest.mark.parametrize(("grid", "kind", "publish"), [
    COLOCATED[2], *(pytest.param(*case, marks=pytest.mark.long) for case in (COLOCATED[0], COLOCATED[1], COLOCATED[3]))])
def test_colocated_ranks_publish_to_each_other(grid, kind, publish):
    """A root that also receives: each rank's engine holds what the shards of all ranks say, and a fault on any is found."""
    spawn_ok(grid[0] * grid[1], "test_publication:exchange_on", list(grid), kind, publish)


@pytest.mark.long
def test_a_fault_on_a_colocated_rank_is_caught_and_named():
    for side in spawn(2, "test_publication:exchange_on", [1, 2, 2, 1], "plain", {}, 1):
        assert side["exit"] != 0 and "PublicationError" in side["stderr"]
        assert "layer.o.weight differs on rank 1" in side["stderr"]


def test_in_place_takes_two_buckets_a_side():
    """DESIGN 6: extra memory of at most 2 buckets on learner and actor alike, and none anew for each publication."""
    learner, actor = spawn_ok(2, "test_publication:publish_on", [1, 1, 1, 1], "plain", {"bucket_mb": 1e-4})
    assert 100 < learner["buffers"] <= 200 and 100 < actor["buffers"] <= 200


@pytest.mark.long
@pytest.mark.parametrize("grid", [(1, 1, 2, 1), (1, 2, 2, 1), (2, 2, 1, 1), (1, 2, 1, 2), (1, 4, 1, 2)])
@pytest.mark.parametrize("publish", [{}, {"bucket_mb": 1e-4}, {"bucket_mb": 1e-4, "max_roots": 1},
                                     {"bucket_mb": 1e-4, "mode": "staged"}])
def test_every_grid(grid, publish):
    kind = "tp2" if grid[3] == 2 else "fused"
    spawn_ok(grid[0] * grid[1] + grid[2] * grid[3], "test_publication:publish_on", list(grid), kind, publish)


@pytest.mark.parametrize(("fault", "name"), [
    ("bit", "layer.o.weight"), *(pytest.param(*case, marks=pytest.mark.long) for case in (
        ("left out", "norm.weight"), ("offset", "embed.weight")))])
@pytest.mark.parametrize("mode", ["in_place", pytest.param("staged", marks=pytest.mark.long)])
def test_a_fault_is_caught_and_named(fault, name, mode):
    """One bit flipped in a live weight, one parameter left out, one at a wrong offset: the run stops, naming the parameter."""
    learner, actor = spawn(2, "test_publication:publish_on", [1, 1, 1, 1], "plain", {"mode": mode}, fault)
    for side in (learner, actor):
        assert side["exit"] != 0
        assert "PublicationError" in side["stderr"] and f"{name} differs on rank 1" in side["stderr"]
        assert not any(other in side["stderr"].split("PublicationError")[-1] for other in SHAPES if other != name)


def disagree(rank: int, what: str) -> None:
    config = toy_config(1, 1, 1, 1)
    shapes = dict(SHAPES)
    if rank == 1 and what == "shape":
        shapes["layer.k.weight"] = (8, 4)
    if rank == 1 and what == "name":
        shapes["layer.kk.weight"] = shapes.pop("layer.k.weight")
    if rank == 1 and what == "dtype":
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))
    set_up(rank, config, "plain", shapes)


@pytest.mark.parametrize(("what", "message"), [
    ("shape", "layer.k.weight"), pytest.param("name", "layer.k.weight", marks=pytest.mark.long),
    pytest.param("dtype", "compute type", marks=pytest.mark.long)])
def test_a_mismatch_fails_on_both_sides(what, message):
    """Names, shapes or types that differ would write weights into the wrong place; both sides say which, before any broadcast."""
    for side in spawn(2, "test_publication:disagree", what):
        assert side["exit"] != 0
        assert "PublicationError" in side["stderr"] and message in side["stderr"]


def test_plan_refuses_a_layout_that_leaves_a_gap_or_writes_twice():
    layout, targets = layout_of("fused", 0)
    for broken in ({"layer.k.weight": (Landing(0, 4, 0, 8, "layer.qk.weight", 7),)},
                   {"layer.k.weight": (Landing(0, 3, 0, 8, "layer.qk.weight", 8),)}):
        with pytest.raises(AssertionError, match=r"layer\.qk\.weight"):
            make_plan(SHAPES, (layout | broken,), (targets,), (1, 2), (1 << 20, 8))


def test_plan_of_the_70b_covers_every_element_once():
    """TP 8, 40 shards: 64 rectangles a matrix, every row of every lane exactly once, buckets within their limit."""
    shapes = {"down.weight": (8192, 28672), "up.weight": (28672, 8192), "norm.weight": (8192,)}
    lanes = [{"down.weight": (Landing(0, 8192, 3584 * t, 3584 * t + 3584, "down.weight"),),
              "up.weight": (Landing(3584 * t, 3584 * t + 3584, 0, 8192, "up.weight"),),
              "norm.weight": (Landing(0, 8192, 0, 1, "norm.weight"),)} for t in range(8)]
    targets = {"down.weight": (8192, 3584), "up.weight": (3584, 8192), "norm.weight": (8192,)}
    plan = make_plan(shapes, tuple(lanes), (targets,) * 8, (1, 40), (32 << 20, 8))
    assert len(plan.streams) == 8 and plan.hands_off
    for stream in plan.streams:
        pieces = [piece for bucket in stream.buckets for piece in bucket]
        assert all(sum(piece.numel for piece in bucket) <= 32 << 20 for bucket in stream.buckets)
        for name, columns in (("down.weight", 3584), ("up.weight", 8192), ("norm.weight", 1)):
            rows = sorted((piece.landing.row0, piece.landing.row1) for piece in pieces if piece.name == name)
            first, last = lanes[stream.lane][name][0].row0, lanes[stream.lane][name][0].row1
            assert rows[0][0] == first and rows[-1][1] == last
            assert all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False)), "gap or overlap"
            owners = {piece.owner for piece in pieces if piece.name == name}
            assert all(shard_rows(shapes[name][0], 40, owner)[0] < last for owner in owners) and columns


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_digest_is_the_stated_sum_and_additive_over_shards_and_slices(dtype):
    """The formula in Python integers; row shards and column slices add up to the whole; one changed element is seen."""
    digest, tensor = Digest(torch.device("cpu")), torch.randn(37, 11).to(dtype)
    low, high = digest.low.tolist(), digest.high.tolist()
    bits = tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()]).flatten().tolist()
    naive = sum(bit * low[i % (1 << 18)] * high[i >> 18] for i, bit in enumerate(bits)) % (1 << 64)

    def of(row0, row1, col0, col1, source=tensor):
        return int(digest(source[row0:row1, col0:col1], row0, col0, 11)) % (1 << 64)

    assert of(0, 37, 0, 11) == naive
    assert sum(of(a, b, 0, 11) for a, b in ((0, 5), (5, 30), (30, 37))) % (1 << 64) == naive
    assert sum(of(0, 37, a, b) for a, b in ((0, 4), (4, 11))) % (1 << 64) == naive
    for row, column in ((0, 0), (36, 10), (17, 3)):
        changed = tensor.clone()
        changed[row, column] = changed[row, column].nextafter(torch.tensor(9.0)) if dtype == torch.float32 else 3.0
        assert of(0, 37, 0, 11, changed) != naive


def test_digest_beyond_one_key_block():
    """Elements past 2^18 take the next high key, on both code paths."""
    digest, tensor = Digest(torch.device("cpu")), torch.randn(700, 1000)
    whole = int(digest(matrix(tensor), 0, 0, 1000)) % (1 << 64)
    parts = sum(int(digest(tensor[:, a:b], 0, a, 1000)) for a, b in ((0, 300), (300, 1000))) % (1 << 64)
    swapped = tensor.clone()
    swapped[0], swapped[699] = tensor[699], tensor[0]
    digest.dot = False  # as on a GPU: whole rows of keys at once, ragged ends by themselves
    rest = sum(int(digest(tensor[a:b], a, 0, 1000)) for a, b in ((0, 7), (7, 600), (600, 700))) % (1 << 64)
    assert parts == whole == int(digest(matrix(tensor), 0, 0, 1000)) % (1 << 64) == rest
    assert int(digest(swapped, 0, 0, 1000)) % (1 << 64) != whole
