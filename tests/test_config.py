"""Config: a misspelt, misplaced, mistyped or impossible setting ends the run at its start (cases R6, L6, L8, L9)."""

import dataclasses
import json
import math
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml

from config import PRESETS, Algorithm, Config, ConfigError, fields
from settings import build, parse, to_yaml, with_preset

ROOT = Path(__file__).parents[1]
KEYS = [key for key, *_ in fields()]
TYPES = {key: annotation for key, annotation, *_ in fields()}
ZERO_HAS_A_MEANING = {  # every other number refuses 0, which would divide by zero, hang or train nothing
    "steps", "seed", "max_staleness", "threads", "actor.kv_blocks", "actor.max_model_len", "learner.warmup_steps",
    "learner.min_lr_ratio", "learner.beta1",
    "learner.beta2", "learner.weight_decay", "algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip",
    "algorithm.entropy_coef", "algorithm.kl_coef", "algorithm.gae_lambda", "algorithm.resample", "algorithm.overlong_buffer",
    "algorithm.label_smoothing", "critic.value_clip", "critic.warmup_steps", "reward_model.weight", "eval.every", "export.every",
    "log.samples_per_step", "checkpoint.every", "guard.max_grad_norm", "guard.min_entropy", "guard.max_gap", "plan.mean_prompt",
    "plan.mean_response",
    "plan.length_sigma", "plan.decode_tokens_per_gpu", "plan.dollars_per_gpu_hour",
}
MAY_BE_NEGATIVE = {"reward_model.weight"}


def nested(key: str, value) -> dict:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def value_of(settings: Config, key: str):
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings


def refusal(values: dict) -> str:
    with pytest.raises(ConfigError) as error:
        build(values)
    return str(error.value)


def refused(values: dict) -> bool:
    try:
        return not build(values)
    except ConfigError:
        return True


def command(*argv: str) -> subprocess.CompletedProcess:
    """`python train.py ARGV` as a user types it; it ends before any process group starts."""
    return subprocess.run([sys.executable, "train.py", *argv], cwd=ROOT, capture_output=True, text=True)


# --- R6: names


@pytest.mark.parametrize("wrong, meant", [
    ("learning_rat", "learner.lr"), ("learning_rate", "learner.lr"), ("num-epochs", "steps"), ("num_train_epochs", "steps"),
    ("rollout.lr", "learner.lr"), ("actor.seed", "seed"), ("learner.steps", "steps"), ("lr", "learner.lr"),
    ("learner.warmup_step", "learner.warmup_steps"), ("rollout.num_generations", "rollout.samples_per_prompt"),
    ("beta", "algorithm.kl_coef"), ("model.dype", "model.dtype"), ("reward.function", "reward.functions"),
])
@pytest.mark.parametrize("source", ["yaml", "command line"])
def test_r6_unknown_key_is_refused_with_nearest_match(wrong, meant, source, tmp_path):
    """R6: misspelt, in the wrong section, or another library's name: key and nearest match are named; never dropped."""
    argument = f"{wrong}=1"
    if source == "yaml":
        argument = str(tmp_path / "x.yaml")
        Path(argument).write_text(yaml.safe_dump(nested(wrong, 1)))
    with pytest.raises(ConfigError) as error:
        parse([argument])
    assert str(error.value) == f"unknown key `{wrong}` = 1; did you mean `{meant}`?"


def test_r6_the_process_exits_non_zero_without_traceback():
    """R6: the shell sees the failure, the user sees one line."""
    done = command("learning_rat=1")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "config error: unknown key `learning_rat` = 1; did you mean `learner.lr`?\n"


def test_r6_every_bad_key_is_named_at_once():
    """R6: three mistakes need one try, not three."""
    message = refusal({"learning_rat": 1, "learner": {"lr": "fast"}, "rollout": {"lr": 2}})
    assert "`learning_rat` = 1" in message and "`learner.lr` = 'fast'" in message and "`rollout.lr` = 2" in message


@pytest.mark.parametrize("argv", [["--lr", "3"], ["--learner.lr", "3"], ["lr"], ["configs/toy.json"]])
def test_r6_an_argument_that_is_neither_file_nor_assignment(argv):
    """R6: `--lr 3` must not be read as a flag and a forgotten word."""
    with pytest.raises(ConfigError, match=f"^`{argv[0]}` is neither a .yaml file nor `section.key=value`"):
        parse(argv)


def test_dashes_before_an_assignment_are_the_same_key():
    """`--learner.lr=3` sets what `learner.lr=3` sets; `--lr=3` is refused like `lr=3`."""
    assert parse(["--learner.lr=3"]).learner.lr == 3.0
    with pytest.raises(ConfigError, match="did you mean `learner.lr`"):
        parse(["--lr=3"])


@pytest.mark.parametrize("text", ["1e-6", "'1e-6'", '"1e-6"', "0.000001"])
def test_r6_string_floats_are_converted(text, tmp_path):
    """R6: YAML reads 1e-6 as a string; it is a number here, from the file and from the command line."""
    file = tmp_path / "x.yaml"
    file.write_text(f"learner:\n  lr: {text}\n")
    for settings in (parse([str(file)]), parse([f"learner.lr={text}"])):
        assert settings.learner.lr == 1e-6 and isinstance(settings.learner.lr, float)


# --- files


def test_missing_file_is_named():
    """A mistyped path is an error, not a run with the defaults."""
    with pytest.raises(ConfigError, match="`configs/toi.yaml` does not exist"):
        parse(["configs/toi.yaml"])


@pytest.mark.parametrize("text, kind", [("- a\n- b\n", "list"), ("just words\n", "str"), ("3\n", "int")])
def test_yaml_that_holds_no_mapping(text, kind, tmp_path):
    """A list or a word as the whole file is refused with what it is."""
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"x.yaml` must hold `key: value` lines, not a {kind}"):
        parse([str(file)])


def test_yaml_with_a_syntax_error_is_a_config_error(tmp_path):
    """A stray bracket ends in one line that names the file, not in a traceback of the YAML library."""
    file = tmp_path / "x.yaml"
    file.write_text("learner: {lr: 1\nsteps: 3\n")
    with pytest.raises(ConfigError, match="x.yaml"):
        parse([str(file)])
    with pytest.raises(ConfigError, match="learner=.*is not YAML"):
        parse(["learner={lr: 1"])


def test_later_arguments_win_and_leave_their_neighbours(tmp_path):
    """An override replaces one leaf; the file's other keys of that section stay."""
    file = tmp_path / "x.yaml"
    file.write_text("steps: 7\nlearner: {lr: 1e-3, beta1: 0.8}\nlog: {trackers: [wandb, tensorboard]}\n")
    settings = parse([str(file), "learner.lr=2e-3", "log.trackers=[]", "learner.lr=3e-3"])
    assert (settings.steps, settings.learner.lr, settings.learner.beta1, settings.log.trackers) == (7, 3e-3, 0.8, ())


def test_an_empty_file_is_the_defaults(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("# nothing yet\n")
    assert parse([str(file)]) == parse([]) == Config()


# --- every field


def test_every_field_has_a_sentence():
    """A field without its sentence is one that --help cannot explain."""
    for key, _, _, sentence in fields():
        assert sentence and sentence[0] in "`" + sentence[0].upper() and sentence.endswith("."), key


def test_help_documents_every_field():
    """--help exits 0 and shows key, default and sentence of each field."""
    done = command("--help")
    assert done.returncode == 0 and done.stderr == ""
    entries = dict(zip(*[iter(done.stdout.splitlines()[2:])] * 2, strict=True))
    assert len(entries) == len(KEYS)
    for (head, body), (key, _, default, sentence) in zip(entries.items(), fields(), strict=True):
        assert head.startswith(f"{key}  (") and head.endswith(f", default {json.dumps(default)})")
        assert body.strip() == sentence


def test_defaults_are_valid_and_fields_are_frozen():
    """Defaults pass their own checks; a setting cannot change behind the run's stored config."""
    settings = build({})
    assert settings == Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.steps = 3


def other_value(key: str):
    """A valid value of a field that is not its default."""
    kind, default = TYPES[key], value_of(Config(), key)
    if typing.get_origin(kind) is typing.Literal:
        return next((choice for choice in typing.get_args(kind) if choice != default), default)
    special = {"log.trackers": ("wandb",), "reward.weights": (0.5,), "reward.functions": ("a.py:b",), "rollout.stop": ("\n", "é"),
               "actor.tp": 2, "actor.max_model_len": 2, "max_staleness": 1, "exact": True, "algorithm.dual_clip": 3.0,
               "eval.every": 5, "learner.min_lr_ratio": 0.1, "learner.parked": ("reference",)}
    if key in special:
        return special[key]
    if kind is bool:
        return not default
    return f"{default}é: #x" if kind is str else default / 2 or 0.25 if kind is float else default + 1


NEEDS = {"critic.path": {"algorithm": {"name": "ppo"}}, "eval.keep_best": {"data": {"eval_path": "x.jsonl"}, "eval": {"every": 1}},
         "learner.min_lr_ratio": {"learner": {"schedule": "cosine"}}, "eval.every": {"data": {"eval_path": "x.jsonl"}},
         "actor.release_memory": {"placement": "colocated"}, "actor.max_num_seqs": {"actor": {"max_num_batched_tokens": 4096}},
         "algorithm.label_smoothing": {"algorithm": {"name": "dpo"}},
         "algorithm.importance": {"algorithm": {"old_logprobs": "learner"}}, "critic.trunk": {"algorithm": {"advantage": "gae"}},
         "actor.max_model_len": {"data": {"max_prompt_tokens": 1}, "rollout": {"max_new_tokens": 1}}}


@pytest.mark.parametrize("key", KEYS)
def test_yaml_round_trip_of_every_field(key, tmp_path):
    """The stored config.yaml reads back to an equal Config, whatever was set; and setting a field changes it alone (a preset's
    name: what the preset sets)."""
    values = nested(key, other_value(key))
    for section, needed in NEEDS.get(key, {}).items():
        values[section] = needed | values.get(section, {}) if isinstance(needed, dict) else needed
    settings, file = build(values), tmp_path / "config.yaml"
    assert value_of(settings, key) == other_value(key)
    file.write_text(to_yaml(settings), encoding="utf-8")
    assert parse([str(file)]) == settings
    base = build(NEEDS.get(key, {}))
    follow = [f"algorithm.{field}" for field in PRESETS[settings.algorithm.name]] if key == "algorithm.name" else []
    changed = {k for k in KEYS if value_of(settings, k) != value_of(base, k)}
    assert changed == {key, *follow}


def nonsense(key: str) -> list:
    """Values that no field of this type can mean."""
    kind = TYPES[key]
    if kind in (int, float):
        values = ["many", [1], {"a": 1}, None, math.nan, math.inf, "nan"] + ([1.5, "1.5"] if kind is int else [])
        return values if key in MAY_BE_NEGATIVE else [-1, *values]
    if kind is bool:
        return [2, "maybe", [True], None]
    if kind is str:
        return [3, ["a"], {"a": "b"}, None, True]
    if typing.get_origin(kind) is typing.Literal:
        return ["nonsense", ["nonsense"], typing.get_args(kind)[:1], None, 0]
    return ["one string", 3, None, [["a"]], [None], [True], {"a": 1}]


@pytest.mark.parametrize("key, value", [(key, value) for key in KEYS for value in nonsense(key)], ids=str)
def test_r6_nonsense_is_refused(key, value):
    """R6: every field refuses what it cannot mean, naming itself (or its entry, as `key.0`) and the value."""
    message = refusal(nested(key, value))
    shown = [value, *value] if isinstance(value, list | tuple) else [value]
    assert f"`{key}" in message and any(f" = {one!r}" in message for one in shown)


def test_r6_yes_is_not_a_number():
    """R6: `lr: yes` is no learning rate of 1.0, `steps: true` not one step."""
    accepted = [key for key in KEYS if TYPES[key] in (int, float) and not refused(nested(key, True))]
    assert accepted == []


@pytest.mark.parametrize("key", [key for key in KEYS if TYPES[key] in (int, float)])
def test_r6_zero_is_refused_unless_it_means_something(key):
    """R6, extremes: 0 is either documented or refused."""
    if key in ZERO_HAS_A_MEANING:
        assert value_of(build(nested(key, 0)), key) == 0
    else:
        assert f"`{key}` = 0" in refusal(nested(key, 0))


@pytest.mark.parametrize("key, value", [
    ("actor.kv_memory_fraction", 1), ("actor.kv_memory_fraction", 1.5), ("learner.beta1", 1), ("learner.beta2", 1),
    ("learner.min_lr_ratio", 1.01), ("algorithm.clip_low", 1), ("max_staleness", -1), ("learner.lr", "1e999")])
def test_r6_upper_extremes_are_refused(key, value):
    """R6, extremes: a share of 1, a decay of 1, a bound that would clip nothing."""
    assert f"`{key}` = {value!r}" in refusal(nested(key, value))


# --- presets


PAPERS = {  # what distinguishes each, as its paper writes it
    "grpo": {"loss": "clip", "advantage": "group", "advantage_std": True, "loss_mean": "sequence", "clip_low": 0.2,
             "clip_high": 0.2},
    "dr_grpo": {"loss": "clip", "advantage": "group", "advantage_std": False, "loss_mean": "constant"},
    "dapo": {"loss": "clip", "advantage": "group", "clip_low": 0.2, "clip_high": 0.28, "loss_mean": "token", "kl_coef": 0.0,
             "resample": 10, "overlong_buffer": 1},  # the default cap of 8 tokens
    "rloo": {"loss": "clip", "advantage": "rloo", "loss_mean": "sum", "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp": {"loss": "clip", "advantage": "returns", "advantage_whiten": True, "gamma": 1.0, "kl_in": "reward",
                     "kl_estimator": "k1"},
    "gspo": {"loss": "gspo", "advantage": "group", "advantage_std": True, "clip_low": 3e-4, "clip_high": 4e-4,
             "loss_mean": "sequence"},
    "cispo": {"loss": "cispo", "advantage": "group", "loss_mean": "token", "clip_high": 4.0},
    "ppo": {"loss": "clip", "advantage": "gae", "gae_lambda": 0.95, "gamma": 1.0, "advantage_whiten": True, "kl_in": "reward",
            "kl_coef": 0.05, "clip_low": 0.2, "clip_high": 0.2},
    "dpo": {"loss": "dpo", "kl_coef": 0.1, "label_smoothing": 0.0},
    "reward_model": {"loss": "bradley_terry"},
}


@pytest.mark.parametrize("name", typing.get_args(TYPES["algorithm.name"]))
def test_a_name_sets_its_papers_algorithm_and_leaves_the_rest(name, tmp_path):
    """Every name has a preset; what it does not list keeps its default; the stored YAML reads back equal."""
    settings = build({"algorithm": {"name": name}})
    assert {field: getattr(settings.algorithm, field) for field in PAPERS[name]} == PAPERS[name]
    untouched = {key for key in KEYS if value_of(settings, key) == value_of(Config(), key)}
    allowed = {f"algorithm.{field}" for field in ("name", "overlong_buffer", *PRESETS[name])}
    assert untouched >= set(KEYS) - allowed
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(settings))
    assert parse([str(file)]) == settings and set(PRESETS) == set(PAPERS)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_value_of_the_users_wins_over_the_presets(name, tmp_path):
    """Also when it is the field's default, and when file and command line give it in turn; the table itself stays as it is."""
    before = json.dumps(PRESETS)
    for field in PRESETS[name]:
        default = getattr(Algorithm, field)
        given = {"name": name, field: default} | ({"kl_coef": 0.3} if field == "kl_coef" and name == "dpo" else {})
        assert getattr(build({"algorithm": given}).algorithm, field) == given[field]
    file = tmp_path / "x.yaml"
    file.write_text("algorithm: {clip_high: 0.25}\n")
    assert parse([str(file), f"algorithm.name={name}"]).algorithm.clip_high == 0.25
    assert parse([f"algorithm.name={name}", "algorithm.clip_high=0.3", "algorithm.clip_high=0.2"]).algorithm.clip_high == 0.2
    assert json.dumps(PRESETS) == before


@pytest.mark.parametrize("cap, buffer", [(20480, 4096), (20, 4), (20.0, 4), ("20", 4), (4, 0), (1, 0)])
def test_dapos_overlong_buffer_is_a_fifth_of_the_response_limit(cap, buffer, tmp_path):
    """The paper's 4,096 of 20,480, however the limit is written; a given buffer wins, 0 too; the stored one is not made anew."""
    values = {"algorithm": {"name": "dapo"}, "rollout": {"max_new_tokens": cap}}
    settings, file = build(values), tmp_path / "config.yaml"
    assert settings.algorithm.overlong_buffer == buffer
    for mine in (0, 1):
        assert build(values | {"algorithm": {"name": "dapo", "overlong_buffer": mine}}).algorithm.overlong_buffer == mine
    file.write_text(to_yaml(settings))
    assert parse([str(file), "rollout.max_new_tokens=30000"]).algorithm.overlong_buffer == buffer
    assert build(values | {"algorithm": {"name": "grpo"}}).algorithm.overlong_buffer == 0


@pytest.mark.parametrize("name", ["ppoo", "DAPO", "", "r1"])
def test_an_unknown_algorithm_lists_the_known_ones(name):
    """One line with every name; not a run of the default."""
    message = refusal({"algorithm": {"name": name}})
    assert message.startswith(f"`algorithm.name` = {name!r}") and len(message.splitlines()) == 1
    assert all(f"'{known}'" in message for known in PRESETS)


@pytest.mark.parametrize("values", [
    {}, {"algorithm": {}}, {"algorithm": None}, {"algorithm": "dapo"}, {"algorithm": {"name": [1]}}], ids=str)
def test_a_preset_adds_nothing_to_what_it_cannot_read(values):
    """Wrong types reach pydantic, which names them; no section at all is grpo."""
    assert with_preset(values) == (values or {"algorithm": {}})


# --- combinations


@pytest.mark.parametrize("values, parts", [
    ({"rollout": {"samples_per_prompt": 1}}, ["`rollout.samples_per_prompt` = 1", "at least 2"]),
    ({"algorithm": {"dual_clip": 1.0}}, ["`algorithm.dual_clip` = 1.0", "must be > 1"]),
    ({"algorithm": {"dual_clip": 0.5}}, ["`algorithm.dual_clip` = 0.5", "must be > 1"]),
    ({"exact": True, "actor": {"tp": 2}}, ["`exact`", "`actor.tp` = 1", "not 2"]),
    ({"exact": True, "actor": {"quantization": "fp8"}}, ["`exact`", "`actor.quantization` = none", "fp8"]),
    ({"exact": True, "threads": 3}, ["`exact`", "`threads` = 3", "1 or 2"]),
    ({"actor": {"max_model_len": 9}}, ["`actor.max_model_len` = 9", "1032", "raise it"]),
    ({"rollout": {"stop": [""]}}, ["`rollout.stop`", "empty string"]),
    ({"actor": {"max_num_seqs": 9, "max_num_batched_tokens": 8}},
     ["`actor.max_num_batched_tokens` = 8", "`actor.max_num_seqs` = 9", "raise it"]),
    ({"learner": {"warmup_steps": 6}, "steps": 5}, ["`learner.warmup_steps` = 6", "`steps` = 5", "lower it"]),
    ({"learner": {"min_lr_ratio": 0.1}}, ["`learner.min_lr_ratio` = 0.1", "`learner.schedule` = constant", "choose"]),
    ({"learner": {"offload_moments": True, "moments": "8bit"}}, ["`learner.offload_moments`", "`learner.moments` = 8bit"]),
    ({"reward": {"weights": [1, 2]}}, ["`reward.weights`", "2 entries for 1 `reward.functions`", "one weight each"]),
    ({"reward": {"functions": []}}, ["`reward.functions` is empty", "name at least one"]),
    ({"eval": {"every": 3}}, ["`eval.every` = 3", "`data.eval_path`"]),
    ({"exact": True, "model": {"dtype": "bfloat16"}}, ["`exact`", "`model.dtype` = float32", "bfloat16"]),
    ({"rollout": {"samples_per_prompt": 1}, "algorithm": {"name": "rloo"}}, ["`rollout.samples_per_prompt` = 1", "rloo"]),
    ({"algorithm": {"name": "gspo", "dual_clip": 3}}, ["`algorithm.dual_clip` = 3", "`algorithm.loss` = gspo", "set 0"]),
    ({"algorithm": {"name": "cispo", "dual_clip": 3}}, ["`algorithm.dual_clip` = 3", "`algorithm.loss` = cispo"]),
    *[({"algorithm": {"importance": way}}, [f"`algorithm.importance` = {way}", "`algorithm.old_logprobs` = learner"])
      for way in typing.get_args(TYPES["algorithm.importance"])[1:]],
    ({"algorithm": {"importance_cap": 0.9}}, ["`algorithm.importance_cap` = 0.9", "below 1", "raise it"]),
    ({"algorithm": {"overlong_buffer": 9}}, ["`algorithm.overlong_buffer` = 9", "`rollout.max_new_tokens` = 8", "lower it"]),
    ({"algorithm": {"name": "dpo", "kl_coef": 0}}, ["`algorithm.kl_coef` = 0", "dpo's beta", "positive"]),
    ({"algorithm": {"loss": "ipo"}}, ["`algorithm.kl_coef` = 0", "ipo's beta"]),
    ({"algorithm": {"label_smoothing": 0.1}}, ["`algorithm.label_smoothing` = 0.1", "`algorithm.loss` = clip", "set 0"]),
    ({"algorithm": {"loss": "ipo", "kl_coef": 0.1, "label_smoothing": 0.1}}, ["`algorithm.label_smoothing` = 0.1", "ipo"]),
    ({"algorithm": {"name": "ppo", "resample": 2}}, ["`algorithm.resample` = 2", "`algorithm.advantage` = group"]),
    ({"algorithm": {"name": "dapo"}, "reward_model": {"path": "rm"}}, ["`algorithm.resample` = 10", "reward model", "set 0"]),
    ({"critic": {"trunk": "shared"}}, ["`critic.trunk` = shared", "`algorithm.advantage` = group", "remove it"]),
    *[({"algorithm": {"name": "ppo"}, "critic": {"trunk": "shared"} | critic, "learner": learner}, ["`critic.trunk` = shared", key])
      for critic, learner, key in (({"path": "x"}, {}, "`critic.path`"), ({"warmup_steps": 1}, {}, "`critic.warmup_steps`"),
                                   ({}, {"parked": ["critic"]}, "`learner.parked`"))],
    ({"algorithm": {"name": "dpo", "entropy_coef": 0.1}}, ["`algorithm.entropy_coef` = 0.1", "pairs", "dpo", "remove it"]),
    ({"algorithm": {"name": "reward_model"}, "reward_model": {"path": "rm"}}, ["`reward_model.path` = rm", "bradley_terry"]),
    ({"eval": {"keep_best": True}}, ["`eval.keep_best`", "`eval.every`"]),
    ({"critic": {"path": "rm"}}, ["`critic.path` = 'rm'", "`algorithm.advantage` = group", "remove it"]),
    ({"algorithm": {"name": "reward_model", "kl_coef": 0.1}}, ["`algorithm.kl_coef` = 0.1", "bradley_terry", "remove"]),
    ({"learner": {"minibatches": 17}}, ["`learner.minibatches` = 17", "`rollout.prompts_per_step` = 16", "lower it"]),
], ids=lambda value: str(value)[:60])
def test_l6_combinations_that_cannot_work_are_refused(values, parts):
    """L6 (one sample a prompt: NaN advantages), L8's dual clip <= 1, L9's buffer, and others: field, value and fix are named."""
    message = refusal(values)
    assert all(part in message for part in parts) and len(message.splitlines()) == 1


@pytest.mark.parametrize("values", [
    {"rollout": {"samples_per_prompt": 2}}, {"algorithm": {"dual_clip": 1.01}}, {"algorithm": {"dual_clip": 0}},
    {"actor": {"max_num_seqs": 8, "max_num_batched_tokens": 8}}, {"learner": {"warmup_steps": 5}, "steps": 5},
    {"learner": {"warmup_steps": 5}, "steps": 0}, {"learner": {"min_lr_ratio": 0.1, "schedule": "linear"}},
    {"reward": {"weights": [1]}}, {"eval": {"every": 3}, "data": {"eval_path": "x.jsonl"}}, {"exact": True},
    {"rollout": {"samples_per_prompt": 1}, "algorithm": {"name": "ppo"}},
    {"rollout": {"samples_per_prompt": 1}, "algorithm": {"name": "reinforce_pp"}},
    {"rollout": {"samples_per_prompt": 1}, "algorithm": {"name": "dpo"}}, {"algorithm": {"name": "ppo", "dual_clip": 3}},
    {"algorithm": {"importance": "token_mask", "old_logprobs": "learner"}}, {"algorithm": {"importance_cap": 1}},
    {"algorithm": {"overlong_buffer": 8}}, {"algorithm": {"loss": "ipo", "kl_coef": 1e-3}},
    {"algorithm": {"name": "dapo", "resample": 0}, "reward_model": {"path": "rm"}},
    {"algorithm": {"name": "ppo"}, "critic": {"trunk": "shared"}},
    {"algorithm": {"name": "ppo"}, "critic": {"path": "x", "warmup_steps": 1}, "learner": {"parked": ["critic"]}}], ids=str)
def test_the_nearest_allowed_combination_is_allowed(values):
    """The other side of each bound above; a check that refuses everything would pass the test before."""
    assert build(values)


def test_every_broken_combination_is_named_at_once():
    message = refusal({"rollout": {"samples_per_prompt": 1}, "eval": {"every": 1}, "reward": {"functions": []}})
    assert len(message.splitlines()) == 3


def test_world_size_counts_every_rank():
    """torchrun must start learner.replicas x shards + actor.replicas x tp processes."""
    assert build({"learner": {"replicas": 2, "shards": 3}, "actor": {"replicas": 5}}).world_size == 11


@pytest.mark.parametrize("name, world", [("grpo", 11), ("ppo", 11), ("dpo", 6), ("reward_model", 6)])
def test_pairs_need_no_actors(name, world):
    """Without rollouts only the learner's ranks are started."""
    settings = build({"learner": {"replicas": 2, "shards": 3}, "actor": {"replicas": 5}, "algorithm": {"name": name}})
    assert (settings.world_size, settings.actor_ranks, settings.offline) == (world, world - 6, world == 6)


def test_shipped_configs_parse():
    """A renamed field must not leave a config of configs/ behind."""
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        assert isinstance(parse([str(file)]), Config), file
