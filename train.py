"""Who does what, when: the roles and the loop.

    torchrun --nproc-per-node 2 train.py configs/toy.yaml [section.key=value ...]

Ranks 0...L-1 learn, the others act (`placement=split`), or every rank does both in turn (`colocated`: one process is enough).
Rank 0 also directs (director.py): it releases prompt groups through the gate, collects finished ones, assigns samples to learner
ranks, and after each optimizer step announces the publication. At max_staleness 0 actors idle while the learner works and the other
way round; at k the groups of steps up to s + k are already out while step s trains. The loop is the same, and it is the same
colocated: there a learner that waits for work lets its engine turn (rollout.py).

    rank 0    release -> control/<leader>        <- headers            -> work/<learner>           announce -> control/<leader>
    actor     admit, decode, grade, put payload, push header                                        receive, verify
    learner                                         fetch payloads, forward, backward, optimizer    send, verify
"""

import os
import sys
import time
from contextlib import ExitStack
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # the side that waits must not spin on the other's cores; read at import
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # but some 20 us, in which the next parallel loop comes: a fifth of a decode step
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for what is 2 MB or more: 3 to 8 % of an engine's products on a CPU

import torch
import torch.distributed as dist

from actor import Engine
from channel import open_channel
from config import Config, ConfigError
from data import Rollout, unpack_group
from director import Director
from launch import join, load_prompts, make_ledger, prepare
from learner import Learner, Sample
from ledger import Ledger
from model import parameter_shapes
from parallel import Lane
from plan import place
from preference import train_pairs
from resume import Checkpoints, version_of
from reward import Grader
from rollout import Worker
from settings import help_text, parse
from sync import Grid, Publisher, agree_on_plan, make_groups
from watch import Watch


class Roles(NamedTuple):
    """What one rank is: a learner, an actor (`worker`), or colocated both; rank 0 directs as well."""
    publisher: Publisher
    ledger: Ledger
    learner: Learner | None
    worker: Worker | None
    director: Director | None


def run_learner(roles: Roles, first: int) -> None:
    """Train on what the director assigns, publish, report, save. Rank 0 has the director and acts for it in between."""
    publisher, ledger, learner, worker, director = roles
    config, channel, rank = learner.config, publisher.channel, publisher.rank
    saver = Checkpoints(config.run_dir, config.checkpoint.keep, publisher.groups.checkpoint)
    published = publish(roles, first)
    if director:
        director.started(published)
    ledger.account()
    for step in range(first, config.steps):
        if director:
            judge(learner, director, ledger)
        with ledger.span("wait_rollouts"):
            if director:
                director.assign()
            work, updates, rollouts = take_work(roles)
        if worker:
            worker.engine.release()
        credit(roles, [batch for batches in updates for batch in batches])
        with ledger.span("forward"):  # its first moment: neighbours of one kind are one bar of the trace
            for group in {group for batches in work["minibatches"] for batch in batches for group, number in batch if number == 0}:
                ledger.flow("f", group)
        report = {"rank": rank, "train": learner.train(updates, step, ledger), "memory": learner.memory()}
        report["publish"] = publish(roles, step + 1)
        channel.push("reports", report | {"account": ledger.account(), "events": ledger.events()})
        if director:
            with ledger.span("report"):
                director.finish(rollouts)
        with ledger.span("checkpoint"):
            saver.poll()
            if work["checkpoint"]:
                saver.save(step + 1, learner.state(), *(director.state() if director else (None, {})))
            if director and config.export.every and (step + 1) % config.export.every == 0:
                director.save(learner, f"step-{step + 1}")
    saver.wait()
    if not director:
        take_work(roles)
        return
    judge(learner, director, ledger)
    with ledger.span("checkpoint"):
        director.save(learner, "model")
    director.stop()


def take_work(roles: Roles) -> tuple[dict, list, dict[int, list[Rollout]]]:
    """What rank 0 assigns, its samples as [update][micro-batch], and the groups they are of. Colocated, the engine runs meanwhile.

    Weights that rank 0 saves before are gathered, which takes every learner.
    """
    config, channel = roles.learner.config, roles.publisher.channel
    patience = 2 * config.rollout.generation_timeout_s + config.collective_timeout_s  # an evaluation, then the groups
    while True:
        if roles.worker and not roles.director:
            roles.worker.run("work")
        work = channel.wait(f"work/{roles.publisher.rank}", "rank 0 to assign samples", patience)
        if "save" not in work:
            break
        for _ in roles.learner.full_tensors():
            pass
    entries = [entry for batches in work["minibatches"] for batch in batches for entry in batch]
    rollouts = {group: unpack_group(channel.fetch(f"payload/{group}", f"the payload of group {group}"))
                for group in sorted({group for group, _ in entries})}

    def sample(group: int, number: int) -> Sample:
        rollout = rollouts[group][number]
        return Sample(rollout.tokens, rollout.num_prompt, rollout.logprobs)

    return work, [[[sample(*entry) for entry in batch] for batch in batches] for batches in work["minibatches"]], rollouts


def credit(roles: Roles, batches: list[list[Sample]]) -> None:
    """Score the samples here, form their rewards and advantages on rank 0, and each token's here again."""
    learner, channel, rank, director = roles.learner, roles.publisher.channel, roles.publisher.rank, roles.director
    found = learner.score(batches, roles.ledger)
    with roles.ledger.span("wait_rollouts"):
        if learner.config.late_rewards:
            channel.push("scores", {"rank": rank, "found": found})
        if director:
            director.credit()
        credits = channel.wait(f"credit/{rank}", "rank 0 to form advantages")["credits"]
    samples = [sample for batch in batches for sample in batch]
    for sample, (reward, advantage, weight) in zip(samples, credits, strict=True):
        sample.reward, sample.advantage, sample.weight = reward, advantage, weight
    learner.credit(samples)


def publish(roles: Roles, version: int) -> dict[str, float]:
    """Send the weights as `version`; returns the publication's seconds by part."""
    publisher, ledger, learner, worker, director = roles
    arrows = [(version, f"weights to rank {actor}") for actor in publisher.grid.actor_ranks if director]
    with ledger.span("optimizer"):  # its last moment
        for arrow in arrows:
            ledger.flow("s", *arrow)
    with ledger.span("publish"):
        for arrow in arrows:
            ledger.flow("t", *arrow)
        if worker:
            return worker.exchange(version, learner.shards())
        if director:
            publisher.announce(version)
        return publisher.send(version, learner.shards())


def judge(learner: Learner, director: Director, ledger: Ledger) -> None:
    """Evaluate the current version if it is due, and keep it if it is the best."""
    if not director.evaluates:
        return
    with ledger.span("evaluate"):
        best = director.evaluate()
    if best and learner.config.eval.keep_best:
        with ledger.span("checkpoint"):
            director.save(learner, "best")


def run(config: Config, stack: ExitStack) -> None:
    """One rank's whole life. What a user can get wrong is checked before the first process group, then `stack` gets the watch."""
    if config.placement == "auto":
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        world, local = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        config, why = place(config, world, device, local)
        if os.environ.get("RANK", "0") == "0":
            print(why, flush=True)
    start = prepare(config)
    if config.offline:
        train_pairs(config, start, stack)
        return
    rank, shape, encoder, device = start.rank, start.shape, start.encoder, start.device
    grid, ledger = Grid.of(config), make_ledger(config, device)
    prompts = load_prompts(config, start) if rank == 0 else None
    engine = grader = None
    if rank in grid.actor_ranks:
        engine = Engine(config, shape, encoder.vocab, device, ledger, Lane(grid.lane(rank), grid.tp))
        if rank in grid.leaders:
            grader = Grader(config.reward)
            grader.wait_ready()
    join(config, device)
    stack.enter_context(Watch(config, ledger))
    channel = open_channel(rank, config.collective_timeout_s)
    ledger.follow(channel, rank, dist.get_world_size())
    live = {name: tuple(weight.shape) for name, weight in engine.weights().items()} if engine else {}
    plan = agree_on_plan(channel, config, parameter_shapes(shape), (engine.runner.layout, live) if engine else None)
    groups = make_groups(grid, plan, device.type, config.collective_timeout_s)
    publisher = Publisher(channel, plan, groups, config, device)
    learner = worker = director = None
    if rank < grid.learners:
        learner = Learner(config, shape, encoder.vocab, groups.mesh, device)
        if start.checkpoint:
            learner.restore(start.checkpoint, groups.checkpoint)
    if engine:
        engine.connect(groups.lanes)  # last, as the pool takes its share of what is free
        pool, longest = engine.scheduler.capacity, engine.full_length_sequences
        print(f"rank {rank}: {grid.role(rank)}, KV pool of {pool} tokens = {longest} longest sequences", flush=True)
        worker = Worker(config, engine, encoder, publisher, grader)
    if rank == 0:
        director = Director(config, start, publisher, prompts, ledger)
        director.worker = worker
    if learner:
        run_learner(Roles(publisher, ledger, learner, worker, director), version_of(start.checkpoint))
    else:
        worker.run("stop")
    if grader:
        grader.close()
    dist.barrier()  # rank 0 holds the store: it leaves last
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    """Exit status: 0 done, 1 the run failed (one line for what is foreseen), 2 the config is wrong, 130 interrupted."""
    if {"--help", "-h"} & set(argv):
        print(help_text())
        return 0
    rank = int(os.environ.get("RANK", 0))
    try:
        with ExitStack() as stack:
            run(parse(argv), stack)
    except ConfigError as error:
        if rank:
            time.sleep(3.0)  # where all fail alike, rank 0's exit ends this one before it repeats the message
        print(f"config error: {error}", file=sys.stderr, flush=True)
        return 2
    except (TimeoutError, dist.DistError) as error:  # later ones are the watch's
        print(f"rank {rank} stopped while the ranks met: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # torch's store and gloo threads can abort the interpreter's own teardown of a finished run
