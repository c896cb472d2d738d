"""Memory of a learner rank that starts from a Hugging Face folder: its fp32 shard, one FSDP unit, and little else."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from ranks import spawn_ok
from safetensors.torch import save_file

from checkpoint import WeightFolder
from model import parameter_shapes
from settings import build
from shape import read_shape
from sharding import build_policy

MIB = 1 << 20
CONFIG = {"model_type": "llama", "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 2560, "num_hidden_layers": 24,
          "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False}


def resident(key: str) -> int:
    """Bytes that Linux counts as this process's: VmRSS now, VmHWM at most; mapped file pages are among them."""
    return int(re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


def building(rank: int, folder: str, fault: str) -> dict[str, int]:
    """Bytes: the high-water mark while the learner's model is built, over before; its shard; the largest FSDP unit."""
    from torch.distributed.device_mesh import init_device_mesh
    read, held = WeightFolder.rows, []

    def slices_kept(weights, name, first, last):
        held.append(read(weights, name, first, last))
        return held[-1]

    def tensors_kept(weights, name, first, last):
        held.append(read(weights, name, 0, weights.shape(name)[0]).clone())
        return held[-1][first:last]

    if fault:
        WeightFolder.rows = {"slices kept": slices_kept, "tensors kept": tensors_kept}[fault]
    shape = read_shape(folder)
    config = build({"model": {"path": folder}, "learner": {"shards": 2}})
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replica", "shard"))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
    model = build_policy(config, shape, shape.vocab, (mesh, torch.device("cpu")))
    peak = resident("VmHWM") - before
    assert all((parameter.to_local() == 0.5).all() for parameter in model.parameters())
    layer, whole = (sum(4 * parameter.numel() for parameter in part.parameters()) for part in (model.model.layers[0], model))
    return {"peak": peak, "shard": sum(parameter.to_local().nbytes for parameter in model.parameters()),
            "unit": max(layer, whole - shape.layers * layer)}


@pytest.mark.parametrize("dtype, files, fault", [
    (torch.float32, 1, ""), (torch.bfloat16, 3, ""),
    *(pytest.param(torch.bfloat16, 3, fault, marks=pytest.mark.long) for fault in ("slices kept", "tensors kept"))])
def test_memory_of_a_start_from_a_folder(dtype, files, fault, tmp_path):
    """A rank that leaves the folder's pages mapped, or gathers whole tensors first, dies where its shard would have fitted."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = parameter_shapes(read_shape(tmp_path))
    for number in range(files):
        part = {name: torch.full(shapes[name], 0.5, dtype=dtype) for name in sorted(shapes)[number::files]}
        save_file(part, tmp_path / f"part-{number}.safetensors")
    done = spawn_ok(2, "test_start_memory:building", str(tmp_path), fault)
    shutil.rmtree(tmp_path)  # 464 MB
    for rank in done:
        assert rank["shard"] > 200 * MIB > 10 * rank["unit"], "the bound would hide a second copy"
        assert (rank["peak"] <= rank["shard"] + rank["unit"] + 64 * MIB) == (not fault), rank
