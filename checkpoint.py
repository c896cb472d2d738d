"""Hugging Face folders in and out: each rank reads only its slices, and no rank gathers the whole model.

    python checkpoint.py --gguf FILE --out FOLDER      # a GGUF file to a plain folder, through transformers' own loader

A folder is config.json, tokenizer files, and safetensors in one file or sharded with an index. For a 70B on 40 shards a rank reads
7 GB of 282 (fp32 masters); saving streams one parameter at a time through rank 0, which holds at most one 4 GB file.
"""

import argparse
import json
import shutil
from collections.abc import Iterable, Set
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from config import ConfigError
from transfer import Layout, matrix

MAX_FILE_BYTES = 4 << 30
# What a folder holds besides weights; copied as they are when a trained model is saved.
SIDE_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
              "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja")


class WeightFolder:
    """The safetensors of a folder, opened lazily; gives row slices by parameter name. Raises ConfigError naming `field`."""

    def __init__(self, path: str, field: str = "model.path"):
        folder = Path(path)
        index = folder / "model.safetensors.index.json"
        if (folder / "model.safetensors").is_file():  # the order in which transformers looks
            files = ["model.safetensors"]
        elif index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = sorted(file.name for file in folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"`{field}` = {path!r}: no .safetensors there; set model.init=random to start from noise")
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise ConfigError(f"`{field}` = {path!r}: the index names {missing[0]}, which is not there")
        self._stack = ExitStack()
        self._file_of = {}
        for name in files:
            try:
                opened = self._stack.enter_context(safe_open(str(folder / name), framework="pt"))
            except SafetensorError as error:
                raise ConfigError(f"`{field}` = {path!r}: {name} is cut short or no safetensors file ({error})") from None
            twice = sorted(self._file_of.keys() & opened.keys())
            if twice:
                raise ConfigError(f"`{field}` = {path!r}: {twice[0]} is in several files; leave one set of weights there")
            self._file_of |= dict.fromkeys(opened.keys(), opened)

    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def rows(self, name: str, first: int, last: int) -> Tensor:
        return self._file_of[name].get_slice(name)[first:last]

    def close(self) -> None:
        self._stack.close()


def check_names(folder: WeightFolder, shapes: dict[str, tuple[int, ...]], tied: bool,
                ignored: Set[str] = frozenset()) -> None:
    """Every tensor of the folder belongs to the model and the other way round. Raises ConfigError naming one that does not.

    `ignored` may be in the folder. A tied head may be stored or not; if it is, it must be the embedding's equal, or the folder
    is not what its config says.
    """
    stored = {name for name in folder.names() if not name.endswith("rotary_emb.inv_freq")}  # a buffer of old exports
    if tied and {"lm_head.weight", "model.embed_tokens.weight"} <= stored:
        stored.remove("lm_head.weight")
        rows = folder.shape("lm_head.weight")[0]
        for first in range(0, rows, 8192):
            head, embedding = (folder.rows(name, first, first + 8192) for name in ("lm_head.weight", "model.embed_tokens.weight"))
            if not torch.equal(head, embedding):
                raise ConfigError("config.json ties lm_head.weight to model.embed_tokens.weight, but the stored tensors differ; "
                                  "set tie_word_embeddings to false")
    for name in sorted((stored - ignored) ^ shapes.keys()):
        where = "folder" if name in stored else "model"
        raise ConfigError(f"tensor {name} is in the {where} only; config.json does not fit the weights")
    for name, shape in sorted(shapes.items()):
        if folder.shape(name) != shape:
            raise ConfigError(f"tensor {name} has shape {folder.shape(name)} in the folder, {shape} by config.json")


def load_layout(folder: WeightFolder, layout: Layout, tensors: dict[str, Tensor]) -> None:
    """Write an engine's part of every parameter into its live `tensors`, each where `layout` says that it lands."""
    for name, landings in layout.items():
        for at in landings:
            part = matrix(folder.rows(name, at.row0, at.row1))[:, at.col0:at.col1]
            place = matrix(tensors[at.tensor])
            place[at.to_row:at.to_row + part.shape[0], at.to_col:at.to_col + part.shape[1]].copy_(part)


def save_hf(folder: str | Path, source: str | Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write `tensors` (name, full value) as a folder that transformers loads, with the side files of `source`.

    Written beside and renamed: a folder of that name is either complete or absent.
    """
    folder = Path(folder)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in SIDE_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, partial / name)
    parts: list[dict[str, Tensor]] = [{}]
    weight_map, filled, total = {}, 0, 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if parts[-1] and filled + size > MAX_FILE_BYTES:
            save_file(parts[-1], partial / f"part-{len(parts)}.safetensors", {"format": "pt"})
            parts[-1] = {}
            parts.append({})
            filled = 0
        parts[-1][name] = tensor.contiguous().cpu()
        weight_map[name] = len(parts)
        filled, total, dtype = filled + size, total + size, tensor.dtype
    save_file(parts[-1], partial / f"part-{len(parts)}.safetensors", {"format": "pt"})
    names = {number: f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)}
    if len(parts) == 1:
        names = {1: "model.safetensors"}
    for number, name in names.items():
        (partial / f"part-{number}.safetensors").rename(partial / name)
    if len(parts) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {name: names[part] for name, part in weight_map.items()}}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    described = json.loads((partial / "config.json").read_text())
    described.pop("dtype", None)
    described["torch_dtype"] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(described, indent=2))
    replaced = folder.with_name(folder.name + ".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if folder.exists():
        folder.rename(replaced)
    partial.rename(folder)
    shutil.rmtree(replaced, ignore_errors=True)


def convert_gguf(file: str, out: str) -> None:
    """Dequantise a GGUF file into a plain fp32 folder, by transformers' loader (needs the `gguf` package)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"--gguf {file}: no such file")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32,
                                                 quantization_config=GgufConfig(dequantize=True))
    model.hf_quantizer = None  # otherwise save_pretrained refuses: the weights are plain fp32 now
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Convert a GGUF file to a Hugging Face folder.")
    parser.add_argument("--gguf", required=True, help="the .gguf file")
    parser.add_argument("--out", required=True, help="the folder to write")
    arguments = parser.parse_args()
    convert_gguf(arguments.gguf, arguments.out)
    print(f"wrote {arguments.out}")
