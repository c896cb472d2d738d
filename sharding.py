"""Models cut over the learner ranks by FSDP2: built on meta, wrapped, and filled with this rank's rows only.

What is deliberate here: `reshard_after_forward=True` on the root too. FSDP2's default leaves embedding and head unsharded after a
forward: an optimizer step then updates shards that the next forward does not read, and a publication would send old values.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from checkpoint import WeightFolder, check_names
from config import Config, ConfigError
from model import Scorer, Transformer, init_tensor
from shape import Shape, read_shape
from transfer import shard_rows

HEADS = {"lm_head.weight", "score.weight"}


Place = tuple[DeviceMesh, torch.device]


def build_policy(config: Config, shape: Shape, vocab: int, place: Place, value_head: bool = False) -> nn.Module:
    """The policy, or its frozen reference, from `model.path` or from noise. Raises ConfigError."""
    with torch.device("meta"):
        model = Transformer(shape, vocab, value_head)
    return _materialise(config, model, place, config.model.path if config.model.init == "load" else None, "model.path")


def build_scorer(config: Config, path: str, field: str, place: Place) -> nn.Module:
    """Critic or reward model from a folder; empty is `model.path` (or noise, where that is) under a head of zeros."""
    shape = read_shape(path or config.model.path, field)
    with torch.device("meta"):
        model = Scorer(shape)
    return _materialise(config, model, place, path or (config.model.path if config.model.init == "load" else None), field)


def _materialise(config: Config, model: nn.Module, place: Place, path: str | None, field: str) -> nn.Module:
    """Shard a model that is on meta, and give it fp32 masters: rows of the folder's tensors, drawn ones without a folder."""
    mesh, device = place
    bf16 = config.model.dtype == "bfloat16"
    # Inputs stay as they are: casting them would round the fp32 RoPE tables.
    policy = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, torch.float32, cast_forward_inputs=False)
    for layer in model.model.layers:
        layer.recompute = config.learner.activation_checkpointing
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    if getattr(model, "with_values", None):
        register_fsdp_forward_method(model, "with_values")
    model.to_empty(device=device)
    if isinstance(model, Transformer):
        model.tie()
    parameters = dict(model.named_parameters())
    folder = open_folder(path, field, {name: tuple(parameter.shape) for name, parameter in parameters.items()}, model.shape.tied)
    shard, shards = mesh.get_local_rank("shard"), mesh.size(mesh.mesh_dim_names.index("shard"))
    for name, parameter in parameters.items():
        first, last = shard_rows(parameter.shape[0], shards, shard)
        local = parameter.to_local()
        assert local.shape[0] == last - first, f"{name}: FSDP2 cut it at other rows than the transfer plan assumes"
        if folder and name in folder.names():
            rows = folder.rows(name, first, last)
        else:
            rows = init_tensor(name, parameter.shape, model.shape, config.seed)[first:last]
        with torch.no_grad():
            local.copy_(rows)
    return model


def open_folder(path: str | None, field: str, shapes: dict[str, tuple[int, ...]], tied: bool) -> WeightFolder | None:
    """The folder's weights, checked against `shapes`; a head may be missing where a fresh one of zeros will do, or be of the
    other kind: a critic starts from a language model, a policy never from a scorer. Raises ConfigError.
    """
    if path is None:
        return None
    folder = WeightFolder(path, field)
    stored = folder.names()
    wanted = {name: shape for name, shape in shapes.items() if name != "score.weight" or name in stored}
    if "score.weight" in shapes and "score.weight" not in stored and field == "reward_model.path":
        raise ConfigError(f"`{field}` = {path!r}: no score.weight there; give a sequence-classification folder with one label")
    try:
        check_names(folder, wanted, tied, ignored=HEADS - wanted.keys() if "score.weight" in shapes else set())
    except ConfigError as error:
        raise ConfigError(f"`{field}` = {path!r}: {error}") from None
    return folder


def park(model: nn.Module, device: torch.device) -> None:
    """Move a model's shards to `device`: to the host while another computes, and back (verl moves FSDP2 models the same way)."""
    if next(model.parameters()).device.type != device.type:
        model.to(device)

