"""Every setting of a run: plain dataclasses, no torch.

A run is one YAML under configs/ plus `section.key=value` overrides on the command line:

    torchrun --nproc-per-node 2 train.py configs/toy.yaml learner.lr=1e-3 steps=20
    python train.py --help          # every field, its type, default and one sentence

pydantic checks types and bounds; unknown keys are refused with the nearest match, because a misspelt option that is
silently dropped costs a whole run. `check()` then refuses combinations that cannot work, before any process group starts.
"""

import dataclasses
import difflib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

_strict = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)


def _number(value):
    """YAML's yes and true are no numbers, though Python's True is 1."""
    if isinstance(value, bool):
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
    weights: tuple[float, ...] = ()
    """Weight of each function; empty means 1 for all."""
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
    update_mode: Literal["recompute"] = "recompute"
    """What a weight update does to running requests: `recompute` re-prefills their tokens under the new weights."""


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
    activation_checkpointing: Literal["none", "full"] = "none"
    """`full` keeps one hidden state a layer and recomputes the rest in backward: 2·tokens·hidden·layers bytes in bf16."""
    logprob_chunk: Positive = 1024
    """Rows of logits that exist at once; the [tokens, vocabulary] matrix is never built."""


@dataclass(config=_strict, frozen=True)
class Algorithm:
    name: Literal["grpo"] = "grpo"
    """Policy loss, a pure function in losses.py."""
    advantage_std: bool = True
    """Divide group-centred rewards by the group's standard deviation (GRPO); false only centres (Dr.GRPO)."""
    clip_low: Annotated[float, Field(ge=0, lt=1), _Number] = 0.2
    """Lower clip of the probability ratio: 1 − clip_low."""
    clip_high: NonNegative = 0.2
    """Upper clip of the probability ratio: 1 + clip_high."""
    dual_clip: NonNegative = 0.0
    """Bound c > 1 on the loss of negative advantages, c·|A| (arXiv 1912.09729); 0 switches it off."""
    entropy_coef: NonNegative = 0.0
    """Weight of the entropy bonus."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL penalty to the frozen reference in the loss; 0 builds no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Per-token KL estimator (Schulman 2020, joschu.net/blog/kl-approx.html); k1's gradient is zero on average."""
    loss_mean: Literal["token", "sequence", "constant", "sum"] = "token"
    """Token mean, mean of sequence means, division by samples × max_new_tokens, or sum over a sequence's tokens."""


@dataclass(config=_strict, frozen=True)
class Publish:
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
    # What plan.py cannot read off the rest of the config; a run itself uses none of it.
    hardware: str = "h100"
    """`a100`, `h100`, `h200` or `b200` (vendors' sheets), or a JSON file that `plan.py --calibrate FILE` measured on a machine."""
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
    max_staleness: Annotated[int, Field(ge=0, le=1), _Number] = 0
    """Weight updates a sample may lag behind the step that trains on it: 0 is on-policy, 1 one-step-off."""
    placement: Literal["split"] = "split"
    """`split`: learners are ranks 0…L−1, actors the ranks after them."""
    threads: Count = 0
    """CPU threads of each rank; 0 divides the machine's cores by the ranks that compute at the same time."""
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
    publish: Publish = dataclasses.field(default_factory=Publish)
    eval: Eval = dataclasses.field(default_factory=Eval)
    log: Log = dataclasses.field(default_factory=Log)
    plan: Plan = dataclasses.field(default_factory=Plan)

    @property
    def world_size(self) -> int:
        """Ranks that torchrun must start."""
        return self.learner.replicas * self.learner.shards + self.actor.replicas * self.actor.tp

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


# Names that users of TRL, verl and transformers type from habit, and what they are called here.
_ELSEWHERE = {
    "learning_rate": "learner.lr", "num_epochs": "steps", "num_train_epochs": "steps", "max_steps": "steps",
    "num_generations": "rollout.samples_per_prompt", "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens", "batch_size": "rollout.prompts_per_step", "model_name": "model.path",
    "beta": "algorithm.kl_coef", "epsilon": "algorithm.clip_low", "epsilon_high": "algorithm.clip_high",
    "reward_funcs": "reward.functions", "output_dir": "run_dir", "gradient_checkpointing": "learner.activation_checkpointing",
    "tensor_parallel_size": "actor.tp", "gpu_memory_utilization": "actor.kv_memory_fraction",
}


def nearest_key(key: str) -> str:
    """The known dotted key that a misspelt, misplaced or foreign one most likely meant."""
    known = {name: name for name, *_ in fields()}
    wanted = key.replace("-", "_")
    leaf = wanted.rsplit(".", 1)[-1]
    names = {name.rsplit(".", 1)[-1]: name for name in known} | _ELSEWHERE | known
    return names[max(names, key=lambda name: max(difflib.SequenceMatcher(None, word, name).ratio() for word in (wanted, leaf)))]


def build(values: dict) -> Config:
    """A checked Config from nested plain values. Raises ConfigError naming every bad key, its value and the fix."""
    try:
        config = TypeAdapter(Config).validate_python(values)
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            key = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "unexpected_keyword_argument":
                lines.append(f"unknown key `{key}` = {problem['input']!r}; did you mean `{nearest_key(key)}`?")
            else:
                lines.append(f"`{key}` = {problem['input']!r}: {problem['msg'][:1].lower()}{problem['msg'][1:]}")
        raise ConfigError("\n".join(lines)) from None
    check(config)
    return config


def check(config: Config) -> None:
    """Refuse combinations of settings that cannot work together. Raises ConfigError."""
    problems = []
    if config.rollout.samples_per_prompt < 2:
        problems.append("`rollout.samples_per_prompt` = 1: grpo compares the samples of one prompt; set at least 2")
    if 0 < config.algorithm.dual_clip <= 1:
        problems.append(f"`algorithm.dual_clip` = {config.algorithm.dual_clip}: must be > 1 (3 is usual), or 0 for off")
    if config.exact and config.actor.tp > 1:
        problems.append(f"`exact` needs `actor.tp` = 1, not {config.actor.tp}: sums over ranks round in another order")
    if config.exact and config.actor.quantization != "none":
        problems.append(f"`exact` needs `actor.quantization` = none, not {config.actor.quantization}")
    if config.exact and config.threads > 2:
        problems.append(f"`exact` with `threads` = {config.threads}: torch's SiLU rounds differently at the seams between three "
                        "and more; set 1 or 2")
    needed = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if 0 < config.actor.max_model_len < needed:
        problems.append(f"`actor.max_model_len` = {config.actor.max_model_len} is below data.max_prompt_tokens + "
                        f"rollout.max_new_tokens = {needed}; raise it, or set 0")
    if config.actor.max_num_batched_tokens < config.actor.max_num_seqs:
        problems.append(f"`actor.max_num_batched_tokens` = {config.actor.max_num_batched_tokens} is below "
                        f"`actor.max_num_seqs` = {config.actor.max_num_seqs}: running requests would take turns; raise it")
    if config.learner.warmup_steps > config.steps > 0:
        problems.append(f"`learner.warmup_steps` = {config.learner.warmup_steps} exceeds `steps` = {config.steps}: "
                        "the peak learning rate would never be reached; lower it")
    if config.learner.min_lr_ratio and config.learner.schedule == "constant":
        problems.append(f"`learner.min_lr_ratio` = {config.learner.min_lr_ratio} has no effect with "
                        "`learner.schedule` = constant; choose linear or cosine")
    if config.reward.weights and len(config.reward.weights) != len(config.reward.functions):
        problems.append(f"`reward.weights` has {len(config.reward.weights)} entries for "
                        f"{len(config.reward.functions)} `reward.functions`; give one weight each, or none")
    if not all(config.rollout.stop):
        problems.append("`rollout.stop` holds an empty string, which would end every response at once; remove it")
    if not config.reward.functions:
        problems.append("`reward.functions` is empty: name at least one `file.py:function`")
    if config.eval.every and not config.data.eval_path:
        problems.append(f"`eval.every` = {config.eval.every} needs `data.eval_path`")
    if config.exact and config.model.dtype != "float32":
        problems.append(f"`exact` needs `model.dtype` = float32, not {config.model.dtype}")
    if problems:
        raise ConfigError("\n".join(problems))


def parse(argv: list[str]) -> Config:
    """Config from `[file.yaml] [key=value …]`. Raises ConfigError for anything that is neither."""
    values: dict = {}
    for argument in argv:
        key, equals, text = argument.partition("=")
        if not equals:
            path = Path(argument)
            if argument.startswith("-") or path.suffix not in (".yaml", ".yml"):
                raise ConfigError(f"`{argument}` is neither a .yaml file nor `section.key=value`; see --help")
            if not path.is_file():
                raise ConfigError(f"config file `{argument}` does not exist; configs/ has {_known_configs()}")
            try:
                loaded = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys) or {}
            except (yaml.YAMLError, UnicodeDecodeError) as error:
                raise ConfigError(f"config file `{argument}` is not YAML: {error}") from None
            if not isinstance(loaded, dict):
                raise ConfigError(f"config file `{argument}` must hold `key: value` lines, not a {type(loaded).__name__}")
            values = _merge(values, loaded)
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigError(f"`{argument}`: the value is not YAML; quote it") from None
        for part in reversed(key.lstrip("-").split(".")):
            value = {part: value}
        values = _merge(values, value)
    return build(values)


class _UniqueKeys(yaml.SafeLoader):
    """YAML in which a key given twice is an error: plain PyYAML lets the last one win silently."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"`{twice}` is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _merge(base: dict, over: dict) -> dict:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _known_configs() -> str:
    return ", ".join(sorted(path.name for path in Path(__file__).with_name("configs").glob("*.yaml")))


def help_text() -> str:
    """One entry per field: key, type, default, sentence."""
    lines = ["usage: torchrun --nproc-per-node N train.py [config.yaml] [section.key=value ...]", ""]
    for key, annotation, default, sentence in fields():
        kind = getattr(annotation, "__name__", "") if isinstance(annotation, type) else str(annotation)
        kind = kind.replace("typing.", "")
        lines += [f"{key}  ({kind}, default {json.dumps(default)})", f"    {sentence}"]
    return "\n".join(lines)


def to_yaml(config: Config) -> str:
    """The effective config as YAML that `parse` reads back to an equal Config."""
    return yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(config))), sort_keys=False)
