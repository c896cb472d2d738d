"""Learning from preference pairs: DPO, IPO, and the Bradley-Terry reward model.

    torchrun --nproc-per-node 1 train.py configs/dpo-smollm2-cpu.yaml

What leaves the cluster when there are no rollouts: every rank is a learner; there is no actor, no store, no queue, no publication,
and no rank that directs. All ranks draw the same pairs from the same seed, make the same plan, and take their own share of it. What
stays is the learner with all it has: sharding, packing, checkpointing, optimizer, export. A DPO step of a 70B keeps the policy's 16
bytes a parameter and the reference's 4; the other half of the GPUs, which decoded, is not there.

A row has the prompt and two responses, `chosen` and `rejected`: strings, or lists of {role, content} messages.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from balance import Item, minibatches, plan_micro_batches
from checkpoint import save_hf
from config import Config, ConfigError
from data import Prompt, Prompts
from launch import Start, join, load_prompts, make_ledger
from learner import Learner, Sample, measure_matmul_flops
from ledger import MFU_CONVENTION, Ledger, RunFolder, memory_line, merge_accounts
from resume import Checkpoints, read_state, version_of
from settings import plain, to_yaml
from shape import Shape
from sync import Grid, make_groups
from watch import Watch

Pair = tuple[Sample, Sample]  # chosen, rejected


class Pairs:
    """Preference pairs in the order of `Prompts`; ones with a response above `rollout.max_new_tokens` are skipped and counted."""

    def __init__(self, prompts: Prompts, max_new_tokens: int):
        self.prompts, self.max_new_tokens = prompts, max_new_tokens
        self.skipped = 0

    def draw(self) -> Pair:
        """The next pair that fits. Raises ConfigError if none does in a whole epoch."""
        for _ in range(2 * len(self.prompts.rows)):
            pair = self.encode(self.prompts.draw())
            if max(sample.response for sample in pair) <= self.max_new_tokens:
                return pair
            self.skipped += 1
        raise ConfigError(f"`rollout.max_new_tokens` = {self.max_new_tokens}: every pair has a longer response; raise it")

    def encode(self, prompt: Prompt, field: str = "data.path") -> Pair:
        """Raises ConfigError for a row of `field` without two responses."""
        responses = [prompt.columns.get(name) for name in ("chosen", "rejected")]
        if not all(responses) or len({type(response) for response in responses}) > 1:
            raise ConfigError(f"`{field}`: row {prompt.row} needs columns `chosen` and `rejected`, both strings or both lists of "
                              f"messages; it has {', '.join(prompt.columns) or 'none besides the prompt'}")
        encoder = self.prompts.encoder
        chosen, rejected = (prompt.ids + encoder.encode_response(prompt.prompt, response) for response in responses)
        return tuple(Sample(ids, len(prompt.ids), []) for ids in (chosen, rejected))


def split(pairs: list[Pair], shape: Shape, grid: Grid, rank: int, max_tokens: int) -> list[list[Sample]]:
    """This rank's micro-batches of one update, a pair's two sequences behind each other; weights make it the mean over pairs."""
    for sample in (sample for pair in pairs for sample in pair):
        sample.weight = 1 / len(pairs)
    lengths = [[len(sample.tokens) for sample in pair] for pair in pairs]
    items = [Item(index, sum(both), sum(shape.forward_flops(length, length * (length + 1) // 2) for length in both))
             for index, both in enumerate(lengths)]
    mine = plan_micro_batches(items, grid.learners, max_tokens)[rank]
    return [[sample for index in batch for sample in pairs[index]] for batch in mine]


class Summary:
    """Means over all ranks, and on rank 0 the run's files and lines."""

    def __init__(self, config: Config, learner: Learner, start: Start):
        self.config, self.learner, self.rank = config, learner, start.rank
        first = version_of(start.checkpoint) if start.checkpoint else None
        self.folder = RunFolder(config.run_dir, first) if self.rank == 0 else None
        self.bar = tqdm(total=config.steps, initial=first or 0, unit="step", leave=False,
                        disable=self.rank > 0 or not sys.stderr.isatty())
        self.bound = measure_matmul_flops(getattr(torch, config.model.dtype), learner.device) if self.rank == 0 else 0.0
        self.best: float | None = None
        if self.folder:
            self.folder.write_config(to_yaml(config), {})

    def note(self, text: str) -> None:
        if self.rank == 0:
            self.bar.write(text, file=sys.stdout)
            sys.stdout.flush()

    def total(self, sums: dict[str, float], names: tuple[str, ...]) -> dict[str, float]:
        """Sums over ranks."""
        values = self.learner.sum_over_ranks(torch.tensor([float(sums.get(name, 0.0)) for name in names], dtype=torch.float64))
        return dict(zip(names, values.tolist(), strict=True))

    def step(self, step: int, pairs: int, sums: dict, account: dict[str, float]) -> None:
        """One row of metrics.jsonl and one line."""
        whole = self.total(sums, ("loss", "margin", "accuracy", "trained", "flops"))
        if self.rank:
            return
        updates = self.config.learner.epochs
        wall = account["wall"]
        busy = sum(account.get(kind, 0.0) for kind in ("score", "forward", "backward", "optimizer"))
        row = {"step": step, "version": step + 1, "loss": whole["loss"],
               "margin": whole["margin"] / pairs / updates, "accuracy": whole["accuracy"] / pairs / updates,
               "grad_norm": sums["grad_norm"], "lr": sums["lr"], "trained_tokens": int(whole["trained"]), "step_s": wall,
               "tokens_per_s": whole["trained"] / wall, "learner_flops_per_s": whole["flops"] / self.learner.ranks / busy,
               **{f"mem_{kind}_mb": size / 1e6 for kind, size in self.learner.memory().items()},
               **merge_accounts([account], "learner")}
        self.folder.append("metrics.jsonl", [row])
        if step == 0:
            self.note(f"MFU counts {MFU_CONVENTION}\n{memory_line(self.learner.memory())}")
        shares = " ".join(f"{kind} {seconds / wall:.0%}" for kind, seconds in account.items()
                          if kind != "wall" and seconds >= 0.005 * wall)
        self.note(f"step {step + 1:>4}/{self.config.steps} | loss {row['loss']:.4f} accuracy {row['accuracy']:.2f} margin "
                  f"{row['margin']:.3f} | {wall:.2f} s {row['tokens_per_s']:.0f} tok/s MFU "
                  f"{row['learner_flops_per_s'] / self.bound:.1%} | {shares}")
        self.bar.update()

    def evaluation(self, version: int, pairs: int, sums: dict) -> bool:
        """One row of eval.jsonl and one line; whether its loss is the best so far, the same on every rank."""
        whole = self.total(sums, ("loss", "margin", "accuracy"))
        row = {"version": version, "pairs": pairs, "loss": whole["loss"], "margin": whole["margin"] / pairs,
               "accuracy": whole["accuracy"] / pairs}
        if self.folder:
            self.folder.append("eval.jsonl", [row])
        self.note(f"evaluation at version {version}: accuracy {row['accuracy']:.3f}, margin {row['margin']:.3f}, loss "
                  f"{row['loss']:.4f} on {pairs} held-out pairs")
        better = self.best is None or row["loss"] < self.best  # accuracy on a few pairs is the same too often
        self.best = row["loss"] if better else self.best
        return better

    def save(self, name: str, version: int) -> None:
        """The weights as RUN/name; a collective of all ranks, since each parameter is gathered."""
        if self.rank:
            for _ in self.learner.full_tensors():
                pass
            return
        folder = Path(self.config.run_dir) / name
        save_hf(folder, self.config.model.path, self.learner.full_tensors())
        self.note(f"version {version} saved to {folder}")


def train_pairs(config: Config, start: Start, stack: ExitStack) -> None:
    """A whole run on preference pairs: all ranks call it. Raises ConfigError before the first process group."""
    train, held_out = load_pairs(config, start)
    ledger = make_ledger(config, start.device)
    join(config, start.device)
    stack.enter_context(Watch(config, ledger))
    grid = Grid.of(config)
    groups, first = make_groups(grid, None, start.device.type, config.collective_timeout_s), version_of(start.checkpoint)
    learner = Learner(config, start.shape, start.encoder.vocab, groups.mesh, start.device)
    summary = Summary(config, learner, start)
    saver = Checkpoints(config.run_dir, config.checkpoint.keep, groups.checkpoint)
    if start.checkpoint:
        learner.restore(start.checkpoint, groups.checkpoint)
        summary.best = read_state(start.checkpoint)["best"]
    limit = config.learner.max_tokens_per_micro_batch

    def judge(version: int) -> None:
        if config.eval.every and (version % config.eval.every == 0 or version == config.steps):
            mine = split(held_out, start.shape, grid, start.rank, limit)
            learner.score(mine, Ledger(False))
            if summary.evaluation(version, len(held_out), learner.measure(mine)) and config.eval.keep_best:
                summary.save("best", version)
            ledger.account()  # no part of a step

    for step in range(first, config.steps):
        judge(step)
        drawn = [train.draw() for _ in range(config.rollout.prompts_per_step)]
        updates = [split(part, start.shape, grid, start.rank, limit) for part in minibatches(drawn, config.learner.minibatches)]
        learner.score([batch for update in updates for batch in update], ledger)
        sums = learner.train(updates, step, ledger)
        summary.step(step, len(drawn), sums, ledger.account())
        if config.export.every and (step + 1) % config.export.every == 0:
            summary.save(f"step-{step + 1}", step + 1)
        saver.poll()
        if config.checkpoint.every and ((step + 1) % config.checkpoint.every == 0 or step + 1 == config.steps):
            with ledger.span("checkpoint"):
                prompts = train.prompts
                saver.save(step + 1, learner.state(), {
                    "config": plain(config), "rows": prompts.fingerprint(),
                    "cursor": prompts.cursor, "skipped": prompts.skipped, "best": summary.best}, {})
    saver.wait()
    judge(config.steps)
    summary.save("model", config.steps)
    if train.skipped or train.prompts.skipped:
        summary.note(f"skipped {train.prompts.skipped} prompts longer than data.max_prompt_tokens and {train.skipped} pairs with a "
                     "response longer than rollout.max_new_tokens")
    if summary.folder:
        summary.folder.trace(0, "learner", ledger.events())
        summary.folder.close()
    dist.barrier()
    dist.destroy_process_group()


def load_pairs(config: Config, start: Start) -> tuple[Pairs, list[Pair]]:
    """Training pairs, and the held-out ones that fit. Raises ConfigError."""
    prompts, held_out = load_prompts(config, start)
    train = Pairs(prompts, config.rollout.max_new_tokens)
    before = prompts.cursor, prompts.skipped
    train.draw()
    (prompts.cursor, prompts.skipped), train.skipped = before, 0
    pairs = [train.encode(prompt, "data.eval_path") for prompt in held_out]
    fitting = [pair for pair in pairs if max(sample.response for sample in pair) <= config.rollout.max_new_tokens]
    if held_out and not fitting:
        raise ConfigError(f"`rollout.max_new_tokens` = {config.rollout.max_new_tokens}: every pair of {config.data.eval_path!r} "
                          "has a longer response; raise it")
    return train, fitting
