"""Critic and reward-model folders, both ways; exports of odd starts (R12) and tied heads (R2); a killed save, a full disk (R5)."""

import copy
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_checkpoint import EMBEDDING, HEAD, IDS, TOY, Killed, differing, expected_logits, loads, logits, tensors_of
from tiny import FAMILIES, hf_config, randomise
from transformers import AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig, PreTrainedModel

import checkpoint
from checkpoint import WeightFolder, check_names, save_hf
from config import ConfigError
from model import parameter_shapes
from shape import read_shape


def start(folder: Path, family: str, **config) -> Path:
    """A folder to start from: the toy's tokenizer, and config.json as Hub files have it."""
    shutil.copytree(TOY, folder)
    (folder / "config.json").write_text(json.dumps(hf_config(FAMILIES[family]) | config))
    return folder


# --- folders with a `score` head


def classifier(family: str, seed: int, labels: int = 1) -> PreTrainedModel:
    config = copy.deepcopy(FAMILIES[family].config)
    config.num_labels, config.pad_token_id = labels, None
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return randomise(model.eval(), seed)


def score_shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], bool]:
    """Names and sizes of a trunk with a head of one number."""
    shape = read_shape(folder)
    trunk = {name: size for name, size in parameter_shapes(shape).items() if name != HEAD}
    return trunk | {"score.weight": (1, shape.hidden)}, shape.tied


def read_scores(folder: Path) -> dict[str, torch.Tensor]:
    shapes, tied = score_shapes(folder)
    weights = WeightFolder(str(folder), "reward_model.path")
    check_names(weights, shapes, tied)
    return {name: weights.rows(name, 0, size[0]) for name, size in shapes.items()}


def scores(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(ids[None]).logits for ids in IDS])


@pytest.mark.parametrize("limit", ["1GB", "60KB"])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-bias", "mistral-window", "qwen2", "qwen2-tied", "qwen3"])
def test_a_reward_model_that_transformers_wrote(family, limit, tmp_path):
    """Other prefixes or a renamed head: the trunk is refused, or the head keeps its uninitialised memory."""
    reference = classifier(family, 3)
    reference.save_pretrained(tmp_path, max_shard_size=limit)
    assert differing(read_scores(tmp_path), dict(reference.named_parameters())) == []


def test_a_reward_model_that_does_not_fit_is_named(tmp_path):
    """A classifier of several labels, a language model, or no weights: the message names the field and the tensor."""
    classifier("llama", 3, labels=2).save_pretrained(tmp_path / "two")
    FAMILIES["llama"].save_pretrained(tmp_path / "language")
    FAMILIES["llama"].config.save_pretrained(tmp_path / "empty")
    for folder, named in (("two", "score.weight has shape (2, 64)"), ("language", HEAD), ("empty", "no .safetensors there")):
        with pytest.raises(ConfigError) as caught:
            read_scores(tmp_path / folder)
        message = str(caught.value)
        assert f"`reward_model.path` = {str(tmp_path / folder)!r}" in message and named in message and "model.init" not in message


@pytest.mark.parametrize("limit", [1 << 30, 60_000], ids=["one file", "shards"])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "mistral-window", "qwen2", "qwen3-bias"])
def test_transformers_scores_with_what_was_saved(family, limit, tmp_path, monkeypatch):
    """A critic begun from a language model: two scores by default, a class without score head, a head that is drawn anew."""
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", limit)
    reference, out = classifier(family, 4), tmp_path / "out"
    source = start(tmp_path / "start", family, architectures=["LlamaForCausalLM"])
    save_hf(out, source, iter(dict(reference.named_parameters()).items()))
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "a server that is another user reads only some of the files"
    loaded, report = AutoModelForSequenceClassification.from_pretrained(out, attn_implementation="eager", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert loaded.config.num_labels == 1 and type(loaded).__name__ == type(reference).__name__
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(reference).__name__]
    assert torch.equal(scores(loaded), scores(reference)) and scores(reference).std() > 0.1
    assert differing(read_scores(out), dict(reference.named_parameters())) == []


# --- odd starts


@pytest.mark.parametrize("family", ["llama", "llama-tied", "mistral", "qwen2", "qwen3"])
def test_the_architecture_is_the_models_own(family, tmp_path):
    """vLLM goes by `architectures`: missing in a start written by hand, and of the other head in one that began as a classifier."""
    for number, config in enumerate(({"architectures": None}, {"architectures": ["LlamaForSequenceClassification"],
                                                               "auto_map": {"AutoModel": "modeling_own.Own"}})):
        out = tmp_path / f"out{number}"
        save_hf(out, start(tmp_path / f"start{number}", family, **config), iter(tensors_of(FAMILIES[family]).items()))
        written = json.loads((out / "config.json").read_text())
        assert written["architectures"] == [type(FAMILIES[family]).__name__] and "auto_map" not in written
        assert torch.equal(logits(out), expected_logits(FAMILIES[family]))


@pytest.mark.parametrize("generation", [None, {"do_sample": False, "temperature": 0.7, "top_p": 0.9}], ids=["none", "inconsistent"])
def test_a_bare_start(generation, tmp_path):
    """R12: no chat template, no pad token, no generation config or a greedy one with a temperature; at step 0."""
    reference, out = FAMILIES["llama"], tmp_path / "out"
    source = start(tmp_path / "start", "llama", pad_token_id=None)
    reference.save_pretrained(source)
    for name in ("generation_config.json", "chat_template.jinja", "special_tokens_map.json"):
        (source / name).unlink(missing_ok=True)
    told = json.loads((source / "tokenizer_config.json").read_text())
    kept = {key: told[key] for key in told.keys() - {"pad_token", "chat_template"}}
    (source / "tokenizer_config.json").write_text(json.dumps(kept))
    if generation:
        (source / "generation_config.json").write_text(json.dumps(generation))
    save_hf(out, source, iter(loads(source, "llama").items()))
    assert torch.equal(logits(out), expected_logits(reference))
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.pad_token is None and tokenizer.chat_template is None
    assert tokenizer.encode("1234") == AutoTokenizer.from_pretrained(TOY).encode("1234")
    assert (out / "generation_config.json").exists() == bool(generation)
    assert not generation or GenerationConfig.from_pretrained(out).temperature == 0.7


@pytest.mark.parametrize("family", ["llama-tied", "qwen2-tied"])
def test_a_tied_head_is_exported_either_way(family, tmp_path):
    """R2: a start that stores the head and one that does not; both exports give the logits of the start, and of each other."""
    tensors = tensors_of(FAMILIES[family])
    for name, stored in (("absent", tensors), ("present", tensors | {HEAD: tensors[EMBEDDING]})):
        source = start(tmp_path / name, family)
        save_file({key: tensor.clone() for key, tensor in stored.items()}, source / "model.safetensors", {"format": "pt"})
        assert torch.equal(logits(source), expected_logits(FAMILIES[family]))
        save_hf(tmp_path / f"{name}-out", source, iter(loads(source, family).items()))
        assert torch.equal(logits(tmp_path / f"{name}-out"), expected_logits(FAMILIES[family]))
        assert differing(loads(tmp_path / f"{name}-out", family), tensors) == []


# --- interrupted


def test_a_save_that_dies_between_its_two_renames(tmp_path, monkeypatch):
    """R5: the previous folder is out of the way and the new one not in place: the next save must not lose both when it dies too."""
    source, out = start(tmp_path / "start", "llama"), tmp_path / "best"
    tensors, real = tensors_of(FAMILIES["llama"]), Path.rename
    save_hf(out, source, iter(tensors.items()))

    def rename(path, target):
        if Path(target) == out:
            raise Killed
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Killed):
        save_hf(out, source, iter(tensors.items()))
    assert not out.exists()
    monkeypatch.undo()

    def killed():
        raise Killed
        yield

    with pytest.raises(Killed):
        save_hf(out, source, killed())
    assert differing(loads(out, "llama"), tensors) == []
    save_hf(out, source, iter(tensors.items()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "start"]


def test_a_full_disk(tmp_path):
    """R5: the file system takes no more: an error rather than a folder cut short, the previous one intact, and room again works."""
    source, out = start(tmp_path / "start", "llama"), tmp_path / "out"
    first, second = tensors_of(FAMILIES["llama"]), tensors_of(randomise(copy.deepcopy(FAMILIES["llama"]), 5))
    save_hf(out, source, iter(first.items()))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, unlimited[1]))  # EFBIG where a full disk says ENOSPC
    try:
        with pytest.raises((OSError, checkpoint.SafetensorError)):
            save_hf(out, source, iter(second.items()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert differing(loads(out, "llama"), first) == []
    save_hf(out, source, iter(second.items()))
    assert differing(loads(out, "llama"), second) == [] and sorted(path.name for path in tmp_path.iterdir()) == ["out", "start"]
