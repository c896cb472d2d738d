"""From YAML and a command line to a checked Config.

A run is one YAML under configs/ plus `section.key=value` overrides:

    torchrun --nproc-per-node 2 train.py configs/toy.yaml learner.lr=1e-3 steps=20
    python train.py --help          # every field, its type, default and one sentence

pydantic checks types and bounds; unknown keys are refused with the nearest match, because a misspelt option that is
silently dropped costs a whole run. `check()` then refuses combinations that cannot work, before any process group starts.
"""

import dataclasses
import difflib
import json
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError

from config import PRESETS, Algorithm, Config, ConfigError, fields

# Names that users of TRL, verl and transformers type from habit, and what they are called here.
_ELSEWHERE = {
    "learning_rate": "learner.lr", "num_epochs": "steps", "num_train_epochs": "steps", "max_steps": "steps",
    "num_generations": "rollout.samples_per_prompt", "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "data.max_prompt_tokens", "batch_size": "rollout.prompts_per_step", "model_name": "model.path",
    "beta": "algorithm.kl_coef", "epsilon": "algorithm.clip_low", "epsilon_high": "algorithm.clip_high",
    "reward_funcs": "reward.functions", "output_dir": "run_dir", "gradient_checkpointing": "learner.activation_checkpointing",
    "ppo_epochs": "learner.epochs", "num_iterations": "learner.epochs", "num_mini_batches": "learner.minibatches",
    "loss_type": "algorithm.name", "scale_rewards": "algorithm.advantage_std", "lam": "algorithm.gae_lambda",
    "cliprange_value": "critic.value_clip", "reward_model_path": "reward_model.path", "adv_estimator": "algorithm.advantage",
    "tensor_parallel_size": "actor.tp", "gpu_memory_utilization": "actor.kv_memory_fraction",
}


def nearest_key(key: str) -> str:
    """The known dotted key that a misspelt, misplaced or foreign one most likely meant."""
    known = {name: name for name, *_ in fields()}
    wanted = key.replace("-", "_")
    leaf = wanted.rsplit(".", 1)[-1]
    leaves = {name.rsplit(".", 1)[-1]: name for name in reversed(known)}  # of two sections' `lr`, the first
    names = leaves | _ELSEWHERE | known
    return names[max(names, key=lambda name: max(difflib.SequenceMatcher(None, word, name).ratio() for word in (wanted, leaf)))]


def with_preset(values: dict) -> dict:
    """`values` over what `algorithm.name` sets; wrong types are left for pydantic to name."""
    given = values.get("algorithm", {})
    name = given.get("name", Algorithm.name) if isinstance(given, dict) else None
    return values | {"algorithm": PRESETS[name] | given} if isinstance(name, str) and name in PRESETS else values


def build(values: dict) -> Config:
    """A checked Config from nested plain values. Raises ConfigError naming every bad key, its value and the fix."""
    try:
        config = TypeAdapter(Config).validate_python(with_preset(values))
    except ValidationError as error:
        lines = []
        for problem in error.errors(include_url=False):
            key = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "unexpected_keyword_argument":
                lines.append(f"unknown key `{key}` = {problem['input']!r}; did you mean `{nearest_key(key)}`?")
            else:
                lines.append(f"`{key}` = {problem['input']!r}: {problem['msg'][:1].lower()}{problem['msg'][1:]}")
        raise ConfigError("\n".join(lines)) from None
    if config.algorithm.name == "dapo" and "overlong_buffer" not in values["algorithm"]:  # the paper's 4,096 of 20,480
        buffer = config.rollout.max_new_tokens // 5
        config = dataclasses.replace(config, algorithm=dataclasses.replace(config.algorithm, overlong_buffer=buffer))
    check(config)
    return config


def check(config: Config) -> None:
    """Refuse combinations of settings that cannot work together. Raises ConfigError."""
    problems = check_algorithm(config)
    if config.exact and config.actor.tp > 1:
        problems.append(f"`exact` needs `actor.tp` = 1, not {config.actor.tp}: sums over ranks round in another order")
    if config.exact and config.actor.quantization != "none":
        problems.append(f"`exact` needs `actor.quantization` = none, not {config.actor.quantization}")
    if config.exact and config.actor.update_mode == "keep":
        problems.append("`exact` needs `actor.update_mode` = recompute or drain: kept keys and values are those of older weights")
    if config.exact and config.threads > 2:
        problems.append(f"`exact` with `threads` = {config.threads}: torch's SiLU rounds differently at the seams between three "
                        "and more; set 1 or 2")
    problems += check_placement(config)
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
    if config.learner.offload_moments and config.learner.moments != "fp32":
        problems.append(f"`learner.offload_moments` = true with `learner.moments` = {config.learner.moments}: only fp32 moments "
                        "are worth the way to the host; choose one")
    if config.learner.min_lr_ratio and config.learner.schedule == "constant":
        problems.append(f"`learner.min_lr_ratio` = {config.learner.min_lr_ratio} has no effect with "
                        "`learner.schedule` = constant; choose linear or cosine")
    if config.reward.weights and len(config.reward.weights) != len(config.reward.functions):
        problems.append(f"`reward.weights` has {len(config.reward.weights)} entries for "
                        f"{len(config.reward.functions)} `reward.functions`; give one weight each, or none")
    if not all(config.rollout.stop):
        problems.append("`rollout.stop` holds an empty string, which would end every response at once; remove it")
    if not (config.reward.functions or config.reward_model.path or config.offline):
        problems.append("`reward.functions` is empty: name at least one `file.py:function`, or a `reward_model.path`")
    if config.eval.every and not config.data.eval_path:
        problems.append(f"`eval.every` = {config.eval.every} needs `data.eval_path`")
    if config.exact and config.model.dtype != "float32":
        problems.append(f"`exact` needs `model.dtype` = float32, not {config.model.dtype}")
    if problems:
        raise ConfigError("\n".join(problems))


def check_placement(config: Config) -> list[str]:
    """What is wrong with where actors and learners are to run."""
    problems, learners = [], config.learner.replicas * config.learner.shards
    if config.placement == "split":
        return ["`actor.release_memory` has no effect with `placement` = split: engines have their ranks to themselves; remove it"
                ] if config.actor.release_memory else []
    if config.offline:
        return [f"`placement` = {config.placement} has no effect on {config.algorithm.loss}, which has no actors; remove it"]
    if config.placement == "auto":
        return []  # checked again once it is known
    if config.actor_ranks != learners:
        problems.append(f"`placement` = colocated: actor.replicas x actor.tp = {config.actor_ranks} must be learner.replicas x "
                        f"learner.shards = {learners}, as every rank is both")
    if config.max_staleness:
        problems.append(f"`max_staleness` = {config.max_staleness} with `placement` = colocated: ranks generate and learn in turn, "
                        "so that no sample is ever older than the weights; set 0, or placement=split")
    if config.publish.mode != "in_place":
        problems.append(f"`publish.mode` = {config.publish.mode} with `placement` = colocated: no engine decodes while its learner "
                        "publishes; set in_place")
    return problems


def check_algorithm(config: Config) -> list[str]:
    """What is wrong with the algorithm's settings, together with those that they depend on."""
    problems, algorithm, shared = [], config.algorithm, config.critic.trunk == "shared"
    grouped = algorithm.advantage in ("group", "rloo") and not config.offline
    if grouped and config.rollout.samples_per_prompt < 2:
        problems.append(f"`rollout.samples_per_prompt` = 1: {algorithm.name} with `algorithm.advantage` = {algorithm.advantage} "
                        "compares the samples of one prompt; set at least 2")
    if 0 < algorithm.dual_clip <= 1:
        problems.append(f"`algorithm.dual_clip` = {algorithm.dual_clip}: must be > 1 (3 is usual), or 0 for off")
    if algorithm.dual_clip and algorithm.loss != "clip":
        problems.append(f"`algorithm.dual_clip` = {algorithm.dual_clip} does nothing to `algorithm.loss` = {algorithm.loss}; set 0")
    if algorithm.importance != "none" and algorithm.old_logprobs != "learner":
        problems.append(f"`algorithm.importance` = {algorithm.importance} needs `algorithm.old_logprobs` = learner: with rollout "
                        "the ratio itself is taken against the engine")
    if algorithm.importance_cap < 1:
        problems.append(f"`algorithm.importance_cap` = {algorithm.importance_cap}: below 1 it would cut on-policy tokens; raise it")
    if algorithm.overlong_buffer > config.rollout.max_new_tokens:
        problems.append(f"`algorithm.overlong_buffer` = {algorithm.overlong_buffer} is longer than `rollout.max_new_tokens` = "
                        f"{config.rollout.max_new_tokens}; lower it")
    if algorithm.loss in ("dpo", "ipo") and not algorithm.kl_coef:
        problems.append(f"`algorithm.kl_coef` = 0: it is {algorithm.loss}'s beta, and must be positive (0.1 is usual)")
    if algorithm.label_smoothing and algorithm.loss != "dpo":
        problems.append(f"`algorithm.label_smoothing` = {algorithm.label_smoothing} has no effect on `algorithm.loss` = "
                        f"{algorithm.loss}; set 0")
    if algorithm.resample and (not grouped or config.reward_model.path):
        problems.append(f"`algorithm.resample` = {algorithm.resample} needs `algorithm.advantage` = group or rloo and no reward "
                        "model, whose scores come after the groups are chosen; set 0")
    if config.critic.path and algorithm.advantage != "gae":
        problems.append(f"`critic.path` = {config.critic.path!r}: `algorithm.advantage` = {algorithm.advantage} has no critic; "
                        "remove it")
    if shared and (config.critic.path or config.critic.warmup_steps or config.learner.parked.count("critic")):
        problems.append("`critic.trunk` = shared has no weights of its own: leave `critic.path` empty, `critic.warmup_steps` 0 "
                        "and critic out of `learner.parked`")
    if shared and algorithm.advantage != "gae":
        problems.append(f"`critic.trunk` = shared has no effect with `algorithm.advantage` = {algorithm.advantage}; remove it")
    unused = {"algorithm.entropy_coef": algorithm.entropy_coef, "algorithm.resample": algorithm.resample,
              "algorithm.overlong_buffer": algorithm.overlong_buffer, "reward_model.path": config.reward_model.path,
              "algorithm.kl_coef": algorithm.loss == "bradley_terry" and algorithm.kl_coef}
    for field in (field for field, value in unused.items() if value and config.offline):
        problems.append(f"`{field}` = {unused[field]} has no effect on pairs, from which {algorithm.loss} learns; remove it")
    if config.eval.keep_best and not config.eval.every:
        problems.append("`eval.keep_best` needs `eval.every`: the best is chosen by evaluation")
    if config.learner.minibatches > config.rollout.prompts_per_step:
        problems.append(f"`learner.minibatches` = {config.learner.minibatches} exceeds `rollout.prompts_per_step` = "
                        f"{config.rollout.prompts_per_step}: an update would have no group; lower it")
    return problems


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


def plain(config: Config) -> dict:
    """The effective config as what JSON and YAML hold: tuples are lists."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def to_yaml(config: Config) -> str:
    """The effective config as YAML that `parse` reads back to an equal Config."""
    return yaml.safe_dump(plain(config), sort_keys=False)
