"""Config: a misspelt, misplaced, mistyped or impossible setting ends the run at its start (cases R6, L6)."""

import dataclasses
import json
import math
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml

from config import Config, ConfigError, fields
from settings import build, parse, to_yaml

ROOT = Path(__file__).parents[1]
KEYS = [key for key, *_ in fields()]
TYPES = {key: annotation for key, annotation, *_ in fields()}
ZERO_HAS_A_MEANING = {  # every other number refuses 0, which would divide by zero, hang or train nothing
    "steps", "seed", "max_staleness", "threads", "actor.kv_blocks", "actor.max_model_len", "learner.warmup_steps",
    "learner.min_lr_ratio", "learner.beta1",
    "learner.beta2", "learner.weight_decay", "algorithm.clip_low", "algorithm.clip_high", "algorithm.dual_clip",
    "algorithm.entropy_coef", "algorithm.kl_coef", "eval.every", "log.samples_per_step",
}


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
               "eval.every": 5,
               "learner.min_lr_ratio": 0.1}
    if key in special:
        return special[key]
    if kind is bool:
        return not default
    return f"{default}é: #x" if kind is str else default / 2 if kind is float else default + 1


NEEDS = {"learner.min_lr_ratio": {"learner": {"schedule": "cosine"}}, "eval.every": {"data": {"eval_path": "x.jsonl"}},
         "actor.max_num_seqs": {"actor": {"max_num_batched_tokens": 4096}},
         "actor.max_model_len": {"data": {"max_prompt_tokens": 1}, "rollout": {"max_new_tokens": 1}}}


@pytest.mark.parametrize("key", KEYS)
def test_yaml_round_trip_of_every_field(key, tmp_path):
    """The stored config.yaml reads back to an equal Config, whatever was set; and setting a field changes it alone."""
    values = nested(key, other_value(key))
    for section, needed in NEEDS.get(key, {}).items():
        values[section] = needed | values.get(section, {})
    settings, file = build(values), tmp_path / "config.yaml"
    assert value_of(settings, key) == other_value(key)
    file.write_text(to_yaml(settings), encoding="utf-8")
    assert parse([str(file)]) == settings
    base = build(NEEDS.get(key, {}))
    assert [k for k in KEYS if value_of(settings, k) != value_of(base, k)] in ([key], [])


def nonsense(key: str) -> list:
    """Values that no field of this type can mean."""
    kind = TYPES[key]
    if kind in (int, float):
        return [-1, "many", [1], {"a": 1}, None, math.nan, math.inf, "nan"] + ([1.5, "1.5"] if kind is int else [])
    if kind is bool:
        return [2, "maybe", [True], None]
    if kind is str:
        return [3, ["a"], {"a": "b"}, None, True]
    if typing.get_origin(kind) is typing.Literal:
        return ["nonsense", ["nonsense"], typing.get_args(kind)[:1], None, 0]
    return ["one string", 3, None, [["a"]], [None], {"a": 1}]


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
    ({"reward": {"weights": [1, 2]}}, ["`reward.weights`", "2 entries for 1 `reward.functions`", "one weight each"]),
    ({"reward": {"functions": []}}, ["`reward.functions` is empty", "name at least one"]),
    ({"eval": {"every": 3}}, ["`eval.every` = 3", "`data.eval_path`"]),
    ({"exact": True, "model": {"dtype": "bfloat16"}}, ["`exact`", "`model.dtype` = float32", "bfloat16"]),
], ids=lambda value: str(value)[:60])
def test_l6_combinations_that_cannot_work_are_refused(values, parts):
    """L6 (one sample a prompt: NaN advantages), L8's dual clip <= 1, and the others: field, value and fix are named."""
    message = refusal(values)
    assert all(part in message for part in parts) and len(message.splitlines()) == 1


@pytest.mark.parametrize("values", [
    {"rollout": {"samples_per_prompt": 2}}, {"algorithm": {"dual_clip": 1.01}}, {"algorithm": {"dual_clip": 0}},
    {"actor": {"max_num_seqs": 8, "max_num_batched_tokens": 8}}, {"learner": {"warmup_steps": 5}, "steps": 5},
    {"learner": {"warmup_steps": 5}, "steps": 0}, {"learner": {"min_lr_ratio": 0.1, "schedule": "linear"}},
    {"reward": {"weights": [1]}}, {"eval": {"every": 3}, "data": {"eval_path": "x.jsonl"}}, {"exact": True}], ids=str)
def test_the_nearest_allowed_combination_is_allowed(values):
    """The other side of each bound above; a check that refuses everything would pass the test before."""
    assert build(values)


def test_every_broken_combination_is_named_at_once():
    message = refusal({"rollout": {"samples_per_prompt": 1}, "eval": {"every": 1}, "reward": {"functions": []}})
    assert len(message.splitlines()) == 3


def test_world_size_counts_every_rank():
    """torchrun must start learner.replicas x shards + actor.replicas x tp processes."""
    assert build({"learner": {"replicas": 2, "shards": 3}, "actor": {"replicas": 5}}).world_size == 11


def test_shipped_configs_parse():
    """A renamed field must not leave a config of configs/ behind."""
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        assert isinstance(parse([str(file)]), Config), file
