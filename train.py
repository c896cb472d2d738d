"""Who does what, when: the roles and the loop.

    torchrun --nproc-per-node 2 train.py configs/toy.yaml [section.key=value ...]

Ranks 0...L-1 learn, the others act (`placement=split`). Rank 0 also directs (director.py): it releases prompt groups through the
gate, collects finished ones, assigns samples to learner ranks, and after each optimizer step announces the publication. At
max_staleness 0 actors idle while the learner works and the other way round; at k the groups of steps up to s + k are already out
while step s trains. The loop is the same.

    rank 0    release -> control/<leader>        <- headers            -> work/<learner>           announce -> control/<leader>
    actor     admit, decode, grade, put payload, push header                                        receive, verify
    learner                                         fetch payloads, forward, backward, optimizer    send, verify
"""

import json
import os
import sys
import time
from contextlib import ExitStack

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # the side that waits must not spin on the other's cores; read at import
os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # but some 20 us, in which the next parallel loop comes: a fifth of a decode step
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages for what is 2 MB or more: 3 to 8 % of an engine's products on a CPU

import torch
import torch.distributed as dist

from actor import Engine
from channel import Channel, open_channel
from config import Config, ConfigError
from data import Detokenizer, Encoder, Rollout, pack_group, unpack_group
from director import Director
from launch import join, load_prompts, make_ledger, prepare
from learner import Learner, Sample
from ledger import Ledger
from model import parameter_shapes
from parallel import Lane
from preference import train_pairs
from resume import Checkpoints, version_of
from reward import Grader, total
from scheduler import Request
from settings import help_text, parse
from sync import Grid, Publisher, agree_on_plan, make_groups
from watch import Watch


class Inbox:
    """An engine's messages. Its leader takes them off the queue and tells the other lanes, so that all act in the same step."""

    def __init__(self, publisher: Publisher):
        self.channel, self.rank, self.group = publisher.channel, publisher.rank, publisher.groups.lanes
        self.leader = publisher.rank in publisher.grid.leaders
        self.source = self.rank - (self.rank - publisher.grid.learners) % publisher.grid.tp

    def pop(self) -> dict | None:
        """The next message, or None; with several lanes, a call of all of them."""
        message = self.channel.pop(f"control/{self.rank}") if self.leader else None
        if self.group is None:
            return message
        data = json.dumps(message).encode() if message else b""
        size = torch.tensor(len(data))
        dist.broadcast(size, self.source, self.group)
        if not size:
            return None
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.leader else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(text, self.source, self.group)
        return json.loads(text.numpy().tobytes())


def run_actor(config: Config, engine: Engine, encoder: Encoder, publisher: Publisher, grader: Grader | None) -> None:
    """Decode what arrives, grade it beside, take new weights at step boundaries, until told to stop.

    Every lane of an engine runs this; only the leader has a grader and sends groups.
    """
    channel, ledger, inbox = publisher.channel, engine.ledger, Inbox(publisher)
    groups: dict[int, tuple[dict, list[Request]]] = {}  # group -> its prompt message, its finished samples
    coming: int | None = None  # a version that was announced and is not live
    while True:
        idle = engine.scheduler.idle
        with ledger.span("wait_prompts" if idle else "exchange"):
            message, graded = inbox.pop(), grader.poll() if grader else []
            if idle and not message and not graded:
                time.sleep(1e-3)
        if graded:
            with ledger.span("exchange"):
                channel.push("headers", [send_payload(config, channel, groups.pop(group), parts, error) | {"rank": publisher.rank}
                                         for group, parts, error in graded])
        if message is None:
            for request in engine.step():
                prompt, done = groups[request.group]
                done.append(request)
                if len(done) == prompt["samples"] and grader:
                    with ledger.span("exchange"):
                        grade_group(encoder, grader, prompt, done)
        elif message["kind"] == "prompts":
            with ledger.span("exchange"):
                for prompt in message["prompts"]:
                    if grader:
                        ledger.flow("t", prompt["group"])
                    groups[prompt["group"]] = (prompt, [])
                    engine.scheduler.add([make_request(config, encoder, prompt, number) for number in range(prompt["samples"])])
        elif message["kind"] == "publish":
            coming = message["version"]
            engine.scheduler.announce()
        else:
            return
        if coming is not None:
            with ledger.span("publish"):
                if not (publisher.arrived(coming, engine.scheduler.idle) and engine.scheduler.may_swap):
                    continue
                publisher.receive(coming, engine.weights())
                engine.publish(coming)
                ledger.flow("f", coming, f"weights to rank {publisher.rank}")
                coming = None
            ledger.beside("grading", grader.take_seconds() if grader else 0.0)
            channel.push("accounts", {"rank": publisher.rank, "account": ledger.account(), "events": ledger.events(),
                                      "buffer_bytes": publisher.buffer_bytes, **engine.take_counters()})


def make_request(config: Config, encoder: Encoder, prompt: dict, number: int) -> Request:
    """One sample of a prompt message."""
    watch = Detokenizer(encoder.tokenizer, encoder.stop).push if encoder.stop else None
    return Request(prompt["group"], number, list(prompt["ids"]), config.rollout.max_new_tokens, prompt["temperature"],
                   encoder.stop_ids, prompt["min_version"], watch=watch)


def grade_group(encoder: Encoder, grader: Grader, prompt: dict, done: list[Request]) -> None:
    """Hand a finished group to the grading processes, as text and as the sampled ids."""
    done.sort(key=lambda request: request.sample)
    responses = [request.tokens[request.num_prompt:] for request in done]
    texts = [encoder.decode(response) for response in responses]
    if isinstance(prompt["prompt"], list):
        texts = [[{"role": "assistant", "content": text}] for text in texts]
    grader.submit(prompt, texts, responses)


def send_payload(config: Config, channel: Channel, group: tuple[dict, list[Request]], parts: list, error: str) -> dict:
    """Put a graded group's tokens into the store (training only) and return its header."""
    prompt, done = group
    if prompt["group"] >= 0:
        channel.put(f"payload/{prompt['group']}", pack_group(
            [Rollout(request.tokens, request.num_prompt, request.logprobs, request.versions) for request in done]))
    return {
        "group": prompt["group"], "row": prompt["row"], "parts": parts, "error": error,
        "rewards": [total([part[number] for part in parts], config.reward.weights) for number in range(len(done))],
        "lengths": [[len(request.tokens), request.num_generated] for request in done],
        "oldest": min((version for request in done for version in request.versions), default=prompt["min_version"]),
        "reasons": [request.finish_reason for request in done]}


def run_learner(learner: Learner, publisher: Publisher, ledger: Ledger, director: Director | None, first: int) -> None:
    """Train on what the director assigns, publish, report, save. Rank 0 has the director and acts for it in between."""
    config, channel, rank = learner.config, publisher.channel, publisher.rank
    saver = Checkpoints(config.run_dir, config.checkpoint.keep, publisher.groups.checkpoint)
    if director:
        publisher.announce(first)
    published = publisher.send(first, learner.shards())
    if director:
        director.started(published)
    ledger.account()
    for step in range(first, config.steps):
        if director:
            judge(learner, director, ledger)
        with ledger.span("wait_rollouts"):
            if director:
                director.assign()
            work, updates, rollouts = take_work(learner, channel, rank)
        credit(learner, publisher, director, [batch for batches in updates for batch in batches], ledger)
        with ledger.span("forward"):  # its first moment: neighbours of one kind are one bar of the trace
            for group in {group for batches in work["minibatches"] for batch in batches for group, number in batch if number == 0}:
                ledger.flow("f", group)
        report = {"rank": rank, "train": learner.train(updates, step, ledger), "memory": learner.memory()}
        report["publish"] = publish(publisher, learner, director, step + 1, ledger)
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
        take_work(learner, channel, rank)
        return
    judge(learner, director, ledger)
    with ledger.span("checkpoint"):
        director.save(learner, "model")
    director.close()
    for other in range(1, publisher.grid.learners):
        channel.push(f"work/{other}", {"minibatches": []})
    for leader in publisher.grid.leaders:
        channel.push(f"control/{leader}", {"kind": "stop"})


def take_work(learner: Learner, channel: Channel, rank: int) -> tuple[dict, list, dict[int, list[Rollout]]]:
    """What rank 0 assigns, its samples as [update][micro-batch], and the groups they are of.

    Weights that rank 0 saves before are gathered, which takes every learner.
    """
    config = learner.config
    patience = 2 * config.rollout.generation_timeout_s + config.collective_timeout_s  # an evaluation, then the groups
    while "save" in (work := channel.wait(f"work/{rank}", "rank 0 to assign samples", patience)):
        for _ in learner.full_tensors():
            pass
    entries = [entry for batches in work["minibatches"] for batch in batches for entry in batch]
    rollouts = {group: unpack_group(channel.fetch(f"payload/{group}", f"the payload of group {group}"))
                for group in sorted({group for group, _ in entries})}

    def sample(group: int, number: int) -> Sample:
        rollout = rollouts[group][number]
        return Sample(rollout.tokens, rollout.num_prompt, rollout.logprobs)

    return work, [[[sample(*entry) for entry in batch] for batch in batches] for batches in work["minibatches"]], rollouts


def credit(learner: Learner, publisher: Publisher, director: Director | None, batches: list[list[Sample]], ledger: Ledger) -> None:
    """Score the samples here, form their rewards and advantages on rank 0, and each token's here again."""
    channel, rank = publisher.channel, publisher.rank
    found = learner.score(batches, ledger)
    with ledger.span("wait_rollouts"):
        if learner.config.late_rewards:
            channel.push("scores", {"rank": rank, "found": found})
        if director:
            director.credit()
        credits = channel.wait(f"credit/{rank}", "rank 0 to form advantages")["credits"]
    samples = [sample for batch in batches for sample in batch]
    for sample, (reward, advantage, weight) in zip(samples, credits, strict=True):
        sample.reward, sample.advantage, sample.weight = reward, advantage, weight
    learner.credit(samples)


def publish(publisher: Publisher, learner: Learner, director: Director | None, version: int, ledger: Ledger) -> dict[str, float]:
    """Send the weights as `version`; returns the publication's seconds by part."""
    arrows = [(version, f"weights to rank {actor}") for actor in publisher.grid.actor_ranks if director]
    with ledger.span("optimizer"):  # its last moment
        for arrow in arrows:
            ledger.flow("s", *arrow)
    with ledger.span("publish"):
        for arrow in arrows:
            ledger.flow("t", *arrow)
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
    start = prepare(config)
    if config.offline:
        train_pairs(config, start, stack)
        return
    rank, shape, encoder, device = start.rank, start.shape, start.encoder, start.device
    grid, shapes, ledger = Grid.of(config), parameter_shapes(shape), make_ledger(config, device)
    prompts = load_prompts(config, start) if rank == 0 else None
    engine = grader = None
    if rank in grid.actor_ranks:
        lane = Lane((rank - grid.learners) % grid.tp, grid.tp)
        engine = Engine(config, shape, encoder.vocab, device, ledger, lane)
        if rank in grid.leaders:
            grader = Grader(config.reward)
            grader.wait_ready()
    join(config, device)
    stack.enter_context(Watch(config, ledger))
    channel = open_channel(rank, config.collective_timeout_s)
    ledger.follow(channel, rank, dist.get_world_size())
    live = {name: tuple(weight.shape) for name, weight in engine.weights().items()} if engine else {}
    plan = agree_on_plan(channel, config, shapes, (engine.runner.layout, live) if engine else None)
    groups = make_groups(grid, plan, device.type, config.collective_timeout_s)
    publisher = Publisher(channel, plan, groups, config, device)
    if engine:
        engine.connect(groups.lanes)
        pool, longest = engine.scheduler.capacity, engine.full_length_sequences
        print(f"rank {rank}: actor, KV pool of {pool} tokens = {longest} longest sequences", flush=True)
        run_actor(config, engine, encoder, publisher, grader)
        if grader:
            grader.close()
    else:
        learner = Learner(config, shape, encoder.vocab, groups.mesh, device)
        if start.checkpoint:
            learner.restore(start.checkpoint, groups.checkpoint)
        director = Director(config, start, publisher, prompts, ledger) if rank == 0 else None
        run_learner(learner, publisher, ledger, director, version_of(start.checkpoint))
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
