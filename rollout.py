"""The actor's role: decode what the director sends, grade it beside, and take new weights at step boundaries.

A worker's whole life is `turn`: look into the inbox, or else compute one engine step. On a rank of its own it turns until it is
told to stop; colocated it turns whenever its learner waits for work, until rank 0 says that work is there. Every lane of an engine
has a worker and all turn in step; only the leader, its first rank, has a grader and sends groups.
"""

import json
import time

import torch
import torch.distributed as dist

from actor import Engine
from config import Config
from data import Detokenizer, Encoder, Rollout, pack_group
from memory import peak_bytes
from reward import Grader, total
from scheduler import Request
from sync import Publisher


class Inbox:
    """An engine's messages. Its leader takes them off the queue and tells the other lanes, so that all act in the same step."""

    def __init__(self, publisher: Publisher):
        self.channel, self.rank, self.group = publisher.channel, publisher.rank, publisher.groups.lanes
        self.leader, self.source = publisher.lane == 0, publisher.rank - publisher.lane

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


class Worker:
    """One lane of a rollout engine in a run."""

    def __init__(self, config: Config, engine: Engine, encoder: Encoder, publisher: Publisher, grader: Grader | None):
        self.config, self.engine, self.encoder, self.publisher, self.grader = config, engine, encoder, publisher, grader
        self.channel, self.ledger, self.inbox = publisher.channel, engine.ledger, Inbox(publisher)
        self.groups: dict[int, tuple[dict, list[Request]]] = {}  # group -> its prompt message, its finished samples
        self.coming: int | None = None  # a version that was announced and is not live

    def run(self, until: str) -> None:
        """Turn until a message of this kind comes."""
        while self.turn() != until:
            pass

    def turn(self) -> str:
        """One message, or one engine step if there is none, and the weights if they can be taken; returns the message's kind."""
        scheduler, grader = self.engine.scheduler, self.grader
        idle = scheduler.idle
        with self.ledger.span("wait_prompts" if idle else "exchange"):
            message, graded = self.inbox.pop(), grader.poll() if grader else []
            if idle and not message and not graded:
                time.sleep(1e-3)
        if graded:
            with self.ledger.span("exchange"):
                self.channel.push("headers", [self._send_payload(self.groups.pop(group), parts, error)
                                              for group, parts, error in graded])
        kind = message["kind"] if message else ""
        if not message:
            self._step()
        elif kind == "prompts":
            with self.ledger.span("exchange"):
                for prompt in message["prompts"]:
                    if grader:
                        self.ledger.flow("t", prompt["group"])
                    self.groups[prompt["group"]] = (prompt, [])
                    scheduler.add([self._request(prompt, number) for number in range(prompt["samples"])])
        elif kind == "publish":
            self.coming = message["version"]
            scheduler.announce()
        if self.coming is not None:
            self._swap(self.coming)
        return kind

    def _step(self) -> None:
        for request in self.engine.step():
            prompt, done = self.groups[request.group]
            done.append(request)
            if len(done) == prompt["samples"] and self.grader:
                with self.ledger.span("exchange"):
                    self._grade(prompt, done)

    def _swap(self, version: int) -> None:
        """Take the announced weights, once they are there and what runs lets them in."""
        with self.ledger.span("publish"):
            if not (self.publisher.arrived(version, self.engine.scheduler.idle) and self.engine.scheduler.may_swap):
                return
            self.publisher.receive(version, self.engine.weights())
            self._live(version)
            self.coming = None
        self._report({"account": self.ledger.account(), "events": self.ledger.events()})

    def exchange(self, version: int, shards: dict[str, torch.Tensor]) -> dict[str, float]:
        """Colocated: the publication of this rank's shards to all engines, its own among them."""
        self.engine.restore()
        seconds = self.publisher.exchange(version, shards, self.engine.weights())
        self._live(version)
        self._report({})  # the rank has one ledger, which its learner reports
        return seconds

    def _live(self, version: int) -> None:
        """The weights of `version` have been written and proved."""
        self.engine.publish(version)
        self.ledger.flow("f", version, f"weights to rank {self.publisher.rank}")

    def _report(self, books: dict) -> None:
        if self.grader:
            self.ledger.beside("grading", self.grader.take_seconds())
        self.channel.push("accounts", {"rank": self.publisher.rank, "buffer_bytes": self.publisher.buffer_bytes, **books,
                                       "peak_bytes": peak_bytes(self.engine.device), **self.engine.take_counters()})

    def _request(self, prompt: dict, number: int) -> Request:
        """One sample of a prompt message."""
        watch = Detokenizer(self.encoder.tokenizer, self.encoder.stop).push if self.encoder.stop else None
        return Request(prompt["group"], number, list(prompt["ids"]), self.config.rollout.max_new_tokens, prompt["temperature"],
                       self.encoder.stop_ids, prompt["min_version"], watch=watch)

    def _grade(self, prompt: dict, done: list[Request]) -> None:
        """Hand a finished group to the grading processes, as text and as the sampled ids."""
        done.sort(key=lambda request: request.sample)
        responses = [request.tokens[request.num_prompt:] for request in done]
        texts = [self.encoder.decode(response) for response in responses]
        if isinstance(prompt["prompt"], list):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        self.grader.submit(prompt, texts, responses)

    def _send_payload(self, group: tuple[dict, list[Request]], parts: list, error: str) -> dict:
        """Put a graded group's tokens into the store (training only) and return its header."""
        prompt, done = group
        if prompt["group"] >= 0:
            self.channel.put(f"payload/{prompt['group']}", pack_group(
                [Rollout(request.tokens, request.num_prompt, request.logprobs, request.versions) for request in done]))
        return {
            "rank": self.publisher.rank, "group": prompt["group"], "row": prompt["row"], "parts": parts, "error": error,
            "rewards": [total([part[number] for part in parts], self.config.reward.weights) for number in range(len(done))],
            "lengths": [[len(request.tokens), request.num_generated] for request in done],
            "oldest": min((version for request in done for version in request.versions), default=prompt["min_version"]),
            "reasons": [request.finish_reason for request in done]}
