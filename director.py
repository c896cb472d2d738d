"""Rank 0's decisions: which prompts leave, which samples train where, and what is written down.

The director lets prompt groups out through the release gate, hands each to the actor with the fewest out, and takes back *headers*
(rewards, lengths, the oldest version). From them alone it forms each learner rank's micro-batches (`assign`) and, once the learners
have added what a reward model or a KL penalty says, advantages and loss weights from the step's global counts (`credit`); the
tokens themselves stay in the store until the learner that needs them fetches them. Groups are put in order by their id before
anything is computed, so nothing depends on which actor was faster.
"""

import importlib.metadata
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from actor import measure_copy_bandwidth
from balance import Item, minibatches, plan_micro_batches
from checkpoint import save_hf
from config import Algorithm, Config
from data import Prompt, Prompts, Rollout
from launch import Start
from learner import Learner, measure_matmul_flops
from ledger import MFU_CONVENTION, Ledger, RunFolder, memory_line, merge_accounts, step_line
from losses import group_advantages, leave_one_out, overlong_penalty, token_weight
from memory import device_name, machine_bytes
from plan import afterwards, machine_of
from resume import read_payload, read_state, version_of
from rollout import Worker
from scheduler import ReleaseGate
from settings import plain, to_yaml
from sync import Publisher


class Director:
    """Prompts out, headers in, advantages, assignment, metrics; lives on learner rank 0 beside its learner."""

    def __init__(self, config: Config, start: Start, publisher: Publisher, prompts: tuple[Prompts, list[Prompt]], ledger: Ledger):
        self.config, self.shape, self.ledger = config, start.shape, ledger
        self.channel, self.grid, checkpoint = publisher.channel, publisher.grid, start.checkpoint
        self.worker: Worker | None = None  # this rank's, where ranks are colocated
        self.prompts, self.held_out = prompts
        self.encoder = self.prompts.encoder
        self.gate = ReleaseGate(config.rollout.prompts_per_step, config.max_staleness, config.steps)
        self.next_group = 0
        self.rows: dict[int, int] = {}  # group that is out -> its row in the data
        self.signalled = False  # a checkpoint was asked for
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "signalled", True))
        self.out = Counter(dict.fromkeys(self.grid.leaders, 0))  # groups at each engine
        self.headers: dict[int, dict] = {}
        self.work: list[list] = []  # [rank][minibatch][micro-batch] -> [group, number], of the current step
        self.credits: dict[tuple[int, int], list] = {}  # (group, number) -> [reward, advantage, weight], of the current step
        self.filtered: dict[int, list[int]] = defaultdict(list)  # step -> tokens of each group that was replaced
        self.best: float | None = None  # reward of the best evaluation so far
        self.folder = RunFolder(config.run_dir, version_of(checkpoint) if checkpoint else None)
        self.first = version_of(checkpoint)
        self.bar = tqdm(total=config.steps, initial=self.first, unit="step", disable=not sys.stderr.isatty(), leave=False)
        if self.folder.moved:
            self.note(f"{config.run_dir} existed: moved to {self.folder.moved}")
        text, origin = to_yaml(config), provenance()
        self.folder.write_config(text, origin)
        self.note("\n".join([text, *(f"{name}: {value}" for name, value in origin.items())]))
        self.trackers = open_trackers(config, self.first)
        self.bounds = {"flops": measure_matmul_flops(publisher.dtype, publisher.device),
                       "bandwidth": measure_copy_bandwidth(publisher.device), "link": publisher.link_gb_s}
        self.note(f"kill -USR1 {os.getpid()} saves a checkpoint after the step that is running")
        self.machine = machine_of(config, device_name(start.device), self.bounds | {
            "memory": machine_bytes(start.device), "process": start.process_bytes})
        link = f"publication link {publisher.link_gb_s:.2f} GB/s" if publisher.link_gb_s else "no publication link on one rank"
        self.note(f"bounds measured here: GEMM {self.bounds['flops'] / 1e9:.0f} GFLOP/s, copy {self.bounds['bandwidth'] / 1e9:.1f} "
                  f"GB/s, {link}; MFU counts {MFU_CONVENTION}")
        self.clock = time.perf_counter()
        if checkpoint:
            self.restore(checkpoint)

    def note(self, text: str) -> None:
        self.bar.write(text, file=sys.stdout)
        sys.stdout.flush()

    def state(self) -> tuple[dict, dict[int, bytes]]:
        """What a checkpoint keeps of the run between two steps, and the payloads of finished groups."""
        for header in iter(lambda: self.channel.pop("headers"), None):
            for entry in header:
                self.take(entry)
        running, arrived = self.gate.open_groups()
        state = {"config": plain(self.config), "rows": self.prompts.fingerprint(),
                 "cursor": self.prompts.cursor, "skipped": self.prompts.skipped, "next_group": self.next_group, "best": self.best,
                 "running": [[group, step, self.rows[group]] for group, step in running.items()],
                 "arrived": [[group, step, outcome, self.headers[group]] for group, (step, outcome) in arrived.items()],
                 "filtered": list(self.filtered.items())}
        return state, {group: self.channel.fetch(f"payload/{group}", "its own payloads") for group in arrived}

    def restore(self, checkpoint: Path) -> None:
        """Go on where a checkpoint was made: finished groups are back in the store, unfinished ones start from their prompts, and
        so do those that are too old for their step because max_staleness was higher then."""
        state = read_state(checkpoint)
        self.next_group, self.best = state["next_group"], state["best"]
        self.filtered.update(dict(state["filtered"]))
        again, kept = {group: (step, row) for group, step, row in state["running"]}, {}
        for group, step, outcome, header in state["arrived"]:
            if step - header["oldest"] > self.config.max_staleness:
                again[group] = step, header["row"]
                continue
            kept[group], self.headers[group] = (step, outcome), header
            self.channel.put(f"payload/{group}", read_payload(checkpoint, group))
        self.gate.restore(version_of(checkpoint), {group: step for group, (step, _) in again.items()}, kept)
        self.send_prompts([self.training_message(group, self.prompts.encode(row), step) for group, (step, row) in again.items()])
        left = self.config.steps - self.gate.version
        self.note(f"going on from {checkpoint}: {len(kept)} finished groups kept, {len(again)} started again; "
                  + (f"{left} steps left" if left > 0 else "nothing left to train; raise steps, or set resume=never"))

    def started(self, publish: dict[str, float]) -> None:
        """The first version is live on all actors: drop their accounts of the start-up, and start the step clock."""
        for _ in self.grid.actor_ranks:
            self.channel.wait("accounts", "the actors to come up")
        proved = "published and proved" if self.config.publish.verify else "published, not verified,"
        self.note(f"version {self.gate.version} {proved} in {publish['total']:.2f} s")
        self.clock = time.perf_counter()

    def assign(self) -> None:
        """Release what the gate lets out, wait until the current step's groups are back, and say who trains which samples."""
        self.release()
        self.collect(self.gate.ready, f"the groups of step {self.gate.version}")
        config, headers = self.config, {group: self.headers[group] for group in self.gate.groups()}
        oldest = min(header["oldest"] for header in headers.values())
        assert self.gate.version - oldest <= config.max_staleness, f"step {self.gate.version} got tokens of version {oldest}"
        every, after = config.checkpoint.every, self.gate.version + 1
        self.saves = self.signalled or (every > 0 and (after % every == 0 or after == config.steps))
        self.signalled = False
        self.work = [[] for _ in range(self.grid.learners)]
        for groups in minibatches(list(headers), config.learner.minibatches):
            entries = [[group, number] for group in groups for number, (_, generated) in enumerate(headers[group]["lengths"])
                       if headers[group]["rewards"][number] is not None and generated]
            lengths = [headers[group]["lengths"][number][0] for group, number in entries]
            items = [Item(group, length, self.shape.forward_flops(length, length * (length + 1) // 2))
                     for (group, _), length in zip(entries, lengths, strict=True)]
            plan = plan_micro_batches(items, self.grid.learners, config.learner.max_tokens_per_micro_batch)
            for mine, batches in zip(self.work, plan, strict=True):
                mine.append([[entries[index] for index in batch] for batch in batches])
        if not any(batch for mine in self.work for batches in mine for batch in batches):
            self.note(f"warning: no sample of step {self.gate.version} has a reward; only momentum moves the weights")
        self.hand_out({rank: {"minibatches": mine, "checkpoint": self.saves} for rank, mine in enumerate(self.work)})

    def hand_out(self, messages: dict[int, dict]) -> None:
        """To learner ranks; colocated, their engines are told to stop turning, this rank's own lanes among them."""
        for rank, message in messages.items():
            self.channel.push(f"work/{rank}", message)
        if self.worker:
            for leader in self.grid.leaders:
                self.channel.push(f"control/{leader}", {"kind": "work"})
            self.worker.run("work")

    def credit(self) -> None:
        """Rewards are complete: tell each learner (reward, advantage, loss weight) of its samples."""
        config, algorithm = self.config, self.config.algorithm
        order = [[(group, number) for batches in mine for batch in batches for group, number in batch] for mine in self.work]
        kl = dict.fromkeys(itertools.chain(*order), 0.0)
        if config.late_rewards:
            for _ in range(self.grid.learners):
                message = self.channel.wait("scores", "all learners to score their samples")
                for (group, number), found in zip(order[message["rank"]], message["found"], strict=True):
                    kl[group, number] = found["kl"]
                    if config.reward_model.path:
                        self.headers[group].setdefault("scores", []).append(found["score"])
                        self.headers[group]["rewards"][number] += config.reward_model.weight * found["score"]
        self.credits = {}
        for groups in minibatches(self.gate.groups(), config.learner.minibatches):
            headers = {group: self.headers[group] for group in groups}
            scored = [(group, number) for group, header in headers.items()
                      for number, reward in enumerate(header["rewards"]) if reward is not None]
            tokens = sum(headers[group]["lengths"][number][1] for group, number in scored)
            for group, header in headers.items():
                rewards = shaped_rewards(config, header, [kl.get((group, number), 0.0) for number in range(len(header["rewards"]))])
                advantages = sequence_advantages(rewards, algorithm)
                for number, (_, generated) in enumerate(header["lengths"]):
                    weight = token_weight(algorithm.loss_mean, generated, tokens, len(scored), config.rollout.max_new_tokens)
                    self.credits[group, number] = [rewards[number], advantages[number], weight]
        for rank, entries in enumerate(order):
            self.channel.push(f"credit/{rank}", {"credits": [self.credits[entry] for entry in entries]})

    def release(self) -> None:
        messages = []
        for step in self.gate.due():
            self.gate.release(self.next_group, step)
            messages.append(self.training_message(self.next_group, self.prompts.draw(), step))
            self.ledger.flow("s", self.next_group)
            self.next_group += 1
        self.send_prompts(messages)

    def training_message(self, group: int, prompt: Prompt, step: int) -> dict:
        self.rows[group] = prompt.row
        rollout = self.config.rollout
        return prompt_message(group, prompt, max(0, step - self.config.max_staleness)) | {
            "samples": rollout.samples_per_prompt, "temperature": rollout.temperature}

    def send_prompts(self, messages: list[dict]) -> None:
        """Each to the actor with the fewest groups out, as few messages an actor as the store's limit allows."""
        parcels: dict[int, list[dict]] = {}
        for message in messages:
            actor = min(self.out, key=lambda rank: (self.out[rank], rank))
            self.out[actor] += 1
            parcels.setdefault(actor, []).append(message)
        for actor, prompts in parcels.items():
            self.channel.push_many(f"control/{actor}", prompts)

    def collect(self, enough: Callable[[], bool], what: str) -> None:
        """Take headers until `enough()`; colocated, this rank's engine works meanwhile.

        Raises TimeoutError at the generation limit.
        """
        deadline = time.monotonic() + self.config.rollout.generation_timeout_s
        while not enough():
            headers = self.channel.pop("headers")
            if headers is None and time.monotonic() > deadline:
                still_out = {rank: groups for rank, groups in self.out.items() if groups}
                raise TimeoutError(f"{what} took longer than rollout.generation_timeout_s = "
                                   f"{self.config.rollout.generation_timeout_s:g}; groups still out, by actor rank: {still_out}")
            for header in headers or []:
                self.take(header)
            if self.worker:
                self.worker.turn()
            elif not headers:
                time.sleep(5e-4)

    def take(self, header: dict) -> None:
        """A finished group has come back."""
        group = header["group"]
        self.headers[group] = header
        self.out[header["rank"]] -= 1
        if header["error"]:
            self.note(f"warning: group {group} (row {header['row']}) is unscored: {header['error'].strip()}")
        if group < 0:
            return
        del self.rows[group]
        if not any(reward is not None for reward in header["rewards"]):
            self.gate.arrive(group, "unscored")
        elif self.replaces(header):
            self.filtered[self.gate.arrive(group, "filtered")].append(sum(generated for _, generated in header["lengths"]))
            self.channel.drop(f"payload/{group}")
            del self.headers[group]
            self.release()
        else:
            self.gate.arrive(group, "trained")

    def replaces(self, header: dict) -> bool:
        """Whether a group teaches nothing, all its rewards being equal, and its step may still draw another in its place."""
        already = len(self.filtered[self.gate.step_of(header["group"])])
        limit = self.config.algorithm.resample * self.config.rollout.prompts_per_step
        return already < limit and not any(group_advantages(header["rewards"], False))

    @property
    def evaluates(self) -> bool:
        """Whether the current version is one to evaluate: every `eval.every` updates, and the last."""
        every, version = self.config.eval.every, self.gate.version
        return every > 0 and (version % every == 0 or version == self.config.steps)

    def evaluate(self) -> bool:
        """Greedy samples of the held-out prompts under the current version; training's random numbers are not touched.

        Returns whether its reward is the best so far.
        """
        start = time.perf_counter()
        groups = [-1 - number for number in range(len(self.held_out))]  # training's ids start at 0
        self.send_prompts([prompt_message(group, prompt, self.gate.version) | {"samples": 1, "temperature": 0.0}
                           for group, prompt in zip(groups, self.held_out, strict=True)])
        self.collect(lambda: all(group in self.headers for group in groups), "the evaluation")
        headers = [self.headers.pop(group) for group in groups]
        rewards = [header["rewards"][0] for header in headers if header["rewards"][0] is not None]
        row = {"version": self.gate.version, "reward": sum(rewards) / len(rewards) if rewards else None, "prompts": len(headers),
               "unscored": len(headers) - len(rewards),
               "response_len": sum(header["lengths"][0][1] for header in headers) / len(headers)}
        for number, name in enumerate(self.config.reward.functions):
            marks = [header["parts"][number][0] for header in headers if header["parts"][number][0] is not None]
            row[f"part/{name.rpartition(':')[2]}"] = sum(marks) / len(marks) if marks else None
        self.folder.append("eval.jsonl", [row])
        self.track({f"eval/{name}": value for name, value in row.items()})
        reward = "none" if row["reward"] is None else f"{row['reward']:.3f}"
        parts = ", ".join(f"{name.removeprefix('part/')} {value:.3f}" for name, value in row.items() if "part/" in name and value)
        self.note(f"evaluation at version {row['version']}: reward {reward} ({parts}) on {len(rewards)} held-out prompts, greedy")
        self.clock += time.perf_counter() - start  # no part of the step
        better = row["reward"] is not None and (self.best is None or row["reward"] > self.best)
        self.best = row["reward"] if better else self.best
        return better

    def finish(self, rollouts: dict[int, list[Rollout]]) -> None:
        """After the publication: books closed, one line, one row; `rollouts` are those that rank 0 fetched."""
        step, groups = self.gate.version, self.gate.train()
        headers = [self.headers[group] for group in groups]
        reports = sorted((self.channel.wait("reports", "all learners to report") for _ in range(self.grid.learners)),
                         key=lambda report: report["rank"])
        accounts = [self.channel.wait("accounts", "all actors to report") for _ in self.grid.actor_ranks]
        now, before = time.perf_counter(), self.clock
        self.clock = now
        row = step_row(step, now - before, (headers, self.filtered.pop(step, [])), reports, accounts)
        self.folder.append("metrics.jsonl", [row])
        self.track(row)
        for member in [*reports, *(account for account in accounts if "account" in account)]:
            role = self.grid.role(member["rank"])
            self.folder.trace(member["rank"], role, member["events"])
            self.folder.append("ledger.jsonl", [{"step": step, "rank": member["rank"], "role": role} | member["account"]])
        self.folder.trace_step(step, before, now)
        self.folder.append("rollouts.jsonl", self.logged_samples(step, rollouts, reports[0]["train"]["sample_gaps"]))
        for group in groups:
            del self.headers[group]
            self.channel.drop(f"payload/{group}")
        if step == self.first:
            self.note(memory_line(reports[0]["memory"]))
        self.note(step_line(row, self.config.steps, self.bounds))
        self.bar.update()

    def logged_samples(self, step: int, rollouts: dict[int, list[Rollout]], gaps: list[float]) -> list[dict]:
        """Rows for rollouts.jsonl: the first of rank 0's own samples, as text, with everything known about them."""
        rows, mine = [], [entry for batch in self.work[0][0] for entry in batch]
        for (group, number), gap in list(zip(mine, gaps, strict=True))[:self.config.log.samples_per_step]:
            rollout, header = rollouts[group][number], self.headers[group]
            parts = {name: part[number] for name, part in zip(self.config.reward.functions, header["parts"], strict=True)}
            decode = self.encoder.tokenizer.decode
            rows.append({"step": step, "group": group, "sample": number, "row": header["row"],
                         "prompt": decode(rollout.tokens[:rollout.num_prompt]), "text": decode(rollout.tokens[rollout.num_prompt:]),
                         "reward": header["rewards"][number], "reward_parts": parts,
                         "advantage": self.credits[group, number][1],
                         "finish_reason": header["reasons"][number], "versions": rollout.versions, "logprob_gap_max": gap})
        return rows

    def track(self, values: dict) -> None:
        for tracker in self.trackers:
            tracker.log({name: value for name, value in values.items() if value is not None}, step=self.gate.version)

    def save(self, learner: Learner, name: str) -> None:
        """The weights as a Hugging Face folder RUN/name; the other learner ranks are told to walk `full_tensors` meanwhile."""
        self.hand_out({other: {"save": name} for other in range(1, self.grid.learners)})
        folder = Path(self.config.run_dir) / name
        save_hf(folder, self.config.model.path, learner.full_tensors())
        self.note(f"version {self.gate.version} saved to {folder}")

    def stop(self) -> None:
        """Let all other ranks go, and close the run's files."""
        self.close()
        self.hand_out({other: {"minibatches": []} for other in range(1, self.grid.learners)})
        for leader in () if self.worker else self.grid.leaders:
            self.channel.push(f"control/{leader}", {"kind": "stop"})

    def close(self) -> None:
        rows = [row for row in self.folder.read("metrics.jsonl") if row["step"] >= self.first]  # of this attempt
        self.note(afterwards(self.config, rows, self.machine))
        if self.prompts.skipped:
            self.note(f"{self.prompts.skipped} prompts drawn were longer than data.max_prompt_tokens and skipped")
        self.folder.trace(0, self.grid.role(0), self.ledger.events())
        for tracker in self.trackers:
            tracker.finish()
        self.folder.close()
        self.bar.close()


def prompt_message(group: int, prompt: Prompt, min_version: int) -> dict:
    return {"group": group, "ids": prompt.ids, "prompt": prompt.prompt, "columns": prompt.columns, "row": prompt.row,
            "min_version": min_version}


def shaped_rewards(config: Config, header: dict, kl: list[float]) -> list[float | None]:
    """The rewards that advantages are formed from: as graded, less overlong and KL penalties."""
    algorithm, cap = config.algorithm, config.rollout.max_new_tokens
    # A token-level advantage takes each token's KL where it occurs, on the learner.
    coef = algorithm.kl_coef if algorithm.kl_in == "reward" and algorithm.advantage in ("group", "rloo") else 0.0
    return [None if reward is None else reward + overlong_penalty(generated, cap, algorithm.overlong_buffer) - coef * divergence
            for reward, (_, generated), divergence in zip(header["rewards"], header["lengths"], kl, strict=True)]


def sequence_advantages(rewards: list[float | None], algorithm: Algorithm) -> list[float]:
    """One prompt's advantages, where they belong to whole samples; 0 where the learner forms them by token."""
    if algorithm.advantage == "group":
        return group_advantages(rewards, algorithm.advantage_std)
    return leave_one_out(rewards) if algorithm.advantage == "rloo" else [0.0] * len(rewards)


def step_row(step: int, seconds: float, groups: tuple[list[dict], list[int]], reports: list[dict], accounts: list[dict]) -> dict:
    """The step's object for metrics.jsonl, from what the actors said of its groups and all ranks of their time.

    `groups` are the headers of those trained on, and the tokens of each that was filtered.
    """
    headers, filtered = groups
    rewards = [reward for header in headers for reward in header["rewards"]]
    scores = [score for header in headers for score in header.get("scores", [])]
    scored = [reward for reward in rewards if reward is not None]
    generated = [length for header in headers for _, length in header["lengths"]]
    reasons = [reason for header in headers for reason in header["reasons"]]
    parts = [report["train"] for report in reports]
    tokens, replaced = int(sum(part["trained"] for part in parts)), sum(filtered)
    unscored = sum(length for header in headers for reward, (_, length) in zip(header["rewards"], header["lengths"], strict=True)
                   if reward is None)

    def mean(name: str, per: str = "tokens") -> float:
        return sum(part[name] for part in parts) / max(1, sum(part[per] for part in parts))

    publish = reports[0]["publish"]
    actors = [account["account"] for account in accounts if "account" in account]  # colocated, a rank's books come from its learner
    books = [report["account"] for report in reports]
    role = "learner" if actors else "colocated"
    times = merge_accounts(books, role) | (merge_accounts(actors, "actor") if actors else {})
    computing = sum(times.get(f"t_{role}_{kind}", 0.0) for kind in ("score", "forward", "backward", "optimizer"))
    engines = {name: sum(account[name] for account in accounts)
               for name in ("decode_bytes", "decode_seconds", "prefix_hits", "preemptions")}
    return {
        "step": step, "version": step + 1, "reward": sum(scored) / len(scored) if scored else None,
        "kl": mean("kl"), "entropy": mean("entropy"), "logprob_gap_max": max(part["gap_max"] for part in parts),
        "logprob_gap_mean": mean("gap", "gap_tokens"), "response_len": sum(generated) / len(generated),
        "prompt_len": sum(length - response for header in headers for length, response in header["lengths"]) / len(generated),
        "truncated": reasons.count("length") / len(reasons),
        "staleness_max": max(step - header["oldest"] for header in headers),
        "unscored": len(rewards) - len(scored), "filtered": len(filtered), "skipped": parts[0]["skipped"],
        "zero_variance": sum(not any(group_advantages(header["rewards"], False)) for header in headers) / len(headers),
        "loss": sum(part["loss"] for part in parts), "clipped": mean("clipped"), "grad_norm": parts[0]["grad_norm"],
        "lr": parts[0]["lr"], "trained_tokens": tokens,
        **({"reward_model": sum(scores) / len(scores)} if scores else {}),
        **{name: mean(name) for name in ("importance", "value", "return") if name in parts[0]},
        **{name: parts[0][name] for name in ("critic_grad_norm",) if name in parts[0]},
        **{name: sum(part[name] for part in parts) for name in ("value_loss",) if name in parts[0]},
        **{f"mem_{kind}_mb": size / 1e6 for kind, size in reports[0]["memory"].items()},
        "mem_actor_peak_mb": max(account["peak_bytes"] for account in accounts) / 1e6,
        "tokens_generated": sum(generated) + replaced, "tokens_trained": tokens, "tokens_unscored": unscored,
        "tokens_filtered": sum(generated) + replaced - unscored - tokens,
        "tokens_truncated": sum(length for length, reason in zip(generated, reasons, strict=True) if reason == "length"),
        "tokens_per_s": sum(generated) / seconds, "step_s": seconds,
        "learner_flops_per_s": sum(part["flops"] for part in parts) / len(parts) / max(computing, 1e-9),
        "decode_bytes_per_s": engines["decode_bytes"] / max(engines["decode_seconds"], 1e-9),
        "prefix_hits_per_s": engines["prefix_hits"] / seconds, "preemptions_per_s": engines["preemptions"] / seconds,
        "publish_mb": publish["bytes"] / 1e6, "publish_s": publish["total"],
        "publish_exposed_s": max(account.get("publish", 0.0) for account in actors or books),
        "publish_staging_mb": max(account["buffer_bytes"] for account in accounts) / 1e6,
        "publish_gb_s": publish["bytes"] / publish["total"] / 1e9,
        "publish_wire_gb_s": publish["bytes"] / max(publish["wire"] + publish.get("write", 0.0), 1e-9) / 1e9,
        **{f"publish_{part}_s": publish.get(part, 0.0) for part in ("wait", "cast", "wire", "write", "verify")},
        **times,
    }


def open_trackers(config: Config, version: int) -> list:
    """The configured trackers, through accelerate; what they hold of steps after `version` is dropped."""
    from accelerate.tracking import TensorBoardTracker, WandBTracker  # slow to import, and needed on rank 0 only
    kinds = {"tensorboard": lambda: TensorBoardTracker("tensorboard", logging_dir=config.run_dir, purge_step=version + 1),
             "wandb": lambda: WandBTracker("seventy", dir=config.run_dir)}
    trackers = [kinds[name]() for name in config.log.trackers]
    for tracker in trackers:
        tracker.start()
    return trackers


def provenance() -> dict[str, str]:
    """What made this run: source revision (with `+` if files differ from it) and package versions."""
    def git(*arguments: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(Path(__file__).parent), *arguments], capture_output=True, text=True)
        except FileNotFoundError:
            return ""
        return done.stdout.strip()

    revision = git("rev-parse", "--short", "HEAD") or "unknown"
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy", "safetensors")}
    return {"revision": revision + ("+" if git("status", "--porcelain") else ""), "python": sys.version.split()[0], **versions}
