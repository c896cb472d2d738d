"""Every setting of a run: plain dataclasses with a sentence a field, no torch. settings.py reads and checks them."""

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

_strict = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)


def _number(value):
    """YAML's yes and true are no numbers, though Python's True is 1; nor are they in a list of numbers."""
    if any(isinstance(one, bool) for one in (value if isinstance(value, list | tuple) else [value])):
        raise ValueError("input should be a number")
    return value


_Number = BeforeValidator(_number)
Positive = Annotated[int, Field(ge=1), _Number]
Count = Annotated[int, Field(ge=0), _Number]
PositiveFloat = Annotated[float, Field(gt=0), _Number]
NonNegative = Annotated[float, Field(ge=0), _Number]
Fraction = Annotated[float, Field(gt=0, lt=1), _Number]


class ConfigError(Exception):
    """Something a user can mend in a config: the message names the field, the value and the fix."""


@dataclass(config=_strict, frozen=True)
class Model:
    path: str = "configs/toy"
    """Hugging Face folder with config.json, the tokenizer and (for init=load) safetensors."""
    init: Literal["load", "random"] = "load"
    """`load` reads the folder's weights; `random` draws them from the seed (normal, std initializer_range)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of engine and learner alike; master weights, moments and reductions are always fp32."""


@dataclass(config=_strict, frozen=True)
class Data:
    path: str = "configs/toy/train.jsonl"
    """Training prompts: a .jsonl or .parquet file, a folder written by `datasets.save_to_disk`, or a hub data set name."""
    split: str = "train"
    """Split taken from a hub data set or a saved DatasetDict."""
    eval_path: str = ""
    """Held-out prompts, same formats as `path`; empty means no evaluation."""
    eval_split: str = "test"
    """Split for `eval_path`, where it has splits."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string (plain text) or a list of {role, content} messages (needs a chat template)."""
    shuffle: bool = True
    """Draw rows in a new random order every epoch, fixed by the seed; false keeps the file's order."""
    max_prompt_tokens: Positive = 1024
    """Rows whose prompt is longer than this many tokens are skipped and counted."""


@dataclass(config=_strict, frozen=True)
class Rollout:
    prompts_per_step: Positive = 16
    """Prompt groups that one optimizer step trains on."""
    samples_per_prompt: Positive = 16
    """Samples drawn for each prompt; a group-relative advantage needs at least 2."""
    temperature: Annotated[float, Field(ge=1e-3), _Number] = 1.0
    """Logits are divided by this for sampling and for every logprob, in engine and learner alike."""
    max_new_tokens: Positive = 8
    """A response is cut after this many tokens (finish_reason `length`)."""
    stop: tuple[str, ...] = ()
    """Strings that end a response besides EOS, also across token boundaries; the tokens that make them up stay in the response."""
    generation_timeout_s: PositiveFloat = 1800.0
    """The job ends with one clear line when a step's groups take longer than this to arrive."""


@dataclass(config=_strict, frozen=True)
class Reward:
    functions: tuple[str, ...] = ("reward.py:copy_digits",)
    """`file.py:name` or `module:name` of functions with TRL's signature; their weighted sum is the reward."""
    weights: Annotated[tuple[float, ...], _Number] = ()
    """Weight of each function; empty means 1 for all, 0 only watches one."""
    workers: Positive = 1
    """Grading processes on each actor rank's host."""
    timeout_s: PositiveFloat = 30.0
    """A call that takes longer is killed; its group ends as unscored."""


@dataclass(config=_strict, frozen=True)
class Actor:
    # Layout: who holds what.
    replicas: Positive = 1
    """Rollout engines."""
    tp: Positive = 1
    """Ranks that share one engine by tensor parallelism; must divide the query heads and the ffn width."""
    block_size: Positive = 16
    """Tokens in one KV block; small wastes less of a sequence's last block, large makes shorter tables."""
    # Memory split: weights, KV pool, working space.
    kv_memory_fraction: Fraction = 0.3
    """Share of the memory free after loading that the KV pool takes when `kv_blocks` is 0 (per local actor)."""
    kv_blocks: Count = 0
    """KV blocks in the pool; 0 sizes the pool from `kv_memory_fraction`."""
    max_model_len: Count = 0
    """Tokens of the longest sequence; 0 is data.max_prompt_tokens + rollout.max_new_tokens."""
    # Batching and chunk budget.
    max_num_seqs: Positive = 256
    """Requests decoded at once."""
    max_num_batched_tokens: Positive = 2048
    """Tokens one engine step computes at most; longer prefills are chunked to it."""
    # Back end.
    quantization: Literal["none", "fp8"] = "none"
    """`fp8` multiplies with e4m3 copies of the weights (128 x 128 block scales), made anew after each publication."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs, one for each batch bucket (GPU only; false launches every kernel by itself)."""
    release_memory: bool = False
    """Colocated: give weights and KV pool back while the learner works; they come anew at the publication (without CUDA graphs)."""
    update_mode: Literal["recompute", "drain", "keep"] = "recompute"
    """A weight update lets running requests prefill again under the new weights, finish before it, or `keep` their old KV."""


@dataclass(config=_strict, frozen=True)
class Learner:
    replicas: Positive = 1
    """Data-parallel copies of the sharded learner (HSDP when > 1)."""
    shards: Positive = 1
    """FSDP2 ranks that share one copy."""
    max_tokens_per_micro_batch: Positive = 4096
    """Packed tokens in one forward/backward; a single longer sequence still goes through alone."""
    lr: PositiveFloat = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after warm-up: constant, or decaying to `min_lr_ratio` of the peak at the last step."""
    warmup_steps: Count = 0
    """Steps of linear warm-up: step s (from 0) runs at lr·(s+1)/warmup_steps."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1), _Number] = 0.0
    """Floor of the decay as a share of the peak."""
    beta1: Annotated[float, Field(ge=0, lt=1), _Number] = 0.9
    """AdamW first-moment decay."""
    beta2: Annotated[float, Field(ge=0, lt=1), _Number] = 0.95
    """AdamW second-moment decay."""
    adam_eps: PositiveFloat = 1e-8
    """AdamW denominator term."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay, applied to matrices and embeddings only."""
    moments: Literal["fp32", "8bit"] = "fp32"
    """AdamW moments of matrices: `8bit` (torchao, blocks of 64) holds a 7B in 77 GB instead of 122."""
    offload_moments: bool = False
    """Keep fp32 moments, and compute the update, in host memory: 8 bytes a parameter less on the GPU."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global L2 norm."""
    epochs: Positive = 1
    """Times that a step goes through its samples."""
    minibatches: Positive = 1
    """Optimizer updates of one epoch, each on its share of the step's groups."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """`full` keeps one hidden state a layer and recomputes the rest in backward; `selective` recomputes all but matrix products."""
    reduce: Literal["micro_batch", "step"] = "micro_batch"
    """`step` keeps whole fp32 gradients (4 bytes a parameter on every rank) and reduces once; `micro_batch` keeps only shards."""
    parked: tuple[Literal["critic", "reference", "reward_model"], ...] = ()
    """Models whose shards wait in host memory while they are not computing (GPU only)."""
    logprob_chunk: Positive = 1024
    """Rows of logits that exist at once; the [tokens, vocabulary] matrix is never built."""


@dataclass(config=_strict, frozen=True)
class Algorithm:
    name: Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "gspo", "cispo", "ppo", "dpo", "reward_model"] = "grpo"
    """Preset of its paper's settings (PRESETS); any field given beside it wins."""
    loss: Literal["clip", "gspo", "cispo", "dpo", "ipo", "bradley_terry"] = "clip"
    """Loss function, by its name in losses.py."""
    advantage: Literal["group", "rloo", "returns", "gae"] = "group"
    """Against the group's mean, the mean of its other samples, nothing (rewards to go), or the critic's values (GAE)."""
    advantage_std: bool = True
    """Divide group-centred rewards by the group's standard deviation (`group` only)."""
    advantage_whiten: bool = False
    """Shift and scale advantages to mean 0 and variance 1 over all trained tokens of the step."""
    gamma: Annotated[float, Field(gt=0, le=1), _Number] = 1.0
    """Discount of a later token's reward (`returns`, `gae`)."""
    gae_lambda: Annotated[float, Field(ge=0, le=1), _Number] = 0.95
    """GAE's decay of later value errors; 1 trusts rewards only, 0 the critic only."""
    clip_low: Annotated[float, Field(ge=0, lt=1), _Number] = 0.2
    """Lower clip of the probability ratio: 1 − clip_low."""
    clip_high: NonNegative = 0.2
    """Upper clip of the probability ratio: 1 + clip_high."""
    dual_clip: NonNegative = 0.0
    """Bound c > 1 on the loss of negative advantages, c·|A| (arXiv 1912.09729); 0 switches it off."""
    old_logprobs: Literal["rollout", "learner"] = "rollout"
    """Denominator of the ratio: the engine's recorded logprobs, or the learner's own at the step's start (decoupled PPO)."""
    importance: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Correction by learner's start / engine (needs old_logprobs=learner): weight cut at the cap, or dropped beyond it."""
    importance_cap: PositiveFloat = 2.0
    """Largest importance weight; `*_mask` also drops weights below its inverse."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL penalty to the frozen reference, DPO's and IPO's beta; 0 builds no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token KL estimator (Schulman 2020, joschu.net/blog/kl-approx.html); in the loss, k1's gradient is zero on average."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL penalty acts: on each token's loss, or on the reward before advantages are formed."""
    loss_mean: Literal["token", "sequence", "constant", "sum"] = "sequence"
    """Token mean, mean of sequence means, division by samples × max_new_tokens, or sum over a sequence's tokens."""
    resample: Count = 0
    """Batches' worth of groups without variance that a step may replace by new prompts (dynamic sampling); 0 keeps them."""
    overlong_buffer: Count = 0
    """Last tokens below max_new_tokens over which the reward falls linearly by 1 (DAPO's overlong penalty); 0 is off."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), _Number] = 0.0
    """Share of preference pairs taken to be labelled the wrong way round (DPO)."""


# What each name sets: what its paper is about. Fields not listed keep the defaults above; a KL penalty is added by `kl_coef` alone.
PRESETS: dict[str, dict] = {
    "grpo": {},
    "dr_grpo": {"advantage_std": False, "loss_mean": "constant"},
    "dapo": {"clip_high": 0.28, "loss_mean": "token", "resample": 10},  # overlong_buffer: a fifth of max_new_tokens
    "rloo": {"advantage": "rloo", "loss_mean": "sum", "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp": {"advantage": "returns", "advantage_whiten": True, "loss_mean": "token", "kl_in": "reward",
                     "kl_estimator": "k1"},
    # So narrow a clip would cut the gap between engine and learner: the ratio is taken within the learner.
    "gspo": {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "old_logprobs": "learner"},
    "cispo": {"loss": "cispo", "clip_high": 4.0, "loss_mean": "token"},  # ScaleRL's weight of at most 5, arXiv 2510.13786
    "ppo": {"advantage": "gae", "advantage_whiten": True, "loss_mean": "token", "kl_coef": 0.05, "kl_in": "reward",
            "kl_estimator": "k1"},
    "dpo": {"loss": "dpo", "kl_coef": 0.1},
    "reward_model": {"loss": "bradley_terry"},
}


@dataclass(config=_strict, frozen=True)
class Critic:
    """Value model of `advantage=gae`, sharded over the learner ranks."""
    trunk: Literal["own", "shared"] = "own"
    """Weights of its own, or a value head on the policy's last hidden state."""
    path: str = ""
    """Folder to start from (a sequence-classification one brings its head); empty takes model.path with a head of zeros."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate of an own trunk; same schedule as the policy's."""
    loss_coef: PositiveFloat = 0.5
    """Weight of the value loss beside the policy loss (shared trunk only)."""
    value_clip: NonNegative = 0.2
    """Values may move this far from the step's first estimate before their loss stops falling; 0 is off."""
    warmup_steps: Count = 0
    """First steps in which the critic learns and the policy stands still."""


@dataclass(config=_strict, frozen=True)
class RewardModel:
    """A frozen scorer on the learner ranks, added to the functions' reward."""
    path: str = ""
    """Sequence-classification folder with one label, and the policy's tokenizer; empty means none."""
    weight: Annotated[float, _Number] = 1.0
    """Weight of its score in the reward; 0 only logs it, a negative one turns it round."""


@dataclass(config=_strict, frozen=True)
class Publish:
    mode: Literal["in_place", "staged"] = "in_place"
    """`in_place` stops actors while weights arrive; `staged` decodes on and swaps when all are there (one more copy of a slice)."""
    bucket_mb: PositiveFloat = 64.0
    """Bytes (in MB) in flight at once per receiving rank; at most two such buckets exist on a side."""
    max_roots: Positive = 8
    """Learner ranks that broadcast; with more shards than this, owners hand their parts to a root first."""
    verify: bool = True
    """Compare a digest of every live actor tensor with the learner's after every publication."""


@dataclass(config=_strict, frozen=True)
class Eval:
    every: Count = 0
    """Steps between greedy evaluations on `data.eval_path` (also before the first step and after the last); 0 never."""
    max_prompts: Positive = 256
    """Rows of the evaluation data used, from its start."""
    keep_best: bool = False
    """Save the weights of the best evaluation so far as RUN/best."""


@dataclass(config=_strict, frozen=True)
class Export:
    every: Count = 0
    """Steps between exports of the weights as RUN/step-N, Hugging Face folders; 0 saves only RUN/model at the end."""


@dataclass(config=_strict, frozen=True)
class Checkpoint:
    every: Count = 50
    """Steps between checkpoints of everything a run needs to go on; 0 saves only at a signal (SIGUSR1 to rank 0)."""
    keep: Positive = 2
    """Complete checkpoints kept; older ones are removed."""


@dataclass(config=_strict, frozen=True)
class Guard:
    max_grad_norm: NonNegative = 0.0
    """A gradient's norm, before clipping, above this is a fault; 0 asks only that it is finite."""
    min_entropy: NonNegative = 0.0
    """A step's mean entropy below this, in nats, is a fault (collapse); 0 is off."""
    max_gap: NonNegative = 0.0
    """A logprob further than this from the engine's is a fault; 0 is off."""
    action: Literal["stop", "skip"] = "stop"
    """At a fault the run stops, or the update is skipped and counted; either way the batch is saved under RUN/guard."""


@dataclass(config=_strict, frozen=True)
class Log:
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """Trackers, through accelerate, besides metrics.jsonl."""
    samples_per_step: Count = 4
    """Samples of each step written to rollouts.jsonl."""
    trace: bool = True
    """Write every rank's spans to trace.json (Chrome/Perfetto)."""


@dataclass(config=_strict, frozen=True)
class Plan:
    # What plan.py cannot read off the rest of the config; a run uses it for `placement=auto` and its last table only.
    hardware: str = ""
    """`a100`, `h100`, `h200` or `b200` (vendors' sheets), or a file of `plan.py --calibrate`; empty: h100, in a run its own."""
    gpus_per_node: Positive = 8
    """GPUs that share NVLink; an engine does not straddle two nodes."""
    mean_prompt: NonNegative = 0.0
    """Expected mean tokens of a prompt; 0 takes data.max_prompt_tokens."""
    mean_response: NonNegative = 0.0
    """Expected mean tokens of a response, after the cut; 0 takes rollout.max_new_tokens."""
    length_sigma: NonNegative = 1.0
    """Sigma of the lognormal that response lengths are drawn from, cut at rollout.max_new_tokens; 0 makes all equal."""
    decode_tokens_per_gpu: NonNegative = 0.0
    """Response tokens/s a GPU at this layout, if you have measured them; 0 derives them."""
    learner_mfu: Fraction = 0.4
    """Model FLOPs (causal half of attention) a learner GPU achieves, as a share of its dense peak."""
    storage_gb_s: PositiveFloat = 2.0
    """GB/s at which one node writes a checkpoint."""
    dollars_per_gpu_hour: NonNegative = 2.5
    """Price of one GPU for an hour; 0 leaves money aside."""


@dataclass(config=_strict, frozen=True)
class Config:
    steps: Count = 100
    """Optimizer steps; 0 only publishes and evaluates the start."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63), _Number] = 0
    """Seed of initial weights, data order and sampling."""
    exact: bool = False
    """Make engine and learner logprobs equal bit for bit: CPU, float32, at most 2 threads, widths that are multiples of 16."""
    max_staleness: Count = 0
    """Weight updates a sample may lag behind the step that trains on it: 0 is on-policy, 1 one-step-off, more asynchronous."""
    placement: Literal["split", "colocated", "auto"] = "split"
    """`split`: learners are ranks 0…L−1, actors those after. `colocated`: all are both, in turn. `auto`: plan.py's search says."""
    threads: Count = 0
    """CPU threads of each rank; 0 divides the machine's cores by the ranks that compute at the same time."""
    resume: Literal["auto", "never"] = "auto"
    """`auto` goes on from the last complete checkpoint in `run_dir`, if there is one; `never` moves an old run aside."""
    run_dir: str = "runs/default"
    """Folder for metrics.jsonl, eval.jsonl, rollouts.jsonl, config.yaml, trace.json, the trackers and the final model."""
    collective_timeout_s: PositiveFloat = 600.0
    """A rank that does not answer a collective or a handshake for this long ends the job (generation has its own limit)."""
    model: Model = dataclasses.field(default_factory=Model)
    data: Data = dataclasses.field(default_factory=Data)
    rollout: Rollout = dataclasses.field(default_factory=Rollout)
    reward: Reward = dataclasses.field(default_factory=Reward)
    actor: Actor = dataclasses.field(default_factory=Actor)
    learner: Learner = dataclasses.field(default_factory=Learner)
    algorithm: Algorithm = dataclasses.field(default_factory=Algorithm)
    critic: Critic = dataclasses.field(default_factory=Critic)
    reward_model: RewardModel = dataclasses.field(default_factory=RewardModel)
    publish: Publish = dataclasses.field(default_factory=Publish)
    eval: Eval = dataclasses.field(default_factory=Eval)
    export: Export = dataclasses.field(default_factory=Export)
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)
    guard: Guard = dataclasses.field(default_factory=Guard)
    log: Log = dataclasses.field(default_factory=Log)
    plan: Plan = dataclasses.field(default_factory=Plan)

    @property
    def offline(self) -> bool:
        """Whether the data are preference pairs: no rollouts, hence no actor, queue or publication."""
        return self.algorithm.loss in ("dpo", "ipo", "bradley_terry")

    @property
    def late_rewards(self) -> bool:
        """Whether rank 0 must hear from the learners before it can form advantages."""
        penalty = self.algorithm.kl_coef and self.algorithm.kl_in == "reward" and self.algorithm.advantage in ("group", "rloo")
        return bool(self.reward_model.path or penalty)

    @property
    def actor_ranks(self) -> int:
        return 0 if self.offline else self.actor.replicas * self.actor.tp

    @property
    def world_size(self) -> int:
        """Ranks that torchrun must start."""
        return self.learner.replicas * self.learner.shards + (0 if self.placement == "colocated" else self.actor_ranks)

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence that the engine must hold."""
        return self.actor.max_model_len or self.data.max_prompt_tokens + self.rollout.max_new_tokens


def fields(cls=Config, prefix: str = "") -> list[tuple[str, Any, Any, str]]:
    """Every leaf field as (dotted key, type, default, sentence)."""
    rows = []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            rows += fields(field.type, f"{prefix}{field.name}.")
        else:
            described = cls.__pydantic_fields__[field.name]
            rows.append((prefix + field.name, described.annotation, described.default, described.description))
    return rows
